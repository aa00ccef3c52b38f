//! Chooses successors, replicas and guards. Nodes with the same view compute the same answer, so they seldom race; when they do,
//! compare-and-swap decides.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weir_block::hash::{FNV_BASIS, fnv1a};

use crate::records::{DiskRecord, Mode, NodeRecord, NodeRef, Policy, Spread};
use crate::right::MAX_GUARDS;

/// The time that each candidate has to claim a disk without an owner, or to take over one whose owner is gone, before the next one may,
/// too. A claim takes one event of the registry, a look at the storage, which is given up after 3 s, and one change of the record: so
/// long, only a process that hangs and keeps its lease takes. Guests wait meanwhile, so not longer. A claim that comes late after all
/// meets the compare-and-swap.
pub const CLAIMED_WITHIN: Duration = Duration::from_secs(5);

/// The number of candidates that may claim a disk, or take it over, when nobody has done so for the time `vacant`. One more may do so
/// at `CLAIMED_WITHIN * turns(vacant)`.
#[must_use]
pub fn turns(vacant: Duration) -> u32 {
    let passed = vacant.as_nanos() / CLAIMED_WITHIN.as_nanos();
    u32::try_from(passed).unwrap_or(u32::MAX).saturating_add(1)
}

/// The nodes with a valid lease, by name.
pub type Live = BTreeMap<String, NodeRecord>;

/// The processes that may take over `record`, when nobody has done so for the time `vacant`: first the best one, after each
/// [`CLAIMED_WITHIN`] one more. Nodes whose clocks differ do not agree on who is `barred`, and each could wait for another; or the first
/// one hangs.
///
/// In write-back: the replicas whose copies exist (in the same process, or on the same flash), those first whose nodes still offer the
/// disk's medium; then the owner's node when its copy has come back with its flash. In write-through: the live nodes, another one first
/// for each disk. A takeover is a rescue: a `barred` node comes after all others, and not never. Empty while the owner is alive, without
/// an owner, and without a candidate.
#[must_use]
pub fn successors(
    record: &DiskRecord,
    live: &Live,
    barred: &BTreeSet<String>,
    vacant: Duration,
) -> Vec<NodeRef> {
    let Some(owner) = &record.owner else { return Vec::new() };
    if live.get(&owner.node).is_some_and(|now| now.incarnation == owner.incarnation) {
        return Vec::new();
    }
    let holder = |copy: &NodeRef| {
        let process = live.get(&copy.node).map(NodeRecord::node_ref);
        process.filter(|process| record.counts(copy, process))
    };
    let mut candidates = match record.mode {
        Mode::WriteBack => {
            let mut holders: Vec<NodeRef> = record.replicas.iter().filter_map(holder).collect();
            // A node whose medium has failed could only drain the log.
            let keeps = |node: &NodeRef| live.get(&node.node).is_some_and(|node| node.offers(record.medium));
            holders.sort_by_key(|node| Reverse((keeps(node), !barred.contains(&node.node))));
            holders.extend(holder(owner));
            holders
        }
        Mode::WriteThrough => rescuers(record, live, barred),
    };
    candidates.truncate(turns(vacant) as usize);
    candidates
}

/// The live nodes, in the order in which they would take over `record` in write-through. A node without room could not open it; when
/// no node has room, one has to report it.
fn rescuers(record: &DiskRecord, live: &Live, barred: &BTreeSet<String>) -> Vec<NodeRef> {
    let mut nodes: Vec<&NodeRecord> = live.values().collect();
    nodes.sort_by_key(|node| {
        let is_free = !barred.contains(&node.name);
        Reverse((node.has_room(record.medium), is_free, weight(&record.name, &node.name)))
    });
    nodes.into_iter().map(NodeRecord::node_ref).collect()
}

