//! A lab whose every disk has a volatile cache, and the switch for all of its power.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fastrand::Rng;
use weir_cluster::records::Medium;
use weir_lab::volatile_disk::{Survivors, Toll, VolatileDisk};
use weir_lab::{Lab, LabConfig, LabFlash, REGISTRY};
use weir_nbd::Uri;
use weir_node::api::{CreateDisk, CreateVolume, DiskView, Export};

use crate::common::{Bench, DISK, program};
use crate::mounted::{Kind, Mounted};
use crate::support::run;

/// Bytes of the disk that holds the registry and what the nodes keep for themselves.
const HOME: u64 = 64 << 20;

/// Bytes of each node's flash: room for one log.
const FLASH: u64 = 128 << 20;

/// The configuration of a site.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Nodes.
    pub nodes: usize,
    /// The disk's policy.
    pub policy: &'static str,
    /// The medium of its write log; with flash, every node has a device for it.
    pub medium: Medium,
    /// The disk's size, in bytes.
    pub size: u64,
}

/// A lab with power. Everything that a cut takes away is on it: the registry's file and the nodes' own on one disk, the
/// backing on another, and each node's flash on one more.
pub struct Site {
    // In this order they end: processes, mounts, disks, directory.
    pub bench: Bench,
    home: Filesystem,
    pool: Filesystem,
    flash: Vec<VolatileDisk>,
    _directory: tempfile::TempDir,
}

/// An ext4 on a disk of its own.
struct Filesystem {
    mounted: Option<Mounted>,
    disk: VolatileDisk,
    at: PathBuf,
}

impl Filesystem {
    fn make(at: &Path, size: u64) -> Filesystem {
        let disk = VolatileDisk::create(&at.with_extension("disk"), size).unwrap();
        Kind::Ext4.make(&disk.path());
        let mut filesystem = Filesystem { mounted: None, disk, at: at.to_owned() };
        filesystem.mount();
        filesystem
    }

    /// With a journal that commits only on demand: data is flushed only if a process flushes it.
    fn mount(&mut self) {
        self.mounted = Some(Mounted::with_options(Kind::Ext4, &self.disk.path(), &self.at, "commit=300"));
    }

    fn power_on(&mut self, survivors: Survivors) -> Toll {
        self.mounted.take().unwrap().unmount();
        let toll = self.disk.power_on(survivors).unwrap();
        self.mount();
        toll
    }
}

impl Site {
    /// Builds it, with [`DISK`] open on one of the nodes.
    pub fn up(plan: &Plan) -> Site {
        let directory = tempfile::tempdir().unwrap();
        let home = Filesystem::make(&directory.path().join("home"), HOME);
        let pool = Filesystem::make(&directory.path().join("pool"), plan.size + plan.size / 4 + (32 << 20));
        let nodes = if plan.medium == Medium::Flash { plan.nodes } else { 0 };
        let flash =
            |number| VolatileDisk::create(&directory.path().join(format!("flash{number}")), FLASH).unwrap();
        let flash: Vec<_> = (1..=nodes).map(flash).collect();
        let mut config = LabConfig::new(home.at.join("lab"), program());
        config.nodes = plan.nodes;
        config.flash = LabFlash::Devices(flash.iter().map(VolatileDisk::path).collect());
        config.lease_ttl = Duration::from_secs(1);
        let lab = Lab::up(&config).unwrap();
        let directory_on_pool = tempfile::tempdir_in(&pool.at).unwrap();
        let bench = Bench { lab, directory: directory_on_pool, medium: plan.medium, etcd: None };
        let site = Site { bench, home, pool, flash, _directory: directory };
        let volume = site.bench.directory.path().join("pool");
        std::fs::create_dir(&volume).unwrap();
        // The setup so far is on its medium. From here on, durability is up to Weir.
        run("sync", ["--file-system".as_ref(), site.home.at.as_os_str(), volume.as_os_str()]);
        site.create_disk(plan, volume);
        site
    }

    fn create_disk(&self, plan: &Plan, volume: PathBuf) {
        let client = self.bench.lab.any_client().unwrap();
        let volume = CreateVolume::dir("pool", volume);
        client.create_volume(&volume).unwrap();
        let disk = CreateDisk {
            name: DISK.into(),
            volume: "pool".into(),
            size: plan.size,
            logical_block: 512,
            policy: plan.policy.into(),
            medium: plan.medium,
            limit: None,
        };
        client.create_disk(&disk).unwrap();
        client.export(DISK, &Export::default()).unwrap();
        self.bench.wait_effective();
    }

    /// The backing's disk does not flush any more, and says that it does.
    pub fn backing_lies(&self) {
        self.pool.disk.lie_about_flushes();
    }

    /// No flash flushes any more, and all say that they do.
    pub fn flash_lies(&self) {
        self.flash.iter().for_each(VolatileDisk::lie_about_flushes);
    }

    /// The power goes everywhere at once. `guests` ends those who use the disk, which have no power either.
    pub fn power_cut(&mut self, guests: impl FnOnce()) {
        let disks: Vec<_> = [&self.home.disk, &self.pool.disk].into_iter().chain(&self.flash).collect();
        disks.iter().for_each(|disk| disk.fail_power());
        self.bench.lab.kill_all(|| disks.iter().for_each(|disk| disk.power_off())).unwrap();
        guests();
    }

    /// The power comes back: disks with what survived, each by its own chance, registry, and `nodes` in this order. Says what
    /// the cut took.
    pub fn power_on(&mut self, survivors: Survivors, nodes: &[String]) -> String {
        let mut number = 0;
        let mut next = || {
            number += 1;
            match survivors {
                Survivors::None => Survivors::None,
                Survivors::Some { seed } => Survivors::Some { seed: seed.wrapping_add(number) },
            }
        };
        self.home.power_on(next());
        let backing = self.pool.power_on(next());
        let flash: Vec<_> = self.flash.iter_mut().map(|disk| disk.power_on(next()).unwrap()).collect();
        self.bench.lab.start(REGISTRY).unwrap();
        for node in nodes {
            self.bench.lab.start(node).unwrap();
        }
        let text = |Toll { lost, kept, torn }| format!("{lost} lost, {kept} kept, {torn} torn");
        let flash: Vec<_> = flash.into_iter().map(text).collect();
        format!("unflushed blocks of the backing: {}; of flash: [{}]", text(backing), flash.join("; "))
    }

    /// The nodes, in an order of chance.
    pub fn shuffled(&self, random: &mut Rng) -> Vec<String> {
        let mut names: Vec<_> = self.bench.lab.nodes().iter().map(|node| node.name.clone()).collect();
        random.shuffle(&mut names);
        names
    }

    /// The disk when it is served again, by whichever node, as its policy asks.
    pub fn wait_served(&self) -> (DiskView, Uri) {
        let view = self.bench.wait(|view| {
            view.requested == view.effective && view.state == "serving" && !view.uris.is_empty()
        });
        let uri = view.uris[0].parse().unwrap();
        (view, uri)
    }
}
