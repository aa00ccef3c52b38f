//! The replies of one connection that are on their way to its socket.
//!
//! Heads are written one after the other into one arena, payloads stay in the buffers that the layer filled. One
//! `sendmsg` takes up to a thousand pieces of both.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use weir_block::{Buffer, Meter, Nanos, RequestKind, Sent, Socket};
use zerocopy::IntoBytes;

use weir_nbd::protocol::{
    ChunkHeader, EXTENDED_REPLY_MAGIC, ExtendedReply, ExtendedStatusDescriptor, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, SimpleReply, reply_flag, reply_type,
};
use weir_nbd::server::Terms;

/// Most pieces in one call; the kernel's own limit.
const MOST_SLICES: usize = 1024;

/// Sent heads at the beginning of the arena that are worth moving the rest for, in bytes.
const COMPACT_AT: usize = 16 << 10;

/// The meter's entry for a request, added when the socket has taken the reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    pub kind: RequestKind,
    pub bytes: u64,
    pub arrived: Nanos,
}

/// The form of replies on a connection, negotiated in its handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Simple,
    Structured,
    Extended,
}

impl From<Terms> for Form {
    fn from(terms: Terms) -> Form {
        match (terms.extended_headers, terms.structured_replies) {
            (true, _) => Form::Extended,
            (false, true) => Form::Structured,
            (false, false) => Form::Simple,
        }
    }
}

/// The request that a reply is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    pub form: Form,
    pub cookie: u64,
    pub offset: u64,
}

/// The data of a read: the bytes of the buffer from `from` on.
#[derive(Debug)]
pub(super) struct Data {
    pub buffer: Buffer,
    pub from: usize,
}

impl Data {
    fn bytes(&self) -> &[u8] {
        &self.buffer.bytes()[self.from..]
    }
}

#[derive(Debug)]
struct Reply {
    /// Bytes in the arena.
    head: usize,
    payload: Option<Data>,
    counted: Option<Counted>,
    success: bool,
}

impl Reply {
    fn length(&self) -> usize {
        self.head + self.payload.as_ref().map_or(0, |data| data.bytes().len())
    }
}

/// Whether the socket has taken all replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    All,
    /// The kernel takes no more at present.
    Full,
}

#[derive(Debug, Default)]
pub(super) struct Replies {
    queue: VecDeque<Reply>,
    heads: Vec<u8>,
    /// The offset in `heads` of the first reply of the queue.
    first_head: usize,
    /// Bytes of the first reply that are out.
    sent_of_first: usize,
    /// Bytes of payload in the queue.
    payload_bytes: usize,
}

impl Replies {
    /// Replies that are not out completely.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes of buffers that are held until they are out.
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// Success without data. A simple reply is allowed also where structured ones were agreed on, and shorter.
    pub fn done(&mut self, to: To, counted: Option<Counted>) {
        let head = match to.form {
            Form::Extended => self.chunk(to, reply_type::NONE, true, 0),
            Form::Simple | Form::Structured => self.simple(0, to.cookie),
        };
        self.push(head, None, counted, true);
    }

    /// Data of a read, from `at` of the export on. Where replies are chunks, more may follow until the `last`.
    pub fn data(&mut self, to: To, at: u64, data: Data, last: bool, counted: Option<Counted>) {
        let head = match to.form {
            Form::Simple => self.simple(0, to.cookie),
            Form::Structured | Form::Extended => {
                let head =
                    self.chunk(to, reply_type::OFFSET_DATA, last, size_of::<u64>() + data.bytes().len());
                head + self.head_bytes(&at.to_be_bytes())
            }
        };
        self.push(head, Some(data), counted, true);
    }

    /// More data of a simple reply whose beginning was the reply before.
    pub fn more_data(&mut self, data: Data, counted: Option<Counted>) {
        self.push(0, Some(data), counted, true);
    }

    /// Extents of one metadata context; `descriptors` are as on the wire.
    pub fn block_status(&mut self, to: To, context: u32, descriptors: Buffer, counted: Counted) {
        let mut head = 0;
        if to.form == Form::Extended {
            let count = descriptors.len() / size_of::<ExtendedStatusDescriptor>();
            head +=
                self.chunk(to, reply_type::BLOCK_STATUS_EXT, true, 2 * size_of::<u32>() + descriptors.len());
            head += self.head_bytes(&context.to_be_bytes());
            head += self.head_bytes(&u32::try_from(count).expect("a few hundred").to_be_bytes());
        } else {
            head += self.chunk(to, reply_type::BLOCK_STATUS, true, size_of::<u32>() + descriptors.len());
            head += self.head_bytes(&context.to_be_bytes());
        }
        self.push(head, Some(Data { buffer: descriptors, from: 0 }), Some(counted), true);
    }

