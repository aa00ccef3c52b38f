//! The contract of all registries, against real etcd: one member without TLS, three with mutual TLS.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

#[path = "../../weir-cluster/tests/common/wait.rs"]
mod wait;
#[path = "../../weir-cluster/tests/contract/mod.rs"]
#[macro_use]
mod contract;
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::Subject;
use support::Cluster;
use weir_cluster::Registry;
use weir_etcd::{Etcd, EtcdConfig, MAX_REQUEST};

/// A registry of its own for each part, in one etcd.
struct Tested<'a> {
    cluster: &'a mut Cluster,
    part: &'static str,
    interruptions: usize,
}

impl Subject for Tested<'_> {
    fn client(&self) -> Arc<dyn Registry> {
        Arc::new(self.cluster.registry(self.part))
    }

    fn hurried(&self) -> Arc<dyn Registry> {
        let request_timeout = Duration::from_millis(300);
        Arc::new(Etcd::new(EtcdConfig { request_timeout, ..self.cluster.config(self.part) }).unwrap())
    }

    async fn stop(&mut self) {
        self.cluster.kill_all();
    }

    async fn start(&mut self) {
        self.cluster.start().await;
    }

    /// One member after the other.
    async fn interrupt(&mut self) {
        let member = self.interruptions % self.cluster.members.len();
        self.interruptions += 1;
        self.cluster.kill(member);
        self.cluster.start().await;
    }

    /// One and a half election time-outs, in whole seconds, is the shortest.
    fn ttl(&self) -> (Duration, Duration) {
        let given = if self.cluster.members.len() == 1 { 1 } else { 2 };
        (Duration::from_millis(100), Duration::from_secs(given))
    }

    fn two_values(&self) -> usize {
        // Keys, prefix and overhead.
        MAX_REQUEST - 2 * (1 + self.part.len() + "/keys/a".len() + 48)
    }
}

macro_rules! all_parts {
    ($($part:ident),+) => {
        async fn all_parts(cluster: &mut Cluster) {$(
            let start = Instant::now();
            let part = stringify!($part);
            contract::$part(&mut Tested { cluster: &mut *cluster, part, interruptions: 0 }).await;
            eprintln!("{part}: {:?}", start.elapsed());
        )+}
    };
}

contract!(all_parts);

#[tokio::test(flavor = "multi_thread")]
async fn one_member_without_tls() {
    all_parts(&mut Cluster::one().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_members_with_mutual_tls() {
    all_parts(&mut Cluster::three().await).await;
}
