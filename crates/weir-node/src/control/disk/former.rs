//! Former owners that are still in the disk's record: ends their rights by seals, waits until their I/O has ended, and tells the shard
//! what is certain (P2, P4).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_accel::Former;
use weir_block::Nanos;
use weir_cluster::ownership;
use weir_cluster::placement;
use weir_cluster::records::{DiskRecord, FormerOwner, NodeRef, VolumeKind};
use weir_volume::Trace;

use super::{DiskTask, Message};
use crate::control::decide::{Evidence, Local, former_certainty};
use crate::control::former_owners;
use crate::control::grants;
use crate::control::owner_fences::mark_of;
use crate::control::rights;
use crate::shard::messages::{Arrival, Command};

/// Pause before members that could not be sealed are asked again.
const SEAL_AGAIN: Duration = Duration::from_millis(300);

/// Pause before the next look at what the kernel has under way of an ended process.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Pause before a former owner that could not be fenced is fenced again.
const FENCE_AGAIN: Duration = Duration::from_secs(10);

/// A former owner is to be kept from the LUN of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    UnderWay,
    Made,
    /// Not again before then.
    Failed(Nanos),
}

/// The knowledge about the former owners.
#[derive(Default)]
pub(super) struct Formers {
    /// The evidence for each, and the time at which it was first seen.
    since: HashMap<(NodeRef, u64), (Evidence, Nanos)>,
    /// The time at which the right of each had certainly ended.
    silent: HashMap<(NodeRef, u64), Nanos>,
    /// The members that are sealed, and when the last grant that each gave to a former owner ends.
    seals: HashMap<String, Nanos>,
    /// Members whose answer is outstanding.
    asking: HashSet<String>,
    /// Members are not asked again before then.
    asking_until: Option<Nanos>,
    /// The last known I/O in this machine's kernel of those that have ended on it.
    traces: HashMap<NodeRef, Trace>,
    /// Former owners for which a check is running.
    looking: HashSet<NodeRef>,
    /// No check starts before then.
    look_at: Option<Nanos>,
    /// Former owners that cannot be checked, and since when.
    unseen: HashMap<NodeRef, Nanos>,
    /// Former owners whose I/O outlasts them by so much that the operator has been told.
    outlasting: HashSet<NodeRef>,
    /// Former owners that are fenced, or to be, each with its epoch.
    fences: HashMap<(NodeRef, u64), Fence>,
    /// The state that the shard knows.
    told: Option<Former>,
}

impl Formers {
    /// The disk was opened with this.
    pub(super) fn opened(&mut self, arrival: Arrival) {
        self.told = Some(match arrival {
            Arrival::Clean => Former::Stopped,
            Arrival::TakeOver { former } | Arrival::FromWriteThrough { former } => former,
        });
    }

    /// When the right of a former owner ends, or has ended, if that is known.
    fn right_over(&self, former: &FormerOwner, now: Nanos) -> Option<Nanos> {
        match &former.set {
            // Proved over before this node looked: it does not know how long before.
            None => Some(now),
            Some(set) => set.over_at(|member| self.seals.get(member).copied()),
        }
    }

    /// The certain knowledge about one former owner at `now`, and the time at which there will be more, as far as only time
    /// is missing.
    fn certainty(
        &mut self,
        former: &FormerOwner,
        evidence: Evidence,
        now: Nanos,
        fence_grace: Duration,
    ) -> (Former, Option<Nanos>) {
        let key = (former.node.clone(), former.epoch);
        let seen = self.since.entry(key.clone()).or_insert((evidence, now));
        if seen.0 != evidence {
            *seen = (evidence, now);
        }
        let first_seen = seen.1;
        let over = self.right_over(former, now);
        // The grace begins when the right has ended: until then the former owner may begin new I/O.
        let over = match over {
            Some(over) if over <= now => Some(*self.silent.entry(key).or_insert(over.max(first_seen))),
            over => over,
        };
        former_certainty(evidence, first_seen, over, fence_grace, now)
    }
}

