//! Stamps the writes of a load and judges its reads.

use std::sync::Arc;

use weir_block::Nanos;

use crate::generator::spread;
use crate::io::Io;
use crate::summary::Verification;
use crate::tally::IoKind;
use crate::verify::{Atomicity, History, Initial, Layout, LayoutError, Record};
use crate::workload::{Span, Workload};

/// The slot's content for a flush, which has no block.
const FLUSH: (u64, u32) = (u64::MAX, 0);

/// An identifier of a run's data. Unique, so that data of an earlier load differs from data of this one.
pub(crate) fn new_run() -> u64 {
    spread(Nanos::now().0 ^ u64::from(std::process::id()) << 32)
}

/// The history of one thread's span, and its requests in flight.
#[derive(Debug)]
pub(crate) struct Checker {
    pub history: History,
    /// By slot: block and version (0 for a read) of the request in flight.
    slots: Vec<(u64, u32)>,
    atomicity: Atomicity,
    /// The persistent history of all threads.
    record: Option<Arc<Record>>,
    pub found: Verification,
}

impl Checker {
    /// For a thread of run `run`, which works on `span`.
    pub fn new(
        workload: &Workload,
        span: Span,
        run: u64,
        record: Option<Arc<Record>>,
    ) -> Result<Checker, LayoutError> {
        let layout = Layout::uniform(span, workload.block_size.0 as u32)?;
        let history = History::new(layout, run, Initial::Unknown);
        Ok(Checker { record, ..Checker::of(history, Atomicity::Block, workload.queue_depth) })
    }

    /// For reads, `depth` at once, that are judged by the history of an earlier load.
    pub fn of(history: History, atomicity: Atomicity, depth: u32) -> Checker {
        let (slots, found) = (vec![(0, 0); depth as usize], Verification::default());
        Checker { history, slots, atomicity, record: None, found }
    }

    /// Requests that can be in flight.
    pub fn depth(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Call before a request is submitted; `data` is a write's payload.
    pub fn before(&mut self, io: Io, data: &mut [u8]) {
        if io.kind == IoKind::Flush {
            self.slots[io.slot as usize] = FLUSH;
            return;
        }
        let block = self.history.layout().block_at(io.offset).expect("the generator stays in its span");
        let version = match io.kind {
            IoKind::Read | IoKind::Flush => 0,
            IoKind::Write => {
                let version = self.history.issue(block, data);
                self.note(block);
                version
            }
        };
        self.slots[io.slot as usize] = (block, version);
    }

    /// Call after a request has succeeded; `data` is a read's result.
    pub fn after(&mut self, slot: u32, data: &[u8]) {
        let (block, version) = self.slots[slot as usize];
        match (block, version) {
            FLUSH => return,
            (block, 0) => self.found.count(self.history.check(block, data, self.atomicity)),
            (block, version) => self.history.acknowledge(block, version),
        }
        self.note(block);
    }

    fn note(&self, block: u64) {
        if let Some(record) = &self.record {
            let (acknowledged, issued) = self.history.versions_of(block);
            record.note(self.history.layout().block(block).offset, acknowledged, issued);
        }
    }
}
