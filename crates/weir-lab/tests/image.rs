//! `weir image`: disks from image files and image files from disks have the same content, as qemu-img compares them, and nothing is left of
//! an import that fails.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use common::lun::{LunBench, run};
use common::{DISK, SOON, alone, program};
use support::await_some;
use support::filesystem::SmallFilesystem;
use weir_block::Nanos;
use weir_lab::{Lab, LabConfig};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{ApiErrorKind, CloneDisk, CreateVolume, Delete, Export, Medium};

const MIB: u64 = 1 << 20;
/// No multiple of 4096: the last sector counts, too.
const IMAGE: u64 = 24 * MIB + 512;

/// An image with three pieces of data in it, the last one at its end.
fn raw_image(directory: &Path) -> PathBuf {
    let path = directory.join("image.raw");
    let file = File::create(&path).unwrap();
    file.set_len(IMAGE).unwrap();
    file.write_all_at(&vec![0x11; MIB as usize], 0).unwrap();
    file.write_all_at(&vec![0x22; MIB as usize], 10 * MIB).unwrap();
    file.write_all_at(&[0x33; 512], IMAGE - 512).unwrap();
    path
}

fn weir(lab: &Lab, arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("--lab").arg(lab.dir()).args(["--output", "json"]).args(arguments).stdin(Stdio::null());
    command
}

