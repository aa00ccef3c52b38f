//! An etcd that is far away: every call takes long, and none is given up for that.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::Cluster;
use support::relay::Relay;
use weir_cluster::membership::{NodeSession, SessionConfig, SessionState};
use weir_cluster::records::NodeRecord;
use weir_cluster::registry::{Registry, Transaction};
use weir_etcd::{Etcd, EtcdConfig};

const TTL: Duration = Duration::from_secs(5);

/// A registry whose bytes take so long in each direction, at three endpoints.
async fn far_away(cluster: &Cluster, name: &str, delay: Duration) -> (Vec<Relay>, Etcd) {
    let near = cluster.registry(name);
    near.transact(Transaction::new().put("k", "1")).await.unwrap();
    let mut relays = Vec::new();
    for _ in 0..3 {
        relays.push(Relay::slow(cluster.socket(0), delay).await);
    }
    let endpoints = relays.iter().map(|relay| format!("http://127.0.0.1:{}", relay.port)).collect();
    // As a node with this time to live sets it.
    let config = EtcdConfig { endpoints, attempt_timeout: TTL / 5, ..cluster.config(name) };
    (relays, Etcd::new(config).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_watches_succeed_however_slow_the_answers() {
    let cluster = Arc::new(Cluster::one().await);
    let tests = [200, 400, 800].map(|delay| {
        let cluster = Arc::clone(&cluster);
        tokio::spawn(async move {
            let name = format!("r{delay}");
            let (_relays, registry) = far_away(&cluster, &name, Duration::from_millis(delay)).await;
            let start = Instant::now();
            assert_eq!(registry.get("k").await.unwrap().unwrap().value, b"1", "{name}");
            let lease = registry.grant(TTL).await.unwrap();
            assert_eq!(registry.keep_alive(lease).await.unwrap(), TTL, "{name}");
            let revision = registry.list("").await.unwrap().revision;
            let mut watch = registry.watch("", revision).await.unwrap();
            registry.transact(Transaction::new().put("l", "2")).await.unwrap();
            let event = tokio::time::timeout(Duration::from_secs(10), watch.next()).await.unwrap().unwrap();
            assert_eq!(event.change.key(), "l", "{name}");
            eprintln!("{name}: {:?}", start.elapsed());
        })
    });
    for test in tests {
        test.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_held_however_slow_the_answers() {
    let cluster = Arc::new(Cluster::one().await);
    let tests = [200, 400].map(|delay| {
        let cluster = Arc::clone(&cluster);
        tokio::spawn(async move {
            let name = format!("s{delay}");
            let (_relays, registry) = far_away(&cluster, &name, Duration::from_millis(delay)).await;
            let config = SessionConfig { ttl: TTL, margin: TTL / 5 };
            let session = NodeSession::start(Arc::new(registry), node(), config).await.unwrap();
            let (leased, state) = (session.leased(), session.state());
            // The first keep-alive opens its stream.
            tokio::time::sleep(Duration::from_secs(4)).await;
            let start = Instant::now();
            while start.elapsed() < TTL + Duration::from_secs(2) {
                let is_trusted = weir_block::Nanos::now() < leased.borrow().until;
                assert!(is_trusted && *state.borrow() == SessionState::Held, "{name}: {:?}", start.elapsed());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    });
    for test in tests {
        test.await.unwrap();
    }
}

fn node() -> NodeRecord {
    NodeRecord {
        name: "n1".into(),
        incarnation: 1,
        flash: None,
        peer_address: ([127, 0, 0, 1], 1).into(),
        nbd_tcp: None,
        nbd_tls: None,
        nbd_unix: "/a".into(),
        api: "/b".into(),
        fault_domain: "default".into(),
        media: Vec::new(),
        load: 0,
        forwards: true,
    }
}
