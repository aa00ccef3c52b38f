//! Files: their current content, their durable content, and the content after a power cut or a process's end.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use super::damage::{Damage, TrackedWrites};
use super::storage::Storage;
use super::{Death, Happening, PAGE, ProcessId, Ready, SECTOR, State, World};
use crate::operation::{FileKind, FileOperation, SharedFile};
use crate::random::Random;

/// A file of the world. It outlives the processes that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub(super) usize);

/// A medium's treatment of operations that start from now on.
#[derive(Clone, Copy, Debug)]
pub struct MediumFaults {
    /// An operation takes between `least` and `most`.
    pub least: Duration,
    /// See `least`.
    pub most: Duration,
    /// Once in so many operations (never when 0) it takes up to `longest`.
    pub late: u32,
    /// See `late`. Also the longest delay of a killed process's submitted operations.
    pub longest: Duration,
    /// Once in so many operations (never when 0) one fails; it may have taken effect.
    pub fails: u32,
    /// Writes find no space.
    pub full: bool,
    /// No operation completes while this is set.
    pub hangs: bool,
    /// Once in so many reads and writes (never when 0) the transfer is short.
    pub partial: u32,
    /// Direct I/O: refuses operations that are not multiples of a sector.
    pub direct: bool,
}

impl Default for MediumFaults {
    fn default() -> MediumFaults {
        MediumFaults {
            least: Duration::from_micros(20),
            most: Duration::from_micros(300),
            late: 0,
            longest: Duration::from_millis(1),
            fails: 0,
            full: false,
            hangs: false,
            partial: 0,
            direct: false,
        }
    }
}

/// Bytes by page; unwritten pages are zeroes.
#[derive(Clone, Debug, Default)]
pub(super) struct Content(BTreeMap<u64, Box<[u8; PAGE]>>);

impl Content {
    pub(super) fn read(&self, mut offset: u64, mut target: &mut [u8]) {
        while !target.is_empty() {
            let start = (offset % PAGE as u64) as usize;
            let length = (PAGE - start).min(target.len());
            let (part, rest) = target.split_at_mut(length);
            match self.0.get(&(offset / PAGE as u64)) {
                Some(page) => part.copy_from_slice(&page[start..start + length]),
                None => part.fill(0),
            }
            (target, offset) = (rest, offset + length as u64);
        }
    }

    pub(super) fn write(&mut self, mut offset: u64, mut source: &[u8]) {
        while !source.is_empty() {
            let start = (offset % PAGE as u64) as usize;
            let length = (PAGE - start).min(source.len());
            let page = self.0.entry(offset / PAGE as u64).or_insert_with(|| Box::new([0; PAGE]));
            page[start..start + length].copy_from_slice(&source[..length]);
            (source, offset) = (&source[length..], offset + length as u64);
        }
    }
}

pub(super) struct File {
    length: u64,
    /// The content that reads return.
    content: Content,
    /// The content that is durable.
    durable: Content,
    /// Writes not synced yet, in order.
    unsynced: Vec<(u64, Vec<u8>)>,
    medium: MediumFaults,
    /// Operations that hang.
    hanging: Vec<usize>,
    /// Processes that survived a power cut: the next sync of each fails.
    lost_for: Vec<ProcessId>,
    /// The last durable writes, to damage one of them.
    tracked: Option<TrackedWrites>,
    /// In place of all this content.
    pub(super) storage: Option<Box<dyn Storage>>,
}

impl File {
    fn write(&mut self, offset: u64, bytes: &[u8], durable: bool) {
        self.content.write(offset, bytes);
        self.length = self.length.max(offset + bytes.len() as u64);
        if durable {
            if let Some(tracked) = &mut self.tracked {
                tracked.track(offset, bytes, |target| self.durable.read(offset, target));
            }
            self.durable.write(offset, bytes);
            self.forget_unsynced(offset, offset + bytes.len() as u64);
        } else {
            self.unsynced.push((offset, bytes.to_vec()));
        }
    }

