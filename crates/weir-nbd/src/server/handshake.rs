//! The handshake ("Fixed newstyle negotiation"), without I/O: bytes in, bytes out, and the outcome.

use zerocopy::{FromBytes, IntoBytes};

use super::directory::{Directory, ExportInfo, Session};
use super::option::{parse_contexts, parse_info, parse_name};
use crate::protocol::{
    BASE_ALLOCATION, EXPORT_NAME_PADDING, ExportSize, GREETING_MAGIC, Greeting, LONGEST_STRING, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, OptionHeader, OptionReplyHeader, client_flag, handshake_flag, info, option,
    option_reply,
};

/// Largest accepted option body, in bytes. A name has at most 4096; a few queries may accompany it.
pub const MOST_OPTION_BYTES: u32 = 64 << 10;

/// Bytes of longer options that one handshake skips; the server refuses a client that sends more (P10).
const MOST_SKIPPED: usize = 32 << 20;

/// The number of `base:allocation` in `BLOCK_STATUS` replies.
pub const BASE_ALLOCATION_ID: u32 = 1;

/// The result of [`Handshake::step`].
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// The next step needs more bytes from the client.
    NeedMore,
    /// The step processed one message. Send the output, and step again.
    Continue,
    /// Transmission begins once the output is sent. [`Handshake::into_leftover`] returns the bytes that the client sent ahead.
    Attach(Session),
    /// The client has sent `ABORT`. Send the output, then close.
    Aborted,
    /// The session cannot continue. Send the output, then close.
    Refused(HandshakeError),
}

/// The reason why the server aborted a handshake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Required by "Client flags".
    #[error("the client set unknown flags ({0:#x}); it is not an NBD client, or of a later protocol")]
    UnknownClientFlags(u32),
    /// The stream is out of sync.
    #[error("an option began with {0:#018x} instead of IHAVEOPT; it is not an NBD client")]
    BadOptionMagic(u64),
    /// The server skips options of more than [`MOST_OPTION_BYTES`], but not without limit; and `EXPORT_NAME` has no error reply,
    /// so the server closes the connection.
    #[error("option {option} announced {length} bytes, the most is {MOST_OPTION_BYTES}")]
    OptionTooLong {
        /// Its number.
        option: u32,
        /// Its announced length, in bytes.
        length: u32,
    },
    /// "Once extended headers are successfully requested, a client MUST NOT use `NBD_OPT_EXPORT_NAME`".
    #[error("the client asked by EXPORT_NAME after it had agreed on extended headers")]
    ExportNameWithExtendedHeaders,
    /// `EXPORT_NAME` has no error reply: the server closes the connection.
    #[error("the client asked by EXPORT_NAME for {name:?}: {reason}")]
    NoSuchExport {
        /// The requested name, made printable.
        name: String,
        /// From the [`Directory`].
        reason: String,
    },
    /// `EXPORT_NAME` has no error reply: the server closes the connection.
    #[error("the client asked by EXPORT_NAME without TLS, which is required here")]
    TlsRequired,
    /// Someone between client and server could have put these bytes there. A client waits for the reply before it goes on.
    #[error("unencrypted bytes followed STARTTLS; the client is faulty, or someone changes its messages")]
    BytesBeforeTls,
}

/// How far a connection is with TLS ("TLS support").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tls {
    /// The server does not speak it.
    Off,
    /// Offered; a client may go on without it.
    Optional,
    /// Offered; without it there is nothing.
    Required,
    /// The server has agreed. All that follows must be encrypted.
    Starting,
    /// In use.
    On,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    ClientFlags,
    Options,
    Over,
}

/// One client's handshake.
#[derive(Debug)]
pub struct Handshake {
    phase: Phase,
    input: Vec<u8>,
    /// Bytes of `input` already processed.
    taken: usize,
    padding: bool,
    structured_replies: bool,
    extended_headers: bool,
    /// Bytes still to skip of an option that is too long.
    skip: usize,
    /// Total bytes of such options.
    skipped: usize,
    /// The export for which the client selected `base:allocation`.
    context_of: Option<String>,
    tls: Tls,
    /// The client has asked for something that needs TLS without it.
    insisted: bool,
}

impl Handshake {
    /// Begins a handshake without TLS: appends the greeting to `out`. See [`super::TlsHandshake`] for one with.
    pub fn new(out: &mut Vec<u8>) -> Handshake {
        Handshake::with_tls(Tls::Off, out)
    }

