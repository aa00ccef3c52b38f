//! What the shell around a log on flash does: one frame after the other, and only what is at rest counts. The order of steps is
//! that of `weir_accel::flash::FlashStore`, `Accel` and `ReplicaHost`.

use std::rc::Rc;

use weir_accel::flash::frame::State;
use weir_accel::flash::journal::Journal;
use weir_accel::flash::recovery::recover_planted;
use weir_accel::owner::Event;
use weir_accel::replica::Replica;
use weir_accel::wire::Confirm;
use weir_accel::{Layout, Log};
use weir_block::Region;
use weir_cluster::records::Medium;

use crate::atlas::Fault;
use crate::flash::{AtRest, Damage, Device, FLASH_BLOCK, Stored};
use crate::owner_process::{block_of, version_of};
use crate::world::{LOG, Message, Process, RING_SLACK, Side, Task, World};

/// A frame under way.
struct Writing {
    offset: u64,
    header: Vec<u8>,
    /// The rest of it is read from the log's arena when the device gets to it.
    pieces: Vec<(usize, usize)>,
    arena: Rc<Region>,
    /// The device has it, and the process does not know yet.
    landed: bool,
}

impl Writing {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.header.clone();
        for (position, length) in &self.pieces {
            bytes.extend_from_slice(self.arena.bytes(*position, *length));
        }
        bytes
    }
}

/// Where the log of a process is at rest.
pub struct Store {
    id: u64,
    slot: usize,
    journal: Journal,
    writing: Option<Writing>,
    failed: bool,
    /// More has come to rest, and the owner's core does not know.
    progressed: bool,
}

impl Store {
    /// Begins to write what is new, if nothing is under way. Whether it did.
    fn advance(&mut self, log: &mut Log, state: State) -> bool {
        if self.writing.is_some() {
            return false;
        }
        log.pin(None);
        if self.failed {
            return false;
        }
        let (mut header, mut pieces) = (vec![0; FLASH_BLOCK], Vec::new());
        let Some(write) = self.journal.next(log, state, &mut header, &mut pieces) else { return false };
        log.pin(write.pins);
        let arena = Rc::clone(log.region());
        self.writing = Some(Writing { offset: write.offset, header, pieces, arena, landed: false });
        true
    }

    fn event(&mut self) -> Option<Event> {
        let progressed = std::mem::take(&mut self.progressed);
        progressed.then(|| match self.failed {
            true => Event::StoreFailed("it does not take the write".into()),
            false => Event::Stored(self.journal.stored()),
        })
    }
}

impl World {
    pub fn layout(&self) -> Layout {
        if self.registry.disk().medium == Medium::Flash { Layout::Flash } else { Layout::Memory }
    }

    /// Blocks of the ring where a log is at rest: two for each record, as many again where the ring ends, and some more.
    fn ring_blocks(&self) -> usize {
        3 * self.flash_records as usize + RING_SLACK
    }

    /// A place for a new log, if this medium needs one. Whether there is one.
    pub fn take_store(&mut self, node: usize) -> bool {
        self.serial += u64::from(self.layout() == Layout::Flash);
        let (id, planted, blocks) = (self.serial, self.planted, self.ring_blocks());
        let node = &mut self.nodes[node];
        let Some(device) = &mut node.flash else { return true };
        if device.failed {
            return false;
        }
        let slot = device.take(blocks);
        let mut journal = Journal::new(device.slots[slot].instance, (blocks * FLASH_BLOCK) as u64);
        journal.plant(planted);
        node.store = Some(Store { id, slot, journal, writing: None, failed: false, progressed: false });
        true
    }

    /// Whether an owner may be heard: not where nothing comes to rest any more.
    pub fn may_attach(&self, node: usize) -> bool {
        let node = &self.nodes[node];
        let fails = node.flash.as_ref().is_some_and(|device| device.failed);
        !node.store.as_ref().map_or(fails && node.replica.is_none(), |store| store.failed)
    }

    /// The log is not needed any more: its slot is free once nothing is under way.
    pub fn retire_store(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        let (Some(store), Some(device)) = (node.store.take(), &mut node.flash) else { return };
        if store.writing.is_some() {
            device.give_up(store.slot);
            node.retired.push(store);
        } else {
            device.free(store.slot);
        }
    }

    /// The log was cut off, begun anew, or has another owner.
    pub fn rewound(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        let replica = node.replica.as_ref().map(Replica::log);
        let log = node.owner.as_ref().map(|owner| &owner.log).or(replica);
        if let (Some(store), Some(log)) = (&mut node.store, log) {
            store.journal.rewound(log);
        }
    }

