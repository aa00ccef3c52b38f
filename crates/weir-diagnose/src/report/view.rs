//! The I/O path, the tables of numbers and the environment, as the page shows them.

use weir_report::format;
use weir_report::page::{self, Group, Row, Stop, Table};

use super::charts;
use crate::cell::{Cell, Shape};
use crate::comparison::{Difference, Point, Quantity, SUSPICIOUS_FACTOR, Spread};
use crate::environment::Environment;
use crate::finding::Findings;
use crate::result::{Diagnosis, LayerEntry, Position};
use crate::stats::{CONFIDENCE, FALSE_DISCOVERIES, PRACTICAL_MARGIN};
use crate::verdict::FEWEST_REPEATS;
use crate::{check, table, verdict};

/// The I/O path, from the bottom.
pub fn chain(diagnosis: &Diagnosis) -> Vec<Stop> {
    let instead_of = |name: &str| {
        let others = diagnosis.layers.iter().filter(|other| stands_for(other, name));
        others.map(|other| other.name.clone()).collect()
    };
    diagnosis
        .chain()
        .map(|(_, layer)| Stop { name: layer.name.clone(), alternatives: instead_of(&layer.name) })
        .collect()
}

fn stands_for(layer: &LayerEntry, name: &str) -> bool {
    matches!(&layer.position, Position::AlternativeTo(other) if other == name)
}

/// Queue depths side by side at most: more do not fit on paper.
const DEPTHS_ABREAST: usize = 2;

/// The tables, one or several for each shape.
pub fn numbers(diagnosis: &Diagnosis, findings: &Findings) -> Vec<(String, Table)> {
    let mut tables = Vec::new();
    for shape in table::shapes(diagnosis) {
        let cells: Vec<&Cell> = diagnosis.cells.iter().filter(|cell| cell.shape == shape).collect();
        tables.extend(cells.chunks(DEPTHS_ABREAST).map(|cells| of_cells(diagnosis, findings, shape, cells)));
    }
    tables
}

fn of_cells(diagnosis: &Diagnosis, findings: &Findings, shape: Shape, cells: &[&Cell]) -> (String, Table) {
    let depth = |cell: &&Cell| Group {
        name: depth_title(cell),
        note: String::new(),
        columns: columns(findings, cell).iter().map(|&column| column.to_owned()).collect(),
    };
    let row = |(index, layer): (usize, &LayerEntry)| {
        let alternative = layer.position != Position::OnPath;
        Row {
            class: if alternative { "other" } else { "" },
            name: if alternative { format!("or {}", layer.name) } else { layer.name.clone() },
            cells: cells.iter().flat_map(|cell| row_of(diagnosis, findings, index, cell)).collect(),
            ..Row::default()
        }
    };
    let table = Table {
        class: "",
        first: "layer".to_owned(),
        groups: cells.iter().map(depth).collect(),
        rows: diagnosis.layers_compared().map(|layer| row((layer, &diagnosis.layers[layer]))).collect(),
    };
    (shape.to_string(), table)
}

/// A load without its shape.
pub fn depth_title(cell: &Cell) -> String {
    match cell.threads {
        1 => format!("QD {}", cell.queue_depth),
        threads => format!("QD {}, {threads} threads", cell.queue_depth),
    }
}

fn columns(findings: &Findings, cell: &Cell) -> &'static [&'static str] {
    match findings.compared.quantity(cell) {
        Quantity::Latency => &["p50", "p99", "p99.9", "IOPS", "step"],
        Quantity::Iops => &["IOPS", "MiB/s", "p50", "p99", "CPU/IO", "step"],
    }
}

fn row_of(diagnosis: &Diagnosis, findings: &Findings, layer: usize, cell: &Cell) -> Vec<page::Cell> {
    let missing = |text: &str| page::Cell { class: "missing".to_owned(), ..page::Cell::text(text) };
    let compared = &findings.compared;
    let mut numbers = match compared.point(layer, cell) {
        Some(point) => numbers_of(point, compared.quantity(cell), compared.difference_to(layer, cell)),
        None => columns(findings, cell).iter().map(|_| missing("–")).collect(),
    };
    if compared.is_rejected(diagnosis, layer, cell) {
        numbers[0] = missing("rejected");
    }
    numbers[0].begins = true;
    numbers
}

