//! The way between two nodes as something that can be slow: a relay in front of a node's port for replication.
//!
//! Each direction of a connection has a thread that reads and one that writes when it is time. The delay is that of one
//! direction; the bandwidth is that of each direction of each connection.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weir_block::Nanos;

/// Bytes that are read at once.
const PIECE: usize = 64 << 10;

/// Pieces in flight in one direction: beyond it the sender is pushed back.
const UNDER_WAY: usize = 64;

/// The faults of the link to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LinkFaults {
    /// Microseconds that each byte takes longer on its way to the node.
    pub delay_us: u64,
    /// Bytes per second; 0: no limit.
    pub bandwidth: u64,
}

/// A relay. It lives as long as its process.
#[derive(Clone, Debug)]
pub struct Relay {
    address: SocketAddr,
    faults: Arc<Mutex<LinkFaults>>,
}

impl Relay {
    /// Listens beside `target`, on the same address and a free port, and forwards every connection there.
    ///
    /// # Errors
    /// No port, or no thread, is available.
    pub fn start(target: SocketAddr) -> io::Result<Relay> {
        let listener = TcpListener::bind((target.ip(), 0))?;
        let relay = Relay { address: listener.local_addr()?, faults: Arc::default() };
        let faults = Arc::clone(&relay.faults);
        thread::Builder::new().name("lab-relay".into()).spawn(move || {
            for client in listener.incoming().flatten() {
                // A node that is not there (yet) hangs up; the client tries again.
                let forwarded =
                    TcpStream::connect(target).and_then(|server| forward(client, server, &faults));
                if let Err(error) = forwarded {
                    tracing::info!(%target, %error, "the relay cannot reach its target");
                }
            }
        })?;
        Ok(relay)
    }

    /// The address to connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// These faults from now on.
    pub fn set(&self, faults: LinkFaults) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }
}

fn forward(client: TcpStream, server: TcpStream, faults: &Arc<Mutex<LinkFaults>>) -> io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    for (from, to, to_the_node) in [(client.try_clone()?, server.try_clone()?, true), (server, client, false)]
    {
        let (sender, receiver) = sync_channel(UNDER_WAY);
        let faults = Arc::clone(faults);
        thread::Builder::new().name("lab-relay-in".into()).spawn(move || read(from, &sender))?;
        thread::Builder::new()
            .name("lab-relay-out".into())
            .spawn(move || write(to, &receiver, &faults, to_the_node))?;
    }
    Ok(())
}

/// Ends with the connection, and tells the writer by dropping the queue.
fn read(mut from: TcpStream, queue: &SyncSender<(Nanos, Vec<u8>)>) {
    let mut piece = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut piece) {
        if queue.send((Nanos::now(), piece[..count].to_vec())).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Read);
}

fn write(
    mut to: TcpStream,
    queue: &Receiver<(Nanos, Vec<u8>)>,
    faults: &Mutex<LinkFaults>,
    to_the_node: bool,
) {
    let mut free = Nanos(0);
    while let Ok((arrived, piece)) = queue.recv() {
        let LinkFaults { delay_us, bandwidth } = *faults.lock().unwrap_or_else(PoisonError::into_inner);
        let delay = if to_the_node { delay_us } else { 0 };
        let mut at = arrived + Duration::from_micros(delay);
        if let Some(nanos) = (piece.len() as u64 * 1_000_000_000).checked_div(bandwidth) {
            free = at.max(free) + Duration::from_nanos(nanos);
            at = free;
        }
        thread::sleep(at - Nanos::now());
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends back whatever comes, on each connection.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for mut one in listener.incoming().flatten() {
                thread::spawn(move || io::copy(&mut one.try_clone().unwrap(), &mut one));
            }
        });
        address
    }

    #[test]
    fn a_link_is_as_slow_as_it_is_told_to_be() {
        let relay = Relay::start(echo()).unwrap();
        let mut stream = TcpStream::connect(relay.address()).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut round = |bytes: usize| {
            let began = Nanos::now();
            let sent: Vec<u8> = (0..bytes).map(|n| n as u8).collect();
            let mut back = vec![0; bytes];
            stream.write_all(&sent).unwrap();
            stream.read_exact(&mut back).unwrap();
            assert_eq!(sent, back);
            Nanos::now() - began
        };
        round(1);
        relay.set(LinkFaults { delay_us: 20_000, bandwidth: 0 });
        assert!(round(1) >= Duration::from_millis(20));
        // 100 KiB there and back at 1 MiB/s: the two directions overlap.
        relay.set(LinkFaults { delay_us: 0, bandwidth: 1 << 20 });
        assert!(round(100 << 10) >= Duration::from_millis(95));
        relay.set(LinkFaults::default());
        round(100 << 10);
    }

    #[test]
    fn both_sides_learn_of_the_end() {
        let relay = Relay::start(echo()).unwrap();
        let mut stream = TcpStream::connect(relay.address()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    }
}
