//! Writes that wait for space on a full volume, and changes that wait behind them.

use weir_block::{Layer, Reactor};

use super::RoutedBacking;
use super::requests::Pending;
use crate::lun::router::{self, Kind, overlap};
use crate::planted::Bug;

impl RoutedBacking {
    /// Requests that wait for space, or behind one that does.
    pub(super) fn waiting(&self) -> usize {
        self.space.len() + self.behind.len()
    }

    /// Whether fewer requests than the depth are under way.
    pub(super) fn has_depth(&self) -> bool {
        self.in_flight() - self.waiting() < self.depth
    }

    /// Tries again what waits for space; without the right, what it becomes is held back.
    pub(super) fn retry_full(&mut self, reactor: &mut Reactor) {
        if self.space.is_idle() {
            return;
        }
        let now = reactor.now();
        while let Some((wait, pending)) = self.space.retry(now, self.has_depth()) {
            self.accept(reactor, Kind::Write, Pending { wait, ..pending });
        }
    }

    /// A write that waits for space may have been done in part, and that may have been seen. It is done again: not over a later change (P7).
    /// So that one waits, too.
    pub(super) fn accept_in_turn(&mut self, reactor: &mut Reactor, kind: Kind, pending: Pending) {
        match kind.changes() && self.is_behind(pending.range()) {
            true => self.behind.push_back((kind, pending)),
            false => self.accept(reactor, kind, pending),
        }
    }

    fn is_behind(&self, range: router::Range) -> bool {
        if self.space.is_idle() && self.behind.is_empty() || self.planted.has(Bug::OvertakeFull) {
            return false;
        }
        let overlaps = |other: &Pending| overlap(other.range(), range);
        self.space.iter().any(overlaps)
            || self.pending.iter().any(|(_, other)| other.wait.has_waited() && overlaps(other))
            || self.behind.iter().any(|(_, other)| overlaps(other))
    }

    /// Begins the changes that wait behind nothing any more.
    pub(super) fn begin_behind(&mut self, reactor: &mut Reactor) {
        for (kind, pending) in std::mem::take(&mut self.behind) {
            self.accept_in_turn(reactor, kind, pending);
        }
    }

    /// A change of the same bytes is under way, which came later: a write that is done again would cover it.
    pub(super) fn is_overtaken(&self, write: &Pending) -> bool {
        let covers = |other: &Pending| other.kind.changes_data() && overlap(other.range(), write.range());
        !self.planted.has(Bug::OvertakeFull) && self.pending.iter().any(|(_, other)| covers(other))
    }
}