impl DiskTask {
    /// The certain knowledge about all former owners, and the time of the next check, if only time is missing.
    pub(super) fn former(&mut self, record: &DiskRecord) -> (Former, Option<Nanos>) {
        let (now, grace) = (Nanos::now(), self.node.config.lease.fence_grace.0);
        let mut all = (Former::Stopped, None);
        for former in &record.former {
            let evidence = self.evidence(former);
            let (certain, again) = self.formers.certainty(former, evidence, now, grace);
            all.0 = all.0.min(certain);
            all.1 = [all.1, again].into_iter().flatten().min();
        }
        all
    }

    fn evidence(&self, former: &FormerOwner) -> Evidence {
        if self.node.records.has_released(&self.name, former.epoch, &former.node) {
            Evidence::Released
        } else if self.formers.fences.get(&(former.node.clone(), former.epoch)) == Some(&Fence::Made) {
            Evidence::Fenced
        } else if self.node.records.has_stopped_here(&former.node) {
            match self.formers.traces.get(&former.node) {
                Some(Trace::Gone) => Evidence::Ended,
                Some(Trace::Unknown) => Evidence::Declared,
                Some(Trace::InFlight) | None => Evidence::UnderWay,
            }
        } else if self.node.records.has_stopped(&former.node) {
            Evidence::Declared
        } else {
            Evidence::None
        }
    }

    /// Starts a check of this machine's kernel for I/O of former owners that have ended here. Returns the time of the next
    /// check.
    ///
    /// A check begins after the process is known to have ended, so I/O that is gone then does not come back.
    pub(super) async fn look_for_traces(&mut self, record: &DiskRecord) -> Option<Nanos> {
        let busy = record.former.iter().filter(|former| self.evidence(former) == Evidence::UnderWay);
        let busy: Vec<NodeRef> = busy.map(|former| former.node.clone()).collect();
        if busy.is_empty() {
            return None;
        }
        let now = Nanos::now();
        if let Some(at) = self.formers.look_at.filter(|at| *at > now) {
            return Some(at);
        }
        for process in busy {
            self.tell_outlasting(&process, now);
            if !self.formers.looking.insert(process.clone()) {
                continue;
            }
            let (answer, seen) = oneshot::channel();
            let (disk, mark) = (self.name.clone(), mark_of(&process));
            self.send(Command::Look { disk, mark, answer }).await;
            let outbox = self.outbox.clone();
            weir_task::spawn(async move {
                let seen = seen.await.ok();
                if let Some(outbox) = outbox.upgrade() {
                    let _ = outbox.send(Message::Looked { process, seen }).await;
                }
            });
        }
        let again = now + LOOK_AGAIN;
        self.formers.look_at = Some(again);
        Some(again)
    }

    /// Keeps former owners whose right has ended from the LUN of the disk, as far as this node can: that ends the wait for what they may have
    /// under way. Says when to look again.
    fn fence_formers(&mut self, record: &DiskRecord) -> Option<Nanos> {
        let (now, mut again) = (Nanos::now(), None);
        if former_owners::fencing(&self.node, &record.volume).is_none() {
            // This node may find the LUN yet, and nothing wakes this task then.
            let volumes = self.node.records.volumes.now();
            let is_lun = volumes.get(&record.volume).is_some_and(|volume| volume.kind == VolumeKind::Lun);
            return (is_lun && !record.former.is_empty()).then_some(now + FENCE_AGAIN);
        }
        for former in &record.former {
            let over = match self.evidence(former) {
                Evidence::Declared => Some(now),
                Evidence::None => self.formers.right_over(former, now),
                // Its I/O has ended, or this machine's kernel shows when it does.
                Evidence::UnderWay | Evidence::Ended | Evidence::Fenced | Evidence::Released => None,
            };
            let Some(over) = over.filter(|over| *over <= now) else { continue };
            if former_owners::is_there(&self.node, &former.node) {
                continue;
            }
            let key = (former.node.clone(), former.epoch);
            match self.formers.fences.get(&key) {
                Some(Fence::UnderWay | Fence::Made) => continue,
                Some(Fence::Failed(until)) if *until > now => {
                    again = [again, Some(*until)].into_iter().flatten().min();
                    continue;
                }
                Some(Fence::Failed(_)) | None => {}
            }
            self.formers.fences.insert(key.clone(), Fence::UnderWay);
            self.begin_fence(record, key, over);
        }
        again
    }

