//! Waits with a limit, for tests of registries.

use std::future::Future;
use std::time::{Duration, Instant};

use weir_cluster::registry::{RegistryError, Watch, WatchEvent};

/// The next event, or a failed test.
pub async fn next(watch: &mut Watch) -> Result<WatchEvent, RegistryError> {
    tokio::time::timeout(Duration::from_secs(20), watch.next()).await.expect("no event came")
}

/// Waits for a condition; returns how long it took.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) -> Duration {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < Duration::from_secs(20), "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}
