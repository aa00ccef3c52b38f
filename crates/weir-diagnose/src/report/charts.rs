//! The report's three charts, one panel for each shape of load.
//!
//! - *Where the time goes*: median latency at queue depth 1 as a waterfall along the I/O's way.
//! - *What the way can carry*: IOPS at depth, layer by layer.
//! - *How even it is*: median and 99th percentile of the latency.

use super::axis::Axis;
use super::svg::{Anchor, Drawing, WIDTH};
use crate::cell::{Cell, Shape};
use crate::finding::{Difference, Findings, Judgement, Point, Quantity, Spread};
use crate::format;
use crate::result::{Diagnosis, LayerEntry, Position};
use crate::verdict;

/// An alternative that is beyond the layers on the way by more than this factor is cut off and marked:
/// the chart is about the way.
const ROOM_FOR_ALTERNATIVES: f64 = 1.5;

/// Characters of a layer's name beside its numbers.
const LONGEST_NAME: usize = 28;

const BAR: f64 = 13.0;
const THIN_BAR: f64 = 6.0;
const ROW: f64 = 44.0;
const THIN_ROW: f64 = 33.0;

/// One drawing with its title.
#[derive(Debug)]
pub struct Panel {
    /// What is shown.
    pub title: String,
    /// A complete `svg` element.
    pub svg: String,
}

/// A layer in a bar chart.
struct Bar<'a> {
    name: &'a str,
    spread: Spread,
    difference: Option<&'a Difference>,
    /// The same quantity at the layer that it is compared with.
    before: Option<f64>,
    point: &'a Point,
}

impl Bar<'_> {
    /// More or less than the layer that it is compared with, and the colour that this may have: only what the cell is judged
    /// by can be shown to differ, and a latency at depth is drawn beside it.
    fn step(&self, quantity: Quantity) -> Option<(String, &'static str)> {
        let difference = self.difference?;
        if difference.quantity == quantity {
            return Some((verdict::in_short(difference), class_of(difference)));
        }
        let change = self.spread.median - self.before?;
        let class = match class_of(difference) {
            "cost" if change > 0.0 => "cost",
            "gain" if change < 0.0 => "gain",
            _ => "flat",
        };
        Some((format::signed_duration(change), class))
    }
}

/// The panels of a bar chart of `quantity`.
#[must_use]
pub fn bars(diagnosis: &Diagnosis, findings: &Findings, cells: &[&Cell], quantity: Quantity) -> Vec<Panel> {
    cells.iter().filter_map(|cell| bar_panel(diagnosis, findings, cell, quantity)).collect()
}

fn bar_panel(diagnosis: &Diagnosis, findings: &Findings, cell: &Cell, quantity: Quantity) -> Option<Panel> {
    let collect = |on_the_way: bool| -> Vec<Bar<'_>> {
        let layers =
            diagnosis.layers.iter().enumerate().filter(|(_, layer)| layer.position != Position::Reference);
        let wanted = layers.filter(|(_, layer)| (layer.position == Position::OnTheWay) == on_the_way);
        wanted.filter_map(|(index, layer)| bar(findings, index, layer, cell, quantity)).collect()
    };
    let (way, beside) = (collect(true), collect(false));
    let longest = |bars: &[Bar<'_>]| bars.iter().map(|bar| bar.spread.most).fold(0.0, f64::max);
    let most = match (longest(&way), longest(&beside)) {
        (0.0, 0.0) => return None,
        (0.0, beside) => beside,
        (way, beside) => way.max(beside.min(way * ROOM_FOR_ALTERNATIVES)),
    };
    let axis = Axis::linear(0.0, WIDTH, most);
    let mut drawing = Drawing::default();
    draw_way(&mut drawing, &axis, &way, quantity);
    draw_alternatives(&mut drawing, &axis, &beside, quantity, &heading_of_alternatives(diagnosis));
    let (what, label): (&str, fn(f64) -> String) = match quantity {
        Quantity::Latency => ("Median latency by layer", tick_duration),
        Quantity::Iops => ("IOPS by layer", tick_count),
    };
    let svg = drawing.finish(&axis, label, &format!("{what}: {cell}"));
    Some(Panel { title: cell.to_string(), svg })
}

