//! One disk, as the control plane of this node sees it: a task that brings what is open here into line with the registry,
//! carries out what the shard asks for, and does what operators want.
//!
//! Everything about one disk happens in this one task, one step after the other. Slow steps (connecting to a peer) are
//! tasks of their own that report back. What the shard asks for is in `wishes`, what operators want in `request`.

mod handover;
mod request;
#[cfg(test)]
mod tests;
mod wishes;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use weir_accel::Configuration;
use weir_block::Nanos;
use weir_cluster::ownership;
use weir_cluster::placement;
use weir_cluster::records::{
    DiskRecord, FormerOwner, Medium, Mode, NodeRef, Policy, Record, ReleasedRecord, keys,
};
use weir_cluster::registry::RegistryError;

use super::change::{self, ChangeError};
use super::decide::{Decision, Evidence, Local, Situation, decide, former_ends, is_live};
use super::node::{Node, wall_clock_ms};
use crate::api::ApiError;
use crate::shard::messages::{Arrival, Command, LogMedium, Notice, OpenDisk};

/// Messages that wait for a disk's task before their senders do.
const INBOX: usize = 256;

/// Pause before something that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// To a disk's task.
#[derive(Debug)]
pub enum Message {
    /// The disk on its shard wants something.
    Notice(Notice),
    /// A connection to a peer that the disk had asked for, or why there is none.
    Peer {
        /// The process that was meant; the name may be empty when there is no node at all.
        node: NodeRef,
        /// The connection, greeted.
        connection: Result<OwnedFd, String>,
    },
    /// An operator wants something.
    Request(Request),
}

