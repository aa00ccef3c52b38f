//! A backing at its limits: full storage, full queues, ends of disks, refusals.
#![allow(clippy::unwrap_used)]

mod common;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use common::{LoopDevice, Mount, Shard, done, options, reactor, run, scratch, scratch_in_memory};
use weir_block::buffer::LARGEST;
use weir_block::{
    Code, Completion, Destage, Engine, ErrorKind, ExtentState, Layer, Nanos, Outcome, Payload, Reactor,
    ReactorConfig, Region, Request, RequestKind, Tag,
};
use weir_volume::{BackingOptions, DirVolume, EngineChoice, FileBacking, StorageKind, VolumeError};

const MIB: u64 = 1 << 20;

fn file(directory: &tempfile::TempDir, size: u64) -> std::path::PathBuf {
    let path = directory.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    path
}

#[test]
fn a_full_filesystem_is_reported_and_recovers() {
    for engine in [Engine::Uring, Engine::Epoll] {
        let Some(mount) = Mount::new("mkfs.ext4", 24 << 20) else { return };
        let volume = DirVolume::open(&mount.path).unwrap();
        volume.create_disk("big", 64 * MIB).unwrap();
        let mut reactor = reactor(engine);
        let options = BackingOptions { full_volume_wait: Duration::ZERO, ..BackingOptions::default() };
        let backing = FileBacking::open(&mut reactor, &volume.disk_path("big").unwrap(), &options).unwrap();
        let mut shard = Shard::around(reactor, backing);
        let piece = vec![0x5a; MIB as usize];
        let full_at = (0..64).find_map(|i| shard.write(i * MIB, &piece).err().map(|error| (i, error)));
        let (full_at, error) = full_at.expect("64 MiB do not fit into 24");
        assert_eq!((error.kind, error.code, error.errno), (ErrorKind::Retry, Code::NoSpace, libc::ENOSPC));
        for i in 0..full_at {
            assert!(shard.read(i * MIB, piece.len()).unwrap() == piece, "completed writes stay");
        }
        assert!(shard.read(0, 4096).is_ok());
        let tag = Tag(1);
        shard.ask(Request::Discard { tag, offset: 0, length: 4 * MIB, fua: true }).map(done).unwrap();
        shard.write(full_at * MIB, &piece).expect("there is room again");
        shard.flush().unwrap();
        assert!(shard.read(full_at * MIB, piece.len()).unwrap() == piece);
        assert!(shard.read(0, piece.len()).unwrap().iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_full_memory_filesystem_is_reported_and_recovers() {
    let directory = scratch();
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=4m", "weir-test"]).arg(directory.path());
    if !mount.status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: may not mount here");
        return;
    }
    let path = file(&directory, 8 * MIB);
    let options = BackingOptions { full_volume_wait: Duration::from_secs(3), ..BackingOptions::default() };
    let mut shard = Shard::new(reactor(Engine::Auto), &path, &options);
    assert_eq!(shard.backing.storage_kind(), StorageKind::Memory);
    let (piece, mut began) = (vec![1; MIB as usize], Nanos::now());
    let error = (0..6).find_map(|at| {
        began = Nanos::now();
        shard.write(at * MIB, &piece).err()
    });
    assert_eq!(error.unwrap().code, Code::NoSpace);
    assert!(Nanos::now() - began >= Duration::from_secs(3), "it has waited");
    assert!(shard.backing.lacks_space(Nanos::now()));
    // Another one finds space in its time; what is there can be read, and freed, meanwhile.
    shard.submit(Request::Write { tag: Tag(2), offset: 6 * MIB, payload: Payload::Lent(&piece), fua: true });
    shard.turn();
    assert!(shard.done.is_empty() && shard.backing.lacks_space(Nanos::now()));
    shard.submit(Request::Discard { tag: Tag(1), offset: 0, length: 6 * MIB, fua: false });
    let answered = shard.drain();
    assert_eq!(answered.iter().map(|one| one.tag.0).collect::<Vec<_>>(), [1, 2]);
    assert!(answered.iter().all(|one| one.result.is_ok()) && !shard.backing.lacks_space(Nanos::now()));
    assert!(shard.read(6 * MIB, piece.len()).unwrap() == piece);
    shard.ask(Request::Discard { tag: Tag(1), offset: 0, length: 8 * MIB, fua: false }).map(done).unwrap();
    shard.write(0, &vec![2; 3 * MIB as usize]).unwrap();
    assert!(shard.read(0, 3 * MIB as usize).unwrap().iter().all(|&byte| byte == 2));
    drop(shard);
    run(std::process::Command::new("umount").arg(directory.path()));
}

/// A filesystem with no space left, and a disk on it, where writes wait for `wait`.
fn full_disk(engine: Engine, wait: Duration, choice: EngineChoice) -> Option<(Mount, Shard)> {
    let mount = Mount::new("mkfs.ext4", 24 << 20)?;
    let volume = DirVolume::open(&mount.path).unwrap();
    volume.create_disk("big", 64 * MIB).unwrap();
    let options = BackingOptions { full_volume_wait: wait, engine: choice, ..BackingOptions::default() };
    let shard = Shard::new(reactor(engine), &volume.disk_path("big").unwrap(), &options);
    let mut filler = std::fs::File::create(mount.path.join("filler")).unwrap();
    for piece in [1 << 20, 4096] {
        while std::io::Write::write_all(&mut filler, &vec![1; piece]).is_ok() {}
    }
    filler.sync_all().unwrap();
    Some((mount, shard))
}

/// Turns until nothing is in flight, or until `limit` is over.
fn answers_within(shard: &mut Shard, limit: Duration) -> Vec<Completion> {
    let end = Nanos::now() + limit;
    while shard.backing.in_flight() > 0 && Nanos::now() < end {
        shard.turn();
    }
    std::mem::take(&mut shard.done)
}

fn submit_writes(shard: &mut Shard, tags: std::ops::Range<u64>, fua: bool) {
    let bytes = vec![7; 64 << 10];
    for tag in tags {
        let (tag, offset) = (Tag(tag), tag * MIB);
        shard.submit(Request::Write { tag, offset, payload: Payload::Lent(&bytes), fua });
    }
}

#[test]
fn nothing_waits_for_space_after_the_end_of_all_waits() {
    for engine in [Engine::Uring, Engine::Epoll] {
        let Some((_mount, mut shard)) = full_disk(engine, Duration::from_secs(3), EngineChoice::Auto) else {
            return;
        };
        submit_writes(&mut shard, 0..4, false);
        while shard.reactor.files_in_flight() > 0 {
            shard.turn();
        }
        assert_eq!((shard.backing.in_flight(), shard.done.len()), (4, 0), "they wait");
        submit_writes(&mut shard, 4..12, false);
        let (length, fua) = (MIB, false);
        let (may_unmap, fast_only) = (false, false);
        let offset = 20 * MIB;
        shard.submit(Request::WriteZeroes { tag: Tag(12), offset, length, fua, may_unmap, fast_only });
        shard.backing.stop_waiting();
        let answers = answers_within(&mut shard, Duration::from_millis(1500));
        assert_eq!(answers.len(), 13, "those whose results came later, too");
        let codes = answers.into_iter().map(|answer| answer.result.unwrap_err().code);
        assert!(codes.into_iter().all(|code| code == Code::ShuttingDown));
    }
}

#[test]
fn what_destage_zeroes_does_not_wait_for_space() {
    let wait = Duration::from_secs(5);
    let Some((_mount, mut shard)) = full_disk(Engine::Auto, wait, EngineChoice::Auto) else { return };
    let (offset, length, fua, may_unmap, fast_only) = (4 * MIB, MIB, false, false, false);
    let zero = |tag| Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only };
    shard.submit(zero(Tag(1)));
    shard.backing.submit_destaged(&mut shard.reactor, zero(Tag(2)));
    let answers = answers_within(&mut shard, Duration::from_millis(1500));
    assert_eq!(answers.iter().map(|answer| answer.tag).collect::<Vec<_>>(), [Tag(2)]);
    assert!(answers.into_iter().all(|answer| answer.result.unwrap_err().code == Code::NoSpace));
    assert_eq!(shard.backing.in_flight(), 1, "the client's waits");
    let discard = Request::Discard { tag: Tag(3), offset: 0, length: MIB, fua: false };
    shard.backing.submit_destaged(&mut shard.reactor, discard);
    let answers = answers_within(&mut shard, Duration::from_millis(100));
    assert!(answers.len() == 1 && answers[0].result.is_ok());
    shard.backing.stop_waiting();
    assert_eq!(shard.drain().len(), 1);
}

#[test]
fn without_the_right_to_write_the_wait_for_space_ends_in_time() {
    let wait = Duration::from_secs(3);
    let Some((_mount, mut shard)) = full_disk(Engine::Auto, wait, EngineChoice::Auto) else { return };
    let until = Arc::new(AtomicU64::new((Nanos::now() + Duration::from_secs(1)).0));
    shard.reactor.guard(shard.backing.owner(), &until);
    submit_writes(&mut shard, 0..3, false);
    let answers = answers_within(&mut shard, wait + Duration::from_secs(2));
    assert_eq!(answers.len(), 3);
    assert!(answers.into_iter().all(|answer| answer.result.unwrap_err().code == Code::NoSpace));
}

#[test]
fn a_durable_write_that_fails_in_the_page_cache_may_report_an_earlier_one() {
    let wait = Duration::from_secs(3);
    let Some((mount, mut shard)) = full_disk(Engine::Auto, wait, EngineChoice::Inline) else { return };
    assert!(!shard.backing.is_direct());
    submit_writes(&mut shard, 0..1, true);
    let answers = answers_within(&mut shard, Duration::from_secs(1));
    assert_eq!(answers.len(), 1, "it does not wait");
    let code =
        |result: Result<Outcome, _>| result.map_err(|error: weir_block::IoError| error.code).unwrap_err();
    answers.into_iter().for_each(|answer| assert_eq!(code(answer.result), Code::NoSpace));
    std::fs::remove_file(mount.path.join("filler")).unwrap();
    assert_eq!(shard.flush().unwrap_err().code, Code::NoSpace, "what was lost may be another write's");
    shard.write(0, &[1; 4096]).unwrap();
}

#[test]
fn the_queue_is_bounded() {
    let directory = scratch();
    let path = file(&directory, MIB);
    let options = BackingOptions { depth: 8, ..BackingOptions::default() };
    let mut shard = Shard::new(reactor(Engine::Auto), &path, &options);
    for tag in 0..8 {
        assert!(shard.backing.has_room(RequestKind::Read, 4096));
        assert!(shard.backing.can_gather());
        let buffer = shard.reactor.buffers().take(4096).unwrap();
        shard.submit(Request::Read { tag: Tag(tag), offset: 4096 * tag, buffer });
    }
    for kind in RequestKind::ALL {
        assert!(!shard.backing.has_room(kind, 4096), "{kind:?}");
    }
    assert!(!shard.backing.can_gather());
    assert_eq!(shard.backing.in_flight(), 8);
    assert_eq!(shard.drain().len(), 8);
    assert!(shard.backing.has_room(RequestKind::Read, 4096));
}

#[test]
fn writes_continue_when_the_shards_buffers_are_exhausted() {
    let directory = scratch();
    let path = file(&directory, 64 * MIB);
    let config = ReactorConfig { buffer_limit: 64 << 10, ..ReactorConfig::default() };
    let mut shard = Shard::new(Reactor::new(config).unwrap(), &path, &BackingOptions::default());
    let held = shard.reactor.buffers().take(64 << 10).unwrap();
    assert!(!shard.reactor.buffers().has_room(1));
    shard.write(0, &[3; 4096]).unwrap();
    // The largest transfer fits when nothing else is in flight.
    shard.write(0, &vec![4; LARGEST]).unwrap();
    // Two do not fit: backpressure now, not an error later.
    let tag = Tag(1);
    shard.submit(Request::Write { tag, offset: 0, payload: Payload::Lent(&vec![5; LARGEST]), fua: false });
    assert!(!shard.backing.has_room(RequestKind::Write, 4096));
    assert!(shard.backing.can_gather(), "destaging needs no buffers");
    assert!(shard.drain().remove(0).result.is_ok());
    drop(held);
    assert!(shard.read(0, 4096).unwrap().iter().all(|&byte| byte == 5));
}

#[test]
fn a_flush_joins_only_a_sync_that_starts_after_it() {
    let directory = scratch();
    let path = file(&directory, MIB);
    let mut shard = Shard::new(reactor(Engine::Auto), &path, &BackingOptions::default());
    let before = shard.reactor.files_in_flight();
    for tag in 0..5 {
        shard.submit(Request::Flush { tag: Tag(tag) });
    }
    shard.backing.advance(&mut shard.reactor, &mut shard.done);
    assert_eq!(shard.reactor.files_in_flight(), before + 1, "five flushes, one sync");
    shard.submit(Request::Flush { tag: Tag(5) });
    shard.backing.advance(&mut shard.reactor, &mut shard.done);
    assert_eq!(shard.reactor.files_in_flight(), before + 1, "the later one waits");
    let mut answered = Vec::new();
    while answered.is_empty() {
        shard.turn();
        answered.append(&mut shard.done);
    }
    let mut tags: Vec<u64> = answered.iter().map(|completion| completion.tag.0).collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3, 4], "a sync completes only the flushes before it");
    let late = shard.drain();
    assert_eq!(late.len(), 1);
    assert_eq!(late[0].tag, Tag(5));
    assert!(late[0].result.is_ok());
}

