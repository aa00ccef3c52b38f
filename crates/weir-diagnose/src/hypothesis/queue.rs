//! One in flight: a layer that takes one request at a time gains nothing from a queue.

use super::model::{Cause, Hypothesis, Predicted};
use super::view::View;
use crate::cell::{Cell, Pattern};
use weir_report::format;

/// A layer that does not gain this factor from a full queue gains nothing.
const NO_GAIN: f64 = 1.3;

/// The loss at full depth that is worth a run.
const WORTH_ASKING: f64 = 2.0;

/// Depth of the run that decides.
const DECIDING_DEPTH: u32 = 8;

/// The greatest loss at full depth of random requests, where the upper layer does no more than at depth 1.
pub(super) fn one_in_flight(view: &View<'_>) -> Option<Hypothesis> {
    view.losses().into_iter().find_map(|loss| {
        let deep = loss.cell;
        let random = deep.shape.pattern == Pattern::Random && deep.queue_depth > DECIDING_DEPTH;
        if !random || loss.loss_factor() < WORTH_ASKING {
            return None;
        }
        let alone = Cell { queue_depth: 1, ..deep };
        let (one, many) = (view.iops(loss.to, &alone)?, view.iops(loss.to, &deep)?);
        // A lower layer that is no faster than the upper one alone would keep any layer at this rate.
        if many > one * NO_GAIN || view.iops(loss.from, &deep)? < one * WORTH_ASKING {
            return None;
        }
        let deciding = Cell { queue_depth: DECIDING_DEPTH, ..deep };
        let measured = view.iops(loss.to, &deciding);
        let predicted =
            Predicted { value: one, least: one / NO_GAIN, most: Some(one * NO_GAIN), unit: "IOPS", measured };
        let name = view.name(loss.to);
        Some(Hypothesis {
            cause: Cause::OneInFlight,
            layer: Some(loss.to),
            standing: predicted.standing(),
            grounds: vec![format!(
                "{name} does {} IOPS with one request in flight and {} with {}: a queue does not help it, while the \
                 layer below does {}.",
                format::whole(one),
                format::whole(many),
                deep.queue_depth,
                format::whole(view.iops(loss.from, &deep)?)
            )],
            prediction: format!(
                "If it serves one request at a time, {deciding} also does {} IOPS: each request waits for those before it.",
                format::whole(one)
            ),
            predicted: Some(predicted),
            run: format!("{deciding} at {name}."),
            asks: view.missing(loss.to, deciding).into_iter().collect(),
        })
    })
}
