//! A link to the registry that can be cut: a node's data waits here until the link is open again, as in TCP. Neither side
//! gets an error.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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

/// Listens in the place of the registry, for one node.
#[derive(Debug)]
pub(crate) struct Relay {
    socket: PathBuf,
    to: Arc<Gate>,
    from: Arc<Gate>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
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
        let (to, from, ends) = (Arc::<Gate>::default(), Arc::<Gate>::default(), Arc::<AtomicBool>::default());
        let (gates, ending, registry) =
            ((Arc::clone(&to), Arc::clone(&from)), Arc::clone(&ends), registry.to_owned());
        let accept = move || {
            while let Ok((node, _)) = listener.accept() {
                if ending.load(Ordering::Relaxed) {
                    return;
                }
                // While there is no registry, the node is hung up on, and tries again.
                let Ok(registry) = UnixStream::connect(&registry) else { continue };
                if let Err(error) = forward(&node, &registry, &gates) {
                    tracing::warn!(%error, "a connection to the registry is not forwarded");
                }
            }
        };
        Ok(Relay { socket: socket.to_owned(), to, from, ends, thread: Some(thread::spawn(accept)) })
    }

    /// Holds everything back in one direction, or lets it go on.
    pub fn cut(&self, direction: Direction, cut: bool) {
        match direction {
            Direction::ToRegistry => self.to.set(cut),
            Direction::FromRegistry => self.from.set(cut),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        // A thread that waits at a gate must see that its connection has ended.
        self.to.set(false);
        self.from.set(false);
        let woken = UnixStream::connect(&self.socket);
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// Copies both ways until one side ends; then both have ended.
fn forward(node: &UnixStream, registry: &UnixStream, gates: &(Arc<Gate>, Arc<Gate>)) -> io::Result<()> {
    let ways = [(node, registry, &gates.0), (registry, node, &gates.1)];
    for (from, to, gate) in ways {
        let (from, to, gate) = (from.try_clone()?, to.try_clone()?, Arc::clone(gate));
        thread::spawn(move || {
            // A killed side may end with an error; the other side is closed in any case.
            let _ = copy(&from, &to, &gate);
            // The connection's end passes the gate like data: a closed gate holds it back, too.
            gate.pass();
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
    Ok(())
}

fn copy(mut from: &UnixStream, mut to: &UnixStream, gate: &Gate) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = from.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        gate.pass();
        to.write_all(&buffer[..length])?;
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
}
