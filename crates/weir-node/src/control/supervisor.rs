//! Starts a task for each disk, routes what the shards want to it, and keeps this node's membership.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use weir_block::Nanos;
use weir_cluster::housekeeping::prune_notes;
use weir_cluster::membership::SessionState;
use weir_cluster::records::DiskRecord;
use weir_cluster::view::Records;

use super::disk::{self, Inbox, Message, Request};
use super::lun_disks;
use super::node::Node;
use crate::error::{ApiError, ApiErrorKind};
use crate::shard::messages::Notice;
use crate::throttles::JOIN_FAILED;

/// Pause between two attempts to join again.
const JOIN_AGAIN: Duration = Duration::from_millis(200);

/// Pause between two rounds of taking away what no record asks for any more.
const HOUSEKEEPING: Duration = Duration::from_secs(60);

/// The length of the queue of a disk's notices from its shard; further ones are dropped (P10). A disk requests a few things
/// at a time, and waits for the answers.
const NOTICES: usize = 256;

/// The ways to a disk's task.
#[derive(Debug)]
struct Door {
    inbox: Inbox,
    /// Notices of its shard on their way to the inbox: the sender does not wait for room there.
    notices: mpsc::Sender<Notice>,
}

impl Door {
    fn new(inbox: Inbox) -> Door {
        let (notices, mut wanted) = mpsc::channel(NOTICES);
        let to = inbox.clone();
        weir_task::spawn(async move {
            while let Some(notice) = wanted.recv().await {
                if to.send(Message::Notice(notice)).await.is_err() {
                    return;
                }
            }
        });
        Door { inbox, notices }
    }
}

/// The tasks of all disks.
#[derive(Debug, Default)]
pub struct Tasks {
    doors: Mutex<BTreeMap<String, Door>>,
}

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Door>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way to a disk's task; starts it if need be.
    pub fn of(&self, name: &str, node: &Arc<Node>) -> Inbox {
        self.with_door(name, node, |door| door.inbox.clone())
    }

    fn with_door<T>(&self, name: &str, node: &Arc<Node>, work: impl FnOnce(&Door) -> T) -> T {
        work(self.lock().entry(name.to_owned()).or_insert_with(|| Door::new(disk::start(name, node))))
    }

    /// Has a task for each disk that there is, and for no other one.
    fn keep(&self, known: &Records<DiskRecord>, node: &Arc<Node>) {
        let mut doors = self.lock();
        doors.retain(|name, _| known.exists(name));
        for name in known.names() {
            if !doors.contains_key(name) {
                // It reads its disk's record by itself.
                doors.insert(name.clone(), Door::new(disk::start(name, node)));
            }
        }
    }

    /// Passes on what a shard wants for a disk. Never waits: a task that hangs holds up its own disk only.
    fn pass(&self, notice: Notice, node: &Arc<Node>) {
        let name = disk_of(&notice).to_owned();
        if let Err(error) = self.with_door(&name, node, |door| door.notices.try_send(notice)) {
            tracing::error!(disk = name, %error, "dropping a notice of its shard: its task makes no progress");
        }
    }

    /// Asks a disk's task for something and waits for the answer.
    ///
    /// # Errors
    /// The task's error.
    pub async fn ask<T>(
        &self,
        name: &str,
        node: &Arc<Node>,
        request: impl FnOnce(oneshot::Sender<Result<T, ApiError>>) -> Request,
    ) -> Result<T, ApiError> {
        let stopping = || ApiError::new(ApiErrorKind::Unavailable, "the node is stopping");
        let (done, answer) = oneshot::channel();
        self.of(name, node).send(Message::Request(request(done))).await.map_err(|_| stopping())?;
        answer.await.unwrap_or_else(|_| Err(stopping()))
    }
}

