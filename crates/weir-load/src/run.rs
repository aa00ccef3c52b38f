//! Runs a workload on a target: one loop for each thread, between a generator and an engine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use weir_block::Nanos;
use weir_nbd::client::{Connection, Options};

use crate::checker::{self, Checker};
use crate::cpu;
use crate::data::Data;
use crate::device::{Counters, DeviceBytes};
use crate::engine::{Done, Engine, FileEngine, FileOptions, NbdEngine, NullEngine, PsyncEngine};
use crate::error::LoadError;
use crate::generator::Generator;
use crate::io_engine::IoEngine;
use crate::judge::Pass;
pub use crate::monitor::Monitor;
use crate::steady::{SteadyState, WINDOW};
use crate::summary::{Summary, Verification};
use crate::tally::{IoKind, Tally};
use crate::target::Target;
use crate::timeline::Recorder;
use crate::verify::Record;
use crate::workload::{Span, Workload, WorkloadError};

/// A load that ended early, and its measurements until then.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Broken {
    /// The reason of its end.
    #[source]
    pub error: LoadError,
    /// The measurements, marked as incomplete; `None` when it had not begun.
    pub partial: Option<Box<Summary>>,
}

impl<E: Into<LoadError>> From<E> for Broken {
    fn from(error: E) -> Broken {
        Broken { error: error.into(), partial: None }
    }
}

/// Runs `workload` on `target` and waits for its end. With `destroy` a target that holds data is overwritten.
///
/// # Errors
/// The workload is not possible there, the target may not be written, or it fails as a whole. Requests that fail
/// one by one are counted in the summary.
pub fn run(
    target: &Target,
    workload: &Workload,
    destroy: bool,
    monitor: &Monitor,
) -> Result<Summary, LoadError> {
    run_keeping(target, workload, destroy, monitor).map_err(|broken| broken.error)
}

/// As [`run`], and when the target fails as a whole, the error includes the measurements until then.
///
/// # Errors
/// As [`run`].
pub fn run_keeping(
    target: &Target,
    workload: &Workload,
    destroy: bool,
    monitor: &Monitor,
) -> Result<Summary, Broken> {
    measure(target, workload, destroy, monitor)?.finish(target, workload)
}

/// Runs `workload` round after round (its runtime is a round's) until the last five are steady, at most `most`
/// rounds; the result is of these five together. The warm-up comes before the first round only.
///
/// # Errors
/// As [`run`], and a workload without a runtime.
pub fn run_steady(
    target: &Target,
    workload: &Workload,
    destroy: bool,
    most: u32,
    monitor: &Monitor,
) -> Result<Summary, Broken> {
    if workload.runtime.is_none() {
        return Err(WorkloadError::Rounds.into());
    }
    let (mut window, mut rounds) = (VecDeque::new(), Vec::new());
    let mut before_the_window = Recorder::default();
    let mut round = workload.clone();
    loop {
        // Data of earlier rounds may be overwritten.
        let destroy = destroy || !rounds.is_empty();
        let part = measure(target, &round, destroy, monitor)?;
        rounds.push(part.tally.ios() as f64 / part.runtime.as_secs_f64().max(f64::MIN_POSITIVE));
        let ended = part.failed.is_some() || part.stopped;
        window.push_back(part);
        if window.len() > WINDOW
            && let Some(earlier) = window.pop_front()
        {
            before_the_window.add(&earlier.tally.timeline);
        }
        let state = SteadyState::of(&rounds);
        if ended || state.reached || rounds.len() >= most as usize {
            let mut whole = Part::default();
            window.into_iter().for_each(|part| whole.follow(part));
            whole.tally.timeline.add_earlier(&before_the_window);
            let mut result = whole.finish(target, workload);
            match &mut result {
                Ok(summary) => summary.steady = Some(state),
                Err(Broken { partial: Some(partial), .. }) => partial.steady = Some(state),
                Err(_) => {}
            }
            return result;
        }
        round.warmup = Duration::ZERO;
        // Repeating the same blocks would hit caches.
        round.seed = round.seed.wrapping_add(1);
    }
}

