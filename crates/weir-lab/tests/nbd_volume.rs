//! Disks on real NBD servers, nbdkit and qemu-storage-daemon: servers end by force and come back, connections are cut, owners die, disks
//! move; nothing that was acknowledged is lost, and no guest sees an error (P4, P6, P7, P9).
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::{BLOCK, Bench, DISK, SIZE, SOON, alone, during, new_history, program, seed};
use rustix::process::{Pid, Signal, kill_process};
use support::await_some;
use weir_block::Nanos;
use weir_lab::{Lab, LabConfig};
use weir_load::verify::Atomicity;
use weir_load::verifying::{Settings, VerifyingLoad};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{AdoptExport, CreateVolume, Export, HealthLevel, Medium};
use weir_node::config::FilesElsewhere;

/// The longest time for which a change of a broken connection may land.
const GRACE: Duration = Duration::from_secs(2);

/// A server's process, ended by force with this value.
struct Server {
    child: Option<Child>,
    command: Box<dyn Fn() -> Command>,
    socket: PathBuf,
}

impl Server {
    /// nbdkit with the files of a directory as exports.
    fn nbdkit(directory: &Path, exports: PathBuf) -> Server {
        let socket = directory.join("nbdkit.sock");
        let at = socket.clone();
        Server::start(socket, move || {
            let mut command = Command::new("nbdkit");
            command.args(["-f", "-U"]).arg(&at).arg("file").arg(format!("dir={}", exports.display()));
            command
        })
    }

    /// qemu-storage-daemon with one image, which it caches in no way of its own.
    fn qsd(directory: &Path, image: PathBuf, export: &'static str, writable: bool) -> Server {
        let socket = directory.join(format!("qsd-{export}.sock"));
        let at = socket.clone();
        Server::start(socket, move || {
            let mut command = Command::new("qemu-storage-daemon");
            command
                .arg("--blockdev")
                .arg(format!("driver=file,node-name=f,filename={}", image.display()))
                .args(["--blockdev", "driver=raw,node-name=r,file=f", "--nbd-server"])
                .arg(format!("addr.type=unix,addr.path={}", at.display()))
                .arg("--export")
                .arg(format!(
                    "type=nbd,id=e,node-name=r,name={export},writable={}",
                    if writable { "on" } else { "off" }
                ));
            command
        })
    }

    fn start(socket: PathBuf, command: impl Fn() -> Command + 'static) -> Server {
        let mut server = Server { child: None, command: Box::new(command), socket };
        server.begin();
        server
    }

    fn begin(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let child = (self.command)().stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        self.child = Some(child.expect("the server is installed"));
        let there = || UnixStream::connect(&self.socket).ok();
        await_some(SOON, there, || "the server does not listen".to_owned());
    }

    /// As a service manager would: nbdkit 1.32 may end with an assertion of its own (`raw_send_socket: sock >= 0`) when a connection breaks
    /// while it answers several requests.
    fn begin_again_if_ended(&mut self) {
        if let Some(child) = &mut self.child
            && let Some(status) = child.try_wait().unwrap()
        {
            eprintln!("the server has ended by itself: {status}");
            self.begin();
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(self.child.as_ref().unwrap()), signal).unwrap();
    }

    /// `kill -9`
    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A way over TCP to a server, which can be cut.
struct Way {
    port: u16,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Way {
    fn to(socket: PathBuf) -> Way {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let streams = Arc::<Mutex<Vec<TcpStream>>>::default();
        let all = Arc::clone(&streams);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = UnixStream::connect(&socket) else { continue };
                all.lock().unwrap().push(near.try_clone().unwrap());
                let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                thread::spawn(move || {
                    pass(near, &far);
                    let _ = far.shutdown(Shutdown::Both);
                });
                thread::spawn(move || {
                    pass(far2, &near2);
                    let _ = near2.shutdown(Shutdown::Both);
                });
            }
        });
        Way { port, streams }
    }

    fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn uri(&self) -> String {
        format!("nbd://127.0.0.1:{}", self.port)
    }
}

fn pass(mut from: impl Read, mut to: impl Write) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}

