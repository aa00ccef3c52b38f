//! A client that is here before its disk is: the guest's new home in a live migration.
//!
//! QEMU opens the disk on the target while the guest still runs on the source, reads a little (a first sector, for the disk's
//! geometry), and writes once the source has stopped. So the owner answers reads, and the first request that changes data
//! moves the disk here; it waits meanwhile, and is then the first that this node serves. Nothing before it can move the disk,
//! so a target that only reads cannot take it away from a guest that writes.
//!
//! One request at a time: there are few of them, and no running guest waits for one.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod clients;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, SemaphorePermit};
use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef};
use weir_export::nbd::AcceptedClient;
use weir_nbd::protocol::{
    ChunkHeader, EXTENDED_REPLY_MAGIC, ExtendedReply, LARGEST_PAYLOAD, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, SimpleReply, command, reply_flag,
};
use weir_nbd::server::{RequestHead, STATUS_BYTES, Session, WrongMagic};
use zerocopy::FromBytes;

use super::stream::Stream;
use crate::api::Move;
use crate::control::Node;
use crate::operations::Operations;
use crate::peer::{Duplex, Greeting, Purpose};
use crate::places::Places;
use crate::throttles::FOLLOWER_REFUSED;

/// Clients that wait for their disk on one node; further ones are turned away (P10).
const MOST_RELAYS: usize = 256;

/// Those of one disk: the clients of one guest must not take the places of all others. QEMU has a few connections (P10).
const MOST_OF_DISK: usize = 32;

/// Large replies that are held in memory at once, on one node. Each has at most the largest payload of the protocol (P10).
const LARGE_REPLIES: usize = 4;

/// A reply up to this size is not large: there is room for one of each client. Guests' firmware and QEMU read no more at a time.
const SMALL_REPLY: usize = 256 << 10;

/// Longest time in which a client takes a reply. Whoever reads nothing would otherwise keep its place from all others.
const TAKES_REPLY: Duration = Duration::from_secs(10);

/// Longest time in which an owner sends a reply that it has begun. One that stalls would otherwise keep a large reply's place.
const SENDS_REPLY: Duration = Duration::from_secs(10);

/// Pause before the next request to the owner, after it did not answer or the disk could not be moved.
const RETRY: Duration = Duration::from_millis(100);

/// Pause between two looks at whether the client has gone.
const LOOK: Duration = Duration::from_millis(100);

/// Room in a reply for what is no data: errors with their texts.
const NO_DATA: usize = 16 << 10;

/// Longest time without an owner before a disk counts as closed.
const ON_ITS_WAY: Duration = Duration::from_secs(10);

/// Most bytes received ahead of the processed ones.
const AHEAD: usize = 4096;

/// The limits of all relays of a node.
#[derive(Debug)]
pub struct Relays {
    clients: Arc<Semaphore>,
    of_disk: Arc<Places>,
    large_replies: Semaphore,
}

impl Default for Relays {
    fn default() -> Relays {
        Relays {
            clients: Arc::new(Semaphore::new(MOST_RELAYS)),
            of_disk: Places::new(MOST_OF_DISK),
            large_replies: Semaphore::new(LARGE_REPLIES),
        }
    }
}

/// Whether clients on this node may use a disk that another node owns.
pub fn may_follow(record: &DiskRecord, me: &NodeRef) -> bool {
    record.follower.as_ref() == Some(me)
}

/// Serves a client until its disk is here, then hands it to the disk's shard.
pub fn start(node: Arc<Node>, operations: Operations, relays: &Arc<Relays>, client: AcceptedClient) {
    let of_disk = relays.of_disk.take(&client.session.export);
    let place = of_disk.zip(Arc::clone(&relays.clients).try_acquire_owned().ok());
    let Some(place) = place else {
        if let Some(left_out) = FOLLOWER_REFUSED.pass(Nanos::now()) {
            let disk = client.session.export;
            tracing::warn!(disk, left_out, "too many clients wait for disks of other nodes");
        }
        return;
    };
    let relays = Arc::clone(relays);
    tokio::spawn(async move {
        let _place = place;
        let disk = client.session.export.clone();
        match Relay::new(node, operations, client) {
            Ok(relay) => {
                if let Err(error) = relay.run(&relays).await {
                    tracing::debug!(disk, %error, "a client that waited for its disk is disconnected");
                }
            }
            Err(error) => tracing::warn!(disk, %error, "a client cannot be served"),
        }
    });
}

