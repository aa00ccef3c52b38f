//! The commands for the right to serve.

use std::io::Write;

use weir_sim::right::{Bug, Summary, find, many, run as replay};

use crate::cli::RightCommand;

const MOST_SHOWN: usize = 10;

/// Runs a command. Returns whether all promises held, or all bugs were found.
pub fn run(command: RightCommand) -> bool {
    match command {
        RightCommand::Run { seed, bug, trace } => {
            let run = replay(seed, bug, trace);
            let mut out = std::io::stdout().lock();
            for line in run.trace.iter().chain(&run.violation) {
                // The reader may close the pipe.
                if writeln!(out, "{line}").is_err() {
                    break;
                }
            }
            let verdict = if run.violation.is_none() { "all held" } else { "VIOLATION" };
            let _ = writeln!(out, "seed {seed}: {verdict}");
            run.violation.is_none()
        }
        RightCommand::Many { seeds, from, threads, bug } => {
            summary(&many(from..from.saturating_add(seeds), threads, bug, false))
        }
        RightCommand::Bugs { seeds, threads } => {
            let found = Bug::all().map(|bug| {
                let finding = find(bug, seeds, threads, false);
                let first =
                    finding.first.map_or("not found".into(), |(seed, text)| format!("seed {seed}: {text}"));
                println!("{:<26}{:>7} of {seeds}  {first}", bug.name(), finding.found);
                finding.found > 0
            });
            let found: Vec<bool> = found.collect();
            found.into_iter().all(|found| found)
        }
    }
}

fn summary(summary: &Summary) -> bool {
    println!("{:<26}{:>14}", "seeds", summary.seeds);
    for (what, number) in summary.counts.list() {
        println!("{what:<26}{number:>14}");
    }
    println!("{:<26}{:>14}", "violations", summary.violations.len());
    for (seed, text) in summary.violations.iter().take(MOST_SHOWN) {
        println!("  seed {seed}: {text}");
    }
    summary.violations.is_empty()
}
