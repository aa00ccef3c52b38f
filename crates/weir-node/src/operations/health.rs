//! The cluster's health, in one line. Pure: a node's view of the cluster comes in, the judgement comes out.
//!
//! | level | when |
//! |---|---|
//! | at risk | acknowledged data exists in fewer copies than the requested policy names, or in one place that may be lost; a backing file is gone; no copy of a write log is left |
//! | degraded | the effective policy is below the requested one; a disk waits or its owner does not answer; a volume on a LUN is not served, or a node has a problem with it; the I/O of a disk takes a detour that is not benign; a node is down; the registry is away, or lacks this node's cluster; this node cannot write its audit log, or what it trusts; the other nodes refuse its certificate; a shard hangs; the clocks of nodes differ |
//! | ok | none of these |

use std::collections::BTreeMap;

use weir_cluster::records::Policy;
use weir_volume::lun::route_status::Reason;

use super::coordination;
use crate::api::{
    DiskView, Health, HealthLevel, NodeStatus, NodeView, RegistryView, ShardView, VolumeTrouble,
};
use crate::control::clocks;
use crate::shard::messages::{DiskStatus, RouteReason};
use crate::units::about;

/// Judges what a node shows of the cluster; its own `health` is not looked at. `faults`: those of the node that shows it.
#[must_use]
pub fn judge(status: &NodeStatus, faults: &[String]) -> Health {
    let mut found: Vec<(HealthLevel, String)> = Vec::new();
    for VolumeTrouble { volume, reason } in &status.troubles {
        let waits =
            match status.disks.iter().filter(|disk| disk.volume == *volume && only_waits(disk)).count() {
                0 => String::new(),
                1 => " (1 disk waits for it)".to_owned(),
                disks => format!(" ({disks} disks wait for it)"),
            };
        found.push((HealthLevel::Degraded, format!("volume {volume} is not served{waits}: {reason}")));
    }
    for VolumeTrouble { volume, reason } in &status.notices {
        found.push((HealthLevel::Degraded, format!("volume {volume}: {reason}")));
    }
    let is_counted =
        |disk: &DiskView| only_waits(disk) && status.troubles.iter().any(|one| one.volume == disk.volume);
    for disk in &status.disks {
        found.extend(at_risk(disk, &status.nodes).map(|reason| (HealthLevel::AtRisk, reason)));
        // A fault of the backing is reported already.
        if disk.detail.as_ref().is_none_or(|detail| detail.faults.is_empty()) && !is_counted(disk) {
            found.extend(degraded(disk).map(|reason| (HealthLevel::Degraded, reason)));
        }
    }
    found.extend(detours(&status.disks).into_iter().map(|reason| (HealthLevel::Degraded, reason)));
    for node in status.nodes.iter().filter(|node| node.state != NodeView::UP) {
        let since = node.down_since.as_ref().map(|since| format!(" since {since}")).unwrap_or_default();
        found.push((HealthLevel::Degraded, format!("node {} is {}{since}", node.name, node.state)));
    }
    let clocks = || status.nodes.iter().filter_map(|node| Some((&node.name, node.clock_ahead_ms?)));
    let others = if clocks().count() > 2 { "the other nodes" } else { &status.node };
    for fault in clocks().filter_map(|(name, ahead)| clocks::fault(name, ahead, others)) {
        found.push((HealthLevel::Degraded, fault));
    }
    if status.registry.state == RegistryView::AWAY {
        let age = status.registry.age_seconds;
        found.push((HealthLevel::Degraded, format!("the registry has been away for {age:.0} s")));
    } else if !status.registry.reason.is_empty() {
        found.push((HealthLevel::Degraded, status.registry.reason.clone()));
    }
    found.extend(faults.iter().map(|fault| (HealthLevel::Degraded, fault.clone())));
    for shard in status.shards.iter().filter(|shard| shard.state == ShardView::HANGS) {
        let text = format!("shard {} of node {} hangs {}", shard.shard, status.node, shard.reason);
        found.push((HealthLevel::Degraded, text));
    }
    // A stable sort: within a level, in the order of the disks.
    found.sort_by_key(|(level, _)| std::cmp::Reverse(*level));
    let level = found.first().map(|(level, _)| *level).unwrap_or_default();
    Health { level, reasons: found.into_iter().map(|(_, reason)| reason).collect() }
}

