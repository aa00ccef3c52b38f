//! Rate limit of log lines that a client can cause: one line per period, with the number of suppressed lines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Nanos;

/// Passes one line in each period, and counts the suppressed ones. For a `static`.
#[derive(Debug)]
pub struct Throttle {
    name: &'static str,
    every: Duration,
    /// Earliest time of the next line, in [`Nanos`].
    next: AtomicU64,
    since_last: AtomicU64,
    all: AtomicU64,
}

impl Throttle {
    /// One line in `every`; `name` identifies it in metrics, with letters and `-`.
    #[must_use]
    pub const fn new(name: &'static str, every: Duration) -> Throttle {
        let (next, since_last, all) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Throttle { name, every, next, since_last, all }
    }

    /// If a line may be written now: the number of lines suppressed since the last one.
    pub fn pass(&self, now: Nanos) -> Option<u64> {
        let next = self.next.load(Ordering::Relaxed);
        let free = now.0 >= next
            && self
                .next
                .compare_exchange(next, (now + self.every).0, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if free {
            return Some(self.since_last.swap(0, Ordering::Relaxed));
        }
        self.since_last.fetch_add(1, Ordering::Relaxed);
        self.all.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Its name in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Lines suppressed since the process started.
    #[must_use]
    pub fn suppressed(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_a_period_says_how_many_were_left_out() {
        let throttle = Throttle::new("test", Duration::from_secs(1));
        let at = |seconds: u64| Nanos(seconds * 1_000_000_000);
        assert_eq!(throttle.pass(at(5)), Some(0));
        assert!((0..1000).all(|_| throttle.pass(at(5)).is_none()));
        assert_eq!(throttle.pass(at(6)), Some(1000));
        assert_eq!(throttle.pass(at(6)), None);
        assert_eq!((throttle.pass(at(7)), throttle.suppressed()), (Some(1), 1001));
    }
}
