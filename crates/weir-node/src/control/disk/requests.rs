//! Requests of a disk on its shard, carried out: another configuration, a connection to a peer.

use std::net::SocketAddr;
use std::sync::Arc;

use weir_block::Stream;
use weir_cluster::node_state::Leaving;
use weir_cluster::ownership;
use weir_cluster::placement::{Live, choose_replicas};
use weir_cluster::records::{DiskRecord, Mode, NodeRef, Policy};

use super::handover::has_copies;
use super::{DiskTask, Message};
use crate::control::decide::Local;
use crate::peer;
use crate::shard::messages::{Command, Notice, WantedConfiguration};

impl DiskTask {
    pub(super) async fn on_notice(&mut self, notice: Notice) {
        match notice {
            // A disk asks for one at a time: an earlier one is of an earlier opening.
            Notice::WantConfiguration { wanted, .. } => self.postponed = Some(wanted),
            Notice::WantPeer { node, connected, exclude, .. } => {
                // Those that have refused, or were lost, are not among them any more.
                self.filled = connected.iter().cloned().collect();
                self.want_peer(node, &connected, &exclude).await;
            }
            Notice::Refused { epoch, .. } => {
                if !self.gives_disk_away() {
                    self.event(
                        "refused",
                        format!("a replica knows epoch {epoch}: {} is no longer the owner", self.me.node),
                    );
                }
                (self.refused, self.newly_refused) = (true, true);
            }
            Notice::Event { kind: "replica-lost", .. } if self.gives_disk_away() => {}
            Notice::Event { kind, text, .. } => self.event(kind, text),
            // The supervisor's.
            Notice::WantCoordinator { .. } | Notice::WantPath { .. } | Notice::Fenced { .. } => {}
        }
    }

    /// Whether this node hands the disk over, or has done so: the other nodes hear of that at the same time, and what they end for
    /// it is no news.
    fn gives_disk_away(&mut self) -> bool {
        self.holds_clients || self.record().is_none_or(|record| record.owner.as_ref() != Some(&self.me))
    }

    pub(super) async fn want_configuration(&mut self, wanted: &WantedConfiguration) {
        let disk = self.name.clone();
        // Its requests from before the close are void: a task that accepted one would take the disk for open, for ever (P9).
        let answer = match self.local {
            Local::Open { .. } => self.commit_configuration(wanted).await,
            Local::Closed => Err("the disk is not open here any more".to_owned()),
        };
        match answer {
            Ok(record) => {
                self.local = Local::Open { epoch: record.epoch };
                self.node.here.update(&record);
                let configuration = self.tell_configuration(&record);
                self.event(
                    "configuration",
                    format!("{} in epoch {}{}", record.effective(), record.epoch, with(&record)),
                );
                self.send(Command::Configured { disk, configuration }).await;
            }
            Err(reason) => {
                self.send(Command::NotConfigured { disk: disk.clone(), reason: reason.clone() }).await;
                // Otherwise it would propose the same again.
                for node in self.barred_newcomers(&wanted.replicas) {
                    let (disk, reason) = (disk.clone(), reason.clone());
                    self.send(Command::PeerUnavailable { disk, node, reason }).await;
                }
            }
        }
    }

    /// Those of `replicas` that are not in the set, and that have been drained or quarantined since they were chosen.
    fn barred_newcomers(&mut self, replicas: &[String]) -> Vec<String> {
        let (known, barred) = (self.record(), self.node.barred());
        let is_new = |node: &&String| {
            known.as_ref().is_none_or(|record| record.replicas.iter().all(|replica| replica.node != **node))
        };
        replicas.iter().filter(|node| barred.contains(*node)).filter(is_new).cloned().collect()
    }

