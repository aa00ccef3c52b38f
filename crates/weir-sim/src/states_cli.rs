//! `weir-sim states`: whole nodes, with the faults and requests that concern their states.

use weir_sim::many_of;
use weir_sim::nodes::{StateBug, run_without};

/// Disables each rule that this simulation reaches. Returns whether every one was found.
pub fn bugs(seeds: u64, threads: usize) -> bool {
    let mut all = true;
    for bug in StateBug::ALL {
        let simulation = |seed, _, traced| run_without(seed, bug, traced);
        let violations = many_of(simulation, 0..seeds, threads, None, false, &|_| {}).violations;
        let first = violations.first();
        let first = first.map_or_else(|| "not found".to_owned(), |(seed, text)| format!("{seed:>6}  {text}"));
        println!("{:<28} {:>6}  {first}", bug.name(), violations.len());
        all &= !violations.is_empty();
    }
    all
}
