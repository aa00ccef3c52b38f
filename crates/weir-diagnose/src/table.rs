//! The findings for a terminal: the verdict in one sentence, a block for each shape with a line for each layer, the evidence.

use std::fmt::Write;

use crate::cell::{Cell, Shape};
use crate::comparison::{Difference, Point, Quantity};
use crate::finding::Findings;
use weir_report::format;
use weir_report::text::{self, Columns};

use crate::result::{Diagnosis, Position};
use crate::stats::PRACTICAL_MARGIN;
use crate::verdict;

/// Columns of the text where there is no terminal that says otherwise.
pub const WIDTH: usize = text::WIDEST;

/// A narrower terminal wraps lines itself: numbers are never cut.
const NARROWEST: usize = 60;

/// Depths beside each other at most.
const SIDE_BY_SIDE: usize = 2;

/// The verdict and the table, as plain text that ends with a newline, [`WIDTH`] columns wide.
#[must_use]
pub fn render(diagnosis: &Diagnosis, findings: &Findings) -> String {
    render_within(diagnosis, findings, WIDTH)
}

/// The same for so many columns; more than [`WIDTH`] are not used.
#[must_use]
pub fn render_within(diagnosis: &Diagnosis, findings: &Findings, width: usize) -> String {
    let width = width.clamp(NARROWEST, WIDTH);
    let mut text = text::wrap("", &findings.verdict.headline, width) + "\n\n";
    for shape in shapes(diagnosis) {
        let _ = writeln!(text, "{shape}");
        let cells: Vec<&Cell> = diagnosis.cells.iter().filter(|cell| cell.shape == shape).collect();
        for cells in cells.chunks(SIDE_BY_SIDE) {
            let together = block(diagnosis, findings, cells);
            let blocks = if together.fits(width) {
                vec![together]
            } else {
                cells.iter().map(|cell| block(diagnosis, findings, &[*cell])).collect()
            };
            for block in blocks {
                let _ = writeln!(text, "{}\n", block.render(width));
            }
        }
    }
    text.push_str(&closing(diagnosis, findings, width));
    text
}

/// The shapes of a measurement in the order of its cells, each once.
pub(crate) fn shapes(diagnosis: &Diagnosis) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for cell in &diagnosis.cells {
        if !shapes.contains(&cell.shape) {
            shapes.push(cell.shape);
        }
    }
    shapes
}

/// A layer's name beside others: alternatives are set off.
fn label(diagnosis: &Diagnosis, layer: usize) -> String {
    let entry = &diagnosis.layers[layer];
    match entry.position {
        Position::OnPath | Position::Reference => entry.name.clone(),
        Position::AlternativeTo(_) => format!("  or {}", entry.name),
    }
}

fn block(diagnosis: &Diagnosis, findings: &Findings, cells: &[&Cell]) -> Columns {
    let mut header = vec!["layer".to_owned()];
    for cell in cells {
        header.extend(headings(findings, cell));
    }
    // Of each depth, the third number and the spread can be missed.
    let spared: Vec<usize> = (0..cells.len()).flat_map(|cell| [4 * cell + 3, 4 * cell + 2]).collect();
    let mut table = Columns::new(header).sparing(&spared);
    for layer in diagnosis.layers_compared() {
        let mut line = vec![label(diagnosis, layer)];
        for cell in cells {
            line.extend(numbers(diagnosis, findings, layer, cell));
        }
        table.push(line);
    }
    table
}

/// At depth 1 latency comes first, above it IOPS: the quantity by which the cell is judged.
fn headings(findings: &Findings, cell: &Cell) -> [String; 4] {
    let depth = if cell.threads > 1 {
        format!("QD {}/{} threads", cell.queue_depth, cell.threads)
    } else {
        format!("QD {}", cell.queue_depth)
    };
    match findings.compared.quantity(cell) {
        Quantity::Latency => [format!("{depth} p50"), "±".into(), "p99".into(), "step".into()],
        Quantity::Iops => [format!("{depth} IOPS"), "±".into(), "MiB/s".into(), "step".into()],
    }
}

fn numbers(diagnosis: &Diagnosis, findings: &Findings, layer: usize, cell: &Cell) -> [String; 4] {
    let Some(point) = findings.compared.point(layer, cell) else {
        let rejected = findings.compared.is_rejected(diagnosis, layer, cell);
        let first = if rejected { "rejected" } else { "–" };
        return [first.to_owned(), String::new(), String::new(), String::new()];
    };
    let step = findings.compared.difference_to(layer, cell).map(step).unwrap_or_default();
    let spread = |relative: f64| if point.repeats > 1 { format::percent(relative) } else { "–".to_owned() };
    let Point { p50_ns, p99_ns, iops, mib_per_s, .. } = point;
    match (findings.compared.quantity(cell), p50_ns) {
        (Quantity::Latency, Some(p50)) => [
            format::duration(p50.median),
            spread(p50.relative()),
            p99_ns.map_or("–".to_owned(), |p99| format::duration(p99.median)),
            step,
        ],
        _ => {
            [format::count(iops.median), spread(iops.relative()), format::throughput(mib_per_s.median), step]
        }
    }
}

