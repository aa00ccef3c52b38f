//! The commands for the protocols of a shared volume: that of one file, and that of the volume's coordinator.

use std::ops::Range;

use weir_sim::volume::{self, claims, shells};
use weir_volume::planted::Bug;

use crate::cli::VolumeCommand;

const MOST_SHOWN: usize = 10;

/// One of the simulations.
pub struct Simulation {
    command: &'static str,
    bugs: fn() -> Vec<Bug>,
    replay: fn(u64, Option<Bug>, bool) -> Replayed,
    many: fn(Range<u64>, usize, Option<Bug>) -> Violations,
}

/// By seed.
type Violations = Vec<(u64, String)>;

/// The outcome of a seed.
struct Replayed {
    trace: Vec<String>,
    violation: Option<String>,
    /// The counts, in words.
    done: String,
}

/// `weir-sim volume`
pub const FILES: Simulation = Simulation {
    command: "volume",
    bugs: || Bug::FILES.to_vec(),
    replay: |seed, bug, traced| {
        let volume::Run { violation, trace, counts } = volume::run(seed, bug, traced);
        Replayed { trace, violation, done: format!("{} requests answered", counts.answered) }
    },
    many: volume::many,
};

/// `weir-sim claims`
pub const CLAIMS: Simulation = Simulation {
    command: "claims",
    bugs: || Bug::CLAIMS.to_vec(),
    replay: |seed, bug, traced| {
        let volume::Run { violation, trace, counts } = claims::run(seed, bug, traced);
        let claims::Counts { mounts, fenced, .. } = counts;
        Replayed { trace, violation, done: format!("{mounts} mounts, {fenced} fenced") }
    },
    many: claims::many,
};

/// `weir-sim shells`
pub const SHELLS: Simulation = Simulation {
    command: "shells",
    bugs: shells::bugs,
    replay: |seed, bug, traced| {
        let volume::Run { violation, trace, counts } = shells::run(seed, bug, traced);
        Replayed { trace, violation, done: format!("{counts:?}") }
    },
    many: shells::many,
};

/// Runs a command. Returns whether all promises held, or all bugs were found.
pub fn run(simulation: &Simulation, command: VolumeCommand) -> bool {
    let Simulation { command: name, bugs, replay, many } = simulation;
    match command {
        VolumeCommand::Run { seed, bug, trace } => {
            let run = replay(seed, bug, trace);
            run.trace.iter().for_each(|line| println!("{line}"));
            let verdict =
                run.violation.as_deref().map_or("all held".to_owned(), |text| format!("VIOLATION at {text}"));
            println!("seed {seed}, {}: {verdict}", run.done);
            run.violation.is_none()
        }
        VolumeCommand::Many { seeds, from, threads } => {
            let violations = many(from..from.saturating_add(seeds), threads, None);
            println!("{seeds} seeds, {} violations", violations.len());
            for (seed, text) in violations.iter().take(MOST_SHOWN) {
                println!("  weir-sim {name} run --seed {seed}: {text}");
            }
            violations.is_empty()
        }
        VolumeCommand::Bugs { seeds, threads } => {
            let found = bugs().into_iter().map(|bug| {
                let violations = many(0..seeds, threads, Some(bug));
                let first = violations.first();
                let first =
                    first.map_or("not found".to_owned(), |(seed, text)| format!("seed {seed}: {text}"));
                println!("{:<32}{:>6} of {seeds}  {first}", bug.name(), violations.len());
                !violations.is_empty()
            });
            // All of them, also after one that was not found.
            found.filter(|found| !found).count() == 0
        }
    }
}
