//! One disk, as the control plane of this node sees it: a task that reconciles the open disk with the registry, and carries
//! out the shard's requests and operators' commands.
//!
//! Everything about one disk happens in this one task, one step after the other. Slow steps (connecting to a peer) are tasks
//! of their own that report back. The shard's requests are in `requests`, operators' commands in `commands`.

mod commands;
mod configuration;
mod former;
mod handover;
mod isolation;
mod messages;
mod opening;
mod record;
mod releasing;
mod replacement;
mod requests;
mod silence;
#[cfg(test)]
pub(crate) mod tests;
mod waiting;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{mpsc, oneshot, watch};
use weir_block::Nanos;
use weir_cluster::membership::SessionState;
use weir_cluster::node_state::{self, Leaving};
use weir_cluster::ownership::{self, Refusal};
use weir_cluster::placement::{CLAIMED_WITHIN, successors, turns};
use weir_cluster::records::{DiskRecord, Limit, Medium, Mode, NodeRef, Policy};
use weir_cluster::view::Seen;

use super::agreement;
use super::change::ChangeError;
use super::decide::{Decision, Local, Situation, decide, is_live};
use super::failures::{Failures, GUESTS_WAIT};
use super::node::{Node, Open};
use crate::error::ApiError;
use crate::shard::messages::{Arrival, Command, Unopened, WantedConfiguration};
use former::Formers;
use isolation::OwnerGone;
pub use messages::{Inbox, Message, NewContent, Request, Why};
pub use opening::log_medium;

/// Messages that wait for a disk's task before their senders do.
const INBOX: usize = 256;

/// Pause before something that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// The shard has ended, and with it the command.
const STOPPING: &str = "the node is stopping";

/// The history of a disk that this process owns and does not have open.
#[derive(Clone, Copy, Debug)]
enum Came {
    /// By a claim or a takeover.
    By(Arrival),
    /// It was open here, and has been closed with nothing dirty.
    Closed,
}

/// No living process owns a disk, and another one has to.
struct Vacant {
    /// The owner that is gone. `None`: the disk has none, and an heir.
    owner: Option<NodeRef>,
    epoch: u64,
    /// This task has seen it since then.
    since: Nanos,
}

impl Vacant {
    /// The time at which one more process may act.
    fn next_turn(&self, now: Nanos) -> Nanos {
        self.since + CLAIMED_WITHIN * turns(now - self.since)
    }
}

/// A close that has begun, and that nobody waits for.
struct Closing {
    /// Only if the disk has no clients.
    unless_used: bool,
    /// The entry for clients that the close has removed from the open disks, to be put back if the disk stays open.
    shown: Option<Open>,
}

