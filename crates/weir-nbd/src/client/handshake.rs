//! From a fresh stream to an export that takes requests ("Newstyle negotiation").

use std::io::{self, Read, Write};

use zerocopy::{FromBytes, IntoBytes};

use crate::protocol::{
    BASE_ALLOCATION, BlockSizes, ExportSize, GREETING_MAGIC, Greeting, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    OptionHeader, OptionReplyHeader, TlsMode, client_flag, handshake_flag, info, option, option_reply,
    transmission_flag,
};

/// Most bytes of the names of exports.
const MOST_NAMES: usize = 1 << 20;

/// Largest accepted reply to an option, in bytes.
const LARGEST_REPLY: usize = 64 << 10;

/// The server's description of the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Bytes.
    pub size: u64,
    /// Transmission flags as received.
    pub flags: u16,
    /// Offsets and lengths are multiples of this, in bytes (1 if the server did not send it).
    pub minimum_block: u32,
    /// Smallest efficient request, in bytes (4096 if the server did not send it).
    pub preferred_block: u32,
    /// Largest read or write, in bytes (32 MiB if the server did not send it).
    pub maximum_block: u32,
    /// Both ends agreed on structured replies, or on extended headers, which include them.
    pub structured_replies: bool,
    /// Both ends agreed on headers with 64-bit lengths.
    pub extended_headers: bool,
    /// The number of the context `base:allocation`, if both ends agreed on it.
    pub allocation_context: Option<u32>,
}

impl Export {
    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.has(transmission_flag::READ_ONLY)
    }

    /// Understands flush.
    #[must_use]
    pub fn can_flush(&self) -> bool {
        self.has(transmission_flag::SEND_FLUSH)
    }

    /// Understands the FUA flag.
    #[must_use]
    pub fn can_fua(&self) -> bool {
        self.has(transmission_flag::SEND_FUA)
    }

    /// Understands trim.
    #[must_use]
    pub fn can_trim(&self) -> bool {
        self.has(transmission_flag::SEND_TRIM)
    }

    /// Understands `write_zeroes`.
    #[must_use]
    pub fn can_write_zeroes(&self) -> bool {
        self.has(transmission_flag::SEND_WRITE_ZEROES)
    }

    /// Understands the fast-zero flag.
    #[must_use]
    pub fn can_fast_zero(&self) -> bool {
        self.has(transmission_flag::SEND_FAST_ZERO)
    }

    /// A flush on one connection covers the answered writes of all.
    #[must_use]
    pub fn can_multi_conn(&self) -> bool {
        self.has(transmission_flag::CAN_MULTI_CONN)
    }
}

/// The failure of a handshake.
#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    /// The connection failed.
    #[error("the connection failed during the handshake: {0}")]
    Io(#[from] io::Error),
    /// The server violates the protocol.
    #[error("the server violates the NBD protocol: {0}")]
    Protocol(&'static str),
    /// The server refuses.
    #[error("the server refuses: {reason}")]
    Refused {
        /// The number of the error reply.
        reply: u32,
        /// Its message, or ours for the number.
        reason: String,
    },
    /// TLS is required here.
    #[error("the server speaks no TLS, which is required here: {reason}")]
    NoTls {
        /// Its message, or ours for its error number.
        reason: String,
    },
}

/// The requested options beside the export.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wishes {
    pub structured_replies: bool,
    pub extended_headers: bool,
}

/// Negotiates `name` on a blocking stream, without TLS.
pub(super) fn negotiate(
    stream: &mut (impl Read + Write),
    name: &str,
    wishes: Wishes,
) -> Result<Export, NegotiationError> {
    greet(stream)?;
    choose(stream, name, wishes)
}