struct Relay {
    node: Arc<Node>,
    operations: Operations,
    me: NodeRef,
    stream: Stream,
    /// The socket of `stream`.
    socket: Arc<OwnedFd>,
    /// Received bytes that are not processed yet.
    received: Vec<u8>,
    session: Session,
    /// The identity of the disk that the client has opened: another disk may get the name, and the client may not open that one.
    disk: u64,
    owner: Option<(NodeRef, Box<dyn Duplex>)>,
}

/// The disk's place, as far as a client that waits for it may know.
enum Whereabouts {
    /// Open on this node.
    Here,
    /// Owned by this process, which this node follows.
    Followed(NodeRef),
    /// Being opened here, or without an owner: a disk in write-through is, for a moment, when it moves.
    OnItsWay,
    /// Not where this node's clients may go.
    Elsewhere,
}

/// The next state of a client.
enum Next {
    /// It has gone, or may not be served here any more.
    End,
    /// The disk is here.
    Here,
}

impl Relay {
    fn new(node: Arc<Node>, operations: Operations, client: AcceptedClient) -> io::Result<Relay> {
        let AcceptedClient { stream, leftover, session, .. } = client;
        let record = node.records.disk(&session.export);
        let disk = record.ok_or_else(|| io::Error::other("the disk was deleted"))?.id;
        let (me, stream) = (node.session.node_ref(), Stream::new(stream)?);
        let socket = Arc::new(stream.socket().try_clone_to_owned()?);
        Ok(Relay { node, operations, me, stream, socket, received: leftover, session, disk, owner: None })
    }

    async fn run(mut self, relays: &Relays) -> io::Result<()> {
        match self.relay(relays).await? {
            Next::End => drop(self.stream.shutdown().await),
            Next::Here => {
                let (stream, leftover) = (self.stream.into_stream()?, self.received);
                let client = AcceptedClient { stream, leftover, session: self.session, via: None };
                super::attach(&self.node, client);
            }
        }
        Ok(())
    }

    async fn relay(&mut self, relays: &Relays) -> io::Result<Next> {
        loop {
            let Some(header) = self.next_request().await? else { return Ok(Next::End) };
            let changes = match header.command {
                // Also what carries data that it should not: the shard knows what to do with it.
                _ if header.payload > 0 => true,
                command::READ | command::FLUSH | command::CACHE | command::BLOCK_STATUS => false,
                command::DISC => return Ok(Next::End),
                // Also what is not known: the shard answers it.
                _ => true,
            };
            if changes || self.is_here() {
                // A disk does not move for a client that has gone.
                return Ok(or_left(&self.socket.clone(), self.move_here()).await.unwrap_or(Next::End));
            }
            // Processed once it is answered: should the disk come here before, the shard answers it.
            let asked = or_left(&self.socket.clone(), self.ask_owner(&header, relays)).await;
            match asked.unwrap_or(Err(Next::End)) {
                Ok((reply, _place)) => {
                    self.received.drain(..self.header_size());
                    self.send(&reply).await?;
                }
                Err(next) => return Ok(next),
            }
        }
    }

    /// The request that is next, left where it is; `None` when the client or the disk has gone.
    async fn next_request(&mut self) -> io::Result<Option<RequestHead>> {
        let mut disks = self.node.records.disks.changes();
        loop {
            disks.mark_unchanged();
            if self.record().is_none() {
                return Ok(None);
            }
            let read = RequestHead::read(&self.received, self.session.extended_headers);
            let read = read.map_err(|WrongMagic(_)| wrong("a request without its magic"))?;
            if let Some((head, _)) = read {
                return Ok(Some(head));
            }
            tokio::select! {
                received = self.receive() => if received? == 0 {
                    return Ok(None);
                },
                changed = disks.changed() => if changed.is_err() {
                    return Ok(None);
                },
            }
        }
    }

