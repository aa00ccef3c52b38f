//! A lab whose volume is a LUN: one image, to which each node has a device of its own, and a fence command that sets a device read-only.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tempfile::TempDir;
use weir_block::Nanos;
use weir_lab::process::ProcessState;
use weir_lab::volatile_disk::LoopDevice;
use weir_lab::{Lab, LabConfig};
use weir_nbd::Uri;
use weir_nbd::client::{CommandFlags, NbdClient, NbdError};
use weir_node::api::{CreateDisk, CreateVolume, Export, LunView, Medium};
use weir_node::shard::messages::RouteView;

use super::throttle::Throttle;
use super::{BLOCK, Bench, SOON, program};

/// Bytes of the LUN.
const LUN: u64 = 640 << 20;
/// `_IOR('X', 125, __u32)`: `XFS_IOC_GOINGDOWN`, `EXT4_IOC_SHUTDOWN`.
const GOINGDOWN: libc::Ioctl = 0x8004_587D_u32 as libc::Ioctl;
/// Nothing more is written, not even the log.
static NOLOGFLUSH: u32 = 2;
/// `LOOP_SET_STATUS64` and `LOOP_GET_STATUS64` (Linux, `include/uapi/linux/loop.h`).
const LOOP_SET_STATUS: libc::Ioctl = 0x4C04;
const LOOP_GET_STATUS: libc::Ioctl = 0x4C05;
/// `struct loop_info64`, in words of eight bytes: its size, and the place of the limit to the device's size.
const LOOP_INFO: usize = 29;
const LOOP_SIZE_LIMIT: usize = 4;
/// Bytes that a node may write in a second while its writes are held up: a few at a time get through.
const HELD_UP: u64 = 64 << 10;

/// A process that stands still for longer may be fenced: its lease lasts for a second, and it has renewed that up to half of it before.
const FENCED_AFTER: Duration = Duration::from_millis(400);

/// The nodes' paths to one LUN.
pub struct Luns {
    paths: Vec<PathBuf>,
    /// Those that are made of an image; ended on drop.
    _devices: Vec<LoopDevice>,
    directory: PathBuf,
}

impl Luns {
    fn new(directory: &Path, nodes: usize, bytes: u64) -> Luns {
        let image = directory.join("lun");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let devices: Vec<_> = (0..nodes).map(|_| LoopDevice::attach(&image).unwrap()).collect();
        let paths = devices.iter().map(|device| device.path().to_owned()).collect();
        Luns { paths, _devices: devices, directory: directory.to_owned() }
    }

