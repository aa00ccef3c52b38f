//! Runs jobs concurrently, shows their progress, and keeps their measurements when they are interrupted.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use weir_block::Nanos;
use weir_block::size::format_size;
use weir_load::LoadError;
use weir_load::prefill::{Limits, Prefill, look};
use weir_load::report::Interval;
use weir_load::run::{Broken, Monitor, run_keeping, run_steady};
use weir_load::summary::{Filled, Summary};
use weir_load::tally::{IoKind, Tally};
use weir_load::target::Target;
use weir_load::workload::Workload;
use weir_profile::Profiler;

use crate::cli::BenchFormat;
use crate::commands::moved::Whereabouts;
use crate::failure::Failure;
use crate::output::{note, say};

/// Interval between updates of the progress.
pub(super) const TICK: Duration = Duration::from_millis(250);

/// Length of an interval of jsonl.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// Time limit of an interrupted load for its last answers; after it, a target without answers is abandoned.
const GRACE: Duration = Duration::from_secs(5);

/// One load.
pub struct Job {
    /// The job's name in a job file.
    pub name: Option<String>,
    pub target: Target,
    pub workload: Workload,
    pub destroy: bool,
    /// Limits of the prefill of unwritten parts; `None` for no prefill.
    pub prefill: Option<Limits>,
    /// Rounds until a steady state, at most so many; `None` for one run.
    pub rounds: Option<u32>,
    /// Observes every request.
    pub profiler: Option<Arc<Mutex<Profiler>>>,
    /// The file in which a verifying load records its writes.
    pub history: Option<PathBuf>,
    /// The node of the target's disk before the load, if it is one of the cluster's.
    pub whereabouts: Option<Whereabouts>,
}

/// Order among the jobs of a group: all targets are filled, one after the other, before the first load begins. A job must not
/// be measured while another fills, and two jobs on one target must not both fill it.
struct Order {
    filling: Mutex<()>,
    filled: Barrier,
}

impl Job {
    fn failure(&self, error: LoadError) -> Failure {
        match &self.whereabouts {
            Some(whereabouts) => whereabouts.failure(error),
            None => error.into(),
        }
    }

    fn run(
        &self,
        order: &Order,
        filling: &Monitor,
        monitor: &Monitor,
        tell: impl Fn(String),
    ) -> Result<Summary, Broken> {
        let prepared = {
            let _turn = order.filling.lock().unwrap_or_else(PoisonError::into_inner);
            self.prepare(filling, tell)
        };
        // Also after a failure: the other jobs wait here.
        order.filled.wait();
        let (filled, hollow) = prepared?;
        let Job { target, workload, destroy, .. } = self;
        // Data of our own prefill may be overwritten.
        let destroy = *destroy || filled.is_some();
        let mut summary = match self.rounds {
            Some(most) => run_steady(target, workload, destroy, most, monitor)?,
            None => run_keeping(target, workload, destroy, monitor)?,
        };
        summary.prefill = filled;
        summary.notes.extend(hollow);
        Ok(summary)
    }

    /// Fills unwritten parts, if that is allowed. Returns the prefill, or else a note about holes.
    fn prepare(
        &self,
        filling: &Monitor,
        tell: impl Fn(String),
    ) -> Result<(Option<Filled>, Option<String>), LoadError> {
        let Job { target, workload, destroy, .. } = self;
        let Some(limits) = self.prefill else { return Ok((None, None)) };
        match look(target, workload, *destroy)? {
            Prefill::Needed(fill) => {
                fill.check(target, limits)?;
                tell(format!(
                    "filling {} of {target} before the load ({}); --no-prefill leaves that out",
                    format_size(fill.bytes()),
                    fill.found
                ));
                Ok((Some(fill.run(target, workload.seed, *destroy, limits, filling)?), None))
            }
            Prefill::Hollow(found) => {
                let note = format!(
                    "not everything that was read has ever been written ({found}); nothing may stand behind such reads. \
                     --destroy lets the load write it first"
                );
                Ok((None, Some(note)))
            }
            Prefill::Full => Ok((None, None)),
        }
    }
}

/// A running job, and its known state.
struct Running {
    job: Arc<Job>,
    /// The monitor of the prefill.
    filling: Arc<Monitor>,
    monitor: Arc<Monitor>,
    started: Nanos,
    /// The tally at the last interval's end.
    before: Tally,
    /// Whether the display is of the load itself, not of the prefill.
    has_begun: bool,
    ended: Option<Result<Summary, Broken>>,
}

