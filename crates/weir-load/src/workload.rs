//! The description of a load, in fio's terms.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weir_block::size::{Size, format_size};

use crate::arrivals::Arrivals;
use crate::io_engine::IoEngine;
use crate::pattern::{BlockMix, Pattern, PatternError};

/// Smallest unit of offsets and lengths, in bytes.
pub const SECTOR: u32 = 512;

/// Largest block size, in bytes: the largest request that the NBD protocol recommends (32 MiB).
pub const LARGEST_BLOCK: u32 = 32 << 20;

/// Most requests in flight per thread.
pub const DEEPEST_QUEUE: u32 = 4096;

/// Most threads.
pub const MOST_THREADS: u32 = 256;

/// Order of offsets and mix of kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Access {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Sequential reads and writes, mixed.
    Rw {
        /// Reads, in percent of the requests, 0 to 100.
        read_percent: u8,
    },
    /// Reads at uniformly random blocks.
    RandRead,
    /// Writes at uniformly random blocks.
    RandWrite,
    /// Reads and writes at uniformly random blocks.
    RandRw {
        /// Reads, in percent of the requests, 0 to 100.
        read_percent: u8,
    },
}

impl Access {
    /// Whether any request is a write.
    #[must_use]
    pub fn writes(self) -> bool {
        match self {
            Access::Write | Access::RandWrite => true,
            Access::Rw { read_percent } | Access::RandRw { read_percent } => read_percent < 100,
            Access::Read | Access::RandRead => false,
        }
    }

    /// Whether offsets are random.
    #[must_use]
    pub fn is_random(self) -> bool {
        !matches!(self, Access::Read | Access::Write | Access::Rw { .. })
    }

    /// Reads, in percent of the requests.
    #[must_use]
    pub fn read_percent(self) -> u8 {
        match self {
            Access::Read | Access::RandRead => 100,
            Access::Write | Access::RandWrite => 0,
            Access::Rw { read_percent } | Access::RandRw { read_percent } => read_percent,
        }
    }
}

impl FromStr for Access {
    type Err = WorkloadError;

    /// `read`, `write`, `rw`, `randread`, `randwrite`, `randrw` (half reads), `rw:70` or `randrw:70` (70 % reads).
    /// `readwrite` is `rw`, as in fio.
    fn from_str(text: &str) -> Result<Access, WorkloadError> {
        let unknown = || WorkloadError::UnknownAccess(text.into());
        let (word, percent) = match text.split_once(':') {
            Some((word, percent)) => (word, Some(percent)),
            None => (text, None),
        };
        match (word.to_ascii_lowercase().as_str(), percent) {
            ("read", None) => Ok(Access::Read),
            ("write", None) => Ok(Access::Write),
            ("randread", None) => Ok(Access::RandRead),
            ("randwrite", None) => Ok(Access::RandWrite),
            (word @ ("rw" | "readwrite" | "randrw"), percent) => {
                let read_percent =
                    match percent.map(|percent| (percent, percent.trim_end_matches('%').parse())) {
                        None => 50,
                        Some((_, Ok(percent @ 0..=100))) => percent,
                        Some((text, _)) => return Err(WorkloadError::ReadPercent(text.into())),
                    };
                match word {
                    "randrw" => Ok(Access::RandRw { read_percent }),
                    _ => Ok(Access::Rw { read_percent }),
                }
            }
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Read => f.pad("read"),
            Access::Write => f.pad("write"),
            Access::RandRead => f.pad("randread"),
            Access::RandWrite => f.pad("randwrite"),
            Access::Rw { read_percent } => f.pad(&format!("rw:{read_percent}")),
            Access::RandRw { read_percent } => f.pad(&format!("randrw:{read_percent}")),
        }
    }
}

impl From<Access> for String {
    fn from(access: Access) -> String {
        access.to_string()
    }
}

impl TryFrom<String> for Access {
    type Error = WorkloadError;
    fn try_from(text: String) -> Result<Access, WorkloadError> {
        text.parse()
    }
}

