//! The present state of each node.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::planted::Bug;
use super::rules::{Rules, millis};
use crate::placement::Live;
use crate::records::{DiskRecord, NodeRef, NodeStateRecord, NodeStatesRecord};

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It has a session, and takes disks.
    Up,
    /// It has no session, members of its disks' sets have heard it, and the resiliency period lasts.
    Isolated,
    /// It was isolated too often: it takes no disks for now.
    Quarantined,
    /// It is drained, and some disk still counts on it.
    Draining,
    /// It is drained, and no disk counts on it.
    Maintenance,
    /// It has no session.
    Down,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            State::Up => "up",
            State::Isolated => "isolated",
            State::Quarantined => "quarantined",
            State::Draining => "draining",
            State::Maintenance => "maintenance",
            State::Down => "down",
        })
    }
}

/// The records that a node's state follows from.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// The nodes' states.
    pub states: &'a NodeStatesRecord,
    /// The nodes with a session.
    pub live: &'a Live,
    /// All disks, by name.
    pub disks: &'a BTreeMap<String, DiskRecord>,
}

impl Cluster<'_> {
    /// The state of a node at `now`, in milliseconds since 1970. A node without a record is up or down.
    #[must_use]
    pub fn state(&self, rules: &Rules, now: u64, node: &str) -> State {
        let state = self.states.nodes.get(node).cloned().unwrap_or_default();
        if !self.live.contains_key(node) {
            // Once its disks are others', it is as good as down.
            let owns = || self.disks.values().any(|disk| owner(disk) == Some(node));
            return if is_isolated(&state, rules, now) && owns() { State::Isolated } else { State::Down };
        }
        match (&state.drain, is_quarantined(&state, rules, now)) {
            (Some(_), _) if self.disks.values().any(|disk| counts_on(disk, node)) => State::Draining,
            (Some(_), _) => State::Maintenance,
            (None, true) => State::Quarantined,
            (None, false) => State::Up,
        }
    }
}

/// The nodes on which nothing is placed at `now`, in milliseconds since 1970: quarantined or drained.
#[must_use]
pub fn barred(states: &NodeStatesRecord, rules: &Rules, now: u64) -> BTreeSet<String> {
    if rules.planted.has(Bug::PlaceOnBarred) {
        return BTreeSet::new();
    }
    let barred =
        states.nodes.iter().filter(|(_, node)| node.drain.is_some() || is_quarantined(node, rules, now));
    barred.map(|(name, _)| name.clone()).collect()
}

/// The time for which nobody takes a disk from `owner`, whose session is gone, at `now` (milliseconds since 1970). `None`: take
/// over.
///
/// `heard`: a member of the disk's set hears the owner, which has fresh grants of all members that it needs. `gone_for`: the
/// time for which the caller has seen the owner without a session, by its monotonic clock. The period counts from the isolation in
/// the record, and never lasts longer by the caller's own clock than it should.
#[must_use]
pub fn hold(
    states: &NodeStatesRecord,
    rules: &Rules,
    now: u64,
    owner: &NodeRef,
    heard: bool,
    gone_for: Duration,
) -> Option<Duration> {
    if !heard || rules.planted.has(Bug::TakeFromIsolated) {
        return None;
    }
    let isolation = states.nodes.get(&owner.node).and_then(|node| node.isolation);
    let isolation = isolation.filter(|isolation| isolation.incarnation == owner.incarnation);
    let recorded = isolation.map_or(Duration::ZERO, |isolation| {
        Duration::from_millis(now.saturating_sub(isolation.since_unix_ms))
    });
    let left = rules.resiliency_period.checked_sub(gone_for.max(recorded))?;
    (!left.is_zero()).then_some(left)
}

fn is_isolated(node: &NodeStateRecord, rules: &Rules, now: u64) -> bool {
    let period = millis(rules.resiliency_period);
    node.isolation.is_some_and(|isolation| now.saturating_sub(isolation.since_unix_ms) < period)
}

/// Not if the end is further away than a quarantine of twice the duration: a clock far ahead has written it. The next event of the node
/// shortens it. A clock only a little ahead must not suspend the quarantine, so the bound is not the duration itself.
fn is_quarantined(node: &NodeStateRecord, rules: &Rules, now: u64) -> bool {
    let longest = millis(rules.quarantine_duration).saturating_mul(2);
    node.quarantine
        .is_some_and(|quarantine| now < quarantine.until_unix_ms && quarantine.until_unix_ms - now <= longest)
}

fn owner(disk: &DiskRecord) -> Option<&str> {
    disk.owner.as_ref().map(|owner| &*owner.node)
}

/// Whether a disk's record names the node: as the owner, as a member of its set, or as one of a set whose grants may still uphold a
/// former owner's right. The disk's owner must then seal a member of that set.
#[must_use]
pub fn counts_on(disk: &DiskRecord, node: &str) -> bool {
    let is_replica = disk.replicas.iter().any(|replica| replica.node == node);
    let mut former = disk.former.iter().filter_map(|former| former.set.as_ref());
    owner(disk) == Some(node)
        || is_replica
        || disk.guards.iter().any(|guard| guard == node)
        || former.any(|set| set.members().iter().any(|member| member == node))
}
