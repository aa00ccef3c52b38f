//! Weir itself: a lab of one or two nodes with one disk.

use std::path::Path;
use std::time::Duration;

use weir_block::Nanos;
use weir_lab::{Lab, LabConfig};
use weir_load::nbd::Uri;
use weir_load::run::{Monitor, run};
use weir_load::size::Size;
use weir_load::target::Target;
use weir_load::workload::{Access, Workload};
use weir_node::api::{CreateDisk, CreateVolume, Export, Medium};

use crate::error::{Failure, Outcome};
use crate::server::{Place, Server, Transport};

/// The name of the disk, which is also that of its export.
const DISK: &str = "disk";
/// The node that owns it.
const OWNER: &str = "n1";
/// Longest wait for the disk's policy to take effect.
const PATIENCE: Duration = Duration::from_secs(20);

/// A lab with a disk on a RAM-backed volume. Ends when dropped.
pub struct Cluster {
    lab: Lab,
    uri: Uri,
}

impl Cluster {
    /// Starts as many nodes as `policy` has copies, makes a disk, and writes it once over.
    pub fn start(program: &Path, place: &Place, transport: Transport, policy: &str) -> Outcome<Cluster> {
        let home = place.directory.join(format!("{}-{policy}", transport.name()));
        let volume = home.join("volume");
        std::fs::create_dir_all(&volume)?;
        let mut config = LabConfig::new(home.join("lab"), program);
        config.nodes = if policy == "write-back+1" { 2 } else { 1 };
        let lab = Lab::up(&config)?;
        let client = lab.client(OWNER)?;
        client.create_volume(&CreateVolume { name: "ram".into(), kind: "dir".into(), path: volume })?;
        client.create_disk(&CreateDisk {
            name: DISK.into(),
            volume: "ram".into(),
            size: place.size,
            logical_block: 512,
            policy: policy.into(),
            medium: Medium::Ram,
        })?;
        client.export(DISK, &Export { on: Some(OWNER.into()), accept_loss: false })?;
        let node = lab.node(OWNER)?;
        let uri = match transport {
            Transport::Unix => Uri::unix(&node.nbd_unix, DISK),
            Transport::Tcp => Uri::tcp(node.nbd_tcp, DISK),
        };
        let cluster = Cluster { lab, uri };
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
        "weir"
    }

    fn uri(&self) -> &Uri {
        &self.uri
    }

    fn pids(&self) -> Vec<u32> {
        self.lab.nodes().iter().filter_map(|node| node.process).map(|process| process.pid).collect()
    }
}
