//! Two writes of the same bytes of a full volume, at the owner of a disk without a path: its coordinator is this test, which says what finds
//! space, and when.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use weir_block::{
    Action, Code, Completion, Engine, ErrorKind, IoError, Layer, Nanos, Payload, Reactor, Request, Tag, Token,
};
use weir_net::{Channel, ChannelError};
use weir_volume::lun::redirect::{Data, ToCoordinator, ToOwner, wire};
use weir_volume::lun::serving::PIECE;
use weir_volume::routed::{RoutedBacking, RoutedOptions};
use weir_volume::{Backing, SharedDisk};

const BLOCK: usize = 4096;
const SOON: Duration = Duration::from_secs(20);
/// Longer than the pause before a write that waits for space is tried again.
const TRIED_AGAIN: Duration = Duration::from_millis(2500);
const NO_SPACE: IoError = IoError::new(ErrorKind::Operator, Code::NoSpace, "allocating");

struct World {
    reactor: Reactor,
    owner: RoutedBacking,
    coordinator: Channel,
    token: Token,
    /// Requests without an answer: their numbers, and their first bytes.
    asked: Vec<(u64, u8)>,
    done: Vec<Completion>,
}

impl World {
    fn new() -> World {
        let mut reactor = common::reactor(Engine::Auto);
        let options = RoutedOptions {
            size: 1 << 20,
            logical_block: 4096,
            depth: 64,
            coordinator_wait: SOON,
            full_volume_wait: SOON,
        };
        let mut owner = RoutedBacking::new(&mut reactor, None, options).unwrap();
        owner.own(1, &Arc::new(AtomicU64::new(u64::MAX)));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mine = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let token = Token { owner: reactor.new_owner(), slot: 0 };
        let other = listener.accept().unwrap().0;
        let coordinator = Channel::new(other.into(), token, None, &[], &mut reactor).unwrap();
        owner.connect(&mut reactor, mine.into()).unwrap();
        World { reactor, owner, coordinator, token, asked: Vec::new(), done: Vec::new() }
    }

    fn send(&mut self, message: ToOwner) {
        wire::encode_to_owner(message).into_iter().for_each(|frame| frame.queue(&mut self.coordinator));
    }

    fn answer(&mut self, id: u64, result: Result<(), IoError>) {
        self.asked.retain(|(other, _)| *other != id);
        self.send(ToOwner::Answer { id, result, grants: Vec::new(), data: None });
    }

    fn write(&mut self, byte: u8, blocks: usize) {
        let mut buffer = self.reactor.buffers().take(blocks * BLOCK).unwrap();
        buffer.bytes_mut().fill(byte);
        let (tag, payload) = (Tag(byte.into()), Payload::Given(buffer));
        self.owner.submit(&mut self.reactor, Request::Write { tag, offset: 0, payload, fua: false });
    }

    fn turn(&mut self) {
        self.owner.advance(&mut self.reactor, &mut self.done);
        let (mut messages, pool) = (Vec::new(), self.reactor.buffers().clone());
        self.coordinator
            .receive(&mut self.reactor, |frame| {
                messages.push(wire::decode_to_coordinator(frame, &pool).unwrap());
                Ok::<(), ChannelError>(())
            })
            .unwrap();
        for message in messages {
            match message {
                ToCoordinator::Hello { .. } => self.send(ToOwner::Welcome { epoch: 1, piece: PIECE }),
                ToCoordinator::Redirected { request, data, .. } => {
                    let Data::Bytes(bytes) = data else { panic!("a write") };
                    self.asked.push((request.id, bytes.bytes()[0]));
                }
                other => panic!("{other:?}"),
            }
        }
        self.coordinator.flush(&mut self.reactor).unwrap();
        self.owner.wants_path(self.reactor.now());
        let soon = self.reactor.now() + Duration::from_millis(1);
        let mut events = Vec::new();
        self.reactor.wait(self.owner.deadline().min(soon), &mut events).unwrap();
        for event in events {
            match event.action {
                Action::Ready(interest) if event.token.owner == self.token.owner => {
                    self.coordinator.on_event(interest);
                }
                _ => self.owner.on_event(&mut self.reactor, event),
            }
        }
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&World) -> bool) {
        let deadline = Nanos::now() + SOON;
        while !is_so(self) {
            assert!(Nanos::now() < deadline, "{what}: asked {:?}, done {:?}", self.asked, self.done);
            self.turn();
        }
    }

    /// Waits until the coordinator has been asked for this write; its number.
    fn asked(&mut self, byte: u8) -> u64 {
        let is_it = |(_, other): &&(u64, u8)| *other == byte;
        self.until("a write is not redirected", |world| world.asked.iter().any(|one| is_it(&one)));
        self.asked.iter().find(is_it).unwrap().0
    }

    fn result(&mut self, byte: u8) -> Result<(), IoError> {
        let is_it = |one: &Completion| one.tag == Tag(byte.into());
        self.until("a write has no answer", |world| world.done.iter().any(is_it));
        let at = self.done.iter().position(is_it).unwrap();
        self.done.remove(at).result.map(|_| ())
    }
}

/// The first may have been done in part, and a guest may have read that: what comes later must not be covered when it is done again (P7).
#[test]
fn a_later_write_waits_behind_one_that_waits_for_space() {
    let mut world = World::new();
    world.write(1, 2);
    let first = world.asked(1);
    world.answer(first, Err(NO_SPACE));
    world.until("the first does not wait", |world| world.owner.lacks_space(Nanos::now()));
    world.write(2, 1);
    // It is not sent before the first has been done again.
    let until = Nanos::now() + TRIED_AGAIN;
    while Nanos::now() < until && world.asked.is_empty() {
        world.turn();
    }
    assert_eq!(world.asked.iter().map(|(_, byte)| *byte).collect::<Vec<_>>(), [1]);
    let again = world.asked(1);
    world.answer(again, Ok(()));
    assert!(world.result(1).is_ok());
    let second = world.asked(2);
    world.answer(second, Ok(()));
    assert!(world.result(2).is_ok());
    assert_eq!(world.owner.in_flight(), 0);
}

/// Both are with the coordinator when the first is refused.
#[test]
fn a_write_is_not_done_again_over_a_later_one_that_is_under_way() {
    let mut world = World::new();
    world.write(1, 2);
    world.write(2, 1);
    let (first, second) = (world.asked(1), world.asked(2));
    world.answer(first, Err(NO_SPACE));
    assert_eq!(world.result(1).unwrap_err().code, Code::NoSpace);
    world.answer(second, Ok(()));
    assert!(world.result(2).is_ok());
    assert!(world.asked.is_empty());
    assert_eq!(world.owner.in_flight(), 0);
}
