//! A file or a block device as the lowest layer.

pub(crate) mod device_queue;
mod engine_sync;
pub(crate) mod engine_uring;
mod extents;
mod filesystem;
mod lookups;
mod marker;
mod opened;
mod options;
mod storage;
mod zeroing;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use slab::Slab;
use weir_block::buffer::LARGEST;
use weir_block::{
    Action, Buffer, BufferPool, Code, Completion, Destage, ErrorKind, Event, Extent, ExtentState, Group,
    IoError, Layer, LayerInfo, LayerMeter, Nanos, Outcome, OwnerId, Payload, Reactor, Region, Request,
    RequestKind, SharedFile, Tag, WriteSource,
};

use crate::error::VolumeError;
use crate::full::{SpaceWait, Wait, is_full};
use engine_sync::SyncEngine;
use engine_uring::UringEngine;
use lookups::{Lookup, Lookups};
pub use marker::{Mark, Trace};
pub use opened::{FileIdentity, OpenedFile};
use opened::{check_device, check_size};
pub use options::{BackingOptions, EngineChoice};
pub use storage::StorageKind;
use zeroing::{Method, Methods, ZeroJob};

/// The slot of the sync for a group of flushes; requests never use it.
const SYNC: u32 = u32::MAX;

/// Maximum number of requests in flight to storage whose requests each occupy a thread of the ring: hung storage must leave
/// threads for the shard's other disks (P10).
const MOST_WAITING: usize = 64;

enum Engine {
    Uring(UringEngine),
    Sync(SyncEngine),
}

/// A completed operation of either engine.
struct Finished {
    slot: u32,
    result: Result<u64, i32>,
    buffer: Option<Buffer>,
}

/// A request accepted and not yet completed.
struct Pending {
    tag: Tag,
    step: Step,
}

/// The operation that a request waits for.
enum Step {
    Read,
    Write(Write),
    Zero(ZeroJob, Wait),
    Sync,
    Extents,
}

/// A write, to be done again if there is no space, unless its failure may be an earlier one's.
#[derive(Clone, Copy)]
struct Write {
    offset: u64,
    fua: bool,
    wait: Wait,
}

/// A request that waits for space.
enum Waiting {
    Write { slot: u32, buffer: Buffer },
    Zero { slot: u32 },
}

/// A file or block device as a layer.
pub struct FileBacking {
    path: PathBuf,
    file: SharedFile,
    storage_kind: StorageKind,
    direct: bool,
    info: LayerInfo,
    owner: OwnerId,
    engine: Engine,
    depth: usize,
    pending: Slab<Pending>,
    lookups: Lookups,
    ready: Vec<Completion>,
    /// Results in processing; empty between calls, kept to reuse the memory.
    round: Vec<Finished>,
    flushes: Group<u32>,
    methods: Methods,
    /// Source of zeroes for writes.
    zeroes: Rc<Region>,
    /// The shard's buffers, for copies of borrowed payloads.
    pool: BufferPool,
    /// Reserve for writes when the shard's buffers are exhausted, perhaps by requests that wait for this layer.
    reserve: BufferPool,
    /// A sync or a durable write failed, and the page cache may have dropped dirty pages: every later flush fails (P8).
    lost: Option<i32>,
    space: SpaceWait<Waiting>,
}

impl FileBacking {
    /// Opens the file or block device at `path` for the shard of `reactor`. Blocks on the storage.
    ///
    /// # Errors
    /// As for [`OpenedFile::open`] and [`FileBacking::new`].
    pub fn open(
        reactor: &mut Reactor,
        path: &Path,
        options: &BackingOptions,
    ) -> Result<FileBacking, VolumeError> {
        FileBacking::new(reactor, OpenedFile::open(path, options)?)
    }

