//! Any node serves the clients of any disk: what a node that does not own it forwards, and what its clients see when the disk moves,
//! its owner dies, or the node itself does (P1, P2, P4, P9, P10).
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use common::{Bench, DISK, SIZE, SOON, alone, during, new_history, seed};
use support::{await_some, run};
use weir_block::Nanos;
use weir_lab::process::ProcessState;
use weir_load::verify::Atomicity;
use weir_load::verifying::{Settings, VerifyingLoad};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{Delete, DrainNode};

fn unix(bench: &Bench, node: &str) -> Uri {
    Uri::unix(&bench.lab.node(node).unwrap().nbd_unix, DISK)
}

/// The nodes that neither own the disk nor have a copy of its log.
fn doors(bench: &Bench) -> Vec<String> {
    let view = bench.wait_effective();
    let has_part = |name: &String| view.owner.as_ref() == Some(name) || view.replicas.contains(name);
    bench.lab.nodes().iter().map(|node| node.name.clone()).filter(|name| !has_part(name)).collect()
}

/// A load whose connections all go to the first of `doors` that runs, wherever the disk is.
fn load_through(bench: &Bench, doors: &[String], seed: u64) -> VerifyingLoad {
    let settings = Settings {
        depth: 32,
        seed,
        reconnect_for: SOON,
        timeout: SOON,
        atomicity: Atomicity::Block,
        ..Settings::default()
    };
    let doors: Vec<_> = doors.iter().map(|name| bench.lab.node(name).unwrap().clone()).collect();
    let locate = move |_: u64| {
        let up = doors.iter().find(|node| UnixStream::connect(&node.nbd_unix).is_ok())?;
        Some(Uri::unix(&up.nbd_unix, DISK))
    };
    VerifyingLoad::new(new_history(seed), settings, Box::new(locate))
}

/// A client that knows one node, which owns nothing: the disk moves, its owner dies, and it goes on there.
fn one_node_is_enough(policy: &str, identities: bool) {
    let _turn = alone();
    let seed = seed();
    let mut bench = Bench::up(5, policy, |config| config.identities = identities);
    let door = doors(&bench)[0].clone();
    let load = load_through(&bench, std::slice::from_ref(&door), seed);
    let progress = load.progress();
    let (mut load, ()) = during(load, Duration::from_secs(2), || {
        let view =
            bench.wait(|view| view.detail.as_ref().is_some_and(|detail| !detail.forwarders.is_empty()));
        let detail = view.detail.unwrap();
        assert_eq!(
            (detail.forwarders, detail.clients),
            (vec![door.clone()], 1),
            "the owner knows its client"
        );
        let first = bench.owner();
        let target = bench.lab.nodes().iter().map(|node| node.name.clone());
        let target = target.into_iter().find(|name| *name != first && *name != door).unwrap();
        progress.take_longest_stall();
        bench.lab.client(&door).unwrap().move_disk(DISK, &target).unwrap();
        thread::sleep(Duration::from_secs(1));
        eprintln!("{policy}: stall of a move {:?}", progress.take_longest_stall());
        bench.wait_effective();
        assert_eq!(bench.owner(), target);
        let before = progress.acknowledged();
        bench.lab.kill(&target).unwrap();
        let goes_on = || (progress.acknowledged() > before + 1000).then_some(());
        await_some(SOON, goes_on, || bench.logs());
        eprintln!("{policy}: stall of a takeover {:?}", progress.take_longest_stall());
        let next = bench.owner();
        // Without a log to inherit, any node takes over, also the one that has forwarded.
        assert!(next != target && (next != door || policy == "write-through"), "{next}");
    });
    assert!(load.progress().reconnects() >= 2, "{}", load.progress().reconnects());
    bench.judge(&mut load, seed);
    bench.check_backing(&mut load.into_history());
}

#[test]
fn a_client_of_one_node_keeps_a_replicated_disk() {
    one_node_is_enough("write-back+1", false);
}

