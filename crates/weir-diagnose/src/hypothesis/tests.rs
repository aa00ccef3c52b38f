//! Stacks with a known fault, as functions from a cell to a latency: each must be named, and by its own run.

use std::sync::atomic::AtomicBool;

use super::lowest::SMALL_FOOTPRINT;
use super::*;
use crate::cell::{Cell, Direction, Pattern};
use crate::plan::{Plan, Start, Target, TargetError, measure};
use crate::result::{Measurement, Position};
use crate::tier::Tier;
use crate::{Counters, Grade, find, sample};

/// A layer that is a function: nanoseconds that each I/O of a cell takes.
struct Played {
    name: &'static str,
    position: Position,
    latency: Latency,
    counters: Counters,
    /// In a run of writes, of a cell.
    reads_for_writes: fn(&Cell) -> Option<f64>,
    last: Option<Cell>,
    cpu_share: f64,
    /// Of the queue depth, so much is in flight.
    in_flight: f64,
}

impl Target for Played {
    fn name(&self) -> &str {
        self.name
    }

    fn position(&self) -> Position {
        self.position.clone()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        self.last = Some(*cell);
        let measured = sample::measurement(cell, (self.latency)(cell));
        let cpu_seconds = Some(self.cpu_share * 10.0);
        let mean_ns = measured.mean_ns.map(|mean| mean * self.in_flight);
        Ok(Measurement { cpu_seconds, mean_ns, ..measured })
    }

    fn counters(&mut self) -> Option<Counters> {
        let cell = self.last.as_ref().filter(|cell| cell.shape.direction == Direction::Write);
        Some(Counters { reads_for_writes: cell.and_then(self.reads_for_writes), ..self.counters })
    }
}

/// Nanoseconds of an I/O that costs `each` and carries its bytes at `rate` a second, of which `at_once` go side by side.
fn io(cell: &Cell, each: f64, rate: f64, at_once: f64) -> f64 {
    let bytes = f64::from(cell.shape.block_bytes) * 1e9 / rate;
    let depth = f64::from(cell.queue_depth);
    (each + bytes).max(depth * each / at_once).max(depth * bytes)
}

fn backing(cell: &Cell) -> f64 {
    io(cell, 3e3, 5e9, 2.0)
}

fn log(cell: &Cell) -> f64 {
    io(cell, 3.1e3, 4.9e9, 2.0)
}

fn replicated(cell: &Cell) -> f64 {
    if cell.shape.direction == Direction::Read { log(cell) } else { io(cell, 60e3, 1.5e9, 8.0) }
}

fn export(cell: &Cell) -> f64 {
    let below = replicated(cell);
    below + io(cell, 40e3, 2e9, 8.0)
}

fn alone(cell: &Cell) -> f64 {
    io(cell, 700.0, 1e12, 1.0)
}

const ACCEL: &str = "accel write-back+1";

/// A healthy stack: backing, log with a replica, the log alone beside it, the export, and the generator alone.
fn stack() -> Vec<Played> {
    let layer = |name, position, latency| Played {
        name,
        position,
        latency,
        counters: Counters {
            node_wait: Some(0.02),
            replica_wait: Some(0.01),
            generator_wait: Some(0.03),
            // One other process computes all the time, and some time is left.
            foreign_processors: 1.0,
            idle_processors: 0.3,
            ..Counters::default()
        },
        reads_for_writes: |_| None,
        last: None,
        cpu_share: 0.5,
        in_flight: 1.0,
    };
    vec![
        layer("backing", Position::OnPath, backing),
        layer(ACCEL, Position::OnPath, replicated),
        layer("accel write-back+0", Position::AlternativeTo(ACCEL.into()), log),
        layer("nbd unix", Position::OnPath, export),
        layer("generator alone", Position::Reference, alone),
    ]
}

/// Measures it with all follow-ups.
fn diagnose(stack: Vec<Played>) -> crate::Findings {
    let mut targets: Vec<Box<dyn Target>> =
        stack.into_iter().map(|layer| Box::new(layer) as Box<dyn Target>).collect();
    let plan = Plan { extra_runs: 0, ..Plan::of(Tier::Quick.cells(), 3) };
    let start = Start::Fresh(sample::environment());
    let diagnosis = measure(&plan, &mut targets, start, &AtomicBool::new(false), &mut |_| {})
        .expect("the plan can be run");
    let text = diagnosis.to_json().unwrap();
    assert_eq!(crate::Diagnosis::from_json(&text).unwrap(), diagnosis, "follow-ups are part of the document");
    find(&diagnosis)
}

