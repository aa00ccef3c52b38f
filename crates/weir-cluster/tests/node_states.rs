//! The rules of node states, compared with slow oracles.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use weir_cluster::node_state::{
    Cluster, Effect, Event, Leaving, NotRemovable, Reason, Rules, State, Unfit, barred, hold, leaving,
    may_remove, may_return, plan, step,
};
use weir_cluster::placement::{Live, misplaced};
use weir_cluster::records::{
    DiskRecord, Drain, FormerOwner, Medium, MediumSpace, Mode, NodeRef, NodeStateRecord, NodeStatesRecord,
    Policy, Record, Source,
};
use weir_cluster::right::GrantSet;

const SECOND: u64 = 1000;
const HOUR: u64 = 3600 * SECOND;

fn name(number: usize) -> String {
    format!("n{number}")
}

/// A cluster of so many nodes that have joined.
fn joined(nodes: usize, rules: &Rules) -> NodeStatesRecord {
    (0..nodes).fold(NodeStatesRecord::default(), |states, node| {
        step(&states, rules, 0, &Event::Present { node: name(node) }).unwrap().0
    })
}

fn quarantined(states: &NodeStatesRecord) -> BTreeSet<String> {
    let quarantined = states.nodes.iter().filter(|(_, node)| node.quarantine.is_some());
    quarantined.map(|(name, _)| name.clone()).collect()
}

/// At most 20 %, at least one.
fn is_within_limit(quarantined: usize, nodes: usize) -> bool {
    quarantined <= 1 || quarantined * 100 <= nodes * 20
}

fn isolate(states: &mut NodeStatesRecord, rules: &Rules, now: u64, node: &str) -> Vec<Effect> {
    let isolated = step(states, rules, now, &Event::Isolated { node: node.into(), incarnation: 1 }).unwrap();
    let back = step(&isolated.0, rules, now, &Event::Present { node: node.into() }).unwrap();
    *states = back.0;
    isolated.1
}

#[test]
fn of_all_sizes_of_clusters_at_most_a_fifth_is_quarantined_and_at_least_one_node() {
    let rules = Rules::default();
    for nodes in 1..=64 {
        let mut states = joined(nodes, &rules);
        for node in 0..nodes {
            let effects: Vec<_> =
                (0..3).flat_map(|_| isolate(&mut states, &rules, SECOND, &name(node))).collect();
            let decided = effects.iter().filter(|effect| {
                matches!(effect, Effect::Quarantined { .. } | Effect::QuarantineRefused { .. })
            });
            assert_eq!(decided.count(), 1, "{nodes}: {effects:?}");
            let count = quarantined(&states).len();
            assert!(is_within_limit(count, nodes) && count >= 1, "{count} of {nodes}");
        }
        let most = quarantined(&states).len();
        assert!(!is_within_limit(most + 1, nodes), "{most} of {nodes}: fewer than allowed");
        // With fewer nodes, fewer may be.
        for node in 0..nodes {
            states = step(&states, &rules, SECOND, &Event::Removed { node: name(node) }).unwrap().0;
            assert!(is_within_limit(quarantined(&states).len(), nodes - node - 1));
        }
    }
}

