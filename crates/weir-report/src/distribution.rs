//! The latency of layers as cumulative distributions: the share of requests answered within each time.
//!
//! All usable repeats of a layer in a cell together: histograms are added, percentiles are never averaged. The scale of shares
//! gives each nine the same room, to show the tail.

use crate::axis::Axis;
use crate::format;
use crate::panel::{Panel, clipped, tick_duration};
use crate::svg::{Anchor, Drawing, WIDTH};

/// A histogram of one run: the upper edge of each bucket in nanoseconds, rising, and the requests in it.
pub type Buckets = [(u64, u64)];

/// Maximum number of lines in one chart: that of distinguishable colours and dashes.
pub const MOST_LINES: usize = 6;

const LEFT: f64 = 46.0;
const RIGHT: f64 = WIDTH - 8.0;
const TOP: f64 = 8.0;
const HEIGHT: f64 = 190.0;

/// Minimum number of requests in the slowest share shown: with fewer, a line would show single requests.
const FEWEST_BEYOND: f64 = 5.0;

/// A name, and its latencies in nanoseconds.
#[derive(Debug)]
pub struct Series<'a> {
    /// The subject of the line.
    pub name: &'a str,
    /// All repeats.
    pub latencies: Distribution,
}

/// Requests by latency, of several runs together.
#[derive(Debug, Default)]
pub struct Distribution {
    runs: Vec<Vec<(u64, u64)>>,
    count: f64,
}

impl Distribution {
    /// The distribution of these runs. Within a bucket, latencies are assumed to be uniformly distributed.
    #[must_use]
    pub fn of<'a>(runs: impl Iterator<Item = &'a Buckets>) -> Distribution {
        let requests = |run: &Buckets| run.iter().map(|(_, requests)| *requests as f64).sum::<f64>();
        let runs: Vec<Vec<(u64, u64)>> = runs.filter(|run| requests(run) > 0.0).map(<[_]>::to_vec).collect();
        let count = runs.iter().map(|run| requests(run)).sum();
        Distribution { runs, count }
    }

    fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The share of the requests that took at most `latency`.
    fn share_within(&self, latency: f64) -> f64 {
        self.runs.iter().map(|run| within(run, latency)).sum::<f64>() / self.count
    }

    /// Edges of all buckets in rising order, in nanoseconds.
    fn edges(&self) -> Vec<f64> {
        let edges = self.runs.iter().flat_map(|run| run.iter().map(|bucket| bucket.0 as f64));
        let mut edges: Vec<f64> = edges.collect();
        edges.sort_by(f64::total_cmp);
        edges.dedup();
        edges
    }

    /// The latency that this share of the requests does not exceed, in nanoseconds.
    #[must_use]
    pub fn at(&self, share: f64) -> Option<f64> {
        let edges = self.edges();
        let index = edges.partition_point(|edge| self.share_within(*edge) < share - 1e-12);
        edges.get(index).or(edges.last()).copied()
    }
}

/// Requests of one run up to a latency.
fn within(run: &Buckets, latency: f64) -> f64 {
    let (mut below, mut edge) = (0.0, 0.0);
    for &(end, count) in run {
        let (end, count) = (end as f64, count as f64);
        if latency < end {
            // The first bucket is as wide as the histogram's: one percent.
            let start = if edge > 0.0 { edge } else { end * 0.99 };
            let part = (latency - start) / (end - start).max(f64::MIN_POSITIVE);
            return below + count * part.clamp(0.0, 1.0);
        }
        (below, edge) = (below + count, end);
    }
    below
}

