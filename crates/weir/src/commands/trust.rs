//! `weir cluster trust`

use std::path::{Path, PathBuf};

use weir_identity::{CaCertificate, Fingerprint, Store, still_trusted};
use weir_node::api::ApiError;
use weir_node::client::Client;
use weir_node::cluster::views::{ClientTrust, ClusterView};

use crate::failure::Failure;
use crate::output::{list, note};

/// Takes the authorities that the cluster does not trust any more out of a client's files.
pub fn run(node: &Client, directory: &Path) -> Result<ClientTrust, Failure> {
    let (credentials, named) = Store::open_client(directory).map_err(ApiError::from)?;
    let ClusterView { authorities, rotation, .. } = node.cluster()?;
    let current: Result<Vec<Fingerprint>, _> = authorities.iter().map(|one| one.parse()).collect();
    let current = current.map_err(Failure::failed)?;
    let kept = still_trusted(&credentials, named.clone(), &current).map_err(|error| {
        Failure::refused(format!("{}: {error}; nothing was changed", directory.display())).hint(
            "a rotation has removed that authority, or the files are of another cluster: make new ones with `weir cluster client`",
        )
    })?;
    let removed: Vec<CaCertificate> = named.iter().filter(|one| !kept.contains(one)).cloned().collect();
    if !removed.is_empty() {
        let store = Store::open(directory).map_err(ApiError::from)?;
        store.replace_client_trust(&kept).map_err(ApiError::from)?;
    }
    if rotation.is_some() {
        note(
            "a rotation is under way, and both authorities count: repeat the command after `weir cluster rotate --finish`",
        );
    }
    let fingerprints = |all: &[CaCertificate]| all.iter().map(|one| one.fingerprint().to_string()).collect();
    let (authorities, removed) = (fingerprints(&kept), fingerprints(&removed));
    Ok(ClientTrust { directory: PathBuf::from(directory), authorities, removed })
}

/// For people.
pub fn text(it: &ClientTrust) -> String {
    let removed = if it.removed.is_empty() { "nothing".to_owned() } else { it.removed.join(", ") };
    list(&[
        ("directory", it.directory.display().to_string()),
        ("trusts", it.authorities.join(", ")),
        ("removed", removed),
    ])
}
