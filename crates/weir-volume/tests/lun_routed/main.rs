//! A disk of a shared volume under load: its owner on one path to a LUN, the coordinator with a real ext4 or XFS on another, and faults.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod routes;
mod waits;
mod world;
