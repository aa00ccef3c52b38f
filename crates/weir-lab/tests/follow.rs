//! A disk that follows its guest: clients on the target may look before, and the first write moves it (P2, P7, P9).
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::{BLOCK, Bench, DISK, SOON, alone, during, new_history, seed};
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::{NbdClient, NbdError};
use weir_node::api::ApiErrorKind;

fn connect(bench: &Bench, node: &str) -> Result<NbdClient, NbdError> {
    NbdClient::connect(&Uri::unix(&bench.lab.node(node).unwrap().nbd_unix, DISK))
}

fn block(byte: u8) -> Vec<u8> {
    vec![byte; BLOCK as usize]
}

fn read(client: &mut NbdClient, offset: u64) -> Vec<u8> {
    let mut data = block(0xff);
    client.read(offset, &mut data).unwrap();
    data
}

fn follows(policy: &str, is_ready: bool) {
    let _turn = alone();
    // `n2` is in another fault domain than the source, and not alone there.
    let domains = ["a", "b", "b", "a"].map(str::to_owned);
    let bench = Bench::up(4, policy, |config| config.fault_domains = domains.into());
    assert_eq!(bench.owner(), "n1");
    let mut source = connect(&bench, "n1").unwrap();
    source.write(0, &block(1), false).unwrap();
    // Before it follows, n2 forwards its clients, and what they write moves nothing.
    let mut forwarded = connect(&bench, "n2").unwrap();
    forwarded.write(4096, &block(98), false).unwrap();
    assert_eq!(bench.owner(), "n1");

    let api = bench.lab.client("n3").unwrap();
    let view = api.follow(DISK, Some("n2")).unwrap();
    assert_eq!((view.follower.as_deref(), view.owner.as_deref()), (Some("n2"), Some("n1")));
    assert_eq!(view.replicas.contains(&"n2".to_owned()), is_ready, "{view:?}");
    assert_eq!(view.effective, policy, "as long as it is here, nothing has changed");
    let mut third = connect(&bench, "n3").unwrap();
    third.write(12_288, &block(97), false).unwrap();
    forwarded.write(4096, &block(96), false).unwrap();
    assert_eq!(bench.owner(), "n1", "only clients that came while n2 follows move the disk");

    // A reader on the target sees the source's latest write, and the disk stays with the source (P7).
    let (mut target, mut second) = (connect(&bench, "n2").unwrap(), connect(&bench, "n2").unwrap());
    for round in 2..50_u8 {
        source.write(u64::from(round) * 4096, &block(round), false).unwrap();
        assert_eq!(read(&mut target, u64::from(round) * 4096), block(round));
    }
    target.flush().unwrap();
    assert_eq!(bench.owner(), "n1");

    // The first write moves the disk, and is not lost on the way.
    source.flush().unwrap();
    let began = Nanos::now();
    target.write(8192, &block(99), false).unwrap();
    let pause = Nanos::now() - began;
    assert_eq!(bench.owner(), "n2");
    assert_eq!(bench.disk().unwrap().follower, None);
    assert_eq!((read(&mut target, 8192), read(&mut target, 4096 * 49)), (block(99), block(49)));
    assert_eq!(read(&mut second, 8192), block(99), "another client of the guest goes on here as well");
    assert_eq!(read(&mut second, 0), block(1));
    assert!(source.write(0, &block(7), false).is_err(), "the source has been disconnected");
    assert!(third.write(0, &block(7), false).is_err(), "and so are those that others forwarded");
    assert_eq!(read(&mut connect(&bench, "n1").unwrap(), 8192), block(99), "n1 forwards");
    bench.wait_effective();
    eprintln!("{policy}: the first write on the target took {pause:?}");
    assert!(pause < Duration::from_secs(5), "{pause:?}");
}

#[test]
fn a_replicated_disk_follows_the_first_write() {
    follows("write-back+1", true);
}

#[test]
fn a_disk_without_a_log_follows_the_first_write() {
    follows("write-through", false);
}

/// Its replica must be beside the owner: the node that it goes to gets a copy when it goes there, and another one beside itself.
#[test]
fn a_disk_with_a_strict_policy_follows_the_first_write() {
    follows("write-back+1in", false);
}

