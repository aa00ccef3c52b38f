//! A node with a certificate of its own asks for everything that the peers' protocol has, about disks in which it has no part.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use weir_accel::lineage::Lineage;
use weir_accel::owner::Held;
use weir_accel::wire::{Batch, Confirm, Hello, MessageKind, Refuse};
use weir_cluster::records::{FormerOwner, MemberRecord, Mode, NodeRef, Policy, Record, Source, keys};
use weir_net::frame;
use zerocopy::IntoBytes;

use super::*;
use crate::config::FilesElsewhere;
use crate::control::disk::tests::{SOON, disk_of_a, neighbour, node, node_at};
use crate::control::faulty_registry::RegistryFaults;
use crate::control::rights::key;
use crate::control::rights::wire::{Answer, Ask, Question, Verdict};

/// A hostile host's side of a connection, and what this node made of it.
struct Attempt {
    stream: TcpStream,
    welcomed: Result<(), String>,
}

/// Greets node `a` as the host `proven`, with this greeting.
async fn greet(node: &Arc<Node>, proven: &str, greeting: &Greeting) -> Attempt {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    stream.write_all(&greeting.encode()).await.unwrap();
    let accepted = listener.accept().await.unwrap().0;
    let welcomed =
        welcome(accepted, node, &grants::places(), Some(proven)).await.map_err(|error| error.reason);
    Attempt { stream, welcomed }
}

fn greeting(disk: &str, owner: &str, purpose: Purpose) -> Greeting {
    Greeting { disk: disk.into(), owner: owner.into(), replica: NodeRef::new("a", 1), purpose }
}

const CLIENT: Purpose = Purpose::Client {
    structured_replies: false,
    extended_headers: false,
    block_sizes: true,
    base_allocation: false,
    forwarded: None,
};

/// Disk `d` is owned here and replicated to `b`; disk `e` is owned by `b`, formerly by `c`, and replicated here; `b` is dead, if
/// nobody says so yet. `m` is a member of the cluster and has no part in either.
async fn two_disks(node: &Arc<Node>) -> [DiskRecord; 2] {
    let m = MemberRecord { name: "m".into(), fault_domain: "default".into(), down_since_unix_ms: None };
    node.registry.transact(m.create(keys::member("m"))).await.unwrap();
    let mut members = node.records.members.changes();
    members.wait_for(|known| known.contains_key("m")).await.unwrap();
    let replicated = |record: &mut DiskRecord| {
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("b", 7)]);
    };
    let d = disk_of_a(node, replicated).await;
    node.here.insert(&d, None);
    let source = Source::File { name: "e".into() };
    let mut e = DiskRecord::new("e", "v", source, 1 << 20, 512, Policy::WriteBack(1));
    (e.owner, e.epoch, e.replicas) = (Some(NodeRef::new("b", 7)), 5, vec![NodeRef::new("a", 1)]);
    (e.mode, e.former) = (Mode::WriteBack, vec![FormerOwner::silent(NodeRef::new("c", 1), 4)]);
    node.registry.transact(e.create(keys::disk("e"))).await.unwrap();
    let mut disks = node.records.disks.changes();
    disks.wait_for(|known| known.contains_key("e")).await.unwrap();
    [d, e]
}

/// The connection has ended, and nothing came on it. One with bytes that nobody has read is reset, which is an end, too.
async fn is_dead(mut stream: TcpStream) -> bool {
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.expect("it has not ended");
    rest.is_empty()
}

