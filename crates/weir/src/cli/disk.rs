//! `weir disk`

use clap::Subcommand;
use weir_block::size::{Size, parse_size_above_zero};
use weir_node::api::Medium;

#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Make a disk. It takes no space until it is written.
    Create {
        /// Its name: 1 to 64 letters, digits, '-', '_', '.'.
        name: String,
        /// The volume to put it in.
        #[arg(long)]
        volume: String,
        /// Size, for example 20GiB.
        #[arg(long, value_parser = parse_size_above_zero, allow_negative_numbers = true)]
        size: Size,
        /// When a write is answered: write-through, once the storage has it; write-back+N, once the write logs of the owner and of
        /// N = 0, 1 or 2 other nodes have it, in other fault domains where there are any. Strict forms say where the
        /// replicas must be and take nothing else: write-back+1in, +2in (in the owner's fault domain), +1out, +2out (in
        /// others), +1in+1out. What cannot be had is write-through until it can.
        #[arg(long, default_value = "write-back+1")]
        policy: String,
        /// Where its write log is kept, on the owner and on every replica: ram, or flash. Nodes must offer it.
        #[arg(long, default_value = "ram")]
        medium: Medium,
        /// Logical block: 512 or 4096 bytes.
        #[arg(long, default_value_t = 512, value_name = "BYTES")]
        block: u32,
    },
    /// All disks.
    List,
    /// One disk: owner, policies, watermarks, where it is exported.
    Show {
        /// Its name.
        name: String,
    },
    /// Change the requested policy, on line. The effective one follows when it can.
    Policy {
        /// Its name.
        name: String,
        /// write-through, write-back+N with N = 0, 1, 2, or with places, for example write-back+1in+1out; see `weir disk
        /// create --help`.
        policy: String,
    },
    /// Make a node the owner of a disk that nobody owns, and print where it is exported.
    Export {
        /// Its name.
        name: String,
        /// The node; default: the one asked.
        #[arg(long, value_name = "NODE")]
        on: Option<String>,
        /// Open a disk whose log is lost. Writes that were acknowledged after the last checkpoint are missing then.
        #[arg(long)]
        accept_loss: bool,
    },
    /// Move a disk to another node while guests use it: nothing is drained, clients reconnect there.
    ///
    /// The node gets a complete copy of the write log first, if it has none; then ownership changes hands, and the log
    /// of the former owner stays as a replica. A disk in write-through or write-back+0 has no replica to go on from:
    /// it is drained and closed first.
    Move {
        /// Its name.
        name: String,
        /// The node.
        #[arg(long, value_name = "NODE")]
        to: String,
    },
    /// Let clients on another node use a disk before it is there, for a live migration of its guest.
    ///
    /// That node gets a complete copy of the write log (under a strict policy only at the switch-over), and from then on its
    /// export takes clients of the disk. Their reads are answered by the owner; their first write waits until the disk has
    /// moved there. So start the target's QEMU with the disk at the export of its own node, and migrate: the disk follows
    /// when the guest goes on. Ends when the disk has moved or is closed, and when that node is gone.
    ///
    /// Example: weir disk follow db --to n2
    Follow {
        /// Its name.
        name: String,
        /// The node.
        #[arg(long, value_name = "NODE", required_unless_present = "stop")]
        to: Option<String>,
        /// The disk stays where it is; clients on other nodes are refused again.
        #[arg(long, conflicts_with = "to")]
        stop: bool,
    },
    /// Grow a disk, on line. NBD clients see the new size when they connect again.
    Resize {
        /// Its name.
        name: String,
        /// The new size; not less than now.
        #[arg(value_parser = parse_size_above_zero, allow_negative_numbers = true)]
        size: Size,
    },
    /// Delete a disk and everything on it.
    Delete {
        /// Its name.
        name: String,
        /// Only say what would be deleted.
        #[arg(long)]
        dry_run: bool,
        /// Yes, delete it.
        #[arg(long)]
        yes: bool,
        /// Also while clients are connected, or when its owner is gone.
        #[arg(long)]
        force: bool,
    },
}
