//! External invariants, checked after every step.
//!
//! A write's [`Version`] is its position in the order of all writes: its owner's tenure, then its number there. In that order,
//! answers must be linearizable: none is older than the newest answer when its request arrived.

use super::Simulation;
use super::state::{Request, Version};

/// Observations from outside.
#[derive(Clone, Debug, Default)]
pub struct Checks {
    /// The newest version that was acknowledged or read.
    pub seen: Version,
    /// The highest tenure that has finished its wait.
    pub finished: u64,
    /// The highest sealed epoch of each node.
    sealed: [u64; 5],
    /// The first violation.
    pub violation: Option<String>,
}

impl Checks {
    /// Records the first violation.
    pub fn broken(&mut self, what: impl FnOnce() -> String) {
        self.violation.get_or_insert_with(what);
    }

    /// A request is answered.
    pub fn answered(&mut self, node: &str, request: Request, version: Version) {
        let Request { is_write, newest } = request;
        if version < newest || (is_write && version == newest) {
            let what = if is_write { "acknowledges" } else { "answers" };
            self.broken(|| {
                format!("P7: {node} {what} {version:?}, but {newest:?} was answered before the request")
            });
        }
        self.seen = self.seen.max(version);
    }

    /// A node has sealed an epoch.
    pub fn seal(&mut self, node: usize, epoch: u64) {
        self.sealed[node] = self.sealed[node].max(epoch);
    }

    /// A node grants an epoch: its floor never falls, even after restarts.
    pub fn grant(&mut self, node: usize, epoch: u64) {
        let sealed = self.sealed[node];
        if epoch < sealed {
            self.broken(|| format!("P2: node {node} grants epoch {epoch} after it has sealed {sealed}"));
        }
    }

    /// A write of a current or former owner reaches the storage.
    pub fn landed(&mut self, before: Version, version: Version) {
        if version < before {
            self.broken(|| format!("P4: {version:?} overwrites {before:?}"));
        }
    }
}

impl Simulation {
    /// No owner may serve in a tenure before one that has finished its wait.
    pub fn check_rights(&mut self) {
        let (now, finished) = (self.now, self.checks.finished);
        for node in self.nodes.iter().filter(|node| node.alive) {
            let Some(owner) = &node.owner else { continue };
            if owner.since < finished && owner.right.until() > node.clock.at(now) {
                let (name, since) = (&node.name, owner.since);
                self.checks.broken(|| {
                    format!("P2: {name} may serve in its tenure of epoch {since}, but that of {finished} has waited")
                });
            }
        }
    }

    /// An owner requests grants from at least the record's set, and each copy in that set has all answered data.
    pub fn check_record(&mut self) {
        let record = &self.registry.record;
        let Some(process) = &record.owner else { return };
        for node in self.nodes.iter().filter(|node| node.alive) {
            if node.incarnation == process.incarnation
                && let Some(owner) = &node.owner
                && owner.since >= self.registry.tenure
            {
                let set = record.grant_set();
                if let Some(left) =
                    set.members().iter().find(|member| !owner.right.asks().any(|name| name == *member))
                {
                    let name = &node.name;
                    self.checks.broken(|| format!("P2: {name} does not ask {left} of the set {set:?}"));
                }
            }
            let counts = record.replicas.iter().any(|replica| replica.incarnation == node.incarnation);
            // Its reads: the log over the backing.
            let log = node.copy.filter(|copy| copy.newest > copy.freed).map(|copy| copy.newest);
            let newest = log.unwrap_or(self.backing);
            if counts && newest < self.checks.seen {
                let (name, seen) = (&node.name, self.checks.seen);
                self.checks.broken(|| {
                    format!("P1: {name} is in the record's set and has {newest:?}, but {seen:?} was answered")
                });
            }
        }
    }
}
