//! Volumes on LUNs: planned, made, shown; and the operator's word for a fence.

use std::fs::File;
use std::path::{Path, PathBuf};

use weir_cluster::records::{CoordinatorRecord, LunRecord, NodeRef, Record, VolumeKind, VolumeRecord, keys};
use weir_cluster::registry::{RegistryError, Transaction};
use weir_volume::DirVolume;
use weir_volume::lun::fencing::Tier;
use weir_volume::lun::filesystem::by_hand::mounts_of;
use weir_volume::lun::filesystem::{Content, FilesystemError, Kind, content};
use weir_volume::lun::heartbeat::VolumeId;
use weir_volume::lun::identity::{device_of, identity_at, overlap, paths_of};
use weir_volume::lun::setup::{Lun, Plan, Ready, SetupError, Wish};

use super::coordination::Coordination;
use super::setups::{self, Setup};
use super::volumes::{check_dir, exists, just_changed, noun};
use super::{Answer, Operations, check_named};
use crate::api::{
    ApiError, ApiErrorKind, ConfirmFenced, ConfirmedFenced, CreateVolume, LunView, SetRedirected, VolumePlan,
    VolumeView,
};
use crate::control::node::{blocking as blocking_dir, random, unavailable};
use crate::control::provisioning::to_its_end;

impl Operations {
    /// Says what would be done to make a volume.
    ///
    /// # Errors
    /// As [`Operations::disks`]; it cannot be made.
    pub async fn plan_volume(&self, wanted: CreateVolume) -> Answer<VolumePlan> {
        check_named(&wanted.name)?;
        if self.volume_records().await?.iter().any(|other| other.name == wanted.name) {
            return Err(exists(&wanted.name));
        }
        if wanted.kind == "nbd" {
            return self.plan_nbd(wanted).await;
        }
        if wanted.kind != "lun" {
            check_dir(&wanted)?;
            let path = wanted.path.clone();
            self.bounded(blocking_dir(move || DirVolume::open_new(path).map(drop))).await?;
            let action = format!("use the directory {}", wanted.path.display());
            return Ok(VolumePlan { volume: wanted.name, action, identity: None, destroys: false });
        }
        let (path, wish) = (wanted.path, wish(wanted.format.as_deref(), wanted.identity, wanted.destroy)?);
        let known = self.known_luns(&self.volume_records().await?);
        let devices = self.node.config.lun.devices.clone();
        setups::other(&self.node, &setup_key(&path).await?, &wanted.name).await?;
        self.check_let_go(&path).await?;
        let planned = blocking(move || {
            check_paths(&path, &known, &devices)?;
            let lun = Lun::examine(&path)?;
            let plan = lun.plan(&wish)?;
            lun.listen()?;
            let destroys = matches!(plan, Plan::Format { .. }) && !lun.is_blank();
            Ok((plan.describe(&lun), lun.identity, destroys))
        });
        let (action, identity, destroys) = planned.await?;
        Ok(VolumePlan { volume: wanted.name, action, identity: Some(identity), destroys })
    }

    pub(super) async fn create_lun(&self, wanted: CreateVolume) -> Answer<VolumeView> {
        let this = self.clone();
        // Also if its waiter goes away: nobody else may begin before the program that formats has ended.
        let (record, view) = to_its_end(async move { this.make_lun(wanted).await }).await?;
        self.await_served(&record.name).await;
        let known = self.coordinations().await.remove(&record.name);
        Ok(VolumeView { lun: self.lun_view(&record, known), ..view })
    }

    async fn make_lun(&self, wanted: CreateVolume) -> Answer<(VolumeRecord, VolumeView)> {
        let wish = wish(wanted.format.as_deref(), wanted.identity, wanted.destroy)?;
        let CreateVolume { name, path, .. } = wanted;
        if self.volume_records().await?.iter().any(|other| other.name == name) {
            return Err(exists(&name));
        }
        let key = setup_key(&path).await?;
        let setup = Setup::begin(&self.node, &name, vec![key]).await?;
        let made = self.make_held_lun(name, path, wish, &setup).await;
        if made.is_err() {
            setup.end().await;
        }
        made
    }

