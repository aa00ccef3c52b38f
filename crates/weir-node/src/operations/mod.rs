//! The operations of the API: all that an operator can request of a node.

mod cluster;
mod compaction;
mod coordination;
mod delete;
mod handover;
pub mod health;
pub(crate) mod imports;
mod lun_identity;
mod luns;
mod measured;
mod nbd;
mod nodes;
mod owners;
mod rollback;
mod setups;
mod snapshots;
mod usage;
mod views;
mod volumes;

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use weir_block::Nanos;
use weir_cluster::events::Events;
use weir_cluster::migration::first_epoch;
use weir_cluster::ownership;
use weir_cluster::records::{
    DiskRecord, Limit, Medium, NodeRecord, NodeRef, Policy, Record, Source, VolumeKind, check_name, keys,
};

use self::imports::check_imported;
use crate::api::{
    ApiError, ApiErrorKind, CreateDisk, DiskView, EventView, Export, Follow, Move, Moved, Resize, SetLimit,
    SetPolicy, ShardView,
};
use crate::audit::Audit;
use crate::backings::Backings;
use crate::client::{self, At, Other};
use crate::control::change::{ChangeError, read};
use crate::control::decide::is_live;
use crate::control::disk::{Request, Why};
use crate::control::node::{random, unavailable};
use crate::control::provisioning::{Files, Origin, to_its_end};
use crate::control::{Node, Tasks, lun_disks, provisioning};
use crate::timestamps::rfc3339;

/// Events that are shown.
const EVENTS: usize = 200;

/// Longest wait for this node's view to show a disk that is in the registry.
const VIEW_LAG: Duration = Duration::from_secs(10);

/// Longest wait for the storage of a volume (P10).
const STORAGE: Duration = Duration::from_secs(10);

/// Longest wait for a disk to be exported by whichever node owns it, or takes it over.
const EXPORTED: Duration = Duration::from_secs(15);

/// Most forwards of a request: from the requested node to the owner, and from there to the next owner if the disk moves
/// meanwhile.
const MOST_FORWARDS: u32 = 4;

/// Changes that another host takes from this one, within the limits of [`Operations::export`] and [`Operations::move_disk`]; a
/// barrier ends by itself, and a longer file is the owner's own.
const FOR_NODES: [&str; 4] = ["export", "move", "barrier", "lengthen"];

/// The remedy where another node has to do it.
pub(crate) const ELSEWHERE: &str = "repeat the command on that host";

/// Pause between two polls.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The operations of the API. Cheap to clone.
#[derive(Clone)]
pub struct Operations {
    node: Arc<Node>,
    tasks: Arc<Tasks>,
    events: Arc<Events>,
    backings: Arc<Backings>,
    silent: Arc<owners::Silent>,
    audit: Option<Arc<Audit>>,
    /// The number of times that nodes have forwarded the current request.
    forwarded: u32,
    /// The node of another host that makes the current request: nobody can tell whether an operator has asked it.
    by_node: Option<Arc<str>>,
}

type Answer<T> = Result<T, ApiError>;

impl Operations {
    /// Operations on `node`.
    #[must_use]
    pub fn new(node: Arc<Node>, tasks: Arc<Tasks>, backings: Arc<Backings>) -> Operations {
        let events = Arc::new(Events::new(Arc::clone(&node.registry), node.session.node_ref()));
        let silent = Arc::default();
        Operations { node, tasks, events, backings, silent, audit: None, forwarded: 0, by_node: None }
    }

    /// The same, which report the state of this log.
    #[must_use]
    pub fn with_audit(self, audit: Option<Arc<Audit>>) -> Operations {
        Operations { audit, ..self }
    }

    /// The operations for a request of an operator, or for one that nodes have `forwarded` so many times to process
    /// `intended_for`; `by_node`: the node of another host at the other end.
    ///
    /// # Errors
    /// This is another process, with the socket of a former one or of one on another host.
    pub(crate) fn asked(
        &self,
        intended_for: Option<&str>,
        forwarded: u32,
        by_node: Option<Arc<str>>,
    ) -> Answer<Operations> {
        let me = self.me().to_string();
        if let Some(other) = intended_for.filter(|other| **other != me) {
            let message = format!("the request is for {other}, but this is {me}");
            return Err(ApiError::new(ApiErrorKind::Unavailable, message)
                .hint("give each node its own api.socket, and on several hosts set api.listen"));
        }
        Ok(Operations { forwarded, by_node, ..self.clone() })
    }

