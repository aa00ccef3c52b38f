//! Channels between nodes without the nodes: what TLS costs for each frame, and how near it is to rustls alone.
//!
//! A sender and a receiver, one thread each, over TCP. A frame has the size of a replicated 4 KiB write. The receiver decrypts what
//! has arrived until nothing is left, and then answers once, as a replica confirms. The bare loop does the same with rustls and
//! blocking sockets, and with nothing else: no frames, no checksums, no reactor.
//!
//! The exchange has to be the same, because it decides how often a thread waits and is woken, and on an idle processor that
//! costs more than the encryption of a frame. Answers to every read of 64 KiB keep both threads busy where processors are idle,
//! and cost more calls and wake-ups for each frame where they are not.

use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};
use tempfile::TempDir;
use weir_block::{
    Action, Event, Nanos, OwnerId, Reactor, ReactorConfig, Received, Region, Stream, Token, wire,
};
use weir_load::cpu;
use weir_load::tally::{IoKind, Tally};
use weir_net::{Channel, ChannelError, tls};
use weir_node::identity::NodeIdentity;

use crate::driver::Figures;
use crate::error::{Failure, Outcome};

/// Data of a frame, in bytes.
const DATA: usize = 4096;
/// Its meta part: a batch of one record.
const META: [u8; 52] = [7; 52];
/// The bytes of a frame on the wire.
const FRAME: usize = 32 + META.len() + DATA;
/// A confirmation, in bytes.
const ANSWER: usize = 72;
/// The bytes that one read of the bare loop takes: more than the frames under way, so that one call takes all.
const READ: usize = 256 << 10;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Weir's channel in plain text.
    Plain,
    /// Weir's channel over TLS.
    Tls,
    /// rustls alone.
    Bare,
}

/// Two nodes with identities of one cluster.
pub struct Pair {
    near: Arc<NodeIdentity>,
    far: Arc<NodeIdentity>,
    _directory: TempDir,
}

/// The result of a measurement.
pub struct Measured {
    /// Of the sender: frames, their latencies, its processor time.
    pub figures: Figures,
    /// Processor time of the receiver for each second.
    pub receiver_cpu: f64,
}

impl Pair {
    /// Makes the identities.
    pub fn new() -> Outcome<Pair> {
        let directory = tempfile::tempdir()?;
        let authority = weir_lab::identities::authority(directory.path())?;
        let identity = |name: &str| {
            let path = weir_lab::identities::of(directory.path(), &directory.path().join(name), name)?;
            Outcome::Ok(NodeIdentity::load(&path, name)?)
        };
        drop(authority);
        let (near, far) = (identity("near")?, identity("far")?);
        Ok(Pair { near, far, _directory: directory })
    }

    /// Sends frames for `runtime`, `depth` of them unconfirmed.
    pub fn drive(&self, kind: Kind, depth: usize, runtime: Duration) -> Outcome<Measured> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        let far = listener.accept()?.0;
        for socket in [&near, &far] {
            socket.set_nodelay(true)?;
        }
        let receiver = Arc::clone(&self.far);
        let receiver = std::thread::spawn(move || -> Outcome<Duration> {
            let began;
            match kind {
                Kind::Plain => {
                    began = cpu::of_this_thread();
                    receive(far.into())?;
                }
                Kind::Tls => {
                    let (socket, connection) = server(&receiver, far)?;
                    began = cpu::of_this_thread();
                    receive(tls::protect(socket.into(), connection, None)?)?;
                }
                Kind::Bare => {
                    let (socket, connection) = server(&receiver, far)?;
                    began = cpu::of_this_thread();
                    receive_bare(socket, connection)?;
                }
            }
            Ok(cpu::of_this_thread() - began)
        });
        let figures = match kind {
            Kind::Plain => send(near.into(), depth, runtime),
            Kind::Tls => {
                let (socket, connection) = client(&self.near, near)?;
                send(tls::protect(socket.into(), connection, None)?, depth, runtime)
            }
            Kind::Bare => {
                let (socket, connection) = client(&self.near, near)?;
                send_bare(socket, connection, depth, runtime)
            }
        }?;
        let used = receiver.join().map_err(|_| Failure("the receiver has panicked".into()))??;
        Ok(Measured { figures, receiver_cpu: used.as_secs_f64() / figures.seconds })
    }
}

