//! A disk on an NBD server, against a server that does what servers may do: it ends without what it has not flushed, and it carries a write
//! out late, after its connection has broken.
#![allow(clippy::unwrap_used)]

mod server;

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use server::{BLOCK, SIZE, Server, Writes};
use weir_block::{
    Code, Completion, Engine, Event, IoError, Nanos, Outcome, Payload, Reactor, ReactorConfig, Region,
    Request, Tag,
};
use weir_volume::{Backing, BackingOptions};

const GRACE: Duration = Duration::from_millis(700);

/// A shard with one disk.
struct Shard {
    reactor: Reactor,
    backing: Box<dyn Backing>,
    done: Vec<Completion>,
    events: Vec<Event>,
    tags: u64,
}

impl Shard {
    fn new(server: &Server) -> Shard {
        Shard::with(server, Duration::from_secs(60), GRACE)
    }

    fn with(server: &Server, server_wait: Duration, fence_grace: Duration) -> Shard {
        let config = ReactorConfig { engine: Engine::Epoll, ..ReactorConfig::default() };
        let mut reactor = Reactor::new(config).unwrap();
        let options = BackingOptions {
            size: Some(SIZE),
            logical_block: Some(512),
            server_wait,
            fence_grace,
            ..BackingOptions::default()
        };
        let backing = server.kind().open(&options).unwrap().attach(&mut reactor).unwrap();
        Shard { reactor, backing, done: Vec::new(), events: Vec::new(), tags: 0 }
    }

    fn turn(&mut self, longest: Duration) {
        self.backing.advance(&mut self.reactor, &mut self.done);
        let until = if self.done.is_empty() { self.backing.deadline() } else { Nanos(0) };
        let until = until.min(self.reactor.now() + longest);
        self.reactor.wait(until, &mut self.events).unwrap();
        for event in self.events.drain(..) {
            self.backing.on_event(&mut self.reactor, event);
        }
    }

    fn run(&mut self, time: Duration) {
        let until = Nanos::now() + time;
        while Nanos::now() < until {
            self.turn(Duration::from_millis(5));
        }
    }

    /// Turns until the request is answered.
    fn answer(&mut self, tag: Tag) -> Result<Outcome, IoError> {
        let until = Nanos::now() + Duration::from_secs(20);
        loop {
            if let Some(at) = self.done.iter().position(|done| done.tag == tag) {
                return self.done.remove(at).result;
            }
            assert!(Nanos::now() < until, "no answer: {:?}", self.backing.trouble(self.reactor.now()));
            self.turn(Duration::from_millis(50));
        }
    }

    fn has(&self, tag: Tag) -> bool {
        self.done.iter().any(|done| done.tag == tag)
    }

    fn tag(&mut self) -> Tag {
        self.tags += 1;
        Tag(self.tags)
    }

    fn begin_write(&mut self, block: u64, value: u8) -> Tag {
        let tag = self.tag();
        let bytes = vec![value; BLOCK];
        let (offset, payload) = (block * BLOCK as u64, Payload::Lent(&bytes));
        self.backing.submit(&mut self.reactor, Request::Write { tag, offset, payload, fua: false });
        tag
    }

    fn write(&mut self, block: u64, value: u8) {
        let tag = self.begin_write(block, value);
        self.answer(tag).unwrap();
    }

    fn begin_read(&mut self, block: u64) -> Tag {
        let (tag, buffer) = (self.tag(), self.reactor.buffers().take(BLOCK).unwrap());
        self.backing.submit(&mut self.reactor, Request::Read { tag, offset: block * BLOCK as u64, buffer });
        tag
    }

    fn read(&mut self, block: u64) -> u8 {
        let tag = self.begin_read(block);
        self.value(tag)
    }

    fn value(&mut self, tag: Tag) -> u8 {
        match self.answer(tag).unwrap() {
            Outcome::Read(buffer) => {
                assert!(buffer.bytes().iter().all(|byte| *byte == buffer.bytes()[0]), "torn");
                buffer.bytes()[0]
            }
            other => panic!("{other:?}"),
        }
    }

    fn flush(&mut self) -> Result<(), IoError> {
        let tag = self.tag();
        self.backing.submit(&mut self.reactor, Request::Flush { tag });
        self.answer(tag).map(drop)
    }