#[test]
fn a_client_of_one_node_keeps_a_disk_between_nodes_with_identities() {
    one_node_is_enough("write-back+1", true);
}

#[test]
fn a_client_of_one_node_keeps_a_disk_without_a_log() {
    one_node_is_enough("write-through", false);
}

/// The node that forwards is killed, with requests under way: none of them lands after what the client has written since (P4).
#[test]
fn another_node_forwards_when_one_dies() {
    let _turn = alone();
    let seed = seed();
    let mut bench = Bench::up(4, "write-back+1", |_| {});
    let doors = doors(&bench);
    let load = load_through(&bench, &doors, seed);
    let progress = load.progress();
    let owner = bench.owner();
    let (mut load, ()) = during(load, Duration::from_secs(2), || {
        for round in 0..3 {
            thread::sleep(Duration::from_millis(700));
            let before = progress.acknowledged();
            bench.lab.kill(&doors[0]).unwrap();
            let goes_on = || (progress.acknowledged() > before + 500).then_some(());
            await_some(SOON, goes_on, || bench.logs());
            eprintln!("round {round}: stall {:?}", progress.take_longest_stall());
            bench.lab.start(&doors[0]).unwrap();
            // The second door is killed in its turn, so that the load comes back to the first.
            bench.lab.kill(&doors[1]).unwrap();
            bench.lab.start(&doors[1]).unwrap();
        }
    });
    assert_eq!(bench.owner(), owner, "nothing was taken over");
    assert!(load.progress().reconnects() >= 4, "{}", load.progress().reconnects());
    bench.judge(&mut load, seed);
    bench.check_backing(&mut load.into_history());
}

#[test]
fn clients_of_others_use_a_disk_through_any_node() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let door = doors(&bench)[0].clone();
    let uri = unix(&bench, &door).to_string();
    let listed = run("nbdinfo", ["--list", &uri.replace(&format!("/{DISK}"), "/")]);
    assert!(listed.contains(&format!("Weir disk {DISK}, by node n1")), "{listed}");
    let directory = bench.directory.path();
    let (source, back) = (directory.join("source"), directory.join("back"));
    let mut data = vec![0; SIZE as usize];
    fastrand::Rng::with_seed(seed()).fill(&mut data);
    std::fs::write(&source, &data).unwrap();
    run("nbdcopy", ["--flush".as_ref(), source.as_os_str(), uri.as_ref()]);
    run("nbdcopy", [uri.as_ref(), back.as_os_str()]);
    assert!(std::fs::read(&back).unwrap() == data, "nbdcopy read something else");
    let raw = ["-f", "raw"];
    let commands =
        ["-c", "write -P 7 1M 300k", "-c", "write -z 3M 1M", "-c", "flush", "-c", "read -P 7 1M 300k"];
    run("qemu-io", raw.into_iter().chain(commands).chain([uri.as_str()]));
    run(
        "qemu-io",
        raw.into_iter().chain(["-c", "read -P 7 1M 300k", "-c", "read -P 0 3M 1M"]).chain([unix(
            &bench, "n1",
        )
        .to_string()
        .as_str()]),
    );
    let map = run("qemu-img", ["map", "--output=json", "-f", "raw", &uri]);
    assert!(map.contains("\"start\": 0, \"length\""), "block status comes through: {map}");
    // All of them said goodbye, and their places are free again.
    let gone = || bench.disk()?.detail.filter(|detail| detail.clients == 0 && detail.forwarders.is_empty());
    await_some(SOON, gone, || format!("{:#?}", bench.disk()));
    // A client is a client, by whichever way it came.
    let mut client = NbdClient::connect(&unix(&bench, &door)).unwrap();
    client.write(0, &[1; 4096], false).unwrap();
    let error = bench.lab.client("n1").unwrap().delete(DISK, &Delete::default()).unwrap_err();
    assert!(error.message.contains("1 client"), "{error:?}");
}

