//! A small cluster made of the protocol cores alone, in virtual time, with faults decided by a seed.
//!
//! `WEIR_MODEL_SEEDS=n` runs n seeds instead of the usual number; `WEIR_MODEL_SEED=s` replays one and prints its trace.
#![allow(clippy::unwrap_used)]

mod backing;
mod checks;
mod control;
mod faults;
mod guest;
mod network;
mod owner_process;
mod registry;
mod shell;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use world::{Counts, Mutation, World};

/// One run; what it saw, or what went wrong.
fn run(seed: u64, mutation: Option<Mutation>, traced: bool) -> Result<Counts, String> {
    let mut world = World::new(seed, mutation, traced);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    let violation = match ended {
        Ok(()) => world.violation.take(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            Some(text.unwrap_or_else(|| "the core panicked".into()))
        }
    };
    match violation {
        None => Ok(world.counts),
        Some(violation) if traced => {
            let steps = if environment("WEIR_MODEL_SEED").is_some() { usize::MAX } else { 400 };
            Err(format!("{}\n{violation}", world.trace(steps)))
        }
        Some(violation) => Err(violation),
    }
}

fn environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn promises_hold_under_faults_and_everything_settles_afterwards() {
    let seeds = match environment("WEIR_MODEL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..environment("WEIR_MODEL_SEEDS").unwrap_or(2_000),
    };
    let many = seeds.end - seeds.start > 100;
    let mut total = Counts::default();
    for seed in seeds {
        match run(seed, None, false) {
            Ok(counts) => total.add(counts),
            Err(_) => {
                let trace = run(seed, None, true).expect_err("a run is repeatable");
                panic!("seed {seed} (WEIR_MODEL_SEED={seed} replays it):\n{trace}");
            }
        }
    }
    println!("{total:?}");
    assert!(!many || total.is_lively(), "the faults have become too rare: {total:?}");
}

#[test]
fn planted_faults_are_found() {
    for mutation in Mutation::ALL {
        let found = (0..1_000).find_map(|seed| Some((seed, run(seed, Some(mutation), false).err()?)));
        let (seed, violation) = found.unwrap_or_else(|| panic!("{mutation:?} was not found"));
        println!("{mutation:?}: seed {seed}, {violation}");
    }
}

#[test]
fn a_seed_is_a_run() {
    let trace = |seed| {
        let mut world = World::new(seed, None, true);
        world.run();
        world.trace(usize::MAX)
    };
    assert_eq!(trace(7), trace(7));
    assert_ne!(trace(7), trace(8));
}
