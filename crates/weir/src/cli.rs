//! The command line: what there is, and what `--help` says about it.

mod bench;
mod cluster;
mod diagnose;
mod disk;
mod engine;
mod image;
mod node;
mod prefill;
mod profile;
mod snapshot;
mod verify;

use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use weir_block::size::{Size, parse_size_above_zero};
use weir_node::units::Period;

use crate::completion;
use crate::options::Global;

pub use bench::{BenchArgs, BenchCommand, BenchFormat, CompareArgs};
pub use cluster::{ClusterCommand, OwnArgs};
pub use diagnose::DiagnoseArgs;
pub use disk::DiskCommand;
pub use engine::BenchEngine;
pub use image::{Format, ImageCommand};
pub use node::{NodeArgs, NodeCommand};
pub use profile::{ExportFormat, ProfileCommand, ProfileSource};
pub use snapshot::{CloneSource, SnapshotCommand, SnapshotName};
pub use verify::VerifyArgs;

const ABOUT: &str = "Weir is storage software for clusters of Linux hypervisors. It serves virtual disks from shared storage that you \
already have, acknowledges writes once several hosts hold them, and measures which layer is slow.";

const AFTER: &str = r#"Which cluster is meant:
  --api SOCKET or WEIR_API  the node whose API is at that socket
  --lab DIR or WEIR_LAB     the lab in that directory (one node: --node NAME)
  otherwise                 the lab in ./weir-lab if there is one, else the node
                            at /run/weir/api.sock

Exit codes:
  0  done
  1  failed: storage, the system, a threshold, or data that is wrong
  2  the command line, or a file that it names, is not understood
  3  there is no such volume, disk, node, lab, file or export
  4  refused: the message says what has to happen first
  5  no node, or no server, answers
  6  diagnose: measured, but not to be trusted

With --output json an error is JSON too, on standard error:
  {"schema":"weir.error/1",
   "error":{"kind":"not-found","message":"…","hint":"…","exit_code":3}}
and so are notes before it: {"schema":"weir.note/1","note":"…"}

Examples:
  weir lab up                          three nodes on this machine, for tests
  weir volume create pool --path /srv/pool
  weir disk create db --volume pool --size 20GiB --policy write-back+1
  weir disk export db                  prints the NBD URIs for QEMU and fio
  weir bench --disk db --layer accel   how fast is it?
  weir diagnose --disk db --destroy    which layer costs what?"#;

/// Shared volumes, fault-tolerant write-back and a bottleneck finder for KVM clusters.
#[derive(Debug, Parser)]
#[command(name = "weir", version, long_about = ABOUT, after_long_help = AFTER)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// The command line as clap knows it. Values that begin with `-` reach the parsers of numbers, sizes and times, which say better
/// what is wrong with them than "unexpected argument".
pub fn command() -> clap::Command {
    fn with_negative_values(command: clap::Command) -> clap::Command {
        let numbers = [
            TypeId::of::<Size>(),
            TypeId::of::<Period>(),
            TypeId::of::<u8>(),
            TypeId::of::<u32>(),
            TypeId::of::<u64>(),
            TypeId::of::<usize>(),
        ];
        let is_number = |arg: &clap::Arg| {
            let parsed = arg.get_value_parser().type_id();
            arg.get_action().takes_values() && numbers.iter().any(|number| parsed == *number)
        };
        let command =
            command.mut_args(|arg| if is_number(&arg) { arg.allow_hyphen_values(true) } else { arg });
        command.mut_subcommands(with_negative_values)
    }
    // Not at the option itself: names are completed by asking the cluster that the options name.
    let command = Cli::command().mut_arg("ask", |node| node.add(completion::nodes()));
    with_negative_values(command)
}

/// Reads a command line.
///
/// # Errors
/// It is not understood; or it asks for help, which is in the error.
pub fn parse(words: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = command();
    let matches =
        command.try_get_matches_from_mut(words).map_err(|error| without_environment(words, error))?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    // The command line overrides the environment, which README sets for a whole session.
    match (&cli.global.api, &cli.global.lab, matches.value_source("api"), matches.value_source("lab")) {
        (Some(_), Some(_), Some(ValueSource::CommandLine), Some(ValueSource::EnvVariable)) => {
            cli.global.lab = None;
        }
        (Some(_), Some(_), Some(ValueSource::EnvVariable), Some(ValueSource::CommandLine)) => {
            cli.global.api = None;
        }
        (Some(_), Some(_), ..) => {
            let message = "--api (WEIR_API) and --lab (WEIR_LAB) name two clusters: give one of them";
            return Err(command.error(clap::error::ErrorKind::ArgumentConflict, message));
        }
        _ => {}
    }
    Ok(cli)
}