fn named(stack: Vec<Played>) -> Option<Cause> {
    let verdict = diagnose(stack).verdict;
    let open = verdict.hypotheses.iter().find(|guess| guess.standing == Standing::Open);
    assert!(open.is_none(), "every run that was asked for was done: {open:?}");
    if let Some(cause) = verdict.cause {
        let guess = verdict.hypotheses.iter().find(|guess| guess.cause == cause).unwrap();
        assert!(guess.outcome().unwrap().contains("Measured"), "{guess:?}");
        assert!(verdict.evidence.iter().any(|line| line.contains("confirmed by a run")), "{verdict:?}");
    }
    verdict.cause
}

/// A layer's latency for a cell.
type Latency = fn(&Cell) -> f64;

fn with(latencies: &[(usize, Latency)]) -> Vec<Played> {
    let mut stack = stack();
    for (layer, latency) in latencies {
        stack[*layer].latency = *latency;
    }
    stack
}

#[test]
fn a_healthy_stack_has_no_confirmed_cause() {
    assert_eq!(named(stack()), None);
}

#[test]
fn a_fixed_rate_in_bytes_is_told_from_a_slow_device() {
    let throttled: Latency = |cell| io(cell, 3e3, 30e6, 32.0);
    assert_eq!(named(with(&[(0, throttled)])), Some(Cause::Throttled));
    let slow: Latency = |cell| io(cell, 500e3, 1e9, 32.0);
    assert_eq!(named(with(&[(0, slow)])), None);
}

#[test]
fn an_exhausted_tier_is_found_by_a_smaller_footprint() {
    let tiered: Latency = |cell| match cell.footprint {
        Some(SMALL_FOOTPRINT) => backing(cell),
        _ => io(cell, 500e3, 5e9, 32.0),
    };
    assert_eq!(named(with(&[(0, tiered)])), Some(Cause::TierExhausted));
}

#[test]
fn one_in_flight_is_told_from_a_slow_layer() {
    let single: Latency = |cell| io(cell, 43e3, 2e9, 1.0);
    assert_eq!(named(with(&[(3, single)])), Some(Cause::OneInFlight));
    let slow: Latency = |cell| io(cell, 200e3, 2e9, 8.0);
    assert_eq!(named(with(&[(3, slow)])), None);
}

#[test]
fn a_long_way_is_told_from_a_narrow_one() {
    let long: Latency = |cell| match cell.shape.direction {
        Direction::Read => log(cell),
        _ => io(cell, 1.1e6, 1.5e9, 128.0),
    };
    assert_eq!(named(with(&[(1, long)])), Some(Cause::LinkLatency));
    let narrow: Latency = |cell| match cell.shape.direction {
        Direction::Read => log(cell),
        _ => io(cell, 60e3, 12.5e6, 32.0),
    };
    assert_eq!(named(with(&[(1, narrow)])), Some(Cause::LinkBandwidth));
}

#[test]
fn who_is_busy_does_not_wait_for_a_way() {
    let copying: Latency = |cell| match cell.shape.direction {
        Direction::Read => log(cell),
        _ => io(cell, 60e3, 150e6, 32.0),
    };
    let mut stack = with(&[(1, copying)]);
    assert_eq!(named(with(&[(1, copying)])), Some(Cause::LinkBandwidth));
    stack[1].counters.replica_busy = Some(0.9);
    assert_eq!(named(stack), None);
}

