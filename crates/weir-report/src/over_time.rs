//! A run over time: the latencies of each moment as a heat map (Gregg, "Visualizing system latency", 2010), and below it the
//! I/Os per second, with the measured window marked.

use crate::axis::Axis;
use crate::panel::{Panel, clipped, tick_count, tick_duration};
use crate::svg::{Anchor, Drawing};

/// Room for the labels of the values.
const LEFT: f64 = 46.0;
/// Room for the last label of the time.
const MARGIN: f64 = 4.0;
const TOP: f64 = 22.0;
const HEAT: f64 = 120.0;
const RATE_TOP: f64 = TOP + HEAT + 16.0;
const RATE: f64 = 62.0;

/// Lower bounds of the shades, as shares of a moment's answers, the palest first.
const SHADES: [f64; 6] = [0.0, 0.002, 0.02, 0.1, 0.3, 0.6];

/// One run. Times are in seconds from the beginning of the measured time; earlier ones are negative.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Start of the run, 0 or less.
    pub begin: f64,
    /// The end.
    pub end: f64,
    /// Its moments in order.
    pub moments: Vec<Moment>,
}

/// A part of a run.
#[derive(Clone, Debug)]
pub struct Moment {
    /// The start.
    pub from: f64,
    /// The end.
    pub to: f64,
    /// I/Os per second; absent if too little of the moment was within the load.
    pub rate: Option<f64>,
    /// Its latencies.
    pub buckets: Vec<Bucket>,
}

/// The answers of a moment within a range of latencies.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// The lower edge, in nanoseconds.
    pub from_ns: f64,
    /// The upper edge, in nanoseconds.
    pub to_ns: f64,
    /// The part of the moment's answers, 0 to 1.
    pub share: f64,
}

/// One run, with the other repeats of the same cell.
#[derive(Debug)]
pub struct Course {
    /// The title above the picture.
    pub title: String,
    /// The run shown in full.
    pub run: Run,
    /// Repeats: their rates are thin lines.
    pub others: Vec<Run>,
    /// The label of the measured window: `measured`, `steady window`.
    pub window: &'static str,
}

/// The pictures of related runs, with this width and the same scales; omits runs without answers.
#[must_use]
pub fn panels(courses: &[Course], width: f64) -> Vec<Panel> {
    let is_drawable = |course: &&Course| course.run.moments.iter().any(|moment| !moment.buckets.is_empty());
    let courses: Vec<&Course> = courses.iter().filter(is_drawable).collect();
    let all = || courses.iter().flat_map(|course| std::iter::once(&course.run).chain(&course.others));
    let begin = all().map(|run| run.begin).fold(0.0, f64::min);
    let end = all().map(|run| run.end).fold(1e-9, f64::max);
    let moments = || courses.iter().flat_map(|course| &course.run.moments);
    let buckets = || moments().flat_map(|moment| &moment.buckets);
    let least = buckets().map(|bucket| bucket.from_ns).fold(f64::INFINITY, f64::min);
    let most = buckets().map(|bucket| bucket.to_ns).fold(0.0, f64::max);
    let fastest = moments().filter_map(|moment| moment.rate).fold(0.0, f64::max);
    let scales = Scales {
        width,
        time: Axis::between(LEFT, width - MARGIN, begin, end),
        latency: Axis::logarithmic(TOP + HEAT, TOP, least, most),
        // Repeats beyond it are truncated.
        rate: Axis::linear(RATE_TOP + RATE, RATE_TOP, fastest * 1.15),
    };
    courses.iter().map(|course| scales.draw(course)).collect()
}

struct Scales {
    width: f64,
    time: Axis,
    latency: Axis,
    rate: Axis,
}

impl Scales {
    fn draw(&self, course: &Course) -> Panel {
        let mut drawing = Drawing::wide(self.width);
        self.frame(&mut drawing);
        self.heat(&mut drawing, &course.run);
        for other in &course.others {
            self.line(&mut drawing, "repeat", other);
        }
        self.line(&mut drawing, "rate", &course.run);
        self.window(&mut drawing, course);
        let svg = drawing.close(&format!("Latency and I/Os per second over time: {}", course.title));
        Panel { title: clipped(&course.title, 40), svg }
    }

    fn frame(&self, drawing: &mut Drawing) {
        let (bottom, right) = (RATE_TOP + RATE, self.width - MARGIN);
        for &tick in self.latency.ticks() {
            let y = self.latency.at(tick);
            drawing.line("grid", (LEFT, y), (right, y));
            drawing.text("tick", LEFT - 6.0, y + 3.5, Anchor::End, &tick_duration(tick));
        }
        // Few ticks: the strip is low.
        for &tick in self.rate.ticks().iter().step_by(if self.rate.ticks().len() > 3 { 2 } else { 1 }) {
            let y = self.rate.at(tick);
            drawing.line("grid", (LEFT, y), (right, y));
            drawing.text("tick", LEFT - 6.0, y + 3.5, Anchor::End, &tick_count(tick));
        }
        for &tick in self.time.ticks() {
            let x = self.time.at(tick);
            drawing.line("grid", (x, TOP), (x, bottom));
            let anchor = if x > right - 14.0 { Anchor::End } else { Anchor::Middle };
            drawing.text("tick", x, bottom + 14.0, anchor, &seconds(tick));
        }
    }

