//! One request on a connection, from its header to its answer.

use std::fmt;

use weir_block::{Extent, ExtentState};

use super::body::Body;
use crate::protocol::{command, command_flag, extent_flag};

/// Most extents in the answer to one block status: as many as the largest chunk has.
const MOST_EXTENTS: usize = (1 << 20) / 8;

/// Room for so many stays with a slot.
const USUAL_EXTENTS: usize = 1024;

/// Most pieces of a read at once with gaps between them.
const MOST_PARTS: usize = 64;

/// Flags of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandFlags {
    /// Answer only once the data is durable.
    pub fua: bool,
    /// Zeroed ranges stay allocated.
    pub no_hole: bool,
    /// Zero fast or fail.
    pub fast_zero: bool,
}

impl CommandFlags {
    /// No flag.
    pub const NONE: CommandFlags = CommandFlags { fua: false, no_hole: false, fast_zero: false };
    /// FUA only.
    pub const FUA: CommandFlags = CommandFlags { fua: true, ..CommandFlags::NONE };

    fn bits(self) -> u16 {
        let bit = |on, bit| if on { bit } else { 0 };
        bit(self.fua, command_flag::FUA)
            | bit(self.no_hole, command_flag::NO_HOLE)
            | bit(self.fast_zero, command_flag::FAST_ZERO)
    }
}

/// A command. Offsets and lengths are in bytes. The data of a write is in the slot's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdCommand {
    /// Read a range.
    Read {
        /// From the start of the export.
        offset: u64,
        /// At most 32 MiB.
        length: u32,
    },
    /// Write a range.
    Write {
        /// From the start of the export.
        offset: u64,
        /// At most 32 MiB.
        length: u32,
        /// FUA or none.
        flags: CommandFlags,
    },
    /// Make answered writes durable.
    Flush,
    /// Make a range read as zeroes.
    WriteZeroes {
        /// From the start of the export.
        offset: u64,
        /// Below 4 GiB without extended headers.
        length: u64,
        /// Any.
        flags: CommandFlags,
    },
    /// Discard a range.
    Trim {
        /// From the start of the export.
        offset: u64,
        /// Below 4 GiB without extended headers.
        length: u64,
        /// FUA or none.
        flags: CommandFlags,
    },
    /// Query the allocation of a range.
    BlockStatus {
        /// From the start of the export.
        offset: u64,
        /// Below 4 GiB without extended headers.
        length: u64,
    },
}

impl NbdCommand {
    /// First byte and length; `(0, 0)` for a flush.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        match *self {
            NbdCommand::Read { offset, length } | NbdCommand::Write { offset, length, .. } => {
                (offset, length.into())
            }
            NbdCommand::WriteZeroes { offset, length, .. }
            | NbdCommand::Trim { offset, length, .. }
            | NbdCommand::BlockStatus { offset, length } => (offset, length),
            NbdCommand::Flush => (0, 0),
        }
    }

    /// The number on the wire and the flags.
    pub(super) fn wire(&self) -> (u16, u16) {
        match *self {
            NbdCommand::Read { .. } => (command::READ, 0),
            NbdCommand::Write { flags, .. } => (command::WRITE, flags.bits()),
            NbdCommand::Flush => (command::FLUSH, 0),
            NbdCommand::WriteZeroes { flags, .. } => (command::WRITE_ZEROES, flags.bits()),
            NbdCommand::Trim { flags, .. } => (command::TRIM, flags.bits()),
            NbdCommand::BlockStatus { .. } => (command::BLOCK_STATUS, 0),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            NbdCommand::Read { .. } => "read",
            NbdCommand::Write { .. } => "write",
            NbdCommand::Flush => "flush",
            NbdCommand::WriteZeroes { .. } => "write_zeroes",
            NbdCommand::Trim { .. } => "trim",
            NbdCommand::BlockStatus { .. } => "block_status",
        }
    }
}

