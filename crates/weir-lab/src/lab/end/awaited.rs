//! Acknowledged writes that may exist only in a lab's memory, according to its nodes.

use std::collections::{BTreeMap, HashMap};

use weir_block::Nanos;
use weir_node::api::{DiskView, Medium, NodeStatus, ShardView};
use weir_node::shard::messages::DiskStatus;
use weir_node::shard::shard_of;
use weir_node::units::about;

use super::Ending;
use crate::lab::NodeReport;
use crate::process::ProcessState;

/// The logs that `lab down` waits for.
#[derive(Default)]
pub(super) struct Awaited {
    /// By disk and owner: another owner's log has numbers of its own.
    logs: HashMap<(String, String), Watched>,
    /// Disks with an unknown amount of dirty data (`None` for all), and since when it is unknown.
    unknown: HashMap<Option<String>, Nanos>,
}

/// The logs to wait for, and since when each has made no progress.
pub(super) type Waits = Vec<(Nanos, String)>;

/// The log of a disk that is waited for.
struct Watched {
    /// The last record that can have been acknowledged when the log was first seen.
    until: u64,
    /// The last destaged record, and the time of the last progress.
    destaged: u64,
    since: Nanos,
}

impl Watched {
    fn look(&mut self, promised: u64, destaged: u64, now: Nanos) {
        // The same owner may have opened the log anew, with numbers of its own.
        self.until = self.until.min(promised);
        if destaged != self.destaged {
            (self.destaged, self.since) = (destaged, now);
        }
    }
}

impl Awaited {
    /// The logs to wait for, according to these reports.
    pub(super) fn look(&mut self, reports: &[NodeReport], ending: Ending, now: Nanos) -> Waits {
        let mut waits = self.logs(reports, ending, now);
        waits.extend(self.unknown(reports, now));
        waits
    }

    /// Logs that are not empty yet, as their owners say.
    fn logs(&mut self, reports: &[NodeReport], ending: Ending, now: Nanos) -> Waits {
        let mut waits = Waits::new();
        for disk in disks_in_memory(reports) {
            // A log that comes back to a former owner is another one.
            self.logs.retain(|(name, owner), _| *name != disk.name || disk.owner.as_ref() == Some(owner));
            let Some((node, detail)) = open_on(reports, disk) else { continue };
            let (promised, destaged) = (detail.promised, detail.destaged);
            let watched = self.logs.entry((disk.name.clone(), node.into()));
            let watched = watched.or_insert(Watched { until: promised, destaged, since: now });
            watched.look(promised, destaged, now);
            if destaged < if ending == Ending::Wait { promised } else { watched.until } {
                let reason =
                    if detail.reason.is_empty() { String::new() } else { format!("; {}", detail.reason) };
                let what = format!("disk {} ({} not destaged{reason})", disk.name, about(detail.dirty_bytes));
                waits.push((watched.since, what));
            }
        }
        waits
    }

    /// Logs that no node reports, while processes that may hold them run.
    fn unknown(&mut self, reports: &[NodeReport], now: Nanos) -> Waits {
        let mut found = Vec::new();
        for disk in disks_in_memory(reports).filter(|disk| open_on(reports, disk).is_none()) {
            let holders: Vec<&str> = reports
                .iter()
                .filter(|report| may_hold(report, disk))
                .map(|report| &*report.node.name)
                .collect();
            if let Some(owner) = disk.owner.as_ref().filter(|_| !holders.is_empty()) {
                let (name, holders) = (&disk.name, holders.join(" and "));
                let what = format!(
                    "disk {name} (not open on its owner {owner}; {holders} may have its log in memory)"
                );
                found.push((Some(name.clone()), what));
            }
        }
        let runs = reports.iter().any(|report| report.state != ProcessState::Gone);
        if runs && statuses(reports).next().is_none() {
            found.push((None, "all disks (no node answers)".to_owned()));
        }
        // By disk: the nodes that may have its log change while processes come and go.
        let former = std::mem::take(&mut self.unknown);
        let since = |disk: &Option<String>| *former.get(disk).unwrap_or(&now);
        let waits = found.iter().map(|(disk, what)| (since(disk), what.clone())).collect();
        self.unknown = found.into_iter().map(|(disk, _)| (disk.clone(), since(&disk))).collect();
        waits
    }
}

