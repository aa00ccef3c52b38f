//! The control plane of a node and its calls to the registry, which take time and may get lost.
//!
//! Production's [`decide`] makes decisions, and production's rules change the record. A session counts for the disk only after a
//! read of the record, sent since the session began, has confirmed this owner.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_accel::planted::Bug;
use weir_accel::{Configuration, Former};
use weir_block::Nanos;
use weir_cluster::ownership::OwnerGone;
use weir_cluster::placement::{Live, choose_replicas};
use weir_cluster::records::{DiskRecord, FormerOwner};
use weir_node::control::decide::{Decision, Evidence, Local, Situation, decide, former_certainty};

use super::{Cluster, Task};
use crate::atlas::Fault;
use crate::registry::{Record, process_of};
use crate::scale::{CALM, FENCE_GRACE, LEASE, NODES, OWN_LEASE, PEER_DEADLINE, Process, name, node_of};

/// With the planted bug, the node releases the disk this much later.
const WAITS: Duration = Duration::from_secs(3);

/// A node releases a disk with another owner and a readable record within this time (P9).
const RELEASE_BOUND: Duration = Duration::from_secs(2);

/// A node's session, as far as the node may rely on it, by its own clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Session {
    /// The session's number; 0 is none.
    pub number: u64,
    pub until: Nanos,
}

/// A node's call to the registry.
pub enum Ask {
    Renew {
        sent: Nanos,
    },
    Read {
        session: u64,
    },
    Claim,
    TakeOver(OwnerGone),
    Disclaim(OwnerGone),
    Change {
        serial: u64,
        epoch: u64,
        replicas: Vec<Process>,
        write_back: bool,
        answered: bool,
    },
    /// Gives the disk to a replica, if the record is still in this epoch.
    HandOver {
        serial: u64,
        epoch: u64,
        to: Process,
        answered: bool,
    },
    /// Takes a new epoch of its own, when the last change's outcome is unknown.
    EndDoubt {
        serial: u64,
    },
    ForgetFormer(Vec<FormerOwner>),
    Released,
}

/// The registry's answer.
pub enum Answer {
    Renewed {
        number: u64,
        sent: Nanos,
    },
    Record {
        record: Record,
        disk: Box<DiskRecord>,
        live: Live,
        session: u64,
    },
    Changed {
        serial: u64,
        committed: Option<Configuration>,
    },
    /// The record, if the disk has changed hands.
    HandedOver {
        serial: u64,
        record: Option<Box<Record>>,
    },
    DoubtEnded {
        serial: u64,
    },
}

/// The control plane's message to the shard.
#[derive(Clone)]
pub enum ShardMessage {
    Configured(Configuration),
    NotConfigured,
    Policy(Option<usize>),
    FormerStopped,
    Successor(Option<String>),
    NoPeer,
}

impl Cluster {
    pub fn begin_control(&mut self, node: usize) {
        let process = self.process(node);
        self.after(0, 5_000, Task::Renew { process });
        self.after(5_000, 30_000, Task::Reconcile { process });
    }

    pub fn reaches_registry(&self, node: usize) -> bool {
        self.registry.up && self.nodes[node].reaches
    }

    /// The time of the node's clock, without a pause: the control plane is another thread.
    fn local_now(&self, node: usize) -> Nanos {
        self.nodes[node].clock.at(self.world.now())
    }

    pub fn renew(&mut self, process: Process) {
        self.after(60_000, 180_000, Task::Renew { process });
        let sent = self.local_now(process.node);
        self.ask(process, Ask::Renew { sent });
    }

    pub fn reconcile(&mut self, process: Process) {
        self.after(20_000, 150_000, Task::Reconcile { process });
        self.look(process);
    }

    /// Reads the record.
    pub fn look(&mut self, process: Process) {
        let session = self.nodes[process.node].session.number;
        self.ask(process, Ask::Read { session });
    }

    /// Sends a call to the registry, if reachable.
    pub fn ask(&mut self, from: Process, ask: Ask) {
        if self.reaches_registry(from.node) {
            let delay = self.registry_delay();
            return self.at(self.world.now() + delay, Task::AtRegistry { from, ask });
        }
        self.unasked(from, &ask);
    }

