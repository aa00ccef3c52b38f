//! Which layers and cells are measured, how often, in which order.
//!
//! Layers are interleaved: within a repeat and a cell every layer runs once, in an order drawn from the
//! seed. What changes slowly while the measurement runs (a device that fills, a neighbour that wakes up,
//! a processor that warms up) then falls on all layers alike and not on the one that came last.

use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;

use crate::cell::Cell;
use crate::environment::Environment;
use crate::result::{Diagnosis, LayerEntry, Measurement, Position, Row, RunOutcome, SCHEMA, check_layers};

/// Repeats unless the caller says otherwise: the fewest that have a median and a spread.
pub const DEFAULT_REPEATS: u32 = 3;

/// Repeats at most; more is a mistake in an argument, not a measurement.
pub const MOST_REPEATS: u32 = 1000;

/// A layer that can be put under load.
pub trait Target {
    /// The layer's name, unique in the measurement: `backing`, `accel write-back+1`, `nbd export`.
    fn name(&self) -> &str;

    /// Where the layer stands. Targets on the way are given to [`measure`] from the bottom up.
    fn position(&self) -> Position {
        Position::OnTheWay
    }

    /// Whether the layer can run this cell; if not, the reason, in words for the report.
    ///
    /// # Errors
    /// The reason.
    fn can_run(&self, _cell: &Cell) -> Result<(), String> {
        Ok(())
    }

    /// Runs the cell and blocks until it is done. Starts from a settled state (nothing dirty left from an
    /// earlier run, space that is read was written before) and leaves warm-up out of what it returns.
    ///
    /// # Errors
    /// The run failed, or was interrupted.
    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError>;
}

/// Why a run brought no numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The run failed; the measurement goes on with the next one.
    #[error("{0}")]
    Failed(String),
    /// The user wants the measurement to end.
    #[error("interrupted")]
    Interrupted,
}

/// What is to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The cells, each named once.
    pub cells: Vec<Cell>,
    /// Runs of each cell at each layer, 1 to [`MOST_REPEATS`].
    pub repeats: u32,
    /// Decides the order of the layers; the same seed gives the same order.
    pub seed: u64,
}

/// A plan that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Nothing to measure.
    #[error("the plan has no {0}: name at least one")]
    Empty(&'static str),
    /// Outside 1 to [`MOST_REPEATS`].
    #[error("{0} repeats: choose 1 to {MOST_REPEATS}")]
    Repeats(u32),
    /// Block size or queue depth of zero, or a cell named twice.
    #[error("cell \"{cell}\": {reason}")]
    Cell {
        /// The cell.
        cell: Cell,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Layers contradict each other.
    #[error("the layers cannot be measured together: {0}")]
    Layers(String),
}

/// One run, as the plan has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// From 1.
    pub repeat: u32,
    /// The load.
    pub cell: Cell,
    /// The layer's place among the targets.
    pub layer: usize,
}

/// What the progress callback is told.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// A run begins.
    Starting {
        /// Runs done before.
        done: usize,
        /// Runs in all.
        total: usize,
        /// Layer's name.
        layer: &'a str,
        /// The run.
        run: Run,
    },
    /// A run came to its end, one way or another.
    Finished {
        /// Runs done, with this one.
        done: usize,
        /// Runs in all.
        total: usize,
        /// What came of it.
        row: &'a Row,
    },
}

impl Plan {
    /// The standard cells with the default number of repeats.
    #[must_use]
    pub fn standard(seed: u64) -> Plan {
        Plan { cells: Cell::standard(), repeats: DEFAULT_REPEATS, seed }
    }

    /// Every run in order, for `layers` layers: repeat by repeat, cell by cell, layers shuffled.
    #[must_use]
    pub fn order(&self, layers: usize) -> Vec<Run> {
        let mut random = Rng::with_seed(self.seed);
        let mut runs = Vec::with_capacity(self.repeats as usize * self.cells.len() * layers);
        for repeat in 1..=self.repeats {
            for &cell in &self.cells {
                let mut order: Vec<usize> = (0..layers).collect();
                random.shuffle(&mut order);
                runs.extend(order.into_iter().map(|layer| Run { repeat, cell, layer }));
            }
        }
        runs
    }

    fn check(&self, layers: &[LayerEntry]) -> Result<(), PlanError> {
        if self.cells.is_empty() {
            return Err(PlanError::Empty("cells"));
        }
        if layers.is_empty() {
            return Err(PlanError::Empty("layers"));
        }
        if !(1..=MOST_REPEATS).contains(&self.repeats) {
            return Err(PlanError::Repeats(self.repeats));
        }
        for (index, &cell) in self.cells.iter().enumerate() {
            if cell.shape.block_bytes == 0 || cell.queue_depth == 0 {
                return Err(PlanError::Cell { cell, reason: "block size and queue depth start at 1" });
            }
            if self.cells[..index].contains(&cell) {
                return Err(PlanError::Cell { cell, reason: "named twice" });
            }
        }
        check_layers(layers).map_err(PlanError::Layers)
    }
}

