//! The port where the other nodes connect.
//!
//! A connection is accepted at once, whatever others do: a silent one delays nobody. There is a limit to handshakes under way, and
//! to greeted nodes whose record is being read; beyond it, the longest silent one of the host or node ends that has most of them
//! ([`Handshakes`]).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use weir_block::Nanos;
use weir_export::handshakes::{Handshakes, Heard, Origin};
use weir_export::nbd::keep_alive;

use crate::control::{Node, grants};
use crate::network::Encrypted;
use crate::peer::Incoming;
use crate::places::Places;
use crate::plane;
use crate::refusal::{Refusal, Why};
use crate::throttles::turned_away;

/// Connections at once from which nothing has come yet (P10).
const SILENT: usize = 128;

/// Handshakes and greetings under way at once (P10). When a node has restarted, all owners with copies there connect at once.
const HANDSHAKES: usize = 1024;

/// Time until something comes. Both ends are processes that wait for nothing else.
const SILENT_DEADLINE: Duration = Duration::from_secs(1);

/// Time for a handshake and a greeting, together; who takes longer connects again.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Greeted connections at once that are not with their shard yet (P10).
const ADMISSIONS: usize = 1024;

/// Time from the greeting until the connection is with its shard: the registry may be asked.
const ADMISSION_DEADLINE: Duration = Duration::from_secs(5);

/// Pause after the process has run out of descriptors or memory, before the next connection is accepted.
const BREATHER: Duration = Duration::from_millis(100);

/// The state that all connections share.
struct Door {
    node: Arc<Node>,
    grants: Arc<Places>,
    /// By the name of the node that has connected.
    admissions: Mutex<Handshakes<String>>,
}

/// Takes connections of other nodes until dropped; what is under way then ends.
pub async fn peers(listener: TcpListener, node: Arc<Node>) {
    let admissions = Mutex::new(Handshakes::new(ADMISSIONS));
    let door = Arc::new(Door { node, grants: grants::places(), admissions });
    let mut handshakes = Handshakes::with_room(SILENT, HANDSHAKES);
    loop {
        match listener.accept().await {
            // One that is gone already.
            Ok((stream, _)) if keep_alive(&stream).is_err() => {}
            Ok((stream, from)) => {
                let next = Arc::clone(&door);
                let ended = handshakes.start(Origin::of(from.ip()), |heard| async move {
                    let from = from.to_string();
                    let shaken = next.shake_hands(stream, &from, heard);
                    match tokio::time::timeout(HANDSHAKE_DEADLINE, shaken).await {
                        Ok(Ok(())) => {}
                        Ok(Err(refusal)) => next.tell(&from, &refusal),
                        Err(_) => next.tell(&from, &Refusal::new(Why::Silent, "it did not greet in time")),
                    }
                });
                door.tell_ended(ended, "too many of its host's shake hands at once");
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a peer");
                tokio::time::sleep(BREATHER).await;
            }
        }
    }
}

impl Door {
    /// The handshake, if this node has an identity, and the greeting. What follows has a time and a place of its own.
    async fn shake_hands(
        self: &Arc<Door>,
        stream: TcpStream,
        from: &str,
        heard: Heard,
    ) -> Result<(), Refusal> {
        let speaks = tokio::time::timeout(SILENT_DEADLINE, stream.readable()).await;
        speaks
            .map_err(|_| Refusal::new(Why::Silent, "it said nothing"))?
            .map_err(|error| Refusal::new(Why::Misgreeted, error))?;
        heard.note();
        let Some(identity) = &self.node.identity else { return self.hear(stream, None, from).await };
        let unproven = |reason: String| Refusal::new(Why::Unproven, reason);
        let link = Encrypted::accept(identity, stream).await.map_err(unproven)?;
        let proven = link.node().map_err(|error| unproven(error.to_string()))?.to_owned();
        self.hear(link, Some(&proven), from).await
    }

