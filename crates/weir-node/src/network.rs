//! Connections between nodes over TCP: encrypted, both ends proven, where this node has an identity.
//!
//! Handshake and greeting are a task's work. From then on a shard encrypts for itself ([`weir_net::tls`]), and connections of
//! tasks stay with tokio.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::sockopt;
use rustls::Connection;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use weir_block::Stream;
use weir_export::nbd::keep_alive;
use weir_identity::{Mistrust, explain, peer};

use crate::control::Node;
use crate::identity::{Admitted, NodeIdentity};
use crate::peer::{Duplex, Greeting, Incoming, Network, Pending};

/// The interval at which open connections are checked again: a certificate may end under one.
const RECHECK: Duration = Duration::from_secs(30);

/// The network that there is.
#[derive(Clone, Debug, Default)]
pub struct Tcp {
    identity: Option<Arc<NodeIdentity>>,
    /// Without an identity: other hosts may be spoken to in plain text.
    plaintext: bool,
}

impl Tcp {
    /// Encrypted with `identity`; without one in plain text, within this host, or with `plaintext` to all.
    #[must_use]
    pub fn new(identity: Option<Arc<NodeIdentity>>, plaintext: bool) -> Tcp {
        Tcp { identity, plaintext }
    }

    async fn greet(&self, address: SocketAddr, greeting: &Greeting) -> io::Result<Link> {
        let Some(identity) = &self.identity else {
            if !self.plaintext && !address.ip().is_loopback() {
                let reason = format!(
                    "{} is at {address}, and this node has no identity: join the cluster (`weir cluster join`) and set \
                     identity.directory, or set peers.plaintext",
                    greeting.replica.node
                );
                return Err(io::Error::other(reason));
            }
            let mut stream = connect(address).await?;
            stream.write_all(&greeting.encode()).await?;
            return Ok(Link::Plain(stream));
        };
        let expected = &greeting.replica.node;
        let config = identity.peer_client(expected).map_err(io::Error::other)?;
        let stream = connect(address).await?;
        // The name is not sent and does not count: the certificate must be that of the node that is meant.
        let name = ServerName::IpAddress(address.ip().into());
        let stream = TlsConnector::from(config).connect(name, stream).await.map_err(explained)?;
        let mut link = Encrypted::admit(identity, TlsStream::Client(stream)).map_err(io::Error::other)?;
        link.write_all(&greeting.encode()).await?;
        link.flush().await?;
        Ok(Link::Encrypted(link))
    }
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    avoid_pacing(&socket);
    let stream = socket.connect(address).await?;
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    Ok(stream)
}

/// For a socket that is not connected yet, or that listens for connections, which inherit it. BBR paces: it spreads what is sent at once over
/// the time of a kernel timer. That suits wide-area networks with deep buffers, and delays the small messages of a cluster's network. Any
/// other choice of the host stays: DCTCP, for one, has its reasons. Where CUBIC is not available, nothing changes.
pub fn avoid_pacing(socket: impl AsFd) {
    if sockopt::tcp_congestion(&socket).is_ok_and(|name| name.starts_with("bbr")) {
        let _ = sockopt::set_tcp_congestion(&socket, "cubic");
    }
}

/// A connection with its greeting sent.
enum Link {
    Plain(TcpStream),
    Encrypted(Encrypted),
}

impl Network for Tcp {
    fn connect<'a>(&'a self, address: SocketAddr, greeting: &'a Greeting) -> Pending<'a, Stream> {
        Box::pin(async move {
            match self.greet(address, greeting).await? {
                Link::Plain(stream) => stream.into_stream(),
                Link::Encrypted(link) => link.into_stream(),
            }
        })
    }

    fn open<'a>(&'a self, address: SocketAddr, greeting: &'a Greeting) -> Pending<'a, Box<dyn Duplex>> {
        Box::pin(async move {
            Ok(match self.greet(address, greeting).await? {
                Link::Plain(stream) => Box::new(stream) as Box<dyn Duplex>,
                Link::Encrypted(link) => Box::new(link),
            })
        })
    }
}

impl Incoming for TcpStream {
    fn into_stream(self) -> io::Result<Stream> {
        Ok(self.into_std()?.into())
    }
}

