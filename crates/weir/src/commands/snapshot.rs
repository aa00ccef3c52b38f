//! `weir snapshot`

use std::collections::BTreeSet;

use weir_node::api::{
    ApiErrorKind, CreateSnapshot, LookAtLayout, RollBack, RolledBack, Sharing, SnapshotView, Snapshots,
};
use weir_node::client::Client;
use weir_node::units::about;

use super::compact::{self, planned};
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
        SnapshotCommand::Create { snapshot: SnapshotName { disk, name }, dry_run: true, .. } => {
            let snapshot = CreateSnapshot { name: name.clone(), group: Vec::new() };
            let wanted = LookAtLayout { snapshot: None, before: Some(Sharing::Snapshot(snapshot)) };
            print(global.output, &client.layout(&disk, &wanted)?, |layout| {
                planned(layout, &format!("make snapshot {disk}@{name}"))
            })
        }
        SnapshotCommand::Create { snapshot: SnapshotName { disk, name }, group, .. } => {
            group.iter().chain([&disk]).for_each(|disk| compact::tell(&client, disk, None));
            let snapshots = client.create_snapshot(&disk, &name, &group)?;
            print(global.output, &Snapshots { snapshots }, rows)
        }
        SnapshotCommand::List { disk } => {
            let Some(disk) = disk else { return list_all(global, &client) };
            print(global.output, &Snapshots { snapshots: client.snapshots(&disk)? }, rows)
        }
        SnapshotCommand::Rollback {
            snapshot: SnapshotName { disk, name: snapshot },
            keep_as,
            discard_current,
            dry_run,
            yes,
        } => {
            let wanted = |dry_run| RollBack {
                snapshot: snapshot.clone(),
                keep_as: keep_as.clone(),
                discard_current,
                dry_run,
            };
            if !dry_run && !yes {
                let would = client.roll_back(&disk, &wanted(true))?;
                confirm(&rolled_back(&would), &format!("{disk}@{snapshot}"))?;
            }
            print(global.output, &client.roll_back(&disk, &wanted(dry_run))?, rolled_back)
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

/// Those of all disks that can have any. One disk that cannot be asked hides no other one's: its error comes after the list.
fn list_all(global: &Global, client: &Client) -> Result<(), Failure> {
    let (mut snapshots, mut failed) = (Vec::new(), None);
    // Whoever does not answer for the disks of a volume is asked once.
    let mut silent = BTreeSet::new();
    for disk in client.disks()? {
        let asked = (disk.volume, disk.owner);
        if silent.contains(&asked) {
            continue;
        }
        match client.snapshots(&disk.name) {
            Ok(found) => snapshots.extend(found),
            // It has been deleted since; or it is no file of Weir's, and so has none.
            Err(error) if matches!(error.kind, ApiErrorKind::NotFound | ApiErrorKind::Refused) => {}
            Err(error) => {
                if error.kind == ApiErrorKind::Unavailable {
                    silent.insert(asked);
                }
                failed = failed.or(Some(error));
            }
        }
    }
    print(global.output, &Snapshots { snapshots }, rows)?;
    failed.map_or(Ok(()), |error| Err(error.into()))
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

fn rolled_back(one: &RolledBack) -> String {
    let RolledBack { disk, snapshot, made, .. } = one;
    let (verb, becomes, closed) = match one.done {
        true => ("rolled back", "is", "is closed now"),
        false => ("would roll back", "becomes", "would be closed"),
    };
    let content = match &one.kept {
        Some(kept) => format!("its content until then {becomes} {disk}@{kept}"),
        None => "its content until then is discarded".to_owned(),
    };
    let mut text = format!("{verb} {disk} to {disk}@{snapshot}, made {made}; {content}");
    if one.was_open {
        text += &format!("\nit {closed}: `weir disk export {disk}` opens it again");
    }
    text
}
