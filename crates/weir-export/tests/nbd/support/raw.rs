//! A client that says what it likes.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use weir_export::nbd::protocol::{
    ChunkHeader, OPTION_MAGIC, OptionHeader, OptionReplyHeader, REQUEST_MAGIC, RequestHeader,
    SIMPLE_REPLY_MAGIC, SimpleReply, command, option, option_reply, reply_type,
};
use zerocopy::{FromBytes, IntoBytes};

/// A reply in the transmission phase.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    pub error: u32,
    /// The data of a structured read, without its offset.
    pub data: Vec<u8>,
}

pub struct RawClient {
    pub stream: UnixStream,
}

/// Everything up to the transmission phase: greeting, flags, structured replies if wished, GO.
pub fn negotiate(export: &str, structured: bool) -> Vec<u8> {
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

    pub fn send_option(&mut self, option: u32, body: &[u8]) {
        self.stream.write_all(&option_bytes(option, body)).unwrap();
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
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The next reply; `length` is that of the data, if it is a successful simple reply to a read.
    pub fn answer(&mut self, length: usize) -> Answer {
        let head = self.read(16);
        let simple = SimpleReply::read_from_bytes(&head).unwrap();
        if simple.magic == SIMPLE_REPLY_MAGIC {
            let error = simple.error.get();
            let data = if error == 0 { self.read(length) } else { Vec::new() };
            return Answer { cookie: simple.cookie.get(), error, data };
        }
        let header = ChunkHeader::read_from_bytes(&[head, self.read(4)].concat()).unwrap();
        let body = self.read(header.length.get() as usize);
        let cookie = header.cookie.get();
        match header.kind.get() {
            reply_type::ERROR => {
                let error = u32::from_be_bytes(body[..4].try_into().unwrap());
                Answer { cookie, error, data: body[6..].to_vec() }
            }
            reply_type::OFFSET_DATA => Answer { cookie, error: 0, data: body[8..].to_vec() },
            _ => Answer { cookie, error: 0, data: body },
        }
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
