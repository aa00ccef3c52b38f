//! The disk, its owner, the coordinator, and a client that knows which versions each block may have.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use weir_block::{
    Buffer, Completion, Destage, Engine, Event, IoError, Layer, Nanos, Outcome, Payload, Reactor, Region,
    Request, RequestKind, SharedFile, Tag,
};
use weir_volume::lun::filesystem::mount::exclusive;
use weir_volume::lun::filesystem::{Mounted, open_lun};
use weir_volume::lun::route_status::RouteCounts;
use weir_volume::lun::serving::{Dispatch, OpenedDisk, Redirected, ServedDisk};
use weir_volume::routed::{RoutedBacking, RoutedOptions};
use weir_volume::{Mark, SharedDisk};

use crate::common::{self, LoopDevice, run};

pub const MIB: u64 = 1 << 20;
pub const BLOCK: u64 = 4096;
pub const LUN: u64 = 600 * MIB;
pub const EXT4: &str = "mkfs.ext4 -q -F -b 4096";
pub const XFS: &str = "mkfs.xfs -q -f";
pub const SOON: Duration = Duration::from_secs(60);

/// Longest time without a coordinator, where a test waits for its end.
pub const WAIT: Duration = Duration::from_secs(2);

/// `_IOR('X', 125, __u32)`: `XFS_IOC_GOINGDOWN`, `EXT4_IOC_SHUTDOWN`.
pub const GOINGDOWN: libc::Ioctl = 0x8004_587D_u32 as libc::Ioctl;
/// Nothing more is written, not even the log.
static NOLOGFLUSH: u32 = 2;
/// `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)`.
pub const FIFREEZE: libc::Ioctl = 0xC004_5877_u32 as libc::Ioctl;
pub const FITHAW: libc::Ioctl = 0xC004_5878_u32 as libc::Ioctl;
/// `_IO(0x12, 93)`.
pub const BLKROSET: libc::Ioctl = 0x125D;
/// `LOOP_SET_STATUS64` and `LOOP_GET_STATUS64` (Linux, `include/uapi/linux/loop.h`).
const LOOP_SET_STATUS: libc::Ioctl = 0x4C04;
const LOOP_GET_STATUS: libc::Ioctl = 0x4C05;
/// `struct loop_info64`, in words of eight bytes: its size, and the place of the limit to the device's size.
const LOOP_INFO: usize = 29;
const LOOP_SIZE_LIMIT: usize = 4;
/// `_IOW(0x94, 9, int)`.
pub const FICLONE: libc::Ioctl = 0x4004_9409_u32 as libc::Ioctl;

/// How the owner reaches the coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Here,
    Remote,
}

/// Each read and write begins up to 300 us after it has come.
pub struct Shuffle {
    rng: fastrand::Rng,
    leaving: BTreeSet<(Nanos, u64)>,
}

impl Dispatch for Shuffle {
    fn arrive(&mut self, redirected: Redirected, now: Nanos) {
        let held = Duration::from_micros(self.rng.u64(0..300));
        self.leaving.insert((now + held, redirected.number));
    }

    fn next(&mut self, now: Nanos) -> Option<u64> {
        let first = self.leaving.first().filter(|(at, _)| *at <= now).copied()?;
        self.leaving.remove(&first);
        Some(first.1)
    }

    fn deadline(&self) -> Nanos {
        self.leaving.first().map_or(Nanos::NEVER, |(at, _)| *at)
    }
}

/// A filesystem that stands still. Whoever waits for it could not end otherwise.
pub struct Frozen(File);

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: the kernel reads no argument.
        unsafe { libc::ioctl(self.0.as_raw_fd(), FITHAW, 0) };
    }
}

/// A request of the client.
pub struct Asked {
    pub kind: RequestKind,
    pub blocks: std::ops::Range<u64>,
    pub version: u64,
    /// Of a read: versions that each block may have had since.
    pub allowed: Vec<Vec<u64>>,
}