    fn me(&self) -> NodeRef {
        self.node.session.node_ref()
    }

    /// The health of this node's shards. Never waits for one.
    #[must_use]
    pub fn shards(&self) -> Vec<ShardView> {
        let health = self.node.shards.health();
        health.iter().enumerate().map(|(number, look)| ShardView::new(number, look)).collect()
    }

    /// This node's metrics, for Prometheus. Never waits for a shard.
    #[must_use]
    pub fn metrics(&self) -> String {
        let disks = self.node.shards.counters();
        let forwarded = self.node.forwarded.load(std::sync::atomic::Ordering::Relaxed);
        crate::metrics::to_prometheus(&self.node.config.name, &self.shards(), &disks, forwarded)
    }

    /// Waits for the storage, with a time limit. The storage may still complete the call.
    async fn bounded<T>(&self, work: impl Future<Output = Answer<T>>) -> Answer<T> {
        tokio::time::timeout(STORAGE, work).await.unwrap_or_else(|_| {
            let message = format!("the storage has not answered for {} s", STORAGE.as_secs());
            Err(ApiError::new(ApiErrorKind::Unavailable, message)
                .hint("check the volume's storage; the request may still be carried out when it answers"))
        })
    }

    async fn record(&self, name: &str) -> Answer<DiskRecord> {
        check_named(name)?;
        match read(&*self.node.registry, name).await {
            Ok((_, record)) => Ok(record),
            Err(error @ ChangeError::NoDisk(_)) => {
                Err(ApiError::from(error).hint("`weir disk list` shows those that there are"))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes a disk.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn create_disk(&self, wanted: CreateDisk) -> Answer<DiskView> {
        self.check_new_disk(&wanted).await?;
        if let Some(coordinator) = self.coordinated_elsewhere(&wanted.volume).await? {
            return self.forward(&coordinator, &wanted.name, "create", &wanted).await;
        }
        self.check_coordinated(&wanted.volume).await?;
        self.make_disk(wanted, Origin::Empty).await
    }

    async fn check_new_disk(&self, wanted: &CreateDisk) -> Answer<()> {
        let invalid = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Invalid, error.to_string());
        check_name(&wanted.name).map_err(|error| invalid(&error))?;
        self.check_cluster()?;
        check_size(wanted.size)?;
        match self.node.volume(&wanted.volume).await?.kind {
            VolumeKind::Lun if wanted.logical_block != 4096 => {
                let message = format!(
                    "disks of volume {}, which is on a LUN, have blocks of 4096 bytes",
                    wanted.volume
                );
                Err(ApiError::new(ApiErrorKind::Invalid, message).hint("add --block 4096"))
            }
            VolumeKind::Nbd => {
                let message = format!("volume {} is an NBD server: no export is made there", wanted.volume);
                Err(ApiError::new(ApiErrorKind::Refused, message).hint(
                    "`weir disk create NAME --volume VOLUME --export EXPORT` makes a disk of one that is there; fill it with nbdcopy",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Makes a disk in a volume whose files this node reaches.
    async fn make_disk(&self, wanted: CreateDisk, origin: Origin) -> Answer<DiskView> {
        let mut record = self.new_record(wanted)?;
        if let Origin::Image { number } = origin {
            record.importing = number;
        }
        let revision = self.check_free(&record.name).await?;
        // Above every epoch that an earlier disk of this name can have had, since each of those cost a revision: all its
        // remains are older than this one (P2).
        record.epoch = first_epoch(&*self.node.registry, revision).await.map_err(unavailable)?;
        let DiskRecord { name, volume, size, policy, medium, .. } = record.clone();
        self.bounded(provisioning::make(&self.node, &record, origin.clone())).await?;
        let text = match &origin {
            Origin::Empty => format!("in volume {volume}, {size} bytes, {policy}, {medium}"),
            Origin::Image { .. } => {
                format!("in volume {volume}, incomplete until it is filled, {size} bytes, {policy}, {medium}")
            }
            Origin::Snapshot { disk, snapshot } => {
                format!("in volume {volume}, a clone of {disk}@{snapshot}, {size} bytes, {policy}, {medium}")
            }
        };
        self.node.journal.tell("disk-created", &name, text);
        let view = self.views([&record], Vec::new(), None).await.into_iter().next();
        view.ok_or_else(|| ApiError::new(ApiErrorKind::Unavailable, "the disk has just been made"))
    }

    /// The record of a disk that is to be made.
    fn new_record(&self, wanted: CreateDisk) -> Answer<DiskRecord> {
        let invalid = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Invalid, error.to_string());
        check_name(&wanted.name).map_err(|error| invalid(&error))?;
        let policy: Policy = parse_policy(&wanted.policy)?;
        let CreateDisk { name, volume, size, logical_block, medium, limit, .. } = wanted;
        let source = Source::File { name: name.clone() };
        let mut record = DiskRecord::new(&name, &volume, source, size, logical_block, policy);
        (record.id, record.medium, record.limit) = (random(), medium, limit.map(Limit::from));
        record.check().map_err(|error| invalid(&error))?;
        self.check_medium(medium)?;
        Ok(record)
    }

    /// Whether there is no disk of this name. Returns the registry's revision.
    async fn check_free(&self, name: &str) -> Answer<u64> {
        let known = self.node.registry.list(&keys::disk(name)).await.map_err(unavailable)?;
        if known.entries.iter().any(|entry| entry.key == keys::disk(name)) {
            return Err(ApiError::new(ApiErrorKind::Exists, format!("there is a disk {name} already")));
        }
        Ok(known.revision)
    }

    /// A disk on a medium that no node has could never be opened.
    fn check_medium(&self, medium: Medium) -> Answer<()> {
        if self.node.records.nodes.now().values().any(|node| node.offers(medium)) {
            return Ok(());
        }
        let message = format!("no node that is up keeps write logs on {medium}");
        Err(ApiError::new(ApiErrorKind::Refused, message)
            .hint("`weir status` shows each node's capacity; its configuration sets it"))
    }

    /// Changes the requested policy.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn set_policy(&self, name: &str, wanted: SetPolicy) -> Answer<DiskView> {
        let policy = parse_policy(&wanted.policy)?;
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "policy", &wanted).await;
        }
        self.ask(name, |done| Request::SetPolicy { policy, done }).await?;
        self.disk(name).await
    }

    /// Sets or removes the limit of the rate at which a disk's clients are served.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn set_limit(&self, name: &str, wanted: SetLimit) -> Answer<DiskView> {
        let limit = wanted.limit.map(Limit::from);
        if let Some(reason) = limit.and_then(Limit::contradiction) {
            let message = format!("this limit is not allowed: {reason}");
            return Err(ApiError::new(ApiErrorKind::Invalid, message));
        }
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "limit", &wanted).await;
        }
        self.ask(name, |done| Request::SetLimit { limit, done }).await?;
        self.disk(name).await
    }

