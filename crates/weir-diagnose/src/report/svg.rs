//! Just enough SVG for the report's charts: text, rectangles, lines, dots, and an axis.
//!
//! Colours and type come from the page's style sheet by class, so that one drawing serves light, dark and
//! paper. Every string that comes from outside passes [`escape`].

use std::fmt::Write;

/// Width of every drawing in its own units; the page scales it to the column.
pub const WIDTH: f64 = 460.0;

/// Makes text safe inside an element and inside a quoted attribute.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Control characters are not allowed in XML, whatever their form.
            c if c.is_control() => safe.push(' '),
            c => safe.push(c),
        }
    }
    safe
}

/// Which end of a text its position names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// Its left end.
    Start,
    /// Its middle.
    Middle,
    /// Its right end.
    End,
}

/// A drawing that grows downwards.
#[derive(Debug, Default)]
pub struct Drawing {
    body: String,
    bottom: f64,
}

impl Drawing {
    /// The lowest place used so far.
    #[must_use]
    pub fn bottom(&self) -> f64 {
        self.bottom
    }

    /// One line of text on the baseline `y`.
    pub fn text(&mut self, class: &str, x: f64, y: f64, anchor: Anchor, text: &str) {
        self.spans(x, y, anchor, &[(class, text)]);
    }

    /// One line of text in parts, each with its class.
    pub fn spans(&mut self, x: f64, y: f64, anchor: Anchor, parts: &[(&str, &str)]) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = write!(self.body, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">"#);
        for (index, (class, text)) in parts.iter().enumerate() {
            let gap = if index == 0 { "" } else { r#" dx="9""# };
            let _ = write!(self.body, r#"<tspan class="{class}"{gap}>{}</tspan>"#, escape(text));
        }
        self.body.push_str("</text>");
        self.bottom = self.bottom.max(y + 4.0);
    }

    /// A rectangle; negative widths are drawn as none.
    pub fn rect(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64) {
        let width = width.max(0.0);
        let _ = write!(
            self.body,
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="1.5"/>"#
        );
        self.bottom = self.bottom.max(y + height);
    }

    /// A straight line.
    pub fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let _ = write!(
            self.body,
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        );
        self.bottom = self.bottom.max(y1.max(y2));
    }

    /// A dot.
    pub fn dot(&mut self, class: &str, x: f64, y: f64, radius: f64) {
        let _ = write!(self.body, r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="{radius:.1}"/>"#);
        self.bottom = self.bottom.max(y + radius);
    }

    /// Begins a group that shows `tip` when pointed at. To be ended with [`Drawing::end_group`].
    pub fn begin_group(&mut self, tip: &str) {
        let _ = write!(self.body, "<g><title>{}</title>", escape(tip));
    }

    /// Ends the group begun last.
    pub fn end_group(&mut self) {
        self.body.push_str("</g>");
    }

    /// The axis with its ticks under everything drawn so far, and grid lines behind it.
    pub fn finish(self, axis: &Axis, tick_label: impl Fn(f64) -> String, description: &str) -> String {
        let (top, bottom) = (2.0, self.bottom + 6.0);
        let mut grid = Drawing::default();
        for &tick in axis.ticks() {
            let x = axis.place(tick);
            grid.line("grid", (x, top), (x, bottom));
            let anchor = if x < 14.0 {
                Anchor::Start
            } else if x > WIDTH - 14.0 {
                Anchor::End
            } else {
                Anchor::Middle
            };
            grid.text("tick", x, bottom + 14.0, anchor, &tick_label(tick));
        }
        format!(
            r#"<svg viewBox="0 0 {WIDTH} {:.0}" role="img" aria-label="{}">{}{}</svg>"#,
            bottom + 20.0,
            escape(description),
            grid.body,
            self.body
        )
    }
}

/// Places values between `left` and `right`.
#[derive(Debug)]
pub struct Axis {
    /// Where the smallest value stands.
    pub left: f64,
    /// Where the largest value stands.
    pub right: f64,
    least: f64,
    most: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// From zero to `most` (above 0), about five ticks at round numbers.
    #[must_use]
    pub fn linear(left: f64, right: f64, most: f64) -> Axis {
        let step = round_step(most / 4.0);
        let ticks =
            (0..=8).map(|i| f64::from(i) * step).take_while(|&tick| tick <= most * 1.000_001).collect();
        Axis { left, right, least: 0.0, most, logarithmic: false, ticks }
    }

    /// From `least` to `most` (both above 0), at most five ticks where powers of ten allow it.
    #[must_use]
    pub fn logarithmic(left: f64, right: f64, least: f64, most: f64) -> Axis {
        let most = most.max(least * 1.5);
        let decades = least.log10().floor() as i32..=most.log10().ceil() as i32;
        let ticks = |digits: &[f64]| -> Vec<f64> {
            let all =
                decades.clone().flat_map(|power| digits.iter().map(move |digit| digit * 10_f64.powi(power)));
            all.filter(|tick| (least..=most).contains(tick)).collect()
        };
        let choices = [ticks(&[1.0, 2.0, 5.0]), ticks(&[1.0, 3.0])];
        let ticks = choices.into_iter().find(|ticks| ticks.len() <= 5).unwrap_or_else(|| ticks(&[1.0]));
        Axis { left, right, least, most, logarithmic: true, ticks }
    }

    /// Where a value stands; values outside stand at the ends.
    #[must_use]
    pub fn place(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value.max(self.least) / self.least).ln() / (self.most / self.least).ln()
        } else {
            value / self.most
        };
        self.left + share.clamp(0.0, 1.0) * (self.right - self.left)
    }

