//! A node that holds, or is getting, a copy of the log.

use weir_block::Nanos;

use super::messages::Held;

/// One such node.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub node: String,
    /// Named by the committed configuration.
    pub in_set: bool,
    pub connected: bool,
    /// What it says that it holds.
    pub held: Held,
    /// When it last confirmed something, or last had nothing to confirm.
    pub progress: Nanos,
}

impl Member {
    pub fn new(node: String, in_set: bool) -> Member {
        Member { node, in_set, connected: false, held: Held::default(), progress: Nanos(0) }
    }

    /// It has said what it holds.
    pub fn confirmed(&mut self, now: Nanos, held: Held) {
        let before = self.held;
        self.held = Held {
            epoch: before.epoch.max(held.epoch),
            last: before.last.max(held.last),
            freed: before.freed.max(held.freed),
            complete: before.complete || held.complete,
        };
        if self.held != before {
            self.progress = now;
        }
    }

    /// Whether an answer is expected of it: that its copy is as `due` says, or further.
    pub fn is_behind(&self, due: Held) -> bool {
        self.connected && !self.held.covers(due)
    }

    /// Whether it could take over if its copy has to be as `due` says.
    pub fn holds(&self, due: Held) -> bool {
        self.connected && self.held.covers(due)
    }
}