/// Why acknowledged data of a disk may be lost, if it may.
fn at_risk(disk: &DiskView, nodes: &[NodeView]) -> Option<String> {
    let name = &disk.name;
    if disk.state == DiskView::UNAVAILABLE {
        return Some(format!("disk {name} is unavailable: no copy of its write log is left"));
    }
    if let Some(fault) = disk.detail.as_ref().and_then(|detail| detail.faults.first()) {
        return Some(format!("disk {name}: {fault}"));
    }
    if !disk.effective.starts_with("write-back") {
        return None;
    }
    let is_up = |node: &str| nodes.iter().any(|other| other.name == node && other.is_there());
    let has_copy = |node: &str| is_up(node) && !disk.lost_replicas.iter().any(|lost| lost == node);
    let replicas: Vec<&str> =
        disk.replicas.iter().map(String::as_str).filter(|replica| has_copy(replica)).collect();
    let owner_has_it = disk.state != DiskView::TAKEOVER;
    let holders: Vec<&str> =
        disk.owner.as_deref().filter(|_| owner_has_it).into_iter().chain(replicas).collect();
    let wanted = disk.requested.parse().map_or(0, Policy::replicas) + 1;
    let dirty = match disk.dirty_bytes() {
        Some(0) => return None,
        Some(bytes) => format!("{} of acknowledged writes", about(bytes)),
        // If the owner is gone or silent, the dirty bytes are unknown.
        None if disk.state == DiskView::TAKEOVER => "acknowledged writes".to_owned(),
        None => return None,
    };
    match holders.as_slice() {
        [only] => Some(format!("disk {name}: {dirty} only on node {only}")),
        some if some.len() < wanted => {
            Some(format!("disk {name}: {dirty} in {} copies instead of {wanted}", some.len()))
        }
        _ => None,
    }
}

/// Nothing is wrong with it but that nobody serves its volume, which is reported once for all of its disks.
fn only_waits(disk: &DiskView) -> bool {
    disk.effective == disk.requested
        && disk.warnings.is_empty()
        && disk.reason == coordination::not_served(&disk.volume)
}

/// Routes that disks take because something is out of order, once for all disks of a node and a volume that take the same.
fn detours(disks: &[DiskView]) -> Vec<String> {
    let mut all: BTreeMap<(&str, Option<&str>, String), Vec<&str>> = BTreeMap::new();
    for disk in disks.iter().filter(|disk| disk.state == "serving") {
        let Some(route) = disk.detail.as_ref().and_then(|detail| detail.route.as_ref()) else { continue };
        // A volume that nobody serves is reported as such.
        let is_reason = |one: &&RouteReason| !one.benign && one.flag != Reason::CoordinatorMoving.name();
        let reasons: Vec<&str> =
            route.reasons.iter().filter(is_reason).map(|one| one.flag.as_str()).collect();
        if !reasons.is_empty() {
            let detour = format!("{}: {}", route.state, reasons.join(", "));
            all.entry((&disk.volume, disk.owner.as_deref(), detour)).or_default().push(&disk.name);
        }
    }
    let line = |((volume, owner, detour), disks): ((&str, Option<&str>, String), Vec<&str>)| match disks
        .as_slice()
    {
        [disk] => format!("disk {disk} is {detour}"),
        disks => {
            let (count, owner) = (disks.len(), owner.unwrap_or("nobody"));
            format!("{count} disks of volume {volume} on {owner} are {detour}")
        }
    };
    all.into_iter().map(line).collect()
}

