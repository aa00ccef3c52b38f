//! The common state of a node's control plane.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weir_accel::flash::FlashDevice;
use weir_block::LayerInfo;
use weir_cluster::events::Events;
use weir_cluster::membership::NodeSession;
use weir_cluster::node_state::{self, Rules};
use weir_cluster::records::{DiskRecord, LunRecord, Record, Source, VolumeKind, VolumeRecord, keys};
use weir_cluster::registry::{Entry, Registry};
use weir_nbd::{Uri, UriError};
use weir_volume::{BackingKind, DirVolume, FileIdentity, Mark, NbdTrouble, VolumeError};

use super::capacity::LogCapacity;
use super::clocks::Clocks;
use super::coordinators::Coordinators;
use super::forwarders::Forwarders;
use super::intents::Intents;
use super::owner_fences::OwnerFences;
use super::registry_copy::RegistryCopy;
use super::rights::Rights;
use super::shards::Shards;
use crate::config::Config;
use crate::error::{ApiError, ApiErrorKind, DAMAGED, FILESYSTEM_FAILED};

use crate::identity::NodeIdentity;
use crate::peer::Network;
use crate::places::Places;

/// Events that wait to be written to the registry; further ones are only logged (P10).
const EVENT_QUEUE: usize = 256;

/// The parts.
pub struct Node {
    /// The node's configuration.
    pub config: Config,
    /// The way to the other nodes.
    pub network: Arc<dyn Network>,
    /// Who this node is, if its connections prove that.
    pub identity: Option<Arc<NodeIdentity>>,
    /// The registry.
    pub registry: Arc<dyn Registry>,
    /// Its membership.
    pub session: NodeSession,
    /// The limits of node states.
    pub rules: Rules,
    /// The rights of the disks that it owns, and its grants to others.
    pub rights: Rights,
    /// The records of the registry, as last read.
    pub records: RegistryCopy,
    /// The other nodes' wall clocks.
    pub clocks: Clocks,
    /// The way to the shards.
    pub shards: Shards,
    /// The event journal.
    pub journal: Journal,
    /// The disks that are open here.
    pub here: Here,
    /// The flash device, if this node has one.
    pub flash: Option<Arc<FlashDevice>>,
    /// The room that is reserved for further logs.
    pub capacity: LogCapacity,
    /// Disks that are being made or deleted.
    pub intents: Intents,
    /// The volumes on LUNs, as this node sees them.
    pub coordinators: Coordinators,
    /// Former owners that this node has kept from LUNs.
    pub owner_fences: OwnerFences,
    /// The marks of this node's processes before this one, since its host started.
    pub former: Vec<Mark>,
    /// Connections by which other nodes read disks that are open here, by disk and node (P10).
    pub readers: Arc<Places>,
    /// Connections by which other nodes forward clients of disks that are open here.
    pub forwarders: Arc<Forwarders>,
    /// The clients whose requests this node forwards.
    pub forwarded: AtomicUsize,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({})", self.session.node_ref())
    }
}

impl Node {
    /// The directory of a volume.
    ///
    /// # Errors
    /// There is no such volume.
    pub fn volume_path(&self, volume: &str) -> Result<PathBuf, ApiError> {
        self.records.volumes.now().get(volume).map(|record| record.path.clone()).ok_or_else(|| {
            ApiError::new(ApiErrorKind::NotFound, format!("there is no volume {volume}"))
                .hint("`weir volume list` shows those that there are")
        })
    }

    /// The record of a volume, straight from the registry: the view may lag behind what a client has just made.
    ///
    /// # Errors
    /// There is no such volume, or the registry does not answer.
    pub async fn volume(&self, volume: &str) -> Result<VolumeRecord, ApiError> {
        self.volume_entry(volume).await.map(|(_, record)| record)
    }

    /// As [`Node::volume`], with what a compare-and-swap needs.
    ///
    /// # Errors
    /// As [`Node::volume`].
    pub async fn volume_entry(&self, volume: &str) -> Result<(Entry, VolumeRecord), ApiError> {
        let entry =
            self.registry.get(&keys::volume(volume)).await.map_err(unavailable)?.ok_or_else(|| {
                ApiError::new(ApiErrorKind::NotFound, format!("there is no volume {volume}"))
                    .hint("`weir volume list` shows those that there are")
            })?;
        match VolumeRecord::of(&entry) {
            Ok(record) => Ok((entry, record)),
            Err(error) => Err(ApiError::new(ApiErrorKind::Failed, error.to_string())),
        }
    }

