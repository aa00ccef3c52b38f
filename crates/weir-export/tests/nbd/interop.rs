//! Real clients: their view of the export, and a comparison of the data that they write and read.

use std::sync::atomic::Ordering;

use crate::support::{Server, ServerConfig, memory_file, python, run, run_ok, scratch};

const MIB: u64 = 1 << 20;

fn server(size: u64) -> Server {
    Server::start(ServerConfig::one(size))
}

fn memory_directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// A file of random bytes with holes in it.
fn sparse_image(path: &std::path::Path, size: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(size).unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut chunk = vec![0; 300 << 10];
    for at in (0..size - MIB).step_by(2 * MIB as usize) {
        random.fill(&mut chunk);
        file.write_all_at(&chunk, at + random.u64(0..1000) * 512).unwrap();
    }
}

#[test]
fn nbdinfo_tells_what_the_export_can_do() {
    let server = server(64 * MIB);
    for uri in [server.unix_uri("disk"), server.tcp_uri("disk"), server.unix_uri("")] {
        let printed = run_ok("nbdinfo", &["--json", &uri]);
        let told: serde_json::Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(told["protocol"], "newstyle-fixed");
        assert_eq!(told["structured"], true);
        let export = &told["exports"][0];
        assert_eq!(export["export-size"], 64 * MIB);
        assert_eq!(export["description"], "test disk disk");
        assert_eq!(export["block_size_minimum"], 512);
        assert_eq!(export["block_size_preferred"], 4096);
        assert_eq!(export["block_size_maximum"], 32 * MIB);
        assert_eq!(export["is_read_only"], false);
        for can in ["flush", "fua", "trim", "zero", "fast_zero", "df", "cache", "multi_conn"] {
            assert_eq!(export[format!("can_{can}")], true, "{can}: {export}");
        }
        assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
    }
}

#[test]
fn several_exports_are_listed_and_an_unknown_one_says_where_it_is() {
    let mut config = ServerConfig::one(8 * MIB);
    for name in ["second", "größe"] {
        let (_, _, mut info) = ServerConfig::one(16 * MIB).disks.remove(0);
        info.writable = name != "second";
        config.disks.push((name.into(), memory_file(), info));
    }
    let server = Server::start(config);
    let printed = run_ok("nbdinfo", &["--list", "--json", &server.unix_uri("")]);
    let told: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let names: Vec<_> =
        told["exports"].as_array().unwrap().iter().map(|e| e["export-name"].as_str().unwrap()).collect();
    assert_eq!(names, ["disk", "second", "größe"]);
    assert_eq!(told["exports"][1]["is_read_only"], true);

    let refused = run("qemu-img", &["info", "-f", "raw", &server.unix_uri("elsewhere")]);
    assert!(!refused.status.success());
    let complaint = String::from_utf8_lossy(&refused.stderr);
    assert!(complaint.contains("it is on node b"), "{complaint}");

    let printed = run("qemu-io", &["-f", "raw", "-c", "write 0 4k", &server.unix_uri("second")]);
    assert!(!printed.status.success(), "a read-only export takes no writes");
}

