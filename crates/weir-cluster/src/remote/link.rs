//! The client's connection: connects, pipelines calls, distributes changes to watches, reconnects.

use std::collections::HashMap;
use std::path::PathBuf;

use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use super::config::ClientConfig;
use super::frame::{FrameReader, encode, write_frames};
use super::protocol::{Answer, AnswerFrame, NO_REQUEST, Request, RequestFrame};
use crate::registry::{Batch, Delivery, Entry, RegistryError, WatchSink};

/// Maximum number of calls in flight. Also bounds the data to write, so that the writer's queue needs no bound: a blocking queue
/// would stop the link from reading, and then the server from answering.
const IN_FLIGHT: usize = 256;

pub(super) type Ready = oneshot::Sender<Result<(), RegistryError>>;

/// A command to the link.
#[derive(Debug)]
pub(super) enum Command {
    Call { request: Request, reply: oneshot::Sender<Result<Answer, RegistryError>> },
    Watch { prefix: String, after_revision: u64, sink: WatchSink, ready: Ready },
}

struct Call {
    request: Request,
    /// The parts of a listing so far.
    parts: Vec<Entry>,
    reply: oneshot::Sender<Result<Answer, RegistryError>>,
}

struct Following {
    prefix: String,
    /// Everything up to this revision was delivered; the watch resumes here.
    seen: u64,
    sink: WatchSink,
    /// Notified when the watch has begun.
    ready: Option<Ready>,
}

/// The reason why a connection ended.
enum End {
    /// The connection is lost; reconnect.
    Lost(String),
    /// All clients were dropped.
    Unused,
}

type Outgoing = mpsc::UnboundedSender<Vec<u8>>;

pub(super) struct Link {
    path: PathBuf,
    config: ClientConfig,
    commands: mpsc::Receiver<Command>,
    calls: HashMap<u64, Call>,
    watches: HashMap<u64, Following>,
    last_id: u64,
    /// The current connection has answered at least once.
    answered: bool,
}

impl Link {
    pub fn new(path: PathBuf, config: ClientConfig, commands: mpsc::Receiver<Command>) -> Link {
        Link {
            path,
            config,
            commands,
            calls: HashMap::new(),
            watches: HashMap::new(),
            last_id: NO_REQUEST,
            answered: false,
        }
    }

    /// Runs until the last client is dropped.
    pub async fn run(mut self) {
        let mut pause = self.config.backoff_min;
        loop {
            let reason = match UnixStream::connect(&self.path).await {
                Err(error) => error.to_string(),
                Ok(stream) => match self.converse(stream).await {
                    End::Unused => return,
                    End::Lost(reason) => reason,
                },
            };
            if std::mem::take(&mut self.answered) {
                tracing::warn!(path = %self.path.display(), reason, "lost the registry");
                pause = self.config.backoff_min;
            }
            self.give_up_changes(&reason);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(self.config.backoff_max);
            if self.commands.is_closed() && self.commands.is_empty() {
                return;
            }
        }
    }

    /// Fails changes in flight: they may or may not have happened, and only their callers can find out.
    fn give_up_changes(&mut self, reason: &str) {
        let lost = |call: &Call| !call.request.may_repeat() || call.reply.is_closed();
        for (_, call) in self.calls.extract_if(|_, call| lost(call)) {
            // The caller no longer waits.
            let _ = call.reply.send(Err(RegistryError::unavailable(reason)));
        }
        self.watches.retain(|_, watch| !watch.sink.is_abandoned());
    }

    async fn converse(&mut self, stream: UnixStream) -> End {
        let (read, write) = stream.into_split();
        let mut frames = FrameReader::new(read);
        let (outgoing, queue) = mpsc::unbounded_channel();
        let mut writing = std::pin::pin!(write_frames(write, queue));
        self.resume(&outgoing);
        loop {
            tokio::select! {
                written = &mut writing => {
                    return End::Lost(written.err().map_or_else(|| "closed".into(), |error| error.to_string()));
                }
                frame = frames.next() => {
                    let taken = match frame {
                        Ok(frame) => self.take_frame(frame, &outgoing),
                        Err(error) => Err(error.to_string()),
                    };
                    if let Err(reason) = taken {
                        return End::Lost(reason);
                    }
                }
                command = self.commands.recv(), if self.calls.len() < IN_FLIGHT => match command {
                    Some(command) => self.take_command(command, &outgoing),
                    None => return End::Unused,
                },
            }
            if self.calls.len() >= IN_FLIGHT {
                self.calls.retain(|_, call| !call.reply.is_closed());
            }
        }
    }

