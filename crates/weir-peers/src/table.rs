//! Text tables, at most 100 columns wide.

use comfy_table::{CellAlignment, ColumnConstraint, Table, Width, presets};

use crate::bound::Bound;
use crate::comparison::Comparison;
use crate::layers::{LayerTime, LayerTimes};
use crate::profile::{Group, Profile};
use crate::row::{Cell, Metric, Row, STEADY};

/// Legend of the columns of [`of_cells`], above the tables.
pub const LEGEND: &str = "\
`*`: the driver that serves this one best; ratios are best against best, above 1 Weir is better.
IOPS: median of n rounds; range: lowest to highest, `!` where they differ by more than 1.5.
srv, drv: processors in use by the server and by the driver. steal: processor time that the
hypervisor gave to others. n: rounds; those behind `+` were added because the others differed.
target: the ratio that is aimed at; at most: the upper bound of a figure; `!` where missed.
A figure that one row adds to another is a difference of medians: noise can make it negative.";

/// Every cell with its rows, its neighbours' figures, its comparisons and its bounds.
pub fn of_cells(cells: &[Cell], comparisons: &[Comparison], bounds: &[Bound]) -> String {
    let mut text = String::new();
    for cell in cells {
        let has_neighbour = cell.rows.iter().any(|row| row.main_metric() == Metric::Neighbour);
        let rows = if has_neighbour { neighbours(cell) } else { rows(cell) };
        text += &format!("{}\n{}\n", cell.name, trimmed(&rows));
        let of_cell: Vec<&Comparison> = comparisons.iter().filter(|one| one.cell == cell.name).collect();
        if !of_cell.is_empty() {
            text += &format!("{}\n", trimmed(&ratios(&of_cell)));
        }
        for Bound { name, value_us, limit_us, target_met, .. } in
            bounds.iter().filter(|one| one.cell == cell.name)
        {
            let missed = if *target_met { "" } else { "!" };
            text += &format!(" {name}: {value_us:.2} us, at most {limit_us:.2}{missed}\n");
        }
        text.push('\n');
    }
    text
}

fn rows(cell: &Cell) -> Table {
    let head = ["server", "driver", "IOPS", "range", "p50 us", "p99 us", "srv", "drv", "steal", "n"];
    let mut table = new_table(head, &[26, 8, 9, 14, 9, 10, 6, 6, 7, 5], 2);
    for row in &cell.rows {
        let of = |figure: &dyn Fn(&crate::row::Sample) -> f64, digits| {
            number(crate::row::median(row.samples.iter().map(figure).collect()), digits)
        };
        table.add_row([
            row.subject.clone(),
            format!("{}{}", row.driver, if row.best && row.driver != "-" { " *" } else { "" }),
            of(&|sample| sample.figures.iops, 0),
            range(row),
            of(&|sample| sample.figures.p50 / 1e3, 1),
            of(&|sample| sample.figures.p99 / 1e3, 1),
            of(&|sample| sample.server_cpu, 2),
            of(&|sample| sample.figures.cpu / sample.figures.seconds, 2),
            percent(row.steal()),
            rounds(row),
        ]);
    }
    table
}

fn neighbours(cell: &Cell) -> Table {
    let head = ["neighbour", "steps/s", "range", "IOPS", "p50 us", "srv", "steal", "n"];
    let mut table = new_table(head, &[30, 11, 14, 10, 10, 7, 8, 6], 1);
    for row in &cell.rows {
        let figure = |metric| row.median(metric);
        table.add_row([
            row.subject.clone(),
            short(figure(Metric::Neighbour)),
            range(row),
            number(figure(Metric::Iops), 0),
            number(figure(Metric::P50), 1),
            number(crate::row::median(row.samples.iter().map(|sample| sample.server_cpu).collect()), 2),
            percent(row.steal()),
            rounds(row),
        ]);
    }
    table
}

