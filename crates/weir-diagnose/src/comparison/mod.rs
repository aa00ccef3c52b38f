//! Medians and spread over the repeats, and the step from layer to layer.
//!
//! Each cell is judged by one quantity: at queue depth 1 by the median latency, since one I/O after the other shows what each
//! waits for; at greater depth by IOPS, since a full queue shows the capacity of the path. If some row lacks its median
//! latency, IOPS serve at depth 1 too. A *step* is the difference between neighbouring layers on the I/O's path; a layer that
//! was not measured in a cell is stepped over. Alternatives are compared with the layer in whose place they stand.
//! [`crate::stats`] judges a difference, over all comparisons together.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cell::Cell;
use crate::check::{self, Kind};
use crate::result::{Diagnosis, Measurement, Position, RunOutcome};
use crate::stats::{self, Comparison, FALSE_DISCOVERIES, LogSample, PRACTICAL_MARGIN};

/// A single run has no scatter to judge by. A factor below this is not made anything of; from it on, a loss is
/// worth a suspicion.
pub const SUSPICIOUS_FACTOR: f64 = 2.0;

/// Median and range of one quantity over the repeats of one cell at one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle value; the mean of the two middle ones when their number is even.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl Spread {
    /// `None` without values.
    fn of(values: impl Iterator<Item = f64>) -> Option<Spread> {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], values[middle])
        } else {
            values[middle]
        };
        Some(Spread { median, least, most })
    }

    /// The greater distance from the median to an end of the range, as a share of the median.
    #[must_use]
    pub fn relative(&self) -> f64 {
        (self.most - self.median).max(self.median - self.least) / self.median
    }
}

/// The figures of the usable repeats of one cell at one layer. A figure that any repeat lacks is absent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Place in [`Diagnosis::layers`].
    pub layer: usize,
    /// The load.
    pub cell: Cell,
    /// Repeats that passed the checks; at least 1.
    pub repeats: usize,
    /// I/Os per second.
    pub iops: Spread,
    /// MiB per second: IOPS times block size.
    #[serde(rename = "mib_per_second")]
    pub mib_per_s: Spread,
    /// Mean latency, in nanoseconds.
    pub mean_ns: Option<Spread>,
    /// Median latency, in nanoseconds.
    pub p50_ns: Option<Spread>,
    /// 99th percentile of the latency, in nanoseconds.
    pub p99_ns: Option<Spread>,
    /// 99.9th percentile of the latency, in nanoseconds.
    pub p99_9_ns: Option<Spread>,
    /// The generator's CPU time per I/O, in nanoseconds.
    pub cpu_ns_per_io: Option<Spread>,
    /// The share of the time that the generator's threads were on a processor, 0 to 1.
    pub cpu_share: Option<Spread>,
    /// Each repeat's IOPS and, if all have it, median latency: the data of comparisons.
    #[serde(skip)]
    iops_of_repeats: Vec<f64>,
    #[serde(skip)]
    p50_of_repeats: Vec<f64>,
}

/// Why a row is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The layer cannot run the cell.
    Skipped,
    /// The run failed.
    Failed,
    /// The row fails a check.
    Objection(Kind),
}

/// A row that no finding rests on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Unused {
    /// Place in [`Diagnosis::rows`].
    pub row: usize,
    /// Why.
    pub why: Why,
    /// In words.
    pub reason: String,
    /// IOPS with which the row would agree with itself; see [`check::Objection`].
    pub proposed_iops: Option<f64>,
}

/// The quantity by which a cell is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Median latency, in nanoseconds: less is better.
    #[serde(rename = "latency_ns")]
    Latency,
    /// I/Os per second: more is better.
    Iops,
}

/// The judgement of a difference, as far as the repeats support it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// Worse by more than the practical margin.
    Slower,
    /// Better by more than the practical margin.
    Faster,
    /// Within the practical margin.
    Same,
    /// Neither is shown.
    Inconclusive,
    /// A side has one usable repeat: there is no scatter to judge by.
    Untested,
}

