//! What the API does: everything an operator can ask of a node.

mod measured;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use weir_cluster::events::Events;
use weir_cluster::ownership;
use weir_cluster::placement;
use weir_cluster::records::{
    DiskRecord, Medium, NodeRef, Policy, Record, Source, Spread, VolumeKind, VolumeRecord, check_name, keys,
};
use weir_cluster::registry::RegistryError;
use weir_volume::DirVolume;

use crate::api::{
    ApiError, ApiErrorKind, CreateDisk, CreateVolume, Delete, Deleted, DiskView, EventView, Export, Follow,
    Move, Moved, NodeStatus, NodeView, Resize, SetPolicy, ShardView, VolumeView,
};
use crate::control::change::{ChangeError, read};
use crate::control::decide::is_live;
use crate::control::disk::Request;
use crate::control::node::{blocking, random, unavailable};
use crate::control::{Node, Tasks, unfinished};
use crate::shard::messages::DiskStatus;

/// Events that are shown.
const EVENTS: usize = 200;

/// Longest wait for this node's view to show a disk that is in the registry.
const VIEW_LAG: Duration = Duration::from_secs(10);

/// What the API can do. Cheap to clone.
#[derive(Clone)]
pub struct Operations {
    node: Arc<Node>,
    tasks: Arc<Tasks>,
    events: Arc<Events>,
}

type Answer<T> = Result<T, ApiError>;

impl Operations {
    /// Operations on `node`.
    #[must_use]
    pub fn new(node: Arc<Node>, tasks: Arc<Tasks>) -> Operations {
        let events = Arc::new(Events::new(Arc::clone(&node.registry), node.session.node_ref()));
        Operations { node, tasks, events }
    }

    fn me(&self) -> NodeRef {
        self.node.session.node_ref()
    }

    /// What this node says about itself and the cluster.
    pub async fn status(&self) -> NodeStatus {
        let statuses = self.node.shards.status().await;
        let me = self.me();
        NodeStatus {
            node: me.node.clone(),
            fault_domain: self.node.config.fault_domain.clone(),
            incarnation: me.incarnation,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            registry: match self.node.registry.get(&keys::node(&me.node)).await {
                Ok(_) => "connected".to_owned(),
                Err(error) => error.to_string(),
            },
            nodes: self.nodes(),
            disks: self.node.world.disks.now().values().map(|record| self.view(record, &statuses)).collect(),
            shards: self.shards(),
            replicas: statuses.into_iter().filter(|status| status.role == "replica").collect(),
            exports: self.node.uris_on(&me.node, ""),
        }
    }

    /// How this node's shards turn. Never waits for one.
    #[must_use]
    pub fn shards(&self) -> Vec<ShardView> {
        let health = self.node.shards.health();
        health.iter().enumerate().map(|(number, look)| ShardView::new(number, look)).collect()
    }

    /// What this node counts, for Prometheus. Never waits for a shard.
    #[must_use]
    pub fn metrics(&self) -> String {
        crate::metrics::to_prometheus(&self.node.config.name, &self.shards())
    }

    /// The nodes that live, and those that are gone and still own something.
    fn nodes(&self) -> Vec<NodeView> {
        let live = self.node.world.nodes.now();
        let mut nodes: Vec<_> = live
            .values()
            .map(|record| NodeView {
                name: record.name.clone(),
                fault_domain: record.fault_domain.clone(),
                state: "up".to_owned(),
                peer_address: record.peer_address.to_string(),
                media: record.media.clone(),
                load: record.load,
            })
            .collect();
        let disks = self.node.world.disks.now();
        let owners = disks.values().filter_map(|record| record.owner.as_ref());
        for owner in owners.filter(|owner| !live.contains_key(&owner.node)) {
            if nodes.iter().all(|node| node.name != owner.node) {
                nodes.push(NodeView {
                    name: owner.node.clone(),
                    fault_domain: String::new(),
                    state: "down".to_owned(),
                    peer_address: String::new(),
                    media: Vec::new(),
                    load: 0,
                });
            }
        }
        nodes.sort_by(|left, right| left.name.cmp(&right.name));
        nodes
    }

