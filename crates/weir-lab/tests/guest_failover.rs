//! A real guest on a Weir disk whose node is killed: the guest waits and goes on (P9), and finds everything that it had
//! synced (P1, P8).
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::path::Path;
use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone};
use support::relay::Relay;
use support::writing::{FILL, GO_ON, KEEP_WRITING, SOON, VERIFY};
use weir_lab::guest::{Guest, GuestConfig, GuestImage};

fn boot(relay: &Relay) -> Guest {
    // Beside the build's other results, so that it survives from run to run.
    let image = GuestImage::cached(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest")).unwrap();
    let mut config = GuestConfig::new(image, [relay.uri(DISK)]);
    config.boot_timeout = Duration::from_secs(180);
    Guest::boot(&config).unwrap()
}

/// A guest with files on a new filesystem.
fn boot_with_files(relay: &Relay) -> Guest {
    let mut guest = boot(relay);
    let prepare = format!("{FILL} mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt && fill before");
    guest.run(&prepare, SOON).unwrap();
    guest
}

#[test]
fn a_guest_waits_while_its_disk_moves_to_another_node() {
    let _turn = alone();
    let mut bench = Bench::up(3, "write-back+1", |_| {});
    let relay = Relay::listen(&bench.directory.path().join("relay"), bench.locate());
    let mut guest = boot_with_files(&relay);

    // Writing and syncing goes on in the background, and hence is in progress when the node dies.
    guest.run(&format!("{FILL}{KEEP_WRITING}"), SOON).unwrap();
    let former = bench.owner();
    bench.lab.kill(&former).unwrap();
    let successor = bench.owner();
    assert_ne!(successor, former);

    // It has gone on once two more rounds are complete: the one in progress, and one after it.
    guest.run(GO_ON, SOON).unwrap_or_else(|error| {
        panic!("{error}\n{} connections, {:#?}{}", relay.forwarded(), bench.disk(), bench.logs())
    });
    assert_eq!(relay.forwarded(), 2, "one connection to each owner");
    let errors = guest.run("dmesg | grep -ciE 'i/o error|ext4-fs (error|warning)' || true", SOON).unwrap();
    assert_eq!(errors, "0\n", "the guest saw an error (P9): {}", guest.console());
    // Its cache is dropped: what is verified comes from the disk.
    guest.run(&format!("{FILL} fill after && echo 3 >/proc/sys/vm/drop_caches"), SOON).unwrap();
    let sums = guest.run(VERIFY, SOON).unwrap();
    guest.kill();

    // A second boot, after the plug was pulled, on a disk that has its replicas again.
    bench.lab.start(&former).unwrap();
    bench.wait_effective();
    let mut guest = boot(&relay);
    guest.run("mount -t ext4 /dev/vda /mnt", SOON).unwrap();
    assert_eq!(guest.run(VERIFY, SOON).unwrap(), sums);
    guest.run("umount /mnt && fsck.ext4 -fn /dev/vda", SOON).unwrap();
}

/// Host and guest die together, and the guest is started again beside the replica.
#[test]
fn a_guest_that_died_with_its_node_finds_its_files_elsewhere() {
    let _turn = alone();
    let mut bench = Bench::up(3, "write-back+1", |_| {});
    let relay = Relay::listen(&bench.directory.path().join("relay"), bench.locate());
    let mut guest = boot_with_files(&relay);
    let former = bench.owner();
    // Not synced: what the filesystem makes of it must be sound, whatever it is.
    guest.run("dd if=/dev/urandom of=/mnt/unsynced bs=64k count=32 2>/dev/null", SOON).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| bench.lab.kill(&former).unwrap());
        guest.kill();
    });
    assert_ne!(bench.owner(), former);
    let mut guest = boot(&relay);
    guest.run("mount -t ext4 /dev/vda /mnt", SOON).unwrap();
    assert_eq!(guest.run(VERIFY, SOON).unwrap(), "1\n");
    guest.run("umount /mnt && fsck.ext4 -fn /dev/vda", SOON).unwrap();
}
