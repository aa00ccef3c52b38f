//! Random requests against every kind of storage and both engines, compared with a `Vec<u8>`.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;

use common::{LoopDevice, Mount, Shard, options, reactor, scratch, scratch_in_memory};
use fastrand::Rng;
use weir_block::{
    Completion, Destage, Engine, ExtentState, Layer, Outcome, Payload, Region, Request, RequestKind, Tag,
};
use weir_volume::EngineChoice;

const SIZE: u64 = 6 << 20;
const REQUESTS: u64 = 1500;

/// The expected result of a request in flight.
enum Expected {
    Data(Vec<u8>),
    Done,
    Extents(u64, u64),
}

struct Run {
    shard: Shard,
    oracle: Vec<u8>,
    rng: Rng,
    region: Rc<Region>,
    /// By tag: the range, so that requests in flight never overlap, and the result.
    in_flight: HashMap<u64, (u64, u64, Expected)>,
    block: u64,
}

impl Run {
    fn new(mut shard: Shard, seed: u64) -> Run {
        let mut rng = Rng::with_seed(seed);
        let region = Rc::new(Region::new(4 << 20).unwrap());
        let mut noise = vec![0; region.len()];
        rng.fill(&mut noise);
        region.copy_in(0, &noise);
        let info = shard.backing.info();
        assert_eq!(info.size, SIZE);
        // A device starts with its old content.
        let oracle = shard.read(0, SIZE as usize).unwrap();
        Run { shard, oracle, rng, region, in_flight: HashMap::new(), block: u64::from(info.logical_block) }
    }

    fn range(&mut self) -> (u64, u64) {
        let blocks = SIZE / self.block;
        let most = if self.rng.u8(..) < 16 { blocks / 2 } else { 64 };
        let offset = self.rng.u64(..blocks);
        let length = self.rng.u64(1..=most.min(blocks - offset));
        (offset * self.block, length * self.block)
    }

    fn overlaps(&self, offset: u64, length: u64) -> bool {
        self.in_flight.values().any(|&(start, size, _)| offset < start + size && start < offset + length)
    }

    fn step(&mut self, tag: u64) {
        let (offset, length) = self.range();
        while self.overlaps(offset, length) || !self.shard.backing.has_room(RequestKind::Write, length) {
            self.turn();
        }
        let (tag_id, fua) = (Tag(tag), self.rng.u8(..) < 12);
        let (from, to) = (offset as usize, (offset + length) as usize);
        let expected = match self.rng.u8(..100) {
            0..35 => {
                let mut data = vec![0; length as usize];
                self.rng.fill(&mut data);
                self.oracle[from..to].copy_from_slice(&data);
                let payload = if self.rng.bool() {
                    let mut buffer = self.shard.reactor.buffers().take(data.len()).unwrap();
                    buffer.bytes_mut().copy_from_slice(&data);
                    Payload::Given(buffer)
                } else {
                    Payload::Lent(&data)
                };
                self.shard.submit(Request::Write { tag: tag_id, offset, payload, fua });
                Expected::Done
            }
            35..45 => {
                let pieces = self.pieces(length);
                let bytes = pieces.iter().flat_map(|&(start, size)| self.region.bytes(start, size).to_vec());
                self.oracle.splice(from..to, bytes);
                let region = Rc::clone(&self.region);
                self.shard.backing.write_gather(&mut self.shard.reactor, tag_id, offset, region, pieces);
                Expected::Done
            }
            45..75 => {
                let buffer = self.shard.reactor.buffers().take(length as usize).unwrap();
                self.shard.submit(Request::Read { tag: tag_id, offset, buffer });
                Expected::Data(self.oracle[from..to].to_vec())
            }
            75..83 => {
                self.oracle[from..to].fill(0);
                let may_unmap = self.rng.bool();
                self.shard.submit(Request::WriteZeroes {
                    tag: tag_id,
                    offset,
                    length,
                    fua,
                    may_unmap,
                    fast_only: false,
                });
                Expected::Done
            }
            83..90 => {
                self.oracle[from..to].fill(0);
                self.shard.submit(Request::Discard { tag: tag_id, offset, length, fua });
                Expected::Done
            }
            90..95 => {
                self.shard.submit(Request::Extents { tag: tag_id, offset, length });
                Expected::Extents(offset, length)
            }
            _ => {
                self.shard.submit(Request::Flush { tag: tag_id });
                self.in_flight.insert(tag, (0, 0, Expected::Done));
                return;
            }
        };
        self.in_flight.insert(tag, (offset, length, expected));
        if self.rng.u8(..4) == 0 {
            self.turn();
        }
    }

    /// Pieces of the region, on 512-byte bounds, multiples of the block, together `length` long.
    fn pieces(&mut self, length: u64) -> Vec<(usize, usize)> {
        let mut left = length;
        let mut pieces = Vec::new();
        while left > 0 {
            let size = self.rng.u64(1..=(left / self.block).min(8)) * self.block;
            let start = self.rng.usize(..(self.region.len() - size as usize) / 512) * 512;
            pieces.push((start, size as usize));
            left -= size;
        }
        pieces
    }