#[tokio::test]
async fn a_greeting_beyond_the_record_is_refused_whatever_it_says() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    two_disks(&node).await;
    for (proven, asked, words) in [
        // In another node's name, which owns, follows or grants something.
        ("m", greeting("e", "b", Purpose::Replicate), "its certificate is that of m"),
        ("m", greeting("d", "b", CLIENT), "its certificate is that of m"),
        ("m", greeting("", "b", Purpose::Grants), "its certificate is that of m"),
        // In its own name: to fill or rewrite the copy here, to begin one, to write over the owner's own log.
        ("m", greeting("e", "m", Purpose::Replicate), "m does not own disk e"),
        ("m", greeting("d", "m", Purpose::Replicate), "m does not own disk d"),
        ("m", greeting("new", "m", Purpose::Replicate), "new"),
        // To read and write.
        ("m", greeting("d", "m", CLIENT), "does not follow"),
        ("m", greeting("e", "m", CLIENT), "does not follow"),
        ("m", greeting("d", "m", Purpose::Read), "this node answers no readers"),
        ("b", greeting("d", "b", Purpose::Read), "this node answers no readers"),
        // A member is not the owner, and the owner of one disk not that of another.
        ("b", greeting("d", "b", Purpose::Replicate), "b does not own disk d"),
        ("b", greeting("d", "b", CLIENT), "does not follow"),
        ("c", greeting("e", "c", Purpose::Replicate), "c does not own disk e"),
        // A certificate alone makes no node of the cluster.
        ("x", greeting("", "x", Purpose::Grants), "no node x is registered"),
    ] {
        let attempt = greet(&node, proven, &asked).await;
        let reason = attempt.welcomed.expect_err("welcomed");
        assert!(reason.contains(words), "{asked:?}: {reason:?} says nothing of {words:?}");
        assert!(is_dead(attempt.stream).await, "{asked:?}");
    }
    let other = Greeting { replica: NodeRef::new("a", 2), ..greeting("e", "b", Purpose::Replicate) };
    assert!(greet(&node, "b", &other).await.welcomed.is_err(), "meant for another process");
    // Other tasks of the node ask the shard for its state.
    while let Ok(command) = told.try_recv() {
        assert!(command.starts_with("Status"), "a shard has heard of it: {command}");
    }
    // Without these names all is as it was.
    greet(&node, "b", &greeting("e", "b", Purpose::Replicate)).await.welcomed.unwrap();
    loop {
        let command = tokio::time::timeout(SOON, told.recv()).await.unwrap().unwrap();
        if command.starts_with("Replicate") {
            break;
        }
    }
}

/// Where reading is allowed: by nodes of the cluster that are up, of disks that are served here, and each has few connections (P10).
#[tokio::test]
async fn readers_are_live_nodes_and_have_a_number_of_connections_each() {
    let directory = tempfile::tempdir().unwrap();
    let (mut node, mut told) = node(directory.path()).await;
    Arc::get_mut(&mut node).expect("nobody else has it yet").config.fuse.elsewhere = FilesElsewhere::Read;
    two_disks(&node).await;
    let reads = |disk: &str, from: &str| greeting(disk, from, Purpose::Read);
    for (from, asked, words) in [
        ("x", reads("d", "m"), "its certificate is that of x"),
        ("m", reads("d", "m"), "no node m is up"),
        ("x", reads("d", "x"), "no node x is up"),
    ] {
        let reason = greet(&node, from, &asked).await.welcomed.expect_err("welcomed");
        assert!(reason.contains(words), "{asked:?}: {reason:?} says nothing of {words:?}");
    }
    let _up = [neighbour(&node, "m").await, neighbour(&node, "f").await];
    let reason = greet(&node, "m", &reads("e", "m")).await.welcomed.expect_err("another owns it");
    assert!(reason.contains("not served here"), "{reason}");
    while told.try_recv().is_ok() {}
    // The shard of this test keeps no client, so the places are kept here.
    let places: Vec<_> = std::iter::from_fn(|| readers::admit(&node, "d", "m").ok()).take(100).collect();
    assert!((1..=8).contains(&places.len()), "{} connections", places.len());
    let reason = greet(&node, "m", &reads("d", "m")).await.welcomed.expect_err("it has its places");
    assert!(reason.contains("connections already"), "{reason}");
    greet(&node, "f", &reads("d", "f")).await.welcomed.expect("another node has places of its own");
    drop(places);
    greet(&node, "m", &reads("d", "m")).await.welcomed.expect("given back");
    let (entry, mut d) = change::read(&*node.registry, "d").await.unwrap();
    d.importing = 3;
    node.registry.transact(d.replace(&entry)).await.unwrap();
    let mut disks = node.records.disks.changes();
    disks.wait_for(|known| known["d"].importing == 3).await.unwrap();
    greet(&node, "m", &reads("d", "m")).await.welcomed.expect_err("half of an import");
}

