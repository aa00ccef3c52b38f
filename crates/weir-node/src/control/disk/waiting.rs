//! Waits of a disk's task for what may take long, the registry and the storage, in which it goes on serving its disk.

use std::pin::pin;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::ownership::Refusal;
use weir_cluster::view::Seen;

use super::{DiskTask, Message, RETRY, sleep_until};
use crate::control::change::ChangeError;
use crate::control::decide::Local;
use crate::error::{ApiError, ApiErrorKind};

/// Longest wait for the storage of a volume to say where a disk is, or to make a file longer (P10).
const STORAGE: Duration = Duration::from_secs(10);

impl DiskTask {
    /// Waits for `work`, and takes messages meanwhile: the shard's requests are done at once, except another change of the
    /// record, which comes after this wait.
    ///
    /// # Errors
    /// Another node owns the disk, which is open here, and `work` has not ended soon after that was known. The wait ends, so
    /// that the disk is released (P2). A change that `work` has sent over an earlier record cannot be committed any more.
    pub(super) async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ChangeError> {
        let mut work = pin!(work);
        let mut changes = self.node.records.changes_of(&self.name);
        let mut since = None;
        loop {
            // A change that has just given the disk away is about to say so itself.
            let over = self.taken_by().map(|by| (by, *since.get_or_insert_with(Nanos::now) + RETRY));
            if over.is_none() {
                since = None;
            }
            let until = match over {
                Some((by, until)) if until <= Nanos::now() => return Err(by),
                over => over.map(|(_, until)| until),
            };
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                Some(message) = self.inbox.recv() => self.attend(message).await,
                () = changes.next(&self.node.records) => {}
                () = sleep_until(until) => {}
            }
        }
    }

    /// Waits for the storage, as [`DiskTask::meanwhile`] does, with a time limit.
    ///
    /// # Errors
    /// Those of `work`; the storage does not answer. It may still complete the call.
    pub(super) async fn storage<T>(
        &mut self,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        self.meanwhile(weir_task::timeout(STORAGE, work)).await?.unwrap_or_else(|_| {
            let message = format!("the storage of disk {} has not answered for {STORAGE:?}", self.name);
            Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again when it does"))
        })
    }

    /// Takes a message in the middle of a wait: carries out the disk's requests. Keeps a change of the record, and operators'
    /// requests, for afterwards.
    pub(super) async fn attend(&mut self, message: Message) {
        match message {
            Message::Notice(notice) => self.on_notice(notice).await,
            Message::Peer { node, connection } => self.on_peer(node, connection).await,
            Message::Sealed { member, epoch, until } => self.on_sealed(member, epoch, until),
            Message::Fenced { process, epoch, result } => self.on_fenced(process, epoch, result),
            Message::Looked { process, seen } => self.on_looked(process, seen),
            Message::Request(request) => self.waiting.insert(0, request),
        }
    }

    /// Does what was kept for afterwards, except what operators want. Whether there was anything.
    pub(super) async fn catch_up(&mut self) -> bool {
        let postponed = self.postponed.take();
        let refused = std::mem::take(&mut self.newly_refused);
        let any = postponed.is_some() || refused;
        if let Some(wanted) = postponed {
            self.want_configuration(&wanted).await;
        }
        if refused {
            self.settle_right().await;
        }
        any
    }

    /// Whether the disk is open here and the registry gives it to another process.
    pub(super) fn is_taken(&mut self) -> bool {
        self.taken_by().is_some()
    }

    fn taken_by(&mut self) -> Option<ChangeError> {
        let Local::Open { epoch } = self.local else { return None };
        match self.seen() {
            Seen::Record { record, .. }
                if record.owner.as_ref() != Some(&self.me) && record.epoch >= epoch =>
            {
                Some(Refusal::Fenced { owner: record.owner, epoch: record.epoch }.into())
            }
            Seen::Record { .. } | Seen::Unreadable { .. } => None,
            Seen::Nothing => Some(ChangeError::NoDisk(self.name.clone())),
        }
    }
}
