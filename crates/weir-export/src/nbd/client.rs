//! A client after its handshake, and the way from the listener to the rest of the node.

use std::any::Any;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use weir_identity::{Identity, OtherEnd};
use weir_nbd::server::Session;

/// A client that has chosen an export.
#[derive(Debug)]
pub struct AcceptedClient {
    /// Its socket, non-blocking; encrypted if it came by TLS.
    pub stream: weir_block::Stream,
    /// Bytes that the client sent ahead of the transmission phase.
    pub leftover: Vec<u8>,
    /// The result of the handshake.
    pub session: Session,
    /// The other node that it comes by, if it is not this one's.
    pub via: Option<Via>,
}

/// The node that a client comes by, if it is another one.
#[derive(Clone, Debug)]
pub enum Via {
    /// It follows the disk: the first request that changes data moves the disk there ([`crate::Exports::keep_via`]).
    Follower(String),
    /// It forwards a client of its own, which stays with it. Once that node has closed the connection, nothing more of what it has sent
    /// is served: its client may send the same requests again by another way. The place is kept as long as the connection.
    Forwarder(Arc<dyn Any + Send + Sync>),
    /// Programs there read the disk, and its session lets them do nothing else. The place is kept as long as the connection.
    Reader(Arc<dyn Any + Send + Sync>),
}

/// Why a client is refused where TLS is required. One kind of noise must not hide another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It speaks plain text.
    PlainText,
    /// It has not proven who it is, or has too many connections.
    NotAdmitted,
    /// It asks for an export that its certificate does not open.
    NotAllowed,
}

/// The node, as a listener uses it: on the control plane, so no call may block.
pub trait Attach: Send + Sync {
    /// Brings a client to the shard that owns its disk. Dropping the client disconnects it.
    fn attach(&self, client: AcceptedClient);

    /// A client has proven over TLS who it is. The result is kept as long as its connection is open. If the certificate stops
    /// counting meanwhile, the connection is ended by a shutdown of a duplicate of `socket`.
    ///
    /// # Errors
    /// The certificate does not count any more; in words.
    fn admit(&self, client: OtherEnd, socket: BorrowedFd<'_>) -> Result<Arc<dyn Any + Send + Sync>, String>;

    /// Whether the certificate of `client` opens the disk that is exported under this name now.
    fn may_open(&self, client: &Identity, export: &str) -> bool;

    /// A client at `from` was refused where TLS is required. `reason` is a sentence without its subject's address. Anybody who
    /// reaches the port causes such calls.
    fn refused(&self, from: SocketAddr, why: Refused, reason: &str);
}
