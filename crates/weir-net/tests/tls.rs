//! Channels over TLS and a hostile wire: it cuts the bytes anywhere, changes them, drops them, or does not take them.
#![allow(clippy::unwrap_used)]

use std::io::{self, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;

use fastrand::Rng;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
use weir_block::{Action, Nanos, OwnerId, Reactor, ReactorConfig, Received, Region, Stream, Token, wire};
use weir_net::frame::{LARGEST_DATA, LARGEST_META};
use weir_net::{Channel, ChannelError, tls};

/// Two ends with the handshake done; what the client says with its last message is not taken yet.
fn handshake(early: &[u8]) -> (Connection, Connection) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let made = rcgen::generate_simple_self_signed(["peer".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("peer").unwrap();
    let mut client = Connection::Client(ClientConnection::new(Arc::new(client), name).unwrap());
    let mut server = Connection::Server(ServerConnection::new(Arc::new(server)).unwrap());
    carry(&mut client, &mut server);
    carry(&mut server, &mut client);
    client.writer().write_all(early).unwrap();
    carry(&mut client, &mut server);
    carry(&mut server, &mut client);
    assert!(!client.is_handshaking() && !server.is_handshaking());
    (client, server)
}

fn carry(from: &mut Connection, to: &mut Connection) {
    let mut bytes = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut bytes).unwrap();
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        to.read_tls(&mut rest).unwrap();
        to.process_new_packets().unwrap();
    }
}

/// Two channels and the wire between them.
struct Ends {
    reactor: Reactor,
    near: Channel,
    far: Channel,
    region: Rc<Region>,
    /// The wire's own ends, at the near and at the far channel.
    wire: [UnixStream; 2],
    /// Bytes on the wire, in each direction.
    waiting: [Vec<u8>; 2],
}

fn ends() -> Ends {
    ends_after(handshake(b""))
}

fn ends_after((client, server): (Connection, Connection)) -> Ends {
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let region = Rc::new(Region::new(8 << 20).unwrap());
    let mut rng = Rng::with_seed(1);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(region.len()).collect();
    region.copy_in(0, &noise);
    let ((near, at_near), (at_far, far)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    let token = |slot| Token { owner: OwnerId(1), slot };
    let near = tls::protect(near.into(), client, None).unwrap();
    let far = tls::protect(far.into(), server, None).unwrap();
    let near = Channel::new(near, token(0), Some(region.clone()), &[], &mut reactor).unwrap();
    let far = Channel::new(far, token(1), None, &[], &mut reactor).unwrap();
    let wire = [at_near, at_far];
    wire.iter().for_each(|end| end.set_nonblocking(true).unwrap());
    Ends { reactor, near, far, region, wire, waiting: Default::default() }
}

/// Kind, meta, data.
type Owned = (u16, Vec<u8>, Vec<u8>);

impl Ends {
    fn events(&mut self) {
        let mut events = Vec::new();
        self.reactor.wait(Nanos(0), &mut events).unwrap();
        for event in events {
            let Action::Ready(interest) = event.action else { panic!("only sockets here") };
            let end = if event.token.slot == 0 { &mut self.near } else { &mut self.far };
            end.on_event(interest);
        }
    }

    /// Moves bytes along the wire, at most `most` in each direction, after `change` has seen them.
    fn carry(&mut self, most: usize, change: &mut dyn FnMut(usize, &mut Vec<u8>)) {
        for from in 0..2 {
            let mut buffer = vec![0; most];
            if let Ok(bytes) = self.wire[from].read(&mut buffer) {
                buffer.truncate(bytes);
                change(from, &mut buffer);
                self.waiting[from].extend_from_slice(&buffer);
            }
            match self.wire[1 - from].write(&self.waiting[from]) {
                Ok(bytes) => drop(self.waiting[from].drain(..bytes)),
                Err(error) => assert!(
                    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::BrokenPipe),
                    "{error}"
                ),
            }
        }
    }

    /// One turn of a shard's loop; the frames that have come to the far end.
    fn turn(&mut self, frames: &mut Vec<Owned>) -> Result<(), ChannelError> {
        self.events();
        self.near.flush(&mut self.reactor)?;
        self.far.flush(&mut self.reactor)?;
        receive(&mut self.far, &mut self.reactor, frames)
    }

    /// Queues a frame with random pieces of the region.
    fn queue(&mut self, number: u16, meta: usize, data: usize, rng: &mut Rng) -> Owned {
        let meta: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(meta).collect();
        let mut pieces = Vec::new();
        let mut left = data;
        while left > 0 {
            let length = rng.usize(1..=left);
            pieces.push((rng.usize(..=self.region.len() - length), length));
            left -= length;
        }
        self.near.queue(number, &meta, &pieces);
        let parts = pieces.iter().map(|&(start, length)| self.region.bytes(start, length));
        (number, meta, parts.flatten().copied().collect())
    }
}

fn receive(
    channel: &mut Channel,
    reactor: &mut Reactor,
    frames: &mut Vec<Owned>,
) -> Result<(), ChannelError> {
    while channel.receive(reactor, |frame| {
        frames.push((frame.kind, frame.meta.to_vec(), frame.data.to_vec()));
        Ok::<(), ChannelError>(())
    })? {}
    Ok(())
}

