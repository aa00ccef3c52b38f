//! Servers that export a disk over NBD: Weir's peers, all on RAM-backed storage.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use weir_nbd::Uri;

use crate::error::{Failure, Outcome};
use crate::process::Process;

/// A server that exports a disk. It runs until it is dropped.
pub trait Server {
    /// Its name in the results.
    fn name(&self) -> &'static str;
    /// The export's URI.
    fn uri(&self) -> &Uri;
    /// The processes whose CPU time counts.
    fn pids(&self) -> Vec<u32>;
    /// Waits until all writes have reached the storage, so that the next subject has it alone and their processor time counts.
    fn settle(&self) -> Outcome<()> {
        Ok(())
    }
}

/// The client's transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A Unix socket.
    Unix,
    /// TCP on the loopback.
    Tcp,
}

impl Transport {
    /// `unix` or `tcp`, as in the results.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Unix => "unix",
            Transport::Tcp => "tcp",
        }
    }
}

/// Files and sockets of a run.
pub struct Workspace {
    /// A directory on a tmpfs.
    pub directory: PathBuf,
    /// A directory on the machine's own storage.
    pub storage: PathBuf,
    /// The file that every file-backed server serves.
    pub file: PathBuf,
    /// Its size, in bytes.
    pub size: u64,
}

impl Workspace {
    /// A path for a socket that nothing is bound to: a killed server leaves its socket behind.
    pub fn socket(&self, name: &str) -> PathBuf {
        let path = self.directory.join(format!("{name}.sock"));
        let _ = std::fs::remove_file(&path);
        path
    }

    fn uri(&self, transport: Transport, name: &str, export: &str) -> Outcome<Uri> {
        Ok(match transport {
            Transport::Unix => Uri::unix(&self.socket(name), export),
            Transport::Tcp => Uri::tcp(free_port()?, export),
        })
    }
}

/// A peer: one or more processes.
pub struct Peer {
    name: &'static str,
    uri: Uri,
    processes: Vec<Process>,
}

impl Server for Peer {
    fn name(&self) -> &'static str {
        self.name
    }

    fn uri(&self) -> &Uri {
        &self.uri
    }

    fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(Process::pid).collect()
    }
}

/// `nbdkit` with its memory plugin.
pub fn nbdkit_memory(workspace: &Workspace, transport: Transport) -> Outcome<Peer> {
    nbdkit("nbdkit memory", workspace, transport, &["memory", &workspace.size.to_string()])
}

/// `nbdkit` with its file plugin on the RAM-backed file.
pub fn nbdkit_file(workspace: &Workspace, transport: Transport) -> Outcome<Peer> {
    nbdkit("nbdkit file", workspace, transport, &["file", &workspace.file.to_string_lossy()])
}

fn nbdkit(name: &'static str, workspace: &Workspace, transport: Transport, plugin: &[&str]) -> Outcome<Peer> {
    let uri = workspace.uri(transport, &name.replace(' ', "-"), "")?;
    let mut command = Command::new("nbdkit");
    command.arg("-f").args(nbdkit_address(&uri)).args(plugin);
    let mut process = Process::start(&mut command)?;
    process.wait_for(&uri)?;
    Ok(Peer { name, uri, processes: vec![process] })
}

fn nbdkit_address(uri: &Uri) -> Vec<String> {
    match &uri.address {
        weir_nbd::Address::Unix(path) => vec!["-U".into(), path.to_string_lossy().into()],
        weir_nbd::Address::Tcp { host, port } => {
            vec!["-i".into(), host.clone(), "-p".into(), port.to_string()]
        }
    }
}

/// `qemu-storage-daemon` on the RAM-backed file: direct I/O through `io_uring`, which is its fastest mode here. Without its I/O
/// threads: version 7.2 fails an assertion in them when a client disconnects.
pub fn qemu(workspace: &Workspace, transport: Transport) -> Outcome<Peer> {
    let uri = workspace.uri(transport, "qemu", "disk")?;
    let process = storage_daemon(&uri, &[file_node("disk0", &workspace.file)], "disk0")?;
    Ok(Peer { name: "qemu-storage-daemon", uri, processes: vec![process] })
}

