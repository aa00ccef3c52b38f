//! The cluster's authority is replaced while three nodes run and a load writes, as real processes.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/hosts.rs"]
mod hosts;

use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use common::{assert_shape, await_some};
use hosts::Hosts;
use serde_json::Value;

const AT_N1: &str = "--api h1/api.sock";

/// A verifying load on disk `db`, with a record of what was acknowledged.
struct Load(Child, Lines<BufReader<ChildStdout>>);

impl Load {
    fn start(hosts: &Hosts) -> Load {
        let socket = hosts.place.path().join("h1/nbd.sock");
        let line = format!(
            "bench nbd+unix:///db?socket={} --rw randwrite --bs 4k --qd 4 --rate 400 --verify --history record --runtime 1h \
             --warmup 0s --destroy --format jsonl",
            socket.display()
        );
        let mut load =
            hosts.place.command(&line).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(load.stdout.take().unwrap()).lines();
        let mut load = Load(load, lines);
        load.goes_on();
        load
    }

    fn goes_on(&mut self) {
        let line = self.1.next().expect("the load runs").unwrap();
        assert!(line.contains("interval"), "{line}");
    }

    /// Ends the load, and holds the disk against its record.
    fn verify(mut self, hosts: &Hosts) {
        assert_eq!(self.0.try_wait().unwrap(), None, "the load has met an error");
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        let uris = hosts.place.ok(&format!("disk export db {AT_N1}"));
        let uri = uris.lines().find(|uri| uri.starts_with("nbd+unix")).unwrap();
        let found = hosts.place.json(&format!("bench verify --history record {uri}"));
        assert_eq!(found["verification"]["mismatches"], 0, "{found}");
        assert!(found["writes"].as_u64().unwrap() > 1000, "{found}");
    }
}

fn list(hosts: &Hosts) -> Value {
    hosts.place.json(&format!("cluster list {AT_N1}"))
}