    fn news(&mut self) -> Vec<&'static str> {
        std::iter::from_fn(|| self.backing.news()).map(|(kind, _)| kind).collect()
    }

    /// Turns until this is reported.
    fn await_news(&mut self, expected: &str) {
        let until = Nanos::now() + Duration::from_secs(15);
        let mut news = Vec::new();
        while news.is_empty() {
            assert!(Nanos::now() < until, "{expected} is not reported");
            self.turn(Duration::from_millis(5));
            news = self.news();
        }
        assert_eq!(news, [expected]);
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Nanos::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Nanos::now() < until, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A write of 2 is under way when the connection breaks, and lands shortly before [`GRACE`] has passed.
fn break_with_a_write_under_way(server: &Server, shard: &mut Shard) -> (Tag, Nanos) {
    shard.write(1, 1);
    server.lock().writes = Writes::Break;
    let lost = shard.begin_write(1, 2);
    eventually("the write is sent", || {
        shard.turn(Duration::from_millis(5));
        !server.lock().held.is_empty()
    });
    server.lock().writes = Writes::Answer;
    // What is sent before that is in doubt, too.
    eventually("the loss is noticed", || {
        shard.turn(Duration::from_millis(5));
        shard.backing.trouble(shard.reactor.now()).is_some()
    });
    let broken = Nanos::now();
    let disk = Arc::clone(&server.disk);
    thread::spawn(move || {
        thread::sleep(GRACE - Duration::from_millis(100));
        let mut disk = disk.lock().unwrap();
        for (offset, data) in std::mem::take(&mut disk.held) {
            disk.write(offset, &data);
        }
    });
    (lost, broken)
}

/// A test of the test: the server does what the rule is against.
#[test]
fn without_the_grace_an_older_write_covers_a_later_one() {
    let server = Server::new();
    let mut shard = Shard::with(&server, Duration::from_secs(60), Duration::ZERO);
    let (lost, _) = break_with_a_write_under_way(&server, &mut shard);
    shard.answer(lost).unwrap();
    shard.write(1, 3);
    shard.run(GRACE);
    assert_eq!(shard.read(1), 2);
}

#[test]
fn a_write_of_a_broken_connection_that_lands_late_never_covers_a_later_one() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    let (lost, broken) = break_with_a_write_under_way(&server, &mut shard);
    // What overlaps nothing goes on at once, over the next connection.
    let other = shard.begin_write(9, 9);
    let elsewhere = shard.begin_read(5);
    shard.answer(other).unwrap();
    assert_eq!(shard.value(elsewhere), 0);
    assert!((Nanos::now() - broken) < GRACE, "{:?}", (Nanos::now() - broken));
    assert!(!shard.has(lost));
    assert!(shard.backing.trouble(shard.reactor.now()).is_some_and(|text| text.contains("may still land")));
    shard.answer(lost).unwrap();
    assert!(server.lock().held.is_empty(), "it has landed before its repetition");
    shard.write(1, 3);
    shard.run(GRACE);
    assert_eq!(shard.read(1), 3, "an older write has covered it");
    assert_eq!(shard.news(), ["server-away", "server-back"]);
    assert_eq!(shard.backing.trouble(shard.reactor.now()), None);
}

#[test]
fn what_the_server_forgets_at_its_crash_is_written_again_before_anybody_sees_it() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    for block in 0..200 {
        shard.write(block, block as u8 + 1);
    }
    shard.flush().unwrap();
    let zeroes = shard.tag();
    let (offset, length) = (10 * BLOCK as u64, 5 * BLOCK as u64);
    shard.backing.submit(&mut shard.reactor, Request::Discard { tag: zeroes, offset, length, fua: false });
    shard.answer(zeroes).unwrap();
    for block in 100..150 {
        shard.write(block, 7);
    }
    shard.write(12, 8);
    for _ in 0..2 {
        server.crash();
        let expected = |block: u64| match block {
            12 => 8,
            10..15 => 0,
            100..150 => 7,
            block => block as u8 + 1,
        };
        let reads: Vec<Tag> = (0..200).map(|block| shard.begin_read(block)).collect();
        for (block, tag) in (0..200).zip(reads) {
            assert_eq!(shard.value(tag), expected(block), "block {block}");
        }
    }
    // A flush that was answered is true.
    server.crash();
    shard.flush().unwrap();
    server.lock().volatile.clear();
    assert_eq!((shard.read(120), shard.read(12), shard.read(11)), (7, 8, 0));
}

