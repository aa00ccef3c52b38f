//! Everything that follows from the rows: the comparisons, and the verdict over them.

use serde::Serialize;

use crate::comparison::{Comparisons, compare};
use crate::result::Diagnosis;
use crate::verdict::{Verdict, conclude};

/// Everything that follows from the rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Findings {
    /// Layer against layer.
    #[serde(flatten)]
    pub compared: Comparisons,
    /// The verdict.
    pub verdict: Verdict,
}

/// Draws the findings from a measurement, complete or not.
#[must_use]
pub fn find(diagnosis: &Diagnosis) -> Findings {
    let compared = compare(diagnosis);
    let verdict = conclude(diagnosis, &compared);
    Findings { compared, verdict }
}
