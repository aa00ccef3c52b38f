//! Clients of disks that other nodes own: their requests go to the owner, and its answers come back.
//!
//! After the handshake here, a connection to the owner's peer port takes the client's bytes as they are, and brings the answers. This node
//! answers nothing itself, keeps no request, and sends none twice: only the owner acknowledges (P1, P2). When the disk gets another
//! owner, the connection ends, with its last requests unanswered; the client connects again, here or to any other node.
//!
//! **What was sent here must not land late.** A client whose connection has ended sends its unanswered requests again, by another way, and
//! then others. Were its first ones served after that, old data would cover new (P4). So a connection to the owner ends before the client's
//! does: the owner closes it, or it is not the owner's any more, or it is reset, and a reset discards what the owner has not
//! received. The owner serves nothing of a connection that was reset ([`weir_export::nbd::Via::Forwarder`]). A reset does not cross a network
//! that was cut: there the owner has ended the connection by itself before this node does ([`OWNER_SILENT_AFTER`]).
//!
//! The bytes move on a thread of their own: neither the leases nor the shards wait for them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef};
use weir_export::nbd::AcceptedClient;
use weir_nbd::server::Session;

use super::relay::{has_left, left, or_left};
use super::stream::Stream;
use crate::control::Node;
use crate::control::decide::is_live;
use crate::control::forwarders::{MOST_OF_DISK, MOST_OF_NODE, OWNER_SILENT_AFTER};
use crate::peer::{Greeting, Purpose, WELCOME};
use crate::places::Places;
use crate::silent_hosts;
use crate::throttles::{FORWARDING_FAILED, FORWARDING_REFUSED};

/// Bytes that are on their way through this node, of each client and in each direction (P10).
const PIECE: usize = 64 << 10;

/// Longest time to reach the owner before the client is disconnected. The disk may be on its way to another one.
const REACHED: Duration = Duration::from_secs(10);

/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(100);

/// Time for a former owner to send the answers that it had kept, and to close the connection.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Time for a client to disconnect after its last answers.
const PARTING: Duration = Duration::from_secs(1);

/// All that a node forwards.
#[derive(Debug)]
pub struct Forwards {
    /// Always there, until the drop.
    runtime: Option<Runtime>,
    clients: Arc<Semaphore>,
    of_disk: Arc<Places>,
    /// The node stops: its clients are to go elsewhere.
    stops: watch::Sender<bool>,
}

impl Forwards {
    /// Starts the thread that moves the bytes.
    ///
    /// # Errors
    /// The system has no thread or descriptors left.
    pub fn start() -> io::Result<Forwards> {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("weir-forward").enable_all().build()?;
        Ok(Forwards {
            runtime: Some(runtime),
            clients: Arc::new(Semaphore::new(MOST_OF_NODE)),
            of_disk: Places::new(MOST_OF_DISK),
            stops: watch::Sender::new(false),
        })
    }

    /// The node stops: asks all clients to go elsewhere, and takes no more.
    pub fn stop(&self) {
        self.stops.send_replace(true);
    }

    /// Forwards the requests of a client until it, the owner or this node goes.
    pub fn take(&self, node: &Arc<Node>, client: AcceptedClient) {
        let Some(runtime) = &self.runtime else { return };
        let of_disk = self.of_disk.take(&client.session.export);
        let place = of_disk.zip(Arc::clone(&self.clients).try_acquire_owned().ok());
        let disk = client.session.export.clone();
        let Some(place) = place else {
            if let Some(left_out) = FORWARDING_REFUSED.pass(Nanos::now()) {
                let most = format!("{MOST_OF_DISK} of one disk, {MOST_OF_NODE} of this node");
                tracing::warn!(disk, left_out, most, "too many clients are forwarded: refusing one");
            }
            return;
        };
        // As its rights were checked: a later disk may get the name.
        let Some(id) = node.records.disk(&disk).map(|record| record.id) else { return };
        let (node, stops) = (Arc::clone(node), self.stops.subscribe());
        runtime.spawn(async move {
            let _held = (place, Counted::new(&node));
            match run(node, stops, client, id).await {
                Ok(why) => tracing::debug!(disk, why, "a forwarded client is disconnected"),
                Err(error) => {
                    if let Some(left_out) = FORWARDING_FAILED.pass(Nanos::now()) {
                        tracing::warn!(disk, %error, left_out, "a client cannot be forwarded");
                    }
                }
            }
        });
    }
}

