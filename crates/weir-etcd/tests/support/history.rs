//! Writers that know what they have committed, and a watcher whose history must agree.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use weir_cluster::registry::{Change, Registry, RegistryError, Transaction, WatchEvent};
use weir_etcd::Etcd;

/// Some writers, each with a counter of its own, and one watcher.
pub struct History {
    writers: Vec<JoinHandle<BTreeMap<u64, u64>>>,
    watcher: JoinHandle<Vec<WatchEvent>>,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
}

/// The result of checking a history.
#[derive(Debug)]
pub struct Summary {
    pub changes: usize,
}

impl History {
    /// Each writer has its own registry from `registry`, as has the watcher.
    pub async fn start(writers: usize, registry: impl Fn() -> Etcd) -> History {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let watching = registry();
        let start = watching.list("").await.unwrap();
        assert_eq!(start.entries, []);
        let mut watch = watching.watch("", start.revision).await.unwrap();
        let watcher = tokio::spawn(async move {
            let mut seen: Vec<WatchEvent> = Vec::new();
            loop {
                let event = watch.next().await.unwrap();
                let end = event.change.key() == "end";
                seen.push(event);
                if end {
                    return seen;
                }
            }
        });
        let writers = (0..writers).map(|number| {
            let (registry, stop, acknowledged) = (registry(), Arc::clone(&stop), Arc::clone(&acknowledged));
            tokio::spawn(write(number, registry, stop, acknowledged))
        });
        let writers = writers.collect();
        History { writers, watcher, stop, acknowledged }
    }

    /// Number of changes that were acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits for another acknowledged change; returns how long it took.
    pub async fn progress(&self, limit: Duration) -> Duration {
        let (start, before) = (Instant::now(), self.acknowledged());
        while self.acknowledged() == before {
            assert!(start.elapsed() < limit, "no change was acknowledged within {limit:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        start.elapsed()
    }

    /// Ends the writers, and compares what they committed with what the watcher saw: every change once, in order, whole.
    pub async fn finish(self, registry: &Etcd) -> Summary {
        self.stop.store(true, Ordering::Relaxed);
        let mut committed = BTreeMap::new();
        for (number, writer) in self.writers.into_iter().enumerate() {
            for (count, revision) in writer.await.unwrap() {
                committed.insert(revision, (number, count));
            }
        }
        registry.transact(Transaction::new().put("end", "")).await.unwrap();
        let seen = tokio::time::timeout(Duration::from_secs(20), self.watcher).await;
        let mut seen = seen.expect("the watch has all changes in time").unwrap();
        assert_eq!(seen.pop().unwrap().change.key(), "end");
        assert!(seen.is_sorted_by_key(|event| event.revision));
        let expected = committed.iter().flat_map(|(revision, (number, count))| {
            [(*revision, format!("counter/{number}={count}")), (*revision, format!("log/{number}/{count}="))]
        });
        let text = |event: &WatchEvent| match &event.change {
            Change::Put(entry) => {
                (event.revision, format!("{}={}", entry.key, String::from_utf8_lossy(&entry.value)))
            }
            Change::Delete { key } => (event.revision, format!("{key} deleted")),
        };
        let seen: Vec<_> = seen.iter().map(text).collect();
        let expected: Vec<_> = expected.collect();
        for (at, (one, other)) in seen.iter().zip(&expected).enumerate() {
            assert_eq!(one, other, "the {at}th of {} seen and {} committed", seen.len(), expected.len());
        }
        assert_eq!(seen.len(), expected.len());
        let logged = registry.list("log/").await.unwrap().entries;
        assert_eq!(logged.len(), committed.len(), "nothing lost, nothing twice");
        Summary { changes: committed.len() }
    }
}

/// Counts up until `stop`. Returns each count's revision.
async fn write(
    number: usize,
    registry: Etcd,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
) -> BTreeMap<u64, u64> {
    let key = format!("counter/{number}");
    let mut done = BTreeMap::new();
    let mut last = None;
    let mut count = 0_u64;
    // Whether the last transaction's answer was lost.
    let mut in_doubt = false;
    while in_doubt || !stop.load(Ordering::Relaxed) {
        let transaction = match last {
            None => Transaction::new().absent(&*key),
            Some(revision) => Transaction::new().unchanged(&*key, revision),
        };
        let log = format!("log/{number}/{count}");
        let transaction = transaction.put(&*key, count.to_string()).put(log, "");
        let revision = match registry.transact(transaction).await {
            Ok(committed) => committed.revision,
            Err(RegistryError::Unavailable { .. }) => {
                in_doubt = true;
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
            Err(RegistryError::Conflict { current }) => {
                assert!(in_doubt, "writer {number}: {count} met {current:?}, though no answer was lost");
                assert_eq!(current[0].value, count.to_string().as_bytes());
                current[0].mod_revision
            }
            Err(other) => panic!("{other}"),
        };
        in_doubt = false;
        last = Some(revision);
        done.insert(count, revision);
        count += 1;
        acknowledged.fetch_add(1, Ordering::Relaxed);
    }
    done
}