#[test]
fn destage_hears_that_its_writes_may_be_lost_and_clients_do_not() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    let region = Rc::new(Region::new(1 << 20).unwrap());
    region.copy_in(0, &[5; BLOCK]);
    let gather = |shard: &mut Shard| {
        let tag = shard.tag();
        shard.backing.write_gather(
            &mut shard.reactor,
            tag,
            0,
            Rc::clone(&region),
            vec![(0, 512), (512, BLOCK - 512)],
        );
        shard.answer(tag).map(drop)
    };
    let destage_flush = |shard: &mut Shard| {
        let tag = shard.tag();
        shard.backing.submit_destaged(&mut shard.reactor, Request::Flush { tag });
        shard.answer(tag).map(drop)
    };
    gather(&mut shard).unwrap();
    destage_flush(&mut shard).unwrap();
    server.crash();
    destage_flush(&mut shard).unwrap();
    assert_eq!(shard.read(0), 5, "it was flushed");
    gather(&mut shard).unwrap();
    server.crash();
    shard.flush().unwrap();
    assert_eq!(destage_flush(&mut shard).unwrap_err().code, Code::Lost);
    gather(&mut shard).unwrap();
    destage_flush(&mut shard).unwrap();
    // A flush that fails without anybody who waits for it.
    gather(&mut shard).unwrap();
    shard.write(3, 2);
    server.lock().fails_flush = true;
    shard.backing.stop_waiting();
    eventually("it is flushed after all", || {
        shard.turn(Duration::from_millis(5));
        !shard.backing.owes()
    });
    assert!(!server.lock().fails_flush);
    destage_flush(&mut shard).unwrap_err();
    gather(&mut shard).unwrap();
    destage_flush(&mut shard).unwrap();
    assert_eq!(shard.read(0), 5);
    // What the server could not flush is written again, as far as nobody else does it.
    shard.write(3, 3);
    server.lock().fails_flush = true;
    shard.news();
    shard.flush().unwrap_err();
    shard.flush().unwrap();
    assert_eq!(shard.news(), ["server-refuses", "server-back"]);
    server.crash();
    assert_eq!(shard.read(3), 3);
}

#[test]
fn what_is_written_again_never_covers_a_write_that_is_under_way() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    shard.write(1, 1);
    server.lock().writes = Writes::Late;
    let newer = shard.begin_write(1, 2);
    eventually("the write is sent", || {
        shard.turn(Duration::from_millis(5));
        !server.lock().held.is_empty()
    });
    server.lock().writes = Writes::Answer;
    server.lock().fails_flush = true;
    shard.flush().unwrap_err();
    server.land();
    // Longer than the pause after a failure.
    shard.run(Duration::from_millis(1300));
    server.answer();
    shard.answer(newer).unwrap();
    assert_eq!(shard.read(1), 2);
    shard.flush().unwrap();
    server.crash();
    assert_eq!(shard.read(1), 2);
}

#[test]
fn two_writes_in_doubt_that_overlap_are_both_done_again_in_order() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    server.lock().writes = Writes::Break;
    let (first, second) = (shard.begin_write(1, 2), shard.begin_write(1, 3));
    eventually("the first one is sent", || {
        shard.turn(Duration::from_millis(5));
        !server.lock().held.is_empty()
    });
    server.lock().writes = Writes::Answer;
    shard.answer(first).unwrap();
    shard.answer(second).unwrap();
    assert_eq!(shard.read(1), 3);
}

/// P9: what overlaps that does not wait without an end, everything else goes on, and somebody hears of it.
#[test]
fn a_server_that_refuses_what_is_written_again_is_reported_and_tried_until_it_takes_that() {
    const WAIT: Duration = Duration::from_secs(3);
    let server = Server::new();
    let mut shard = Shard::with(&server, WAIT, GRACE);
    shard.write(1, 1);
    server.lock().writes = Writes::Refuse;
    server.crash();
    let began = Nanos::now();
    let tag = shard.begin_read(1);
    assert_eq!(shard.read(2), 0, "another block");
    shard.flush().unwrap_err();
    let trouble = shard.backing.trouble(shard.reactor.now()).unwrap();
    assert!(trouble.contains("requests for the same bytes wait, and flushes fail"), "{trouble}");
    assert_eq!(shard.news(), ["server-away", "server-back", "server-refuses"]);
    assert!(!shard.has(tag));
    shard.answer(tag).unwrap_err();
    assert!((WAIT..3 * WAIT).contains(&(Nanos::now() - began)));
    let trouble = shard.backing.trouble(shard.reactor.now()).unwrap();
    assert!(trouble.contains("requests for the same bytes fail"), "{trouble}");
    server.lock().writes = Writes::Answer;
    eventually("it takes it", || {
        shard.turn(Duration::from_millis(5));
        shard.backing.trouble(shard.reactor.now()).is_none()
    });
    assert_eq!(shard.read(1), 1);
    shard.flush().unwrap();
    assert_eq!(shard.news(), ["server-back"]);
    // A disk that is closed does not wait for it longer than its guests did.
    shard.write(1, 2);
    server.lock().writes = Writes::Refuse;
    server.crash();
    shard.backing.stop_waiting();
    shard.flush().unwrap_err();
    assert!(shard.backing.owes());
    eventually("it is given up", || {
        shard.turn(Duration::from_millis(5));
        !shard.backing.owes()
    });
}

