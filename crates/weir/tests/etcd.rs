//! Three nodes on a real etcd of three members with mutual TLS: the owner of a disk is killed under load, and etcd's leader, too.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../../weir-etcd/tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use common::{Place, assert_shape, await_some};
use serde_json::Value;
use support::Cluster;
use weir_block::Nanos;

/// One cluster at a time: leases of 2 s do not survive the syncs of six members on one storage.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The process of a node. Its end ends the process.
struct Node {
    name: String,
    process: Child,
}

impl Node {
    fn start(place: &Place, name: &str) -> Node {
        let log =
            File::options().create(true).append(true).open(place.path().join(format!("{name}.log"))).unwrap();
        let mut command = place.command(&format!("node --config {name}.toml"));
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Node { name: name.to_owned(), process }
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        self.process.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Writes the configuration of a node.
fn configure(place: &Place, cluster: &Cluster, name: &str) {
    let home = place.path().join(name);
    std::fs::create_dir_all(&home).unwrap();
    let home = home.display();
    let endpoints: Vec<String> = (0..3).map(|member| cluster.endpoint(member)).collect();
    let tls = cluster.tls().unwrap();
    let (certificate, key) = tls.identity.unwrap();
    let (ca, certificate, key) = (tls.ca.display(), certificate.display(), key.display());
    let text = format!(
        "name = \"{name}\"\nfault_domain = \"rack-{name}\"\nstate_dir = \"{home}\"\n\
         [registry]\netcd = {endpoints:?}\nprefix = \"/weir/test/\"\n\
         ca = \"{ca}\"\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n\
         [lease]\nttl = \"2 s\"\nfence_grace = \"3 s\"\n\
         [peers]\nlisten = \"127.0.0.1:0\"\n[api]\nsocket = \"{home}/api.sock\"\n\
         [resources]\nbuffers = \"64 MiB\"\nlog = \"64 MiB\"\n"
    );
    std::fs::write(place.path().join(format!("{name}.toml")), text).unwrap();
}

/// The disk as the node `at` shows it, once another node than `not_by` serves it with a replica.
fn served(place: &Place, at: &str, not_by: Option<&str>) -> Value {
    await_some("the disk has an owner and a replica", || {
        let shown = place.weir(&format!("disk show db --api {at}/api.sock --output json"));
        let shown: Value = serde_json::from_slice(&shown.stdout).ok()?;
        let owner = shown["owner"].as_str()?;
        let redundant = shown["effective"] == "write-back+1" && shown["replicas"].as_array()?.len() == 1;
        (Some(owner) != not_by && redundant && shown["state"] == "serving").then(|| shown.clone())
    })
}

/// A process of this test; its end ends the process.
struct Registry(Child);

impl Registry {
    fn start(place: &Place) -> Registry {
        let mut command = place.command("registry --socket r.sock --file r.db");
        Registry(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_of_one_machine_moves_to_etcd() {
    let _turn = TURN.lock().await;
    let cluster = Cluster::three().await;
    let place = Place::new();
    configure(&place, &cluster, "n1");
    let in_etcd = place.read("n1.toml");
    let (start, end) = (in_etcd.find("[registry]").unwrap(), in_etcd.find("[lease]").unwrap());
    let socket = format!("[registry]\nsocket = \"{}/r.sock\"\n", place.path().display());
    let on_file = [&in_etcd[..start], &socket, &in_etcd[end..]].concat();
    std::fs::write(place.path().join("old.toml"), on_file).unwrap();
    let registry = Registry::start(&place);
    let mut node = Node::start(&place, "old");
    await_some("the node is up", || place.weir("status --api n1/api.sock").status.success().then_some(()));
    place.ok(&format!("volume create pool --path {} --api n1/api.sock", place.pool().display()));
    place.ok("disk create db --volume pool --size 4MiB --policy write-through --api n1/api.sock");
    let epoch = |shown: &Value| shown["epoch"].as_u64().unwrap();
    let before = place.json("disk show db --api n1/api.sock");

    let migrate = "cluster migrate-registry --config n1.toml --from r.db";
    let refused = place.fails(migrate, 4);
    assert!(refused.contains("stop `weir registry` and all nodes first"), "{refused}");
    let usage = place.fails("cluster migrate-registry --config old.toml --from r.db", 2);
    assert!(usage.contains("registry.etcd is not set"), "{usage}");
    assert!(place.fails(&format!("{migrate}-of-nobody"), 3).contains("r.db-of-nobody"));
    assert!(!place.path().join("r.db-of-nobody").exists());
    // Both are killed: the node's session in the file ends with its lease.
    node.kill();
    drop(registry);
    let done = place.json(migrate);
    assert_shape(&done, "cluster migrate-registry");
    assert_eq!(done["done"], true, "{done}");
    eprintln!("{done}");
    let again = place.fails(migrate, 4);
    assert!(again.contains("was migrated to /weir/test/ in etcd at"), "{again}");

    // The file is of no use to a node any more; etcd has everything.
    let registry = Registry::start(&place);
    await_some("the registry is up", || place.path().join("r.sock").exists().then_some(()));
    let refused = place.fails("node --config old.toml", 1);
    assert!(refused.contains("was migrated to /weir/test/ in etcd at"), "{refused}");
    drop(registry);
    let _node = Node::start(&place, "n1");
    let shown = await_some("the disk is there", || {
        let shown = place.weir("disk show db --api n1/api.sock --output json");
        shown.status.success().then(|| serde_json::from_slice::<Value>(&shown.stdout).unwrap())
    });
    assert!(epoch(&shown) >= epoch(&before), "{shown}");
    // A disk that is made again is above every epoch of the former one.
    place.ok("disk delete db --yes --api n1/api.sock");
    place.ok("disk create db --volume pool --size 4MiB --policy write-through --api n1/api.sock");
    let made = place.json("disk show db --api n1/api.sock");
    assert!(epoch(&made) > epoch(&shown), "{made} after {shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_owner_is_taken_over_and_nothing_is_lost() {
    let _turn = TURN.lock().await;
    let mut cluster = Cluster::three().await;
    let place = Place::new();
    let names = ["n1", "n2", "n3"];
    names.iter().for_each(|name| configure(&place, &cluster, name));
    let mut nodes: Vec<Node> = names.iter().map(|name| Node::start(&place, name)).collect();
    await_some("three nodes are up", || {
        let status = place.weir("status --api n1/api.sock --output json");
        let status: Value = serde_json::from_slice(&status.stdout).ok()?;
        (status["nodes"].as_array()?.len() == 3).then_some(())
    });
    place.ok(&format!("volume create pool --path {} --api n1/api.sock", place.pool().display()));
    place.ok("disk create db --volume pool --size 32MiB --policy write-back+1 --api n1/api.sock");
    place.ok("disk export db --api n1/api.sock");
    let shown = served(&place, "n1", None);
    eprintln!("{}", place.ok("events --api n1/api.sock"));
    assert_eq!(owner(&shown), "n1");

    // A load with a record of what was acknowledged.
    let uri = format!("nbd+unix:///db?socket={}", place.path().join("n1/nbd.sock").display());
    let load = format!(
        "bench {uri} --rw randwrite --bs 4k --qd 8 --verify --history record --runtime 1h --warmup 0s --destroy --format jsonl"
    );
    let mut load = place.command(&load).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(load.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        assert!(lines.next().unwrap().unwrap().contains("interval"));
    }
    nodes[0].kill();
    let killed = Nanos::now();
    let shown = served(&place, "n2", Some("n1"));
    eprintln!("taken over by {} after {:?}", owner(&shown), Nanos::now().since(killed));
    drop(lines);
    let _ = load.kill();
    load.wait().unwrap();
    let new_owner = owner(&shown).to_owned();
    let uri = format!("nbd+unix:///db?socket={}", place.path().join(&new_owner).join("nbd.sock").display());
    let found = place.json(&format!("bench verify --history record {uri}"));
    assert_eq!(found["verification"]["mismatches"], 0, "{found}");
    assert!(found["writes"].as_u64().unwrap() > 1000, "{found}");

    // The registry's changes go on without etcd's leader, and the killed node comes back under its name.
    let leader = cluster.leader().await;
    cluster.kill(leader);
    nodes[0] = Node::start(&place, "n1");
    await_some("the killed node is back", || {
        place.weir("status --api n1/api.sock").status.success().then_some(())
    });
    // While etcd elects a leader, the owner's view is behind.
    await_some("the owner sees it", || {
        let status = place.weir(&format!("status --api {new_owner}/api.sock --output json"));
        let status: Value = serde_json::from_slice(&status.stdout).ok()?;
        let is_back = |node: &Value| node["name"] == "n1" && node["state"] == "up";
        status["nodes"].as_array()?.iter().any(is_back).then_some(())
    });
    place.ok(&format!("disk move db --to n1 --api {new_owner}/api.sock"));
    let shown = served(&place, "n1", Some(&new_owner));
    assert_eq!(owner(&shown), "n1");
    let uri = format!("nbd+unix:///db?socket={}", place.path().join("n1/nbd.sock").display());
    let found = place.json(&format!("bench verify --history record {uri}"));
    assert_eq!(found["verification"]["mismatches"], 0, "after the move: {found}");
    for node in &nodes {
        let log = place.read(&format!("{}.log", node.name));
        assert!(!log.contains("ERROR") && !log.contains("panicked"), "{}: {log}", node.name);
    }
}

fn owner(shown: &Value) -> &str {
    shown["owner"].as_str().unwrap()
}

#[test]
fn settings_that_cannot_work_are_refused_at_the_start() {
    let place = Place::new();
    let with = |lines: &str| {
        let home = place.path().display();
        let text = format!(
            "name = \"n1\"\nstate_dir = \"{home}\"\n[peers]\nlisten = \"127.0.0.1:0\"\n[api]\nsocket = \"{home}/api.sock\"\n[registry]\n{lines}\n"
        );
        std::fs::write(place.path().join("weir.toml"), text).unwrap();
    };
    with("etcd = [\"10.0.0.1:2379\"]");
    assert!(
        place
            .fails("node --config weir.toml", 2)
            .contains("registry.etcd = 10.0.0.1:2379: it must be https://")
    );
    with("etcd = [\"https://127.0.0.1:1\"]\nca = \"/nonexistent/ca.pem\"");
    let said = place.fails("node --config weir.toml", 3);
    assert!(said.contains("registry.ca = /nonexistent/ca.pem: No such file"), "{said}");
    std::fs::write(place.path().join("ca.pem"), "text").unwrap();
    with(&format!("etcd = [\"https://127.0.0.1:1\"]\nca = \"{}/ca.pem\"", place.path().display()));
    assert!(place.fails("node --config weir.toml", 2).contains("it must be in PEM format"));
    with("etcd = [\"http://127.0.0.1:1\"]\nprefix = \"\"");
    assert!(place.fails("node --config weir.toml", 2).contains("registry.prefix = \"\": it must begin"));
}
