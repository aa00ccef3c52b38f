//! A backing that does what the test says.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use weir_block::{
    Code, Completion, Destage, ErrorKind, Event, Extent, ExtentState, IoError, Layer, LayerInfo, LayerMeter,
    Nanos, Outcome, Payload, Reactor, Region, Request, RequestKind, Tag,
};

use crate::SIZE;

/// An operation that the backing has taken.
pub enum Operation {
    Read(Tag, usize, weir_block::Buffer),
    Write(Tag, usize, Vec<u8>),
    Flush(Tag),
    /// With what the backing saw when it looked.
    Extents(Tag, Vec<Extent>),
}

/// Orders to the backing, and its record of operations.
#[derive(Default)]
pub struct Script {
    pub bytes: Vec<u8>,
    pub waiting: VecDeque<Operation>,
    pub hold_reads: bool,
    pub hold_writes: bool,
    pub hold_flushes: bool,
    pub hold_extents: bool,
    pub fails: bool,
    /// Flushes fail with [`Code::Lost`].
    pub loses: bool,
    pub writes: usize,
    pub flushes: usize,
    /// Something was handed down and the backing has not been advanced since: a file begins with nothing before.
    pub unseen: bool,
}

impl Script {
    fn holds(&self, operation: &Operation) -> bool {
        match operation {
            Operation::Read(..) => self.hold_reads,
            Operation::Write(..) => self.hold_writes,
            Operation::Flush(_) => self.hold_flushes,
            Operation::Extents(..) => self.hold_extents,
        }
    }

    /// A sector of zeroes is a hole.
    fn extents(&self, offset: usize, length: usize) -> Vec<Extent> {
        let sectors = self.bytes[offset..offset + length].chunks(512);
        let state = |sector: &[u8]| match sector.iter().all(|byte| *byte == 0) {
            true => ExtentState::Hole,
            false => ExtentState::Allocated,
        };
        let extent = |(number, sector): (usize, &[u8])| Extent {
            offset: (offset + number * 512) as u64,
            length: 512,
            state: state(sector),
        };
        sectors.enumerate().map(extent).collect()
    }
}

pub struct Backing(pub Rc<RefCell<Script>>);

impl Layer for Backing {
    fn info(&self) -> LayerInfo {
        LayerInfo {
            size: SIZE as u64,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: 32 << 20,
            writable: true,
            fast_zeroes: true,
            discards: true,
        }
    }

    fn has_room(&self, _kind: RequestKind, _bytes: u64) -> bool {
        true
    }

    fn submit(&mut self, _reactor: &mut Reactor, request: Request<'_>) {
        let mut script = self.0.borrow_mut();
        let operation = match request {
            Request::Read { tag, offset, buffer } => Operation::Read(tag, offset as usize, buffer),
            Request::Write { tag, offset, payload, .. } => {
                Operation::Write(tag, offset as usize, payload.bytes().to_vec())
            }
            Request::Flush { tag } => Operation::Flush(tag),
            Request::Extents { tag, offset, length } => {
                Operation::Extents(tag, script.extents(offset as usize, length as usize))
            }
            request => panic!("not asked for here: {request:?}"),
        };
        match operation {
            Operation::Write(..) => script.writes += 1,
            Operation::Flush(_) => script.flushes += 1,
            Operation::Read(..) | Operation::Extents(..) => {}
        }
        script.waiting.push_back(operation);
        script.unseen = true;
    }

    fn on_event(&mut self, _reactor: &mut Reactor, _event: Event) {}

    fn advance(&mut self, _reactor: &mut Reactor, done: &mut Vec<Completion>) {
        let mut script = self.0.borrow_mut();
        script.unseen = false;
        for _ in 0..script.waiting.len() {
            let operation = script.waiting.pop_front().unwrap();
            if script.holds(&operation) {
                script.waiting.push_back(operation);
                continue;
            }
            let (fails, loses) = (script.fails, script.loses && matches!(operation, Operation::Flush(_)));
            let (tag, outcome) = match operation {
                Operation::Read(tag, offset, mut buffer) => {
                    let length = buffer.len();
                    buffer.bytes_mut().copy_from_slice(&script.bytes[offset..offset + length]);
                    (tag, Outcome::Read(buffer))
                }
                Operation::Write(tag, offset, bytes) => {
                    script.bytes[offset..offset + bytes.len()].copy_from_slice(&bytes);
                    (tag, Outcome::Done)
                }
                Operation::Flush(tag) => (tag, Outcome::Done),
                Operation::Extents(tag, extents) => (tag, Outcome::Extents(extents)),
            };
            let code = if loses { Code::Lost } else { Code::Io };
            let error = IoError::new(ErrorKind::Retry, code, "as the test says");
            done.push(Completion { tag, result: if fails || loses { Err(error) } else { Ok(outcome) } });
        }
    }

    fn deadline(&self) -> Nanos {
        let script = self.0.borrow();
        let ready = script.waiting.iter().any(|operation| !script.holds(operation));
        if ready { Nanos(0) } else { Nanos::NEVER }
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().waiting.len()
    }

    fn meters(&self, _out: &mut Vec<LayerMeter>) {}
}

impl Destage for Backing {
    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        let parts = pieces.iter().map(|&(start, length)| region.bytes(start, length));
        let bytes: Vec<u8> = parts.flatten().copied().collect();
        self.submit(reactor, Request::Write { tag, offset, payload: Payload::Lent(&bytes), fua: false });
    }
}