    /// Exports a disk: makes this node (or the named one) the owner of a disk without an owner. A disk that another node owns, or
    /// takes over, is exported there: waits until that node has opened it, and returns its address.
    ///
    /// # Errors
    /// As [`Operations::disks`]; a node was named, and another one owns the disk; its owner cannot open it.
    pub async fn export(&self, name: &str, wanted: Export) -> Answer<DiskView> {
        // Another node has been asked first, and has looked.
        if self.forwarded == 0 {
            check_imported(&self.record(name).await?)?;
        }
        self.open(name, wanted).await
    }

    /// Opens a disk, whoever may use it.
    async fn open(&self, name: &str, wanted: Export) -> Answer<DiskView> {
        if self.by_node.is_some() && wanted.accept_loss {
            let message = "only an operator accepts a loss, not a node";
            return Err(ApiError::new(ApiErrorKind::Forbidden, message).hint(format!(
                "repeat the command on the host of node {}, or with --api https://",
                self.me().node
            )));
        }
        let me = self.me();
        if let Some(on) = wanted.on.as_ref().filter(|on| **on != me.node) {
            self.record(name).await?;
            let other = self.live_node(on)?;
            if wanted.accept_loss {
                self.takes_from_node(&other, name)?;
            }
            return self.forward(&other, name, "export", &wanted).await;
        }
        self.check_not_compacting(name)?;
        let deadline = Nanos::now() + EXPORTED;
        // The operator accepts the loss that exists now, not one that occurs while this request waits.
        let mut accept_loss = wanted.accept_loss;
        loop {
            let record = self.record(name).await?;
            let error = match self.lives_elsewhere(&record).filter(|_| wanted.on.is_none()) {
                Some(owner) => {
                    let there = Export { on: Some(owner.node.clone()), accept_loss: false };
                    let error = match self.forward(&owner, name, "export", &there).await {
                        Ok(view) => return Ok(view),
                        Err(error) => error,
                    };
                    // The owner has just gone, or the disk has moved.
                    let passes = match error.kind {
                        ApiErrorKind::Unavailable => true,
                        ApiErrorKind::Refused => self.record(name).await?.owner != Some(owner),
                        _ => false,
                    };
                    if passes { error } else { return Err(error) }
                }
                None => {
                    let error = match self.ask(name, |done| Request::Export { accept_loss, done }).await {
                        Ok(()) => return self.disk(name).await,
                        Err(error) => error,
                    };
                    // Its owner is gone: this node or another one takes over soon, if any can.
                    let gone = record.owner.as_ref().filter(|owner| **owner != me);
                    let passes =
                        gone.is_some_and(|owner| self.orphan(&record, owner).0 == DiskView::TAKEOVER);
                    if passes && wanted.on.is_none() { error } else { return Err(error) }
                }
            };
            if Nanos::now() >= deadline {
                return Err(error);
            }
            accept_loss = false;
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Moves a disk to another node.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn move_disk(&self, name: &str, wanted: Move) -> Answer<Moved> {
        let record = self.record(name).await?;
        check_imported(&record)?;
        // Clients on the follower may write already, so to have the disk there gives that node nothing new.
        let follows = |node: &str| {
            *wanted.to == *node && record.follower.as_ref().is_some_and(|follower| follower.node == node)
        };
        if let Some(node) = self.by_node.as_ref().filter(|node| !follows(node)) {
            let message = format!("node {node} does not follow disk {name}, so it may not move it there");
            return Err(ApiError::new(ApiErrorKind::Forbidden, message));
        }
        if let Some(owner) = self.lives_elsewhere(&record) {
            if !follows(&self.me().node) {
                self.takes_from_node(&owner, name)?;
            }
            return self.forward(&owner, name, "move", &wanted).await;
        }
        let to = self.live_node(&wanted.to)?;
        let from = self.record(name).await?.owner;
        if from.as_ref() == Some(&to) && to == self.me() && self.node.here.get(name).is_some() {
            let disk = self.disk(name).await?;
            return Ok(Moved { from: Some(to.node.clone()), to: to.node, dirty_bytes: 0, disk });
        }
        let dirty_bytes = match &from {
            Some(from) if *from == self.me() && to != *from => {
                let why =
                    if wanted.as_follower || self.by_node.is_some() { Why::Followed } else { Why::Requested };
                self.ask(name, |done| Request::Move { to: to.clone(), why, done }).await?
            }
            _ => 0,
        };
        // The new owner opens it by itself; asking it waits until it has.
        let export = Export { on: Some(to.node.clone()), accept_loss: false };
        let disk = self.open(name, export).await?;
        Ok(Moved { from: from.map(|from| from.node), to: to.node, dirty_bytes, disk })
    }

    /// Lets clients on another node use a disk before it is there.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn follow(&self, name: &str, wanted: Follow) -> Answer<DiskView> {
        check_imported(&self.record(name).await?)?;
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "follow", &wanted).await;
        }
        let to = wanted.to.map(|to| self.live_node(&to)).transpose()?;
        self.ask(name, |done| Request::Follow { to, done }).await?;
        self.disk(name).await
    }

    fn live_node(&self, name: &str) -> Answer<NodeRef> {
        if self.node.revoked().contains(name) {
            return Err(ApiError::new(ApiErrorKind::Refused, format!("node {name} is revoked"))
                .hint("name another node; `weir cluster list` shows the revoked ones"));
        }
        let known = self.node.records.nodes.now().get(name).map(|record| record.node_ref());
        known.ok_or_else(|| {
            ApiError::new(ApiErrorKind::NotFound, format!("there is no node {name}, or it is down"))
                .hint("`weir status` shows the nodes")
        })
    }

    /// Grows a disk.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn resize(&self, name: &str, wanted: Resize) -> Answer<DiskView> {
        let record = self.record(name).await?;
        if let Some(owner) = self.lives_elsewhere(&record) {
            return self.forward(&owner, name, "resize", &wanted).await;
        }
        let size = wanted.size;
        check_size(size)?;
        if self.node.volume(&record.volume).await?.kind == VolumeKind::Lun && size >= record.size {
            let coordinator = self.coordinated_elsewhere(&record.volume).await?;
            if let Some(coordinator) = coordinator.filter(|_| record.owner.is_none()) {
                return self.forward(&coordinator, name, "resize", &wanted).await;
            }
            self.lengthen(name, wanted).await?;
        }
        let seen = Box::new(record);
        self.ask(name, |done| Request::Resize { size, seen, done }).await?;
        self.disk(name).await
    }

    /// Makes the file of a disk on a LUN longer, before its record says so: its volume's coordinator does, at the owner's request.
    ///
    /// # Errors
    /// As [`Operations::disks`]; the filesystem refuses; a node asks that does not own the disk.
    pub async fn lengthen(&self, name: &str, wanted: Resize) -> Answer<Resize> {
        let record = self.record(name).await?;
        let owner = record.owner.as_ref().map(|owner| owner.node.as_str());
        if let Some(node) = self.by_node.as_deref().filter(|node| owner != Some(*node)) {
            let message = format!("node {node} does not own disk {name}, so it may not make it longer");
            return Err(ApiError::new(ApiErrorKind::Forbidden, message));
        }
        if wanted.size < record.size {
            let message = format!("disk {name} has {} bytes already", record.size);
            return Err(ApiError::new(ApiErrorKind::Refused, message));
        }
        check_size(wanted.size)?;
        if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
            return self.forward(&coordinator, name, "lengthen", &wanted).await;
        }
        self.check_coordinated(&record.volume).await?;
        let (node, size) = (Arc::clone(&self.node), wanted.size);
        let files = Files::of(&node, node.volume(&record.volume).await?);
        self.bounded(to_its_end(async move {
            let name = record.name.clone();
            let grow = files.with(move |files| files.lengthen(&name, size));
            lun_disks::lengthen(&node, (&record.volume, &record.name), size, grow).await
        }))
        .await?;
        Ok(wanted)
    }

    /// Recent events.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn events(&self) -> Answer<Vec<EventView>> {
        let events = self.events.recent(EVENTS).await.map_err(unavailable)?;
        let view = |event: weir_cluster::records::EventRecord| EventView {
            at: rfc3339(event.time_unix_ms),
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
        let mut disks = self.node.records.disks.changes();
        let seen = disks.wait_for(|known| known.contains_key(name));
        // Gone again, or the registry is slow to tell: the task says which.
        let _ = tokio::time::timeout(VIEW_LAG, seen).await;
        self.tasks.ask(name, &self.node, request).await
    }

    /// The API of another node.
    fn api_of(&self, record: &NodeRecord) -> Answer<At> {
        At::of_node(&self.node.config.api_socket(), self.node.identity.as_deref(), record)
    }

    /// The living coordinator of a volume on a LUN, when that is another node: only it reaches the files of the volume's disks.
    async fn coordinated_elsewhere(&self, volume: &str) -> Answer<Option<NodeRef>> {
        if self.node.volume(volume).await?.kind != VolumeKind::Lun {
            return Ok(None);
        }
        let state = self.node.coordinators.get(volume);
        let live = self.node.records.nodes.now();
        let other = state.coordinator.filter(|one| *one != self.me() && is_live(&live, one));
        Ok(other.filter(|_| state.mounted.is_none()))
    }

    /// The living owner of a disk, when that is another node.
    async fn owner_elsewhere(&self, name: &str) -> Answer<Option<NodeRef>> {
        Ok(self.lives_elsewhere(&self.record(name).await?))
    }

    fn lives_elsewhere(&self, record: &DiskRecord) -> Option<NodeRef> {
        let owner = record.owner.clone().filter(|owner| *owner != self.me())?;
        is_live(&self.node.records.nodes.now(), &owner).then_some(owner)
    }

    /// Fails if the node is on another host, with where to ask it; see [`takes_from_operators`].
    fn takes_from_node(&self, to: &NodeRef, disk: &str) -> Answer<()> {
        let nodes = self.node.records.nodes.now();
        nodes.get(&to.node).map_or(Ok(()), |there| takes_from_operators(&self.api_of(there)?, to, disk))
    }

    /// Asks the API of the node that it concerns.
    async fn forward<T: DeserializeOwned>(
        &self,
        to: &NodeRef,
        disk: &str,
        what: &str,
        body: &(impl Serialize + Sync),
    ) -> Answer<T> {
        self.forward_within(client::PATIENCE, to, disk, what, Some(body)).await
    }

    /// As [`Operations::forward`], also for a request without a body, and for one that takes another time.
    async fn forward_within<T: DeserializeOwned>(
        &self,
        patience: Duration,
        to: &NodeRef,
        disk: &str,
        what: &str,
        body: Option<&(impl Serialize + Sync)>,
    ) -> Answer<T> {
        let unavailable = |message: String| Err(ApiError::new(ApiErrorKind::Unavailable, message));
        if self.forwarded >= MOST_FORWARDS {
            return unavailable(format!(
                "the request has been forwarded {} times, and disk {disk} is on node {} now",
                self.forwarded, to.node
            ))
            .map_err(|error| error.hint("try again when the disk has stopped moving"));
        }
        let nodes = self.node.records.nodes.now();
        let Some(record) = nodes.get(&to.node).filter(|record| record.node_ref() == *to) else {
            return unavailable(format!("node {} has just gone", to.node));
        };
        let at = self.api_of(record)?;
        if body.is_some() && !FOR_NODES.contains(&what) {
            takes_from_operators(&at, to, disk)?;
        }
        let other = Other { at: &at, process: to, forwarded: self.forwarded + 1 };
        other.ask(disk, what, body, patience).await
    }
}

