//! A cluster of three nodes with identities, as real processes: set up, joined with tokens, and everyone refused who must be.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/hosts.rs"]
mod hosts;

use std::path::Path;
use std::process::{Command, Stdio};

use common::{assert_shape, await_some};
use hosts::{Hosts, Process};
use serde_json::Value;
use weir_cluster::registry::{Registry, Transaction};
use weir_identity::{Authority, ClusterId, Credentials, Key, NODE_LIFETIME, RecordId, Secret, Store, Token};
use weir_node::cluster::records;

/// Changes the registry's record of a token behind the cluster's back.
fn expire(socket: &Path, token: &Token) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let registry = weir_cluster::Client::new(socket, weir_cluster::ClientConfig::default()).unwrap();
        let key = format!("identity/tokens/{}", token.id);
        let entry = registry.get(&key).await.unwrap().unwrap();
        let mut record: Value = serde_json::from_slice(&entry.value).unwrap();
        record["expires"] = (record["made"].as_u64().unwrap() - 1).into();
        let put = Transaction::new().put(key, record.to_string());
        registry.transact(put).await.unwrap();
    });
}

/// Gives host `n`, which has joined, a certificate of which two thirds are over. Returns its serial number.
fn age(hosts: &Hosts, n: usize) -> String {
    let authority = Store::open(&hosts.place.path().join("h1/keys")).unwrap().authority().unwrap();
    let (store, key) =
        (Store::open(&hosts.place.path().join(format!("h{n}/keys"))).unwrap(), Key::generate().unwrap());
    let (name, made) = (format!("n{n}").parse().unwrap(), weir_node::unix_seconds() - NODE_LIFETIME / 3 * 2);
    let hosts_of = [format!("127.0.0.{n}").parse().unwrap()];
    let issued = authority.issue_node(&name, &hosts_of, &key.public(), made, NODE_LIFETIME).unwrap();
    let serial = issued.record.facts.serial;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let socket = hosts.place.path().join("r.sock");
        let registry = weir_cluster::Client::new(&socket, weir_cluster::ClientConfig::default()).unwrap();
        let put = Transaction {
            ops: vec![records::put(RecordId::Issued(serial), issued.record.clone())],
            ..Transaction::new()
        };
        registry.transact(put).await.unwrap();
    });
    store.replace_node(&Credentials::new(key, issued.chain).unwrap()).unwrap();
    serial.to_string()
}

/// Where copies in memory would be slow, a node has started itself again: with the setting, and as the same process.
fn copies_fast(node: &Process) {
    let of = |what: &str| std::fs::read(format!("/proc/{}/{what}", node.0.id())).unwrap();
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let would_be_slow =
        cfg!(target_env = "gnu") && processor.contains("AuthenticAMD") && processor.contains(" erms");
    let environment = of("environ");
    let environment = String::from_utf8_lossy(&environment);
    assert_eq!(environment.contains("glibc.cpu.x86_rep_movsb_threshold="), would_be_slow, "{environment}");
    assert_eq!(of("comm"), b"weir\n");
}

