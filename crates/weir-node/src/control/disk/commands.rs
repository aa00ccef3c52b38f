//! Operators' commands for a disk, carried out in the disk's task.

use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::ownership::{self, Caller, Gone, Refusal};
use weir_cluster::records::{DiskRecord, Limit, Mode, NodeRef, Policy, Source, VolumeKind, VolumeRecord};
use weir_cluster::view::Seen;
use weir_volume::{BackingOptions, DirVolume};

use super::opening::closed_since;
use super::record::PATIENCE;
use super::{Came, Closing, DiskTask, RETRY, Request, taken};
use crate::control::change::{self, ChangeError};
use crate::control::decide::{Decision, Local, Situation, decide, evidence, is_live};
use crate::control::node::{blocking, server_of};
use crate::control::provisioning;
use crate::error::{ApiError, ApiErrorKind};
use crate::shard::messages::{Command, NotClosed};
use crate::units::count_are;

/// Longest wait for I/O that is under way when a disk is deleted (P10).
const END_OF_IO: Duration = Duration::from_secs(20);

impl DiskTask {
    pub(super) async fn on_request(&mut self, request: Request) {
        // The client may have disconnected; the task completes the request all the same.
        match request {
            Request::Export { accept_loss, done } => {
                let _ = done.send(self.export(accept_loss).await);
            }
            Request::SetPolicy { policy, done } => {
                let _ = done.send(self.set_policy(policy).await);
            }
            Request::SetLimit { limit, done } => {
                let _ = done.send(self.set_limit(limit).await);
            }
            Request::EndImport { number, done } => {
                let _ = done.send(self.end_import(number).await);
            }
            Request::Resize { size, seen, done } => {
                let _ = done.send(self.resize(size, &seen).await);
            }
            Request::Release { unless_used, done } => {
                let _ = done.send(self.release(unless_used).await);
            }
            Request::Replace { content, done } => {
                let _ = done.send(self.replace(content).await);
            }
            Request::DeleteUndestaged { id, lost, unless_open, done } => {
                let deleted = match self.check_unopened(unless_open) {
                    Ok(()) => self.delete_undestaged(id, lost).await,
                    Err(refused) => Err(refused),
                };
                let _ = done.send(deleted);
                self.resume_close().await;
            }
            Request::Follow { to, done } => {
                let _ = done.send(self.follow(to.as_ref()).await);
            }
            Request::Move { to, why, done } => {
                let _ = done.send(self.move_to(&to, why).await);
            }
        }
    }

    pub(super) fn known(&mut self) -> Result<DiskRecord, ApiError> {
        let name = &self.name.clone();
        match self.seen() {
            Seen::Record { record, .. } => Ok(record),
            Seen::Unreadable { error, .. } => {
                let message = format!("the record of disk {name} cannot be read: {error}");
                Err(ApiError::new(ApiErrorKind::Failed, message))
            }
            Seen::Nothing => Err(ApiError::new(ApiErrorKind::NotFound, format!("there is no disk {name}"))),
        }
    }

    async fn export(&mut self, accept_loss: bool) -> Result<(), ApiError> {
        // Before a claim: the deletion rests on the record as it is.
        self.check_not_deleted().map_err(|reason| {
            ApiError::new(ApiErrorKind::Refused, format!("disk {} cannot be opened: {reason}", self.name))
        })?;
        self.refresh(PATIENCE).await;
        let record = self.known()?;
        let me = self.me.clone();
        let next = match &record.owner {
            Some(owner) if *owner == me => {
                if matches!(self.local, Local::Open { .. }) {
                    return Ok(());
                }
                record.clone()
            }
            Some(owner) if is_live(&self.node.records.nodes.now(), owner) => {
                let uris = self.node.uris_on(&owner.node, &self.name).join("\n  ");
                let message =
                    format!("disk {} is owned by {}, which exports it at\n  {uris}", self.name, owner.node);
                return Err(ApiError::new(ApiErrorKind::Refused, message).hint(format!(
                    "use it there, or move it: `weir disk move {} --to {}`",
                    self.name, self.me.node
                )));
            }
            Some(_) => self.succeed(&record, accept_loss).await?,
            None => {
                self.check_takes_disks(&me.node)?;
                if record.heir.is_some() {
                    // Nobody would claim a disk that has been given back without its heir.
                    self.check_claim(&record).await.map_err(|reason| self.not_openable(&reason))?;
                }
                let next = self.change(|record| ownership::claim_free(record, &me)).await?;
                self.arrival = Some((next.epoch, Came::By(self.arrival_after(&next))));
                next
            }
        };
        if let Err(reason) = self.open(&next).await {
            self.give_back(&next).await;
            let error = self.not_openable(&reason);
            let is_kept = self.record().is_some_and(|record| record.owner.as_ref() == Some(&self.me));
            return Err(match is_kept {
                true => error.hint(format!("{} tries again by itself every few seconds", self.me.node)),
                false => error,
            });
        }
        Ok(())
    }

