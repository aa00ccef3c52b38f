//! The flash of the nodes: simulated media below the production device, stores and recovery.

use std::sync::Arc;
use std::time::Duration;

use weir_accel::flash::frame::Frame;
use weir_accel::flash::{FlashDevice, FlashError, FlashStore};
use weir_accel::owner::Held;
use weir_accel::replica::Replica;
use weir_accel::{AccelConfig, ReplicaHost};
use weir_block::sim::{Damage, FileId, MediumFaults, MediumFile};

use super::node::Node;
use super::retired::retire;
use super::{Cluster, Task};
use crate::atlas::Fault;
use crate::scale::{CALM, NODES, Process};

/// Slots of a device: one for the log, the others for a log being released while the next one starts.
const SLOTS: u64 = 3;

/// Bytes of a ring, by seed: small enough to wrap, and to be full sometimes.
const RINGS: [u64; 2] = [2 << 20, 8 << 20];

/// Offset of the first ring.
const FIRST_RING: u64 = 1 << 20;

const LOG: u64 = AccelConfig::SMALLEST_LOG;

/// A write without completion for this long counts as failed.
const PATIENCE: Duration = Duration::from_millis(500);

/// Longest time of a frame in flight, unless the flash fails.
const LONGEST_FRAME: Duration = Duration::from_millis(30);

/// A node's flash. It survives the process.
pub struct Flash {
    file: FileId,
    ring: u64,
    /// Changes when it is formatted.
    identity: u64,
    /// Fails or hangs all writes until the node restarts.
    failed: bool,
    /// The durable content of this instance is incomplete; possibly no record needs the missing part.
    damaged: Option<u64>,
}

impl Cluster {
    /// Another flash, or the same one formatted.
    pub fn new_flash(&mut self) -> Flash {
        let ring = RINGS[self.rng.usize(..RINGS.len())];
        let file = self.world.file(FIRST_RING + SLOTS * ring);
        self.world.track_writes(file, FIRST_RING, ring);
        let medium = MediumFaults {
            most: Duration::from_micros([100, 2_000][self.rng.usize(..2)]),
            late: self.rng.u32(10..100),
            longest: LONGEST_FRAME,
            direct: true,
            ..MediumFaults::default()
        };
        self.world.set_medium(file, medium);
        self.serial += 1;
        Flash { file, ring, identity: self.serial, failed: false, damaged: None }
    }

    /// A process starts: opens the device, and keeps its durable logs as replicas.
    pub fn open_flash(&mut self, node: &mut Node) {
        let Some(flash) = self.flash.get(node.number) else { return };
        let file = MediumFile::new(&self.world, flash.file);
        let device = FlashDevice::simulated(file, LOG, flash.ring, flash.identity, self.planted);
        let device = device.expect("the slot table is intact");
        self.registry
            .has_flash(Process { node: node.number, incarnation: node.incarnation }, device.medium());
        node.device = Some(Arc::clone(&device));
        if let Some(lease) = device.find("disk")
            && let Some(reactor) = &mut node.reactor
        {
            let recovered = FlashStore::recover(reactor.new_owner(), lease, LOG);
            self.recovered(node, recovered);
        }
    }

    fn recovered(
        &mut self,
        node: &mut Node,
        recovered: Result<
            (FlashStore, Option<(weir_accel::Log, weir_accel::flash::frame::State)>),
            FlashError,
        >,
    ) {
        let number = node.number;
        let Some(reactor) = &mut node.reactor else { return };
        self.counts.recoveries += 1;
        match recovered {
            Ok((store, Some((log, state)))) => {
                self.note(|| format!("n{number} finds records up to {} on its flash: {state:?}", log.last()));
                // An incomplete copy in place of a damaged one does not count yet.
                let flash = &mut self.flash[number];
                flash.damaged = flash.damaged.filter(|_| !state.complete);
                let owner = reactor.new_owner();
                let copy = Replica::recovered(log, state);
                let mut host = ReplicaHost::holding(owner, copy, Some(store.with_patience(PATIENCE)));
                host.plant(self.planted);
                node.host = Some((owner, host));
            }
            Ok((store, None)) => retire(&mut node.retired, reactor, Some(store)),
            Err(error) => {
                self.counts.damaged += 1;
                self.note(|| format!("n{number}: {error}"));
                if self.flash[number].damaged.is_none() {
                    self.fail(|| {
                        format!("P11: n{number} finds its flash damaged, without an injected fault: {error}")
                    });
                }
            }
        }
    }

