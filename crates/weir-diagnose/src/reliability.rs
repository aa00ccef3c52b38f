//! Whether the measurement as a whole can be relied on.

use crate::finding::Findings;
use crate::result::Diagnosis;
use crate::verdict::Grade;

/// Why the measurement as a whole is not to be trusted, if so: a pipeline should not act on it.
#[must_use]
pub fn distrust(diagnosis: &Diagnosis, findings: &Findings) -> Option<String> {
    let (unused, rows) = (findings.compared.unused.len(), diagnosis.rows.len());
    if diagnosis.interrupted {
        Some(format!("interrupted after {rows} of {} runs", diagnosis.planned_runs()))
    } else if findings.verdict.grade == Grade::GeneratorLimited {
        Some("the load generator was the limit".to_owned())
    } else if 2 * unused > rows {
        Some(format!("{unused} of {rows} rows cannot be used"))
    } else if rows == 0 {
        Some("there are no rows".to_owned())
    } else {
        None
    }
}
