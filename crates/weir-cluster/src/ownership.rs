//! Every change of a disk's configuration (P2, P3): owner, replicas, effective mode.
//!
//! Pure functions from one [`DiskRecord`] to the next. Each raises the epoch by exactly one (except changes that no message is
//! checked against). The result counts only once it has replaced the record it was computed from by compare-and-swap
//! ([`crate::records::Record::replace`]), and nothing is acknowledged under it before that (P3).
//!
//! Only the owner changes the configuration of its disk, until it is gone: no other node can raise the epoch and fence a living
//! owner by accident.

use crate::records::{
    DiskRecord, FormerOwner, Limit, MAX_FORMER, MAX_REPLICAS, Mode, NodeRef, Policy, Record,
};

/// The reason why a change is refused, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The disk has an owner.
    #[error("{owner} owns the disk; let it release the disk, or take over when it is gone")]
    Owned {
        /// The owner.
        owner: NodeRef,
    },
    /// The disk has no owner.
    #[error("the disk has no owner; claim it instead")]
    NotOwned,
    /// The caller is not, or no longer, the owner in this epoch: it must stop its I/O to the disk (P2).
    #[error("{} owns the disk in epoch {epoch}; stop all I/O to it and read the record again",
        .owner.as_ref().map_or_else(|| "no node".into(), ToString::to_string))]
    Fenced {
        /// The owner.
        owner: Option<NodeRef>,
        /// The record's epoch.
        epoch: u64,
    },
    /// The evidence is about another process than the owner.
    #[error("the evidence is about {about}, but {owner} owns the disk; read the record again")]
    OtherEvidence {
        /// The process in the evidence.
        about: NodeRef,
        /// The owner.
        owner: NodeRef,
    },
    /// The owner may still write, and old writes could not be distinguished from new ones.
    #[error("{owner} may still be writing; wait until it is known stopped or the fence grace has passed")]
    MayStillWrite {
        /// The owner.
        owner: NodeRef,
    },
    /// Only a process that holds a complete copy of the log may take over.
    #[error("{by} holds no complete copy of the log; one of the replicas has to take over: {}", list(.replicas))]
    NotAReplica {
        /// The caller.
        by: NodeRef,
        /// The eligible processes.
        replicas: Vec<NodeRef>,
    },
    /// A takeover would lose acknowledged writes.
    #[error(
        "the only copy of the log was on {owner}; bring it back, or accept the loss of what it had not destaged"
    )]
    OnlyCopyLost {
        /// The holder of the copy.
        owner: NodeRef,
    },
    /// The log has writes that the backing lacks.
    #[error("{bytes} bytes are dirty; destage them first")]
    StillDirty {
        /// Dirty bytes.
        bytes: u64,
    },
    /// The new replica set violates the mode or the requested policy (P1).
    #[error("this replica set is not allowed: {reason}")]
    BadReplicas {
        /// The reason.
        reason: String,
    },
    /// The new size is invalid.
    #[error("this size is not allowed: {reason}")]
    BadSize {
        /// The reason.
        reason: String,
    },
    /// The new limit is invalid.
    #[error("this limit is not allowed: {reason}")]
    BadLimit {
        /// The reason.
        reason: String,
    },
    /// The disk is whole, or another import fills it.
    #[error("no such import fills the disk")]
    OtherImport,
    /// Too many former owners may still have I/O in flight.
    #[error(
        "{MAX_FORMER} former owners may still have I/O in flight; wait for them, or declare the dead ones stopped"
    )]
    TooManyFormer,
    /// These functions cannot have produced the record.
    #[error("{reason}; restore the record")]
    BadRecord {
        /// The contradiction in the record.
        reason: String,
    },
}

fn list(nodes: &[NodeRef]) -> String {
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Certainty about an owner that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gone {
    /// Its lease has ended. It may be stopped, cut off or slow, and may resume at any time.
    LeaseEnded,
    /// Its lease ended so long ago that it has stopped by itself (its deadline plus the longest time of a storage request).
    FenceGracePassed,
    /// It has a `stopped/` note.
    Stopped,
}

/// Evidence that an owner is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerGone {
    /// The process.
    pub owner: NodeRef,
    /// The certainty.
    pub how: Gone,
}