/// One load: requests, depth, range and duration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Workload {
    /// Order of offsets and mix of kinds.
    pub access: Access,
    /// Order of offsets within that.
    pub pattern: Pattern,
    /// Bytes per request: a multiple of 512, at most 32 MiB. With a mix, the largest of its sizes.
    pub block_size: Size,
    /// Several sizes, each with its share of the requests; `None` when all have the same.
    pub mix: Option<BlockMix>,
    /// Random offsets are multiples of it, a multiple of 512; `None` for the (smallest) block size.
    pub alignment: Option<Size>,
    /// Requests in flight per thread, 1 to 4096.
    pub queue_depth: u32,
    /// Threads, each with its own connection (or ring) and queue, 1 to 256. Sequential and verifying loads
    /// give each thread its own part of the range.
    pub threads: u32,
    /// Duration, in seconds; `None` means until the load has requested `bytes`, or else as many bytes as the range has.
    #[serde(rename = "runtime_seconds", alias = "runtime", with = "crate::seconds::option")]
    pub runtime: Option<Duration>,
    /// Ends the load when it has requested so many bytes, over all threads, the warm-up's included.
    pub bytes: Option<Size>,
    /// Warm-up: load before `runtime` that does not count.
    #[serde(rename = "warmup_seconds", alias = "warmup", with = "crate::seconds")]
    pub warmup: Duration,
    /// First byte of the range, a multiple of the block size.
    pub offset: Size,
    /// Bytes of the range; `None` means up to the end of the target.
    pub size: Option<Size>,
    /// Intended requests per second, over all threads; `None` means as many as the target takes.
    /// With a rate, latency counts from the intended start (an open loop: a stalled target is not spared).
    pub rate: Option<u64>,
    /// The distribution of a rate's starts over time.
    pub arrivals: Arrivals,
    /// Seed of the random offsets and of the data: the same seed asks for the same blocks.
    pub seed: u64,
    /// Writes carry stamps, and reads are checked against the history of writes.
    pub verify: bool,
    /// Each write is durable before it is answered.
    pub fua: bool,
    /// Each thread flushes after so many of its writes, at least 1; `None` for never.
    pub flush_every: Option<u64>,
    /// Zeroes in written data, in percent: approximately the saving of a compressing target.
    pub compress_percent: u8,
    /// The system calls to use, when the target is a file or a block device.
    pub engine: IoEngine,
    /// Poll for completions instead of waiting for interrupts; with `io_uring`, on a device that can be polled.
    pub poll: bool,
    /// Writes that repeat the payload of the previous write in the same slot, in percent; the others are unique.
    pub repeat_percent: u8,
}

impl Default for Workload {
    /// 4 KiB random reads at depth 32 for ten seconds.
    fn default() -> Workload {
        Workload {
            access: Access::RandRead,
            pattern: Pattern::Plain,
            block_size: Size(4096),
            mix: None,
            alignment: None,
            queue_depth: 32,
            threads: 1,
            runtime: Some(Duration::from_secs(10)),
            bytes: None,
            warmup: Duration::ZERO,
            offset: Size(0),
            size: None,
            rate: None,
            arrivals: Arrivals::Fixed,
            seed: 1,
            verify: false,
            fua: false,
            flush_every: None,
            compress_percent: 0,
            engine: IoEngine::IoUring,
            poll: false,
            repeat_percent: 0,
        }
    }
}

