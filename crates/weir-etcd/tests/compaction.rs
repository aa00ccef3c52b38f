//! Compactions of a real etcd while a watch runs, is cut off, or begins.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::time::Duration;

use support::Cluster;
use support::relay::Relay;
use weir_cluster::registry::{Registry, RegistryError, Transaction, Watch, WatchEvent};
use weir_etcd::{Etcd, EtcdConfig};

async fn next(watch: &mut Watch) -> Result<WatchEvent, RegistryError> {
    tokio::time::timeout(Duration::from_secs(20), watch.next()).await.expect("no event came")
}

async fn put(registry: &Etcd, key: &str) -> u64 {
    registry.transact(Transaction::new().put(key, "")).await.unwrap().revision
}

async fn compact(cluster: &Cluster, revision: u64) {
    let revision = i64::try_from(revision).unwrap();
    cluster.admin(0).await.compact(revision, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_watch_does_not_notice() {
    let cluster = Cluster::one().await;
    let registry = cluster.registry("r");
    let mut watch = registry.watch("w/", registry.list("").await.unwrap().revision).await.unwrap();
    // etcd reads a new watch's first changes from the history, some 100 ms later.
    put(&registry, "w/first").await;
    assert_eq!(next(&mut watch).await.unwrap().change.key(), "w/first");
    for round in 0..50 {
        let revision = put(&registry, &format!("w/{round}")).await;
        if round % 5 == 0 {
            compact(&cluster, revision).await;
        }
    }
    for round in 0..50 {
        assert_eq!(next(&mut watch).await.unwrap().change.key(), format!("w/{round}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_from_before_a_compaction_has_to_list_again() {
    let cluster = Cluster::one().await;
    let registry = cluster.registry("r");
    let revisions = [put(&registry, "a").await, put(&registry, "b").await, put(&registry, "c").await];
    compact(&cluster, revisions[1]).await;
    for after in [0, 1, revisions[0] - 1, revisions[0]] {
        let ended = match registry.watch("", after).await {
            Ok(mut watch) => next(&mut watch).await.unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(ended, RegistryError::Compacted { oldest: revisions[1] }, "after {after}");
    }
    let mut watch = registry.watch("", revisions[1]).await.unwrap();
    assert_eq!(next(&mut watch).await.unwrap().change.key(), "c");
    let again = registry.list("").await.unwrap();
    assert_eq!((again.entries.len(), again.revision), (3, revisions[2]));
}

/// A watch is cut off, something happens, the history is compacted somewhere, and the watch comes back.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_was_away_resumes_or_has_to_list_again() {
    let cluster = Cluster::one().await;
    let relay = Relay::to(cluster.socket(0)).await;
    // Where the compaction is, relative to the last revision that the watch has seen, and whether it can go on.
    for (name, compacted, resumes) in [
        ("none", None, true),
        ("before", Some(-1), true),
        ("at", Some(0), true),
        ("next", Some(1), false),
        ("later", Some(2), false),
        ("last", Some(3), false),
    ] {
        let registry = cluster.registry(name);
        let endpoints = vec![format!("http://127.0.0.1:{}", relay.port)];
        let away = Etcd::new(EtcdConfig { endpoints, ..cluster.config(name) }).unwrap();
        let start = put(&registry, "victim").await;
        let mut watch = away.watch("", start).await.unwrap();
        put(&registry, "first").await;
        let seen = put(&registry, "seen").await;
        assert_eq!(next(&mut watch).await.unwrap().change.key(), "first");
        assert_eq!(next(&mut watch).await.unwrap().change.key(), "seen");
        relay.cut();
        // The first change that the watch misses is a deletion: a compaction at its revision removes every trace of it.
        let deleted = registry.transact(Transaction::new().delete("victim")).await.unwrap().revision;
        assert_eq!(deleted, seen + 1);
        put(&registry, "second").await;
        put(&registry, "third").await;
        if let Some(distance) = compacted {
            compact(&cluster, seen.checked_add_signed(distance).unwrap()).await;
        }
        relay.mend();
        if resumes {
            for expected in ["victim", "second", "third"] {
                let event = next(&mut watch).await.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(event.change.key(), expected, "{name}");
            }
            put(&registry, "fourth").await;
            assert_eq!(next(&mut watch).await.unwrap().change.key(), "fourth", "{name}");
        } else {
            let error = next(&mut watch).await.unwrap_err();
            assert!(matches!(error, RegistryError::Compacted { .. }), "{name}: {error}");
            let keys = away.list("").await.unwrap().entries;
            assert_eq!(keys.len(), 4, "{name}: listed again");
        }
    }
}

/// More changes than one answer of etcd takes, with large values, so that etcd splits answers within a revision.
#[tokio::test(flavor = "multi_thread")]
async fn large_revisions_stay_whole() {
    let cluster = Cluster::one().await;
    let registry = cluster.registry("r");
    let start = registry.list("").await.unwrap().revision;
    for round in 0..6 {
        let value = vec![round; 600_000];
        let both = Transaction::new().put("a", &*value).put("b", &*value).put("c", "");
        registry.transact(both).await.unwrap();
    }
    for number in 0..2000_u32 {
        if number % 20 == 0 {
            let many =
                (0..100).fold(Transaction::new(), |all, key| all.put(format!("n/{key}"), number.to_string()));
            registry.transact(many).await.unwrap();
        }
    }
    let mut watch = registry.watch("", start).await.unwrap();
    for round in 0..6_u64 {
        for key in ["a", "b", "c"] {
            let event = next(&mut watch).await.unwrap();
            assert_eq!((event.revision, event.change.key()), (start + 1 + round, key));
        }
    }
    for revision in 0..100_u64 {
        for key in 0..100 {
            let event = next(&mut watch).await.unwrap();
            assert_eq!((event.revision, event.change.key()), (start + 7 + revision, &*format!("n/{key}")));
        }
    }
}
