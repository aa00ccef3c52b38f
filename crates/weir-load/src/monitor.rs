//! Progress of a running load, and its early end.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weir_block::Observe;

use crate::tally::Tally;

/// Sees every request of a load.
pub(crate) struct Observer(pub(crate) Arc<Mutex<dyn Observe + Send>>);

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}

/// Lets other threads observe a load and end it early.
#[derive(Debug, Default)]
pub struct Monitor {
    pub(crate) stop: AtomicBool,
    pub(crate) ios: AtomicU64,
    /// Incremented to request intermediate results; each thread hands in its tally when it sees a new number.
    pub(crate) asked: AtomicU32,
    /// By thread.
    handed_in: Mutex<Vec<Tally>>,
    /// Sees every request of all threads.
    pub(crate) observer: Option<Observer>,
    /// The file in which a verifying load records its writes.
    pub(crate) record: Option<PathBuf>,
}

impl Monitor {
    /// A monitor without observer or record.
    #[must_use]
    pub fn new() -> Monitor {
        Monitor::default()
    }

    /// As [`Monitor::new`], and `observer` sees every issued request, the warm-up's included. The threads of a
    /// load (and of others with the same observer) share its lock, so this is for loads whose rate is known.
    #[must_use]
    pub fn observed_by(observer: Arc<Mutex<dyn Observe + Send>>) -> Monitor {
        Monitor { observer: Some(Observer(observer)), ..Monitor::default() }
    }

    /// As [`Monitor::new`], and a verifying load keeps its history in a new file at `path`, so that another process can verify
    /// the data by it when the load, or its target, was killed. See [`crate::verify::Record`].
    #[must_use]
    pub fn recording(path: &Path) -> Monitor {
        Monitor { record: Some(path.into()), ..Monitor::default() }
    }

    /// Ends the load soon; the result has the counts until then, and is marked as incomplete.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether [`Monitor::stop`] was called.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Requests answered so far by all threads, the warm-up's included.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.ios.load(Ordering::Relaxed)
    }

    /// Requests every thread's tally; each submits it when its next requests complete.
    pub fn ask(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// The sum of the threads' last tallies. Restarts when the warm-up ends.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut whole = Tally::default();
        self.parts().iter().for_each(|part| whole.add(part));
        whole
    }

    pub(crate) fn hand_in(&self, thread: u32, tally: &Tally) {
        let mut parts = self.parts();
        if parts.len() <= thread as usize {
            parts.resize_with(thread as usize + 1, Tally::default);
        }
        parts[thread as usize].clone_from(tally);
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Tally>> {
        self.handed_in.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
