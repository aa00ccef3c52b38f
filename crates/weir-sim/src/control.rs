//! The control plane of a node: brings what is here into line with the registry.
//!
//! What to do is decided by the real one's [`decide`]; the registry's record is changed by the real rules. What differs is
//! that answers come late, or not at all.

use std::time::Duration;

use weir_accel::lineage::Lineage;
use weir_accel::owner::Event;
use weir_accel::planted::Bug;
use weir_accel::replica::Replica;
use weir_accel::wire::{Batch, Hello, RecordHeader};
use weir_accel::{Former, Layout, Log};
use weir_block::Nanos;
use weir_cluster::ownership::OwnerGone;
use weir_node::control::decide::{Decision, Evidence, Local, Situation, decide, former_certainty};

use crate::atlas::Fault;
use crate::flash::Device;
use crate::owner_process::OwnerProcess;
use crate::registry::process_of;
use crate::world::{FENCE_GRACE, LOG, NODES, OWN_LEASE, Process, Task, World};

impl World {
    /// Now and then: the lease, the record, the former owners.
    pub fn reconcile(&mut self, process: Process) {
        self.after(20_000, 150_000, Task::Reconcile { process });
        if !self.reaches_registry(process.node) {
            return;
        }
        self.nodes[process.node].view = self.registry.record.clone();
        self.renew(process);
        self.write_owed_release(process);
        self.forget_replica(process);
        if self.registry.record.owner.is_none() {
            self.registry.claim(process);
            self.nodes[process.node].view = self.registry.record.clone();
            return;
        }
        match self.decide(process) {
            Decision::Nothing => self.settle_former(process),
            Decision::Unavailable(_) => {}
            Decision::TakeOver(evidence) => self.take_over(process, &evidence),
            Decision::Disclaim(evidence) => self.disclaim(process, &evidence),
            Decision::Open => self.open(process),
            Decision::Configure => self.configure(process),
            Decision::LetGo { .. } => self.let_go(process),
        }
    }

    pub fn reaches_registry(&self, node: usize) -> bool {
        self.registry.up && self.nodes[node].reaches
    }

    fn decide(&mut self, process: Process) -> Decision {
        let owner_gone_since = self.track_owner(process.node);
        let owner = self.registry.record.owner;
        let me = self.registry.node_ref(process);
        let situation = Situation {
            me: &me,
            live: &self.registry.live_nodes(self.now),
            local: match self.owner(process) {
                Some(owner) => Local::Open { epoch: owner.told_epoch },
                None => Local::Closed,
            },
            has_copy: self.has_copy(process),
            owner_stopped: owner.is_some_and(|owner| self.has_stopped(owner)),
            owner_gone_since,
            now: self.now,
            fence_grace: self.fence_grace(process.node),
        };
        decide(Some(self.registry.disk()), &situation)
    }

    /// Since when this node has seen the owner without a lease.
    fn track_owner(&mut self, node: usize) -> Option<Nanos> {
        let now = self.now;
        let gone = self.registry.record.owner.filter(|owner| !self.registry.is_live(*owner, now));
        let seen = &mut self.nodes[node].owner_gone;
        *seen = match (gone, *seen) {
            (Some(owner), Some((known, since))) if known == owner => Some((owner, since)),
            (Some(owner), _) => Some((owner, now)),
            (None, _) => None,
        };
        seen.map(|(_, since)| since)
    }

    /// Whether the registry knows that a process has ended: the embedded one sees it, etcd does not.
    fn has_stopped(&self, process: Process) -> bool {
        self.sees_ends && !self.is_alive(process)
    }

    fn fence_grace(&self, node: usize) -> Duration {
        by_the_clock(FENCE_GRACE, self.nodes[node].drift)
    }

    fn configure(&mut self, process: Process) {
        let record = self.registry.record.clone();
        let Some(owner) = self.owner(process) else { return };
        let (serial, policy) = (owner.serial, owner.told_policy);
        (owner.told_epoch, owner.told_policy) = (record.epoch, record.wanted);
        self.tell(process, serial, Event::Configured(record.configuration()));
        if policy != record.wanted {
            self.tell(process, serial, Event::PolicyRequested(record.wanted));
        }
    }

