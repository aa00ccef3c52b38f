//! Extent and duration of a measurement: the command line's settings, and the division of a budget into runs.

use std::path::PathBuf;
use std::time::Duration;

use weir_diagnose::tier::{self, RUNTIME};
use weir_diagnose::{Cell, Direction, Target, Threshold};

use crate::cli::DiagnoseArgs;
use crate::failure::Failure;

/// The part of a budget that the planned repeats take; the rest is for steps that need more.
const PLANNED_SHARE: f64 = 0.75;

/// Time for everything when neither a budget nor a run's time is given.
const BUDGET: Duration = Duration::from_secs(600);

/// The settings of a measurement, apart from the disk.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Writes are allowed.
    pub destroy: bool,
    /// The cells; those that write are omitted unless `destroy` is set.
    pub cells: Vec<Cell>,
    /// Runs of each cell on each layer.
    pub repeats: u32,
    /// Maximum number of additional runs for inconclusive steps; `None`: as many as fit.
    pub more: Option<usize>,
    /// Whether hypotheses get the runs that they request.
    pub follow_ups: bool,
    /// Omit layers whose names begin with these.
    pub without: Vec<String>,
    /// Time for each run, unless a budget shortens it.
    pub runtime: Duration,
    /// Time for everything.
    pub budget: Option<Duration>,
    /// Seed of the order; `None` takes one from the clock.
    pub seed: Option<u64>,
    /// Continue the measurement beside the report.
    pub resume: bool,
    /// The report's HTML file; JSON and JUnit go beside it.
    pub report: PathBuf,
    /// Other policies to measure; `None`: all that the nodes allow.
    pub policies: Option<Vec<String>>,
    /// Process ids of other nodes on this machine, whose processor time is sampled.
    pub replicas: Vec<u32>,
    /// A block device whose requests are traced, by its name in `/sys/class/block`.
    pub trace: Option<String>,
    /// Thresholds that count as failures in JUnit.
    pub thresholds: Vec<Threshold>,
}

impl Settings {
    /// The settings of the command line.
    pub fn of(arguments: &DiagnoseArgs) -> Settings {
        Settings {
            destroy: arguments.destroy,
            cells: arguments.tier.tier().cells(),
            repeats: arguments.repeats,
            more: arguments.more,
            follow_ups: true,
            without: arguments.without.clone(),
            runtime: arguments.runtime.as_ref().map_or(RUNTIME, |period| period.0),
            budget: match (&arguments.budget, &arguments.runtime) {
                (Some(budget), _) => Some(budget.0),
                (None, Some(_)) => None,
                (None, None) => Some(BUDGET),
            },
            seed: arguments.seed,
            resume: arguments.resume,
            report: arguments.report.clone(),
            policies: (!arguments.policies.is_empty())
                .then(|| arguments.policies.iter().filter(|policy| *policy != "none").cloned().collect()),
            replicas: Vec::new(),
            trace: arguments.trace.clone(),
            thresholds: arguments.fail_on.clone(),
        }
    }

    /// Runs for inconclusive steps, and runs for hypotheses: half of the remaining runs each.
    pub fn shares(&self, left: usize) -> (usize, usize) {
        let more = (left - left / 2).min(self.more.unwrap_or(usize::MAX));
        (more, if self.follow_ups { left / 2 } else { 0 })
    }

    /// The layers that are not omitted.
    pub fn wanted<'a>(
        &self,
        mut layers: Vec<Box<dyn Target + 'a>>,
    ) -> Result<Vec<Box<dyn Target + 'a>>, Failure> {
        for start in &self.without {
            let count = layers.len();
            layers.retain(|layer| !layer.name().starts_with(start.as_str()));
            if layers.len() == count {
                let names: Vec<&str> = layers.iter().map(|layer| layer.name()).collect();
                return Err(Failure::usage(format!(
                    "--without {start}: no layer begins so; there are {}",
                    names.join(", ")
                )));
            }
        }
        Ok(layers)
    }

    pub fn cells(&self) -> Vec<Cell> {
        let allowed = |cell: &&Cell| self.destroy || cell.shape.direction == Direction::Read;
        self.cells.iter().filter(allowed).copied().collect()
    }

    /// The time of each run and the runs beyond the planned ones, for so many layers.
    pub fn time(&self, layers: usize) -> Result<(Duration, usize), Failure> {
        if self.runtime.is_zero() {
            return Err(Failure::usage("--runtime must be longer than zero"));
        }
        let runs = self.cells().len() * layers * self.repeats as usize;
        let Some(budget) = self.budget else {
            return Ok((self.runtime, runs));
        };
        let runtime = tier::runtime_within(budget.mul_f64(PLANNED_SHARE), runs, self.runtime).map_err(|least| {
            let least = least.div_f64(PLANNED_SHARE);
            Failure::usage(format!(
                "{runs} runs do not fit into {}: the smallest possible budget is {}; use --budget {}, a smaller --tier or fewer \
                 --repeats",
                spelled(budget),
                spelled(least),
                spelled(least)
            ))
        })?;
        let left = budget.saturating_sub(tier::time_of(runs, runtime)).as_secs_f64();
        let more = (left / tier::time_of(1, runtime).as_secs_f64()) as usize;
        Ok((runtime, more.min(runs)))
    }
}

/// A time in the syntax of `--budget`, rounded up: `95s`, `14m`.
fn spelled(time: Duration) -> String {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    if seconds < 120 { format!("{seconds}s") } else { format!("{}m", seconds.div_ceil(60)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The budget named in a refusal is accepted, and hardly more than the runs need.
    #[test]
    fn the_smallest_possible_budget_is_named() {
        let cli = |line: &str| {
            use clap::Parser;
            let words = format!("weir diagnose --disk d {line}");
            match crate::cli::Cli::try_parse_from(words.split(' ')).unwrap().command {
                crate::cli::Command::Diagnose(arguments) => Settings::of(&arguments),
                _ => unreachable!("it is diagnose"),
            }
        };
        assert_eq!(cli("--tier quick").budget, Some(BUDGET));
        assert_eq!(cli("--runtime 1s").budget, None, "the time of each run decides");
        for tier in ["quick", "standard"] {
            let refused = cli(&format!("--destroy --budget 5s --tier {tier}")).time(6).unwrap_err().message;
            let least = refused.split("use --budget ").nth(1).unwrap().split(',').next().unwrap();
            let taken = cli(&format!("--destroy --budget {least} --tier {tier}"));
            assert!(taken.time(6).is_ok(), "{refused}");
            let budget = taken.budget.unwrap();
            let less = Settings {
                budget: Some(budget.mul_f64(0.9).saturating_sub(Duration::from_secs(60))),
                ..taken
            };
            assert!(less.time(6).is_err(), "{refused}");
        }
    }
}
