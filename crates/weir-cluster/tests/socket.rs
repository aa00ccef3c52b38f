//! The registry's socket and clients that violate its protocol.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use common::Machine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use weir_cluster::remote::MAX_FRAME;

fn frame(json: &[u8]) -> Vec<u8> {
    [&u32::try_from(json.len()).unwrap().to_le_bytes()[..], json].concat()
}

async fn receive(stream: &mut UnixStream) -> serde_json::Value {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await.unwrap();
    let mut body = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut body).await.unwrap();
    serde_json::from_slice(&body).unwrap()
}

async fn ended(stream: &mut UnixStream) -> bool {
    let mut byte = [0];
    let read =
        tokio::time::timeout(Duration::from_secs(5), stream.read(&mut byte)).await.expect("still open");
    matches!(read, Ok(0) | Err(_))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_request_is_refused_and_the_connection_closed() {
    let machine = Machine::start().await;
    let junk: [&[u8]; 6] = [
        b"",
        b"junk",
        b"\xff\xfe",
        b"[]",
        b"{\"request\":{}}",
        b"{\"id\":0,\"request\":{\"get\":{\"key\":\"k\"}}}",
    ];
    for junk in junk {
        let mut stream = UnixStream::connect(machine.socket()).await.unwrap();
        stream.write_all(&frame(junk)).await.unwrap();
        let answer = receive(&mut stream).await;
        assert_eq!(answer["id"], 0, "{answer}");
        assert!(answer["answer"]["error"]["Malformed"]["reason"].is_string(), "{answer}");
        assert!(ended(&mut stream).await);
    }
    machine.client().list("").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_request_is_answered_and_the_next_one_served() {
    let machine = Machine::start().await;
    let mut stream = UnixStream::connect(machine.socket()).await.unwrap();
    let both = [
        frame(b"{\"id\":7,\"request\":{\"teleport\":{}}}"),
        frame(b"{\"id\":8,\"request\":{\"get\":{\"key\":\"k\"}}}"),
    ];
    stream.write_all(&both.concat()).await.unwrap();
    let first = receive(&mut stream).await;
    assert_eq!(first["id"], 7);
    assert!(
        first["answer"]["error"]["Malformed"]["reason"].as_str().unwrap().contains("teleport"),
        "{first}"
    );
    let second = receive(&mut stream).await;
    assert_eq!((&second["id"], &second["answer"]["entry"]), (&8.into(), &serde_json::Value::Null));
    // Limits also hold for other clients.
    let long = "k".repeat(2000);
    stream
        .write_all(&frame(format!("{{\"id\":9,\"request\":{{\"get\":{{\"key\":\"{long}\"}}}}}}").as_bytes()))
        .await
        .unwrap();
    assert!(receive(&mut stream).await["answer"]["error"]["Malformed"].is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_oversized_frame_is_refused_by_its_length_alone() {
    let machine = Machine::start().await;
    for length in [u32::MAX, u32::try_from(MAX_FRAME).unwrap() + 1] {
        let mut stream = UnixStream::connect(machine.socket()).await.unwrap();
        stream.write_all(&length.to_le_bytes()).await.unwrap();
        let answer = receive(&mut stream).await;
        assert!(
            answer["answer"]["error"]["Malformed"]["reason"].as_str().unwrap().contains("limit"),
            "{answer}"
        );
        assert!(ended(&mut stream).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn half_frames_and_clients_that_never_read_affect_no_other_client() {
    let machine = Machine::start().await;
    let mut half = UnixStream::connect(machine.socket()).await.unwrap();
    half.write_all(&frame(b"{\"id\":1}")[..6]).await.unwrap();
    drop(half);
    let mut deaf = UnixStream::connect(machine.socket()).await.unwrap();
    let client = machine.client();
    client.transact(weir_cluster::registry::Transaction::new().put("k", vec![b'x'; 1 << 20])).await.unwrap();
    let asking = async {
        for id in 1.. {
            let get = format!("{{\"id\":{id},\"request\":{{\"get\":{{\"key\":\"k\"}}}}}}");
            deaf.write_all(&frame(get.as_bytes())).await.unwrap();
        }
    };
    // Its own unread answers soon block it.
    assert!(tokio::time::timeout(Duration::from_millis(700), asking).await.is_err());
    assert_eq!(client.list("").await.unwrap().revision, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_owner_may_connect_or_read_the_file() {
    let machine = Machine::start().await;
    for path in [machine.socket(), machine.file()] {
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600,
            "{}",
            path.display()
        );
    }
}
