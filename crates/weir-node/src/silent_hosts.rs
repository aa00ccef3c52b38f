//! Connections to hosts that have become silent: the network between was cut, or the host died without a word.
//!
//! TCP sends again for some 15 minutes what nobody acknowledges. A limit in the kernel (`TCP_USER_TIMEOUT`, RFC 5482) would also end
//! connections to hosts that live and read nothing for a while, so this asks the kernel what the other host has acknowledged.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, sockopt};

/// Pause between two looks at a connection.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Probes without an answer after which an idle connection has ended.
const PROBES: u32 = 3;

/// The longest pause between two attempts of the kernel to send something, in milliseconds, at least 1,000 (Linux 6.15,
/// `include/uapi/linux/tcp.h`). Without it, probes of a closed window become as rare as one in two minutes.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// The kernel probes the other host while nothing is on its way to it, and ends the connection about `limit` after its last sign of life.
///
/// # Errors
/// The system refuses the options of a TCP socket.
pub fn probe_when_idle(socket: BorrowedFd<'_>, limit: Duration) -> io::Result<()> {
    if sockopt::socket_domain(socket)? == AddressFamily::UNIX {
        return Ok(());
    }
    let pause = limit / (PROBES + 1);
    sockopt::set_tcp_keepidle(socket, pause)?;
    sockopt::set_tcp_keepintvl(socket, pause)?;
    sockopt::set_tcp_keepcnt(socket, PROBES)?;
    sockopt::set_socket_keepalive(socket, true)?;
    let longest = i32::try_from(pause.as_millis()).unwrap_or(i32::MAX).max(1000);
    match set(socket, TCP_RTO_MAX_MS, longest) {
        // An older kernel: see `is_silent`.
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
        set => set,
    }
}

/// Whether the other host has acknowledged nothing for `limit`, while something waits for its acknowledgement. A host that lives and reads
/// nothing acknowledges what it has received, and probes of its window: those are often enough after [`probe_when_idle`], and on an older
/// kernel two of them have to be without an answer, which takes up to three times as long as the window has been closed.
#[must_use]
pub fn is_silent(socket: BorrowedFd<'_>, limit: Duration) -> bool {
    let Ok(info) = tcp_info(socket) else { return false };
    let probes_often =
        || get(socket, TCP_RTO_MAX_MS).is_ok_and(|most| i128::from(most) * 2 < limit.as_millis() as i128);
    // A first probe may be on its way just now.
    let waits =
        info.tcpi_unacked > 0 || info.tcpi_probes > 1 || info.tcpi_notsent_bytes > 0 && probes_often();
    waits && Duration::from_millis(info.tcpi_last_ack_recv.into()) >= limit
}

fn set(socket: BorrowedFd<'_>, option: libc::c_int, value: i32) -> io::Result<()> {
    let length = size_of::<i32>() as libc::socklen_t;
    let value = (&raw const value).cast::<c_void>();
    // SAFETY: `value` has `length` bytes, and lives until the call returns.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, value, length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn get(socket: BorrowedFd<'_>, option: libc::c_int) -> io::Result<i32> {
    let (mut value, mut length) = (0_i32, size_of::<i32>() as libc::socklen_t);
    let target = (&raw mut value).cast::<c_void>();
    // SAFETY: `value` has room for `length` bytes; both live until the call returns.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, target, &raw mut length) };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

fn tcp_info(socket: BorrowedFd<'_>) -> io::Result<libc::tcp_info> {
    // SAFETY: a structure of integers, for which zeroes are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` has room for `length` bytes, of which an older kernel fills fewer; both live until the call returns.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast::<c_void>(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::thread::sleep;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(4);

    /// The other program reads nothing, and its host lives: a slow client must not be cut, by whichever way this kernel probes it.
    #[test]
    fn a_host_that_reads_nothing_is_not_silent() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        for (probes, limit) in [(true, LIMIT), (false, LIMIT / 8)] {
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let _unread = listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            if probes {
                probe_when_idle(stream.as_fd(), limit).unwrap();
            }
            while stream.write(&[0; 1 << 16]).is_ok() {}
            for _ in 0..30 {
                sleep(LIMIT / 20);
                assert!(!is_silent(stream.as_fd(), limit));
            }
            let info = tcp_info(stream.as_fd()).unwrap();
            assert!(probes || info.tcpi_last_ack_recv > 500, "{} ms", info.tcpi_last_ack_recv);
        }
    }

    #[test]
    fn an_idle_connection_is_probed() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        probe_when_idle(stream.as_fd(), Duration::from_secs(20)).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), Duration::from_secs(5));
        assert!(!is_silent(stream.as_fd(), Duration::ZERO), "nothing waits for it");
    }

    /// Connections within a host have no silence.
    #[test]
    fn a_unix_socket_is_never_silent() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        probe_when_idle(one.as_fd(), Duration::from_secs(20)).unwrap();
        assert!(!is_silent(one.as_fd(), Duration::ZERO));
    }
}
