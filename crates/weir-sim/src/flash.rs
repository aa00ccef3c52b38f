//! A node's flash: rings of blocks that tear, rot, lose and misdirect what is written, and beside them what ought to be there.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use fastrand::Rng;
use weir_accel::flash::frame::{Frame, State};
use weir_accel::flash::recovery::ReadAt;

use crate::owner_process::version_in;
use crate::world::BLOCK;

/// The unit in which flash is written, in bytes.
pub const FLASH_BLOCK: usize = 4096;

/// A write that loses its power may leave a part of a block: so many bytes at a time.
const SECTOR: usize = 512;

type Block = Rc<[u8; FLASH_BLOCK]>;

/// The bytes of a slot. What nobody wrote takes no memory and reads as zeroes.
pub struct Ring(Vec<Option<Block>>);

impl Ring {
    fn new(blocks: usize) -> Ring {
        Ring(vec![None; blocks])
    }

    fn put(&mut self, place: usize, bytes: &[u8]) {
        let mut block = [0; FLASH_BLOCK];
        block.copy_from_slice(bytes);
        self.0[place] = Some(Rc::new(block));
    }
}

/// What becomes of a frame after it was written, or instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// A bit flips.
    Rot,
    /// Nothing was written.
    Lost,
    /// It was written elsewhere.
    Misdirected,
}

impl Ring {
    fn damage(&mut self, rng: &mut Rng, frame: &Written, damage: Damage) {
        let Written { first, blocks, before } = frame;
        if damage == Damage::Rot {
            let place = rng.usize(..blocks.len());
            let mut block = *blocks[place];
            // What lies behind the first sector means nothing.
            block[rng.usize(..SECTOR)] ^= 1 << rng.u8(..8);
            return self.put(first + place, &block);
        }
        for (place, block) in (*first..).zip(before) {
            self.0[place] = block.clone();
        }
        if damage == Damage::Misdirected {
            let elsewhere = rng.usize(..=self.0.len() - blocks.len());
            for (place, block) in (elsewhere..).zip(blocks) {
                self.0[place] = Some(Rc::clone(block));
            }
        }
    }
}

impl ReadAt for Ring {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let first = offset as usize / FLASH_BLOCK;
        for (place, part) in (first..).zip(buffer.chunks_mut(FLASH_BLOCK)) {
            match &self.0[place] {
                Some(block) => part.copy_from_slice(&block[..]),
                None => part.fill(0),
            }
        }
        Ok(())
    }
}

/// One record that is at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    pub sequence: u64,
    pub block: usize,
    pub version: u64,
}

/// What ought to come out of a recovery: kept by writing down what the frames say, as they come to rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AtRest {
    /// As of the newest frame; `None`: nothing was ever written.
    pub state: Option<State>,
    pub records: VecDeque<Stored>,
}

impl AtRest {
    /// In words, for a report.
    pub fn last(&self) -> String {
        let last = self.records.back().map_or(0, |record| record.sequence);
        format!(
            "{} records up to {last} in epoch {}",
            self.records.len(),
            self.state.map_or(0, |state| state.epoch)
        )
    }

    /// A frame is there.
    fn take(&mut self, bytes: &[u8]) {
        let (header, data) = bytes.split_at(FLASH_BLOCK);
        let frame = Frame::decode(header).expect("made by the journal");
        let data = data.chunks(FLASH_BLOCK).map(version_in);
        let records = (frame.first..).zip(&frame.records).zip(data).map(|((sequence, record), version)| {
            Stored { sequence, block: record.offset as usize / BLOCK, version }
        });
        while self.records.back().is_some_and(|last| last.sequence >= frame.first) {
            self.records.pop_back();
        }
        self.records.extend(records);
        while self.records.front().is_some_and(|first| first.sequence <= frame.state.freed) {
            self.records.pop_front();
        }
        self.state = Some(frame.state);
    }
}

/// A frame that is at rest, for faults that come over it later.
struct Written {
    first: usize,
    blocks: Vec<Block>,
    /// What was there before.
    before: Vec<Option<Block>>,
}

/// The place of one disk's log.
pub struct Slot {
    /// Of the log that is there.
    pub instance: u64,
    /// A log is there.
    pub taken: bool,
    /// It is in a process' hands.
    pub leased: bool,
    pub ring: Ring,
    pub at_rest: AtRest,
    /// What would be at rest instead if the frame that was torn last is whole after all.
    pub torn: Option<AtRest>,
    /// The newest frame at rest.
    newest: Option<Written>,
}

