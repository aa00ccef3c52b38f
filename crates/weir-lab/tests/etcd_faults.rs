//! The registry on a real etcd of three members, under load: each kind of fault once. `make etcd-faults` makes 200 rounds and prints
//! their figures. Needs root, for network namespaces.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::time::Duration;

use common::{alone, seed};
use support::etcd_faults::{Bounds, Fault, Rig};

/// Shorter than the default, for a shorter test.
const LEASE: Duration = Duration::from_secs(2);

/// On a machine that does much else.
const BOUNDS: Bounds = Bounds { unowned: Duration::from_secs(10) };

#[test]
fn nothing_is_lost_and_every_disk_has_an_owner_soon() {
    let _turn = alone();
    let mut rig = Rig::up(seed(), LEASE);
    for fault in rig.plan(Fault::ALL.len()) {
        let round = rig.round(fault);
        eprintln!("{round}");
        assert!(round.acknowledged > 100, "the loads did nothing to speak of: {round:?}");
        let broken = round.broken(BOUNDS);
        assert!(broken.is_empty(), "{broken:#?}{}", rig.logs());
    }
}
