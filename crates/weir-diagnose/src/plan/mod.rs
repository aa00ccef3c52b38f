//! The plan of a measurement: layers, cells, repeats and their order.
//!
//! Layers are interleaved: within a repeat the cells come in a random order, and within a cell every layer runs once, in a
//! random order too; both are drawn from the seed. A slow change during the measurement (a device that fills, a neighbour
//! that wakes up, a processor that warms up) then affects all layers alike, not only the last one. After all repeats, the
//! cells with an inconclusive step get more, as far as that is allowed and likely to help.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;

use crate::cell::Cell;
use crate::comparison::{Judgement, compare};
use crate::counters::Counters;
use crate::environment::Environment;
use crate::finding::find;
use crate::hypothesis::Ask;
use crate::result::{Diagnosis, LayerEntry, Measurement, Position, Row, RunOutcome, SCHEMA, check_layers};
use crate::verdict::FEWEST_REPEATS;

/// Repeats at most; more is a mistake in an argument, not a measurement.
pub const MOST_REPEATS: u32 = 1000;

/// A step that would take more than this many times the planned repeats to tell is left as it is.
const WORTH_REPEATING: u32 = 4;

/// Repeats that a step gets at least when it gets more.
const FEWEST_MORE: u32 = 2;

/// Times that a run is done which a hypothesis asks for.
const FOLLOW_UP_REPEATS: u32 = 3;

/// Rounds of such runs: the result of one round may raise another question.
const MOST_ROUNDS: u64 = 3;

/// A layer that can be put under load.
pub trait Target {
    /// The layer's name, unique in the measurement: `backing`, `accel write-back+1`, `nbd export`.
    fn name(&self) -> &str;

    /// The layer's role. Targets on the path are given to [`measure`] from the bottom up.
    fn position(&self) -> Position {
        Position::OnPath
    }

    /// Whether the layer can run this cell; if not, the reason, in words for the report.
    ///
    /// # Errors
    /// The reason.
    fn can_run(&self, _cell: &Cell) -> Result<(), String> {
        Ok(())
    }

    /// Waits, before a run, until nothing of an earlier one is left: nothing dirty, the policy in effect.
    ///
    /// # Errors
    /// It does not settle; the run is then not tried.
    fn settle(&mut self) -> Result<(), TargetError> {
        Ok(())
    }

    /// Runs the cell and blocks until it is done. Reads only space that was written before; the result excludes the warm-up.
    ///
    /// # Errors
    /// The run failed, or was interrupted.
    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError>;

    /// The operating system's counters during the last run.
    fn counters(&mut self) -> Option<Counters> {
        None
    }
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

/// The extent of a measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The cells, each named once.
    pub cells: Vec<Cell>,
    /// Runs of each cell at each layer, 1 to [`MOST_REPEATS`].
    pub repeats: u32,
    /// Runs beyond the repeats, for inconclusive steps: at most so many.
    pub extra_runs: usize,
    /// Runs beyond these that hypotheses may ask for, to be confirmed or rejected: at most so many.
    pub follow_ups: usize,
    /// Decides the order of cells and layers; the same seed gives the same order.
    pub seed: u64,
}

/// The start of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// From nothing.
    Fresh(Environment),
    /// From an earlier one: its rows are kept, and missing and failed runs are run.
    Resume(Diagnosis),
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
        /// The problem with it.
        reason: &'static str,
    },
    /// The measurement that is to be gone on with was another one.
    #[error("this cannot be gone on with: {0}; measure anew, or give the same arguments")]
    Resume(&'static str),
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

/// The argument of the progress callback.
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
        /// Its outcome.
        row: &'a Row,
        /// Everything so far, marked as interrupted: to be kept, should the measurement end here.
        so_far: &'a Diagnosis,
    },
}

impl Plan {
    /// These cells, five times each, and as many runs again where they are needed.
    #[must_use]
    pub fn of(cells: Vec<Cell>, seed: u64) -> Plan {
        Plan { cells, repeats: FEWEST_REPEATS, extra_runs: usize::MAX, follow_ups: usize::MAX, seed }
    }

    /// Every run of the planned repeats, for `layers` layers: repeat by repeat, cells shuffled, layers shuffled.
    #[must_use]
    pub fn order(&self, layers: usize) -> Vec<Run> {
        self.order_of(&(0..layers).collect::<Vec<_>>())
    }