pub struct World {
    // Dropped first: it waits for operations in flight.
    pub reactor: Reactor,
    pub owner: RoutedBacking,
    pub served: Option<Rc<RefCell<ServedDisk>>>,
    pub mounted: Option<Arc<Mounted>>,
    pub way: Way,
    pub coordinator: LoopDevice,
    pub path: LoopDevice,
    pub epoch: u64,
    /// Something has happened to the coordinator's side.
    pub touched: bool,
    /// The owner has asked for a path.
    pub wants_path: bool,
    /// The coordinator begins redirected I/O in another order than it comes.
    pub shuffles: bool,
    pub size: u64,
    pub events: Vec<Event>,
    pub done: Vec<Completion>,
    pub asked: BTreeMap<u64, Asked>,
    pub next: u64,
    /// Versions that each block may have: the last is the newest, and before it those that are not surely overwritten.
    pub versions: Vec<Vec<u64>>,
    pub region: Rc<Region>,
    pub rng: fastrand::Rng,
    pub clones: Vec<(String, Vec<u64>)>,
    pub change: u64,
    pub errors: Vec<IoError>,
    /// The client takes the data of reads, and sends them to nobody.
    pub keeps: bool,
    pub kept: Vec<Buffer>,
}

/// Longest times for which requests wait.
pub struct Waits {
    pub coordinator: Duration,
    pub full_volume: Duration,
}

impl World {
    pub fn new(format: &str, size: u64, way: Way, has_path: bool, seed: u64) -> Option<World> {
        // However busy the machine is.
        let waits = Waits { coordinator: SOON, full_volume: Duration::ZERO };
        World::with_waits(format, size, way, has_path, seed, waits)
    }

    pub fn with_waits(
        format: &str,
        size: u64,
        way: Way,
        has_path: bool,
        seed: u64,
        waits: Waits,
    ) -> Option<World> {
        let coordinator = LoopDevice::new(LUN)?;
        let mut words = format.split(' ');
        run(Command::new(words.next().unwrap()).args(words).arg(&coordinator.device));
        let path = coordinator.second_path();
        let mounted = Arc::new(Mounted::new(&coordinator.device).unwrap());
        mounted.create("disk").unwrap().set_len(size).unwrap();
        mounted.sync().unwrap();
        let mut reactor = common::reactor(Engine::Auto);
        let uuid = mounted.superblock().uuid;
        let lun = has_path.then(|| SharedFile::new(open_lun(&path.device, uuid, None, true, None).unwrap()));
        let Waits { coordinator: coordinator_wait, full_volume: full_volume_wait } = waits;
        let options =
            RoutedOptions { size, logical_block: 4096, depth: 64, coordinator_wait, full_volume_wait };
        let mut owner = RoutedBacking::new(&mut reactor, lun, options).unwrap();
        owner.own(7, &Arc::new(AtomicU64::new(u64::MAX)));
        let mut world = World {
            reactor,
            owner,
            served: None,
            mounted: Some(mounted),
            way,
            coordinator,
            path,
            epoch: 1,
            touched: true,
            wants_path: false,
            shuffles: false,
            size,
            events: Vec::new(),
            done: Vec::new(),
            asked: BTreeMap::new(),
            next: 0,
            versions: vec![vec![0]; (size / BLOCK) as usize],
            region: Rc::new(Region::new(4 << 20).unwrap()),
            rng: fastrand::Rng::with_seed(seed),
            clones: Vec::new(),
            change: 0,
            errors: Vec::new(),
            keeps: false,
            kept: Vec::new(),
        };
        world.serve(false);
        world.connect();
        Some(world)
    }

    /// This node coordinates.
    pub fn serve(&mut self, has_owner: bool) {
        let opened =
            OpenedDisk::open(self.mounted.as_ref().unwrap(), "disk", Mark::of("coordinator")).unwrap();
        let owner = has_owner.then_some(7);
        let rng = fastrand::Rng::with_seed(SEED);
        let shuffle = || Box::new(Shuffle { rng, leaving: BTreeSet::new() }) as Box<dyn Dispatch>;
        let dispatch = self.shuffles.then(shuffle);
        let served = ServedDisk::new(&mut self.reactor, opened, self.epoch, owner, dispatch).unwrap();
        self.served = Some(Rc::new(RefCell::new(served)));
    }