/// Runs until the node stops.
pub async fn run(node: Arc<Node>, tasks: Arc<Tasks>, mut notices: mpsc::Receiver<Notice>) {
    let mut disks = node.records.disks.changes();
    weir_task::spawn(keep_membership(Arc::clone(&node)));
    weir_task::spawn(keep_house(Arc::clone(&node)));
    loop {
        {
            // Not held for longer: the view would have to copy all records at the next change.
            let known = disks.borrow_and_update().clone();
            tasks.keep(&known, &node);
        }
        tokio::select! {
            biased;
            changed = disks.changed() => if changed.is_err() { return },
            notice = notices.recv() => match notice {
                Some(Notice::Fenced { disk }) => lun_disks::fenced(&node, &disk),
                Some(Notice::WantCoordinator { disk }) => {
                    weir_task::spawn(lun_disks::connect(Arc::clone(&node), disk));
                }
                Some(Notice::WantPath { disk }) => {
                    weir_task::spawn(lun_disks::find_path(Arc::clone(&node), disk));
                }
                Some(notice) => tasks.pass(notice, &node),
                None => return,
            },
        }
    }
}

/// Takes away what no record asks for any more.
async fn keep_house(node: Arc<Node>) {
    let mut housekeeping = weir_task::interval(HOUSEKEEPING);
    loop {
        housekeeping.tick().await;
        if let Err(error) = prune_notes(&*node.registry).await {
            tracing::debug!(%error, "housekeeping has to wait");
        }
    }
}

fn disk_of(notice: &Notice) -> &str {
    match notice {
        Notice::WantConfiguration { disk, .. }
        | Notice::WantPeer { disk, .. }
        | Notice::Refused { disk, .. }
        | Notice::WantCoordinator { disk }
        | Notice::WantPath { disk }
        | Notice::Fenced { disk }
        | Notice::Event { disk, .. } => disk,
    }
}

/// Joins again, as the same process, when the lease was lost. The disks' tasks release disks that others took meanwhile.
async fn keep_membership(node: Arc<Node>) {
    let mut state = node.session.state();
    loop {
        let now = state.borrow_and_update().clone();
        if now == SessionState::Lost {
            let me = &node.config.name;
            node.journal.tell(
                "lease-lost",
                me,
                format!("the registry has not heard {me} in time; joining again"),
            );
            while let Err(error) = node.session.register_again().await {
                if let Some(left_out) = JOIN_FAILED.pass(Nanos::now()) {
                    tracing::warn!(%error, left_out, "cannot join again yet");
                }
                weir_task::sleep(JOIN_AGAIN).await;
            }
            node.journal.tell("joined", me, format!("{me} is in the cluster again"));
        }
        if state.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::disk::tests::{SOON, disk_of_a, node};
    use weir_cluster::records::{Record, keys};

    /// The shards' notices of all disks come through one queue: a task that takes nothing must not stop it (P10).
    #[tokio::test]
    async fn a_task_that_hangs_holds_up_its_own_disk_only() {
        let directory = tempfile::tempdir().expect("a directory");
        let (node, _told) = node(directory.path()).await;
        let mut other = disk_of_a(&node, |_| {}).await;
        other.name = "e".into();
        node.registry.transact(other.create(keys::disk("e"))).await.expect("there is none");
        let mut disks = node.records.disks.changes();
        disks.wait_for(|known| known.contains_key("e")).await.expect("the view goes on");
        let tasks = Arc::new(Tasks::default());
        let (hung, _full) = mpsc::channel(1);
        let (inbox, mut messages) = mpsc::channel(1);
        tasks.lock().insert("d".into(), Door::new(hung));
        tasks.lock().insert("e".into(), Door::new(inbox));
        let (notices, queue) = mpsc::channel(4);
        weir_task::spawn(run(Arc::clone(&node), tasks, queue));
        let passed = async {
            for disk in ["d", "d", "d", "d", "d", "d", "d", "d", "e"] {
                let notice = Notice::Refused { disk: disk.into(), epoch: 7 };
                notices.send(notice).await.expect("the supervisor runs");
            }
            messages.recv().await
        };
        let passed = weir_task::timeout(SOON, passed).await.expect("it hangs");
        assert!(matches!(passed, Some(Message::Notice(Notice::Refused { .. }))), "{passed:?}");
    }
}
