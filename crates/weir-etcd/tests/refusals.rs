//! Refusals and their messages: wrong certificates, passwords and prefixes, and an etcd whose data was replaced.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use etcd_client::{Client, DeleteOptions, GetOptions, Permission, PermissionType};
use support::relay::Relay;
use support::{Authority, Cluster};
use weir_cluster::registry::{LeaseId, Registry, RegistryError, Transaction};
use weir_etcd::{Etcd, EtcdConfig, TlsFiles, UserFile};

/// Every method fails, as an error for the operator with these words.
async fn refused(config: EtcdConfig, words: &[&str]) {
    let registry = Etcd::new(config).unwrap();
    let lease = LeaseId(9);
    let start = Instant::now();
    for error in [
        registry.get("k").await.unwrap_err(),
        registry.list("").await.unwrap_err(),
        registry.transact(Transaction::new().put("k", "")).await.unwrap_err(),
        registry.watch("", 0).await.unwrap_err(),
        registry.grant(Duration::from_secs(1)).await.unwrap_err(),
        registry.keep_alive(lease).await.unwrap_err(),
        registry.revoke(lease).await.unwrap_err(),
    ] {
        assert!(matches!(error, RegistryError::Setup { .. }), "{error:?}");
        for word in words {
            assert!(error.to_string().contains(word), "{error} says nothing of {word:?}");
        }
    }
    // Not by waiting for the deadline.
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// All of etcd.
async fn content(client: &mut Client) -> Vec<(Vec<u8>, Vec<u8>)> {
    let all = client.get("", Some(GetOptions::new().with_all_keys())).await.unwrap();
    all.kvs().iter().map(|entry| (entry.key().to_vec(), entry.value().to_vec())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_and_silent_endpoints_at_the_start() {
    let cluster = Cluster::one().await;
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    // Accepts connections, and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let alive = cluster.endpoint(0);
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let dead = format!("http://{dead}");
    for (endpoints, limit) in [
        (vec![dead.clone(), alive.clone()], Duration::from_millis(900)),
        (vec![silent.clone(), alive.clone()], Duration::from_millis(2500)),
        (vec![dead.clone(), silent.clone(), alive], Duration::from_millis(2500)),
    ] {
        let start = Instant::now();
        let registry = Etcd::new(EtcdConfig { endpoints, ..cluster.config("r") }).unwrap();
        registry.transact(Transaction::new().put("k", "")).await.unwrap();
        let first = start.elapsed();
        assert!(first < limit, "{first:?}");
        registry.transact(Transaction::new().put("k", "")).await.unwrap();
        assert!(
            start.elapsed() - first < Duration::from_millis(500),
            "the next call asks the good endpoint first"
        );
    }
    let config = EtcdConfig { endpoints: vec![dead.clone(), silent.clone()], ..cluster.config("r") };
    let none = Etcd::new(EtcdConfig { request_timeout: Duration::from_secs(2), ..config }).unwrap();
    let start = Instant::now();
    let error = none.get("k").await.unwrap_err();
    assert!(matches!(error, RegistryError::Unavailable { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_millis(2500), "{:?}", start.elapsed());
    let refused = format!("{dead}: ");
    for words in [&*refused, "Connection refused", &silent, "is registry.etcd right?"] {
        assert!(error.to_string().contains(words), "{error} says nothing of {words:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_certificates() {
    let cluster = Cluster::with(1, true, &[]).await;
    let other = Authority::new(&cluster.directory().join("other"));
    let good = cluster.tls().unwrap();
    let with = |tls: TlsFiles| EtcdConfig { tls: Some(tls), ..cluster.config("r") };
    cluster.registry("r").list("").await.unwrap();
    // etcd proves its identity with a certificate of another CA.
    refused(
        with(TlsFiles { ca: other.files().ca, ..good.clone() }),
        &["UnknownIssuer", "registry.ca did not sign etcd's certificate"],
    )
    .await;
    // This client does.
    refused(
        with(TlsFiles { identity: other.files().identity, ..good.clone() }),
        &["alert", "etcd refuses this host's certificate", "registry.certificate"],
    )
    .await;
    // This client has none.
    let words = ["alert", "etcd refuses this host's certificate", "registry.certificate"];
    refused(with(TlsFiles { identity: None, ..good.clone() }), &words).await;
    // The key does not belong to the certificate.
    let (certificate, key) = (good.identity.clone().unwrap().0, other.files().identity.unwrap().1);
    let error = Etcd::new(with(TlsFiles { identity: Some((certificate, key)), ..good })).unwrap_err();
    assert!(error.to_string().contains("registry.key"), "{error}");
    assert!(!error.to_string().contains("peer"), "no peer has shown anything: {error}");
    // The address is not in etcd's certificate.
    let relay = Relay::to(cluster.socket(0)).await;
    let endpoints = vec![format!("https://127.0.0.1:{}", relay.port)];
    refused(
        EtcdConfig { endpoints, ..cluster.config("r") },
        &["not valid for name", "127.0.0.1", "does not name the host in registry.etcd"],
    )
    .await;
    // Without TLS to a port with TLS.
    let endpoints = vec![cluster.endpoint(0).replace("https", "http")];
    // Long enough for one whole attempt on a busy machine: one that the deadline cuts short gives no reason.
    let request_timeout = Duration::from_secs(2);
    let plain = EtcdConfig { endpoints, request_timeout, tls: None, ..cluster.config("r") };
    let error = Etcd::new(plain).unwrap().list("").await.unwrap_err();
    assert!(matches!(error, RegistryError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("the scheme (http:// or https://)"), "{error}");
    // With TLS to a port without.
    let open = Cluster::one().await;
    let endpoints = vec![open.endpoint(0).replace("http", "https")];
    let config = EtcdConfig { endpoints, request_timeout, ..cluster.config("r") };
    let error = Etcd::new(config).unwrap().list("").await.unwrap_err();
    assert!(error.to_string().contains("the scheme (http:// or https://)"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_passwords_and_missing_permissions() {
    let cluster = Cluster::one().await;
    let mut admin = cluster.admin(0).await;
    for (user, role) in [("root", "root"), ("weir", "weir"), ("guest", "guest")] {
        admin.user_add(user, "secret", None).await.unwrap();
        admin.role_add(role).await.unwrap();
        admin.user_grant_role(user, role).await.unwrap();
    }
    let permission = Permission::new(PermissionType::Readwrite, "/weir/").with_prefix();
    admin.role_grant_permission("weir", permission).await.unwrap();
    admin.auth_enable().await.unwrap();
    let user = |name: &str, password: &str| {
        let file = cluster.directory().join(format!("{name}-{password}"));
        std::fs::write(&file, format!("{password}\n")).unwrap();
        EtcdConfig { user: Some(UserFile { name: name.into(), password: file }), ..cluster.config("weir") }
    };
    refused(user("weir", "wrong"), &["user or the password", "registry.password_file"]).await;
    refused(user("nobody", "secret"), &["user or the password", "registry.user"]).await;
    refused(cluster.config("weir"), &["requires a user"]).await;
    refused(user("guest", "secret"), &["permission denied", "registry.prefix"]).await;
    // Sufficient: read and write under the prefix.
    let registry = Etcd::new(user("weir", "secret")).unwrap();
    let lease = registry.grant(Duration::from_secs(5)).await.unwrap();
    registry.transact(Transaction::new().put_leased("k", "1", lease)).await.unwrap();
    let start = registry.list("").await.unwrap();
    let mut watch = registry.watch("", start.revision).await.unwrap();
    // A token that etcd has forgotten is replaced.
    let mut root = user_client(&cluster).await;
    root.user_change_password("guest", "other").await.unwrap();
    registry.transact(Transaction::new().put("l", "2")).await.unwrap();
    registry.keep_alive(lease).await.unwrap();
    assert_eq!(watch.next().await.unwrap().change.key(), "l");
    registry.revoke(lease).await.unwrap();
    root.auth_disable().await.unwrap();
    refused(user("weir", "secret"), &["authentication is not enabled", "registry.user"]).await;
}

async fn user_client(cluster: &Cluster) -> Client {
    let options = etcd_client::ConnectOptions::new().with_user("root", "secret");
    Client::connect([cluster.endpoint(0)], Some(options)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn prefixes_with_other_keys() {
    let cluster = Cluster::one().await;
    let mut admin = cluster.admin(0).await;
    admin.put("/others/app/config", "x", None).await.unwrap();
    admin.put("/later/weir-registry", "{\"format\":2,\"registry\":\"ab\"}", None).await.unwrap();
    admin.put("/strange/weir-registry", "x", None).await.unwrap();
    cluster.registry("weir/a").transact(Transaction::new().put("k", "1")).await.unwrap();
    let before = content(&mut admin).await;
    for (name, words) in [
        ("others", &["/others/", "/others/app/config", "another prefix"][..]),
        ("others/app", &["/others/app/config"]),
        ("later", &["format 2"]),
        ("strange", &["/strange/weir-registry", "did not write"]),
        ("weir", &["/weir/", "not a registry of Weir", "/weir/a/"]),
        ("weir/a/keys", &["/weir/a/keys/", "inside another registry", "/weir/a/weir-registry"]),
        ("weir/a/more", &["inside another registry"]),
    ] {
        refused(cluster.config(name), words).await;
    }
    // To ask whether a registry is there sets none up.
    assert!(!cluster.registry("empty").is_set_up().await.unwrap());
    assert!(cluster.registry("weir/a").is_set_up().await.unwrap());
    assert!(cluster.registry("weir/a/more").is_set_up().await.is_err());
    assert_eq!(content(&mut admin).await, before, "nothing was overwritten");
    // Neighbours are no problem, and each sees its own keys.
    cluster.registry("weir/b").transact(Transaction::new().put("k", "2")).await.unwrap();
    assert_eq!(cluster.registry("weir/a").list("").await.unwrap().entries.len(), 1);
    assert_eq!(cluster.registry("weir/b").get("k").await.unwrap().unwrap().value, b"2");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_first_calls_set_up_one_registry() {
    let cluster = Cluster::one().await;
    let calls = (0..16).map(|number| {
        let registry = cluster.registry("r");
        tokio::spawn(async move { registry.transact(Transaction::new().put(format!("k{number}"), "")).await })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap().unwrap();
    }
    assert_eq!(cluster.registry("r").list("").await.unwrap().entries.len(), 16);
}

/// An etcd that was wiped, and another one at the same address, are not the registry that this process knows.
#[tokio::test(flavor = "multi_thread")]
async fn a_wiped_etcd() {
    let mut cluster = Cluster::one().await;
    let registry = cluster.registry("r");
    registry.transact(Transaction::new().put("k", "1")).await.unwrap();
    cluster.kill(0);
    cluster.wipe(0);
    cluster.start().await;
    let words = ["weir-registry is no longer in etcd", "nothing was changed", "restart this process"];
    for error in [
        registry.get("k").await.unwrap_err(),
        registry.list("").await.unwrap_err(),
        registry.transact(Transaction::new().put("k", "2")).await.unwrap_err(),
        registry.watch("", 1).await.unwrap_err(),
    ] {
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    }
    cluster.registry("r").transact(Transaction::new().put("k", "3")).await.unwrap();
    let error = registry.get("k").await.unwrap_err();
    assert!(error.to_string().contains("belongs to another registry than before"), "{error}");
    assert_eq!(cluster.registry("r").get("k").await.unwrap().unwrap().value, b"3");
}

/// Nothing of a registry was deleted by its users where somebody has deleted all of its keys, the marker among them.
#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_was_deleted() {
    let cluster = Cluster::one().await;
    let registry = cluster.registry("r");
    registry.transact(Transaction::new().put("k", "1")).await.unwrap();
    let start = registry.transact(Transaction::new().put("l", "1")).await.unwrap().revision;
    let mut watch = registry.watch("", start).await.unwrap();
    registry.transact(Transaction::new().delete("l")).await.unwrap();
    assert_eq!(watch.next().await.unwrap().change.key(), "l", "as a user does");
    let mut admin = cluster.admin(0).await;
    let marker = admin.get("/r/weir-registry", None).await.unwrap().kvs()[0].value().to_vec();
    admin.delete("/r/", Some(DeleteOptions::new().with_prefix())).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_secs(2), watch.next()).await.is_err(), "a deletion");
    // An operator restores the marker: the deletion of the key counts from now on.
    admin.put("/r/weir-registry", marker, None).await.unwrap();
    let deleted = tokio::time::timeout(Duration::from_secs(10), watch.next()).await.unwrap().unwrap();
    assert_eq!(deleted.change.key(), "k");
}

/// Keys that are no text are ignored, in listings, across their pages, and in watches.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_others_among_weirs() {
    let cluster = Cluster::one().await;
    let (registry, mut admin) = (cluster.registry("r"), cluster.admin(0).await);
    let start = registry.transact(Transaction::new().put("a", "1").put("c", "3")).await.unwrap().revision;
    let mut watch = registry.watch("", start).await.unwrap();
    let foreign = |number: u8| [b"/r/keys/b\xff".as_slice(), &[number]].concat();
    // More than a page.
    for number in 0..200 {
        admin.put(foreign(number), "x", None).await.unwrap();
    }
    admin.delete(foreign(7), None).await.unwrap();
    registry.transact(Transaction::new().put("b", "2")).await.unwrap();
    let listing = registry.list("").await.unwrap();
    assert_eq!(listing.entries.iter().map(|entry| &*entry.key).collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(registry.list("b").await.unwrap().entries.len(), 1);
    let event = tokio::time::timeout(Duration::from_secs(20), watch.next()).await.unwrap().unwrap();
    assert_eq!(event.change.key(), "b", "changes of others' keys end no watch");
}
