//! A bar for each layer: as a waterfall, in which each bar begins where the one before ended, or side by side.

use crate::axis::Axis;
use crate::panel::{Panel, clipped};
use crate::svg::{Anchor, Drawing, WIDTH};

/// A bar of [`Chart::beside`] that exceeds those of [`Chart::chain`] by more than this factor is truncated and marked: the chain
/// is the subject of the chart.
const ROOM_BESIDE: f64 = 1.5;

/// Maximum length of a name beside its numbers, in characters.
const LONGEST_NAME: usize = 28;

/// Minimum length of an error bar, as a share of the value: shorter ones are not drawn.
pub const FAR_APART: f64 = 0.05;

/// Room at the right of the longest bar, for its error bar. A longer error bar is truncated: one outlier must not shrink all
/// bars.
const ROOM_FOR_ERRORS: f64 = 1.15;

const BAR: f64 = 13.0;
const THIN_BAR: f64 = 6.0;
const ROW: f64 = 44.0;
const THIN_ROW: f64 = 33.0;

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Text at the left.
    pub name: String,
    /// Its length, in the unit of the axis; 0 or more.
    pub value: f64,
    /// The value as text.
    pub label: String,
    /// Minimum and maximum, drawn as an error bar if they are [`FAR_APART`].
    pub range: Option<[f64; 2]>,
    /// The change from the bar before, in words.
    pub step: Option<Step>,
    /// The tooltip.
    pub tip: String,
}

/// The change from the bar before.
#[derive(Clone, Debug)]
pub struct Step {
    /// The text.
    pub text: String,
    /// Its interval, in small type; may be empty.
    pub interval: String,
    /// `cost`, `gain` or `flat`.
    pub class: &'static str,
}

/// A chart of bars.
#[derive(Debug)]
pub struct Chart {
    /// The title above the chart.
    pub title: String,
    /// Text alternative for screen readers.
    pub description: String,
    /// Bars that follow each other.
    pub chain: Vec<Bar>,
    /// Thin bars under them.
    pub beside: Vec<Bar>,
    /// The heading of the thin bars.
    pub beside_title: String,
    /// Each bar of the chain begins where the one before ended.
    pub waterfall: bool,
    /// The label of a tick.
    pub tick: fn(f64) -> String,
}

/// The chart; `None` without a bar.
#[must_use]
pub fn panel(chart: &Chart) -> Option<Panel> {
    let longest = |bars: &[Bar]| bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    let errors = |bars: &[Bar]| bars.iter().filter_map(|bar| Some(bar.error()?[1])).fold(0.0, f64::max);
    let most = match (longest(&chart.chain), longest(&chart.beside)) {
        (0.0, 0.0) => return None,
        (0.0, beside) => beside,
        (chain, beside) => chain.max(beside.min(chain * ROOM_BESIDE)),
    };
    let most = most.max(errors(&chart.chain).min(most * ROOM_FOR_ERRORS));
    let axis = Axis::linear(0.0, WIDTH, most);
    let mut drawing = Drawing::default();
    draw_chain(&mut drawing, &axis, chart);
    draw_beside(&mut drawing, &axis, chart);
    let svg = drawing.finish(&axis, chart.tick, &chart.description);
    Some(Panel { title: chart.title.clone(), svg })
}

fn draw_chain(drawing: &mut Drawing, axis: &Axis, chart: &Chart) {
    let mut previous: Option<f64> = None;
    for bar in &chart.chain {
        let top = drawing.bottom() + if previous.is_some() { ROW - 18.0 - BAR } else { 0.0 };
        let y = top + 18.0;
        drawing.begin_group(&bar.tip);
        let end = axis.at(bar.value);
        let before = previous.filter(|_| chart.waterfall).map(|before| axis.at(before));
        if let Some(start) = before {
            drawing.line("link", (start, y - (ROW - BAR)), (start, y + BAR));
        }
        label(drawing, bar, top + 12.0, ["name", "value"]);
        match (before, &bar.step) {
            // The part from the bar before is pale, the part that this one adds or saves is coloured.
            (Some(start), Some(step)) => {
                drawing.rect("below", 0.0, y, start.min(end), BAR);
                let width = (end - start).abs().max(1.5);
                drawing.rect(step.class, start.min(end), y, width, BAR);
            }
            _ => drawing.rect("base", 0.0, y, end, BAR),
        }
        error_bar(drawing, axis, bar, y + BAR / 2.0);
        drawing.end_group();
        previous = Some(bar.value);
    }
}

