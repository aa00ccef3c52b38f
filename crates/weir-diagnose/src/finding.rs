//! Medians and spread over the repeats, and the step from layer to layer.
//!
//! Each cell is judged by one quantity: at queue depth 1 by the median latency, since one I/O after the
//! other shows what each waits for; at greater depth by IOPS, since a full queue shows what the way can
//! carry. A *step* is the difference between neighbouring layers of the I/O's way; a layer that was not
//! measured in a cell is stepped over. Alternatives are compared with the layer in whose place they stand.

use serde::Serialize;

use crate::cell::Cell;
use crate::check;
use crate::result::{Diagnosis, Measurement, Position, RunOutcome};
use crate::verdict::{self, Verdict};

/// Two medians closer than this share are not worth telling apart, whatever the repeats say.
pub const PRACTICAL_MARGIN: f64 = 0.05;

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

    fn overlaps(&self, other: &Spread) -> bool {
        self.least <= other.most && other.least <= self.most
    }
}

/// What the usable repeats of one cell at one layer say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Place in [`Diagnosis::layers`].
    pub layer: usize,
    /// The load.
    pub cell: Cell,
    /// Repeats that passed the checks; at least 1.
    pub repeats: usize,
    /// I/Os per second.
    pub iops: Spread,
    /// MiB per second.
    pub mib_per_s: Spread,
    /// Mean latency, in nanoseconds.
    pub mean_ns: Spread,
    /// Median latency, in nanoseconds.
    pub p50_ns: Spread,
    /// 99th percentile of the latency, in nanoseconds.
    pub p99_ns: Spread,
    /// 99.9th percentile of the latency, in nanoseconds.
    pub p99_9_ns: Spread,
    /// The generator's CPU time per I/O, in nanoseconds; absent when some repeat does not know it.
    pub cpu_ns_per_io: Option<Spread>,
}

/// A row that no finding rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unused {
    /// Place in [`Diagnosis::rows`].
    pub row: usize,
    /// Why.
    pub reason: String,
}

/// What a cell is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Median latency, in nanoseconds: less is better.
    Latency,
    /// I/Os per second: more is better.
    Iops,
}

impl Quantity {
    /// The quantity for a cell: latency at queue depth 1, IOPS above.
    #[must_use]
    pub fn of(cell: &Cell) -> Quantity {
        if cell.queue_depth == 1 { Quantity::Latency } else { Quantity::Iops }
    }
}

/// What the repeats support saying about a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// Worse: the ranges are apart and the medians differ by more than the practical margin.
    Cost,
    /// Better, in the same sense.
    Gain,
    /// The ranges over the repeats overlap.
    NotDistinguishable,
    /// The ranges are apart, but the medians differ by no more than the practical margin.
    TooSmall,
    /// A side has one usable repeat: there is no spread to judge by.
    OneRepeat,
}

/// From one layer to another in one cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The load.
    pub cell: Cell,
    /// What is compared.
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
    /// What may be said.
    pub judgement: Judgement,
}

impl Difference {
    /// `to` minus `from`, in the quantity's unit.
    #[must_use]
    pub fn change(&self) -> f64 {
        self.after.median - self.before.median
    }

    /// `to` over `from`.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.after.median / self.before.median
    }

    /// How many times worse `to` is, whatever the quantity: above 1 is a loss.
    #[must_use]
    pub fn loss_factor(&self) -> f64 {
        match self.quantity {
            Quantity::Latency => self.ratio(),
            Quantity::Iops => self.ratio().recip(),
        }
    }
}

/// Everything that follows from the rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Findings {
    /// One per layer and cell with at least one usable row, in the order of cells, then layers.
    pub points: Vec<Point>,
    /// Between neighbours on the way, in the order of cells, then from the bottom.
    pub steps: Vec<Difference>,
    /// From a layer on the way to each of its alternatives.
    pub alternatives: Vec<Difference>,
    /// From the lowest to the highest layer on the way; empty where that is a single step.
    pub whole_way: Vec<Difference>,
    /// Rows that are not used, with the reason.
    pub unused: Vec<Unused>,
    /// What it amounts to.
    pub verdict: Verdict,
}

impl Findings {
    /// What was found for a layer and a cell.
    #[must_use]
    pub fn point(&self, layer: usize, cell: &Cell) -> Option<&Point> {
        self.points.iter().find(|point| point.layer == layer && point.cell == *cell)
    }

