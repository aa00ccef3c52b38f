//! The registry's records, as this node last read them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use weir_cluster::Machine;
use weir_cluster::records::{
    DiskRecord, MemberRecord, NodeRecord, NodeRef, NodeStatesRecord, Record, ReleasedRecord, StoppedRecord,
    VolumeRecord, keys,
};
use weir_cluster::registry::{Registry, RegistryError, RegistryErrorKind};
use weir_cluster::view::{Records, Seen, View};

/// Pause before the registry is listed again at the start.
const LIST_AGAIN: Duration = Duration::from_millis(200);

/// Copies of everything that decisions rest on, kept up to date.
#[derive(Debug)]
pub struct RegistryCopy {
    /// All disks, as the view has them: [`RegistryCopy::seen`] may know of later records.
    pub disks: View<DiskRecord>,
    /// The records of disks that this node has read from the registry, or written there, and that the view does not show yet, with
    /// their revisions. Others connect to this node on the strength of a record that it had to read; that must not be forgotten
    /// when the registry goes away before the view has caught up.
    ahead: Mutex<BTreeMap<String, (u64, DiskRecord)>>,
    /// Counts what was ahead of the view.
    learned: watch::Sender<u64>,
    /// All volumes.
    pub volumes: View<VolumeRecord>,
    /// The nodes whose lease stands.
    pub nodes: View<NodeRecord>,
    /// The nodes that have ever joined and have not been removed. Not an input of decisions about disks.
    pub members: View<MemberRecord>,
    /// The nodes' states: one record.
    states: View<NodeStatesRecord>,
    /// The last one that could be read.
    known_states: Mutex<KnownStates>,
    /// Processes that have ended.
    stopped: View<StoppedRecord>,
    /// Former owners that have no I/O under way any more.
    released: View<ReleasedRecord>,
    /// The machine of this process.
    machine: Option<Machine>,
}

impl RegistryCopy {
    /// Lists and follows. Waits for a registry that does not answer: a process that ended here would keep its name for as long as its
    /// lease lasts.
    ///
    /// # Errors
    /// The registry refuses, for a reason that does not pass.
    pub async fn start(registry: &Arc<dyn Registry>) -> Result<RegistryCopy, RegistryError> {
        loop {
            match RegistryCopy::list(registry).await {
                Err(error)
                    if matches!(error.kind(), RegistryErrorKind::Retry | RegistryErrorKind::ListAgain) =>
                {
                    tracing::info!(%error, "listing the registry again");
                    weir_task::sleep(LIST_AGAIN).await;
                }
                other => return other,
            }
        }
    }

    async fn list(registry: &Arc<dyn Registry>) -> Result<RegistryCopy, RegistryError> {
        Ok(RegistryCopy {
            known_states: Mutex::default(),
            ahead: Mutex::default(),
            learned: watch::Sender::new(0),
            disks: View::start(Arc::clone(registry), keys::DISKS).await?,
            volumes: View::start(Arc::clone(registry), keys::VOLUMES).await?,
            nodes: View::start(Arc::clone(registry), keys::NODES).await?,
            members: View::start(Arc::clone(registry), keys::MEMBERS).await?,
            states: View::start(Arc::clone(registry), keys::NODE_STATES_PREFIX).await?,
            stopped: View::start(Arc::clone(registry), keys::STOPPED).await?,
            released: View::start(Arc::clone(registry), keys::RELEASED).await?,
            machine: Machine::here(),
        })
    }

    /// The newest record of a disk that this node knows: as the view has it, or as it was read since.
    #[must_use]
    pub fn seen(&self, name: &str) -> Seen<DiskRecord> {
        let (shown, mut ahead) = (self.disks.now(), self.ahead());
        if let Some((revision, record)) = ahead.get(name) {
            if !shown.has_caught_up(name, *revision) {
                return Seen::Record { revision: *revision, record: record.clone() };
            }
            ahead.remove(name);
        }
        shown.seen(name)
    }

    /// As [`RegistryCopy::seen`], if it can be read.
    #[must_use]
    pub fn disk(&self, name: &str) -> Option<DiskRecord> {
        match self.seen(name) {
            Seen::Record { record, .. } => Some(record),
            Seen::Nothing | Seen::Unreadable { .. } => None,
        }
    }

