//! Opens backings on threads of their own: opening, and closing, wait for the storage for as long as it does not answer, and a
//! shard must not. A backing that hangs costs one thread, and its own disk only.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use weir_block::Waker;
use weir_volume::{BackingOptions, OpenedFile};

/// Most backings of a shard that are being opened at once, those that hang included (P10).
const MOST: usize = 64;

/// What came of an opening.
pub struct Opened {
    /// As given to [`Opener::start`].
    pub number: u64,
    /// The file, or why it cannot be used.
    pub result: Result<OpenedFile, String>,
}

/// The openings of one shard.
pub struct Opener {
    done: Receiver<Opened>,
    report: Sender<Opened>,
    waker: Arc<Waker>,
    running: usize,
}

impl Opener {
    /// An opener that wakes its shard by `waker`.
    pub fn new(waker: Arc<Waker>) -> Opener {
        let (report, done) = channel();
        Opener { done, report, waker, running: 0 }
    }

    /// Begins to open what is at `path`. The outcome comes from [`Opener::take`], when the storage has answered.
    ///
    /// # Errors
    /// In words: too many openings hang, or no thread can be had.
    pub fn start(&mut self, number: u64, path: PathBuf, options: BackingOptions) -> Result<(), String> {
        if self.running >= MOST {
            return Err(format!("{MOST} backings of this shard are being opened and do not answer"));
        }
        let (report, waker) = (self.report.clone(), Arc::clone(&self.waker));
        let work = move || {
            let result = OpenedFile::open(&path, &options).map_err(|error| error.to_string());
            // If the shard has ended, the file is closed here.
            let _ = report.send(Opened { number, result });
            waker.wake();
        };
        thread::Builder::new()
            .name("weir-open".into())
            .spawn(work)
            .map_err(|error| format!("no thread to open the backing with: {error}"))?;
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
        // Without a thread it is closed here: what was moved into the closure is dropped with it.
        let _ = thread::Builder::new().name("weir-close".into()).spawn(move || drop(opened));
    }
}