/// Another host takes a change from an operator, not from this host: whoever has it could else move any disk there. So the operator's
/// client is to ask there, with its own credentials.
fn takes_from_operators(at: &At, to: &NodeRef, disk: &str) -> Answer<()> {
    let Some(url) = at.url() else { return Ok(()) };
    let message = format!("disk {disk} is on node {}, and only that node can do this", to.node);
    let hint = format!("{ELSEWHERE}, or with --credentials DIR, to have it asked at {url}");
    Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint).elsewhere(&to.node, url))
}

fn parse_policy(text: &str) -> Answer<Policy> {
    let invalid =
        |error: <Policy as std::str::FromStr>::Err| ApiError::new(ApiErrorKind::Invalid, error.to_string());
    text.parse().map_err(invalid)
}

/// Files of disks are as long as whole pages.
fn check_size(size: u64) -> Answer<()> {
    const UNIT: u64 = 4096;
    if size > 0 && size.is_multiple_of(UNIT) {
        return Ok(());
    }
    let (below, above) =
        (size - size % UNIT, size.checked_next_multiple_of(UNIT).unwrap_or(size - size % UNIT).max(UNIT));
    let nearest = match below {
        0 => format!("the smallest is {above}"),
        below => format!("the nearest are {below} and {above}"),
    };
    let message = format!("a disk's size is a multiple of {UNIT} bytes, and {size} is none");
    Err(ApiError::new(ApiErrorKind::Invalid, message).hint(nearest))
}

