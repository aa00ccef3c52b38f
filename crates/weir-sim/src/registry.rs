//! The registry: one record, changed by compare-and-swap, with the rules of the control plane about who may change
//! what; and the leases of the processes.

use weir_accel::Configuration;
use weir_block::Nanos;

use crate::world::{NODES, Process, name};

/// A former owner stays in the record until its I/O is known to have ended.
const MOST_FORMER: usize = 16;

/// The record of the disk.
#[derive(Clone, Debug, Default)]
pub struct Record {
    pub owner: Option<Process>,
    pub epoch: u64,
    pub replicas: Vec<Process>,
    pub write_back: bool,
    /// `N` of the requested policy; `None` for write-through.
    pub wanted: Option<usize>,
    pub former: Vec<Process>,
    /// A takeover has left fewer copies than are requested, and nothing was changed since.
    pub short: bool,
}

impl Record {
    pub fn configuration(&self) -> Configuration {
        Configuration {
            epoch: self.epoch,
            replicas: self.replicas.iter().map(|replica| name(replica.node)).collect(),
            write_back: self.write_back,
            wanted_replicas: self.wanted,
        }
    }
}

pub struct Registry {
    pub up: bool,
    pub record: Record,
    /// Who is registered on each node, and until when its lease stands.
    leases: [(u32, Nanos); NODES],
}

impl Registry {
    pub fn new() -> Registry {
        Registry { up: true, record: Record::default(), leases: [(0, Nanos(0)); NODES] }
    }

    pub fn renew(&mut self, process: Process, until: Nanos) {
        self.leases[process.node] = (process.incarnation, until);
    }

    pub fn is_live(&self, process: Process, now: Nanos) -> bool {
        let (incarnation, until) = self.leases[process.node];
        incarnation == process.incarnation && now < until
    }

    /// The process on a node, if its lease stands.
    pub fn live(&self, node: usize, now: Nanos) -> Option<Process> {
        let (incarnation, until) = self.leases[node];
        (now < until).then_some(Process { node, incarnation })
    }

    /// What the owner asks for.
    pub fn change_replicas(
        &mut self,
        by: Process,
        epoch: u64,
        replicas: Vec<Process>,
        write_back: bool,
    ) -> Result<(), &'static str> {
        let record = &mut self.record;
        if record.owner != Some(by) || record.epoch != epoch {
            return Err("fenced");
        }
        match (write_back, record.wanted) {
            (false, _) if !replicas.is_empty() => return Err("write-through has no replicas"),
            (true, None) => return Err("write-through is requested"),
            (true, Some(wanted)) if wanted > 0 && replicas.is_empty() => {
                return Err("one copy is not enough");
            }
            _ => {}
        }
        if replicas.iter().any(|replica| replica.node == by.node) {
            return Err("the owner's own node");
        }
        *record = Record { epoch: epoch + 1, replicas, write_back, short: false, ..record.clone() };
        Ok(())
    }

    pub fn set_policy(&mut self, by: Process, wanted: Option<usize>) -> Result<(), &'static str> {
        if self.record.owner != Some(by) {
            return Err("fenced");
        }
        self.record.wanted = wanted;
        self.record.short = false;
        self.record.epoch += 1;
        Ok(())
    }

    pub fn claim(&mut self, by: Process) -> Result<(), &'static str> {
        if self.record.owner.is_some() {
            return Err("owned");
        }
        self.record.owner = Some(by);
        self.record.epoch += 1;
        Ok(())
    }

    /// Who is next, if the owner is gone: in write-back the first live replica, in write-through anybody.
    pub fn successor(&self, now: Nanos) -> Option<Process> {
        let owner = self.record.owner.filter(|owner| !self.is_live(*owner, now))?;
        if self.record.write_back {
            return self.record.replicas.iter().find(|replica| self.is_live(**replica, now)).copied();
        }
        (1..=NODES).find_map(|step| self.live((owner.node + step) % NODES, now)).filter(|next| *next != owner)
    }

    /// The rule of a takeover; in write-through the caller has made sure that the owner writes no more.
    pub fn take_over(&mut self, by: Process, now: Nanos) -> Result<(), &'static str> {
        if self.successor(now) != Some(by) {
            return Err("not next");
        }
        let record = &mut self.record;
        let owner = record.owner.ok_or("not owned")?;
        record.former.retain(|former| *former != owner);
        if record.former.len() >= MOST_FORMER {
            return Err("too many former owners");
        }
        record.former.push(owner);
        record.owner = Some(by);
        record.replicas.retain(|replica| *replica != by);
        record.epoch += 1;
        record.short =
            record.write_back && record.wanted.is_some_and(|wanted| record.replicas.len() < wanted);
        Ok(())
    }
}
