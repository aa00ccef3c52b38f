//! Real NBD servers for the tests: processes that end when dropped.

#![allow(dead_code, reason = "each test file uses a part")]

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;

/// A server process.
pub struct Server {
    child: Child,
    pub uri: Uri,
}

impl Server {
    /// Starts `command` and waits until `uri` answers.
    pub fn start(command: &mut Command, uri: Uri) -> Server {
        let name = format!("{command:?}");
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap_or_else(|error| {
            panic!("{name}: {error}; the tests need the packages nbdkit and qemu-utils");
        });
        let server = Server { child, uri };
        let deadline = Nanos::now() + Duration::from_secs(20);
        loop {
            match NbdClient::connect(&server.uri) {
                Ok(client) => {
                    client.disconnect();
                    return server;
                }
                Err(error) => assert!(Nanos::now() < deadline, "{name} does not come up: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops the process for `time`: all requests meanwhile wait.
    pub fn stall(&self, time: Duration) {
        let signal = |signal| {
            // SAFETY: a plain system call; the process is our child and not yet waited for.
            assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
        };
        signal(libc::SIGSTOP);
        std::thread::sleep(time);
        signal(libc::SIGCONT);
    }

    /// Ends the process at once, as a crash would.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// A directory for sockets and files.
pub struct TestDir(tempfile::TempDir);

impl TestDir {
    pub fn new() -> TestDir {
        TestDir(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A file of `size` bytes, all hole.
    pub fn file(&self, name: &str, size: u64) -> PathBuf {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        path
    }

    /// `nbdkit` with `arguments` behind a Unix socket.
    pub fn nbdkit(&self, name: &str, arguments: &[&str]) -> Server {
        let socket = self.path(name);
        let mut command = Command::new("nbdkit");
        command.arg("-f").arg("-U").arg(&socket).args(arguments);
        // A killed predecessor leaves its socket behind.
        let _ = std::fs::remove_file(&socket);
        Server::start(&mut command, Uri::unix(&socket, ""))
    }

    /// `nbdkit` with `arguments` on a free TCP port of the loopback.
    pub fn nbdkit_tcp(&self, arguments: &[&str]) -> Server {
        let address = free_port();
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-i", "127.0.0.1", "-p", &address.port().to_string()]).args(arguments);
        Server::start(&mut command, Uri::tcp(address, ""))
    }

    /// `qemu-nbd` serving a raw file behind a Unix socket.
    pub fn qemu_nbd(&self, name: &str, file: &Path) -> Server {
        let socket = self.path(name);
        let mut command = Command::new("qemu-nbd");
        command.args([
            "-f",
            "raw",
            "-t",
            "-e",
            "8",
            "--discard=unmap",
            "--detect-zeroes=off",
            "-x",
            "disk",
            "-k",
        ]);
        command.arg(&socket).arg(file);
        Server::start(&mut command, Uri::unix(&socket, "disk"))
    }
}

/// A loopback port that was free a moment ago.
pub fn free_port() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}
