//! Sockets on a shard: batches, full buffers, ends.
#![allow(clippy::unwrap_used)]

use std::io::{IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use weir_block::{
    Action, Engine, Event, Interest, Nanos, Reactor, ReactorConfig, Received, Sent, Socket, Token,
};

fn reactor(engine: Engine) -> Reactor {
    Reactor::new(ReactorConfig { engine, ..ReactorConfig::default() }).unwrap()
}

fn socket(reactor: &mut Reactor, fd: impl Into<OwnedFd>) -> Socket {
    let token = Token { owner: reactor.new_owner(), slot: 0 };
    Socket::new(fd.into(), token).unwrap()
}

/// The one event that is due within ten seconds.
fn event(reactor: &mut Reactor) -> Event {
    let mut events = Vec::new();
    let late = Nanos::now() + Duration::from_secs(10);
    while events.is_empty() {
        assert!(Nanos::now() < late, "an event within ten seconds");
        reactor.wait(late, &mut events).unwrap();
    }
    assert_eq!(events.len(), 1);
    events.remove(0)
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

#[test]
fn a_full_socket_takes_the_rest_later() {
    for engine in [Engine::Uring, Engine::Epoll] {
        let mut reactor = reactor(engine);
        let (near, mut far) = tcp_pair();
        let mut socket = socket(&mut reactor, near);
        let data: Vec<u8> = (0..32u32 << 20).map(|i| (i % 251) as u8).collect();
        let length = data.len();
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let mut received = Vec::new();
            far.read_to_end(&mut received).unwrap();
            received
        });
        let (mut sent, mut partial, mut full) = (0, 0, 0);
        while sent < length {
            // Slices of odd sizes, so that partial sends end inside one.
            let slices: Vec<_> = data[sent..].chunks(9_973).take(1500).map(IoSlice::new).collect();
            let offered: usize = slices.iter().take(1024).map(|slice| slice.len()).sum();
            match socket.send(&slices).unwrap() {
                Sent::Bytes(count) => {
                    assert!(count > 0 && count <= offered);
                    partial += usize::from(count < offered);
                    sent += count;
                }
                Sent::Full => {
                    full += 1;
                    socket.watch_write(&mut reactor);
                    socket.watch_write(&mut reactor);
                    let event = event(&mut reactor);
                    assert_eq!(event.token, socket.token());
                    assert!(matches!(event.action, Action::Ready(Interest::Write)));
                    socket.on_event(Interest::Write);
                }
            }
        }
        socket.close(&mut reactor);
        drop(socket);
        assert!(reader.join().unwrap() == data, "every byte once and in order");
        assert!(partial > 0 && full > 0, "expected partial sends ({partial}) and a full buffer ({full})");
    }
}

#[test]
fn received_bytes_are_read_and_the_end_is_seen() {
    for engine in [Engine::Uring, Engine::Epoll] {
        let mut reactor = reactor(engine);
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut socket = socket(&mut reactor, near);
        let mut target = [0; 64];
        assert_eq!(socket.receive(&mut target).unwrap(), Received::Nothing);
        socket.watch_read(&mut reactor);
        far.write_all(b"one").unwrap();
        far.write_all(b"two").unwrap();
        assert!(matches!(event(&mut reactor).action, Action::Ready(Interest::Read)));
        socket.on_event(Interest::Read);
        assert_eq!(socket.receive(&mut target).unwrap(), Received::Bytes(6));
        assert_eq!(&target[..6], b"onetwo");
        socket.watch_read(&mut reactor);
        drop(far);
        event(&mut reactor);
        socket.on_event(Interest::Read);
        assert_eq!(socket.receive(&mut target).unwrap(), Received::End);
        let error = socket.send(&[IoSlice::new(b"x")]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE), "an error and not a signal");
    }
}

/// For a user that does not read meanwhile: what has arrived does not hide the end, and a half-closed connection has not ended.
#[test]
fn the_end_is_seen_behind_unread_bytes() {
    for engine in [Engine::Uring, Engine::Epoll] {
        let pair = UnixStream::pair().unwrap();
        let tcp = tcp_pair();
        let pairs: [(OwnedFd, OwnedFd); 2] = [(pair.0.into(), pair.1.into()), (tcp.0.into(), tcp.1.into())];
        for (near, far) in pairs {
            let mut reactor = reactor(engine);
            let mut socket = socket(&mut reactor, near);
            socket.watch_hang_up(&mut reactor);
            let mut far = UnixStream::from(far);
            far.write_all(b"unread").unwrap();
            let mut events = Vec::new();
            reactor.wait(Nanos::now() + Duration::from_millis(20), &mut events).unwrap();
            assert!(events.is_empty() && !socket.has_hung_up(), "{engine:?}: {events:?}");
            far.shutdown(Shutdown::Write).unwrap();
            // io_uring reports this, too.
            reactor.wait(Nanos::now() + Duration::from_millis(20), &mut events).unwrap();
            events.drain(..).for_each(|_| socket.on_event(Interest::HangUp));
            assert!(!socket.has_hung_up(), "{engine:?}");
            drop(far);
            // TCP learns it from the answer to something sent.
            let _ = socket.send(&[IoSlice::new(b"answer")]);
            std::thread::sleep(Duration::from_millis(20));
            socket.watch_hang_up(&mut reactor);
            assert!(matches!(event(&mut reactor).action, Action::Ready(Interest::HangUp)), "{engine:?}");
            socket.on_event(Interest::HangUp);
            assert!(socket.has_hung_up(), "{engine:?}");
            socket.close(&mut reactor);
        }
    }
}

#[test]
fn a_closed_socket_has_no_events() {
    for engine in [Engine::Uring, Engine::Epoll] {
        let mut reactor = reactor(engine);
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut socket = socket(&mut reactor, near);
        socket.watch_read(&mut reactor);
        reactor.wait(Nanos(0), &mut Vec::new()).unwrap();
        socket.close(&mut reactor);
        drop(socket);
        let mut none = Vec::new();
        reactor.wait(Nanos::now() + Duration::from_millis(20), &mut none).unwrap();
        assert!(none.is_empty(), "{engine:?}: {none:?}");
        assert_eq!(far.read(&mut [0; 1]).unwrap(), 0, "the other side sees the end");
    }
}
