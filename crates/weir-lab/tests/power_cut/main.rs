//! A power cut of the whole lab: SIGKILL of all processes at once, and every disk loses its unflushed data.
//!
//! Needs root (loop devices, mounts) and the packages of `scripts/setup`. `WEIR_POWER_CUTS` sets the number of cuts of each
//! test (default 2), `WEIR_SEED` replays.
#![allow(clippy::unwrap_used)]

use std::thread;
use std::time::Duration;

use common::SOON;
use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::volatile_disk::Survivors;

#[path = "../common/mod.rs"]
mod common;
mod filesystems;
mod flushed_load;
mod guest;
mod mounted;
mod postgresql;
mod ram;
mod rig;
mod server;
mod site;
mod snapshot;
#[path = "../support/mod.rs"]
mod support;
mod verified;

/// The number of cuts of a test: `WEIR_POWER_CUTS`, or 2.
fn cuts() -> u64 {
    std::env::var("WEIR_POWER_CUTS").ok().and_then(|cuts| cuts.parse().ok()).unwrap_or(2)
}

/// Half of the cuts leave nothing that was not flushed, the others what chance leaves.
fn survivors(random: &mut Rng) -> Survivors {
    if random.bool() { Survivors::None } else { Survivors::Some { seed: random.u64(..) } }
}

/// Waits until something has happened; false when it has not for too long. Does not panic, as those who wait have threads to
/// end first.
fn happens(mut look: impl FnMut() -> bool) -> bool {
    let deadline = Nanos::now() + SOON;
    while !look() {
        if Nanos::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
    true
}
