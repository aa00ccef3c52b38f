//! `weir snapshot`

use weir_node::api::{SnapshotView, Snapshots};
use weir_node::units::about;

use super::confirm::confirm;
use crate::cli::{SnapshotCommand, SnapshotName};
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{print, table};

/// Executes a `weir snapshot` command.
pub fn run(global: &Global, command: SnapshotCommand) -> Result<(), Failure> {
    let client = any_node(global)?;
    match command {
        SnapshotCommand::Create { snapshot: SnapshotName { disk, name }, group } => {
            let snapshots = client.create_snapshot(&disk, &name, &group)?;
            print(global.output, &Snapshots { snapshots }, rows)
        }
        SnapshotCommand::List { disk } => {
            let disks = match disk {
                Some(disk) => vec![disk],
                None => client.disks()?.into_iter().map(|disk| disk.name).collect(),
            };
            let mut snapshots = Vec::new();
            for disk in disks {
                snapshots.extend(client.snapshots(&disk)?);
            }
            print(global.output, &Snapshots { snapshots }, rows)
        }
        SnapshotCommand::Delete { snapshot: SnapshotName { disk, name }, dry_run, yes } => {
            if !dry_run && !yes {
                let would = client.delete_snapshot(&disk, &name, true)?;
                confirm(&deleted(&would, false), &format!("{disk}@{name}"))?;
            }
            print(global.output, &client.delete_snapshot(&disk, &name, dry_run)?, |snapshot| {
                deleted(snapshot, !dry_run)
            })
        }
    }
}

fn rows(Snapshots { snapshots }: &Snapshots) -> String {
    let row = |one: &SnapshotView| {
        vec![format!("{}@{}", one.disk, one.name), one.made.clone(), about(one.size), about(one.allocated)]
    };
    table(&["SNAPSHOT", "MADE", "SIZE", "BLOCKS"], &[2, 3], snapshots.iter().map(row))
}

fn deleted(snapshot: &SnapshotView, done: bool) -> String {
    let verb = if done { "deleted" } else { "would delete" };
    format!("{verb} snapshot {}@{}, made {}", snapshot.disk, snapshot.name, snapshot.made)
}
