//! The registry: one record, changed by compare-and-swap under the rules of [`weir_cluster::ownership`], and the leases of
//! the processes.

use weir_accel::Configuration;
use weir_block::Nanos;
use weir_cluster::ownership::{self, Caller, OwnerGone, Refusal};
use weir_cluster::placement::{self, Live};
use weir_cluster::records::{
    DiskRecord, FormerOwner, Medium, MediumSpace, Mode, NodeRecord, NodeRef, Policy, Source, Spread,
};

use crate::scale::{BLOCK, BLOCKS, NODES, Process, name, node_of};

/// The production record, converted for the simulator.
#[derive(Clone, Debug, Default)]
pub struct Record {
    pub owner: Option<Process>,
    pub epoch: u64,
    pub replicas: Vec<Process>,
    pub write_back: bool,
    /// `N` of the requested policy; `None` for write-through.
    pub wanted: Option<usize>,
    pub former: Vec<Process>,
    /// Whether the spread over fault domains is mandatory.
    pub strict: bool,
    /// Misplaced replicas of a strict policy.
    pub misplaced: Vec<Process>,
    /// A takeover has left fewer copies than requested, and the set was not changed since.
    pub short: bool,
}

impl Record {
    pub fn configuration(&self) -> Configuration {
        Configuration {
            epoch: self.epoch,
            replicas: self.replicas.iter().map(|replica| name(replica.node)).collect(),
            write_back: self.write_back,
            wanted_replicas: self.wanted,
            strict: self.strict,
            misplaced: self.misplaced.iter().map(|replica| name(replica.node)).collect(),
            leaving: Vec::new(),
        }
    }
}

pub fn process_of(node: &NodeRef) -> Process {
    let incarnation = u32::try_from(node.incarnation).expect("made by `node_ref`");
    Process { node: node_of(&node.node), incarnation }
}

/// In one of four runs the nodes are in two racks of two, and policies are strict. With all nodes up, every owner can satisfy
/// every such policy.
#[derive(Clone, Copy, Debug)]
pub struct Racks {
    of: [usize; NODES],
    inside: bool,
}

impl Racks {
    pub fn choose(rng: &mut fastrand::Rng) -> Option<Racks> {
        let mut of = std::array::from_fn(|node| node % 2);
        rng.shuffle(&mut of);
        (rng.u8(..4) == 0).then(|| Racks { of, inside: rng.bool() })
    }

    fn spread(self, copies: usize) -> Spread {
        match (copies, self.inside) {
            (1, true) => Spread { inside: 1, outside: 0 },
            (1, false) => Spread { inside: 0, outside: 1 },
            (_, true) => Spread { inside: 1, outside: 1 },
            (_, false) => Spread { inside: 0, outside: 2 },
        }
    }
}

fn policy(wanted: Option<usize>, racks: Option<Racks>) -> Policy {
    match (wanted, racks) {
        (None, _) => Policy::WriteThrough,
        (Some(copies @ 1..), Some(racks)) => Policy::Strict(racks.spread(copies)),
        (Some(copies), _) => Policy::WriteBack(copies as u8),
    }
}

pub struct Registry {
    pub up: bool,
    disk: DiskRecord,
    pub racks: Option<Racks>,
    pub record: Record,
    /// Former owners that have released the disk, and the epoch since which they are former.
    pub released: Vec<(Process, u64)>,
    /// The registered process of each node, and its lease's deadline.
    leases: [(u32, Nanos); NODES],
    /// The flash of each process, by node and incarnation.
    flash: [Vec<(u32, u64)>; NODES],
}

impl Registry {
    pub fn new(wanted: Option<usize>, medium: Medium, racks: Option<Racks>) -> Registry {
        let source = Source::File { name: "disk".into() };
        let (size, policy) = ((BLOCKS * BLOCK) as u64, policy(wanted, racks));
        let mut disk = DiskRecord::new("disk", "volume", source, size, BLOCK as u32, policy);
        disk.medium = medium;
        let record = Record { wanted, ..Record::default() };
        let (released, leases, flash) = (Vec::new(), [(0, Nanos(0)); NODES], Default::default());
        Registry { up: true, disk, racks, record, released, leases, flash }
    }

