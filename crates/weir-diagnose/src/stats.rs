//! Statistics of a ratio from repeats.
//!
//! Rates and latencies are compared as ratios, so everything here works on logarithms: a difference of
//! logarithms is a ratio, repeats scatter about it evenly on both sides, and twice as fast is as far from "the
//! same" as half as fast. Two samples of unequal scatter are compared by Welch's test (Biometrika 34, 1947).
//!
//! "The same" is a statement of its own and needs its own evidence: two one-sided tests (Schuirmann 1987) must
//! both say that the ratio lies within the practical margin. A difference counts only when it is shown to lie
//! *beyond* that margin. Many cells are looked at together, so the p-values are adjusted for the share of false
//! discoveries (Benjamini and Hochberg 1995).

use statrs::distribution::{ContinuousCDF, StudentsT};

/// Two layers whose ratio is within 1 ± this share (in logarithms, on both sides) are the same for all practice.
pub const PRACTICAL_MARGIN: f64 = 0.05;

/// Share of false statements that is accepted, among differences and among equalities.
pub const FALSE_DISCOVERIES: f64 = 0.05;

/// Confidence of the intervals that are shown.
pub const CONFIDENCE: f64 = 0.95;

/// Chance with which [`Comparison::repeats_needed`] wants a true answer to show.
const POWER_QUANTILE: f64 = 0.842;

/// Quantile of the normal distribution for a one-sided test at 5 %.
const TEST_QUANTILE: f64 = 1.645;

/// Repeats that agree to the last digit still have some error: no standard error is taken to be below this.
const LEAST_STANDARD_ERROR: f64 = 1e-6;

/// Mean and variance of the logarithms of repeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogSample {
    count: f64,
    mean: f64,
    variance: f64,
}

impl LogSample {
    /// `None` for fewer than two values, and when one is not positive and finite.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<LogSample> {
        if values.len() < 2 || values.iter().any(|value| !value.is_finite() || *value <= 0.0) {
            return None;
        }
        let count = values.len() as f64;
        let mean = values.iter().map(|value| value.ln()).sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value.ln() - mean).powi(2)).sum();
        Some(LogSample { count, mean, variance: squares / (count - 1.0) })
    }

    /// The ratio of the sample's geometric mean to either end of its interval, less 1: 0.1 says "within about
    /// 10 %" at [`CONFIDENCE`].
    #[must_use]
    pub fn half_width(&self) -> f64 {
        let error = (self.variance / self.count).sqrt();
        (t_quantile(self.count - 1.0, 0.5 + CONFIDENCE / 2.0) * error).exp() - 1.0
    }

    /// The standard deviation of the logarithms: about the share by which repeats differ.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        self.variance.sqrt()
    }
}

/// The ratio of two samples, `after` over `before`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    log_ratio: f64,
    standard_error: f64,
    degrees: f64,
    variances: f64,
}

/// Compares two samples by Welch's test, with his degrees of freedom (Welch 1947, Satterthwaite 1946).
#[must_use]
pub fn compare(before: &LogSample, after: &LogSample) -> Comparison {
    let (a, b) = (before.variance / before.count, after.variance / after.count);
    let degrees = if a + b > 0.0 {
        (a + b).powi(2) / (a * a / (before.count - 1.0) + b * b / (after.count - 1.0))
    } else {
        before.count + after.count - 2.0
    };
    Comparison {
        log_ratio: after.mean - before.mean,
        standard_error: (a + b).sqrt().max(LEAST_STANDARD_ERROR),
        degrees: degrees.max(1.0),
        variances: before.variance + after.variance,
    }
}

impl Comparison {
    /// The ratio of the geometric means.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.log_ratio.exp()
    }

    /// The interval of the ratio at [`CONFIDENCE`].
    #[must_use]
    pub fn interval(&self) -> (f64, f64) {
        let reach = t_quantile(self.degrees, 0.5 + CONFIDENCE / 2.0) * self.standard_error;
        ((self.log_ratio - reach).exp(), (self.log_ratio + reach).exp())
    }

    /// The p-value of the repeats if the ratio were within the margin: small when it is beyond, on either side (two one-sided
    /// tests, doubled for testing both sides).
    #[must_use]
    pub fn p_beyond(&self, margin: f64) -> f64 {
        let nearest = self.log_ratio.abs() - margin.ln_1p();
        (2.0 * self.upper_tail(nearest)).min(1.0)
    }

    /// The p-value of the repeats if the ratio were at or beyond the margin: small when it is within (Schuirmann's two
    /// one-sided tests; the greater of the two).
    #[must_use]
    pub fn p_within(&self, margin: f64) -> f64 {
        self.upper_tail(margin.ln_1p() - self.log_ratio.abs())
    }

    /// The number of repeats on each side that would decide the ratio, given the scatter so far, if it is what it seems to
    /// be; `None` when it lies on the margin itself, where no number of repeats helps.
    #[must_use]
    pub fn repeats_needed(&self, margin: f64) -> Option<u32> {
        let gap = (self.log_ratio.abs() - margin.ln_1p()).abs();
        let needed = self.variances * ((TEST_QUANTILE + POWER_QUANTILE) / gap).powi(2);
        // Beyond a thousand the answer is "not by repeating".
        (needed.is_finite() && needed <= 1000.0).then(|| (needed.ceil() as u32).max(2))
    }

    fn upper_tail(&self, distance: f64) -> f64 {
        student(self.degrees).sf(distance / self.standard_error)
    }
}

