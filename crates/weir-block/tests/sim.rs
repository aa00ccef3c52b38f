//! The simulated engine: one seed decides everything; connections and media have the worst faults of real ones, and no others.
#![allow(clippy::unwrap_used)]

use std::io::IoSlice;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use weir_block::sim::{Damage, Death, FileId, MediumFaults, Wires, World};
use weir_block::{
    Action, Clock, Event, Interest, Nanos, Reactor, ReactorConfig, Received, Region, Sent, Socket, Token,
    WriteSource,
};

const SECTOR: usize = 512;

struct Machine {
    process: weir_block::sim::ProcessId,
    reactor: Reactor,
}

fn machine(world: &World, number: usize, drift: i64) -> Machine {
    let process = world.process(number);
    let clock = world.clock(process, drift);
    let reactor = Reactor::simulated(world, process, clock, ReactorConfig::default()).unwrap();
    Machine { process, reactor }
}

impl Machine {
    fn token(&mut self) -> Token {
        Token { owner: self.reactor.new_owner(), slot: 0 }
    }

    fn wait(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        // A short transfer continues without an event.
        while events.is_empty() {
            self.reactor.wait(Nanos::NEVER, &mut events).unwrap();
        }
        events
    }

    /// Events so far.
    fn poll(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.reactor.wait(Nanos(0), &mut events).unwrap();
        events
    }

    fn result(&mut self) -> Result<u64, i32> {
        let Action::File { result, .. } = self.wait().remove(0).action else { panic!("not a file's event") };
        result
    }

    fn write(&mut self, world: &World, file: FileId, offset: u64, byte: u8, durable: bool) {
        let token = self.token();
        let mut buffer = self.reactor.buffers().take(4 * SECTOR).unwrap();
        buffer.bytes_mut().fill(byte);
        let (file, source) = (world.open(file), WriteSource::Buffer(buffer));
        if durable {
            self.reactor.write_durable(&file, offset, source, token);
        } else {
            self.reactor.write(&file, offset, source, token);
        }
    }
}

fn sectors(world: &World, file: FileId, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count * SECTOR];
    world.read(file, 0, &mut bytes);
    assert!(bytes.chunks(SECTOR).all(|sector| sector.iter().all(|byte| *byte == sector[0])), "a torn sector");
    bytes.chunks(SECTOR).map(|sector| sector[0]).collect()
}

/// Sends a megabyte from one machine to another over a bad network; returns the time and size of each receive.
fn transfer(seed: u64) -> Vec<(u64, usize)> {
    let world = World::new(seed);
    let (mut one, mut other) = (machine(&world, 0, 0), machine(&world, 1, 0));
    world.set_wires(Wires {
        partial: 2,
        late: 10,
        longest: Duration::from_millis(5),
        capacity: 8 << 10,
        ..Wires::default()
    });
    let (ours, theirs) = world.connect(one.process, other.process);
    let mut sender = Socket::new(ours, one.token()).unwrap();
    let mut receiver = Socket::new(theirs, other.token()).unwrap();
    let data: Vec<u8> = (0..1_000_000u32).map(|number| (number % 251) as u8).collect();
    let (mut sent, mut got, mut calls) = (0, Vec::new(), Vec::new());
    while got.len() < data.len() {
        match sender.send(&[IoSlice::new(&data[sent..]), IoSlice::new(&[])]).unwrap() {
            Sent::Bytes(count) => sent += count,
            Sent::Full => sender.watch_write(&mut one.reactor),
        }
        let mut target = [0; 3000];
        match receiver.receive(&mut target).unwrap() {
            Received::Bytes(count) => {
                got.extend_from_slice(&target[..count]);
                calls.push((world.now().0, count));
            }
            Received::Nothing => receiver.watch_read(&mut other.reactor),
            Received::End => panic!("unexpected end of stream"),
        }
        one.poll().iter().for_each(|_| sender.on_event(Interest::Write));
        other.poll().iter().for_each(|_| receiver.on_event(Interest::Read));
        if world.next() != Nanos::NEVER {
            world.advance(world.next());
        }
    }
    assert!(got == data, "bytes came in another order or not at all");
    sender.close(&mut one.reactor);
    while receiver.receive(&mut [0; 8]).unwrap() != Received::End {
        world.advance(world.next());
    }
    calls
}

