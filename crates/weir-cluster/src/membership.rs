//! This node's membership in the cluster: its lease, its record, and the deadline of its trust in them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use weir_block::Nanos;
use weir_task::JoinHandle;

use crate::records::{
    MediumSpace, NodeRecord, NodeRef, Record, RecordError, StoppedHow, StoppedRecord, keys,
};
use crate::registry::{
    Compare, Expect, LeaseId, MAX_TTL, MIN_TTL, ProcessWatch, Registry, RegistryError, Transaction,
};
use crate::right::SessionLease;
use crate::view::View;

/// A registry that has not answered for this long is worth a line in the log.
const SILENT: Duration = Duration::from_secs(3);

/// All nodes with a valid lease; start it with [`keys::NODES`].
pub type LiveNodes = View<NodeRecord>;

/// Time limits of a node's session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// Time to live of the lease. The keep-alive interval is a third of it.
    pub ttl: Duration,
    /// The node stops trusting its lease this much earlier than the registry: allows for clock drift and for the time from
    /// checking the deadline to the storage.
    pub margin: Duration,
}

impl Default for SessionConfig {
    fn default() -> SessionConfig {
        SessionConfig { ttl: Duration::from_secs(9), margin: Duration::from_secs(2) }
    }
}

/// The reason why a node cannot join.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// Another process uses this name.
    #[error(
        "{holder}, whose peer address is {address}, already uses this name; stop it, or wait until its lease ends, or set another name"
    )]
    NameTaken {
        /// The process.
        holder: NodeRef,
        /// Where it takes connections of other nodes.
        address: SocketAddr,
    },
    /// The record under this name cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The time limits are inconsistent.
    #[error("{0}")]
    Config(String),
    /// The registry refused or did not answer.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// The state of a node's lease, from the node's view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// The lease is valid.
    Held,
    /// The registry does not answer and the deadline has passed: others may take over once the registry is back. If the lease is
    /// then still valid, the session is [`SessionState::Held`] again.
    Unconfirmed,
    /// The lease has ended; the node no longer owns what depended on it. Continue with [`NodeSession::register_again`].
    Lost,
}

/// A node's membership. Dropping it stops keeping the lease alive; [`NodeSession::leave`] ends it at once.
#[derive(Debug)]
pub struct NodeSession {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    registry: Arc<dyn Registry>,
    me: NodeRef,
    /// The record that others see, or are about to see.
    record: Mutex<NodeRecord>,
    config: SessionConfig,
    lease: watch::Sender<SessionLease>,
    state: watch::Sender<SessionState>,
    held: Mutex<Held>,
    /// Send time of the last request that the registry answered, in nanoseconds of the machine's clock.
    heard: AtomicU64,
}

/// The registry's grant to this node.
#[derive(Clone, Copy, Debug)]
struct Held {
    lease: LeaseId,
    /// The revision of `sessions/<name>`.
    revision: u64,
    watched: ProcessWatch,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("me", &self.me).field("held", &self.held).finish_non_exhaustive()
    }
}

impl NodeSession {
    /// Joins: grants a lease, registers this process and puts `nodes/<name>`.
    ///
    /// # Errors
    /// [`SessionError::NameTaken`] while another process holds the name, [`SessionError::Config`] when the
    /// margin leaves no time between two keep-alives, else the error of the registry or the record.
    pub async fn start(
        registry: Arc<dyn Registry>,
        record: NodeRecord,
        config: SessionConfig,
    ) -> Result<NodeSession, SessionError> {
        record.check()?;
        check(&config)?;
        let (joined, leased) = join(&*registry, &record, &config).await?;
        let lease = watch::Sender::new(leased);
        let state = watch::Sender::new(SessionState::Held);
        let (me, record) = (record.node_ref(), Mutex::new(record));
        let held = Mutex::new(joined);
        let heard = AtomicU64::new(Nanos::now().0);
        let shared = Arc::new(Shared { registry, me, record, config, lease, state, held, heard });
        let keeper = Mutex::new(Some(weir_task::spawn(keep_alive(Arc::clone(&shared), joined.lease))));
        Ok(NodeSession { shared, keeper })
    }

