//! Disks move between nodes under load: nothing is drained, nothing is lost, and guests wait a moment (P1, P4, P9).
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone, during, new_history, seed};
use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::REGISTRY;
use weir_nbd::Uri;
use weir_nbd::client::{CommandFlags, Connection, NbdCommand, Options};
use weir_nbd::protocol::error::ESHUTDOWN;
use weir_node::api::Moved;

/// Longest stall that a load may see, on a machine that does much else (the target on a quiet one is 200 ms).
const LONGEST_STALL: Duration = Duration::from_secs(2);

fn move_to(bench: &Bench, to: &str) -> Moved {
    let client = bench.lab.any_client().unwrap();
    client.move_disk(DISK, to).unwrap_or_else(|error| panic!("{error:?}{}", bench.logs()))
}

/// Any node but the owner.
fn elsewhere(bench: &Bench, random: &mut Rng) -> String {
    let owner = bench.owner();
    let others: Vec<String> =
        bench.lab.nodes().iter().map(|node| node.name.clone()).filter(|name| *name != owner).collect();
    others[random.usize(..others.len())].clone()
}

fn moves_under_load(nodes: usize, policy: &str, moves: u32) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let bench = Bench::up(nodes, policy, |_| {});
    let mut history = new_history(seed);
    let (mut dirty, mut stalls) = (Vec::new(), Vec::new());
    for _ in 0..moves {
        bench.wait_effective();
        let to = elsewhere(&bench, &mut random);
        let load = bench.load(history, random.u64(..));
        let (mut load, moved) = during(load, Duration::from_secs(1), || {
            thread::sleep(Duration::from_millis(random.u64(50..600)));
            move_to(&bench, &to)
        });
        assert_eq!((&moved.to, bench.owner()), (&to, to.clone()));
        assert!(load.progress().reconnects() > 0, "the load never noticed");
        let stall = load.progress().longest_stall();
        assert!(stall < LONGEST_STALL, "stalled for {stall:?}{}", bench.logs());
        bench.judge(&mut load, seed);
        dirty.push(moved.dirty_bytes);
        stalls.push(stall);
        history = load.into_history();
    }
    bench.check_backing(&mut history);
    eprintln!("{policy}: stalls {stalls:?}, dirty at the switch {dirty:?}");
    if policy != "write-through" {
        assert!(dirty.iter().any(|&bytes| bytes > 0), "something was dirty at the switch");
    }
}

#[test]
fn a_disk_moves_with_its_dirty_data() {
    moves_under_load(3, "write-back+1", 4);
}

#[test]
fn a_disk_with_two_replicas_moves() {
    moves_under_load(4, "write-back+2", 3);
}

#[test]
fn a_disk_without_a_log_moves() {
    moves_under_load(2, "write-through", 2);
}

/// A client's connection to a disk that has moved away.
#[derive(Debug, Default)]
struct Talk {
    answered: u64,
    refused: u64,
    /// The last that was answered or refused, in the order in which they were made.
    last: u64,
    /// Those that were not, in that order.
    unanswered: Vec<u64>,
    /// So many of them were made before the last answer came.
    lost: usize,
}

/// Keeps `depth` requests under way, writes and reads, until the server hangs up.
fn talk(uri: &Uri, depth: u32) -> Talk {
    let options = Options { depth, ..Options::default() };
    let mut connection = Connection::open(uri, &options).unwrap();
    let (mut free, mut made, mut rounds) = ((0..depth).collect::<Vec<_>>(), vec![None; depth as usize], 0);
    let (mut talk, mut number, mut done) = (Talk::default(), 0_u64, Vec::new());
    loop {
        for slot in free.drain(..) {
            let offset = u64::from(slot) * 4096;
            let write = NbdCommand::Write { offset, length: 4096, flags: CommandFlags::NONE };
            // Replies are short, so that the socket takes all of them.
            let read = NbdCommand::Read { offset, length: 512 };
            connection.start(slot, if number.is_multiple_of(3) { read } else { write });
            made[slot as usize] = Some((number, rounds));
            number += 1;
        }
        // All that has come, before anything else is asked for.
        let mut until = Nanos::now() + Duration::from_secs(60);
        let ended = loop {
            let outcome = connection.pump(until, &mut done);
            (until, rounds) = (Nanos(0), rounds + u64::from(!done.is_empty()));
            let came = !done.is_empty();
            for done in done.drain(..) {
                let (number, _) = made[done.slot as usize].take().unwrap();
                talk.last = talk.last.max(number);
                match done.errno {
                    0 => talk.answered += 1,
                    ESHUTDOWN => talk.refused += 1,
                    other => panic!("request {number} failed with {other}"),
                }
                free.push(done.slot);
            }
            match outcome {
                Err(_) => break true,
                Ok(()) if !came || connection.in_flight() == 0 => break false,
                Ok(()) => {}
            }
        };
        if ended {
            let mut left: Vec<_> = made.into_iter().flatten().collect();
            left.sort_unstable();
            talk.lost = left.iter().filter(|&&(_, round)| round < rounds).count();
            talk.unanswered = left.into_iter().map(|(number, _)| number).collect();
            return talk;
        }
    }
}

