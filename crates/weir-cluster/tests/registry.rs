//! The registry, through its socket and directly: compare-and-swap, watches, leases, restarts.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Machine, client, eventually, next};
use weir_cluster::registry::{Change, LeaseId, MAX_TRANSACTION, Registry, RegistryError, Transaction};
use weir_cluster::{Client, ClientConfig, Embedded, Server};

#[tokio::test(flavor = "multi_thread")]
async fn of_many_racing_clients_exactly_one_wins_each_round() {
    let machine = Machine::start().await;
    let clients: Vec<_> = (0..8).map(|_| machine.client()).collect();
    let mut winners = [0; 8];
    for round in 0_u64..25 {
        let before = clients[0].get("disk").await.unwrap().map(|entry| entry.mod_revision);
        let race = clients.iter().enumerate().map(|(number, client)| {
            let client = Arc::clone(client);
            tokio::spawn(async move {
                let swap = match before {
                    None => Transaction::new().absent("disk"),
                    Some(revision) => Transaction::new().unchanged("disk", revision),
                };
                let swap = swap.put("disk", format!("{round}-{number}")).put(format!("trace/{round}"), "");
                (number, client.transact(swap).await)
            })
        });
        let mut won = Vec::new();
        for racer in race.collect::<Vec<_>>() {
            match racer.await.unwrap() {
                (number, Ok(_)) => won.push(number),
                (_, Err(RegistryError::Conflict { current })) => {
                    assert!(current[0].value.starts_with(format!("{round}-").as_bytes()));
                }
                (_, Err(other)) => panic!("{other}"),
            }
        }
        assert_eq!(won.len(), 1, "round {round}");
        winners[won[0]] += 1;
        let value = clients[0].get("disk").await.unwrap().unwrap().value;
        assert_eq!(value, format!("{round}-{}", won[0]).into_bytes());
    }
    assert_eq!(winners.iter().sum::<u32>(), 25);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_pipeline_and_large_listings_arrive_whole() {
    let machine = Machine::start().await;
    let client = machine.client();
    let large = vec![0xee_u8; 100_000];
    let writers = (0..150).map(|number| {
        let (client, large) = (Arc::clone(&client), large.clone());
        tokio::spawn(
            async move { client.transact(Transaction::new().put(format!("k/{number:03}"), large)).await },
        )
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap().unwrap();
    }
    client.transact(Transaction::new().put("l", "other").put("j", "other")).await.unwrap();
    let listing = client.list("k/").await.unwrap();
    assert_eq!((listing.entries.len(), listing.revision), (150, 151));
    assert!(listing.entries.iter().all(|entry| entry.value == large));
    assert!(listing.entries.is_sorted_by_key(|entry| &entry.key));
    assert_eq!(client.list("").await.unwrap().entries.len(), 152);
    assert_eq!(client.get("nothing").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_named_before_anything_is_sent() {
    let machine = Machine::start().await;
    let client = machine.client();
    let bad = [
        Transaction::new().put("", "x"),
        Transaction::new().put("k".repeat(1025), "x"),
        Transaction::new().put("k", vec![0; (1 << 20) + 1]),
        Transaction::new().put("k", "1").delete("k"),
        (0..=MAX_TRANSACTION).fold(Transaction::new(), |all, number| all.put(format!("k{number}"), "")),
        (0..3).fold(Transaction::new(), |all, number| all.put(format!("k{number}"), vec![0; 1 << 20])),
    ];
    for transaction in bad {
        let error = client.transact(transaction).await.unwrap_err();
        assert!(matches!(error, RegistryError::Malformed { .. }), "{error}");
    }
    for ttl in [Duration::from_millis(99), Duration::from_secs(3601)] {
        assert!(matches!(client.grant(ttl).await, Err(RegistryError::Malformed { .. })));
    }
    // The worst case of JSON: every byte of the largest transaction escaped sixfold.
    let worst = Transaction::new().put("a", vec![1; (1 << 20) - 1]).put("b", vec![1; (1 << 20) - 1]);
    client.transact(worst).await.unwrap();
    assert_eq!(client.list("").await.unwrap().entries[1].value, vec![1; (1 << 20) - 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_sees_every_change_once_and_in_order_across_restarts() {
    const CHANGES: u64 = 300;
    let mut machine = Machine::start().await;
    let watcher = machine.client();
    let mut watch = watcher.watch("w/", 0).await.unwrap();
    let writer = machine.client();
    let writing = tokio::spawn(async move {
        for number in 0..CHANGES {
            // Compare-and-swap makes a retry safe when an answer is lost.
            let key = format!("w/{number}");
            let both = Transaction::new()
                .absent(&*key)
                .put(&*key, "")
                .put(format!("w/{number}-too"), "")
                .put("x", "");
            loop {
                match writer.transact(both.clone()).await {
                    Ok(_) | Err(RegistryError::Conflict { .. }) => break,
                    Err(RegistryError::Unavailable { .. }) => {
                        tokio::time::sleep(Duration::from_millis(5)).await
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
    });
    let reading = tokio::spawn(async move {
        let mut seen = Vec::new();
        while seen.len() < 2 * CHANGES as usize {
            seen.push(next(&mut watch).await.unwrap());
        }
        seen
    });
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(60)).await;
        machine.restart().await;
    }
    writing.await.unwrap();
    let seen = reading.await.unwrap();
    for (number, pair) in seen.chunks(2).enumerate() {
        assert_eq!(pair[0].change.key(), format!("w/{number}"));
        assert_eq!(pair[1].change.key(), format!("w/{number}-too"));
        assert_eq!(pair[0].revision, pair[1].revision);
    }
    assert!(seen.is_sorted_by_key(|event| event.revision));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_too_far_behind_has_to_list_again() {
    let machine = Machine::start().await;
    let registry = machine.embedded();
    let mut slow = registry.watch("k", 0).await.unwrap();
    let mut quiet = machine.client().watch("other/", 0).await.unwrap();
    let writes = (0..5000).map(|number| registry.transact(Transaction::new().put("k", number.to_string())));
    for write in writes {
        write.await.unwrap();
    }
    let mut received = 0;
    let error = loop {
        match next(&mut slow).await {
            Ok(_) => received += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RegistryError::Compacted { .. }), "{error}");
    assert!((1000..=1100).contains(&received), "{received}");
    let old = machine.client().watch("k", 1).await.unwrap_err();
    assert!(matches!(old, RegistryError::Compacted { oldest: 905 }), "{old}");
    // Changes under other prefixes do not cut off a quiet watcher.
    registry.transact(Transaction::new().put("other/1", "")).await.unwrap();
    assert_eq!(next(&mut quiet).await.unwrap().change.key(), "other/1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_watch_resumes_over_more_changes_than_the_history_has() {
    let mut machine = Machine::start().await;
    let client = machine.client();
    let mut quiet = client.watch("other/", 0).await.unwrap();
    let registry = machine.embedded();
    for number in 0..4500 {
        registry.transact(Transaction::new().put("k", number.to_string())).await.unwrap();
    }
    drop(registry);
    machine.restart().await;
    client.transact(Transaction::new().put("other/1", "")).await.unwrap();
    assert_eq!(next(&mut quiet).await.unwrap().change.key(), "other/1");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_live_as_long_as_their_lease() {
    let machine = Machine::start().await;
    let client = machine.client();
    let ttl = Duration::from_millis(400);
    let (kept, dropped) = (client.grant(ttl).await.unwrap(), client.grant(ttl).await.unwrap());
    let put =
        Transaction::new().put_leased("kept", "", kept).put_leased("dropped", "", dropped).put("free", "");
    let revision = client.transact(put).await.unwrap().revision;
    let mut watch = client.watch("", revision).await.unwrap();
    let start = Instant::now();
    let gone = loop {
        tokio::select! {
            event = watch.next() => break event.unwrap(),
            () = tokio::time::sleep(ttl / 4) => assert_eq!(client.keep_alive(kept).await, Ok(ttl)),
        }
    };
    assert_eq!(gone.change, Change::Delete { key: "dropped".into() });
    assert!(start.elapsed() >= ttl - Duration::from_millis(50), "{:?}", start.elapsed());
    assert_eq!(client.keep_alive(dropped).await, Err(RegistryError::LeaseExpired { lease: dropped }));
    assert!(client.get("kept").await.unwrap().is_some());
    client.revoke(kept).await.unwrap();
    assert_eq!(next(&mut watch).await.unwrap().change, Change::Delete { key: "kept".into() });
    assert!(client.get("free").await.unwrap().is_some());
    client.revoke(LeaseId(999)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_keeps_data_leases_and_revisions() {
    let mut machine = Machine::start().await;
    let client = machine.client();
    let lease = client.grant(Duration::from_millis(700)).await.unwrap();
    client.transact(Transaction::new().put("a", vec![0xff, 0]).put_leased("b", "2", lease)).await.unwrap();
    client.transact(Transaction::new().put("c", "").delete("a")).await.unwrap();
    let before = client.list("").await.unwrap();
    machine.restart().await;
    assert_eq!(client.list("").await.unwrap(), before);
    assert_eq!(client.keep_alive(lease).await, Ok(Duration::from_millis(700)));
    eventually("the lease expires", || async { client.get("b").await.unwrap().is_none() }).await;
    machine.restart().await;
    let after = client.list("").await.unwrap();
    assert_eq!((after.entries.len(), after.revision), (1, 3));
    assert_ne!(client.grant(Duration::from_secs(1)).await.unwrap(), lease, "no lease is used twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_server_calls_fail_in_time_and_work_again_later() {
    let mut machine = Machine::start().await;
    let socket = machine.socket();
    machine.stop().await;
    let config = ClientConfig { request_timeout: Duration::from_millis(300), ..ClientConfig::default() };
    let client = Client::new(&socket, config).unwrap();
    let start = Instant::now();
    assert!(matches!(client.get("k").await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(client.watch("k", 0).await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(
        client.transact(Transaction::new().put("k", "given up")).await,
        Err(RegistryError::Unavailable { .. })
    ));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    machine.restart().await;
    eventually("the client is back", || async { client.get("k").await.is_ok() }).await;
    assert_eq!(
        client.get("k").await.unwrap(),
        None,
        "a call that timed out before it was sent is not executed later"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn one_file_and_one_socket_have_one_server() {
    let mut machine = Machine::start().await;
    let second = Embedded::open(&machine.file()).unwrap_err();
    assert!(second.to_string().contains("another process"), "{second}");
    let other = tempfile::tempdir().unwrap();
    let elsewhere = Embedded::open(&other.path().join("r")).unwrap();
    let refused = Server::start(&machine.socket(), elsewhere.clone()).await.unwrap_err();
    assert!(refused.to_string().contains("another server"), "{refused}");
    // A killed server's socket is replaced.
    machine.stop().await;
    drop(std::os::unix::net::UnixListener::bind(machine.socket()).unwrap());
    let _server = Server::start(&machine.socket(), elsewhere).await.unwrap();
    assert_eq!(client(&machine.socket()).list("").await.unwrap().revision, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_is_reported_not_served() {
    let mut machine = Machine::start().await;
    let value = vec![0xa5_u8; 3000];
    machine.client().transact(Transaction::new().put("k", &*value)).await.unwrap();
    machine.stop().await;
    let mut bytes = std::fs::read(machine.file()).unwrap();
    let offsets: Vec<usize> =
        bytes.windows(value.len()).enumerate().filter(|(_, w)| *w == value).map(|(at, _)| at).collect();
    assert!(!offsets.is_empty());
    for offset in offsets {
        bytes[offset + 1500] ^= 1;
    }
    std::fs::write(machine.file(), bytes).unwrap();
    let error = Embedded::open(&machine.file()).unwrap_err();
    assert!(matches!(error, RegistryError::Corrupt { .. }), "{error}");
}