/// The same error, as it is without the environment: clap counts options that the environment sets among those that the user gave,
/// and its usage line would name them like required ones.
fn without_environment(words: &[OsString], error: clap::Error) -> clap::Error {
    use clap::error::ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayHelpOnMissingArgumentOrSubcommand | DisplayVersion) {
        // Help shows what the environment sets.
        return error;
    }
    let unset = |command: clap::Command, name| command.mut_arg(name, |arg| arg.env(None::<&str>));
    let command = ["lab", "api", "credentials"].into_iter().fold(command(), unset);
    command.try_get_matches_from(words).err().unwrap_or(error)
}

/// What `weir` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a node of a cluster; drain a node, resume, clear or remove it.
    ///
    /// Without a subcommand it runs until SIGTERM or SIGINT; then destages and closes its disks and leaves the cluster. Logs to
    /// standard error; WEIR_LOG sets how much (error, warn, info, debug).
    #[command(after_long_help = node::EXAMPLES)]
    Node(NodeArgs),
    /// Run the registry of a single machine's cluster.
    ///
    /// It records the owner of each disk. Stop it after the nodes. While it is away, disks are served as long as
    /// nothing has to change.
    Registry(RegistryArgs),
    /// A cluster on this machine, for tests: several nodes that can be killed, paused and resumed.
    #[command(subcommand)]
    Lab(LabCommand),
    /// Volumes: the shared storage that holds disks.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Virtual disks.
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Image files: disks from them, and they from disks.
    #[command(subcommand, after_long_help = image::EXAMPLES)]
    Image(ImageCommand),
    /// Snapshots of disks.
    #[command(subcommand, after_long_help = snapshot::EXAMPLES)]
    Snapshot(SnapshotCommand),
    /// Who belongs to the cluster: its certificate authority, nodes, clients, join tokens.
    #[command(subcommand, after_long_help = cluster::EXAMPLES)]
    Cluster(ClusterCommand),
    /// Health, nodes and disks of the cluster.
    Status,
    /// Recent events: takeovers, configurations, refusals.
    Events {
        /// Keep printing new events until Ctrl-C; with --output json a line for each event.
        #[arg(long)]
        follow: bool,
    },
    /// Measure a file, a device, an NBD export, or a layer of a disk.
    #[command(after_long_help = bench::EXAMPLES)]
    Bench(Box<BenchArgs>),
    /// Put the same load on every layer of a disk and name the one that costs most.
    #[command(after_long_help = diagnose::EXAMPLES)]
    Diagnose(DiagnoseArgs),
    /// Live rates and latencies of all disks, the slowest layer, dirty data.
    ///
    /// On a terminal, a screen that is updated until q is pressed; columns that have no room are left out. In a pipe, or with
    /// --count, a table for each interval; with --output json, a line. READS, WRITES and P99 are measured at the export. A disk
    /// in bold is degraded: its policy is not in effect, or a reason is shown at the bottom.
    Top {
        /// Length of an interval, such as 500ms or 5s.
        #[arg(long, default_value = "1s", value_name = "TIME")]
        every: Period,
        /// End after this number of intervals.
        #[arg(long)]
        count: Option<u64>,
    },
    /// Latency of a live disk, layer by layer, without any load of Weir's own.
    ///
    /// Reads the meters of every layer twice and divides the latency at the top among the layers that a request waits for. OWN
    /// is the time that a request spends in a layer and not below it; a layer without it (destage under write-back) is off the
    /// critical path. A limit of the disk holds requests back above all layers; what has waited for it is told apart. This
    /// shows where the time goes, not why: `weir diagnose` finds that out with a load of its own, on a disk
    /// whose data may be lost.
    #[command(after_long_help = "Example:\n  weir explain db --over 10s")]
    Explain {
        /// The disk.
        #[arg(add = completion::disks())]
        disk: String,
        /// Time between the two readings.
        #[arg(long, default_value = "5s", value_name = "TIME")]
        over: Period,
    },
    /// Workload of a live disk: sizes, mix, reuse, working set, miss-ratio curve; and loads that resemble it.
    #[command(subcommand, after_long_help = profile::EXAMPLES)]
    Profile(ProfileCommand),
    /// Print the completion script of a shell. It knows the names of disks, volumes and nodes.
    ///
    /// For bash, zsh, fish, elvish and PowerShell. The script calls weir, which asks the cluster (--lab, --api and their
    /// variables count) for at most a second.
    #[command(
        after_long_help = "Examples:\n  weir completions bash > /etc/bash_completion.d/weir\n  weir completions fish > ~/.config/fish/completions/weir.fish"
    )]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Three nodes, a killed owner, nothing lost: what `make demo` runs.
    #[command(hide = true)]
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
pub struct RegistryArgs {
    /// Unix socket to serve at, mode 0600.
    #[arg(long, value_name = "PATH", default_value = "/run/weir/registry.sock")]
    pub socket: PathBuf,
    /// The registry's file; created if missing.
    #[arg(long, value_name = "FILE", default_value = "/var/lib/weir/registry.db")]
    pub file: PathBuf,
}

