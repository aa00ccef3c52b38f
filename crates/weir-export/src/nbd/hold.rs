//! The stages of a hold of a disk's clients before a move, and their time limits.

use std::time::Duration;

use weir_block::Nanos;

/// The time for which clients that do not stop sending are still served.
const TAKES: Duration = Duration::from_millis(100);

/// The hold is complete when the layer has answered no request for this time, also with requests unanswered.
const SILENCE: Duration = Duration::from_millis(200);

/// The hold is complete after this time in any case.
const LONGEST: Duration = Duration::from_millis(500);

/// The time for which replies are kept. If the outcome of the move is unknown for longer, they are sent; the connections stay paused.
const KEEPS: Duration = Duration::from_secs(1);

/// A step that the connections are to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Take no new requests.
    Pause,
    /// Send the kept replies.
    Send,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// New requests are served, until none arrive.
    Taking,
    /// The requests taken are to be answered.
    Answering,
    /// All requests taken are answered, or a time limit has passed.
    Held,
    /// The replies are sent as well.
    Sent,
}

/// A hold of all clients of a disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    since: Nanos,
    /// The time of the layer's last answer, or of the end of `Taking`.
    answered: Nanos,
    stage: Stage,
}

impl Hold {
    pub fn new(now: Nanos) -> Hold {
        Hold { since: now, answered: now, stage: Stage::Taking }
    }

    /// Whether new requests are served.
    pub fn takes(&self) -> bool {
        self.stage == Stage::Taking
    }

    /// Whether the disk may be handed over.
    pub fn is_complete(&self) -> bool {
        matches!(self.stage, Stage::Held | Stage::Sent)
    }

    /// The layer has answered a request.
    pub fn on_answer(&mut self, now: Nanos) {
        self.answered = now;
    }

    /// The next step, if it is due. `quiet`: no client sends requests; `unanswered`: requests are at the layer.
    pub fn step(&mut self, now: Nanos, quiet: bool, unanswered: bool) -> Option<Order> {
        let lasts = now - self.since;
        if self.stage == Stage::Taking && (quiet || lasts >= TAKES) {
            (self.stage, self.answered) = (Stage::Answering, now);
            return Some(Order::Pause);
        }
        if self.stage == Stage::Answering
            && (!unanswered || now - self.answered >= SILENCE || lasts >= LONGEST)
        {
            self.stage = Stage::Held;
        }
        if self.stage == Stage::Held && lasts >= KEEPS {
            self.stage = Stage::Sent;
            return Some(Order::Send);
        }
        None
    }

    /// The time of the next step at the latest; `check` is the interval between checks of the clients.
    pub fn deadline(&self, now: Nanos, check: Duration) -> Nanos {
        match self.stage {
            Stage::Taking | Stage::Answering => now + check,
            Stage::Held => self.since + KEEPS,
            Stage::Sent => Nanos::NEVER,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = Nanos(1_000_000_000);

    fn after(ms: u64) -> Nanos {
        START + Duration::from_millis(ms)
    }

    #[test]
    fn silent_clients_are_held_at_once() {
        let mut hold = Hold::new(START);
        assert_eq!(hold.step(after(2), false, true), None);
        assert!(hold.takes() && !hold.is_complete());
        assert_eq!(hold.step(after(7), true, false), Some(Order::Pause));
        assert_eq!(hold.step(after(7), true, false), None);
        assert!(hold.is_complete());
        assert_eq!(hold.deadline(after(8), Duration::ZERO), START + KEEPS);
        assert_eq!(hold.step(START + KEEPS, true, false), Some(Order::Send));
        assert_eq!((hold.step(after(5000), true, false), hold.is_complete()), (None, true));
    }

    #[test]
    fn nobody_keeps_a_disk_from_moving() {
        let mut hold = Hold::new(START);
        assert_eq!(hold.step(after(99), false, true), None);
        assert_eq!(hold.step(after(100), false, true), Some(Order::Pause));
        // The layer answers nothing.
        assert_eq!((hold.step(after(299), false, true), hold.is_complete()), (None, false));
        assert_eq!((hold.step(after(300), false, true), hold.is_complete()), (None, true));

        // It answers now and then.
        let mut hold = Hold::new(START);
        assert_eq!(hold.step(after(100), false, true), Some(Order::Pause));
        for ms in (150..500).step_by(50) {
            hold.on_answer(after(ms));
            assert_eq!((hold.step(after(ms), false, true), hold.is_complete()), (None, false));
        }
        assert_eq!((hold.step(after(500), false, true), hold.is_complete()), (None, true));
    }
}
