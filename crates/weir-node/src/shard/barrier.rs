//! Barriers of open disks, for snapshots: see [`Accel::raise_barrier`](weir_accel::Accel::raise_barrier).
//!
//! Destage does not go on behind a barrier, so the write log fills. A barrier therefore ends by itself, whatever has become of who wanted it.

use std::time::Duration;

use tokio::sync::oneshot;
use weir_accel::Accel;
use weir_block::Nanos;
use weir_volume::Backing;

use super::answer;

/// Longest time until the backing has everything from before a barrier (P10).
pub const REACHED: Duration = Duration::from_secs(60);

/// A barrier that a full volume keeps from being reached ends after this long: destage has tried more than once (P10).
const FULL: Duration = Duration::from_secs(3);

/// Longest time that a disk stays at its barrier (P9): less than clients wait for a full log.
pub const HELD: Duration = Duration::from_secs(10);

/// Longest time that clients of several disks are held, so that their barriers are of one time: less than the replies are kept.
const HOLD: Duration = Duration::from_millis(800);

/// Pause between two looks whether somebody still waits for a barrier.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A barrier that cannot be raised, or that has ended before the disk came there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BarrierError {
    /// It is open elsewhere, or nowhere.
    #[error("the disk is not open here")]
    NotOpen,
    /// It closes.
    #[error("the disk is being closed")]
    Closing,
    /// Its clients are held for a move.
    #[error("the disk is being moved")]
    Moving,
    /// It closes, or another node owns it, since the barrier was raised.
    #[error("the disk is being closed, or moved")]
    Gone,
    /// A load writes past the log.
    #[error("a load runs on the disk's backing; wait for its end")]
    Load,
    /// It has a barrier.
    #[error("another snapshot of the disk is being made")]
    Raised,
    /// It has another barrier, or none.
    #[error("its barrier has ended")]
    Ended,
    /// The log cannot be destaged before somebody frees space.
    #[error("its volume is full, and does not take what the write log has")]
    Full,
    /// The log was not destaged in time.
    #[error("its storage has not taken what the write log has in time")]
    Slow,
}

/// A barrier of a disk.
struct Barrier {
    /// Who raised it lowers it by this number.
    number: u64,
    /// When it ends by itself.
    until: Nanos,
    /// Since when destage finds no space on the volume, while the disk is not there.
    full_since: Option<Nanos>,
    /// The disk has come there.
    is_reached: bool,
    /// Who waits until the disk is there.
    waiting: Option<oneshot::Sender<Result<(), BarrierError>>>,
    /// When to look whether somebody still waits.
    look_again: Nanos,
    /// Since when the disk's clients have been held for it.
    held_since: Option<Nanos>,
}

/// The barrier of a disk, if it has one.
#[derive(Default)]
pub struct BarrierSlot(Option<Barrier>);

impl BarrierSlot {
    /// Raises a barrier.
    ///
    /// # Errors
    /// [`BarrierError::Raised`].
    pub fn raise(
        &mut self,
        accel: &mut Accel<Box<dyn Backing>>,
        number: u64,
        is_held: bool,
        now: Nanos,
    ) -> Result<(), BarrierError> {
        if self.0.is_some() {
            return Err(BarrierError::Raised);
        }
        accel.raise_barrier();
        let held_since = is_held.then_some(now);
        self.0 = Some(Barrier {
            number,
            until: now + REACHED,
            full_since: None,
            is_reached: false,
            waiting: None,
            look_again: now,
            held_since,
        });
        Ok(())
    }

    /// `waiting` is answered when the disk is there, or when the barrier has ended before.
    pub fn wait(&mut self, number: u64, waiting: oneshot::Sender<Result<(), BarrierError>>) {
        match self.0.as_mut().filter(|barrier| barrier.number == number) {
            Some(barrier) => barrier.waiting = Some(waiting),
            None => answer(waiting, Err(BarrierError::Ended)),
        }
    }

    /// The clients are to be served again. If they were held for this barrier until now: whether that was within its time.
    pub fn release(&mut self, number: u64, now: Nanos) -> Option<bool> {
        let barrier = self.0.as_mut().filter(|barrier| barrier.number == number);
        let since = barrier.and_then(|barrier| barrier.held_since.take());
        since.map(|since| now - since < HOLD)
    }

