//! Where requests wait that would exceed their disk's limit.
//!
//! A connection whose next request may not pass waits in a line, with nothing of the shard's but the bytes that it has received.
//! It gets no turn before the first request in line may pass, so any number of waiting connections costs nothing. While there is a
//! line, each connection passes one request and lines up again: small requests do not overtake large ones, and a connection with a
//! deep queue does not overtake others.

use std::collections::VecDeque;
use std::time::Duration;

use weir_block::Nanos;

use crate::limit::{Delays, Limiter, Rate};

/// A connection whose next request waits.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    who: u32,
    bytes: u64,
}

/// The limit of one disk.
#[derive(Debug, Default)]
pub(super) struct Gate {
    limiter: Option<Limiter>,
    /// First come, first served.
    line: VecDeque<Waiting>,
    /// The first in line, which has its turn.
    called: Option<Waiting>,
    /// Requests that have waited, and for how long.
    delayed: (u64, Duration),
}

impl Gate {
    /// Sets or removes the limit. Whoever waits is to be given a turn.
    pub fn set(&mut self, rate: Option<Rate>, now: Nanos) -> impl Iterator<Item = u32> {
        self.limiter = rate.map(|rate| Limiter::new(rate, now));
        std::mem::take(&mut self.line).into_iter().map(|waiting| waiting.who)
    }

    /// Whether this connection may pass a request of so many bytes.
    pub fn admits(&self, who: u32, bytes: u64, now: Nanos) -> bool {
        let Some(limiter) = &self.limiter else { return true };
        let is_first = self.line.is_empty() || self.called.is_some_and(|called| called.who == who);
        is_first && limiter.opens_at(now, bytes) <= now
    }

    /// A request passes.
    pub fn pass(&mut self, who: u32, bytes: u64, now: Nanos) {
        let Some(limiter) = &mut self.limiter else { return };
        limiter.pass(now, bytes);
        self.called.take_if(|called| called.who == who);
    }

    /// A request has waited, also one that passes because the limit has ended or rests.
    pub fn count(&mut self, wait: Duration) {
        self.delayed.0 += 1;
        self.delayed.1 += wait;
    }

    /// A connection waits with a request of so many bytes.
    pub fn line_up(&mut self, who: u32, bytes: u64) {
        match self.called.take_if(|called| called.who == who) {
            // Its request is another one than that with which it lined up, and larger: it has waited all the same.
            Some(_) => self.line.push_front(Waiting { who, bytes }),
            None => self.line.push_back(Waiting { who, bytes }),
        }
    }

    /// The connection that is to have its turn, because its request may pass. It is not in line any more.
    pub fn call(&mut self, now: Nanos) -> Option<u32> {
        if self.deadline(now) > now {
            return None;
        }
        self.called = self.line.pop_front();
        self.called.map(|called| called.who)
    }

    /// The turn of the connection that was called is over.
    pub fn end_call(&mut self) {
        self.called = None;
    }

    /// A connection does not wait any more.
    pub fn leave(&mut self, who: u32) {
        self.line.retain(|waiting| waiting.who != who);
    }

    /// Whether a connection had better receive little, because what it receives is likely to wait.
    pub fn is_closed(&self) -> bool {
        !self.line.is_empty() || self.called.is_some()
    }

    /// The number of connections in line.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// The time from which the first in line may pass.
    pub fn deadline(&self, now: Nanos) -> Nanos {
        match (self.line.front(), &self.limiter) {
            (Some(first), Some(limiter)) => limiter.opens_at(now, first.bytes),
            _ => Nanos::NEVER,
        }
    }

    /// The delays that the limit has caused so far.
    pub fn delays(&self) -> Delays {
        let (requests, waited) = self.delayed;
        Delays { requests, waited, waiting: self.line.len() }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    const MS: u64 = 1_000_000;

    fn gate(iops: u64) -> Gate {
        let mut gate = Gate::default();
        let rate =
            Rate { iops: NonZeroU64::new(iops), bytes_per_second: None, burst: Duration::from_millis(1) };
        assert_eq!(gate.set(Some(rate), Nanos(0)).count(), 0);
        gate
    }

    /// A connection with many requests and one with a single one: they take turns.
    #[test]
    fn who_waits_passes_one_request_and_lines_up_again() {
        let mut gate = gate(1000);
        assert!(gate.admits(1, 0, Nanos(0)));
        gate.pass(1, 0, Nanos(0));
        assert!(!gate.admits(1, 0, Nanos(0)));
        gate.line_up(1, 0);
        gate.line_up(2, 0);
        assert_eq!((gate.deadline(Nanos(0)), gate.call(Nanos(MS - 1))), (Nanos(MS), None));
        assert!(!gate.admits(3, 0, Nanos(9 * MS)), "others are in line");
        for (at, expected) in [(MS, 1), (2 * MS, 2), (3 * MS, 1), (4 * MS, 2)] {
            let now = Nanos(at);
            assert_eq!(gate.call(now), Some(expected));
            assert!(gate.admits(expected, 0, now));
            gate.pass(expected, 0, now);
            assert!(!gate.admits(expected, 0, now));
            gate.line_up(expected, 0);
            gate.end_call();
        }
        assert_eq!(gate.delays().waiting, 2);
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        let mut gate = gate(1);
        gate.pass(1, 0, Nanos(0));
        gate.line_up(1, 0);
        gate.line_up(2, 0);
        gate.leave(2);
        assert_eq!(gate.set(None, Nanos(1)).collect::<Vec<_>>(), [1]);
        assert!(gate.admits(3, u64::MAX, Nanos(1)) && !gate.is_closed());
        assert_eq!((gate.call(Nanos(1)), gate.deadline(Nanos(1))), (None, Nanos::NEVER));
    }
}