#[test]
fn more_pieces_than_one_system_call_takes() {
    for (directory, choice) in [(scratch(), EngineChoice::Reactor), (scratch_in_memory(), EngineChoice::Auto)]
    {
        for engine in [Engine::Uring, Engine::Epoll] {
            let path = file(&directory, 4 * MIB);
            let mut shard = Shard::new(reactor(engine), &path, &options(choice));
            let region = Rc::new(Region::new(4 << 20).unwrap());
            let mut expected = Vec::new();
            let pieces: Vec<_> = (0..2500u32).map(|i| ((2500 - i as usize) * 1024, 512)).collect();
            for (i, &(start, length)) in pieces.iter().enumerate() {
                let piece = vec![(i % 251) as u8; length];
                region.copy_in(start, &piece);
                expected.extend(piece);
            }
            shard.backing.write_gather(&mut shard.reactor, Tag(9), 512, Rc::clone(&region), pieces);
            let mut answers = shard.drain();
            assert_eq!(answers.len(), 1);
            answers.remove(0).result.map(done).unwrap();
            assert!(shard.read(512, expected.len()).unwrap() == expected);
            assert_eq!(Rc::strong_count(&region), 1, "the region is released");
        }
    }
}

#[test]
fn zeroing_keeps_or_frees_space_and_refuses_when_slow() {
    use std::os::unix::fs::MetadataExt;
    let directory = scratch();
    let path = file(&directory, 8 * MIB);
    let mut shard = Shard::new(reactor(Engine::Auto), &path, &BackingOptions::default());
    let info = shard.backing.info();
    assert!(info.discards && info.fast_zeroes && shard.backing.is_direct());
    shard.write(0, &vec![1; 8 * MIB as usize]).unwrap();
    let blocks = || std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(blocks() >= 8 * MIB);
    let zero = |tag, may_unmap, fast_only| Request::WriteZeroes {
        tag,
        offset: 512,
        length: 4 * MIB,
        fua: true,
        may_unmap,
        fast_only,
    };
    shard.ask(zero(Tag(1), false, true)).map(done).unwrap();
    assert!(blocks() >= 8 * MIB, "the space is kept");
    shard.ask(zero(Tag(2), true, true)).map(done).unwrap();
    assert!(blocks() < 5 * MIB, "the space is freed");
    let read = shard.read(0, 8 * MIB as usize).unwrap();
    let zeroed = 512..512 + 4 * MIB as usize;
    assert!(read.iter().enumerate().all(|(i, &byte)| byte == u8::from(!zeroed.contains(&i))));
    let extents = match shard.ask(Request::Extents { tag: Tag(3), offset: 0, length: 8 * MIB }).unwrap() {
        Outcome::Extents(extents) => extents,
        other => panic!("{other:?}"),
    };
    assert_eq!(extents.iter().map(|extent| extent.length).sum::<u64>(), 8 * MIB);
    assert_eq!(extents[1].state, ExtentState::Hole);

    // A file in memory supports punching holes but not zeroing a range: zeroes that keep the space must be written, which is
    // slow.
    let directory = scratch_in_memory();
    let path = file(&directory, 8 * MIB);
    let mut shard = Shard::new(reactor(Engine::Auto), &path, &BackingOptions::default());
    shard.write(0, &vec![1; 8 * MIB as usize]).unwrap();
    assert_eq!(shard.ask(zero(Tag(1), false, true)).unwrap_err().code, Code::NotSupported);
    shard.ask(zero(Tag(2), false, false)).map(done).unwrap();
    assert!(shard.read(512, 4 * MIB as usize).unwrap().iter().all(|&byte| byte == 0));
    shard.ask(zero(Tag(3), true, true)).map(done).unwrap();
}

