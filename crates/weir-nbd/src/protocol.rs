//! Numbers and wire structures of the NBD protocol, for servers and clients. All fields are big-endian.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Opens the server's greeting: `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of the greeting and first of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First word of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First word of a request with extended headers.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First word of a reply chunk with extended headers.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Limit of a string's length, in bytes ("Conventions").
pub const LONGEST_STRING: usize = 4096;
/// Largest payload of a read or write that Weir accepts, in bytes: the minimum that the protocol asks of every server.
pub const LARGEST_PAYLOAD: u32 = 32 << 20;
/// Zero bytes after the answer to `EXPORT_NAME`, unless the client sets `NO_ZEROES`.
pub const EXPORT_NAME_PADDING: usize = 124;
/// Name of the one metadata context that the protocol itself defines.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// "Handshake flags", server to client.
pub mod handshake_flag {
    /// Fixed newstyle negotiation.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The server can omit the padding after `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// "Client flags".
pub mod client_flag {
    /// Fixed newstyle negotiation.
    pub const FIXED_NEWSTYLE: u32 = 1 << 0;
    /// Omit the padding after `EXPORT_NAME`.
    pub const NO_ZEROES: u32 = 1 << 1;
}

/// "Transmission flags": the export's capabilities.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA flag is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF flag is understood. Only with structured replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the answered writes of all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The FAST_ZERO flag is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// "Option types".
pub mod option {
    /// Choose an export the old way: no error can be reported.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// Name all exports.
    pub const LIST: u32 = 3;
    /// Switch to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and enter transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use headers with 64-bit lengths (the document's branch `extension-ext-header`).
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// "Option reply types".
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export.
    pub const SERVER: u32 = 2;
    /// One piece of information about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error.
    pub const ERROR: u32 = 1 << 31;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// Forbidden here.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// Malformed option.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// TLS must come first.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is being shut down.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The client has to ask for the block sizes first.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
    /// Too large to process.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
    /// Not with, or not without, extended headers.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR | 10;
}

/// Information types of `INFO` and `GO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest block.
    pub const BLOCK_SIZE: u16 = 3;
}

/// "Request types".
pub mod command {
    /// Read a range.
    pub const READ: u16 = 0;
    /// Write a range.
    pub const WRITE: u16 = 1;
    /// Finish the requests in flight and disconnect.
    pub const DISC: u16 = 2;
    /// Make answered writes durable.
    pub const FLUSH: u16 = 3;
    /// Discard a range.
    pub const TRIM: u16 = 4;
    /// Prefetch a range.
    pub const CACHE: u16 = 5;
    /// Make a range read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Query the state of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// "Command flags".
pub mod command_flag {
    /// Answer only once the data is durable. Valid with every command.
    pub const FUA: u16 = 1 << 0;
    /// Zeroed ranges stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// One content chunk at most.
    pub const DF: u16 = 1 << 2;
    /// One extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zero fast or not at all.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// With extended headers: the length is that of the payload after the header.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// "Structured reply flags".
pub mod reply_flag {
    /// Last chunk of the reply.
    pub const DONE: u16 = 1 << 0;
}

/// "Structured reply types".
pub mod reply_type {
    /// No content: ends the reply.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// The same with 64-bit lengths and flags; with extended headers only.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Set in every error.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// "Error values".
pub mod error {
    /// Not permitted: the export is read-only.
    pub const EPERM: u32 = 1;
    /// The storage failed.
    pub const EIO: u32 = 5;
    /// No memory.
    pub const ENOMEM: u32 = 12;
    /// Malformed request.
    pub const EINVAL: u32 = 22;
    /// No room, or a write beyond the end.
    pub const ENOSPC: u32 = 28;
    /// Too large to answer in one chunk.
    pub const EOVERFLOW: u32 = 75;
    /// No fast zero here.
    pub const ENOTSUP: u32 = 95;
    /// The disk is being closed.
    pub const ESHUTDOWN: u32 = 108;
}

/// Flags of an extent in the context `base:allocation`.
pub mod extent_flag {
    /// Not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// Reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// The server's first message.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Greeting {
    /// [`GREETING_MAGIC`].
    pub magic: U64,
    /// [`OPTION_MAGIC`].
    pub option_magic: U64,
    /// [`handshake_flag`].
    pub flags: U16,
}

/// Header of an option. `length` bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OptionHeader {
    /// [`OPTION_MAGIC`].
    pub magic: U64,
    /// [`option`].
    pub option: U32,
    /// Bytes that follow.
    pub length: U32,
}

/// Header of a reply to an option. `length` bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OptionReplyHeader {
    /// [`OPTION_REPLY_MAGIC`].
    pub magic: U64,
    /// The answered option.
    pub option: U32,
    /// [`option_reply`].
    pub kind: U32,
    /// Bytes that follow.
    pub length: U32,
}

/// Answer to `EXPORT_NAME`, and the body of [`info::EXPORT`] after its type.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExportSize {
    /// Bytes.
    pub size: U64,
    /// [`transmission_flag`].
    pub flags: U16,
}

