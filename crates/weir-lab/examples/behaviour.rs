//! Measures what guests feel while Weir copes, with real processes, and prints it: `make heal`, `make join`, `make fill-picture`
//! and `make neighbours`. Needs root (`hostile` does not).
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;
mod output;
#[path = "../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use output::Output;
use serde::Serialize;
use support::behaviour::{Backlog, Loss, fill_copy, fill_log, lose_replica, neighbours};
use support::guest_load::Shape;
use support::hostile::{silent, unread};
use support::picture;

/// Measures what guests feel while Weir copes. Example: `behaviour neighbours --seconds 10 --output json`.
#[derive(Parser)]
struct Arguments {
    /// The format of the figures.
    #[arg(long, value_enum, default_value = "text", global = true)]
    output: Output,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// A replica is killed and is cut off, under both policies with replicas: stall, time to restore, throughput. Then a
    /// replica is added beside live writes.
    Heal {
        /// Dirty data to be copied to the replica that is added, in MiB.
        #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=1024))]
        dirty: u64,
    },
    /// A disk with a large log gets a second replica under a guest that writes with a queue of 16: what part of the throughput of
    /// two replicas the guest has meanwhile.
    Join {
        /// Dirty data to be copied, in MiB; the log has 4 GiB.
        #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u64).range(1..=1900))]
        dirty: u64,
        /// The number of rounds; the median is printed.
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=99))]
        rounds: u64,
    },
    /// A guest that writes faster than the backing takes: latency against time as SVG and CSV.
    FillPicture {
        /// The duration of the guest's writes, in seconds.
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
        /// The picture; the CSV file goes beside it.
        #[arg(long, default_value = "target/fill.svg")]
        out: PathBuf,
    },
    /// A polite guest without and with a greedy one beside it, on one slow backing.
    Neighbours {
        /// Length of each of the two measurements, in seconds.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
    },
    /// Clients that mean harm. 200 connections that never read their replies (128 reads of 64 KiB each): the p99 of another disk's
    /// guest beside them and before. 300 and 2,000 connections that say nothing: the time until a new client is served.
    Hostile {
        /// Length of each measurement, in seconds.
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
        /// The number of rounds of the first case; medians are printed.
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
        rounds: u32,
    },
}

/// The part of its throughput that a guest keeps while a replica is added.
#[derive(Serialize)]
struct Kept {
    rounds: u64,
    /// Before the log is half full.
    median_at_first: f64,
    median: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let Arguments { output, what } = Arguments::parse();
    let seed = common::seed();
    match what {
        What::Heal { dirty } => {
            for policy in ["write-back+1", "write-back+2"] {
                for loss in [Loss::Killed, Loss::CutOff] {
                    let lost = lose_replica(policy, loss, Backlog::Whatever, seed);
                    print(output, "a replica is lost", &lost);
                }
                let lost = lose_replica(policy, Loss::Killed, Backlog::Large(20 << 20), seed);
                print(output, "a replica is lost, and a third of the log has to be copied", &lost);
            }
            for depth in [1, 4, 16] {
                let shape = Shape { depth, read_percent: 0, rate: None };
                print(output, "a replica is added", &fill_copy(shape, dirty << 20, seed));
            }
        }
        What::Join { dirty, rounds } => {
            let (mut at_first, mut kept) = (Vec::new(), Vec::new());
            for round in 0..rounds {
                let shape = Shape { depth: 16, read_percent: 0, rate: None };
                let filled = fill_copy(shape, dirty << 20, seed + round);
                print(output, "a second replica is added", &filled);
                at_first.push(filled.kept_at_first);
                kept.push(filled.kept_of_two);
            }
            let kept = Kept { rounds, median_at_first: median(at_first), median: median(kept) };
            print(output, "of two replicas' throughput", &kept);
        }
        What::FillPicture { seconds, out } => {
            let filling = fill_log(Duration::from_secs(seconds), seed);
            std::fs::write(&out, picture::svg(&filling)).unwrap();
            std::fs::write(out.with_extension("csv"), picture::csv(&filling)).unwrap();
            output.print(&filling, |filling| {
                println!(
                    "longest time without an answer {:.0} ms; see {} and the CSV file beside it",
                    filling.longest_stall_ms,
                    out.display()
                );
            });
        }
        What::Neighbours { seconds } => {
            print(output, "a greedy neighbour", &neighbours(Duration::from_secs(seconds), seed));
        }
        What::Hostile { seconds, rounds } => {
            let unread = unread(Duration::from_secs(seconds), rounds, seed);
            print(
                output,
                "clients of another disk that never read their replies (wanted: p99_ratio of 1.5)",
                &unread,
            );
            for connections in [300, 2_000] {
                let silent = silent(connections);
                print(output, "a new client beside silent connections (wanted: 500 ms)", &silent);
            }
        }
    }
}

fn print(output: Output, title: &str, figures: &impl Serialize) {
    output.print(figures, |figures| {
        println!("{title}");
        list("  ", &serde_json::to_value(figures).unwrap());
    });
}

/// One figure on a line.
fn list(indent: &str, figures: &serde_json::Value) {
    for (name, value) in figures.as_object().into_iter().flatten() {
        match value.as_f64() {
            _ if value.is_object() => {
                println!("{indent}{name}");
                list(&format!("{indent}  "), value);
            }
            Some(number) if value.is_f64() => println!("{indent}{name:24} {number:.2}"),
            _ => println!("{indent}{name:24} {value}"),
        }
    }
}
