//! Axes: positions of values and ticks.
//!
//! Every input gives a drawable axis: ends that are not numbers, or in the wrong order, are replaced by valid ones.

/// Maximum number of ticks on a linear axis.
const TICKS: f64 = 5.0;

/// Maps values to positions between `left` and `right`, which may be swapped, or be a bottom and a top.
#[derive(Debug)]
pub struct Axis {
    /// Position of the smallest value.
    pub left: f64,
    /// Position of the largest value.
    pub right: f64,
    least: f64,
    most: f64,
    scale: Scale,
    ticks: Vec<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Logarithmic,
    /// For shares: each further nine takes the same room.
    Tail,
}

impl Axis {
    /// From zero to `most` (above 0), about five ticks at round numbers.
    #[must_use]
    pub fn linear(left: f64, right: f64, most: f64) -> Axis {
        Axis::between(left, right, 0.0, most)
    }

    /// From `least` to `most`, about five ticks at round numbers.
    #[must_use]
    pub fn between(left: f64, right: f64, least: f64, most: f64) -> Axis {
        let least = if least.abs() < f64::MAX / 4.0 { least } else { 0.0 };
        let most = if most > least && most < f64::MAX / 4.0 { most } else { least + least.abs().max(1.0) };
        let step = round_step((most - least) / (TICKS - 1.0));
        let first = (least / step).ceil();
        let ticks = (0..=8).map(|number| (first + f64::from(number)) * step + 0.0);
        let ticks = ticks.take_while(|&tick| tick <= most + step * 1e-6).collect();
        Axis { left, right, least, most, scale: Scale::Linear, ticks }
    }

    /// From `least` to `most` (both above 0), at most five ticks where powers of ten allow it.
    #[must_use]
    pub fn logarithmic(left: f64, right: f64, least: f64, most: f64) -> Axis {
        let least = if least > 1e-30 && least < 1e30 { least } else { 1.0 };
        let most = if most < 1e30 { most.max(least * 1.5) } else { least * 10.0 };
        let decades = least.log10().floor() as i32..=most.log10().ceil() as i32;
        let ticks = |digits: &[f64]| -> Vec<f64> {
            let all =
                decades.clone().flat_map(|power| digits.iter().map(move |digit| digit * 10_f64.powi(power)));
            all.filter(|tick| (least..=most).contains(tick)).collect()
        };
        let choices = [ticks(&[1.0, 2.0, 5.0]), ticks(&[1.0, 3.0])];
        let ticks = choices.into_iter().find(|ticks| ticks.len() <= 5).unwrap_or_else(|| ticks(&[1.0]));
        Axis { left, right, least, most, scale: Scale::Logarithmic, ticks }
    }

    /// For shares from 0 to 1 − 10^-`nines` (1 to 9): 0, 50 %, 90 %, 99 %, 99.9 %, … so that the tail has most of the room.
    #[must_use]
    pub fn tail(left: f64, right: f64, nines: u32) -> Axis {
        let nines = nines.clamp(1, 9);
        let most = 1.0 - 0.1_f64.powi(nines as i32);
        let ticks = [0.0, 0.5].into_iter().chain((1..=nines).map(|nines| 1.0 - 0.1_f64.powi(nines as i32)));
        Axis { left, right, least: 0.0, most, scale: Scale::Tail, ticks: ticks.collect() }
    }

    /// Position of a value; values outside the range are at its ends, and NaN at the smaller one.
    #[must_use]
    pub fn at(&self, value: f64) -> f64 {
        let value = if value.is_nan() { self.least } else { value.clamp(self.least, self.most) };
        let share = match self.scale {
            Scale::Linear => (value - self.least) / (self.most - self.least),
            Scale::Logarithmic => (value / self.least).ln() / (self.most / self.least).ln(),
            Scale::Tail => (1.0 - value).log10() / (1.0 - self.most).log10(),
        };
        self.left + share.clamp(0.0, 1.0) * (self.right - self.left)
    }