    pub(super) fn with_tls(tls: Tls, out: &mut Vec<u8>) -> Handshake {
        let greeting = Greeting {
            magic: GREETING_MAGIC.into(),
            option_magic: OPTION_MAGIC.into(),
            flags: (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).into(),
        };
        out.extend_from_slice(greeting.as_bytes());
        Handshake {
            phase: Phase::ClientFlags,
            input: Vec::new(),
            taken: 0,
            padding: true,
            structured_replies: false,
            extended_headers: false,
            skip: 0,
            skipped: 0,
            context_of: None,
            tls,
            insisted: false,
        }
    }

    /// Takes bytes from the client. Call it when [`Handshake::step`] returns [`Step::NeedMore`]; then the handshake keeps at most
    /// one incomplete option.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.input.drain(..self.taken);
        self.taken = 0;
        self.input.extend_from_slice(bytes);
    }

    /// Processes one message, if one is complete, and appends the answer to `out`.
    ///
    /// One at a time, so that a client cannot make answers accumulate: the caller sends before the next step.
    pub fn step(&mut self, directory: &dyn Directory, out: &mut Vec<u8>) -> Step {
        let step = match self.phase {
            Phase::Over => Step::NeedMore,
            _ if self.tls == Tls::Starting => self.before_tls(),
            Phase::ClientFlags => self.client_flags(),
            Phase::Options => self.option(directory, out),
        };
        if !matches!(step, Step::NeedMore | Step::Continue) {
            self.phase = Phase::Over;
        }
        step
    }

    /// The bytes that the client sent ahead of the transmission phase.
    #[must_use]
    pub fn into_leftover(mut self) -> Vec<u8> {
        self.input.drain(..self.taken);
        self.input
    }

    pub(super) fn tls(&self) -> Tls {
        self.tls
    }

    pub(super) fn insisted(&self) -> bool {
        self.insisted
    }

    /// The connection is encrypted from now on. Fails if the client has sent more in plain text.
    pub(super) fn secured(&mut self) -> Result<(), HandshakeError> {
        if self.tls != Tls::Starting || self.taken < self.input.len() {
            self.phase = Phase::Over;
            return Err(HandshakeError::BytesBeforeTls);
        }
        self.tls = Tls::On;
        Ok(())
    }

    fn before_tls(&self) -> Step {
        if self.taken < self.input.len() {
            Step::Refused(HandshakeError::BytesBeforeTls)
        } else {
            Step::NeedMore
        }
    }

    /// Answers `STARTTLS`.
    fn start_tls(&mut self, body: &[u8], reply: &mut Reply<'_>) -> Step {
        match self.tls {
            Tls::Off => reply.error(option_reply::ERR_UNSUP, "this server speaks no TLS"),
            Tls::On | Tls::Starting => reply.error(option_reply::ERR_INVALID, "TLS is in use already"),
            Tls::Optional | Tls::Required if !body.is_empty() => {
                reply.error(option_reply::ERR_INVALID, "this option has no data");
            }
            Tls::Optional | Tls::Required if self.taken < self.input.len() => {
                return Step::Refused(HandshakeError::BytesBeforeTls);
            }
            Tls::Optional | Tls::Required => {
                // An agreement in plain text may be someone else's word (CVE-2021-3716 is this mistake in a server).
                (self.structured_replies, self.extended_headers, self.context_of) = (false, false, None);
                self.tls = Tls::Starting;
                reply.acknowledge();
            }
        }
        Step::Continue
    }

    fn client_flags(&mut self) -> Step {
        let Some((flags, _)) = self.input[self.taken..].split_first_chunk() else { return Step::NeedMore };
        let flags = u32::from_be_bytes(*flags);
        self.taken += size_of::<u32>();
        let unknown = flags & !(client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES);
        if unknown != 0 {
            return Step::Refused(HandshakeError::UnknownClientFlags(unknown));
        }
        self.padding = flags & client_flag::NO_ZEROES == 0;
        self.phase = Phase::Options;
        Step::Continue
    }

    fn option(&mut self, directory: &dyn Directory, out: &mut Vec<u8>) -> Step {
        let skipped = self.skip.min(self.input.len() - self.taken);
        self.taken += skipped;
        self.skip -= skipped;
        let Ok((header, body)) = OptionHeader::read_from_prefix(&self.input[self.taken..]) else {
            return Step::NeedMore;
        };
        let (number, length) = (header.option.get(), header.length.get());
        if header.magic != OPTION_MAGIC {
            return Step::Refused(HandshakeError::BadOptionMagic(header.magic.get()));
        }
        if length > MOST_OPTION_BYTES {
            return self.too_long(number, length, out);
        }
        let Some(body) = body.get(..length as usize) else { return Step::NeedMore };
        let body = body.to_vec();
        self.taken += size_of::<OptionHeader>() + body.len();
        if number == option::EXPORT_NAME {
            return self.export_name(&body, directory, out);
        }
        self.answer(&body, directory, &mut Reply { out, option: number })
    }

    /// "The presence of the option length in every option allows the server to skip any options".
    fn too_long(&mut self, option: u32, length: u32, out: &mut Vec<u8>) -> Step {
        let mut reply = Reply { out, option };
        let rest = MOST_SKIPPED.saturating_sub(self.skipped);
        match option {
            option::ABORT => {
                reply.acknowledge();
                Step::Aborted
            }
            option::EXPORT_NAME => Step::Refused(HandshakeError::OptionTooLong { option, length }),
            _ => {
                self.insisted |= self.tls == Tls::Required;
                match self.tls {
                    Tls::Required => reply.tls_required(),
                    _ => reply.error(option_reply::ERR_TOO_BIG, "the option is too long"),
                }
                if length as usize > rest {
                    return Step::Refused(HandshakeError::OptionTooLong { option, length });
                }
                self.taken += size_of::<OptionHeader>();
                self.skip = length as usize;
                self.skipped += length as usize;
                Step::Continue
            }
        }
    }

    /// Whether the server answers reads with chunks.
    fn chunks(&self) -> bool {
        self.structured_replies || self.extended_headers
    }

    fn answer(&mut self, body: &[u8], directory: &dyn Directory, reply: &mut Reply<'_>) -> Step {
        match reply.option {
            option::ABORT => {
                reply.acknowledge();
                return Step::Aborted;
            }
            option::STARTTLS => return self.start_tls(body, reply),
            _ if self.tls == Tls::Required => {
                self.insisted = true;
                reply.tls_required();
            }
            option::INFO => drop(describe(body, directory, self.chunks(), reply)),
            option::GO => {
                if let Some((export, block_sizes)) = describe(body, directory, self.chunks(), reply) {
                    return Step::Attach(self.session(export, block_sizes));
                }
            }
            option::LIST if body.is_empty() => list(directory, reply),
            option::STRUCTURED_REPLY if body.is_empty() && self.extended_headers => {
                reply.error(option_reply::ERR_EXT_HEADER_REQD, "extended headers have been agreed on");
            }
            option::STRUCTURED_REPLY if body.is_empty() => {
                self.structured_replies = true;
                reply.acknowledge();
            }
            option::EXTENDED_HEADERS if body.is_empty() => {
                self.extended_headers = true;
                reply.acknowledge();
            }
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                reply.error(option_reply::ERR_INVALID, "this option has no data");
            }
            option::LIST_META_CONTEXT => drop(contexts(body, directory, reply)),
            option::SET_META_CONTEXT if self.chunks() => {
                self.context_of = contexts(body, directory, reply);
            }
            option::SET_META_CONTEXT => {
                reply.error(option_reply::ERR_INVALID, "metadata contexts need structured replies first");
            }
            _ => reply.error(option_reply::ERR_UNSUP, "unknown option"),
        }
        Step::Continue
    }

    fn export_name(&mut self, body: &[u8], directory: &dyn Directory, out: &mut Vec<u8>) -> Step {
        if self.tls == Tls::Required {
            self.insisted = true;
            return Step::Refused(HandshakeError::TlsRequired);
        }
        if self.extended_headers {
            return Step::Refused(HandshakeError::ExportNameWithExtendedHeaders);
        }
        let found = parse_name(body)
            .map_err(str::to_owned)
            .and_then(|name| directory.lookup(name).map_err(|not_served| not_served.reason().to_owned()));
        let export = match found {
            Ok(export) => export,
            Err(reason) => {
                let name = String::from_utf8_lossy(body).into_owned();
                return Step::Refused(HandshakeError::NoSuchExport { name, reason });
            }
        };
        out.extend_from_slice(export_size(&export, self.structured_replies).as_bytes());
        if self.padding {
            out.extend_from_slice(&[0; EXPORT_NAME_PADDING]);
        }
        Step::Attach(self.session(export, false))
    }

    fn session(&self, export: ExportInfo, block_sizes: bool) -> Session {
        let selected = self.context_of.as_ref() == Some(&export.name);
        Session {
            structured_replies: self.chunks(),
            extended_headers: self.extended_headers,
            block_sizes,
            base_allocation: selected.then_some(BASE_ALLOCATION_ID),
            flags: export.flags(self.chunks()),
            export: export.name,
        }
    }
}