    fn heat(&self, drawing: &mut Drawing, run: &Run) {
        let mut shades: [Vec<[f64; 4]>; SHADES.len()] = Default::default();
        for moment in &run.moments {
            let (left, right) = (self.time.at(moment.from), self.time.at(moment.to));
            for bucket in &moment.buckets {
                let shade = SHADES.iter().rposition(|least| bucket.share >= *least).unwrap_or(0);
                let (top, bottom) = (self.latency.at(bucket.to_ns), self.latency.at(bucket.from_ns));
                shades[shade].push([left, top, right - left, bottom - top]);
            }
        }
        for (shade, tiles) in shades.iter().enumerate() {
            drawing.mosaic(&format!("heat{shade}"), tiles);
        }
    }

    fn line(&self, drawing: &mut Drawing, class: &str, run: &Run) {
        let steps = run.moments.iter().flat_map(|moment| {
            let rate = moment.rate.filter(|rate| !self.rate.is_beyond(*rate));
            [moment.from, moment.to].map(|at| rate.map(|rate| (self.time.at(at), self.rate.at(rate))))
        });
        drawing.path(class, steps);
    }

    /// The time before the measured time is dimmed; a bracket spans the rest.
    fn window(&self, drawing: &mut Drawing, course: &Course) {
        let run = &course.run;
        let (begin, from, to) = (self.time.at(run.begin), self.time.at(0.0), self.time.at(run.end));
        drawing.rect("veil", begin, TOP, from - begin, RATE_TOP + RATE - TOP);
        let y = TOP - 6.0;
        drawing.line("bracket", (from, y), (to, y));
        drawing.line("bracket", (from, y - 3.0), (from, y + 3.0));
        drawing.line("bracket", (to, y - 3.0), (to, y + 3.0));
        drawing.text("aside", from + 5.0, y - 5.0, Anchor::Start, course.window);
        drawing.text("aside", LEFT + 4.0, RATE_TOP - 4.0, Anchor::Start, "I/Os per second");
    }
}

/// Seconds without insignificant digits.
fn seconds(at: f64) -> String {
    let sign = if at < 0.0 { "−" } else { "" };
    format!("{sign}{} s", (at.abs() * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A second after 0.2 s of warm-up, in tenths: most answers quick, one in a thousand slow.
    fn steady() -> Run {
        let bucket = |from_ns: f64, share| Bucket { from_ns, to_ns: from_ns * 1.3, share };
        let moment = |number: i32| Moment {
            from: f64::from(number) / 10.0,
            to: f64::from(number + 1) / 10.0,
            rate: Some(10e3),
            buckets: vec![bucket(50e3, 0.9), bucket(65e3, 0.099), bucket(85e3, 0.001)],
        };
        Run { begin: -0.2, end: 0.8, moments: (-2..8).map(moment).collect() }
    }

    fn course(run: &Run) -> Course {
        Course { title: "backing".into(), run: run.clone(), others: vec![run.clone()], window: "measured" }
    }

    #[test]
    fn the_window_begins_where_the_warm_up_ends() {
        let drawn = panels(&[course(&steady())], 340.0);
        let svg = &drawn[0].svg;
        let width = (340.0 - MARGIN - LEFT) * 0.2;
        let veil = format!(r#"class="veil" x="{LEFT:.1}" y="{TOP:.1}" width="{width:.1}""#);
        assert!(svg.contains(&veil), "{veil} in {svg}");
        for text in [">measured<", ">I/Os per second<", ">0.5 s<", ">10k<", "heat0", "heat2", "heat5"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(!svg.contains("heat4"), "no moment has between 30 and 60 %");
    }

    #[test]
    fn nothing_draws_nothing() {
        assert!(panels(&[], 340.0).is_empty());
        assert!(panels(&[course(&Run::default())], 340.0).is_empty());
        let mut idle = steady();
        idle.moments.iter_mut().for_each(|moment| moment.buckets.clear());
        assert!(panels(&[course(&idle)], 340.0).is_empty());
    }

    proptest! {
        #[test]
        fn any_run_can_be_drawn(
            ends in prop::array::uniform2(any::<f64>()),
            moments in prop::collection::vec((prop::array::uniform5(any::<f64>()), any::<Option<f64>>()), 0..20),
        ) {
            let moment = |([from, to, from_ns, to_ns, share], rate): ([f64; 5], Option<f64>)| {
                Moment { from, to, rate, buckets: vec![Bucket { from_ns, to_ns, share }] }
            };
            let run = Run { begin: ends[0], end: ends[1], moments: moments.into_iter().map(moment).collect() };
            for panel in panels(&[course(&run)], 340.0) {
                prop_assert!(crate::svg::is_drawable(&panel.svg), "{}", panel.svg);
            }
        }
    }
}
