//! The accelerator around its core, over a backing that does what the test says: leases, flushes, memory, order, peers
//! that are silent or do not listen.
#![allow(clippy::unwrap_used)]

mod backing;
mod barrier;
mod flushes;
mod former;
mod hosts;

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weir_accel::owner::Held;
use weir_accel::wire::{self, Confirm, MessageKind, Refuse};
use weir_accel::{Accel, AccelConfig, AccelNotice, Configuration, Former, Inheritance, Record, checksum};
use weir_block::{
    Code, Completion, ExtentState, Layer, Metered, Nanos, Outcome, Payload, Reactor, ReactorConfig, Request,
    RequestKind, Tag,
};
use weir_net::frame;
use zerocopy::IntoBytes;

use backing::{Backing, Operation, Script};

const SIZE: usize = 1 << 20;
const LOG: u64 = 64 << 20;
const PEER_DEADLINE: Duration = Duration::from_millis(50);

struct Disk {
    reactor: Reactor,
    accel: Accel<Backing>,
    script: Rc<RefCell<Script>>,
    done: Vec<Completion>,
    notices: Vec<AccelNotice>,
}

fn configuration(epoch: u64, replicas: &[&str], write_back: bool, wanted: Option<usize>) -> Configuration {
    let replicas = replicas.iter().map(|name| (*name).to_owned()).collect();
    Configuration {
        epoch,
        replicas,
        write_back,
        wanted_replicas: wanted,
        strict: false,
        misplaced: Vec::new(),
        leaving: Vec::new(),
    }
}

fn write_through() -> Configuration {
    configuration(1, &[], false, None)
}

fn alone() -> Configuration {
    configuration(1, &[], true, Some(0))
}

impl Disk {
    fn new(configuration: Configuration) -> Disk {
        Disk::with_buffers(configuration, 16 << 20)
    }

    fn with_buffers(configuration: Configuration, buffer_limit: usize) -> Disk {
        Disk::with(configuration, buffer_limit, PEER_DEADLINE)
    }

    fn with(configuration: Configuration, buffer_limit: usize, peer_deadline: Duration) -> Disk {
        Disk::adapted(configuration, Former::Stopped, buffer_limit, |config| {
            config.peer_deadline = peer_deadline;
        })
    }

    fn with_wait(configuration: Configuration, full_log_wait: Duration) -> Disk {
        Disk::adapted(configuration, Former::Stopped, 16 << 20, |config| config.full_log_wait = full_log_wait)
    }

    fn adapted(
        configuration: Configuration,
        former: Former,
        buffer_limit: usize,
        adapt: impl FnOnce(&mut AccelConfig),
    ) -> Disk {
        let mut reactor = Reactor::new(ReactorConfig { buffer_limit, ..ReactorConfig::default() }).unwrap();
        let script = Rc::new(RefCell::new(Script { bytes: vec![0; SIZE], ..Script::default() }));
        let mut config = AccelConfig {
            destage_delay: Duration::from_millis(2),
            peer_deadline: PEER_DEADLINE,
            ..AccelConfig::standalone(LOG)
        };
        adapt(&mut config);
        let lower = Metered::new("backing", Backing(Rc::clone(&script)));
        let accel =
            Accel::new(&mut reactor, config, configuration, Inheritance::Nothing, former, lower, None)
                .unwrap();
        Disk { reactor, accel, script, done: Vec::new(), notices: Vec::new() }
    }

    fn turn(&mut self) {
        let mut events = Vec::new();
        self.reactor.wait(Nanos(0), &mut events).unwrap();
        for event in events {
            self.accel.on_event(&mut self.reactor, event);
        }
        self.advance();
    }

    fn advance(&mut self) {
        self.accel.advance(&mut self.reactor, &mut self.done);
        self.accel.take_notices(&mut self.notices);
        let forgotten = self.script.borrow().unseen && self.accel.deadline() > Nanos(0);
        assert!(!forgotten, "nobody advances the backing, which has something to begin with (P9)");
    }