fn measure(
    target: &Target,
    workload: &Workload,
    destroy: bool,
    monitor: &Monitor,
) -> Result<Part, LoadError> {
    let size = target.prepare(workload, destroy)?;
    let spans = workload.spans(size)?;
    let common = Arc::new(AtomicU64::new(0));
    let halt = AtomicBool::new(false);
    let run = checker::new_run();
    let record = monitor.record.as_ref().filter(|_| workload.verify);
    let record = record.map(|path| Record::create(path, run, whole(&spans), workload.block_size.0 as u32));
    let record = record.transpose()?.map(Arc::new);
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(&spans)
            .map(|(number, span)| {
                let (common, record) = (Arc::clone(&common), record.clone());
                let job =
                    Job { target, workload, span: *span, number, run, record, common, halt: &halt, monitor };
                std::thread::Builder::new().name(format!("weir-load-{number}")).spawn_scoped(
                    scope,
                    move || {
                        let part = job.run();
                        if part.as_ref().map_or(true, |part| part.failed.is_some()) {
                            job.halt.store(true, Ordering::Relaxed);
                        }
                        part
                    },
                )
            })
            .collect();
        let ended = threads.into_iter().map(|thread| {
            let thread = thread.map_err(LoadError::Thread)?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ended.collect::<Vec<Result<Part, LoadError>>>()
    });
    let mut whole = Part::default();
    for result in results {
        match result {
            Ok(part) => whole.add(part),
            Err(error) => whole.failed = whole.failed.or(Some(error)),
        }
    }
    whole.close();
    Ok(whole)
}

/// The range that verifying threads divide.
fn whole(spans: &[Span]) -> Span {
    let length = spans.iter().map(|span| span.length).sum();
    Span { offset: spans.first().map_or(0, |first| first.offset), length }
}

/// One thread's measurements.
#[derive(Debug, Default)]
struct Part {
    engine: &'static str,
    tally: Tally,
    runtime: Duration,
    cpu: Duration,
    first_error: Option<String>,
    never_made: u64,
    verification: Option<Verification>,
    /// The counters at the start of counting; of the first thread only.
    device: Option<Counters>,
    /// The device, and the bytes read and written there while this was measured.
    moved: Option<(String, u64, u64)>,
    /// The reason of an early end.
    failed: Option<LoadError>,
    stopped: bool,
}

impl Part {
    fn add(&mut self, other: Part) {
        self.engine = other.engine;
        self.tally.add(&other.tally);
        self.runtime = self.runtime.max(other.runtime);
        self.cpu += other.cpu;
        self.never_made += other.never_made;
        self.first_error = self.first_error.take().or(other.first_error);
        self.failed = self.failed.take().or(other.failed);
        self.stopped |= other.stopped;
        self.device = self.device.take().or(other.device);
        match (&mut self.verification, other.verification) {
            (Some(mine), Some(theirs)) => mine.add(theirs),
            (mine, theirs) => *mine = mine.take().or(theirs),
        }
    }

    /// Adds later measurements.
    fn follow(&mut self, later: Part) {
        let runtime = self.runtime + later.runtime;
        self.moved = match (self.moved.take(), &later.moved) {
            (Some(first), Some(second)) => Some((first.0, first.1 + second.1, first.2 + second.2)),
            (first, second) => first.or_else(|| second.clone()),
        };
        self.add(later);
        self.runtime = runtime;
    }

    /// Ends the load: attributes the bytes that the device has moved until now to it.
    fn close(&mut self) {
        self.moved = self.device.take().and_then(|before| before.moved());
    }

    fn finish(mut self, target: &Target, workload: &Workload) -> Result<Summary, Broken> {
        let failed = self.failed.take();
        let has_measured = self.tally.ios() + self.tally.errors() > 0;
        let mut summary = self.summary(&target.to_string(), workload);
        match failed {
            None => Ok(summary),
            Some(error) => {
                summary.incomplete = Some(format!("the target failed: {error}"));
                Err(Broken { error, partial: has_measured.then(|| Box::new(summary)) })
            }
        }
    }

    fn summary(self, target: &str, workload: &Workload) -> Summary {
        let mut summary = Summary::new(target, self.engine, workload, &self.tally, self.runtime);
        summary.cpu_seconds = Some(self.cpu.as_secs_f64());
        summary.first_error = self.first_error;
        summary.never_made = self.never_made;
        let bytes = |kind| self.tally.kind(kind).bytes;
        summary.device = self.moved.as_ref().map(|(device, read, written)| {
            DeviceBytes::new(device, (*read, bytes(IoKind::Read)), (*written, bytes(IoKind::Write)))
        });
        summary.verification = self.verification;
        summary.incomplete = self.stopped.then(|| "stopped before its end".into());
        summary
    }
}

/// One thread's share.
struct Job<'a> {
    target: &'a Target,
    workload: &'a Workload,
    span: Span,
    number: u32,
    /// The run of a verifying load's data, and the file of its history.
    run: u64,
    record: Option<Arc<Record>>,
    /// Of a sequence that the threads share.
    common: Arc<AtomicU64>,
    /// Set when a thread's target has failed: the others stop.
    halt: &'a AtomicBool,
    monitor: &'a Monitor,
}

