//! Decoder of replies: simple, structured and extended. Does no I/O.

use zerocopy::FromBytes;

use super::body::Body;
use super::slot::{NbdCommand, Slot};
use crate::protocol::{
    ChunkHeader, EXTENDED_REPLY_MAGIC, ExtendedReply, ExtendedStatusDescriptor, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, SimpleReply, StatusDescriptor, reply_flag, reply_type,
};

/// Largest chunk without data that the decoder accepts, in bytes; bounds a block status.
pub(super) const LARGEST_CONTROL: usize = 1 << 20;

/// An answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its slot, free again.
    pub slot: u32,
    /// The protocol's error number, 0 for success.
    pub errno: u32,
}

/// The decoder's position in the stream of replies.
#[derive(Debug)]
pub(super) struct Decoder {
    /// Block status chunks carry this number for `base:allocation`.
    context: Option<u32>,
    phase: Phase,
    /// Headers have the extended form.
    extended: bool,
    /// Copy data out. A load without verification does not need it.
    keep_data: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// At the header of a reply or chunk.
    Head,
    /// Inside the data of a read.
    Data {
        slot: u32,
        /// Offset in the slot's buffer.
        at: usize,
        left: usize,
        /// The reply ends with this data.
        last: bool,
    },
}

/// The result of a parser at the start of its input.
enum Parsed {
    /// It consumed so many bytes.
    Taken(usize),
    /// It needs more.
    Short,
}

impl Decoder {
    pub fn new(context: Option<u32>, extended: bool, keep_data: bool) -> Decoder {
        Decoder { context, phase: Phase::Head, extended, keep_data }
    }

