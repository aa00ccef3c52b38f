//! A connection of any kind for a task, which a shard may go on with.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::net::AddressFamily;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use super::protected::Protected;

/// The connection.
pub enum Stream {
    /// Within this host.
    Unix(UnixStream),
    /// In plain text.
    Tcp(TcpStream),
    /// By TLS.
    Protected(Protected),
}

trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

impl Stream {
    /// Takes a non-blocking connection.
    pub fn new(stream: weir_block::Stream) -> io::Result<Stream> {
        let fd = match stream {
            weir_block::Stream::Protected(fd, keys) => {
                return Protected::new(fd, keys).map(Stream::Protected);
            }
            plain => plain.into_fd()?,
        };
        if rustix::net::sockopt::socket_domain(&fd)? == AddressFamily::UNIX {
            UnixStream::from_std(fd.into()).map(Stream::Unix)
        } else {
            TcpStream::from_std(fd.into()).map(Stream::Tcp)
        }
    }

    fn io(&mut self) -> Pin<&mut dyn Io> {
        Pin::new(match self {
            Stream::Unix(stream) => stream,
            Stream::Tcp(stream) => stream,
            Stream::Protected(stream) => stream,
        })
    }

    /// The socket, for looks at it.
    pub fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Protected(stream) => stream.socket(),
        }
    }

    /// The connection for a shard.
    pub fn into_stream(self) -> io::Result<weir_block::Stream> {
        Ok(match self {
            Stream::Unix(stream) => OwnedFd::from(stream.into_std()?).into(),
            Stream::Tcp(stream) => OwnedFd::from(stream.into_std()?).into(),
            Stream::Protected(stream) => stream.into_stream()?,
        })
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.io().poll_read(context, target)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.io().poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io().poll_shutdown(context)
    }
}
