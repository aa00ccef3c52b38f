//! Writes of a disk whose volume is full: they wait for space, for a bounded time (P9).
//!
//! While some wait, the oldest is tried again every second. When it finds space, all others are tried, too. Writes that come meanwhile are
//! tried at once: a disk's blocks may be there already.

use std::collections::VecDeque;
use std::time::Duration;

use weir_block::{Code, IoError, Nanos};

/// Pause before a write that has found no space is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Where writes do not wait, a volume counts as full for this long after the last write that has found no space.
const COUNTS_AS_FULL: Duration = Duration::from_secs(60);

/// Where the wait of one write ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wait {
    /// It has waited before, until then at most.
    until: Option<Nanos>,
}

/// The writes of one disk that wait for space.
#[derive(Debug)]
pub struct SpaceWait<T> {
    limit: Duration,
    /// By age.
    waiting: VecDeque<(Nanos, T)>,
    retry_at: Nanos,
    /// The oldest has been tried again, and has no result yet.
    probes: bool,
    /// Where writes do not wait: the time of the last that has found no space.
    refused_at: Option<Nanos>,
}

impl<T> SpaceWait<T> {
    /// Each write waits for `limit` at most; zero: it does not wait.
    pub fn new(limit: Duration) -> SpaceWait<T> {
        SpaceWait { limit, waiting: VecDeque::new(), retry_at: Nanos::NEVER, probes: false, refused_at: None }
    }

    /// A write has found no space. Gives it back if it is not to wait any longer.
    pub fn refused(&mut self, now: Nanos, wait: Wait, write: T) -> Option<T> {
        let until = wait.until.unwrap_or(now + self.limit);
        self.probes &= wait.until.is_none();
        if now >= until {
            self.refused_at = Some(now);
            return Some(write);
        }
        let at = self.waiting.partition_point(|(other, _)| *other <= until);
        self.waiting.insert(at, (until, write));
        self.retry_at = self.retry_at.min(now + TRY_AGAIN);
        None
    }

    /// A write has an answer that says nothing of space, or that it found some. All that wait are tried again after one of them has.
    pub fn answered(&mut self, wait: Wait, now: Nanos) {
        if wait.until.is_some() {
            (self.probes, self.refused_at) = (false, None);
            if !self.waiting.is_empty() {
                self.retry_at = now;
            }
        }
    }

    /// The next write to try again, if it is time, with its place in the line.
    pub fn retry(&mut self, now: Nanos) -> Option<(Wait, T)> {
        let is_over = self.waiting.front()?.0 <= now;
        if !is_over && (now < self.retry_at || self.probes) {
            return None;
        }
        let (until, write) = self.waiting.pop_front()?;
        if !is_over {
            (self.probes, self.retry_at) = (true, now + TRY_AGAIN);
        }
        Some((Wait { until: Some(until) }, write))
    }

    /// Not now: the write goes back to where it was.
    pub fn put_back(&mut self, now: Nanos, wait: Wait, write: T) {
        let later = now + TRY_AGAIN;
        (self.probes, self.retry_at) = (false, later);
        self.waiting.push_front((wait.until.map_or(later, |until| until.max(later)), write));
    }

    /// Takes all that wait.
    pub fn give_up(&mut self) -> impl Iterator<Item = T> + use<'_, T> {
        (self.retry_at, self.probes) = (Nanos::NEVER, false);
        self.waiting.drain(..).map(|(_, write)| write)
    }

    /// Writes that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// When [`SpaceWait::retry`] is due.
    pub fn deadline(&self) -> Nanos {
        let Some((until, _)) = self.waiting.front() else { return Nanos::NEVER };
        if self.probes { *until } else { self.retry_at.min(*until) }
    }

    /// Whether writes wait for space, or lately have found none.
    pub fn lacks_space(&self, now: Nanos) -> bool {
        self.probes || !self.waiting.is_empty() || self.refused_at.is_some_and(|at| now < at + COUNTS_AS_FULL)
    }
}

/// Whether an error says that the volume is full.
pub fn is_full(error: &IoError) -> bool {
    error.code == Code::NoSpace
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * SECOND)
    }

    #[test]
    fn the_oldest_is_tried_every_second_and_all_when_it_finds_space() {
        let mut line = SpaceWait::new(Duration::from_secs(10));
        for (now, write) in [(1, 'a'), (2, 'b'), (2, 'c')] {
            assert_eq!(line.refused(at(now), Wait::default(), write), None);
        }
        assert!(line.lacks_space(at(2)) && line.retry(Nanos(2 * SECOND - 1)).is_none());
        let (wait, write) = line.retry(at(2)).unwrap();
        assert_eq!(write, 'a');
        assert!(line.retry(at(9)).is_none(), "one at a time");
        assert_eq!(line.refused(at(9), wait, write), None);
        let (wait, write) = line.retry(at(10)).unwrap();
        assert_eq!(write, 'a', "it is still the oldest");
        line.answered(wait, at(10));
        let (second, write) = line.retry(at(10)).unwrap();
        assert_eq!(write, 'b');
        line.answered(second, at(10));
        let (third, write) = line.retry(at(10)).unwrap();
        assert_eq!((write, line.len()), ('c', 0));
        assert!(line.lacks_space(at(10)), "it may find none");
        line.answered(third, at(10));
        assert!(!line.lacks_space(at(10)) && line.deadline() == Nanos::NEVER);
    }

    #[test]
    fn a_write_waits_for_its_time_and_not_at_all_without_one() {
        let (mut line, mut many) =
            (SpaceWait::new(Duration::from_secs(3)), SpaceWait::new(Duration::from_secs(3)));
        assert_eq!(line.refused(at(1), Wait::default(), 'a'), None);
        let (wait, write) = line.retry(at(4)).unwrap();
        assert_eq!(line.refused(at(4), wait, write), Some('a'));
        assert!(line.lacks_space(at(63)) && !line.lacks_space(at(64)));
        (0..3).for_each(|write| assert_eq!(many.refused(at(1), Wait::default(), write), None));
        assert_eq!(many.deadline(), at(2));
        let (probe, _) = many.retry(at(2)).unwrap();
        assert_eq!(many.deadline(), at(4), "the others' time ends though the oldest has no answer");
        let ended: Vec<_> = std::iter::from_fn(|| many.retry(at(4))).collect();
        assert_eq!(ended.iter().map(|(_, write)| *write).collect::<Vec<_>>(), [1, 2]);
        assert!(ended.into_iter().all(|(wait, write)| many.refused(at(4), wait, write) == Some(write)));
        assert_eq!(many.refused(at(4), probe, 0), Some(0));
        let mut none = SpaceWait::new(Duration::ZERO);
        assert_eq!(none.refused(at(1), Wait::default(), 'a'), Some('a'));
        assert!(none.retry(at(9)).is_none() && none.deadline() == Nanos::NEVER);
    }
}
