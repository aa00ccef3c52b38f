//! Why a step may cost what it costs: a guess, what it rests on, what it predicts, and the run that decides.
//!
//! A hypothesis never changes the grade of the verdict by itself. It is `open` until the run that it asks for is
//! among the rows; then it is supported or rejected by that run.

use serde::Serialize;

use crate::cell::{Cell, Direction, Pattern, Shape};
use crate::finding::{Difference, Findings};
use crate::format;
use crate::result::Diagnosis;

/// Threads of the run that decides about arrival order.
const DECIDING_THREADS: u32 = 2;

/// What the deciding run has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// The run is missing.
    Open,
    /// The run came out as predicted.
    Supported,
    /// It did not.
    Rejected,
}

/// A guess at the cause of a step's cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hypothesis {
    /// In two words: `arrival order`.
    pub cause: String,
    /// Whether the deciding run is there, and what it said.
    pub standing: Standing,
    /// Sentences with the numbers that it rests on.
    pub grounds: Vec<String>,
    /// What must be seen if it is true, and what if not.
    pub prediction: String,
    /// The run that decides.
    pub run: String,
}

impl Hypothesis {
    /// One line: the cause and where it stands.
    #[must_use]
    pub fn title(&self) -> String {
        let standing = match self.standing {
            Standing::Open => "not yet decided",
            Standing::Supported => "supported by the run that decides",
            Standing::Rejected => "rejected by the run that decides",
        };
        format!("Hypothesis: {} ({standing}).", self.cause)
    }
}

/// The hypotheses for a step, given by the cells in which it is a loss.
#[must_use]
pub fn explain(diagnosis: &Diagnosis, findings: &Findings, losses: &[&Difference]) -> Vec<Hypothesis> {
    let deepest = losses.iter().copied().filter(|loss| is_queued_sequential_write(&loss.cell));
    let greatest = deepest.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()));
    greatest.and_then(|loss| arrival_order(diagnosis, findings, loss)).into_iter().collect()
}

fn is_queued_sequential_write(cell: &Cell) -> bool {
    cell.queue_depth > 1
        && cell.threads == 1
        && cell.shape.pattern == Pattern::Sequential
        && cell.shape.direction == Direction::Write
}

/// A layer that passes sequential writes on in another order: a disk then seeks where it streamed.
///
/// Everything else that a layer can do to a write it does to a read or to a random write as well. So if
/// sequential reads and random writes of the same size and depth cross the layer as before, the time is not spent
/// in the layer: by Little's law it is spent below, where as many requests wait as before, each for longer.
fn arrival_order(diagnosis: &Diagnosis, findings: &Findings, loss: &Difference) -> Option<Hypothesis> {
    let like = |pattern, direction| {
        let shape = Shape { pattern, direction, ..loss.cell.shape };
        let cell = Cell { shape, ..loss.cell };
        let (below, above) = (findings.point(loss.from, &cell)?, findings.point(loss.to, &cell)?);
        let ratio = above.iops.median / below.iops.median;
        let even = findings.difference_to(loss.to, &cell).filter(|step| step.from == loss.from)?.seems_even();
        even.then_some((below.iops.median, above.iops.median, ratio))
    };
    let (read_below, read_above, _) = like(Pattern::Sequential, Direction::Read)?;
    let (random_below, random_above, _) = like(Pattern::Random, Direction::Write)?;
    let depth = f64::from(loss.cell.queue_depth);
    let (before, after) = (loss.before.median, loss.after.median);
    // Each request's own time, by Little's law: what the layer adds to a read is what it keeps of the queue.
    let each = |iops: f64| depth * 1e9 / iops;
    let added = (each(read_above) - each(read_below)).max(0.0);
    let queue_below = (depth - after * added / 1e9).max(0.0);
    let latency_below = queue_below * 1e9 / after;
    if queue_below < 0.9 * depth {
        return None;
    }
    let (from, to) = (&diagnosis.layers[loss.from].name, &diagnosis.layers[loss.to].name);
    let shape = loss.cell.shape;
    let grounds = vec![
        format!(
            "What else crosses {to} at the same size and depth crosses it as before: sequential read {} → {} IOPS, \
             random write {} → {} IOPS. If a write crosses it as a read \
             does, the time is not spent in {to} itself.",
            format::whole(read_below),
            format::whole(read_above),
            format::whole(random_below),
            format::whole(random_above)
        ),
        format!(
            "By Little's law the queue depth at {from} is unchanged, {queue_below:.1} of {depth} requests (a read spends \
             {} more above it), while the latency there rises from {} to {}.",
            format::duration(added),
            format::duration(each(before)),
            format::duration(latency_below)
        ),
        "The same requests, as many at a time, each taking longer: they arrive in another order. It is inferred from \
         rates; a meter at the lower layer would show it directly."
            .to_owned(),
    ];
    let middle = (before * after).sqrt();
    let deciding = Cell { threads: DECIDING_THREADS, ..loss.cell };
    let standing = match findings.point(loss.from, &deciding) {
        None => Standing::Open,
        Some(point) if point.iops.median < middle => Standing::Supported,
        Some(_) => Standing::Rejected,
    };
    let share = loss.cell.queue_depth / DECIDING_THREADS;
    Some(Hypothesis {
        cause: "arrival order".to_owned(),
        standing,
        grounds,
        prediction: format!(
            "If so, {shape} at {from} itself falls towards {} IOPS as soon as two threads issue one sequence; if it \
             stays near {} IOPS, the order is not the cause and {to} is.",
            format::whole(after),
            format::whole(before)
        ),
        run: format!(
            "The two-thread run: {deciding} at {from}, both threads taking turns on one sequence at depth {share} each \
             (DiskSpd: -b{} -w100 -t2 -o{share} -si -Sh).",
            format::block_size(shape.block_bytes)
        ),
    })
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
    }
}