fn ratios(comparisons: &[&Comparison]) -> Table {
    let head = ["ratio of", "to", "in", "", "", "ratio", "target"];
    let mut table = new_table(head, &[24, 32, 11, 9, 9, 8, 7], 3);
    let driven =
        |subject: &str, driver| if driver == "-" { subject.into() } else { format!("{subject} ({driver})") };
    for one in comparisons {
        let digits = usize::from(one.value < 1000.0);
        let value = |value: f64| if value >= 1e7 { short(Some(value)) } else { number(Some(value), digits) };
        table.add_row([
            // The suite measures all configurations of Weir under one driver.
            if one.subject == "weir" { driven(&one.subject, one.driver) } else { one.subject.clone() },
            driven(&one.peer, one.peer_driver),
            short_name(one.metric).into(),
            value(one.value),
            value(one.peer_value),
            number(Some(one.ratio), 2),
            match (one.target_ratio, one.target_met) {
                (Some(target), Some(false)) => format!("{target:.2}!"),
                (Some(target), _) => format!("{target:.2}"),
                _ => String::new(),
            },
        ]);
    }
    table
}

fn short_name(metric: Metric) -> &'static str {
    match metric {
        Metric::Iops => "IOPS",
        Metric::PerServerCpu => "IOPS/srv",
        Metric::PerDriverCpu => "IOPS/drv",
        Metric::P50 => "p50 us",
        Metric::Neighbour => "steps/s",
    }
}

/// The tables of where requests' time goes: one for each load, with a line for each layer of each subject.
pub fn of_layers(all: &[LayerTimes]) -> String {
    let mut text = String::new();
    for of_cell in all.chunk_by(|one, next| one.cell == next.cell) {
        let head = ["server", "layer", "mean us", "own us", "share", "requests"];
        let mut table = new_table(head, &[26, 16, 11, 10, 9, 11], 2);
        for LayerTimes { subject, layers, .. } in of_cell {
            for (index, LayerTime { layer, mean_us, own_us, share, requests }) in layers.iter().enumerate() {
                let subject = if index == 0 { subject.as_str() } else { "" };
                table.add_row([
                    subject.to_owned(),
                    layer.clone(),
                    format!("{mean_us:.1}"),
                    number(*own_us, 1),
                    share.map_or_else(|| "-".to_owned(), percent),
                    requests.to_string(),
                ]);
            }
        }
        text += &format!("{}: where a request's time goes (weir explain)\n", of_cell[0].cell);
        text += &format!("{}\n\n", trimmed(&table));
    }
    text
}

/// The table of servers' processor time.
pub fn of_profiles(profiles: &[Profile]) -> String {
    let mut text = String::new();
    for profile in profiles {
        let Profile { cell, subject, iops, server_us, driver_us, source, .. } = profile;
        text += &format!("{cell}: {subject}\n");
        text += &format!(" {iops:.0} IOPS; processor time of a request: {server_us:.2} us in the server, ");
        text += &format!("{driver_us:.2} us in the driver\n by {source}\n");
        let mut table = new_table(["in the server", "us per request", "share"], &[50, 16, 8], 1);
        for Group { name, fraction } in &profile.groups {
            table.add_row([name.clone(), format!("{:.2}", fraction * server_us), percent(*fraction)]);
        }
        text += &format!("{}\n\n", trimmed(&table));
    }
    text
}

