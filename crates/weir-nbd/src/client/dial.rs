//! From a URI to a connected socket whose export takes requests; or only to what a server says of itself. Everything here blocks, and ends
//! within a time limit however the server behaves.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use weir_block::Nanos;

use super::error::NbdError;
use super::handshake::{Export, NegotiationError, Wishes, list, negotiate};
use crate::protocol::option_reply;
use crate::uri::{Address, Uri};

/// A host that has gone without a word is noticed after about as long while nothing is on its way to it; else by whoever waits for an
/// answer. A limit for what is on its way (`TCP_USER_TIMEOUT`) would also end connections to servers that live and read nothing for a while.
const GONE_AFTER: Duration = Duration::from_secs(10);

/// A connection whose handshake is over, for any thread.
#[derive(Debug)]
pub struct Dialed {
    pub(super) address: Address,
    pub(super) socket: OwnedFd,
    pub(super) export: Export,
}

impl Dialed {
    /// Connects to an export. Ends after `limit`; the resolution of a host's name takes as long as the system's resolver allows.
    ///
    /// # Errors
    /// The server cannot be reached, refuses the export, does not speak NBD, or takes longer than `limit`.
    pub fn dial(
        uri: &Uri,
        structured_replies: bool,
        extended_headers: bool,
        limit: Duration,
    ) -> Result<Dialed, NbdError> {
        let wishes = Wishes { structured_replies, extended_headers: structured_replies && extended_headers };
        let mut stream = Timed::connect(&uri.address, limit)?;
        let export = negotiate(&mut stream, &uri.export, wishes).map_err(|failure| describe(failure, uri))?;
        Ok(Dialed { address: uri.address.clone(), socket: stream.socket, export })
    }

    /// The server's description of the export.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }
}

/// The names of a server's exports, as far as it lists them; `None` if it does not. Ends after `limit`, as [`Dialed::dial`].
///
/// # Errors
/// The server cannot be reached, does not speak NBD, takes longer than `limit`, or has more names than 1 MiB holds.
pub fn list_exports(address: &Address, limit: Duration) -> Result<Option<Vec<String>>, NbdError> {
    let mut stream = Timed::connect(address, limit)?;
    let uri = Uri { address: address.clone(), export: String::new() };
    list(&mut stream).map_err(|failure| describe(failure, &uri))
}

/// A blocking socket with a time for all of its reads and writes together.
struct Timed {
    socket: OwnedFd,
    until: Nanos,
}

impl Timed {
    fn connect(address: &Address, limit: Duration) -> Result<Timed, NbdError> {
        let until = Nanos::now() + limit;
        let connected = match address {
            Address::Tcp { host, port } => connect_tcp(host, *port, until),
            Address::Unix(path) => connect_unix(path, limit),
        };
        let socket = connected.map_err(|source| NbdError::Connect { address: address.clone(), source })?;
        Ok(Timed { socket, until })
    }