    /// Turns as a shard takes them: only when something happened or is due. How many. There are some however late the test gets a processor.
    fn run(&mut self, time: Duration) -> usize {
        let end = Nanos::now() + time;
        let mut turns = 0;
        while Nanos::now() < end || turns < 5 {
            let mut events = Vec::new();
            self.reactor.wait(self.accel.deadline().min(end), &mut events).unwrap();
            for event in events {
                self.accel.on_event(&mut self.reactor, event);
            }
            self.advance();
            turns += 1;
        }
        turns
    }

    fn settle(&mut self) {
        for _ in 0..10 {
            self.turn();
        }
    }

    /// Turns until the backing has what is wanted.
    fn destages(&mut self, is_there: impl Fn(&[u8]) -> bool) {
        let deadline = Nanos::now() + Duration::from_secs(10);
        while !is_there(&self.script.borrow().bytes) {
            assert!(Nanos::now() < deadline, "it is not destaged");
            self.turn();
        }
    }

    fn write(&mut self, tag: u64, sector: u64, fill: u8) {
        let payload = [fill; 512];
        assert!(self.accel.has_room(RequestKind::Write, 512));
        let (tag, offset, payload) = (Tag(tag), sector * 512, Payload::Lent(&payload));
        self.accel.submit(&mut self.reactor, Request::Write { tag, offset, payload, fua: false });
    }

    fn read(&mut self, tag: u64, sector: u64, length: usize) {
        assert!(self.accel.has_room(RequestKind::Read, length as u64));
        let buffer = self.reactor.buffers().take(length).unwrap();
        self.accel.submit(&mut self.reactor, Request::Read { tag: Tag(tag), offset: sector * 512, buffer });
    }

    fn flush(&mut self, tag: u64) {
        self.accel.submit(&mut self.reactor, Request::Flush { tag: Tag(tag) });
    }

    fn set_lease(&self, until: u64) {
        self.accel.config().serves_until.store(until, Ordering::Release);
    }

    fn tags(&self) -> Vec<u64> {
        let mut tags: Vec<u64> = self.done.iter().map(|completion| completion.tag.0).collect();
        tags.sort_unstable();
        tags
    }
}

/// The other end of a connection, by hand.
struct Peer {
    stream: UnixStream,
    number: u64,
    /// The number of the next frame from there.
    heard: u64,
}

impl Peer {
    fn connect(disk: &mut Disk, node: &str) -> Peer {
        let (ours, theirs) = UnixStream::pair().unwrap();
        disk.accel.peer_connected(&mut disk.reactor, node.into(), theirs.into());
        Peer { stream: ours, number: 0, heard: 0 }
    }

    fn send(&mut self, kind: MessageKind, meta: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind as u16, self.number, meta, 0);
        self.number += 1;
        self.stream.write_all(&bytes).unwrap();
    }

    fn confirm(&mut self, epoch: u64, last: u64) {
        self.confirm_as(epoch, last, true);
    }

    fn confirm_as(&mut self, epoch: u64, last: u64, complete: bool) {
        self.confirm_held(Held { epoch, last, freed: 0, gap: 0, complete });
    }

    fn confirm_held(&mut self, held: Held) {
        self.send(MessageKind::Confirm, Confirm::new(held).as_bytes());
    }

    /// The numbers of the records that come within so many turns.
    fn numbers(&mut self, disk: &mut Disk, turns: usize) -> Vec<u64> {
        self.records(disk, turns).into_iter().map(|(number, _)| number).collect()
    }

    /// The records that come within so many turns: number, and whether they match their checksums.
    fn records(&mut self, disk: &mut Disk, turns: usize) -> Vec<(u64, bool)> {
        self.stream.set_nonblocking(true).unwrap();
        let (mut bytes, mut buffer) = (Vec::new(), vec![0; 1 << 20]);
        for _ in 0..turns {
            disk.turn();
            while let Ok(length @ 1..) = self.stream.read(&mut buffer) {
                bytes.extend_from_slice(&buffer[..length]);
            }
        }
        self.stream.set_nonblocking(false).unwrap();
        let (mut rest, mut records) = (&bytes[..], Vec::new());
        while let Some((frame, used)) = frame::decode(rest, self.heard).unwrap() {
            rest = &rest[used..];
            self.heard += 1;
            if frame.kind != MessageKind::Batch as u16 {
                continue;
            }
            let (head, headers) = wire::batch(frame.meta).unwrap();
            let mut data = frame.data;
            for (sequence, header) in (head.first.get()..).zip(headers) {
                let Record { offset, length, checksum: sum, kind, .. } = header.parse().unwrap();
                let (own, others) = data.split_at(length as usize);
                data = others;
                records.push((sequence, checksum(sequence, offset, length, kind, own) == sum));
            }
        }
        assert!(rest.is_empty(), "half a frame");
        records
    }
}

