//! A connection whose bytes are encrypted as on a shard, for a task: a client by TLS waits here for its disk, and the shard then goes
//! on with the same keys.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use weir_block::{Protection, Received, Sent, Stream};

/// The socket and its keys.
pub struct Protected {
    socket: TcpStream,
    keys: Box<dyn Protection>,
}

impl Protected {
    /// Takes a non-blocking TCP socket.
    pub fn new(socket: OwnedFd, keys: Box<dyn Protection>) -> io::Result<Protected> {
        Ok(Protected { socket: TcpStream::from_std(socket.into())?, keys })
    }

    /// The socket, for looks at it.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The connection for a shard.
    pub fn into_stream(self) -> io::Result<Stream> {
        Ok(Stream::Protected(self.socket.into_std()?.into(), self.keys))
    }
}

/// Forgets that the socket is ready. Try once more before waiting: it may have become ready meanwhile.
fn wait_again(socket: &TcpStream, interest: Interest) {
    let _ = socket.try_io(interest, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
}

impl AsyncRead for Protected {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Protected { socket, keys } = &mut *self;
        loop {
            // Before the socket is waited for: the keys may hold bytes that have come already.
            let room = target.initialize_unfilled();
            match keys.receive(socket.as_fd(), &mut [IoSliceMut::new(room)])? {
                Received::Bytes(bytes) => target.advance(bytes),
                Received::End => {}
                Received::Nothing => {
                    ready!(socket.poll_read_ready(context))?;
                    wait_again(socket, Interest::READABLE);
                    continue;
                }
            }
            return Poll::Ready(Ok(()));
        }
    }
}

impl AsyncWrite for Protected {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Protected { socket, keys } = &mut *self;
        loop {
            match keys.send(socket.as_fd(), &[IoSlice::new(bytes)])? {
                Sent::Bytes(sent) => return Poll::Ready(Ok(sent)),
                Sent::Full => {
                    ready!(socket.poll_write_ready(context))?;
                    wait_again(socket, Interest::WRITABLE);
                }
            }
        }
    }

    /// A write counts bytes only once nothing of them is left to send.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Protected { socket, keys } = &mut *self;
        keys.end(socket.as_fd());
        Poll::Ready(rustix::net::shutdown(socket, rustix::net::Shutdown::Write).map_err(io::Error::from))
    }
}
