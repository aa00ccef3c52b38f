//! The choice of a cluster and of a node in it.

use std::path::{Path, PathBuf};

use weir_lab::Lab;
use weir_node::client::{Client, HTTPS};
use weir_node::config::DEFAULT_API;

use crate::failure::Failure;
use crate::options::Global;

/// The default directory of a lab.
const DEFAULT_LAB: &str = "weir-lab";

/// The directory of the selected lab.
pub fn lab_dir(global: &Global) -> PathBuf {
    global.lab.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_LAB))
}

const ONE_SOCKET: &str = "--node chooses a node of a lab; with --api the socket says which node is asked";

/// The selected lab.
pub fn lab(global: &Global) -> Result<Lab, Failure> {
    Ok(Lab::open(&lab_dir(global))?)
}

/// Any node of the selected cluster.
pub fn any_node(global: &Global) -> Result<Client, Failure> {
    if let Some(socket) = &global.api {
        if global.node.is_some() {
            return Err(Failure::usage(ONE_SOCKET));
        }
        let url = socket.to_str().filter(|text| text.contains("://"));
        let Some(url) = url else { return Ok(local(global, socket)) };
        if !url.starts_with(HTTPS) {
            return Err(Failure::usage(format!(
                "--api {url}: nodes answer at https://HOST:PORT or at a Unix socket"
            ))
            .hint("api.listen and api.socket in the node's configuration say where"));
        }
        let directory = global.credentials.as_deref().ok_or_else(|| {
            Failure::usage("an API at https:// needs a certificate: --credentials DIR")
                .hint("`weir cluster client NAME --role ROLE --directory DIR` on a node makes one")
        })?;
        return Ok(Client::remote(url, directory)?);
    }
    if global.lab.is_some() || Path::new(DEFAULT_LAB).join("lab.json").exists() {
        let lab = lab(global)?;
        return Ok(match &global.node {
            Some(node) => lab.client(node)?,
            None => lab.any_client()?,
        });
    }
    if global.node.is_some() {
        return Err(Failure::usage(
            "--node chooses a node of a lab, and there is none here; --lab names one",
        ));
    }
    Ok(local(global, Path::new(DEFAULT_API)))
}

/// The node at a Unix socket; what another host's node has to do goes there with the operator's credentials, if there are any.
fn local(global: &Global, socket: &Path) -> Client {
    Client::new(socket).with_credentials(global.credentials.clone())
}

/// The owner of `disk`, for requests that only the owner can serve; otherwise any node, which then reports the problem.
pub fn owner_of(global: &Global, disk: &str) -> Result<Client, Failure> {
    let client = any_node(global)?;
    if global.api.is_some() || global.node.is_some() {
        return Ok(client);
    }
    let owner = client.disk(disk)?.owner;
    match (owner, lab(global)) {
        (Some(owner), Ok(lab)) => Ok(lab.client(&owner)?),
        _ => Ok(client),
    }
}
