//! The HTTP API in JSON. Shared by the server ([`crate::http`]) and the [`crate::client`].
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/ping` | nothing, at once: the node answers |
//! | `GET /v1/status` | [`NodeStatus`] |
//! | `GET /v1/owned` | [`Owned`]: the state that only a disk's owner knows; for other nodes |
//! | `POST /v1/nodes/NAME/forget` | [`NodeView`] |
//! | `GET /v1/volumes`, `POST /v1/volumes` ([`CreateVolume`]) | [`Volumes`], [`VolumeView`] |
//! | `POST /v1/volumes/plan` ([`CreateVolume`]) | [`VolumePlan`] |
//! | `GET /v1/volumes/NAME/usage` | [`VolumeUsage`] |
//! | `GET /v1/volumes/NAME/exports` | [`ServerExports`] |
//! | `POST /v1/volumes/NAME/delete` ([`DeleteVolume`]) | [`DeletedVolume`] |
//! | `POST /v1/volumes/NAME/confirm-fenced` ([`ConfirmFenced`]) | [`ConfirmedFenced`] |
//! | `POST /v1/volumes/NAME/move` ([`MoveVolume`]) | [`MovedVolume`] |
//! | `POST /v1/volumes/NAME/redirected` ([`SetRedirected`]) | [`VolumeView`] |
//! | `POST /v1/volumes/NAME/identity` ([`SetIdentity`]) | [`ChangedIdentity`] |
//! | `GET /v1/disks`, `POST /v1/disks` ([`CreateDisk`]) | [`Disks`], [`DiskView`] |
//! | `POST /v1/adopt` ([`AdoptExport`]) | [`DiskView`] |
//! | `GET /v1/disks/NAME` | [`DiskView`] |
//! | `POST /v1/disks/NAME/policy` ([`SetPolicy`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/export` ([`Export`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/import` ([`BeginImport`]) | [`Importing`] |
//! | `POST /v1/disks/NAME/open-import`, `POST /v1/disks/NAME/end-import` ([`OfImport`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/fill` ([`FillDisk`]) | [`Filled`]: between the begin and the end of an import, for a thick disk |
//! | `POST /v1/disks/NAME/move` ([`Move`]) | [`Moved`] |
//! | `POST /v1/disks/NAME/follow` ([`Follow`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/limit` ([`SetLimit`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/resize` ([`Resize`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/lengthen` ([`Resize`]) | [`Resize`]: only the file; for other nodes |
//! | `POST /v1/disks/NAME/delete` ([`Delete`]) | [`Deleted`] |
//! | `POST /v1/disks/NAME/layout` ([`LookAtLayout`]) | [`LayoutView`] |
//! | `GET /v1/disks/NAME/compact`, `POST /v1/disks/NAME/compact` ([`CompactDisk`]) | [`CompactionView`] |
//! | `GET /v1/disks/NAME/compaction-plan` | [`CompactionView`] at the volume's coordinator; for other nodes |
//! | `GET /v1/disks/NAME/snapshots`, `POST /v1/disks/NAME/snapshots` ([`CreateSnapshot`]) | [`Snapshots`]: all; those that were made |
//! | `POST /v1/disks/NAME/delete-snapshot` ([`DeleteSnapshot`]) | [`SnapshotView`] |
//! | `POST /v1/disks/NAME/rollback` ([`RollBack`]) | [`RolledBack`] |
//! | `POST /v1/disks/NAME/clone` ([`CloneDisk`]) | [`DiskView`], of the clone |
//! | `POST /v1/disks/NAME/barrier` ([`Barrier`]) | [`BarrierStood`]; for other nodes |
//! | `GET /v1/disks/NAME/meters` | [`Meters`] |
//! | `GET /v1/disks/NAME/served-meters` | [`Meters`] of the volume's coordinator; for other nodes |
//! | `GET /v1/disks/NAME/profile` | `weir_profile::Profile`, since the disk was opened |
//! | `POST /v1/disks/NAME/profile` ([`RecordProfile`]) | `weir_profile::Profile`, when the time is over |
//! | `POST /v1/disks/NAME/load` ([`RunLoad`]) | `weir_load::Summary` |
//! | `GET /v1/events` | [`EventList`] |
//! | `GET /metrics` | the turns of the shards, the limits and routes of the disks that are open on the node, and its suppressed log lines, in Prometheus' text format; see [`crate::metrics`] |
//!
//! Any node answers for any disk; a change that only a node of another host can make is answered with 307, the [`Elsewhere`] in the
//! error, and a `Location`. Everything that goes wrong is an [`ApiError`], with the HTTP status that fits its kind; a node that has
//! not joined the cluster answers every request with 503 and [`NOT_JOINED`].

mod disks;
mod measurements;
mod nodes;
mod snapshots;
mod volumes;

pub use weir_cluster::records::Medium;

pub use crate::error::{
    ApiError, ApiErrorKind, COMPACTION_FAILED, COMPACTION_INTERRUPTED, DAMAGED, Elsewhere, FILESYSTEM_FAILED,
    NOT_JOINED, compaction_interrupted,
};
pub use disks::*;
pub use measurements::*;
pub use nodes::*;
pub use snapshots::*;
pub use volumes::*;