    /// Visits the newest records of all disks, as far as they can be read.
    pub fn for_each_disk(&self, mut visit: impl FnMut(&DiskRecord)) {
        let (shown, ahead) = (self.disks.now(), self.ahead());
        let later = |name: &str| {
            let found = ahead.get(name).filter(|(revision, _)| !shown.has_caught_up(name, *revision));
            found.map(|(_, record)| record)
        };
        for (name, record) in shown.iter() {
            visit(later(name).unwrap_or(record));
        }
        ahead.keys().filter(|name| !shown.contains_key(*name)).filter_map(|name| later(name)).for_each(visit);
    }

    /// The registry itself has said that a disk's record is this at `revision`: the view may lag behind.
    pub fn learn(&self, record: &DiskRecord, revision: u64) {
        let (shown, mut ahead) = (self.disks.now(), self.ahead());
        ahead.retain(|name, (revision, _)| !shown.has_caught_up(name, *revision));
        let is_old = ahead.get(&record.name).is_some_and(|(known, _)| *known >= revision);
        if is_old || shown.has_caught_up(&record.name, revision) {
            return;
        }
        ahead.insert(record.name.clone(), (revision, record.clone()));
        drop(ahead);
        self.learned.send_modify(|count| *count += 1);
    }

    /// Wakes when a disk's record is known that the view does not show yet.
    #[must_use]
    pub fn learned(&self) -> watch::Receiver<u64> {
        self.learned.subscribe()
    }

    fn ahead(&self) -> MutexGuard<'_, BTreeMap<String, (u64, DiskRecord)>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The nodes' states, as last read. While a newer version of Weir has written the record, those before it: a drained node takes no
    /// disks because of that.
    #[must_use]
    pub fn node_states(&self) -> NodeStatesRecord {
        let name = short(keys::NODE_STATES, keys::NODE_STATES_PREFIX);
        let mut known = self.known_states.lock().unwrap_or_else(PoisonError::into_inner);
        match self.states.now().seen(name) {
            Seen::Record { record, .. } => *known = KnownStates { states: record, is_reported: false },
            Seen::Nothing => *known = KnownStates::default(),
            Seen::Unreadable { error, .. } => {
                if !std::mem::replace(&mut known.is_reported, true) {
                    tracing::error!(%error, "the nodes' states cannot be read; this node uses those that it knows");
                }
            }
        }
        known.states.clone()
    }

    /// Whether [`RegistryCopy::node_states`] are those that the registry has now.
    #[must_use]
    pub fn reads_node_states(&self) -> bool {
        let name = short(keys::NODE_STATES, keys::NODE_STATES_PREFIX);
        !matches!(self.states.now().seen(name), Seen::Unreadable { .. })
    }

    /// Whether a process is known to have ended.
    #[must_use]
    pub fn has_stopped(&self, node: &NodeRef) -> bool {
        self.stopped.now().contains_key(short(&keys::stopped(node), keys::STOPPED))
    }

    /// Whether a process is known to have ended, and ran where this one can see what the kernel still has of it.
    #[must_use]
    pub fn has_stopped_here(&self, node: &NodeRef) -> bool {
        let stopped = self.stopped.now();
        let note = stopped.get(short(&keys::stopped(node), keys::STOPPED));
        note.is_some_and(|note| note.machine.is_some() && note.machine == self.machine)
    }

    /// Processes of a node before this one that are known to have ended.
    #[must_use]
    pub fn former_of(&self, me: &NodeRef) -> Vec<NodeRef> {
        let stopped = self.stopped.now();
        let own = stopped.values().map(|note| &note.node).filter(|one| one.node == me.node && **one != *me);
        own.cloned().collect()
    }

    /// Whether a former owner has declared that it has no I/O to the disk in flight any more.
    #[must_use]
    pub fn has_released(&self, disk: &str, epoch: u64, node: &NodeRef) -> bool {
        let key = keys::released(disk, epoch, &node.node);
        self.released.now().get(short(&key, keys::RELEASED)).is_some_and(|record| record.node == *node)
    }

    /// Wakes the task of a disk on changes from now on.
    #[must_use]
    pub fn changes_of(&self, disk: &str) -> DiskChanges {
        let mut changes = DiskChanges {
            disk: disk.to_owned(),
            record: self.disks.puts_of(disk),
            volume: None,
            released: self.released.puts_of(disk),
            processes: self.process_changes(),
        };
        changes.follow_volume(self);
        changes
    }

