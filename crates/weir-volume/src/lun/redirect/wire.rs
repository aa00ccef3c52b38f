//! The messages between a disk's owner and the coordinator in frames of a [`weir_net::Channel`], version 1. All integers are
//! little-endian; golden bytes are in the tests below. The first message says the version.
//!
//! | frame | meta | data |
//! |---|---|---|
//! | 1 hello | [`Hello`] | |
//! | 2 redirected | [`Redirected`] | of a write |
//! | 3 block | [`Block`] | of a write |
//! | 4 flush | [`Number`]: its id | |
//! | 5 recall done | [`Number`]: of the recall | |
//! | 17 welcome | [`Welcome`] | |
//! | 18 answer | [`Answer`], then `count` times [`Grant`] | of a read |
//! | 19 block answer | [`Answer`] | of a read |
//! | 20 flushed | [`Answer`] | |
//! | 21 recall | [`Recall`] | |
//! | 22 grant | any number of [`Grant`] | |

use std::rc::Rc;

use weir_block::{Buffer, BufferPool, Code, ErrorKind, IoError};
use weir_net::{Channel, Frame};
use zerocopy::byteorder::little_endian::{I32, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::message::{Data, ToCoordinator, ToOwner};
use crate::lun::leases::{Lease, Piece};
use crate::lun::router::{Kind, Request};

/// This build's version of the messages.
pub const VERSION: u32 = 1;

/// Most bytes of a write or a read in one message.
pub const LARGEST: usize = weir_net::frame::LARGEST_DATA;

/// Most leases in one [`ToOwner::Grant`]; an answer has those of its neighbourhood, which are fewer.
pub const MOST_GRANTS: usize = 4096;

/// Why a message cannot be used. The connection is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other node runs another version of Weir.
    #[error(
        "the node speaks version {0} of redirected I/O, this one {VERSION}: run the same version on both"
    )]
    Version(u32),
    /// It does not follow the protocol.
    #[error("a message of redirected I/O is malformed: {0}")]
    Malformed(&'static str),
    /// The data are not those that were sent (P11).
    #[error("the data of redirected I/O do not match their checksum")]
    Checksum,
    /// No memory for the data within the shard's limit.
    #[error("no memory for the data of redirected I/O")]
    NoMemory,
}

macro_rules! layout {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
    };
}

layout! {
    /// 16 bytes.
    Hello {
        /// [`VERSION`].
        version: U32,
        /// Zero.
        zero: U32,
        /// The disk's.
        epoch: U64,
    }
}
layout! {
    /// 48 bytes.
    Redirected {
        /// Of the answer.
        id: U64,
        /// First byte.
        start: U64,
        /// The byte after the last one.
        end: U64,
        /// First byte of the range that the owner gives up.
        gives_up_start: U64,
        /// The byte after the last one.
        gives_up_end: U64,
        /// CRC-32C of the data.
        checksum: U32,
        /// 0 read, 1 write, 2 write zeroes or discard.
        kind: u8,
        /// 0 none, 1 in this frame, 2 zeroes.
        data: u8,
        /// 1: durable when it is answered.
        durable: u8,
        /// Zero.
        zero: u8,
    }
}
layout! {
    /// 40 bytes.
    Block {
        /// Of the answer.
        id: U64,
        /// First byte in the file.
        start: U64,
        /// The byte after the last one.
        end: U64,
        /// First byte on the LUN.
        lun: U64,
        /// CRC-32C of the data.
        checksum: U32,
        /// 0 read, 1 write.
        kind: u8,
        /// 0 none, 1 in this frame, 2 zeroes.
        data: u8,
        /// 1: the blocks are shared with other files.
        shared: u8,
        /// 1: durable when it is answered; plus 2: by the file.
        flags: u8,
    }
}
layout! {
    /// 8 bytes.
    Number {
        /// The number.
        number: U64,
    }
}
layout! {
    /// 16 bytes.
    Welcome {
        /// The coordinator's.
        epoch: U64,
        /// Bytes that the filesystem moves together.
        piece: U64,
    }
}
layout! {
    /// 24 bytes.
    Answer {
        /// Of the request.
        id: U64,
        /// The system's error, or 0.
        errno: I32,
        /// 0 done; otherwise 1 retry, 2 fence, 3 operator, 4 bug.
        error: u8,
        /// Of an error: 1 invalid argument, 2 no space, 3 not supported, 4 read-only, 5 no memory, 6 I/O, 7 not the owner, 8 shutting
        /// down.
        code: u8,
        /// 1: it has data.
        data: u8,
        /// Zero.
        zero: u8,
        /// CRC-32C of the data.
        checksum: U32,
        /// Leases that follow.
        count: U32,
    }
}
layout! {
    /// 24 bytes.
    Recall {
        /// Of the answer.
        number: U64,
        /// First byte.
        start: U64,
        /// The byte after the last one.
        end: U64,
    }
}
layout! {
    /// 32 bytes.
    Grant {
        /// First byte.
        start: U64,
        /// The byte after the last one.
        end: U64,
        /// First byte on the LUN.
        lun: U64,
        /// 0 hole, 1 for reading and writing, 2 for reading.
        lease: U64,
    }
}