/// The processes that may claim a disk without an owner, if any are to, when nobody has claimed it for the time `vacant`: first
/// the heir that the record names or, when that is gone, the node that would take the disk over from it; after each
/// [`CLAIMED_WITHIN`] one more: a process that is up may hang, or not be able to open the disk. A `barred` node comes after all others
/// with room, and not never: it may be the only one that can open the disk. It does not pass the disk on to a process that hangs: it
/// asks the target first, leaves out one that does not answer, and for a while one that has let the disk come back.
#[must_use]
pub fn claimants(
    record: &DiskRecord,
    live: &Live,
    barred: &BTreeSet<String>,
    vacant: Duration,
) -> Vec<NodeRef> {
    let Some(heir) = record.heir.as_ref().filter(|_| record.owner.is_none()) else { return Vec::new() };
    let mut candidates = rescuers(record, live, barred);
    // The sort is stable: the others keep their order.
    candidates.sort_by_key(|candidate| candidate != heir);
    candidates.truncate(turns(vacant) as usize);
    candidates
}

/// Live nodes for the missing replicas of `record`, best first, given its `owner` and its `present` replicas: never one of
/// `present` or `exclude`, nor a node without room for a log on the disk's medium.
///
/// Order: fault domains other than the owner's and each other's, then fewer logs, then the hash of the disk's name. A strict
/// policy gets nodes inside or outside the owner's fault domain as it needs them, or none.
#[must_use]
pub fn choose_replicas(
    record: &DiskRecord,
    owner: &str,
    present: &[String],
    exclude: &[String],
    live: &Live,
) -> Vec<NodeRef> {
    let is_free = |node: &&NodeRecord| {
        let name = &node.name;
        *name != owner && !present.contains(name) && !exclude.contains(name) && node.has_room(record.medium)
    };
    let mut candidates: Vec<&NodeRecord> = live.values().filter(is_free).collect();
    candidates.sort_by_cached_key(|node| (load_class(node.load), Reverse(weight(&record.name, &node.name))));
    let mut set: Vec<&str> = present.iter().map(String::as_str).collect();
    let mut chosen = Vec::new();
    while let Some(index) = next_best(record.policy, owner, &set, &candidates, live) {
        let node = candidates.remove(index);
        set.push(&node.name);
        chosen.push(node.node_ref());
    }
    chosen
}

/// The replicas of `record` that an `owner` keeps, and those that it gets, when the `exclude`d nodes have none: first copies that
/// exist and are in the right place, then the choice of [`choose_replicas`].
#[must_use]
pub fn replicas_without(
    record: &DiskRecord,
    owner: &str,
    exclude: &[String],
    live: &Live,
) -> (Vec<String>, Vec<String>) {
    let stays = |replica: &&NodeRef| {
        replica.node != owner && !exclude.contains(&replica.node) && has_copy(record, replica, live)
    };
    let present: Vec<NodeRef> = record.replicas.iter().filter(stays).cloned().collect();
    let misplaced = misplaced(record.policy, owner, &present, live);
    let is_right = |replica: &&NodeRef| !misplaced.contains(&&*replica.node);
    let mut kept: Vec<String> = present.iter().filter(is_right).map(|replica| replica.node.clone()).collect();
    kept.truncate(record.policy.replicas());
    let chosen = choose_replicas(record, owner, &kept, exclude, live);
    (kept, chosen.into_iter().map(|node| node.node).collect())
}

/// Whether the copy that the record names exists, in a process that is up.
#[must_use]
pub fn has_copy(record: &DiskRecord, named: &NodeRef, live: &Live) -> bool {
    live.get(&named.node).is_some_and(|now| record.counts(named, &now.node_ref()))
}

/// The node for a disk that leaves its owner: where it can have the most replicas, up to its policy's number, without the
/// `exclude`d nodes; never one of `unfit`, which may have replicas all the same. Among those, a replica in the order of takeover, then the node with fewer logs, then by the hash of the
/// disk's name. `None`: no node has a copy or room.
#[must_use]
pub fn choose_owner(
    record: &DiskRecord,
    exclude: &[String],
    unfit: &BTreeSet<String>,
    live: &Live,
) -> Option<String> {
    let place = |name: &str| {
        let place = record.replicas.iter().position(|replica| replica.node == name);
        place.filter(|place| has_copy(record, &record.replicas[*place], live))
    };
    let is_free = |node: &&NodeRecord| {
        let may_own = !exclude.contains(&node.name) && !unfit.contains(&node.name);
        may_own && (place(&node.name).is_some() || node.has_room(record.medium))
    };
    let best = live.values().filter(is_free).max_by_key(|node| {
        let (kept, chosen) = replicas_without(record, &node.name, exclude, live);
        let replicas = kept.len() + chosen.len();
        let busy = Reverse(load_class(node.load));
        (replicas, place(&node.name).map(Reverse), busy, weight(&record.name, &node.name))
    });
    best.map(|node| node.name.clone())
}