/// Clients that can go elsewhere are asked to by a node that is drained; one on its host is served until the node stops.
#[test]
fn a_node_that_is_drained_sends_its_clients_away() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let door = doors(&bench)[0].clone();
    let node = bench.lab.node(&door).unwrap();
    let beyond = Uri::tcp(node.nbd_tcp, DISK);
    let (mut far, mut near) =
        (NbdClient::connect(&beyond).unwrap(), NbdClient::connect(&unix(&bench, &door)).unwrap());
    far.write(0, &[1; 4096], false).unwrap();
    near.write(4096, &[2; 4096], false).unwrap();
    let api = bench.lab.client("n1").unwrap();
    api.drain_node(&door, &DrainNode { fewer_copies: true, dry_run: false }).unwrap();
    let ends = || far.read(0, &mut [0; 4096]).is_err().then_some(());
    await_some(SOON, ends, || "it is still served".into());
    let refused = NbdClient::connect(&beyond).map(drop).unwrap_err().to_string();
    let there = unix(&bench, "n1").to_string();
    assert!(refused.contains(&there) && refused.contains("is drained"), "{refused}");
    let mut data = [0; 4096];
    near.read(4096, &mut data).unwrap();
    assert_eq!(data, [2; 4096]);
    NbdClient::connect(&unix(&bench, &door)).unwrap().read(0, &mut data).unwrap();
    assert_eq!(data, [1; 4096]);
    api.resume_node(&door).unwrap();
    let again = || NbdClient::connect(&beyond).ok();
    await_some(SOON, again, || "it takes nobody back".into()).read(0, &mut data).unwrap();
}

/// The network between a node that forwards and the owner is cut, and both have their sessions. Clients with and without requests under way
/// are ended, while TCP tries for some 15 minutes, and what they had sent does not land later (P4, P9).
#[test]
fn a_cut_between_a_forwarding_node_and_the_owner_ends_its_clients() {
    let _turn = alone();
    let seed = seed();
    let bench = Bench::up(4, "write-back+1", |config| config.network = true);
    let doors = doors(&bench);
    let sockets: Vec<_> = doors.iter().map(|name| unix(&bench, name)).collect();
    let mut idle = NbdClient::connect(&sockets[0]).unwrap();
    // Reads none of its answers, so that the owner cannot send them.
    let mut deaf = shaken_hands(&bench.lab.node(&doors[0]).unwrap().nbd_unix).unwrap();
    deaf.write_all(&request(0, 4 << 20).repeat(32)).unwrap();
    let mut turn = 0;
    let by_turns = move |_: u64| {
        turn += 1;
        Some(sockets[(turn - 1) % sockets.len()].clone())
    };
    // The load itself waits for longer than the nodes do.
    let patient = Duration::from_secs(120);
    let settings = Settings {
        depth: 32,
        seed,
        reconnect_for: patient,
        timeout: patient,
        atomicity: Atomicity::Block,
        ..Settings::default()
    };
    let load = VerifyingLoad::new(new_history(seed), settings, Box::new(by_turns));
    let progress = load.progress();
    let owner = bench.owner();
    let (mut load, ()) = during(load, Duration::from_secs(2), || {
        // The kernel's probes become rare meanwhile.
        thread::sleep(Duration::from_secs(14));
        progress.take_longest_stall();
        let network = bench.lab.network().unwrap();
        network.cut(network.between(&doors[0], &owner)).unwrap();
        thread::sleep(Duration::from_secs(1));
        let before = progress.acknowledged();
        let goes_on = || (progress.acknowledged() > before + 500).then_some(());
        await_some(patient / 2, goes_on, || bench.logs());
        let stall = progress.take_longest_stall();
        eprintln!("stall of a client whose node has lost the owner: {stall:?}");
        assert!(stall < Duration::from_secs(40), "{stall:?}");
        // Before the client was let go: what it had sent cannot land after what it sends again.
        assert_eq!(bench.disk().unwrap().detail.unwrap().forwarders, [doors[1].clone()]);
        let began = Nanos::now();
        idle.read(0, &mut [0; 4096]).unwrap_err();
        assert!(Nanos::now() - began < SOON);
        bench.lab.network().unwrap().restore().unwrap();
    });
    assert_eq!(bench.owner(), owner, "nothing was taken over");
    assert!(load.progress().reconnects() >= 1);
    let serves = || unix_serves(&bench, &doors[0]).then_some(());
    await_some(SOON, serves, || bench.logs());
    bench.judge(&mut load, seed);
    bench.check_backing(&mut load.into_history());
}

