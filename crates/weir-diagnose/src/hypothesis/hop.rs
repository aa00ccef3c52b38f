//! The way to the replicas. A write that is acknowledged from the log touches no storage, so the difference between the
//! log alone and the log with replicas is the hop and nothing else; the hop to a client, over a socket of the same
//! machine, says what a hop costs at least.

use super::model::{Ask, Cause, Hypothesis, Predicted, Standing};
use super::processor::is_kept_away;
use super::view::{View, small};
use crate::cell::{Cell, Direction, Pattern, Shape};
use weir_report::format;

/// A hop that costs so many times one to a client is long.
const LONG: f64 = 8.0;

/// And at least so many nanoseconds.
const LONG_NS: f64 = 500e3;

/// The loss of replicated writes at full depth that is worth a run.
const WORTH_ASKING: f64 = 3.0;

/// A prediction of a latency, or of a rate, holds within this factor.
const HOLDS: f64 = 1.5;

/// A thread that is on a processor, or ready to be, for this share of the time is busy: it does not wait for the network.
const BUSY: f64 = 0.7;

/// A replica's thread that waits for a processor for this share of the time is short of it.
const SHORT: f64 = 0.3;

/// The accelerator with replicas and without.
struct Pair {
    with: usize,
    without: usize,
}

fn pair(view: &View<'_>) -> Option<Pair> {
    let replicas = |name: &str| name.rsplit_once("write-back+")?.1.parse::<u32>().ok();
    let layers = || view.diagnosis.layers.iter().enumerate();
    let without = layers().find(|(_, layer)| replicas(&layer.name) == Some(0))?.0;
    let on_the_way = view.diagnosis.chain().find(|(_, layer)| replicas(&layer.name) > Some(0));
    let with = on_the_way.or_else(|| layers().find(|(_, layer)| replicas(&layer.name) > Some(0)))?.0;
    Some(Pair { with, without })
}

/// The deciding cell of both guesses about the way: larger writes.
const fn larger(queue_depth: u32) -> Cell {
    Shape::new(16 << 10, Pattern::Sequential, Direction::Write).at(queue_depth)
}

/// Every write pays the same hop, whatever its size.
pub(super) fn latency(view: &View<'_>) -> Option<Hypothesis> {
    let Pair { with, without } = pair(view)?;
    let (write, read) = (small(Direction::Write).at(1), small(Direction::Read).at(1));
    let (replicated, alone) = (view.latency(with, &write)?, view.latency(without, &write)?);
    let hop = replicated - alone;
    let to_client = (view.latency(view.highest()?, &read)? - view.latency(with, &read)?).max(0.0);
    if hop < LONG_NS || hop < LONG * to_client {
        return None;
    }
    let deciding = larger(1);
    let base = view.latency(without, &deciding);
    let value = base.unwrap_or(0.0) + hop;
    let measured = view.latency(with, &deciding).filter(|_| base.is_some());
    let predicted =
        Predicted { value, least: value / HOLDS, most: Some(value * HOLDS), unit: "ns", measured };
    Some(Hypothesis {
        cause: Cause::LinkLatency,
        layer: Some(with),
        standing: predicted.standing(),
        grounds: vec![format!(
            "A 4K write takes {} with replicas and {} without: the hop costs {}, one to a client {}.",
            format::duration(replicated),
            format::duration(alone),
            format::duration(hop),
            format::duration(to_client)
        )],
        prediction:
            "With a high latency, a 16K write takes as long for the hop; with little bandwidth, several times as long."
                .to_owned(),
        predicted: base.map(|_| predicted),
        run: format!("{deciding} at {} and {}.", view.name(without), view.name(with)),
        asks: [without, with].into_iter().filter_map(|layer| view.missing(layer, deciding)).collect(),
    })
}

