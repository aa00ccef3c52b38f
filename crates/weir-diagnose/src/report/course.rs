//! A run over time: the latencies of each moment as a heat map (Gregg, "Visualizing system latency", 2010), and below it the
//! I/Os per second, with the measured window marked.

use weir_load::timeline::{Slot, Timeline, bucket_start};

use super::axis::Axis;
use super::charts::{Panel, clipped, tick_count, tick_duration};
use super::svg::{Anchor, Drawing};

/// Room for the labels of the values.
const LEFT: f64 = 46.0;
/// Room for the last label of the time.
const MARGIN: f64 = 4.0;
const TOP: f64 = 22.0;
const HEAT: f64 = 120.0;
const RATE_TOP: f64 = TOP + HEAT + 16.0;
const RATE: f64 = 62.0;

/// A slot of which less than this was within the load says nothing about the rate.
const LEAST_COVERED: f64 = 0.5;

/// From which share of a moment's answers on a place has which shade, the palest first.
const SHADES: [f64; 6] = [0.0, 0.002, 0.02, 0.1, 0.3, 0.6];

/// One run, with the other repeats of the same beside it.
pub struct Course<'a> {
    /// Above the picture.
    pub title: String,
    /// The one that is shown in full.
    pub run: &'a Timeline,
    /// Repeats: their rates are thin lines.
    pub others: Vec<&'a Timeline>,
    /// What the measured window is called: `measured`, `steady window`.
    pub window: &'static str,
}

