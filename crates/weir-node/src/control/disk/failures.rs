//! A disk that cannot be opened here: its reason is reported once, and the pauses between attempts grow.

use std::time::Duration;

/// Pause after the first failure; each of the same kind doubles it.
const FIRST: Duration = Duration::from_secs(1);

/// Longest pause. Not longer, because the fault may be repaired by then and guests wait.
const LONGEST: Duration = Duration::from_secs(3);

/// The last failure, and the last pause.
#[derive(Debug, Default)]
pub struct Failures {
    last: Option<(String, Duration)>,
}

impl Failures {
    /// It failed for this reason. Returns the pause before the next attempt, and whether the reason is new.
    pub fn failed(&mut self, reason: &str) -> (Duration, bool) {
        let (pause, news) = match &self.last {
            Some((last, pause)) if last == reason => ((*pause * 2).min(LONGEST), false),
            _ => (FIRST, true),
        };
        self.last = Some((reason.to_owned(), pause));
        (pause, news)
    }

    /// It went well, or is not to be opened here any more.
    pub fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_told_once_and_tried_again_less_and_less_often() {
        let mut failures = Failures::default();
        let mut took = Duration::ZERO;
        let mut told = 0;
        let mut tries = 0;
        while took < Duration::from_secs(600) {
            let (pause, news) = failures.failed("n1 keeps no write logs on flash");
            (took, told, tries) = (took + pause, told + u32::from(news), tries + 1);
        }
        assert_eq!(told, 1);
        assert!(tries < 210, "{tries} tries in ten minutes");
        assert_eq!(failures.failed("its backing does not answer"), (FIRST, true), "another reason");
        failures.forget();
        assert_eq!(failures.failed("its backing does not answer"), (FIRST, true), "another time");
    }
}