impl Drop for Forwards {
    fn drop(&mut self) {
        // Without waiting: a task of another runtime may be the one that drops it.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Counts one client.
struct Counted(Arc<Node>);

impl Counted {
    fn new(node: &Arc<Node>) -> Counted {
        node.forwarded.fetch_add(1, Ordering::Relaxed);
        Counted(Arc::clone(node))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.forwarded.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The other process that answers this node's clients of a disk. `None`: it has no owner, or one that is gone; it is this node's; or it
/// is half an import, which nobody but the import may use.
pub fn owner_elsewhere(node: &Node, record: &DiskRecord) -> Option<NodeRef> {
    let owner = record.owner.clone()?;
    let is_there = owner.node != node.config.name && is_live(&node.records.nodes.now(), &owner);
    (is_there && record.importing == 0).then_some(owner)
}

/// Whether an owner takes clients that other nodes forward, as its record says: its nodes may be set differently.
pub fn takes_forwarded(node: &Node, owner: &NodeRef) -> bool {
    node.records.nodes.now().get(&owner.node).is_none_or(|record| record.forwards)
}

/// Why this node forwards nobody at present, as what follows its name. A client at its Unix socket (`is_near`) is on this host, and can
/// go nowhere else before the node stops.
pub fn reason_to_go(node: &Node, is_near: bool) -> Option<&'static str> {
    if !node.config.nbd.forward {
        return Some("has nbd.forward = false");
    }
    if node.here.is_stopping() {
        return Some("stops");
    }
    let is_barred = !is_near && node.barred().contains(&node.config.name);
    is_barred.then_some("is drained or quarantined, and its clients go to other nodes")
}

/// Serves one client of the disk of this identity. Returns why it was disconnected.
async fn run(
    node: Arc<Node>,
    stops: watch::Receiver<bool>,
    client: AcceptedClient,
    id: u64,
) -> io::Result<&'static str> {
    let AcceptedClient { stream, leftover, session, .. } = client;
    let client = Stream::new(stream)?;
    let socket = client.socket().try_clone_to_owned()?;
    let opened = Opened { node, session, id, is_near: matches!(client, Stream::Unix(_)) };
    match or_left(&socket, opened.reach()).await {
        None => Ok("it has gone"),
        Some(Err(error)) => Err(error),
        Some(Ok(Reached::There(owner, upstream))) => {
            let mut link = Link { opened: &opened, owner: &owner, socket, stops };
            Ok(link.forward(leftover, client, upstream).await)
        }
        Some(Ok(Reached::Here)) => {
            let (stream, session) = (client.into_stream()?, opened.session);
            super::attach(&opened.node, AcceptedClient { stream, leftover, session, via: None });
            Ok("its disk is here")
        }
    }
}

/// What a client has opened here.
struct Opened {
    node: Arc<Node>,
    session: Session,
    /// The identity of the disk: another disk may get the name, and the client may not open that one.
    id: u64,
    /// As [`reason_to_go`] has it.
    is_near: bool,
}

/// Who can take a client.
enum Reached {
    /// This node has the disk open by now.
    Here,
    /// The owner takes its requests on this connection.
    There(NodeRef, Stream),
}

/// The end of what a client sends.
enum Sent {
    /// The owner has got everything, and the end.
    All,
    /// The client's connection broke.
    ClientGone,
    /// The owner's connection broke. What it has answered may still come.
    OwnerGone,
}

/// The end of what an owner sends.
enum Answered {
    /// The client has got everything.
    All,
    /// The client takes nothing more.
    ClientGone,
}

impl Opened {
    /// The newest record of the disk that the client has opened.
    fn record(&self) -> Option<DiskRecord> {
        self.node.records.disk(&self.session.export).filter(|record| record.id == self.id)
    }

    /// Connects to the owner. Nothing of the client's is sent meanwhile, so this can be repeated.
    async fn reach(&self) -> io::Result<Reached> {
        let deadline = Instant::now() + REACHED;
        loop {
            let record = self.record().ok_or_else(|| io::Error::other("the disk was deleted"))?;
            if self.node.here.id(&self.session.export) == Some(self.id) {
                return Ok(Reached::Here);
            }
            if let Some(why) = reason_to_go(&self.node, self.is_near) {
                return Err(io::Error::other(format!("this node {why}")));
            }
            let error = match owner_elsewhere(&self.node, &record) {
                // The disk has moved since the handshake. The next one says why.
                Some(owner) if !takes_forwarded(&self.node, &owner) => {
                    return Err(io::Error::other(format!("{owner} has nbd.forward = false")));
                }
                Some(owner) => match timeout(self.node.config.peers.deadline.0, self.connect(&owner)).await {
                    Ok(Ok(upstream)) => return Ok(Reached::There(owner, upstream)),
                    Ok(Err(error)) => error,
                    Err(_) => io::Error::other(format!("{owner} does not answer")),
                },
                None => io::Error::other("no other node serves the disk"),
            };
            if Instant::now() >= deadline {
                return Err(error);
            }
            sleep(RETRY).await;
        }
    }

    /// A connection on which the owner takes the client's requests.
    async fn connect(&self, owner: &NodeRef) -> io::Result<Stream> {
        let address = self.node.records.nodes.now().get(&owner.node).map(|record| record.peer_address);
        let address = address.ok_or_else(|| io::Error::other("the owner is gone"))?;
        let greeting = Greeting {
            disk: self.session.export.clone(),
            owner: self.node.config.name.clone(),
            replica: owner.clone(),
            purpose: Purpose::client(&self.session, Some(self.id)),
        };
        let mut upstream = Stream::new(self.node.network.connect(address, &greeting).await?)?;
        // Whenever this process closes it, also when it is killed, nothing of what the owner lacks may still be sent.
        sockopt::set_socket_linger(upstream.socket(), Some(Duration::ZERO))?;
        silent_hosts::probe_when_idle(upstream.socket(), OWNER_SILENT_AFTER)?;
        let mut welcome = [0];
        match upstream.read_exact(&mut welcome).await {
            Ok(_) if welcome == [WELCOME] => Ok(upstream),
            Ok(_) => Err(io::Error::other(format!("{owner} says something else than welcome"))),
            Err(error) => Err(io::Error::other(format!("{owner} does not take the client: {error}"))),
        }
    }

    /// Ends when the record names another owner than `owner`, or none, or is another disk's. An owner that is only silent is waited for:
    /// it may have lost the registry, and serves its disks all the same (P12).
    async fn until_another_owner(&self, owner: &NodeRef) {
        let mut changes = self.node.records.changes_of(&self.session.export);
        while self.record().is_some_and(|record| record.owner.as_ref() == Some(owner)) {
            changes.next(&self.node.records).await;
        }
    }

    /// Ends when this node is drained or stops.
    async fn until_to_go(&self, stops: &mut watch::Receiver<bool>) {
        let mut changes = self.node.records.changes();
        while !*stops.borrow_and_update() && reason_to_go(&self.node, self.is_near).is_none() {
            tokio::select! {
                () = changes.next() => {}
                // Its sender goes with the runtime of this task.
                _ = stops.changed() => {}
            }
        }
    }
}

/// A client and the owner of its disk.
struct Link<'a> {
    opened: &'a Opened,
    owner: &'a NodeRef,
    /// A duplicate of the client's socket.
    socket: OwnedFd,
    stops: watch::Receiver<bool>,
}

impl Link<'_> {
    /// Moves bytes until an end is gone or has to go. Returns why.
    async fn forward(&mut self, leftover: Vec<u8>, client: Stream, upstream: Stream) -> &'static str {
        let (mut from_client, mut to_client) = split(client);
        let Ok(watched) = upstream.socket().try_clone_to_owned() else { return "no descriptors are left" };
        let (mut from_owner, mut to_owner) = split(upstream);
        let (ask, asked) = watch::channel(false);
        {
            let socket = &self.socket;
            let mut requests = pin!(send_requests(leftover, socket, &mut from_client, &mut to_owner, asked));
            let mut leaves = pin!(left(socket));
            let mut answers = pin!(send_answers(&mut from_owner, &mut to_client));
            let mut moves = pin!(self.opened.until_another_owner(self.owner));
            let mut goes = pin!(self.opened.until_to_go(&mut self.stops));
            let mut silent = pin!(until_silent(watched));
            let (mut sends, mut is_asked, mut deadline) = (true, false, None);
            loop {
                tokio::select! {
                    answered = &mut answers => match answered {
                        Answered::All => break,
                        Answered::ClientGone => return "it takes no answers",
                    },
                    // It may have repeated by another way what is still on its way here.
                    () = &mut leaves => return "it has gone",
                    sent = &mut requests, if sends => match sent {
                        Sent::ClientGone => return "it has gone",
                        Sent::All | Sent::OwnerGone => sends = false,
                    },
                    () = &mut moves, if deadline.is_none() => {
                        deadline = Some(Instant::now() + LAST_ANSWERS);
                        ask.send_replace(true);
                    }
                    // What the owner has got it answers, however long that takes: the client must not repeat it before.
                    () = &mut goes, if !is_asked => {
                        is_asked = true;
                        ask.send_replace(true);
                    }
                    () = &mut silent => return "its owner is silent",
                    () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                        return "its disk has another owner";
                    }
                }
            }
        }
        // Reset before the client's connection ends.
        drop((from_owner, to_owner));
        let parts = async {
            to_client.shutdown().await?;
            while from_client.read(&mut [0; 512]).await? > 0 {}
            io::Result::Ok(())
        };
        // Whoever does not read the end is disconnected all the same.
        let _ = timeout(PARTING, parts).await;
        "its owner has closed the connection"
    }
}

