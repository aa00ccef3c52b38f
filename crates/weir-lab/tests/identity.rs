//! Nodes that prove to each other who they are: real processes with certificates of one authority, and strangers among them.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone, during, new_history, seed};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use weir_accel::lineage::Lineage;
use weir_accel::wire::{Batch, Hello, MessageKind};
use weir_block::Nanos;
use weir_cluster::records::NodeRef;
use weir_identity::{Authority, ClusterId, Store};
use weir_net::frame;
use weir_node::api::{NodeStatus, PeerProtection};
use weir_node::identity::NodeIdentity;
use weir_node::peer::{Greeting, Purpose};
use zerocopy::IntoBytes;

/// Longest time until a node reports a stranger.
const SOON: Duration = Duration::from_secs(10);

fn up() -> Bench {
    let bench = Bench::up(3, "write-back+1", |config| config.identities = true);
    for node in bench.lab.nodes() {
        assert_eq!(node.client().status().unwrap().peers, PeerProtection::Tls);
    }
    bench
}

/// Written under load, owner killed, taken over; then every block that was acknowledged is there.
#[test]
fn nothing_is_lost_with_an_owner_that_replicates_over_tls() {
    let _turn = alone();
    let (seed, mut bench) = (seed(), up());
    let mut history = new_history(seed);
    for _ in 0..2 {
        let former = bench.owner();
        let load = bench.load(history, seed);
        let lab = &mut bench.lab;
        let (mut load, ()) = during(load, Duration::from_millis(1500), || {
            thread::sleep(Duration::from_millis(700));
            lab.kill(&former).unwrap();
        });
        assert_ne!(bench.owner(), former);
        assert_eq!(load.found().mismatches, 0, "{:#?}{}", load.found().first, bench.logs());
        let all = load.check_all().unwrap();
        assert_eq!(all.mismatches, 0, "{:#?}{}", all.first, bench.logs());
        let progress = load.progress();
        assert!(progress.acknowledged() > 100, "the load did nothing to speak of");
        assert_eq!(progress.failed(), 0, "a guest saw an error (P9){}", bench.logs());
        history = load.into_history();
        bench.lab.start(&former).unwrap();
        bench.wait_effective();
    }
    bench.check_backing(&mut history);
}

/// A host that connects to nodes as it likes.
struct Host {
    /// Its certificate, and the trusted authorities: of another cluster than its own, so that the node is the one that refuses.
    shows: Arc<NodeIdentity>,
    trusts: Arc<NodeIdentity>,
}

fn identity(directory: &Path, authority: &Authority, name: &str) -> Arc<NodeIdentity> {
    let store = Store::open(directory).unwrap();
    store.create_node(&weir_lab::identities::credentials(authority, name).unwrap()).unwrap();
    store.replace_trust(&[authority.certificate().clone()]).unwrap();
    NodeIdentity::load(directory, name).unwrap()
}

impl Host {
    /// Sends bytes to a node, behind the handshake, and returns what that says until it hangs up.
    fn say(&self, node: &NodeStatus, bytes: &[u8]) -> Vec<u8> {
        let socket = connect(node);
        let config = self.trusts.tls().peer_client(self.shows.credentials(), &node.node.parse().unwrap());
        let name = ServerName::try_from("node").unwrap();
        let connection = ClientConnection::new(Arc::new(config.unwrap()), name).unwrap();
        let mut stream = StreamOwned::new(connection, socket);
        // The node may hang up in the middle of it.
        let _ = stream.write_all(bytes).and_then(|()| stream.flush());
        until_the_end(stream)
    }
}

fn connect(node: &NodeStatus) -> TcpStream {
    let view = node.nodes.iter().find(|view| view.name == node.node).unwrap();
    let socket = TcpStream::connect(view.peer_address.parse::<SocketAddr>().unwrap()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

/// All bytes until the other end closes the connection, with or without close_notify.
fn until_the_end(mut stream: impl Read) -> Vec<u8> {
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        let waits = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        assert!(!waits, "the node does not hang up");
    }
    answer
}

fn greeting(to: &NodeStatus, owner: &str, disk: &str, purpose: Purpose) -> Vec<u8> {
    let replica = NodeRef::new(to.node.clone(), to.incarnation);
    Greeting { disk: disk.into(), owner: owner.into(), replica, purpose }.encode()
}

const CLIENT: Purpose = Purpose::Client {
    structured_replies: false,
    extended_headers: false,
    block_sizes: true,
    base_allocation: false,
    forwarded: None,
};

/// Frames with which an owner begins a copy anew, far ahead of what the copy is in.
fn takes_the_copy_over(epoch: u64) -> Vec<u8> {
    let hello = Hello::new(epoch, Lineage::new(epoch), 0, false);
    let batch =
        Batch { epoch: epoch.into(), first: 1.into(), freed: 0.into(), count: 0.into(), complete: 1.into() };
    let mut frames = Vec::new();
    frame::encode(&mut frames, MessageKind::Hello as u16, 0, hello.as_bytes(), 0);
    frame::encode(&mut frames, MessageKind::Batch as u16, 1, batch.as_bytes(), 0);
    frames
}

/// A write of a block to the beginning of the disk, in NBD's transmission phase, and a read of it.
fn writes_and_reads() -> Vec<u8> {
    let request = |command: u8| {
        let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, command];
        bytes.extend_from_slice(&[0; 16]);
        bytes.extend_from_slice(&4096_u32.to_be_bytes());
        bytes
    };
    [request(1), vec![0xee; 4096], request(0)].concat()
}

