//! A lab with one volume and one disk, as the end-to-end tests want it.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use weir_block::Nanos;
use weir_lab::{Lab, LabConfig};
use weir_load::error::LoadError;
use weir_load::nbd::Uri;
use weir_load::verify::{History, Initial, Layout};
use weir_load::verifying::{Progress, Settings, VerifyingLoad};
use weir_load::workload::Span;
use weir_node::api::{CreateDisk, CreateVolume, DiskView, Export};
use weir_node::client::Client;

pub const DISK: &str = "d";
pub const VOLUME: &str = "v";

/// Three nodes, a `dir` volume, and usually one disk. Everything ends when it is dropped.
pub struct Cluster {
    pub lab: Lab,
    pub volume: std::path::PathBuf,
    // After the lab: its processes must have ended before their files go.
    _directory: tempfile::TempDir,
}

impl Cluster {
    pub fn start() -> Cluster {
        Cluster::with(|_| {})
    }

    pub fn with(adjust: impl FnOnce(&mut LabConfig)) -> Cluster {
        // Unix sockets need short paths, and the volume a real filesystem with direct I/O.
        let directory = tempfile::Builder::new().prefix("weir-").tempdir_in("/var/tmp").expect("a directory");
        let volume = directory.path().join("volume");
        std::fs::create_dir(&volume).expect("the volume's directory");
        let mut config = LabConfig::new(directory.path().join("lab"), env!("CARGO_BIN_EXE_weir"));
        adjust(&mut config);
        let lab = Lab::up(&config).expect("the lab starts");
        let cluster = Cluster { lab, volume, _directory: directory };
        cluster.create_volume(VOLUME, &cluster.volume);
        cluster
    }

    pub fn create_volume(&self, name: &str, path: &Path) {
        let volume = CreateVolume { name: name.into(), kind: "dir".into(), path: path.into() };
        self.client().create_volume(&volume).expect("a volume");
    }

    /// A disk, opened on the first node.
    pub fn create_disk(&self, name: &str, size: u64, policy: &str) {
        let disk = CreateDisk {
            name: name.into(),
            volume: VOLUME.into(),
            size,
            logical_block: 512,
            policy: policy.into(),
        };
        self.client().create_disk(&disk).expect("a disk");
        self.export(name, "n1");
        self.wait_policy(name, policy);
    }

    pub fn export(&self, disk: &str, node: &str) {
        let export = Export { on: Some(node.into()), accept_loss: false };
        self.client().export(disk, &export).expect("exported");
    }

    pub fn client(&self) -> Client {
        self.lab.any_client().expect("a node runs")
    }

    /// The disk as its owner sees it, or as anybody does.
    pub fn disk(&self, name: &str) -> Option<DiskView> {
        let view = self.client().disk(name).ok()?;
        let owner = view.owner.clone().and_then(|owner| self.lab.client(&owner).ok());
        match owner {
            Some(owner) => owner.disk(name).ok().or(Some(view)),
            None => Some(view),
        }
    }

    pub fn owner(&self, disk: &str) -> String {
        self.client().disk(disk).expect("the disk").owner.expect("an owner")
    }

    /// Waits until `condition` holds for the disk.
    pub fn wait(&self, disk: &str, what: &str, condition: impl Fn(&DiskView) -> bool) -> DiskView {
        let deadline = Nanos::now() + Duration::from_secs(60);
        loop {
            let view = self.disk(disk);
            if let Some(view) = &view
                && condition(view)
            {
                return view.clone();
            }
            assert!(Nanos::now() < deadline, "{what}: {view:#?}\n{}", self.events());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn wait_policy(&self, disk: &str, policy: &str) -> DiskView {
        self.wait(disk, policy, |view| view.effective == policy && view.state == "serving")
    }

    /// Waits until nothing is dirty.
    pub fn wait_clean(&self, disk: &str) -> DiskView {
        self.wait(disk, "clean", |view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0))
    }

    pub fn events(&self) -> String {
        let events = self.client().events().unwrap_or_default();
        events.iter().map(|event| format!("{event:?}\n")).collect()
    }

    /// Where the disk is now, asked of the nodes that run.
    pub fn locator(&self, disk: &str) -> impl FnMut(u64) -> Option<Uri> + Send + use<> {
        let (dir, disk) = (self.lab.dir().to_owned(), disk.to_owned());
        move |_| {
            let view = Lab::open(&dir).ok()?.any_client().ok()?.disk(&disk).ok()?;
            view.uris.iter().find_map(|uri| uri.parse().ok())
        }
    }
}

/// Blocks of 512 B to 64 KiB over the first `length` bytes of a new disk.
pub fn new_history(length: u64, seed: u64) -> History {
    let span = Span { offset: 0, length };
    let layout = Layout::mixed(span, &[512, 4096, 8192, 65536], seed).expect("a layout");
    History::new(layout, seed, Initial::Zeroes)
}

/// A verified load at depth 32 in a thread of its own.
pub struct Load {
    pub progress: Arc<Progress>,
    thread: JoinHandle<(VerifyingLoad, Result<(), LoadError>)>,
}

impl Load {
    pub fn start(cluster: &Cluster, disk: &str, history: History, settings: Settings) -> Load {
        let mut load = VerifyingLoad::new(history, settings, Box::new(cluster.locator(disk)));
        let progress = load.progress();
        let thread = std::thread::spawn(move || {
            let result = load.run(Duration::from_secs(600));
            (load, result)
        });
        Load { progress, thread }
    }

    /// Waits until `count` more writes were acknowledged.
    pub fn wait_acknowledged(&self, count: u64, cluster: &Cluster) {
        let target = self.progress.acknowledged() + count;
        let deadline = Nanos::now() + Duration::from_secs(60);
        while self.progress.acknowledged() < target {
            assert!(Nanos::now() < deadline, "the load does not go on\n{}", cluster.events());
            assert!(!self.thread.is_finished(), "the load ended: {:?}", cluster.events());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the load and hands it back, to check everything with.
    pub fn stop(self) -> VerifyingLoad {
        self.progress.stop();
        let (load, result) = self.thread.join().expect("the load does not panic");
        result.expect("the export is always found again");
        load
    }
}