/// Ends when the owner's host has acknowledged nothing for too long.
async fn until_silent(owner: OwnedFd) {
    while !silent_hosts::is_silent(owner.as_fd(), OWNER_SILENT_AFTER) {
        sleep(silent_hosts::LOOK_EVERY).await;
    }
}

/// Sends what the client sends until it has sent everything or is `asked` to go, and then the end.
async fn send_requests(
    first: Vec<u8>,
    socket: &OwnedFd,
    client: &mut (impl AsyncRead + Unpin),
    owner: &mut (impl AsyncWrite + Unpin),
    mut asked: watch::Receiver<bool>,
) -> Sent {
    if has_left(socket) {
        return Sent::ClientGone;
    }
    if owner.write_all(&first).await.is_err() {
        return Sent::OwnerGone;
    }
    let mut piece = vec![0; PIECE];
    loop {
        let count = tokio::select! {
            biased;
            _ = asked.wait_for(|asked| *asked) => 0,
            count = client.read(&mut piece) => match count {
                Ok(count) => count,
                Err(_) => return Sent::ClientGone,
            },
        };
        if count == 0 {
            break;
        }
        // The kernel has kept its bytes while this process stood still.
        if has_left(socket) {
            return Sent::ClientGone;
        }
        // Also where there are always more bytes: others have their turn.
        tokio::task::consume_budget().await;
        if owner.write_all(&piece[..count]).await.is_err() {
            return Sent::OwnerGone;
        }
    }
    match owner.shutdown().await {
        Ok(()) => Sent::All,
        Err(_) => Sent::OwnerGone,
    }
}

/// Sends what the owner sends until it closes the connection.
async fn send_answers(
    owner: &mut (impl AsyncRead + Unpin),
    client: &mut (impl AsyncWrite + Unpin),
) -> Answered {
    let mut piece = vec![0; PIECE];
    loop {
        // A connection that breaks has brought what it will bring.
        let Ok(count @ 1..) = owner.read(&mut piece).await else { return Answered::All };
        tokio::task::consume_budget().await;
        if client.write_all(&piece[..count]).await.is_err() {
            return Answered::ClientGone;
        }
    }
}
