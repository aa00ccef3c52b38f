//! Who coordinates the volumes on LUNs: a task for each volume on each node, which finds the LUN, claims the volume when it is this
//! node's turn, and mounts its filesystem ([`weir_volume::lun::shell`] decides and acts; this is its way to the registry).
//!
//! - [`leftover`]: what a former coordinator has begun and did not get done;
//! - [`turn`]: whose turn it is, as a pure function;
//! - [`volume`]: the task of one volume.

mod leftover;
mod turn;
mod volume;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use weir_cluster::records::{CoordinatorRecord, VolumeKind, VolumeRecord, keys};
use weir_cluster::view::View;

use crate::control::Node;

/// Pause before the registry is listed again.
const LIST_AGAIN: Duration = Duration::from_secs(1);
/// Longest wait at the node's stop until the filesystems are unmounted.
const UNMOUNT: Duration = Duration::from_secs(20);

/// The tasks of the volumes.
pub struct Coordination {
    keeper: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

/// A volume's task.
struct Running {
    /// The identity of the volume: another one may get its name.
    id: u64,
    /// That of its LUN, which an operator may change: it is looked for anew, and nothing of the former one is used any more.
    lun: Option<String>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Coordination {
    /// Starts a task for each volume on a LUN, now and as they come.
    #[must_use]
    pub fn start(node: Arc<Node>) -> Coordination {
        let (stop, stopped) = watch::channel(false);
        Coordination { keeper: tokio::spawn(keep(node, stopped)), stop }
    }

    /// Gives all volumes back: others may coordinate them at once, without a fence. The disks are closed before.
    pub async fn stop(self) {
        let Coordination { keeper, stop } = self;
        let _ = stop.send(true);
        if tokio::time::timeout(UNMOUNT, keeper).await.is_err() {
            tracing::warn!("the filesystem of a volume is still mounted: its LUN does not answer");
        }
    }
}

async fn keep(node: Arc<Node>, mut stop: watch::Receiver<bool>) {
    let mut volumes = node.records.volumes.changes();
    let mut running = BTreeMap::new();
    let mut records = None;
    loop {
        let now = volumes.borrow_and_update().clone();
        let luns = now.values().filter(|volume| volume.kind == VolumeKind::Lun);
        let luns: BTreeMap<String, VolumeRecord> =
            luns.map(|volume| (volume.name.clone(), volume.clone())).collect();
        if records.is_none() && !luns.is_empty() {
            tokio::select! {
                view = view(&node) => records = Some(view),
                () = stopped(&mut stop) => {}
            }
        }
        let is_same =
            |one: &Running, volume: &VolumeRecord| volume.id == one.id && identity(volume) == one.lun;
        end(&node, &mut running, |name, one| luns.get(name).is_some_and(|volume| is_same(one, volume))).await;
        if let Some(records) = &records {
            for (name, record) in luns {
                running.entry(name).or_insert_with(|| begin(&node, record, records));
            }
        }
        tokio::select! {
            changed = volumes.changed() => if changed.is_err() { std::future::pending::<()>().await },
            () = stopped(&mut stop) => return end(&node, &mut running, |_, _| false).await,
        }
    }
}

/// Waits for a stop.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // Nobody is left to stop it, if that fails.
    let _ = stop.wait_for(|stop| *stop).await.map(drop);
}

type Coordinators = Arc<View<CoordinatorRecord>>;

async fn view(node: &Node) -> Coordinators {
    loop {
        match View::start(Arc::clone(&node.registry), keys::COORDINATORS).await {
            Ok(view) => return Arc::new(view),
            Err(error) => tracing::info!(%error, "listing the coordinators again"),
        }
        tokio::time::sleep(LIST_AGAIN).await;
    }
}

fn begin(node: &Arc<Node>, record: VolumeRecord, records: &Coordinators) -> Running {
    let (stop, stopped) = watch::channel(false);
    let (id, lun) = (record.id, identity(&record));
    let task = tokio::spawn(volume::run(Arc::clone(node), record, Arc::clone(records), stopped));
    Running { id, lun, stop, task }
}

fn identity(volume: &VolumeRecord) -> Option<String> {
    volume.lun.as_ref().map(|lun| lun.identity.clone())
}

/// Ends the tasks of volumes that are not to be kept.
async fn end(node: &Node, running: &mut BTreeMap<String, Running>, is_kept: impl Fn(&str, &Running) -> bool) {
    let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) =
        std::mem::take(running).into_iter().partition(|(name, one)| is_kept(name, one));
    *running = kept;
    for one in gone.values() {
        let _ = one.stop.send(true);
    }
    for (name, one) in gone {
        // Ended, or panicked, which its own log says.
        let _ = one.task.await;
        node.coordinators.forget(&name);
    }
}
