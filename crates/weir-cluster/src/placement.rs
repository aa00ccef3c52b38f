//! Who takes over and where replicas go. Every node that sees the same nodes computes the same answer, so
//! that they seldom race; when they do, compare-and-swap decides.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::records::{DiskRecord, Mode, NodeRecord, NodeRef};

/// The nodes whose lease stands, by name.
pub type Live = BTreeMap<String, NodeRecord>;

/// Who should take `record` over: in write-back the first replica that is alive (as the same process), in
/// write-through any live node, a different one for each disk. `None` while the owner is alive, when there is
/// no owner, and when nobody may.
#[must_use]
pub fn successor(record: &DiskRecord, live: &Live) -> Option<NodeRef> {
    let owner = record.owner.as_ref()?;
    let is_alive =
        |node: &NodeRef| live.get(&node.node).is_some_and(|now| now.incarnation == node.incarnation);
    if is_alive(owner) {
        return None;
    }
    match record.mode {
        Mode::WriteBack => record.replicas.iter().find(|replica| is_alive(replica)).cloned(),
        Mode::WriteThrough => {
            live.values().max_by_key(|node| weight(&record.name, &node.name)).map(NodeRecord::node_ref)
        }
    }
}

/// Up to `wanted` live nodes for the replicas of disk `disk`, whose owner is `owner`: never the owner's
/// node nor one in `exclude`, in other fault domains than the owner's and each other's as long as there are
/// any, and otherwise spread by the disk's name.
#[must_use]
pub fn choose_replicas(
    disk: &str,
    owner: &str,
    wanted: usize,
    live: &Live,
    exclude: &[String],
) -> Vec<NodeRef> {
    let mut candidates: Vec<&NodeRecord> =
        live.values().filter(|node| node.name != owner && !exclude.contains(&node.name)).collect();
    candidates.sort_by_key(|node| Reverse(weight(disk, &node.name)));
    let mut domains: BTreeSet<&str> = live.get(owner).map(|owner| &*owner.fault_domain).into_iter().collect();
    let mut chosen = Vec::new();
    while chosen.len() < wanted && !candidates.is_empty() {
        let elsewhere = candidates.iter().position(|node| !domains.contains(&*node.fault_domain));
        let node = candidates.remove(elsewhere.unwrap_or(0));
        domains.insert(&node.fault_domain);
        chosen.push(node.node_ref());
    }
    chosen
}

/// Rendezvous hashing: when a node comes or goes, only the disks that it wins or had won move.
fn weight<'a>(disk: &str, node: &'a str) -> (u64, &'a str) {
    // FNV-1a, then a finalizer, because FNV alone hardly mixes the last bytes into the high bits. Written out
    // because all nodes, of whatever build, must agree.
    let bytes = disk.bytes().chain([0]).chain(node.bytes());
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (hash ^ (hash >> 33), node)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::records::{Policy, Source};

    fn live(nodes: &[(&str, &str)]) -> Live {
        let record = |name: &str, domain: &str| NodeRecord {
            name: name.into(),
            incarnation: 1,
            peer_address: ([127, 0, 0, 1], 1).into(),
            nbd_tcp: None,
            nbd_unix: "/n".into(),
            api: "/a".into(),
            fault_domain: domain.into(),
            media: Vec::new(),
            load: 0,
        };
        nodes.iter().map(|(name, domain)| ((*name).to_owned(), record(name, domain))).collect()
    }

    fn names(nodes: &[NodeRef]) -> Vec<&str> {
        nodes.iter().map(|node| &*node.node).collect()
    }

    #[test]
    fn replicas_go_to_other_fault_domains_first() {
        let live = live(&[("a", "r1"), ("b", "r1"), ("c", "r2"), ("d", "r3"), ("e", "r2")]);
        for number in 0..200 {
            let disk = format!("disk-{number}");
            let two = choose_replicas(&disk, "a", 2, &live, &[]);
            let domains: BTreeSet<_> = two.iter().map(|node| &live[&node.node].fault_domain).collect();
            assert_eq!(domains.len(), 2);
            assert!(!domains.contains(&"r1".to_owned()));
            assert_eq!(choose_replicas(&disk, "a", 9, &live, &[]).len(), 4, "all but the owner");
            let without = choose_replicas(&disk, "a", 2, &live, &["c".into(), "e".into()]);
            assert_eq!(names(&without), ["d", "b"], "then the owner's own domain");
        }
        assert!(choose_replicas("x", "a", 0, &live, &[]).is_empty());
        assert!(choose_replicas("x", "a", 2, &Live::new(), &[]).is_empty());
    }

    #[test]
    fn replicas_are_spread_evenly_and_stay_put() {
        let six = live(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("e", "5"), ("f", "6")]);
        let mut five = six.clone();
        five.remove("f");
        let mut count: BTreeMap<String, u32> = BTreeMap::new();
        for number in 0..1000 {
            let disk = format!("vm-{number:04}");
            let chosen = choose_replicas(&disk, "a", 1, &six, &[]);
            *count.entry(chosen[0].node.clone()).or_default() += 1;
            if chosen[0].node != "f" {
                assert_eq!(choose_replicas(&disk, "a", 1, &five, &[]), chosen, "{disk} moved without need");
            }
        }
        assert!(count.len() == 5 && count.values().all(|disks| (150..=250).contains(disks)), "{count:?}");
    }

    #[test]
    fn the_first_live_replica_of_the_same_process_succeeds() {
        let source = Source::File { name: "d".into() };
        let mut disk = DiskRecord::new("d", "v", source, 4096, 512, Policy::WriteBack(2));
        let mut nodes = live(&[("a", "1"), ("b", "2"), ("c", "3")]);
        assert_eq!(successor(&disk, &nodes), None, "no owner");
        (disk.owner, disk.epoch, disk.mode) = (Some(NodeRef::new("a", 1)), 1, Mode::WriteBack);
        disk.replicas = vec![NodeRef::new("b", 1), NodeRef::new("c", 1)];
        assert_eq!(successor(&disk, &nodes), None, "the owner is alive");
        nodes.remove("a");
        assert_eq!(successor(&disk, &nodes), Some(NodeRef::new("b", 1)));
        nodes.get_mut("b").unwrap().incarnation = 2;
        assert_eq!(successor(&disk, &nodes), Some(NodeRef::new("c", 1)), "b has lost its copy");
        nodes.remove("c");
        assert_eq!(successor(&disk, &nodes), None);
        (disk.mode, disk.replicas) = (Mode::WriteThrough, Vec::new());
        assert_eq!(successor(&disk, &nodes), Some(NodeRef::new("b", 2)), "any live node");
    }
}
