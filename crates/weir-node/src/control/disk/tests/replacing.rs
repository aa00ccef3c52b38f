//! Another file for a disk on a LUN, which this node serves to an owner that has only lost its connection.

use weir_cluster::records::{LunRecord, VolumeKind, VolumeRecord};

use super::*;

/// The kept content shares the blocks that whoever serves the disk knows as the disk's own, also if the rollback fails afterwards (I1, I4).
#[tokio::test]
async fn a_disk_is_served_to_nobody_once_its_present_content_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let lun = LunRecord {
        identity: "l".into(),
        filesystem: "xfs".into(),
        uuid: "1".repeat(32),
        mark: "2".repeat(32),
        heartbeat: 0,
        redirected: false,
    };
    let volume =
        VolumeRecord { kind: VolumeKind::Lun, lun: Some(lun), ..VolumeRecord::dir("v", "/".into(), 7) };
    node.registry.transact(volume.create(keys::volume("v"))).await.unwrap();
    disk_of_a(&node, |record| record.owner = None).await;
    node.coordinators.served("v").lock().await.insert("d".into(), 1);
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let content = NewContent::Snapshot { snapshot: "s".into(), keep_as: Some("k".into()) };
    let failed = task.replace(content).await.unwrap_err();
    assert!(failed.message.contains("coordinate"), "the preparation has failed: {failed}");
    assert!(node.coordinators.served("v").lock().await.is_empty());
    let told: Vec<String> = std::iter::from_fn(|| told.try_recv().ok()).collect();
    assert!(told.iter().any(|command| command.starts_with("StopServing")), "{told:?}");
}