    /// Damages the last durable write but one.
    fn damage(&mut self, random: &mut Random, damage: Damage) -> Option<Vec<u8>> {
        let (damaged, writes) = self.tracked.as_mut()?.damage(random, damage)?;
        for (offset, bytes) in writes {
            self.content.write(offset, &bytes);
            self.durable.write(offset, &bytes);
        }
        Some(damaged)
    }

    fn sync(&mut self) {
        for (offset, bytes) in self.unsynced.drain(..) {
            self.durable.write(offset, &bytes);
        }
    }

    /// A durable write replaces cached bytes in its range: the older bytes never reach the medium.
    fn forget_unsynced(&mut self, start: u64, end: u64) {
        for (offset, bytes) in std::mem::take(&mut self.unsynced) {
            let last = offset + bytes.len() as u64;
            if last <= start || end <= offset {
                self.unsynced.push((offset, bytes));
                continue;
            }
            if offset < start {
                self.unsynced.push((offset, bytes[..(start - offset) as usize].to_vec()));
            }
            if end < last {
                self.unsynced.push((end, bytes[(end - offset) as usize..].to_vec()));
            }
        }
    }
}

/// The location of an operation's bytes.
enum Memory {
    /// In the process's memory, which the process keeps until the completion.
    Lent(Vec<libc::iovec>),
    /// The process has ended; the kernel still has the bytes.
    Kept(Vec<u8>),
}

pub(super) struct Operation {
    process: ProcessId,
    slot: usize,
    pub(super) file: usize,
    pub(super) kind: FileKind,
    pub(super) offset: u64,
    memory: Memory,
    result: i32,
    landed: bool,
}

// SAFETY: one thread at a time uses a world, and `Memory::Lent` points to memory that the slot of a reactor on that thread keeps
// until the operation or the process has ended (`State::leave_files`).
unsafe impl Send for Operation {}

impl Operation {
    /// All bytes of a write.
    pub(super) fn bytes(&self) -> Vec<u8> {
        match &self.memory {
            Memory::Kept(bytes) => bytes.clone(),
            Memory::Lent(vectors) => {
                let mut bytes = Vec::new();
                for vector in vectors {
                    // SAFETY: see `Send` above: the reactor's slot keeps this memory until the completion.
                    bytes.extend_from_slice(unsafe {
                        std::slice::from_raw_parts(vector.iov_base.cast::<u8>(), vector.iov_len)
                    });
                }
                bytes
            }
        }
    }

    /// The first bytes of a read.
    pub(super) fn fill(&mut self, mut bytes: &[u8]) {
        let Memory::Lent(vectors) = &self.memory else { return };
        for vector in vectors {
            let (part, rest) = bytes.split_at(vector.iov_len.min(bytes.len()));
            // SAFETY: see `Send` above: the reactor's slot keeps this memory, and nothing else accesses it until the completion.
            let target = unsafe { std::slice::from_raw_parts_mut(vector.iov_base.cast::<u8>(), part.len()) };
            target.copy_from_slice(part);
            bytes = rest;
        }
    }

    pub(super) fn length(&self) -> usize {
        match &self.memory {
            Memory::Kept(bytes) => bytes.len(),
            Memory::Lent(vectors) => vectors.iter().map(|vector| vector.iov_len).sum(),
        }
    }

    fn is_aligned(&self) -> bool {
        let aligned = |number: u64| number.is_multiple_of(SECTOR as u64);
        let memory = match &self.memory {
            Memory::Kept(_) => true,
            Memory::Lent(vectors) => {
                vectors.iter().all(|vector| aligned(vector.iov_len as u64) && aligned(vector.iov_base as u64))
            }
        };
        memory && aligned(self.offset)
    }
}

impl World {
    /// A file of `length` zero bytes.
    #[must_use]
    pub fn file(&self, length: u64) -> FileId {
        let mut state = self.lock();
        state.files.push(File {
            length,
            content: Content::default(),
            durable: Content::default(),
            unsynced: Vec::new(),
            medium: MediumFaults::default(),
            hanging: Vec::new(),
            lost_for: Vec::new(),
            tracked: None,
            storage: None,
        });
        FileId(state.files.len() - 1)
    }