    async fn hear(
        self: &Arc<Door>,
        mut stream: impl Incoming,
        proven: Option<&str>,
        from: &str,
    ) -> Result<(), Refusal> {
        let greeting = plane::hear(&mut stream, &self.node, proven).await?;
        let (door, from) = (Arc::clone(self), format!("{} at {from}", greeting.owner));
        let owner = greeting.owner.clone();
        let admission = |_heard| async move {
            let admitted = plane::admit(stream, greeting, &door.node, &door.grants);
            match tokio::time::timeout(ADMISSION_DEADLINE, admitted).await {
                Ok(Ok(())) => {}
                Ok(Err(refusal)) => door.tell(&from, &refusal),
                Err(_) => {
                    door.tell(&from, &Refusal::new(Why::NoRoom, "its record could not be read in time"))
                }
            }
        };
        let ended = {
            let mut admissions = self.admissions.lock().unwrap_or_else(PoisonError::into_inner);
            admissions.start(owner, admission)
        };
        self.tell_ended(ended, "too many of its connections wait for the registry at once");
        Ok(())
    }

    /// A connection from `origin` was ended for a newer one.
    fn tell_ended(&self, origin: Option<impl ToString>, reason: &str) {
        if let Some(origin) = origin {
            self.tell(&origin.to_string(), &Refusal::new(Why::NoRoom, reason));
        }
    }

    fn tell(&self, from: &str, refusal: &Refusal) {
        let (log, event) = turned_away(refusal.why);
        if let Some(left_out) = log.pass(Nanos::now()) {
            tracing::warn!(from, reason = refusal.reason, left_out, "a peer was turned away");
        }
        // Rarely: events of an attacker must not displace others.
        if self.node.identity.is_some() && event.pass(Nanos::now()).is_some() {
            let text = format!("a connection from {from} was turned away: {}", refusal.reason);
            self.node.journal.tell("peer-refused", &self.node.config.name, text);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use weir_cluster::records::{MemberRecord, Mode, NodeRef, Record, keys};

    use super::*;
    use crate::control::disk::tests::{SOON, disk_of_a, node};
    use crate::control::rights::wire::{Answer, Ask, Question};
    use crate::peer::{Greeting, Purpose};

    /// More silent connections than there is room for, which come again as fast as they end.
    #[tokio::test]
    async fn silent_connections_delay_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let b = MemberRecord { name: "b".into(), fault_domain: "default".into(), down_since_unix_ms: None };
        node.registry.transact(b.create(keys::member("b"))).await.unwrap();
        node.records.members.changes().wait_for(|known| known.contains_key("b")).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let port = tokio::spawn(peers(listener, node));
        let mut silent = Vec::new();
        for _ in 0..3 * SILENT {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let replica = NodeRef::new("a", 1);
        let greeting = Greeting { disk: String::new(), owner: "b".into(), replica, purpose: Purpose::Grants };
        let question = Question { number: 1, ask: Ask::Heard, disks: vec![("d".into(), 1)] };
        let start = Nanos::now();
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&[greeting.encode(), question.encode()].concat()).await.unwrap();
        let answer = tokio::time::timeout(SOON, Answer::read(&mut stream)).await.unwrap().unwrap();
        let took = Nanos::now() - start;
        assert_eq!(answer.number, 1);
        assert!(took < SILENT_DEADLINE, "{took:?}: it waited for those that say nothing");
        // All of them end, by their deadline at the latest.
        for mut one in silent {
            let ended = tokio::time::timeout(SOON, one.read(&mut [0])).await.expect("it ends");
            assert!(matches!(ended, Ok(0) | Err(_)));
        }
        port.abort();
    }

    /// A node has restarted, and an owner with many disks greets it for all of them at once.
    #[tokio::test]
    async fn a_burst_of_greetings_is_taken_whole() {
        const BURST: usize = 400;
        let directory = tempfile::tempdir().unwrap();
        let (node, mut told) = node(directory.path()).await;
        disk_of_a(&node, |record| {
            (record.owner, record.mode) = (Some(NodeRef::new("b", 1)), Mode::WriteBack);
            record.replicas = vec![NodeRef::new("a", 1)];
        })
        .await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let port = tokio::spawn(peers(listener, node));
        let replica = NodeRef::new("a", 1);
        let greeting = Greeting { disk: "d".into(), owner: "b".into(), replica, purpose: Purpose::Replicate };
        let greeting = greeting.encode();
        let (first, rest) = greeting.split_at(10);
        let mut burst = Vec::new();
        for _ in 0..BURST {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(first).await.unwrap();
            burst.push(stream);
        }
        for stream in &mut burst {
            stream.write_all(rest).await.unwrap();
        }
        let mut taken = 0;
        while taken < BURST {
            let command = tokio::time::timeout(SOON, told.recv()).await.expect("one was ended").unwrap();
            taken += usize::from(command.starts_with("Replicate"));
        }
        port.abort();
    }
}
