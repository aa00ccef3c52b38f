//! `weir snapshot`

use clap::Subcommand;

use crate::completion;

pub const EXAMPLES: &str = "Examples:
  weir snapshot create db@before-upgrade
  weir snapshot create data@monday --group wal,index
  weir snapshot list db
  weir disk clone db@before-upgrade db-test
  weir snapshot rollback db@before-upgrade
  weir snapshot delete db@before-upgrade";

#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Make a snapshot of a disk while it is in use: it holds every write that was acknowledged before.
    ///
    /// It shares its blocks with the disk, so it takes no space at first and hardly any time: the filesystem must have reflinks (XFS, btrfs). The
    /// guest goes on meanwhile; if nothing in it has flushed its own caches, the snapshot is what a power cut would leave. The first
    /// write to each 4 KiB after a snapshot copies them, on a LUN by its coordinator.
    Create {
        /// The disk and the new snapshot's name, as in db@monday. At most 64 letters, digits, '-', '_', '.'.
        #[arg(value_name = "DISK@SNAPSHOT", value_parser = parse)]
        snapshot: SnapshotName,
        /// Also snapshots of these disks of the volume, of the same name and at the same point in time: a database whose data and log
        /// are on different disks. Their clients wait for a moment.
        #[arg(long, value_name = "DISK", value_delimiter = ',', add = completion::disks())]
        group: Vec<String>,
        /// Only say whether it could be made, in how many extents the disk is, and how long the snapshot would take.
        #[arg(long, conflicts_with = "group")]
        dry_run: bool,
    },
    /// The snapshots of a disk, or of all disks; the oldest first.
    List {
        /// The disk.
        #[arg(add = completion::disks())]
        disk: Option<String>,
    },
    /// Give a disk the content of one of its snapshots.
    ///
    /// The present content becomes another snapshot first, unless --discard-current is given. The disk must have no clients. If it is open, it
    /// is destaged and closed; `weir disk export` opens it again. It keeps its size: what it has grown by since the snapshot reads as
    /// zeroes. Other snapshots and clones stay as they are.
    ///
    /// On a terminal it asks for the name to be typed again; elsewhere it needs --yes.
    Rollback {
        /// The disk and the snapshot.
        #[arg(value_name = "DISK@SNAPSHOT", value_parser = parse, add = completion::snapshots())]
        snapshot: SnapshotName,
        /// The name of the snapshot that keeps the present content. Otherwise before-rollback- and the time.
        #[arg(long, value_name = "NAME", conflicts_with = "discard_current")]
        keep_as: Option<String>,
        /// Keep no snapshot of the present content.
        #[arg(long)]
        discard_current: bool,
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
        /// Do it without asking.
        #[arg(long)]
        yes: bool,
    },
    /// Delete a snapshot. Its disk, other snapshots and clones stay as they are.
    ///
    /// On a terminal it asks for the name to be typed again; elsewhere it needs --yes.
    Delete {
        /// The disk and the snapshot.
        #[arg(value_name = "DISK@SNAPSHOT", value_parser = parse, add = completion::snapshots())]
        snapshot: SnapshotName,
        /// Only say what would be deleted.
        #[arg(long)]
        dry_run: bool,
        /// Delete without asking.
        #[arg(long)]
        yes: bool,
    },
}

/// A snapshot by the name of its disk and its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotName {
    pub disk: String,
    pub name: String,
}

fn parse(text: &str) -> Result<SnapshotName, String> {
    match text.split_once('@') {
        Some((disk, name)) if !disk.is_empty() && !name.is_empty() => {
            Ok(SnapshotName { disk: disk.to_owned(), name: name.to_owned() })
        }
        _ => Err("a snapshot is named by its disk and its own name, as in db@monday".to_owned()),
    }
}

/// A disk, or a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneSource {
    pub disk: String,
    pub snapshot: Option<String>,
}

/// Reads `DISK` or `DISK@SNAPSHOT`.
pub fn parse_source(text: &str) -> Result<CloneSource, String> {
    if text.contains('@') {
        let SnapshotName { disk, name } = parse(text)?;
        return Ok(CloneSource { disk, snapshot: Some(name) });
    }
    Ok(CloneSource { disk: text.to_owned(), snapshot: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_named_with_their_disks() {
        let named = |text| parse(text).map(|one| (one.disk, one.name)).ok();
        assert_eq!(named("db@monday"), Some(("db".into(), "monday".into())));
        assert!(["db", "@monday", "db@", "@", ""].into_iter().all(|text| named(text).is_none()));
        let source = |text| parse_source(text).map(|one| (one.disk, one.snapshot)).ok();
        assert_eq!(source("db"), Some(("db".into(), None)));
        assert_eq!(source("db@m"), Some(("db".into(), Some("m".into()))));
        assert_eq!(source("db@"), None);
    }
}