/// The same cell takes so many times longer from one repeat to the next: a disk that has its moods.
fn moody(cell: &Cell) -> f64 {
    thread_local!(static RUNS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
    let run = RUNS.replace(RUNS.get() + 1);
    backing(cell) * [1.0, 3.0, 9.0][run as usize % 3]
}

#[test]
fn a_device_that_varies_is_named_when_the_generator_does_not() {
    let two: Latency = |cell| moody(cell) + 100.0;
    let verdict = diagnose(with(&[(0, moody), (1, two), (2, two)])).verdict;
    assert_eq!((verdict.cause, verdict.cause_layer), (Some(Cause::DeviceVariance), Some(0)), "{verdict:?}");
    // The generator's own cells need not be fit for findings.
    let mut unfit = with(&[(0, moody), (1, two), (2, two)]);
    unfit[4].in_flight = 0.5;
    assert_eq!(named(unfit), Some(Cause::DeviceVariance));
    // The machine varies, and with it the generator alone.
    assert_eq!(named(with(&[(0, moody), (1, two), (2, two), (4, moody)])), None);
    // Others use every processor: it may be that.
    let mut crowded = with(&[(0, moody), (1, two), (2, two)]);
    (crowded[0].counters.idle_processors, crowded[0].counters.foreign_processors) = (0.0, 1.5);
    assert_eq!(named(crowded), None);
    // The layer above is steady: it does not stand on what varies.
    assert_eq!(named(with(&[(0, moody)])), None);
}

#[test]
fn split_requests_are_told_from_a_slow_layer() {
    const PIECES: f64 = 16.0;
    // As many pieces at once below, whatever their size.
    let below: Latency = |cell| io(cell, 500e3, 50e9, 8.0);
    let split: Latency = |cell| {
        let pieces = (f64::from(cell.shape.block_bytes) / 16384.0).max(1.0);
        io(&Cell { queue_depth: cell.queue_depth * pieces as u32, ..*cell }, 500e3, 50e9, 8.0)
    };
    let counted = |latency: Latency| {
        let mut stack = with(&[(0, below), (1, below), (2, below), (3, latency)]);
        stack[3].counters.requests_below = Some(PIECES);
        stack
    };
    let verdict = diagnose(counted(split)).verdict;
    assert_eq!((verdict.cause, verdict.cause_layer), (Some(Cause::SplitRequests), Some(3)), "{verdict:?}");
    let slow: Latency = |cell| io(cell, 500e3, 50e9, 1.5);
    assert_eq!(named(counted(slow)), None);
    // Not counted, not guessed.
    assert_eq!(named(with(&[(0, below), (1, below), (2, below), (3, split)])), None);
}

#[test]
fn writes_of_parts_of_blocks_are_told_from_a_layer_that_reads_for_itself() {
    const BLOCK: u32 = 16 << 10;
    let below: Latency = |cell| io(cell, 500e3, 50e9, 8.0);
    // A write of less than a block reads the block first: twice the work.
    let partial: Latency = |cell| {
        let whole = cell.shape.direction == Direction::Read || cell.shape.block_bytes >= BLOCK;
        io(cell, if whole { 500e3 } else { 1e6 }, 50e9, 8.0) + 5e3
    };
    let counted = |latency: Latency, reads: fn(&Cell) -> Option<f64>| {
        let mut stack = with(&[(0, below), (1, below), (2, below), (3, latency)]);
        stack[3].reads_for_writes = reads;
        stack
    };
    let of_parts = |cell: &Cell| Some(f64::from(u8::from(cell.shape.block_bytes < BLOCK)));
    let verdict = diagnose(counted(partial, of_parts)).verdict;
    assert_eq!((verdict.cause, verdict.cause_layer), (Some(Cause::PartialWrites), Some(3)), "{verdict:?}");
    // It reads whatever is written: the reads are for something else.
    assert_eq!(named(counted(partial, |_| Some(1.0))), None);
    // Whole blocks are as slow: the reads are not the cause.
    let slow: Latency = |cell| match cell.shape.direction {
        Direction::Read => io(cell, 500e3, 50e9, 8.0) + 5e3,
        _ => io(cell, 1e6, 50e9, 8.0),
    };
    assert_eq!(named(counted(slow, of_parts)), None);
    assert_eq!(named(counted(partial, |_| Some(0.0))), None);
}

#[test]
fn lost_order_is_named_and_a_layer_that_is_slow_in_itself_is_not() {
    const DISK: Latency = |cell| {
        let writes = cell.shape.pattern == Pattern::Sequential && cell.shape.direction == Direction::Write;
        match (cell.shape.pattern, writes && cell.threads > 1) {
            (Pattern::Sequential, false) => io(cell, 60e3, 1e9, 1.0),
            (Pattern::Sequential, true) => io(cell, 1.2e6, 1e9, 1.0),
            (Pattern::Random, _) => io(cell, 3.5e6, 1e9, 1.0),
        }
    };
    let disordered: Latency = |cell| match (cell.shape.pattern, cell.shape.direction) {
        (Pattern::Sequential, Direction::Write) if cell.queue_depth > 1 => io(cell, 1.25e6, 1e9, 1.0),
        _ => DISK(cell) + 1e3,
    };
    assert_eq!(
        named(with(&[(0, DISK), (1, disordered), (2, DISK), (3, disordered)])),
        Some(Cause::ArrivalOrder)
    );
    // The same loss, and the disk does not mind two threads.
    let steadfast: Latency = |cell| DISK(&Cell { threads: 1, ..*cell });
    let found = named(with(&[(0, steadfast), (1, disordered), (2, DISK), (3, disordered)]));
    assert_eq!(found, None);
}

#[test]
fn who_is_short_of_processor_time_is_named_before_the_symptoms() {
    let waits = |wait: fn(&mut Counters)| {
        let mut stack = stack();
        stack.iter_mut().for_each(|layer| wait(&mut layer.counters));
        stack
    };
    assert_eq!(named(waits(|counters| counters.node_wait = Some(0.5))), Some(Cause::Processor));
    assert_eq!(named(waits(|counters| counters.replica_wait = Some(0.4))), Some(Cause::SlowReplica));
    // As on two processors that the replica shares with the owner and the generator, measured: there is no other process.
    let small: fn(&mut Counters) = |counters| {
        (counters.replica_wait, counters.replica_busy) = (Some(0.34), Some(0.4));
        (counters.foreign_processors, counters.idle_processors) = (0.0, 0.85);
    };
    assert_eq!(named(waits(small)), None);
    // All processes wait: that is this machine's shortage, not the replica's.
    let all: fn(&mut Counters) =
        |counters| (counters.node_wait, counters.replica_wait) = (Some(0.5), Some(0.5));
    assert_eq!(named(waits(all)), Some(Cause::Processor));
    // Node and generator alike.
    let both: fn(&mut Counters) =
        |counters| (counters.node_wait, counters.generator_wait) = (Some(0.6), Some(0.5));
    let mut alike = waits(both);
    alike[4].cpu_share = 0.4;
    assert_eq!(named(alike), None);
    // No processor has anything to spare: which thread waits most is chance.
    let full: fn(&mut Counters) = |counters| {
        (counters.node_wait, counters.replica_wait, counters.generator_wait) =
            (Some(0.6), Some(0.9), Some(0.5));
        (counters.foreign_processors, counters.idle_processors) = (1.5, 0.0);
    };
    let mut busy = waits(full);
    busy[4].cpu_share = 0.4;
    let verdict = diagnose(busy).verdict;
    assert_eq!(verdict.cause, None);
    assert!(verdict.cautions.iter().any(|caution| caution.contains("no processor was idle")), "{verdict:?}");
    // There is no other process: three of our own on two processors wait for each other.
    let own: fn(&mut Counters) = |counters| {
        (counters.node_wait, counters.replica_wait, counters.generator_wait) =
            (Some(0.3), Some(0.7), Some(0.5));
        (counters.foreign_processors, counters.idle_processors) = (0.1, 0.2);
    };
    assert_eq!(named(waits(own)), None);
    let mut short = waits(|counters| counters.generator_wait = Some(0.5));
    let verdict = diagnose(short).verdict;
    assert_eq!((verdict.cause, verdict.grade), (Some(Cause::Generator), Grade::GeneratorLimited));
    // Short of it, it does not keep its queue full either, and its rows cannot be used; its processor time counts all the
    // same.
    short = waits(|counters| counters.generator_wait = Some(0.5));
    short[4].in_flight = 0.5;
    assert_eq!(named(short), Some(Cause::Generator));
    // It waits, and yet gets all of a processor when it needs one.
    short = waits(|counters| counters.generator_wait = Some(0.5));
    short[4].cpu_share = 0.99;
    assert_eq!(named(short), None);
}

#[test]
fn a_hypothesis_without_its_run_is_open_and_names_no_cause() {
    let mut stack = with(&[(0, |cell| io(cell, 3e3, 30e6, 32.0))]);
    let mut targets: Vec<Box<dyn Target>> =
        stack.drain(..).map(|layer| Box::new(layer) as Box<dyn Target>).collect();
    let plan = Plan { extra_runs: 0, follow_ups: 0, ..Plan::of(Tier::Quick.cells(), 3) };
    let start = Start::Fresh(sample::environment());
    let diagnosis = measure(&plan, &mut targets, start, &AtomicBool::new(false), &mut |_| {}).unwrap();
    let verdict = find(&diagnosis).verdict;
    let throttled = verdict.hypotheses.iter().find(|guess| guess.cause == Cause::Throttled).unwrap();
    assert_eq!((throttled.standing, verdict.cause), (Standing::Open, None));
    assert!(throttled.outcome().is_none() && verdict.to_improve.contains(&throttled.run));
}
