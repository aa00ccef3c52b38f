//! The control plane of a node, and the registry's end of it: questions and answers that take time and get lost.
//!
//! What to do is decided by the real [`decide`]; the record changes by the real rules. A session counts for the disk here only
//! once a read of the record, sent since it began, has named this owner.

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

/// With the bug, the disk is let go so much later.
const WAITS: Duration = Duration::from_secs(3);

/// A disk that another node owns, and whose record can be read, is let go within this time (P9).
const LET_GO_BOUND: Duration = Duration::from_secs(2);

/// A node's session, as the node itself may count on it: by its own clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Session {
    /// Tells sessions apart; 0 is none.
    pub number: u64,
    pub until: Nanos,
}

/// What a node asks of the registry.
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
    /// A new epoch of its own, for who does not know what came of the last change.
    EndDoubt {
        serial: u64,
    },
    ForgetFormer(Vec<FormerOwner>),
    Released,
}

/// What it answers.
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

/// What the control plane tells the shard.
#[derive(Clone)]
pub enum Told {
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

    /// The time of the node's clock, without standing still at it: this is another thread.
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

    /// A question on its way to the registry, if there is one.
    pub fn ask(&mut self, from: Process, ask: Ask) {
        if self.reaches_registry(from.node) {
            let delay = self.registry_delay();
            return self.at(self.world.now() + delay, Task::AtRegistry { from, ask });
        }
        self.unasked(from, &ask);
    }

    /// A question is over, for who counts what may still be committed.
    fn unasked(&mut self, from: Process, ask: &Ask) {
        match ask {
            Ask::Change { epoch, replicas, .. } => {
                let same = |pending: &(u64, Vec<Process>)| pending.0 == *epoch && pending.1 == *replicas;
                let place = self.pending.iter().position(same);
                place.map(|place| self.pending.swap_remove(place));
            }
            Ask::TakeOver(_) => {
                let place = self.taking_over.iter().position(|process| *process == from);
                place.map(|place| self.taking_over.swap_remove(place));
            }
            _ => {}
        }
    }

    pub fn answer(&mut self, to: Process, answer: Answer) {
        let delay = self.registry_delay();
        self.at(self.world.now() + delay, Task::Answered { to, answer });
    }