    /// Makes the volume, while no other process can.
    async fn make_held_lun(
        &self,
        name: String,
        path: PathBuf,
        wish: Wish,
        setup: &Setup<'_>,
    ) -> Answer<(VolumeRecord, VolumeView)> {
        // Whatever was made of the LUN before the setup began is among them.
        let known = self.volume_records().await?;
        if known.iter().any(|other| other.name == name) {
            return Err(exists(&name));
        }
        self.check_let_go(&path).await?;
        let (known, devices) = (self.known_luns(&known), self.node.config.lun.devices.clone());
        let (mark, may_write) = (mark(), setup.may_write());
        let (device, label) = (path.clone(), name.clone());
        let made = blocking(move || {
            check_paths(&device, &known, &devices)?;
            let lun = Lun::examine(&device)?;
            let plan: Plan = lun.plan(&wish)?;
            let ready = lun.set_up(&plan, &wish, mark, &label, &may_write)?;
            Ok((lun.identity, ready))
        });
        let (identity, ready) = made.await?;
        let record = record_of(name, path, identity, mark, &ready);
        record.check().map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        let view = self.register(record.clone(), Some(setup)).await?;
        Ok((record, view))
    }

    /// Refuses a LUN with the filesystem of a volume that was deleted, for as long as a node may have it mounted: its kernel would write over
    /// whatever is made there.
    async fn check_let_go(&self, path: &Path) -> Answer<()> {
        let device = path.to_path_buf();
        let Some(Content::Filesystem(found)) = blocking(move || Ok(content_at(&device))).await? else {
            return Ok(());
        };
        let id = id_of(&found.uuid);
        let (registry, coordinator) = (&self.node.registry, keys::coordinator(id));
        if registry.get(&keys::volume_id(id)).await.map_err(unavailable)?.is_some() {
            // It is a volume still, which is another refusal.
            return Ok(());
        }
        let Some(entry) = registry.get(&coordinator).await.map_err(unavailable)? else { return Ok(()) };
        let record = CoordinatorRecord::of(&entry).map_err(|error| {
            ApiError::new(ApiErrorKind::Failed, format!("the record {coordinator} cannot be read: {error}"))
        })?;
        // A process that has ended, or whose node is down, may hang in its unmount. Whoever removes the node from the cluster says that it is off.
        let (nodes, states) = (self.node.records.nodes.now(), self.node.records.node_states());
        let may_hold = |one: &&NodeRef| nodes.contains_key(&one.node) || states.nodes.contains_key(&one.node);
        let Some(holder) = record.mounts.iter().find(may_hold) else { return Ok(()) };
        let message = format!(
            "{} has the filesystem of volume {}, which was deleted, and {holder} may still have it mounted",
            path.display(),
            record.volume
        );
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(format!(
            "{} unmounts it within half a minute, if the LUN answers there: try again; if its host is off, or that process has ended in its \
             unmount: switch the host off, `weir node remove {}`, and try again",
            holder.node, holder.node
        )))
    }

    fn known_luns(&self, volumes: &[VolumeRecord]) -> Vec<KnownLun> {
        let known = |volume: &VolumeRecord| {
            let here = self.node.coordinators.get(&volume.name).lun;
            Some(KnownLun { volume: volume.name.clone(), lun: volume.lun.clone()?, here })
        };
        volumes.iter().filter_map(known).collect()
    }

    /// What this node knows of a volume's LUN.
    pub(super) fn lun_view(&self, volume: &VolumeRecord, known: Option<Coordination>) -> Option<LunView> {
        let lun = volume.lun.as_ref()?;
        let state = self.node.coordinators.get(&volume.name);
        let unknown =
            || Coordination { trouble: "it has just been made".to_owned(), ..Coordination::default() };
        let Coordination { coordinator, trouble, space, record, notices } = known.unwrap_or_else(unknown);
        let without_path = match self.node.config.lun.fence_command {
            Some(_) => Tier::Command,
            None => Tier::Operator,
        };
        Some(LunView {
            identity: lun.identity.clone(),
            filesystem: lun.filesystem.clone(),
            uuid: lun.uuid.clone(),
            path: state.lun,
            coordinator,
            trouble,
            size_bytes: space.map(|(size, _)| size),
            free_bytes: space.map(|(_, free)| free),
            epoch: record.as_ref().map_or(0, |one| one.epoch),
            moves_to: record.as_ref().and_then(|one| one.next.as_ref()).map(|next| next.node.clone()),
            mounts: record.into_iter().flat_map(|one| one.mounts).map(|one| one.node).collect(),
            phase: state.phase.name().to_owned(),
            notice: state.notice,
            notices,
            fencing: state.tier.unwrap_or(without_path).word().to_owned(),
            redirected: lun.redirected,
        })
    }

    /// All I/O of a volume goes through its coordinator's filesystem, or no longer. Each node follows when it sees the record.
    ///
    /// # Errors
    /// As [`Operations::volumes`]; the volume is a directory, or has just been changed.
    pub async fn set_redirected(&self, name: &str, wanted: &SetRedirected) -> Answer<VolumeView> {
        check_named(name)?;
        let (entry, mut record) = self.volume_entry(name).await?;
        let Some(lun) = record.lun.as_mut() else {
            let message = format!("volume {name} is {}: its I/O has no other route", noun(record.kind));
            return Err(ApiError::new(ApiErrorKind::Refused, message));
        };
        if lun.redirected != wanted.redirected {
            lun.redirected = wanted.redirected;
            match self.node.registry.transact(record.replace(&entry)).await {
                Ok(_) => {}
                Err(RegistryError::Conflict { .. }) => return Err(just_changed(name)),
                Err(error) => return Err(unavailable(error)),
            }
            let (kind, text) = match wanted.redirected {
                true => ("volume-redirected", "all I/O goes through its coordinator's filesystem"),
                false => ("volume-direct", "I/O is direct again where it can be"),
            };
            self.node.journal.tell(kind, name, text.to_owned());
        }
        let known = self.coordinations().await.remove(name);
        let view = self.volume_view(&record);
        Ok(VolumeView { lun: self.lun_view(&record, known), ..view })
    }

    /// The operator's word that a node can neither read nor write a volume's LUN, for example because it is switched off. Its
    /// processes no longer count as having the filesystem mounted.
    ///
    /// # Errors
    /// As [`Operations::disks`]; the node is up, or none of its processes counts.
    pub async fn confirm_fenced(&self, name: &str, wanted: ConfirmFenced) -> Answer<ConfirmedFenced> {
        check_named(name)?;
        check_named(&wanted.node)?;
        let refused = |message: String| ApiError::new(ApiErrorKind::Refused, message);
        let volume = self.node.volume(name).await?;
        if volume.kind != VolumeKind::Lun {
            return Err(refused(format!("volume {name} is {}: nobody coordinates it", noun(volume.kind))));
        }
        let nothing =
            || refused(format!("no process of {} counts as having volume {name} mounted", wanted.node));
        let entry = self.node.registry.get(&keys::coordinator(volume.id)).await.map_err(unavailable)?;
        let entry = entry.ok_or_else(nothing)?;
        let record = CoordinatorRecord::of(&entry)
            .map_err(|error| ApiError::new(ApiErrorKind::Failed, error.to_string()))?;
        let gone = record.mounts.iter().filter(|one| one.node == wanted.node);
        let processes: Vec<u64> = gone.map(|one| one.incarnation).collect();
        if processes.is_empty() {
            return Err(nothing());
        }
        let nodes = self.node.registry.get(&keys::session(&wanted.node)).await.map_err(unavailable)?;
        if nodes.is_some() {
            let message = format!("{} is up, as far as the registry knows", wanted.node);
            return Err(refused(message).hint("switch it off, and wait until `weir status` shows it as down"));
        }
        let done = !wanted.dry_run;
        let confirmed =
            ConfirmedFenced { volume: name.to_owned(), node: wanted.node.clone(), processes, done };
        if wanted.dry_run {
            return Ok(confirmed);
        }
        let is_other = |node: &str| node != wanted.node;
        let next = CoordinatorRecord {
            coordinator: record.coordinator.filter(|one| is_other(&one.node)),
            mounts: record.mounts.into_iter().filter(|one| is_other(&one.node)).collect(),
            ..record
        };
        let change: Transaction = next.replace(&entry).absent(keys::session(&wanted.node));
        match self.node.registry.transact(change).await {
            Ok(_) => {
                let text = format!("an operator says that {} cannot reach its LUN", wanted.node);
                self.node.journal.tell("fence-confirmed", name, text);
                Ok(confirmed)
            }
            Err(RegistryError::Conflict { .. }) => {
                let message = format!("the coordinator of volume {name} has just changed");
                Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"))
            }
            Err(error) => Err(unavailable(error)),
        }
    }
}

