//! Owner and replica with a real log, real sockets and a real file, on one thread: the disk against an oracle,
//! with owners that vanish at any moment.
#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use weir_accel::flash::device_bytes;
use weir_accel::flash::{FlashDevice, FlashStore};
use weir_accel::replica::Replica;
use weir_accel::{Accel, AccelConfig, AccelNotice, Configuration, Former, Inheritance, ReplicaHost};
use weir_block::{
    Completion, Layer, Metered, Nanos, Outcome, OwnerId, Payload, Reactor, ReactorConfig, Request,
    RequestKind, Tag,
};
use weir_volume::{BackingOptions, FileBacking};

const SIZE: u64 = 4 << 20;
const SECTORS: usize = (SIZE / 512) as usize;
const LOG: u64 = 64 << 20;

/// Two nodes: the owner with its disk, and a host of a replica.
struct Pair {
    reactor: Reactor,
    accel: Option<Accel<FileBacking>>,
    backing_id: OwnerId,
    host: Option<ReplicaHost>,
    host_id: OwnerId,
    epoch: u64,
    done: Vec<Completion>,
    configuration: Configuration,
    peer_available: bool,
    /// The flash devices of the owner's node and of the replica's, unless logs are in memory.
    flash: Option<[Arc<FlashDevice>; 2]>,
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

/// Two flash devices beside the backing.
fn devices(path: &Path) -> [Arc<FlashDevice>; 2] {
    [("a", 11), ("b", 12)].map(|(node, number)| {
        let path = path.with_file_name(format!("flash-{node}"));
        FlashDevice::open(&path, device_bytes(1, LOG), LOG, number).unwrap()
    })
}

impl Pair {
    fn new(path: &Path, wanted: Option<usize>) -> Pair {
        Pair::with(path, wanted, None)
    }

    fn with(path: &Path, wanted: Option<usize>, flash: Option<[Arc<FlashDevice>; 2]>) -> Pair {
        let reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let mut pair = Pair {
            reactor,
            accel: None,
            backing_id: OwnerId(0),
            host: None,
            host_id: OwnerId(0),
            flash,
            epoch: 1,
            done: Vec::new(),
            configuration: configuration(1, &[], false, wanted),
            peer_available: true,
        };
        pair.start_host();
        let store = pair.empty_store(0);
        pair.open(path, Inheritance::Nothing, store);
        pair
    }

    /// A slot on the flash of the owner's node (0) or of the replica's (1).
    fn empty_store(&mut self, node: usize) -> Option<FlashStore> {
        let lease = self.flash.as_ref()?[node].take("disk", 1).unwrap();
        Some(FlashStore::new(self.reactor.new_owner(), lease).unwrap())
    }

    /// A replica that holds nothing yet.
    fn start_host(&mut self) {
        self.host_id = self.reactor.new_owner();
        let store = self.empty_store(1);
        self.host = Some(ReplicaHost::new(self.host_id, LOG, store, 0).unwrap());
    }

    /// The copy that a restarted node finds on its flash.
    fn recovered(&mut self, node: usize) -> ReplicaHost {
        let lease = self.flash.as_ref().unwrap()[node].find("disk").expect("a log is durable");
        let id = self.reactor.new_owner();
        let (store, found) = FlashStore::recover(id, lease, LOG).unwrap();
        let (log, state) = found.expect("frames are durable");
        assert!(state.complete);
        self.host_id = self.reactor.new_owner();
        ReplicaHost::holding(self.host_id, Replica::recovered(log, state), Some(store))
    }

    fn open(&mut self, path: &Path, inheritance: Inheritance, store: Option<FlashStore>) {
        let options =
            BackingOptions { size: Some(SIZE), logical_block: Some(512), ..BackingOptions::default() };
        let backing = FileBacking::open(&mut self.reactor, path, &options).unwrap();
        self.backing_id = backing.owner();
        let config = AccelConfig { destage_delay: Duration::from_millis(3), ..AccelConfig::standalone(LOG) };
        let lower = Metered::new("backing", backing);
        let (reactor, configuration) = (&mut self.reactor, self.configuration.clone());
        let accel =
            Accel::new(reactor, config, configuration, inheritance, Former::Stopped, lower, store).unwrap();
        self.accel = Some(accel);
    }

