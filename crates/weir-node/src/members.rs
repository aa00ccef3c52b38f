//! The members of the cluster: a node that is down stays in the list until an operator removes it.
//!
//! A live node's record ends with its lease; this one stays. Each node writes its own when it joins. The first node that sees
//! another one down records that. A node that stops records it itself.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::events::Events;
use weir_cluster::records::{MemberRecord, NodeRecord, Record, keys};
use weir_cluster::registry::{Compare, Expect, RegistryError, Transaction};
use weir_cluster::view::Records;

use crate::api::NodeView;
use crate::control::Node;
use crate::timestamps::rfc3339;

/// Pause between two looks where nothing has changed.
const LOOK: Duration = Duration::from_secs(5);

/// Longest time for the registry to hear of this node's end.
const ANSWER: Duration = Duration::from_secs(1);

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
        {
            let live = nodes.borrow_and_update().clone();
            let known = members.borrow_and_update().clone();
            look(&node, &live, &known).await;
        }
        tokio::select! {
            biased;
            _ = nodes.changed() => {}
            _ = members.changed() => {}
            () = weir_task::sleep(LOOK) => {}
        }
    }
}

/// Writes what is not true in `known`, and tells of it. Each write takes a while, and others write meanwhile: a decision counts for
/// the records that it was taken on.
async fn look(node: &Node, live: &Records<NodeRecord>, known: &Records<MemberRecord>) {
    let me = myself(node);
    if known.get(&me.name) != Some(&me) {
        let since = known.get(&me.name).and_then(|before| before.down_since_unix_ms).map(rfc3339);
        // Not one whose session has ended: it is about to begin another, and is down until then.
        if write(node, &me, known, Some(node.session.guard())).await
            && let Some(since) = since
        {
            node.journal.tell("node-up", &me.name, format!("{} is up; it was down since {since}", me.name));
        }
    }
    let up = known.values().filter(|member| member.down_since_unix_ms.is_none());
    for gone in up.filter(|member| !live.exists(&member.name) && member.name != me.name) {
        // The two views are not of the same moment.
        let no_session = Compare { key: keys::session(&gone.name), expect: Expect::Absent };
        // One node's write succeeds, so the event comes once.
        if write(node, &down_now(gone.clone()), known, Some(no_session)).await {
            let text = format!("the registry does not hear {} any more", gone.name);
            node.journal.tell("node-down", &gone.name, text);
        }
    }
}

/// This node has stopped, and says so itself: others would only see that it is gone. Nothing keeps its record true any more.
pub async fn leave(node: &Node) {
    let me = myself(node);
    let leaving = async {
        if write(node, &down_now(me.clone()), &node.records.members.now(), Some(node.session.guard())).await {
            let events = Events::new(Arc::clone(&node.registry), node.session.node_ref());
            return events.record("node-down", &me.name, &format!("{} has stopped", me.name)).await;
        }
        Ok(())
    };
    if !matches!(weir_task::timeout(ANSWER, leaving).await, Ok(Ok(()))) {
        tracing::debug!("the registry does not hear that this node has stopped");
    }
}

fn myself(node: &Node) -> MemberRecord {
    let (name, fault_domain) = (node.config.name.clone(), node.config.fault_domain.clone());
    MemberRecord { name, fault_domain, down_since_unix_ms: None }
}

fn down_now(member: MemberRecord) -> MemberRecord {
    MemberRecord { down_since_unix_ms: Some(weir_task::unix_millis()), ..member }
}

