//! The NBD export: which disks clients may choose here, and how they get to the disk's shard.

mod listen;
mod relay;

use std::any::Any;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use weir_block::{LayerInfo, Nanos};
use weir_cluster::view::Seen;
use weir_export::nbd::{AcceptedClient, Attach};
use weir_identity::OtherEnd;
use weir_nbd::server::{Directory, ExportInfo, Listed, NotServed};

use crate::control::Node;
use crate::control::decide::is_live;
use crate::operations::Operations;
use crate::shard::messages::Command;
use crate::throttles::{NBD_REFUSED, NBD_REFUSED_EVENT};
pub use listen::listen;
use relay::{Relays, may_follow};

/// The disks that are open on this node, and those that it follows. Says of the others where they are.
pub struct Exports {
    node: Arc<Node>,
    operations: Operations,
    relays: Arc<Relays>,
}

impl Exports {
    /// The exports of `node`.
    #[must_use]
    pub fn new(node: Arc<Node>, operations: Operations) -> Exports {
        Exports { node, operations, relays: Arc::default() }
    }

    /// A disk that another node owns, and whose clients may come here already.
    fn followed(&self, name: &str) -> Option<LayerInfo> {
        let record = self.node.records.disk(name)?;
        may_follow(&record, &self.node.session.node_ref()).then(|| self.node.here.describe(&record))
    }

    /// The reason why a disk is not available here, and the remedy.
    fn elsewhere(&self, name: &str) -> NotServed {
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
                format!(
                    "disk {name} is owned by node {} at {uris}; for a live migration to here, `weir disk follow {name} --to {me}`",
                    owner.node
                )
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

impl Directory for Exports {
    fn list(&self) -> Vec<Listed> {
        let listed = |name: String| Listed { description: format!("Weir disk {name}"), name };
        self.node.here.all().into_keys().map(listed).collect()
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        let all = self.node.here.all();
        // Without a name, the only disk is meant.
        let name = match (name, all.len()) {
            ("", 1) => all.keys().next().map_or("", String::as_str),
            ("", _) => {
                let reason = format!("{} disks are exported here; name one", all.len());
                return Err(NotServed::Unknown(reason));
            }
            (name, _) => name,
        };
        match all.get(name).copied().or_else(|| self.followed(name)) {
            Some(layer) => {
                Ok(ExportInfo { name: name.to_owned(), description: format!("Weir disk {name}"), layer })
            }
            None => Err(self.elsewhere(name)),
        }
    }
}

impl Attach for Exports {
    fn attach(&self, client: AcceptedClient) {
        if self.node.here.get(&client.session.export).is_some() {
            attach(&self.node, client);
        } else {
            relay::start(Arc::clone(&self.node), self.operations.clone(), &self.relays, client);
        }
    }

    fn admit(&self, client: OtherEnd, socket: BorrowedFd<'_>) -> Result<Arc<dyn Any + Send + Sync>, String> {
        let identity = self.node.identity.as_ref().ok_or("this node has no identity")?;
        Ok(identity.admit(client, &socket)?)
    }

    fn refused(&self, from: SocketAddr, reason: &str) {
        if let Some(left_out) = NBD_REFUSED.pass(Nanos::now()) {
            tracing::warn!(%from, reason, left_out, "an NBD client was refused");
        }
        // Rarely: events of an attacker must not displace others.
        if NBD_REFUSED_EVENT.pass(Nanos::now()).is_some() {
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
