//! Processor time: threads that were ready to run and did not, by the scheduler's own count.

use super::model::{Cause, Hypothesis, Predicted};
use super::view::{View, small};
use crate::Counters;
use crate::cell::{Cell, Direction};
use weir_report::format;

/// A thread that waits for a processor for this share of the time is short of it.
const SHORT: f64 = 0.3;

/// Processors' worth of time that others use, or that is idle while a thread waits. With less of either the wait is for our
/// own threads: the machine is small, and no other process interferes.
const FOREIGN: f64 = 0.5;

/// Processors' worth of time that must be idle. If there is none at all, the machine as a whole is short, and everything on
/// it is slower: which thread waits most is then chance.
pub(crate) const IDLE: f64 = 0.15;

/// Threads at a layer in these cells are kept from a processor, by others or by a rule, while the machine has some to spare:
/// they wait neither for our own threads nor because the whole machine is busy. False without counters.
pub(super) fn is_kept_away(view: &View<'_>, layer: usize, wanted: impl Fn(&Cell) -> bool) -> bool {
    let others = |counters: &Counters| Some(counters.foreign_processors + counters.niced_processors);
    let idle = view.counted(layer, &wanted, |counters| Some(counters.idle_processors));
    let others = view.counted(layer, &wanted, others);
    idle.zip(others).is_some_and(|(idle, others)| idle >= IDLE && idle.max(others) >= FOREIGN)
}

/// No processor is idle in these cells, because others use them: variation may come from that.
pub(super) fn is_crowded(view: &View<'_>, layer: usize, wanted: impl Fn(&Cell) -> bool) -> bool {
    let others = |counters: &Counters| Some(counters.foreign_processors + counters.niced_processors);
    let idle = view.counted(layer, &wanted, |counters| Some(counters.idle_processors));
    let others = view.counted(layer, &wanted, others);
    idle.zip(others).is_some_and(|(idle, others)| idle < IDLE && others >= FOREIGN)
}

/// The share of the time that node and generator waited while the highest layer was loaded, in the planned cells with a queue.
/// If both wait, neither is the one that is short.
fn waits(view: &View<'_>) -> Option<(f64, f64)> {
    let planned = |cell: &Cell| view.diagnosis.cells.contains(cell) && cell.queue_depth > 1;
    let highest = view.highest()?;
    let wait = |of: fn(&Counters) -> Option<f64>| view.counted(highest, planned, of);
    Some((wait(|counters| counters.node_wait)?, wait(|counters| counters.generator_wait)?))
}

/// The node's threads, at a layer that does nothing but compute: the accelerator's reads.
pub(super) fn node(view: &View<'_>) -> Option<Hypothesis> {
    let layer = view.diagnosis.chain().nth(1).map(|(layer, _)| layer)?;
    let wait = |wanted: &dyn Fn(&Cell) -> bool| view.counted(layer, wanted, |counters| counters.node_wait);
    let planned = |cell: &Cell| view.diagnosis.cells.contains(cell) && cell.queue_depth > 1;
    let waited = wait(&planned)?;
    let both = waits(view).is_some_and(|(node, generator)| generator > node / 2.0);
    if waited < SHORT || both || !is_kept_away(view, layer, planned) {
        return None;
    }
    let deep = view.deepest(small(Direction::Read))?;
    let deciding = Cell { queue_depth: deep.queue_depth / 2, ..deep };
    let measured = wait(&|cell| *cell == deciding);
    let predicted =
        Predicted { value: waited, least: waited / 2.0, most: None, unit: "share of the time", measured };
    let name = view.name(layer);
    let steal = view.counted(layer, planned, |counters| Some(counters.steal)).unwrap_or(0.0);
    Some(Hypothesis {
        cause: Cause::Processor,
        layer: None,
        standing: predicted.standing(),
        grounds: vec![format!(
            "Under load at {name} the node's busiest thread waited for a processor {} of the time \
             (the hypervisor took {}).",
            format::percent(waited),
            format::percent(steal)
        )],
        prediction: format!(
            "If other work uses its processor, it also waits in {deciding}, which touches no storage; \
             with a processor of its own it would do up to ×{:.1}.",
            1.0 / (1.0 - waited.min(0.95))
        ),
        predicted: Some(predicted),
        run: format!("{deciding} at {name}, with the scheduler's counters."),
        asks: view.missing(layer, deciding).into_iter().collect(),
    })
}

/// The generator's own threads, and the run that gives it nothing to wait for.
pub(super) fn generator(view: &View<'_>) -> Option<Hypothesis> {
    let (highest, reference) = (view.highest()?, view.reference()?);
    let planned = |cell: &Cell| view.diagnosis.cells.contains(cell) && cell.queue_depth > 1;
    let waited = view.counted(highest, planned, |counters| counters.generator_wait)?;
    let both = waits(view).is_some_and(|(node, generator)| node > generator / 2.0);
    if waited < SHORT || both || !is_kept_away(view, highest, planned) {
        return None;
    }
    let deciding = view.deepest(small(Direction::Read))?;
    // Also of rows that no finding rests on: a generator that is short of its processor does not keep its queue full.
    let share = view.measured(reference, &deciding, |run| Some(run.cpu_seconds? / run.runtime_seconds?));
    let predicted = Predicted {
        value: 1.0 - waited,
        least: 0.0,
        most: Some(1.0 - waited / 2.0),
        unit: "share of the time",
        measured: share,
    };
    Some(Hypothesis {
        cause: Cause::Generator,
        layer: None,
        standing: predicted.standing(),
        grounds: vec![format!(
            "While {} was loaded, the generator's busiest thread waited for a processor {} of the time.",
            view.name(highest),
            format::percent(waited)
        )],
        prediction: format!(
            "If it is short of processor time, it also gets {} of a processor or less without any I/O, \
             where it could use all of one.",
            format::percent(1.0 - waited / 2.0)
        ),
        predicted: Some(predicted),
        run: "The generator against its null engine.".to_owned(),
        asks: view.missing(reference, deciding).into_iter().collect(),
    })
}