#[test]
fn waiting_for_the_lease_costs_no_turns_and_its_return_is_noticed() {
    let mut disk = Disk::new(alone());
    disk.settle();
    disk.write(1, 0, 7);
    disk.turn();
    assert_eq!(disk.tags(), [1], "and destage is due soon");
    disk.set_lease(1);
    disk.write(2, 0, 7);
    let turns = disk.run(Duration::from_millis(200));
    assert!(turns < 60, "{turns} turns in 200 ms without anything to do");
    assert_eq!((disk.tags(), disk.script.borrow().writes), (vec![1], 0));
    disk.set_lease(u64::MAX);
    disk.run(Duration::from_millis(100));
    assert_eq!((disk.tags(), disk.script.borrow().writes), (vec![1, 2], 1));
}

#[test]
fn nothing_goes_past_the_log_without_a_lease() {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.set_lease(1);
    // No turn in between: the process stood still since the last one.
    assert!(!disk.accel.has_room(RequestKind::Write, 512));
    assert!(!disk.accel.has_room(RequestKind::Discard, 512));
    disk.set_lease(u64::MAX);
    disk.write(1, 0, 7);
    disk.settle();
    assert_eq!((disk.tags(), disk.script.borrow().writes), (vec![1], 1));
}

#[test]
fn what_was_held_back_is_refused_once_the_disk_is_anothers() {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.write(1, 0, 7);
    disk.read(2, 8, 512);
    disk.script.borrow_mut().hold_writes = true;
    disk.write(3, 16, 7);
    disk.set_lease(1);
    disk.settle();
    assert!(disk.done.is_empty());
    disk.accel.release(&mut disk.reactor);
    disk.settle();
    disk.script.borrow_mut().hold_writes = false;
    disk.settle();
    assert_eq!(disk.tags(), [1, 2, 3]);
    let refused =
        |completion: &Completion| completion.result.as_ref().is_err_and(|error| error.code == Code::NotOwner);
    assert!(disk.done.iter().all(refused), "{:?}", disk.done);
    assert_eq!(disk.accel.in_flight(), 0);
}

#[test]
fn a_write_past_the_log_does_not_overtake_an_older_one_of_its_range() {
    let mut disk = one_behind_another();
    disk.script.borrow_mut().hold_writes = false;
    disk.run(Duration::from_millis(50));
    assert_eq!(disk.tags(), [1, 2]);
    disk.write(3, 9, 3);
    disk.run(Duration::from_millis(50));
    let script = disk.script.borrow();
    assert_eq!((script.bytes[4 * 512], script.bytes[9 * 512]), (2, 3));
    assert_eq!((script.writes, disk.accel.is_clean()), (3, true), "none went through the log");
}

#[test]
fn a_write_that_waits_goes_through_the_log_when_writes_do_so_by_then() {
    let mut disk = one_behind_another();
    disk.accel.configured(Configuration { epoch: 2, ..alone() });
    disk.settle();
    assert_eq!(disk.tags(), [2], "answered from the log");
    disk.script.borrow_mut().hold_writes = false;
    disk.run(Duration::from_millis(50));
    assert_eq!((disk.tags(), disk.script.borrow().bytes[4 * 512]), (vec![1, 2], 2));
}

