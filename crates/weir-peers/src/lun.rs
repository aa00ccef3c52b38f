//! LUNs in memory, and Weir's shared volume on one: a lab of nodes of which all but the last reach the LUN.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use weir_block::Nanos;
use weir_lab::volatile_disk::LoopDevice;
use weir_lab::{Lab, LabConfig};
use weir_load::target::Target;
use weir_load::workload::Workload;
use weir_nbd::Uri;
use weir_node::api::{CreateDisk, CreateVolume, Export, Medium, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;

use crate::driver::{Driver, Figures, Load, figures, fill, whole};
use crate::error::{Failure, Outcome};
use crate::layers::{self, LayerTime};
use crate::server::Workspace;

/// The volume's name.
const VOLUME: &str = "shared";
/// Space of the LUN beyond its disks, in bytes: the filesystem, its log, and what Weir keeps free.
const BESIDE_DISKS: u64 = 640 << 20;
/// Timeout for the volume to be made, and for a disk to change its route.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time for the program that reads the meters to start, and to end.
const EXPLAIN_STARTS: Duration = Duration::from_secs(1);
/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Block devices on a file in memory, with direct I/O.
pub struct RamLun {
    devices: Vec<LoopDevice>,
    // After the devices.
    _directory: TempDir,
}

impl RamLun {
    /// A device of `size` bytes, all of them written.
    pub fn filled(workspace: &Workspace, size: u64) -> Outcome<RamLun> {
        let lun = RamLun::empty(workspace, size, 1)?;
        fill(&Target::Path(lun.path().into()))?;
        Ok(lun)
    }

    /// A LUN of `size` bytes that nobody has written to, with so many devices.
    pub fn empty(workspace: &Workspace, size: u64, paths: usize) -> Outcome<RamLun> {
        let directory = tempfile::Builder::new().prefix("lun-").tempdir_in(&workspace.directory)?;
        let image = directory.path().join("lun");
        File::create(&image)?.set_len(size)?;
        let devices = (0..paths).map(|_| LoopDevice::attach(&image)).collect::<Result<Vec<_>, _>>()?;
        Ok(RamLun { devices, _directory: directory })
    }

    /// The first block device.
    pub fn path(&self) -> &Path {
        self.devices[0].path()
    }

    /// All of them.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.devices.iter().map(|device| device.path().to_owned()).collect()
    }
}

/// How a disk reaches the LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// On the coordinator.
    DirectHere,
    /// On a node that does not coordinate the volume.
    Direct,
    /// On the coordinator, through its filesystem.
    FileHere,
    /// On another node, over TCP through the coordinator's filesystem.
    FileThere,
    /// On a node without a path to the LUN, over TCP by the coordinator.
    BlockThere,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 5] = [Way::DirectHere, Way::Direct, Way::FileHere, Way::FileThere, Way::BlockThere];

    /// Its name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Way::DirectHere => "direct, coordinator",
            Way::Direct => "direct, other node",
            Way::FileHere => "file-redirected, local",
            Way::FileThere => "file-redirected, tcp",
            Way::BlockThere => "block-redirected, tcp",
        }
    }

    fn disk(self) -> &'static str {
        match self {
            Way::Direct | Way::FileThere => "elsewhere",
            Way::DirectHere | Way::FileHere => "coordinated",
            Way::BlockThere => "without-path",
        }
    }

    fn state(self) -> &'static str {
        match self {
            Way::DirectHere | Way::Direct => "direct",
            Way::FileHere | Way::FileThere => "file-redirected",
            Way::BlockThere => "block-redirected",
        }
    }
}

/// A volume on a LUN, with a disk for each [`Way`]. Dropping it ends its processes; the LUN goes after it.
pub struct SharedVolume {
    lab: Lab,
    _home: TempDir,
}

impl SharedVolume {
    /// Starts the nodes, makes the volume on the first one, and writes each disk of `size` bytes once. `luns`: the paths of the nodes
    /// that have one, to a LUN of [`SharedVolume::lun_size`].
    pub fn start(
        program: &Path,
        workspace: &Workspace,
        luns: Vec<PathBuf>,
        size: u64,
    ) -> Outcome<SharedVolume> {
        let home = tempfile::Builder::new().prefix("lab-").tempdir_in(&workspace.directory)?;
        let mut config = LabConfig::new(home.path(), program);
        config.nodes = luns.len() + 1;
        config.luns = luns;
        let volume = SharedVolume { lab: Lab::up(&config)?, _home: home };
        let coordinator = volume.make(config.luns[0].clone())?;
        let other = (1..config.nodes).map(|number| format!("n{number}")).find(|name| *name != coordinator);
        let other = other.ok_or_else(|| Failure("no node beside the coordinator".into()))?;
        for (way, owner) in [
            (Way::Direct, other),
            (Way::FileHere, coordinator),
            (Way::BlockThere, format!("n{}", config.nodes)),
        ] {
            volume.create_disk(way, &owner, size)?;
        }
        Ok(volume)
    }

