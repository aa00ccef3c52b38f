//! Two clients of the disk: one connects to the owner in the registry, one stays on its connection.

use std::time::Duration;

use super::requests::{Request, RequestKind};
use super::{Cluster, Task};
use crate::scale::{BLOCKS, CALM, GUESTS_END, NODES, Process};

/// A client's timeout; it then drops its connection.
const PATIENCE: Duration = Duration::from_millis(1_200);

/// After a client's last request, requests in flight arrive within this time.
const LAST_ARRIVAL: Duration = Duration::from_millis(100);

/// Most requests of a client in flight.
const DEPTH: usize = 6;

/// The reply: the read value, or nothing on failure.
pub struct Reply {
    request: Request,
    value: Option<u64>,
}

pub struct Client {
    /// Its server, and the opening of the disk there.
    server: Option<(Process, u64)>,
    session: u64,
    /// Requests in flight, by their values.
    under_way: Vec<Request>,
    /// Keeps its connection until that is closed.
    stays: bool,
}

impl Client {
    pub fn all() -> Vec<Client> {
        let client = |stays| Client { server: None, session: 0, under_way: Vec::new(), stays };
        vec![client(false), client(true)]
    }

    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
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
                        0 => RequestKind::Flush,
                        1..=4 => RequestKind::Read,
                        _ => RequestKind::Write,
                    };
                    self.send(client, kind, block);
                }
            }
        }
        if now > GUESTS_END + LAST_ARRIVAL {
            self.read_all();
        }
    }

    /// Reads and flushes the final content, once no abandoned write is queued.
    fn read_all(&mut self) {
        let served = |disk: &super::node::Disk| disk.waiting.is_empty() && disk.serving.is_empty();
        let quiet = self.nodes.iter().filter_map(|node| node.disk.as_ref()).all(served);
        if !quiet || !self.clients.iter().all(Client::is_idle) {
            return;
        }
        if !self.flushed {
            // A dead owner's write without a completion is not covered if it lands later.
            if self.world.writes_to(self.medium) {
                return;
            }
            // If its connection breaks, it sends another one.
            self.last_flush = self.next_value + 1;
            return self.send(0, RequestKind::Flush, 0);
        }
        for block in 0..BLOCKS {
            if self.last_read[block].is_none() {
                self.send(0, RequestKind::Read, block);
            }
        }
    }

    fn send(&mut self, client: usize, kind: RequestKind, block: usize) {
        let Some((process, serial)) = self.clients[client].server else { return };
        if self.clients[client].under_way.len() >= DEPTH {
            return;
        }
        self.next_value += 1;
        let (value, began, sent) = (self.next_value, self.tick(), self.world.now());
        let session = self.clients[client].session;
        if kind == RequestKind::Write {
            self.histories[block].write(value, began);
        }
        let request = Request { client, session, kind, block, value, began, sent };
        self.clients[client].under_way.push(request);
        self.after(20, 200, Task::Arrives { process, serial, request });
    }

    /// Connects to a node with the open disk, when necessary.
    fn reconnect(&mut self, client: usize) {
        let now = self.world.now();
        let open = |cluster: &Cluster, node: usize| {
            let disk = cluster.nodes[node].disk.as_ref().filter(|_| cluster.nodes[node].alive)?;
            Some((cluster.process(node), disk.serial))
        };
        let owner = self.registry.record.owner.filter(|owner| self.is_alive(*owner));
        let current = owner.and_then(|owner| open(self, owner.node));
        let Client { server, under_way, stays, .. } = &self.clients[client];
        let (server, stays) = (*server, *stays && now < CALM);
        let gone = server.is_none_or(|(process, serial)| open(self, process.node) != Some((process, serial)));
        let hung = under_way.iter().any(|request| now - request.sent > PATIENCE);
        // The sticky client reconnects to the same node, in case that it answers then.
        let leaves = if stays {
            gone || hung
        } else {
            gone || (hung && server != current) || (now > CALM && server != current)
        };
        if !leaves {
            return;
        }
        // The sticky client tries any node that has the disk open.
        let any = (0..NODES).filter_map(|node| open(self, node)).collect::<Vec<_>>();
        let next = if stays && !gone {
            server
        } else if stays && !any.is_empty() {
            Some(any[self.rng.usize(..any.len())])
        } else {
            current
        };
        if next.is_some() {
            let client = &mut self.clients[client];
            client.server = next;
            client.session += 1;
            client.under_way.clear();
        }
    }

    /// Sends the answer to the client, at the process's time.
    pub fn reply(&mut self, node: usize, request: Request, value: Option<u64>) {
        let from = self.world.now().max(self.nodes[node].clock.busy_until());
        let delay = Duration::from_micros(self.rng.u64(20..=200));
        self.at(from + delay, Task::Replied(Reply { request, value }));
    }

    pub fn replied(&mut self, Reply { request, value }: Reply) {
        let end = self.tick();
        let client = &mut self.clients[request.client];
        if client.session != request.session {
            return;
        }
        client.under_way.retain(|other| other.value != request.value);
        let Some(read) = value else {
            // The connection is unusable.
            client.server = None;
            return;
        };
        match request.kind {
            RequestKind::Read => {
                if !self.known[request.block].was_there(read, request.began) {
                    self.histories[request.block].read(read, request.began, end);
                    self.known[request.block].read(read, request.began, end);
                }
                if self.flushed {
                    self.last_read[request.block] = Some(read);
                }
            }
            RequestKind::Write => {
                self.histories[request.block].acknowledged(request.value, end);
                self.known[request.block].written(request.value, request.began, end);
            }
            RequestKind::Flush => self.flushed |= request.value == self.last_flush,
        }
        self.check_copies();
    }
}
