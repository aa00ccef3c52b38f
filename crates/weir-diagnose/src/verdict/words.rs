//! A difference in words: the same in tables, charts and sentences.

use crate::comparison::{Difference, Judgement, Quantity};
use crate::result::Diagnosis;
use weir_report::format;

/// Its place and its numbers.
pub(super) fn between(diagnosis: &Diagnosis, step: &Difference) -> String {
    let name = |layer: usize| &diagnosis.layers[layer].name;
    format!("from {} to {}; {}", name(step.from), name(step.to), describe(step))
}

/// The cost of a step, in one sentence with its numbers: `nbd export adds 17.0 µs to accel at QD 1 (4K random read: 80.0 µs →
/// 97.0 µs).` For a full queue: `file share does 5 % of the IOPS of local disk at QD 8 (…).`
pub(super) fn cost(diagnosis: &Diagnosis, step: &Difference, alone: bool) -> String {
    let name = |layer: usize| &diagnosis.layers[layer].name;
    let (to, from, cell) = (name(step.to), name(step.from), &step.cell);
    let (before, after) = (step.before.median, step.after.median);
    let alone = if alone { " alone" } else { "" };
    let threads = if cell.threads > 1 { format!(", {} threads", cell.threads) } else { String::new() };
    let load = format!("at QD {}{threads} ({}{alone}", cell.queue_depth, cell.shape);
    match step.quantity {
        Quantity::Latency => format!(
            "{to} adds {} to {from} {load}: {} → {}).",
            format::duration(step.change()),
            format::duration(before),
            format::duration(after)
        ),
        Quantity::Iops => format!(
            "{to} does {} of the IOPS of {from} {load}: {} → {}).",
            format::percent(after / before),
            format::count(before),
            format::count(after)
        ),
    }
}

/// One step in numbers: `4K random read, QD 1: median latency 12.1 µs → 50.3 µs (+38.2 µs, ×4.16 [4.10, 4.22]).`
#[must_use]
pub fn describe(step: &Difference) -> String {
    let (before, after) = (step.before.median, step.after.median);
    let factor = factor(step);
    match step.quantity {
        Quantity::Latency => format!(
            "{}: median latency {} → {} ({}, {factor}).",
            step.cell,
            format::duration(before),
            format::duration(after),
            format::signed_duration(step.change())
        ),
        Quantity::Iops => {
            format!("{}: {} → {} IOPS ({factor}).", step.cell, format::count(before), format::count(after))
        }
    }
}

/// The ratio with its interval, where there is one.
#[must_use]
pub fn factor(step: &Difference) -> String {
    let ratio = format::factor(step.ratio);
    interval(step).map_or(ratio.clone(), |ends| format!("{ratio} {ends}"))
}

/// The ends of the ratio's interval: `[4.10, 4.22]`.
#[must_use]
pub fn interval(step: &Difference) -> Option<String> {
    let interval = step.interval?;
    let ends = [interval.low, interval.high].map(|end| format::factor(end).replace('×', ""));
    Some(format!("[{}]", ends.join(", ")))
}

/// The judgement of a difference, in the few words of a table's cell.
#[must_use]
pub fn in_short(difference: &Difference) -> String {
    let numbers = match difference.quantity {
        Quantity::Latency => format::signed_duration(difference.change()),
        Quantity::Iops => format::factor(difference.ratio),
    };
    match difference.judgement {
        Judgement::Slower => format!("{numbers} slower"),
        Judgement::Faster => format!("{numbers} faster"),
        Judgement::Same => "same".to_owned(),
        Judgement::Inconclusive => format!("{numbers} ?"),
        Judgement::Untested => format!("{numbers} (one run)"),
    }
}

/// A count with its noun.
pub(super) fn plural(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}
