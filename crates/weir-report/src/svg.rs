//! The subset of SVG that the report's charts need: text, rectangles, lines, dots, paths, and an axis under them.
//!
//! Colours and type come from the page's style sheet by class, so that one drawing serves light, dark and
//! paper. Every external string passes [`escape`].

use std::fmt::Write;

use crate::axis::Axis;

/// Width of a drawing of two in a row, in its own units; the page scales it to the column.
pub const WIDTH: f64 = 460.0;

/// Whether a character may stand in XML 1.0: most control characters and two others may not, in whatever form.
pub(crate) fn is_character(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')
}

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
            c if is_character(c) => safe.push(c),
            _ => safe.push(' '),
        }
    }
    safe
}

/// The anchor of a text at its position.
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
#[derive(Debug)]
pub struct Drawing {
    body: String,
    bottom: f64,
    width: f64,
}

impl Default for Drawing {
    fn default() -> Drawing {
        Drawing::wide(WIDTH)
    }
}

impl Drawing {
    /// An empty drawing of that width.
    #[must_use]
    pub fn wide(width: f64) -> Drawing {
        Drawing { body: String::new(), bottom: 0.0, width }
    }

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

    /// A rectangle; negative widths count as zero.
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

    /// A line through these points, with gaps at missing ones.
    pub fn path(&mut self, class: &str, places: impl Iterator<Item = Option<(f64, f64)>>) {
        let (mut path, mut pen_is_down) = (String::new(), false);
        for place in places {
            if let Some((x, y)) = place {
                let _ = write!(path, "{}{x:.1} {y:.1}", if pen_is_down { 'L' } else { 'M' });
            }
            pen_is_down = place.is_some();
        }
        if !path.is_empty() {
            let _ = write!(self.body, r#"<path class="{class}" d="{path}"/>"#);
        }
    }

    /// Many rectangles of one class: left, top, width, height.
    pub fn mosaic(&mut self, class: &str, tiles: &[[f64; 4]]) {
        if tiles.is_empty() {
            return;
        }
        let _ = write!(self.body, r#"<path class="{class}" d=""#);
        for [x, y, width, height] in tiles {
            let _ = write!(self.body, "M{x:.1} {y:.1}h{width:.1}v{height:.1}h{:.1}z", -width);
        }
        self.body.push_str(r#""/>"#);
    }

    /// A dot.
    pub fn dot(&mut self, class: &str, x: f64, y: f64, radius: f64) {
        let _ = write!(self.body, r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="{radius:.1}"/>"#);
        self.bottom = self.bottom.max(y + radius);
    }

    /// Begins a group with the tooltip `tip`. End it with [`Drawing::end_group`].
    pub fn begin_group(&mut self, tip: &str) {
        let _ = write!(self.body, "<g><title>{}</title>", escape(tip));
    }

    /// Ends the current group.
    pub fn end_group(&mut self) {
        self.body.push_str("</g>");
    }

    /// The axis with its ticks under everything drawn so far, and grid lines behind it.
    #[must_use]
    pub fn finish(self, axis: &Axis, tick_label: impl Fn(f64) -> String, description: &str) -> String {
        let (top, bottom) = (2.0, self.bottom + 6.0);
        let mut grid = Drawing::wide(self.width);
        for &tick in axis.ticks() {
            let x = axis.at(tick);
            grid.line("grid", (x, top), (x, bottom));
            let anchor = if x < 14.0 {
                Anchor::Start
            } else if x > self.width - 14.0 {
                Anchor::End
            } else {
                Anchor::Middle
            };
            grid.text("tick", x, bottom + 14.0, anchor, &tick_label(tick));
        }
        grid.body.push_str(&self.body);
        grid.bottom = bottom + 16.0;
        grid.close(description)
    }

    /// The drawing as it is.
    #[must_use]
    pub fn close(self, description: &str) -> String {
        format!(
            r#"<svg viewBox="0 0 {} {:.0}" role="img" aria-label="{}">{}</svg>"#,
            self.width,
            self.bottom + 4.0,
            escape(description),
            self.body
        )
    }
}

/// Whether every coordinate is a number; for the charts' property tests.
#[cfg(feature = "drawable")]
#[must_use]
pub fn is_drawable(svg: &str) -> bool {
    let doc = roxmltree::Document::parse(svg).expect("a chart is XML");
    let numbers = ["x", "y", "width", "height", "x1", "x2", "y1", "y2", "cx", "cy", "r", "d", "viewBox"];
    let attributes = doc.descendants().flat_map(|node| node.attributes());
    let mut words = attributes.filter(|it| numbers.contains(&it.name())).flat_map(|it| {
        it.value().split(|c: char| c.is_whitespace() || "MLhvz".contains(c)).filter(|word| !word.is_empty())
    });
    words.all(|word| word.parse::<f64>().is_ok_and(|number| number.is_finite() && number.abs() < 1e5))
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
}
