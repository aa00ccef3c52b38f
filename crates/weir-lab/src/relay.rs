//! A link to the registry that can be cut: a node's data waits here until the link is open again, as in TCP. Neither side
//! gets an error. [`Relay::hang_up`] ends connections instead.
//!
//! The embedded registry is reached at a Unix socket, a member of etcd at an address of TCP.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

/// Lets bytes pass, or holds them back.
#[derive(Debug, Default)]
struct Gate {
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn shut(&self) -> MutexGuard<'_, bool> {
        self.shut.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, shut: bool) {
        *self.shut() = shut;
        self.opened.notify_all();
    }

    /// Waits until it is open.
    fn pass(&self) {
        let waited = self.opened.wait_while(self.shut(), |shut| *shut);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// The direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the node.
    ToRegistry,
    /// To the node.
    FromRegistry,
}

/// A connection of either kind.
trait Connection: Send + Sync + 'static {
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize>;

    fn send(&self, bytes: &[u8]) -> io::Result<()>;

    /// Ends it in both directions; one that has ended stays so.
    fn end(&self);
}

impl Connection for UnixStream {
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self;
        stream.read(buffer)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = self;
        stream.write_all(bytes)
    }

    fn end(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

impl Connection for TcpStream {
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self;
        stream.read(buffer)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = self;
        stream.write_all(bytes)
    }

    fn end(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

/// The two halves of a forwarded connection.
struct Pair<C> {
    node: C,
    registry: C,
}

/// A forwarded connection that can be ended.
trait End: Send + Sync {
    fn end(&self);
}

impl<C: Connection> End for Pair<C> {
    fn end(&self) {
        self.node.end();
        self.registry.end();
    }
}

/// The state that a relay shares with its threads.
#[derive(Default)]
struct Shared {
    to: Gate,
    from: Gate,
    ends: AtomicBool,
    connections: Mutex<Vec<Weak<dyn End>>>,
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Vec<Weak<dyn End>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Listens in the place of the registry, for one node.
pub(crate) struct Relay {
    shared: Arc<Shared>,
    /// Connects once more, so that the accepting thread sees that it has to end.
    wake: Box<dyn Fn() -> bool + Send + Sync>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Relay").field("to", &self.shared.to).field("from", &self.shared.from).finish()
    }
}

impl Relay {
    /// Forwards connections at `socket` to `registry`.
    ///
    /// # Errors
    /// The socket is not available.
    pub fn listen(socket: &Path, registry: &Path) -> io::Result<Relay> {
        // A former lab's.
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(socket)?;
        let (socket, registry) = (socket.to_owned(), registry.to_owned());
        let accept = move || listener.accept().map(|(node, _)| node);
        let connect = move || UnixStream::connect(&registry);
        Ok(Relay::start(accept, connect, move || UnixStream::connect(&socket).is_ok()))
    }

    /// Forwards connections at `listener`, which may be in another network namespace, to `member`. `wake` connects to the listener.
    pub fn listen_tcp(
        listener: TcpListener,
        member: SocketAddr,
        wake: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Relay {
        // Messages of a few bytes must not wait for more.
        let prompt = |stream: TcpStream| stream.set_nodelay(true).map(|()| stream);
        let accept = move || listener.accept().and_then(|(node, _)| prompt(node));
        Relay::start(accept, move || TcpStream::connect(member).and_then(prompt), wake)
    }

    fn start<C: Connection>(
        accept: impl Fn() -> io::Result<C> + Send + 'static,
        connect: impl Fn() -> io::Result<C> + Send + 'static,
        wake: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Relay {
        let shared = Arc::<Shared>::default();
        let sharing = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while let Ok(node) = accept() {
                if sharing.ends.load(Ordering::Relaxed) {
                    return;
                }
                // While there is no registry, the node is hung up on, and tries again.
                let Ok(registry) = connect() else { continue };
                forward(Pair { node, registry }, &sharing);
            }
        });
        Relay { shared, wake: Box::new(wake), thread: Some(thread) }
    }

    /// Holds everything back in one direction, or lets it go on.
    pub fn cut(&self, direction: Direction, cut: bool) {
        match direction {
            Direction::ToRegistry => self.shared.to.set(cut),
            Direction::FromRegistry => self.shared.from.set(cut),
        }
    }

    /// Ends all connections. What waits at a gate is lost.
    pub fn hang_up(&self) {
        for connection in self.shared.connections().drain(..).filter_map(|connection| connection.upgrade()) {
            connection.end();
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        // A thread that waits at a gate must see that its connection has ended.
        self.shared.to.set(false);
        self.shared.from.set(false);
        if let (true, Some(thread)) = ((self.wake)(), self.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// Copies both ways until one side ends; then both have ended.
fn forward<C: Connection>(pair: Pair<C>, shared: &Arc<Shared>) {
    let pair = Arc::new(pair);
    let known: Arc<dyn End> = Arc::clone(&pair) as Arc<dyn End>;
    let mut connections = shared.connections();
    connections.retain(|connection| connection.strong_count() > 0);
    connections.push(Arc::downgrade(&known));
    drop(connections);
    for direction in [Direction::ToRegistry, Direction::FromRegistry] {
        let (pair, shared) = (Arc::clone(&pair), Arc::clone(shared));
        thread::spawn(move || {
            let (from, to, gate) = match direction {
                Direction::ToRegistry => (&pair.node, &pair.registry, &shared.to),
                Direction::FromRegistry => (&pair.registry, &pair.node, &shared.from),
            };
            // A killed side may end with an error; the other side is closed in any case.
            let _ = copy(from, to, gate);
            // The connection's end passes the gate like data: a closed gate holds it back, too.
            gate.pass();
            pair.end();
        });
    }
}

fn copy<C: Connection>(from: &C, to: &C, gate: &Gate) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = from.receive(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        gate.pass();
        to.send(&buffer[..length])?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_cut_waits_and_is_not_lost() {
        let directory = tempfile::tempdir().unwrap();
        let (here, there) = (directory.path().join("here"), directory.path().join("there"));
        let registry = UnixListener::bind(&there).unwrap();
        let relay = Relay::listen(&here, &there).unwrap();
        let mut node = UnixStream::connect(&here).unwrap();
        let (mut served, _) = registry.accept().unwrap();
        let mut byte = [0];
        node.write_all(b"a").unwrap();
        served.read_exact(&mut byte).unwrap();

        relay.cut(Direction::ToRegistry, true);
        node.write_all(b"b").unwrap();
        served.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(served.read_exact(&mut byte).is_err(), "nothing comes through");
        // The other way is free.
        served.write_all(b"c").unwrap();
        node.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"c");

        relay.cut(Direction::ToRegistry, false);
        served.set_read_timeout(None).unwrap();
        served.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"b");
        drop(node);
        assert_eq!(served.read(&mut byte).unwrap(), 0, "the end is passed on");
    }
    #[test]
    fn a_member_of_etcd_is_reached_by_tcp_and_a_node_is_hung_up_on() {
        let member = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let wake = move || TcpStream::connect(here).is_ok();
        let relay = Relay::listen_tcp(listener, member.local_addr().unwrap(), wake);
        let mut byte = [0];
        for _ in 0..2 {
            let mut node = TcpStream::connect(here).unwrap();
            let (mut served, _) = member.accept().unwrap();
            node.write_all(b"a").unwrap();
            served.read_exact(&mut byte).unwrap();
            // A shut gate does not hold this back.
            relay.cut(Direction::FromRegistry, true);
            relay.hang_up();
            assert_eq!(node.read(&mut byte).unwrap(), 0);
            assert_eq!(served.read(&mut byte).unwrap(), 0);
            relay.cut(Direction::FromRegistry, false);
        }
    }
}
