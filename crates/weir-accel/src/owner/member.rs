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
    /// The state that it last confirmed.
    pub held: Held,
    /// The last time that it confirmed something, or had nothing to confirm.
    pub progress: Nanos,
}

impl Member {
    pub fn new(node: String, in_set: bool) -> Member {
        Member { node, in_set, connected: false, held: Held::default(), progress: Nanos(0) }
    }

    /// It has confirmed this state.
    pub fn confirmed(&mut self, now: Nanos, held: Held) {
        let before = self.held;
        // Confirmations of a copy that is being filled end with its completion: a copy on flash then confirms the durable
        // part, which may be less.
        self.held = match before.complete {
            true => Held {
                epoch: before.epoch.max(held.epoch),
                last: before.last.max(held.last),
                freed: before.freed.max(held.freed),
                gap: held.gap,
                complete: before.complete || held.complete,
            },
            false => held,
        };
        if self.held != before {
            self.progress = now;
        }
    }

    /// Everything up to here is held, as far as acknowledging depends on this copy. One that is being filled holds the newest
    /// records first, so it counts for nothing before it is complete.
    pub fn last(&self) -> u64 {
        if self.held.complete { self.held.last } else { 0 }
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