fn untouched(_: usize, _: &mut Vec<u8>) {}

#[test]
fn frames_arrive_whole_however_the_wire_cuts_them() {
    let mut ends = ends();
    let mut rng = Rng::with_seed(2);
    let (mut sent, mut received, mut back) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..300 {
        let meta = if number % 50 == 0 { LARGEST_META } else { rng.usize(..2000) };
        let data = if number % 60 == 0 { LARGEST_DATA } else { rng.usize(..30_000) };
        sent.push(ends.queue(number, meta, data, &mut rng));
        if rng.bool() {
            ends.far.queue(number, b"answer", &[]);
            ends.turn(&mut received).unwrap();
            let most = if rng.bool() { rng.usize(1..50) } else { rng.usize(1..100_000) };
            ends.carry(most, &mut untouched);
        }
    }
    assert!(ends.near.is_backed_up(), "the wire takes less than was queued");
    for _ in 0..100_000 {
        if received.len() == sent.len() {
            break;
        }
        ends.turn(&mut received).unwrap();
        ends.carry(rng.usize(1..200_000), &mut untouched);
    }
    assert!(received == sent, "frames differ from those queued");
    for _ in 0..100 {
        ends.events();
        receive(&mut ends.near, &mut ends.reactor, &mut back).unwrap();
        ends.carry(100_000, &mut untouched);
    }
    assert!(!back.is_empty() && back.iter().all(|frame| frame.1 == b"answer"));
    // The farewell is no truncation.
    ends.near.close(&mut ends.reactor);
    let end = loop {
        ends.carry(1000, &mut untouched);
        if let Err(end) = ends.turn(&mut received) {
            break end;
        }
    };
    assert!(matches!(end, ChannelError::Closed), "{end}");
}

#[test]
fn a_batch_leaves_in_one_call() {
    // Of such sockets a read returns what one call has sent.
    let (near, far) = datagrams();
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let (client, _) = handshake(b"");
    let region = Rc::new(Region::new(128 << 10).unwrap());
    let token = Token { owner: OwnerId(1), slot: 0 };
    let near = tls::protect(near, client, None).unwrap();
    let mut near = Channel::new(near, token, Some(region), &[], &mut reactor).unwrap();
    // The depth of a busy disk, and the largest request of many kernels.
    for (frames, data) in [(32, 4 << 10), (1, 128 << 10)] {
        (0..frames).for_each(|at| near.queue(1, &[0; 60], &[(at * data, data)]));
        near.flush(&mut reactor).unwrap();
        let mut sent = vec![0; 1 << 20];
        let Received::Bytes(bytes) = wire::receive(far.as_fd(), &mut sent).unwrap() else { panic!() };
        assert!(bytes > frames * (data + 60), "{bytes} bytes of {frames} frames are in the first call");
        assert!(matches!(wire::receive(far.as_fd(), &mut sent).unwrap(), Received::Nothing));
    }
}

fn datagrams() -> (OwnedFd, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

#[test]
fn no_changed_byte_becomes_a_frame() {
    for seed in 0..60 {
        let (mut ends, mut rng) = (ends(), Rng::with_seed(seed));
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for number in 0..20 {
            sent.push(ends.queue(number, 100, 4096, &mut rng));
        }
        let target = rng.usize(..20 * 4200);
        let (mut seen, bit) = (0, 1 << rng.u8(..8));
        let end = (0..10_000).find_map(|_| {
            let mut flip = |from: usize, bytes: &mut Vec<u8>| {
                if from == 0 {
                    if let Some(byte) = target.checked_sub(seen).and_then(|at| bytes.get_mut(at)) {
                        *byte ^= bit;
                    }
                    seen += bytes.len();
                }
            };
            let end = ends.turn(&mut received).err();
            ends.carry(3000, &mut flip);
            end
        });
        let end = end.unwrap_or_else(|| panic!("seed {seed}: byte {target} was changed, and nobody noticed"));
        let ChannelError::Broken(error) = &end else { panic!("seed {seed}: {end}") };
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "seed {seed}: {error}");
        assert!(received[..] == sent[..received.len()], "seed {seed}: a frame that nobody has sent");
    }
}

#[test]
fn a_stream_that_is_cut_off_is_told_from_one_that_ended() {
    for seed in 0..40 {
        let (mut ends, mut rng) = (ends(), Rng::with_seed(seed));
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for number in 0..20 {
            sent.push(ends.queue(number, 100, 4096, &mut rng));
        }
        let mut left = rng.usize(..20 * 4200);
        let end = (0..10_000).find_map(|_| {
            let end = ends.turn(&mut received).err();
            ends.carry(3000, &mut |from, bytes| {
                if from == 0 {
                    bytes.truncate(left);
                    left -= bytes.len();
                }
            });
            if left == 0 && ends.waiting[0].is_empty() {
                let _ = ends.wire[1].shutdown(Shutdown::Write);
            }
            end
        });
        let end = end.unwrap_or_else(|| panic!("seed {seed}: the end was not noticed"));
        let ChannelError::Broken(error) = &end else { panic!("seed {seed}: {end}") };
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "seed {seed}: {error}");
        assert!(received[..] == sent[..received.len()], "seed {seed}: a frame that nobody has sent");
    }
}