/// Ends of an interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// From one layer to another in one cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The load.
    pub cell: Cell,
    /// The compared quantity.
    pub quantity: Quantity,
    /// Place in [`Diagnosis::layers`] of the lower layer, or of the layer in whose place the alternative stands.
    pub from: usize,
    /// Place of the upper layer, or of the alternative.
    pub to: usize,
    /// Layers between the two that have no usable row in this cell.
    pub skipped: Vec<usize>,
    /// The quantity at `from`.
    pub before: Spread,
    /// The quantity at `to`.
    pub after: Spread,
    /// Usable repeats on the side that has fewer.
    pub repeats: usize,
    /// `to` over `from`: of the geometric means where there are repeats.
    pub ratio: f64,
    /// The ratio's interval at [`stats::CONFIDENCE`]; absent with a single repeat.
    pub interval: Option<Interval>,
    /// The chance of such repeats if the ratio were within the margin, adjusted for the number of comparisons.
    pub p_different: Option<f64>,
    /// The chance of such repeats if the ratio were not within the margin, adjusted likewise.
    pub p_same: Option<f64>,
    /// Repeats on each side that would tell, where the ones at hand do not.
    pub repeats_needed: Option<u32>,
    /// The judgement.
    pub judgement: Judgement,
    #[serde(skip)]
    comparison: Option<Comparison>,
}

impl Difference {
    /// `to` minus `from`, medians, in the quantity's unit.
    #[must_use]
    pub fn change(&self) -> f64 {
        self.after.median - self.before.median
    }

    /// The factor by which `to` is worse, whatever the quantity: above 1 is a loss.
    #[must_use]
    pub fn loss_factor(&self) -> f64 {
        match self.quantity {
            Quantity::Latency => self.ratio,
            Quantity::Iops => self.ratio.recip(),
        }
    }

    /// The loss that the interval vouches for: the end of it that is nearer to no loss.
    #[must_use]
    pub fn assured_loss_factor(&self) -> Option<f64> {
        let interval = self.interval?;
        Some(match self.quantity {
            Quantity::Latency => interval.low,
            Quantity::Iops => interval.high.recip(),
        })
    }

    /// A loss that may be named: shown by the repeats, or so great that a single run raises the suspicion.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        self.judgement == Judgement::Slower
            || self.judgement == Judgement::Untested && self.loss_factor() >= SUSPICIOUS_FACTOR
    }

    /// No loss beyond the margin: shown by the repeats or, with a single run on a side, as far as its numbers go.
    #[must_use]
    pub fn seems_even(&self) -> bool {
        match self.judgement {
            Judgement::Same => true,
            Judgement::Untested => self.ratio.ln().abs() <= PRACTICAL_MARGIN.ln_1p(),
            _ => false,
        }
    }
}

/// Comparisons of layers from the rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparisons {
    /// One per layer and cell with at least one usable row, in the order of cells, then layers.
    pub points: Vec<Point>,
    /// Between neighbours on the path, in the order of cells, then from the bottom.
    pub steps: Vec<Difference>,
    /// From a layer on the path to each of its alternatives.
    pub alternatives: Vec<Difference>,
    /// From the lowest to the highest layer on the path in each cell with more than one step.
    pub whole_path: Vec<Difference>,
    /// Rows that are not used, with the reason.
    pub unused: Vec<Unused>,
}

impl Comparisons {
    /// The point of a layer and a cell.
    #[must_use]
    pub fn point(&self, layer: usize, cell: &Cell) -> Option<&Point> {
        self.points.iter().find(|point| point.layer == layer && point.cell == *cell)
    }

    /// Whether a row of that layer and cell failed a check and none was left: there is a number, and it is not used.
    #[must_use]
    pub fn is_rejected(&self, diagnosis: &Diagnosis, layer: usize, cell: &Cell) -> bool {
        let here = |row: &crate::Row| row.cell == *cell && row.layer == diagnosis.layers[layer].name;
        let rejected = |unused: &&Unused| matches!(unused.why, Why::Objection(_));
        self.point(layer, cell).is_none()
            && self.unused.iter().filter(rejected).any(|unused| here(&diagnosis.rows[unused.row]))
    }

    /// The quantity by which a cell is judged.
    #[must_use]
    pub fn quantity(&self, cell: &Cell) -> Quantity {
        quantity(&self.points, cell)
    }

    /// Every comparison, in the order in which they are judged.
    pub fn comparisons(&self) -> impl Iterator<Item = &Difference> {
        self.steps.iter().chain(&self.alternatives).chain(&self.whole_path)
    }

    /// The step that ends at a layer, or the comparison of an alternative with the layer in whose place it stands.
    #[must_use]
    pub fn difference_to(&self, layer: usize, cell: &Cell) -> Option<&Difference> {
        let mut all = self.steps.iter().chain(&self.alternatives);
        all.find(|difference| difference.to == layer && difference.cell == *cell)
    }
}