    /// Failure, with the reason in words where the client understands them.
    pub fn error(&mut self, to: To, error: u32, message: &'static str, counted: Option<Counted>) {
        let head = if to.form == Form::Simple {
            self.simple(error, to.cookie)
        } else {
            let length = u16::try_from(message.len()).expect("messages are short literals");
            let body = size_of::<u32>() + size_of::<u16>() + message.len();
            self.chunk(to, reply_type::ERROR, true, body)
                + self.head_bytes(&error.to_be_bytes())
                + self.head_bytes(&length.to_be_bytes())
                + self.head_bytes(message.as_bytes())
        };
        self.push(head, None, counted, false);
    }

    /// Hands as much as possible to the socket.
    ///
    /// `slices` is scratch space, returned empty.
    pub fn send(
        &mut self,
        socket: &mut Socket,
        slices: &mut Vec<IoSlice<'static>>,
        meter: &mut Meter,
    ) -> io::Result<Flushed> {
        while !self.is_empty() {
            let mut gathered = recycle(std::mem::take(slices));
            let offered = self.gather(&mut gathered);
            let sent = socket.send(&gathered);
            *slices = recycle(gathered);
            match sent? {
                Sent::Full => return Ok(Flushed::Full),
                Sent::Bytes(sent) => {
                    self.account(sent, meter);
                    if sent < offered {
                        return Ok(Flushed::Full);
                    }
                }
            }
        }
        Ok(Flushed::All)
    }

    /// Gives everything up: the client is gone.
    pub fn discard(&mut self, meter: &mut Meter) {
        let now = Nanos::now();
        for reply in self.queue.drain(..) {
            if let Some(Counted { kind, bytes, arrived }) = reply.counted {
                meter.complete(kind, bytes, arrived, now, false);
            }
        }
        *self = Replies::default();
    }

    /// Collects the pieces that are to be sent next; returns their length in bytes.
    fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        let mut offered = 0;
        let mut push = |slices: &mut Vec<IoSlice<'a>>, bytes: &'a [u8]| {
            if !bytes.is_empty() {
                offered += bytes.len();
                slices.push(IoSlice::new(bytes));
            }
        };
        // Heads without payload between them are one piece.
        let mut skip = self.sent_of_first;
        let mut end = self.first_head;
        let mut start = end + skip.min(self.queue.front().map_or(0, |reply| reply.head));
        for reply in &self.queue {
            if slices.len() + 2 > MOST_SLICES {
                break;
            }
            end += reply.head;
            if let Some(payload) = &reply.payload {
                push(slices, &self.heads[start..end]);
                push(slices, &payload.bytes()[skip.saturating_sub(reply.head)..]);
                start = end;
            }
            skip = 0;
        }
        push(slices, &self.heads[start..end]);
        offered
    }

    fn account(&mut self, mut sent: usize, meter: &mut Meter) {
        let now = Nanos::now();
        while sent > 0 {
            let first = self.queue.front().expect("no more was sent than was queued");
            let left = first.length() - self.sent_of_first;
            if sent < left {
                self.sent_of_first += sent;
                break;
            }
            sent -= left;
            self.sent_of_first = 0;
            let reply = self.queue.pop_front().expect("looked at above");
            self.first_head += reply.head;
            self.payload_bytes -= reply.payload.as_ref().map_or(0, |data| data.buffer.len());
            if let Some(Counted { kind, bytes, arrived }) = reply.counted {
                meter.complete(kind, bytes, arrived, now, reply.success);
            }
        }
        if self.queue.is_empty() {
            self.heads.clear();
            self.first_head = 0;
        } else if self.first_head >= COMPACT_AT {
            self.heads.drain(..self.first_head);
            self.first_head = 0;
        }
    }

    fn push(&mut self, head: usize, payload: Option<Data>, counted: Option<Counted>, success: bool) {
        self.payload_bytes += payload.as_ref().map_or(0, |data| data.buffer.len());
        self.queue.push_back(Reply { head, payload, counted, success });
    }

    fn simple(&mut self, error: u32, cookie: u64) -> usize {
        let reply =
            SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() };
        self.head_bytes(reply.as_bytes())
    }

    /// The head of a chunk, structured or extended.
    fn chunk(&mut self, to: To, kind: u16, last: bool, length: usize) -> usize {
        let flags = if last { reply_flag::DONE } else { 0 };
        let length = u32::try_from(length).expect("payloads have at most 32 MiB");
        if to.form == Form::Extended {
            let header = ExtendedReply {
                magic: EXTENDED_REPLY_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: to.cookie.into(),
                offset: to.offset.into(),
                length: u64::from(length).into(),
            };
            return self.head_bytes(header.as_bytes());
        }
        let header = ChunkHeader {
            magic: STRUCTURED_REPLY_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: to.cookie.into(),
            length: length.into(),
        };
        self.head_bytes(header.as_bytes())
    }

    fn head_bytes(&mut self, bytes: &[u8]) -> usize {
        self.heads.extend_from_slice(bytes);
        bytes.len()
    }
}

/// The same allocation, empty, for slices of another lifetime.
fn recycle<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| unreachable!("just cleared")).collect()
}
