//! Messages on the registry's socket. Requests carry an id; answers return it, in any order, and the batches of a watch carry the
//! id of the request that began it.

use serde::{Deserialize, Serialize};

use crate::registry::{Batch, Committed, Entry, LeaseId, ProcessWatch, RegistryError, Transaction};

/// The id of answers to malformed requests.
pub(super) const NO_REQUEST: u64 = 0;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RequestFrame {
    /// Chosen by the client, above 0, used once per connection.
    pub id: u64,
    pub request: Request,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Get {
        key: String,
    },
    List {
        prefix: String,
    },
    Transact {
        transaction: Transaction,
    },
    Watch {
        prefix: String,
        after_revision: u64,
    },
    /// Ends the watch that request `watch` began.
    Unwatch {
        watch: u64,
    },
    Grant {
        ttl_ms: u64,
    },
    KeepAlive {
        lease: LeaseId,
    },
    Revoke {
        lease: LeaseId,
    },
    RegisterProcess {
        name: String,
        incarnation: u64,
        lease: LeaseId,
    },
}

impl Request {
    /// Whether the request is idempotent, so that it may be repeated after a connection broke.
    pub fn may_repeat(&self) -> bool {
        !matches!(self, Request::Transact { .. })
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AnswerFrame {
    pub id: u64,
    pub answer: Answer,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Entry(Option<Entry>),
    /// A part of a listing; `more` parts follow, all at the same revision.
    Listing {
        entries: Vec<Entry>,
        revision: u64,
        more: bool,
    },
    Committed(Committed),
    /// The watch has begun; batches follow.
    Watching,
    Changes(Batch),
    Lease(LeaseId),
    TtlMs(u64),
    Done,
    Process(ProcessWatch),
    Error(RegistryError),
}

/// The id of a request that does not parse, to answer it.
#[derive(Deserialize)]
pub(super) struct IdOnly {
    pub id: u64,
}
