//! Copies of other owners' logs, and the stores of logs on flash.

use tokio::sync::oneshot;
use weir_accel::flash::FlashStore;
use weir_accel::{DestageStatus, Inheritance, ReplicaHost, replica};
use weir_block::{Event, Nanos, OwnerId, Reactor, Stream};

use super::Turning;
use crate::shard::answer;
use crate::shard::dispatch::Target;
use crate::shard::messages::{Arrival, DiskStatus, LimitDelays, LogMedium, Notice, OpenDisk};

/// A copy of the log of a disk that another node owns.
pub(super) struct Replica {
    disk: String,
    pub(super) host: ReplicaHost,
    owner: OwnerId,
    /// The control plane knows that its flash has failed.
    told: bool,
    /// Something has happened to it since its last turn, or it has more to read.
    due: bool,
}

impl Replica {
    /// Whether it is the copy of this disk's log.
    pub(super) fn is_of(&self, disk: &str) -> bool {
        self.disk == disk
    }

    /// The time of its next turn; 0: at once.
    pub(super) fn deadline(&self) -> Nanos {
        if self.due { Nanos(0) } else { self.host.deadline() }
    }

    pub(super) fn on_event(&mut self, reactor: &Reactor, event: Event) {
        self.due = true;
        self.host.on_event(reactor, event);
    }

    /// The state, for people.
    pub(super) fn status(&self) -> DiskStatus {
        let held = self.host.replica();
        let (log, state) = (held.log(), if held.is_complete() { "complete" } else { DiskStatus::FILLING });
        let reason = match self.host.store_error() {
            Some(error) => format!("this node's flash has failed: {error}"),
            None if self.host.has_owner() => String::new(),
            None => "no owner is connected".into(),
        };
        DiskStatus {
            disk: self.disk.clone(),
            role: "replica".into(),
            state: state.into(),
            reason,
            epoch: held.epoch(),
            effective: String::new(),
            appended: log.last(),
            replicated: 0,
            acknowledged: 0,
            promised: 0,
            destaged: 0,
            freed: log.freed(),
            dirty_bytes: self.dirty_bytes(),
            log_used_bytes: log.used(),
            log_bytes: log.capacity(),
            destage: DestageStatus::default(),
            clients: 0,
            limit_delays: LimitDelays::default(),
            in_flight: 0,
            faults: Vec::new(),
            readers: Vec::new(),
            forwarders: Vec::new(),
            is_full: false,
            route: None,
        }
    }

    fn dirty_bytes(&self) -> u64 {
        let log = self.host.replica().log();
        log.range(0, log.last()).map(|(_, record)| record.weight()).sum()
    }
}

impl Turning {
    /// Gives a turn to the replicas concerned. Whether anything came of it.
    pub(super) fn turn_replicas(&mut self) -> bool {
        let mut moved = false;
        let now = self.reactor.recent();
        for (_, replica) in self.replicas.iter_mut().filter(|(_, replica)| replica.deadline() <= now) {
            let before = replica.host.replica().log().last();
            replica.due = replica.host.advance(&mut self.reactor);
            moved |= replica.host.replica().log().last() != before;
            if let Some(error) = replica.host.store_error().filter(|_| !replica.told) {
                let text = format!("this node's flash fails ({error}): its replica does not count any more");
                self.unsent.push(Notice::Event { disk: replica.disk.clone(), kind: "flash-failed", text });
                replica.told = true;
            }
        }
        moved
    }

    fn replica_of(&self, disk: &str) -> Option<usize> {
        self.replicas.iter().find(|(_, replica)| replica.disk == disk).map(|(slot, _)| slot)
    }

    /// Bytes in the copy of the disk's log, if one is here.
    pub(super) fn dirty_bytes_of_replica(&self, disk: &str) -> u64 {
        self.replica_of(disk).map_or(0, |slot| self.replicas[slot].dirty_bytes())
    }

    pub(super) fn has_replica(&self, disk: &str) -> bool {
        self.replica_of(disk).is_some()
    }

    fn remove_replica(&mut self, slot: usize) -> ReplicaHost {
        let Replica { host, owner, .. } = self.replicas.remove(slot);
        for owner in host.store_owner().into_iter().chain([owner]) {
            self.dispatch.clear(owner);
        }
        host
    }

