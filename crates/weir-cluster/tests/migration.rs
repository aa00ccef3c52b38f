//! A registry moves to another one: interrupted after each call, refused where something is in the way.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use weir_cluster::Embedded;
use weir_cluster::migration::{Amount, MigrationError, Named, first_epoch, look, migrate, without_sessions};
use weir_cluster::records::{EpochBaseRecord, MigrationRecord, Record, keys};
use weir_cluster::registry::{
    Committed, Entry, LeaseId, Listing, Pending, ProcessWatch, Registry, RegistryError, Transaction, Watch,
};

/// Fails every call after so many.
struct Cut<'a> {
    registry: &'a Embedded,
    left: &'a AtomicUsize,
}

impl Cut<'_> {
    fn passes(&self) -> Result<(), RegistryError> {
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        taken.map(drop).map_err(|_| RegistryError::unavailable("the test cuts it off"))
    }
}

impl Registry for Cut<'_> {
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>> {
        Box::pin(async move {
            self.passes()?;
            self.registry.get(key).await
        })
    }
    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing> {
        Box::pin(async move {
            self.passes()?;
            self.registry.list(prefix).await
        })
    }
    /// The cut one is carried out, and its answer is lost.
    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed> {
        Box::pin(async move {
            let before = self.left.load(Ordering::Relaxed);
            let committed = match before {
                0 => return Err(RegistryError::unavailable("the test cuts it off")),
                _ => self.registry.transact(transaction).await,
            };
            self.passes()?;
            if before == 1 { Err(RegistryError::unavailable("the answer is lost")) } else { committed }
        })
    }
    fn watch<'a>(&'a self, _: &'a str, _: u64) -> Pending<'a, Watch> {
        unreachable!("a migration watches nothing")
    }
    fn grant(&self, _: Duration) -> Pending<'_, LeaseId> {
        unreachable!("a migration has no lease")
    }
    fn keep_alive(&self, _: LeaseId) -> Pending<'_, Duration> {
        unreachable!("a migration has no lease")
    }
    fn revoke(&self, _: LeaseId) -> Pending<'_, ()> {
        unreachable!("a migration has no lease")
    }
    fn register_process<'a>(&'a self, _: &'a str, _: u64, _: LeaseId) -> Pending<'a, ProcessWatch> {
        unreachable!("a migration is no node")
    }
}

fn named<'a>(registry: &'a dyn Registry, name: &'a str) -> Named<'a> {
    Named { registry, name }
}

fn open(directory: &Path, name: &str) -> Embedded {
    Embedded::open(&directory.join(name)).unwrap()
}

/// More keys than a transaction takes, one of them large.
async fn fill(registry: &Embedded) {
    for numbers in (0..300).collect::<Vec<_>>().chunks(100) {
        let put = numbers.iter().fold(Transaction::new(), |put, &number| {
            let value = if number == 7 { vec![7; 1 << 20] } else { vec![number as u8; 40] };
            put.put(format!("disks/d{number}"), value)
        });
        registry.transact(put).await.unwrap();
    }
}

async fn content(registry: &Embedded) -> Vec<(String, Vec<u8>)> {
    let entries = registry.list("").await.unwrap().entries;
    let own = |entry: &Entry| entry.key != keys::MIGRATION && entry.key != keys::EPOCH_BASE;
    entries.into_iter().filter(own).map(|entry| (entry.key, entry.value)).collect()
}

/// How many of the two a node would use.
async fn usable(source: &Embedded, target: &Embedded) -> (bool, bool) {
    let check = async |registry: &Embedded| named(registry, "r").check_usable().await.is_ok();
    (check(source).await, check(target).await)
}

#[tokio::test]
async fn a_migration_that_is_cut_off_anywhere_succeeds_when_it_is_repeated() {
    // In memory: each of the many commits would wait for the storage otherwise.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut cuts = 0;
    loop {
        let (from, to) = (format!("from{cuts}"), format!("to{cuts}"));
        let (source, target) = (open(directory.path(), &from), open(directory.path(), &to));
        fill(&source).await;
        let before = content(&source).await;
        let left = AtomicUsize::new(cuts);
        let (cut_source, cut_target) =
            (Cut { registry: &source, left: &left }, Cut { registry: &target, left: &left });
        let first = migrate(named(&cut_source, "a"), named(&cut_target, "b"), &mut |_| {}).await;
        let (old, new) = usable(&source, &target).await;
        let is_complete = content(&target).await == before;
        assert!(!(old && new) || content(&target).await.is_empty(), "cut {cuts}: both are usable");
        assert!(!new || is_complete || (old && content(&target).await.is_empty()), "cut {cuts}");
        if first.is_err() && (old || !new) {
            let amount = migrate(named(&source, "a"), named(&target, "b"), &mut |_| {}).await;
            assert_eq!(amount.unwrap().keys, 301, "cut {cuts}");
        }
        assert_eq!(usable(&source, &target).await, (false, true), "cut {cuts}");
        assert_eq!(content(&target).await, before, "cut {cuts}");
        source.close().await;
        target.close().await;
        if first.is_ok() {
            break;
        }
        cuts += 1;
    }
    assert!(cuts > 10, "each call was cut once: {cuts}");
}

