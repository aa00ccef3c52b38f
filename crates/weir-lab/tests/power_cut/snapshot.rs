//! PostgreSQL with its data, its log and two tablespaces on four disks of a volume on a LUN: a snapshot of all four at one point in time is what
//! a power cut of its host would leave, so it recovers on clones, with every commit that was answered before.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use weir_lab::Lab;
use weir_nbd::Uri;
use weir_node::api::{CloneDisk, CreateDisk, Delete, Export, Medium};

use crate::common::alone;
use crate::common::lun::LunBench;
use crate::guest::Plugged;
use crate::mounted::{Kind, Mounted};
use crate::postgresql::{SUMS, set_up_tables};
use crate::server::{Inserter, Server};
use crate::support::run;
use crate::{cuts, happens};

/// The disks and their sizes.
const DISKS: [(&str, u64); 4] =
    [("data", 160 << 20), ("wal", 96 << 20), ("one", 64 << 20), ("two", 64 << 20)];

/// Clients that insert.
const CLIENTS: u32 = 3;

/// The disks as filesystems, by the names of the originals.
type Guest = BTreeMap<&'static str, (Mounted, Plugged)>;

fn policy(disk: &str) -> &'static str {
    // The log's flushes wait for the LUN, the others' do not.
    if disk == "wal" { "write-through" } else { "write-back+1" }
}

fn plug(lab: &Lab, disk: &str, on: usize, places: &Path, is_new: bool) -> (Mounted, Plugged) {
    let node = lab.nodes()[on % lab.nodes().len()].name.clone();
    let view =
        lab.any_client().unwrap().export(disk, &Export { on: Some(node), ..Export::default() }).unwrap();
    let uri: Uri = view.uris[0].parse().unwrap();
    let plugged = Plugged::with_sectors(&uri, &places.join(format!("plug-{disk}")), 4096);
    if is_new {
        Kind::Ext4.make(plugged.path());
    }
    let at = places.join(disk);
    (Mounted::mount(Kind::Ext4, plugged.path(), &at), plugged)
}

/// A database whose parts are on all disks.
fn set_up(guest: &Guest, home: &Path) -> Server {
    let path = |disk: &str| guest[disk].0.path().to_owned();
    let data = path("data");
    Server::make_cluster(&data);
    let log = path("wal").join("pg_wal");
    run("mv", [data.join("data/pg_wal"), log.clone()]);
    symlink(log, data.join("data/pg_wal")).unwrap();
    let server = Server::start(&data, home);
    for disk in ["one", "two"] {
        let space = path(disk).join("space");
        fs::create_dir(&space).unwrap();
        run("chown", ["postgres".as_ref(), space.as_os_str()]);
        server.query(&format!("CREATE TABLESPACE {disk} LOCATION '{}'", space.display()));
    }
    set_up_tables(&server, &["--tablespace=one", "--index-tablespace=two"]);
    server
}

/// The copy's parts are at other places.
fn lead_to_clones(places: &Path, clones: &Guest) {
    let data = clones["data"].0.path().join("data");
    // Of a process that runs, but not on this copy.
    fs::remove_file(data.join("postmaster.pid")).unwrap();
    let spaces = fs::read_dir(data.join("pg_tblspc")).unwrap().map(|entry| entry.unwrap().path());
    for link in spaces.chain([data.join("pg_wal")]) {
        let place = fs::read_link(&link).unwrap();
        let mut parts = place.strip_prefix(places).unwrap().components();
        let disk = parts.next().unwrap().as_os_str().to_str().unwrap();
        let place = clones[disk].0.path().join(parts.as_path());
        fs::remove_file(&link).unwrap();
        symlink(place, &link).unwrap();
    }
}

/// For each client, the numbers that are in the table.
fn inserted(server: &Server) -> BTreeMap<u64, u64> {
    let all = server.query("SELECT client, count(*), max(number) + 1 FROM answered GROUP BY client");
    let row = |line: &str| {
        let numbers: Vec<u64> = line.split('|').map(|number| number.parse().unwrap()).collect();
        assert_eq!(numbers[1], numbers[2], "commits of client {} are missing in the middle", numbers[0]);
        (numbers[0], numbers[1])
    };
    all.lines().map(row).collect()
}

