//! `weir lab`

use std::collections::BTreeSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use weir_lab::process::ProcessState;
use weir_lab::{Ending, Lab, LabConfig, NodeReport, REGISTRY};
use weir_node::units::count;

use crate::cli::LabCommand;
use crate::cluster::{lab, lab_dir};
use crate::failure::Failure;
use crate::options::{Global, Output};
use crate::output::{note, print, say, table};

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    dir: PathBuf,
    registry: ProcessState,
    nodes: Vec<NodeReport>,
}

/// The result of an order to a node or to the registry.
#[derive(Serialize)]
struct Action {
    schema: &'static str,
    /// `kill`, `pause`, `resume` or `start`.
    action: &'static str,
    /// The node, or `registry`.
    process: String,
    /// Its process id; for a killed process, its last one.
    pid: Option<u32>,
    /// Its present state.
    state: ProcessState,
}

/// The end of a lab without data loss.
#[derive(Serialize)]
struct Ended {
    schema: &'static str,
    action: &'static str,
    dir: PathBuf,
    /// The nodes that it had.
    nodes: Vec<String>,
}

/// Executes a `weir lab` command.
pub fn run(global: &Global, command: LabCommand) -> Result<(), Failure> {
    match command {
        LabCommand::Up { dir, nodes, lease, log, luns, fence_command } => {
            let dir = dir.unwrap_or_else(|| lab_dir(global));
            let mut config = LabConfig::new(dir, std::env::current_exe()?);
            (config.nodes, config.lease_ttl, config.log) = (nodes, lease.0, log);
            config.luns = luns.iter().map(std::path::absolute).collect::<Result<_, _>>()?;
            config.fence_command = fence_command.map(std::path::absolute).transpose()?;
            check_luns(&config)?;
            let lab = Lab::up(&config)?;
            report(global, &lab)?;
            hint(global, lab.dir(), config.luns.first().map(PathBuf::as_path))?;
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
            down(global, lab(global)?, ending)
        }
        LabCommand::Kill { node } => act(global, "kill", &node, |lab| lab.kill(&node)),
        LabCommand::Pause { node } => act(global, "pause", &node, |lab| lab.pause(&node)),
        LabCommand::Resume { node } => act(global, "resume", &node, |lab| lab.resume(&node)),
        LabCommand::Start { node } => act(global, "start", &node, |lab| lab.start(&node)),
    }
}

/// Performs an action on one process, and prints it.
fn act(
    global: &Global,
    action: &'static str,
    name: &str,
    carry_out: impl FnOnce(&mut Lab) -> Result<(), weir_lab::LabError>,
) -> Result<(), Failure> {
    let mut lab = lab(global)?;
    let before = lab.process(name)?;
    carry_out(&mut lab)?;
    let process = lab.process(name)?.or(before);
    let (pid, state) = (process.map(|process| process.pid), lab.state_of(name)?);
    let done = Action { schema: "weir.lab-action/1", action, process: name.to_owned(), pid, state };
    let nbd = lab.node(name).ok().map(|node| format!(", NBD at {}", node.nbd_tcp)).unwrap_or_default();
    print(global.output, &done, |done| {
        let pid = done.pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
        match done.action {
            "kill" => format!("{name}{pid} was killed; `weir lab start {name}` starts it again"),
            "pause" => format!("{name}{pid} is paused; `weir lab resume {name}` lets it go on"),
            "resume" => format!("{name}{pid} goes on"),
            _ => format!("{name}{pid} runs{nbd}"),
        }
    })
}

fn down(global: &Global, lab: Lab, ending: Ending) -> Result<(), Failure> {
    let (dir, nodes) = (lab.dir().to_owned(), lab.nodes().iter().map(|node| node.name.clone()).collect());
    lab.down_as(ending, note)?;
    let ended = Ended { schema: "weir.lab-action/1", action: "down", dir, nodes };
    print(global.output, &ended, |ended| {
        format!(
            "the lab in {} has ended ({} and the registry); every acknowledged write is in the storage",
            ended.dir.display(),
            ended.nodes.join(", ")
        )
    })
}

