//! The extent of a measurement: four matrices, and the time that they take.

use std::time::Duration;

use crate::cell::{Cell, Direction, MIXED_READS, Pattern, Shape};

/// The share of a run's measured time that is spent before it, to warm up.
pub const WARMUP_SHARE: f64 = 0.2;

/// Time between runs: settling, connecting.
pub const BETWEEN_RUNS: Duration = Duration::from_millis(100);

/// Measured time of a run, unless the caller or a budget says otherwise.
pub const RUNTIME: Duration = Duration::from_millis(7400);

/// Shortest measured time of a run: below it the ends of the run weigh too much.
pub const SHORTEST_RUN: Duration = Duration::from_millis(200);

/// A matrix of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Six cells: enough for hypotheses to begin with.
    Probe,
    /// Eight cells: about six minutes for a layer.
    Quick,
    /// Sixty cells: about three quarters of an hour for a layer.
    Standard,
    /// 336 cells: a night.
    Exhaustive,
}

/// The six kinds of load of the matrix, at one block size.
fn kinds(block_bytes: u32) -> [Shape; 6] {
    let shape = |pattern, direction| Shape::new(block_bytes, pattern, direction);
    [
        shape(Pattern::Sequential, Direction::Read),
        shape(Pattern::Sequential, Direction::Write),
        shape(Pattern::Random, Direction::Read),
        shape(Pattern::Random, Direction::Write),
        shape(Pattern::Random, Direction::Mixed(MIXED_READS)),
        shape(Pattern::Random, Direction::Write).through(),
    ]
}

fn matrix(blocks_kib: &[u32], depths: &[u32]) -> Vec<Cell> {
    let shapes = blocks_kib.iter().flat_map(|kib| kinds(kib << 10));
    shapes.flat_map(|shape| depths.iter().map(move |depth| shape.at(*depth))).collect()
}

impl Tier {
    /// The cells. `Quick` has a log's writer (8K sequential write), a database's reads and writes (4K random) and
    /// a backup (256K sequential read), each at queue depth 1, where each I/O waits for itself, and 32, where a full
    /// queue shows what the way can carry.
    #[must_use]
    pub fn cells(self) -> Vec<Cell> {
        let (read, write) = (Direction::Read, Direction::Write);
        match self {
            Tier::Probe => {
                let small = |direction| Shape::new(4 << 10, Pattern::Random, direction);
                vec![
                    Shape::new(8 << 10, Pattern::Sequential, write).at(8),
                    small(read).at(1),
                    small(read).at(32),
                    small(write).at(1),
                    small(write).at(32),
                    Shape::new(256 << 10, Pattern::Sequential, read).at(32),
                ]
            }
            Tier::Quick => {
                let shapes = [
                    Shape::new(8 << 10, Pattern::Sequential, write),
                    Shape::new(4 << 10, Pattern::Random, read),
                    Shape::new(4 << 10, Pattern::Random, write),
                    Shape::new(256 << 10, Pattern::Sequential, read),
                ];
                shapes.into_iter().flat_map(|shape| [shape.at(1), shape.at(32)]).collect()
            }
            Tier::Standard => matrix(&[4, 8, 64, 256, 1024], &[1, 32]),
            Tier::Exhaustive => matrix(&[4, 8, 16, 64, 128, 256, 512, 1024], &[1, 4, 16, 32, 64, 128, 256]),
        }
    }
}

/// Load before a run that is not counted.
#[must_use]
pub fn warmup(runtime: Duration) -> Duration {
    runtime.mul_f64(WARMUP_SHARE)
}

/// Time that so many runs take.
#[must_use]
pub fn time_of(runs: usize, runtime: Duration) -> Duration {
    let one = runtime + warmup(runtime) + BETWEEN_RUNS;
    Duration::try_from_secs_f64(one.as_secs_f64() * runs as f64).unwrap_or(Duration::MAX)
}

/// The measured time that each of so many runs can have within a budget, at most `longest`.
///
/// # Errors
/// The shortest sensible runs do not fit; the time that they need.
pub fn runtime_within(budget: Duration, runs: usize, longest: Duration) -> Result<Duration, Duration> {
    let share = budget.as_secs_f64() / runs.max(1) as f64 - BETWEEN_RUNS.as_secs_f64();
    let fits = Duration::try_from_secs_f64(share / (1.0 + WARMUP_SHARE)).unwrap_or(Duration::ZERO);
    if fits < SHORTEST_RUN { Err(time_of(runs, SHORTEST_RUN)) } else { Ok(fits.min(longest)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tier_has_its_cells_once() {
        for (tier, cells) in
            [(Tier::Probe, 6), (Tier::Quick, 8), (Tier::Standard, 60), (Tier::Exhaustive, 8 * 7 * 6)]
        {
            let mut all = tier.cells();
            assert_eq!(all.len(), cells, "{tier:?}");
            all.sort();
            all.dedup();
            assert_eq!(all.len(), cells, "{tier:?}");
        }
        assert!(Tier::Exhaustive.cells().iter().any(|cell| cell.to_string() == "512K random 70/30, QD 128"));
        assert!(
            Tier::Exhaustive
                .cells()
                .iter()
                .any(|cell| cell.to_string() == "1M random write, write-through, QD 256")
        );
    }

    #[test]
    fn the_quick_tier_takes_about_six_minutes_for_a_layer() {
        let minutes = time_of(8 * 5, RUNTIME).as_secs_f64() / 60.0;
        assert!((5.5..6.5).contains(&minutes), "{minutes}");
    }

    #[test]
    fn a_budget_shortens_runs_until_they_are_too_short() {
        let ten_minutes = Duration::from_secs(600);
        let runtime = runtime_within(ten_minutes, 240, RUNTIME).unwrap();
        assert!(time_of(240, runtime) <= ten_minutes);
        assert!(time_of(240, runtime) > ten_minutes.mul_f64(0.99));
        assert_eq!(runtime_within(ten_minutes, 1, RUNTIME), Ok(RUNTIME));
        let needed = runtime_within(ten_minutes, 10_000, RUNTIME).unwrap_err();
        assert!(needed > ten_minutes);
        assert!(runtime_within(Duration::ZERO, 1, RUNTIME).is_err());
    }
}
