//! Weir beside its peers, in one run, on one machine: `make bench`.
//!
//! Absolute figures of a shared machine mean little, so every figure stands beside a peer's that was measured in the
//! same seconds, and beside what the bare sockets cost.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod driver;
mod error;
mod floor;
mod process;
mod result;
mod server;
mod suite;
mod weir;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use error::{Failure, Outcome};
use server::{Place, Transport};
use suite::{Settings, Suite};

/// Measures Weir beside qemu-storage-daemon, nbdkit, fio and bare sockets.
#[derive(Parser)]
struct Arguments {
    /// Rounds of every cell.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Only cells whose name contains this text.
    #[arg(long, default_value = "")]
    only: String,
    /// The `weir` program.
    #[arg(long, default_value = "target/release/weir")]
    weir: PathBuf,
    /// Where the results go.
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

#[derive(Subcommand)]
enum Part {
    /// The answering side of the floor; the suite starts it itself.
    #[command(hide = true)]
    Echo { transport: TransportName, address: String },
}

#[derive(Clone, Copy, ValueEnum)]
enum TransportName {
    Unix,
    Tcp,
}

/// Size of the disks: larger than any cache of the CPU, small enough for a small machine's RAM.
const SIZE: u64 = 512 << 20;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.part {
        Some(Part::Echo { transport: TransportName::Unix, ref address }) => {
            floor::serve(Transport::Unix, address)
        }
        Some(Part::Echo { transport: TransportName::Tcp, ref address }) => {
            floor::serve(Transport::Tcp, address)
        }
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
    if !(0.1..=60.0).contains(&arguments.seconds) {
        return Err(Failure(format!("--seconds {}: give 0.1 to 60", arguments.seconds)));
    }
    let settings = Settings {
        repeats: usize::from(arguments.repeats),
        runtime: Duration::from_secs_f64(arguments.seconds),
        only: arguments.only.clone(),
    };
    let weir = std::path::absolute(&arguments.weir)?;
    if !weir.is_file() {
        return Err(Failure(format!("{} is not there: `make release` builds it", weir.display())));
    }
    let directory = tempfile::Builder::new().prefix("weir-bench-").tempdir_in(&arguments.ram);
    let directory = directory.map_err(Failure::of(format!("cannot work in {}", arguments.ram.display())))?;
    std::fs::create_dir_all(&arguments.storage)?;
    let storage = tempfile::Builder::new().prefix("weir-bench-").tempdir_in(&arguments.storage);
    let storage = storage.map_err(Failure::of(format!("cannot work in {}", arguments.storage.display())))?;
    let place = prepare(directory.path(), storage.path())?;
    let results = Suite::run(&settings, &place, &weir)?;
    println!("{}\n", result::table_of_medians(&results.cells));
    println!("{}", result::table_of_ratios(&results.entries));
    if let Some(parent) = arguments.out.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(&arguments.out, serde_json::to_string_pretty(&results.entries)?)
        .map_err(Failure::of(format!("cannot write {}", arguments.out.display())))?;
    println!("\n{} results in {}", results.entries.len(), arguments.out.display());
    Ok(())
}

/// A written file: a hole would be answered without looking.
fn prepare(directory: &Path, storage: &Path) -> Outcome<Place> {
    let file = directory.join("disk");
    let mut piece = vec![0; 1 << 20];
    let mut random = fastrand::Rng::with_seed(SIZE);
    let mut writer = std::fs::File::create(&file)?;
    for _ in 0..SIZE >> 20 {
        random.fill(&mut piece);
        writer.write_all(&piece).map_err(Failure::of(format!("cannot fill {}", file.display())))?;
    }
    Ok(Place { directory: directory.into(), storage: std::path::absolute(storage)?, file, size: SIZE })
}