    fn not_openable(&self, reason: &str) -> ApiError {
        ApiError::new(ApiErrorKind::Failed, format!("disk {} cannot be opened: {reason}", self.name))
    }

    /// A disk is not placed on a node that is drained, quarantined or revoked.
    pub(super) fn check_takes_disks(&self, node: &str) -> Result<(), ApiError> {
        if !self.node.barred().contains(node) {
            return Ok(());
        }
        let message = format!("node {node} takes no disks: it is drained, quarantined or revoked");
        Err(ApiError::new(ApiErrorKind::Refused, message).hint("name another node"))
    }

    fn has_no_copy(&self) -> ApiError {
        let message =
            format!("{} does not have its copy of the log of disk {} any more", self.me.node, self.name);
        ApiError::new(ApiErrorKind::Unavailable, message).hint("try again, on another node")
    }

    /// The owner is gone: take over as far as the evidence goes.
    async fn succeed(&mut self, record: &DiskRecord, accept_loss: bool) -> Result<DiskRecord, ApiError> {
        let me = self.me.clone();
        let live = self.node.records.nodes.now();
        let Some(owner) = record.owner.clone() else { return Err(ChangedMeanwhile.into()) };
        let has_copy = self.has_copy(Some(record)).await?;
        let situation = Situation {
            me: &me,
            live: &live,
            barred: &self.node.barred(),
            local: self.local,
            has_copy,
            owner_stopped: self.node.records.has_stopped(&owner),
            owner_gone_since: self.owner_gone.as_ref().map(|gone| gone.since),
            // Whoever comes first, this node has been asked.
            vacant_since: Some(Nanos(0)),
            now: Nanos::now(),
            fence_grace: self.node.config.lease.fence_grace.0,
        };
        let evidence = evidence(&owner, &situation);
        let decision = decide(Some(record), &situation);
        if self.held_until(&decision, Some(record)).await.is_some() {
            let message = format!(
                "{owner} is isolated: the registry does not hear it, and it serves disk {} all the same",
                self.name
            );
            return Err(ApiError::new(ApiErrorKind::Unavailable, message)
                .hint("use the disk there, or wait until the resiliency period is over"));
        }
        let lost = match decision {
            Decision::Unavailable(reason) => Some(reason),
            // Counted because of its flash, on which the copy is not, and others have one.
            Decision::Nothing if record.has_owners_copy(&me) && !has_copy => {
                return Err(self.has_no_copy());
            }
            Decision::Disclaim(_) => return Err(self.has_no_copy()),
            _ => None,
        };
        let result = match (&lost, accept_loss) {
            (Some(reason), false) => return Err(ApiError::new(ApiErrorKind::Refused, reason.clone())),
            (Some(_), true) => {
                self.check_backing(record).await?;
                self.take(&owner, |record| ownership::accept_loss(record, &me, &evidence)).await
            }
            (None, _) => self.take(&owner, |record| ownership::take_over(record, &me, &evidence)).await,
        };
        match result {
            Ok(next) => {
                self.arrival = Some((next.epoch, Came::By(self.arrival_after(&next))));
                if lost.is_some() {
                    let text = format!(
                        "the loss of acknowledged writes is accepted; {} opens it as of the last checkpoint",
                        me.node
                    );
                    self.event("loss-accepted", text);
                }
                Ok(next)
            }
            Err(error) => {
                let wait = matches!(&error, ChangeError::Refused(Refusal::MayStillWrite { .. }));
                let error = ApiError::from(error);
                Err(if wait && evidence.how == Gone::LeaseEnded {
                    let grace = self.node.config.lease.fence_grace;
                    error.hint(format!(
                        "try again; at the latest {grace} after {owner} fell silent it will do"
                    ))
                } else {
                    error
                })
            }
        }
    }

