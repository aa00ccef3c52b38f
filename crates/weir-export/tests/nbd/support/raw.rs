//! A client that can send anything.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use weir_nbd::protocol::{
    ChunkHeader, EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, ExtendedReply, ExtendedRequest, OPTION_MAGIC,
    OptionHeader, OptionReplyHeader, REQUEST_MAGIC, RequestHeader, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, SimpleReply, command, command_flag, info, option, option_reply, reply_flag,
    reply_type,
};
use zerocopy::{FromBytes, IntoBytes};

/// A reply in the transmission phase.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Answer {
    pub cookie: u64,
    pub error: u32,
    /// Data, extents or the error's words.
    pub data: Vec<u8>,
}

pub struct RawClient {
    pub stream: UnixStream,
}

/// Everything up to the transmission phase: greeting, flags, structured replies if wished, GO with these information requests.
fn negotiate(export: &str, structured: bool, wanted: &[u16]) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    if structured {
        bytes.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    }
    let mut body = (export.len() as u32).to_be_bytes().to_vec();
    body.extend_from_slice(export.as_bytes());
    body.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
    body.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    bytes.extend(option_bytes(option::GO, &body));
    bytes
}

fn option_bytes(option: u32, body: &[u8]) -> Vec<u8> {
    let header = OptionHeader {
        magic: OPTION_MAGIC.into(),
        option: option.into(),
        length: (body.len() as u32).into(),
    };
    [header.as_bytes(), body].concat()
}

/// All replies in `bytes`, chunks put together. Data of simple replies has the length that `length_of` tells for a cookie.
pub fn answers(mut bytes: &[u8], length_of: impl Fn(u64) -> usize) -> Vec<Answer> {
    let mut answers = Vec::new();
    let mut open: BTreeMap<u64, Vec<Chunk>> = BTreeMap::new();
    while !bytes.is_empty() {
        let cookie = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
        let chunk = read_chunk(&mut bytes, length_of(cookie)).unwrap();
        let is_last = chunk.is_last;
        let chunks = open.entry(cookie).or_default();
        chunks.push(chunk);
        if is_last {
            let mut chunks = open.remove(&cookie).unwrap();
            chunks.sort_by_key(|chunk| chunk.at);
            let error = chunks.iter().map(|chunk| chunk.answer.error).max().unwrap();
            let data = chunks.into_iter().flat_map(|chunk| chunk.answer.data).collect();
            answers.push(Answer { cookie, error, data });
        }
    }
    assert!(open.is_empty(), "replies without an end");
    answers
}

/// A reply, or a part of one.
struct Chunk {
    answer: Answer,
    /// The offset of the data.
    at: u64,
    is_last: bool,
}

fn read_chunk(stream: &mut impl Read, length: usize) -> io::Result<Chunk> {
    let head = read_bytes(stream, 16)?;
    let simple = SimpleReply::read_from_bytes(&head).unwrap();
    let cookie = simple.cookie.get();
    let (flags, kind, length) = match simple.magic.get() {
        SIMPLE_REPLY_MAGIC => {
            let error = simple.error.get();
            let data = if error == 0 { read_bytes(stream, length)? } else { Vec::new() };
            return Ok(Chunk { answer: Answer { cookie, error, data }, at: 0, is_last: true });
        }
        EXTENDED_REPLY_MAGIC => {
            let header = ExtendedReply::read_from_bytes(&[head, read_bytes(stream, 16)?].concat()).unwrap();
            (header.flags.get(), header.kind.get(), header.length.get() as usize)
        }
        magic => {
            assert_eq!(magic, STRUCTURED_REPLY_MAGIC);
            let header = ChunkHeader::read_from_bytes(&[head, read_bytes(stream, 4)?].concat()).unwrap();
            (header.flags.get(), header.kind.get(), header.length.get() as usize)
        }
    };
    let body = read_bytes(stream, length)?;
    let (error, skipped, at) = match kind {
        reply_type::ERROR => {
            assert_eq!(usize::from(u16::from_be_bytes([body[4], body[5]])), body.len() - 6);
            (u32::from_be_bytes(body[..4].try_into().unwrap()), 6, 0)
        }
        reply_type::NONE => (0, 0, 0),
        reply_type::OFFSET_DATA => (0, 8, u64::from_be_bytes(body[..8].try_into().unwrap())),
        reply_type::BLOCK_STATUS => (0, 4, 0),
        reply_type::BLOCK_STATUS_EXT => (0, 8, 0),
        other => panic!("a chunk of type {other}"),
    };
    let answer = Answer { cookie, error, data: body[skipped..].to_vec() };
    Ok(Chunk { answer, at, is_last: flags & reply_flag::DONE != 0 })
}