fn choose(stream: &mut (impl Read + Write), name: &str, wishes: Wishes) -> Result<Export, NegotiationError> {
    let mut export = Export {
        size: 0,
        flags: 0,
        minimum_block: 1,
        preferred_block: 4096,
        maximum_block: 32 << 20,
        structured_replies: false,
        extended_headers: false,
        allocation_context: None,
    };
    if wishes.extended_headers {
        export.extended_headers = accepts(stream, option::EXTENDED_HEADERS)?;
        export.structured_replies = export.extended_headers;
    }
    if wishes.structured_replies && !export.extended_headers {
        export.structured_replies = accepts(stream, option::STRUCTURED_REPLY)?;
    }
    if export.structured_replies {
        export.allocation_context = ask_for_allocation(stream, name)?;
    }
    go(stream, name, &mut export)?;
    Ok(export)
}

/// The names of the exports, if the server lists them. Ends the session.
pub(super) fn list(stream: &mut (impl Read + Write)) -> Result<Option<Vec<String>>, NegotiationError> {
    greet(stream)?;
    send_option(stream, option::LIST, &[])?;
    let (mut names, mut bytes) = (Vec::new(), 0);
    loop {
        let reply = read_reply(stream, option::LIST)?;
        match reply.kind {
            option_reply::SERVER => {
                let name = listed_name(&reply.body)
                    .ok_or(NegotiationError::Protocol("a listed export without a name"))?;
                // A short name takes memory, too.
                bytes += name.len() + size_of::<String>();
                if bytes > MOST_NAMES {
                    return Err(NegotiationError::Protocol("a list of exports that is longer than 1 MiB"));
                }
                names.push(name);
            }
            option_reply::ACK => break,
            // It would refuse each of its exports as well.
            option_reply::ERR_TLS_REQD => {
                return Err(NegotiationError::Refused { reply: reply.kind, reason: reply.reason() });
            }
            _ if reply.is_error() => {
                let _ = send_option(stream, option::ABORT, &[]);
                return Ok(None);
            }
            _ => return Err(NegotiationError::Protocol("an unknown reply to LIST")),
        }
    }
    // It may end the connection before it hears that.
    let _ = send_option(stream, option::ABORT, &[]);
    Ok(Some(names))
}

fn listed_name(body: &[u8]) -> Option<String> {
    let (length, rest) = body.split_first_chunk::<4>()?;
    let name = rest.get(..u32::from_be_bytes(*length) as usize)?;
    String::from_utf8(name.to_vec()).ok()
}

/// A handshake in steps, so that the stream can change to TLS in between: [`Negotiation::begin`], [`Negotiation::start_tls`], if
/// that agrees [`Negotiation::over`], then [`Negotiation::choose`].
#[derive(Debug)]
pub struct Negotiation<S>(S);

impl<S: Read + Write> Negotiation<S> {
    /// Exchanges greetings on a blocking stream.
    ///
    /// # Errors
    /// The stream fails, or the other end is no NBD server.
    pub fn begin(mut stream: S) -> Result<Negotiation<S>, NegotiationError> {
        greet(&mut stream)?;
        Ok(Negotiation(stream))
    }

    /// Asks for TLS unless it is off, before any other option. True: the server begins its TLS handshake now, and nothing more may
    /// be sent in plain text.
    ///
    /// # Errors
    /// [`NegotiationError::NoTls`] if TLS is required and the server does not agree.
    pub fn start_tls(&mut self, mode: TlsMode) -> Result<bool, NegotiationError> {
        if mode == TlsMode::Off {
            return Ok(false);
        }
        send_option(&mut self.0, option::STARTTLS, &[])?;
        let reply = read_reply(&mut self.0, option::STARTTLS)?;
        match reply.kind {
            option_reply::ACK if reply.body.is_empty() => Ok(true),
            option_reply::ACK => Err(NegotiationError::Protocol("an agreement to TLS with data")),
            _ if !reply.is_error() => Err(NegotiationError::Protocol("an unknown reply to STARTTLS")),
            _ if mode == TlsMode::Required => Err(NegotiationError::NoTls { reason: reply.reason() }),
            _ => Ok(false),
        }
    }

