//! The command line: what there is, and what `--help` says about it.

mod disk;
mod verify;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use weir_node::shard::messages::LoadLayer;
use weir_node::units::{Period, Size};

use crate::commands::budget;
use crate::commands::profile::{self, ProfileCommand};

pub use disk::DiskCommand;
pub use verify::VerifyArgs;

const ABOUT: &str = "Weir gives a cluster of Linux hypervisors, on storage that they already have, one shared volume, \
acceleration on the host that loses nothing that was answered, and an instrument that names the layer at fault.";

const AFTER: &str = "\
Which cluster is meant:
  --api SOCKET, or WEIR_API    the node whose API is at that socket
  --lab DIR, or WEIR_LAB       the lab in that directory (a node of it: --node NAME)
  otherwise                    the lab in ./weir-lab if there is one, else the node at /run/weir/api.sock

Exit codes:
  0  done
  1  failed: storage, system, or a measurement that found data wrong
  2  the command line is not understood
  3  there is no such volume, disk, node or lab
  4  refused: the message says what has to happen first
  5  the cluster does not answer

Examples:
  weir lab up                               three nodes on this machine, to try things
  weir volume create pool --path /srv/pool  disks live in /srv/pool
  weir disk create db --volume pool --size 20GiB --policy write-back+1
  weir disk export db                       prints the NBD URIs for QEMU, nbdcopy, fio
  weir bench --disk db --layer accel        how fast is it?
  weir diagnose --disk db --destroy         which layer costs what?";

/// Shared volumes, fault-tolerant write-back and a bottleneck finder for KVM clusters.
#[derive(Debug, Parser)]
#[command(name = "weir", version, long_about = ABOUT, after_long_help = AFTER)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options that every command has.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Text for people or JSON for programs.
    #[arg(long, global = true, value_enum, default_value = "text", help_heading = "Global options")]
    pub output: Output,
    /// Ask the lab in this directory.
    #[arg(long, global = true, env = "WEIR_LAB", value_name = "DIR", help_heading = "Global options")]
    pub lab: Option<PathBuf>,
    /// Ask the node whose API is at this Unix socket.
    #[arg(
        long,
        global = true,
        env = "WEIR_API",
        value_name = "SOCKET",
        help_heading = "Global options",
        conflicts_with = "lab"
    )]
    pub api: Option<PathBuf>,
    /// Ask this node of the lab; default: the first that runs, or the one that owns the disk.
    #[arg(id = "ask", long = "node", global = true, value_name = "NAME", help_heading = "Global options")]
    pub node: Option<String>,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Tables and sentences.
    Text,
    /// One JSON document.
    Json,
}

