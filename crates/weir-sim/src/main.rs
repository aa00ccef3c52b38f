//! `weir-sim`: the command line of the simulator.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod cli;
mod print;
mod right_cli;
mod states_cli;
mod volume_cli;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use weir_block::Nanos;
use weir_sim::{Bug, FAULTS, Finding, Progress, Run, Simulation, find_in, many_of, nodes, run};

use cli::{Cli, Command, SeedCommand, StatesCommand};

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A panic is a violation like any other: it is reported with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let held = match cli.command {
        Command::Seeds(command) => seeds(run, "weir-sim run", command),
        Command::Nodes { command } => seeds(nodes::run, "weir-sim nodes run", command),
        Command::States(command) => states(command),
        Command::Right(command) => right_cli::run(command),
        Command::Volume(command) => volume_cli::run(&volume_cli::FILES, command),
        Command::Shells(command) => volume_cli::run(&volume_cli::SHELLS, command),
        Command::Claims(command) => volume_cli::run(&volume_cli::CLAIMS, command),
        Command::Atlas => {
            print::atlas(&FAULTS);
            true
        }
    };
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn states(command: StatesCommand) -> bool {
    match command {
        StatesCommand::Run { seed, bug, trace } => {
            let run = match bug {
                Some(bug) => nodes::run_without(seed, bug, trace),
                None => nodes::run_states(seed, None, trace),
            };
            show(seed, run)
        }
        StatesCommand::Many { seeds: count, from, threads } => {
            let many =
                SeedCommand::Many { seeds: count, from, threads, bug: None, output: cli::Output::Text };
            seeds(nodes::run_states, "weir-sim states run", many)
        }
        StatesCommand::Bugs { seeds, threads } => states_cli::bugs(seeds, threads),
    }
}

/// `replay` is the command that replays one of its seeds.
fn seeds(simulation: Simulation, replay: &str, command: SeedCommand) -> bool {
    match command {
        SeedCommand::Run { seed, bug, trace } => one(simulation, seed, bug, trace),
        SeedCommand::Many { seeds, from, threads, bug, output } => {
            let end = from.saturating_add(seeds);
            let told = Mutex::new((0, Nanos::now()));
            let tell = |done: &Progress| progress(done, seeds, &told);
            let summary = many_of(simulation, from..end, threads, bug, false, &tell);
            print::summary(replay, &summary, bug, output);
            summary.violations.is_empty()
        }
        SeedCommand::Bugs { seeds, threads, output } => {
            print::findings_head(seeds, output);
            let findings = Bug::ALL.into_iter().map(|bug| {
                let finding = find_in(simulation, bug, seeds, threads, false);
                print::finding(&finding, output);
                finding
            });
            let findings: Vec<Finding> = findings.collect();
            print::findings_foot(&findings, seeds, output);
            findings.iter().all(|finding| finding.found > 0)
        }
    }
}

/// Replays one seed. Returns whether all promises held.
fn one(simulation: Simulation, seed: u64, bug: Option<Bug>, trace: bool) -> bool {
    show(seed, simulation(seed, bug, trace))
}

fn show(seed: u64, run: Run) -> bool {
    let mut out = std::io::stdout().lock();
    for line in &run.trace {
        // The reader may close the pipe.
        if writeln!(out, "{line}").is_err() {
            break;
        }
    }
    print::run(&mut out, seed, &run);
    run.violation.is_none()
}

/// Seeds, and longest time, between progress lines in a pipe or file.
const SEEDS_PER_LINE: u64 = 10_000;
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// Prints progress to stderr, so that the report can be piped. On a terminal, one updated line; otherwise occasional lines, so
/// that an interrupted run leaves its progress. `told` is the last line's count and time.
fn progress(done: &Progress, seeds: u64, told: &Mutex<(u64, Nanos)>) {
    let Progress { seeds: so_far, virtual_time, violations, first } = done;
    let hours = virtual_time.as_secs_f64() / 3600.0;
    let first = first.map(|seed| format!(", the first with seed {seed}")).unwrap_or_default();
    let line = format!("{so_far} of {seeds} seeds, {hours:.1} virtual hours, {violations} violations{first}");
    if std::io::stderr().is_terminal() {
        return eprint!("\r{line}\x1b[K{}", if *so_far < seeds { "" } else { "\n" });
    }
    let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
    if *so_far >= told.0 + SEEDS_PER_LINE || Nanos::now() >= told.1 + LONGEST_SILENCE {
        *told = (*so_far, Nanos::now());
        eprintln!("{line}");
    }
}
