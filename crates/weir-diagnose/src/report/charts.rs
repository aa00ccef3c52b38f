//! Bars and dots of the layers in a cell, drawn by `weir-report`.
//!
//! - *Latency by layer*: median latency as a waterfall along the I/O path.
//! - *IOPS by layer*: at depth, layer by layer.
//! - *Tail latency*: median and 99th percentile of the latency.

use weir_report::bars::{self, Bar, Step};
use weir_report::panel::{Panel, tick_count, tick_duration};
use weir_report::{format, percentiles};

use crate::cell::{Cell, Shape};
use crate::comparison::{Difference, Judgement, Point, Quantity, Spread};
use crate::finding::Findings;
use crate::result::{Diagnosis, LayerEntry, Position};
use crate::verdict;

/// The panels of a bar chart of `quantity`.
#[must_use]
pub fn bars(diagnosis: &Diagnosis, findings: &Findings, cells: &[&Cell], quantity: Quantity) -> Vec<Panel> {
    cells.iter().filter_map(|cell| bar_panel(diagnosis, findings, cell, quantity)).collect()
}

fn bar_panel(diagnosis: &Diagnosis, findings: &Findings, cell: &Cell, quantity: Quantity) -> Option<Panel> {
    let collect = |on_path: bool| -> Vec<Bar> {
        let layers =
            diagnosis.layers.iter().enumerate().filter(|(_, layer)| layer.position != Position::Reference);
        let wanted = layers.filter(|(_, layer)| (layer.position == Position::OnPath) == on_path);
        wanted.filter_map(|(index, layer)| bar(findings, index, layer, cell, quantity)).collect()
    };
    let (what, tick): (&str, fn(f64) -> String) = match quantity {
        Quantity::Latency => ("Median latency by layer", tick_duration),
        Quantity::Iops => ("IOPS by layer", tick_count),
    };
    bars::panel(&bars::Chart {
        title: cell.to_string(),
        description: format!("{what}: {cell}"),
        chain: collect(true),
        beside: collect(false),
        beside_title: heading_of_alternatives(diagnosis),
        waterfall: quantity == Quantity::Latency,
        tick,
    })
}

fn bar(
    findings: &Findings,
    index: usize,
    layer: &LayerEntry,
    cell: &Cell,
    quantity: Quantity,
) -> Option<Bar> {
    let spread = |point: &Point| match quantity {
        Quantity::Latency => point.p50_ns,
        Quantity::Iops => Some(point.iops),
    };
    let point = findings.compared.point(index, cell)?;
    let difference = findings.compared.difference_to(index, cell);
    let before = difference.and_then(|step| Some(spread(findings.compared.point(step.from, cell)?)?.median));
    let shown = spread(point)?;
    Some(Bar {
        name: layer.name.clone(),
        value: shown.median,
        label: match quantity {
            Quantity::Latency => format::duration(shown.median),
            Quantity::Iops => format::count(shown.median),
        },
        // Latencies at depth are not judged: their range would only crowd the chart.
        range: (cell.queue_depth == 1 || quantity == Quantity::Iops).then_some([shown.least, shown.most]),
        step: difference.and_then(|difference| step(difference, quantity, shown.median, before)),
        tip: tip(&layer.name, point, difference),
    })
}

/// More or less than the layer that it is compared with, and the colour that this may have: only what the cell is judged
/// by can be shown to differ, and a latency at depth is drawn beside it.
fn step(difference: &Difference, quantity: Quantity, value: f64, before: Option<f64>) -> Option<Step> {
    if difference.quantity == quantity {
        return Some(Step {
            text: verdict::in_short(difference),
            interval: added(difference).unwrap_or_default(),
            class: class_of(difference),
        });
    }
    let change = value - before?;
    let class = match class_of(difference) {
        "cost" if change > 0.0 => "cost",
        "gain" if change < 0.0 => "gain",
        _ => "flat",
    };
    Some(Step { text: format::signed_duration(change), interval: String::new(), class })
}

/// Names the layer that the alternatives replace, when it is one.
fn heading_of_alternatives(diagnosis: &Diagnosis) -> String {
    let replaced = |layer: &LayerEntry| match &layer.position {
        Position::AlternativeTo(name) => Some(name.clone()),
        Position::OnPath | Position::Reference => None,
    };
    let mut names: Vec<String> = diagnosis.layers.iter().filter_map(replaced).collect();
    names.dedup();
    match names.as_slice() {
        [name] => format!("alternatives to {name}, compared with it"),
        _ => "alternatives to a layer above, compared with it".to_owned(),
    }
}

/// The interval of what a layer adds or saves, in the quantity's unit: that of the factor, applied to the layer below.
fn added(difference: &Difference) -> Option<String> {
    let interval = difference.interval?;
    Some(match difference.quantity {
        Quantity::Latency => {
            let below = difference.before.median;
            let [low, high] =
                [interval.low, interval.high].map(|factor| format::signed_duration(below * (factor - 1.0)));
            match (low.split_once(' '), high.split_once(' ')) {
                // One unit is enough for both.
                (Some((low, unit)), Some((_, of_high))) if unit == of_high => format!("[{low}, {high}]"),
                _ => format!("[{low}, {high}]"),
            }
        }
        Quantity::Iops => verdict::interval(difference)?,
    })
}