fn client(identity: &NodeIdentity, mut socket: TcpStream) -> Outcome<(TcpStream, Connection)> {
    let config = identity.peer_client("far").map_err(Failure)?;
    let mut connection = ClientConnection::new(config, ServerName::try_from("far")?)?;
    while connection.is_handshaking() || connection.wants_write() {
        connection.complete_io(&mut socket)?;
    }
    Ok((socket, connection.into()))
}

fn server(identity: &NodeIdentity, mut socket: TcpStream) -> Outcome<(TcpStream, Connection)> {
    let mut connection = ServerConnection::new(identity.peer_server())?;
    while connection.is_handshaking() || connection.wants_write() {
        connection.complete_io(&mut socket)?;
    }
    Ok((socket, connection.into()))
}

/// A channel with its reactor.
struct End {
    reactor: Reactor,
    channel: Channel,
    events: Vec<Event>,
}

impl End {
    fn new(stream: Stream, region: Option<Rc<Region>>) -> Outcome<End> {
        // The processor time of busy-polling would count as that of TLS.
        let config = ReactorConfig { poll: Duration::ZERO, ..ReactorConfig::default() };
        let mut reactor = Reactor::new(config)?;
        let token = Token { owner: OwnerId(1), slot: 0 };
        let channel = Channel::new(stream, token, region, &[], &mut reactor)?;
        Ok(End { reactor, channel, events: Vec::new() })
    }

    /// Waits for an event.
    fn wait(&mut self) -> Outcome<()> {
        self.reactor.wait(Nanos::NEVER, &mut self.events)?;
        for event in self.events.drain(..) {
            if let Action::Ready(interest) = event.action {
                self.channel.on_event(interest);
            }
        }
        Ok(())
    }

    /// Takes what has arrived; returns how many frames, and the last number in them.
    fn take(&mut self) -> Result<(u64, u64), ChannelError> {
        let (mut count, mut last) = (0, 0);
        while self.channel.receive(&mut self.reactor, |frame| {
            count += 1;
            last = frame.meta.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            Ok::<(), ChannelError>(())
        })? {}
        Ok((count, last))
    }
}

fn send(stream: Stream, depth: usize, runtime: Duration) -> Outcome<Figures> {
    let region = Rc::new(Region::new(depth * DATA)?);
    let mut end = End::new(stream, Some(region))?;
    let (used, start) = (cpu::of_this_thread(), Nanos::now());
    let mut run = Run::new(depth);
    while run.goes_on(start + runtime) {
        for _ in 0..run.due(start + runtime) {
            let piece = (run.issued as usize % depth * DATA, DATA);
            end.channel.queue(11, &META, &[piece]);
            run.issue();
        }
        end.channel.flush(&mut end.reactor)?;
        end.wait()?;
        let (count, taken) = end.take()?;
        if count > 0 {
            run.confirmed(taken);
        }
    }
    let figures = Figures::of_writes(&run.tally, start, used);
    end.channel.close(&mut end.reactor);
    Ok(figures)
}

