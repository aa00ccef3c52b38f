//! What must hold after every step, seen from outside.
//!
//! A write's [`Version`] is its place in the order of all writes: the tenure of the owner that took it, then its number there. In
//! that order, answers must be linearizable: none is older than what had been answered when its request arrived.

use super::world::World;

/// One value of the register, in the order of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The epoch in which the owner's tenure began.
    pub tenure: u64,
    /// Counts the owner's writes.
    pub number: u64,
}

/// A client's request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Whether it is a write.
    pub is_write: bool,
    /// The newest version that had been answered when it arrived.
    pub newest: Version,
}

/// What has been seen from outside.
#[derive(Clone, Debug, Default)]
pub struct Checks {
    /// The newest version that was acknowledged, or answered to a read.
    pub seen: Version,
    /// The highest tenure that has finished its wait.
    pub finished: u64,
    /// The highest epoch that each node was told to seal.
    sealed: [u64; 5],
    /// What was broken first.
    pub violation: Option<String>,
}

impl Checks {
    /// Notes what was broken, if it is the first.
    pub fn broken(&mut self, what: impl FnOnce() -> String) {
        self.violation.get_or_insert_with(what);
    }

    /// A request is answered.
    pub fn answered(&mut self, node: &str, request: Request, version: Version) {
        let Request { is_write, newest } = request;
        if version < newest || (is_write && version == newest) {
            let what = if is_write { "acknowledges" } else { "answers" };
            self.broken(|| {
                format!("P7: {node} {what} {version:?}, but {newest:?} was answered before it was asked")
            });
        }
        self.seen = self.seen.max(version);
    }

    /// A node has sealed an epoch.
    pub fn seal(&mut self, node: usize, epoch: u64) {
        self.sealed[node] = self.sealed[node].max(epoch);
    }

    /// A node grants something in an epoch: its floor never falls, however often it starts.
    pub fn grant(&mut self, node: usize, epoch: u64) {
        let sealed = self.sealed[node];
        if epoch < sealed {
            self.broken(|| format!("P2: node {node} grants epoch {epoch} after it has sealed {sealed}"));
        }
    }

    /// A write of some owner, former or not, reaches the storage.
    pub fn landed(&mut self, before: Version, version: Version) {
        if version < before {
            self.broken(|| format!("P4: {version:?} covers {before:?}"));
        }
    }
}

impl World {
    /// Nobody may serve whose tenure is before one that has finished its wait.
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

    /// Whom an owner asks includes the set of the record, and each copy that the record counts on holds what was answered.
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
            // What it would serve: the log over the backing.
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