    /// The owner hears what has come to rest, and what has not.
    pub fn hear_of_flash(&mut self, process: Process) {
        if let Some(event) = self.nodes[process.node].store.as_mut().and_then(Store::event) {
            self.step(process, event);
        }
    }

    /// Begins to write what is new in the owner's log.
    pub fn put_to_rest(&mut self, process: Process) {
        let node = &mut self.nodes[process.node];
        let (Some(store), Some(owner)) = (&mut node.store, &mut node.owner) else { return };
        let (epoch, lineage) = (owner.owner.configuration().epoch, owner.lineage);
        let state = State { epoch, lineage, freed: owner.log.freed(), complete: true };
        if store.advance(&mut owner.log, state) {
            self.frame_begins(process.node);
        }
    }

    /// Writes what is new in a replica, and confirms what is at rest. A Hello is answered when everything is.
    pub fn keep_at_rest(&mut self, process: Process) {
        let node = &mut self.nodes[process.node];
        let (Some(store), Some(replica), None) = (&mut node.store, &mut node.replica, &node.owner) else {
            return;
        };
        let state = replica.state(store.journal.stored().last);
        let began = store.advance(replica.log_mut(), state);
        if store.failed {
            return self.cut_all(|connection| connection.replica == process && connection.greeted);
        }
        let unstored = replica.confirms_unstored() || !replica.is_complete();
        let held = if unstored { replica.held() } else { store.journal.stored() };
        let rests = store.journal.has_caught_up(replica.log(), &state);
        if began {
            self.frame_begins(process.node);
        }
        for connection in 0..self.connections.len() {
            let link = &mut self.connections[connection];
            let greeted = link.replica == process && link.greeted && link.open;
            if greeted && link.told.map_or(rests, |told| told != held) {
                link.told = Some(held);
                self.send(connection, Side::Owner, Message::Confirm(Confirm::new(held)));
            }
        }
    }

    fn frame_begins(&mut self, node: usize) {
        self.activity += 1;
        self.counts.frames += 1;
        let delay = self.mostly(2_000, 300_000);
        let Some(store) = &self.nodes[node].store else { return };
        let store = store.id;
        self.at(self.now + delay, Task::FrameLands { node, store });
    }

    fn store(&mut self, node: usize, id: u64) -> Option<&mut Store> {
        let node = &mut self.nodes[node];
        node.store.iter_mut().chain(&mut node.retired).find(|store| store.id == id)
    }

    /// The device has the frame, or refuses it.
    pub fn frame_lands(&mut self, node: usize, id: u64) {
        let Some(Store { slot, writing: Some(writing), .. }) = self.store(node, id) else { return };
        let (slot, offset, bytes) = (*slot, writing.offset, writing.bytes());
        writing.landed = true;
        let process = self.process(node);
        let fails = self.nodes[node].flash.as_ref().is_none_or(|device| device.failed);
        let damage = self.nodes[node].ill.take().filter(|_| !fails && self.now < crate::world::CALM);
        let may_lose = self.may_lose(node);
        let Some(device) = &mut self.nodes[node].flash else { return };
        let damage = damage.filter(|_| may_lose && device.slots[slot].has_newest());
        if !fails {
            let kind = damage.map(|fault| match fault {
                Fault::FlashRot => Damage::Rot,
                Fault::FlashLostWrite => Damage::Lost,
                _ => Damage::Misdirected,
            });
            if kind.is_some() {
                device.damaged = Some(device.slots[slot].instance);
            }
            let mut rng = if kind.is_some() { self.rng.fork() } else { fastrand::Rng::with_seed(0) };
            device.slots[slot].land(&mut rng, offset, &bytes, kind);
            device.heal(slot);
        }
        if let Some(fault) = damage {
            self.count(fault);
        }
        self.touched = true;
        self.note(|| format!("n{node}: a frame at {offset} of {} bytes lands: {}", bytes.len(), !fails));
        self.after(20, 300, Task::FrameEnds { process, store: id, succeeded: !fails });
    }

    /// The process hears of it.
    pub fn frame_ends(&mut self, process: Process, id: u64, succeeded: bool) {
        let Some(store) = self.store(process.node, id) else { return };
        store.writing = None;
        if succeeded {
            store.journal.written();
        } else {
            store.failed = true;
        }
        store.progressed = true;
        let node = &mut self.nodes[process.node];
        if let Some(place) = node.retired.iter().position(|store| store.id == id) {
            let store = node.retired.remove(place);
            if let Some(device) = &mut node.flash {
                device.free(store.slot);
            }
        }
        self.turn(process);
        self.keep_at_rest(process);
    }

