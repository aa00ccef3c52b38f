//! The layered measurement: the same load at every layer, on the same disk, and its findings.
//!
//! - [`cell`]: one load: block size, direction, pattern, queue depth.
//! - [`tier`]: the extent of a measurement, and its duration.
//! - [`plan`]: layers and cells, the number of runs and their order; runs them and collects the rows.
//! - [`live`]: the time of a live disk's requests by layer, from its meters alone.
//! - [`load`]: layers that the load generator can reach by itself.
//! - [`import`]: rows from hand-typed tables, fio and DiskSpd.
//! - [`result`]: the rows and the environment, as JSON.
//! - [`environment`]: the machine that measured, and the command to run it again.
//! - [`check`]: whether a row can be true at all (Little's law, sizes times rates).
//! - [`counters`]: the operating system's counters during a run.
//! - [`stats`]: confidence intervals and tests for ratios.
//! - [`comparison`]: medians and spread over the repeats, and the step from layer to layer, judged.
//! - [`verdict`]: the step that costs most, with a grade, in words that say only what the numbers support.
//! - [`hypothesis`]: a possible cause of that cost, and the run that decides.
//! - [`finding`]: comparisons and verdict together.
//! - [`reliability`]: whether a measurement as a whole can be relied on.
//! - [`threshold`]: the limits of a pipeline.
//! - [`table`]: the findings for a terminal.
//! - [`report`]: the findings as one HTML file that needs no network, as JSON and as JUnit; a load of `weir bench` likewise.
//!
//! This crate knows neither nodes nor networks. A layer is a [`Target`]: it has a name, runs a [`Cell`] and returns its
//! measurement.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod cell;
pub mod check;
pub mod comparison;
pub mod counters;
pub mod environment;
pub mod finding;
pub mod hypothesis;
pub mod import;
mod json;
pub mod live;
pub mod load;
pub mod plan;
pub mod reliability;
pub mod report;
pub mod result;
pub mod stats;
pub mod table;
pub mod threshold;
pub mod tier;
pub mod verdict;

#[cfg(test)]
mod sample;

pub use cell::{Cell, Direction, Pattern, Shape};
pub use comparison::Judgement;
pub use counters::Counters;
pub use environment::Environment;
pub use finding::{Findings, find};
pub use import::{Import, ImportError};
pub use plan::{Plan, PlanError, Progress, Start, Target, TargetError, measure};
pub use result::{Diagnosis, DocumentError, LayerEntry, Measurement, Position, Row, RunOutcome};
pub use threshold::{Threshold, ThresholdError};
pub use tier::Tier;
pub use verdict::{Grade, Verdict};