const KINDS: [Kind; 3] = [Kind::Read, Kind::Write, Kind::Punch];
const ERRORS: [ErrorKind; 4] = [ErrorKind::Retry, ErrorKind::Fence, ErrorKind::Operator, ErrorKind::Bug];
const CODES: [Code; 9] = [
    Code::InvalidArgument,
    Code::NoSpace,
    Code::NotSupported,
    Code::ReadOnly,
    Code::NoMemory,
    Code::Io,
    Code::NotOwner,
    Code::ShuttingDown,
    Code::Lost,
];

/// The place of a value in one of the tables above.
fn place<T: PartialEq>(table: &[T], value: &T) -> u8 {
    table.iter().position(|one| one == value).expect("the tables have every value that is sent") as u8
}

/// A message as a frame.
#[derive(Debug)]
pub struct Encoded {
    /// Of the frame.
    pub kind: u16,
    /// Its meta part.
    pub meta: Vec<u8>,
    /// Its data part.
    pub data: Option<Rc<Buffer>>,
}

impl Encoded {
    fn new(kind: u16, meta: &(impl IntoBytes + Immutable)) -> Encoded {
        Encoded { kind, meta: meta.as_bytes().to_vec(), data: None }
    }

    /// Queues it.
    pub fn queue(self, channel: &mut Channel) {
        let Encoded { kind, meta, data } = self;
        match data {
            Some(data) => channel.queue_buffer(kind, &meta, data),
            None => channel.queue(kind, &meta, &[]),
        }
    }
}

/// A message of the owner as a frame.
#[must_use]
pub fn encode_to_coordinator(message: ToCoordinator) -> Encoded {
    match message {
        ToCoordinator::Hello { epoch } => {
            Encoded::new(1, &Hello { version: VERSION.into(), zero: 0.into(), epoch: epoch.into() })
        }
        ToCoordinator::Redirected { request, gives_up, durable, data } => {
            let (number, checksum, bytes) = describe(data);
            let meta = Redirected {
                id: request.id.into(),
                start: request.range.0.into(),
                end: request.range.1.into(),
                gives_up_start: gives_up.0.into(),
                gives_up_end: gives_up.1.into(),
                checksum: checksum.into(),
                kind: place(&KINDS, &request.kind),
                data: number,
                durable: durable.into(),
                zero: 0,
            };
            Encoded { data: bytes, ..Encoded::new(2, &meta) }
        }
        ToCoordinator::Block { id, kind, piece, by_file, durable, data } => {
            let (number, checksum, bytes) = describe(data);
            let (lun, shared) = match piece.lease {
                Lease::ReadOnly(at) => (at, 1),
                Lease::ReadWrite(at) => (at, 0),
                Lease::Nothing | Lease::Hole => unreachable!("block I/O is on blocks"),
            };
            let meta = Block {
                id: id.into(),
                start: piece.start.into(),
                end: piece.end.into(),
                lun: lun.into(),
                checksum: checksum.into(),
                kind: place(&KINDS, &kind),
                data: number,
                shared,
                flags: u8::from(durable) | u8::from(by_file) << 1,
            };
            Encoded { data: bytes, ..Encoded::new(3, &meta) }
        }
        ToCoordinator::Flush(id) => Encoded::new(4, &Number { number: id.into() }),
        ToCoordinator::RecallDone(number) => Encoded::new(5, &Number { number: number.into() }),
    }
}

fn describe(data: Data) -> (u8, u32, Option<Rc<Buffer>>) {
    match data {
        Data::None => (0, 0, None),
        Data::Bytes(buffer) => (1, crc32c::crc32c(buffer.bytes()), Some(buffer)),
        Data::Zeroes => (2, 0, None),
    }
}