/// Runs the plan. When `stop` is set, or a target says that it was interrupted, what was measured so far
/// comes back, marked as interrupted. `stop` is looked at before and after each run: a run during which it
/// was set may have been cut short and is dropped.
///
/// A run that fails is a row with its reason: one broken layer must not cost the others their numbers.
///
/// # Errors
/// The plan cannot be run; nothing was.
pub fn measure(
    plan: &Plan,
    targets: &mut [Box<dyn Target + '_>],
    environment: Environment,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Diagnosis, PlanError> {
    let layers: Vec<LayerEntry> = targets
        .iter()
        .map(|target| LayerEntry { name: target.name().to_owned(), position: target.position() })
        .collect();
    plan.check(&layers)?;
    let mut diagnosis = Diagnosis {
        schema: SCHEMA.to_owned(),
        environment,
        cells: plan.cells.clone(),
        layers,
        repeats: plan.repeats,
        seed: plan.seed,
        interrupted: false,
        rows: Vec::new(),
    };
    let runs = plan.order(targets.len());
    let total = runs.len();
    for run in runs {
        let name = diagnosis.layers[run.layer].name.clone();
        progress(Progress::Starting { done: diagnosis.rows.len(), total, layer: &name, run });
        let stopped = || stop.load(Ordering::Relaxed);
        let outcome = if stopped() { None } else { run_one(&mut *targets[run.layer], &run.cell) };
        let Some(outcome) = outcome.filter(|_| !stopped()) else {
            diagnosis.interrupted = true;
            break;
        };
        diagnosis.rows.push(Row { layer: name, cell: run.cell, repeat: run.repeat, outcome });
        let row = &diagnosis.rows[diagnosis.rows.len() - 1];
        progress(Progress::Finished { done: diagnosis.rows.len(), total, row });
    }
    Ok(diagnosis)
}

/// `None` when interrupted.
fn run_one(target: &mut dyn Target, cell: &Cell) -> Option<RunOutcome> {
    if let Err(reason) = target.can_run(cell) {
        return Some(RunOutcome::Skipped(reason));
    }
    match target.run(cell) {
        // JSON has no word for such a number, and no finding may rest on one.
        Ok(measurement) if !measurement.is_finite() => {
            Some(RunOutcome::Failed("the run returned a number that is not finite".to_owned()))
        }
        Ok(measurement) => Some(RunOutcome::Measured(measurement)),
        Err(TargetError::Failed(reason)) => Some(RunOutcome::Failed(reason)),
        Err(TargetError::Interrupted) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    struct Steady {
        name: String,
        position: Position,
        latency_ns: f64,
        fails: Option<TargetError>,
        refuses_depth: Option<u32>,
    }

    impl Target for Steady {
        fn name(&self) -> &str {
            &self.name
        }
        fn position(&self) -> Position {
            self.position.clone()
        }
        fn can_run(&self, cell: &Cell) -> Result<(), String> {
            match self.refuses_depth {
                Some(depth) if depth == cell.queue_depth => Err(format!("no depth {depth} here")),
                _ => Ok(()),
            }
        }
        fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
            match &self.fails {
                Some(error) => Err(error.clone()),
                None => Ok(sample::measurement(cell, self.latency_ns)),
            }
        }
    }

    fn steady(name: &str) -> Steady {
        let position = Position::OnTheWay;
        Steady { name: name.to_owned(), position, latency_ns: 50e3, fails: None, refuses_depth: None }
    }

    fn go(plan: &Plan, targets: Vec<Steady>, stop: &AtomicBool) -> Result<Diagnosis, PlanError> {
        let mut targets: Vec<Box<dyn Target>> =
            targets.into_iter().map(|target| Box::new(target) as Box<dyn Target>).collect();
        measure(plan, &mut targets, sample::environment(), stop, &mut |_| {})
    }

    #[test]
    fn the_seed_decides_the_order_and_every_run_comes_once() {
        let plan = Plan::standard(7);
        let runs = plan.order(4);
        assert_eq!(runs, plan.order(4));
        assert_ne!(runs, Plan::standard(8).order(4));
        assert_eq!(runs.len(), 3 * 8 * 4);
        for (index, group) in runs.chunks(4).enumerate() {
            assert!(group.iter().all(|run| run.repeat as usize == index / 8 + 1));
            assert!(group.iter().all(|run| run.cell == plan.cells[index % 8]));
            let mut layers: Vec<usize> = group.iter().map(|run| run.layer).collect();
            layers.sort_unstable();
            assert_eq!(layers, [0, 1, 2, 3], "each layer once per cell and repeat");
        }
        let first_of_each: std::collections::HashSet<usize> = runs.chunks(4).map(|g| g[0].layer).collect();
        assert!(first_of_each.len() > 1, "not always the same layer first");
    }

    #[test]
    fn rows_come_in_the_order_of_the_plan_with_progress() {
        let plan = Plan::standard(3);
        let mut targets: Vec<Box<dyn Target>> = vec![Box::new(steady("backing")), Box::new(steady("export"))];
        let mut finished = Vec::new();
        let diagnosis =
            measure(&plan, &mut targets, sample::environment(), &AtomicBool::new(false), &mut |progress| {
                if let Progress::Finished { done, total, row } = progress {
                    finished.push((done, total, row.layer.clone()));
                }
            })
            .unwrap();
        assert!(!diagnosis.interrupted);
        assert_eq!(diagnosis.rows.len(), diagnosis.planned_runs());
        assert_eq!(finished.len(), 48);
        assert_eq!(finished[47].0, 48);
        for (row, run) in diagnosis.rows.iter().zip(plan.order(2)) {
            assert_eq!(row.layer, ["backing", "export"][run.layer]);
            assert_eq!((row.cell, row.repeat), (run.cell, run.repeat));
        }
    }

    #[test]
    fn failures_and_refusals_are_rows_and_the_rest_goes_on() {
        let broken = Steady { fails: Some(TargetError::Failed("refused".into())), ..steady("export") };
        let shallow = Steady { refuses_depth: Some(32), ..steady("backing") };
        let nan = Steady { latency_ns: f64::NAN, ..steady("accel") };
        let diagnosis = go(&Plan::standard(1), vec![shallow, nan, broken], &AtomicBool::new(false)).unwrap();
        assert_eq!(diagnosis.rows.len(), 72);
        for row in &diagnosis.rows {
            match (row.layer.as_str(), row.cell.queue_depth) {
                ("backing", 1) => assert!(matches!(row.outcome, RunOutcome::Measured(_))),
                ("backing", _) => assert_eq!(row.outcome, RunOutcome::Skipped("no depth 32 here".into())),
                ("export", _) => assert_eq!(row.outcome, RunOutcome::Failed("refused".into())),
                _ => assert!(matches!(&row.outcome, RunOutcome::Failed(why) if why.contains("not finite"))),
            }
        }
        let text = diagnosis.to_json().unwrap();
        assert_eq!(Diagnosis::from_json(&text).unwrap(), diagnosis);
    }

    #[test]
    fn an_interruption_leaves_a_marked_partial_result() {
        let stopped = go(&Plan::standard(1), vec![steady("backing")], &AtomicBool::new(true)).unwrap();
        assert!(stopped.interrupted && stopped.rows.is_empty());

        let stop = AtomicBool::new(false);
        let mut targets: Vec<Box<dyn Target>> = vec![Box::new(steady("backing"))];
        let partial =
            measure(&Plan::standard(1), &mut targets, sample::environment(), &stop, &mut |progress| {
                if matches!(progress, Progress::Finished { done: 5, .. }) {
                    stop.store(true, Ordering::Relaxed);
                }
            })
            .unwrap();
        assert!(partial.interrupted);
        assert_eq!(partial.rows.len(), 5);

        let ended = Steady { fails: Some(TargetError::Interrupted), ..steady("backing") };
        let diagnosis = go(&Plan::standard(1), vec![ended], &AtomicBool::new(false)).unwrap();
        assert!(diagnosis.interrupted && diagnosis.rows.is_empty());
    }

    #[test]
    fn plans_that_make_no_sense_are_refused() {
        let never = AtomicBool::new(false);
        let refused = |plan: Plan, targets| go(&plan, targets, &never).unwrap_err();
        let plan = Plan::standard(1);
        assert_eq!(refused(plan.clone(), vec![]), PlanError::Empty("layers"));
        assert_eq!(
            refused(Plan { cells: vec![], ..plan.clone() }, vec![steady("a")]),
            PlanError::Empty("cells")
        );
        assert_eq!(refused(Plan { repeats: 0, ..plan.clone() }, vec![steady("a")]), PlanError::Repeats(0));
        let twice = Plan { cells: vec![plan.cells[0]; 2], ..plan.clone() };
        assert!(matches!(refused(twice, vec![steady("a")]), PlanError::Cell { .. }));
        let idle = Plan { cells: vec![Cell { queue_depth: 0, ..plan.cells[0] }], ..plan.clone() };
        assert!(matches!(refused(idle, vec![steady("a")]), PlanError::Cell { .. }));
        assert!(matches!(refused(plan.clone(), vec![steady("a"), steady("a")]), PlanError::Layers(_)));
        let orphan = Steady { position: Position::AlternativeTo("b".into()), ..steady("a") };
        assert!(matches!(refused(plan, vec![orphan]), PlanError::Layers(_)));
    }
}
