//! A disk moves to another node without being drained: its successor gets a complete copy of the log, then the registry
//! the new owner, and the former owner's log stays as a replica.

use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::ownership;
use weir_cluster::records::{DiskRecord, Mode, NodeRef};
use weir_cluster::right::Event;

use super::{DiskTask, RETRY, Why, sleep_until, taken};
use crate::control::agreement;
use crate::control::decide::{Local, is_live};
use crate::error::{ApiError, ApiErrorKind};
use crate::file_fault::fault;
use crate::shard::messages::{Command, DiskStatus};

/// Longest time for the successor to get its copy of the log.
const FILL: Duration = Duration::from_secs(40);

/// Longest time for a disk without copies to empty its log: gigabytes at what a busy storage takes. The drain of its node has other
/// disks to move, and an operator's command has 60 s.
const EMPTIED: Duration = Duration::from_secs(40);

/// A drain does not try again for so long to close a disk that could not be made ready for that: each try takes its guest the
/// write-back, or holds its clients, for seconds.
const CLOSED_AGAIN: Duration = Duration::from_secs(20);

/// Pause between two looks at what a disk has at its backing.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Longest time for the registry to answer before a disk is handed over.
const ANSWER: Duration = Duration::from_secs(1);

/// Longest time for the writes that are on their way to the backing, and for replicas to answer.
const HOLD: Duration = Duration::from_secs(5);

/// The process that is to have the disk or a copy of its log, and why.
#[derive(Clone, Copy)]
pub(super) struct Goal<'a> {
    pub to: &'a NodeRef,
    pub why: Why,
}

impl DiskTask {
    /// Gives the disk to `to`. Returns how many bytes were dirty when it changed hands.
    pub(super) async fn move_to(&mut self, to: &NodeRef, why: Why) -> Result<u64, ApiError> {
        let record = self.owned()?;
        // Its target was asked first, and may have answered late.
        self.check_reason(why)?;
        self.check_takes_disks(&to.node)?;
        self.check_follows(&record, to, why)?;
        self.check_file().await?;
        self.check_opens(to, why).await?;
        if !has_copies(&record) {
            self.check_pause(why)?;
            // Closing it would be for as long as the registry is away (P12).
            self.check_registry().await?;
            // No node holds a copy of the log for the successor: it has to start from the backing.
            let passed_on = match self.settle_to_close(&record, Goal { to, why }).await {
                Ok(()) => self.pass_on(to, why).await,
                Err(error) => Err(error),
            };
            // Closed or not, it is opened as its policy says.
            self.set_empties(&record, false).await;
            if passed_on.is_err() && self.local != Local::Closed {
                self.resume_clients().await;
            }
            passed_on?;
            self.event("moved", format!("from {} to {}, 0 bytes dirty", self.me.node, to.node));
            return Ok(0);
        }
        let moved = match self.prepare(Goal { to, why }).await {
            Ok(()) => self.hand_over(to, why).await,
            Err(error) => Err(error),
        };
        if moved.is_err() && self.local != Local::Closed {
            self.send(Command::ResumeDestage { disk: self.name.clone() }).await;
            self.keep_successor().await;
            self.resume_clients().await;
        }
        moved
    }

    async fn pass_on(&mut self, to: &NodeRef, why: Why) -> Result<(), ApiError> {
        self.release_with(|record, me, epoch, dirty| {
            let home = why.home(record.home.clone(), &me.node);
            Ok(DiskRecord { home, ..ownership::pass_on(record, me, epoch, dirty, to)? })
        })
        .await
    }

    /// The node that asks may know an older record than this owner: once following has ended, nobody's write moves the disk.
    fn check_follows(&self, record: &DiskRecord, to: &NodeRef, why: Why) -> Result<(), ApiError> {
        if why != Why::Followed || record.follower.as_ref() == Some(to) {
            return Ok(());
        }
        let message =
            format!("disk {} stays on {}: {} does not follow it any more", self.name, self.me.node, to.node);
        Err(ApiError::new(ApiErrorKind::Refused, message))
    }

