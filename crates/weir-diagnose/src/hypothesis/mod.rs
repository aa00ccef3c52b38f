//! Why a step, or the lowest layer, may cost what it costs: a guess, what it rests on, the number that it predicts, and
//! the run that decides.
//!
//! Everything here is pure: it is given rows and counters. A hypothesis whose run is missing asks for it
//! ([`Hypothesis::asks`]) and is `open`; when the run is among the rows, its number supports or rejects the guess. It
//! says whose doing it would be; which step costs most is the verdict's, with the grade that the repeats allow.

mod hop;
mod lowest;
mod order;
pub(crate) mod processor;
mod queue;
mod split;
mod variance;

#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;

use crate::cell::{Cell, Direction, Pattern, Shape};
use crate::finding::{Difference, Findings, Judgement, SUSPICIOUS_FACTOR};
use crate::format;
use crate::result::{Diagnosis, Measurement, Position, RunOutcome};

/// What a cost may come from. Of several that are confirmed the first is named. A device that varies comes before all that
/// is held against it; a replica without processor time looks like a long way to it, so it comes before that; processor time of this machine comes last, because it makes
/// everything slower and no other guess's number come true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The lowest layer itself varies from one repeat to the next.
    DeviceVariance,
    /// A replica's node gets too little of a processor.
    SlowReplica,
    /// A layer passes a sequence on in another order.
    ArrivalOrder,
    /// A small fast tier is exhausted; what is behind it is slow.
    TierExhausted,
    /// A fixed number of bytes a second.
    Throttled,
    /// Writes cover parts of blocks, and a layer reads the rest first.
    PartialWrites,
    /// A layer makes several requests of one.
    SplitRequests,
    /// The way to the replicas carries few bytes a second.
    LinkBandwidth,
    /// A layer has one request in flight, however many wait.
    OneInFlight,
    /// The way to the replicas is long.
    LinkLatency,
    /// The load generator gets too little of a processor.
    Generator,
    /// The node gets too little of a processor.
    Processor,
}

impl Cause {
    /// It rests on the variance itself or on the scheduler's counts, not on rates that are held against each other.
    fn is_counted(self) -> bool {
        matches!(self, Cause::DeviceVariance | Cause::SlowReplica | Cause::Generator | Cause::Processor)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Cause::Generator => "the load generator is short of processor time",
            Cause::Processor => "the node is short of processor time",
            Cause::SlowReplica => "a replica is short of processor time",
            Cause::ArrivalOrder => "arrival order",
            Cause::OneInFlight => "one request in flight",
            Cause::TierExhausted => "a fast tier is exhausted",
            Cause::DeviceVariance => "the device varies",
            Cause::PartialWrites => "writes of parts of blocks",
            Cause::SplitRequests => "requests are split",
            Cause::Throttled => "a fixed rate in bytes",
            Cause::LinkBandwidth => "bandwidth of the way to the replicas",
            Cause::LinkLatency => "latency of the way to the replicas",
        })
    }
}

/// What the deciding run has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// The run is missing.
    Open,
    /// The run came out as predicted.
    Supported,
    /// It did not.
    Rejected,
}

/// A run that would decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Place in [`Diagnosis::layers`].
    pub layer: usize,
    /// The load.
    pub cell: Cell,
}

/// The number that a hypothesis predicts, and what the run measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// If the guess is true.
    pub value: f64,
    /// The least that supports it.
    pub least: f64,
    /// The most that supports it.
    pub most: f64,
    /// `IOPS`, `ns`, `share of the time`, `share of the rate`.
    pub unit: &'static str,
    /// What the run measured; absent while it is missing.
    pub measured: Option<f64>,
}

impl Predicted {
    fn standing(&self) -> Standing {
        match self.measured {
            None => Standing::Open,
            Some(measured) if (self.least..=self.most).contains(&measured) => Standing::Supported,
            Some(_) => Standing::Rejected,
        }
    }
}

/// A guess at the cause of a cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hypothesis {
    /// The cause.
    pub cause: Cause,
    /// Place in [`Diagnosis::layers`] of the layer whose doing it would be; absent where the cause is a process that is
    /// short of processor time.
    pub layer: Option<usize>,
    /// Whether the deciding run is there, and what it said.
    pub standing: Standing,
    /// Sentences with the numbers that it rests on.
    pub grounds: Vec<String>,
    /// What must be seen if it is true, and what if not.
    pub prediction: String,
    /// The same as a number; absent while even that needs a run.
    pub predicted: Option<Predicted>,
    /// The run that decides.
    pub run: String,
    /// The runs that are missing.
    #[serde(skip)]
    pub asks: Vec<Ask>,
}

impl Hypothesis {
    /// One line: the cause and where it stands.
    #[must_use]
    pub fn title(&self) -> String {
        let standing = match self.standing {
            Standing::Open => "not yet decided",
            Standing::Supported => "supported by the run that decides",
            Standing::Rejected => "rejected by the run that decides",
        };
        format!("Hypothesis: {} ({standing}).", self.cause)
    }

