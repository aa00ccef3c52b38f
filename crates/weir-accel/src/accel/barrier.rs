//! A barrier of destage, for a copy of the backing that is the disk at one point in time: the backing gets everything up to that point,
//! and nothing from behind it until the barrier is lowered (P5). Clients go on: their writes stay in the log. Writes past the log wait.

use weir_block::Destage;

use super::Accel;
use super::below::Below;

impl<L: Destage> Accel<L> {
    /// Raises a barrier behind everything that the log has. What is acknowledged is before it, and whatever the log is yet to get, behind it.
    pub fn raise_barrier(&mut self) {
        self.barrier = Some(self.log.last());
        self.again = true;
    }

    /// Whether the backing has everything from before the barrier, nothing from behind it, and no change is on its way there. Then the backing
    /// is the disk at the barrier's point, for as long as this node holds the right to serve it (P2).
    #[must_use]
    pub fn is_at_barrier(&self) -> bool {
        let changes = |below: &Below| match below {
            Below::Pass { .. } | Below::Destage | Below::Direct { changes: true, .. } => true,
            Below::Read { .. } | Below::Flush | Below::Extents { .. } | Below::Direct { .. } => false,
        };
        let is_reached = self.barrier.is_some_and(|barrier| self.owner.in_backing() >= barrier);
        is_reached
            && !self.life.is_released()
            && !self.owner.is_fenced()
            && self.owner.may_use_backing()
            && !self.below.iter().any(|(_, below)| changes(below))
            && self.config.holds_right(self.clock.now())
    }

    /// Destage goes on.
    pub fn lower_barrier(&mut self) {
        self.barrier = None;
        self.again = true;
    }

    /// Everything up to here may be handed to the backing now.
    pub(super) fn destage_limit(&self) -> u64 {
        self.barrier.unwrap_or(u64::MAX).min(self.owner.destage_limit())
    }
}
