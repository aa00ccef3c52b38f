//! One case: a lab, a fault in it, and the finder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weir_block::Nanos;
use weir_diagnose::hypothesis::Cause;

use super::super::stack::{DISK, Stack};
use super::plant::Plant;
use crate::LabError;

/// The programs that a case needs, and the directory of its reports.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `weir`.
    pub weir: PathBuf,
    /// `weir-lab-node`.
    pub node: PathBuf,
    /// The directory for each case's report, as `FAULT-SEED.html` and `.json`; `None`: none.
    pub reports: Option<PathBuf>,
}

/// The judgement of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Judged {
    /// The cause and the layer are those that were planted; or nothing was, and no cause was named.
    Right,
    /// Something was planted, and no cause was named.
    Inconclusive,
    /// Something else was named, or the layer is another one.
    Wrong,
}

impl Judged {
    /// The judgement if the finder names this cause at this layer, with a verdict on the layers of this grade.
    #[must_use]
    pub fn of(planted: Plant, named: &str, layer: Option<&str>, grade: &str) -> Judged {
        if planted == Plant::Healthy {
            return match (named == word_of(None), grade) {
                (true, "no_bottleneck_found") => Judged::Right,
                (true, "inconclusive") => Judged::Inconclusive,
                _ => Judged::Wrong,
            };
        }
        let same_layer = match (planted.layer(), layer) {
            (Some(wanted), Some(layer)) => layer.starts_with(wanted),
            (wanted, layer) => wanted.is_none() && layer.is_none(),
        };
        if named == word_of(planted.cause()) && same_layer {
            Judged::Right
        } else if named == word_of(None) {
            Judged::Inconclusive
        } else {
            Judged::Wrong
        }
    }
}

/// The outcome of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The planted fault.
    pub planted: Plant,
    /// Seed of the finder's order of runs.
    pub seed: u64,
    /// The cause that was named, as in the finder's JSON; `none` without one.
    pub named: String,
    /// The layer that was accused of it; absent where a process was, or nothing.
    pub layer: Option<String>,
    /// Whether that is what was planted.
    pub judged: Judged,
    /// The grade of the verdict on the layers.
    pub grade: String,
    /// The verdict's sentence.
    pub headline: String,
    /// Its hypotheses, and their outcome.
    pub suspicions: Vec<Suspicion>,
    /// Seconds that the finder took.
    pub seconds: f64,
    /// The machine's one-minute load average before the case: far above 0, others want its processors too.
    pub load_average: f64,
}

/// A hypothesis of the finder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suspicion {
    /// The cause.
    pub cause: String,
    /// `open`, `supported`, `rejected`.
    pub standing: String,
    /// The sentences that it rests on.
    pub grounds: Vec<String>,
    /// The number that it predicted, and the one that was measured.
    pub predicted: Option<serde_json::Value>,
}

/// Plants one fault and has the finder look.
///
/// # Errors
/// The lab, or the finder, fails as a whole.
pub fn run(plant: Plant, programs: &Programs, seed: u64) -> Result<Case, LabError> {
    let (nodes, policy) = if plant.replicated() { (2, "write-back+1") } else { (1, "write-through") };
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load_average = load.split_whitespace().next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    let up = if plant.needs_network() { Stack::up_in_a_network } else { Stack::up };
    let stack = up(&programs.node, nodes, policy)?;
    wait_effective(&stack, policy)?;
    let neighbours = plant.plant(&stack)?;
    let began = Nanos::now();
    let said = diagnose(plant, &stack, &programs.weir, seed)?;
    let seconds = (Nanos::now() - began).as_secs_f64();
    drop(neighbours);
    if let Some(directory) = &programs.reports {
        keep_report(&stack, directory, &format!("{plant}-{seed}"))?;
    }
    let text = |field: &str| said[field].as_str().unwrap_or("none").to_owned();
    let named = text("cause");
    let layer = said["layer"].as_str().map(str::to_owned);
    let (grade, headline, suspicions) = (text("grade"), text("headline"), suspicions(&stack)?);
    let judged = Judged::of(plant, &named, layer.as_deref(), &grade);
    Ok(Case {
        planted: plant,
        seed,
        named,
        layer,
        judged,
        grade,
        headline,
        suspicions,
        seconds,
        load_average,
    })
}

/// A cause as the finder's JSON has it.
pub(super) fn word_of(cause: Option<Cause>) -> String {
    let word = serde_json::to_value(cause).ok();
    word.as_ref().and_then(|word| word.as_str()).unwrap_or("none").to_owned()
}

fn wait_effective(stack: &Stack, policy: &str) -> Result<(), LabError> {
    let deadline = Nanos::now() + Duration::from_secs(30);
    while stack.client()?.disk(DISK)?.effective != policy {
        if Nanos::now() > deadline {
            return Err(LabError::Invalid(format!("the disk does not reach {policy}")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn diagnose(plant: Plant, stack: &Stack, weir: &Path, seed: u64) -> Result<serde_json::Value, LabError> {
    let mut command = match plant.processors() {
        Some(processors) => {
            let mut taskset = Command::new("taskset");
            taskset.args(["-c", processors]).arg(weir);
            taskset
        }
        None => Command::new(weir),
    };
    let other = if plant.replicated() { "write-back+0" } else { "none" };
    let runtime = format!("{} ms", plant.runtime().as_millis());
    command.args(["--output", "json", "--lab"]).arg(stack.lab().dir());
    command.args(["diagnose", "--disk", DISK, "--destroy", "--tier", "quick"]);
    // One export is enough; naming a cause needs the runs that decide, not more repeats of the steps.
    command.args(["--without", "nbd tcp", "--more", "0"]);
    command.args(["--policies", other, "--runtime", &runtime, "--seed", &seed.to_string(), "--report"]);
    command.arg(stack.scratch().join("report.html")).stdin(Stdio::null());
    let output = command.output().map_err(LabError::system(format!("running {}", weir.display())))?;
    // Its exit code tells more than failure: a measurement that the generator limits is one, too.
    serde_json::from_slice(&output.stdout).map_err(|_| {
        LabError::Invalid(format!("weir diagnose failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
    })
}

fn keep_report(stack: &Stack, directory: &Path, name: &str) -> Result<(), LabError> {
    let copy = || {
        fs::create_dir_all(directory)?;
        for extension in ["html", "json"] {
            let from = stack.scratch().join("report").with_extension(extension);
            fs::copy(from, directory.join(format!("{name}.{extension}")))?;
        }
        Ok(())
    };
    copy().map_err(LabError::system(format!("keeping a report in {}", directory.display())))
}

/// From the rows and findings beside the report.
fn suspicions(stack: &Stack) -> Result<Vec<Suspicion>, LabError> {
    let path = stack.scratch().join("report.json");
    let text = fs::read_to_string(&path).map_err(LabError::system("reading the finder's report"))?;
    let odd = |error: serde_json::Error| LabError::Invalid(format!("the finder's report: {error}"));
    let report: serde_json::Value = serde_json::from_str(&text).map_err(odd)?;
    serde_json::from_value(report["findings"]["verdict"]["hypotheses"].clone()).map_err(odd)
}
