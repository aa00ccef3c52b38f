//! Persistent reservations as the fence of a volume on a LUN, in a guest: its kernel has a SCSI target with two paths to one LUN, and two
//! nodes run there, each with a path of its own.
//!
//! The tests of this program that are ignored run in the guest, which has this program, too.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use common::lun::LunBench;
use common::{DISK, during, new_history, program, seed};
use weir_block::Nanos;
use weir_lab::guest::{Guest, GuestConfig, GuestImage};
use weir_volume::lun::claim::Process;
use weir_volume::lun::filesystem::extents::extents;
use weir_volume::lun::filesystem::pages::Pages;
use weir_volume::lun::heartbeat::VolumeId;
use weir_volume::lun::reservations::{
    Device, Key, Registered, Reservation, ReservationError, Reservations, check_unused,
};

/// Longest wait for anything that must come, in a guest that is emulated.
const SOON: Duration = Duration::from_secs(30);
/// The two paths to the LUN, in the guest.
const PATHS: [&str; 2] = ["/dev/sda", "/dev/sdb"];

/// A target with one LUN, in memory, and two initiators for it.
const TARGET: &str = r#"
    set -e
    for module in $(cat /modules/order-target); do insmod /modules/$module.ko; done
    mount -t configfs configfs /sys/kernel/config
    mkdir -p /var/target/pr /var/tmp /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    echo +io >/sys/fs/cgroup/cgroup.subtree_control
    ifconfig lo up
    target=/sys/kernel/config/target
    lun=$target/core/fileio_0/lun
    mkdir -p $lun
    echo "fd_dev_name=/tmp/lun,fd_dev_size=671088640" >$lun/control
    echo weir-lun-1 >$lun/wwn/vpd_unit_serial
    echo 1 >$lun/enable
    for path in 1 2; do
        port=$target/loopback/naa.600140500000000$path/tpgt_1
        mkdir -p $port/lun/lun_0
        echo naa.6001405000000a0$path >$port/nexus
        ln -s $lun $port/lun/lun_0/lun
    done
    until [ -b /dev/sda ] && [ -b /dev/sdb ]; do sleep 0.1; done
"#;

#[test]
fn a_fenced_node_writes_nothing_more() {
    // Beside the build's other results, so that it survives from run to run.
    let image = GuestImage::cached(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let this = std::env::current_exe().unwrap();
    let programs = [(this.as_path(), "test"), (program(), "weir")];
    let mut config = GuestConfig::new(image.with_programs(directory.path(), &programs).unwrap(), [""; 0]);
    (config.memory, config.processors) = (2048, 2);
    let began = Nanos::now();
    let mut guest = Guest::boot(&config).unwrap();
    guest.run(TARGET, SOON).unwrap();
    eprintln!("the guest has its LUN after {:?}", Nanos::now() - began);
    let tests =
        "WEIR_PROGRAM=/weir/weir RUST_BACKTRACE=0 /weir/test --ignored --nocapture --test-threads 1 2>&1";
    match guest.run(tests, Duration::from_secs(300)) {
        Ok(said) => {
            eprintln!("{said}after {:?}", Nanos::now() - began);
            assert!(said.contains("2 passed; 0 failed"), "not all tests have run in the guest");
        }
        Err(error) => panic!("{error}"),
    }
}

fn shown() -> Registered {
    Device::open(Path::new(PATHS[0])).unwrap().read().unwrap()
}

/// Writes directly, past everything of this host.
fn write(path: &str, at: u64) -> io::Result<()> {
    let mut pages = Pages::new(4096);
    pages.bytes_mut().fill(0xEE);
    let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path)?;
    file.write_all_at(pages.bytes(), at)
}

