//! The requests of a disk, and the commands that each becomes: one at a time, as large as the server takes it.

use std::rc::Rc;

use weir_block::{Buffer, Extent, ExtentState, Region, Tag};
use weir_nbd::client::{CommandFlags, Export, NbdCommand};

use super::body::{Data, Source};
use super::kept::Content;

/// Largest part of a zero request, in bytes.
const ZERO_PIECE: u64 = 128 << 20;

/// Largest part of a zero request that is written, in bytes.
const ZERO_WRITE: u64 = 4 << 20;

/// Who waits for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// A client of the disk, or a load.
    Client(Tag),
    /// Destage: the write log has its bytes until they are flushed.
    Destage(Tag),
    /// The backing itself: it writes again what may be lost, from this byte on.
    Again(u64),
    /// The backing itself: a flush for all who wait for one.
    Flush,
}

/// What is wanted.
#[derive(Debug)]
pub(super) enum Work {
    /// The buffer is on the connection while the command is.
    Read(Option<Buffer>),
    Write {
        source: Source,
        fua: bool,
    },
    Zero {
        fua: bool,
        may_unmap: bool,
        fast_only: bool,
    },
    Flush,
    Extents,
}

/// A request that was accepted and not answered.
#[derive(Debug)]
pub(super) struct Pending {
    pub whose: Whose,
    pub work: Work,
    pub offset: u64,
    pub length: u64,
    /// The first byte that is not done.
    pub next: u64,
    /// Of the command that is on the connection; 0 if none is.
    pub sent: u64,
    pub is_sent: bool,
    /// By age.
    pub serial: u64,
}

impl Pending {
    pub fn range(&self) -> (u64, u64) {
        (self.offset, self.offset + self.length)
    }

    pub fn changes_data(&self) -> bool {
        matches!(self.work, Work::Write { .. } | Work::Zero { .. })
    }

    /// Everything of it is done again.
    pub fn restart(&mut self) {
        (self.is_sent, self.sent, self.next) = (false, 0, self.offset);
    }

    /// The content that it leaves in its range, for a while in which the server may lose it.
    pub fn content(&self) -> Option<Content> {
        match &self.work {
            Work::Write { source: Source::Buffer(buffer, from), .. } => {
                Some(Content::Data(Rc::clone(buffer), *from))
            }
            Work::Zero { may_unmap, .. } => Some(Content::Zeroes { may_unmap: *may_unmap }),
            _ => None,
        }
    }

    /// Whether it is to be durable when it is answered.
    pub fn fua(&self) -> bool {
        matches!(self.work, Work::Write { fua: true, .. } | Work::Zero { fua: true, .. })
    }
}

/// What the server takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Largest read or write, a multiple of the disk's logical block.
    most: u64,
    fua: bool,
    fast_zero: bool,
    /// It zeroes ranges itself, and has not refused to.
    pub zeroes: bool,
    /// It tells what is allocated.
    pub extents: bool,
    wide: bool,
    block: u64,
}

impl Limits {
    pub fn of(export: &Export, logical_block: u32) -> Limits {
        let block = u64::from(logical_block);
        Limits {
            most: u64::from(export.maximum_block) / block * block,
            fua: export.can_fua(),
            fast_zero: export.can_fast_zero(),
            zeroes: export.can_write_zeroes(),
            extents: export.allocation_context.is_some(),
            wide: export.extended_headers,
            block,
        }
    }

    /// Whether an answer with FUA is a durable one. Without it, a flush follows.
    pub fn makes_durable(&self, fua: bool) -> bool {
        fua && self.fua
    }

    /// Whether the server cannot promise to zero faster than by being written to.
    pub fn lacks_fast_zero(&self) -> bool {
        !(self.zeroes && self.fast_zero)
    }

    /// The next command of a request, and its data.
    pub fn command(&self, request: &mut Pending, zeroes: &Rc<Region>) -> (NbdCommand, Data) {
        let (offset, left) = (request.next, request.offset + request.length - request.next);
        let done = (request.next - request.offset) as usize;
        let flags = |fua: bool| CommandFlags { fua: fua && self.fua, ..CommandFlags::NONE };
        let (command, data) = match &mut request.work {
            Work::Read(buffer) => {
                let length = left.min(self.most) as u32;
                let data = buffer.take().map_or(Data::None, |buffer| Data::Into(buffer, done));
                (NbdCommand::Read { offset, length }, data)
            }
            Work::Write { source, fua } => {
                let length = left.min(self.most) as u32;
                let data = Data::From(source.clone(), done);
                (NbdCommand::Write { offset, length, flags: flags(*fua) }, data)
            }
            Work::Zero { fua, may_unmap, fast_only } if self.zeroes => {
                let flags = CommandFlags {
                    no_hole: !*may_unmap,
                    fast_zero: *fast_only && self.fast_zero,
                    ..flags(*fua)
                };
                let length = left.min(ZERO_PIECE);
                (NbdCommand::WriteZeroes { offset, length, flags }, Data::None)
            }
            Work::Zero { fua, .. } => {
                let length = left.min(self.most).min(ZERO_WRITE) as u32;
                let data = Data::From(Source::Zeroes(Rc::clone(zeroes)), 0);
                (NbdCommand::Write { offset, length, flags: flags(*fua) }, data)
            }
            Work::Flush => (NbdCommand::Flush, Data::None),
            Work::Extents => {
                let most = if self.wide { u64::MAX } else { u64::from(u32::MAX) } / self.block * self.block;
                (NbdCommand::BlockStatus { offset, length: left.min(most) }, Data::None)
            }
        };
        request.sent = match command {
            NbdCommand::BlockStatus { .. } | NbdCommand::Flush => left,
            command => command.range().1,
        };
        request.is_sent = true;
        (command, data)
    }

