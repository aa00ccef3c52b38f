//! The calls of a node's API, one method each.

use std::time::Duration;

use hyper::Method;
use serde::Serialize;
use weir_identity::{CaCertificate, Store, TokenId};
use weir_profile::Profile;

use super::{Client, ROLLBACK, SNAPSHOT, Signed, USAGE, check, encode, length_of, of_disk};
use crate::api::{
    AdoptExport, ApiError, BeginImport, ChangedIdentity, CloneDisk, CompactDisk, CompactionView,
    ConfirmFenced, ConfirmedFenced, CreateDisk, CreateSnapshot, CreateVolume, Delete, DeleteSnapshot,
    DeleteVolume, Deleted, DeletedVolume, DiskLimit, DiskView, Disks, DrainNode, EventList, EventView,
    Export, FillDisk, Filled, Follow, Importing, LayoutView, LookAtLayout, MeterView, Meters, Move,
    MoveVolume, Moved, MovedVolume, NodeStatus, NodeWork, OfImport, RecordProfile, Resize, RollBack,
    RolledBack, RunLoad, ServerExports, SetIdentity, SetLimit, SetPolicy, SetRedirected, SnapshotView,
    Snapshots, VolumePlan, VolumeUsage, VolumeView, Volumes,
};
use crate::cluster::views::{
    ClusterView, Invite, Invited, NewClient, Revoke, Revoked, Rotate, RotationView, Withdraw, Withdrawn,
};

/// Time that a volume may take to change its coordinator.
const HANDOVER: Duration = Duration::from_secs(60);

impl Client {
    /// The node's report on itself and on the cluster.
    ///
    /// # Errors
    /// For this and all calls: the node's error, or `unavailable` if it cannot be reached.
    pub fn status(&self) -> Result<NodeStatus, ApiError> {
        self.get("/v1/status")
    }