    /// Whether the value is beyond the far end.
    #[must_use]
    pub fn is_beyond(&self, value: f64) -> bool {
        value > self.most * 1.000_001
    }

    /// The labelled values.
    #[must_use]
    pub fn ticks(&self) -> &[f64] {
        &self.ticks
    }
}

/// The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `step`.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let mut round = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|digit| digit * power);
    round.find(|&candidate| candidate >= step * 0.999_999).unwrap_or(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn axes_have_round_ticks_and_keep_values_inside() {
        let axis = Axis::linear(10.0, 110.0, 92.0);
        assert_eq!(axis.ticks(), [0.0, 25.0, 50.0, 75.0]);
        assert_eq!(Axis::linear(0.0, 1.0, 80.0).ticks(), [0.0, 20.0, 40.0, 60.0, 80.0]);
        assert_eq!(axis.at(46.0), 60.0);
        assert_eq!(axis.at(1e9), 110.0);
        assert!(axis.is_beyond(92.1) && !axis.is_beyond(92.0));

        let axis = Axis::logarithmic(0.0, 100.0, 1e3, 1e6);
        assert_eq!(axis.ticks(), [1e3, 1e4, 1e5, 1e6]);
        assert!((axis.at(1e4) - 100.0 / 3.0).abs() < 1e-9);
        assert_eq!(axis.at(0.0), 0.0);
        let narrow = Axis::logarithmic(0.0, 100.0, 90e3, 600e3);
        assert_eq!(narrow.ticks(), [100e3, 200e3, 500e3]);
        let wider = Axis::logarithmic(0.0, 100.0, 20e3, 4e6);
        assert_eq!(wider.ticks(), [30e3, 100e3, 300e3, 1e6, 3e6]);
    }

    #[test]
    fn steps_are_round() {
        for (step, round) in
            [(1.0, 1.0), (1.1, 2.0), (2.3, 2.5), (2.6, 5.0), (7.0, 10.0), (230.0, 250.0), (0.02, 0.02)]
        {
            assert!((round_step(step) - round).abs() < 1e-9, "{step}");
        }
    }

    #[test]
    fn every_nine_has_the_same_room() {
        let axis = Axis::tail(0.0, 300.0, 3);
        let at = |share| axis.at(share);
        for (share, place) in [(0.0, 0.0), (0.9, 100.0), (0.99, 200.0), (0.999, 300.0), (1.0, 300.0)] {
            assert!((at(share) - place).abs() < 1e-6, "{share}: {}", at(share));
        }
        assert!((at(0.5) - 30.1).abs() < 0.1);
        assert_eq!(axis.ticks().len(), 5);
    }

    #[test]
    fn axes_may_begin_below_zero_and_stand_upright() {
        let axis = Axis::between(100.0, 0.0, -0.2, 1.0);
        assert_eq!(axis.ticks(), [0.0, 0.5, 1.0]);
        assert!((axis.at(0.4) - 50.0).abs() < 1e-9);
        assert_eq!(axis.at(f64::NAN), 100.0);
    }

    proptest! {
        #[test]
        fn any_number_has_a_place(a in any::<f64>(), b in any::<f64>(), value in any::<f64>(), nines in any::<u32>()) {
            let axes = [
                Axis::between(0.0, 460.0, a, b),
                Axis::linear(0.0, 460.0, a),
                Axis::logarithmic(0.0, 460.0, a, b),
                Axis::tail(0.0, 460.0, nines),
            ];
            for axis in axes {
                prop_assert!((0.0..=460.0).contains(&axis.at(value)), "{axis:?}");
                prop_assert!(axis.ticks().len() < 64, "{axis:?}");
                for tick in axis.ticks() {
                    prop_assert!(tick.is_finite() && (0.0..=460.0).contains(&axis.at(*tick)), "{axis:?}");
                }
            }
        }
    }
}
