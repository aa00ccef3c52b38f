//! A guest that boots from a clone of an imported image: its host crashes, it boots on another one and finds its files there, and its
//! filesystem is sound. The image that the clone began as stays what it was.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::lun::{LunBench, run};
use common::{SOON as A_WHILE, alone, program};
use support::relay::Relay;
use support::writing::{FILL, SOON, VERIFY};
use weir_block::Nanos;
use weir_lab::guest::{Guest, GuestConfig, GuestImage};
use weir_node::api::{CloneDisk, DiskView, Export, Medium};

const CLONE: &str = "vm1";

/// Bytes of the image.
const GOLDEN: u64 = 64 << 20;

fn image() -> GuestImage {
    // Beside the build's other results, so that it survives from run to run.
    GuestImage::cached(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest")).unwrap()
}

/// A guest whose root filesystem is on the clone.
fn boot(relay: &Relay) -> Guest {
    let mut config = GuestConfig::new(image(), [relay.uri(CLONE)]);
    config.from_first_disk = true;
    config.boot_timeout = Duration::from_secs(180);
    let mut guest = Guest::boot(&config).unwrap();
    let root = guest.run("awk '$2 == \"/\" { print $1, $3 }' /proc/mounts", SOON).unwrap();
    assert_eq!(root.lines().last(), Some("/dev/vda ext4"), "{root}");
    guest
}

fn import(pool: &LunBench, image: &Path) {
    let lab = &pool.bench.lab;
    let mut command = Command::new(program());
    command.arg("--lab").arg(lab.dir()).args(["image", "import"]).arg(image);
    run(command.args(["golden", "--volume", "pool", "--policy", "write-through"]).stdin(Stdio::null()));
}

fn wait(pool: &LunBench, wanted: impl Fn(&DiskView) -> bool) -> DiskView {
    let deadline = Nanos::now() + A_WHILE;
    loop {
        let view = pool.bench.disk_named(CLONE);
        if let Some(view) = view.clone().filter(|view| wanted(view)) {
            return view;
        }
        assert!(Nanos::now() < deadline, "{view:#?}{}", pool.bench.logs());
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_guest_boots_from_a_clone_and_again_after_its_host_has_crashed() {
    let _turn = alone();
    let mut pool = LunBench::up(3, "xfs", "write-back+0", |_| {});
    let directory = tempfile::tempdir().unwrap();
    let (files, raw) = (directory.path().join("files"), directory.path().join("golden.raw"));
    std::fs::create_dir_all(files.join("etc")).unwrap();
    std::fs::write(files.join("etc/release"), "the image's own\n").unwrap();
    image().root_filesystem(&files, &raw, GOLDEN).unwrap();
    import(&pool, &raw);
    let client = pool.bench.lab.any_client().unwrap();
    client.create_snapshot("golden", "v1", &[]).unwrap();
    let clone = CloneDisk {
        name: CLONE.into(),
        snapshot: Some("v1".into()),
        policy: "write-back+1".into(),
        medium: Medium::Ram,
        limit: None,
    };
    client.clone_disk("golden", &clone).unwrap();
    // The coordinator itself: its volume has to be served by another node, too.
    let former = pool.coordinator();
    client.export(CLONE, &Export { on: Some(former.clone()), accept_loss: false }).unwrap();
    wait(&pool, |view| view.effective == view.requested && view.state == "serving");

    let relay = Relay::listen(&directory.path().join("relay"), pool.bench.locate_named(CLONE));
    let mut guest = boot(&relay);
    guest.run(&format!("{FILL} fill before"), SOON).unwrap();
    // Not synced.
    guest.run("dd if=/dev/urandom of=/mnt/unsynced bs=64k count=32 2>/dev/null", SOON).unwrap();
    // The host, with its guest.
    guest.kill();
    assert!(pool.crash(&former), "it has the filesystem mounted");
    let next = wait(&pool, |view| view.owner.as_ref().is_some_and(|owner| *owner != former));
    assert_ne!(pool.coordinator(), former);
    eprintln!("from {former} to {}, fenced: {:?}", next.owner.unwrap(), pool.luns.fenced());

    let mut guest = boot(&relay);
    assert_eq!(guest.run(VERIFY, SOON).unwrap(), "1\n");
    assert_eq!(guest.run("cat /etc/release", SOON).unwrap(), "the image's own\n");
    guest
        .run("mount -o remount,ro / && echo 3 >/proc/sys/vm/drop_caches && fsck.ext4 -fn /dev/vda", SOON)
        .unwrap();
    guest.kill();
    let running = pool.coordinator();
    let golden = pool.bench.lab.client(&running).unwrap().export("golden", &Export::default()).unwrap();
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&raw).arg(&golden.uris[0]));
}
