//! Arbitrary bytes to a connection in the transmission phase, over a real socket, in arbitrary pieces. Nothing panics, the layer
//! gets only valid requests, and after the client's end nothing is left.

#![cfg_attr(feature = "link", no_main)]

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use weir_block::{
    Completion, Event, Extent, ExtentState, Layer, LayerInfo, LayerMeter, Nanos, Outcome, Reactor,
    ReactorConfig, Request, RequestKind,
};
use weir_export::Workspace;
use weir_export::nbd::{AcceptedClient, Limits, NbdDisk};
use weir_nbd::server::Session;

const SIZE: u64 = 1 << 20;

/// A disk in memory that checks its requests and completes them in the next round.
struct Memory {
    bytes: Vec<u8>,
    finished: Vec<Completion>,
    room: usize,
}

impl Layer for Memory {
    fn info(&self) -> LayerInfo {
        LayerInfo {
            size: SIZE,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: 32 << 10,
            writable: true,
            fast_zeroes: true,
            discards: true,
        }
    }

    fn has_room(&self, _kind: RequestKind, _bytes: u64) -> bool {
        self.finished.len() < self.room
    }

    fn submit(&mut self, _reactor: &mut Reactor, request: Request<'_>) {
        let (offset, length) = request.range();
        assert!(request.tag().0 >> 56 == 0);
        assert!(offset + length <= SIZE && offset % 512 == 0 && length % 512 == 0);
        let has_data = matches!(request, Request::Read { .. } | Request::Write { .. });
        assert!(!has_data || length <= self.info().max_transfer.into());
        assert!(length > 0 || request.kind() == RequestKind::Flush);
        assert!(self.finished.len() < self.room);
        let tag = request.tag();
        let range = offset as usize..(offset + length) as usize;
        let outcome = match request {
            Request::Read { mut buffer, .. } => {
                buffer.bytes_mut().copy_from_slice(&self.bytes[range]);
                Outcome::Read(buffer)
            }
            Request::Write { payload, .. } => {
                self.bytes[range].copy_from_slice(payload.bytes());
                Outcome::Done
            }
            Request::Extents { .. } => {
                Outcome::Extents(vec![Extent { offset, length, state: ExtentState::Allocated }])
            }
            _ => Outcome::Done,
        };
        self.finished.push(Completion { tag, result: Ok(outcome) });
    }

    fn on_event(&mut self, _reactor: &mut Reactor, _event: Event) {}

    fn advance(&mut self, _reactor: &mut Reactor, done: &mut Vec<Completion>) {
        done.append(&mut self.finished);
    }

    fn in_flight(&self) -> usize {
        self.finished.len()
    }

    fn meters(&self, _out: &mut Vec<LayerMeter>) {}
}

struct Shard {
    reactor: Reactor,
    nbd: NbdDisk,
    layer: Memory,
    workspace: Workspace,
    events: Vec<Event>,
    done: Vec<Completion>,
}

impl Shard {
    fn new() -> Shard {
        let config = ReactorConfig { entries: 32, buffer_limit: 2 << 20, ..ReactorConfig::default() };
        let mut reactor = Reactor::new(config).expect("a reactor");
        let limits = Limits { requests: 8, bytes: 1 << 20, ..Limits::default() };
        let nbd = NbdDisk::new(&mut reactor, limits);
        let layer = Memory { bytes: vec![0; SIZE as usize], finished: Vec::new(), room: 1 };
        Shard { reactor, nbd, layer, workspace: Workspace::new(), events: Vec::new(), done: Vec::new() }
    }

    fn turn(&mut self) {
        self.reactor.wait(Nanos::default(), &mut self.events).expect("the reactor works");
        for event in self.events.drain(..) {
            self.nbd.on_event(&event);
        }
        self.nbd.pump(&mut self.reactor, &mut self.layer, &mut self.workspace);
        self.layer.advance(&mut self.reactor, &mut self.done);
        self.done.drain(..).for_each(|completion| self.nbd.complete(completion));
        self.nbd.flush(&mut self.reactor, &mut self.workspace);
    }

    /// Runs until no immediate work is left.
    fn settle(&mut self) {
        self.turn();
        while self.nbd.deadline(&self.layer, &self.reactor, &self.workspace) == Nanos::default() {
            self.turn();
        }
    }
}

thread_local! {
    static SHARD: RefCell<Shard> = RefCell::new(Shard::new());
}

// Two bytes of settings, then the client's bytes. The second byte is also the size of the pieces.
fuzz_target!(|input: &[u8]| {
    let [settings, piece, bytes @ ..] = input else { return };
    SHARD.with_borrow_mut(|shard| {
        shard.layer.room = usize::from(settings >> 4) + 1;
        let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
        theirs.set_nonblocking(true).expect("a socket");
        let structured = settings & 1 != 0;
        let ahead = if settings & 2 != 0 { bytes.len() / 2 } else { 0 };
        let session = Session {
            export: "a".into(),
            structured_replies: structured,
            extended_headers: structured && piece & 1 != 0,
            block_sizes: piece & 2 == 0,
            base_allocation: (structured && settings & 4 != 0).then_some(1),
            flags: 0,
        };
        let client =
            AcceptedClient { stream: ours.into(), leftover: bytes[..ahead].to_vec(), session, via: None };
        shard.nbd.attach(client, &mut shard.workspace).expect("room for one");
        let reads_replies = settings & 8 != 0;
        for piece in bytes[ahead..].chunks(usize::from(*piece).max(1) * 16) {
            let _ = theirs.write(piece);
            shard.settle();
            if reads_replies {
                let _ = theirs.read(&mut [0; 64 << 10]);
            }
        }
        drop(theirs);
        let start = Nanos::now();
        while !shard.nbd.is_empty() {
            shard.turn();
            assert!((Nanos::now() - start).as_secs() < 10, "a closed client is still attached");
        }
        assert_eq!(shard.reactor.buffers().lent(), 0);
    });
});

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