fn numbers_of(point: &Point, quantity: Quantity, difference: Option<&Difference>) -> Vec<page::Cell> {
    let step = difference.map(step).unwrap_or_default();
    let text =
        |spread: Option<Spread>| spread.map_or("–".to_owned(), |spread| format::duration(spread.median));
    let known = |spread| page::Cell::text(text(spread));
    let iops = format::count(point.iops.median);
    match quantity {
        Quantity::Latency => vec![
            judged(text(point.p50_ns), point, point.p50_ns.map_or(0.0, |p50| p50.relative())),
            known(point.p99_ns),
            known(point.p99_9_ns),
            page::Cell::text(iops),
            step,
        ],
        Quantity::Iops => vec![
            judged(iops, point, point.iops.relative()),
            page::Cell::text(format::throughput(point.mib_per_s.median)),
            known(point.p50_ns),
            known(point.p99_ns),
            known(point.cpu_ns_per_io),
            step,
        ],
    }
}

/// The number that the cell is judged by, with its spread.
fn judged(text: String, point: &Point, spread: f64) -> page::Cell {
    let remark =
        if point.repeats > 1 { format!("±{}", format::percent(spread)) } else { "1 repeat".to_owned() };
    page::Cell { remark, class: "judged".to_owned(), ..page::Cell::text(text) }
}

fn step(difference: &Difference) -> page::Cell {
    let class = match charts::class_of(difference) {
        "cost" => "cost-text",
        "gain" => "gain-text",
        _ => "flat-text",
    };
    let remark = verdict::interval(difference).map_or_else(String::new, |ends| format!("×{ends}"));
    page::Cell { remark, class: class.to_owned(), ..page::Cell::text(verdict::in_short(difference)) }
}

/// The environment, as pairs of a word and its value.
pub fn facts(diagnosis: &Diagnosis) -> Vec<(&'static str, String)> {
    let environment = &diagnosis.environment;
    if !environment.imported_from.is_empty() {
        return vec![
            ("Imported from", environment.imported_from.join(", ")),
            ("Read", environment.started()),
            ("Rows", diagnosis.rows.len().to_string()),
        ];
    }
    let mut facts = vec![
        ("Disk", environment.disk.clone()),
        ("Node", environment.node.clone()),
        ("Begun", environment.started()),
        ("Runs", runs(diagnosis)),
        ("Order", format!("cells and layers interleaved at random, seed {}", diagnosis.seed)),
    ];
    facts.extend(machine(environment));
    facts
}

/// The machine and the programs.
pub fn machine(environment: &Environment) -> Vec<(&'static str, String)> {
    let mut facts = vec![
        ("Kernel", environment.kernel.clone()),
        ("Processor", format!("{}, {} usable", environment.cpu, cores(environment.cores))),
        ("Memory", format::gibibytes(environment.memory_bytes)),
        ("Load average at the start", format!("{:.2}", environment.load_average)),
    ];
    if let Some(governor) = &environment.governor {
        facts.push(("Frequency governor", governor.clone()));
    }
    let versions: Vec<String> =
        environment.versions.iter().map(|(program, version)| format!("{program} {version}")).collect();
    if !versions.is_empty() {
        facts.push(("Versions", versions.join(", ")));
    }
    facts
}

fn cores(number: usize) -> String {
    format!("{number} logical processor{}", if number == 1 { "" } else { "s" })
}

fn runs(diagnosis: &Diagnosis) -> String {
    let (layers, cells, repeats) =
        (diagnosis.layers_compared().count(), diagnosis.cells.len(), diagnosis.repeats);
    let seconds: f64 = diagnosis
        .rows
        .iter()
        .filter_map(|row| match &row.outcome {
            crate::RunOutcome::Measured(measurement) => measurement.runtime_seconds,
            _ => None,
        })
        .sum();
    format!(
        "{} of {} ({layers} layers × {cells} cells × {repeats} repeats, and more where needed), {} of load measured",
        diagnosis.rows.len(),
        diagnosis.planned_runs(),
        format::duration(seconds * 1e9)
    )
}

