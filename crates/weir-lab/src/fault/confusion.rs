//! Faults planted one at a time, and what the finder says of each: the confusion matrix.
//!
//! Every case is a lab of its own with a disk in memory, a fault in one place, and `weir diagnose` run on it as anybody
//! would. What it names is held against what was planted. Cases of processor time pin processes with taskset(1) and
//! put busy neighbours beside them; on a machine that others keep busy, "nothing" is not nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::Serialize;
use weir_block::Nanos;
use weir_diagnose::hypothesis::Cause;

use super::board::At;
use super::orders::Order;
use super::relay::LinkFaults;
use super::settings::{Faults, Tier};
use super::stack::{DISK, Stack};
use crate::LabError;

/// Busy neighbours on a processor that is to be short.
const NEIGHBOURS: usize = 2;

/// The processor that is kept for what must not be short, and the one with the neighbours.
const FREE: &str = "0";
const BUSY: &str = "1";

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Plant {
    /// Nothing at all.
    Nothing,
    /// Two threads lose the order between the accelerator and a simulated disk.
    OrderLost,
    /// A millisecond on the way to the replica.
    LongLink,
    /// 100 Mbit/s on the way to the replica.
    NarrowLink,
    /// A backing that carries 128 MiB a second.
    Throttled,
    /// A backing with a fast tier of 8 MiB.
    SmallTier,
    /// The node shares its processor with busy neighbours.
    BusyNode,
    /// The export has one request in flight.
    OneInFlight,
    /// The load generator shares its processor with busy neighbours.
    BusyGenerator,
    /// The replica shares its processor with busy neighbours.
    BusyReplica,
}

impl Plant {
    /// Every case.
    pub const ALL: [Plant; 10] = [
        Plant::Nothing,
        Plant::OrderLost,
        Plant::LongLink,
        Plant::NarrowLink,
        Plant::Throttled,
        Plant::SmallTier,
        Plant::BusyNode,
        Plant::OneInFlight,
        Plant::BusyGenerator,
        Plant::BusyReplica,
    ];

    /// The word for the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Plant::Nothing => "nothing",
            Plant::OrderLost => "order-lost",
            Plant::LongLink => "long-link",
            Plant::NarrowLink => "narrow-link",
            Plant::Throttled => "throttled",
            Plant::SmallTier => "small-tier",
            Plant::BusyNode => "busy-node",
            Plant::OneInFlight => "one-in-flight",
            Plant::BusyGenerator => "busy-generator",
            Plant::BusyReplica => "busy-replica",
        }
    }

    /// What the finder should name.
    #[must_use]
    pub fn cause(self) -> Option<Cause> {
        Some(match self {
            Plant::Nothing => return None,
            Plant::OrderLost => Cause::ArrivalOrder,
            Plant::LongLink => Cause::LinkLatency,
            Plant::NarrowLink => Cause::LinkBandwidth,
            Plant::Throttled => Cause::Throttled,
            Plant::SmallTier => Cause::TierExhausted,
            Plant::BusyNode => Cause::Processor,
            Plant::OneInFlight => Cause::OneInFlight,
            Plant::BusyGenerator => Cause::Generator,
            Plant::BusyReplica => Cause::SlowReplica,
        })
    }

    /// Whether the case needs a replica.
    fn replicated(self) -> bool {
        matches!(self, Plant::Nothing | Plant::LongLink | Plant::NarrowLink | Plant::BusyReplica)
    }

    /// Time for each run: enough for a hundred requests of the slowest cell.
    fn runtime(self) -> Duration {
        Duration::from_millis(if self == Plant::OrderLost { 800 } else { 400 })
    }

    /// Puts it there.
    fn plant(self, stack: &Stack) -> Result<Vec<Neighbour>, LabError> {
        match self {
            Plant::Nothing => {}
            Plant::OrderLost => {
                stack.set(At::Backing, Faults { simulated_disk: true, ..Faults::default() })?;
                stack.set(At::Accel, Faults::order_lost(2))?;
            }
            Plant::LongLink => link(stack, LinkFaults { delay_us: 1000, bandwidth: 0 })?,
            Plant::NarrowLink => link(stack, LinkFaults { delay_us: 0, bandwidth: 100_000_000 / 8 })?,
            Plant::Throttled => {
                stack.set(At::Backing, Faults { bandwidth: 128 << 20, ..Faults::default() })?
            }
            Plant::SmallTier => {
                let tier = Some(Tier { bytes: 8 << 20, miss_us: 2000 });
                stack.set(At::Backing, Faults { tier, ..Faults::default() })?;
            }
            Plant::OneInFlight => stack.set(At::Export, Faults { in_flight: 1, ..Faults::default() })?,
            Plant::BusyNode => {
                pin(stack, "n1", BUSY)?;
                return neighbours();
            }
            Plant::BusyGenerator => {
                pin(stack, "n1", FREE)?;
                return neighbours();
            }
            Plant::BusyReplica => {
                pin(stack, "n1", FREE)?;
                pin(stack, "n2", BUSY)?;
                return neighbours();
            }
        }
        Ok(Vec::new())
    }

    /// Where `weir diagnose` may run.
    fn processors(self) -> Option<&'static str> {
        match self {
            Plant::BusyGenerator => Some(BUSY),
            Plant::BusyNode | Plant::BusyReplica => Some(FREE),
            _ => None,
        }
    }
}

impl fmt::Display for Plant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

fn link(stack: &Stack, faults: LinkFaults) -> Result<(), LabError> {
    stack.order("n2", &Order::Link(faults))
}

