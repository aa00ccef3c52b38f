//! Faults of the flash device under an owner and under a replica: writes that fail, writes that do not come back.
#![allow(clippy::unwrap_used)]

#[path = "../shell/backing.rs"]
mod backing;
mod device;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use weir_accel::flash::frame::State;
use weir_accel::flash::{FlashError, FlashStore};
use weir_accel::wire::{Batch, Hello, MessageKind, RecordHeader};
use weir_accel::{
    Accel, AccelConfig, AccelNotice, Configuration, Former, Inheritance, Layout, Log, RecordKind, ReplicaHost,
};
use weir_block::{
    Completion, Event, Layer, Metered, Nanos, OwnerId, Payload, Reactor, ReactorConfig, Request, RequestKind,
    Tag,
};
use weir_net::frame;
use zerocopy::{FromZeros, IntoBytes};

use backing::{Backing, Script};
use device::Memory;

const SIZE: usize = 8 << 20;
const LOG: u64 = AccelConfig::SMALLEST_LOG;

/// A shard that looks again and again takes thousands of turns in that time.
const WATCHED: Duration = Duration::from_millis(500);
const MOST_TURNS: usize = 100;

/// Time limit of a write here.
const PATIENCE: Duration = Duration::from_millis(200);

fn configuration(epoch: u64, write_back: bool, wanted_replicas: Option<usize>) -> Configuration {
    Configuration {
        epoch,
        replicas: Vec::new(),
        write_back,
        wanted_replicas,
        strict: false,
        misplaced: Vec::new(),
        leaving: Vec::new(),
    }
}

/// A disk with its log on flash, `write-back+0`, and a registry that says yes to everything.
struct Disk {
    reactor: Reactor,
    accel: Accel<Backing>,
    script: Rc<RefCell<Script>>,
    done: Vec<Completion>,
    told: Vec<&'static str>,
    /// The flash does not answer; `late` keeps its completions.
    hangs: bool,
    late: Vec<Event>,
}

impl Disk {
    fn new(memory: &Memory) -> Disk {
        let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let script = Rc::new(RefCell::new(Script { bytes: vec![0; SIZE], ..Script::default() }));
        let config = AccelConfig { destage_delay: Duration::from_millis(2), ..AccelConfig::standalone(LOG) };
        let lower = Metered::new("backing", Backing(Rc::clone(&script)));
        let id = reactor.new_owner();
        let store = FlashStore::new(id, memory.device.take("disk", 1).unwrap()).unwrap();
        let (store, configuration) = (store.with_patience(PATIENCE), configuration(1, true, Some(0)));
        let accel = Accel::new(
            &mut reactor,
            config,
            configuration,
            Inheritance::Nothing,
            Former::Stopped,
            lower,
            Some(store),
        )
        .unwrap();
        Disk::with(reactor, accel, script)
    }

    fn with(reactor: Reactor, accel: Accel<Backing>, script: Rc<RefCell<Script>>) -> Disk {
        let (done, told, late) = (Vec::new(), Vec::new(), Vec::new());
        Disk { reactor, accel, script, done, told, hangs: false, late }
    }

    /// Turns as a shard takes them: only when something happened or is due. How many.
    fn run(&mut self, time: Duration) -> usize {
        let end = Nanos::now() + time;
        let mut turns = 0;
        while Nanos::now() < end {
            let mut events = Vec::new();
            self.reactor.wait(self.accel.deadline().min(end), &mut events).unwrap();
            for event in events {
                if self.hangs && Some(event.token.owner) == self.accel.store_id() {
                    self.late.push(event);
                } else {
                    self.accel.on_event(&mut self.reactor, event);
                }
            }
            self.accel.advance(&mut self.reactor, &mut self.done);
            self.listen();
            turns += 1;
        }
        turns
    }

    fn listen(&mut self) {
        let mut notices = Vec::new();
        self.accel.take_notices(&mut notices);
        for notice in notices {
            match notice {
                AccelNotice::WantConfiguration { epoch, write_back, .. } => {
                    self.accel.configured(configuration(epoch + 1, write_back, Some(0)));
                }
                AccelNotice::Tell(kind, _) => self.told.push(kind),
                other => panic!("not asked for here: {other:?}"),
            }
        }
    }

    fn run_until(&mut self, what: &str, is_so: impl Fn(&Disk) -> bool) {
        let end = Nanos::now() + Duration::from_secs(5);
        while !is_so(self) {
            assert!(Nanos::now() < end, "{what}: {:?}", self.accel.status());
            self.run(Duration::from_millis(5));
        }
    }