/// Several distributions in one picture, with their percentiles below it.
#[must_use]
pub fn panel(title: &str, series: &[Series<'_>]) -> Option<Panel> {
    let series: Vec<&Series<'_>> =
        series.iter().filter(|one| !one.latencies.is_empty()).take(MOST_LINES).collect();
    let edges: Vec<Vec<f64>> = series.iter().map(|one| one.latencies.edges()).collect();
    let count = series.iter().map(|one| one.latencies.count).fold(0.0, f64::max);
    let nines = (count / FEWEST_BEYOND).max(10.0).log10().floor().min(6.0) as u32;
    let top = 1.0 - 0.1_f64.powi(nines as i32);
    let least = edges.iter().filter_map(|edges| edges.first()).copied().fold(f64::INFINITY, f64::min);
    let most = series.iter().filter_map(|one| one.latencies.at(top)).fold(0.0, f64::max);
    if !least.is_finite() {
        return None;
    }
    let (x, y) = (
        Axis::logarithmic(LEFT, RIGHT, least.max(1.0) * 0.9, most.max(1.0) * 1.1),
        Axis::tail(TOP + HEIGHT, TOP, nines),
    );
    let mut drawing = Drawing::default();
    frame(&mut drawing, &x, &y, nines);
    for (line, (one, edges)) in series.iter().zip(&edges).enumerate() {
        // The line ends at the top of the chart.
        let end = one.latencies.at(top).unwrap_or(most);
        let step = |latency: &f64| (x.at(*latency), y.at(one.latencies.share_within(*latency)));
        let start = edges.first().map(|first| (x.at(first * 0.99), y.at(0.0)));
        let shown = edges.iter().take_while(|edge| **edge <= end);
        let places = start.into_iter().chain(shown.map(step)).map(Some);
        drawing.path(&format!("line s{line}"), places);
    }
    legend(&mut drawing, &series, nines);
    Some(Panel {
        title: title.to_owned(),
        svg: drawing.close(&format!("Distribution of the latency: {title}")),
    })
}

fn frame(drawing: &mut Drawing, x: &Axis, y: &Axis, nines: u32) {
    let bottom = TOP + HEIGHT;
    for &tick in x.ticks() {
        let place = x.at(tick);
        drawing.line("grid", (place, TOP), (place, bottom));
        drawing.text("tick", place, bottom + 14.0, Anchor::Middle, &tick_duration(tick));
    }
    for &tick in y.ticks() {
        let place = y.at(tick);
        drawing.line("grid", (LEFT, place), (RIGHT, place));
        let digits = nines.saturating_sub(2) as usize;
        let label = format!("{:.digits$}", tick * 100.0);
        let label =
            if label.contains('.') { label.trim_end_matches('0').trim_end_matches('.') } else { &label };
        drawing.text("tick", LEFT - 6.0, place + 3.5, Anchor::End, &format!("{label} %"));
    }
}

/// One row for each line: its dash, name and percentiles.
fn legend(drawing: &mut Drawing, series: &[&Series<'_>], nines: u32) {
    let columns = [(0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"), (0.9999, "p99.99")];
    let columns: Vec<_> = columns.into_iter().take(1 + nines.clamp(2, 4) as usize - 1).collect();
    let place = |column: usize| WIDTH - 62.0 * (columns.len() - 1 - column) as f64;
    let head = TOP + HEIGHT + 38.0;
    for (column, (_, name)) in columns.iter().enumerate() {
        drawing.text("tick", place(column), head, Anchor::End, name);
    }
    for (line, one) in series.iter().enumerate() {
        let y = head + 17.0 * (line + 1) as f64;
        drawing.path(&format!("line s{line}"), [Some((0.0, y - 4.0)), Some((26.0, y - 4.0))].into_iter());
        drawing.text("name", 34.0, y, Anchor::Start, &clipped(one.name, 24));
        for (column, (share, _)) in columns.iter().enumerate() {
            if let Some(latency) = one.latencies.at(*share) {
                drawing.text("number", place(column), y, Anchor::End, &format::duration(latency));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn repeats_add_up_and_percentiles_are_of_all_of_them() {
        let (fast, slow) = ([(100, 900)], [(1000, 90), (5000, 10)]);
        let both = Distribution::of([&fast[..], &slow].into_iter());
        assert!((both.share_within(100.0) - 0.9).abs() < 1e-9);
        assert!((both.share_within(1000.0) - 0.99).abs() < 1e-9);
        assert!((both.share_within(3000.0) - 0.995).abs() < 1e-9, "evenly within a bucket");
        assert_eq!((both.at(0.5), both.at(0.99), both.at(1.0)), (Some(100.0), Some(1000.0), Some(5000.0)));
        assert_eq!(Distribution::default().at(0.5), None);
    }

    #[test]
    fn a_line_climbs_a_nine_at_a_time() {
        let runs = [(10_000, 90_000), (100_000, 9_000), (1_000_000, 900), (10_000_000, 100)];
        let series = Series { name: "backing", latencies: Distribution::of([&runs[..]].into_iter()) };
        let panel = panel("4K", &[series]).unwrap();
        // 100,000 requests: four nines have five beyond them. 90 % stand at a quarter of the height, 99 % at a half.
        let quarter = TOP + HEIGHT * 0.75;
        assert!(panel.svg.contains(&format!(" {quarter:.1}L")), "{}", panel.svg);
        assert!(panel.svg.contains(&format!(" {:.1}L", TOP + HEIGHT * 0.5)), "{}", panel.svg);
        for text in ["99.99 %", "p99.9", "1.00 ms", ">backing<"] {
            assert!(panel.svg.contains(text), "{text} in {}", panel.svg);
        }
    }

    #[test]
    fn nothing_draws_nothing() {
        assert!(panel("x", &[]).is_none());
        let empty = Series { name: "x", latencies: Distribution::of([&[][..]].into_iter()) };
        assert!(panel("x", &[empty]).is_none());
    }

    proptest! {
        #[test]
        fn any_buckets_can_be_drawn(
            runs in prop::collection::vec(prop::collection::vec((any::<u64>(), 0u64..1 << 50), 0..20), 0..9),
        ) {
            let series: Vec<Series<'_>> =
                runs.iter().map(|run| Series { name: "x", latencies: Distribution::of([&run[..]].into_iter()) }).collect();
            if let Some(panel) = panel("x", &series) {
                prop_assert!(crate::svg::is_drawable(&panel.svg), "{}", panel.svg);
            }
        }
    }
}