    /// A program as an operator would write one: it waits for what is on its way. It logs each fence.
    fn fence_command(&self) -> PathBuf {
        let path = self.directory.join("fence");
        let devices: String = self
            .paths
            .iter()
            .enumerate()
            .map(|(index, path)| format!("  n{}) device={} ;;\n", index + 1, path.display()))
            .collect();
        let log = self.directory.join("fences");
        let late = self.directory.join("late-");
        let script = format!(
            "#!/bin/sh\nexec 9>>{running}; flock -s 9\n[ -e {ended} ] && exit 2\n[ $1 = fence ] && [ -e {broken} ] && {{ echo 'no answer' >&2; exit 1; }}\n[ $1 = admit ] && [ -e {closed} ] && {{ echo 'not now' >&2; exit 1; }}\ncase $2 in\n{devices}  *) echo \"no node $2\" >&2; exit 1 ;;\nesac\ncase $1 in\n  fence) blockdev --setro $device || exit 1\n\
             while [ -e {late}$2 ]; do sleep 0.02; done\n\
             until grep -q '^ *0 *0$' /sys/block/${{device#/dev/}}/inflight; do sleep 0.01; done\n\
             echo $2 >>{} ;;\n  admit) blockdev --setrw $device ;;\n  *) exit 2 ;;\nesac\n",
            log.display(),
            running = self.running().display(),
            ended = self.ended().display(),
            broken = self.broken().display(),
            closed = self.closed().display(),
            late = late.display(),
        );
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    /// Locked by each fence command while it runs.
    fn running(&self) -> PathBuf {
        self.directory.join("running")
    }

    /// No fence command begins any more.
    fn ended(&self) -> PathBuf {
        self.directory.join("ended")
    }

    fn broken(&self) -> PathBuf {
        self.directory.join("broken")
    }

    fn closed(&self) -> PathBuf {
        self.directory.join("closed")
    }

    /// The fence command lets nobody back to the LUN, or does again.
    pub fn break_admissions(&self, is_broken: bool) {
        match is_broken {
            true => drop(File::create(self.closed()).unwrap()),
            false => std::fs::remove_file(self.closed()).unwrap(),
        }
    }

    /// The fence command fences nobody, or does again.
    pub fn break_fences(&self, is_broken: bool) {
        match is_broken {
            true => drop(File::create(self.broken()).unwrap()),
            false => std::fs::remove_file(self.broken()).unwrap(),
        }
    }

    /// The path of a node, from 1.
    pub fn path(&self, node: usize) -> &Path {
        &self.paths[node - 1]
    }

    /// Nodes that were fenced, in order.
    pub fn fenced(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.join("fences")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Writes of a node's process to the LUN are held up on their way until the value is dropped, and fences of the node wait for them.
    pub fn hold_up(&self, node: usize, process: u32) -> Option<HeldUp> {
        let late = self.directory.join(format!("late-n{node}"));
        File::create(&late).unwrap();
        let throttle = Throttle::new(self.path(node), HELD_UP, [process]);
        let held = HeldUp { late, throttle, device: self.path(node).to_owned() };
        held.throttle.is_some().then_some(held)
    }

    /// A node's path leads nowhere: it fails what it is asked for, or does not any more. What is on its way lands where it belongs: the
    /// kernel finds the place in the file as before, which it would not if the file began somewhere else.
    pub fn break_path(&self, node: usize, is_broken: bool) {
        let device = OpenOptions::new().read(true).write(true).open(self.path(node)).unwrap();
        let mut info = [0u64; LOOP_INFO];
        // SAFETY: the kernel writes a structure of this size.
        assert_eq!(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS, info.as_mut_ptr()) }, 0);
        info[LOOP_SIZE_LIMIT] = if is_broken { 512 } else { 0 };
        // SAFETY: the kernel reads a structure of this size.
        let answer = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS, info.as_ptr()) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    }

    /// The file that stands for the LUN.
    pub fn image(&self) -> PathBuf {
        self.directory.join("lun")
    }

    /// Another path to the LUN, as another host has one.
    pub fn another_path(&self) -> LoopDevice {
        LoopDevice::attach(&self.image()).unwrap()
    }

    /// A node's path takes writes, or does not.
    pub fn set_path(&self, node: usize, is_there: bool) {
        let how = if is_there { "--setrw" } else { "--setro" };
        run(Command::new("blockdev").arg(how).arg(self.path(node)));
    }
}

/// Writes that wait on their way to the LUN.
pub struct HeldUp {
    late: PathBuf,
    throttle: Option<Throttle>,
    device: PathBuf,
}

impl HeldUp {
    /// Writes that have reached the LUN on this path, since there is the path.
    pub fn landed(device: &Path) -> u64 {
        let name = device.file_name().unwrap().to_string_lossy();
        let text = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
        // "Completed writes" (Linux, `Documentation/block/stat.rst`).
        text.split_whitespace().nth(4).and_then(|count| count.parse().ok()).unwrap()
    }

    /// Lets them go on. Returns how many have reached the LUN since `before`.
    pub fn let_go(self, before: u64) -> u64 {
        let device = self.device.clone();
        drop(self);
        HeldUp::landed(&device) - before
    }
}

impl Drop for HeldUp {
    fn drop(&mut self) {
        // They are on their way before a fence looks for them.
        self.throttle.take().into_iter().for_each(Throttle::let_go);
        let _ = std::fs::remove_file(&self.late);
    }
}

impl Drop for Luns {
    fn drop(&mut self) {
        // A fence that a node has left behind would take the device of whoever gets it next.
        if File::create(self.ended()).is_ok() {
            let _ = Command::new("flock").arg(self.running()).arg("true").status();
        }
        for path in &self.paths {
            // Whoever gets the device next could not write to it.
            let _ = Command::new("blockdev").arg("--setrw").arg(path).status();
        }
    }
}

