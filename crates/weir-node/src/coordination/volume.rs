//! The task of one volume on a LUN, on one node.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use weir_block::Nanos;
use weir_cluster::records::{
    CoordinatorRecord, LunRecord, NodeRecord, NodeRef, Record as _, VolumeRecord, keys,
};
use weir_cluster::registry::{LeaseId, RegistryError, Transaction};
use weir_cluster::view::{Seen, View};
use weir_volume::lun::claim::{Event, Phase, Process, Record};
use weir_volume::lun::fence_command::FenceCommand;
use weir_volume::lun::fencing::Fencing;
use weir_volume::lun::heartbeat::VolumeId;
use weir_volume::lun::reservations::{Key, Reservations};
use weir_volume::lun::shell::{Answer, Host, Output, Shell};

use super::turn::{Situation, Turn};
use super::{identity, leftover};
use crate::config::ReservationsConfig;
use crate::control::find_lun::find;
use crate::control::owner_fences::{self, mark_of, number, process};
use crate::control::registry_copy::short;
use crate::control::{Node, lun_disks};

/// Pause between two looks for the LUN, and the rhythm of decisions.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_secs(1);
/// Longest wait until a key is taken back.
const LEAVE: Duration = Duration::from_secs(5);
/// Longest time for which an operator's move accounts for the lack of a coordinator: it unmounts, another one listens, and mounts.
const HANDOVER: Duration = Duration::from_secs(30);
/// Longest time from the end of a session until a fence for that has begun.
const LATE_FENCE: Duration = Duration::from_secs(10);
/// A node that coordinates the volume is not admitted again for an end of its session so long ago.
const LATE_ADMISSION: Duration = Duration::from_secs(60);
/// Pauses before another proposal: after a refusal, and when there was no answer.
const REFUSED: Duration = Duration::from_millis(100);
const UNANSWERED: Duration = Duration::from_secs(1);

/// The begin of a notice.
const UNREADABLE: &str = "the record of its coordinator cannot be read";

/// Runs until the volume is given back after `stop`.
pub async fn run(
    node: Arc<Node>,
    record: VolumeRecord,
    records: Arc<View<CoordinatorRecord>>,
    mut stop: watch::Receiver<bool>,
) {
    let Some(lun) = record.lun.clone() else { return };
    let mut changes = records.changes();
    let mut volumes = node.records.volumes.changes();
    follow_redirection(&node, &record);
    follow_coordinator(&node, &record, &records);
    // A node without a path has disks, too: their I/O goes to the coordinator.
    let path = {
        let mut waiting = std::pin::pin!(await_lun(&node, &record.name, &lun));
        loop {
            tokio::select! {
                path = &mut waiting => break path,
                _ = changes.changed() => follow_coordinator(&node, &record, &records),
                _ = volumes.changed() => follow_redirection(&node, &record),
                () = super::stopped(&mut stop) => return,
            }
        }
    };
    let host = host(&node, &record, &lun, path.clone());
    node.coordinators.update(&record.name, |state| {
        (state.lun, state.fencing) = (Some(path), Some(host.fencing.clone()));
        state.notice.clear();
    });
    let (answers, mut taken) = answers();
    let shell = Shell::new(host, answers);
    let (proposed, mut proposals) = mpsc::unbounded_channel();
    let mut task = Task {
        lease: node.session.lease(),
        admit_again: Vec::new(),
        node,
        volume: record,
        shell,
        turn: Turn::default(),
        proposed,
        known: Vec::new(),
        revision: 0,
        epoch: 0,
        next: None,
        was_admitted: false,
        refusals: 0,
        was_wanted: false,
        names_me: false,
        had_claim: false,
    };
    let mut refusals = task.node.coordinators.changes();
    let mut ticks = tokio::time::interval(TICK);
    // None in a row after this process stood still.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    task.see(&records);
    loop {
        tokio::select! {
            Some(answer) = taken.recv() => {
                let outputs = task.shell.take(answer);
                task.carry_out(outputs);
            }
            Some(event) = proposals.recv() => task.step(event),
            _ = changes.changed() => {
                // Requests wait while a volume changes hands.
                if task.see(&records) {
                    let stops = *stop.borrow();
                    task.decide(&records, stops);
                }
            }
            _ = refusals.changed() => task.hear_refusals(),
            _ = volumes.changed() => follow_redirection(&task.node, &task.volume),
            _ = ticks.tick() => {
                task.shell.tick();
                task.follow_session();
                if task.shell.is_stuck() {
                    task.step(Event::Stuck);
                    // Before the next decision, which may repeat that this node is to go on.
                    task.watch_claim();
                }
                let stops = *stop.borrow();
                task.decide(&records, stops);
                if stops && task.has_left(&records) {
                    return task.leave().await;
                }
            }
            // Without whoever stops it, it would be ready for ever.
            Ok(()) = stop.changed() => {}
        }
        task.report();
    }
}