/// The reason, as a sentence for the operator, why the live nodes cannot satisfy the requested policy of `record`. `None` when
/// they can, seen from the owner if there is one, else from any node.
#[must_use]
pub fn shortfall(record: &DiskRecord, live: &Live) -> Option<String> {
    let wanted = record.policy.replicas();
    if wanted == 0 {
        return None;
    }
    let found = |owner: &str| {
        let misplaced = misplaced(record.policy, owner, &record.replicas, live);
        let is_right = |name: &&str| live.contains_key(*name) && *name != owner && !misplaced.contains(name);
        let present = record.replicas.iter().map(|replica| &*replica.node).filter(is_right);
        let present: Vec<String> = present.map(str::to_owned).collect();
        present.len() + choose_replicas(record, owner, &present, &[], live).len()
    };
    let owner = record.owner.as_ref().map(|owner| &*owner.node).filter(|owner| live.contains_key(*owner));
    let best = match owner {
        Some(owner) => found(owner),
        None => {
            // The first node from which it can be met will do: this is asked for every closed disk.
            let mut best = None;
            for owner in live.keys() {
                best = best.max(Some(found(owner)));
                if best >= Some(wanted) {
                    break;
                }
            }
            best?
        }
    };
    (best < wanted).then(|| {
        let (policy, medium) = (record.policy, record.medium);
        let others = if wanted == 1 { "1 other node".to_owned() } else { format!("{wanted} other nodes") };
        let side = if policy.is_strict() { " on that side of the owner's fault domain" } else { "" };
        let has = if best == 0 { "none has".to_owned() } else { format!("{best} has") };
        // Not before it is: a disk leaves write-back once its log is drained.
        let then = match (&record.owner, record.mode) {
            (None, _) => "opened before then, it is write-through",
            (Some(_), Mode::WriteBack) => "it goes to write-through until then",
            (Some(_), Mode::WriteThrough) => "until then it is write-through",
        };
        format!("{policy} needs {others} with room for a log on {medium}{side}, and {has}; {then}")
    })
}

/// The guards of a disk of `owner` without replicas: its live guards first, then nodes of fault domains other than the
/// owner's and each other's, then by the hash of the disk's name; never one of `barred`. Fewer than [`MAX_GUARDS`] if there are
/// fewer nodes.
#[must_use]
pub fn choose_guards(
    record: &DiskRecord,
    owner: &str,
    live: &Live,
    barred: &BTreeSet<String>,
) -> Vec<String> {
    let stays = |guard: &&String| *guard != owner && live.contains_key(*guard) && !barred.contains(*guard);
    let mut guards: Vec<String> = record.guards.iter().filter(stays).cloned().collect();
    let free = |node: &&NodeRecord| {
        node.name != owner && !guards.contains(&node.name) && !barred.contains(&node.name)
    };
    let mut candidates: Vec<&NodeRecord> = live.values().filter(free).collect();
    candidates.sort_by_key(|node| Reverse(weight(&record.name, &node.name)));
    while guards.len() < MAX_GUARDS && !candidates.is_empty() {
        let set = guards.iter().map(String::as_str).chain([owner]);
        let taken: BTreeSet<&str> = set.filter_map(|node| domain(node, live)).collect();
        let elsewhere = candidates.iter().position(|node| !taken.contains(&*node.fault_domain));
        guards.push(candidates.remove(elsewhere.unwrap_or(0)).name.clone());
    }
    guards
}