#[test]
fn a_write_that_waits_is_refused_once_the_disk_is_anothers() {
    let mut disk = one_behind_another();
    disk.accel.release(&mut disk.reactor);
    disk.settle();
    assert_eq!(disk.tags(), [2]);
    assert!(disk.done[0].result.as_ref().is_err_and(|error| error.code == Code::NotOwner), "{:?}", disk.done);
    disk.script.borrow_mut().hold_writes = false;
    disk.settle();
    assert_eq!((disk.accel.in_flight(), disk.script.borrow().bytes[4 * 512]), (0, 1));
}

/// Write 1 is on its way past the log; write 2 of the same range waits for it.
fn one_behind_another() -> Disk {
    let mut disk = Disk::new(write_through());
    disk.settle();
    disk.script.borrow_mut().hold_writes = true;
    disk.write(1, 4, 1);
    disk.write(2, 4, 2);
    assert!(!disk.accel.has_room(RequestKind::Write, 512), "others wait behind it");
    assert!(disk.accel.has_room(RequestKind::Read, 512));
    disk.settle();
    assert_eq!(disk.script.borrow().waiting.len(), 1, "the second waits for the first");
    assert!(!disk.accel.is_drained() && disk.done.is_empty());
    disk
}

/// The number of operations of one kind that the backing has taken and not completed.
fn under_way(disk: &Disk, is_kind: impl Fn(&Operation) -> bool) -> usize {
    disk.script.borrow().waiting.iter().filter(|operation| is_kind(operation)).count()
}

#[test]
fn reads_wait_for_memory_and_do_not_fail() {
    let mut disk = Disk::with_buffers(alone(), 96 << 20);
    disk.settle();
    disk.script.borrow_mut().hold_writes = true;
    disk.script.borrow_mut().hold_reads = true;
    disk.write(1, 1, 7);
    disk.settle();
    // Three reads take all the buffers that the shard has, and each needs a second one.
    let length = 32 << 20;
    disk.script.borrow_mut().bytes = vec![0; length];
    let buffers: Vec<_> = (0..3).map(|_| disk.reactor.buffers().take(length).unwrap()).collect();
    for (tag, buffer) in (2..).map(Tag).zip(buffers) {
        disk.accel.submit(&mut disk.reactor, Request::Read { tag, offset: 0, buffer });
    }
    // The write of a checkpoint that began meanwhile may wait, too.
    assert_eq!(under_way(&disk, |it| matches!(it, Operation::Read(..))), 1, "one has got the reserve");
    assert!(!disk.accel.has_room(RequestKind::Read, 512));
    disk.settle();
    disk.script.borrow_mut().hold_reads = false;
    disk.run(Duration::from_millis(500));
    assert_eq!(disk.tags(), [1, 2, 3, 4]);
    for completion in disk.done.iter().filter(|completion| completion.tag.0 > 1) {
        let Ok(Outcome::Read(buffer)) = &completion.result else { panic!("{completion:?}") };
        assert_eq!((buffer.bytes()[0], buffer.bytes()[512], buffer.bytes()[1024]), (0, 7, 0));
    }
}

#[test]
fn a_read_does_not_show_what_a_set_that_was_asked_for_lacks() {
    let mut disk = Disk::new(configuration(1, &[], false, Some(1)));
    disk.settle();
    let mut peer = Peer::connect(&mut disk, "b");
    disk.settle();
    peer.confirm(1, 0);
    disk.settle();
    let asked = |notice: &AccelNotice| matches!(notice, AccelNotice::WantConfiguration { .. });
    assert!(disk.notices.iter().any(asked), "b may be in the set by now: {:?}", disk.notices);
    disk.script.borrow_mut().hold_reads = true;
    disk.read(1, 0, 1024);
    disk.settle();
    disk.write(2, 0, 9);
    disk.run(Duration::from_millis(20));
    assert_eq!(disk.script.borrow().bytes[0], 0, "b lacks the write, so it is not destaged");
    disk.script.borrow_mut().hold_reads = false;
    disk.read(3, 0, 512);
    disk.run(Duration::from_millis(10));
    assert_eq!(disk.tags(), [1], "the first read came before the write; the second has seen it and waits");
    peer.confirm(1, 1);
    disk.run(Duration::from_millis(20));
    assert_eq!(disk.script.borrow().bytes[0], 9, "destaged");
    assert_eq!(disk.tags(), [1, 2, 3]);
}