    /// Bytes of a LUN for disks of `size` bytes.
    pub fn lun_size(size: u64) -> u64 {
        3 * size + BESIDE_DISKS
    }

    /// Makes the volume. Returns its coordinator.
    fn make(&self, path: PathBuf) -> Outcome<String> {
        let client = self.client()?.patience(PATIENCE);
        let mut wanted = CreateVolume {
            name: VOLUME.into(),
            kind: "lun".into(),
            path,
            server: None,
            format: Some("xfs".into()),
            identity: None,
            destroy: false,
        };
        wanted.identity = client.plan_volume(&wanted)?.identity;
        let made = client.create_volume(&wanted)?;
        let coordinator = made.lun.and_then(|lun| lun.coordinator);
        coordinator.ok_or_else(|| Failure("nobody coordinates the volume".into()))
    }

    fn create_disk(&self, way: Way, owner: &str, size: u64) -> Outcome<()> {
        let client = self.client()?.patience(PATIENCE);
        client.create_disk(&CreateDisk {
            name: way.disk().into(),
            volume: VOLUME.into(),
            size,
            logical_block: 4096,
            policy: "write-through".into(),
            medium: Medium::Ram,
            limit: None,
        })?;
        client.export(way.disk(), &Export { on: Some(owner.into()), accept_loss: false })?;
        self.drive_layer(way, whole())?;
        Ok(())
    }

    fn client(&self) -> Outcome<Client> {
        Ok(self.lab.any_client()?)
    }

    /// Has the disk's requests go that way.
    pub fn take(&self, way: Way) -> Outcome<()> {
        let client = self.client()?;
        let is_wish = matches!(way, Way::FileHere | Way::FileThere);
        client.set_redirected(VOLUME, is_wish)?;
        let deadline = Nanos::now() + PATIENCE;
        loop {
            let route = client.disk(way.disk())?.detail.and_then(|detail| detail.route);
            let state = route.map_or("unknown".to_owned(), |route| route.state);
            if state == way.state() {
                return Ok(());
            }
            if Nanos::now() >= deadline {
                return Err(Failure(format!("disk {} is {state} instead of {}", way.disk(), way.state())));
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Drives the backing of the disk inside its owner.
    pub fn drive(&self, way: Way, load: &Load) -> Outcome<Figures> {
        self.take(way)?;
        self.drive_layer(way, load.workload()).map(|summary| figures(&summary, load.warmup))
    }

    fn drive_layer(&self, way: Way, workload: Workload) -> Outcome<weir_load::Summary> {
        let load = RunLoad { layer: LoadLayer::Backing, workload, force: false };
        let summary = self.client()?.load(way.disk(), &load)?;
        match &summary.first_error {
            Some(error) => Err(Failure(format!("disk {}: {error}", way.disk()))),
            None => Ok(summary),
        }
    }

    /// Where the time of the requests goes that `load` makes to the disk's export that way.
    pub fn layers(&self, weir: &Path, way: Way, load: &Load) -> Outcome<Vec<LayerTime>> {
        self.take(way)?;
        let uri = self.uri(way)?;
        let over = load.runtime;
        let load = Load { runtime: over + EXPLAIN_STARTS, ..*load };
        thread::scope(|scope| {
            let driven = scope.spawn(|| Driver::Weir.drive(&uri, &load));
            thread::sleep(load.warmup);
            let layers = layers::explain(weir, self.lab.dir(), way.disk(), over);
            driven.join().map_err(|_| Failure("the driver panics".into()))??;
            layers
        })
    }

    /// The export of a disk on its owner.
    pub fn uri(&self, way: Way) -> Outcome<Uri> {
        let owner = self.client()?.disk(way.disk())?.owner;
        let owner = owner.ok_or_else(|| Failure(format!("disk {} has no owner", way.disk())))?;
        Ok(Uri::unix(&self.lab.node(&owner)?.nbd_unix, way.disk()))
    }

    /// The nodes' processes.
    pub fn pids(&self) -> Vec<u32> {
        self.lab.nodes().iter().filter_map(|node| node.process).map(|process| process.pid).collect()
    }
}