    /// The file or device behind a disk. Does not access the storage, which may hang.
    ///
    /// # Errors
    /// In words: the volume is unknown.
    pub async fn place_of(&self, record: &DiskRecord) -> Result<Place, String> {
        match &record.source {
            Source::Device { path } => Ok(Place { backing: BackingKind::Path(path.clone()), volume: None }),
            Source::Export { name } => {
                let volume = self.volume(&record.volume).await.map_err(|error| error.message)?;
                let server = server_of(&volume)?;
                Ok(Place { backing: BackingKind::Nbd { server, export: name.clone() }, volume: None })
            }
            Source::File { name } => {
                let volume = self.volume(&record.volume).await.map_err(|error| error.message)?;
                if volume.kind == VolumeKind::Lun {
                    let file = DirVolume::file_of(name).map_err(|error| error.to_string())?;
                    let lun = self.coordinators.get(&volume.name).lun;
                    let of = volume.lun.and_then(|lun| Some((LunRecord::bytes(&lun.uuid)?, lun.identity)));
                    let (filesystem, identity) = of.ok_or("the record of its volume names no LUN")?;
                    let backing = BackingKind::Lun { volume: volume.name, file, lun, filesystem, identity };
                    return Ok(Place { backing, volume: None });
                }
                let path = DirVolume::path_of(&volume.path, name).map_err(|error| error.to_string())?;
                Ok(Place { backing: BackingKind::Path(path), volume: Some(volume.id) })
            }
        }
    }

    /// The nodes on which nothing is placed at present: drained, quarantined or revoked.
    #[must_use]
    pub fn barred(&self) -> BTreeSet<String> {
        let mut barred =
            node_state::barred(&self.records.node_states(), &self.rules, weir_task::unix_millis());
        barred.append(&mut self.revoked());
        barred
    }

    /// The nodes that the other nodes turn away, as far as this node knows.
    #[must_use]
    pub fn revoked(&self) -> BTreeSet<String> {
        self.identity.as_ref().map(|identity| identity.revoked_nodes()).unwrap_or_default()
    }

    /// The export addresses of a disk on a node.
    #[must_use]
    pub fn uris_on(&self, node: &str, disk: &str) -> Vec<String> {
        let nodes = self.records.nodes.now();
        let Some(record) = nodes.get(node) else { return Vec::new() };
        let mut uris = Vec::new();
        // A Unix socket of another host is not there, or is called as this node's.
        let is_remote = *node != self.session.node_ref().node
            && self.identity.as_ref().is_some_and(|identity| identity.api_of(node).is_some())
            && (self.config.nbd_socket().as_ref() == Some(&record.nbd_unix) || !record.nbd_unix.exists());
        if !record.nbd_unix.as_os_str().is_empty() && !is_remote {
            uris.push(format!("nbd+unix:///{disk}?socket={}", record.nbd_unix.display()));
        }
        uris.extend(record.nbd_tcp.map(|address| format!("nbd://{address}/{disk}")));
        uris.extend(record.nbd_tls.map(|address| format!("nbds://{address}/{disk}")));
        uris
    }
}

/// The server of a volume.
///
/// # Errors
/// In words: the volume is none, or its record was written by a version that knows other URIs.
pub fn server_of(volume: &VolumeRecord) -> Result<Uri, String> {
    let nbd = volume.nbd.as_ref().ok_or_else(|| format!("volume {} is no NBD server", volume.name))?;
    nbd.server.parse().map_err(|error: UriError| error.to_string())
}

/// Where a disk's data is, from one reading of the registry.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its bytes.
    pub backing: BackingKind,
    /// The identity of the volume whose directory the file is in; `None` for others.
    pub volume: Option<u64>,
}

/// Runs something that may block on the storage.
///
/// # Errors
/// The error of `work`, for a client.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(volume_error),
        Err(error) => Err(ApiError::new(ApiErrorKind::Failed, error.to_string())),
    }
}

