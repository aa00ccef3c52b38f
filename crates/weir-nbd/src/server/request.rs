//! The header of a request, compact or extended ("Request message").

use zerocopy::FromBytes;

use crate::protocol::{
    EXTENDED_REQUEST_MAGIC, ExtendedRequest, REQUEST_MAGIC, RequestHeader, command, command_flag,
};

/// The header of a request, from either form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// [`command_flag`].
    pub flags: u16,
    /// [`command`].
    pub command: u16,
    /// The client's identifier of the request.
    pub cookie: u64,
    /// Bytes from the start of the export.
    pub offset: u64,
    /// Bytes. Below 4 GiB unless the headers are extended.
    pub length: u64,
    /// Bytes that follow the header, even if the server refuses the request.
    pub payload: u64,
}

/// The stream is out of sync: this value was in the place of a request's magic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongMagic(pub u32);

impl RequestHead {
    /// Bytes of the longer form.
    pub const LONGEST: usize = size_of::<ExtendedRequest>();

    /// Bytes of a header.
    #[must_use]
    pub const fn size(extended: bool) -> usize {
        if extended { size_of::<ExtendedRequest>() } else { size_of::<RequestHeader>() }
    }

    /// Parses a header at the beginning of `bytes`; also returns the bytes after it. `None` when it is incomplete.
    ///
    /// # Errors
    /// The magic is not that of a request of this form.
    pub fn read(bytes: &[u8], extended: bool) -> Result<Option<(RequestHead, &[u8])>, WrongMagic> {
        if extended { Self::read_extended(bytes) } else { Self::read_compact(bytes) }
    }

    fn read_compact(bytes: &[u8]) -> Result<Option<(RequestHead, &[u8])>, WrongMagic> {
        let Ok((header, behind)) = RequestHeader::read_from_prefix(bytes) else { return Ok(None) };
        if header.magic != REQUEST_MAGIC {
            return Err(WrongMagic(header.magic.get()));
        }
        let (command, length) = (header.command.get(), u64::from(header.length.get()));
        let head = RequestHead {
            flags: header.flags.get(),
            command,
            cookie: header.cookie.get(),
            offset: header.offset.get(),
            length,
            payload: if command == command::WRITE { length } else { 0 },
        };
        Ok(Some((head, behind)))
    }

    fn read_extended(bytes: &[u8]) -> Result<Option<(RequestHead, &[u8])>, WrongMagic> {
        let Ok((header, behind)) = ExtendedRequest::read_from_prefix(bytes) else { return Ok(None) };
        if header.magic != EXTENDED_REQUEST_MAGIC {
            return Err(WrongMagic(header.magic.get()));
        }
        let (flags, length) = (header.flags.get(), header.length.get());
        // A write must set the flag for its payload. QEMU's writes (10.0) do not, but their data follows nevertheless.
        let carries = flags & command_flag::PAYLOAD_LEN != 0 || header.command == command::WRITE;
        let head = RequestHead {
            flags,
            command: header.command.get(),
            cookie: header.cookie.get(),
            offset: header.offset.get(),
            length,
            payload: if carries { length } else { 0 },
        };
        Ok(Some((head, behind)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte by byte as in the document.
    #[test]
    fn golden_heads() {
        let compact =
            [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0];
        let head = RequestHead {
            flags: command_flag::FUA,
            command: command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 1 << 32,
            length: 512,
            payload: 512,
        };
        assert_eq!(
            RequestHead::read(&[&compact[..], b"data"].concat(), false),
            Ok(Some((head, &b"data"[..])))
        );
        let extended = [
            0x21, 0xe4, 0x1c, 0x71, 0, 0x21, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 2, 0,
        ];
        let head = RequestHead { flags: command_flag::FUA | command_flag::PAYLOAD_LEN, ..head };
        assert_eq!(
            RequestHead::read(&[&extended[..], b"data"].concat(), true),
            Ok(Some((head, &b"data"[..])))
        );
        let mut effect = extended;
        effect[5] = 1;
        let unflagged = RequestHead { flags: command_flag::FUA, ..head };
        assert_eq!(RequestHead::read(&effect, true), Ok(Some((unflagged, &b""[..]))), "as QEMU writes");
        (effect[7], effect[24]) = (4, 1);
        let head = RequestHead {
            flags: command_flag::FUA,
            command: command::TRIM,
            length: 1 << 56 | 512,
            payload: 0,
            ..head
        };
        assert_eq!(RequestHead::read(&effect, true), Ok(Some((head, &b""[..]))));
        for cut in 0..28 {
            assert_eq!(RequestHead::read(&compact[..cut], false), Ok(None));
            assert_eq!(RequestHead::read(&extended[..cut], true), Ok(None));
        }
        assert_eq!(RequestHead::read(&extended, false), Err(WrongMagic(EXTENDED_REQUEST_MAGIC)));
        assert_eq!(RequestHead::read(&[compact, compact].concat(), true), Err(WrongMagic(REQUEST_MAGIC)));
    }
}
