//! The export on a socket pair, without threads: every step is the test's own.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use weir_block::{Completion, Layer, LayerInfo, Nanos, Reactor, ReactorConfig};
use weir_export::Workspace;
use weir_export::nbd::{AcceptedClient, Limits, NbdDisk};
use weir_nbd::server::Session;

use super::layer::{FileLayer, Knobs};

pub struct Bench {
    pub reactor: Reactor,
    pub nbd: NbdDisk,
    pub layer: FileLayer,
    pub workspace: Workspace,
    done: Vec<Completion>,
}

impl Bench {
    pub fn new(file: File, info: LayerInfo, limits: Limits, reactor: ReactorConfig) -> Bench {
        let mut reactor = Reactor::new(reactor).unwrap();
        let nbd = NbdDisk::new(&mut reactor, limits);
        let layer = FileLayer::new(file, info, Arc::new(Knobs::default()));
        Bench { reactor, nbd, layer, workspace: Workspace::new(), done: Vec::new() }
    }

    /// A client beyond its handshake, and its end of the socket.
    pub fn attach(&mut self, structured: bool, leftover: &[u8]) -> UnixStream {
        self.attach_as(
            Session { structured_replies: structured, block_sizes: true, ..Session::default() },
            leftover,
        )
    }

    /// As `attach`, with what this session says of the form of requests and replies.
    pub fn attach_as(&mut self, agreed: Session, leftover: &[u8]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let session = Session {
            export: "disk".into(),
            base_allocation: agreed.structured_replies.then_some(1),
            ..agreed
        };
        let client = AcceptedClient { stream: ours.into(), leftover: leftover.to_vec(), session, via: None };
        self.nbd.attach(client, &mut self.workspace).unwrap();
        theirs
    }

    /// One round of the shard's loop, without waiting.
    pub fn turn(&mut self) {
        let mut events = Vec::new();
        self.reactor.wait(Nanos::default(), &mut events).unwrap();
        events.iter().for_each(|event| self.nbd.on_event(event));
        self.nbd.pump(&mut self.reactor, &mut self.layer, &mut self.workspace);
        self.layer.advance(&mut self.reactor, &mut self.done);
        self.done.drain(..).for_each(|completion| self.nbd.complete(completion));
        self.nbd.flush(&mut self.reactor, &mut self.workspace);
    }

    /// Rounds until nothing is left to do, taking what the client is sent. True when the server has hung up.
    pub fn settle(&mut self, client: &mut UnixStream, received: &mut Vec<u8>) -> bool {
        let mut quiet = 0;
        let mut buffer = vec![0; 1 << 20];
        while quiet < 8 {
            self.turn();
            quiet += 1;
            match client.read(&mut buffer) {
                Ok(0) => return true,
                Ok(length) => {
                    received.extend_from_slice(&buffer[..length]);
                    quiet = 0;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return true,
            }
        }
        false
    }

    /// Sends all of `bytes`, as far as the server takes them. True when the server has hung up.
    pub fn say(&mut self, client: &mut UnixStream, mut bytes: &[u8], received: &mut Vec<u8>) -> bool {
        while !bytes.is_empty() {
            match client.write(bytes) {
                Ok(length) => bytes = &bytes[length..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    self.settle(client, received);
                    return true;
                }
            }
            if self.settle(client, received) {
                return true;
            }
        }
        false
    }
}
