//! Where the disks of a drained or quarantined node go, and whether a node may be removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::planted::Bug;
use super::rules::Rules;
use super::state::barred;
use crate::placement::{Live, choose_owner, has_copy, replicas_without};
use crate::records::{DiskRecord, Mode, NodeRef, NodeStatesRecord};

/// The nodes that cannot open a disk at present, by disk: they may have copies of its log, and do not own it.
pub type Unfit = BTreeMap<String, BTreeSet<String>>;

/// The plan of a drain: its steps by disk, in the order of the disks' names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Disks of the node that another node gets.
    pub moves: Vec<Moved>,
    /// Copies of other owners' logs for which there is a replacement.
    pub copies: Vec<Copied>,
    /// Disks and copies that the drain leaves on the node.
    pub refused: Vec<Unmovable>,
}

/// A disk gets another owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The disk.
    pub disk: String,
    /// The new owner's node.
    pub to: String,
    /// The number of replicas that it can have there, at most as many as the policy requests.
    pub replicas: usize,
}

/// A copy of another owner's log gets another place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The disk.
    pub disk: String,
    /// The node of the new copy; `None`: the disk has fewer copies than its policy requests, as permitted.
    pub to: Option<String>,
}

/// A disk that counts on the node, and goes on doing so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmovable {
    /// The disk.
    pub disk: String,
    /// The reason.
    pub reason: Reason,
}

/// The reason why a drain does not take a disk or a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No other node can have the disk.
    NoTarget,
    /// Those that could have the disk cannot open it.
    Unfit {
        /// These nodes.
        nodes: Vec<String>,
    },
    /// The disk would have fewer copies than its policy requests; a permission overrides this.
    FewerCopies {
        /// The best node to move it to, or the owner that stays.
        at: String,
        /// Replicas that the disk would have.
        replicas: usize,
        /// Replicas that its policy requests.
        wanted: usize,
    },
    /// The node has the last copy of the log that is known to exist. Nothing overrides this.
    LastCopy,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::NoTarget => f.write_str("no other node that takes disks has room for it"),
            Reason::Unfit { nodes } => {
                write!(f, "{} cannot open it, and no other node can have it", nodes.join(", "))
            }
            Reason::FewerCopies { at, replicas, wanted } => {
                let replica = if *wanted == 1 { "replica" } else { "replicas" };
                write!(f, "its policy requests {wanted} {replica}, and on {at} it could have {replicas}")
            }
            Reason::LastCopy => f.write_str("no other node that is up has a copy of its log"),
        }
    }
}

/// Plans the drain of `node` among the `live` nodes. `barred` nodes get nothing. With `fewer_copies`, disks may end with fewer
/// copies than their policies request; but never without any. `unfit` nodes get copies at most.
#[must_use]
pub fn plan(
    node: &str,
    disks: &BTreeMap<String, DiskRecord>,
    live: &Live,
    barred: &BTreeSet<String>,
    rules: &Rules,
    fewer_copies: bool,
    unfit: &Unfit,
) -> Plan {
    let mut exclude: Vec<String> = barred.iter().filter(|barred| *barred != node).cloned().collect();
    exclude.push(node.to_owned());
    let mut planner =
        Planner { node, exclude, live: live.clone(), rules, fewer_copies, unfit, plan: Plan::default() };
    for disk in disks.values() {
        let owner = disk.owner.as_ref();
        if owner.is_some_and(|owner| owner.node == node && is_there(live, owner)) {
            planner.move_disk(disk);
        } else if disk.replicas.iter().any(|replica| replica.node == node) {
            planner.move_copy(disk);
        }
    }
    planner.plan
}

/// The replicas of an open disk that its owner replaces because their nodes take no disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// They go when other nodes have their copies.
    pub replaced: Vec<String>,
    /// They go in any case, by the operator's permission; without enough copies the disk goes to write-through.
    pub dropped: Vec<String>,
}

