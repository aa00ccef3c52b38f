//! `weir diagnose`: its arguments and what its help says.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use weir_node::units::Period;

pub const EXAMPLES: &str = "\
The same cells run on each layer, interleaved in random order, five times, and more often where a step is inconclusive: the backing, \
the accelerator, the NBD export on Unix socket and TCP. The accelerator is measured under its present policy and under every other \
policy that the nodes allow; the requested policy is changed for that, and restored at the end. While a volume on a LUN is redirected \
(`weir volume redirect VOLUME on`), the LUN as the disk's own node reaches it (direct) is a layer below the way through the coordinator \
(file-redirected), so that a run compares the two. Writes destroy the disk's data, \
therefore --destroy. Each hypothesis about a cause predicts a number, and a run of its own at the end confirms or rejects it; only a \
confirmed cause is named. Ctrl-C ends the measurement after the current run and keeps its rows; --resume continues.

--import reads what others measured: FILE is a table (CSV) that names its layers from the bottom up, LAYER=FILE is one layer's fio \
JSON (json+ brings distributions) or DiskSpd XML. Columns of a table: layer, block, access, queue_depth, iops; and if known: \
instead_of, threads, write_through, mib_per_s, mb_per_s, mean_us, p50_us, p99_us, p99_9_us, max_us, ios, errors, runtime_s. The same \
cell again is a repeat.

--stack measures any layers that can be opened and lead to the same storage. They must have one size; with --destroy a marker is \
written at the lowest and must be read at each other, else it is refused. For example:

  # stack.toml: layers from the bottom up
  [[layer]]
  name = \"array\"           # unique
  target = \"/dev/nvme1n1\"  # a file, a block device, nbd://…, nbd+unix://…
  device = \"nvme1n1\"       # optional: the block device that is watched

  [[layer]]
  name = \"share\"
  target = \"nbd://10.0.0.7:10809/array\"
  interface = \"eth1\"       # optional: the network interface that is watched
  pids = [4711]            # optional: processes whose CPU time is watched

  [[layer]]
  name = \"write log\"
  disk = \"db\"              # a layer inside the node that has the disk open
  at = \"accel\"             # backing or accel

Thresholds for --fail-on: likely, confirmed (a layer is named with that grade), inconclusive, rejected (a row cannot be used), \
loss:FACTOR (a step is shown to lose at least so much; the near end of its interval counts).

Exit codes:
  0  done
  1  a threshold of --fail-on failed
  2  the command line, or a file that it names, is not understood
  3  there is no such disk, node, lab or file
  4  refused: clients are connected to the disk, the layers of a stack are not
     the same storage, or the message says what has to happen first
  5  no node, or no server, answers
  6  measured, but not to be trusted: interrupted, generator-limited, most rows
     unusable, or it failed on the way

The JUnit file follows the same rule: a test fails where a threshold of --fail-on is broken (code 1) or the measurement is not to \
be trusted (code 6). A difference without a threshold passes; inconclusive steps and unusable rows are skipped.

Examples:
  weir diagnose --disk scratch --destroy --dry-run
  weir diagnose --disk scratch --destroy --budget 10m
  weir diagnose --disk scratch --destroy --tier standard \\
    --report scratch.html --fail-on confirmed,loss:1.5
  weir diagnose --stack stack.toml --destroy --budget 10m
  weir diagnose --import lab-book.csv
  weir diagnose --import disk=local.json share=share.json guest=guest.xml";

/// Number of cells to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tier {
    /// 6 cells, for a first look: with --runtime '200 ms' and --repeats 2, a few seconds for a layer.
    Probe,
    /// 8 cells: about 6 minutes for a layer.
    Quick,
    /// 60 cells: about three quarters of an hour for a layer.
    Standard,
    /// 336 cells, 4K to 1M, depth 1 to 256, six kinds of load: a night.
    Exhaustive,
}

impl Tier {
    /// In the instrument's words.
    pub fn tier(self) -> weir_diagnose::Tier {
        match self {
            Tier::Probe => weir_diagnose::Tier::Probe,
            Tier::Quick => weir_diagnose::Tier::Quick,
            Tier::Standard => weir_diagnose::Tier::Standard,
            Tier::Exhaustive => weir_diagnose::Tier::Exhaustive,
        }
    }
}

#[derive(Debug, Args)]
pub struct DiagnoseArgs {
    /// The disk.
    #[arg(long, value_name = "NAME", required_unless_present_any = ["import", "stack"], add = crate::completion::disks())]
    pub disk: Option<String>,
    /// Measure the layers that this file describes, from the bottom up; see below.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disk", "policies"])]
    pub stack: Option<PathBuf>,
    /// Read rows instead of measuring: tables, and layers measured by fio or DiskSpd, from the bottom up.
    #[arg(
        long,
        value_name = "FILE|LAYER=FILE",
        num_args = 1..,
        conflicts_with_all = ["disk", "stack", "destroy", "budget", "runtime", "resume", "dry_run", "seed", "without", "more", "trace", "tier", "repeats", "policies"]
    )]
    pub import: Vec<String>,
    /// Allow overwriting the disk's data. Without it only reads are measured.
    #[arg(long)]
    pub destroy: bool,
    /// Number of cells to measure.
    #[arg(long, value_enum, default_value = "quick")]
    pub tier: Tier,
    /// Time for everything; runs become shorter to fit. Default: 10m, unless --runtime is given.
    #[arg(long, value_name = "TIME")]
    pub budget: Option<Period>,
    /// Time for each run; with --budget, at most this. Default: as the budget allows, 7.4s at most.
    #[arg(long, value_name = "TIME")]
    pub runtime: Option<Period>,
    /// Runs of each cell on each layer. With fewer than five no verdict is "confirmed", with one none is "likely".
    #[arg(
        long,
        default_value_t = weir_diagnose::verdict::FEWEST_REPEATS,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(weir_diagnose::plan::MOST_REPEATS))
    )]
    pub repeats: u32,
    /// Seed of the order of the runs and of the offsets; default: from the clock, and printed.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Other policies to measure beside the present one, with commas, or "none"; default: all that the nodes allow.
    /// Without write-back+0 the network to the replicas cannot be told from the log.
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    pub policies: Vec<String>,
    /// Leave out the layers whose names begin with this, separated by commas, such as "nbd tcp".
    #[arg(long, value_name = "LAYER", value_delimiter = ',')]
    pub without: Vec<String>,
    /// Further runs for steps that are still inconclusive, at most; default: half as many as planned. Runs that decide
    /// hypotheses come on top.
    #[arg(long, value_name = "RUNS")]
    pub more: Option<usize>,
    /// Trace the requests of this block device, such as nvme1n1: times from arrival to dispatch and from there to completion,
    /// lower addresses after higher ones, submitting threads. Needs root and bpftrace; without them /proc/diskstats is used,
    /// and the result says so.
    #[arg(long, value_name = "DEVICE")]
    pub trace: Option<String>,
    /// Continue the interrupted measurement beside the report.
    #[arg(long)]
    pub resume: bool,
    /// Print what would be run (cells, bytes, time), and do nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Exit with code 1 when this holds; several, separated by commas. See below.
    #[arg(long, value_name = "THRESHOLD", value_delimiter = ',')]
    pub fail_on: Vec<weir_diagnose::Threshold>,
    /// The report: one HTML file; JSON and JUnit go beside it. JUnit fails where the exit code does.
    #[arg(long, value_name = "FILE", default_value = "weir-diagnose.html")]
    pub report: PathBuf,
}
