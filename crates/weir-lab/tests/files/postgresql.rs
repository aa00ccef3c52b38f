//! PostgreSQL on a filesystem on a loop device on a disk's file: its node is killed, another takes the disk over, and every commit that was
//! answered is there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use weir_node::api::{CreateDisk, Export, Medium};

use super::server::{Inserter, Server};
use super::{alone, bench, options, path};
use crate::common::SOON;
use crate::support::{await_some, run};

const NAME: &str = "db";

/// A filesystem on a file. Taken apart when it is dropped, also after the file's end.
struct Mounted {
    device: String,
    at: PathBuf,
}

impl Mounted {
    fn new(file: &Path, at: &Path, is_new: bool) -> Mounted {
        fs::create_dir_all(at).unwrap();
        let file = file.to_str().unwrap();
        let device = run("losetup", ["--find", "--show", "--direct-io=on", file]).trim().to_owned();
        let mounted = Mounted { device, at: at.to_owned() };
        if is_new {
            run("mkfs.ext4", ["-q", &mounted.device]);
        }
        run("mount", [&*mounted.device, at.to_str().unwrap()]);
        mounted
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a process of the server that hangs must not keep the test from its end.
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        let _ = std::process::Command::new("losetup").args(["-d", &self.device]).status();
    }
}

#[test]
fn postgresql_has_every_answered_commit_after_its_node_was_killed() {
    let _turn = alone();
    let mut bench = bench(3, "write-back+1");
    let wanted = CreateDisk {
        name: NAME.into(),
        volume: "pool".into(),
        size: 256 << 20,
        logical_block: 512,
        policy: "write-back+1".into(),
        medium: Medium::Ram,
        limit: None,
    };
    let client = bench.lab.any_client().unwrap();
    client.create_disk(&wanted).unwrap();
    client.export(NAME, &Export::default()).unwrap();
    let ready = || {
        let view = bench.disk_named(NAME)?;
        (view.requested == view.effective && view.state == "serving").then_some(view.owner?)
    };
    let owner = await_some(SOON, ready, || bench.logs());

    let places = tempfile::tempdir().unwrap();
    fs::set_permissions(places.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let [at, home] = ["mount", "home"].map(|name| places.path().join(name));
    let mounted = Mounted::new(&path(&bench, &owner, NAME), &at, true);
    Server::make_cluster(&at);
    let mut server = Server::start(&at, &home);
    server.query("CREATE TABLE answered (client int, number bigint, PRIMARY KEY (client, number))");
    let mut inserters: Vec<_> = (0..3).map(|client| Inserter { client, next: 0 }).collect();
    thread::scope(|scope| {
        for inserter in &mut inserters {
            scope.spawn(|| inserter.run(&home));
        }
        let committed =
            || server.query("SELECT count(*) FROM answered").parse().ok().filter(|count: &u64| *count > 300);
        await_some(SOON, committed, || bench.logs());
        thread::sleep(Duration::from_millis(300));
        bench.lab.kill(&owner).unwrap();
        // The filesystem fails with its disk, and the server with that; its clients end then.
        thread::sleep(Duration::from_millis(300));
        server.cut();
    });
    drop(server);
    drop(mounted);

    let successor = || bench.disk_named(NAME)?.owner.filter(|now| *now != owner);
    let successor = await_some(SOON, successor, || bench.logs());
    let file = path(&bench, &successor, NAME);
    await_some(SOON, || options(false).open(&file).ok(), || bench.logs());
    let mounted = Mounted::new(&file, &at, false);
    let server = Server::start(&at, &home);
    for Inserter { client, next: answered } in inserters {
        let found =
            server.query(&format!("SELECT count(*), max(number) FROM answered WHERE client = {client}"));
        let (count, last) = found.split_once('|').unwrap();
        let (count, last): (u64, u64) = (count.parse().unwrap(), last.parse().unwrap());
        assert_eq!(count, last + 1, "commits of client {client} are missing in the middle");
        assert!(
            (answered..=answered + 1).contains(&count),
            "client {client}: {answered} answers, {count} rows"
        );
        eprintln!("client {client}: {answered} commits answered, all there");
    }
    server.stop_and_check();
    drop(mounted);
}