    /// The same negotiation over another stream: TLS over the former one.
    ///
    /// # Errors
    /// That of `change`.
    pub fn over<T: Read + Write, E>(
        self,
        change: impl FnOnce(S) -> Result<T, E>,
    ) -> Result<Negotiation<T>, E> {
        change(self.0).map(Negotiation)
    }

    /// Chooses the export, with structured replies or extended headers if they are wanted and the server has them. Ends the
    /// handshake.
    ///
    /// # Errors
    /// The stream fails, or the server refuses.
    pub fn choose(
        mut self,
        export: &str,
        structured_replies: bool,
        extended_headers: bool,
    ) -> Result<(S, Export), NegotiationError> {
        let wishes = Wishes { structured_replies, extended_headers: structured_replies && extended_headers };
        let export = choose(&mut self.0, export, wishes)?;
        Ok((self.0, export))
    }
}

/// Whether the server agrees to an option without data.
fn accepts(stream: &mut (impl Read + Write), option: u32) -> Result<bool, NegotiationError> {
    send_option(stream, option, &[])?;
    Ok(read_reply(stream, option)?.kind == option_reply::ACK)
}

fn greet(stream: &mut (impl Read + Write)) -> Result<(), NegotiationError> {
    let mut bytes = [0; size_of::<Greeting>()];
    stream.read_exact(&mut bytes)?;
    let greeting =
        Greeting::read_from_bytes(&bytes).map_err(|_| NegotiationError::Protocol("short greeting"))?;
    if greeting.magic != GREETING_MAGIC {
        return Err(NegotiationError::Protocol(
            "the greeting does not start with NBDMAGIC: is this an NBD server?",
        ));
    }
    let flags = greeting.flags.get();
    if greeting.option_magic != OPTION_MAGIC || flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(NegotiationError::Protocol(
            "the server speaks only an old form of NBD (fixed newstyle is needed)",
        ));
    }
    let mut answer = client_flag::FIXED_NEWSTYLE;
    if flags & handshake_flag::NO_ZEROES != 0 {
        answer |= client_flag::NO_ZEROES;
    }
    stream.write_all(&answer.to_be_bytes())?;
    Ok(())
}

fn send_option(stream: &mut impl Write, option: u32, body: &[u8]) -> io::Result<()> {
    let header = OptionHeader {
        magic: OPTION_MAGIC.into(),
        option: option.into(),
        length: (body.len() as u32).into(),
    };
    stream.write_all(&[header.as_bytes(), body].concat())
}

struct Reply {
    /// The option that it answers.
    asked: u32,
    kind: u32,
    body: Vec<u8>,
}

impl Reply {
    fn is_error(&self) -> bool {
        self.kind & option_reply::ERROR != 0
    }

    /// The server's message, or ours for its error number.
    fn reason(&self) -> String {
        // A policy error with a message of its own needs none of ours.
        if self.kind == option_reply::ERR_POLICY && !self.body.is_empty() {
            return words(&self.body);
        }
        let number = match self.kind {
            option_reply::ERR_UNKNOWN => "there is no such export",
            option_reply::ERR_TLS_REQD => "it requires TLS, which this client was not told to use",
            option_reply::ERR_POLICY => "forbidden by its policy",
            option_reply::ERR_SHUTDOWN => "it is being shut down",
            option_reply::ERR_EXT_HEADER_REQD => "it requires extended headers",
            option_reply::ERR_UNSUP if self.asked == option::GO => "it does not know NBD_OPT_GO",
            option_reply::ERR_UNSUP => "it does not know the option",
            _ => "it calls the option invalid",
        };
        match words(&self.body) {
            text if text.is_empty() => number.into(),
            text => format!("{number} ({text})"),
        }
    }
}

