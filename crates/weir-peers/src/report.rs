//! The file of the results: one JSON object, with a schema and with units in its names.

use serde::Serialize;
use serde_json::{Value, json};

use crate::bound::Bound;
use crate::comparison::Comparison;
use crate::machine::Machine;
use crate::row::{Metric, Row};
use crate::suite::{Results, Settings};

/// Name and version of the file's schema. An incompatible change increments the version.
pub const SCHEMA: &str = "weir-peers/1";

/// All results.
pub fn json(machine: &Machine, settings: &Settings, results: &Results) -> Value {
    let cells = results.cells.iter();
    let rows = cells.flat_map(|cell| cell.rows.iter().map(|row| JsonRow::of(&cell.name, row)));
    json!({
        "schema": SCHEMA,
        "machine": machine,
        "rounds": settings.repeats,
        "runtime_seconds": settings.runtime.as_secs_f64(),
        "rows": rows.collect::<Vec<_>>(),
        "results": results.comparisons,
        "bounds": results.bounds,
        "layers": results.layers,
        "profiles": results.profiles,
        "missed_targets": missed(results),
        "failures": results.failures,
    })
}

/// Missed targets, one sentence each.
pub fn missed(results: &Results) -> Vec<String> {
    let ratios = results.comparisons.iter().filter_map(Comparison::miss);
    ratios.chain(results.bounds.iter().filter_map(Bound::miss)).collect()
}

/// The last line of the output.
pub fn last_line(results: &Results) -> String {
    let ratios = results.comparisons.iter().filter(|one| one.target_ratio.is_some()).count();
    let targets = ratios + results.bounds.len();
    match (missed(results), targets) {
        (_, 0) => "targets: none were measured".into(),
        (missed, all) if missed.is_empty() => format!("targets: all {all} met"),
        (missed, all) => format!("targets: {} of {all} missed: {}", missed.len(), missed.join("; ")),
    }
}

/// Medians of a row's rounds, with its range.
#[derive(Serialize)]
struct JsonRow<'a> {
    cell: &'a str,
    subject: &'a str,
    driver: &'a str,
    best_driver: bool,
    iops: Option<f64>,
    lowest_iops: Option<f64>,
    highest_iops: Option<f64>,
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    server_cpus: Option<f64>,
    driver_cpus: Option<f64>,
    neighbour_steps_per_second: Option<f64>,
    steal_fraction: f64,
    rounds: usize,
    extra_rounds: usize,
    steady: bool,
}

impl JsonRow<'_> {
    fn of<'a>(cell: &'a str, row: &'a Row) -> JsonRow<'a> {
        let of = |figure: &dyn Fn(&crate::row::Sample) -> f64| {
            crate::row::median(row.samples.iter().map(figure).filter(|value| value.is_finite()).collect())
        };
        let range = row.range().filter(|_| row.main_metric() == Metric::Iops);
        JsonRow {
            cell,
            subject: &row.subject,
            driver: row.driver,
            best_driver: row.best,
            iops: of(&|sample| sample.figures.iops),
            lowest_iops: range.map(|range| range.0),
            highest_iops: range.map(|range| range.1),
            p50_us: of(&|sample| sample.figures.p50 / 1e3),
            p99_us: of(&|sample| sample.figures.p99 / 1e3),
            server_cpus: of(&|sample| sample.server_cpu),
            driver_cpus: of(&|sample| sample.figures.cpu / sample.figures.seconds),
            neighbour_steps_per_second: row.median(Metric::Neighbour),
            steal_fraction: row.steal(),
            rounds: row.samples.len(),
            extra_rounds: row.extra_rounds,
            steady: !row.is_unsteady(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::row::{Cell, row_of};

    fn results(target: f64) -> Results {
        let rows = vec![row_of("weir", "weir", &[(200.0, 1e3)]), row_of("bare echo", "-", &[(500.0, 1e3)])];
        let compared = Comparison::of("nbd", Metric::Iops, &rows[0], &rows[1]).unwrap().aiming_at(target);
        let cells = vec![Cell { name: "nbd".into(), rows }];
        Results { cells, comparisons: vec![compared], ..Results::default() }
    }

    #[test]
    fn the_file_names_its_schema_and_its_units() {
        let settings = Settings {
            repeats: 3,
            runtime: Duration::from_millis(1500),
            warmup: Duration::ZERO,
            only: String::new(),
            short: false,
            media_size: 0,
            file_size: 0,
        };
        let json = json(&Machine::here(false), &settings, &results(0.5));
        assert_eq!(json["schema"], SCHEMA);
        assert_eq!(json["runtime_seconds"], 1.5);
        let expected = serde_json::json!({"cell": "nbd", "subject": "weir", "driver": "weir", "best_driver": false,
            "iops": 200.0, "lowest_iops": 200.0, "highest_iops": 200.0, "p50_us": 1.0, "p99_us": 2.0,
            "server_cpus": 0.5, "driver_cpus": 0.5, "neighbour_steps_per_second": null, "steal_fraction": 0.25,
            "rounds": 1, "extra_rounds": 0, "steady": true});
        assert_eq!(json["rows"][0], expected);
        assert_eq!(json["results"][0]["target_met"], false);
        assert_eq!(json["missed_targets"][0], "nbd iops beside bare echo: 0.40 of 0.50");
    }

    #[test]
    fn the_last_line_says_which_targets_were_missed() {
        assert_eq!(last_line(&results(0.4)), "targets: all 1 met");
        let line = last_line(&results(0.5));
        assert_eq!(line, "targets: 1 of 1 missed: nbd iops beside bare echo: 0.40 of 0.50");
        let (name, cell) = ("added".to_owned(), "tls".to_owned());
        let bounds = vec![Bound { name, value_us: 1.5, limit_us: 1.2, target_met: false, cell }];
        let line = last_line(&Results { bounds, ..results(0.4) });
        assert_eq!(line, "targets: 1 of 2 missed: tls, added: 1.50 us of 1.20");
        assert_eq!(last_line(&Results::default()), "targets: none were measured");
    }
}