/// Compares the layers of a measurement, complete or not.
#[must_use]
pub fn compare(diagnosis: &Diagnosis) -> Comparisons {
    let mut unused = Vec::new();
    let usable = usable_rows(diagnosis, &mut unused);
    let points = points(diagnosis, &usable);
    let mut compared = Comparisons { points, unused, ..Comparisons::default() };
    let chain: Vec<usize> = diagnosis.chain().map(|(index, _)| index).collect();
    for cell in &diagnosis.cells {
        let steps = steps(&compared, cell, &chain);
        if let [first, .., last] = steps.as_slice() {
            compared.whole_path.extend(between(&compared, cell, first.from, last.to, Vec::new()));
        }
        let beside = alternatives(diagnosis, &compared, cell);
        compared.steps.extend(steps);
        compared.alternatives.extend(beside);
    }
    judge(&mut compared);
    compared
}

type Usable<'a> = (usize, Cell, &'a Measurement);

fn usable_rows<'a>(diagnosis: &'a Diagnosis, unused: &mut Vec<Unused>) -> Vec<Usable<'a>> {
    let mut usable = Vec::with_capacity(diagnosis.rows.len());
    for (row, run) in diagnosis.rows.iter().enumerate() {
        let without = |why, reason| Unused { row, why, reason, proposed_iops: None };
        unused.push(match &run.outcome {
            RunOutcome::Skipped(reason) => without(Why::Skipped, format!("not run: {reason}")),
            RunOutcome::Failed(reason) => without(Why::Failed, format!("failed: {reason}")),
            RunOutcome::Measured(measurement) => match check::objection(&run.cell, measurement) {
                Some(objection) => Unused {
                    proposed_iops: objection.proposed_iops,
                    ..without(Why::Objection(objection.kind), objection.reason)
                },
                None => {
                    let layer = diagnosis.layer_index(&run.layer);
                    usable.extend(layer.map(|layer| (layer, run.cell, measurement)));
                    continue;
                }
            },
        });
    }
    usable
}