    /// The step that ends at a layer, or the comparison of an alternative with the layer in whose place it stands.
    #[must_use]
    pub fn difference_to(&self, layer: usize, cell: &Cell) -> Option<&Difference> {
        let mut all = self.steps.iter().chain(&self.alternatives);
        all.find(|difference| difference.to == layer && difference.cell == *cell)
    }
}

/// Draws the findings from a measurement, complete or not.
#[must_use]
pub fn find(diagnosis: &Diagnosis) -> Findings {
    let mut unused = Vec::new();
    let usable = usable_rows(diagnosis, &mut unused);
    let mut findings = Findings {
        points: points(diagnosis, &usable),
        steps: Vec::new(),
        alternatives: Vec::new(),
        whole_way: Vec::new(),
        unused,
        verdict: Verdict::default(),
    };
    let chain: Vec<usize> = diagnosis.chain().map(|(index, _)| index).collect();
    for cell in &diagnosis.cells {
        let steps = steps(&findings, cell, &chain);
        if let [first, .., last] = steps.as_slice() {
            findings.whole_way.push(whole_way(first, last, &findings, cell));
        }
        let beside = alternatives(diagnosis, &findings, cell);
        findings.steps.extend(steps);
        findings.alternatives.extend(beside);
    }
    findings.verdict = verdict::conclude(diagnosis, &findings);
    findings
}

type Usable<'a> = (usize, Cell, &'a Measurement);

fn usable_rows<'a>(diagnosis: &'a Diagnosis, unused: &mut Vec<Unused>) -> Vec<Usable<'a>> {
    let mut usable = Vec::with_capacity(diagnosis.rows.len());
    for (index, row) in diagnosis.rows.iter().enumerate() {
        let reason = match &row.outcome {
            RunOutcome::Skipped(reason) => format!("not run: {reason}"),
            RunOutcome::Failed(reason) => format!("failed: {reason}"),
            RunOutcome::Measured(measurement) => match check::objection(&row.cell, measurement) {
                Some(objection) => objection,
                None => {
                    usable.extend(
                        diagnosis.layer_index(&row.layer).map(|layer| (layer, row.cell, measurement)),
                    );
                    continue;
                }
            },
        };
        unused.push(Unused { row: index, reason });
    }
    usable
}