fn image(path: &Path) {
    File::create(path).unwrap().set_len(SIZE).unwrap();
}

fn lab(directory: &tempfile::TempDir, has_files: bool) -> Lab {
    let mut config = LabConfig::new(directory.path().join("lab"), program());
    (config.fuse, config.fuse_elsewhere) = (has_files, FilesElsewhere::Read);
    (config.nodes, config.lease_ttl) = (3, Duration::from_secs(1));
    (config.fence_grace, config.nbd_fence_grace) = (Duration::from_secs(3), GRACE);
    Lab::up(&config).unwrap()
}

/// A lab with one disk, which is the export `d1` of a server.
fn up(directory: tempfile::TempDir, server: &str, policy: &str) -> Bench {
    let lab = lab(&directory, false);
    adopt(lab, directory, server, policy)
}

fn adopt(lab: Lab, directory: tempfile::TempDir, server: &str, policy: &str) -> Bench {
    let client = lab.client("n1").unwrap();
    let wanted = CreateVolume {
        kind: "nbd".into(),
        server: Some(server.into()),
        ..CreateVolume::dir("remote", PathBuf::new())
    };
    let volume = client.create_volume(&wanted).unwrap();
    assert!(volume.exports.is_some_and(|names| names.contains(&DISK.to_owned())));
    let wanted = AdoptExport {
        name: DISK.into(),
        volume: "remote".into(),
        export: None,
        size: None,
        logical_block: None,
        policy: policy.into(),
        medium: Medium::Ram,
        limit: None,
    };
    assert_eq!(client.adopt_export(&wanted).unwrap().size, SIZE);
    client.export(DISK, &Export::default()).unwrap();
    let bench = Bench { lab, directory, medium: Medium::Ram, etcd: None };
    bench.wait_effective();
    bench
}

/// A load that waits as long as a guest would.
fn load(bench: &Bench, seed: u64) -> VerifyingLoad {
    let settings = Settings {
        depth: 16,
        seed,
        reconnect_for: SOON,
        timeout: Duration::from_secs(60),
        atomicity: Atomicity::Block,
        ..Settings::default()
    };
    VerifyingLoad::new(new_history(seed), settings, bench.locate())
}

/// Everything that may happen to a disk on a server, and to the server.
fn trouble(bench: &mut Bench, server: &mut Server, way: &Way) {
    for away in [0, 300, 1200] {
        server.kill();
        thread::sleep(Duration::from_millis(away));
        server.begin();
        thread::sleep(Duration::from_millis(1500));
    }
    for _ in 0..2 {
        way.cut();
        thread::sleep(Duration::from_millis(200));
        server.begin_again_if_ended();
        thread::sleep(Duration::from_millis(500));
    }
    let owner = bench.owner();
    bench.lab.kill(&owner).unwrap();
    let next = bench.wait(|view| view.owner.as_ref().is_some_and(|now| *now != owner)).owner.unwrap();
    // In write-through nothing is answered, and the disk stays, before the former owner's requests have certainly ended.
    bench.wait(|view| view.state == "serving");
    thread::sleep(Duration::from_millis(500));
    let to = bench.lab.nodes().iter().map(|node| node.name.clone());
    let to = to.into_iter().find(|name| *name != owner && *name != next).unwrap();
    bench.lab.client(&next).unwrap().move_disk(DISK, &to).unwrap();
    thread::sleep(Duration::from_millis(500));
    server.kill();
    server.begin();
    bench.lab.start(&owner).unwrap();
}

/// What the server has, when everything is destaged, is the disk.
fn check_image(bench: &Bench, load: VerifyingLoad, image: &Path) {
    bench.wait(|view| {
        let detail = view.detail.as_ref().unwrap();
        detail.dirty_bytes == 0 && detail.destaged == detail.appended
    });
    let data = std::fs::read(image).unwrap();
    let mut history = load.into_history();
    for block in 0..history.layout().blocks() {
        let at = (block * u64::from(BLOCK)) as usize;
        let found = history.check(block, &data[at..at + BLOCK as usize], Atomicity::Block);
        found.unwrap_or_else(|found| panic!("at the server: {found}"));
    }
}

