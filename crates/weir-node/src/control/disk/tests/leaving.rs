//! Copies on a node that is drained.

use std::os::unix::net::UnixStream;

use weir_block::Stream;
use weir_cluster::records::MediumSpace;

use super::*;

/// A copy that is being filled has its room already; one that was refused for want of room never gets it, and the drain may go on
/// with fewer copies.
#[tokio::test]
async fn only_a_copy_that_is_being_filled_replaces_another() {
    let directory = tempfile::tempdir().unwrap();
    let node = quiet_node(directory.path()).await;
    let _b = neighbour(&node, "b").await;
    let c = neighbour(&node, "c").await;
    c.publish(vec![MediumSpace { medium: Medium::Ram, bytes: 1, free: 0, log: 1 }], 0).await.unwrap();
    drain(&node, "b", true).await;
    let mut changes = node.records.changes();
    while node.records.nodes.now()["c"].has_room(Medium::Ram) {
        changes.next().await;
    }
    let record = disk_of_a(&node, |record| {
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("b", 1)]);
    })
    .await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: record.epoch };
    let (replaced, dropped) = (vec!["b".to_owned()], Vec::new());
    let kept = Leaving { replaced, dropped };
    let given_up = Leaving { replaced: Vec::new(), dropped: vec!["b".to_owned()] };
    assert_eq!(task.leaving(&record), given_up, "no node has room");
    let fill = async |task: &mut DiskTask| {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        task.on_peer(NodeRef::new("c", 1), Ok(Stream::Kernel(ours.into()))).await;
        assert_eq!(task.leaving(&record), kept);
    };
    fill(&mut task).await;
    let wants = |connected: &[&str]| Notice::WantPeer {
        disk: "d".into(),
        node: None,
        connected: connected.iter().map(|node| (*node).to_owned()).collect(),
        exclude: Vec::new(),
    };
    task.on_notice(wants(&["b", "c"])).await;
    assert_eq!(task.leaving(&record), kept);
    task.on_notice(wants(&["b"])).await;
    assert_eq!(task.leaving(&record), given_up, "c has refused it, or was lost");
    fill(&mut task).await;
    task.on_peer(NodeRef::new("c", 1), Err("it is down".into())).await;
    assert_eq!(task.leaving(&record), given_up);
}