/// The reports of the nodes that answer.
fn statuses(reports: &[NodeReport]) -> impl Iterator<Item = &NodeStatus> {
    reports.iter().filter_map(|report| report.status.as_ref())
}

/// The disks that may have a log in memory, each as shown by a node that knows the latest of it.
fn disks_in_memory(reports: &[NodeReport]) -> impl Iterator<Item = &DiskView> {
    let mut latest: BTreeMap<&str, &DiskView> = BTreeMap::new();
    for disk in statuses(reports).flat_map(|status| &status.disks) {
        let known = latest.entry(&disk.name).or_insert(disk);
        if disk.epoch > known.epoch {
            *known = disk;
        }
    }
    latest.into_values().filter(|disk| disk.medium == Medium::Ram && disk.effective != "write-through")
}

/// The node that has the disk open, and its report on the log. A former owner that does not know its successor does not
/// count.
fn open_on<'a>(reports: &'a [NodeReport], disk: &DiskView) -> Option<(&'a str, &'a DiskStatus)> {
    statuses(reports).find_map(|status| {
        let is_same = |other: &&DiskView| other.name == disk.name && other.epoch == disk.epoch;
        let own = status.disks.iter().find(is_same)?;
        let detail = own.detail.as_ref().filter(|detail| detail.is_current())?;
        (own.owner.as_ref() == Some(&status.node)).then_some((&*status.node, detail))
    })
}

/// Whether the memory of a node may hold acknowledged writes to a disk that no node has open. An incomplete copy does not
/// count: no node continues from it.
fn may_hold(report: &NodeReport, disk: &DiskView) -> bool {
    let name = &report.node.name;
    if disk.owner.as_ref() != Some(name) && !disk.replicas.contains(name) {
        return false;
    }
    let Some(status) = &report.status else { return report.state != ProcessState::Gone };
    let mut own = status.disks.iter().filter(|other| other.name == disk.name);
    // A log that is being opened is still listed among the copies.
    let is_unknown = |detail: &DiskStatus| !detail.is_current() && detail.state != DiskStatus::OPENING;
    let lags = own.any(|own| own.epoch < disk.epoch || own.detail.as_ref().is_some_and(is_unknown));
    let mut copies =
        status.replicas.iter().filter(|copy| copy.disk == disk.name && copy.state != DiskStatus::FILLING);
    let number = shard_of(&disk.name, status.shards.len().max(1));
    let hangs = status.shards.iter().any(|shard| shard.shard == number && shard.state == ShardView::HANGS);
    lags || hangs || copies.any(|copy| copy.dirty_bytes > 0 || !copy.is_current())
}

/// The disks whose backing files are gone, as sentences: their data is lost with the process that has the file open.
pub(super) fn gone(reports: &[NodeReport]) -> Vec<String> {
    let of_node = |status: &NodeStatus| {
        let own = status.disks.iter().filter(|disk| disk.owner.as_ref() == Some(&status.node));
        let faults = own.filter_map(|disk| Some((disk, disk.detail.as_ref()?.faults.first()?)));
        faults.map(|(disk, fault)| format!("disk {}: {fault}", disk.name)).collect::<Vec<_>>()
    };
    statuses(reports).flat_map(of_node).collect()
}

/// A disk of which a node has a complete copy with nothing dirty.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CleanCopy {
    pub disk: String,
    pub node: String,
}

