//! A connection between a disk's owner and its coordinator, on the shard of either.

use std::io;

use weir_block::{BufferPool, Interest, Reactor, Stream, Token};
use weir_net::frame::Frame;
use weir_net::{Channel, ChannelError};

use super::wire::{Encoded, LARGEST, WireError};

pub struct Connection {
    channel: Channel,
    slot: u32,
    /// More may have arrived than was taken.
    more: bool,
}

impl Connection {
    pub fn new(reactor: &mut Reactor, stream: Stream, token: Token) -> io::Result<Connection> {
        let channel = Channel::new(stream, token, None, &[], reactor)?;
        Ok(Connection { channel, slot: token.slot, more: true })
    }

    /// An event of the shard, perhaps of another connection.
    pub fn on_event(&mut self, slot: u32, interest: Interest) {
        if slot == self.slot {
            self.channel.on_event(interest);
            self.more |= interest == Interest::Read;
        }
    }

    pub fn send(&mut self, frame: Encoded) {
        frame.queue(&mut self.channel);
    }

    /// Messages that have arrived, and whether more may have: then it is to be called again. It takes nothing while there is no memory for
    /// more data ([`Connection::has_more`]).
    pub fn receive<M, E: From<ChannelError> + From<WireError>>(
        &mut self,
        reactor: &mut Reactor,
        pool: &BufferPool,
        decode: impl Fn(Frame<'_>, &BufferPool) -> Result<M, WireError>,
    ) -> Result<(Vec<M>, bool), E> {
        let mut messages = Vec::new();
        // One call takes at most a full receive buffer, and a buffer of the pool is at most twice as large as its data.
        if !self.more || pool.lent() + 4 * LARGEST > pool.limit() {
            return Ok((messages, false));
        }
        self.more = self.channel.receive(reactor, |frame| {
            messages.push(decode(frame, pool)?);
            Ok::<(), E>(())
        })?;
        Ok((messages, self.more))
    }

    /// More may have arrived than was taken.
    pub fn has_more(&self) -> bool {
        self.more
    }

    /// Too much is unsent.
    pub fn is_backed_up(&self) -> bool {
        self.channel.is_backed_up()
    }

    pub fn flush(&mut self, reactor: &mut Reactor) -> Result<(), ChannelError> {
        self.channel.flush(reactor)
    }

    pub fn close(&mut self, reactor: &mut Reactor) {
        self.channel.close(reactor);
    }
}