/// The pictures of runs that belong together, so wide and all with the same scales; those in which nothing was answered
/// are left out.
pub fn panels(courses: &[Course<'_>], width: f64) -> Vec<Panel> {
    let courses: Vec<&Course<'_>> = courses.iter().filter(|course| is_drawable(course.run)).collect();
    let all = || courses.iter().flat_map(|course| std::iter::once(&course.run).chain(&course.others));
    let measured = |run: &Timeline| run.measured_from_ns.min(run.end_ns) as f64;
    let begin = all().map(|run| -measured(run)).fold(0.0, f64::min);
    let end = all().map(|run| run.end_ns as f64 - measured(run)).fold(1.0, f64::max);
    let occupied = || courses.iter().flat_map(|course| course.run.slots.iter().flat_map(Slot::buckets));
    let (Some(least), Some(most)) =
        (occupied().map(|(bucket, _)| bucket).min(), occupied().map(|(bucket, _)| bucket).max())
    else {
        return Vec::new();
    };
    let shown = courses.iter().flat_map(|course| rates(course.run));
    let fastest = shown.filter_map(|(.., rate)| rate).fold(0.0, f64::max);
    let scales = Scales {
        width,
        time: Axis::between(LEFT, width - MARGIN, begin / 1e9, end / 1e9),
        latency: Axis::logarithmic(
            TOP + HEAT,
            TOP,
            bucket_start(least) as f64,
            bucket_start(most + 1) as f64,
        ),
        // Repeats that leave it are broken off.
        rate: Axis::linear(RATE_TOP + RATE, RATE_TOP, fastest * 1.15),
    };
    courses.iter().map(|course| scales.draw(course)).collect()
}

fn is_drawable(run: &Timeline) -> bool {
    run.slot_ns > 0 && run.end_ns > 0 && run.slots.iter().any(|slot| slot.ios() > 0)
}

/// Each slot's begin and end in seconds from the beginning of the measured time, and its rate where it is known.
fn rates(run: &Timeline) -> impl Iterator<Item = (f64, f64, Option<f64>)> {
    run.slots.iter().enumerate().map(|(number, slot)| {
        let (from, to) = run.span(number);
        let length = to.saturating_sub(from) as f64;
        let covered = length >= LEAST_COVERED * run.slot_ns as f64 && length > 0.0;
        let at = |nanoseconds: u64| (nanoseconds as f64 - run.measured_from_ns.min(run.end_ns) as f64) / 1e9;
        (at(from), at(to), covered.then(|| slot.ios() as f64 * 1e9 / length))
    })
}

struct Scales {
    width: f64,
    time: Axis,
    latency: Axis,
    rate: Axis,
}

impl Scales {
    fn draw(&self, course: &Course<'_>) -> Panel {
        let mut drawing = Drawing::wide(self.width);
        self.frame(&mut drawing);
        self.heat(&mut drawing, course.run);
        for other in &course.others {
            self.line(&mut drawing, "repeat", other);
        }
        self.line(&mut drawing, "rate", course.run);
        self.window(&mut drawing, course);
        let svg = drawing.close(&format!("Latency and I/Os per second over time: {}", course.title));
        Panel { title: clipped(&course.title, 40), svg }
    }

    fn frame(&self, drawing: &mut Drawing) {
        let (bottom, right) = (RATE_TOP + RATE, self.width - MARGIN);
        for &tick in self.latency.ticks() {
            let y = self.latency.place(tick);
            drawing.line("grid", (LEFT, y), (right, y));
            drawing.text("tick", LEFT - 6.0, y + 3.5, Anchor::End, &tick_duration(tick));
        }
        // Few ticks: the strip is low.
        for &tick in self.rate.ticks().iter().step_by(if self.rate.ticks().len() > 3 { 2 } else { 1 }) {
            let y = self.rate.place(tick);
            drawing.line("grid", (LEFT, y), (right, y));
            drawing.text("tick", LEFT - 6.0, y + 3.5, Anchor::End, &tick_count(tick));
        }
        for &tick in self.time.ticks() {
            let x = self.time.place(tick);
            drawing.line("grid", (x, TOP), (x, bottom));
            let anchor = if x > right - 14.0 { Anchor::End } else { Anchor::Middle };
            drawing.text("tick", x, bottom + 14.0, anchor, &seconds(tick));
        }
    }

    fn heat(&self, drawing: &mut Drawing, run: &Timeline) {
        let mut shades: [Vec<[f64; 4]>; SHADES.len()] = Default::default();
        for (slot, (from, to, _)) in run.slots.iter().zip(rates(run)) {
            let (left, right) = (self.time.place(from), self.time.place(to));
            let ios = slot.ios() as f64;
            for (bucket, count) in slot.buckets() {
                let share = count as f64 / ios;
                let shade = SHADES.iter().rposition(|least| share >= *least).unwrap_or(0);
                let top = self.latency.place(bucket_start(bucket + 1) as f64);
                let bottom = self.latency.place(bucket_start(bucket) as f64);
                shades[shade].push([left, top, right - left, bottom - top]);
            }
        }
        for (shade, tiles) in shades.iter().enumerate() {
            drawing.mosaic(&format!("heat{shade}"), tiles);
        }
    }

    fn line(&self, drawing: &mut Drawing, class: &str, run: &Timeline) {
        let steps = rates(run).flat_map(|(from, to, rate)| {
            let rate = rate.filter(|rate| !self.rate.is_beyond(*rate));
            let place = |at: f64| rate.map(|rate| (self.time.place(at), self.rate.place(rate)));
            [place(from), place(to)]
        });
        drawing.path(class, steps);
    }

    /// What came before the measured time is veiled; a bracket stands over the rest.
    fn window(&self, drawing: &mut Drawing, course: &Course<'_>) {
        let run = course.run;
        let measured = run.measured_from_ns.min(run.end_ns) as f64;
        let (from, to) = (self.time.place(0.0), self.time.place((run.end_ns as f64 - measured) / 1e9));
        let begin = self.time.place(-measured / 1e9);
        drawing.rect("veil", begin, TOP, from - begin, RATE_TOP + RATE - TOP);
        let y = TOP - 6.0;
        drawing.line("bracket", (from, y), (to, y));
        drawing.line("bracket", (from, y - 3.0), (from, y + 3.0));
        drawing.line("bracket", (to, y - 3.0), (to, y + 3.0));
        drawing.text("aside", from + 5.0, y - 5.0, Anchor::Start, course.window);
        drawing.text("aside", LEFT + 4.0, RATE_TOP - 4.0, Anchor::Start, "I/Os per second");
    }
}

/// Seconds without digits that say nothing.
fn seconds(at: f64) -> String {
    let sign = if at < 0.0 { "−" } else { "" };
    format!("{sign}{} s", (at.abs() * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn steady(slots: usize) -> Timeline {
        Timeline {
            slot_ns: 100_000_000,
            lead_ns: 0,
            measured_from_ns: 200_000_000,
            end_ns: 100_000_000 * slots as u64,
            slots: vec![Slot(40, vec![900, 99, 1]); slots],
        }
    }

    fn course(run: &Timeline) -> Course<'_> {
        Course { title: "backing".into(), run, others: vec![run], window: "measured" }
    }

    #[test]
    fn the_window_begins_where_the_warm_up_ends() {
        let run = steady(10);
        let drawn = panels(&[course(&run)], 340.0);
        let svg = &drawn[0].svg;
        let width = (340.0 - MARGIN - LEFT) * 0.2;
        let veil = format!(r#"class="veil" x="{LEFT:.1}" y="{TOP:.1}" width="{width:.1}""#);
        assert!(svg.contains(&veil), "{veil} in {svg}");
        for text in [">measured<", ">I/Os per second<", ">0.5 s<", ">10k<", "heat0", "heat2", "heat5"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(!svg.contains("heat4"), "no place has between 30 and 60 %");
    }

    #[test]
    fn a_slot_that_is_mostly_outside_has_no_rate() {
        let run = Timeline { lead_ns: 90_000_000, ..steady(3) };
        let known: Vec<bool> = rates(&run).map(|(.., rate)| rate.is_some()).collect();
        assert_eq!(known, [false, true, true]);
        let rate = rates(&run).nth(1).unwrap().2.unwrap();
        assert!((rate - 10_000.0).abs() < 1e-6);
    }

    #[test]
    fn nothing_draws_nothing() {
        assert!(panels(&[], 340.0).is_empty());
        assert!(panels(&[course(&Timeline::default())], 340.0).is_empty());
        let idle = Timeline { slots: vec![Slot::default(); 4], ..steady(4) };
        assert!(panels(&[course(&idle)], 340.0).is_empty());
    }

    proptest! {
        #[test]
        fn any_timeline_can_be_drawn(
            numbers in prop::array::uniform4(any::<u64>()),
            slots in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u64>(), 0..9)), 0..40),
            near in any::<bool>(),
        ) {
            let [slot_ns, lead_ns, measured_from_ns, end_ns] = numbers;
            let slots = slots.into_iter().map(|(first, counts)| Slot(if near { first % 120 } else { first }, counts));
            let run = Timeline { slot_ns, lead_ns, measured_from_ns, end_ns, slots: slots.collect() };
            for panel in panels(&[course(&run)], 340.0) {
                prop_assert!(super::super::svg::is_drawable(&panel.svg), "{}", panel.svg);
            }
        }
    }
}
