//! The loop of a shard: wait, take commands and events, give every disk a turn, go on.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use slab::Slab;
use tokio::sync::mpsc;
use tokio::sync::oneshot;
use weir_accel::{AccelNotice, DestageStatus, Inheritance, ReplicaHost};
use weir_block::{Event, Nanos, Reactor, ReactorConfig, Waker};
use weir_export::nbd::Workspace;

use super::disk::Disk;
use super::messages::{Arrival, Command, DiskStatus, Notice, OpenDisk};
use super::places::{Place, Places};
use super::{ShardConfig, answer};

/// Commands taken in one turn, so that a flood of them does not starve the disks.
const COMMANDS_PER_TURN: usize = 64;

struct Replica {
    disk: String,
    host: ReplicaHost,
    owner: weir_block::OwnerId,
}

/// All that lives on one shard.
pub struct ShardThread {
    config: ShardConfig,
    /// The disks and replicas go before the reactor that their sockets are watched by.
    disks: Slab<Disk>,
    replicas: Slab<Replica>,
    places: Places,
    workspace: Workspace,
    reactor: Reactor,
    commands: mpsc::Receiver<Command>,
    notices: mpsc::Sender<Notice>,
    /// Notices for which the control plane's queue had no room yet.
    unsent: Vec<Notice>,
    /// A replica has more to read.
    replicas_again: bool,
    stopping: Option<oneshot::Sender<()>>,
}

impl ShardThread {
    pub fn new(
        reactor: ReactorConfig,
        config: ShardConfig,
        commands: mpsc::Receiver<Command>,
        notices: mpsc::Sender<Notice>,
    ) -> io::Result<ShardThread> {
        Ok(ShardThread {
            config,
            disks: Slab::new(),
            replicas: Slab::new(),
            places: Places::default(),
            workspace: Workspace::new(),
            reactor: Reactor::new(reactor)?,
            commands,
            notices,
            unsent: Vec::new(),
            replicas_again: false,
            stopping: None,
        })
    }

    pub fn waker(&self) -> Arc<Waker> {
        self.reactor.waker()
    }

    /// Runs until told to stop.
    pub fn run(&mut self) {
        let mut events = Vec::new();
        loop {
            let deadline = self.deadline();
            if let Err(error) = self.reactor.wait(deadline, &mut events) {
                tracing::error!(%error, "the shard's reactor is broken; its disks stop here");
                return;
            }
            let again = self.take_commands();
            self.dispatch(&mut events);
            self.turn();
            if self.is_finished() {
                return;
            }
            if again {
                self.reactor.waker().wake();
            }
        }
    }

    fn deadline(&self) -> Nanos {
        if self.replicas_again {
            return Nanos(0);
        }
        let disks = self.disks.iter().map(|(_, disk)| disk.deadline(&self.reactor, &self.workspace));
        let soonest = disks.min().unwrap_or(Nanos::NEVER);
        if self.unsent.is_empty() {
            return soonest;
        }
        soonest.min(Nanos::now() + std::time::Duration::from_millis(10))
    }

    /// Whether more may be waiting.
    fn take_commands(&mut self) -> bool {
        for _ in 0..COMMANDS_PER_TURN {
            match self.commands.try_recv() {
                Ok(command) => self.take_command(command),
                Err(mpsc::error::TryRecvError::Empty) => return false,
                Err(mpsc::error::TryRecvError::Disconnected) => {
                    // The control plane is gone: nobody renews the lease either.
                    if self.stopping.is_none() {
                        self.stop(oneshot::channel().0);
                    }
                    return false;
                }
            }
        }
        true
    }

    fn dispatch(&mut self, events: &mut Vec<Event>) {
        for event in events.drain(..) {
            match self.places.get(event.token.owner) {
                Some(Place::Clients(slot)) => self.disks[slot].on_client_event(&event),
                Some(Place::Layers(slot)) => self.disks[slot].on_layer_event(&mut self.reactor, event),
                Some(Place::Replica(slot)) => self.replicas[slot].host.on_event(&event),
                None => {}
            }
        }
    }