    /// This process, as the records name it.
    #[must_use]
    pub fn node_ref(&self) -> NodeRef {
        self.shared.me.clone()
    }

    /// This node's record, as others see it.
    #[must_use]
    pub fn record(&self) -> NodeRecord {
        self.shared.record().clone()
    }

    /// Publishes this node's media and load. Writes nothing when nothing has changed.
    ///
    /// # Errors
    /// The registry's error; [`RegistryError::Conflict`] when the session has ended. The next call tries again.
    pub async fn publish(&self, media: Vec<MediumSpace>, load: u64) -> Result<(), RegistryError> {
        let shared = &self.shared;
        let before = self.record();
        let record = NodeRecord { media, load, ..before.clone() };
        if record == before {
            return Ok(());
        }
        let put = Transaction::new().put_leased(keys::node(&record.name), record.encode(), self.lease());
        shared.registry.transact(put.when(self.guard())).await?;
        *shared.record() = record;
        Ok(())
    }

    /// This session, and its guaranteed deadline. A later session has another number.
    ///
    /// The time counts from before the keep-alive was *sent*; the registry counts from its arrival, so it always ends the lease
    /// later.
    #[must_use]
    pub fn leased(&self) -> watch::Receiver<SessionLease> {
        self.shared.lease.subscribe()
    }

    /// Time of the registry's last known answer: this node's view of the registry is about as old.
    #[must_use]
    pub fn heard(&self) -> Nanos {
        self.shared.heard()
    }

    /// Notifies of changes of the lease's state.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<SessionState> {
        self.shared.state.subscribe()
    }

    /// The present lease.
    #[must_use]
    pub fn lease(&self) -> LeaseId {
        self.shared.held().lease
    }

    /// Whether the registry will detect the end of this process.
    #[must_use]
    pub fn process_watch(&self) -> ProcessWatch {
        self.shared.held().watched
    }

    /// The condition that this session is still valid. Add it to every transaction that claims something: a request that reaches
    /// the registry after the session's end then changes nothing.
    #[must_use]
    pub fn guard(&self) -> Compare {
        let expect = Expect::ModRevision(self.shared.held().revision);
        Compare { key: keys::session(&self.shared.me.node), expect }
    }

    /// Joins again, with a new lease, as the same process. Keys of the old lease stay lost.
    ///
    /// # Errors
    /// As [`NodeSession::start`].
    pub async fn register_again(&self) -> Result<LeaseId, SessionError> {
        self.stop_keeper().await;
        let shared = &self.shared;
        let record = self.record();
        let (joined, leased) = join(&*shared.registry, &record, &shared.config).await?;
        *shared.held() = joined;
        shared.heard.store(Nanos::now().0, Ordering::Relaxed);
        shared.lease.send_replace(leased);
        shared.state.send_replace(SessionState::Held);
        let keeper = weir_task::spawn(keep_alive(Arc::clone(shared), joined.lease));
        if let Some(other) = self.keeper().replace(keeper) {
            other.abort();
        }
        Ok(joined.lease)
    }

    /// Leaves: ends the lease, so that other nodes need not wait for its expiry. The node must have released all disks.
    ///
    /// # Errors
    /// The registry's error; the lease then expires.
    pub async fn leave(self) -> Result<(), RegistryError> {
        self.stop_keeper().await;
        self.shared.end_lease();
        let lease = self.lease();
        self.shared.registry.revoke(lease).await
    }

    /// Returns when the keeper has ended and can no longer change the deadline.
    async fn stop_keeper(&self) {
        let keeper = self.keeper().take();
        if let Some(keeper) = keeper {
            keeper.abort();
            // Aborted or ended: no other result.
            let _ = keeper.await;
        }
    }

    fn keeper(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.keeper.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for NodeSession {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper().take() {
            keeper.abort();
        }
    }
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn record(&self) -> MutexGuard<'_, NodeRecord> {
        self.record.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn heard(&self) -> Nanos {
        Nanos(self.heard.load(Ordering::Relaxed))
    }

    /// Whether the lease is certainly valid.
    fn is_trusted(&self) -> bool {
        Nanos::now() < self.lease.borrow().until
    }

    fn end_lease(&self) {
        self.lease.send_modify(|lease| lease.until = Nanos(0));
    }

    fn set_state(&self, state: SessionState) {
        self.state.send_if_modified(|now| std::mem::replace(now, state.clone()) != state);
    }
}