/// A disk that is made again after the migration is above every epoch of the former one (P2).
#[tokio::test]
async fn epochs_go_on_above_those_of_all_former_registries() {
    let directory = tempfile::tempdir().unwrap();
    let registries = ["a", "b", "c"].map(|name| open(directory.path(), name));
    fill(&registries[0]).await;
    for number in 0..50u8 {
        registries[0].transact(Transaction::new().put("disks/d0", [number])).await.unwrap();
    }
    let mut highest = 0;
    for (pair, names) in registries.windows(2).zip([("a", "b"), ("b", "c")]) {
        let revision = pair[0].list("disks/").await.unwrap().revision;
        let epoch = first_epoch(&pair[0], revision).await.unwrap();
        assert!(epoch > highest);
        highest = epoch;
        migrate(named(&pair[0], names.0), named(&pair[1], names.1), &mut |_| {}).await.unwrap();
    }
    let revision = registries[2].list("disks/").await.unwrap().revision;
    assert!(revision < highest, "a new registry's revisions alone would be below");
    assert!(first_epoch(&registries[2], revision).await.unwrap() > highest);
    let no_base = EpochBaseRecord { revisions: u64::MAX }.encode();
    registries[2].transact(Transaction::new().put(keys::EPOCH_BASE, no_base)).await.unwrap();
    let error = first_epoch(&registries[2], revision).await.unwrap_err();
    assert!(matches!(error, RegistryError::Corrupt { .. }), "{error}");
}

#[tokio::test]
async fn whatever_is_in_the_way_is_named_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (open(directory.path(), "a"), open(directory.path(), "b"));
    fill(&source).await;
    let both = || (named(&source, "a"), named(&target, "b"));
    let migrated = async || migrate(both().0, both().1, &mut |_| {}).await.map(drop);

    // Nodes that have not stopped.
    let lease = source.grant(Duration::from_secs(2)).await.unwrap();
    source.transact(Transaction::new().put_leased(keys::session("n1"), "1", lease)).await.unwrap();
    let error = migrated().await.unwrap_err();
    assert!(matches!(&error, MigrationError::InUse { nodes, .. } if nodes == &["n1"]), "{error}");
    assert!(without_sessions(both().0, Duration::from_millis(300)).await.is_err());
    without_sessions(both().0, Duration::from_secs(60)).await.unwrap();

    // Another cluster's keys; and a key that would be overwritten.
    for key in ["disks/other", "disks/d7"] {
        target.transact(Transaction::new().put(key, "mine")).await.unwrap();
        let error = migrated().await.unwrap_err();
        assert!(matches!(&error, MigrationError::NotEmpty { key: named, .. } if named == key), "{error}");
        target.transact(Transaction::new().delete(key)).await.unwrap();
    }
    assert_eq!(usable(&source, &target).await, (true, true), "nothing has begun");

    // The target of another migration.
    let other = MigrationRecord::Arriving { from: "z".into() };
    target.transact(other.create(keys::MIGRATION)).await.unwrap();
    let error = migrated().await.unwrap_err();
    assert!(matches!(&error, MigrationError::Arriving { from, .. } if from == "z"), "{error}");
    target.transact(Transaction::new().delete(keys::MIGRATION)).await.unwrap();

    // Leased keys stay; a look changes nothing.
    let lease = source.grant(Duration::from_secs(60)).await.unwrap();
    source.transact(Transaction::new().put_leased("nodes/n1", "1", lease)).await.unwrap();
    let amount = look(both().0, both().1).await.unwrap();
    assert_eq!((amount.keys, amount.leased), (301, 1));
    assert_eq!(usable(&source, &target).await, (true, true));
    migrated().await.unwrap();
    assert!(target.get("nodes/n1").await.unwrap().is_none());

    // Once is enough; and the source is not copied elsewhere, nor anything into it.
    let third = open(directory.path(), "c");
    for (from, to) in [(both().0, both().1), (both().0, named(&third, "c")), (named(&third, "c"), both().0)] {
        let error = migrate(from, to, &mut |_| {}).await.unwrap_err();
        assert!(matches!(&error, MigrationError::Gone { to, .. } if to == "b"), "{error}");
    }
    let empty = look(named(&third, "c"), named(&open(directory.path(), "d"), "d")).await.unwrap();
    assert_eq!(empty, Amount { keys: 1, bytes: empty.bytes, leased: 0 });
}