    /// Whether the process has a complete copy.
    pub fn has_copy(&self, process: Process) -> bool {
        self.nodes[process.node].host.as_ref().is_some_and(|(_, host)| host.replica().is_complete())
    }

    /// Drops a disk's copy of an epoch below this one.
    pub fn forget_replica(&mut self, process: Process, below: u64) {
        let node = &mut self.nodes[process.node];
        let Some(reactor) = &mut node.reactor else { return };
        match node.host.take() {
            Some((_, host)) if host.replica().epoch() < below => {
                let store = host.forget(reactor);
                retire(&mut node.retired, reactor, store);
            }
            Some(host) => node.host = Some(host),
            // A copy that could not be read when the node started.
            None => {
                let lease = node.device.as_ref().and_then(|device| device.find("disk"));
                let store = lease.map(|lease| FlashStore::new(reactor.new_owner(), lease));
                retire(&mut node.retired, reactor, store.and_then(Result::ok));
            }
        }
    }

    /// A complete durable copy has replaced a damaged one.
    pub fn heal(&mut self, number: usize) {
        let Some(flash) = self.flash.get_mut(number).filter(|flash| flash.damaged.is_some()) else { return };
        let node = &self.nodes[number];
        let replica = node.host.as_ref().and_then(|(_, host)| host.store());
        let store = node.disk.as_ref().and_then(|disk| disk.accel.store()).or(replica);
        if let Some(store) = store
            && flash.damaged != Some(store.instance())
            && matches!(store.stored(), Held { complete: true, .. })
        {
            flash.damaged = None;
        }
    }

    /// Whether a process's copy exists, or will exist when its node restarts.
    pub fn keeps_copy(&self, holder: Process) -> bool {
        match self.flash.get(holder.node) {
            None => self.is_alive(holder),
            Some(Flash { identity, failed, damaged, .. }) => {
                !failed && damaged.is_none() && self.registry.flash_of(holder) == Some(*identity)
            }
        }
    }

    /// Damages the newest frame but one.
    pub fn damage_flash(&mut self, number: usize, fault: Fault) -> bool {
        let possible = self.may_lose(number);
        let Some(flash) = self.flash.get_mut(number).filter(|flash| possible && !flash.failed) else {
            return false;
        };
        let damage = match fault {
            Fault::FlashBitError => Damage::BitFlip,
            Fault::FlashLostWrite => Damage::Lost,
            _ => Damage::Misdirected,
        };
        let damaged = self.world.damage(flash.file, damage);
        if let Some(frame) = damaged.as_ref().and_then(|bytes| Frame::decode(bytes)) {
            flash.damaged = Some(frame.location.instance);
        }
        damaged.is_some()
    }

    /// The flash fails or hangs all writes until the node restarts.
    pub fn fail_flash(&mut self, number: usize) -> bool {
        let possible = self.nodes[number].alive && self.may_lose(number);
        let hangs = self.rng.bool();
        let Some(flash) = self.flash.get_mut(number).filter(|flash| possible && !flash.failed) else {
            return false;
        };
        flash.failed = true;
        let medium = self.world.medium(flash.file);
        self.world.set_medium(flash.file, MediumFaults { fails: u32::from(!hangs), hangs, ..medium });
        true
    }

    /// The process on a node ends, or its machine loses power: decides the fate of the frame in flight.
    pub fn leave_flash(&mut self, number: usize, power_is_lost: bool) {
        let Some(flash) = self.flash.get(number) else { return };
        let file = flash.file;
        // Hung operations end with the device.
        let medium = self.world.medium(file);
        self.world.set_medium(file, MediumFaults { hangs: false, ..medium });
        if power_is_lost {
            let torn = self.world.is_busy(file);
            self.world.power_cut(file);
            if torn && self.world.now() < CALM {
                self.counts.faults[Fault::TornFrame as usize] += 1;
            }
        }
    }