/// A message of the coordinator as frames: leases that are many take more than one.
#[must_use]
pub fn encode_to_owner(message: ToOwner) -> Vec<Encoded> {
    let one = match message {
        ToOwner::Welcome { epoch, piece } => {
            Encoded::new(17, &Welcome { epoch: epoch.into(), piece: piece.into() })
        }
        ToOwner::Answer { id, result, grants, data } => {
            let (first, rest) = grants.split_at(grants.len().min(MOST_GRANTS));
            let mut frames = vec![answer(18, (id, result), first, data)];
            frames.extend(encode_to_owner(ToOwner::Grant(rest.to_vec())));
            return frames;
        }
        ToOwner::BlockAnswer { id, result, data } => answer(19, (id, result), &[], data),
        ToOwner::Flushed { id, result } => answer(20, (id, result), &[], None),
        ToOwner::Recall { number, range } => {
            Encoded::new(21, &Recall { number: number.into(), start: range.0.into(), end: range.1.into() })
        }
        ToOwner::Grant(grants) => {
            let some = grants.chunks(MOST_GRANTS);
            return some.map(|some| Encoded { kind: 22, meta: encode_grants(some), data: None }).collect();
        }
    };
    vec![one]
}

fn answer(
    kind: u16,
    (id, result): (u64, Result<(), IoError>),
    grants: &[Piece],
    data: Option<Buffer>,
) -> Encoded {
    let (errno, error, code) = match result {
        Ok(()) => (0, 0, 0),
        Err(error) => (error.errno, place(&ERRORS, &error.kind) + 1, place(&CODES, &error.code) + 1),
    };
    let head = Answer {
        id: id.into(),
        errno: errno.into(),
        error,
        code,
        data: data.is_some().into(),
        zero: 0,
        checksum: data.as_ref().map_or(0, |data| crc32c::crc32c(data.bytes())).into(),
        count: (grants.len() as u32).into(),
    };
    let mut encoded = Encoded { data: data.map(Rc::new), ..Encoded::new(kind, &head) };
    encoded.meta.extend_from_slice(&encode_grants(grants));
    encoded
}

fn encode_grants(grants: &[Piece]) -> Vec<u8> {
    grants.iter().flat_map(|grant| encode_grant(*grant).as_bytes().to_vec()).collect()
}

fn encode_grant(Piece { start, end, lease }: Piece) -> Grant {
    let (lease, lun) = match lease {
        Lease::ReadWrite(at) => (1, at),
        Lease::ReadOnly(at) => (2, at),
        Lease::Hole | Lease::Nothing => (0, 0),
    };
    Grant { start: start.into(), end: end.into(), lun: lun.into(), lease: lease.into() }
}

fn decode_grant(grant: &Grant) -> Result<Piece, WireError> {
    let lun = grant.lun.get();
    let lease = match grant.lease.get() {
        0 => Lease::Hole,
        1 => Lease::ReadWrite(lun),
        2 => Lease::ReadOnly(lun),
        _ => return Err(WireError::Malformed("an unknown lease")),
    };
    let piece = Piece { start: grant.start.get(), end: grant.end.get(), lease };
    check_range((piece.start, piece.end))?;
    match lun.checked_add(piece.end - piece.start) {
        Some(_) => Ok(piece),
        None => Err(WireError::Malformed("blocks beyond any LUN")),
    }
}

fn decode_grants(mut bytes: &[u8]) -> Result<Vec<Piece>, WireError> {
    let mut grants = Vec::with_capacity(bytes.len() / size_of::<Grant>());
    while !bytes.is_empty() {
        let (grant, rest) = decode::<Grant>(bytes)?;
        grants.push(decode_grant(grant)?);
        bytes = rest;
    }
    Ok(grants)
}

fn decode<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    bytes: &[u8],
) -> Result<(&T, &[u8]), WireError> {
    T::ref_from_prefix(bytes).map_err(|_| WireError::Malformed("it is too short"))
}

fn decode_only<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8]) -> Result<&T, WireError> {
    match decode::<T>(bytes)? {
        (found, []) => Ok(found),
        _ => Err(WireError::Malformed("it is too long")),
    }
}

fn check_range((start, end): (u64, u64)) -> Result<(), WireError> {
    if start < end { Ok(()) } else { Err(WireError::Malformed("an empty range")) }
}

