//! What each command does.

mod bench;
mod daemon;
mod demo;
mod diagnose;
mod disk;
mod explain;
mod lab;
pub mod profile;
mod status;
mod top;
mod volume;

use clap::CommandFactory;
use weir_node::units::{Period, PeriodError};

use crate::cli::{Cli, Command};
use crate::failure::Failure;

/// Carries out a command line.
pub fn run(cli: Cli) -> Result<(), Failure> {
    let global = &cli.global;
    match cli.command {
        Command::Node(arguments) => daemon::node(&arguments),
        Command::Registry(arguments) => daemon::registry(&arguments),
        Command::Lab(command) => lab::run(global, command),
        Command::Volume(command) => volume::run(global, command),
        Command::Disk(command) => disk::run(global, command),
        Command::Status => status::status(global),
        Command::Events => status::events(global),
        Command::Bench(arguments) => bench::run(global, &arguments),
        Command::Diagnose(arguments) => diagnose::run(global, &arguments),
        Command::Top { every, count } => top::run(global, every, count),
        Command::Explain { disk, over } => explain::run(global, &disk, over),
        Command::Profile(command) => profile::run(global, command),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "weir", &mut script);
            crate::output::say(&String::from_utf8_lossy(&script))
        }
        Command::Demo(arguments) => demo::run(&arguments),
    }
}

/// A period; beside the other units `m` stands for minutes, since a budget of milliseconds makes no sense.
pub fn budget(text: &str) -> Result<Period, PeriodError> {
    let minutes =
        text.trim().strip_suffix('m').filter(|number| number.ends_with(|c: char| c.is_ascii_digit()));
    minutes.map_or_else(|| text.parse(), |number| format!("{number}min").parse())
}
