//! `weir disk create --thick`: a disk with all of its space, or none.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use common::lun::LunBench;
use common::{SOON, alone, program};
use support::filesystem::SmallFilesystem;
use weir_block::Nanos;
use weir_lab::{Lab, LabConfig};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{ApiErrorKind, BeginImport, CreateDisk, CreateVolume, DiskView, Export};

const MIB: u64 = 1 << 20;

fn weir(lab: &Lab, arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("--lab").arg(lab.dir()).args(["--output", "json"]).args(arguments).stdin(Stdio::null());
    command
}

fn thick(lab: &Lab, name: &str, size: &str) -> Command {
    let policy = ["--policy", "write-through"];
    weir(
        lab,
        &[&["disk", "create", name, "--volume", "pool", "--size", size, "--thick"], &policy[..]].concat(),
    )
}

fn made(lab: &Lab, name: &str, size: &str) -> DiskView {
    let Output { status, stdout, stderr } = thick(lab, name, size).output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    serde_json::from_slice(&stdout).unwrap()
}

fn is_gone(lab: &Lab, name: &str) {
    let error = lab.any_client().unwrap().disk(name).unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::NotFound, "{error:?}");
}

/// Too large a disk, or one that is interrupted, leaves nothing.
fn leaves_nothing(lab: &Lab, interrupted: &str) {
    let free = || lab.any_client().unwrap().volume_usage("pool").unwrap().available;
    let before = free();
    let Output { status, stderr, .. } = thick(lab, "huge", "4GiB").output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(!status.success() && said.contains("does not fit: 4 GiB are needed"), "{said}");
    is_gone(lab, "huge");

    let mut child = thick(lab, "stopped", interrupted).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Nanos::now() + SOON;
    while lab.any_client().unwrap().disk("stopped").is_err() {
        assert!(Nanos::now() < deadline && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(2));
    }
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("interrupted"), "{said}");
    is_gone(lab, "stopped");
    // The filesystem counts freed blocks a moment later.
    while free() + MIB < before {
        assert!(Nanos::now() < deadline, "{} of {before} are free", free());
        thread::sleep(Duration::from_millis(50));
    }
}

/// The whole of it is written directly, by a node that does not coordinate: no request needs the coordinator.
fn is_direct(pool: &LunBench) {
    let lab = &pool.bench.lab;
    let view = made(lab, "thick", "64MiB");
    assert_eq!((view.state.as_str(), view.size), ("closed", 64 * MIB));
    let other = if pool.coordinator() == "n1" { "n2" } else { "n1" };
    let wanted = Export { on: Some(other.into()), ..Export::default() };
    let open = lab.client(other).unwrap().export("thick", &wanted).unwrap();
    let address: Uri = open.uris[0].parse().unwrap();
    let mut guest = NbdClient::connect(&address).unwrap();
    let mut found = vec![1; MIB as usize];
    guest.read(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0));
    for at in (0..64).map(|piece| piece * MIB) {
        guest.write(at, &vec![0x5a; MIB as usize], false).unwrap();
    }
    guest.flush().unwrap();
    guest.read(63 * MIB, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0x5a));
    let route = lab.client(other).unwrap().disk("thick").unwrap().detail.unwrap().route.unwrap();
    assert_eq!((route.file, route.block, route.zeroes), (0, 0, 0), "{route:?}");
    assert!(route.direct >= 64, "{route:?}");
    // Where the coordinator sees the file: nothing was allocated anew.
    let client = lab.client(&pool.coordinator()).unwrap();
    let allocated = client.disk("thick").unwrap().allocated.unwrap();
    assert!((64 * MIB..66 * MIB).contains(&allocated), "{allocated}");
}

#[test]
fn on_a_lun_with_xfs_every_request_is_direct() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    is_direct(&pool);
    leaves_nothing(&pool.bench.lab, "256MiB");
}

#[test]
fn on_a_lun_with_ext4_every_request_is_direct() {
    let _turn = alone();
    let pool = LunBench::up(2, "ext4", "write-through", |_| {});
    is_direct(&pool);
    leaves_nothing(&pool.bench.lab, "256MiB");
}

#[test]
fn in_a_directory_it_has_all_of_its_space() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount_xfs(512 * MIB);
    let directory = tempfile::tempdir().unwrap();
    let mut config = LabConfig::new(directory.path().join("lab"), program());
    config.nodes = 1;
    let lab = Lab::up(&config).unwrap();
    lab.any_client().unwrap().create_volume(&CreateVolume::dir("pool", filesystem.path())).unwrap();
    made(&lab, "thick", "64MiB");
    let allocated = lab.any_client().unwrap().disk("thick").unwrap().allocated.unwrap();
    assert!((64 * MIB..66 * MIB).contains(&allocated), "{allocated}");
    let Output { status, stderr, .. } = thick(&lab, "huge", "4GiB").output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(!status.success() && said.contains("does not fit: 4 GiB are needed"), "{said}");
    is_gone(&lab, "huge");
    drop(lab);
}

