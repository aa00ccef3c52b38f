//! The operator's word that the storage has moved a volume to another LUN: what counted as a copy of it is the volume from now on.
//!
//! Blocks of a disk are numbers, as good on one LUN as on another, so nothing may use the former LUN when a coordinator finds the other one:
//! neither a coordinator, nor a disk that is open. Each node looks for the LUN anew when it sees the record ([`crate::coordination`]), and a
//! disk that is opened later reads it anew.

use weir_cluster::placement::Live;
use weir_cluster::records::{CoordinatorRecord, DiskRecord, NodeRecord, Record, VolumeRecord, keys};
use weir_cluster::registry::{Entry, MAX_TRANSACTION, RegistryError, Transaction};
use weir_volume::lun::identity::overlap;

use super::volumes::{just_changed, named, noun};
use super::{Answer, Operations, check_named};
use crate::api::{ApiError, ApiErrorKind, ChangedIdentity, SetIdentity};
use crate::control::decide::is_live;
use crate::control::node::unavailable;

/// Longest identity, in bytes.
const LONGEST: usize = 256;

/// Records that show that nothing uses the volume. The change requires that they are as they were read.
struct Unused {
    /// The record of its coordinator.
    coordinator: Option<Entry>,
    /// Its disks: whoever opens one changes its record.
    disks: Vec<Entry>,
}

impl Operations {
    /// Another LUN is the volume's from now on.
    ///
    /// # Errors
    /// As [`Operations::disks`]; something uses the volume, or the other LUN is another volume's.
    pub async fn set_identity(&self, name: &str, wanted: SetIdentity) -> Answer<ChangedIdentity> {
        check_named(name)?;
        check_identity(&wanted.identity)?;
        let (entry, mut record) = self.volume_entry(name).await?;
        let kind = record.kind;
        let Some(lun) = record.lun.as_mut() else {
            return Err(refused(format!("volume {name} is {}: it has no LUN", noun(kind))));
        };
        let from = std::mem::replace(&mut lun.identity, wanted.identity.clone());
        let (volume, to, done) = (name.to_owned(), wanted.identity, !wanted.dry_run);
        let changed = ChangedIdentity { volume, from, to, done };
        self.check_no_volume_there(&changed).await?;
        let unused = self.check_unused(&record).await?;
        if wanted.dry_run || changed.from == changed.to {
            return Ok(changed);
        }
        match self.node.registry.transact(unused.guard(record.id, record.replace(&entry))).await {
            Ok(_) => {}
            Err(RegistryError::Conflict { .. }) => return Err(just_changed(name)),
            Err(error) => return Err(unavailable(error)),
        }
        let text = format!("its LUN is {} from now on; before: {}", changed.to, changed.from);
        self.node.journal.tell("volume-identity", name, text);
        Ok(changed)
    }

    /// No other volume has the LUN, or a part of it.
    async fn check_no_volume_there(&self, wanted: &ChangedIdentity) -> Answer<()> {
        let all = self.volume_records().await?;
        let is_it = |one: &&VolumeRecord| {
            let lun = one.lun.as_ref();
            one.name != wanted.volume && lun.is_some_and(|lun| overlap(&lun.identity, &wanted.to))
        };
        match all.iter().find(is_it) {
            Some(other) => {
                let message = format!("LUN {} is that of volume {}", wanted.to, other.name);
                Err(ApiError::new(ApiErrorKind::Exists, message))
            }
            None => Ok(()),
        }
    }

    /// No live process coordinates the volume, has it mounted, or has a disk of it open.
    async fn check_unused(&self, volume: &VolumeRecord) -> Answer<Unused> {
        let failed = |error: weir_cluster::records::RecordError| {
            ApiError::new(ApiErrorKind::Failed, error.to_string())
        };
        let nodes = self.node.registry.list(keys::NODES).await.map_err(unavailable)?.entries;
        let nodes: Vec<NodeRecord> =
            nodes.iter().map(NodeRecord::of).collect::<Result<_, _>>().map_err(failed)?;
        let live: Live = nodes.into_iter().map(|node| (node.name.clone(), node)).collect();
        let name = &volume.name;
        let coordinator = self.node.registry.get(&keys::coordinator(volume.id)).await.map_err(unavailable)?;
        if let Some(entry) = &coordinator {
            let record = CoordinatorRecord::of(entry).map_err(failed)?;
            let coordinates = record.coordinator.iter().map(|node| (node, "coordinates volume"));
            let mounts = record.mounts.iter().map(|node| (node, "may have mounted volume"));
            if let Some((node, what)) = coordinates.chain(mounts).find(|(node, _)| is_live(&live, node)) {
                let hint = "take the former LUN away from all nodes, or stop those that reach it; a node that has had it mounted lets go of it \
                            when it stops";
                return Err(refused(format!("node {} {what} {name}", node.node)).hint(hint));
            }
        }
        let (mut disks, mut open) = (Vec::new(), Vec::new());
        for entry in self.node.registry.list(keys::DISKS).await.map_err(unavailable)?.entries {
            let disk = DiskRecord::of(&entry).map_err(failed)?;
            if disk.volume != *name {
                continue;
            }
            let owner = disk.owner.filter(|owner| is_live(&live, owner));
            open.extend(owner.map(|owner| format!("{} (on {})", disk.name, owner.node)));
            disks.push(entry);
        }
        if !open.is_empty() {
            let message = format!("volume {name} has disks that are open: {}", named(open));
            return Err(
                refused(message).hint("a node that is stopped (SIGTERM) destages its disks and closes them")
            );
        }
        Ok(Unused { coordinator, disks })
    }
}