/// What an operator can want of a disk.
#[derive(Debug)]
pub enum Request {
    /// Own it and have it open.
    Export {
        /// Also when acknowledged writes are lost by that.
        accept_loss: bool,
        /// Tells when it is open.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Set the requested policy.
    SetPolicy {
        /// The new one.
        policy: Policy,
        /// Tells when it is committed.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Grow it.
    Resize {
        /// Bytes.
        size: u64,
        /// Tells when guests can use it.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Destage, close, and give ownership up.
    Release {
        /// Tells when nobody owns it any more.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Let clients on another node use the disk, whose first write moves it there; or nobody any more.
    Follow {
        /// The process that is to own it.
        to: Option<NodeRef>,
        /// Tells when that process is ready to.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Give ownership to another node.
    Move {
        /// The process that is to own it.
        to: NodeRef,
        /// Tells when this node does not own it any more, and how many bytes were dirty then.
        done: oneshot::Sender<Result<u64, ApiError>>,
    },
}

/// The way to a disk's task.
pub type Inbox = mpsc::Sender<Message>;

/// The task's state.
struct DiskTask {
    name: String,
    node: Arc<Node>,
    me: NodeRef,
    inbox: mpsc::Receiver<Message>,
    /// For tasks that report back; weak, so that they do not keep the task alive.
    outbox: mpsc::WeakSender<Message>,
    local: Local,
    /// The newest record that this task knows to be committed. The view may lag behind it.
    committed: Option<DiskRecord>,
    /// How the disk came, or comes, to this node.
    arrival: Option<Arrival>,
    /// Nothing is tried before this.
    retry_at: Option<Nanos>,
    owner_gone: Option<(NodeRef, Nanos)>,
    former_since: HashMap<NodeRef, (Evidence, Nanos)>,
    /// The processes that this owner is connected to, by node: who a replica's name stands for.
    connected: HashMap<String, NodeRef>,
    told_policy: Option<Policy>,
    told_former: bool,
    forgotten_below: u64,
    /// A `released/` note that is still to be written: the epoch.
    owed_release: Option<u64>,
    /// Requests that came while another step was waiting for the shard.
    waiting: Vec<Request>,
    unavailable: bool,
}

/// Starts the task of a disk.
pub fn start(name: &str, node: &Arc<Node>) -> Inbox {
    let (task, sender) = DiskTask::new(name, node);
    tokio::spawn(task.run());
    sender
}

impl DiskTask {
    fn new(name: &str, node: &Arc<Node>) -> (DiskTask, Inbox) {
        let (sender, inbox) = mpsc::channel(INBOX);
        let task = DiskTask {
            name: name.to_owned(),
            me: node.session.node_ref(),
            node: Arc::clone(node),
            inbox,
            outbox: sender.downgrade(),
            local: Local::Closed,
            committed: None,
            arrival: None,
            retry_at: None,
            owner_gone: None,
            former_since: HashMap::new(),
            connected: HashMap::new(),
            told_policy: None,
            told_former: false,
            forgotten_below: 0,
            owed_release: None,
            waiting: Vec::new(),
            unavailable: false,
        };
        (task, sender)
    }

    async fn run(mut self) {
        let mut changes = self.node.world.changes();
        loop {
            let again = self.reconcile().await;
            if let Some(request) = self.waiting.pop() {
                self.on_request(request).await;
                continue;
            }
            tokio::select! {
                () = changes.next() => {}
                () = sleep_until(again) => {}
                message = self.inbox.recv() => match message {
                    Some(message) => self.on_message(message).await,
                    // The disk was deleted; what is open here of it must end all the same.
                    None => {
                        self.reconcile().await;
                        return;
                    }
                },
            }
        }
    }

    async fn on_message(&mut self, message: Message) {
        match message {
            Message::Notice(notice) => self.on_notice(notice).await,
            Message::Peer { node, connection } => self.on_peer(node, connection).await,
            Message::Request(request) => self.on_request(request).await,
        }
    }

    /// Sends a command that the shard may take its time to answer. What the disk needs meanwhile (another replica set,
    /// a connection) is carried out, or the two would wait for each other.
    async fn ask<T>(&mut self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, String> {
        let (answer, mut answered) = oneshot::channel();
        self.node.shards.send(&self.name, command(answer)).await;
        loop {
            tokio::select! {
                answer = &mut answered => return answer.map_err(|_| "the node is stopping".to_owned()),
                Some(message) = self.inbox.recv() => self.serve(message).await,
            }
        }
    }

    /// Takes a message in the middle of a step: what the disk needs is carried out, what operators want comes afterwards.
    async fn serve(&mut self, message: Message) {
        match message {
            Message::Notice(notice) => self.on_notice(notice).await,
            Message::Peer { node, connection } => self.on_peer(node, connection).await,
            Message::Request(request) => self.waiting.insert(0, request),
        }
    }

    /// The newest record that is known.
    fn record(&mut self) -> Option<DiskRecord> {
        let seen = self.node.world.disk(&self.name);
        match (&self.committed, &seen) {
            (Some(committed), Some(seen)) if committed.epoch > seen.epoch => self.committed.clone(),
            _ => {
                self.committed = None;
                seen
            }
        }
    }

    /// Looks at the registry itself: the view may lag behind it.
    async fn refresh(&mut self) {
        if let Ok((_, record)) = change::read(&*self.node.registry, &self.name).await {
            self.committed = Some(record);
        }
    }

    /// Changes the record by compare-and-swap and remembers the outcome.
    async fn change(
        &mut self,
        compute: impl Fn(&DiskRecord) -> Result<DiskRecord, ownership::Refusal>,
    ) -> Result<DiskRecord, ChangeError> {
        let record = change::change(&*self.node.registry, &self.node.session, &self.name, compute).await?;
        self.committed = Some(record.clone());
        Ok(record)
    }

    /// Whether the copy that the record may count on because of this node's flash is here. Asked only when somebody is to take over.
    async fn has_copy(&self, record: Option<&DiskRecord>) -> bool {
        let Some(record) = record.filter(|record| record.medium == Medium::Flash) else { return false };
        let gone = record.owner.as_ref().is_some_and(|owner| !is_live(&self.node.world.nodes.now(), owner));
        let counted = record.is_replica(&self.me) || record.has_owners_copy(&self.me);
        if !gone || !counted {
            return false;
        }
        let disk = self.name.clone();
        self.node.shards.ask(&self.name, |answer| Command::HasCopy { disk, answer }).await.unwrap_or(false)
    }

    /// Brings what is here into line with the registry. Says when to look again without being woken.
    async fn reconcile(&mut self) -> Option<Nanos> {
        let now = Nanos::now();
        self.write_owed_release().await;
        let record = self.record();
        self.forget_replica(record.as_ref()).await;
        if self.retry_at.is_some_and(|at| at > now) {
            return self.retry_at;
        }
        self.retry_at = None;
        let has_copy = self.has_copy(record.as_ref()).await;
        let decision = {
            let live = self.node.world.nodes.now();
            self.track_owner(record.as_ref(), now);
            let owner = record.as_ref().and_then(|record| record.owner.as_ref());
            decide(
                record.as_ref(),
                &Situation {
                    me: &self.me,
                    live: &live,
                    local: self.local,
                    has_copy,
                    owner_stopped: owner.is_some_and(|owner| self.node.world.has_stopped(owner)),
                    owner_gone_since: self.owner_gone.as_ref().map(|(_, since)| *since),
                    now,
                    fence_grace: self.node.config.lease.fence_grace.0,
                },
            )
        };
        self.carry_out(decision, record).await
    }

    async fn carry_out(&mut self, decision: Decision, record: Option<DiskRecord>) -> Option<Nanos> {
        self.note_availability(&decision);
        match (decision, record) {
            (Decision::Nothing, Some(record)) => {
                self.settle_follower(&record).await;
                return self.settle_former(&record).await;
            }
            (Decision::Nothing | Decision::Unavailable(_), _) => {}
            (Decision::WaitUntil(time), _) => return Some(time),
            (Decision::TakeOver(evidence), Some(record)) => {
                let me = self.me.clone();
                match self.change(|record| ownership::take_over(record, &me, &evidence)).await {
                    Ok(next) => {
                        self.arrival = Some(self.arrival_after(&record, &next));
                        self.event(
                            "takeover",
                            format!("{} takes over from {} in epoch {}", me.node, evidence.owner, next.epoch),
                        );
                        return Some(Nanos::now());
                    }
                    Err(error) => self.later(&error),
                }
            }
            (Decision::Disclaim(evidence), Some(_)) => {
                let me = self.me.clone();
                match self.change(|record| ownership::disclaim(record, &me, &evidence)).await {
                    Ok(_) => {
                        let text = format!(
                            "the flash of {} does not hold its copy of the log; others go first",
                            me.node
                        );
                        self.event("copy-missing", text);
                        return Some(Nanos::now());
                    }
                    Err(error) => self.later(&error),
                }
            }
            (Decision::Open, Some(record)) => {
                if let Err(error) = self.open(&record).await {
                    self.event("open-failed", error);
                    self.retry_at = Some(Nanos::now() + RETRY);
                }
                return self.retry_at.or(Some(Nanos::now()));
            }
            (Decision::Configure, Some(record)) => self.configure(&record).await,
            (Decision::LetGo { epoch }, record) => self.let_go(epoch, record).await,
            (Decision::TakeOver(_) | Decision::Disclaim(_) | Decision::Open | Decision::Configure, None) => {}
        }
        self.retry_at
    }

    fn later(&mut self, error: &ChangeError) {
        tracing::debug!(disk = self.name, %error, "not now");
        self.retry_at = Some(Nanos::now() + RETRY);
    }

    fn track_owner(&mut self, record: Option<&DiskRecord>, now: Nanos) {
        let gone = record
            .and_then(|record| record.owner.as_ref())
            .filter(|owner| !is_live(&self.node.world.nodes.now(), owner));
        match (gone, &self.owner_gone) {
            (Some(owner), Some((known, _))) if owner == known => {}
            (Some(owner), _) => self.owner_gone = Some((owner.clone(), now)),
            (None, _) => self.owner_gone = None,
        }
    }

    /// One event when the disk becomes unavailable, told by one node.
    fn note_availability(&mut self, decision: &Decision) {
        let Decision::Unavailable(reason) = decision else {
            self.unavailable = false;
            return;
        };
        let first = self.node.world.nodes.now().keys().next() == Some(&self.me.node);
        if !std::mem::replace(&mut self.unavailable, true) && first {
            self.event("unavailable", reason.clone());
        }
    }

    /// What a takeover of `former` means for the data.
    fn arrival_after(&mut self, former: &DiskRecord, next: &DiskRecord) -> Arrival {
        let former_stopped = self.former_ends(next).is_none();
        match (next.mode, next.former.is_empty()) {
            (Mode::WriteBack, _) => Arrival::TakeOver { former_epoch: former.epoch, former_stopped },
            (Mode::WriteThrough, true) => Arrival::Clean,
            (Mode::WriteThrough, false) => Arrival::FromWriteThrough,
        }
    }

    /// How a disk that this process owns, and does not remember claiming, came to it: the answer to the claim was lost,
    /// or opening failed.
    fn arrival_of(&mut self, record: &DiskRecord) -> Arrival {
        let former_epoch = record.former.last().map_or(record.epoch, |former| former.epoch);
        let former = DiskRecord { epoch: former_epoch, ..record.clone() };
        self.arrival_after(&former, record)
    }

    /// Opens the disk on its shard.
    async fn open(&mut self, record: &DiskRecord) -> Result<(), String> {
        let path = self.node.backing_path(record).await?;
        let arrival = match self.arrival {
            Some(arrival) => arrival,
            None => self.arrival_of(record),
        };
        let disk = OpenDisk {
            disk: self.name.clone(),
            path,
            size: record.size,
            logical_block: record.logical_block,
            log_bytes: self.node.config.resources.log.0,
            medium: log_medium(record),
            configuration: self.configuration(record),
            arrival,
            lease_until: self.node.session.lease_deadline(),
        };
        self.connected.clear();
        let node = Arc::clone(&self.node);
        let place = node.room.admit(&node, &self.name).await?;
        self.ask(|done| Command::Open(Box::new(disk), done)).await??;
        drop(place);
        (self.arrival, self.told_policy, self.told_former) = (None, Some(record.policy), false);
        self.local = Local::Open { epoch: record.epoch };
        self.node.here.insert(record);
        self.event("open", format!("{} serves it in epoch {}", self.me.node, record.epoch));
        Ok(())
    }

    /// Tells the shard what the registry has.
    async fn configure(&mut self, record: &DiskRecord) {
        let disk = self.name.clone();
        self.local = Local::Open { epoch: record.epoch };
        self.node.here.insert(record);
        self.send(Command::Configured { disk: disk.clone(), configuration: self.configuration(record) })
            .await;
        if self.told_policy.replace(record.policy) != Some(record.policy) {
            self.send(Command::SetPolicy { disk, wanted_replicas: wanted_replicas(record.policy) }).await;
        }
    }

    /// The record's configuration, as the shard needs it.
    fn configuration(&self, record: &DiskRecord) -> Configuration {
        let live = self.node.world.nodes.now();
        let misplaced = placement::misplaced(record.policy, &self.me.node, &record.replicas, &live);
        Configuration {
            epoch: record.epoch,
            replicas: record.replicas.iter().map(|replica| replica.node.clone()).collect(),
            write_back: record.mode == Mode::WriteBack,
            wanted_replicas: wanted_replicas(record.policy),
            strict: record.policy.is_strict(),
            misplaced: misplaced.into_iter().map(str::to_owned).collect(),
        }
    }

    /// Another node owns the disk: end all I/O here, then say so (P4).
    async fn let_go(&mut self, epoch: u64, record: Option<DiskRecord>) {
        self.node.here.remove(&self.name);
        let disk = self.name.clone();
        let keep = record.as_ref().is_some_and(|record| record.is_replica(&self.me));
        let ended = self.ask(|done| Command::LetGo { disk, keep, done }).await;
        self.local = Local::Closed;
        // Should this node take the disk over again, who was silent then has owned it since and may write (P4).
        self.former_since.clear();
        let Some(record) = record else { return };
        let owner = record.owner.as_ref().map_or_else(|| "nobody".to_owned(), ToString::to_string);
        self.event(
            "let-go",
            format!("{} is no longer its owner, {owner} is, in epoch {epoch}", self.me.node),
        );
        if ended.is_ok() {
            let mine = record.former.iter().find(|former| former.node == self.me);
            self.owed_release = mine.map(|former| former.epoch);
            self.write_owed_release().await;
        }
    }

    async fn write_owed_release(&mut self) {
        let Some(epoch) = self.owed_release else { return };
        let note = ReleasedRecord {
            disk: self.name.clone(),
            epoch,
            node: self.me.clone(),
            time_unix_ms: wall_clock_ms(),
        };
        let key = keys::released(&self.name, epoch, &self.me.node);
        match self.node.registry.transact(note.create(key)).await {
            Ok(_) | Err(RegistryError::Conflict { .. }) => self.owed_release = None,
            Err(error) => {
                tracing::debug!(disk = self.name, %error, "the release is still to be noted");
                self.retry_at = Some(Nanos::now() + RETRY);
            }
        }
    }

    /// When the I/O of all former owners has ended: tells the shard, and strikes them off the record. Otherwise says when
    /// to look again.
    async fn settle_former(&mut self, record: &DiskRecord) -> Option<Nanos> {
        if !matches!(self.local, Local::Open { .. }) || record.former.is_empty() {
            self.former_since.clear();
            return None;
        }
        if let Some(end) = self.former_ends(record) {
            return Some(end);
        }
        if !std::mem::replace(&mut self.told_former, true) {
            self.send(Command::FormerStopped { disk: self.name.clone() }).await;
        }
        let (me, epoch) = (self.me.clone(), record.epoch);
        let strike_off = |record: &DiskRecord| {
            let former: Vec<FormerOwner> = record.former.clone();
            former.iter().try_fold(record.clone(), |record, former| {
                ownership::forget_former(&record, &me, epoch, former)
            })
        };
        if let Err(error) = self.change(strike_off).await {
            self.later(&error);
        }
        self.retry_at
    }

    /// When the I/O of the former owners ends; `None` when it has.
    fn former_ends(&mut self, record: &DiskRecord) -> Option<Nanos> {
        let now = Nanos::now();
        let mut known = Vec::new();
        for former in &record.former {
            let evidence = if self.node.world.has_released(&self.name, former.epoch, &former.node) {
                Evidence::Released
            } else if self.node.world.has_stopped(&former.node) {
                Evidence::Stopped
            } else {
                Evidence::None
            };
            let seen = self.former_since.entry(former.node.clone()).or_insert((evidence, now));
            if seen.0 != evidence {
                *seen = (evidence, now);
            }
            known.push((former, evidence, seen.1));
        }
        former_ends(&known, self.node.config.lease.fence_grace.0, now)
    }

    /// A replica here that no record asks for any more.
    async fn forget_replica(&mut self, record: Option<&DiskRecord>) {
        let below_epoch = match record {
            None => u64::MAX,
            Some(record) if record.has_owners_copy(&self.me) || record.is_replica(&self.me) => return,
            Some(record) => record.epoch,
        };
        if below_epoch != self.forgotten_below && self.local == Local::Closed {
            self.forgotten_below = below_epoch;
            self.send(Command::ForgetReplica { disk: self.name.clone(), below_epoch }).await;
        }
    }

    async fn send(&self, command: Command) {
        self.node.shards.send(&self.name, command).await;
    }

    fn event(&self, kind: &'static str, text: String) {
        self.node.journal.tell(kind, &self.name, text);
    }
}

/// Where the log of a disk is kept, as the shard needs it.
#[must_use]
pub fn log_medium(record: &DiskRecord) -> LogMedium {
    match record.medium {
        Medium::Flash => LogMedium::Flash { disk_id: record.id },
        _ => LogMedium::Ram,
    }
}

fn wanted_replicas(policy: Policy) -> Option<usize> {
    match policy {
        Policy::WriteThrough => None,
        Policy::WriteBack(_) | Policy::Strict(_) => Some(policy.replicas()),
    }
}

async fn sleep_until(time: Option<Nanos>) {
    match time {
        Some(time) => tokio::time::sleep(time - Nanos::now()).await,
        None => std::future::pending().await,
    }
}
