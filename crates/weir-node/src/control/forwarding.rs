//! Which nodes may forward clients of theirs to disks that are open here, and for how long ([`super::forwarders`]).

use std::sync::Arc;

use weir_cluster::records::NodeRef;

use super::node::Node;
use crate::silent_hosts;

/// The process of node `name` that may have clients of `disk` forwarded here.
///
/// # Errors
/// In words: this node takes none; that one does not live, as far as this node knows; or the disk of this identity is not open here, or is half an import.
pub fn admit(node: &Node, disk: &str, identity: u64, name: &str) -> Result<NodeRef, String> {
    if !node.config.nbd.forward {
        return Err(format!(
            "{name} forwards a client of disk {disk}, and this node takes none: it has nbd.forward = false"
        ));
    }
    let live = node.records.nodes.now();
    let Some(by) = live.get(name).map(|record| NodeRef::new(name, record.incarnation)) else {
        return Err(format!("no node {name} is up, as far as this node knows"));
    };
    // The content of an import is its importer's until it is whole.
    let is_whole = node.records.disk(disk).is_some_and(|record| record.importing == 0);
    if !is_whole || node.here.id(disk) != Some(identity) {
        return Err(format!("{name} forwards a client of disk {disk}, which is not served here"));
    }
    Ok(by)
}

/// Ends the connections of nodes that go, as long as this node runs.
pub async fn keep(node: Arc<Node>) {
    let mut nodes = node.records.nodes.changes();
    loop {
        node.forwarders.end_gone(&node.records.nodes.now());
        if nodes.changed().await.is_err() {
            return;
        }
    }
}

/// Ends a connection when the node that forwards by it is silent.
pub async fn keep_one(node: Arc<Node>, number: u64) {
    while node.forwarders.end_silent(number) {
        weir_task::sleep(silent_hosts::LOOK_EVERY).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::control::disk::tests::{SOON, neighbour, node};

    #[tokio::test]
    async fn what_a_node_forwards_ends_with_the_node() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let [b, c] = [neighbour(&node, "b").await, neighbour(&node, "c").await];
        let list = &node.forwarders;
        let open = |disk: &str, by: NodeRef| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            theirs.set_read_timeout(Some(SOON)).unwrap();
            (list.insert(disk, by, ours.as_fd()).unwrap(), ours, theirs)
        };
        let (of_b, _ours, mut gone) = open("d", b.node_ref());
        let (_of_c, _ours, stays) = open("d", c.node_ref());
        let (former, _ours, mut former_end) = open("e", NodeRef::new("c", 0));
        assert_eq!(
            (list.of("d"), list.of("e"), list.of("f").len()),
            (vec!["b".into(), "c".into()], vec!["c".into()], 0)
        );
        let keeps = tokio::spawn(keep(Arc::clone(&node)));
        node.registry.revoke(b.lease()).await.unwrap();
        let ended = tokio::task::spawn_blocking(move || {
            (gone.read(&mut [0]).unwrap(), former_end.read(&mut [0]).unwrap())
        });
        assert_eq!(ended.await.unwrap(), (0, 0), "b is gone, and so is the former process of c");
        stays.set_nonblocking(true).unwrap();
        let waits = (&stays).read(&mut [0]).unwrap_err();
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock);
        drop((of_b, former));
        assert_eq!((list.of("d"), list.of("e").len()), (vec!["c".into()], 0));
        keeps.abort();
    }
}