    /// A process starts, with this flash.
    pub fn has_flash(&mut self, process: Process, identity: u64) {
        self.flash[process.node].push((process.incarnation, identity));
    }

    /// The flash that a process has, or had.
    pub fn flash_of(&self, process: Process) -> Option<u64> {
        let mut known = self.flash[process.node].iter();
        known.find(|(incarnation, _)| *incarnation == process.incarnation).map(|(_, identity)| *identity)
    }

    pub fn node_ref(&self, process: Process) -> NodeRef {
        let node = NodeRef::new(name(process.node), u64::from(process.incarnation));
        node.with_flash(self.flash_of(process))
    }

    /// Whether a process has the copy recorded for `named`.
    pub fn counts(&self, named: Process, process: Process) -> bool {
        self.disk.counts(&self.node_ref(named), &self.node_ref(process))
    }

    pub fn is_replica(&self, process: Process) -> bool {
        self.disk.is_replica(&self.node_ref(process))
    }

    pub fn has_owners_copy(&self, process: Process) -> bool {
        self.disk.has_owners_copy(&self.node_ref(process))
    }

    pub fn disk(&self) -> &DiskRecord {
        &self.disk
    }

    /// A late renewal does not shorten the lease.
    pub fn renew(&mut self, process: Process, until: Nanos) {
        let lease = &mut self.leases[process.node];
        *lease = (process.incarnation, until).max(*lease);
    }

    pub fn is_live(&self, process: Process, now: Nanos) -> bool {
        self.live(process.node, now) == Some(process)
    }

    /// The process on a node, if its lease is valid.
    pub fn live(&self, node: usize, now: Nanos) -> Option<Process> {
        let (incarnation, until) = self.leases[node];
        (now < until).then_some(Process { node, incarnation })
    }

    /// All processes with a valid lease, as the rules expect it.
    pub fn live_nodes(&self, now: Nanos) -> Live {
        let live = (0..NODES).filter_map(|node| self.live(node, now));
        live.map(|process| (name(process.node), self.node_record(process))).collect()
    }

    /// Addresses are unused here.
    fn node_record(&self, process: Process) -> NodeRecord {
        let rack = |racks: Racks| format!("rack-{}", racks.of[process.node]);
        let flash = self.flash_of(process);
        let space = MediumSpace { medium: Medium::Flash, bytes: 4, free: 1, log: 1 };
        NodeRecord {
            name: name(process.node),
            incarnation: u64::from(process.incarnation),
            flash,
            peer_address: ([127, 0, 0, 1], 1).into(),
            nbd_tcp: None,
            nbd_tls: None,
            nbd_unix: "/nbd".into(),
            api: "/api".into(),
            fault_domain: self.racks.map_or_else(|| name(process.node), rack),
            media: flash.map(|_| space).into_iter().collect(),
            load: 0,
            forwards: true,
        }
    }

    /// The misplaced replicas of a record.
    fn misplaced(&self, record: &DiskRecord) -> Vec<Process> {
        let Some(owner) = &record.owner else { return Vec::new() };
        let all = [owner].into_iter().chain(&record.replicas).map(process_of);
        let all = all.map(|process| (name(process.node), self.node_record(process))).collect();
        let misplaced = placement::misplaced(record.policy, &owner.node, &record.replicas, &all);
        let is_misplaced = |replica: &&NodeRef| misplaced.contains(&&*replica.node);
        record.replicas.iter().filter(is_misplaced).map(process_of).collect()
    }