fn bar<'a>(
    findings: &'a Findings,
    index: usize,
    layer: &'a LayerEntry,
    cell: &Cell,
    quantity: Quantity,
) -> Option<Bar<'a>> {
    let spread = |point: &Point| match quantity {
        Quantity::Latency => point.p50_ns,
        Quantity::Iops => Some(point.iops),
    };
    let point = findings.point(index, cell)?;
    let difference = findings.difference_to(index, cell);
    let before = difference.and_then(|step| Some(spread(findings.point(step.from, cell)?)?.median));
    Some(Bar { name: &layer.name, spread: spread(point)?, difference, before, point })
}

fn draw_way(drawing: &mut Drawing, axis: &Axis, bars: &[Bar<'_>], quantity: Quantity) {
    let mut previous: Option<f64> = None;
    for bar in bars {
        let top = drawing.bottom() + if previous.is_some() { ROW - 18.0 - BAR } else { 0.0 };
        let y = top + 18.0;
        drawing.begin_group(&tip(bar));
        let end = axis.place(bar.spread.median);
        if let (Some(before), Quantity::Latency) = (previous, quantity) {
            let start = axis.place(before);
            drawing.line("link", (start, y - (ROW - BAR)), (start, y + BAR));
        }
        label(drawing, bar, top + 12.0, ["name", "value"], quantity);
        match (previous, bar.step(quantity), quantity) {
            // A waterfall: what comes from below is pale, what this layer adds or saves is coloured.
            (Some(before), Some((_, class)), Quantity::Latency) => {
                let start = axis.place(before);
                drawing.rect("below", 0.0, y, start.min(end), BAR);
                let width = (end - start).abs().max(1.5);
                drawing.rect(class, start.min(end), y, width, BAR);
            }
            _ => drawing.rect("base", 0.0, y, end, BAR),
        }
        whisker(drawing, axis, &bar.spread, y + BAR / 2.0);
        drawing.end_group();
        previous = Some(bar.spread.median);
    }
}

/// Names the layer in whose place the alternatives stand, when it is one.
fn heading_of_alternatives(diagnosis: &Diagnosis) -> String {
    let replaced = |layer: &LayerEntry| match &layer.position {
        Position::AlternativeTo(name) => Some(name.clone()),
        Position::OnTheWay | Position::Reference => None,
    };
    let mut names: Vec<String> = diagnosis.layers.iter().filter_map(replaced).collect();
    names.dedup();
    match names.as_slice() {
        [name] => format!("in place of {name}, compared with it"),
        _ => "in place of a layer above, compared with it".to_owned(),
    }
}

fn draw_alternatives(drawing: &mut Drawing, axis: &Axis, bars: &[Bar<'_>], quantity: Quantity, title: &str) {
    if bars.is_empty() {
        return;
    }
    let heading = drawing.bottom() + 27.0;
    drawing.text("aside", 0.0, heading, Anchor::Start, title);
    drawing.line("rule", (0.0, heading - 16.0), (WIDTH, heading - 16.0));
    for (index, bar) in bars.iter().enumerate() {
        let top = drawing.bottom() + if index == 0 { 4.0 } else { THIN_ROW - 17.0 - THIN_BAR };
        let y = top + 17.0;
        drawing.begin_group(&tip(bar));
        label(drawing, bar, top + 12.0, ["other", "other"], quantity);
        let end = axis.place(bar.spread.median);
        drawing.rect("beside", 0.0, y, end, THIN_BAR);
        if axis.is_beyond(bar.spread.median) {
            // Cut off: two gaps say that the bar goes on; its number is in the label.
            drawing.rect("cut", end - 16.0, y - 1.0, 3.0, THIN_BAR + 2.0);
            drawing.rect("cut", end - 10.0, y - 1.0, 3.0, THIN_BAR + 2.0);
        } else {
            whisker(drawing, axis, &bar.spread, y + THIN_BAR / 2.0);
        }
        drawing.end_group();
    }
}

/// A name that leaves room for what stands beside it; the tip and the table have the whole one.
pub(super) fn clipped(name: &str, longest: usize) -> String {
    if name.chars().count() <= longest {
        return name.to_owned();
    }
    name.chars().take(longest - 1).chain(['…']).collect()
}

/// Name at the left; step and value at the right. The classes are those of name and value.
fn label(drawing: &mut Drawing, bar: &Bar<'_>, baseline: f64, classes: [&str; 2], quantity: Quantity) {
    let [name_class, value_class] = classes;
    drawing.text(name_class, 0.0, baseline, Anchor::Start, &clipped(bar.name, LONGEST_NAME));
    let value = match quantity {
        Quantity::Latency => format::duration(bar.spread.median),
        Quantity::Iops => format::count(bar.spread.median),
    };
    let Some((step, class)) = bar.step(quantity) else {
        drawing.text(value_class, WIDTH, baseline, Anchor::End, &value);
        return;
    };
    let class = format!("{class}-text");
    let judged = bar.difference.filter(|difference| difference.quantity == quantity);
    let ends = judged.and_then(added).unwrap_or_default();
    let mut parts = vec![(class.as_str(), step.as_str())];
    if !ends.is_empty() {
        parts.push(("small", ends.as_str()));
    }
    parts.push((value_class, value.as_str()));
    drawing.spans(WIDTH, baseline, Anchor::End, &parts);
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

/// What may be named as a loss stands out; so does a gain that is shown.
pub(super) fn class_of(difference: &Difference) -> &'static str {
    match difference.judgement {
        _ if difference.is_loss() => "cost",
        Judgement::Faster => "gain",
        _ => "flat",
    }
}

/// The range over the repeats, where it is wide enough to be seen.
fn whisker(drawing: &mut Drawing, axis: &Axis, spread: &Spread, y: f64) {
    let (left, right) = (axis.place(spread.least), axis.place(spread.most));
    if right - left < 2.0 {
        return;
    }
    drawing.line("whisker", (left, y), (right, y));
    for x in [left, right] {
        drawing.line("whisker", (x, y - 2.5), (x, y + 2.5));
    }
}

fn tip(bar: &Bar<'_>) -> String {
    let point = bar.point;
    let known = |spread: Option<Spread>| {
        spread.map_or("unknown".to_owned(), |spread| format::duration(spread.median))
    };
    let factor = bar.difference.map_or(String::new(), |step| format!("\nstep {}", verdict::factor(step)));
    format!(
        "{} · {} · {} repeats\nIOPS {} ({} to {})\nlatency p50 {} · p99 {} · p99.9 {} · mean {}{factor}",
        bar.name,
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
    shapes.iter().filter_map(|shape| dot_panel(diagnosis, findings, *shape)).collect()
}

/// A point whose median and 99th percentile are known.
type Percentiles<'a> = (&'a Point, f64, f64);

fn dot_panel(diagnosis: &Diagnosis, findings: &Findings, shape: Shape) -> Option<Panel> {
    let known = |point| -> Option<Percentiles<'_>> {
        let point: &Point = point;
        Some((point, point.p50_ns?.median, point.p99_ns?.median))
    };
    let planned = |point: &&Point| point.cell.shape == shape && diagnosis.cells.contains(&point.cell);
    let of_shape = || findings.points.iter().filter(planned).filter_map(known);
    let least = of_shape().map(|(_, median, _)| median).fold(f64::INFINITY, f64::min);
    let most = of_shape().map(|(_, _, tail)| tail).fold(0.0, f64::max);
    if !least.is_finite() {
        return None;
    }
    // Left of the axis stand the depths; the dots' labels need room on both sides.
    let axis = Axis::logarithmic(108.0, WIDTH - 62.0, least, most);
    let mut drawing = Drawing::default();
    for (layer, entry) in diagnosis.layers.iter().enumerate() {
        let points: Vec<Percentiles<'_>> = of_shape().filter(|(point, ..)| point.layer == layer).collect();
        if points.is_empty() || entry.position == Position::Reference {
            continue;
        }
        let (class, name) = match &entry.position {
            Position::OnTheWay | Position::Reference => ("name", entry.name.clone()),
            Position::AlternativeTo(_) => ("other", format!("or {}", entry.name)),
        };
        let top = drawing.bottom() + if drawing.bottom() > 0.0 { 12.0 } else { 0.0 };
        drawing.text(class, 0.0, top + 12.0, Anchor::Start, &clipped(&name, 2 * LONGEST_NAME));
        for (line, point) in points.into_iter().enumerate() {
            dumbbell(&mut drawing, &axis, point, top + 25.0 + 17.0 * line as f64);
        }
    }
    let svg =
        drawing.finish(&axis, tick_duration, &format!("Median and 99th percentile of the latency: {shape}"));
    Some(Panel { title: shape.to_string(), svg })
}

fn dumbbell(drawing: &mut Drawing, axis: &Axis, (point, median, tail): Percentiles<'_>, y: f64) {
    let class = if point.cell.queue_depth == 1 { "shallow" } else { "deep" };
    let (left, right) = (axis.place(median), axis.place(tail));
    drawing.begin_group(&format!(
        "{}\np50 {} · p99 {}",
        point.cell,
        format::duration(median),
        format::duration(tail)
    ));
    drawing.text(
        &format!("{class}-text"),
        0.0,
        y + 4.0,
        Anchor::Start,
        &format!("QD {}", point.cell.queue_depth),
    );
    drawing.line(&format!("{class} span"), (left, y), (right, y));
    drawing.dot(class, left, y, 4.0);
    drawing.dot(&format!("{class} hollow"), right, y, 4.0);
    drawing.text("small", left - 8.0, y + 4.0, Anchor::End, &format::duration(median));
    drawing.text("small", right + 8.0, y + 4.0, Anchor::Start, &format::duration(tail));
    drawing.end_group();
}

/// A round number of nanoseconds without digits that say nothing: `0`, `50 µs`, `2.5 ms`.
pub(super) fn tick_duration(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        ns if ns <= 0.0 => return "0".to_owned(),
        ns if ns < 999.5 => (ns, "ns"),
        ns if ns < 999.5e3 => (ns / 1e3, "µs"),
        ns if ns < 999.5e6 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    format!("{} {unit}", (value * 100.0).round() / 100.0)
}

/// A round rate in the same way: `0`, `50k`, `2.5M`.
pub(super) fn tick_count(rate: f64) -> String {
    let (value, unit) = match rate {
        rate if rate < 999.5 => (rate, ""),
        rate if rate < 999.5e3 => (rate / 1e3, "k"),
        rate => (rate / 1e6, "M"),
    };
    format!("{}{unit}", (value * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::sample;

    fn of<'a>(diagnosis: &'a Diagnosis, findings: &Findings, quantity: Quantity) -> Vec<&'a Cell> {
        diagnosis.cells.iter().filter(|cell| findings.quantity(cell) == quantity).collect()
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
        assert!(iops[2].svg.contains(r#"class="cut""#), "write-back+0 is far beyond the way and is cut off");
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
    fn bars_are_as_long_as_their_numbers() {
        let diagnosis = sample::chain(&[
            ("backing", sample::Numbers([50e3; 5])),
            ("export", sample::Numbers([100e3; 5])),
        ]);
        let findings = find(&diagnosis);
        let panels =
            bars(&diagnosis, &findings, &of(&diagnosis, &findings, Quantity::Latency), Quantity::Latency);
        let svg = &panels[0].svg;
        assert!(svg.contains(r#"class="base" x="0.0" y="18.0" width="230.0""#), "{svg}");
        assert!(svg.contains(r#"class="cost" x="230.0" y="62.0" width="230.0""#), "{svg}");
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

    #[test]
    fn long_names_leave_room_for_the_numbers() {
        assert_eq!(clipped("accel write-back+1", LONGEST_NAME), "accel write-back+1");
        assert_eq!(clipped("größer als alles", 8), "größer …");
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!(tick_duration(0.0), "0");
        assert_eq!(tick_duration(50e3), "50 µs");
        assert_eq!(tick_duration(2.5e6), "2.5 ms");
        assert_eq!(tick_duration(1e6), "1 ms");
        assert_eq!(tick_count(50e3), "50k");
        assert_eq!(tick_count(2.5e6), "2.5M");
        assert_eq!(tick_count(0.0), "0");
    }
}