/// A node's flash medium.
pub struct Device {
    /// Changes when it is formatted.
    pub identity: u64,
    /// Writes fail.
    pub failed: bool,
    /// What was at rest of this instance is not all there any more; perhaps nobody needs what is missing.
    pub damaged: Option<u64>,
    pub slots: Vec<Slot>,
    instances: u64,
}

impl Device {
    pub fn new(identity: u64) -> Device {
        Device { identity, failed: false, damaged: None, slots: Vec::new(), instances: 0 }
    }

    /// A slot for a new log. What was at rest of the disk, and is in nobody's hands, is given up.
    pub fn take(&mut self, blocks: usize) -> usize {
        let same = |slot: &Slot| slot.taken && !slot.leased;
        let free = |slot: &Slot| !slot.taken && !slot.leased;
        let place = self.slots.iter().position(same).or_else(|| self.slots.iter().position(free));
        let place = place.unwrap_or(self.slots.len());
        self.instances += 1;
        let instance = self.identity << 32 | self.instances;
        if place == self.slots.len() {
            self.slots.push(Slot {
                instance,
                taken: true,
                leased: true,
                ring: Ring::new(blocks),
                at_rest: AtRest::default(),
                torn: None,
                newest: None,
            });
        }
        let slot = &mut self.slots[place];
        (slot.instance, slot.taken, slot.leased) = (instance, true, true);
        (slot.at_rest, slot.torn, slot.newest) = (AtRest::default(), None, None);
        place
    }

    /// A complete copy is at rest in this slot, in place of one that was damaged.
    pub fn heal(&mut self, slot: usize) {
        let slot = &self.slots[slot];
        let complete = slot.at_rest.state.is_some_and(|state| state.complete);
        self.damaged = self.damaged.filter(|instance| *instance == slot.instance || !complete);
    }

    /// The log in a slot is not needed any more, but a frame is under way there.
    pub fn give_up(&mut self, slot: usize) {
        self.slots[slot].taken = false;
    }

    /// The log in a slot is not needed any more.
    pub fn free(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        (slot.taken, slot.leased) = (false, false);
    }

    /// Gives up a log that is in nobody's hands.
    pub fn forget(&mut self) {
        self.slots.iter_mut().filter(|slot| !slot.leased).for_each(|slot| slot.taken = false);
    }

    /// The log that a recovery would find.
    pub fn found(&self) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.taken)
    }
}

impl Slot {
    /// Whether there is a frame that something may become of.
    pub fn has_newest(&self) -> bool {
        self.newest.is_some()
    }

    /// A frame comes to rest. Something may have become of the one before it; as long as that one was the newest, nobody could
    /// have told.
    pub fn land(&mut self, rng: &mut Rng, offset: u64, bytes: &[u8], damage: Option<Damage>) {
        let first = offset as usize / FLASH_BLOCK;
        let length = bytes.len() / FLASH_BLOCK;
        if let (Some(damage), Some(newest)) = (damage, self.newest.take()) {
            self.ring.damage(rng, &newest, damage);
        }
        let before = self.ring.0[first..first + length].to_vec();
        for (place, block) in (first..).zip(bytes.chunks(FLASH_BLOCK)) {
            self.ring.put(place, block);
        }
        let blocks = self.ring.0[first..first + length].iter().flatten().cloned().collect();
        self.newest = Some(Written { first, blocks, before });
        self.at_rest.take(bytes);
        self.torn = None;
    }

    /// A frame that was under way when the power was lost: any number of its blocks is there, and perhaps a part of the next.
    /// Returns whether it is there in part.
    pub fn tear(&mut self, rng: &mut Rng, offset: u64, bytes: &[u8]) -> bool {
        let first = offset as usize / FLASH_BLOCK;
        let length = bytes.len() / FLASH_BLOCK;
        let whole = rng.usize(..=length);
        for (place, block) in (first..).zip(bytes.chunks(FLASH_BLOCK)).take(whole) {
            self.ring.put(place, block);
        }
        let part = if rng.bool() { rng.usize(..FLASH_BLOCK / SECTOR) * SECTOR } else { 0 };
        if let Some(block) = bytes.chunks(FLASH_BLOCK).nth(whole).filter(|_| part > 0) {
            let mut torn = self.ring.0[first + whole].as_ref().map_or([0; FLASH_BLOCK], |block| **block);
            torn[..part].copy_from_slice(&block[..part]);
            self.ring.put(first + whole, &torn);
        }
        let mut torn = self.at_rest.clone();
        torn.take(bytes);
        (self.torn, self.newest) = (Some(torn), None);
        (whole > 0 || part > 0) && whole < length
    }
}