/// An identity that no other volume has.
fn mark() -> VolumeId {
    VolumeId((u128::from(random()) << 64 | u128::from(random())).to_be_bytes())
}

fn wish(format: Option<&str>, identity: Option<String>, destroy: bool) -> Answer<Wish> {
    let format = match format {
        None => None,
        Some("xfs") => Some(Kind::Xfs),
        Some("ext4") => Some(Kind::Ext4),
        Some(other) => {
            let message = format!("{other:?} is no filesystem of a shared volume; use xfs or ext4");
            return Err(ApiError::new(ApiErrorKind::Invalid, message));
        }
    };
    Ok(Wish { format, identity, destroy })
}

/// The LUN of a volume.
struct KnownLun {
    volume: String,
    lun: LunRecord,
    /// This node's path to it.
    here: Option<PathBuf>,
}

fn content_at(path: &Path) -> Option<Content> {
    File::open(path).ok().and_then(|device| content(&device, path).ok())
}

/// Refuses a LUN that is a volume already, whatever path names it, a LUN that is mounted, and a LUN for which `lun.devices` has no path of
/// this host, or several. This precedes the exclusive open, whose error does not name the mount.
fn check_paths(path: &Path, known: &[KnownLun], devices: &[PathBuf]) -> Result<(), SetupError> {
    let identity = identity_at(path);
    let found = content_at(path);
    // Formatting a whole device destroys the volumes on its partitions.
    let is_or_overlaps = |own: &str, other: &str| own == other || overlap(own, other);
    let is_it = |one: &&KnownLun| match &found {
        _ if identity.as_ref().is_some_and(|own| is_or_overlaps(own, &one.lun.identity)) => true,
        Some(Content::Filesystem(found)) => LunRecord::bytes(&one.lun.uuid) == Some(found.uuid),
        Some(Content::Other) | None => false,
    };
    if let Some(KnownLun { volume, here, .. }) = known.iter().find(is_it) {
        let (path, volume) = (path.to_path_buf(), volume.clone());
        return Err(SetupError::IsVolume { path, volume, here: here.clone() });
    }
    if let Some(at) = mounts_of(path).into_iter().next() {
        return Err(SetupError::Mounted { path: path.to_path_buf(), at });
    }
    let Some(identity) = identity else { return Ok(()) };
    let paths = paths_of(&identity, devices);
    match paths.len() {
        0 if !devices.is_empty() => Err(SetupError::NotListed(path.to_path_buf())),
        0 | 1 => Ok(()),
        _ => Err(SetupError::SeveralPaths { identity, paths }),
    }
}