#[test]
fn nbdcopy_in_and_out_keeps_every_byte() {
    let server = server(64 * MIB);
    let directory = memory_directory();
    let (source, source_name) = scratch(&directory, "in");
    let (target, target_name) = scratch(&directory, "out");
    sparse_image(&source, 64 * MIB);
    for uri in [server.unix_uri("disk"), server.tcp_uri("disk")] {
        run_ok("nbdcopy", &["--flush", &source_name, &uri]);
        run_ok("nbdcopy", &[&uri, &target_name]);
        assert!(
            std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap(),
            "bytes differ after {uri}"
        );
        std::fs::remove_file(&target).unwrap();
    }
    assert!(server.knobs().flushes.load(Ordering::Relaxed) > 0);
    let map = run_ok("nbdinfo", &["--map", &server.unix_uri("disk")]);
    assert!(map.contains("hole,zero") && map.contains("data"), "{map}");
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    let server = server(64 * MIB);
    let uri = server.unix_uri("disk");
    let directory = memory_directory();
    let (source, source_name) = scratch(&directory, "in");
    let (_, back) = scratch(&directory, "back");
    sparse_image(&source, 64 * MIB);
    run_ok("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &source_name, &uri]);
    let verdict = run_ok("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source_name, &uri]);
    assert!(verdict.contains("identical"), "{verdict}");
    run_ok("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, &back]);
    run_ok("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source_name, &back]);
    let map = run_ok("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let extents = map.as_array().unwrap();
    let mapped: u64 = extents.iter().map(|extent| extent["length"].as_u64().unwrap()).sum();
    assert_eq!(mapped, 64 * MIB);
    assert!(extents.iter().any(|e| e["zero"] == true) && extents.iter().any(|e| e["data"] == true));
}

#[test]
fn qemu_io_zeroes_discards_and_forces() {
    let server = server(16 * MIB);
    let uri = server.unix_uri("disk");
    let script = [
        "-c",
        "write -P 0xab 0 4M",
        "-c",
        "write -f -P 0xcd 1M 64k",
        "-c",
        "read -P 0xcd 1M 64k",
        "-c",
        "write -z 2M 1M",
        "-c",
        "read -P 0 2M 1M",
        "-c",
        "write -z -u 3M 512k",
        "-c",
        "read -P 0 3M 512k",
        "-c",
        "discard 0 512k",
        "-c",
        "read -P 0 0 512k",
        "-c",
        "flush",
        "-c",
        "read -P 0xab 512k 512k",
        "-c",
        "write -P 0x11 15M 1M",
        "-c",
        "read -P 0x11 15M 1M",
    ];
    let mut arguments = vec!["-f", "raw", "-t", "writeback"];
    arguments.extend_from_slice(&script);
    arguments.push(&uri);
    let printed = run_ok("qemu-io", &arguments);
    assert!(!printed.contains("Pattern verification failed"), "{printed}");
    assert!(server.knobs().fua.load(Ordering::Relaxed) >= 1, "FUA reaches the layer");
    assert!(server.knobs().flushes.load(Ordering::Relaxed) >= 1, "flush reaches the layer");
}

#[test]
fn fio_verifies_what_it_wrote_over_several_connections() {
    let server = server(64 * MIB);
    server.knobs().reversed.store(true, Ordering::Relaxed);
    for uri in [server.unix_uri("disk"), server.tcp_uri("disk")] {
        let printed = run_ok(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &format!("--uri={uri}"),
                "--rw=randwrite",
                "--bsrange=512-1M",
                "--blockalign=512",
                "--iodepth=32",
                "--numjobs=4",
                "--size=16M",
                "--offset_increment=16M",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--do_verify=1",
                "--verify_state_save=0",
                "--randseed=11",
                "--group_reporting",
                "--output-format=json",
            ],
        );
        let told: serde_json::Value = serde_json::from_str(&printed[printed.find('{').unwrap()..]).unwrap();
        let job = &told["jobs"][0];
        assert_eq!(job["error"], 0);
        assert_eq!(job["write"]["io_bytes"], 64 * MIB);
        assert_eq!(job["read"]["io_bytes"], 64 * MIB, "everything was verified");
    }
    let meter = server.look().meter;
    assert_eq!(meter.in_flight(), 0);
}

#[test]
fn the_old_way_in_works_too() {
    let server = server(4 * MIB);
    let script = "
import nbd, sys
def client(**settings):
    h = nbd.NBD()
    for name, value in settings.items():
        getattr(h, 'set_' + name)(value)
    return h
# EXPORT_NAME with and without the padding; simple replies.
for flags in (nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE | nbd.HANDSHAKE_FLAG_NO_ZEROES, nbd.HANDSHAKE_FLAG_NO_ZEROES, 0):
    h = client(handshake_flags=flags, request_structured_replies=False)
    h.connect_uri(sys.argv[1])
    assert h.get_size() == 4 << 20
    assert not h.get_structured_replies_negotiated()
    h.pwrite(b'old' * 512, 512, nbd.CMD_FLAG_FUA)
    assert h.pread(1536, 512) == b'old' * 512
    h.shutdown()
# Structured replies in pieces.
h = client()
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(sys.argv[1])
assert h.get_structured_replies_negotiated()
pieces = []
h.pread_structured(4096, 0, lambda data, offset, status, error: pieces.append((offset, len(data), status)), nbd.CMD_FLAG_DF)
assert pieces == [(0, 4096, nbd.READ_DATA)], pieces
extents = []
h.block_status(4 << 20, 0, lambda context, offset, entries, error: extents.append((context, offset, list(entries))))
assert extents == [('base:allocation', 0, [4096, 0, (4 << 20) - 4096, 3])], extents
extents.clear()
h.block_status(4 << 20, 0, lambda context, offset, entries, error: extents.append(list(entries)), nbd.CMD_FLAG_REQ_ONE)
assert extents == [[4096, 0]], extents
h.cache(65536, 0)
h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
assert h.pread(4096, 0) == bytes(4096)
h.trim(4096, 0, nbd.CMD_FLAG_FUA)
h.flush()
h.shutdown()
# Options one by one.
h = client(opt_mode=True)
h.connect_unix(sys.argv[2])
found = []
h.opt_list(lambda name, description: found.append((name, description)))
assert found == [('disk', 'test disk disk')], found
contexts = []
h.set_export_name('disk')
h.opt_list_meta_context(lambda name: contexts.append(name))
assert contexts == ['base:allocation'], contexts
h.opt_info()
assert h.get_canonical_export_name() == 'disk' if h.set_full_info(True) else True
h.opt_abort()
print('fine')
";
    let socket = server.socket().to_str().unwrap().to_owned();
    assert_eq!(python(script, &[&server.unix_uri("disk"), &socket]).trim(), "fine");
}
