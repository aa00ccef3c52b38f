//! What a disk on its shard asks for, carried out: another configuration, a connection to a peer.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use weir_cluster::ownership;
use weir_cluster::placement::choose_replicas;
use weir_cluster::records::{DiskRecord, Mode, NodeRecord, NodeRef};

use super::{DiskTask, Message, configuration};
use crate::control::decide::Local;
use crate::peer;
use crate::shard::messages::{Command, Notice};

impl DiskTask {
    pub(super) async fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::WantConfiguration { epoch, replicas, write_back, .. } => {
                self.want_configuration(epoch, &replicas, write_back).await;
            }
            Notice::WantPeer { node, exclude, .. } => self.want_peer(node, &exclude).await,
            Notice::Refused { epoch, .. } => {
                self.event(
                    "refused",
                    format!("a replica knows epoch {epoch}: {} is no longer the owner", self.me.node),
                );
                self.refresh().await;
            }
            Notice::Event { kind, text, .. } => self.event(kind, text),
        }
    }

    async fn want_configuration(&mut self, epoch: u64, replicas: &[String], write_back: bool) {
        let disk = self.name.clone();
        let answer = self.commit_configuration(epoch, replicas, write_back).await;
        match answer {
            Ok(record) => {
                self.local = Local::Open { epoch: record.epoch };
                self.node.here.insert(&record);
                let configuration = configuration(&record);
                self.event(
                    "configuration",
                    format!("{} in epoch {}{}", record.effective(), record.epoch, with(&record)),
                );
                self.send(Command::Configured { disk, configuration }).await;
            }
            Err(reason) => self.send(Command::NotConfigured { disk, reason }).await,
        }
    }

    async fn commit_configuration(
        &mut self,
        epoch: u64,
        replicas: &[String],
        write_back: bool,
    ) -> Result<DiskRecord, String> {
        let known = self.record().map(|record| record.replicas).unwrap_or_default();
        let process = |name: &String| {
            let kept = || known.iter().find(|replica| replica.node == *name);
            let process = self.connected.get(name).or_else(kept).cloned();
            process.ok_or_else(|| format!("{} has never been connected to {name}", self.me.node))
        };
        let replicas = replicas.iter().map(process).collect::<Result<Vec<_>, _>>()?;
        let mode = if write_back { Mode::WriteBack } else { Mode::WriteThrough };
        let me = self.me.clone();
        // A disk asks for write-through only once nothing is dirty any more.
        let compute =
            |record: &DiskRecord| ownership::change_replicas(record, &me, epoch, &replicas, mode, 0);
        self.change(compute).await.map_err(|error| error.to_string())
    }

    async fn want_peer(&mut self, node: Option<String>, exclude: &[String]) {
        let live = self.node.world.nodes.now();
        let record = self.record();
        if record.as_ref().is_none_or(|record| record.owner.as_ref() != Some(&self.me)) {
            // We are about to let go. A newer owner's record does not tell whether a replica of ours has started again: its
            // empty successor would vouch for writes that nobody who may take over has (P1).
            let (disk, reason) = (self.name.clone(), "another node owns the disk".to_owned());
            return self.send(Command::PeerUnavailable { disk, node: String::new(), reason }).await;
        }
        let chosen = match node {
            Some(name) => {
                let holder =
                    record.iter().flat_map(|record| &record.replicas).find(|replica| replica.node == name);
                match (live.get(&name), holder) {
                    (None, _) => Err((name.clone(), format!("{name} is down"))),
                    (Some(now), Some(holder)) if !counts(record.as_ref(), holder, now) => {
                        Err((name.clone(), format!("{name} has started again: its copy of the log is lost")))
                    }
                    (Some(now), _) => Ok(now.node_ref()),
                }
            }
            None => {
                let chosen = record.as_ref().map_or_else(Vec::new, |record| {
                    choose_replicas(record, &self.me.node, &[], exclude, &live)
                });
                chosen.into_iter().next().ok_or_else(|| (String::new(), "no other node is up".to_owned()))
            }
        };
        match chosen {
            Err((node, reason)) => {
                self.send(Command::PeerUnavailable { disk: self.name.clone(), node, reason }).await;
            }
            Ok(peer) => {
                if let Some(address) = live.get(&peer.node).map(|record| record.peer_address) {
                    self.connect(peer, address);
                }
            }
        }
    }

    fn connect(&self, peer: NodeRef, address: SocketAddr) {
        let greeting =
            peer::Greeting { disk: self.name.clone(), owner: self.me.node.clone(), replica: peer.clone() };
        let (deadline, outbox) = (self.node.config.peers.deadline.0, self.outbox.clone());
        tokio::spawn(async move {
            let connection = peer::connect(address, &greeting, deadline).await;
            if let Some(outbox) = outbox.upgrade() {
                let connection = connection.map_err(|error| error.to_string());
                let _ = outbox.send(Message::Peer { node: peer, connection }).await;
            }
        });
    }

    pub(super) async fn on_peer(&mut self, node: NodeRef, connection: Result<OwnedFd, String>) {
        let (disk, name) = (self.name.clone(), node.node.clone());
        match connection {
            Ok(fd) => {
                self.connected.insert(name.clone(), node);
                self.send(Command::PeerConnected { disk, node: name, fd }).await;
            }
            Err(reason) => self.send(Command::PeerUnavailable { disk, node: name, reason }).await,
        }
    }
}

/// Whether a node has the copy that is counted under `holder` still.
fn counts(record: Option<&DiskRecord>, holder: &NodeRef, now: &NodeRecord) -> bool {
    record.is_some_and(|record| record.counts(holder, &now.node_ref()))
}

fn with(record: &DiskRecord) -> String {
    let replicas: Vec<_> = record.replicas.iter().map(|replica| replica.node.as_str()).collect();
    if replicas.is_empty() { String::new() } else { format!(", replicated on {}", replicas.join(" and ")) }
}
