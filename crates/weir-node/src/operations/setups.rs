//! While storage is being made a volume, the registry says so: two nodes that format one LUN at once would each destroy what the other has
//! made, and the exclusive open of a device is one host's. Two volumes of one NBD server, by two of its names, would be the same exports.
//!
//! The key is under the lease of the process, which writes only while it certainly has that lease. So when another process finds no key,
//! nobody writes any more, except for a call that the storage delays.

use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{NodeRef, Record, SetupRecord, VolumeRecord};
use weir_cluster::registry::{RegistryError, Transaction};

use super::Answer;
use crate::api::{ApiError, ApiErrorKind};
use crate::control::Node;
use crate::control::intents::UnderWay;
use crate::control::node::unavailable;

/// Between two attempts to remove the key.
const AGAIN: Duration = Duration::from_secs(1);

/// A setup by this process, which no other process begins until [`Setup::end`], or [`Setup::commit`] is carried out.
pub(super) struct Setup<'a> {
    node: &'a Arc<Node>,
    keys: Vec<String>,
    revision: u64,
    /// The number of the session that has the key.
    session: u64,
    under_way: Vec<UnderWay<'a>>,
}

impl<'a> Setup<'a> {
    /// Begins to make `volume`, of what the keys name.
    ///
    /// # Errors
    /// [`ApiErrorKind::Unavailable`]: a process is making a volume of it, or the registry does not answer.
    pub(super) async fn begin(node: &'a Arc<Node>, volume: &str, keys: Vec<String>) -> Answer<Setup<'a>> {
        let me = node.session.node_ref();
        let mut under_way = Vec::new();
        for key in &keys {
            under_way.push(node.intents.begin_setup(key).ok_or_else(|| goes_on(&me, volume, &me))?);
        }
        let record = SetupRecord { volume: volume.to_owned(), by: me };
        let lease = node.session.lease();
        let mut hold = Transaction::new().when(node.session.guard());
        for key in keys.iter().map(String::as_str) {
            let change = match other(node, key, volume).await? {
                None => hold.absent(key),
                Some(revision) => hold.unchanged(key, revision),
            };
            hold = change.put_leased(key, record.encode(), lease);
        }
        let error = match node.registry.transact(hold).await {
            Ok(committed) => {
                let revision = committed.revision;
                return Ok(Setup { node, keys, revision, session: lease.0, under_way });
            }
            Err(error) => error,
        };
        drop(under_way);
        if !matches!(error, RegistryError::Conflict { .. }) {
            // The answer may be all that was lost.
            remove(node, keys).await;
            return Err(unavailable(error));
        }
        for key in &keys {
            other(node, key, volume).await?;
        }
        let message =
            format!("this node's session with the registry ended as volume {volume} was to be made");
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"))
    }

    /// Tells, at any time and from any thread, whether this process may write to the storage.
    pub(super) fn may_write(&self) -> impl Fn() -> bool + Send + 'static {
        let (leased, session) = (self.node.session.leased(), self.session);
        move || {
            let lease = *leased.borrow();
            lease.number == session && Nanos::now() < lease.until
        }
    }

    /// Makes a change part of the end of this setup: it is carried out only if no other process can have begun one.
    pub(super) fn commit(&self, change: Transaction) -> Transaction {
        let keys = self.keys.iter().map(String::as_str);
        keys.fold(change, |change, key| change.unchanged(key, self.revision).delete(key))
    }

    /// Ends it without a volume. If the registry does not answer, the keys are removed later.
    pub(super) async fn end(self) {
        let Setup { node, keys, under_way, .. } = self;
        drop(under_way);
        remove(node, keys).await;
    }
}

/// Another process has, or may have, set the storage of a volume up meanwhile.
pub(super) fn lost(record: &VolumeRecord) -> ApiError {
    let message = format!(
        "volume {} was not made: this node's session with the registry ended meanwhile, and another node may use {} by now",
        record.name,
        record.place()
    );
    ApiError::new(ApiErrorKind::Unavailable, message)
        .hint("`weir volume list` tells; if no volume has it, repeat the command")
}

/// Refuses what another process does. The revision of a key that an attempt of this process has left.
///
/// # Errors
/// That, or the registry does not answer.
pub(super) async fn other(node: &Node, key: &str, volume: &str) -> Answer<Option<u64>> {
    let Some(entry) = node.registry.get(key).await.map_err(unavailable)? else { return Ok(None) };
    let me = node.session.node_ref();
    match SetupRecord::of(&entry) {
        Ok(record) if record.by == me => Ok(Some(entry.mod_revision)),
        Ok(record) => Err(goes_on(&me, &record.volume, &record.by)),
        Err(error) => {
            let message = format!("volume {volume} is not made, because of the key {key}: {error}");
            Err(ApiError::new(ApiErrorKind::Refused, message)
                .hint("a newer version has written it; run the same version on all nodes"))
        }
    }
}

fn goes_on(me: &NodeRef, volume: &str, by: &NodeRef) -> ApiError {
    let who = if by == me { "this node" } else { "node" };
    let message = format!("{who} {} is making volume {volume} of the same storage", by.node);
    ApiError::new(ApiErrorKind::Unavailable, message)
        .hint(format!("`weir volume list` shows {volume} when it is made; if that has failed, try again, and if it hangs, end Weir on that node"))
}

