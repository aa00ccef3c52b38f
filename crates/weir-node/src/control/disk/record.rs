//! The record of a disk in its task: reads and changes.
//!
//! Each revision of the record that the task learns of, by a change of its own, a read or the view, goes through
//! [`DiskTask::heard`]: that alone ends doubts about changes that were sent over earlier ones.

use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::ownership::{self, Refusal};
use weir_cluster::placement;
use weir_cluster::records::{DiskRecord, NodeRef};
use weir_cluster::registry::RegistryError;
use weir_cluster::right::Event;
use weir_cluster::view::Seen;

use super::{DiskTask, RETRY};
use crate::control::change::{self, ChangeError, Changed};
use crate::control::decide::Local;
use crate::shard::messages::Command;

/// Longest wait for a record from the registry where a step cannot go on without it.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

impl DiskTask {
    /// The newest record that this node knows.
    pub(super) fn seen(&mut self) -> Seen<DiskRecord> {
        let seen = self.node.records.seen(&self.name);
        if let Seen::Record { revision, record } = &seen {
            self.heard(record, *revision);
        }
        seen
    }

    /// The newest record that is known, if there is one that can be read.
    pub(super) fn record(&mut self) -> Option<DiskRecord> {
        match self.seen() {
            Seen::Record { record, .. } => Some(record),
            Seen::Nothing | Seen::Unreadable { .. } => None,
        }
    }

    /// The record is this at `revision`. If that is new, a change that was sent over an earlier revision is in it or will
    /// never be committed: no doubt is left, and a disk that was about to be handed over, and is this node's, stays here.
    ///
    /// While a change of ours is in flight this waits for its end: it may have been sent over this very revision, which would
    /// say nothing about it.
    pub(super) fn heard(&mut self, record: &DiskRecord, revision: u64) {
        if self.changing || revision <= self.heard {
            return;
        }
        self.heard = revision;
        if self.doubt.is_some_and(|over| over >= revision) {
            return;
        }
        self.doubt = None;
        if record.owner.as_ref() == Some(&self.me) {
            let committed = Event::Committed { epoch: record.epoch, set: record.grant_set() };
            for event in [committed, Event::NotCommitted, Event::Kept] {
                self.node.rights.step(&self.name, event);
            }
        }
    }

    /// The registry itself has said that the record is this at `revision`: the view may lag behind.
    pub(super) fn told(&mut self, record: &DiskRecord, revision: u64) {
        self.heard(record, revision);
        self.node.records.learn(record, revision);
    }

    /// Looks at the registry itself: the view may lag behind it.
    ///
    /// # Errors
    /// As [`change::read`]; no answer within `patience`.
    pub(super) async fn read(&mut self, patience: Duration) -> Result<DiskRecord, ChangeError> {
        let (node, name) = (Arc::clone(&self.node), self.name.clone());
        let read = async move { change::read(&*node.registry, &name).await };
        let read = self.meanwhile(weir_task::timeout(patience, read)).await?;
        let late = |_| RegistryError::Unavailable { reason: format!("no answer for {patience:?}") };
        let (entry, record) = read.map_err(late)??;
        self.told(&record, entry.mod_revision);
        Ok(record)
    }

    /// As [`DiskTask::read`]. Returns whether the registry has answered.
    pub(super) async fn refresh(&mut self, patience: Duration) -> bool {
        self.read(patience).await.is_ok()
    }

    /// Makes the session that the node has by now count for this disk, by a read of the record that is sent since it began.
    pub(super) async fn confirm_right(&mut self) {
        if self.doubt.is_some() {
            // A change that was sent before the read may overtake its result.
            return;
        }
        let Some(session) = self.node.rights.unconfirmed(&self.name) else { return };
        match self.read(RETRY).await {
            Ok(record) if record.owner.as_ref() == Some(&self.me) => {
                self.node.rights.step(&self.name, Event::Confirmed { session, epoch: record.epoch });
            }
            Ok(_) => self.node.rights.end(&self.name),
            Err(_) => self.retry_at = Some(Nanos::now() + RETRY),
        }
    }

