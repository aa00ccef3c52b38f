use weir_cluster::membership::declare_stopped;
use weir_cluster::records::{EventRecord, FormerOwner, NodeRef, Policy, Source, UnfinishedRecord};

use super::deletion::late;
use super::former::check_former_at;
use super::leftovers::take_over;
use super::*;
use crate::control::disk::tests::{disk_of_a, node, node_at, volume_in};
use crate::control::faulty_registry::RegistryFaults;

/// A volume that does not answer holds up what was left in it, and no more: the other volumes are looked at, and one attempt waits.
#[tokio::test]
async fn what_is_left_in_one_volume_does_not_wait_for_another() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::<RegistryFaults>::default();
    let (node, _told) = node_at(directory.path(), faults.clone()).await;
    let mut paths = Vec::new();
    for (volume, id) in [("v", 7), ("w", 8)] {
        let path = directory.path().join(volume);
        std::fs::create_dir(&path).unwrap();
        DirVolume::open(&path).unwrap().identify(id).unwrap();
        let entry = VolumeRecord::dir(volume, path.clone(), id);
        node.registry.transact(entry.create(keys::volume(volume))).await.unwrap();
        paths.push(path);
    }
    // Of steps of this process that are over.
    for (disk, volume) in [("d1", "v"), ("d2", "v"), ("e1", "w")] {
        let left = UnfinishedRecord {
            disk: disk.into(),
            volume: volume.into(),
            step: Step::Removing,
            by: node.session.node_ref(),
            lost: String::new(),
            clone: 0,
        };
        node.registry.transact(left.create(keys::unfinished(disk))).await.unwrap();
    }
    let soon = Nanos::now() + crate::control::disk::tests::SOON;
    let until = async |what: &str, holds: &dyn Fn() -> bool| {
        while !holds() {
            assert!(Nanos::now() < soon, "{what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // Each attempt stops before its storage is changed, and does not end.
    faults.hangs.store(true, std::sync::atomic::Ordering::Relaxed);
    let finishing = tokio::spawn(keep_finished(Arc::clone(&node)));
    until("w is looked at", &|| node.intents.is_under_way("e1")).await;
    assert!(node.intents.is_under_way("d1") && !node.intents.is_under_way("d2"), "one attempt in v");
    let second = node.registry.get(&keys::unfinished("d2")).await.unwrap().unwrap();
    let refused = ApiError::from(take_over(&node, &second).await.unwrap_err());
    assert!(refused.message.contains("volume v has not answered"), "{refused}");
    finishing.abort();
}

/// One creator stood still until its note was taken over, and then created the file. The process that has the note now
/// finds that file in its way, does not know whose it is, and gives up.
#[tokio::test]
async fn a_file_made_too_late_is_removed_once_nobody_else_is_at_it() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let volume = volume_in(&node, directory.path()).await;
    let source = Source::File { name: "d".into() };
    let record = DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1));
    let other = UnfinishedRecord {
        disk: "d".into(),
        volume: "v".into(),
        step: Step::Making,
        by: NodeRef::new("other", 1),
        lost: String::new(),
        clone: 0,
    };
    let noted = node.registry.transact(other.create(keys::unfinished("d"))).await.unwrap();

    volume.create_disk("d", 1 << 20).unwrap();
    let undone = tokio::spawn({
        let (node, record) = (Arc::clone(&node), record.clone());
        async move { undo(&node, &record, 0, None).await }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(volume.disk_path("d").unwrap().exists(), "not while somebody else is at it");
    let key = keys::unfinished("d");
    let strike = Transaction::new().unchanged(key.clone(), noted.revision).delete(key.clone());
    node.registry.transact(strike).await.unwrap();
    undone.await.unwrap();
    assert!(!volume.disk_path("d").unwrap().exists(), "nobody else would remove it");
    assert!(node.registry.get(&key).await.unwrap().is_none(), "and its note is struck off");
}

/// The record is gone when the storage refuses to remove the file: the note alone knows what the deletion lost.
#[tokio::test]
async fn a_deletion_that_another_step_finishes_tells_what_it_lost() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let volume = volume_in(&node, directory.path()).await;
    let source = Source::File { name: "d".into() };
    let record = DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1));
    node.registry.transact(record.create(keys::disk("d"))).await.unwrap();
    let entry = node.registry.get(&keys::disk("d")).await.unwrap().unwrap();

    let path = volume.disk_path("d").unwrap();
    std::fs::create_dir(&path).unwrap();
    remove(&node, &entry, &record, "3 MiB".into()).await.expect_err("a directory is no file to remove");
    assert!(node.registry.get(&entry.key).await.unwrap().is_none(), "the record is gone");
    assert!(!node.intents.is_being_deleted("d"), "the attempt has ended");

    std::fs::remove_dir(&path).unwrap();
    std::fs::write(&path, [1; 512]).unwrap();
    assert_eq!(finish_others(&node, "d").await.unwrap(), Some(path.clone()));
    assert!(!path.exists());
    let told = deletion_of(&node, "d").await;
    assert!(told.ends_with("d.raw is gone; lost: 3 MiB"), "{told}");
}