    /// All volumes.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn volumes(&self) -> Result<Vec<VolumeView>, ApiError> {
        self.get("/v1/volumes").map(|Volumes { volumes }| volumes)
    }

    /// What the disks and snapshots of a volume take.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn volume_usage(&self, name: &str) -> Result<VolumeUsage, ApiError> {
        check(name)?;
        self.call(Method::GET, &format!("/v1/volumes/{name}/usage"), Vec::new(), self.patience + USAGE)
    }

    /// The current exports of a volume's NBD server.
    ///
    /// # Errors
    /// As [`Client::status`]; the volume is no server, or the server does not answer.
    pub fn server_exports(&self, name: &str) -> Result<ServerExports, ApiError> {
        check(name)?;
        self.get(&format!("/v1/volumes/{name}/exports"))
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn create_volume(&self, volume: &CreateVolume) -> Result<VolumeView, ApiError> {
        self.post("/v1/volumes", volume)
    }

    /// Says what would be done to make a volume.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn plan_volume(&self, volume: &CreateVolume) -> Result<VolumePlan, ApiError> {
        self.post("/v1/volumes/plan", volume)
    }

    /// The operator's word that a node cannot write to a volume's LUN.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn confirm_fenced(&self, name: &str, confirm: &ConfirmFenced) -> Result<ConfirmedFenced, ApiError> {
        check(name)?;
        self.post(&format!("/v1/volumes/{name}/confirm-fenced"), confirm)
    }

    /// Moves the coordination of a volume on a LUN to another node, and waits until a node serves the volume again.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn move_volume(&self, name: &str, wanted: &MoveVolume) -> Result<MovedVolume, ApiError> {
        check(name)?;
        let patience = self.patience + HANDOVER;
        self.call(Method::POST, &format!("/v1/volumes/{name}/move"), encode(wanted)?, patience)
    }

    /// Sends all I/O of a volume on a LUN through its coordinator's filesystem, or no longer.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn set_redirected(&self, name: &str, redirected: bool) -> Result<VolumeView, ApiError> {
        check(name)?;
        self.post(&format!("/v1/volumes/{name}/redirected"), &SetRedirected { redirected })
    }

    /// The storage has moved a volume to another LUN, which is the volume's from now on.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn set_identity(&self, name: &str, wanted: &SetIdentity) -> Result<ChangedIdentity, ApiError> {
        check(name)?;
        self.post(&format!("/v1/volumes/{name}/identity"), wanted)
    }

    /// Deletes a volume that has no disks.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn delete_volume(&self, name: &str, delete: &DeleteVolume) -> Result<DeletedVolume, ApiError> {
        check(name)?;
        self.post(&format!("/v1/volumes/{name}/delete"), delete)
    }

    /// A node, the disks that count on it, and those that return to it.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn node(&self, name: &str) -> Result<NodeWork, ApiError> {
        check(name)?;
        self.get(&format!("/v1/nodes/{name}"))
    }

    /// Has a node's disks moved away. Returns before they are.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn drain_node(&self, name: &str, drain: &DrainNode) -> Result<NodeWork, ApiError> {
        self.change_node(name, "drain", drain)
    }

    /// Ends a node's drain; its disks return. Returns before they have.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn resume_node(&self, name: &str) -> Result<NodeWork, ApiError> {
        self.change_node(name, "resume", &serde_json::json!({}))
    }

    /// Ends a node's quarantine.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn clear_node(&self, name: &str) -> Result<NodeWork, ApiError> {
        self.change_node(name, "clear", &serde_json::json!({}))
    }

    /// Removes a node that is down and will not come back.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn remove_node(&self, name: &str) -> Result<NodeWork, ApiError> {
        self.change_node(name, "remove", &serde_json::json!({}))
    }

    fn change_node(&self, name: &str, what: &str, body: &impl Serialize) -> Result<NodeWork, ApiError> {
        check(name)?;
        self.post(&format!("/v1/nodes/{name}/{what}"), body)
    }

    /// All disks.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn disks(&self) -> Result<Vec<DiskView>, ApiError> {
        self.get("/v1/disks").map(|Disks { disks }| disks)
    }

    /// One disk.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn disk(&self, name: &str) -> Result<DiskView, ApiError> {
        self.get(&of_disk(name, "")?)
    }

    /// Makes a disk.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn create_disk(&self, disk: &CreateDisk) -> Result<DiskView, ApiError> {
        self.post("/v1/disks", disk)
    }

    /// Makes a disk of an export of its volume's server.
    ///
    /// # Errors
    /// As [`Client::status`]; the server or the export is not as it must be.
    pub fn adopt_export(&self, wanted: &AdoptExport) -> Result<DiskView, ApiError> {
        self.post("/v1/adopt", wanted)
    }

    /// Changes the requested policy.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn set_policy(&self, name: &str, policy: &str) -> Result<DiskView, ApiError> {
        self.post(&of_disk(name, "/policy")?, &SetPolicy { policy: policy.to_owned() })
    }

    /// Sets the limit of a disk, or removes it.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn set_limit(&self, name: &str, limit: Option<DiskLimit>) -> Result<DiskView, ApiError> {
        self.post(&of_disk(name, "/limit")?, &SetLimit { limit })
    }

    /// Makes a node the disk's owner.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn export(&self, name: &str, export: &Export) -> Result<DiskView, ApiError> {
        self.post(&of_disk(name, "/export")?, export)
    }

    /// Makes a disk for an import, which alone may use it until it ends.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn begin_import(&self, wanted: &BeginImport) -> Result<Importing, ApiError> {
        self.post(&of_disk(&wanted.disk.name, "/import")?, wanted)
    }

    /// Opens the disk of an import for it.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn open_import(&self, import: &Importing) -> Result<DiskView, ApiError> {
        self.post(&of_disk(&import.disk.name, "/open-import")?, &OfImport { number: import.number })
    }

    /// The import has written everything: its disk is like any other.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn end_import(&self, import: &Importing) -> Result<DiskView, ApiError> {
        self.post(&of_disk(&import.disk.name, "/end-import")?, &OfImport { number: import.number })
    }

    /// Gives the disk of an import space of its own from a byte on. Returns where it has come to.
    ///
    /// # Errors
    /// As [`Client::status`]; the volume has too little space.
    pub fn fill(&self, import: &Importing, from: u64) -> Result<Filled, ApiError> {
        self.post(&of_disk(&import.disk.name, "/fill")?, &FillDisk { number: import.number, from })
    }

    /// Moves a disk to another node, and waits until that serves it.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn move_disk(&self, name: &str, to: &str) -> Result<Moved, ApiError> {
        self.post(&of_disk(name, "/move")?, &Move { to: to.to_owned(), as_follower: false })
    }

    /// Lets clients on node `to` use a disk before it is there (`None`: on no other node any more), and waits until that
    /// node is ready to own it.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn follow(&self, name: &str, to: Option<&str>) -> Result<DiskView, ApiError> {
        self.post(&of_disk(name, "/follow")?, &Follow { to: to.map(str::to_owned) })
    }

    /// Grows a disk to `size` bytes.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn resize(&self, name: &str, size: u64) -> Result<DiskView, ApiError> {
        self.post(&of_disk(name, "/resize")?, &Resize { size })
    }

    /// Deletes a disk and its data. The name that the request has to repeat is this one.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn delete(&self, name: &str, delete: &Delete) -> Result<Deleted, ApiError> {
        let delete = Delete { name: name.to_owned(), ..delete.clone() };
        self.post(&of_disk(name, "/delete")?, &delete)
    }

    /// The snapshots of a disk.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn snapshots(&self, disk: &str) -> Result<Vec<SnapshotView>, ApiError> {
        self.get(&of_disk(disk, "/snapshots")?).map(|Snapshots { snapshots }| snapshots)
    }

    /// Makes a snapshot of a disk, and of others of its volume at the same point in time.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn create_snapshot(
        &self,
        disk: &str,
        name: &str,
        group: &[String],
    ) -> Result<Vec<SnapshotView>, ApiError> {
        let body = encode(&CreateSnapshot { name: name.to_owned(), group: group.to_vec() })?;
        let made = self.call(Method::POST, &of_disk(disk, "/snapshots")?, body, self.patience + SNAPSHOT);
        made.map(|Snapshots { snapshots }| snapshots)
    }

    /// Deletes a snapshot of a disk, or says what would be deleted.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn delete_snapshot(&self, disk: &str, name: &str, dry_run: bool) -> Result<SnapshotView, ApiError> {
        let delete = DeleteSnapshot { name: name.to_owned(), dry_run };
        self.post(&of_disk(disk, "/delete-snapshot")?, &delete)
    }

    /// How many extents a disk's file is in, or a snapshot's, and how long it takes to share its blocks.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn layout(&self, disk: &str, wanted: &LookAtLayout) -> Result<LayoutView, ApiError> {
        self.post(&of_disk(disk, "/layout")?, wanted)
    }

    /// Copies a disk to fewer extents, or says what would be done. Returns when the copy has begun.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn compact(&self, disk: &str, dry_run: bool) -> Result<CompactionView, ApiError> {
        let patience = self.patience + ROLLBACK;
        self.call(Method::POST, &of_disk(disk, "/compact")?, encode(&CompactDisk { dry_run })?, patience)
    }

    /// How far such a copy is.
    ///
    /// # Errors
    /// As [`Client::status`]; the copy has failed.
    pub fn compaction(&self, disk: &str) -> Result<CompactionView, ApiError> {
        self.get(&of_disk(disk, "/compact")?)
    }

    /// Gives a disk the content of one of its snapshots, or says what would be done.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn roll_back(&self, disk: &str, wanted: &RollBack) -> Result<RolledBack, ApiError> {
        let patience = self.patience + ROLLBACK;
        self.call(Method::POST, &of_disk(disk, "/rollback")?, encode(wanted)?, patience)
    }

    /// Makes a disk that begins as a snapshot of another one, or as that disk is now.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn clone_disk(&self, disk: &str, clone: &CloneDisk) -> Result<DiskView, ApiError> {
        self.call(Method::POST, &of_disk(disk, "/clone")?, encode(clone)?, self.patience + SNAPSHOT)
    }

    /// The meters of a disk, from the top, on whichever node has it open.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn meters(&self, name: &str) -> Result<Vec<MeterView>, ApiError> {
        self.get(&of_disk(name, "/meters")?).map(|Meters { meters }| meters)
    }

    /// The profile of a disk since it was opened, on whichever node has it open.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn profile(&self, name: &str) -> Result<Profile, ApiError> {
        self.get(&of_disk(name, "/profile")?)
    }

    /// Records for `length` the profile of a disk, on whichever node has it open.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn record_profile(&self, name: &str, length: Duration) -> Result<Profile, ApiError> {
        let length_ms = u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
        let body = encode(&RecordProfile { length_ms })?;
        self.call(Method::POST, &of_disk(name, "/profile")?, body, self.patience + length)
    }

    /// Runs a load on a layer of a disk, on whichever node has it open, and waits for its end.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn load(&self, name: &str, load: &RunLoad) -> Result<weir_load::Summary, ApiError> {
        let body = encode(load)?;
        self.call(Method::POST, &of_disk(name, "/load")?, body, self.patience + length_of(load))
    }

    /// The identities of the cluster.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn cluster(&self) -> Result<ClusterView, ApiError> {
        self.get("/v1/cluster")
    }

    /// Makes a join token.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn invite(&self, invite: &Invite) -> Result<Invited, ApiError> {
        self.post("/v1/cluster/invite", invite)
    }

    /// Revokes a node or a client.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn revoke(&self, revoke: &Revoke) -> Result<Revoked, ApiError> {
        self.post("/v1/cluster/revoke", revoke)
    }

    /// Begins a rotation of the cluster's authority, or goes on with it.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn rotate(&self, rotate: &Rotate) -> Result<RotationView, ApiError> {
        self.post("/v1/cluster/rotate", rotate)
    }

    /// Withdraws a token.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn withdraw(&self, token: TokenId) -> Result<Withdrawn, ApiError> {
        self.post("/v1/cluster/withdraw", &Withdraw { token })
    }

    /// Issues the certificate of a client.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn new_client(&self, client: &NewClient) -> Result<Signed, ApiError> {
        let (answer, at) =
            self.call_and_follow(Method::POST, "/v1/cluster/clients", encode(client)?, self.patience)?;
        let directory = self.credentials.as_ref().filter(|_| at.tls.is_some());
        let trusted = directory.map(|directory| Store::open_client(directory)).transpose()?;
        let pins = trusted.map(|(_, all)| all.iter().map(CaCertificate::fingerprint).collect());
        Ok(Signed { answer, pins })
    }

    /// Recent events, oldest first.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn events(&self) -> Result<Vec<EventView>, ApiError> {
        self.get("/v1/events").map(|EventList { events }| events)
    }
}
