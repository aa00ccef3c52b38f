//! NBD listeners. Handshakes run here, on the control plane, bounded in number and time; the shards see only clients that
//! have finished the handshake.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use weir_nbd::server::Directory;

use super::client::{AcceptedClient, Attach};
use super::negotiation::{End, shake_hands};
use super::secure;
use crate::handshakes::{Handshakes, Heard, Origin};

/// Connections that the kernel keeps until they are accepted (it caps this by `net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// Pause after the process has run out of descriptors or memory, before the next connection is accepted.
const BREATHER: Duration = Duration::from_millis(100);

/// Silence of a client after which the kernel asks its host whether it is there, pause until it asks again, and how often it does.
const SILENCE: Duration = Duration::from_secs(60);
const PROBE: Duration = Duration::from_secs(15);
const PROBES: u32 = 4;

/// The address to listen on.
#[derive(Clone, Debug)]
pub enum ListenAddress {
    /// A Unix socket, reachable for its owner only (mode 0600).
    Unix(PathBuf),
    /// TCP in plain text.
    Tcp {
        /// Address and port; port 0 takes a free one.
        address: SocketAddr,
        /// Allows an address that other hosts can reach. Any client there can read and write the disks, in plain text.
        beyond_loopback: bool,
    },
    /// TCP. TLS is required, and a client sees and opens only the exports that its certificate names.
    Tls {
        /// Address and port; port 0 takes a free one.
        address: SocketAddr,
        /// Which certificates are accepted. A client without one is refused even if this accepts it.
        config: Arc<ServerConfig>,
    },
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "nbd+unix:///?socket={}", path.display()),
            ListenAddress::Tcp { address, .. } => write!(f, "nbd://{address}"),
            ListenAddress::Tls { address, .. } => write!(f, "nbds://{address}"),
        }
    }
}

/// Limits of a listener (P10).
#[derive(Clone, Copy, Debug)]
pub struct ListenerConfig {
    /// Handshakes at once. For one more, the one ends from which nothing has come for the longest time, of the host or process that
    /// has the most.
    pub handshakes: usize,
    /// Time for a whole handshake.
    pub deadline: Duration,
}

impl Default for ListenerConfig {
    fn default() -> ListenerConfig {
        ListenerConfig { handshakes: 256, deadline: Duration::from_secs(10) }
    }
}

/// Why a listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process answers at the path.
    #[error("{}: another process listens there; stop it, or choose another path", .0.display())]
    InUse(PathBuf),
    /// Something that is not a socket is in the way.
    #[error("{}: not a socket; remove it, or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// Plain NBD beyond this host needs explicit permission.
    #[error(
        "{0} is reachable from other hosts, and NBD without TLS lets anybody who reaches it read and write the \
         disks; listen on a loopback address, or allow it expressly"
    )]
    BeyondLoopback(SocketAddr),
    /// The kernel refused.
    #[error("{address}: cannot {doing}: {source}")]
    Io {
        /// Where.
        address: ListenAddress,
        /// At what.
        doing: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

#[derive(Debug)]
enum Socket {
    Unix { listener: UnixListener, path: PathBuf },
    Tcp { listener: TcpListener, tls: Option<Arc<ServerConfig>> },
}

/// An open listener. Closes, and removes its Unix socket, when dropped.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    config: ListenerConfig,
}

