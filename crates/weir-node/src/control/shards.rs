//! The connection to the shards.
//!
//! A shard answers within a turn, so each request has a time limit: a shard that hangs must not hang the control plane. Its
//! last status replaces its answer where that is better than none.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_block::Nanos;

use crate::error::{ApiError, ApiErrorKind};
use crate::shard::counters::DiskCounts;
use crate::shard::health::Look;
use crate::shard::messages::{Command, DiskStatus};
use crate::shard::queue::{PATIENCE, ShardQueue};
use crate::shard::shard_of;

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

impl Shards {
    /// At least one queue.
    #[must_use]
    pub fn new(queues: Vec<ShardQueue>) -> Shards {
        assert!(!queues.is_empty(), "a node has at least one shard");
        Shards { queues: queues.into() }
    }

    /// The number of the shard that has `disk`.
    #[must_use]
    pub fn number_of(&self, disk: &str) -> usize {
        shard_of(disk, self.queues.len())
    }

    fn of(&self, disk: &str) -> &ShardQueue {
        &self.queues[self.number_of(disk)]
    }

    /// The counters of the disks that are open here, by the disk's name. Never waits for a shard.
    #[must_use]
    pub fn counters(&self) -> Vec<DiskCounts> {
        let mut disks: Vec<_> = self.queues.iter().flat_map(|queue| queue.health().disks()).collect();
        disks.sort_by(|left, right| left.disk.cmp(&right.disk));
        disks
    }

    /// Whether a load overwrites a disk that is open here, so that it takes no clients. Never waits for a shard.
    #[must_use]
    pub fn takes_no_clients(&self, disk: &str) -> bool {
        self.of(disk).health().takes_no_clients(disk)
    }

    /// The health of each shard, by number.
    #[must_use]
    pub fn health(&self) -> Vec<Look> {
        let now = Nanos::now();
        self.queues.iter().map(|queue| queue.health().look(now)).collect()
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
        self.of(disk).try_send(command)
    }

    /// Sends a command that is answered, and waits for the answer for as long as the shard turns.
    ///
    /// # Errors
    /// The shard hangs, or has ended.
    pub async fn ask<T>(
        &self,
        disk: &str,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ApiError> {
        let queue = self.of(disk);
        let (answer, answered) = oneshot::channel();
        let asked = async {
            queue.send(command(answer)).await;
            answered.await
        };
        tokio::select! {
            biased;
            answer = asked => {
                answer.map_err(|_| stopping())
            }
            lasts = queue.hangs() => Err(silent(self.number_of(disk), disk, lasts)),
        }
    }

    /// As [`Shards::ask`], without a time limit, also in one long turn. Only while neither clients nor other nodes wait for
    /// this one yet.
    ///
    /// # Errors
    /// The shard has ended.
    pub async fn ask_patiently<T>(
        &self,
        disk: &str,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ApiError> {
        let (answer, answered) = oneshot::channel();
        self.send(disk, command(answer)).await;
        answered.await.map_err(|_| stopping())
    }

    /// The states of all disks on all shards, owned and replicated. For a shard that does not answer within two seconds it
    /// returns the last status, in the state `silent`.
    pub async fn status(&self) -> Vec<DiskStatus> {
        self.look().await.0
    }

    /// As [`Shards::status`], but waits for `patience` only.
    pub async fn status_within(&self, patience: Duration) -> Vec<DiskStatus> {
        self.look_within(patience).await.0
    }

    /// As [`Shards::status`], and the numbers of the shards that do not answer: they may have disks that they never spoke of.
    pub async fn look(&self) -> (Vec<DiskStatus>, BTreeSet<usize>) {
        self.look_within(PATIENCE).await
    }

    async fn look_within(&self, patience: Duration) -> (Vec<DiskStatus>, BTreeSet<usize>) {
        let asked: Vec<_> = self.queues.iter().map(ShardQueue::ask_status).collect();
        let until = Nanos::now() + patience;
        let (mut all, mut silent) = (Vec::new(), BTreeSet::new());
        for (number, (queue, asked)) in self.queues.iter().zip(asked).enumerate() {
            match queue.answer(asked, until).await {
                Some(statuses) => all.extend(statuses),
                None => {
                    all.extend(queue.said_last(number));
                    silent.insert(number);
                }
            }
        }
        (all, silent)
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

fn stopping() -> ApiError {
    ApiError::new(ApiErrorKind::Unavailable, "the node is stopping")
}

fn silent(number: usize, disk: &str, lasts: Duration) -> ApiError {
    let message =
        format!("shard {number} of this node, which has disk {disk}, has not answered for {lasts:.1?}");
    ApiError::new(ApiErrorKind::Unavailable, message)
        .hint("`weir status` shows in which disk's turn it hangs; its log says more")
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::shard::health::Health;
    use crate::shard::health::Pulse;

    /// A shard that answers once and hangs from then on, and one that answers always.
    fn shards() -> (Shards, mpsc::Receiver<Command>, Arc<Health>) {
        let (commands, hanging) = mpsc::channel(16);
        let health = Arc::new(Health::default());
        let first = ShardQueue::new(commands, || {}).with_health(Arc::clone(&health));
        let (commands, mut answering) = mpsc::channel(16);
        tokio::spawn(async move {
            while let Some(command) = answering.recv().await {
                let Command::Status { answer } = command else { continue };
                let status =
                    DiskStatus { disk: "well".into(), state: "serving".into(), ..DiskStatus::default() };
                answer.send(vec![status]).unwrap();
            }
        });
        (Shards::new(vec![first, ShardQueue::new(commands, || {})]), hanging, health)
    }

    async fn states(shards: &Shards) -> Vec<(String, String)> {
        let statuses = shards.status().await;
        statuses.into_iter().map(|status| (status.disk, status.state)).collect()
    }

    #[tokio::test]
    async fn a_shard_that_hangs_keeps_nobody_waiting() {
        let (shards, mut hanging, health) = shards();
        let well = || ("well".to_owned(), "serving".to_owned());
        let answers = async {
            let Some(Command::Status { answer }) = hanging.recv().await else { panic!("it is asked") };
            let status = DiskStatus { disk: "ill".into(), state: "serving".into(), ..DiskStatus::default() };
            answer.send(vec![status]).unwrap();
        };
        let (all, ()) = tokio::join!(states(&shards), answers);
        assert_eq!(all, [("ill".to_owned(), "serving".to_owned()), well()]);

        // It turns, and does not answer.
        let before = Nanos::now();
        assert_eq!(states(&shards).await, [("ill".to_owned(), "silent".to_owned()), well()]);
        let waited = Nanos::now() - before;
        assert!(waited >= PATIENCE && waited < PATIENCE * 2, "{waited:?}");

        // It hangs, and everybody can see that.
        Pulse::new(health).begin(Nanos(Nanos::now().0 - 3_000_000_000));
        let before = Nanos::now();
        assert_eq!(states(&shards).await, [("ill".to_owned(), "silent".to_owned()), well()]);
        let name = (0..).map(|n| n.to_string()).find(|name| shards.number_of(name) == 0).unwrap();
        let disk = name.clone();
        let refused = shards.ask(&name, |answer| Command::HasCopy { disk, answer }).await.unwrap_err();
        assert!(refused.message.contains("shard 0"), "{refused}");
        let waited = Nanos::now() - before;
        assert!(waited < Duration::from_secs(1), "{waited:?}");
        assert!(shards.health()[0].hangs.is_some() && shards.health()[1].hangs.is_none());
    }
}
