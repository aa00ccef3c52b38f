//! Changes of a disk's record: read, compute, compare-and-swap, read again when the answer is lost (P2, P3).

use weir_cluster::membership::NodeSession;
use weir_cluster::ownership::Refusal;
use weir_cluster::records::{DiskRecord, Record, RecordError, keys};
use weir_cluster::registry::{Entry, Registry, RegistryError};

use crate::api::{ApiError, ApiErrorKind};

/// How often a change that others get ahead of is computed again.
const ATTEMPTS: usize = 8;

/// Why a record was not changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The disk does not exist, or not any more.
    #[error("there is no disk {0}")]
    NoDisk(String),
    /// The rules do not allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The record cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The registry does not answer, or this node has lost its place in it.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl From<ChangeError> for ApiError {
    fn from(error: ChangeError) -> ApiError {
        let kind = match &error {
            ChangeError::NoDisk(_) => ApiErrorKind::NotFound,
            ChangeError::Refused(_) => ApiErrorKind::Refused,
            ChangeError::Record(_) => ApiErrorKind::Failed,
            ChangeError::Registry(_) => ApiErrorKind::Unavailable,
        };
        ApiError::new(kind, error.to_string())
    }
}

/// The record of a disk, and what a compare-and-swap needs.
///
/// # Errors
/// There is none, it cannot be read, or the registry does not answer.
pub async fn read(registry: &dyn Registry, disk: &str) -> Result<(Entry, DiskRecord), ChangeError> {
    let entry = registry.get(&keys::disk(disk)).await?.ok_or_else(|| ChangeError::NoDisk(disk.to_owned()))?;
    let record = DiskRecord::of(&entry)?;
    Ok((entry, record))
}

/// Replaces the record of `disk` by what `compute` makes of it, while this node's session stands.
///
/// When the registry's answer is lost, the record is read again: what stands there then decides.
///
/// # Errors
/// As [`read`], and whatever `compute` refuses.
pub async fn change(
    registry: &dyn Registry,
    session: &NodeSession,
    disk: &str,
    compute: impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal>,
) -> Result<DiskRecord, ChangeError> {
    let mut last = RegistryError::Conflict { current: Vec::new() };
    for _ in 0..ATTEMPTS {
        let (entry, record) = read(registry, disk).await?;
        let next = compute(&record)?;
        if next == record {
            return Ok(next);
        }
        match registry.transact(next.replace(&entry).when(session.guard())).await {
            Ok(_) => return Ok(next),
            Err(error @ RegistryError::Conflict { .. }) => last = error,
            Err(error @ RegistryError::Unavailable { .. }) => {
                let (_, now) = read(registry, disk).await?;
                if now == next {
                    return Ok(next);
                }
                last = error;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(last.into())
}
