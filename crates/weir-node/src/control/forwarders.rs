//! Nodes that forward clients of theirs to disks that are open here: which connections there are, and when they end.
//!
//! A client that loses the node which forwards it sends its unanswered requests again by another way. What is left of the former
//! connection must not be served after that. A process that dies resets its connections; a host that dies does not, so they end with
//! the node's session in the registry.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{Shutdown, shutdown};
use weir_cluster::placement::Live;
use weir_cluster::records::NodeRef;

use super::decide::is_live;
use super::node::Node;

/// The connections of forwarded clients, by number.
#[derive(Debug, Default)]
pub struct Forwarders {
    all: Mutex<(u64, BTreeMap<u64, Forwarded>)>,
}

/// The connection of one forwarded client.
#[derive(Debug)]
struct Forwarded {
    disk: String,
    by: NodeRef,
    /// A duplicate, to end the connection under the shard that uses it.
    socket: OwnedFd,
}

/// The place of one of them in the list, as long as it is open.
#[derive(Debug)]
pub struct Open {
    list: Arc<Forwarders>,
    number: u64,
    /// The process that forwards.
    pub by: NodeRef,
}

impl Forwarders {
    /// Lists a client of `disk` that the process `by` forwards by `socket`.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn insert(
        self: &Arc<Forwarders>,
        disk: &str,
        by: NodeRef,
        socket: BorrowedFd<'_>,
    ) -> std::io::Result<Open> {
        let forwarded =
            Forwarded { disk: disk.to_owned(), by: by.clone(), socket: socket.try_clone_to_owned()? };
        let mut all = self.lock();
        let number = all.0;
        all.0 += 1;
        all.1.insert(number, forwarded);
        Ok(Open { list: Arc::clone(self), number, by })
    }

    /// The nodes that forward clients of `disk`.
    #[must_use]
    pub fn of(&self, disk: &str) -> Vec<String> {
        let all = self.lock();
        let of_disk = all.1.values().filter(|one| one.disk == disk);
        let mut nodes: Vec<_> = of_disk.map(|one| one.by.node.clone()).collect();
        nodes.sort();
        nodes.dedup();
        nodes
    }

    /// Ends the connections of processes that are gone.
    fn end_gone(&self, live: &Live) {
        for one in self.lock().1.values().filter(|one| !is_live(live, &one.by)) {
            tracing::info!(disk = one.disk, by = %one.by, "a forwarded client is disconnected: its node is gone");
            // One that has ended already needs no end.
            let _ = shutdown(&one.socket, Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Forwarded>)> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.list.lock().1.remove(&self.number);
    }
}

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
