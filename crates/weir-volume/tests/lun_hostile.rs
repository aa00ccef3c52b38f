//! An owner that sends more than any owner has, to a coordinator: the owner is this test, and the disk's file is one whose syncs hang.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use weir_block::{Action, Engine, IoError, Nanos, Reactor, SharedFile, Token};
use weir_net::{Channel, ChannelError};
use weir_volume::lun::leases::Piece;
use weir_volume::lun::redirect::{Data, ToCoordinator, ToOwner, wire};
use weir_volume::lun::router::{Kind, Range, Request};
use weir_volume::lun::serving::{Change, FileWork, Layout, OpenedDisk, PIECE, ServedDisk};

const SIZE: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(60);

/// A file's work. A commit waits until it may end.
struct Work {
    path: PathBuf,
    may_end: Mutex<bool>,
    ended: Condvar,
}

impl Work {
    fn let_end(&self) {
        *self.may_end.lock().unwrap() = true;
        self.ended.notify_all();
    }
}

impl FileWork for Work {
    fn path(&self) -> &Path {
        &self.path
    }

    fn commit(&self, ranges: &[Range]) -> Vec<Layout> {
        let _ended = self.ended.wait_while(self.may_end.lock().unwrap(), |may_end| !*may_end).unwrap();
        ranges.iter().map(|_| Ok(Vec::new())).collect()
    }

    fn look(&self, _: Range) -> Layout {
        Ok(Vec::new())
    }

    fn settle(&self, _: Range, _: Range) -> Layout {
        Ok(Vec::new())
    }

    fn distrust(&self) {}

    fn punch(&self, _: Range, _: Range) -> Layout {
        Ok(Vec::new())
    }

    fn allocate(&self, _: Range) -> Result<Option<Vec<Piece>>, IoError> {
        Ok(None)
    }

    fn change(&self, _: Change) -> Result<(), IoError> {
        Ok(())
    }

    fn is_usable(&self) -> bool {
        true
    }
}

struct World {
    // Dropped first: it waits for operations in flight.
    reactor: Reactor,
    served: ServedDisk,
    owner: Channel,
    token: Token,
    work: Arc<Work>,
    heard: Vec<ToOwner>,
    /// The coordinator has ended the connection.
    is_over: bool,
    _directory: tempfile::TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        self.work.let_end();
    }
}

impl World {
    fn new() -> World {
        let directory = common::scratch();
        let path = directory.path().join("disk");
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        let open =
            || SharedFile::new(std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap());
        let mut reactor = common::reactor(Engine::Auto);
        let (file, lun) = (open(), open());
        let work = Arc::new(Work { path, may_end: Mutex::default(), ended: Condvar::new() });
        let opened = OpenedDisk::new(Arc::clone(&work) as Arc<dyn FileWork>, file, lun, SIZE);
        let mut served = ServedDisk::new(&mut reactor, opened, 1, None, None).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mine = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let token = Token { owner: reactor.new_owner(), slot: 0 };
        let mut owner = Channel::new(mine.into(), token, None, &[], &mut reactor).unwrap();
        served.connect(&mut reactor, listener.accept().unwrap().0.into(), 1).unwrap();
        wire::encode_to_coordinator(ToCoordinator::Hello { epoch: 1 }).queue(&mut owner);
        let heard = Vec::new();
        let mut world =
            World { reactor, served, owner, token, work, heard, is_over: false, _directory: directory };
        world.until("no welcome", |world| matches!(world.heard[..], [ToOwner::Welcome { .. }]));
        world.heard.clear();
        world
    }

    fn send(&mut self, message: ToCoordinator) {
        wire::encode_to_coordinator(message).queue(&mut self.owner);
    }

    /// A write of the disk's first block: each waits for the one before.
    fn write(&mut self, id: u64) {
        let request = Request { id, kind: Kind::Write, range: (0, 4096) };
        self.send(ToCoordinator::Redirected {
            request,
            gives_up: (0, PIECE),
            durable: true,
            data: Data::Zeroes,
        });
    }