/// Writes to a new disk until there is no space. The thread ends with an error: in `wait` mode, when the disk is deleted.
pub fn take_all_space(bench: &Bench, disk: &str) -> JoinHandle<NbdError> {
    const SIZE: u64 = 600 << 20;
    const PIECE: usize = 1 << 20;
    let uri = bench.create_sized(disk, "write-through", SIZE);
    thread::spawn(move || {
        let mut nbd = NbdClient::connect(&uri).unwrap();
        for at in (0..SIZE).step_by(PIECE) {
            if let Err(error) = nbd.write(at, &vec![1; PIECE], false) {
                return error;
            }
        }
        panic!("all of it is written");
    })
}

/// Pause between two changes of a redirected load: each is some transactions in the filesystem's journal, which the replay after a crash does
/// one after the other.
const REDIRECTED_PAUSE: Duration = Duration::from_millis(50);

/// A load of which the coordinator has to do every change: it frees the blocks of a disk, and writes them anew. One request at a time.
pub struct RedirectedLoad {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u64, Duration)>,
}

impl RedirectedLoad {
    /// The name of its disk.
    pub const DISK: &str = "redirected";

    /// On a new disk, which this node owns.
    pub fn begin(bench: &Bench, owner: &str) -> RedirectedLoad {
        let wanted = CreateDisk {
            name: Self::DISK.into(),
            volume: "pool".into(),
            size: 1 << 20,
            logical_block: BLOCK,
            policy: "write-through".into(),
            medium: Medium::Ram,
            limit: None,
        };
        let client = bench.lab.any_client().unwrap();
        client.create_disk(&wanted).unwrap();
        let export = Export { on: Some(owner.to_owned()), ..Export::default() };
        let uri: Uri = client.export(Self::DISK, &export).unwrap().uris[0].parse().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&stop);
        let thread = thread::spawn(move || RedirectedLoad::run(&uri, wanted.size, &ends));
        RedirectedLoad { stop, thread }
    }

    /// Fails with the first request that fails, or that reads something else than what was written last.
    fn run(uri: &Uri, size: u64, ends: &AtomicBool) -> (u64, Duration) {
        let mut nbd = NbdClient::connect(uri).unwrap();
        let blocks = size / u64::from(BLOCK);
        let mut kept = vec![0; blocks as usize];
        let (mut changes, mut longest) = (0, Duration::ZERO);
        let mut timed = |done: &mut dyn FnMut()| {
            let began = Nanos::now();
            done();
            longest = longest.max(Nanos::now() - began);
        };
        while !ends.load(Ordering::Relaxed) {
            let (block, byte) = (changes % blocks, (changes % 251) as u8 + 1);
            let at = block * u64::from(BLOCK);
            timed(&mut || nbd.trim(at, u64::from(BLOCK), CommandFlags::NONE).unwrap());
            timed(&mut || nbd.write(at, &[byte; BLOCK as usize], true).unwrap());
            kept[block as usize] = byte;
            changes += 1;
            thread::sleep(REDIRECTED_PAUSE);
        }
        for (block, byte) in (0..).zip(&kept) {
            let mut data = vec![0; BLOCK as usize];
            nbd.read(block * u64::from(BLOCK), &mut data).unwrap();
            assert!(data.iter().all(|one| one == byte), "block {block} is not what was acknowledged");
        }
        (changes, longest)
    }

    /// Ends it. Returns the number of its changes, and how long the slowest request has taken.
    pub fn end(self) -> (u64, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("no redirected request has failed, and nothing was lost")
    }
}

/// The node looks for LUNs at these paths, from its next start on.
pub fn set_devices(lab: &Lab, node: &str, devices: &[PathBuf]) {
    let config = &lab.node(node).unwrap().config;
    let text = std::fs::read_to_string(config).unwrap();
    let paths: Vec<String> = devices.iter().map(|path| format!("{:?}", path.to_str().unwrap())).collect();
    let line = format!("devices = [{}]", paths.join(", "));
    let lines = text.lines().map(|old| if old.starts_with("devices = [") { line.as_str() } else { old });
    std::fs::write(config, lines.collect::<Vec<_>>().join("\n")).unwrap();
}

pub fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A lab with a disk on such a volume, formatted by Weir.
pub struct LunBench {
    // The lab ends before its devices, and before its files.
    pub bench: Bench,
    pub luns: Luns,
    /// Of its filesystem.
    format: String,
    /// Of the lab.
    _files: TempDir,
}

