//! The queue of a shard: how the control plane gives it commands, and knows whether it turns.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use weir_block::Nanos;

use super::health::Health;
use super::messages::{Command, DiskStatus};

/// Longest wait for a shard to say what its disks are doing.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Pause between two looks at whether the shard that is to answer hangs.
const LOOK: Duration = Duration::from_millis(100);

/// The queue of one shard, how to wake its thread, and whether it turns.
#[derive(Clone)]
pub struct ShardQueue {
    commands: mpsc::Sender<Command>,
    wake: Arc<dyn Fn() + Send + Sync>,
    health: Arc<Health>,
    /// The shard's last status.
    last: Arc<Mutex<Vec<DiskStatus>>>,
}

impl ShardQueue {
    /// A queue whose reader is woken by `wake`.
    #[must_use]
    pub fn new(commands: mpsc::Sender<Command>, wake: impl Fn() + Send + Sync + 'static) -> ShardQueue {
        let (health, last) = (Arc::default(), Arc::default());
        ShardQueue { commands, wake: Arc::new(wake), health, last }
    }

    /// Sets the shard's health.
    #[must_use]
    pub fn with_health(self, health: Arc<Health>) -> ShardQueue {
        ShardQueue { health, ..self }
    }

    /// The shard's health.
    #[must_use]
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Queues a command; waits while the queue is full. A shard ends only with the process, so a command that it does not
    /// take any more is of no consequence.
    pub(crate) async fn send(&self, command: Command) {
        let _ = self.commands.send(command).await;
        (self.wake)();
    }

    /// Asks what the disks are doing. Nothing, when the shard hangs or takes nothing more.
    pub(crate) fn ask_status(&self) -> Option<oneshot::Receiver<Vec<DiskStatus>>> {
        if self.health.hangs(Nanos::now()).is_some() {
            return None;
        }
        let (answer, answered) = oneshot::channel();
        self.commands.try_send(Command::Status { answer }).ok()?;
        (self.wake)();
        Some(answered)
    }

    /// The answer, if it comes in time.
    pub(crate) async fn answer(
        &self,
        asked: Option<oneshot::Receiver<Vec<DiskStatus>>>,
        until: Nanos,
    ) -> Option<Vec<DiskStatus>> {
        match weir_task::timeout(until - Nanos::now(), asked?).await {
            Ok(Ok(statuses)) => {
                self.last().clone_from(&statuses);
                Some(statuses)
            }
            // The node is stopping.
            Ok(Err(_)) => Some(Vec::new()),
            Err(_) => None,
        }
    }

    /// The shard's last status, marked as such.
    pub(crate) fn said_last(&self, number: usize) -> Vec<DiskStatus> {
        let mut statuses = self.last().clone();
        for status in &mut statuses {
            status.state = DiskStatus::SILENT.into();
            status.reason =
                format!("shard {number} of this node does not answer; the rest is its last status");
        }
        statuses
    }

    fn last(&self) -> MutexGuard<'_, Vec<DiskStatus>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends when the shard hangs; says for how long.
    pub(crate) async fn hangs(&self) -> Duration {
        loop {
            weir_task::sleep(LOOK).await;
            if let Some(lasts) = self.health.hangs(Nanos::now()).filter(|&lasts| lasts > PATIENCE) {
                return lasts;
            }
        }
    }

    /// Queues a command without waiting.
    ///
    /// # Errors
    /// The queue is full; the command comes back.
    pub(crate) fn try_send(&self, command: Command) -> Result<(), Box<Command>> {
        let sent = self.commands.try_send(command).map_err(|error| Box::new(error.into_inner()));
        (self.wake)();
        sent
    }
}
