//! The members of the cluster: a node that is down stays in the list until an operator removes it.
//!
//! A live node's record ends with its lease; this one stays. Each node writes its own when it joins. The first node that sees
//! another one down records that.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::{MemberRecord, Record, keys};
use weir_cluster::registry::{RegistryError, Transaction};

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
            write(&node, &me).await;
        }
        let silent = known.values().filter(|member| member.down_since_unix_ms.is_none());
        for gone in silent.filter(|member| !live.contains_key(&member.name) && member.name != me.name) {
            let down_since_unix_ms = Some(weir_task::unix_millis());
            write(&node, &MemberRecord { down_since_unix_ms, ..gone.clone() }).await;
        }
        tokio::select! {
            _ = nodes.changed() => {}
            _ = members.changed() => {}
            () = weir_task::sleep(LOOK) => {}
        }
    }
}

/// Replaces the known record. The second of two writers finds it changed, and reads again.
async fn write(node: &Node, record: &MemberRecord) {
    let key = keys::member(&record.name);
    let known = node.records.members.now().seen(&record.name).revision();
    let change = match known {
        Some(revision) => Transaction::new().unchanged(key.clone(), revision),
        None => Transaction::new().absent(key.clone()),
    };
    if let Err(error) = node.registry.transact(change.put(key, record.encode())).await {
        tracing::debug!(member = record.name, %error, "looking again");
    }
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