/// A client is forwarded by a node that is up, and to the very disk that it has opened there.
#[tokio::test]
async fn clients_are_forwarded_by_live_nodes_to_the_disk_that_they_have_opened() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let [d, e] = two_disks(&node).await;
    let forwards = |from: &str, disk: &str, identity: u64| {
        let Purpose::Client { structured_replies, extended_headers, block_sizes, base_allocation, .. } =
            CLIENT
        else {
            unreachable!("it is one")
        };
        let forwarded = Some(identity);
        let purpose =
            Purpose::Client { structured_replies, extended_headers, block_sizes, base_allocation, forwarded };
        greeting(disk, from, purpose)
    };
    let reason = greet(&node, "m", &forwards("m", "d", d.id)).await.welcomed.expect_err("it is down");
    assert!(reason.contains("no node m is up"), "{reason}");
    let up = neighbour(&node, "m").await;
    for (asked, words) in [
        (forwards("m", "d", d.id + 1), "not served here"),
        (forwards("m", "e", e.id), "not served here"),
        (forwards("m", "none", d.id), "not served here"),
    ] {
        let attempt = greet(&node, "m", &asked).await;
        let reason = attempt.welcomed.expect_err("welcomed");
        assert!(reason.contains(words), "{asked:?}: {reason}");
        assert!(is_dead(attempt.stream).await, "{asked:?}");
    }
    while let Ok(command) = told.try_recv() {
        assert!(command.starts_with("Status"), "a shard has heard of it: {command}");
    }
    let mut attempt = greet(&node, "m", &forwards("m", "d", d.id)).await;
    attempt.welcomed.unwrap();
    let mut first = [0];
    attempt.stream.read_exact(&mut first).await.unwrap();
    assert_eq!(first, [crate::peer::WELCOME]);
    loop {
        let command = tokio::time::timeout(SOON, told.recv()).await.unwrap().unwrap();
        if command.starts_with("Attach") {
            break;
        }
    }
    drop(up);
}

/// Every frame of a replication channel, sent without waiting for an answer behind a greeting that is refused.
#[tokio::test]
async fn frames_behind_a_refused_greeting_reach_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    two_disks(&node).await;
    let hello = Hello::new(6, Lineage::new(5).continued(6, 0), 0, true);
    let batch =
        Batch { epoch: 6.into(), first: 1.into(), freed: 0.into(), count: 0.into(), complete: 1.into() };
    let held = Held { epoch: 6, last: 9, freed: 9, gap: 9, complete: true };
    let (confirm, refuse) = (Confirm::new(held), Refuse { epoch: 99.into() });
    let metas = [
        (MessageKind::Hello, hello.as_bytes()),
        (MessageKind::Batch, batch.as_bytes()),
        (MessageKind::Confirm, confirm.as_bytes()),
        (MessageKind::Refuse, refuse.as_bytes()),
    ];
    // Each kind alone, and all of them.
    let alone = metas.iter().map(|one| vec![*one]);
    let streams: Vec<Vec<u8>> = alone
        .chain([metas.to_vec()])
        .map(|some| {
            let mut frames = Vec::new();
            for (number, (kind, meta)) in (0..).zip(some) {
                frame::encode(&mut frames, kind as u16, number, meta, 0);
            }
            frames
        })
        .collect();
    // A read and a write of NBD's transmission phase.
    let nbd = [&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0][..], &[0; 20]].concat();
    let asks = |from: &'static str| {
        let replicate = ["d", "e"].map(|disk| greeting(disk, from, Purpose::Replicate));
        let replicate =
            replicate.into_iter().flat_map(|asked| streams.iter().map(move |one| (asked.clone(), one)));
        replicate.chain([(greeting("d", from, CLIENT), &nbd), (greeting("e", from, CLIENT), &nbd)])
    };
    // A stranger to both disks, and the former owner of one.
    for (asked, behind) in asks("m").chain(asks("c")) {
        let from = asked.owner.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        stream.write_all(&[&asked.encode(), &behind[..]].concat()).await.unwrap();
        let accepted = listener.accept().await.unwrap().0;
        assert!(welcome(accepted, &node, &grants::places(), Some(&from)).await.is_err());
        assert!(is_dead(stream).await, "an answer to {asked:?}");
    }
    while let Ok(command) = told.try_recv() {
        assert!(command.starts_with("Status"), "a shard has heard of it: {command}");
    }
}

async fn ask(stream: &mut TcpStream, ask: Ask, disk: &str, epoch: u64) -> Verdict {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let question = Question { number, ask, disks: vec![(disk.into(), epoch)] };
    stream.write_all(&question.encode()).await.unwrap();
    let answer = tokio::time::timeout(SOON, Answer::read(stream)).await.unwrap().unwrap();
    assert_eq!(answer.number, number);
    answer.verdicts[0]
}

