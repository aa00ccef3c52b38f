//! Failures in a row: the reason is reported once, and the pauses between attempts grow.

use std::time::Duration;

/// The pauses between attempts: each is twice the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Pauses {
    /// After the first failure.
    pub first: Duration,
    /// The longest one.
    pub longest: Duration,
}

/// Where guests wait for the repair of the fault.
pub const GUESTS_WAIT: Pauses = Pauses { first: Duration::from_secs(1), longest: Duration::from_secs(3) };

/// The last failure, and the pause after it.
#[derive(Debug, Default)]
pub struct Failures {
    last: Option<(String, Duration)>,
}

impl Failures {
    /// An attempt has failed for this reason. Returns the pause before the next attempt, and whether the reason is new. A new reason does not
    /// shorten the pause: some faults show in several ways.
    pub fn failed(&mut self, reason: &str, pauses: Pauses) -> (Duration, bool) {
        let (pause, is_new) = match &self.last {
            Some((last, pause)) => ((*pause * 2).min(pauses.longest), last != reason),
            None => (pauses.first, true),
        };
        self.last = Some((reason.to_owned(), pause));
        (pause, is_new)
    }

    /// An attempt has succeeded, or none is to be made any more.
    pub fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const RARE: Pauses = Pauses { first: MINUTE, longest: Duration::from_secs(3600) };

    #[test]
    fn pauses_double_up_to_the_longest_and_each_reason_is_reported_once() {
        let mut failures = Failures::default();
        let minutes = [(); 8].map(|()| failures.failed("damaged", RARE).0.as_secs() / 60);
        assert_eq!(minutes, [1, 2, 4, 8, 16, 32, 60, 60]);
        let hour = RARE.longest;
        assert_eq!(failures.failed("damaged", RARE), (hour, false));
        assert_eq!(failures.failed("shut down", RARE), (hour, true), "the fault is the same, perhaps");
        failures.forget();
        assert_eq!(failures.failed("shut down", RARE), (MINUTE, true), "another time");
    }
}