    /// Writes of 1 MiB, as many as there is room for, at most `count`.
    fn write(&mut self, count: usize) -> usize {
        let payload = vec![7; 1 << 20];
        for written in 0..count {
            if !self.accel.has_room(RequestKind::Write, payload.len() as u64) {
                return written;
            }
            let (tag, payload) = (Tag(0), Payload::Lent(&payload));
            self.accel.submit(&mut self.reactor, Request::Write { tag, offset: 0, payload, fua: false });
        }
        count
    }

    /// Of five writes, four have come when the flash was no good any more, and the backing has none of them yet.
    fn goes_on_without_flash(&mut self) {
        self.run(2 * PATIENCE);
        let turns = self.run(WATCHED);
        assert!(turns < MOST_TURNS, "{turns} turns in {WATCHED:?}");
        assert!(self.told.contains(&"flash-failed"), "{:?}", self.told);
        self.script.borrow_mut().hold_writes = false;
        let effective = |disk: &Disk| disk.accel.status().configuration.effective();
        self.run_until("write-through", |disk| effective(disk) == "write-through");
        self.run_until("the arena is empty", |disk| disk.accel.status().log_used == 0);
        assert_eq!(self.done.len(), 5);
        self.write(2);
        self.run_until("write-through goes on", |disk| disk.done.len() == 7);
    }
}

#[test]
fn a_failing_write_costs_the_owner_its_write_back_and_neither_the_processor_nor_the_arena() {
    let memory = Memory::new(1, LOG);
    let mut disk = Disk::new(&memory);
    disk.write(1);
    disk.run_until("acknowledged from flash", |disk| disk.done.len() == 1);
    memory.fail_writes();
    disk.script.borrow_mut().hold_writes = true;
    disk.write(4);
    disk.goes_on_without_flash();
}

/// The kernel may read the arena for as long as the write hangs. The data that it then puts on flash does not match its
/// checksum.
#[test]
fn a_write_that_never_comes_back_counts_as_failed() {
    let memory = Memory::new(1, LOG);
    let mut disk = Disk::new(&memory);
    disk.write(1);
    disk.run_until("acknowledged from flash", |disk| disk.done.len() == 1);
    disk.hangs = true;
    disk.script.borrow_mut().hold_writes = true;
    disk.write(4);
    disk.goes_on_without_flash();
    // It completes when it has no waiter any more.
    disk.hangs = false;
    for event in std::mem::take(&mut disk.late) {
        disk.accel.on_event(&mut disk.reactor, event);
    }
    let turns = disk.run(WATCHED);
    assert!(turns < MOST_TURNS, "{turns} turns in {WATCHED:?}");
}

/// A replica on flash and its owner's end of the connection.
struct Replica {
    reactor: Reactor,
    host: ReplicaHost,
    id: OwnerId,
    source: Log,
    stream: std::os::unix::net::UnixStream,
    number: u64,
    /// The flash does not answer.
    hangs: bool,
}

impl Replica {
    fn new(memory: &Memory) -> Replica {
        let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let (id, store) = (reactor.new_owner(), reactor.new_owner());
        let store = FlashStore::new(store, memory.device.take("disk", 1).unwrap()).unwrap();
        let host = ReplicaHost::new(id, LOG, Some(store.with_patience(PATIENCE)), 0).unwrap();
        let (stream, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let source = Log::new(LOG, 1).unwrap();
        let mut replica = Replica { reactor, host, id, source, stream, number: 0, hangs: false };
        replica.host.attach(&mut replica.reactor, "a".into(), 1, theirs.into()).unwrap();
        let mut hello = Hello::new_zeroed();
        (hello.epoch, hello.lineage) = (1.into(), 1.into());
        replica.send(MessageKind::Hello, hello.as_bytes(), &[]);
        replica
    }

    fn send(&mut self, kind: MessageKind, meta: &[u8], data: &[u8]) {
        use std::io::Write;
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind as u16, self.number, meta, data.len());
        bytes.extend_from_slice(data);
        self.number += 1;
        self.stream.write_all(&bytes).unwrap();
    }

    fn append(&mut self) {
        let data = [7; 64 << 10];
        let number = self.source.append(RecordKind::Write, 0, data.len() as u32, &data).unwrap();
        let mut head = Batch::new_zeroed();
        (head.epoch, head.first, head.count, head.complete) = (1.into(), number.into(), 1.into(), 1.into());
        let header = RecordHeader::of(self.source.get(number).unwrap());
        let meta = [head.as_bytes(), header.as_bytes()].concat();
        self.send(MessageKind::Batch, &meta, &data);
    }

    /// Turns as a shard takes them. How many.
    fn run(&mut self, time: Duration) -> usize {
        let end = Nanos::now() + time;
        let (mut turns, mut more) = (0, false);
        while Nanos::now() < end {
            let mut events = Vec::new();
            let deadline = if more { Nanos(0) } else { self.host.deadline().min(end) };
            self.reactor.wait(deadline, &mut events).unwrap();
            if events.is_empty() && deadline == end {
                // The end of the test is no reason for a turn.
                return turns;
            }
            let (hangs, store) = (self.hangs, self.host.store_owner());
            events.retain(|event| !hangs || Some(event.token.owner) != store);
            events.into_iter().for_each(|event| self.host.on_event(&self.reactor, event));
            more = self.host.advance(&mut self.reactor);
            turns += 1;
        }
        turns
    }
}