/// `asked`, which a command asks to make and fill a disk, is killed when there is the disk, or when it has so much space.
fn killed_at(allocated: Option<u64>, lab: &mut Lab, mut command: Command, name: &str, asked: &str) -> Child {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Nanos::now() + SOON;
    while lab.client("n3").unwrap().disk(name).map_or(true, |disk| disk.allocated < allocated) {
        assert!(Nanos::now() < deadline && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(2));
    }
    lab.kill(asked).unwrap();
    child
}

/// A request whose answer was lost comes again, and makes no other disk.
#[test]
fn an_import_begins_once() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let clients = ["n1", "n2"].map(|node| pool.bench.lab.client(node).unwrap());
    let view = clients[0].disk("d1").unwrap();
    let disk = CreateDisk {
        name: "filled".into(),
        volume: "pool".into(),
        size: 64 * MIB,
        logical_block: view.logical_block,
        policy: "write-through".into(),
        medium: Default::default(),
        limit: None,
    };
    let wanted = BeginImport::new(disk, 64 * MIB);
    let begun: Vec<_> = thread::scope(|scope| {
        let at_once = clients.each_ref().map(|client| scope.spawn(|| client.begin_import(&wanted)));
        at_once.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(begun.iter().any(Result::is_ok), "{begun:?}");
    for refused in begun.into_iter().filter_map(Result::err) {
        assert_eq!(refused.kind, ApiErrorKind::Unavailable, "it may be asked again: {refused:?}");
    }
    let import = clients[0].begin_import(&wanted).unwrap();
    let again = clients[1].begin_import(&wanted).unwrap();
    assert_eq!((import.number, again.number), (wanted.number, wanted.number));
    let another = BeginImport { number: wanted.number ^ 1, ..wanted.clone() };
    assert_eq!(clients[1].begin_import(&another).unwrap_err().kind, ApiErrorKind::Exists);
    let nobody = BeginImport { number: 0, ..wanted.clone() };
    assert_eq!(clients[1].begin_import(&nobody).unwrap_err().kind, ApiErrorKind::Invalid);

    clients[0].end_import(&import).unwrap();
    assert_eq!(clients[1].begin_import(&wanted).unwrap_err().kind, ApiErrorKind::Exists, "it has ended");
}

/// The asked node has no answer then to whether the disk was made.
#[test]
fn the_end_of_the_coordinator_is_not_the_end_of_the_command() {
    let _turn = alone();
    let mut pool = LunBench::up_of(2048 * MIB, 3, "xfs", "write-through", |_| {});
    let coordinator = pool.coordinator();
    let asked = if coordinator == "n2" { "n3" } else { "n2" };
    let lab = &mut pool.bench.lab;
    let mut command = thick(lab, "thick", "512MiB");
    command.args(["--node", asked]);
    let child = killed_at(None, lab, command, "thick", &coordinator);
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success() && said.contains("knows no other node"), "{said}");
    let view: DiskView = serde_json::from_slice(&stdout).unwrap();
    assert_eq!((view.state.as_str(), view.size), ("closed", 512 * MIB));
}

#[test]
fn the_end_of_the_node_that_is_asked_is_not_the_end_of_the_command() {
    let _turn = alone();
    let mut pool = LunBench::up_of(2048 * MIB, 3, "xfs", "write-through", |_| {});
    let lab = &mut pool.bench.lab;
    // The first that runs is asked, and may not have answered yet that the disk is made.
    let command = thick(lab, "thick", "512MiB");
    let child = killed_at(None, lab, command, "thick", "n1");
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success() && said.contains("going on with"), "{said}");
    let view: DiskView = serde_json::from_slice(&stdout).unwrap();
    assert_eq!((view.state.as_str(), view.size), ("closed", 512 * MIB));

    // With --node, the command asks no other node: it says so at once, and how to go on.
    let mut command = thick(lab, "left", "512MiB");
    command.args(["--node", "n2"]);
    let child = killed_at(Some(MIB), lab, command, "left", "n2");
    thread::sleep(Duration::from_secs(2));
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("knows no other node"), "{said}");
    assert!(said.contains("interrupted") && said.contains("disk left is left"), "{said}");
}
