//! Arbitrary bytes and arbitrary well-formed messages from a peer: to the frame decoder, to a replica's host and to an owner, the
//! latter two over real sockets. Nothing panics, nothing exceeds its bounds, answers are frames, and an owner acknowledges
//! nothing that no replica has confirmed.

#![cfg_attr(feature = "link", no_main)]

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use libfuzzer_sys::fuzz_target;
use weir_accel::wire::{Batch, Confirm, Hello, MessageKind, RecordHeader, Refuse};
use weir_accel::{
    Accel, AccelConfig, Configuration, Former, Inheritance, Log, Record, RecordKind, ReplicaHost,
};
use weir_block::{
    Completion, Destage, Event, Layer, LayerInfo, LayerMeter, Metered, Nanos, Outcome, Payload, Reactor,
    ReactorConfig, Region, Request, RequestKind, Tag,
};
use weir_net::frame;
use zerocopy::{FromZeros, IntoBytes};

const LOG: u64 = 64 << 20;

/// Most steps of one run.
const STEPS: usize = 64;

/// The fuzzer's input, piece by piece; zeroes after its end.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn bytes(&mut self, most: usize) -> &[u8] {
        let (now, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        now
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or_default()
    }

    /// Mostly a small number, sometimes any.
    fn number(&mut self) -> u64 {
        let kind = self.byte();
        if kind < 200 {
            return u64::from(kind % 16);
        }
        let mut number = [0; 8];
        let given = self.bytes(8);
        number[..given.len()].copy_from_slice(given);
        u64::from_le_bytes(number)
    }
}

/// The adversary's end of a connection.
struct Peer {
    stream: UnixStream,
    number: u64,
    /// Received bytes, not decoded yet.
    received: Vec<u8>,
    due: u64,
}

impl Peer {
    fn new() -> (Peer, OwnedFd) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        ours.set_nonblocking(true).expect("a flag");
        (Peer { stream: ours, number: 0, received: Vec::new(), due: 0 }, theirs.into())
    }

    fn send(&mut self, bytes: &[u8]) {
        // A full or closed socket: the rest is lost, which the peer must tolerate.
        let _ = self.stream.write_all(bytes);
    }

    fn frame(&mut self, kind: u16, meta: &[u8], data: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind, self.number, meta, data.len());
        bytes.extend_from_slice(data);
        self.number += 1;
        self.send(&bytes);
    }

    fn read(&mut self) {
        let mut buffer = [0; 64 << 10];
        while let Ok(count @ 1..) = self.stream.read(&mut buffer) {
            self.received.extend_from_slice(&buffer[..count]);
        }
        while let Some((_, used)) = frame::decode(&self.received, self.due).expect("frames are answered") {
            self.due += 1;
            self.received.drain(..used);
        }
    }
}

/// Bytes that are no frame, or a frame around any meta and data.
fn garbage(source: &mut Source<'_>, peer: &mut Peer) {
    let (framed, kind) = (!source.byte().is_multiple_of(4), u16::from(source.byte() % 16));
    let (meta, data) = (usize::from(source.byte()), usize::from(source.byte()));
    let meta = source.bytes(meta).to_vec();
    let data = source.bytes(data).to_vec();
    if framed { peer.frame(kind, &meta, &data) } else { peer.send(&meta) }
}

fn hello(source: &mut Source<'_>, peer: &mut Peer) {
    let counted = u32::from(source.byte() % 3).into();
    let mut number = || source.number().into();
    let hello = Hello {
        epoch: number(),
        lineage: number(),
        inherited_lineage: number(),
        inherited_last: number(),
        before_lineage: number(),
        before_last: number(),
        freed: number(),
        counted,
        zero: 0.into(),
    };
    peer.frame(MessageKind::Hello as u16, hello.as_bytes(), &[]);
}