    /// A call is over: removes its change from those that may still commit.
    fn unasked(&mut self, from: Process, ask: &Ask) {
        match ask {
            Ask::Change { epoch, replicas, .. } => {
                let same = |pending: &(u64, Vec<Process>)| pending.0 == *epoch && pending.1 == *replicas;
                let index = self.pending.iter().position(same);
                index.map(|index| self.pending.swap_remove(index));
            }
            Ask::TakeOver(_) => {
                let index = self.taking_over.iter().position(|process| *process == from);
                index.map(|index| self.taking_over.swap_remove(index));
            }
            _ => {}
        }
    }

    pub fn answer(&mut self, to: Process, answer: Answer) {
        let delay = self.registry_delay();
        self.at(self.world.now() + delay, Task::Answered { to, answer });
    }

    /// The delay to or from the registry.
    fn registry_delay(&mut self) -> Duration {
        let slow = self.world.now() < self.registry_slow;
        let more = if slow { self.rng.u64(..400_000) } else { 0 };
        self.mostly(600, 300_000) + Duration::from_micros(more)
    }

    fn mostly(&mut self, short: u64, long: u64) -> Duration {
        let calm = self.world.now() >= CALM;
        let most = if self.rng.u8(..) < 16 && !calm { long } else { short };
        Duration::from_micros(self.rng.u64(short / 4..=most))
    }

    pub fn at_registry(&mut self, from: Process, ask: Ask) {
        let now = self.world.now();
        self.unasked(from, &ask);
        if !self.registry.up {
            // The caller of a change learns that its outcome is unknown.
            if let Ask::Change { serial, answered: true, .. } = ask {
                self.answer(from, Answer::Changed { serial, committed: None });
            }
            return;
        }
        match ask {
            Ask::Renew { sent } => {
                if !self.registry.is_live(from, now) {
                    self.sessions[from.node] += 1;
                }
                self.registry.renew(from, now + LEASE);
                let number = self.sessions[from.node];
                self.answer(from, Answer::Renewed { number, sent });
            }
            Ask::Read { session } => {
                let (record, disk) = (self.registry.record.clone(), Box::new(self.registry.disk().clone()));
                let live = self.registry.live_nodes(now);
                self.answer(from, Answer::Record { record, disk, live, session });
            }
            Ask::Claim if self.registry.record.owner.is_none() => self.registry.claim(from),
            Ask::Claim => {}
            Ask::TakeOver(evidence) => self.take_over(from, &evidence),
            Ask::Disclaim(evidence) => {
                let disclaimed = self.registry.disclaim(from, &evidence);
                self.note(|| format!("n{} does not have its copy: {disclaimed:?}", from.node));
            }
            Ask::Change { serial, epoch, replicas, write_back, answered } => {
                let changed = self.registry.change_replicas(from, epoch, &replicas, write_back);
                self.note(|| {
                    format!(
                        "registry, from epoch {epoch}: {replicas:?}, write-back {write_back}: {changed:?}"
                    )
                });
                let committed = changed.is_ok().then(|| self.registry.record.configuration());
                if committed.is_some() {
                    self.record_changed();
                    self.check_copies();
                    self.crash_soon(from.node, 16, 5_000);
                }
                if committed.is_some() && self.should_inject(Fault::LeaseLoss, 12) {
                    self.lose_registry(from.node);
                    self.answer(from, Answer::Changed { serial, committed: None });
                } else if answered {
                    self.answer(from, Answer::Changed { serial, committed });
                }
            }
            Ask::HandOver { serial, epoch, to, answered } => {
                self.hand_over(from, serial, epoch, to, answered);
            }
            Ask::EndDoubt { serial } => {
                if self.registry.renew_epoch(from).is_ok() {
                    self.answer(from, Answer::DoubtEnded { serial });
                }
            }
            Ask::ForgetFormer(former) => self.registry.forget_former(from, &former),
            Ask::Released => {
                let epoch = self.registry.epoch_as_former(from);
                let news =
                    epoch.map(|epoch| (from, epoch)).filter(|one| !self.registry.released.contains(one));
                if let Some(news) = news {
                    self.registry.released.push(news);
                    self.record_changed();
                }
            }
        }
    }