/// The task's state.
struct DiskTask {
    name: String,
    node: Arc<Node>,
    me: NodeRef,
    inbox: mpsc::Receiver<Message>,
    /// For tasks that report back; weak, so that they do not keep the task alive.
    outbox: mpsc::WeakSender<Message>,
    local: Local,
    /// The latest revision of the record that this task knows.
    heard: u64,
    /// The way in which the disk came, or comes, to this node, and its epoch.
    arrival: Option<(u64, Came)>,
    /// Nothing is tried before this.
    retry_at: Option<Nanos>,
    owner_gone: Option<OwnerGone>,
    /// The disk is another process's to claim, or to take over.
    vacant: Option<Vacant>,
    formers: Formers,
    /// The processes that this owner is connected to, by the name of their node.
    connected: HashMap<String, NodeRef>,
    /// The nodes to which the open disk has a connection, as far as it has said so. The others have refused it, or are lost.
    filled: BTreeSet<String>,
    told_policy: Option<Policy>,
    /// The limit that the open disk has.
    told_limit: Option<Limit>,
    /// The size with which it was opened, or that it was told since.
    told_size: Option<u64>,
    /// The members of its set that the open disk is to replace, as it was told.
    told_leaving: Leaving,
    /// The replicas' nodes that the registry does not hear.
    unheard: silence::Unheard,
    /// The outcome of a change is unknown: it was sent over this revision, and is impossible once there is a later one. If it
    /// was a move, the disk is served again only then.
    doubt: Option<u64>,
    /// The shard holds the disk's clients for a move that has not failed so far.
    holds_clients: bool,
    /// The shard closes the disk, and this task has stopped waiting for that.
    closing: Option<Closing>,
    /// The open disk is told to be write-through, whatever its policy, because it is about to be closed for a move.
    empties: bool,
    /// Why it could not be made ready to be closed, and until when no drain tries that again.
    not_ready: Option<(Nanos, ApiError)>,
    /// A change of the record is under way.
    changing: bool,
    /// A replica has refused this owner, and the registry has not been asked yet.
    refused: bool,
    sessions: watch::Receiver<u64>,
    forgotten_below: u64,
    /// The follower that the open disk here knows.
    follower_known: Option<String>,
    /// The `released/` notes that are still to be written: the epochs.
    owed_releases: BTreeSet<u64>,
    /// They are not tried again before this.
    note_at: Option<Nanos>,
    /// A change of the record that the shard wants, and that came while another step was waiting.
    postponed: Option<WantedConfiguration>,
    /// A replica has refused this owner while another step was waiting.
    newly_refused: bool,
    /// Requests that came while another step was waiting.
    waiting: Vec<Request>,
    unavailable: bool,
    /// The record cannot be read, and an event was recorded.
    unreadable: bool,
    /// The failures to open it.
    failures: Failures,
}