/// A volume's error as the API's.
pub fn volume_error(error: VolumeError) -> ApiError {
    let kind = match &error {
        VolumeError::Exists { .. }
        | VolumeError::SameDirectory { .. }
        | VolumeError::SnapshotsLeft { .. } => ApiErrorKind::Exists,
        VolumeError::NotFound(_) => ApiErrorKind::NotFound,
        VolumeError::InvalidName { .. }
        | VolumeError::InvalidSize { .. }
        | VolumeError::Unsuitable { .. }
        | VolumeError::NotADirectory(_) => ApiErrorKind::Invalid,
        VolumeError::NoReflinks(_) | VolumeError::NoThickDisks(_) | VolumeError::NoFiles(_) => {
            ApiErrorKind::Refused
        }
        VolumeError::Nbd(NbdTrouble::Server(error)) if error.is_unreachable() => ApiErrorKind::Unavailable,
        VolumeError::Nbd(_) => ApiErrorKind::Refused,
        VolumeError::Stopped(_) => ApiErrorKind::Unavailable,
        VolumeError::FilesystemFailed { .. } => {
            let failed = ApiError::new(ApiErrorKind::Unavailable, error.to_string());
            return failed.code(FILESYSTEM_FAILED).hint("try again");
        }
        VolumeError::NotCoordinator(_) => {
            return ApiError::new(ApiErrorKind::Unavailable, error.to_string()).hint("try again");
        }
        error if error.is_damage() => {
            return ApiError::new(ApiErrorKind::Failed, error.to_string()).code(DAMAGED).hint(
                "the filesystem is damaged, or this node has seen it while another one changed it: if the error comes again, stop all that \
                 uses the volume, and run the filesystem's own check, e2fsck or xfs_repair",
            );
        }
        _ => ApiErrorKind::Failed,
    };
    ApiError::new(kind, error.to_string())
}

/// The registry's error as the API's.
pub fn unavailable(error: weir_cluster::RegistryError) -> ApiError {
    ApiError::new(ApiErrorKind::Unavailable, error.to_string())
}

/// An unpredictable number, from the system's source of randomness.
#[must_use]
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A disk that is open here.
#[derive(Debug)]
pub(super) struct Open {
    /// The disk's identity.
    id: u64,
    info: LayerInfo,
    /// The file of a volume that it was opened with.
    file: Option<FileIdentity>,
}

/// The disks that are open on this node, for those who must not wait: the NBD handshake.
#[derive(Debug, Default)]
pub struct Here {
    disks: Mutex<BTreeMap<String, Open>>,
    /// Disks that were closed with nothing dirty, and that the registry still has as this process's.
    unreleased: Mutex<BTreeSet<String>>,
    /// Disks that this process owns and cannot open, and the reason.
    unopened: Mutex<BTreeMap<String, String>>,
    /// The node stops: closed disks are not opened again.
    is_stopping: AtomicBool,
}

impl Here {
    /// The description of a disk for clients, here or where it is about to be.
    #[must_use]
    pub fn describe(&self, record: &DiskRecord) -> LayerInfo {
        LayerInfo {
            size: record.size,
            logical_block: record.logical_block,
            preferred_block: 4096,
            max_transfer: weir_block::buffer::LARGEST as u32,
            writable: true,
            fast_zeroes: true,
            discards: true,
        }
    }

    /// A disk is open, and has `file` of a volume open.
    pub fn insert(&self, record: &DiskRecord, file: Option<FileIdentity>) {
        let info = self.describe(record);
        self.lock().insert(record.name.clone(), Open { id: record.id, info, file });
    }

    /// The record of a disk has changed. One that takes no clients, because it is being closed, goes on taking none.
    pub fn update(&self, record: &DiskRecord) {
        let info = self.describe(record);
        if let Some(known) = self.lock().get_mut(&record.name) {
            known.info = info;
        }
    }

    /// A disk is no longer open.
    pub fn remove(&self, disk: &str) {
        self.lock().remove(disk);
    }

    /// A disk is no longer shown as open. Returns what was shown, for [`Here::put_back`].
    pub(super) fn take(&self, disk: &str) -> Option<Open> {
        self.lock().remove(disk)
    }

