//! The clients that people have, against a whole cluster: libnbd's tools, QEMU's, fio.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::{Bench, DISK, SIZE, alone, program, seed};
use serde_json::Value;
use support::{run, run_in};
use weir_node::api::{CreateDisk, Export, Medium};

fn bench() -> Bench {
    // `common` decides which program that is, and builds it.
    assert!(program().exists());
    Bench::up(3, "write-back+1", |_| {})
}

/// The disk's present address.
fn uri(bench: &Bench) -> String {
    bench.wait(|view| !view.uris.is_empty()).uris.swap_remove(0)
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

/// A file of the disk's size: data of a seed with holes and zeroes between.
fn image(directory: &Path, name: &str, seed: u64) -> PathBuf {
    let path = directory.join(name);
    let file = File::create(&path).unwrap();
    file.set_len(SIZE).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut piece = vec![0; 1 << 20];
    for start in (0..SIZE).step_by(piece.len()) {
        match random.u8(0..4) {
            0 => {}
            1 => file.write_all_at(&vec![0; piece.len()], start).unwrap(),
            _ => {
                random.fill(&mut piece);
                file.write_all_at(&piece, start).unwrap();
            }
        }
    }
    path
}

fn sum(path: &Path) -> String {
    run("sha256sum", [path]).split_whitespace().next().unwrap().to_owned()
}

#[test]
fn libnbd_describes_lists_and_copies() {
    let _turn = alone();
    let bench = bench();
    let client = bench.lab.client("n1").unwrap();
    for (name, size) in [("d2", 1 << 20), ("d3", 3 << 20)] {
        let disk = CreateDisk {
            name: name.into(),
            volume: "pool".into(),
            size,
            logical_block: 4096,
            policy: "write-back+1".into(),
            medium: Medium::Ram,
            limit: None,
        };
        client.create_disk(&disk).unwrap();
        client.export(name, &Export::default()).unwrap();
    }
    let uri = uri(&bench);
    let described = json(&run("nbdinfo", ["--json", &uri]));
    let export = &described["exports"][0];
    assert_eq!(
        (described["protocol"].as_str(), export["export-name"].as_str()),
        (Some("newstyle-fixed"), Some(DISK))
    );
    assert_eq!((export["export-size"].as_u64(), export["is_read_only"].as_bool()), (Some(SIZE), Some(false)));
    for can in ["can_flush", "can_fua", "can_trim", "can_zero", "can_df"] {
        assert_eq!(export[can].as_bool(), Some(true), "{can} in {export}");
    }
    let server = uri.replace(&format!("/{DISK}"), "/");
    let listed = json(&run("nbdinfo", ["--list", "--json", &server]));
    let mut sizes: Vec<_> = listed["exports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|export| (export["export-name"].as_str().unwrap(), export["export-size"].as_u64().unwrap()))
        .collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [(DISK, SIZE), ("d2", 1 << 20), ("d3", 3 << 20)]);

    let directory = bench.directory.path();
    let (source, back) = (image(directory, "source", seed()), directory.join("back"));
    run("nbdcopy", ["--flush".as_ref(), source.as_os_str(), uri.as_ref()]);
    run("nbdcopy", [uri.as_ref(), back.as_os_str()]);
    assert_eq!(sum(&source), sum(&back));
}

/// QEMU's tools write to the disk, before and after the owner is killed.
#[test]
fn qemu_converts_compares_and_maps_across_a_takeover() {
    let _turn = alone();
    let mut bench = bench();
    let uri = uri(&bench);
    let path = image(bench.directory.path(), "source", seed());
    let source = path.to_str().unwrap();
    let raw = ["-f", "raw"];
    run("qemu-img", ["convert", "-n", "-f", "raw", "-O", "raw", "-t", "none", "-T", "none", source, &uri]);
    let compare = |uri: &str| run("qemu-img", ["compare", raw[0], raw[1], "-F", "raw", source, uri]);
    assert_eq!(compare(&uri), "Images are identical.\n");

    let io = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        run("qemu-io", raw.into_iter().chain(["-t", "none"]).chain(commands).chain([uri.as_str()]))
    };
    // Only its output tells whether a pattern was found.
    let said = io(&[
        "write -f -P 0xa5 512 1M",
        "read -P 0xa5 512 1M",
        "write -P 0x5a 3M 8k",
        "write -z 3584k 64k",
        "write -z -u -f 4M 1M",
        "discard 6M 1M",
        "flush",
        "read -P 0 3584k 64k",
        "read -P 0 4M 1M",
        "read -P 0x5a 3M 8k",
        "write -P 0x11 0 512",
        "aio_write -P 0x22 8M 256k",
        "aio_write -P 0x33 9M 256k",
        "aio_flush",
        "read -P 0x11 0 512",
        "read -P 0x22 8M 256k",
        "read -P 0x33 9M 256k",
    ]);
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    assert!(run_differs(source, &uri), "qemu-io has written nothing");
    // The same changes to the file. Discarded ranges may have any content: they are copied.
    run("qemu-img", ["convert", "-f", "raw", "-O", "raw", &uri, source]);
    assert_eq!(compare(&uri), "Images are identical.\n");

    let map = json(&run("qemu-img", ["map", "--output=json", raw[0], raw[1], &uri]));
    let mut at = 0;
    for extent in map.as_array().unwrap() {
        assert_eq!(extent["start"].as_u64(), Some(at), "the map has a gap: {map}");
        at += extent["length"].as_u64().unwrap();
        let zero = extent["zero"].as_bool().unwrap();
        assert!(!zero || reads_zeroes(&path, extent), "{extent} holds data");
    }
    assert_eq!(at, SIZE, "the map ends early");

    let former = bench.owner();
    bench.lab.kill(&former).unwrap();
    assert_ne!(bench.owner(), former);
    let moved = self::uri(&bench);
    assert_ne!(moved, uri);
    assert_eq!(compare(&moved), "Images are identical.\n", "after the takeover{}", bench.logs());
}

fn run_differs(source: &str, uri: &str) -> bool {
    let status = std::process::Command::new("qemu-img")
        .args(["compare", "-q", "-f", "raw", "-F", "raw", source, uri])
        .status()
        .unwrap();
    // 0: the same; 1: different; more: it failed.
    status.code() == Some(1)
}

fn reads_zeroes(path: &Path, extent: &Value) -> bool {
    let mut data = vec![0; extent["length"].as_u64().unwrap() as usize];
    File::open(path).unwrap().read_exact_at(&mut data, extent["start"].as_u64().unwrap()).unwrap();
    data.iter().all(|&byte| byte == 0)
}

#[test]
fn fio_verifies_what_it_wrote() {
    let _turn = alone();
    let bench = bench();
    let uri = format!("--uri={}", uri(&bench));
    let text = run_in(
        bench.directory.path(),
        "fio",
        [
            "--name=verified",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=512-1M",
            "--iodepth=32",
            // Connections of their own, each with its own part of the disk.
            "--numjobs=3",
            "--thread",
            "--size=8M",
            "--offset_increment=8M",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--group_reporting",
            "--output-format=json",
        ],
    );
    // fio says things before its JSON.
    let report = json(&text[text.find('{').unwrap()..]);
    let job = &report["jobs"][0];
    assert_eq!((job["error"].as_u64(), report["jobs"].as_array().unwrap().len()), (Some(0), 1));
    let bytes = |kind: &str| job[kind]["io_bytes"].as_u64().unwrap();
    assert_eq!((bytes("write"), bytes("read")), (24 << 20, 24 << 20), "all is written, all is verified");
}
