//! By which way requests go, and that every answer is true whatever breaks.

use std::fs::File;
use std::rc::Rc;

use weir_block::RequestKind;
use weir_volume::SharedDisk;
use weir_volume::lun::leases::{Lease, Piece};
use weir_volume::lun::router::{Event, Kind, Lacks, Request, Router};
use weir_volume::planted::Planted;

use crate::world::{BLOCK, EXT4, MIB, SEED, Way, World, XFS};

#[test]
fn writes_into_holes_are_redirected_and_soon_direct() {
    for format in [EXT4, XFS] {
        for way in [Way::Here, Way::Remote] {
            let Some(mut world) = World::new(format, 64 * MIB, way, true, SEED) else { return };
            for block in 0..4096 {
                world.ask(RequestKind::Write, block..block + 1);
                world.until("no room", |world| world.asked.len() < 32);
            }
            world.drain();
            let before = world.owner.counts();
            for block in (0..4096).rev() {
                world.ask(RequestKind::Write, block..block + 1);
                world.until("no room", |world| world.asked.len() < 32);
            }
            world.drain();
            let after = world.owner.counts();
            assert_eq!(after.file, before.file, "{format} {way:?}: every block is the owner's by now");
            assert!(before.file < 3000, "{format} {way:?}: {before:?}");
            world.end();
        }
    }
}

fn every_answer_is_true(shuffles: bool) {
    for format in [EXT4, XFS] {
        for way in [Way::Here, Way::Remote] {
            let size = 48 * MIB;
            let Some(mut world) = World::new(format, size, way, true, SEED) else { return };
            if shuffles {
                world.shuffles = true;
                world.end_coordinator();
                world.mount_again();
            }
            let (mut is_there, mut through) = (true, false);
            world.load(8_000, size / BLOCK, |world| match world.rng.u16(0..1500) {
                0 => {
                    world.disconnect();
                    world.connect();
                }
                1 => {
                    is_there = !is_there;
                    world.set_path(is_there);
                }
                2 => {
                    world.crash_coordinator();
                    world.mount_again();
                }
                3 if format == XFS && world.clones.len() < 4 => world.clone_disk(),
                4 => {
                    through = !through;
                    let World { owner, reactor, .. } = world;
                    owner.go_through_filesystem(reactor, through);
                }
                _ => {}
            });
            world.set_path(true);
            let counts = world.end();
            println!("{format} {way:?}: {counts:?}");
            let all = [counts.direct, counts.file, counts.zeroes, counts.splits];
            assert!(all.iter().all(|count| *count > 20), "{counts:?}");
        }
    }
}

#[test]
fn every_answer_is_true_whatever_breaks() {
    every_answer_is_true(false);
}

/// What the lab does to a coordinator costs speed, and nothing else.
#[test]
fn every_answer_is_true_in_whatever_order_redirected_io_begins() {
    every_answer_is_true(true);
}

#[test]
fn a_node_without_a_path_reaches_its_blocks_through_the_coordinator() {
    for format in [EXT4, XFS] {
        let Some(mut world) = World::new(format, 32 * MIB, Way::Remote, false, SEED) else { return };
        world.load(4_000, 32 * MIB / BLOCK, |world| {
            if world.rng.u16(0..1000) == 0 {
                world.disconnect();
                world.connect();
            }
        });
        let counts = world.end();
        println!("{format}: {counts:?}");
        assert!(counts.direct == 0 && counts.block > 500 && counts.file > 100, "{counts:?}");
    }
}

/// A session with the storage that has ended does not bring its device back, and the next session has another one.
#[test]
fn another_path_takes_the_place_of_one_that_has_failed() {
    for format in [EXT4, XFS] {
        let Some(mut world) = World::new(format, 16 * MIB, Way::Remote, true, SEED) else { return };
        world.make_direct(512);
        // One that works stays.
        let second = world.path.second_path();
        world.offer_path(&second);
        world.end_path();
        let before = world.owner.counts();
        for block in 0..512 {
            world.ask(RequestKind::Write, block..block + 1);
            world.until("no room", |world| world.asked.len() < 32);
        }
        world.drain();
        assert!(world.owner.counts().block > before.block, "{format}: the first path is used no more");
        world.wants_path = false;
        world.until("no path is asked for", |world| world.wants_path);
        let before = world.owner.counts();
        // Not while a look at the failed one is under way.
        world.until("nothing is direct", |world| {
            if std::mem::take(&mut world.wants_path) {
                world.offer_path(&second);
            }
            if world.asked.is_empty() {
                world.ask(RequestKind::Write, 7..8);
            }
            world.owner.counts().direct > before.direct
        });
        world.drain();
        world.make_direct(512);
        assert!(!world.wants_path, "{format}");
        // The failed one is open no more.
        world.path = second;
        let counts = world.end();
        println!("{format}: {counts:?}");
    }
}

