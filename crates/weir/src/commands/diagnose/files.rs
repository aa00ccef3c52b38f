//! Output files: the report, the rows and findings as JSON, JUnit for pipelines.

use std::path::{Path, PathBuf};

use serde::Serialize;
use weir_diagnose::hypothesis::Cause;
use weir_diagnose::{Diagnosis, Findings, Grade, Threshold, find, reliability, report, table};

use crate::failure::Failure;
use crate::output::width;

/// The result of a measurement or an import.
#[derive(Debug)]
pub struct Outcome {
    /// The rows.
    pub diagnosis: Diagnosis,
    /// The findings from them.
    pub findings: Findings,
    /// The HTML file.
    pub report: PathBuf,
}

/// The summary for programs; the rest is in the files.
#[derive(Serialize)]
pub struct Summary<'a> {
    schema: &'static str,
    headline: &'a str,
    grade: Grade,
    /// Reasons to distrust the measurement; empty when it is reliable.
    unreliable: Vec<String>,
    cause: Option<Cause>,
    /// The layer of the cause.
    layer: Option<&'a str>,
    report: &'a Path,
    json: PathBuf,
    junit: PathBuf,
    interrupted: bool,
    seed: u64,
}

/// The rows and findings beside a report.
pub fn json_of(report: &Path) -> PathBuf {
    report.with_extension("json")
}

/// The JUnit file beside a report.
fn junit_of(report: &Path) -> PathBuf {
    report.with_extension("junit.xml")
}

impl Outcome {
    /// Draws the findings and writes all files.
    pub fn write(diagnosis: Diagnosis, report: &Path, thresholds: &[Threshold]) -> Result<Outcome, Failure> {
        let findings = find(&diagnosis);
        // The rows first, so that they exist even if a later step fails.
        replace(&json_of(report), &report::json(&diagnosis, &findings).map_err(Failure::failed)?)?;
        replace(report, &report::html(&diagnosis, &findings).map_err(Failure::failed)?)?;
        let junit = report::junit(&diagnosis, &findings, thresholds).map_err(Failure::failed)?;
        replace(&junit_of(report), &junit)?;
        Ok(Outcome { diagnosis, findings, report: report.to_owned() })
    }

    /// The summary for programs.
    pub fn summary(&self) -> Summary<'_> {
        Summary {
            schema: "weir.diagnosis-summary/1",
            headline: &self.findings.verdict.headline,
            unreliable: reliability::against(&self.diagnosis, &self.findings),
            grade: self.findings.verdict.grade,
            cause: self.findings.verdict.cause,
            layer: self.findings.verdict.cause_layer.map(|layer| self.diagnosis.layers[layer].name.as_str()),
            report: &self.report,
            json: json_of(&self.report),
            junit: junit_of(&self.report),
            interrupted: self.diagnosis.interrupted,
            seed: self.diagnosis.seed,
        }
    }

    /// The text for people.
    pub fn text(&self) -> String {
        format!(
            "{}\nreport: {}\ndata:   {}\njunit:  {}",
            table::render_within(&self.diagnosis, &self.findings, width().unwrap_or(table::WIDTH)),
            self.report.display(),
            json_of(&self.report).display(),
            junit_of(&self.report).display()
        )
    }
}

fn part_of(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    part.into()
}

/// Whether [`replace`] will probably succeed; existing files are unchanged.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    let part = part_of(path);
    std::fs::write(&part, "")
        .and_then(|()| std::fs::remove_file(&part))
        .map_err(|error| cannot_write(path, &error))
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::failed(format!("cannot write {}: {error}", path.display()))
}

/// Writes a file whole or not at all: a reader, or a later `--resume`, never finds a partial file.
pub fn replace(path: &Path, text: &str) -> Result<(), Failure> {
    let part = part_of(path);
    std::fs::write(&part, text)
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(|error| cannot_write(path, &error))
}