#[test]
fn a_peer_that_never_answers_hello_is_given_up() {
    let mut disk = Disk::new(configuration(1, &["b"], true, Some(1)));
    disk.settle();
    assert!(disk.notices.iter().any(|notice| matches!(notice, AccelNotice::WantPeer { .. })));
    let _silent = Peer::connect(&mut disk, "b");
    let turns = disk.run(PEER_DEADLINE * 3);
    let fell = |notice: &AccelNotice| matches!(notice, AccelNotice::Tell("policy-falling", _));
    assert!(disk.notices.iter().any(fell), "{:?}", disk.notices);
    assert!(turns < 50, "{turns} turns");
}

#[test]
fn an_impossible_confirmation_ends_the_connection_and_acknowledges_nothing() {
    for last in [2, u64::MAX] {
        let mut disk = Disk::new(configuration(1, &["b"], true, Some(1)));
        disk.settle();
        let mut peer = Peer::connect(&mut disk, "b");
        disk.settle();
        peer.confirm(1, 0);
        disk.settle();
        disk.write(1, 0, 7);
        disk.settle();
        peer.confirm(1, last);
        disk.settle();
        assert!(disk.done.is_empty());
        disk.notices.retain(|notice| matches!(notice, AccelNotice::Tell("replica-lost", _)));
        assert_eq!(disk.notices.len(), 1);
    }
}

#[test]
fn a_fenced_owner_answers_nothing_and_does_not_spin() {
    let mut disk = Disk::new(configuration(1, &["b"], true, Some(1)));
    disk.settle();
    let mut peer = Peer::connect(&mut disk, "b");
    disk.settle();
    peer.confirm(1, 0);
    disk.settle();
    disk.write(1, 0, 7);
    disk.settle();
    peer.send(MessageKind::Refuse, Refuse { epoch: 2.into() }.as_bytes());
    disk.settle();
    assert!(disk.notices.contains(&AccelNotice::Fenced(2)));
    let turns = disk.run(Duration::from_millis(100));
    assert!(turns < 10, "{turns} turns");
    assert!(disk.done.is_empty());
    disk.accel.release(&mut disk.reactor);
    disk.settle();
    assert_eq!(disk.tags(), [1]);
}

#[test]
fn a_backing_that_refuses_is_tried_again_without_spinning() {
    let mut disk = Disk::new(alone());
    disk.settle();
    disk.script.borrow_mut().fails = true;
    disk.write(1, 0, 7);
    let turns = disk.run(Duration::from_millis(200));
    assert!(turns < 20, "{turns} turns");
    assert_eq!(disk.tags(), [1], "the log has it");
    disk.script.borrow_mut().fails = false;
    disk.run(Duration::from_millis(1_000));
    let marks = disk.accel.status().marks;
    assert_eq!(marks.destaged, marks.appended);
}

/// The backing looks, the record is destaged and freed, the backing answers: the log holds nothing of it any more, and the backing
/// did not yet.
#[test]
fn data_that_leaves_the_log_while_the_backing_is_asked_for_extents_is_no_hole() {
    let mut disk = Disk::new(alone());
    disk.settle();
    disk.write(1, 4, 7);
    disk.script.borrow_mut().hold_extents = true;
    let request = Request::Extents { tag: Tag(2), offset: 0, length: 8 * 512 };
    disk.accel.submit(&mut disk.reactor, request);
    disk.settle();
    disk.run(Duration::from_millis(50));
    assert!(disk.accel.is_clean(), "destaged and freed: {:?}", disk.accel.status().marks);
    assert_eq!(disk.tags(), [1]);
    disk.script.borrow_mut().hold_extents = false;
    disk.settle();
    let Some(Completion { result: Ok(Outcome::Extents(extents)), .. }) = disk.done.pop() else {
        panic!("{:?}", disk.done);
    };
    let states: Vec<_> = extents.iter().map(|extent| (extent.offset, extent.length, extent.state)).collect();
    let (hole, data) = (ExtentState::Hole, ExtentState::Allocated);
    assert_eq!(states, [(0, 2048, hole), (2048, 512, data), (2560, 1536, hole)]);
}

