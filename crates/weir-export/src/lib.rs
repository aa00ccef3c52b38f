//! How guests and tools reach a disk. An export turns a protocol into requests to a
//! [`weir_block::Layer`] and holds no data itself (DESIGN §1).

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod nbd;