impl Unused {
    /// `change`, if all is as it was. A transaction compares no more than so many disks: the others were closed a moment ago, and whoever opens
    /// one has a path to the former LUN only where a node found that, which would coordinate the volume.
    fn guard(self, volume: u64, change: Transaction) -> Transaction {
        let key = keys::coordinator(volume);
        let change = match self.coordinator {
            Some(entry) => change.unchanged(key, entry.mod_revision),
            None => change.absent(key),
        };
        let room = MAX_TRANSACTION - change.compares.len();
        let disks = self.disks.into_iter().take(room);
        disks.fold(change, |change, disk| change.unchanged(disk.key, disk.mod_revision))
    }
}

fn refused(message: String) -> ApiError {
    ApiError::new(ApiErrorKind::Refused, message)
}

/// As the attributes of a device are read, without white space.
fn check_identity(identity: &str) -> Answer<()> {
    let is_one = |text: &str| {
        (1..=LONGEST).contains(&text.len())
            && !text.chars().any(|one| one.is_whitespace() || one.is_control())
    };
    if is_one(identity) {
        return Ok(());
    }
    // Truncated, so that a text from outside cannot flood the log.
    let shown: String = identity.chars().take(64).collect();
    let message = format!("{shown:?} is no identity of a LUN");
    let hint = "`weir volume show` and the events of a volume whose LUN has a copy name identities, for example naa.600508b400105e21";
    Err(ApiError::new(ApiErrorKind::Invalid, message).hint(hint))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use weir_cluster::records::{LunRecord, NodeRef, Policy, Source, VolumeKind};

    use super::*;
    use crate::control::Node;
    use crate::control::disk::tests::node;

    fn volume(name: &str, id: u64, identity: &str) -> VolumeRecord {
        let lun = LunRecord {
            identity: identity.into(),
            filesystem: "xfs".into(),
            uuid: "1".repeat(32),
            mark: "2".repeat(32),
            heartbeat: 0,
            redirected: false,
        };
        VolumeRecord { kind: VolumeKind::Lun, lun: Some(lun), ..VolumeRecord::dir(name, "/dev/x".into(), id) }
    }

    async fn put(node: &Node, record: &impl Record, key: String) {
        let put = Transaction { compares: Vec::new(), ops: vec![record.put(key)] };
        node.registry.transact(put).await.unwrap();
    }

    /// Volume v on `naa.1`, and w on `naa.9`.
    async fn operations(directory: &Path) -> (Operations, Arc<Node>) {
        let (node, mut told) = node(directory).await;
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        for record in [volume("v", 7, "naa.1"), volume("w", 8, "naa.9")] {
            put(&node, &record, keys::volume(&record.name)).await;
        }
        (Operations::new(Arc::clone(&node), Arc::default(), Arc::default()), node)
    }

    fn wanted(identity: &str, dry_run: bool) -> SetIdentity {
        SetIdentity { identity: identity.into(), dry_run }
    }

    async fn identity(node: &Node) -> String {
        node.volume("v").await.unwrap().lun.unwrap().identity
    }

    #[tokio::test]
    async fn a_volume_that_nothing_uses_is_on_another_lun_when_the_operator_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let (operations, node) = operations(directory.path()).await;
        // Of processes that have ended.
        let gone = NodeRef::new("a", 999);
        let record = CoordinatorRecord {
            volume: "v".into(),
            epoch: 3,
            coordinator: Some(gone.clone()),
            mounts: vec![gone.clone()],
            next: None,
        };
        put(&node, &record, keys::coordinator(7)).await;
        let mut disk = disk("d", "v");
        (disk.owner, disk.epoch) = (Some(gone), 1);
        put(&node, &disk, keys::disk("d")).await;
        let would = operations.set_identity("v", wanted("naa.2", true)).await.unwrap();
        assert_eq!((would.from.as_str(), would.to.as_str(), would.done), ("naa.1", "naa.2", false));
        assert_eq!(identity(&node).await, "naa.1");
        assert!(operations.set_identity("v", wanted("naa.2", false)).await.unwrap().done);
        assert_eq!(identity(&node).await, "naa.2");
        let again = operations.set_identity("v", wanted("naa.2", false)).await.unwrap();
        assert_eq!(again.from, "naa.2");
        for bad in ["", "naa.1 naa.2", &"x".repeat(300)] {
            let refused = operations.set_identity("v", wanted(bad, false)).await.unwrap_err();
            assert_eq!(refused.kind, ApiErrorKind::Invalid, "{refused}");
        }
        let refused = operations.set_identity("v", wanted("naa.9-part1", false)).await.unwrap_err();
        assert!(refused.kind == ApiErrorKind::Exists && refused.message.contains("volume w"), "{refused}");
    }

    fn disk(name: &str, volume: &str) -> DiskRecord {
        let source = Source::File { name: name.into() };
        DiskRecord::new(name, volume, source, 1 << 20, 4096, Policy::WriteThrough)
    }

    /// Its blocks would be written to the one LUN, and those of another node to the other one.
    #[tokio::test]
    async fn a_volume_that_something_uses_stays_where_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let (operations, node) = operations(directory.path()).await;
        let me = node.session.node_ref();
        let refused = async |words: &str| {
            for dry_run in [true, false] {
                let refused = operations.set_identity("v", wanted("naa.2", dry_run)).await.unwrap_err();
                let is_it = refused.kind == ApiErrorKind::Refused && refused.message.contains(words);
                assert!(is_it, "{refused}");
            }
        };
        let record = CoordinatorRecord {
            volume: "v".into(),
            epoch: 3,
            coordinator: None,
            mounts: vec![me.clone()],
            next: None,
        };
        put(&node, &record, keys::coordinator(7)).await;
        refused("node a may have mounted volume v").await;
        let record = CoordinatorRecord { coordinator: Some(me.clone()), ..record };
        put(&node, &record, keys::coordinator(7)).await;
        refused("node a coordinates volume v").await;
        let record = CoordinatorRecord { coordinator: None, mounts: Vec::new(), ..record };
        put(&node, &record, keys::coordinator(7)).await;
        for (name, volume) in [("d", "v"), ("other", "w")] {
            let record = DiskRecord { owner: Some(me.clone()), epoch: 1, ..disk(name, volume) };
            put(&node, &record, keys::disk(name)).await;
        }
        refused("volume v has disks that are open: d (on a)").await;
        assert_eq!(identity(&node).await, "naa.1");
    }

    /// Between the look and the change.
    #[tokio::test]
    async fn a_disk_that_is_opened_meanwhile_hinders_the_change() {
        let directory = tempfile::tempdir().unwrap();
        let (operations, node) = operations(directory.path()).await;
        put(&node, &disk("d", "v"), keys::disk("d")).await;
        let (entry, record) = operations.volume_entry("v").await.unwrap();
        let found = async || operations.check_unused(&record).await.unwrap();
        let opened = DiskRecord { owner: Some(node.session.node_ref()), epoch: 1, ..disk("d", "v") };
        let (first, second) = (found().await, found().await);
        put(&node, &opened, keys::disk("d")).await;
        let change = first.guard(record.id, record.replace(&entry));
        assert!(matches!(node.registry.transact(change).await, Err(RegistryError::Conflict { .. })));
        put(&node, &disk("d", "v"), keys::disk("d")).await;
        let (third, claim) = (found().await, NodeRef::new("a", 1));
        let (mounts, next) = (Vec::new(), None);
        let claimed =
            CoordinatorRecord { volume: "v".into(), epoch: 1, coordinator: Some(claim), mounts, next };
        put(&node, &claimed, keys::coordinator(record.id)).await;
        for unused in [second, third] {
            let change = unused.guard(record.id, record.replace(&entry));
            assert!(matches!(node.registry.transact(change).await, Err(RegistryError::Conflict { .. })));
        }
    }

    #[test]
    fn a_change_compares_what_a_transaction_can() {
        let entry = |number: u64| Entry {
            key: format!("disks/{number}"),
            value: Vec::new(),
            mod_revision: number,
            lease: None,
        };
        let unused = Unused { coordinator: None, disks: (1..=300).map(entry).collect() };
        let change = unused.guard(7, Transaction::new().unchanged("volumes/v", 1));
        assert_eq!(change.compares.len(), MAX_TRANSACTION);
        change.check().unwrap();
    }
}