fn ok(lab: &Lab, arguments: &[&str]) -> serde_json::Value {
    let output = weir(lab, arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn fails(lab: &Lab, arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = weir(lab, arguments).output().unwrap();
    assert!(!status.success(), "{arguments:?}");
    String::from_utf8(stderr).unwrap()
}

fn uri(lab: &Lab, disk: &str) -> String {
    lab.any_client().unwrap().export(disk, &Export::default()).unwrap().uris[0].clone()
}

/// Whether two images have the same content; what one has behind the other's end is zeroes.
fn are_equal(first: (&str, &str), second: (&str, &str)) {
    run(Command::new("qemu-img").args(["compare", "-f", first.0, "-F", second.0, first.1, second.1]));
}

fn as_qcow2(raw: &Path) -> PathBuf {
    let path = raw.with_extension("qcow2");
    run(Command::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).arg(raw).arg(&path));
    path
}

/// An image of 16 MiB whose clusters are compressed, with some that cannot be decompressed in its second half.
fn compressed_and_damaged(directory: &Path) -> PathBuf {
    let (raw, image) = (directory.join("digits.raw"), directory.join("digits.qcow2"));
    let mut random = fastrand::Rng::with_seed(1);
    let digits: Vec<u8> = std::iter::repeat_with(|| random.u8(b'0'..=b'9')).take(16 << 20).collect();
    std::fs::write(&raw, digits).unwrap();
    run(Command::new("qemu-img").args(["convert", "-c", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&image));
    let file = File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[0xff; 512 << 10], file.metadata().unwrap().len() / 2).unwrap();
    image
}

/// The text of the event that tells the end of a disk.
fn deletion_of(lab: &Lab, name: &str) -> String {
    let ends = || {
        let events = lab.any_client().unwrap().events().unwrap().into_iter();
        let mut ends = events.filter(|event| event.kind == "disk-deleted" && event.subject == name);
        ends.next().map(|event| event.text)
    };
    await_some(SOON, ends, || format!("no event reports the deletion of {name}"))
}

fn goes_in_and_out(lab: &Lab, directory: &Path) {
    let client = lab.any_client().unwrap();
    let raw = raw_image(directory);
    let qcow2 = as_qcow2(&raw);
    let (raw, qcow2) = (raw.to_str().unwrap(), qcow2.to_str().unwrap());
    for (name, image, format) in [("from-raw", raw, "raw"), ("from-qcow2", qcow2, "qcow2")] {
        let made = ok(lab, &["image", "import", image, name, "--volume", "pool", "--policy", "write-back+0"]);
        assert_eq!((&made["schema"], &made["name"]), (&"weir.disk/2".into(), &name.into()));
        assert_eq!(client.disk(name).unwrap().size, IMAGE.next_multiple_of(4096));
        are_equal((format, image), ("raw", &uri(lab, name)));
    }
    let error = fails(lab, &["image", "import", raw, "from-raw", "--volume", "pool"]);
    assert!(error.contains("there is a disk from-raw already"), "{error}");
    are_equal(("raw", raw), ("raw", &uri(lab, "from-raw")));

    // A snapshot, while the disk's guest writes something else.
    client.create_snapshot("from-qcow2", "s", &[]).unwrap();
    let address: Uri = uri(lab, "from-qcow2").parse().unwrap();
    let mut guest = NbdClient::connect(&address).unwrap();
    guest.write(0, &[0x77; 4096], true).unwrap();
    let file = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    let (snapshot, now) = (file("snapshot.qcow2"), file("now.img"));
    let written = ok(lab, &["image", "export", "from-qcow2@s", &snapshot]);
    assert_eq!((&written["schema"], &written["format"]), (&"weir.image/1".into(), &"qcow2".into()));
    are_equal(("qcow2", &snapshot), ("raw", raw));
    ok(lab, &["disk", "clone", "from-qcow2@s", "copy", "--copy", "--policy", "write-back+0"]);
    are_equal(("raw", &uri(lab, "copy")), ("raw", raw));
    ok(lab, &["image", "export", "from-qcow2", &now]);
    are_equal(("raw", &now), ("raw", &uri(lab, "from-qcow2")));
    let head = std::fs::read(&now).unwrap()[..4096].to_vec();
    assert!(head.iter().all(|byte| *byte == 0x77));
    let taken = fails(lab, &["image", "export", "from-qcow2", &now]);
    assert!(taken.contains("exists already"), "{taken}");
    let absent = fails(lab, &["image", "export", "from-qcow2@none", &file("none.img")]);
    assert!(absent.contains("no snapshot none"), "{absent}");
    // Nothing else is left, here and there.
    let disks: Vec<String> = client.disks().unwrap().into_iter().map(|disk| disk.name).collect();
    assert!(disks.iter().all(|name| !name.starts_with("export-")), "{disks:?}");
    let files = std::fs::read_dir(directory).unwrap();
    let files: Vec<String> = files.map(|one| one.unwrap().file_name().into_string().unwrap()).collect();
    assert!(files.iter().all(|name| !name.contains(".part") && name != "none.img"), "{files:?}");
    let snapshots = client.snapshots("from-qcow2").unwrap();
    assert_eq!(snapshots.len(), 1, "{snapshots:?}");
}

fn leaves_nothing_when_it_fails(lab: &Lab, directory: &Path) {
    let is_gone = |name: &str| {
        let error = lab.any_client().unwrap().disk(name).unwrap_err();
        assert_eq!(error.kind, ApiErrorKind::NotFound, "{error:?}");
    };
    // Its tables are not where its header says.
    let broken = as_qcow2(&raw_image(directory)).with_file_name("broken.qcow2");
    std::fs::copy(directory.join("image.qcow2"), &broken).unwrap();
    File::options().write(true).open(&broken).unwrap().write_all_at(&[0xff; 8], 40).unwrap();
    let error = fails(lab, &["image", "import", broken.to_str().unwrap(), "broken", "--volume", "pool"]);
    assert!(error.contains("is damaged"), "{error}");
    is_gone("broken");
    // A download that was cut off. qemu-img alone would take it, with zeroes in place of what is missing.
    let cut_off = broken.with_file_name("cut-off.qcow2");
    std::fs::copy(directory.join("image.qcow2"), &cut_off).unwrap();
    let file = File::options().write(true).open(&cut_off).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let error = fails(lab, &["image", "import", cut_off.to_str().unwrap(), "cut-off", "--volume", "pool"]);
    assert!(error.contains("a part of it is missing"), "{error}");
    is_gone("cut-off");
    // The check finds nothing, because the tables are right, and then data cannot be read.
    let unreadable = compressed_and_damaged(directory);
    let unreadable = unreadable.to_str().unwrap();
    let error = fails(lab, &["image", "import", unreadable, "unreadable", "--volume", "pool"]);
    assert!(error.contains("error while reading") && error.contains("removed again"), "{error}");
    is_gone("unreadable");
    // No client was told that this data is safe.
    let told = deletion_of(lab, "unreadable");
    assert!(!told.contains("lost"), "{told}");

    // A guest has written the header of an image that names another file.
    let hostile = directory.join("hostile.raw");
    let base = directory.join("image.raw");
    let made = directory.join("hostile.qcow2");
    run(Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .arg(&base)
        .arg(&made));
    std::fs::rename(&made, &hostile).unwrap();
    let arguments = ["image", "import", hostile.to_str().unwrap(), "hostile", "--volume", "pool"];
    assert!(fails(lab, &arguments).contains("begins as qcow2 does"));
    let named = [&arguments[..], &["--format", "qcow2"]].concat();
    assert!(fails(lab, &named).contains("it has a backing file"));
    is_gone("hostile");
    ok(lab, &[&arguments[..], &["--format", "raw"]].concat());
    are_equal(("raw", hostile.to_str().unwrap()), ("raw", &uri(lab, "hostile")));

    // Ctrl-C in the middle.
    let image = base.to_str().unwrap();
    let slow = ["image", "import", image, "slow", "--volume", "pool", "--bytes-per-second", "128KiB"];
    let mut importing = weir(lab, &slow).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Nanos::now() + SOON;
    let clients = || lab.any_client().unwrap().disk("slow").ok()?.detail.map(|detail| detail.clients);
    while clients().is_none_or(|count| count == 0) {
        assert!(Nanos::now() < deadline && importing.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(20));
    }
    let process = rustix::process::Pid::from_child(&importing);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    let output = importing.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("interrupted"), "{said}");
    is_gone("slow");
}