/// Whether a disk may move back from its owner to `home`: the node is up and not `barred`, has a copy or room, and the disk has as
/// many replicas there as its policy requests, or at least as many as where it is. Its present owner then has a copy.
#[must_use]
pub fn may_return(disk: &DiskRecord, home: &str, live: &Live, barred: &BTreeSet<String>) -> bool {
    let (Some(owner), Some(node)) = (&disk.owner, live.get(home)) else { return false };
    let holds = disk.replicas.iter().any(|replica| replica.node == home && has_copy(disk, replica, live));
    if barred.contains(home) || !(holds || node.has_room(disk.medium)) {
        return false;
    }
    let exclude: Vec<String> = barred.iter().cloned().collect();
    let replicas_on = |disk: &DiskRecord, owner: &str| {
        let (kept, chosen) = replicas_without(disk, owner, &exclude, live);
        kept.len() + chosen.len()
    };
    let mut returned = disk.clone();
    returned.replicas.retain(|replica| replica.node != home);
    returned.replicas.insert(0, owner.clone());
    let here = replicas_on(disk, &owner.node);
    replicas_on(&returned, home) >= here.min(disk.policy.replicas())
}

/// The replicas that `owner` is to replace; it fills copies on the nodes `filling` at present, which have room for them. A replica
/// stays if its going would leave fewer copies than the disk's policy requests,
/// unless its node's drain permits that.
#[must_use]
pub fn leaving(
    disk: &DiskRecord,
    owner: &str,
    states: &NodeStatesRecord,
    live: &Live,
    rules: &Rules,
    now: u64,
    filling: &[NodeRef],
) -> Leaving {
    let barred = barred(states, rules, now);
    let replicas = disk.replicas.iter().map(|replica| &replica.node);
    let nodes: Vec<String> = replicas.filter(|node| barred.contains(*node)).cloned().collect();
    if nodes.is_empty() {
        return Leaving::default();
    }
    let exclude: Vec<String> = barred.into_iter().collect();
    // A copy that is being filled may have taken the last room of its node, and is not in the record yet.
    let mut filled = disk.clone();
    let is_new = |node: &&NodeRef| disk.replicas.iter().all(|replica| replica.node != node.node);
    filled.replicas.extend(filling.iter().filter(is_new).cloned());
    let (kept, chosen) = replicas_without(&filled, owner, &exclude, live);
    if kept.len() + chosen.len() >= disk.policy.replicas() {
        return Leaving { replaced: nodes, dropped: Vec::new() };
    }
    let permits = |node: &String| {
        let drain = states.nodes.get(node).and_then(|state| state.drain);
        drain.is_some_and(|drain| drain.fewer_copies) || rules.planted.has(Bug::DrainBelowPolicy)
    };
    Leaving { replaced: Vec::new(), dropped: nodes.into_iter().filter(permits).collect() }
}

struct Planner<'a> {
    node: &'a str,
    /// Nodes that get nothing: the drained one and the barred ones.
    exclude: Vec<String>,
    /// The nodes, with the load and the space that they will have.
    live: Live,
    rules: &'a Rules,
    fewer_copies: bool,
    unfit: &'a Unfit,
    plan: Plan,
}