    /// Something else has let the clients go on.
    pub fn not_held(&mut self) {
        self.0.iter_mut().for_each(|barrier| barrier.held_since = None);
    }

    /// Lowers a barrier. Whether the disk has been there until now.
    pub fn lower(&mut self, accel: &mut Accel<Box<dyn Backing>>, number: u64) -> bool {
        let Some(barrier) = self.0.take_if(|barrier| barrier.number == number) else { return false };
        let was_there = barrier.is_reached && accel.is_at_barrier();
        accel.lower_barrier();
        was_there
    }

    /// Answers who waits, and ends a barrier whose time is over. Whether clients that were held until now are to go on.
    pub fn turn(&mut self, accel: &mut Accel<Box<dyn Backing>>, now: Nanos) -> bool {
        let Some(barrier) = &mut self.0 else { return false };
        if !barrier.is_reached && accel.is_at_barrier() {
            // Clients of a log that fills behind it are refused after their time (P9).
            let held = HELD.min(accel.config().full_log_wait / 2);
            (barrier.is_reached, barrier.until) = (true, now + held);
        }
        if barrier.waiting.as_ref().is_some_and(oneshot::Sender::is_closed) {
            // Nobody would lower it.
            barrier.until = now;
        }
        let lacks_space =
            !barrier.is_reached && (accel.lacks_space() || accel.lower().inner().lacks_space(now));
        barrier.full_since = barrier.full_since.or(Some(now)).filter(|_| lacks_space);
        if barrier.full_since.is_some_and(|since| now >= since + FULL) {
            barrier.until = now;
        }
        barrier.look_again = now + LOOK_AGAIN;
        if barrier.is_reached {
            barrier.waiting.take().into_iter().for_each(|waiting| answer(waiting, Ok(())));
        }
        let mut go_on = barrier.held_since.take_if(|since| now >= *since + HOLD).is_some();
        if now >= barrier.until
            && let Some(barrier) = self.0.take()
        {
            accel.lower_barrier();
            go_on |= barrier.held_since.is_some();
            let error = if lacks_space { BarrierError::Full } else { BarrierError::Slow };
            barrier.waiting.into_iter().for_each(|waiting| answer(waiting, Err(error)));
        }
        go_on
    }

    /// The disk closes, or another node owns it. Whether clients were held.
    pub fn end(&mut self, accel: &mut Accel<Box<dyn Backing>>) -> bool {
        let Some(barrier) = self.0.take() else { return false };
        accel.lower_barrier();
        barrier.waiting.into_iter().for_each(|waiting| answer(waiting, Err(BarrierError::Gone)));
        barrier.held_since.is_some()
    }

    /// Whether there is one.
    pub fn is_raised(&self) -> bool {
        self.0.is_some()
    }

    /// When something of it ends by itself.
    pub fn deadline(&self) -> Nanos {
        let Some(barrier) = &self.0 else { return Nanos::NEVER };
        let waits = if barrier.waiting.is_some() { barrier.look_again } else { Nanos::NEVER };
        barrier.until.min(waits).min(barrier.held_since.map_or(Nanos::NEVER, |since| since + HOLD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shard's thread has not run for longer than clients are held: they go on all the same, and the snapshot does not count.
    #[test]
    fn clients_that_are_released_late_are_still_those_that_were_held() {
        let barrier = |held_since| Barrier {
            number: 7,
            until: Nanos::NEVER,
            full_since: None,
            is_reached: false,
            waiting: None,
            look_again: Nanos(0),
            held_since,
        };
        let at = |after: Duration| Nanos(1_000) + after;
        for (after, expected) in [(HOLD / 2, Some(true)), (HOLD, Some(false)), (2 * HOLD, Some(false))] {
            let mut slot = BarrierSlot(Some(barrier(Some(Nanos(1_000)))));
            assert_eq!(slot.release(8, at(after)), None, "another barrier's");
            assert_eq!(slot.release(7, at(after)), expected);
            assert_eq!(slot.release(7, at(after)), None, "once");
        }
        assert_eq!(BarrierSlot(Some(barrier(None))).release(7, at(HOLD)), None);
    }
}