/// Replaces the record as it is in `known`, and returns whether that is certain. The second of two writers finds it changed, and looks
/// again.
async fn write(
    node: &Node,
    record: &MemberRecord,
    known: &Records<MemberRecord>,
    condition: Option<Compare>,
) -> bool {
    let key = keys::member(&record.name);
    let change = match known.seen(&record.name).revision() {
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
        clock_ahead_ms: None,
        peer_address: String::new(),
        media: Vec::new(),
        load: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::disk::tests::{SOON, node, node_in};

    /// Lists nodes, each with the time since which it is down, and waits until `node` sees them.
    async fn list(node: &Node, members: &[(&str, Option<u64>)]) {
        for (name, down_since_unix_ms) in members {
            let record = MemberRecord {
                name: (*name).into(),
                down_since_unix_ms: *down_since_unix_ms,
                ..myself(node)
            };
            let nothing = node.records.members.now();
            assert!(write(node, &record, &nothing, None).await);
        }
        sees(node, |known| members.iter().all(|(name, _)| known.contains_key(*name))).await;
    }

    async fn sees(node: &Node, is_so: impl Fn(&Records<MemberRecord>) -> bool) {
        let mut known = node.records.members.changes();
        let seen = tokio::time::timeout(SOON, known.wait_for(|known| is_so(known)));
        seen.await.expect("the view does not show it").unwrap();
    }

    /// The kinds and subjects of the events so far, once there are `count`, and none comes for a while.
    async fn events(node: &Node, count: usize) -> Vec<(String, String)> {
        let events = Events::new(node.registry.clone(), node.session.node_ref());
        let told = async {
            while events.recent(100).await.unwrap().len() < count {
                weir_task::sleep(Duration::from_millis(20)).await;
            }
            weir_task::sleep(Duration::from_millis(200)).await;
            events.recent(100).await.unwrap()
        };
        let told = tokio::time::timeout(SOON, told).await.expect("no events");
        let mut told: Vec<_> = told.into_iter().map(|event| (event.kind, event.subject)).collect();
        told.sort();
        told
    }

    fn down(name: &str) -> (String, String) {
        ("node-down".into(), name.into())
    }

    /// Each of a node's ends and returns is one event, whichever nodes see it.
    #[tokio::test]
    async fn events_tell_of_nodes_that_go_down_and_come_back() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        list(&node, &[("a", Some(0)), ("b", None), ("c", Some(0))]).await;
        tokio::spawn(keep(Arc::clone(&node)));
        assert_eq!(events(&node, 2).await, [down("b"), ("node-up".into(), "a".into())]);
    }

    #[tokio::test]
    async fn what_two_nodes_see_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let (a, _told) = node(directory.path()).await;
        let (b, _told) = node_in(a.registry.clone(), "b").await;
        list(&a, &[("a", None), ("b", None), ("x", None), ("y", None)]).await;
        sees(&b, |known| known.contains_key("y")).await;
        let (live, known) = (b.records.nodes.now(), b.records.members.now());
        tokio::spawn(keep(Arc::clone(&a)));
        assert_eq!(events(&a, 2).await, [down("x"), down("y")]);
        // It has decided at the same time, and its writes come later.
        sees(&b, |known| ["x", "y"].iter().all(|name| known[*name].down_since_unix_ms.is_some())).await;
        let told = b.records.members.now();
        look(&b, &live, &known).await;
        tokio::spawn(keep(Arc::clone(&b)));
        assert_eq!(events(&a, 2).await, [down("x"), down("y")]);
        for name in ["x", "y"] {
            assert_eq!(b.records.members.now().seen(name), told.seen(name), "the time when it went down");
        }
    }

    #[tokio::test]
    async fn a_node_that_is_removed_or_back_meanwhile_is_not_written_down() {
        let directory = tempfile::tempdir().unwrap();
        let (a, _told) = node(directory.path()).await;
        list(&a, &[("a", None), ("x", None), ("y", None)]).await;
        let (live, known) = (a.records.nodes.now(), a.records.members.now());
        remove(&a, "x").await.unwrap();
        sees(&a, |known| !known.contains_key("x")).await;
        // The view of the members is ahead of that of the nodes.
        let (y, _told) = node_in(a.registry.clone(), "y").await;
        look(&a, &live, &known).await;
        sees(&y, |known| !known.contains_key("x")).await;
        let now = a.registry.list(keys::MEMBERS).await.unwrap().entries;
        let now: Vec<_> = now.iter().map(|entry| MemberRecord::of(entry).unwrap()).collect();
        let left = ["a", "y"].map(|name| MemberRecord { name: name.into(), ..myself(&a) });
        assert_eq!(now, left);
        assert_eq!(events(&a, 0).await, []);
    }

    #[tokio::test]
    async fn a_node_that_stops_says_so_itself() {
        let directory = tempfile::tempdir().unwrap();
        let (a, _told) = node(directory.path()).await;
        let (b, _told) = node_in(a.registry.clone(), "b").await;
        list(&a, &[("a", None), ("b", None)]).await;
        sees(&b, |known| known.contains_key("b")).await;
        tokio::spawn(keep(Arc::clone(&a)));
        leave(&b).await;
        b.registry.revoke(b.session.lease()).await.unwrap();
        a.records.nodes.changes().wait_for(|live| !live.contains_key("b")).await.unwrap();
        assert_eq!(events(&a, 1).await, [down("b")]);
        let told = Events::new(a.registry.clone(), a.session.node_ref()).recent(1).await.unwrap();
        assert_eq!((told[0].text.as_str(), told[0].node.as_str()), ("b has stopped", "b"));
    }
}
