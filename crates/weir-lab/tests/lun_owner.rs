//! The owner of a disk on a LUN stands still: it is kept from the LUN, so that its successor does not wait for `lease.fence_grace`, and
//! nothing that it had begun lands later (P4).
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::lun::LunBench;
use common::{DISK, SOON, alone, during, new_history, seed};
use weir_block::Nanos;

/// Far longer than a successor with a fence needs.
const GRACE: Duration = Duration::from_secs(120);
/// A session's end, a seal and a fence; debug builds on a busy machine.
const LONGEST_STALL: Duration = Duration::from_secs(30);

/// With `coordinates`, the owner coordinates the volume, too.
fn owner_stands_still(format: &str, coordinates: bool) {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, format, "write-through", |config| config.fence_grace = GRACE);
    let bench = &pool.bench;
    let coordinator = pool.coordinator();
    let is_it = |node: &&str| (*node == coordinator) == coordinates;
    let owner = ["n1", "n2", "n3"].into_iter().find(is_it).unwrap();
    if bench.owner() != owner {
        bench.lab.any_client().unwrap().move_disk(DISK, owner).unwrap();
    }
    bench.wait_effective();
    let load = bench.load(new_history(seed), seed);
    let progress = load.progress();
    let (mut load, ()) = during(load, Duration::from_secs(3), || {
        std::thread::sleep(Duration::from_secs(1));
        pool.stand_still(owner, LONGEST_STALL);
        let since = Nanos::now();
        // Nothing that it has answered is on its way to the client any more.
        std::thread::sleep(Duration::from_millis(500));
        let before = progress.acknowledged();
        while progress.acknowledged() == before {
            assert!(Nanos::now() < since + LONGEST_STALL, "nobody takes over{}", bench.logs());
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("{format}: its successor writes after {:?}", Nanos::now() - since);
        std::thread::sleep(Duration::from_secs(1));
        // The LUN refuses the writes that it had begun.
        bench.lab.resume(owner).unwrap();
    });
    assert!(pool.luns.fenced().iter().any(|node| node == owner), "{:?}", pool.luns.fenced());
    bench.judge(&mut load, seed);
    // It is let back, and is as good an owner as before.
    let deadline = Nanos::now() + SOON;
    while let Err(error) = bench.lab.any_client().unwrap().move_disk(DISK, owner) {
        assert!(Nanos::now() < deadline, "{error}{}", bench.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    let (mut load, ()) = during(bench.load(load.into_history(), seed), Duration::from_secs(1), || {});
    bench.judge(&mut load, seed);
}

#[test]
fn an_owner_that_stands_still_is_fenced() {
    owner_stands_still("xfs", false);
}

#[test]
fn an_owner_that_coordinates_and_stands_still_is_fenced() {
    // On one kernel, nobody else can mount an XFS that the process still has.
    owner_stands_still("ext4", true);
}