#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Start a registry and some nodes on 127.0.0.1, 127.0.0.2, ….
    Up {
        /// Directory of the state, sockets and logs.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// Number of nodes, 1 to 16. Their names are n1, n2, ….
        #[arg(long, default_value_t = 3)]
        nodes: usize,
        /// A node that the registry has not heard from for this long counts as down.
        #[arg(long, default_value = "2s", value_name = "TIME")]
        lease: Period,
        /// Memory for each write log; not less than 64MiB.
        #[arg(long, default_value = "64MiB", value_name = "SIZE", value_parser = parse_size_above_zero)]
        log: Size,
        /// A node's path to a LUN that is to be a volume; repeat it for each node, in order. On one machine: loop devices of one image.
        #[arg(long = "lun", value_name = "DEVICE")]
        luns: Vec<PathBuf>,
        /// A program that keeps a node from the LUN, and lets it back: `COMMAND fence NODE`, `COMMAND admit NODE`. Needed where the LUN
        /// has no persistent reservations, as loop devices have none.
        #[arg(long, value_name = "PROGRAM")]
        fence_command: Option<PathBuf>,
    },
    /// State of each node and of the registry.
    Status,
    /// Destage everything and end the lab; its disks stay.
    ///
    /// Paused nodes are resumed for that. Refuses, and leaves the lab as it was, where acknowledged writes would be lost because
    /// the storage takes nothing or a disk's owner does not answer. Without --force no node is killed.
    Down {
        /// Wait until the storage has everything, however long that takes.
        #[arg(long, conflicts_with = "force")]
        wait: bool,
        /// End in any case; say what is lost, and exit with 1 if anything is.
        #[arg(long)]
        force: bool,
    },
    /// Kill a node, or the registry, at once (SIGKILL).
    Kill {
        /// The name of the node, or `registry`.
        #[arg(add = completion::processes())]
        node: String,
    },
    /// Pause a node, or the registry (SIGSTOP).
    Pause {
        /// The name of the node, or `registry`.
        #[arg(add = completion::processes())]
        node: String,
    },
    /// Resume a paused node, or the registry (SIGCONT).
    Resume {
        /// The name of the node, or `registry`.
        #[arg(add = completion::processes())]
        node: String,
    },
    /// Start a node, or the registry, that was killed.
    Start {
        /// The name of the node, or `registry`.
        #[arg(add = completion::processes())]
        node: String,
    },
}

/// What an operator has to provide for a volume on a LUN.
const FENCE_COMMAND: &str = "\
A volume on a LUN: a LUN of at least 320MiB, and lun.fence_command in each node's configuration, a program that keeps a failed node from it:
  COMMAND fence NODE   exit 0: NODE can neither read nor write the LUN, and
                       nothing that it has issued is on its way there
  COMMAND admit NODE   exit 0: NODE, on which it runs, reads and writes the LUN
Its environment:
  WEIR_VOLUME       the volume
  WEIR_LUN          the LUN's path on the node that runs it, not on NODE
  WEIR_NODE         a number for NODE, by which the heartbeat area knows it
  WEIR_INCARNATION  the process of NODE that is fenced, or admitted
  WEIR_EPOCH        with fence: the epoch of the coordination that asks for it

Any other exit code is a failure; its reason is the last line on standard error. Without such a program, switch a failed node off, then `weir \
volume confirm-fenced VOLUME NODE`.";