    /// The newest record of the disk that the client has opened; `None` if that is gone, also if another one has its name.
    fn record(&self) -> Option<DiskRecord> {
        self.node.records.disk(&self.session.export).filter(|record| record.id == self.disk)
    }

    fn header_size(&self) -> usize {
        RequestHead::size(self.session.extended_headers)
    }

    fn is_here(&self) -> bool {
        self.record().is_some() && self.node.here.id(&self.session.export) == Some(self.disk)
    }

    fn whereabouts(&self) -> Whereabouts {
        let Some(record) = self.record() else {
            return Whereabouts::Elsewhere;
        };
        if self.is_here() {
            return Whereabouts::Here;
        }
        let follows = may_follow(&record, &self.me);
        match record.owner {
            Some(owner) if follows => Whereabouts::Followed(owner),
            Some(owner) if owner != self.me => Whereabouts::Elsewhere,
            _ => Whereabouts::OnItsWay,
        }
    }

    /// Waits while the disk is on its way, but not for one that was closed instead.
    async fn settled(&mut self) -> Whereabouts {
        let mut changes = self.node.records.changes();
        let deadline = tokio::time::Instant::now() + ON_ITS_WAY;
        loop {
            match self.whereabouts() {
                Whereabouts::OnItsWay if tokio::time::Instant::now() < deadline => {
                    // Changes of open disks do not wake this wait.
                    let _ = tokio::time::timeout(RETRY, changes.next()).await;
                }
                Whereabouts::OnItsWay => return Whereabouts::Elsewhere,
                known => return known,
            }
        }
    }