/// A loss that may be named stands out; so does a gain that is shown.
pub(super) fn class_of(difference: &Difference) -> &'static str {
    match difference.judgement {
        _ if difference.is_loss() => "cost",
        Judgement::Faster => "gain",
        _ => "flat",
    }
}

fn tip(name: &str, point: &Point, difference: Option<&Difference>) -> String {
    let known = |spread: Option<Spread>| {
        spread.map_or("unknown".to_owned(), |spread| format::duration(spread.median))
    };
    let factor = difference.map_or(String::new(), |step| format!("\nstep {}", verdict::factor(step)));
    format!(
        "{name} · {} · {} repeats\nIOPS {} ({} to {})\nlatency p50 {} · p99 {} · p99.9 {} · mean {}{factor}",
        point.cell,
        point.repeats,
        format::count(point.iops.median),
        format::count(point.iops.least),
        format::count(point.iops.most),
        known(point.p50_ns),
        known(point.p99_ns),
        known(point.p99_9_ns),
        known(point.mean_ns),
    )
}

/// The panels of the chart of percentiles: all depths of a shape together.
#[must_use]
pub fn dots(diagnosis: &Diagnosis, findings: &Findings, shapes: &[Shape]) -> Vec<Panel> {
    let layers = |shape: &Shape| -> Vec<percentiles::Layer> {
        let compared = diagnosis.layers_compared();
        compared.map(|layer| dots_of(diagnosis, findings, layer, *shape)).collect()
    };
    shapes.iter().filter_map(|shape| percentiles::panel(&shape.to_string(), &layers(shape))).collect()
}

fn dots_of(diagnosis: &Diagnosis, findings: &Findings, layer: usize, shape: Shape) -> percentiles::Layer {
    let planned = |point: &&Point| {
        point.layer == layer && point.cell.shape == shape && diagnosis.cells.contains(&point.cell)
    };
    let line = |point: &Point| {
        Some(percentiles::Line {
            label: format!("QD {}", point.cell.queue_depth),
            class: if point.cell.queue_depth == 1 { "shallow" } else { "deep" },
            median_ns: point.p50_ns?.median,
            p99_ns: point.p99_ns?.median,
            tip: point.cell.to_string(),
        })
    };
    let entry = &diagnosis.layers[layer];
    let (class, name) = match &entry.position {
        Position::OnPath | Position::Reference => ("name", entry.name.clone()),
        Position::AlternativeTo(_) => ("other", format!("or {}", entry.name)),
    };
    let lines = findings.compared.points.iter().filter(planned).filter_map(line).collect();
    percentiles::Layer { name, class, lines }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::sample;

    fn of<'a>(diagnosis: &'a Diagnosis, findings: &Findings, quantity: Quantity) -> Vec<&'a Cell> {
        diagnosis.cells.iter().filter(|cell| findings.compared.quantity(cell) == quantity).collect()
    }

    #[test]
    fn each_cell_gets_the_bars_that_it_is_judged_by() {
        let diagnosis = sample::write_back();
        let findings = find(&diagnosis);
        let latency =
            bars(&diagnosis, &findings, &of(&diagnosis, &findings, Quantity::Latency), Quantity::Latency);
        assert_eq!(latency.len(), 4);
        assert_eq!(latency[2].title, "4K random write, QD 1");
        let svg = &latency[2].svg;
        assert!(
            svg.contains(">+54.0 µs slower</tspan>") && svg.contains(">−52.0 µs faster</tspan>"),
            "{svg}"
        );
        assert!(svg.contains(r#"class="cost""#) && svg.contains(r#"class="gain""#), "{svg}");
        let iops = bars(&diagnosis, &findings, &of(&diagnosis, &findings, Quantity::Iops), Quantity::Iops);
        assert_eq!(iops.len(), 4);
        assert!(iops[2].svg.contains(r#"class="cut""#), "write-back+0 is far beyond the path and is cut off");
        assert_eq!(dots(&diagnosis, &findings, &crate::table::shapes(&diagnosis)).len(), 4);
    }

    /// At depth a cell is judged by its IOPS; its latencies are drawn, and no interval is claimed for them.
    #[test]
    fn latencies_at_depth_are_drawn_without_a_judgement_of_their_own() {
        let diagnosis = sample::write_back();
        let findings = find(&diagnosis);
        let deep = of(&diagnosis, &findings, Quantity::Iops);
        let panels = bars(&diagnosis, &findings, &deep[2..3], Quantity::Latency);
        // 38 µs and 92 µs at depth 1, six times that at depth 32.
        assert_eq!(panels[0].title, "4K random write, QD 32");
        assert!(panels[0].svg.contains(">+324 µs</tspan>"), "{}", panels[0].svg);
        assert!(!panels[0].svg.contains(r#"class="small""#), "no interval stands beside it");
        assert!(panels[0].svg.contains(r#"class="cost""#));
    }

    #[test]
    fn nothing_measured_draws_nothing() {
        let mut diagnosis = sample::write_back();
        diagnosis.rows.clear();
        let findings = find(&diagnosis);
        assert!(
            bars(&diagnosis, &findings, &of(&diagnosis, &findings, Quantity::Iops), Quantity::Iops)
                .is_empty()
        );
        assert!(dots(&diagnosis, &findings, &crate::table::shapes(&diagnosis)).is_empty());
    }
}
