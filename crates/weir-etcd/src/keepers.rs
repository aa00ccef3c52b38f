//! Streams that keep a lease alive: opening one costs a round trip, so it stays open for the next keep-alive.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex as Lock, PoisonError};

use etcd_client::{LeaseKeepAliveResponse, LeaseKeepAliveStream, LeaseKeeper};
use tokio::sync::Mutex;

use crate::failure::{Again, Failure};
use crate::links::Link;

type Slot = Arc<Mutex<Option<Keeper>>>;

/// The streams of the lease that was kept alive last, by endpoint. A process has one lease.
#[derive(Default)]
pub(crate) struct Keepers(Lock<(i64, BTreeMap<usize, Slot>)>);

/// An open stream.
struct Keeper {
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    /// The connection.
    made: u64,
    /// Answers to keep-alives whose callers have given up.
    unread: usize,
}

impl Keepers {
    fn slot(&self, lease: i64, endpoint: usize) -> Slot {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 != lease {
            *known = (lease, BTreeMap::new());
        }
        Arc::clone(known.1.entry(endpoint).or_default())
    }

    /// Extends `lease` once, and returns the answer to this very request.
    pub async fn extend(&self, link: &Link, lease: i64) -> Result<LeaseKeepAliveResponse, Failure> {
        let slot = self.slot(lease, link.endpoint);
        let mut slot = slot.lock().await;
        let keeper = match &mut *slot {
            Some(keeper) if keeper.made == link.made => keeper,
            other => {
                *other = None;
                // The client renews once while it opens the stream, and keeps that answer to itself.
                let (keeper, answers) = link.lease().keep_alive(lease).await?;
                other.insert(Keeper { keeper, answers, made: link.made, unread: 0 })
            }
        };
        let answer = keeper.extend().await;
        if !answer.as_ref().is_ok_and(|answer| answer.ttl() > 0) {
            *slot = None;
        }
        answer
    }
}

impl Keeper {
    /// Cancel safe: an answer that nobody has waited for is not taken for that to a later request, which would count the lease's time
    /// from too late.
    async fn extend(&mut self) -> Result<LeaseKeepAliveResponse, Failure> {
        self.keeper.keep_alive().await?;
        self.unread += 1;
        loop {
            let Some(answer) = self.answers.message().await? else {
                return Err(Again::in_doubt("etcd ended the stream").into());
            };
            self.unread -= 1;
            if self.unread == 0 || answer.ttl() <= 0 {
                return Ok(answer);
            }
        }
    }
}