/// The defect of a workload, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// An unknown word for the access pattern.
    #[error(
        "unknown access `{0}`: use read, write, rw, randread, randwrite, randrw, rw:<percent of reads> or randrw:<percent of reads>"
    )]
    UnknownAccess(String),
    /// Not a percentage.
    #[error("`{0}` is not a percentage of reads: use a whole number from 0 to 100, as in randrw:70")]
    ReadPercent(String),
    /// A block size that no request can have.
    #[error(
        "block size {0} is not possible: it must be a multiple of 512 bytes, at least 512, at most 32MiB"
    )]
    BlockSize(Size),
    /// No queue or too deep a queue.
    #[error("queue depth {0} is not possible: use 1 to {DEEPEST_QUEUE}, and more threads for more")]
    QueueDepth(u32),
    /// No thread or too many.
    #[error("{0} threads are not possible: use 1 to {MOST_THREADS}")]
    Threads(u32),
    /// A runtime of zero.
    #[error(
        "a runtime of zero measures nothing: give at least some milliseconds, or no runtime for one pass over the range"
    )]
    Runtime,
    /// A rate of zero.
    #[error("a rate of zero asks for nothing: leave it out to ask for as much as the target takes")]
    Rate,
    /// The range starts off a block.
    #[error("offset {offset} is not a multiple of {unit}, of which every request's offset is a multiple")]
    Offset {
        /// As given.
        offset: Size,
        /// The alignment, or the smallest block size.
        unit: Size,
    },
    /// A mix whose largest size is not the block size.
    #[error("block size {block_size} is not the largest of the mix {mix}")]
    Mix {
        /// As given.
        block_size: Size,
        /// As given.
        mix: BlockMix,
    },
    /// An alignment that no offset can have, or that has no effect.
    #[error("alignment {0} is not possible: it must be a multiple of 512 bytes, and needs random offsets")]
    Alignment(Size),
    /// A pattern for the other kind of access.
    #[error("pattern {pattern} is for {needed} access, not for {access}")]
    Pattern {
        /// As given.
        pattern: Pattern,
        /// As given.
        access: Access,
        /// `random` or `sequential`.
        needed: &'static str,
    },
    /// A stride that is not made of blocks.
    #[error("stride {stride} is not possible: it must be a multiple of the one block size, {block_size}")]
    Stride {
        /// As given.
        stride: Size,
        /// As given.
        block_size: Size,
    },
    /// Verification of blocks that can overlap, or that threads share.
    #[error(
        "verify needs blocks that do not overlap: one block size, its own alignment, and no shared sequence"
    )]
    Verify,
    /// Poisson without a rate.
    #[error("Poisson arrivals need a rate: say how many requests of a second are meant")]
    Arrivals,
    /// Rounds of no length.
    #[error("rounds until a steady state need a runtime: that of one round")]
    Rounds,
    /// Flushes without writes.
    #[error("flushes come after writes: give a writing access, and at least 1 write to each flush")]
    Flush,
    /// Not a percentage.
    #[error("{0} % of the data is not possible: use 0 to 100")]
    DataPercent(u8),
    /// Several requests at once from an engine that issues one at a time.
    #[error(
        "engine psync makes one request of a thread at a time, not {0}: use queue depth 1, and more threads for more"
    )]
    Psync(u32),
    /// Polling with an engine, or for requests, that cannot be polled.
    #[error("polling needs engine io_uring and no flushes: the kernel polls for reads and writes only")]
    Poll,
    /// A limit of zero bytes.
    #[error("zero bytes ask for nothing: leave the limit out, or give at least a block")]
    Bytes,
    /// An invalid pattern or mix.
    #[error(transparent)]
    Text(#[from] PatternError),
    /// The range does not fit the target.
    #[error("the range ends at {end} but the target has only {target}: give a smaller size or offset")]
    Beyond {
        /// End of the range.
        end: Size,
        /// Size of the target.
        target: Size,
    },
    /// Less than a block for some thread.
    #[error(
        "{range} bytes are too few for {threads} thread(s) with blocks of {block_size}: give a larger size"
    )]
    TooSmall {
        /// Bytes of the range.
        range: Size,
        /// As given.
        threads: u32,
        /// As given.
        block_size: Size,
    },
}