#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create a volume in a directory that all nodes mount, on a LUN that all nodes reach, or of an NBD server, of which each disk is an export.
    #[command(after_long_help = FENCE_COMMAND)]
    Create {
        /// Its name: 1 to 64 letters, digits, '-', '_', '.'.
        name: String,
        /// The directory, which must exist; of a LUN, the block device.
        #[arg(long, value_name = "PATH")]
        path: Option<PathBuf>,
        /// The NBD server, without an export: nbd://HOST:PORT, or nbd+unix:///?socket=PATH. All nodes reach it by this URI. The asked one
        /// connects and says which exports it lists. Each server is one volume.
        #[arg(long, value_name = "URI")]
        server: Option<String>,
        /// Kind of backing: dir; lun for a shared block device with a filesystem of its own; nbd for an NBD server (nbdkit, qemu-storage-daemon, …).
        /// Without it, nbd with --server, and dir with --path.
        #[arg(long, value_parser = ["dir", "lun", "nbd"])]
        kind: Option<String>,
        /// Make a filesystem on the LUN (at least 320MiB), which must be blank, or --destroy be given. A LUN of up to 1 GiB is read altogether to find that
        /// out, a larger one in samples.
        #[arg(long, value_parser = ["xfs", "ext4"])]
        format: Option<String>,
        /// The LUN's identity, repeated from --dry-run: no other host uses it in any other way.
        #[arg(long)]
        identity: Option<String>,
        /// Format the LUN although it is not blank. --dry-run says what is there.
        #[arg(long, requires = "format")]
        destroy: bool,
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Say that a node that is down cannot reach a volume's LUN, because it is switched off: another one takes the volume's coordination
    /// over.
    ConfirmFenced {
        /// The volume.
        #[arg(add = completion::volumes())]
        volume: String,
        /// The node.
        #[arg(add = completion::nodes())]
        node: String,
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
    },
    /// Have another node coordinate a volume on a LUN.
    ///
    /// The coordinator unmounts the filesystem, so nobody has to be fenced, and the named node claims the volume first. Guests wait
    /// meanwhile if they need the coordinator; direct I/O goes on. If the node cannot coordinate it after all, another one does, and the
    /// command fails and names it.
    #[command(after_long_help = "Example:\n  weir volume move shared --to n3")]
    Move {
        /// The volume.
        #[arg(add = completion::volumes())]
        volume: String,
        /// The node.
        #[arg(long, value_name = "NODE", add = completion::nodes())]
        to: String,
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Send all I/O of a volume on a LUN through its coordinator's filesystem (on), or let each node do its own where it can (off).
    Redirect {
        /// The volume.
        #[arg(add = completion::volumes())]
        volume: String,
        /// Whether it is.
        #[arg(value_parser = ["on", "off"])]
        redirected: String,
    },
    /// Say that the storage has moved a volume to another LUN, for example by promoting a replica of it.
    ///
    /// Nodes use no copy of a volume's LUN, whatever filesystem it has, until it is the volume's. What the volume has is what the other LUN has:
    /// everything that was written only to the former one is lost. Refused while a node coordinates the volume or has a disk of it open.
    #[command(after_long_help = "Example:\n  weir volume set-identity shared naa.600508b400105e21")]
    SetIdentity {
        /// The volume.
        #[arg(add = completion::volumes())]
        volume: String,
        /// The identity of the other LUN: its WWN or serial number. The notice of a node that sees a copy has it.
        identity: String,
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// All volumes.
    List,
    /// One volume and its disks. `weir volume du` shows what they take.
    Show {
        /// Its name.
        #[arg(add = completion::volumes())]
        name: String,
    },
    /// What each disk and snapshot of a volume takes.
    ///
    /// EXCLUSIVE is free when it is deleted. SHARED are blocks that at least one other disk or snapshot has, too: they are free when the last
    /// of them goes. A clone is a disk. After clones or snapshots are deleted, XFS may count blocks as shared for a while.
    Du {
        /// The volume.
        #[arg(add = completion::volumes())]
        name: String,
    },
    /// Delete a volume that has no disks. Its directory stays.
    Delete {
        /// Its name.
        name: String,
        /// Only say what would be deleted.
        #[arg(long)]
        dry_run: bool,
        /// Delete without asking.
        #[arg(long)]
        yes: bool,
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
