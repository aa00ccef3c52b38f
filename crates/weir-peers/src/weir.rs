//! Weir itself: a lab of one or two nodes with one disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use weir_block::Nanos;
use weir_lab::{Lab, LabConfig, LabFlash};
use weir_load::target::Target;
use weir_nbd::Uri;
use weir_node::api::{CreateDisk, CreateVolume, Export, Medium};

use crate::driver::fill;
use crate::error::{Failure, Outcome};
use crate::server::{Server, Transport, Workspace};

/// The name of the disk and of its export.
const DISK: &str = "disk";
/// The name of its volume.
const VOLUME: &str = "pool";
/// The node that owns it.
const OWNER: &str = "n1";
/// Timeout for the disk's policy to take effect.
const POLICY_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout for a write log to reach the backing.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A lab with one disk. Dropping it ends its processes and removes its files.
pub struct Cluster {
    name: &'static str,
    lab: Lab,
    uri: Uri,
    /// The lab's directory, and the volume's. After the lab: its processes end first.
    _directories: [TempDir; 2],
}

/// The measured configuration of Weir.
#[derive(Clone, Copy, Debug)]
pub struct ClusterConfig<'a> {
    /// Its name in the results.
    pub name: &'static str,
    /// The clients' transport.
    pub transport: Transport,
    /// The policy; the suite starts as many nodes as it needs.
    pub policy: &'a str,
    /// The logs' medium.
    pub medium: Medium,
    /// The directory of the volume, and of the flash if there is one.
    pub storage: &'a Path,
    /// Bytes of the disk.
    pub size: u64,
    /// The nodes speak TLS to each other.
    pub identities: bool,
    /// Disks are also files (FUSE).
    pub files: bool,
    /// Longest busy-poll of the nodes' threads for I/O, in microseconds; `None`: their default.
    pub busy_poll_us: Option<u32>,
}

impl<'a> ClusterConfig<'a> {
    /// Everything in memory.
    pub fn in_memory(workspace: &'a Workspace, transport: Transport, policy: &'a str) -> ClusterConfig<'a> {
        ClusterConfig {
            name: "weir",
            transport,
            policy,
            medium: Medium::Ram,
            storage: &workspace.directory,
            size: workspace.size,
            identities: false,
            files: false,
            busy_poll_us: None,
        }
    }
}

impl Cluster {
    /// Starts as many nodes as the policy has copies, creates a disk, and writes all of it once. Each cluster has directories of
    /// its own, so it never finds the registry of an earlier one.
    pub fn start(program: &Path, workspace: &Workspace, wanted: &ClusterConfig<'_>) -> Outcome<Cluster> {
        let ClusterConfig { name, transport, policy, medium, storage, size, busy_poll_us, .. } = *wanted;
        let home = tempfile::Builder::new().prefix("lab-").tempdir_in(&workspace.directory)?;
        let data = tempfile::Builder::new().prefix("pool-").tempdir_in(storage)?;
        let volume = data.path().join("volume");
        std::fs::create_dir(&volume)?;
        let mut config = LabConfig::new(home.path(), program);
        config.nodes = if policy == "write-back+1" { 2 } else { 1 };
        (config.identities, config.fuse) = (wanted.identities, wanted.files);
        config.busy_poll_us = busy_poll_us.unwrap_or(config.busy_poll_us);
        if medium == Medium::Flash {
            let device = |node: usize| data.path().join(format!("flash-{node}"));
            config.flash = LabFlash::Devices((0..config.nodes).map(device).collect());
        }
        let lab = Lab::up(&config)?;
        let client = lab.client(OWNER)?;
        client.create_volume(&CreateVolume::dir(VOLUME, volume))?;
        client.create_disk(&CreateDisk {
            name: DISK.into(),
            volume: VOLUME.into(),
            size,
            logical_block: 512,
            policy: policy.into(),
            medium,
            limit: None,
        })?;
        client.export(DISK, &Export { on: Some(OWNER.into()), accept_loss: false })?;
        let node = lab.node(OWNER)?;
        let uri = match transport {
            Transport::Unix => Uri::unix(&node.nbd_unix, DISK),
            Transport::Tcp => Uri::tcp(node.nbd_tcp, DISK),
        };
        let cluster = Cluster { name, lab, uri, _directories: [home, data] };
        cluster.wait_for(policy)?;
        fill(&Target::Nbd(cluster.uri.clone()))?;
        cluster.settle()?;
        Ok(cluster)
    }

    /// The process of the disk's owner.
    pub fn owner_pid(&self) -> Outcome<u32> {
        let process = self.lab.node(OWNER)?.process;
        process.map(|process| process.pid).ok_or_else(|| Failure(format!("{OWNER} does not run")))
    }

    /// The disk's file, once it is there.
    pub fn file(&self) -> Outcome<PathBuf> {
        let deadline = Nanos::now() + POLICY_TIMEOUT;
        loop {
            let volumes = self.lab.client(OWNER)?.volumes()?;
            let directory = volumes.into_iter().find_map(|volume| volume.files).map(|files| files.path);
            let file = directory.map(|directory| directory.join(format!("{DISK}.raw")));
            if let Some(file) = file.filter(|file| file.metadata().is_ok_and(|found| found.is_file())) {
                return Ok(file);
            }
            if Nanos::now() >= deadline {
                return Err(Failure(format!("disk {DISK} has no file after {POLICY_TIMEOUT:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the policy is in effect: figures of another policy would be worthless.
    fn wait_for(&self, policy: &str) -> Outcome<()> {
        let deadline = Nanos::now() + POLICY_TIMEOUT;
        loop {
            let disk = self.lab.client(OWNER)?.disk(DISK)?;
            if disk.effective == policy {
                return Ok(());
            }
            if Nanos::now() >= deadline {
                return Err(Failure(format!(
                    "the disk's policy stays `{}` instead of {policy}",
                    disk.effective
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Server for Cluster {
    fn name(&self) -> &'static str {
        self.name
    }

    fn uri(&self) -> &Uri {
        &self.uri
    }

    fn pids(&self) -> Vec<u32> {
        self.lab.nodes().iter().filter_map(|node| node.process).map(|process| process.pid).collect()
    }

    /// Waits until the write log has reached the backing.
    fn settle(&self) -> Outcome<()> {
        let deadline = Nanos::now() + SETTLE_TIMEOUT;
        let client = self.lab.client(OWNER)?;
        loop {
            let dirty = client.disk(DISK)?.detail.map_or(0, |detail| detail.dirty_bytes);
            if dirty == 0 {
                return Ok(());
            }
            if Nanos::now() >= deadline {
                return Err(Failure(format!("{dirty} bytes are still dirty after {SETTLE_TIMEOUT:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