fn read_bytes(stream: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl RawClient {
    /// Connects and does nothing else.
    pub fn connect(socket: &Path) -> RawClient {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        RawClient { stream }
    }

    /// Connects and enters the transmission phase, with block sizes negotiated.
    pub fn enter(socket: &Path, export: &str, structured: bool) -> RawClient {
        RawClient::connect(socket).negotiated(export, structured, &[info::BLOCK_SIZE])
    }

    /// As [`RawClient::enter`], over TCP.
    pub fn enter_tcp(address: SocketAddr, export: &str) -> RawClient {
        // All that is asked of the stream works on any socket.
        let stream = UnixStream::from(OwnedFd::from(TcpStream::connect(address).unwrap()));
        RawClient { stream }.negotiated(export, true, &[info::BLOCK_SIZE])
    }

    /// As `nbd-client` does, which asks for nothing: it may use any offset and length.
    pub fn enter_without_sizes(socket: &Path, export: &str, structured: bool) -> RawClient {
        RawClient::connect(socket).negotiated(export, structured, &[])
    }

    fn negotiated(mut self, export: &str, structured: bool, wanted: &[u16]) -> RawClient {
        self.read(18);
        self.stream.write_all(&negotiate(export, structured, wanted)).unwrap();
        loop {
            let (option, kind, body) = self.option_reply();
            assert!(kind & option_reply::ERROR == 0, "{}", String::from_utf8_lossy(&body));
            if option == option::GO && kind == option_reply::ACK {
                return self;
            }
        }
    }

    /// Option, type and body of the next reply to an option.
    pub fn option_reply(&mut self) -> (u32, u32, Vec<u8>) {
        let header = OptionReplyHeader::read_from_bytes(&self.read(20)).unwrap();
        let body = self.read(header.length.get() as usize);
        (header.option.get(), header.kind.get(), body)
    }

    pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
        let header = RequestHeader {
            magic: REQUEST_MAGIC.into(),
            flags: flags.into(),
            command: command.into(),
            cookie: cookie.into(),
            offset: offset.into(),
            length: length.into(),
        };
        header.as_bytes().to_vec()
    }

    /// With extended headers; a write says that it carries data.
    pub fn extended_request(command: u16, flags: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
        let payload = if command == command::WRITE { command_flag::PAYLOAD_LEN } else { 0 };
        let header = ExtendedRequest {
            magic: EXTENDED_REQUEST_MAGIC.into(),
            flags: (flags | payload).into(),
            command: command.into(),
            cookie: cookie.into(),
            offset: offset.into(),
            length: length.into(),
        };
        header.as_bytes().to_vec()
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn read(&mut self, length: usize) -> Vec<u8> {
        read_bytes(&mut self.stream, length).unwrap()
    }

    /// The next reply, which has one chunk; `length` is that of the data, if it is a successful simple reply to a read.
    pub fn answer(&mut self, length: usize) -> Answer {
        let chunk = read_chunk(&mut self.stream, length).unwrap();
        assert!(chunk.is_last, "the reply has one chunk");
        chunk.answer
    }

    /// The chunks of the next reply, a structured one, up to the last.
    pub fn chunks(&mut self) -> Vec<Answer> {
        let mut chunks = Vec::new();
        loop {
            let chunk = read_chunk(&mut self.stream, 0).unwrap();
            chunks.push(chunk.answer);
            if chunk.is_last {
                return chunks;
            }
        }
    }

    /// Whether the server has closed the connection without sending anything more.
    pub fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(0) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
            Ok(_) => false,
        }
    }

    /// Writes a block and reads it back.
    pub fn verify_block(&mut self, offset: u64, pattern: u8) {
        let mut bytes = RawClient::request(command::WRITE, 0, 1, offset, 4096);
        bytes.extend_from_slice(&[pattern; 4096]);
        bytes.extend(RawClient::request(command::READ, 0, 2, offset, 4096));
        self.send(&bytes[..4096 + 28]);
        assert_eq!(self.answer(0), Answer { cookie: 1, error: 0, data: vec![] });
        self.send(&bytes[4096 + 28..]);
        assert_eq!(self.answer(4096), Answer { cookie: 2, error: 0, data: vec![pattern; 4096] });
    }
}
