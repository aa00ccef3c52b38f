//! A real etcd of three members with mutual TLS, as the registry of a lab.

use std::time::Duration;

use tokio::runtime::Runtime;
use weir_block::Nanos;
use weir_cluster::registry::{Registry, Transaction};
use weir_etcd::{Etcd, EtcdConfig};
use weir_lab::LabEtcd;

#[path = "../../../weir-etcd/tests/support/mod.rs"]
mod support;

/// The prefix of the lab's keys, without its slashes.
const PREFIX: &str = "lab";

/// Longest wait for a quorum after enough members run.
const QUORUM: Duration = Duration::from_secs(40);

/// Time limit of a question whether there is a quorum.
const ASK: Duration = Duration::from_millis(500);

/// Three members. The end of this value ends them.
pub struct Members {
    // Dropped before the runtime that its connections belong to.
    cluster: support::Cluster,
    runtime: Runtime,
}

impl Members {
    /// Number of members.
    pub const COUNT: usize = 3;

    pub fn up() -> Members {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let cluster = runtime.block_on(support::Cluster::three());
        Members { cluster, runtime }
    }

    /// For the nodes of a lab.
    pub fn lab(&self) -> LabEtcd {
        let tls = self.cluster.tls().unwrap();
        let (certificate, key) = tls.identity.unwrap();
        let members = (0..Self::COUNT).map(|member| self.cluster.socket(member)).collect();
        LabEtcd { members, prefix: format!("/{PREFIX}/"), ca: tls.ca, certificate, key }
    }

    /// The member that leads. All members that run answer, or this takes seconds.
    pub fn leader(&self) -> usize {
        self.runtime.block_on(self.cluster.leader())
    }

    pub fn kill(&mut self, member: usize) {
        self.cluster.kill(member);
    }

    /// Starts a member that was killed; does not wait for it.
    pub fn start(&mut self, member: usize) {
        self.cluster.start_member(member);
    }

    pub fn pause(&self, member: usize) {
        self.cluster.pause(member);
    }

    pub fn resume(&self, member: usize) {
        self.cluster.resume(member);
    }

    /// Starts all members that do not run, and waits until each of them answers.
    pub fn start_all(&mut self) {
        self.runtime.block_on(self.cluster.start());
    }

    /// Forgets the history of all changes so far. Returns the revision of the last one.
    pub fn compact(&self) -> u64 {
        self.runtime.block_on(async {
            let registry = self.cluster.registry(PREFIX);
            let revision = registry.list("").await.unwrap().revision;
            // Of a member that runs: changes reach the leader through any of them.
            let mut admin = self.cluster.admin(0).await;
            admin.compact(i64::try_from(revision).unwrap(), None).await.unwrap();
            revision
        })
    }

    /// Waits until some member acknowledges a change; the time when that was.
    pub fn await_quorum(&self) -> Nanos {
        let ask = |member: usize| EtcdConfig {
            endpoints: vec![self.cluster.endpoint(member)],
            request_timeout: ASK,
            attempt_timeout: ASK,
            ..self.cluster.config("quorum")
        };
        self.runtime.block_on(async {
            // Each member by itself: none waits for one that stands still.
            let mut members = tokio::task::JoinSet::new();
            for member in 0..Self::COUNT {
                members.spawn(acknowledges(ask(member)));
            }
            let first = tokio::time::timeout(QUORUM, members.join_next()).await;
            let first = first.unwrap_or_else(|_| panic!("etcd has no quorum after {QUORUM:?}"));
            first.expect("there are members").unwrap()
        })
    }

    /// How long each of `count` changes of one key takes, one after the other.
    pub fn time_changes(&self, count: usize) -> Vec<Duration> {
        let registry = self.cluster.registry(PREFIX);
        self.runtime.block_on(time_changes(&registry, count))
    }
}

/// Waits until a change is acknowledged.
async fn acknowledges(config: EtcdConfig) -> Nanos {
    loop {
        // A fresh one each time: no connection of it is in a bad state, or pauses before the next attempt.
        let registry = Etcd::new(config.clone()).unwrap();
        if registry.transact(Transaction::new().put("k", "")).await.is_ok() {
            return Nanos::now();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How long each of `count` compare-and-swaps of one key takes, one after the other.
pub async fn time_changes(registry: &dyn Registry, count: usize) -> Vec<Duration> {
    const KEY: &str = "time-of-a-change";
    let put = Transaction::new().put(KEY, "0");
    let mut revision = registry.transact(put).await.unwrap().revision;
    let mut times = Vec::with_capacity(count);
    for number in 0..count {
        let start = Nanos::now();
        let swap = Transaction::new().unchanged(KEY, revision).put(KEY, number.to_string());
        revision = registry.transact(swap).await.unwrap().revision;
        times.push(Nanos::now() - start);
    }
    registry.transact(Transaction::new().delete(KEY)).await.unwrap();
    times
}
