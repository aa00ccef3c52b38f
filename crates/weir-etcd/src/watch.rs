//! A watch that outlives connections, endpoints and leaders.
//!
//! The position is the last revision that was delivered whole. Each new stream begins at the position itself and ignores what has been
//! seen: then etcd also refuses when a compaction has removed something *right after* the position (some versions lose a deletion at
//! the compacted revision itself).

use std::sync::Arc;
use std::time::Duration;

use etcd_client::proto::{PbEvent, PbWatchResponse};
use etcd_client::{WatchOptions, WatchStream};
use tokio::sync::watch;
use tokio::time::Instant;
use weir_cluster::RegistryError;
use weir_cluster::registry::{Change, Delivery, Watch, WatchSink};

use crate::batches::Batches;
use crate::calls::{Core, Kind};
use crate::failure::{Again, Failure, Refusal};
use crate::layout::Range;
use crate::links::Link;
use crate::transaction::{entry, strange};

/// Pause before another attempt to open a stream.
const PAUSE: Duration = Duration::from_millis(100);

/// A stream that ends so soon may do so again at once.
const SHORT: Duration = Duration::from_secs(1);

/// A stream that etcd has confirmed.
struct Stream {
    events: WatchStream,
    endpoint: usize,
    /// Detects that calls have moved to another endpoint.
    current: watch::Receiver<usize>,
}

/// Why a stream is no longer read.
enum End {
    /// Another one may go on.
    Reopen(String),
    /// The watch cannot go on.
    Failed(RegistryError),
    /// The watcher has gone or was too slow.
    Gone,
}

/// Opens a watch of `range` after `position`, and follows it in a task until the receiver is dropped.
pub(crate) async fn start(
    core: &Arc<Core>,
    range: Range,
    position: u64,
    deadline: Instant,
) -> Result<Watch, RegistryError> {
    let follower = Follower { core: Arc::clone(core), range };
    let first = follower.first(position, deadline).await?;
    let (sink, watch) = WatchSink::open(Vec::new());
    tokio::spawn(async move {
        let following = follower.follow(first, position, &sink);
        tokio::select! {
            end = following => if let Some(error) = end { sink.close(error) },
            () = sink.abandoned() => {}
        }
    });
    Ok(watch)
}

struct Follower {
    core: Arc<Core>,
    range: Range,
}

impl Follower {
    async fn first(&self, position: u64, deadline: Instant) -> Result<Stream, RegistryError> {
        self.core.marker(deadline).await.map_err(Refusal::error)?;
        let opened = self.core.call(Kind::Repeatable, deadline, |link| self.open(link, position)).await;
        opened.map_err(|refusal| self.refused(refusal, position))
    }

    /// Until the watch ends; with the error for the watcher.
    async fn follow(&self, first: Stream, mut position: u64, sink: &WatchSink) -> Option<RegistryError> {
        let mut stream = first;
        loop {
            let began = Instant::now();
            let reason = match self.read(stream, &mut position, sink).await {
                End::Reopen(reason) => reason,
                End::Failed(error) => return Some(error),
                End::Gone => return None,
            };
            tracing::debug!(position, reason, "etcd: opening a watch again");
            tokio::time::sleep(pause_after(began.elapsed())).await;
            stream = match self.reopen(position).await {
                Ok(stream) => stream,
                Err(error) => return Some(error),
            };
        }
    }

    /// Delivers what a stream brings.
    async fn read(&self, mut stream: Stream, position: &mut u64, sink: &WatchSink) -> End {
        let mut batches = Batches::after(*position);
        loop {
            let message = tokio::select! {
                message = stream.events.message() => message,
                // Fails only when the registry has been dropped; the watch goes on without it.
                Ok(_) = stream.current.wait_for(|current| *current != stream.endpoint) => {
                    return End::Reopen("calls have moved to another endpoint".to_owned());
                }
            };
            let answer = match message {
                Ok(Some(answer)) => answer.0,
                Ok(None) => return End::Reopen("etcd ended the stream".to_owned()),
                Err(error) => {
                    self.core.links.leave(stream.endpoint, "a watch has failed");
                    return self.after(Failure::from(error), *position);
                }
            };
            if answer.canceled {
                return self.after(cancelled(&answer), *position);
            }
            let events = match self.changes(answer.events) {
                Ok(events) => events,
                Err(error) => return End::Failed(error),
            };
            if events.iter().any(|(_, change)| matches!(change, Change::Delete { .. }))
                && let Err(reason) = self.is_this_registry().await
            {
                return End::Reopen(reason);
            }
            let Ok(complete) = batches.take(events, answer.fragment) else {
                return End::Reopen("its revisions were not in order".to_owned());
            };
            for batch in complete {
                if sink.deliver(batch) == Delivery::Gone {
                    return End::Gone;
                }
            }
            *position = batches.position();
        }
    }

