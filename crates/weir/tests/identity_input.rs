//! Identities with wrong input: what `weir cluster init`, `invite` and `join` refuse, and in which words. Nothing is overwritten.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/hosts.rs"]
mod hosts;

use common::await_some;
use hosts::{Hosts, Process};
use weir_cluster::registry::{Entry, Registry, Transaction};
use weir_identity::{
    Authority, ClusterId, Credentials, Fingerprint, Holder, Key, NODE_LIFETIME, Revocations, Store, Token,
};

/// A configuration of host 1 that names another registry.
fn elsewhere(hosts: &Hosts) {
    let text = hosts.place.read("n1.toml").replace("/r.sock", "/other.sock");
    std::fs::write(hosts.place.path().join("other.toml"), text).unwrap();
}

#[test]
fn a_member_does_not_set_up_another_cluster() {
    let hosts = Hosts::new();
    let cluster = hosts.place.json("cluster init --config n1.toml")["cluster"].as_str().unwrap().to_owned();
    let files = ["ca.pem", "node.pem", "trust.pem", "revoked.json"];
    let read = || files.map(|name| hosts.place.read(&format!("h1/keys/{name}")));
    let before = read();
    elsewhere(&hosts);
    // No registry is there: none is asked.
    let refused = hosts.place.fails("cluster init --config other.toml", 4);
    let words = format!("this host is node n1 of cluster {cluster} already");
    assert!(refused.contains(&words) && refused.contains("registry.prefix"), "{refused}");
    let _other = Process::start(&hosts.place, "registry --socket other.sock --file other.db", "other.log");
    await_some("the other registry answers", || hosts.place.path().join("other.sock").exists().then_some(()));
    hosts.place.fails("cluster init --config other.toml", 4);
    assert_eq!(read(), before);
    let _node = Process::start(&hosts.place, "node --config other.toml", "other-node.log");
    let words = format!("node n1 is a member of cluster {cluster}");
    await_some("the node says that this is not its cluster", || {
        let said = hosts.place.read("other-node.log");
        (said.contains(&words) && said.contains("the registry has no cluster with identities")).then_some(())
    });
    // It waits, says so to whoever asks, and founds nothing there.
    let refused = await_some("the node answers", || {
        let said = String::from_utf8(hosts.place.weir("status --api h1/api.sock").stderr).unwrap();
        said.contains("no cluster with identities").then_some(said)
    });
    assert!(refused.contains(&words) && refused.contains("registry.prefix"), "{refused}");
    assert!(!refused.contains("cluster init"), "`init` is no remedy: {refused}");
    assert_eq!(read(), before);
    assert_eq!(copy(&hosts, "other.sock", None), 0);
    // Its content is restored from a backup.
    assert!(copy(&hosts, "r.sock", Some("other.sock")) > 2);
    await_some("the node is in its cluster", || hosts.on(1, "status").then_some(()));
    assert_eq!(hosts.place.json("status --api h1/api.sock")["health"]["level"], "ok");
}

/// Copies a registry's records to another one. Returns their number.
fn copy(hosts: &Hosts, from: &str, to: Option<&str>) -> usize {
    let open = |name: &str| {
        let socket = hosts.place.path().join(name);
        weir_cluster::Client::new(&socket, weir_cluster::ClientConfig::default()).unwrap()
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let entries = open(from).list("").await.unwrap().entries;
        if let Some(to) = to {
            let put = |all: Transaction, entry: &Entry| all.put(entry.key.clone(), entry.value.clone());
            open(to).transact(entries.iter().fold(Transaction::new(), put)).await.unwrap();
        }
        entries.len()
    })
}

#[test]
fn a_node_without_identity_is_no_member_of_a_cluster_with_identities() {
    let hosts = Hosts::new();
    hosts.place.ok("cluster init --config n1.toml");
    let root = hosts.place.path().display();
    let text = format!(
        "name = \"n2\"\nstate_dir = \"{root}/h2\"\n[registry]\nsocket = \"{root}/r.sock\"\n[peers]\nlisten = \"127.0.0.2:0\"\n\
         [resources]\nbuffers = \"64 MiB\"\nlog = \"64 MiB\"\n"
    );
    std::fs::write(hosts.place.path().join("plain.toml"), text).unwrap();
    let refused = hosts.place.fails("node --config plain.toml", 4);
    assert!(refused.contains("has identities, and this node has none"), "{refused}");
    assert!(refused.contains("r.sock") && refused.contains("weir cluster join"), "{refused}");
}

#[test]
fn a_certificate_that_others_refuse_is_in_the_health_line() {
    let mut hosts = Hosts::new();
    hosts.place.ok("cluster init --config n1.toml");
    let store = Store::open(&hosts.place.path().join("h1/keys")).unwrap();
    let (key, later) = (Key::generate().unwrap(), weir_node::unix_seconds() + 7_200);
    let name = "n1".parse().unwrap();
    let issued =
        store.authority().unwrap().issue_node(&name, &[], &key.public(), later, NODE_LIFETIME).unwrap();
    store.replace_node(&Credentials::new(key, issued.chain).unwrap()).unwrap();
    hosts.start(1);
    let health = hosts.place.json("status --api h1/api.sock")["health"].to_string();
    assert!(health.contains("the other nodes refuse node n1: the certificate of n"), "{health}");
    let refused = hosts.place.fails("cluster invite --api h1/api.sock", 4);
    assert!(refused.contains("is not valid before") && !refused.contains("api.listen"), "{refused}");
}

