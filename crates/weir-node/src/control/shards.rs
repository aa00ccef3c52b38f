//! The way to the shards.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use crate::api::{ApiError, ApiErrorKind};
use crate::shard::messages::{Command, DiskStatus};

/// The queue of one shard, and how to wake its thread.
#[derive(Clone)]
pub struct ShardQueue {
    commands: mpsc::Sender<Command>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

/// The queues of all shards. Each disk is on one of them, for ever.
#[derive(Clone)]
pub struct Shards {
    queues: Arc<[ShardQueue]>,
}

impl std::fmt::Debug for Shards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shards({})", self.queues.len())
    }
}

impl ShardQueue {
    /// A queue whose reader is woken by `wake`.
    #[must_use]
    pub fn new(commands: mpsc::Sender<Command>, wake: impl Fn() + Send + Sync + 'static) -> ShardQueue {
        ShardQueue { commands, wake: Arc::new(wake) }
    }

    /// Queues a command; waits while the queue is full. A shard ends only with the process, so a command that it does not
    /// take any more is of no consequence.
    async fn send(&self, command: Command) {
        let _ = self.commands.send(command).await;
        (self.wake)();
    }
}

impl Shards {
    /// At least one queue.
    #[must_use]
    pub fn new(queues: Vec<ShardQueue>) -> Shards {
        assert!(!queues.is_empty(), "a node has at least one shard");
        Shards { queues: queues.into() }
    }

    fn of(&self, disk: &str) -> &ShardQueue {
        &self.queues[crc32c::crc32c(disk.as_bytes()) as usize % self.queues.len()]
    }

    /// Sends a command to the shard that has `disk`.
    pub async fn send(&self, disk: &str, command: Command) {
        self.of(disk).send(command).await;
    }

    /// As [`Shards::send`], without waiting.
    ///
    /// # Errors
    /// The queue is full; the command comes back.
    pub fn try_send(&self, disk: &str, command: Command) -> Result<(), Box<Command>> {
        let queue = self.of(disk);
        let sent = queue.commands.try_send(command).map_err(|error| Box::new(error.into_inner()));
        (queue.wake)();
        sent
    }

    /// Sends a command that is answered, and waits for the answer.
    ///
    /// # Errors
    /// The shard has ended.
    pub async fn ask<T>(
        &self,
        disk: &str,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ApiError> {
        let (answer, answered) = oneshot::channel();
        self.send(disk, command(answer)).await;
        answered.await.map_err(|_| ApiError::new(ApiErrorKind::Unavailable, "the node is stopping"))
    }

    /// What all disks on all shards are doing, owned and replicated.
    pub async fn status(&self) -> Vec<DiskStatus> {
        let mut all = Vec::new();
        for queue in self.queues.iter() {
            let (answer, answered) = oneshot::channel();
            queue.send(Command::Status { answer }).await;
            all.extend(answered.await.unwrap_or_default());
        }
        all
    }

    /// Ends all shards.
    pub async fn stop(&self) {
        for queue in self.queues.iter() {
            let (done, stopped) = oneshot::channel();
            queue.send(Command::Stop { done }).await;
            let _ = stopped.await;
        }
    }
}
