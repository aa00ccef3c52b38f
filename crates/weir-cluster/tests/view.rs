//! Copies of records that follow the registry.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::Machine;
use tokio::sync::watch;
use tokio::time::timeout;
use weir_cluster::embedded::HISTORY_BYTES;
use weir_cluster::records::{DiskRecord, NodeRef, Policy, Record, Source, keys};
use weir_cluster::registry::{Registry, Transaction};
use weir_cluster::view::View;
use weir_cluster::{Embedded, Server};

/// Time limit for a change to arrive.
const SOON: Duration = Duration::from_secs(10);

fn disk(name: &str) -> DiskRecord {
    DiskRecord::new(name, "v", Source::File { name: name.into() }, 1 << 20, 512, Policy::WriteBack(1))
}

async fn woken(receiver: &mut watch::Receiver<()>) {
    timeout(SOON, receiver.changed()).await.expect("not woken").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_keep_what_they_hold_and_later_ones_see_all_of_the_newest_record() {
    let machine = Machine::start().await;
    let registry = machine.client();
    let mut record = disk("d");
    (record.owner, record.epoch) = (Some(NodeRef::new("a", 1)), 3);
    registry.transact(record.create(keys::disk("d"))).await.unwrap();
    let view: View<DiskRecord> = View::start(registry.clone(), keys::DISKS).await.unwrap();
    assert!(!view.changes().has_changed().unwrap(), "the first listing is not a change");
    let (mut puts, mut changes) = (view.puts_of("d"), view.changes_of("d"));
    let held = view.now();
    // Equal, but not the same.
    let mut other = record.clone();
    other.owner = Some(NodeRef { flash: Some(7), ..NodeRef::new("a", 1) });
    assert_eq!(other, record);
    let entry = registry.get(&keys::disk("d")).await.unwrap().unwrap();
    registry.transact(other.replace(&entry)).await.unwrap();
    woken(&mut puts).await;
    assert!(!changes.has_changed().unwrap(), "it is equal");
    let flash = |record: &DiskRecord| record.owner.as_ref().and_then(|owner| owner.flash);
    assert_eq!((flash(&view.now()["d"]), flash(&held["d"])), (Some(7), None));
    assert!(view.now().revision_of("d") > held.revision_of("d"));
    // Once nobody holds the former ones.
    drop(held);
    let entry = registry.get(&keys::disk("d")).await.unwrap().unwrap();
    registry.transact(DiskRecord { epoch: 5, ..other }.replace(&entry)).await.unwrap();
    woken(&mut changes).await;
    assert_eq!(view.now()["d"].epoch, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_waits_for_a_record_wakes_when_the_registry_is_listed_again() {
    let mut machine = Machine::start().await;
    let registry = machine.client();
    registry.transact(disk("d").create(keys::disk("d"))).await.unwrap();
    let view: View<DiskRecord> = View::start(registry, keys::DISKS).await.unwrap();
    let (mut puts, mut changes) = (view.puts_of("d"), view.changes_of("d"));
    // More changes than the registry remembers, while the view's server is away.
    machine.stop().await;
    let elsewhere = machine.file().with_extension("elsewhere");
    let server = Server::start(&elsewhere, Embedded::open(&machine.file()).unwrap()).await.unwrap();
    let away = server.registry().clone();
    let entry = away.get(&keys::disk("d")).await.unwrap().unwrap();
    away.transact(DiskRecord { size: 2 << 20, ..disk("d") }.replace(&entry)).await.unwrap();
    let large = "x".repeat(HISTORY_BYTES / 64);
    for _ in 0..65 {
        away.transact(Transaction::new().put("large", large.clone())).await.unwrap();
    }
    drop(away);
    server.stop().await;
    machine.restart().await;
    woken(&mut puts).await;
    woken(&mut changes).await;
    assert_eq!(view.now()["d"].size, 2 << 20);
}