fn uri(bench: &Bench) -> Uri {
    bench.wait(|view| !view.uris.is_empty()).uris[0].parse().unwrap()
}

/// Whatever a client had asked for when its disk began to go is answered before its connection ends.
#[test]
fn a_move_leaves_no_request_without_an_answer() {
    const MOVES: usize = 6;
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let bench = Bench::up(3, "write-back+1", |_| {});
    let mut clean = 0;
    for _ in 0..MOVES {
        bench.wait_effective();
        let (uri, to) = (uri(&bench), elsewhere(&bench, &mut random));
        let talks: Vec<Talk> = thread::scope(|scope| {
            let talks: Vec<_> = [16, 64, 100]
                .map(|depth| {
                    scope.spawn({
                        let uri = &uri;
                        move || talk(uri, depth)
                    })
                })
                .into();
            thread::sleep(Duration::from_millis(random.u64(100..400)));
            move_to(&bench, &to);
            talks.into_iter().map(|talk| talk.join().unwrap()).collect()
        });
        for talk in &talks {
            eprintln!(
                "{} answered, {} refused, {} without an answer, {} of them made before the end",
                talk.answered,
                talk.refused,
                talk.unanswered.len(),
                talk.lost
            );
            assert!(talk.answered > 100, "{talk:?}");
            // It takes what comes in the order in which that comes: nothing that it took is without an answer.
            assert!(talk.unanswered.iter().all(|&number| number > talk.last), "{talk:?}{}", bench.logs());
        }
        clean += usize::from(talks.iter().all(|talk| talk.lost == 0));
    }
    // A client that stood still for some milliseconds has asked too late.
    assert!(clean >= MOVES / 2, "{clean} of {MOVES} moves left no client with a request in doubt");
}

/// Nor does a client with more requests under way than the server takes.
#[test]
fn clients_that_do_not_read_do_not_hold_up_a_move() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let owner = bench.owner();
    for (to, length, depth) in [("n2", 1 << 20, 60), ("n3", 4096, 1000), ("n1", 1 << 20, 500)] {
        bench.wait_effective();
        let options = Options { depth, ..Options::default() };
        let mut connection = Connection::open(&uri(&bench), &options).unwrap();
        (0..depth).for_each(|slot| connection.start(slot, NbdCommand::Read { offset: 0, length }));
        // They leave; that answers come is not looked at.
        let _ = connection.pump(Nanos(0), &mut Vec::new());
        thread::sleep(Duration::from_millis(100));
        // The copy is made first, so that only the switch is measured.
        bench.lab.any_client().unwrap().follow(DISK, Some(to)).unwrap();
        let began = Nanos::now();
        move_to(&bench, to);
        let took = Nanos::now() - began;
        eprintln!("{depth} reads of {length} bytes that nobody takes: moved in {took:?}");
        assert!(took < Duration::from_secs(2), "{took:?}{}", bench.logs());
    }
    assert_eq!(bench.owner(), owner, "once around");
}

