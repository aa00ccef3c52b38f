//! Who coordinates the volumes on LUNs: a task for each volume on each node, which finds the LUN, claims the volume when it is this
//! node's turn, and mounts its filesystem ([`weir_volume::lun::shell`] decides and acts; this is its way to the registry).
//!
//! - [`leftover`]: what a former coordinator has begun and did not get done;
//! - [`turn`]: whose turn it is, as a pure function;
//! - [`volume`]: the task of one volume.

mod leftover;
mod turn;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use weir_cluster::records::{CoordinatorRecord, VolumeKind, VolumeRecord, keys};
use weir_cluster::view::{Records, View};

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
    let mut tasks = Tasks::default();
    let mut records = None;
    loop {
        let luns = luns_of(&volumes.borrow_and_update());
        if records.is_none() && !luns.is_empty() {
            tokio::select! {
                view = view(&node) => records = Some(view),
                () = stopped(&mut stop) => {}
            }
        }
        let is_same =
            |one: &Running, volume: &VolumeRecord| volume.id == one.id && identity(volume) == one.lun;
        tasks.end(&node, |name, one| luns.get(name).is_some_and(|volume| is_same(one, volume)));
        if let Some(records) = &records {
            luns.into_values().for_each(|record| tasks.begin(&node, record, records));
        }
        tokio::select! {
            changed = volumes.changed() => if changed.is_err() { std::future::pending::<()>().await },
            Some(ended) = tasks.ending.join_next() => tasks.ended(ended),
            () = stopped(&mut stop) => break,
        }
    }
    tasks.end(&node, |_, _| false);
    while tasks.ending.join_next().await.is_some() {}
}

/// The volumes on LUNs, by name.
fn luns_of(volumes: &Records<VolumeRecord>) -> BTreeMap<String, VolumeRecord> {
    let luns = volumes.values().filter(|volume| volume.kind == VolumeKind::Lun);
    luns.map(|volume| (volume.name.clone(), volume.clone())).collect()
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

fn identity(volume: &VolumeRecord) -> Option<String> {
    volume.lun.as_ref().map(|lun| lun.identity.clone())
}

/// The tasks of this node.
#[derive(Default)]
struct Tasks {
    /// By the volumes' names.
    running: BTreeMap<String, Running>,
    /// Those of volumes that are gone, until their filesystems are unmounted. A LUN may not answer for long, which holds up no other volume (P9).
    ending: JoinSet<String>,
    /// The names of those volumes: what the node knows of a volume, it knows by its name.
    names: BTreeSet<String>,
}

impl Tasks {
    /// Begins the task of a volume, if it has none, and no former one of its name is ending.
    fn begin(&mut self, node: &Arc<Node>, record: VolumeRecord, records: &Coordinators) {
        let (name, id, lun) = (record.name.clone(), record.id, identity(&record));
        if self.names.contains(&name) || self.running.contains_key(&name) {
            return;
        }
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(volume::run(Arc::clone(node), record, Arc::clone(records), stopped));
        self.running.insert(name, Running { id, lun, stop, task });
    }

    /// Ends the tasks of volumes that are not to be kept.
    fn end(&mut self, node: &Arc<Node>, is_kept: impl Fn(&str, &Running) -> bool) {
        let all = std::mem::take(&mut self.running).into_iter();
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) = all.partition(|(name, one)| is_kept(name, one));
        self.running = kept;
        for (name, one) in gone {
            let Running { stop, task, .. } = one;
            let _ = stop.send(true);
            self.names.insert(name.clone());
            let node = Arc::clone(node);
            self.ending.spawn(async move {
                // Ended, or panicked, which its own log says.
                let _ = task.await;
                drop(stop);
                node.coordinators.forget(&name);
                name
            });
        }
    }

    fn ended(&mut self, name: Result<String, JoinError>) {
        match name {
            Ok(name) => self.names.remove(&name),
            // It waits, and does nothing that could panic.
            Err(_) => false,
        };
    }
}
