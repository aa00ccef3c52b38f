//! Changes of a disk that is on another host: the operator's own credentials reach its owner, and nothing else does.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/hosts.rs"]
mod hosts;

use common::{assert_shape, await_some};
use hosts::Hosts;

#[test]
fn a_change_goes_to_the_owner_with_the_operators_credentials() {
    let mut hosts = Hosts::apart();
    hosts.place.ok("cluster init --config n1.toml --host 127.0.0.1");
    hosts.start(1);
    await_some("n1 has told where it answers", || hosts.on(1, "cluster invite").then_some(()));
    let token = hosts.token("--for n2 --host 127.0.0.2");
    hosts.place.ok(&format!("cluster join --config n2.toml --host 127.0.0.2 --token {token}"));
    hosts.start(2);
    for role in ["viewer", "operator", "admin"] {
        hosts.place.ok(&format!("cluster client {role} --role {role} --directory {role} --api h1/api.sock"));
    }
    let pool = hosts.place.pool();
    hosts.place.ok(&format!("volume create pool --path {} --api h1/api.sock", pool.display()));
    hosts.place.ok("disk create db --volume pool --size 4MiB --policy write-through --api h1/api.sock");
    hosts.place.ok("disk export db --on n1 --api h1/api.sock");
    await_some("n2 knows where n1's API is, and who owns the disk", || {
        let shown = hosts.place.json("disk show db --api h2/api.sock");
        (shown["owner"] == "n1" && shown["state"] == "serving").then_some(())
    });

    let policy = "disk policy db write-back+1";
    let refused = hosts.place.fails(&format!("{policy} --api h2/api.sock"), 4);
    let at_n1 = format!("--credentials DIR, to have it asked at https://{}", hosts.address(1));
    assert!(refused.contains("disk db is on node n1") && refused.contains(&at_n1), "{refused}");
    let refused = hosts.place.fails(&format!("{policy} --api h2/api.sock --credentials viewer"), 4);
    assert!(
        refused.contains("client viewer (viewer) may not do this: it needs the role operator"),
        "{refused}"
    );

    let from_n2 = "--api h2/api.sock --credentials operator";
    let changed = hosts.place.json(&format!("{policy} {from_n2}"));
    assert_eq!(changed["requested"], "write-back+1", "{changed}");
    assert_shape(&changed, "disk policy");
    assert_eq!(hosts.place.json(&format!("disk resize db 8MiB {from_n2}"))["size_bytes"], 8 << 20);
    let over_tls = format!("--api https://{} --credentials operator", hosts.address(2));
    hosts.place.ok(&format!("disk policy db write-through {over_tls}"));
    let moved = hosts.place.json(&format!("disk move db --to n2 {from_n2}"));
    assert_eq!((&moved["from"], &moved["to"]), (&"n1".into(), &"n2".into()), "{moved}");
    // Now n1 is the one that sends it on.
    hosts.place.ok("disk delete db --yes --api h1/api.sock --credentials operator");
    // What only the node with the authority's key can do.
    let refused = hosts.place.fails("cluster client x --role viewer --directory x --api h2/api.sock", 4);
    assert!(refused.contains("run the command on n1, or with --credentials DIR"), "{refused}");
    hosts.place.ok("cluster client x --role viewer --directory x --api h2/api.sock --credentials admin");

    hosts.has_audit(2, "user ", "POST /v1/disks/db/policy", "redirected", "disk db is on node n1");
    hosts.has_audit(1, "client viewer (viewer)", "POST /v1/disks/db/policy", "refused", "role operator");
    for what in ["policy", "resize", "move"] {
        hosts.has_audit(1, "client operator (operator)", &format!("POST /v1/disks/db/{what}"), "done", "");
    }
    hosts.has_audit(2, "client operator (operator)", "POST /v1/disks/db/delete", "done", "");
    hosts.has_audit(1, "client admin (admin)", "POST /v1/cluster/clients", "done", "");
    // A node's own credentials change nothing there.
    assert!(hosts.audit(1).iter().all(|line| line["who"] != "node n2"
        || line["outcome"] != "done"
        || line["what"] != "POST /v1/disks/db/policy"));
}
