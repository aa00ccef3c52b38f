//! A volume whose coordination an operator moves has no coordinator for some seconds, and nobody has to do anything about that.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use weir_block::Nanos;
use weir_volume::lun::route_status::{Reason, Reasons};

/// What a disk knows of such a move.
#[derive(Debug, Default)]
pub struct Handover {
    /// It accounts for the lack of a coordinator until then, in nanoseconds; shared by all disks of the volume.
    until: Arc<AtomicU64>,
    /// The value of `until` at the end of the last one: it accounts for no later lack.
    over: u64,
}

impl Handover {
    /// Follows the volume's.
    pub fn follow(&mut self, until: Arc<AtomicU64>) {
        self.until = until;
    }

    /// The reasons with that of the lack of a coordinator as it is meant.
    pub fn explain(&self, reasons: Reasons, now: Nanos) -> Reasons {
        let until = self.until.load(Ordering::Relaxed);
        if !reasons.has(Reason::CoordinatorMoving) || until == self.over || now >= Nanos(until) {
            return reasons;
        }
        reasons.without(Reason::CoordinatorMoving).with(Reason::CoordinatorHandover, true)
    }

    /// The disk's reasons were these `before`, and are these `now`.
    pub fn changed(&mut self, before: Reasons, now: Reasons) {
        let had_none = before.has(Reason::CoordinatorMoving) || before.has(Reason::CoordinatorHandover);
        let has_none = now.has(Reason::CoordinatorMoving) || now.has(Reason::CoordinatorHandover);
        if had_none && !has_none {
            self.over = self.until.load(Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_by_command_is_benign_and_what_comes_after_it_is_not() {
        let (mut handover, until) = (Handover::default(), Arc::new(AtomicU64::new(0)));
        handover.follow(Arc::clone(&until));
        let (none, moving) = (Reasons::default(), Reasons::default().with(Reason::CoordinatorMoving, true));
        let benign = Reasons::default().with(Reason::CoordinatorHandover, true);
        assert_eq!(handover.explain(moving, Nanos(5)), moving, "nobody moves it");
        until.store(100, Ordering::Relaxed);
        assert_eq!(handover.explain(none, Nanos(5)), none, "the coordinator is still there");
        assert_eq!(handover.explain(moving, Nanos(99)), benign);
        assert_eq!(handover.explain(moving, Nanos(100)), moving, "it takes too long");
        handover.changed(none, benign);
        assert_eq!(handover.explain(moving, Nanos(6)), benign);
        handover.changed(benign, none);
        assert_eq!(handover.explain(moving, Nanos(7)), moving, "the next coordinator is lost");
        until.store(200, Ordering::Relaxed);
        assert_eq!(handover.explain(moving, Nanos(8)), benign, "another move");
    }
}
