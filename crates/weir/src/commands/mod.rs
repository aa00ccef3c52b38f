//! The implementation of each command.

mod bench;
mod clones;
mod cluster;
mod compact;
mod confirm;
mod daemon;
mod delete;
mod demo;
mod diagnose;
mod disk;
mod events;
mod explain;
mod image;
mod in_use;
mod incomplete;
mod interrupts;
mod lab;
mod migrate_registry;
mod moved;
mod node;
pub mod profile;
mod rotation;
mod several;
mod snapshot;
mod status;
mod thick;
mod top;
mod trust;
mod volume;

use clap_complete::env::Shells;

use crate::cli::{Cli, Command, DiskCommand, NodeArgs};
use crate::failure::Failure;

/// Executes a command line.
pub fn run(cli: Cli) -> Result<(), Failure> {
    let global = &cli.global;
    match cli.command {
        Command::Node(NodeArgs { command: Some(command), .. }) => node::run(global, command),
        Command::Node(arguments) => daemon::node(&arguments),
        Command::Registry(arguments) => daemon::registry(&arguments),
        Command::Lab(command) => lab::run(global, command),
        Command::Volume(command) => volume::run(global, command),
        Command::Disk(DiskCommand::Clone {
            source, mut names, copy: true, policy, medium, limit, ..
        }) => {
            let limit = limit.limit().map_err(Failure::usage)?;
            match (names.pop(), &names[..]) {
                (Some(name), []) => image::copy(global, &source, (name, policy, medium, limit)),
                _ => Err(Failure::usage("--copy makes one clone: name one disk")),
            }
        }
        Command::Disk(command) => disk::run(global, command),
        Command::Snapshot(command) => snapshot::run(global, command),
        Command::Image(command) => image::run(global, command),
        Command::Cluster(command) => cluster::run(global, command),
        Command::Status => status::status(global),
        Command::Events { follow } => events::run(global, follow),
        Command::Bench(arguments) => bench::run(global, &arguments),
        Command::Diagnose(arguments) => diagnose::run(global, &arguments),
        Command::Top { every, count } => top::run(global, every, count),
        Command::Explain { disk, over } => explain::run(global, &disk, over),
        Command::Profile(command) => profile::run(global, command),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            let shells = Shells::builtins();
            let name = shell.to_string();
            let completer = shells
                .completer(&name)
                .ok_or_else(|| Failure::usage(format!("no completions for {name}")))?;
            completer.write_registration("COMPLETE", "weir", "weir", "weir", &mut script)?;
            if name == "bash" {
                // It would take DISK@SNAPSHOT for three words.
                script.extend(b"COMP_WORDBREAKS=${COMP_WORDBREAKS//@}\n");
            }
            crate::output::say(String::from_utf8_lossy(&script).trim_end())
        }
        Command::Demo(arguments) => demo::run(&arguments),
    }
}