/// The certificate is good, and the host has no part in the disk: while the owner lives, and between its death and the takeover.
#[test]
fn a_hostile_node_with_a_certificate_of_its_own_gets_nothing_and_changes_nothing() {
    let _turn = alone();
    let (seed, mut bench) = (seed(), up());
    let directory = tempfile::tempdir().unwrap();
    let authority = weir_lab::identities::authority(bench.lab.dir()).unwrap();
    let shows = identity(&directory.path().join("m"), &authority, "m");
    let hostile = Host { trusts: Arc::clone(&shows), shows };
    let view = bench.wait_effective();
    let (owner, member) = (view.owner.clone().unwrap(), view.replicas[0].clone());
    let [owner_status, member_status] =
        [&owner, &member].map(|node| bench.lab.client(node).unwrap().status().unwrap());
    let attack = |node: &NodeStatus| {
        for (name, purpose, frames) in [
            (owner.as_str(), Purpose::Replicate, takes_the_copy_over(view.epoch + 1)),
            ("m", Purpose::Replicate, takes_the_copy_over(view.epoch + 1)),
            (&owner, CLIENT, writes_and_reads()),
            (&member, CLIENT, writes_and_reads()),
            ("m", CLIENT, writes_and_reads()),
            ("m", Purpose::Read, writes_and_reads()),
        ] {
            let answer = hostile.say(node, &[greeting(node, name, DISK, purpose), frames].concat());
            assert!(answer.is_empty(), "{} answered {name}, {purpose:?}: {answer:02x?}", node.node);
        }
    };
    let load = bench.load(new_history(seed), seed);
    let lab = &mut bench.lab;
    let (mut load, ()) = during(load, Duration::from_secs(3), || {
        attack(&member_status);
        attack(&owner_status);
        lab.kill(&owner).unwrap();
        // The lease is a second long: nobody has taken over yet.
        attack(&member_status);
    });
    assert_ne!(bench.owner(), owner);
    let all = load.check_all().unwrap();
    assert_eq!(all.mismatches + load.found().mismatches, 0, "{:#?}{}", all.first, bench.logs());
    assert_eq!(load.progress().failed(), 0, "a guest saw an error{}", bench.logs());
    let log = std::fs::read_to_string(&bench.lab.node(&member).unwrap().log).unwrap();
    assert!(log.contains("its certificate is that of m"), "{log}");
    let events = bench.lab.client(&member).unwrap().events().unwrap();
    assert!(events.iter().any(|event| event.kind == "peer-refused"), "{events:#?}");
}

#[test]
fn who_is_no_node_of_the_cluster_is_refused_with_the_reason() {
    let _turn = alone();
    let bench = up();
    let directory = tempfile::tempdir().unwrap();
    let ours = weir_lab::identities::authority(bench.lab.dir()).unwrap();
    let now = ours.certificate().facts().not_before + 600;
    let theirs = Authority::create(ClusterId([9; 16]), now).unwrap();
    let status = bench.lab.client("n1").unwrap().status().unwrap();
    let frames = [greeting(&status, "n2", DISK, Purpose::Replicate), takes_the_copy_over(9)].concat();
    // No TLS.
    let mut plain = connect(&status);
    plain.write_all(&frames).unwrap();
    // An alert, and nothing else.
    let answer = until_the_end(plain);
    assert!(answer.is_empty() || answer[0] == 21, "{answer:02x?}");
    let log = || std::fs::read_to_string(&bench.lab.node("n1").unwrap().log).unwrap();
    let says = |words: &str| {
        let deadline = Nanos::now() + SOON;
        while !log().contains(words) {
            assert!(Nanos::now() < deadline, "no word of {words:?} in {}", log());
            thread::sleep(Duration::from_millis(20));
        }
    };
    says("does not speak TLS");
    // One line a second.
    thread::sleep(Duration::from_millis(1100));
    let shows = identity(&directory.path().join("shows"), &theirs, "n2");
    let trusts = identity(&directory.path().join("trusts"), &ours, "n2");
    assert!(Host { shows, trusts }.say(&status, &frames).is_empty());
    says("belongs to cluster");
}