/// Replicated writes at full depth, if those of the log alone are much faster: their rates there and here.
fn deep_loss(view: &View<'_>) -> Option<(Pair, Cell, f64, f64)> {
    let pair = pair(view)?;
    let deep = view.deepest(small(Direction::Write))?;
    let (replicated, alone) = (view.iops(pair.with, &deep)?, view.iops(pair.without, &deep)?);
    (alone >= WORTH_ASKING * replicated).then_some((pair, deep, replicated, alone))
}

/// As many bytes a second in small writes as in large ones.
pub(super) fn bandwidth(view: &View<'_>) -> Option<Hypothesis> {
    let (Pair { with, .. }, deep, replicated, alone) = deep_loss(view)?;
    let busy = |counters: &crate::Counters| {
        let replica = counters.replica_busy.unwrap_or(0.0) + counters.replica_wait.unwrap_or(0.0);
        Some((counters.node_busy.unwrap_or(0.0) + counters.node_wait.unwrap_or(0.0)).max(replica))
    };
    if view.counted(with, |cell| *cell == deep, busy).is_some_and(|busy| busy >= BUSY) {
        return None;
    }
    let deciding = larger(deep.queue_depth);
    let value = replicated * f64::from(deep.shape.block_bytes) / f64::from(deciding.shape.block_bytes);
    let measured = view.iops(with, &deciding);
    let predicted =
        Predicted { value, least: value / HOLDS, most: Some(value * HOLDS), unit: "IOPS", measured };
    Some(Hypothesis {
        cause: Cause::LinkBandwidth,
        layer: Some(with),
        standing: predicted.standing(),
        grounds: vec![format!(
            "{deep}: {} IOPS with replicas, {} without; {} MiB/s go to each replica.",
            format::whole(replicated),
            format::whole(alone),
            format::throughput(replicated * f64::from(deep.shape.block_bytes) / f64::from(1 << 20))
        )],
        prediction: format!(
            "With little bandwidth, {deciding} moves as many bytes: {} IOPS; with a cost per request, it moves more.",
            format::whole(value)
        ),
        predicted: Some(predicted),
        run: format!("{deciding} at {}.", view.name(with)),
        asks: view.missing(with, deciding).into_iter().collect(),
    })
}

/// A replica's node that had work and no processor.
pub(super) fn slow_replica(view: &View<'_>) -> Option<Hypothesis> {
    let Pair { with, .. } = pair(view)?;
    let deep = view.deepest(small(Direction::Write))?;
    let share = |cell: Cell| view.counted(with, |one| *one == cell, |counters| counters.replica_wait);
    let waited = share(deep)?;
    let busy = view.counted(with, |one| *one == deep, |counters| counters.replica_busy).unwrap_or(0.0);
    // A shortage that makes this node wait as well is not the replica's own.
    let here = view.counted(with, |one| *one == deep, |counters| counters.node_wait).unwrap_or(0.0);
    // A thread that gets most of the time that it wants is not short of it: on a small machine a healthy one waits for a
    // fifth of the time, while it and our own threads wake each other.
    let deprived = waited >= SHORT && waited > busy;
    if !deprived || here > waited / 2.0 || !is_kept_away(view, with, |one| *one == deep) {
        return None;
    }
    let deciding = Cell { queue_depth: 8, ..deep };
    let predicted = Predicted {
        value: waited,
        least: SHORT,
        most: None,
        unit: "share of the time",
        measured: share(deciding),
    };
    let asks: Vec<Ask> = view.missing(with, deciding).into_iter().collect();
    let standing = if asks.is_empty() { predicted.standing() } else { Standing::Open };
    Some(Hypothesis {
        cause: Cause::SlowReplica,
        layer: None,
        standing,
        grounds: vec![format!(
            "In {deep} a thread of a replica's node waited for a processor {} of the time; one of this node's {}.",
            format::percent(waited),
            format::percent(here)
        )],
        prediction: "If other work uses its processor, it waits as much at another depth.".to_owned(),
        predicted: Some(predicted),
        run: format!("{deciding} at {}, with the counters of the replicas' nodes.", view.name(with)),
        asks,
    })
}