    /// Checks that the file or device behind a disk can be opened here. Accepting the loss of its log is final: it must not happen
    /// for a backing that cannot be opened.
    async fn check_backing(&mut self, record: &DiskRecord) -> Result<(), ApiError> {
        let (node, of) = (Arc::clone(&self.node), record.clone());
        let opened = self.storage(async move {
            let place = node.place_of(&of).await;
            let place = place.map_err(|reason| ApiError::new(ApiErrorKind::Failed, reason))?;
            let options = BackingOptions {
                size: Some(of.size),
                logical_block: Some(of.logical_block),
                volume: place.volume,
                ..BackingOptions::default()
            };
            blocking(move || place.backing.open(&options).map(drop)).await
        });
        opened.await.map_err(|error| {
            let message = format!("disk {} cannot be opened: {}", self.name, error.message);
            ApiError::new(error.kind, message)
                .code(&error.code)
                .hint("no loss has been accepted; repair the storage first")
        })
    }

    /// A claim whose disk cannot be opened is useless: without a log, giving it back loses nothing.
    pub(super) async fn give_back(&mut self, record: &DiskRecord) {
        // Whatever follows, an arrival by this claim does not hold for the next one. `Closed` still does: the log is empty.
        self.arrival = self.arrival.filter(|(_, came)| matches!(came, Came::Closed));
        if record.mode == Mode::WriteThrough {
            let (me, epoch) = (self.me.clone(), record.epoch);
            if let Err(error) = self.change(|record| ownership::release(record, &me, epoch, 0)).await {
                tracing::warn!(disk = self.name, %error, "cannot give the claim back");
            }
        }
    }

    async fn set_policy(&mut self, policy: Policy) -> Result<(), ApiError> {
        let me = self.me.clone();
        self.change(|record| ownership::set_policy(record, caller(record, &me), policy)).await?;
        self.event("policy", format!("{policy} is requested"));
        Ok(())
    }

    async fn set_limit(&mut self, limit: Option<Limit>) -> Result<(), ApiError> {
        let me = self.me.clone();
        let next = self.change(|record| ownership::set_limit(record, caller(record, &me), limit)).await?;
        if matches!(self.local, Local::Open { .. }) {
            self.tell_limit(&next).await;
        }
        let text = limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        self.event("limit", text);
        Ok(())
    }

    async fn end_import(&mut self, number: u64) -> Result<(), ApiError> {
        let me = self.me.clone();
        self.change(|record| ownership::end_import(record, caller(record, &me), number)).await?;
        self.event("disk-imported", "its content is complete".to_owned());
        Ok(())
    }

    async fn resize(&mut self, size: u64, seen: &DiskRecord) -> Result<(), ApiError> {
        if size < seen.size {
            let message =
                format!("disk {} has {} bytes; shrinking it would cut off data", self.name, seen.size);
            return Err(ApiError::new(ApiErrorKind::Refused, message));
        }
        // The file first: a record that promises more than there is would be worse than the other way round.
        let (node, of, name) = (Arc::clone(&self.node), seen.volume.clone(), self.name.clone());
        let source = seen.source.clone();
        let grow = async move {
            let volume = node.volume(&of).await?;
            match &source {
                // Its volume's coordinator has done it.
                _ if volume.kind == VolumeKind::Lun => return Ok(()),
                Source::Export { name } => return has_size(&volume, name, size).await,
                _ => {}
            }
            blocking(move || DirVolume::open_as(volume.path, volume.id)?.lengthen(&name, size)).await
        };
        self.storage(grow).await?;
        let me = self.me.clone();
        // A disk that has gone back to a snapshot since, or another one of its name, may have another file.
        let is_as_seen = |record: &DiskRecord| {
            record.id == seen.id && (record.owner.as_ref() == Some(&me) || record.epoch == seen.epoch)
        };
        let resized = |record: &DiskRecord| match is_as_seen(record) {
            true => ownership::resize(record, caller(record, &me), size),
            false => {
                let reason = "the disk has changed meanwhile; try again".to_owned();
                Err(Refusal::BadSize { reason })
            }
        };
        let next = self.change(resized).await?;
        if matches!(self.local, Local::Open { .. }) {
            self.node.here.update(&next);
            let disk = self.name.clone();
            let grown = self.ask(|done| Command::Resize { disk, size, done }).await.and_then(|grown| grown);
            grown.map_err(|reason| ApiError::new(ApiErrorKind::Failed, reason))?;
            self.told_size = Some(size);
        }
        self.event("resize", format!("{size} bytes"));
        Ok(())
    }

