//! How long requests wait for who does them (P9): for a coordinator or a server that is not there, and for one that is connected and answers
//! nothing, because its storage hangs, or its process stands still.

use std::time::Duration;

use weir_block::Nanos;

use crate::lun::route_status::Overdue;

/// Pause before one that did not answer before its limit is looked at again.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// A coordinator that owes answers and gives none is reported after this, long before requests fail.
const SILENT: Duration = Duration::from_secs(10);

/// A look that comes so late was not made by a thread that waited for it: time stood still for this process, and with it for whatever has
/// arrived meanwhile. That is read before anybody is given up.
const STOOD_STILL: Duration = Duration::from_secs(1);

/// The waits of one disk.
#[derive(Debug)]
pub(crate) struct Patience {
    /// The longest wait.
    limit: Duration,
    /// The end of the wait for a coordinator; [`Nanos::NEVER`] while no request waits, or when it is over.
    overdue_at: Nanos,
    /// Messages over the present connection that have no answer yet.
    asked: usize,
    /// Since when it owes answers and has given none.
    silent_since: Option<Nanos>,
    is_silent: bool,
    /// The first look after it was due to be reported came late.
    looks_again: bool,
}

impl Patience {
    /// Of a disk without a coordinator.
    pub fn new(now: Nanos, limit: Duration) -> Patience {
        let overdue_at = now + limit;
        Patience { limit, overdue_at, asked: 0, silent_since: None, is_silent: false, looks_again: false }
    }

    /// There is nothing to check.
    pub fn has_nothing(&self) -> bool {
        self.is_idle() && self.silent_since.is_none()
    }

    /// Nothing waits, or the wait is over.
    pub fn is_idle(&self) -> bool {
        self.overdue_at == Nanos::NEVER
    }

    /// Requests wait from now on, unless some do already.
    pub fn start(&mut self, now: Nanos) {
        if self.is_idle() {
            self.overdue_at = now + self.limit;
        }
    }

    /// The connection is gone, and with it whatever was on its way.
    pub fn disconnected(&mut self, now: Nanos) {
        (self.asked, self.silent_since) = (0, None);
        (self.is_silent, self.looks_again) = (false, false);
        self.start(now);
    }

    /// The coordinator has greeted. That does not end the wait for it: one may come and go and do nothing.
    pub fn greeted(&mut self) {
        self.is_silent = false;
    }

    /// A message is on its way that the coordinator has to answer.
    pub fn asked(&mut self, now: impl FnOnce() -> Nanos) {
        self.asked += 1;
        self.silent_since.get_or_insert_with(now);
    }

    /// The coordinator has answered one.
    pub fn answered(&mut self, now: Nanos) {
        self.asked = self.asked.saturating_sub(1);
        self.silent_since = (self.asked > 0).then_some(now);
        self.overdue_at = Nanos::NEVER;
        (self.is_silent, self.looks_again) = (false, false);
    }

    /// There is no memory here to take answers.
    pub fn takes_none(&mut self, now: Nanos) {
        self.silent_since = self.silent_since.map(|_| now);
    }

    /// Whether requests have waited for long enough. `waits`: some do.
    pub fn check(&mut self, now: Nanos, is_connected: bool, waits: bool) -> Option<Overdue> {
        if !is_connected {
            if self.overdue_at != Nanos::NEVER && now >= self.overdue_at + STOOD_STILL {
                self.overdue_at = now + STOOD_STILL;
            }
            let is_over = now >= self.overdue_at;
            if is_over {
                self.overdue_at = Nanos::NEVER;
            }
            return is_over.then_some(Overdue::Missing);
        }
        if !waits {
            self.overdue_at = Nanos::NEVER;
        } else if now >= self.overdue_at {
            // It may answer yet. If it goes, that was the end of the wait.
            self.overdue_at = now + ASK_AGAIN;
        }
        let mut since = self.silent_since?;
        if now >= since + self.limit + STOOD_STILL {
            since = Nanos((now + STOOD_STILL).0.saturating_sub(self.limit.as_nanos() as u64));
            self.silent_since = Some(since);
        }
        let due = since + SILENT.min(self.limit);
        if now >= due && !self.is_silent {
            // The next look comes at once, behind what has arrived.
            let is_late = now >= due + STOOD_STILL;
            self.is_silent = !is_late || std::mem::replace(&mut self.looks_again, true);
        }
        (now >= since + self.limit).then_some(Overdue::Silent)
    }