/// The clean copies of all disks. If the node belongs to the disk's set, nothing is lost whatever the owner does; a node outside
/// the set may have a copy of an earlier set.
pub(super) fn clean(reports: &[NodeReport]) -> Vec<CleanCopy> {
    let is_clean =
        |copy: &&DiskStatus| copy.dirty_bytes == 0 && copy.is_current() && copy.state != DiskStatus::FILLING;
    let of_node = |status: &NodeStatus| {
        let copies = status.replicas.iter().filter(is_clean);
        copies
            .map(|copy| CleanCopy { disk: copy.disk.clone(), node: status.node.clone() })
            .collect::<Vec<_>>()
    };
    statuses(reports).flat_map(of_node).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;
    use weir_node::api::{Health, RegistryView};

    use super::*;
    use crate::lab::LabNode;

    /// Disk d as its owner n1, whose replica is n2, or another node shows it.
    fn disk(epoch: u64, owner: &str, detail: Option<DiskStatus>) -> DiskView {
        let view = json!({
            "name": "d", "volume": "v", "size_bytes": 1 << 20, "logical_block_bytes": 512, "requested": "write-back+1",
            "effective": "write-back+1", "owner": owner, "epoch": epoch, "replicas": ["n2"], "state": "serving",
            "reason": "", "uris": [],
        });
        DiskView { detail, ..serde_json::from_value(view).unwrap() }
    }

    /// The status that an owner or a replica reports of a log with `dirty` dirty records of 1 KiB.
    fn log(state: &str, dirty: u64) -> DiskStatus {
        let dirty_bytes = dirty << 10;
        DiskStatus {
            disk: "d".into(),
            state: state.into(),
            promised: 7,
            destaged: 7 - dirty,
            dirty_bytes,
            ..DiskStatus::default()
        }
    }

    fn gone(node: &str) -> NodeReport {
        let path = PathBuf::new;
        let (config, log, api, nbd_unix) = (path(), path(), path(), path());
        let nbd_tcp = ([127, 0, 0, 1], 1).into();
        let node = LabNode { name: node.into(), config, log, api, nbd_unix, nbd_tcp, process: None };
        NodeReport { node, state: ProcessState::Gone, status: None }
    }

    fn silent(node: &str) -> NodeReport {
        NodeReport { state: ProcessState::Running, ..gone(node) }
    }

    fn answers(node: &str, disk: DiskView, copy: Option<DiskStatus>) -> NodeReport {
        let status = NodeStatus {
            node: node.into(),
            fault_domain: String::new(),
            incarnation: 1,
            pid: 1,
            version: String::new(),
            health: Health::default(),
            registry: RegistryView { state: String::new(), reason: String::new(), age_seconds: 0.0 },
            nodes: Vec::new(),
            disks: vec![disk],
            troubles: Vec::new(),
            notices: Vec::new(),
            replicas: copy.into_iter().collect(),
            shards: Vec::new(),
            exports: Vec::new(),
            nbd: Vec::new(),
            peers: Default::default(),
        };
        NodeReport { status: Some(status), ..silent(node) }
    }

    fn waits(reports: &[NodeReport]) -> bool {
        !Awaited::default().look(reports, Ending::Wait, Nanos(1)).is_empty()
    }

    fn copy(dirty: u64) -> Option<DiskStatus> {
        Some(log("complete", dirty))
    }

    #[test]
    fn an_owner_that_has_it_open_says_what_is_dirty() {
        let owner = |dirty| answers("n1", disk(5, "n1", Some(log("serving", dirty))), None);
        assert!(
            !waits(&[owner(0), answers("n2", disk(5, "n1", None), copy(3))]),
            "the replica has not freed it yet"
        );
        assert!(waits(&[owner(3), gone("n2")]));
        assert!(!waits(&[owner(0), silent("n2")]), "its copy is of no use");
    }

    #[test]
    fn a_log_is_waited_for_until_an_owner_has_it_open() {
        let opening = |copy| answers("n2", disk(6, "n2", Some(log(DiskStatus::OPENING, 0))), copy);
        assert!(waits(&[gone("n1"), opening(copy(3))]));
        assert!(!waits(&[gone("n1"), opening(copy(0))]), "clean, and its backing may be away for good");
        assert!(waits(&[gone("n1"), answers("n2", disk(5, "n1", None), copy(3))]), "not taken over yet");
        assert!(
            !waits(&[gone("n1"), answers("n2", disk(5, "n1", None), None)]),
            "started again, without a copy"
        );
        let filling = Some(log(DiskStatus::FILLING, 3));
        assert!(!waits(&[gone("n1"), answers("n2", disk(5, "n1", None), filling)]), "nobody goes on from it");
        assert!(!waits(&[gone("n1"), answers("n3", disk(5, "n1", None), copy(3))]), "not of its set");
    }

    #[test]
    fn who_does_not_answer_may_have_everything() {
        assert!(waits(&[silent("n1"), silent("n2")]) && !waits(&[gone("n1"), gone("n2")]));
        let third = || answers("n3", disk(5, "n1", None), None);
        assert!(waits(&[silent("n1"), gone("n2"), third()]) && waits(&[gone("n1"), silent("n2"), third()]));
        assert!(!waits(&[gone("n1"), gone("n2"), third(), silent("n4")]), "n4 has nothing of it");
        let hung = answers("n1", disk(5, "n1", Some(log(DiskStatus::SILENT, 0))), None);
        assert!(waits(&[hung, gone("n2")]), "guests may have written since");
        let mut unspoken = answers("n1", disk(5, "n1", None), None);
        let shard = |number: usize, hung: usize| {
            json!({
                "shard": number, "state": if number == hung { ShardView::HANGS } else { "ok" }, "reason": "", "turns": 0, "disk_turns": 0, "long_turns": 0, "longest_turn_ms": 0.0, "spins": 0,
            })
        };
        let own = shard_of("d", 2);
        let mut with_shards = |hung: usize| {
            let shards =
                [0, 1].map(|number| serde_json::from_value::<ShardView>(shard(number, hung)).unwrap());
            unspoken.status.as_mut().unwrap().shards = shards.to_vec();
            waits(&[
                NodeReport { node: gone("n1").node, state: unspoken.state, status: unspoken.status.clone() },
                gone("n2"),
            ])
        };
        assert!(with_shards(own));
        assert!(!with_shards(1 - own), "the disk's own shard turns, and does not know the disk");
    }

    /// Examines the reports one after the other, a second apart. Returns the logs waited for at the end, and since when.
    fn looked(looks: &[Vec<NodeReport>], ending: Ending) -> Waits {
        let mut awaited = Awaited::default();
        let mut waits = Waits::new();
        for (second, reports) in looks.iter().enumerate() {
            waits = awaited.look(reports, ending, Nanos(1 + second as u64 * 1_000_000_000));
        }
        waits
    }

    #[test]
    fn a_log_that_comes_back_to_its_owner_is_a_new_one() {
        let at = |epoch, owner: &str, promised, dirty| {
            let log = DiskStatus { promised, destaged: promised - dirty, ..log("serving", dirty) };
            let view = DiskView { replicas: Vec::new(), ..disk(epoch, owner, Some(log)) };
            vec![answers(owner, view, None)]
        };
        assert!(
            looked(&[at(5, "n1", 100, 3), at(5, "n1", 103, 3)], Ending::Refuse).is_empty(),
            "what it held at first"
        );
        assert!(!looked(&[at(5, "n1", 100, 3), at(5, "n1", 100, 1)], Ending::Refuse).is_empty());
        // Opened anew by the same owner, with lower numbers: the old ones are never reached.
        assert!(looked(&[at(5, "n1", 100, 3), at(6, "n1", 7, 0)], Ending::Refuse).is_empty());
        // Away and back, with higher ones: they are waited for.
        let back = [at(5, "n1", 7, 3), at(6, "n2", 7, 3), at(7, "n1", 20, 3)];
        assert_eq!(looked(&back, Ending::Refuse).len(), 1);
    }

    #[test]
    fn the_time_of_a_disk_goes_on_while_its_holders_change() {
        let third = || answers("n3", disk(5, "n1", None), None);
        let both = vec![silent("n1"), silent("n2"), third()];
        let one = vec![gone("n1"), silent("n2"), third()];
        let waits = looked(&[both, one], Ending::Refuse);
        assert_eq!(waits.len(), 1);
        assert_eq!(waits[0].0, Nanos(1), "{waits:?}");
        assert!(waits[0].1.contains("n2 may have its log"), "{waits:?}");
    }

    #[test]
    fn an_empty_copy_is_known_to_be_clean() {
        let reports = |dirty| [gone("n1"), answers("n2", disk(5, "n1", None), copy(dirty))];
        assert_eq!(clean(&reports(0)), [CleanCopy { disk: "d".into(), node: "n2".into() }]);
        assert!(clean(&reports(3)).is_empty());
    }

    #[test]
    fn a_former_owner_does_not_speak_for_its_successor() {
        let former = || answers("n1", disk(5, "n1", Some(log("serving", 0))), None);
        let successor =
            |detail| answers("n2", DiskView { replicas: Vec::new(), ..disk(6, "n2", detail) }, None);
        for order in [false, true] {
            let reports = |detail| match order {
                false => [former(), successor(detail)],
                true => [successor(detail), former()],
            };
            assert!(waits(&reports(Some(log("serving", 3)))) && !waits(&reports(Some(log("serving", 0)))));
            let releasing = Some(log(DiskStatus::RELEASING, 0));
            assert!(waits(&reports(releasing)), "the log that it goes on from is not open yet");
        }
        // It has committed the takeover, and shows its older view.
        let lags = answers("n2", disk(4, "n1", None), None);
        assert!(waits(&[answers("n3", disk(5, "n1", None), None), lags, gone("n1")]));
    }
}