    /// Moves an opened file to the shard of `reactor`. Does not block.
    ///
    /// # Errors
    /// [`VolumeError::Io`]: no memory for zeroes to write from.
    pub fn new(reactor: &mut Reactor, opened: OpenedFile) -> Result<FileBacking, VolumeError> {
        let OpenedFile { path, storage, size, options } = opened;
        let zeroes = Region::new(zeroing::WRITE_PIECE as usize)
            .map_err(|error| VolumeError::from_io("mapping zeroes for", &path, error))?;
        let owner = reactor.new_owner();
        let file = if storage.begins_at_once {
            SharedFile::on_disk(storage.file, storage.waits_for_rotation)
        } else {
            SharedFile::offloaded(storage.file)
        };
        let inline = match options.engine {
            EngineChoice::Auto => storage.kind == StorageKind::Memory,
            EngineChoice::Reactor => false,
            EngineChoice::Inline => true,
        };
        let engine = if inline {
            Engine::Sync(SyncEngine::new(file.clone()))
        } else {
            Engine::Uring(UringEngine::new(file.clone(), owner))
        };
        let methods = Methods { punch: storage.punches, zero_range: storage.zeroes };
        let info = LayerInfo {
            size,
            logical_block: storage.logical_block,
            preferred_block: storage.preferred_block,
            max_transfer: LARGEST as u32,
            writable: options.writable,
            fast_zeroes: methods.punch || methods.zero_range,
            discards: methods.punch,
        };
        let most = if storage.begins_at_once || inline { usize::MAX } else { MOST_WAITING };
        Ok(FileBacking {
            path,
            lookups: Lookups::new(file.clone(), owner),
            file,
            storage_kind: storage.kind,
            direct: storage.direct,
            info,
            owner,
            engine,
            depth: options.depth.clamp(1, most),
            pending: Slab::new(),
            ready: Vec::new(),
            round: Vec::new(),
            flushes: Group::default(),
            methods,
            zeroes: Rc::new(zeroes),
            pool: reactor.buffers().clone(),
            reserve: reactor.buffers().beside(LARGEST),
            lost: None,
            space: SpaceWait::new(options.full_volume_wait),
        })
    }

    /// The path of the file or device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of storage.
    #[must_use]
    pub fn storage_kind(&self) -> StorageKind {
        self.storage_kind
    }