    /// Has the disk moved here, for as long as this node follows it (P9).
    async fn move_here(&mut self) -> Next {
        let disk = self.session.export.clone();
        let mut told = false;
        self.owner = None;
        loop {
            match self.settled().await {
                Whereabouts::Here => return Next::Here,
                Whereabouts::Elsewhere | Whereabouts::OnItsWay => return Next::End,
                Whereabouts::Followed(_) => {}
            }
            let wanted = Move { to: self.me.node.clone(), as_follower: true };
            if let Err(error) = self.operations.move_disk(&disk, wanted).await {
                // The first time only: it is tried again for as long as this node follows the disk.
                if !std::mem::replace(&mut told, true) {
                    tracing::info!(disk, %error, "cannot have the disk moved here yet");
                }
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    /// The owner's whole reply, also if the owner changes meanwhile, and its place if it is large.
    async fn ask_owner<'a>(
        &mut self,
        header: &RequestHead,
        relays: &'a Relays,
    ) -> Result<(Vec<u8>, Option<SemaphorePermit<'a>>), Next> {
        loop {
            let owner = match self.settled().await {
                Whereabouts::Here => return Err(Next::Here),
                Whereabouts::Elsewhere | Whereabouts::OnItsWay => return Err(Next::End),
                Whereabouts::Followed(owner) => owner,
            };
            let mut changes = self.node.records.changes();
            let answered = tokio::select! {
                answered = self.exchange(&owner, header, relays) => answered,
                // The disk may have another owner by now, and the former one may never answer.
                () = changes.next() => Err(io::Error::other("the cluster has changed")),
            };
            match answered {
                Ok(reply) => return Ok(reply),
                Err(error) => {
                    tracing::debug!(disk = self.session.export, %owner, %error, "the owner is asked again");
                    self.owner = None;
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn exchange<'a>(
        &mut self,
        owner: &NodeRef,
        header: &RequestHead,
        relays: &'a Relays,
    ) -> io::Result<(Vec<u8>, Option<SemaphorePermit<'a>>)> {
        let mut stream = match self.owner.take() {
            Some((known, stream)) if known == *owner => stream,
            _ => self.connect(owner).await?,
        };
        stream.write_all(&self.received[..self.header_size()]).await?;
        stream.flush().await?;
        // Taken when there is a reply: an owner that does not answer keeps no place from the clients of others.
        let mut start = [0; size_of::<SimpleReply>()];
        stream.read_exact(&mut start).await?;
        let place = match longest_reply(header) > SMALL_REPLY {
            true => Some(relays.large_replies.acquire().await.map_err(io::Error::other)?),
            false => None,
        };
        let mut whole = (&start[..]).chain(&mut stream);
        let reply = tokio::time::timeout(SENDS_REPLY, read_reply(&mut whole, header)).await??;
        self.owner = Some((owner.clone(), stream));
        Ok((reply, place))
    }

    async fn connect(&mut self, owner: &NodeRef) -> io::Result<Box<dyn Duplex>> {
        let address = self.node.records.nodes.now().get(&owner.node).map(|record| record.peer_address);
        let address = address.ok_or_else(|| io::Error::other("the owner is gone"))?;
        let greeting = Greeting {
            disk: self.session.export.clone(),
            owner: self.me.node.clone(),
            replica: owner.clone(),
            purpose: Purpose::client(&self.session, None),
        };
        let open = self.node.network.open(address, &greeting);
        tokio::time::timeout(self.node.config.peers.deadline.0, open).await?
    }

    async fn receive(&mut self) -> io::Result<usize> {
        let mut bytes = [0; AHEAD];
        let count = self.stream.read(&mut bytes).await?;
        self.received.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        tokio::time::timeout(TAKES_REPLY, self.stream.write_all(bytes)).await?
    }
}

/// Does `work` unless the client at the other end of `socket` has gone, or goes meanwhile: `None`.
pub(super) async fn or_left<T>(socket: &OwnedFd, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = left(socket) => None,
        done = work => Some(done),
    }
}

/// Ends when the client has gone. Asks the kernel instead of reading: the end may be behind requests that nobody takes yet.
pub(super) async fn left(socket: &OwnedFd) {
    while !has_left(socket) {
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether the client has gone.
pub(super) fn has_left(socket: &OwnedFd) -> bool {
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut poll = [PollFd::new(socket, gone)];
    rustix::event::poll(&mut poll, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Most bytes of a reply: the data, in as many chunks as there may be blocks of 4 KiB.
fn longest_reply(request: &RequestHead) -> usize {
    let data = match request.command {
        command::READ => request.length.min(LARGEST_PAYLOAD.into()) as usize,
        command::BLOCK_STATUS => STATUS_BYTES,
        _ => 0,
    };
    data + (data / 4096 + 2) * 64 + NO_DATA
}

/// One whole reply, as it is on the wire: a simple one, or chunks up to the one that is marked as the last.
async fn read_reply(stream: &mut (impl AsyncRead + Unpin), request: &RequestHead) -> io::Result<Vec<u8>> {
    let most = longest_reply(request);
    let mut reply = Vec::new();
    loop {
        let start = reply.len();
        let mut extend = async |reply: &mut Vec<u8>, length: usize| extend(stream, reply, length, most).await;
        extend(&mut reply, size_of::<SimpleReply>()).await?;
        let (simple, _) =
            SimpleReply::read_from_prefix(&reply[start..]).map_err(|_| wrong("half a reply"))?;
        match simple.magic.get() {
            SIMPLE_REPLY_MAGIC => {
                if simple.cookie.get() != request.cookie {
                    return Err(wrong("a reply to another request"));
                }
                let has_data = simple.error.get() == 0 && request.command == command::READ;
                let length = if has_data { request.length as usize } else { 0 };
                extend(&mut reply, length).await?;
                return Ok(reply);
            }
            STRUCTURED_REPLY_MAGIC => {
                extend(&mut reply, size_of::<ChunkHeader>() - size_of::<SimpleReply>()).await?;
                let (chunk, _) =
                    ChunkHeader::read_from_prefix(&reply[start..]).map_err(|_| wrong("half a chunk"))?;
                if chunk.cookie.get() != request.cookie {
                    return Err(wrong("a reply to another request"));
                }
                extend(&mut reply, chunk.length.get() as usize).await?;
                if chunk.flags.get() & reply_flag::DONE != 0 {
                    return Ok(reply);
                }
            }
            EXTENDED_REPLY_MAGIC => {
                extend(&mut reply, size_of::<ExtendedReply>() - size_of::<SimpleReply>()).await?;
                let (chunk, _) =
                    ExtendedReply::read_from_prefix(&reply[start..]).map_err(|_| wrong("half a chunk"))?;
                if chunk.cookie.get() != request.cookie {
                    return Err(wrong("a reply to another request"));
                }
                let length = usize::try_from(chunk.length.get()).unwrap_or(usize::MAX);
                extend(&mut reply, length).await?;
                if chunk.flags.get() & reply_flag::DONE != 0 {
                    return Ok(reply);
                }
            }
            _ => return Err(wrong("not a reply")),
        }
    }
}

async fn extend(
    stream: &mut (impl AsyncRead + Unpin),
    reply: &mut Vec<u8>,
    length: usize,
    most: usize,
) -> io::Result<()> {
    let start = reply.len();
    if start.saturating_add(length) > most {
        return Err(wrong("a reply that is longer than any"));
    }
    reply.resize(start + length, 0);
    stream.read_exact(&mut reply[start..]).await.map(drop)
}

fn wrong(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    fn request(command: u16) -> RequestHead {
        RequestHead { flags: 0, command, cookie: 7, offset: 0, length: 512, payload: 0 }
    }

    fn simple(error: u32, cookie: u64) -> Vec<u8> {
        let (magic, error, cookie) = (SIMPLE_REPLY_MAGIC.into(), error.into(), cookie.into());
        SimpleReply { magic, error, cookie }.as_bytes().to_vec()
    }

    fn chunk(flags: u16, cookie: u64, content: &[u8]) -> Vec<u8> {
        let header = ChunkHeader {
            magic: STRUCTURED_REPLY_MAGIC.into(),
            flags: flags.into(),
            kind: 1.into(),
            cookie: cookie.into(),
            length: (content.len() as u32).into(),
        };
        [header.as_bytes(), content].concat()
    }

    fn extended(flags: u16, cookie: u64, length: u64, content: &[u8]) -> Vec<u8> {
        let header = ExtendedReply {
            magic: EXTENDED_REPLY_MAGIC.into(),
            flags: flags.into(),
            kind: 1.into(),
            cookie: cookie.into(),
            offset: 0.into(),
            length: length.into(),
        };
        [header.as_bytes(), content].concat()
    }

    /// The reply, and how many bytes behind it were left alone.
    fn read(bytes: &[u8], command: u16) -> io::Result<(Vec<u8>, usize)> {
        let mut rest = bytes;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(read_reply(&mut rest, &request(command))).map(|reply| (reply, rest.len()))
    }

    #[test]
    fn a_reply_is_taken_whole_and_nothing_behind_it() {
        let data = [simple(0, 7), vec![9; 512]].concat();
        let chunks = [chunk(0, 7, &[1; 600]), chunk(reply_flag::DONE, 7, &[])].concat();
        for (reply, asked) in [
            (data, command::READ),
            (simple(5, 7), command::READ),
            (simple(0, 7), command::FLUSH),
            (chunks.clone(), command::READ),
            ([extended(0, 7, 600, &[1; 600]), extended(1, 7, 0, &[])].concat(), command::READ),
            (chunks, command::BLOCK_STATUS),
        ] {
            let (read, left) = read(&[&reply[..], b"more"].concat(), asked).unwrap();
            assert_eq!((read, left), (reply, 4));
        }
    }

    #[test]
    fn what_is_no_reply_is_told() {
        let long = ChunkHeader {
            length: u32::MAX.into(),
            ..ChunkHeader::read_from_bytes(&chunk(0, 7, &[])).unwrap()
        };
        let half = [simple(0, 7), vec![9; 511]].concat();
        let endless = extended(1, 7, u64::MAX, &[]);
        for bad in [
            simple(0, 8),
            chunk(1, 8, &[]),
            extended(1, 8, 0, &[]),
            endless,
            half,
            vec![0; 64],
            long.as_bytes().to_vec(),
            Vec::new(),
        ] {
            assert!(read(&bad, command::READ).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200), structured: bool) {
            let head = if structured { chunk(0, 7, &[]) } else { simple(0, 7) };
            let _ = read(&[&head[..], &bytes].concat(), command::READ);
            let _ = read(&bytes, command::READ);
        }
    }
}