/// On a LUN itself.
pub const QEMU_ON_LUN: &str = "qemu-s-d, raw LUN";
/// The same over TCP: what one more process and a socket cost on this machine, whoever redirects.
pub const QEMU_ON_LUN_TCP: &str = "qemu-s-d, raw LUN, tcp";
/// On a qcow2 image on a LUN.
pub const QEMU_QCOW2: &str = "qemu-s-d, qcow2 on LUN";

/// `qemu-storage-daemon` on a block device.
pub fn qemu_on_lun(workspace: &Workspace, device: &Path, transport: Transport) -> Outcome<Peer> {
    let uri = workspace.uri(transport, "qemu-lun", "disk")?;
    let process = storage_daemon(&uri, &[device_node("disk0", device)], "disk0")?;
    let name = match transport {
        Transport::Unix => QEMU_ON_LUN,
        Transport::Tcp => QEMU_ON_LUN_TCP,
    };
    Ok(Peer { name, uri, processes: vec![process] })
}

/// `qemu-storage-daemon` on a new qcow2 image of the workspace's size on a block device, as on a logical volume of a shared LUN.
pub fn qemu_qcow2_on_lun(workspace: &Workspace, device: &Path) -> Outcome<Peer> {
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(device).arg(workspace.size.to_string());
    let created = create.output().map_err(Failure::of("qemu-img (`make setup` installs it)"))?;
    if !created.status.success() {
        return Err(Failure(format!("qemu-img create: {}", String::from_utf8_lossy(&created.stderr))));
    }
    let uri = workspace.uri(Transport::Unix, "qemu-qcow2", "disk")?;
    let image = "driver=qcow2,node-name=disk0,file=lun".to_owned();
    let process = storage_daemon(&uri, &[device_node("lun", device), image], "disk0")?;
    Ok(Peer { name: QEMU_QCOW2, uri, processes: vec![process] })
}

/// `qemu-storage-daemon` writing to two children at once: the RAM-backed file, and `nbdkit memory` over TCP. The
/// remote child is nbdkit's since QEMU 7.2's client stalls on its own server over TCP.
pub fn qemu_quorum(workspace: &Workspace) -> Outcome<Peer> {
    let mut remote = nbdkit_memory(workspace, Transport::Tcp)?;
    let weir_nbd::Address::Tcp { host, port } = &remote.uri.address else {
        return Err(Failure("the remote child is not on TCP".into()));
    };
    let child = format!("driver=nbd,node-name=remote,server.type=inet,server.host={host},server.port={port}");
    let quorum =
        "driver=quorum,node-name=both,vote-threshold=2,children.0=local,children.1=remote".to_string();
    let uri = workspace.uri(Transport::Unix, "quorum", "disk")?;
    let process = storage_daemon(&uri, &[file_node("local", &workspace.file), child, quorum], "both")?;
    let mut processes = vec![process];
    processes.append(&mut remote.processes);
    Ok(Peer { name: "qemu quorum + nbdkit tcp", uri, processes })
}

fn file_node(name: &str, file: &Path) -> String {
    format!("driver=file,node-name={name},filename={},aio=io_uring,cache.direct=on", file.display())
}

fn device_node(name: &str, device: &Path) -> String {
    format!("driver=host_device,node-name={name},filename={},aio=io_uring,cache.direct=on", device.display())
}

fn storage_daemon(uri: &Uri, nodes: &[String], exported: &str) -> Outcome<Process> {
    let address = match &uri.address {
        weir_nbd::Address::Unix(path) => format!("addr.type=unix,addr.path={}", path.display()),
        weir_nbd::Address::Tcp { host, port } => {
            format!("addr.type=inet,addr.host={host},addr.port={port}")
        }
    };
    let mut command = Command::new("qemu-storage-daemon");
    for node in nodes {
        command.args(["--blockdev", node]);
    }
    command.args(["--nbd-server", &format!("{address},max-connections=8")]);
    let name = &uri.export;
    command.args(["--export", &format!("type=nbd,id=export,node-name={exported},name={name},writable=on")]);
    let mut process = Process::start(&mut command)?;
    process.wait_for(uri)?;
    Ok(process)
}

/// A loopback port that was free a moment ago.
pub fn free_port() -> Outcome<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}