fn check(config: &SessionConfig) -> Result<(), SessionError> {
    let SessionConfig { ttl, margin } = config;
    if *ttl < MIN_TTL || *ttl > MAX_TTL {
        return Err(SessionError::Config(format!("a lease lives {MIN_TTL:?} to {MAX_TTL:?}, not {ttl:?}")));
    }
    // The deadline must be after the next two keep-alives, or a single late one loses the lease.
    if *margin > *ttl / 3 {
        return Err(SessionError::Config(format!(
            "a margin of {margin:?} is more than a third of the lease's {ttl:?}"
        )));
    }
    Ok(())
}

async fn join(
    registry: &dyn Registry,
    record: &NodeRecord,
    config: &SessionConfig,
) -> Result<(Held, SessionLease), SessionError> {
    let sent = Nanos::now();
    let lease = registry.grant(config.ttl).await?;
    match put_node(registry, record, lease).await {
        Ok((revision, watched)) => {
            let until = sent + (config.ttl - config.margin);
            Ok((Held { lease, revision, watched }, SessionLease { number: lease.0, until }))
        }
        Err(error) => {
            // Nothing uses a lease without a node; if the revocation fails too, it expires.
            let _ = registry.revoke(lease).await;
            Err(error)
        }
    }
}

async fn put_node(
    registry: &dyn Registry,
    record: &NodeRecord,
    lease: LeaseId,
) -> Result<(u64, ProcessWatch), SessionError> {
    let key = keys::node(&record.name);
    let transaction = match registry.get(&key).await? {
        None => Transaction::new().absent(key.clone()),
        Some(entry) => {
            let other = NodeRecord::of(&entry)?;
            let (holder, address) = (other.node_ref(), other.peer_address);
            if holder != record.node_ref() {
                return Err(SessionError::NameTaken { holder, address });
            }
            Transaction::new().unchanged(key.clone(), entry.mod_revision)
        }
    };
    // Watched before it is visible: every observer of the node can rely on a report of its end.
    let watched = registry.register_process(&record.name, record.incarnation, lease).await?;
    let session = keys::session(&record.name);
    let put = transaction.put_leased(key, record.encode(), lease).put_leased(
        session,
        record.incarnation.to_string(),
        lease,
    );
    Ok((registry.transact(put).await?.revision, watched))
}

