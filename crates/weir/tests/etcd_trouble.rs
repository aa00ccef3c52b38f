//! What nodes on a real etcd say of bad settings, names and directories that others use, and an etcd that does not answer.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../../weir-etcd/tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::time::Duration;

use common::{Place, await_some};
use support::Cluster;

/// The process of a node. Its end ends the process.
struct Node {
    name: String,
    process: Child,
}

impl Node {
    /// Starts the node of `NAME.toml`; it logs to `NAME.log`.
    fn start(place: &Place, name: &str) -> Node {
        let log = File::create(place.path().join(format!("{name}.log"))).unwrap();
        let mut command = place.command(&format!("node --config {name}.toml"));
        command.env_remove("WEIR_LOG");
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Node { name: name.to_owned(), process }
    }

    fn log(&self, place: &Place) -> String {
        place.read(&format!("{}.log", self.name))
    }

    /// Waits until the log has a line with all of `words`.
    fn says(&self, place: &Place, words: &[&str]) -> String {
        await_some(&format!("{} says {words:?}", self.name), || {
            let log = self.log(place);
            log.lines().find(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned)
        })
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        self.process.wait().unwrap();
    }

    /// The exit code of a node that ends by itself.
    fn ends(&mut self) -> Option<i32> {
        await_some(&format!("{} ends", self.name), || self.process.try_wait().unwrap()).code()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Writes `FILE.toml`: the node `name` with its state in `home`.
fn configure(place: &Place, file: &str, name: &str, home: &str, registry: &str, peers: &str) {
    let home = place.path().join(home).display().to_string();
    let text = format!(
        "name = \"{name}\"\nstate_dir = \"{home}\"\n[registry]\n{registry}\n[lease]\nttl = \"3 s\"\n\
         [peers]\nlisten = \"{peers}\"\n[nbd]\nunix = \"\"\n[api]\nsocket = \"{}/{file}.sock\"\n\
         [resources]\nbuffers = \"64 MiB\"\nlog = \"64 MiB\"\n",
        place.path().display()
    );
    std::fs::write(place.path().join(format!("{file}.toml")), text).unwrap();
}

const ANY: &str = "127.0.0.1:0";

fn etcd(cluster: &Cluster) -> String {
    format!("etcd = [\"{}\"]", cluster.endpoint(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_does_not_answer_is_in_the_log() {
    let mut cluster = Cluster::one().await;
    cluster.kill(0);
    let place = Place::new();
    configure(&place, "n1", "n1", "n1", &etcd(&cluster), ANY);
    let node = Node::start(&place, "n1");
    let endpoint = cluster.endpoint(0);
    node.says(&place, &["INFO", "joining the cluster", &endpoint]);
    let words = ["WARN", "waiting to join the cluster", &endpoint, "Connection refused", "registry.etcd"];
    node.says(&place, &words);
    // Several attempts later.
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(node.log(&place).matches("waiting to join").count(), 1, "{}", node.log(&place));
    cluster.start().await;
    node.says(&place, &["INFO", "in the cluster", &endpoint]);
    // While it runs.
    cluster.pause(0);
    node.says(&place, &["WARN", "the registry has not answered for"]);
    std::thread::sleep(Duration::from_secs(3));
    cluster.resume(0);
    node.says(&place, &["INFO", "the registry answers again, after"]);
    assert_eq!(node.log(&place).matches("has not answered for").count(), 1, "{}", node.log(&place));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_and_a_directory_are_one_nodes() {
    let cluster = Cluster::one().await;
    let place = Place::new();
    let registry = etcd(&cluster);
    configure(&place, "n1", "n1", "home", &registry, ANY);
    configure(&place, "other", "n2", "home", &registry, ANY);
    configure(&place, "double", "n1", "elsewhere", &registry, ANY);
    let mut first = Node::start(&place, "n1");
    first.says(&place, &["in the cluster"]);

    let mut other = Node::start(&place, "other");
    let double = Node::start(&place, "double");
    let line = double.says(&place, &["WARN", "already uses this name"]);
    assert!(line.contains("n1#") && line.contains("peer address is 127.0.0.1:"), "{line}");
    assert_eq!(other.ends(), Some(1));
    let log = other.log(&place);
    let holder = format!("home: node n1, process {} uses this directory", first.process.id());
    assert!(log.contains(&holder) && log.contains("a state_dir of its own"), "{log}");
    assert_eq!(log.matches("waiting for it").count(), 1, "{log}");
    drop(double);

    // The lock ends with the process, and a node that starts while its former process ends waits for it.
    let again = Node::start(&place, "other");
    again.says(&place, &["WARN", "has the directory", "waiting for it"]);
    first.kill();
    again.says(&place, &["in the cluster"]);
}

#[test]
fn an_address_that_another_process_has_is_named_once() {
    let place = Place::new();
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap().to_string();
    configure(&place, "n1", "n1", "n1", "etcd = [\"http://127.0.0.1:1\"]", &address);
    let mut node = Node::start(&place, "n1");
    assert_eq!(node.ends(), Some(1));
    let log = node.log(&place);
    assert_eq!(log.matches("waiting for it").count(), 1, "{log}");
    let line = node.says(&place, &["WARN", "waiting for it", "perhaps this node's former one"]);
    assert!(line.contains(&address), "{line}");
    let error = log.lines().last().unwrap();
    assert!(error.contains(&address) && error.contains("stop that process, or set peers.listen"), "{log}");
}

/// Appends to the configuration `FILE.toml`: the directory of keys `keys`, and a prefix.
fn identify(place: &Place, file: &str, keys: &str) {
    let directory = place.path().join(keys);
    let text = place.read(&format!("{file}.toml"));
    let text = format!("{text}[identity]\ndirectory = \"{}\"\n", directory.display());
    std::fs::write(place.path().join(format!("{file}.toml")), text).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_fault_has_one_exit_code() {
    let mut cluster = Cluster::one().await;
    let place = Place::new();
    cluster.admin(0).await.put("/others/app", "x", None).await.unwrap();
    let prefix = |name: &str| format!("{}\nprefix = \"/{name}/\"", etcd(&cluster));
    for (file, name, keys) in [
        ("a", "a", "a"),
        ("b", "b", "b"),
        ("mixed", "b", "a"),
        ("others", "others", "others"),
        ("new", "new", "new"),
    ] {
        configure(&place, file, "n1", file, &prefix(name), ANY);
        identify(&place, file, &format!("keys-of-{keys}"));
    }
    place.ok("cluster init --config a.toml");
    place.ok("cluster init --config b.toml");
    // The prefix of one cluster, the keys of another.
    let said = place.fails("node --config mixed.toml", 4);
    for words in
        ["registry.prefix = \"/b/\"", "keys-of-a", "another cluster's", "set the registry and the prefix"]
    {
        assert!(said.contains(words), "{said} says nothing of {words:?}");
    }
    // A prefix with keys of others.
    let said = place.fails("cluster init --config others.toml", 1);
    assert!(said.contains("choose another prefix"), "{said}");
    configure(&place, "others", "n1", "others", &prefix("others"), ANY);
    let said = place.fails("node --config others.toml", 1);
    assert!(said.contains("choose another prefix"), "{said}");
    cluster.kill(0);
    let said = place.fails("cluster init --config new.toml", 5);
    assert!(said.contains("is registry.etcd right?"), "{said}");
}
