//! The loop of a shard: wait, take commands and events, give the disks concerned a turn, go on.

mod openings;
mod replicas;
mod served;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slab::Slab;
use tokio::sync::mpsc;
use tokio::sync::oneshot;
use weir_accel::flash::FlashStore;
use weir_accel::{Accel, AccelNotice, ReplicaHost};
use weir_block::{Event, Nanos, Reactor, Waker};
use weir_export::Workspace;
use weir_volume::{Backing, CoordinatorWay};

use super::barrier::BarrierError;
use super::disk::Disk;
use super::dispatch::{Dispatch, Target};
use super::health::{Health, Pulse};
use super::messages::{Command, DiskStatus, NotClosed, Notice, WantedConfiguration};
use super::opener::Opener;
use super::{ShardConfig, answer};
use openings::{Opening, Trial};
use replicas::Replica;
use served::Served;

/// Commands taken in one turn, so that a flood of them does not starve the disks.
const COMMANDS_PER_TURN: usize = 64;

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turned {
    /// Something was done.
    Moved,
    /// There was nothing to do.
    Idle,
    /// The shard has stopped on request.
    Finished,
}

/// All that lives on one shard, to be given turns: by its thread, or by a simulation.
pub struct Turning {
    config: ShardConfig,
    /// The disks and replicas go before the reactor that their sockets are watched by.
    disks: Slab<Disk>,
    replicas: Slab<Replica>,
    /// Disks of volumes that this node coordinates.
    served: Slab<Served>,
    /// Flash stores that are not needed any more and still have a write under way.
    retired: Slab<FlashStore>,
    /// Disks whose backings are being opened.
    openings: Vec<Opening>,
    /// Backings that are only opened to see whether that is possible, and who wants to know.
    trials: Vec<Trial>,
    opener: Opener,
    /// Number of the last opening.
    last_opening: u64,
    dispatch: Dispatch,
    workspace: Workspace,
    reactor: Reactor,
    commands: mpsc::Receiver<Command>,
    notices: mpsc::Sender<Notice>,
    /// Notices for which the control plane's queue had no room yet.
    unsent: Vec<Notice>,
    /// The present disk's notices; empty between its turns, kept for its memory.
    wanted: Vec<AccelNotice>,
    pulse: Pulse,
    /// Slots of the disks that get a turn; empty between turns, kept for its memory.
    due: Vec<usize>,
    /// Events of this turn; empty between turns, kept for its memory.
    events: Vec<Event>,
    stopping: Option<oneshot::Sender<()>>,
}

impl Turning {
    /// A shard without disks. Its disks' notices go to `notices`; the turns' counters are published in `health`.
    #[must_use]
    pub fn new(
        reactor: Reactor,
        config: ShardConfig,
        commands: mpsc::Receiver<Command>,
        notices: mpsc::Sender<Notice>,
        health: Arc<Health>,
    ) -> Turning {
        let storage = Arc::clone(&config.storage);
        Turning {
            config,
            openings: Vec::new(),
            trials: Vec::new(),
            opener: Opener::new(storage, reactor.waker()),
            last_opening: 0,
            disks: Slab::new(),
            replicas: Slab::new(),
            served: Slab::new(),
            retired: Slab::new(),
            dispatch: Dispatch::default(),
            workspace: Workspace::new(),
            reactor,
            commands,
            notices,
            unsent: Vec::new(),
            wanted: Vec::new(),
            pulse: Pulse::new(health),
            due: Vec::new(),
            events: Vec::new(),
            stopping: None,
        }
    }

    /// Ends the wait for something to do, from another thread.
    #[must_use]
    pub fn waker(&self) -> Arc<Waker> {
        self.reactor.waker()
    }

    /// Runs until stopped.
    pub fn run(&mut self) {
        loop {
            match self.turn_once(self.deadline()) {
                Ok(Turned::Moved | Turned::Idle) => {}
                Ok(Turned::Finished) => return,
                Err(error) => {
                    tracing::error!(%error, "the shard's reactor is broken; its disks stop here");
                    return;
                }
            }
        }
    }

    /// One turn: waits for something to do, until `deadline` at the latest, and does it.
    ///
    /// # Errors
    /// The reactor is broken: there is no way to go on.
    pub fn turn_once(&mut self, deadline: Nanos) -> io::Result<Turned> {
        let mut events = std::mem::take(&mut self.events);
        self.reactor.wait(deadline, &mut events)?;
        self.pulse.begin(self.reactor.recent());
        let happened = !events.is_empty();
        let (commands, again) = self.take_commands();
        let opened = self.take_opened();
        self.expire_openings();
        self.dispatch(&mut events);
        self.events = events;
        let moved = self.turn();
        if self.is_finished() {
            return Ok(Turned::Finished);
        }
        if again {
            self.reactor.waker().wake();
        }
        let moved = happened || commands || opened || moved;
        self.pulse.end(self.reactor.now(), moved);
        Ok(if moved { Turned::Moved } else { Turned::Idle })
    }

