//! `weir bench`: its arguments and what its help says.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use weir_block::size::{Size, parse_size_above_zero};
use weir_node::shard::messages::LoadLayer;
use weir_node::units::Period;

use super::engine::BenchEngine;
use super::prefill::PrefillArgs;
use super::verify::{self, VerifyArgs};
use crate::completion;

pub const EXAMPLES: &str = "\
On a terminal, a line shows progress, IOPS, MB/s and percentiles. In a pipe nothing does; --format jsonl prints a line for each \
second.

Ctrl-C and SIGTERM end a load early. What was measured is printed and marked as INCOMPLETE, and the exit code is 1. A load \
inside a node (--disk) ends there too; its result is what the layer's meter has counted.

Examples:
  Random 4 KiB reads at depth 32 for 10 s; an NBD export, 70 % reads; a layer:
    weir bench /dev/nvme1n1
    weir bench nbd://127.0.0.1:10809/db --rw randrw:70
    weir bench --disk db --layer accel --rw randwrite --destroy
  A mix of sizes, some blocks far more often than others:
    weir bench /dev/nvme1n1 --bs 4k:60,64k:40 --pattern zipf:1.1
  A fixed rate: how long do requests wait?
    weir bench /dev/nvme1n1 --rate 20000 --poisson
  One request per thread by plain system calls; polled completions; the load
  generator alone:
    weir bench /dev/nvme1n1 --engine psync --threads 8
    weir bench /dev/nvme1n1 --poll --qd 4
    weir bench null
  A job file of fio, and the result in fio's layout:
    weir bench --jobs mixed.fio --format fio
  Two results side by side:
    weir bench /dev/nvme1n1 --format json > before.json
    weir bench compare before.json after.json
  Everything that is read is checked, also after the load or its server was
  killed:
    weir bench scratch.img --size 1GiB --rw randwrite --verify --history h
    weir bench verify --history h scratch.img";

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

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// A file, a block device, nbd://HOST:PORT/DISK, nbd+unix:///DISK?socket=PATH, or null.
    #[arg(required_unless_present_any = ["disk", "jobs"], conflicts_with_all = ["disk", "jobs"])]
    pub target: Option<String>,
    /// A disk of the cluster instead: the load runs inside its owner, straight on a layer.
    #[arg(long, value_name = "NAME", requires = "layer", add = completion::disks())]
    pub disk: Option<String>,
    /// The layer.
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
    #[arg(long, value_name = "SIZE", value_parser = parse_size_above_zero)]
    pub align: Option<Size>,
    /// Requests in flight per thread, 1 to 4096; default: 32, with engine psync 1.
    #[arg(long = "qd", value_name = "DEPTH")]
    pub depth: Option<u32>,
    /// I/O engine for a file or block device; default: io_uring.
    #[arg(long, value_enum, conflicts_with = "disk")]
    pub engine: Option<BenchEngine>,
    /// Poll the device for completions, without interrupts (io_uring on a device with queues for polling). Costs a processor.
    #[arg(long, conflicts_with = "disk")]
    pub poll: bool,
    /// Threads, each with its own connection.
    #[arg(long, default_value_t = 1)]
    pub threads: u32,
    /// How long, such as 500ms, 30s or 2m30s.
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub runtime: Period,
    /// Repeat the runtime as rounds until the last five are steady by SNIA's PTS (excursion 20 %, slope 10 %); the result is of
    /// these five.
    #[arg(long, conflicts_with = "disk")]
    pub steady: bool,
    /// Most rounds, when they do not become steady.
    #[arg(long, value_name = "ROUNDS", default_value_t = 25, requires = "steady")]
    pub max_rounds: u32,
    /// Run the load for this long before it is counted.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub warmup: Period,
    /// First byte of the range.
    #[arg(long, default_value = "0")]
    pub offset: Size,
    /// Bytes of the range; default: up to the end.
    #[arg(long, value_parser = parse_size_above_zero)]
    pub size: Option<Size>,
    /// End after this number of bytes, if that is before the end of the runtime.
    #[arg(long, value_name = "SIZE", value_parser = parse_size_above_zero)]
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
    /// Flush after this number of writes of a thread.
    #[arg(long, value_name = "WRITES")]
    pub flush_every: Option<u64>,
    /// Percentage of the written data that is zeroes.
    #[arg(long, value_name = "PERCENT", default_value_t = 0)]
    pub compress: u8,
    /// Percentage of writes that repeat earlier data; the others are unique.
    #[arg(long, value_name = "PERCENT", default_value_t = 0)]
    pub repeat_data: u8,
    /// Overwrite what the target holds.
    #[arg(long)]
    pub destroy: bool,
    /// Also while clients are connected to the disk: they are measured too, and a load that writes destroys their data.
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub prefill: PrefillArgs,
    /// How the result is printed; default: text, or with --output json, json.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<BenchFormat>,
    /// Also write a report to this file: one HTML page without network, with the spread of the latencies, the run over time and
    /// the measured window.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}