impl Listener {
    /// Listens at `address`. A Unix socket without a listener is replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub async fn bind(address: &ListenAddress, config: ListenerConfig) -> Result<Listener, ListenError> {
        let failed = |doing| move |source| ListenError::Io { address: address.clone(), doing, source };
        let socket = match address {
            ListenAddress::Unix(path) => {
                clear_path(path).await?;
                let listener = bind_unix(path).map_err(failed("create the socket"))?;
                Socket::Unix { listener, path: path.clone() }
            }
            ListenAddress::Tcp { address, beyond_loopback } => {
                if !address.ip().is_loopback() && !beyond_loopback {
                    return Err(ListenError::BeyondLoopback(*address));
                }
                let listener = TcpListener::bind(*address).await.map_err(failed("listen"))?;
                Socket::Tcp { listener, tls: None }
            }
            ListenAddress::Tls { address, config } => {
                let listener = TcpListener::bind(*address).await.map_err(failed("listen"))?;
                Socket::Tcp { listener, tls: Some(Arc::clone(config)) }
            }
        };
        Ok(Listener { socket, config })
    }

    /// The TCP address, with the port that was taken.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        match &self.socket {
            Socket::Unix { .. } => None,
            Socket::Tcp { listener, .. } => listener.local_addr().ok(),
        }
    }

    /// Accepts clients until dropped; handshakes under way end with it.
    pub async fn run(self, directory: Arc<dyn Directory>, attach: Arc<dyn Attach>) {
        let mut handshakes = Handshakes::new(self.config.handshakes);
        loop {
            let (stream, origin) = match self.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "nbd: cannot accept a client");
                    tokio::time::sleep(BREATHER).await;
                    continue;
                }
            };
            let (directory, attach) = (Arc::clone(&directory), Arc::clone(&attach));
            let deadline = self.config.deadline;
            handshakes.start(origin, |heard| async move {
                let handshake = stream.shake_hands(&*directory, &*attach, heard);
                match tokio::time::timeout(deadline, handshake).await {
                    Ok(Ok(client)) => attach.attach(client),
                    Ok(Err(end)) => tracing::debug!(%end, "nbd: no session"),
                    Err(_) => tracing::debug!(?deadline, "nbd: handshake not finished in time"),
                }
            });
        }
    }

    async fn accept(&self) -> io::Result<(Stream, Origin)> {
        match &self.socket {
            Socket::Unix { listener, .. } => {
                let stream = listener.accept().await?.0;
                let process = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
                Ok((Stream::Unix(stream), Origin::Process(process)))
            }
            Socket::Tcp { listener, tls } => {
                let (stream, from) = listener.accept().await?;
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                let stream = match tls {
                    None => Stream::Tcp(stream),
                    Some(config) => Stream::Tls(stream, from, Arc::clone(config)),
                };
                Ok((stream, Origin::of(from.ip())))
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Socket::Unix { path, .. } = &self.socket {
            // The file may be removed already, which is as it should be.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes a socket that a process left behind. One that answers, or anything else, stays.
async fn clear_path(path: &Path) -> Result<(), ListenError> {
    let address = || ListenAddress::Unix(path.to_owned());
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(ListenError::Io { address: address(), doing: "look at the path", source }),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)
            .map_err(|source| ListenError::Io { address: address(), doing: "remove the old socket", source }),
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}

/// Creates the socket and only then accepts clients: between `bind` and `listen` its mode is set, so that no other user can
/// connect at any moment.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(path)?)?;
    rustix::fs::chmod(path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// The kernel finds out that the other host is gone, though no request is under way for days: the connection would take its place
/// for ever (P10).
///
/// # Errors
/// It is no TCP socket.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, PROBE)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_socket_keepalive(stream, true)?;
    Ok(())
}

/// A connection before its handshake.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    Tls(TcpStream, SocketAddr, Arc<ServerConfig>),
}

impl Stream {
    async fn shake_hands(
        self,
        directory: &dyn Directory,
        attach: &dyn Attach,
        heard: Heard,
    ) -> Result<AcceptedClient, End> {
        match self {
            Stream::Unix(stream) => shake_hands(stream, directory, heard).await,
            Stream::Tcp(stream) => shake_hands(stream, directory, heard).await,
            Stream::Tls(stream, from, config) => {
                secure::shake_hands((stream, from), config, directory, attach, heard).await
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_that_has_gone_is_found_out() {
        let address = ListenAddress::Tcp { address: ([127, 0, 0, 1], 0).into(), beyond_loopback: false };
        let listener = Listener::bind(&address, ListenerConfig::default()).await.unwrap();
        let _client = TcpStream::connect(listener.local_address().unwrap()).await.unwrap();
        let (Stream::Tcp(stream), _) = listener.accept().await.unwrap() else { panic!("TCP") };
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), SILENCE);
    }
}
