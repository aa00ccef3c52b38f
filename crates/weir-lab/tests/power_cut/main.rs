//! A power cut of the whole lab: SIGKILL of all processes at once, and every disk loses what it was not told to flush.
//!
//! Needs root (loop devices, mounts) and what `scripts/setup` installs. `WEIR_POWER_CUTS` sets how many cuts each test
//! makes (default 2), `WEIR_SEED` replays.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod mounted;
mod rig;
#[path = "../support/mod.rs"]
mod support;
