//! The guest, and what it may expect to read.

use crate::backing::{Operation, OperationKind};
use crate::history::History;
use crate::owner_process::Answer;
use crate::world::{BLOCKS, CALM, GUESTS_END, Process, Task, World};

#[derive(Clone, Copy, Debug)]
pub struct Request {
    session: u64,
    kind: RequestKind,
    id: u64,
    block: usize,
}

#[derive(Clone, Copy, Debug)]
enum RequestKind {
    Read,
    Write,
}

/// A read under way.
struct Reading {
    id: u64,
    /// What the block must at least hold.
    floor: u64,
    began: u64,
}

/// One client. A write's number is also the version that it puts into its block.
#[derive(Default)]
pub struct Guest {
    /// Whom it talks to, and which opening of the disk there.
    pub server: Option<(Process, u64)>,
    /// Connections so far; what was sent on an older one and not taken in yet is gone with it.
    session: u64,
    next: u64,
    /// Per block: the write under way.
    writing: [Option<u64>; BLOCKS],
    reading: Vec<Reading>,
    /// Per block, the oldest version that may be read: acknowledged, or seen.
    pub floor: [u64; BLOCKS],
    /// Block of each write.
    blocks: Vec<usize>,
    bypassed: Vec<u64>,
    /// What was asked and answered, per block.
    pub histories: [History; BLOCKS],
}

impl Guest {
    /// A write past the log has ended; its number.
    pub fn bypassed(&mut self, operation: Operation) -> Option<u64> {
        let OperationKind::Bypass { version, .. } = operation.kind else { return None };
        self.bypassed.push(version);
        Some(version)
    }

    /// Whether some write put this version into this block.
    pub fn has_written(&self, block: usize, version: u64) -> bool {
        version == 0 || self.blocks.get(version as usize) == Some(&block)
    }

    pub fn is_idle(&self) -> bool {
        self.writing.iter().all(Option::is_none) && self.reading.is_empty()
    }
}

impl World {
    pub fn guest_acts(&mut self) {
        if self.now < GUESTS_END {
            self.after(200, 12_000, Task::Guest);
        } else {
            // Only waits for what is under way, on whatever owner there is.
            self.after(50_000, 150_000, Task::Guest);
            self.look_whether_settled();
        }
        self.reconnect();
        let Some((process, serial)) = self.guest.server else { return };
        if self.now >= GUESTS_END {
            return;
        }
        let session = self.guest.session;
        for _ in 0..self.rng.usize(1..4) {
            let block = if self.rng.bool() { self.rng.usize(..2) } else { self.rng.usize(..BLOCKS) };
            let kind = if self.rng.u8(..4) == 0 { RequestKind::Read } else { RequestKind::Write };
            let id = match kind {
                RequestKind::Read => self.begin_read(block),
                RequestKind::Write => self.begin_write(block),
            };
            let Some(id) = id else { continue };
            let request = Request { session, kind, id, block };
            self.after(20, 200, Task::Request { process, serial, request });
        }
    }

    /// Goes to the owner that the registry names, once that one serves the disk and the old one is gone or was left.
    fn reconnect(&mut self) {
        let current = self.registry.record.owner.filter(|owner| self.is_alive(*owner));
        let current = current.and_then(|process| Some((process, self.owner(process)?.serial)));
        let broken = self.guest.server.is_some_and(|(process, serial)| {
            !self.is_alive(process) || self.owner(process).is_none_or(|owner| owner.serial != serial)
        });
        let hung = self.guest.server != current && self.rng.u8(..8) == 0;
        let late = self.now > CALM && !self.guest.is_idle() && self.rng.u8(..8) == 0;
        if current.is_some() && (self.guest.server.is_none() || broken || hung || late) {
            self.guest.server = current;
            self.guest.session += 1;
            self.guest.writing = [None; BLOCKS];
            self.guest.reading.clear();
        }
    }