#[test]
fn requests_wait_for_a_server_that_is_away_and_not_without_a_limit() {
    let server = Server::new();
    let mut shard = Shard::with(&server, Duration::from_secs(3), GRACE);
    shard.write(1, 1);
    server.leave();
    let waits = shard.begin_write(2, 2);
    shard.run(Duration::from_millis(800));
    assert!(!shard.has(waits) && shard.backing.is_away());
    server.come_back();
    shard.answer(waits).unwrap();
    assert_eq!((shard.read(1), shard.read(2)), (1, 2));
    assert_eq!(shard.news(), ["server-away", "server-back"]);

    server.leave();
    let fails = shard.begin_write(3, 3);
    let began = Nanos::now();
    shard.answer(fails).unwrap_err();
    assert!((Nanos::now() - began) > Duration::from_secs(2), "{:?}", (Nanos::now() - began));
    let at_once = shard.begin_read(1);
    shard.answer(at_once).unwrap_err();
    shard.flush().unwrap_err();
    server.come_back();
    eventually("it is back", || {
        shard.turn(Duration::from_millis(5));
        !shard.backing.is_away()
    });
    assert_eq!((shard.read(1), shard.read(2)), (1, 2));
    shard.flush().unwrap();
    assert_eq!(shard.news(), ["server-away", "server-overdue", "server-back"]);
}

#[test]
fn a_silent_server_is_given_up_and_what_it_may_yet_do_bars_what_overlaps() {
    let server = Server::new();
    let mut shard = Shard::with(&server, Duration::from_millis(1500), GRACE);
    shard.write(1, 1);
    server.lock().writes = Writes::Hold;
    let silent = shard.begin_write(1, 2);
    shard.answer(silent).unwrap_err();
    assert!(shard.backing.owes(), "it may land");
    server.lock().writes = Writes::Answer;
    eventually("it is connected again", || {
        shard.turn(Duration::from_millis(5));
        !shard.backing.is_away()
    });
    let next = shard.begin_write(1, 3);
    shard.run(GRACE / 4);
    server.land();
    assert!(!shard.has(next));
    shard.answer(next).unwrap();
    eventually("nothing may land any more", || {
        shard.turn(Duration::from_millis(5));
        !shard.backing.owes()
    });
    shard.write(1, 4);
    assert_eq!(shard.read(1), 4);
}

/// Long before requests fail: its process may have been stopped, and its host's kernel answers for it.
#[test]
fn a_server_that_answers_nothing_is_reported_after_a_while() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    server.lock().writes = Writes::Late;
    let silent = shard.begin_write(1, 2);
    shard.await_news("server-silent");
    let trouble = shard.backing.trouble(shard.reactor.now()).unwrap();
    assert!(trouble.contains("answers nothing. Requests wait"), "{trouble}");
    server.answer();
    shard.answer(silent).unwrap();
    shard.await_news("server-back");
    assert_eq!(shard.backing.trouble(shard.reactor.now()), None);
}

#[test]
fn an_export_that_was_shrunk_meanwhile_is_reported() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    // The server has taken the connection.
    shard.write(1, 1);
    server.leave();
    let waits = shard.begin_write(1, 2);
    shard.await_news("server-away");
    server.lock().size = SIZE / 2;
    server.come_back();
    shard.await_news("server-unfit");
    shard.run(Duration::from_secs(2));
    assert!(shard.news().is_empty(), "reported once, not with every attempt");
    let trouble = shard.backing.trouble(shard.reactor.now()).unwrap();
    assert!(trouble.contains("shrunk or replaced"), "{trouble}");
    server.lock().size = SIZE;
    shard.answer(waits).unwrap();
    assert_eq!(shard.news(), ["server-back"]);
}