/// The names of those for whom the rotation waits, by kind.
fn waits(view: &Value, kind: &str) -> Vec<String> {
    let all = view["waits_for"].as_array().unwrap().iter();
    all.filter(|one| one["kind"] == kind).map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

fn in_phase(hosts: &Hosts, phase: &str) -> Option<Value> {
    let rotation = list(hosts)["rotation"].clone();
    (rotation["phase"] == phase).then_some(rotation)
}

/// Kills the node of host `n`, and waits until the others know.
fn kill(hosts: &mut Hosts, n: usize) {
    hosts.nodes.remove(n - 1);
    let asked = if n == 1 { 2 } else { 1 };
    await_some("it is down", || {
        let shown = hosts.place.json(&format!("node show n{n} --api h{asked}/api.sock"));
        shown["node"]["peer_address"].is_null().then_some(())
    });
}

fn start_again(hosts: &mut Hosts, n: usize) {
    hosts.start(n);
    let node = hosts.nodes.pop().unwrap();
    hosts.nodes.insert(n - 1, node);
}

fn cluster_of_three() -> Hosts {
    let mut hosts = Hosts::new();
    hosts.place.ok("cluster init --config n1.toml --host 127.0.0.1");
    hosts.start(1);
    await_some("n1 has told where it answers", || hosts.on(1, "cluster invite --ttl 1min").then_some(()));
    for n in 2..=3 {
        let token = hosts.token(&format!("--for n{n} --host 127.0.0.{n}"));
        hosts.place.ok(&format!("cluster join --config n{n}.toml --host 127.0.0.{n} --token {token}"));
        hosts.start(n);
    }
    // Those that nobody uses hold a rotation back.
    let tokens = list(&hosts)["tokens"].as_array().unwrap().clone();
    for token in tokens.iter().filter(|one| one["state"] == "open") {
        hosts.place.ok(&format!("cluster revoke --token {} {AT_N1}", token["id"].as_str().unwrap()));
    }
    hosts
}

#[test]
fn the_authority_is_replaced_under_load() {
    let mut hosts = cluster_of_three();
    before_it_signs(&mut hosts);
    let pool = hosts.place.pool();
    hosts.place.ok(&format!("volume create pool --path {} {AT_N1}", pool.display()));
    hosts.place.ok(&format!("disk create db --volume pool --size 16MiB --policy write-back+1 {AT_N1}"));
    hosts.place.ok(&format!("disk export db --on n1 {AT_N1}"));
    hosts.place.ok(&format!("cluster client eve --role admin --directory eve {AT_N1}"));
    hosts.place.ok(&format!("cluster client guest --export db --directory guest {AT_N1}"));
    let mut load = Load::start(&hosts);
    overlap(&mut hosts);
    load.goes_on();
    finish(&hosts);
    load.goes_on();
    left_behind(&mut hosts);
    load.goes_on();
    load.verify(&hosts);
    let events = hosts.place.ok(&format!("events {AT_N1}"));
    for kind in [
        "rotation-begun",
        "rotation-abandoned",
        "rotation-renewing",
        "certificate-renewed",
        "rotation-finished",
    ] {
        assert!(events.contains(kind), "{kind}: {events}");
    }
    hosts.has_audit(1, "user ", "POST /v1/cluster/rotate", "done", "");
    hosts.has_audit(2, "user ", "POST /v1/cluster/rotate", "redirected", "does not have the key");
    for n in 1..=3 {
        let log = hosts.place.read(&format!("n{n}.log"));
        assert!(!log.contains("panicked"), "n{n}: {log}");
    }
}

/// Nothing is signed before everyone trusts the new authority: also after a crash, and until it is taken back.
fn before_it_signs(hosts: &mut Hosts) {
    let refused = hosts.place.fails("cluster rotate --api h2/api.sock", 4);
    assert!(
        refused.contains("does not have the key") && refused.contains("run the command on n1"),
        "{refused}"
    );
    let none = hosts.place.fails(&format!("cluster rotate --finish {AT_N1}"), 4);
    assert!(none.contains("no rotation of the certificate authority is under way"), "{none}");
    let token = hosts.token("--for n4");
    kill(hosts, 3);
    let would = hosts.place.json(&format!("cluster rotate --dry-run {AT_N1}"));
    assert_shape(&would, "cluster rotate --dry-run");
    assert_eq!((&would["phase"], &would["done"]), (&"settled".into(), &false.into()));
    assert_eq!((waits(&would, "node"), waits(&would, "token").len()), (vec!["n3".to_owned()], 1), "{would}");
    assert!(!hosts.place.path().join("h1/keys/ca-next.pem").exists());

    let begun = hosts.place.json(&format!("cluster rotate --no-wait {AT_N1}"));
    assert_shape(&begun, "cluster rotate");
    assert_eq!(begun["phase"], "introducing", "{begun}");
    let next = begun["other"].clone();
    // The host of the key crashes.
    kill(hosts, 1);
    start_again(hosts, 1);
    await_some("the nodes that run trust it", || {
        let rotation = in_phase(hosts, "introducing")?;
        (waits(&rotation, "node") == ["n3"]).then_some(())
    });
    let held = hosts.place.fails(&format!("cluster rotate --finish {AT_N1}"), 4);
    assert!(
        held.contains("does not sign yet: node n3 (it does not trust the new authority yet), token"),
        "{held}"
    );
    let again = hosts.place.json(&format!("cluster rotate --no-wait {AT_N1}"));
    assert_eq!(
        (&again["phase"], &again["other"]),
        (&"introducing".into(), &next),
        "it goes on with the same one"
    );
    let back = hosts.place.json(&format!("cluster rotate --abandon {AT_N1}"));
    assert_eq!((&back["phase"], &back["authority"]), (&"settled".into(), &begun["authority"]));
    assert!(!hosts.place.path().join("h1/keys/ca-next.pem").exists());
    let token: weir_identity::Token = token.parse().unwrap();
    hosts.place.ok(&format!("cluster revoke --token {} {AT_N1}", token.id));
    start_again(hosts, 3);
}

/// Both authorities are trusted, and clients with files of before connect.
fn overlap(hosts: &mut Hosts) {
    // A node that is down when the rotation begins holds it back, and follows when it is there again.
    kill(hosts, 3);
    let begun = hosts.place.json(&format!("cluster rotate --no-wait {AT_N1}"));
    assert_eq!(begun["phase"], "introducing", "{begun}");
    await_some("only n3 is left", || {
        (waits(&in_phase(hosts, "introducing")?, "node") == ["n3"]).then_some(())
    });
    start_again(hosts, 3);
    let rotation = await_some("all nodes have new certificates", || {
        in_phase(hosts, "renewing").filter(|it| waits(it, "node").is_empty())
    });
    assert_eq!(rotation["authority"], begun["other"]);
    assert_eq!(waits(&rotation, "client"), ["eve", "guest"], "{rotation}");
    assert_shape(&list(hosts), "cluster list");
    let text = hosts.place.ok(&format!("cluster list {AT_N1}"));
    assert!(text.contains("; former authority") && text.contains("phase      renewing"), "{text}");
    assert!(text.contains("client eve: it has a certificate of the former authority, until 20"), "{text}");
    let path = |name: &str| hosts.place.path().join("h1/keys").join(name);
    assert!(path("ca.pem").exists() && path("node-former.pem").exists() && !path("ca-next.pem").exists());
    for n in 1..=3 {
        hosts.place.ok(&format!("status --api https://{} --credentials eve", hosts.address(n)));
    }
    assert!(nbd(hosts, "guest"), "a guest with its files of before");
    let held = hosts.place.fails(&format!("cluster rotate --finish {AT_N1}"), 4);
    assert!(held.contains("in use: client eve") && held.contains("weir cluster client"), "{held}");
    let late = hosts.place.fails(&format!("cluster rotate --abandon {AT_N1}"), 4);
    assert!(late.contains("signs already"), "{late}");
}

/// Whether a client of the disk's export with the files in `directory` is let in.
fn nbd(hosts: &Hosts, directory: &str) -> bool {
    let port = hosts.export_port(1, "nbds://");
    let files = hosts.place.path().join(directory);
    let uri = format!("nbds://127.0.0.1:{port}/db?tls-certificates={}", files.display());
    Command::new("nbdinfo").args(["--size", &uri]).output().unwrap().status.success()
}

/// The former authority is removed once the clients have new certificates.
fn finish(hosts: &Hosts) {
    hosts.place.ok(&format!("cluster client eve --role admin --directory eve2 {AT_N1}"));
    hosts.place.ok(&format!("cluster client guest --export db --directory guest2 {AT_N1}"));
    assert!(nbd(hosts, "guest2"), "its files name both");
    // Nodes still show the former certificate, as whoever has stolen its key could: such a node does not say whom to trust.
    let api = format!("--api https://{} --credentials eve2", hosts.address(2));
    hosts.place.ok(&format!("status {api}"));
    let refused = hosts.place.fails(&format!("cluster trust --directory eve2 {api}"), 4);
    assert!(refused.contains("authority"), "{refused}");
    let end = hosts.place.json(&format!("cluster rotate --finish {AT_N1}"));
    assert_shape(&end, "cluster rotate --finish");
    assert_eq!((&end["phase"], &end["other"]), (&"settled".into(), &Value::Null));
    assert_eq!(list(hosts)["rotation"], Value::Null);
    let api = |n: usize| format!("status --api https://{}", hosts.address(n));
    for n in 1..=3 {
        await_some("the former certificate is of no use", || {
            let refused = hosts.place.weir(&format!("{} --credentials eve", api(n)));
            (refused.status.code() == Some(4)).then_some(())
        });
        hosts.place.ok(&format!("{} --credentials eve2", api(n)));
        await_some("the former credentials are gone", || {
            let former = hosts.place.path().join(format!("h{n}/keys/node-former.pem"));
            (!former.exists()).then_some(())
        });
    }
    assert!(!nbd(hosts, "guest") && nbd(hosts, "guest2"));
    forget_the_former(hosts, &end["authority"]);
    await_some("the nodes are connected again", || {
        let shown = hosts.place.json(&format!("disk show db {AT_N1}"));
        (shown["effective"] == "write-back+1" && shown["state"] == "serving").then_some(())
    });
}

/// Files that were made during the rotation trust the former authority until they are told.
fn forget_the_former(hosts: &Hosts, authority: &Value) {
    let path = hosts.place.path();
    let file = |name: &str| std::fs::read_to_string(path.join(name).join("ca-cert.pem")).unwrap();
    let count = |name: &str| file(name).matches("BEGIN CERTIFICATE").count();
    assert_eq!((count("guest2"), count("eve2")), (2, 2));
    let trusts = hosts.place.json(&format!("cluster trust --directory guest2 {AT_N1}"));
    assert_shape(&trusts, "cluster trust");
    assert_eq!(trusts["authorities"], Value::from(vec![authority.clone()]));
    assert_eq!(trusts["removed"].as_array().unwrap().len(), 1);
    // Over the API, with the files themselves.
    let api = format!("--api https://{} --credentials eve2", hosts.address(2));
    hosts.place.ok(&format!("cluster trust --directory eve2 {api}"));
    let again = hosts.place.ok(&format!("cluster trust --directory eve2 {api}"));
    assert!(again.contains("nothing"), "{again}");
    assert_eq!((count("guest2"), count("eve2")), (1, 1));
    let mode = std::fs::metadata(path.join("guest2/ca-cert.pem")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    assert!(nbd(hosts, "guest2"));
    hosts.place.ok(&format!("status {api}"));
    // Files of before are those of no client of the cluster: their own authority is not removed from them.
    let before = file("guest");
    let refused = hosts.place.fails(&format!("cluster trust --directory guest {AT_N1}"), 4);
    assert!(refused.contains("nothing was changed") && refused.contains("weir cluster client"), "{refused}");
    assert_eq!(file("guest"), before);
}

/// A node that was away during a whole rotation, because an operator did not wait for it.
fn left_behind(hosts: &mut Hosts) {
    kill(hosts, 3);
    // An operator goes on without n3.
    let forced = hosts.place.json(&format!("cluster rotate --force {AT_N1}"));
    assert_eq!(forced["phase"], "renewing", "{forced}");
    await_some("the others have new certificates", || {
        (waits(&in_phase(hosts, "renewing")?, "node") == ["n3"]).then_some(())
    });
    let held = hosts.place.fails(&format!("cluster rotate --finish {AT_N1}"), 4);
    assert!(held.contains("node n3 (it has a certificate of the former authority)"), "{held}");
    hosts.place.ok(&format!("cluster rotate --finish --force {AT_N1}"));
    for _ in 0..2 {
        let said = hosts.place.fails("node --config n3.toml", 4);
        assert!(
            said.contains("a rotation has removed that authority") && said.contains("--readmit --for n3"),
            "{said}"
        );
    }
    hosts.place.ok(&format!("cluster revoke n3 --yes {AT_N1}"));
    let token = hosts.token("--readmit --for n3 --host 127.0.0.3");
    std::fs::rename(hosts.place.path().join("h3/keys"), hosts.place.path().join("h3/former-keys")).unwrap();
    hosts.place.ok(&format!("cluster join --config n3.toml --host 127.0.0.3 --token {token}"));
    start_again(hosts, 3);
}
