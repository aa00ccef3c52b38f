//! The NBD server against real clients, hostile clients and arbitrary bytes.

#![allow(clippy::unwrap_used)]

mod bytes;
#[path = "../../../weir-nbd/tests/common/cluster.rs"]
mod cluster;
mod extended;
mod holding;
mod hostile;
mod interop;
mod large;
mod limits;
mod listener;
mod support;
mod tls;
mod transmission;
