//! The contract of every registry: one suite for all implementations of the trait.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_cluster::registry::{
    Change, LeaseId, MAX_TRANSACTION, Registry, RegistryError, Transaction, WatchEvent,
};

use super::wait::{eventually, next};

/// A registry under test that nobody else changes. Calls through a client must work as soon as a function here has returned.
pub trait Subject {
    /// A new client, with connections of its own.
    fn client(&self) -> Arc<dyn Registry>;
    /// A new client whose calls end after about 300 ms.
    fn hurried(&self) -> Arc<dyn Registry>;
    /// Stops the registry; its data stay.
    fn stop(&mut self) -> impl Future<Output = ()>;
    /// Starts it again.
    fn start(&mut self) -> impl Future<Output = ()>;
    /// Interrupts it for a short time.
    fn interrupt(&mut self) -> impl Future<Output = ()>;
    /// A short time to live: as asked for, and as given.
    fn ttl(&self) -> (Duration, Duration);
    /// Maximum size of two values in one transaction.
    fn two_values(&self) -> usize;
}

/// Calls a macro with the names of all parts. Each part needs a registry without keys.
macro_rules! contract {
    ($each:ident) => {
        $each!(
            racing_clients_have_one_winner,
            calls_pipeline_and_large_listings_arrive_whole,
            limits_are_named_before_anything_is_sent,
            transactions_are_all_or_nothing,
            a_watch_has_whole_transactions_of_its_prefix,
            a_watch_sees_every_change_once_and_in_order_across_interruptions,
            a_watcher_too_far_behind_has_to_list_again,
            keys_live_as_long_as_their_lease,
            ended_leases_are_named,
            a_restart_keeps_data_leases_and_revisions,
            without_a_server_calls_fail_in_time_and_work_again_later
        );
    };
}

