//! The client of a registry on a Unix socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::config::ClientConfig;
use super::link::{Command, Link};
use super::protocol::{Answer, Request};
use crate::registry::{
    Committed, Entry, LeaseId, Listing, Pending, ProcessWatch, Registry, RegistryError, Transaction, Watch,
    WatchSink, check_key, check_prefix,
};

/// Capacity of the link's call queue; when it is full, callers block.
const QUEUE: usize = 256;

/// A client of a [`super::Server`]; clones share one connection. It reconnects automatically; calls wait for that within their
/// timeout, and watches resume at their position. The connection ends with the last clone and the last watch.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
    timeout: Duration,
    commands: mpsc::Sender<Command>,
}

impl Client {
    /// A client of the server at `path`, which need not exist yet. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// [`RegistryError::Setup`] outside a tokio runtime.
    pub fn new(path: &Path, config: ClientConfig) -> Result<Client, RegistryError> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|error| RegistryError::Setup {
            reason: format!("the registry's client needs a tokio runtime: {error}"),
        })?;
        let (commands, queue) = mpsc::channel(QUEUE);
        let timeout = config.request_timeout;
        runtime.spawn(Link::new(path.to_owned(), config, queue).run());
        Ok(Client { path: path.to_owned(), timeout, commands })
    }

    async fn ask<T>(
        &self,
        request: Request,
        take: impl FnOnce(Answer) -> Option<T>,
    ) -> Result<T, RegistryError> {
        let (reply, answer) = oneshot::channel();
        let answer = self.send(Command::Call { request, reply }, answer).await?;
        match answer {
            Answer::Error(error) => Err(error),
            answer => take(answer).ok_or_else(|| {
                RegistryError::malformed(
                    "the server's answer does not match the request; use the same version of Weir",
                )
            }),
        }
    }

    /// Waits for the answer, up to the timeout.
    async fn send<T>(
        &self,
        command: Command,
        answer: oneshot::Receiver<Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        let exchange = async {
            // Both fail only when the link's task has ended with its runtime.
            let gone = || RegistryError::unavailable("the client was shut down");
            self.commands.send(command).await.map_err(|_| gone())?;
            answer.await.unwrap_or_else(|_| Err(gone()))
        };
        tokio::time::timeout(self.timeout, exchange).await.unwrap_or_else(|_| {
            let (path, timeout) = (self.path.display(), self.timeout);
            Err(RegistryError::unavailable(format!("no answer at {path} within {timeout:?}")))
        })
    }
}

impl Registry for Client {
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>> {
        Box::pin(async move {
            check_key(key)?;
            let request = Request::Get { key: key.to_owned() };
            self.ask(request, |answer| if let Answer::Entry(entry) = answer { Some(entry) } else { None })
                .await
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing> {
        Box::pin(async move {
            check_prefix(prefix)?;
            let request = Request::List { prefix: prefix.to_owned() };
            self.ask(request, |answer| match answer {
                Answer::Listing { entries, revision, .. } => Some(Listing { entries, revision }),
                _ => None,
            })
            .await
        })
    }

    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed> {
        Box::pin(async move {
            transaction.check()?;
            let request = Request::Transact { transaction };
            self.ask(request, |answer| if let Answer::Committed(done) = answer { Some(done) } else { None })
                .await
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch> {
        Box::pin(async move {
            check_prefix(prefix)?;
            let (sink, watch) = WatchSink::open(Vec::new());
            let (ready, begun) = oneshot::channel();
            let command = Command::Watch { prefix: prefix.to_owned(), after_revision, sink, ready };
            self.send(command, begun).await?;
            Ok(watch.fed_by(self.clone()))
        })
    }

    fn grant(&self, ttl: Duration) -> Pending<'_, LeaseId> {
        Box::pin(async move {
            let request = Request::Grant { ttl_ms: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX) };
            self.ask(request, |answer| if let Answer::Lease(lease) = answer { Some(lease) } else { None })
                .await
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> Pending<'_, Duration> {
        Box::pin(async move {
            let request = Request::KeepAlive { lease };
            self.ask(request, |answer| match answer {
                Answer::TtlMs(ttl) => Some(Duration::from_millis(ttl)),
                _ => None,
            })
            .await
        })
    }

    fn revoke(&self, lease: LeaseId) -> Pending<'_, ()> {
        Box::pin(async move {
            self.ask(Request::Revoke { lease }, |answer| matches!(answer, Answer::Done).then_some(())).await
        })
    }

    fn register_process<'a>(
        &'a self,
        name: &'a str,
        incarnation: u64,
        lease: LeaseId,
    ) -> Pending<'a, ProcessWatch> {
        Box::pin(async move {
            let request = Request::RegisterProcess { name: name.to_owned(), incarnation, lease };
            self.ask(
                request,
                |answer| if let Answer::Process(watched) = answer { Some(watched) } else { None },
            )
            .await
        })
    }
}
