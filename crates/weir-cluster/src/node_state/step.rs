//! Events of nodes' lives, and the records that follow from them.

use super::planted::Bug;
use super::rules::{Rules, millis, quarantine_limit};
use crate::records::{Drain, Isolation, MAX_ISOLATIONS, NodeStateRecord, NodeStatesRecord, Quarantine};

/// An event in the life of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The node has a session in the registry: it joined, or is back. Written by the node itself, under its session.
    Present {
        /// The node.
        node: String,
    },
    /// The session of this process is gone, and a member of its disks' sets hears it. Written by that member, on the condition
    /// that the session is absent.
    Isolated {
        /// The node.
        node: String,
        /// Its process.
        incarnation: u64,
    },
    /// An operator wants the node's disks elsewhere.
    Drain {
        /// The node.
        node: String,
        /// Whether disks may end with fewer copies than their policies request.
        fewer_copies: bool,
    },
    /// An operator ends the node's drain.
    Resume {
        /// The node.
        node: String,
    },
    /// An operator ends the node's quarantine, and its history of isolations.
    Clear {
        /// The node.
        node: String,
    },
    /// An operator removes the node. See [`super::may_remove`].
    Removed {
        /// The node.
        node: String,
    },
}

/// A consequence of an event, for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The node is isolated, for the `count`th time within the quarantine's window.
    Isolated {
        /// The node.
        node: String,
        /// Its isolations within the window.
        count: usize,
    },
    /// The node is quarantined from now on.
    Quarantined {
        /// The node.
        node: String,
        /// The end, in milliseconds since 1970.
        until_unix_ms: u64,
    },
    /// The node is not quarantined, because as many nodes as allowed are.
    QuarantineRefused {
        /// The node.
        node: String,
        /// That number.
        limit: usize,
    },
    /// The quarantine has ended: by command, or because fewer nodes may be quarantined since another one was removed.
    QuarantineEnded {
        /// The node.
        node: String,
    },
    /// The drain begins.
    DrainStarted {
        /// The node.
        node: String,
    },
    /// The drain is over; disks may be placed on the node again.
    Resumed {
        /// The node.
        node: String,
    },
}

/// No node has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no node {0}")]
pub struct UnknownNode(pub String);

impl Event {
    fn node(&self) -> &str {
        match self {
            Event::Present { node }
            | Event::Isolated { node, .. }
            | Event::Drain { node, .. }
            | Event::Resume { node }
            | Event::Clear { node }
            | Event::Removed { node } => node,
        }
    }
}

/// Applies an event at `now`, in milliseconds since 1970. An event that changes nothing has no effect. An ended quarantine of the
/// event's node and its isolations outside the window leave the record. The other nodes' stay: one event from a clock that is ahead must
/// not erase the histories of all nodes.
///
/// # Errors
/// An operator's event names an unknown node.
pub fn step(
    states: &NodeStatesRecord,
    rules: &Rules,
    now: u64,
    event: &Event,
) -> Result<(NodeStatesRecord, Vec<Effect>), UnknownNode> {
    let mut next = states.clone();
    next.nodes.values_mut().for_each(|node| limit(node, rules, now));
    if let Some(node) = next.nodes.get_mut(event.node()) {
        expire(node, rules, now);
    }
    let mut effects = Vec::new();
    match event {
        Event::Present { node } => {
            let state = next.nodes.entry(node.clone()).or_default();
            state.isolation = None;
            state.drain = state.drain.filter(|_| !rules.planted.has(Bug::ForgetDrain));
            state.quarantine = state.quarantine.filter(|_| !rules.planted.has(Bug::ForgetQuarantine));
        }
        Event::Isolated { node, incarnation } => {
            isolate(&mut next, rules, now, node, *incarnation, &mut effects)
        }
        Event::Drain { node, fewer_copies } => {
            let state = known(&mut next, node)?;
            if state.drain.is_none() {
                effects.push(Effect::DrainStarted { node: node.clone() });
            }
            let since_unix_ms = state.drain.map_or(now, |drain| drain.since_unix_ms);
            state.drain = Some(Drain { since_unix_ms, fewer_copies: *fewer_copies });
        }
        Event::Resume { node } => {
            if known(&mut next, node)?.drain.take().is_some() {
                effects.push(Effect::Resumed { node: node.clone() });
            }
        }
        Event::Clear { node } => {
            let state = known(&mut next, node)?;
            state.isolations_unix_ms.clear();
            if state.quarantine.take().is_some() {
                effects.push(Effect::QuarantineEnded { node: node.clone() });
            }
        }
        Event::Removed { node } => {
            known(&mut next, node)?;
            next.nodes.remove(node);
            lift_surplus(&mut next, now, &mut effects);
        }
    }
    Ok((next, effects))
}