    /// From now on, the world tracks durable writes after `start`, so that [`World::damage`] can damage them; misdirected ones
    /// stay within their extent of `each` bytes, counted from `start`.
    pub fn track_writes(&self, file: FileId, start: u64, each: u64) {
        self.lock().files[file.0].tracked = Some(TrackedWrites::new(start, each));
    }

    /// Damages the last durable write but one of a tracked file. Returns its bytes; `None` when there is no such write, or the
    /// newest write overlaps it.
    #[must_use]
    pub fn damage(&self, file: FileId, damage: Damage) -> Option<Vec<u8>> {
        let State { files, random, .. } = &mut *self.lock();
        files[file.0].damage(random, damage)
    }

    /// A descriptor of a file, for a reactor of this world.
    #[must_use]
    pub fn open(&self, file: FileId) -> SharedFile {
        SharedFile::simulated(file.0 as i32)
    }

    /// The behaviour of a file's medium.
    #[must_use]
    pub fn medium(&self, file: FileId) -> MediumFaults {
        self.lock().files[file.0].medium
    }

    /// Sets the behaviour of a file's medium. When it stops hanging, its hung operations complete.
    pub fn set_medium(&self, file: FileId, medium: MediumFaults) {
        let mut state = self.lock();
        state.files[file.0].medium = medium;
        if !medium.hangs {
            let now = state.now;
            for operation in std::mem::take(&mut state.files[file.0].hanging) {
                state.at(now, Happening::Land(operation));
            }
        }
    }

    /// Reads a file's current content, without faults of the medium.
    pub fn read(&self, file: FileId, offset: u64, target: &mut [u8]) {
        self.lock().files[file.0].content.read(offset, target);
    }

    /// Reads the content that remains after a power cut that loses all unsynced writes.
    pub fn read_durable(&self, file: FileId, offset: u64, target: &mut [u8]) {
        self.lock().files[file.0].durable.read(offset, target);
    }

    /// Writes to a file at once and durably, outside any process.
    pub fn write(&self, file: FileId, offset: u64, bytes: &[u8]) {
        self.lock().files[file.0].write(offset, bytes, true);
    }

    /// The medium loses power: each write that is unsynced or in flight survives, is lost, or is torn between two sectors. In
    /// surviving processes all operations without a delivered completion fail, and so does the next sync: it reports lost writes
    /// that had completed.
    pub fn power_cut(&self, file: FileId) {
        self.lock().power_cut(file.0);
    }

    /// Whether operations on a file have yet to take effect.
    #[must_use]
    pub fn is_busy(&self, file: FileId) -> bool {
        self.lock().operations.values().any(|operation| operation.file == file.0 && !operation.landed)
    }

    /// As [`World::is_busy`], for writes alone.
    #[must_use]
    pub fn writes_to(&self, file: FileId) -> bool {
        let state = self.lock();
        let mut operations = state.operations.values();
        operations.any(|operation| {
            operation.file == file.0
                && !operation.landed
                && matches!(operation.kind, FileKind::Write { .. } | FileKind::Allocate { .. })
        })
    }

    /// Whether operations of ended processes on a file have yet to take effect.
    #[must_use]
    pub fn is_busy_for_ended(&self, file: FileId) -> bool {
        let state = self.lock();
        let mut under_way = state.operations.values().filter(|operation| !operation.landed);
        under_way.any(|operation| operation.file == file.0 && !state.processes[operation.process.0].alive)
    }
}

impl State {
    pub(super) fn start(&mut self, process: ProcessId, slot: usize, started: &FileOperation) {
        let file = started.file.as_raw_fd() as usize;
        let operation = Operation {
            process,
            slot,
            file,
            kind: started.kind,
            offset: started.offset,
            memory: Memory::Lent(started.rest().to_vec()),
            result: 0,
            landed: false,
        };
        let medium = self.files[file].medium;
        let delay = if self.random.once_in(medium.late) {
            self.random.between(medium.most, medium.longest)
        } else {
            self.random.between(medium.least, medium.most)
        };
        let at = self.time_of(process) + delay;
        self.begin(operation, at);
    }