/// The part of the requested policy that a disk lacks.
fn degraded(disk: &DiskView) -> Option<String> {
    let name = &disk.name;
    let quiet = [
        "serving",
        "closed",
        "closing",
        DiskStatus::RELEASING,
        DiskView::UNAVAILABLE,
        // Closed, for its operator, who knows that.
        DiskView::COMPACTING,
    ];
    let below = !disk.effective.is_empty() && disk.effective != disk.requested;
    let reason = match (disk.warnings.first(), disk.reason.as_str()) {
        (Some(warning), _) => warning.clone(),
        (None, "") => String::new(),
        (None, reason) => reason.to_owned(),
    };
    let colon = if reason.is_empty() { "" } else { ": " };
    if below && !disk.warnings.is_empty() {
        return Some(format!("disk {name}: {reason}"));
    }
    if below {
        let (effective, requested) = (&disk.effective, &disk.requested);
        return Some(format!("disk {name} has {effective}, {requested} is requested{colon}{reason}"));
    }
    if disk.state == DiskView::IMPORTING {
        return (!reason.is_empty()).then(|| reason.clone());
    }
    match quiet.contains(&&*disk.state) {
        true if disk.warnings.is_empty() => None,
        true => Some(format!("disk {name}{colon}{reason}")),
        false if disk.reason.is_empty() => Some(format!("disk {name} is {}", disk.state)),
        false => Some(format!("disk {name}: {}", disk.reason)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::shard::messages::RouteView;

    fn disk(state: &str, requested: &str, effective: &str, dirty: Option<u64>) -> DiskView {
        let view = json!({
            "name": "d", "volume": "v", "size_bytes": 1 << 20, "logical_block_bytes": 512, "requested": requested, "effective": effective,
            "owner": "n1", "epoch": 7, "replicas": ["n2"], "state": state, "reason": "", "uris": [],
        });
        let view: DiskView = serde_json::from_value(view).unwrap();
        let detail = dirty.map(|dirty_bytes| DiskStatus { dirty_bytes, ..DiskStatus::default() });
        DiskView { detail, ..view }
    }

    fn node(name: &str, state: &str) -> NodeView {
        let down_since = (state != NodeView::UP).then(|| "2026-11-23T10:00:00Z".to_owned());
        NodeView {
            name: name.into(),
            fault_domain: "r".into(),
            state: state.into(),
            down_since,
            clock_ahead_ms: None,
            peer_address: String::new(),
            media: Vec::new(),
            load: 0,
        }
    }

    fn status(nodes: &[(&str, &str)], disks: Vec<DiskView>) -> NodeStatus {
        NodeStatus {
            node: "n1".into(),
            fault_domain: "r".into(),
            incarnation: 1,
            pid: 1,
            version: String::new(),
            health: Health::default(),
            registry: RegistryView {
                state: RegistryView::CONNECTED.into(),
                reason: String::new(),
                age_seconds: 0.0,
            },
            nodes: nodes.iter().map(|(name, state)| node(name, state)).collect(),
            disks,
            troubles: Vec::new(),
            notices: Vec::new(),
            replicas: Vec::new(),
            shards: Vec::new(),
            exports: Vec::new(),
            nbd: Vec::new(),
            peers: Default::default(),
        }
    }

    fn line(status: &NodeStatus) -> String {
        judge(status, &[]).to_string()
    }

    const UP: [(&str, &str); 2] = [("n1", "up"), ("n2", "up")];
    const LOST: [(&str, &str); 2] = [("n1", "up"), ("n2", "down")];

    #[test]
    fn all_is_well_when_everything_is_as_requested() {
        let dirty = disk("serving", "write-back+1", "write-back+1", Some(4096));
        assert_eq!(line(&status(&UP, vec![dirty])), "ok");
        let closed = DiskView { owner: None, ..disk("closed", "write-back+1", "", None) };
        assert_eq!(line(&status(&UP, vec![closed])), "ok");
        let compacting =
            DiskView { reason: "25 % copied".into(), ..disk(DiskView::COMPACTING, "write-back+1", "", None) };
        assert_eq!(line(&status(&UP, vec![compacting])), "ok");
    }

    #[test]
    fn a_volume_that_nobody_serves_is_named_with_the_reason() {
        let mut status = status(&UP, Vec::new());
        let trouble = VolumeTrouble { volume: "v".into(), reason: "nobody coordinates it".into() };
        status.troubles = vec![trouble];
        assert_eq!(line(&status), "degraded: volume v is not served: nobody coordinates it");
        let waits = DiskView {
            reason: coordination::not_served("v"),
            ..disk("degraded", "write-back+1", "write-back+1", Some(0))
        };
        status.disks = vec![waits.clone(), waits];
        assert_eq!(
            line(&status),
            "degraded: volume v is not served (2 disks wait for it): nobody coordinates it",
            "once for all"
        );
    }

    #[test]
    fn a_volume_that_is_served_may_have_problems_all_the_same() {
        let mut status = status(&UP, Vec::new());
        let mounted = "n2: /dev/sdb is mounted at /mnt, and not by Weir".to_owned();
        status.notices = vec![VolumeTrouble { volume: "v".into(), reason: mounted }];
        let mut redirected = disk("serving", "write-back+1", "write-back+1", Some(0));
        let reasons = [("redirected", true), ("no-disk-connectivity", false)];
        let reasons = reasons.map(|(flag, benign)| RouteReason { flag: flag.into(), benign });
        let route =
            RouteView { state: "block-redirected".into(), reasons: reasons.to_vec(), ..RouteView::default() };
        redirected.detail.as_mut().unwrap().route = Some(route);
        status.disks = vec![redirected.clone()];
        let said = "degraded: volume v: n2: /dev/sdb is mounted at /mnt, and not by Weir";
        assert_eq!(line(&status), format!("{said}; disk d is block-redirected: no-disk-connectivity"));
        let moved = DiskView { state: "closing".into(), ..redirected.clone() };
        status.disks = vec![redirected.clone(), redirected, moved];
        let all = "2 disks of volume v on n1 are block-redirected: no-disk-connectivity";
        assert_eq!(line(&status), format!("{said}; {all}"));
    }

    #[test]
    fn clocks_that_differ_are_named() {
        let mut status = status(&UP, Vec::new());
        let mut set = |ahead: &[i64]| {
            status.nodes.resize_with(ahead.len(), || node("n3", "up"));
            for (node, ahead) in status.nodes.iter_mut().zip(ahead) {
                node.clock_ahead_ms = Some(*ahead);
            }
            line(&status)
        };
        assert_eq!(set(&[0, 2_000]), "ok");
        let two = set(&[0, -3_600_000]);
        assert!(
            two.starts_with("degraded: the clock of node n2 is about 1 h behind that of n1; set"),
            "{two}"
        );
        let three = set(&[0, 5, 3_600_000]);
        assert!(three.contains("n3 is about 1 h ahead of that of the other nodes"), "{three}");
    }

    #[test]
    fn data_in_fewer_copies_than_the_policy_is_at_risk_while_it_is_dirty() {
        let lost = |dirty| disk("degraded", "write-back+1", "write-back+1", Some(dirty));
        let said = line(&status(&LOST, vec![lost(12 << 20)]));
        assert!(
            said.starts_with("at risk: disk d: 12 MiB of acknowledged writes only on node n1; "),
            "{said}"
        );
        let said = line(&status(&LOST, vec![lost(0)]));
        assert!(said.starts_with("degraded: disk d is degraded; node n2 is down since 2026-11-23"), "{said}");
        // It is up again, and its copy is gone.
        let again = DiskView { lost_replicas: vec!["n2".into()], ..lost(1) };
        let said = line(&status(&UP, vec![again]));
        assert!(said.starts_with("at risk: disk d: 1 B of acknowledged writes only on node n1; "), "{said}");
        // Another node has taken it over, and its storage is away.
        let unopened = DiskView {
            undestaged_bytes: Some(1 << 10),
            ..disk("opening", "write-back+1", "write-back+1", None)
        };
        let said = line(&status(&LOST, vec![unopened]));
        assert!(
            said.starts_with("at risk: disk d: 1 KiB of acknowledged writes only on node n1; "),
            "{said}"
        );
        let three = [("n1", "up"), ("n2", "up"), ("n3", "down")];
        let two = DiskView {
            replicas: vec!["n2".into(), "n3".into()],
            ..disk("degraded", "write-back+2", "write-back+2", Some(1))
        };
        let said = line(&status(&three, vec![two]));
        assert!(
            said.starts_with("at risk: disk d: 1 B of acknowledged writes in 2 copies instead of 3"),
            "{said}"
        );
        let alone =
            DiskView { replicas: Vec::new(), ..disk("serving", "write-back+0", "write-back+0", Some(9)) };
        let said = line(&status(&UP, vec![alone]));
        assert_eq!(said, "at risk: disk d: 9 B of acknowledged writes only on node n1");
    }

    #[test]
    fn an_owner_that_is_gone_leaves_its_replica_alone() {
        let gone = [("n1", "down"), ("n2", "up")];
        let orphan = disk(DiskView::TAKEOVER, "write-back+1", "write-back+1", None);
        let said = line(&status(&gone, vec![orphan]));
        assert!(said.starts_with("at risk: disk d: acknowledged writes only on node n2"), "{said}");
        let lost = disk(DiskView::UNAVAILABLE, "write-back+1", "write-back+1", None);
        let said = line(&status(&gone, vec![lost]));
        assert!(said.starts_with("at risk: disk d is unavailable: no copy"), "{said}");
        let through = disk(DiskView::TAKEOVER, "write-through", "write-through", None);
        let said = line(&status(&gone, vec![DiskView { reason: "owner n1 is gone".into(), ..through }]));
        assert!(said.starts_with("degraded: disk d: owner n1 is gone"), "{said}");
    }

    #[test]
    fn less_than_requested_is_degraded_and_says_why() {
        let fallen = disk("degraded", "write-back+1", "write-through", Some(0));
        let fallen = DiskView { reason: "not enough peers".into(), replicas: Vec::new(), ..fallen };
        let said = line(&status(&UP, vec![fallen.clone()]));
        assert_eq!(said, "degraded: disk d has write-through, write-back+1 is requested: not enough peers");
        let impossible = DiskView { warnings: vec!["write-back+2 needs 2 other nodes".into()], ..fallen };
        let said = line(&status(&UP, vec![impossible.clone()]));
        assert_eq!(said, "degraded: disk d: write-back+2 needs 2 other nodes");
        let closed = DiskView {
            state: "closed".into(),
            effective: String::new(),
            reason: String::new(),
            ..impossible
        };
        assert_eq!(line(&status(&UP, vec![closed])), "degraded: disk d: write-back+2 needs 2 other nodes");
        let silent = disk(DiskStatus::SILENT, "write-back+1", "write-back+1", None);
        let silent = DiskView { reason: "owner n1 does not answer".into(), ..silent };
        assert_eq!(line(&status(&UP, vec![silent])), "degraded: disk d: owner n1 does not answer");
    }

    #[test]
    fn a_registry_without_this_nodes_cluster_is_named() {
        let mut status = status(&UP, Vec::new());
        status.registry.reason = "the registry has no cluster".into();
        assert_eq!(line(&status), "degraded: the registry has no cluster");
    }

    #[test]
    fn a_backing_that_is_gone_comes_before_a_registry_that_is_away() {
        let mut ill = disk("serving", "write-through", "write-through", Some(0));
        ill.detail.as_mut().unwrap().faults = vec!["its backing file /v/d.raw was deleted".into()];
        let mut status = status(&UP, vec![ill]);
        status.registry =
            RegistryView { state: RegistryView::AWAY.into(), reason: "x".into(), age_seconds: 12.3 };
        let health = judge(&status, &["the audit log is full".into()]);
        assert_eq!(health.level, HealthLevel::AtRisk);
        assert_eq!(
            health.reasons,
            [
                "disk d: its backing file /v/d.raw was deleted",
                "the registry has been away for 12 s",
                "the audit log is full"
            ]
        );
    }
}