/// A piece of a target, in bytes: whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Workload {
    /// Checks everything that does not need the target.
    ///
    /// # Errors
    /// The first defect.
    pub fn validate(&self) -> Result<(), WorkloadError> {
        self.validate_blocks()?;
        self.validate_pattern()?;
        if self.queue_depth == 0 || self.queue_depth > DEEPEST_QUEUE {
            return Err(WorkloadError::QueueDepth(self.queue_depth));
        }
        if self.threads == 0 || self.threads > MOST_THREADS {
            return Err(WorkloadError::Threads(self.threads));
        }
        if self.runtime == Some(Duration::ZERO) {
            return Err(WorkloadError::Runtime);
        }
        if self.rate == Some(0) {
            return Err(WorkloadError::Rate);
        }
        if self.arrivals == Arrivals::Poisson && self.rate.is_none() {
            return Err(WorkloadError::Arrivals);
        }
        if self.flush_every == Some(0) || (self.flush_every.is_some() && !self.access.writes()) {
            return Err(WorkloadError::Flush);
        }
        if let Some(&percent) =
            [self.compress_percent, self.repeat_percent].iter().find(|&&percent| percent > 100)
        {
            return Err(WorkloadError::DataPercent(percent));
        }
        if self.engine == IoEngine::Psync && self.queue_depth != 1 {
            return Err(WorkloadError::Psync(self.queue_depth));
        }
        if self.poll && (self.engine != IoEngine::IoUring || self.flush_every.is_some()) {
            return Err(WorkloadError::Poll);
        }
        if self.bytes == Some(Size(0)) {
            return Err(WorkloadError::Bytes);
        }
        if !self.offset.0.is_multiple_of(self.unit().0) {
            return Err(WorkloadError::Offset { offset: self.offset, unit: self.unit() });
        }
        Ok(())
    }

    fn validate_blocks(&self) -> Result<(), WorkloadError> {
        let is_multiple = |size: Size| size.0 > 0 && size.0.is_multiple_of(u64::from(SECTOR));
        for size in self.sizes() {
            if !is_multiple(size) || size.0 > u64::from(LARGEST_BLOCK) {
                return Err(WorkloadError::BlockSize(size));
            }
        }
        if let Some(mix) = &self.mix
            && mix.largest() != self.block_size
        {
            return Err(WorkloadError::Mix { block_size: self.block_size, mix: mix.clone() });
        }
        match self.alignment {
            Some(unit) if !is_multiple(unit) || !self.access.is_random() => {
                Err(WorkloadError::Alignment(unit))
            }
            _ => Ok(()),
        }
    }

    fn validate_pattern(&self) -> Result<(), WorkloadError> {
        let Workload { pattern, access, block_size, .. } = *self;
        if let Some(random) = pattern.needs_random()
            && random != access.is_random()
        {
            let needed = if random { "random" } else { "sequential" };
            return Err(WorkloadError::Pattern { pattern, access, needed });
        }
        if let Pattern::Stride { bytes } = pattern
            && (self.mix.is_some() || bytes.0 == 0 || !bytes.0.is_multiple_of(block_size.0))
        {
            return Err(WorkloadError::Stride { stride: bytes, block_size });
        }
        let overlaps = self.mix.is_some() || self.alignment.is_some_and(|unit| unit != block_size);
        if self.verify && (overlaps || pattern == Pattern::Shared) {
            return Err(WorkloadError::Verify);
        }
        Ok(())
    }

    /// Every size that a request can have.
    fn sizes(&self) -> impl Iterator<Item = Size> {
        let mixed = self.mix.iter().flat_map(|mix| mix.shares().iter().map(|share| share.0));
        std::iter::once(self.block_size).chain(mixed)
    }

    /// The unit of random offsets (from the start of the range): the alignment, or the smallest block size.
    #[must_use]
    pub fn unit(&self) -> Size {
        let smallest = self.mix.as_ref().map_or(self.block_size, BlockMix::smallest);
        self.alignment.unwrap_or(smallest)
    }

    /// Whether all requests are multiples of `minimum` bytes and none is larger than `maximum`.
    #[must_use]
    pub fn fits(&self, minimum: u64, maximum: u64) -> bool {
        let mut values = self.sizes().chain([self.unit(), self.offset]);
        values.all(|size| size.0.is_multiple_of(minimum)) && self.block_size.0 <= maximum
    }

    /// The range that each thread works on, for a target of `target` bytes.
    ///
    /// Sequential and verifying threads divide the range; random ones, and those with one common sequence, all use the whole
    /// range.
    ///
    /// # Errors
    /// As [`Workload::validate`], and a range that does not fit the target.
    pub fn spans(&self, target: u64) -> Result<Vec<Span>, WorkloadError> {
        self.validate()?;
        let block = self.block_size.0;
        let length = self.size.map_or(target.saturating_sub(self.offset.0), |size| size.0);
        let end = self.offset.0.saturating_add(length);
        if end > target {
            return Err(WorkloadError::Beyond { end: Size(end), target: Size(target) });
        }
        let shared = self.verify || !(self.access.is_random() || self.pattern == Pattern::Shared);
        let parts = if shared { u64::from(self.threads) } else { 1 };
        let part = length / block / parts * block;
        if part == 0 {
            let (threads, block_size) = (self.threads, self.block_size);
            return Err(WorkloadError::TooSmall { range: Size(length), threads, block_size });
        }
        let start = |thread: u64| self.offset.0 + if shared { thread * part } else { 0 };
        Ok((0..u64::from(self.threads)).map(|thread| Span { offset: start(thread), length: part }).collect())
    }
}

