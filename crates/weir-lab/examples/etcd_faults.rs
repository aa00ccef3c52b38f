//! Rounds of faults of an etcd of three members, with real nodes under loads that remember every write, and etcd beside the embedded
//! registry: `make etcd-faults`. Needs root.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;
mod output;
#[path = "../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use output::Output;
use serde::Serialize;
use support::etcd_faults::Rig;
use support::etcd_faults::compare::{Comparison, compare};
use support::etcd_faults::figures::{Bounds, Round, Summary, summaries};

/// The bound.
const BOUNDS: Bounds = Bounds { unowned: Duration::from_secs(10) };

/// Rounds of faults of etcd. Example: `etcd_faults --rounds 12 --seed 7 --output json`.
#[derive(Parser)]
struct Arguments {
    /// Number of rounds; a fault of each kind comes before the second of any.
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// Chooses the faults; another one each time by default.
    #[arg(long)]
    seed: Option<u64>,
    /// Time to live of the nodes' leases, in seconds: `lease.ttl`.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(2..=60))]
    lease: u64,
    /// Number of takeovers with each kind of registry, in the comparison; 0: no comparison.
    #[arg(long, default_value_t = 5)]
    takeovers: usize,
    /// The nodes' logs are copied to this directory at the end.
    #[arg(long)]
    logs: Option<PathBuf>,
    /// The format of the figures.
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
}

/// Everything that was measured.
#[derive(Serialize)]
struct Report {
    seed: u64,
    lease_seconds: u64,
    rounds: Vec<Round>,
    summaries: Vec<Summary>,
    /// Lists that nodes made again because their watch was behind a compaction.
    listed_again: usize,
    comparison: Vec<Comparison>,
    /// What breaks a bound, with the number of the round.
    violations: Vec<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let seed = arguments.seed.unwrap_or_else(common::seed);
    eprintln!("seed {seed}, leases of {} s", arguments.lease);
    let report = run(&arguments, seed);
    arguments.output.print(&report, print);
    if report.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(arguments: &Arguments, seed: u64) -> Report {
    let lease = Duration::from_secs(arguments.lease);
    let (mut rounds, mut violations, mut listed_again) = (Vec::new(), Vec::new(), 0);
    if arguments.rounds > 0 {
        let mut rig = Rig::up(seed, lease);
        for (number, fault) in (1..).zip(rig.plan(arguments.rounds)) {
            let round = rig.round(fault);
            eprintln!("{number}/{}: {round}", arguments.rounds);
            let broken = round.broken(BOUNDS);
            if !broken.is_empty() {
                let logs = std::env::temp_dir().join(format!("weir-etcd-faults-{seed}-{number}"));
                rig.keep_logs(&logs);
                eprintln!("    VIOLATED: {}; logs: {}", broken.join("; "), logs.display());
            }
            violations.extend(broken.into_iter().map(|broken| format!("round {number}: {broken}")));
            rounds.push(round);
        }
        listed_again = rig.listed_again();
        if let Some(directory) = &arguments.logs {
            rig.keep_logs(directory);
        }
    }
    let comparison =
        if arguments.takeovers > 0 { compare(seed, lease, arguments.takeovers) } else { Vec::new() };
    let lease_seconds = arguments.lease;
    Report {
        seed,
        lease_seconds,
        summaries: summaries(&rounds),
        rounds,
        listed_again,
        comparison,
        violations,
    }
}

fn print(report: &Report) {
    println!(
        "{:26} {:>6} {:>17} {:>17} {:>8} {:>9} {:>6} {:>5}",
        "", "", "no owner, s", "no answer, s", "stall, s", "", "", ""
    );
    println!(
        "{:26} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>6} {:>5}",
        "fault", "rounds", "median", "longest", "median", "longest", "longest", "writes", "errors", "lost"
    );
    for summary in &report.summaries {
        println!(
            "{:26} {:>6} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>9} {:>6} {:>5}",
            summary.fault.name(),
            summary.rounds,
            summary.unowned_median_ms / 1000.0,
            summary.unowned_longest_ms / 1000.0,
            summary.unanswered_median_ms / 1000.0,
            summary.unanswered_longest_ms / 1000.0,
            summary.stall_longest_ms / 1000.0,
            summary.acknowledged,
            summary.errors,
            summary.lost,
        );
    }
    println!("without an owner, without an answered write: after the quorum is back; stall: since the fault");
    println!("lists made again because a compaction was ahead of a watch: {}", report.listed_again);
    if !report.comparison.is_empty() {
        println!("{:26} {:>16} {:>8} {:>18} {:>8}", "", "a change, ms", "", "a takeover, s", "");
        println!("{:26} {:>16} {:>8} {:>18} {:>8}", "registry", "median", "p99", "median", "longest");
    }
    for row in &report.comparison {
        println!(
            "{:26} {:>16.2} {:>8.2} {:>18.2} {:>8.2}",
            row.registry,
            row.change_median_ms,
            row.change_p99_ms,
            row.takeover_median_ms / 1000.0,
            row.takeover_longest_ms / 1000.0,
        );
    }
    for violation in &report.violations {
        println!("VIOLATED: {violation}");
    }
}
