//! Common parts of the end-to-end tests: the program, a lab with a disk, and a load that remembers every write.
#![allow(dead_code, clippy::unwrap_used)]

pub mod etcd;
pub mod lun;
mod program;
pub mod rounds;
pub mod throttle;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_block::size::Size;
use weir_lab::process::ProcessState;
use weir_lab::{Lab, LabConfig, LabFlash};
use weir_load::summary::Verification;
use weir_load::verify::{Atomicity, History, Initial, Layout};
use weir_load::verifying::{Locate, Settings, VerifyingLoad};
use weir_load::workload::Span;
use weir_load::{Access, Workload};
use weir_nbd::Uri;
use weir_node::api::{ApiError, ApiErrorKind, CreateDisk, CreateVolume, DiskView, Export, Medium, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;

use self::etcd::Members;

/// The disk that everything happens to.
pub const DISK: &str = "d1";
/// Its size, in bytes.
pub const SIZE: u64 = 32 << 20;
/// The load's blocks, in bytes.
pub const BLOCK: u32 = 4096;
/// Longest wait for anything that must come.
pub const SOON: Duration = Duration::from_secs(30);
/// A load ends by itself after this, should a test that fails forget it.
const LONGEST_LOAD: Duration = Duration::from_secs(600);

/// The `weir` program that the tests run, built once.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(program::build)
}