/// What `weir` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a node of a cluster.
    ///
    /// Runs until SIGTERM or SIGINT; then destages and closes its disks and leaves the cluster. Logs to standard error;
    /// WEIR_LOG sets how much (error, warn, info, debug).
    Node(NodeArgs),
    /// Run the registry of a single machine's cluster.
    ///
    /// Nodes agree there on who owns which disk. It must outlive the nodes; they go on serving while it is away, as long as
    /// nothing has to change and their lease stands.
    Registry(RegistryArgs),
    /// Several nodes on this machine, and faults at will.
    #[command(subcommand)]
    Lab(LabCommand),
    /// Volumes: shared storage that holds disks.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Disks: what guests get.
    #[command(subcommand)]
    Disk(DiskCommand),
    /// What the cluster is doing: nodes, disks, policies, dirty data.
    Status,
    /// What happened lately: takeovers, configurations, refusals.
    Events,
    /// Measure a file, a device, an NBD export, or a layer of a disk.
    #[command(after_long_help = BENCH_EXAMPLES)]
    Bench(Box<BenchArgs>),
    /// Put the same load on every layer of a disk and name the one that costs most.
    #[command(after_long_help = DIAGNOSE_EXAMPLES)]
    Diagnose(DiagnoseArgs),
    /// What every disk does, live: rates, latencies, the layer in which requests spend their time, dirty data.
    ///
    /// On a terminal a screen that renews itself (q ends it); in a pipe, or with --count, a table for each interval, and
    /// with --output json a line. READS and WRITES are those of the export, and so is P99. A disk in bold is not as
    /// requested, or has something to say.
    Top {
        /// Length of an interval.
        #[arg(long, default_value = "1 s", value_name = "TIME")]
        every: Period,
        /// End after so many intervals.
        #[arg(long)]
        count: Option<u64>,
    },
    /// Where the time of a live disk's requests goes, from its meters alone: no load of its own.
    ///
    /// Looks at the meters of every layer twice and divides the latency at the top among the layers that a request waits
    /// for. OWN is what a request spends in a layer and not below; a layer without it (destage under write-back) is not
    /// on the way of the answer. This says where the time goes, not why: `weir diagnose` puts a load of its own on the
    /// layers, but needs a disk whose data may be lost.
    #[command(after_long_help = "Example:\n  weir explain db --over 10s")]
    Explain {
        /// The disk.
        disk: String,
        /// Time between the two looks.
        #[arg(long, default_value = "5 s", value_name = "TIME")]
        over: Period,
    },
    /// What a live disk is asked for, always on: sizes, mix, reuse, working set, miss-ratio curve; and loads made of it.
    #[command(subcommand, after_long_help = profile::EXAMPLES)]
    Profile(ProfileCommand),
    /// Print the completion script of a shell.
    ///
    /// For bash, zsh, fish, elvish and PowerShell.
    #[command(after_long_help = "Example:\n  weir completions bash > /etc/bash_completion.d/weir")]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Three nodes, a killed owner, nothing lost. What `make demo` runs.
    #[command(hide = true)]
    Demo(DemoArgs),
}

const BENCH_EXAMPLES: &str = "\
On a terminal a line shows progress, IOPS, MB/s and percentiles; in a pipe nothing does, and
--format jsonl has a line for each second.

Ctrl-C and SIGTERM end a load early: what was measured is printed and marked as INCOMPLETE, and the
exit code is 1. A load inside a node (--disk) ends there too; its result is then what the layer's
meter has counted.

Examples:
  Random 4 KiB reads at depth 32 for 10 s; an NBD export, 70 % reads; a layer of a disk:
    weir bench /dev/nvme1n1
    weir bench nbd://127.0.0.1:10809/db --rw randrw:70
    weir bench --disk db --layer accel --rw randwrite --destroy
  A mix of sizes, some blocks far more often than others:
    weir bench /dev/nvme1n1 --bs 4k:60,64k:40 --pattern zipf:1.1
  Fixed demand: how long do requests wait?
    weir bench /dev/nvme1n1 --rate 20000 --poisson
  One request of a thread at a time by plain system calls; completions polled for; the generator alone:
    weir bench /dev/nvme1n1 --engine psync --threads 8
    weir bench /dev/nvme1n1 --poll --qd 4
    weir bench null
  A job file of fio, and the result in fio's layout:
    weir bench --jobs mixed.fio --format fio
  Two results side by side:
    weir bench /dev/nvme1n1 --format json > before.json
    weir bench compare before.json after.json
  Everything that is read is checked; and after the load or its server was killed:
    weir bench scratch.img --size 1GiB --rw randwrite --verify --history h
    weir bench verify --history h scratch.img";

const DIAGNOSE_EXAMPLES: &str = r#"The same cells run on each layer, interleaved in random order, five times and more where a step cannot be told: the backing,
the accelerator, the NBD export on Unix socket and TCP. Beside the accelerator under its present policy it runs under every
other one that the nodes allow; the requested policy is changed for that, and set back at the end. Writes destroy what the
disk holds, therefore --destroy. What the rows give grounds to suspect predicts a number, and is confirmed or rejected by a
run of its own at the end; without a confirmed cause none is named. Ctrl-C ends it after the run under way; what was measured is kept, and --resume goes on.