fn unix_serves(bench: &Bench, node: &str) -> bool {
    NbdClient::connect(&unix(bench, node)).is_ok_and(|mut client| client.read(0, &mut [0; 4096]).is_ok())
}

/// A connection in the transmission phase, by the oldest way to it.
fn shaken_hands(socket: &Path) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend_from_slice(b"IHAVEOPT");
    hello.extend_from_slice(&1_u32.to_be_bytes());
    hello.extend_from_slice(&(DISK.len() as u32).to_be_bytes());
    hello.extend_from_slice(DISK.as_bytes());
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut [0; 10]).ok()?;
    Some(stream)
}

fn request(command: u8, length: u32) -> Vec<u8> {
    let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, command];
    bytes.extend_from_slice(&[[7; 8], [0; 8]].concat());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

/// Memory of a process, in bytes.
fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Garbage, lengths beyond any, clients that read nothing, and too many of them: a guest on the same node is served, and memory is
/// bounded (P10).
#[test]
fn hostile_clients_of_a_node_that_forwards_harm_nobody() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let door = doors(&bench)[0].clone();
    let node = bench.lab.node(&door).unwrap();
    let mut guest = NbdClient::connect(&unix(&bench, &door)).unwrap();
    guest.write(0, &[9; 4096], false).unwrap();
    let before = memory(node.process.unwrap().pid);
    for hostile in [vec![0xff; 4096], request(1, u32::MAX), request(0, u32::MAX), request(99, 0)] {
        let mut stream = shaken_hands(&node.nbd_unix).unwrap();
        let _ = stream.write_all(&hostile);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 1 << 20, "{} bytes", answer.len());
    }
    let alone = || bench.disk()?.detail.filter(|detail| detail.clients == 1);
    await_some(SOON, alone, || format!("{:#?}", bench.disk()));
    thread::sleep(Duration::from_millis(1500));
    // Each asks for 128 MiB and reads none of it.
    let mut deaf: Vec<_> = std::iter::from_fn(|| {
        let mut stream = shaken_hands(&node.nbd_unix)?;
        stream.write_all(&request(0, 4 << 20).repeat(32)).unwrap();
        Some(stream)
    })
    .take(63)
    .collect();
    thread::sleep(Duration::from_secs(2));
    let mut data = [0; 4096];
    guest.read(0, &mut data).unwrap();
    assert_eq!(data, [9; 4096]);
    let grown = memory(node.process.unwrap().pid).saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes for {} clients that read nothing", deaf.len());
    // Its disk has no place left here, whose handshake takes none.
    if let Some(mut refused) = shaken_hands(&node.nbd_unix) {
        assert_eq!(refused.read(&mut [0; 1]).unwrap_or(0), 0, "it is turned away");
    }
    // The others hold the disk's share of its owner's buffers.
    let mut last = deaf.pop().unwrap();
    drop(deaf);
    let mut answer = vec![0; 16];
    last.read_exact(&mut answer).unwrap();
    assert_eq!(
        (&answer[..4], &answer[8..]),
        (&[0x67, 0x44, 0x66, 0x98][..], &[7; 8][..]),
        "an answer of its own"
    );
    drop(last);
    let gone = || bench.disk()?.detail.filter(|detail| detail.clients == 1);
    await_some(SOON, gone, || format!("{:#?}", bench.disk()));
    assert_eq!(bench.lab.node(&door).unwrap().process_state(), ProcessState::Running);
    let began = Nanos::now();
    guest.write(0, &[8; 4096], false).unwrap();
    assert!(Nanos::now() - began < Duration::from_secs(5));
}