    /// One turn of a shard's loop, and of a registry that says yes to everything.
    fn turn(&mut self) {
        let accel = self.accel.as_mut().unwrap();
        let deadline = accel.deadline().min(Nanos::now() + Duration::from_millis(1));
        let mut events = Vec::new();
        self.reactor.wait(deadline, &mut events).unwrap();
        for event in events {
            let to = event.token.owner;
            let store = self.host.as_ref().and_then(ReplicaHost::store_owner);
            if to == self.host_id || Some(to) == store {
                if let Some(host) = &mut self.host {
                    host.on_event(&self.reactor, event);
                }
            } else if [self.backing_id, accel.peers_id()].contains(&to) || Some(to) == accel.store_id() {
                accel.on_event(&mut self.reactor, event);
            }
        }
        if let Some(host) = &mut self.host {
            host.advance(&mut self.reactor);
        }
        accel.advance(&mut self.reactor, &mut self.done);
        let mut notices = Vec::new();
        accel.take_notices(&mut notices);
        for notice in notices {
            self.obey(notice);
        }
    }

    fn obey(&mut self, notice: AccelNotice) {
        let accel = self.accel.as_mut().unwrap();
        match notice {
            AccelNotice::WantPeer { .. } if self.peer_available && self.host.is_some() => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                accel.peer_connected(&mut self.reactor, "b".into(), ours.into());
                let host = self.host.as_mut().unwrap();
                host.attach(&mut self.reactor, "a".into(), 0, theirs.into()).unwrap();
            }
            AccelNotice::WantPeer { .. } => accel.peer_unavailable(String::new()),
            AccelNotice::WantConfiguration { epoch, replicas, write_back, .. } => {
                assert_eq!(epoch, self.epoch);
                self.epoch += 1;
                self.configuration =
                    Configuration { epoch: self.epoch, replicas, write_back, ..self.configuration.clone() };
                accel.configured(self.configuration.clone());
            }
            AccelNotice::Fenced(epoch) => panic!("fenced at {epoch}"),
            AccelNotice::Tell(..) => {}
        }
    }

    fn until(&mut self, what: &str, mut condition: impl FnMut(&mut Pair) -> bool) {
        let end = Nanos::now() + Duration::from_secs(20);
        while !condition(self) {
            assert!(Nanos::now() < end, "{what}: {:?}", self.accel.as_ref().unwrap().status());
            self.turn();
        }
    }

    fn effective(&self) -> String {
        self.accel.as_ref().unwrap().status().configuration.effective()
    }

    /// The owner vanishes; the replica's node goes on from its copy.
    fn take_over(&mut self, path: &Path, rng: &mut Rng) {
        let mut accel = self.accel.take().unwrap();
        // A dead process does nothing more; what the kernel had been handed still lands.
        accel.release(&mut self.reactor);
        drop(accel);
        let mut events = Vec::new();
        while self.reactor.files_in_flight() > 0 {
            self.reactor.wait(Nanos::NEVER, &mut events).unwrap();
        }
        let mut host = self.host.take().unwrap();
        // Writes in the dead owner's kernel still arrive, or do not.
        let arrives = rng.bool();
        let own = host.store_owner();
        // The replica's own flash answers in any case.
        for event in events.into_iter().filter(|event| arrives || Some(event.token.owner) == own) {
            host.on_event(&self.reactor, event);
        }
        if arrives {
            host.advance(&mut self.reactor);
        }
        assert!(host.replica().is_complete());
        self.epoch += 1;
        self.configuration = configuration(self.epoch, &[], true, self.configuration.wanted_replicas);
        host.seal(self.epoch);
        let (inheritance, store) = host.inherit(&mut self.reactor);
        if let Some(flash) = &mut self.flash {
            flash.swap(0, 1);
        }
        self.restart(1);
        self.start_host();
        self.open(path, inheritance, store);
    }

    /// The next process on this node opens its flash.
    fn restart(&mut self, node: usize) {
        let Some(flash) = &mut self.flash else { return };
        let path = flash[node].path().to_owned();
        // The former process's lock goes with it.
        flash[node] = Arc::clone(&flash[1 - node]);
        flash[node] = FlashDevice::open(&path, device_bytes(1, LOG), LOG, 0).unwrap();
    }

