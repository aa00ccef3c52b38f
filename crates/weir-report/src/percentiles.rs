//! Median and 99th percentile of latencies as two dots and the span between them, on a logarithmic scale.

use crate::axis::Axis;
use crate::format;
use crate::panel::{Panel, clipped, tick_duration};
use crate::svg::{Anchor, Drawing, WIDTH};

/// Maximum length of a name, in characters; no text is beside it.
const LONGEST_NAME: usize = 56;

/// Lines with one heading.
#[derive(Debug)]
pub struct Layer {
    /// The heading.
    pub name: String,
    /// `name`, or `other` for lines that are set off.
    pub class: &'static str,
    /// The lines.
    pub lines: Vec<Line>,
}

/// Two dots.
#[derive(Debug)]
pub struct Line {
    /// Text at the left.
    pub label: String,
    /// `shallow` or `deep`.
    pub class: &'static str,
    /// Median, in nanoseconds.
    pub median_ns: f64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: f64,
    /// The tooltip's text before the numbers.
    pub tip: String,
}

/// The chart; `None` without a line.
#[must_use]
pub fn panel(title: &str, layers: &[Layer]) -> Option<Panel> {
    let lines = || layers.iter().flat_map(|layer| &layer.lines);
    let least = lines().map(|line| line.median_ns).fold(f64::INFINITY, f64::min);
    let most = lines().map(|line| line.p99_ns).fold(0.0, f64::max);
    if !least.is_finite() {
        return None;
    }
    // The labels are left of the axis; those of the dots need room on both sides.
    let axis = Axis::logarithmic(108.0, WIDTH - 62.0, least, most);
    let mut drawing = Drawing::default();
    for layer in layers.iter().filter(|layer| !layer.lines.is_empty()) {
        let top = drawing.bottom() + if drawing.bottom() > 0.0 { 12.0 } else { 0.0 };
        drawing.text(layer.class, 0.0, top + 12.0, Anchor::Start, &clipped(&layer.name, LONGEST_NAME));
        for (number, line) in layer.lines.iter().enumerate() {
            dumbbell(&mut drawing, &axis, line, top + 25.0 + 17.0 * number as f64);
        }
    }
    let description = format!("Median and 99th percentile of the latency: {title}");
    let svg = drawing.finish(&axis, tick_duration, &description);
    Some(Panel { title: title.to_owned(), svg })
}

fn dumbbell(drawing: &mut Drawing, axis: &Axis, line: &Line, y: f64) {
    let (class, median, tail) = (line.class, format::duration(line.median_ns), format::duration(line.p99_ns));
    let (left, right) = (axis.at(line.median_ns), axis.at(line.p99_ns));
    drawing.begin_group(&format!("{}\np50 {median} · p99 {tail}", line.tip));
    drawing.text(&format!("{class}-text"), 0.0, y + 4.0, Anchor::Start, &line.label);
    drawing.line(&format!("{class} span"), (left, y), (right, y));
    drawing.dot(class, left, y, 4.0);
    drawing.dot(&format!("{class} hollow"), right, y, 4.0);
    drawing.text("small", left - 8.0, y + 4.0, Anchor::End, &median);
    drawing.text("small", right + 8.0, y + 4.0, Anchor::Start, &tail);
    drawing.end_group();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_numbers_stand_beside_their_dots() {
        let line =
            Line { label: "QD 1".into(), class: "shallow", median_ns: 50e3, p99_ns: 2e6, tip: String::new() };
        let layers = [Layer { name: "backing".into(), class: "name", lines: vec![line] }];
        let svg = panel("4K random read", &layers).unwrap().svg;
        for text in [">50.0 µs<", ">2.00 ms<", ">QD 1<", ">backing<"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(panel("nothing", &[]).is_none());
    }
}