fn draw_beside(drawing: &mut Drawing, axis: &Axis, chart: &Chart) {
    if chart.beside.is_empty() {
        return;
    }
    let heading = drawing.bottom() + 27.0;
    drawing.text("aside", 0.0, heading, Anchor::Start, &chart.beside_title);
    drawing.line("rule", (0.0, heading - 16.0), (WIDTH, heading - 16.0));
    for (index, bar) in chart.beside.iter().enumerate() {
        let top = drawing.bottom() + if index == 0 { 4.0 } else { THIN_ROW - 17.0 - THIN_BAR };
        let y = top + 17.0;
        drawing.begin_group(&bar.tip);
        label(drawing, bar, top + 12.0, ["other", "other"]);
        let end = axis.at(bar.value);
        drawing.rect("beside", 0.0, y, end, THIN_BAR);
        if axis.is_beyond(bar.value) {
            // Truncated: two gaps show that the bar continues; its value is in the label.
            drawing.rect("cut", end - 16.0, y - 1.0, 3.0, THIN_BAR + 2.0);
            drawing.rect("cut", end - 10.0, y - 1.0, 3.0, THIN_BAR + 2.0);
        } else {
            error_bar(drawing, axis, bar, y + THIN_BAR / 2.0);
        }
        drawing.end_group();
    }
}

/// Name at the left; step and value at the right. The classes are those of name and value.
fn label(drawing: &mut Drawing, bar: &Bar, baseline: f64, [name_class, value_class]: [&str; 2]) {
    drawing.text(name_class, 0.0, baseline, Anchor::Start, &clipped(&bar.name, LONGEST_NAME));
    let Some(step) = &bar.step else {
        drawing.text(value_class, WIDTH, baseline, Anchor::End, &bar.label);
        return;
    };
    let class = format!("{}-text", step.class);
    let mut parts = vec![(class.as_str(), step.text.as_str())];
    if !step.interval.is_empty() {
        parts.push(("small", step.interval.as_str()));
    }
    parts.push((value_class, bar.label.as_str()));
    drawing.spans(WIDTH, baseline, Anchor::End, &parts);
}

impl Bar {
    /// The ends of the error bar, if it is drawn.
    fn error(&self) -> Option<[f64; 2]> {
        self.range.filter(|[least, most]| most - least > FAR_APART * self.value)
    }
}

/// The error bar. An end that is beyond the axis has no cap.
fn error_bar(drawing: &mut Drawing, axis: &Axis, bar: &Bar, y: f64) {
    let Some(ends) = bar.error() else { return };
    let [left, right] = ends.map(|end| axis.at(end));
    drawing.line("whisker", (left, y), (right, y));
    for (_, x) in ends.into_iter().zip([left, right]).filter(|(end, _)| !axis.is_beyond(*end)) {
        drawing.line("whisker", (x, y - 2.5), (x, y + 2.5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::tick_duration;

    fn bar(name: &str, value: f64) -> Bar {
        let step = Step { text: "added".into(), interval: String::new(), class: "cost" };
        let name = name.to_owned();
        Bar { name, value, label: value.to_string(), range: None, step: Some(step), tip: String::new() }
    }

    fn chart(chain: Vec<Bar>, beside: Vec<Bar>) -> Chart {
        Chart {
            title: "latency".into(),
            description: "latency by layer".into(),
            chain,
            beside,
            beside_title: "instead".into(),
            waterfall: true,
            tick: tick_duration,
        }
    }

    #[test]
    fn bars_are_as_long_as_their_numbers() {
        let svg = panel(&chart(vec![bar("a", 50e3), bar("b", 100e3)], Vec::new())).unwrap().svg;
        assert!(svg.contains(r#"class="below" x="0.0" y="62.0" width="230.0""#), "{svg}");
        assert!(svg.contains(r#"class="cost" x="230.0" y="62.0" width="230.0""#), "{svg}");
    }

    #[test]
    fn what_is_far_beyond_the_chain_is_cut_off_and_nothing_draws_nothing() {
        let svg = panel(&chart(vec![bar("a", 50e3)], vec![bar("b", 900e3)])).unwrap().svg;
        assert_eq!(svg.matches(r#"class="cut""#).count(), 2, "{svg}");
        assert!(panel(&chart(Vec::new(), Vec::new())).is_none());
    }

    #[test]
    fn error_bars_are_drawn_where_they_say_something_and_never_shrink_the_bars() {
        let with = |least, most| Bar { range: Some([least, most]), ..bar("a", 100.0) };
        let svg = |one: Bar| panel(&chart(vec![one], Vec::new())).unwrap().svg;
        assert_eq!(svg(with(99.0, 102.0)).matches("whisker").count(), 0, "3 % apart");
        assert_eq!(svg(with(90.0, 110.0)).matches("whisker").count(), 3);
        let outlier = svg(with(90.0, 1000.0));
        assert_eq!(outlier.matches("whisker").count(), 2, "the far end is cut off and has no cap: {outlier}");
        assert!(outlier.contains(r#"class="base" x="0.0" y="18.0" width="400.0""#), "{outlier}");
    }
}