    /// Both nodes lose their power; what is durable is all that is left. The former owner or its replica goes on, and
    /// greets the other one, which has its copy still.
    fn power_cut(&mut self, path: &Path, rng: &mut Rng) {
        let mut accel = self.accel.take().unwrap();
        accel.release(&mut self.reactor);
        drop(accel);
        self.host.take().unwrap().close(&mut self.reactor);
        let mut events = Vec::new();
        while self.reactor.files_in_flight() > 0 {
            self.reactor.wait(Nanos::NEVER, &mut events).unwrap();
        }
        if rng.bool() {
            self.flash.as_mut().unwrap().swap(0, 1);
        }
        (0..2).for_each(|node| self.restart(node));
        let mut owner = self.recovered(0);
        let other = self.recovered(1);
        self.epoch += 1;
        self.configuration = configuration(self.epoch, &["b"], true, self.configuration.wanted_replicas);
        owner.seal(self.epoch);
        let (inheritance, store) = owner.inherit(&mut self.reactor);
        self.host = Some(other);
        self.open(path, inheritance, store);
    }
}

/// The permitted content of a sector: its last acknowledged fill, and those of later writes without an answer.
#[derive(Clone, Default)]
struct Sector {
    acknowledged: u8,
    open: Vec<(u64, u8)>,
}

struct Guest {
    sectors: Vec<Sector>,
    /// Tag, first sector, sectors, fill.
    writes: Vec<(u64, usize, usize, u8)>,
    reads: Vec<(u64, usize, usize, Vec<Sector>)>,
    next: u64,
    rng: Rng,
}

impl Guest {
    fn new(seed: u64) -> Guest {
        let sectors = vec![Sector::default(); SECTORS];
        Guest { sectors, writes: Vec::new(), reads: Vec::new(), next: 0, rng: Rng::with_seed(seed) }
    }

    fn range(&mut self) -> (usize, usize) {
        let count = if self.rng.u8(..) < 8 { self.rng.usize(1..3000) } else { self.rng.usize(1..40) };
        // Most of the load on a small part, so that overwrites and overlaps happen.
        let area = if self.rng.bool() { 256 } else { SECTORS };
        let first = self.rng.usize(..area);
        (first, count.min(SECTORS - first))
    }