#[test]
fn bytes_come_in_order_in_pieces_and_a_seed_decides_which() {
    let first = transfer(1);
    assert!(first.iter().any(|(_, count)| *count < 3000) && first.len() > 400, "{} calls", first.len());
    assert_eq!(first, transfer(1));
    assert_ne!(first, transfer(2));
}

#[test]
fn a_cut_delivers_a_part_and_then_breaks() {
    let mut parts = std::collections::BTreeSet::new();
    for seed in 0..50 {
        let world = World::new(seed);
        let (mut one, mut other) = (machine(&world, 0, 0), machine(&world, 1, 0));
        let (ours, theirs) = world.connect(one.process, other.process);
        let mut sender = Socket::new(ours, one.token()).unwrap();
        let mut receiver = Socket::new(theirs, other.token()).unwrap();
        assert_eq!(sender.send(&[IoSlice::new(&[7; 1000])]).unwrap(), Sent::Bytes(1000));
        assert_eq!(world.cut(0, 1), 1);
        world.advance(world.now() + Duration::from_secs(1));
        let mut target = [0; 2000];
        let mut arrived = 0;
        let error = loop {
            match receiver.receive(&mut target) {
                Ok(Received::Bytes(count)) => arrived += count,
                Ok(other) => panic!("{other:?} on a broken connection"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET));
        assert!(sender.send(&[IoSlice::new(&[7])]).is_err());
        parts.insert(arrived);
    }
    assert!(parts.len() > 20, "cut anywhere: {parts:?}");
}

#[test]
fn a_partition_holds_one_direction_back() {
    let world = World::new(1);
    let (mut one, mut other) = (machine(&world, 0, 0), machine(&world, 1, 0));
    let (ours, theirs) = world.connect(one.process, other.process);
    let mut near = Socket::new(ours, one.token()).unwrap();
    let mut far = Socket::new(theirs, other.token()).unwrap();
    let until = world.now() + Duration::from_secs(1);
    world.block(0, 1, until);
    near.send(&[IoSlice::new(b"there")]).unwrap();
    far.send(&[IoSlice::new(b"back")]).unwrap();
    world.advance(until + Duration::ZERO);
    let mut target = [0; 16];
    assert_eq!(near.receive(&mut target).unwrap(), Received::Bytes(4));
    world.advance(Nanos(until.0 - 1));
    far.watch_read(&mut other.reactor);
    assert_eq!(other.wait().len(), 1);
    assert!(world.now() >= until);
    assert_eq!(far.receive(&mut target).unwrap(), Received::Bytes(5));
    // It lasts until the partition ends.
    world.block(0, 1, Nanos::NEVER);
    near.send(&[IoSlice::new(b"late")]).unwrap();
    world.advance(world.now() + Duration::from_secs(1000));
    assert_eq!(far.receive(&mut target).unwrap(), Received::Nothing);
    world.unblock();
    world.advance(world.now() + Duration::from_millis(1));
    assert_eq!(far.receive(&mut target).unwrap(), Received::Bytes(4));
}

#[test]
fn a_killed_process_closes_connections_and_a_machine_without_power_is_silent() {
    for (death, answer) in [(Death::Killed, Received::End), (Death::PowerCut, Received::Nothing)] {
        let world = World::new(3);
        let (mut one, mut other) = (machine(&world, 0, 0), machine(&world, 1, 0));
        let (ours, theirs) = world.connect(one.process, other.process);
        let mut socket = Socket::new(theirs, other.token()).unwrap();
        world.end(one.process, death);
        drop((ours, one.poll()));
        world.advance(world.now() + Duration::from_secs(10));
        assert_eq!(socket.receive(&mut [0; 8]).unwrap(), answer);
        if death == Death::PowerCut {
            world.restore_power(one.process);
            world.advance(world.now() + Duration::from_secs(1));
            assert!(socket.receive(&mut [0; 8]).is_err());
        }
    }
}

#[test]
fn the_end_is_seen_behind_unread_bytes() {
    let world = World::new(4);
    let (mut one, mut other) = (machine(&world, 0, 0), machine(&world, 1, 0));
    let (ours, theirs) = world.connect(one.process, other.process);
    let mut near = Socket::new(ours, one.token()).unwrap();
    let mut far = Socket::new(theirs, other.token()).unwrap();
    far.watch_hang_up(&mut other.reactor);
    near.send(&[IoSlice::new(b"unread")]).unwrap();
    world.advance(Nanos(10_000_000));
    assert!(other.poll().is_empty() && !far.has_hung_up());
    near.close(&mut one.reactor);
    world.advance(Nanos(20_000_000));
    assert!(matches!(other.poll()[..], [Event { action: Action::Ready(Interest::HangUp), .. }]));
    far.on_event(Interest::HangUp);
    assert!(far.has_hung_up());
    assert_eq!(far.receive(&mut [0; 64]).unwrap(), Received::Bytes(6));
    // Watched when it is over.
    far.watch_hang_up(&mut other.reactor);
    assert_eq!(other.poll().len(), 1);
}

#[test]
fn synced_writes_survive_and_others_may_be_lost_or_torn() {
    let (mut whole, mut lost, mut torn) = (0, 0, 0);
    for seed in 0..60 {
        let world = World::new(seed);
        let mut machine = machine(&world, 0, 0);
        let file = world.file(1 << 20);
        machine.write(&world, file, 0, 1, true);
        assert_eq!(machine.result(), Ok(4 * SECTOR as u64));
        machine.write(&world, file, 0, 2, false);
        assert_eq!(machine.result(), Ok(4 * SECTOR as u64));
        assert_eq!(sectors(&world, file, 4), [2; 4]);
        world.power_cut(file);
        let left = sectors(&world, file, 4);
        match left.iter().filter(|byte| **byte == 2).count() {
            4 => whole += 1,
            0 => lost += 1,
            _ => torn += 1,
        }
        machine.write(&world, file, 0, 3, false);
        machine.result().unwrap();
        let (shared, token) = (world.open(file), machine.token());
        machine.reactor.sync(&shared, token);
        assert_eq!(machine.result(), Err(libc::EIO), "one sync reports the lost writes");
        machine.reactor.sync(&shared, token);
        assert_eq!(machine.result(), Ok(0));
        world.power_cut(file);
        assert_eq!(sectors(&world, file, 4), [3; 4]);
        // A write through the cache covers an older one in it.
        machine.write(&world, file, 0, 4, false);
        machine.result().unwrap();
        machine.write(&world, file, SECTOR as u64, 5, true);
        machine.result().unwrap();
        world.power_cut(file);
        assert_eq!(sectors(&world, file, 5)[1..], [5; 4]);
    }
    assert!(whole > 3 && lost > 3 && torn > 3, "{whole} whole, {lost} lost, {torn} torn");
}

#[test]
fn a_power_cut_fails_operations_without_delivered_completion() {
    let world = World::new(5);
    let mut machine = machine(&world, 0, 0);
    let file = world.file(1 << 20);
    machine.write(&world, file, 0, 1, false);
    // Done, and the process pauses before it collects the completion.
    world.advance(world.now() + Duration::from_secs(1));
    assert!(!world.is_busy(file) && world.is_ready(machine.process));
    machine.write(&world, file, 4096, 2, false);
    assert!(world.is_busy(file));
    world.power_cut(file);
    assert!(!world.is_busy(file));
    assert_eq!(machine.result(), Err(libc::EIO));
    assert_eq!(machine.result(), Err(libc::EIO));
    world.advance(world.now() + Duration::from_secs(1));
    assert!(world.is_quiet() && machine.poll().is_empty(), "no late completion");
    machine.write(&world, file, 0, 3, false);
    assert_eq!(machine.result(), Ok(4 * SECTOR as u64));
}

#[test]
fn damage_hits_the_write_before_the_newest() {
    for seed in 0..40 {
        let world = World::new(seed);
        let mut machine = machine(&world, 0, 0);
        let file = world.file(1 << 20);
        world.track_writes(file, 4096, 64 << 10);
        let mut durable = |offset: u64, value| {
            machine.write(&world, file, offset, value, true);
            machine.result().unwrap();
        };
        durable(0, 9);
        durable(4096, 1);
        assert_eq!(world.damage(file, Damage::Lost), None, "the newest write is spared");
        durable(8192, 2);
        let damage = [Damage::BitFlip, Damage::Lost, Damage::Misdirected][seed as usize % 3];
        assert_eq!(world.damage(file, damage), Some(vec![1; 4 * SECTOR]));
        let durable = |offset, length| {
            let mut bytes = vec![0; length];
            world.read_durable(file, offset, &mut bytes);
            bytes
        };
        assert_eq!(
            (durable(0, 2048), durable(8192, 2048)),
            (vec![9; 2048], vec![2; 2048]),
            "the other writes are intact"
        );
        let wrong = durable(4096, 2048).iter().filter(|byte| **byte != 1).count();
        match damage {
            Damage::BitFlip => assert_eq!(wrong, 1),
            Damage::Lost => assert_eq!(wrong, 4 * SECTOR),
            Damage::Misdirected => {
                let there = durable(4096, 64 << 10).iter().filter(|byte| **byte == 1).count();
                assert!(
                    [0, 4 * SECTOR].contains(&there),
                    "intact, unless the newest write overwrote it: {there}"
                );
            }
        }
        assert_eq!(world.damage(file, damage), None, "only one write is left");
    }
}

#[test]
fn submitted_writes_of_a_killed_process_may_land_later() {
    let (mut late, mut never) = (0, 0);
    for seed in 0..60 {
        let world = World::new(seed);
        let mut machine = machine(&world, 0, 0);
        let file = world.file(1 << 20);
        let medium = MediumFaults { longest: Duration::from_secs(5), ..world.medium(file) };
        world.set_medium(file, medium);
        let region = Rc::new(Region::new(4096).unwrap());
        let (shared, token) = (world.open(file), machine.token());
        machine.reactor.write(&shared, 0, WriteSource::Gather(Rc::clone(&region), vec![(0, 4096)]), token);
        machine.write(&world, file, 4096, 9, false);
        let death = if seed % 2 == 0 { Death::Killed } else { Death::PowerCut };
        world.end(machine.process, death);
        drop((machine, region));
        assert_eq!(sectors(&world, file, 12)[8..], [0; 4]);
        world.advance(world.now() + Duration::from_secs(6));
        match sectors(&world, file, 12)[8] {
            9 => late += 1,
            _ => never += 1,
        }
    }
    assert_eq!((late, never), (30, 30));
}

#[test]
fn a_short_transfer_continues_and_errors_are_reported() {
    let world = World::new(5);
    let mut machine = machine(&world, 0, 0);
    let file = world.file(1 << 20);
    world.set_medium(file, MediumFaults { partial: 1, direct: true, ..world.medium(file) });
    machine.write(&world, file, 0, 6, true);
    assert_eq!(machine.result(), Ok(4 * SECTOR as u64));
    assert_eq!(sectors(&world, file, 5), [6, 6, 6, 6, 0]);
    machine.write(&world, file, 100, 7, true);
    assert_eq!(machine.result(), Err(libc::EINVAL), "direct I/O counts in sectors");
    world.set_medium(file, MediumFaults { full: true, ..MediumFaults::default() });
    machine.write(&world, file, 0, 8, true);
    assert_eq!(machine.result(), Err(libc::ENOSPC));
    world.set_medium(file, MediumFaults { fails: 1, ..MediumFaults::default() });
    machine.write(&world, file, 0, 9, true);
    assert_eq!(machine.result(), Err(libc::EIO));
    world.set_medium(file, MediumFaults { hangs: true, ..MediumFaults::default() });
    machine.write(&world, file, 0, 10, true);
    world.advance(world.now() + Duration::from_secs(100));
    assert!(machine.poll().is_empty(), "a hung medium completed an operation");
    world.set_medium(file, MediumFaults::default());
    assert_eq!(machine.result(), Ok(4 * SECTOR as u64));
}

/// The process checks its right, starts a write, and pauses; the write is short.
#[test]
fn the_rest_of_a_short_write_does_not_start_without_the_right() {
    let world = World::new(5);
    let mut machine = machine(&world, 0, 0);
    let file = world.file(1 << 20);
    world.set_medium(file, MediumFaults { partial: 1, ..world.medium(file) });
    let until = Arc::new(AtomicU64::new((machine.reactor.now() + Duration::from_secs(1)).0));
    let write = |machine: &mut Machine, byte: u8, token: Token| {
        let mut buffer = machine.reactor.buffers().take(4 * SECTOR).unwrap();
        buffer.bytes_mut().fill(byte);
        machine.reactor.write(&world.open(file), 0, WriteSource::Buffer(buffer), token);
    };
    let (guarded, other) = (machine.token(), machine.token());
    machine.reactor.guard(guarded.owner, &until);
    write(&mut machine, 6, guarded);
    assert_eq!(machine.result(), Ok(4 * SECTOR as u64), "the right is valid");
    write(&mut machine, 7, guarded);
    world.advance(world.now() + Duration::from_secs(2));
    assert_eq!(machine.result(), Err(libc::ESTALE));
    let sectors = sectors(&world, file, 4);
    assert!(sectors[0] == 7 && sectors[3] == 6, "{sectors:?}");
    write(&mut machine, 8, other);
    assert_eq!(machine.result(), Ok(4 * SECTOR as u64), "other owners have no guard");
    until.store(u64::MAX, Ordering::Release);
    write(&mut machine, 9, guarded);
    assert_eq!(machine.result(), Ok(4 * SECTOR as u64), "the right is valid again");
    write(&mut machine, 10, guarded);
    drop(until);
    assert_eq!(machine.result(), Err(libc::ESTALE), "the holder of the right is gone");
}

#[test]
fn clocks_drift_and_a_process_may_pause_at_any_read() {
    let world = World::new(7);
    let (mut slow, fast) = (machine(&world, 0, -40), machine(&world, 1, 40));
    let (before, ahead) = (slow.reactor.now(), fast.reactor.now());
    world.advance(world.now() + Duration::from_secs(1));
    let gone = |machine: &Machine, before| (machine.reactor.now() - before).as_millis();
    assert_eq!((gone(&slow, before), gone(&fast, ahead)), (960, 1040));
    // A deadline is by the process's clock, and time passes while a single process waits.
    let (deadline, world_before) = (slow.reactor.now() + Duration::from_millis(96), world.now());
    slow.reactor.wait(deadline, &mut Vec::new()).unwrap();
    assert_eq!((world.now() - world_before).as_millis(), 100);
    let Clock::Virtual(clock) = slow.reactor.clock() else { panic!("expected a virtual clock") };
    clock.stall(4, Duration::from_millis(50));
    let before = world.now();
    let times: Vec<Nanos> = (0..40).map(|_| slow.reactor.now()).collect();
    assert!(times.is_sorted() && times[0] != times[39], "it paused sometimes");
    assert!(clock.busy_until() > before && world.now() == before, "no other process paused");
}