/// One test at a time: they measure how long things stall, and the machine is small.
pub fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `WEIR_SEED`, or another each time. Printed, so that a failure can be replayed.
pub fn seed() -> u64 {
    let seed = std::env::var("WEIR_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(Nanos::now().0);
    eprintln!("WEIR_SEED={seed}");
    seed
}

/// A lab with one volume and one open disk.
pub struct Bench {
    pub lab: Lab,
    pub directory: tempfile::TempDir,
    /// The medium of its disks' logs.
    pub medium: Medium,
    /// The registry, if it is not the lab's own. Ends after the lab.
    pub etcd: Option<Members>,
}

impl Bench {
    /// As [`Bench::up`], with the registry on an etcd of three members.
    pub fn up_on_etcd(nodes: usize, policy: &str, tune: impl FnOnce(&mut LabConfig)) -> Bench {
        Bench::up_on_etcd_in(tempfile::tempdir().unwrap(), nodes, policy, tune)
    }

    /// So, with all files in `directory`.
    pub fn up_on_etcd_in(
        directory: tempfile::TempDir,
        nodes: usize,
        policy: &str,
        tune: impl FnOnce(&mut LabConfig),
    ) -> Bench {
        let etcd = Members::up();
        let bench = Bench::up_in(directory, nodes, policy, |config| {
            tune(config);
            config.etcd = Some(etcd.lab());
        });
        Bench { etcd: Some(etcd), ..bench }
    }

    pub fn up(nodes: usize, policy: &str, tune: impl FnOnce(&mut LabConfig)) -> Bench {
        Bench::up_in(tempfile::tempdir().unwrap(), nodes, policy, tune)
    }

    /// All files are in `directory`.
    pub fn up_in(
        directory: tempfile::TempDir,
        nodes: usize,
        policy: &str,
        tune: impl FnOnce(&mut LabConfig),
    ) -> Bench {
        std::fs::create_dir(directory.path().join("pool")).unwrap();
        Bench::in_pool(directory, nodes, policy, tune)
    }

    /// The volume is in `pool`, somewhere else.
    pub fn up_on(pool: &Path, nodes: usize, policy: &str, tune: impl FnOnce(&mut LabConfig)) -> Bench {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(pool, directory.path().join("pool")).unwrap();
        Bench::in_pool(directory, nodes, policy, tune)
    }

    fn in_pool(
        directory: tempfile::TempDir,
        nodes: usize,
        policy: &str,
        tune: impl FnOnce(&mut LabConfig),
    ) -> Bench {
        let mut config = LabConfig::new(directory.path().join("lab"), program());
        config.nodes = nodes;
        config.lease_ttl = Duration::from_secs(1);
        tune(&mut config);
        let medium = if matches!(config.flash, LabFlash::None) { Medium::Ram } else { Medium::Flash };
        let lab = Lab::up(&config).unwrap();
        let volume = CreateVolume::dir("pool", directory.path().join("pool"));
        lab.any_client().unwrap().create_volume(&volume).unwrap();
        let bench = Bench { lab, directory, medium, etcd: None };
        bench.create(DISK, policy);
        bench.wait_effective();
        bench
    }

    /// A new disk, open on the first node that runs.
    pub fn create(&self, disk: &str, policy: &str) {
        // On a LUN, whole blocks of the filesystem.
        let logical_block = if self.directory.path().join("pool").exists() { 512 } else { 4096 };
        self.create_with_blocks(disk, policy, logical_block);
    }

    /// Makes a disk with blocks of 512 or 4096 bytes, and opens it.
    pub fn create_with_blocks(&self, disk: &str, policy: &str, logical_block: u32) {
        self.create_as(disk, policy, SIZE, logical_block);
    }

    /// Makes a disk of `size` bytes with blocks of 4096, and opens it. Returns its address.
    pub fn create_sized(&self, disk: &str, policy: &str, size: u64) -> Uri {
        self.create_as(disk, policy, size, 4096)
    }

    fn create_as(&self, disk: &str, policy: &str, size: u64, logical_block: u32) -> Uri {
        let client = self.lab.any_client().unwrap();
        let wanted = CreateDisk {
            name: disk.into(),
            volume: "pool".into(),
            size,
            logical_block,
            policy: policy.into(),
            medium: self.medium,
            limit: None,
        };
        available(|| client.create_disk(&wanted));
        available(|| client.export(disk, &Export::default())).uris[0].parse().unwrap()
    }

    /// The disk as its owner shows it; the latest one, when a former owner does not know yet.
    pub fn disk(&self) -> Option<DiskView> {
        self.disk_named(DISK)
    }

    /// As [`Bench::disk`], for any disk.
    pub fn disk_named(&self, name: &str) -> Option<DiskView> {
        let running = self.lab.nodes().iter().filter(|node| node.process_state() == ProcessState::Running);
        let views = running.filter_map(|node| node.client().patience(Duration::from_secs(2)).disk(name).ok());
        views.filter(|view| view.detail.is_some()).max_by_key(|view| view.epoch)
    }

    pub fn owner(&self) -> String {
        self.wait(|view| view.owner.is_some()).owner.unwrap()
    }

    /// Waits until the owner shows the disk in a certain way.
    pub fn wait(&self, wanted: impl Fn(&DiskView) -> bool) -> DiskView {
        let deadline = Nanos::now() + SOON;
        let mut last = None;
        loop {
            let view = self.disk();
            match view {
                Some(view) if wanted(&view) => return view,
                Some(view) => last = Some(view),
                None => {}
            }
            assert!(Nanos::now() < deadline, "not within {SOON:?}; {}\nlast seen: {last:#?}", self.logs());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the requested policy is in effect, with replicas that are complete.
    pub fn wait_effective(&self) -> DiskView {
        self.wait(|view| view.requested == view.effective && view.state == "serving")
    }

    /// The ends of all logs, for a failure's message.
    pub fn logs(&self) -> String {
        let log = |path: &Path| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            format!("\n--- {}\n{}", path.display(), lines[lines.len().saturating_sub(25)..].join("\n"))
        };
        self.lab.nodes().iter().map(|node| log(&node.log)).collect()
    }

    /// Says where the export is, to a load that runs while nodes come and go.
    pub fn locate(&self) -> Locate {
        self.locate_named(DISK)
    }

    /// As [`Bench::locate`], for any disk.
    pub fn locate_named(&self, name: &str) -> Locate {
        let name = name.to_owned();
        let clients: Vec<Client> =
            self.lab.nodes().iter().map(|node| node.client().patience(Duration::from_millis(300))).collect();
        Box::new(move |_| {
            let views = clients.iter().filter_map(|client| client.disk(&name).ok());
            let owners = views.filter(|view| view.detail.is_some());
            owners.max_by_key(|view| view.epoch).and_then(|view| view.uris.first()?.parse::<Uri>().ok())
        })
    }

    /// A load on the whole disk.
    pub fn load(&self, history: History, seed: u64) -> VerifyingLoad {
        self.load_at(None, history, seed)
    }

    /// As [`Bench::load`], of at most so many requests a second.
    pub fn load_at(&self, rate: Option<u64>, history: History, seed: u64) -> VerifyingLoad {
        let settings = Settings {
            depth: 32,
            rate,
            seed,
            reconnect_for: SOON,
            timeout: Duration::from_secs(3),
            atomicity: Atomicity::Block,
            ..Settings::default()
        };
        VerifyingLoad::new(history, settings, self.locate())
    }

    /// After a load: it has read what it wrote, everything is still there, and no guest saw an error. Returns what the check of
    /// all blocks found.
    pub fn judge(&self, load: &mut VerifyingLoad, seed: u64) -> Verification {
        let mixed = load.found().clone();
        assert_eq!(mixed.mismatches, 0, "seed {seed}, read under load: {:#?}{}", mixed.first, self.logs());
        let all = load.check_all().unwrap();
        assert_eq!(all.mismatches, 0, "seed {seed}: {:#?}{}", all.first, self.logs());
        assert_eq!(load.progress().failed(), 0, "a guest saw an error (P9){}", self.logs());
        all
    }

    /// Reads the backing itself: once everything is destaged, it is the disk.
    pub fn check_backing(&self, history: &mut History) {
        self.wait(|view| {
            let detail = view.detail.as_ref().unwrap();
            detail.dirty_bytes == 0 && detail.destaged == detail.appended
        });
        let file = File::open(self.directory.path().join("pool").join(format!("{DISK}.raw"))).unwrap();
        let mut data = vec![0; BLOCK as usize];
        for block in 0..history.layout().blocks() {
            file.read_exact_at(&mut data, block * u64::from(BLOCK)).unwrap();
            history
                .check(block, &data, Atomicity::Block)
                .unwrap_or_else(|found| panic!("in the backing: {found}"));
        }
    }
}

/// A history of a new disk.
pub fn new_history(run: u64) -> History {
    let layout = Layout::uniform(Span { offset: 0, length: SIZE }, BLOCK).unwrap();
    History::new(layout, run, Initial::Zeroes)
}

/// Asks again while the answer is that somebody else is to do it, or that it is to be tried again.
fn available<T>(ask: impl Fn() -> Result<T, ApiError>) -> T {
    let deadline = Nanos::now() + SOON;
    loop {
        match ask() {
            Err(error) if error.kind == ApiErrorKind::Unavailable && Nanos::now() < deadline => {
                thread::sleep(Duration::from_millis(50));
            }
            answer => return answer.unwrap(),
        }
    }
}

/// Runs the load in a thread of its own during `fault`, and for `afterwards` longer. Returns the load and what `fault` returned.
pub fn during<T>(
    mut load: VerifyingLoad,
    afterwards: Duration,
    fault: impl FnOnce() -> T,
) -> (VerifyingLoad, T) {
    let progress = load.progress();
    let thread = thread::spawn(move || {
        let result = load.run(LONGEST_LOAD);
        (load, result)
    });
    // A fault before the first write would test nothing.
    let deadline = Nanos::now() + SOON;
    while progress.acknowledged() == 0 && !thread.is_finished() {
        assert!(Nanos::now() < deadline, "the load does not start");
        thread::sleep(Duration::from_millis(1));
    }
    let outcome = fault();
    thread::sleep(afterwards);
    progress.stop();
    let (load, result) = thread.join().unwrap();
    result.unwrap();
    (load, outcome)
}

/// IOPS of 8 KiB at depth 8, in a layer of a disk.
pub fn iops(client: &Client, disk: &str, layer: LoadLayer, access: Access) -> f64 {
    let workload = Workload {
        access,
        block_size: Size(8192),
        queue_depth: 8,
        runtime: Some(Duration::from_secs(1)),
        warmup: Duration::from_millis(200),
        ..Workload::default()
    };
    let summary = client.load(disk, &RunLoad { layer, workload, force: false }).unwrap();
    assert_eq!(summary.first_error, None);
    summary.kinds.iter().map(|kind| kind.iops).sum()
}