#[derive(Clone, Debug)]
enum Act {
    Isolated(usize),
    Clear(usize),
    Remove(usize),
    Join(usize),
    Drain(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let node = 0_usize..8;
    prop_oneof![
        10 => node.clone().prop_map(Act::Isolated),
        1 => node.clone().prop_map(Act::Clear),
        1 => node.clone().prop_map(Act::Remove),
        2 => node.clone().prop_map(Act::Join),
        1 => node.prop_map(Act::Drain),
    ]
}

/// All isolations since the last `clear`, and the end of the quarantine, of each node.
#[derive(Default)]
struct Oracle(BTreeMap<usize, (Vec<u64>, Option<u64>)>);

impl Oracle {
    fn apply(&mut self, now: u64, act: &Act) {
        let in_force = |until: &Option<u64>| until.is_some_and(|until| now < until);
        match *act {
            Act::Isolated(node) => {
                let entry = self.0.entry(node).or_default();
                entry.0.push(now);
                let count = entry.0.iter().filter(|start| now - **start < HOUR).count();
                let others = self.0.iter().filter(|(other, (_, until))| **other != node && in_force(until));
                let others = others.count();
                if count >= 3 && is_within_limit(others + 1, self.0.len()) {
                    self.0.get_mut(&node).unwrap().1 = Some(now + 2 * HOUR);
                }
            }
            Act::Clear(node) => {
                self.0.get_mut(&node).map(std::mem::take);
            }
            Act::Remove(node) => {
                self.0.remove(&node);
                loop {
                    let quarantined = self.0.iter().filter(|(_, (_, until))| in_force(until));
                    let ends: Vec<(u64, usize)> =
                        quarantined.map(|(node, (_, until))| (until.unwrap(), *node)).collect();
                    if is_within_limit(ends.len(), self.0.len()) {
                        break;
                    }
                    let first = ends.iter().min_by_key(|(until, node)| (*until, name(*node))).unwrap().1;
                    self.0.get_mut(&first).unwrap().1 = None;
                }
            }
            Act::Join(node) => drop(self.0.entry(node).or_default()),
            Act::Drain(_) => {}
        }
    }