#[test]
fn a_disk_that_grows() {
    for (directory, choice) in [(scratch(), EngineChoice::Auto), (scratch_in_memory(), EngineChoice::Auto)] {
        let volume = DirVolume::open(directory.path()).unwrap();
        volume.create_disk("grows", MIB).unwrap();
        let mut reactor = reactor(Engine::Auto);
        let backing =
            FileBacking::open(&mut reactor, &volume.disk_path("grows").unwrap(), &options(choice)).unwrap();
        let mut shard = Shard::around(reactor, backing);
        shard.write(MIB - 4096, &[1; 4096]).unwrap();
        volume.lengthen("grows", 2 * MIB).unwrap();
        shard.backing.resize(2 * MIB).unwrap();
        assert_eq!(shard.backing.info().size, 2 * MIB);
        shard.write(2 * MIB - 4096, &[2; 4096]).unwrap();
        let read = shard.read(MIB - 4096, MIB as usize + 4096).unwrap();
        assert!(read[..4096].iter().all(|&byte| byte == 1));
        assert!(read[4096..MIB as usize].iter().all(|&byte| byte == 0));
        assert!(read[MIB as usize..].iter().all(|&byte| byte == 2));
    }
}

#[test]
fn a_read_only_disk_takes_no_changes() {
    let directory = scratch();
    let path = file(&directory, MIB);
    let options = BackingOptions { writable: false, ..BackingOptions::default() };
    let mut shard = Shard::new(reactor(Engine::Auto), &path, &options);
    assert!(!shard.backing.info().writable);
    assert_eq!(shard.write(0, &[1; 512]).unwrap_err().code, Code::ReadOnly);
    let discard = Request::Discard { tag: Tag(1), offset: 0, length: 512, fua: false };
    assert_eq!(shard.ask(discard).unwrap_err().code, Code::ReadOnly);
    let region = Rc::new(Region::new(4096).unwrap());
    shard.backing.write_gather(&mut shard.reactor, Tag(2), 0, region, vec![(0, 512)]);
    assert_eq!(shard.drain().remove(0).result.unwrap_err().code, Code::ReadOnly);
    assert!(shard.read(0, 512).unwrap().iter().all(|&byte| byte == 0));
    shard.flush().unwrap();
}