    fn turn(&mut self) {
        self.served.advance(&mut self.reactor);
        let pool = self.reactor.buffers().clone();
        if !self.is_over {
            let sent = self.owner.flush(&mut self.reactor);
            let heard = &mut self.heard;
            let received = self.owner.receive(&mut self.reactor, |frame| {
                heard.push(wire::decode_to_owner(frame, &pool).unwrap());
                Ok::<(), ChannelError>(())
            });
            self.is_over = sent.is_err() || received.is_err();
        }
        let mut events = Vec::new();
        self.reactor.wait(self.reactor.now() + Duration::from_millis(1), &mut events).unwrap();
        for event in events {
            match event.action {
                Action::Ready(interest) if event.token.owner == self.token.owner => {
                    self.owner.on_event(interest);
                }
                _ => self.served.on_event(&mut self.reactor, event),
            }
        }
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&World) -> bool) {
        let deadline = Nanos::now() + SOON;
        while !is_so(self) {
            assert!(Nanos::now() < deadline, "{what}: {} messages, over: {}", self.heard.len(), self.is_over);
            self.turn();
        }
    }
}

/// As many as an owner can have wait for as long as they have to. Whoever sends more fills the coordinator's memory, and takes its time (P10).
#[test]
fn an_owner_with_more_requests_than_it_can_have_is_turned_away() {
    let mut world = World::new();
    (0..512).for_each(|id| world.write(id));
    (0..100).for_each(|_| world.turn());
    assert!(world.heard.is_empty() && !world.is_over, "they wait for the first one");
    world.work.let_end();
    world.until("not all are done", |world| world.heard.len() == 512);
    assert!(world.heard.iter().all(|message| matches!(message, ToOwner::Answer { result: Ok(()), .. })));
    *world.work.may_end.lock().unwrap() = false;
    (0..1200).for_each(|id| world.write(1000 + id));
    world.until("the connection stays", |world| world.is_over);
    assert!(!world.served.is_connected(1));
}

/// What has come in one go is begun a part after the other, and none is forgotten.
#[test]
fn more_flushes_than_are_begun_at_once_are_all_done() {
    let mut world = World::new();
    (0..5000).for_each(|id| world.send(ToCoordinator::Flush(id)));
    world.until("not all are done", |world| world.heard.len() == 5000);
    assert!(world.heard.iter().all(|message| matches!(message, ToOwner::Flushed { result: Ok(()), .. })));
    assert!(!world.is_over);
}

/// The host of an owner stands still, with its connection open, and the answers that it does not take fill the memory of the disk. Another
/// node has taken the disk over.
#[test]
fn a_new_owner_is_heard_although_the_former_one_takes_no_answers() {
    let mut world = World::new();
    // More than the memory and what the sockets hold.
    for id in 0..240 {
        let request = Request { id, kind: Kind::Read, range: (0, SIZE / 2) };
        world.send(ToCoordinator::Redirected { request, gives_up: (0, 0), durable: false, data: Data::None });
    }
    world.owner.flush(&mut world.reactor).unwrap();
    world.is_over = true;
    (0..500).for_each(|_| world.turn());

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mine = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    world.token = Token { owner: world.reactor.new_owner(), slot: 0 };
    let mut owner = Channel::new(mine.into(), world.token, None, &[], &mut world.reactor).unwrap();
    world.served.connect(&mut world.reactor, listener.accept().unwrap().0.into(), 2).unwrap();
    wire::encode_to_coordinator(ToCoordinator::Hello { epoch: 2 }).queue(&mut owner);
    let _former = std::mem::replace(&mut world.owner, owner);
    world.is_over = false;
    world.until("no welcome", |world| matches!(world.heard[..], [ToOwner::Welcome { .. }]));
}
