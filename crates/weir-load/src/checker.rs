//! Stamps the writes of a load and judges its reads.

use weir_block::Nanos;

use crate::generator::{Io, spread};
use crate::summary::Verification;
use crate::tally::IoKind;
use crate::verify::{Atomicity, History, Initial, Layout, LayoutError};
use crate::workload::{Span, Workload};

/// What stands in the slot of a flush, which has no block.
const FLUSH: (u64, u32) = (u64::MAX, 0);

/// The history of one thread's span, and what of it is in flight.
#[derive(Debug)]
pub(crate) struct Checker {
    pub history: History,
    /// By slot: block and version (0 for a read) of the request in flight.
    slots: Vec<(u64, u32)>,
    pub found: Verification,
}

impl Checker {
    /// For thread number `number`, which works on `span`.
    pub fn new(workload: &Workload, span: Span, number: u32) -> Result<Checker, LayoutError> {
        // Unique, so that what an earlier load has left is told from what this one wrote.
        let run = spread(Nanos::now().0 ^ u64::from(std::process::id()) << 32 ^ u64::from(number));
        Ok(Checker {
            history: History::new(
                Layout::uniform(span, workload.block_size.0 as u32)?,
                run,
                Initial::Unknown,
            ),
            slots: vec![(0, 0); workload.queue_depth as usize],
            found: Verification::default(),
        })
    }

    /// Requests that can be in flight.
    pub fn depth(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Before a request is submitted; `data` is what a write will carry.
    pub fn before(&mut self, io: Io, data: &mut [u8]) {
        if io.kind == IoKind::Flush {
            self.slots[io.slot as usize] = FLUSH;
            return;
        }
        let block = self.history.layout().block_at(io.offset).expect("the generator stays in its span");
        let version = match io.kind {
            IoKind::Read | IoKind::Flush => 0,
            IoKind::Write => self.history.issue(block, data),
        };
        self.slots[io.slot as usize] = (block, version);
    }

    /// After a request was answered with success; `data` is what a read brought.
    pub fn after(&mut self, slot: u32, data: &[u8]) {
        match self.slots[slot as usize] {
            FLUSH => {}
            (block, 0) => self.found.count(self.history.check(block, data, Atomicity::Block)),
            (block, version) => self.history.acknowledge(block, version),
        }
    }
}
