//! The disks of volumes on LUNs: served to their owners by the coordinator, and connected to it by their owners.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use weir_block::SharedFile;
use weir_cluster::records::{DiskRecord, LunRecord, Source};
use weir_volume::lun::serving::OpenedDisk;
use weir_volume::{BackingKind, DirVolume, Mark};

use super::find_lun::find;
use super::looks::LOOKS;
use super::node::Node;
use super::owner_fences::mark_of;
use crate::peer::{Greeting, Purpose};
use crate::shard::messages::{Command, OpenedServed};

/// Pause before another look for a path to a LUN.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Longest wait for work on files of disks that are not served meanwhile, and the rhythm of looks.
const WORK_ENDS: Duration = Duration::from_secs(60);
const WORK_LOOK: Duration = Duration::from_millis(50);

/// A disk that is open here needs a way to the coordinator of its volume. Its shard asks again while there is none.
pub async fn connect(node: Arc<Node>, disk: String) {
    if let Err(reason) = try_connect(&node, &disk).await {
        tracing::debug!(disk, reason, "no coordinator yet");
    }
}

async fn try_connect(node: &Arc<Node>, disk: &str) -> Result<(), String> {
    let record = node.records.disk(disk).ok_or("it has no record")?;
    // Nobody gives a volume back while somebody else holds its filesystem: only whether it is there is kept.
    let (wanted, is_here, coordinator) = {
        let state = node.coordinators.get(&record.volume);
        if !state.disks.contains(disk) {
            node.coordinators.update(&record.volume, |state| {
                state.disks.insert(disk.to_owned());
            });
        }
        (state.redirected, state.mounted.is_some(), state.coordinator)
    };
    node.shards.send(disk, Command::Redirect { disk: disk.to_owned(), wanted }).await;
    let until = node.coordinators.get(&record.volume).handover;
    node.shards.send(disk, Command::Handovers { disk: disk.to_owned(), until }).await;
    if is_here {
        serve(node, &record).await?;
        node.shards.send(disk, Command::CoordinatorHere { disk: disk.to_owned() }).await;
        return Ok(());
    }
    let me = node.session.node_ref();
    let coordinator = coordinator.ok_or("nobody coordinates its volume")?;
    if coordinator == me {
        return Err("this node is about to coordinate its volume".into());
    }
    let nodes = node.records.nodes.now();
    let there = nodes.get(&coordinator.node).filter(|there| there.node_ref() == coordinator);
    let address = there.ok_or_else(|| format!("{coordinator} is gone"))?.peer_address;
    let greeting = Greeting {
        disk: disk.to_owned(),
        owner: me.node,
        replica: coordinator.clone(),
        purpose: Purpose::Redirect,
    };
    let deadline = node.config.peers.deadline.0;
    let connecting = weir_task::timeout(deadline, node.network.connect(address, &greeting)).await;
    let stream = connecting
        .map_err(|_| format!("no connection to {coordinator} within {deadline:?}"))?
        .map_err(|error| error.to_string())?;
    node.shards.send(disk, Command::CoordinatorConnected { disk: disk.to_owned(), stream }).await;
    Ok(())
}

/// A disk that is open here has no path to the LUN of its volume, or one that has failed: this node may have found another one since, for
/// all of them. Its shard asks again while there is none.
pub async fn find_path(node: Arc<Node>, disk: String) {
    let Some(volume) = node.records.disk(&disk).map(|record| record.volume) else { return };
    let record = node.records.volumes.now().get(&volume).and_then(|volume| volume.lun.clone());
    let (known, opens_path) = {
        let state = node.coordinators.get(&volume);
        // The rest is let go of: while somebody holds its filesystem, the volume is not given back.
        (state.lun, state.opens_path)
    };
    let (Some(known), Some(record)) = (known, record) else { return };
    let Some(_attempt) = Attempt::begin(opens_path) else { return };
    let (name, path, devices) = (volume.clone(), known.clone(), node.config.lun.devices.clone());
    let mark = mark_of(&node.session.node_ref());
    let open = move || open_or_find(&name, &path, &record, &devices, mark);
    let opened = match tokio::task::spawn_blocking(open).await {
        Ok(opened) => opened,
        Err(error) => Err(error.to_string()),
    };
    match opened {
        Ok((path, lun)) => {
            if path != known {
                found_anew(&node, &volume, &known, path);
            }
            for disk in open_here(&node, &volume) {
                node.shards.send(&disk, Command::Path { disk: disk.clone(), lun: lun.clone() }).await;
            }
        }
        Err(why) => {
            tracing::debug!(volume, why, "no path to its LUN yet");
            // It may have taken a look at all devices of this host.
            weir_task::sleep(LOOK_AGAIN).await;
        }
    }
}

