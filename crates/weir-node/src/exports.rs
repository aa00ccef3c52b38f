//! The NBD export: which disks clients may choose here, and how they get to the disk's shard, here or on the owner's node.
//!
//! Any node serves the clients of any disk that has a live owner: its own to their shards, those of another node's disk by that
//! node ([`forward`]). A client that loses its node finds its disk on another.

mod forward;
mod listen;
mod protected;
mod relay;
mod stream;

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use weir_block::{LayerInfo, Nanos};
use weir_cluster::records::NodeRef;
use weir_cluster::view::Seen;
use weir_export::nbd::{AcceptedClient, Attach, Refused};
use weir_identity::{Identity, OtherEnd};
use weir_nbd::server::{Directory, ExportInfo, Listed, NotServed};

use crate::api::import_of_export;
use crate::control::Node;
use crate::control::decide::is_live;
use crate::operations::Operations;
use crate::operations::imports::not_imported;
use crate::places::Places;
use crate::shard::messages::Command;
use crate::throttles::nbd_refused;
use forward::{Forwards, owner_elsewhere, reason_to_go, takes_forwarded};
pub use listen::listen;
use relay::{Relays, may_follow};

/// The disks that are open on this node, those that it follows, and those of other nodes. Says of the others why they are not served.
pub struct Exports {
    node: Arc<Node>,
    operations: Operations,
    relays: Arc<Relays>,
    forwards: Forwards,
    /// Connections over TLS, by their clients.
    places: Arc<Places>,
    /// Owners that take no forwarded clients, of which the operator knows, by their disks.
    not_taken: Mutex<BTreeMap<String, NodeRef>>,
}

/// Connections of one client over TLS at once, to all disks. Each costs two descriptors and buffers, and a hypervisor with the
/// disks of all its guests has fewer by far (P10).
const MOST_OF_CLIENT: usize = 1024;

impl Exports {
    /// The exports of `node`.
    ///
    /// # Errors
    /// The system has no thread or descriptors left.
    pub fn new(node: Arc<Node>, operations: Operations) -> io::Result<Exports> {
        let (forwards, places) = (Forwards::start()?, Places::new(MOST_OF_CLIENT));
        let (relays, not_taken) = (Arc::default(), Mutex::default());
        Ok(Exports { node, operations, relays, forwards, places, not_taken })
    }

    /// The node stops: its clients of other nodes' disks are disconnected, and go to other nodes.
    pub fn stop(&self) {
        self.forwards.stop();
    }

    /// The disks that clients may choose here, with the node by which those of others are served.
    fn choices(&self, is_near: bool) -> BTreeMap<String, Option<String>> {
        let mut all = BTreeMap::new();
        if reason_to_go(&self.node, is_near).is_none() {
            self.node.records.for_each_disk(|record| {
                let owner = owner_elsewhere(&self.node, record);
                if let Some(owner) = owner.filter(|owner| takes_forwarded(&self.node, owner)) {
                    all.insert(record.name.clone(), Some(owner.node));
                }
            });
        }
        let here = self.node.here.all().into_keys();
        all.extend(here.filter(|name| self.is_whole(name, 0)).map(|name| (name, None)));
        all
    }

    /// The names of all disks of the cluster.
    fn all_disks(&self) -> Vec<String> {
        let mut all = Vec::new();
        self.node.records.for_each_disk(|record| all.push(record.name.clone()));
        all
    }

    /// A disk that another node owns, and that clients may use here, and the node by which they do.
    fn elsewhere_served(&self, name: &str, is_near: bool) -> Option<(LayerInfo, String)> {
        let record = self.node.records.disk(name)?;
        let info = self.node.here.describe(&record);
        // Until the disk comes here, whoever owns it meanwhile.
        if may_follow(&record, &self.node.session.node_ref()) {
            return Some((info, record.owner.map_or_else(String::new, |owner| owner.node)));
        }
        let owner =
            owner_elsewhere(&self.node, &record).filter(|owner| takes_forwarded(&self.node, owner))?;
        reason_to_go(&self.node, is_near).is_none().then_some((info, owner.node))
    }

    /// Whether clients may use a disk, as far as its import is concerned. `number`: they are that import.
    fn is_whole(&self, disk: &str, number: u64) -> bool {
        self.node.records.disk(disk).is_none_or(|record| record.importing == number)
    }

