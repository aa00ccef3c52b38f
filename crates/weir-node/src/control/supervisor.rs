//! Starts a task for each disk, routes what the shards want to it, and keeps this node's membership.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use weir_cluster::housekeeping::prune_notes;
use weir_cluster::membership::SessionState;

use super::disk::{self, Inbox, Message, Request};
use super::node::Node;
use crate::api::{ApiError, ApiErrorKind};
use crate::shard::messages::Notice;

/// Pause between two attempts to join again.
const JOIN_AGAIN: Duration = Duration::from_millis(200);

/// Pause between two rounds of taking away what no record asks for any more.
const HOUSEKEEPING: Duration = Duration::from_secs(60);

/// The tasks of all disks.
#[derive(Debug, Default)]
pub struct Tasks {
    inboxes: Mutex<BTreeMap<String, Inbox>>,
}

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Inbox>> {
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way to a disk's task; starts it if need be.
    pub fn of(&self, name: &str, node: &Arc<Node>) -> Inbox {
        self.lock().entry(name.to_owned()).or_insert_with(|| disk::start(name, node)).clone()
    }

    /// Asks a disk's task for something and waits for the answer.
    ///
    /// # Errors
    /// What the task answered.
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
    let mut disks = node.world.disks.changes();
    let mut housekeeping = weir_task::interval(HOUSEKEEPING);
    weir_task::spawn(keep_membership(Arc::clone(&node)));
    loop {
        let known = disks.borrow_and_update().clone();
        // Who is started looks at its disk by itself.
        known.names().for_each(|name| drop(tasks.of(name, &node)));
        tasks.lock().retain(|name, _| known.exists(name));
        tokio::select! {
            biased;
            changed = disks.changed() => if changed.is_err() { return },
            notice = notices.recv() => match notice {
                Some(notice) => {
                    let inbox = tasks.of(disk_of(&notice), &node);
                    let _ = inbox.send(Message::Notice(notice)).await;
                }
                None => return,
            },
            _ = housekeeping.tick() => {
                if let Err(error) = prune_notes(&*node.registry).await {
                    tracing::debug!(%error, "housekeeping has to wait");
                }
            }
        }
    }
}

fn disk_of(notice: &Notice) -> &str {
    match notice {
        Notice::WantConfiguration { disk, .. }
        | Notice::WantPeer { disk, .. }
        | Notice::Refused { disk, .. }
        | Notice::Event { disk, .. } => disk,
    }
}

/// Joins again, as the same process, when the lease was lost. What others took meanwhile, the disks' tasks let go.
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
                tracing::warn!(%error, "cannot join again yet");
                weir_task::sleep(JOIN_AGAIN).await;
            }
            node.journal.tell("joined", me, format!("{me} is in the cluster again"));
        }
        if state.changed().await.is_err() {
            return;
        }
    }
}
