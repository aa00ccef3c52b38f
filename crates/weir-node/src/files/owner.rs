//! The way to the node that owns a disk, for programs that read the disk's file here.
//!
//! Requests of the kernel become requests of an NBD connection to the owner's shard, over the peers' port, and nothing but reads
//! and searches for holes goes there; the session at the owner takes nothing else. So readers see what was acknowledged there (P7), and
//! cannot move the disk. The connection is there as long as somebody has the file open and the owner is the same process. What it has
//! not answered when it ends waits for the next one.

use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use weir_block::Nanos;
use weir_cluster::records::NodeRef;
use weir_export::fuse::{File, Io, LARGEST, LONGEST_REQUEST, Translation};
use weir_nbd::protocol::{
    EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, ExtendedReply, ExtendedRequest, command, error, reply_type,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::control::Node;
use crate::peer::{Duplex, Greeting, Purpose};
use crate::throttles::FILE_REFUSED;

/// Files that are read from other nodes at once, on one node. Each costs a request, a reply and [`MOST_BYTES`] (P10).
const MOST_FILES: usize = 64;

/// Requests of one file at the owner.
const MOST_REQUESTS: usize = 64;

/// Bytes that one file reads at once: further requests wait in the kernel. One request more may be under way.
const MOST_BYTES: u64 = 2 << 20;

/// Programs that wait for one file to be opened; further ones are refused (P10).
const MOST_OPENERS: usize = 256;

/// Bytes of the longest reply: a read's data, or an error with its text.
const LONGEST_REPLY: usize = LARGEST as usize + 4096;

/// Bytes that are received in one go, at least.
const RECEIVES: usize = 64 << 10;

/// Bytes of a reply's header.
const HEAD: usize = size_of::<ExtendedReply>();

/// The number of the first request of a connection, which asks whether the owner answers at all.
const PROBE: u64 = u64::MAX;

/// Longest time in which the owner's host takes what is sent, which is less than its buffers hold.
const SENDS: Duration = Duration::from_secs(1);

/// Pause before the next attempt, doubled with each that fails.
const AGAIN: Duration = Duration::from_millis(100);

/// Longest such pause while somebody waits.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The pause while nobody waits: the file is open, and that is all.
const IDLE_PAUSE: Duration = Duration::from_secs(10);

/// Places for the files of one node.
pub(super) fn places() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(MOST_FILES))
}

/// The way to the owner of one file's disk.
pub(super) struct Owner {
    node: Arc<Node>,
    places: Arc<Semaphore>,
    way: Way,
    /// The kernel's numbers of openings that wait for it.
    openers: Vec<u64>,
    /// For the kernel's next request. Empty without a connection: files that nobody reads here cost no memory.
    buffer: Vec<u8>,
    /// Attempts that have failed since the last that has not, and when the last one did.
    failures: u32,
    failed: Nanos,
}

type Connecting = Pin<Box<dyn Future<Output = io::Result<Link>> + Send>>;

enum Way {
    None,
    Connecting(NodeRef, Connecting),
    Open(Box<Link>),
}

/// News of the owner.
pub(super) enum Heard {
    Connected(io::Result<Link>),
    /// So many bytes have come; none: the connection has ended.
    Received(io::Result<usize>),
}

impl Owner {
    pub(super) fn new(node: Arc<Node>, places: Arc<Semaphore>) -> Owner {
        let (openers, buffer) = (Vec::new(), Vec::new());
        Owner { node, places, way: Way::None, openers, buffer, failures: 0, failed: Nanos::default() }
    }

    /// Whether somebody waits for an answer of it.
    pub(super) fn is_awaited(&self) -> bool {
        !self.openers.is_empty() || matches!(&self.way, Way::Open(link) if link.translation.is_awaited())
    }

    /// Whether requests are to wait in the kernel.
    pub(super) fn is_full(&self) -> bool {
        matches!(&self.way, Way::Open(link) if link.is_full())
    }