/// A new owner can still take over from the memory of a replica with failed flash, and has the whole arena.
#[test]
fn a_failing_write_ends_the_replica_and_its_heir_has_the_whole_arena() {
    let memory = Memory::new(1, LOG);
    let mut replica = Replica::new(&memory);
    replica.append();
    replica.run(Duration::from_millis(50));
    assert!(replica.host.has_owner());
    memory.fail_writes();
    replica.append();
    let turns = replica.run(WATCHED);
    assert!(turns < MOST_TURNS, "{turns} turns in {WATCHED:?}");
    assert!(replica.host.store_error().is_some() && !replica.host.has_owner());
    let Replica { mut reactor, mut host, id, .. } = replica;
    host.seal(2);
    let (inheritance, store) = host.inherit(&mut reactor);
    assert_ne!(Some(id), store.as_ref().map(FlashStore::owner));
    let script = Rc::new(RefCell::new(Script { bytes: vec![0; SIZE], ..Script::default() }));
    let lower = Metered::new("backing", Backing(Rc::clone(&script)));
    let config = AccelConfig::standalone(LOG);
    let accel = Accel::new(
        &mut reactor,
        config,
        configuration(2, true, Some(0)),
        inheritance,
        Former::Stopped,
        lower,
        store,
    );
    let mut disk = Disk::with(reactor, accel.unwrap(), script);
    let turns = disk.run(WATCHED);
    assert!(turns < MOST_TURNS, "{turns} turns in {WATCHED:?}");
    disk.run_until("the arena is empty", |disk| disk.accel.status().log_used == 0);
    assert_eq!(disk.script.borrow().bytes[0], 7, "destaged");
}

/// The disk was handed over when the flash had failed, and comes back to the copy in memory: the failed flash delays nothing.
#[test]
fn flash_that_failed_in_an_earlier_tenure_is_not_waited_for() {
    let memory = Memory::new(1, LOG);
    let mut disk = Disk::new(&memory);
    memory.fail_writes();
    disk.script.borrow_mut().hold_writes = true;
    disk.write(1);
    disk.run_until("it is known to have failed", |disk| disk.told.contains(&"flash-failed"));
    let Disk { mut reactor, mut accel, .. } = disk;
    let (copy, store) = accel.release(&mut reactor).unwrap();
    let (log, lineage) = copy.into_log();
    let script = Rc::new(RefCell::new(Script { bytes: vec![0; SIZE], ..Script::default() }));
    let accel = Accel::new(
        &mut reactor,
        AccelConfig::standalone(LOG),
        configuration(2, true, Some(0)),
        Inheritance::Replica { log, lineage },
        Former::Stopped,
        Metered::new("backing", Backing(Rc::clone(&script))),
        store,
    );
    let mut disk = Disk::with(reactor, accel.unwrap(), script);
    disk.write(1);
    disk.run_until("the write is answered", |disk| disk.done.len() == 1);
    assert_eq!(disk.accel.status().configuration.effective(), "write-through");
}

/// Nothing else happens on that shard that would have it look again.
#[test]
fn a_write_that_never_comes_back_ends_the_replica() {
    let memory = Memory::new(1, LOG);
    let mut replica = Replica::new(&memory);
    replica.append();
    replica.run(Duration::from_millis(50));
    replica.hangs = true;
    replica.append();
    let turns = replica.run(WATCHED);
    assert!(turns < MOST_TURNS, "{turns} turns in {WATCHED:?}");
    assert!(replica.host.store_error().is_some() && !replica.host.has_owner());
    assert_eq!(replica.host.deadline(), Nanos::NEVER);
}

/// Everything that comes of what the kernel has been given.
fn settle(reactor: &mut Reactor, store: &mut FlashStore) {
    let mut events = Vec::new();
    while events.is_empty() {
        reactor.wait(Nanos::NEVER, &mut events).unwrap();
    }
    let now = reactor.now();
    events.into_iter().for_each(|event| store.on_event(event, now));
}

