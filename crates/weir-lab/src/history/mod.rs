//! Recorded histories of a disk's sectors, and the check that they are linearizable (P2, P4, P7).
//!
//! A sector is a register. Several clients write and read it at the same time, each operation from a moment at which it was sent
//! to one at which its answer came. The history is *linearizable* when each operation can be given one moment between the two at
//! which it takes effect, so that each read returns what was written last. Linearizability is local (Herlihy and Wing 1990):
//! the disk's history has it exactly when the history of each of its sectors has it, so each is checked by itself.
//!
//! Each write of a sector carries a value that no other write carries. Then no search is needed: Gibbons and Korach (*Testing
//! shared memories*, 1997) decide it in `n log n` steps; `check.rs` tells how. The slow search stands beside it as
//! the oracle of its tests.

mod check;
mod explain;
#[cfg(test)]
mod oracle;
mod sector;
#[cfg(test)]
mod tests;

use weir_block::Nanos;

pub use check::{Judgement, Violation, Witness};
pub use sector::{SECTOR, fill, value_of};

/// The value of a sector that no client has written.
pub const INITIAL: u64 = 0;

/// The value of a read whose data is no value of this sector: a part of a write, another sector, or anything else.
pub const FOREIGN: u64 = u64::MAX;

/// The action of an operation on its sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Brings the value out.
    Read,
    /// Puts the value in.
    Write,
}

/// One operation of one client on one sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The client.
    pub client: u16,
    /// The node that it was connected to, by number from 1.
    pub node: u16,
    /// The client's connection, by number from 1.
    pub connection: u32,
    /// The sector.
    pub register: u64,
    /// Read or write.
    pub action: Action,
    /// The value that was read or written: [`INITIAL`], [`FOREIGN`] (reads only), or a number that no other write of the
    /// sector carries.
    pub value: u64,
    /// Before it was sent. Later than 0.
    pub invoked: Nanos,
    /// After it was answered. `None` for a write whose outcome is not known: it may take effect at any later time, or never.
    /// A read without an answer tells nothing and is ignored.
    pub completed: Option<Nanos>,
}

/// The operations of several clients on the sectors of one disk.
#[derive(Clone, Debug, Default)]
pub struct History {
    operations: Vec<Operation>,
}

impl History {
    /// The operations, in no particular order.
    #[must_use]
    pub fn new(operations: Vec<Operation>) -> History {
        History { operations }
    }

    /// Adds what another client did.
    pub fn append(&mut self, operations: &mut Vec<Operation>) {
        self.operations.append(operations);
    }

    /// Adds another history of the same disk. No two writes of a sector may carry the same value, here as anywhere.
    pub fn extend(&mut self, mut other: History) {
        self.append(&mut other.operations);
    }

    /// All operations.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Judges the whole history, sector by sector.
    #[must_use]
    pub fn judge(&self) -> Judgement {
        check::judge(&self.operations)
    }
}
