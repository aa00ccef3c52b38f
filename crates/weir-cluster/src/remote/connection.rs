//! The server's side of one client connection.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use weir_block::{Nanos, Throttle};

use super::frame::{FrameError, FrameReader, encode, write_frames};
use super::process::{Peer, Processes};
use super::protocol::{Answer, AnswerFrame, IdOnly, NO_REQUEST, Request, RequestFrame};
use crate::embedded::Embedded;
use crate::registry::{Listing, Registry, RegistryError, Watch};

/// Maximum number of requests of one connection in progress. Further ones stay in the socket.
const IN_FLIGHT: usize = 64;
/// Maximum number of watches of one connection.
const WATCHES: usize = 128;
/// Maximum number of queued answers for a slow client; when it is reached, its requests wait.
const ANSWERS: usize = 64;
/// Time limit for sending the last answers of a closing connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of keys and values in one part of a listing. A frame also has room for the largest entry.
const LISTING_PART: usize = 1 << 20;

/// One line a second about clients that break the protocol.
static HUNG_UP: Throttle = Throttle::new("registry-client-turned-away", Duration::from_secs(1));

#[derive(Clone)]
struct Connection {
    registry: Embedded,
    processes: Processes,
    peer: Option<Arc<Peer>>,
    answers: mpsc::Sender<Vec<u8>>,
}

/// Serves one client until it closes, breaks the protocol or the task is dropped.
pub(super) async fn serve(stream: UnixStream, registry: Embedded, processes: Processes) {
    let peer = Peer::of(&stream).map(Arc::new);
    let (read, write) = stream.into_split();
    let (answers, queue) = mpsc::channel(ANSWERS);
    let connection = Connection { registry, processes, peer, answers };
    let mut writing = std::pin::pin!(write_frames(write, queue));
    tokio::select! {
        () = connection.serve_requests(FrameReader::new(read)) => {
            // Queued answers are still sent, including the reason for closing. A client that does not read, or is disconnected,
            // delays this no longer than the timeout.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, writing).await;
        }
        // The client no longer reads: stop working for it.
        _ = &mut writing => {}
    }
}

impl Connection {
    async fn serve_requests(self, mut frames: FrameReader<tokio::net::unix::OwnedReadHalf>) {
        let room = Arc::new(Semaphore::new(IN_FLIGHT));
        let mut work = JoinSet::new();
        let mut watches: HashMap<u64, AbortHandle> = HashMap::new();
        loop {
            let permit = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
            while work.try_join_next().is_some() {}
            let frame = match frames.next().await {
                Ok(frame) => frame,
                Err(FrameError::Closed | FrameError::Broken(_)) => return,
                Err(error @ FrameError::TooLong(_)) => return self.hang_up(error.to_string()).await,
            };
            let RequestFrame { id, request } = match parse(frame) {
                Ok(request) => request,
                Err((Some(id), reason)) => {
                    self.answer(id, Answer::Error(RegistryError::malformed(reason))).await;
                    continue;
                }
                Err((None, reason)) => return self.hang_up(reason).await,
            };
            match request {
                Request::Watch { prefix, after_revision } => {
                    watches.retain(|_, task| !task.is_finished());
                    if watches.len() >= WATCHES {
                        let reason = format!("a connection has at most {WATCHES} watches; end some");
                        self.answer(id, Answer::Error(RegistryError::Full { reason })).await;
                        continue;
                    }
                    let watch = self.clone().watch(id, prefix, after_revision);
                    watches.insert(id, work.spawn(watch));
                }
                Request::Unwatch { watch } => {
                    if let Some(task) = watches.remove(&watch) {
                        task.abort();
                    }
                    self.answer(id, Answer::Done).await;
                }
                request => {
                    let connection = self.clone();
                    work.spawn(async move {
                        connection.handle(id, request).await;
                        drop(permit);
                    });
                }
            }
        }
    }

    async fn hang_up(&self, reason: String) {
        if let Some(left_out) = HUNG_UP.pass(Nanos::now()) {
            tracing::warn!(reason, left_out, "closing a connection to the registry");
        }
        self.answer(NO_REQUEST, Answer::Error(RegistryError::malformed(reason))).await;
    }

