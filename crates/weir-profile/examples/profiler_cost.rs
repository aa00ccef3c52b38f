//! Cost of the profiler for each request, in nanoseconds of one processor:
//! `cargo run --release -p weir-profile --example profiler_cost`.
//!
//! 100,000 requests a second for 30 seconds of virtual time, in several shapes; the time of generating the requests is measured
//! separately and subtracted. 100 ns are 1 % of a processor for 100,000 requests a second.

use std::hint::black_box;
use std::time::Duration;

use weir_block::{Nanos, Observe, RequestKind};
use weir_load::cpu::of_this_thread;
use weir_profile::{Profiler, Settings};

const REQUESTS: u64 = 3_000_000;

/// Interval between requests, in nanoseconds.
const GAP: u64 = 10_000;

/// Name, length in bytes, and a function from a request's number and a random number to its position.
type Shape = (&'static str, u64, fn(u64, u64) -> u64);

/// The measured shapes.
const SHAPES: [Shape; 5] = [
    ("4 KiB random over 1 TiB", 4096, |_, random| random % (1 << 28)),
    ("4 KiB random over 8 MiB", 4096, |_, random| random % 2048),
    ("4 KiB, 90 % to 1 % of 16 GiB", 4096, |_, random| match random % 10 {
        0 => random / 10 % (1 << 22),
        _ => random / 10 % 41_943,
    }),
    ("4 KiB sequential", 4096, |number, _| number),
    ("64 KiB random over 1 TiB", 65_536, |_, random| random % (1 << 24) * 16),
];

fn run(place: fn(u64, u64) -> u64, mut each: impl FnMut(Nanos, RequestKind, u64)) -> Duration {
    let mut random = fastrand::Rng::with_seed(1);
    // Processor time, because other processes may use the machine.
    let start = of_this_thread();
    for number in 0..REQUESTS {
        let drawn = random.u64(..);
        let kind = if drawn >> 63 == 0 { RequestKind::Read } else { RequestKind::Write };
        each(Nanos(number * GAP), kind, place(number, drawn >> 2) * 4096);
    }
    of_this_thread().saturating_sub(start)
}

fn main() {
    let profiler = || Profiler::new(Settings::default(), Nanos(0), Duration::ZERO);
    println!("memory: {} bytes", profiler().memory());
    for (name, length, place) in SHAPES {
        let mut costs: Vec<f64> = (0..5)
            .map(|_| {
                let making = run(place, |now, kind, offset| {
                    black_box((now, kind, offset, length));
                });
                let mut watched = profiler();
                let all = run(place, |now, kind, offset| watched.observe(now, kind, offset, length));
                black_box(watched.profile(Nanos(REQUESTS * GAP), "cost"));
                all.saturating_sub(making).as_nanos() as f64 / REQUESTS as f64
            })
            .collect();
        costs.sort_by(f64::total_cmp);
        println!(
            "{name}: {:.0} ns per request (median of five, {:.0} to {:.0})",
            costs[2], costs[0], costs[4]
        );
    }
}