impl fmt::Display for NbdCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.range() {
            (0, 0) => f.write_str(self.name()),
            (offset, length) => write!(f, "{} of {length} bytes at {offset}", self.name()),
        }
    }
}

/// Room for one request and its data.
#[derive(Debug)]
pub(super) struct Slot<D = Vec<u8>> {
    pub command: NbdCommand,
    /// Counts the requests in this slot, to tell an answer to an earlier one from the current one's.
    pub round: u32,
    pub busy: bool,
    /// The first error of the reply, 0 for none.
    pub errno: u32,
    /// Bytes of a read that have arrived.
    pub arrived: u32,
    /// Payload of a read or write.
    pub data: D,
    /// The extents of a block status.
    pub extents: Vec<Extent>,
    /// Ranges of a read's data that the server has begun to send, in order, with gaps between them.
    parts: Vec<(u32, u32)>,
}

impl<D: Body> Slot<D> {
    pub fn new() -> Slot<D>
    where
        D: Default,
    {
        Slot {
            command: NbdCommand::Flush,
            round: 0,
            busy: false,
            errno: 0,
            arrived: 0,
            data: D::default(),
            extents: Vec::new(),
            parts: Vec::new(),
        }
    }

    pub fn cookie(&self, index: u32) -> u64 {
        u64::from(self.round) << 32 | u64::from(index)
    }

    /// Prepares the slot for a new request.
    pub fn begin(&mut self, command: NbdCommand) {
        self.command = command;
        self.round = self.round.wrapping_add(1);
        self.busy = true;
        self.errno = 0;
        self.arrived = 0;
        self.extents.clear();
        self.extents.shrink_to(USUAL_EXTENTS);
        self.parts.clear();
        if let NbdCommand::Read { length, .. } | NbdCommand::Write { length, .. } = command {
            self.data.make_room(length as usize);
        }
    }

    /// The server sends so many bytes of a read from this one on. Each byte once: the answer would else have a gap that nobody fills.
    pub fn claim(&mut self, at: usize, length: usize) -> Result<(), &'static str> {
        let (start, end) = (at as u32, (at + length) as u32);
        if length == 0 {
            return Ok(());
        }
        let next = self.parts.partition_point(|part| part.1 <= start);
        if self.parts.get(next).is_some_and(|part| part.0 < end) {
            return Err("data that was sent before");
        }
        let joins = self.parts.get(next).is_some_and(|part| part.0 == end);
        match next.checked_sub(1).filter(|&before| self.parts[before].1 == start) {
            Some(before) if joins => self.parts[before].1 = self.parts.remove(next).1,
            Some(before) => self.parts[before].1 = end,
            None if joins => self.parts[next].0 = start,
            None => self.parts.insert(next, (start, end)),
        }
        if self.parts.len() > MOST_PARTS { Err("data in too many pieces") } else { Ok(()) }
    }

    /// Appends an extent of the context `base:allocation`; merges it with a previous one in the same state. A hole that need not read
    /// as zeroes is not one for us.
    pub fn push_extent(&mut self, length: u64, flags: u64) -> Result<(), &'static str> {
        let has = |flag: u32| flags & u64::from(flag) != 0;
        let state = match (has(extent_flag::HOLE), has(extent_flag::ZERO)) {
            (true, true) => ExtentState::Hole,
            (false, true) => ExtentState::Zero,
            (_, false) => ExtentState::Allocated,
        };
        if length == 0 {
            return Err("an extent without a byte");
        }
        match self.extents.last_mut() {
            Some(last) if last.state == state => last.length = last.length.saturating_add(length),
            last => {
                let offset =
                    last.map_or(self.command.range().0, |last| last.offset.saturating_add(last.length));
                self.extents.push(Extent { offset, length, state });
            }
        }
        if self.extents.len() > MOST_EXTENTS {
            return Err("a block status with too many extents");
        }
        Ok(())
    }
}