    /// Whether I/O bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// The owner in this backing's events: the shard's loop passes them to [`Layer::on_event`].
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Sets the disk's size to that of its record, in bytes, regardless of the file's length. A shorter file reads as zeroes
    /// after its end. Does not block.
    ///
    /// # Errors
    /// [`VolumeError::InvalidSize`]: not a multiple of the logical block, or larger than the device; the size is then unchanged.
    pub fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        check_size(&self.path, size, self.info.logical_block)?;
        if self.storage_kind == StorageKind::Device {
            let length = storage::length(self.file.as_raw_fd())
                .map_err(|error| VolumeError::from_io("examining", &self.path, error))?;
            check_device(&self.path, size, self.storage_kind, length)?;
        }
        self.info.size = size;
        Ok(())
    }

    /// Whether writes wait for space on the volume, or lately have found none.
    #[must_use]
    pub fn lacks_space(&self, now: Nanos) -> bool {
        self.space.lacks_space(now)
    }

    /// Requests that wait for space fail, and so do those that find none from now on: the disk is another node's, or closed.
    pub fn stop_waiting(&mut self) {
        let slots = self.space.give_up().map(|waiting| match waiting {
            Waiting::Write { slot, .. } | Waiting::Zero { slot } => slot,
        });
        for slot in slots.collect::<Vec<_>>() {
            self.finish(slot, Err(self.space.reason(no_space_error())));
        }
    }

    /// Stores a request; returns its slot.
    fn take(&mut self, tag: Tag, step: Step) -> u32 {
        self.pending.insert(Pending { tag, step }) as u32
    }

    /// Completes a request without storage I/O.
    fn answer(&mut self, tag: Tag, result: Result<Outcome, IoError>) {
        self.ready.push(Completion { tag, result });
    }

    fn finish(&mut self, slot: u32, result: Result<Outcome, IoError>) {
        let pending = self.pending.remove(slot as usize);
        self.ready.push(Completion { tag: pending.tag, result });
    }

    fn read(&mut self, reactor: &mut Reactor, tag: Tag, offset: u64, buffer: Buffer) {
        let slot = self.take(tag, Step::Read);
        match &mut self.engine {
            Engine::Uring(engine) => engine.read(reactor, slot, offset, buffer),
            Engine::Sync(engine) => engine.read(slot, offset, buffer),
        }
    }

    fn write(&mut self, reactor: &mut Reactor, tag: Tag, payload: Payload<'_>, write: Write) {
        let Write { offset, fua, .. } = write;
        let slot = self.take(tag, Step::Write(write));
        let engine = match (&mut self.engine, &payload) {
            (Engine::Sync(_), payload) => return self.write_inline(slot, offset, payload.bytes(), fua),
            (Engine::Uring(engine), _) => engine,
        };
        let buffer = match payload {
            Payload::Given(buffer) => buffer,
            Payload::Lent(bytes) => {
                let taken = self.pool.take(bytes.len()).or_else(|| self.reserve.take(bytes.len()));
                let Some(mut buffer) = taken else {
                    let error =
                        IoError::new(ErrorKind::Retry, Code::NoMemory, "copying a write for the backing");
                    return self.finish(slot, Err(error));
                };
                buffer.bytes_mut().copy_from_slice(bytes);
                buffer
            }
        };
        engine.write(reactor, slot, offset, WriteSource::Buffer(buffer), fua);
    }

    /// A write by the engine that borrows its bytes. One that finds no space keeps a copy of them, to wait with.
    fn write_inline(&mut self, slot: u32, offset: u64, bytes: &[u8], fua: bool) {
        let Engine::Sync(engine) = &mut self.engine else { return };
        engine.write_lent(slot, offset, bytes, fua);
        if let Some(Finished { result: Err(libc::ENOSPC | libc::EDQUOT), buffer, .. }) =
            engine.finished.last_mut()
        {
            *buffer = self.pool.take(bytes.len()).or_else(|| self.reserve.take(bytes.len()));
            buffer.iter_mut().for_each(|buffer| buffer.bytes_mut().copy_from_slice(bytes));
        }
    }

    /// A write has found no space. It waits for some, or fails.
    fn no_space(&mut self, now: Nanos, wait: Wait, waiting: Waiting, error: IoError) {
        if let Some(Waiting::Write { slot, .. } | Waiting::Zero { slot }) =
            self.space.refused(now, wait, waiting)
        {
            self.finish(slot, Err(self.space.reason(error)));
        }
    }

    /// Whether the storage has fewer requests than the depth.
    fn has_depth(&self) -> bool {
        self.in_flight() - self.space.len() < self.depth
    }

    /// Tries again what waits for space. A process without the right to write must not (P2, P4).
    fn retry_full(&mut self, reactor: &mut Reactor) {
        let now = reactor.now();
        while let Some((wait, waiting)) = self.space.retry(now, self.has_depth()) {
            if !reactor.may_write(self.owner) {
                self.no_space(now, wait, waiting, no_space_error());
                continue;
            }
            match waiting {
                Waiting::Zero { slot } => {
                    let Step::Zero(job, _) = self.pending[slot as usize].step else { continue };
                    self.pending[slot as usize].step = Step::Zero(job, wait);
                    self.zero_next(reactor, slot, job, wait);
                }
                Waiting::Write { slot, buffer } => {
                    let Step::Write(write) = self.pending[slot as usize].step else { continue };
                    self.pending[slot as usize].step = Step::Write(Write { wait, ..write });
                    match &mut self.engine {
                        Engine::Uring(engine) => {
                            let source = WriteSource::Buffer(buffer);
                            engine.write(reactor, slot, write.offset, source, write.fua);
                        }
                        Engine::Sync(_) => self.write_inline(slot, write.offset, buffer.bytes(), write.fua),
                    }
                }
            }
        }
    }

    fn flush(&mut self, tag: Tag) {
        let slot = self.take(tag, Step::Sync);
        self.flushes.arrive(slot);
    }

    fn extents(&mut self, reactor: &mut Reactor, tag: Tag, offset: u64, length: u64) {
        let logical_block = u64::from(self.info.logical_block);
        match self.storage_kind {
            StorageKind::Device => {
                let all = vec![Extent { offset, length, state: ExtentState::Allocated }];
                self.answer(tag, Ok(Outcome::Extents(all)));
            }
            StorageKind::Memory => {
                let found = extents::of_file(self.file.as_raw_fd(), offset, length, logical_block);
                self.answer(tag, extents_outcome(found));
            }
            StorageKind::File => {
                let slot = self.take(tag, Step::Extents);
                if let Err(errno) = self.lookups.ask(reactor, Lookup { slot, offset, length, logical_block })
                {
                    self.finish(slot, extents_outcome(Err(errno)));
                }
            }
        }
    }

    /// Completes requests with the lookup thread's answers.
    fn take_lookups(&mut self, reactor: &mut Reactor) {
        for (slot, found) in self.lookups.take(reactor) {
            self.finish(slot, extents_outcome(found));
        }
    }

    fn zero(&mut self, reactor: &mut Reactor, tag: Tag, job: ZeroJob, wait: Wait) {
        let slot = self.take(tag, Step::Zero(job, wait));
        self.zero_next(reactor, slot, job, wait);
    }

    fn submit_waiting(&mut self, reactor: &mut Reactor, request: Request<'_>, wait: Wait) {
        if request.kind().changes_data() && !self.info.writable {
            let error =
                IoError::new(ErrorKind::Operator, Code::ReadOnly, "the disk is open for reading only");
            return self.answer(request.tag(), Err(error));
        }
        match request {
            Request::Read { tag, offset, buffer } => self.read(reactor, tag, offset, buffer),
            Request::Write { tag, offset, payload, fua } => {
                self.write(reactor, tag, payload, Write { offset, fua, wait })
            }
            Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only } => {
                self.zero(reactor, tag, zero_job(offset, length, fua, may_unmap, fast_only), wait);
            }
            Request::Discard { tag, offset, length, fua } => {
                self.zero(reactor, tag, zero_job(offset, length, fua, true, false), wait);
            }
            Request::Flush { tag } => self.flush(tag),
            Request::Extents { tag, offset, length } => self.extents(reactor, tag, offset, length),
        }
        self.took_time(reactor);
    }

    /// A synchronous engine has done its work by now: whatever comes next arrives or ends at this time.
    fn took_time(&self, reactor: &Reactor) {
        if matches!(self.engine, Engine::Sync(_)) {
            reactor.now();
        }
    }

    /// Starts the next piece of a zero request, or completes it.
    fn zero_next(&mut self, reactor: &mut Reactor, slot: u32, mut job: ZeroJob, wait: Wait) {
        if job.next == job.end {
            if job.fua {
                self.pending[slot as usize].step = Step::Sync;
                self.flushes.arrive(slot);
            } else {
                self.finish(slot, Ok(Outcome::Done));
            }
            return;
        }
        let Some(method) = self.methods.choose(job.may_unmap, job.fast_only) else {
            let error =
                IoError::new(ErrorKind::Operator, Code::NotSupported, "zeroing faster than by writing");
            return self.finish(slot, Err(error));
        };
        job.method = method;
        let (offset, length) = (job.next, job.piece());
        job.started = offset + length;
        self.pending[slot as usize].step = Step::Zero(job, wait);
        match (method.mode(), &mut self.engine) {
            (Some(mode), Engine::Uring(engine)) => engine.allocate(reactor, slot, mode, offset, length),
            (Some(mode), Engine::Sync(engine)) => engine.allocate(slot, mode, offset, length),
            (None, Engine::Uring(engine)) => {
                let source = WriteSource::zeroes(&self.zeroes, length);
                engine.write(reactor, slot, offset, source, false);
            }
            (None, Engine::Sync(engine)) => {
                engine.write_lent(slot, offset, self.zeroes.bytes(0, length as usize), false)
            }
        }
    }

    fn zero_finished(
        &mut self,
        reactor: &mut Reactor,
        slot: u32,
        (mut job, mut wait): (ZeroJob, Wait),
        result: Result<u64, i32>,
    ) {
        match result {
            Ok(_) => {
                job.next = job.started;
                self.space.answered(&mut wait);
            }
            Err(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY) if job.method != Method::Write => {
                self.methods.rule_out(job.method);
                self.info.discards = self.methods.punch;
                self.info.fast_zeroes = self.methods.punch || self.methods.zero_range;
            }
            Err(errno) => {
                let error = IoError::from_errno(errno, "zeroing the backing");
                if is_full(&error) {
                    return self.no_space(reactor.now(), wait, Waiting::Zero { slot }, error);
                }
                self.space.answered(&mut wait);
                return self.finish(slot, Err(error));
            }
        }
        self.zero_next(reactor, slot, job, wait);
    }

    fn sync_finished(&mut self, result: Result<u64, i32>) {
        let mut flushes = std::mem::take(&mut self.flushes);
        if let Err(errno) = result {
            self.may_be_lost(errno);
        }
        for slot in flushes.finish() {
            let result = result.map_err(|errno| IoError::from_errno(errno, "syncing the backing"));
            self.finish(slot, result.map(|_| Outcome::Done));
        }
        self.flushes = flushes;
    }

    /// A sync, or a durable write, has failed. The kernel reports a failed write-back once, then drops the error and the data: it may be
    /// that of an earlier write. Direct writes are not in the page cache: there the next sync is reliable.
    fn may_be_lost(&mut self, errno: i32) {
        if !self.direct {
            self.lost = Some(errno);
        }
    }

    fn finished(&mut self, reactor: &mut Reactor, finished: Finished) {
        let Finished { slot, result, buffer } = finished;
        if slot == SYNC {
            return self.sync_finished(result);
        }
        // Buffers of writes return to their pool here.
        match self.pending[slot as usize].step {
            Step::Read => {
                let read = result.map_err(|errno| IoError::from_errno(errno, "reading the backing"));
                let outcome = read.map(|count| {
                    let mut buffer = buffer.expect("a read returns its buffer");
                    // After the end of a file that is shorter than the disk.
                    buffer.bytes_mut()[count as usize..].fill(0);
                    Outcome::Read(buffer)
                });
                self.finish(slot, outcome);
            }
            Step::Write(mut write) => {
                // Nothing of a file in memory is written back.
                let syncs = write.fua && !self.direct && self.storage_kind != StorageKind::Memory;
                if let (Err(errno), true) = (result, syncs) {
                    self.may_be_lost(errno);
                }
                let written = result.map_err(|errno| IoError::from_errno(errno, "writing the backing"));
                match (written, buffer) {
                    (Err(error), Some(buffer)) if is_full(&error) && !syncs => {
                        let waiting = Waiting::Write { slot, buffer };
                        return self.no_space(reactor.now(), write.wait, waiting, error);
                    }
                    _ => {}
                }
                self.space.answered(&mut write.wait);
                self.finish(slot, written.map(|_| Outcome::Done));
            }
            Step::Zero(job, wait) => self.zero_finished(reactor, slot, (job, wait), result),
            Step::Sync => unreachable!("a flush waits in the sync's slot"),
            Step::Extents => unreachable!("extents come from the lookup thread"),
        }
    }

    fn start_sync(&mut self, reactor: &mut Reactor) {
        if !self.flushes.start() {
            return;
        }
        match (self.lost, &mut self.engine) {
            (Some(errno), _) => self.sync_finished(Err(errno)),
            (None, Engine::Uring(engine)) => engine.sync(reactor, SYNC),
            (None, Engine::Sync(engine)) => engine.sync(SYNC),
        }
    }
}

