//! `weir bench compare`

use std::path::Path;

use serde::Serialize;
use weir_load::report::Report;
use weir_load::report::compare::{Change, Comparison, Row, compare};
use weir_report::format;

use crate::cli::CompareArgs;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{print_as, table};

/// Two results of one job.
#[derive(Serialize)]
struct Named {
    /// The job's name, if it has one.
    job: Option<String>,
    #[serde(flatten)]
    comparison: Comparison,
}

/// All of them.
#[derive(Serialize)]
struct Compared {
    jobs: Vec<Named>,
}

/// Compares two results.
pub fn run(global: &Global, files: &CompareArgs) -> Result<(), Failure> {
    let (a, b) = (read(&files.a)?, read(&files.b)?);
    let (first, second) = (a.jobs.len(), b.jobs.len());
    if first != second {
        return Err(Failure::usage(format!(
            "{} has {first} job(s) and {} has {second}: compare results of the same jobs",
            files.a.display(),
            files.b.display()
        )));
    }
    let jobs = a
        .jobs
        .iter()
        .zip(&b.jobs)
        .map(|(a, b)| Named { job: a.name.clone(), comparison: compare(a, b) })
        .collect();
    print_as(global.output, "weir.load-comparison/1", &Compared { jobs }, |all| {
        all.jobs.iter().map(text).collect::<Vec<_>>().join("\n\n")
    })
}

fn read(path: &Path) -> Result<Report, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::unreadable(path, &error))?;
    Report::read(&text).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}

fn text(named: &Named) -> String {
    let rows = named.comparison.rows.iter().map(|row| {
        vec![
            row.kind.name().to_owned(),
            match row.figure {
                "mib_per_second" => "MiB/s".to_owned(),
                figure => figure.trim_end_matches("_ns").replace('_', "."),
            },
            figure(row, row.a),
            figure(row, row.b),
            row.percent.map_or(String::new(), |percent| format!("{percent:+.1} %")),
            match row.change {
                Change::Same => "same",
                Change::Better => "better",
                Change::Worse => "WORSE",
                Change::Unknown => "too few requests",
            }
            .to_owned(),
        ]
    });
    let mut text = table(&["KIND", "FIGURE", "A", "B", "CHANGE", ""], &[2, 3, 4], rows);
    if let Some(job) = &named.job {
        text = format!("{job}:\n{text}");
    }
    for difference in &named.comparison.differences {
        text.push_str(&format!("\nnot alike: {difference}"));
    }
    text
}

fn figure(row: &Row, value: f64) -> String {
    match row.figure {
        "iops" => format!("{value:.0}"),
        "mib_per_second" => format!("{value:.1}"),
        _ => format::duration(value),
    }
}