    /// Whether this node has a disk open, and anybody may use it.
    #[must_use]
    pub fn serves(&self, disk: &str) -> bool {
        self.node.here.get(disk).is_some() && self.is_whole(disk, 0)
    }

    /// The reason why a disk is not available here, and the remedy. `is_near`: as [`Door`] has it.
    fn elsewhere(&self, name: &str, is_near: bool) -> NotServed {
        let me = &self.node.config.name;
        let lives = |owner| is_live(&self.node.records.nodes.now(), owner);
        if let Seen::Unreadable { error, .. } = self.node.records.seen(name) {
            let reason = format!("the record of disk {name} cannot be read on {me}: {error}");
            return NotServed::Unavailable(reason);
        }
        let Some(record) = self.node.records.disk(name) else {
            let reason = format!("there is no disk {name:?}; `weir disk list` shows those that there are");
            return NotServed::Unknown(reason);
        };
        if record.importing != 0 {
            let (why, hint) = not_imported(name);
            return NotServed::Unavailable(format!("{why}; {hint}"));
        }
        NotServed::Unavailable(match record.owner {
            None => {
                format!("disk {name} is closed; `weir disk export {name} --on {me}` opens it here")
            }
            // A former process of this node opens nothing any more.
            Some(owner) if owner.node == *me && lives(&owner) => {
                format!("disk {name} is being opened on this node; try again")
            }
            Some(owner) if lives(&owner) => {
                let uris = self.node.uris_on(&owner.node, name).join(" or ");
                let owned = format!("disk {name} is owned by node {} at {uris}", owner.node);
                match (reason_to_go(&self.node, is_near), self.not_taken(name, is_near)) {
                    (Some(why), _) => format!("{owned}; this node, {me}, {why}"),
                    (None, Some((_, why))) => format!("{owned}; {why}"),
                    (None, None) => owned,
                }
            }
            Some(owner) => {
                format!(
                    "disk {name} was owned by node {}, which is gone; try again, or ask `weir disk show {name}`",
                    owner.node
                )
            }
        })
    }
}

impl Exports {
    /// The other owner of a disk whose clients this node would forward, and why it does not: that one takes none.
    fn not_taken(&self, disk: &str, is_near: bool) -> Option<(NodeRef, String)> {
        let owner = owner_elsewhere(&self.node, &self.node.records.disk(disk)?)?;
        if reason_to_go(&self.node, is_near).is_some() || takes_forwarded(&self.node, &owner) {
            return None;
        }
        let why = format!("{} takes no forwarded clients: set nbd.forward alike on all nodes", owner.node);
        Some((owner, why))
    }

    /// The operator hears of a client that is not forwarded to the owner of its disk, once for each owner: such a client comes again and
    /// again.
    fn tell_not_taken(&self, disk: &str, is_near: bool) {
        let Some((owner, why)) = self.not_taken(disk, is_near) else { return };
        let mut told = self.not_taken.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|disk, _| self.node.records.disks.now().exists(disk));
        if told.insert(disk.to_owned(), owner.clone()) != Some(owner) {
            tracing::warn!(disk, why, "a client is refused");
            self.node.journal.tell("not-forwarded", disk, format!("a client is refused: {why}"));
        }
    }

    /// The reason why a disk is not served here, and the remedy, in words.
    #[must_use]
    pub fn why_not_here(&self, disk: &str) -> String {
        match self.elsewhere(disk, true) {
            NotServed::Unknown(reason) | NotServed::Unavailable(reason) | NotServed::Forbidden(reason) => {
                reason
            }
        }
    }
}

/// The exports as the clients of one listener see them.
pub struct Door {
    exports: Arc<Exports>,
    /// It is a Unix socket: its clients are on this host, and can go to no other node.
    is_near: bool,
}

impl Door {
    /// For a listener at a Unix socket, or at a TCP address.
    #[must_use]
    pub fn new(exports: &Arc<Exports>, is_near: bool) -> Arc<Door> {
        Arc::new(Door { exports: Arc::clone(exports), is_near })
    }
}

