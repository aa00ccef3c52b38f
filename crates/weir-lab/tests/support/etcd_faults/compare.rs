//! etcd beside the embedded registry: the time of one change, and of a takeover.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use serde::Serialize;
use weir_block::Nanos;
use weir_cluster::remote::{Client, ClientConfig};

use super::figures::quantile;
use super::{in_memory, tune};
use crate::common::etcd::time_changes;
use crate::common::rounds::some_time;
use crate::common::{Bench, during, new_history};

/// Changes of one key, one after the other.
const CHANGES: usize = 500;

/// The figures of one kind of registry.
#[derive(Debug, Serialize)]
pub struct Comparison {
    pub registry: &'static str,
    pub changes: usize,
    pub change_median_ms: f64,
    pub change_p99_ms: f64,
    pub takeovers: usize,
    /// From the kill of the owner until a guest's write was answered by the next one.
    pub takeover_median_ms: f64,
    pub takeover_longest_ms: f64,
}

/// The embedded registry, on one machine and over links that hide the end of a process from it, and an etcd of three members with
/// TLS. All files are in memory.
pub fn compare(seed: u64, lease: Duration, takeovers: usize) -> Vec<Comparison> {
    let embedded = |network| {
        Bench::up_in(in_memory(), 3, "write-back+1", |config| {
            tune(config, lease);
            config.network = network;
        })
    };
    let etcd = Bench::up_on_etcd_in(in_memory(), 3, "write-back+1", |config| tune(config, lease));
    let first = one("etcd", etcd, seed, takeovers);
    let second = one("embedded, behind a link", embedded(true), seed, takeovers);
    vec![first, second, one("embedded, one machine", embedded(false), seed, takeovers)]
}

fn one(registry: &'static str, mut bench: Bench, seed: u64, takeovers: usize) -> Comparison {
    let changes = match &bench.etcd {
        Some(etcd) => etcd.time_changes(CHANGES),
        None => embedded_changes(&bench),
    };
    let ms = |time: &Duration| time.as_secs_f64() * 1000.0;
    let changes: Vec<f64> = changes.iter().map(ms).collect();
    let taken: Vec<f64> = take_over(&mut bench, seed, takeovers).iter().map(ms).collect();
    Comparison {
        registry,
        changes: changes.len(),
        change_median_ms: quantile(&changes, 0.5),
        change_p99_ms: quantile(&changes, 0.99),
        takeovers,
        takeover_median_ms: quantile(&taken, 0.5),
        takeover_longest_ms: quantile(&taken, 1.0),
    }
}

fn embedded_changes(bench: &Bench) -> Vec<Duration> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let socket = bench.lab.dir().join("registry.sock");
        let registry = Client::new(&socket, ClientConfig::default()).unwrap();
        time_changes(&registry, CHANGES).await
    })
}

/// Kills the owner again and again, under load. The longest times without an answer.
fn take_over(bench: &mut Bench, seed: u64, takeovers: usize) -> Vec<Duration> {
    let (mut history, mut random) = (new_history(seed), Rng::with_seed(seed));
    let mut times = Vec::new();
    for _ in 0..takeovers {
        let load = bench.load(history, random.u64(..));
        let before = some_time(&mut random, 200, 1000);
        let former = bench.wait_effective().owner.unwrap();
        let progress = load.progress();
        let (mut load, ()) = during(load, Duration::from_millis(300), || {
            thread::sleep(before);
            bench.lab.kill(&former).unwrap();
            bench.wait(|view| view.owner.as_ref() != Some(&former));
            let (acknowledged, deadline) = (progress.acknowledged(), Nanos::now() + crate::common::SOON);
            while progress.acknowledged() == acknowledged {
                assert!(Nanos::now() < deadline, "the load does not go on{}", bench.logs());
                thread::sleep(Duration::from_millis(1));
            }
        });
        let all = load.check_all().unwrap();
        assert_eq!(all.mismatches + load.progress().mismatches(), 0, "{:#?}{}", all.first, bench.logs());
        times.push(load.progress().longest_stall());
        history = load.into_history();
        bench.lab.start(&former).unwrap();
    }
    bench.wait_effective();
    times
}