/// A server's message for people: not long, and nothing in it that a terminal would obey.
fn words(message: &[u8]) -> String {
    const LONGEST: usize = 300;
    let text = String::from_utf8_lossy(message);
    text.chars().take(LONGEST).map(|one| if one.is_control() { ' ' } else { one }).collect()
}

fn read_reply(stream: &mut impl Read, asked: u32) -> Result<Reply, NegotiationError> {
    let mut bytes = [0; size_of::<OptionReplyHeader>()];
    stream.read_exact(&mut bytes)?;
    let header =
        OptionReplyHeader::read_from_bytes(&bytes).map_err(|_| NegotiationError::Protocol("short reply"))?;
    if header.magic != OPTION_REPLY_MAGIC || header.option != asked {
        return Err(NegotiationError::Protocol("a reply to an option that was not sent"));
    }
    let length = header.length.get() as usize;
    if length > LARGEST_REPLY {
        return Err(NegotiationError::Protocol("a reply to an option is larger than 64 KiB"));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(Reply { asked, kind: header.kind.get(), body })
}

/// "Metadata querying": agrees on `base:allocation`, if the server has it.
fn ask_for_allocation(stream: &mut (impl Read + Write), name: &str) -> Result<Option<u32>, NegotiationError> {
    let mut body = text(name);
    body.extend(1u32.to_be_bytes());
    body.extend(text(BASE_ALLOCATION));
    send_option(stream, option::SET_META_CONTEXT, &body)?;
    let mut context = None;
    loop {
        let reply = read_reply(stream, option::SET_META_CONTEXT)?;
        match reply.kind {
            option_reply::META_CONTEXT => {
                let (number, found) = reply
                    .body
                    .split_first_chunk::<4>()
                    .ok_or(NegotiationError::Protocol("a context without a number"))?;
                if found == BASE_ALLOCATION.as_bytes() {
                    context = Some(u32::from_be_bytes(*number));
                }
            }
            option_reply::ACK => return Ok(context),
            _ if reply.is_error() => return Ok(None),
            _ => return Err(NegotiationError::Protocol("an unknown reply to SET_META_CONTEXT")),
        }
    }
}

fn go(stream: &mut (impl Read + Write), name: &str, export: &mut Export) -> Result<(), NegotiationError> {
    let mut body = text(name);
    body.extend(1u16.to_be_bytes());
    body.extend(info::BLOCK_SIZE.to_be_bytes());
    send_option(stream, option::GO, &body)?;
    let mut described = false;
    loop {
        let reply = read_reply(stream, option::GO)?;
        match reply.kind {
            option_reply::INFO => described |= take_info(&reply.body, export)?,
            option_reply::ACK if described => return Ok(()),
            option_reply::ACK => return Err(NegotiationError::Protocol("the export was not described")),
            _ if reply.is_error() => {
                return Err(NegotiationError::Refused { reply: reply.kind, reason: reply.reason() });
            }
            _ => return Err(NegotiationError::Protocol("an unknown reply to GO")),
        }
    }
}

/// True if the information was size and flags.
fn take_info(body: &[u8], export: &mut Export) -> Result<bool, NegotiationError> {
    let malformed = || NegotiationError::Protocol("malformed information about the export");
    let (kind, body) = body.split_first_chunk::<2>().ok_or_else(malformed)?;
    match u16::from_be_bytes(*kind) {
        info::EXPORT => {
            let size = ExportSize::read_from_bytes(body).map_err(|_| malformed())?;
            (export.size, export.flags) = (size.size.get(), size.flags.get());
            Ok(true)
        }
        info::BLOCK_SIZE => {
            let sizes = BlockSizes::read_from_bytes(body).map_err(|_| malformed())?;
            export.minimum_block = sizes.minimum.get().max(1);
            export.preferred_block = sizes.preferred.get();
            export.maximum_block = sizes.maximum.get().min(32 << 20);
            Ok(false)
        }
        _ => Ok(false),
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}