#[test]
fn a_token_file_without_a_token_is_named() {
    let hosts = Hosts::new();
    let path = |name: &str| hosts.place.path().join(name);
    std::fs::write(path("empty"), "\n").unwrap();
    std::fs::write(path("binary"), [0xff, 0, 0xfe]).unwrap();
    std::fs::write(path("text"), "hello").unwrap();
    std::fs::create_dir(path("directory")).unwrap();
    for (name, why) in [
        ("empty", "it is empty"),
        ("binary", "it is no text"),
        ("text", "not a join token"),
        ("directory", "Is a directory"),
        ("missing", "No such file"),
    ] {
        let said = hosts.place.fails(&format!("cluster join --config n2.toml --token-file {name}"), 2);
        assert!(said.contains(&format!("--token-file {name}: ")) && said.contains(why), "{said}");
        assert!(said.contains("weir cluster invite"), "{said}");
    }
    assert!(!path("h2/keys").exists());
}

#[test]
fn nobody_is_invited_whom_no_node_could_admit() {
    let mut hosts = Hosts::new();
    hosts.place.ok("cluster init --config n1.toml --host 127.0.0.1");
    hosts.start(1);
    await_some("n1 has told where it answers", || hosts.on(1, "cluster invite").then_some(()));
    let token = hosts.token("--for n2");
    let invite = "cluster invite --api h1/api.sock";
    // Strangers are answered once a second.
    let join = |token: &str, code: i32, word: &str| {
        await_some("the host that joins is answered", || {
            let line = format!("cluster join --config n2.toml --token {token}");
            let said = hosts.place.fails(&line, code);
            let is_limited = said.contains("too many requests");
            if is_limited {
                assert!(said.contains("try again in 1 s") && !said.contains("reachable from here"), "{said}");
            }
            (!is_limited).then(|| assert!(said.contains(word), "{said:?} says nothing of {word:?}"))
        });
    };
    let real: Token = token.parse().unwrap();
    let other = Token { pins: vec![Fingerprint([7; 32])], ..real };
    join(&other.text(), 4, "has an authority that the token does not name");
    assert!(!hosts.place.path().join("h2/keys/node.pem").exists());

    // What this host trusted in another cluster.
    let other = Authority::create(ClusterId::random().unwrap(), weir_node::unix_seconds()).unwrap();
    let trust = hosts.place.path().join("h2/keys/trust.pem");
    let pem = other.certificate().pem();
    std::fs::write(&trust, &pem).unwrap();
    join(&token, 4, &format!("trust.pem is that of cluster {}", other.certificate().cluster()));
    assert_eq!(std::fs::read_to_string(&trust).unwrap(), pem);
    // That of an interrupted attempt is no obstacle.
    std::fs::copy(hosts.place.path().join("h1/keys/trust.pem"), &trust).unwrap();

    // A registry where no cluster is, and one that does not answer: with that one, the token decides.
    let text = hosts.place.read("n2.toml").replace("/r.sock", "/other.sock");
    std::fs::write(hosts.place.path().join("elsewhere.toml"), text).unwrap();
    let registry = Process::start(&hosts.place, "registry --socket other.sock --file other.db", "other.log");
    await_some("the other registry answers", || hosts.place.path().join("other.sock").exists().then_some(()));
    let line = format!("cluster join --config elsewhere.toml --token {token}");
    let refused = hosts.place.fails(&line, 4);
    assert!(refused.contains("other.sock, has no cluster with identities"), "{refused}");
    drop(registry);

    let ca = hosts.place.path().join("h1/keys/ca.pem");
    let whole = std::fs::read(&ca).unwrap();
    std::fs::write(&ca, &whole[..whole.len() / 2]).unwrap();
    let refused = hosts.place.fails(invite, 4);
    let words = [
        "no host could join with a token",
        "h1/keys/ca.pem is damaged",
        "is missing, so the file is truncated",
    ];
    assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
    let place = format!("{}: this node cannot use the key of the certificate authority", hosts.address(1));
    join(&token, 5, &place);
    std::fs::rename(&ca, ca.with_extension("away")).unwrap();
    assert!(hosts.place.fails(invite, 4).contains("restore ca.pem in identity.directory"));
    join(&token, 5, "no node has the key of the certificate authority");
    join(&token, 5, "restore ca.pem in identity.directory");

    drop(hosts.nodes.pop());
    hosts.start(1);
    await_some("the node says that it cannot sign", || {
        hosts.place.read("n1.log").contains("this node can sign no certificate").then_some(())
    });
    std::fs::rename(ca.with_extension("away"), &ca).unwrap();
    std::fs::write(&ca, &whole).unwrap();
    hosts.place.ok(invite);
    // A former node of that name was revoked; this one was invited.
    let (store, name) = (Store::open(&hosts.place.path().join("h2/keys")).unwrap(), "n2".parse().unwrap());
    let former = Revocations::default().with_name(Holder::Node, &name, [], "stolen", 1);
    store.replace_revocations(&former).unwrap();
    hosts.place.ok(&format!("cluster join --config n2.toml --token {token}"));
    assert!(!store.revocations().unwrap().names_node(&name));
}
