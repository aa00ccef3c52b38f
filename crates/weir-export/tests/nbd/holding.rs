//! Clients that are held while their disk goes to another node.

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_nbd::protocol::{command, error};

use crate::support::{Answer, RawClient, Server, ServerConfig};

const MIB: usize = 1 << 20;

/// No hold takes longer, on a machine that does much else.
const BOUND: Duration = Duration::from_millis(900);

fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    RawClient::request(command, 0, cookie, offset, length)
}

fn write(cookie: u64, data: &[u8]) -> Vec<u8> {
    [request(command::WRITE, cookie, 0, data.len() as u32), data.to_vec()].concat()
}

fn enter(server: &Server) -> RawClient {
    RawClient::enter(server.socket(), "disk", false)
}

fn one() -> Server {
    Server::start(ServerConfig::one(64 * MIB as u64))
}

/// Writes and answers, until the server hangs up: the errors, by cookie. Each answer is followed by another write while
/// `goes_on`.
fn converse(mut client: RawClient, mut next: u64, goes_on: bool) -> Vec<(u64, u32)> {
    let mut told = Vec::new();
    let mut head = [0; 16];
    while client.stream.read_exact(&mut head).is_ok() {
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        told.push((u64::from_be_bytes(head[8..].try_into().unwrap()), error));
        if goes_on && client.stream.write_all(&write(next, &[1; 4096])).is_ok() {
            next += 1;
        }
    }
    told
}

/// Nothing has come for a moment.
fn hears_nothing(client: &mut RawClient) -> bool {
    client.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let nothing = matches!(client.stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
    client.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    nothing
}

#[test]
fn who_waits_for_replies_gets_all_of_them_and_then_the_end() {
    let mut server = one();
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let mut client = enter(&server);
            client.send(&(0..64).flat_map(|cookie| write(cookie, &[7; 4096])).collect::<Vec<u8>>());
            thread::spawn(move || converse(client, 64, true))
        })
        .collect();
    thread::sleep(Duration::from_millis(50));
    let took = server.hold_all();
    assert!(took < BOUND, "{took:?}");
    // The test would see any request that reaches the layer from here on.
    server.knobs().failing.store(libc::EIO as usize, Ordering::Relaxed);
    thread::sleep(Duration::from_millis(50));
    server.dismiss();
    for client in clients {
        let mut told = client.join().unwrap();
        told.sort_unstable();
        assert!(told.iter().all(|&(_, error)| error == 0), "{told:?}");
        let first: Vec<u64> = told.iter().map(|&(cookie, _)| cookie).collect();
        assert_eq!(first, (0..told.len() as u64).collect::<Vec<_>>(), "none in between is unanswered");
        assert!(told.len() > 64, "it went on before");
    }
}

#[test]
fn who_is_served_again_notices_nothing() {
    let server = one();
    let mut client = enter(&server);
    client.send(&write(1, &[5; 4096]));
    client.answer(0);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    client.send(&write(2, &[6; 4096]));
    server.wait_until("it is at the layer", |state| state.in_flight == 1);
    server.hold();
    assert!(!server.look().held, "it is not answered");
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    server.wait_until("it is answered", |state| state.held);
    assert!(hears_nothing(&mut client), "the reply is kept");
    // Neither what comes now nor who comes now is served before it is known where the disk is.
    client.send(&request(command::READ, 3, 0, 4096));
    let mut other = enter(&server);
    other.send(&request(command::READ, 4, 0, 4096));
    assert!(hears_nothing(&mut client) && hears_nothing(&mut other));
    assert_eq!(server.look().in_flight, 0, "nothing is taken");
    server.resume();
    assert_eq!(client.answer(0), Answer { cookie: 2, error: 0, data: vec![] });
    assert_eq!(client.answer(4096), Answer { cookie: 3, error: 0, data: vec![6; 4096] });
    assert_eq!(other.answer(4096).data, vec![6; 4096]);
    client.verify_block(8192, 9);
    server.hold_all();
    server.resume();
    client.verify_block(8192, 10);
}

/// The registry does not say where the disk is: what is answered is answered, and what is not waits.
#[test]
fn replies_are_not_kept_for_ever() {
    let server = one();
    let mut client = enter(&server);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    client.send(&write(1, &[5; 4096]));
    server.wait_until("it is at the layer", |state| state.in_flight == 1);
    server.hold();
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    let start = Nanos::now();
    assert_eq!(client.answer(0).error, 0);
    let kept = Nanos::now() - start;
    assert!(kept > Duration::from_millis(500) && kept < Duration::from_secs(5), "{kept:?}");
    client.send(&request(command::READ, 2, 0, 4096));
    assert!(hears_nothing(&mut client));
    server.resume();
    assert_eq!(client.answer(4096).data, vec![5; 4096]);
}

