//! Split or unaligned requests. Split: one request of the layer above reaches the layer below in several pieces, and each
//! costs as much as a whole one. Unaligned, or too small: a write covers parts of the blocks below, and the rest of them must
//! be read before they can be written.

use super::model::{Cause, Hypothesis, Predicted, Standing};
use super::view::View;
use crate::cell::{Cell, Direction, Shape};
use weir_report::format;

/// Requests below for each above, from which on they are split.
const SPLIT: f64 = 1.5;

/// The loss that is worth a run.
const WORTH_ASKING: f64 = 1.5;

/// The rate of the pieces comes as predicted when it does within this factor.
const HOLDS: f64 = 1.5;

/// The smallest piece, in bytes: a logical block.
const SMALLEST: u32 = 512;

/// Reads below for each write, from which on they are made for the writes' sake.
const FOR_WRITES: f64 = 0.5;

/// A write of so many bytes, at a multiple of it, covers whole blocks of all that usual disks, RAID sets and volumes have.
const WHOLE_BLOCKS: u32 = 256 << 10;

/// The greatest loss of a cell whose requests were counted as several at the layer below.
pub(super) fn split(view: &View<'_>) -> Option<Hypothesis> {
    view.losses().into_iter().find_map(|loss| {
        let large = loss.cell;
        if loss.loss_factor() < WORTH_ASKING {
            return None;
        }
        let pieces = view.counted(loss.to, |cell| *cell == large, |counters| counters.requests_below)?;
        if pieces < SPLIT {
            return None;
        }
        let deciding = piece(large, pieces)?;
        let below = view.iops(loss.from, &deciding);
        let measured = view.iops(loss.to, &deciding).filter(|_| below.is_some());
        let value = pieces * view.iops(loss.to, &large)?;
        // The cost is that of the pieces; and what stays whole is nearer to the layer below than the large request is.
        let predicted = below.map(|below| Predicted {
            value,
            least: (value / HOLDS).max(below / loss.loss_factor().sqrt()),
            most: Some(value * HOLDS),
            unit: "IOPS",
            measured,
        });
        let (from, to) = (view.name(loss.from), view.name(loss.to));
        Some(Hypothesis {
            cause: Cause::SplitRequests,
            layer: Some(loss.to),
            standing: predicted.map_or(Standing::Open, |predicted| predicted.standing()),
            grounds: vec![format!(
                "Each request of {large} at {to} reaches the layer below as {pieces:.1}, and the cell loses a factor of {:.1}.",
                loss.loss_factor()
            )],
            prediction: format!(
                "If the split is the cause, {deciding}, which is not split, does {} IOPS, {pieces:.1} times as many, and is closer to \
                 {from}; if {to} itself is slow, it is not.",
                format::whole(value)
            ),
            predicted,
            run: format!("{deciding} at {from} and {to}."),
            asks: [loss.from, loss.to].into_iter().filter_map(|layer| view.missing(layer, deciding)).collect(),
        })
    })
}

/// The greatest loss of writes during which the layer below did reads, though the load had none.
pub(super) fn partial(view: &View<'_>) -> Option<Hypothesis> {
    view.losses().into_iter().find_map(|loss| {
        let small = loss.cell;
        let writes = small.shape.direction == Direction::Write && small.shape.block_bytes < WHOLE_BLOCKS;
        if !writes || loss.loss_factor() < WORTH_ASKING {
            return None;
        }
        let reads =
            |wanted: Cell| view.counted(loss.to, |cell| *cell == wanted, |counters| counters.reads_for_writes);
        let seen = reads(small).filter(|reads| *reads >= FOR_WRITES)?;
        let deciding = Cell { shape: Shape { block_bytes: WHOLE_BLOCKS, ..small.shape }, ..small };
        let below = view.iops(loss.from, &deciding);
        let measured = view.iops(loss.to, &deciding).filter(|_| below.is_some());
        // Without the reads it is nearer to the layer below than the small write is.
        let predicted = below.map(|below| Predicted {
            value: below,
            least: below / loss.loss_factor().sqrt(),
            most: None,
            unit: "IOPS",
            measured,
        });
        let reads_on = reads(deciding).is_none_or(|reads| reads > seen / 4.0);
        let standing = match predicted.map_or(Standing::Open, |predicted| predicted.standing()) {
            Standing::Supported if reads_on => Standing::Rejected,
            standing => standing,
        };
        let (from, to) = (view.name(loss.from), view.name(loss.to));
        Some(Hypothesis {
            cause: Cause::PartialWrites,
            layer: Some(loss.to),
            standing,
            grounds: vec![format!(
                "For each write of {small} at {to} the layer below is read from {seen:.1} times, and the cell loses a factor of \
                 {:.1}.",
                loss.loss_factor()
            )],
            prediction: format!(
                "If writes cover parts of {to}'s blocks (smaller than they are, or across their borders), {deciding}, which covers \
                 whole ones, comes without those reads and is nearer to what {from} does; if it reads for another reason, it \
                 still does."
            ),
            predicted,
            run: format!("{deciding} at {from} and {to}."),
            asks: [loss.from, loss.to].into_iter().filter_map(|layer| view.missing(layer, deciding)).collect(),
        })
    })
}

/// The same load in requests of the size of a piece; `None` where they cannot be smaller.
fn piece(large: Cell, pieces: f64) -> Option<Cell> {
    let size = (f64::from(large.shape.block_bytes) / pieces).round() as u32;
    // Down to a power of two, which is aligned wherever the piece was.
    let block_bytes = 1 << size.checked_ilog2()?;
    let smaller = (SMALLEST..large.shape.block_bytes).contains(&block_bytes);
    smaller.then_some(Cell { shape: Shape { block_bytes, ..large.shape }, ..large })
}
