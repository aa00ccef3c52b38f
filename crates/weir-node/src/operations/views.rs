//! The views of operators: the cluster, its disks and its nodes. Any node answers, also while the registry or an owner is
//! away.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::membership::SessionState;
use weir_cluster::node_state::Cluster;
use weir_cluster::placement::{self, Live};
use weir_cluster::records::{DiskRecord, Mode, NodeRef, Policy, Record, Source, Spread, VolumeKind, keys};
use weir_cluster::registry::{Listing, RegistryError};

use super::imports::not_imported;
use super::measured::NOTHING;
use super::owners::{Known, Said};
use super::{Answer, Operations, coordination, health};
use crate::api::{
    ApiError, ApiErrorKind, DiskLimit, DiskView, MediumView, NbdView, NodeNotice, NodeStatus, NodeView,
    PeerProtection, RegistryView, VolumeTrouble,
};
use crate::client;
use crate::control::decide::{Decision, Local, Situation, decide, is_live};
use crate::control::provisioning::Files;
use crate::members;
use crate::shard::messages::DiskStatus;

/// Longest wait for the registry where the last known records are sufficient.
const REGISTRY: Duration = Duration::from_secs(1);

/// Longest wait for the storage to say how much a disk takes up.
const STORAGE: Duration = Duration::from_secs(1);

impl Operations {
    /// This node's report on itself and on the cluster.
    pub async fn status(&self) -> NodeStatus {
        let statuses = self.node.shards.status().await;
        let me = self.me();
        let registry = self.registry(self.ask_registry(keys::NODES).await.err());
        let age = (registry.state == RegistryView::AWAY).then_some(registry.age_seconds);
        let known = self.node.records.disks.now();
        let disks = self.views(known.values(), statuses.clone(), age).await;
        let (mut troubles, mut notices) = (Vec::new(), Vec::new());
        for (volume, known) in self.coordinations().await {
            for NodeNotice { node, notice, .. } in known.notices.into_iter().filter(|one| one.has_path) {
                notices.push(VolumeTrouble { volume: volume.clone(), reason: format!("{node}: {notice}") });
            }
            if !known.trouble.is_empty() {
                troubles.push(VolumeTrouble { volume, reason: known.trouble });
            }
        }
        let mut status = NodeStatus {
            node: me.node.clone(),
            fault_domain: self.node.config.fault_domain.clone(),
            incarnation: me.incarnation,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            health: crate::api::Health::default(),
            registry,
            nodes: self.nodes(),
            disks,
            troubles,
            notices,
            shards: self.shards(),
            replicas: statuses.into_iter().filter(|status| status.role == "replica").collect(),
            exports: self.node.uris_on(&me.node, ""),
            nbd: self.node.config.nbd.tcp.iter().map(NbdView::from).collect(),
            peers: match self.node.identity {
                Some(_) => PeerProtection::Tls,
                None => PeerProtection::Plaintext,
            },
        };
        status.health = health::judge(&status, &self.own_faults());
        status
    }

    /// Faults of this node's state directory and keys.
    fn own_faults(&self) -> Vec<String> {
        let audit = self.audit.as_ref().and_then(|audit| audit.fault());
        let identity = self.node.identity.as_ref();
        let unwritten = identity.and_then(|identity| identity.unwritten());
        let refused = identity.and_then(|identity| identity.refused_by_peers());
        audit.into_iter().chain(unwritten).chain(refused).collect()
    }

    /// Asks the registry, and does not wait for long; not at all where it has been away for a while.
    pub(super) async fn ask_registry(&self, prefix: &str) -> Result<Listing, RegistryError> {
        let away = |reason: &str| RegistryError::Unavailable { reason: reason.to_owned() };
        if *self.node.session.state().borrow() == SessionState::Unconfirmed {
            return Err(away("it does not answer"));
        }
        let asked = tokio::time::timeout(REGISTRY, self.node.registry.list(prefix)).await;
        asked.unwrap_or_else(|_| Err(away(&format!("no answer within {REGISTRY:?}"))))
    }

