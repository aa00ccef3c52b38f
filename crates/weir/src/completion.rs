//! Shell completion of names from the cluster: disks, nodes, volumes, certificates, tokens.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use weir_lab::REGISTRY;
use weir_node::client::Client;

use crate::cluster::{any_node, lab};
use crate::options::{Global, Output};

/// Time limit of a shell's wait for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The names of all disks.
pub fn disks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let disks = client().and_then(|client| client.disks().ok());
        candidates(disks.into_iter().flatten().map(|disk| disk.name))
    })
}

/// All snapshots, as `DISK@SNAPSHOT`.
pub fn snapshots() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(client().iter().flat_map(snapshots_of_all)))
}

/// The names of all disks, and all snapshots.
pub fn snapshots_and_disks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let Some(client) = client() else { return Vec::new() };
        let disks = client.disks().ok().into_iter().flatten().map(|disk| disk.name);
        candidates(disks.chain(snapshots_of_all(&client)))
    })
}

fn snapshots_of_all(client: &Client) -> Vec<String> {
    let disks = client.disks().ok().into_iter().flatten();
    let snapshots = disks.filter_map(|disk| client.snapshots(&disk.name).ok()).flatten();
    snapshots.map(|one| format!("{}@{}", one.disk, one.name)).collect()
}

/// The names of all volumes.
pub fn volumes() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let volumes = client().and_then(|client| client.volumes().ok());
        candidates(volumes.into_iter().flatten().map(|volume| volume.name))
    })
}

/// The names of all nodes.
pub fn nodes() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let status = client().and_then(|client| client.status().ok());
        candidates(status.into_iter().flat_map(|status| status.nodes).map(|node| node.name))
    })
}

/// The names of nodes and clients with a certificate.
pub fn certified() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let cluster = client().and_then(|client| client.cluster().ok());
        let names = cluster.into_iter().flat_map(|cluster| cluster.certificates);
        let names: BTreeSet<String> = names.map(|one| one.name.to_string()).collect();
        candidates(names)
    })
}

/// The ids of tokens that have not expired.
pub fn tokens() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let cluster = client().and_then(|client| client.cluster().ok());
        candidates(cluster.into_iter().flat_map(|cluster| cluster.tokens).map(|one| one.id.to_string()))
    })
}

/// The processes that `weir lab` can kill, pause, resume and start.
pub fn processes() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let nodes = lab(&global()).map_or_else(
            |_| Vec::new(),
            |lab| lab.nodes().iter().map(|node| node.name.clone()).chain([REGISTRY.to_owned()]).collect(),
        );
        candidates(nodes)
    })
}

fn candidates(names: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    names.into_iter().map(CompletionCandidate::new).collect()
}

fn client() -> Option<Client> {
    any_node(&global()).ok().map(|client| client.patience(PATIENCE))
}

/// The cluster that the words to complete name: clap does not parse them.
fn global() -> Global {
    let words: Vec<OsString> = std::env::args_os().collect();
    let option = |name: &str, variable: &str| {
        let given = words.iter().position(|word| word == name).and_then(|at| words.get(at + 1)).cloned();
        let prefix = format!("{name}=");
        let joined = words.iter().find_map(|word| word.to_str()?.strip_prefix(&prefix).map(OsString::from));
        given.or(joined).or_else(|| std::env::var_os(variable)).map(PathBuf::from)
    };
    let (lab, api) = (option("--lab", "WEIR_LAB"), option("--api", "WEIR_API"));
    let credentials = option("--credentials", "WEIR_CREDENTIALS");
    Global { output: Output::Text, lab, api, credentials, node: None }
}
