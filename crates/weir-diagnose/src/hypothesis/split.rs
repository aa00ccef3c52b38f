//! Split or unaligned requests: what the layer above asks for at once reaches the layer below in several pieces, and each
//! costs as much as a whole one.

use super::{Cause, Hypothesis, Predicted, Standing, View};
use crate::cell::{Cell, Direction, Shape};
use crate::format;

/// Requests below for each above, from which on they are split.
const SPLIT: f64 = 1.5;

/// The loss that is worth a run.
const WORTH_ASKING: f64 = 1.5;

/// The rate of the pieces comes as predicted when it does within this factor.
const HOLDS: f64 = 1.5;

/// The smallest piece that is asked for, in bytes: a logical block.
const SMALLEST: u32 = 512;

/// The greatest loss of reads in a cell whose requests were counted as several at the layer below.
pub(super) fn split(view: &View<'_>) -> Option<Hypothesis> {
    view.losses().into_iter().find_map(|loss| {
        let large = loss.cell;
        // Writes are not counted: a log takes them in and writes them later, joined or not.
        if large.shape.direction != Direction::Read || loss.loss_factor() < WORTH_ASKING {
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
            most: value * HOLDS,
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
                "If the pieces cost it, {deciding}, which stays whole, does {} IOPS, {pieces:.1} times as many, and is nearer to \
                 what {from} does; if {to} is slow in itself, it is not.",
                format::whole(value)
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
