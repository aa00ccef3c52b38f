//! Changes that begin or end inside a block.
//!
//! A client that did not negotiate the block sizes may change any byte; layers take whole blocks. So the server reads the
//! blocks at both ends and writes them back with the change. Nothing else may change them in between: while one such change
//! is prepared, no other change of the disk is in flight, and none begins. That costs a pause, so clients should ask for the
//! block sizes; those built for performance do.

use weir_block::{Buffer, BufferPool, IoError, Layer, Outcome, Payload, Reactor, Request, RequestKind, Tag};

use crate::export::TAG_BITS;

/// The tag of the reads made here: of an export, and of no connection.
const TAG: Tag = Tag((1 << TAG_BITS) - 1);

/// All changes of a disk, of whichever connection.
#[derive(Debug, Default)]
pub(super) struct Edges {
    /// Changes at the layer, those being prepared included.
    changes: usize,
    /// The connection that waits to be alone with its change, or is.
    alone: Option<u32>,
    job: Option<Job>,
}

/// Whole blocks, in whose bytes from `from` to `to` the change is.
#[derive(Debug)]
pub(super) struct Change {
    pub tag: Tag,
    pub offset: u64,
    pub buffer: Buffer,
    pub from: usize,
    pub to: usize,
    pub fua: bool,
}

#[derive(Debug)]
struct Job {
    change: Change,
    block: usize,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The block at this place of the buffer is to be read.
    Read(usize),
    /// It is being read.
    Reading(usize),
    /// The blocks are whole.
    Write,
}

impl Edges {
    pub fn is_ours(tag: Tag) -> bool {
        tag == TAG
    }

    /// A change goes to the layer.
    pub fn begin(&mut self) {
        self.changes += 1;
    }

    /// A change has come back.
    pub fn end(&mut self) {
        self.changes -= 1;
    }

    /// Whether a change of whole blocks may begin.
    pub fn may_change(&self) -> bool {
        self.alone.is_none()
    }

    /// Others are held back until this connection has had its turn alone.
    pub fn line_up(&mut self, who: u32) {
        self.alone.get_or_insert(who);
    }

    /// Whether a change is being prepared.
    pub fn is_busy(&self) -> bool {
        self.job.is_some()
    }

    /// Whether this connection is alone.
    pub fn is_alone(&self, who: u32) -> bool {
        self.alone.is_none_or(|alone| alone == who) && self.job.is_none() && self.changes == 0
    }

    /// Lets the others go on if the connection that has lined up does not wait any more.
    pub fn release(&mut self, still_waits: impl FnOnce(u32) -> bool) {
        if self.job.is_none() && self.alone.is_some_and(|who| !still_waits(who)) {
            self.alone = None;
        }
    }

    /// Takes the change of a connection that is alone, and that has been counted by [`Edges::begin`].
    pub fn start(&mut self, change: Change, block: u32) {
        let step =
            if change.from > 0 { Step::Read(0) } else { Step::Read(change.buffer.len() - block as usize) };
        self.job = Some(Job { change, block: block as usize, step });
    }

    /// Whether [`Edges::advance`] would do something.
    pub fn could_advance(&self, layer: &dyn Layer, pool: &BufferPool) -> bool {
        self.job.as_ref().is_some_and(|job| match job.step {
            Step::Read(_) => layer.has_room(RequestKind::Read, job.block as u64) && pool.has_room(job.block),
            Step::Reading(_) => false,
            Step::Write => layer.has_room(RequestKind::Write, job.change.buffer.len() as u64),
        })
    }

    /// Takes the next step, if there is room for it.
    pub fn advance(&mut self, layer: &mut dyn Layer, reactor: &mut Reactor) {
        if !self.could_advance(layer, reactor.buffers()) {
            return;
        }
        let Some(job) = &mut self.job else { return };
        match job.step {
            Step::Read(at) => {
                let Some(buffer) = reactor.buffers().take(job.block) else { return };
                job.step = Step::Reading(at);
                let offset = job.change.offset + at as u64;
                layer.submit(reactor, Request::Read { tag: TAG, offset, buffer });
            }
            Step::Reading(_) => {}
            Step::Write => {
                let Some(Job { change, .. }) = self.job.take() else { return };
                // From here on, the layer keeps changes of the same blocks in order.
                self.alone = None;
                let Change { tag, offset, buffer, fua, .. } = change;
                layer.submit(reactor, Request::Write { tag, offset, payload: Payload::Given(buffer), fua });
            }
        }
    }

    /// The layer has answered a read. The change, when it cannot be made.
    pub fn take(&mut self, result: Result<Outcome, IoError>) -> Option<(Tag, IoError)> {
        let job = self.job.as_mut()?;
        let Step::Reading(at) = job.step else { return None };
        match result {
            Ok(Outcome::Read(read)) if read.len() == job.block => {
                job.fill(at, read.bytes());
                None
            }
            Ok(_) => self.fail(IoError::from_errno(libc::EIO, "a layer's answer does not fit the request")),
            Err(error) => self.fail(error),
        }
    }

    fn fail(&mut self, error: IoError) -> Option<(Tag, IoError)> {
        self.alone = None;
        self.job.take().map(|job| (job.change.tag, error))
    }
}

impl Job {
    /// Puts what was there before around the change, in the block at `at`.
    fn fill(&mut self, at: usize, before: &[u8]) {
        let Change { buffer, from, to, .. } = &mut self.change;
        let last = buffer.len() - self.block;
        if at == 0 {
            buffer.bytes_mut()[..*from].copy_from_slice(&before[..*from]);
        }
        if at == last {
            let kept = *to - at;
            buffer.bytes_mut()[*to..].copy_from_slice(&before[kept..]);
        }
        self.step = if at < last && *to < buffer.len() { Step::Read(last) } else { Step::Write };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::Limits;

    #[test]
    fn the_tag_of_its_reads_is_of_an_export_and_of_no_connection() {
        assert_eq!(TAG.0 >> TAG_BITS, 0);
        assert!((TAG.0 >> 32) as usize >= Limits::CONNECTIONS);
    }
}