    pub fn connect(&mut self) {
        let served = Rc::clone(self.served.as_ref().unwrap());
        if self.way == Way::Here {
            return self.owner.connect_here(&mut self.reactor, &served);
        }
        // What has arrived at a TCP socket may be more than one read takes.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mine = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        self.touched = true;
        served.borrow_mut().connect(&mut self.reactor, other.into(), 100).unwrap();
        self.owner.connect(&mut self.reactor, mine.into()).unwrap();
    }

    pub fn disconnect(&mut self) {
        self.owner.disconnect(&mut self.reactor, None);
    }

    pub fn turn(&mut self) {
        self.owner.advance(&mut self.reactor, &mut self.done);
        // It stays without, if it has none.
        self.wants_path |= self.owner.wants_path(self.reactor.now());
        // As a shard does: when something has happened to it.
        if let Some(served) = &self.served {
            let mut served = served.borrow_mut();
            let is_due = served.waits() || served.deadline() <= self.reactor.now();
            if std::mem::take(&mut self.touched) || is_due {
                served.advance(&mut self.reactor);
            }
        }
        for completion in std::mem::take(&mut self.done) {
            self.completed(completion);
        }
        let soon = self.reactor.now() + Duration::from_millis(1);
        let served = self.served.as_ref().map_or(Nanos::NEVER, |served| served.borrow().deadline());
        let deadline = self.owner.deadline().min(served).min(soon);
        self.reactor.wait(deadline, &mut self.events).unwrap();
        for event in std::mem::take(&mut self.events) {
            match &self.served {
                Some(served) if event.token.owner == served.borrow().id() => {
                    self.touched = true;
                    served.borrow_mut().on_event(&mut self.reactor, event);
                }
                _ => self.owner.on_event(&mut self.reactor, event),
            }
        }
    }

