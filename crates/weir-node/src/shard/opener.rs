//! Opens backings away from the shard's thread: opening, and closing, wait for the storage for as long as it does not answer, and a
//! shard must not. A backing that hangs costs one thread, and its own disk only.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::oneshot;
use weir_block::{Nanos, Waker};
use weir_volume::{BackingKind, BackingOptions, Mark, OpenedBacking, Trace};

use crate::throttles::LOOK_FAILED;

/// Most backings of a shard that are being opened at once, those that hang included (P10).
const MOST: usize = 64;

/// The distinct failures since the last log line, which contains all of them: so no disk's failure is suppressed.
static FAILED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A factory of backings.
pub trait Storage: Send + Sync {
    /// Begins to open a backing, and returns at once. The outcome goes to `report`.
    ///
    /// # Errors
    /// In words: it cannot even be begun.
    fn open(&self, kind: &BackingKind, options: BackingOptions, report: Report) -> Result<(), String>;

    /// Begins to check a backing for I/O in flight of a process of this machine that has ended, and returns at once. Drops
    /// `answer` if it cannot check.
    fn look(&self, kind: &BackingKind, mark: Mark, answer: oneshot::Sender<Trace>);
}

/// The way back to the shard that wants a backing.
pub struct Report {
    number: u64,
    done: Sender<Opened>,
    waker: Arc<Waker>,
}

impl Report {
    /// The backing, or in words why it cannot be used. If the shard has ended, it is closed here.
    pub fn done(self, result: Result<Box<dyn OpenedBacking>, String>) {
        let _ = self.done.send(Opened { number: self.number, result });
        self.waker.wake();
    }
}

/// Backings of every kind, each opened on a thread of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Threads;

impl Storage for Threads {
    fn open(&self, kind: &BackingKind, options: BackingOptions, report: Report) -> Result<(), String> {
        let kind = kind.clone();
        let work = move || report.done(kind.open(&options).map_err(|error| error.to_string()));
        let started = thread::Builder::new().name("weir-open".into()).spawn(work);
        started.map(drop).map_err(|error| format!("no thread to open the backing with: {error}"))
    }

    fn look(&self, kind: &BackingKind, mark: Mark, answer: oneshot::Sender<Trace>) {
        let kind = kind.clone();
        let work = move || match kind.probe(mark) {
            Ok(seen) => drop(answer.send(seen)),
            Err(error) => {
                let mut failed = FAILED.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.len() < MOST {
                    failed.insert(error.to_string());
                }
                if let Some(left_out) = LOOK_FAILED.pass(Nanos::now()) {
                    let errors: Vec<_> = std::mem::take(&mut *failed).into_iter().collect();
                    drop(failed);
                    let errors = errors.join("; ");
                    tracing::warn!(
                        errors,
                        left_out,
                        "the end of a former owner's requests cannot be seen now"
                    );
                }
            }
        };
        // Without an answer the check is repeated.
        let _ = thread::Builder::new().name("weir-look".into()).spawn(work);
    }
}

/// The result of an opening.
pub struct Opened {
    /// As given to [`Opener::start`].
    pub number: u64,
    /// The backing, or why it cannot be used.
    pub result: Result<Box<dyn OpenedBacking>, String>,
}

/// The openings of one shard.
pub struct Opener {
    storage: Arc<dyn Storage>,
    done: Receiver<Opened>,
    report: Sender<Opened>,
    waker: Arc<Waker>,
    running: usize,
}

impl Opener {
    /// An opener that wakes its shard by `waker`.
    pub fn new(storage: Arc<dyn Storage>, waker: Arc<Waker>) -> Opener {
        let (report, done) = channel();
        Opener { storage, done, report, waker, running: 0 }
    }

    /// Begins to open a backing. The outcome comes from [`Opener::take`], when the storage has answered.
    ///
    /// # Errors
    /// In words: too many openings hang, or this one cannot be begun.
    pub fn start(&mut self, number: u64, kind: &BackingKind, options: BackingOptions) -> Result<(), String> {
        if self.running >= MOST {
            return Err(format!("{MOST} backings of this shard are being opened and do not answer"));
        }
        let report = Report { number, done: self.report.clone(), waker: Arc::clone(&self.waker) };
        self.storage.open(kind, options, report)?;
        self.running += 1;
        Ok(())
    }

    /// The next outcome, if there is one.
    pub fn take(&mut self) -> Option<Opened> {
        let opened = self.done.try_recv().ok()?;
        self.running -= 1;
        Some(opened)
    }

    /// Closes a backing that is not needed any more.
    pub fn discard(opened: Opened) {
        if let Ok(backing) = opened.result {
            backing.discard();
        }
    }
}
