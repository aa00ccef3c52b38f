//! Parts of requests on the LUN, by this node or by the coordinator.

use weir_block::{Buffer, IoError, Nanos, Reactor, RequestKind};

use super::link::LinkError;
use super::{PROBE_EVERY, RoutedBacking};
use crate::lun::leases::{Lease, Piece};
use crate::lun::redirect::ToCoordinator;
use crate::lun::router::{self, Kind, Route};
use crate::planted::Bug;

/// Tells numbers of parts from those of requests, in messages.
const OF_PART: u64 = 1 << 63;

/// A part that is under way.
#[derive(Debug)]
pub struct Part {
    /// Its request.
    pub id: u64,
    /// Its bytes; empty for a flush.
    pub range: router::Range,
    pub kind: RequestKind,
    /// The coordinator has it.
    pub is_redirected: bool,
    /// Since when, if that is another node.
    pub sent: Option<Nanos>,
    /// In messages.
    number: u64,
    /// Of a read: the buffer is the whole request's.
    is_whole: bool,
}

impl RoutedBacking {
    fn insert(&mut self, id: u64, kind: RequestKind, range: router::Range, is_whole: bool) -> (u32, u64) {
        self.serial = self.serial.wrapping_add(1);
        let part = Part { id, range, kind, is_redirected: false, sent: None, number: 0, is_whole };
        let slot = self.parts.insert(part);
        let number = OF_PART | u64::from(self.serial & (u32::MAX >> 1)) << 32 | slot as u64;
        self.parts[slot].number = number;
        (slot as u32, number)
    }

    /// The coordinator gets a part.
    fn sent(&mut self, reactor: &Reactor, slot: u32) {
        let is_remote = self.link.is_remote();
        let part = &mut self.parts[slot as usize];
        part.is_redirected = true;
        if is_remote {
            let now = reactor.now();
            part.sent = Some(now);
            self.redirected.arrive(part.kind, now);
        }
    }

    fn is_whole(&self, id: u64, piece: Piece) -> bool {
        self.request(id).is_some_and(|pending| piece.end - piece.start == pending.length)
    }

    pub(super) fn begin_direct(&mut self, reactor: &mut Reactor, id: u64, piece: Piece) -> bool {
        let (true, Lease::ReadWrite(at) | Lease::ReadOnly(at)) = (self.lun.is_some(), piece.lease) else {
            self.step(reactor, router::Event::Answered { id, ok: false });
            return true;
        };
        let (range, is_whole) = ((piece.start, piece.end), self.is_whole(id, piece));
        let Some(pending) = self.request(id) else { return true };
        if pending.kind == RequestKind::Read {
            let own = if is_whole { self.request_mut(id).and_then(|one| one.buffer.take()) } else { None };
            let Some(buffer) = own.or_else(|| self.memory((range.1 - range.0) as usize)) else {
                return false;
            };
            let (slot, _) = self.insert(id, RequestKind::Read, range, is_whole);
            if let Some(lun) = &self.lun {
                lun.read(reactor, slot, at, buffer);
            }
        } else {
            let (durable, source) = (pending.durable, pending.source_of(range, &self.zeroes));
            let (slot, _) = self.insert(id, RequestKind::Write, range, is_whole);
            if let Some(lun) = &self.lun {
                lun.write(reactor, slot, at, source, durable);
            }
        }
        self.counts.direct += 1;
        self.counts.splits += u64::from(!is_whole);
        true
    }

    pub(super) fn begin_block(
        &mut self,
        reactor: &mut Reactor,
        id: u64,
        piece: Piece,
        by_file: bool,
    ) -> bool {
        let range = (piece.start, piece.end);
        let Some(data) = self.data(id, range) else { return false };
        let Some(pending) = self.request(id) else { return true };
        let (durable, kind) = (pending.durable, pending.kind);
        let is_split = range.1 - range.0 != pending.length;
        let (slot, number) = self.insert(id, kind, range, false);
        self.sent(reactor, slot);
        let kind = if kind == RequestKind::Read { Kind::Read } else { Kind::Write };
        match by_file {
            true => self.counts.file += 1,
            false => self.counts.block += 1,
        }
        self.counts.splits += u64::from(is_split);
        let message = ToCoordinator::Block { id: number, kind, piece, by_file, durable, data };
        self.ask(reactor, message);
        true
    }