/// What the event says about the deletion of a disk.
async fn deletion_of(node: &Node, disk: &str) -> String {
    loop {
        let listing = node.registry.list(keys::EVENTS).await.unwrap();
        let mut events = listing.entries.iter().map(|entry| EventRecord::of(entry).unwrap());
        if let Some(event) = events.find(|event| event.kind == "disk-deleted" && event.subject == disk) {
            return event.text;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// An owner elsewhere decides a deletion by force while the coordinator makes a snapshot: then the note is carried out.
#[tokio::test]
async fn no_snapshot_outlives_its_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let volume = volume_in(&node, directory.path()).await;
    let by = NodeRef::new("other", 1);
    let (disk, of) = ("d".to_owned(), "v".to_owned());
    let note = UnfinishedRecord { disk, volume: of, step: Step::Removing, by, lost: String::new(), clone: 0 };
    node.registry.transact(note.create(keys::unfinished("d"))).await.unwrap();
    declare_stopped(&*node.registry, &note.by).await.unwrap();
    for file in ["d.raw", "d@s.snap", "d@t.snap", "d@0000000000000001.new", "e.raw", "e@s.snap"] {
        std::fs::write(volume.path().join(file), [1; 512]).unwrap();
    }
    assert!(finish_others(&node, "d").await.unwrap().is_some());
    let mut left: Vec<String> =
        snapshot::Files::list(&volume, &|_| true).unwrap().into_iter().map(|entry| entry.name).collect();
    left.retain(|name| !name.starts_with('.'));
    left.sort();
    assert_eq!(left, ["e.raw", "e@s.snap"]);
    let told = deletion_of(&node, "d").await;
    assert!(told.ends_with("during its deletion: d@s, d@t"), "{told}");
    let source = Source::File { name: "d".into() };
    let next = DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1));
    make(&node, &next, Origin::Empty).await.unwrap();
}

/// The owner's task retries to open the disk while the storage delays the deletion.
#[tokio::test]
async fn a_disk_is_deleted_once_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let source = Source::File { name: "d".into() };
    let record = DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1));
    node.registry.transact(record.create(keys::disk("d"))).await.unwrap();
    let entry = node.registry.get(&keys::disk("d")).await.unwrap().unwrap();
    let first = node.intents.begin_deletion("d").unwrap();
    let refused = remove(&node, &entry, &record, String::new()).await.unwrap_err();
    assert!(refused.message.contains("is being deleted already"), "{refused}");
    drop(first);
    assert!(node.registry.get(&entry.key).await.unwrap().is_some());
}

/// Its kernel may still write to the blocks, which would be another disk's by then. A takeover waits for as long.
#[tokio::test]
async fn the_end_of_its_owner_frees_a_disks_blocks_only_after_the_fence_grace() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let server = VolumeRecord::nbd("v", "nbd://127.0.0.1:1".into(), 7);
    node.registry.transact(server.create(keys::volume("v"))).await.unwrap();
    let (gone, grace) = (NodeRef::new("b", 1), node.config.lease.fence_grace.0);
    let record = disk_of_a(&node, |record| record.owner = Some(gone.clone())).await;
    let check = |record: &DiskRecord, now| {
        let (node, record) = (Arc::clone(&node), record.clone());
        async move { check_former_at(&node, &record, now).await }
    };
    let start = Nanos::now();
    for now in [start, start + grace * 2] {
        let refused = check(&record, now).await.unwrap_err();
        assert!(refused.message.contains("may still write to its export"), "{refused}");
        assert!(refused.hint.starts_with("`weir disk export d` opens it"), "{}", refused.hint);
    }
    // Silent for long, and known to have ended only now.
    declare_stopped(&*node.registry, &gone).await.unwrap();
    let mut changes = node.records.changes();
    while !node.records.has_stopped(&gone) {
        changes.next().await;
    }
    let ended = start + grace * 2;
    for now in [ended, ended + grace / 2] {
        let refused = check(&record, now).await.unwrap_err();
        assert_eq!(refused.kind, ApiErrorKind::Refused);
        let wait = format!("again in {} s", (ended + grace - now).as_secs());
        assert!(refused.hint.contains(&wait), "{}", refused.hint);
    }
    check(&record, ended + grace).await.unwrap();
    // Another node has taken the disk over. It may never open it, without its server, and an export stays.
    let former = vec![FormerOwner::silent(gone, 2)];
    for owner in [None, Some(NodeRef::new("a", 1))] {
        let taken = DiskRecord { owner, former: former.clone(), ..record.clone() };
        check(&taken, ended + grace / 2).await.unwrap_err();
        check(&taken, ended + grace).await.unwrap();
    }
    // That one is gone as well, and nobody knows that it has ended.
    let taken = DiskRecord { owner: Some(NodeRef::new("c", 1)), former, ..record.clone() };
    check(&taken, ended + grace).await.unwrap_err();
}

/// A large file can take longer to remove than a request waits: the record is gone by then.
#[tokio::test]
async fn a_slow_removal_says_how_to_see_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::<RegistryFaults>::default();
    let (node, _told) = node_at(directory.path(), faults.clone()).await;
    let source = Source::File { name: "d".into() };
    let record = DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1));
    let after = late(&node, &record).await;
    assert!(after.message.contains("disk d is deleted"), "{after}");
    assert!(after.hint.contains("goes on") && after.hint.contains("weir events"), "{}", after.hint);
    node.registry.transact(record.create(keys::disk("d"))).await.unwrap();
    let before = late(&node, &record).await;
    assert!(before.message.contains("still there"), "{before}");
    assert_eq!(before.kind, ApiErrorKind::Unavailable);
    faults.away.store(true, std::sync::atomic::Ordering::Relaxed);
    let unknown = late(&node, &record).await;
    assert!(unknown.message.contains("it is not known whether disk d is deleted"), "{unknown}");
}