fn clone_all(pool: &LunBench, round: u64, places: &Path) -> Guest {
    let client = pool.bench.lab.any_client().unwrap();
    let clone = |(number, (disk, _)): (usize, (&'static str, u64))| {
        let wanted = CloneDisk {
            name: format!("{disk}-clone"),
            snapshot: Some(format!("s{round}")),
            policy: "write-back+0".into(),
            medium: Medium::Ram,
            limit: None,
        };
        client.clone_disk(disk, &wanted).unwrap();
        (disk, plug(&pool.bench.lab, &wanted.name, number, places, false))
    };
    DISKS.into_iter().enumerate().map(clone).collect()
}

/// Recovers from a snapshot, and checks what is there.
fn recovers(
    pool: &LunBench,
    round: u64,
    places: &Path,
    before: &BTreeMap<u64, u64>,
    after: &BTreeMap<u64, u64>,
) {
    let clones = clone_all(pool, round, places);
    lead_to_clones(places, &clones);
    let copy = Server::start(clones["data"].0.path(), &places.join(format!("home-{round}")));
    let found = inserted(&copy);
    for (client, number) in &found {
        let least = before.get(client).copied().unwrap_or(0);
        assert!(
            (least..=after[client]).contains(number),
            "client {client}: {least} ≤ {number} ≤ {}",
            after[client]
        );
    }
    assert!(before.keys().all(|client| found.contains_key(client)));
    let sums = copy.query(SUMS);
    let sums: Vec<_> = sums.split('|').collect();
    assert!(sums.iter().all(|sum| sum == &sums[0]), "half a transaction is there: {sums:?}");
    eprintln!("round {round}: commits before {before:?}, in the snapshot {found:?}, after {after:?}");
    eprintln!("{}", copy.stop_and_check().trim());
    for (disk, (mounted, plugged)) in clones {
        mounted.unmount();
        drop(plugged);
        let client = pool.bench.lab.any_client().unwrap();
        let delete = Delete { force: true, ..Delete::default() };
        client.delete(&format!("{disk}-clone"), &delete).unwrap();
        client.delete_snapshot(disk, &format!("s{round}"), false).unwrap();
    }
}

#[test]
fn a_snapshot_of_a_databases_disks_recovers() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-back+1", |_| {});
    let (lab, client) = (&pool.bench.lab, pool.bench.lab.any_client().unwrap());
    let places = tempfile::tempdir().unwrap();
    fs::set_permissions(places.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut guest = Guest::new();
    for (number, (name, size)) in DISKS.into_iter().enumerate() {
        let disk = CreateDisk {
            name: name.into(),
            volume: "pool".into(),
            size,
            logical_block: 4096,
            policy: policy(name).into(),
            medium: Medium::Ram,
            limit: None,
        };
        client.create_disk(&disk).unwrap();
        guest.insert(name, plug(lab, name, number, places.path(), true));
    }
    let home = places.path().join("home");
    let mut server = set_up(&guest, &home);
    let mut inserters: Vec<_> = (0..CLIENTS).map(|client| Inserter { client, next: 0 }).collect();
    let mut pgbench = server.pgbench(&["-n", "-c", "3", "-T", "600"]);
    let mut pgbench = pgbench.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let group: Vec<String> = DISKS[1..].iter().map(|(disk, _)| (*disk).to_owned()).collect();
    let rounds = thread::scope(|scope| {
        for inserter in &mut inserters {
            scope.spawn(|| inserter.run(&home));
        }
        let all_insert = || inserted(&server).len() == CLIENTS as usize;
        let began = happens(all_insert);
        let rounds = (0..cuts()).map(|round| {
            thread::sleep(Duration::from_millis(500));
            let before = inserted(&server);
            let made = client.create_snapshot("data", &format!("s{round}"), &group);
            (round, before, made, inserted(&server))
        });
        let rounds: Vec<_> = rounds.collect();
        // Judged afterwards: the scope ends when the clients do, and they end with the server.
        server.cut();
        (began, rounds)
    });
    let _ = pgbench.kill();
    pgbench.wait().unwrap();
    assert!(rounds.0, "not all clients insert{}", pool.bench.logs());
    for (round, before, made, after) in rounds.1 {
        assert_eq!(made.unwrap_or_else(|error| panic!("{error:?}{}", pool.bench.logs())).len(), DISKS.len());
        recovers(&pool, round, places.path(), &before, &after);
    }
    drop(server);
    for (mounted, plugged) in guest.into_values() {
        mounted.unmount();
        drop(plugged);
    }
}