/// Another step about a disk is under way.
fn is_busy(disk: &str) -> ApiError {
    let message = format!("disk {disk} is being made, deleted, or copied for a snapshot");
    ApiError::new(ApiErrorKind::Unavailable, message).hint("try again")
}

/// Says what is wrong with a name, without repeating all of a long one.
fn check_named(name: &str) -> Answer<()> {
    check_name(name).map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))
}

fn ownership_error(refusal: ownership::Refusal) -> ApiError {
    ApiError::from(ChangeError::Refused(refusal))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::disk::tests::{disk_of_a, node};

    /// Any node of another host could else fill the LUN.
    #[tokio::test]
    async fn only_its_owner_has_a_disks_file_made_longer() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let record = disk_of_a(&node, |record| record.owner = Some(NodeRef::new("b", 1))).await;
        let operations = Operations::new(Arc::clone(&node), Arc::default(), Arc::default());
        let lengthen = async |by: &str| {
            let asked = operations.asked(None, 1, Some(by.into())).unwrap();
            asked.lengthen("d", Resize { size: 2 * record.size }).await.unwrap_err()
        };
        assert_eq!(lengthen("c").await.kind, ApiErrorKind::Forbidden);
        // What is refused now is that its volume does not exist.
        let other = lengthen("b").await;
        assert!(other.message.contains("volume"), "{other}");
    }

    #[test]
    fn a_wrong_size_is_told_with_the_nearest_right_ones() {
        let hint = |size| check_size(size).err().map(|error| error.hint);
        assert_eq!(hint(8192), None);
        for (size, nearest) in [
            (0, "the smallest is 4096"),
            (513, "the smallest is 4096"),
            (1_000_000_000, "the nearest are 999997440 and 1000001536"),
        ] {
            assert_eq!(hint(size).as_deref(), Some(nearest));
        }
        assert!(hint(u64::MAX).is_some());
    }
}