fn survives(policy: &str, start: impl FnOnce(&Path, &Path) -> Server) {
    let _turn = alone();
    let (seed, directory) = (seed(), tempfile::tempdir().unwrap());
    let images = directory.path().join("images");
    std::fs::create_dir(&images).unwrap();
    image(&images.join(DISK));
    let mut server = start(directory.path(), &images);
    let way = Way::to(server.socket.clone());
    let mut bench = up(directory, &way.uri(), policy);
    let began = Nanos::now();
    let load = load(&bench, seed);
    let progress = load.progress();
    let (mut load, ()) = during(load, Duration::from_secs(1), || trouble(&mut bench, &mut server, &way));
    eprintln!("{policy}: {} acknowledged in {:?}", progress.acknowledged(), (Nanos::now() - began));
    bench.judge(&mut load, seed);
    check_image(&bench, load, &images.join(DISK));
    let events = bench.lab.any_client().unwrap().events().unwrap();
    let told = |kind: &str| events.iter().filter(|event| event.kind == kind && event.subject == DISK).count();
    assert!(told("server-away") > 0 && told("server-back") > 0, "{events:#?}");
    assert_eq!(told("server-overdue"), 0);
}

#[test]
fn a_disk_on_nbdkit_in_write_back_survives_everything() {
    survives("write-back+1", |directory, images| Server::nbdkit(directory, images.to_owned()));
}

#[test]
fn a_disk_on_qemu_storage_daemon_in_write_through_survives_everything() {
    survives("write-through", |directory, images| Server::qsd(directory, images.join(DISK), DISK, true));
}

/// The command line, on the lab in `directory`.
fn weir(directory: &Path, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(program());
    let output = command.arg("--lab").arg(directory).args(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

/// An image, and nbdkit with it as an export.
fn served() -> (tempfile::TempDir, PathBuf, Server) {
    let directory = tempfile::tempdir().unwrap();
    let images = directory.path().join("images");
    std::fs::create_dir(&images).unwrap();
    let path = images.join(DISK);
    image(&path);
    let server = Server::nbdkit(directory.path(), images);
    (directory, path, server)
}

/// The log is in one place then, and the disk is not open anywhere: nobody but its owner's status says so.
#[test]
fn a_takeover_while_the_server_is_away_shows_what_is_at_risk() {
    let _turn = alone();
    let (directory, path, mut server) = served();
    let mut bench = up(directory, &server.uri(), "write-back+1");
    let owner = bench.owner();
    server.kill();
    let mut nbd = NbdClient::connect(&Uri::unix(&bench.lab.node(&owner).unwrap().nbd_unix, DISK)).unwrap();
    nbd.write(0, &[1; 1 << 20], false).unwrap();
    bench.lab.kill(&owner).unwrap();
    let view = || bench.lab.any_client().unwrap().disk(DISK).unwrap();
    let in_log = || Some(view()).filter(|view| view.undestaged_bytes == Some(1 << 20));
    let unopened = await_some(SOON, in_log, || format!("{:#?}", view()));
    assert!(unopened.reason.contains("cannot connect to"), "{}", unopened.reason);
    let successor = unopened.owner.unwrap();
    let health = bench.lab.client(&successor).unwrap().status().unwrap().health;
    assert_eq!(health.level, HealthLevel::AtRisk);
    let risk = format!("disk {DISK}: 1 MiB of acknowledged writes only on node {successor}");
    assert!(health.reasons.contains(&risk), "{health:?}");
    let (ok, text) = weir(bench.lab.dir(), &["disk", "export", DISK]);
    assert!(!ok && text.contains("tries again by itself"), "{text}");
    server.begin();
    let open = bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0));
    assert_eq!((open.owner, open.undestaged_bytes), (Some(successor), None));
    assert_eq!(std::fs::read(&path).unwrap()[..1 << 20], [1; 1 << 20]);
}