    /// Wakes on changes from now on.
    #[must_use]
    pub fn changes(&self) -> Changes {
        Changes {
            disks: fresh(self.disks.changes()),
            volumes: fresh(self.volumes.changes()),
            processes: self.process_changes(),
            released: fresh(self.released.changes()),
        }
    }

    fn process_changes(&self) -> ProcessChanges {
        ProcessChanges {
            nodes: fresh(self.nodes.changes()),
            states: fresh(self.states.changes()),
            stopped: fresh(self.stopped.changes()),
        }
    }
}

/// Wakes the task of one disk. A change of other disks does not concern it, nor does what they leave in the volumes' records: a cluster
/// with hundreds of disks would otherwise wake a task for each of them whenever one changes.
#[derive(Debug)]
pub struct DiskChanges {
    disk: String,
    /// Of its record.
    record: watch::Receiver<()>,
    /// The name of its volume, and changes of that one's record. `None` while the disk has no record.
    volume: Option<(String, watch::Receiver<()>)>,
    /// Of its former owners' declarations.
    released: watch::Receiver<()>,
    processes: ProcessChanges,
}

impl DiskChanges {
    /// Waits for the next change, as [`Changes::next`]. `records` are those that this was made from. Cancel safe.
    pub async fn next(&mut self, records: &RegistryCopy) {
        let volume_changed = async {
            match &mut self.volume {
                Some((_, changes)) => changes.changed().await,
                None => std::future::pending().await,
            }
        };
        let changed = tokio::select! {
            biased;
            changed = self.record.changed() => changed,
            changed = volume_changed => changed,
            changed = self.processes.changed() => changed,
            changed = self.released.changed() => changed,
        };
        wait_if_over(changed).await;
        self.follow_volume(records);
    }

    /// A disk of this name may have been made meanwhile, or another one, in another volume.
    fn follow_volume(&mut self, records: &RegistryCopy) {
        let shown = records.disks.now();
        let volume = shown.get(&self.disk).map(|record| &record.volume);
        if volume != self.volume.as_ref().map(|(name, _)| name) {
            self.volume = volume.map(|name| (name.clone(), records.volumes.changes_of(name)));
        }
    }
}

/// The nodes' states that could be read last.
#[derive(Debug, Default)]
struct KnownStates {
    states: NodeStatesRecord,
    /// The log says that the present record cannot be read.
    is_reported: bool,
}

/// A key without its prefix.
pub fn short<'a>(key: &'a str, prefix: &str) -> &'a str {
    key.strip_prefix(prefix).unwrap_or(key)
}

type Receiver<R> = watch::Receiver<Arc<Records<R>>>;

fn fresh<R: Record>(mut receiver: Receiver<R>) -> Receiver<R> {
    receiver.mark_unchanged();
    receiver
}

/// Notifies of changes that concern nodes and their processes.
#[derive(Debug)]
struct ProcessChanges {
    nodes: Receiver<NodeRecord>,
    states: Receiver<NodeStatesRecord>,
    stopped: Receiver<StoppedRecord>,
}

impl ProcessChanges {
    async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            biased;
            changed = self.nodes.changed() => changed,
            changed = self.states.changed() => changed,
            changed = self.stopped.changed() => changed,
        }
    }
}

