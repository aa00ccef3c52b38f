//! pgbench on a PostgreSQL whose files are on a Weir disk (ext4 on a loop device on nbdfuse): its profile, replayed on
//! another disk, shows the same rates, sizes, mix and hits. Needs root, FUSE, loop devices and PostgreSQL.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::Place;
use serde_json::Value;

/// Runs a command of the system that must succeed; returns its output.
fn system(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The directory of Debian's own PostgreSQL programs, of the newest version.
fn programs() -> PathBuf {
    let versions =
        std::fs::read_dir("/usr/lib/postgresql").expect("the test needs postgresql: scripts/setup");
    versions.map(|version| version.unwrap().path().join("bin")).max().unwrap()
}

/// A filesystem on an NBD export.
struct Mounted {
    fuse: Child,
    device: String,
    at: PathBuf,
}

impl Mounted {
    fn new(place: &Place, uri: &str) -> Mounted {
        let (file, at) = (place.path().join("device"), place.path().join("fs"));
        std::fs::write(&file, "").unwrap();
        std::fs::create_dir(&at).unwrap();
        let fuse = Command::new("nbdfuse").arg(&file).arg(uri).stdin(Stdio::null()).spawn().unwrap();
        let mut tries = 500;
        while std::fs::metadata(&file).map_or(0, |file| file.len()) == 0 {
            tries -= 1;
            assert!(tries > 0, "nbdfuse does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        let device = system("losetup", &["--find", "--show", "--direct-io=on", file.to_str().unwrap()]);
        let mounted = Mounted { fuse, device, at };
        system("mkfs.ext4", &["-q", &mounted.device]);
        mounted.mount();
        mounted
    }

    fn mount(&self) {
        system("mount", &[&self.device, self.at.to_str().unwrap()]);
    }

    fn unmount(&self) {
        system("umount", &[self.at.to_str().unwrap()]);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.at).output();
        let _ = Command::new("losetup").args(["-d", &self.device]).output();
        let _ = Command::new("umount").arg(self.at.with_file_name("device")).output();
        let _ = self.fuse.kill();
        let _ = self.fuse.wait();
    }
}

/// A PostgreSQL in a directory of the filesystem. It refuses to run as root.
struct Database {
    data: PathBuf,
    sockets: PathBuf,
}

impl Database {
    fn run(&self, program: &str, arguments: &str) {
        let line = format!("cd / && exec {}/{program} {arguments}", programs().display());
        system("su", &["postgres", "-c", &line]);
    }

    fn new(place: &Place, filesystem: &Path) -> Database {
        let database = Database { data: filesystem.join("data"), sockets: place.path().join("sockets") };
        for directory in [&database.data, &database.sockets] {
            std::fs::create_dir(directory).unwrap();
            system("chown", &["postgres", directory.to_str().unwrap()]);
        }
        system("chmod", &["755", place.path().to_str().unwrap()]);
        database.run("initdb", &format!("-D {} -A trust --no-sync", database.data.display()));
        database
    }

    fn start(&self) {
        let options = format!(
            "-k {} -c listen_addresses= -c shared_buffers=16MB -c max_wal_size=64MB -c checkpoint_timeout=30s",
            self.sockets.display()
        );
        let log = self.sockets.join("log");
        self.run(
            "pg_ctl",
            &format!("-D {} -l {} -w -o '{options}' start", self.data.display(), log.display()),
        );
    }

    fn stop(&self, how: &str) {
        self.run("pg_ctl", &format!("-D {} -m {how} -w stop", self.data.display()));
    }

    fn bench(&self, arguments: &str) {
        self.run("pgbench", &format!("-h {} {arguments} postgres", self.sockets.display()));
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if self.data.join("postmaster.pid").exists() {
            self.stop("immediate");
        }
    }
}

#[test]
fn pgbench_is_profiled_and_replayed() {
    let place = Place::new();
    place.ok("lab up --nodes 1");
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    let export = |disk: &str| {
        place.ok(&format!("disk create {disk} --volume pool --size 1GiB --policy write-back+0"));
        place.ok(&format!("disk export {disk}")).lines().next().unwrap().to_owned()
    };
    let mounted = Mounted::new(&place, &export("db"));
    let database = Database::new(&place, &mounted.at);
    database.start();
    database.bench("-i -q -s 10");
    // The guest drops its cache of the tables: its reads then come from the disk.
    database.stop("fast");
    mounted.unmount();
    mounted.mount();
    database.start();

    std::thread::scope(|scope| {
        scope.spawn(|| database.bench("-c 8 -T 24 --rate=150"));
        std::thread::sleep(Duration::from_secs(2));
        place.ok("profile record db --for 20s --to db.json");
    });
    drop(database);
    drop(mounted);

    println!("{}", place.ok("profile show --from db.json"));
    let replayed =
        place.json(&format!("profile replay --from db.json --target {} --destroy", export("again")));
    let rows = replayed["rows"].as_array().unwrap();
    rows.iter().for_each(|row| println!("{row}"));
    let of = |name: &str| rows.iter().find(|row| row["name"].as_str().unwrap().contains(name)).unwrap();
    assert!(of("IOPS")["original"].as_f64().unwrap() > 100.0, "{}", of("IOPS"));
    // The share of early overwrites depends on when the database writes its checkpoints, which a replay does not know.
    let promised = rows.iter().filter(|row| {
        let name = row["name"].as_str().unwrap();
        !name.contains("working set, MiB") && !name.contains("absorbed")
    });
    for row in promised {
        // A database overwrites the last pages of its log at once, which no distribution of independent requests does: small
        // caches have up to 11 points fewer hits.
        let limit = if row["name"].as_str().unwrap().contains("1/16") { 15.0 } else { 10.0 };
        let difference = row["difference"].as_f64().unwrap_or(0.0);
        assert!(difference.abs() <= limit, "{row} in {:#}", Value::from(rows.clone()));
    }
}