    /// A node restarts: failed flash works again, or is replaced. Returns whether it can be opened: the kernel keeps a device
    /// locked until the former process's I/O has ended.
    pub fn ready_flash(&mut self, number: usize) -> bool {
        let replaced = self.flash.get(number).is_some_and(|flash| flash.failed)
            && self.may_lose(number)
            && self.rng.bool();
        if replaced {
            self.renew_flash(number);
        }
        let Some(flash) = self.flash.get_mut(number) else { return true };
        flash.failed = false;
        let medium = self.world.medium(flash.file);
        self.world.set_medium(flash.file, MediumFaults { fails: 0, ..medium });
        !self.world.is_busy(flash.file)
    }

    /// Replaces a node's flash.
    pub fn renew_flash(&mut self, number: usize) {
        if number < self.flash.len() {
            self.flash[number] = self.new_flash();
            self.note(|| format!("n{number} has another flash"));
        }
    }

    /// After the last fault, replaces failed flash unless the node has the last copy. One may stay failed: the others suffice for
    /// every policy.
    pub fn replace_failed_flash(&mut self, number: usize) {
        if !self.needs_replacement(number) {
            // Hung operations complete eventually.
            if let Some(flash) = self.flash.get(number).filter(|flash| flash.failed) {
                let medium = self.world.medium(flash.file);
                self.world.set_medium(flash.file, MediumFaults { fails: 1, hangs: false, ..medium });
            }
            return;
        }
        if !self.may_lose(number) {
            return self.after(100_000, 200_000, Task::ReplaceFlash { node: number });
        }
        self.end(number, weir_block::sim::Death::Killed);
        self.renew_flash(number);
        self.after(1_000, 50_000, Task::Restart { node: number });
    }

    /// Whether to replace it after the last fault.
    pub fn needs_replacement(&self, number: usize) -> bool {
        let failed = |flash: &Flash| flash.failed;
        let first = self.flash.iter().position(failed);
        self.flash.get(number).is_some_and(failed) && !(first == Some(number) && self.leaves_failed)
    }

    /// Whether a node has a copy that no record needs, older than this epoch: a change in flight may name one of this epoch, and
    /// one that a former owner fills later stays until the next epoch.
    pub fn keeps_stray(&self, number: usize) -> bool {
        let (node, record) = (&self.nodes[number], &self.registry.record);
        let process = self.process(number);
        let counted = self.registry.has_owners_copy(process) || self.registry.is_replica(process);
        let stray = match &node.host {
            Some((_, host)) => host.replica().epoch() < record.epoch,
            // An unreadable copy.
            None => node.device.as_ref().is_some_and(|device| !device.disks().is_empty()),
        };
        stray && node.disk.is_none() && !counted && node.forgotten_below != record.epoch
    }

    /// Whether a node's flash has failed.
    pub fn has_failed_flash(&self, number: usize) -> bool {
        self.flash.get(number).is_some_and(|flash| flash.failed)
    }

    /// All machines lose power at once.
    pub fn cut_all_power(&mut self) -> bool {
        let no_process = Process { node: NODES, incarnation: 0 };
        // A node that has requested the disk may be its sole owner when the power is back.
        let keep = self.taking_over.iter().all(|process| self.keeps_copy(*process));
        if self.flash.is_empty()
            || !keep
            || !self.holders_survive(no_process, |holder| self.keeps_copy(holder))
        {
            return false;
        }
        self.note(|| "all machines lose power".into());
        for node in 0..NODES {
            if self.nodes[node].alive {
                self.end(node, weir_block::sim::Death::PowerCut);
                self.after(50_000, 1_500_000, Task::Restart { node });
            }
        }
        if self.durable_writes && self.rng.bool() {
            self.cut_backing_power();
        }
        true
    }
}

impl Node {
    /// A store for a new log, if logs are on flash.
    pub fn empty_store(&mut self, disk_id: u64) -> Result<Option<FlashStore>, FlashError> {
        let (Some(device), Some(reactor)) = (&self.device, &mut self.reactor) else { return Ok(None) };
        let lease = device.take("disk", disk_id)?;
        let store = FlashStore::new(reactor.new_owner(), lease)?.with_patience(PATIENCE);
        Ok(Some(store))
    }
}