    /// Consumes complete parts of `input`; returns the number of bytes consumed. The caller must offer the rest again, together
    /// with the bytes that follow it.
    pub fn feed<D: Body>(
        &mut self,
        input: &[u8],
        slots: &mut [Slot<D>],
        done: &mut Vec<Done>,
    ) -> Result<usize, &'static str> {
        let mut taken = 0;
        loop {
            let rest = &input[taken..];
            match self.phase {
                Phase::Head => match self.head(rest, slots, done)? {
                    Parsed::Taken(bytes) => taken += bytes,
                    Parsed::Short => return Ok(taken),
                },
                Phase::Data { slot, at, left, .. } => {
                    let bytes = left.min(rest.len());
                    if bytes == 0 {
                        return Ok(taken);
                    }
                    if self.keep_data {
                        slots[slot as usize].data.target()[at..at + bytes].copy_from_slice(&rest[..bytes]);
                    }
                    self.data_arrived(bytes, slots, done)?;
                    taken += bytes;
                }
            }
        }
    }

    /// The place of the next data (slot, first and last byte), to receive it there directly.
    pub fn target(&self) -> Option<(u32, usize, usize)> {
        match self.phase {
            Phase::Data { slot, at, left, .. } => Some((slot, at, at + left)),
            Phase::Head => None,
        }
    }

    /// `bytes` of data are in the slot's buffer.
    pub fn data_arrived<D: Body>(
        &mut self,
        bytes: usize,
        slots: &mut [Slot<D>],
        done: &mut Vec<Done>,
    ) -> Result<(), &'static str> {
        let Phase::Data { slot, at, left, last } = self.phase else { return Ok(()) };
        arrive(&mut slots[slot as usize], bytes)?;
        self.phase = Phase::Data { slot, at: at + bytes, left: left - bytes, last };
        if left == bytes {
            self.phase = Phase::Head;
            if last {
                finish(slot, slots, done)?;
            }
        }
        Ok(())
    }

    fn head<D: Body>(
        &mut self,
        input: &[u8],
        slots: &mut [Slot<D>],
        done: &mut Vec<Done>,
    ) -> Result<Parsed, &'static str> {
        let Some((magic, _)) = input.split_first_chunk::<4>() else { return Ok(Parsed::Short) };
        match (u32::from_be_bytes(*magic), self.extended) {
            (SIMPLE_REPLY_MAGIC, false) => self.simple(input, slots, done),
            (STRUCTURED_REPLY_MAGIC, false) | (EXTENDED_REPLY_MAGIC, true) => self.chunk(input, slots, done),
            (SIMPLE_REPLY_MAGIC | STRUCTURED_REPLY_MAGIC, true) => {
                Err("a compact reply although extended headers were agreed on")
            }
            _ => Err("a reply starts with an unknown magic number"),
        }
    }

    /// "Simple reply message".
    fn simple<D: Body>(
        &mut self,
        input: &[u8],
        slots: &mut [Slot<D>],
        done: &mut Vec<Done>,
    ) -> Result<Parsed, &'static str> {
        let Ok((reply, _)) = SimpleReply::read_from_prefix(input) else { return Ok(Parsed::Short) };
        let index = find(reply.cookie.get(), slots)?;
        let slot = &mut slots[index as usize];
        slot.errno = reply.error.get();
        match slot.command {
            NbdCommand::Read { length, .. } if slot.errno == 0 => {
                slot.claim(0, length as usize)?;
                self.phase = Phase::Data { slot: index, at: 0, left: length as usize, last: true };
            }
            _ => finish(index, slots, done)?,
        }
        Ok(Parsed::Taken(size_of::<SimpleReply>()))
    }

    /// "Structured reply chunk message".
    fn chunk<D: Body>(
        &mut self,
        input: &[u8],
        slots: &mut [Slot<D>],
        done: &mut Vec<Done>,
    ) -> Result<Parsed, &'static str> {
        let Some((chunk, body)) = Chunk::read(input, self.extended) else { return Ok(Parsed::Short) };
        let (length, last) = (usize::try_from(chunk.length).unwrap_or(usize::MAX), chunk.last);
        let head = input.len() - body.len();
        let index = find(chunk.cookie, slots)?;
        if chunk.offset.is_some_and(|offset| offset != slots[index as usize].command.range().0) {
            return Err("an extended reply with another offset than the request's");
        }
        if chunk.kind == reply_type::OFFSET_DATA {
            return self.offset_data(index, body, length, last, slots).map(|parsed| match parsed {
                Parsed::Taken(bytes) => Parsed::Taken(head + bytes),
                Parsed::Short => Parsed::Short,
            });
        }
        if length > LARGEST_CONTROL {
            return Err("a chunk that is not data is larger than 1 MiB");
        }
        let Some(body) = body.get(..length) else { return Ok(Parsed::Short) };
        let slot = &mut slots[index as usize];
        match chunk.kind {
            reply_type::NONE => {}
            reply_type::OFFSET_HOLE => hole(slot, body)?,
            reply_type::BLOCK_STATUS if !self.extended => self.block_status(slot, body)?,
            reply_type::BLOCK_STATUS_EXT if self.extended => self.block_status_ext(slot, body)?,
            kind if kind & reply_type::ERROR_BIT != 0 => {
                let (number, _) = body.split_first_chunk::<4>().ok_or("an error chunk without a number")?;
                slot.errno = u32::from_be_bytes(*number);
                if slot.errno == 0 {
                    return Err("an error chunk with error 0");
                }
            }
            _ => return Err("a structured reply of unknown type"),
        }
        if last {
            finish(index, slots, done)?;
        }
        Ok(Parsed::Taken(head + length))
    }

    fn offset_data<D: Body>(
        &mut self,
        index: u32,
        body: &[u8],
        length: usize,
        last: bool,
        slots: &mut [Slot<D>],
    ) -> Result<Parsed, &'static str> {
        let data = length.checked_sub(8).filter(|&data| data > 0).ok_or("a data chunk without data")?;
        let Some((offset, _)) = body.split_first_chunk::<8>() else { return Ok(Parsed::Short) };
        let at = offset_in_buffer(&slots[index as usize], u64::from_be_bytes(*offset), data)?;
        slots[index as usize].claim(at, data)?;
        self.phase = Phase::Data { slot: index, at, left: data, last };
        Ok(Parsed::Taken(8))
    }

    fn block_status<D: Body>(&self, slot: &mut Slot<D>, body: &[u8]) -> Result<(), &'static str> {
        let (context, descriptors) =
            body.split_first_chunk::<4>().ok_or("a block status without a context")?;
        if Some(u32::from_be_bytes(*context)) != self.context {
            return Err("a block status of a context that was not asked for");
        }
        let descriptors = <[StatusDescriptor]>::ref_from_bytes(descriptors)
            .map_err(|_| "a block status that does not divide into descriptors")?;
        for descriptor in descriptors {
            slot.push_extent(u64::from(descriptor.length.get()), descriptor.flags.get().into())?;
        }
        Ok(())
    }

    fn block_status_ext<D: Body>(&self, slot: &mut Slot<D>, body: &[u8]) -> Result<(), &'static str> {
        let (context, body) = body.split_first_chunk::<4>().ok_or("a block status without a context")?;
        if Some(u32::from_be_bytes(*context)) != self.context {
            return Err("a block status of a context that was not asked for");
        }
        let (count, descriptors) =
            body.split_first_chunk::<4>().ok_or("a block status without a number of extents")?;
        let descriptors = <[ExtendedStatusDescriptor]>::ref_from_bytes(descriptors)
            .map_err(|_| "a block status that does not divide into descriptors")?;
        if descriptors.len() != u32::from_be_bytes(*count) as usize {
            return Err("a block status with another number of extents than it says");
        }
        for descriptor in descriptors {
            slot.push_extent(descriptor.length.get(), descriptor.flags.get())?;
        }
        Ok(())
    }
}