/// All threads of a node on one processor.
fn pin(stack: &Stack, node: &str, processor: &str) -> Result<(), LabError> {
    let Some(process) = stack.lab().node(node)?.process else { return Ok(()) };
    let mut taskset = Command::new("taskset");
    taskset.args(["-a", "-c", "-p", processor, &process.pid.to_string()]).stdout(Stdio::null());
    let status = taskset.status().map_err(LabError::system("running taskset (package util-linux)"))?;
    if status.success() { Ok(()) } else { Err(LabError::Invalid(format!("taskset cannot pin node {node}"))) }
}

/// A process that does nothing but compute. Ends when dropped.
struct Neighbour(Child);

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn neighbours() -> Result<Vec<Neighbour>, LabError> {
    let mut taskset = Command::new("taskset");
    taskset.args(["-c", BUSY, "sh", "-c", "while :; do :; done"]);
    let one = |_| taskset.spawn().map(Neighbour).map_err(LabError::system("starting a busy neighbour"));
    (0..NEIGHBOURS).map(one).collect()
}

/// The programs that a case needs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `weir`.
    pub weir: PathBuf,
    /// `weir-lab-node`.
    pub node: PathBuf,
}

/// What came of one case.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// What was planted.
    pub planted: Plant,
    /// The cause that was named, as in the finder's JSON; `none` without one.
    pub named: String,
    /// Whether that is what was planted.
    pub right: bool,
    /// The grade of the verdict on the layers.
    pub grade: String,
    /// The verdict's sentence.
    pub headline: String,
    /// Seconds that the finder took.
    pub seconds: f64,
    /// The machine's one-minute load average before the case: far above 0, others want its processors too.
    pub load_average: f64,
}

/// Plants one fault and has the finder look.
///
/// # Errors
/// The lab, or the finder, fails as a whole.
pub fn run(plant: Plant, programs: &Programs, seed: u64) -> Result<Case, LabError> {
    let (nodes, policy) = if plant.replicated() { (2, "write-back+1") } else { (1, "write-through") };
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load_average = load.split_whitespace().next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    let stack = Stack::up(&programs.node, nodes, policy)?;
    wait_effective(&stack, policy)?;
    let neighbours = plant.plant(&stack)?;
    let began = Nanos::now();
    let said = diagnose(plant, &stack, &programs.weir, seed)?;
    let seconds = (Nanos::now() - began).as_secs_f64();
    drop(neighbours);
    let text = |field: &str| said[field].as_str().unwrap_or("none").to_owned();
    let named = text("cause");
    let right = named == word_of(plant.cause());
    let (grade, headline) = (text("grade"), text("headline"));
    Ok(Case { planted: plant, named, right, grade, headline, seconds, load_average })
}

/// A cause as the finder's JSON has it.
fn word_of(cause: Option<Cause>) -> String {
    let word = serde_json::to_value(cause).ok();
    word.as_ref().and_then(|word| word.as_str()).unwrap_or("none").to_owned()
}

fn wait_effective(stack: &Stack, policy: &str) -> Result<(), LabError> {
    let deadline = Nanos::now() + Duration::from_secs(30);
    while stack.client()?.disk(DISK)?.effective != policy {
        if Nanos::now() > deadline {
            return Err(LabError::Invalid(format!("the disk does not come to {policy}")));
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
    command.args(["diagnose", "--disk", DISK, "--destroy", "--tier", "probe", "--repeats", "2"]);
    command.args(["--policies", other, "--runtime", &runtime, "--seed", &seed.to_string(), "--report"]);
    command.arg(stack.scratch().join("report.html")).stdin(Stdio::null());
    let output = command.output().map_err(LabError::system(format!("running {}", weir.display())))?;
    // Its exit code tells more than failure: a measurement that the generator limits is one, too.
    serde_json::from_slice(&output.stdout).map_err(|_| {
        LabError::Invalid(format!("weir diagnose failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
    })
}

/// The matrix: what was planted, what was named, how often.
#[must_use]
pub fn matrix(cases: &[Case]) -> String {
    let mut rows: BTreeMap<Plant, BTreeMap<&str, usize>> = BTreeMap::new();
    for case in cases {
        *rows.entry(case.planted).or_default().entry(&case.named).or_default() += 1;
    }
    let mut columns: Vec<String> = Plant::ALL.iter().map(|plant| word_of(plant.cause())).collect();
    columns.retain(|name| cases.iter().any(|case| case.named == *name));
    let mut text = format!("{:<15}", "planted");
    columns.iter().for_each(|name| text.push_str(&format!("  {name}")));
    for (plant, named) in &rows {
        text.push_str(&format!("\n{plant:<15}"));
        for name in &columns {
            let right = if *name == word_of(plant.cause()) { "*" } else { "" };
            let count = named.get(name.as_str()).map_or("·".to_owned(), |count| format!("{count}{right}"));
            text.push_str(&format!("  {count:>width$}", width = name.len()));
        }
    }
    let right = cases.iter().filter(|case| case.right).count();
    text.push_str(&format!("\n{right} of {} are named right (*)", cases.len()));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_shows_what_was_taken_for_what() {
        let case = |planted: Plant, named: Option<Cause>| Case {
            planted,
            named: word_of(named),
            right: named == planted.cause(),
            grade: "likely".into(),
            headline: String::new(),
            seconds: 1.0,
            load_average: 0.0,
        };
        let cases = [
            case(Plant::Nothing, None),
            case(Plant::OrderLost, Some(Cause::ArrivalOrder)),
            case(Plant::OrderLost, None),
            case(Plant::LongLink, Some(Cause::LinkBandwidth)),
        ];
        let expected = "planted          none  arrival_order  link_bandwidth\n\
                        nothing            1*              ·               ·\n\
                        order-lost          1             1*               ·\n\
                        long-link           ·              ·               1\n\
                        2 of 4 are named right (*)";
        assert_eq!(matrix(&cases), expected);
    }
}