    /// The log that the disk begins with, and its store. An outdated replica is useless once this node is the owner.
    pub(super) fn inherit(&mut self, open: &OpenDisk) -> Result<(Inheritance, Option<FlashStore>), String> {
        let replica = self.replica_of(&open.disk);
        let goes_on = matches!(open.arrival, Arrival::TakeOver { .. });
        if goes_on {
            let Some(slot) = replica else {
                return Err("this node holds no replica of the disk's log (was it restarted?)".into());
            };
            if !self.replicas[slot].host.replica().is_complete() {
                return Err("this node's replica of the disk's log is not complete".into());
            }
        }
        let mut old = None;
        if let Some(slot) = replica {
            let mut host = self.remove_replica(slot);
            host.seal(open.configuration.epoch);
            let (inheritance, store) = host.inherit(&mut self.reactor);
            if goes_on {
                return Ok((inheritance, store));
            }
            old = store;
        }
        let mut store = self.empty_store(&open.disk, open.medium, old)?;
        if let Some((store, error)) = store.as_mut().zip(self.flash_error()) {
            // There is nothing that only this flash could hold: the disk is served here, in write-through (P9).
            store.fail(error);
        }
        Ok((Inheritance::Nothing, store))
    }

    fn flash_error(&self) -> Option<String> {
        let flash = self.config.flash.as_ref().filter(|flash| flash.has_failed())?;
        Some(format!("this node's flash at {} has failed", flash.path().display()))
    }

    /// A slot on the flash for a new log, if that is where it is to be: that of the disk's `old` log, or of one that is being given
    /// up, so that a disk which is closed and opened again, or comes back, needs no second one.
    fn empty_store(
        &mut self,
        disk: &str,
        medium: LogMedium,
        old: Option<FlashStore>,
    ) -> Result<Option<FlashStore>, String> {
        let LogMedium::Flash { disk_id } = medium else {
            self.retire(old);
            return Ok(None);
        };
        if let Some(mut store) = old.or_else(|| self.take_retired(disk)) {
            store.begin_anew(disk_id);
            return Ok(Some(store));
        }
        let Some(flash) = &self.config.flash else {
            return Err("this node has no flash medium; set flash.path, or use another node".into());
        };
        let lease = flash.take(disk, disk_id).map_err(|error| error.to_string())?;
        let store = FlashStore::new(self.reactor.new_owner(), lease).map_err(|error| error.to_string())?;
        Ok(Some(store))
    }

    fn take_retired(&mut self, disk: &str) -> Option<FlashStore> {
        let (slot, _) = self.retired.iter().find(|(_, store)| store.disk() == disk)?;
        let store = self.retired.remove(slot);
        self.dispatch.clear(store.owner());
        Some(store)
    }

    /// A store whose log is not needed any more.
    pub(super) fn retire(&mut self, store: Option<FlashStore>) {
        if let Some(store) = store.and_then(|store| store.retire(&mut self.reactor)) {
            let owner = store.owner();
            let slot = self.retired.insert(store);
            self.dispatch.set(owner, Target::Retired(slot));
        }
    }

    pub(super) fn on_retired_event(&mut self, slot: usize, event: Event) {
        let mut store = self.retired.remove(slot);
        self.dispatch.clear(store.owner());
        store.on_event(event, self.reactor.now());
        self.retire(Some(store));
    }

    /// Reads the log of a disk that is kept here and keeps it as a replica.
    pub(super) fn recover(&mut self, disk: String) -> Result<(), String> {
        let Some(lease) = self.config.flash.as_ref().and_then(|flash| flash.find(&disk)) else {
            return Err("there is no log of this disk on this node's flash".into());
        };
        let recovered = FlashStore::recover(self.reactor.new_owner(), lease, self.config.log_bytes);
        match recovered.map_err(|error| error.to_string())? {
            (store, Some((log, state))) => {
                let copy = replica::Replica::recovered(log, state);
                self.keep_replica(disk, copy, Some(store));
            }
            (store, None) => self.retire(Some(store)),
        }
        Ok(())
    }

