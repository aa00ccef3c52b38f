//! What is to be asked of a target, in fio's words.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::size::{Size, format_size};

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
    /// Reads at uniformly random blocks.
    RandRead,
    /// Writes at uniformly random blocks.
    RandWrite,
    /// Reads and writes at uniformly random blocks.
    RandRw {
        /// How many of a hundred requests are reads, 0 to 100.
        read_percent: u8,
    },
}

impl Access {
    /// Whether any request is a write.
    #[must_use]
    pub fn writes(self) -> bool {
        match self {
            Access::Write | Access::RandWrite => true,
            Access::RandRw { read_percent } => read_percent < 100,
            Access::Read | Access::RandRead => false,
        }
    }

    /// Whether offsets are random.
    #[must_use]
    pub fn is_random(self) -> bool {
        !matches!(self, Access::Read | Access::Write)
    }

    /// How many of a hundred requests are reads.
    #[must_use]
    pub fn read_percent(self) -> u8 {
        match self {
            Access::Read | Access::RandRead => 100,
            Access::Write | Access::RandWrite => 0,
            Access::RandRw { read_percent } => read_percent,
        }
    }
}

impl FromStr for Access {
    type Err = WorkloadError;

    /// `read`, `write`, `randread`, `randwrite`, `randrw` (half reads) or `randrw:70` (70 % reads).
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
            ("randrw", None) => Ok(Access::RandRw { read_percent: 50 }),
            ("randrw", Some(percent)) => match percent.trim_end_matches('%').parse() {
                Ok(read_percent @ 0..=100) => Ok(Access::RandRw { read_percent }),
                _ => Err(WorkloadError::ReadPercent(percent.into())),
            },
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

/// One load: what, how deep, where and for how long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Workload {
    /// Order of offsets and mix of kinds.
    pub access: Access,
    /// Bytes per request: a multiple of 512, at most 32 MiB.
    pub block_size: Size,
    /// Requests in flight per thread, 1 to 4096.
    pub queue_depth: u32,
    /// Threads, each with its own connection (or ring) and queue, 1 to 256. Sequential and verifying loads
    /// give each thread its own part of the range.
    pub threads: u32,
    /// How long, in seconds and nanoseconds; `None` means once over the range (as many requests as it has blocks).
    pub runtime: Option<Duration>,
    /// Load before `runtime` that is not counted.
    pub warmup: Duration,
    /// First byte of the range, a multiple of the block size.
    pub offset: Size,
    /// Bytes of the range; `None` means up to the end of the target.
    pub size: Option<Size>,
    /// Requests of a second that are intended, over all threads; `None` means as many as the target takes.
    /// With a rate, latency counts from the intended start (an open loop: a stalled target is not spared).
    pub rate: Option<u64>,
    /// Seed of the random offsets and of the data: the same seed asks for the same blocks.
    pub seed: u64,
    /// Writes carry stamps, reads are checked against what was written.
    pub verify: bool,
    /// Each write is durable before it is answered.
    pub fua: bool,
}

impl Default for Workload {
    /// 4 KiB random reads at depth 32 for ten seconds.
    fn default() -> Workload {
        Workload {
            access: Access::RandRead,
            block_size: Size(4096),
            queue_depth: 32,
            threads: 1,
            runtime: Some(Duration::from_secs(10)),
            warmup: Duration::ZERO,
            offset: Size(0),
            size: None,
            rate: None,
            seed: 1,
            verify: false,
            fua: false,
        }
    }
}

/// What is wrong with a workload, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// An unknown word for the access pattern.
    #[error(
        "unknown access `{0}`: use read, write, randread, randwrite, randrw or randrw:<percent of reads>"
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
    /// A time of nothing.
    #[error(
        "a runtime of zero measures nothing: give at least some milliseconds, or none for one pass over the range"
    )]
    Runtime,
    /// A rate of nothing.
    #[error("a rate of zero asks for nothing: leave it out to ask for as much as the target takes")]
    Rate,
    /// The range starts off a block.
    #[error("offset {offset} is not a multiple of the block size {block_size}")]
    Offset {
        /// As given.
        offset: Size,
        /// As given.
        block_size: Size,
    },
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
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), WorkloadError> {
        let block = self.block_size.0;
        if block == 0 || !block.is_multiple_of(u64::from(SECTOR)) || block > u64::from(LARGEST_BLOCK) {
            return Err(WorkloadError::BlockSize(self.block_size));
        }
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
        if !self.offset.0.is_multiple_of(block) {
            return Err(WorkloadError::Offset { offset: self.offset, block_size: self.block_size });
        }
        Ok(())
    }

    /// The range that each thread works on, for a target of `target` bytes.
    ///
    /// Sequential and verifying threads share the range out; random ones all work on the whole of it.
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
        let shared = self.verify || !self.access.is_random();
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
        write!(f, "{} {} depth {}", self.access, format_size(self.block_size.0), self.queue_depth)?;
        if self.threads > 1 {
            write!(f, " x {} threads", self.threads)?;
        }
        if let Some(rate) = self.rate {
            write!(f, " at {rate}/s")?;
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
        for text in ["read", "write", "randread", "randwrite", "randrw:70"] {
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
            (Workload { offset: Size(512), ..base.clone() }, "multiple of the block size 4KiB"),
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
