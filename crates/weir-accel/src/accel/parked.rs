//! Changes that wait before the log while a former owner may still serve ([`Owner::appends`]): reads go on beside them.
//!
//! [`Owner::appends`]: crate::owner::Owner::appends

use std::collections::VecDeque;

use weir_block::{Completion, Destage, IoError, Request, RequestKind, Tag};

use super::Accel;
use crate::log::RecordKind;

/// Most changes of a disk, and most bytes of their data unless it is one change. A node that takes hundreds of disks over keeps them
/// for each (P10); further ones wait in their connections.
const MOST: usize = 128;
const MOST_BYTES: u64 = 1 << 20;

/// A change that has no answer yet.
struct Change {
    tag: Tag,
    kind: RecordKind,
    offset: u64,
    length: u64,
    /// A copy outside the shard's buffers, which others need.
    data: Box<[u8]>,
}

/// The changes, in the order of their arrival.
#[derive(Default)]
pub(super) struct Parked {
    waiting: VecDeque<Change>,
    bytes: u64,
}

impl Parked {
    /// The number of waiting changes.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether one more may come.
    pub fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        let bytes = if kind == RequestKind::Write { bytes } else { 0 };
        self.waiting.is_empty() || self.waiting.len() < MOST && self.bytes + bytes <= MOST_BYTES
    }

    /// Takes a change; gives back any other request.
    pub fn push<'a>(&mut self, request: Request<'a>) -> Option<Request<'a>> {
        let (tag, (offset, length)) = (request.tag(), request.range());
        let (kind, data) = match &request {
            Request::Write { payload, .. } => (RecordKind::Write, payload.bytes().into()),
            Request::WriteZeroes { may_unmap: false, .. } => (RecordKind::Zero, Box::default()),
            Request::WriteZeroes { .. } | Request::Discard { .. } => (RecordKind::Discard, Box::default()),
            _ => return Some(request),
        };
        let change = Change { tag, kind, offset, length, data };
        self.bytes += change.data.len() as u64;
        self.waiting.push_back(change);
        None
    }

    fn pop(&mut self) -> Option<Change> {
        let change = self.waiting.pop_front()?;
        self.bytes -= change.data.len() as u64;
        Some(change)
    }

    /// No change will ever be done.
    pub fn fail(&mut self, error: IoError, done: &mut Vec<Completion>) {
        while let Some(Change { tag, .. }) = self.pop() {
            done.push(Completion { tag, result: Err(error) });
        }
    }
}

impl<L: Destage> Accel<L> {
    /// The former owner's right has ended: the changes go into the log, as far as it has room, and as fast as any others.
    pub(super) fn append_parked(&mut self) {
        while self.owner.appends()
            && self.pacer.admits()
            && let Some(Change { kind, length, .. }) = self.parked.waiting.front()
        {
            let kind = if *kind == RecordKind::Write { RequestKind::Write } else { RequestKind::WriteZeroes };
            let takes = self.log_takes(kind, *length);
            if !takes && !self.full_log.no_room() {
                return;
            }
            let Some(Change { tag, kind, offset, length, data }) = self.parked.pop() else { return };
            self.again = true;
            match kind {
                _ if !takes => {
                    self.finished.push(Completion { tag, result: Err(self.full_log_error()) });
                }
                RecordKind::Write => self.write(tag, offset, &data),
                kind => self.zero(tag, offset, length, kind),
            }
        }
    }
}