/// An encrypted connection whose other end has proven which node it is.
#[derive(Debug)]
pub struct Encrypted {
    stream: Box<TlsStream<TcpStream>>,
    admitted: Arc<Admitted>,
}

impl Encrypted {
    /// The handshake of a connection from another node.
    ///
    /// # Errors
    /// The other side has not proven to be a node of this cluster; in words.
    pub async fn accept(identity: &Arc<NodeIdentity>, stream: TcpStream) -> Result<Encrypted, String> {
        let acceptor = TlsAcceptor::from(identity.peer_server());
        let stream = acceptor.accept(stream).await.map_err(|error| explained(error).to_string())?;
        Encrypted::admit(identity, TlsStream::Server(stream))
    }

    fn admit(identity: &NodeIdentity, stream: TlsStream<TcpStream>) -> Result<Encrypted, String> {
        let (socket, connection) = stream.get_ref();
        let other = peer(connection).map_err(|error| error.to_string())?;
        let admitted = identity.admit(other, socket)?;
        Ok(Encrypted { stream: Box::new(stream), admitted })
    }

    /// The node at the other end.
    ///
    /// # Errors
    /// [`Mistrust::Nobody`]: it is none.
    pub fn node(&self) -> Result<&str, Mistrust> {
        self.admitted.facts().identity.name().map(|name| name.as_str()).ok_or(Mistrust::Nobody)
    }
}

impl Incoming for Encrypted {
    fn into_stream(self) -> io::Result<Stream> {
        let Encrypted { stream, admitted } = self;
        let (socket, connection) = match *stream {
            TlsStream::Client(stream) => {
                let (socket, connection) = stream.into_inner();
                (socket, Connection::Client(connection))
            }
            TlsStream::Server(stream) => {
                let (socket, connection) = stream.into_inner();
                (socket, Connection::Server(connection))
            }
        };
        weir_net::tls::protect(socket.into_std()?.into(), connection, Some(admitted))
    }
}

impl AsyncRead for Encrypted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_read(context, target)
    }
}

impl AsyncWrite for Encrypted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_shutdown(context)
    }
}

/// The error of a handshake in words that say which end has to change what.
fn explained(error: io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls.map(explain) {
        Some(words) => io::Error::new(error.kind(), words),
        None => error,
    }
}