    /// Whether the disk is to move still: a node that takes disks again keeps its own.
    fn check_reason(&self, why: Why) -> Result<(), ApiError> {
        if !why.is_over(&self.node) {
            return Ok(());
        }
        let message = format!("disk {} stays on {}, which takes disks again by now", self.name, self.me.node);
        Err(ApiError::new(ApiErrorKind::Refused, message))
    }

    /// Whether the disk is to move still, and the target lives and takes disks.
    fn check_goal(&self, Goal { to, why }: Goal<'_>) -> Result<(), ApiError> {
        self.check_reason(why)?;
        self.check_takes_disks(&to.node)?;
        if is_live(&self.node.records.nodes.now(), to) {
            return Ok(());
        }
        let message =
            format!("disk {} cannot move to {}: it is gone; it stays where it is", self.name, to.node);
        Err(ApiError::new(ApiErrorKind::Unavailable, message))
    }

    async fn check_registry(&mut self) -> Result<(), ApiError> {
        if self.refresh(ANSWER).await {
            return Ok(());
        }
        let message = format!("disk {} stays where it is: the registry does not answer", self.name);
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again when it does"))
    }

    /// A backing file that was deleted or replaced exists only as long as this node has it open. Whoever moves the disk, an
    /// operator or a drain: the file would be lost with it.
    async fn check_file(&mut self) -> Result<(), ApiError> {
        let Some(file) = self.node.here.files().remove(&self.name) else { return Ok(()) };
        let look = tokio::task::spawn_blocking(move || fault(&file));
        let unknown = match self.meanwhile(weir_task::timeout(ANSWER, look)).await? {
            Ok(Ok(None)) => return Ok(()),
            Ok(Ok(Some(fault))) => {
                let message = format!("disk {} stays on this node: {fault}", self.name);
                return Err(ApiError::new(ApiErrorKind::Refused, message).hint(
                    "the data can still be read through its export: put the file back, or copy the data elsewhere first",
                ));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the storage has not answered for {} s", ANSWER.as_secs()),
        };
        let message = format!("disk {} stays on this node: {unknown}", self.name);
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again when the storage answers"))
    }

    /// A drain has asked the node before it chose it. Nobody could open a disk that an operator, or a guest that migrates, moves to a
    /// node without its volume.
    async fn check_opens(&mut self, to: &NodeRef, why: Why) -> Result<(), ApiError> {
        if !matches!(why, Why::Requested | Why::Followed) {
            return Ok(());
        }
        let (node, to, disk) = (Arc::clone(&self.node), to.clone(), self.name.clone());
        let asked = self.meanwhile(async move { agreement::ask(&node, &to, &disk).await }).await?;
        asked.map_err(|reason| {
            let message = format!("disk {} stays on {}: {reason}", self.name, self.me.node);
            ApiError::new(ApiErrorKind::Refused, message)
                .hint("make its volume available there, or name another node")
        })
    }

    /// An operator's move is tried at once, and that of a guest that waits on another node.
    pub(super) fn check_pause(&self, why: Why) -> Result<(), ApiError> {
        let waits = matches!(why, Why::Drained | Why::Quarantined | Why::Returned);
        match &self.not_ready {
            // The same reason as before, which is no news.
            Some((until, error)) if waits && *until > Nanos::now() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Lets clients on `to` use the disk from now on, and prepares that node for their first write. `None`: no node any more.
    pub(super) async fn follow(&mut self, to: Option<&NodeRef>) -> Result<(), ApiError> {
        let record = self.owned()?;
        let me = self.me.clone();
        if to == Some(&me) {
            let message = format!("disk {} is on {} already", self.name, me.node);
            return Err(
                ApiError::new(ApiErrorKind::Refused, message).hint("name the node that its guest goes to")
            );
        }
        // A strict policy is kept to the last: its set changes when the disk moves, and not for as long as it is followed.
        if to.is_some() && has_copies(&record) && !record.policy.is_strict() {
            let filled = self.fill(to.map(|to| Goal { to, why: Why::Followed })).await;
            if filled.is_err() {
                self.keep_successor().await;
            }
            filled?;
        }
        let changed = self.change(|record| ownership::set_follower(record, &me, record.epoch, to)).await;
        if changed.is_err() && to.is_some() {
            self.keep_successor().await;
        }
        changed?;
        self.tell_follower().await;
        match to {
            Some(to) => {
                let text = format!("clients on {} may use it; their first write moves it there", to.node);
                self.event("follow", text);
            }
            None => {
                self.fill(None).await?;
                self.event("follow", format!("it stays on {}", me.node));
            }
        }
        Ok(())
    }

    /// Tells the open disk whose clients it may serve beside this node's own. A disk that is opened knows of nobody. One that
    /// another node owns by now is not told: its release ends all clients, with the replies that are kept for them.
    pub(super) async fn tell_follower(&mut self) {
        if self.local == Local::Closed {
            self.follower_known = None;
            return;
        }
        let Some(record) = self.record().filter(|record| record.owner.as_ref() == Some(&self.me)) else {
            return;
        };
        let follower = record.follower.map(|follower| follower.node);
        if follower != self.follower_known {
            self.follower_known.clone_from(&follower);
            self.send(Command::FollowerIs { disk: self.name.clone(), node: follower }).await;
        }
    }

    /// A follower that is gone follows no more: another process of its node knows nothing of the disk.
    pub(super) async fn settle_follower(&mut self, record: &DiskRecord) {
        let open = matches!(self.local, Local::Open { .. });
        let Some(follower) = record.follower.clone().filter(|_| open) else { return };
        if !is_live(&self.node.records.nodes.now(), &follower)
            && let Err(error) = self.follow(None).await
        {
            tracing::debug!(disk = self.name, %error, "the follower is struck off later");
            self.retry_at = Some(Nanos::now() + RETRY);
        }
    }

    /// A node that was removed gets no disks back, also if another of its name joins.
    pub(super) async fn settle_home(&mut self, record: &DiskRecord) {
        let open = matches!(self.local, Local::Open { .. });
        let Some(home) = record.home.as_ref().filter(|_| open) else { return };
        let records = &self.node.records;
        // A record that cannot be read says nothing of who was removed.
        if !records.reads_node_states() || records.node_states().nodes.contains_key(home) {
            return;
        }
        let me = self.me.clone();
        if let Err(error) = self.change(|record| ownership::forget_home(record, &me, record.epoch)).await {
            self.later(&error);
        }
    }

    /// The record, while this node owns the disk and has it open.
    fn owned(&mut self) -> Result<DiskRecord, ApiError> {
        let record = self.known()?;
        if record.owner.as_ref() != Some(&self.me) || self.local == Local::Closed {
            let message = format!("disk {} is not open on {} any more", self.name, self.me.node);
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        }
        Ok(record)
    }

    /// The successor is the node that follows the disk by the record, and no other: a set that has to contain another one does not
    /// replace lost members, and without the follower's copy its guest's first write waits for one.
    async fn keep_successor(&mut self) {
        let follower = self.record().and_then(|record| record.follower);
        let node = follower.map(|follower| follower.node);
        self.send(Command::Successor { disk: self.name.clone(), node }).await;
    }

    /// Waits until the target is in the replica set. `None`: no particular node has to be. Guests go on meanwhile.
    async fn fill(&mut self, goal: Option<Goal<'_>>) -> Result<(), ApiError> {
        let disk = self.name.clone();
        let node = goal.map(|goal| goal.to.node.clone());
        self.send(Command::Successor { disk: disk.clone(), node }).await;
        let Some(goal) = goal else { return Ok(()) };
        let replica = goal.to.clone();
        let late = format!("cannot move to {}: it has no complete copy after {FILL:?}", replica.node);
        self.until(FILL, late, |record| record.is_replica(&replica), goal).await
    }

    /// Waits until the record is as it should be, for so long at most; or until the goal that it is for is out of reach, or is none any
    /// more. Guests go on meanwhile.
    async fn until(
        &mut self,
        limit: Duration,
        late: String,
        is_done: impl Fn(&DiskRecord) -> bool,
        goal: Goal<'_>,
    ) -> Result<(), ApiError> {
        let unavailable = |message: String| Err(ApiError::new(ApiErrorKind::Unavailable, message));
        let (disk, deadline) = (self.name.clone(), Nanos::now() + limit);
        while !is_done(&self.known()?) {
            self.catch_up().await;
            if self.is_taken() {
                return unavailable(format!("another node owns disk {disk} by now"));
            }
            // It may have been drained since this began.
            self.check_goal(goal)?;
            if Nanos::now() >= deadline {
                return unavailable(format!("disk {disk} {late}; it stays where it is"))
                    .map_err(|error| error.hint("`weir events` may say why"));
            }
            self.settle_meanwhile().await;
            let look_again = deadline.min(Nanos::now() + Duration::from_millis(100));
            tokio::select! {
                biased;
                Some(message) = self.inbox.recv() => self.attend(message).await,
                () = sleep_until(Some(look_again)) => {}
            }
        }
        Ok(())
    }

    /// Has a disk without copies ready to be closed in a moment: its log empty, no request at its backing, and `to` and the registry
    /// there. Nothing of this is final, unlike the closing, which would last for as long as its storage does not answer.
    async fn settle_to_close(&mut self, record: &DiskRecord, goal: Goal<'_>) -> Result<(), ApiError> {
        // In write-through there is nothing in the log, and members that are being filled go on being filled.
        if record.mode != Mode::WriteThrough {
            self.empty(EMPTIED, goal).await?;
        }
        self.hold_clients().await?;
        self.await_backing().await?;
        // Both may have gone since this began, and a closed disk would wait for them (P12).
        self.check_goal(goal)?;
        self.check_registry().await?;
        self.check_write_through()?;
        // The closing answers what they have sent meanwhile, and disconnects them.
        self.resume_clients().await;
        Ok(())
    }

    /// A disk in write-back is moved to a node that holds a copy of its log, or is filled with one.
    fn check_write_through(&mut self) -> Result<(), ApiError> {
        if self.known()?.mode == Mode::WriteThrough {
            return Ok(());
        }
        let message =
            format!("disk {} stays where it is: it has just got copies, or become write-back", self.name);
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"))
    }

    /// Waits, while clients are held, until no request is at the backing.
    async fn await_backing(&mut self) -> Result<(), ApiError> {
        let deadline = Nanos::now() + HOLD;
        loop {
            let status = self.status().await?;
            let left = status.as_ref().map(|status| status.in_flight);
            if left == Some(0) {
                return Ok(());
            }
            if Nanos::now() >= deadline {
                let reason = match left {
                    _ if status.is_some_and(|status| status.is_full) => {
                        "its volume is full, and writes wait for space".to_owned()
                    }
                    None => format!("its shard has not said for {HOLD:?} whether its backing answers"),
                    Some(1) => format!("its backing has not answered 1 request for {HOLD:?}"),
                    Some(left) => format!("its backing has not answered {left} requests for {HOLD:?}"),
                };
                let message = format!("disk {} stays where it is: {reason}", self.name);
                let error = ApiError::new(ApiErrorKind::Unavailable, message);
                self.not_ready = Some((Nanos::now() + CLOSED_AGAIN, error.clone()));
                return Err(error);
            }
            self.meanwhile(weir_task::sleep(LOOK_AGAIN)).await?;
        }
    }

    /// The state of the open disk at present; `None` while its shard does not say. Other shards, which may hang, are not asked.
    async fn status(&mut self) -> Result<Option<DiskStatus>, ApiError> {
        let (shards, disk) = (self.node.shards.clone(), self.name.clone());
        let ask = async move { shards.ask(&disk, |answer| Command::Status { answer }).await };
        let Ok(Ok(statuses)) = self.meanwhile(weir_task::timeout(ANSWER, ask)).await? else {
            return Ok(None);
        };
        let is_own =
            |status: &DiskStatus| status.disk == self.name && status.role == "owner" && status.is_current();
        Ok(statuses.into_iter().find(is_own))
    }

    /// Destages the log of a disk without copies, while its guest goes on, and has it write-through from then on. After `limit`, or
    /// when it does not move any more, it is as before. So it is when it has got copies meanwhile: a move does not give them up.
    pub(super) async fn empty(&mut self, limit: Duration, goal: Goal<'_>) -> Result<(), ApiError> {
        // They may have come while the target was asked.
        let record = &self.known()?;
        if has_copies(record) {
            return self.check_write_through();
        }
        self.set_empties(record, true).await;
        let late = format!("cannot be closed: its log is not empty after {limit:?}");
        let is_over = |record: &DiskRecord| record.mode == Mode::WriteThrough || has_copies(record);
        let emptied = self.until(limit, late, is_over, goal).await;
        let emptied = emptied.and_then(|()| self.check_write_through());
        if let Err(error) = &emptied {
            self.set_empties(record, false).await;
            // Another target may do better than one that is gone.
            if !self.is_taken() && self.check_goal(goal).is_ok() {
                self.not_ready = Some((Nanos::now() + CLOSED_AGAIN, error.clone()));
            }
        }
        emptied
    }

    /// Waits until the target is in the replica set and nothing is on its way to the backing. Guests go on meanwhile.
    pub(super) async fn prepare(&mut self, goal: Goal<'_>) -> Result<(), ApiError> {
        let disk = self.name.clone();
        self.fill(Some(goal)).await?;
        let deadline = Nanos::now() + HOLD;
        let hold = |done| Command::HoldDestage { disk: disk.clone(), done };
        let late = || {
            format!("disk {disk} stays where it is: its backing or a replica has not answered for {HOLD:?}")
        };
        let over = |task: &mut DiskTask| match task.is_taken() {
            true => Some(taken()),
            false => (Nanos::now() >= deadline).then(late),
        };
        let held = self.ask_until(hold, Some(deadline), over).await;
        held.map_err(|reason| ApiError::new(ApiErrorKind::Unavailable, reason))?;
        self.check_goal(goal)
    }

    pub(super) async fn hand_over(&mut self, to: &NodeRef, why: Why) -> Result<u64, ApiError> {
        let dirty = self.status().await?.map_or(0, |status| status.dirty_bytes);
        let me = self.me.clone();
        // A registry that does not answer would keep the disk from being served for as long as that lasts (P12).
        self.check_registry().await?;
        self.hold_clients().await?;
        // From the moment that the change is sent, the successor may own the disk without our hearing of it (P2).
        self.node.rights.step(&self.name, Event::HandingOver);
        let hand_over = |record: &DiskRecord| {
            let home = why.home(record.home.clone(), &me.node);
            Ok(DiskRecord { home, ..ownership::hand_over(record, &me, record.epoch, to)? })
        };
        let changed = self.change(hand_over).await;
        let next = match changed {
            Ok(next) => next,
            Err(error) => {
                if self.doubt.is_some() {
                    self.end_doubt().await;
                }
                return Err(error.into());
            }
        };
        self.event(
            "moved",
            format!("from {} to {} in epoch {}, {dirty} bytes dirty", me.node, to.node, next.epoch),
        );
        // At once: the new owner is about to connect to what is a replica from here on.
        self.release_disk(next.epoch, Some(next)).await;
        Ok(dirty)
    }
}

impl DiskTask {
    /// Has the shard answer all requests and take no new ones, while this node has the right to serve: later requests could not be
    /// answered before the outcome of the move is known. The shard bounds the time.
    pub(super) async fn hold_clients(&mut self) -> Result<(), ApiError> {
        self.holds_clients = true;
        let (shards, disk) = (self.node.shards.clone(), self.name.clone());
        let hold =
            async move { shards.ask(&disk, |done| Command::HoldClients { disk: disk.clone(), done }).await };
        let held = match self.meanwhile(weir_task::timeout(ANSWER, hold)).await {
            Ok(Ok(held)) => held,
            Ok(Err(_)) => {
                let message = format!("disk {} stays where it is: its shard does not answer", self.name);
                Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"))
            }
            Err(taken) => Err(taken.into()),
        };
        if held.is_err() && !self.is_taken() {
            self.serve_clients().await;
        }
        held
    }

    /// Serves held clients again, unless the outcome of the move is unknown or another node owns the disk.
    pub(super) async fn resume_clients(&mut self) {
        if self.holds_clients && self.doubt.is_none() && !self.is_taken() {
            self.serve_clients().await;
        }
    }

    async fn serve_clients(&mut self) {
        self.holds_clients = false;
        self.send(Command::ResumeClients { disk: self.name.clone() }).await;
    }
}

/// Whether a node holds a copy of the log from which a new owner can continue.
pub(super) fn has_copies(record: &DiskRecord) -> bool {
    record.mode == Mode::WriteBack && !record.replicas.is_empty()
}