    /// Some nodes get a notification at once; the others find the change at their next read.
    pub fn record_changed(&mut self) {
        for node in 0..NODES {
            let process = self.process(node);
            if self.rng.bool() {
                self.after(300, 5_000, Task::Look { process });
            }
        }
    }

    /// The record names another owner.
    pub fn owner_changed(&mut self) {
        self.record_changed();
        if self.world.writes_to(self.medium) {
            self.count(Fault::LateWrite);
        }
        self.check_copies();
    }

    /// Commits only if the owner's session is over and the caller's is valid.
    fn take_over(&mut self, by: Process, evidence: &OwnerGone) {
        let now = self.world.now();
        let owner = process_of(&evidence.owner);
        if self.registry.is_live(owner, now) || !self.registry.is_live(by, now) {
            return;
        }
        match self.registry.take_over(by, evidence) {
            Ok(()) => {
                self.counts.takeovers += 1;
                self.owner_changed();
                self.crash_soon(by.node, 6, 400_000);
                self.note(|| format!("n{} takes over from {}: {:?}", by.node, evidence.owner, evidence.how));
            }
            Err(refusal) => self.note(|| format!("n{} may not take over: {refusal}", by.node)),
        }
    }

    pub fn answered(&mut self, to: Process, answer: Answer) {
        match answer {
            Answer::Renewed { number, sent } => {
                let session = &mut self.nodes[to.node].session;
                let until = sent + OWN_LEASE;
                match number.cmp(&session.number) {
                    std::cmp::Ordering::Less => {}
                    std::cmp::Ordering::Equal => session.until = session.until.max(until),
                    std::cmp::Ordering::Greater => *session = Session { number, until },
                }
                self.publish(to);
            }
            Answer::Record { record, disk, live, session } => {
                self.record_read(to, record, &disk, &live, session)
            }
            Answer::Changed { serial, committed } => {
                let message = match committed {
                    Some(configuration) => {
                        if let Some(disk) =
                            self.nodes[to.node].disk.as_mut().filter(|disk| disk.serial == serial)
                        {
                            disk.told_epoch = disk.told_epoch.max(configuration.epoch);
                        }
                        ShardMessage::Configured(configuration)
                    }
                    None => ShardMessage::NotConfigured,
                };
                self.send_to_shard(to, serial, message);
            }
            Answer::HandedOver { serial, record } => {
                self.handed_over(to, serial, record.map(|record| *record));
            }
            Answer::DoubtEnded { serial } => self.stay(to, serial),
        }
    }

    /// Sends the right's deadline to the shard.
    pub fn publish(&mut self, process: Process) {
        let trusts = self.planted.has(Bug::TrustReturnedLease);
        let node = &self.nodes[process.node];
        if let Some(disk) = &node.disk {
            let given = disk.moving.is_some_and(|moving| moving.may_be_over());
            let counts = !given && (disk.confirmed == node.session.number || trusts);
            let until = if counts { node.session.until } else { Nanos(0) };
            disk.right.set(until);
        }
    }

