//! The thread that owns the registry, and the timer that expires leases.

use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

use super::file::File;
use super::state::State;
use super::{HISTORY, MAX_WATCHES};
use crate::registry::{
    Batch, Committed, Delivery, Entry, LeaseId, Listing, RegistryError, Transaction, Watch, WatchSink,
};

/// Maximum number of commands in one commit of the file.
const GROUP: usize = 256;
/// A lease timer that fires this late means that the whole process was paused (stopped, swapped out, suspended). No client could
/// keep a lease alive meanwhile, so none must expire.
const STALL: Duration = Duration::from_millis(500);
/// Watchers without changes get the registry's current revision, so that a watcher that was disconnected for a while resumes from
/// there and not from a revision outside the history.
const PROGRESS: u64 = HISTORY as u64 / 4;

pub(super) type Reply<T> = oneshot::Sender<Result<T, RegistryError>>;

/// A command to the thread.
#[derive(Debug)]
pub(super) enum Command {
    Get { key: String, reply: Reply<Option<Entry>> },
    List { prefix: String, reply: Reply<Listing> },
    Transact { transaction: Transaction, reply: Reply<Committed> },
    Watch { prefix: String, after_revision: u64, reply: Reply<Watch> },
    Grant { ttl: Duration, reply: Reply<LeaseId> },
    KeepAlive { lease: LeaseId, reply: Reply<Duration> },
    Revoke { lease: LeaseId, reply: Reply<()> },
    EndProcess { lease: LeaseId, transaction: Transaction, reply: Reply<Committed> },
    Expire { due: Instant },
    Close { done: oneshot::Sender<()> },
}

/// An answer that waits for the commit; called with the commit's result.
type Answer = Box<dyn FnOnce(&Result<(), RegistryError>) + Send>;

struct Watcher {
    prefix: String,
    /// Everything up to here has been delivered.
    seen: u64,
    sink: WatchSink,
}

pub(super) struct Worker {
    file: File,
    state: State,
    watchers: Vec<Watcher>,
    answers: Vec<Answer>,
    deadline: watch::Sender<Option<Instant>>,
}

impl Worker {
    pub fn new(file: File, state: State) -> Worker {
        let deadline = watch::Sender::new(state.next_deadline());
        Worker { file, state, watchers: Vec::new(), answers: Vec::new(), deadline }
    }

    /// Notifies of the end of the next lease to expire.
    pub fn next_deadline(&self) -> watch::Receiver<Option<Instant>> {
        self.deadline.subscribe()
    }

    /// Serves until it is closed or the last handle is dropped.
    pub fn run(mut self, mut queue: mpsc::Receiver<Command>) {
        let mut group = Vec::with_capacity(GROUP);
        // The file's first failure is final: the state in memory may then be ahead of the durable one.
        let mut sound = Ok(());
        while queue.blocking_recv_many(&mut group, GROUP) > 0 {
            let mut closing = None;
            for command in group.drain(..) {
                match command {
                    Command::Close { done } => closing = Some(done),
                    command => self.take(command),
                }
            }
            if sound.is_ok() {
                sound = self.file.save(&mut self.state);
            }
            for answer in self.answers.drain(..) {
                answer(&sound);
            }
            match &sound {
                Ok(()) => self.notify_watchers(),
                Err(error) => {
                    tracing::error!(%error, "the registry's file failed; restart the registry");
                    self.watchers.clear();
                }
            }
            self.state.unsaved = Default::default();
            let next = self.state.next_deadline();
            self.deadline.send_if_modified(|deadline| std::mem::replace(deadline, next) != next);
            if let Some(done) = closing {
                drop(queue);
                drop(self);
                // The caller may no longer wait; the file is closed nevertheless.
                let _ = done.send(());
                return;
            }
        }
    }

    // The only clock read for the state.
    #[expect(
        clippy::disallowed_methods,
        reason = "this thread drives the state; tokio's timer needs an Instant"
    )]
    fn take(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::Get { key, reply } => {
                let entry = self.state.get(&key);
                self.answer(reply, Ok(entry));
            }
            Command::List { prefix, reply } => {
                let listing = self.state.list(&prefix);
                self.answer(reply, Ok(listing));
            }
            Command::Transact { transaction, reply } => {
                let result = self.state.transact(transaction);
                self.answer(reply, result);
            }
            Command::Watch { prefix, after_revision, reply } => {
                let result = self.watch(prefix, after_revision);
                self.answer(reply, result);
            }
            Command::Grant { ttl, reply } => {
                let result = self.state.grant(ttl, now);
                self.answer(reply, result);
            }
            Command::KeepAlive { lease, reply } => {
                let result = self.state.keep_alive(lease, now);
                self.answer(reply, result);
            }
            Command::Revoke { lease, reply } => {
                self.state.revoke(lease);
                self.answer(reply, Ok(()));
            }
            Command::EndProcess { lease, transaction, reply } => {
                let committed = self.state.end_process(lease, transaction.ops);
                self.answer(reply, Ok(committed));
            }
            Command::Expire { due } => {
                for lease in self.state.expire(now.max(due), now.saturating_duration_since(due) > STALL) {
                    tracing::info!(%lease, "lease expired");
                }
            }
            // The caller handles these.
            Command::Close { .. } => {}
        }
    }

    fn answer<T: Send + 'static>(&mut self, reply: Reply<T>, result: Result<T, RegistryError>) {
        self.answers.push(Box::new(move |sound| {
            // The caller no longer waits.
            let _ = reply.send(sound.clone().and(result));
        }));
    }

    fn watch(&mut self, prefix: String, after: u64) -> Result<Watch, RegistryError> {
        let mut missed = self.state.since(&prefix, after)?;
        // Shows the watcher that it is up to date, even without changes under its prefix.
        missed.push(Batch { revision: self.state.revision, changes: Vec::new() });
        self.watchers.retain(|watcher| !watcher.sink.is_abandoned());
        if self.watchers.len() >= MAX_WATCHES {
            return Err(RegistryError::Full {
                reason: format!("it serves at most {MAX_WATCHES} watches; end some"),
            });
        }
        let (sink, watch) = WatchSink::open(missed);
        self.watchers.push(Watcher { prefix, seen: self.state.revision, sink });
        Ok(watch)
    }

    fn notify_watchers(&mut self) {
        let batches = &self.state.unsaved.batches;
        self.watchers.retain_mut(|watcher| {
            let seen = watcher.seen;
            for batch in batches.iter().filter(|batch| batch.revision > seen) {
                let batch = batch.under(&watcher.prefix);
                let revision = batch.revision;
                if batch.changes.is_empty() && revision - watcher.seen < PROGRESS {
                    continue;
                }
                if watcher.sink.deliver(batch) == Delivery::Gone {
                    return false;
                }
                watcher.seen = revision;
            }
            true
        });
    }
}

/// Wakes the thread when a lease ends.
pub(super) async fn expire_leases(
    mut deadline: watch::Receiver<Option<Instant>>,
    commands: mpsc::WeakSender<Command>,
) {
    loop {
        let next = *deadline.borrow_and_update();
        let due = async {
            match next {
                Some(due) => {
                    tokio::time::sleep_until(due.into()).await;
                    due
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = deadline.changed() => if changed.is_err() { return },
            due = due => {
                let Some(commands) = commands.upgrade() else { return };
                if commands.send(Command::Expire { due }).await.is_err() || deadline.changed().await.is_err() {
                    return;
                }
            }
        }
    }
}