/// The caller of a change that is also valid on a disk without an owner.
#[derive(Clone, Copy, Debug)]
pub enum Caller<'a> {
    /// The owner, in its known epoch.
    Owner {
        /// The process.
        node: &'a NodeRef,
        /// Its epoch.
        epoch: u64,
    },
    /// Another caller; allowed only while the disk has no owner.
    Other,
}

/// Opens a disk that has no owner. It starts as `write-through`; [`change_replicas`] raises that.
///
/// # Errors
/// [`Refusal::Owned`].
pub fn claim_free(record: &DiskRecord, node: &NodeRef) -> Result<DiskRecord, Refusal> {
    if let Some(owner) = &record.owner {
        return Err(Refusal::Owned { owner: owner.clone() });
    }
    let mut next = next(record)?;
    (next.owner, next.heir) = (Some(node.clone()), None);
    Ok(next)
}

/// Makes `by` the owner after the former owner has gone.
///
/// In write-back, any replica may take over, regardless of the former owner's actions: the replicas refuse its epoch from now on,
/// and nothing is acknowledged without them (P1, P2). The new owner's copy of the log then counts as the owner's; until it has
/// changed the replica set it must not acknowledge more than the mode allows. In write-through only elapsed time or proof of its
/// end keeps the former owner off the backing: the new owner waits for it before it answers anything. The record keeps the former
/// owner's set until its right is proved over ([`silence_former`]). The owner's node may take over when it has restarted and the
/// log is on its flash. No other node takes over `write-back+0`: that would silently lose acknowledged writes.
///
/// # Errors
/// [`Refusal::NotOwned`], [`Refusal::OtherEvidence`], [`Refusal::NotAReplica`], [`Refusal::OnlyCopyLost`],
/// [`Refusal::TooManyFormer`].
pub fn take_over(record: &DiskRecord, by: &NodeRef, evidence: &OwnerGone) -> Result<DiskRecord, Refusal> {
    let owner = gone_owner(record, by, evidence)?;
    match record.mode {
        Mode::WriteBack if record.has_owners_copy(by) => {}
        Mode::WriteBack if record.replicas.is_empty() => {
            return Err(Refusal::OnlyCopyLost { owner: owner.clone() });
        }
        Mode::WriteBack if !record.is_replica(by) => {
            return Err(Refusal::NotAReplica { by: by.clone(), replicas: record.replicas.clone() });
        }
        // The new owner answers nothing before the former owner's right has ended and the fence grace has passed.
        Mode::WriteBack | Mode::WriteThrough => {}
    }
    let mut next = succeed(record, owner, by)?;
    next.replicas.retain(|replica| !record.counts(replica, by));
    Ok(next)
}

/// Swaps the owner with replica `to`, which has a complete copy of the log: nothing needs destaging, and the number of copies is
/// unchanged (P1).
///
/// The caller has stopped its destage, and ends all other I/O once this is committed; until it has written its `released/` note,
/// it counts as a former owner (P4).
///
/// # Errors
/// [`Refusal::Fenced`], [`Refusal::NotAReplica`], [`Refusal::TooManyFormer`].
pub fn hand_over(
    record: &DiskRecord,
    owner: &NodeRef,
    epoch: u64,
    to: &NodeRef,
) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    let mut next = succeed(record, owner, to)?;
    let Some(replica_slot) = next.replicas.iter_mut().find(|replica| record.counts(replica, to)) else {
        return Err(Refusal::NotAReplica { by: to.clone(), replicas: record.replicas.clone() });
    };
    *replica_slot = owner.clone();
    next.follower = None;
    Ok(next)
}

/// Removes a replica at its own node's request, when its flash no longer has that copy: others need not wait for it. Only while
/// the owner is gone; a living owner detects it and fills the copy anew.
///
/// # Errors
/// [`Refusal::NotOwned`], [`Refusal::OtherEvidence`], [`Refusal::NotAReplica`].
pub fn disclaim(record: &DiskRecord, by: &NodeRef, evidence: &OwnerGone) -> Result<DiskRecord, Refusal> {
    gone_owner(record, by, evidence)?;
    if !record.is_replica(by) {
        return Err(Refusal::NotAReplica { by: by.clone(), replicas: record.replicas.clone() });
    }
    let mut next = next(record)?;
    next.replicas.retain(|replica| !record.counts(replica, by));
    Ok(next)
}

