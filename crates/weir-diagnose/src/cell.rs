//! What is asked of a layer.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Out of the disk.
    Read,
    /// Into the disk.
    Write,
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
    /// Which way the bytes go.
    pub direction: Direction,
}

/// One load: a shape at a queue depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cell {
    /// Block size, pattern, direction.
    #[serde(flatten)]
    pub shape: Shape,
    /// I/Os kept in flight, 1 or more. The loop is closed: each answer is followed by the next request.
    pub queue_depth: u32,
}

impl Shape {
    /// A shape of `block_bytes` per I/O.
    #[must_use]
    pub const fn new(block_bytes: u32, pattern: Pattern, direction: Direction) -> Shape {
        Shape { block_bytes, pattern, direction }
    }

    /// This shape at a queue depth.
    #[must_use]
    pub const fn at(self, queue_depth: u32) -> Cell {
        Cell { shape: self, queue_depth }
    }
}

impl Cell {
    /// The eight cells of the standard measurement: four shapes, each at queue depth 1 and 32.
    ///
    /// A log's writer (8K sequential write), a database's reads and writes (4K random), a backup (256K
    /// sequential read). Depth 1 shows what one I/O waits for, depth 32 what the way can carry.
    #[must_use]
    pub fn standard() -> Vec<Cell> {
        let shapes = [
            Shape::new(8 << 10, Pattern::Sequential, Direction::Write),
            Shape::new(4 << 10, Pattern::Random, Direction::Read),
            Shape::new(4 << 10, Pattern::Random, Direction::Write),
            Shape::new(256 << 10, Pattern::Sequential, Direction::Read),
        ];
        shapes.into_iter().flat_map(|shape| [shape.at(1), shape.at(32)]).collect()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pattern = match self.pattern {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
        };
        let direction = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        write!(f, "{} {pattern} {direction}", crate::format::block_size(self.block_bytes))
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, QD {}", self.shape, self.queue_depth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_cells_are_named_as_people_say_them() {
        let names: Vec<String> = Cell::standard().iter().map(Cell::to_string).collect();
        assert_eq!(names.len(), 8);
        assert_eq!(names[0], "8K sequential write, QD 1");
        assert_eq!(names[3], "4K random read, QD 32");
        assert_eq!(names[7], "256K sequential read, QD 32");
    }

    #[test]
    fn a_cell_is_flat_in_json() {
        let cell = Shape::new(4096, Pattern::Random, Direction::Read).at(32);
        let text = serde_json::to_string(&cell).unwrap();
        assert_eq!(text, r#"{"block_bytes":4096,"pattern":"random","direction":"read","queue_depth":32}"#);
        assert_eq!(serde_json::from_str::<Cell>(&text).unwrap(), cell);
    }
}
