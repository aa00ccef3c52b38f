//! Whether the measurement as a whole can be relied on.
//!
//! [`distrust`] is for pipelines: JUnit fails and the exit code is 6 for what it says, and for nothing else. [`against`] is for
//! people: that and every warning, in the report and in JSON's `unreliable`. A warning, such as a high load average, makes no
//! pipeline fail.

use weir_report::format;

use crate::comparison::Point;
use crate::finding::Findings;
use crate::result::{Diagnosis, RunOutcome};
use crate::verdict::Grade;

/// Processor time taken by other guests of the same host beyond which latencies are partly theirs.
const MUCH_STEAL: f64 = 0.02;

/// More unused rows than this share say that the measurement went wrong.
const MANY_UNUSED: f64 = 0.1;

/// Runs shorter than this have few slow requests in them, in seconds.
const SHORT: f64 = 1.0;

/// Why the measurement as a whole is not to be trusted, if so: a pipeline should not act on it.
#[must_use]
pub fn distrust(diagnosis: &Diagnosis, findings: &Findings) -> Option<String> {
    let (unused, rows) = (findings.compared.unused.len(), diagnosis.rows.len());
    if diagnosis.interrupted {
        Some(match diagnosis.done_of_plan() {
            None => "interrupted during further runs, after all planned ones".to_owned(),
            Some((done, planned)) => format!("interrupted after {done} of {planned} runs"),
        })
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

/// Objections to the measurement as a whole, in sentences: those of [`distrust`], and warnings.
#[must_use]
pub fn against(diagnosis: &Diagnosis, findings: &Findings) -> Vec<String> {
    let mut against = findings.verdict.cautions.clone();
    if let Some(why) = distrust(diagnosis, findings) {
        let told = diagnosis.interrupted && against.iter().any(|caution| caution.contains("nterrupted"));
        against.extend((!told).then(|| format!("A pipeline should not act on it: {why}.")));
    }
    let (unused, rows) = (findings.compared.unused.len(), diagnosis.rows.len());
    if unused as f64 > MANY_UNUSED * rows as f64 {
        against.push(format!("{unused} of {rows} rows are not used."));
    }
    let planned = |point: &&Point| diagnosis.cells.contains(&point.cell);
    if findings.compared.points.iter().filter(planned).any(|point| point.repeats == 1) {
        against.push("Some numbers are single runs: their scatter is unknown.".to_owned());
    }
    if most_steal(diagnosis).is_some_and(|share| share > MUCH_STEAL) {
        against.push(format!(
            "Other guests of the same host took more than {} of the processors in some run, which adds to latencies.",
            format::percent(MUCH_STEAL)
        ));
    }
    let environment = &diagnosis.environment;
    if environment.imported_from.is_empty()
        && environment.cores > 0
        && environment.load_average > environment.cores as f64 / 2.0
    {
        against.push(format!(
            "The machine was busy when the measurement began: load average {:.2} on {} logical processors.",
            environment.load_average, environment.cores
        ));
    }
    against.extend(short_runs(diagnosis));
    against
}

fn short_runs(diagnosis: &Diagnosis) -> Option<String> {
    let seconds = |row: &crate::Row| match &row.outcome {
        RunOutcome::Measured(measurement) => measurement.runtime_seconds,
        RunOutcome::Skipped(_) | RunOutcome::Failed(_) => None,
    };
    let mut times: Vec<f64> = diagnosis.rows.iter().filter_map(seconds).collect();
    times.sort_by(f64::total_cmp);
    let middle = times.get(times.len() / 2).copied().filter(|seconds| *seconds < SHORT)?;
    Some(format!(
        "The runs were short ({}): the 99.9th percentile may be a few requests, and caches may neither have filled nor drained.",
        format::duration(middle * 1e9)
    ))
}

/// The greatest share of the processors that others had in a run.
pub(crate) fn most_steal(diagnosis: &Diagnosis) -> Option<f64> {
    diagnosis.rows.iter().filter_map(|row| Some(row.counters.as_ref()?.steal)).reduce(f64::max)
}