    /// Waits no longer than the rest of the time.
    fn limit(&self, which: sockopt::Timeout) -> io::Result<()> {
        let left = self.until - Nanos::now();
        if left.is_zero() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(sockopt::set_socket_timeout(&self.socket, which, Some(left.max(Duration::from_millis(1))))?)
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.limit(sockopt::Timeout::Recv)?;
        Ok(rustix::io::read(&self.socket, buffer)?)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit(sockopt::Timeout::Send)?;
        Ok(rustix::net::send(&self.socket, bytes, rustix::net::SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where a server listens. Two addresses that have one in common lead to one server; one that listens at several is not known by that.
#[derive(Debug, PartialEq, Eq)]
pub enum Place {
    /// At this address.
    Tcp(SocketAddr),
    /// The socket's filesystem and number there: it may have several names.
    Unix(u64, u64),
}

/// Where an address leads to, as this host resolves it now. Blocks.
///
/// # Errors
/// The name cannot be resolved, or the socket is not there.
pub fn places(address: &Address) -> io::Result<Vec<Place>> {
    Ok(match address {
        Address::Tcp { host, port } => {
            (host.as_str(), *port).to_socket_addrs()?.map(|address| Place::Tcp(canonical(address))).collect()
        }
        Address::Unix(path) => {
            let found = path.metadata()?;
            vec![Place::Unix(found.dev(), found.ino())]
        }
    })
}

/// An address of IPv4 that is written as one of IPv6 is the same. A client of the unspecified address reaches the loopback.
fn canonical(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip().to_canonical() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn connect_tcp(host: &str, port: u16, until: Nanos) -> io::Result<OwnedFd> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        let left = until - Nanos::now();
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                notice_silence(&stream)?;
                return Ok(stream.into());
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A server that accepts nothing lets its callers wait: not without a limit.
fn connect_unix(path: &Path, limit: Duration) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(limit))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The kernel ends the connection to a host that does not answer any more.
fn notice_silence(socket: impl AsFd) -> io::Result<()> {
    let probe = GONE_AFTER / 4;
    sockopt::set_tcp_keepidle(&socket, probe)?;
    sockopt::set_tcp_keepintvl(&socket, probe)?;
    sockopt::set_tcp_keepcnt(&socket, 3)?;
    Ok(sockopt::set_socket_keepalive(&socket, true)?)
}

fn describe(failure: NegotiationError, uri: &Uri) -> NbdError {
    let address = uri.address.clone();
    match failure {
        NegotiationError::Protocol(what) => NbdError::Protocol(what),
        NegotiationError::Refused { reply, reason } => {
            let export = uri.export.clone();
            NbdError::Refused { address, export, is_unknown: reply == option_reply::ERR_UNKNOWN, reason }
        }
        NegotiationError::NoTls { reason } => {
            NbdError::Refused { address, export: uri.export.clone(), is_unknown: false, reason }
        }
        NegotiationError::Io(source) => {
            let source = match source.kind() {
                io::ErrorKind::WouldBlock => {
                    io::Error::new(io::ErrorKind::TimedOut, "no answer to the handshake")
                }
                io::ErrorKind::UnexpectedEof => io::Error::new(source.kind(), "closed during the handshake"),
                _ => source,
            };
            NbdError::Connect { address, source }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.into(), port }
    }

    #[test]
    fn a_server_is_known_by_other_names() {
        let same = |one: &Address, other: &Address| {
            let others = places(other).unwrap();
            places(one).unwrap().iter().any(|place| others.contains(place))
        };
        assert!(same(&tcp("localhost", 10809), &tcp("127.0.0.1", 10809)));
        assert!(same(&tcp("127.1", 10809), &tcp("127.0.0.1", 10809)));
        assert!(same(&tcp("::ffff:127.0.0.1", 10809), &tcp("127.0.0.1", 10809)));
        assert!(same(&tcp("0.0.0.0", 10809), &tcp("127.0.0.1", 10809)));
        assert!(same(&tcp("0", 10809), &tcp("127.0.0.1", 10809)));
        assert!(same(&tcp("::", 10809), &tcp("::1", 10809)));
        assert!(!same(&tcp("127.0.0.2", 10809), &tcp("127.0.0.1", 10809)));
        assert!(!same(&tcp("localhost", 10810), &tcp("127.0.0.1", 10809)));

        let directory = tempfile::tempdir().unwrap();
        let (socket, link) = (directory.path().join("socket"), directory.path().join("link"));
        std::fs::write(&socket, "").unwrap();
        symlink(&socket, &link).unwrap();
        let hard = directory.path().join("hard");
        std::fs::hard_link(&socket, &hard).unwrap();
        assert!(same(&Address::Unix(socket.clone()), &Address::Unix(hard)));
        assert!(same(&Address::Unix(socket.clone()), &Address::Unix(link)));
        assert!(!same(&Address::Unix(socket.clone()), &tcp("localhost", 10809)));
        places(&Address::Unix(directory.path().join("other"))).unwrap_err();
    }
}
