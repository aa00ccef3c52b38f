#![cfg_attr(test, allow(clippy::unwrap_used))]
//! Channels between nodes: frames over a stream socket, checksummed, pipelined and batched.
//!
//! This crate does not interpret messages. A frame has a *meta* part, covered by the frame's checksum, and a *data* part, whose
//! checksums the sender puts into the meta part: a write-log record's checksum is computed once, when it is appended, and is sent
//! and stored with it (P11).
//!
//! [`tls`] encrypts a connection on its shard, beneath the frames and beneath any other protocol.

pub mod channel;
pub mod frame;
pub mod tls;

pub use channel::{Channel, ChannelError};
pub use frame::{Frame, FrameError, FrameHeader};
