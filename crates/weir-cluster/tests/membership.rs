//! Nodes that join, stay, lose contact and return.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use common::wait::eventually;
use common::{Machine, node};
use weir_block::Nanos;
use weir_cluster::events::{Events, MAX_EVENTS};
use weir_cluster::housekeeping::prune_notes;
use weir_cluster::membership::{
    LiveNodes, NodeSession, SessionConfig, SessionError, SessionState, declare_stopped, session_over,
};
use weir_cluster::ownership::claim_free;
use weir_cluster::records::{
    DiskRecord, Medium, MediumSpace, NodeRecord, NodeRef, Policy, Record, Source, keys,
};
use weir_cluster::registry::{Registry, RegistryError, Transaction};

fn config(ttl_ms: u64) -> SessionConfig {
    SessionConfig { ttl: Duration::from_millis(ttl_ms), margin: Duration::from_millis(ttl_ms / 4) }
}

fn disk(name: &str) -> DiskRecord {
    DiskRecord::new(name, "v", Source::File { name: name.into() }, 1 << 20, 512, Policy::WriteBack(1))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_keeps_its_deadline_ahead_and_its_name_to_itself() {
    let machine = Machine::start().await;
    let session = NodeSession::start(machine.client(), node("a", 1), config(600)).await.unwrap();
    let leased = session.leased();
    for _ in 0..15 {
        let left = leased.borrow().until - Nanos::now();
        assert!(left > Duration::ZERO && left <= Duration::from_millis(450), "{left:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let taken = NodeSession::start(machine.client(), node("a", 2), config(600)).await.unwrap_err();
    assert_eq!(
        taken,
        SessionError::NameTaken { holder: NodeRef::new("a", 1), address: node("a", 1).peer_address }
    );
    let said = taken.to_string();
    assert!(
        said.contains(&node("a", 1).peer_address.to_string()) && said.contains("set another name"),
        "{said}"
    );
    session.leave().await.unwrap();
    assert_eq!(leased.borrow().until, Nanos(0));
    NodeSession::start(machine.client(), node("a", 2), config(600)).await.unwrap();
    let bad = SessionConfig { ttl: Duration::from_secs(1), margin: Duration::from_millis(400) };
    assert!(matches!(
        NodeSession::start(machine.client(), node("b", 1), bad).await,
        Err(SessionError::Config(_))
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_lease_is_reported_and_guards_refuse_late_changes() {
    let machine = Machine::start().await;
    let registry = machine.client();
    let session = NodeSession::start(Arc::clone(&registry), node("a", 1), config(900)).await.unwrap();
    let free = disk("d");
    registry.transact(free.create(keys::disk("d"))).await.unwrap();
    let entry = registry.get("disks/d").await.unwrap().unwrap();
    let claim = claim_free(&free, &session.node_ref()).unwrap().replace(&entry).when(session.guard());
    // Revoke the lease from outside.
    registry.revoke(session.lease()).await.unwrap();
    let mut state = session.state();
    let lost = state.wait_for(|state| *state == SessionState::Lost);
    tokio::time::timeout(Duration::from_secs(10), lost).await.expect("never reported").unwrap();
    let before = *session.leased().borrow();
    assert_eq!(before.until, Nanos(0));
    assert!(matches!(registry.transact(claim).await, Err(RegistryError::Conflict { .. })));
    let over = session_over(&*registry, &session.node_ref()).await.unwrap();
    session.register_again().await.unwrap();
    assert_ne!(session.leased().borrow().number, before.number, "another session");
    assert!(session_over(&*registry, &session.node_ref()).await.is_err(), "the session is valid");
    let late = registry.transact(Transaction::new().put("k", "1").when(over)).await;
    assert!(
        matches!(late, Err(RegistryError::Conflict { .. })),
        "a takeover with an outdated condition: {late:?}"
    );
    assert!(session_over(&*registry, &NodeRef::new("a", 7)).await.is_ok(), "of another process");
    assert_eq!(*session.state().borrow(), SessionState::Held);
    assert!(session.leased().borrow().until > Nanos::now());
    let claim = claim_free(&free, &session.node_ref()).unwrap().replace(&entry).when(session.guard());
    registry.transact(claim).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn publishing_breaks_no_guard() {
    let machine = Machine::start().await;
    let registry = machine.client();
    let session = NodeSession::start(Arc::clone(&registry), node("a", 1), config(30_000)).await.unwrap();
    let guard = session.guard();
    let told = async || registry.get(&keys::node("a")).await.unwrap().unwrap();
    let before = told().await;
    session.publish(Vec::new(), 0).await.unwrap();
    assert_eq!(told().await, before, "nothing has changed, so nothing is written");
    let space = MediumSpace { medium: Medium::Ram, bytes: 9, free: 4, log: 2 };
    session.publish(vec![space], 3).await.unwrap();
    let record = NodeRecord::of(&told().await).unwrap();
    assert_eq!((record.media.as_slice(), record.load), (&[space][..], 3));
    assert_eq!((record.clone(), told().await.lease), (session.record(), Some(session.lease())));
    // A claim in flight while the node publishes is valid.
    registry.transact(Transaction::new().put("k", "1").when(guard.clone())).await.unwrap();
    registry.revoke(session.lease()).await.unwrap();
    let error = session.publish(vec![space], 4).await.unwrap_err();
    assert!(matches!(error, RegistryError::Conflict { .. } | RegistryError::LeaseExpired { .. }), "{error}");
    assert!(registry.transact(Transaction::new().put("k", "2").when(guard)).await.is_err());
    assert_eq!(registry.get(&keys::node("a")).await.unwrap(), None, "an expired node is not written back");
    // A node that joins again publishes its last state.
    session.register_again().await.unwrap();
    assert_eq!(NodeRecord::of(&told().await).unwrap(), record);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_registry_is_away_the_lease_is_unconfirmed_and_then_held_again() {
    let mut machine = Machine::start().await;
    let session = NodeSession::start(machine.client(), node("a", 1), config(600)).await.unwrap();
    let view = LiveNodes::start(machine.client(), keys::NODES).await.unwrap();
    machine.stop().await;
    let mut state = session.state();
    let wait = |wanted: SessionState| {
        let mut state = state.clone();
        async move {
            let wait = state.wait_for(|state| *state == wanted);
            tokio::time::timeout(Duration::from_secs(10), wait).await.expect("state never came").unwrap();
        }
    };
    wait(SessionState::Unconfirmed).await;
    assert!(session.leased().borrow().until <= Nanos::now());
    machine.restart().await;
    wait(SessionState::Held).await;
    assert!(session.leased().borrow().until > Nanos::now());
    assert!(view.now().contains_key("a"), "the view shows the last known state");
    state.mark_unchanged();
}

/// Its requests arrive, the answers do not: its lease must end, or no node could take its disks over (P9).
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_answers_of_the_registry_loses_its_lease() {
    let machine = Machine::start().await;
    let socket = machine.socket().with_extension("relay");
    let (deaf, hears) = tokio::sync::watch::channel(true);
    tokio::spawn(relay(UnixListener::bind(&socket).unwrap(), machine.socket(), hears));
    let session = NodeSession::start(common::client(&socket), node("a", 1), config(600)).await.unwrap();
    let view = LiveNodes::start(machine.client(), keys::NODES).await.unwrap();
    eventually("it is seen", || async { view.now().contains_key("a") }).await;
    deaf.send_replace(false);
    eventually("it is gone", || async { !view.now().contains_key("a") }).await;
    deaf.send_replace(true);
    let mut state = session.state();
    let lost = state.wait_for(|state| *state == SessionState::Lost);
    tokio::time::timeout(Duration::from_secs(10), lost).await.expect("never reported").unwrap();
}

/// Forwards one connection. Holds answers back while `hears` is false.
async fn relay(listener: UnixListener, registry: PathBuf, mut hears: tokio::sync::watch::Receiver<bool>) {
    let (node, registry) = (listener.accept().await.unwrap().0, UnixStream::connect(registry).await.unwrap());
    let ((mut asks, mut hear), (mut answers, mut take)) = (node.into_split(), registry.into_split());
    tokio::spawn(async move { tokio::io::copy(&mut asks, &mut take).await });
    let mut buffer = vec![0; 4096];
    while let Ok(length @ 1..) = answers.read(&mut buffer).await {
        hears.wait_for(|hears| *hears).await.unwrap();
        hear.write_all(&buffer[..length]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_live_nodes_are_followed_also_over_restarts() {
    let mut machine = Machine::start().await;
    let view = LiveNodes::start(machine.client(), keys::NODES).await.unwrap();
    assert!(view.now().is_empty());
    let a = NodeSession::start(machine.client(), node("a", 1), config(30_000)).await.unwrap();
    let b = NodeSession::start(machine.client(), node("b", 1), config(30_000)).await.unwrap();
    eventually("both are seen", || async { view.now().len() == 2 }).await;
    assert_eq!(view.now()["b"], b.record());
    machine.restart().await;
    a.leave().await.unwrap();
    eventually("one has left", || async { view.now().keys().eq(["b"]) }).await;
    // A record of a newer version is not shown, and does not affect the others.
    let bad = Transaction::new().put("nodes/c", "{\"v\":99}").put("nodes/b", b.record().encode());
    machine.client().transact(bad).await.unwrap();
    let _d = NodeSession::start(machine.client(), node("d", 1), config(30_000)).await.unwrap();
    eventually("the readable ones are seen", || async { view.now().keys().eq(["b", "d"]) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_ordered_and_bounded() {
    let machine = Machine::start().await;
    let events = Events::new(Arc::new(machine.embedded()), NodeRef::new("a", 1));
    for number in 0..MAX_EVENTS + 40 {
        events.record("test", "disk-1", &format!("event {number}")).await.unwrap();
    }
    let recent = events.recent(3).await.unwrap();
    let texts: Vec<_> = recent.iter().map(|event| &*event.text).collect();
    assert_eq!(texts, ["event 1037", "event 1038", "event 1039"]);
    let kept = events.recent(usize::MAX).await.unwrap().len();
    assert!((MAX_EVENTS..MAX_EVENTS + 40).contains(&kept), "{kept}");
    events.record("test", "d", &"é".repeat(5000)).await.unwrap();
    assert_eq!(events.recent(1).await.unwrap()[0].text.len(), 4096);
}

#[tokio::test(flavor = "multi_thread")]
async fn notes_that_no_disk_needs_are_pruned() {
    let machine = Machine::start().await;
    let registry = machine.embedded();
    let (dead, other) = (NodeRef::new("a", 1), NodeRef::new("a", 2));
    declare_stopped(&registry, &dead).await.unwrap();
    declare_stopped(&registry, &dead).await.unwrap();
    declare_stopped(&registry, &other).await.unwrap();
    let owned = claim_free(&disk("d"), &dead).unwrap();
    registry.transact(owned.create(keys::disk("d"))).await.unwrap();
    assert_eq!(prune_notes(&registry).await.unwrap(), 1);
    assert!(registry.get(&keys::stopped(&dead)).await.unwrap().is_some());
    registry.transact(Transaction::new().put("disks/e", "{\"v\":9}")).await.unwrap();
    declare_stopped(&registry, &other).await.unwrap();
    assert_eq!(prune_notes(&registry).await.unwrap(), 0, "an unreadable disk may need any note");
}
