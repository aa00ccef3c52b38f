//! A PostgreSQL server with data checksums, and clients that remember its answers.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use weir_lab::process::ProcessId;

use crate::common::SOON;
use crate::support::await_some;

/// The user that Debian's package makes. The server refuses to run as root.
const USER: &str = "postgres";

/// A server on a directory; killed when dropped.
pub struct Server {
    process: Child,
    data: PathBuf,
    home: PathBuf,
}

impl Server {
    /// Makes a cluster below `mount` with checksums on every page, and small files for its log.
    pub fn make_cluster(mount: &Path) {
        let ids = fs::read_to_string("/etc/passwd").unwrap();
        let entry = ids.lines().find(|line| line.starts_with("postgres:")).expect("PostgreSQL is installed");
        let id = |field: usize| entry.split(':').nth(field).unwrap().parse().unwrap();
        chown(mount, Some(id(2)), Some(id(3))).unwrap();
        let options = ["--data-checksums", "--wal-segsize=4", "--auth=trust", "--locale=C", "-D"];
        succeed(program("initdb").args(options).arg(mount.join("data")));
    }

    /// Starts it and waits until it answers, after its recovery if it needs one. Its socket and log go to `home`.
    pub fn start(mount: &Path, home: &Path) -> Server {
        fs::create_dir_all(home).unwrap();
        fs::set_permissions(home, fs::Permissions::from_mode(0o777)).unwrap();
        let data = mount.join("data");
        let log = fs::File::options().create(true).append(true).open(home.join("log")).unwrap();
        let mut command = program("postgres");
        command.arg("-D").arg(&data).arg("-k").arg(home).args(["-h", ""]);
        for setting in
            ["shared_buffers=16MB", "max_wal_size=32MB", "min_wal_size=8MB", "restart_after_crash=off"]
        {
            command.args(["-c", setting]);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let mut server = Server { process: command.spawn().unwrap(), data, home: home.to_owned() };
        let answers = || {
            let ended = server.process.try_wait().unwrap();
            assert!(ended.is_none(), "PostgreSQL has ended: {ended:?}\n{}", log_of(home));
            let output = psql(home).args(["-c", "SELECT 1"]).stderr(Stdio::null()).output().unwrap();
            output.status.success().then_some(())
        };
        await_some(2 * SOON, answers, || log_of(home));
        server
    }

    /// The answer to a statement, `|` between columns.
    ///
    /// # Panics
    /// There is an error.
    pub fn query(&self, statement: &str) -> String {
        succeed(psql(&self.home).args(["-c", statement])).trim().to_owned()
    }

    /// A load of many kinds of pages: `pgbench`, which has been set up.
    pub fn pgbench(&self, arguments: &[&str]) -> Command {
        let mut command = program("pgbench");
        command.arg("-h").arg(&self.home).args(["-U", USER]).args(arguments).arg("postgres");
        command
    }

    /// The server has no power: it and all processes that it has started are gone at once. (Those that wait for a lock of
    /// one that is gone would wait for ever.)
    pub fn cut(&mut self) {
        let Ok(server) = ProcessId::of(self.process.id()) else { return };
        // A stopped process starts no other one.
        server.signal(Signal::STOP).unwrap();
        let children = children_of(server.pid);
        for process in children.iter().chain([&server]) {
            process.signal(Signal::KILL).unwrap();
        }
        self.process.wait().unwrap();
    }

    /// Ends it in good order and looks at the checksum of every page.
    pub fn stop_and_check(mut self) -> String {
        ProcessId::of(self.process.id()).unwrap().signal(Signal::INT).unwrap();
        assert!(self.process.wait().unwrap().success(), "{}", log_of(&self.home));
        succeed(program("pg_checksums").arg("--check").arg("-D").arg(&self.data))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.cut();
    }
}

/// The processes that a process has started.
fn children_of(parent: u32) -> Vec<ProcessId> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| ProcessId::of(pid.parse().ok()?).ok()).collect()
}

/// A client that inserts numbers one by one and remembers how many were answered.
pub struct Inserter {
    pub client: u32,
    /// The next number; all below were answered.
    pub next: u64,
}

impl Inserter {
    /// Inserts until the server does not answer any more.
    pub fn run(&mut self, home: &Path) {
        let mut process =
            psql(home).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut to_server = process.stdin.take().unwrap();
        let mut answers = BufReader::new(process.stdout.take().unwrap()).lines();
        loop {
            let Inserter { client, next } = *self;
            // The row returned before the commit is not the answer; the second statement comes after it.
            let insert = format!("INSERT INTO answered VALUES ({client}, {next});\nSELECT {next};\n");
            if to_server.write_all(insert.as_bytes()).is_err() {
                break;
            }
            match answers.next() {
                Some(Ok(answer)) if answer == next.to_string() => self.next += 1,
                _ => break,
            }
        }
        let _ = process.kill();
        process.wait().unwrap();
    }
}

/// `psql` with plain output, which ends at the first error.
fn psql(home: &Path) -> Command {
    let mut command = Command::new("psql");
    command.arg("-h").arg(home).args(["-U", USER, "-qAtX", "-v", "ON_ERROR_STOP=1", "postgres"]);
    command
}

/// A program of the newest PostgreSQL here, as its user.
fn program(name: &str) -> Command {
    let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed");
    let newest = versions
        .map(|version| version.unwrap().path())
        .max_by_key(|path| path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok()));
    let mut command = Command::new("setpriv");
    command.args([&format!("--reuid={USER}"), &format!("--regid={USER}"), "--init-groups"]);
    command.arg(newest.unwrap().join("bin").join(name)).current_dir("/");
    command
}

/// The output of a command, which must succeed.
fn succeed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} ended with {}:\n{said}\n{errors}", output.status);
    said
}

fn log_of(home: &Path) -> String {
    fs::read_to_string(home.join("log")).unwrap_or_default()
}
