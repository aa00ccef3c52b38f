//! Weir's transactions and reads as etcd's, and etcd's answers.
//!
//! Each one compares the registry's marker first ([`crate::layout`]): the whole is `if marker then (request) else read marker`.

use etcd_client::proto::{PbKeyValue, PbRangeResponse, PbResponseHeader, PbTxnOpResponse, PbTxnResponse};
use etcd_client::{Compare as EtcdCompare, CompareOp, GetOptions, PutOptions, Txn, TxnOp, TxnResponse};
use weir_cluster::RegistryError;
use weir_cluster::registry::{Compare, Entry, Expect, LeaseId, Op, Transaction};

use crate::layout::{Layout, Marker, Range};

/// Largest request in bytes, as etcd counts them by default (1.5 MiB), less what a request takes beside keys and values.
pub const MAX_REQUEST: usize = (3 << 19) - (1 << 10);
/// Upper bound of the bytes that each operation and comparison takes beside its keys and its value.
const OVERHEAD: usize = 48;

/// An etcd transaction that does `ops` if the marker is `marker`.
pub(crate) fn guarded(layout: &Layout, marker: &Marker, ops: Vec<TxnOp>) -> Txn {
    Txn::new()
        .when([EtcdCompare::value(layout.marker(), CompareOp::Equal, marker.value())])
        .and_then(ops)
        .or_else([TxnOp::get(layout.marker(), None)])
}

/// All keys of `range` from `first` on, at most `limit` of them; at `revision`, or the newest.
pub(crate) fn page(range: &Range, first: Vec<u8>, limit: i64, revision: Option<i64>) -> TxnOp {
    let options = GetOptions::new().with_range(range.end.clone()).with_limit(limit);
    TxnOp::get(first, Some(options.with_revision(revision.unwrap_or(0))))
}

/// Checks the limits of etcd that are lower than the trait's.
pub(crate) fn check(layout: &Layout, transaction: &Transaction) -> Result<(), RegistryError> {
    let prefix = layout.key("").len();
    let of_op = |op: &Op| match op {
        Op::Put { key, value, .. } => prefix + key.len() + value.len() + OVERHEAD,
        Op::Delete { key } => prefix + key.len() + OVERHEAD,
    };
    // Once in the comparison, once in the read when it fails.
    let of_compare = |compare: &Compare| 2 * (prefix + compare.key.len() + OVERHEAD);
    let bytes: usize = transaction.ops.iter().map(of_op).sum::<usize>()
        + transaction.compares.iter().map(of_compare).sum::<usize>();
    if bytes > MAX_REQUEST {
        return Err(RegistryError::malformed(format!(
            "a transaction in etcd takes at most {MAX_REQUEST} bytes with all its keys, not {bytes}"
        )));
    }
    Ok(())
}

/// The transaction with the compared entries as its answer when a comparison fails.
pub(crate) fn of(layout: &Layout, transaction: &Transaction) -> Result<Txn, RegistryError> {
    let compares = transaction.compares.iter().map(|Compare { key, expect }| match expect {
        Expect::Absent => Ok(EtcdCompare::create_revision(layout.key(key), CompareOp::Equal, 0)),
        Expect::ModRevision(revision) => {
            // etcd takes 0 for the revision of a key that does not exist.
            let revision = i64::try_from(*revision).ok().filter(|revision| *revision > 0);
            let revision = revision.ok_or_else(|| RegistryError::malformed("a revision is 1 to 2^63 - 1"))?;
            Ok(EtcdCompare::mod_revision(layout.key(key), CompareOp::Equal, revision))
        }
    });
    let ops = transaction.ops.iter().map(|op| match op {
        Op::Put { key, value, lease: None } => Ok(TxnOp::put(layout.key(key), value.clone(), None)),
        Op::Put { key, value, lease: Some(lease) } => {
            let options = PutOptions::new().with_lease(lease_id(*lease)?);
            Ok(TxnOp::put(layout.key(key), value.clone(), Some(options)))
        }
        Op::Delete { key } => Ok(TxnOp::delete(layout.key(key), None)),
    });
    let mut keys: Vec<&str> = transaction.compares.iter().map(|compare| &*compare.key).collect();
    keys.sort_unstable();
    keys.dedup();
    let current = keys.into_iter().map(|key| TxnOp::get(layout.key(key), None));
    Ok(Txn::new()
        .when(compares.collect::<Result<Vec<_>, RegistryError>>()?)
        .and_then(ops.collect::<Result<Vec<_>, RegistryError>>()?)
        .or_else(current.collect::<Vec<_>>()))
}

