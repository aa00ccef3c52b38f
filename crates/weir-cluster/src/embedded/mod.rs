//! The registry of a single machine: one durable file, one thread that owns it.
//!
//! The thread takes all commands that have arrived, applies them in order to the state in memory, makes their changes durable in
//! *one* commit of the file, and only then answers them and notifies the watchers: everything that a client has seen survives a
//! power cut. The limits (P10) are the constants below and in [`crate::registry`].

mod file;
mod memory;
mod state;
mod worker;

use std::path::Path;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::registry::{
    Committed, Entry, LeaseId, Listing, Op, Pending, ProcessWatch, Registry, RegistryError, Transaction,
    Watch, check_key, check_prefix,
};
pub use memory::{Feed, Memory};
use worker::{Command, Reply};

/// Maximum number of keys.
pub const MAX_KEYS: usize = 1 << 16;
/// Maximum size of keys and values together, in bytes.
pub const MAX_DATA: usize = 64 << 20;
/// Maximum number of leases.
pub const MAX_LEASES: usize = 4096;
/// Maximum number of watches.
pub const MAX_WATCHES: usize = 1024;
/// Number of transactions in the history, from which a watch can resume.
pub const HISTORY: usize = 4096;
/// Maximum size of their keys and values, in bytes.
pub const HISTORY_BYTES: usize = 16 << 20;
/// Capacity of the thread's command queue; when it is full, callers block.
const QUEUE: usize = 1024;

/// A handle to the embedded registry; clones share it. The file is closed with the last handle.
#[derive(Clone, Debug)]
pub struct Embedded {
    commands: mpsc::Sender<Command>,
}

impl Embedded {
    /// Opens the file at `path`, or creates it (mode 0600). Its leases get their full time again and a little more: a longer
    /// lease is always safe, a shorter one never.
    ///
    /// # Errors
    /// [`RegistryError::Setup`] when the file cannot be used (also when another process has it open, or
    /// outside a tokio runtime), [`RegistryError::Corrupt`] when its content fails verification.
    pub fn open(path: &Path) -> Result<Embedded, RegistryError> {
        let setup = |reason: String| RegistryError::Setup { reason };
        let runtime = tokio::runtime::Handle::try_current()
            .map_err(|error| setup(format!("the embedded registry needs a tokio runtime: {error}")))?;
        let (file, state) = file::File::open(path)?;
        let (commands, queue) = mpsc::channel(QUEUE);
        let worker = worker::Worker::new(file, state);
        runtime.spawn(worker::expire_leases(worker.next_deadline(), commands.downgrade()));
        std::thread::Builder::new()
            .name("weir-registry".into())
            .spawn(move || worker.run(queue))
            .map_err(|error| setup(format!("cannot start the registry's thread: {error}")))?;
        Ok(Embedded { commands })
    }

    /// Closes the file and returns when it can be opened again. Every other handle gets
    /// [`RegistryError::Unavailable`] from then on.
    pub async fn close(self) {
        let (done, closed) = oneshot::channel();
        if self.commands.send(Command::Close { done }).await.is_ok() {
            // An error means that the thread has ended by itself: closed as well.
            let _ = closed.await;
        }
    }

    /// Ends `lease` and applies `ops`, at one revision: records the end of a process (see [`crate::remote`]).
    pub(crate) async fn end_process(&self, lease: LeaseId, ops: Vec<Op>) -> Result<Committed, RegistryError> {
        let transaction = Transaction { compares: Vec::new(), ops };
        transaction.check()?;
        self.call(|reply| Command::EndProcess { lease, transaction, reply }).await
    }

    async fn call<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, RegistryError> {
        let gone = || RegistryError::unavailable("it was closed");
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }
}

impl Registry for Embedded {
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>> {
        Box::pin(async move {
            check_key(key)?;
            self.call(|reply| Command::Get { key: key.to_owned(), reply }).await
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing> {
        Box::pin(async move {
            check_prefix(prefix)?;
            self.call(|reply| Command::List { prefix: prefix.to_owned(), reply }).await
        })
    }

    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed> {
        Box::pin(async move {
            transaction.check()?;
            self.call(|reply| Command::Transact { transaction, reply }).await
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch> {
        Box::pin(async move {
            check_prefix(prefix)?;
            self.call(|reply| Command::Watch { prefix: prefix.to_owned(), after_revision, reply }).await
        })
    }

    fn grant(&self, ttl: Duration) -> Pending<'_, LeaseId> {
        Box::pin(self.call(move |reply| Command::Grant { ttl, reply }))
    }

    fn keep_alive(&self, lease: LeaseId) -> Pending<'_, Duration> {
        Box::pin(self.call(move |reply| Command::KeepAlive { lease, reply }))
    }

    fn revoke(&self, lease: LeaseId) -> Pending<'_, ()> {
        Box::pin(self.call(move |reply| Command::Revoke { lease, reply }))
    }

    /// The registry lives in the calling process and ends with it, so it cannot report the process's end.
    fn register_process<'a>(&'a self, _: &'a str, _: u64, lease: LeaseId) -> Pending<'a, ProcessWatch> {
        Box::pin(async move {
            self.keep_alive(lease).await?;
            Ok(ProcessWatch::NotWatched)
        })
    }
}