#[tokio::test]
async fn grants_and_seals_are_the_owners_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let [_, e] = two_disks(&node).await;
    let length = Duration::from_secs(1);
    let renew = Ask::Renew { length, granted: true };
    let Attempt { mut stream, welcomed } = greet(&node, "m", &greeting("", "m", Purpose::Grants)).await;
    welcomed.expect("any node may ask");
    for disk in ["d", "e", "new"] {
        for epoch in [0, 1, 2, 3, 4, 5, 6, 7, 21, 22, 1 << 61, u64::MAX] {
            for what in [renew, Ask::Seal, Ask::Heard] {
                let verdict = ask(&mut stream, what, disk, epoch).await;
                assert!(verdict.is_err(), "{what:?} of {disk} in epoch {epoch}: {verdict:?}");
            }
        }
    }
    assert!(!node.rights.hears(&key(&e), 0), "the owner is not heard in its enemy's voice");
    // Nothing was sealed: the owner goes on in its epoch.
    let Attempt { stream: mut owner, welcomed } =
        greet(&node, "b", &greeting("", "b", Purpose::Grants)).await;
    welcomed.unwrap();
    ask(&mut owner, renew, "e", 5).await.expect("the owner's own epoch");
    assert!(node.rights.hears(&key(&e), 5));
    // Numbers beyond all bounds are refused even from the owner, and change nothing.
    for (what, epoch) in [
        (renew, u64::MAX),
        (Ask::Seal, u64::MAX),
        (renew, 5 + 1000),
        (Ask::Renew { length: Duration::from_secs(u64::MAX / 1_000_000_000), granted: true }, 5),
    ] {
        assert!(ask(&mut owner, what, "e", epoch).await.is_err(), "{what:?} in epoch {epoch}");
    }
    ask(&mut owner, renew, "e", 5).await.expect("nothing has changed");
    // A frame that is no question ends the connection.
    owner.write_all(&[0xff; 64]).await.unwrap();
    assert!(is_dead(owner).await);
}

/// Whoever owned or followed a disk has its certificate still. What the record says now counts.
#[tokio::test]
async fn a_former_owner_and_a_former_follower_are_refused_as_any_other_node() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    two_disks(&node).await;
    let change = async |disk: &str, change: &dyn Fn(&mut DiskRecord)| {
        let (entry, mut record) = change::read(&*node.registry, disk).await.unwrap();
        change(&mut record);
        node.registry.transact(record.replace(&entry)).await.unwrap();
        let mut disks = node.records.disks.changes();
        let seen = disks.wait_for(|known| known.get(disk) == Some(&record));
        tokio::time::timeout(SOON, seen).await.expect("a record that can be read").unwrap();
    };
    let refused = async |from: &str, asked: Greeting, words: &str| {
        let attempt = greet(&node, from, &asked).await;
        let reason = attempt.welcomed.expect_err("welcomed");
        assert!(reason.contains(words), "{asked:?}: {reason:?} says nothing of {words:?}");
        assert!(is_dead(attempt.stream).await, "{asked:?}");
    };
    let (follows, owns) = (greeting("d", "f", CLIENT), greeting("e", "b", Purpose::Replicate));
    change("d", &|d| d.follower = Some(NodeRef::new("f", 1))).await;
    greet(&node, "f", &follows).await.welcomed.expect("the follower");
    greet(&node, "b", &owns).await.welcomed.expect("the owner");
    change("d", &|d| d.follower = None).await;
    change("e", &|e| (e.owner, e.epoch) = (Some(NodeRef::new("c", 1)), 6)).await;
    while told.try_recv().is_ok() {}
    refused("f", follows.clone(), "does not follow").await;
    refused("b", owns.clone(), "b does not own disk e").await;
    change("d", &|d| d.follower = Some(NodeRef::new("g", 1))).await;
    refused("f", follows, "does not follow").await;
    change("e", &|e| {
        (e.owner, e.epoch, e.mode) = (None, 7, Mode::WriteThrough);
        e.replicas.clear();
    })
    .await;
    refused("b", owns, "b does not own disk e").await;
    while let Ok(command) = told.try_recv() {
        assert!(command.starts_with("Status"), "a shard has heard of it: {command}");
    }
}

/// A node with very many connections for grants must not keep others from sealing, or their owners from their grants.
#[tokio::test]
async fn no_node_takes_the_places_of_others_for_grants() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    two_disks(&node).await;
    let places = grants::places();
    let connect = async |name: &str| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        stream.write_all(&greeting("", name, Purpose::Grants).encode()).await.unwrap();
        let accepted = listener.accept().await.unwrap().0;
        welcome(accepted, &node, &places, Some(name)).await.map(|()| stream)
    };
    let mut taken = Vec::new();
    for _ in 0..600 {
        taken.extend(connect("m").await.ok());
    }
    assert!((1..=10).contains(&taken.len()), "{} connections", taken.len());
    let mut owner = connect("b").await.expect("another node has places of its own");
    ask(&mut owner, Ask::Renew { length: Duration::from_secs(1), granted: true }, "e", 5).await.unwrap();
    // They are given back.
    taken.clear();
    let again = async {
        loop {
            if connect("m").await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, again).await.expect("a place");
}