    fn record_read(&mut self, to: Process, record: Record, disk: &DiskRecord, live: &Live, session: u64) {
        let node = &mut self.nodes[to.node];
        if record.epoch < node.view.epoch {
            return;
        }
        node.view = record.clone();
        node.tell_copy(self.planted);
        if record.owner == Some(to)
            && let Some(disk) = &mut node.disk
        {
            disk.confirmed = disk.confirmed.max(session);
            if disk.told_epoch == record.epoch {
                disk.accel.still_owner();
                node.wake();
            }
        }
        self.publish(to);
        if record.owner != Some(to) && !self.planted.has(Bug::OpenWhileFenced) {
            // The disk being opened here belongs to another node by now.
            self.nodes[to.node].opening = 0;
        }
        self.report_released(to);
        self.forget_copy(to, disk);
        if record.owner.is_none() {
            return self.ask(to, Ask::Claim);
        }
        let decision = self.decide(to, disk, live);
        self.check_release_bound(to, matches!(decision, Decision::Release { .. }));
        match decision {
            Decision::Nothing => self.settle_former(to, disk),
            // No record of this simulation names a claimant: a disk without an owner is claimed above.
            Decision::Unavailable(_) | Decision::Claim => {}
            Decision::TakeOver(evidence) => {
                self.taking_over.push(to);
                self.ask(to, Ask::TakeOver(evidence));
            }
            Decision::Disclaim(evidence) => self.ask(to, Ask::Disclaim(evidence)),
            Decision::Open if self.nodes[to.node].opening != 0 => {}
            Decision::Open => {
                self.serial += 1;
                let number = self.serial;
                self.nodes[to.node].opening = number;
                // The medium, or a dead owner's kernel, may delay it.
                let slow = self.world.now() < CALM && self.rng.u8(..4) == 0;
                let delay = Duration::from_micros(self.rng.u64(200..=if slow { 3_000_000 } else { 2_000 }));
                // Another node may take the disk during its opening.
                if slow && self.should_inject(Fault::LeaseLoss, 2) {
                    self.nodes[to.node].reaches = false;
                    self.after(700_000, 2_000_000, Task::Reach { node: to.node });
                }
                let disk = Box::new(disk.clone());
                self.at(self.world.now() + delay, Task::Open { process: to, number, record, disk, session });
            }
            Decision::Configure => self.configure(to),
            Decision::Release { .. } => {
                let since = self.nodes[to.node].overstays.unwrap_or(self.world.now());
                if !self.planted.has(Bug::LetGoWaits) || self.world.now() - since > WAITS {
                    self.release_disk(to);
                }
            }
        }
    }

    fn decide(&mut self, process: Process, disk: &DiskRecord, live: &Live) -> Decision {
        let now = self.local_now(process.node);
        let owner = self.nodes[process.node].view.owner;
        let is_live = |owner: &Process| {
            live.get(&name(owner.node))
                .is_some_and(|record| record.incarnation == u64::from(owner.incarnation))
        };
        let seen = &mut self.nodes[process.node].owner_gone;
        *seen = match (owner.filter(|owner| !is_live(owner)), *seen) {
            (Some(owner), Some((known, since))) if known == owner => Some((owner, since)),
            (Some(owner), _) => Some((owner, now)),
            (None, _) => None,
        };
        let owner_gone_since = seen.map(|(_, since)| since);
        let me = self.registry.node_ref(process);
        let situation = Situation {
            me: &me,
            live,
            barred: &BTreeSet::new(),
            local: match &self.nodes[process.node].disk {
                Some(disk) => Local::Open { epoch: disk.told_epoch },
                None => Local::Closed,
            },
            has_copy: self.has_copy(process),
            owner_stopped: owner.is_some_and(|owner| self.has_stopped(owner)),
            owner_gone_since,
            vacant_since: None,
            now,
            fence_grace: FENCE_GRACE,
        };
        decide(Some(disk), &situation)
    }

    /// Whether the registry knows that a process has ended: the embedded one detects it, etcd does not.
    fn has_stopped(&self, process: Process) -> bool {
        self.sees_ends && !self.is_alive(process)
    }

    fn configure(&mut self, process: Process) {
        let record = self.nodes[process.node].view.clone();
        let Some(disk) = &mut self.nodes[process.node].disk else { return };
        let (serial, policy) = (disk.serial, disk.told_policy);
        (disk.told_epoch, disk.told_policy) = (record.epoch, record.wanted);
        self.send_to_shard(process, serial, ShardMessage::Configured(record.configuration()));
        if policy != record.wanted {
            self.send_to_shard(process, serial, ShardMessage::Policy(record.wanted));
        }
    }

    /// Reports a released disk to the registry, once none of its I/O is in flight.
    pub fn report_released(&mut self, process: Process) {
        self.take_left(process);
        let node = &self.nodes[process.node];
        let quiet = node.leaving.is_empty() || self.planted.has(Bug::HandOverBesideDestage);
        let former = node.view.former.contains(&process) && node.disk.is_none() && quiet;
        if former {
            self.ask(process, Ask::Released);
        }
    }

    fn check_release_bound(&mut self, process: Process, overstays: bool) {
        let now = self.world.now();
        let since = &mut self.nodes[process.node].overstays;
        *since = overstays.then(|| since.unwrap_or(now));
        if since.is_some_and(|since| now - since > RELEASE_BOUND) {
            self.fail(|| {
                format!(
                    "P9: n{} has known for {RELEASE_BOUND:?} that the disk has another owner and has not released it",
                    process.node
                )
            });
        }
    }