#[test]
fn hosts_join_with_tokens_and_nobody_else_does() {
    let mut hosts = Hosts::new();
    assert!(hosts.place.fails("node --config n1.toml", 3).contains("this host has not joined a cluster"));
    // An attempt that crashed a while ago has left its authority, so that this test can make certificates of the past.
    let past = weir_node::unix_seconds() - NODE_LIFETIME;
    let authority = Authority::create(ClusterId::random().unwrap(), past).unwrap();
    let store = Store::open(&hosts.place.path().join("h1/keys")).unwrap();
    store.note_setup(hosts.place.path().join("r.sock").to_str().unwrap()).unwrap();
    store.create_authority(&authority).unwrap();
    let made = hosts.place.json("cluster init --config n1.toml --host 127.0.0.1");
    assert_eq!(made["node"], "n1");
    assert_shape(&made, "cluster init");
    let again = hosts.place.fails("cluster init --config n2.toml", 4);
    assert!(again.contains("has a certificate authority already") && again.contains("invite"), "{again}");
    assert!(!hosts.place.path().join("h2/keys/ca.pem").exists());
    hosts.start(1);
    await_some("n1 has told where it answers", || hosts.on(1, "cluster invite").then_some(()));
    copies_fast(&hosts.nodes[0]);

    // A token that someone made up, one that has expired, one for another name.
    // Strangers are answered twice a second; this test asks faster.
    let join = |n: usize, token: &str, code: i32| {
        await_some("the host that joins is answered", || {
            let output = hosts.place.weir(&format!("cluster join --config n{n}.toml --token {token}"));
            let said = String::from_utf8(output.stderr).unwrap();
            (!said.contains("too many requests")).then(|| {
                assert_eq!(output.status.code(), Some(code), "{said}");
                said
            })
        })
    };
    let only = hosts.token("--for n2");
    assert!(join(3, &only, 4).contains("the token is for node n2, not for n3"));
    let token = hosts.token("--host 127.0.0.2");
    let real: Token = token.parse().unwrap();
    let guessed = Token { secret: Secret::new([7; 32]), ..real.clone() };
    assert!(join(2, &guessed.text(), 4).contains("the cluster has no such token"));
    assert!(join(2, &token[..60], 2).contains("the token is truncated"));
    let late: Token = hosts.token("").parse().unwrap();
    expire(&hosts.place.path().join("r.sock"), &late);
    assert!(join(3, &late.text(), 4).contains("the token expired"));
    let back: Token = hosts.token("").parse().unwrap();
    let withdrawn = hosts.place.json(&format!("cluster revoke --token {} --api h1/api.sock", back.id));
    assert_shape(&withdrawn, "cluster revoke --token");
    assert!(join(3, &back.text(), 4).contains("the token was withdrawn at"));
    let none = hosts.place.fails("cluster revoke --token 0123456789abcdef --api h1/api.sock", 3);
    assert!(none.contains("there is no token 0123456789abcdef"), "{none}");

    let line = format!("cluster join --config n2.toml --host 127.0.0.2 --token {token}");
    let joined = hosts.place.json(&line);
    assert_eq!(joined["node"], "n2");
    assert_shape(&joined, "cluster join");
    assert!(join(2, &token, 4).contains("this host has joined a cluster already"));
    assert!(join(3, &token, 4).contains("the token was used at"));
    let used = hosts.place.fails(&format!("cluster revoke --token {} --api h1/api.sock", real.id), 4);
    assert!(used.contains("was used by node n2"), "{used}");
    let old = age(&hosts, 2);
    hosts.start(2);
    await_some("n2 has renewed its certificate", || {
        let listed = hosts.place.json("cluster list --api h2/api.sock");
        let is_new =
            |one: &&Value| one["name"] == "n2" && one["state"].as_str().unwrap().starts_with("valid for 8");
        let newest = listed["certificates"].as_array()?.iter().find(is_new).cloned();
        let replaced = |one: &Value| one["serial"] == *old && one["state"] == "replaced";
        newest.filter(|_| listed["certificates"].as_array().unwrap().iter().any(replaced))
    });

    // The third host reaches only the second one, which does not have the authority's key.
    let token = await_some("n2 has told where it answers", || {
        let token: Token = hosts.token("").parse().unwrap();
        (token.endpoints.len() == 2).then(|| token.text().to_string())
    });
    std::fs::write(hosts.place.path().join("token"), &token).unwrap();
    let line = format!("cluster join {} --config n3.toml --token-file token", hosts.address(2));
    assert!(hosts.place.ok(&line).contains("n3 joined cluster"));
    hosts.start(3);
    await_some("three nodes are up", || {
        let status = hosts.place.json("status --api h1/api.sock");
        let up = status["nodes"].as_array()?.iter().filter(|node| node["state"] == "up").count();
        (up == 3).then_some(())
    });
    let nodes = hosts.place.json("cluster list --api h3/api.sock");
    let names: Vec<_> = nodes["certificates"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!(names, ["n1", "n2", "n2", "n2", "n3"], "n2 has joined, aged and renewed");
    assert_shape(&nodes, "cluster list");
    assert_shape(&hosts.place.json("cluster invite --api h1/api.sock"), "cluster invite");
    let member = hosts.place.fails("cluster invite --for N2 --api h1/api.sock", 4);
    assert!(member.contains("is a member already") && member.contains("--readmit"), "{member}");
    hosts.has_audit(1, "a client without a certificate", "POST /v1/cluster/join", "refused", "no such token");
    hosts.has_audit(1, "a client without a certificate", "POST /v1/cluster/join", "done", "");
    hosts.has_audit(1, "node n2", "POST /v1/cluster/join", "done", "");
    hosts.has_audit(1, "user ", "POST /v1/cluster/invite", "done", "");

    roles(&hosts);
    nbd(&hosts);
    revocation(&mut hosts);
    let events = hosts.place.ok("events --api h1/api.sock");
    for kind in [
        "invited",
        "withdrawn",
        "admitted",
        "certificate-renewed",
        "client-admitted",
        "revoked",
        "nbd-refused",
    ] {
        assert!(events.contains(kind), "{kind}: {events}");
    }
    for n in 1..=2 {
        let log = hosts.place.read(&format!("n{n}.log"));
        assert!(!log.contains("panicked"), "n{n}: {log}");
    }
}

/// Clients with a role, over TLS.
fn roles(hosts: &Hosts) {
    let Hosts { place, .. } = hosts;
    let pool = place.pool();
    for role in ["viewer", "operator", "admin"] {
        place.ok(&format!("cluster client {role} --role {role} --directory {role} --api h1/api.sock"));
    }
    let client = place.json("cluster client other --role viewer --directory other --api h1/api.sock");
    assert_shape(&client, "cluster client");
    let again = place.fails("cluster client other --role admin --directory other --api h1/api.sock", 4);
    assert!(again.contains("other/client-key.pem exists"), "{again}");
    let certificates = place.json("cluster list --api h1/api.sock");
    let of_other =
        certificates["certificates"].as_array().unwrap().iter().filter(|one| one["name"] == "other");
    assert_eq!(of_other.count(), 1, "none was issued in vain");
    assert!(place.fails("status --api http://127.0.0.1:1", 2).contains("nodes answer at https://HOST:PORT"));
    let refused = place.fails("cluster client x --role admin --directory x --api h2/api.sock", 4);
    assert!(
        refused.contains("does not have the key") && refused.contains("run the command on n1"),
        "{refused}"
    );
    let api = |n: usize, who: &str| format!("--api https://{} --credentials {who}", hosts.address(n));
    let create = format!("volume create pool --path {}", pool.display());
    for n in 1..=3 {
        place.ok(&format!("status {}", api(n, "viewer")));
    }
    let word = "client viewer (viewer) may not do this: it needs the role operator";
    assert!(place.fails(&format!("{create} {}", api(2, "viewer")), 4).contains(word));
    place.ok(&format!("{create} {}", api(2, "operator")));
    let word = "client operator (operator) may not do this: it needs the role admin";
    assert!(place.fails(&format!("cluster invite {}", api(1, "operator")), 4).contains(word));
    place.ok(&format!("cluster invite {}", api(1, "admin")));
    hosts.has_audit(2, "client viewer (viewer)", "POST /v1/volumes", "refused", "needs the role operator");
    hosts.has_audit(2, "client operator (operator)", "POST /v1/volumes", "done", "");
    hosts.has_audit(1, "client operator", "POST /v1/cluster/invite", "refused", "needs the role admin");
    assert!(hosts.audit(2).iter().all(|line| line["what"] != "GET /v1/status"), "what changes nothing");
    // A revoked client.
    place.ok("cluster revoke viewer --client --yes --api h3/api.sock");
    await_some("the client is refused", || {
        let status = place.weir(&format!("status {}", api(1, "viewer")));
        let said = String::from_utf8_lossy(&status.stderr).into_owned();
        (status.status.code() == Some(4) && said.contains("certificate is revoked")).then_some(())
    });
    hosts.has_audit(1, "unproven", "connect", "refused", "revoked");
}

/// Disks over NBD with TLS, for clients whose certificates name them.
fn nbd(hosts: &Hosts) {
    let Hosts { place, .. } = hosts;
    let both = place.fails("cluster client x --role viewer --export db --directory x --api h1/api.sock", 2);
    assert!(both.contains("cannot be used with"), "{both}");
    place.fails("cluster client x --directory x --api h1/api.sock", 2);
    let early = place.fails("cluster client guest --export db --directory guest --api h1/api.sock", 3);
    assert!(early.contains("there is no disk db"), "{early}");
    let create = |disk: &str| {
        place.ok(&format!(
            "disk create {disk} --volume pool --size 16MiB --policy write-through --api h1/api.sock"
        ));
        place.ok(&format!("disk export {disk} --on n1 --api h1/api.sock"));
    };
    create("db");
    create("other");
    let made = place.json("cluster client guest --export db --directory guest --api h1/api.sock");
    assert_shape(&made, "cluster client");
    let text = place.ok("cluster client late --export db --export other --directory late --api h1/api.sock");
    assert!(text.contains("late may open db, other; its key"), "{text}");
    let status = place.json("status --api h1/api.sock");
    assert_eq!(status["nbd"][0]["plaintext"], false);
    assert_shape(&status, "status");
    assert!(place.ok("status --api h1/api.sock").contains("peers: TLS\nNBD: TLS at 127.0.0.1:0\n"));

    let at_n1 = hosts.export_port(1, "nbds://");
    let uris = place.ok("disk export db --api h1/api.sock");
    assert!(uris.contains(&format!("nbds://127.0.0.1:{at_n1}/db")) && !uris.contains("nbd://"), "{uris}");
    let nbdinfo = |what: &str, uri: &str| Command::new("nbdinfo").args([what, uri]).output().unwrap();
    let files = place.path().join("guest");
    let listed =
        nbdinfo("--list", &format!("nbds://127.0.0.1:{at_n1}/?tls-certificates={}", files.display()));
    let text = String::from_utf8_lossy(&listed.stdout);
    assert!(
        text.contains("export=\"db\"") && !text.contains("other"),
        "{text}{}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let plain = nbdinfo("--size", &format!("nbd://127.0.0.1:{at_n1}/db"));
    assert!(!plain.status.success() && String::from_utf8_lossy(&plain.stderr).contains("TLS"), "{plain:?}");
    await_some("an event says who was refused", || {
        place.ok("events --api h1/api.sock").contains("it asked for an export without TLS").then_some(())
    });

    // A guest that is about to move: on the node that follows its disk it reads through the owner, and its first write moves it.
    place.ok("disk follow db --to n2 --api h1/api.sock");
    let at_n2 = hosts.export_port(2, "nbds://");
    let qemu = |who: &str, port: &str, host: &str, commands: &[&str]| {
        let files = place.path().join(who);
        // A disk that does not move leaves its client waiting.
        let mut command = Command::new("timeout");
        command.args(["60", "qemu-io"]);
        command
            .args(["--object", &format!("tls-creds-x509,id=tls0,dir={},endpoint=client", files.display())]);
        command.args(commands.iter().flat_map(|one| ["-c", one]));
        command.args(["--image-opts", &format!(
            "driver=raw,file.driver=nbd,file.server.type=inet,file.server.host={host},file.server.port={port},file.export=db,\
             file.tls-creds=tls0"
        )]);
        let output = command.output().unwrap();
        (output.status.success(), format!("{output:?}"))
    };
    let (done, said) = qemu("guest", &at_n1, "127.0.0.1", &["write -P 3 0 1M"]);
    assert!(done && !said.contains("rror"), "{said}");
    let (done, said) = qemu(
        "guest",
        &at_n2,
        "127.0.0.2",
        &["read -P 3 0 1M", "write -P 4 64k 64k", "read -P 4 64k 64k", "read -P 3 0 64k"],
    );
    assert!(done && !said.contains("rror") && !said.contains("failed"), "{said}");
    assert_eq!(place.json("disk show db --api h1/api.sock")["owner"], "n2");

    // A revoked client: its open connection ends, and it gets no other.
    let script = "import nbd, sys
h = nbd.NBD()
h.set_uri_allow_local_file(True)
h.connect_uri(sys.argv[1])
while True:
    h.pread(512, 0)
";
    let uri = format!("nbds://127.0.0.2:{at_n2}/db?tls-certificates={}", place.path().join("late").display());
    let mut reader = Command::new("/usr/bin/python3");
    let reader = reader.args(["-c", script, &uri]).stderr(Stdio::null()).spawn().unwrap();
    let mut reader = Process(reader);
    let clients = || place.json("disk show db --api h2/api.sock")["detail"]["clients"].as_u64();
    await_some("it is a client", || clients().filter(|count| *count == 1));
    place.ok("cluster revoke late --client --yes --api h3/api.sock");
    await_some("its connection has ended", || clients().filter(|count| *count == 0));
    assert!(!reader.0.wait().unwrap().success());
    let (done, said) = qemu("late", &at_n2, "127.0.0.2", &["read 0 4k"]);
    assert!(!done, "{said}");
    await_some("the reason is in the log", || {
        let (done, _) = qemu("late", &at_n2, "127.0.0.2", &["read 0 4k"]);
        assert!(!done);
        let log = place.read("n2.log");
        log.lines()
            .any(|line| line.contains("an NBD client was refused") && line.contains("revoked"))
            .then_some(())
    });
    // A certificate is for a disk, not for whichever has its name.
    place.ok("disk delete db --yes --api h1/api.sock");
    create("db");
    let (done, said) = qemu("guest", &at_n1, "127.0.0.1", &["read 0 4k"]);
    assert!(!done && said.contains("an earlier disk of that name"), "{said}");
    for disk in ["db", "other"] {
        place.ok(&format!("disk delete {disk} --yes --api h1/api.sock"));
    }
}

/// A node that does not belong to the cluster any more.
fn revocation(hosts: &mut Hosts) {
    let would = hosts.place.json("cluster revoke n3 --dry-run --api h1/api.sock");
    assert_eq!((&would["done"], &would["certificates"]), (&false.into(), &1.into()));
    assert_shape(&would, "cluster revoke");
    let asked = hosts.place.fails("cluster revoke n3 --api h1/api.sock", 4);
    assert!(asked.contains("would revoke node n3") && asked.contains("--yes"), "{asked}");
    let before = hosts.place.json("cluster list --api h1/api.sock");
    let kinds: Vec<_> = before["revoked"].as_array().unwrap().iter().map(|one| &one["kind"]).collect();
    assert_eq!(kinds, ["client", "client"], "those of before, and not the node: {before}");
    assert_shape(&before, "cluster list");
    let only = hosts.place.fails("cluster revoke n1 --yes --api h1/api.sock", 4);
    assert!(only.contains("only node n1 has the key") && only.contains("--lose-authority"), "{only}");
    // Two names that differ only in case are one.
    hosts.place.ok("cluster revoke N3 --reason stolen --yes --api h1/api.sock");
    hosts.has_audit(1, "user ", "POST /v1/cluster/revoke", "done", "");
    let unknown = hosts.place.fails("cluster revoke nobody --yes --api h1/api.sock", 3);
    assert!(unknown.contains("there is no certificate and no token of node nobody"), "{unknown}");
    // It stops, and nothing is given to it meanwhile.
    await_some("the revocation has reached n1", || {
        hosts.place.read("h1/keys/revoked.json").contains("stolen").then_some(())
    });
    hosts.place.ok("disk create d --volume pool --size 8MiB --policy write-through --api h1/api.sock");
    let refused = hosts.place.fails("disk move d --to n3 --api h1/api.sock", 4);
    assert!(refused.contains("node n3 is revoked"), "{refused}");
    let mut stopped = hosts.nodes.pop().unwrap();
    assert_eq!(stopped.0.wait().unwrap().code(), Some(4));
    let log = hosts.place.read("n3.log");
    assert!(log.contains("n3 was revoked") && log.contains("stolen"), "{log}");
    let again = hosts.place.json("cluster revoke n3 --reason again --yes --api h1/api.sock");
    assert_shape(&again, "cluster revoke");
    assert_eq!(again["earlier"]["reason"], "stolen");
    let list = hosts.place.json("cluster list --api h1/api.sock");
    assert_eq!(list["revoked"][0]["reason"], "stolen", "{list}");
    // It comes back neither with a token for any name nor under its name with a new key.
    hosts.configure(3, "n3", "other-keys");
    let token = hosts.token("");
    let refused = hosts.place.fails(&format!("cluster join --config n3.toml --token {token}"), 4);
    assert!(refused.contains("the name n3 was revoked"), "{refused}");
    let token = hosts.token("--readmit --for n3");
    let revoked = || {
        let list = hosts.place.json("cluster list --api h1/api.sock");
        list["revoked"].as_array().unwrap().iter().any(|one| one["name"] == "n3")
    };
    assert!(revoked(), "a token alone readmits nobody");
    hosts.place.ok(&format!("cluster join --config n3.toml --token {token}"));
    // Its old certificate is of no use, also where its host has forgotten the revocation: the registry has not.
    assert!(!revoked(), "a host has come back under the name");
    hosts.configure(3, "n3", "keys");
    std::fs::remove_file(hosts.place.path().join("h3/keys/revoked.json")).unwrap();
    let refused = hosts.place.fails("node --config n3.toml", 4);
    assert!(refused.contains("revoked") && refused.contains("h3/keys"), "{refused}");
}
