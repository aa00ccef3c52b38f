//! A hypothesis: a cause, the number that it predicts, and the measurement of the run that decides.

use std::fmt;

use serde::Serialize;

use crate::cell::Cell;
use weir_report::format;

/// Possible causes of a cost. The verdict names the first of several that are confirmed. A varying device comes before all
/// causes that compare with it. A replica without processor time looks to it like a long network path, so it comes before
/// that. Processor time of this machine comes last: a shortage makes everything slower and fulfils no other hypothesis's
/// prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The lowest layer itself varies from one repeat to the next.
    DeviceVariance,
    /// A replica's node gets too little of a processor.
    SlowReplica,
    /// A layer passes a sequence on in another order.
    ArrivalOrder,
    /// A small fast tier is exhausted; the storage behind it is slow.
    TierExhausted,
    /// A fixed number of bytes a second.
    Throttled,
    /// Writes cover parts of blocks, and a layer reads the rest first.
    PartialWrites,
    /// A layer makes several requests of one.
    SplitRequests,
    /// The network to the replicas has little bandwidth.
    LinkBandwidth,
    /// A layer has one request in flight, however many wait.
    OneInFlight,
    /// The network to the replicas has a high latency.
    LinkLatency,
    /// The load generator gets too little of a processor.
    Generator,
    /// The node gets too little of a processor.
    Processor,
}

impl Cause {
    /// It rests on the variance itself or on the scheduler's counts, not on rates that are held against each other.
    pub(super) fn is_counted(self) -> bool {
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
            Cause::LinkBandwidth => "bandwidth to the replicas",
            Cause::LinkLatency => "latency to the replicas",
        })
    }
}

/// The result of the deciding run.
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
    /// Index in [`Diagnosis::layers`](crate::result::Diagnosis::layers).
    pub layer: usize,
    /// The load.
    pub cell: Cell,
}

/// The number that a hypothesis predicts, and the run's measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// If the guess is true.
    pub value: f64,
    /// The least that supports it.
    pub least: f64,
    /// The most that supports it; `None` where any more does.
    pub most: Option<f64>,
    /// `IOPS`, `ns`, `share of the time`, `share of the rate`.
    pub unit: &'static str,
    /// The run's measurement; absent while the run is missing.
    pub measured: Option<f64>,
}

impl Predicted {
    pub(super) fn standing(&self) -> Standing {
        match self.measured {
            None => Standing::Open,
            Some(measured) if measured >= self.least && self.most.is_none_or(|most| measured <= most) => {
                Standing::Supported
            }
            Some(_) => Standing::Rejected,
        }
    }
}

/// A guess at the cause of a cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hypothesis {
    /// The cause.
    pub cause: Cause,
    /// Index in [`Diagnosis::layers`](crate::result::Diagnosis::layers) of the layer at fault; absent where a process is short of
    /// processor time.
    pub layer: Option<usize>,
    /// Whether the deciding run is there, and its result.
    pub standing: Standing,
    /// Sentences with the numbers that it rests on.
    pub grounds: Vec<String>,
    /// The expected observation if it is true, and if not.
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
            Standing::Open => "undecided",
            Standing::Supported => "supported by its run",
            Standing::Rejected => "rejected by its run",
        };
        format!("Hypothesis: {} ({standing}).", self.cause)
    }

    /// The deciding run's measurement, in words.
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
