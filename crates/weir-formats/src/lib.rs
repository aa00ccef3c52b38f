//! Files of other programs, read and written: [`fio`]'s job files and results, and [`trace`]s of requests (blkparse, fio's
//! I/O logs, vscsi). A node links none of this.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod fio;
pub mod trace;