/// Answers `INFO` or `GO`; on success returns the export, and whether the client has requested the block sizes, which it must
/// then respect.
fn describe(
    body: &[u8],
    directory: &dyn Directory,
    structured: bool,
    reply: &mut Reply<'_>,
) -> Option<(ExportInfo, bool)> {
    let query = accept(parse_info(body), option_reply::ERR_INVALID, reply)?;
    let export = find(directory, query.name, reply)?;
    reply.information(info::EXPORT, export_size(&export, structured).as_bytes());
    if query.wants(info::NAME) {
        reply.information(info::NAME, export.name.as_bytes());
    }
    if query.wants(info::DESCRIPTION) && !export.description.is_empty() {
        reply.information(info::DESCRIPTION, shortened(&export.description).as_bytes());
    }
    if query.wants(info::BLOCK_SIZE) {
        let sizes = export.block_sizes().map(u32::to_be_bytes);
        reply.information(info::BLOCK_SIZE, sizes.as_bytes());
    }
    reply.acknowledge();
    Some((export, query.wants(info::BLOCK_SIZE)))
}

fn list(directory: &dyn Directory, reply: &mut Reply<'_>) {
    for export in directory.list() {
        let length = (export.name.len() as u32).to_be_bytes();
        let description = shortened(&export.description);
        reply.send(option_reply::SERVER, &[&length, export.name.as_bytes(), description.as_bytes()]);
    }
    reply.acknowledge();
}

