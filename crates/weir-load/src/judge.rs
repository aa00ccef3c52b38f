//! Reads blocks back and checks them against the history of writes: at the end of a verified load, and after a crash.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use weir_block::Nanos;
use weir_block::size::Size;
use weir_nbd::client::{Connection, Options};

use crate::checker::Checker;
use crate::engine::{Done, Engine, FileEngine, FileOptions, NbdEngine, PsyncEngine};
use crate::error::LoadError;
use crate::io::Io;
use crate::io_engine::IoEngine;
use crate::monitor::Monitor;
use crate::summary::Verification;
use crate::tally::IoKind;
use crate::target::Target;
use crate::verify::{Atomicity, History};
use crate::workload::{Access, Span, Workload};

/// Reads in flight of [`judge`].
const DEPTH: u32 = 32;

/// The verdict on a target's content, by the record of the load that wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judgement {
    /// The target, as given.
    pub target: String,
    /// Blocks that the load wrote, or was about to write.
    pub written_blocks: u64,
    /// Number of writes issued to them.
    pub writes: u64,
    /// Blocks whose newest write was never answered: their content may be older or newer.
    pub unanswered_blocks: u64,
    /// Blocks that could not be read, and so were not verified.
    pub unreadable: u64,
    /// The error of the first of these.
    pub first_error: Option<String>,
    /// Whether it was stopped before all blocks were judged.
    pub incomplete: bool,
    /// The verification of the readable blocks.
    pub verification: Verification,
}

impl Judgement {
    /// Whether every block was verified and is correct.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.verification.mismatches == 0 && self.unreadable == 0 && !self.incomplete
    }
}

/// Reads all blocks of `history` from `target`, with `engine` where it is a file or device, and judges each. Nothing may
/// write there meanwhile; `monitor` counts the reads and can stop them.
///
/// # Errors
/// The target cannot be opened, is smaller than the range of the history, or fails as a whole.
pub fn judge(
    target: &Target,
    history: History,
    atomicity: Atomicity,
    engine: IoEngine,
    monitor: &Monitor,
) -> Result<Judgement, LoadError> {
    let (span, block_size) = (history.layout().span(), history.layout().largest_block());
    let depth = if engine == IoEngine::Psync { 1 } else { DEPTH };
    let reading = Workload {
        access: Access::Read,
        block_size: Size(u64::from(block_size)),
        queue_depth: depth,
        engine: if matches!(target, Target::Path(_)) { engine } else { IoEngine::IoUring },
        ..Workload::default()
    };
    let size = target.prepare(&reading, false)?;
    Workload { size: Some(Size(span.offset + span.length)), ..reading }.spans(size)?;
    let ((written_blocks, writes), unanswered_blocks) = (history.written(), history.unanswered());
    let mut pass = Pass { checker: Checker::of(history, atomicity, depth), unreadable: 0, first_error: None };
    let blocks = 0..pass.checker.history.layout().blocks();
    let options = FileOptions { depth, block_size, writes: false, fua: false, poll: false };
    let complete = match (target, engine) {
        (Target::Null { .. }, _) => return Err(LoadError::NothingThere(target.to_string())),
        (Target::Path(path), IoEngine::IoUring) => {
            pass.read(&mut FileEngine::open(path, options)?, blocks, Some(monitor))?
        }
        (Target::Path(path), IoEngine::Psync) => {
            pass.read(&mut PsyncEngine::open(path, options)?, blocks, Some(monitor))?
        }
        (Target::Nbd(uri), _) => {
            let options = Options { depth, keep_data: true, structured_replies: false, ..Options::default() };
            pass.read(&mut NbdEngine::new(Connection::open(uri, &options)?, false), blocks, Some(monitor))?
        }
    };
    Ok(Judgement {
        target: target.to_string(),
        written_blocks,
        writes,
        unanswered_blocks,
        unreadable: pass.unreadable,
        first_error: pass.first_error,
        incomplete: !complete,
        verification: pass.checker.found,
    })
}

/// Reads that are judged, and those that failed.
#[derive(Debug)]
pub(crate) struct Pass {
    pub checker: Checker,
    pub unreadable: u64,
    pub first_error: Option<String>,
}

impl Pass {
    /// Reads `blocks`, each once; false when `monitor` has stopped it before their end.
    pub fn read<E: Engine>(
        &mut self,
        engine: &mut E,
        blocks: impl Iterator<Item = u64>,
        monitor: Option<&Monitor>,
    ) -> Result<bool, LoadError> {
        let Pass { checker, unreadable, first_error } = self;
        let length = checker.history.layout().largest_block();
        let mut blocks = blocks.peekable();
        let mut free: Vec<u32> = (0..checker.depth()).collect();
        let mut done: Vec<Done> = Vec::new();
        loop {
            let stopped = monitor.is_some_and(Monitor::is_stopped);
            while !stopped
                && blocks.peek().is_some()
                && let Some(slot) = free.pop()
            {
                let Some(block) = blocks.next() else { break };
                let Span { offset, length } = checker.history.layout().block(block);
                let io = Io { slot, kind: IoKind::Read, offset, length: length as u32 };
                checker.before(io, engine.buffer(slot, io.length));
                engine.queue(io);
            }
            if free.len() == checker.depth() as usize {
                return Ok(blocks.peek().is_none());
            }
            engine.reap(Nanos::NEVER, &mut done)?;
            if let Some(monitor) = monitor {
                monitor.ios.fetch_add(done.len() as u64, Ordering::Relaxed);
            }
            for done in done.drain(..) {
                free.push(done.slot);
                match done.errno {
                    0 => checker.after(done.slot, engine.data(done.slot, length)),
                    errno => {
                        *unreadable += 1;
                        first_error.get_or_insert_with(|| engine.errno_text(errno));
                    }
                }
            }
        }
    }
}
