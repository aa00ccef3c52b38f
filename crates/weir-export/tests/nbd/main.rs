//! The NBD server against real clients, hostile clients and arbitrary bytes.

#![allow(clippy::unwrap_used)]

mod hostile;
mod interop;
mod listener;
mod support;
mod transmission;