/// Decodes a message of an owner. The memory for its data comes from `pool`.
///
/// # Errors
/// [`WireError`].
pub fn decode_to_coordinator(frame: Frame<'_>, pool: &BufferPool) -> Result<ToCoordinator, WireError> {
    Ok(match frame.kind {
        1 => {
            let hello: &Hello = decode_only(frame.meta)?;
            if hello.version.get() != VERSION {
                return Err(WireError::Version(hello.version.get()));
            }
            ToCoordinator::Hello { epoch: hello.epoch.get() }
        }
        2 => {
            let head: &Redirected = decode_only(frame.meta)?;
            let kind = *KINDS.get(usize::from(head.kind)).ok_or(WireError::Malformed("an unknown kind"))?;
            let range = (head.start.get(), head.end.get());
            let gives_up = (head.gives_up_start.get(), head.gives_up_end.get());
            check_range(range)?;
            if gives_up.0 > gives_up.1 {
                return Err(WireError::Malformed("a range that ends before it begins"));
            }
            let data = data((kind, range), head.data, head.checksum.get(), frame.data, pool)?;
            let request = Request { id: head.id.get(), kind, range };
            ToCoordinator::Redirected { request, gives_up, durable: head.durable != 0, data }
        }
        3 => {
            let head: &Block = decode_only(frame.meta)?;
            let kind =
                *KINDS[..2].get(usize::from(head.kind)).ok_or(WireError::Malformed("an unknown kind"))?;
            let (range, lun) = ((head.start.get(), head.end.get()), head.lun.get());
            check_range(range)?;
            if lun.checked_add(range.1 - range.0).is_none() {
                return Err(WireError::Malformed("blocks beyond any LUN"));
            }
            let lease = if head.shared == 0 { Lease::ReadWrite(lun) } else { Lease::ReadOnly(lun) };
            let data = data((kind, range), head.data, head.checksum.get(), frame.data, pool)?;
            let piece = Piece { start: range.0, end: range.1, lease };
            let (durable, by_file) = (head.flags & 1 != 0, head.flags & 2 != 0);
            ToCoordinator::Block { id: head.id.get(), kind, piece, by_file, durable, data }
        }
        4 => ToCoordinator::Flush(decode_only::<Number>(frame.meta)?.number.get()),
        5 => ToCoordinator::RecallDone(decode_only::<Number>(frame.meta)?.number.get()),
        _ => return Err(WireError::Malformed("an unknown kind of message")),
    })
}

fn data(
    (kind, (start, end)): (Kind, (u64, u64)),
    number: u8,
    checksum: u32,
    bytes: &[u8],
    pool: &BufferPool,
) -> Result<Data, WireError> {
    // Zeroes are not sent.
    if kind != Kind::Punch && number != 2 && end - start > LARGEST as u64 {
        return Err(WireError::Malformed("it is too large"));
    }
    match (kind, number) {
        (Kind::Write, 1) if bytes.len() as u64 == end - start => {
            Ok(Data::Bytes(Rc::new(copy(bytes, checksum, pool)?)))
        }
        (Kind::Write, 2) if bytes.is_empty() => Ok(Data::Zeroes),
        (Kind::Read | Kind::Punch, 0) if bytes.is_empty() => Ok(Data::None),
        _ => Err(WireError::Malformed("the data are not those of its kind")),
    }
}

fn copy(bytes: &[u8], checksum: u32, pool: &BufferPool) -> Result<Buffer, WireError> {
    let mut buffer = pool.take(bytes.len()).ok_or(WireError::NoMemory)?;
    buffer.bytes_mut().copy_from_slice(bytes);
    // Of the copy: the bytes are in the cache now.
    if crc32c::crc32c(buffer.bytes()) != checksum {
        return Err(WireError::Checksum);
    }
    Ok(buffer)
}

