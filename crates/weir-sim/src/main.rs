//! `weir-sim`: the command line of the simulator.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod cli;
mod print;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use weir_sim::{Bug, FAULTS, Finding, Summary, find, many, run};

use cli::{Cli, Command, Output};

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A core that panics is a violation like any other: it is reported with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let held = match cli.command {
        Command::Run { seed, bug, trace } => one(seed, bug, trace),
        Command::Many { seeds, from, threads, bug, output } => {
            let end = from.saturating_add(seeds);
            let summary = many(from..end, threads, bug, false, &|done| progress(done, seeds));
            report(&summary, bug, output)
        }
        Command::Bugs { seeds, threads, output } => {
            print::findings_head(seeds, output);
            let findings = Bug::ALL.into_iter().map(|bug| {
                let finding = find(bug, seeds, threads, false);
                print::finding(&finding, output);
                finding
            });
            let findings: Vec<Finding> = findings.collect();
            print::findings_foot(&findings, seeds, output);
            findings.iter().all(|finding| finding.found > 0)
        }
        Command::Atlas => {
            print::atlas(&FAULTS);
            true
        }
    };
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Replays one seed. Whether all promises held.
fn one(seed: u64, bug: Option<Bug>, trace: bool) -> bool {
    let run = run(seed, bug, trace);
    let mut out = std::io::stdout().lock();
    for line in &run.trace {
        // Who closes the pipe has seen enough.
        if writeln!(out, "{line}").is_err() {
            break;
        }
    }
    print::run(&mut out, seed, &run);
    run.violation.is_none()
}

fn report(summary: &Summary, bug: Option<Bug>, output: Output) -> bool {
    print::summary(summary, bug, output);
    summary.violations.is_empty()
}

/// On the error stream, so that the report can be piped, and only for somebody who looks.
fn progress(done: u64, seeds: u64) {
    if std::io::stderr().is_terminal() {
        eprint!("\r{done} of {seeds} seeds\x1b[K{}", if done < seeds { "" } else { "\n" });
    }
}