fn new_table<const N: usize>(head: [&str; N], widths: &[u16; N], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(head);
    for (index, (column, width)) in table.column_iter_mut().zip(widths).enumerate() {
        column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(*width)));
        if index >= texts {
            column.set_padding((0, 1)).set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn trimmed(table: &Table) -> String {
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
}

/// `254k`, `1.20M`: three digits and a unit.
fn short(value: Option<f64>) -> String {
    let Some(value) = value else { return "-".into() };
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (scaled, unit) =
        units.iter().find(|(unit, _)| value >= *unit).map_or((value, ""), |(one, unit)| (value / one, unit));
    let digits = if scaled >= 100.0 { 0 } else { 1 + usize::from(scaled < 10.0) };
    format!("{scaled:.digits$}{unit}")
}

fn range(row: &Row) -> String {
    match row.range() {
        Some((lowest, highest)) if row.samples.len() > 1 => {
            let mark = if highest / lowest > STEADY { "!" } else { "" };
            format!("{}-{}{mark}", short(Some(lowest)), short(Some(highest)))
        }
        _ => String::new(),
    }
}

fn rounds(row: &Row) -> String {
    match row.extra_rounds {
        0 => row.samples.len().to_string(),
        extra => format!("{}+{extra}", row.samples.len() - extra),
    }
}

fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::row_of;

    fn cell() -> Cell {
        let mut unsteady = row_of("qemu quorum + nbdkit tcp", "fio", &[(30_800.0, 9e6), (99_000.0, 2e5)]);
        unsteady.extra_rounds = 1;
        let rows = vec![
            row_of("weir", "weir", &[(1_234_567.0, 112_400.0)]),
            row_of("qemu quorum + nbdkit tcp", "weir", &[(16_700.0, 2e6)]),
            unsteady,
            row_of("fio io_uring, batched", "-", &[(2.0, 1e9)]),
        ];
        let mut cell = Cell { name: "write-back+1 nbd randwrite 4k qd32".into(), rows };
        cell.mark_best(Metric::Iops);
        cell
    }

    #[test]
    fn both_drivers_are_shown_and_the_best_is_marked() {
        let cell = cell();
        let ours = cell.best("weir", Metric::Iops).unwrap();
        let theirs = cell.best("qemu quorum + nbdkit tcp", Metric::Iops).unwrap();
        let compared = Comparison::of(&cell.name, Metric::Iops, ours, theirs).unwrap().aiming_at(30.0);
        let text = of_cells(std::slice::from_ref(&cell), &[compared], &[]);
        let line = |what: &str| {
            let words: Vec<String> =
                text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
            words
                .into_iter()
                .find(|line| line.contains(what))
                .unwrap_or_else(|| panic!("{what} is not in\n{text}"))
        };
        assert!(line("weir * ").contains("weir weir * 1234567"), "{text}");
        assert!(line("tcp weir").contains("tcp weir 16700"), "{text}");
        assert!(line("tcp fio *").contains("64900 30.8k-99.0k!"), "{text}");
        assert!(line("tcp fio *").ends_with("25 % 1+1"), "{text}");
        assert!(line("weir (weir)").ends_with("tcp (fio) IOPS 1234567 64900 19.02 30.00!"), "{text}");
        assert!(!line("batched").contains('*'), "{text}");
    }

    #[test]
    fn nothing_is_wider_than_100_columns() {
        let mut neighbour = row_of("beside polling for 50 us", "-", &[(9999.0, 1e6), (1.0, 1.0)]);
        neighbour.samples.iter_mut().for_each(|sample| sample.neighbour = Some(1.5e9));
        let cells = [cell(), Cell { name: "neighbour".into(), rows: vec![neighbour] }];
        let theirs = row_of("qemu quorum + nbdkit tcp", "weir", &[(1.0, 1.0)]);
        let compared = Comparison::of(&cells[0].name, Metric::PerServerCpu, &cells[0].rows[0], &theirs);
        let profile = Profile {
            cell: "profile nbd unix randwrite 4k qd32".into(),
            subject: "weir".into(),
            iops: 123_456.0,
            server_us: 12.34,
            driver_us: 12.34,
            source: "perf, 4000 samples of cpu-clock".into(),
            groups: vec![Group { name: "write log and replication (weir-accel)".into(), fraction: 0.5 }],
        };
        let bound = Bound {
            name: "processor time that TLS adds to a frame received".into(),
            value_us: 123.456,
            limit_us: 10.0,
            target_met: false,
            cell: cells[0].name.clone(),
        };
        let layer = |layer: &str, own_us| LayerTime {
            layer: layer.into(),
            mean_us: 12_345.6,
            own_us,
            share: own_us.map(|own| own / 12_345.6),
            requests: 123_456_789,
        };
        let layers = vec![layer("export", Some(12_000.0)), layer("coordinator", None)];
        let subject = "file-redirected, local".to_owned();
        let layers = LayerTimes { cell: "volume nbd randread 4k qd1".into(), subject, layers };
        let text = of_cells(&cells, &[compared.unwrap()], &[bound])
            + LEGEND
            + "\n"
            + &of_layers(&[layers])
            + &of_profiles(&[profile]);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains("12345.6   12000.0     97 %"), "{text}");
        assert!(text.contains("1.50G") && text.contains("received: 123.46 us, at most 10.00!"), "{text}");
    }

    #[test]
    fn figures_with_three_digits() {
        let shown =
            [(0.5, "0.50"), (12.0, "12.0"), (999.0, "999"), (38_000.0, "38.0k"), (1_500_000.0, "1.50M")];
        shown.iter().for_each(|&(value, text)| assert_eq!(short(Some(value)), text));
    }
}
