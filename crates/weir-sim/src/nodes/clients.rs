//! NBD clients of the disk: one connects to the owner in the registry, one stays on its connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::End;
use weir_nbd::protocol::{REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, command, command_flag};

use super::{Cluster, Task, Who};
use crate::scale::{BLOCK, BLOCKS, CALM, GUESTS_END, NODES};

/// A client's timeout; it then drops its connection.
const PATIENCE: Duration = Duration::from_millis(2_500);

/// After a client's last request, requests in flight arrive within this time.
const LAST_ARRIVAL: Duration = Duration::from_millis(100);

/// Most requests of a client in flight.
const DEPTH: usize = 6;

/// Bytes of a reply's header.
const REPLY: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
}

/// A request; a write's value is unique, and is also the request's cookie.
#[derive(Clone, Copy, Debug)]
struct Request {
    kind: Kind,
    block: usize,
    value: u64,
    began: u64,
    sent: Nanos,
}

struct Connection {
    server: Who,
    end: End,
    /// Bytes not sent yet.
    out: Vec<u8>,
    /// Bytes of incomplete replies.
    input: Vec<u8>,
    under_way: BTreeMap<u64, Request>,
}

pub struct Client {
    connection: Option<Connection>,
    /// Keeps its connection until that is closed.
    stays: bool,
}

impl Client {
    pub fn all() -> Vec<Client> {
        vec![Client { connection: None, stays: false }, Client { connection: None, stays: true }]
    }

    pub fn is_idle(&self) -> bool {
        self.connection.as_ref().is_none_or(|connection| connection.under_way.is_empty())
    }
}

/// Signals that a client has bytes to receive.
struct Woken(Arc<AtomicBool>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Connection {
    fn ask(&mut self, request: Request, durable: bool) {
        let command = match request.kind {
            Kind::Read => command::READ,
            Kind::Write => command::WRITE,
            Kind::Flush => command::FLUSH,
        };
        let (offset, length) = match request.kind {
            Kind::Flush => (0, 0),
            _ => ((request.block * BLOCK) as u64, BLOCK as u32),
        };
        let flags = if durable && request.kind == Kind::Write { command_flag::FUA } else { 0 };
        self.out.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&flags.to_be_bytes());
        self.out.extend_from_slice(&command.to_be_bytes());
        self.out.extend_from_slice(&request.value.to_be_bytes());
        self.out.extend_from_slice(&offset.to_be_bytes());
        self.out.extend_from_slice(&length.to_be_bytes());
        if request.kind == Kind::Write {
            let mut data = [0; BLOCK];
            data[..8].copy_from_slice(&request.value.to_le_bytes());
            self.out.extend_from_slice(&data);
        }
        self.under_way.insert(request.value, request);
    }

    /// Sends and receives all it can. False: the connection is unusable.
    fn pump(&mut self, waker: &Waker) -> bool {
        let mut context = Context::from_waker(waker);
        while !self.out.is_empty() {
            match self.end.poll_send(&mut context, &self.out) {
                Poll::Ready(Ok(count)) => drop(self.out.drain(..count)),
                Poll::Ready(Err(_)) => return false,
                Poll::Pending => break,
            }
        }
        let mut bytes = [0; 4096];
        loop {
            match self.end.poll_receive(&mut context, &mut bytes) {
                Poll::Ready(Ok(0) | Err(_)) => return false,
                Poll::Ready(Ok(count)) => self.input.extend_from_slice(&bytes[..count]),
                Poll::Pending => return true,
            }
        }
    }

    /// The next complete reply: the request, and its value unless it failed.
    fn take_reply(&mut self) -> Result<Option<(Request, Option<u64>)>, &'static str> {
        let Some(head) = self.input.first_chunk::<REPLY>() else { return Ok(None) };
        let number = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if number(0) != SIMPLE_REPLY_MAGIC {
            return Err("a reply with a wrong magic number");
        }
        let (error, cookie) = (number(4), u64::from(number(8)) << 32 | u64::from(number(12)));
        let Some(request) = self.under_way.get(&cookie).copied() else {
            return Err("a reply to an unknown request");
        };
        let data = if request.kind == Kind::Read && error == 0 { BLOCK } else { 0 };
        if self.input.len() < REPLY + data {
            return Ok(None);
        }
        let value = self.input[REPLY..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        self.input.drain(..REPLY + data);
        self.under_way.remove(&cookie);
        Ok(Some((request, (error == 0).then_some(value))))
    }
}

impl Cluster {
    pub fn clients_act(&mut self) {
        let now = self.world.now();
        if now < GUESTS_END {
            self.after(200, 12_000, Task::Clients);
        } else {
            self.after(20_000, 60_000, Task::Clients);
            self.check_settled();
        }
        for client in 0..self.clients.len() {
            self.reconnect(client);
            if now < GUESTS_END {
                for _ in 0..self.rng.usize(1..4) {
                    let block = if self.rng.bool() { self.rng.usize(..2) } else { self.rng.usize(..BLOCKS) };
                    let kind = match self.rng.u8(..12) {
                        0 => Kind::Flush,
                        1..=4 => Kind::Read,
                        _ => Kind::Write,
                    };
                    self.send(client, kind, block);
                }
            }
        }
        if now > GUESTS_END + LAST_ARRIVAL {
            self.read_all();
        }
        self.clients_receive();
    }