/// Body of [`info::BLOCK_SIZE`] after its type.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BlockSizes {
    /// Every offset and length is a multiple of this, in bytes.
    pub minimum: U32,
    /// Smallest efficient request, in bytes.
    pub preferred: U32,
    /// Largest read or write, in bytes.
    pub maximum: U32,
}

/// Header of a request. A write's payload of `length` bytes follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    /// [`REQUEST_MAGIC`].
    pub magic: U32,
    /// [`command_flag`].
    pub flags: U16,
    /// [`command`].
    pub command: U16,
    /// The client's identifier of the request (older documents: handle).
    pub cookie: U64,
    /// Bytes from the start of the export.
    pub offset: U64,
    /// Bytes.
    pub length: U32,
}

/// Header of a request with extended headers. With [`command_flag::PAYLOAD_LEN`], `length` bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedRequest {
    /// [`EXTENDED_REQUEST_MAGIC`].
    pub magic: U32,
    /// [`command_flag`].
    pub flags: U16,
    /// [`command`].
    pub command: U16,
    /// The client's identifier of the request.
    pub cookie: U64,
    /// Bytes from the start of the export.
    pub offset: U64,
    /// Bytes: of the payload with [`command_flag::PAYLOAD_LEN`], otherwise of the export.
    pub length: U64,
}

/// A simple reply. A read's data follows when `error` is zero.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SimpleReply {
    /// [`SIMPLE_REPLY_MAGIC`].
    pub magic: U32,
    /// [`error`], or zero.
    pub error: U32,
    /// From the request.
    pub cookie: U64,
}

/// Header of a structured reply chunk. `length` bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ChunkHeader {
    /// [`STRUCTURED_REPLY_MAGIC`].
    pub magic: U32,
    /// [`reply_flag`].
    pub flags: U16,
    /// [`reply_type`].
    pub kind: U16,
    /// From the request.
    pub cookie: U64,
    /// Bytes that follow.
    pub length: U32,
}

/// Header of a reply chunk with extended headers. `length` bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedReply {
    /// [`EXTENDED_REPLY_MAGIC`].
    pub magic: U32,
    /// [`reply_flag`].
    pub flags: U16,
    /// [`reply_type`].
    pub kind: U16,
    /// From the request.
    pub cookie: U64,
    /// From the request.
    pub offset: U64,
    /// Bytes that follow.
    pub length: U64,
}

/// One extent of a [`reply_type::BLOCK_STATUS_EXT`] chunk, after the number of the context and that of the extents, four
/// bytes each.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedStatusDescriptor {
    /// Bytes.
    pub length: U64,
    /// [`extent_flag`].
    pub flags: U64,
}

/// One extent of a [`reply_type::BLOCK_STATUS`] chunk, after the four bytes of the context's number.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StatusDescriptor {
    /// Bytes.
    pub length: U32,
    /// [`extent_flag`].
    pub flags: U32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_structures_have_the_sizes_of_the_document() {
        assert_eq!(size_of::<Greeting>(), 18);
        assert_eq!(size_of::<OptionHeader>(), 16);
        assert_eq!(size_of::<OptionReplyHeader>(), 20);
        assert_eq!(size_of::<ExportSize>(), 10);
        assert_eq!(size_of::<BlockSizes>(), 12);
        assert_eq!(size_of::<RequestHeader>(), 28);
        assert_eq!(size_of::<SimpleReply>(), 16);
        assert_eq!(size_of::<ChunkHeader>(), 20);
        assert_eq!(size_of::<StatusDescriptor>(), 8);
        assert_eq!(size_of::<ExtendedRequest>(), 32);
        assert_eq!(size_of::<ExtendedReply>(), 32);
        assert_eq!(size_of::<ExtendedStatusDescriptor>(), 16);
    }
}

/// Whether an end of a connection speaks TLS ("TLS support").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// No (the document's NOTLS).
    #[default]
    Off,
    /// If the other end does. Whoever can change messages under way can prevent it ("Protocol downgrade attacks").
    Optional,
    /// Always, or not at all (the document's FORCEDTLS).
    Required,
}
