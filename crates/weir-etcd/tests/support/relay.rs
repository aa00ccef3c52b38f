//! A TCP relay that can be cut, and that delays what passes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// Listens on a port of its own and forwards to a target. While it is cut, it ends all connections.
pub struct Relay {
    pub port: u16,
    open: Arc<AtomicBool>,
    cut: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Relay {
    pub async fn to(target: SocketAddr) -> Relay {
        Relay::slow(target, Duration::ZERO).await
    }

    /// Each byte takes this long, in both directions.
    pub async fn slow(target: SocketAddr, delay: Duration) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (open, cut) = (Arc::new(AtomicBool::new(true)), Arc::new(Notify::new()));
        let (is_open, is_cut) = (Arc::clone(&open), Arc::clone(&cut));
        let task = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                if !is_open.load(Ordering::Relaxed) {
                    continue;
                }
                let is_cut = Arc::clone(&is_cut);
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(target).await else { return };
                    let ((from_client, to_client), (from_server, to_server)) =
                        (client.into_split(), server.into_split());
                    tokio::select! {
                        _ = async { tokio::join!(
                            pass(from_client, to_server, delay),
                            pass(from_server, to_client, delay),
                        ) } => {}
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

/// Passes bytes on, until the end of one side.
async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, delay: Duration) {
    let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(1024);
    let read = async {
        loop {
            let mut bytes = vec![0; 1 << 16];
            let Ok(count @ 1..) = from.read(&mut bytes).await else { break };
            bytes.truncate(count);
            if sender.send((Instant::now() + delay, bytes)).await.is_err() {
                break;
            }
        }
        drop(sender);
    };
    let write = async {
        while let Some((at, bytes)) = receiver.recv().await {
            sleep_until(at).await;
            if to.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _ = to.shutdown().await;
        // Nobody reads any more: the reader ends, too.
        drop(receiver);
    };
    tokio::join!(read, write);
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}