    pub fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut World) -> bool) {
        let deadline = Nanos::now() + SOON;
        while !is_so(self) {
            if Nanos::now() >= deadline {
                let path = Command::new("blockdev").arg("--getro").arg(&self.path.device).output().unwrap();
                let is_read_only = path.stdout.starts_with(b"1");
                let counts = self.owner.counts();
                panic!("{what}: {} in flight, {counts:?}, path read-only: {is_read_only}", self.asked.len());
            }
            self.turn();
        }
    }

    pub fn drain(&mut self) {
        self.until("requests do not end", |world| world.asked.is_empty());
    }

    pub fn ask(&mut self, kind: RequestKind, blocks: std::ops::Range<u64>) {
        self.next += 1;
        let (version, tag) = (self.next, Tag(self.next));
        let (offset, length) = (blocks.start * BLOCK, (blocks.end - blocks.start) * BLOCK);
        let range = blocks.start as usize..blocks.end as usize;
        let allowed = match kind {
            RequestKind::Read => self.versions[range.clone()].to_vec(),
            _ => Vec::new(),
        };
        if kind.changes_data() {
            let kept = if kind == RequestKind::Write { version } else { version | ZERO };
            self.versions[range].iter_mut().for_each(|versions| versions.push(kept));
            for asked in self.asked.values_mut().filter(|asked| asked.kind == RequestKind::Read) {
                let reads = asked.blocks.clone();
                for block in blocks.clone().filter(|block| reads.contains(block)) {
                    asked.allowed[(block - reads.start) as usize].push(kept);
                }
            }
        }
        self.asked.insert(version, Asked { kind, blocks: blocks.clone(), version, allowed });
        let reactor = &mut self.reactor;
        let fua = version.is_multiple_of(5);
        match kind {
            RequestKind::Read => {
                let buffer = reactor.buffers().take(length as usize).unwrap();
                self.owner.submit(reactor, Request::Read { tag, offset, buffer });
            }
            RequestKind::Write if version.is_multiple_of(3) && length <= MIB => {
                // As the destage does: pieces of memory that are one run of the disk. Each place is used again after 4 requests.
                let place = (version / 3 % 4) as usize * MIB as usize;
                if self.asked.values().any(|one| one.version != version && one.version % 12 == version % 12) {
                    let bytes = content(&blocks, version);
                    let payload = Payload::Lent(&bytes);
                    return self.owner.submit(reactor, Request::Write { tag, offset, payload, fua });
                }
                self.region.copy_in(place, &content(&blocks, version));
                let half = (length / 2) as usize / BLOCK as usize * BLOCK as usize;
                let pieces = [(place, half), (place + half, length as usize - half)];
                let pieces = pieces.into_iter().filter(|piece| piece.1 > 0).collect();
                self.owner.write_gather(reactor, tag, offset, Rc::clone(&self.region), pieces);
            }
            RequestKind::Write => {
                let mut buffer = reactor.buffers().take(length as usize).unwrap();
                buffer.bytes_mut().copy_from_slice(&content(&blocks, version));
                let payload = Payload::Given(buffer);
                self.owner.submit(reactor, Request::Write { tag, offset, payload, fua });
            }
            RequestKind::WriteZeroes => {
                let may_unmap = version.is_multiple_of(2);
                self.owner.submit(
                    reactor,
                    Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only: false },
                );
            }
            RequestKind::Discard => {
                self.owner.submit(reactor, Request::Discard { tag, offset, length, fua });
            }
            RequestKind::Flush => self.owner.submit(reactor, Request::Flush { tag }),
            RequestKind::Extents => unreachable!("not asked here"),
        }
    }

    pub fn completed(&mut self, Completion { tag, result }: Completion) {
        let Asked { kind, blocks, version, allowed } = self.asked.remove(&tag.0).unwrap();
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(error) => return self.errors.push(error),
        };
        if let (RequestKind::Read, Outcome::Read(buffer)) = (kind, &outcome) {
            for (block, allowed) in blocks.clone().zip(allowed) {
                let at = ((block - blocks.start) * BLOCK) as usize;
                let found = version_of(block, &buffer.bytes()[at..at + BLOCK as usize]);
                let is_allowed = allowed.iter().any(|one| shown(*one) == found);
                assert!(is_allowed, "read {version} of block {block}: version {found}, not of {allowed:?}");
            }
            if self.keeps
                && let Outcome::Read(buffer) = outcome
            {
                self.kept.push(buffer);
            }
        } else if kind.changes_data() {
            // What was asked for before and overlaps was done before.
            for versions in &mut self.versions[blocks.start as usize..blocks.end as usize] {
                let own = versions.iter().position(|one| one & !ZERO == version);
                if let Some(own) = own {
                    versions.drain(..own);
                }
            }
        }
    }

    /// A request of a random kind within the first blocks.
    pub fn ask_any(&mut self, blocks: u64) {
        let start = self.rng.u64(0..blocks);
        let most = if self.rng.u8(0..10) == 0 { 400 } else { 8 };
        let end = (start + self.rng.u64(1..=most)).min(blocks);
        let kind = match self.rng.u8(0..40) {
            0..14 => RequestKind::Read,
            14..36 => RequestKind::Write,
            36 => RequestKind::WriteZeroes,
            37 => RequestKind::Discard,
            _ => RequestKind::Flush,
        };
        match kind {
            RequestKind::Flush => self.ask(kind, 0..0),
            _ => self.ask(kind, start..end),
        }
    }

    /// Requests at a depth, with `fault` now and then.
    pub fn load(&mut self, requests: u64, blocks: u64, mut fault: impl FnMut(&mut World)) {
        let end = self.next + requests;
        while self.next < end {
            while self.asked.len() < 24 && self.next < end {
                self.ask_any(blocks);
                fault(self);
            }
            self.turn();
        }
    }

    /// Reads all of it.
    pub fn read_all(&mut self) {
        for start in (0..self.size / BLOCK).step_by(256) {
            self.ask(RequestKind::Read, start..(start + 256).min(self.size / BLOCK));
            self.until("reads do not end", |world| world.asked.len() < 24);
        }
        self.drain();
    }

    pub fn set_path(&mut self, is_there: bool) {
        let device = File::open(&self.path.device).unwrap();
        let read_only = libc::c_int::from(!is_there);
        // SAFETY: the kernel reads a number that outlives the call.
        let answer = unsafe { libc::ioctl(device.as_raw_fd(), BLKROSET, &raw const read_only) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
        if is_there {
            self.owner.admitted();
        }
    }

    /// As when the device of the path is gone from its host: one that is still open has no bytes any more.
    pub fn end_path(&mut self) {
        let device = File::open(&self.path.device).unwrap();
        let mut info = [0u64; LOOP_INFO];
        // SAFETY: the kernel writes a structure of this size.
        assert_eq!(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS, info.as_mut_ptr()) }, 0);
        // Less than a sector.
        info[LOOP_SIZE_LIMIT] = 1;
        // SAFETY: the kernel reads a structure of this size.
        let answer = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS, info.as_ptr()) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    }

    /// The owner gets another path, if it takes one.
    pub fn offer_path(&mut self, path: &LoopDevice) {
        let uuid = self.mounted.as_ref().unwrap().superblock().uuid;
        let lun = open_lun(&path.device, uuid, None, true, None).unwrap();
        self.owner.reach(SharedFile::new(lun));
    }

    /// As when its host crashes: the filesystem writes nothing more.
    pub fn crash_coordinator(&mut self) {
        self.disconnect();
        let file = self.mounted.as_ref().unwrap().open("disk").unwrap();
        // SAFETY: the kernel reads a number that outlives the call.
        let answer = unsafe { libc::ioctl(file.as_raw_fd(), GOINGDOWN, &raw const NOLOGFLUSH) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
        drop(file);
        self.end_coordinator();
    }

    /// Whatever writes to the filesystem stands still until the value is dropped: as when its LUN hangs.
    pub fn freeze(&self) -> Frozen {
        let file = self.mounted.as_ref().unwrap().open("disk").unwrap();
        // SAFETY: the kernel reads no argument.
        let answer = unsafe { libc::ioctl(file.as_raw_fd(), FIFREEZE, 0) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
        Frozen(file)
    }

    pub fn reasons(&self) -> Vec<&'static str> {
        weir_volume::Backing::route(&self.owner).unwrap().reasons.iter().map(|one| one.name()).collect()
    }

    /// Writes to the first blocks until each of them is granted: grants arrive one after the other.
    pub fn make_direct(&mut self, blocks: u64) {
        self.until("not everything is granted", |world| {
            let before = world.owner.counts().file;
            (0..blocks).for_each(|block| world.ask(RequestKind::Write, block..block + 1));
            world.drain();
            world.owner.counts().file == before
        });
    }

    pub fn end_coordinator(&mut self) {
        self.touched = true;
        self.served.as_ref().unwrap().borrow_mut().stop(&mut self.reactor);
        self.until("the coordinator does not stop", |world| {
            world.served.as_ref().unwrap().borrow().is_over()
        });
        self.disconnect();
        self.served = None;
        let mounted = self.mounted.take().unwrap();
        assert_eq!(Arc::strong_count(&mounted), 1);
        drop(mounted);
    }

    pub fn mount_again(&mut self) {
        exclusive(&self.coordinator.device).unwrap();
        self.mounted = Some(Arc::new(Mounted::new(&self.coordinator.device).unwrap()));
        self.epoch += 1;
        self.serve(true);
        self.connect();
    }

    /// Clones the disk, with the load going on.
    pub fn clone_disk(&mut self) {
        self.change += 1;
        let (change, name) = (self.change, format!("clone-{}", self.change));
        let clone = self.mounted.as_ref().unwrap().create(&name).unwrap();
        self.touched = true;
        let served = Rc::clone(self.served.as_ref().unwrap());
        let range = (0, self.size);
        served.borrow_mut().change(
            &mut self.reactor,
            change,
            range,
            Box::new(move |disk| {
                // SAFETY: two descriptors.
                match unsafe { libc::ioctl(clone.as_raw_fd(), FICLONE, disk.as_raw_fd()) } {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            }),
        );
        self.until("a clone is not made", |_| {
            let changed = served.borrow_mut().changed();
            changed.iter().for_each(|(_, result)| result.unwrap());
            !changed.is_empty()
        });
        let versions = self.file_versions(&name);
        self.clones.push((name, versions));
    }

    /// What a file has, through the filesystem.
    pub fn file_versions(&self, name: &str) -> Vec<u64> {
        let file = self.mounted.as_ref().unwrap().open(name).unwrap();
        let mut buffer = self.reactor.buffers().take(MIB as usize).unwrap();
        let mut versions = Vec::new();
        for start in (0..self.size).step_by(MIB as usize) {
            let length = MIB.min(self.size - start) as usize;
            file.read_exact_at(&mut buffer.bytes_mut()[..length], start).unwrap();
            let blocks = buffer.bytes()[..length].chunks(BLOCK as usize);
            versions.extend((start / BLOCK..).zip(blocks).map(|(block, bytes)| version_of(block, bytes)));
        }
        versions
    }

    /// Everything that was acknowledged is in the file, no clone has changed, and the filesystem is clean.
    pub fn end(mut self) -> RouteCounts {
        self.drain();
        self.ask(RequestKind::Flush, 0..0);
        self.drain();
        assert_eq!(self.errors, []);
        self.read_all();
        let counts = self.owner.counts();
        let found = self.file_versions("disk");
        for (block, (found, allowed)) in found.into_iter().zip(&self.versions).enumerate() {
            assert!(
                allowed.iter().any(|one| shown(*one) == found),
                "block {block} of the file: version {found}, not of {allowed:?}"
            );
        }
        for (name, versions) in &self.clones {
            assert!(self.file_versions(name) == *versions, "{name} has changed");
        }
        self.end_coordinator();
        check_filesystem(&self.coordinator.device);
        counts
    }
}

pub fn check_filesystem(device: &Path) {
    let kind = Command::new("blkid").args(["-s", "TYPE", "-o", "value"]).arg(device).output().unwrap();
    match String::from_utf8(kind.stdout).unwrap().trim() {
        "ext4" => run(Command::new("e2fsck").arg("-fn").arg(device)),
        _ => run(Command::new("xfs_repair").arg("-n").arg(device)),
    }
}

/// A version that is zeroes.
pub const ZERO: u64 = 1 << 63;

/// What a block of this version shows.
pub fn shown(version: u64) -> u64 {
    if version & ZERO != 0 { 0 } else { version }
}

pub fn content(blocks: &std::ops::Range<u64>, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; ((blocks.end - blocks.start) * BLOCK) as usize];
    for (block, bytes) in blocks.clone().zip(bytes.chunks_exact_mut(BLOCK as usize)) {
        for (at, piece) in bytes.chunks_exact_mut(16).enumerate() {
            let number = u128::from(block << 16 | at as u64);
            piece.copy_from_slice(&(number << 64 | u128::from(version)).to_le_bytes());
        }
    }
    bytes
}

/// The version of a block; 0: zeroes. All of it is of one version, and of this block.
pub fn version_of(block: u64, bytes: &[u8]) -> u64 {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let expected = if version == 0 { vec![0; BLOCK as usize] } else { content(&(block..block + 1), version) };
    assert!(bytes == expected, "block {block} is torn, or another block's, or of no version ({version})");
    version
}

pub const SEED: u64 = 42;