    /// Room for a request of the kernel.
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        if self.buffer.is_empty() {
            self.buffer = vec![0; LONGEST_REQUEST];
        }
        &mut self.buffer
    }

    /// The disk's owner is this process on another node, or there is none to read from: ends the way to any other, and begins a new one
    /// if it is needed and due.
    pub(super) fn follow(
        &mut self,
        owner: Option<NodeRef>,
        file: &mut File,
        device: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let is_wanted = file.is_open() || !self.openers.is_empty();
        let known = match &self.way {
            Way::None => None,
            Way::Connecting(owner, _) => Some(owner),
            Way::Open(link) => Some(&link.owner),
        };
        if known.is_some() && (known != owner.as_ref() || !is_wanted) {
            self.leave(file);
        }
        let Some(owner) = owner else {
            return self.refuse_openers(file, device, "no other node owns it now");
        };
        let is_awaited = file.is_awaited() || !self.openers.is_empty();
        if !matches!(self.way, Way::None) || !is_wanted || Nanos::now() < self.due(is_awaited) {
            return Ok(());
        }
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => {
                let link = connect(Arc::clone(&self.node), owner.clone(), file.name().to_owned(), place);
                self.way = Way::Connecting(owner, Box::pin(link));
                Ok(())
            }
            Err(_) => {
                self.fails();
                let reason = format!("this node reads {MOST_FILES} disks of other nodes already");
                self.refuse_openers(file, device, &reason)
            }
        }
    }

    fn due(&self, is_awaited: bool) -> Nanos {
        match self.failures {
            0 => Nanos::default(),
            some if is_awaited => self.failed + (AGAIN * (1 << some.min(4)) / 2).min(LONGEST_PAUSE),
            _ => self.failed + IDLE_PAUSE,
        }
    }

    fn fails(&mut self) {
        (self.failures, self.failed) = (self.failures.saturating_add(1), Nanos::now());
    }

    /// Somebody opens the file to read what the owner has. Answered at once, or when the owner has answered.
    pub(super) fn open(&mut self, unique: u64, file: &mut File, device: BorrowedFd<'_>) -> io::Result<()> {
        match self.way {
            Way::Open(_) => file.opened(device, unique),
            _ if self.openers.len() < MOST_OPENERS => {
                // Whoever opens it asks anew.
                self.failures = 0;
                self.openers.push(unique);
                Ok(())
            }
            _ => file.refuse(device, unique, Errno::BUSY),
        }
    }

    /// Whether the owner is asked for this, which is a read or a search.
    pub(super) fn ask(&mut self, io: &Io) -> bool {
        let Way::Open(link) = &mut self.way else { return false };
        let head = link.translation.request(io);
        link.outgoing.extend_from_slice(&head);
        true
    }

    /// As [`Translation::interrupt`].
    ///
    /// # Errors
    /// The mount is over.
    pub(super) fn interrupt(
        &mut self,
        unique: u64,
        file: &mut File,
        device: BorrowedFd<'_>,
    ) -> io::Result<()> {
        match &mut self.way {
            Way::Open(link) => link.translation.interrupt(file, device, unique),
            Way::None | Way::Connecting(..) => file.interrupt(device, unique),
        }
    }

    /// Sends what was asked for.
    pub(super) async fn send(&mut self, file: &mut File) {
        let Way::Open(link) = &mut self.way else {
            self.buffer = Vec::new();
            return;
        };
        if link.outgoing.is_empty() {
            return;
        }
        let sent = tokio::time::timeout(SENDS, link.send()).await;
        if let Err(error) = sent.unwrap_or_else(|late| Err(late.into())) {
            self.lose(file, &error);
        }
    }

    /// Waits for news. Cancel safe.
    pub(super) async fn hear(&mut self) -> Heard {
        match &mut self.way {
            Way::None => std::future::pending().await,
            Way::Connecting(_, link) => Heard::Connected(link.await),
            Way::Open(link) => Heard::Received(link.receive().await),
        }
    }

    /// Answers the kernel. True: a request has got further.
    ///
    /// # Errors
    /// The mount is over.
    pub(super) fn act_on(
        &mut self,
        heard: Heard,
        file: &mut File,
        device: BorrowedFd<'_>,
    ) -> io::Result<bool> {
        let link = match (heard, &mut self.way) {
            (Heard::Connected(Ok(link)), _) => {
                (self.way, self.failures) = (Way::Open(Box::new(link)), 0);
                for unique in std::mem::take(&mut self.openers) {
                    file.opened(device, unique)?;
                }
                file.ask_again(device)?;
                return Ok(false);
            }
            (Heard::Connected(Err(error)), _) => {
                self.lose(file, &error);
                self.refuse_openers(file, device, &error.to_string())?;
                return Ok(false);
            }
            (Heard::Received(Ok(1..)), Way::Open(link)) => link,
            (Heard::Received(result), _) => {
                let error = result.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
                self.lose(file, &error);
                return Ok(false);
            }
        };
        let answered = link.answer(file, device);
        match answered {
            // It has told a request that the disk leaves it.
            Ok(_) if file.is_awaited() => self.leave(file),
            Ok(_) => {}
            Err(ref error) => self.lose(file, &io::Error::new(error.kind(), error.to_string())),
        }
        Ok(answered.unwrap_or(false))
    }

    /// The disk is here: this node's shard answers what is open.
    ///
    /// # Errors
    /// The mount is over.
    pub(super) fn hand_back(&mut self, file: &mut File, device: BorrowedFd<'_>) -> io::Result<()> {
        self.leave(file);
        for unique in std::mem::take(&mut self.openers) {
            file.opened(device, unique)?;
        }
        Ok(())
    }

    /// Ends the way. What is not answered waits in `file`.
    pub(super) fn leave(&mut self, file: &mut File) {
        if let Way::Open(mut link) = std::mem::replace(&mut self.way, Way::None) {
            link.translation.leave(file);
        }
        self.buffer = Vec::new();
    }

    fn lose(&mut self, file: &mut File, error: &io::Error) {
        tracing::debug!(disk = file.name(), %error, "fuse: the owner of a disk cannot be read from");
        self.leave(file);
        self.fails();
    }

    /// Nobody answers those who wait for an opening.
    ///
    /// # Errors
    /// The mount is over.
    pub(super) fn refuse_openers(
        &mut self,
        file: &mut File,
        device: BorrowedFd<'_>,
        reason: &str,
    ) -> io::Result<()> {
        if self.openers.is_empty() {
            return Ok(());
        }
        if let Some(left_out) = FILE_REFUSED.pass(Nanos::now()) {
            tracing::warn!(disk = file.name(), reason, left_out, "fuse: opening a disk's file is refused");
        }
        for unique in std::mem::take(&mut self.openers) {
            file.refuse(device, unique, Errno::BUSY)?;
        }
        Ok(())
    }
}