/// Decodes a message of the coordinator. The memory for its data comes from `pool`.
///
/// # Errors
/// [`WireError`].
pub fn decode_to_owner(frame: Frame<'_>, pool: &BufferPool) -> Result<ToOwner, WireError> {
    Ok(match frame.kind {
        17 => {
            let welcome: &Welcome = decode_only(frame.meta)?;
            ToOwner::Welcome { epoch: welcome.epoch.get(), piece: welcome.piece.get() }
        }
        18..=20 => {
            let (head, rest) = decode::<Answer>(frame.meta)?;
            let grants = decode_grants(rest)?;
            if grants.len() as u32 != head.count.get() || frame.kind != 18 && !grants.is_empty() {
                return Err(WireError::Malformed("it has another number of leases than it says"));
            }
            let (id, result) = (head.id.get(), decode_error(head)?);
            let data = match (head.data, frame.data) {
                (0, []) => None,
                (1, bytes) if frame.kind != 20 => Some(copy(bytes, head.checksum.get(), pool)?),
                _ => return Err(WireError::Malformed("it has data and does not say so")),
            };
            match frame.kind {
                18 => ToOwner::Answer { id, result, grants, data },
                19 => ToOwner::BlockAnswer { id, result, data },
                _ => ToOwner::Flushed { id, result },
            }
        }
        21 => {
            let recall: &Recall = decode_only(frame.meta)?;
            let range = (recall.start.get(), recall.end.get());
            check_range(range)?;
            ToOwner::Recall { number: recall.number.get(), range }
        }
        22 => ToOwner::Grant(decode_grants(frame.meta)?),
        _ => return Err(WireError::Malformed("an unknown kind of message")),
    })
}