    /// Reads and flushes the final content, once no abandoned write is queued.
    fn read_all(&mut self) {
        let in_flight = |node: &super::machine::Machine| {
            let shard = node.shard.as_ref();
            shard.is_some_and(|shard| shard.status().iter().any(|disk| disk.in_flight > 0))
        };
        if self.nodes.iter().any(in_flight) || !self.clients.iter().all(Client::is_idle) {
            return;
        }
        if !self.flushed {
            // If its connection breaks, it sends another one.
            self.last_flush = self.next_value + 1;
            return self.send(0, Kind::Flush, 0);
        }
        for block in 0..BLOCKS {
            if self.last_read[block].is_none() {
                self.send(0, Kind::Read, block);
            }
        }
    }

    fn send(&mut self, client: usize, kind: Kind, block: usize) {
        let Some(connection) = &self.clients[client].connection else { return };
        if connection.under_way.len() >= DEPTH {
            return;
        }
        self.next_value += 1;
        let (value, began, sent) = (self.next_value, self.tick(), self.world.now());
        if kind == Kind::Write {
            self.histories[block].write(value, began);
        }
        let durable = self.durable_writes;
        if let Some(connection) = &mut self.clients[client].connection {
            connection.ask(Request { kind, block, value, began, sent }, durable);
        }
    }

    /// Connects to a node with the open disk, when necessary.
    fn reconnect(&mut self, client: usize) {
        let now = self.world.now();
        let open = |cluster: &Cluster, node: usize| cluster.nodes[node].has_open();
        let owner = self.registry.disk.owner.as_ref().and_then(|owner| self.living(owner));
        let current = owner.filter(|node| open(self, *node)).map(|node| self.nodes[node].who());
        let Client { connection, stays } = &self.clients[client];
        let stays = *stays && now < CALM;
        let server = connection.as_ref().map(|connection| connection.server);
        let hung = connection.as_ref().is_some_and(|connection| {
            connection.under_way.values().any(|request| now - request.sent > PATIENCE)
        });
        let leaves = match server {
            None => true,
            Some(_) if stays => false,
            server => (hung || now > CALM) && server != current,
        };
        if !leaves {
            return;
        }
        // The sticky client tries any node that has the disk open.
        let any = (0..NODES).filter(|node| open(self, *node)).collect::<Vec<_>>();
        let next = match stays && !any.is_empty() {
            true => Some(self.nodes[any[self.rng.usize(..any.len())]].who()),
            false => current,
        };
        let Some(server) = next else { return };
        let node = &self.nodes[server.node];
        let Some(guests) = &node.guests else { return };
        let (ours, theirs) = self.world.connect_uncorrupted(self.guests, node.process);
        if guests.send(theirs).is_ok() {
            let (out, input, under_way) = (Vec::new(), Vec::new(), BTreeMap::new());
            let connection = Connection { server, end: ours, out, input, under_way };
            self.clients[client].connection = Some(connection);
        }
    }

    /// Receives for clients, and sends as far as there is room.
    pub fn clients_receive(&mut self) {
        let waker = Waker::from(Arc::new(Woken(Arc::clone(&self.guests_woken))));
        for client in 0..self.clients.len() {
            let Some(mut connection) = self.clients[client].connection.take() else { continue };
            let goes_on = connection.pump(&waker);
            let mut failed = false;
            loop {
                match connection.take_reply() {
                    Ok(None) => break,
                    Ok(Some((request, value))) => failed |= !self.replied(connection.server, request, value),
                    Err(reason) => {
                        self.fail(|| format!("P11: n{}: {reason}", connection.server.node));
                        break;
                    }
                }
            }
            // A client reconnects after an error.
            if goes_on && !failed {
                self.clients[client].connection = Some(connection);
            }
        }
    }

    /// Returns whether the request succeeded.
    fn replied(&mut self, server: Who, request: Request, value: Option<u64>) -> bool {
        let end = self.tick();
        self.note(|| format!("n{} answers {request:?}: {value:?}", server.node));
        let Some(read) = value else { return false };
        self.counts.answers += 1;
        match request.kind {
            Kind::Read => {
                if !self.known[request.block].was_there(read, request.began) {
                    self.histories[request.block].read(read, request.began, end);
                    self.known[request.block].read(read, request.began, end);
                }
                if self.flushed {
                    self.last_read[request.block] = Some(read);
                }
            }
            Kind::Write => {
                self.histories[request.block].acknowledged(request.value, end);
                self.known[request.block].written(request.value, request.began, end);
            }
            Kind::Flush => self.flushed |= request.value == self.last_flush,
        }
        self.check_copies();
        true
    }
}
