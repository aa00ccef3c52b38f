//! Replicas' hosts before nodes that send whatever they like: former owners, those that do not read, those that say nothing (P2, P10).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use weir_accel::ReplicaHost;
use weir_accel::owner::Held;
use weir_accel::wire::{Batch, Confirm, Hello, MessageKind, Refuse};
use weir_block::{Nanos, Reactor, ReactorConfig};
use weir_net::frame;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::LOG;

/// Sends batches and never reads an answer. How many frames were taken before the socket was full.
fn flood(host: &mut ReplicaHost, reactor: &mut Reactor, stream: &mut UnixStream, most: u64) -> u64 {
    for number in 1..most {
        let mut head = Batch::new_zeroed();
        (head.epoch, head.first) = (1.into(), 1.into());
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, MessageKind::Batch as u16, number, head.as_bytes(), 0);
        let mut sent = 0;
        for _ in 0..100 {
            sent += stream.write(&bytes[sent..]).unwrap_or(0);
            let mut events = Vec::new();
            reactor.wait(Nanos(0), &mut events).unwrap();
            events.drain(..).for_each(|event| host.on_event(reactor, event));
            host.advance(reactor);
            if sent == bytes.len() {
                break;
            }
        }
        if sent < bytes.len() {
            return number;
        }
    }
    most
}

#[test]
fn who_does_not_take_answers_is_not_listened_to() {
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let id = reactor.new_owner();
    let mut host = ReplicaHost::new(id, LOG, None, 0).unwrap();
    let (mut stream, theirs) = UnixStream::pair().unwrap();
    stream.set_nonblocking(true).unwrap();
    host.attach(&mut reactor, "adversary".into(), 0, theirs.into()).unwrap();
    let mut hello = Hello::new_zeroed();
    (hello.epoch, hello.lineage) = (1.into(), 1.into());
    let mut bytes = Vec::new();
    frame::encode(&mut bytes, MessageKind::Hello as u16, 0, hello.as_bytes(), 0);
    stream.write_all(&bytes).unwrap();
    let most = 200_000;
    let taken = flood(&mut host, &mut reactor, &mut stream, most);
    assert!(taken < most, "{taken} frames were taken while no answer was");
    // Once it reads, it is heard again.
    let mut answers = vec![0; 4 << 20];
    let mut read = 0;
    for _ in 0..1_000 {
        read += stream.read(&mut answers).unwrap_or(0);
        let mut events = Vec::new();
        reactor.wait(Nanos(0), &mut events).unwrap();
        events.drain(..).for_each(|event| host.on_event(&reactor, event));
        host.advance(&mut reactor);
    }
    assert!(read > 1 << 20, "{read} bytes of answers");
    assert!(host.has_owner());
}

/// A node's side of a connection to a replica's host, frame by frame.
struct Caller {
    stream: UnixStream,
    frames: u64,
    /// All bytes received so far.
    heard: Vec<u8>,
}

impl Caller {
    fn attach(host: &mut ReplicaHost, reactor: &mut Reactor, node: &str, known: u64) -> Option<Caller> {
        let (stream, theirs) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let attached = host.attach(reactor, node.into(), known, theirs.into());
        attached.ok().map(|()| Caller { stream, frames: 0, heard: Vec::new() })
    }

    /// Sends a frame if the connection stands; gives the host turns.
    fn send(&mut self, host: &mut ReplicaHost, reactor: &mut Reactor, kind: MessageKind, meta: &[u8]) {
        self.send_kind(host, reactor, kind as u16, meta);
    }

    fn send_kind(&mut self, host: &mut ReplicaHost, reactor: &mut Reactor, kind: u16, meta: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind, self.frames, meta, 0);
        self.frames += 1;
        let _ = self.stream.write_all(&bytes);
        turns(host, reactor);
    }

    fn hello(&mut self, host: &mut ReplicaHost, reactor: &mut Reactor, epoch: u64, lineage: u64) {
        let mut hello = Hello::new_zeroed();
        (hello.epoch, hello.lineage) = (epoch.into(), lineage.into());
        self.send(host, reactor, MessageKind::Hello, hello.as_bytes());
    }

    /// A batch without records that calls the copy complete, and frees what is there up to `freed`.
    fn batch(&mut self, host: &mut ReplicaHost, reactor: &mut Reactor, epoch: u64, freed: u64) {
        let mut head = Batch::new_zeroed();
        (head.epoch, head.first) = (epoch.into(), (freed + 1).into());
        (head.freed, head.complete) = (freed.into(), 1.into());
        self.send(host, reactor, MessageKind::Batch, head.as_bytes());
    }

    /// The epochs in which it was refused.
    fn refusals(&self) -> Vec<u64> {
        let (mut epochs, mut rest, mut number) = (Vec::new(), &self.heard[..], 0);
        while let Some((frame, used)) = frame::decode(rest, number).unwrap() {
            if frame.kind == MessageKind::Refuse as u16 {
                epochs.push(Refuse::read_from_bytes(frame.meta).unwrap().epoch.get());
            }
            (rest, number) = (&rest[used..], number + 1);
        }
        epochs
    }

    fn has_ended(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(count) => self.heard.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return false,
                Err(_) => return true,
            }
        }
    }
}