    /// All volumes.
    ///
    /// # Errors
    /// This, like all operations: what is wrong and what to do.
    pub async fn volumes(&self) -> Answer<Vec<VolumeView>> {
        let volumes = self.node.registry.list(keys::VOLUMES).await.map_err(unavailable)?;
        let records = volumes.entries.iter().filter_map(|entry| VolumeRecord::of(entry).ok());
        Ok(records.map(|record| self.volume_view(&record)).collect())
    }

    fn volume_view(&self, record: &VolumeRecord) -> VolumeView {
        VolumeView {
            name: record.name.clone(),
            kind: "dir".to_owned(),
            path: record.path.clone(),
            disks: self.node.world.disks.now().values().filter(|disk| disk.volume == record.name).count(),
        }
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn create_volume(&self, wanted: CreateVolume) -> Answer<VolumeView> {
        if wanted.kind != "dir" {
            let message = format!("{:?} is not a kind of volume; use dir", wanted.kind);
            return Err(ApiError::new(ApiErrorKind::Invalid, message));
        }
        let mut record =
            VolumeRecord { name: wanted.name, kind: VolumeKind::Dir, path: wanted.path, id: random() };
        record.check().map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        let (path, new) = (record.path.clone(), record.id);
        let identified = blocking(move || DirVolume::open(path)?.identify(new)).await;
        record.id = identified.map_err(|error| {
            error.hint("the directory must exist, on this node and on every other that is to serve its disks")
        })?;
        match self.node.registry.transact(record.create(keys::volume(&record.name))).await {
            Ok(_) => Ok(self.volume_view(&record)),
            Err(RegistryError::Conflict { .. }) => {
                Err(ApiError::new(ApiErrorKind::Exists, format!("there is a volume {} already", record.name)))
            }
            Err(error) => Err(unavailable(error)),
        }
    }

    /// All disks.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn disks(&self) -> Answer<Vec<DiskView>> {
        let statuses = self.node.shards.status().await;
        let disks = self.node.registry.list(keys::DISKS).await.map_err(unavailable)?;
        let records = disks.entries.iter().filter_map(|entry| DiskRecord::of(entry).ok());
        Ok(records.map(|record| self.view(&record, &statuses)).collect())
    }