    /// Drops a copy that no record needs.
    fn forget_copy(&mut self, process: Process, disk: &DiskRecord) {
        let me = self.registry.node_ref(process);
        let keeps = self.planted.has(Bug::KeepUncounted) && !self.flash.is_empty();
        let counted = disk.has_owners_copy(&me) || disk.is_replica(&me) || keeps;
        let node = &mut self.nodes[process.node];
        let below = node.view.epoch;
        if counted || below == node.forgotten_below || node.disk.is_some() {
            return;
        }
        node.forgotten_below = below;
        self.forget_replica(process, below);
    }

    /// Once the I/O of all former owners has ended, notifies the shard and removes them from the record.
    fn settle_former(&mut self, process: Process, disk: &DiskRecord) {
        if disk.former.is_empty() {
            return self.nodes[process.node].former_since.clear();
        }
        if !self.former_has_ended(process, disk) {
            return;
        }
        let Some(open) = &mut self.nodes[process.node].disk else { return };
        let (serial, notified) = (open.serial, std::mem::replace(&mut open.told_former, true));
        if !notified {
            self.send_to_shard(process, serial, ShardMessage::FormerStopped);
        }
        self.ask(process, Ask::ForgetFormer(disk.former.clone()));
    }

    pub fn former_has_ended(&mut self, process: Process, disk: &DiskRecord) -> bool {
        let now = self.local_now(process.node);
        let mut ended = true;
        let mut since = std::mem::take(&mut self.nodes[process.node].former_since);
        for former in &disk.former {
            let who = Cluster::named(&former.node);
            let evidence = if self.registry.released.contains(&(who, former.epoch)) {
                Evidence::Released
            } else if self.has_stopped(who) {
                // Nodes that detect each other's ends share a machine and its kernel.
                if self.world.is_busy_for_ended(self.medium) { Evidence::UnderWay } else { Evidence::Ended }
            } else {
                Evidence::None
            };
            let index = since.iter().position(|seen| seen.0 == former.node).unwrap_or_else(|| {
                since.push((former.node.clone(), evidence, now));
                since.len() - 1
            });
            if since[index].1 != evidence {
                since[index] = (former.node.clone(), evidence, now);
            }
            let seen = since[index].2;
            ended &= former_certainty(evidence, seen, Some(seen), FENCE_GRACE, now).0 == Former::Stopped;
        }
        self.nodes[process.node].former_since = since;
        ended
    }

    /// Sends to the shard through a queue, which keeps the order.
    pub fn send_to_shard(&mut self, process: Process, serial: u64, message: ShardMessage) {
        let delay = Duration::from_micros(self.rng.u64(20..=300));
        let twice = self.should_inject(Fault::DuplicateNotice, 16).then(|| message.clone());
        for message in std::iter::once(message).chain(twice) {
            let now = self.world.now();
            let node = &mut self.nodes[process.node];
            let at = (now + delay).max(node.told_until + Duration::from_nanos(1));
            node.told_until = at;
            self.at(at, Task::ShardMessage { process, serial, message });
        }
    }

    pub fn deliver_to_shard(&mut self, process: Process, serial: u64, message: ShardMessage) {
        let node = &mut self.nodes[process.node];
        let Some(disk) = node.disk.as_mut().filter(|disk| disk.serial == serial) else { return };
        match message {
            ShardMessage::Configured(configuration) => disk.accel.configured(configuration),
            ShardMessage::NotConfigured => disk.accel.not_configured(),
            ShardMessage::Policy(wanted) => disk.accel.request_policy(wanted),
            ShardMessage::Successor(node) => disk.accel.prepare_successor(node),
            ShardMessage::FormerStopped => disk.accel.former(Former::Stopped),
            ShardMessage::NoPeer => disk.accel.peer_unavailable(String::new()),
        }
        node.wake();
    }

