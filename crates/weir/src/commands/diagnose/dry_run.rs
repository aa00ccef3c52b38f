//! `weir diagnose --dry-run`: the plan, without a run.

use serde::Serialize;
use std::time::Duration;
use weir_diagnose::Cell;
use weir_diagnose::tier::{self, RUNTIME};
use weir_load::run::Monitor;
use weir_node::units::about;

use super::measure::{options, range};
use super::progress::minutes;
use super::settings::Settings;
use super::subject::Subject;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::print_as;

/// The plan of a measurement.
#[derive(Debug, Serialize)]
struct Intent {
    cells: Vec<String>,
    layers: Vec<String>,
    repeats: u32,
    runs: usize,
    extra_runs_at_most: usize,
    /// Bytes of the disk that are filled first and then overwritten repeatedly; 0 when only reads are measured.
    bytes_overwritten: u64,
    /// Size of the measured range of the disk, in bytes.
    bytes_range: u64,
    seconds_per_run: f64,
    seconds: f64,
    seconds_at_most: f64,
}

impl Intent {
    fn text(&self) -> String {
        let mut lines: Vec<String> = self.cells.iter().map(|cell| format!("  {cell}")).collect();
        lines.insert(0, format!("{} cells:", self.cells.len()));
        lines.push(format!("{} layers: {}", self.layers.len(), self.layers.join(", ")));
        lines.push(format!(
            "{} runs of {:.1} s ({} repeats), up to {} more where a step is inconclusive",
            self.runs, self.seconds_per_run, self.repeats, self.extra_runs_at_most
        ));
        lines.push(match self.bytes_overwritten {
            0 => format!("bytes: {} are read, none written (no --destroy)", about(self.bytes_range)),
            bytes => format!("bytes: {} are filled, then overwritten in every writing run", about(bytes)),
        });
        let time = |seconds: f64| minutes(Duration::from_secs_f64(seconds));
        lines.push(format!("time: {}, {} at most", time(self.seconds), time(self.seconds_at_most)));
        lines.join("\n")
    }
}

/// Prints the plan.
pub fn dry_run(global: &Global, subject: &dyn Subject, settings: &Settings) -> Result<(), Failure> {
    let range = range(subject)?;
    let (monitor, options) = (Monitor::new(), options(settings, range, RUNTIME, 0));
    let targets = settings.wanted(subject.layers(&options, &monitor)?)?;
    let (cells, (runtime, extra)) = (settings.cells(), settings.time(targets.len())?);
    let runs = cells.len() * targets.len() * settings.repeats as usize;
    let (more, follow_ups) = settings.shares(extra);
    let intent = Intent {
        cells: cells.iter().map(Cell::to_string).collect(),
        layers: targets.iter().map(|target| target.name().to_owned()).collect(),
        repeats: settings.repeats,
        runs,
        extra_runs_at_most: more + follow_ups,
        bytes_overwritten: if settings.destroy { range } else { 0 },
        bytes_range: range,
        seconds_per_run: runtime.as_secs_f64(),
        seconds: tier::time_of(runs, runtime).as_secs_f64(),
        seconds_at_most: tier::time_of(runs + more + follow_ups, runtime).as_secs_f64(),
    };
    print_as(global.output, "weir.diagnosis-plan/1", &intent, Intent::text)
}