impl Job<'_> {
    fn run(&self) -> Result<Part, LoadError> {
        let workload = self.workload;
        let (depth, block_size) = (workload.queue_depth, workload.block_size.0 as u32);
        match self.target {
            Target::Null { .. } => self.drive(NullEngine::new()),
            Target::Path(path) => {
                let Workload { fua, poll, .. } = *workload;
                let options = FileOptions { depth, block_size, writes: workload.access.writes(), fua, poll };
                match workload.engine {
                    IoEngine::IoUring => self.drive(FileEngine::open(path, options)?),
                    IoEngine::Psync => self.drive(PsyncEngine::open(path, options)?),
                }
            }
            Target::Nbd(uri) => {
                let keep_data = workload.verify;
                let options = Options { depth, keep_data, structured_replies: false, ..Options::default() };
                self.drive(NbdEngine::new(Connection::open(uri, &options)?, workload.fua))
            }
        }
    }

    fn drive<E: Engine>(&self, mut engine: E) -> Result<Part, LoadError> {
        let mut data = Data::new(self.workload, self.number);
        if self.workload.access.writes() {
            for slot in 0..self.workload.queue_depth {
                data.fill(engine.buffer(slot, self.workload.block_size.0 as u32));
            }
        }
        let record = || self.record.clone();
        let checker =
            self.workload.verify.then(|| Checker::new(self.workload, self.span, self.run, record()));
        let checker = checker.transpose()?;
        let start = Nanos::now();
        let mut generator = Generator::new(self.workload, self.span, self.number, start)?;
        generator.share(&self.common);
        let mut lane = Lane {
            engine,
            generator,
            checker,
            data,
            block_size: self.workload.block_size.0 as u32,
            job: self,
            asked: self.monitor.asked.load(Ordering::Relaxed),
            first_error: None,
            stopped: false,
            done: Vec::with_capacity(self.workload.queue_depth as usize),
        };
        let mut part = Part { engine: lane.engine.name(), ..Part::default() };
        let failed = lane.measure(start, &mut part).err();
        part.failed = failed;
        part.first_error = lane.first_error;
        part.stopped = lane.stopped;
        part.never_made = lane.generator.never_made(Nanos::now());
        part.tally = lane.generator.into_tally();
        Ok(part)
    }
}

/// One generator, one engine.
struct Lane<'a, E> {
    engine: E,
    generator: Generator,
    checker: Option<Checker>,
    data: Data,
    block_size: u32,
    job: &'a Job<'a>,
    /// The last [`Monitor::ask`] that was answered.
    asked: u32,
    first_error: Option<String>,
    stopped: bool,
    done: Vec<Done>,
}

