//! The handshake of one client, as a task, over any kind of stream.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use weir_nbd::protocol::TlsMode;
use weir_nbd::server::{Directory, HandshakeError, Session, Step, TlsHandshake, TlsStep};

use super::client::AcceptedClient;
use crate::handshakes::Heard;

/// Why a handshake ended without a session.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the client said goodbye")]
    Aborted,
    #[error("the client disconnected")]
    Disconnected,
    #[error(transparent)]
    Refused(#[from] HandshakeError),
    #[error("{0}")]
    Untrusted(String),
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
}

/// How far client and server have come.
#[derive(Debug)]
pub(super) enum Agreed {
    /// The TLS handshake follows.
    Tls,
    /// Transmission follows.
    Session(Session),
}

/// A plain connection.
pub(super) trait Plain: AsyncRead + AsyncWrite + Unpin {
    /// The descriptor, still non-blocking.
    fn into_fd(self) -> io::Result<OwnedFd>;
}

impl Plain for UnixStream {
    fn into_fd(self) -> io::Result<OwnedFd> {
        self.into_std().map(OwnedFd::from)
    }
}

impl Plain for TcpStream {
    fn into_fd(self) -> io::Result<OwnedFd> {
        self.into_std().map(OwnedFd::from)
    }
}

/// The handshake of a client in plain text.
pub(super) async fn shake_hands<S: Plain>(
    stream: S,
    directory: &dyn Directory,
    heard: Heard,
) -> Result<AcceptedClient, End> {
    let mut out = Vec::new();
    let mut handshake = TlsHandshake::new(TlsMode::Off, &mut out);
    let mut stream = Noted { stream, heard };
    match negotiate(&mut stream, &mut handshake, directory, &mut out).await? {
        Agreed::Session(session) => {
            let (stream, leftover) = (stream.stream.into_fd()?.into(), handshake.into_leftover());
            Ok(AcceptedClient { stream, leftover, session, via: None })
        }
        Agreed::Tls => Err(io::Error::other("TLS begins where it was not offered").into()),
    }
}

/// Exchanges messages up to an agreement. What `out` holds is sent first, and it is empty afterwards.
pub(super) async fn negotiate<S>(
    stream: &mut S,
    handshake: &mut TlsHandshake,
    directory: &dyn Directory,
    out: &mut Vec<u8>,
) -> Result<Agreed, End>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // On the heap: the future of an idle client would otherwise carry it.
    let mut buffer = vec![0; 4096];
    loop {
        send(stream, out).await?;
        let agreed = match handshake.step(directory, out) {
            TlsStep::Negotiation(Step::Continue) => continue,
            TlsStep::Negotiation(Step::NeedMore) => {
                match stream.read(&mut buffer).await? {
                    0 => return Err(End::Disconnected),
                    length => handshake.receive(&buffer[..length]),
                }
                continue;
            }
            TlsStep::Negotiation(Step::Aborted) => {
                goodbye(stream, out).await;
                return Err(End::Aborted);
            }
            TlsStep::Negotiation(Step::Refused(error)) => {
                goodbye(stream, out).await;
                return Err(error.into());
            }
            TlsStep::Negotiation(Step::Attach(session)) => Agreed::Session(session),
            TlsStep::StartTls => Agreed::Tls,
        };
        send(stream, out).await?;
        return Ok(agreed);
    }
}

async fn send<S: AsyncWrite + Unpin>(stream: &mut S, out: &mut Vec<u8>) -> io::Result<()> {
    stream.write_all(out).await?;
    out.clear();
    stream.flush().await
}

/// Sends the last words. The client may be gone already ("the server SHOULD gracefully handle the client sending an
/// `NBD_OPT_ABORT` and closing the connection without waiting for a reply").
async fn goodbye<S: AsyncWrite + Unpin>(stream: &mut S, words: &mut Vec<u8>) {
    let _ = send(stream, words).await;
    let _ = stream.shutdown().await;
}

/// A stream that notes when something has come: bytes of the TLS handshake count, too.
#[derive(Debug)]
pub(super) struct Noted<S> {
    pub stream: S,
    pub heard: Heard,
}

impl<S: AsyncRead + Unpin> AsyncRead for Noted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = target.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, target))?;
        if target.filled().len() > before {
            self.heard.note();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Noted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