/// Connecting and reading on the target never stops a guest that writes on the source (P2, P9).
#[test]
fn a_target_that_only_looks_does_not_disturb_a_writer() {
    let _turn = alone();
    let seed = seed();
    let bench = Bench::up(3, "write-back+1", |_| {});
    bench.lab.any_client().unwrap().follow(DISK, Some("n3")).unwrap();
    let load = bench.load(new_history(seed), seed);
    let (mut load, reads) = during(load, Duration::from_millis(500), || {
        let mut reads = 0;
        for _ in 0..20 {
            let mut target = connect(&bench, "n3").unwrap();
            for place in 0..20 {
                read(&mut target, place * 65_536);
                reads += 1;
            }
        }
        reads
    });
    assert_eq!((bench.owner().as_str(), reads), ("n1", 400));
    assert_eq!((load.progress().failed(), load.progress().reconnects()), (0, 0), "{}", bench.logs());
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches + load.found().mismatches, 0, "{:#?}", found.first);
    bench.check_backing(&mut load.into_history());
}

#[test]
fn following_ends_by_command_and_with_the_follower() {
    let _turn = alone();
    let mut bench = Bench::up(3, "write-back+1", |_| {});
    let api = bench.lab.client("n1").unwrap();
    let error = api.follow(DISK, Some("n1")).unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Refused, "{error:?}");
    assert!(api.follow(DISK, Some("nowhere")).unwrap_err().message.contains("no node nowhere"));
    api.follow(DISK, Some("n2")).unwrap();
    let mut target = connect(&bench, "n2").unwrap();
    assert_eq!(read(&mut target, 0), block(0));
    assert_eq!(api.follow(DISK, None).unwrap().follower, None);
    assert!(target.write(0, &block(1), false).is_err(), "it does not move any more");
    connect(&bench, "n2").unwrap().write(0, &block(1), false).unwrap();
    assert_eq!(bench.owner(), "n1", "a client that is only forwarded moves nothing");
    api.follow(DISK, Some("n3")).unwrap();
    bench.lab.kill("n3").unwrap();
    bench.wait(|view| view.follower.is_none());
    bench.wait_effective();
    assert_eq!(bench.owner(), "n1");
}

/// The owner dies while the target only reads: a replica takes over, and the target's client goes on with it or gets an
/// error.
#[test]
fn the_owner_dies_while_it_is_followed() {
    let _turn = alone();
    let mut bench = Bench::up(3, "write-back+1", |_| {});
    connect(&bench, "n1").unwrap().write(0, &block(5), false).unwrap();
    bench.lab.client("n1").unwrap().follow(DISK, Some("n2")).unwrap();
    let mut target = connect(&bench, "n2").unwrap();
    assert_eq!(read(&mut target, 0), block(5));
    bench.lab.kill("n1").unwrap();
    // n2 holds the only other copy of the log, so it is n2 that takes over.
    target.write(4096, &block(6), false).unwrap();
    assert_eq!((read(&mut target, 0), read(&mut target, 4096)), (block(5), block(6)));
    assert_eq!(bench.owner(), "n2");
    let deadline = Nanos::now() + SOON;
    while bench.wait_effective().replicas != ["n3"] {
        assert!(Nanos::now() < deadline);
        thread::sleep(Duration::from_millis(20));
    }
}

/// As above, but another node takes over: the target's clients are served from there, until their first write.
#[test]
fn another_node_takes_over_what_is_followed() {
    let _turn = alone();
    let domains = ["a", "b", "b", "a"].map(str::to_owned);
    let mut bench = Bench::up(4, "write-back+1in", |config| config.fault_domains = domains.into());
    connect(&bench, "n1").unwrap().write(0, &block(5), false).unwrap();
    bench.lab.client("n1").unwrap().follow(DISK, Some("n2")).unwrap();
    let mut target = connect(&bench, "n2").unwrap();
    assert_eq!(read(&mut target, 0), block(5));
    bench.lab.kill("n1").unwrap();
    let mut data = block(0);
    target.read(0, &mut data).unwrap_or_else(|error| panic!("{error}\n{:#?}{}", bench.disk(), bench.logs()));
    assert_eq!(data, block(5), "whoever has it answers");
    assert_eq!(bench.owner(), "n4");
    target.write(4096, &block(6), false).unwrap();
    assert_eq!(bench.owner(), "n2");
    assert_eq!((read(&mut target, 0), read(&mut target, 4096)), (block(5), block(6)));
    bench.wait(|view| view.replicas == ["n3"] && view.effective == "write-back+1in");
}