impl Directory for Door {
    fn list(&self) -> Vec<Listed> {
        let all = self.exports.choices(self.is_near).into_iter();
        all.map(|(name, by)| Listed { description: description(&name, by.as_deref()), name }).collect()
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        // Without a name, the only disk of the cluster is meant, in whatever state: another one may be all that is here, or is served, when
        // the client comes again with its unanswered writes.
        let only = name.is_empty().then(|| self.exports.all_disks());
        let name = match &only {
            None => name,
            Some(all) if all.len() == 1 => all.first().map_or("", String::as_str),
            Some(all) => {
                let reason = format!("there are {} disks; name one", all.len());
                return Err(NotServed::Unknown(reason));
            }
        };
        let (name, number) = import_of_export(name).unwrap_or((name, 0));
        let here = self.exports.node.here.get(name).map(|layer| (layer, None));
        let elsewhere = || {
            let (layer, by) = self.exports.elsewhere_served(name, self.is_near)?;
            Some((layer, Some(by)))
        };
        match here.or_else(elsewhere) {
            Some((layer, by)) if self.exports.is_whole(name, number) => {
                let description = description(name, by.as_deref());
                Ok(ExportInfo { name: name.to_owned(), description, layer })
            }
            _ => {
                self.exports.tell_not_taken(name, self.is_near);
                Err(self.exports.elsewhere(name, self.is_near))
            }
        }
    }
}

/// A disk in words; `by`: the node that owns it, if that is another one.
fn description(name: &str, by: Option<&str>) -> String {
    match by {
        None => format!("Weir disk {name}"),
        Some(by) => format!("Weir disk {name}, by node {by}"),
    }
}

impl Attach for Exports {
    fn attach(&self, client: AcceptedClient) {
        let (node, disk) = (&self.node, &client.session.export);
        if node.here.get(disk).is_some() {
            attach(node, client);
        } else if node.records.disk(disk).is_some_and(|record| may_follow(&record, &node.session.node_ref()))
        {
            relay::start(Arc::clone(node), self.operations.clone(), &self.relays, client);
        } else {
            self.forwards.take(node, client);
        }
    }

    fn admit(&self, client: OtherEnd, socket: BorrowedFd<'_>) -> Result<Arc<dyn Any + Send + Sync>, String> {
        let identity = self.node.identity.as_ref().ok_or("this node has no identity")?;
        let who = client.facts().identity.to_string();
        let place = self.places.take(&who);
        let place = place.ok_or_else(|| format!("{who} has {MOST_OF_CLIENT} connections already"))?;
        Ok(Arc::new((identity.admit(client, &socket)?, place)))
    }

    fn may_open(&self, client: &Identity, export: &str) -> bool {
        let Identity::Client(client) = client else { return false };
        client.may_open(export, self.node.records.disk(export).map(|record| record.id))
    }

    fn refused(&self, from: SocketAddr, why: Refused, reason: &str) {
        let (log, event) = nbd_refused(why);
        if let Some(left_out) = log.pass(Nanos::now()) {
            tracing::warn!(%from, reason, left_out, "an NBD client was refused");
        }
        // Rarely: events of an attacker must not displace others.
        if event.pass(Nanos::now()).is_some() {
            let text = format!("an NBD client at {from} was refused: {reason}");
            self.node.journal.tell("nbd-refused", &self.node.config.name, text);
        }
    }
}