--import reads what others measured: FILE is a table (CSV) that names its layers from the bottom up, LAYER=FILE is one layer's
fio JSON or DiskSpd XML. Columns of a table: layer, block, access, queue_depth, iops; and if known: instead_of, threads,
write_through, mib_per_s, mb_per_s, mean_us, p50_us, p99_us, p99_9_us, max_us, ios, errors, runtime_s. The same cell again is a repeat.

--stack measures any layers that can be opened and lead to the same storage. They must have one size; with --destroy a marker
is written at the lowest and must be read at each other, else it is refused. For example:

  # stack.toml: layers from the bottom up
  [[layer]]
  name = "array"                            # unique
  target = "/dev/nvme1n1"                   # a file, a block device, nbd://…, nbd+unix://…
  device = "nvme1n1"                        # optional: the block device whose statistics are watched

  [[layer]]
  name = "share"
  target = "nbd://10.0.0.7:10809/array"
  interface = "eth1"                        # optional: the network interface whose bytes are watched
  pids = [4711]                             # optional: processes whose processor time is watched

  [[layer]]
  name = "write log"
  disk = "db"                               # a layer inside the node that has the disk open
  at = "accel"                              # backing or accel

Thresholds for --fail-on: likely, confirmed (a layer is named with that grade), inconclusive, rejected (a row cannot be used),
loss:FACTOR (a step is shown to lose at least so much; the near end of its interval counts).

Exit codes:
  0  done
  1  a threshold of --fail-on failed
  3  there is no such disk, node or lab
  4  usage: arguments, or a file that cannot be read; or something has to happen first
  5  the cluster does not answer
  6  measured but not to be trusted: interrupted, generator-limited, most rows unusable, or it failed on the way
  7  refused for safety: clients are connected to the disk, or the layers of a stack do not lead to the same storage

Examples:
  weir diagnose --disk scratch --destroy --dry-run
  weir diagnose --disk scratch --destroy --budget 10m
  weir diagnose --disk scratch --destroy --tier standard --report scratch.html --fail-on confirmed,loss:1.5
  weir diagnose --stack stack.toml --destroy --budget 10m
  weir diagnose --import lab-book.csv
  weir diagnose --import disk=local.json share=share.json guest=guest.xml"#;

#[derive(Debug, Args)]
pub struct NodeArgs {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "/etc/weir/weir.toml")]
    pub config: PathBuf,
    /// Print an example configuration with every key, and end.
    #[arg(long)]
    pub print_config: bool,
}

#[derive(Debug, Args)]
pub struct RegistryArgs {
    /// Unix socket to serve at, mode 0600.
    #[arg(long, value_name = "PATH", default_value = "/run/weir/registry.sock")]
    pub socket: PathBuf,
    /// File that holds everything; made when missing.
    #[arg(long, value_name = "FILE", default_value = "/var/lib/weir/registry.db")]
    pub file: PathBuf,
}

#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Start a registry and some nodes on 127.0.0.1, 127.0.0.2, ….
    Up {
        /// Where state, sockets and logs go.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// How many nodes, 1 to 16. They are called n1, n2, ….
        #[arg(long, default_value_t = 3)]
        nodes: usize,
        /// A node not heard of for this long counts as gone.
        #[arg(long, default_value = "2 s", value_name = "TIME")]
        lease: Period,
        /// Memory for each write log; not less than 64MiB.
        #[arg(long, default_value = "64MiB", value_name = "SIZE")]
        log: Size,
    },
    /// What each node is doing.
    Status,
    /// End everything: by asking first, then by SIGKILL. Disks stay.
    Down,
    /// SIGKILL: the node is gone at once.
    Kill {
        /// Its name; `registry` stands for the registry.
        node: String,
    },
    /// SIGSTOP: the node stands still and does not know it.
    Pause {
        /// Its name; `registry` stands for the registry.
        node: String,
    },
    /// SIGCONT: the node goes on where it stood.
    Resume {
        /// Its name; `registry` stands for the registry.
        node: String,
    },
    /// Start a node that was killed.
    Start {
        /// Its name; `registry` stands for the registry.
        node: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Make a volume out of a directory that all nodes mount.
    Create {
        /// Its name: 1 to 64 letters, digits, '-', '_', '.'.
        name: String,
        /// The directory; it must exist.
        #[arg(long, value_name = "DIR")]
        path: PathBuf,
        /// Kind of backing.
        #[arg(long, default_value = "dir")]
        kind: String,
    },
    /// All volumes.
    List,
    /// One volume and its disks.
    Show {
        /// Its name.
        name: String,
    },
}

