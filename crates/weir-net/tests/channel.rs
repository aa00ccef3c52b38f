//! Channels over real sockets: for all sizes and partial sends, frames arrive whole, in order, and once.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use fastrand::Rng;
use weir_block::{Action, Nanos, Reactor, ReactorConfig, Region, Token};
use weir_net::frame::{self, LARGEST_DATA, LARGEST_META};
use weir_net::{Channel, ChannelError};

struct Ends {
    reactor: Reactor,
    near: Channel,
    far: Channel,
    region: Rc<Region>,
}

fn ends() -> Ends {
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let region = Rc::new(Region::new(8 << 20).unwrap());
    let mut rng = Rng::with_seed(1);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(region.len()).collect();
    region.copy_in(0, &noise);
    let (near, far) = UnixStream::pair().unwrap();
    let token = |slot| Token { owner: weir_block::OwnerId(1), slot };
    let near = Channel::new(near.into(), token(0), Some(region.clone()), &[], &mut reactor).unwrap();
    let far = Channel::new(far.into(), token(1), None, &[], &mut reactor).unwrap();
    Ends { reactor, near, far, region }
}

/// Kind, meta, data.
type Owned = (u16, Vec<u8>, Vec<u8>);

impl Ends {
    /// One turn of a shard's loop; returns the frames received at the far end.
    fn turn(&mut self) -> Result<Vec<Owned>, ChannelError> {
        let mut events = Vec::new();
        self.reactor.wait(Nanos(0), &mut events).unwrap();
        for event in events {
            let Action::Ready(interest) = event.action else { panic!("only sockets here") };
            let end = if event.token.slot == 0 { &mut self.near } else { &mut self.far };
            end.on_event(interest);
        }
        self.near.flush(&mut self.reactor)?;
        let mut frames = Vec::new();
        while self.far.receive(&mut self.reactor, |frame| {
            frames.push((frame.kind, frame.meta.to_vec(), frame.data.to_vec()));
            Ok::<(), ChannelError>(())
        })? {}
        Ok(frames)
    }
}

#[test]
fn frames_of_all_sizes_arrive_whole_and_in_order() {
    let mut ends = ends();
    let mut rng = Rng::with_seed(2);
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    for number in 0..300u16 {
        let meta = match number % 50 {
            0 => LARGEST_META,
            _ => rng.usize(..2000),
        };
        let meta: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(meta).collect();
        let mut pieces = Vec::new();
        let most = if number % 60 == 0 { LARGEST_DATA } else { 30_000 };
        let mut left = if number % 60 == 0 { LARGEST_DATA } else { rng.usize(..most) };
        while left > 0 {
            let length = left.min(rng.usize(1..=most));
            pieces.push((rng.usize(..=ends.region.len() - length), length));
            left -= length;
        }
        ends.near.queue(number, &meta, &pieces);
        let parts = pieces.iter().map(|&(start, length)| ends.region.bytes(start, length));
        sent.push((number, meta, parts.flatten().copied().collect::<Vec<u8>>()));
        if rng.bool() {
            received.extend(ends.turn().unwrap());
        }
    }
    assert!(ends.near.is_backed_up(), "the socket holds less than was queued");
    for _ in 0..100_000 {
        if received.len() == sent.len() {
            break;
        }
        received.extend(ends.turn().unwrap());
    }
    assert!(!ends.near.is_backed_up());
    assert!(received == sent);
}

#[test]
fn malformed_bytes_end_the_channel_after_the_frames_before_them() {
    let (mut stream, far) = UnixStream::pair().unwrap();
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let token = Token { owner: weir_block::OwnerId(1), slot: 0 };
    let mut early = Vec::new();
    frame::encode(&mut early, 7, 0, b"early", 0);
    let (early, late) = early.split_at(10);
    let mut channel = Channel::new(far.into(), token, None, early, &mut reactor).unwrap();
    stream.write_all(late).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: weir\r\n\r\n            ").unwrap();
    let mut events = Vec::new();
    reactor.wait(Nanos::NEVER, &mut events).unwrap();
    for event in events {
        let Action::Ready(interest) = event.action else { panic!("only sockets here") };
        channel.on_event(interest);
    }
    let mut kinds = Vec::new();
    let result = channel.receive(&mut reactor, |frame| {
        kinds.push(frame.kind);
        Ok::<(), ChannelError>(())
    });
    assert!(matches!(result, Err(ChannelError::Frame(_))), "{result:?}");
    assert_eq!(kinds, [7]);
}

#[test]
fn copied_pieces_are_sent_unchanged() {
    let mut ends = ends();
    let mut rng = Rng::with_seed(3);
    let mut expected = Vec::new();
    for number in 0..40 {
        let pieces: Vec<(usize, usize)> =
            (0..3).map(|_| (rng.usize(..4 << 20), rng.usize(1..200_000))).collect();
        let data = pieces.iter().flat_map(|piece| ends.region.bytes(piece.0, piece.1)).copied().collect();
        ends.near.queue(number, b"meta", &pieces);
        expected.push((number, b"meta".to_vec(), data));
    }
    // The first are partly sent; more are queued after the copy.
    let mut arrived = ends.turn().unwrap();
    assert!(arrived.len() < 20, "the socket buffer is larger than this test assumes");
    ends.near.copy_out();
    ends.region.copy_in(0, &vec![0; 5 << 20]);
    ends.near.queue(40, b"late", &[(100, 5)]);
    expected.push((40, b"late".to_vec(), vec![0; 5]));
    while arrived.len() < expected.len() {
        arrived.extend(ends.turn().unwrap());
    }
    assert!(arrived == expected, "frames differ from those queued");
}
