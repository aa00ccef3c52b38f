//! Arrival order: a layer that passes sequential writes on in another order; a disk then seeks where it streamed.
//!
//! Everything else that a layer can do to a write it does to a read or to a random write as well. So if
//! sequential reads and random writes of the same size and depth cross the layer as before, the time is not spent
//! in the layer: by Little's law it is spent below, where as many requests wait as before, each for longer.

use super::model::{Ask, Cause, Hypothesis, Predicted, Standing};
use super::view::View;
use crate::cell::{Cell, Direction, Pattern, Shape};
use crate::comparison::Difference;
use weir_report::format;

/// Threads of the run that decides.
const DECIDING_THREADS: u32 = 2;

/// A loss is worth the runs when it is so many times the next greatest of the same step.
const WORTH_ASKING: f64 = 2.0;

/// Other loads through the layer must keep this share of their rate: far above the writer's share, and below the difference
/// that a busy machine makes between equals.
const AS_BEFORE: f64 = 0.6;

fn is_queued_sequential_write(cell: &Cell) -> bool {
    cell.queue_depth > 1
        && cell.threads == 1
        && cell.shape.pattern == Pattern::Sequential
        && cell.shape.direction == Direction::Write
}

/// The greatest loss of a queued sequential writer, if order may be its cause.
pub(super) fn arrival_order(view: &View<'_>) -> Option<Hypothesis> {
    let loss = view.losses().into_iter().find(|loss| is_queued_sequential_write(&loss.cell))?;
    let like =
        |pattern, direction| Cell { shape: Shape { pattern, direction, ..loss.cell.shape }, ..loss.cell };
    let others = [like(Pattern::Sequential, Direction::Read), like(Pattern::Random, Direction::Write)];
    let sides = |cell: Cell| [loss.from, loss.to].map(|layer| view.missing(layer, cell));
    let asks: Vec<Ask> = others.into_iter().flat_map(sides).flatten().collect();
    if !asks.is_empty() {
        let of_step = view.compared.steps.iter().filter(|step| (step.from, step.to) == (loss.from, loss.to));
        let others = of_step.filter(|step| !is_queued_sequential_write(&step.cell));
        let next = others.map(Difference::loss_factor).fold(1.0, f64::max);
        return (loss.loss_factor() >= WORTH_ASKING * next).then(|| ask_for_the_others(view, loss, asks));
    }
    let rates = |cell: &Cell| {
        let (below, above) = (view.iops(loss.from, cell)?, view.iops(loss.to, cell)?);
        (above >= AS_BEFORE * below).then_some((below, above))
    };
    let (read, random) = (rates(&others[0])?, rates(&others[1])?);
    let depth = f64::from(loss.cell.queue_depth);
    let after = loss.after.median;
    // Each request's own time, by Little's law: the layer adds to a read the part of the queue that it holds.
    let each = |iops: f64| depth * 1e9 / iops;
    let added = (each(read.1) - each(read.0)).max(0.0);
    let queue_below = (depth - after * added / 1e9).max(0.0);
    if queue_below < 0.9 * depth {
        return None;
    }
    let grounds = grounds(view, loss, (read, random), (added, queue_below));
    let deciding = Cell { threads: DECIDING_THREADS, ..loss.cell };
    Some(decide(view, loss, deciding, grounds))
}

/// Sequential writes lose much; whether anything else does is not known.
fn ask_for_the_others(view: &View<'_>, loss: &Difference, asks: Vec<Ask>) -> Hypothesis {
    let to = view.name(loss.to);
    let shape = loss.cell.shape;
    Hypothesis {
        cause: Cause::ArrivalOrder,
        layer: Some(loss.to),
        standing: Standing::Open,
        grounds: vec![format!(
            "{shape} loses a factor of {:.1} at {to}; reads and random writes of the same size and depth were not measured.",
            loss.loss_factor()
        )],
        prediction: format!(
            "If so, sequential reads and random writes cross {to} unchanged; if not, {to} itself is slow."
        ),
        predicted: None,
        run: "Sequential read and random write of the same size and depth, at both layers.".to_owned(),
        asks,
    }
}

fn grounds(
    view: &View<'_>,
    loss: &Difference,
    (read, random): ((f64, f64), (f64, f64)),
    (added, queue_below): (f64, f64),
) -> Vec<String> {
    let (from, to) = (view.name(loss.from), view.name(loss.to));
    let (before, after) = (loss.before.median, loss.after.median);
    let depth = f64::from(loss.cell.queue_depth);
    vec![
        format!(
            "Other loads of the same size and depth cross {to} unchanged: sequential read {} → {} IOPS, \
             random write {} → {} IOPS. If a write crosses it as a read \
             does, {to} itself does not spend the time.",
            format::whole(read.0),
            format::whole(read.1),
            format::whole(random.0),
            format::whole(random.1)
        ),
        format!(
            "By Little's law the queue depth at {from} is unchanged, {queue_below:.1} of {depth} requests (a read spends \
             {} more above it), while the latency there rises from {} to {}.",
            format::duration(added),
            format::duration(depth * 1e9 / before),
            format::duration(queue_below * 1e9 / after)
        ),
        format!(
            "The same requests, as many in flight, take longer each: they arrive in another order. {}",
            arrivals(view, loss)
        ),
    ]
}

