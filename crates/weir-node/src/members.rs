//! The members of the cluster: a node that is down stays in the list until an operator removes it.
//!
//! A live node's record ends with its lease; this one stays. Each node writes its own when it joins. The first node that sees
//! another one down records that.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::{MemberRecord, Record, keys};
use weir_cluster::registry::{Compare, RegistryError, Transaction};

use crate::api::NodeView;
use crate::control::Node;
use crate::timestamps::rfc3339;

/// Pause between two looks where nothing has changed.
const LOOK: Duration = Duration::from_secs(5);

/// Those that do not live.
pub fn down(node: &Node) -> Vec<NodeView> {
    let (all, live) = (node.records.members.now(), node.records.nodes.now());
    let down = all.values().filter(|member| !live.contains_key(&member.name));
    down.map(view).collect()
}

/// Keeps the list true until the node stops.
pub async fn keep(node: Arc<Node>) {
    let (mut nodes, mut members) = (node.records.nodes.changes(), node.records.members.changes());
    loop {
        let live = nodes.borrow_and_update().clone();
        let known = members.borrow_and_update().clone();
        let me = MemberRecord {
            name: node.config.name.clone(),
            fault_domain: node.config.fault_domain.clone(),
            down_since_unix_ms: None,
        };
        if known.get(&me.name) != Some(&me) {
            let since = known.get(&me.name).and_then(|before| before.down_since_unix_ms).map(rfc3339);
            // Not one whose session has ended: it is about to begin another, and is down until then.
            if write(&node, &me, Some(node.session.guard())).await
                && let Some(since) = since
            {
                node.journal.tell(
                    "node-up",
                    &me.name,
                    format!("{} is up; it was down since {since}", me.name),
                );
            }
        }
        let silent = known.values().filter(|member| member.down_since_unix_ms.is_none());
        for gone in silent.filter(|member| !live.contains_key(&member.name) && member.name != me.name) {
            let down_since_unix_ms = Some(weir_task::unix_millis());
            // One node's write succeeds, so the event comes once.
            if write(&node, &MemberRecord { down_since_unix_ms, ..gone.clone() }, None).await {
                let text = format!("the registry does not hear {} any more", gone.name);
                node.journal.tell("node-down", &gone.name, text);
            }
        }
        tokio::select! {
            _ = nodes.changed() => {}
            _ = members.changed() => {}
            () = weir_task::sleep(LOOK) => {}
        }
    }
}

/// Replaces the known record, and returns whether that is certain. The second of two writers finds it changed, and reads again.
async fn write(node: &Node, record: &MemberRecord, condition: Option<Compare>) -> bool {
    let key = keys::member(&record.name);
    let known = node.records.members.now().seen(&record.name).revision();
    let change = match known {
        Some(revision) => Transaction::new().unchanged(key.clone(), revision),
        None => Transaction::new().absent(key.clone()),
    };
    let change = condition.into_iter().fold(change, Transaction::when);
    let written = node.registry.transact(change.put(key, record.encode())).await;
    if let Err(error) = &written {
        tracing::debug!(member = record.name, %error, "looking again");
    }
    written.is_ok()
}

/// Removes a node from the list, if it is there.
///
/// # Errors
/// The registry does not answer, or the node has just written its record: it is back.
pub async fn remove(node: &Node, name: &str) -> Result<(), RegistryError> {
    let known = node.records.members.now();
    let Some(revision) = known.seen(name).revision() else { return Ok(()) };
    let key = keys::member(name);
    let gone = Transaction::new().unchanged(key.clone(), revision).delete(key);
    node.registry.transact(gone).await.map(drop)
}

fn view(member: &MemberRecord) -> NodeView {
    NodeView {
        name: member.name.clone(),
        fault_domain: member.fault_domain.clone(),
        state: NodeView::DOWN.to_owned(),
        down_since: member.down_since_unix_ms.map(rfc3339),
        peer_address: String::new(),
        media: Vec::new(),
        load: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::disk::tests::{SOON, node};

    /// Each of a node's ends and returns is one event, whichever nodes see it.
    #[tokio::test]
    async fn events_tell_of_nodes_that_go_down_and_come_back() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        for (name, down_since_unix_ms) in [("a", Some(0)), ("b", None), ("c", Some(0))] {
            let record = MemberRecord {
                name: name.into(),
                fault_domain: node.config.fault_domain.clone(),
                down_since_unix_ms,
            };
            write(&node, &record, None).await;
        }
        node.records.members.changes().wait_for(|known| known.len() == 3).await.unwrap();
        tokio::spawn(keep(Arc::clone(&node)));
        let events = weir_cluster::events::Events::new(node.registry.clone(), node.session.node_ref());
        let told = async {
            loop {
                let told = events.recent(100).await.unwrap();
                let mut told: Vec<_> = told.into_iter().map(|event| (event.kind, event.subject)).collect();
                told.sort();
                if told.len() >= 2 {
                    return told;
                }
                weir_task::sleep(Duration::from_millis(20)).await;
            }
        };
        let told = tokio::time::timeout(SOON, told).await.expect("no events");
        assert_eq!(told, [("node-down".into(), "b".into()), ("node-up".into(), "a".into())]);
    }
}