/// A layer of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layer {
    /// The accelerator, under the effective policy.
    Accel,
    /// The backing, below the accelerator.
    Backing,
}

impl From<Layer> for LoadLayer {
    fn from(layer: Layer) -> LoadLayer {
        match layer {
            Layer::Accel => LoadLayer::Accel,
            Layer::Backing => LoadLayer::Backing,
        }
    }
}

/// What can be done with results of loads.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Put two results side by side and say what changed.
    ///
    /// Both are files that `weir bench --format json` (or jsonl) wrote. Differences of up to 5 % are called the same, and a
    /// percentile with fewer than ten requests beyond it is not judged. Two runs say nothing about chance: weir diagnose does.
    Compare(CompareArgs),
    /// Read a target back after a crash, and judge it by the record that a load has kept.
    ///
    /// The load is `weir bench TARGET --verify --history FILE` with a writing --rw. It may have come to its end, or have been
    /// killed, or the server or host of its target: FILE says what was acknowledged and what was under way. A block is right
    /// that holds its newest acknowledged version, or one that was issued later and never answered.
    ///
    /// The record outlives the load's process, not a power cut of the load's own host: keep the load on another one. Nothing
    /// may write to the target while it is judged.
    #[command(after_long_help = verify::EXAMPLES)]
    Verify(VerifyArgs),
}

#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The result to compare with.
    pub a: PathBuf,
    /// The result that is compared.
    pub b: PathBuf,
}

/// The form of a load's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchFormat {
    /// A table.
    Text,
    /// One JSON document with a versioned schema.
    Json,
    /// One JSON line for each second, then one for the result.
    Jsonl,
    /// A header and a row for each job and kind of request.
    Csv,
    /// Prometheus' text format.
    Prom,
    /// The layout of fio's JSON.
    Fio,
}