    fn begin_fence(&self, record: &DiskRecord, (process, epoch): (NodeRef, u64), over: Nanos) {
        let (node, volume, own_epoch) = (Arc::clone(&self.node), record.volume.clone(), record.epoch);
        let outbox = self.outbox.clone();
        weir_task::spawn(async move {
            let (waits, of, former) = (outbox.clone(), Arc::clone(&node), process.clone());
            let is_over = move || waits.upgrade().is_none() || former_owners::is_there(&of, &former);
            let result = former_owners::fence(&node, &volume, (&process, over), own_epoch, is_over).await;
            if let Some(outbox) = outbox.upgrade() {
                let _ = outbox.send(Message::Fenced { process, epoch, result }).await;
            }
        });
    }

    pub(super) fn on_fenced(&mut self, process: NodeRef, epoch: u64, result: Result<(), String>) {
        let fence = match result {
            Ok(()) => Fence::Made,
            Err(reason) => {
                tracing::warn!(disk = self.name, former = %process, reason, "cannot be fenced: lease.fence_grace decides");
                Fence::Failed(Nanos::now() + FENCE_AGAIN)
            }
        };
        self.formers.fences.insert((process, epoch), fence);
    }

    /// One event for I/O that is in flight for longer than expected: until it ends, nothing goes to the backing.
    fn tell_outlasting(&mut self, process: &NodeRef, now: Nanos) {
        let grace = self.node.config.lease.fence_grace.0;
        let mut seen = self.formers.since.iter().filter(|((node, _), _)| node == process);
        let long = seen.any(|(_, (evidence, since))| *evidence == Evidence::UnderWay && now > *since + grace);
        let is_seen = self.formers.traces.get(process) == Some(&Trace::InFlight);
        // Without an answer: a disk that waits for its server cannot be looked at, and a check that hangs has nothing to say.
        let hangs = !is_seen && self.formers.looking.contains(process);
        if long && (is_seen || hangs) && self.formers.outlasting.insert(process.clone()) {
            let what = match is_seen {
                true => "this machine still has I/O of it under way to the backing",
                false => "the backing does not answer whether I/O of it is still under way",
            };
            self.event(
                "former-io",
                format!("{process} has ended, and {what}; nothing is written there before that is known to be over"),
            );
        }
    }

    pub(super) fn on_looked(&mut self, process: NodeRef, seen: Option<Trace>) {
        self.formers.looking.remove(&process);
        let seen = match seen {
            Some(seen) => {
                self.formers.unseen.remove(&process);
                seen
            }
            None => {
                let (now, grace) = (Nanos::now(), self.node.config.lease.fence_grace.0);
                let since = *self.formers.unseen.entry(process.clone()).or_insert(now);
                if now < since + grace || self.formers.traces.get(&process) == Some(&Trace::InFlight) {
                    return;
                }
                // If every check fails, no end is ever seen: the fence grace decides, so that guests do not wait for ever
                // (P9).
                Trace::Unknown
            }
        };
        if seen != Trace::InFlight && self.formers.outlasting.remove(&process) {
            let what = match seen {
                Trace::Gone => "this machine has no more I/O of it under way",
                _ => "whether I/O of it is under way cannot be seen: lease.fence_grace decides",
            };
            self.event("former-io-over", format!("{process}: {what}"));
        }
        self.formers.traces.insert(process, seen);
    }

    /// Nothing that is known of former owners holds any more.
    pub(super) fn forget_formers(&mut self) {
        self.end_outlasting("it is not looked for any more");
        self.formers = Formers::default();
    }

    /// Each `former-io` has an end, whatever makes it (`why`).
    fn end_outlasting(&mut self, why: &str) {
        for process in std::mem::take(&mut self.formers.outlasting) {
            self.event("former-io-over", format!("{process}: {why}"));
        }
    }