    pub fn want_peer(
        &mut self,
        process: Process,
        serial: u64,
        node: Option<String>,
        connected: &[String],
        exclude: &[String],
    ) {
        let now = self.world.now();
        let record = &self.nodes[process.node].view;
        let peer = match node.as_deref().map(node_of) {
            Some(node) => {
                let holder = record.replicas.iter().find(|replica| replica.node == node);
                let live = self.registry.live(node, now);
                let has_copy =
                    |holder: &Process, live| *holder == live || self.registry.counts(*holder, live);
                live.filter(|live| holder.is_none_or(|holder| has_copy(holder, *live)))
            }
            // Where the fault domain matters, production code chooses.
            None if self.registry.racks.is_some() => {
                let (disk, live) = (self.registry.disk(), self.registry.live_nodes(now));
                let chosen = choose_replicas(disk, &name(process.node), connected, exclude, &live);
                chosen.first().map(process_of)
            }
            None => {
                let taken = |node: &usize| {
                    *node == process.node
                        || exclude.iter().chain(connected).any(|known| node_of(known) == *node)
                };
                let free = (0..NODES).filter(|node| !taken(node));
                let live: Vec<Process> = free.filter_map(|node| self.registry.live(node, now)).collect();
                (!live.is_empty()).then(|| live[self.rng.usize(..live.len())])
            }
        };
        let peer = peer.filter(|peer| self.is_alive(*peer));
        let reaches = |peer: &Process| {
            !self.world.is_blocked(process.node, peer.node) && !self.world.is_blocked(peer.node, process.node)
        };
        let fails = !peer.as_ref().is_none_or(reaches) || self.should_inject(Fault::ConnectFailure, 10);
        let delay = if fails { PEER_DEADLINE } else { self.mostly(1_000, 200_000) };
        let peer = peer.filter(|_| !fails);
        self.at(now + delay, Task::Connected { process, serial, node: node.unwrap_or_default(), peer });
    }

    /// A connection attempt of the control plane has ended.
    pub fn connected(&mut self, process: Process, serial: u64, node: String, peer: Option<Process>) {
        if self.nodes[process.node].disk.as_ref().is_none_or(|disk| disk.serial != serial) {
            return;
        }
        let Some(peer) = peer.filter(|peer| self.is_alive(*peer)) else {
            self.note(|| format!("n{} cannot reach peer {node}", process.node));
            return self.send_to_shard(process, serial, ShardMessage::NoPeer);
        };
        let (ours, theirs) = self.world.connect(self.simulated(process), self.simulated(peer));
        let node = &mut self.nodes[process.node];
        node.connected[peer.node] = Some(peer);
        if let (Some(disk), Some(reactor)) = (&mut node.disk, &mut node.reactor) {
            disk.accel.peer_connected(reactor, name(peer.node), ours.into());
        }
        node.wake();
        let owner = name(process.node);
        self.after(50, 500, Task::Attach { process: peer, owner, end: theirs });
        self.note(|| format!("n{} is connected to n{}", process.node, peer.node));
    }

    pub fn propose(
        &mut self,
        process: Process,
        serial: u64,
        epoch: u64,
        replicas: &[String],
        write_back: bool,
    ) {
        let record = &self.nodes[process.node].view;
        let connected = &self.nodes[process.node].connected;
        let whom = |name: &String| {
            let node = node_of(name);
            connected[node].or_else(|| record.replicas.iter().find(|known| known.node == node).copied())
        };
        let Some(replicas) = replicas.iter().map(whom).collect::<Option<Vec<Process>>>() else {
            return self.send_to_shard(process, serial, ShardMessage::NotConfigured);
        };
        let lost = self.should_inject(Fault::LostAnswer, 6);
        let reaches = self.reaches_registry(process.node);
        if reaches || lost {
            if write_back {
                self.pending.push((epoch, replicas.clone()));
            }
            // An unanswered change commits soon, late, or never: the registry may be away by then.
            let delay =
                if lost { Duration::from_micros(self.rng.u64(..800_000)) } else { self.mostly(600, 300_000) };
            let ask = Ask::Change { serial, epoch, replicas, write_back, answered: !lost };
            self.at(self.world.now() + delay, Task::AtRegistry { from: process, ask });
        }
        if lost || !reaches {
            self.send_to_shard(process, serial, ShardMessage::NotConfigured);
        }
    }
}