/// Who makes the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchEngine {
    /// A ring for each thread: registered file and buffers, many requests in flight.
    #[value(name = "io_uring")]
    IoUring,
    /// preadv2 and pwritev2: one request of a thread at a time.
    Psync,
    /// Nothing is read or written: what the generator itself costs, on a target of that size.
    Null,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// A file, a block device, nbd://HOST:PORT/DISK, nbd+unix:///DISK?socket=PATH, or null.
    #[arg(required_unless_present_any = ["disk", "jobs"], conflicts_with_all = ["disk", "jobs"])]
    pub target: Option<String>,
    /// A disk of the cluster instead: the load runs inside its owner, straight on a layer.
    #[arg(long, value_name = "NAME", requires = "layer")]
    pub disk: Option<String>,
    /// Which layer of the disk.
    #[arg(long, value_enum)]
    pub layer: Option<Layer>,
    /// A job file of fio instead, or jobs of `weir profile export`. An option that is not supported is an error that names it.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = [
            "disk", "layer", "access", "block_sizes", "pattern", "align", "depth", "engine", "poll", "threads", "runtime",
            "warmup", "offset", "size", "bytes", "rate", "poisson", "seed", "verify", "history", "fua", "steady", "flush_every", "compress", "repeat_data",
        ]
    )]
    pub jobs: Option<PathBuf>,
    /// read, write, rw (sequential), randread, randwrite, randrw; rw:70 and randrw:70 have 70 % reads.
    #[arg(long = "rw", value_name = "ACCESS", default_value = "randread")]
    pub access: weir_load::Access,
    /// Bytes per request, or a mix such as 4k:60,64k:40 (percent of the requests).
    #[arg(long = "bs", value_name = "SIZES", default_value = "4KiB")]
    pub block_sizes: weir_load::BlockMix,
    /// Random: plain (uniform), zipf:THETA, hot:REQUESTS/RANGE in percent. Sequential: plain (each thread its part), shared,
    /// stride:SIZE.
    #[arg(long, value_name = "PATTERN", default_value = "plain")]
    pub pattern: weir_load::Pattern,
    /// Random offsets are multiples of this; default: the smallest block size.
    #[arg(long, value_name = "SIZE")]
    pub align: Option<Size>,
    /// Requests in flight per thread, 1 to 4096; default: 32, with engine psync 1.
    #[arg(long = "qd", value_name = "DEPTH")]
    pub depth: Option<u32>,
    /// Who reads and writes a file or block device; default: io_uring.
    #[arg(long, value_enum, conflicts_with = "disk")]
    pub engine: Option<BenchEngine>,
    /// Poll the device for completions, without interrupts (io_uring on a device with queues for polling). Costs a processor.
    #[arg(long, conflicts_with = "disk")]
    pub poll: bool,
    /// Threads, each with its own connection.
    #[arg(long, default_value_t = 1)]
    pub threads: u32,
    /// How long, such as 500ms, '30 s' or 1h.
    #[arg(long, default_value = "10 s")]
    pub runtime: Period,
    /// Repeat the runtime as rounds until the last five are steady by SNIA's PTS (excursion 20 %, slope 10 %); the result is of
    /// these five.
    #[arg(long, conflicts_with = "disk")]
    pub steady: bool,
    /// Most rounds, when they do not become steady.
    #[arg(long, value_name = "ROUNDS", default_value_t = 25, requires = "steady")]
    pub max_rounds: u32,
    /// Load before that is not counted.
    #[arg(long, default_value = "1 s")]
    pub warmup: Period,
    /// First byte of the range.
    #[arg(long, default_value = "0")]
    pub offset: Size,
    /// Bytes of the range; default: up to the end.
    #[arg(long)]
    pub size: Option<Size>,
    /// End when so many bytes were asked for, if that is before the runtime's end.
    #[arg(long, value_name = "SIZE")]
    pub bytes: Option<Size>,
    /// Requests per second over all threads, with an open-loop clock: a late request counts from when it was due. Default: as
    /// many as the target takes.
    #[arg(long)]
    pub rate: Option<u64>,
    /// Requests come as a Poisson process of that rate, not at even distances.
    #[arg(long, requires = "rate")]
    pub poisson: bool,
    /// The same seed asks for the same blocks.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write stamps and check what is read.
    #[arg(long)]
    pub verify: bool,
    /// With --verify: keep a record of what was acknowledged and what is under way in this new file (8 bytes for each block),
    /// so that `weir bench verify` can judge the data when the load or its target was killed.
    #[arg(long, value_name = "FILE", requires = "verify", conflicts_with_all = ["disk", "steady"])]
    pub history: Option<PathBuf>,
    /// Each write is durable before it is answered.
    #[arg(long)]
    pub fua: bool,
    /// Flush after so many writes of a thread.
    #[arg(long, value_name = "WRITES")]
    pub flush_every: Option<u64>,
    /// So many percent of the written data are zeroes.
    #[arg(long, value_name = "PERCENT", default_value_t = 0)]
    pub compress: u8,
    /// So many percent of the writes repeat earlier data; the others are unique.
    #[arg(long, value_name = "PERCENT", default_value_t = 0)]
    pub repeat_data: u8,
    /// Overwrite what the target holds.
    #[arg(long)]
    pub destroy: bool,
    /// Leave what was never written as it is. Otherwise a load that may write (a writing one, or with --destroy) writes the range
    /// once first when it finds a hole, so that holes are not measured as speed. Of a disk's layer that is done when less of the
    /// disk is allocated than its size.
    #[arg(long)]
    pub no_prefill: bool,
    /// How the result is printed; default: text, or with --output json, json.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<BenchFormat>,
    /// Also write a report to this file: one HTML page without network, with the spread of the latencies, the run over time and
    /// the measured window.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// How much is measured.
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
    #[arg(long, value_name = "NAME", required_unless_present_any = ["import", "stack"])]
    pub disk: Option<String>,
    /// Measure the layers that this file describes, from the bottom up; see below.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disk", "policies"])]
    pub stack: Option<PathBuf>,
    /// Read rows instead of measuring: tables, and layers measured by fio or DiskSpd, from the bottom up.
    #[arg(
        long,
        value_name = "FILE|LAYER=FILE",
        num_args = 1..,
        conflicts_with_all = ["disk", "stack", "destroy", "budget", "runtime", "resume", "dry_run", "seed", "without", "more", "trace"]
    )]
    pub import: Vec<String>,
    /// Yes, overwrite what the disk holds. Without it only reads are measured.
    #[arg(long)]
    pub destroy: bool,
    /// How much is measured.
    #[arg(long, value_enum, default_value = "quick")]
    pub tier: Tier,
    /// Time for everything, such as 10m; runs become shorter to fit.
    #[arg(long, value_name = "TIME", value_parser = budget)]
    pub budget: Option<Period>,
    /// Time for each run, at most this with a budget; default: 7.4 s.
    #[arg(long, value_name = "TIME")]
    pub runtime: Option<Period>,
    /// Runs of each cell on each layer. With fewer than five nothing is called confirmed.
    #[arg(
        long,
        default_value_t = weir_diagnose::plan::FEWEST_REPEATS,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(weir_diagnose::plan::MOST_REPEATS))
    )]
    pub repeats: u32,
    /// Seed of the order of the runs and of the offsets; default: from the clock, and printed.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Other policies to measure beside the present one, with commas, or "none"; default: all that the nodes allow.
    /// Without write-back+0 the way to the replicas cannot be told from the log.
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    pub policies: Vec<String>,
    /// Leave out the layers whose names begin like this, with commas, such as "nbd tcp".
    #[arg(long, value_name = "LAYER", value_delimiter = ',')]
    pub without: Vec<String>,
    /// Further runs for steps that can still not be told, at most; default: half as many as planned. The runs that suspicions
    /// ask for are not among them.
    #[arg(long, value_name = "RUNS")]
    pub more: Option<usize>,
    /// Trace the requests of this block device, such as nvme1n1: times from arrival to dispatch and from there to completion,
    /// lower addresses after higher ones, submitting threads. Needs root and bpftrace; without them /proc/diskstats is used,
    /// and the result says so.
    #[arg(long, value_name = "DEVICE")]
    pub trace: Option<String>,
    /// Go on with the interrupted measurement beside the report.
    #[arg(long)]
    pub resume: bool,
    /// Only say what would be run: cells, bytes, time.
    #[arg(long)]
    pub dry_run: bool,
    /// End with code 1 when this holds; several, with commas. See below.
    #[arg(long, value_name = "THRESHOLD", value_delimiter = ',')]
    pub fail_on: Vec<weir_diagnose::Threshold>,
    /// The report: one HTML file; JSON and JUnit go beside it.
    #[arg(long, value_name = "FILE", default_value = "weir-diagnose.html")]
    pub report: PathBuf,
}

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Where the lab and the report go; default: a new directory under /tmp that is kept.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Time of the load, the owner's end in its middle.
    #[arg(long, default_value = "30 s")]
    pub load: Period,
    /// Time for each run of the layered measurement.
    #[arg(long, default_value = "300 ms")]
    pub runtime: Period,
}