/// The best of the sorted `candidates` to add to `set`.
fn next_best(
    policy: Policy,
    owner: &str,
    set: &[&str],
    candidates: &[&NodeRecord],
    live: &Live,
) -> Option<usize> {
    let home = domain(owner, live);
    let taken: BTreeSet<&str> = set.iter().filter_map(|node| domain(node, live)).chain(home).collect();
    let elsewhere = || candidates.iter().position(|node| !taken.contains(&*node.fault_domain));
    match policy {
        Policy::WriteThrough => None,
        Policy::WriteBack(wanted) if set.len() >= usize::from(wanted) => None,
        Policy::WriteBack(_) => elsewhere().or((!candidates.is_empty()).then_some(0)),
        Policy::Strict(wanted) => {
            let (home, has) = (home?, spread(owner, set.iter().copied(), live));
            let beyond = || candidates.iter().position(|node| node.fault_domain != home);
            let within = || candidates.iter().position(|node| node.fault_domain == home);
            let outside = (has.outside < wanted.outside).then(|| elsewhere().or_else(beyond)).flatten();
            outside.or_else(|| (has.inside < wanted.inside).then(within).flatten())
        }
    }
}

/// The replicas in the wrong fault domain for a strict policy, seen from `owner`: to be replaced. Of too many on one side, the
/// last ones. A dead node is lost, not misplaced.
#[must_use]
pub fn misplaced<'a>(policy: Policy, owner: &str, replicas: &'a [NodeRef], live: &Live) -> Vec<&'a str> {
    let Policy::Strict(wanted) = policy else { return Vec::new() };
    let mut left = wanted;
    let is_surplus = |replica: &&NodeRef| {
        let left = match is_inside(owner, &replica.node, live) {
            Some(true) => &mut left.inside,
            Some(false) => &mut left.outside,
            None => return false,
        };
        let surplus = *left == 0;
        *left = left.saturating_sub(1);
        surplus
    };
    replicas.iter().filter(is_surplus).map(|replica| &*replica.node).collect()
}

/// Counts `nodes` inside and outside the fault domain of `owner`; dead ones do not count.
#[must_use]
pub fn spread<'a>(owner: &str, nodes: impl IntoIterator<Item = &'a str>, live: &Live) -> Spread {
    let sides = nodes.into_iter().filter_map(|node| is_inside(owner, node, live));
    sides.fold(Spread::default(), |spread, inside| match inside {
        true => Spread { inside: spread.inside.saturating_add(1), ..spread },
        false => Spread { outside: spread.outside.saturating_add(1), ..spread },
    })
}

/// Whether `node` is in the fault domain of `owner`, if both are known.
fn is_inside(owner: &str, node: &str, live: &Live) -> Option<bool> {
    Some(domain(owner, live)? == domain(node, live)?)
}

fn domain<'a>(node: &str, live: &'a Live) -> Option<&'a str> {
    live.get(node).map(|record| &*record.fault_domain)
}

/// Loads that count as equal: 0, 1, 2–3, 4–7, …. Published loads are seconds old. When a node dies, many disks choose a replica
/// at once and must not all choose the node with one log fewer.
fn load_class(load: u64) -> u32 {
    u64::BITS - load.leading_zeros()
}