    pub(super) fn begin_flush(&mut self, reactor: &mut Reactor, id: u64, route: Route) -> bool {
        let (slot, number) = self.insert(id, RequestKind::Flush, (0, 0), true);
        match (route, &self.lun) {
            (Route::Direct, Some(lun)) => lun.sync(reactor, slot),
            (Route::Direct, None) => {
                self.parts.remove(slot as usize);
                self.step(reactor, router::Event::Answered { id, ok: false });
            }
            (Route::Block | Route::File, _) => {
                self.sent(reactor, slot);
                self.ask(reactor, ToCoordinator::Flush(number));
            }
        }
        true
    }

    /// I/O of this node has ended.
    pub(super) fn part_ended(
        &mut self,
        reactor: &mut Reactor,
        slot: u32,
        result: Result<u64, i32>,
        buffer: Option<Buffer>,
    ) {
        let Some(part) = self.parts.try_remove(slot as usize) else { return };
        let Part { id, range, is_whole, .. } = part;
        let length = range.1 - range.0;
        let mut ok = result.is_ok();
        if let (Some(buffer), Some(pending)) = (buffer, self.request_mut(id)) {
            ok &= result == Ok(length);
            match &mut pending.buffer {
                whole @ None if is_whole => *whole = Some(buffer),
                Some(whole) if ok => {
                    let start = (range.0 - pending.offset) as usize;
                    whole.bytes_mut()[start..start + buffer.len()].copy_from_slice(buffer.bytes());
                }
                Some(_) | None => {}
            }
        }
        if let Err(errno) = result {
            let error = IoError::from_errno(errno, "direct I/O on a shared LUN");
            tracing::warn!(%error, "this node's path to a shared LUN has failed");
            // Read-only, and "invalid exchange" of a reservation.
            if matches!(errno, libc::EPERM | libc::EACCES | libc::EROFS | libc::EBADE) {
                (self.fenced, self.newly_fenced) = (true, true);
            }
        }
        if let Err(errno) = result
            && range.0 == range.1
            && !is_of_path(errno)
        {
            if self.planted.has(Bug::SwallowFlushError) {
                return self.step(reactor, router::Event::Answered { id, ok: true });
            }
            let error = IoError::from_errno(errno, "flushing a shared LUN");
            return self.step(reactor, router::Event::NotFlushed { id, error });
        }
        if !ok {
            self.probe_at = reactor.now() + PROBE_EVERY;
        }
        self.step(reactor, router::Event::Answered { id, ok });
    }

    /// I/O of the coordinator for this node has ended, or a flush.
    pub(super) fn block_answered(
        &mut self,
        reactor: &mut Reactor,
        number: u64,
        result: Result<(), IoError>,
        data: Option<Buffer>,
    ) -> Result<(), LinkError> {
        let slot = number as u32 as usize;
        let is_its = |part: &Part| part.number == number && part.is_redirected;
        if !self.parts.get(slot).is_some_and(is_its) {
            return Err(LinkError::Unknown);
        }
        let Part { id, range, kind, sent, .. } = self.parts.remove(slot);
        if let Some(sent) = sent {
            self.redirected.complete(kind, range.1 - range.0, sent, reactor.now(), result.is_ok());
        }
        let is_read = self.request(id).is_some_and(|pending| pending.kind == RequestKind::Read);
        match data {
            Some(data) => self.take_data(id, Some(range), &data)?,
            None if is_read && result.is_ok() => return Err(LinkError::NoData),
            None => {}
        }
        match result {
            Err(error) if range.0 == range.1 => self.step(reactor, router::Event::NotFlushed { id, error }),
            result => self.step(reactor, router::Event::Answered { id, ok: result.is_ok() }),
        }
        Ok(())
    }
}

/// The error is that of the way to the LUN, or of a fence: the LUN itself has kept what it had.
fn is_of_path(errno: i32) -> bool {
    const ALL: [i32; 11] = [
        libc::EPERM,
        libc::EACCES,
        libc::EROFS,
        libc::EBADE,
        libc::ENOLINK,
        libc::ENODEV,
        libc::ENXIO,
        libc::ETIMEDOUT,
        libc::EHOSTDOWN,
        libc::ENOTCONN,
        libc::ESHUTDOWN,
    ];
    ALL.contains(&errno)
}