    fn quarantined(&self, now: u64) -> BTreeSet<String> {
        let quarantined = self.0.iter().filter(|(_, (_, until))| until.is_some_and(|until| now < until));
        quarantined.map(|(node, _)| name(*node)).collect()
    }
}

fn event(act: &Act) -> Event {
    match *act {
        Act::Isolated(node) => Event::Isolated { node: name(node), incarnation: 1 },
        Act::Clear(node) => Event::Clear { node: name(node) },
        Act::Remove(node) => Event::Removed { node: name(node) },
        Act::Join(node) => Event::Present { node: name(node) },
        Act::Drain(node) => Event::Drain { node: name(node), fewer_copies: false },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Isolations count within a sliding hour, until a `clear`.
    #[test]
    fn quarantines_are_those_of_the_oracle(
        acts in prop::collection::vec((0_u64..1500, act()), 1..60),
    ) {
        let rules = Rules::default();
        let (mut states, mut oracle, mut now) = (NodeStatesRecord::default(), Oracle::default(), 0);
        for (pause, act) in acts {
            now += pause * SECOND;
            if let Ok((next, _)) = step(&states, &rules, now, &event(&act)) {
                states = next;
                oracle.apply(now, &act);
            }
            if let Act::Isolated(node) = act {
                states = step(&states, &rules, now, &Event::Present { node: name(node) }).unwrap().0;
            }
            prop_assert!(NodeStatesRecord::decode(&states.encode()).is_ok());
            // A change removes ended quarantines; a refused one changes nothing.
            let in_force = |node: &String| states.nodes[node].quarantine.unwrap().until_unix_ms > now;
            let found: BTreeSet<String> = quarantined(&states).into_iter().filter(in_force).collect();
            prop_assert_eq!(found, oracle.quarantined(now), "{:?} at {}", act, now);
            let drained = states.nodes.iter().filter(|(_, node)| node.drain.is_some());
            let expected: BTreeSet<String> =
                oracle.quarantined(now).into_iter().chain(drained.map(|(name, _)| name.clone())).collect();
            prop_assert_eq!(barred(&states, &rules, now), expected);
        }
    }

    /// Whatever the clocks of the nodes that write: the limit holds, and nothing outlasts its period by more than once.
    #[test]
    fn wrong_clocks_exceed_no_limit(
        acts in prop::collection::vec((prop_oneof![0_u64..4 * HOUR, Just(u64::MAX), any::<u64>()], act()), 1..60),
    ) {
        let (rules, mut states) = (Rules::default(), joined(8, &Rules::default()));
        for (now, act) in acts {
            let Ok((next, _)) = step(&states, &rules, now, &event(&act)) else { continue };
            states = next;
            prop_assert!(NodeStatesRecord::decode(&states.encode()).is_ok());
            prop_assert!(is_within_limit(quarantined(&states).len(), states.nodes.len()));
            let latest = now.saturating_add(2 * HOUR);
            prop_assert!(states.nodes.values().all(|node| node.quarantine.is_none_or(|it| it.until_unix_ms <= latest)));
            prop_assert!(states.nodes.values().all(|node| node.isolations_unix_ms.iter().all(|start| *start <= now)));
        }
    }
}

#[test]
fn an_isolation_counts_once_however_many_members_see_it() {
    let rules = Rules::default();
    let mut states = joined(3, &rules);
    let isolated = Event::Isolated { node: name(0), incarnation: 4 };
    for second in 0..5 {
        let (next, effects) = step(&states, &rules, second * SECOND, &isolated).unwrap();
        assert_eq!(effects.len(), usize::from(second == 0), "{effects:?}");
        states = next;
    }
    assert_eq!(states.nodes["n0"].isolation.unwrap().since_unix_ms, 0, "the period counts from the first");
    let restarted = Event::Isolated { node: name(0), incarnation: 5 };
    let (states, effects) = step(&states, &rules, 9 * SECOND, &restarted).unwrap();
    assert_eq!(effects, [Effect::Isolated { node: name(0), count: 2 }]);
    assert_eq!(states.nodes["n0"].isolation.unwrap().since_unix_ms, 9 * SECOND);
}

#[test]
fn operators_events_name_known_nodes_and_may_be_repeated() {
    let (rules, states) = (Rules::default(), joined(2, &Rules::default()));
    let unknown = name(7);
    for event in [
        Event::Drain { node: unknown.clone(), fewer_copies: false },
        Event::Resume { node: unknown.clone() },
        Event::Clear { node: unknown.clone() },
        Event::Removed { node: unknown },
    ] {
        assert_eq!(step(&states, &rules, 1, &event).unwrap_err().to_string(), "there is no node n7");
    }
    let drain = |fewer_copies| Event::Drain { node: name(0), fewer_copies };
    let (drained, effects) = step(&states, &rules, 1, &drain(false)).unwrap();
    assert_eq!(effects, [Effect::DrainStarted { node: name(0) }]);
    let (again, effects) = step(&drained, &rules, 2, &drain(true)).unwrap();
    let drain = again.nodes["n0"].drain.unwrap();
    assert!(effects.is_empty() && drain.since_unix_ms == 1 && drain.fewer_copies);
    let (resumed, effects) = step(&again, &rules, 3, &Event::Resume { node: name(0) }).unwrap();
    assert_eq!((resumed.clone(), effects), (states, vec![Effect::Resumed { node: name(0) }]));
    assert_eq!(step(&resumed, &rules, 4, &Event::Resume { node: name(0) }).unwrap(), (resumed, Vec::new()));
}

#[test]
fn an_isolated_node_that_is_heard_keeps_its_disks_for_the_period() {
    let rules = Rules::default();
    let (owner, other) = (NodeRef::new("n0", 4), NodeRef::new("n0", 5));
    let isolated = Event::Isolated { node: name(0), incarnation: 4 };
    let states = step(&joined(3, &rules), &rules, 1000 * SECOND, &isolated).unwrap().0;
    let left = |now: u64, owner: &NodeRef, heard: bool, gone: u64| {
        hold(&states, &rules, now * SECOND, owner, heard, Duration::from_secs(gone))
            .map(|left| left.as_secs())
    };
    assert_eq!(left(1000, &owner, true, 0), Some(240));
    assert_eq!(left(1100, &owner, true, 100), Some(140));
    assert_eq!(left(1240, &owner, true, 0), None, "counted from the record, by one that has just started");
    assert_eq!(left(1000, &owner, true, 240), None, "counted by one whose clock is wrong");
    assert_eq!(left(900, &owner, true, 10), Some(230), "a clock that is behind");
    assert_eq!(left(1000, &owner, false, 0), None, "nobody hears it");
    assert_eq!(left(5000, &other, true, 1), Some(239), "another process; its isolation is not recorded yet");
}

fn node(number: usize, domain: usize, free: u64) -> weir_cluster::records::NodeRecord {
    let mut node = common::node(&name(number), 1);
    node.fault_domain = format!("rack-{domain}");
    node.media = vec![MediumSpace { medium: Medium::Ram, bytes: 100, free, log: 1 }];
    node
}

fn disk(number: usize, policy: Policy, owner: usize, replicas: &[usize]) -> DiskRecord {
    let source = Source::File { name: "d".into() };
    let mut disk = DiskRecord::new(&format!("d{number}"), "v", source, 4096, 512, policy);
    (disk.owner, disk.epoch) = (Some(NodeRef::new(name(owner), 1)), 1);
    disk.replicas = replicas.iter().map(|replica| NodeRef::new(name(*replica), 1)).collect();
    if policy != Policy::WriteThrough && (!replicas.is_empty() || policy == Policy::WriteBack(0)) {
        disk.mode = Mode::WriteBack;
    }
    disk
}

#[derive(Clone, Debug)]
struct Case {
    live: Live,
    disks: BTreeMap<String, DiskRecord>,
    barred: BTreeSet<String>,
    fewer_copies: bool,
}

/// Up to seven nodes, some down, some barred, some full; disks with complete, short and lost sets.
fn case() -> impl Strategy<Value = Case> {
    let nodes = prop::collection::vec(
        (0_usize..3, 0_u64..4, prop::bool::weighted(0.8), prop::bool::weighted(0.15)),
        2..8,
    );
    let policy = prop::sample::select(Policy::all().collect::<Vec<_>>());
    let disks = prop::collection::vec((policy, any::<[usize; 3]>(), 0_usize..3), 1..6);
    (nodes, disks, any::<bool>()).prop_map(|(nodes, disks, fewer_copies)| {
        let count = nodes.len();
        let (mut live, mut barred) = (Live::new(), BTreeSet::new());
        for (number, (domain, free, up, is_barred)) in nodes.into_iter().enumerate() {
            if up {
                live.insert(name(number), node(number, domain, free));
            }
            if is_barred {
                barred.insert(name(number));
            }
        }
        let disks = disks.into_iter().enumerate().map(|(number, (policy, nodes, replicas))| {
            let mut nodes: Vec<usize> = nodes.iter().map(|node| node % count).collect();
            let owner = nodes[0];
            nodes.retain(|node| *node != owner);
            nodes.dedup();
            nodes.truncate(replicas.min(policy.replicas()));
            let disk = disk(number, policy, owner, &nodes);
            (disk.name.clone(), disk)
        });
        Case { live, disks: disks.collect(), barred, fewer_copies }
    })
}

impl Case {
    /// The copies of a disk's log that exist: the owner's and the replicas', in processes that are up.
    fn copies(&self, disk: &DiskRecord) -> BTreeSet<String> {
        let holders = disk.owner.iter().chain(&disk.replicas).map(|holder| holder.node.clone());
        holders.filter(|node| self.live.contains_key(node)).collect()
    }

    fn takes_disks(&self, node: &str) -> bool {
        node != "n0" && self.live.contains_key(node) && !self.barred.contains(node)
    }

    /// The most replicas that any set of nodes gives the disk on `owner` without `n0`: by trying every set.
    fn most_replicas(&self, disk: &DiskRecord, owner: &str) -> usize {
        self.most_replicas_where(disk, owner, &|node| self.takes_disks(node))
    }

    /// As [`Case::most_replicas`], on nodes that `takes` names.
    fn most_replicas_where(&self, disk: &DiskRecord, owner: &str, takes: &dyn Fn(&str) -> bool) -> usize {
        let has_copy = |node: &str| disk.replicas.iter().any(|replica| replica.node == node);
        let usable: Vec<&String> = self
            .live
            .keys()
            .filter(|node| {
                let room = has_copy(node) || self.live[*node].has_room(disk.medium);
                *node != owner && takes(node) && room
            })
            .collect();
        let sets = (0..1_u32 << usable.len()).map(|bits| {
            let chosen = usable.iter().enumerate().filter(|(index, _)| bits >> index & 1 == 1);
            chosen.map(|(_, node)| NodeRef::new((*node).clone(), 1)).collect::<Vec<_>>()
        });
        let fits = |set: &Vec<NodeRef>| {
            set.len() <= disk.policy.replicas() && misplaced(disk.policy, owner, set, &self.live).is_empty()
        };
        sets.filter(fits).map(|set| set.len()).max().unwrap_or(0)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Every disk that counts on the drained node is in the plan once; none goes to a node that takes no disks; none ends with
    /// fewer copies than its policy requests unless that is permitted; and none ends without a copy.
    #[test]
    fn a_drain_keeps_the_copies(case in case()) {
        let rules = Rules::default();
        let plan = plan("n0", &case.disks, &case.live, &case.barred, &rules, case.fewer_copies, &Unfit::new());
        let named = plan.moves.iter().map(|it| &it.disk).chain(plan.copies.iter().map(|it| &it.disk));
        let named: Vec<&String> = named.chain(plan.refused.iter().map(|it| &it.disk)).collect();
        let unique: BTreeSet<&String> = named.iter().copied().collect();
        prop_assert_eq!(unique.len(), named.len(), "a disk twice");
        let counts = case.disks.values().filter(|disk| {
            let owns = disk.owner.as_ref().unwrap().node == "n0" && case.live.contains_key("n0");
            owns || disk.replicas.iter().any(|replica| replica.node == "n0")
        });
        prop_assert_eq!(unique, counts.map(|disk| &disk.name).collect::<BTreeSet<_>>());
        for moved in &plan.moves {
            let disk = &case.disks[&moved.disk];
            prop_assert!(case.takes_disks(&moved.to), "{:?}", moved);
            prop_assert!(moved.replicas <= case.most_replicas(disk, &moved.to), "{:?}", moved);
            prop_assert!(moved.replicas == disk.policy.replicas() || case.fewer_copies, "{:?}", moved);
        }
        for copied in &plan.copies {
            let disk = &case.disks[&copied.disk];
            let owner = &disk.owner.as_ref().unwrap().node;
            let mut rest = case.copies(disk);
            rest.remove("n0");
            prop_assert!(!rest.is_empty(), "{:?} was the last copy", copied);
            prop_assert!(copied.to.as_ref().is_none_or(|to| case.takes_disks(to)));
            let complete = case.most_replicas(disk, owner) == disk.policy.replicas();
            prop_assert!(complete || case.fewer_copies || !case.live.contains_key(owner), "{:?}", copied);
        }
        for refused in &plan.refused {
            let disk = &case.disks[&refused.disk];
            match &refused.reason {
                Reason::LastCopy => {
                    let mut rest = case.copies(disk);
                    rest.remove("n0");
                    prop_assert!(rest.is_empty(), "{:?}", rest);
                }
                Reason::FewerCopies { replicas, wanted, .. } => {
                    prop_assert!(!case.fewer_copies && replicas < wanted);
                }
                Reason::Unfit { .. } => prop_assert!(false, "all are fit"),
                Reason::NoTarget => {
                    // Earlier disks of the plan may have taken the room.
                    let roomy = |node: &String| case.takes_disks(node) && case.live[node].space(Medium::Ram).unwrap().free > 15;
                    prop_assert!(!case.live.keys().any(roomy));
                }
            }
        }
    }

    /// The owner of a disk replaces exactly the copies on barred nodes for which others have room, and drops those alone whose drain
    /// permits that.
    #[test]
    fn an_owner_replaces_copies_only_where_others_have_room(case in case()) {
        let rules = Rules::default();
        let mut states = NodeStatesRecord::default();
        for node in &case.barred {
            let drain = Some(Drain { since_unix_ms: 1, fewer_copies: case.fewer_copies });
            states.nodes.insert(node.clone(), NodeStateRecord { drain, ..NodeStateRecord::default() });
        }
        for disk in case.disks.values() {
            let owner = &disk.owner.as_ref().unwrap().node;
            // It decides for itself, so it is up; only then its fault domain is known.
            if !case.live.contains_key(owner) {
                continue;
            }
            let Leaving { replaced, dropped } = leaving(disk, owner, &states, &case.live, &rules, 1, &[]);
            let on_barred: Vec<String> = disk.replicas.iter().map(|replica| replica.node.clone())
                .filter(|node| case.barred.contains(node)).collect();
            let free = |node: &str| case.live.contains_key(node) && !case.barred.contains(node);
            let enough = case.most_replicas_where(disk, owner, &free) == disk.policy.replicas();
            match (enough, case.fewer_copies) {
                (true, _) => prop_assert_eq!((&replaced, dropped.len()), (&on_barred, 0)),
                (false, true) => prop_assert_eq!((replaced.len(), &dropped), (0, &on_barred)),
                (false, false) => prop_assert!(replaced.is_empty() && dropped.is_empty()),
            }
        }
    }

    /// Alone, a disk is refused only if no place gives it all its copies, and goes where it has the most.
    #[test]
    fn one_disk_goes_where_it_has_the_most_copies(mut case in case()) {
        let first = case.disks.pop_first().unwrap();
        case.disks = BTreeMap::from([first.clone()]);
        let (wanted, disk) = (first.1.policy.replicas(), first.1);
        if disk.owner.as_ref().unwrap().node != "n0" || !case.live.contains_key("n0") {
            return Ok(());
        }
        let has_copy = |node: &str| disk.replicas.iter().any(|replica| replica.node == node);
        let targets = case.live.keys().filter(|node| {
            case.takes_disks(node) && (has_copy(node) || case.live[*node].has_room(disk.medium))
        });
        let most = targets.map(|target| case.most_replicas(&disk, target)).max();
        let plan = plan("n0", &case.disks, &case.live, &case.barred, &Rules::default(), case.fewer_copies, &Unfit::new());
        match (most, plan.moves.first(), plan.refused.first()) {
            (None, None, Some(refused)) => prop_assert_eq!(&refused.reason, &Reason::NoTarget),
            (Some(most), Some(moved), None) => prop_assert_eq!(moved.replicas, most),
            (Some(most), None, Some(_)) => prop_assert!(most < wanted && !case.fewer_copies),
            other => prop_assert!(false, "{:?}", other),
        }
    }
}

/// A node that cannot open a disk may keep its log, and is not given the disk.
#[test]
fn a_drain_goes_past_a_node_that_cannot_open_a_disk() {
    let live: Live = (0..3).map(|number| (name(number), node(number, number, 50))).collect();
    let disks = BTreeMap::from([("d0".to_owned(), disk(0, Policy::WriteBack(1), 0, &[1]))]);
    let moves = |unfit: &[usize]| {
        let unfit = Unfit::from([("d0".into(), unfit.iter().map(|number| name(*number)).collect())]);
        plan("n0", &disks, &live, &BTreeSet::new(), &Rules::default(), false, &unfit)
    };
    assert_eq!(moves(&[]).moves[0].to, "n1", "it has the log");
    let second = moves(&[1]);
    assert_eq!((&*second.moves[0].to, second.moves[0].replicas), ("n2", 1), "n1 keeps its copy");
    let none = moves(&[1, 2]);
    assert!(none.moves.is_empty());
    assert_eq!(none.refused[0].reason.to_string(), "n1, n2 cannot open it, and no other node can have it");
}

/// A return is for the operator's convenience: it waits until it costs no copy.
#[test]
fn a_disk_returns_only_to_as_many_replicas() {
    let rack = |number: usize, domain: usize, free: u64| (name(number), node(number, domain, free));
    let returns =
        |disk: &DiskRecord, nodes: &[(String, weir_cluster::records::NodeRecord)], barred: &[usize]| {
            let live: Live = nodes.iter().cloned().collect();
            may_return(disk, "n0", &live, &barred.iter().map(|number| name(*number)).collect())
        };
    // n0 is alone in its domain.
    let strict = disk(0, "write-back+1in".parse().unwrap(), 1, &[2]);
    let apart = [rack(0, 0, 50), rack(1, 1, 50), rack(2, 1, 50)];
    assert!(!returns(&strict, &apart, &[]), "no node beside n0 could have the copy");
    assert!(returns(&strict, &[&apart[..], &[rack(3, 0, 50)]].concat(), &[]));
    assert!(!returns(&strict, &[&apart[..], &[rack(3, 0, 0)]].concat(), &[]), "it is full");
    assert!(!returns(&strict, &[&apart[..], &[rack(3, 0, 50)]].concat(), &[3]), "it is drained");
    // Where it is, it does not have them either.
    assert!(returns(&disk(0, "write-back+1in".parse().unwrap(), 1, &[]), &apart[..2], &[]));
    // The present owner keeps a copy, though its room is taken, by this very disk.
    let two = [rack(0, 0, 50), rack(1, 1, 0)];
    assert!(returns(&disk(0, Policy::WriteBack(1), 1, &[0]), &two, &[]));
    assert!(!returns(&disk(0, Policy::WriteBack(1), 1, &[0]), &two, &[0]));
    assert!(
        !returns(&disk(0, Policy::WriteThrough, 1, &[]), &[rack(0, 0, 0), rack(1, 1, 50)], &[]),
        "no room"
    );
    assert!(!returns(&disk(0, Policy::WriteThrough, 1, &[]), &two[1..], &[]), "it is down");
}

/// The replacement has the last room that there was, and is not in the record until its copy is complete.
#[test]
fn a_copy_goes_on_leaving_while_its_replacement_is_filled() {
    let rules = Rules::default();
    let drain = Event::Drain { node: name(1), fewer_copies: false };
    let states = step(&joined(3, &rules), &rules, SECOND, &drain).unwrap().0;
    let disk = disk(0, Policy::WriteBack(1), 0, &[1]);
    let replaced = |free: u64, filling: &[NodeRef]| {
        let live: Live = [0, 1, 2].map(|number| (name(number), node(number, number, free))).into();
        leaving(&disk, "n0", &states, &live, &rules, SECOND, filling).replaced
    };
    assert_eq!(replaced(1, &[]), ["n1"]);
    assert!(replaced(0, &[]).is_empty(), "nobody has room");
    assert_eq!(replaced(0, &[NodeRef::new("n2", 1)]), ["n1"]);
    assert!(replaced(0, &[NodeRef::new("n2", 2)]).is_empty(), "that process is gone");
    assert!(replaced(0, &[NodeRef::new("n1", 1)]).is_empty());
}

#[test]
fn the_state_follows_from_the_records() {
    let rules = Rules::default();
    let mut states = joined(4, &rules);
    let mut live: Live = (0..4).map(|number| (name(number), node(number, number, 50))).collect();
    let mut disks = BTreeMap::from([("d0".to_owned(), disk(0, Policy::WriteBack(1), 0, &[1]))]);
    let state = |states: &NodeStatesRecord, live: &Live, disks: &BTreeMap<_, _>, now: u64, node: &str| {
        Cluster { states, live, disks }.state(&rules, now * SECOND, node)
    };
    assert_eq!(state(&states, &live, &disks, 0, "n0"), State::Up);
    live.remove("n0");
    assert_eq!(state(&states, &live, &disks, 0, "n0"), State::Down);
    for _ in 0..3 {
        isolate(&mut states, &rules, SECOND, "n0");
    }
    assert_eq!(state(&states, &live, &disks, 1, "n0"), State::Down, "back, and down since");
    states = step(&states, &rules, SECOND, &Event::Isolated { node: name(0), incarnation: 1 }).unwrap().0;
    assert_eq!(state(&states, &live, &disks, 240, "n0"), State::Isolated);
    assert_eq!(state(&states, &live, &disks, 241, "n0"), State::Down, "the period is over");
    assert_eq!(state(&states, &live, &BTreeMap::new(), 240, "n0"), State::Down, "its disks are others'");
    live.insert(name(0), node(0, 0, 50));
    assert_eq!(state(&states, &live, &disks, 240, "n0"), State::Quarantined);
    assert_eq!(state(&states, &live, &disks, 7201, "n0"), State::Up);
    let drain = Event::Drain { node: name(1), fewer_copies: false };
    states = step(&states, &rules, 240 * SECOND, &drain).unwrap().0;
    assert_eq!(state(&states, &live, &disks, 241, "n1"), State::Draining, "it has a copy");
    disks.get_mut("d0").unwrap().replicas = vec![NodeRef::new("n2", 1)];
    assert_eq!(state(&states, &live, &disks, 241, "n1"), State::Maintenance);
}

/// A drained node is in maintenance only when nothing counts on it, also no right of a former owner.
#[test]
fn a_node_that_a_record_names_is_not_in_maintenance() {
    let rules = Rules::default();
    let drain = Event::Drain { node: name(0), fewer_copies: false };
    let states = step(&joined(3, &rules), &rules, SECOND, &drain).unwrap().0;
    let live: Live = (0..3).map(|number| (name(number), node(number, number, 50))).collect();
    let former = |set| FormerOwner { set, ..FormerOwner::silent(NodeRef::new("n2", 1), 1) };
    let through = || disk(0, Policy::WriteThrough, 1, &[]);
    for (disk, expected, what) in [
        (disk(0, Policy::WriteThrough, 0, &[]), State::Draining, "the owner"),
        (disk(0, Policy::WriteBack(1), 1, &[0]), State::Draining, "a replica"),
        (DiskRecord { guards: vec![name(0)], ..through() }, State::Draining, "a guard"),
        (
            DiskRecord { former: vec![former(Some(GrantSet::Guards(vec![name(0)])))], ..through() },
            State::Draining,
            "the only guard of a former owner",
        ),
        (
            DiskRecord { former: vec![former(Some(GrantSet::Replicas(vec![name(0)])))], ..through() },
            State::Draining,
            "a replica of a former owner",
        ),
        (DiskRecord { former: vec![former(None)], ..through() }, State::Maintenance, "its right is over"),
        (
            DiskRecord { former: vec![former(Some(GrantSet::Guards(vec![name(2)])))], ..through() },
            State::Maintenance,
            "another guard",
        ),
    ] {
        let disks = BTreeMap::from([("d0".to_owned(), disk)]);
        let cluster = Cluster { states: &states, live: &live, disks: &disks };
        assert_eq!(cluster.state(&rules, SECOND, "n0"), expected, "{what}");
    }
}

/// Between two events nobody corrects the record.
#[test]
fn a_quarantine_written_by_a_clock_far_ahead_bars_nothing() {
    let rules = Rules::default();
    for (ahead, is_barred) in [(0, true), (5 * SECOND, true), (8760 * HOUR, false)] {
        let mut states = joined(3, &rules);
        (0..3).for_each(|_| drop(isolate(&mut states, &rules, HOUR + ahead, "n0")));
        assert!(quarantined(&states).contains("n0"));
        assert_eq!(barred(&states, &rules, HOUR).contains("n0"), is_barred, "{ahead} ms ahead");
    }
}

#[test]
fn an_event_from_a_clock_that_is_ahead_leaves_other_nodes_histories() {
    let rules = Rules::default();
    let mut states = joined(10, &rules);
    for node in ["n0", "n1"] {
        isolate(&mut states, &rules, HOUR, node);
        isolate(&mut states, &rules, HOUR + SECOND, node);
    }
    (0..3).for_each(|_| drop(isolate(&mut states, &rules, HOUR, "n2")));
    let before = states.clone();
    for event in [
        Event::Present { node: name(1) },
        Event::Drain { node: name(1), fewer_copies: false },
        Event::Isolated { node: name(1), incarnation: 9 },
    ] {
        states = step(&states, &rules, 100 * HOUR, &event).unwrap().0;
    }
    for node in ["n0", "n2"] {
        assert_eq!(states.nodes[node], before.nodes[node], "{node}");
    }
    isolate(&mut states, &rules, HOUR + 2 * SECOND, "n0");
    assert!(quarantined(&states).contains("n0"), "it was isolated three times within the hour");
}

#[test]
fn a_node_is_removed_only_when_nothing_counts_on_it() {
    let rules = Rules::default();
    let mut live: Live = (0..3).map(|number| (name(number), node(number, number, 50))).collect();
    let disks = BTreeMap::from([("d0".to_owned(), disk(0, Policy::WriteBack(0), 0, &[]))]);
    let none = BTreeMap::new();
    assert_eq!(may_remove("n0", &none, &live, &rules), Err(NotRemovable::Up(name(0))));
    live.remove("n0");
    let counted = NotRemovable::CountedOn { node: name(0), disk: "d0".into() };
    assert_eq!(may_remove("n0", &disks, &live, &rules), Err(counted));
    assert_eq!(may_remove("n0", &none, &live, &rules), Ok(()));
}