    /// The process believes in its lease from when it asked for it; the registry, from when it was asked.
    fn renew(&mut self, process: Process) {
        let sent = self.now;
        let (there, back) = (self.registry_delay(), self.registry_delay());
        self.at(sent + there, Task::Renew { process });
        self.at(sent + there + back, Task::Renewed { process, sent });
    }

    pub fn renewed(&mut self, process: Process, sent: Nanos) {
        let node = &mut self.nodes[process.node];
        node.lease = node.lease.max(sent + by_the_clock(OWN_LEASE, node.drift));
    }

    /// The way to the shard is a queue: what is told arrives in order.
    pub fn tell(&mut self, process: Process, serial: u64, event: Event) {
        self.activity += 1;
        let delay = self.registry_delay() + Duration::from_micros(self.rng.u64(20..=300));
        let twice = self.strikes(Fault::DuplicateNotice, 16).then(|| event.clone());
        self.tell_in_order(Task::Told { process, serial, event }, process, delay);
        if let Some(event) = twice {
            self.tell_in_order(Task::Told { process, serial, event }, process, delay);
        }
    }

    fn tell_in_order(&mut self, task: Task, process: Process, delay: Duration) {
        let node = &mut self.nodes[process.node];
        let at = (self.now + delay).max(node.told_until + Duration::from_nanos(1));
        node.told_until = at;
        self.at(at, task);
    }

    /// A copy that no record asks for any more.
    fn forget_replica(&mut self, process: Process) {
        let counted = self.registry.has_owners_copy(process) || self.registry.is_replica(process);
        let keeps = self.planted.has(Bug::KeepUncounted) && self.layout() == Layout::Flash;
        if counted || keeps {
            return;
        }
        let below = self.registry.record.epoch;
        let node = &mut self.nodes[process.node];
        if below == node.forgotten_below || node.owner.is_some() {
            return;
        }
        node.forgotten_below = below;
        match &node.replica {
            Some(replica) if replica.epoch() < below => {
                self.touched = true;
                node.replica = None;
                self.cut_all(|connection| connection.replica == process);
                self.retire_store(process.node);
            }
            Some(_) => {}
            // A copy that could not be read when the node started.
            None => node.flash.iter_mut().for_each(Device::forget),
        }
    }

    /// Once nothing that this process has started is under way, it says so.
    fn write_owed_release(&mut self, process: Process) {
        if let Some(epoch) = self.nodes[process.node].owes_release
            && (self.backing.is_quiet_for(process) || self.planted.has(Bug::HandOverBesideDestage))
        {
            self.nodes[process.node].owes_release = None;
            self.registry.released.push((process, epoch));
        }
    }

    fn take_over(&mut self, process: Process, evidence: &OwnerGone) {
        match self.registry.take_over(process, evidence) {
            Ok(()) => {
                self.counts.takeovers += 1;
                self.touched = true;
                self.nodes[process.node].view = self.registry.record.clone();
                self.crash_soon(process.node, 6, 400_000);
                self.note(|| {
                    format!("n{} takes over from {}: {:?}", process.node, evidence.owner, evidence.how)
                });
            }
            Err(refusal) => self.note(|| format!("n{} may not take over: {refusal}", process.node)),
        }
    }

    fn disclaim(&mut self, process: Process, evidence: &OwnerGone) {
        self.touched = true;
        let disclaimed = self.registry.disclaim(process, evidence);
        self.note(|| format!("n{} does not have its copy: {disclaimed:?}", process.node));
    }

    /// Whether a complete copy is here that this node's flash may vouch for.
    fn has_copy(&self, process: Process) -> bool {
        let replica = self.nodes[process.node].replica.as_ref();
        self.layout() == Layout::Flash && replica.is_some_and(Replica::is_complete)
    }