    /// Numbers are never reused: an event queued for a removed operation finds nothing.
    fn begin(&mut self, operation: Operation, lands: u64) {
        self.started += 1;
        self.activity += 1;
        self.operations.insert(self.started, operation);
        self.at(lands, Happening::Land(self.started));
    }

    /// An operation takes effect; it completes later.
    pub(super) fn land(&mut self, number: usize) {
        let Some(mut operation) = self.operations.remove(&number) else { return };
        if operation.landed {
            // It has failed meanwhile.
            self.operations.insert(number, operation);
            return;
        }
        let medium = self.files[operation.file].medium;
        if medium.hangs {
            self.files[operation.file].hanging.push(number);
            self.operations.insert(number, operation);
            return;
        }
        operation.result = self.perform(&mut operation, medium);
        operation.landed = true;
        if self.processes[operation.process.0].alive {
            self.operations.insert(number, operation);
            self.complete_soon(number);
        }
    }

    fn complete_soon(&mut self, number: usize) {
        let completed = self.now + self.random.below(20_000);
        self.at(completed, Happening::Complete(number));
    }

    fn perform(&mut self, operation: &mut Operation, medium: MediumFaults) -> i32 {
        let fails = self.random.once_in(medium.fails);
        if medium.direct && !operation.is_aligned() {
            return -libc::EINVAL;
        }
        // A failed operation may have taken effect.
        if fails && self.random.once_in(2) {
            return -libc::EIO;
        }
        let writes = matches!(operation.kind, FileKind::Write { .. } | FileKind::Allocate { .. });
        if medium.full && writes {
            return -libc::ENOSPC;
        }
        let mut length = operation.length();
        if length > SECTOR && self.random.once_in(medium.partial) {
            length = (1 + self.random.below((length / SECTOR) as u64 - 1) as usize) * SECTOR;
        }
        if let Some(result) = self.perform_on_storage(operation, length) {
            return if fails { -libc::EIO } else { result };
        }
        let file = &mut self.files[operation.file];
        let result = match operation.kind {
            FileKind::Read => read(file, operation, length),
            FileKind::Write { durable } => {
                file.write(operation.offset, &operation.bytes()[..length], durable);
                length as i32
            }
            FileKind::Sync => match file.lost_for.iter().position(|process| *process == operation.process) {
                Some(number) => {
                    file.lost_for.swap_remove(number);
                    -libc::EIO
                }
                None => {
                    file.sync();
                    0
                }
            },
            FileKind::Allocate { mode, length } => allocate(file, operation.offset, length, mode),
        };
        if fails { -libc::EIO } else { result }
    }

    /// Delivers the completion to the process.
    pub(super) fn complete(&mut self, number: usize) {
        if let Some(Operation { process, slot, result, file, .. }) = self.operations.remove(&number) {
            self.tell(process, Ready { slot, result, file: Some(file) });
        }
    }