fn turns(host: &mut ReplicaHost, reactor: &mut Reactor) {
    for _ in 0..10 {
        let mut events = Vec::new();
        reactor.wait(Nanos(0), &mut events).unwrap();
        events.drain(..).for_each(|event| host.on_event(reactor, event));
        host.advance(reactor);
    }
}

/// P2: a former owner keeps its certificate, and may claim any epoch. It must not reach the copy on which the new one counts.
#[test]
fn a_former_owner_reaches_the_copy_neither_on_an_old_connection_nor_on_a_new_one() {
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let (id, lead) = (reactor.new_owner(), 6);
    let mut host = ReplicaHost::new(id, LOG, None, 5).unwrap();
    host.record_is(&mut reactor, 5, Some("b"));
    let mut former = Caller::attach(&mut host, &mut reactor, "b", 5).expect("the owner");
    former.hello(&mut host, &mut reactor, 5, 5);
    former.batch(&mut host, &mut reactor, 5, 0);
    assert!(host.replica().is_complete() && host.has_owner());
    // The new owner is first to know of the change, and this node has read the record for its connection.
    let mut new = Caller::attach(&mut host, &mut reactor, "c", 7).expect("the new owner");
    // News that lag behind do not bring the former one back.
    host.record_is(&mut reactor, 6, Some("b"));
    for epoch in [5, 6, 7, 7 + lead] {
        former.batch(&mut host, &mut reactor, epoch, 3);
        former.hello(&mut host, &mut reactor, epoch, epoch);
    }
    assert!(former.has_ended());
    assert_eq!(former.refusals(), [7], "the host tells it that another node owns the disk");
    assert_eq!((host.replica().epoch(), host.replica().is_complete()), (5, true), "the copy is as it was");
    for known in [0, 5, 6, 7] {
        assert!(Caller::attach(&mut host, &mut reactor, "b", known).is_none(), "in epoch {known}");
    }
    new.hello(&mut host, &mut reactor, 7, 7);
    new.batch(&mut host, &mut reactor, 7, 0);
    assert_eq!((host.replica().epoch(), new.has_ended()), (7, false));
    // Its own changes are no reason to end its connection; a change of hands is, also if nobody else has connected yet.
    host.record_is(&mut reactor, 9, Some("c"));
    new.batch(&mut host, &mut reactor, 9, 0);
    assert_eq!((host.replica().epoch(), new.has_ended()), (9, false));
    host.record_is(&mut reactor, 10, Some("b"));
    new.batch(&mut host, &mut reactor, 12, 3);
    assert_eq!((host.replica().epoch(), new.has_ended()), (9, true));
    // It owns the disk again, and is not refused for what it was before.
    let mut again = Caller::attach(&mut host, &mut reactor, "b", 10).expect("the owner again");
    host.record_is(&mut reactor, 11, None);
    assert!(again.has_ended() && !host.has_owner(), "nobody owns the disk");
}

/// Also the owner may send no more than an owner's frames, each in its place.
#[test]
fn frames_that_no_owner_sends_end_its_connection_and_change_nothing() {
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let id = reactor.new_owner();
    let mut host = ReplicaHost::new(id, LOG, None, 5).unwrap();
    let mut owner = Caller::attach(&mut host, &mut reactor, "b", 5).expect("the owner");
    owner.hello(&mut host, &mut reactor, 5, 5);
    owner.batch(&mut host, &mut reactor, 5, 0);
    let held = host.replica().held();
    let confirm = Confirm::new(Held { epoch: 9, last: 99, freed: 99, gap: 99, complete: true });
    let refuse = Refuse { epoch: 99.into() };
    let kinds: Vec<u16> = (0..=16).chain([u16::MAX]).collect();
    for greets in [false, true] {
        for &kind in &kinds {
            let known = MessageKind::from_wire(kind);
            if known == Some(if greets { MessageKind::Batch } else { MessageKind::Hello }) {
                continue;
            }
            let mut owner = Caller::attach(&mut host, &mut reactor, "b", 5).expect("the owner");
            if greets {
                owner.hello(&mut host, &mut reactor, 5, 5);
                assert!(!owner.has_ended());
            }
            let meta = match known {
                Some(MessageKind::Confirm) => confirm.as_bytes(),
                Some(MessageKind::Refuse) => refuse.as_bytes(),
                _ => &[0xff; 64][..],
            };
            owner.send_kind(&mut host, &mut reactor, kind, meta);
            assert!(owner.has_ended(), "after a frame of kind {kind}, greeted: {greets}");
            assert_eq!(host.replica().held(), held, "after a frame of kind {kind}, greeted: {greets}");
        }
    }
}

#[test]
fn who_says_nothing_does_not_keep_a_place() {
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let id = reactor.new_owner();
    let mut host = ReplicaHost::new(id, LOG, None, 5).unwrap();
    let start = reactor.now();
    let mut silent = Caller::attach(&mut host, &mut reactor, "b", 5).expect("the owner");
    let due = host.deadline();
    assert!(due > start && due < start + Duration::from_secs(60), "{due:?} after {start:?}");
    turns(&mut host, &mut reactor);
    assert!(!silent.has_ended(), "it has time until then");
    while reactor.now() < due {
        let mut events = Vec::new();
        reactor.wait(due, &mut events).unwrap();
    }
    turns(&mut host, &mut reactor);
    assert!(silent.has_ended());
    assert_eq!(host.deadline(), Nanos::NEVER);
}