    /// What the registry says is this process's is opened, with the log of the replica if there may be one.
    fn open(&mut self, process: Process) {
        let record = self.registry.record.clone();
        // A lease that the registry has ended was over for its owner before: there are no grants here.
        let former = if self.former_has_ended(process) { Former::Stopped } else { Former::Silent };
        if !record.write_back {
            self.nodes[process.node].replica = None;
            self.retire_store(process.node);
            if !self.take_store(process.node) {
                return self.note(|| format!("n{} cannot open the disk: its flash fails", process.node));
            }
        }
        let skip_seal = self.planted.has(Bug::SkipSeal);
        let node = &mut self.nodes[process.node];
        let inherited = match (record.write_back, node.replica.take()) {
            (true, Some(mut replica)) if replica.is_complete() => {
                let epoch = replica.epoch();
                replica.seal(record.epoch);
                let (log, lineage) = replica.into_log();
                node.replica = skip_seal.then(|| unsealed(epoch, lineage, &log));
                Some((log, lineage))
            }
            (true, _) => return self.fail(|| format!("n{} may take over and has no copy", process.node)),
            (false, _) => None,
        };
        if !skip_seal {
            self.cut_all(|connection| connection.replica == process);
        }
        self.serial += 1;
        let medium = match self.layout() {
            Layout::Memory => (Layout::Memory, u64::MAX),
            Layout::Flash => (Layout::Flash, self.flash_records),
        };
        let owner =
            OwnerProcess::new(self.serial, record.configuration(), inherited, former, self.planted, medium);
        self.note(|| format!("n{} opens the disk: {record:?}, log to {}", process.node, owner.log.last()));
        self.nodes[process.node].owner = Some(owner);
        self.rewound(process.node);
        self.touched = true;
        self.nodes[process.node].connected = [None; NODES];
        self.step(process, Event::Tick);
        self.turn(process);
    }

    /// Once the I/O of all former owners has ended, the shard is told and they are struck off.
    fn settle_former(&mut self, process: Process) {
        let Some(serial) = self.owner(process).map(|owner| owner.serial) else { return };
        if self.registry.record.former.is_empty() {
            return self.nodes[process.node].former_since.clear();
        }
        if !self.former_has_ended(process) {
            return;
        }
        if self.owner(process).is_some_and(|owner| !std::mem::replace(&mut owner.told_former, true)) {
            self.tell(process, serial, Event::Former(Former::Stopped));
        }
        let former = self.registry.disk().former.clone();
        self.registry.forget_former(process, &former);
    }

    fn former_has_ended(&mut self, process: Process) -> bool {
        let (now, mut ended) = (self.now, true);
        let grace = self.fence_grace(process.node);
        let mut since = std::mem::take(&mut self.nodes[process.node].former_since);
        for former in &self.registry.disk().former {
            let who = process_of(&former.node);
            let evidence = if self.registry.released.contains(&(who, former.epoch)) {
                Evidence::Released
            } else if self.has_stopped(who) {
                // Nodes that see each other's ends share a machine, and its kernel.
                if self.backing.is_quiet_for(who) { Evidence::Ended } else { Evidence::UnderWay }
            } else {
                Evidence::None
            };
            let place = since.iter().position(|seen| seen.0 == who).unwrap_or_else(|| {
                since.push((who, evidence, self.now));
                since.len() - 1
            });
            if since[place].1 != evidence {
                since[place] = (who, evidence, self.now);
            }
            // There are no grants here: the right was over when the lease was.
            let seen = since[place].2;
            let (certain, _) = former_certainty(evidence, seen, Some(seen), grace, now);
            ended &= certain == Former::Stopped;
        }
        self.nodes[process.node].former_since = since;
        ended
    }
}

/// A replica with the same content that does not know of the takeover.
fn unsealed(epoch: u64, lineage: Lineage, log: &Log) -> Replica {
    let mut replica = Replica::new(Log::new(LOG, 1).expect("memory"), 0);
    let freed = log.freed();
    replica.hello(&Hello::new(epoch, lineage, freed, false)).expect("valid");
    let records: Vec<_> = log.range(0, log.last()).collect();
    let headers: Vec<_> = records.iter().map(|(_, record)| RecordHeader::of(record)).collect();
    let data: Vec<u8> = records.iter().flat_map(|(_, record)| log.data(record)).copied().collect();
    let (first, count) = ((freed + 1).into(), (headers.len() as u32).into());
    let head = Batch { epoch: epoch.into(), first, freed: freed.into(), count, complete: 1.into() };
    replica.batch(&head, &headers, &data).expect("valid");
    replica
}

/// What a clock that runs `drift` thousandths too fast makes of a time.
pub fn by_the_clock(time: Duration, drift: i64) -> Duration {
    let real = time.as_nanos() as i64 * 1000 / (1000 + drift);
    Duration::from_nanos(real.unsigned_abs())
}