/// Makes `by` the owner although all copies of the log are lost. Only on an operator's explicit command: writes that were
/// acknowledged and not destaged are lost, and the backing is as of its last checkpoint (P5).
///
/// # Errors
/// [`Refusal::NotOwned`], [`Refusal::OtherEvidence`], [`Refusal::MayStillWrite`], [`Refusal::TooManyFormer`].
pub fn accept_loss(record: &DiskRecord, by: &NodeRef, evidence: &OwnerGone) -> Result<DiskRecord, Refusal> {
    let owner = gone_owner(record, by, evidence)?;
    must_not_write(owner, evidence)?;
    let mut next = succeed(record, owner, by)?;
    next.replicas.clear();
    next.mode = Mode::WriteThrough;
    Ok(next)
}

/// Sets the replica set and the mode, in one step (P3).
///
/// Every node of `replicas` must already have the complete live log, because from the commit on any of them may take over. For
/// [`Mode::WriteThrough`] the caller must have destaged all of it (`dirty` is 0).
///
/// # Errors
/// [`Refusal::Fenced`], [`Refusal::StillDirty`], [`Refusal::BadReplicas`].
pub fn change_replicas(
    record: &DiskRecord,
    owner: &NodeRef,
    epoch: u64,
    replicas: &[NodeRef],
    mode: Mode,
    dirty: u64,
) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    let refuse = |reason: String| Err(Refusal::BadReplicas { reason });
    let requested = record.policy;
    match mode {
        Mode::WriteThrough if dirty > 0 => return Err(Refusal::StillDirty { bytes: dirty }),
        Mode::WriteThrough if !replicas.is_empty() => {
            return refuse("write-through has no replicas; destage, then pass an empty set".into());
        }
        Mode::WriteBack if requested == Policy::WriteThrough => {
            return refuse("the requested policy is write-through; set another policy first".into());
        }
        // A single copy is write-back only when the policy requests it (P1: never fewer, never silently).
        Mode::WriteBack if replicas.is_empty() && requested != Policy::WriteBack(0) => {
            return refuse(format!(
                "{requested} needs a replica; without one, destage and fall back to write-through"
            ));
        }
        Mode::WriteThrough | Mode::WriteBack => {}
    }
    if replicas.len() > MAX_REPLICAS {
        return refuse(format!("at most {MAX_REPLICAS}, not {}", replicas.len()));
    }
    for (index, replica) in replicas.iter().enumerate() {
        if replica.node == owner.node {
            return refuse(format!("{replica} is the owner's own node and would fail with it"));
        }
        if replicas[..index].iter().any(|earlier| earlier.node == replica.node) {
            return refuse(format!("{} occurs twice", replica.node));
        }
    }
    let mut next = next(record)?;
    next.replicas = replicas.to_vec();
    next.guards.retain(|_| replicas.is_empty());
    next.mode = mode;
    Ok(next)
}

/// Sets the requested policy. [`change_replicas`] changes the effective policy later.
///
/// # Errors
/// [`Refusal::Fenced`] when the caller is not the owner; [`Refusal::Owned`] when another caller acts on an owned disk: ask the
/// owner.
pub fn set_policy(record: &DiskRecord, caller: Caller<'_>, policy: Policy) -> Result<DiskRecord, Refusal> {
    check_caller(record, caller)?;
    if policy.replicas() > MAX_REPLICAS {
        return Err(Refusal::BadReplicas {
            reason: format!("at most {MAX_REPLICAS}, not {}", policy.replicas()),
        });
    }
    let mut next = next(record)?;
    next.policy = policy;
    Ok(next)
}

/// Sets the size, in bytes. The caller must have grown the backing. A disk never shrinks: its guest has data there.
///
/// # Errors
/// As [`set_policy`], and [`Refusal::BadSize`].
pub fn resize(record: &DiskRecord, caller: Caller<'_>, size: u64) -> Result<DiskRecord, Refusal> {
    check_caller(record, caller)?;
    let block = record.logical_block;
    if size == 0 || !size.is_multiple_of(u64::from(block)) {
        let reason = format!("{size} is not a positive multiple of the logical block, {block}");
        return Err(Refusal::BadSize { reason });
    }
    if size < record.size {
        let reason = format!("{size} is less than the disk's {}; shrinking would cut off data", record.size);
        return Err(Refusal::BadSize { reason });
    }
    let mut next = next(record)?;
    next.size = size;
    Ok(next)
}

