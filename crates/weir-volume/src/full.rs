//! Writes of a disk whose volume is full: they wait for space, for a bounded time (P9).
//!
//! While some wait, the oldest is tried again every second. When it finds space, all others are tried, too, as far as the disk's depth
//! allows. Writes that come meanwhile are tried at once: a disk's blocks may be there already.

use std::collections::VecDeque;
use std::time::Duration;

use weir_block::{Code, ErrorKind, IoError, Nanos};

/// Pause before a write that has found no space is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Where writes do not wait, a volume counts as full for this long after the last write that has found no space.
const COUNTS_AS_FULL: Duration = Duration::from_secs(60);

/// The wait of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wait {
    /// It does not wait: who wrote it tries again itself.
    is_barred: bool,
    /// It has waited before. All its waits end then: the first began the limit, however much of it has been done since.
    until: Option<Nanos>,
    /// It has been tried again, and has no result yet.
    is_tried: bool,
}

impl Wait {
    /// Of what destage writes: it tries again itself, and the log takes writes meanwhile.
    pub const NONE: Wait = Wait { is_barred: true, until: None, is_tried: false };

    /// It waits, or is tried again after it has.
    pub fn has_waited(self) -> bool {
        self.until.is_some()
    }

    /// It waits no longer than until `now`.
    pub fn ended(self, now: Nanos) -> Wait {
        Wait { until: Some(now), ..self }
    }
}

/// The writes of one disk that wait for space.
#[derive(Debug)]
pub struct SpaceWait<T> {
    limit: Duration,
    /// By age.
    waiting: VecDeque<(Nanos, T)>,
    retry_at: Nanos,
    /// Those that have been tried again, and have no result yet.
    tried: usize,
    /// One of those was done, and no write has found the volume full since: there may be space for all.
    has_space: bool,
    /// The time of the last that has failed for lack of space.
    refused_at: Option<Nanos>,
    /// Nothing waits any more.
    is_closed: bool,
}

impl<T> SpaceWait<T> {
    /// Each write waits for `limit` at most; zero: it does not wait.
    pub fn new(limit: Duration) -> SpaceWait<T> {
        SpaceWait {
            limit,
            waiting: VecDeque::new(),
            retry_at: Nanos::NEVER,
            tried: 0,
            has_space: false,
            refused_at: None,
            is_closed: false,
        }
    }

    /// A write has found no space. Gives it back if it is not to wait any longer; then it fails with [`SpaceWait::reason`].
    pub fn refused(&mut self, now: Nanos, mut wait: Wait, write: T) -> Option<T> {
        if wait.is_barred {
            return Some(write);
        }
        let was_tried = self.has_result(&mut wait);
        self.has_space = false;
        let until = wait.until.unwrap_or(now + self.limit);
        if now >= until || self.is_closed {
            self.refused_at = Some(now);
            return Some(write);
        }
        let later = now + TRY_AGAIN;
        let is_first = was_tried || self.waiting.is_empty();
        self.retry_at = if is_first { later } else { self.retry_at.min(later) };
        let at = self.waiting.partition_point(|(other, _)| *other <= until);
        self.waiting.insert(at, (until, write));
        None
    }

    /// A write, or a piece of one, has an answer that says nothing of space, or that it found some. If it has waited, all others are tried
    /// again.
    pub fn answered(&mut self, wait: &mut Wait) {
        if self.has_result(wait) {
            (self.has_space, self.refused_at) = (true, None);
        }
    }

    /// Whether the result is that of one that was tried again.
    fn has_result(&mut self, wait: &mut Wait) -> bool {
        let is_tried = std::mem::take(&mut wait.is_tried);
        self.tried -= usize::from(is_tried);
        is_tried
    }

    /// The next write to try again, if it is time. `has_room`: there is room for more than one at a time.
    pub fn retry(&mut self, now: Nanos, has_room: bool) -> Option<(Wait, T)> {
        let is_over = self.waiting.front()?.0 <= now;
        let is_due = if self.has_space { has_room } else { now >= self.retry_at && self.tried == 0 };
        if !is_over && !is_due {
            return None;
        }
        let (until, write) = self.waiting.pop_front()?;
        self.tried += 1;
        if !is_over {
            self.retry_at = now + TRY_AGAIN;
        }
        Some((Wait { is_barred: false, until: Some(until), is_tried: true }, write))
    }

