//! `weir profile`: its arguments and what its help says.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use weir_node::units::Period;

use super::prefill::PrefillArgs;
use crate::completion;

/// Shown below the help.
pub(super) const EXAMPLES: &str = "\
Every open disk is profiled all the time, in about 1.2 MiB of memory; `show` prints what was seen since the disk was opened on its \
node. Blocks are 4 KiB. Reuse, working set, caches and logs are estimated from a sample of blocks (SHARDS, FAST 2015), to about 2 \
points. The profile of a disk that moves or is opened again starts anew.

Examples:
  weir profile show db                      since the disk was opened
  weir profile record db --for 10m          the next ten minutes, kept in
                                            db.profile.json
  weir profile show --from db.profile.json
  weir profile export --from db.profile.json --format fio \\
    --target /dev/nvme1n1 > db.fio
  weir profile export db --format bench --target scratch.img > db.jobs
  weir bench --jobs db.jobs --destroy
  weir profile replay --from db.profile.json --target scratch.img --for 1m
  blkparse -i sda | weir profile import - --to sda.profile.json";

/// Commands for profiles.
#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// Record the profile of a disk for a time, from now on, in a file.
    Record {
        /// The disk.
        #[arg(add = completion::disks())]
        disk: String,
        /// Length, such as 10m: 100 ms to 7 days.
        #[arg(long = "for", value_name = "TIME", default_value = "1 min")]
        length: Period,
        /// File for the profile; default: DISK.profile.json.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// Print the profile of a disk since it was opened, or a recorded profile.
    Show {
        #[command(flatten)]
        source: ProfileSource,
    },
    /// Print a load that resembles the profile.
    ///
    /// Reads and writes, random and sequential ones, become a job each, with their rates and sizes. The random ones get the
    /// distribution (uniform, Zipf, or hot and cold) whose miss-ratio curve and working set are closest.
    Export {
        #[command(flatten)]
        source: ProfileSource,
        /// Format of the load.
        #[arg(long, value_enum, default_value = "bench")]
        format: ExportFormat,
        /// The target: a file, a block device, nbd://HOST:PORT/DISK, nbd+unix:///DISK?socket=PATH, or null.
        #[arg(long)]
        target: String,
        /// Length of the load; default: the length of the profile.
        #[arg(long = "for", value_name = "TIME")]
        length: Option<Period>,
    },
    /// Run a load that resembles the profile, and print both profiles side by side.
    ///
    /// Differences are in percent of the original; those of percentages are in points. Hits are those of caches that are
    /// simulated, with the requests that the load has made.
    Replay {
        #[command(flatten)]
        source: ProfileSource,
        /// The target: a file, a block device, nbd://HOST:PORT/DISK, nbd+unix:///DISK?socket=PATH, or null.
        #[arg(long)]
        target: String,
        /// Length of the load; default: the length of the profile.
        #[arg(long = "for", value_name = "TIME")]
        length: Option<Period>,
        /// Overwrite what the target holds.
        #[arg(long)]
        destroy: bool,
        /// Create the target, a file, if it does not exist.
        #[arg(long)]
        create: bool,
        /// Also while clients are connected to the target's disk: a load that writes destroys their data.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        prefill: PrefillArgs,
    },
    /// Make a profile of a trace: text of blkparse, a fio I/O log (version 2 or 3), or a binary vscsi trace.
    Import {
        /// The trace; `-` for standard input.
        trace: PathBuf,
        /// Which device (blkparse: MAJOR,MINOR) or file (fio), when the trace has several.
        #[arg(long, value_name = "NAME")]
        device: Option<String>,
        /// File for the profile; default: TRACE.profile.json.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
}

/// Where a profile comes from.
#[derive(Debug, Args)]
pub struct ProfileSource {
    /// The disk; its profile since it was opened.
    #[arg(required_unless_present = "from", conflicts_with = "from", add = completion::disks())]
    pub disk: Option<String>,
    /// A recorded profile instead; several, of one period each, are added up.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub from: Vec<PathBuf>,
}

/// The form of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// Jobs for `weir bench --jobs`, as JSON.
    Bench,
    /// A job file of fio.
    Fio,
}
