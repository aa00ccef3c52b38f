//! Weir beside its peers, in one run, on one machine: `make bench`.
//!
//! Absolute figures of a shared machine mean little, so the suite measures every figure in the same seconds as a peer's, and
//! compares it with the cost of bare sockets.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod alone;
mod awake;
mod bound;
mod channels;
mod comparison;
mod driver;
mod error;
mod floor;
mod interrupt;
mod layers;
mod lun;
mod machine;
mod process;
mod profile;
mod report;
mod row;
mod server;
mod suite;
mod table;
mod weir;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use awake::Awake;
use error::{Failure, Outcome};
use machine::Machine;
use server::{Transport, Workspace};
use suite::{Results, Settings, Suite};

/// Measures Weir beside qemu-storage-daemon, nbdkit, fio and bare sockets. Exit code 0: every section gave its results,
/// whether or not targets were missed; the last line names those.
#[derive(Parser)]
struct Arguments {
    /// Every section once, in short measurements: shows that all of it runs, and says nothing about speed.
    #[arg(long)]
    short: bool,
    /// Rounds of every cell; 3, or 1 with --short.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: Option<u16>,
    /// Seconds of each measurement; 2, or 0.1 with --short.
    #[arg(long)]
    seconds: Option<f64>,
    /// Only cells whose name begins with this text; the sections are generator, nbd unix, nbd tcp, write-back+1, tls, media, files, volume, routes, neighbour, profile.
    #[arg(long, default_value = "")]
    only: String,
    /// Let idle processors halt while measuring. By default they are held awake, as with tuned's latency-performance.
    #[arg(long)]
    halt: bool,
    /// The `weir` program.
    #[arg(long, default_value = "target/release/weir")]
    weir: PathBuf,
    /// Where the results go, as JSON.
    #[arg(long, default_value = "target/bench/results.json")]
    out: PathBuf,
    /// A directory in RAM for the disks.
    #[arg(long, default_value = "/dev/shm")]
    ram: PathBuf,
    /// A directory on the machine's own storage, for a backing and flash media; not in RAM.
    #[arg(long, default_value = "target/bench")]
    storage: PathBuf,
    #[command(subcommand)]
    part: Option<Part>,
}

/// The suite's own child processes.
#[derive(Subcommand)]
enum Part {
    /// The answering side of the floor.
    #[command(hide = true)]
    Echo { transport: TransportName, address: String },
    /// The neighbour that computes.
    #[command(hide = true)]
    Compute {
        #[arg(long)]
        pinned: bool,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum TransportName {
    Unix,
    Tcp,
}

/// Size of the disks in memory, in bytes: larger than the processor's caches, small enough for a small machine.
const SIZE: u64 = 512 << 20;
/// Size of the disks on storage, in bytes.
const MEDIA_SIZE: u64 = 128 << 20;
/// Size of the generator's file, in bytes: larger than a device's own cache.
const FILE_SIZE: u64 = 1 << 30;
/// Size of each of them in the short form, in bytes.
const SHORT_SIZE: u64 = 32 << 20;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // As a node does; its peers and children get the setting, too.
    if let Err(error) = weir_node::vector_copies::restart_if_slow() {
        eprintln!("weir-peers: copies in memory stay slow: {error}");
    }
    let outcome = match arguments.part {
        Some(Part::Echo { transport: TransportName::Unix, ref address }) => {
            floor::serve(Transport::Unix, address)
        }
        Some(Part::Echo { transport: TransportName::Tcp, ref address }) => {
            floor::serve(Transport::Tcp, address)
        }
        Some(Part::Compute { pinned }) => suite::compute(pinned),
        None => measure(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("weir-peers: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &Arguments) -> Outcome<()> {
    interrupt::heed();
    let settings = settings(arguments)?;
    let weir = std::path::absolute(&arguments.weir)?;
    if !weir.is_file() {
        return Err(Failure(format!("{} is not there: `make release` builds it", weir.display())));
    }
    let directory = tempfile::Builder::new().prefix("weir-bench-").tempdir_in(&arguments.ram);
    let directory = directory.map_err(Failure::of(format!("cannot work in {}", arguments.ram.display())))?;
    std::fs::create_dir_all(&arguments.storage)?;
    let storage = tempfile::Builder::new().prefix("weir-bench-").tempdir_in(&arguments.storage);
    let storage = storage.map_err(Failure::of(format!("cannot work in {}", arguments.storage.display())))?;
    let size = if arguments.short { SHORT_SIZE } else { SIZE };
    let workspace = prepare(directory.path(), storage.path(), size)?;
    let awake = if arguments.halt { None } else { hold_awake() };
    let machine = Machine::here(awake.is_some());
    let results = Suite::run(&settings, &workspace, &weir);
    write(&arguments.out, &report::json(&machine, &settings, &results))?;
    print(&machine, &results, &arguments.out);
    match results.failures.len() {
        0 => Ok(()),
        some => Err(Failure(format!("{some} failed, see above"))),
    }
}

/// The machine's description says which.
fn hold_awake() -> Option<Awake> {
    let awake = Awake::ask();
    awake
        .inspect_err(|error| eprintln!("weir-peers: idle processors halt: /dev/cpu_dma_latency: {error}"))
        .ok()
}

fn settings(arguments: &Arguments) -> Outcome<Settings> {
    let short = arguments.short;
    let seconds = arguments.seconds.unwrap_or(if short { 0.1 } else { 2.0 });
    if !(0.1..=60.0).contains(&seconds) {
        return Err(Failure(format!("--seconds {seconds}: give 0.1 to 60")));
    }
    Ok(Settings {
        repeats: usize::from(arguments.repeats.unwrap_or(if short { 1 } else { 3 })),
        runtime: Duration::from_secs_f64(seconds),
        warmup: Duration::from_millis(if short { 50 } else { 300 }),
        only: arguments.only.clone(),
        short,
        media_size: if short { SHORT_SIZE } else { MEDIA_SIZE },
        file_size: if short { SHORT_SIZE } else { FILE_SIZE },
    })
}

/// A file without holes: a server answers reads of a hole without I/O.
fn prepare(directory: &Path, storage: &Path, size: u64) -> Outcome<Workspace> {
    let file = directory.join("disk");
    let mut piece = vec![0; 1 << 20];
    let mut random = fastrand::Rng::with_seed(size);
    let mut writer = std::fs::File::create(&file)?;
    for _ in 0..size >> 20 {
        random.fill(&mut piece);
        writer.write_all(&piece).map_err(Failure::of(format!("cannot fill {}", file.display())))?;
    }
    Ok(Workspace { directory: directory.into(), storage: std::path::absolute(storage)?, file, size })
}

fn write(out: &Path, json: &serde_json::Value) -> Outcome<()> {
    if let Some(parent) = out.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(out, serde_json::to_string_pretty(json)?)
        .map_err(Failure::of(format!("cannot write {}", out.display())))
}

fn print(machine: &Machine, results: &Results, out: &Path) {
    println!("{machine}\n\n{}\n", table::LEGEND);
    print!("{}", table::of_cells(&results.cells, &results.comparisons, &results.bounds));
    print!("{}", table::of_layers(&results.layers));
    print!("{}", table::of_profiles(&results.profiles));
    println!(
        "{} rows and {} ratios in {}",
        results.cells.iter().map(|cell| cell.rows.len()).sum::<usize>(),
        results.comparisons.len(),
        out.display()
    );
    for failure in &results.failures {
        println!("FAILED: {failure}");
    }
    println!("{}", report::last_line(results));
}
