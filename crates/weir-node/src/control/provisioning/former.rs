//! Former owners of a disk that may still write to its blocks: the disk must not be deleted before they are known to be gone.

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef, VolumeKind};

use crate::control::decide::is_live;
use crate::control::node::Node;
use crate::error::{ApiError, ApiErrorKind};

/// Refuses to delete a disk on a LUN, or on a server, to whose blocks former owners may still write: they would be another disk's (I4). In a
/// directory the kernel frees a file's blocks only when nobody has it open any more, for requests in flight either; a device stays.
///
/// # Errors
/// That, or there is no such volume.
pub async fn check_former(node: &Node, record: &DiskRecord) -> Result<(), ApiError> {
    check_former_at(node, record, Nanos::now()).await
}

pub(super) async fn check_former_at(node: &Node, record: &DiskRecord, now: Nanos) -> Result<(), ApiError> {
    let volume = node.volume(&record.volume).await?.kind;
    if !matches!(volume, VolumeKind::Lun | VolumeKind::Nbd) {
        return Ok(());
    }
    let (name, grace) = (&record.name, node.config.lease.fence_grace);
    // An owner that is gone is not a former one before another node has taken the disk over. Its I/O outlasts its process, and nobody can
    // see it on a LUN or at a server: so its end counts after the time that a takeover waits for (P4).
    let gone = record.owner.as_ref().filter(|owner| **owner != node.session.node_ref());
    let opens =
        format!("`weir disk export {name}` opens it, and its owner finds out within {grace}: delete it then");
    if volume == VolumeKind::Nbd {
        return check_export(node, record, gone, now);
    }
    let hint = match gone {
        None if record.former.is_empty() => return Ok(()),
        Some(gone) if record.former.is_empty() => {
            match node.intents.ended_since(gone, |process| node.records.has_stopped(process), now) {
                Some(since) if now >= since + grace.0 => return Ok(()),
                Some(since) => {
                    let wait = (since + grace.0 - now).as_secs_f64().ceil();
                    format!(
                        "{gone} has ended: delete the disk again in {wait} s (lease.fence_grace). Or {opens}"
                    )
                }
                None => opens,
            }
        }
        _ => opens,
    };
    let message = format!("former owners of disk {name} may still write to its blocks on the LUN");
    Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint))
}

/// An export stays, and its server may be gone for ever: so nobody has to open the disk before it is forgotten.
fn check_export(
    node: &Node,
    record: &DiskRecord,
    gone: Option<&NodeRef>,
    now: Nanos,
) -> Result<(), ApiError> {
    let (name, grace) = (&record.name, node.config.lease.fence_grace);
    let is_gone = |owner: &&NodeRef| !is_live(&node.records.nodes.now(), owner);
    for owner in record.former.iter().map(|former| &former.node).chain(gone.filter(is_gone)) {
        let ended = node.intents.ended_since(owner, |process| node.records.has_stopped(process), now);
        let hint = match ended {
            Some(since) if now >= since + grace.0 => continue,
            Some(since) => {
                let wait = (since + grace.0 - now).as_secs_f64().ceil();
                format!("{owner} has ended: delete the disk again in {wait} s (lease.fence_grace)")
            }
            None => format!(
                "`weir disk export {name}` opens it, and its owner finds out within {grace}: delete it then"
            ),
        };
        let message = format!("former owners of disk {name} may still write to its export");
        return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
    }
    Ok(())
}