/// The backing accepts no writes and the log is full: writes wait for as long as configured and get an error then (P9).
/// Acknowledged data stays, reads go on, and so do writes when the backing is back.
#[test]
fn a_full_log_before_a_dead_backing_makes_writes_wait_for_a_bounded_time() {
    const WAIT: Duration = Duration::from_millis(300);
    const LARGE: usize = 1 << 20;
    let mut disk = Disk::with_wait(alone(), WAIT);
    disk.settle();
    disk.script.borrow_mut().fails = true;
    let (mut written, began) = (0, Nanos::now());
    let payload = vec![9; LARGE];
    // Admission is paced as the log fills; from some point on there is no room, whatever the pace.
    while disk.accel.status().log_bytes - disk.accel.status().log_used > LARGE as u64 {
        if disk.accel.has_room(RequestKind::Write, LARGE as u64) {
            let request =
                Request::Write { tag: Tag(0), offset: 0, payload: Payload::Lent(&payload), fua: false };
            disk.accel.submit(&mut disk.reactor, request);
            written += 1;
        }
        disk.turn();
        assert!(Nanos::now() - began < Duration::from_secs(60), "{written} MiB are in the log");
    }
    disk.settle();
    assert!(disk.done.drain(..).all(|completion| completion.result.is_ok()), "{written} MiB acknowledged");
    let waits = Nanos::now();
    while !disk.accel.has_room(RequestKind::Write, LARGE as u64) {
        assert!(Nanos::now() - waits < WAIT * 4, "it waits on");
        disk.run(Duration::from_millis(10));
    }
    assert!(Nanos::now() - waits >= WAIT, "{:?}", Nanos::now() - waits);
    let request = Request::Write { tag: Tag(1), offset: 0, payload: Payload::Lent(&[1; LARGE]), fua: false };
    disk.accel.submit(&mut disk.reactor, request);
    disk.read(2, 0, 512);
    disk.settle();
    assert_eq!(disk.tags(), [1, 2]);
    for Completion { tag, result } in disk.done.drain(..) {
        match (tag.0, result) {
            (1, Err(error)) => assert_eq!(error.code, Code::Io, "{error}"),
            (2, Ok(Outcome::Read(buffer))) => assert!(buffer.bytes().iter().all(|byte| *byte == 9)),
            other => panic!("{other:?}"),
        }
    }
    let told = |disk: &Disk, what| {
        disk.notices.iter().any(|notice| matches!(notice, AccelNotice::Tell(kind, _) if *kind == what))
    };
    assert!(told(&disk, "log-jammed") && disk.accel.status().reason.contains("as the test says"));
    disk.script.borrow_mut().fails = false;
    disk.run(Duration::from_millis(2_500));
    assert!(told(&disk, "log-has-room") && disk.accel.is_clean());
    assert!(
        disk.script.borrow().bytes.iter().all(|byte| *byte == 9),
        "all that was acknowledged, and no more"
    );
    disk.write(3, 0, 4);
    disk.settle();
    assert_eq!(disk.tags(), [3]);
}

