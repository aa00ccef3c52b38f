//! Barriers of open disks, for snapshots: see [`Accel::raise_barrier`](weir_accel::Accel::raise_barrier).
//!
//! Destage does not go on behind a barrier, so the write log fills. A barrier therefore ends by itself, whatever has become of who wanted it.

use std::time::Duration;

use tokio::sync::oneshot;
use weir_accel::Accel;
use weir_block::Nanos;
use weir_volume::Backing;

use super::answer;
use super::messages::LoadLayer;

/// Longest time until the backing has everything from before a barrier (P10).
pub const REACHED: Duration = Duration::from_secs(60);

/// Longest time that a disk stays at its barrier (P9): less than clients wait for a full log.
pub const HELD: Duration = Duration::from_secs(10);

/// A barrier of a disk.
pub struct Barrier {
    /// Who raised it lowers it by this number.
    number: u64,
    /// When it ends by itself.
    until: Nanos,
    /// Who waits until the disk is there.
    waiting: Option<oneshot::Sender<Result<(), String>>>,
}

/// The barrier of a disk, if it has one.
#[derive(Default)]
pub struct BarrierSlot(Option<Barrier>);

impl BarrierSlot {
    /// Raises a barrier. `waiting` is answered when the disk is there, or when the barrier has ended before.
    pub fn raise(
        &mut self,
        accel: &mut Accel<Box<dyn Backing>>,
        load: Option<LoadLayer>,
        number: u64,
        now: Nanos,
        waiting: oneshot::Sender<Result<(), String>>,
    ) {
        if self.0.is_some() {
            return answer(waiting, Err("another snapshot of the disk is being made".into()));
        }
        if load == Some(LoadLayer::Backing) {
            return answer(waiting, Err("a load runs on the disk's backing; wait for its end".into()));
        }
        accel.raise_barrier();
        self.0 = Some(Barrier { number, until: now + REACHED, waiting: Some(waiting) });
    }

    /// Lowers a barrier. Whether the disk has been there until now.
    pub fn lower(&mut self, accel: &mut Accel<Box<dyn Backing>>, number: u64) -> bool {
        let Some(barrier) = self.0.take_if(|barrier| barrier.number == number) else { return false };
        let was_there = barrier.waiting.is_none() && accel.is_at_barrier();
        accel.lower_barrier();
        was_there
    }

    /// Answers who waits, and ends a barrier whose time is over.
    pub fn turn(&mut self, accel: &mut Accel<Box<dyn Backing>>, now: Nanos) {
        let Some(barrier) = &mut self.0 else { return };
        if barrier.waiting.is_some() && accel.is_at_barrier() {
            barrier.until = now + HELD;
            barrier.waiting.take().into_iter().for_each(|waiting| answer(waiting, Ok(())));
        }
        if now >= barrier.until
            && let Some(barrier) = self.0.take()
        {
            accel.lower_barrier();
            let text = format!("the storage has not taken what the write log has within {REACHED:?}");
            barrier.waiting.into_iter().for_each(|waiting| answer(waiting, Err(text.clone())));
        }
    }

    /// Whether there is one.
    pub fn is_raised(&self) -> bool {
        self.0.is_some()
    }

    /// When it ends by itself.
    pub fn deadline(&self) -> Nanos {
        self.0.as_ref().map_or(Nanos::NEVER, |barrier| barrier.until)
    }
}
