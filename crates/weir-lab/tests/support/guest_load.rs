//! A load as a guest makes it, which keeps when each request was answered and how long that took.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::{CommandFlags, Connection, NbdCommand, Options};

/// Bytes of a request.
pub const REQUEST: u32 = 4096;

/// The load of a guest: random requests of [`REQUEST`] bytes all over the disk.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Requests in flight.
    pub depth: u32,
    /// Of a hundred requests, how many are reads.
    pub read_percent: u8,
    /// Requests of a second; `None` for as many as the disk takes.
    pub rate: Option<u64>,
}

/// A running load.
pub struct GuestLoad {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Timeline>,
}

impl GuestLoad {
    /// Starts it in a thread of its own.
    pub fn start(uri: &Uri, shape: Shape, seed: u64) -> GuestLoad {
        let options =
            Options { depth: shape.depth, structured_replies: false, keep_data: false, ..Options::default() };
        let connection = Connection::open(uri, &options).unwrap();
        let stop = Arc::<AtomicBool>::default();
        let stopping = Arc::clone(&stop);
        let thread = thread::spawn(move || run(connection, shape, Rng::with_seed(seed), &stopping));
        GuestLoad { stop, thread }
    }

    /// Ends it, and returns its figures.
    pub fn finish(self) -> Timeline {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn run(mut connection: Connection, shape: Shape, mut random: Rng, stop: &AtomicBool) -> Timeline {
    let blocks = connection.export().size / u64::from(REQUEST);
    let interval = shape.rate.map(|rate| Duration::from_nanos(1_000_000_000 / rate));
    let (mut free, mut since) = ((0..shape.depth).collect::<Vec<_>>(), vec![Nanos(0); shape.depth as usize]);
    let (mut done, mut answers) = (Vec::new(), Vec::new());
    let mut due = Nanos::now();
    loop {
        let now = Nanos::now();
        let stopping = stop.load(Ordering::Relaxed);
        if stopping && connection.in_flight() == 0 {
            return Timeline { answers };
        }
        while !stopping && (interval.is_none() || now >= due) {
            let Some(slot) = free.pop() else { break };
            // Paced requests are late from the moment when they should have been made.
            since[slot as usize] = if interval.is_some() { due } else { now };
            due = interval.map_or(due, |interval| due + interval);
            let offset = random.u64(..blocks) * u64::from(REQUEST);
            let command = if random.u8(..100) < shape.read_percent {
                NbdCommand::Read { offset, length: REQUEST }
            } else {
                connection.buffer(slot, REQUEST).fill(random.u8(..));
                NbdCommand::Write { offset, length: REQUEST, flags: CommandFlags::NONE }
            };
            connection.start(slot, command);
        }
        let waits_for_time = interval.is_some() && !free.is_empty() && !stopping;
        if connection.in_flight() == 0 {
            thread::sleep(due - Nanos::now());
        } else {
            connection.pump(if waits_for_time { due } else { Nanos::NEVER }, &mut done).unwrap();
        }
        let now = Nanos::now();
        for answer in done.drain(..) {
            assert_eq!(answer.errno, 0, "a guest saw an error (P9)");
            answers.push(Answer { at: now, latency: now - since[answer.slot as usize] });
            free.push(answer.slot);
        }
    }
}

/// One request that was answered.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    pub at: Nanos,
    pub latency: Duration,
}

/// Everything that a guest saw, in order of the answers.
#[derive(Debug)]
pub struct Timeline {
    pub answers: Vec<Answer>,
}

/// The figures of a guest during a part of the time.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Since the beginning of the first window.
    pub start: Duration,
    pub answers: usize,
    pub median: Duration,
    pub p99: Duration,
    pub longest: Duration,
}

impl Timeline {
    /// Answers between two moments.
    pub fn between(&self, from: Nanos, to: Nanos) -> &[Answer] {
        let place = |moment: Nanos| self.answers.partition_point(|answer| answer.at < moment);
        &self.answers[place(from)..place(to).max(place(from))]
    }

    /// Answers of a second between two moments.
    pub fn rate(&self, from: Nanos, to: Nanos) -> f64 {
        self.between(from, to).len() as f64 / (to - from).as_secs_f64()
    }

    /// Longest time without an answer.
    pub fn longest_stall(&self) -> Duration {
        let gaps = self.answers.windows(2).map(|pair| pair[1].at - pair[0].at);
        gaps.max().unwrap_or_default()
    }

    /// A latency that `percent` of the answers between two moments did not exceed.
    pub fn percentile(&self, from: Nanos, to: Nanos, percent: f64) -> Duration {
        percentile(&mut latencies(self.between(from, to)), percent)
    }

    /// The time between two moments in windows of equal width, the last of them whole.
    pub fn windows(&self, from: Nanos, to: Nanos, width: Duration) -> Vec<Window> {
        let count = ((to - from).as_nanos() / width.as_nanos()) as u32;
        let window = |number: u32| {
            let start = width * number;
            let answers = self.between(from + start, from + start + width);
            let mut sorted = latencies(answers);
            Window {
                start,
                answers: answers.len(),
                median: percentile(&mut sorted, 50.0),
                p99: percentile(&mut sorted, 99.0),
                longest: percentile(&mut sorted, 100.0),
            }
        };
        (0..count).map(window).collect()
    }
}

fn latencies(answers: &[Answer]) -> Vec<Duration> {
    answers.iter().map(|answer| answer.latency).collect()
}

fn percentile(latencies: &mut [Duration], percent: f64) -> Duration {
    if latencies.is_empty() {
        return Duration::ZERO;
    }
    let rank = (latencies.len() as f64 * percent / 100.0).ceil() as usize;
    *latencies.select_nth_unstable(rank.clamp(1, latencies.len()) - 1).1
}