/// Removes keys of this process; later, if the registry does not answer.
async fn remove(node: &Arc<Node>, keys: Vec<String>) {
    for key in keys {
        if remove_now(node, &key).await {
            continue;
        }
        let node = Arc::clone(node);
        weir_task::spawn(async move {
            loop {
                weir_task::sleep(AGAIN).await;
                if remove_now(&node, &key).await {
                    break;
                }
            }
        });
    }
}

/// Whether nothing is left of an ended attempt of this process.
async fn remove_now(node: &Node, key: &str) -> bool {
    // A later attempt has the key now, and removes it.
    let Some(_alone) = node.intents.begin_setup(key) else { return true };
    match node.registry.get(key).await {
        Ok(Some(entry)) if SetupRecord::of(&entry).is_ok_and(|one| one.by == node.session.node_ref()) => {
            let gone = Transaction::new().unchanged(key, entry.mod_revision).delete(key);
            matches!(node.registry.transact(gone).await, Ok(_) | Err(RegistryError::Conflict { .. }))
        }
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(key, %error, "removed later");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::Ordering;

    use weir_cluster::records::{LunRecord, VolumeKind, keys};

    use super::*;
    use crate::control::disk::tests::{SOON, node_in};
    use crate::control::faulty_registry::{FaultyRegistry, RegistryFaults};
    use crate::operations::Operations;

    /// Nodes `a` and `b` of one registry.
    async fn nodes(directory: &Path) -> (Arc<Node>, Arc<Node>, Arc<RegistryFaults>) {
        let faults = Arc::<RegistryFaults>::default();
        let registry = Arc::new(FaultyRegistry::open(directory, Arc::clone(&faults)));
        let (a, _) = node_in(registry.clone(), "a").await;
        let (b, _) = node_in(registry, "b").await;
        (a, b, faults)
    }

    fn key() -> Vec<String> {
        vec![keys::lun_setup("naa.1")]
    }

    async fn is_held(node: &Node) -> bool {
        node.registry.get(&key()[0]).await.unwrap().is_some()
    }

    #[tokio::test]
    async fn one_process_at_a_time_makes_a_volume_of_a_lun() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b, _) = nodes(directory.path()).await;
        let first = Setup::begin(&a, "v", key()).await.unwrap();
        assert!(first.may_write()());
        let refused = Setup::begin(&b, "w", key()).await.err().unwrap();
        assert!(refused.message.contains("node a is making volume v"), "{refused}");
        let repeated = Setup::begin(&a, "v", key()).await.err().unwrap();
        assert!(repeated.message.contains("this node a is making volume v"), "{repeated}");
        Setup::begin(&b, "w", vec![keys::lun_setup("naa.2")]).await.unwrap().end().await;
        first.end().await;
        assert!(!is_held(&a).await);
        let second = Setup::begin(&b, "w", key()).await.unwrap();
        Setup::begin(&a, "v", key()).await.err().expect("b is at it");
        second.end().await;
    }

    /// The key does not stay behind, whatever becomes of the registry's answers.
    #[tokio::test]
    async fn a_setup_whose_begin_or_end_is_in_doubt_hinders_nobody_for_long() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b, faults) = nodes(directory.path()).await;
        faults.unanswered.store(1, Ordering::Relaxed);
        let error = Setup::begin(&a, "v", key()).await.err().unwrap();
        assert_eq!(error.kind, ApiErrorKind::Unavailable);
        assert!(!is_held(&a).await, "the answer alone was lost");
        let first = Setup::begin(&a, "v", key()).await.unwrap();
        faults.refuses.store(true, Ordering::Relaxed);
        first.end().await;
        assert!(is_held(&a).await, "the removal was lost");
        faults.refuses.store(false, Ordering::Relaxed);
        // The process that has left it goes on at once; others when it is removed.
        Setup::begin(&a, "v", key()).await.unwrap();
        let (gone, deadline) = (async || !is_held(&b).await, Nanos::now() + SOON);
        while !gone().await {
            assert!(Nanos::now() < deadline);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Setup::begin(&b, "w", key()).await.unwrap().end().await;
    }

    /// The volume of a process that was cut off from the registry is not made, and it does not write any more.
    #[tokio::test]
    async fn a_setup_ends_with_the_session() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b, _) = nodes(directory.path()).await;
        let operations = Operations::new(Arc::clone(&a), Arc::default(), Arc::default());
        let first = Setup::begin(&a, "v", key()).await.unwrap();
        let may_write = first.may_write();
        a.registry.revoke(a.session.lease()).await.unwrap();
        let second = Setup::begin(&b, "w", key()).await.unwrap();
        a.session.register_again().await.unwrap();
        assert!(!may_write(), "another session has no part in it");
        let lun = LunRecord {
            identity: "naa.1".into(),
            filesystem: "xfs".into(),
            uuid: "0".repeat(32),
            mark: "0".repeat(32),
            heartbeat: 0,
            redirected: false,
        };
        let (name, path) = ("v".to_owned(), "/dev/x".into());
        let record = VolumeRecord { name, kind: VolumeKind::Lun, path, id: 7, lun: Some(lun), nbd: None };
        let refused = operations.register(record.clone(), Some(&first)).await.unwrap_err();
        assert!(refused.message.contains("volume v was not made"), "{refused}");
        assert!(a.registry.get(&keys::volume("v")).await.unwrap().is_none());
        first.end().await;
        assert!(is_held(&b).await, "it is the other's");
        let operations = Operations::new(Arc::clone(&b), Arc::default(), Arc::default());
        operations.register(record, Some(&second)).await.unwrap();
        assert!(!is_held(&b).await, "the volume's record replaces it");
    }
}
