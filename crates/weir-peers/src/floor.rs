//! The floor: the cost of a bare socket without a server behind it.
//!
//! A request is 4 KiB and an answer 64 bytes. At depth 1 that is a ping-pong; deeper, each side processes all bytes that have
//! arrived and answers in one send, which is the best that any protocol on one stream can do. The answering side is a process of
//! its own, like a server: this program, started again.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use weir_block::Nanos;
use weir_load::tally::{IoKind, Tally};

use crate::driver::Figures;
use crate::error::{Failure, Outcome};
use crate::process::Process;
use crate::server::{Transport, Workspace, free_port};

const REQUEST: usize = 4096;
const ANSWER: usize = 64;

/// Largest batch, in requests.
const BATCH: usize = 64;

/// The answering process.
pub struct Echo {
    process: Process,
    address: String,
    transport: Transport,
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

impl Echo {
    /// Starts it.
    pub fn start(workspace: &Workspace, transport: Transport) -> Outcome<Echo> {
        let address = match transport {
            Transport::Unix => workspace.socket("echo").to_string_lossy().into_owned(),
            Transport::Tcp => free_port()?.to_string(),
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["echo", transport.name(), &address]);
        let process = Process::start(&mut command)?;
        Ok(Echo { process, address, transport })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Keeps `depth` requests in flight for `runtime`.
    pub fn drive(&self, depth: usize, runtime: Duration) -> Outcome<Figures> {
        let mut stream = self.connect()?;
        let cpu = weir_load::cpu::of_this_thread();
        let start = Nanos::now();
        let (mut tally, end) = (Tally::default(), start + runtime);
        let requests = vec![7; REQUEST * depth];
        let mut answers = vec![0; ANSWER * depth];
        let (mut sent, mut left_over) = (Nanos::now(), 0);
        stream.write_all(&requests)?;
        let mut under_way = depth;
        while under_way > 0 {
            let arrived = left_over + stream.read(&mut answers)?;
            if arrived == left_over {
                return Err(Failure("the echo process has gone".into()));
            }
            let (whole, now) = (arrived / ANSWER, Nanos::now());
            left_over = arrived % ANSWER;
            (0..whole).for_each(|_| {
                tally.count(IoKind::Write, REQUEST as u64, (now - sent).as_nanos() as u64, true)
            });
            under_way -= whole;
            if now < end && whole > 0 {
                sent = Nanos::now();
                stream.write_all(&requests[..whole * REQUEST])?;
                under_way += whole;
            }
        }
        Ok(Figures::of_writes(&tally, start, cpu))
    }

    fn connect(&self) -> Outcome<Box<dyn Stream>> {
        let deadline = Nanos::now() + Duration::from_secs(5);
        loop {
            match connect(self.transport, &self.address) {
                Ok(stream) => return Ok(stream),
                Err(error) if Nanos::now() >= deadline => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

fn connect(transport: Transport, address: &str) -> Outcome<Box<dyn Stream>> {
    match transport {
        Transport::Unix => Ok(Box::new(UnixStream::connect(address)?)),
        Transport::Tcp => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream))
        }
    }
}

/// The answering process: serves one client after the other, without end.
pub fn serve(transport: Transport, address: &str) -> Outcome<()> {
    match transport {
        Transport::Unix => {
            let listener = UnixListener::bind(Path::new(address))?;
            listener.incoming().try_for_each(|stream| answer(stream?))
        }
        Transport::Tcp => TcpListener::bind(address)?.incoming().try_for_each(|stream| {
            let stream = stream?;
            stream.set_nodelay(true)?;
            answer(stream)
        }),
    }
}

fn answer(mut stream: impl Stream) -> Outcome<()> {
    let mut inbox = vec![0; REQUEST * BATCH];
    let answers = vec![9; ANSWER * (BATCH + 1)];
    let mut left_over = 0;
    loop {
        let read = stream.read(&mut inbox).unwrap_or(0);
        if read == 0 {
            return Ok(());
        }
        let arrived = left_over + read;
        left_over = arrived % REQUEST;
        if stream.write_all(&answers[..arrived / REQUEST * ANSWER]).is_err() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_answered() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let worker = std::thread::spawn(move || answer(server));
        let mut answers = [0; 3 * ANSWER];
        client.write_all(&[1; REQUEST / 2]).unwrap();
        client.write_all(&[1; 2 * REQUEST + REQUEST / 2]).unwrap();
        client.read_exact(&mut answers).unwrap();
        assert_eq!(answers, [9; 3 * ANSWER]);
        drop(client);
        assert!(worker.join().unwrap().is_ok());
    }
}
