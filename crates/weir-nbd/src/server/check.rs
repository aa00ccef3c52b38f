//! Checks of requests. Layers never see a request that is malformed, misaligned, empty or outside the disk.

use weir_block::{Code, IoError, LayerInfo};

use super::directory::Session;
use super::request::RequestHead;
use crate::protocol::{LARGEST_PAYLOAD, command, command_flag as flag, error, transmission_flag};

/// A valid request. Offset and length are as in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckedRequest {
    /// Read a range.
    Read,
    /// Write a range. The payload follows the header.
    Write {
        /// Answer only once the data is durable.
        fua: bool,
    },
    /// Make answered writes durable.
    Flush,
    /// Discard a range.
    Discard {
        /// Answer only once the discard is durable.
        fua: bool,
    },
    /// Prefetch a range.
    Cache,
    /// Make a range read as zeroes.
    WriteZeroes {
        /// Answer only once the zeroes are durable.
        fua: bool,
        /// The range may become a hole.
        may_unmap: bool,
        /// Zero faster than by writing, or fail.
        fast_only: bool,
    },
    /// Query the state of a range.
    BlockStatus {
        /// One extent only.
        one: bool,
    },
    /// Finish the requests in flight and disconnect; has no answer.
    Disconnect,
}

/// The error that the client receives instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// [`crate::protocol::error`].
    pub error: u32,
    /// The reason, for people.
    pub message: &'static str,
}

const fn refuse<T>(error: u32, message: &'static str) -> Result<T, Refusal> {
    Err(Refusal { error, message })
}

/// The results of the handshake that matter for a request.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The server answers reads and errors with chunks: structured replies, or extended headers.
    pub structured_replies: bool,
    /// Requests and replies have extended headers.
    pub extended_headers: bool,
    /// Offsets and lengths have to be multiples of the disk's logical block.
    pub block_sizes: bool,
    /// Number of the context `base:allocation`, if the client has selected it.
    pub base_allocation: Option<u32>,
    /// The client may only read, whatever the disk allows.
    pub read_only: bool,
}

impl From<&Session> for Terms {
    fn from(session: &Session) -> Terms {
        Terms {
            structured_replies: session.structured_replies,
            extended_headers: session.extended_headers,
            block_sizes: session.block_sizes,
            base_allocation: session.base_allocation,
            read_only: session.flags & transmission_flag::READ_ONLY != 0,
        }
    }
}

/// Checks a request for a layer with the properties `info`.
///
/// # Errors
/// The error for the client: the request is unknown, malformed, misaligned, outside the disk, too large, or not offered.
pub fn check_request(head: &RequestHead, info: &LayerInfo, terms: Terms) -> Result<CheckedRequest, Refusal> {
    let flags = head.flags;
    let fua = flags & flag::FUA != 0;
    let (command, allowed) = match head.command {
        command::READ if terms.structured_replies => (CheckedRequest::Read, flag::DF),
        command::READ => (CheckedRequest::Read, 0),
        command::WRITE if terms.extended_headers => (CheckedRequest::Write { fua }, flag::PAYLOAD_LEN),
        command::WRITE => (CheckedRequest::Write { fua }, 0),
        command::DISC => return Ok(CheckedRequest::Disconnect),
        command::FLUSH => (CheckedRequest::Flush, 0),
        command::TRIM => (CheckedRequest::Discard { fua }, 0),
        command::CACHE => (CheckedRequest::Cache, 0),
        command::WRITE_ZEROES => {
            let (may_unmap, fast_only) = (flags & flag::NO_HOLE == 0, flags & flag::FAST_ZERO != 0);
            (CheckedRequest::WriteZeroes { fua, may_unmap, fast_only }, flag::NO_HOLE | flag::FAST_ZERO)
        }
        command::BLOCK_STATUS => {
            (CheckedRequest::BlockStatus { one: flags & flag::REQ_ONE != 0 }, flag::REQ_ONE)
        }
        _ => return refuse(error::EINVAL, "unknown command"),
    };
    // "The server MUST accept all commands with this bit [FUA] set".
    if flags & !(allowed | flag::FUA) != 0 {
        return refuse(error::EINVAL, "a flag is not valid with this command");
    }
    check_use(command, info, terms)?;
    check_range(command, head, info, terms)?;
    Ok(command)
}

