//! Which of the shard's notices become events.

use super::*;

/// A loss and a refusal, as the shard reports them.
async fn end_of_a_replica(task: &mut DiskTask) {
    let disk = "d".to_owned();
    let lost =
        Notice::Event { disk: disk.clone(), kind: "replica-lost", text: "replica on b is lost".into() };
    task.on_notice(lost).await;
    task.on_notice(Notice::Refused { disk, epoch: 4 }).await;
}

/// During a move the new owner and the replicas end what the former owner has, before it has the registry's answer.
#[tokio::test]
async fn what_a_move_ends_is_no_event() {
    let directory = tempfile::tempdir().unwrap();
    let node = quiet_node(directory.path()).await;
    let record = disk_of_a(&node, |_| ()).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: record.epoch };
    task.holds_clients = true;
    end_of_a_replica(&mut task).await;
    task.holds_clients = false;
    end_of_a_replica(&mut task).await;
    task.event("last", String::new());
    let events = Events::new(node.registry.clone(), node.session.node_ref());
    let told = async {
        loop {
            let told = events.recent(100).await.unwrap();
            let kinds: Vec<String> = told.into_iter().map(|event| event.kind).collect();
            if kinds.iter().any(|kind| kind == "last") {
                return kinds;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!(tokio::time::timeout(SOON, told).await.unwrap(), ["replica-lost", "refused", "last"]);
}

/// The task missed the answer to a resize, and learns the new size from the record. New clients get that size, so the shard needs it.
#[tokio::test]
async fn an_open_disk_takes_the_size_of_its_record_once() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let record = disk_of_a(&node, |_| ()).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    (task.local, task.told_size) = (Local::Open { epoch: record.epoch }, Some(record.size));
    let grown = DiskRecord { size: 2 * record.size, ..record.clone() };
    for record in [&record, &grown, &grown] {
        task.configure(record).await;
    }
    let mut sizes = Vec::new();
    while let Ok(Some(command)) = tokio::time::timeout(Duration::from_millis(200), told.recv()).await {
        if command.starts_with("Resize") {
            sizes.push(command);
        }
    }
    assert_eq!(sizes.len(), 1, "{sizes:?}");
    assert!(sizes[0].contains(&format!("size: {}", grown.size)), "{sizes:?}");
}
