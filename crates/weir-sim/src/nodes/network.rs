//! Connections between nodes: simulated connections with the production greetings.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::oneshot;
use weir_block::Stream;
use weir_block::sim::End;
use weir_node::peer::{Duplex, Greeting, Incoming, Network, Pending};

use super::{Cluster, Task, Who, WorldRequest, WorldRequests};
use crate::atlas::Fault;

/// Retry interval of an unanswered connection attempt.
const AGAIN: Duration = Duration::from_millis(200);

/// One process's network to the other nodes.
pub struct Wires {
    pub who: Who,
    pub requests: WorldRequests,
}

/// A node's address.
pub fn address(node: usize) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], node as u16 + 1))
}

impl Wires {
    async fn greet(&self, address: SocketAddr, greeting: &Greeting) -> io::Result<Wire> {
        let (reply, connected) = oneshot::channel();
        let node = usize::from(address.port()) - 1;
        self.requests.push(self.who, WorldRequest::Connect { to: node, reply });
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let end = connected.await.map_err(|_| refused())?;
        let mut wire = Wire(end);
        wire.write_all(&greeting.encode()).await?;
        Ok(wire)
    }
}

impl Network for Wires {
    fn connect<'a>(&'a self, address: SocketAddr, greeting: &'a Greeting) -> Pending<'a, Stream> {
        Box::pin(async move { self.greet(address, greeting).await?.into_stream() })
    }

    fn open<'a>(&'a self, address: SocketAddr, greeting: &'a Greeting) -> Pending<'a, Box<dyn Duplex>> {
        Box::pin(async move { Ok(Box::new(self.greet(address, greeting).await?) as Box<dyn Duplex>) })
    }
}

/// One end of a connection, for a task.
pub struct Wire(pub End);

impl Incoming for Wire {
    fn into_stream(self) -> io::Result<Stream> {
        Ok(self.0.into())
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Poll::Ready(count) = self.0.poll_receive(context, target.initialize_unfilled())? else {
            return Poll::Pending;
        };
        target.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_send(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A connection attempt.
pub struct Dialling {
    pub from: Who,
    pub to: usize,
    pub reply: oneshot::Sender<End>,
}

impl Cluster {
    /// The first packet of a connection arrives, or is lost.
    pub fn dialled(&mut self, dialling: Dialling) {
        let Dialling { from, to, reply } = &dialling;
        if reply.is_closed() || !self.is_alive(*from) {
            return;
        }
        let node = &self.nodes[*to];
        let (there, back) = (self.world.is_blocked(from.node, *to), self.world.is_blocked(*to, from.node));
        if there || back || !node.has_power {
            return self.at(self.world.now() + AGAIN, Task::Dialled(dialling));
        }
        let fails = self.should_inject(Fault::ConnectFailure, 20);
        let node = &self.nodes[dialling.to];
        let (Some(peers), false) = (&node.peers, fails) else { return };
        let (ours, theirs) = self.world.connect(self.nodes[dialling.from.node].process, node.process);
        // The kernel of a paused process accepts the connection.
        if peers.send(theirs).is_ok() {
            let delay = self.mostly(200, 100_000);
            self.at(
                self.world.now() + delay,
                Task::Connected { to: dialling.from, reply: dialling.reply, end: ours },
            );
        }
    }
}