/// Starts the task of a disk.
pub fn start(name: &str, node: &Arc<Node>) -> Inbox {
    let (task, sender) = DiskTask::new(name, node);
    weir_task::spawn(task.run());
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
            heard: 0,
            arrival: None,
            retry_at: None,
            owner_gone: None,
            vacant: None,
            formers: Formers::default(),
            connected: HashMap::new(),
            filled: BTreeSet::new(),
            told_policy: None,
            told_limit: None,
            told_size: None,
            told_leaving: Leaving::default(),
            unheard: silence::Unheard::default(),
            doubt: None,
            holds_clients: false,
            closing: None,
            empties: false,
            not_ready: None,
            changing: false,
            refused: false,
            sessions: node.rights.sessions(),
            forgotten_below: 0,
            follower_known: None,
            owed_releases: BTreeSet::new(),
            note_at: None,
            postponed: None,
            newly_refused: false,
            waiting: Vec::new(),
            unavailable: false,
            unreadable: false,
            failures: Failures::default(),
        };
        (task, sender)
    }

    async fn run(mut self) {
        let mut changes = self.node.records.changes_of(&self.name);
        loop {
            let again = [self.reconcile().await, self.note_at].into_iter().flatten().min();
            if self.catch_up().await {
                continue;
            }
            if let Some(request) = self.next_request() {
                self.on_request(request).await;
                continue;
            }
            tokio::select! {
                // Whichever comes first, all changes are handled before the next wait.
                biased;
                message = self.inbox.recv() => match message {
                    Some(message) => self.attend(message).await,
                    // The disk was deleted; its open part here must end all the same.
                    None => {
                        self.reconcile().await;
                        return;
                    }
                },
                () = changes.next(&self.node.records) => {}
                _ = self.sessions.changed() => {}
                () = sleep_until(again) => {}
            }
        }
    }

    /// The one that has waited longest. A deletion for which a close was given up comes first: to all others the disk looks open.
    fn next_request(&mut self) -> Option<Request> {
        match self.waiting.iter().position(Request::is_deletion).filter(|_| self.closing.is_some()) {
            Some(at) => Some(self.waiting.remove(at)),
            None => self.waiting.pop(),
        }
    }

    /// Sends a command for which the shard may need time. The disk's requests meanwhile (another replica set, a connection,
    /// the end of former owners) are carried out, or the two would wait for each other.
    ///
    /// If another node turns out to own the disk, the wait ends: this node must release its part of the disk (P2).
    async fn ask<T>(&mut self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, String> {
        self.ask_until(command, None, |task| task.is_taken().then(taken)).await
    }

    /// As [`DiskTask::ask`], given up when `over` returns a reason; it is called again at `deadline`. Any other work in
    /// progress ends first: a change that is given up halfway would be in doubt unnoticed.
    async fn ask_until<T>(
        &mut self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
        deadline: Option<Nanos>,
        over: impl Fn(&mut DiskTask) -> Option<String>,
    ) -> Result<T, String> {
        let (answer, mut answered) = oneshot::channel();
        let mut changes = self.node.records.changes_of(&self.name);
        self.node.shards.send(&self.name, command(answer)).await;
        let mut again = Some(Nanos::now());
        loop {
            self.catch_up().await;
            match answered.try_recv() {
                Ok(answer) => return Ok(answer),
                Err(TryRecvError::Closed) => return Err(STOPPING.to_owned()),
                Err(TryRecvError::Empty) => {}
            }
            if let Some(reason) = over(self) {
                return Err(reason);
            }
            tokio::select! {
                biased;
                answer = &mut answered => return answer.map_err(|_| STOPPING.to_owned()),
                Some(message) = self.inbox.recv() => self.attend(message).await,
                () = changes.next(&self.node.records) => again = self.settle_meanwhile().await,
                _ = self.sessions.changed() => again = self.settle_meanwhile().await,
                () = sleep_until(again) => again = self.settle_meanwhile().await,
                () = sleep_until(deadline) => {}
            }
        }
    }

    /// While another step waits, doubts end and former owners do: for a disk that is to be closed, nothing is destaged before (P4).
    async fn settle_meanwhile(&mut self) -> Option<Nanos> {
        match self.retry_at.is_some_and(|at| at > Nanos::now()) {
            true => self.confirm_right().await,
            false => {
                self.retry_at = None;
                self.settle_right().await;
            }
        }
        self.resume_clients().await;
        let record = self.record().filter(|record| record.owner.as_ref() == Some(&self.me));
        let (Some(record), Local::Open { epoch }) = (record, self.local) else { return self.retry_at };
        if epoch < record.epoch {
            self.configure(&record).await;
        }
        let before = self.retry_at.take();
        let again = self.settle_former(&record).await;
        self.retry_at = [self.retry_at, before].into_iter().flatten().min();
        [again, self.retry_at].into_iter().flatten().min()
    }

    /// Whether the copy is here that the record may count on because of this node's flash. Checked only for a takeover. An
    /// error is no answer: taking it for a "no" would remove a good copy from the record.
    async fn has_copy(&self, record: Option<&DiskRecord>) -> Result<bool, ApiError> {
        let Some(record) = record.filter(|record| record.medium == Medium::Flash) else { return Ok(false) };
        let gone = record.owner.as_ref().is_some_and(|owner| !is_live(&self.node.records.nodes.now(), owner));
        let counted = record.is_replica(&self.me) || record.has_owners_copy(&self.me);
        if !gone || !counted {
            return Ok(false);
        }
        let disk = self.name.clone();
        self.node.shards.ask(&self.name, |answer| Command::HasCopy { disk, answer }).await
    }

    /// Brings what is here into line with the registry. Says when to look again without being woken.
    async fn reconcile(&mut self) -> Option<Nanos> {
        let now = Nanos::now();
        self.write_owed_releases().await;
        if self.is_unreadable() {
            return self.retry_at.filter(|at| *at > now);
        }
        let record = self.record();
        let is_closed = record.as_ref().is_some_and(|record| self.closed_since(record).is_some());
        self.node.here.set_unreleased(&self.name, is_closed);
        if record.as_ref().is_none_or(|record| record.owner.as_ref() != Some(&self.me)) {
            self.node.here.set_unopened(&self.name, None);
        }
        self.forget_copy(record.as_ref()).await;
        self.tell_follower().await;
        self.resume_clients().await;
        if self.retry_at.is_some_and(|at| at > now) {
            return self.retry_at;
        }
        self.retry_at = None;
        self.settle_right().await;
        self.resume_clients().await;
        let record = self.record();
        let Ok(has_copy) = self.has_copy(record.as_ref()).await else {
            self.retry_at = Some(now + RETRY);
            return self.retry_at;
        };
        let decision = {
            let live = self.node.records.nodes.now();
            self.track_owner(record.as_ref(), now);
            self.track_vacancy(record.as_ref(), now);
            let owner = record.as_ref().and_then(|record| record.owner.as_ref());
            decide(
                record.as_ref(),
                &Situation {
                    me: &self.me,
                    live: &live,
                    barred: &self.node.barred(),
                    local: self.local,
                    has_copy,
                    owner_stopped: owner.is_some_and(|owner| self.node.records.has_stopped(owner)),
                    owner_gone_since: self.owner_gone.as_ref().map(|gone| gone.since),
                    vacant_since: self.vacant.as_ref().map(|vacant| vacant.since),
                    now,
                    fence_grace: self.node.config.lease.fence_grace.0,
                },
            )
        };
        if let Some(until) = self.held_until(&decision, record.as_ref()).await {
            return Some(until);
        }
        // Whose turn it is may do nothing, and then nothing wakes this task.
        let next_turn = self.vacant.as_ref().map(|vacant| vacant.next_turn(now));
        [self.carry_out(decision, record).await, next_turn].into_iter().flatten().min()
    }

    async fn carry_out(&mut self, decision: Decision, record: Option<DiskRecord>) -> Option<Nanos> {
        self.note_availability(&decision);
        if !matches!(decision, Decision::Open | Decision::Claim | Decision::TakeOver(_)) {
            self.failures.forget();
        }
        match (decision, record) {
            (Decision::Nothing, Some(record)) => {
                self.settle_follower(&record).await;
                self.settle_home(&record).await;
                self.settle_guards(&record).await;
                self.settle_leaving(&record).await;
                let silence = self.settle_silent(&record).await;
                return [silence, self.settle_former(&record).await, self.retry_at]
                    .into_iter()
                    .flatten()
                    .min();
            }
            (Decision::Nothing | Decision::Unavailable(_), _) => {}
            // Its file is about to be removed.
            (Decision::Claim, Some(_)) if self.node.intents.is_being_deleted(&self.name) => {
                self.retry_at = Some(Nanos::now() + RETRY);
            }
            // It would close the disk again for good, and another node may claim it.
            (Decision::Claim, Some(_)) if self.node.here.is_stopping() => {}
            (Decision::Claim, Some(seen)) => {
                // Whoever cannot open it leaves it to others.
                if let Err(error) = self.check_claim(&seen).await {
                    return self.not_opened(error);
                }
                let me = self.me.clone();
                // Not one that an operator has closed since, nor one that has been passed on once more.
                let claim =
                    |record: &DiskRecord| match (&record.heir, record.epoch) == (&seen.heir, seen.epoch) {
                        true => ownership::claim_free(record, &me),
                        false => Err(Refusal::NotOwned),
                    };
                match self.change(claim).await {
                    Ok(next) => {
                        self.arrival = Some((next.epoch, Came::By(self.arrival_after(&next))));
                        return Some(Nanos::now());
                    }
                    Err(error) => self.later(&error),
                }
            }
            (Decision::TakeOver(evidence), Some(seen)) => {
                if self.others_may_take(&seen) {
                    // It would close the disk again for good. A log that others have copies of is another matter: they may stop, too.
                    if self.node.here.is_stopping() && seen.mode == Mode::WriteThrough {
                        return None;
                    }
                    // As the owner it would keep the disk, and nobody could open it.
                    if let Err(error) = self.check_claim(&seen).await {
                        return self.not_opened(error);
                    }
                    // That took up to seconds, and members may hear the owner again.
                    let decision = Decision::TakeOver(evidence.clone());
                    if let Some(until) = self.held_until(&decision, Some(&seen)).await {
                        return Some(until);
                    }
                }
                let me = self.me.clone();
                let taken =
                    self.take(&evidence.owner, |record| ownership::take_over(record, &me, &evidence)).await;
                match taken {
                    Ok(next) => {
                        self.arrival = Some((next.epoch, Came::By(self.arrival_after(&next))));
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
                let disclaimed =
                    self.take(&evidence.owner, |record| ownership::disclaim(record, &me, &evidence)).await;
                match disclaimed {
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
            (Decision::Open, Some(record))
                if self.node.here.is_stopping() && self.closed_since(&record).is_some() =>
            {
                if let Err(error) = self.release(false).await {
                    tracing::debug!(disk = self.name, %error, "it is released later");
                    self.retry_at = Some(Nanos::now() + RETRY);
                }
            }
            // The removal would take the file away from under the opened disk.
            (Decision::Open, Some(_)) if self.node.intents.is_being_deleted(&self.name) => {
                self.retry_at = Some(Nanos::now() + RETRY);
            }
            (Decision::Open, Some(record)) => {
                if let Err(error) = self.open(&record).await {
                    self.node.here.set_unopened(&self.name, Some(&error));
                    return self.not_opened(error);
                }
                return Some(Nanos::now());
            }
            // The task decides again at once: this record may have arrived during a pause, and no other change may follow.
            (Decision::Configure, Some(record)) => {
                self.configure(&record).await;
                return Some(Nanos::now());
            }
            (Decision::Release { epoch }, record) => {
                self.release_disk(epoch, record).await;
                return Some(Nanos::now());
            }
            (
                Decision::Claim
                | Decision::TakeOver(_)
                | Decision::Disclaim(_)
                | Decision::Open
                | Decision::Configure,
                None,
            ) => {}
        }
        self.retry_at
    }

    /// Whether another process may take the disk over as well, and not all of them have had their turn: a disk that none of them can
    /// open gets an owner that says so.
    fn others_may_take(&self, record: &DiskRecord) -> bool {
        let live = self.node.records.nodes.now();
        let all = successors(record, &live, &self.node.barred(), Duration::MAX).len();
        let vacant = self.vacant.as_ref().map_or(Duration::ZERO, |vacant| Nanos::now() - vacant.since);
        all > 1 && turns(vacant) as usize <= all
    }

    async fn check_claim(&mut self, record: &DiskRecord) -> Result<(), String> {
        let (node, of) = (Arc::clone(&self.node), record.clone());
        let checked = self.meanwhile(async move { agreement::check(&node, &of).await }).await;
        match checked.map_err(|error| error.to_string())? {
            // Trouble with other disks' storage is no reason to leave this one without an owner.
            Ok(()) | Err(Unopened::Busy(_)) => Ok(()),
            Err(Unopened::Fails(reason)) => Err(reason),
        }
    }

    fn not_opened(&mut self, error: String) -> Option<Nanos> {
        let (pause, is_new) = self.failures.failed(&error, GUESTS_WAIT);
        if is_new {
            self.event("open-failed", error);
        }
        self.retry_at = Some(Nanos::now() + pause);
        self.retry_at
    }

    fn later(&mut self, error: &ChangeError) {
        tracing::debug!(disk = self.name, %error, "not now");
        self.retry_at = Some(Nanos::now() + RETRY);
    }

    fn track_owner(&mut self, record: Option<&DiskRecord>, now: Nanos) {
        let gone = record
            .and_then(|record| record.owner.as_ref())
            .filter(|owner| !is_live(&self.node.records.nodes.now(), owner));
        match (gone, &self.owner_gone) {
            (Some(owner), Some(known)) if *owner == known.owner => {}
            (Some(owner), _) => {
                self.owner_gone = Some(OwnerGone::new(owner.clone(), now));
            }
            (None, _) => self.owner_gone = None,
        }
        self.note_isolation(now);
    }

    fn track_vacancy(&mut self, record: Option<&DiskRecord>, now: Nanos) {
        let live = self.node.records.nodes.now();
        let is_vacant = |record: &&DiskRecord| match &record.owner {
            Some(owner) => !is_live(&live, owner),
            None => record.heir.is_some(),
        };
        // Nobody can claim it while the registry is away, and then the first one comes first again.
        let is_away = *self.node.session.state().borrow() == SessionState::Unconfirmed;
        let before = self.vacant.take().filter(|_| !is_away);
        self.vacant = record.filter(is_vacant).map(|record| {
            let (owner, epoch) = (record.owner.clone(), record.epoch);
            before.filter(|before| (&before.owner, before.epoch) == (&owner, epoch)).unwrap_or(Vacant {
                owner,
                epoch,
                since: now,
            })
        });
    }

    /// One event when the disk becomes unavailable, recorded by one node.
    fn note_availability(&mut self, decision: &Decision) {
        let Decision::Unavailable(reason) = decision else {
            self.unavailable = false;
            return;
        };
        let first = self.node.records.nodes.now().keys().next() == Some(&self.me.node);
        if !std::mem::replace(&mut self.unavailable, true) && first {
            self.event("unavailable", reason.clone());
        }
    }

    /// Whether the record cannot be read: its content is then unknown. This node serves the open disk for as long as its
    /// right lasts, and keeps its copies (P1). Reported once.
    fn is_unreadable(&mut self) -> bool {
        let Seen::Unreadable { error, .. } = self.seen() else {
            self.unreadable = false;
            return false;
        };
        if !std::mem::replace(&mut self.unreadable, true) {
            tracing::error!(disk = self.name, %error, "this node's part of the disk stays as it is");
            self.event(
                "record-unreadable",
                format!("{} cannot read the disk's record: {error}", self.me.node),
            );
        }
        true
    }

    /// Gives up a copy here that no record asks for any more.
    async fn forget_copy(&mut self, record: Option<&DiskRecord>) {
        let below_epoch = match record {
            None => u64::MAX,
            Some(record) if self.gives_up_last_copy(record) => record.epoch + 1,
            Some(record) if record.has_owners_copy(&self.me) || record.is_replica(&self.me) => return,
            Some(record) => record.epoch,
        };
        if below_epoch != self.forgotten_below && self.local == Local::Closed {
            self.forgotten_below = below_epoch;
            self.send(Command::ForgetReplica { disk: self.name.clone(), below_epoch }).await;
        }
    }

    /// A planted bug, only for the simulator.
    fn gives_up_last_copy(&self, record: &DiskRecord) -> bool {
        let is_gone = |owner| !is_live(&self.node.records.nodes.now(), owner);
        self.node.rules.planted.has(node_state::planted::Bug::DrainLastCopy)
            && record.owner.as_ref().is_some_and(is_gone)
            && record.is_replica(&self.me)
            && self.node.barred().contains(&self.me.node)
    }

    async fn send(&self, command: Command) {
        self.node.shards.send(&self.name, command).await;
    }

    fn event(&self, kind: &'static str, text: String) {
        self.node.journal.tell(kind, &self.name, text);
    }
}

fn taken() -> String {
    "another node owns the disk now".to_owned()
}

async fn sleep_until(time: Option<Nanos>) {
    match time {
        Some(time) => weir_task::sleep(time - Nanos::now()).await,
        None => std::future::pending().await,
    }
}