    /// The server's answer about `length` bytes from `offset`, in whole blocks; what it does not tell counts as allocated.
    pub fn extents(&self, found: &[Extent], (offset, length): (u64, u64)) -> Vec<Extent> {
        let end = offset + length;
        let mut extents: Vec<Extent> = Vec::new();
        let mut push = |from: u64, to: u64, state| match extents.last_mut() {
            _ if from >= to => {}
            Some(last) if last.state == state => last.length = to - last.offset,
            _ => extents.push(Extent { offset: from, length: to - from, state }),
        };
        let mut at = offset;
        for extent in found {
            let (from, to) = (extent.offset.max(at), extent.offset.saturating_add(extent.length).min(end));
            if extent.state == ExtentState::Allocated || from >= to {
                continue;
            }
            // Of a block that is only in part a hole, the rest is data.
            let (from, to) = (from.next_multiple_of(self.block), to / self.block * self.block);
            if from < to {
                push(at, from, ExtentState::Allocated);
                push(from, to, extent.state);
                at = to;
            }
        }
        // The answer may end before what was asked for; what it has not said is asked for again.
        let told = found.last().map_or(end, |last| last.offset.saturating_add(last.length).min(end));
        let told = if told >= at + self.block || at == offset { told.max(offset + self.block) } else { at };
        push(at, told.next_multiple_of(self.block).min(end), ExtentState::Allocated);
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            most: 8192,
            fua: true,
            fast_zero: false,
            zeroes: true,
            extents: true,
            wide: false,
            block: 512,
        }
    }

    fn pending(work: Work, length: u64) -> Pending {
        let whose = Whose::Client(Tag(1));
        Pending { whose, work, offset: 4096, length, next: 4096, sent: 0, is_sent: false, serial: 0 }
    }

    #[test]
    fn a_request_is_split_at_what_the_server_takes() {
        let zeroes = Rc::new(Region::new(1).unwrap());
        let mut zero =
            pending(Work::Zero { fua: true, may_unmap: false, fast_only: false }, ZERO_PIECE + 512);
        let (command, _) = limits().command(&mut zero, &zeroes);
        let flags = CommandFlags { no_hole: true, ..CommandFlags::FUA };
        assert_eq!(command, NbdCommand::WriteZeroes { offset: 4096, length: ZERO_PIECE, flags });
        zero.next += zero.sent;
        let (command, _) = limits().command(&mut zero, &zeroes);
        assert_eq!(command, NbdCommand::WriteZeroes { offset: 4096 + ZERO_PIECE, length: 512, flags });
        // Without the command it is written, and without FUA nothing asks for it.
        let poor = Limits { fua: false, zeroes: false, ..limits() };
        zero.restart();
        let (command, data) = poor.command(&mut zero, &zeroes);
        assert_eq!(command, NbdCommand::Write { offset: 4096, length: 8192, flags: CommandFlags::NONE });
        assert!(matches!(data, Data::From(Source::Zeroes(_), 0)));
        assert!(limits().lacks_fast_zero() && poor.lacks_fast_zero());
        let mut long = pending(Work::Extents, 8 << 30);
        let (command, _) = limits().command(&mut long, &zeroes);
        assert_eq!(command.range(), (4096, u64::from(u32::MAX) / 512 * 512));
    }

    #[test]
    fn only_whole_blocks_are_holes() {
        let found = |runs: &[(u64, u64, ExtentState)]| {
            let extent = |&(offset, length, state)| Extent { offset, length, state };
            limits().extents(&runs.iter().map(extent).collect::<Vec<_>>(), (1024, 4096))
        };
        let told = |extents: Vec<Extent>| {
            extents.into_iter().map(|one| (one.offset, one.length, one.state)).collect::<Vec<_>>()
        };
        use ExtentState::{Allocated, Hole, Zero};
        assert_eq!(told(found(&[])), [(1024, 4096, Allocated)], "it says nothing");
        assert_eq!(told(found(&[(1024, 1 << 40, Hole)])), [(1024, 4096, Hole)]);
        assert_eq!(
            told(found(&[(1024, 700, Allocated), (1724, 2000, Zero), (3724, 9999, Allocated)])),
            [(1024, 1024, Allocated), (2048, 1536, Zero), (3584, 1536, Allocated)]
        );
        // It may tell less than was asked for, but never nothing.
        assert_eq!(told(found(&[(1024, 1024, Hole)])), [(1024, 1024, Hole)]);
        assert_eq!(told(found(&[(1024, 100, Hole)])), [(1024, 512, Allocated)]);
        assert_eq!(told(found(&[(0, 10, Hole)])), [(1024, 512, Allocated)], "of another range");
        assert_eq!(told(found(&[(u64::MAX, 10, Hole)])), [(1024, 4096, Allocated)]);
    }
}