/// The order at the device according to its tracepoints, or that it was not traced.
fn arrivals(view: &View<'_>, loss: &Difference) -> String {
    let share = |layer| {
        view.counted(
            layer,
            |cell| *cell == loss.cell,
            |counters| {
                let traced = counters.traced.filter(|traced| traced.arrivals > 0)?;
                Some(traced.inversions as f64 / traced.arrivals as f64)
            },
        )
    };
    let submitters = |layer| {
        view.counted(layer, |cell| *cell == loss.cell, |counters| Some(counters.traced?.submitters as f64))
    };
    match (share(loss.from), share(loss.to), submitters(loss.to)) {
        (Some(before), Some(after), Some(threads)) => format!(
            "At the device {} of the requests had a lower address than the request before when {} was loaded, from \
             {threads:.0} threads, and {} when {} was loaded.",
            format::percent(after),
            view.name(loss.to),
            format::percent(before),
            view.name(loss.from)
        ),
        _ => "This is inferred from rates; a meter at the lower layer would show it directly.".to_owned(),
    }
}

/// The run that decides: the same sequence at the lower layer, issued by two.
fn decide(view: &View<'_>, loss: &Difference, deciding: Cell, grounds: Vec<String>) -> Hypothesis {
    let (from, to) = (view.name(loss.from), view.name(loss.to));
    let (before, after) = (loss.before.median, loss.after.median);
    let shape = loss.cell.shape;
    let share = loss.cell.queue_depth / DECIDING_THREADS;
    // Nearer to what the layer above gets than to what the lower one does, by ratio; and not as much lower: a writer whose requests come
    // late, but in order, loses revolutions as well, and keeps more than two threads do.
    let most = (before * after).sqrt();
    let least = after * after / most;
    let measured = view.iops(loss.from, &deciding);
    let predicted = Predicted { value: after, least, most: Some(most), unit: "IOPS", measured };
    Hypothesis {
        cause: Cause::ArrivalOrder,
        layer: Some(loss.to),
        standing: predicted.standing(),
        grounds,
        prediction: format!(
            "If so, {shape} at {from} itself falls towards {} IOPS as soon as two threads issue one sequence; if it \
             stays near {} IOPS, the order is not the cause and {to} is; if it falls far lower, {to} keeps more of the order than that, and the \
             time is lost otherwise.",
            format::whole(after),
            format::whole(before)
        ),
        predicted: Some(predicted),
        run: format!(
            "The two-thread run: {deciding} at {from}, both threads taking turns on one sequence at depth {share} each \
             (DiskSpd: -b{} -w100 -t2 -o{share} -si -Sh).",
            format::block_size(shape.block_bytes)
        ),
        asks: view.missing(loss.from, deciding).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::import;

    /// A lower and an upper layer: sequential read, sequential write, random write; and what two threads reach below.
    fn standing(reads: f64, randoms: f64, two_threads: Option<f64>) -> Option<Standing> {
        let mut table = format!(
            "layer,block,access,queue_depth,iops\n\
             low,8K,read,8,20000\nlow,8K,write,8,17000\nlow,8K,randwrite,8,270\n\
             high,8K,read,8,{reads}\nhigh,8K,write,8,800\nhigh,8K,randwrite,8,{randoms}\n"
        );
        if let Some(iops) = two_threads {
            table = table.replace("iops\n", "iops,threads\n").replace("0\n", "0,1\n");
            table.push_str(&format!("low,8K,write,8,{iops},2\n"));
        }
        let import = import::Import::default().csv("table.csv", &table).unwrap();
        let findings = find(&import.into_diagnosis("test", ["weir"]).unwrap());
        findings.verdict.hypotheses.first().map(|hypothesis| hypothesis.standing)
    }

    #[test]
    fn arrival_order_is_guessed_only_when_nothing_else_is_slower() {
        assert_eq!(standing(20_000.0, 270.0, None), Some(Standing::Open));
        assert_eq!(standing(11_000.0, 270.0, None), None);
        assert_eq!(standing(20_000.0, 130.0, None), None);
    }

    #[test]
    fn the_two_thread_run_decides() {
        assert_eq!(standing(20_000.0, 270.0, Some(850.0)), Some(Standing::Supported));
        assert_eq!(standing(20_000.0, 270.0, Some(16_800.0)), Some(Standing::Rejected));
        assert_eq!(standing(20_000.0, 270.0, Some(150.0)), Some(Standing::Rejected));
    }
}
