//! The test guest itself, on nbdkit's disks: its results must not depend on Weir.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use weir_lab::guest::{Guest, GuestConfig, GuestError, GuestImage};

const SOON: Duration = Duration::from_secs(60);

fn image() -> GuestImage {
    // Beside the build's other results, so that it survives from run to run.
    GuestImage::cached(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest")).unwrap()
}

/// A disk that nbdkit serves.
struct Server {
    directory: tempfile::TempDir,
    nbdkit: Child,
}

impl Server {
    fn new() -> Server {
        let directory = tempfile::tempdir().unwrap();
        std::fs::File::create(directory.path().join("disk")).unwrap().set_len(128 << 20).unwrap();
        let nbdkit = Server::start(directory.path());
        Server { directory, nbdkit }
    }

    fn start(directory: &Path) -> Child {
        let socket = directory.join("socket");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).arg("file");
        let mut child = command.arg(directory.join("disk")).stdout(Stdio::null()).spawn().unwrap();
        for _ in 0..200 {
            if socket.exists() {
                return child;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = child.kill();
        panic!("nbdkit made no socket: {:?}", child.wait());
    }

    fn kill(&mut self) {
        self.nbdkit.kill().unwrap();
        self.nbdkit.wait().unwrap();
    }

    fn restart(&mut self) {
        self.nbdkit = Server::start(self.directory.path());
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.nbdkit.kill();
        let _ = self.nbdkit.wait();
    }
}

const MAKE: &str = "
    set -e
    mkfs.ext4 -q /dev/vda
    mount -t ext4 /dev/vda /mnt
    for i in 1 2 3 4 5 6 7 8; do
        dd if=/dev/urandom of=/mnt/file-$i bs=64k count=16 2>/dev/null
    done
    cd /mnt && sha256sum file-* >sums
    sync
    sha256sum sums
";

const VERIFY: &str = "
    set -e
    mount -t ext4 /dev/vda /mnt
    cd /mnt && sha256sum -c -s sums
    sha256sum sums
    cd / && umount /mnt
    fsck.ext4 -fn /dev/vda >/dev/null 2>&1
";

#[test]
fn synced_files_are_found_after_the_plug_was_pulled() {
    let server = Server::new();
    let config = GuestConfig::new(image(), [server.uri()]);
    let mut guest = Guest::boot(&config).unwrap();
    let made = guest.run(MAKE, SOON).unwrap();
    guest.kill();
    let mut guest = Guest::boot(&config).unwrap();
    let found = guest.run(VERIFY, SOON).unwrap();
    assert!(made.contains("sums") && made == found, "{made:?} {found:?}");
}

#[test]
fn a_guest_waits_for_a_server_that_comes_back() {
    let mut server = Server::new();
    let mut guest = Guest::boot(&GuestConfig::new(image(), [server.uri()])).unwrap();
    guest.run("mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt", SOON).unwrap();
    server.kill();
    // Writes meanwhile wait; the guest's other work goes on.
    guest
        .run(
            "(dd if=/dev/zero of=/mnt/zeroes bs=64k count=64 conv=fsync; echo $? >/tmp/code) 2>/dev/null &",
            SOON,
        )
        .unwrap();
    assert_eq!(guest.run("sleep 2; ls /tmp", SOON).unwrap(), "script\n", "dd has not ended");
    server.restart();
    guest.run("until [ -f /tmp/code ]; do sleep 0.2; done; exit $(cat /tmp/code)", SOON).unwrap();
    guest.run("umount /mnt && fsck.ext4 -fn /dev/vda", SOON).unwrap();
}

#[test]
fn what_goes_wrong_is_told_apart() {
    let mut server = Server::new();
    let mut config = GuestConfig::new(image(), [server.uri()]);
    let mut guest = Guest::boot(&config).unwrap();
    assert_eq!(guest.run("printf 'no newline'", SOON).unwrap(), "no newline");
    assert_eq!(guest.run("# nothing", SOON).unwrap(), "");
    match guest.run("echo before; exit 7", SOON) {
        Err(GuestError::Script { code: 7, output }) => assert_eq!(output, "before\n"),
        other => panic!("{other:?}"),
    }
    let many_lines = "echo 0123456789abcdef\n".repeat(1_000);
    assert_eq!(guest.run(&many_lines, SOON).unwrap().lines().count(), 1_000);
    let refused = guest.run(&"x".repeat(40_000), SOON);
    assert!(matches!(refused, Err(GuestError::ScriptLength(40_000))), "{refused:?}");
    let slow = guest.run("echo slow; sleep 3", Duration::from_secs(1));
    assert!(matches!(slow, Err(GuestError::Timeout { .. })), "{slow:?}");
    guest.kill();
    let dead = guest.run("true", SOON);
    assert!(matches!(dead, Err(GuestError::Ended { .. })), "{dead:?}");
    server.kill();
    std::fs::remove_file(server.socket()).unwrap();
    config.reconnect_delay = Duration::ZERO;
    match Guest::boot(&config) {
        Err(GuestError::Ended { errors, .. }) => assert!(errors.contains("No such file"), "{errors}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("booted without its disk"),
    }
}