    /// Tells the shard what has become certain, and the registry when nothing is left to be waited for. Says when to look again.
    pub(super) async fn settle_former(&mut self, record: &DiskRecord) -> Option<Nanos> {
        if !matches!(self.local, Local::Open { .. }) || record.former.is_empty() {
            self.formers.since.clear();
            self.formers.silent.clear();
            if record.former.is_empty() {
                self.end_outlasting("its I/O is over");
            }
            return None;
        }
        let look = self.look_for_traces(record).await;
        let fence = self.fence_formers(record);
        let (former, again) = self.former(record);
        let again = [again, look, fence].into_iter().flatten().min();
        if self.formers.told.replace(former) != Some(former) {
            self.send(Command::Former { disk: self.name.clone(), former }).await;
        }
        if former == Former::Serving {
            return [again, self.seal_members(record)].into_iter().flatten().min();
        }
        let (me, epoch) = (self.me.clone(), record.epoch);
        let settled = |record: &DiskRecord| {
            let all: Vec<FormerOwner> = record.former.clone();
            all.iter().try_fold(record.clone(), |record, one| match former {
                Former::Stopped => ownership::forget_former(&record, &me, epoch, one),
                _ => ownership::silence_former(&record, &me, epoch, one),
            })
        };
        let news = former == Former::Stopped || record.former.iter().any(|former| former.set.is_some());
        if news && let Err(error) = self.change(settled).await {
            self.later(&error);
        }
        [self.retry_at, again].into_iter().flatten().min()
    }

    /// This node is sealed for its own tenure: it does not renew its grants to former owners.
    ///
    /// # Errors
    /// This node has granted something to a later owner.
    pub(super) fn seal_own(&mut self, record: &DiskRecord) -> Result<(), String> {
        let key = rights::key(record);
        let wait = self.node.rights.seal(&key, record.epoch, Some(record.epoch));
        let wait = wait.map_err(|error| format!("this node cannot be sealed: {error}"))?;
        self.formers.seals.insert(self.me.node.clone(), Nanos::now() + wait);
        Ok(())
    }

    /// Has members of the former owners' sets sealed, as far as that is still needed. Says when to look again.
    fn seal_members(&mut self, record: &DiskRecord) -> Option<Nanos> {
        let now = Nanos::now();
        if let Some(until) = self.formers.asking_until.filter(|until| *until > now) {
            return Some(until);
        }
        let seals = &self.formers.seals;
        let open = record.former.iter().filter(|former| self.evidence(former) == Evidence::None);
        let sets = open.filter_map(|former| former.set.as_ref());
        let short = sets.filter(|set| set.over_at(|member| seals.get(member).copied()).is_none());
        let mut members: Vec<String> = short.flat_map(|set| set.members().iter().cloned()).collect();
        members.retain(|member| !seals.contains_key(member));
        members.sort();
        members.dedup();
        if members.is_empty() {
            return None;
        }
        for member in members {
            if member == self.me.node {
                if let Err(error) = self.seal_own(record) {
                    tracing::warn!(disk = self.name, error, "trying again");
                }
                continue;
            }
            if !self.formers.asking.insert(member.clone()) {
                continue;
            }
            let (node, disk, epoch) = (Arc::clone(&self.node), self.name.clone(), record.epoch);
            let outbox = self.outbox.clone();
            weir_task::spawn(async move {
                let until = grants::seal(&node, &member, &disk, epoch).await;
                if let Some(outbox) = outbox.upgrade() {
                    let _ = outbox.send(Message::Sealed { member, epoch, until }).await;
                }
            });
        }
        let again = now + SEAL_AGAIN;
        self.formers.asking_until = Some(again);
        Some(again)
    }

    pub(super) fn on_sealed(&mut self, member: String, epoch: u64, until: Result<Nanos, String>) {
        self.formers.asking.remove(&member);
        match until {
            // A seal for an earlier tenure of this node says nothing about who came in between.
            Ok(until) if self.node.rights.tenure(&self.name).is_some_and(|since| epoch >= since) => {
                self.formers.seals.insert(member, until);
                self.formers.asking_until = None;
            }
            Ok(_) => {}
            Err(reason) => tracing::debug!(disk = self.name, member, reason, "not sealed yet"),
        }
    }

    /// A disk without replicas has guards that live.
    pub(super) async fn settle_guards(&mut self, record: &DiskRecord) {
        let open = matches!(self.local, Local::Open { .. });
        if !open || record.owner.as_ref() != Some(&self.me) || !record.replicas.is_empty() {
            return;
        }
        let guards = placement::choose_guards(
            record,
            &self.me.node,
            &self.node.records.nodes.now(),
            &self.node.barred(),
        );
        if guards == record.guards {
            return;
        }
        let me = self.me.clone();
        let set = |record: &DiskRecord| ownership::set_guards(record, &me, record.epoch, &guards);
        if let Err(error) = self.change(set).await {
            self.later(&error);
        }
    }
}