    fn order_of(&self, all: &[usize]) -> Vec<Run> {
        let mut random = Rng::with_seed(self.seed);
        let wanted: Vec<(Cell, &[usize])> = self.cells.iter().map(|cell| (*cell, all)).collect();
        (1..=self.repeats).flat_map(|repeat| shuffled(&wanted, repeat, &mut random)).collect()
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

/// One repeat: the cells in a random order, and within each its layers.
fn shuffled(cells: &[(Cell, &[usize])], repeat: u32, random: &mut Rng) -> Vec<Run> {
    let mut cells = cells.to_vec();
    random.shuffle(&mut cells);
    let mut runs = Vec::new();
    for (cell, layers) in cells {
        let mut layers = layers.to_vec();
        random.shuffle(&mut layers);
        runs.extend(layers.into_iter().map(|layer| Run { repeat, cell, layer }));
    }
    runs
}

/// Runs the plan. When `stop` is set, or a target reports that it was interrupted, the measurement so far comes back, marked
/// as interrupted. `stop` is checked before and after each run: a run during which it was set may have been cut short and is
/// dropped.
///
/// A run that fails is a row with its reason: one broken layer must not cost the others their numbers.
///
/// # Errors
/// The plan cannot be run; nothing was.
pub fn measure(
    plan: &Plan,
    targets: &mut [Box<dyn Target + '_>],
    start: Start,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Diagnosis, PlanError> {
    let layers: Vec<LayerEntry> = targets
        .iter()
        .map(|target| LayerEntry { name: target.name().to_owned(), position: target.position() })
        .collect();
    plan.check(&layers)?;
    let mut diagnosis = begin(plan, layers, start)?;
    let order = plan.order_of(&diagnosis.layers_compared().collect::<Vec<_>>());
    let planned = order.len();
    let mut complete = run_all(&missing(&diagnosis, order), targets, &mut diagnosis, stop, progress);
    if complete {
        let more = second_stage(plan, &diagnosis, plan.extra_runs.min(planned));
        complete = run_all(&missing(&diagnosis, more), targets, &mut diagnosis, stop, progress);
    }
    let mut left = plan.follow_ups;
    for round in 0..MOST_ROUNDS {
        let runs = if complete { asked(plan, &mut diagnosis, round, &mut left) } else { Vec::new() };
        if runs.is_empty() {
            break;
        }
        complete = run_all(&runs, targets, &mut diagnosis, stop, progress);
    }
    diagnosis.interrupted = !complete;
    Ok(diagnosis)
}

fn begin(plan: &Plan, layers: Vec<LayerEntry>, start: Start) -> Result<Diagnosis, PlanError> {
    match start {
        Start::Fresh(environment) => Ok(Diagnosis {
            schema: SCHEMA.to_owned(),
            environment,
            cells: plan.cells.clone(),
            follow_ups: Vec::new(),
            layers,
            repeats: plan.repeats,
            seed: plan.seed,
            interrupted: true,
            rows: Vec::new(),
        }),
        Start::Resume(earlier) if earlier.layers != layers => Err(PlanError::Resume("it has other layers")),
        Start::Resume(earlier) if earlier.cells != plan.cells => Err(PlanError::Resume("it has other cells")),
        Start::Resume(earlier) if earlier.seed != plan.seed => Err(PlanError::Resume("it has another seed")),
        Start::Resume(mut earlier) => {
            earlier.rows.retain(|row| !matches!(row.outcome, RunOutcome::Failed(_)));
            (earlier.repeats, earlier.interrupted) = (plan.repeats, true);
            Ok(earlier)
        }
    }
}

/// The runs that are not among the rows.
fn missing(diagnosis: &Diagnosis, order: Vec<Run>) -> Vec<Run> {
    let done: HashSet<(Option<usize>, Cell, u32)> =
        diagnosis.rows.iter().map(|row| (diagnosis.layer_index(&row.layer), row.cell, row.repeat)).collect();
    order.into_iter().filter(|run| !done.contains(&(Some(run.layer), run.cell, run.repeat))).collect()
}

/// Further repeats of the cells with an inconclusive step, at the layers of that step.
///
/// The scatter of the planned repeats fixes their number (two stages, Stein 1945). The plan does not test after each until
/// one is significant: with enough tests, equals differ, too.
fn second_stage(plan: &Plan, diagnosis: &Diagnosis, most: usize) -> Vec<Run> {
    let mut first = diagnosis.clone();
    first.rows.retain(|row| row.repeat <= plan.repeats);
    let mut cells: Vec<(Cell, Vec<usize>, u32)> = Vec::new();
    for step in compare(&first).steps.iter().filter(|step| step.judgement == Judgement::Inconclusive) {
        let worth = |needed: &u32| *needed <= plan.repeats.saturating_mul(WORTH_REPEATING);
        let Some(needed) = step.repeats_needed.filter(worth) else { continue };
        let needed = needed.max(plan.repeats + FEWEST_MORE);
        match cells.iter_mut().find(|(cell, ..)| *cell == step.cell) {
            Some((_, layers, repeats)) => {
                layers.extend([step.from, step.to]);
                *repeats = needed.max(*repeats);
            }
            None => cells.push((step.cell, vec![step.from, step.to], needed)),
        }
    }
    for (_, layers, _) in &mut cells {
        layers.sort_unstable();
        layers.dedup();
    }
    let last = cells.iter().map(|(.., repeats)| *repeats).max().unwrap_or(0);
    let mut random = Rng::with_seed(plan.seed.wrapping_add(1));
    let repeat = |repeat| {
        let wanted: Vec<(Cell, &[usize])> = cells
            .iter()
            .filter(|(.., repeats)| *repeats >= repeat)
            .map(|(cell, layers, _)| (*cell, layers.as_slice()))
            .collect();
        shuffled(&wanted, repeat, &mut random)
    };
    (plan.repeats + 1..=last).flat_map(repeat).take(most).collect()
}

/// The runs that the hypotheses ask for and that are not there yet, three times each, in a random order.
fn asked(plan: &Plan, diagnosis: &mut Diagnosis, round: u64, left: &mut usize) -> Vec<Run> {
    let hypotheses = find(diagnosis).verdict.hypotheses;
    let asks: Vec<Ask> = hypotheses.into_iter().flat_map(|hypothesis| hypothesis.asks).collect();
    for Ask { cell, .. } in &asks {
        if !diagnosis.all_cells().any(|known| known == cell) {
            diagnosis.follow_ups.push(*cell);
        }
    }
    let run = |repeat| asks.iter().map(move |ask| Run { repeat, cell: ask.cell, layer: ask.layer });
    let mut runs = missing(diagnosis, (1..=FOLLOW_UP_REPEATS).flat_map(run).collect());
    let mut seen = HashSet::new();
    runs.retain(|run| seen.insert((run.layer, run.cell, run.repeat)));
    Rng::with_seed(plan.seed.wrapping_add(2 + round)).shuffle(&mut runs);
    runs.truncate(*left);
    *left -= runs.len();
    runs
}

/// Whether all were run; if not, it was interrupted.
fn run_all(
    runs: &[Run],
    targets: &mut [Box<dyn Target + '_>],
    diagnosis: &mut Diagnosis,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(Progress<'_>),
) -> bool {
    let total = diagnosis.rows.len() + runs.len();
    for run in runs {
        let name = diagnosis.layers[run.layer].name.clone();
        progress(Progress::Starting { done: diagnosis.rows.len(), total, layer: &name, run: *run });
        let stopped = || stop.load(Ordering::Relaxed);
        let outcome = if stopped() { None } else { run_one(&mut *targets[run.layer], &run.cell) };
        let Some(outcome) = outcome.filter(|_| !stopped()) else { return false };
        let counters = targets[run.layer].counters();
        diagnosis.rows.push(Row { layer: name, cell: run.cell, repeat: run.repeat, outcome, counters });
        let (done, row) = (diagnosis.rows.len(), &diagnosis.rows[diagnosis.rows.len() - 1]);
        progress(Progress::Finished { done, total, row, so_far: diagnosis });
    }
    true
}

/// `None` when interrupted.
fn run_one(target: &mut dyn Target, cell: &Cell) -> Option<RunOutcome> {
    if let Err(reason) = target.can_run(cell) {
        return Some(RunOutcome::Skipped(reason));
    }
    match target.settle().and_then(|()| target.run(cell)) {
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
mod tests;
