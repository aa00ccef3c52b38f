//! A volume whose coordination an operator moves has no coordinator for some seconds, and nobody has to do anything about that.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use weir_block::Nanos;
use weir_volume::lun::route_status::{Reason, Reasons};

/// In this time a node hears of an operator's wish.
const HEARD: Duration = Duration::from_millis(500);

/// A disk's knowledge of such a move.
#[derive(Debug, Default)]
pub struct Handover {
    /// It accounts for the lack of a coordinator until then, in nanoseconds; shared by all disks of the volume.
    until: Arc<AtomicU64>,
    /// The value of `until` at the end of the last one: it accounts for no later lack.
    over: u64,
    /// There was no coordinator at the last look.
    lacks: bool,
    /// Since when there is none, for no known reason.
    since: Option<Nanos>,
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

    /// The disk's reasons are these now. Whether they are news for the operator: not a lack of a coordinator that has only begun, because
    /// the coordinator may go before this node has heard of the wish.
    pub fn is_news(&mut self, reasons: Reasons, now: Nanos) -> bool {
        let lacks = reasons.has(Reason::CoordinatorMoving) || reasons.has(Reason::CoordinatorHandover);
        if std::mem::replace(&mut self.lacks, lacks) && !lacks {
            self.over = self.until.load(Ordering::Relaxed);
        }
        if !reasons.has(Reason::CoordinatorMoving) {
            self.since = None;
            return true;
        }
        now >= *self.since.get_or_insert(now) + HEARD
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
        assert!(handover.is_news(benign, Nanos(6)) && handover.is_news(none, Nanos(7)));
        assert_eq!(handover.explain(moving, Nanos(7)), moving, "the next coordinator is lost");
        until.store(200, Ordering::Relaxed);
        assert_eq!(handover.explain(moving, Nanos(8)), benign, "another move");
    }

    #[test]
    fn a_coordinator_may_go_before_the_wish_is_heard_of() {
        let (mut handover, begun) = (Handover::default(), Nanos(1_000));
        let (none, moving) = (Reasons::default(), Reasons::default().with(Reason::CoordinatorMoving, true));
        assert!(handover.is_news(none, begun));
        assert!(!handover.is_news(moving, begun) && !handover.is_news(moving, begun + HEARD / 2));
        assert!(handover.is_news(moving, begun + HEARD));
        assert!(handover.is_news(none, begun + HEARD * 2));
        assert!(!handover.is_news(moving, begun + HEARD * 2), "another time");
    }
}