impl LunBench {
    pub fn up(nodes: usize, format: &str, policy: &str, tune: impl FnOnce(&mut LabConfig)) -> LunBench {
        LunBench::up_of(LUN, nodes, format, policy, tune)
    }

    /// On a LUN of so many bytes.
    pub fn up_of(
        bytes: u64,
        nodes: usize,
        format: &str,
        policy: &str,
        tune: impl FnOnce(&mut LabConfig),
    ) -> LunBench {
        // Its image is on a disk's filesystem: loop devices with direct I/O.
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let luns = Luns::new(directory.path(), nodes, bytes);
        let command = luns.fence_command();
        LunBench::begin(directory, luns, format, policy, |config| {
            config.fence_command = Some(command);
            tune(config);
        })
    }

    /// On devices that are there, one for each node, without a fence command.
    pub fn up_on(paths: &[&Path], format: &str, policy: &str, tune: impl FnOnce(&mut LabConfig)) -> LunBench {
        let directory = tempfile::tempdir().unwrap();
        let paths = paths.iter().map(|path| path.to_path_buf()).collect();
        let luns = Luns { paths, _devices: Vec::new(), directory: directory.path().to_owned() };
        LunBench::begin(directory, luns, format, policy, tune)
    }

    fn begin(
        directory: TempDir,
        luns: Luns,
        format: &str,
        policy: &str,
        tune: impl FnOnce(&mut LabConfig),
    ) -> LunBench {
        // Short, for the paths of sockets.
        let files = tempfile::tempdir().unwrap();
        let mut config = LabConfig::new(files.path().join("lab"), program());
        config.nodes = luns.paths.len();
        config.lease_ttl = Duration::from_secs(1);
        config.luns = luns.paths.clone();
        tune(&mut config);
        let lab = Lab::up(&config).unwrap();
        let client = lab.client("n1").unwrap().patience(Duration::from_secs(60));
        let mut wanted = CreateVolume {
            name: "pool".into(),
            kind: "lun".into(),
            path: luns.path(1).to_owned(),
            server: None,
            format: Some(format.into()),
            identity: None,
            // Another test may have written to it.
            destroy: true,
        };
        let refused = client.create_volume(&wanted).unwrap_err();
        let plan = client.plan_volume(&wanted).unwrap();
        assert!(refused.message.contains(plan.identity.as_ref().unwrap()), "{refused}");
        wanted.identity = plan.identity;
        client.create_volume(&wanted).unwrap();
        let bench = Bench { lab, directory, medium: Medium::Ram, etcd: None };
        let bench = LunBench { bench, luns, format: format.to_owned(), _files: files };
        bench.coordinator();
        bench.bench.create(super::DISK, policy);
        bench.bench.wait_effective();
        bench
    }

    /// The volume as a node sees it.
    pub fn lun(&self, node: &str) -> LunView {
        let client = self.bench.lab.client(node).unwrap().patience(Duration::from_secs(5));
        let volumes = client.volumes().unwrap();
        volumes.into_iter().find(|volume| volume.name == "pool").and_then(|volume| volume.lun).unwrap()
    }

