//! Writes this node's wall clock to the registry, compares all of them, and reports a difference ([`crate::control::clocks`]).

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::{ClockRecord, Record, keys};
use weir_cluster::registry::Transaction;
use weir_cluster::view::View;

use crate::control::Node;
use crate::control::clocks::{AGREES, WRITE, fault};

/// Pause before a registry that could not be listed is listed again.
const LIST_AGAIN: Duration = Duration::from_secs(5);

/// Writes this node's clock and compares all of them, for as long as the node lives.
pub async fn keep(node: Arc<Node>) {
    tokio::join!(write(&node), compare(&node));
}

async fn write(node: &Node) {
    let mut writes = weir_task::interval(WRITE);
    loop {
        writes.tick().await;
        let record = ClockRecord { unix_ms: weir_task::unix_millis() };
        let (key, lease) = (keys::clock(&node.config.name), node.session.lease());
        let put = Transaction::new().put_leased(key, record.encode(), lease).when(node.session.guard());
        if let Err(error) = node.registry.transact(put).await {
            tracing::debug!(%error, "this node's clock is written later");
        }
    }
}

async fn compare(node: &Node) {
    let clocks: View<ClockRecord> = loop {
        match View::start(Arc::clone(&node.registry), keys::CLOCKS).await {
            Ok(view) => break view,
            Err(error) => tracing::debug!(%error, "the nodes' clocks are listed again"),
        }
        weir_task::sleep(LIST_AGAIN).await;
    };
    let (mut changes, own) = (clocks.changes(), &node.config.name);
    let mut differs = false;
    loop {
        let now = weir_task::unix_millis();
        node.clocks.read(&changes.borrow_and_update(), &node.records.nodes.now(), now);
        if let Some((name, ahead, others)) = node.clocks.own_difference(own) {
            match fault(&name, ahead, &others) {
                Some(fault) if !differs => {
                    node.journal.tell("clock-differs", &name, fault);
                    differs = true;
                }
                None if differs && ahead.unsigned_abs() < AGREES => {
                    let text = format!("the clock of node {name} agrees with that of {others} again");
                    node.journal.tell("clock-agrees", &name, text);
                    differs = false;
                }
                _ => {}
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::disk::tests::{SOON, neighbour, node};

    const HOUR: i64 = 3_600_000;

    #[tokio::test]
    async fn a_clock_is_compared_when_its_record_arrives() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let _b = neighbour(&node, "b").await;
        let says = async |name: &str, ago: i64| {
            let unix_ms = weir_task::unix_millis().saturating_add_signed(-ago);
            let put = Transaction::new().put(keys::clock(name), ClockRecord { unix_ms }.encode());
            node.registry.transact(put).await.unwrap();
            let read = async {
                while node.clocks.written(name) != Some(unix_ms) {
                    weir_task::sleep(Duration::from_millis(5)).await;
                }
            };
            weir_task::timeout(SOON, read).await.unwrap();
            node.clocks.ahead("a").get("b").copied()
        };
        let comparing = Arc::clone(&node);
        let comparing = weir_task::spawn(async move { compare(&comparing).await });
        assert_eq!(says("b", HOUR).await, None, "it may have been written then");
        assert_eq!(says("a", 0).await, None);
        assert_eq!(says("a", 1).await, None);
        let behind = says("b", HOUR).await.unwrap();
        assert!((behind + HOUR).abs() < 5_000, "{behind}");
        let right = says("b", 2).await.unwrap();
        assert!(right.abs() < 5_000, "the first one was late: {right}");
        comparing.abort();
    }
}