    /// The process ends: of a frame under way a part is there, or all of it when the node had time to wait.
    pub fn end_frames(&mut self, node: usize, waits: bool) {
        let here = &mut self.nodes[node];
        let stores: Vec<Store> = here.store.take().into_iter().chain(here.retired.drain(..)).collect();
        let mut rng = self.rng.fork();
        let mut torn = 0;
        let Some(device) = &mut here.flash else { return };
        for store in stores {
            let Some(writing) = store.writing.filter(|writing| !writing.landed && !device.failed) else {
                continue;
            };
            let slot = &mut device.slots[store.slot];
            if waits {
                slot.land(&mut rng, writing.offset, &writing.bytes(), None);
            } else {
                torn += u64::from(slot.tear(&mut rng, writing.offset, &writing.bytes()));
            }
        }
        device.slots.iter_mut().for_each(|slot| slot.leased = false);
        here.ill = None;
        for _ in 0..torn {
            self.count(Fault::TornFrame);
        }
    }

    /// The node starts: what is at rest is read, to be kept as a replica.
    pub fn recover(&mut self, node: usize) {
        self.serial += u64::from(self.layout() == Layout::Flash);
        let (id, planted) = (self.serial, self.planted);
        let Some(mut device) = self.nodes[node].flash.take() else { return };
        // Also a copy that was being filled in place of a damaged one: it is none yet.
        let mut damaged = false;
        for place in 0..device.slots.len() {
            let slot = &mut device.slots[place];
            if !slot.taken {
                continue;
            }
            let ring = (self.ring_blocks() * FLASH_BLOCK) as u64;
            let found = recover_planted(&slot.ring, slot.instance, ring, LOG + (1 << 20), planted);
            self.counts.recoveries += 1;
            match found {
                Ok(None) if device.damaged.is_none() && (slot.at_rest.state.is_some()) => {
                    self.fail(|| format!("P1: n{node} does not find what is at rest on its flash"));
                }
                Ok(None) => slot.taken = false,
                Ok(Some(recovered)) => {
                    let found = at_rest(&recovered.log, recovered.state);
                    let whole = found == slot.at_rest || Some(&found) == slot.torn.as_ref();
                    if !whole {
                        let (there, due) = (found.last(), slot.at_rest.last());
                        self.fail(|| {
                            format!(
                                "P11: n{node} takes the log on its flash for whole, {there}, where {due} was at rest"
                            )
                        });
                    }
                    damaged |= !recovered.state.complete;
                    slot.at_rest = found;
                    slot.torn = None;
                    slot.leased = true;
                    let mut replica = Replica::recovered(recovered.log, recovered.state);
                    replica.plant(planted);
                    let mut journal = recovered.journal;
                    journal.plant(planted);
                    let store =
                        Store { id, slot: place, journal, writing: None, failed: false, progressed: false };
                    let here = &mut self.nodes[node];
                    if here.replica.is_none() {
                        (here.replica, here.store) = (Some(replica), Some(store));
                    }
                }
                Err(error) => {
                    damaged = true;
                    self.counts.damaged += 1;
                    if device.damaged.is_none() {
                        self.fail(|| {
                            format!(
                                "P11: n{node} finds its flash damaged, and nothing was done to it: {error}"
                            )
                        });
                    }
                    self.note(|| format!("n{node}: {error}"));
                }
            }
        }
        device.damaged = device.damaged.filter(|_| damaged);
        self.nodes[node].flash = Some(device);
    }

    /// Whether the copy that a process has, or had, is there or will be when its node starts again.
    pub fn keeps_copy(&self, holder: Process) -> bool {
        match &self.nodes[holder.node].flash {
            None => self.is_alive(holder),
            Some(Device { identity, failed, damaged, .. }) => {
                !failed && damaged.is_none() && self.registry.flash_of(holder) == Some(*identity)
            }
        }
    }

    /// Whether a process has the copy that another one, which the registry names, had.
    pub fn stands_for(&self, named: Process, process: Process) -> bool {
        named == process || self.registry.counts(named, process)
    }
}

/// What a recovery has found.
fn at_rest(log: &Log, state: State) -> AtRest {
    let records = log.range(0, log.last()).map(|(sequence, record)| Stored {
        sequence,
        block: block_of(record),
        version: version_of(log, record),
    });
    AtRest { state: Some(state), records: records.collect() }
}
