//! A verified load, a cut, and every block on trial.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use weir_lab::volatile_disk::Survivors;
use weir_load::verify::Atomicity;

use crate::common::{SIZE, alone, seed};
use crate::flushed_load::{FlushedLoad, Verdict};
use crate::site::{Plan, Site};
use crate::{cuts, survivors};

/// A load, a cut in the middle of it, power, and the trial.
fn round(site: &mut Site, load: &mut FlushedLoad, random: &mut Rng, survivors: Survivors) -> Verdict {
    let (view, uri) = site.wait_served();
    let before = Duration::from_millis(random.u64(300..1500));
    let gave_up = thread::scope(|scope| {
        let loading = scope.spawn(|| load.run(&uri));
        thread::sleep(before);
        // Judged after the cut: the scope ends when the load does, and it ends with the nodes.
        let gave_up = loading.is_finished();
        site.power_cut(|| {});
        gave_up
    });
    assert!(!gave_up, "the load ended by itself{}", site.bench.logs());
    let toll = site.power_on(survivors);
    let (after, uri) = site.wait_served();
    let verdict = load.check(&uri);
    let (before, after) = (view.owner.unwrap_or_default(), after.owner.unwrap_or_default());
    eprintln!(
        "{}: {} writes and {} flushes so far; owner {before}, then {after}; {survivors:?}, the backing's {toll:?}; {verdict:?}",
        view.requested, load.writes, load.flushes
    );
    verdict
}

/// The backing has a cache, and a write that was not flushed may be torn: only its sectors are whole. What was acknowledged
/// and not flushed may be lost (P8).
#[test]
fn write_through_keeps_what_was_flushed() {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut site = Site::up(&Plan { nodes: 2, policy: "write-through", size: SIZE });
    let mut load = FlushedLoad::new(seed, Atomicity::Sector);
    for _ in 0..cuts() {
        let survivors = survivors(&mut random);
        let verdict = round(&mut site, &mut load, &mut random, survivors);
        assert_eq!(verdict.durable_lost, 0, "seed {seed}: {:?}{}", verdict.first, site.bench.logs());
    }
    assert!(load.flushes > 0);
}

/// The trial of these tests: on a disk that does not flush, they must find the loss.
#[test]
fn a_backing_that_lies_is_found_out() {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut site = Site::up(&Plan { nodes: 2, policy: "write-through", size: SIZE });
    site.backing_lies();
    let mut load = FlushedLoad::new(seed, Atomicity::Sector);
    // With nothing that survives, the disk is as it was before it began to lie: its filesystem is whole, and old.
    let verdict = round(&mut site, &mut load, &mut random, Survivors::None);
    assert!(verdict.durable_lost > 0, "nothing was lost: {verdict:?}");
}