    /// The time at which the next turn is due even without events; 0: at once.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let replicas = self.replicas.iter().map(|(_, replica)| replica.deadline()).min();
        if replicas == Some(Nanos(0)) {
            return Nanos(0);
        }
        let disks = self.disks.iter().map(|(_, disk)| disk.deadline(&self.reactor, &self.workspace));
        let soonest = disks.chain(replicas).min().unwrap_or(Nanos::NEVER).min(self.openings_deadline());
        let soonest = soonest.min(self.served_deadline());
        if self.unsent.is_empty() {
            return soonest;
        }
        soonest.min(self.reactor.now() + std::time::Duration::from_millis(10))
    }

    /// The accelerator of a disk that is open here for its owner, for observers.
    #[must_use]
    pub fn owned(&self, disk: &str) -> Option<&Accel<Box<dyn Backing>>> {
        let open =
            self.disks.iter().map(|(_, one)| one).find(|one| one.name == disk && !one.is_releasing())?;
        Some(open.look())
    }

    /// The copy of a disk's log that is kept here, for observers.
    #[must_use]
    pub fn copy(&self, disk: &str) -> Option<&ReplicaHost> {
        self.replicas
            .iter()
            .map(|(_, replica)| replica)
            .find(|replica| replica.is_of(disk))
            .map(|replica| &replica.host)
    }

    /// The number of other objects: disks that are being released, openings, stores that are not needed any more.
    #[must_use]
    pub fn left_over(&self) -> usize {
        let leaving = self.disks.iter().filter(|(_, disk)| disk.is_releasing()).count();
        leaving + self.openings.len() + self.retired.len()
    }

    /// Whether there were any, and whether more may be waiting.
    fn take_commands(&mut self) -> (bool, bool) {
        for taken in 0..COMMANDS_PER_TURN {
            match self.commands.try_recv() {
                Ok(command) => self.take_command(command),
                Err(mpsc::error::TryRecvError::Empty) => return (taken > 0, false),
                Err(mpsc::error::TryRecvError::Disconnected) => {
                    // The control plane is gone, so the lease is not renewed either.
                    if self.stopping.is_none() {
                        self.stop(oneshot::channel().0);
                    }
                    return (taken > 0, false);
                }
            }
        }
        (true, true)
    }

    fn dispatch(&mut self, events: &mut Vec<Event>) {
        for event in events.drain(..) {
            match self.dispatch.get(event.token.owner) {
                Some(Target::Clients(slot)) => self.disks[slot].on_client_event(&event),
                Some(Target::Layers(slot)) => self.disks[slot].on_layer_event(&mut self.reactor, event),
                Some(Target::Replica(slot)) => self.replicas[slot].on_event(&self.reactor, event),
                Some(Target::Served(slot)) => self.on_served_event(slot, event),
                Some(Target::Retired(slot)) => self.on_retired_event(slot, event),
                None => {}
            }
        }
    }

    /// Gives a turn to the disks and replicas concerned. Whether anything came of it.
    fn turn(&mut self) -> bool {
        let mut moved = self.turn_replicas();
        moved |= self.turn_served();
        let now = self.reactor.recent();
        let mut due = std::mem::take(&mut self.due);
        let is_due = |disk: &Disk| disk.is_due(now, &self.reactor, &self.workspace);
        due.extend(self.disks.iter().filter(|(_, disk)| is_due(disk)).map(|(slot, _)| slot));
        for &slot in &due {
            moved |= self.turn_disk(slot);
        }
        if !due.is_empty() {
            moved |= self.turn_waiting();
        }
        due.clear();
        self.due = due;
        self.pulse.no_disk();
        self.send_notices();
        moved
    }

    /// Disks that wait for memory of the shard get their turn after others, which may have given some back. While a client
    /// is in line for it, all disks look for clients that hold memory and do not move.
    fn turn_waiting(&mut self) -> bool {
        let all = self.workspace.somebody_waits();
        let waits = |disk: &Disk| all || disk.waits_for_memory();
        let waiting: Vec<usize> =
            self.disks.iter().filter(|(_, disk)| waits(disk)).map(|(slot, _)| slot).collect();
        waiting.into_iter().fold(false, |moved, slot| self.turn_disk(slot) | moved)
    }

    /// Whether anything came of the disk's turn. A disk that has come to its end goes.
    fn turn_disk(&mut self, slot: usize) -> bool {
        self.pulse.disk(slot);
        let disk = &mut self.disks[slot];
        disk.turn(&mut self.reactor, &mut self.workspace);
        disk.take_notices(&mut self.wanted);
        self.unsent.extend(self.wanted.drain(..).map(|notice| translate(&disk.name, notice)));
        let now = self.reactor.recent();
        if let Some(text) = disk.new_route(now) {
            self.unsent.push(Notice::Event { disk: disk.name.clone(), kind: "route", text });
        }
        if let Some((kind, text)) = disk.new_space(now) {
            self.unsent.push(Notice::Event { disk: disk.name.clone(), kind, text });
        }
        while let Some((kind, text)) = disk.news() {
            self.unsent.push(Notice::Event { disk: disk.name.clone(), kind, text });
        }
        if disk.is_newly_fenced() {
            self.unsent.push(Notice::Fenced { disk: disk.name.clone() });
        }
        if let Some((kind, text)) = disk.new_overdue() {
            self.unsent.push(Notice::Event { disk: disk.name.clone(), kind, text });
        }
        if disk.wants_coordinator(now) {
            self.unsent.push(Notice::WantCoordinator { disk: disk.name.clone() });
        }
        if disk.wants_path(now) {
            self.unsent.push(Notice::WantPath { disk: disk.name.clone() });
        }
        let moved = disk.has_moved();
        if disk.is_over() {
            self.remove(slot);
            return true;
        }
        moved
    }

    fn send_notices(&mut self) {
        let mut rest = Vec::new();
        for notice in self.unsent.drain(..) {
            if let Err(mpsc::error::TrySendError::Full(notice)) = self.notices.try_send(notice) {
                rest.push(notice);
            }
        }
        self.unsent = rest;
    }

    /// The disk of this name; it gets a turn, because something is about to happen to it.
    fn find(&mut self, name: &str) -> Option<&mut Disk> {
        let mut disks = self.disks.iter_mut().map(|(_, disk)| disk);
        let found = disks.find(|disk| disk.name == name)?;
        found.touch();
        Some(found)
    }

    /// As [`Turning::find`], for those who need the shard's other parts as well.
    fn slot_of(&mut self, name: &str) -> Option<usize> {
        let (slot, disk) = self.disks.iter_mut().find(|(_, disk)| disk.name == name)?;
        disk.touch();
        Some(slot)
    }

    fn remove(&mut self, slot: usize) {
        let mut disk = self.disks.remove(slot);
        disk.let_go(&mut self.reactor);
        self.pulse.name(slot, None);
        for owner in disk.layers().chain(disk.clients()) {
            self.dispatch.clear(owner);
        }
        let store = disk.finish();
        self.retire(store);
    }

    fn take_command(&mut self, command: Command) {
        match command {
            Command::Open(open, done) => self.open(open, done),
            Command::CanOpen { disk, backing, options, answer } => {
                self.try_open(disk, backing, *options, answer)
            }
            Command::Close { disk, unless_used, done } => self.close(&disk, unless_used, done),
            Command::ReleaseDisk { disk, keep, done } => self.release_disk(disk, keep, done),
            Command::HoldDestage { disk, done } => match self.find(&disk) {
                Some(one) => one.hold_destage(done),
                None => answer(done, ()),
            },
            Command::HoldClients { disk, done } => match self.find(&disk) {
                Some(one) => one.hold_clients(done),
                None => answer(done, ()),
            },
            Command::ResumeClients { disk } => {
                if let Some(one) = self.find(&disk) {
                    one.resume_clients();
                }
            }
            Command::PeerConnected { disk, node, stream } => {
                if let Some(slot) = self.slot_of(&disk) {
                    self.disks[slot].accel().peer_connected(&mut self.reactor, node, stream);
                }
            }
            Command::Replicate { disk, medium, known_epoch, owner, stream } => {
                self.replicate(disk, medium, known_epoch, owner, stream);
            }
            Command::Recover { disk, done } => {
                let recovered = self.recover(disk);
                answer(done, recovered);
            }
            Command::HasCopy { disk, answer: to } => {
                let has = self.has_copy(&disk);
                answer(to, has);
            }
            Command::RecordIs { disk, epoch, owner } => self.record_is(&disk, epoch, owner.as_deref()),
            Command::Look { disk, mark, answer } => {
                let storage = Arc::clone(&self.config.storage);
                // A disk that is not open here any more has no successor here: dropping the way back says so.
                if let Some(one) = self.find(&disk) {
                    storage.look(one.kind(), mark, answer);
                }
            }
            Command::ForgetReplica { disk, below_epoch } => self.forget_replica(&disk, below_epoch),
            Command::Attach { disk, client } => match self.slot_of(&disk) {
                Some(slot) if self.disks[slot].is_serving() => {
                    self.disks[slot].attach(*client, &mut self.workspace);
                }
                // Dropping the client disconnects it; it will ask the directory again.
                _ => drop(client),
            },
            Command::FollowerIs { disk, node } => {
                if let Some(slot) = self.slot_of(&disk) {
                    self.disks[slot].set_follower(node, &mut self.reactor, &mut self.workspace);
                }
            }
            Command::SetRate { disk, rate } => {
                let now = self.reactor.now();
                if let Some(one) = self.find(&disk) {
                    one.set_rate(rate, now);
                }
            }
            Command::Resize { disk, size, done } => {
                let resized =
                    self.find(&disk).map_or(Err("the disk is not open here".into()), |one| one.resize(size));
                answer(done, resized);
            }
            Command::RaiseBarrier { .. }
            | Command::ReleaseBarrier { .. }
            | Command::AwaitBarrier { .. }
            | Command::LowerBarrier { .. } => self.take_barrier_command(command),
            Command::Status { answer: to } => answer(to, self.status()),
            Command::Meters { disk, answer: to } => {
                let meters = self.find(&disk).map(|one| one.meters());
                answer(to, meters);
            }
            Command::ServedMeter { disk, answer: to } => answer(to, self.served_meter(&disk)),
            Command::Profile { disk, answer: to } => {
                let profile = self.find(&disk).map(|one| one.profile());
                answer(to, profile);
            }
            Command::RecordProfile { disk, length, answer: to } => match self.find(&disk) {
                Some(one) => one.record_profile(length, to),
                None => answer(to, Err("the disk is not open here".into())),
            },
            Command::Load { disk, layer, workload, force, answer: to } => match self.slot_of(&disk) {
                Some(slot) => {
                    self.disks[slot].start_load(&mut self.reactor, layer, &workload, force, to);
                }
                None => answer(to, Err("the disk is not open here".into())),
            },
            Command::Serve { disk, opened, epoch, owner, done } => {
                let served = self.serve(disk, opened, epoch, owner);
                answer(done, served);
            }
            Command::ChangeServed { disk, number, change, done } => {
                self.change_served(&disk, number, change, done);
            }
            Command::Lengthened { disk, size } => self.lengthened(&disk, size),
            Command::ForgetChange { disk, number } => self.forget_change(&disk, number),
            Command::StopServing { disk, done } => self.stop_serving(&disk, done),
            Command::OwnerConnected { disk, stream, epoch } => self.owner_connected(&disk, stream, epoch),
            Command::LoseCoordinator { disk } => {
                if let Some(slot) = self.slot_of(&disk) {
                    self.disks[slot].lose_coordinator(&mut self.reactor);
                }
            }
            Command::DropLeases { disk, done } => match self.slot_of(&disk) {
                Some(slot) => self.disks[slot].drop_leases(&mut self.reactor, done),
                None => answer(done, ()),
            },
            Command::Path { disk, lun } => {
                if let Some(one) = self.find(&disk) {
                    one.reach(lun);
                }
            }
            Command::Admitted { disk } => {
                if let Some(one) = self.find(&disk) {
                    one.admitted();
                }
            }
            Command::Redirect { disk, wanted } => {
                if let Some(slot) = self.slot_of(&disk) {
                    let wanted = wanted.load(Ordering::Relaxed);
                    self.disks[slot].redirect(&mut self.reactor, wanted);
                }
            }
            Command::Handovers { disk, until } => {
                if let Some(one) = self.find(&disk) {
                    one.follow_handovers(until);
                }
            }
            Command::CoordinatorConnected { disk, stream } => {
                self.connect(&disk, CoordinatorWay::Remote(stream));
            }
            Command::CoordinatorHere { disk } => self.connect_here(&disk),
            Command::Stop { done } => self.stop(done),
            command => self.tell_accel(command),
        }
    }

    fn take_barrier_command(&mut self, command: Command) {
        let now = self.reactor.now();
        let closed = || Err(BarrierError::NotOpen);
        match command {
            Command::RaiseBarrier { disk, number, holds, done } => {
                let raised =
                    self.find(&disk).map_or_else(closed, |one| one.raise_barrier(number, holds, now));
                answer(done, raised);
            }
            Command::ReleaseBarrier { disk, number, done } => {
                let was_held = self.find(&disk).is_some_and(|one| one.release_barrier(number, now));
                answer(done, was_held);
            }
            Command::AwaitBarrier { disk, number, done } => match self.find(&disk) {
                Some(one) => one.await_barrier(number, done),
                None => answer(done, closed()),
            },
            Command::LowerBarrier { disk, number, done } => {
                let was_there = self.find(&disk).is_some_and(|one| one.lower_barrier(number, now));
                answer(done, was_there);
            }
            _ => {}
        }
    }

    /// Passes a command to one disk's accelerator.
    fn tell_accel(&mut self, command: Command) {
        let disk = match &command {
            Command::Configured { disk, .. }
            | Command::NotConfigured { disk, .. }
            | Command::Former { disk, .. }
            | Command::StillOwner { disk }
            | Command::PeerUnavailable { disk, .. }
            | Command::PeerSilent { disk, .. }
            | Command::Successor { disk, .. }
            | Command::ResumeDestage { disk }
            | Command::SetPolicy { disk, .. } => disk.clone(),
            _ => return,
        };
        let Some(one) = self.find(&disk) else { return };
        let accel = one.accel();
        match command {
            Command::Configured { configuration, .. } => accel.configured(configuration),
            Command::NotConfigured { reason, .. } => {
                tracing::warn!(disk, reason, "configuration not changed");
                accel.not_configured();
            }
            Command::Former { former, .. } => accel.former(former),
            Command::StillOwner { .. } => accel.still_owner(),
            Command::PeerUnavailable { node, .. } => accel.peer_unavailable(node),
            Command::PeerSilent { node, .. } => accel.peer_silent(node),
            Command::Successor { node, .. } => accel.prepare_successor(node),
            Command::ResumeDestage { .. } => accel.resume_destage(),
            Command::SetPolicy { wanted_replicas, .. } => accel.request_policy(wanted_replicas),
            _ => {}
        }
    }

    fn close(&mut self, disk: &str, unless_used: bool, done: oneshot::Sender<Result<(), NotClosed>>) {
        let used = self.slot_of(disk).map_or(0, |slot| self.disks[slot].client_count());
        if unless_used && used > 0 {
            return answer(done, Err(NotClosed::Used(used)));
        }
        self.stop_opening(Some(disk), "the disk is closed again");
        let Some(slot) = self.slot_of(disk) else { return answer(done, Ok(())) };
        self.disks[slot].close(&mut self.reactor, &mut self.workspace, done);
    }

    /// The states of the disks here, served and replicated.
    #[must_use]
    pub fn status(&self) -> Vec<DiskStatus> {
        let owned = self.disks.iter().map(|(_, disk)| disk.status(self.reactor.now()));
        owned
            .chain(self.openings_status())
            .chain(self.replicas.iter().map(|(_, replica)| replica.status()))
            .collect()
    }

    fn stop(&mut self, done: oneshot::Sender<()>) {
        self.stopping = Some(done);
        self.stop_opening(None, "the node is stopping");
        for (_, disk) in &mut self.disks {
            disk.touch();
            disk.close(&mut self.reactor, &mut self.workspace, oneshot::channel().0);
        }
    }

    /// Whether a stop was requested and has been carried out.
    fn is_finished(&mut self) -> bool {
        if self.stopping.is_none() || !self.disks.is_empty() || !self.retired.is_empty() {
            return false;
        }
        for (_, replica) in &mut self.replicas {
            replica.host.close(&mut self.reactor);
        }
        self.send_notices();
        if let Some(done) = self.stopping.take() {
            answer(done, ());
        }
        true
    }
}

fn translate(disk: &str, notice: AccelNotice) -> Notice {
    let disk = disk.to_owned();
    match notice {
        AccelNotice::WantPeer { node, connected, exclude } => {
            Notice::WantPeer { disk, node, connected, exclude }
        }
        AccelNotice::WantConfiguration { epoch, replicas, write_back, wanted_replicas } => {
            let wanted = WantedConfiguration { epoch, replicas, write_back, wanted_replicas };
            Notice::WantConfiguration { disk, wanted }
        }
        AccelNotice::Fenced(epoch) => Notice::Refused { disk, epoch },
        AccelNotice::Tell(kind, text) => Notice::Event { disk, kind, text },
    }
}
