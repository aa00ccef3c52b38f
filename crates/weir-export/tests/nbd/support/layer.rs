//! A disk in a file, with I/O done at once on the shard's thread. Simple and slow; but a real one.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use weir_block::{
    Completion, Event, Extent, ExtentState, IoError, Layer, LayerInfo, LayerMeter, Outcome, Reactor, Request,
    RequestKind, Tag,
};

/// Settings that a test can change while the disk is in use.
#[derive(Debug, Default)]
pub struct Knobs {
    /// Answers are kept back.
    pub frozen: AtomicBool,
    /// Answers come in the wrong order.
    pub reversed: AtomicBool,
    /// Requests are answered with this error number.
    pub failing: AtomicUsize,
    /// Requests that reach beyond this offset fail; 0 is no limit.
    pub broken_from: AtomicU64,
    /// Requests taken at once; 0 is no limit.
    pub room: AtomicUsize,
    /// Flushes that came through.
    pub flushes: AtomicUsize,
    /// Writes with FUA that came through.
    pub fua: AtomicUsize,
    /// Requests seen in flight at most.
    pub deepest: AtomicUsize,
}

pub struct FileLayer {
    file: File,
    info: LayerInfo,
    knobs: Arc<Knobs>,
    finished: VecDeque<Completion>,
}

impl FileLayer {
    pub fn new(file: File, info: LayerInfo, knobs: Arc<Knobs>) -> FileLayer {
        file.set_len(info.size).expect("a sparse file of the disk's size");
        FileLayer { file, info, knobs, finished: VecDeque::new() }
    }

    fn execute(&mut self, request: Request<'_>) -> Result<Outcome, IoError> {
        let errno = self.knobs.failing.load(Ordering::Relaxed);
        if errno != 0 {
            return Err(IoError::from_errno(errno as i32, "the test wants it so"));
        }
        let (offset, length) = request.range();
        let broken = self.knobs.broken_from.load(Ordering::Relaxed);
        if broken != 0 && offset + length > broken {
            return Err(IoError::from_errno(libc::EIO, "the test has broken the rest of the disk"));
        }
        match request {
            Request::Read { offset, mut buffer, .. } => {
                self.file.read_exact_at(buffer.bytes_mut(), offset).map_err(failed)?;
                Ok(Outcome::Read(buffer))
            }
            Request::Write { offset, payload, fua, .. } => {
                self.file.write_all_at(payload.bytes(), offset).map_err(failed)?;
                self.durable(fua)
            }
            Request::WriteZeroes { offset, length, fua, may_unmap, .. } => {
                let mode = if may_unmap { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
                if self.allocate(mode, offset, length).is_err() {
                    let zeroes = vec![0; length as usize];
                    self.file.write_all_at(&zeroes, offset).map_err(failed)?;
                }
                self.durable(fua)
            }
            Request::Discard { offset, length, fua, .. } => {
                self.allocate(libc::FALLOC_FL_PUNCH_HOLE, offset, length).map_err(failed)?;
                self.durable(fua)
            }
            Request::Flush { .. } => {
                self.knobs.flushes.fetch_add(1, Ordering::Relaxed);
                self.file.sync_data().map_err(failed)?;
                Ok(Outcome::Done)
            }
            Request::Extents { offset, length, .. } => self.extents(offset, length),
        }
    }

    fn durable(&self, fua: bool) -> Result<Outcome, IoError> {
        if fua {
            self.knobs.fua.fetch_add(1, Ordering::Relaxed);
            self.file.sync_data().map_err(failed)?;
        }
        Ok(Outcome::Done)
    }

    fn allocate(&self, mode: i32, offset: u64, length: u64) -> io::Result<()> {
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: an open file and no pointers.
        let result = unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset as i64, length as i64) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn extents(&self, offset: u64, length: u64) -> Result<Outcome, IoError> {
        let end = offset + length;
        let mut at = offset;
        let mut extents = Vec::new();
        while at < end {
            let data = self.seek(at, libc::SEEK_DATA).unwrap_or(end).min(end);
            if data > at {
                extents.push(Extent { offset: at, length: data - at, state: ExtentState::Hole });
            }
            if data < end {
                let hole = self.seek(data, libc::SEEK_HOLE).unwrap_or(end).min(end);
                extents.push(Extent { offset: data, length: hole - data, state: ExtentState::Allocated });
                at = hole;
            } else {
                at = data;
            }
        }
        Ok(Outcome::Extents(extents))
    }

    fn seek(&self, offset: u64, whence: i32) -> Option<u64> {
        // SAFETY: an open file and no pointers.
        let found = unsafe { libc::lseek(self.file.as_raw_fd(), offset as i64, whence) };
        u64::try_from(found).ok()
    }
}

fn failed(error: io::Error) -> IoError {
    IoError::from_errno(error.raw_os_error().unwrap_or(libc::EIO), "file behind the test's disk")
}

impl Layer for FileLayer {
    fn info(&self) -> LayerInfo {
        self.info
    }

    fn has_room(&self, _kind: RequestKind, _bytes: u64) -> bool {
        let room = self.knobs.room.load(Ordering::Relaxed);
        room == 0 || self.finished.len() < room
    }

    fn submit(&mut self, _reactor: &mut Reactor, request: Request<'_>) {
        let (offset, length) = request.range();
        let block = u64::from(self.info.logical_block);
        assert!(request.tag().0 >> 56 == 0, "the upper bits of a tag are not the export's");
        assert!(offset.is_multiple_of(block) && length.is_multiple_of(block), "the export checks alignment");
        assert!(offset + length <= self.info.size, "the export checks the range");
        assert!(length > 0 || request.kind() == RequestKind::Flush, "the export checks for emptiness");
        let has_data = matches!(request, Request::Read { .. } | Request::Write { .. });
        assert!(
            !has_data || length <= self.info.max_transfer.into(),
            "the export keeps to what a layer takes"
        );
        assert!(self.has_room(request.kind(), length), "the export asks for room");
        let tag: Tag = request.tag();
        let result = self.execute(request);
        self.finished.push_back(Completion { tag, result });
        self.knobs.deepest.fetch_max(self.finished.len(), Ordering::Relaxed);
    }

    fn on_event(&mut self, _reactor: &mut Reactor, _event: Event) {}

    fn advance(&mut self, _reactor: &mut Reactor, done: &mut Vec<Completion>) {
        if self.knobs.frozen.load(Ordering::Relaxed) {
            return;
        }
        if self.knobs.reversed.load(Ordering::Relaxed) {
            done.extend(self.finished.drain(..).rev());
        } else {
            done.extend(self.finished.drain(..));
        }
    }

    fn in_flight(&self) -> usize {
        self.finished.len()
    }

    fn meters(&self, _out: &mut Vec<LayerMeter>) {}
}
