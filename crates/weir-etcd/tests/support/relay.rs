//! A TCP relay that can be cut.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Listens on a port of its own and forwards to a target. While it is cut, it ends all connections.
pub struct Relay {
    pub port: u16,
    open: Arc<AtomicBool>,
    cut: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Relay {
    pub async fn to(target: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (open, cut) = (Arc::new(AtomicBool::new(true)), Arc::new(Notify::new()));
        let (is_open, is_cut) = (Arc::clone(&open), Arc::clone(&cut));
        let task = tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                if !is_open.load(Ordering::Relaxed) {
                    continue;
                }
                let is_cut = Arc::clone(&is_cut);
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        () = is_cut.notified() => {}
                    }
                });
            }
        });
        Relay { port, open, cut, task }
    }

    pub fn cut(&self) {
        self.open.store(false, Ordering::Relaxed);
        self.cut.notify_waiters();
    }

    pub fn mend(&self) {
        self.open.store(true, Ordering::Relaxed);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}
