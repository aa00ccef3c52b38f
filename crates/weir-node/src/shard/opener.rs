//! Opens backings away from the shard's thread: opening, and closing, wait for the storage for as long as it does not answer, and a
//! shard must not. A backing that hangs costs one thread, and its own disk only.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_block::{Nanos, OwnerId, Reactor, Throttle, Waker};
use weir_volume::{BackingOptions, FileBacking, Mark, OpenedFile, Trace};

use crate::stack::{Bottom, Wrap};

/// Most backings of a shard that are being opened at once, those that hang included (P10).
const MOST: usize = 64;

/// A look that fails is made again five times a second; one line in ten seconds says so.
pub(crate) static LOOKS: Throttle = Throttle::new("look-failed", Duration::from_secs(10));

/// Where backings are.
pub trait Storage: Send + Sync {
    /// Begins to open what is at `path`, and returns at once. The outcome goes to `report`.
    ///
    /// # Errors
    /// In words: it cannot even be begun.
    fn open(&self, path: &Path, options: BackingOptions, report: Report) -> Result<(), String>;

    /// Begins to look for I/O that is still under way to what is at `path`, of a process of this machine that has ended, and returns at
    /// once. Whoever cannot look drops `answer`.
    fn look(&self, path: &Path, mark: Mark, answer: oneshot::Sender<Trace>);
}

/// A backing that has been opened, on its way to the shard.
pub trait Backing: Send {
    /// Puts it on a shard, with what is to be put around that of `disk`. Also returns the number that its events carry.
    ///
    /// # Errors
    /// In words: it cannot be used.
    fn attach(
        self: Box<Self>,
        reactor: &mut Reactor,
        disk: &str,
        wrap: &dyn Wrap,
    ) -> Result<(OwnerId, Box<dyn Bottom>), String>;

    /// Closes it without keeping the shard waiting.
    fn discard(self: Box<Self>);
}

/// The way back to the shard that wants a backing.
pub struct Report {
    number: u64,
    done: Sender<Opened>,
    waker: Arc<Waker>,
}

impl Report {
    /// The backing, or in words why it cannot be used. If the shard has ended, it is closed here.
    pub fn done(self, result: Result<Box<dyn Backing>, String>) {
        let _ = self.done.send(Opened { number: self.number, result });
        self.waker.wake();
    }
}

/// Files and block devices of this machine, each opened on a thread of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Files;

impl Storage for Files {
    fn open(&self, path: &Path, options: BackingOptions, report: Report) -> Result<(), String> {
        let path = path.to_owned();
        let work = move || {
            let opened = OpenedFile::open(&path, &options).map_err(|error| error.to_string());
            report.done(opened.map(|file| Box::new(file) as Box<dyn Backing>));
        };
        let started = thread::Builder::new().name("weir-open".into()).spawn(work);
        started.map(drop).map_err(|error| format!("no thread to open the backing with: {error}"))
    }

    fn look(&self, path: &Path, mark: Mark, answer: oneshot::Sender<Trace>) {
        let path = path.to_owned();
        let work = move || match mark.probe(&path) {
            Ok(seen) => drop(answer.send(seen)),
            Err(error) => {
                if let Some(left_out) = LOOKS.pass(Nanos::now()) {
                    tracing::warn!(%error, left_out, "the end of a former owner's requests cannot be seen now");
                }
            }
        };
        // Without an answer it is asked again.
        let _ = thread::Builder::new().name("weir-look".into()).spawn(work);
    }
}

impl Backing for OpenedFile {
    fn attach(
        self: Box<Self>,
        reactor: &mut Reactor,
        disk: &str,
        wrap: &dyn Wrap,
    ) -> Result<(OwnerId, Box<dyn Bottom>), String> {
        let backing = FileBacking::new(reactor, *self).map_err(|error| error.to_string())?;
        Ok((backing.owner(), wrap.bottom(disk, backing)))
    }

    fn discard(self: Box<Self>) {
        // Without a thread it is closed here: what was moved into the closure is dropped with it.
        let _ = thread::Builder::new().name("weir-close".into()).spawn(move || drop(self));
    }
}

/// What came of an opening.
pub struct Opened {
    /// As given to [`Opener::start`].
    pub number: u64,
    /// The backing, or why it cannot be used.
    pub result: Result<Box<dyn Backing>, String>,
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

    /// Begins to open what is at `path`. The outcome comes from [`Opener::take`], when the storage has answered.
    ///
    /// # Errors
    /// In words: too many openings hang, or this one cannot be begun.
    pub fn start(&mut self, number: u64, path: PathBuf, options: BackingOptions) -> Result<(), String> {
        if self.running >= MOST {
            return Err(format!("{MOST} backings of this shard are being opened and do not answer"));
        }
        let report = Report { number, done: self.report.clone(), waker: Arc::clone(&self.waker) };
        self.storage.open(&path, options, report)?;
        self.running += 1;
        Ok(())
    }

    /// The next outcome, if there is one.
    pub fn take(&mut self) -> Option<Opened> {
        let opened = self.done.try_recv().ok()?;
        self.running -= 1;
        Some(opened)
    }

    /// Closes what nobody wants any more.
    pub fn discard(opened: Opened) {
        if let Ok(backing) = opened.result {
            backing.discard();
        }
    }
}