/// A connection to the owner's shard.
pub(super) struct Link {
    owner: NodeRef,
    stream: Box<dyn Duplex>,
    translation: Translation,
    /// Requests that are to be sent.
    outgoing: Vec<u8>,
    /// The beginning of a reply, at most.
    received: Vec<u8>,
    _place: OwnedSemaphorePermit,
}

impl Link {
    fn is_full(&self) -> bool {
        self.translation.requests() >= MOST_REQUESTS || self.translation.bytes() >= MOST_BYTES
    }

    async fn send(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.outgoing).await?;
        self.outgoing.clear();
        self.stream.flush().await
    }

    async fn receive(&mut self) -> io::Result<usize> {
        let missing = whole(&self.received)?.saturating_sub(self.received.len());
        self.received.reserve(missing.max(RECEIVES));
        self.stream.read_buf(&mut self.received).await
    }

    /// Turns what has come into answers; false: no whole reply yet.
    fn answer(&mut self, file: &mut File, device: BorrowedFd<'_>) -> io::Result<bool> {
        let mut end = 0;
        loop {
            let length = whole(&self.received[end..])?;
            if self.received.len() - end < length {
                break;
            }
            end += length;
        }
        self.translation.replies(file, device, &[IoSlice::new(&self.received[..end])])?;
        self.received.drain(..end);
        Ok(end > 0)
    }
}

/// Bytes of the reply that begins here, as far as that is known.
fn whole(received: &[u8]) -> io::Result<usize> {
    let Ok((head, _)) = ExtendedReply::read_from_prefix(received) else { return Ok(HEAD) };
    let length = usize::try_from(head.length.get()).ok().and_then(|length| length.checked_add(HEAD));
    match length.filter(|length| *length <= LONGEST_REPLY) {
        Some(length) if head.magic == EXTENDED_REPLY_MAGIC => Ok(length),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a reply")),
    }
}

