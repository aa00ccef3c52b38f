//! Whether a request may go to the layer. Layers never see one that is malformed, misaligned, empty or outside
//! the disk.

use weir_block::{Code, IoError, LayerInfo};

use super::directory::largest_payload;
use crate::protocol::{RequestHeader, command, command_flag as flag, error};

/// A request that is in order. Offset and length are as in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckedRequest {
    /// Bytes out.
    Read,
    /// Bytes in. The payload follows the header.
    Write {
        /// Answer only once the data is durable.
        fua: bool,
    },
    /// Make answered writes durable.
    Flush,
    /// A range is not needed any more.
    Discard {
        /// Answer only once that is durable.
        fua: bool,
    },
    /// A range will be needed soon.
    Cache,
    /// A range shall read as zeroes.
    WriteZeroes {
        /// Answer only once the zeroes are durable.
        fua: bool,
        /// The range may become a hole.
        may_unmap: bool,
        /// Zero faster than by writing, or fail.
        fast_only: bool,
    },
    /// What a range holds.
    BlockStatus {
        /// One extent only.
        one: bool,
    },
    /// Finish what is under way and disconnect; has no answer.
    Disconnect,
}

/// What the client is told instead.
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

/// What of the handshake counts for a request.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Reads and errors are answered with structured replies.
    pub structured_replies: bool,
    /// Number of the context `base:allocation`, when the client has selected it.
    pub base_allocation: Option<u32>,
}

/// Whether a request may go to a layer that is described by `info`.
///
/// # Errors
/// What the client is told: the request is unknown, malformed, misaligned, outside the disk, too large, or not offered.
pub fn check_request(
    header: &RequestHeader,
    info: &LayerInfo,
    terms: Terms,
) -> Result<CheckedRequest, Refusal> {
    let flags = header.flags.get();
    let fua = flags & flag::FUA != 0;
    let (command, allowed) = match header.command.get() {
        command::READ if terms.structured_replies => (CheckedRequest::Read, flag::DF),
        command::READ => (CheckedRequest::Read, 0),
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
    check_range(command, header, info)?;
    Ok(command)
}

/// Whether the export offers the command at all.
fn check_use(command: CheckedRequest, info: &LayerInfo, terms: Terms) -> Result<(), Refusal> {
    let writes = matches!(
        command,
        CheckedRequest::Write { .. } | CheckedRequest::Discard { .. } | CheckedRequest::WriteZeroes { .. }
    );
    if writes && !info.writable {
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

fn check_range(command: CheckedRequest, header: &RequestHeader, info: &LayerInfo) -> Result<(), Refusal> {
    let (offset, length) = (header.offset.get(), header.length.get());
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
    if !offset.is_multiple_of(block) || !u64::from(length).is_multiple_of(block) {
        return refuse(error::EINVAL, "offset or length is not a multiple of the minimum block size");
    }
    if offset.checked_add(length.into()).is_none_or(|end| end > info.size) {
        let grows = matches!(command, CheckedRequest::Write { .. } | CheckedRequest::WriteZeroes { .. });
        let error = if grows { error::ENOSPC } else { error::EINVAL };
        return refuse(error, "the range ends beyond the end of the disk");
    }
    let carries_data = matches!(command, CheckedRequest::Read | CheckedRequest::Write { .. });
    if carries_data && length > largest_payload(info) {
        let unfragmented = header.flags.get() & flag::DF != 0;
        let error = if unfragmented { error::EOVERFLOW } else { error::EINVAL };
        return refuse(error, "the length is above the maximum block size");
    }
    Ok(())
}

/// How a layer's error is told to a client ("Error values").
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
        Code::Io => error::EIO,
        // The client has to let go of this server and look for the disk elsewhere.
        Code::NotOwner | Code::ShuttingDown => error::ESHUTDOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::REQUEST_MAGIC;

    const INFO: LayerInfo = LayerInfo {
        size: 1 << 30,
        logical_block: 512,
        preferred_block: 4096,
        max_transfer: 32 << 20,
        writable: true,
        fast_zeroes: true,
        discards: true,
    };
    const TERMS: Terms = Terms { structured_replies: true, base_allocation: Some(1) };

    fn header(command: u16, flags: u16, offset: u64, length: u32) -> RequestHeader {
        RequestHeader {
            magic: REQUEST_MAGIC.into(),
            flags: flags.into(),
            command: command.into(),
            cookie: 7.into(),
            offset: offset.into(),
            length: length.into(),
        }
    }

    fn error_of(command: u16, flags: u16, offset: u64, length: u32, info: &LayerInfo) -> Option<u32> {
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
        assert_eq!(error_of(command::READ, 0, 0, (32 << 20) + 512, &INFO), Some(error::EINVAL));
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
        let plain = Terms { structured_replies: false, base_allocation: None };
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
}