    fn turn(&mut self) {
        self.replicas_again = false;
        for (_, replica) in &mut self.replicas {
            self.replicas_again |= replica.host.advance(&mut self.reactor);
        }
        let mut over = None;
        let mut wanted = Vec::new();
        for (slot, disk) in &mut self.disks {
            disk.turn(&mut self.reactor, &mut self.workspace);
            disk.take_notices(&mut wanted);
            self.unsent.extend(wanted.drain(..).map(|notice| translate(&disk.name, notice)));
            if disk.is_over() {
                over = Some(slot);
            }
        }
        // One in a turn is soon enough: the deadline of a disk that is over is now.
        if let Some(slot) = over {
            self.remove(slot);
            self.reactor.waker().wake();
        }
        self.send_notices();
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

    fn find(&mut self, name: &str) -> Option<&mut Disk> {
        self.disks.iter_mut().map(|(_, disk)| disk).find(|disk| disk.name == name)
    }

    fn remove(&mut self, slot: usize) {
        let disk = self.disks.remove(slot);
        let (clients, layers) = disk.owners();
        for owner in [clients, layers[0], layers[1]] {
            self.places.clear(owner);
        }
        disk.finish();
    }

    fn take_command(&mut self, command: Command) {
        match command {
            Command::Open(open, done) => {
                let opened = self.open(&open);
                answer(done, opened);
            }
            Command::Close { disk, done } => match self.disks.iter_mut().find(|(_, one)| one.name == disk) {
                Some((_, one)) => one.close(&mut self.workspace, done),
                None => answer(done, Ok(())),
            },
            Command::LetGo { disk, keep, done } => self.let_go(disk, keep, done),
            Command::HoldDestage { disk, done } => match self.find(&disk) {
                Some(one) => one.hold_destage(done),
                None => answer(done, ()),
            },
            Command::PeerConnected { disk, node, fd } => {
                if let Some((_, one)) = self.disks.iter_mut().find(|(_, one)| one.name == disk) {
                    one.accel().peer_connected(&mut self.reactor, node, fd);
                }
            }
            Command::Replicate { disk, owner, fd, received } => self.replicate(disk, owner, fd, &received),
            Command::ForgetReplica { disk, below_epoch } => self.forget_replica(&disk, below_epoch),
            Command::Attach { disk, client } => match self.disks.iter_mut().find(|(_, one)| one.name == disk)
            {
                Some((_, one)) if one.is_serving() => one.attach(*client, &mut self.workspace),
                // Dropping the client disconnects it; it will ask the directory again.
                _ => drop(client),
            },
            Command::Resize { disk, size, done } => {
                let resized =
                    self.find(&disk).map_or(Err("the disk is not open here".into()), |one| one.resize(size));
                answer(done, resized);
            }
            Command::Status { answer: to } => answer(to, self.status()),
            Command::Meters { disk, answer: to } => {
                let meters = self.find(&disk).map(|one| one.meters());
                answer(to, meters);
            }
            Command::Profile { disk, answer: to } => {
                let profile = self.find(&disk).map(|one| one.profile());
                answer(to, profile);
            }
            Command::RecordProfile { disk, length, answer: to } => match self.find(&disk) {
                Some(one) => one.record_profile(length, to),
                None => answer(to, Err("the disk is not open here".into())),
            },
            Command::Load { disk, layer, workload, answer: to } => match self.find(&disk) {
                Some(one) => one.start_load(layer, &workload, to),
                None => answer(to, Err("the disk is not open here".into())),
            },
            Command::Stop { done } => self.stop(done),
            command => self.tell_accel(command),
        }
    }

    /// What the control plane says to one disk's accelerator.
    fn tell_accel(&mut self, command: Command) {
        let disk = match &command {
            Command::Configured { disk, .. }
            | Command::NotConfigured { disk, .. }
            | Command::FormerStopped { disk }
            | Command::PeerUnavailable { disk, .. }
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
            Command::FormerStopped { .. } => accel.former_stopped(),
            Command::PeerUnavailable { node, .. } => accel.peer_unavailable(node),
            Command::Successor { node, .. } => accel.prepare_successor(node),
            Command::ResumeDestage { .. } => accel.resume_destage(),
            Command::SetPolicy { wanted_replicas, .. } => accel.request_policy(wanted_replicas),
            _ => {}
        }
    }

    fn open(&mut self, open: &OpenDisk) -> Result<(), String> {
        if self.find(&open.disk).is_some() {
            return Err("the disk is open already".into());
        }
        // The backing first: if it cannot be opened, the replica must stay, it may be the only copy of the log.
        let backing = Disk::open_backing(&mut self.reactor, open)?;
        let inheritance = self.inherit(open)?;
        let disk = Disk::new(&mut self.reactor, &self.config, open, backing, inheritance)?;
        let (clients, layers) = disk.owners();
        let slot = self.disks.insert(disk);
        self.places.set(clients, Place::Clients(slot));
        for owner in layers {
            self.places.set(owner, Place::Layers(slot));
        }
        Ok(())
    }

    /// The log that the disk begins with. A replica of an older time is of no use to anybody once this node is the owner.
    fn inherit(&mut self, open: &OpenDisk) -> Result<Inheritance, String> {
        let place = self.replicas.iter().find(|(_, replica)| replica.disk == open.disk).map(|(slot, _)| slot);
        if let Arrival::TakeOver { .. } = open.arrival {
            let Some(slot) = place else {
                return Err("this node holds no replica of the disk's log (was it restarted?)".into());
            };
            if !self.replicas[slot].host.replica().is_complete() {
                return Err("this node's replica of the disk's log is not complete".into());
            }
        }
        let Some(slot) = place else { return Ok(Inheritance::Nothing) };
        let replica = self.replicas.remove(slot);
        self.places.clear(replica.owner);
        let mut host = replica.host;
        host.seal(open.configuration.epoch);
        let inheritance = host.inherit(&mut self.reactor);
        Ok(match open.arrival {
            Arrival::TakeOver { .. } => inheritance,
            Arrival::Clean | Arrival::FromWriteThrough => Inheritance::Nothing,
        })
    }

    fn let_go(&mut self, disk: String, keep: bool, done: oneshot::Sender<()>) {
        let Some((_, one)) = self.disks.iter_mut().find(|(_, one)| one.name == disk) else {
            return answer(done, ());
        };
        let held = one.let_go(&mut self.reactor, &mut self.workspace, done);
        if let Some(held) = held.filter(|_| keep) {
            let id = self.reactor.new_owner();
            self.keep_replica(disk, ReplicaHost::holding(id, held), id);
        }
    }

    fn keep_replica(&mut self, disk: String, host: ReplicaHost, owner: weir_block::OwnerId) -> usize {
        let slot = self.replicas.insert(Replica { disk, host, owner });
        self.places.set(owner, Place::Replica(slot));
        slot
    }

    fn replicate(&mut self, disk: String, owner: String, fd: OwnedFd, received: &[u8]) {
        if self.find(&disk).is_some_and(|one| !one.is_let_go()) {
            // The control plane lets the disk go first, if it is another's now. Until then the caller finds nobody here.
            tracing::info!(disk, owner, "refusing to replicate a disk that is open here");
            return;
        }
        let place = self.replicas.iter().find(|(_, replica)| replica.disk == disk).map(|(slot, _)| slot);
        let slot = match place {
            Some(slot) => slot,
            None => {
                let id = self.reactor.new_owner();
                match ReplicaHost::new(id, self.config.log_bytes) {
                    Ok(host) => self.keep_replica(disk, host, id),
                    Err(error) => return tracing::error!(%error, "no memory for a replica's log"),
                }
            }
        };
        if let Err(error) = self.replicas[slot].host.attach(&mut self.reactor, owner, fd, received) {
            tracing::warn!(%error, "replication connection cannot be used");
        }
    }

    fn forget_replica(&mut self, disk: &str, below_epoch: u64) {
        let place = self.replicas.iter().find(|(_, replica)| replica.disk == disk).map(|(slot, _)| slot);
        if let Some(slot) = place
            && self.replicas[slot].host.replica().epoch() < below_epoch
        {
            let mut replica = self.replicas.remove(slot);
            self.places.clear(replica.owner);
            replica.host.close(&mut self.reactor);
        }
    }

    fn status(&self) -> Vec<DiskStatus> {
        let owned = self.disks.iter().map(|(_, disk)| disk.status());
        owned.chain(self.replicas.iter().map(|(_, replica)| replica_status(replica))).collect()
    }

    fn stop(&mut self, done: oneshot::Sender<()>) {
        self.stopping = Some(done);
        for (_, disk) in &mut self.disks {
            disk.close(&mut self.workspace, oneshot::channel().0);
        }
    }

    /// Whether a stop was asked for and has been carried out.
    fn is_finished(&mut self) -> bool {
        if self.stopping.is_none() || !self.disks.is_empty() {
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
        AccelNotice::WantPeer { node, exclude } => Notice::WantPeer { disk, node, exclude },
        AccelNotice::WantConfiguration { epoch, replicas, write_back } => {
            Notice::WantConfiguration { disk, epoch, replicas, write_back }
        }
        AccelNotice::Fenced(epoch) => Notice::Refused { disk, epoch },
        AccelNotice::Tell(kind, text) => Notice::Event { disk, kind, text },
    }
}

fn replica_status(replica: &Replica) -> DiskStatus {
    let held = replica.host.replica();
    let (log, state) = (held.log(), if held.is_complete() { "complete" } else { "filling" });
    DiskStatus {
        disk: replica.disk.clone(),
        role: "replica".into(),
        state: state.into(),
        reason: if replica.host.has_owner() { String::new() } else { "no owner is connected".into() },
        epoch: held.epoch(),
        effective: String::new(),
        appended: log.last(),
        replicated: 0,
        acknowledged: 0,
        destaged: 0,
        freed: log.freed(),
        dirty_bytes: log.range(0, log.last()).map(|(_, record)| record.weight()).sum(),
        log_used_bytes: log.used(),
        log_bytes: log.capacity(),
        destage: DestageStatus::default(),
        clients: 0,
        in_flight: 0,
    }
}