/// The judgement of a step, with the interval of its factor.
fn step(difference: &Difference) -> String {
    let short = verdict::in_short(difference);
    verdict::interval(difference).map_or(short.clone(), |ends| format!("{short} {ends}"))
}

fn closing(diagnosis: &Diagnosis, findings: &Findings, width: usize) -> String {
    let mut text = String::new();
    let mut say = |first: &str, sentence: &str| {
        let _ = writeln!(text, "{}", text::wrap(first, sentence, width));
    };
    let verdict = &findings.verdict;
    for sentence in verdict.evidence.iter().chain(&verdict.cautions) {
        say("  ", sentence);
    }
    for guess in &verdict.hypotheses {
        say("  ", &guess.title());
        for sentence in guess.grounds.iter().chain([&guess.prediction]) {
            say("    ", sentence);
        }
        if let Some(outcome) = guess.outcome() {
            say("    ", &outcome);
        }
    }
    for (index, sentence) in verdict.to_improve.iter().enumerate() {
        say(if index == 0 { "  To improve confidence: " } else { "                         " }, sentence);
    }
    for line in unused_lines(diagnosis, findings) {
        say("  Not used: ", &line);
    }
    let how_to_read = format!(
        "Medians of the repeats (planned: {}); ± is the greatest distance of a repeat from the median. A step is the change \
         from the layer below (latency at QD 1, IOPS above), with the factor's 95 % interval. \"same\" is shown to be within \
         {}, \"slower\" and \"faster\" to be beyond it; \"?\" is neither. \"or\" marks an alternative; its step is the change \
         from the layer that it replaces.",
        diagnosis.repeats,
        format::percent(PRACTICAL_MARGIN),
    );
    say("", "");
    say("", &how_to_read);
    text
}

/// The rows that no finding rests on; repeats that fell for the same reason share a line.
pub(crate) fn unused_lines(diagnosis: &Diagnosis, findings: &Findings) -> Vec<String> {
    let mut groups: Vec<(&str, Cell, &str, Vec<String>)> = Vec::new();
    for unused in &findings.compared.unused {
        let Some(row) = diagnosis.rows.get(unused.row) else { continue };
        let same = |group: &&mut (&str, Cell, &str, Vec<String>)| {
            (group.0, group.1, group.2) == (row.layer.as_str(), row.cell, unused.reason.as_str())
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.3.push(row.repeat.to_string()),
            None => groups.push((&row.layer, row.cell, &unused.reason, vec![row.repeat.to_string()])),
        }
    }
    let line = |(layer, cell, reason, repeats): (&str, Cell, &str, Vec<String>)| {
        let word = if repeats.len() == 1 { "repeat" } else { "repeats" };
        format!("{layer}, {cell}, {word} {}: {reason}", repeats.join(", "))
    };
    groups.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::result::RunOutcome;
    use crate::sample;

    /// The whole text, with everything that a table can hold: a cost, a gain, an alternative, a cell that
    /// was not measured, a row that breaks Little's law, and repeats that could not be run.
    #[test]
    fn the_table_is_the_golden_one() {
        let mut diagnosis = sample::write_back();
        diagnosis.interrupted = true;
        diagnosis.rows.retain(|row| !(row.layer == "backing" && row.cell == diagnosis.cells[1]));
        for row in &mut diagnosis.rows {
            let deep_read = row.cell == diagnosis.cells[3];
            match &mut row.outcome {
                outcome if deep_read && row.layer == "accel write-back+2" => {
                    *outcome = RunOutcome::Skipped("only two nodes".into());
                }
                RunOutcome::Measured(row_of_export)
                    if deep_read && row.layer == "nbd export" && row.repeat == 2 =>
                {
                    row_of_export.mean_ns = row_of_export.mean_ns.map(|ns| ns / 2.0);
                }
                _ => {}
            }
        }
        let text = render(&diagnosis, &find(&diagnosis));
        assert!(text == include_str!("../tests/golden/table.txt"), "the table changed:\n{text}");
        assert!(text.lines().all(|line| line.trim_end() == line), "no trailing blanks");
        assert!(
            text.starts_with("Likely: nbd export adds 54.0 µs to accel write-back+1 at QD 1 ("),
            "{text}"
        );
        for width in [WIDTH, 80] {
            let text = render_within(&diagnosis, &find(&diagnosis), width);
            let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= width, "{longest} columns of {width}:\n{text}");
            assert!(text.contains("+54.0 µs slower [2.37, 2.48]"), "numbers are not cut: {text}");
        }
    }
}