/// Returns after a change. After the end of a view it never returns: a view ends only with the node.
async fn wait_if_over(changed: Result<(), watch::error::RecvError>) {
    if changed.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Wakes tasks that depend on any part of the [`RegistryCopy`].
#[derive(Debug)]
pub struct Changes {
    disks: Receiver<DiskRecord>,
    volumes: Receiver<VolumeRecord>,
    processes: ProcessChanges,
    released: Receiver<ReleasedRecord>,
}

impl Changes {
    /// Waits for the next change. Several in a row may be seen as one. Cancel safe.
    pub async fn next(&mut self) {
        let changed = tokio::select! {
            biased;
            changed = self.disks.changed() => changed,
            changed = self.volumes.changed() => changed,
            changed = self.processes.changed() => changed,
            changed = self.released.changed() => changed,
        };
        wait_if_over(changed).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use weir_cluster::node_state::{Event, Rules, step};
    use weir_cluster::registry::Transaction;

    use super::*;
    use crate::control::disk::tests::{SOON, disk_of_a, node};
    use crate::control::faulty_registry::{FaultyRegistry, RegistryFaults};

    async fn copy(directory: &std::path::Path, lost: usize) -> (Arc<dyn Registry>, RegistryCopy) {
        let faults = Arc::new(RegistryFaults::default());
        faults.lost_lists.store(lost, Ordering::Relaxed);
        let registry: Arc<dyn Registry> = Arc::new(FaultyRegistry::open(directory, faults));
        let copy = RegistryCopy::start(&registry).await.unwrap();
        (registry, copy)
    }

    /// As at a change of etcd's leader.
    #[tokio::test]
    async fn a_start_survives_listings_without_an_answer() {
        let directory = tempfile::tempdir().unwrap();
        let (_registry, copy) = copy(directory.path(), 2).await;
        assert_eq!(copy.node_states(), NodeStatesRecord::default());
    }

    #[tokio::test]
    async fn states_of_a_newer_version_do_not_end_a_drain() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, copy) = copy(directory.path(), 0).await;
        let mut changes = copy.changes();
        let (rules, mut states) = (Rules::default(), NodeStatesRecord::default());
        for event in
            [Event::Present { node: "a".into() }, Event::Drain { node: "a".into(), fewer_copies: false }]
        {
            states = step(&states, &rules, 1, &event).unwrap().0;
        }
        registry.transact(states.create(keys::NODE_STATES)).await.unwrap();
        changes.next().await;
        assert_eq!(copy.node_states(), states);
        let newer = String::from_utf8(states.encode()).unwrap().replace("\"v\":1", "\"v\":2");
        registry.transact(Transaction::new().put(keys::NODE_STATES, newer)).await.unwrap();
        changes.next().await;
        assert!(matches!(copy.states.now().seen("all"), Seen::Unreadable { .. }));
        assert_eq!(copy.node_states(), states, "the last known ones");
        registry.transact(Transaction::new().delete(keys::NODE_STATES)).await.unwrap();
        changes.next().await;
        assert_eq!(copy.node_states(), NodeStatesRecord::default());
    }

    #[tokio::test]
    async fn the_task_of_a_disk_wakes_for_its_own_records() {
        const NOTHING: Duration = Duration::from_millis(50);
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let (copy, registry) = (&node.records, &node.registry);
        let record = disk_of_a(&node, |_| {}).await;
        let mut changes = copy.changes_of("d");
        let mut all = copy.changes();
        let (volume, volume_key) = (VolumeRecord::dir("v", "/".into(), 7), keys::volume("v"));
        registry.transact(volume.create(volume_key.clone())).await.unwrap();
        weir_task::timeout(SOON, changes.next(copy)).await.unwrap();
        all.next().await;
        let other = DiskRecord { name: "e".into(), id: record.id + 1, ..record.clone() };
        let released = |disk: &str| {
            let (disk, node) = (disk.to_owned(), NodeRef::new("b", 1));
            let note = ReleasedRecord { disk, epoch: 3, node, time_unix_ms: 0 };
            Transaction::new().put(keys::released(&note.disk, 3, "b"), note.encode())
        };
        // Another disk is made, which writes the volume's record once more, and one is released.
        let touched = Transaction::new().put(volume_key.clone(), volume.encode());
        for change in [other.create(keys::disk("e")), touched, released("e")] {
            registry.transact(change).await.unwrap();
            weir_task::timeout(SOON, all.next()).await.unwrap();
            assert!(weir_task::timeout(NOTHING, changes.next(copy)).await.is_err(), "woken");
        }
        let entry = registry.get(&keys::disk("d")).await.unwrap().unwrap();
        let replaced = VolumeRecord { id: 8, ..volume.clone() };
        let own = [
            // As it was: whoever is in doubt about a write of it has to see that it is there.
            record.replace(&entry),
            Transaction::new().put(volume_key, replaced.encode()),
            released("d"),
            Transaction::new().delete(keys::disk("d")),
        ];
        for change in own {
            registry.transact(change).await.unwrap();
            weir_task::timeout(SOON, changes.next(copy)).await.unwrap();
        }
        // The next disk of this name is in another volume.
        let moved = DiskRecord { volume: "w".into(), id: record.id + 2, ..record };
        registry.transact(moved.create(keys::disk("d"))).await.unwrap();
        weir_task::timeout(SOON, changes.next(copy)).await.unwrap();
        let made = VolumeRecord { name: "w".into(), ..volume };
        registry.transact(Transaction::new().put(keys::volume("w"), made.encode())).await.unwrap();
        weir_task::timeout(SOON, changes.next(copy)).await.unwrap();
    }
}
