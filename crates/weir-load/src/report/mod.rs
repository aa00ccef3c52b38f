//! Summaries in other programs' formats, and comparisons of two summaries.

pub mod compare;
mod csv;
mod interval;
mod prometheus;

use serde::{Deserialize, Serialize};

pub use self::csv::to_csv;
pub use self::interval::Interval;
pub use self::prometheus::to_prometheus;

use crate::summary::{SCHEMA, Summary};

/// Name and version of the JSON form of [`Report`].
pub const REPORT_SCHEMA: &str = "weir.loads/1";

fn schema() -> String {
    REPORT_SCHEMA.to_owned()
}

/// The `version` of results before they had a schema.
const FORMER: u64 = 1;

/// The results of several jobs that ran at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`REPORT_SCHEMA`]. What an earlier Weir wrote has a `version` 1 instead.
    #[serde(default = "schema")]
    pub schema: String,
    /// In the order of the job file.
    pub jobs: Vec<Summary>,
}

impl Report {
    /// The report of these jobs.
    #[must_use]
    pub fn new(jobs: Vec<Summary>) -> Report {
        Report { schema: schema(), jobs }
    }

    /// Reads the output of `weir bench --format json`: a report, or a single summary; of jsonl the last line.
    ///
    /// # Errors
    /// It is neither, or of an unknown version. The error says which.
    pub fn read(text: &str) -> Result<Report, ReadError> {
        let value = serde_json::from_str(text).or_else(|error: serde_json::Error| {
            let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
            serde_json::from_str(last).map_err(|_| ReadError::Malformed(error))
        });
        let value: serde_json::Value = value?;
        match (value["schema"].as_str(), value["version"].as_u64()) {
            (Some(SCHEMA | REPORT_SCHEMA), _) | (None, Some(FORMER)) => {}
            (Some(schema), _) => return Err(ReadError::Schema(schema.to_owned())),
            (None, Some(version)) => return Err(ReadError::Version(version)),
            (None, None) => return Err(ReadError::Foreign),
        }
        match value.get("jobs") {
            Some(_) => serde_json::from_value(value).map_err(ReadError::Malformed),
            None => {
                serde_json::from_value(value).map(|job| Report::new(vec![job])).map_err(ReadError::Malformed)
            }
        }
    }
}

/// The reason why a text is not a result.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or not the fields of a result.
    #[error("it is not a result of weir bench: {0}")]
    Malformed(serde_json::Error),
    /// JSON of something else.
    #[error("it is not a result of weir bench: it has no schema (write one with weir bench --format json)")]
    Foreign,
    /// Of another schema, or of another version of it.
    #[error("its schema is {0}, and this weir reads {SCHEMA} and {REPORT_SCHEMA}")]
    Schema(String),
    /// Of another version, from before results had a schema.
    #[error("it has version {0}, and this weir reads version {FORMER}, {SCHEMA} and {REPORT_SCHEMA}")]
    Version(u64),
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tally::{IoKind, Tally};
    use crate::workload::{Access, Workload};

    /// A summary of 1000 reads of 1 to 1000 µs, and 500 writes of twice that, times `factor`.
    pub(crate) fn summary(factor: u64) -> Summary {
        let mut tally = Tally::default();
        for latency in 1..=1000 {
            tally.count(IoKind::Read, 4096, latency * 1000 * factor, true);
            if latency % 2 == 0 {
                tally.count(IoKind::Write, 4096, latency * 2000 * factor, true);
            }
        }
        let workload = Workload { access: Access::RandRw { read_percent: 67 }, ..Workload::default() };
        let mut summary = Summary::new("a \"disk\"", "nbd", &workload, &tally, Duration::from_secs(factor));
        summary.cpu_seconds = Some(0.5);
        // Not every fraction survives a reader of JSON to the last digit.
        summary.kinds.iter_mut().for_each(|kind| kind.latency_ns.mean = kind.latency_ns.mean.round());
        summary
    }

    #[test]
    fn results_are_read_back() {
        let one = summary(1);
        let text = serde_json::to_string_pretty(&one).unwrap();
        assert_eq!(Report::read(&text).unwrap().jobs, vec![one.clone()]);
        let both = Report::new(vec![one.clone(), summary(2)]);
        assert_eq!(Report::read(&serde_json::to_string(&both).unwrap()).unwrap(), both);
        let lines = format!("{{\"type\":\"interval\"}}\n{}\n", serde_json::to_string(&one).unwrap());
        assert_eq!(Report::read(&lines).unwrap().jobs, vec![one.clone()]);
        // As an earlier Weir wrote it: a version, and times in two parts.
        let mut former = serde_json::to_value(&one).unwrap();
        let fields = former.as_object_mut().unwrap();
        fields.remove("schema");
        fields.insert("version".into(), 1.into());
        let workload = fields["workload"].as_object_mut().unwrap();
        for (now, before) in [("runtime_seconds", "runtime"), ("warmup_seconds", "warmup")] {
            let seconds = workload.remove(now).unwrap().as_f64().unwrap();
            workload.insert(before.into(), serde_json::json!({"secs": seconds as u64, "nanos": 0}));
        }
        assert_eq!(Report::read(&former.to_string()).unwrap().jobs, vec![one.clone()]);
        for (text, hint) in [
            ("", "not a result"),
            ("{}", "no schema"),
            ("{\"version\":9}", "version 9"),
            ("{\"schema\":\"weir.load/9\"}", "its schema is weir.load/9"),
            ("{\"schema\":\"weir.load-interval/1\"}", "its schema is weir.load-interval/1"),
            ("{\"schema\":\"weir.loads/1\",\"jobs\":[{}]}", "missing field"),
            ("{\"version\":1,\"jobs\":[{}]}", "missing field"),
        ] {
            let error = Report::read(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }
}