/// Answers a query for metadata contexts; returns the export's canonical name if `base:allocation` was selected.
///
/// A list may use a wildcard (no query at all, or the bare namespace); a selection names its contexts.
fn contexts(body: &[u8], directory: &dyn Directory, reply: &mut Reply<'_>) -> Option<String> {
    let query = accept(parse_contexts(body), option_reply::ERR_INVALID, reply)?;
    let export = find(directory, query.name, reply)?;
    let listing = reply.option == option::LIST_META_CONTEXT;
    let named = query.queries().any(|query| query == BASE_ALLOCATION.as_bytes());
    let wildcard = listing && (query.count == 0 || query.queries().any(|query| query == b"base:"));
    if named || wildcard {
        // "The metadata context ID in these replies [of a listing] is reserved and SHOULD be set to zero".
        let id = if listing { 0 } else { BASE_ALLOCATION_ID };
        reply.send(option_reply::META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()]);
    }
    reply.acknowledge();
    named.then_some(export.name)
}

/// The value; on an error, replies with the reason.
fn accept<T>(result: Result<T, impl AsRef<str>>, error: u32, reply: &mut Reply<'_>) -> Option<T> {
    result.map_err(|reason| reply.error(error, reason.as_ref())).ok()
}

/// The export, or an error reply with the reason.
fn find(directory: &dyn Directory, name: &str, reply: &mut Reply<'_>) -> Option<ExportInfo> {
    let found = directory.lookup(name);
    found.map_err(|not_served| reply.error(not_served.reply(), not_served.reason())).ok()
}

fn export_size(export: &ExportInfo, structured: bool) -> ExportSize {
    ExportSize { size: export.layer.size.into(), flags: export.flags(structured).into() }
}

/// A text, truncated to the protocol's limit of strings.
fn shortened(text: &str) -> &str {
    let mut end = text.len().min(LONGEST_STRING);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Replies to one option.
struct Reply<'a> {
    out: &'a mut Vec<u8>,
    option: u32,
}

impl Reply<'_> {
    fn send(&mut self, kind: u32, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let header = OptionReplyHeader {
            magic: OPTION_REPLY_MAGIC.into(),
            option: self.option.into(),
            kind: kind.into(),
            length: (length as u32).into(),
        };
        self.out.extend_from_slice(header.as_bytes());
        for part in parts {
            self.out.extend_from_slice(part);
        }
    }

    fn acknowledge(&mut self) {
        self.send(option_reply::ACK, &[]);
    }

    fn error(&mut self, kind: u32, reason: &str) {
        self.send(kind, &[shortened(reason).as_bytes()]);
    }

    fn tls_required(&mut self) {
        self.error(option_reply::ERR_TLS_REQD, "this server requires TLS; ask by STARTTLS first");
    }

    fn information(&mut self, kind: u16, body: &[u8]) {
        self.send(option_reply::INFO, &[&kind.to_be_bytes(), body]);
    }
}