    /// Whether the value is beyond the right end.
    #[must_use]
    pub fn is_beyond(&self, value: f64) -> bool {
        value > self.most * 1.000_001
    }

    fn ticks(&self) -> &[f64] {
        &self.ticks
    }
}

/// The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `step`.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let mut round = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|digit| digit * power);
    round.find(|&candidate| candidate >= step * 0.999_999).unwrap_or(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_cannot_leave_its_place() {
        let mut drawing = Drawing::default();
        drawing.begin_group("a \"tip\" <b>");
        drawing.text("label", 0.0, 10.0, Anchor::Start, "</text><script>alert('x')</script>\u{0}&");
        drawing.end_group();
        let svg = drawing.finish(&Axis::linear(0.0, 100.0, 10.0), |tick| tick.to_string(), "\"><script>");
        assert!(!svg.contains("<script"), "{svg}");
        assert!(svg.contains("&lt;/text&gt;&lt;script&gt;alert(&#39;x&#39;)"), "{svg}");
        assert!(svg.contains(r#"aria-label="&quot;&gt;&lt;script&gt;""#), "{svg}");
    }

    #[test]
    fn axes_have_round_ticks_and_keep_values_inside() {
        let axis = Axis::linear(10.0, 110.0, 92.0);
        assert_eq!(axis.ticks(), [0.0, 25.0, 50.0, 75.0]);
        assert_eq!(Axis::linear(0.0, 1.0, 80.0).ticks(), [0.0, 20.0, 40.0, 60.0, 80.0]);
        assert_eq!(axis.place(46.0), 60.0);
        assert_eq!(axis.place(1e9), 110.0);
        assert!(axis.is_beyond(92.1) && !axis.is_beyond(92.0));

        let axis = Axis::logarithmic(0.0, 100.0, 1e3, 1e6);
        assert_eq!(axis.ticks(), [1e3, 1e4, 1e5, 1e6]);
        assert!((axis.place(1e4) - 100.0 / 3.0).abs() < 1e-9);
        assert_eq!(axis.place(0.0), 0.0);
        let narrow = Axis::logarithmic(0.0, 100.0, 90e3, 600e3);
        assert_eq!(narrow.ticks(), [100e3, 200e3, 500e3]);
        let wider = Axis::logarithmic(0.0, 100.0, 20e3, 4e6);
        assert_eq!(wider.ticks(), [30e3, 100e3, 300e3, 1e6, 3e6]);
    }

    #[test]
    fn steps_are_round() {
        for (step, round) in
            [(1.0, 1.0), (1.1, 2.0), (2.3, 2.5), (2.6, 5.0), (7.0, 10.0), (230.0, 250.0), (0.02, 0.02)]
        {
            assert!((round_step(step) - round).abs() < 1e-9, "{step}");
        }
    }
}