#[test]
fn on_a_lun() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-back+0", |_| {});
    let directory = tempfile::tempdir().unwrap();
    goes_in_and_out(&pool.bench.lab, directory.path());
    leaves_nothing_when_it_fails(&pool.bench.lab, directory.path());
}

#[test]
fn in_a_directory_holes_stay_holes() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount_xfs(512 << 20);
    let directory = tempfile::tempdir().unwrap();
    let mut config = LabConfig::new(directory.path().join("lab"), program());
    config.nodes = 2;
    let lab = Lab::up(&config).unwrap();
    lab.any_client().unwrap().create_volume(&CreateVolume::dir("pool", filesystem.path())).unwrap();
    let files = tempfile::tempdir().unwrap();
    goes_in_and_out(&lab, files.path());
    let allocated = std::fs::metadata(filesystem.path().join("from-raw.raw")).unwrap().blocks() * 512;
    assert!((2 * MIB..4 * MIB).contains(&allocated), "{allocated}");
    drop(lab);
}

/// Without reflinks there is no copy at one point in time: only a disk that nobody uses is written.
#[test]
fn without_reflinks_a_disk_in_use_is_not_written() {
    let _turn = alone();
    let pool = LunBench::up(2, "ext4", "write-back+0", |_| {});
    let (lab, directory) = (&pool.bench.lab, tempfile::tempdir().unwrap());
    let raw = raw_image(directory.path());
    ok(
        lab,
        &["image", "import", raw.to_str().unwrap(), "d", "--volume", "pool", "--policy", "write-through"],
    );
    let address: Uri = uri(lab, "d").parse().unwrap();
    let guest = NbdClient::connect(&address).unwrap();
    let file = directory.path().join("out.img");
    let refused = fails(lab, &["image", "export", "d", file.to_str().unwrap()]);
    assert!(refused.contains("is in use, and cannot be cloned"), "{refused}");
    guest.disconnect();
    let deadline = Nanos::now() + SOON;
    while !weir(lab, &["image", "export", "d", file.to_str().unwrap()]).output().unwrap().status.success() {
        assert!(Nanos::now() < deadline);
        thread::sleep(Duration::from_millis(50));
    }
    are_equal(("raw", file.to_str().unwrap()), ("raw", raw.to_str().unwrap()));
    // Its guest is started while it is read.
    ok(lab, &["disk", "limit", "d", "--bytes-per-second", "512KiB"]);
    let torn = directory.path().join("torn.img");
    for arguments in [
        &["image", "export", "d", torn.to_str().unwrap()][..],
        &["disk", "clone", "d", "torn", "--copy", "--policy", "write-through"],
    ] {
        let mut reading = weir(lab, arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let clients = || lab.any_client().unwrap().disk("d").ok()?.detail.map(|detail| detail.clients);
        let deadline = Nanos::now() + SOON;
        while clients().is_none_or(|count| count == 0) {
            assert!(Nanos::now() < deadline && reading.try_wait().unwrap().is_none());
            thread::sleep(Duration::from_millis(20));
        }
        let guest = NbdClient::connect(&address).unwrap();
        let output = reading.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("has been used while it was read"), "{said}");
        guest.disconnect();
        let deadline = Nanos::now() + SOON;
        while clients().is_none_or(|count| count > 0) {
            assert!(Nanos::now() < deadline);
            thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(!torn.exists());
    let absent = lab.any_client().unwrap().disk("torn").unwrap_err();
    assert_eq!(absent.kind, ApiErrorKind::NotFound, "{absent}");
    ok(lab, &["disk", "limit", "d", "--none"]);
    let clone = fails(lab, &["disk", "clone", "d", "c"]);
    assert!(clone.contains("has no reflinks") && clone.contains("--copy"), "{clone}");
    ok(lab, &["disk", "clone", "d", "c", "--copy", "--policy", "write-through"]);
    are_equal(("raw", &uri(lab, "c")), ("raw", raw.to_str().unwrap()));
    pool.bench.lab.any_client().unwrap().delete(DISK, &Delete { force: true, ..Delete::default() }).unwrap();
}

/// An import that writes slowly, once it writes.
fn import_slowly(lab: &Lab, image: &Path, name: &str) -> Child {
    let image = image.to_str().unwrap();
    let slow = ["image", "import", image, name, "--volume", "pool", "--bytes-per-second", "128KiB"];
    let mut importing = weir(lab, &slow).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let clients = || lab.any_client().unwrap().disk(name).ok()?.detail.map(|detail| detail.clients);
    let deadline = Nanos::now() + SOON;
    while clients().is_none_or(|count| count == 0) {
        assert!(Nanos::now() < deadline && importing.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(20));
    }
    importing
}

/// A disk whose import is not complete is nobody's, whichever way it is asked for.
fn is_refused(lab: &Lab, name: &str) {
    let client = lab.any_client().unwrap();
    let clone = CloneDisk {
        name: "clone".into(),
        snapshot: None,
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    let refusals = [
        client.export(name, &Export::default()).map(drop),
        client.create_snapshot(name, "s", &[]).map(drop),
        client.clone_disk(name, &clone).map(drop),
        client.follow(name, Some("n2")).map(drop),
        client.move_disk(name, "n2").map(drop),
    ];
    for refused in refusals {
        let refused = refused.unwrap_err();
        let hint = &refused.hint;
        assert!(
            refused.message.contains("is incomplete") && hint.contains("weir disk delete"),
            "{refused:?}"
        );
    }
    let view = client.disk(name).unwrap();
    if let Some(address) = view.uris.first() {
        let address: Uri = address.parse().unwrap();
        for export in [name.to_owned(), format!("{name}~import-0000000000000000"), format!("{name}~import-7")]
        {
            let refused = NbdClient::connect(&Uri { export, ..address.clone() }).map(drop).unwrap_err();
            assert!(refused.to_string().contains("incomplete"), "{refused}");
        }
    }
    for node in lab.nodes() {
        let file = lab.dir().join(&node.name).join("files/pool").join(format!("{name}.raw"));
        let refused = File::open(&file).unwrap_err();
        // The mount of a node that was killed.
        let reason = if node.process.is_some() { libc::EBUSY } else { libc::ENOTCONN };
        assert_eq!(refused.raw_os_error(), Some(reason), "{}: {refused}", file.display());
    }
    let listed = Command::new(program()).arg("--lab").arg(lab.dir()).args(["disk", "list"]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let line = listed.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(line.contains("importing"), "{listed}");
}

/// The import is gone, with its qemu-img.
fn await_abandoned(lab: &Lab, name: &str) {
    let deadline = Nanos::now() + SOON;
    loop {
        let view = lab.any_client().unwrap().disk(name).unwrap();
        if view.state == "importing" && view.reason.contains("weir disk delete") {
            let health = lab.any_client().unwrap().status().unwrap().health.to_string();
            assert!(health.contains("is incomplete"), "{health}");
            return;
        }
        assert!(Nanos::now() < deadline, "{view:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Its disk is deleted meanwhile, and there is another one of the name: what the import cleans up is not that one.
#[test]
fn an_import_that_ends_late_removes_no_other_disk() {
    let _turn = alone();
    let pool = LunBench::up(1, "xfs", "write-back+0", |_| {});
    let (lab, directory) = (&pool.bench.lab, tempfile::tempdir().unwrap());
    let image = directory.path().join("image.raw");
    std::fs::write(&image, vec![7; 8 << 20]).unwrap();
    let mut import = import_slowly(lab, &image, "golden");
    let process = rustix::process::Pid::from_child(&import);
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    let client = lab.any_client().unwrap();
    client.delete("golden", &Delete { force: true, ..Delete::default() }).unwrap();
    pool.bench.create_with_blocks("golden", "write-through", 4096);
    client.export("golden", &Export::default()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::CONT).unwrap();
    assert!(!import.wait().unwrap().success());
    let view = client.disk("golden").unwrap();
    assert_eq!(view.state, "serving", "{view:?}");
}

/// kill -9 of the import, and of the disk's owner with it.
#[test]
fn an_import_that_is_cut_off_leaves_no_disk_that_looks_whole() {
    let _turn = alone();
    let mut pool = LunBench::up(3, "xfs", "write-back+0", |config| config.fuse = true);
    let directory = tempfile::tempdir().unwrap();
    let image = raw_image(directory.path());
    let mut away = None;
    // The owner: lives on, comes back, stays away.
    for (owner_dies, returns) in [(false, true), (true, true), (true, false)] {
        let mut import = import_slowly(&pool.bench.lab, &image, "cut");
        let running = pool.bench.lab.any_client().unwrap().disk("cut").unwrap();
        assert_eq!((running.state.as_str(), running.reason.as_str()), ("importing", ""));
        is_refused(&pool.bench.lab, "cut");
        import.kill().unwrap();
        import.wait().unwrap();
        if owner_dies {
            let owner = running.owner.unwrap();
            match returns {
                true => drop(pool.crash(&owner)),
                false => pool.bench.lab.kill(&owner).unwrap(),
            }
            let deadline = Nanos::now() + SOON * 2;
            let taken = || {
                let view = pool.bench.disk_named("cut")?;
                view.owner.filter(|now| *now != owner)
            };
            while taken().is_none() {
                assert!(Nanos::now() < deadline, "{}", pool.bench.logs());
                thread::sleep(Duration::from_millis(50));
            }
            pool.coordinator();
            if returns {
                pool.bench.lab.start(&owner).unwrap();
            }
            away = Some(owner).filter(|_| !returns);
        }
        await_abandoned(&pool.bench.lab, "cut");
        is_refused(&pool.bench.lab, "cut");
        let deadline = Nanos::now() + SOON * 2;
        // Without force: nobody uses it. A former owner keeps it for a while.
        while pool.bench.lab.any_client().unwrap().delete("cut", &Delete::default()).is_err() {
            assert!(Nanos::now() < deadline, "{}", pool.bench.logs());
            thread::sleep(Duration::from_millis(100));
        }
        if let Some(owner) = away.take() {
            pool.bench.lab.start(&owner).unwrap();
        }
    }
    let (lab, raw) = (&pool.bench.lab, image.to_str().unwrap());
    ok(lab, &["image", "import", raw, "cut", "--volume", "pool"]);
    let whole = lab.any_client().unwrap().disk("cut").unwrap();
    assert_eq!(whole.state, "serving", "{whole:?}");
    are_equal(("raw", raw), ("raw", &uri(lab, "cut")));
    lab.any_client().unwrap().create_snapshot("cut", "s", &[]).unwrap();
}

/// It is refused at once with the figures, and not when the volume is full. What is a hole needs nothing.
#[test]
fn what_does_not_fit_is_refused_before_it_begins() {
    const LARGE: u64 = 320 * MIB;
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let lab = &pool.bench.lab;
    // On a disk's filesystem.
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let large = directory.path().join("large.img");
    let file = File::create(&large).unwrap();
    for at in (0..LARGE).step_by(MIB as usize) {
        file.write_all_at(&vec![0x11; MIB as usize], at).unwrap();
    }
    file.set_len(2 << 30).unwrap();
    let large = large.to_str().unwrap();
    let import = |name| ["image", "import", large, name, "--volume", "pool", "--policy", "write-through"];
    ok(lab, &import("first"));
    let began = Nanos::now();
    let clone = || fails(lab, &["disk", "clone", "first", "second", "--copy", "--policy", "write-through"]);
    // The owner scans a disk that it has just opened, 1 GiB at a time; until then, unscanned ranges count as data.
    let looked_at = || Some(clone()).filter(|refused| refused.contains(": 320 MiB are needed"));
    for refused in [
        fails(lab, &import("second")),
        await_some(SOON, looked_at, || format!("it counts holes: {}", clone())),
    ] {
        assert!(refused.contains("does not fit: 320 MiB are needed"), "{refused}");
        assert!(
            refused.contains("are free on volume pool") && refused.contains("weir volume du"),
            "{refused}"
        );
    }
    assert!(Nanos::now() - began < SOON, "at once");
    let disks = lab.any_client().unwrap().disks().unwrap();
    let mut names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, [DISK, "first"], "nothing is left");

    // An export that is killed leaves its clone, which the next one removes.
    let out = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let clones = || {
        let disks = lab.any_client().unwrap().disks().unwrap();
        disks.into_iter().filter(|disk| disk.name.starts_with("export-")).collect::<Vec<_>>()
    };
    let killed = ["image", "export", "first", &out("killed.img")];
    let mut export = weir(lab, &killed).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Nanos::now() + SOON;
    while clones().is_empty() {
        assert!(Nanos::now() < deadline && export.try_wait().unwrap().is_none());
    }
    export.kill().unwrap();
    export.wait().unwrap();
    let left = clones().into_iter().next().expect("it was killed").name;
    let clients = || lab.any_client().unwrap().disk(&left).unwrap().detail.map_or(0, |detail| detail.clients);
    while clients() > 0 {
        assert!(Nanos::now() < deadline);
        thread::sleep(Duration::from_millis(20));
    }
    let output = weir(lab, &["image", "export", "first", &out("whole.qcow2")]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains(&format!("removed {left}")), "{said}");
    assert!(clones().is_empty(), "{:?}", clones());
}
