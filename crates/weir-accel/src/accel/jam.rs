//! How long writes wait for room in the log (P9): a log that frees nothing for longer than that refuses what it has no room for,
//! until it frees something again.

use std::cell::Cell;
use std::time::Duration;

use weir_block::Nanos;

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Writes for which there is no room get an error from now on.
    Jammed,
    /// Something was freed: writes wait again.
    Over,
}

/// Watches one disk's log.
#[derive(Debug)]
pub struct Jam {
    wait: Duration,
    /// Somebody found no room since the last turn.
    refused: Cell<bool>,
    /// Since when somebody has found no room, with nothing freed.
    since: Option<Nanos>,
    freed: u64,
    jammed: bool,
}

impl Jam {
    /// Writes wait for `wait` at most.
    pub fn new(wait: Duration, freed: u64) -> Jam {
        Jam { wait, refused: Cell::new(false), since: None, freed, jammed: false }
    }

    /// Notes that there is no room for a write. Whether it is to come all the same, for its error.
    pub fn no_room(&self) -> bool {
        self.refused.set(true);
        self.jammed
    }

    /// Whether writes get an error instead of waiting.
    pub fn is_jammed(&self) -> bool {
        self.jammed
    }

    /// Once in a turn: the log has freed everything up to the record `freed`.
    pub fn turn(&mut self, now: Nanos, freed: u64) -> Option<Change> {
        if freed != self.freed {
            self.freed = freed;
            self.since = None;
            self.refused.set(false);
            return std::mem::take(&mut self.jammed).then_some(Change::Over);
        }
        if self.refused.take() {
            self.since.get_or_insert(now);
        }
        if self.jammed || now < self.deadline() {
            return None;
        }
        self.jammed = true;
        Some(Change::Jammed)
    }

    /// When [`Jam::turn`] is due even if nothing happens.
    pub fn deadline(&self) -> Nanos {
        self.since.filter(|_| !self.jammed).map_or(Nanos::NEVER, |since| since + self.wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_counts_from_the_first_refusal_after_something_was_freed() {
        let mut jam = Jam::new(Duration::from_nanos(100), 5);
        assert_eq!((jam.turn(Nanos(1_000), 5), jam.deadline()), (None, Nanos::NEVER), "nobody waits");
        assert!(!jam.no_room());
        assert_eq!((jam.turn(Nanos(1_010), 5), jam.deadline()), (None, Nanos(1_110)));
        assert!(!jam.no_room());
        assert_eq!((jam.turn(Nanos(1_100), 6), jam.deadline()), (None, Nanos::NEVER), "it moves");
        assert!(!jam.no_room());
        assert_eq!(jam.turn(Nanos(1_105), 6), None);
        assert_eq!(jam.turn(Nanos(1_204), 6), None);
        assert_eq!((jam.turn(Nanos(1_205), 6), jam.deadline()), (Some(Change::Jammed), Nanos::NEVER));
        assert!(jam.no_room() && jam.is_jammed());
        assert_eq!(jam.turn(Nanos(1_300), 6), None, "told once");
        assert_eq!(jam.turn(Nanos(1_400), 7), Some(Change::Over));
        assert!(!jam.is_jammed() && !jam.no_room());
    }
}