    /// Settles the right of an owner whose outstanding requests to the registry have not been answered.
    pub(super) async fn settle_right(&mut self) {
        self.seen();
        if self.doubt.is_some() && self.local != Local::Closed {
            self.end_doubt().await;
        }
        self.confirm_right().await;
        if self.refused && self.refresh(RETRY).await {
            self.refused = false;
            // A shard that is releasing the disk must not get another order.
            if self.local != Local::Closed && !self.is_taken() {
                self.send(Command::StillOwner { disk: self.name.clone() }).await;
            }
        }
        if self.doubt.is_some() || self.refused {
            self.retry_at = Some(Nanos::now() + RETRY);
        }
    }

    /// Changes the record by compare-and-swap and remembers the outcome.
    pub(super) async fn change(
        &mut self,
        compute: impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal>,
    ) -> Result<DiskRecord, ChangeError> {
        self.change_from(None, compute).await
    }

    /// As [`DiskTask::change`], to take the disk from `owner`, whose session must be over.
    pub(super) async fn take(
        &mut self,
        owner: &NodeRef,
        compute: impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal>,
    ) -> Result<DiskRecord, ChangeError> {
        self.change_from(Some(owner), compute).await
    }

    async fn change_from(
        &mut self,
        owner: Option<&NodeRef>,
        compute: impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal>,
    ) -> Result<DiskRecord, ChangeError> {
        let (node, name) = (Arc::clone(&self.node), self.name.clone());
        let compute = self.proposing(compute);
        let mut seen = None;
        self.changing = true;
        let changed = change::change(&*node.registry, &node.session, &name, owner, &mut seen, compute);
        let changed = self.meanwhile(changed).await.unwrap_or_else(Err);
        self.changing = false;
        self.changed(changed, seen)
    }

    /// Chooses guards for what a change leaves without replicas. Before a change is sent, the set that it brings counts beside the
    /// present one: the change may commit without our hearing of it (P3).
    fn proposing<C: Fn(&DiskRecord) -> Result<DiskRecord, Refusal>>(
        &self,
        compute: C,
    ) -> impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal> + use<C> {
        let (node, me, name) = (Arc::clone(&self.node), self.me.clone(), self.name.clone());
        move |record| {
            let mut next = compute(record)?;
            if next.owner.as_ref() == Some(&me) {
                // As of now: a node may have been drained since an earlier attempt.
                let (live, barred) = (node.records.nodes.now(), node.barred());
                let guards = placement::choose_guards(&next, &me.node, &live, &barred);
                next.guards = if next.replicas.is_empty() { guards } else { Vec::new() };
                if next.grant_set() != record.grant_set() {
                    node.rights.step(&name, Event::Proposed(next.grant_set()));
                }
            }
            Ok(next)
        }
    }

    /// `seen`: the record as the change has read it last.
    fn changed(
        &mut self,
        changed: Result<Changed, ChangeError>,
        seen: Option<Changed>,
    ) -> Result<DiskRecord, ChangeError> {
        let error = match changed {
            Ok(Changed { record, revision }) => {
                self.told(&record, revision);
                return Ok(record);
            }
            Err(error) => error,
        };
        self.doubt = self.doubt.max(error.doubt());
        let is_taken = error.is_taken_from(&self.me);
        if is_taken {
            self.node.rights.end(&self.name);
        }
        // An attempt that was not answered may have committed before a later one was refused.
        if let Some(Changed { record, revision }) = seen {
            self.told(&record, revision);
        }
        if !is_taken && self.doubt.is_none() {
            // An earlier change may still commit otherwise: only a later revision rules that out.
            self.node.rights.step(&self.name, Event::NotCommitted);
            self.node.rights.step(&self.name, Event::Kept);
        }
        Err(error)
    }

    /// The outcome of a change is unknown. A read of the old record would not settle it, because the change may commit late:
    /// an epoch of our own that commits behind the same record does.
    pub(super) async fn end_doubt(&mut self) {
        let me = self.me.clone();
        match self.change(|record| ownership::renew(record, &me, record.epoch)).await {
            Ok(_) => {}
            // Another node owns it now, or none; this node releases its part.
            Err(ChangeError::Refused(Refusal::Fenced { .. })) => {
                self.node.rights.end(&self.name);
                self.refresh(PATIENCE).await;
                self.doubt = None;
            }
            Err(error) => self.later(&error),
        }
    }
}
