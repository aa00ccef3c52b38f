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
            last: before.last.max(held.last),
            freed: before.freed.max(held.freed),
            complete: before.complete || held.complete,
        };
        if self.held != before {
            self.progress = now;
        }
    }

    /// Whether an answer is expected of it: about records up to `appended`, and that those up to `freed` are gone.
    pub fn is_behind(&self, appended: u64, freed: u64) -> bool {
        self.connected && !(self.held.complete && self.held.last >= appended && self.held.freed >= freed)
    }

    /// Whether it could take over, given that nothing after `promised` was ever acknowledged and that everything up to
    /// `bypassed` is older than what the backing has.
    pub fn holds(&self, promised: u64, bypassed: u64) -> bool {
        !self.is_behind(promised, bypassed) && self.connected
    }
}
