//! What becomes of requests without a coordinator, with one that says nothing, and without space.

use std::rc::Rc;
use std::time::Duration;

use weir_block::{Buffer, Code, Nanos, RequestKind};
use weir_volume::SharedDisk;
use weir_volume::lun::route_status::Overdue;

use crate::world::{BLOCK, EXT4, MIB, SEED, SOON, WAIT, Waits, Way, World, XFS};

/// Its requests fail after [`WAIT`] without a coordinator.
fn impatient(format: &str, way: Way) -> Option<World> {
    let waits = Waits { coordinator: WAIT, full_volume: Duration::ZERO };
    World::with_waits(format, 16 * MIB, way, true, SEED, waits)
}

#[test]
fn direct_io_goes_on_while_nobody_coordinates() {
    for format in [EXT4, XFS] {
        let Some(mut world) = World::new(format, 16 * MIB, Way::Remote, true, SEED) else { return };
        world.make_direct(512);
        world.crash_coordinator();
        // Writes to its own blocks, also those next to what waits.
        world.ask(RequestKind::Discard, 2000..2001);
        for block in 0..512 {
            world.ask(RequestKind::Write, block..block + 1);
        }
        world.until("direct writes wait", |world| world.asked.len() == 1);
        world.mount_again();
        world.drain();
        world.end();
    }
}

/// What needs a coordinator fails after a while; direct I/O goes on; and all is well when there is one again.
#[test]
fn without_a_coordinator_for_too_long_requests_fail_and_nothing_is_lost() {
    for format in [EXT4, XFS] {
        let Some(mut world) = impatient(format, Way::Remote) else { return };
        world.make_direct(512);
        // Under way when the coordinator goes, and waiting for one: writes to space that is not granted.
        world.ask(RequestKind::Discard, 2000..2001);
        world.turn();
        let since = Nanos::now();
        world.crash_coordinator();
        world.ask(RequestKind::Discard, 2000..2002);
        world.until("what needs a coordinator does not fail", |world| world.asked.is_empty());
        assert!(Nanos::now() - since >= WAIT / 2, "they have waited");
        let told = (world.owner.newly_overdue(), world.owner.newly_overdue());
        assert_eq!(told, (Some(Overdue::Missing), None));
        assert!(world.reasons().contains(&"recovery-failed"), "{:?}", world.reasons());
        let failed = std::mem::take(&mut world.errors);
        assert!(failed.len() == 2 && failed.iter().all(|error| error.code == Code::Io), "{failed:?}");
        // From now on at once.
        world.ask(RequestKind::Discard, 2001..2002);
        world.turn();
        world.turn();
        assert_eq!(std::mem::take(&mut world.errors).len(), 1);
        (0..512).for_each(|block| world.ask(RequestKind::Write, block..block + 1));
        world.drain();
        assert_eq!(world.errors, [], "direct I/O goes on");
        world.mount_again();
        world.until("no coordinator is found", |world| world.owner.has_coordinator());
        world.load(2_000, 16 * MIB / BLOCK, |_| {});
        assert!(!world.reasons().contains(&"recovery-failed"), "{:?}", world.reasons());
        world.end();
    }
}

/// It is connected, and its filesystem stands still. What it has may be done at any time, until it says that nothing of it is left (P4).
#[test]
fn a_coordinator_that_never_answers_counts_as_missing_after_a_while() {
    for format in [EXT4, XFS] {
        for way in [Way::Here, Way::Remote] {
            let Some(mut world) = impatient(format, way) else { return };
            world.make_direct(512);
            let frozen = world.freeze();
            let since = Nanos::now();
            world.ask(RequestKind::Discard, 2000..2001);
            world.ask(RequestKind::Discard, 3000..3001);
            // Waits for the first.
            world.ask(RequestKind::Write, 2000..2003);
            world.until("nothing fails", |world| world.asked.is_empty());
            let waited = Nanos::now() - since;
            assert!(waited >= WAIT && waited < 2 * WAIT, "{format} {way:?}: {waited:?}");
            let failed = std::mem::take(&mut world.errors);
            assert!(failed.len() == 3 && failed.iter().all(|error| error.code == Code::Io), "{failed:?}");
            let told = (world.owner.newly_overdue(), world.owner.newly_overdue());
            assert_eq!(told, (Some(Overdue::Silent), None));
            // It lets itself be asked, and answers no greeting while it has requests of before.
            world.until("it is not asked for", |world| world.owner.wants_coordinator(Nanos::now()));
            world.connect();
            (0..200).for_each(|_| world.turn());
            assert!(!world.owner.has_coordinator());
            for reason in ["coordinator-silent", "recovery-failed"] {
                assert!(world.reasons().contains(&reason), "{:?}", world.reasons());
            }
            // At once, and direct I/O goes on.
            world.ask(RequestKind::Discard, 2001..2002);
            world.make_direct(512);
            assert_eq!(std::mem::take(&mut world.errors).len(), 1);
            drop(frozen);
            world.until("it does not come back", |world| world.owner.has_coordinator());
            assert_eq!(world.owner.newly_overdue(), None);
            world.load(2_000, 16 * MIB / BLOCK, |_| {});
            for reason in ["coordinator-silent", "recovery-failed"] {
                assert!(!world.reasons().contains(&reason), "{:?}", world.reasons());
            }
            world.end();
        }
    }
}