async fn keep_alive(shared: Arc<Shared>, lease: LeaseId) {
    let SessionConfig { ttl, margin } = shared.config;
    let soon = (ttl / 20).max(Duration::from_millis(10));
    // Joining takes several round trips, and has used up the lease's time.
    let left = shared.lease.borrow().until.0.saturating_sub(Nanos::now().0);
    let mut pause = (ttl / 3).min(Duration::from_nanos(left) / 2);
    let mut silence = Silence::default();
    loop {
        weir_task::sleep(pause).await;
        if !shared.is_trusted() && !receives_answers(&shared).await {
            silence.lasts(&shared, "no answer in time");
            shared.set_state(SessionState::Unconfirmed);
            pause = soon;
            continue;
        }
        let sent = Nanos::now();
        // An answer that takes half of the trusted time is still in time, and the next one can be; a later one cannot.
        let answer = weir_task::timeout((ttl - margin) / 2, shared.registry.keep_alive(lease)).await;
        let error = match answer {
            Ok(Ok(granted)) => {
                let trusted = granted.saturating_sub(margin);
                shared.lease.send_modify(|lease| lease.until = lease.until.max(sent + trusted));
                shared.set_state(SessionState::Held);
                silence.ends(&shared);
                shared.heard.store(sent.0, Ordering::Relaxed);
                // Counted from sending, so that a slow registry does not prolong the interval.
                pause = (granted / 3).saturating_sub(Nanos::now() - sent).max(soon);
                continue;
            }
            Ok(Err(RegistryError::LeaseExpired { .. })) => {
                silence.ends(&shared);
                shared.end_lease();
                tracing::warn!(node = shared.me.node, %lease, "lost the lease");
                return shared.set_state(SessionState::Lost);
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        silence.lasts(&shared, &error);
        if !shared.is_trusted() {
            shared.set_state(SessionState::Unconfirmed);
        }
        pause = soon;
    }
}

/// Whether the log has told of a registry that does not answer: one line, and one when it answers again.
#[derive(Default)]
struct Silence {
    is_told: bool,
}

impl Silence {
    fn lasts(&mut self, shared: &Shared, error: &str) {
        tracing::debug!(node = shared.me.node, error, "cannot keep the lease alive");
        let silent = Nanos::now().since(shared.heard());
        if silent >= SILENT && !std::mem::replace(&mut self.is_told, true) {
            let seconds = silent.as_secs();
            tracing::warn!(
                node = shared.me.node,
                error,
                "the registry has not answered for {seconds} s; this node goes on asking"
            );
        }
    }

    fn ends(&mut self, shared: &Shared) {
        if std::mem::take(&mut self.is_told) {
            let seconds = Nanos::now().since(shared.heard()).as_secs();
            tracing::info!(node = shared.me.node, "the registry answers again, after {seconds} s");
        }
    }
}

/// Whether the registry's answers reach this node. A node whose requests arrive but that gets no answers must not keep its lease
/// alive: it may not serve its disks, and no other node could take them over (P9).
async fn receives_answers(shared: &Shared) -> bool {
    let key = keys::node(&shared.me.node);
    let question = shared.registry.get(&key);
    matches!(weir_task::timeout(shared.config.ttl / 3, question).await, Ok(Ok(_)))
}

/// The condition that the session of `process` is over: no process has one under its name, or another process has.
///
/// A takeover carries it and so fails when the owner comes back before the commit. Elapsed time proves nothing: a registry may
/// extend leases beyond their time to live.
///
/// # Errors
/// The registry's error; [`RegistryError::Conflict`] while the session is valid.
pub async fn session_over(registry: &dyn Registry, process: &NodeRef) -> Result<Compare, RegistryError> {
    let key = keys::session(&process.node);
    match registry.get(&key).await? {
        None => Ok(Compare { key, expect: Expect::Absent }),
        Some(entry) if entry.value == process.incarnation.to_string().as_bytes() => {
            Err(RegistryError::Conflict { current: vec![entry] })
        }
        Some(entry) => Ok(Compare { key, expect: Expect::ModRevision(entry.mod_revision) }),
    }
}

/// Records, on an operator's statement, that a process has ended. The operator must have ensured it (fencing, power off):
/// takeovers rely on this.
///
/// # Errors
/// The registry's error, or an invalid name in `node`.
pub async fn declare_stopped(registry: &dyn Registry, node: &NodeRef) -> Result<(), SessionError> {
    let record = StoppedRecord {
        node: node.clone(),
        how: StoppedHow::Operator,
        time_unix_ms: weir_task::unix_millis(),
        machine: None,
    };
    record.check()?;
    let key = keys::stopped(node);
    match registry.transact(record.create(key)).await {
        // Already recorded.
        Ok(_) | Err(RegistryError::Conflict { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
