//! A server that does what servers may do: it ends without what it has not flushed, and it carries a write out late.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use weir_block::LayerInfo;
use weir_nbd::Uri;
use weir_nbd::protocol::{command, error as errno};
use weir_nbd::server::{Directory, ExportInfo, Handshake, Listed, NotServed, RequestHead, Session, Step};
use weir_volume::BackingKind;

pub const SIZE: u64 = 8 << 20;
pub const BLOCK: usize = 4096;

/// What a server does with its next writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Writes {
    #[default]
    Answer,
    /// It takes them, and does nothing before it is told to.
    Hold,
    /// It carries them out and answers them when it is told to.
    Late,
    /// It breaks the connection instead of an answer.
    Break,
    /// It has no space for them.
    Refuse,
}

#[derive(Default)]
pub struct Disk {
    /// What a crash leaves, and what is newer.
    durable: BTreeMap<u64, Vec<u8>>,
    pub volatile: BTreeMap<u64, Vec<u8>>,
    pub writes: Writes,
    /// Writes that are to be carried out late.
    pub held: Vec<(u64, Vec<u8>)>,
    /// Their answers.
    late: Vec<(UnixStream, Vec<u8>)>,
    pub fails_flush: bool,
    /// The connections, to be cut.
    connections: Vec<UnixStream>,
    pub flushes: usize,
    pub size: u64,
}

impl Disk {
    pub fn read(&self, block: u64) -> Vec<u8> {
        let found = self.volatile.get(&block).or_else(|| self.durable.get(&block));
        found.cloned().unwrap_or_else(|| vec![0; BLOCK])
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for (at, block) in data.chunks(BLOCK).enumerate() {
            self.volatile.insert(offset / BLOCK as u64 + at as u64, block.to_vec());
        }
    }
}

/// A server in this process. Its exports have one disk, whatever their names.
pub struct Server {
    pub disk: Arc<Mutex<Disk>>,
    /// It accepts connections.
    is_there: Arc<AtomicBool>,
    pub socket: PathBuf,
    _directory: tempfile::TempDir,
}

struct Exports(u64);

impl Directory for Exports {
    fn list(&self) -> Vec<Listed> {
        vec![Listed { name: "d".into(), description: String::new() }]
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        let layer = LayerInfo {
            size: self.0,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: 1 << 20,
            writable: true,
            fast_zeroes: true,
            discards: true,
        };
        Ok(ExportInfo { name: name.into(), description: String::new(), layer })
    }
}

impl Server {
    pub fn new() -> Server {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let disk = Arc::new(Mutex::new(Disk { size: SIZE, ..Disk::default() }));
        let is_there = Arc::new(AtomicBool::new(true));
        let (shared, there) = (Arc::clone(&disk), Arc::clone(&is_there));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                if there.load(Ordering::Relaxed) {
                    let disk = Arc::clone(&shared);
                    thread::spawn(move || serve(stream, &disk));
                }
            }
        });
        Server { disk, is_there, socket, _directory: directory }
    }

    pub fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn break_connections(&self) {
        for stream in self.lock().connections.drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Its process ends, with what it has not flushed.
    pub fn crash(&self) {
        self.lock().volatile.clear();
        self.break_connections();
    }

    pub fn leave(&self) {
        self.is_there.store(false, Ordering::Relaxed);
        self.break_connections();
    }

    pub fn come_back(&self) {
        self.is_there.store(true, Ordering::Relaxed);
    }

    /// A write of a broken connection is carried out.
    pub fn land(&self) {
        let mut disk = self.lock();
        for (offset, data) in std::mem::take(&mut disk.held) {
            disk.write(offset, &data);
        }
    }

    /// Writes that were carried out late are answered.
    pub fn answer(&self) {
        for (mut stream, bytes) in std::mem::take(&mut self.lock().late) {
            stream.write_all(&bytes).unwrap();
        }
    }

    pub fn kind(&self) -> BackingKind {
        BackingKind::Nbd { server: Uri::unix(&self.socket, ""), export: "d".into() }
    }
}