fn seen(volume: &VolumeRecord, records: &View<CoordinatorRecord>) -> Seen<CoordinatorRecord> {
    records.now().seen(short(&keys::coordinator(volume.id), keys::COORDINATORS))
}

/// The disks that are open here follow another coordinator, and know of a move by an operator, for which the coordinator is about to go.
fn show_coordinator(node: &Arc<Node>, volume: &VolumeRecord, record: &CoordinatorRecord) {
    let wish = record.next.is_some().then_some(record.epoch);
    if wish.is_some() && node.coordinators.get(&volume.name).wish != wish {
        node.coordinators.update(&volume.name, |state| {
            state.wish = wish;
            state.handover.store((Nanos::now() + HANDOVER).0, Ordering::Relaxed);
        });
    }
    let (name, coordinator) = (volume.name.clone(), record.coordinator.clone());
    if node.coordinators.get(&name).coordinator != coordinator {
        node.coordinators.update(&name, |state| state.coordinator = coordinator);
        let node = Arc::clone(node);
        tokio::spawn(async move { lun_disks::lose_coordinator(&node, &name).await });
    }
}

fn follow_coordinator(node: &Arc<Node>, volume: &VolumeRecord, records: &View<CoordinatorRecord>) {
    if let Seen::Record { record, .. } = seen(volume, records) {
        show_coordinator(node, volume, &record);
    }
}

/// An operator may want all I/O to go through the coordinator.
fn follow_redirection(node: &Arc<Node>, volume: &VolumeRecord) {
    let volumes = node.records.volumes.now();
    let record = volumes.get(&volume.name).filter(|record| record.id == volume.id);
    let Some(lun) = record.and_then(|record| record.lun.as_ref()) else { return };
    let mut shared = Arc::default();
    node.coordinators.update(&volume.name, |state| shared = Arc::clone(&state.redirected));
    if shared.swap(lun.redirected, Ordering::Relaxed) != lun.redirected {
        let (node, name) = (Arc::clone(node), volume.name.clone());
        tokio::spawn(async move { lun_disks::redirect(&node, &name, shared).await });
    }
}

