//! One address for a disk, wherever it is: clients that reconnect only to where they were find it there.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use weir_block::Nanos;
use weir_load::verifying::Locate;
use weir_nbd::{Address, Uri};

use crate::common::SOON;

/// Forwards every connection to the node that has the disk at that moment.
pub struct Relay {
    socket: PathBuf,
    ends: Arc<AtomicBool>,
    forwarded: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Listens at `socket`.
    pub fn listen(socket: &Path, mut locate: Locate) -> Relay {
        let listener = UnixListener::bind(socket).unwrap();
        let (ends, forwarded) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (ending, count) = (Arc::clone(&ends), Arc::clone(&forwarded));
        let accept = move || {
            while let Ok((client, _)) = listener.accept() {
                if ending.load(Ordering::Relaxed) {
                    return;
                }
                // A relay that finds no disk hangs up, and the client tries again.
                let Some(server) = connect(&mut locate, &ending) else { continue };
                count.fetch_add(1, Ordering::Relaxed);
                forward(client, server).unwrap();
            }
        };
        Relay { socket: socket.into(), ends, forwarded, thread: Some(thread::spawn(accept)) }
    }

    /// The disk's address.
    pub fn uri(&self, disk: &str) -> String {
        Uri::unix(&self.socket, disk).to_string()
    }

    /// Connections that reached a node so far.
    pub fn forwarded(&self) -> usize {
        self.forwarded.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let woken = UnixStream::connect(&self.socket);
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// A connection to where the disk is, as soon as it is somewhere.
fn connect(locate: &mut Locate, ending: &AtomicBool) -> Option<UnixStream> {
    let deadline = Nanos::now() + SOON;
    let mut attempt = 0;
    while Nanos::now() < deadline && !ending.load(Ordering::Relaxed) {
        if let Some(Uri { address: Address::Unix(socket), .. }) = locate(attempt)
            && let Ok(server) = UnixStream::connect(socket)
        {
            return Some(server);
        }
        attempt += 1;
        thread::sleep(Duration::from_millis(20));
    }
    None
}

/// Copies both ways until one side ends; then both have ended.
fn forward(client: UnixStream, server: UnixStream) -> io::Result<()> {
    for (mut from, mut to) in
        [(client.try_clone()?, server.try_clone()?), (server.try_clone()?, client.try_clone()?)]
    {
        thread::spawn(move || {
            // A killed side may end with an error; the other side is closed in any case.
            let _ = io::copy(&mut from, &mut to);
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
    Ok(())
}
