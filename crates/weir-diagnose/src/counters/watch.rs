//! Counters of a run whose generator's threads end with it: they are looked at while they work.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Counters, Process, Sample, Watched};

/// Between two samples of the generator's threads. A thread's time after its last sample is not counted: a twentieth of a run
/// of half a second.
const BETWEEN_LOOKS: Duration = Duration::from_millis(25);

/// Counts from [`Watch::begin`] to [`Watch::end`]. Ends with the value.
#[derive(Debug)]
pub struct Watch {
    watched: Watched,
    before: Sample,
    /// Present where a generator is watched, and a thread could be had.
    looks: Option<Looks>,
}

#[derive(Debug)]
struct Looks {
    /// Dropped to end it.
    going: Sender<()>,
    seen: JoinHandle<Process>,
}

impl Watch {
    /// Looks, and goes on looking at the generator.
    #[must_use]
    pub fn begin(watched: &Watched) -> Watch {
        let before = Sample::take(watched);
        let looks = watched.generator.and_then(|generator| {
            let (going, ended) = channel::<()>();
            let look = move || {
                let mut seen = Process::default();
                loop {
                    let now = Process::look(generator);
                    seen.update(now.unwrap_or_default());
                    if ended.recv_timeout(BETWEEN_LOOKS) != Err(RecvTimeoutError::Timeout) {
                        return seen;
                    }
                }
            };
            let thread = thread::Builder::new().name("weir-watch".to_owned()).spawn(look);
            Some(Looks { going, seen: thread.ok()? })
        });
        Watch { watched: watched.clone(), before, looks }
    }

    /// The counters of the `seconds` (above zero) since it began.
    #[must_use]
    pub fn end(self, seconds: f64) -> Counters {
        let mut after = Sample::take(&self.watched);
        if let Some(Looks { going, seen }) = self.looks {
            drop(going);
            if let (Ok(mut seen), Some(last)) = (seen.join(), after.generator.take()) {
                seen.update(last);
                after.generator = Some(seen);
            }
        }
        self.before.until(&after, seconds)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// More threads than processors compute and end: each waited, and a sample after their end does not show it.
    #[test]
    fn threads_that_have_ended_are_seen() {
        let me = Watched { generator: Some(std::process::id()), ..Watched::default() };
        let (watch, stop) = (Watch::begin(&me), AtomicBool::new(false));
        let processors = thread::available_parallelism().unwrap().get();
        thread::scope(|scope| {
            for _ in 0..4 * processors {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop()
                    }
                });
            }
            thread::sleep(Duration::from_millis(400));
            stop.store(true, Ordering::Relaxed);
        });
        let waited = watch.end(0.4).generator_wait.unwrap();
        assert!(waited > 0.3, "{waited}");
    }

    #[test]
    fn without_a_generator_nobody_looks() {
        let counters = Watch::begin(&Watched::default()).end(1.0);
        assert_eq!((counters.generator_wait, counters.node_wait), (None, None));
    }
}