fn serve(mut stream: UnixStream, disk: &Mutex<Disk>) -> Option<()> {
    let size = disk.lock().ok()?.size;
    let session = shake_hands(&mut stream, Exports(size))?;
    disk.lock().ok()?.connections.push(stream.try_clone().ok()?);
    loop {
        let mut header = vec![0; RequestHead::size(session.extended_headers)];
        stream.read_exact(&mut header).ok()?;
        let (head, _) = RequestHead::read(&header, session.extended_headers).ok()??;
        let mut payload = vec![0; head.payload as usize];
        stream.read_exact(&mut payload).ok()?;
        let mut disk = disk.lock().ok()?;
        let (mut number, mut data) = (0, Vec::new());
        let blocks = head.offset / BLOCK as u64..(head.offset + head.length) / BLOCK as u64;
        match (head.command, disk.writes) {
            (command::READ, _) => data = blocks.flat_map(|block| disk.read(block)).collect(),
            (command::WRITE, Writes::Hold) => {
                disk.held.push((head.offset, payload));
                continue;
            }
            (command::WRITE, Writes::Late) => {
                disk.held.push((head.offset, payload));
                let answer = reply(&session, head, 0, &[]);
                disk.late.push((stream.try_clone().ok()?, answer));
                continue;
            }
            (command::WRITE, Writes::Break) => {
                disk.held.push((head.offset, payload));
                disk.connections.clear();
                return None;
            }
            (command::WRITE, Writes::Refuse) => number = errno::ENOSPC,
            (command::WRITE, Writes::Answer) => disk.write(head.offset, &payload),
            (command::WRITE_ZEROES, _) => {
                disk.write(head.offset, &vec![0; head.length as usize]);
            }
            (command::FLUSH, _) if disk.fails_flush => {
                disk.fails_flush = false;
                disk.volatile.clear();
                number = errno::EIO;
            }
            (command::FLUSH, _) => {
                disk.flushes += 1;
                let volatile = std::mem::take(&mut disk.volatile);
                disk.durable.extend(volatile);
            }
            (command::DISC, _) => return None,
            _ => number = errno::EINVAL,
        }
        drop(disk);
        stream.write_all(&reply(&session, head, number, &data)).ok()?;
    }
}

fn shake_hands(stream: &mut UnixStream, exports: Exports) -> Option<Session> {
    let mut output = Vec::new();
    let mut handshake = Handshake::new(&mut output);
    let mut bytes = [0; 4096];
    loop {
        let step = handshake.step(&exports, &mut output);
        stream.write_all(&std::mem::take(&mut output)).ok()?;
        match step {
            Step::Attach(session) => return Some(session),
            Step::Continue => {}
            Step::NeedMore => {
                let count = stream.read(&mut bytes).ok().filter(|&count| count > 0)?;
                handshake.receive(&bytes[..count]);
            }
            Step::Aborted | Step::Refused(_) => return None,
        }
    }
}

/// In the extended form, which Weir's handshake agrees on.
fn reply(session: &Session, head: RequestHead, number: u32, data: &[u8]) -> Vec<u8> {
    assert!(session.extended_headers);
    let (kind, body) = match (number, head.command) {
        (0, command::READ) => (1u16, [&head.offset.to_be_bytes()[..], data].concat()),
        (0, _) => (0, Vec::new()),
        _ => (0x8001, [&number.to_be_bytes()[..], &[0, 0]].concat()),
    };
    let mut bytes = vec![0x6e, 0x8a, 0x27, 0x8c, 0, 1];
    bytes.extend(kind.to_be_bytes());
    bytes.extend(head.cookie.to_be_bytes());
    bytes.extend(head.offset.to_be_bytes());
    bytes.extend((body.len() as u64).to_be_bytes());
    bytes.extend(body);
    bytes
}