/// Connects, and has the owner answer a request: a node that does not let this one read hangs up instead.
async fn connect(
    node: Arc<Node>,
    owner: NodeRef,
    disk: String,
    place: OwnedSemaphorePermit,
) -> io::Result<Link> {
    let limit = node.config.peers.deadline.0;
    let address = node.records.nodes.now().get(&owner.node).map(|record| record.peer_address);
    let address = address.ok_or_else(|| io::Error::other(format!("node {} is gone", owner.node)))?;
    let greeting =
        Greeting { disk, owner: node.config.name.clone(), replica: owner.clone(), purpose: Purpose::Read };
    let connected = async {
        let mut stream = node.network.open(address, &greeting).await?;
        probe(&mut stream).await?;
        Ok(stream)
    };
    let stream = match tokio::time::timeout(limit, connected).await {
        Ok(connected) => connected.map_err(|error: io::Error| {
            let hint = match error.kind() {
                // What was sent and not read makes a reset of the end.
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    ": fuse.elsewhere = \"read\" is needed there, too, and few enough readers of this node; its log has the reason"
                }
                _ => "",
            };
            io::Error::new(
                error.kind(),
                format!("its owner, node {}, lets nobody read here{hint}: {error}", owner.node),
            )
        })?,
        Err(_) => {
            let reason = format!("its owner, node {}, does not answer within {limit:?}", owner.node);
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
    };
    let translation = Translation::default();
    Ok(Link { owner, stream, translation, outgoing: Vec::new(), received: Vec::new(), _place: place })
}

/// Reads behind the end of any disk. The owner's session refuses that by itself, whether or not the disk's storage answers at present.
async fn probe(stream: &mut Box<dyn Duplex>) -> io::Result<()> {
    let request = ExtendedRequest {
        magic: EXTENDED_REQUEST_MAGIC.into(),
        flags: 0.into(),
        command: command::READ.into(),
        cookie: PROBE.into(),
        offset: (1 << 62).into(),
        length: 1.into(),
    };
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut reply = vec![0; HEAD];
    stream.read_exact(&mut reply).await?;
    reply.resize(whole(&reply)?, 0);
    stream.read_exact(&mut reply[HEAD..]).await?;
    let (head, body) = ExtendedReply::read_from_prefix(&reply).map_err(|_| io::ErrorKind::InvalidData)?;
    if head.cookie.get() != PROBE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a reply to another request"));
    }
    let number = body.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    match number.filter(|_| head.kind.get() & reply_type::ERROR_BIT != 0) {
        Some(error::EINVAL) => Ok(()),
        Some(_) => {
            let text = String::from_utf8_lossy(body.get(6..).unwrap_or_default()).into_owned();
            Err(io::Error::other(text))
        }
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "a read behind the end is not refused")),
    }
}

#[cfg(test)]
mod tests {
    use weir_nbd::protocol::reply_flag;

    use super::*;

    fn head(length: u64) -> Vec<u8> {
        let head = ExtendedReply {
            magic: EXTENDED_REPLY_MAGIC.into(),
            flags: reply_flag::DONE.into(),
            kind: reply_type::OFFSET_DATA.into(),
            cookie: 0.into(),
            offset: 0.into(),
            length: length.into(),
        };
        head.as_bytes().to_vec()
    }

    #[test]
    fn the_length_of_a_reply_is_known_from_its_header_and_bounded() {
        assert_eq!(whole(&[]).unwrap(), HEAD);
        assert_eq!(whole(&head(520)[..HEAD - 1]).unwrap(), HEAD);
        assert_eq!(whole(&head(520)).unwrap(), HEAD + 520);
        assert_eq!(whole(&head(u64::from(LARGEST) + 8)).unwrap(), HEAD + LARGEST as usize + 8);
        for bad in [head(2 * u64::from(LARGEST)), head(u64::MAX), vec![0; HEAD]] {
            assert!(whole(&bad).is_err());
        }
    }
}
