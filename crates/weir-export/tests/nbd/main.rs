//! The NBD server against real clients, hostile clients and arbitrary bytes.

#![allow(clippy::unwrap_used)]

mod handshake;
mod hostile;
mod interop;
mod support;
mod transmission;