    /// Submits one random request, unless it would overlap a write in flight.
    fn submit(&mut self, pair: &mut Pair) {
        let (first, count) = self.range();
        let busy =
            self.writes.iter().any(|&(_, start, length, _)| start < first + count && first < start + length);
        let (offset, length) = (first as u64 * 512, count as u64 * 512);
        let tag = Tag(self.next);
        let accel = pair.accel.as_mut().unwrap();
        let choice = self.rng.u8(..10);
        let kind = match choice {
            0..3 => RequestKind::Read,
            3 => RequestKind::Flush,
            4 => RequestKind::WriteZeroes,
            5 => RequestKind::Discard,
            _ => RequestKind::Write,
        };
        if !accel.has_room(kind, length) || (busy && kind.changes_data()) {
            return;
        }
        self.next += 1;
        let fill = (self.next % 255) as u8 + 1;
        let reactor = &mut pair.reactor;
        match kind {
            RequestKind::Read => {
                let buffer = reactor.buffers().take(length as usize).unwrap();
                let seen = self.sectors[first..first + count].to_vec();
                self.reads.push((tag.0, first, count, seen));
                accel.submit(reactor, Request::Read { tag, offset, buffer });
            }
            RequestKind::Flush => accel.submit(reactor, Request::Flush { tag }),
            RequestKind::WriteZeroes => {
                self.note(tag, first, count, 0);
                let (may_unmap, fua) = (self.rng.bool(), self.rng.bool());
                accel.submit(
                    reactor,
                    Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only: false },
                );
            }
            RequestKind::Discard => {
                self.note(tag, first, count, 0);
                accel.submit(reactor, Request::Discard { tag, offset, length, fua: false });
            }
            _ => {
                self.note(tag, first, count, fill);
                let data = vec![fill; length as usize];
                let payload = Payload::Lent(&data);
                accel.submit(reactor, Request::Write { tag, offset, payload, fua: self.rng.bool() });
            }
        }
    }

    fn note(&mut self, tag: Tag, first: usize, count: usize, fill: u8) {
        self.writes.push((tag.0, first, count, fill));
        for sector in &mut self.sectors[first..first + count] {
            sector.open.push((tag.0, fill));
        }
    }

    fn collect(&mut self, pair: &mut Pair) {
        for Completion { tag, result } in std::mem::take(&mut pair.done) {
            let outcome = result.unwrap();
            if let Some(place) = self.writes.iter().position(|write| write.0 == tag.0) {
                let (_, first, count, fill) = self.writes.swap_remove(place);
                for sector in &mut self.sectors[first..first + count] {
                    // Requests to one sector follow each other, so this answer settles all before it.
                    *sector = Sector { acknowledged: fill, open: Vec::new() };
                }
            }
            if let Some(place) = self.reads.iter().position(|read| read.0 == tag.0) {
                let (_, first, count, before) = self.reads.swap_remove(place);
                let Outcome::Read(buffer) = outcome else { panic!("a read brings bytes") };
                for (at, old) in (first..first + count).zip(&before) {
                    let bytes = &buffer.bytes()[(at - first) * 512..][..512];
                    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "sector {at} is mixed");
                    self.check(at, bytes[0], old);
                }
            }
        }
    }

    fn check(&self, at: usize, got: u8, before: &Sector) {
        let now = &self.sectors[at];
        let allowed = std::iter::once(before.acknowledged)
            .chain(std::iter::once(now.acknowledged))
            .chain(before.open.iter().chain(&now.open).map(|open| open.1));
        // Writes that came and were answered during the read make it ambiguous; leave those alone.
        let quiet = before.acknowledged == now.acknowledged;
        assert!(
            !quiet || allowed.clone().any(|fill| fill == got),
            "sector {at}: {got}, not {:?}",
            allowed.collect::<Vec<_>>()
        );
    }

    /// Everything that was not answered is unknown from now on: old or new.
    fn owner_died(&mut self) {
        self.writes.clear();
        self.reads.clear();
    }

    fn verify(&mut self, pair: &mut Pair) {
        for first in (0..SECTORS).step_by(256) {
            let tag = Tag(self.next);
            self.next += 1;
            pair.until("room for a read", |pair| {
                pair.accel.as_ref().unwrap().has_room(RequestKind::Read, 256 * 512)
            });
            let buffer = pair.reactor.buffers().take(256 * 512).unwrap();
            let accel = pair.accel.as_mut().unwrap();
            accel.submit(&mut pair.reactor, Request::Read { tag, offset: first as u64 * 512, buffer });
            pair.until("a read", |pair| !pair.done.is_empty());
            let completion = pair.done.pop().unwrap();
            let Ok(Outcome::Read(buffer)) = completion.result else { panic!("a read brings bytes") };
            for at in first..first + 256 {
                let bytes = &buffer.bytes()[(at - first) * 512..][..512];
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "sector {at} is mixed");
                let sector = self.sectors[at].clone();
                self.check(at, bytes[0], &sector);
                // Once seen it stays seen (P7).
                self.sectors[at] = Sector { acknowledged: bytes[0], open: Vec::new() };
            }
        }
    }
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn disk(directory: &tempfile::TempDir) -> std::path::PathBuf {
    let path = directory.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

fn work(guest: &mut Guest, pair: &mut Pair, turns: usize) {
    for _ in 0..turns {
        for _ in 0..guest.rng.usize(..8) {
            guest.submit(pair);
        }
        pair.turn();
        guest.collect(pair);
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_owners_vanish() {
    for seed in 0..6 {
        let directory = scratch();
        let path = disk(&directory);
        let mut pair = Pair::new(&path, Some(1));
        let mut guest = Guest::new(seed);
        for round in 0..5 {
            pair.until("the replica set", |pair| pair.effective() == "write-back+1");
            let turns = guest.rng.usize(20..300);
            work(&mut guest, &mut pair, turns);
            pair.take_over(&path, &mut guest.rng);
            guest.owner_died();
            println!("seed {seed} round {round}: verifying");
            guest.verify(&mut pair);
        }
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_the_power_goes() {
    for seed in 0..6 {
        let directory = scratch();
        let path = disk(&directory);
        let mut pair = Pair::with(&path, Some(1), Some(devices(&path)));
        let mut guest = Guest::new(seed);
        for round in 0..5 {
            pair.until("the replica set", |pair| pair.effective() == "write-back+1");
            let turns = guest.rng.usize(20..300);
            work(&mut guest, &mut pair, turns);
            if guest.rng.u8(..3) > 0 {
                pair.power_cut(&path, &mut guest.rng);
            } else {
                pair.take_over(&path, &mut guest.rng);
            }
            guest.owner_died();
            pair.done.clear();
            println!("seed {seed} round {round}: verifying");
            guest.verify(&mut pair);
        }
    }
}

#[test]
fn policies_change_under_load_and_the_disk_stays_right() {
    let directory = scratch();
    let path = disk(&directory);
    let mut pair = Pair::new(&path, None);
    let mut guest = Guest::new(42);
    for (wanted, effective) in [
        (Some(1), "write-back+1"),
        (None, "write-through"),
        (Some(0), "write-back+0"),
        (Some(1), "write-back+1"),
    ] {
        pair.configuration.wanted_replicas = wanted;
        pair.accel.as_mut().unwrap().request_policy(wanted);
        let mut turns = 0;
        while pair.effective() != effective || turns < 200 {
            work(&mut guest, &mut pair, 1);
            turns += 1;
            assert!(turns < 20_000, "{effective}: {:?}", pair.accel.as_ref().unwrap().status());
        }
    }
    pair.accel.as_mut().unwrap().close();
    pair.until("drained", |pair| pair.accel.as_ref().unwrap().is_drained());
    guest.collect(&mut pair);
    let bytes = std::fs::read(&path).unwrap();
    for (at, sector) in guest.sectors.iter().enumerate() {
        assert!(
            bytes[at * 512..][..512].iter().all(|byte| *byte == sector.acknowledged),
            "sector {at} on the backing"
        );
    }
}

#[test]
fn a_lost_replica_means_write_through_and_its_return_write_back() {
    let directory = scratch();
    let path = disk(&directory);
    let mut pair = Pair::new(&path, Some(1));
    let mut guest = Guest::new(7);
    pair.until("the replica set", |pair| pair.effective() == "write-back+1");
    work(&mut guest, &mut pair, 50);
    pair.peer_available = false;
    pair.host.take().unwrap().close(&mut pair.reactor);
    let mut turns = 0;
    while pair.effective() != "write-through" {
        work(&mut guest, &mut pair, 1);
        turns += 1;
        assert!(turns < 20_000, "falls: {:?}", pair.accel.as_ref().unwrap().status());
    }
    work(&mut guest, &mut pair, 100);
    pair.start_host();
    pair.peer_available = true;
    let mut turns = 0;
    while pair.effective() != "write-back+1" {
        work(&mut guest, &mut pair, 1);
        turns += 1;
        assert!(turns < 20_000, "rises: {:?}", pair.accel.as_ref().unwrap().status());
    }
    work(&mut guest, &mut pair, 50);
    guest.owner_died();
    pair.done.clear();
    pair.take_over(&path, &mut guest.rng);
    guest.verify(&mut pair);
}

#[test]
fn without_a_lease_nothing_is_answered_and_nothing_destaged() {
    let directory = scratch();
    let path = disk(&directory);
    let mut pair = Pair::new(&path, Some(0));
    pair.until("write-back", |pair| pair.effective() == "write-back+0");
    let accel = pair.accel.as_mut().unwrap();
    accel.config().serves_until.store(1, std::sync::atomic::Ordering::Release);
    let payload = Payload::Lent(&[9; 512]);
    accel.submit(&mut pair.reactor, Request::Write { tag: Tag(1), offset: 0, payload, fua: false });
    let end = Nanos::now() + Duration::from_millis(50);
    while Nanos::now() < end {
        pair.turn();
    }
    assert!(pair.done.is_empty(), "answered without a lease");
    assert_eq!(pair.accel.as_ref().unwrap().status().marks.destaged, 0);
    pair.accel.as_ref().unwrap().config().serves_until.store(u64::MAX, std::sync::atomic::Ordering::Release);
    pair.until("the answer", |pair| !pair.done.is_empty());
}

/// A backing in memory answers in place, without an event: nothing may wait for one that never comes.
#[test]
fn writes_through_the_log_to_a_backing_in_memory_are_answered() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = disk(&directory);
    let mut pair = Pair::new(&path, None);
    let accel = pair.accel.as_mut().unwrap();
    // The second overlaps the first, which is in flight past the log, and has no memory to wait in: it goes through the log,
    // and so do the others.
    let buffers = pair.reactor.buffers();
    let _memory: Vec<_> = std::iter::from_fn(|| buffers.take(4096)).collect();
    for tag in 0..40 {
        let payload = Payload::Lent(&[tag as u8; 4096]);
        let request = Request::Write { tag: Tag(tag), offset: tag / 2 * 4096, payload, fua: false };
        accel.submit(&mut pair.reactor, request);
    }
    let mut events = Vec::new();
    for _ in 0..10_000 {
        let deadline = accel.deadline();
        assert!(deadline != Nanos::NEVER, "{} of 40 answered, and nothing is due", pair.done.len());
        pair.reactor.wait(deadline, &mut events).unwrap();
        accel.advance(&mut pair.reactor, &mut pair.done);
        if pair.done.len() == 40 {
            return;
        }
    }
    panic!("{} of 40 answered: {:?}", pair.done.len(), accel.status());
}