    /// Closes the disk if it is open, and gives ownership up. `unless_used`: it stays as it is if it has clients.
    pub(super) async fn release(&mut self, unless_used: bool) -> Result<(), ApiError> {
        if unless_used && self.local != Local::Closed {
            self.close(true).await?;
        }
        self.release_with(ownership::release).await
    }

    /// Closes the disk if it is open, and makes the change `give_up` of the record for one that is closed with nothing dirty.
    pub(super) async fn release_with(
        &mut self,
        give_up: impl Fn(&DiskRecord, &NodeRef, u64, u64) -> Result<DiskRecord, Refusal>,
    ) -> Result<(), ApiError> {
        if self.local == Local::Closed
            && self.record().and_then(|record| self.closed_since(&record)).is_none()
        {
            return Ok(());
        }
        if self.local != Local::Closed {
            self.close(false).await?;
        }
        let me = self.me.clone();
        let arrival = self.arrival;
        let give_up = |record: &DiskRecord| match closed_since(arrival, record, &me) {
            Some(_) => give_up(record, &me, record.epoch, 0),
            // The log may have another owner's later writes.
            None => Err(Refusal::Fenced { owner: record.owner.clone(), epoch: record.epoch }),
        };
        self.change(give_up).await?;
        self.arrival = None;
        self.node.here.set_unreleased(&self.name, false);
        self.event("closed", format!("{} has destaged and closed it", me.node));
        Ok(())
    }

    /// The last attempt to open the disk may have succeeded since the deletion was asked for.
    fn check_unopened(&self, unless_open: bool) -> Result<(), ApiError> {
        match self.local {
            Local::Open { .. } if unless_open => {
                let message = format!("disk {} has just been opened", self.name);
                Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again: it is destaged first"))
            }
            _ => Ok(()),
        }
    }

    /// Deletes the disk as it is, open or not, without destaging: its storage may take nothing. In this task, so that no attempt to open
    /// it runs beside that. The copy of the log stays here, and [`DiskTask::forget_copy`] gives it up on every node once the record is gone.
    async fn delete_undestaged(&mut self, id: u64, lost: String) -> Result<(), ApiError> {
        let (node, name) = (Arc::clone(&self.node), self.name.clone());
        let read = self.meanwhile(async move { change::read(&*node.registry, &name).await });
        let (entry, record) = read.await??;
        provisioning::check_same(id, &record)?;
        if record.owner.as_ref() != Some(&self.me) {
            let message = match &record.owner {
                Some(owner) => format!("node {} has just taken disk {}", owner.node, self.name),
                None => format!("disk {} has just been closed, with nothing dirty", self.name),
            };
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        }
        let node = Arc::clone(&self.node);
        let of = record.clone();
        self.meanwhile(async move { provisioning::check_former(&node, &of).await }).await??;
        self.end_io().await?;
        let (node, removing) = (Arc::clone(&self.node), record.clone());
        let remove = async move { provisioning::remove(&node, &entry, &removing, lost).await };
        let removed = self.meanwhile(remove).await?;
        // The view may show the record for a moment still.
        (self.arrival, self.retry_at) = (None, Some(Nanos::now() + RETRY));
        if removed.is_err() {
            // If it is still there, it is opened again from the log: in an epoch of its own, as it was open before in this one.
            let me = self.me.clone();
            if let Ok(next) = self.change(|record| ownership::renew(record, &me, record.epoch)).await {
                self.arrival = Some((next.epoch, Came::By(self.arrival_after(&next))));
            }
        }
        removed
    }