/// The header of a chunk, in either form.
struct Chunk {
    kind: u16,
    cookie: u64,
    /// That of the request, in the extended form.
    offset: Option<u64>,
    /// Bytes that follow.
    length: u64,
    last: bool,
}

impl Chunk {
    /// Also returns the bytes after it; `None` when it is incomplete.
    fn read(input: &[u8], extended: bool) -> Option<(Chunk, &[u8])> {
        if extended {
            let (header, body) = ExtendedReply::read_from_prefix(input).ok()?;
            let last = header.flags.get() & reply_flag::DONE != 0;
            let (cookie, offset) = (header.cookie.get(), Some(header.offset.get()));
            return Some((
                Chunk { kind: header.kind.get(), cookie, offset, length: header.length.get(), last },
                body,
            ));
        }
        let (header, body) = ChunkHeader::read_from_prefix(input).ok()?;
        let last = header.flags.get() & reply_flag::DONE != 0;
        let (cookie, length) = (header.cookie.get(), header.length.get().into());
        Some((Chunk { kind: header.kind.get(), cookie, offset: None, length, last }, body))
    }
}

/// "OFFSET_HOLE": part of a read is zeroes.
fn hole<D: Body>(slot: &mut Slot<D>, body: &[u8]) -> Result<(), &'static str> {
    let malformed = "a hole chunk of the wrong length";
    let (offset, length) = body.split_first_chunk::<8>().ok_or(malformed)?;
    let length = u32::from_be_bytes(length.try_into().map_err(|_| malformed)?) as usize;
    let at = offset_in_buffer(slot, u64::from_be_bytes(*offset), length)?;
    slot.claim(at, length)?;
    slot.data.target()[at..at + length].fill(0);
    arrive(slot, length)
}

/// So many bytes of a read have arrived. Not more than were asked for: a server could else send the same ones for ever.
fn arrive<D: Body>(slot: &mut Slot<D>, bytes: usize) -> Result<(), &'static str> {
    let (_, asked) = slot.command.range();
    let arrived = u64::from(slot.arrived) + bytes as u64;
    if arrived > asked {
        return Err("more data than was asked for");
    }
    slot.arrived = arrived as u32;
    Ok(())
}

/// The place in the slot's buffer of `length` bytes from `offset` of the export.
fn offset_in_buffer<D: Body>(slot: &Slot<D>, offset: u64, length: usize) -> Result<usize, &'static str> {
    let NbdCommand::Read { offset: start, length: asked } = slot.command else {
        return Err("data in answer to a request that is not a read");
    };
    let fits = |at: &u64| at.checked_add(length as u64).is_some_and(|end| end <= asked.into());
    let at = offset.checked_sub(start).filter(fits);
    at.map(|at| at as usize).ok_or("data outside the range that was asked for")
}

fn find<D: Body>(cookie: u64, slots: &[Slot<D>]) -> Result<u32, &'static str> {
    let index = cookie as u32;
    match slots.get(index as usize) {
        Some(slot) if slot.busy && slot.cookie(index) == cookie => Ok(index),
        _ => Err("an answer to a request that is not in flight"),
    }
}