fn points(diagnosis: &Diagnosis, usable: &[Usable<'_>]) -> Vec<Point> {
    let mut rows: BTreeMap<(Cell, usize), Vec<&Measurement>> = BTreeMap::new();
    for (layer, cell, row) in usable {
        rows.entry((*cell, *layer)).or_default().push(row);
    }
    let places =
        diagnosis.all_cells().flat_map(|cell| (0..diagnosis.layers.len()).map(move |layer| (cell, layer)));
    places.filter_map(|(cell, layer)| point(layer, cell, rows.get(&(*cell, layer))?)).collect()
}

fn point(layer: usize, cell: &Cell, rows: &[&Measurement]) -> Option<Point> {
    // All repeats know it, or it is not known.
    let known = |value: &dyn Fn(&Measurement) -> Option<f64>| -> Vec<f64> {
        rows.iter().map(|row| value(row)).collect::<Option<Vec<f64>>>().unwrap_or_default()
    };
    let spread = |value: &dyn Fn(&Measurement) -> Option<f64>| Spread::of(known(value).into_iter());
    let iops = known(&|row| Some(row.iops));
    let mib = f64::from(cell.shape.block_bytes) / f64::from(1 << 20);
    Some(Point {
        layer,
        cell: *cell,
        repeats: rows.len(),
        iops: Spread::of(iops.iter().copied())?,
        mib_per_s: Spread::of(iops.iter().map(|iops| iops * mib))?,
        mean_ns: spread(&|row| row.mean_ns),
        p50_ns: spread(&|row| row.p50_ns),
        p99_ns: spread(&|row| row.p99_ns),
        p99_9_ns: spread(&|row| row.p99_9_ns),
        cpu_ns_per_io: spread(&|row| Some(row.cpu_seconds? * 1e9 / row.ios.filter(|ios| *ios > 0)? as f64)),
        cpu_share: spread(&|row| Some(row.cpu_seconds? / row.runtime_seconds? / f64::from(cell.threads))),
        iops_of_repeats: iops,
        p50_of_repeats: known(&|row| row.p50_ns),
    })
}

impl Point {
    /// The relative precision of a quantity of the cell, from the repeats: 0.1 means "within about 10 %" at
    /// [`stats::CONFIDENCE`]. `None` with a single repeat.
    #[must_use]
    pub fn half_width(&self, quantity: Quantity) -> Option<f64> {
        let values = match quantity {
            Quantity::Latency => &self.p50_of_repeats,
            Quantity::Iops => &self.iops_of_repeats,
        };
        LogSample::of(values).map(|sample| sample.half_width())
    }

    /// The standard deviation of the logarithm of the repeats' IOPS: about the share by which they differ. `None` with a
    /// single repeat.
    #[must_use]
    pub fn deviation(&self) -> Option<f64> {
        LogSample::of(&self.iops_of_repeats).map(|sample| sample.deviation())
    }
}

fn quantity(points: &[Point], cell: &Cell) -> Quantity {
    let knows = |point: &Point| point.cell != *cell || point.p50_ns.is_some();
    if cell.queue_depth == 1 && points.iter().all(knows) { Quantity::Latency } else { Quantity::Iops }
}

fn steps(compared: &Comparisons, cell: &Cell, chain: &[usize]) -> Vec<Difference> {
    let mut steps = Vec::new();
    let mut below: Option<usize> = None;
    let mut skipped = Vec::new();
    for &layer in chain {
        if compared.point(layer, cell).is_none() {
            skipped.push(layer);
            continue;
        }
        let passed = std::mem::take(&mut skipped);
        steps.extend(below.and_then(|below| between(compared, cell, below, layer, passed)));
        below = Some(layer);
    }
    steps
}

fn alternatives(diagnosis: &Diagnosis, compared: &Comparisons, cell: &Cell) -> Vec<Difference> {
    let of_layer = |(index, layer): (usize, &crate::LayerEntry)| {
        let Position::AlternativeTo(name) = &layer.position else { return None };
        between(compared, cell, diagnosis.layer_index(name)?, index, Vec::new())
    };
    diagnosis.layers.iter().enumerate().filter_map(of_layer).collect()
}

/// `None` where a side has no usable row.
fn between(
    compared: &Comparisons,
    cell: &Cell,
    from: usize,
    to: usize,
    skipped: Vec<usize>,
) -> Option<Difference> {
    let (lower, upper) = (compared.point(from, cell)?, compared.point(to, cell)?);
    let quantity = compared.quantity(cell);
    let values = |point: &Point| match quantity {
        Quantity::Latency => (point.p50_ns, LogSample::of(&point.p50_of_repeats)),
        Quantity::Iops => (Some(point.iops), LogSample::of(&point.iops_of_repeats)),
    };
    let ((before, sample_before), (after, sample_after)) = (values(lower), values(upper));
    let (before, after) = (before?, after?);
    let comparison = sample_before.zip(sample_after).map(|(before, after)| stats::compare(&before, &after));
    let interval = comparison.map(|comparison| comparison.interval());
    Some(Difference {
        cell: *cell,
        quantity,
        from,
        to,
        skipped,
        before,
        after,
        repeats: lower.repeats.min(upper.repeats),
        ratio: comparison.map_or(after.median / before.median, |comparison| comparison.ratio()),
        interval: interval.map(|(low, high)| Interval { low, high }),
        p_different: None,
        p_same: None,
        repeats_needed: None,
        judgement: Judgement::Untested,
        comparison,
    })
}

/// Judges all comparisons that have repeats, as one family: the more is looked at, the more it takes.
fn judge(compared: &mut Comparisons) {
    let all = compared.steps.iter_mut().chain(&mut compared.alternatives).chain(&mut compared.whole_path);
    let mut tested: Vec<(&mut Difference, Comparison)> = all
        .filter_map(|difference| difference.comparison.map(|comparison| (difference, comparison)))
        .collect();
    let adjusted = |p: &dyn Fn(&Comparison) -> f64| {
        let p_values: Vec<f64> = tested.iter().map(|(_, comparison)| p(comparison)).collect();
        stats::benjamini_hochberg(&p_values)
    };
    let different = adjusted(&|comparison| comparison.p_beyond(PRACTICAL_MARGIN));
    let same = adjusted(&|comparison| comparison.p_within(PRACTICAL_MARGIN));
    for ((difference, comparison), (p_different, p_same)) in
        tested.iter_mut().zip(different.into_iter().zip(same))
    {
        difference.p_different = Some(p_different);
        difference.p_same = Some(p_same);
        difference.judgement = if p_different <= FALSE_DISCOVERIES {
            if difference.loss_factor() > 1.0 { Judgement::Slower } else { Judgement::Faster }
        } else if p_same <= FALSE_DISCOVERIES {
            Judgement::Same
        } else {
            difference.repeats_needed = comparison.repeats_needed(PRACTICAL_MARGIN);
            Judgement::Inconclusive
        };
    }
}

#[cfg(test)]
mod tests;
