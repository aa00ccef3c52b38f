//! The steady state of SNIA's Solid State Storage Performance Test Specification (PTS).
//!
//! A new or idle device is faster at first than later. The specification runs rounds until, in a window of five, the
//! figure's largest and smallest value lie no further apart than 20 % of their average (excursion), and the straight line
//! through them rises or falls by no more than 10 % of the average over the window (slope).

use serde::{Deserialize, Serialize};

/// Rounds of a window.
pub const WINDOW: usize = 5;

/// Largest distance between two rounds of the window, in percent of their average.
pub const EXCURSION_PERCENT: f64 = 20.0;

/// Largest rise or fall of the line through the window, in percent of the average.
pub const SLOPE_PERCENT: f64 = 10.0;

/// The steady state of a load, reached or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SteadyState {
    /// Whether the last five rounds are steady; the summary is of these.
    pub reached: bool,
    /// Reads and writes per second of every round.
    pub rounds: Vec<f64>,
    /// Of the last window, in percent of its average; `None` with fewer rounds than a window has.
    pub excursion_percent: Option<f64>,
    /// Of the last window, in percent of its average, falling ones as well; `None` as above.
    pub slope_percent: Option<f64>,
}

impl SteadyState {
    /// Judges the last window of these rounds.
    #[must_use]
    pub fn of(rounds: &[f64]) -> SteadyState {
        let window = rounds.len().checked_sub(WINDOW).map(|first| &rounds[first..]);
        let judged = window.map(|window| (excursion(window), slope(window)));
        SteadyState {
            reached: judged
                .is_some_and(|(excursion, slope)| excursion <= EXCURSION_PERCENT && slope <= SLOPE_PERCENT),
            rounds: rounds.to_vec(),
            excursion_percent: judged.map(|judged| judged.0),
            slope_percent: judged.map(|judged| judged.1),
        }
    }
}

fn average(window: &[f64]) -> f64 {
    window.iter().sum::<f64>() / window.len() as f64
}

/// In percent of the average; a window without requests is not steady.
fn percent(value: f64, average: f64) -> f64 {
    if average > 0.0 { value / average * 100.0 } else { f64::MAX }
}

fn excursion(window: &[f64]) -> f64 {
    let largest = window.iter().copied().fold(f64::MIN, f64::max);
    let smallest = window.iter().copied().fold(f64::MAX, f64::min);
    percent(largest - smallest, average(window))
}

/// The rise or fall of the least-squares line from the first round to the last.
fn slope(window: &[f64]) -> f64 {
    let middle = (window.len() - 1) as f64 / 2.0;
    let (mut above, mut below) = (0.0, 0.0);
    for (round, value) in window.iter().enumerate() {
        let distance = round as f64 - middle;
        above += distance * value;
        below += distance * distance;
    }
    percent((above / below * (window.len() - 1) as f64).abs(), average(window))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn windows_are_judged_as_the_specification_says() {
        let reached = |rounds: &[f64]| SteadyState::of(rounds).reached;
        assert!(!reached(&[100.0; 4]), "too few rounds");
        assert!(reached(&[100.0; 5]));
        assert!(reached(&[500.0, 100.0, 101.0, 99.0, 100.0, 100.0]), "the first is out of the window");
        assert!(!reached(&[100.0, 100.0, 121.0, 100.0, 100.0]), "excursion, 20.2 % of 104.2");
        assert!(reached(&[100.0, 100.0, 119.0, 100.0, 100.0]));
        assert!(reached(&[95.2, 97.6, 100.0, 102.4, 104.8]), "a rise of 9.6 %");
        assert!(!reached(&[94.8, 97.4, 100.0, 102.6, 105.2]), "a rise of 10.4 %");
        assert!(!reached(&[105.2, 102.6, 100.0, 97.4, 94.8]), "a fall of 10.4 %");
        assert!(!reached(&[0.0; 5]), "nothing was done");
        let state = SteadyState::of(&[95.2, 97.6, 100.0, 102.4, 104.8]);
        assert!((state.slope_percent.unwrap() - 9.6).abs() < 1e-9, "{state:?}");
        assert!((state.excursion_percent.unwrap() - 9.6).abs() < 1e-9, "{state:?}");
    }

    proptest! {
        #[test]
        fn the_line_is_that_of_the_normal_equations(window in prop::array::uniform5(1.0f64..1000.0)) {
            // Reference implementation: solve for intercept and slope with sums, then evaluate both ends.
            let n = 5.0;
            let (mut x, mut y, mut xx, mut xy) = (0.0, 0.0, 0.0, 0.0);
            for (at, value) in (1..).zip(window) {
                let at = f64::from(at);
                (x, y, xx, xy) = (x + at, y + value, xx + at * at, xy + at * value);
            }
            let rise = (n * xy - x * y) / (n * xx - x * x);
            let intercept = (y - rise * x) / n;
            let ends = ((intercept + rise * 5.0) - (intercept + rise)).abs();
            prop_assert!((slope(&window) - ends / (y / n) * 100.0).abs() < 1e-6);
        }
    }
}