    /// Requests do not wait any more for a coordinator that is silent. Its connection is gone.
    pub fn gave_up(&mut self) {
        (self.overdue_at, self.is_silent) = (Nanos::NEVER, true);
    }

    /// The coordinator owes answers, and has given none for a while.
    pub fn is_silent(&self) -> bool {
        self.is_silent
    }

    /// Since when it owes answers and has given none.
    pub fn silent_since(&self) -> Option<Nanos> {
        self.silent_since
    }

    /// When it has to be looked at.
    pub fn deadline(&self) -> Nanos {
        let told = if self.is_silent { self.limit } else { SILENT.min(self.limit) };
        self.overdue_at.min(self.silent_since.map_or(Nanos::NEVER, |since| since + told))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_coordinator_that_answers_now_and_then_is_not_silent() {
        let mut patience = Patience::new(at(0), LIMIT);
        assert_eq!(patience.check(at(59), false, true), None);
        patience.greeted();
        patience.asked(|| at(59));
        patience.asked(|| at(59));
        for seconds in (60..1000).step_by(9) {
            assert_eq!(patience.check(at(seconds), true, true), None);
            assert!(!patience.is_silent());
            patience.asked(|| at(seconds));
            patience.answered(at(seconds));
        }
        // It has nothing to answer.
        patience.answered(at(1000));
        patience.answered(at(1000));
        assert_eq!(patience.deadline(), Nanos::NEVER);
        assert_eq!(patience.check(at(5000), true, true), None);
    }

    #[test]
    fn a_silent_one_is_reported_before_requests_fail() {
        let mut patience = Patience::new(at(0), LIMIT);
        patience.asked(|| at(100));
        assert_eq!(patience.deadline(), at(60));
        patience.asked(|| at(105));
        assert_eq!(patience.check(at(109), true, true), None);
        assert!(!patience.is_silent());
        assert_eq!(patience.check(at(110), true, true), None);
        assert!(patience.is_silent());
        assert_eq!(patience.check(at(159), true, true), None);
        assert_eq!(patience.check(at(160), true, true), Some(Overdue::Silent));
        patience.disconnected(at(160));
        patience.gave_up();
        assert_eq!(patience.check(at(10_000), false, true), None, "once");
        assert!(patience.is_silent());
        patience.greeted();
        assert!(!patience.is_silent());
    }

    /// This process was stopped, or its host suspended: what has come meanwhile is read first.
    #[test]
    fn nobody_is_given_up_at_the_first_look_after_time_stood_still() {
        let mut patience = Patience::new(at(0), LIMIT);
        assert_eq!(patience.check(at(500), false, true), None);
        assert_eq!(patience.deadline(), at(501));
        assert_eq!(patience.check(at(501), false, true), Some(Overdue::Missing));
        patience.greeted();
        patience.asked(|| at(600));
        assert_eq!(patience.check(at(640), true, true), None);
        assert!(
            !patience.is_silent() && patience.deadline() < at(640),
            "what has come is read, and it is looked at again"
        );
        assert_eq!(patience.check(at(640), true, true), None);
        assert!(patience.is_silent());
        assert_eq!(patience.check(at(900), true, true), None);
        assert_eq!(patience.deadline(), at(901));
        assert_eq!(patience.check(at(901), true, true), Some(Overdue::Silent));
    }

    #[test]
    fn answers_for_which_there_is_no_memory_here_are_no_silence() {
        let mut patience = Patience::new(at(0), LIMIT);
        patience.asked(|| at(100));
        patience.takes_none(at(155));
        assert_eq!(patience.check(at(160), true, true), None);
        assert_eq!(patience.check(at(215), true, true), Some(Overdue::Silent));
    }

    #[test]
    fn a_coordinator_that_comes_and_goes_without_an_answer_counts_as_missing() {
        let mut patience = Patience::new(at(0), LIMIT);
        for seconds in (0..60).step_by(5) {
            assert_eq!(patience.check(at(seconds), false, true), None);
            patience.greeted();
            patience.asked(|| at(seconds));
            patience.disconnected(at(seconds + 1));
        }
        assert_eq!(patience.check(at(60), false, true), Some(Overdue::Missing));
        assert_eq!(patience.check(at(61), false, true), None, "once");
    }
}