    /// What the deciding run measured, in words.
    #[must_use]
    pub fn outcome(&self) -> Option<String> {
        let predicted = self.predicted?;
        let number = |value: f64| match predicted.unit {
            "ns" => format::duration(value),
            "IOPS" => format!("{} IOPS", format::whole(value)),
            share => format!("{} {}", format::percent(value), share.trim_start_matches("share ")),
        };
        Some(format!("Predicted: {}. Measured: {}.", number(predicted.value), number(predicted.measured?)))
    }
}

/// The hypotheses that the rows give grounds for.
#[must_use]
pub fn explain(diagnosis: &Diagnosis, findings: &Findings) -> Vec<Hypothesis> {
    let view = View { diagnosis, findings };
    let guesses = [
        variance::device(&view),
        processor::generator(&view),
        processor::node(&view),
        hop::slow_replica(&view),
        order::arrival_order(&view),
        queue::one_in_flight(&view),
        lowest::tier_exhausted(&view),
        lowest::throttled(&view),
        split::partial(&view),
        split::split(&view),
        hop::bandwidth(&view),
        hop::latency(&view),
    ];
    let mut guesses: Vec<Hypothesis> = guesses.into_iter().flatten().collect();
    if variance::is_wild(&view) {
        // Numbers that come true within such a scatter come true by chance. Time that was waited for a processor is counted.
        let by_rates = |guess: &&mut Hypothesis| !guess.cause.is_counted();
        for guess in guesses.iter_mut().filter(by_rates).filter(|guess| guess.standing == Standing::Supported)
        {
            guess.standing = Standing::Open;
            guess.grounds.push("The lowest layer varies too much for its run to decide.".to_owned());
        }
    }
    guesses
}

/// The hypothesis that a run has confirmed. Of several, the first in the order of [`Cause`].
#[must_use]
pub fn confirmed(hypotheses: &[Hypothesis]) -> Option<&Hypothesis> {
    let supported = hypotheses.iter().filter(|guess| guess.standing == Standing::Supported);
    supported.min_by_key(|guess| guess.cause)
}

/// The rows and findings, as hypotheses look at them.
struct View<'a> {
    diagnosis: &'a Diagnosis,
    findings: &'a Findings,
}

/// 4 KiB at random.
const fn small(direction: Direction) -> Shape {
    Shape::new(4 << 10, Pattern::Random, direction)
}

impl View<'_> {
    fn iops(&self, layer: usize, cell: &Cell) -> Option<f64> {
        Some(self.findings.point(layer, cell)?.iops.median)
    }

    /// Median latency, in nanoseconds.
    fn latency(&self, layer: usize, cell: &Cell) -> Option<f64> {
        Some(self.findings.point(layer, cell)?.p50_ns?.median)
    }

    fn name(&self, layer: usize) -> &str {
        &self.diagnosis.layers[layer].name
    }

    /// The layer and the cell, if they were not run: a row that cannot be used counts as run.
    fn missing(&self, layer: usize, cell: Cell) -> Option<Ask> {
        let name = self.name(layer);
        let run = self.diagnosis.rows.iter().any(|row| row.layer == name && row.cell == cell);
        (!run).then_some(Ask { layer, cell })
    }

    fn lowest(&self) -> Option<usize> {
        self.diagnosis.chain().next().map(|(layer, _)| layer)
    }

    fn highest(&self) -> Option<usize> {
        self.diagnosis.chain().last().map(|(layer, _)| layer)
    }

    fn reference(&self) -> Option<usize> {
        self.diagnosis.layers.iter().position(|layer| layer.position == Position::Reference)
    }

    /// The deepest queue at which a shape was planned.
    fn deepest(&self, shape: Shape) -> Option<Cell> {
        let cells = self.diagnosis.cells.iter().filter(|cell| cell.shape == shape && cell.threads == 1);
        cells.max_by_key(|cell| cell.queue_depth).filter(|cell| cell.queue_depth > 1).copied()
    }

    /// Losses on the way, the greatest first; also those that the repeats leave open and that are great enough to raise a
    /// suspicion: the run that decides needs no step that is shown.
    fn losses(&self) -> Vec<&Difference> {
        let open = |step: &Difference| {
            step.judgement == Judgement::Inconclusive && step.loss_factor() >= SUSPICIOUS_FACTOR
        };
        let steps = self.findings.steps.iter();
        let mut losses: Vec<_> = steps.filter(|step| step.is_loss() || open(step)).collect();
        losses.sort_by(|a, b| b.loss_factor().total_cmp(&a.loss_factor()));
        losses
    }

    /// The middle of what the operating system counted at a layer in the cells that are wanted.
    fn counted(
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
    fn measured(
        &self,
        layer: usize,
        cell: &Cell,
        value: impl Fn(&Measurement) -> Option<f64>,
    ) -> Option<f64> {
        middle(self.runs(layer, cell, value))
    }

    /// What each run of a cell measured, whether a finding may rest on it or not.
    fn runs(
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