/// A message from the thread of a job.
enum Word {
    /// A note for the user.
    Note(String),
    /// The last message: the result.
    Ended(Box<Result<Summary, Broken>>),
}

/// Runs `jobs` concurrently. Returns their measurements also when some were interrupted or failed, then with the reason.
/// `interrupted` is that of [`heed_interrupts`].
pub fn run(
    jobs: Vec<Job>,
    format: BenchFormat,
    interrupted: &AtomicBool,
) -> Result<(Vec<Summary>, Option<Failure>), Failure> {
    let (sender, words) = channel();
    let order = Arc::new(Order { filling: Mutex::default(), filled: Barrier::new(jobs.len()) });
    let mut running = Vec::new();
    for (number, job) in jobs.into_iter().enumerate() {
        running.push(start(number, job, Arc::clone(&order), sender.clone())?);
    }
    drop(sender);
    let bar = bar(&running);
    watch(&mut running, &words, interrupted, &bar, format)?;
    bar.finish_and_clear();
    let failure = interrupted
        .load(Ordering::Relaxed)
        .then(|| Failure::failed("interrupted: the results cover the time until then"));
    let (mut summaries, mut broken) = (Vec::new(), None);
    for running in running {
        let job = Arc::clone(&running.job);
        let (error, partial) = match running.result() {
            Ok(summary) => {
                summaries.push(summary);
                continue;
            }
            Err(Broken { error, partial }) => (error, partial),
        };
        summaries.extend(partial.map(|partial| *partial));
        broken = broken.or_else(|| Some(job.failure(error)));
    }
    match broken {
        // Only now: a later job may have measured something.
        Some(broken) if summaries.is_empty() => Err(broken),
        broken => Ok((summaries, failure.or(broken))),
    }
}

fn start(
    number: usize,
    job: Job,
    order: Arc<Order>,
    sender: Sender<(usize, Word)>,
) -> Result<Running, Failure> {
    let monitor = match (&job.profiler, &job.history) {
        (Some(profiler), _) => {
            let profiler = Arc::clone(profiler);
            Monitor::observed_by(profiler)
        }
        (None, Some(path)) => Monitor::recording(path),
        (None, None) => Monitor::new(),
    };
    let (job, filling, monitor) = (Arc::new(job), Arc::new(Monitor::new()), Arc::new(monitor));
    let running = Running {
        job: Arc::clone(&job),
        filling: Arc::clone(&filling),
        monitor: Arc::clone(&monitor),
        started: Nanos::now(),
        before: Tally::default(),
        has_begun: false,
        ended: None,
    };
    std::thread::Builder::new().name(format!("job-{number}")).spawn(move || {
        // The receiver is gone once the grace after an interrupt is over.
        let tell = |note| drop(sender.send((number, Word::Note(note))));
        let result = job.run(&order, &filling, &monitor, tell);
        let _ = sender.send((number, Word::Ended(Box::new(result))));
    })?;
    Ok(running)
}