    /// A disk that was taken is open after all.
    pub(super) fn put_back(&self, disk: &str, shown: Option<Open>) {
        self.lock().extend(shown.map(|shown| (disk.to_owned(), shown)));
    }

    /// All open disks.
    #[must_use]
    pub fn all(&self) -> BTreeMap<String, LayerInfo> {
        self.lock().iter().map(|(disk, open)| (disk.clone(), open.info)).collect()
    }

    /// The files of volumes that disks have open here, by disk.
    #[must_use]
    pub fn files(&self) -> BTreeMap<String, FileIdentity> {
        let disks = self.lock();
        let files = disks.iter().filter_map(|(disk, open)| Some((disk.clone(), open.file.clone()?)));
        files.collect()
    }

    /// The node stops.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Whether the node stops.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// A disk was closed with nothing dirty, and the registry does not have that yet; or it has, or the disk is open again.
    pub fn set_unreleased(&self, disk: &str, unreleased: bool) {
        let mut all = self.unreleased.lock().unwrap_or_else(PoisonError::into_inner);
        if unreleased {
            all.insert(disk.to_owned());
        } else {
            all.remove(disk);
        }
    }

    /// The disks that are closed here, while the registry does not have that yet.
    #[must_use]
    pub fn unreleased(&self) -> BTreeSet<String> {
        self.unreleased.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// This process owns a disk and could not open it for this reason; or that is over.
    pub fn set_unopened(&self, disk: &str, reason: Option<&str>) {
        let mut all = self.unopened.lock().unwrap_or_else(PoisonError::into_inner);
        match reason {
            Some(reason) => drop(all.insert(disk.to_owned(), reason.to_owned())),
            None => drop(all.remove(disk)),
        }
    }

    /// The reason for which a disk of this process is not open here, after an attempt to open it.
    #[must_use]
    pub fn unopened(&self, disk: &str) -> Option<String> {
        self.unopened.lock().unwrap_or_else(PoisonError::into_inner).get(disk).cloned()
    }

    /// The disks of this process that are not open here, after attempts to open them, and why.
    #[must_use]
    pub fn all_unopened(&self) -> BTreeMap<String, String> {
        self.unopened.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The identity of the disk that is open under a name.
    #[must_use]
    pub fn id(&self, disk: &str) -> Option<u64> {
        self.lock().get(disk).map(|open| open.id)
    }

    /// One disk, when it is open.
    #[must_use]
    pub fn get(&self, disk: &str) -> Option<LayerInfo> {
        self.lock().get(disk).map(|open| open.info)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Open>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The event journal: events go to the log at once, to the registry when it answers.
#[derive(Debug)]
pub struct Journal {
    queue: tokio::sync::mpsc::Sender<(&'static str, String, String)>,
}

impl Journal {
    /// Starts the task that writes events to the registry.
    #[must_use]
    pub fn start(events: Events) -> Journal {
        let (queue, mut told) = tokio::sync::mpsc::channel::<(&'static str, String, String)>(EVENT_QUEUE);
        weir_task::spawn(async move {
            while let Some((kind, subject, text)) = told.recv().await {
                if let Err(error) = events.record(kind, &subject, &text).await {
                    tracing::debug!(kind, subject, %error, "the event is only in this log");
                }
            }
        });
        Journal { queue }
    }

    /// Tells what happened to `subject` (a disk, a node). Never waits.
    pub fn tell(&self, kind: &'static str, subject: &str, text: String) {
        tracing::info!(kind, subject, "{text}");
        let _ = self.queue.try_send((kind, subject.to_owned(), text));
    }
}

#[cfg(test)]
mod tests {
    use weir_cluster::records::Policy;

    use super::*;

    #[test]
    fn what_takes_no_clients_goes_on_taking_none_when_its_record_changes() {
        let record = |size| {
            DiskRecord::new("d", "v", Source::File { name: "d".into() }, size, 512, Policy::WriteThrough)
        };
        let here = Here::default();
        here.update(&record(4096));
        assert!(here.all().is_empty());
        here.insert(&record(4096), None);
        here.update(&record(8192));
        assert_eq!(here.get("d").map(|layer| layer.size), Some(8192));
        here.remove("d");
        here.update(&record(16384));
        assert_eq!(here.get("d"), None, "it is being closed");
    }
}