fn decode_error(head: &Answer) -> Result<Result<(), IoError>, WireError> {
    if head.error == 0 {
        return Ok(Ok(()));
    }
    let kind = ERRORS.get(usize::from(head.error) - 1);
    let code = usize::from(head.code).checked_sub(1).and_then(|code| CODES.get(code));
    match (kind, code) {
        (Some(kind), Some(code)) => {
            let mut error = IoError::new(*kind, *code, "the volume's coordinator");
            error.errno = head.errno.get();
            Ok(Err(error))
        }
        _ => Err(WireError::Malformed("an unknown error")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> BufferPool {
        BufferPool::new(1 << 20)
    }

    fn bytes(text: &[u8]) -> Buffer {
        let mut buffer = pool().take(text.len()).unwrap();
        buffer.bytes_mut().copy_from_slice(text);
        buffer
    }

    fn frame(encoded: &Encoded) -> Frame<'_> {
        let data = encoded.data.as_ref().map_or(&[][..], |data| data.bytes());
        Frame { kind: encoded.kind, meta: &encoded.meta, data }
    }

    fn number(number: u64) -> [u8; 8] {
        number.to_le_bytes()
    }

    fn to_coordinator() -> Vec<(ToCoordinator, Vec<u8>)> {
        let checksum = crc32c::crc32c(b"data").to_le_bytes();
        let write = Request { id: 7, kind: Kind::Write, range: (4096, 4100) };
        let punch = Request { id: 8, kind: Kind::Punch, range: (0, 512) };
        let piece = Piece { start: 4096, end: 4100, lease: Lease::ReadWrite(1 << 40) };
        let data = || Data::Bytes(Rc::new(bytes(b"data")));
        vec![
            (ToCoordinator::Hello { epoch: 3 }, [&[1, 0, 0, 0, 0, 0, 0, 0][..], &number(3)].concat()),
            (
                ToCoordinator::Redirected {
                    request: write,
                    gives_up: (0, 8192),
                    durable: true,
                    data: data(),
                },
                [
                    &number(7)[..],
                    &number(4096),
                    &number(4100),
                    &number(0),
                    &number(8192),
                    &checksum,
                    &[1, 1, 1, 0],
                ]
                .concat(),
            ),
            (
                ToCoordinator::Redirected {
                    request: punch,
                    gives_up: (0, 512),
                    durable: false,
                    data: Data::None,
                },
                [&number(8)[..], &number(0), &number(512), &number(0), &number(512), &[0; 4], &[2, 0, 0, 0]]
                    .concat(),
            ),
            (
                ToCoordinator::Block {
                    id: 9,
                    kind: Kind::Write,
                    piece,
                    by_file: true,
                    durable: false,
                    data: data(),
                },
                [&number(9)[..], &number(4096), &number(4100), &number(1 << 40), &checksum, &[1, 1, 0, 2]]
                    .concat(),
            ),
            (ToCoordinator::Flush(5), number(5).to_vec()),
            (ToCoordinator::RecallDone(6), number(6).to_vec()),
        ]
    }

    fn to_owner() -> Vec<(ToOwner, Vec<u8>)> {
        let piece = Piece { start: 0, end: 4096, lease: Lease::ReadOnly(8192) };
        let hole = Piece { start: 4096, end: 8192, lease: Lease::Hole };
        let grants = [
            &number(0)[..],
            &number(4096),
            &number(8192),
            &number(2),
            &number(4096),
            &number(8192),
            &number(0),
            &number(0),
        ]
        .concat();
        let checksum = crc32c::crc32c(b"read").to_le_bytes();
        let error = IoError::from_errno(libc::ENOSPC, "");
        vec![
            (ToOwner::Welcome { epoch: 2, piece: 65536 }, [number(2), number(65536)].concat()),
            (
                ToOwner::Answer {
                    id: 1,
                    result: Ok(()),
                    grants: vec![piece, hole],
                    data: Some(bytes(b"read")),
                },
                [&number(1)[..], &[0; 4], &[0, 0, 1, 0], &checksum, &[2, 0, 0, 0], &grants].concat(),
            ),
            (
                ToOwner::BlockAnswer { id: 1, result: Err(error), data: None },
                [&number(1)[..], &[28, 0, 0, 0], &[1, 2, 0, 0], &[0; 8]].concat(),
            ),
            (ToOwner::Flushed { id: 4, result: Ok(()) }, [&number(4)[..], &[0; 16]].concat()),
            (
                ToOwner::Recall { number: 3, range: (0, 65536) },
                [number(3), number(0), number(65536)].concat(),
            ),
            (ToOwner::Grant(vec![piece, hole]), grants),
        ]
    }

    #[test]
    fn the_layouts_are_as_documented_and_read_back() {
        for (message, golden) in to_coordinator() {
            let text = format!("{message:?}");
            let encoded = encode_to_coordinator(message);
            assert_eq!(encoded.meta, golden, "{text}");
            assert_eq!(format!("{:?}", decode_to_coordinator(frame(&encoded), &pool()).unwrap()), text);
        }
        for (message, golden) in to_owner() {
            let text =
                format!("{message:?}").replace("context: \"\"", "context: \"the volume's coordinator\"");
            let encoded = encode_to_owner(message);
            assert_eq!((encoded.len(), &encoded[0].meta), (1, &golden), "{text}");
            assert_eq!(format!("{:?}", decode_to_owner(frame(&encoded[0]), &pool()).unwrap()), text);
        }
    }

    #[test]
    fn many_leases_take_several_frames() {
        let grants: Vec<Piece> =
            (0..10_000).map(|at| Piece { start: at, end: at + 1, lease: Lease::ReadWrite(at) }).collect();
        let frames = encode_to_owner(ToOwner::Grant(grants.clone()));
        assert!(frames.iter().all(|one| one.meta.len() <= weir_net::frame::LARGEST_META));
        let read: Vec<Piece> = frames
            .iter()
            .flat_map(|one| match decode_to_owner(frame(one), &pool()).unwrap() {
                ToOwner::Grant(grants) => grants,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(read == grants);
    }

    /// No byte that is changed, cut off or added makes a panic, and damaged data are found.
    #[test]
    fn damaged_messages_are_refused_or_read_as_others() {
        let all = to_coordinator().into_iter().map(|(message, _)| encode_to_coordinator(message));
        let answers = to_owner().into_iter().flat_map(|(message, _)| encode_to_owner(message));
        for encoded in all.chain(answers) {
            let Frame { kind, meta, data } = frame(&encoded);
            for at in 0..meta.len() {
                for value in [0, 1, 2, 127, 255] {
                    let mut changed = meta.to_vec();
                    changed[at] = value;
                    let _ = decode_to_coordinator(Frame { kind, meta: &changed, data }, &pool());
                    let _ = decode_to_owner(Frame { kind, meta: &changed, data }, &pool());
                }
                let _ = decode_to_coordinator(Frame { kind, meta: &meta[..at], data }, &pool());
                let _ = decode_to_owner(Frame { kind, meta: &meta[..at], data }, &pool());
            }
            if !data.is_empty() {
                let mut damaged = data.to_vec();
                damaged[0] ^= 1;
                let damaged = Frame { kind, meta, data: &damaged };
                let refused = match kind {
                    0..17 => decode_to_coordinator(damaged, &pool()).err(),
                    _ => decode_to_owner(damaged, &pool()).err(),
                };
                assert!(matches!(refused, Some(WireError::Checksum)), "{refused:?}");
            }
        }
        let hello = encode_to_coordinator(ToCoordinator::Hello { epoch: 3 });
        let newer = [&[2][..], &hello.meta[1..]].concat();
        let newer = decode_to_coordinator(Frame { kind: 1, meta: &newer, data: &[] }, &pool());
        assert!(matches!(newer, Err(WireError::Version(2))), "{newer:?}");
    }
}
