//! Who coordinates the volumes on LUNs: from the registry's records, and what each node says of its part.
//!
//! A record names a coordinator from its claim on, long before it can serve: it may be fencing the former one for minutes. So a volume
//! counts as served when the node that the record names says so.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::placement::Live;
use weir_cluster::records::{CoordinatorRecord, NodeRef, Record, VolumeKind, VolumeRecord, keys};
use weir_volume::lun::claim::Phase;

use super::owners::Said;
use super::{Answer, Operations};
use crate::api::{ApiError, ApiErrorKind, NodeNotice, Owned, VolumePart};
use crate::control::decide::is_live;
use crate::control::node::blocking;

/// Longest wait for a new volume to be served.
const SERVED: Duration = Duration::from_secs(30);
/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Longest wait for a filesystem to say how full it is.
const SPACE: Duration = Duration::from_millis(200);

/// Phases of a node on its way to serve a volume.
const TRIES: [Phase; 4] = [Phase::Claiming, Phase::Fencing, Phase::Listening, Phase::Mounting];

/// Where the coordination of a volume stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Coordination {
    /// The node that coordinates it.
    pub coordinator: Option<String>,
    /// Why nobody serves it; empty if a node does.
    pub trouble: String,
    /// The filesystem's bytes, and those that are free.
    pub space: Option<(u64, u64)>,
    /// What the registry has.
    pub record: Option<CoordinatorRecord>,
    /// Problems of live nodes with it, by node, while somebody serves it.
    pub notices: Vec<NodeNotice>,
}

impl Operations {
    /// This node's part in the coordination of volumes.
    pub(super) async fn volume_parts(&self) -> Vec<VolumePart> {
        let mut parts = Vec::new();
        for volume in self.lun_volumes() {
            let state = self.node.coordinators.get(&volume.name);
            let space = match state.mounted {
                Some((_, mounted)) => {
                    let look = blocking(move || {
                        mounted.space().map_err(|error| weir_volume::VolumeError::Io {
                            what: "measuring",
                            path: mounted.lun().to_path_buf(),
                            source: std::io::Error::other(error),
                        })
                    });
                    tokio::time::timeout(SPACE, look).await.ok().and_then(Result::ok)
                }
                None => None,
            };
            let (phase, has_path) = (state.phase.name().to_owned(), state.lun.is_some());
            parts.push(VolumePart { volume: volume.name, phase, notice: state.notice, has_path, space });
        }
        parts
    }

    pub(super) fn lun_volumes(&self) -> Vec<VolumeRecord> {
        let volumes = self.node.records.volumes.now();
        volumes.values().filter(|volume| volume.kind == VolumeKind::Lun).cloned().collect()
    }

    /// All volumes on LUNs, by name. Nothing is asked where there are none; and nothing is known while the registry is away.
    pub(super) async fn coordinations(&self) -> BTreeMap<String, Coordination> {
        let volumes = self.lun_volumes();
        if volumes.is_empty() {
            return BTreeMap::new();
        }
        let Ok(records) = self.ask_registry(keys::COORDINATORS).await else { return BTreeMap::new() };
        let live = self.node.records.nodes.now();
        let own = Owned { volumes: self.volume_parts().await, ..Owned::default() };
        let said = self.ask_owners(live.values().map(|node| node.node_ref()).collect(), own).await;
        let of = |volume: &VolumeRecord| {
            let key = keys::coordinator(volume.id);
            let entry = records.entries.iter().find(|entry| entry.key == key);
            judge(&volume.name, entry.and_then(|entry| CoordinatorRecord::of(entry).ok()), &live, &said)
        };
        volumes.iter().map(|volume| (volume.name.clone(), of(volume))).collect()
    }