    /// Repeats unanswered calls on a new connection, and resumes the watches.
    fn resume(&mut self, outgoing: &Outgoing) {
        for (_, call) in std::mem::take(&mut self.calls) {
            self.begin_call(call, outgoing);
        }
        for (_, watch) in std::mem::take(&mut self.watches) {
            self.begin_watch(watch, outgoing);
        }
    }

    fn take_command(&mut self, command: Command, outgoing: &Outgoing) {
        match command {
            // The caller has timed out: do not send its call now.
            Command::Call { reply, .. } if reply.is_closed() => {}
            Command::Call { request, reply } => {
                self.begin_call(Call { request, parts: Vec::new(), reply }, outgoing);
            }
            Command::Watch { prefix, after_revision, sink, ready } => {
                if !sink.is_abandoned() && !ready.is_closed() {
                    let ready = Some(ready);
                    self.begin_watch(Following { prefix, seen: after_revision, sink, ready }, outgoing);
                }
            }
        }
    }

    fn begin_call(&mut self, mut call: Call, outgoing: &Outgoing) {
        call.parts.clear();
        match self.send(call.request.clone(), outgoing) {
            Ok(id) => {
                self.calls.insert(id, call);
            }
            Err(error) => {
                // The caller no longer waits.
                let _ = call.reply.send(Err(error));
            }
        }
    }

    fn begin_watch(&mut self, watch: Following, outgoing: &Outgoing) {
        let request = Request::Watch { prefix: watch.prefix.clone(), after_revision: watch.seen };
        match self.send(request, outgoing) {
            Ok(id) => {
                self.watches.insert(id, watch);
            }
            Err(error) => watch.end(error),
        }
    }

    fn send(&mut self, request: Request, outgoing: &Outgoing) -> Result<u64, RegistryError> {
        self.last_id += 1;
        let id = self.last_id;
        let frame = encode(&RequestFrame { id, request })
            .ok_or_else(|| RegistryError::malformed("the request is longer than a frame"))?;
        // A send fails only when the writer has ended; the connection then ends too, and its calls are repeated or failed.
        let _ = outgoing.send(frame);
        Ok(id)
    }

    fn take_frame(&mut self, frame: &[u8], outgoing: &Outgoing) -> Result<(), String> {
        let AnswerFrame { id, answer } =
            serde_json::from_slice(frame).map_err(|error| format!("not an answer of a registry: {error}"))?;
        if id == NO_REQUEST {
            return Err(format!("the registry refuses this client: {answer:?}"));
        }
        self.answered = true;
        if self.watches.contains_key(&id) {
            return self.take_watch_answer(id, answer, outgoing);
        }
        let Some(mut call) = self.calls.remove(&id) else { return Ok(()) };
        let answer = match answer {
            Answer::Listing { entries, more: true, .. } => {
                call.parts.extend(entries);
                self.calls.insert(id, call);
                return Ok(());
            }
            Answer::Listing { entries, revision, more: false } => {
                call.parts.extend(entries);
                Answer::Listing { entries: call.parts, revision, more: false }
            }
            answer => answer,
        };
        // The caller no longer waits.
        let _ = call.reply.send(Ok(answer));
        Ok(())
    }

    fn take_watch_answer(&mut self, id: u64, answer: Answer, outgoing: &Outgoing) -> Result<(), String> {
        let Some(watch) = self.watches.get_mut(&id) else { return Ok(()) };
        match answer {
            Answer::Watching => {
                if let Some(ready) = watch.ready.take() {
                    // A caller that no longer waits has dropped the watch; its first change detects that.
                    let _ = ready.send(Ok(()));
                }
            }
            Answer::Changes(batch) => {
                if watch.take(batch) == Delivery::Gone {
                    self.watches.remove(&id);
                    // Without an entry in `calls` its answer is ignored. It is short and always fits.
                    let _ = self.send(Request::Unwatch { watch: id }, outgoing);
                }
            }
            // The server is stopping. The watch resumes with the next one.
            Answer::Error(RegistryError::Unavailable { reason }) if watch.ready.is_none() => {
                return Err(reason);
            }
            Answer::Error(error) => {
                if let Some(watch) = self.watches.remove(&id) {
                    watch.end(error);
                }
            }
            other => return Err(format!("not an answer to a watch: {other:?}")),
        }
        Ok(())
    }
}

impl Following {
    fn take(&mut self, batch: Batch) -> Delivery {
        self.seen = batch.revision;
        if batch.changes.is_empty() && !self.sink.is_abandoned() {
            return Delivery::Queued;
        }
        self.sink.deliver(batch)
    }

    fn end(self, error: RegistryError) {
        match self.ready {
            // The caller no longer waits.
            Some(ready) => drop(ready.send(Err(error))),
            None => self.sink.close(error),
        }
    }
}
