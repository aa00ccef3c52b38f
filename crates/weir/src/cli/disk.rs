//! `weir disk`

use clap::{Args, Subcommand};
use weir_block::size::{Size, parse_size_above_zero};
use weir_node::api::{DiskLimit, Medium};
use weir_node::units::Period;

use super::snapshot::{CloneSource, parse_source};
use crate::completion;

#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Create a disk. It takes no space until it is written, unless --thick is given; on an NBD server, it is an export with what that has.
    Create {
        /// Its name: 1 to 64 letters, digits, '-', '_', '.'.
        name: String,
        /// The volume to put it in.
        #[arg(long, add = completion::volumes())]
        volume: String,
        /// Size, for example 20GiB. In a volume that is an NBD server: may be left out, and is that of the export.
        #[arg(long, value_parser = parse_size_above_zero)]
        size: Option<Size>,
        /// In a volume that is an NBD server: the export that the disk is, by default that of the disk's name. The disk holds what the export
        /// holds; nothing is written to it.
        #[arg(long, value_name = "NAME")]
        export: Option<String>,
        /// Give the disk all of its space at once, so that it never runs out of it; on a LUN, with zeroes written there, so that all of its I/O
        /// goes to the LUN directly. That takes as long as writing the LUN does. If it fails or is interrupted, the disk is removed. Snapshots
        /// share blocks, so writes after one need new space.
        #[arg(long, conflicts_with = "export")]
        thick: bool,
        /// When a write is acknowledged. write-through: once the storage has it. write-back+N: once the write logs of the owner
        /// and of N = 0, 1 or 2 other nodes have it, in other fault domains where possible. Strict forms fix where the replicas
        /// are: write-back+1in, +2in (in the owner's fault domain), +1out, +2out (in others), +1in+1out. A policy that the
        /// cluster cannot meet is write-through until it can.
        #[arg(long, default_value = "write-back+1")]
        policy: String,
        /// Where the write log is kept, on the owner and on every replica: ram or flash. Nodes must offer it.
        #[arg(long, default_value = "ram")]
        medium: Medium,
        /// Logical block: 512 or 4096 bytes. Default: 512; on a LUN, 4096, the only one there; on an NBD server, the smallest of them that it
        /// allows.
        #[arg(long, value_name = "BYTES")]
        block: Option<u32>,
        #[command(flatten)]
        limit: LimitArgs,
    },
    /// Create disks that begin as a snapshot of another one, or one as that disk is now, and share its blocks.
    ///
    /// It takes hardly any time and no space until one of them is written, unless --copy is given. Neither changes the other, and either can be deleted. The
    /// filesystem must have reflinks (XFS, btrfs), or --copy be given.
    #[command(
        after_long_help = "Examples:\n  weir disk clone golden@v1 vm1\n  weir disk clone golden@v1 vm{1..200}\n  weir disk clone db db-test --policy write-through"
    )]
    Clone {
        /// The disk, or one of its snapshots.
        #[arg(value_name = "DISK[@SNAPSHOT]", value_parser = parse_source, add = completion::snapshots_and_disks())]
        source: CloneSource,
        /// The name of the new disk, in the same volume. Several begin as one snapshot; `--output json` lists them.
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
        /// Copy all blocks, through qemu-img on this host, so that none is shared: also where the filesystem has no reflinks. There, nobody may
        /// use the disk meanwhile. If the copy fails or is interrupted, the new disk is removed. Afterwards it is open.
        #[arg(long)]
        copy: bool,
        /// Only say whether it could be made, in how many extents the source is, and how long the clone would take.
        #[arg(long, conflicts_with = "copy")]
        dry_run: bool,
        /// As of `weir disk create`.
        #[arg(long, default_value = "write-back+1")]
        policy: String,
        /// As of `weir disk create`.
        #[arg(long, default_value = "ram")]
        medium: Medium,
        #[command(flatten)]
        limit: LimitArgs,
    },
    /// All disks.
    List,
    /// One disk: owner, policies, watermarks, NBD URIs.
    Show {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
    },
    /// Change the requested policy while the disk is in use. The effective policy follows when the cluster can meet it.
    Policy {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
        /// write-through, write-back+N with N = 0, 1, 2, or a strict form such as write-back+1in+1out; see `weir disk
        /// create --help`.
        policy: String,
    },
    /// Limit the rate at which the clients of a disk are served, while it is in use.
    ///
    /// The options replace the limit that the disk has: a rate that is not given is not limited. Reads, writes, zeroing and
    /// discards count as a request each, whatever their length; the bytes are those of reads and writes, because the others
    /// move none. Flushes do not count. What would exceed a rate waits, first come, first served, all clients of the disk
    /// together; it gets no error. A request larger than the burst waits until the whole burst is allowed, and those behind
    /// it make up for it.
    ///
    /// The limit belongs to the disk: it holds on whichever node owns it, where the burst begins anew. While the disk
    /// closes or moves, requests that wait are served at once. Loads inside a node (`weir bench --layer`, and `weir
    /// diagnose` below the export) are not limited. `weir explain` and `weir disk show` tell what has waited.
    #[command(after_long_help = "Examples:\n  weir disk limit db --iops 2000 --bytes-per-second 100MiB\n  \
                           weir disk limit db --iops 500 --burst 5s\n  weir disk limit db --none")]
    Limit {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
        #[command(flatten)]
        limit: LimitArgs,
        /// Remove the limit.
        #[arg(long, conflicts_with_all = ["iops", "bytes_per_second", "burst"])]
        none: bool,
    },
    /// Make a node the owner of a disk that has none, and print its NBD URIs.
    Export {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
        /// The node; default: the one asked.
        #[arg(long, value_name = "NODE", add = completion::nodes())]
        on: Option<String>,
        /// Open a disk whose log is lost. Writes that were acknowledged after the last checkpoint are missing then.
        #[arg(long)]
        accept_loss: bool,
    },
    /// Move a disk to another node while it is in use: nothing is drained, clients reconnect there.
    ///
    /// The node gets a complete copy of the write log first, if it has none; then ownership changes hands, and the log
    /// of the former owner stays as a replica. A disk in write-through or write-back+0 has no replica to go on from:
    /// it is drained and closed first.
    Move {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
        /// The node.
        #[arg(long, value_name = "NODE", add = completion::nodes())]
        to: String,
    },
    /// Prepare a live migration: clients on the target node may use the disk before it moves there.
    ///
    /// That node gets a complete copy of the write log (under a strict policy only at the switch-over). From then on, reads of
    /// clients that connect to it are answered by the owner, and their first write waits until the disk has moved there; without this
    /// command a node forwards all requests of its clients, and the disk stays. So start the target's QEMU with the disk at the export of its own node, and migrate: the disk follows
    /// when the guest goes on. Ends when the disk has moved or is closed, and when that node is gone.
    ///
    /// Example: weir disk follow db --to n2
    Follow {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
        /// The node.
        #[arg(long, value_name = "NODE", required_unless_present = "stop", add = completion::nodes())]
        to: Option<String>,
        /// The disk stays where it is; clients on other nodes are refused again.
        #[arg(long, conflicts_with = "to")]
        stop: bool,
    },
    /// Grow a disk while it is in use. NBD clients see the new size when they connect again. What it gains is thin, also of a disk made with --thick.
    Resize {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
        /// The new size; not less than now.
        #[arg(value_parser = parse_size_above_zero)]
        size: Size,
    },
    /// Copy a disk on a LUN to few extents, so that snapshots and clones of it take less time.
    ///
    /// They share one extent after the other. The first write to each 4 KiB after a snapshot makes a new one, so a disk is in many after a while; `weir
    /// volume du` shows them. The disk must have no clients. If it is open, it is destaged and closed; `weir disk export` opens it
    /// again. The copy needs free space for what the disk holds, and for its holes of up to 64 KiB. What it shared with snapshots and clones is there twice
    /// afterwards, until those are deleted. If the volume gets another coordinator meanwhile, the copy ends, and the disk is as
    /// it was.
    #[command(
        after_long_help = "Examples:\n  weir disk compact golden --dry-run\n  weir disk compact golden"
    )]
    Compact {
        /// Its name.
        #[arg(add = completion::disks())]
        name: String,
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Delete disks and everything on them. An export of an NBD server keeps its content.
    ///
    /// On a terminal it asks for the name to be typed again, or for "3 disks", if there are several; elsewhere it needs --yes. Of several disks none is deleted if one
    /// is not there, or is in use.
    #[command(after_long_help = "Examples:\n  weir disk delete db\n  weir disk delete vm{1..200} --dry-run")]
    Delete {
        /// The disk's name. Several are checked before the first is deleted; `--output json` lists them.
        #[arg(value_name = "NAME", required = true, add = completion::disks())]
        names: Vec<String>,
        /// Only say what would be deleted.
        #[arg(long)]
        dry_run: bool,
        /// Delete without asking.
        #[arg(long)]
        yes: bool,
        /// Also while clients are connected, when its owner is gone, or cannot open it because its backing is gone. Writes that only
        /// the write log has are lost then. A block device or an export, which stays, gets them first, if the disk is open.
        #[arg(long)]
        force: bool,
        /// As --force, and without waiting for a block device or an export that takes nothing: writes that only the write log has
        /// are lost.
        #[arg(long)]
        discard: bool,
    },
}

/// The rates of a limit.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Most requests per second.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iops: Option<u64>,
    /// Most bytes per second, for example 100MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size_above_zero)]
    pub bytes_per_second: Option<Size>,
    /// After a pause, what the rates allow in this time passes at once: 1ms to 1h. Default: 100ms.
    #[arg(long, value_name = "TIME")]
    pub burst: Option<Period>,
}

impl LimitArgs {
    /// The limit, if a rate is given.
    ///
    /// # Errors
    /// A burst without a rate.
    pub fn limit(&self) -> Result<Option<DiskLimit>, String> {
        let LimitArgs { iops, bytes_per_second, burst } = self;
        if iops.is_none() && bytes_per_second.is_none() {
            return match burst {
                Some(_) => Err("--burst needs a rate: add --iops or --bytes-per-second".into()),
                None => Ok(None),
            };
        }
        let burst_ms =
            burst.map_or(DiskLimit::BURST_MS, |burst| u64::try_from(burst.0.as_millis()).unwrap_or(u64::MAX));
        Ok(Some(DiskLimit { iops: *iops, bytes_per_second: bytes_per_second.map(|size| size.0), burst_ms }))
    }
}
