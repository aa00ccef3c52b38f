//! Acknowledged writes that may exist only in a lab's memory, according to its nodes.

use std::collections::{BTreeMap, HashMap};

use weir_block::Nanos;
use weir_node::api::{DiskView, Medium, NodeStatus, ShardView};
use weir_node::shard::messages::DiskStatus;

use super::Ending;
use crate::lab::NodeReport;
use crate::process::ProcessState;

/// The logs that `lab down` waits for.
#[derive(Default)]
pub(super) struct Awaited {
    /// By disk and owner: another owner's log has numbers of its own.
    logs: HashMap<(String, String), Watched>,
    /// Logs with an unknown amount of dirty data, and since when it is unknown.
    unknown: HashMap<String, Nanos>,
}

/// The logs to wait for, and since when each has made no progress.
pub(super) type Waits = Vec<(Nanos, String)>;

/// The log of a disk that is waited for.
struct Watched {
    /// The last record that can have been acknowledged when the log was first seen.
    until: u64,
    /// How far it is destaged, and since when.
    destaged: u64,
    since: Nanos,
}

impl Watched {
    fn look(&mut self, destaged: u64, now: Nanos) {
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
            let Some((node, detail)) = open_on(reports, disk) else { continue };
            let (promised, destaged) = (detail.promised, detail.destaged);
            let watched = self.logs.entry((disk.name.clone(), node.into()));
            let watched = watched.or_insert(Watched { until: promised, destaged, since: now });
            watched.look(destaged, now);
            if destaged < if ending == Ending::Wait { promised } else { watched.until } {
                let what = format!("disk {} ({} bytes; {})", disk.name, detail.dirty_bytes, detail.reason);
                waits.push((watched.since, what));
            }
        }
        waits
    }

    /// Logs that nobody tells of, while processes that may hold them run.
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
                found.push(format!(
                    "disk {name} (not open on its owner {owner}; {holders} may have its log in memory)"
                ));
            }
        }
        let runs = reports.iter().any(|report| report.state != ProcessState::Gone);
        if runs && statuses(reports).next().is_none() {
            found.push("all disks (no node answers)".to_owned());
        }
        let waits: Waits =
            found.into_iter().map(|what| (*self.unknown.get(&what).unwrap_or(&now), what)).collect();
        self.unknown = waits.iter().map(|(since, what)| (what.clone(), *since)).collect();
        waits
    }
}

/// What the nodes that answer say.
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

/// The node that has the disk open, and what it says of its log. A former owner that does not know its successor is none.
fn open_on<'a>(reports: &'a [NodeReport], disk: &DiskView) -> Option<(&'a str, &'a DiskStatus)> {
    statuses(reports).find_map(|status| {
        let is_same = |other: &&DiskView| other.name == disk.name && other.epoch == disk.epoch;
        let own = status.disks.iter().find(is_same)?;
        let detail = own.detail.as_ref().filter(|detail| detail.is_current())?;
        (own.owner.as_ref() == Some(&status.node)).then_some((&*status.node, detail))
    })
}

/// Whether the memory of a node may hold acknowledged writes to a disk that nobody has open. An incomplete copy does not count:
/// nobody goes on from it.
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
    let hangs = status.shards.iter().any(|shard| shard.state == ShardView::HANGS);
    lags || hangs || copies.any(|copy| copy.dirty_bytes > 0 || !copy.is_current())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;
    use crate::lab::LabNode;

    /// Disk d as its owner n1, whose replica is n2, or another node shows it.
    fn disk(epoch: u64, owner: &str, detail: Option<DiskStatus>) -> DiskView {
        let view = json!({
            "name": "d", "volume": "v", "size": 1 << 20, "logical_block": 512, "requested": "write-back+1",
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
            registry: String::new(),
            nodes: Vec::new(),
            disks: vec![disk],
            replicas: copy.into_iter().collect(),
            shards: Vec::new(),
            exports: Vec::new(),
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
        let shard = json!({
            "shard": 0, "state": ShardView::HANGS, "reason": "", "turns": 0, "disk_turns": 0, "long_turns": 0, "longest_turn_ms": 0.0, "spins": 0,
        });
        unspoken.status.as_mut().unwrap().shards.push(serde_json::from_value(shard).unwrap());
        assert!(waits(&[unspoken, gone("n2")]));
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
            let letting_go = Some(log(DiskStatus::LETTING_GO, 0));
            assert!(waits(&reports(letting_go)), "the log that it goes on from is not open yet");
        }
        // It has committed the takeover, and shows what it knew before.
        let lags = answers("n2", disk(4, "n1", None), None);
        assert!(waits(&[answers("n3", disk(5, "n1", None), None), lags, gone("n1")]));
    }
}
