//! The commands for the protocol of a shared volume.

use weir_sim::volume::{many, run as replay};
use weir_volume::planted::Bug;

use crate::cli::VolumeCommand;

const MOST_SHOWN: usize = 10;

/// Runs a command. Returns whether all promises held, or all bugs were found.
pub fn run(command: VolumeCommand) -> bool {
    match command {
        VolumeCommand::Run { seed, bug, trace } => {
            let run = replay(seed, bug, trace);
            run.trace.iter().for_each(|line| println!("{line}"));
            let verdict =
                run.violation.as_deref().map_or("all held".to_owned(), |text| format!("VIOLATION at {text}"));
            println!("seed {seed}, {} requests answered: {verdict}", run.counts.answered);
            run.violation.is_none()
        }
        VolumeCommand::Many { seeds, from, threads } => {
            let violations = many(from..from.saturating_add(seeds), threads, None);
            println!("{seeds} seeds, {} violations", violations.len());
            for (seed, text) in violations.iter().take(MOST_SHOWN) {
                println!("  weir-sim volume run --seed {seed}: {text}");
            }
            violations.is_empty()
        }
        VolumeCommand::Bugs { seeds, threads } => {
            let found = Bug::ALL.map(|bug| {
                let violations = many(0..seeds, threads, Some(bug));
                let first = violations.first();
                let first =
                    first.map_or("not found".to_owned(), |(seed, text)| format!("seed {seed}: {text}"));
                println!("{:<32}{:>6} of {seeds}  {first}", bug.name(), violations.len());
                !violations.is_empty()
            });
            found.into_iter().all(|found| found)
        }
    }
}