/// etcd's number of a lease. It has no lease 0 (that is "none") and none above 2^63 - 1: such a lease cannot be alive.
pub(crate) fn lease_id(lease: LeaseId) -> Result<i64, RegistryError> {
    i64::try_from(lease.0).ok().filter(|id| *id > 0).ok_or(RegistryError::LeaseExpired { lease })
}

/// The answer to a guarded transaction.
pub(crate) struct Answer {
    pub header: PbResponseHeader,
    /// Answers of the operations, in their order.
    pub parts: Vec<PbTxnOpResponse>,
}

impl Answer {
    pub fn revision(&self) -> u64 {
        self.header.revision.try_into().unwrap_or(0)
    }
}

/// Reads the answer to [`guarded`].
pub(crate) fn answer(layout: &Layout, response: TxnResponse) -> Result<Answer, RegistryError> {
    let PbTxnResponse { header, succeeded, responses } = response.0;
    let parts: Vec<_> = responses.into_iter().filter_map(|part| part.response).collect();
    if succeeded {
        return Ok(Answer { header: header.ok_or_else(strange)?, parts });
    }
    let name = layout.marker();
    let found = match parts.into_iter().next() {
        Some(PbTxnOpResponse::ResponseRange(found)) => found.kvs.into_iter().next(),
        _ => None,
    };
    let reason = match found.map(|entry| Marker::parse(&name, &entry.value)) {
        Some(Err(error)) => return Err(error),
        Some(Ok(_)) => format!("{name} in etcd belongs to another registry than before"),
        None => format!("{name} is no longer in etcd"),
    };
    let remedy = "nothing was changed there. Check registry.etcd; if etcd's data was replaced on purpose, restart this process";
    Err(RegistryError::Setup { reason: format!("{reason}: {remedy}") })
}

/// The result of the transaction inside: its changes were made, or the current entries of the compared keys.
pub(crate) fn outcome(layout: &Layout, part: Option<PbTxnOpResponse>) -> Result<(), RegistryError> {
    let Some(PbTxnOpResponse::ResponseTxn(inner)) = part else { return Err(strange()) };
    if inner.succeeded {
        return Ok(());
    }
    let mut current = Vec::new();
    for part in inner.responses {
        match part.response {
            Some(PbTxnOpResponse::ResponseRange(range)) => current.extend(entries(layout, range)?),
            _ => return Err(strange()),
        }
    }
    Err(RegistryError::Conflict { current })
}

/// The range that a read returned.
pub(crate) fn range(part: Option<PbTxnOpResponse>) -> Result<PbRangeResponse, RegistryError> {
    match part {
        Some(PbTxnOpResponse::ResponseRange(range)) => Ok(range),
        _ => Err(strange()),
    }
}

/// Without the keys that Weir cannot have written.
pub(crate) fn entries(layout: &Layout, range: PbRangeResponse) -> Result<Vec<Entry>, RegistryError> {
    range.kvs.into_iter().filter_map(|entry| self::entry(layout, entry).transpose()).collect()
}

/// `None`: Weir cannot have written this key.
pub(crate) fn entry(layout: &Layout, found: PbKeyValue) -> Result<Option<Entry>, RegistryError> {
    let Some(key) = layout.name(&found.key) else { return Ok(None) };
    let lease = u64::try_from(found.lease).ok().filter(|lease| *lease > 0).map(LeaseId);
    let mod_revision = u64::try_from(found.mod_revision).map_err(|_| strange())?;
    Ok(Some(Entry { key, value: found.value, mod_revision, lease }))
}

pub(crate) fn strange() -> RegistryError {
    RegistryError::Corrupt { reason: "etcd's answer does not match the request".to_owned() }
}
