//! The lowest layer by itself: no step shows its cost, so its hypotheses use other sizes and a smaller range.

use super::model::{Cause, Hypothesis, Predicted};
use super::view::{View, small};
use crate::cell::{Cell, Direction, Pattern, Shape};
use weir_report::format;

/// Two rates in bytes may be the same plateau when they differ by less than this factor: those of small random and of large
/// sequential requests are otherwise far apart.
const PLATEAU: f64 = 1.5;

/// The rate in between comes as predicted when it does within this factor.
const HOLDS: f64 = 1.3;

/// Below this latency at depth 1, in nanoseconds, there is nothing slow behind a fast tier.
const SLOW: f64 = 50e3;

/// The range of the run that fits into a tier, in bytes.
pub(super) const SMALL_FOOTPRINT: u64 = 4 << 20;

/// A tier is worth the name when it is at least so many times faster. A disk whose head stays in a small range gains about
/// a factor of two.
const TIER_GAIN: f64 = 4.0;

/// About as many bytes a second in small blocks as in large ones.
pub(super) fn throttled(view: &View<'_>) -> Option<Hypothesis> {
    let lowest = view.lowest()?;
    let few = view.deepest(small(Direction::Read))?;
    let large = Shape::new(256 << 10, Pattern::Sequential, Direction::Read);
    let many = view.deepest(large)?;
    let bytes = |cell: &Cell| Some(view.iops(lowest, cell)? * f64::from(cell.shape.block_bytes));
    let (of_few, of_many) = (bytes(&few)?, bytes(&many)?);
    if of_many > of_few * PLATEAU || of_few > of_many * PLATEAU {
        return None;
    }
    let rate = (of_few * of_many).sqrt();
    let deciding = Shape::new(64 << 10, Pattern::Random, Direction::Read).at(8);
    let value = rate / f64::from(deciding.shape.block_bytes);
    let measured = view.iops(lowest, &deciding);
    let (least, most) = (value / HOLDS, Some(value * HOLDS));
    let predicted = Predicted { value, least, most, unit: "IOPS", measured };
    let mib = |bytes: f64| format::throughput(bytes / f64::from(1 << 20));
    let name = view.name(lowest);
    Some(Hypothesis {
        cause: Cause::Throttled,
        layer: Some(lowest),
        standing: predicted.standing(),
        grounds: vec![format!(
            "{name} does {} MiB/s in {few} and {} MiB/s in {many}: about as many bytes per second at either block size (within {}).",
            mib(of_few),
            mib(of_many),
            format::factor(PLATEAU)
        )],
        prediction: format!(
            "If bytes per second are the limit, {deciding} does {} IOPS; a device limited by IOPS does more.",
            format::whole(value)
        ),
        predicted: Some(predicted),
        run: format!("{deciding} at {name}."),
        asks: view.missing(lowest, deciding).into_iter().collect(),
    })
}

/// A range that fits into a tier is much faster than the whole one.
pub(super) fn tier_exhausted(view: &View<'_>) -> Option<Hypothesis> {
    let lowest = view.lowest()?;
    let alone = small(Direction::Read).at(1);
    let latency = view.latency(lowest, &alone)?;
    let whole = view.deepest(small(Direction::Read))?;
    if latency < SLOW {
        return None;
    }
    let all = view.iops(lowest, &whole)?;
    let deciding = Cell { footprint: Some(SMALL_FOOTPRINT), ..whole };
    let measured = view.iops(lowest, &deciding);
    let value = all * TIER_GAIN;
    let predicted = Predicted { value, least: value, most: None, unit: "IOPS", measured };
    let name = view.name(lowest);
    Some(Hypothesis {
        cause: Cause::TierExhausted,
        layer: Some(lowest),
        standing: predicted.standing(),
        grounds: vec![format!(
            "A single 4K random read takes {} at {name}: a fast tier may be too small to hold it.",
            format::duration(latency)
        )],
        prediction: format!(
            "If so, the same load on {} MiB does {} IOPS or more; without a tier it stays at {}.",
            SMALL_FOOTPRINT >> 20,
            format::whole(value),
            format::whole(all)
        ),
        predicted: Some(predicted),
        run: format!("{deciding}, at {name}."),
        asks: view.missing(lowest, deciding).into_iter().collect(),
    })
}