/// For example because the filesystem has no reflinks: the owner has given everything up for nothing.
#[test]
fn after_a_change_that_fails_everything_is_direct_again() {
    for way in [Way::Here, Way::Remote] {
        let Some(mut world) = World::new(EXT4, 16 * MIB, way, true, SEED) else { return };
        for block in 0..512 {
            world.ask(RequestKind::Write, block..block + 1);
        }
        world.drain();
        for refused in 0..3 {
            let served = Rc::clone(world.served.as_ref().unwrap());
            let refuse = |_: &File| Err(std::io::Error::from_raw_os_error(libc::EOPNOTSUPP));
            served.borrow_mut().change(&mut world.reactor, refused, (0, world.size), Box::new(refuse));
            // Nobody waits for the second.
            if refused == 1 {
                served.borrow_mut().forget_change(&mut world.reactor, refused);
            }
            world.touched = true;
            world.until("a change does not fail", |_| {
                let changed = served.borrow_mut().changed();
                assert!(changed.iter().all(|(_, result)| result.is_err()));
                refused == 1 || !changed.is_empty()
            });
            // Reads alone bring no leases back.
            world.until("nothing is direct", |world| {
                let before = world.owner.counts().file;
                world.ask(RequestKind::Read, 100..101);
                world.drain();
                world.owner.counts().file == before
            });
        }
        world.end();
    }
}

/// Larger than a connection's buffers, and more of them than the memory of either side holds, with a clone that wants all of it meanwhile.
#[test]
fn large_requests_end_whatever_memory_there_is() {
    for way in [Way::Here, Way::Remote] {
        for has_path in [true, false] {
            let Some(mut world) = World::new(XFS, 160 * MIB, way, has_path, SEED) else { return };
            for start in (0..160 * MIB / BLOCK).step_by(256) {
                world.ask(RequestKind::Write, start..start + 256);
                if start == 256 * 60 {
                    world.clone_disk();
                }
                world.until("writes do not end", |world| world.asked.len() < 60);
            }
            for start in (0..160 * MIB / BLOCK).step_by(1024) {
                // On a busy machine the writes above may still have it.
                world.until("no memory for a read", |world| {
                    world.reactor.buffers().has_room(4 * MIB as usize)
                });
                world.ask(RequestKind::Read, start..start + 1024);
                world.until("reads do not end", |world| world.asked.len() < 12);
            }
            world.ask(RequestKind::WriteZeroes, 0..8192);
            world.ask(RequestKind::Flush, 0..0);
            world.drain();
            world.end();
        }
    }
}

#[test]
fn a_redirected_change_says_whether_it_lacks_blocks_or_blocks_of_its_own() {
    const PIECE: u64 = 64 << 10;
    let (shared, hole) = ((0, PIECE), (PIECE, 2 * PIECE));
    let none = Lacks::default();
    let (own_blocks, blocks) = (Lacks { own_blocks: true, ..none }, Lacks { blocks: true, ..none });
    let both = Lacks { blocks: true, own_blocks: true };
    let cases = [
        (Kind::Write, shared, own_blocks),
        (Kind::Write, hole, blocks),
        (Kind::Write, (PIECE - 4096, PIECE + 4096), both),
        (Kind::Punch, shared, blocks),
        // On the LUN, where it is, and without I/O.
        (Kind::Read, shared, none),
        (Kind::Read, hole, none),
    ];
    for (kind, range, expected) in cases {
        let mut router = Router::new(PIECE, Planted::default());
        let mut effects = Vec::new();
        let leases = vec![
            Piece { start: shared.0, end: shared.1, lease: Lease::ReadOnly(1 << 20) },
            Piece { start: hole.0, end: hole.1, lease: Lease::Hole },
        ];
        for event in [Event::Path(true), Event::CoordinatorFound, Event::Granted(leases)] {
            router.step(event, &mut effects);
        }
        assert_eq!(router.lacks(), none);
        router.step(Event::Submitted(Request { id: 7, kind, range }), &mut effects);
        assert_eq!(router.lacks(), expected, "{kind:?} {range:?}");
        let result = if expected == none {
            Event::Answered { id: 7, ok: true }
        } else {
            Event::Redirected { id: 7, result: Ok(()), grants: Vec::new() }
        };
        router.step(result, &mut effects);
        assert_eq!((router.lacks(), router.in_flight()), (none, 0), "{kind:?} {range:?}");
    }
}