/// Rendezvous hashing: when a node joins or leaves, only the disks that it wins or had won move.
fn weight<'a>(disk: &str, node: &'a str) -> (u64, &'a str) {
    // FNV-1a, then a finalizer, because FNV alone hardly mixes the last bytes into the high bits. Own code because nodes of all
    // builds must agree.
    let mut hash = fnv1a(FNV_BASIS, disk.bytes().chain([0]).chain(node.bytes()));
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (hash ^ (hash >> 33), node)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::records::{Medium, MediumSpace, Source};

    fn live(nodes: &[(&str, &str)]) -> Live {
        let record = |name: &str, domain: &str| NodeRecord {
            name: name.into(),
            incarnation: 1,
            flash: None,
            peer_address: ([127, 0, 0, 1], 1).into(),
            nbd_tcp: None,
            nbd_tls: None,
            nbd_unix: "/n".into(),
            api: "/a".into(),
            fault_domain: domain.into(),
            media: Vec::new(),
            load: 0,
            forwards: true,
        };
        nodes.iter().map(|(name, domain)| ((*name).to_owned(), record(name, domain))).collect()
    }

    fn names(nodes: &[NodeRef]) -> Vec<&str> {
        nodes.iter().map(|node| &*node.node).collect()
    }

    fn successor(record: &DiskRecord, live: &Live, barred: &BTreeSet<String>) -> Option<NodeRef> {
        let mut first = successors(record, live, barred, Duration::ZERO);
        assert!(first.len() <= 1, "one process takes over: {first:?}");
        first.pop()
    }

    fn disk(name: &str, policy: Policy) -> DiskRecord {
        DiskRecord::new(name, "v", Source::File { name: "d".into() }, 4096, 512, policy)
    }

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn replicas_go_to_other_fault_domains_first() {
        let live = live(&[("a", "r1"), ("b", "r1"), ("c", "r2"), ("d", "r3"), ("e", "r2")]);
        for number in 0..200 {
            let disk = disk(&format!("vm-{number}"), Policy::WriteBack(2));
            let two = choose_replicas(&disk, "a", &[], &[], &live);
            let domains: BTreeSet<_> = two.iter().map(|node| &*live[&node.node].fault_domain).collect();
            assert_eq!(domains, BTreeSet::from(["r2", "r3"]), "{two:?}");
            let one = choose_replicas(&disk, "a", &owned(&["c"]), &[], &live);
            assert_eq!(names(&one), ["d"], "a third domain before one with a replica");
            let rest = choose_replicas(&disk, "a", &[], &owned(&["c", "e"]), &live);
            assert_eq!(names(&rest), ["d", "b"], "then the owner's own domain");
        }
        let none = |policy| choose_replicas(&disk("x", policy), "a", &[], &[], &live);
        assert!(none(Policy::WriteThrough).is_empty() && none(Policy::WriteBack(0)).is_empty());
        assert!(choose_replicas(&disk("x", Policy::WriteBack(2)), "a", &[], &[], &Live::new()).is_empty());
    }

    #[test]
    fn guards_are_three_in_other_fault_domains_and_stay() {
        let all = live(&[("a", "r1"), ("b", "r1"), ("c", "r2"), ("d", "r3"), ("e", "r2"), ("f", "r1")]);
        let mut disk = disk("x", Policy::WriteThrough);
        let guards = choose_guards(&disk, "a", &all, &BTreeSet::new());
        assert!(guards.len() == 3 && guards.contains(&"d".into()), "{guards:?}");
        assert_eq!(
            spread("a", guards.iter().map(String::as_str), &all).outside,
            3 - u8::from(guards.contains(&"b".into()) || guards.contains(&"f".into()))
        );
        disk.guards = owned(&["b", "f", "gone"]);
        assert_eq!(
            choose_guards(&disk, "a", &all, &BTreeSet::new())[..2],
            owned(&["b", "f"]),
            "live guards stay"
        );
        let barred = owned(&["b", "c"]).into_iter().collect();
        let without = choose_guards(&disk, "a", &all, &barred);
        assert!(without.len() == 3 && without[0] == "f" && without[1..].contains(&"d".into()), "{without:?}");
        let none = BTreeSet::new();
        assert_eq!(choose_guards(&disk, "b", &live(&[("b", "r1"), ("a", "r1")]), &none), ["a"]);
        assert!(choose_guards(&disk, "b", &live(&[("b", "r1")]), &none).is_empty());
    }

    #[test]
    fn strict_policies_get_matching_nodes_or_none() {
        let live = live(&[("a", "r1"), ("b", "r1"), ("c", "r2"), ("d", "r2")]);
        let chosen = |policy: &str, present: &[&str], exclude: &[&str]| {
            let disk = disk("x", policy.parse().unwrap());
            let chosen = choose_replicas(&disk, "a", &owned(present), &owned(exclude), &live);
            let mut names: Vec<String> = chosen.into_iter().map(|node| node.node).collect();
            names.sort();
            names.concat()
        };
        assert_eq!(chosen("write-back+1in", &[], &[]), "b");
        assert_eq!(chosen("write-back+2in", &[], &[]), "b", "as many as there are");
        assert_eq!(chosen("write-back+1in", &["c"], &[]), "b", "a misplaced replica does not count");
        assert_eq!(chosen("write-back+1in", &[], &["b"]), "");
        assert_eq!(chosen("write-back+2out", &[], &[]), "cd");
        assert_eq!(chosen("write-back+2out", &["c"], &["b"]), "d");
        assert_eq!(chosen("write-back+1in+1out", &["b"], &["d"]), "c");
        assert_eq!(chosen("write-back+1in+1out", &["c"], &[]), "b", "a lost one is replaced by its kind");
        assert_eq!(chosen("write-back+1in+1out", &["b", "c"], &[]), "");
    }

    #[test]
    fn a_policy_that_cannot_be_met_says_what_is_missing() {
        let two = live(&[("a", "r1"), ("b", "r2")]);
        let said = |policy: &str, live: &Live, owner: Option<&str>| {
            let mut disk = disk("x", policy.parse().unwrap());
            disk.owner = owner.map(|owner| NodeRef::new(owner, 1));
            shortfall(&disk, live)
        };
        for fine in ["write-through", "write-back+0", "write-back+1", "write-back+1out"] {
            assert_eq!(said(fine, &two, None), None, "{fine}");
            assert_eq!(said(fine, &two, Some("a")), None, "{fine}");
        }
        let lacks = said("write-back+2", &two, None).unwrap();
        assert!(lacks.starts_with("write-back+2 needs 2 other nodes with room for a log on ram"), "{lacks}");
        assert!(lacks.contains("1 has"), "{lacks}");
        assert!(said("write-back+1in", &two, Some("a")).unwrap().contains("none has"));
        let alone = live(&[("a", "r1")]);
        assert!(said("write-back+1", &alone, Some("a")).unwrap().contains("needs 1 other node with"));
        let mut full = live(&[("a", "r1"), ("b", "r2")]);
        full.get_mut("b").unwrap().media =
            vec![MediumSpace { medium: Medium::Ram, bytes: 100, free: 9, log: 10 }];
        let mut disk = disk("x", Policy::WriteBack(1));
        disk.owner = Some(NodeRef::new("a", 1));
        disk.mode = Mode::WriteBack;
        let falls = shortfall(&disk, &full).unwrap();
        assert!(falls.ends_with("it goes to write-through until then"), "{falls}");
        disk.mode = Mode::WriteThrough;
        let fallen = shortfall(&disk, &full).unwrap();
        assert!(fallen.ends_with("until then it is write-through"), "{fallen}");
        disk.replicas = vec![NodeRef::new("b", 1)];
        assert_eq!(shortfall(&disk, &full), None, "it has this disk's log already");
    }

    #[test]
    fn misplaced_replicas_are_judged_from_the_new_owner() {
        let live = live(&[("a", "r1"), ("b", "r2"), ("c", "r2"), ("d", "r3")]);
        let seen = |policy: &str, owner: &str, replicas: &[&str]| {
            let replicas: Vec<NodeRef> = replicas.iter().map(|name| NodeRef::new(*name, 1)).collect();
            misplaced(policy.parse().unwrap(), owner, &replicas, &live).concat()
        };
        assert_eq!(seen("write-back+2out", "a", &["b", "c"]), "");
        assert_eq!(seen("write-back+2out", "b", &["c"]), "c", "b has taken over, and c is in its domain");
        assert_eq!(seen("write-back+1in", "b", &["a"]), "a");
        assert_eq!(seen("write-back+1out", "a", &["b", "d"]), "d", "one too many");
        assert_eq!(
            seen("write-back+1in+1out", "b", &["gone", "c"]),
            "",
            "a dead node is lost, not misplaced"
        );
        assert_eq!(seen("write-back+2", "b", &["c", "a"]), "", "no placement required");
    }

    #[test]
    fn a_node_that_lost_the_medium_takes_over_last() {
        let mut live = live(&[("b", "r1"), ("c", "r1")]);
        let space = |medium| MediumSpace { medium, bytes: 100, free: 50, log: 10 };
        for node in ["b", "c"] {
            live.get_mut(node).unwrap().media = vec![space(Medium::Ram), space(Medium::Flash)];
        }
        let mut disk = disk("x", Policy::WriteBack(2));
        (disk.mode, disk.medium) = (Mode::WriteBack, Medium::Flash);
        (disk.owner, disk.replicas) =
            (Some(NodeRef::new("a", 1)), vec![NodeRef::new("b", 1), NodeRef::new("c", 1)]);
        let next =
            |live: &Live| successor(&disk, live, &BTreeSet::new()).map(|node| node.node).unwrap_or_default();
        assert_eq!(next(&live), "b");
        live.get_mut("b").unwrap().media.pop();
        assert_eq!(next(&live), "c", "b's flash has failed");
        live.get_mut("c").unwrap().media.pop();
        assert_eq!(next(&live), "b", "no better candidate");
    }

    #[test]
    fn room_comes_before_domains_and_load_before_the_name() {
        let mut live = live(&[("a", "r1"), ("b", "r1"), ("c", "r2"), ("d", "r3")]);
        let space = |free| vec![MediumSpace { medium: Medium::Ram, bytes: 100, free, log: 10 }];
        for node in ["c", "d"] {
            live.get_mut(node).unwrap().media = space(9);
        }
        let first =
            |disk: &DiskRecord, live: &Live| names(&choose_replicas(disk, "a", &[], &[], live)).concat();
        let mut disk = disk("x", Policy::WriteBack(1));
        assert_eq!(first(&disk, &live), "b");
        live.get_mut("d").unwrap().media = space(10);
        assert_eq!(first(&disk, &live), "d");
        live.get_mut("c").unwrap().media = space(50);
        for (loads, best) in [((8, 7), "d"), ((7, 8), "c")] {
            (live.get_mut("c").unwrap().load, live.get_mut("d").unwrap().load) = loads;
            assert_eq!(first(&disk, &live), best);
        }
        disk.medium = Medium::Flash;
        assert_eq!(first(&disk, &live), "", "no node has flash");
    }

    #[test]
    fn replicas_are_spread_evenly_and_stay_put() {
        let six = live(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("e", "5"), ("f", "6")]);
        let mut five = six.clone();
        five.remove("f");
        let mut count: BTreeMap<String, u32> = BTreeMap::new();
        for number in 0..1000 {
            let disk = disk(&format!("vm-{number:04}"), Policy::WriteBack(1));
            let chosen = choose_replicas(&disk, "a", &[], &[], &six);
            *count.entry(chosen[0].node.clone()).or_default() += 1;
            if chosen[0].node != "f" {
                assert_eq!(
                    choose_replicas(&disk, "a", &[], &[], &five),
                    chosen,
                    "{disk:?} moved without need"
                );
            }
        }
        assert!(count.len() == 5 && count.values().all(|disks| (150..=250).contains(disks)), "{count:?}");
    }

    #[test]
    fn a_node_without_room_takes_over_only_as_the_last_resort() {
        let mut nodes = live(&[("b", "1"), ("c", "1"), ("d", "1")]);
        let mut disk = disk("x", Policy::WriteThrough);
        (disk.owner, disk.epoch) = (Some(NodeRef::new("a", 1)), 1);
        for _ in 0..3 {
            let next = successor(&disk, &nodes, &BTreeSet::new()).unwrap().node;
            let full = MediumSpace { medium: Medium::Ram, bytes: 1, free: 0, log: 1 };
            assert!(nodes[&next].has_room(Medium::Ram));
            nodes.get_mut(&next).unwrap().media = vec![full];
        }
        assert!(successor(&disk, &nodes, &BTreeSet::new()).is_some());
    }

    /// The heir may hang and keep its lease.
    #[test]
    fn a_disk_that_its_heir_does_not_claim_is_for_one_more_node_after_each_wait() {
        let nodes = live(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]);
        let disk = DiskRecord { heir: Some(NodeRef::new("b", 1)), ..disk("x", Policy::WriteThrough) };
        let barred = BTreeSet::from(["a".to_owned()]);
        let may = |disk: &DiskRecord, nodes: &Live, waits: u32| -> Vec<String> {
            let after = claimants(disk, nodes, &barred, CLAIMED_WITHIN * waits);
            after.into_iter().map(|node| node.node).collect()
        };
        assert_eq!(may(&disk, &nodes, 0), ["b"]);
        let just_before = CLAIMED_WITHIN - Duration::from_nanos(1);
        assert_eq!(claimants(&disk, &nodes, &barred, just_before).len(), 1);
        for waits in 1..3 {
            let now = may(&disk, &nodes, waits);
            assert_eq!(now.len(), waits as usize + 1);
            assert_eq!(now[..waits as usize], may(&disk, &nodes, waits - 1), "who might, may");
        }
        let all = may(&disk, &nodes, 1000);
        assert_eq!((all.len(), &**all.last().unwrap()), (4, "a"), "the others may not be able to open it");
        assert_eq!(may(&disk, &live(&[("a", "1"), ("c", "3")]), 1), ["c", "a"], "the heir is gone");
        assert_eq!(may(&disk, &live(&[("a", "1")]), 0), ["a"], "no other is there");
        // Another process of the heir's node is a node as any other.
        let mut restarted = nodes.clone();
        restarted.get_mut("b").unwrap().incarnation = 2;
        assert_eq!(claimants(&disk, &restarted, &barred, Duration::ZERO).len(), 1);
        assert!(!claimants(&disk, &restarted, &barred, Duration::ZERO).contains(&NodeRef::new("b", 1)));
        let closed = DiskRecord { heir: None, ..disk.clone() };
        assert!(may(&closed, &nodes, 9).is_empty(), "closed stays closed");
        let owned = DiskRecord { owner: Some(NodeRef::new("c", 1)), ..disk };
        assert!(may(&owned, &nodes, 9).is_empty());
    }

    #[test]
    fn the_first_live_replica_of_the_same_process_succeeds() {
        let mut disk = disk("d", Policy::WriteBack(2));
        let mut nodes = live(&[("a", "1"), ("b", "2"), ("c", "3")]);
        assert_eq!(successor(&disk, &nodes, &BTreeSet::new()), None, "no owner");
        (disk.owner, disk.epoch, disk.mode) = (Some(NodeRef::new("a", 1)), 1, Mode::WriteBack);
        disk.replicas = vec![NodeRef::new("b", 1), NodeRef::new("c", 1)];
        assert_eq!(successor(&disk, &nodes, &BTreeSet::new()), None, "the owner is alive");
        nodes.remove("a");
        assert_eq!(successor(&disk, &nodes, &BTreeSet::new()), Some(NodeRef::new("b", 1)));
        let barred = |names: &[&str]| owned(names).into_iter().collect::<BTreeSet<_>>();
        let first = |names: &[&str]| successor(&disk, &nodes, &barred(names));
        assert_eq!(first(&["b"]), Some(NodeRef::new("c", 1)), "b is drained");
        assert_eq!(first(&["b", "c"]), Some(NodeRef::new("b", 1)), "no other has a copy");
        nodes.get_mut("b").unwrap().incarnation = 2;
        assert_eq!(
            successor(&disk, &nodes, &BTreeSet::new()),
            Some(NodeRef::new("c", 1)),
            "b has lost its copy"
        );
        nodes.remove("c");
        assert_eq!(successor(&disk, &nodes, &BTreeSet::new()), None);
        (disk.mode, disk.replicas) = (Mode::WriteThrough, Vec::new());
        assert_eq!(successor(&disk, &nodes, &BTreeSet::new()), Some(NodeRef::new("b", 2)), "any live node");
    }
}