fn points(diagnosis: &Diagnosis, usable: &[Usable<'_>]) -> Vec<Point> {
    let places =
        diagnosis.cells.iter().flat_map(|cell| (0..diagnosis.layers.len()).map(move |layer| (cell, layer)));
    places.filter_map(|(cell, layer)| point(layer, cell, usable)).collect()
}

fn point(layer: usize, cell: &Cell, usable: &[Usable<'_>]) -> Option<Point> {
    let rows: Vec<&Measurement> =
        usable.iter().filter(|(l, c, _)| *l == layer && c == cell).map(|(_, _, row)| *row).collect();
    let spread = |value: fn(&Measurement) -> f64| Spread::of(rows.iter().map(|row| value(row)));
    Some(Point {
        layer,
        cell: *cell,
        repeats: rows.len(),
        iops: spread(|row| row.iops)?,
        mib_per_s: spread(|row| row.mib_per_s)?,
        mean_ns: spread(|row| row.mean_ns)?,
        p50_ns: spread(|row| row.p50_ns)?,
        p99_ns: spread(|row| row.p99_ns)?,
        p99_9_ns: spread(|row| row.p99_9_ns)?,
        cpu_ns_per_io: cpu_per_io(&rows),
    })
}

fn cpu_per_io(rows: &[&Measurement]) -> Option<Spread> {
    let per_io = |row: &&Measurement| row.cpu_seconds.map(|seconds| seconds * 1e9 / row.ios as f64);
    let known: Option<Vec<f64>> = rows.iter().map(per_io).collect();
    Spread::of(known?.into_iter())
}

fn steps(findings: &Findings, cell: &Cell, chain: &[usize]) -> Vec<Difference> {
    let mut steps = Vec::new();
    let mut below: Option<&Point> = None;
    let mut skipped = Vec::new();
    for &layer in chain {
        let Some(here) = findings.point(layer, cell) else {
            skipped.push(layer);
            continue;
        };
        let passed = std::mem::take(&mut skipped);
        if let Some(below) = below {
            steps.push(difference(below, here, passed));
        }
        below = Some(here);
    }
    steps
}

fn whole_way(first: &Difference, last: &Difference, findings: &Findings, cell: &Cell) -> Difference {
    let repeats = |layer| findings.point(layer, cell).map_or(0, |point| point.repeats);
    let fewest = repeats(first.from).min(repeats(last.to));
    Difference {
        from: first.from,
        skipped: Vec::new(),
        before: first.before,
        judgement: judge(first.quantity, &first.before, &last.after, fewest),
        ..last.clone()
    }
}

fn alternatives(diagnosis: &Diagnosis, findings: &Findings, cell: &Cell) -> Vec<Difference> {
    let of_layer = |(index, layer): (usize, &crate::LayerEntry)| {
        let Position::AlternativeTo(name) = &layer.position else { return None };
        let effective = findings.point(diagnosis.layer_index(name)?, cell)?;
        Some(difference(effective, findings.point(index, cell)?, Vec::new()))
    };
    diagnosis.layers.iter().enumerate().filter_map(of_layer).collect()
}

fn difference(from: &Point, to: &Point, skipped: Vec<usize>) -> Difference {
    let quantity = Quantity::of(&to.cell);
    let value = |point: &Point| match quantity {
        Quantity::Latency => point.p50_ns,
        Quantity::Iops => point.iops,
    };
    let (before, after) = (value(from), value(to));
    let judgement = judge(quantity, &before, &after, from.repeats.min(to.repeats));
    Difference { cell: to.cell, quantity, from: from.layer, to: to.layer, skipped, before, after, judgement }
}

fn judge(quantity: Quantity, before: &Spread, after: &Spread, fewest_repeats: usize) -> Judgement {
    if fewest_repeats < 2 {
        return Judgement::OneRepeat;
    }
    if before.overlaps(after) {
        return Judgement::NotDistinguishable;
    }
    let ratio = after.median / before.median;
    if ratio.max(ratio.recip()) <= 1.0 + PRACTICAL_MARGIN {
        return Judgement::TooSmall;
    }
    let worse = match quantity {
        Quantity::Latency => ratio > 1.0,
        Quantity::Iops => ratio < 1.0,
    };
    if worse { Judgement::Cost } else { Judgement::Gain }
}

/// The chance that two layers of equal speed end up with ranges apart, in one comparison of `repeats`
/// against `repeats` runs: of all orders in which the values can fall, two separate the sides.
#[must_use]
pub fn chance_of_separation(repeats: u32) -> f64 {
    // 2 n! n! / (2n)! as a product that neither overflows nor underflows early.
    (1..=repeats).fold(2.0, |chance, i| chance * f64::from(i) / f64::from(repeats + i))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{self, Numbers};

    fn judged(findings: &Findings, layer: usize, cell: &Cell) -> Judgement {
        findings.difference_to(layer, cell).unwrap().judgement
    }

    #[test]
    fn the_median_and_the_range_are_those_of_the_values() {
        let odd = Spread::of([3.0, 1.0, 2.0].into_iter()).unwrap();
        assert_eq!((odd.least, odd.median, odd.most), (1.0, 2.0, 3.0));
        let even = Spread::of([4.0, 1.0, 2.0, 3.0].into_iter()).unwrap();
        assert_eq!(even.median, 2.5);
        assert_eq!(Spread { median: 10.0, least: 8.0, most: 11.0 }.relative(), 0.2);
        assert!(Spread::of([].into_iter()).is_none());
    }

    #[test]
    fn costs_gains_and_what_cannot_be_told_apart() {
        let diagnosis = sample::chain(&[
            ("backing", Numbers::steady(40e3)),
            ("faster", Numbers::steady(10e3)),
            ("same", Numbers([10.2e3, 9.9e3, 10.1e3])),
            ("a little slower", Numbers([10.5e3, 10.4e3, 10.45e3])),
            ("slower", Numbers::steady(50e3)),
        ]);
        let findings = find(&diagnosis);
        assert!(findings.unused.is_empty(), "{:?}", findings.unused);
        for cell in &diagnosis.cells {
            assert_eq!(judged(&findings, 1, cell), Judgement::Gain, "{cell}");
            assert_eq!(judged(&findings, 2, cell), Judgement::NotDistinguishable, "{cell}");
            assert_eq!(judged(&findings, 3, cell), Judgement::TooSmall, "{cell}");
            assert_eq!(judged(&findings, 4, cell), Judgement::Cost, "{cell}");
        }
        let step = findings.difference_to(1, &diagnosis.cells[0]).unwrap();
        assert_eq!(step.quantity, Quantity::Latency);
        assert!((step.change() + 30e3).abs() < 1.0);
        let step = findings.difference_to(4, &diagnosis.cells[1]).unwrap();
        assert_eq!(step.quantity, Quantity::Iops);
        assert!((step.loss_factor() - 50.0 / 10.45).abs() < 0.01);
        let way = findings.whole_way.iter().find(|way| way.cell == diagnosis.cells[0]).unwrap();
        assert_eq!((way.from, way.to, way.judgement), (0, 4, Judgement::Cost));
    }

    #[test]
    fn a_single_layer_has_no_step() {
        let findings = find(&sample::chain(&[("backing", Numbers::steady(40e3))]));
        assert_eq!(findings.points.len(), 8);
        assert!(findings.steps.is_empty() && findings.whole_way.is_empty());
    }

    #[test]
    fn a_missing_layer_is_stepped_over_and_named() {
        let mut diagnosis = sample::chain(&[
            ("backing", Numbers::steady(40e3)),
            ("accel", Numbers::steady(50e3)),
            ("export", Numbers::steady(90e3)),
        ]);
        let missing = diagnosis.cells[2];
        diagnosis.rows.retain(|row| !(row.layer == "accel" && row.cell == missing));
        let findings = find(&diagnosis);
        let steps: Vec<&Difference> = findings.steps.iter().filter(|step| step.cell == missing).collect();
        assert_eq!(steps.len(), 1);
        assert_eq!((steps[0].from, steps[0].to, steps[0].skipped.as_slice()), (0, 2, &[1][..]));
        assert_eq!(findings.steps.len(), 15);
        assert_eq!(findings.whole_way.len(), 7);
    }

    #[test]
    fn rows_that_break_littles_law_are_listed_and_left_out() {
        let mut diagnosis = sample::chain(&[("backing", Numbers::steady(40e3))]);
        let place = diagnosis.rows.iter().position(|row| row.repeat == 2).unwrap();
        let RunOutcome::Measured(row) = &mut diagnosis.rows[place].outcome else { panic!("measured") };
        row.mean_ns *= 3.0;
        let cell = diagnosis.rows[place].cell;
        let findings = find(&diagnosis);
        assert_eq!(findings.unused.len(), 1);
        assert_eq!(findings.unused[0].row, place);
        assert!(findings.unused[0].reason.contains("Little"));
        assert_eq!(findings.point(0, &cell).unwrap().repeats, 2);
        assert!(findings.point(0, &cell).unwrap().mean_ns.most < 50e3);
    }

    #[test]
    fn one_repeat_is_never_judged() {
        let mut diagnosis =
            sample::chain(&[("backing", Numbers::steady(40e3)), ("export", Numbers::steady(400e3))]);
        diagnosis.rows.retain(|row| row.repeat == 1);
        assert!(find(&diagnosis).steps.iter().all(|step| step.judgement == Judgement::OneRepeat));
    }

    #[test]
    fn alternatives_are_compared_with_the_layer_in_whose_place_they_stand() {
        let diagnosis = sample::write_back();
        let findings = find(&diagnosis);
        let names = |difference: &Difference| {
            (diagnosis.layers[difference.from].name.as_str(), diagnosis.layers[difference.to].name.as_str())
        };
        assert!(findings.alternatives.iter().all(|other| names(other).0 == "accel write-back+1"));
        let steps: std::collections::BTreeSet<_> = findings.steps.iter().map(names).collect();
        let expected = [("accel write-back+1", "nbd export"), ("backing", "accel write-back+1")];
        assert_eq!(steps.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_chance_of_separation_is_the_textbook_one() {
        assert_eq!(chance_of_separation(1), 1.0);
        assert!((chance_of_separation(3) - 0.1).abs() < 1e-12);
        assert!((chance_of_separation(5) - 2.0 / 252.0).abs() < 1e-12);
        assert!(chance_of_separation(1000) < 1e-100);
    }
}