    fn replace(&mut self, next: DiskRecord) {
        let wanted = match next.policy {
            Policy::WriteThrough => None,
            Policy::WriteBack(_) | Policy::Strict(_) => Some(next.policy.replicas()),
        };
        self.record = Record {
            owner: next.owner.as_ref().map(process_of),
            epoch: next.epoch,
            replicas: next.replicas.iter().map(process_of).collect(),
            write_back: next.mode == Mode::WriteBack,
            wanted,
            former: next.former.iter().map(|former| process_of(&former.node)).collect(),
            strict: next.policy.is_strict(),
            misplaced: self.misplaced(&next),
            short: false,
        };
        self.disk = next;
    }

    /// The owner changes the replica set.
    pub fn change_replicas(
        &mut self,
        by: Process,
        epoch: u64,
        replicas: &[Process],
        write_back: bool,
    ) -> Result<(), Refusal> {
        let replicas: Vec<NodeRef> = replicas.iter().map(|replica| self.node_ref(*replica)).collect();
        let mode = if write_back { Mode::WriteBack } else { Mode::WriteThrough };
        let next = ownership::change_replicas(&self.disk, &self.node_ref(by), epoch, &replicas, mode, 0)?;
        self.replace(next);
        Ok(())
    }

    pub fn set_policy(&mut self, by: Process, wanted: Option<usize>) -> Result<(), Refusal> {
        let caller = Caller::Owner { node: &self.node_ref(by), epoch: self.disk.epoch };
        let next = ownership::set_policy(&self.disk, caller, policy(wanted, self.racks))?;
        self.replace(next);
        Ok(())
    }

    /// This process opens the disk, which has no owner.
    pub fn claim(&mut self, by: Process) {
        if let Ok(next) = ownership::claim_free(&self.disk, &self.node_ref(by)) {
            self.replace(next);
        }
    }

    pub fn take_over(&mut self, by: Process, evidence: &OwnerGone) -> Result<(), Refusal> {
        let next = ownership::take_over(&self.disk, &self.node_ref(by), evidence)?;
        self.replace(next);
        let record = &mut self.record;
        record.short =
            record.write_back && record.wanted.is_some_and(|wanted| record.replicas.len() < wanted);
        Ok(())
    }

    /// A replica finds that it has lost its copy.
    pub fn disclaim(&mut self, by: Process, evidence: &OwnerGone) -> Result<(), Refusal> {
        let next = ownership::disclaim(&self.disk, &self.node_ref(by), evidence)?;
        self.replace(next);
        Ok(())
    }

    /// The owner swaps roles with a replica.
    pub fn hand_over(&mut self, by: Process, to: Process) -> Result<(), Refusal> {
        let next = ownership::hand_over(&self.disk, &self.node_ref(by), self.disk.epoch, &self.node_ref(to))?;
        let short = self.record.short;
        self.replace(next);
        self.record.short = short;
        Ok(())
    }

    /// The owner takes a new epoch: its earlier requests can no longer commit.
    pub fn renew_epoch(&mut self, by: Process) -> Result<(), Refusal> {
        let next = ownership::renew(&self.disk, &self.node_ref(by), self.disk.epoch)?;
        let short = self.record.short;
        self.replace(next);
        self.record.short = short;
        Ok(())
    }

    /// Removes former owners whose I/O has ended.
    pub fn forget_former(&mut self, by: Process, all: &[FormerOwner]) {
        let (me, epoch, short) = (self.node_ref(by), self.disk.epoch, self.record.short);
        let next = all.iter().try_fold(self.disk.clone(), |record, former| {
            ownership::forget_former(&record, &me, epoch, former)
        });
        if let Ok(next) = next {
            self.replace(next);
            self.record.short = short;
        }
    }

    /// The epoch since which a process is a former owner, if it is one.
    pub fn epoch_as_former(&self, process: Process) -> Option<u64> {
        let node = self.node_ref(process);
        self.disk.former.iter().find(|former| former.node == node).map(|former| former.epoch)
    }
}