/// Writes of the shard's ring take and release a slot. No step waits for them, and each follows the one before: the entry,
/// the first frame, the entry's end, the next disk.
#[test]
fn a_slot_changes_hands_through_the_ring() {
    let memory = Memory::new(1, LOG);
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let id = reactor.new_owner();
    let empty = memory.bytes();
    let mut store = FlashStore::new(id, memory.device.take("disk", 1).unwrap()).unwrap();
    let mut log = Log::with_layout(Layout::Flash, LOG, 1).unwrap();
    log.append(RecordKind::Write, 0, 512, &[7; 512]).unwrap();
    let state = State { epoch: 1, complete: true, ..State::default() };
    for _ in 0..3 {
        store.advance(&mut reactor, &mut log, state);
    }
    assert!(memory.bytes() == empty, "the ring has it, and has not been entered");
    assert!(memory.device.disks().is_empty());
    settle(&mut reactor, &mut store);
    assert_eq!(memory.device.disks(), [("disk".to_owned(), 1)]);
    let rings = 1 << 20;
    assert!(memory.bytes()[rings..] == empty[rings..], "no frame before the slot is this disk's");
    store.advance(&mut reactor, &mut log, state);
    settle(&mut reactor, &mut store);
    assert_eq!(store.stored().last, 1);
    let entered = memory.bytes();
    let mut store = store.retire(&mut reactor).expect("that is not durable yet");
    assert!(memory.bytes() == entered);
    let full = memory.device.take("other", 2).unwrap_err();
    assert!(matches!(full, FlashError::Full { .. }), "{full}");
    settle(&mut reactor, &mut store);
    assert!(store.retire(&mut reactor).is_none());
    assert!(memory.device.disks().is_empty());
    memory.device.take("other", 2).unwrap();
}

/// A disk is closed and opened again, or comes back to a node that has an old copy: its slot begins anew, whatever is in
/// flight there, and nothing of the old log is taken for a part of the new one.
#[test]
fn a_new_log_of_a_disk_begins_in_the_slot_of_its_old_one() {
    let begin = |first: u64| {
        let mut log = Log::with_layout(Layout::Flash, LOG, first).unwrap();
        log.append(RecordKind::Write, 0, 512, &[7; 512]).unwrap();
        (log, State { epoch: 1, freed: first - 1, complete: true, ..State::default() })
    };
    // In flight when the new log begins: the entry, nothing, a frame, the entry's end.
    for steps in 0..4 {
        let memory = Memory::new(1, LOG);
        let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let id = reactor.new_owner();
        let mut store = FlashStore::new(id, memory.device.take("disk", 1).unwrap()).unwrap();
        let (mut old, state) = begin(1);
        store.advance(&mut reactor, &mut old, state);
        if steps > 0 {
            settle(&mut reactor, &mut store);
        }
        if steps > 1 {
            store.advance(&mut reactor, &mut old, state);
        }
        if steps > 2 {
            settle(&mut reactor, &mut store);
            store = store.retire(&mut reactor).expect("that is not durable yet");
        }
        store.begin_anew(2);
        let (mut new, state) = begin(100);
        let end = Nanos::now() + Duration::from_secs(5);
        while store.stored().last != 100 {
            assert!(Nanos::now() < end, "{steps}: {:?}, {:?}", store.error(), store.stored());
            store.advance(&mut reactor, &mut new, state);
            let mut events = Vec::new();
            reactor.wait(Nanos::now() + Duration::from_millis(10), &mut events).unwrap();
            let now = reactor.now();
            events.into_iter().for_each(|event| store.on_event(event, now));
        }
        assert_eq!(memory.device.disks(), [("disk".to_owned(), 2)], "{steps}");
        drop(store);
        let lease = memory.device.find("disk").unwrap();
        let (_, found) = FlashStore::recover(id, lease, LOG).unwrap();
        let (found, _) = found.unwrap();
        assert_eq!((found.last(), found.range(0, 100).count()), (100, 1), "{steps}");
    }
}

/// A new log reuses the slot of a log with a hanging write. The owner of the new log gets the error of the flash.
#[test]
fn a_new_log_in_the_slot_of_a_failed_one_has_failed_too() {
    let memory = Memory::new(1, LOG);
    let id = OwnerId(1);
    let mut store = FlashStore::new(id, memory.device.take("disk", 1).unwrap()).unwrap();
    store.fail("a write has not come back".into());
    assert!(store.take_progress(), "told once");
    store.begin_anew(2);
    assert!(store.take_progress() && store.error().is_some(), "told again, to whoever uses it now");
}

/// Opening a disk on a node whose flash takes no writes: it is served, in write-through.
#[test]
fn a_disk_whose_slot_cannot_be_entered_is_write_through() {
    let memory = Memory::new(1, LOG);
    memory.fail_writes();
    let mut disk = Disk::new(&memory);
    let turns = disk.run(WATCHED);
    assert!(turns < MOST_TURNS, "{turns} turns in {WATCHED:?}");
    assert!(disk.told.contains(&"flash-failed"), "{:?}", disk.told);
    assert_eq!(disk.accel.status().configuration.effective(), "write-through");
    disk.write(2);
    disk.run_until("write-through goes on", |disk| disk.done.len() == 2);
}
