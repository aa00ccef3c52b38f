//! Verifiable data, and the history of its writes.
//!
//! A verified block carries a stamp in each of its 512-byte sectors (`stamp.rs`): whose it is, where it
//! belongs, which version of the block it is, and checksums. A [`History`] remembers for every block which
//! versions were issued and which was acknowledged last. Together they tell a lost write from a stale one, a
//! torn from a misplaced one, and a foreign block from a corrupt one ([`Fault`]).
//!
//! The rule (P1, P4, P7): when nothing is in flight, a block holds its last acknowledged version, or one that
//! was issued later and never answered; whole, at its offset. What was once read stays (P7), so a read that
//! shows an unanswered version makes it the oldest that is allowed from then on.
//!
//! A [`Record`] is a history on disk that outlives the process which writes it.

mod file;
mod history;
mod layout;
mod record;
mod stamp;

pub use file::HistoryError;
pub use history::{Atomicity, Fault, History, Initial, Mismatch};
pub use layout::{Layout, LayoutError};
pub use record::Record;
pub use stamp::{Sector, read_sector, stamp};