#[test]
fn a_device_that_loses_its_medium_reports_io_errors() {
    let Some(device) = LoopDevice::new(8 << 20) else { return };
    let mut shard = Shard::new(reactor(Engine::Auto), &device.device, &BackingOptions::default());
    assert_eq!(shard.backing.storage_kind(), StorageKind::Device);
    shard.write(7 * MIB, &[1; 4096]).unwrap();
    // Truncate the file of the device: bytes after its new end can no longer be read.
    let image = device.image();
    std::fs::OpenOptions::new().write(true).open(image).unwrap().set_len(MIB).unwrap();
    let error = shard.read(7 * MIB, 4096).unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Retry, Code::Io));
    assert!(shard.read(0, 4096).is_ok(), "the rest is still readable");
}

#[test]
fn refusals_at_opening_have_a_reason() {
    let directory = scratch();
    let path = file(&directory, MIB);
    let mut reactor = reactor(Engine::Auto);
    let mut open = |path: &std::path::Path, options: &BackingOptions| {
        FileBacking::open(&mut reactor, path, options).err().expect("refused")
    };
    let defaults = BackingOptions::default();
    assert!(matches!(open(&directory.path().join("none"), &defaults), VolumeError::NotFound(_)));
    assert!(matches!(open(directory.path(), &defaults), VolumeError::NotABacking(_)));
    let odd = directory.path().join("odd");
    std::fs::write(&odd, [1; 700]).unwrap();
    assert!(matches!(open(&odd, &defaults), VolumeError::InvalidSize { size: 700, .. }));
    let odd_block = BackingOptions { logical_block: Some(1024), ..BackingOptions::default() };
    assert!(matches!(open(&path, &odd_block), VolumeError::LogicalBlock { asked: 1024, .. }));
    let empty = BackingOptions { size: Some(0), ..BackingOptions::default() };
    assert!(matches!(open(&path, &empty), VolumeError::InvalidSize { size: 0, .. }));
    if let Some(mount) = Mount::new("mkfs.ext4", 16 << 20) {
        let error = open(mount.device(), &defaults);
        assert!(matches!(error, VolumeError::Busy(_)), "{error}");
        let larger = BackingOptions { size: Some(17 << 20), writable: false, ..BackingOptions::default() };
        assert!(matches!(open(mount.device(), &larger), VolumeError::InvalidSize { .. }));
    }
}

#[test]
fn a_device_of_large_sectors() {
    let Some(device) = LoopDevice::with_sectors(8 << 20, 4096) else { return };
    let mut reactor = reactor(Engine::Auto);
    let small = BackingOptions { logical_block: Some(512), ..BackingOptions::default() };
    let refused = FileBacking::open(&mut reactor, &device.device, &small).err().expect("refused");
    assert!(matches!(refused, VolumeError::LogicalBlock { asked: 512, able: 4096, .. }), "{refused}");
    let mut shard = Shard::new(reactor, &device.device, &BackingOptions::default());
    assert_eq!(shard.backing.info().logical_block, 4096);
    shard.write(4096, &[8; 4096]).unwrap();
    let region = Rc::new(Region::new(64 << 10).unwrap());
    region.copy_in(512, &[9; 8192]);
    shard.backing.write_gather(&mut shard.reactor, Tag(1), 8192, region, vec![(512, 8192)]);
    shard.drain().remove(0).result.map(done).unwrap();
    let read = shard.read(4096, 12288).unwrap();
    assert!(read[..4096].iter().all(|&byte| byte == 8) && read[4096..].iter().all(|&byte| byte == 9));
}