fn report(global: &Global, lab: &Lab) -> Result<(), Failure> {
    let report = Report {
        schema: "weir.lab/1",
        dir: lab.dir().to_owned(),
        registry: lab.registry_state(),
        nodes: lab.report(),
    };
    print(global.output, &report, |report| {
        let word = |state: ProcessState| format!("{state:?}").to_lowercase();
        let pid = lab.process(REGISTRY).ok().flatten().map(|process| process.pid.to_string());
        let of_registry = vec![
            REGISTRY.to_owned(),
            word(report.registry),
            pid.filter(|_| report.registry != ProcessState::Gone).unwrap_or_default(),
            String::new(),
            String::new(),
        ];
        let rows = report.nodes.iter().map(|node| {
            let owned = node.status.as_ref().map_or_else(String::new, |status| {
                let owned = status.disks.iter().filter(|disk| disk.owner.as_ref() == Some(&status.node));
                owned.map(|disk| disk.name.as_str()).collect::<Vec<_>>().join(" ")
            });
            let pid = node.node.process.filter(|_| node.state != ProcessState::Gone);
            vec![
                node.node.name.clone(),
                word(node.state),
                pid.map_or_else(String::new, |process| process.pid.to_string()),
                node.node.nbd_tcp.to_string(),
                owned,
            ]
        });
        let table = table(&["NODE", "PROCESS", "PID", "NBD", "OWNS"], &[2], rows.chain([of_registry]));
        let registry = match report.registry {
            ProcessState::Running => String::new(),
            state => format!(
                "\n\nThe registry is {}: disks go on, but nothing can be changed or taken over until `weir lab {}`",
                word(state),
                if state == ProcessState::Paused { "resume registry" } else { "start registry" }
            ),
        };
        format!("lab in {0}; logs in {0}/NODE/log\n\n{table}{registry}", report.dir.display())
    })
}

/// Each node has a path of its own, and a fence of one node must not be one of another.
fn check_luns(config: &LabConfig) -> Result<(), Failure> {
    let refused = |message: String| Err(Failure::usage(message));
    if config.luns.len() > config.nodes {
        let (luns, nodes) = (count(config.luns.len() as u64, "LUN"), count(config.nodes as u64, "node"));
        return refused(format!("{luns} for {nodes}: each node has at most one path"));
    }
    let mut known = BTreeSet::new();
    for lun in &config.luns {
        let found = std::fs::metadata(lun);
        let found = found.map_err(|error| Failure::usage(format!("--lun {}: {error}", lun.display())))?;
        if !found.file_type().is_block_device() {
            let hint = "`losetup --find --show --direct-io=on FILE` makes a block device of a file, once for each node";
            return Err(Failure::usage(format!("--lun {} is no block device", lun.display())).hint(hint));
        }
        if !known.insert(found.rdev()) {
            return refused(format!(
                "--lun {} is there twice: each node needs a device of its own",
                lun.display()
            ));
        }
    }
    let Some(command) = &config.fence_command else { return Ok(()) };
    let is_program =
        std::fs::metadata(command).is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0);
    match is_program {
        true => Ok(()),
        false => refused(format!("--fence-command {} is no program that can be executed", command.display())),
    }
}

/// The next step, for people.
fn hint(global: &Global, dir: &Path, lun: Option<&Path>) -> Result<(), Failure> {
    if global.output == Output::Json {
        return Ok(());
    }
    let elsewhere = if dir.file_name().is_some_and(|name| name == "weir-lab")
        && dir.parent() == std::env::current_dir().ok().as_deref()
    {
        String::new()
    } else {
        format!("\n  export WEIR_LAB={}", dir.display())
    };
    let create = match lun {
        Some(lun) => format!(
            "weir volume create pool --kind lun --path {} --format xfs --dry-run\n  \
             # the same without --dry-run, with the --identity that it says",
            lun.display()
        ),
        None => "mkdir -p /tmp/pool && weir volume create pool --path /tmp/pool".to_owned(),
    };
    say(&format!(
        "\nThe lab runs. Next:{elsewhere}\n  {create}\n  \
         weir disk create d1 --volume pool --size 1GiB --policy write-back+1\n  weir disk export d1"
    ))
}