/// Checks that the export offers the command.
fn check_use(command: CheckedRequest, info: &LayerInfo, terms: Terms) -> Result<(), Refusal> {
    let writes = matches!(
        command,
        CheckedRequest::Write { .. } | CheckedRequest::Discard { .. } | CheckedRequest::WriteZeroes { .. }
    );
    if writes && (!info.writable || terms.read_only) {
        return refuse(error::EPERM, "the export is read-only");
    }
    match command {
        CheckedRequest::WriteZeroes { fast_only: true, .. } if !info.fast_zeroes => {
            refuse(error::ENOTSUP, "zeroing is no faster than writing here")
        }
        CheckedRequest::BlockStatus { .. } if terms.base_allocation.is_none() => {
            refuse(error::EINVAL, "no metadata context was selected")
        }
        _ => Ok(()),
    }
}

fn check_range(
    command: CheckedRequest,
    head: &RequestHead,
    info: &LayerInfo,
    terms: Terms,
) -> Result<(), Refusal> {
    let (offset, length) = (head.offset, head.length);
    if command == CheckedRequest::Flush {
        let reserved_is_clear = offset == 0 && length == 0;
        return if reserved_is_clear {
            Ok(())
        } else {
            refuse(error::EINVAL, "a flush has no offset and no length")
        };
    }
    if length == 0 {
        return refuse(error::EINVAL, "the length is zero");
    }
    let block = u64::from(info.logical_block);
    let is_aligned = offset.is_multiple_of(block) && length.is_multiple_of(block);
    if !is_aligned && terms.block_sizes {
        return refuse(error::EINVAL, "offset or length is not a multiple of the minimum block size");
    }
    if offset.checked_add(length).is_none_or(|end| end > info.size) {
        let grows = matches!(command, CheckedRequest::Write { .. } | CheckedRequest::WriteZeroes { .. });
        let error = if grows { error::ENOSPC } else { error::EINVAL };
        return refuse(error, "the range ends beyond the end of the disk");
    }
    // "The server's determination on whether to fail a fast request MAY depend on [...] whether the request was suitably aligned".
    if !is_aligned && matches!(command, CheckedRequest::WriteZeroes { fast_only: true, .. }) {
        return refuse(error::ENOTSUP, "zeroing parts of blocks is no faster than writing");
    }
    if length > u64::from(LARGEST_PAYLOAD) {
        let message = "the length is above the maximum payload size";
        match command {
            // "Permitted to reject large read requests up front with NBD_EOVERFLOW", where replies are chunks.
            CheckedRequest::Read if terms.structured_replies => return refuse(error::EOVERFLOW, message),
            CheckedRequest::Read | CheckedRequest::Write { .. } => return refuse(error::EINVAL, message),
            _ => {}
        }
    }
    Ok(())
}