/// New records go to a copy that is being filled at once; the backlog comes beside them in parts, the newest first, each after the
/// one before is confirmed and with a rest, so that live writes get most of the time.
#[test]
fn the_backlog_comes_in_parts_and_new_records_at_once() {
    const RECORD: usize = 64 << 10;
    const PART: u64 = 4;
    let mut disk = Disk::with(alone(), 16 << 20, Duration::from_millis(400));
    disk.script.borrow_mut().hold_writes = true;
    let write = |disk: &mut Disk, records: usize| {
        for _ in 0..records {
            let (tag, payload) = (Tag(0), Payload::Lent(&[7; RECORD]));
            disk.accel.submit(&mut disk.reactor, Request::Write { tag, offset: 0, payload, fua: false });
        }
    };
    write(&mut disk, 64);
    disk.settle();
    disk.accel.request_policy(Some(1));
    disk.settle();
    let mut peer = Peer::connect(&mut disk, "b");
    disk.settle();
    let filling = |gap| Held { epoch: 1, last: 64, freed: 0, gap, complete: false };
    peer.confirm_held(Held { last: 0, ..filling(0) });
    let mut expected = 64;
    for part in 1..=3 {
        let heard = peer.numbers(&mut disk, 200);
        let of_part: Vec<u64> = (expected - PART + 1..=expected).collect();
        assert_eq!(heard, of_part, "part {part}");
        expected -= PART;
        assert_eq!(peer.numbers(&mut disk, 200), [], "part {part} is not confirmed");
        peer.confirm_held(filling(expected));
        // It rests, as long as there is time.
        disk.run(Duration::from_millis(60));
    }
    assert_eq!(peer.numbers(&mut disk, 200), (expected - PART + 1..=expected).collect::<Vec<u64>>());
    // A part is in flight; the guest's writes do not wait for it.
    write(&mut disk, 16);
    assert_eq!(peer.numbers(&mut disk, 200), (65..=80).collect::<Vec<u64>>());
}

/// A peer that does not count is slow; the owner frees its queued records and overwrites their place in the arena (P11).
#[test]
fn what_is_freed_while_it_is_queued_for_a_peer_arrives_as_it_was() {
    const RECORD: usize = 64 << 10;
    let mut disk = Disk::with(alone(), 16 << 20, Duration::from_secs(20));
    disk.script.borrow_mut().hold_writes = true;
    let write = |disk: &mut Disk, fill: u8| {
        let (tag, payload) = (Tag(0), Payload::Lent(&[fill; RECORD]));
        disk.accel.submit(&mut disk.reactor, Request::Write { tag, offset: 0, payload, fua: false });
    };
    (0..16).for_each(|_| write(&mut disk, 7));
    disk.settle();
    disk.accel.request_policy(Some(1));
    disk.settle();
    let mut peer = Peer::connect(&mut disk, "b");
    disk.settle();
    peer.confirm_as(1, 0, false);
    disk.settle();
    disk.script.borrow_mut().hold_writes = false;
    // More than the arena holds, as it is freed.
    for _ in 0..(LOG as usize / RECORD + 64) {
        while !disk.accel.has_room(RequestKind::Write, RECORD as u64) {
            disk.run(Duration::from_millis(1));
        }
        write(&mut disk, 9);
        disk.turn();
    }
    let heard = peer.records(&mut disk, 400);
    assert!(heard.len() > 4, "only {heard:?}");
    let spoiled: Vec<u64> = heard.iter().filter(|(_, intact)| !intact).map(|(number, _)| *number).collect();
    assert_eq!(spoiled, [], "of {} records", heard.len());
}

/// Writes that overlap one that is on its way past the log go through the log: they need room there (P10).
#[test]
fn overlapping_writes_in_write_through_go_through_the_log_without_memory_and_wait_when_it_is_full() {
    let mut disk = Disk::with_buffers(write_through(), 64 << 10);
    disk.settle();
    disk.script.borrow_mut().hold_writes = true;
    let payload = vec![7; SIZE];
    let mut submitted = 0;
    while disk.accel.has_room(RequestKind::Write, SIZE as u64) {
        let (tag, payload) = (Tag(submitted), Payload::Lent(&payload));
        disk.accel.submit(&mut disk.reactor, Request::Write { tag, offset: 0, payload, fua: false });
        submitted += 1;
        assert!(submitted < 2 * LOG / SIZE as u64, "no end of room");
    }
    assert!(submitted > 10, "{submitted}");
    disk.script.borrow_mut().hold_writes = false;
    disk.run(Duration::from_millis(300));
    assert_eq!(disk.tags(), (0..submitted).collect::<Vec<_>>());
    assert!(disk.accel.has_room(RequestKind::Write, SIZE as u64));
}
