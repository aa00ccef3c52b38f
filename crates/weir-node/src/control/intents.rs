//! Disks that are being created or deleted, by this process or by others, as far as it knows ([`super::provisioning`]); volumes that this
//! process is making.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use weir_block::Nanos;
use weir_cluster::records::NodeRef;

/// The steps under way here, and the processes that have left some.
#[derive(Debug, Default)]
pub struct Intents {
    /// Disks with a step under way here.
    here: Mutex<BTreeSet<String>>,
    /// Disks whose deletion has begun here, before its first step and up to its end.
    deletions: Mutex<BTreeSet<String>>,
    /// Disks whose owner has asked whether this node can open them, and waits for the answer.
    checks: Mutex<BTreeSet<String>>,
    /// Keys of the setups of volumes that are under way here.
    setups: Mutex<BTreeSet<String>>,
    /// Volumes whose storage is looked at for what others have left.
    leftovers: Mutex<BTreeSet<String>>,
    /// Disks whose volume is looked at for what their former owners have left.
    bars: Mutex<BTreeSet<String>>,
    /// Disks that are served to nobody while something is done with their files.
    unserved: Mutex<BTreeSet<String>>,
    /// Snapshots that exist while clones are made of them.
    clones: Mutex<BTreeSet<String>>,
    /// Since when others have been seen to be gone.
    gone: Mutex<Gone>,
    /// Since when owners of disks that are to be deleted have been seen to have ended.
    ended: Mutex<Gone>,
}

impl Intents {
    /// Begins a step about a disk. `None` if one is under way.
    pub(crate) fn begin(&self, disk: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.here, disk)
    }

    /// Begins a deletion. `None` if one is under way.
    pub(super) fn begin_deletion(&self, disk: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.deletions, disk)
    }

    /// Begins to answer the owner of a disk. `None` if an earlier question of its is being answered.
    pub(super) fn begin_check(&self, disk: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.checks, disk)
    }

    /// Begins to make a volume, by the key that says so in the registry. `None` if one is being made of the same storage.
    pub(crate) fn begin_setup(&self, key: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.setups, key)
    }

    /// Begins to finish what others have left in a volume. `None` while an earlier attempt waits for its storage: each holds a thread (P10).
    pub(super) fn begin_leftovers(&self, volume: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.leftovers, volume)
    }

    /// Begins to remove what the former owners of a disk have left. `None` while an earlier attempt waits for the storage (P10).
    pub(super) fn begin_bar(&self, disk: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.bars, disk)
    }

    /// Begins something with a disk's file that may take long: the disk is served to nobody meanwhile. `None` if such a thing is under way.
    pub(crate) fn begin_unserved(&self, disk: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.unserved, disk)
    }

    /// Whether a disk is served to nobody for now.
    pub(crate) fn is_unserved(&self, disk: &str) -> bool {
        lock(&self.unserved).contains(disk)
    }

    /// Disks that are served to nobody for now.
    pub(crate) fn unserved(&self) -> BTreeSet<String> {
        lock(&self.unserved).clone()
    }

    /// Begins a clone, which has its own snapshot of this name. `None` if one is under way.
    pub(crate) fn begin_clone(&self, snapshot: &str) -> Option<UnderWay<'_>> {
        UnderWay::begin(&self.clones, snapshot)
    }

    /// Whether a clone that has this snapshot is being made here.
    pub(crate) fn is_being_cloned(&self, snapshot: &str) -> bool {
        lock(&self.clones).contains(snapshot)
    }

    /// Whether a deletion is under way here: nothing opens the disk.
    pub(crate) fn is_being_deleted(&self, disk: &str) -> bool {
        lock(&self.deletions).contains(disk)
    }

    /// Whether a step about a disk is under way here.
    pub(super) fn is_under_way(&self, disk: &str) -> bool {
        lock(&self.here).contains(disk)
    }

    /// Since when a process has been gone without a break; `None` of one that is there.
    pub(super) fn gone_since(&self, process: &NodeRef, is_live: bool, now: Nanos) -> Option<Nanos> {
        lock(&self.gone).look(process, is_live, now)
    }

    /// Since when an owner has been seen to have ended; `None` of one that is not known to have.
    pub(super) fn ended_since(
        &self,
        process: &NodeRef,
        has_ended: impl Fn(&NodeRef) -> bool,
        now: Nanos,
    ) -> Option<Nanos> {
        let mut ended = lock(&self.ended);
        // The registry forgets those that nothing names any more.
        ended.forget_live(|known| !has_ended(known));
        ended.look(process, !has_ended(process), now)
    }

    /// Processes that are there are not gone any more.
    pub(super) fn forget_live(&self, is_live: impl Fn(&NodeRef) -> bool) {
        lock(&self.gone).forget_live(is_live);
    }
}

/// A step of this process, under way while the value lives.
pub(crate) struct UnderWay<'a>(&'a Mutex<BTreeSet<String>>, String);

impl<'a> UnderWay<'a> {
    fn begin(all: &'a Mutex<BTreeSet<String>>, one: &str) -> Option<UnderWay<'a>> {
        lock(all).insert(one.to_owned()).then(|| UnderWay(all, one.to_owned()))
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        lock(self.0).remove(&self.1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Since when processes have been seen to be gone, without a break.
#[derive(Debug, Default)]
struct Gone(HashMap<NodeRef, Nanos>);

impl Gone {
    /// `None` of one that is there.
    fn look(&mut self, process: &NodeRef, is_live: bool, now: Nanos) -> Option<Nanos> {
        if is_live {
            self.0.remove(process);
            return None;
        }
        Some(*self.0.entry(process.clone()).or_insert(now))
    }

    fn forget_live(&mut self, is_live: impl Fn(&NodeRef) -> bool) {
        self.0.retain(|process, _| !is_live(process));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_comes_back_is_not_taken_for_gone_since_the_first_time() {
        let (mut gone, process, later) = (Gone::default(), NodeRef::new("n1", 1), Duration::from_secs(9));
        let start = Nanos(1);
        assert_eq!(gone.look(&process, false, start), Some(start));
        assert_eq!(gone.look(&process, false, start + later), Some(start));
        assert_eq!(gone.look(&process, true, start + later), None);
        assert_eq!(gone.look(&process, false, start + later * 2), Some(start + later * 2));
        gone.forget_live(|_| true);
        assert_eq!(gone.look(&process, false, start + later * 3), Some(start + later * 3));
    }
}