    /// A place in the order of everything that guests do and see.
    fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    fn begin_write(&mut self, block: usize) -> Option<u64> {
        let tick = self.tick();
        let guest = &mut self.guest;
        if guest.writing[block].is_some() {
            return None;
        }
        guest.next += 1;
        guest.blocks.resize(guest.next as usize + 1, block);
        guest.blocks[guest.next as usize] = block;
        guest.writing[block] = Some(guest.next);
        guest.histories[block].write(guest.next, tick);
        Some(guest.next)
    }

    fn begin_read(&mut self, block: usize) -> Option<u64> {
        let tick = self.tick();
        let guest = &mut self.guest;
        if guest.reading.len() > 8 {
            return None;
        }
        guest.next += 1;
        guest.blocks.resize(guest.next as usize + 1, usize::MAX);
        guest.reading.push(Reading { id: guest.next, floor: guest.floor[block], began: tick });
        Some(guest.next)
    }

    pub fn request(&mut self, process: Process, serial: u64, request: Request) {
        if self.owner(process).is_none_or(|owner| owner.serial != serial || owner.owner.is_fenced()) {
            return;
        }
        let Request { session, kind, id, block } = request;
        // What an owner had received before it stood still it takes in afterwards, whoever serves the guest by then.
        let current = self.guest.server == Some((process, serial));
        match kind {
            _ if current && session != self.guest.session => {}
            // It waits at the export until there is room.
            RequestKind::Write if self.owner(process).is_some_and(|owner| owner.is_full()) => {
                self.after(500, 5_000, Task::Request { process, serial, request });
            }
            RequestKind::Read => self.read(process, serial, id, block),
            RequestKind::Write => self.write(process, serial, id, block),
        }
    }

    /// An owner gives an answer. It counts from now on, whether it reaches the guest or not.
    pub fn answered(&mut self, process: Process, epoch: u64, answer: Answer) {
        self.counts.answers += 1;
        self.touched = true;
        let current = self.guest.server.map(|server| server.0) == Some(process);
        let tick = self.tick();
        match answer {
            Answer::Write { id, sequence } => {
                self.enough_copies(process, sequence);
                self.note(|| format!("n{} acknowledges write {id} in epoch {epoch}", process.node));
                self.one_owner_in(epoch, process);
                let block = self.guest.blocks[id as usize];
                self.guest.floor[block] = self.guest.floor[block].max(id);
                self.guest.histories[block].acknowledged(id, tick);
                if current && self.guest.writing[block] == Some(id) {
                    self.guest.writing[block] = None;
                }
            }
            Answer::Read { id, block, version, durable } => {
                let Some(place) = self.guest.reading.iter().position(|read| read.id == id) else { return };
                let Reading { floor, began, .. } = self.guest.reading.swap_remove(place);
                self.note(|| format!("n{} reads version {version} of block {block}", process.node));
                if version < floor {
                    self.fail(|| {
                        format!(
                            "P7: n{} read version {version} of block {block}, {floor} was there before",
                            process.node
                        )
                    });
                }
                // What a flush has not made durable may go with the power of the storage.
                if durable {
                    self.guest.histories[block].read(version, began, tick);
                    self.guest.floor[block] = self.guest.floor[block].max(version);
                }
            }
        }
    }

    /// After a takeover nothing new is acknowledged until the set is what it was, or write-through.
    fn enough_copies(&mut self, process: Process, sequence: u64) {
        let record = &self.registry.record;
        let short = record.short && record.owner == Some(process);
        if short && self.owner(process).is_some_and(|owner| owner.is_own(sequence)) {
            self.fail(|| format!("P1: n{} acknowledges with fewer copies than are requested", process.node));
        }
    }

    fn one_owner_in(&mut self, epoch: u64, process: Process) {
        match self.answered_in.iter().find(|(known, _)| *known == epoch) {
            Some((_, other)) if *other != process => {
                self.fail(|| format!("P2: n{} and another owner both answer in epoch {epoch}", process.node));
            }
            Some(_) => {}
            None => self.answered_in.push((epoch, process)),
        }
    }
}
