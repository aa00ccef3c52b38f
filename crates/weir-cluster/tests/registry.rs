//! The registry, through its socket and directly: the contract of all registries, and what only this one does.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;
#[macro_use]
mod contract;

use std::sync::Arc;
use std::time::Duration;

use common::wait::{self, next};
use common::{Machine, client};
use contract::Subject;
use weir_cluster::registry::{Registry, RegistryError, Transaction};
use weir_cluster::{Client, ClientConfig, Embedded, Server};

impl Subject for Machine {
    fn client(&self) -> Arc<dyn Registry> {
        Machine::client(self)
    }

    fn hurried(&self) -> Arc<dyn Registry> {
        let config = ClientConfig { request_timeout: Duration::from_millis(300), ..ClientConfig::default() };
        Arc::new(Client::new(&self.socket(), config).unwrap())
    }

    async fn stop(&mut self) {
        Machine::stop(self).await;
    }

    async fn start(&mut self) {
        self.restart().await;
    }

    async fn interrupt(&mut self) {
        self.restart().await;
    }

    fn ttl(&self) -> (Duration, Duration) {
        (Duration::from_millis(400), Duration::from_millis(400))
    }

    fn two_values(&self) -> usize {
        (2 << 20) - 2
    }
}

/// A test for each part of the contract.
macro_rules! contract_tests {
    ($($name:ident),+) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            contract::$name(&mut Machine::start().await).await;
        }
    )+};
}

contract!(contract_tests);

#[tokio::test(flavor = "multi_thread")]
async fn the_history_has_an_end() {
    let machine = Machine::start().await;
    let registry = machine.embedded();
    let mut slow = registry.watch("k", 0).await.unwrap();
    let mut quiet = machine.client().watch("other/", 0).await.unwrap();
    let writes = (0..5000).map(|number| registry.transact(Transaction::new().put("k", number.to_string())));
    for write in writes {
        write.await.unwrap();
    }
    let mut received = 0;
    let error = loop {
        match next(&mut slow).await {
            Ok(_) => received += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RegistryError::Compacted { .. }), "{error}");
    assert!((1000..=1100).contains(&received), "{received}");
    let old = machine.client().watch("k", 1).await.unwrap_err();
    assert!(matches!(old, RegistryError::Compacted { oldest: 905 }), "{old}");
    // Changes under other prefixes do not cut off a quiet watcher.
    registry.transact(Transaction::new().put("other/1", "")).await.unwrap();
    assert_eq!(next(&mut quiet).await.unwrap().change.key(), "other/1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_watch_resumes_over_more_changes_than_the_history_has() {
    let mut machine = Machine::start().await;
    let client = machine.client();
    let mut quiet = client.watch("other/", 0).await.unwrap();
    let registry = machine.embedded();
    for number in 0..4500 {
        registry.transact(Transaction::new().put("k", number.to_string())).await.unwrap();
    }
    drop(registry);
    machine.restart().await;
    client.transact(Transaction::new().put("other/1", "")).await.unwrap();
    assert_eq!(next(&mut quiet).await.unwrap().change.key(), "other/1");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_file_and_one_socket_have_one_server() {
    let mut machine = Machine::start().await;
    let second = Embedded::open(&machine.file()).unwrap_err();
    assert!(second.to_string().contains("another process"), "{second}");
    let other = tempfile::tempdir().unwrap();
    let elsewhere = Embedded::open(&other.path().join("r")).unwrap();
    let refused = Server::start(&machine.socket(), elsewhere.clone()).await.unwrap_err();
    assert!(refused.to_string().contains("another server"), "{refused}");
    // A killed server's socket is replaced.
    machine.stop().await;
    drop(std::os::unix::net::UnixListener::bind(machine.socket()).unwrap());
    let _server = Server::start(&machine.socket(), elsewhere).await.unwrap();
    assert_eq!(client(&machine.socket()).list("").await.unwrap().revision, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_is_reported_not_served() {
    let mut machine = Machine::start().await;
    let value = vec![0xa5_u8; 3000];
    machine.client().transact(Transaction::new().put("k", &*value)).await.unwrap();
    machine.stop().await;
    let mut bytes = std::fs::read(machine.file()).unwrap();
    let offsets: Vec<usize> =
        bytes.windows(value.len()).enumerate().filter(|(_, w)| *w == value).map(|(at, _)| at).collect();
    assert!(!offsets.is_empty());
    for offset in offsets {
        bytes[offset + 1500] ^= 1;
    }
    std::fs::write(machine.file(), bytes).unwrap();
    let error = Embedded::open(&machine.file()).unwrap_err();
    assert!(matches!(error, RegistryError::Corrupt { .. }), "{error}");
}