/// Hands a client to the shard of its disk, which is open here.
pub fn attach(node: &Node, client: AcceptedClient) {
    let disk = client.session.export.clone();
    let command = Command::Attach { disk: disk.clone(), client: Box::new(client.into()) };
    // A shard that is so far behind would not serve one client more; dropping it disconnects it.
    if node.shards.try_send(&disk, command).is_err() {
        tracing::warn!(disk, "the shard's queue is full: refusing a client");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use weir_cluster::events::Events;
    use weir_cluster::membership::{NodeSession, SessionConfig};
    use weir_cluster::records::{DiskRecord, NodeRecord, Record, keys};
    use weir_cluster::registry::Transaction;
    use weir_identity::{Grant, Key};

    use super::*;
    use crate::cluster::unix_seconds as now;
    use crate::control::disk::tests::{SOON, disk_of_a, node, record_of};
    use crate::identity::NodeIdentity;
    use crate::identity::tests::{authority, joined};

    /// Node `a` with an identity, and the end of a client whose certificate opens disk 7, `d`.
    async fn exports(directory: &std::path::Path) -> (Exports, OtherEnd) {
        let (mut node, mut told) = node(directory).await;
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        let (authority, own) = (authority(1), directory.join("identity"));
        joined(&own, &authority, "a", now());
        let identity = NodeIdentity::load(&own, "a").unwrap();
        Arc::get_mut(&mut node).expect("nobody else has it yet").identity = Some(identity);
        disk_of_a(&node, |record| record.id = 7).await;
        let operations = Operations::new(Arc::clone(&node), Arc::default(), Arc::default());
        let grant = Grant::Exports(["d#0000000000000007".parse().unwrap()].into());
        let key = Key::generate().unwrap().public();
        let issued = authority.issue_client(&"guest".parse().unwrap(), &grant, &key, now(), 3600).unwrap();
        let exports = Exports { places: Places::new(2), ..Exports::new(node, operations).unwrap() };
        (exports, OtherEnd::read(&issued.chain[0]).unwrap())
    }

    /// The owner would refuse what this node brings, and its client would come again for ever without a reason.
    #[tokio::test]
    async fn a_client_is_refused_at_once_when_the_owner_takes_none_that_are_forwarded() {
        let directory = tempfile::tempdir().unwrap();
        let (exports, _) = exports(directory.path()).await;
        let (node, exports) = (Arc::clone(&exports.node), Arc::new(exports));
        let door = Door::new(&exports, false);
        let refuses = NodeRecord { forwards: false, ..record_of("b") };
        let config = SessionConfig::default();
        let _b = NodeSession::start(node.registry.clone(), refuses, config.clone()).await.unwrap();
        let _c = NodeSession::start(node.registry.clone(), record_of("c"), config).await.unwrap();
        let of = async |owner: &str| {
            let owned = NodeRef::new(owner, 1);
            let entry = node.registry.get(&keys::disk("d")).await.unwrap().unwrap();
            let before = DiskRecord::of(&entry).unwrap();
            let next = DiskRecord { owner: Some(owned.clone()), epoch: before.epoch + 1, ..before };
            node.registry.transact(next.replace(&entry)).await.unwrap();
            let mut disks = node.records.disks.changes();
            let is_owned = |disk: &DiskRecord| disk.owner.as_ref() == Some(&owned);
            disks.wait_for(|known| known.get("d").is_some_and(is_owned)).await.unwrap();
        };
        node.records.nodes.changes().wait_for(|known| known.len() == 3).await.unwrap();
        of("b").await;
        for _ in 0..3 {
            let Err(NotServed::Unavailable(why)) = door.lookup("d") else { panic!("it is offered") };
            assert!(why.contains("; b takes no forwarded clients: set nbd.forward alike"), "{why}");
        }
        assert!(door.list().is_empty());
        of("c").await;
        assert!(door.lookup("d").is_ok());
        assert_eq!(door.list().len(), 1);
        let told = async || {
            let events =
                Events::new(node.registry.clone(), node.session.node_ref()).recent(100).await.unwrap();
            events.into_iter().filter(|event| event.kind == "not-forwarded").count()
        };
        tokio::time::timeout(SOON, async { while told().await == 0 {} }).await.expect("no event");
        assert_eq!(told().await, 1, "not for each client");
    }

    /// P10: each connection costs descriptors and buffers.
    #[tokio::test]
    async fn a_client_has_a_number_of_connections_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let (exports, client) = exports(directory.path()).await;
        let (socket, _other) = UnixStream::pair().unwrap();
        let open = || exports.admit(client.clone(), socket.as_fd());
        let first = open().unwrap();
        let _second = open().unwrap();
        let refused = open().map(drop).expect_err("a third one");
        assert!(refused.contains("client guest has"), "{refused}");
        drop(first);
        open().expect("the first one has ended");
    }

    #[tokio::test]
    async fn a_certificate_does_not_outlive_its_disk() {
        let directory = tempfile::tempdir().unwrap();
        let (exports, client) = exports(directory.path()).await;
        let (node, who) = (Arc::clone(&exports.node), &client.facts().identity);
        assert!(exports.may_open(who, "d") && !exports.may_open(who, "e"));
        node.registry.transact(Transaction::new().delete(keys::disk("d"))).await.unwrap();
        let mut disks = node.records.disks.changes();
        disks.wait_for(|known| !known.contains_key("d")).await.unwrap();
        assert!(!exports.may_open(who, "d"), "it is gone");
        let again = disk_of_a(&node, |record| record.id = 8).await;
        assert!(!exports.may_open(who, "d"), "another one has its name");
        let entry = node.registry.get(&keys::disk("d")).await.unwrap().unwrap();
        let same = DiskRecord { id: 7, ..again };
        node.registry.transact(same.replace(&entry)).await.unwrap();
        disks.wait_for(|known| known.get("d").is_some_and(|disk| disk.id == 7)).await.unwrap();
        assert!(exports.may_open(who, "d"));
    }
}