    /// One way to the registry, or back.
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
            // Who asked for a change is told that nothing is known of it.
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
                if committed.is_some() && self.strikes(Fault::LeaseLoss, 12) {
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

    /// Some nodes hear of it at once; the others will find it when they look.
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

    /// Committed only while the owner's session is over and the caller's is not.
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
                let told = match committed {
                    Some(configuration) => {
                        if let Some(disk) =
                            self.nodes[to.node].disk.as_mut().filter(|disk| disk.serial == serial)
                        {
                            disk.told_epoch = disk.told_epoch.max(configuration.epoch);
                        }
                        Told::Configured(configuration)
                    }
                    None => Told::NotConfigured,
                };
                self.tell(to, serial, told);
            }
            Answer::HandedOver { serial, record } => {
                self.handed_over(to, serial, record.map(|record| *record));
            }
            Answer::DoubtEnded { serial } => self.stay(to, serial),
        }
    }

    /// The shard is told until when it may serve.
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
            // Whatever is being opened here is another's by now.
            self.nodes[to.node].opening = 0;
        }
        self.mind_leaving(to);
        self.forget_copy(to, disk);
        if record.owner.is_none() {
            return self.ask(to, Ask::Claim);
        }
        let decision = self.decide(to, disk, live);
        self.mind_overstaying(to, matches!(decision, Decision::LetGo { .. }));
        match decision {
            Decision::Nothing => self.settle_former(to, disk),
            Decision::Unavailable(_) => {}
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
                // The medium, or the kernel of a dead owner in it, may take long over it.
                let slow = self.world.now() < CALM && self.rng.u8(..4) == 0;
                let delay = Duration::from_micros(self.rng.u64(200..=if slow { 3_000_000 } else { 2_000 }));
                // What is being opened may be taken meanwhile.
                if slow && self.strikes(Fault::LeaseLoss, 2) {
                    self.nodes[to.node].reaches = false;
                    self.after(700_000, 2_000_000, Task::Reach { node: to.node });
                }
                let disk = Box::new(disk.clone());
                self.at(self.world.now() + delay, Task::Open { process: to, number, record, disk, session });
            }
            Decision::Configure => self.configure(to),
            Decision::LetGo { .. } => {
                let since = self.nodes[to.node].overstays.unwrap_or(self.world.now());
                if !self.planted.has(Bug::LetGoWaits) || self.world.now() - since > WAITS {
                    self.let_go(to);
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
            local: match &self.nodes[process.node].disk {
                Some(disk) => Local::Open { epoch: disk.told_epoch },
                None => Local::Closed,
            },
            has_copy: self.has_copy(process),
            owner_stopped: owner.is_some_and(|owner| self.has_stopped(owner)),
            owner_gone_since,
            now,
            fence_grace: FENCE_GRACE,
        };
        decide(Some(disk), &situation)
    }

    /// Whether the registry knows that a process has ended: the embedded one sees it, etcd does not.
    fn has_stopped(&self, process: Process) -> bool {
        self.sees_ends && !self.is_alive(process)
    }

    fn configure(&mut self, process: Process) {
        let record = self.nodes[process.node].view.clone();
        let Some(disk) = &mut self.nodes[process.node].disk else { return };
        let (serial, policy) = (disk.serial, disk.told_policy);
        (disk.told_epoch, disk.told_policy) = (record.epoch, record.wanted);
        self.tell(process, serial, Told::Configured(record.configuration()));
        if policy != record.wanted {
            self.tell(process, serial, Told::Policy(record.wanted));
        }
    }

    /// Once nothing of a disk that was let go is under way any more, the registry is told.
    pub fn mind_leaving(&mut self, process: Process) {
        self.take_left(process);
        let node = &self.nodes[process.node];
        let quiet = node.leaving.is_empty() || self.planted.has(Bug::HandOverBesideDestage);
        let former = node.view.former.contains(&process) && node.disk.is_none() && quiet;
        if former {
            self.ask(process, Ask::Released);
        }
    }

    fn mind_overstaying(&mut self, process: Process, overstays: bool) {
        let now = self.world.now();
        let since = &mut self.nodes[process.node].overstays;
        *since = overstays.then(|| since.unwrap_or(now));
        if since.is_some_and(|since| now - since > LET_GO_BOUND) {
            self.fail(|| {
                format!(
                    "P9: n{} has known for {LET_GO_BOUND:?} that the disk is another's and has not let go",
                    process.node
                )
            });
        }
    }

    /// A copy that no record asks for any more.
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

    /// Once the I/O of all former owners has ended, the shard is told and they are struck off.
    fn settle_former(&mut self, process: Process, disk: &DiskRecord) {
        if disk.former.is_empty() {
            return self.nodes[process.node].former_since.clear();
        }
        if !self.former_has_ended(process, disk) {
            return;
        }
        let Some(open) = &mut self.nodes[process.node].disk else { return };
        let (serial, told) = (open.serial, std::mem::replace(&mut open.told_former, true));
        if !told {
            self.tell(process, serial, Told::FormerStopped);
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
                // Nodes that see each other's ends share a machine, and its kernel.
                if self.world.is_busy_for_ended(self.medium) { Evidence::UnderWay } else { Evidence::Ended }
            } else {
                Evidence::None
            };
            let place = since.iter().position(|seen| seen.0 == former.node).unwrap_or_else(|| {
                since.push((former.node.clone(), evidence, now));
                since.len() - 1
            });
            if since[place].1 != evidence {
                since[place] = (former.node.clone(), evidence, now);
            }
            let seen = since[place].2;
            ended &= former_certainty(evidence, seen, Some(seen), FENCE_GRACE, now).0 == Former::Stopped;
        }
        self.nodes[process.node].former_since = since;
        ended
    }

    /// The way to the shard is a queue: what is told arrives in order.
    pub fn tell(&mut self, process: Process, serial: u64, told: Told) {
        let delay = Duration::from_micros(self.rng.u64(20..=300));
        let twice = self.strikes(Fault::DuplicateNotice, 16).then(|| told.clone());
        for told in std::iter::once(told).chain(twice) {
            let now = self.world.now();
            let node = &mut self.nodes[process.node];
            let at = (now + delay).max(node.told_until + Duration::from_nanos(1));
            node.told_until = at;
            self.at(at, Task::Told { process, serial, told });
        }
    }

    pub fn told(&mut self, process: Process, serial: u64, told: Told) {
        let node = &mut self.nodes[process.node];
        let Some(disk) = node.disk.as_mut().filter(|disk| disk.serial == serial) else { return };
        match told {
            Told::Configured(configuration) => disk.accel.configured(configuration),
            Told::NotConfigured => disk.accel.not_configured(),
            Told::Policy(wanted) => disk.accel.request_policy(wanted),
            Told::Successor(node) => disk.accel.prepare_successor(node),
            Told::FormerStopped => disk.accel.former(Former::Stopped),
            Told::NoPeer => disk.accel.peer_unavailable(String::new()),
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
            // Where the place matters, the real choice is made.
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
        let fails = !peer.as_ref().is_none_or(reaches) || self.strikes(Fault::ConnectFailure, 10);
        let delay = if fails { PEER_DEADLINE } else { self.mostly(1_000, 200_000) };
        let peer = peer.filter(|_| !fails);
        self.at(now + delay, Task::Connected { process, serial, node: node.unwrap_or_default(), peer });
    }

    /// The control plane has a connection, or none.
    pub fn connected(&mut self, process: Process, serial: u64, node: String, peer: Option<Process>) {
        if self.nodes[process.node].disk.as_ref().is_none_or(|disk| disk.serial != serial) {
            return;
        }
        let Some(peer) = peer.filter(|peer| self.is_alive(*peer)) else {
            self.note(|| format!("n{} finds no peer {node}", process.node));
            return self.tell(process, serial, Told::NoPeer);
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
            return self.tell(process, serial, Told::NotConfigured);
        };
        let lost = self.strikes(Fault::LostAnswer, 6);
        let reaches = self.reaches_registry(process.node);
        if reaches || lost {
            if write_back {
                self.pending.push((epoch, replicas.clone()));
            }
            // What is not answered is committed soon, late, or never: the registry may be away by then.
            let delay =
                if lost { Duration::from_micros(self.rng.u64(..800_000)) } else { self.mostly(600, 300_000) };
            let ask = Ask::Change { serial, epoch, replicas, write_back, answered: !lost };
            self.at(self.world.now() + delay, Task::AtRegistry { from: process, ask });
        }
        if lost || !reaches {
            self.tell(process, serial, Told::NotConfigured);
        }
    }
}
