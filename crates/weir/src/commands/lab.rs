//! `weir lab`

use std::path::Path;

use serde::Serialize;
use weir_lab::{Ending, Lab, LabConfig, NodeReport};

use crate::cli::{Global, LabCommand};
use crate::cluster::{lab, lab_dir};
use crate::failure::Failure;
use crate::output::{print, say, table};

#[derive(Serialize)]
struct Report {
    dir: std::path::PathBuf,
    registry: weir_lab::process::ProcessState,
    nodes: Vec<NodeReport>,
}

/// Carries out a `weir lab` command.
pub fn run(global: &Global, command: LabCommand) -> Result<(), Failure> {
    match command {
        LabCommand::Up { dir, nodes, lease, log } => {
            let dir = dir.unwrap_or_else(|| lab_dir(global));
            let mut config = LabConfig::new(dir, std::env::current_exe()?);
            (config.nodes, config.lease_ttl, config.log) = (nodes, lease.0, log);
            let lab = Lab::up(&config)?;
            report(global, &lab)?;
            hint(global, lab.dir())?;
            lab.detach();
            Ok(())
        }
        LabCommand::Status => report(global, &lab(global)?),
        LabCommand::Down { wait, force } => {
            let ending = match (wait, force) {
                (true, _) => Ending::Wait,
                (_, true) => Ending::Force,
                _ => Ending::Refuse,
            };
            Ok(lab(global)?.down_as(ending)?)
        }
        LabCommand::Kill { node } => Ok(lab(global)?.kill(&node)?),
        LabCommand::Pause { node } => Ok(lab(global)?.pause(&node)?),
        LabCommand::Resume { node } => Ok(lab(global)?.resume(&node)?),
        LabCommand::Start { node } => {
            let mut lab = lab(global)?;
            lab.start(&node)?;
            Ok(())
        }
    }
}

fn report(global: &Global, lab: &Lab) -> Result<(), Failure> {
    let report = Report { dir: lab.dir().to_owned(), registry: lab.registry_state(), nodes: lab.report() };
    print(global.output, &report, |report| {
        let rows = report.nodes.iter().map(|node| {
            let owned = node.status.as_ref().map_or_else(String::new, |status| {
                let owned = status.disks.iter().filter(|disk| disk.owner.as_ref() == Some(&status.node));
                owned.map(|disk| disk.name.as_str()).collect::<Vec<_>>().join(" ")
            });
            let pid = node.node.process.map_or_else(String::new, |process| process.pid.to_string());
            let state = format!("{:?}", node.state).to_lowercase();
            vec![
                node.node.name.clone(),
                state,
                pid,
                node.node.nbd_tcp.to_string(),
                owned,
                node.node.log.display().to_string(),
            ]
        });
        table(&["NODE", "PROCESS", "PID", "NBD", "OWNS", "LOG"], &[2], rows)
    })
}

/// What to do next, for people.
fn hint(global: &Global, dir: &Path) -> Result<(), Failure> {
    if global.output == crate::cli::Output::Json {
        return Ok(());
    }
    let elsewhere = if dir.file_name().is_some_and(|name| name == "weir-lab")
        && dir.parent() == std::env::current_dir().ok().as_deref()
    {
        String::new()
    } else {
        format!("\n  export WEIR_LAB={}", dir.display())
    };
    say(&format!(
        "\nThe lab runs. Next:{elsewhere}\n  mkdir -p /tmp/pool && weir volume create pool --path /tmp/pool\n  \
         weir disk create d1 --volume pool --size 1GiB --policy write-back+1\n  weir disk export d1"
    ))
}