    fn registry(&self, error: Option<RegistryError>) -> RegistryView {
        let (state, reason) = match error {
            None => (RegistryView::CONNECTED, self.without_cluster().unwrap_or_default()),
            Some(RegistryError::Unavailable { reason }) => (RegistryView::AWAY, reason),
            Some(error) => (RegistryView::AWAY, error.to_string()),
        };
        let age_seconds = if state == RegistryView::AWAY { self.registry_age() } else { 0.0 };
        RegistryView { state: state.to_owned(), reason, age_seconds }
    }

    /// Why the registry is taken for one without this node's cluster.
    fn without_cluster(&self) -> Option<String> {
        self.node.identity.as_ref()?.without_cluster()
    }

    /// Refuses what would make a new cluster's records in a registry that is not this node's cluster's.
    pub(super) fn check_cluster(&self) -> Answer<()> {
        let Some(reason) = self.without_cluster() else { return Ok(()) };
        let message = format!("nothing new is made in this registry: {reason}");
        Err(ApiError::new(ApiErrorKind::Refused, message))
    }

    /// The nodes of the cluster, by name.
    pub(super) fn nodes(&self) -> Vec<NodeView> {
        let (live, revoked) = (self.node.records.nodes.now(), self.node.revoked());
        let (states, disks) = (self.node.records.node_states(), self.node.records.disks.now());
        let (cluster, now) =
            (Cluster { states: &states, live: &live, disks: &disks }, weir_task::unix_millis());
        let state = |name: &str| match revoked.contains(name) && live.contains_key(name) {
            true => NodeView::REVOKED.to_owned(),
            false => cluster.state(&self.node.rules, now, name).to_string(),
        };
        let clocks = self.node.clocks.ahead(&self.node.config.name);
        let up = live.values().map(|record| NodeView {
            name: record.name.clone(),
            fault_domain: record.fault_domain.clone(),
            state: state(&record.name),
            down_since: None,
            clock_ahead_ms: clocks.get(&record.name).copied(),
            peer_address: record.peer_address.to_string(),
            media: record.media.iter().map(MediumView::from).collect(),
            load: record.load,
        });
        let away = members::down(&self.node).into_iter();
        let away = away.map(|node| NodeView { state: state(&node.name), ..node });
        let mut nodes: Vec<_> = up.chain(away).collect();
        nodes.sort_by(|left, right| left.name.cmp(&right.name));
        nodes
    }

    /// All disks.
    ///
    /// # Errors
    /// This, like all operations: the problem and the remedy.
    pub async fn disks(&self) -> Answer<Vec<DiskView>> {
        let statuses = self.node.shards.status().await;
        Ok(match self.ask_registry(keys::DISKS).await {
            Ok(listing) => {
                let records: Vec<_> =
                    listing.entries.iter().filter_map(|entry| DiskRecord::of(entry).ok()).collect();
                self.views(&records, statuses, None).await
            }
            Err(_) => {
                let age = Some(self.registry_age());
                self.views(self.node.records.disks.now().values(), statuses, age).await
            }
        })
    }