    /// Whether the registry is still there, asked before a deletion is delivered. Where somebody has deleted all of its keys, none of its
    /// disks was deleted: whoever holds one must go on with what is known, and not throw its data away. The position stays, and the
    /// deletion comes again when the registry's marker is back.
    async fn is_this_registry(&self) -> Result<(), String> {
        let looked = self.core.guarded(Kind::Repeatable, self.core.deadline(), &[]).await;
        looked.map(drop).map_err(|refusal| refusal.error().to_string())
    }

    fn changes(&self, events: Vec<PbEvent>) -> Result<Vec<(u64, Change)>, RegistryError> {
        let mut changes = Vec::with_capacity(events.len());
        for event in events {
            let is_put = event.r#type == 0;
            let Some(entry) = entry(&self.core.layout, event.kv.ok_or_else(strange)?)? else { continue };
            let revision = entry.mod_revision;
            changes.push((
                revision,
                if is_put { Change::Put(entry) } else { Change::Delete { key: entry.key } },
            ));
        }
        Ok(changes)
    }

    async fn reopen(&self, position: u64) -> Result<Stream, RegistryError> {
        loop {
            let deadline = Instant::now() + self.core.config.request_timeout;
            let opened = self.core.call(Kind::Repeatable, deadline, |link| self.open(link, position)).await;
            match opened {
                Ok(stream) => return Ok(stream),
                // Whatever else: an endpoint or an operator may still put it right.
                Err(Refusal::Error(
                    error @ (RegistryError::Unavailable { .. } | RegistryError::Setup { .. }),
                )) => {
                    tracing::debug!(position, %error, "etcd: a watch cannot be opened again yet");
                }
                Err(refusal) => return Err(self.refused(refusal, position)),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Opens a stream and waits until etcd confirms it.
    async fn open(&self, link: Link, position: u64) -> Result<Stream, Failure> {
        let current = self.core.links.current();
        let endpoint = link.endpoint;
        // A linearizable read: this member has a leader, and it is the right registry.
        let marker = self.core.marker(self.core.deadline()).await.map_err(Failure::Refused)?;
        let now = self.core.guarded_at(link.clone(), marker, &[]).await?.revision();
        if now < position {
            // etcd was restored from a copy: what follows now is another history.
            return Err(RegistryError::Compacted { oldest: now }.into());
        }
        let start = i64::try_from(position.max(1))
            .map_err(|_| RegistryError::malformed("a revision is below 2^63"))?;
        let options =
            WatchOptions::new().with_range(self.range.end.clone()).with_start_revision(start).with_fragment();
        let mut events = link.watch().watch(self.range.first.clone(), Some(options)).await?;
        let Some(answer) = events.message().await? else {
            return Err(Again::not_done("etcd ended the stream").into());
        };
        if answer.0.canceled {
            return Err(cancelled(&answer.0));
        }
        if !answer.0.created || !answer.0.events.is_empty() {
            return Err(strange().into());
        }
        Ok(Stream { events, endpoint, current })
    }

    fn after(&self, failure: Failure, position: u64) -> End {
        match failure {
            Failure::Again(again) => End::Reopen(again.reason),
            Failure::Refused(refusal) => End::Failed(self.refused(refusal, position)),
        }
    }

    fn refused(&self, refusal: Refusal, position: u64) -> RegistryError {
        match refusal {
            Refusal::Compacted => RegistryError::Compacted { oldest: position + 1 },
            other => other.error(),
        }
    }
}

/// The pause before a stream that has lasted this long is opened again: not every end is a fault that opening would notice, too.
fn pause_after(lasted: Duration) -> Duration {
    if lasted < SHORT { PAUSE } else { Duration::ZERO }
}

/// The meaning of an answer that ends the watch.
fn cancelled(answer: &PbWatchResponse) -> Failure {
    if answer.compact_revision > 0 {
        let oldest = u64::try_from(answer.compact_revision).unwrap_or(0);
        return RegistryError::Compacted { oldest }.into();
    }
    let reason = &answer.cancel_reason;
    if reason.contains("permission denied") {
        let reason = format!(
            "etcd refused a watch ({reason}); grant registry.user a role that may read registry.prefix"
        );
        return RegistryError::Setup { reason }.into();
    }
    Again::not_done(format!("etcd ended the watch: {reason}")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_end_at_once_are_not_opened_again_at_once() {
        assert_eq!(pause_after(Duration::ZERO), PAUSE);
        assert_eq!(pause_after(SHORT * 2), Duration::ZERO);
    }
}
