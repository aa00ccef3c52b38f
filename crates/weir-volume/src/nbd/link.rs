//! The connection of one disk to its server, on the shard; and its successors, which a thread makes: a handshake blocks.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use weir_block::{Interest, Nanos, OwnerId, Reactor, Token, WatchId};
use weir_nbd::client::{Connection, Dialed, Done, Export, NbdCommand, NbdError, Options};

use super::body::Data;
use super::opened::{NbdOptions, connect};
use crate::error::NbdTrouble;
use crate::offload::Offload;

/// The slot of the thread's answers; those of connections are below, by their number.
const DIALED: u32 = u32::MAX;

/// Pause between the beginnings of two attempts to connect.
const DIAL_EVERY: Duration = Duration::from_millis(500);

/// The way to the server.
pub(super) struct Link {
    id: OwnerId,
    options: NbdOptions,
    live: Option<Live>,
    /// Counts connections, so that an event of a former one is known.
    number: u32,
    dialing: Offload<Result<Dialed, NbdTrouble>>,
    /// The thread has an answer.
    dialed: bool,
    /// When to try to connect next.
    dial_at: Nanos,
}

struct Live {
    connection: Connection<Data>,
    reading: Option<WatchId>,
    writing: Option<WatchId>,
    /// Something may have arrived.
    readable: bool,
}

impl Link {
    pub fn new(id: OwnerId, dialed: Dialed, options: NbdOptions) -> Result<Link, NbdError> {
        let dialing = Offload::new("weir-nbd", Token { owner: id, slot: DIALED });
        let mut link = Link { id, options, live: None, number: 0, dialing, dialed: false, dial_at: Nanos(0) };
        link.adopt(dialed)?;
        Ok(link)
    }

    fn adopt(&mut self, dialed: Dialed) -> Result<(), NbdError> {
        let depth = self.options.depth as u32;
        let connection = Connection::over(dialed, &Options { depth, ..Options::default() })?;
        self.number = (self.number + 1) % DIALED;
        // What has arrived already is no event.
        self.live = Some(Live { connection, reading: None, writing: None, readable: true });
        Ok(())
    }

    /// The export, while there is a connection.
    pub fn export(&self) -> Option<&Export> {
        self.live.as_ref().map(|live| live.connection.export())
    }

    pub fn is_up(&self) -> bool {
        self.live.is_some()
    }

    /// Begins a request in a free slot. [`Link::send`] sends it.
    pub fn start(&mut self, slot: u32, command: NbdCommand, data: Data) {
        if let Some(live) = &mut self.live {
            live.connection.start_with(slot, command, data);
        }
    }

    /// The data of a finished request.
    pub fn take(&mut self, slot: u32) -> Data {
        self.live.as_mut().map_or(Data::None, |live| live.connection.take(slot))
    }

    /// The extents of a finished request.
    pub fn extents(&self, slot: u32) -> &[weir_block::Extent] {
        self.live.as_ref().map_or(&[], |live| live.connection.extents(slot))
    }

    /// Whether something is to be sent, at once or when the socket takes it.
    pub fn wants_to_send(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.connection.wants_to_send())
    }

    /// Sends what the socket takes.
    pub fn send(&mut self) -> Result<(), NbdError> {
        self.live.as_mut().map_or(Ok(()), |live| live.connection.send_now())
    }

    /// Receives what has arrived.
    pub fn receive(&mut self, done: &mut Vec<Done>) -> Result<(), NbdError> {
        match &mut self.live {
            Some(live) if live.readable => {
                live.readable = live.connection.receive_now(done)?;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// More may have arrived than was taken.
    pub fn has_more(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.readable)
    }

    /// Something is to be sent, and no event is awaited for it.
    pub fn has_unsent(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.writing.is_none() && live.connection.wants_to_send())
    }

    /// Waits for whatever could not be done now; for room to send only with the right to.
    pub fn watch(&mut self, reactor: &mut Reactor, may_send: bool) {
        let token = Token { owner: self.id, slot: self.number };
        let Some(live) = &mut self.live else { return };
        let fd = live.connection.as_fd().as_raw_fd();
        if live.reading.is_none() && !live.readable {
            live.reading = Some(reactor.watch(fd, Interest::Read, token));
        }
        if may_send && live.writing.is_none() && live.connection.wants_to_send() {
            live.writing = Some(reactor.watch(fd, Interest::Write, token));
        }
    }

    pub fn on_event(&mut self, slot: u32, interest: Interest) {
        self.dialed |= slot == DIALED;
        let Some(live) = self.live.as_mut().filter(|_| slot == self.number) else { return };
        match interest {
            Interest::Read => (live.reading, live.readable) = (None, true),
            Interest::Write => live.writing = None,
            _ => {}
        }
    }

    /// The connection is given up, and a next one is made at once, unless this one has just been. Returns it for what is in flight on it.
    pub fn lose(&mut self, reactor: &mut Reactor) -> Option<Connection<Data>> {
        self.dial_at = self.dial_at.max(reactor.now());
        self.close(reactor)
    }

    /// The connection is given up. Returns it for its farewell.
    pub fn close(&mut self, reactor: &mut Reactor) -> Option<Connection<Data>> {
        let Live { connection, reading, writing, .. } = self.live.take()?;
        reading.into_iter().chain(writing).for_each(|watch| reactor.unwatch(watch));
        Some(connection)
    }

    /// Tries to connect, if it is time, to an export of at least `size` bytes. True if there is a new connection.
    ///
    /// # Errors
    /// Why the last attempt has failed, once.
    pub fn connect(
        &mut self,
        reactor: &mut Reactor,
        size: u64,
        logical_block: u32,
    ) -> Result<bool, NbdTrouble> {
        if self.is_up() || !self.dialed && reactor.now() < self.deadline() {
            return Ok(false);
        }
        let mut failed = Ok(false);
        if std::mem::take(&mut self.dialed) {
            for answer in self.dialing.take(reactor) {
                match answer.and_then(|dialed| Ok(self.adopt(dialed)?)) {
                    Ok(()) => return Ok(true),
                    Err(trouble) => failed = Err(trouble),
                }
            }
        }
        if self.dialing.open() == 0 && reactor.now() >= self.dial_at {
            self.dial_at = reactor.now() + DIAL_EVERY;
            let options = self.options.clone();
            let work = move || connect(&options, size, logical_block);
            let source = std::io::Error::other("the thread that connects has ended");
            let address = self.options.server.address.clone();
            let panicked = Err(NbdError::Connect { address, source }.into());
            if let Err(errno) = self.dialing.ask(reactor, work, panicked) {
                let address = self.options.server.address.clone();
                let source = std::io::Error::from_raw_os_error(errno);
                failed = Err(NbdError::Connect { address, source }.into());
            }
        }
        failed
    }

    /// When [`Link::connect`] has something to do without an event.
    pub fn deadline(&self) -> Nanos {
        if self.is_up() || self.dialing.open() > 0 { Nanos::NEVER } else { self.dial_at }
    }
}
