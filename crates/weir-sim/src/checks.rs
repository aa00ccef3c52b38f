//! What must hold after every step, and at the end.

use weir_accel::Log;

use crate::owner_process::{block_of, version_of};
use crate::world::{BLOCKS, NODES, Process, World};

impl World {
    /// Whoever may be asked for the disk, now or after a takeover, has all that was acknowledged or seen, and nothing
    /// older in its place: P1, P4, P6 and P7 in one.
    pub fn check(&mut self) {
        let record = &self.registry.record;
        let Some(owner) = record.owner else { return };
        if let Some(problem) = self.check_owner(owner) {
            return self.fail(|| problem);
        }
        if !record.write_back {
            if let Some((block, version, floor)) = self.stale_block(None) {
                let what = format!("the backing has version {version} of block {block}, not {floor}");
                self.fail(|| format!("P1: write-through, and {what}"));
            }
            return;
        }
        for replica in record.replicas.clone() {
            if let Some(problem) = self.check_replica(replica) {
                return self.fail(|| problem);
            }
        }
    }

    fn check_owner(&self, owner: Process) -> Option<String> {
        if !self.is_alive(owner) {
            return None;
        }
        match &self.nodes[owner.node].owner {
            Some(open) => self.stale_block(Some(&open.log)).map(|(block, worst, floor)| {
                format!("the owner n{} has version {worst} of block {block}, not {floor}", owner.node)
            }),
            // Not opened yet.
            None if self.registry.record.write_back => self.check_replica(owner),
            None => None,
        }
    }

    /// A process that the registry names could take over this moment.
    fn check_replica(&self, process: Process) -> Option<String> {
        if !self.is_alive(process) {
            return None;
        }
        let node = process.node;
        let Some(replica) = self.nodes[node].replica.as_ref().filter(|replica| replica.is_complete()) else {
            return Some(format!("P1: n{node} is in the set and has no complete copy"));
        };
        self.stale_block(Some(replica.log())).map(|(block, worst, floor)| {
            format!("P1: after a takeover by n{node}, block {block} would be version {worst}, not {floor}")
        })
    }

    /// A block that may be read through this log in a version older than it must have, even if the storage loses its
    /// power: the block, the version, and what it must be at least.
    fn stale_block(&self, log: Option<&Log>) -> Option<(usize, u64, u64)> {
        let mut versions: [u64; BLOCKS] = std::array::from_fn(|block| self.backing.blocks[block].worst());
        if let Some(log) = log {
            for (_, record) in log.range(0, log.last()) {
                versions[block_of(record)] = version_of(log, record);
            }
        }
        (0..BLOCKS)
            .map(|block| (block, versions[block], self.guest.floor[block]))
            .find(|(_, version, floor)| version < floor)
    }

    /// Long after the last fault: somebody owns the disk, the policy is the requested one, the log is drained, and
    /// nobody waits.
    pub fn check_settled(&mut self) {
        let record = self.registry.record.clone();
        let Some(process) = record.owner.filter(|owner| self.is_alive(*owner)) else {
            return self.fail(|| "nobody owns the disk at the end".into());
        };
        let Some(owner) = &self.nodes[process.node].owner else {
            return self.fail(|| "the disk is not open at the end".into());
        };
        let (marks, reason) = (owner.owner.marks(), owner.owner.reason());
        let known = owner.owner.configuration() == &record.configuration();
        let as_requested = record.write_back == record.wanted.is_some()
            && record.replicas.len() == record.wanted.unwrap_or(0);
        let open_channels = owner.channels.len();
        if !as_requested || !known {
            self.fail(|| format!("the policy does not come back: {record:?}, {reason}"));
        } else if marks.destaged != marks.appended {
            self.fail(|| format!("the log is not drained: {marks:?}, {reason}"));
        } else if !self.guest.is_idle() {
            self.fail(|| format!("the guest still waits: {reason}"));
        } else if open_channels != record.replicas.len() {
            self.fail(|| format!("{open_channels} channels for {record:?}"));
        } else if !record.former.is_empty() {
            self.fail(|| format!("former owners are not forgotten: {record:?}"));
        } else if (0..NODES).any(|node| self.nodes[node].owner.is_some() != (node == process.node)) {
            self.fail(|| "a former owner has not let go".into());
        }
    }
}
