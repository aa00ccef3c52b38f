//! Loads whose connection ends because their disk has moved to another node.

use std::time::Duration;

use weir_block::Nanos;
use weir_load::LoadError;
use weir_load::target::Target;
use weir_nbd::client::NbdError;
use weir_node::api::DiskView;
use weir_node::client::Client;

use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;

/// Longest wait for the cluster to name another owner: a connection ends a moment before or after that.
const SETTLED: Duration = Duration::from_secs(2);

/// Pause between two requests for it.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Longest wait for a node's answer.
const ANSWER: Duration = Duration::from_secs(2);

/// The owner of a target's disk when its load began.
pub struct Whereabouts {
    client: Client,
    disk: String,
    owner: String,
}

impl Whereabouts {
    /// Those of the disk that an NBD target exports; `None` for other targets, and when no cluster here has such a disk.
    pub fn of(global: &Global, target: &Target) -> Option<Whereabouts> {
        let Target::Nbd(uri) = target else { return None };
        if uri.export.is_empty() {
            return None;
        }
        let client = any_node(global).ok()?.patience(ANSWER);
        let owner = client.disk(&uri.export).ok()?.owner?;
        Some(Whereabouts { client, disk: uri.export.clone(), owner })
    }

    /// The failure of a load that ended with `error`: if the connection ended and the disk has another owner by now, the
    /// failure says so.
    pub fn failure(&self, error: LoadError) -> Failure {
        if !matches!(error, LoadError::Nbd(NbdError::Closed { .. } | NbdError::Broken { .. })) {
            return error.into();
        }
        let deadline = Nanos::now() + SETTLED;
        let mut moved = None;
        while Nanos::now() < deadline {
            let disk = self.client.disk(&self.disk).ok();
            // The new owner exports it a moment after it has become the owner.
            moved =
                disk.filter(|disk| disk.owner.as_ref().is_some_and(|owner| *owner != self.owner)).or(moved);
            if moved.as_ref().is_some_and(|disk| !disk.uris.is_empty()) {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        let Some(DiskView { owner: Some(owner), uris, .. }) = moved else { return error.into() };
        let message = format!("disk {} has moved from {} to {owner}: {error}", self.disk, self.owner);
        let remedy = match uris.first() {
            Some(uri) => format!("it is exported there at {uri}"),
            None => format!("`weir disk export {}` prints its address there", self.disk),
        };
        Failure::from(error).said(message).hint(remedy)
    }
}