fn errno(result: io::Result<()>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
#[ignore = "runs in the guest of the other test"]
fn keys_keep_nodes_from_a_lun_in_the_guest() {
    let volume = VolumeId([7; 16]);
    let process = |node, incarnation| Process { node, incarnation };
    let node = |path: usize, process, is_on| Reservations {
        is_on,
        lun: PATHS[path].into(),
        key: Key::new(volume, process),
        wait: Duration::from_millis(100),
    };
    let (first, second) = (node(0, process(1, 1), true), node(1, process(2, 1), true));
    check_unused(Path::new(PATHS[0])).unwrap();
    assert!(!node(0, process(1, 1), false).admit().unwrap(), "switched off");
    assert!(first.admit().unwrap());
    assert_eq!(errno(write(PATHS[1], 0)), Some(libc::EBADE), "it has no key");
    assert!(second.admit().unwrap() && second.admit().unwrap());
    write(PATHS[1], 0).unwrap();
    assert_eq!(shown(), Registered { keys: shown().keys, reservation: Reservation::Registrants });
    let error = check_unused(Path::new(PATHS[0])).unwrap_err().to_string();
    assert!(error.contains("a registered key (0x57"), "{error}");
    let error = node(0, process(1, 1), false).admit().unwrap_err();
    assert!(matches!(error, ReservationError::SwitchedOff { .. }), "{error}");
    // The second one is fenced as a node: by the key of any process of it.
    first.fence(Key::new(volume, process(2, 9)), 2, || false).unwrap();
    assert_eq!(errno(write(PATHS[1], 0)), Some(libc::EBADE));
    assert_eq!(shown().keys, [first.key]);
    first.fence(second.key, 2, || false).unwrap();
    let error = second.check().unwrap_err();
    assert!(matches!(error, ReservationError::NotRegistered { .. }), "{error}");
    let error = second.fence(first.key, 1, || false).unwrap_err();
    assert!(!matches!(error, ReservationError::Unused), "{error}");
    first.check().unwrap();
    write(PATHS[0], 0).unwrap();
    let error = first.fence(node(0, process(1, 8), true).key, 1, || false).unwrap_err();
    assert!(matches!(error, ReservationError::SameBits { .. }), "{error}");
    // Another process of the first one: its key comes in the place of the former one's.
    let again = node(0, process(1, 2), true);
    again.admit().unwrap();
    assert_eq!(shown().keys, [again.key]);
    first.check().unwrap_err();
    // The reservation outlives the node that has made it.
    second.admit().unwrap();
    second.fence(again.key, 1, || false).unwrap();
    assert_eq!(shown(), Registered { keys: vec![second.key], reservation: Reservation::Registrants });
    assert_eq!(errno(write(PATHS[0], 0)), Some(libc::EBADE));
    again.admit().unwrap();
    // A fence that nobody wants any more is not made, and its wait proves nothing.
    second.admit().unwrap();
    let slow = Reservations { wait: Duration::from_secs(3600), ..again.clone() };
    let error = slow.fence(second.key, 2, || true).unwrap_err();
    assert!(matches!(error, ReservationError::Over), "{error}");
    second.check().unwrap();
    let asked = Cell::new(0);
    let error = slow.fence(second.key, 2, || asked.replace(asked.get() + 1) > 0).unwrap_err();
    assert!(matches!(error, ReservationError::Over), "{error}");
    // The last one ends the reservation.
    again.leave().unwrap();
    again.leave().unwrap();
    assert_eq!(shown(), Registered::default());
    write(PATHS[1], 0).unwrap();
    // Another program's key.
    Device::open(Path::new(PATHS[1])).unwrap().register(Key(0xABC)).unwrap();
    let error = first.admit().unwrap_err();
    assert!(matches!(error, ReservationError::Foreign { .. }), "{error}");
    Device::open(Path::new(PATHS[1])).unwrap().unregister(Key(0xABC)).unwrap();
}

/// The disk's first block, on the LUN, once the load has written there. Its file is in reach of the coordinator's process alone.
fn place_on_lun(pool: &LunBench, coordinator: &str) -> u64 {
    let process = pool.bench.lab.process(coordinator).unwrap().unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", process.pid)).unwrap().flatten();
    let mut files = descriptors.filter_map(|one| File::open(one.path().join(format!("{DISK}.raw"))).ok());
    let file = files.next().expect("it has the filesystem mounted");
    let deadline = Nanos::now() + SOON;
    loop {
        let found = extents(&file, 0..4096).unwrap();
        if let Some(first) = found.iter().find(|extent| extent.start == 0) {
            return first.physical;
        }
        assert!(Nanos::now() < deadline, "the load has not written there{}", pool.bench.logs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A write that is issued on a path now, and gets to it when the throttle is released.
struct LateWrite {
    dd: Child,
}

const SLOW: &str = "/sys/fs/cgroup/slow";

impl LateWrite {
    fn issue(path: &str, at: u64) -> LateWrite {
        std::fs::create_dir(SLOW).unwrap();
        LateWrite::limit(path, "1024");
        let script = format!(
            "echo $$ >{SLOW}/cgroup.procs; exec dd if=/dev/urandom of={path} oflag=direct,seek_bytes conv=notrunc bs=65536 count=1 seek={at}"
        );
        let dd = Command::new("sh").args(["-c", &script]).stderr(Stdio::piped()).spawn().unwrap();
        LateWrite { dd }
    }

    fn limit(path: &str, bytes_per_second: &str) {
        let number = std::fs::read_to_string(format!("/sys/block/{}/dev", &path[5..])).unwrap();
        std::fs::write(format!("{SLOW}/io.max"), format!("{} wbps={bytes_per_second}", number.trim()))
            .unwrap();
    }

    /// Lets it go on. Returns how it has ended.
    fn release(mut self, path: &str) -> Output {
        assert!(self.dd.try_wait().unwrap().is_none(), "it was not held up");
        LateWrite::limit(path, "max");
        self.dd.wait_with_output().unwrap()
    }
}

fn await_keys(pool: &LunBench, count: usize) {
    let deadline = Nanos::now() + SOON;
    while shown().keys.len() != count {
        assert!(Nanos::now() < deadline, "{:?}, and not {count} keys{}", shown(), pool.bench.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[ignore = "runs in the guest of the other test"]
fn nodes_fence_each_other_in_the_guest() {
    let seed = seed();
    let paths = PATHS.map(Path::new);
    let pool = LunBench::up_on(&paths, "ext4", "write-through", |config| {
        config.lease_ttl = Duration::from_secs(2);
        config.fence_grace = Duration::from_secs(1);
    });
    let bench = &pool.bench;
    await_keys(&pool, 2);
    assert_eq!(shown().reservation, Reservation::Registrants);
    let victim = pool.coordinator();
    let (other, path) = if victim == "n1" { ("n2", PATHS[0]) } else { ("n1", PATHS[1]) };
    for node in ["n1", "n2"] {
        assert_eq!(pool.lun(node).fencing, "reservations");
    }
    // All that the victim writes is its own: the filesystem's metadata, and the disk.
    if bench.owner() != victim {
        bench.lab.any_client().unwrap().move_disk(DISK, &victim).unwrap();
    }
    bench.wait_effective();
    let (load, at) =
        during(bench.load(new_history(seed), seed), Duration::ZERO, || place_on_lun(&pool, &victim));
    let history = load.into_history();
    let late = LateWrite::issue(path, at);
    let (mut load, ()) = during(bench.load(history, seed), Duration::from_secs(1), || {
        std::thread::sleep(Duration::from_millis(500));
        // Neither its process nor the registry says that it is gone. It wakes with requests that its guest has sent.
        bench.lab.pause(&victim).unwrap();
        let since = Nanos::now();
        await_keys(&pool, 1);
        assert_eq!(errno(write(path, at)), Some(libc::EBADE), "the fenced node's path");
        assert_eq!(pool.coordinator(), other);
        eprintln!("{other} serves {:?} after {victim} was paused", Nanos::now() - since);
        let ended = late.release(path);
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(
            !ended.status.success() && said.contains("Invalid exchange"),
            "a late write has landed: {said}"
        );
        bench.wait(|view| view.owner.as_deref() == Some(other) && view.state == "serving");
        bench.lab.resume(&victim).unwrap();
        // It has ended what it had under way, and is let back.
        await_keys(&pool, 2);
        eprintln!("{victim} is registered again {:?} after it was paused", Nanos::now() - since);
    });
    eprintln!("longest stall {:?}", load.progress().longest_stall());
    bench.judge(&mut load, seed);
    // It uses its path as before.
    bench.lab.any_client().unwrap().move_disk(DISK, &victim).unwrap();
    bench.wait_effective();
    let (mut load, ()) = during(bench.load(load.into_history(), seed), Duration::from_secs(1), || {});
    bench.judge(&mut load, seed);
    // Nothing is refused to a node that does nothing: it looks for its key, and registers again.
    let keys = shown().keys;
    let device = Device::open(Path::new(if other == "n1" { PATHS[0] } else { PATHS[1] })).unwrap();
    // The LUN knows which one is that of this path.
    let removed = [(0, 1), (1, 0)].iter().filter(|(own, one)| device.preempt(keys[*own], keys[*one]).is_ok());
    assert_eq!(removed.count(), 1);
    await_keys(&pool, 2);
    assert_eq!(pool.coordinator(), other, "only the other one was fenced");
}