    /// One disk.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn disk(&self, name: &str) -> Answer<DiskView> {
        let (record, age) = self.known_record(name).await?;
        let statuses = self.node.shards.status().await;
        let allocated = self.allocated(&record, age.is_some());
        let (views, allocated) = tokio::join!(self.views([&record], statuses, age), allocated);
        let view = views.into_iter().next();
        view.map(|view| DiskView { allocated, ..view }).ok_or_else(registry_away)
    }

    /// The record of a disk. If the registry is away: the record as last read, and for how many seconds it has been away.
    pub(super) async fn known_record(&self, name: &str) -> Answer<(DiskRecord, Option<f64>)> {
        let error = match tokio::time::timeout(REGISTRY, self.record(name)).await {
            Ok(Ok(record)) => return Ok((record, None)),
            Ok(Err(error)) if error.kind != ApiErrorKind::Unavailable => return Err(error),
            Ok(Err(error)) => error,
            Err(_) => registry_away(),
        };
        let record = self.node.records.disk(name).ok_or(error)?;
        Ok((record, Some(self.registry_age())))
    }

    /// Seconds since the registry last answered this node.
    fn registry_age(&self) -> f64 {
        (Nanos::now() - self.node.session.heard()).as_secs_f64()
    }

    /// The space of the disk in its volume; absent for a device, or if the file is not accessible from here.
    pub(super) async fn allocated(&self, record: &DiskRecord, registry_is_away: bool) -> Option<u64> {
        let Source::File { name } = &record.source else { return None };
        let volume = match registry_is_away {
            true => self.node.records.volumes.now().get(&record.volume).cloned()?,
            false => self.node.volume(&record.volume).await.ok()?,
        };
        let is_on_lun = volume.kind == VolumeKind::Lun;
        let (files, name) = (Files::of(&self.node, volume), name.clone());
        if is_on_lun
            && !registry_is_away
            && let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await.ok().flatten()
        {
            // Only the coordinator reaches the file.
            let asked = self.forward_within(client::LOOK, &coordinator, &record.name, "", NOTHING);
            // A call of itself: on the coordinator, the way ends.
            let view: DiskView = Box::pin(asked).await.ok()?;
            return view.allocated;
        }
        let look = files.with(move |files| files.allocated(&name));
        tokio::time::timeout(STORAGE, look).await.ok()?.ok()
    }

    /// Disks with what their owners say of them. `registry_age`: the registry is away for so long, in seconds.
    pub(super) async fn views<'a>(
        &self,
        records: impl IntoIterator<Item = &'a DiskRecord>,
        own: Vec<DiskStatus>,
        registry_age: Option<f64>,
    ) -> Vec<DiskView> {
        let records: Vec<_> = records.into_iter().collect();
        let owners: BTreeSet<NodeRef> = records.iter().filter_map(|record| record.owner.clone()).collect();
        let said = self.ask_owners(owners, self.owned_of(own).await).await;
        let coordinations = self.coordinations().await;
        let view = |record: &DiskRecord| {
            let view = DiskView { registry_age_seconds: registry_age, ..self.view(record, &said) };
            let view = if record.importing == 0 { view } else { importing(view) };
            match coordinations.get(&record.volume) {
                Some(known) if !known.trouble.is_empty() => without_coordinator(view),
                _ => view,
            }
        };
        records.into_iter().map(view).collect()
    }

    fn view(&self, record: &DiskRecord, said: &Said) -> DiskView {
        let live = self.node.records.nodes.now();
        let me = self.me();
        let mut undestaged = None;
        let (state, reason, detail) = match &record.owner {
            None => ("closed".to_owned(), String::new(), None),
            Some(owner) if *owner == me || is_live(&live, owner) => match said.of(owner, &record.name) {
                Known::Open(status) => match status.faults.first() {
                    Some(fault) => (DiskStatus::DEGRADED.to_owned(), fault.clone(), Some(status.clone())),
                    None => (status.state.clone(), status.reason.clone(), Some(status.clone())),
                },
                Known::NotOpen { compacting: Some(percent), .. } => {
                    (DiskView::COMPACTING.to_owned(), format!("{percent} % copied"), None)
                }
                Known::NotOpen { unreleased, why, undestaged: log, .. } => {
                    undestaged = log.filter(|_| record.mode == Mode::WriteBack);
                    not_open(unreleased, why)
                }
                Known::Silent => {
                    (DiskStatus::SILENT.to_owned(), format!("owner {} does not answer", owner.node), None)
                }
            },
            Some(owner) => self.orphan(record, owner),
        };
        let uris = match &record.owner {
            Some(owner) if detail.is_some() || state == DiskStatus::SILENT => {
                self.node.uris_on(&owner.node, &record.name)
            }
            _ => Vec::new(),
        };
        let spread = record.owner.as_ref().map_or_else(Spread::default, |owner| {
            let replicas = record.replicas.iter().map(|replica| &*replica.node);
            placement::spread(&owner.node, replicas, &live)
        });
        DiskView {
            name: record.name.clone(),
            volume: record.volume.clone(),
            export: match &record.source {
                Source::Export { name } => Some(name.clone()),
                _ => None,
            },
            size: record.size,
            allocated: None,
            logical_block: record.logical_block,
            requested: record.policy.to_string(),
            effective: match &record.owner {
                Some(_) if state != DiskView::COMPACTING => effective(record, spread),
                _ => String::new(),
            },
            medium: record.medium,
            limit: record.limit.map(DiskLimit::from),
            owner: record.owner.as_ref().map(|owner| owner.node.clone()),
            epoch: record.epoch,
            replicas: record.replicas.iter().map(|replica| replica.node.clone()).collect(),
            lost_replicas: lost_replicas(record, &live),
            inside: spread.inside,
            outside: spread.outside,
            follower: record.follower.as_ref().map(|follower| follower.node.clone()),
            state,
            reason,
            warnings: placement::shortfall(record, &live).into_iter().collect(),
            uris,
            detail,
            undestaged_bytes: undestaged,
            registry_age_seconds: None,
        }
    }

    /// A disk whose owner is gone: on its way to another node, or lost.
    pub(super) fn orphan(
        &self,
        record: &DiskRecord,
        owner: &NodeRef,
    ) -> (String, String, Option<DiskStatus>) {
        let live = self.node.records.nodes.now();
        let me = self.me();
        let situation = Situation {
            me: &me,
            live: &live,
            barred: &self.node.barred(),
            local: Local::Closed,
            // Only its node knows, and says so when it does not.
            has_copy: true,
            owner_stopped: self.node.records.has_stopped(owner),
            owner_gone_since: None,
            vacant_since: None,
            now: Nanos::now(),
            fence_grace: self.node.config.lease.fence_grace.0,
        };
        match decide(Some(record), &situation) {
            Decision::Unavailable(reason) => (DiskView::UNAVAILABLE.to_owned(), reason, None),
            _ => {
                let reason = format!("owner {} is gone; another node takes over", owner.node);
                (DiskView::TAKEOVER.to_owned(), reason, None)
            }
        }
    }
}