#[test]
fn a_peer_that_does_not_read_costs_bounded_memory_and_loses_nothing() {
    let (mut ends, mut rng) = (ends(), Rng::with_seed(5));
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    let mut number = 0;
    while !ends.near.is_backed_up() {
        sent.push(ends.queue(number, 64, 4096, &mut rng));
        number += 1;
        ends.near.flush(&mut ends.reactor).unwrap();
    }
    assert!(number < 1000, "{number} frames were taken by a wire that carries nothing");
    // The owner's memory changes, after the pieces that are not encrypted yet were copied.
    ends.near.copy_out();
    ends.region.copy_in(0, &vec![0; 8 << 20]);
    for _ in 0..10_000 {
        if received.len() == sent.len() {
            break;
        }
        ends.turn(&mut received).unwrap();
        ends.carry(5000, &mut untouched);
    }
    assert!(received == sent, "frames differ from those queued");
    assert!(!ends.near.is_backed_up());
}

#[test]
fn what_the_handshake_has_read_ahead_is_not_lost() {
    let mut early = Vec::new();
    weir_net::frame::encode(&mut early, 7, 0, b"early", 0);
    let mut ends = ends_after(handshake(&early));
    let mut received = Vec::new();
    // No byte is on the wire, and no event comes.
    receive(&mut ends.far, &mut ends.reactor, &mut received).unwrap();
    assert_eq!(received, [(7, b"early".to_vec(), Vec::new())]);
}

#[test]
fn new_keys_in_between_are_no_interruption() {
    let (mut client, server) = handshake(b"");
    client.refresh_traffic_keys().unwrap();
    let mut ends = ends_after((client, server));
    let (mut received, mut back) = (Vec::new(), Vec::new());
    let sent = ends.queue(1, 10, 4096, &mut Rng::with_seed(6));
    for _ in 0..100 {
        ends.turn(&mut received).unwrap();
        ends.carry(1 << 16, &mut untouched);
    }
    assert_eq!(received, [sent]);
    // The answer brings the far end's new keys.
    ends.far.queue(2, b"answer", &[]);
    for _ in 0..100 {
        ends.turn(&mut received).unwrap();
        ends.carry(1 << 16, &mut untouched);
        receive(&mut ends.near, &mut ends.reactor, &mut back).unwrap();
    }
    assert_eq!(back, [(2, b"answer".to_vec(), Vec::new())]);
}

/// A frame that came before the damage is delivered, also if both come at once.
#[test]
fn what_came_before_an_error_is_not_lost() {
    let (mut ends, mut rng) = (ends(), Rng::with_seed(7));
    let sent: Vec<Owned> = (0..5).map(|number| ends.queue(number, 10, 20_000, &mut rng)).collect();
    let mut bytes = Vec::new();
    for _ in 0..100 {
        ends.events();
        ends.near.flush(&mut ends.reactor).unwrap();
        let mut buffer = vec![0; 1 << 20];
        if let Ok(count) = ends.wire[0].read(&mut buffer) {
            bytes.extend_from_slice(&buffer[..count]);
        }
    }
    assert!(bytes.len() > 100_000, "all of it");
    *bytes.last_mut().unwrap() ^= 1;
    ends.wire[1].write_all(&bytes).unwrap();
    let mut received = Vec::new();
    let end = (0..100).find_map(|_| ends.turn(&mut received).err()).expect("the damage is noticed");
    assert!(
        matches!(&end, ChannelError::Broken(error) if error.kind() == io::ErrorKind::InvalidData),
        "{end}"
    );
    assert!(received == sent[..4], "{} frames of 4", received.len());
}

/// After its farewell, an end takes nothing more from the other, whatever that sends, until it closes.
#[test]
fn what_comes_after_the_farewell_is_not_looked_at() {
    let (mut client, server) = handshake(b"");
    let (wire, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let mut wire = wire;
    let Stream::Protected(fd, mut protection) = tls::protect(far.into(), server, None).unwrap() else {
        panic!("not encrypted")
    };
    protection.end(fd.as_fd());
    let mut target = [0; 4096];
    let mut receive = || protection.receive(fd.as_fd(), &mut [IoSliceMut::new(&mut target)]);
    client.writer().write_all(&[7; 300]).unwrap();
    client.send_close_notify();
    let mut records = Vec::new();
    while client.wants_write() {
        client.write_tls(&mut records).unwrap();
    }
    for bytes in [&records[..], &records[..], &[0xff; 100_000][..], b"GET / HTTP/1.1\r\n\r\n"] {
        wire.write_all(bytes).unwrap();
        for _ in 0..4 {
            assert!(matches!(receive(), Ok(Received::Nothing)));
        }
    }
    drop(wire);
    assert!(matches!(receive(), Ok(Received::End) | Err(_)));
}