    /// Disconnects the clients, and ends all I/O of the disk here, also while it is being closed. Its log stays.
    async fn end_io(&mut self) -> Result<(), ApiError> {
        self.node.rights.end(&self.name);
        self.node.here.remove(&self.name);
        (self.local, self.arrival) = (Local::Closed, None);
        (self.doubt, self.refused, self.holds_clients, self.closing) = (None, false, false, None);
        let (disk, deadline) = (self.name.clone(), Nanos::now() + END_OF_IO);
        let release = |done| Command::ReleaseDisk { disk, keep: true, done };
        let late = |_: &mut DiskTask| {
            let what = "its storage has not answered requests that are under way";
            (Nanos::now() >= deadline).then(|| format!("{what} for {END_OF_IO:?}"))
        };
        self.ask_until(release, Some(deadline), late).await.map_err(|reason| {
            let message = format!("disk {} cannot be deleted yet: {reason}", self.name);
            ApiError::new(ApiErrorKind::Unavailable, message).hint("try again when the storage answers")
        })
    }

    /// A deletion has ended the wait for a close, and was refused. The shard closes the disk all the same: it is opened again after that.
    async fn resume_close(&mut self) {
        let Some(Closing { unless_used, shown }) = self.closing.take() else { return };
        self.node.here.put_back(&self.name, shown);
        if let Err(error) = self.close(unless_used).await {
            tracing::debug!(disk = self.name, %error, "it is not closed");
        }
    }

    /// `unless_used`: it stays open if it has clients.
    async fn close(&mut self, unless_used: bool) -> Result<(), ApiError> {
        // Nobody comes meanwhile, or its shard sees that.
        let shown = self.node.here.take(&self.name);
        let disk = self.name.clone();
        let over = |task: &mut DiskTask| {
            let deleted = || "it is being deleted, with what its log has".to_owned();
            task.is_taken()
                .then(taken)
                .or_else(|| task.waiting.iter().any(Request::is_deletion).then(deleted))
        };
        let closed = self.ask_until(|done| Command::Close { disk, unless_used, done }, None, over).await;
        let closed = match closed {
            Ok(closed) => closed,
            Err(reason) => {
                self.closing = Some(Closing { unless_used, shown });
                let message = format!("disk {} cannot be closed: {reason}", self.name);
                return Err(ApiError::new(ApiErrorKind::Failed, message));
            }
        };
        self.closing = None;
        if let Err(NotClosed::Used(clients)) = closed {
            self.node.here.put_back(&self.name, shown);
            let clients = count_are(clients as u64, "client");
            let message = format!("disk {}: {clients} connected, since a moment ago", self.name);
            return Err(ApiError::new(ApiErrorKind::Refused, message)
                .hint("shut the guest down, or disconnect the disk from it; then try again"));
        }
        if let Err(NotClosed::Failed(reason)) = closed {
            let message = format!("disk {} cannot be closed: {reason}", self.name);
            return Err(ApiError::new(ApiErrorKind::Failed, message));
        }
        // Closed: nothing is dirty, and nothing is under way. Should the registry not answer now, that stays true.
        if let Local::Open { epoch } = std::mem::replace(&mut self.local, Local::Closed) {
            self.arrival = Some((epoch, Came::Closed));
            self.holds_clients = false;
            self.node.here.set_unreleased(&self.name, true);
        }
        // Changes that were carried out meanwhile may have shown it again.
        self.node.here.remove(&self.name);
        self.node.rights.end(&self.name);
        Ok(())
    }
}

fn caller<'a>(record: &DiskRecord, me: &'a NodeRef) -> Caller<'a> {
    match &record.owner {
        Some(owner) if owner == me => Caller::Owner { node: me, epoch: record.epoch },
        _ => Caller::Other,
    }
}

/// The record changed between two looks at it.
struct ChangedMeanwhile;

impl From<ChangedMeanwhile> for ApiError {
    fn from(_: ChangedMeanwhile) -> ApiError {
        ApiError::new(ApiErrorKind::Unavailable, "the disk's record has just changed").hint("try again")
    }
}

/// An export is resized by its server. The disk follows.
async fn has_size(volume: &VolumeRecord, export: &str, size: u64) -> Result<(), ApiError> {
    let server = server_of(volume).map_err(|reason| ApiError::new(ApiErrorKind::Failed, reason))?;
    let name = export.to_owned();
    let (found, _) = blocking(move || Ok(weir_volume::nbd::describe(&server, &name, None)?)).await?;
    if found == size {
        return Ok(());
    }
    let message = format!("the export `{export}` of {} has {found} bytes, and not {size}", volume.place());
    Err(ApiError::new(ApiErrorKind::Refused, message)
        .hint("resize it at the server first, and give the size that it has then"))
}
