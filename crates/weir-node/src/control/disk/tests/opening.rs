//! Opening a disk: the volume that its file must be in, and the loss of its log, which is accepted once.

use std::path::Path;

use weir_cluster::records::VolumeRecord;
use weir_cluster::view::View;
use weir_volume::DirVolume;

use super::*;
use crate::control::clone_snapshots;
use crate::error::ApiErrorKind;

/// Volume `v` with this identity, in the registry.
async fn volume(registry: &dyn Registry, path: &Path, id: u64) {
    let record = VolumeRecord::dir("v", path.to_owned(), id);
    registry.transact(record.create(keys::volume("v"))).await.unwrap();
}

/// P4: what the shard checks is the volume of the record from which the path came, whatever this node's view has of it.
#[tokio::test]
async fn the_file_must_be_in_the_volume_that_the_registry_has() {
    let (directory, earlier) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut node, mut told) = node(directory.path()).await;
    let record = disk_of_a(&node, |_| {}).await;
    // Deleted, and made again: the view lags behind, and goes on doing so.
    let before: Arc<dyn Registry> = Arc::new(FaultyRegistry::open(earlier.path(), Arc::default()));
    volume(&*before, Path::new("/v"), 7).await;
    volume(&*node.registry, Path::new("/w"), 8).await;
    let view = View::start(before, keys::VOLUMES).await.unwrap();
    Arc::get_mut(&mut node).unwrap().records.volumes = view;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.open(&record).await.unwrap();
    let opened = loop {
        let command = told.recv().await.unwrap();
        if command.starts_with("Open(") {
            break command;
        }
    };
    assert!(opened.contains("\"/w/d.raw\"") && opened.contains("volume: Some(8)"), "{opened}");
}

/// A takeover first removes the file that a former owner may still rename to the disk's. Later it removes the snapshots of that owner's clones;
/// those of other nodes' clones stay, and so do an operator's.
#[tokio::test]
async fn a_takeover_removes_what_the_former_owner_left() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let files = volume_in(&node, directory.path()).await;
    let gone = NodeRef::new("b", 1);
    let of = |maker: &NodeRef| format!("d@{}.snap", clone_snapshots::name(maker, 1));
    let (left, own) = (of(&gone), of(&node.session.node_ref()));
    let unfinished = "d@0000000000000001.new";
    for file in ["d.raw", "d@s.snap", "e@s.snap", unfinished, &left, &own] {
        std::fs::write(files.path().join(file), [1; 512]).unwrap();
    }
    let record = disk_of_a(&node, |record| record.former = vec![FormerOwner::silent(gone, 2)]).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.open(&record).await.unwrap();
    let exists = |file: &str| files.path().join(file).exists();
    assert!(!exists(unfinished));
    while exists(&left) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for file in ["d.raw", "d@s.snap", "e@s.snap", &own] {
        assert!(exists(file), "{file}");
    }
}

/// The operator has accepted the loss of the log for a disk that is to be served again: not for one that cannot be.
#[tokio::test]
async fn a_loss_is_not_accepted_for_a_backing_that_cannot_be_opened() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let path = directory.path().join("volume");
    std::fs::create_dir(&path).unwrap();
    volume(&*node.registry, &path, 7).await;
    let gone = NodeRef::new("b", 1);
    let record = disk_of_a(&node, |record| {
        (record.owner, record.mode, record.policy) =
            (Some(gone.clone()), Mode::WriteBack, Policy::WriteBack(0));
    })
    .await;
    let how = StoppedHow::ProcessEnded;
    let note = StoppedRecord { node: gone.clone(), how, time_unix_ms: 0, machine: Machine::here() };
    let mut stopped = node.records.changes();
    node.registry.transact(note.create(keys::stopped(&gone))).await.unwrap();
    while !node.records.has_stopped(&gone) {
        stopped.next().await;
    }
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let mut export = async |accept_loss| {
        let (done, answer) = oneshot::channel();
        task.on_request(Request::Export { accept_loss, done }).await;
        answer.await.unwrap()
    };
    let refused = export(false).await.unwrap_err();
    assert!(refused.kind == ApiErrorKind::Refused && refused.message.contains("--accept-loss"), "{refused}");
    let directory = DirVolume::open(&path).unwrap();
    for (what, reason) in [("no mark", "is not volume"), ("no file", "does not exist")] {
        let error = export(true).await.unwrap_err();
        assert!(error.message.contains(reason) && error.hint.contains("no loss"), "{what}: {error:?}");
        let (_, now) = change::read(&*node.registry, "d").await.unwrap();
        assert_eq!(now, record, "{what}: nothing has been accepted");
        directory.identify(7).unwrap();
    }
    directory.create_disk("d", record.size).unwrap();
    export(true).await.unwrap();
    let (_, now) = change::read(&*node.registry, "d").await.unwrap();
    assert_eq!((now.owner, now.mode), (Some(NodeRef::new("a", 1)), Mode::WriteThrough));
}

