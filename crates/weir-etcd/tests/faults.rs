//! Faults of a real etcd of three members: leaders that die, members that stop, no quorum. Every change is acknowledged once, seen
//! once, and in order.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::time::{Duration, Instant};

use support::Cluster;
use support::history::History;
use weir_cluster::registry::{LeaseId, Pending, Registry, RegistryError, Transaction};
use weir_etcd::{Etcd, EtcdConfig};

/// Longest permitted time without a change after a fault that leaves a quorum: an election, and attempts that time out.
const CHANGE_AGAIN: Duration = Duration::from_secs(15);

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_is_killed_in_the_middle_of_writes() {
    let mut cluster = Cluster::three().await;
    let history = History::start(4, || cluster.registry("h")).await;
    for round in 0..2 {
        history.progress(CHANGE_AGAIN).await;
        let leader = cluster.leader().await;
        cluster.kill(leader);
        let pause = history.progress(CHANGE_AGAIN).await;
        eprintln!("leader {leader} killed: first change after {pause:?}");
        cluster.start_member(leader);
        if round == 0 {
            cluster.ready().await;
        }
    }
    cluster.ready().await;
    let summary = history.finish(&cluster.registry("h")).await;
    eprintln!("{summary:?}");
    assert!(summary.changes > 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_is_paused_and_resumed() {
    let cluster = Cluster::three().await;
    let history = History::start(4, || cluster.registry("h")).await;
    // The endpoint that all clients use first, then the leader.
    for leader in [false, true] {
        history.progress(CHANGE_AGAIN).await;
        let member = if leader { cluster.leader().await } else { 0 };
        cluster.pause(member);
        // Calls in flight to that member wait for their deadline; new calls use another member.
        let pause = history.progress(CHANGE_AGAIN).await;
        eprintln!("member {member} paused: first change after {pause:?}");
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = history.acknowledged();
        history.progress(CHANGE_AGAIN).await;
        cluster.resume(member);
        history.progress(CHANGE_AGAIN).await;
        eprintln!("{} changes meanwhile", history.acknowledged() - before);
    }
    cluster.ready().await;
    let summary = history.finish(&cluster.registry("h")).await;
    eprintln!("{summary:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_quorum_is_lost_and_comes_back() {
    let mut cluster = Cluster::three().await;
    let history = History::start(2, || cluster.registry("h")).await;
    history.progress(CHANGE_AGAIN).await;
    let limit = Duration::from_secs(1);
    let config = EtcdConfig { request_timeout: limit, ..cluster.config("other") };
    let registry = Etcd::new(config).unwrap();
    let lease = registry.grant(Duration::from_secs(2)).await.unwrap();
    let put = Transaction::new().put_leased("leased", "", lease);
    let revision = registry.transact(put).await.unwrap().revision;
    cluster.kill(1);
    cluster.kill(2);
    let late = limit + Duration::from_millis(500);
    for _ in 0..2 {
        ends("get", late, registry.get("k")).await;
        ends("list", late, registry.list("")).await;
        ends("watch", late, registry.watch("", revision)).await;
        ends("grant", late, registry.grant(limit)).await;
        ends("keep_alive", late, registry.keep_alive(lease)).await;
        ends("revoke", late, registry.revoke(LeaseId(9))).await;
        ends("transact", late, registry.transact(Transaction::new().put("k", ""))).await;
    }
    let before = history.acknowledged();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(history.acknowledged(), before, "without a quorum nothing is acknowledged");
    cluster.start_member(1);
    eprintln!("quorum back: first change after {:?}", history.progress(CHANGE_AGAIN).await);
    cluster.start().await;
    eprintln!("{:?}", history.finish(&cluster.registry("h")).await);
}

/// A call fails with `Unavailable` in time.
async fn ends<T>(what: &str, late: Duration, call: Pending<'_, T>) {
    let start = Instant::now();
    match call.await {
        Err(error @ RegistryError::Unavailable { .. }) => eprintln!("{what}: {:?}: {error}", start.elapsed()),
        Err(other) => panic!("{what}: {other:?}"),
        Ok(_) => panic!("{what}: there is no quorum"),
    }
    assert!(start.elapsed() < late, "{what}: {:?}", start.elapsed());
}
