//! Random operations on a disk's file and on a model of it, as fsx does them: each read must return what was written last.

use std::fs::File;
use std::os::unix::fs::FileExt;

use fastrand::Rng;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use super::{Aligned, alone, bench, open};
use crate::common::{Bench, seed};

/// The part of the disk that is used, in bytes.
const SPAN: usize = 2 << 20;

/// Longest read or write: longer than the kernel's longest request would be rare on a span of this size.
const LONGEST: usize = 192 << 10;

/// Operations without `WEIR_FSX`.
const USUAL: usize = 6000;

struct Fsx<'a> {
    bench: &'a Bench,
    random: Rng,
    model: Vec<u8>,
    direct: File,
    buffered: File,
}

impl Fsx<'_> {
    /// A range; of whole sectors for direct I/O.
    fn range(&mut self, direct: bool, longest: usize) -> (usize, usize) {
        let unit = if direct { 512 } else { 1 };
        // Mostly short ones.
        let most = 1 + self.random.usize(..longest);
        let length = (1 + self.random.usize(..most)).div_ceil(unit) * unit;
        let offset = self.random.usize(..=(SPAN - length) / unit) * unit;
        (offset, length)
    }

    fn file(&self, direct: bool) -> &File {
        if direct { &self.direct } else { &self.buffered }
    }

    fn write(&mut self, direct: bool) -> String {
        let (offset, length) = self.range(direct, LONGEST);
        let mut data = Aligned::new(length);
        self.random.fill(data.bytes());
        self.file(direct).write_all_at(data.bytes(), offset as u64).unwrap();
        self.model[offset..offset + length].copy_from_slice(data.bytes());
        format!("write {offset}+{length} direct={direct}")
    }

    fn read(&mut self, direct: bool) -> String {
        let (offset, length) = self.range(direct, LONGEST);
        self.check(direct, offset, length);
        format!("read {offset}+{length} direct={direct}")
    }

    fn check(&self, direct: bool, offset: usize, length: usize) {
        let mut data = Aligned::new(length);
        self.file(direct).read_exact_at(data.bytes(), offset as u64).unwrap();
        let expected = &self.model[offset..offset + length];
        if let Some(at) = data.bytes().iter().zip(expected).position(|(one, other)| one != other) {
            panic!("byte {} of {offset}+{length} (direct={direct}) is not what was written", offset + at);
        }
    }

    fn zero(&mut self, flags: FallocateFlags) -> String {
        let direct = self.random.bool();
        let (offset, length) = self.range(false, LONGEST);
        fallocate(self.file(direct), flags, offset as u64, length as u64).unwrap();
        self.model[offset..offset + length].fill(0);
        format!("fallocate {flags:?} {offset}+{length}")
    }

    /// Nothing before the data that is found may be anything but zeroes, and nothing in a hole.
    fn seek(&mut self) -> String {
        let offset = self.random.usize(..SPAN);
        let data =
            seek(&self.buffered, SeekFrom::Data(offset as u64)).map_or(SPAN, |at| (at as usize).min(SPAN));
        assert!(data >= offset, "data found before {offset}");
        assert!(
            self.model[offset..data].iter().all(|&byte| byte == 0),
            "data between {offset} and {data} was not found"
        );
        let hole = seek(&self.buffered, SeekFrom::Hole(offset as u64)).unwrap() as usize;
        assert!(hole >= offset, "a hole found before {offset}");
        if hole < SPAN {
            // It may end with the block.
            let end = (hole / 512 + 1) * 512;
            assert!(self.model[hole..end].iter().all(|&byte| byte == 0), "no hole at {hole}");
        }
        format!("seek {offset}: data {data}, hole {hole}")
    }

    fn step(&mut self) -> String {
        let direct = self.random.bool();
        match self.random.u32(..100) {
            0..38 => self.write(direct),
            38..76 => self.read(direct),
            76..83 => self.zero(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
            83..88 => self.zero(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE),
            88..93 => self.seek(),
            93..97 => {
                self.file(direct).sync_data().unwrap();
                "sync".to_owned()
            }
            97..99 => {
                (self.direct, self.buffered) = (open(self.bench, "n1", true), open(self.bench, "n1", false));
                "open again".to_owned()
            }
            _ => {
                self.check(direct, 0, SPAN);
                "read all".to_owned()
            }
        }
    }
}

fn run(policy: &str) {
    let _turn = alone();
    let steps = std::env::var("WEIR_FSX").ok().and_then(|steps| steps.parse().ok()).unwrap_or(USUAL);
    let random = Rng::with_seed(seed());
    let bench = bench(1, policy);
    let (direct, buffered) = (open(&bench, "n1", true), open(&bench, "n1", false));
    let mut fsx = Fsx { bench: &bench, random, model: vec![0; SPAN], direct, buffered };
    let mut last: Vec<String> = Vec::new();
    for step in 0..steps {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fsx.step()));
        match outcome {
            Ok(did) => {
                last.push(did);
                if last.len() > 20 {
                    last.remove(0);
                }
            }
            Err(panic) => {
                eprintln!("operation {step} fails; before it: {last:#?}{}", bench.logs());
                std::panic::resume_unwind(panic);
            }
        }
    }
    fsx.check(true, 0, SPAN);
    eprintln!("{steps} operations under {policy}");
}

#[test]
fn random_operations_behave_as_on_a_plain_file_in_write_back() {
    run("write-back+0");
}

#[test]
fn random_operations_behave_as_on_a_plain_file_in_write_through() {
    run("write-through");
}
