//! Verifiable data, and the history of its writes.
//!
//! A verified block carries a stamp in each of its 512-byte sectors (`stamp.rs`): its run, its position, the block's version, and
//! checksums. A [`History`] has, for every block, the issued versions and the last acknowledged one. Together they distinguish a
//! lost write from a stale one, a torn from a misplaced one, and a foreign block from a corrupt one ([`Fault`]).
//!
//! The rule (P1, P4, P7): when nothing is in flight, a block holds its last acknowledged version, or one that
//! was issued later and never answered; whole, at its offset. Data once read stays (P7), so a read that returns an unanswered
//! version makes it the oldest allowed one from then on.
//!
//! A [`Record`] is a history on disk that outlives the process that writes it.

mod file;
mod history;
mod layout;
mod record;
mod stamp;
mod trail;

pub use file::HistoryError;
pub use history::{Atomicity, Fault, History, Initial, Mismatch};
pub use layout::{Layout, LayoutError};
pub use record::Record;
pub use stamp::{Sector, read_sector, stamp};
pub(crate) use trail::Step;