/// Conclusions that a reader might draw from the report and should not.
pub fn limits(diagnosis: &Diagnosis) -> Vec<String> {
    let mut limits = vec![
        "The report names the step that loses time; its cause is a hypothesis until a run confirms it. A layer may be slow \
         because of its own work, of what it waits for, or of other work on the machine."
            .to_owned(),
        "A step compares two runs, each with its own requests; it does not follow single requests through the \
         layers. Medians of layers do not add up for every request."
            .to_owned(),
        format!(
            "Differences are judged on the logarithms of the repeats (Welch's test), all comparisons together: at most \
             about {} of the steps that are called slower or faster, and of those called the same, are called so by \
             chance (Benjamini and Hochberg). “Same” is shown to be within {} (two one-sided tests), “slower” and \
             “faster” to be beyond it; what is neither is marked with a question mark. Brackets hold the factor's {} \
             interval, which is not widened for the number of comparisons. Where a step got more repeats, the scatter \
             of the planned ones decided how many.",
            format::percent(FALSE_DISCOVERIES),
            format::percent(PRACTICAL_MARGIN),
            format::percent(CONFIDENCE)
        ),
        format!(
            "“Confirmed” needs {FEWEST_REPEATS} repeats on each side and no contrary evidence; under “likely” something is \
             missing, and the report says what. Of single runs only a loss by a factor of {SUSPICIOUS_FACTOR} or more counts, \
             and the verdict stays “inconclusive”."
        ),
        format!(
            "Rows are not used when I/Os failed, when there were fewer than {} of them, when size × rate is not the \
             throughput, or when rate × latency is not the queue depth (more than {} above or {} below). The latter \
             often means that the load generator, not the layer, was the limit.",
            check::FEWEST_IOS,
            format::percent(check::MOST_ABOVE_DEPTH),
            format::percent(check::MOST_BELOW_DEPTH)
        ),
    ];
    if diagnosis.environment.imported_from.is_empty() {
        limits.extend(limits_of_our_load());
    }
    limits
}

fn limits_of_our_load() -> [String; 3] {
    [
        "The load is a closed loop: a request waits for an answer before the next one is sent. Under an open-loop \
         load, latency rises further once the queues are full.",
        "Reads at a caching layer depend on what its cache held. Writes that are acknowledged before they reach the \
         storage show the speed of the acknowledgement; how long it can be sustained is not measured here.",
        "CPU/IO is the processor time of the load generator's threads, not of the layers; a dash means that \
         these threads did other work too.",
    ]
    .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::sample;

    #[test]
    fn the_chain_has_its_alternatives_beside_it() {
        let diagnosis = sample::write_back();
        let chain = chain(&diagnosis);
        assert_eq!(
            chain.iter().map(|stop| stop.name.as_str()).collect::<Vec<_>>(),
            ["backing", "accel write-back+1", "nbd export"]
        );
        assert_eq!(
            chain[1].alternatives,
            ["accel write-through", "accel write-back+0", "accel write-back+2"]
        );
        assert!(chain[0].alternatives.is_empty());
    }

    #[test]
    fn tables_have_a_number_or_a_dash_in_every_place() {
        let mut diagnosis = sample::write_back();
        diagnosis.rows.retain(|row| row.layer != "nbd export" || row.cell.queue_depth == 1);
        let tables = numbers(&diagnosis, &find(&diagnosis));
        assert_eq!(tables.len(), 4);
        for (_, table) in &tables {
            assert!(table.rows.iter().all(|row| row.cells.len() == 11));
            let export = &table.rows[5];
            assert!(export.cells[5..].iter().all(|cell| cell.lines == ["–"]));
            assert_eq!(export.cells[0].remark, "±2 %");
        }
    }

    #[test]
    fn depths_that_do_not_fit_side_by_side_get_a_table_of_their_own() {
        let mut diagnosis = sample::write_back();
        let more: Vec<Cell> =
            [64, 128].iter().map(|depth| Cell { queue_depth: *depth, ..diagnosis.cells[0] }).collect();
        diagnosis.cells.extend(more);
        let tables = numbers(&diagnosis, &find(&diagnosis));
        assert_eq!(tables.len(), 5);
        assert!(tables.iter().all(|(_, table)| table.groups.len() == 2));
        assert_eq!(tables[0].0, tables[1].0);
        let titles: Vec<&str> = tables[..2]
            .iter()
            .flat_map(|(_, table)| &table.groups)
            .map(|depth| depth.name.as_str())
            .collect();
        assert_eq!(titles, ["QD 1", "QD 32", "QD 64", "QD 128"]);
    }

    #[test]
    fn what_was_imported_is_not_said_to_be_measured_here() {
        let mut diagnosis = sample::write_back();
        assert!(facts(&diagnosis).iter().any(|(word, _)| *word == "Kernel"));
        assert!(limits(&diagnosis).join(" ").contains("closed loop"));
        diagnosis.environment.imported_from = vec!["table.csv".into()];
        assert!(facts(&diagnosis).iter().all(|(word, _)| *word != "Kernel"));
        assert!(!limits(&diagnosis).join(" ").contains("closed loop"));
    }
}