    async fn commit_configuration(&mut self, wanted: &WantedConfiguration) -> Result<DiskRecord, String> {
        let WantedConfiguration { epoch, ref replicas, write_back, wanted_replicas } = *wanted;
        let known = self.record().map(|record| record.replicas).unwrap_or_default();
        let process = |name: &String| {
            let kept = || known.iter().find(|replica| replica.node == *name);
            let process = self.connected.get(name).or_else(kept).cloned();
            process.ok_or_else(|| format!("{} has never been connected to {name}", self.me.node))
        };
        let replicas = replicas.iter().map(process).collect::<Result<Vec<_>, _>>()?;
        let mode = if write_back { Mode::WriteBack } else { Mode::WriteThrough };
        let me = self.me.clone();
        // A disk without copies was to go to write-through for a move, and has got copies meanwhile: it moves with them.
        let keeps = |record: &DiskRecord| {
            !write_back
                && wanted_replicas.is_none()
                && record.policy != Policy::WriteThrough
                && has_copies(record)
        };
        // A disk asks for write-through only once nothing is dirty any more.
        let node = Arc::clone(&self.node);
        let compute = |record: &DiskRecord| {
            let barred = node.barred();
            let is_member = |node: &str| record.replicas.iter().any(|replica| replica.node == node);
            let newcomers = replicas.iter().map(|replica| &*replica.node).filter(|node| !is_member(node));
            // First: a disk of another node's is refused for that reason, which ends the right to serve it (P2).
            let changed = ownership::change_replicas(record, &me, epoch, &replicas, mode, 0)?;
            let barred = newcomers.into_iter().find(|node| barred.contains(*node));
            let reason = match barred {
                Some(node) => format!("node {node} takes no disks any more"),
                None if keeps(record) => "the disk has copies again, and its policy is write-back".to_owned(),
                None => return Ok(changed),
            };
            Err(ownership::Refusal::BadReplicas { reason })
        };
        self.change(compute).await.map_err(|error| error.to_string())
    }