/// The coordinator answers each attempt: it is not silent, however long the space is not there.
#[test]
fn a_request_that_waits_for_space_is_no_sign_of_a_silent_coordinator() {
    for way in [Way::Here, Way::Remote] {
        let waits = Waits { coordinator: WAIT, full_volume: SOON };
        let Some(mut world) = World::with_waits(XFS, 64 * MIB, way, true, SEED, waits) else { return };
        let filler = world.mounted.as_ref().unwrap().create("filler").unwrap();
        let mut end = 0;
        for piece in [64 * MIB, MIB, BLOCK] {
            let flags = rustix::fs::FallocateFlags::empty();
            while rustix::fs::fallocate(&filler, flags, end, piece).is_ok() {
                end += piece;
            }
        }
        drop(filler);
        for start in (0..64 * MIB / BLOCK).step_by(256) {
            world.ask(RequestKind::Write, start..start + 256);
            world.turn();
            if world.asked.len() > 32 {
                break;
            }
        }
        let until = Nanos::now() + 2 * WAIT + Duration::from_secs(1);
        while Nanos::now() < until {
            world.turn();
        }
        assert!(!world.asked.is_empty(), "there is no space for all of them");
        assert_eq!(
            (world.owner.newly_overdue(), world.reasons().contains(&"coordinator-silent")),
            (None, false)
        );
        world.mounted.as_ref().unwrap().remove("filler").unwrap();
        world.drain();
        // What destage writes does not wait for space.
        world.errors.retain(|error| error.code != Code::NoSpace);
        world.end();
    }
}

#[test]
fn a_former_owner_is_turned_away() {
    let Some(mut world) = World::new(XFS, 16 * MIB, Way::Remote, true, SEED) else { return };
    world.until("no coordinator", |world| world.owner.has_coordinator());
    let served = Rc::clone(world.served.as_ref().unwrap());
    served.borrow_mut().owner_is(&mut world.reactor, 8);
    world.touched = true;
    world.until("the connection stays", |world| !world.owner.has_coordinator());
    world.connect();
    for _ in 0..200 {
        world.turn();
    }
    assert!(!world.owner.has_coordinator(), "epoch 7 counts no more");
    world.ask(RequestKind::Write, 0..1);
    world.turn();
    world.owner.give_up(&mut world.reactor);
    world.until("a closed disk has requests in flight", |world| world.asked.is_empty());
    assert_eq!(world.errors.len(), 1);
}

/// A client that stops reading keeps what it has read. What the coordinator says to the disk is for its other clients, and for whoever wants a
/// recall (P9).
#[test]
fn a_client_that_keeps_its_reads_does_not_keep_the_coordinator_from_being_heard() {
    // Through the filesystem, and block-redirected.
    for is_granted in [false, true] {
        let Some(mut world) = World::new(XFS, 32 * MIB, Way::Remote, false, SEED) else { return };
        let all = (0..32 * MIB / BLOCK).step_by(256);
        all.clone().for_each(|start| world.ask(RequestKind::Write, start..start + 256));
        world.drain();
        if is_granted {
            world.make_direct(64);
            world.until("nothing is granted", |world| {
                let before = world.owner.counts().block;
                world.ask(RequestKind::Read, 0..1);
                world.drain();
                world.owner.counts().block > before
            });
        }
        world.keeps = true;
        // More than half of what the connection has for the coordinator's data.
        for start in all.take(20) {
            world.ask(RequestKind::Read, start..start + 256);
            world.drain();
        }
        assert!(world.kept.iter().map(Buffer::len).sum::<usize>() as u64 == 20 * MIB);
        world.keeps = false;
        world.ask(RequestKind::Write, 7000..7001);
        world.drain();
        world.clone_disk();
        world.kept.clear();
        world.end();
    }
}