    async fn answer(&self, id: u64, answer: Answer) {
        let frame = encode(&AnswerFrame { id, answer }).unwrap_or_else(|| {
            let reason = "the answer is longer than a frame; delete large values".to_owned();
            let answer = Answer::Error(RegistryError::Full { reason });
            encode(&AnswerFrame { id, answer }).expect("a short error fits")
        });
        // A send fails only while the connection is being dropped.
        let _ = self.answers.send(frame).await;
    }

    async fn handle(&self, id: u64, request: Request) {
        let answer = match self.ask(id, request).await {
            Ok(Some(answer)) => answer,
            Ok(None) => return,
            Err(error) => Answer::Error(error),
        };
        self.answer(id, answer).await;
    }

    /// The last answer to the request; `None` when all answers were sent.
    async fn ask(&self, id: u64, request: Request) -> Result<Option<Answer>, RegistryError> {
        let registry = &self.registry;
        Ok(Some(match request {
            Request::Get { key } => Answer::Entry(registry.get(&key).await?),
            Request::List { prefix } => {
                self.answer_listing(id, registry.list(&prefix).await?).await;
                return Ok(None);
            }
            Request::Transact { transaction } => Answer::Committed(registry.transact(transaction).await?),
            Request::Grant { ttl_ms } => Answer::Lease(registry.grant(Duration::from_millis(ttl_ms)).await?),
            Request::KeepAlive { lease } => {
                let ttl = registry.keep_alive(lease).await?;
                Answer::TtlMs(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))
            }
            Request::Revoke { lease } => {
                registry.revoke(lease).await?;
                Answer::Done
            }
            Request::RegisterProcess { name, incarnation, lease } => {
                registry.keep_alive(lease).await?;
                let watched = self.processes.register(self.peer.as_deref(), name, incarnation, lease).await?;
                Answer::Process(watched)
            }
            // Handled with the watches.
            Request::Watch { .. } | Request::Unwatch { .. } => return Ok(None),
        }))
    }

    async fn answer_listing(&self, id: u64, listing: Listing) {
        let revision = listing.revision;
        let (mut part, mut bytes) = (Vec::new(), 0);
        for entry in listing.entries {
            let size = entry.key.len() + entry.value.len();
            if bytes + size > LISTING_PART && !part.is_empty() {
                let entries = std::mem::take(&mut part);
                self.answer(id, Answer::Listing { entries, revision, more: true }).await;
                bytes = 0;
            }
            bytes += size;
            part.push(entry);
        }
        self.answer(id, Answer::Listing { entries: part, revision, more: false }).await;
    }

    async fn watch(self, id: u64, prefix: String, after_revision: u64) {
        let error = match self.registry.watch(&prefix, after_revision).await {
            Ok(watch) => {
                self.answer(id, Answer::Watching).await;
                self.forward(id, watch).await
            }
            Err(error) => error,
        };
        self.answer(id, Answer::Error(error)).await;
    }

    /// Forwards changes until the watch ends. A slow client fills its queue of answers, then the watch's, and then has to list
    /// again.
    async fn forward(&self, id: u64, mut watch: Watch) -> RegistryError {
        loop {
            match watch.next_batch().await {
                Ok(batch) => self.answer(id, Answer::Changes(batch)).await,
                Err(error) => return error,
            }
        }
    }
}

/// The request in a frame, or the error with the request's id if known.
fn parse(frame: &[u8]) -> Result<RequestFrame, (Option<u64>, String)> {
    let error = match serde_json::from_slice::<RequestFrame>(frame) {
        Ok(request) if request.id != NO_REQUEST => return Ok(request),
        Ok(_) => return Err((None, format!("a request's id is above {NO_REQUEST}"))),
        Err(error) => error,
    };
    let id =
        serde_json::from_slice::<IdOnly>(frame).ok().map(|frame| frame.id).filter(|id| *id != NO_REQUEST);
    Err((id, format!("not a request of the registry: {error}")))
}
