//! Device variance: the lowest layer does not do the same twice, so no layer above it can. It is checked first: the
//! differences that other hypotheses compare are within the scatter.

use super::model::{Ask, Cause, Hypothesis, Predicted};
use super::processor::is_crowded;
use super::view::{View, small};
use crate::cell::{Cell, Direction};
use crate::stats::LogSample;
use weir_report::format;

/// Repeats that differ by this much are more than unsteady: a standard deviation of the logarithm, so about a third of the
/// rate up and down.
const VARIES: f64 = 0.3;

/// Cells with repeats that it takes to say so; half of them must vary.
const FEWEST_CELLS: usize = 3;

/// The layer above varies as much, within this factor, when it varies because of the lowest one.
const AS_MUCH: f64 = 3.0;

/// A node that waits for a processor for this share of the time varies because of that.
const WAITS: f64 = 0.15;

/// Queue depths of the runs that decide.
const DECIDING_DEPTHS: [u32; 2] = [8, 16];

/// The lowest layer's repeats scatter, those of the layer above as much, and processor time is not the reason.
pub(super) fn device(view: &View<'_>) -> Option<Hypothesis> {
    let mut chain = view.diagnosis.chain().map(|(layer, _)| layer);
    let (lowest, above) = (chain.next()?, chain.next()?);
    let cells = &view.diagnosis.cells;
    let everywhere = middle(view, lowest, cells.iter())?;
    // Writes may end in a log above; reads of a range that no cache holds come from below.
    let reads = || cells.iter().filter(|cell| cell.shape.direction == Direction::Read);
    let (here, there) = (middle(view, lowest, reads())?, middle(view, above, reads())?);
    let planned = |cell: &Cell| cells.contains(cell);
    let waits = view.counted(lowest, planned, |counters| counters.node_wait);
    if waits.is_some_and(|wait| wait >= WAITS) || is_crowded(view, lowest, planned) {
        return None;
    }
    if everywhere < VARIES || here < VARIES || there < here / AS_MUCH {
        return None;
    }
    let deciding = DECIDING_DEPTHS.map(|depth| small(Direction::Read).at(depth));
    let reference = view.reference();
    let measured = reference.and_then(|reference| excess(view, &deciding, lowest, reference));
    let predicted = Predicted { value: here, least: VARIES, most: None, unit: "share of the rate", measured };
    let (name, next) = (view.name(lowest), view.name(above));
    Some(Hypothesis {
        cause: Cause::DeviceVariance,
        layer: Some(lowest),
        standing: predicted.standing(),
        grounds: vec![format!(
            "Repeats of the same read at {name} vary by {} of their rate, at {next} by {}: no layer above can be \
             steadier.",
            format::percent(here),
            format::percent(there)
        )],
        prediction: format!(
            "If the device is the cause, {name} varies as much in further runs, and more than the generator alone at the same \
             time; if the machine is busy, both vary."
        ),
        predicted: Some(predicted),
        run: format!("{} and {} at {name} and with the generator alone.", deciding[0], deciding[1]),
        asks: asks(view, &deciding, lowest, reference),
    })
}

fn asks(view: &View<'_>, deciding: &[Cell], lowest: usize, reference: Option<usize>) -> Vec<Ask> {
    let layers = std::iter::once(lowest).chain(reference);
    layers.flat_map(|layer| deciding.iter().filter_map(move |cell| view.missing(layer, *cell))).collect()
}

/// Whether the lowest layer's repeats differ so much that nothing that is compared with them says anything.
pub(super) fn is_wild(view: &View<'_>) -> bool {
    let reads = view.diagnosis.cells.iter().filter(|cell| cell.shape.direction == Direction::Read);
    view.lowest().and_then(|lowest| middle(view, lowest, reads)).is_some_and(|deviation| deviation >= VARIES)
}

/// The middle one of the cells' deviations: a single run that was disturbed does not decide it.
fn middle<'a>(view: &View<'_>, layer: usize, cells: impl Iterator<Item = &'a Cell>) -> Option<f64> {
    let mut deviations: Vec<f64> =
        cells.filter_map(|cell| view.compared.point(layer, cell)?.deviation()).collect();
    deviations.sort_by(f64::total_cmp);
    // Of an even number the lower one: more than half must vary.
    (deviations.len() >= FEWEST_CELLS).then(|| deviations[(deviations.len() - 1) / 2])
}

/// The variation of the lowest layer beyond the reference, in the runs that decide; variances subtract.
fn excess(view: &View<'_>, deciding: &[Cell], lowest: usize, reference: usize) -> Option<f64> {
    let variance = |layer: usize| -> Option<f64> {
        // Also of rows that no finding rests on: a generator with nothing to wait for is too fast for its latencies to add up.
        let rates = |cell: &Cell| view.runs(layer, cell, |run| Some(run.iops)).collect::<Vec<_>>();
        let of_cell = |cell: &Cell| Some(LogSample::of(&rates(cell))?.deviation().powi(2));
        let all: Vec<f64> = deciding.iter().map(of_cell).collect::<Option<_>>()?;
        Some(all.iter().sum::<f64>() / all.len() as f64)
    };
    Some((variance(lowest)? - variance(reference)?).max(0.0).sqrt())
}
