#![cfg_attr(test, allow(clippy::unwrap_used))]
//! Channels between nodes: frames over a stream socket, checksummed, pipelined and batched.
//!
//! This crate does not know what the messages mean. A frame has a *meta* part, covered by the frame's own
//! checksum, and a *data* part, whose checksums the sender puts into the meta part: write-log records are
//! summed once, when they are appended, and that sum travels and is stored with them (P11).

pub mod channel;
pub mod frame;

pub use channel::{Channel, ChannelError};
pub use frame::{Frame, FrameError, FrameHeader};