/// A question about very many disks must not become as many requests to the registry.
#[tokio::test]
async fn a_question_costs_the_registry_a_bounded_number_of_reads() {
    let (directory, faults) = (tempfile::tempdir().unwrap(), Arc::new(RegistryFaults::default()));
    let (node, _told) = node_at(directory.path(), Arc::clone(&faults)).await;
    two_disks(&node).await;
    let Attempt { mut stream, welcomed } = greet(&node, "m", &greeting("", "m", Purpose::Grants)).await;
    welcomed.unwrap();
    let before = faults.reads.load(Ordering::Relaxed);
    let disks = (0..1000).map(|number| (format!("disk-{number}"), 7)).collect();
    let question = Question { number: 1, ask: Ask::Seal, disks };
    stream.write_all(&question.encode()).await.unwrap();
    let answer = tokio::time::timeout(SOON, Answer::read(&mut stream)).await.unwrap().unwrap();
    assert!(answer.verdicts.len() == 1000 && answer.verdicts.iter().all(Result::is_err));
    let reads = faults.reads.load(Ordering::Relaxed) - before;
    assert!((1..=32).contains(&reads), "{reads} reads");
}

/// The view may lag behind what this node has read for a connection, and the registry may go away meanwhile (P9, P12).
#[tokio::test]
async fn an_owner_that_this_node_has_read_of_is_welcome_again_without_the_registry() {
    let (directory, faults) = (tempfile::tempdir().unwrap(), Arc::new(RegistryFaults::default()));
    let (node, _told) = node_at(directory.path(), Arc::clone(&faults)).await;
    two_disks(&node).await;
    let (replicates, former) =
        (greeting("e", "c", Purpose::Replicate), greeting("e", "b", Purpose::Replicate));
    faults.blind.store(true, Ordering::Relaxed);
    let (entry, mut e) = change::read(&*node.registry, "e").await.unwrap();
    (e.owner, e.epoch) = (Some(NodeRef::new("c", 1)), 7);
    node.registry.transact(e.replace(&entry)).await.unwrap();
    greet(&node, "c", &replicates).await.welcomed.expect("the owner, as the registry says");
    let Attempt { stream: mut owner, welcomed } =
        greet(&node, "c", &greeting("", "c", Purpose::Grants)).await;
    welcomed.unwrap();
    assert_eq!(node.records.disks.now()["e"].epoch, 5, "the view lags behind");
    faults.away.store(true, Ordering::Relaxed);
    greet(&node, "c", &replicates).await.welcomed.expect("after one lost connection");
    let renew = Ask::Renew { length: Duration::from_secs(1), granted: true };
    ask(&mut owner, renew, "e", 7).await.expect("a grant");
    assert!(greet(&node, "b", &former).await.welcomed.is_err(), "the view's owner is the former one");
    faults.away.store(false, Ordering::Relaxed);
    faults.blind.store(false, Ordering::Relaxed);
    let mut disks = node.records.disks.changes();
    disks.wait_for(|known| known["e"].epoch == 7).await.unwrap();
    greet(&node, "c", &replicates).await.welcomed.unwrap();
}

/// A question about more disks than records are read for one: each gets its turn, also behind disks that are not there.
#[tokio::test]
async fn each_disk_of_a_long_question_is_read_in_its_turn() {
    let (directory, faults) = (tempfile::tempdir().unwrap(), Arc::new(RegistryFaults::default()));
    let (node, _told) = node_at(directory.path(), Arc::clone(&faults)).await;
    let [_, e] = two_disks(&node).await;
    faults.blind.store(true, Ordering::Relaxed);
    let last = DiskRecord { name: "z".into(), ..e };
    node.registry.transact(last.create(keys::disk("z"))).await.unwrap();
    let Attempt { mut stream, welcomed } = greet(&node, "b", &greeting("", "b", Purpose::Grants)).await;
    welcomed.unwrap();
    let mut disks: Vec<_> = (0..40).map(|number| (format!("gone-{number}"), 5)).collect();
    disks.push(("z".into(), 5));
    let asked = Ask::Renew { length: Duration::from_secs(1), granted: true };
    for number in 1..=3 {
        let question = Question { number, ask: asked, disks: disks.clone() };
        stream.write_all(&question.encode()).await.unwrap();
        let answer = tokio::time::timeout(SOON, Answer::read(&mut stream)).await.unwrap().unwrap();
        let granted = answer.verdicts[40].is_ok();
        assert_eq!(granted, number == 3, "question {number}");
    }
}
