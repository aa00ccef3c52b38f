//! A connection to a peer on a shard: frames are queued, sent in one batch, and received without a copy.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::rc::Rc;

use weir_block::{Buffer, Interest, Reactor, Received, Region, Sent, Socket, Stream, Token};

use crate::frame::{self, Frame, FrameError, HEADER, LARGEST_DATA, LARGEST_META};

/// Initial size of the receive buffer; it grows to hold one largest frame and the bytes after it.
const FIRST_BUFFER: usize = 256 << 10;
const LARGEST_BUFFER: usize = HEADER + LARGEST_META + LARGEST_DATA + FIRST_BUFFER;

/// Above this many unsent bytes the caller should not queue more ([`Channel::is_backed_up`]).
const BACKED_UP: usize = 1 << 20;

/// Why a channel ended.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// A socket error.
    #[error("connection to the peer broke: {0}")]
    Broken(#[from] io::Error),
    /// The received bytes are not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Largest buffer, in bytes, that a copied frame ([`Channel::copy_out`]) keeps for reuse.
const LARGEST_SPARE: usize = HEADER + LARGEST_META;

/// One outgoing frame: the encoded part, then pieces of a region or a buffer, sent without a copy.
struct Outgoing {
    head: Vec<u8>,
    pieces: Vec<(usize, usize)>,
    buffer: Option<Rc<Buffer>>,
    /// Bytes of this frame that were sent.
    sent: usize,
    length: usize,
}

/// A channel to one peer. Data pieces are borrowed from one region (the log's arena) and must stay unchanged until they are sent,
/// copied out ([`Channel::copy_out`]) or the channel is dropped; a send copies, so the kernel keeps no reference afterwards.
pub struct Channel {
    socket: Socket,
    region: Option<Rc<Region>>,
    outgoing: VecDeque<Outgoing>,
    unsent: usize,
    next_out: u64,
    blocked: bool,
    spare: Vec<Outgoing>,
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    next_in: u64,
    readable: bool,
    #[cfg(feature = "planted-bugs")]
    counts_parts: bool,
}

impl Channel {
    /// Wraps a connected socket whose events carry `token`. `received` are bytes already read from it.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(
        stream: Stream,
        token: Token,
        region: Option<Rc<Region>>,
        received: &[u8],
        reactor: &mut Reactor,
    ) -> io::Result<Channel> {
        // The handshake may have read ahead; then no event says that there is something to read.
        let readable = matches!(stream, Stream::Protected(..));
        let mut socket = Socket::new(stream, token)?;
        socket.watch_read(reactor);
        let mut incoming = vec![0; FIRST_BUFFER.max(received.len())];
        incoming[..received.len()].copy_from_slice(received);
        Ok(Channel {
            socket,
            region,
            outgoing: VecDeque::new(),
            unsent: 0,
            next_out: 0,
            blocked: false,
            spare: Vec::new(),
            incoming,
            start: 0,
            end: received.len(),
            next_in: 0,
            readable,
            #[cfg(feature = "planted-bugs")]
            counts_parts: false,
        })
    }

    /// Plants a bug: a partly sent frame counts as sent.
    #[cfg(feature = "planted-bugs")]
    pub fn plant_counting_parts(&mut self) {
        self.counts_parts = true;
    }

    /// Whether the frame counts as sent.
    fn has_left(&self, frame: &Outgoing) -> bool {
        #[cfg(feature = "planted-bugs")]
        if self.counts_parts {
            return true;
        }
        frame.sent == frame.length
    }

    /// Call with each event of this channel's token.
    pub fn on_event(&mut self, interest: Interest) {
        self.socket.on_event(interest);
        match interest {
            Interest::Read => self.readable = true,
            Interest::Write => self.blocked = false,
            // Nobody watches for it: a channel always reads.
            Interest::HangUp => {}
        }
    }

    /// Queues a frame; nothing is sent before [`Channel::flush`].
    ///
    /// # Panics
    /// When there are pieces but no region, or a part exceeds its limit.
    pub fn queue(&mut self, kind: u16, meta: &[u8], pieces: &[(usize, usize)]) {
        assert!(pieces.is_empty() || self.region.is_some(), "pieces without a region");
        let data = pieces.iter().map(|piece| piece.1).sum();
        let mut outgoing = self.encode(kind, meta, data);
        outgoing.pieces.extend_from_slice(pieces);
        self.outgoing.push_back(outgoing);
    }

    /// As [`Channel::queue`], with all of a buffer as its data. Nobody changes it before it is sent.
    ///
    /// # Panics
    /// When a part exceeds its limit.
    pub fn queue_buffer(&mut self, kind: u16, meta: &[u8], buffer: Rc<Buffer>) {
        let mut outgoing = self.encode(kind, meta, buffer.len());
        outgoing.buffer = Some(buffer);
        self.outgoing.push_back(outgoing);
    }

    fn encode(&mut self, kind: u16, meta: &[u8], data: usize) -> Outgoing {
        let mut outgoing = self.spare.pop().unwrap_or_else(|| Outgoing {
            head: Vec::new(),
            pieces: Vec::new(),
            buffer: None,
            sent: 0,
            length: 0,
        });
        frame::encode(&mut outgoing.head, kind, self.next_out, meta, data);
        outgoing.length = outgoing.head.len() + data;
        self.next_out += 1;
        self.unsent += outgoing.length;
        outgoing
    }

    /// Whether the caller should wait because too many bytes are unsent (a slow peer).
    #[must_use]
    pub fn is_backed_up(&self) -> bool {
        self.unsent >= BACKED_UP
    }

    /// Copies unsent pieces out of the region, before its owner reuses the memory.
    ///
    /// Copies at most the limit of [`Channel::is_backed_up`] plus one frame.
    pub fn copy_out(&mut self) {
        let Some(region) = &self.region else { return };
        for Outgoing { head, pieces, .. } in &mut self.outgoing {
            for (start, length) in pieces.drain(..) {
                head.extend_from_slice(region.bytes(start, length));
            }
        }
    }

    /// Sends as much of the queue as the socket accepts.
    ///
    /// # Errors
    /// The connection broke.
    pub fn flush(&mut self, reactor: &mut Reactor) -> Result<(), ChannelError> {
        while !self.outgoing.is_empty() && !self.blocked {
            let sent = self.send_batch()?;
            match sent {
                Sent::Bytes(bytes) => self.account(bytes),
                Sent::Full => {
                    self.blocked = true;
                    self.socket.watch_write(reactor);
                }
            }
        }
        Ok(())
    }

    fn send_batch(&mut self) -> io::Result<Sent> {
        const MOST: usize = 256;
        let mut slices = [IoSlice::new(&[]); MOST];
        let mut count = 0;
        'frames: for frame in &self.outgoing {
            let mut skip = frame.sent;
            let region = self.region.as_deref();
            let data = frame.pieces.iter().filter_map(|&(start, length)| Some(region?.bytes(start, length)));
            let buffer = frame.buffer.as_deref().map(Buffer::bytes);
            for part in std::iter::once(frame.head.as_slice()).chain(data).chain(buffer) {
                if skip >= part.len() {
                    skip -= part.len();
                    continue;
                }
                slices[count] = IoSlice::new(&part[skip..]);
                skip = 0;
                count += 1;
                if count == MOST {
                    break 'frames;
                }
            }
        }
        self.socket.send(&slices[..count])
    }

    fn account(&mut self, mut bytes: usize) {
        self.unsent -= bytes;
        while bytes > 0 {
            let Some(front) = self.outgoing.front_mut() else { return };
            let step = bytes.min(front.length - front.sent);
            front.sent += step;
            bytes -= step;
            if self.outgoing.front().is_some_and(|front| self.has_left(front))
                && let Some(mut done) = self.outgoing.pop_front()
                && done.head.capacity() <= LARGEST_SPARE
            {
                done.head.clear();
                done.pieces.clear();
                done.buffer = None;
                done.sent = 0;
                self.spare.push(done);
            }
        }
    }

    /// Reads what has arrived (at most one full buffer per call) and passes every complete frame to `take`. Returns whether more
    /// may be waiting; otherwise a readable event will follow.
    ///
    /// # Errors
    /// The connection ended or carries malformed bytes, or `take` failed.
    pub fn receive<E: From<ChannelError>>(
        &mut self,
        reactor: &mut Reactor,
        mut take: impl FnMut(Frame<'_>) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut more = false;
        let mut ended = false;
        if self.readable {
            self.make_room();
            let room = self.incoming.len() - self.end;
            match self.socket.receive(&mut self.incoming[self.end..]).map_err(ChannelError::Broken)? {
                Received::Bytes(bytes) => {
                    self.end += bytes;
                    more = bytes == room;
                    self.readable = more;
                }
                Received::Nothing => self.readable = false,
                Received::End => ended = true,
            }
            if !self.readable && !ended {
                self.socket.watch_read(reactor);
            }
        }
        loop {
            let decoded = frame::decode(&self.incoming[self.start..self.end], self.next_in);
            match decoded.map_err(ChannelError::Frame)? {
                Some((frame, used)) => {
                    self.next_in += 1;
                    self.start += used;
                    take(frame)?;
                }
                None if ended => return Err(ChannelError::Closed.into()),
                None => return Ok(more),
            }
        }
    }

    /// Moves an incomplete frame to the front and grows the buffer when it does not fit.
    fn make_room(&mut self) {
        if self.start > 0 {
            self.incoming.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.incoming.len() {
            // The limits bound a frame, so the largest buffer always holds it.
            let larger = (self.incoming.len() * 2).min(LARGEST_BUFFER);
            self.incoming.resize(larger, 0);
        }
    }

    /// Ends the connection; no event arrives afterwards.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.socket.close(reactor);
    }
}