/// The one attempt to open a path, until it is dropped, whatever ends it.
struct Attempt(Arc<AtomicBool>);

impl Attempt {
    fn begin(is_under_way: Arc<AtomicBool>) -> Option<Attempt> {
        (!is_under_way.swap(true, Ordering::Relaxed)).then_some(Attempt(is_under_way))
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The path that this node knows, or, if that leads there no more or does not answer, another one to the same LUN. Blocks, but not on a device
/// that does not answer.
fn open_or_find(
    volume: &str,
    known: &Path,
    lun: &LunRecord,
    devices: &[PathBuf],
    mark: Mark,
) -> Result<(PathBuf, SharedFile), String> {
    let filesystem = LunRecord::bytes(&lun.uuid).ok_or("the record of its volume names no LUN")?;
    let identity = lun.identity.clone();
    let open = move |path: &Path| BackingKind::open_path(path, filesystem, &identity, true, Some(mark));
    if let Some(Ok(opened)) = LOOKS.at(known, open.clone()) {
        return Ok((known.to_path_buf(), opened));
    }
    let path = find(volume, lun, devices)?;
    let opened = LOOKS.at(&path, open).ok_or_else(|| format!("{} does not answer", path.display()))?;
    Ok((path, opened.map_err(|error| error.to_string())?))
}

/// The device of a path is gone, and the LUN is at another one: disks that are opened from now on use it, too.
fn found_anew(node: &Node, volume: &str, before: &Path, path: PathBuf) {
    let text = format!("this node reaches its LUN at {}; before: {}", path.display(), before.display());
    node.coordinators.update(volume, |state| {
        if state.lun.as_deref() == Some(before) {
            state.lun = Some(path);
        }
    });
    node.journal.tell("volume-path", volume, text);
}

/// Serves a disk to its owner, if this node coordinates the disk's volume. Goes on when nobody waits for it any more: what a shard serves is
/// always among what this node knows that it serves, and so can be ended.
///
/// # Errors
/// In words: it does not, or the disk's file cannot be opened, or has not been opened yet.
pub async fn serve(node: &Arc<Node>, record: &DiskRecord) -> Result<(), String> {
    let (node, record) = (Arc::clone(node), record.clone());
    let serving = weir_task::spawn(async move {
        let Some(_beginning) = node.coordinators.begin(&record.name) else {
            return Err("its file is being opened".into());
        };
        begin_serving(&node, &record).await
    });
    serving.await.unwrap_or_else(|_| Err("this node stops".into()))
}

async fn begin_serving(node: &Node, record: &DiskRecord) -> Result<(), String> {
    let Source::File { name } = &record.source else {
        return Err(format!("disk {} is a device", record.name));
    };
    let file = DirVolume::file_of(name).map_err(|error| error.to_string())?;
    // The volume is not given back between this look and the command.
    let served = node.coordinators.served(&record.volume);
    let mut served = served.lock().await;
    let Some((epoch, mounted)) = node.coordinators.get(&record.volume).mounted else {
        return Err(format!("this node does not coordinate volume {}", record.volume));
    };
    if node.intents.is_unserved(&record.name) {
        return Err("its file is being filled with zeroes, or prepared for a rollback".into());
    }
    match served.get(&record.name) {
        Some(id) if *id == record.id => return Ok(()),
        Some(_) => stop(node, &mut served, Some(&record.name)).await,
        None => {}
    }
    let mark = mark_of(&node.session.node_ref());
    let opened = tokio::task::spawn_blocking(move || OpenedDisk::open(&mounted, &file, mark)).await;
    let opened = opened.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let disk = record.name.clone();
    let owner = record.owner.is_some().then_some(0);
    let begin = |done| Command::Serve { disk, opened: OpenedServed(opened), epoch, owner, done };
    // Also if there is no answer: it may be served.
    served.insert(record.name.clone(), record.id);
    let begun = node.shards.ask_patiently(&record.name, begin).await.map_err(|error| error.message)?;
    if begun.is_err() {
        served.remove(&record.name);
    }
    begun
}

/// The LUN of a disk that is open here has refused this node's I/O: its volume's task hears of that.
pub fn fenced(node: &Node, disk: &str) {
    if let Some(record) = node.records.disk(disk) {
        node.coordinators.update(&record.volume, |state| state.refusals += 1);
    }
}

/// The disks of a volume that are open here, or may be about to be: this process owns them.
fn open_here(node: &Node, volume: &str) -> Vec<String> {
    let disks = node.records.disks.now();
    let of_volume = disks.values().filter(|record| record.volume == volume);
    let me = node.session.node_ref();
    let own = of_volume
        .filter(|record| record.owner.as_ref() == Some(&me) || node.here.get(&record.name).is_some());
    own.map(|record| record.name.clone()).collect()
}

/// Nothing is held of a volume's LUN on this node any more, and nothing of it is under way there, of its own disks and of others'.
pub async fn drop_leases(node: &Arc<Node>, volume: &str) {
    // Also of disks that another node owns by now: what this one had begun before may still be under way, until it has released them. Shards
    // answer at once for those that they do not have.
    let of_volume = of_volume(node, volume);
    let was_open = node.coordinators.get(volume).disks;
    let all: BTreeSet<String> = of_volume.iter().chain(&was_open).cloned().collect();
    let mut asked = tokio::task::JoinSet::new();
    for disk in all {
        let node = Arc::clone(node);
        asked.spawn(async move {
            let drop = |done| Command::DropLeases { disk: disk.clone(), done };
            // A disk that is closed meanwhile has nothing under way; a shard that has ended, neither.
            if let Err(error) = node.shards.ask_patiently(&disk, drop).await {
                tracing::debug!(disk, %error, "it is not open any more");
            }
        });
    }
    while asked.join_next().await.is_some() {}
    if was_open.iter().any(|disk| !of_volume.contains(disk)) {
        node.coordinators.update(volume, |state| state.disks.retain(|disk| of_volume.contains(disk)));
    }
    stop_serving(node, volume, None).await;
}

fn of_volume(node: &Node, volume: &str) -> BTreeSet<String> {
    let disks = node.records.disks.now();
    disks.values().filter(|record| record.volume == volume).map(|record| record.name.clone()).collect()
}

/// Another node coordinates a volume now, or nobody does: the disks that are open here ask anew, also those whose coordinator's host has gone
/// without a word.
pub async fn lose_coordinator(node: &Node, volume: &str) {
    for disk in open_here(node, volume) {
        node.shards.send(&disk, Command::LoseCoordinator { disk: disk.clone() }).await;
    }
}

/// The I/O of a volume is redirected by an operator's wish, or not any more.
pub async fn redirect(node: &Node, volume: &str, wanted: Arc<AtomicBool>) {
    for disk in open_here(node, volume) {
        let wanted = Arc::clone(&wanted);
        node.shards.send(&disk, Command::Redirect { disk: disk.clone(), wanted }).await;
    }
}

/// The LUN of a volume lets this node write.
pub async fn admitted(node: &Node, volume: &str) {
    for disk in open_here(node, volume) {
        node.shards.send(&disk, Command::Admitted { disk: disk.clone() }).await;
    }
}

/// Waits until no disk of a volume is unserved because of work on its file, for at most [`WORK_ENDS`]. The unmount waits for such work, and
/// until then nobody would serve the others.
pub async fn until_served(node: &Node, volume: &str) {
    let is_of_volume = |disk: &String| node.records.disk(disk).is_some_and(|record| record.volume == volume);
    let served = async {
        while node.intents.unserved().iter().any(is_of_volume) {
            weir_task::sleep(WORK_LOOK).await;
        }
    };
    let _ = weir_task::timeout(WORK_ENDS, served).await;
}

/// Stops serving the disks of a volume, or one of them, and waits until nothing of them is under way.
pub async fn stop_serving(node: &Node, volume: &str, disk: Option<&str>) {
    let served = node.coordinators.served(volume);
    stop(node, &mut *served.lock().await, disk).await;
}

/// Makes a disk's file longer by `work`, and tells whoever serves the disk here of its size.
///
/// # Errors
/// Those of `work`.
pub async fn lengthen<E>(
    node: &Node,
    (volume, disk): (&str, &str),
    size: u64,
    work: impl Future<Output = Result<(), E>>,
) -> Result<(), E> {
    let served = node.coordinators.served(volume);
    // No file is opened between the two that is shorter.
    let served = served.lock().await;
    work.await?;
    if served.contains_key(disk) {
        node.shards.send(disk, Command::Lengthened { disk: disk.to_owned(), size }).await;
    }
    Ok(())
}

/// Does `work` while a disk is served to nobody: whoever asks for it meanwhile gets the file that is there afterwards.
pub async fn while_unserved<T>(node: &Node, volume: &str, disk: &str, work: impl Future<Output = T>) -> T {
    let served = node.coordinators.served(volume);
    let mut served = served.lock().await;
    stop(node, &mut served, Some(disk)).await;
    work.await
}

async fn stop(node: &Node, served: &mut BTreeMap<String, u64>, disk: Option<&str>) {
    let is_it = |name: &&String| disk.is_none_or(|disk| disk == *name);
    let all: Vec<String> = served.keys().filter(is_it).cloned().collect();
    for disk in all {
        let stop = |done| Command::StopServing { disk: disk.clone(), done };
        if let Err(error) = node.shards.ask_patiently(&disk, stop).await {
            tracing::warn!(disk, %error, "a disk is still being served");
        }
        served.remove(&disk);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::Mode;
    use weir_cluster::records::{Record as _, VolumeKind, VolumeRecord, keys};

    use super::*;
    use crate::control::disk::tests::{disk_of_a, node};

    /// No other path was looked for until the node was restarted.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_path_that_hangs_does_not_end_the_search_for_another_one() {
        let directory = tempfile::tempdir().unwrap();
        // Nobody writes to it: whoever opens it waits.
        let hung = directory.path().join("hung");
        rustix::fs::mkfifoat(rustix::fs::CWD, &hung, Mode::RUSR | Mode::WUSR).unwrap();
        let (mut node, _told) = node(directory.path()).await;
        Arc::get_mut(&mut node).unwrap().config.lun.devices = vec![hung.clone()];
        let lun = LunRecord {
            identity: "naa.1".into(),
            filesystem: "xfs".into(),
            uuid: "1".repeat(32),
            mark: "2".repeat(32),
            heartbeat: 0,
            redirected: false,
        };
        let (kind, lun) = (VolumeKind::Lun, Some(lun));
        let volume = VolumeRecord { name: "v".into(), kind, path: hung.clone(), id: 7, lun, nbd: None };
        node.registry.transact(volume.create(keys::volume("v"))).await.unwrap();
        node.records.volumes.changes().wait_for(|known| known.contains_key("v")).await.unwrap();
        disk_of_a(&node, |_| {}).await;
        node.coordinators.update("v", |state| state.lun = Some(hung.clone()));
        let opens_path = node.coordinators.get("v").opens_path;
        for _ in 0..2 {
            let looks = tokio::spawn(find_path(Arc::clone(&node), "d".into()));
            tokio::time::timeout(Duration::from_secs(30), looks).await.expect("it ends").unwrap();
            assert!(!opens_path.load(Ordering::Relaxed), "the next attempt is possible");
        }
        // Ends the thread that waits.
        drop(std::fs::OpenOptions::new().write(true).open(&hung).unwrap());
    }
}