/// A forced deletion removes the file while the storage takes its time.
#[tokio::test]
async fn a_disk_that_is_being_deleted_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    volume(&*node.registry, directory.path(), 7).await;
    let record = disk_of_a(&node, |_| {}).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let mut export = async || {
        let (done, answer) = oneshot::channel();
        task.on_request(Request::Export { accept_loss: false, done }).await;
        answer.await.unwrap()
    };
    let deletion = node.intents.begin_deletion("d").unwrap();
    let refused = export().await.unwrap_err();
    assert!(refused.kind == ApiErrorKind::Refused && refused.message.contains("being deleted"), "{refused}");
    let (_, now) = change::read(&*node.registry, "d").await.unwrap();
    assert_eq!(now, record, "the deletion rests on the record as it is");
    assert!(told.try_recv().is_err(), "nothing is opened");
    drop(deletion);
    export().await.unwrap();
}

/// Where the volume is not mounted, a file of the same name is another disk's.
#[tokio::test]
async fn a_file_grows_only_in_its_volume() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let path = directory.path().join("volume");
    std::fs::create_dir(&path).unwrap();
    volume(&*node.registry, &path, 7).await;
    let record = disk_of_a(&node, |_| {}).await;
    let mounted = DirVolume::open(&path).unwrap();
    mounted.create_disk("d", record.size).unwrap();
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let mut resize = async || {
        let (done, answer) = oneshot::channel();
        task.on_request(Request::Resize { size: 2 * record.size, seen: Box::new(record.clone()), done })
            .await;
        answer.await.unwrap()
    };
    let length = || std::fs::metadata(path.join("d.raw")).unwrap().len();
    let error = resize().await.unwrap_err();
    assert!(error.message.contains("is not volume"), "{error}");
    assert_eq!(length(), record.size);
    mounted.identify(7).unwrap();
    resize().await.unwrap();
    assert_eq!(length(), 2 * record.size);
}

/// What the former owners of a disk have left is removed from its volume, which may not answer: the disk's task goes on, and says why.
#[tokio::test]
async fn a_volume_that_does_not_answer_does_not_hold_the_disks_task() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::<RegistryFaults>::default();
    let (node, _told) = node_at(directory.path(), faults.clone()).await;
    let path = directory.path().join("volume");
    std::fs::create_dir(&path).unwrap();
    DirVolume::open(&path).unwrap().identify(7).unwrap();
    volume(&*node.registry, &path, 7).await;
    let former = FormerOwner::silent(NodeRef::new("c", 1), 2);
    let record = disk_of_a(&node, |record| record.former = vec![former]).await;
    let left = path.join("d@0000000000000001.new");
    std::fs::write(&left, "").unwrap();
    let (mut task, _inbox) = DiskTask::new("d", &node);
    faults.mute.store(true, Ordering::Relaxed);
    let reason = tokio::time::timeout(SOON, task.bar_replacement(&record)).await.unwrap().unwrap_err();
    assert!(reason.contains("the storage of disk d has not answered"), "{reason}");
    // As an attempt whose thread waits for the storage.
    let earlier = node.intents.begin_bar("d").unwrap();
    faults.mute.store(false, Ordering::Relaxed);
    let reason = task.bar_replacement(&record).await.unwrap_err();
    assert!(reason.contains("volume v has not answered since an earlier attempt"), "{reason}");
    drop(earlier);
    // The first attempt goes on by itself now that it is answered.
    let until = tokio::time::Instant::now() + SOON;
    while let Err(reason) = task.bar_replacement(&record).await {
        assert!(tokio::time::Instant::now() < until, "{reason}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!left.exists());
}