impl<E: Engine> Lane<'_, E> {
    /// Warm-up, load and final check. Keeps the measurements also when the target fails.
    fn measure(&mut self, start: Nanos, part: &mut Part) -> Result<(), LoadError> {
        let (mut counted_from, mut cpu_before) = (start, cpu::of_this_thread());
        if !self.job.workload.warmup.is_zero() {
            self.run_until(start + self.job.workload.warmup)?;
            self.generator.clear_tally();
            (counted_from, cpu_before) = (Nanos::now(), cpu::of_this_thread());
        }
        // Verification continues to read after the load's end.
        if self.job.number == 0 && self.checker.is_none() {
            part.device = Counters::of(self.job.target);
        }
        let ended = self.run_until(Nanos::NEVER);
        part.runtime = Nanos::now() - counted_from;
        part.cpu = cpu::of_this_thread() - cpu_before;
        ended?;
        part.verification = self.check_all()?;
        Ok(())
    }

    /// Runs until the generator has no more requests and none is in flight, or `end` has passed.
    fn run_until(&mut self, end: Nanos) -> Result<(), LoadError> {
        loop {
            let now = Nanos::now();
            if now >= end {
                return Ok(());
            }
            let Lane { engine, generator, checker, data, .. } = self;
            let observer = self.job.monitor.observer.as_ref();
            let mut observer = observer.map(|it| it.0.lock().unwrap_or_else(PoisonError::into_inner));
            generator.issue(now, |io| {
                if let Some(observer) = &mut observer {
                    observer.observe(now, io.kind.request(), io.offset, io.length.into());
                }
                match (&mut *checker, io.kind) {
                    (Some(checker), _) => checker.before(io, engine.buffer(io.slot, io.length)),
                    (None, IoKind::Write) if E::CARRIES_DATA => {
                        data.renew(engine.buffer(io.slot, io.length));
                    }
                    (None, _) => {}
                }
                engine.queue(io);
            });
            drop(observer);
            if self.generator.in_flight() == 0 && self.generator.exhausted(now) {
                return Ok(());
            }
            self.engine.reap(self.generator.wake(now), &mut self.done)?;
            let now = Nanos::now();
            self.job.monitor.ios.fetch_add(self.done.len() as u64, Ordering::Relaxed);
            for done in self.done.drain(..) {
                match &mut self.checker {
                    Some(checker) if done.errno == 0 => {
                        checker.after(done.slot, self.engine.data(done.slot, self.block_size));
                    }
                    _ => {}
                }
                if done.errno != 0 && self.first_error.is_none() {
                    self.first_error = Some(self.engine.errno_text(done.errno));
                }
                self.generator.complete(done.slot, now, done.errno == 0);
            }
            self.heed(now);
        }
    }

    /// Serves the monitor's requests: stop, or submit the tally.
    #[inline]
    fn heed(&mut self, now: Nanos) {
        let Job { monitor, halt, number, .. } = *self.job;
        if (monitor.stop.load(Ordering::Relaxed) || halt.load(Ordering::Relaxed))
            && !self.generator.exhausted(now)
        {
            self.generator.stop();
            self.stopped = true;
        }
        let asked = monitor.asked.load(Ordering::Relaxed);
        if asked != self.asked {
            self.asked = asked;
            monitor.hand_in(number, self.generator.tally());
        }
    }

    /// Reads every written block, after the load.
    fn check_all(&mut self) -> Result<Option<Verification>, LoadError> {
        let Some(checker) = self.checker.take() else { return Ok(None) };
        let blocks = 0..checker.history.layout().blocks();
        let written: Vec<u64> = blocks.filter(|&block| checker.history.is_written(block)).collect();
        let mut pass = Pass { checker, unreadable: 0, first_error: None };
        pass.read(&mut self.engine, written.into_iter(), None)?;
        self.first_error = self.first_error.take().or(pass.first_error);
        Ok(Some(pass.checker.found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Access;
    use weir_block::size::Size;

    fn short(access: Access) -> Workload {
        Workload { access, runtime: Some(Duration::from_millis(200)), ..Workload::default() }
    }

    #[test]
    fn threads_add_up_and_the_monitor_sees_them() {
        let workload =
            Workload { threads: 2, runtime: None, size: Some(Size(8 << 20)), ..short(Access::Read) };
        let monitor = Monitor::new();
        let summary = run(&"null".parse().unwrap(), &workload, false, &monitor).unwrap();
        assert_eq!(summary.kind(IoKind::Read).unwrap().ios, 2048);
        assert_eq!(monitor.ios(), 2048);
        assert!(summary.is_clean());
    }

    #[test]
    fn a_rate_is_kept() {
        let workload = Workload { rate: Some(2000), ..short(Access::RandRead) };
        let summary = run(&"null".parse().unwrap(), &workload, false, &Monitor::new()).unwrap();
        let ios = summary.kind(IoKind::Read).unwrap().ios;
        assert!((380..=401).contains(&ios), "{ios} of 400");
    }

    #[test]
    fn a_load_can_be_stopped() {
        let monitor = Monitor::new();
        let workload = Workload { runtime: Some(Duration::from_secs(3600)), ..short(Access::RandRead) };
        std::thread::scope(|scope| {
            let load = scope.spawn(|| run(&"null".parse().unwrap(), &workload, false, &monitor));
            while monitor.ios() == 0 {
                std::thread::yield_now();
            }
            monitor.ask();
            while monitor.tally().ios() == 0 {
                std::thread::yield_now();
            }
            monitor.stop();
            let summary = load.join().unwrap().unwrap();
            assert!(summary.kind(IoKind::Read).unwrap().ios >= monitor.tally().ios());
            assert!(summary.incomplete.unwrap().contains("stopped"));
        });
    }

    #[test]
    fn a_file_is_written_and_verified() {
        let directory = tempfile::tempdir().unwrap();
        let target: Target = directory.path().join("disk").to_str().unwrap().parse().unwrap();
        for access in [Access::RandWrite, Access::RandRw { read_percent: 50 }, Access::Write] {
            let workload = Workload { verify: true, size: Some(Size(4 << 20)), threads: 2, ..short(access) };
            let summary = run(&target, &workload, true, &Monitor::new()).unwrap();
            let found = summary.verification.as_ref().unwrap();
            assert!(found.checked > 100 && summary.is_clean(), "{summary:?}");
        }
    }

    #[test]
    fn psync_reads_writes_and_flushes_one_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let target: Target = directory.path().join("disk").to_str().unwrap().parse().unwrap();
        let workload = Workload {
            engine: IoEngine::Psync,
            queue_depth: 1,
            threads: 2,
            flush_every: Some(16),
            fua: true,
            verify: true,
            size: Some(Size(4 << 20)),
            bytes: Some(Size(1 << 20)),
            runtime: None,
            ..short(Access::RandRw { read_percent: 50 })
        };
        let summary = run(&target, &workload, true, &Monitor::new()).unwrap();
        let found = summary.verification.as_ref().unwrap();
        assert!(found.checked > 20 && summary.is_clean(), "{summary:?}");
        assert!(summary.engine.starts_with("psync"), "{summary:?}");
        assert!(summary.kind(IoKind::Flush).unwrap().ios >= 1, "{summary:?}");
    }

    #[test]
    fn engines_for_files_are_refused_elsewhere() {
        let psync = Workload { engine: IoEngine::Psync, queue_depth: 1, ..short(Access::RandRead) };
        let poll = Workload { poll: true, ..short(Access::RandRead) };
        for (workload, what) in [(psync, "engine psync"), (poll, "polling")] {
            let error = run(&"null".parse().unwrap(), &workload, false, &Monitor::new()).unwrap_err();
            let said = error.to_string();
            assert!(said.contains(what) && said.contains("files and block devices"), "{said}");
        }
    }

    #[test]
    fn the_end_of_a_file_is_an_error_and_said() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let target = Target::Path(file.path().into());
        let workload = Workload { size: Some(Size(2 << 20)), ..short(Access::RandRead) };
        let error = run(&target, &workload, false, &Monitor::new()).unwrap_err().to_string();
        assert!(error.contains("only 1MiB"), "{error}");
    }

    #[test]
    fn the_warm_up_is_not_counted() {
        let workload =
            Workload { warmup: Duration::from_millis(200), rate: Some(1000), ..short(Access::RandRead) };
        let summary = run(&"null".parse().unwrap(), &workload, false, &Monitor::new()).unwrap();
        let ios = summary.kind(IoKind::Read).unwrap().ios;
        assert!((150..=202).contains(&ios), "{ios} of 200");
        assert!((0.19..0.3).contains(&summary.runtime_seconds), "{}", summary.runtime_seconds);
        let timeline = summary.timeline.unwrap();
        let shown: u64 = timeline.slots.iter().map(crate::timeline::Slot::ios).sum();
        assert!((350..=402).contains(&shown), "{shown} of 400: the warm-up is shown");
        assert_eq!(timeline.measured_from_ns, 200_000_000);
    }

    #[test]
    fn rounds_end_when_they_are_steady_or_too_many() {
        // The rate is constant, so the null target is steady with the fifth round.
        let round = Workload {
            rate: Some(1000),
            runtime: Some(Duration::from_millis(60)),
            ..short(Access::RandRead)
        };
        let null = "null".parse().unwrap();
        let summary = run_steady(&null, &round, false, 25, &Monitor::new()).unwrap();
        let state = summary.steady.as_ref().unwrap();
        assert!(state.reached && state.rounds.len() >= 5, "{state:?}");
        let ios = summary.kind(IoKind::Read).unwrap().ios;
        assert!((250..=310).contains(&ios), "the last five rounds together: {ios} of 300");
        assert!((0.3..0.5).contains(&summary.runtime_seconds), "{}", summary.runtime_seconds);
        let timeline = summary.timeline.as_ref().unwrap();
        let (before, all) = (timeline.measured_from_ns as f64 / 1e9, timeline.end_ns as f64 / 1e9);
        let earlier = 0.06 * (state.rounds.len() - 5) as f64;
        assert!(before >= earlier - 0.01 && all - before < 0.6, "{before} of {all} s; {state:?}");
        let short = run_steady(&null, &round, false, 3, &Monitor::new()).unwrap();
        assert!(!short.steady.as_ref().unwrap().reached);
        let said: Vec<String> = short.remarks().collect();
        // A busy machine adds a remark about late requests.
        assert!(said.iter().any(|said| said.contains("NOT steady after 3 rounds: too few")), "{said:?}");
        let endless = Workload { runtime: None, ..round };
        let error = run_steady(&null, &endless, false, 3, &Monitor::new()).unwrap_err().to_string();
        assert!(error.contains("need a runtime"), "{error}");
    }
}