fn student(degrees: f64) -> StudentsT {
    StudentsT::new(0.0, 1.0, degrees).expect("degrees of freedom are at least 1 and finite")
}

fn t_quantile(degrees: f64, probability: f64) -> f64 {
    student(degrees).inverse_cdf(probability)
}

/// Adjusts p-values so that those at or below a level are, on average, at most that share false discoveries
/// (the step-up procedure of Benjamini and Hochberg 1995). Results come in the order of the arguments.
#[must_use]
pub fn benjamini_hochberg(p_values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|&a, &b| p_values[b].total_cmp(&p_values[a]));
    let count = p_values.len() as f64;
    let mut adjusted = vec![1.0; p_values.len()];
    let mut least: f64 = 1.0;
    for (passed, &index) in order.iter().enumerate() {
        let rank = count - passed as f64;
        least = least.min(p_values[index] * count / rank);
        adjusted[index] = least;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, tolerance: f64) {
        assert!((a - b).abs() <= tolerance, "{a} is not {b}");
    }

    fn logs(values: &[f64]) -> LogSample {
        LogSample::of(&values.iter().map(|value| value.exp()).collect::<Vec<_>>()).unwrap()
    }

    /// Extra sleep under two drugs (Cushny and Peebles 1905, by way of "Student" 1908), the example that R prints
    /// for `t.test(extra ~ group, data = sleep)`: t = −1.8608, df = 17.776, p = 0.07939, interval −3.3654832 to
    /// 0.2054832 for the first less the second.
    #[test]
    fn welch_agrees_with_the_published_example() {
        let first = logs(&[0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]);
        let second = logs(&[1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]);
        let compared = compare(&second, &first);
        close(compared.log_ratio / compared.standard_error, -1.8608, 5e-5);
        close(compared.degrees, 17.776, 5e-4);
        close(compared.p_beyond(0.0), 0.07939, 5e-6);
        let (low, high) = compared.interval();
        close(low.ln(), -3.365_483_2, 1e-6);
        close(high.ln(), 0.205_483_2, 1e-6);
    }

    /// The fifteen p-values of Benjamini and Hochberg's own example (1995, section 4): four are discoveries at 0.05.
    #[test]
    fn false_discoveries_are_controlled_as_in_the_paper() {
        let p_values = [
            0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
            0.6528, 0.7590, 1.0,
        ];
        let adjusted = benjamini_hochberg(&p_values);
        assert_eq!(adjusted.iter().filter(|p| **p <= 0.05).count(), 4);
        close(adjusted[0], 0.0015, 1e-12);
        close(adjusted[3], 0.0095 * 15.0 / 4.0, 1e-12);
        // The sixth takes the seventh's and eighth's better value: 0.0344 × 15 / 8 is less than its own.
        close(adjusted[4], 0.0201 * 15.0 / 5.0, 1e-12);
        close(adjusted[5], 0.0298 * 15.0 / 7.0, 1e-12);
        assert!(benjamini_hochberg(&[]).is_empty());
    }

    /// Student's t at 8 degrees of freedom: 1.860 leaves 5 % above it, 2.306 leaves 2.5 % (any printed table).
    #[test]
    fn equivalence_is_tested_at_both_ends_of_the_margin() {
        let compared =
            |log_ratio: f64| Comparison { log_ratio, standard_error: 0.01, degrees: 8.0, variances: 5e-4 };
        let margin: f64 = 0.05;
        let edge = margin.ln_1p();
        close(compared(edge - 0.01860).p_within(margin), 0.05, 1e-4);
        close(compared(-(edge - 0.01860)).p_within(margin), 0.05, 1e-4);
        close(compared(edge + 0.02306).p_beyond(margin), 0.05, 1e-4);
        close(compared(edge).p_within(margin), 0.5, 1e-9);
        assert_eq!(compared(edge).repeats_needed(margin), None);
        // 0.0005 × (2.487 / 0.02)² = 7.73
        assert_eq!(compared(edge + 0.02).repeats_needed(margin), Some(8));
    }

    #[test]
    fn what_is_no_sample_is_none() {
        assert!(LogSample::of(&[1.0]).is_none());
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(LogSample::of(&[1.0, bad]).is_none());
        }
        let exact = LogSample::of(&[7.0, 7.0, 7.0]).unwrap();
        let compared = compare(&exact, &exact);
        assert!(compared.p_within(0.05) < 1e-9 && compared.p_beyond(0.05) > 0.999);
        close(exact.half_width(), 0.0, 1e-12);
    }

    /// Ten thousand pairs of equal layers with 3 % scatter: differences must be claimed in at most 5 %, and the
    /// interval must hold the true ratio in about 95 %.
    #[test]
    fn equal_layers_are_seldom_called_different() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut normal = move || (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        let (mut claimed, mut held) = (0, 0);
        for _ in 0..10_000 {
            let mut draw = || logs(&(0..5).map(|_| 0.03 * normal()).collect::<Vec<_>>());
            let compared = compare(&draw(), &draw());
            let (low, high) = compared.interval();
            held += i32::from(low <= 1.0 && 1.0 <= high);
            claimed += i32::from(compared.p_beyond(0.0) <= 0.05);
        }
        assert!((9_400..=9_650).contains(&held), "{held}");
        assert!((350..=600).contains(&claimed), "{claimed}");
    }

    /// Ten thousand pairs exactly on the margin: neither statement may be made in more than the accepted share.
    #[test]
    fn on_the_margin_itself_neither_is_claimed_too_often() {
        let mut random = fastrand::Rng::with_seed(12);
        let mut normal = move || (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        let (mut same, mut different) = (0, 0);
        for _ in 0..10_000 {
            let mut draw = |at: f64| logs(&(0..5).map(|_| at + 0.01 * normal()).collect::<Vec<_>>());
            let compared = compare(&draw(0.0), &draw(PRACTICAL_MARGIN.ln_1p()));
            same += i32::from(compared.p_within(PRACTICAL_MARGIN) <= FALSE_DISCOVERIES);
            different += i32::from(compared.p_beyond(PRACTICAL_MARGIN) <= FALSE_DISCOVERIES);
        }
        assert!((350..=600).contains(&same), "{same}");
        assert!((150..=350).contains(&different), "{different}");
    }

    proptest! {
        #[test]
        fn turning_a_comparison_round_inverts_it(
            a in prop::collection::vec(1.0..1e6_f64, 2..9),
            b in prop::collection::vec(1.0..1e6_f64, 2..9),
        ) {
            let (a, b) = (LogSample::of(&a).unwrap(), LogSample::of(&b).unwrap());
            let (there, back) = (compare(&a, &b), compare(&b, &a));
            prop_assert!((there.ratio() * back.ratio() - 1.0).abs() < 1e-9);
            prop_assert!((there.p_beyond(0.05) - back.p_beyond(0.05)).abs() < 1e-9);
            let (low, high) = there.interval();
            prop_assert!(low <= there.ratio() && there.ratio() <= high);
            // Nothing is both shown to be the same and shown to be different.
            prop_assert!(there.p_beyond(0.05) > 0.05 || there.p_within(0.05) > 0.05);
        }

        #[test]
        fn the_unit_does_not_matter(values in prop::collection::vec(1.0..1e6_f64, 2..9), unit in 1e-6..1e6_f64) {
            let scaled: Vec<f64> = values.iter().map(|value| value * unit).collect();
            let (a, b) = (LogSample::of(&values).unwrap(), LogSample::of(&scaled).unwrap());
            prop_assert!((compare(&a, &b).ratio() / unit - 1.0).abs() < 1e-6);
            prop_assert!((a.half_width() - b.half_width()).abs() < 1e-6 * (1.0 + a.half_width()));
        }

        #[test]
        fn adjusting_keeps_order_and_never_helps(p_values in prop::collection::vec(0.0..=1.0_f64, 0..40)) {
            let adjusted = benjamini_hochberg(&p_values);
            for (i, p) in p_values.iter().enumerate() {
                prop_assert!(adjusted[i] >= *p - 1e-15 && adjusted[i] <= 1.0);
                for (j, q) in p_values.iter().enumerate() {
                    prop_assert!(p > q || adjusted[i] <= adjusted[j]);
                }
            }
        }
    }
}