impl fmt::Display for Workload {
    /// One line, as a table's title: `randread 4KiB depth 32`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.access)?;
        if self.pattern != Pattern::Plain {
            write!(f, " {}", self.pattern)?;
        }
        match &self.mix {
            None => write!(f, " {}", format_size(self.block_size.0))?,
            Some(mix) => write!(f, " {mix}")?,
        }
        write!(f, " depth {}", self.queue_depth)?;
        if self.threads > 1 {
            write!(f, " x {} threads", self.threads)?;
        }
        if let Some(rate) = self.rate {
            let poisson = if self.arrivals == Arrivals::Poisson { " Poisson" } else { "" };
            write!(f, " at {rate}/s{poisson}")?;
        }
        if let Some(writes) = self.flush_every {
            write!(f, " flush every {writes}")?;
        }
        for (on, word) in [(self.fua, "fua"), (self.verify, "verify")] {
            if on {
                write!(f, " {word}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_printed() {
        for text in ["read", "write", "rw:30", "randread", "randwrite", "randrw:70"] {
            assert_eq!(text.parse::<Access>().unwrap().to_string(), text);
        }
        assert_eq!("randrw".parse(), Ok(Access::RandRw { read_percent: 50 }));
        assert_eq!("RandRW:30%".parse(), Ok(Access::RandRw { read_percent: 30 }));
        assert!("randrw:101".parse::<Access>().unwrap_err().to_string().contains("0 to 100"));
        assert!("trim".parse::<Access>().unwrap_err().to_string().contains("randwrite"));
        assert!("read:50".parse::<Access>().is_err());
    }

    #[test]
    fn errors_name_the_value_and_the_remedy() {
        let base = Workload::default();
        let cases = [
            (Workload { block_size: Size(1000), ..base.clone() }, "multiple of 512"),
            (Workload { block_size: Size(0), ..base.clone() }, "at least 512"),
            (Workload { block_size: Size(64 << 20), ..base.clone() }, "64MiB"),
            (Workload { queue_depth: 0, ..base.clone() }, "queue depth 0"),
            (Workload { queue_depth: 5000, ..base.clone() }, "more threads"),
            (Workload { threads: 0, ..base.clone() }, "1 to 256"),
            (Workload { runtime: Some(Duration::ZERO), ..base.clone() }, "zero"),
            (Workload { rate: Some(0), ..base.clone() }, "rate of zero"),
            (Workload { offset: Size(512), ..base.clone() }, "not a multiple of 4KiB"),
            (Workload { alignment: Some(Size(100)), ..base.clone() }, "alignment 100"),
            (Workload { pattern: Pattern::Shared, ..base.clone() }, "for sequential access"),
            (Workload { mix: "4k:50,8k:50".parse().ok(), ..base.clone() }, "not the largest"),
            (Workload { arrivals: Arrivals::Poisson, ..base.clone() }, "need a rate"),
            (Workload { bytes: Some(Size(0)), ..base.clone() }, "zero bytes"),
            (Workload { flush_every: Some(1), ..base.clone() }, "after writes"),
            (Workload { access: Access::Write, flush_every: Some(0), ..base.clone() }, "at least 1 write"),
            (Workload { compress_percent: 101, ..base.clone() }, "0 to 100"),
            (Workload { engine: IoEngine::Psync, ..base.clone() }, "queue depth 1"),
            (
                Workload { engine: IoEngine::Psync, queue_depth: 1, poll: true, ..base.clone() },
                "needs engine io_uring",
            ),
            (
                Workload { verify: true, alignment: Some(Size(512)), ..base.clone() },
                "blocks that do not overlap",
            ),
            (
                Workload {
                    access: Access::Read,
                    pattern: Pattern::Stride { bytes: Size(6144) },
                    ..base.clone()
                },
                "multiple of the one block size",
            ),
        ];
        for (workload, hint) in cases {
            let error = workload.validate().unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
        assert!(base.validate().is_ok());
    }

    #[test]
    fn spans_fit_the_target() {
        let workload = Workload { threads: 3, access: Access::Write, ..Workload::default() };
        let spans = workload.spans(10 * 4096 + 100).unwrap();
        assert_eq!(spans.iter().map(|span| span.offset).collect::<Vec<_>>(), [0, 3 * 4096, 6 * 4096]);
        assert!(spans.iter().all(|span| span.length == 3 * 4096));
        let random = Workload { threads: 2, offset: Size(4096), ..Workload::default() };
        assert_eq!(random.spans(3 * 4096).unwrap(), vec![Span { offset: 4096, length: 8192 }; 2]);
        let beyond = Workload { size: Some(Size(1 << 20)), ..Workload::default() };
        assert!(beyond.spans(4096).unwrap_err().to_string().contains("ends at 1MiB"));
        assert!(workload.spans(4096).unwrap_err().to_string().contains("too few"));
    }

    #[test]
    fn serde_keeps_the_words() {
        let workload = Workload { access: Access::RandRw { read_percent: 70 }, ..Workload::default() };
        let text = serde_json::to_string(&workload).unwrap();
        assert!(text.contains("\"randrw:70\""), "{text}");
        assert_eq!(serde_json::from_str::<Workload>(&text).unwrap(), workload);
        assert!(serde_json::from_str::<Workload>("{\"acess\":\"read\"}").is_err());
    }
}
