//! PostgreSQL on a Weir disk through power cuts: it recovers, its pages check, and it has every commit that it answered.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use weir_cluster::records::Medium;

use crate::common::{alone, seed};
use crate::guest::Plugged;
use crate::mounted::{Kind, Mounted};
use crate::server::{Inserter, Server};
use crate::site::{Plan, Site};
use crate::{cuts, happens, survivors};

/// Clients that keep a record of what was answered.
const CLIENTS: u32 = 3;

/// Money neither comes nor goes: the sums of pgbench's tables are equal in every state that its transactions leave.
pub const SUMS: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), \
                    (SELECT sum(bbalance) FROM pgbench_branches), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";

/// A cluster with the tables that the clients need.
fn set_up(mount: &Path, home: &Path) -> Server {
    Server::make_cluster(mount);
    let server = Server::start(mount, home);
    set_up_tables(&server, &[]);
    server
}

/// The tables of the clients that remember, and those of pgbench.
pub fn set_up_tables(server: &Server, options: &[&str]) {
    assert_eq!(server.query("SHOW data_checksums"), "on");
    assert_eq!(server.query("SHOW fsync"), "on");
    server.query("CREATE TABLE answered (client int, number bigint, PRIMARY KEY (client, number))");
    let options = [&["-i", "-s", "1", "-q"], options].concat();
    let made = server.pgbench(&options).stderr(Stdio::null()).status().unwrap();
    assert!(made.success(), "pgbench cannot set up its tables");
}

/// Every answered insert is there, and at most the one in flight as well.
fn check(server: &Server, inserters: &mut [Inserter], seed: u64) {
    for inserter in inserters {
        let (client, answered) = (inserter.client, inserter.next);
        let found = server.query(&format!(
            "SELECT count(*), coalesce(max(number) + 1, 0) FROM answered WHERE client = {client}"
        ));
        let (count, next) = found.split_once('|').unwrap();
        let (count, next): (u64, u64) = (count.parse().unwrap(), next.parse().unwrap());
        assert_eq!(count, next, "seed {seed}: commits of client {client} are missing in the middle");
        assert!(
            (answered..=answered + 1).contains(&next),
            "seed {seed}: client {client} had {answered} answers, the table holds {next} numbers"
        );
        inserter.next = next;
    }
    let sums = server.query(SUMS);
    let sums: Vec<_> = sums.split('|').collect();
    assert!(sums.iter().all(|sum| sum == &sums[0]), "seed {seed}: half a transaction is there: {sums:?}");
}

/// Cuts under pgbench and clients that remember.
fn survives(plan: &Plan) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut site = Site::up(plan);
    let places = tempfile::tempdir().unwrap();
    fs::set_permissions(places.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let [at, plug, home] = ["mount", "plug", "home"].map(|name| places.path().join(name));
    let (_, uri) = site.wait_served();
    let mut disk = Plugged::plug(&uri, &plug);
    Kind::Ext4.make(disk.path());
    let mut mounted = Mounted::mount(Kind::Ext4, disk.path(), &at);
    let mut server = set_up(&at, &home);
    let mut inserters: Vec<_> = (0..CLIENTS).map(|client| Inserter { client, next: 0 }).collect();
    for cut in 1..=cuts() {
        let survivors = survivors(&mut random);
        let before = Duration::from_millis(random.u64(800..2000));
        let already: u64 = inserters.iter().map(|inserter| inserter.next).sum();
        let mut pgbench = server.pgbench(&["-n", "-c", "3", "-T", "600"]);
        let mut pgbench = pgbench.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let gave_up = thread::scope(|scope| {
            let inserting: Vec<_> =
                inserters.iter_mut().map(|inserter| scope.spawn(|| inserter.run(&home))).collect();
            // One commit more than there are clients, and one of them has had its answer.
            let committed = || server.query("SELECT count(*) FROM answered").parse();
            happens(|| committed().is_ok_and(|committed: u64| committed > already + u64::from(CLIENTS)));
            thread::sleep(before);
            // Judged after the cut: the scope ends when the clients do, and they end with the server.
            let gave_up = inserting.iter().any(|client| client.is_finished());
            site.power_cut(|| {
                disk.cut();
                server.cut();
            });
            gave_up
        });
        assert!(!gave_up, "a client gave up before the cut{}", site.bench.logs());
        let _ = pgbench.kill();
        pgbench.wait().unwrap();
        drop(server);
        disk.power_off(mounted);
        let nodes = site.shuffled(&mut random);
        site.power_on(survivors, &nodes);
        let (_, uri) = site.wait_served();
        disk = Plugged::plug(&uri, &plug);
        disk.replay_and_check(Kind::Ext4, &at);
        mounted = Mounted::mount(Kind::Ext4, disk.path(), &at);
        server = Server::start(&at, &home);
        let answered: u64 = inserters.iter().map(|inserter| inserter.next).sum();
        assert!(answered > already, "seed {seed}: no client had an answer");
        check(&server, &mut inserters, seed);
        eprintln!(
            "PostgreSQL on {}, cut {cut}, {survivors:?}: {answered} commits answered, all there",
            plan.policy
        );
    }
    eprintln!("{}", server.stop_and_check().trim());
    mounted.unmount();
}

#[test]
fn postgresql_on_flash() {
    survives(&Plan { nodes: 3, policy: "write-back+1", medium: Medium::Flash, size: 256 << 20 });
}
