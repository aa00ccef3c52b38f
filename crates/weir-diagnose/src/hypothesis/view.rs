//! The rows and their comparisons, with the queries that hypotheses need.

use crate::cell::{Cell, Direction, Pattern, Shape};
use crate::comparison::{Comparisons, Difference, Judgement, SUSPICIOUS_FACTOR};
use crate::result::{Diagnosis, Measurement, Position, RunOutcome};

use super::model::Ask;

/// The rows and comparisons, as hypotheses look at them.
pub(super) struct View<'a> {
    pub(super) diagnosis: &'a Diagnosis,
    pub(super) compared: &'a Comparisons,
}

/// 4 KiB at random.
pub(super) const fn small(direction: Direction) -> Shape {
    Shape::new(4 << 10, Pattern::Random, direction)
}

impl View<'_> {
    pub(super) fn iops(&self, layer: usize, cell: &Cell) -> Option<f64> {
        Some(self.compared.point(layer, cell)?.iops.median)
    }

    /// Median latency, in nanoseconds.
    pub(super) fn latency(&self, layer: usize, cell: &Cell) -> Option<f64> {
        Some(self.compared.point(layer, cell)?.p50_ns?.median)
    }

    pub(super) fn name(&self, layer: usize) -> &str {
        &self.diagnosis.layers[layer].name
    }

    /// The layer and the cell, if they were not run: a row that cannot be used counts as run.
    pub(super) fn missing(&self, layer: usize, cell: Cell) -> Option<Ask> {
        let name = self.name(layer);
        let run = self.diagnosis.rows.iter().any(|row| row.layer == name && row.cell == cell);
        (!run).then_some(Ask { layer, cell })
    }

    pub(super) fn lowest(&self) -> Option<usize> {
        self.diagnosis.chain().next().map(|(layer, _)| layer)
    }

    pub(super) fn highest(&self) -> Option<usize> {
        self.diagnosis.chain().last().map(|(layer, _)| layer)
    }

    pub(super) fn reference(&self) -> Option<usize> {
        self.diagnosis.layers.iter().position(|layer| layer.position == Position::Reference)
    }

    /// The deepest queue at which a shape was planned.
    pub(super) fn deepest(&self, shape: Shape) -> Option<Cell> {
        let cells = self.diagnosis.cells.iter().filter(|cell| cell.shape == shape && cell.threads == 1);
        cells.max_by_key(|cell| cell.queue_depth).filter(|cell| cell.queue_depth > 1).copied()
    }

    /// Losses on the path, the greatest first; also inconclusive ones that are great enough to raise a suspicion: the run
    /// that decides does not need a confirmed step.
    pub(super) fn losses(&self) -> Vec<&Difference> {
        let open = |step: &Difference| {
            step.judgement == Judgement::Inconclusive && step.loss_factor() >= SUSPICIOUS_FACTOR
        };
        let steps = self.compared.steps.iter();
        let mut losses: Vec<_> = steps.filter(|step| step.is_loss() || open(step)).collect();
        losses.sort_by(|a, b| b.loss_factor().total_cmp(&a.loss_factor()));
        losses
    }

    /// The middle of what the operating system counted at a layer in the cells that are wanted.
    pub(super) fn counted(
        &self,
        layer: usize,
        wanted: impl Fn(&Cell) -> bool,
        value: impl Fn(&crate::Counters) -> Option<f64>,
    ) -> Option<f64> {
        let name = self.name(layer);
        let rows = self.diagnosis.rows.iter().filter(|row| row.layer == name && wanted(&row.cell));
        middle(rows.filter_map(|row| value(row.counters.as_ref()?)))
    }

    /// The middle of what runs of a cell measured, whether a finding may rest on them or not.
    pub(super) fn measured(
        &self,
        layer: usize,
        cell: &Cell,
        value: impl Fn(&Measurement) -> Option<f64>,
    ) -> Option<f64> {
        middle(self.runs(layer, cell, value))
    }

    /// The measurements of each run of a cell, whether a finding may rest on them or not.
    pub(super) fn runs(
        &self,
        layer: usize,
        cell: &Cell,
        value: impl Fn(&Measurement) -> Option<f64>,
    ) -> impl Iterator<Item = f64> {
        let name = self.name(layer);
        let rows = self.diagnosis.rows.iter().filter(move |row| row.layer == name && row.cell == *cell);
        rows.filter_map(move |row| match &row.outcome {
            RunOutcome::Measured(measurement) => value(measurement),
            _ => None,
        })
    }
}

/// The middle value; of an even number the upper one.
fn middle(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
