//! Effects on guests of Weir's recovery, with real processes and default settings (P9, P10): bounds that hold on a busy
//! machine. `make heal`, `make fill-picture` and `make neighbours` print the figures. Needs root.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::time::Duration;

use common::{alone, seed};
use support::behaviour::{Backlog, Filling, Healed, Loss, fill_copy, fill_log, lose_replica, neighbours};
use support::guest_load::Shape;

/// Longest stall after the loss of a replica, in milliseconds. Default settings take a silent one for lost after 1 s.
const LONGEST_STALL: f64 = 2000.0;

fn a_lost_replica(policy: &str, loss: Loss, backlog: Backlog) -> Healed {
    let _turn = alone();
    let healed = lose_replica(policy, loss, backlog, seed());
    eprintln!("{healed:?}");
    assert!(healed.longest_stall_ms < LONGEST_STALL, "{healed:?}");
    assert!(healed.dirty_bytes > 0, "there was something to copy: {healed:?}");
    if loss == Loss::CutOff {
        assert!(healed.longest_stall_ms > 500.0, "nobody noticed: {healed:?}");
    }
    healed
}

#[test]
fn a_killed_replica_is_replaced() {
    a_lost_replica("write-back+1", Loss::Killed, Backlog::Whatever);
}

#[test]
fn a_replica_that_is_cut_off_is_replaced() {
    a_lost_replica("write-back+1", Loss::CutOff, Backlog::Whatever);
}

#[test]
fn one_of_two_replicas_that_is_cut_off_is_replaced() {
    a_lost_replica("write-back+2", Loss::CutOff, Backlog::Whatever);
}

/// A third of the log has to be copied before writes go on; the guest hardly feels it.
#[test]
fn a_replica_with_a_large_backlog_is_replaced() {
    let healed = a_lost_replica("write-back+1", Loss::Killed, Backlog::Large(20 << 20));
    assert!(healed.dirty_bytes > 16 << 20 && healed.kept > 0.7, "{healed:?}");
}

/// The guest goes on while a copy is filled; which part of its throughput it keeps depends on who else uses the machine.
#[test]
fn a_replica_is_added_beside_live_writes() {
    let _turn = alone();
    let filled = fill_copy(Shape { depth: 4, read_percent: 0, rate: None }, 64 << 20, seed());
    eprintln!("{filled:?}");
    assert!(filled.dirty_bytes > 64 << 20, "{filled:?}");
    assert!(filled.longest_stall_ms < 1000.0, "{filled:?}");
    assert!(filled.kept_of_before > 0.05, "{filled:?}");
}

/// No cliff: from one window to the next latency changes by little, and nothing ever stands still.
#[test]
fn latency_rises_smoothly_while_the_log_fills() {
    /// A step is ten times the median of the windows around it, and at least this many milliseconds.
    const STEP: (f64, f64) = (10.0, 100.0);
    let _turn = alone();
    let filling = fill_log(Duration::from_secs(8), seed());
    let Filling { longest_stall_ms, steps, .. } = &filling;
    let medians: Vec<_> = steps.iter().map(|step| step.median_ms).collect();
    eprintln!("longest stall {longest_stall_ms} ms; medians {medians:.1?}");
    let fastest = steps.iter().map(|step| step.iops * 4096.0).fold(0.0, f64::max);
    if fastest < 4.0 * filling.backing as f64 {
        // A machine that does much else: the guest does not get ahead of the backing, and there is nothing to see.
        return eprintln!("the guest never writes more than {fastest} bytes/s, too few to fill the log");
    }
    // From a half on, admission slows.
    assert!(steps.iter().any(|step| step.log_used > 0.6), "the log has not filled: {filling:?}");
    assert!(*longest_stall_ms < 1000.0, "{longest_stall_ms}");
    for place in 3..steps.len() - 3 {
        let mut around: Vec<_> = steps[place - 3..=place + 3].iter().map(|step| step.p99_ms).collect();
        around.sort_by(f64::total_cmp);
        let (times, least) = STEP;
        let limit = (times * around[around.len() / 2]).max(least);
        assert!(steps[place].p99_ms < limit, "a step at {:?}; around it {around:?}", steps[place]);
    }
    // At a full log the guest gets what the backing takes; overwritten blocks are not written twice, so it may be more.
    let late = &steps[steps.len() / 2..];
    let rate = late.iter().map(|step| step.iops * 4096.0).sum::<f64>() / late.len() as f64;
    assert!((0.5..3.0).contains(&(rate / filling.backing as f64)), "{rate} bytes/s");
}

#[test]
fn a_greedy_neighbour_is_hardly_felt() {
    let _turn = alone();
    let felt = neighbours(Duration::from_secs(3), seed());
    eprintln!("{felt:?}");
    assert!(felt.greedy_log_used > 0.5, "it is greedy: {felt:?}");
    // Behind the queue of the greedy one it would wait for some 20 ms each time.
    assert!(felt.beside.median_us < 5.0 * felt.alone.median_us + 2000.0, "{felt:?}");
    assert!(felt.beside.longest_stall_ms < 500.0, "{felt:?}");
    assert!(felt.beside.iops > 0.9 * felt.alone.iops, "{felt:?}");
}