fn finish<D: Body>(index: u32, slots: &mut [Slot<D>], done: &mut Vec<Done>) -> Result<(), &'static str> {
    let slot = &mut slots[index as usize];
    if let NbdCommand::Read { length, .. } = slot.command
        && slot.errno == 0
        && slot.arrived != length
    {
        return Err("the answer to a read does not cover the range that was asked for");
    }
    slot.busy = false;
    done.push(Done { slot: index, errno: slot.errno });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weir_block::{Extent, ExtentState};
    use zerocopy::IntoBytes;

    fn slots(commands: &[NbdCommand]) -> Vec<Slot> {
        let begin = |&command| {
            let mut slot = Slot::new();
            slot.begin(command);
            slot
        };
        commands.iter().map(begin).collect()
    }

    fn simple(cookie: u64, errno: u32, data: &[u8]) -> Vec<u8> {
        let reply =
            SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: errno.into(), cookie: cookie.into() };
        [reply.as_bytes(), data].concat()
    }

    fn chunk(cookie: u64, flags: u16, kind: u16, body: &[&[u8]]) -> Vec<u8> {
        let body = body.concat();
        let header = ChunkHeader {
            magic: STRUCTURED_REPLY_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: cookie.into(),
            length: (body.len() as u32).into(),
        };
        [header.as_bytes(), &body].concat()
    }

    /// Replies to: read (simple), flush (error), read in two chunks with a hole, block status.
    fn conversation() -> (Vec<NbdCommand>, Vec<u8>) {
        let commands = vec![
            NbdCommand::Read { offset: 4096, length: 1000 },
            NbdCommand::Flush,
            NbdCommand::Read { offset: 0, length: 900 },
            NbdCommand::BlockStatus { offset: 512, length: 4096 },
        ];
        let cookies: Vec<u64> =
            slots(&commands).iter().zip(0..).map(|(slot, index)| slot.cookie(index)).collect();
        let status: Vec<u8> =
            [[0, 0, 0, 7], [0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 4, 0], [0; 4], [0, 0, 1, 0], [0; 4]].concat();
        let stream = [
            chunk(cookies[2], 0, reply_type::OFFSET_HOLE, &[&300u64.to_be_bytes(), &600u32.to_be_bytes()]),
            simple(cookies[0], 0, &[5; 1000]),
            chunk(cookies[3], reply_flag::DONE, reply_type::BLOCK_STATUS, &[&status]),
            simple(cookies[1], 28, &[]),
            chunk(cookies[2], reply_flag::DONE, reply_type::OFFSET_DATA, &[&0u64.to_be_bytes(), &[6; 300]]),
        ];
        (commands, stream.concat())
    }

    fn check(slots: &[Slot], done: &[Done]) {
        let expected = [(0, 0), (3, 0), (1, 28), (2, 0)].map(|(slot, errno)| Done { slot, errno });
        assert_eq!(done, expected);
        assert_eq!(slots[0].data[..1000], [5; 1000]);
        assert_eq!(slots[2].data[..900], [[6; 300], [0; 300], [0; 300]].concat());
        let extents = [(512, 512, ExtentState::Hole), (1024, 1280, ExtentState::Allocated)];
        assert_eq!(slots[3].extents, extents.map(|(offset, length, state)| Extent { offset, length, state }));
    }

    proptest! {
        #[test]
        fn any_cut_of_the_stream_gives_the_same_replies(cuts in prop::collection::vec(1usize..700, 1..40)) {
            let (commands, stream) = conversation();
            let mut slots = slots(&commands);
            slots[2].data.fill(1);
            let mut decoder = Decoder::new(Some(7), false, true);
            let (mut done, mut inbox, mut next) = (Vec::new(), Vec::new(), 0);
            for cut in cuts.iter().cycle() {
                if next == stream.len() {
                    break;
                }
                let end = stream.len().min(next + cut);
                inbox.extend_from_slice(&stream[next..end]);
                next = end;
                let taken = decoder.feed(&inbox, &mut slots, &mut done).unwrap();
                inbox.drain(..taken);
            }
            prop_assert!(inbox.is_empty());
            check(&slots, &done);
        }

        #[test]
        fn no_bytes_bring_it_down(noise: Vec<u8>, at in 0usize..1500, kind in 0u16..9, flags in 0u16..2) {
            let (commands, mut stream) = conversation();
            let cookie = slots(&commands)[2].cookie(2);
            let at = at.min(stream.len());
            stream.splice(at..(at + noise.len()).min(stream.len()), noise.clone());
            let forged = chunk(cookie, flags, kind, &[&noise]);
            for input in [stream, forged] {
                let mut slots = slots(&commands);
                let _ = Decoder::new(Some(7), false, true).feed(&input, &mut slots, &mut Vec::new());
            }
        }
    }

    #[test]
    fn violations_are_named() {
        let read = [NbdCommand::Read { offset: 0, length: 512 }];
        let cookie = slots(&read)[0].cookie(0);
        let cases = [
            (vec![0; 16], "magic"),
            (simple(cookie + (1 << 32), 0, &[]), "not in flight"),
            (simple(77, 0, &[]), "not in flight"),
            (chunk(cookie, 1, reply_type::OFFSET_DATA, &[&512u64.to_be_bytes(), &[1]]), "outside"),
            (chunk(cookie, 1, reply_type::NONE, &[]), "does not cover"),
            (chunk(cookie, 1, 99, &[]), "unknown type"),
            (
                chunk(cookie, 0, reply_type::OFFSET_DATA, &[&0u64.to_be_bytes(), &[1; 256]]).repeat(2),
                "before",
            ),
            (chunk(cookie, 1, reply_type::BLOCK_STATUS, &[&[0; 12]]), "not asked for"),
        ];
        for (input, expected) in cases {
            let error =
                Decoder::new(None, false, true).feed(&input, &mut slots(&read), &mut Vec::new()).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
    fn extended(cookie: u64, flags: u16, kind: u16, offset: u64, body: &[&[u8]]) -> Vec<u8> {
        let body = body.concat();
        let header = ExtendedReply {
            magic: EXTENDED_REPLY_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: cookie.into(),
            offset: offset.into(),
            length: (body.len() as u64).into(),
        };
        [header.as_bytes(), &body].concat()
    }

    #[test]
    fn extended_replies_are_understood_however_they_are_cut() {
        let commands = [
            NbdCommand::Read { offset: 4096, length: 600 },
            NbdCommand::Flush,
            NbdCommand::BlockStatus { offset: 0, length: 6 << 32 },
        ];
        let cookie = |index: u32| slots(&commands)[index as usize].cookie(index);
        // The first is byte by byte as in the document.
        let golden = [
            &[0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 6, 0, 0, 0, 1, 0, 0, 0, 2][..],
            &[0; 8],
            &[0, 0, 0, 0, 0, 0, 0, 40, 0, 0, 0, 7, 0, 0, 0, 2],
            &[0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3],
            &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ];
        let stream = [
            golden.concat(),
            extended(cookie(0), 0, reply_type::OFFSET_DATA, 4096, &[&4196u64.to_be_bytes(), &[6; 500]]),
            extended(cookie(1), reply_flag::DONE, reply_type::NONE, 0, &[]),
            extended(
                cookie(0),
                1,
                reply_type::OFFSET_HOLE,
                4096,
                &[&4096u64.to_be_bytes(), &100u32.to_be_bytes()],
            ),
        ]
        .concat();
        for cut in [1, 7, 32, 33, 400, stream.len()] {
            let mut slots = slots(&commands);
            slots[0].data.fill(1);
            let mut decoder = Decoder::new(Some(7), true, true);
            let (mut done, mut inbox) = (Vec::new(), Vec::new());
            for piece in stream.chunks(cut) {
                inbox.extend_from_slice(piece);
                let taken = decoder.feed(&inbox, &mut slots, &mut done).unwrap();
                inbox.drain(..taken);
            }
            assert!(inbox.is_empty());
            assert_eq!(done, [2, 1, 0].map(|slot| Done { slot, errno: 0 }));
            assert_eq!(slots[0].data[..600], [[0; 100].as_slice(), &[6; 500]].concat());
            let extents = [(0, 5 << 32, ExtentState::Hole), (5 << 32, 1 << 32, ExtentState::Allocated)];
            let extents = extents.map(|(offset, length, state)| Extent { offset, length, state });
            assert_eq!(slots[2].extents, extents);
        }
    }

    #[test]
    fn violations_in_extended_replies_are_named() {
        let read = [NbdCommand::Read { offset: 512, length: 512 }];
        let cookie = slots(&read)[0].cookie(0);
        let status = |count: u32| [&1u32.to_be_bytes()[..], &count.to_be_bytes(), &[0; 16]].concat();
        let cases = [
            (simple(cookie, 0, &[]), "compact"),
            (chunk(cookie, 1, reply_type::NONE, &[]), "compact"),
            (extended(cookie, 1, reply_type::NONE, 0, &[]), "another offset"),
            (extended(cookie, 1, reply_type::NONE, 512, &[]), "does not cover"),
            (extended(cookie, 1, reply_type::BLOCK_STATUS, 512, &[&[0; 12]]), "unknown type"),
            (extended(cookie, 1, reply_type::BLOCK_STATUS_EXT, 512, &[&status(2)]), "another number"),
            (extended(cookie, 1, reply_type::ERROR, 512, &[&[0; 2 << 20]]), "larger than 1 MiB"),
        ];
        for (input, expected) in cases {
            let error = Decoder::new(Some(1), true, true)
                .feed(&input, &mut slots(&read), &mut Vec::new())
                .unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let huge = ExtendedReply {
            length: u64::MAX.into(),
            ..ExtendedReply::read_from_bytes(&extended(cookie, 0, reply_type::OFFSET_DATA, 512, &[])).unwrap()
        };
        let input = [huge.as_bytes(), &[0; 8]].concat();
        let outcome = Decoder::new(None, true, true).feed(&input, &mut slots(&read), &mut Vec::new());
        assert!(outcome.is_err());
    }
}