/// A client that reconnects makes them again; an error would reach its guest (P9).
#[test]
fn a_layer_that_does_not_answer_neither_keeps_the_disk_nor_fails_its_requests() {
    let mut server = one();
    let mut client = enter(&server);
    client.verify_block(0, 1);
    client.send(&write(1, &[5; 4096]));
    assert_eq!(client.answer(0).error, 0);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    client.send(&write(2, &[5; 4096]));
    server.wait_until("it is at the layer", |state| state.in_flight == 1);
    let took = server.hold_all();
    assert!(took >= Duration::from_millis(200) && took < BOUND, "{took:?}");
    server.begin_to_dismiss();
    assert!(client.is_closed(), "without a word, and before the layer answers");
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    server.join();
}

#[test]
fn who_does_not_read_keeps_nobody_waiting() {
    let mut server = one();
    let mut silent = enter(&server);
    // Far more than the socket takes.
    silent
        .send(&(0..60).flat_map(|cookie| request(command::READ, cookie, 0, MIB as u32)).collect::<Vec<u8>>());
    let mut other = enter(&server);
    other.verify_block(0, 3);
    let took = server.hold_all();
    assert!(took < BOUND, "{took:?}");
    let start = Nanos::now();
    server.dismiss();
    let took = Nanos::now() - start;
    assert!(took < BOUND, "{took:?}");
    assert!(other.is_closed());
}

/// A shutdown neither.
#[test]
fn who_does_not_read_does_not_keep_a_disk_from_being_closed() {
    let mut server = one();
    let mut silent = enter(&server);
    silent
        .send(&(0..60).flat_map(|cookie| request(command::READ, cookie, 0, MIB as u32)).collect::<Vec<u8>>());
    let start = Nanos::now();
    server.close();
    let took = Nanos::now() - start;
    assert!(took < Duration::from_secs(8), "{took:?}");
}

/// It may have 128 requests under way, and asks for a thousand: each is served or refused.
#[test]
fn who_does_not_wait_for_replies_is_told() {
    let mut server = one();
    let client = enter(&server);
    let mut writer = client.stream.try_clone().unwrap();
    let reader = thread::spawn(move || converse(client, 0, false));
    let sent = Arc::new(AtomicU64::new(0));
    let counts = Arc::clone(&sent);
    let sender = thread::spawn(move || {
        // Until nobody reads any more.
        while writer.write_all(&write(counts.load(Ordering::Relaxed), &[1; 4096])).is_ok() {
            counts.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_micros(20));
        }
    });
    let until = |count: u64, patience: Duration| {
        let deadline = Nanos::now() + patience;
        while sent.load(Ordering::Relaxed) < count && Nanos::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    };
    // Those under way, those in the socket, and some that are answered.
    until(500, Duration::from_secs(20));
    // However slowly this client is let run, as many are under way as may be when the hold begins.
    server.knobs().frozen.store(true, Ordering::Relaxed);
    until(sent.load(Ordering::Relaxed) + 1000, Duration::from_millis(300));
    let start = Nanos::now();
    server.hold();
    // A whole turn after the hold has begun.
    server.look();
    server.look();
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    server.wait_until("the clients are held", |state| state.held);
    let took = Nanos::now() - start;
    assert!(took < BOUND, "{took:?}");
    // More arrives meanwhile, or has arrived: as much as the socket holds.
    until(sent.load(Ordering::Relaxed) + 4, Duration::from_secs(1));
    thread::sleep(Duration::from_millis(100));
    server.dismiss();
    let told = reader.join().unwrap();
    sender.join().unwrap();
    let sent = sent.load(Ordering::Relaxed);
    let served = told.iter().take_while(|&&(_, error)| error == 0).count();
    eprintln!("{sent} sent, {served} served, {} refused", told.len() - served);
    assert!(told[served..].iter().all(|&(_, error)| error == error::ESHUTDOWN), "{:?}", &told[served..]);
    assert!(served > 128 && served < told.len());
    assert!(
        told.iter().enumerate().all(|(at, &(cookie, _))| cookie == at as u64),
        "in order, and none left out"
    );
}