/// The identity of a volume is that of its filesystem, so that no two volumes have one filesystem.
fn id_of(uuid: &[u8; 16]) -> u64 {
    u64::from_be_bytes(uuid[..8].try_into().expect("eight bytes"))
}

fn record_of(name: String, path: PathBuf, identity: String, mark: VolumeId, ready: &Ready) -> VolumeRecord {
    let uuid: String = ready.superblock.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let lun = LunRecord {
        identity,
        filesystem: ready.superblock.kind.to_string(),
        uuid,
        mark: mark.to_string(),
        heartbeat: ready.area,
        redirected: false,
    };
    let id = id_of(&ready.superblock.uuid);
    VolumeRecord { name, kind: VolumeKind::Lun, path, id, lun: Some(lun), nbd: None }
}

/// The key under which the LUN at a path is made a volume. Hosts that see it through other paths, or a part of it, use the same.
async fn setup_key(path: &Path) -> Answer<String> {
    let path = path.to_path_buf();
    let identity = blocking(move || match identity_at(&path) {
        Some(identity) => Ok(identity),
        None => Ok(Lun::examine(&path)?.identity),
    });
    Ok(keys::lun_setup(&device_of(&identity.await?)))
}

/// Runs something that may block on the LUN; a format may take minutes.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SetupError> + Send + 'static,
) -> Answer<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::new(ApiErrorKind::Failed, error.to_string()))?.map_err(|error| {
        let kind = match &error {
            SetupError::InUse { .. } | SetupError::IsVolume { .. } => ApiErrorKind::Exists,
            SetupError::NotConfirmed { .. }
            | SetupError::SeveralPaths { .. }
            | SetupError::Mounted { .. }
            | SetupError::NotListed(_)
            | SetupError::NoFilesystem { .. }
            | SetupError::HasData { .. }
            | SetupError::DataBehind { .. }
            | SetupError::Ambiguous { .. }
            | SetupError::Changed { .. } => ApiErrorKind::Refused,
            SetupError::Ended(_) => ApiErrorKind::Unavailable,
            SetupError::Filesystem(error) if error.is_absent() => ApiErrorKind::NotFound,
            SetupError::Filesystem(error) if error.is_busy() => {
                let hint = "something on this host has it mounted, or open exclusively: `lsblk`, `fuser`";
                return ApiError::new(ApiErrorKind::Refused, error.to_string()).hint(hint);
            }
            SetupError::Filesystem(FilesystemError::Unsuitable { .. } | FilesystemError::Sectors { .. })
            | SetupError::NotADevice(_)
            | SetupError::TooSmall { .. }
            | SetupError::OtherLun { .. } => ApiErrorKind::Invalid,
            _ => ApiErrorKind::Failed,
        };
        ApiError::new(kind, error.to_string())
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;

    use super::*;
    use crate::control::disk::tests::node_in;
    use crate::control::faulty_registry::FaultyRegistry;

    /// A LUN of zeroes, for as long as the value lives.
    struct LoopDevice(PathBuf);

    impl LoopDevice {
        /// `None`, with a message in the test's output, where loop devices are not available.
        fn new(image: &Path) -> Option<LoopDevice> {
            File::create(image).unwrap().set_len(320 << 20).unwrap();
            let made = Command::new("losetup").args(["-f", "--show"]).arg(image).output();
            match made {
                Ok(made) if made.status.success() => {
                    Some(LoopDevice(String::from_utf8(made.stdout).unwrap().trim().into()))
                }
                other => {
                    eprintln!("skipped: no loop device here ({other:?})");
                    None
                }
            }
        }
    }

    impl Drop for LoopDevice {
        fn drop(&mut self) {
            let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
        }
    }

    /// Each looked at the LUN while it was blank, and would format it.
    #[tokio::test(flavor = "multi_thread")]
    async fn of_two_nodes_that_format_one_lun_at_once_one_does() {
        let directory = tempfile::tempdir().unwrap();
        let Some(device) = LoopDevice::new(&directory.path().join("image")) else { return };
        let registry = Arc::new(FaultyRegistry::open(directory.path(), Arc::default()));
        let (a, _) = node_in(registry.clone(), "a").await;
        let (b, _) = node_in(registry, "b").await;
        let operations = |node| Operations::new(node, Arc::default(), Arc::default());
        let (of_a, of_b) = (operations(Arc::clone(&a)), operations(Arc::clone(&b)));
        let wanted = |name: &str| CreateVolume {
            kind: "lun".into(),
            format: Some("xfs".into()),
            identity: identity_at(&device.0),
            destroy: true,
            ..CreateVolume::dir(name, device.0.clone())
        };
        let begun = Setup::begin(&b, "w", vec![setup_key(&device.0).await.unwrap()]).await.unwrap();
        let refused = of_a.make_lun(wanted("v")).await.unwrap_err();
        assert!(refused.message.contains("node b is making volume w"), "{refused}");
        let refused = of_a.plan_volume(wanted("v")).await.unwrap_err();
        assert!(refused.message.contains("node b is making volume w"), "{refused}");
        assert!(Lun::examine(&device.0).unwrap().is_blank(), "nothing was written");
        begun.end().await;
        // Whichever is first: the other one finds its setup, or its volume.
        let both = tokio::join!(of_a.make_lun(wanted("v")), of_b.make_lun(wanted("w")));
        let (made, refused) = match both {
            (Ok((made, _)), Err(refused)) | (Err(refused), Ok((made, _))) => (made, refused),
            both => panic!("{both:?}"),
        };
        assert!(refused.message.contains(&made.name), "{refused}");
        let found = Lun::examine(&device.0).unwrap().content;
        let Content::Filesystem(found) = found else { panic!("{found:?}") };
        let record = made.lun.clone().unwrap();
        assert_eq!(LunRecord::bytes(&record.uuid), Some(found.uuid), "it is the volume's");
        let again = of_b.make_lun(wanted("x")).await.unwrap_err();
        assert!(again.message.contains("is the LUN of volume"), "{again}");
        // As is a device with a volume on one of its partitions.
        let own = identity_at(&device.0).unwrap();
        for (identity, is_refused) in [(format!("{own}-part1"), true), (format!("{own}1"), false)] {
            let lun = LunRecord { identity, uuid: "0".repeat(32), ..record.clone() };
            let known = [KnownLun { volume: "v".into(), lun, here: None }];
            let checked = check_paths(&device.0, &known, &[]);
            assert_eq!(matches!(checked, Err(SetupError::IsVolume { .. })), is_refused, "{checked:?}");
        }
        // The volume is deleted, and its coordinator has not noticed.
        let id = id_of(&found.uuid);
        let listed = CoordinatorRecord {
            volume: made.name.clone(),
            epoch: 1,
            coordinator: None,
            mounts: vec![a.session.node_ref()],
            next: None,
        };
        let gone = Transaction::new().delete(keys::volume(&made.name)).delete(keys::volume_id(id));
        let mounted = listed.create(keys::coordinator(id));
        a.registry.transact(gone).await.unwrap();
        of_b.check_let_go(&device.0).await.unwrap();
        a.registry.transact(mounted).await.unwrap();
        let refused = of_b.check_let_go(&device.0).await.unwrap_err();
        assert!(refused.message.contains("may still have it mounted"), "{refused}");
        assert_eq!(of_a.plan_volume(wanted("y")).await.unwrap_err(), refused);
        assert!(a.registry.list(keys::LUN_SETUPS).await.unwrap().entries.is_empty());
    }
}
