//! The control plane of a node: brings what is here into line with the registry, and carries out what owners ask for.
//! The rules are those of the real one; what differs is that its answers may come late, or not at all.

use std::time::Duration;

use weir_accel::Log;
use weir_accel::owner::Event;
use weir_accel::planted::Bug;
use weir_accel::replica::Replica;
use weir_accel::wire::{Batch, Hello, RecordHeader};

use weir_block::Nanos;

use crate::atlas::Fault;
use crate::owner_process::OwnerProcess;
use crate::world::{
    Control, FENCE_GRACE, LOG, NODES, OWN_LEASE, PEER_DEADLINE, Process, Task, World, node_of,
};

impl World {
    /// Now and then: the lease, the record, the former owners.
    pub fn reconcile(&mut self, process: Process) {
        self.after(20_000, 150_000, Task::Reconcile { process });
        if !self.registry.up || !self.nodes[process.node].reaches {
            return;
        }
        self.renew(process);
        let record = self.registry.record.clone();
        self.forget_replica(process);
        let told = self.owner(process).map(|owner| (owner.serial, owner.told_epoch, owner.told_policy));
        match (told, record.owner == Some(process)) {
            (Some((serial, epoch, policy)), true) if epoch < record.epoch => {
                self.tell(process, serial, Event::Configured(record.configuration()));
                if policy != record.wanted {
                    self.tell(process, serial, Event::PolicyRequested(record.wanted));
                }
                if let Some(owner) = self.owner(process) {
                    (owner.told_epoch, owner.told_policy) = (record.epoch, record.wanted);
                }
            }
            (Some((serial, ..)), true) => self.settle_former(process, serial),
            (Some((_, epoch, _)), false) if epoch <= record.epoch => self.let_go(process),
            (Some(_), false) => {}
            (None, true) => self.open(process),
            (None, false) => self.consider_takeover(process),
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
    fn tell(&mut self, process: Process, serial: u64, event: Event) {
        self.activity += 1;
        let delay = self.registry_delay() + Duration::from_micros(self.rng.u64(20..=300));
        let twice = self.strikes(Fault::DuplicateNotice, 16).then(|| event.clone());
        self.tell_in_order(Task::Told { process, serial, event }, process, delay);
        if let Some(event) = twice {
            self.tell_in_order(Task::Told { process, serial, event }, process, delay);
        }
    }

    pub fn tell_in_order(&mut self, task: Task, process: Process, delay: Duration) {
        let node = &mut self.nodes[process.node];
        let at = (self.now + delay).max(node.told_until + Duration::from_nanos(1));
        node.told_until = at;
        self.at(at, task);
    }

    /// A copy that no record asks for any more.
    fn forget_replica(&mut self, process: Process) {
        let record = &self.registry.record;
        if record.owner == Some(process) || record.replicas.contains(&process) {
            return;
        }
        let below = record.epoch;
        let node = &mut self.nodes[process.node];
        if below == node.forgotten_below || node.owner.is_some() {
            return;
        }
        node.forgotten_below = below;
        if node.replica.as_ref().is_some_and(|replica| replica.epoch() < below) {
            self.touched = true;
            node.replica = None;
            self.cut_all(|connection| connection.replica == process);
        }
    }

    fn let_go(&mut self, process: Process) {
        self.note(|| format!("n{} lets go", process.node));
        self.nodes[process.node].owner = None;
        self.cut_all(|connection| connection.owner == process);
    }

    fn consider_takeover(&mut self, process: Process) {
        let now = self.now;
        let Some(owner) = self.registry.record.owner else {
            let _ = self.registry.claim(process);
            return;
        };
        let node = &mut self.nodes[process.node];
        if self.registry.is_live(owner, now) {
            node.owner_gone = None;
            return;
        }
        let since = match node.owner_gone {
            Some((known, since)) if known == owner => since,
            _ => {
                node.owner_gone = Some((owner, now));
                now
            }
        };
        let certain = !self.is_alive(owner) || now >= since + FENCE_GRACE;
        if !self.registry.record.write_back && !certain {
            return;
        }
        if self.registry.take_over(process, now).is_ok() {
            self.counts.takeovers += 1;
            self.touched = true;
            self.note(|| format!("n{} takes over from n{}", process.node, owner.node));
        }
    }

    /// What the registry says is this process's is opened, with the log of the replica if there may be one.
    fn open(&mut self, process: Process) {
        let record = self.registry.record.clone();
        let former_stopped = self.former_has_ended(process);
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
        let owner =
            OwnerProcess::new(self.serial, record.configuration(), inherited, former_stopped, self.planted);
        self.note(|| format!("n{} opens the disk: {record:?}, log to {}", process.node, owner.log.last()));
        self.nodes[process.node].owner = Some(owner);
        self.touched = true;
        self.nodes[process.node].connected = [None; NODES];
        self.step(process, Event::Tick);
        self.turn(process);
    }

    /// Whether no former owner has I/O under way, or will have: dead, or let go, or silent for so long that it stopped.
    fn former_has_ended(&self, process: Process) -> bool {
        self.registry.record.former.iter().filter(|former| **former != process).all(|former| {
            let may_write = self.is_alive(*former) && self.nodes[former.node].owner.is_some();
            let gone = self.now.0 >= self.nodes[former.node].lease.0 + FENCE_GRACE.as_nanos() as u64;
            (!may_write || gone) && self.backing.is_quiet_for(*former)
        })
    }

    fn settle_former(&mut self, process: Process, serial: u64) {
        if self.registry.record.former.is_empty() || !self.former_has_ended(process) {
            return;
        }
        if self.owner(process).is_some_and(|owner| !std::mem::replace(&mut owner.told_former, true)) {
            self.tell(process, serial, Event::FormerStopped);
        }
        self.registry.record.former.clear();
    }

    /// The next thing that the control plane was asked for.
    pub fn control(&mut self, process: Process) {
        let Some(control) = self.nodes[process.node].control.pop_front() else { return };
        match control {
            Control::WantPeer { serial, node, exclude } => self.want_peer(process, serial, node, &exclude),
            Control::Propose { serial, epoch, replicas, write_back } => {
                self.propose(process, serial, epoch, &replicas, write_back);
            }
            Control::SetPolicy(wanted) => {
                let reaches = self.registry.up && self.nodes[process.node].reaches;
                if reaches && self.owner(process).is_some() {
                    let set = self.registry.set_policy(process, wanted);
                    self.note(|| format!("policy {wanted:?}: {set:?}"));
                }
            }
        }
    }

    fn want_peer(&mut self, process: Process, serial: u64, node: Option<String>, exclude: &[String]) {
        let now = self.now;
        let record = &self.registry.record;
        let peer = match node.map(|node| node_of(&node)) {
            Some(node) => {
                let live = self.registry.live(node, now);
                let holder = record.replicas.iter().find(|replica| replica.node == node);
                live.filter(|live| holder.is_none_or(|holder| holder == live))
            }
            None => {
                let free = (0..NODES).filter(|node| {
                    *node != process.node && !exclude.iter().any(|known| node_of(known) == *node)
                });
                let live: Vec<Process> = free.filter_map(|node| self.registry.live(node, now)).collect();
                (!live.is_empty()).then(|| live[self.rng.usize(..live.len())])
            }
        };
        let peer = peer.filter(|peer| self.is_alive(*peer));
        let reaches = |peer: &Process| {
            self.blocked(process.node, peer.node).is_none() && self.blocked(peer.node, process.node).is_none()
        };
        let fails = !peer.as_ref().is_none_or(reaches) || self.strikes(Fault::ConnectFailure, 10);
        let delay = if fails { PEER_DEADLINE } else { self.mostly(1_000, 200_000) };
        let peer = peer.filter(|_| !fails);
        self.at(self.now + delay, Task::Connected { process, serial, peer });
    }

    fn propose(&mut self, process: Process, serial: u64, epoch: u64, replicas: &[String], write_back: bool) {
        let record = &self.registry.record;
        let connected = &self.nodes[process.node].connected;
        let whom = |name: &String| {
            let node = node_of(name);
            connected[node].or_else(|| record.replicas.iter().find(|known| known.node == node).copied())
        };
        let Some(replicas) = replicas.iter().map(whom).collect::<Option<Vec<Process>>>() else {
            return self.tell(process, serial, Event::NotConfigured);
        };
        let reaches = self.registry.up && self.nodes[process.node].reaches;
        if !reaches || self.strikes(Fault::LostAnswer, 6) {
            // The answer is lost. What was asked for is committed before, afterwards, twice, or never.
            let late = Task::LateCommit { process, epoch, replicas: replicas.clone(), write_back };
            match self.rng.u8(..3) {
                0 if reaches => self.commit(process, epoch, replicas, write_back),
                0 | 1 => {
                    if write_back {
                        self.pending.push((epoch, replicas));
                    }
                    self.after(1_000, 800_000, late.clone());
                    self.after(1_000, 800_000, late);
                }
                _ => {}
            }
            return self.tell(process, serial, Event::NotConfigured);
        }
        self.commit(process, epoch, replicas, write_back);
        if self.strikes(Fault::LeaseLoss, 12) {
            self.lose_registry(process.node);
            return self.tell(process, serial, Event::NotConfigured);
        }
        let record = self.registry.record.clone();
        let answer = if record.owner == Some(process) && record.epoch == epoch + 1 {
            if let Some(owner) = self.owner(process) {
                owner.told_epoch = record.epoch;
            }
            Event::Configured(record.configuration())
        } else {
            Event::NotConfigured
        };
        self.tell(process, serial, answer);
    }

    pub fn late_commit(&mut self, process: Process, epoch: u64, replicas: Vec<Process>, write_back: bool) {
        self.pending.retain(|pending| pending.0 != epoch || pending.1 != replicas);
        self.commit(process, epoch, replicas, write_back);
    }

    fn commit(&mut self, process: Process, epoch: u64, replicas: Vec<Process>, write_back: bool) {
        self.touched = true;
        let changed = self.registry.change_replicas(process, epoch, replicas.clone(), write_back);
        self.note(|| {
            format!("registry, from epoch {epoch}: {replicas:?}, write-back {write_back}: {changed:?}")
        });
    }
}

/// A replica with the same content that does not know of the takeover.
fn unsealed(epoch: u64, lineage: u64, log: &Log) -> Replica {
    let mut replica = Replica::new(Log::new(LOG + (1 << 20), 1).expect("memory"));
    let freed = log.freed();
    let (inherited_lineage, inherited_last) = (0.into(), 0.into());
    let (epoch, lineage, freed_) = (epoch.into(), lineage.into(), freed.into());
    replica
        .hello(&Hello { epoch, lineage, inherited_lineage, inherited_last, freed: freed_ })
        .expect("valid");
    let records: Vec<_> = log.range(0, log.last()).collect();
    let headers: Vec<_> = records.iter().map(|(_, record)| RecordHeader::of(record)).collect();
    let data: Vec<u8> = records.iter().flat_map(|(_, record)| log.data(record)).copied().collect();
    let (first, count) = ((freed + 1).into(), (headers.len() as u32).into());
    let head = Batch { epoch, first, freed: freed_, count, complete: 1.into() };
    replica.batch(&head, &headers, &data).expect("valid");
    replica
}

/// What a clock that runs `drift` thousandths too fast makes of a time.
pub fn by_the_clock(time: Duration, drift: i64) -> Duration {
    let real = time.as_nanos() as i64 * 1000 / (1000 + drift);
    Duration::from_nanos(real.unsigned_abs())
}