/// Sets or removes the limit of the rate at which clients are served.
///
/// # Errors
/// As [`set_policy`], and [`Refusal::BadLimit`].
pub fn set_limit(
    record: &DiskRecord,
    caller: Caller<'_>,
    limit: Option<Limit>,
) -> Result<DiskRecord, Refusal> {
    check_caller(record, caller)?;
    if let Some(reason) = limit.and_then(Limit::contradiction) {
        return Err(Refusal::BadLimit { reason });
    }
    let mut next = next(record)?;
    next.limit = limit;
    Ok(next)
}

/// The import with this number has written all of its image: the disk is like any other from now on.
///
/// # Errors
/// As [`set_policy`], and [`Refusal::OtherImport`].
pub fn end_import(record: &DiskRecord, caller: Caller<'_>, number: u64) -> Result<DiskRecord, Refusal> {
    check_caller(record, caller)?;
    if record.importing != number {
        return Err(Refusal::OtherImport);
    }
    let mut next = next(record)?;
    next.importing = 0;
    Ok(next)
}

/// Closes the disk cleanly: no owner, no replicas, an empty log, no I/O of the owner in flight.
///
/// # Errors
/// [`Refusal::Fenced`], [`Refusal::StillDirty`].
pub fn release(record: &DiskRecord, owner: &NodeRef, epoch: u64, dirty: u64) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    if dirty > 0 {
        return Err(Refusal::StillDirty { bytes: dirty });
    }
    let mut next = next(record)?;
    (next.owner, next.follower, next.heir, next.home) = (None, None, None, None);
    next.replicas.clear();
    next.guards.clear();
    next.mode = Mode::WriteThrough;
    Ok(next)
}

/// As [`release`], and names the process that is to claim the disk as soon as it does not have it open any more.
///
/// # Errors
/// As [`release`].
pub fn pass_on(
    record: &DiskRecord,
    owner: &NodeRef,
    epoch: u64,
    dirty: u64,
    to: &NodeRef,
) -> Result<DiskRecord, Refusal> {
    let mut next = release(record, owner, epoch, dirty)?;
    next.heir = Some(to.clone());
    Ok(next)
}

/// Removes a former owner that has no I/O in flight: it has a `stopped/` note (and the kernel of its machine is done with it) or
/// a `released/` note. Changes neither owner nor replica set, so the epoch is unchanged.
///
/// # Errors
/// [`Refusal::Fenced`].
pub fn forget_former(
    record: &DiskRecord,
    owner: &NodeRef,
    epoch: u64,
    former: &FormerOwner,
) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    let mut next = record.clone();
    next.former.retain(|known| known != former);
    Ok(next)
}

/// Records that a former owner's right is over: enough members of its set are sealed and their last grants have ended, or its end
/// is proved. Its I/O may still be in flight. The epoch is unchanged.
///
/// # Errors
/// [`Refusal::Fenced`].
pub fn silence_former(
    record: &DiskRecord,
    owner: &NodeRef,
    epoch: u64,
    former: &FormerOwner,
) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    let mut next = record.clone();
    next.former.iter_mut().filter(|known| *known == former).for_each(|former| former.set = None);
    Ok(next)
}

/// Sets the guards of a disk without replicas. The epoch is unchanged: no message is checked against them, and the owner asks
/// both the old and the new guards until this is committed.
///
/// # Errors
/// [`Refusal::Fenced`]; [`Refusal::BadReplicas`] when the disk has replicas, which guard it themselves.
pub fn set_guards(
    record: &DiskRecord,
    owner: &NodeRef,
    epoch: u64,
    guards: &[String],
) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    if !record.replicas.is_empty() && !guards.is_empty() {
        return Err(Refusal::BadReplicas { reason: "a disk with replicas needs no guards".into() });
    }
    Ok(DiskRecord { guards: guards.to_vec(), ..record.clone() })
}