/// The export stays: what its disk has acknowledged belongs there, as far as the server takes it.
#[test]
fn a_deletion_by_force_destages_what_the_server_takes() {
    let _turn = alone();
    let (directory, path, mut server) = served();
    let bench = up(directory, &server.uri(), "write-back+1");
    let lab = bench.lab.dir().to_owned();
    let delete = |more: &[&str]| weir(&lab, &[&["disk", "delete", DISK, "--yes"], more].concat());
    let connect = || {
        let owner = bench.owner();
        NbdClient::connect(&Uri::unix(&bench.lab.node(&owner).unwrap().nbd_unix, DISK)).unwrap()
    };
    let mut nbd = connect();
    server.signal(Signal::STOP);
    nbd.write(0, &[1; 1 << 20], false).unwrap();
    let (ok, text) = delete(&[]);
    assert!(!ok && text.contains("connected"), "{text}");
    assert!(bench.disk().unwrap().detail.unwrap().dirty_bytes > 0, "the server is stopped");
    let (ok, text) = thread::scope(|scope| {
        let deleted = scope.spawn(|| delete(&["--force"]));
        // So that it waits for the server.
        let state = || bench.disk().unwrap().detail.map(|detail| detail.state).unwrap_or_default();
        await_some(SOON, || (state() == "closing").then_some(()), state);
        server.signal(Signal::CONT);
        deleted.join().unwrap()
    });
    assert!(ok && text.contains("stays as it is") && !text.contains("lost"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap()[..1 << 20], [1; 1 << 20]);

    let (ok, text) = weir(&lab, &["disk", "create", DISK, "--volume", "remote", "--policy", "write-back+1"]);
    assert!(ok, "{text}");
    bench.lab.any_client().unwrap().export(DISK, &Export::default()).unwrap();
    bench.wait_effective();
    let mut nbd = connect();
    // So that the disk has destaged something before its storage takes nothing.
    nbd.write(0, &[2; 4096], false).unwrap();
    bench.wait(|view| view.detail.as_ref().unwrap().dirty_bytes == 0);
    server.kill();
    nbd.write(0, &[3; 1 << 20], false).unwrap();
    let (ok, text) = delete(&["--force", "--dry-run"]);
    assert!(ok && !text.contains("would lose"), "{text}");
    let (ok, text) = delete(&["--discard", "--dry-run"]);
    assert!(
        ok && text.contains("this would lose 1 MiB of acknowledged writes, which are not destaged"),
        "{text}"
    );
    // It waits, and says what else there is. The disk closes meanwhile.
    let (ok, text) = delete(&["--force"]);
    assert!(!ok && text.contains("has not been destaged") && text.contains("--discard"), "{text}");
    let (ok, text) = delete(&["--discard"]);
    assert!(ok && text.contains("lost: 1 MiB of acknowledged writes, which are not destaged"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap()[..4096], [2; 4096], "what was destaged stays");
}

/// A disk's file while its server is away: it opens on any node, and a program that reads it ends by a signal.
#[test]
fn a_program_that_waits_for_a_server_can_be_killed() {
    let _turn = alone();
    let (directory, _, mut server) = served();
    let bench = adopt(lab(&directory, true), directory, &server.uri(), "write-back+1");
    let owner = bench.owner();
    let reader = bench.lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != owner).unwrap();
    let path = |node: &str| bench.lab.dir().join(node).join(format!("files/remote/{DISK}.raw"));
    let read = |node: &str| {
        let mut command = Command::new("dd");
        command.arg(format!("if={}", path(node).display())).args(["of=/dev/null", "bs=4096", "count=1"]);
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    for node in [&owner, &reader] {
        let is_there = || path(node).exists().then_some(());
        await_some(SOON, is_there, || format!("{node} has no file of the disk"));
    }
    server.kill();
    for node in [&owner, &reader, &owner] {
        assert_eq!(std::fs::metadata(path(node)).unwrap().len(), SIZE);
        let mut child = read(node);
        thread::sleep(Duration::from_secs(3));
        assert!(child.try_wait().unwrap().is_none(), "{node}: {:?}", child.wait_with_output());
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let ended = || child.try_wait().unwrap();
        let status = await_some(Duration::from_secs(2), ended, || format!("{node}: dd goes on"));
        assert!(!status.success());
    }
    server.begin();
    for node in [&owner, &reader] {
        let output = read(node).wait_with_output().unwrap();
        assert!(output.status.success(), "{node}: {output:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let images = directory.path().join("images");
    std::fs::create_dir(&images).unwrap();
    image(&images.join("vm1"));
    image(&images.join("vm2"));
    File::create(images.join("odd")).unwrap().set_len(5000).unwrap();
    let server = Server::nbdkit(directory.path(), images.clone());
    let read_only = Server::qsd(directory.path(), images.join("vm2"), "ro", false);
    let lab = lab(&directory, false);
    let at = lab.dir().to_owned();
    let refused = |arguments: &[&str], expected: &str| {
        let (succeeded, text) = weir(&at, arguments);
        assert!(!succeeded && text.contains(expected), "{arguments:?}: {text}");
    };
    let done = |arguments: &[&str], expected: &str| {
        let (succeeded, text) = weir(&at, arguments);
        assert!(succeeded && text.contains(expected), "{arguments:?}: {text}");
    };
    let (uri, other) = (server.uri(), read_only.uri());
    let create = |server: &str, expected: &str| {
        refused(&["volume", "create", "v", "--kind", "nbd", "--server", server], expected);
    };
    create("nbds://127.0.0.1:1", "TLS");
    create("nbd://127.0.0.1:1", "cannot connect to 127.0.0.1:1");
    create(&format!("nbd+unix:///vm1?socket={}", server.socket.display()), "names the export `vm1`");
    let api = lab.node("n1").unwrap().api.clone();
    create(&format!("nbd+unix:///?socket={}", api.display()), "handshake");
    done(
        &["volume", "create", "v", "--kind", "nbd", "--server", &uri, "--dry-run"],
        "would use the NBD server",
    );
    done(&["volume", "create", "v", "--kind", "nbd", "--server", &uri], "`vm1`");
    create(&uri, "there is a volume v already");
    refused(&["volume", "create", "w", "--kind", "nbd", "--server", &uri], "is volume v already");
    done(&["volume", "create", "ro", "--kind", "nbd", "--server", &other], "`ro`");

    let disk = |name: &str, more: &[&str], expected: &str| {
        refused(&[&["disk", "create", name, "--volume", "v"], more].concat(), expected);
    };
    disk("none", &[], "does not list an export `none`");
    disk("odd", &[], "has 5000 bytes");
    disk("vm1", &["--size", "1GiB"], "has 33554432 bytes, and not 1073741824");
    refused(&["disk", "create", "ro", "--volume", "ro"], "is read-only");
    let create = ["disk", "create", "vm1", "--volume", "v", "--policy", "write-through"];
    done(&create, "nothing was written there");
    disk("twin", &["--export", "vm1"], "disk vm1 of volume v has that export");
    refused(&["snapshot", "create", "vm1@s"], "only its storage can make snapshots");
    refused(&["disk", "clone", "vm1", "vm3"], "is an export");
    refused(&["disk", "compact", "vm1"], "is an export");
    refused(&["disk", "resize", "vm1", "1GiB"], "has 33554432 bytes, and not 1073741824");
    refused(&["volume", "du", "v"], "does not say what its exports take");
    refused(&["volume", "delete", "v", "--yes"], "has disks in it");
    done(&["volume", "show", "v"], &uri);
    done(&["volume", "list"], "nbd");
    done(&["disk", "export", "vm1"], "nbd");
    File::options().write(true).open(images.join("vm1")).unwrap().set_len(2 * SIZE).unwrap();
    done(&["disk", "resize", "vm1", "64MiB"], "64");
    done(&["--output", "json", "disk", "show", "vm1"], "\"size_bytes\": 67108864");
    done(&["disk", "delete", "vm1", "--yes"], "stays as it is");
    assert!(images.join("vm1").exists());
    done(&["volume", "delete", "v", "--yes"], "deleted volume v");
}
