//! The rule for loads on disks of the cluster: none while clients are connected.

use std::time::Duration;

use weir_load::target::Target;
use weir_nbd::Uri;
use weir_node::api::DiskView;
use weir_node::units::count_are;

use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;

/// The harm of a load beside a disk's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// It overwrites their data. Every command that does so has `--force`.
    Overwrites,
    /// It includes their load.
    Measures,
}

impl Harm {
    fn words(self) -> &'static str {
        match self {
            Harm::Overwrites => "this load would overwrite their data",
            Harm::Measures => "their load would be measured with ours",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Harm::Overwrites => "disconnect them; --force overrides this check",
            Harm::Measures => "disconnect them",
        }
    }
}

/// Longest wait for a node's answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Refuses when clients are connected to the disk.
pub fn refuse_beside_clients(disk: &DiskView, harm: Harm) -> Result<(), Failure> {
    match disk.detail.as_ref().map_or(0, |detail| detail.clients) {
        0 => Ok(()),
        clients => {
            let clients = count_are(clients as u64, "client");
            let message = format!("{clients} connected to disk {}; {}", disk.name, harm.words());
            Err(Failure::refused(message).hint(harm.remedy()))
        }
    }
}

/// As [`refuse_beside_clients`] for the disk that an NBD target exports.
///
/// The export's name decides, regardless of the server's address: one address has many spellings, and each node that follows a
/// disk exports it, too. A server outside the cluster with an export of the same name is refused as well.
pub fn refuse_export_beside_clients(global: &Global, target: &Target, harm: Harm) -> Result<(), Failure> {
    let Target::Nbd(uri) = target else { return Ok(()) };
    // Without a cluster no disk is in use.
    let Some(disk) = exported(global, uri) else { return Ok(()) };
    refuse_beside_clients(&disk, harm)
}

fn exported(global: &Global, uri: &Uri) -> Option<DiskView> {
    let node = any_node(global).ok()?.patience(ANSWER);
    if !uri.export.is_empty() {
        return node.disk(&uri.export).ok();
    }
    // A node with one disk exports that without a name.
    node.disks().ok()?.into_iter().find(|disk| disk.detail.as_ref().is_some_and(|detail| detail.clients > 0))
}
