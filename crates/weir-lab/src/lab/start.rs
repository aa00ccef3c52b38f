//! Starting the processes of a lab, and waiting until they are ready.

use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

use super::{LabNode, PATIENCE};
use crate::error::LabError;
use crate::network::{Network, Registry};
use crate::process::{ProcessId, ProcessState, spawn};

pub(super) fn registry_socket(dir: &Path) -> PathBuf {
    dir.join("registry.sock")
}

/// The registry's socket for a node of a lab with a network.
pub(super) fn relay_socket(node: &LabNode) -> PathBuf {
    node.api.with_file_name("registry.sock")
}

/// A network with links to the members of etcd, or to the lab's own registry.
pub(super) fn make_network(
    dir: &Path,
    nodes: &[LabNode],
    etcd: Option<&[SocketAddr]>,
) -> Result<Network, LabError> {
    let names = nodes.iter().map(|node| node.name.clone()).collect();
    match etcd {
        Some(members) => Network::up(names, &Registry::Etcd(members)),
        None => {
            let sockets = nodes.iter().map(relay_socket).collect();
            Network::up(names, &Registry::Socket(&registry_socket(dir), sockets))
        }
    }
}

pub(super) fn start_registry(program: &Path, dir: &Path) -> Result<(Child, ProcessId), LabError> {
    let (socket, file, log) = (registry_socket(dir), dir.join("registry.db"), dir.join("registry.log"));
    let arguments = [
        OsStr::new("registry"),
        OsStr::new("--socket"),
        socket.as_os_str(),
        OsStr::new("--file"),
        file.as_os_str(),
    ];
    let (mut child, process) = spawn(program, &arguments, &log)
        .map_err(LabError::system(format!("starting {}", program.display())))?;
    match wait_until(process, "the registry", &log, || UnixStream::connect(&socket).is_ok()) {
        Ok(()) => Ok((child, process)),
        Err(error) => {
            // It is useless, and no other process knows of it.
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

/// Polls until `ready`, the end of the process, or the end of our patience.
pub(super) fn wait_until(
    process: ProcessId,
    what: &str,
    log: &Path,
    ready: impl Fn() -> bool,
) -> Result<(), LabError> {
    let deadline = Nanos::now() + PATIENCE;
    while !ready() {
        let reason = if process.state() == ProcessState::Gone {
            "its process has ended".to_owned()
        } else if Nanos::now() > deadline {
            format!("it is not ready after {} s", PATIENCE.as_secs())
        } else {
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        return Err(LabError::Start { what: what.to_owned(), reason, log: log.to_owned(), tail: tail(log) });
    }
    Ok(())
}

/// The last lines of a log.
fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