fn receive(stream: Stream) -> Outcome<()> {
    let mut end = End::new(stream, None)?;
    let mut taken = 0_u64;
    loop {
        match end.take() {
            Ok((0, _)) => {}
            Ok((count, _)) => {
                taken += count;
                let mut meta = [0; ANSWER - 32];
                meta[..8].copy_from_slice(&taken.to_le_bytes());
                end.channel.queue(10, &meta, &[]);
            }
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        end.channel.flush(&mut end.reactor)?;
        end.wait()?;
    }
}

/// Frames under way.
struct Run {
    depth: usize,
    issued: u64,
    confirmed: u64,
    /// By number, modulo the depth.
    sent: Vec<Nanos>,
    tally: Tally,
}

impl Run {
    fn new(depth: usize) -> Run {
        Run { depth, issued: 0, confirmed: 0, sent: vec![Nanos(0); depth], tally: Tally::default() }
    }

    fn goes_on(&self, end: Nanos) -> bool {
        self.confirmed < self.issued || Nanos::now() < end
    }

    /// Frames to send now.
    fn due(&self, end: Nanos) -> usize {
        if Nanos::now() < end { self.depth - (self.issued - self.confirmed) as usize } else { 0 }
    }

    fn issue(&mut self) {
        self.sent[self.issued as usize % self.depth] = Nanos::now();
        self.issued += 1;
    }

    fn confirmed(&mut self, all: u64) {
        let now = Nanos::now();
        for number in self.confirmed..all {
            let took = (now - self.sent[number as usize % self.depth]).as_nanos() as u64;
            self.tally.count(IoKind::Write, DATA as u64, took, true);
        }
        self.confirmed = all;
    }
}

fn send_bare(
    mut socket: TcpStream,
    mut connection: Connection,
    depth: usize,
    runtime: Duration,
) -> Outcome<Figures> {
    let frames = vec![7; FRAME * depth];
    let (used, start) = (cpu::of_this_thread(), Nanos::now());
    let (mut run, mut received, mut answers) = (Run::new(depth), vec![0; READ], Vec::new());
    connection.set_buffer_limit(None);
    while run.goes_on(start + runtime) {
        let due = run.due(start + runtime);
        (0..due).for_each(|_| run.issue());
        connection.writer().write_all(&frames[..due * FRAME])?;
        while connection.wants_write() {
            connection.write_tls(&mut socket)?;
        }
        if run.confirmed < run.issued {
            let bytes = socket.read(&mut received)?;
            if bytes == 0 {
                return Err(Failure("the receiver ended before it confirmed every frame".into()));
            }
            decrypt(&received[..bytes], &mut connection, &mut answers)?;
            let whole = answers.len() / ANSWER * ANSWER;
            if let Some(last) = answers[..whole].chunks_exact(ANSWER).next_back() {
                run.confirmed(last.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)));
            }
            answers.drain(..whole);
        }
    }
    connection.send_close_notify();
    connection.write_tls(&mut socket)?;
    Ok(Figures::of_writes(&run.tally, start, used))
}

fn receive_bare(mut socket: TcpStream, mut connection: Connection) -> Outcome<()> {
    let (mut received, mut content, mut taken) = (vec![0; READ], Vec::new(), 0_u64);
    while let bytes @ 1.. = socket.read(&mut received)? {
        let mut arrived = Received::Bytes(bytes);
        while let Received::Bytes(bytes) = arrived {
            if !decrypt(&received[..bytes], &mut connection, &mut content)? {
                return Ok(());
            }
            // As a channel does: nothing else is there.
            arrived = match bytes < received.len() {
                true => Received::Nothing,
                false => wire::receive(socket.as_fd(), &mut received)?,
            };
        }
        let whole = content.len() / FRAME;
        content.drain(..whole * FRAME);
        taken += whole as u64;
        if whole > 0 {
            let mut answer = [0; ANSWER];
            answer[..8].copy_from_slice(&taken.to_le_bytes());
            connection.writer().write_all(&answer)?;
            while connection.wants_write() {
                connection.write_tls(&mut socket)?;
            }
        }
    }
    Ok(())
}

/// Appends what is in the records. `false`: the other end has said farewell.
fn decrypt(mut records: &[u8], connection: &mut Connection, content: &mut Vec<u8>) -> Outcome<bool> {
    while !records.is_empty() {
        connection.read_tls(&mut records)?;
        let state = connection.process_new_packets()?;
        let mut waiting = state.plaintext_bytes_to_read();
        while waiting > 0 {
            let mut reader = connection.reader();
            let chunk = reader.fill_buf()?;
            content.extend_from_slice(chunk);
            let bytes = chunk.len();
            reader.consume(bytes);
            waiting -= bytes;
        }
        if state.peer_has_closed() {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_confirms_every_frame() {
        let pair = Pair::new().unwrap();
        for kind in [Kind::Plain, Kind::Tls, Kind::Bare] {
            for depth in [1, 32] {
                let measured = pair.drive(kind, depth, Duration::from_millis(30)).unwrap();
                assert!(measured.figures.iops > 0.0 && measured.figures.p50 > 0.0, "{kind:?} {depth}");
            }
        }
    }
}