    fn turn(&mut self) {
        self.shard.turn();
        for completion in std::mem::take(&mut self.shard.done) {
            self.check(completion);
        }
    }

    fn check(&mut self, completion: Completion) {
        let (_, _, expected) = self.in_flight.remove(&completion.tag.0).expect("answered once");
        match (expected, completion.result.unwrap()) {
            (Expected::Done, Outcome::Done) => {}
            (Expected::Data(data), Outcome::Read(buffer)) => {
                assert!(data == buffer.bytes(), "read what was written (P7)")
            }
            (Expected::Extents(offset, length), Outcome::Extents(extents)) => {
                let mut at = offset;
                for extent in extents {
                    assert_eq!(extent.offset, at, "extents are consecutive");
                    at += extent.length;
                    let bytes = &self.oracle[extent.offset as usize..at as usize];
                    assert!(extent.state == ExtentState::Allocated || bytes.iter().all(|&byte| byte == 0));
                }
                assert!(at > offset && at <= offset + length);
            }
            (_, outcome) => panic!("unexpected {outcome:?}"),
        }
    }

    fn finish(mut self) {
        while !self.in_flight.is_empty() {
            self.turn();
        }
        let read = self.shard.read(0, SIZE as usize).unwrap();
        assert!(read == self.oracle);
        self.shard.flush().unwrap();
        let path = self.shard.backing.path().to_path_buf();
        drop(self.shard);
        assert!(std::fs::read(path).unwrap() == self.oracle, "other tools see the same bytes");
    }
}

fn run(path: &Path, choice: EngineChoice, engine: Engine, seed: u64) {
    println!("{} {choice:?} {engine:?} seed {seed}", path.display());
    let shard = Shard::new(reactor(engine), path, &options(choice));
    let mut run = Run::new(shard, seed);
    for tag in 0..REQUESTS {
        run.step(tag);
    }
    run.finish();
}

/// Every engine on a file in `directory`.
fn run_all(directory: &Path) {
    let combinations = [
        (EngineChoice::Auto, Engine::Uring),
        (EngineChoice::Auto, Engine::Epoll),
        (EngineChoice::Reactor, Engine::Uring),
        (EngineChoice::Inline, Engine::Uring),
    ];
    for (seed, (choice, engine)) in combinations.into_iter().enumerate() {
        let path = directory.join(format!("{seed}.raw"));
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        run(&path, choice, engine, seed as u64);
    }
}

#[test]
fn files_on_the_builds_own_filesystem() {
    run_all(scratch().path());
}

#[test]
fn files_in_memory() {
    run_all(scratch_in_memory().path());
}

#[test]
fn files_on_xfs() {
    if let Some(mount) = Mount::new("mkfs.xfs", 320 << 20) {
        run_all(&mount.path);
    }
}

#[test]
fn files_on_ext4_of_small_blocks() {
    if let Some(mount) = Mount::new("mkfs.ext4", 64 << 20) {
        run_all(&mount.path);
    }
}

#[test]
fn files_without_direct_io() {
    // With its data in the journal, ext4 takes no direct I/O.
    if let Some(mount) = Mount::new("mkfs.ext4", 64 << 20) {
        common::run(std::process::Command::new("umount").arg(&mount.path));
        let mut command = std::process::Command::new("mount");
        common::run(command.args(["-o", "data=journal"]).arg(mount.device()).arg(&mount.path));
        run_all(&mount.path);
    }
}

#[test]
fn a_block_device() {
    if let Some(device) = LoopDevice::new(SIZE) {
        for (seed, engine) in [Engine::Uring, Engine::Epoll].into_iter().enumerate() {
            run(&device.device, EngineChoice::Auto, engine, 100 + seed as u64);
        }
    }
}

#[test]
fn a_file_shorter_than_its_disk() {
    let directory = scratch();
    for (seed, engine) in [Engine::Uring, Engine::Epoll].into_iter().enumerate() {
        let path = directory.path().join(format!("{seed}.raw"));
        // Ends off a sector boundary, where direct I/O stops short.
        std::fs::write(&path, vec![7; 100_700]).unwrap();
        let options = weir_volume::BackingOptions { size: Some(SIZE), ..Default::default() };
        let shard = Shard::new(reactor(engine), &path, &options);
        let mut run = Run::new(shard, 200 + seed as u64);
        let mut expected = vec![7; 100_700];
        expected.resize(SIZE as usize, 0);
        assert!(run.oracle == expected);
        for tag in 0..REQUESTS {
            run.step(tag);
        }
        // The file may still end before the disk does.
        run.oracle.resize(SIZE as usize, 0);
        while !run.in_flight.is_empty() {
            run.turn();
        }
        assert!(run.shard.read(0, SIZE as usize).unwrap() == run.oracle);
    }
}