pub async fn racing_clients_have_one_winner(subject: &mut impl Subject) {
    let clients: Vec<_> = (0..8).map(|_| subject.client()).collect();
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

pub async fn calls_pipeline_and_large_listings_arrive_whole(subject: &mut impl Subject) {
    let client = subject.client();
    let before = client.list("").await.unwrap();
    assert_eq!(before.entries, []);
    let large = vec![0xee_u8; 100_000];
    let write = |number| {
        let (client, large) = (Arc::clone(&client), large.clone());
        tokio::spawn(
            async move { client.transact(Transaction::new().put(format!("k/{number:03}"), large)).await },
        )
    };
    // Each is durable before the next one, and a call has 5 s: on a busy disk that is not enough for 150.
    for first in (0..150).step_by(15) {
        for writer in (first..first + 15).map(write).collect::<Vec<_>>() {
            writer.await.unwrap().unwrap();
        }
    }
    client.transact(Transaction::new().put("l", "other").put("j", "other")).await.unwrap();
    let listing = client.list("k/").await.unwrap();
    assert_eq!((listing.entries.len(), listing.revision), (150, before.revision + 151));
    assert!(listing.entries.iter().all(|entry| entry.value == large));
    assert!(listing.entries.is_sorted_by_key(|entry| &entry.key));
    assert_eq!(client.list("").await.unwrap().entries.len(), 152);
    assert_eq!(client.get("nothing").await.unwrap(), None);
}

pub async fn limits_are_named_before_anything_is_sent(subject: &mut impl Subject) {
    let client = subject.client();
    let bad = [
        Transaction::new().put("", "x"),
        Transaction::new().put("k".repeat(1025), "x"),
        Transaction::new().put("k", vec![0; (1 << 20) + 1]),
        Transaction::new().put("k", "1").delete("k"),
        (0..=MAX_TRANSACTION).fold(Transaction::new(), |all, number| all.put(format!("k{number}"), "")),
        (0..=MAX_TRANSACTION).fold(Transaction::new(), |all, number| all.absent(format!("k{number}"))),
        (0..3).fold(Transaction::new(), |all, number| all.put(format!("k{number}"), vec![0; 1 << 20])),
        Transaction::new()
            .put("a", vec![0; subject.two_values() / 2 + 64])
            .put("b", vec![0; subject.two_values() / 2]),
    ];
    for transaction in bad {
        let error = client.transact(transaction).await.unwrap_err();
        assert!(matches!(error, RegistryError::Malformed { .. }), "{error}");
    }
    let long = "k".repeat(1025);
    assert!(matches!(client.get("").await, Err(RegistryError::Malformed { .. })));
    assert!(matches!(client.get(&long).await, Err(RegistryError::Malformed { .. })));
    assert!(matches!(client.list(&long).await, Err(RegistryError::Malformed { .. })));
    assert!(matches!(client.watch(&long, 0).await, Err(RegistryError::Malformed { .. })));
    for ttl in [Duration::from_millis(99), Duration::from_secs(3601)] {
        assert!(matches!(client.grant(ttl).await, Err(RegistryError::Malformed { .. })));
    }
    assert_eq!(client.list("").await.unwrap().entries, []);
    // The worst case of JSON: every byte of the largest transaction escaped sixfold.
    let value = vec![1; subject.two_values() / 2];
    let worst = Transaction::new().put("a", &*value).put("b", &*value);
    client.transact(worst).await.unwrap();
    assert_eq!(client.list("").await.unwrap().entries[1].value, value);
    let one = vec![2; 1 << 20];
    client.transact(Transaction::new().put("a", &*one)).await.unwrap();
    assert_eq!(client.get("a").await.unwrap().unwrap().value, one);
    let most = (0..MAX_TRANSACTION).fold(Transaction::new(), |all, number| {
        all.absent(format!("k{number}")).put(format!("k{number}"), "")
    });
    client.transact(most).await.unwrap();
    assert_eq!(client.list("k").await.unwrap().entries.len(), MAX_TRANSACTION);
    let key = "k".repeat(1024);
    client.transact(Transaction::new().put(&*key, "")).await.unwrap();
    assert!(client.get(&key).await.unwrap().is_some());
}

pub async fn transactions_are_all_or_nothing(subject: &mut impl Subject) {
    let client = subject.client();
    let put = |key: &str, value: &str| client.transact(Transaction::new().put(key, value));
    let a = put("a", "1").await.unwrap().revision;
    let b = put("b", "1").await.unwrap().revision;
    assert!(a < b);
    let wrong = Transaction::new()
        .unchanged("b", a)
        .absent("c")
        .unchanged("a", a)
        .absent("a")
        .put("d", "x")
        .delete("a");
    let Err(RegistryError::Conflict { mut current }) = client.transact(wrong).await else {
        panic!("b has changed")
    };
    current.sort_by(|one, other| one.key.cmp(&other.key));
    current.dedup();
    let current: Vec<_> = current.iter().map(|entry| (&*entry.key, entry.mod_revision)).collect();
    assert_eq!(current, [("a", a), ("b", b)]);
    let listing = client.list("").await.unwrap();
    assert_eq!((listing.entries.len(), listing.revision), (2, b), "a refused transaction changes nothing");
    // Without a change there is no new revision.
    for nothing in [
        Transaction::new(),
        Transaction::new().delete("missing"),
        Transaction::new().absent("c").unchanged("b", b),
    ] {
        assert_eq!(client.transact(nothing).await.unwrap().revision, b);
    }
    let future = Transaction::new().unchanged("a", b + 1000).delete("a");
    assert!(matches!(client.transact(future).await, Err(RegistryError::Conflict { .. })));
    let missing = Transaction::new().unchanged("c", a).put("c", "");
    let Err(RegistryError::Conflict { current }) = client.transact(missing).await else {
        panic!("there is no c")
    };
    assert_eq!(current, []);
    let done = client
        .transact(Transaction::new().unchanged("a", a).unchanged("b", b).delete("a").put("b", "2"))
        .await;
    let done = done.unwrap().revision;
    let entry = client.get("b").await.unwrap().unwrap();
    assert_eq!((entry.value, entry.mod_revision, entry.lease), (b"2".to_vec(), done, None));
    assert_eq!(client.get("a").await.unwrap(), None);
    let binary: Vec<u8> = (0..=255).collect();
    client.transact(Transaction::new().put("ключ/\u{10ffff}", &*binary)).await.unwrap();
    let listing = client.list("ключ/").await.unwrap();
    assert_eq!(listing.entries.len(), 1);
    assert_eq!((&*listing.entries[0].key, &listing.entries[0].value), ("ключ/\u{10ffff}", &binary));
}

pub async fn a_watch_has_whole_transactions_of_its_prefix(subject: &mut impl Subject) {
    let client = subject.client();
    let start = client.list("").await.unwrap().revision;
    let first =
        client.transact(Transaction::new().put("w/a", "1").put("x", "1").put("w/b", "1")).await.unwrap();
    let second = client.transact(Transaction::new().put("w/b", "2").delete("w/a")).await.unwrap();
    client.transact(Transaction::new().delete("w/a").put("w", "")).await.unwrap();
    let mut late = client.watch("w/", first.revision).await.unwrap();
    let mut early = client.watch("w/", start).await.unwrap();
    let mut future = client.watch("w/", second.revision).await.unwrap();
    let third = client.transact(Transaction::new().put("w/c", "3")).await.unwrap();
    let text = |event: WatchEvent| match event.change {
        Change::Put(entry) => {
            assert_eq!(entry.mod_revision, event.revision);
            (event.revision, format!("{}={}", entry.key, String::from_utf8(entry.value).unwrap()))
        }
        Change::Delete { key } => (event.revision, key),
    };
    let all = [
        (first.revision, "w/a=1"),
        (first.revision, "w/b=1"),
        (second.revision, "w/b=2"),
        (second.revision, "w/a"),
        (third.revision, "w/c=3"),
    ];
    for (watch, expected) in [(&mut early, &all[..]), (&mut late, &all[2..]), (&mut future, &all[4..])] {
        for (revision, change) in expected {
            assert_eq!(text(next(watch).await.unwrap()), (*revision, (*change).to_owned()));
        }
    }
}

pub async fn a_watch_sees_every_change_once_and_in_order_across_interruptions(subject: &mut impl Subject) {
    const CHANGES: u64 = 300;
    let watcher = subject.client();
    let mut watch = watcher.watch("w/", watcher.list("").await.unwrap().revision).await.unwrap();
    let writer = subject.client();
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
        subject.interrupt().await;
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

pub async fn a_watcher_too_far_behind_has_to_list_again(subject: &mut impl Subject) {
    let client = subject.client();
    let start = client.list("").await.unwrap().revision;
    let mut slow = client.watch("k", start).await.unwrap();
    let mut quiet = subject.client().watch("other/", start).await.unwrap();
    let writers = (0..32).map(|_| {
        let client = Arc::clone(&client);
        tokio::spawn(async move {
            for number in 0..50 {
                client.transact(Transaction::new().put("k", number.to_string())).await.unwrap();
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    // The last changes may still be on their way to the watch.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut last = start;
    let error = loop {
        match next(&mut slow).await {
            Ok(event) => {
                assert_eq!(event.revision, last + 1);
                last = event.revision;
            }
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RegistryError::Compacted { .. }), "{error}");
    assert!((1000..=1100).contains(&(last - start)), "{}", last - start);
    // Changes under other prefixes do not cut off a quiet watcher.
    client.transact(Transaction::new().put("other/1", "")).await.unwrap();
    assert_eq!(next(&mut quiet).await.unwrap().change.key(), "other/1");
}

pub async fn keys_live_as_long_as_their_lease(subject: &mut impl Subject) {
    let client = subject.client();
    let (asked, ttl) = subject.ttl();
    let (kept, dropped) = (client.grant(asked).await.unwrap(), client.grant(asked).await.unwrap());
    let put =
        Transaction::new().put_leased("kept", "", kept).put_leased("dropped", "", dropped).put("free", "");
    let revision = client.transact(put).await.unwrap().revision;
    assert_eq!(client.keep_alive(dropped).await, Ok(ttl));
    let start = Instant::now();
    let mut watch = client.watch("", revision).await.unwrap();
    assert_eq!(client.get("dropped").await.unwrap().unwrap().lease, Some(dropped));
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
    // A put without the lease takes the key out of it.
    client.transact(Transaction::new().put("freed", "").put_leased("late", "", kept)).await.unwrap();
    client.transact(Transaction::new().put_leased("freed", "1", kept)).await.unwrap();
    client.transact(Transaction::new().put("freed", "2")).await.unwrap();
    client.revoke(kept).await.unwrap();
    let mut deleted = BTreeMap::new();
    while deleted.len() < 2 {
        let event = next(&mut watch).await.unwrap();
        if let Change::Delete { key } = event.change {
            deleted.insert(key, event.revision);
        }
    }
    assert!(deleted.contains_key("kept") && deleted.contains_key("late"), "{deleted:?}");
    assert_eq!(deleted["kept"], deleted["late"], "at one revision");
    assert!(client.get("free").await.unwrap().is_some() && client.get("freed").await.unwrap().is_some());
    client.revoke(LeaseId(999)).await.unwrap();
}

pub async fn ended_leases_are_named(subject: &mut impl Subject) {
    let client = subject.client();
    let (alive, ended) =
        (client.grant(subject.ttl().0).await.unwrap(), client.grant(subject.ttl().0).await.unwrap());
    assert_ne!(alive, ended);
    client.register_process("n1", 1, alive).await.unwrap();
    for _ in 0..2 {
        client.revoke(ended).await.unwrap();
    }
    for lease in [ended, LeaseId(7), LeaseId(u64::MAX)] {
        client.revoke(lease).await.unwrap();
        let expired = RegistryError::LeaseExpired { lease };
        assert_eq!(client.keep_alive(lease).await, Err(expired.clone()));
        assert_eq!(client.register_process("n2", 1, lease).await, Err(expired.clone()));
        for both in [
            Transaction::new().put_leased("a", "", alive).put_leased("b", "", lease).put("c", ""),
            Transaction::new().put("c", "").put_leased("b", "", lease).put_leased("a", "", alive),
        ] {
            assert_eq!(client.transact(both).await, Err(expired.clone()));
        }
    }
    let entries = client.list("").await.unwrap().entries;
    assert!(entries.iter().all(|entry| entry.key.starts_with("processes/")), "{entries:?}");
}

pub async fn a_restart_keeps_data_leases_and_revisions(subject: &mut impl Subject) {
    let client = subject.client();
    let start = client.list("").await.unwrap().revision;
    let (asked, ttl) = subject.ttl();
    let lease = client.grant(asked).await.unwrap();
    client.transact(Transaction::new().put("a", vec![0xff, 0]).put_leased("b", "2", lease)).await.unwrap();
    client.transact(Transaction::new().put("c", "").delete("a")).await.unwrap();
    let before = client.list("").await.unwrap();
    assert_eq!((before.entries.len(), before.revision), (2, start + 2));
    subject.stop().await;
    subject.start().await;
    assert_eq!(client.list("").await.unwrap(), before);
    assert_eq!(client.keep_alive(lease).await, Ok(ttl));
    eventually("the lease expires", || async { client.get("b").await.unwrap().is_none() }).await;
    subject.stop().await;
    subject.start().await;
    let after = client.list("").await.unwrap();
    assert_eq!((after.entries.len(), after.revision), (1, start + 3));
    assert_ne!(client.grant(Duration::from_secs(1)).await.unwrap(), lease, "no lease is used twice");
}

pub async fn without_a_server_calls_fail_in_time_and_work_again_later(subject: &mut impl Subject) {
    let client = subject.hurried();
    subject.stop().await;
    let start = Instant::now();
    let lease = LeaseId(1);
    assert!(matches!(client.get("k").await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(client.list("k").await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(client.watch("k", 0).await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(client.grant(Duration::from_secs(1)).await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(client.keep_alive(lease).await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(client.revoke(lease).await, Err(RegistryError::Unavailable { .. })));
    assert!(matches!(
        client.transact(Transaction::new().put("k", "given up")).await,
        Err(RegistryError::Unavailable { .. })
    ));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    subject.start().await;
    eventually("the client is back", || async { client.get("k").await.is_ok() }).await;
    assert_eq!(
        client.get("k").await.unwrap(),
        None,
        "a call that timed out before it was sent is not executed later"
    );
}