fn known<'a>(states: &'a mut NodeStatesRecord, node: &str) -> Result<&'a mut NodeStateRecord, UnknownNode> {
    states.nodes.get_mut(node).ok_or_else(|| UnknownNode(node.to_owned()))
}

/// Drops what is over.
fn expire(node: &mut NodeStateRecord, rules: &Rules, now: u64) {
    let keeps_all = rules.planted.has(Bug::CountOldIsolations);
    let window = millis(rules.quarantine_window);
    node.isolations_unix_ms.retain(|start| keeps_all || now.saturating_sub(*start) < window);
    end_quarantine(node, now);
}

fn end_quarantine(node: &mut NodeStateRecord, now: u64) {
    node.quarantine = node.quarantine.filter(|quarantine| now < quarantine.until_unix_ms);
}

/// Limits times in the future, which a wrong clock has written.
fn limit(node: &mut NodeStateRecord, rules: &Rules, now: u64) {
    for start in &mut node.isolations_unix_ms {
        *start = now.min(*start);
    }
    if let Some(isolation) = &mut node.isolation {
        isolation.since_unix_ms = isolation.since_unix_ms.min(now);
    }
    node.quarantine = node.quarantine.map(|quarantine| {
        let latest = now.saturating_add(millis(rules.quarantine_duration));
        Quarantine {
            since_unix_ms: quarantine.since_unix_ms.min(now),
            until_unix_ms: quarantine.until_unix_ms.min(latest),
        }
    });
}

fn isolate(
    states: &mut NodeStatesRecord,
    rules: &Rules,
    now: u64,
    name: &str,
    incarnation: u64,
    effects: &mut Vec<Effect>,
) {
    let state = states.nodes.entry(name.to_owned()).or_default();
    // Several members see the same isolation.
    if state.isolation.is_some_and(|isolation| isolation.incarnation == incarnation) {
        return;
    }
    state.isolation = Some(Isolation { incarnation, since_unix_ms: now });
    if !rules.planted.has(Bug::ForgetIsolation) {
        if state.isolations_unix_ms.len() == MAX_ISOLATIONS {
            state.isolations_unix_ms.remove(0);
        }
        state.isolations_unix_ms.push(now);
    }
    let count = state.isolations_unix_ms.len();
    effects.push(Effect::Isolated { node: name.to_owned(), count });
    if count < rules.quarantine_threshold {
        return;
    }
    let others = |states: &NodeStatesRecord| {
        states.nodes.iter().filter(|(other, state)| *other != name && state.quarantine.is_some()).count()
    };
    let limit = quarantine_limit(states.nodes.len());
    if others(states) >= limit {
        states.nodes.values_mut().for_each(|state| end_quarantine(state, now));
    }
    let others = others(states);
    if others >= limit && !rules.planted.has(Bug::ExceedQuarantineLimit) {
        return effects.push(Effect::QuarantineRefused { node: name.to_owned(), limit });
    }
    let until_unix_ms = now.saturating_add(millis(rules.quarantine_duration));
    if let Some(state) = states.nodes.get_mut(name) {
        let since_unix_ms = state.quarantine.map_or(now, |quarantine| quarantine.since_unix_ms);
        state.quarantine = Some(Quarantine { since_unix_ms, until_unix_ms });
    }
    effects.push(Effect::Quarantined { node: name.to_owned(), until_unix_ms });
}

/// With fewer nodes, fewer may be quarantined: the quarantines that would end first end now.
fn lift_surplus(states: &mut NodeStatesRecord, now: u64, effects: &mut Vec<Effect>) {
    let limit = quarantine_limit(states.nodes.len());
    if states.nodes.values().filter(|state| state.quarantine.is_some()).count() > limit {
        states.nodes.values_mut().for_each(|state| end_quarantine(state, now));
    }
    loop {
        let quarantined = states
            .nodes
            .iter_mut()
            .filter_map(|(name, state)| Some((state.quarantine?.until_unix_ms, name, state)));
        let mut quarantined: Vec<_> = quarantined.collect();
        if quarantined.len() <= limit {
            return;
        }
        quarantined.sort_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)));
        if let Some((_, name, state)) = quarantined.into_iter().next() {
            state.quarantine = None;
            effects.push(Effect::QuarantineEnded { node: name.clone() });
        }
    }
}
