//! A client that says what it likes.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use weir_nbd::protocol::{
    ChunkHeader, OPTION_MAGIC, OptionHeader, OptionReplyHeader, REQUEST_MAGIC, RequestHeader,
    SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, SimpleReply, command, option, option_reply, reply_flag,
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

/// Everything up to the transmission phase: greeting, flags, structured replies if wished, GO.
fn negotiate(export: &str, structured: bool) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    if structured {
        bytes.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    }
    let mut body = (export.len() as u32).to_be_bytes().to_vec();
    body.extend_from_slice(export.as_bytes());
    body.extend_from_slice(&0u16.to_be_bytes());
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

/// All replies in `bytes`. Data of simple replies has the length that `length_of` tells for a cookie.
pub fn answers(mut bytes: &[u8], length_of: impl Fn(u64) -> usize) -> Vec<Answer> {
    let mut answers = Vec::new();
    while !bytes.is_empty() {
        let cookie = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
        answers.push(read_answer(&mut bytes, length_of(cookie)).unwrap());
    }
    answers
}

fn read_answer(stream: &mut impl Read, length: usize) -> io::Result<Answer> {
    let head = read_bytes(stream, 16)?;
    let simple = SimpleReply::read_from_bytes(&head).unwrap();
    if simple.magic == SIMPLE_REPLY_MAGIC {
        let error = simple.error.get();
        let data = if error == 0 { read_bytes(stream, length)? } else { Vec::new() };
        return Ok(Answer { cookie: simple.cookie.get(), error, data });
    }
    let header = ChunkHeader::read_from_bytes(&[head, read_bytes(stream, 4)?].concat()).unwrap();
    assert_eq!(header.magic.get(), STRUCTURED_REPLY_MAGIC);
    assert_eq!(header.flags.get(), reply_flag::DONE, "all replies have one chunk");
    let body = read_bytes(stream, header.length.get() as usize)?;
    let cookie = header.cookie.get();
    Ok(match header.kind.get() {
        reply_type::ERROR => {
            assert_eq!(usize::from(u16::from_be_bytes([body[4], body[5]])), body.len() - 6);
            let error = u32::from_be_bytes(body[..4].try_into().unwrap());
            Answer { cookie, error, data: body[6..].to_vec() }
        }
        reply_type::OFFSET_DATA => Answer { cookie, error: 0, data: body[8..].to_vec() },
        reply_type::BLOCK_STATUS => Answer { cookie, error: 0, data: body[4..].to_vec() },
        other => panic!("a chunk of type {other}"),
    })
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

    /// Connects and enters the transmission phase.
    pub fn enter(socket: &Path, export: &str, structured: bool) -> RawClient {
        let mut client = RawClient::connect(socket);
        client.read(18);
        client.stream.write_all(&negotiate(export, structured)).unwrap();
        loop {
            let (option, kind, body) = client.option_reply();
            assert!(kind & option_reply::ERROR == 0, "{}", String::from_utf8_lossy(&body));
            if option == option::GO && kind == option_reply::ACK {
                return client;
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

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn read(&mut self, length: usize) -> Vec<u8> {
        read_bytes(&mut self.stream, length).unwrap()
    }

    /// The next reply; `length` is that of the data, if it is a successful simple reply to a read.
    pub fn answer(&mut self, length: usize) -> Answer {
        read_answer(&mut self.stream, length).unwrap()
    }

    /// Whether the server has closed the connection, having said nothing more.
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
