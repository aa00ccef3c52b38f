//! Nodes that forward clients of theirs to disks that are open here: which connections there are, and when they end.
//!
//! A client that loses the node which forwards it sends its unanswered requests again by another way. What is left of the former
//! connection must not be served after that. A process that dies resets its connections; a host that dies does not, so they end with
//! the node's session in the registry. Where only the network between the two nodes was cut, both have their sessions, and each side
//! ends the connection after the other one has been silent for a while: the owner first.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use weir_cluster::placement::Live;
use weir_cluster::records::NodeRef;

use super::decide::is_live;
use crate::places::{Place, Places};
use crate::silent_hosts;

/// Clients that one node forwards, and those of one disk, as the clients of one guest must not take the places of all others. Owners hold
/// nodes to it (P10).
pub const MOST_OF_NODE: usize = 512;
/// Of one disk.
pub const MOST_OF_DISK: usize = 64;

/// Time without a sign of life after which an owner ends a connection that another node forwards.
pub const FORWARDER_SILENT_AFTER: Duration = Duration::from_secs(10);

/// Time after which a forwarding node takes the owner for silent, and ends its client's connection. The client sends its unanswered
/// requests again by another way, so the owner must not serve them afterwards (P4): it has ended the connection by then, also if its last
/// look at it came late.
pub const OWNER_SILENT_AFTER: Duration = Duration::from_secs(20);

/// The connections of forwarded clients, by number.
#[derive(Debug)]
pub struct Forwarders {
    all: Mutex<(u64, BTreeMap<u64, Forwarded>)>,
    of_node: Arc<Places>,
    of_disk: Arc<Places>,
}

impl Default for Forwarders {
    fn default() -> Forwarders {
        let (of_node, of_disk) = (Places::new(MOST_OF_NODE), Places::new(MOST_OF_DISK));
        Forwarders { all: Mutex::default(), of_node, of_disk }
    }
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
    /// Its number.
    pub number: u64,
    /// The process that forwards.
    pub by: NodeRef,
    _places: (Place, Place),
}

impl Forwarders {
    /// Lists a client of `disk` that the process `by` forwards by `socket`.
    ///
    /// # Errors
    /// The system has no descriptors left, or that node has too many clients here.
    pub fn insert(
        self: &Arc<Forwarders>,
        disk: &str,
        by: NodeRef,
        socket: BorrowedFd<'_>,
    ) -> std::io::Result<Open> {
        let of_disk = self.of_disk.take(&format!("{} {disk}", by.node));
        let Some(places) = self.of_node.take(&by.node).zip(of_disk) else {
            let most = format!(
                "{MOST_OF_NODE} clients, or {MOST_OF_DISK} of disk {disk}, are forwarded by {} already",
                by.node
            );
            return Err(std::io::Error::other(most));
        };
        let forwarded =
            Forwarded { disk: disk.to_owned(), by: by.clone(), socket: socket.try_clone_to_owned()? };
        silent_hosts::probe_when_idle(socket, FORWARDER_SILENT_AFTER)?;
        let mut all = self.lock();
        let number = all.0;
        all.0 += 1;
        all.1.insert(number, forwarded);
        Ok(Open { list: Arc::clone(self), number, by, _places: places })
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
    pub(super) fn end_gone(&self, live: &Live) {
        for one in self.lock().1.values().filter(|one| !is_live(live, &one.by)) {
            tracing::info!(disk = one.disk, by = %one.by, "a forwarded client is disconnected: its node is gone");
            // One that has ended already needs no end.
            let _ = shutdown(&one.socket, Shutdown::Both);
        }
    }

    /// Ends a connection to a host that has acknowledged nothing for a while, though its session may live. Returns whether the connection
    /// is still there to be looked at.
    pub(super) fn end_silent(&self, number: u64) -> bool {
        let all = self.lock();
        let Some(one) = all.1.get(&number) else { return false };
        let is_silent = silent_hosts::is_silent(one.socket.as_fd(), FORWARDER_SILENT_AFTER);
        if is_silent {
            tracing::warn!(disk = one.disk, by = %one.by, "a forwarded client is disconnected: its node is silent");
            // One that has ended already needs no end.
            let _ = shutdown(&one.socket, Shutdown::Both);
        }
        !is_silent
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A node that keeps to no limit of its own would take the descriptors of all others.
    #[test]
    fn each_node_has_its_places() {
        let list = Arc::new(Forwarders::default());
        let (socket, _other) = UnixStream::pair().unwrap();
        let by = |name: &str| NodeRef::new(name, 1);
        let taken: Vec<Open> =
            (0..MOST_OF_DISK).map(|_| list.insert("d", by("b"), socket.as_fd()).unwrap()).collect();
        let refused = list.insert("d", by("b"), socket.as_fd()).unwrap_err().to_string();
        assert!(refused.contains("64 of disk d, are forwarded by b"), "{refused}");
        list.insert("e", by("b"), socket.as_fd()).unwrap();
        list.insert("d", by("c"), socket.as_fd()).unwrap();
        drop(taken);
        list.insert("d", by("b"), socket.as_fd()).unwrap();
    }
}
