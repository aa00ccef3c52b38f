//! Limits that a pipeline sets: a loss beyond one is a failure.

use std::fmt;
use std::str::FromStr;

use crate::comparison::{Difference, Judgement};
use crate::finding::Findings;
use crate::result::Diagnosis;
use crate::verdict::Grade;
use weir_report::format;

/// Losses below this factor are within the practical margin and cannot be thresholds.
const LEAST_LOSS: f64 = 1.0 + crate::stats::PRACTICAL_MARGIN;

/// One limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// A layer is named, `likely` or `confirmed`.
    Likely,
    /// A layer is named, `confirmed`.
    Confirmed,
    /// The verdict is `inconclusive`.
    Inconclusive,
    /// Some row cannot be used.
    Rejected,
    /// Some step is shown to lose at least this factor: the interval's near end, not its middle.
    Loss(f64),
}

/// A limit that was not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no threshold: use likely, confirmed, inconclusive, rejected, or loss:FACTOR with a factor from 1.05"
)]
pub struct ThresholdError(String);

impl FromStr for Threshold {
    type Err = ThresholdError;

    fn from_str(text: &str) -> Result<Threshold, ThresholdError> {
        let unknown = || ThresholdError(text.to_owned());
        match text {
            "likely" => Ok(Threshold::Likely),
            "confirmed" => Ok(Threshold::Confirmed),
            "inconclusive" => Ok(Threshold::Inconclusive),
            "rejected" => Ok(Threshold::Rejected),
            _ => {
                let factor: f64 =
                    text.strip_prefix("loss:").and_then(|factor| factor.parse().ok()).ok_or_else(unknown)?;
                if factor.is_finite() && factor >= LEAST_LOSS {
                    Ok(Threshold::Loss(factor))
                } else {
                    Err(unknown())
                }
            }
        }
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Threshold::Likely => f.write_str("likely"),
            Threshold::Confirmed => f.write_str("confirmed"),
            Threshold::Inconclusive => f.write_str("inconclusive"),
            Threshold::Rejected => f.write_str("rejected"),
            Threshold::Loss(factor) => write!(f, "loss:{factor}"),
        }
    }
}

impl Threshold {
    /// Whether the step breaks this limit.
    #[must_use]
    pub fn is_broken_by(&self, step: &Difference) -> bool {
        match self {
            Threshold::Loss(factor) => {
                step.judgement == Judgement::Slower
                    && step.assured_loss_factor().is_some_and(|loss| loss >= *factor)
            }
            _ => false,
        }
    }

    /// In which way the measurement breaks this limit; `None` when it keeps to it.
    #[must_use]
    pub fn broken(&self, diagnosis: &Diagnosis, findings: &Findings) -> Option<String> {
        let grade = findings.verdict.grade;
        let of_grade = |broken: bool| broken.then(|| format!("{} ({self})", findings.verdict.headline));
        match self {
            Threshold::Likely => of_grade(matches!(grade, Grade::Likely | Grade::Confirmed)),
            Threshold::Confirmed => of_grade(grade == Grade::Confirmed),
            Threshold::Inconclusive => of_grade(grade == Grade::Inconclusive),
            Threshold::Rejected => {
                let (unused, rows) = (findings.compared.unused.len(), diagnosis.rows.len());
                (unused > 0).then(|| format!("{unused} of {rows} rows cannot be used ({self})"))
            }
            Threshold::Loss(_) => {
                let worst = findings
                    .compared
                    .steps
                    .iter()
                    .filter(|step| self.is_broken_by(step))
                    .max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))?;
                let name = |layer: usize| &diagnosis.layers[layer].name;
                let assured = worst.assured_loss_factor().unwrap_or(1.0);
                Some(format!(
                    "The step from {} to {} loses at least {} in {} ({self})",
                    name(worst.from),
                    name(worst.to),
                    format::factor(assured),
                    worst.cell
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::result::RunOutcome;
    use crate::sample::{self, Numbers};

    fn broken(text: &str, diagnosis: &Diagnosis) -> Option<String> {
        text.parse::<Threshold>().unwrap().broken(diagnosis, &find(diagnosis))
    }

    #[test]
    fn thresholds_are_read_as_they_are_written() {
        for text in ["likely", "confirmed", "inconclusive", "rejected", "loss:1.5"] {
            assert_eq!(text.parse::<Threshold>().unwrap().to_string(), text);
        }
        for text in ["", "Likely", "loss", "loss:", "loss:1.04", "loss:NaN", "loss:inf", "loss:-2"] {
            assert!(text.parse::<Threshold>().is_err(), "{text}");
        }
    }

    #[test]
    fn each_threshold_is_broken_by_what_it_names() {
        let slow = sample::chain(&[("backing", Numbers::steady(40e3)), ("export", Numbers::steady(80e3))]);
        assert!(broken("likely", &slow).unwrap().contains("export adds 40.0 µs to backing"));
        assert!(broken("confirmed", &slow).is_some());
        assert!(
            broken("loss:1.9", &slow).unwrap().contains("loses at least ×1.9"),
            "{:?}",
            broken("loss:1.9", &slow)
        );
        // The factor is 2, but its interval reaches below.
        assert_eq!(broken("loss:2", &slow), None);
        assert_eq!(broken("rejected", &slow), None);
        assert_eq!(broken("inconclusive", &slow), None);

        let mut even =
            sample::chain(&[("backing", Numbers::steady(40e3)), ("export", Numbers::steady(40e3))]);
        assert_eq!(broken("likely", &even), None);
        even.rows[0].outcome = RunOutcome::Failed("no".into());
        assert!(broken("rejected", &even).unwrap().contains("1 of 80"));

        let mut once = slow;
        once.rows.retain(|row| row.repeat == 1);
        assert_eq!(broken("likely", &once), None, "a single run is a suspicion");
        assert!(broken("inconclusive", &once).is_some());
        assert_eq!(broken("confirmed", &once), None);
        assert_eq!(broken("loss:1.1", &once), None, "a single run shows nothing");
    }
}