/// The registry does not answer at some moment of the move: the disk has moved or has not, and its clients go on in either case; if
/// it has not, on the connections that they have.
#[test]
fn clients_go_on_where_they_are_when_their_disk_stays() {
    const ROUNDS: u64 = 8;
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let bench = Bench::up(3, "write-back+1", |_| {});
    let (mut history, mut stayed) = (new_history(seed), 0);
    for _ in 0..ROUNDS {
        bench.wait_effective();
        let (former, to) = (bench.owner(), elsewhere(&bench, &mut random));
        let changes_before = changes_of_owner(&bench);
        // As above.
        bench.lab.any_client().unwrap().follow(DISK, Some(&to)).unwrap();
        let load = bench.load(history, random.u64(..));
        let (mut load, moved) = during(load, Duration::from_secs(1), || {
            let client = bench.lab.client(&former).unwrap();
            thread::scope(|scope| {
                let moving = scope.spawn(|| client.move_disk(DISK, &to));
                thread::sleep(Duration::from_micros(random.u64(0..30_000)));
                bench.lab.pause(REGISTRY).unwrap();
                thread::sleep(Duration::from_millis(random.u64(300..1800)));
                bench.lab.resume(REGISTRY).unwrap();
                moving.join().unwrap()
            })
        });
        let owner = bench.owner();
        eprintln!(
            "{former} to {to}: {}, now {owner}; {} reconnected, stalled for {:?}",
            moved.map_or_else(|error| error.message, |_| "moved".into()),
            load.progress().reconnects(),
            load.progress().longest_stall()
        );
        // After a long silence of the registry, the former owner may have taken it over again.
        if owner == former && changes_of_owner(&bench) == changes_before {
            stayed += 1;
            assert_eq!(load.progress().reconnects(), 0, "{}", bench.logs());
        }
        bench.judge(&mut load, seed);
        history = load.into_history();
        // Nobody follows any more, whether it has moved or not.
        let _ = bench.lab.any_client().unwrap().follow(DISK, None);
    }
    bench.check_backing(&mut history);
    eprintln!("{stayed} of {ROUNDS} stayed");
}

/// How often the disk has got another owner, by the logs.
fn changes_of_owner(bench: &Bench) -> usize {
    let changes = |log: &str| {
        let is_change = |line: &&str| line.contains("kind=\"moved\"") || line.contains("kind=\"takeover\"");
        log.lines().filter(is_change).count()
    };
    bench.lab.nodes().iter().map(|node| changes(&std::fs::read_to_string(&node.log).unwrap())).sum()
}

/// Right after a move there are as many copies as before: either of the two nodes may die.
fn dies_after_a_move(victim_is_new_owner: bool) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut bench = Bench::up(3, "write-back+1", |_| {});
    let former = bench.owner();
    let to = elsewhere(&bench, &mut random);
    let load = bench.load(new_history(seed), seed);
    let lab = &mut bench.lab;
    let (mut load, ()) = during(load, Duration::from_secs(2), || {
        thread::sleep(Duration::from_millis(200));
        lab.any_client().unwrap().move_disk(DISK, &to).unwrap();
        lab.kill(if victim_is_new_owner { &to } else { &former }).unwrap();
    });
    assert_eq!(bench.owner() == to, !victim_is_new_owner);
    bench.judge(&mut load, seed);
    bench.wait_effective();
    bench.check_backing(&mut load.into_history());
}

#[test]
fn the_new_owner_dies_after_a_move() {
    dies_after_a_move(true);
}

#[test]
fn the_former_owner_dies_after_a_move() {
    dies_after_a_move(false);
}

#[test]
fn a_move_that_cannot_be_had_is_refused_and_changes_nothing() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let owner = bench.owner();
    let client = bench.lab.any_client().unwrap();
    let unknown = client.move_disk(DISK, "nowhere").unwrap_err();
    assert!(unknown.message.contains("there is no node nowhere"), "{unknown:?}");
    let epoch = bench.disk().unwrap().epoch;
    assert_eq!(move_to(&bench, &owner).disk.epoch, epoch, "it is there already");
    // A node that stands still has a lease for a moment, and no copy ever.
    let replicas = bench.wait_effective().replicas;
    let stranger = bench.lab.nodes().iter().map(|node| node.name.clone());
    let stranger = stranger.into_iter().find(|name| *name != owner && !replicas.contains(name)).unwrap();
    bench.lab.pause(&stranger).unwrap();
    let error = bench.lab.client(&owner).unwrap().move_disk(DISK, &stranger).unwrap_err();
    assert!(error.message.contains("stays on") || error.message.contains("no node"), "{error:?}");
    bench.lab.resume(&stranger).unwrap();
    assert_eq!(bench.owner(), owner);
    bench.wait_effective();
}