/// A layer's error as the protocol's number ("Error values").
#[must_use]
pub fn error_number(io: &IoError, command: CheckedRequest) -> u32 {
    match io.code {
        Code::InvalidArgument => error::EINVAL,
        Code::NoSpace => error::ENOSPC,
        // "SHOULD NOT return NBD_ENOTSUP except as documented in response to NBD_CMD_WRITE_ZEROES".
        Code::NotSupported if matches!(command, CheckedRequest::WriteZeroes { fast_only: true, .. }) => {
            error::ENOTSUP
        }
        Code::NotSupported => error::EINVAL,
        Code::ReadOnly => error::EPERM,
        Code::NoMemory => error::ENOMEM,
        Code::Io | Code::Lost => error::EIO,
        // The client has to leave this server and find the disk's new owner.
        Code::NotOwner | Code::ShuttingDown => error::ESHUTDOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: LayerInfo = LayerInfo {
        size: 1 << 30,
        logical_block: 512,
        preferred_block: 4096,
        max_transfer: 32 << 20,
        writable: true,
        fast_zeroes: true,
        discards: true,
    };
    const TERMS: Terms = Terms {
        structured_replies: true,
        extended_headers: false,
        block_sizes: true,
        base_allocation: Some(1),
        read_only: false,
    };

    fn header(command: u16, flags: u16, offset: u64, length: u64) -> RequestHead {
        RequestHead { flags, command, cookie: 7, offset, length, payload: 0 }
    }

    fn error_of(command: u16, flags: u16, offset: u64, length: u64, info: &LayerInfo) -> Option<u32> {
        check_request(&header(command, flags, offset, length), info, TERMS).err().map(|refusal| refusal.error)
    }

    #[test]
    fn what_is_in_order_passes() {
        for command in [0, 1, 4, 5, 6, 7] {
            assert_eq!(error_of(command, flag::FUA, INFO.size - 512, 512, &INFO), None, "command {command}");
            assert_eq!(error_of(command, 0, 0, 32 << 20, &INFO), None, "command {command}");
        }
        assert_eq!(error_of(command::FLUSH, flag::FUA, 0, 0, &INFO), None);
        assert_eq!(error_of(command::TRIM, 0, 0, 1 << 30, &INFO), None, "no payload, no maximum");
        let zeroes = header(command::WRITE_ZEROES, flag::NO_HOLE | flag::FAST_ZERO, 0, 512);
        let expected = CheckedRequest::WriteZeroes { fua: false, may_unmap: false, fast_only: true };
        assert_eq!(check_request(&zeroes, &INFO, TERMS), Ok(expected));
    }

    /// A reader on another node, of a disk that others write.
    #[test]
    fn a_session_that_only_reads_changes_nothing() {
        let session = Session { flags: transmission_flag::READ_ONLY, ..Session::default() };
        let terms = Terms { read_only: Terms::from(&session).read_only, ..TERMS };
        let refused = |command, length| {
            check_request(&header(command, 0, 0, length), &INFO, terms).err().map(|refusal| refusal.error)
        };
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(refused(command, 512), Some(error::EPERM), "command {command}");
        }
        // A flush makes durable what others have written.
        for (command, length) in [(command::READ, 512), (command::BLOCK_STATUS, 512), (command::FLUSH, 0)] {
            assert_eq!(refused(command, length), None, "command {command}");
        }
    }

    #[test]
    fn ranges_are_checked() {
        for command in [0, 1, 4, 5, 6, 7] {
            let beyond = if matches!(command, 1 | 6) { error::ENOSPC } else { error::EINVAL };
            assert_eq!(error_of(command, 0, INFO.size, 512, &INFO), Some(beyond), "command {command}");
            assert_eq!(error_of(command, 0, u64::MAX - 511, 1024, &INFO), Some(beyond), "wraps around");
            assert_eq!(error_of(command, 0, 0, 0, &INFO), Some(error::EINVAL));
            assert_eq!(error_of(command, 0, 1, 512, &INFO), Some(error::EINVAL));
            assert_eq!(error_of(command, 0, 512, 513, &INFO), Some(error::EINVAL));
        }
        let simple = Terms { structured_replies: false, ..TERMS };
        let long = header(command::READ, 0, 0, (32 << 20) + 512);
        assert_eq!(check_request(&long, &INFO, simple).unwrap_err().error, error::EINVAL);
        assert_eq!(error_of(command::READ, 0, 0, (32 << 20) + 512, &INFO), Some(error::EOVERFLOW));
        assert_eq!(error_of(command::WRITE, 0, 0, (32 << 20) + 512, &INFO), Some(error::EINVAL));
        let small = LayerInfo { max_transfer: 1 << 20, ..INFO };
        assert_eq!(error_of(command::READ, 0, 0, 32 << 20, &small), None, "worked off in pieces");
        assert_eq!(error_of(command::READ, flag::DF, 0, (32 << 20) + 512, &INFO), Some(error::EOVERFLOW));
        assert_eq!(error_of(command::FLUSH, 0, 512, 0, &INFO), Some(error::EINVAL));
        assert_eq!(error_of(command::FLUSH, 0, 0, 512, &INFO), Some(error::EINVAL));
    }

    #[test]
    fn flags_belong_to_their_commands() {
        let allowed = [
            (command::READ, flag::DF),
            (command::WRITE, 0),
            (command::TRIM, 0),
            (command::CACHE, 0),
            (command::WRITE_ZEROES, flag::NO_HOLE | flag::FAST_ZERO),
            (command::BLOCK_STATUS, flag::REQ_ONE),
        ];
        for (command, allowed) in allowed {
            for bit in 1..16 {
                let expected = if allowed & (1 << bit) == 0 { Some(error::EINVAL) } else { None };
                assert_eq!(
                    error_of(command, 1 << bit, 0, 512, &INFO),
                    expected,
                    "command {command} bit {bit}"
                );
            }
        }
        let plain = Terms { structured_replies: false, base_allocation: None, ..TERMS };
        assert!(
            check_request(&header(command::READ, flag::DF, 0, 512), &INFO, plain).is_err(),
            "DF was not offered"
        );
        assert!(
            check_request(&header(command::BLOCK_STATUS, 0, 0, 512), &INFO, plain).is_err(),
            "no context selected"
        );
        assert_eq!(error_of(8, 0, 0, 512, &INFO), Some(error::EINVAL));
        assert_eq!(error_of(u16::MAX, 0, 0, 512, &INFO), Some(error::EINVAL));
    }

    #[test]
    fn a_read_only_export_takes_no_writes() {
        let info = LayerInfo { writable: false, ..INFO };
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(error_of(command, 0, 0, 512, &info), Some(error::EPERM));
        }
        assert_eq!(error_of(command::READ, 0, 0, 512, &info), None);
        let slow = LayerInfo { fast_zeroes: false, ..INFO };
        assert_eq!(error_of(command::WRITE_ZEROES, flag::FAST_ZERO, 0, 512, &slow), Some(error::ENOTSUP));
        assert_eq!(error_of(command::WRITE_ZEROES, 0, 0, 512, &slow), None);
    }
    #[test]
    fn extended_headers_have_their_own_rules() {
        let extended = Terms { extended_headers: true, ..TERMS };
        let error_of = |command, flags, length| {
            check_request(&header(command, flags, 0, length), &INFO, extended)
                .err()
                .map(|refusal| refusal.error)
        };
        assert_eq!(error_of(command::WRITE, flag::PAYLOAD_LEN, 512), None);
        assert_eq!(error_of(command::WRITE, flag::PAYLOAD_LEN | flag::FUA, 512), None);
        assert_eq!(error_of(command::WRITE, 0, 512), None, "as QEMU writes");
        for command in [command::READ, command::FLUSH, command::TRIM, command::CACHE, command::BLOCK_STATUS] {
            assert_eq!(error_of(command, flag::PAYLOAD_LEN, 512), Some(error::EINVAL), "command {command}");
        }
        let large = LayerInfo { size: 1 << 40, ..INFO };
        for command in [command::TRIM, command::WRITE_ZEROES, command::BLOCK_STATUS, command::CACHE] {
            assert!(check_request(&header(command, 0, 0, 1 << 40), &large, extended).is_ok(), "{command}");
        }
        let wraps = header(command::TRIM, 0, 512, u64::MAX - 511);
        assert_eq!(check_request(&wraps, &large, extended).unwrap_err().error, error::EINVAL);
    }

    #[test]
    fn who_was_not_told_the_block_sizes_may_use_any_byte() {
        let bytes = Terms { block_sizes: false, ..TERMS };
        for command in [0, 1, 4, 5, 6, 7] {
            assert!(check_request(&header(command, 0, 7, 100), &INFO, bytes).is_ok(), "command {command}");
            assert!(check_request(&header(command, 0, INFO.size - 1, 2), &INFO, bytes).is_err());
        }
        let fast = header(command::WRITE_ZEROES, flag::FAST_ZERO, 7, 512);
        assert_eq!(check_request(&fast, &INFO, bytes).unwrap_err().error, error::ENOTSUP);
    }
}
