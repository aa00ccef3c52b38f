//! Identities for the nodes of a lab: a certificate authority in its directory, and a key and a certificate for each node, made
//! as `weir cluster init` and `join` make them.

use std::path::{Path, PathBuf};

use weir_cluster::registry::Transaction;
use weir_identity::{
    Authorities, Authority, ClusterId, Condition, Credentials, Key, NODE_LIFETIME, RecordId, Store,
    StoreError,
};
use weir_node::cluster::records::{put, unchanged, write};
use weir_node::config::Config;

use super::start::registry_socket;
use crate::error::LabError;

/// The directory of the authority, in the lab's, and of a node's identity, in the node's.
const AUTHORITY: &str = "authority";
const IDENTITY: &str = "identity";

fn failed(error: impl std::fmt::Display) -> LabError {
    LabError::Invalid(format!("making identities: {error}"))
}

/// The certificate authority of the lab in `dir`: the one that it has, or a new one.
///
/// # Errors
/// It cannot be made or loaded.
pub fn authority(dir: &Path) -> Result<Authority, LabError> {
    let store = Store::open(&dir.join(AUTHORITY)).map_err(failed)?;
    match store.authority() {
        Err(StoreError::Missing { .. }) => {
            let cluster = ClusterId::random().map_err(failed)?;
            let authority = Authority::create(cluster, seconds()).map_err(failed)?;
            store.create_authority(&authority).map_err(failed)?;
            Ok(authority)
        }
        known => known.map_err(failed),
    }
}

/// A key and a certificate for a node, valid from now on.
///
/// # Errors
/// The authority refuses the name.
pub fn credentials(authority: &Authority, node: &str) -> Result<Credentials, LabError> {
    let key = Key::generate().map_err(failed)?;
    let name = node.parse().map_err(failed)?;
    let issued = authority.issue_node(&name, &[], &key.public(), seconds(), NODE_LIFETIME).map_err(failed)?;
    Credentials::new(key, issued.chain).map_err(failed)
}

/// The directory of the identity of `node`, whose home is `home`, in the lab in `dir`. Made if it is not there.
///
/// # Errors
/// It cannot be made.
pub fn of(dir: &Path, home: &Path, node: &str) -> Result<PathBuf, LabError> {
    let directory = home.join(IDENTITY);
    let store = Store::open(&directory).map_err(failed)?;
    if let Err(StoreError::Missing { .. }) = store.node() {
        let authority = authority(dir)?;
        store.replace_trust(&[authority.certificate().clone()]).map_err(failed)?;
        store.create_node(&credentials(&authority, node)?).map_err(failed)?;
    }
    Ok(directory)
}

/// Writes the lab's authority to the registry that the node with the configuration at `path` uses, as `weir cluster init` does; or to
/// the lab's `own` one, which the node may reach by a relay only.
pub(super) fn announce(dir: &Path, path: &Path, own: bool) -> Result<(), LabError> {
    let mut config = Config::load(path).map_err(failed)?;
    if own {
        config.registry.socket = registry_socket(dir);
    }
    let authorities = Authorities::new(authority(dir)?.certificate().clone());
    let change = Transaction {
        compares: vec![unchanged(Condition { record: RecordId::Authorities, revision: None })],
        ops: vec![put(RecordId::Authorities, authorities)],
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let registry = weir_node::registry(&config).map_err(failed)?;
        // A lab that was up before has it already.
        write(&*registry, change).await.map(drop).map_err(failed)
    })
}

/// The wall clock, in seconds since 1970.
fn seconds() -> u64 {
    weir_task::unix_millis() / 1000
}