/// A batch with mostly valid records.
fn batch(source: &mut Source<'_>, peer: &mut Peer) {
    let count = source.byte() % 8;
    let (epoch, first, freed) = (source.number(), source.number(), source.number());
    let (mut headers, mut data) = (Vec::new(), Vec::new());
    for sequence in (0..u64::from(count)).map(|number| first.wrapping_add(number)) {
        let kind = RecordKind::from_wire(source.byte() % 4).unwrap_or(RecordKind::Write);
        let offset = source.number().wrapping_mul(512);
        let length = (u32::from(source.byte()) + 1) * 512;
        let fill = if kind == RecordKind::Write { vec![source.byte(); length as usize] } else { Vec::new() };
        let checksum = checksum(sequence, offset, length, kind, &fill) ^ u32::from(source.byte() == 255);
        headers.push(RecordHeader::of(&Record { offset, length, checksum, kind, position: 0 }));
        data.extend_from_slice(&fill);
    }
    let head = Batch {
        epoch: epoch.into(),
        first: first.into(),
        freed: freed.into(),
        count: u32::from(count).into(),
        complete: u32::from(source.byte() % 2).into(),
    };
    let meta: Vec<u8> = head.as_bytes().iter().chain(headers.as_bytes()).copied().collect();
    peer.frame(MessageKind::Batch as u16, &meta, &data);
}

/// The checksum of a record in the wire format.
fn checksum(sequence: u64, offset: u64, length: u32, kind: RecordKind, data: &[u8]) -> u32 {
    let mut head = [0u8; 21];
    head[..8].copy_from_slice(&sequence.to_le_bytes());
    head[8..16].copy_from_slice(&offset.to_le_bytes());
    head[16..20].copy_from_slice(&length.to_le_bytes());
    head[20] = kind as u8;
    crc32c::crc32c_append(crc32c::crc32c(&head), data)
}

fn with_reactor(body: impl FnOnce(&mut Reactor)) {
    thread_local! {
        static REACTOR: RefCell<Option<Reactor>> = const { RefCell::new(None) };
    }
    REACTOR.with_borrow_mut(|reactor| {
        let reactor = reactor.get_or_insert_with(|| {
            Reactor::new(ReactorConfig { buffer_limit: 16 << 20, ..ReactorConfig::default() })
                .expect("a reactor")
        });
        body(reactor);
        let mut events = Vec::new();
        reactor.wait(Nanos(0), &mut events).expect("the reactor works");
    });
}

fn events(reactor: &mut Reactor) -> Vec<Event> {
    let mut events = Vec::new();
    reactor.wait(Nanos(0), &mut events).expect("the reactor works");
    events
}

/// The adversary is one or several owners.
fn replica(source: &mut Source<'_>, reactor: &mut Reactor) {
    let id = reactor.new_owner();
    let mut host = ReplicaHost::new(id, LOG, None, source.number()).expect("memory");
    let mut peers: Vec<Peer> = Vec::new();
    for _ in 0..STEPS {
        if source.is_empty() {
            break;
        }
        match source.byte() % 8 {
            0 => {
                let (peer, fd) = Peer::new();
                host.attach(reactor, "adversary".into(), source.number(), fd.into()).expect("a socket");
                peers.push(peer);
            }
            1 => drop(peers.pop()),
            2 => host.seal(source.number()),
            step => {
                let Some(peer) = peers.last_mut() else { continue };
                match step {
                    3 => garbage(source, peer),
                    4 => hello(source, peer),
                    5 => peer.read(),
                    _ => batch(source, peer),
                }
            }
        }
        for event in events(reactor) {
            if event.token.owner == id {
                host.on_event(reactor, event);
            }
        }
        while host.advance(reactor) {}
        check(host.replica().log());
    }
    let (Inheritance::Replica { log, .. }, _) = host.inherit(reactor) else {
        unreachable!("a host has a replica")
    };
    check(&log);
}

fn check(log: &Log) {
    assert!(log.used() <= log.capacity() && log.freed() <= log.last());
}

/// An empty disk that accepts everything.
#[derive(Default)]
struct Nothing {
    finished: Vec<Completion>,
}

impl Layer for Nothing {
    fn info(&self) -> LayerInfo {
        LayerInfo {
            size: 1 << 40,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: 32 << 20,
            writable: true,
            fast_zeroes: true,
            discards: true,
        }
    }