    /// Whether a complete copy of the disk's log is here.
    pub(super) fn has_copy(&self, disk: &str) -> bool {
        self.replica_of(disk).is_some_and(|slot| self.replicas[slot].host.replica().is_complete())
    }

    pub(super) fn release_disk(&mut self, disk: String, keep: bool, done: oneshot::Sender<()>) {
        self.stop_opening(Some(&disk), "another node owns the disk");
        let Some(slot) = self.slot_of(&disk) else { return answer(done, ()) };
        match self.disks[slot].release(&mut self.reactor, &mut self.workspace, done) {
            Some((held, store)) if keep => {
                self.keep_replica(disk, held, store);
            }
            Some((_, store)) => self.retire(store),
            None => {}
        }
    }

    fn keep_replica(&mut self, disk: String, copy: replica::Replica, store: Option<FlashStore>) -> usize {
        let owner = self.reactor.new_owner();
        self.keep(disk, ReplicaHost::holding(owner, copy, store), owner)
    }

    fn keep(&mut self, disk: String, host: ReplicaHost, owner: OwnerId) -> usize {
        #[cfg(feature = "planted-bugs")]
        let host = {
            let mut host = host;
            host.plant(self.config.planted);
            host
        };
        let store = host.store_owner();
        let slot = self.replicas.insert(Replica { disk, host, owner, told: false, due: true });
        for owner in store.into_iter().chain([owner]) {
            self.dispatch.set(owner, Target::Replica(slot));
        }
        slot
    }

    pub(super) fn replicate(
        &mut self,
        disk: String,
        medium: LogMedium,
        known_epoch: u64,
        owner: String,
        stream: Stream,
    ) {
        if self.is_opening(&disk) || self.find(&disk).is_some_and(|one| !one.is_releasing()) {
            // The control plane releases the disk first, if it is another node's now. Until then the caller finds no replica
            // here.
            tracing::info!(disk, owner, "refusing to replicate a disk that is open here");
            return;
        }
        let found = self.replica_of(&disk);
        let slot = match found.map_or_else(|| self.new_replica(&disk, medium, known_epoch), Ok) {
            Ok(slot) => slot,
            Err(error) => return tracing::error!(disk, error, "this node cannot keep a replica"),
        };
        self.replicas[slot].due = true;
        if let Err(error) = self.replicas[slot].host.attach(&mut self.reactor, owner, known_epoch, stream) {
            tracing::warn!(%error, "replication connection cannot be used");
        }
    }

    fn new_replica(&mut self, disk: &str, medium: LogMedium, known_epoch: u64) -> Result<usize, String> {
        if let (LogMedium::Flash { .. }, Some(error)) = (medium, self.flash_error()) {
            return Err(error);
        }
        let store = self.empty_store(disk, medium, None)?;
        let id = self.reactor.new_owner();
        let host = ReplicaHost::new(id, self.config.log_bytes, store, known_epoch)
            .map_err(|error| format!("no memory for a replica's log: {error}"))?;
        Ok(self.keep(disk.to_owned(), host, id))
    }

    pub(super) fn record_is(&mut self, disk: &str, epoch: u64, owner: Option<&str>) {
        if let Some(slot) = self.replica_of(disk) {
            self.replicas[slot].host.record_is(&mut self.reactor, epoch, owner);
        }
    }

    pub(super) fn forget_replica(&mut self, disk: &str, below_epoch: u64) {
        match self.replica_of(disk) {
            Some(slot) if self.replicas[slot].host.replica().epoch() < below_epoch => {
                let host = self.remove_replica(slot);
                let store = host.forget(&mut self.reactor);
                self.retire(store);
            }
            Some(_) => {}
            // A copy that could not be read when the node started.
            None => self.give_up_unread(disk),
        }
    }

    fn give_up_unread(&mut self, disk: &str) {
        let Some(lease) = self.config.flash.as_ref().and_then(|flash| flash.find(disk)) else { return };
        match FlashStore::new(self.reactor.new_owner(), lease) {
            Ok(store) => self.retire(Some(store)),
            Err(error) => tracing::warn!(disk, %error, "the release of a log on the flash is retried later"),
        }
    }
}