    /// The process ends; its operations in the kernel land late, or never.
    pub(super) fn leave_files(&mut self, process: ProcessId, death: Death) {
        let its = |operation: &Operation| operation.process == process;
        let numbers: Vec<usize> = self
            .operations
            .iter()
            .filter(|(_, operation)| its(operation))
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            let Some(mut operation) = self.operations.remove(&number) else { continue };
            let writes = matches!(operation.kind, FileKind::Write { .. }) && !operation.landed;
            if !writes || death == Death::PowerCut {
                continue;
            }
            operation.memory = Memory::Kept(operation.bytes());
            // A hung operation reaches the same medium again, and hangs again.
            let longest = self.files[operation.file].medium.longest;
            let late = self.now + self.random.between(Duration::ZERO, longest);
            self.begin(operation, late);
        }
    }

    fn power_cut(&mut self, file: usize) {
        let in_flight = self.operations.values().filter(|operation| {
            operation.file == file && !operation.landed && matches!(operation.kind, FileKind::Write { .. })
        });
        let torn: Vec<_> = in_flight.map(|operation| (operation.offset, operation.bytes())).collect();
        self.files[file].unsynced.extend(torn);
        let State { operations, processes, files, .. } = self;
        operations.retain(|_, operation| operation.file != file || processes[operation.process.0].alive);
        files[file].hanging.clear();
        let alive = processes.iter().enumerate().filter(|(_, process)| process.alive);
        files[file].lost_for = alive.map(|(number, _)| ProcessId(number)).collect();
        let mut failing = Vec::new();
        for (number, operation) in operations.iter_mut().filter(|(_, operation)| operation.file == file) {
            operation.result = -libc::EIO;
            if !std::mem::replace(&mut operation.landed, true) {
                failing.push(*number);
            }
        }
        failing.into_iter().for_each(|number| self.complete_soon(number));
        // Also undelivered completions.
        let ready = self.processes.iter_mut().flat_map(|process| &mut process.ready);
        ready.filter(|ready| ready.file == Some(file)).for_each(|ready| ready.result = -libc::EIO);
        for (offset, bytes) in std::mem::take(&mut self.files[file].unsynced) {
            let choice = self.random.below(4);
            for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                let kept = match choice {
                    0 => true,
                    1 => false,
                    _ => self.random.once_in(2),
                };
                if kept {
                    self.files[file].durable.write(offset + (number * SECTOR) as u64, sector);
                }
            }
        }
        let File { content, durable, .. } = &mut self.files[file];
        content.clone_from(durable);
    }
}

fn read(file: &File, operation: &Operation, length: usize) -> i32 {
    let Memory::Lent(vectors) = &operation.memory else { return 0 };
    let length = length.min(file.length.saturating_sub(operation.offset) as usize);
    let mut left = length;
    let mut offset = operation.offset;
    for vector in vectors {
        let part = vector.iov_len.min(left);
        // SAFETY: see `Operation`: the reactor's slot keeps this memory, and nothing else accesses it until the end.
        let target = unsafe { std::slice::from_raw_parts_mut(vector.iov_base.cast::<u8>(), part) };
        file.content.read(offset, target);
        (left, offset) = (left - part, offset + part as u64);
    }
    length as i32
}

fn allocate(file: &mut File, offset: u64, length: u64, mode: i32) -> i32 {
    let end = if mode & libc::FALLOC_FL_KEEP_SIZE != 0 {
        file.length.min(offset + length)
    } else {
        offset + length
    };
    let zeroes = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
    if zeroes && end > offset {
        file.write(offset, &vec![0; (end - offset) as usize], false);
    }
    file.length = file.length.max(end);
    0
}

/// A file for blocking calls, such as a flash device's superblock: they take no time, and their writes are durable only after
/// [`MediumFile::sync_data`].
#[derive(Clone, Debug)]
pub struct MediumFile {
    world: World,
    file: FileId,
}

impl MediumFile {
    /// Opens a file of a world.
    #[must_use]
    pub fn new(world: &World, file: FileId) -> MediumFile {
        MediumFile { world: world.clone(), file }
    }

    /// Its length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.world.lock().files[self.file.0].length
    }

    /// The file, for a reactor.
    #[must_use]
    pub fn shared(&self) -> SharedFile {
        self.world.open(self.file)
    }

    /// Reads the whole of `target`.
    ///
    /// # Errors
    /// The medium fails, or the file is shorter.
    pub fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let state = self.world.lock();
        let file = &state.files[self.file.0];
        if offset + target.len() as u64 > file.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.content.read(offset, target);
        Ok(())
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// The medium fails or is full.
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.world.lock();
        let medium = state.files[self.file.0].medium;
        if medium.full {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        if state.random.once_in(medium.fails) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        state.files[self.file.0].write(offset, bytes, false);
        Ok(())
    }

    /// Makes all writes durable.
    ///
    /// # Errors
    /// The medium fails.
    pub fn sync_data(&self) -> io::Result<()> {
        let mut state = self.world.lock();
        let medium = state.files[self.file.0].medium;
        if state.random.once_in(medium.fails) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        state.files[self.file.0].sync();
        Ok(())
    }
}
