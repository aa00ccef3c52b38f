//! The NBD server against real clients, hostile clients and arbitrary bytes.

#![allow(clippy::unwrap_used)]

mod handshake;

mod interop;
mod support;