    /// Takes all that wait. Nothing waits from now on.
    pub fn give_up(&mut self) -> impl Iterator<Item = T> + use<'_, T> {
        self.is_closed = true;
        self.waiting.drain(..).map(|(_, write)| write)
    }

    /// The error of a write that does not wait, or not any longer, and has found no space with `error`.
    pub fn reason(&self, error: IoError) -> IoError {
        match self.is_closed {
            true => IoError::new(ErrorKind::Retry, Code::ShuttingDown, "waiting for space"),
            false => error,
        }
    }

    /// Nothing waits, or is tried again.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.tried == 0
    }

    /// Those that wait.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.iter().map(|(_, write)| write)
    }

    /// Writes that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// When [`SpaceWait::retry`] is due. `has_room` as there.
    pub fn deadline(&self, has_room: bool) -> Nanos {
        let Some(&(until, _)) = self.waiting.front() else { return Nanos::NEVER };
        match self.has_space {
            true if has_room => Nanos(0),
            false if self.tried == 0 => self.retry_at.min(until),
            _ => until,
        }
    }

    /// Whether writes wait for space, or lately have found none.
    pub fn lacks_space(&self, now: Nanos) -> bool {
        self.tried > 0
            || !self.waiting.is_empty()
            || self.refused_at.is_some_and(|at| now < at + COUNTS_AS_FULL)
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
    fn the_oldest_is_tried_every_second_and_all_at_once_when_it_finds_space() {
        let mut line = SpaceWait::new(Duration::from_secs(10));
        for (now, write) in [(1, 'a'), (2, 'b'), (2, 'c'), (2, 'd')] {
            assert_eq!(line.refused(at(now), Wait::default(), write), None);
        }
        assert!(line.lacks_space(at(2)) && line.retry(Nanos(2 * SECOND - 1), true).is_none());
        let (wait, write) = line.retry(at(2), false).unwrap();
        assert_eq!(write, 'a');
        assert!(line.retry(at(9), true).is_none(), "one at a time");
        assert_eq!(line.refused(at(9), wait, write), None);
        assert!(line.retry(Nanos(10 * SECOND - 1), true).is_none(), "once a second");
        let (mut wait, write) = line.retry(at(10), true).unwrap();
        assert_eq!(write, 'a', "it is still the oldest");
        line.answered(&mut wait);
        assert_eq!((line.deadline(true), line.deadline(false)), (Nanos(0), at(12)));
        assert!(line.retry(at(10), false).is_none(), "no more than the disk's depth");
        let mut all: Vec<_> = std::iter::from_fn(|| line.retry(at(10), true)).collect();
        assert_eq!(all.iter().map(|(_, write)| *write).collect::<String>(), "bcd");
        assert!(line.lacks_space(at(10)), "they may find none");
        all.iter_mut().for_each(|(wait, _)| line.answered(wait));
        assert!(!line.lacks_space(at(10)) && line.deadline(true) == Nanos::NEVER);
        assert_eq!(line.refused(at(100), Wait::default(), 'e'), None);
        assert_eq!(line.deadline(true), at(101), "what was found is used up");
    }

    #[test]
    fn a_write_waits_for_its_time_and_not_at_all_without_one() {
        let (mut line, mut many) =
            (SpaceWait::new(Duration::from_secs(3)), SpaceWait::new(Duration::from_secs(3)));
        assert_eq!(line.refused(at(1), Wait::default(), 'a'), None);
        let (wait, write) = line.retry(at(4), true).unwrap();
        assert_eq!(line.refused(at(4), wait, write), Some('a'));
        assert!(line.lacks_space(at(63)) && !line.lacks_space(at(64)));
        (0..3).for_each(|write| assert_eq!(many.refused(at(1), Wait::default(), write), None));
        assert_eq!(many.deadline(true), at(2));
        let (probe, _) = many.retry(at(2), true).unwrap();
        assert_eq!(many.deadline(true), at(4), "the others' time ends though the oldest has no answer");
        let ended: Vec<_> = std::iter::from_fn(|| many.retry(at(4), false)).collect();
        assert_eq!(ended.iter().map(|(_, write)| *write).collect::<Vec<_>>(), [1, 2]);
        assert!(ended.into_iter().all(|(wait, write)| many.refused(at(4), wait, write) == Some(write)));
        assert_eq!(many.refused(at(4), probe, 0), Some(0));
        let mut none = SpaceWait::new(Duration::ZERO);
        assert_eq!(none.refused(at(1), Wait::default(), 'a'), Some('a'));
        assert!(none.retry(at(9), true).is_none() && none.deadline(true) == Nanos::NEVER);
    }

    #[test]
    fn the_pieces_of_a_request_wait_for_one_limit_together() {
        let mut line = SpaceWait::new(Duration::from_secs(3));
        assert_eq!(line.refused(at(1), Wait::default(), 'a'), None);
        let (mut wait, write) = line.retry(at(3), true).unwrap();
        line.answered(&mut wait);
        line.answered(&mut wait);
        assert_eq!(line.refused(at(3), wait, write), None, "the second piece finds none");
        let (wait, write) = line.retry(at(4), true).expect("its time is over");
        assert_eq!(line.refused(at(4), wait, write), Some('a'));
    }

    #[test]
    fn nothing_waits_after_giving_up() {
        let mut line = SpaceWait::new(Duration::from_secs(600));
        let full = IoError::from_errno(libc::ENOSPC, "a write");
        assert!(['a', 'b'].into_iter().all(|write| line.refused(at(1), Wait::default(), write).is_none()));
        let (wait, write) = line.retry(at(2), true).unwrap();
        assert_eq!(line.reason(full).code, Code::NoSpace);
        assert_eq!(line.give_up().collect::<Vec<_>>(), ['b']);
        assert_eq!(line.refused(at(2), wait, write), Some('a'), "one that was under way");
        assert_eq!(line.refused(at(2), Wait::default(), 'c'), Some('c'));
        assert_eq!((line.reason(full).code, line.len()), (Code::ShuttingDown, 0));
        assert_eq!(line.deadline(true), Nanos::NEVER);
    }
}
