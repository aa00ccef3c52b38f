//! The requests of a routed disk, and their bytes.

use std::rc::Rc;

use weir_block::{Buffer, Nanos, Reactor, Region, RequestKind, Tag, WriteSource};

use super::RoutedBacking;
use super::link::LinkError;
use super::parts::Part;
use crate::full::Wait;
use crate::lun::redirect::Data;
use crate::lun::router::Range;

/// The bytes of a write, kept until it is done: it may have to be done again.
#[derive(Debug)]
pub enum Source {
    /// It is no write.
    None,
    /// A buffer.
    Buffer(Rc<Buffer>),
    /// Pieces of a region, one after the other.
    Gather(Rc<Region>, Vec<(usize, usize)>),
    /// Zeroes.
    Zeroes,
}

/// A request that is not done.
#[derive(Debug)]
pub struct Pending {
    /// For the router.
    pub id: u64,
    pub tag: Tag,
    pub kind: RequestKind,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Durable when it is done.
    pub durable: bool,
    /// Of a write.
    pub source: Source,
    /// Of a read, unless the kernel has it.
    pub buffer: Option<Buffer>,
    /// For space.
    pub wait: Wait,
    /// Since when a coordinator on another node has it, to do through its filesystem.
    pub redirected: Option<Nanos>,
}

impl Pending {
    /// Its bytes; empty for a flush.
    pub fn range(&self) -> Range {
        (self.offset, self.offset + self.length)
    }

    /// Whether it needs space on the volume: a punch needs hardly any.
    pub fn needs_space(&self) -> bool {
        !matches!(self.source, Source::None)
    }

    /// The bytes of a part of a write, for the reactor.
    pub fn source_of(&self, (start, end): Range, zeroes: &Rc<Region>) -> WriteSource {
        let (skip, length) = ((start - self.offset) as usize, (end - start) as usize);
        match &self.source {
            Source::Buffer(buffer) => WriteSource::Shared(Rc::clone(buffer), skip, length),
            Source::Gather(region, pieces) => {
                WriteSource::Gather(Rc::clone(region), slice(pieces, skip, length).collect())
            }
            Source::Zeroes | Source::None => WriteSource::zeroes(zeroes, length as u64),
        }
    }
}

/// A part of what pieces of a region are together.
fn slice(
    pieces: &[(usize, usize)],
    skip: usize,
    length: usize,
) -> impl Iterator<Item = (usize, usize)> + use<'_> {
    let end = skip + length;
    let mut at = 0;
    pieces.iter().filter_map(move |&(start, piece)| {
        let (from, to) = (skip.max(at), end.min(at + piece));
        let part = (start + from.saturating_sub(at), to.saturating_sub(from));
        at += piece;
        (part.1 > 0).then_some(part)
    })
}

impl RoutedBacking {
    /// The coordinator gets a request. Here there is no way to it that would take time.
    pub(super) fn begin_redirected(&mut self, reactor: &Reactor, id: u64) {
        if !self.link.is_remote() {
            return;
        }
        let now = reactor.now();
        let Some(pending) = self.request_mut(id) else { return };
        pending.redirected = Some(now);
        let kind = pending.kind;
        self.redirected.arrive(kind, now);
    }

    /// The coordinator has answered a request, or will not.
    pub(super) fn end_redirected(&mut self, reactor: &Reactor, id: u64, is_done: bool) {
        let Some(pending) = self.request_mut(id) else { return };
        let (kind, length) = (pending.kind, pending.length);
        if let Some(sent) = pending.redirected.take() {
            self.redirected.complete(kind, length, sent, reactor.now(), is_done);
        }
    }

    /// What the coordinator has is not answered any more.
    pub(super) fn forget_redirected(&mut self, reactor: &Reactor) {
        let ids: Vec<u64> = self.pending.iter().map(|(_, pending)| pending.id).collect();
        ids.into_iter().for_each(|id| self.end_redirected(reactor, id, false));
        let now = reactor.now();
        for (_, Part { kind, range, sent, .. }) in &self.parts {
            if let Some(sent) = sent {
                self.redirected.complete(*kind, range.1 - range.0, *sent, now, false);
            }
        }
        self.parts.retain(|_, part| !part.is_redirected);
    }

    /// The bytes of a part of a request, for a message. `None`: there is no memory now.
    pub(super) fn data(&self, id: u64, (start, end): Range) -> Option<Data> {
        let Some(pending) = self.request(id) else { return Some(Data::None) };
        let (skip, length) = ((start - pending.offset) as usize, (end - start) as usize);
        let copy = |parts: &mut dyn Iterator<Item = &[u8]>| {
            let mut buffer = self.memory(length)?;
            let mut at = 0;
            for part in parts {
                buffer.bytes_mut()[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
            Some(Data::Bytes(Rc::new(buffer)))
        };
        match &pending.source {
            Source::None => Some(Data::None),
            Source::Zeroes => Some(Data::Zeroes),
            Source::Buffer(buffer) if length == buffer.len() => Some(Data::Bytes(Rc::clone(buffer))),
            Source::Buffer(buffer) => copy(&mut std::iter::once(&buffer.bytes()[skip..skip + length])),
            Source::Gather(region, pieces) => {
                copy(&mut slice(pieces, skip, length).map(|(start, length)| region.bytes(start, length)))
            }
        }
    }

    /// The coordinator's data for a read, or for a part of one.
    pub(super) fn take_data(&mut self, id: u64, part: Option<Range>, data: &Buffer) -> Result<(), LinkError> {
        let Some(pending) = self.request_mut(id) else { return Ok(()) };
        let offset = pending.offset;
        let Some(buffer) = &mut pending.buffer else { return Err(LinkError::NoData) };
        let (start, end) = part.unwrap_or((offset, offset + buffer.len() as u64));
        if data.len() as u64 != end - start {
            return Err(LinkError::NoData);
        }
        // Copied, and not exchanged: a client that stops reading keeps its buffer, and one of the connection's would be missing for
        // whatever else the coordinator has to say, recalls among it (P9).
        let target = (start - offset) as usize..(end - offset) as usize;
        buffer.bytes_mut()[target].copy_from_slice(data.bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_pieces_is_the_same_bytes() {
        let pieces = [(100, 3), (10, 1), (50, 4)];
        let bytes = |pieces: &mut dyn Iterator<Item = (usize, usize)>| {
            pieces.flat_map(|(start, length)| start..start + length).collect::<Vec<usize>>()
        };
        let all = bytes(&mut pieces.into_iter());
        for skip in 0..8 {
            for length in 1..=8 - skip {
                assert_eq!(bytes(&mut slice(&pieces, skip, length)), all[skip..skip + length]);
            }
        }
    }
}