impl Layer for FileBacking {
    fn info(&self) -> LayerInfo {
        self.info
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        let waiting = self.space.len();
        // Reads go on beside what waits for space.
        if !self.has_depth() || kind.changes_data() && waiting >= self.depth {
            return false;
        }
        let copies = kind == RequestKind::Write && matches!(self.engine, Engine::Uring(_));
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        !copies || self.pool.has_room(bytes) || self.reserve.has_room(bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.submit_waiting(reactor, request, Wait::default());
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        if event.token.owner != self.owner {
            return;
        }
        match event.action {
            Action::File { result, buffer } => {
                self.finished(reactor, Finished { slot: event.token.slot, result, buffer });
            }
            Action::Ready(_) => self.take_lookups(reactor),
        }
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.start_sync(reactor);
        self.retry_full(reactor);
        // One round only: other requests run between the pieces of a large synchronous zero request.
        let mut round = std::mem::take(&mut self.round);
        if let Engine::Sync(engine) = &mut self.engine {
            std::mem::swap(&mut round, &mut engine.finished);
        }
        for finished in round.drain(..) {
            self.finished(reactor, finished);
        }
        self.round = round;
        self.start_sync(reactor);
        done.append(&mut self.ready);
    }

    fn deadline(&self) -> Nanos {
        match &self.engine {
            Engine::Sync(engine) if !engine.finished.is_empty() => Nanos(0),
            _ if !self.ready.is_empty() => Nanos(0),
            _ => self.space.deadline(self.has_depth()),
        }
    }

    fn in_flight(&self) -> usize {
        self.pending.len() + self.ready.len()
    }

    fn meters(&self, _out: &mut Vec<LayerMeter>) {}
}

impl Destage for FileBacking {
    fn submit_destaged(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.submit_waiting(reactor, request, Wait::NONE);
    }

    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        if !self.info.writable {
            let error =
                IoError::new(ErrorKind::Operator, Code::ReadOnly, "the disk is open for reading only");
            return self.answer(tag, Err(error));
        }
        let write = Write { offset, fua: false, wait: Wait::NONE };
        let slot = self.take(tag, Step::Write(write));
        let source = WriteSource::Gather(region, pieces);
        match &mut self.engine {
            Engine::Uring(engine) => engine.write(reactor, slot, offset, source, false),
            Engine::Sync(engine) => engine.write(slot, offset, &source),
        }
        self.took_time(reactor);
    }
}

fn extents_outcome(found: Result<Vec<Extent>, i32>) -> Result<Outcome, IoError> {
    found
        .map(Outcome::Extents)
        .map_err(|errno| IoError::from_errno(errno, "looking up extents of the backing"))
}

fn no_space_error() -> IoError {
    IoError::from_errno(libc::ENOSPC, "writing the backing")
}

fn zero_job(offset: u64, length: u64, fua: bool, may_unmap: bool, fast_only: bool) -> ZeroJob {
    ZeroJob {
        next: offset,
        started: offset,
        end: offset + length,
        may_unmap,
        fast_only,
        fua,
        method: Method::Write,
    }
}
