//! The time that writes wait for room in a full log (P9). A log that frees nothing for longer refuses writes without room,
//! until it frees something again.

use std::cell::Cell;
use std::time::Duration;

use weir_block::{Code, Destage, ErrorKind, IoError, Nanos, RequestKind};

use super::Accel;

/// A change in how a full log treats writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Writes for which there is no room get an error from now on.
    Refuses,
    /// Something was freed: writes wait again.
    Takes,
}

/// Watches one disk's log.
#[derive(Debug)]
pub struct FullLog {
    /// The longest wait at present.
    wait: Duration,
    /// A write found no room since the last turn.
    refused: Cell<bool>,
    /// The time since which writes have found no room, with nothing freed.
    since: Option<Nanos>,
    freed: u64,
    refuses: bool,
}

impl FullLog {
    /// Writes wait for `wait` at most.
    pub fn new(wait: Duration, freed: u64) -> FullLog {
        FullLog { wait, refused: Cell::new(false), since: None, freed, refuses: false }
    }

    /// Notes that there is no room for a write. Whether it is to come all the same, for its error.
    pub fn no_room(&self) -> bool {
        self.refused.set(true);
        self.refuses
    }

    /// Whether writes get an error instead of waiting.
    pub fn refuses(&self) -> bool {
        self.refuses
    }

    /// Writes wait for `wait` at most from now on.
    pub fn set_wait(&mut self, wait: Duration) {
        self.wait = wait;
    }

    /// Once in a turn: the log has freed everything up to the record `freed`.
    pub fn turn(&mut self, now: Nanos, freed: u64) -> Option<Change> {
        if freed != self.freed {
            self.freed = freed;
            self.since = None;
            self.refused.set(false);
            return std::mem::take(&mut self.refuses).then_some(Change::Takes);
        }
        if self.refused.take() {
            self.since.get_or_insert(now);
        }
        if self.refuses || now < self.deadline() {
            return None;
        }
        self.refuses = true;
        Some(Change::Refuses)
    }

    /// When [`FullLog::turn`] is due even if nothing happens.
    pub fn deadline(&self) -> Nanos {
        self.since.filter(|_| !self.refuses).map_or(Nanos::NEVER, |since| since + self.wait)
    }
}

impl<L: Destage> Accel<L> {
    /// Whether destage finds no space in the backing.
    #[must_use]
    pub fn lacks_space(&self) -> bool {
        self.destager.error().is_some_and(|error| error.code == Code::NoSpace)
    }

    /// Whether a request is refused for that while the log has room: what was acknowledged could not be kept anywhere else.
    pub(super) fn refuses_for_space(&self, kind: RequestKind) -> bool {
        self.config.full_volume_wait.is_zero() && kind != RequestKind::Discard && self.lacks_space()
    }

    /// The longest wait for room.
    pub(super) fn room_wait(&self) -> Duration {
        if self.lacks_space() { self.config.full_volume_wait } else { self.config.full_log_wait }
    }

    /// Why writes do not wait for room any more.
    pub(super) fn full_log_reason(&self) -> String {
        let why = self.destager.error().map_or_else(String::new, |error| format!(": {error}"));
        let (wait, dirty) = (self.room_wait(), self.dirty.bytes());
        // In write-through nobody has got an answer for what is there.
        let bytes = if self.owner.configuration().write_back { "acknowledged bytes" } else { "bytes" };
        if wait.is_zero() {
            return format!("destage has stopped{why}; writes get an error, {dirty} {bytes} stay in the log");
        }
        format!(
            "the write log is full and has freed nothing for {wait:?}{why}; writes get an error, {dirty} {bytes} stay in the log"
        )
    }

    /// The error for a write that has waited for room long enough: the backing's, if there is one.
    pub(super) fn full_log_error(&self) -> IoError {
        let full = "the write log can take no more and its backing accepts no writes";
        self.destager.error().map_or_else(
            || IoError::new(ErrorKind::Retry, Code::Io, full),
            |error| IoError { context: full, ..error },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_counts_from_the_first_refusal_after_something_was_freed() {
        let mut full = FullLog::new(Duration::from_nanos(100), 5);
        assert_eq!((full.turn(Nanos(1_000), 5), full.deadline()), (None, Nanos::NEVER), "nobody waits");
        assert!(!full.no_room());
        assert_eq!((full.turn(Nanos(1_010), 5), full.deadline()), (None, Nanos(1_110)));
        assert!(!full.no_room());
        assert_eq!((full.turn(Nanos(1_100), 6), full.deadline()), (None, Nanos::NEVER), "it moves");
        assert!(!full.no_room());
        assert_eq!(full.turn(Nanos(1_105), 6), None);
        assert_eq!(full.turn(Nanos(1_204), 6), None);
        assert_eq!((full.turn(Nanos(1_205), 6), full.deadline()), (Some(Change::Refuses), Nanos::NEVER));
        assert!(full.no_room() && full.refuses());
        assert_eq!(full.turn(Nanos(1_300), 6), None, "told once");
        assert_eq!(full.turn(Nanos(1_400), 7), Some(Change::Takes));
        assert!(!full.refuses() && !full.no_room());
    }
}