    /// Waits until a node serves a new volume, for a bounded time.
    pub(super) async fn await_served(&self, volume: &str) {
        let deadline = Nanos::now() + SERVED;
        while Nanos::now() < deadline {
            let known = self.coordinations().await;
            if known.get(volume).is_some_and(|known| known.trouble.is_empty()) {
                return;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Refuses what only the coordinator of a volume can do, where there is none: the caller has looked for one elsewhere.
    pub(super) async fn check_coordinated(&self, volume: &str) -> Answer<()> {
        if self.node.volume(volume).await?.kind != VolumeKind::Lun
            || self.node.coordinators.get(volume).mounted.is_some()
        {
            return Ok(());
        }
        let trouble = self.coordinations().await.remove(volume).map(|known| known.trouble);
        let trouble = trouble.filter(|trouble| !trouble.is_empty());
        let message = match trouble {
            Some(trouble) => format!("volume {volume} is not served: {trouble}"),
            None => format!("the coordinator of volume {volume} has just changed"),
        };
        let hint = format!("try again when `weir volume show {volume}` names a coordinator");
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(hint))
    }
}

/// The reason of a disk that looks well and whose volume nobody serves.
pub(super) fn not_served(volume: &str) -> String {
    format!("volume {volume} is not served (`weir volume show {volume}`): what needs its coordinator waits")
}

/// Where a volume stands, by its record and what the nodes say.
fn judge(volume: &str, record: Option<CoordinatorRecord>, live: &Live, said: &Said) -> Coordination {
    let named = record.as_ref().and_then(|record| record.coordinator.clone());
    let living = named.clone().filter(|named| is_live(live, named));
    let part = |node: &NodeRef| said.part(node, volume);
    if let Some(named) = &living {
        match part(named) {
            Some(part) if part.phase == Phase::Serving.name() => {
                let (coordinator, space) = (Some(named.node.clone()), part.space);
                let notices = notices(volume, live, said);
                return Coordination { coordinator, space, record, notices, trouble: String::new() };
            }
            Some(_) => {}
            None if said.is_silent(named) => {
                let trouble = format!("its coordinator {} does not answer", named.node);
                let coordinator = Some(named.node.clone());
                return Coordination { coordinator, trouble, record, ..Coordination::default() };
            }
            None => {}
        }
    }
    let mut reasons = vec!["nobody coordinates it".to_owned()];
    if let Some(gone) = named.filter(|_| living.is_none()) {
        reasons.push(format!("{} is gone", gone.node));
    }
    let mut notices: Vec<&str> = Vec::new();
    for node in live.values().map(|node| node.node_ref()) {
        let Some(part) = part(&node) else { continue };
        let is_news = !part.notice.is_empty() && !notices.contains(&part.notice.as_str());
        let notice = if is_news { format!(": {}", part.notice) } else { String::new() };
        let tries = TRIES.iter().any(|phase| phase.name() == part.phase);
        if tries || living.as_ref() == Some(&node) && part.phase != Phase::Absent.name() {
            reasons.push(format!("{} is trying ({}){notice}", node.node, part.phase));
        } else if is_news {
            reasons.push(format!("{}{notice}", node.node));
        }
        notices.push(&part.notice);
    }
    Coordination { trouble: reasons.join("; "), record, ..Coordination::default() }
}

fn notices(volume: &str, live: &Live, said: &Said) -> Vec<NodeNotice> {
    let all = live.values().map(|node| node.node_ref()).filter_map(|node| {
        let part = said.part(&node, volume).filter(|part| !part.notice.is_empty())?;
        let (has_path, notice) = (part.has_path, part.notice.clone());
        Some(NodeNotice { node: node.node, has_path, notice })
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::control::disk::tests::record_of;

    fn part(phase: &str, notice: &str) -> Option<Owned> {
        let part = VolumePart {
            volume: "v".into(),
            phase: phase.into(),
            notice: notice.into(),
            has_path: true,
            space: Some((9, 4)),
        };
        Some(Owned { volumes: vec![part], ..Owned::default() })
    }

    fn said(parts: &[(&str, Option<Owned>)]) -> (Live, Said) {
        let live = parts.iter().map(|(name, _)| ((*name).to_owned(), record_of(name))).collect();
        let said: BTreeMap<_, _> =
            parts.iter().map(|(name, part)| (NodeRef::new(*name, 1), part.clone())).collect();
        (live, Said::new(said))
    }

    fn record(coordinator: &str) -> Option<CoordinatorRecord> {
        let coordinator = Some(NodeRef::new(coordinator, 1));
        Some(CoordinatorRecord { volume: "v".into(), epoch: 3, coordinator, mounts: Vec::new(), next: None })
    }

    #[test]
    fn a_node_that_only_tries_is_no_coordinator() {
        let trying = part("fencing", "the power switch does not answer");
        let (live, said) = said(&[("a", part("absent", "")), ("b", trying)]);
        for record in [record("b"), record("c")] {
            let found = judge("v", record, &live, &said);
            assert_eq!(found.coordinator, None);
            let words = "b is trying (fencing): the power switch does not answer";
            assert!(found.trouble.contains(words), "{}", found.trouble);
        }
    }

    #[test]
    fn a_volume_is_served_when_its_coordinator_says_so() {
        let (live, all) = said(&[("a", part("absent", "")), ("b", part("serving", ""))]);
        let found = judge("v", record("b"), &live, &all);
        assert_eq!((found.coordinator.as_deref(), found.space), (Some("b"), Some((9, 4))));
        assert_eq!(found.trouble, "");
        assert!(found.notices.is_empty());
        let (live, mounted) =
            said(&[("a", part("absent", "it is mounted at /mnt")), ("b", part("serving", ""))]);
        let found = judge("v", record("b"), &live, &mounted);
        assert_eq!((found.trouble.as_str(), found.notices.len()), ("", 1), "it is served all the same");
        assert_eq!(
            (found.notices[0].node.as_str(), &*found.notices[0].notice),
            ("a", "it is mounted at /mnt")
        );
        let (live, all) = said(&[("a", part("absent", "")), ("b", None)]);
        let found = judge("v", record("b"), &live, &all);
        assert_eq!(found.trouble, "its coordinator b does not answer");
    }

    #[test]
    fn a_reason_that_all_nodes_give_is_told_once() {
        let absent = || part("absent", "no block device of this host has it");
        let (live, said) = said(&[("a", absent()), ("b", absent())]);
        let found = judge("v", None, &live, &said);
        assert_eq!(found.trouble, "nobody coordinates it; a: no block device of this host has it");
    }
}