impl Planner<'_> {
    /// The owner is the drained node.
    fn move_disk(&mut self, disk: &DiskRecord) {
        let wanted = disk.policy.replicas();
        let unfit = self.unfit.get(&disk.name).cloned().unwrap_or_default();
        let Some(to) = choose_owner(disk, &self.exclude, &unfit, &self.live) else {
            let reason = match unfit.is_empty() {
                true => Reason::NoTarget,
                false => Reason::Unfit { nodes: unfit.into_iter().collect() },
            };
            return self.refuse(disk, reason);
        };
        let (kept, chosen) = replicas_without(disk, &to, &self.exclude, &self.live);
        let replicas = kept.len() + chosen.len();
        if replicas < wanted && !self.may_have_fewer() {
            return self.refuse(disk, Reason::FewerCopies { at: to, replicas, wanted });
        }
        for node in chosen.iter().chain([&to]).filter(|node| !is_holder(disk, node)) {
            self.take_room(node, disk);
        }
        self.plan.moves.push(Moved { disk: disk.name.clone(), to, replicas });
    }

    /// The drained node is a replica of another owner.
    fn move_copy(&mut self, disk: &DiskRecord) {
        let owner =
            disk.owner.as_ref().filter(|owner| owner.node != self.node && is_there(&self.live, owner));
        let Some(owner) = owner else {
            let mut others = disk.replicas.iter().filter(|replica| replica.node != self.node);
            // Without an owner nothing is replaced: another replica takes over first.
            let exists = others.any(|replica| has_copy(disk, replica, &self.live));
            if exists {
                self.plan.copies.push(Copied { disk: disk.name.clone(), to: None });
            } else {
                self.refuse(disk, Reason::LastCopy);
            }
            return;
        };
        let wanted = disk.policy.replicas();
        let (kept, chosen) = replicas_without(disk, &owner.node, &self.exclude, &self.live);
        let replicas = kept.len() + chosen.len();
        if replicas < wanted && !self.may_have_fewer() {
            let at = owner.node.clone();
            return self.refuse(disk, Reason::FewerCopies { at, replicas, wanted });
        }
        let to = chosen.into_iter().next();
        if let Some(to) = &to {
            self.take_room(to, disk);
        }
        self.plan.copies.push(Copied { disk: disk.name.clone(), to });
    }

    fn may_have_fewer(&self) -> bool {
        self.fewer_copies || self.rules.planted.has(Bug::DrainBelowPolicy)
    }

    fn take_room(&mut self, node: &str, disk: &DiskRecord) {
        let Some(record) = self.live.get_mut(node) else { return };
        record.load = record.load.saturating_add(1);
        for space in record.media.iter_mut().filter(|space| space.medium == disk.medium) {
            space.free = space.free.saturating_sub(space.log);
        }
    }

    fn refuse(&mut self, disk: &DiskRecord, reason: Reason) {
        self.plan.refused.push(Unmovable { disk: disk.name.clone(), reason });
    }
}

fn is_there(live: &Live, process: &NodeRef) -> bool {
    live.get(&process.node).is_some_and(|now| now.incarnation == process.incarnation)
}

fn is_holder(disk: &DiskRecord, node: &str) -> bool {
    disk.replicas.iter().any(|replica| replica.node == node)
}

/// The reason why a node may not be removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotRemovable {
    /// It has a session.
    #[error("node {0} is up; stop it first")]
    Up(String),
    /// A disk's record names it as the owner or a replica: it may have the only copy of the log.
    #[error(
        "disk {disk} counts on node {node}; wait until another node has taken over, or open the disk with --accept-loss"
    )]
    CountedOn {
        /// The node.
        node: String,
        /// The disk.
        disk: String,
    },
}

/// Whether a node that will not come back may be removed.
///
/// # Errors
/// It is up, or a disk counts on it.
pub fn may_remove(
    node: &str,
    disks: &BTreeMap<String, DiskRecord>,
    live: &Live,
    rules: &Rules,
) -> Result<(), NotRemovable> {
    if live.contains_key(node) {
        return Err(NotRemovable::Up(node.to_owned()));
    }
    let ignores_copies = rules.planted.has(Bug::RemoveOnlyCopy);
    let counts = |disk: &&DiskRecord| {
        let mut holders = disk.owner.iter().chain(&disk.replicas);
        holders.any(|holder| holder.node == node) && !(ignores_copies && disk.mode == Mode::WriteBack)
    };
    match disks.values().find(counts) {
        Some(disk) => Err(NotRemovable::CountedOn { node: node.to_owned(), disk: disk.name.clone() }),
        None => Ok(()),
    }
}
