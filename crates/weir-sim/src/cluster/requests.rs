//! Requests of the simulation's clients, and the blocks that they write and read.

use weir_block::{Nanos, Outcome};

use crate::scale::BLOCK;

/// The version of a block with mixed or invalid content.
pub const CORRUPT: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Read,
    Write,
    Flush,
}

impl RequestKind {
    pub fn of_layer(self) -> weir_block::RequestKind {
        match self {
            RequestKind::Read => weir_block::RequestKind::Read,
            RequestKind::Write => weir_block::RequestKind::Write,
            RequestKind::Flush => weir_block::RequestKind::Flush,
        }
    }

    pub fn bytes(self) -> u64 {
        if self == RequestKind::Flush { 0 } else { BLOCK as u64 }
    }
}

/// A request; a write's value is unique.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub client: usize,
    pub session: u64,
    pub kind: RequestKind,
    pub block: usize,
    pub value: u64,
    pub began: u64,
    pub sent: Nanos,
}

/// The version in a read's result; 0 for everything else.
pub fn value_block(outcome: &Outcome) -> u64 {
    match outcome {
        Outcome::Read(buffer) => value_in(buffer.bytes()),
        _ => 0,
    }
}

/// The content of a block of this version.
pub fn block_of(value: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
    block
}

/// The version in a block; [`CORRUPT`] if it has none.
pub fn value_in(block: &[u8]) -> u64 {
    let mut words = block.chunks_exact(8);
    let first = words.next().unwrap_or(&[0; 8]);
    let value = u64::from_le_bytes(first.try_into().expect("eight bytes"));
    if words.all(|word| word == first) { value } else { CORRUPT }
}
