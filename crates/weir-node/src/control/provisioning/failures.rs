//! Steps that other processes have begun, and that this node cannot finish.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_block::Nanos;

/// Pause after the first failed attempt. Whoever makes a disk of that name tries at once.
const SHORTEST: Duration = Duration::from_secs(60);
/// Longest pause before another attempt.
const LONGEST: Duration = Duration::from_secs(3600);

/// Failed attempts, by the keys of their notes. Each pause is twice the one before it: a cause that lasts, such as damage for which the
/// filesystem shuts down, would otherwise take the volume from one coordinator to the next every few seconds.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<String, Failure>);

#[derive(Debug)]
struct Failure {
    reason: String,
    pause: Duration,
    until: Nanos,
}

impl Failures {
    /// Forgets all but those of `notes`, which are still there.
    pub(super) fn keep<'a>(&mut self, notes: impl Iterator<Item = &'a str> + Clone) {
        self.0.retain(|key, _| notes.clone().any(|note| note == key));
    }

    pub(super) fn is_due(&self, note: &str, now: Nanos) -> bool {
        self.0.get(note).is_none_or(|failure| now >= failure.until)
    }

    /// An attempt has failed. Returns whether it is the first one with this reason.
    pub(super) fn add(&mut self, note: &str, reason: &str, now: Nanos) -> bool {
        let before = self.0.get(note);
        let pause = before.map_or(SHORTEST, |failure| (failure.pause * 2).min(LONGEST));
        let is_new = before.is_none_or(|failure| failure.reason != reason);
        self.0.insert(note.to_owned(), Failure { reason: reason.to_owned(), pause, until: now + pause });
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_again_and_again_is_tried_more_and_more_rarely_and_told_once() {
        let mut failures = Failures::default();
        let (mut now, mut attempts, mut told) = (Nanos(0), 0, 0);
        while now < Nanos(0) + Duration::from_secs(24 * 3600) {
            if failures.is_due("a", now) {
                attempts += 1;
                told += u32::from(failures.add("a", "damaged", now));
            }
            now = now + Duration::from_secs(1);
        }
        // After 0, 1, 3, 7, 15, 31 and 63 minutes, and then one in an hour.
        assert_eq!((attempts, told), (7 + 22, 1));
        assert!(failures.is_due("b", now), "each note has its own");
        assert!(failures.add("a", "gone", now), "the log has each new reason");

        failures.keep(["b"].into_iter());
        assert!(failures.is_due("a", now), "its note was struck off: this is another step");
    }
}
