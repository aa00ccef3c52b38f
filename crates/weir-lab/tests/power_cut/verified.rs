//! A verified load, a cut, and every block on trial.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use weir_cluster::records::Medium;
use weir_lab::volatile_disk::Survivors;
use weir_load::verify::Atomicity;

use crate::common::{SIZE, alone, seed};
use crate::flushed_load::{FlushedLoad, Verdict};
use crate::site::{Plan, Site};
use crate::{cuts, survivors};

/// A log on the flash of two nodes, and a third node.
const FLASH: Plan = Plan { nodes: 3, policy: "write-back+1", medium: Medium::Flash, size: SIZE };

/// No log at all.
const WRITE_THROUGH: Plan = Plan { nodes: 2, policy: "write-through", medium: Medium::Ram, size: SIZE };

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
    let mut nodes = site.shuffled(random);
    // Sometimes one comes back only when all is over. Its copy is redundant or old.
    let late = if random.u8(..3) == 0 { nodes.pop() } else { None };
    let toll = site.power_on(survivors, &nodes);
    // Sometimes the power goes again while the logs are being read, the set restored, or the inherited log destaged.
    let again = (random.u8(..3) == 0).then(|| Duration::from_millis(random.u64(..1500)));
    if let Some(repairing) = again {
        thread::sleep(repairing);
        site.power_cut(|| {});
        site.power_on(survivors, &nodes);
    }
    let (after, uri) = site.wait_served();
    let verdict = load.check(&uri);
    late.iter().for_each(|node| site.bench.lab.start(node).unwrap());
    let (before, after) = (view.owner.unwrap_or_default(), after.owner.unwrap_or_default());
    eprintln!(
        "{}: {} writes and {} flushes so far; owner {before}, then {after} ({late:?} was late, cut again \
         after {again:?}); {survivors:?}, {toll}; \
         {verdict:?}",
        view.requested, load.writes, load.flushes
    );
    verdict
}

/// Cuts on one site; nothing that was flushed may be lost. `acknowledged` says whether nothing that was answered may be.
fn cut_again_and_again(plan: &Plan, atomicity: Atomicity, acknowledged: bool) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut site = Site::up(plan);
    let mut load = FlushedLoad::new(seed, atomicity);
    for _ in 0..cuts() {
        let survivors = survivors(&mut random);
        let verdict = round(&mut site, &mut load, &mut random, survivors);
        assert_eq!(verdict.durable_lost, 0, "seed {seed}: {:?}{}", verdict.first, site.bench.logs());
        let lost = verdict.acknowledged_lost;
        assert!(lost == 0 || !acknowledged, "seed {seed}: {:?}{}", verdict.first, site.bench.logs());
    }
    assert!(load.flushes > 0);
}

/// A write counts once it is durable on the flash of two nodes: flushed or not, an acknowledged write is there (P1, P8), and
/// an unacknowledged one is there whole or not at all.
#[test]
fn flash_keeps_what_was_acknowledged() {
    cut_again_and_again(&FLASH, Atomicity::Block, true);
}

/// The backing has a cache, and an unflushed write may be torn: only its sectors are whole. Acknowledged and unflushed writes
/// may be lost (P8).
#[test]
fn write_through_keeps_what_was_flushed() {
    cut_again_and_again(&WRITE_THROUGH, Atomicity::Sector, false);
}

/// The trial of these tests: on disks that do not flush, they must find the loss.
fn liars_are_found_out(plan: &Plan, lie: impl Fn(&Site)) {
    let _turn = alone();
    let seed = seed();
    let mut site = Site::up(plan);
    lie(&site);
    let mut load = FlushedLoad::new(seed, Atomicity::Sector);
    // With nothing that survives, a disk is as it was before it began to lie: what is on it is whole, and old.
    let verdict = round(&mut site, &mut load, &mut Rng::with_seed(seed), Survivors::None);
    assert!(verdict.durable_lost > 0, "nothing was lost: {verdict:?}");
}

#[test]
fn a_backing_that_lies_is_found_out() {
    liars_are_found_out(&WRITE_THROUGH, Site::backing_lies);
}

#[test]
fn flash_that_lies_is_found_out() {
    liars_are_found_out(&FLASH, Site::flash_lies);
}
