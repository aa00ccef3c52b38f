//! Comma-separated values (RFC 4180): one row for each job and kind of request.

use crate::summary::{LatencyFrom, Summary};

/// Grows when a column goes or changes its meaning.
const VERSION: u32 = 1;

/// The columns, in the order of [`to_csv`]. New ones are appended.
const HEADER: &str = "version,job,target,engine,workload,kind,runtime_seconds,ios,bytes,errors,iops,mib_per_second,\
latency_from,mean_ns,min_ns,p50_ns,p90_ns,p99_ns,p99_9_ns,p99_999_ns,max_ns,issue_p50_ns,issue_p99_ns,issue_max_ns,\
never_made,cpu_seconds,incomplete";

/// The jobs as a table with a header. Cells that were not measured are empty.
#[must_use]
pub fn to_csv(jobs: &[Summary]) -> String {
    let mut text = format!("{HEADER}\n");
    for job in jobs {
        for kind in &job.kinds {
            let (latency, issue) = (&kind.latency_ns, kind.issue_latency_ns);
            let issue = |of: fn(&crate::summary::Latency) -> u64| {
                issue.map_or(String::new(), |latency| of(&latency).to_string())
            };
            let cells = [
                VERSION.to_string(),
                quoted(job.name.as_deref().unwrap_or_default()),
                quoted(&job.target),
                quoted(&job.engine),
                quoted(&job.workload.to_string()),
                kind.kind.name().into(),
                job.runtime_seconds.to_string(),
                kind.ios.to_string(),
                kind.bytes.to_string(),
                kind.errors.to_string(),
                kind.iops.to_string(),
                kind.mib_per_second.to_string(),
                match job.latency_from {
                    LatencyFrom::Issue => "issue".into(),
                    LatencyFrom::IntendedStart => "intended_start".into(),
                },
                latency.mean.to_string(),
                latency.min.to_string(),
                latency.p50.to_string(),
                latency.p90.to_string(),
                latency.p99.to_string(),
                latency.p99_9.to_string(),
                latency.p99_999.to_string(),
                latency.max.to_string(),
                issue(|latency| latency.p50),
                issue(|latency| latency.p99),
                issue(|latency| latency.max),
                job.never_made.to_string(),
                job.cpu_seconds.map_or(String::new(), |seconds| seconds.to_string()),
                quoted(job.incomplete.as_deref().unwrap_or_default()),
            ];
            text.push_str(&cells.join(","));
            text.push('\n');
        }
    }
    text
}

fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::summary;

    #[test]
    fn every_row_has_every_column() {
        let text = to_csv(&[summary(1), summary(2)]);
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows.len(), 5);
        // No quoted cell of these has a comma in it.
        assert!(rows.iter().all(|row| row.split(',').count() == HEADER.split(',').count()), "{text}");
        assert!(
            rows[1].starts_with("1,,\"a \"\"disk\"\"\",nbd,randrw:67 4KiB depth 32,read,1,1000,"),
            "{text}"
        );
    }
}