fn watch(
    running: &mut [Running],
    words: &Receiver<(usize, Word)>,
    interrupted: &AtomicBool,
    bar: &ProgressBar,
    format: BenchFormat,
) -> Result<(), Failure> {
    let (mut last_interval, mut give_up) = (Nanos::now(), None);
    loop {
        match words.recv_timeout(TICK) {
            Ok((_, Word::Note(text))) => bar.suspend(|| note(&text)),
            Ok((number, Word::Ended(result))) => running[number].ended = Some(*result),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if interrupted.load(Ordering::Relaxed) {
            running.iter().for_each(|running| {
                running.filling.stop();
                running.monitor.stop();
            });
            if Nanos::now() > *give_up.get_or_insert(Nanos::now() + GRACE) {
                return Ok(());
            }
        }
        let length = Nanos::now() - last_interval;
        if format == BenchFormat::Jsonl && length >= INTERVAL {
            last_interval = Nanos::now();
            for running in running.iter_mut().filter(|running| running.ended.is_none()) {
                let line = serde_json::to_string(&running.interval(length)).map_err(Failure::failed)?;
                say(&line)?;
            }
        } else if length >= INTERVAL {
            last_interval = Nanos::now();
            bar.set_message(
                running.iter_mut().map(|running| running.line(length)).collect::<Vec<_>>().join("  "),
            );
        }
        bar.set_position(bar.elapsed().as_millis() as u64);
        running.iter().for_each(|running| {
            running.filling.ask();
            running.monitor.ask();
        });
    }
}

impl Running {
    /// The counts since the last call.
    fn latest(&mut self) -> (Tally, Tally) {
        let all = self.monitor.tally();
        let latest = all.since(&self.before);
        self.before = all.clone();
        (all, latest)
    }

    fn interval(&mut self, length: Duration) -> Interval {
        let (_, latest) = self.latest();
        let mut interval = Interval::new(&self.job.workload, &latest, Nanos::now() - self.started, length);
        interval.name.clone_from(&self.job.name);
        interval
    }

    fn line(&mut self, length: Duration) -> String {
        let name = self.job.name.clone().unwrap_or_else(|| self.job.target.to_string());
        if self.monitor.ios() == 0 && self.filling.ios() > 0 {
            let all = self.filling.tally();
            let latest = all.since(&std::mem::replace(&mut self.before, all.clone()));
            return line(&format!("filling {name}"), &all, &latest, length);
        }
        if !std::mem::replace(&mut self.has_begun, true) {
            self.before = Tally::default();
        }
        let (all, latest) = self.latest();
        line(&name, &all, &latest, length)
    }

    /// The result; for a load whose target has not given its last answers in time, the last submitted tally.
    fn result(self) -> Result<Summary, Broken> {
        let Running { job, monitor, started, ended, .. } = self;
        let mut summary = ended.unwrap_or_else(|| {
            let runtime = (Nanos::now() - started).saturating_sub(job.workload.warmup);
            let target = job.target.to_string();
            let mut summary = Summary::new(&target, "unknown", &job.workload, &monitor.tally(), runtime);
            summary.incomplete = Some("interrupted, and the target did not answer the last requests".into());
            Ok(summary)
        });
        match &mut summary {
            Ok(summary) => summary.name.clone_from(&job.name),
            Err(Broken { partial: Some(partial), .. }) => partial.name.clone_from(&job.name),
            Err(_) => {}
        }
        summary
    }
}

/// Rates of the last interval, of this `length`; percentiles over the whole load, since those need many requests.
pub(super) fn line(name: &str, all: &Tally, latest: &Tally, length: Duration) -> String {
    let seconds = length.as_secs_f64();
    let bytes: u64 = IoKind::ALL.iter().map(|kind| latest.kind(*kind).bytes).sum();
    let (mut latency, write) = (all.kind(IoKind::Read).latency.clone(), &all.kind(IoKind::Write).latency);
    // Both have the bounds of every tally.
    let _ = latency.add(write);
    let at = |quantile| weir_report::format::duration(latency.value_at_quantile(quantile) as f64);
    format!(
        "{name} {:.0} IOPS {:.1} MB/s  p50 {}  p99 {}  p99.999 {}",
        latest.ios() as f64 / seconds,
        bytes as f64 / 1e6 / seconds,
        at(0.5),
        at(0.99),
        at(0.99999),
    )
}

/// Ctrl-C (and SIGTERM) sets the returned flag: the load ends and keeps its measurements. The second signal ends the process at
/// once.
pub fn heed_interrupts() -> Result<Arc<AtomicBool>, Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let ours = Arc::new(AtomicBool::new(false));
    let interrupted = Arc::clone(&ours);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::Builder::new().name("interrupts".into()).spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if interrupted.swap(true, Ordering::Relaxed) {
                    std::process::exit(1);
                }
            }
        });
    })?;
    Ok(ours)
}

fn bar(running: &[Running]) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let time = |Running { job, .. }: &Running| {
        job.workload.warmup + job.workload.runtime.unwrap_or_default() * job.rounds.unwrap_or(1)
    };
    let total = running.iter().map(time).max();
    styled_bar(total.unwrap_or_default())
}

pub(super) fn styled_bar(total: Duration) -> ProgressBar {
    let bar = ProgressBar::new(total.as_millis() as u64);
    let style = ProgressStyle::with_template("{bar:20} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Shows the progress of work of a known duration, on a terminal only.
pub fn with_progress<T>(total: Duration, what: &str, work: impl FnOnce() -> T) -> T {
    let bar = styled_bar(total).with_message(what.to_owned());
    let ticking = bar.clone();
    let done = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&done);
    let ticker = std::thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            ticking.set_position(ticking.elapsed().as_millis() as u64);
            std::thread::park_timeout(Duration::from_millis(100));
        }
    });
    let result = work();
    done.store(true, Ordering::Relaxed);
    ticker.thread().unpark();
    let _ = ticker.join();
    bar.finish_and_clear();
    result
}