/// A new epoch for the same owner, otherwise unchanged: its earlier requests with unknown outcome can no longer be committed.
///
/// # Errors
/// [`Refusal::Fenced`].
pub fn renew(record: &DiskRecord, owner: &NodeRef, epoch: u64) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    next(record)
}

/// Sets or clears the follower: clients on that node may use the disk before it moves there. Changes neither owner nor replica
/// set, so the epoch is unchanged.
///
/// # Errors
/// [`Refusal::Fenced`]; [`Refusal::Owned`] when the follower is the owner.
pub fn set_follower(
    record: &DiskRecord,
    owner: &NodeRef,
    epoch: u64,
    follower: Option<&NodeRef>,
) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    if follower.is_some_and(|follower| follower.node == owner.node) {
        return Err(Refusal::Owned { owner: owner.clone() });
    }
    Ok(DiskRecord { follower: follower.cloned(), ..record.clone() })
}

/// Forgets the node that the disk returns to. Changes neither owner nor replica set, so the epoch is unchanged.
///
/// # Errors
/// [`Refusal::Fenced`].
pub fn forget_home(record: &DiskRecord, owner: &NodeRef, epoch: u64) -> Result<DiskRecord, Refusal> {
    check_owner(record, owner, epoch)?;
    Ok(DiskRecord { home: None, ..record.clone() })
}

/// The record in the next epoch, otherwise unchanged.
fn next(record: &DiskRecord) -> Result<DiskRecord, Refusal> {
    record.check().map_err(|error| Refusal::BadRecord { reason: error.to_string() })?;
    let mut next = record.clone();
    let exhausted = || Refusal::BadRecord { reason: "the epoch counter is exhausted".into() };
    next.epoch = record.epoch.checked_add(1).ok_or_else(exhausted)?;
    Ok(next)
}

/// The next record, with `by` as the owner and `owner` among the former ones.
fn succeed(record: &DiskRecord, owner: &NodeRef, by: &NodeRef) -> Result<DiskRecord, Refusal> {
    let mut next = next(record)?;
    // Its grants of an earlier tenure ended when it owned the disk again.
    next.former.retain(|former| former.node != *owner);
    if next.former.len() >= MAX_FORMER {
        return Err(Refusal::TooManyFormer);
    }
    let set = Some(record.grant_set()).filter(|set| !set.members().is_empty());
    next.former.push(FormerOwner { node: owner.clone(), epoch: record.epoch, set });
    next.owner = Some(by.clone());
    next.guards.clear();
    // It is of the owner's stay on this node. A drain that hands the disk over names it anew.
    next.home = None;
    // Its guest may already run there, and needs the disk wherever it is now.
    next.follower = next.follower.filter(|follower| follower.node != by.node);
    Ok(next)
}

fn check_owner(record: &DiskRecord, owner: &NodeRef, epoch: u64) -> Result<(), Refusal> {
    if record.owner.as_ref() != Some(owner) || record.epoch != epoch {
        return Err(Refusal::Fenced { owner: record.owner.clone(), epoch: record.epoch });
    }
    Ok(())
}

fn check_caller(record: &DiskRecord, caller: Caller<'_>) -> Result<(), Refusal> {
    match (caller, &record.owner) {
        (Caller::Owner { node, epoch }, _) => check_owner(record, node, epoch),
        (Caller::Other, Some(owner)) => Err(Refusal::Owned { owner: owner.clone() }),
        (Caller::Other, None) => Ok(()),
    }
}

fn gone_owner<'a>(
    record: &'a DiskRecord,
    by: &NodeRef,
    evidence: &OwnerGone,
) -> Result<&'a NodeRef, Refusal> {
    let owner = record.owner.as_ref().ok_or(Refusal::NotOwned)?;
    if owner == by {
        return Err(Refusal::Owned { owner: owner.clone() });
    }
    if evidence.owner != *owner {
        return Err(Refusal::OtherEvidence { about: evidence.owner.clone(), owner: owner.clone() });
    }
    Ok(owner)
}

fn must_not_write(owner: &NodeRef, evidence: &OwnerGone) -> Result<(), Refusal> {
    match evidence.how {
        Gone::LeaseEnded => Err(Refusal::MayStillWrite { owner: owner.clone() }),
        Gone::FenceGracePassed | Gone::Stopped => Ok(()),
    }
}