fn registry_away() -> ApiError {
    ApiError::new(
        ApiErrorKind::Unavailable,
        "the registry does not answer, and this node does not know the disk",
    )
    .hint("try again when the registry is back")
}

/// The replicas whose copy of the log is gone.
fn lost_replicas(record: &DiskRecord, live: &Live) -> Vec<String> {
    let has_copy = |replica: &&NodeRef| {
        live.get(&replica.node).is_some_and(|now| record.counts(replica, &now.node_ref()))
    };
    let lost = record.replicas.iter().filter(|replica| !has_copy(replica));
    lost.map(|replica| replica.node.clone()).collect()
}

/// A disk that looks well, whose volume nobody serves: what it has no blocks for waits, and nothing may be destaged.
fn without_coordinator(view: DiskView) -> DiskView {
    if view.state != "serving" {
        return view;
    }
    let reason = coordination::not_served(&view.volume);
    DiskView { state: DiskStatus::DEGRADED.to_owned(), reason, ..view }
}

/// A disk whose import is not complete, and which nobody else can open. With a client, that is the import.
fn importing(view: DiskView) -> DiskView {
    let clients = view.detail.as_ref().map_or(0, |detail| detail.clients);
    let (why, hint) = not_imported(&view.name);
    let reason = match (clients, view.reason.as_str()) {
        (0, "") => format!("{why}; {hint}"),
        (0, trouble) => format!("{why}; {hint}; {trouble}"),
        (_, trouble) => trouble.to_owned(),
    };
    DiskView { state: DiskView::IMPORTING.to_owned(), reason, ..view }
}

/// A disk that its owner does not have open.
fn not_open(unreleased: bool, why: Option<&str>) -> (String, String, Option<DiskStatus>) {
    let (state, reason) = match unreleased {
        true => ("closed", "it holds nothing dirty, but the registry does not know yet that it is closed"),
        false => (
            DiskStatus::OPENING,
            why.unwrap_or("its owner has not opened it yet; if this persists, see that node's log file"),
        ),
    };
    (state.to_owned(), reason.to_owned(), None)
}

/// The effective policy, in the form in which one was requested: a strict request is answered with the actual spread.
fn effective(record: &DiskRecord, spread: Spread) -> String {
    let all_up = usize::from(spread.inside) + usize::from(spread.outside) == record.replicas.len();
    match record.effective() {
        Policy::WriteBack(1..) if record.policy.is_strict() && all_up => Policy::Strict(spread).to_string(),
        plain => plain.to_string(),
    }
}