    fn has_room(&self, _kind: RequestKind, _bytes: u64) -> bool {
        true
    }

    fn submit(&mut self, _reactor: &mut Reactor, request: Request<'_>) {
        let tag = request.tag();
        let outcome = match request {
            Request::Read { buffer, .. } => Outcome::Read(buffer),
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

impl Destage for Nothing {
    fn write_gather(
        &mut self,
        _reactor: &mut Reactor,
        tag: Tag,
        _offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        for (start, length) in pieces {
            let _ = region.bytes(start, length);
        }
        self.finished.push(Completion { tag, result: Ok(Outcome::Done) });
    }
}

/// The adversary is the replica of a disk in `write-back+1`.
fn owner(source: &mut Source<'_>, reactor: &mut Reactor) {
    let configuration = Configuration {
        epoch: 5,
        replicas: vec!["b".into()],
        write_back: true,
        wanted_replicas: Some(1),
        strict: false,
        misplaced: Vec::new(),
        leaving: Vec::new(),
    };
    let lower = Metered::new("backing", Nothing::default());
    let config = AccelConfig::standalone(LOG);
    let mut accel =
        Accel::new(reactor, config, configuration, Inheritance::Nothing, Former::Stopped, lower, None)
            .expect("memory");
    let (mut peers, mut done, mut confirmed): (Vec<Peer>, Vec<Completion>, bool) = Default::default();
    let mut next = 0;
    for _ in 0..STEPS {
        if source.is_empty() {
            break;
        }
        match source.byte() % 8 {
            0 => {
                let (peer, fd) = Peer::new();
                let node = if !source.byte().is_multiple_of(4) { "b" } else { "c" };
                accel.peer_connected(reactor, node.into(), fd.into());
                peers.push(peer);
            }
            1 => drop(peers.pop()),
            2 if accel.has_room(RequestKind::Write, 4096) => {
                next += 1;
                let payload = Payload::Lent(&[7; 4096]);
                accel.submit(reactor, Request::Write { tag: Tag(next), offset: 0, payload, fua: false });
            }
            step => {
                let Some(peer) = peers.last_mut() else { continue };
                match step {
                    3 => garbage(source, peer),
                    4 => {
                        let refuse = Refuse { epoch: source.number().into() };
                        peer.frame(MessageKind::Refuse as u16, refuse.as_bytes(), &[]);
                    }
                    5 => peer.read(),
                    _ => {
                        let mut confirm = Confirm::new_zeroed();
                        confirm.epoch = source.number().into();
                        confirm.last = source.number().into();
                        confirm.freed = source.number().into();
                        confirm.gap = if !source.byte().is_multiple_of(4) {
                            confirm.freed
                        } else {
                            source.number().into()
                        };
                        confirm.complete = u32::from(source.byte() % 2).into();
                        confirmed = true;
                        peer.frame(MessageKind::Confirm as u16, confirm.as_bytes(), &[]);
                    }
                }
            }
        }
        for event in events(reactor) {
            accel.on_event(reactor, event);
        }
        accel.advance(reactor, &mut done);
        let mut notices = Vec::new();
        accel.take_notices(&mut notices);
        assert!(done.is_empty() || confirmed, "acknowledged without a confirmation");
        assert!(accel.in_flight() <= STEPS);
    }
    drop(accel.release(reactor));
    accel.advance(reactor, &mut done);
    assert!(accel.is_quiet() && accel.in_flight() == 0 && done.len() == next as usize);
}

fuzz_target!(|bytes: &[u8]| {
    let mut source = Source(bytes);
    match source.byte() % 8 {
        0 => {
            let expected = source.number();
            if let Ok(Some((frame, used))) = frame::decode(source.0, expected) {
                assert_eq!(used, frame::HEADER + frame.meta.len() + frame.data.len());
            }
        }
        1..5 => with_reactor(|reactor| replica(&mut source, reactor)),
        _ => with_reactor(|reactor| owner(&mut source, reactor)),
    }
});

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