#[test]
fn a_disk_that_is_closed_leaves_nothing_unflushed_and_ends_its_connection() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    shard.write(1, 1);
    let before = server.lock().flushes;
    shard.backing.stop_waiting();
    eventually("it is flushed", || {
        shard.turn(Duration::from_millis(5));
        !shard.backing.owes()
    });
    assert_eq!(server.lock().flushes, before + 1);
    shard.backing.end(&mut shard.reactor);
    server.crash();
    assert_eq!(server.lock().read(1), vec![1; BLOCK]);
    let after = shard.begin_write(1, 2);
    shard.answer(after).unwrap_err();
    assert!(!shard.backing.owes());
}

/// P8: the next owner knows nothing of what the server may lose, and its flush is answered for nothing then.
#[test]
fn a_disk_that_is_handed_over_leaves_nothing_that_the_server_may_lose() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    assert!(shard.backing.settle());
    shard.write(1, 1);
    assert!(!shard.backing.settle());
    let began = Nanos::now();
    eventually("it is flushed", || {
        shard.turn(Duration::from_millis(5));
        shard.backing.settle()
    });
    assert!(Nanos::now() - began < Duration::from_secs(3), "at once");
    server.crash();
    assert_eq!(shard.read(1), 1);
    // What is under way then may be acknowledged after it.
    server.lock().writes = Writes::Late;
    let late = shard.begin_write(3, 3);
    shard.run(Duration::from_millis(100));
    assert!(!shard.backing.settle());
    server.lock().writes = Writes::Answer;
    server.land();
    server.answer();
    shard.answer(late).unwrap();
    assert!(!shard.backing.settle());
    eventually("it is flushed, too", || {
        shard.turn(Duration::from_millis(5));
        shard.backing.settle()
    });
    server.crash();
    assert_eq!(shard.read(3), 3);
    // A durable write over what is kept leaves nothing to be flushed, and nothing to wake up for.
    shard.write(2, 2);
    let (tag, bytes) = (shard.tag(), [3; BLOCK]);
    let (offset, payload) = (2 * BLOCK as u64, Payload::Lent(&bytes));
    shard.backing.submit(&mut shard.reactor, Request::Write { tag, offset, payload, fua: true });
    shard.answer(tag).unwrap();
    assert_eq!((shard.backing.deadline(), shard.backing.settle()), (Nanos::NEVER, true));
}

#[test]
fn an_export_that_has_shrunk_is_written_to_no_more_and_one_that_has_grown_shows_it() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    server.lock().size = 2 * SIZE;
    shard.backing.resize(2 * SIZE).unwrap();
    shard.write(SIZE / BLOCK as u64 + 1, 4);
    assert_eq!(shard.read(SIZE / BLOCK as u64 + 1), 4);
    server.lock().size = SIZE;
    server.break_connections();
    let waits = shard.begin_write(1, 1);
    eventually("the reason is given", || {
        shard.turn(Duration::from_millis(5));
        let trouble = shard.backing.trouble(shard.reactor.now());
        trouble.is_some_and(|trouble| trouble.contains("it was shrunk or replaced"))
    });
    assert!(!shard.has(waits));
    server.lock().size = 2 * SIZE;
    shard.answer(waits).unwrap();
}

/// Whatever it sends, the disk waits for a better one.
#[test]
fn a_hostile_server_is_left_and_tried_again() {
    let server = Server::new();
    let mut shard = Shard::new(&server);
    shard.write(1, 1);
    let hostile: [&[u8]; 4] = [
        // A greeting of something else; one that stops in the middle; replies to nothing; nothing.
        b"SSH-2.0-OpenSSH_9.2 and so on, and so forth",
        b"NBDMAGICIHAV",
        b"NBDMAGICIHAVEOPT\x00\x03\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x03\xff\xff\xff\xff",
        b"",
    ];
    let mut random = fastrand::Rng::with_seed(7);
    for greeting in hostile {
        server.leave();
        let other = server.socket.with_extension("other");
        std::fs::rename(&server.socket, &other).unwrap();
        let listener = UnixListener::bind(&server.socket).unwrap();
        let waits = shard.begin_write(1, 2);
        let mut junk = vec![0; 3000];
        random.fill(&mut junk);
        listener.set_nonblocking(true).unwrap();
        let until = Nanos::now() + Duration::from_millis(700);
        while Nanos::now() < until {
            if let Ok((mut stream, _)) = listener.accept() {
                let _ = stream.write_all(greeting);
                let _ = stream.write_all(if greeting.is_empty() { &junk } else { &[] });
            }
            shard.turn(Duration::from_millis(5));
        }
        assert!(!shard.has(waits));
        std::fs::rename(&other, &server.socket).unwrap();
        server.come_back();
        shard.answer(waits).unwrap();
        assert_eq!(shard.read(1), 2);
    }
}
