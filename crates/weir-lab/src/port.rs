//! Ports for processes that end and start again.

use std::fs;
use std::io;
use std::net::{IpAddr, TcpListener};

use weir_block::Nanos;

/// Ports are sought from here on, so often.
const LEAST: u16 = 11_000;
const ATTEMPTS: usize = 64;

/// A port of `address` that is free at present, held until the listener is dropped. It is below those that the kernel gives to outgoing
/// connections and to listeners at port 0: one of those could have a process's port at the moment when it starts again.
///
/// # Errors
/// The address is not this host's.
pub fn free(address: IpAddr) -> io::Result<TcpListener> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first_given = range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(32768);
    let last = u16::max(first_given, LEAST + 1);
    // Another place each time: several processes may be looking.
    let mut random = fastrand::Rng::with_seed(Nanos::now().0);
    let mut error = io::ErrorKind::AddrInUse.into();
    for port in (0..ATTEMPTS).map(|_| random.u16(LEAST..last)).chain([0]) {
        match TcpListener::bind((address, port)) {
            Ok(listener) => return Ok(listener),
            Err(refused) => error = refused,
        }
    }
    Err(error)
}
