//! The choice of cells to draw: a matrix has up to 336, and a reader looks at a few.

use weir_load::timeline::Timeline;

use weir_report::distribution::{self, Distribution, Series};
use weir_report::over_time::{self, Course};
use weir_report::panel::Panel;

use super::course;
use crate::cell::Cell;
use crate::comparison::Quantity;
use crate::finding::Findings;
use crate::result::{Diagnosis, Measurement, RunOutcome};

/// Layers of a cell that are drawn over time: more would be a wall of pictures.
const MOST_COURSES: usize = 3;

/// Width of a picture of three in a row, in its own units.
const THREE_IN_A_ROW: f64 = 340.0;

/// The planned cells that are judged by `quantity`, at most so many: first those in which the step that the verdict names
/// is a loss, then those with the greatest loss of any step. In the order of the plan.
pub fn telling<'a>(
    diagnosis: &'a Diagnosis,
    findings: &Findings,
    quantity: Quantity,
    most: usize,
) -> Vec<&'a Cell> {
    let cells = diagnosis.cells.iter().filter(|cell| findings.compared.quantity(cell) == quantity);
    let mut ranked: Vec<(usize, &Cell)> = cells.enumerate().collect();
    let weighed = |cell| weight(findings, cell);
    ranked.sort_by(|(_, a), (_, b)| {
        let (a, b) = (weighed(a), weighed(b));
        b.0.cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    ranked.truncate(most);
    ranked.sort_by_key(|(place, _)| *place);
    ranked.into_iter().map(|(_, cell)| cell).collect()
}

/// Whether the named step is a loss there, and the greatest loss.
fn weight(findings: &Findings, cell: &Cell) -> (bool, f64) {
    let losses = || findings.compared.steps.iter().filter(|step| step.cell == *cell && step.is_loss());
    let named = findings
        .verdict
        .step
        .is_some_and(|named| losses().any(|step| (step.from, step.to) == (named.from, named.to)));
    (named, losses().map(|step| step.loss_factor()).fold(0.0, f64::max))
}

/// The rows of a layer in a cell that findings rest on.
fn usable<'a>(
    diagnosis: &'a Diagnosis,
    findings: &Findings,
    layer: usize,
    cell: &Cell,
) -> Vec<&'a Measurement> {
    let name = &diagnosis.layers[layer].name;
    let rows = diagnosis.rows.iter().enumerate().filter(|(place, row)| {
        row.layer == *name
            && row.cell == *cell
            && findings.compared.unused.iter().all(|unused| unused.row != *place)
    });
    let measured = rows.filter_map(|(_, row)| match &row.outcome {
        RunOutcome::Measured(measurement) => Some(measurement),
        RunOutcome::Skipped(_) | RunOutcome::Failed(_) => None,
    });
    measured.collect()
}

/// The distributions of the layers on the path, a panel for each cell.
pub fn distributions(diagnosis: &Diagnosis, findings: &Findings, cells: &[&Cell]) -> Vec<Panel> {
    let of_layer = |(layer, name), cell: &Cell| {
        let runs = usable(diagnosis, findings, layer, cell);
        Series { name, latencies: Distribution::of(runs.iter().map(|run| &run.buckets_ns.0[..])) }
    };
    let panel = |cell: &&Cell| {
        let layers = diagnosis.chain().map(|(layer, entry)| (layer, entry.name.as_str()));
        let series: Vec<Series<'_>> = layers.map(|layer| of_layer(layer, cell)).collect();
        distribution::panel(&cell.to_string(), &series)
    };
    cells.iter().filter_map(panel).collect()
}

/// The layers on the path over time, a row of panels for each cell: the repeat in the middle of the usable ones, the others
/// as thin lines.
pub fn courses(diagnosis: &Diagnosis, findings: &Findings, cells: &[&Cell]) -> Vec<(String, Vec<Panel>)> {
    let drawn = |cell: &&Cell| {
        let runs: Vec<(String, Vec<&Timeline>)> = ends_and_step(diagnosis, findings)
            .into_iter()
            .map(|layer| {
                let mut rows = usable(diagnosis, findings, layer, cell);
                rows.sort_by(|a, b| a.iops.total_cmp(&b.iops));
                let middle = rows.len() / 2;
                // The one in the middle comes first.
                rows.get_mut(..=middle).into_iter().for_each(|half| half.rotate_right(1));
                let timelines = rows.iter().filter_map(|row| row.timeline.as_deref()).collect();
                (diagnosis.layers[layer].name.clone(), timelines)
            })
            .collect();
        let courses: Vec<Course> = runs
            .iter()
            .filter_map(|(title, timelines)| {
                let (run, others) = timelines.split_first()?;
                let others = others.iter().map(|other| course::of(other)).collect();
                Some(Course { title: title.clone(), run: course::of(run), others, window: "measured" })
            })
            .collect();
        (cell.to_string(), over_time::panels(&courses, THREE_IN_A_ROW))
    };
    cells.iter().map(drawn).filter(|(_, panels)| !panels.is_empty()).collect()
}

/// The layers on the path, from the bottom; of a long path the lowest one and the named step, or its ends.
fn ends_and_step(diagnosis: &Diagnosis, findings: &Findings) -> Vec<usize> {
    let chain: Vec<usize> = diagnosis.chain().map(|(layer, _)| layer).collect();
    if chain.len() <= MOST_COURSES {
        return chain;
    }
    let (lowest, highest) = (chain.first().copied(), chain.last().copied());
    let wanted = match findings.verdict.step {
        Some(named) => [lowest, Some(named.from), Some(named.to)],
        None => [lowest, None, highest],
    };
    chain.iter().copied().filter(|layer| wanted.contains(&Some(*layer))).collect()
}