    /// One disk.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn disk(&self, name: &str) -> Answer<DiskView> {
        let record = self.record(name).await?;
        let view = self.view(&record, &self.node.shards.status().await);
        Ok(DiskView { allocated: self.allocated(&record).await, ..view })
    }

    /// What the disk takes up in its volume; absent where it is a device, or cannot be looked at from here.
    async fn allocated(&self, record: &DiskRecord) -> Option<u64> {
        let Source::File { name } = &record.source else { return None };
        let (directory, name) = (self.node.volume(&record.volume).await.ok()?.path, name.clone());
        blocking(move || DirVolume::open(directory)?.allocated(&name)).await.ok()
    }

    async fn record(&self, name: &str) -> Answer<DiskRecord> {
        match read(&*self.node.registry, name).await {
            Ok((_, record)) => Ok(record),
            Err(error @ ChangeError::NoDisk(_)) => {
                Err(ApiError::from(error).hint("`weir disk list` shows those that there are"))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn view(&self, record: &DiskRecord, statuses: &[DiskStatus]) -> DiskView {
        let me = self.me();
        let mine = record.owner.as_ref() == Some(&me);
        let own = |status: &&DiskStatus| status.disk == record.name && status.role == "owner";
        let detail = statuses.iter().find(own).filter(|_| mine).cloned();
        let (state, reason) = match (&record.owner, &detail) {
            (None, _) => ("closed".to_owned(), String::new()),
            (Some(_), Some(detail)) => (detail.state.clone(), detail.reason.clone()),
            (Some(_), None) if mine => self.not_open(&record.name),
            (Some(owner), None) if is_live(&self.node.world.nodes.now(), owner) => {
                ("owned".to_owned(), String::new())
            }
            (Some(owner), None) => self.orphan(record, owner),
        };
        let uris = match &record.owner {
            Some(owner) if state != "unavailable" && (!mine || detail.is_some()) => {
                self.node.uris_on(&owner.node, &record.name)
            }
            _ => Vec::new(),
        };
        let spread = record.owner.as_ref().map_or_else(Spread::default, |owner| {
            let replicas = record.replicas.iter().map(|replica| &*replica.node);
            placement::spread(&owner.node, replicas, &self.node.world.nodes.now())
        });
        DiskView {
            name: record.name.clone(),
            volume: record.volume.clone(),
            size: record.size,
            allocated: None,
            logical_block: record.logical_block,
            requested: record.policy.to_string(),
            effective: record.owner.as_ref().map(|_| effective(record, spread)).unwrap_or_default(),
            medium: record.medium,
            owner: record.owner.as_ref().map(|owner| owner.node.clone()),
            epoch: record.epoch,
            replicas: record.replicas.iter().map(|replica| replica.node.clone()).collect(),
            inside: spread.inside,
            outside: spread.outside,
            follower: record.follower.as_ref().map(|follower| follower.node.clone()),
            state,
            reason,
            uris,
            detail,
        }
    }

    /// A disk that belongs to this node, and is not open here.
    fn not_open(&self, disk: &str) -> (String, String) {
        let (state, reason) = match self.node.here.unreleased().contains(disk) {
            true => {
                ("closed", "it holds nothing dirty, but the registry does not know yet that it is closed")
            }
            false => (
                DiskStatus::OPENING,
                "its owner has not opened it yet; if this persists, see that node's log file",
            ),
        };
        (state.to_owned(), reason.to_owned())
    }

    /// A disk whose owner is gone: on its way to another node, or lost.
    fn orphan(&self, record: &DiskRecord, owner: &NodeRef) -> (String, String) {
        use crate::control::decide::{Decision, Local, Situation, decide};
        let live = self.node.world.nodes.now();
        let me = self.me();
        let situation = Situation {
            me: &me,
            live: &live,
            local: Local::Closed,
            // Only its node knows, and says so when it does not.
            has_copy: true,
            owner_stopped: self.node.world.has_stopped(owner),
            owner_gone_since: None,
            now: weir_block::Nanos::now(),
            fence_grace: self.node.config.lease.fence_grace.0,
        };
        match decide(Some(record), &situation) {
            Decision::Unavailable(reason) => ("unavailable".to_owned(), reason),
            _ => ("waiting".to_owned(), format!("{owner} is gone; another node takes over")),
        }
    }

    /// Makes a disk.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn create_disk(&self, wanted: CreateDisk) -> Answer<DiskView> {
        let invalid = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Invalid, error.to_string());
        check_name(&wanted.name).map_err(|error| invalid(&error))?;
        let policy: Policy = parse_policy(&wanted.policy)?;
        let source = Source::File { name: wanted.name.clone() };
        let CreateDisk { name, volume, size, logical_block, medium, .. } = wanted;
        let mut record = DiskRecord::new(&name, &volume, source, size, logical_block, policy);
        record.id = random();
        record.medium = medium;
        record.check().map_err(|error| invalid(&error))?;
        self.check_medium(medium)?;
        let exists = || ApiError::new(ApiErrorKind::Exists, format!("there is a disk {name} already"));
        let known = self.node.registry.list(&keys::disk(&name)).await.map_err(unavailable)?;
        if known.entries.iter().any(|entry| entry.key == keys::disk(&name)) {
            return Err(exists());
        }
        // Above every epoch that an earlier disk of this name can have had, since each of those cost a revision: what is
        // left of it anywhere is older than this one (P2).
        record.epoch = known.revision;
        unfinished::make(&self.node, &record).await?;
        let text = format!("in volume {volume}, {size} bytes, {policy}, {medium}");
        self.node.journal.tell("disk-created", &name, text);
        Ok(self.view(&record, &[]))
    }

    /// A disk on a medium that nobody has could never be opened.
    fn check_medium(&self, medium: Medium) -> Answer<()> {
        if self.node.world.nodes.now().values().any(|node| node.offers(medium)) {
            return Ok(());
        }
        let message = format!("no node that is up keeps write logs on {medium}");
        Err(ApiError::new(ApiErrorKind::Refused, message)
            .hint("`weir status` shows what each node offers; its configuration says how much"))
    }

    /// Changes the requested policy.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn set_policy(&self, name: &str, wanted: SetPolicy) -> Answer<DiskView> {
        let policy = parse_policy(&wanted.policy)?;
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "policy", &wanted).await;
        }
        self.ask(name, |done| Request::SetPolicy { policy, done }).await?;
        self.disk(name).await
    }

    /// Makes a node the owner.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn export(&self, name: &str, wanted: Export) -> Answer<DiskView> {
        self.record(name).await?;
        let me = self.me().node;
        match &wanted.on {
            Some(on) if *on != me => {
                let other = self.live_node(on)?;
                self.forward(&other, name, "export", &wanted).await
            }
            _ => {
                let accept_loss = wanted.accept_loss;
                self.ask(name, |done| Request::Export { accept_loss, done }).await?;
                self.disk(name).await
            }
        }
    }

    /// Moves a disk to another node.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn move_disk(&self, name: &str, wanted: Move) -> Answer<Moved> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "move", &wanted).await;
        }
        let to = self.live_node(&wanted.to)?;
        let from = self.record(name).await?.owner;
        let dirty_bytes = match &from {
            Some(from) if *from == self.me() && to != *from => {
                self.ask(name, |done| Request::Move { to: to.clone(), done }).await?
            }
            _ => 0,
        };
        // The new owner opens it by itself; asking it waits until it has.
        let export = Export { on: Some(to.node.clone()), accept_loss: false };
        let disk = self.export(name, export).await?;
        Ok(Moved { from: from.map(|from| from.node), to: to.node, dirty_bytes, disk })
    }

    /// Lets clients on another node use a disk before it is there.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn follow(&self, name: &str, wanted: Follow) -> Answer<DiskView> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "follow", &wanted).await;
        }
        let to = wanted.to.map(|to| self.live_node(&to)).transpose()?;
        self.ask(name, |done| Request::Follow { to, done }).await?;
        self.disk(name).await
    }

    fn live_node(&self, name: &str) -> Answer<NodeRef> {
        let known = self.node.world.nodes.now().get(name).map(|record| record.node_ref());
        known.ok_or_else(|| {
            ApiError::new(ApiErrorKind::NotFound, format!("there is no node {name}, or it is down"))
                .hint("`weir status` shows the nodes")
        })
    }

    /// Grows a disk.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn resize(&self, name: &str, wanted: Resize) -> Answer<DiskView> {
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "resize", &wanted).await;
        }
        let size = wanted.size;
        self.ask(name, |done| Request::Resize { size, done }).await?;
        self.disk(name).await
    }

    /// Deletes a disk and its data, or says what would be deleted.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn delete(&self, name: &str, wanted: Delete) -> Answer<Deleted> {
        let record = match self.record(name).await {
            Err(error) if error.kind == ApiErrorKind::NotFound && !wanted.dry_run => {
                return self.delete_leftover(name).await?.ok_or(error);
            }
            record => record?,
        };
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "delete", &wanted).await;
        }
        let path = self
            .node
            .backing_path(&record)
            .await
            .map_err(|reason| ApiError::new(ApiErrorKind::Failed, reason))?;
        let allocated = self.allocated(&record).await.unwrap_or(0);
        self.check_deletable(&record, wanted.force).await?;
        let deleted = Deleted { disk: name.to_owned(), path, allocated, done: !wanted.dry_run };
        if wanted.dry_run {
            return Ok(deleted);
        }
        if record.owner.as_ref() == Some(&self.me()) {
            self.ask(name, |done| Request::Release { done }).await?;
        }
        self.remove(name, wanted.force).await?;
        self.node.journal.tell("disk-deleted", name, format!("{} is gone", deleted.path.display()));
        Ok(deleted)
    }

    /// What a process that has ended left of a disk without a record.
    async fn delete_leftover(&self, name: &str) -> Answer<Option<Deleted>> {
        let path = unfinished::finish_others(&self.node, name).await?;
        Ok(path.map(|path| Deleted { disk: name.to_owned(), path, allocated: 0, done: true }))
    }

    async fn check_deletable(&self, record: &DiskRecord, force: bool) -> Answer<()> {
        if force {
            return Ok(());
        }
        let refuse = |reason: String| {
            Err(ApiError::new(ApiErrorKind::Refused, format!("disk {}: {reason}", record.name))
                .hint("--force deletes it all the same"))
        };
        let mine = record.owner.as_ref() == Some(&self.me());
        let statuses = self.node.shards.status().await;
        let clients = statuses.iter().find(|status| status.disk == record.name && status.role == "owner");
        match (&record.owner, clients.map_or(0, |status| status.clients)) {
            (Some(_), clients @ 1..) if mine => refuse(format!("{clients} clients are connected to it")),
            (Some(owner), _) if !mine => {
                refuse(format!("its owner {owner} is gone; what was in its log may be lost"))
            }
            _ => Ok(()),
        }
    }

    /// Only while nobody owns it: somebody may have opened it since we looked.
    async fn remove(&self, name: &str, force: bool) -> Answer<()> {
        let (entry, record) = read(&*self.node.registry, name).await?;
        let owner_lives =
            record.owner.as_ref().is_some_and(|owner| is_live(&self.node.world.nodes.now(), owner));
        if let Some(owner) = record.owner.clone().filter(|_| owner_lives || !force) {
            return Err(ownership_error(ownership::Refusal::Owned { owner }));
        }
        unfinished::remove(&self.node, &entry, &record).await
    }

    /// What happened lately.
    ///
    /// # Errors
    /// As [`Operations::volumes`].
    pub async fn events(&self) -> Answer<Vec<EventView>> {
        let events = self.events.recent(EVENTS).await.map_err(unavailable)?;
        let view = |event: weir_cluster::records::EventRecord| EventView {
            at_ms: event.time_unix_ms,
            node: event.node,
            subject: event.subject,
            kind: event.kind,
            text: event.text,
        };
        Ok(events.into_iter().map(view).collect())
    }

    /// Asks the task of a disk that is in the registry, as the caller has seen. One that was made a moment ago may not have reached
    /// this node's view, and without being there it has no task that lasts.
    async fn ask<T>(
        &self,
        name: &str,
        request: impl FnOnce(oneshot::Sender<Answer<T>>) -> Request,
    ) -> Answer<T> {
        let mut disks = self.node.world.disks.changes();
        let seen = disks.wait_for(|known| known.contains_key(name));
        // Gone again, or the registry is slow to tell: the task says which.
        let _ = tokio::time::timeout(VIEW_LAG, seen).await;
        self.tasks.ask(name, &self.node, request).await
    }

    /// The living owner of a disk, when that is another node.
    async fn owner_elsewhere(&self, name: &str) -> Answer<Option<NodeRef>> {
        let owner = self.record(name).await?.owner.filter(|owner| *owner != self.me());
        Ok(owner.filter(|owner| is_live(&self.node.world.nodes.now(), owner)))
    }

    /// Asks the API of the node that it concerns.
    async fn forward<T: serde::de::DeserializeOwned>(
        &self,
        to: &NodeRef,
        disk: &str,
        what: &str,
        body: &impl serde::Serialize,
    ) -> Answer<T> {
        let api = self.node.world.nodes.now().get(&to.node).map(|record| record.api.clone());
        let Some(api) = api else {
            return Err(ApiError::new(ApiErrorKind::Unavailable, format!("node {} has just gone", to.node)));
        };
        crate::client::ask(&api, disk, what, body).await
    }
}

fn parse_policy(text: &str) -> Answer<Policy> {
    let invalid =
        |error: <Policy as std::str::FromStr>::Err| ApiError::new(ApiErrorKind::Invalid, error.to_string());
    text.parse().map_err(invalid)
}

/// The effective policy, in the form in which one was requested: a strict request is answered with the actual spread.
fn effective(record: &DiskRecord, spread: Spread) -> String {
    let all_up = usize::from(spread.inside) + usize::from(spread.outside) == record.replicas.len();
    match record.effective() {
        Policy::WriteBack(1..) if record.policy.is_strict() && all_up => Policy::Strict(spread).to_string(),
        plain => plain.to_string(),
    }
}

fn ownership_error(refusal: ownership::Refusal) -> ApiError {
    ApiError::from(ChangeError::Refused(refusal))
}
