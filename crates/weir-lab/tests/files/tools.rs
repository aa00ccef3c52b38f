//! The programs that people have.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;

use weir_block::Nanos;

use super::{alone, bench, open, path};
use crate::common::lun::LunBench;
use crate::common::{Bench, DISK, SIZE, SOON, seed};
use crate::support::{await_some, run, run_in};

/// fio writes everything once, in random order, and reads it back: by asynchronous direct I/O of a deep queue, and through plain calls with
/// fsync.
fn fio_verifies(bench: &Bench, node: &str) {
    let file = path(bench, node, DISK);
    drop(open(bench, node, true));
    let target = format!("--filename={}", file.display());
    let common = [
        "--name=verify",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--allow_file_create=0",
        "--minimal",
        &target,
    ];
    let direct =
        ["--ioengine=libaio", "--direct=1", "--iodepth=32", "--rw=randwrite", "--bs=4k", "--size=32m"];
    let buffered = [
        "--ioengine=psync",
        "--direct=0",
        "--fsync=32",
        "--rw=randwrite",
        "--bssplit=1k/40:16k/40:512k/20",
        "--size=16m",
    ];
    for way in [direct, buffered] {
        run_in(bench.directory.path(), "fio", common.iter().chain(&way));
    }
}

#[test]
fn fio_verifies_what_it_wrote_in_both_ways() {
    let _turn = alone();
    fio_verifies(&bench(2, "write-back+1"), "n1");
}

/// On the coordinator, and then on another node. Under write-through fio's requests take the disk's own ways to the LUN.
#[test]
fn fio_verifies_what_it_wrote_on_a_lun() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |config| config.fuse = true);
    let (coordinator, client) = (pool.coordinator(), pool.bench.lab.any_client().unwrap());
    let other = pool.bench.lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != coordinator);
    for owner in [coordinator, other.unwrap()] {
        client.move_disk(DISK, &owner).unwrap();
        fio_verifies(&pool.bench, &owner);
        let route = client.disk(DISK).unwrap().detail.unwrap().route.unwrap();
        assert!(route.direct > 0, "{owner}: {route:?}");
    }
}

/// What fsx does at the file of a disk. Its size stays, and shared mappings are refused; everything else that a Linux kernel has is there.
const FSX: &str = "
blockmode = true
flen = 1048576
opsize.max = 196608
[weights]
read = 30
write = 30
sendfile = 10
copy_file_range = 10
punch_hole = 8
posix_fadvise = 2
fsync = 1
fdatasync = 1
mapread = 0
mapwrite = 0
invalidate = 0
truncate = 0
";

/// `WEIR_FSX` operations under each policy.
#[test]
#[ignore = "needs fsx: make fsx"]
fn fsx_reads_what_it_wrote() {
    let _turn = alone();
    let operations = std::env::var("WEIR_FSX").unwrap_or_else(|_| "10000".to_owned());
    let seed = seed().to_string();
    for policy in ["write-back+0", "write-through"] {
        let bench = bench(1, policy);
        drop(open(&bench, "n1", false));
        let settings = bench.directory.path().join("fsx.toml");
        std::fs::write(&settings, FSX).unwrap();
        let began = Nanos::now();
        let common = ["-P", ".", "-N", &operations, "-S", &seed, "-f"].map(OsStr::new);
        let file = path(&bench, "n1", DISK);
        run_in(
            bench.directory.path(),
            "fsx",
            common.into_iter().chain([settings.as_os_str(), file.as_os_str()]),
        );
        eprintln!("{operations} operations under {policy} in {:?}", Nanos::now() - began);
    }
}

/// A raw image, and a qcow2 image whose metadata QEMU checks, in the file itself.
#[test]
fn qemu_keeps_images_there() {
    let _turn = alone();
    let bench = bench(1, "write-back+0");
    drop(open(&bench, "n1", true));
    let file = path(&bench, "n1", DISK);
    let file = file.to_str().unwrap();
    let source = bench.directory.path().join("source");
    let written = File::create(&source).unwrap();
    written.set_len(SIZE).unwrap();
    let mut random = fastrand::Rng::with_seed(seed());
    let mut piece = vec![0; 1 << 20];
    for at in (0..SIZE).step_by(4 << 20) {
        random.fill(&mut piece);
        written.write_all_at(&piece, at).unwrap();
    }
    let source = source.to_str().unwrap();
    run("qemu-img", ["convert", "-n", "-f", "raw", "-O", "raw", "-t", "none", source, file]);
    let same = ["compare", "-f", "raw", "-F", "raw", "-T", "none", source, file];
    assert_eq!(run("qemu-img", same), "Images are identical.\n");

    let image = bench.directory.path().join("image");
    let image = image.to_str().unwrap();
    run("qemu-img", ["create", "-q", "-f", "qcow2", image, "24M"]);
    let pattern = ["-c", "write -P 0x51 0 1M", "-c", "write -P 0x52 9M 64k"];
    run("qemu-io", ["-f", "qcow2"].into_iter().chain(pattern).chain([image]));
    run("dd", [&format!("if={image}"), &format!("of={file}"), "bs=64k", "conv=notrunc,fsync", "status=none"]);
    run("qemu-img", ["check", "-q", "-f", "qcow2", file]);
    let more = ["-c", "write -P 0x53 17M 2M", "-c", "discard 256k 256k", "-c", "flush"];
    run("qemu-io", ["-f", "qcow2", "-t", "none", "-d", "unmap"].into_iter().chain(more).chain([file]));
    run("qemu-img", ["check", "-q", "-f", "qcow2", file]);
    // Only its output tells whether a pattern was found.
    let reads = [
        "-c",
        "read -P 0x51 512k 512k",
        "-c",
        "read -P 0x52 9M 64k",
        "-c",
        "read -P 0x53 17M 2M",
        "-c",
        "read -P 0 256k 256k",
    ];
    let said = run("qemu-io", ["-f", "qcow2", "-t", "none"].into_iter().chain(reads).chain([file]));
    assert!(!said.contains("Pattern verification failed") && said.matches("read ").count() == 4, "{said}");
}

/// The file and an NBD client see the same disk: nothing is cached in between.
#[test]
fn a_file_and_an_nbd_client_see_each_others_writes() {
    let _turn = alone();
    let bench = bench(1, "write-back+0");
    let file = open(&bench, "n1", false);
    let uri = bench.wait(|view| !view.uris.is_empty()).uris.swap_remove(0);
    let io = |command: &str| run("qemu-io", ["-f", "raw", "-t", "none", "-c", command, &uri]);
    let mut data = [0; 4096];
    for value in 1..6_u8 {
        io(&format!("write -P {value} 64k 4k"));
        file.read_exact_at(&mut data, 64 << 10).unwrap();
        assert_eq!(data, [value; 4096]);
        file.write_all_at(&[value + 100; 1000], (64 << 10) + 10).unwrap();
        let said = io(&format!("read -P {} {} 1000", value + 100, (64 << 10) + 10));
        assert!(!said.contains("Pattern verification failed"), "{said}");
    }
    drop(file);
    let none = || (bench.disk()?.detail?.clients == 0).then_some(());
    await_some(SOON, none, || "a client is left that has the file open".to_owned());
}