/// Waits until this host has the LUN.
async fn await_lun(node: &Node, volume: &str, lun: &LunRecord) -> PathBuf {
    loop {
        let (lun, devices) = (lun.clone(), node.config.lun.devices.clone());
        let name = volume.to_owned();
        let found = tokio::task::spawn_blocking(move || find(&name, &lun, &devices)).await;
        let why = match found {
            Ok(Ok(path)) => return path,
            Ok(Err(why)) => why,
            Err(error) => error.to_string(),
        };
        if node.coordinators.get(volume).notice != why {
            node.journal.tell("volume-unreachable", volume, why.clone());
            node.coordinators.update(volume, |state| state.notice = why);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// The shell's threads send to the first; a thread of ours passes it on.
fn answers() -> (std::sync::mpsc::Sender<Answer>, mpsc::UnboundedReceiver<Answer>) {
    let (answers, waiting) = std::sync::mpsc::channel();
    let (pass, taken) = mpsc::unbounded_channel();
    // Without the thread nothing is ever answered, and so nothing is mounted.
    let started = std::thread::Builder::new().name("weir-lun-answers".into()).spawn(move || {
        while let Ok(answer) = waiting.recv() {
            if pass.send(answer).is_err() {
                return;
            }
        }
    });
    if let Err(error) = started {
        tracing::error!(%error, "no thread for a volume on a LUN: this node does not coordinate it");
    }
    (answers, taken)
}

fn host(node: &Node, record: &VolumeRecord, lun: &LunRecord, path: PathBuf) -> Host {
    // A link may lead elsewhere later; a device that is mounted keeps its name. Keys and fences are for the same one.
    let path = path.canonicalize().unwrap_or(path);
    let me = node.session.node_ref();
    let mut former = node.former.clone();
    former.extend(node.records.former_of(&me).iter().map(mark_of));
    former.dedup();
    let (id, own) = (VolumeId(LunRecord::bytes(&lun.mark).unwrap_or_default()), process(&me));
    let config = &node.config.lun;
    let command = FenceCommand {
        program: config.fence_command.clone(),
        limit: config.fence_timeout.0,
        volume: record.name.clone(),
        lun: path.clone(),
        lock: node.config.state_dir.join(format!("fence-{:016x}.lock", record.id)),
    };
    let reservations = Reservations {
        is_on: config.reservations == ReservationsConfig::Auto,
        lun: path.clone(),
        key: Key::new(id, own),
        wait: config.preempt_wait.0,
    };
    Host {
        me: own,
        name: me.node.clone(),
        volume: id,
        area: lun.heartbeat,
        fencing: Fencing::new(id, own, reservations, command),
        lun: path,
        identity: lun.identity.clone(),
        former,
        devices: config.devices.clone(),
        answer_timeout: config.answer_timeout.0,
    }
}

struct Task {
    node: Arc<Node>,
    volume: VolumeRecord,
    shell: Shell,
    turn: Turn,
    /// Answers to proposals.
    proposed: mpsc::UnboundedSender<Event<u64>>,
    /// Processes of the record: their names by their numbers.
    known: Vec<NodeRef>,
    /// Of the record.
    revision: u64,
    epoch: u64,
    /// Whom an operator wants to coordinate the volume, by the record.
    next: Option<NodeRef>,
    /// The LUN let this node write, the last time that this was looked at.
    was_admitted: bool,
    /// Refusals of the LUN that were heard of.
    refusals: u64,
    /// It was to be this node's turn, the last time that this was decided.
    was_wanted: bool,
    /// The record names this process as the coordinator, and it was to go on with that when this was looked at last.
    names_me: bool,
    had_claim: bool,
    /// Of this node's session.
    lease: LeaseId,
    /// When this node is admitted again after another session has begun, the first time last.
    admit_again: Vec<Nanos>,
}

impl Task {
    fn key(&self) -> String {
        keys::coordinator(self.volume.id)
    }

    fn seen(&self, records: &View<CoordinatorRecord>) -> Seen<CoordinatorRecord> {
        seen(&self.volume, records)
    }

    fn readable(&self, records: &View<CoordinatorRecord>) -> Option<(u64, CoordinatorRecord)> {
        match self.seen(records) {
            Seen::Record { revision, record } => Some((revision, record)),
            Seen::Nothing | Seen::Unreadable { .. } => None,
        }
    }

    /// Whether the volume's record is another one than before.
    fn see(&mut self, records: &View<CoordinatorRecord>) -> bool {
        let (revision, record) = match self.seen(records) {
            Seen::Record { revision, record } => (revision, record),
            Seen::Unreadable { error, .. } => {
                self.notice(format!("{UNREADABLE}: {error}"));
                return false;
            }
            Seen::Nothing => return false,
        };
        if self.node.coordinators.get(&self.volume.name).notice.starts_with(UNREADABLE) {
            self.notice(self.shell.trouble());
        }
        let is_new = std::mem::replace(&mut self.revision, revision) != revision;
        self.known = record.mounts.iter().chain(&record.coordinator).cloned().collect();
        (self.epoch, self.next) = (record.epoch, record.next.clone());
        self.names_me = record.coordinator.as_ref() == Some(&self.node.session.node_ref());
        show_coordinator(&self.node, &self.volume, &record);
        let nodes = self.node.records.nodes.now();
        let names = self.known.iter().map(|process| process.node.clone()).chain(nodes.keys().cloned());
        self.shell.names = names.map(|name| (number(&name), name)).collect();
        let record = Record {
            epoch: record.epoch,
            coordinator: record.coordinator.as_ref().map(process),
            mounts: record.mounts.iter().map(process).collect(),
        };
        self.step(Event::Seen { revision, record });
        is_new
    }

    fn decide(&mut self, records: &View<CoordinatorRecord>, stops: bool) {
        let seen = self.readable(records);
        let revision = seen.as_ref().map_or(0, |(revision, _)| *revision);
        let live: BTreeSet<NodeRef> = self.live();
        let me = self.node.session.node_ref();
        let situation = Situation {
            volume: self.volume.id,
            record: seen.as_ref().map(|(_, record)| record),
            me: &me,
            live: &live,
            barred: &self.node.barred(),
            stops,
        };
        let wanted = self.turn.is_mine(&situation, Nanos::now());
        self.was_wanted = wanted;
        self.step(Event::Wanted { wanted, revision });
    }

    fn live(&self) -> BTreeSet<NodeRef> {
        let nodes = self.node.records.nodes.now();
        nodes.values().map(NodeRecord::node_ref).collect()
    }

    /// Nothing is mounted here, and the record does not name this process.
    fn has_left(&self, records: &View<CoordinatorRecord>) -> bool {
        let me = self.node.session.node_ref();
        let names_me = |record: &CoordinatorRecord| {
            record.mounts.contains(&me) || record.coordinator.as_ref() == Some(&me)
        };
        self.shell.phase() == Phase::Absent
            && !self.readable(records).is_some_and(|(_, record)| names_me(&record))
    }

    /// Nothing of this process uses the LUN any more. Its key stays while there is the volume: with the last key the reservation would end,
    /// and a node that is fenced could write again (I5). The next process of this node takes the key's place.
    async fn leave(&self) {
        if self.node.records.volumes.now().get(&self.volume.name).is_some_and(|one| one.id == self.volume.id)
        {
            return;
        }
        let fencing = self.shell.fencing().clone();
        let left = tokio::task::spawn_blocking(move || fencing.leave());
        // Others wait for the end of this task, and the LUN may never answer.
        let error = match tokio::time::timeout(LEAVE, left).await {
            Ok(Ok(Err(error))) => error,
            Ok(_) => return,
            Err(_) => format!("the LUN has not answered for {LEAVE:?}"),
        };
        tracing::warn!(error, volume = self.volume.name, "this node's key stays registered on the LUN");
    }

    fn step(&mut self, event: Event<u64>) {
        let outputs = self.shell.step(event);
        self.carry_out(outputs);
    }

    fn carry_out(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Propose { number, revision, to } => self.propose(number, revision, &to),
                Output::DropLeases => {
                    let (node, volume) = (Arc::clone(&self.node), self.volume.name.clone());
                    let proposed = self.proposed.clone();
                    tokio::spawn(async move {
                        lun_disks::drop_leases(&node, &volume).await;
                        let _ = proposed.send(Event::LeasesDropped);
                    });
                }
                Output::Serve { epoch, mounted } => {
                    let text = format!("{} coordinates it, in epoch {epoch}", self.node.session.node_ref());
                    self.node.journal.tell("coordinator-serves", &self.volume.name, text);
                    let trouble = self.shell.trouble();
                    self.node.coordinators.update(&self.volume.name, |state| {
                        state.mounted = Some((epoch, mounted));
                        state.notice = trouble;
                    });
                    let (node, volume) = (Arc::clone(&self.node), self.volume.name.clone());
                    tokio::spawn(leftover::remove(node, volume, epoch));
                }
                Output::StopServing => {
                    let text = format!("{} coordinates it no more", self.node.session.node_ref());
                    self.node.journal.tell("coordinator-stops", &self.volume.name, text);
                    // Nothing new begins from here on.
                    self.node.coordinators.update(&self.volume.name, |state| state.mounted = None);
                    let (node, volume) = (Arc::clone(&self.node), self.volume.name.clone());
                    // The unmount waits for it.
                    tokio::spawn(async move {
                        lun_disks::until_served(&node, &volume).await;
                        lun_disks::stop_serving(&node, &volume, None).await;
                    });
                }
                Output::Fenced(process) => {
                    let me = self.node.session.node_ref();
                    let fenced = self.named(process).map_or_else(String::new, |one| one.to_string());
                    let text = format!("{me} has fenced {fenced}: it can neither read nor write the LUN");
                    self.node.journal.tell("node-fenced", &self.volume.name, text);
                }
                Output::Notice(text) => self.notice(text),
            }
        }
    }

    fn notice(&self, text: String) {
        if self.node.coordinators.get(&self.volume.name).notice != text {
            if !text.is_empty() {
                self.node.journal.tell("volume-trouble", &self.volume.name, text.clone());
            }
            self.node.coordinators.update(&self.volume.name, |state| state.notice = text);
        }
    }

    /// When this node's session ends, another node may take over its disks and fence it. The fence may complete after this node has a new
    /// session. So this node has itself admitted twice: at once, and again when no earlier fence can still be in progress.
    fn follow_session(&mut self) {
        let (lease, now) = (self.node.session.lease(), Nanos::now());
        if std::mem::replace(&mut self.lease, lease) != lease {
            self.admit_again = vec![now + self.node.config.lun.fence_timeout.0 + LATE_FENCE, now];
        }
        self.admit_again.retain(|at| now < *at + LATE_ADMISSION);
        if self.admit_again.last().is_some_and(|at| now >= *at)
            && let Some(outputs) = self.shell.session_was_lost()
        {
            self.admit_again.pop();
            self.carry_out(outputs);
        }
    }

    /// The LUN has refused I/O of a disk that is open here.
    fn hear_refusals(&mut self) {
        let refusals = self.node.coordinators.get(&self.volume.name).refusals;
        if refusals != self.refusals {
            self.refusals = refusals;
            let outputs = self.shell.refused();
            self.carry_out(outputs);
        }
    }

    /// A claim that ends although nobody has asked for that has failed: other nodes come first from then on. This is seen at once, before the
    /// record shows that this process has left it.
    fn watch_claim(&mut self) {
        let is_wanted = self.shell.is_wanted();
        let has_ended = std::mem::replace(&mut self.had_claim, is_wanted && self.names_me) && !is_wanted;
        if has_ended && self.names_me && self.was_wanted {
            self.turn.gave_up(&self.node.session.node_ref());
        }
        if self.shell.phase() == Phase::Serving {
            self.turn.serves(&self.node.session.node_ref());
        }
    }

    fn report(&mut self) {
        self.watch_claim();
        let is_admitted = self.shell.is_admitted();
        if is_admitted && !std::mem::replace(&mut self.was_admitted, is_admitted) {
            let (node, volume) = (Arc::clone(&self.node), self.volume.name.clone());
            tokio::spawn(async move { lun_disks::admitted(&node, &volume).await });
        }
        self.was_admitted = is_admitted;
        let (phase, tier) = (self.shell.phase(), Some(self.shell.fencing().tier()));
        let state = self.node.coordinators.get(&self.volume.name);
        if (state.phase, state.tier) != (phase, tier) {
            self.node
                .coordinators
                .update(&self.volume.name, |state| (state.phase, state.tier) = (phase, tier));
        }
    }

    /// The process of a record.
    fn named(&self, process: Process<u64>) -> Option<NodeRef> {
        let me = self.node.session.node_ref();
        let is_it = |one: &&NodeRef| owner_fences::process(one) == process;
        self.known.iter().chain([&me]).find(is_it).map(|one| NodeRef::new(one.node.clone(), one.incarnation))
    }

    /// The revision of the volume's record, if it names the LUN that this task has: an operator may have given the volume another one, and
    /// its coordinator must then know.
    fn volume_revision(&self) -> Option<u64> {
        match self.node.records.volumes.now().seen(&self.volume.name) {
            Seen::Record { record, revision }
                if record.id == self.volume.id && identity(&record) == identity(&self.volume) =>
            {
                Some(revision)
            }
            _ => None,
        }
    }

    fn propose(&self, number: u64, revision: u64, to: &Record<u64>) {
        let mounts: Option<Vec<NodeRef>> = to.mounts.iter().map(|process| self.named(*process)).collect();
        let coordinator = to.coordinator.map(|process| self.named(process));
        let (Some(mounts), None | Some(Some(_))) = (mounts, &coordinator) else {
            // Nobody else is ever proposed.
            tracing::error!(volume = self.volume.name, "a proposal names an unknown process");
            let _ = self.proposed.send(Event::Refused(number));
            return;
        };
        let (volume, epoch) = (self.volume.name.clone(), to.epoch);
        let next = self.next.clone().filter(|_| epoch == self.epoch);
        let record = CoordinatorRecord { volume, epoch, coordinator: coordinator.flatten(), mounts, next };
        let key = self.key();
        let claims = record.coordinator == Some(self.node.session.node_ref());
        let put = match revision {
            0 => record.create(key),
            revision => Transaction::new().unchanged(key.clone(), revision).put(key, record.encode()),
        };
        let put = match (claims, self.volume_revision()) {
            (false, _) => put,
            (true, Some(seen)) => put.unchanged(keys::volume(&self.volume.name), seen),
            (true, None) => {
                let _ = self.proposed.send(Event::Refused(number));
                return;
            }
        };
        // Of a volume that is still there, or on the way out of one that is gone; and of a process that is one.
        let put = put.when(self.node.session.guard());
        let (node, proposed) = (Arc::clone(&self.node), self.proposed.clone());
        tokio::spawn(async move {
            let event = match node.registry.transact(put).await {
                // The view shows it.
                Ok(_) => return,
                Err(RegistryError::Conflict { .. }) => {
                    tokio::time::sleep(REFUSED).await;
                    Event::Refused(number)
                }
                Err(error) => {
                    tracing::debug!(%error, "a proposal about a volume's coordinator has no answer");
                    tokio::time::sleep(UNANSWERED).await;
                    Event::Unanswered(number)
                }
            };
            let _ = proposed.send(event);
        });
    }
}