    /// The node that serves the volume; waits for it.
    pub fn coordinator(&self) -> String {
        let deadline = Nanos::now() + SOON;
        loop {
            let nodes = self.bench.lab.nodes().iter();
            let running = nodes.filter(|node| node.process_state() == ProcessState::Running);
            let serving = running.map(|node| node.name.clone()).find(|name| {
                let client = self.bench.lab.client(name).unwrap().patience(Duration::from_secs(2));
                let lun = client.volumes().ok().and_then(|all| all.into_iter().find_map(|one| one.lun));
                lun.is_some_and(|lun| lun.phase == "serving")
            });
            if let Some(node) = serving {
                return node;
            }
            assert!(Nanos::now() < deadline, "nobody coordinates the volume{}", self.bench.logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The load's disk is on a node that does not coordinate its volume, with all of its blocks. Returns the coordinator and the owner.
    pub fn apart(&self) -> (String, String) {
        let coordinator = self.coordinator();
        let owner = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
        if self.bench.owner() != owner {
            self.bench.lab.any_client().unwrap().move_disk(super::DISK, owner).unwrap();
        }
        self.bench.wait_effective();
        (coordinator, owner.to_owned())
    }

    /// By which way the I/O of the load's disk goes, as its owner shows it.
    pub fn route(&self, owner: &str) -> Option<RouteView> {
        let client = self.bench.lab.client(owner).unwrap().patience(Duration::from_secs(2));
        client.disk(super::DISK).ok()?.detail?.route
    }

    /// Waits until the owner shows the way in a certain way. Returns the wait.
    pub fn await_route(&self, owner: &str, is_so: impl Fn(&RouteView) -> bool) -> Duration {
        let began = Nanos::now();
        loop {
            let route = self.route(owner);
            if route.as_ref().is_some_and(&is_so) {
                return Nanos::now() - began;
            }
            assert!(Nanos::now() < began + SOON, "{route:?}{}", self.bench.logs());
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The disk has all blocks that its load writes to, and all of its I/O is direct.
    pub fn await_all_direct(&self, owner: &str) {
        let began = Nanos::now();
        loop {
            let before = self.route(owner);
            thread::sleep(Duration::from_millis(300));
            let after = self.route(owner);
            if let (Some(before), Some(after)) = (&before, &after)
                && (before.file, before.block) == (after.file, after.block)
                && after.direct > before.direct
                && after.state == "direct"
            {
                return;
            }
            assert!(Nanos::now() < began + SOON, "{before:?} {after:?}{}", self.bench.logs());
        }
    }

    /// The filesystem of a node, if it has it mounted, writes nothing more, not even its log. Returns whether it had.
    pub fn shut_down(&self, node: &str) -> bool {
        let process = self.bench.lab.process(node).unwrap().unwrap();
        let number: usize = node[1..].parse().unwrap();
        let device = std::fs::metadata(self.luns.path(number)).unwrap().rdev();
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", process.pid)).unwrap().flatten();
        // Any file of that filesystem: its root, for one.
        let mut own = descriptors
            .filter(|one| std::fs::metadata(one.path()).is_ok_and(|found| found.dev() == device))
            .filter_map(|one| File::open(one.path()).ok());
        own.next().is_some_and(|file| {
            // SAFETY: the kernel reads a number that outlives the call.
            unsafe { libc::ioctl(file.as_raw_fd(), GOINGDOWN, &raw const NOLOGFLUSH) == 0 }
        })
    }

    /// Ends the lab, and checks the filesystem as another host finds it: clean, once its journal has been replayed.
    pub fn ends_clean(self) {
        let LunBench { bench, luns, format, _files } = self;
        let Bench { lab, directory, etcd, .. } = bench;
        lab.down().unwrap();
        let device = luns.another_path();
        let mounted = directory.path().join("mounted");
        std::fs::create_dir(&mounted).unwrap();
        run(Command::new("mount").arg(device.path()).arg(&mounted));
        run(Command::new("umount").arg(&mounted));
        match format.as_str() {
            "ext4" => run(Command::new("e2fsck").arg("-fn").arg(device.path())),
            _ => run(Command::new("xfs_repair").arg("-n").arg(device.path())),
        }
        // The devices before their image.
        drop((device, luns, etcd, directory));
    }

    /// A node's process stands still, for so long. Where others fence it meanwhile, its kernel's filesystem stops, too, as it would without its
    /// LUN: the lab's fence, a device that is read-only, stops programs alone, and a second ext4 can be mounted beside the first one.
    pub fn stand_still(&self, node: &str, lasts: Duration) {
        self.bench.lab.pause(node).unwrap();
        if self.format == "ext4" && lasts > FENCED_AFTER {
            self.shut_down(node);
        }
    }

    /// As when its host crashes: its filesystem, if it has that mounted, writes nothing more, and then it is killed. Returns whether it had.
    pub fn crash(&mut self, node: &str) -> bool {
        let was_mounted = self.shut_down(node);
        self.bench.lab.kill(node).unwrap();
        was_mounted
    }
}

/// Waits for what `look` finds; fails if that takes long.
pub fn eventually<T>(pool: &LunBench, what: &str, look: impl Fn() -> Option<T>) -> T {
    let deadline = Nanos::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Nanos::now() < deadline, "not {what}{}", pool.bench.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}