    async fn want_peer(&mut self, node: Option<String>, connected: &[String], exclude: &[String]) {
        let live = self.node.records.nodes.now();
        let exclude: Vec<String> = exclude.iter().cloned().chain(self.node.barred()).collect();
        // Those that are to leave fill no place that the policy has.
        let Leaving { replaced, dropped } = &self.told_leaving;
        let stays = |node: &&String| !replaced.contains(node) && !dropped.contains(node);
        let staying: Vec<String> = connected.iter().filter(stays).cloned().collect();
        match answer(self.record().as_ref(), &self.me, node, &staying, &exclude, &live) {
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
        let greeting = peer::Greeting {
            disk: self.name.clone(),
            owner: self.me.node.clone(),
            replica: peer.clone(),
            purpose: peer::Purpose::Replicate,
        };
        let (deadline, outbox) = (self.node.config.peers.deadline.0, self.outbox.clone());
        let node = Arc::clone(&self.node);
        weir_task::spawn(async move {
            let connecting = weir_task::timeout(deadline, node.network.connect(address, &greeting));
            let connection = match connecting.await {
                Ok(connection) => connection.map_err(|error| error.to_string()),
                Err(_) => Err(format!("no connection to {address} within {deadline:?}")),
            };
            if let Some(outbox) = outbox.upgrade() {
                let _ = outbox.send(Message::Peer { node: peer, connection }).await;
            }
        });
    }

    pub(super) async fn on_peer(&mut self, node: NodeRef, connection: Result<Stream, String>) {
        let (disk, name) = (self.name.clone(), node.node.clone());
        match connection {
            Ok(stream) => {
                self.connected.insert(name.clone(), node);
                self.filled.insert(name.clone());
                self.send(Command::PeerConnected { disk, node: name, stream }).await;
            }
            Err(reason) => {
                self.filled.remove(&name);
                self.send(Command::PeerUnavailable { disk, node: name, reason }).await;
            }
        }
    }
}

/// The peer for an owner that wants one: `node`, or the node that goes best with those that are `connected`. Otherwise the
/// unavailable node (an empty name: no node at all) and the reason.
fn answer(
    record: Option<&DiskRecord>,
    me: &NodeRef,
    node: Option<String>,
    connected: &[String],
    exclude: &[String],
    live: &Live,
) -> Result<NodeRef, (String, String)> {
    let Some(record) = record.filter(|record| record.owner.as_ref() == Some(me)) else {
        // The disk is about to be released. A newer owner's record does not tell whether a replica of ours has restarted: its
        // empty successor would confirm writes that no node which may take over has (P1).
        return Err((String::new(), "another node owns the disk".to_owned()));
    };
    let Some(name) = node else {
        let chosen = choose_replicas(record, &me.node, connected, exclude, live);
        return chosen.into_iter().next().ok_or_else(|| {
            let (policy, medium) = (record.policy, record.medium);
            (String::new(), format!("no other node that {policy} could use is up and has room on {medium}"))
        });
    };
    let holder = record.replicas.iter().find(|replica| replica.node == name);
    match (live.get(&name), holder) {
        (None, _) => Err((name.clone(), format!("{name} is down"))),
        (Some(now), Some(holder)) if !record.counts(holder, &now.node_ref()) => {
            Err((name.clone(), format!("{name} has started again: its copy of the log is lost")))
        }
        (Some(now), _) => Ok(now.node_ref()),
    }
}

fn with(record: &DiskRecord) -> String {
    let replicas: Vec<_> = record.replicas.iter().map(|replica| replica.node.as_str()).collect();
    if replicas.is_empty() { String::new() } else { format!(", replicated on {}", replicas.join(" and ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_cluster::records::{NodeRecord, Policy, Source};

    fn live(nodes: &[(&str, u64, &str)]) -> Live {
        let record = |(name, incarnation, domain): &(&str, u64, &str)| NodeRecord {
            name: (*name).into(),
            incarnation: *incarnation,
            flash: None,
            peer_address: ([127, 0, 0, 1], 1).into(),
            nbd_tcp: None,
            nbd_tls: None,
            nbd_unix: "/a".into(),
            api: "/b".into(),
            fault_domain: (*domain).into(),
            media: Vec::new(),
            load: 0,
            forwards: true,
        };
        nodes.iter().map(|node| (node.0.to_owned(), record(node))).collect()
    }

    fn disk(owner: &str, replica: &str, policy: &str) -> DiskRecord {
        let source = Source::File { name: "d".into() };
        let policy: Policy = policy.parse().unwrap();
        let mut record = DiskRecord::new("d", "v", source, 1 << 20, 512, policy);
        (record.owner, record.epoch, record.mode) = (Some(NodeRef::new(owner, 1)), 2, Mode::WriteBack);
        record.replicas = vec![NodeRef::new(replica, 1)];
        record
    }

    #[test]
    fn only_the_owner_of_the_record_gets_a_peer() {
        let (me, live) = (NodeRef::new("a", 1), live(&[("a", 1, "r1"), ("b", 1, "r2"), ("c", 1, "r2")]));
        let ask = |record: Option<&DiskRecord>, node: Option<&str>| {
            answer(record, &me, node.map(str::to_owned), &[], &[], &live)
        };
        let mine = disk("a", "b", "write-back+1");
        assert_eq!(ask(Some(&mine), Some("b")), Ok(NodeRef::new("b", 1)));
        assert!(ask(Some(&mine), None).is_ok());
        let others = disk("c", "b", "write-back+1");
        let same_node = DiskRecord { owner: Some(NodeRef::new("a", 2)), ..mine };
        for record in [Some(&others), Some(&same_node), None] {
            for node in [Some("b"), None] {
                let (nobody, reason) = ask(record, node).unwrap_err();
                assert!(nobody.is_empty() && reason.contains("another node owns"), "{reason}");
            }
        }
    }

    #[test]
    fn a_member_is_asked_for_by_its_process_and_another_by_its_kind() {
        let live = live(&[("a", 1, "r1"), ("b", 2, "r1"), ("c", 1, "r2"), ("d", 1, "r1")]);
        let (me, record) = (NodeRef::new("a", 1), disk("a", "b", "write-back+1in+1out"));
        let ask = |node: Option<&str>, connected: &[&str]| {
            let connected: Vec<String> = connected.iter().map(|name| (*name).to_owned()).collect();
            answer(Some(&record), &me, node.map(str::to_owned), &connected, &["b".to_owned()], &live)
        };
        let (node, reason) = ask(Some("b"), &[]).unwrap_err();
        assert!(node == "b" && reason.contains("started again"), "{reason}");
        assert_eq!(ask(Some("x"), &[]).unwrap_err().0, "x");
        assert_eq!(ask(None, &["c"]), Ok(NodeRef::new("d", 1)), "one inside is missing");
        assert_eq!(ask(None, &["d"]), Ok(NodeRef::new("c", 1)), "one outside is missing");
        let (nobody, reason) = ask(None, &["c", "d"]).unwrap_err();
        assert!(nobody.is_empty() && reason.contains("write-back+1in+1out"), "{reason}");
    }
}
