//! Weir itself: a lab of one or two nodes with one disk.

use std::path::Path;
use std::time::Duration;

use weir_block::Nanos;
use weir_block::size::Size;
use weir_lab::{Lab, LabConfig, LabFlash};
use weir_load::run::{Monitor, run};
use weir_load::target::Target;
use weir_load::workload::{Access, Workload};
use weir_nbd::Uri;
use weir_node::api::{CreateDisk, CreateVolume, Export, Medium};

use crate::error::{Failure, Outcome};
use crate::server::{Place, Server, Transport};

/// The name of the disk, which is also that of its export.
const DISK: &str = "disk";
/// The node that owns it.
const OWNER: &str = "n1";
/// Longest wait for the disk's policy to take effect.
const PATIENCE: Duration = Duration::from_secs(20);

/// A lab with one disk. Ends when dropped.
pub struct Cluster {
    name: &'static str,
    lab: Lab,
    uri: Uri,
}

/// What is measured of Weir.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// Its name in the results.
    pub name: &'static str,
    /// Which way clients come.
    pub transport: Transport,
    /// The policy; as many nodes are started as it needs.
    pub policy: &'a str,
    /// Where logs are kept.
    pub medium: Medium,
    /// Where the volume, and the flash if there is one, are.
    pub storage: &'a Path,
    /// Bytes of the disk.
    pub size: u64,
}

impl Cluster {
    /// One copy or two, with everything in memory.
    pub fn start(program: &Path, place: &Place, transport: Transport, policy: &str) -> Outcome<Cluster> {
        let (storage, size) = (&*place.directory, place.size);
        let shape = Shape { name: "weir", transport, policy, medium: Medium::Ram, storage, size };
        Cluster::of(program, place, &shape)
    }

    /// Starts as many nodes as the policy has copies, makes a disk, and writes it once over.
    pub fn of(program: &Path, place: &Place, shape: &Shape<'_>) -> Outcome<Cluster> {
        let Shape { name, transport, policy, medium, storage, size } = *shape;
        let what = format!("{}-{policy}-{medium}", transport.name());
        let home = place.directory.join(&what);
        let volume = storage.join(format!("{what}-volume"));
        std::fs::create_dir_all(&volume)?;
        let mut config = LabConfig::new(home.join("lab"), program);
        config.nodes = if policy == "write-back+1" { 2 } else { 1 };
        if medium == Medium::Flash {
            let device = |node: usize| storage.join(format!("{what}-flash-{node}"));
            config.flash = LabFlash::Devices((0..config.nodes).map(device).collect());
        }
        let lab = Lab::up(&config)?;
        let client = lab.client(OWNER)?;
        client.create_volume(&CreateVolume { name: "ram".into(), kind: "dir".into(), path: volume })?;
        client.create_disk(&CreateDisk {
            name: DISK.into(),
            volume: "ram".into(),
            size,
            logical_block: 512,
            policy: policy.into(),
            medium,
        })?;
        client.export(DISK, &Export { on: Some(OWNER.into()), accept_loss: false })?;
        let node = lab.node(OWNER)?;
        let uri = match transport {
            Transport::Unix => Uri::unix(&node.nbd_unix, DISK),
            Transport::Tcp => Uri::tcp(node.nbd_tcp, DISK),
        };
        let cluster = Cluster { name, lab, uri };
        cluster.wait_for(policy)?;
        cluster.fill()?;
        Ok(cluster)
    }

    /// Figures of another policy than the one that is named would be worth nothing.
    fn wait_for(&self, policy: &str) -> Outcome<()> {
        let deadline = Nanos::now() + PATIENCE;
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

    fn fill(&self) -> Outcome<()> {
        let pass = Workload {
            access: Access::Write,
            block_size: Size(1 << 20),
            queue_depth: 4,
            runtime: None,
            ..Workload::default()
        };
        let summary = run(&Target::Nbd(self.uri.clone()), &pass, true, &Monitor::new())?;
        match summary.first_error {
            Some(error) => Err(Failure(format!("the disk cannot be filled: {error}"))),
            None => Ok(()),
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
}