/// Ends connections whose certificates end under them. A change of trust ends others at once
/// ([`NodeIdentity::set_trust`]).
pub async fn keep_checking(node: Arc<Node>) {
    let Some(identity) = &node.identity else { return };
    loop {
        tokio::time::sleep(RECHECK).await;
        for why in identity.recheck() {
            node.journal.tell("peer-ended", &node.config.name, format!("a connection was ended: {why}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;
    use weir_cluster::records::NodeRef;
    use weir_identity::{Authority, Holder, Revocations};

    use super::*;
    use crate::identity::tests::{authority, joined};
    use crate::peer::Purpose;

    fn identity(authority: &Authority, name: &str) -> Arc<NodeIdentity> {
        let directory = tempfile::tempdir().unwrap();
        joined(directory.path(), authority, name, weir_task::unix_millis() / 1000);
        NodeIdentity::load(directory.path(), name).unwrap()
    }

    fn greeting(owner: &str, replica: &str) -> Greeting {
        let replica = NodeRef::new(replica, 7);
        Greeting { disk: String::new(), owner: owner.into(), replica, purpose: Purpose::Grants }
    }

    /// Node `ours` connects to what it takes for `n2`, and `theirs` answers: what each end says of the other.
    async fn meet(
        ours: &Tcp,
        theirs: &Arc<NodeIdentity>,
    ) -> (io::Result<Box<dyn Duplex>>, Result<Encrypted, String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, hello) = (listener.local_addr().unwrap(), greeting("n1", "n2"));
        let accept = async {
            let mut accepted = Encrypted::accept(theirs, listener.accept().await.unwrap().0).await;
            if let Ok(link) = &mut accepted {
                // The client of TLS 1.3 learns of a refusal only when it reads.
                link.write_all(b"welcome").await.unwrap();
                link.flush().await.unwrap();
            }
            accepted
        };
        let connect = async {
            let mut link = ours.open(address, &hello).await?;
            let mut word = [0; 7];
            link.read_exact(&mut word).await.map_err(explained)?;
            // An alert, in plain text, is as long.
            if &word == b"welcome" { Ok(link) } else { Err(io::Error::other("another word")) }
        };
        tokio::join!(connect, accept)
    }

    #[tokio::test]
    async fn both_ends_know_who_speaks() {
        let authority = authority(1);
        let (ours, theirs) = (identity(&authority, "n1"), identity(&authority, "n2"));
        let (near, far) = meet(&Tcp::new(Some(ours), false), &theirs).await;
        let (near, mut far) = (near.unwrap(), far.unwrap());
        assert_eq!(far.node().unwrap(), "n1");
        assert_eq!(Greeting::read(&mut far).await.unwrap(), greeting("n1", "n2"));
        assert!(matches!(far.into_stream().unwrap(), Stream::Protected(..)));
        drop(near);
    }

    #[tokio::test]
    async fn who_has_not_proven_to_be_the_node_that_is_meant_is_refused_in_clear_words() {
        let (ours, theirs) = (authority(1), authority(2));
        let directory = tempfile::tempdir().unwrap();
        joined(directory.path(), &ours, "n2", weir_task::unix_millis() / 1000);
        let n2 = NodeIdentity::load(directory.path(), "n2").unwrap();
        let says = |result: Option<String>, words: &str| {
            let reason = result.expect("refused");
            assert!(reason.contains(words), "{reason:?} says nothing of {words:?}");
        };
        // No TLS at all.
        let (near, far) = meet(&Tcp::default(), &n2).await;
        assert!(near.is_err());
        says(far.err(), "does not speak TLS");
        // Of another cluster.
        let stranger = Tcp::new(Some(identity(&theirs, "n1")), false);
        let (near, _) = meet(&stranger, &n2).await;
        says(near.err().map(|error| error.to_string()), "cluster");
        // Another node answers at the address.
        let (near, far) = meet(&Tcp::new(Some(identity(&ours, "n1")), false), &identity(&ours, "n3")).await;
        says(near.err().map(|error| error.to_string()), "node n3 answers where node n2 was expected");
        assert!(far.is_err());
        // Revoked, at either end.
        let name = "n1".parse().unwrap();
        let now = weir_task::unix_millis() / 1000;
        let revoked = Revocations::default().with_name(Holder::Node, &name, [], "stolen", now);
        n2.set_trust(vec![ours.certificate().clone()], revoked, |_| {}).unwrap();
        let (near, far) = meet(&Tcp::new(Some(identity(&ours, "n1")), false), &n2).await;
        says(far.err(), "revoked");
        says(near.err().map(|error| error.to_string()), "this host's certificate is revoked");
        // Without an identity, other hosts are not spoken to at all.
        let elsewhere = "192.0.2.1:7420".parse().unwrap();
        let error = Tcp::default().open(elsewhere, &greeting("n1", "n2")).await.err();
        says(error.map(|error| error.to_string()), "this node has no identity");
    }

    #[tokio::test]
    async fn a_certificate_of_another_cluster_is_refused_by_the_one_that_is_asked() {
        let (ours, theirs) = (authority(1), authority(2));
        let n2 = identity(&ours, "n2");
        // It trusts both clusters, so that the refusal is not its own.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stranger = identity(&theirs, "n2");
        let connect = async {
            let stream = TcpStream::connect(address).await.unwrap();
            let config = believing(&stranger, &n2);
            let name = ServerName::IpAddress(address.ip().into());
            let mut link = TlsConnector::from(config).connect(name, stream).await.unwrap();
            let mut byte = [0];
            link.read_exact(&mut byte).await.map_err(explained).unwrap_err().to_string()
        };
        let accept = async { Encrypted::accept(&n2, listener.accept().await.unwrap().0).await };
        let (told, refused) = tokio::join!(connect, accept);
        let refused = refused.expect_err("a stranger");
        assert!(refused.contains("belongs to cluster"), "{refused}");
        assert!(told.contains("refused the connection"), "{told}");
    }

    /// Shows the certificate of one identity, and trusts what another trusts.
    fn believing(shown: &NodeIdentity, trusted: &NodeIdentity) -> Arc<rustls::ClientConfig> {
        let config = trusted.tls().peer_client(shown.credentials(), &"n2".parse().unwrap());
        Arc::new(config.unwrap())
    }
}
