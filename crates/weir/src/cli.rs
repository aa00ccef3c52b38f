//! The command line: what there is, and what `--help` says about it.

mod bench;
mod diagnose;
mod disk;
mod verify;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use weir_block::size::{Size, parse_size_above_zero};
use weir_node::units::Period;

use crate::commands::profile::{self, ProfileCommand};

pub use bench::{BenchArgs, BenchCommand, BenchEngine, BenchFormat, CompareArgs};
pub use diagnose::DiagnoseArgs;
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
    #[command(after_long_help = bench::EXAMPLES)]
    Bench(Box<BenchArgs>),
    /// Put the same load on every layer of a disk and name the one that costs most.
    #[command(after_long_help = diagnose::EXAMPLES)]
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
        #[arg(long, default_value = "64MiB", value_name = "SIZE", value_parser = parse_size_above_zero, allow_negative_numbers = true)]
        log: Size,
    },
    /// What each node is doing.
    Status,
    /// End everything: paused nodes go on, and all destage first. Disks stay. Refuses where acknowledged writes would
    /// be lost because a backing takes nothing, or a disk's owner does not answer.
    Down {
        /// Wait until the backings have everything.
        #[arg(long, conflicts_with = "force")]
        wait: bool,
        /// End all the same; says what is lost, and fails if anything is.
        #[arg(long)]
        force: bool,
    },
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
