//! The figures of one interval: a line of the live view and of jsonl.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::summary::{KindSummary, Summary};
use crate::tally::Tally;
use crate::workload::Workload;

/// Name and version of the JSON form of [`Interval`].
pub const INTERVAL_SCHEMA: &str = "weir.load-interval/1";

/// One interval of a load that is running.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// [`INTERVAL_SCHEMA`].
    pub schema: String,
    /// Distinguishes this line from the summary, which is the last line and has no type.
    pub r#type: String,
    /// The job's name, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The interval's end, in seconds from the load's start.
    pub at_seconds: f64,
    /// Its length.
    pub seconds: f64,
    /// Reads and writes that were answered in it, without their buckets.
    pub kinds: Vec<KindSummary>,
}

impl Interval {
    /// The counts of `tally` in the last `length`, `at` after the load began.
    #[must_use]
    pub fn new(workload: &Workload, tally: &Tally, at: Duration, length: Duration) -> Interval {
        let mut kinds = Summary::new("", "", workload, tally, length).kinds;
        for kind in &mut kinds {
            kind.buckets_ns.0.clear();
            kind.issue_buckets_ns.0.clear();
        }
        Interval {
            schema: INTERVAL_SCHEMA.to_owned(),
            r#type: "interval".into(),
            name: None,
            at_seconds: at.as_secs_f64(),
            seconds: length.as_secs_f64(),
            kinds,
        }
    }
}
