//! One load of the matrix.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Share of reads in the mixed load of the matrix, in percent.
pub const MIXED_READS: u8 = 70;

/// The direction of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Out of the disk.
    Read,
    /// Into the disk.
    Write,
    /// Both: so many percent of the requests are reads, 1 to 99.
    Mixed(u8),
}

/// In which order the offsets come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// One block after the other.
    Sequential,
    /// Uniformly random.
    Random,
}

/// A cell without its queue depth: the cells of one shape are shown and compared together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    /// Bytes per I/O.
    pub block_bytes: u32,
    /// In which order the offsets come.
    pub pattern: Pattern,
    /// The direction.
    pub direction: Direction,
    /// Each write is durable before it is answered (FUA; unbuffered write-through in other words).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub write_through: bool,
}

/// One load: a shape at a queue depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cell {
    /// Block size, pattern, direction.
    #[serde(flatten)]
    pub shape: Shape,
    /// I/Os kept in flight by all threads together, 1 or more. The loop is closed: each answer is followed by the
    /// next request.
    pub queue_depth: u32,
    /// Threads that share the queue depth, 1 or more.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub threads: u32,
    /// Bytes of the target that are used, from its start; `None` means all that the measurement uses.
    #[serde(default, rename = "footprint_bytes", skip_serializing_if = "Option::is_none")]
    pub footprint: Option<u64>,
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
fn is_one(threads: &u32) -> bool {
    *threads == 1
}

impl Direction {
    /// Whether any request is a write.
    #[must_use]
    pub fn writes(self) -> bool {
        self != Direction::Read
    }
}

impl Shape {
    /// A shape of `block_bytes` per I/O, writes not forced through.
    #[must_use]
    pub const fn new(block_bytes: u32, pattern: Pattern, direction: Direction) -> Shape {
        Shape { block_bytes, pattern, direction, write_through: false }
    }

    /// The same, each write durable before it is answered.
    #[must_use]
    pub const fn through(self) -> Shape {
        Shape { write_through: true, ..self }
    }

    /// This shape at a queue depth, from one thread.
    #[must_use]
    pub const fn at(self, queue_depth: u32) -> Cell {
        Cell { shape: self, queue_depth, threads: 1, footprint: None }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pattern = match self.pattern {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
        };
        write!(f, "{} {pattern} ", weir_report::format::block_size(self.block_bytes))?;
        match self.direction {
            Direction::Read => f.write_str("read")?,
            Direction::Write => f.write_str("write")?,
            Direction::Mixed(reads) => write!(f, "{reads}/{}", 100 - reads.min(100))?,
        }
        f.write_str(if self.write_through { ", write-through" } else { "" })
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, QD {}", self.shape, self.queue_depth)?;
        if self.threads > 1 {
            write!(f, ", {} threads", self.threads)?;
        }
        match self.footprint {
            Some(bytes) => write!(f, ", on {} MiB", bytes >> 20),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_named_as_people_say_them() {
        let shape = Shape::new(8 << 10, Pattern::Sequential, Direction::Write);
        assert_eq!(shape.at(1).to_string(), "8K sequential write, QD 1");
        assert_eq!(Cell { threads: 2, ..shape.at(8) }.to_string(), "8K sequential write, QD 8, 2 threads");
        let mixed = Shape::new(4 << 10, Pattern::Random, Direction::Mixed(70));
        assert_eq!(mixed.through().at(32).to_string(), "4K random 70/30, write-through, QD 32");
    }

    #[test]
    fn a_cell_is_flat_in_json_and_says_only_what_is_unusual() {
        let cell = Shape::new(4096, Pattern::Random, Direction::Read).at(32);
        let text = serde_json::to_string(&cell).unwrap();
        assert_eq!(text, r#"{"block_bytes":4096,"pattern":"random","direction":"read","queue_depth":32}"#);
        assert_eq!(serde_json::from_str::<Cell>(&text).unwrap(), cell);
        let shape = Shape::new(4096, Pattern::Random, Direction::Mixed(70)).through();
        let unusual = Cell { threads: 4, ..shape.at(32) };
        let text = serde_json::to_string(&unusual).unwrap();
        assert!(text.contains(r#""direction":{"mixed":70},"write_through":true"#), "{text}");
        assert_eq!(serde_json::from_str::<Cell>(&text).unwrap(), unusual);
    }
}
