//! Connections between nodes: the greeting that says what a connection is for.
//!
//! An owner connects to a replica's node, one connection for each disk and replica, and sends one greeting. From then on the
//! connection belongs to the two shards. A node that a disk is about to move to connects to its owner in the same way, as a
//! client of the disk: from the greeting on they speak NBD's transmission phase. So does a node that forwards a client of its own
//! ([`crate::exports`]): the owner first sends the byte [`WELCOME`], before which nothing of the client's is sent. The greeting,
//! little-endian:
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 8 | `WEIRPEER` |
//! | 8 | 2 | version, 1 |
//! | 10 | 2 | length of the whole greeting |
//! | 12 | 1 | length of the disk's name; 0 where all disks are meant |
//! | 13 | 1 | length of the name of the node that connects |
//! | 14 | 1 | length of the name of the node that is meant |
//! | 15 | 1 | purpose: 0 to replicate; 1 as a client, plus 2 with structured replies, plus 4 with `base:allocation`, plus 8 as a forwarded one, plus 16 with extended headers, plus 32 if any byte can be addressed; 8 for grants; 12 to read the disk, in NBD with extended headers ([`crate::control::readers`]); 64 to ask whether the disk can be opened ([`crate::control::agreement`]); 128 for redirected I/O, to the coordinator of its volume ([`weir_volume::lun::redirect`]) |
//! | 16 | 8 | incarnation of the process that is meant |
//! | 24 | … | the three names, UTF-8, in this order |
//! | length − 12 | 8 | for a forwarded client, the identity of the disk that it has opened: another one may have the name by now |
//! | length − 4 | 4 | CRC-32C of everything before |
//!
//! Between nodes with identities all of this is inside TLS ([`crate::network`]), and the name of the node that connects must be that
//! of its certificate. The greeting names the intended node and incarnation because addresses are reused and processes restart: a copy counts for
//! the process that has it (P1), so a process that is greeted by another name hangs up.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use weir_block::Stream;
use weir_cluster::records::{MAX_NAME, NodeRef, check_name};
use weir_nbd::server::Session;

const MAGIC: &[u8; 8] = b"WEIRPEER";
/// The first bytes of a client that speaks TLS (RFC 8446 §5.1).
const TLS_HANDSHAKE: [u8; 2] = [22, 3];
const VERSION: u16 = 1;
const HEADER: usize = 24;
const IDENTITY: usize = 8;
const CHECKSUM: usize = 4;
const LONGEST: usize = HEADER + 3 * MAX_NAME + IDENTITY + CHECKSUM;

/// The owner's answer to the greeting of a forwarded client: it takes that client's requests. A greeting that is refused can be made
/// again, because nothing was asked yet.
pub const WELCOME: u8 = 0x57;

/// The greeting of a connection: both ends, and its purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The disk that it is about.
    pub disk: String,
    /// The node that connects: the disk's owner, to replicate.
    pub owner: String,
    /// The process that is meant: the replica, or the owner of whom the disk is wanted.
    pub replica: NodeRef,
    /// The purpose.
    pub purpose: Purpose,
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The owner of the disk has its log replicated.
    Replicate,
    /// Owners of any disks on the node that connects ask for grants and seals ([`crate::control::grants`]).
    Grants,
    /// The owner of the disk asks whether this node can open it ([`crate::control::agreement`]).
    Opens,
    /// The owner of the disk has the coordinator of its volume do I/O ([`weir_volume::lun::redirect`]).
    Redirect,
    /// Programs on the node that connects read the disk ([`weir_export::fuse::reading_session`]).
    Read,
    /// Requests of a client of the disk, which has agreed on this ([`weir_nbd::server::Session`]).
    Client {
        /// Reads and errors are answered with structured replies.
        structured_replies: bool,
        /// Requests and replies have extended headers.
        extended_headers: bool,
        /// The client keeps to the block sizes.
        block_sizes: bool,
        /// The context `base:allocation` is selected.
        base_allocation: bool,
        /// It stays a client of the node that connects, and has opened the disk of this identity; otherwise that node follows the
        /// disk.
        forwarded: Option<u64>,
    },
}

impl Purpose {
    const CLIENT: u8 = 1;
    const STRUCTURED: u8 = 2;
    const ALLOCATION: u8 = 4;
    const GRANTS: u8 = 8;
    /// With [`Purpose::CLIENT`].
    const FORWARDED: u8 = 8;
    const READ: u8 = 12;
    const EXTENDED: u8 = 16;
    const ANY_BYTE: u8 = 32;
    const OPENS: u8 = 64;
    const REDIRECT: u8 = 128;

    /// Of a client that has agreed on `session` elsewhere. `forwarded`: as the field.
    #[must_use]
    pub fn client(session: &Session, forwarded: Option<u64>) -> Purpose {
        Purpose::Client {
            structured_replies: session.structured_replies,
            extended_headers: session.extended_headers,
            block_sizes: session.block_sizes,
            base_allocation: session.base_allocation.is_some(),
            forwarded,
        }
    }

    fn encode(self) -> u8 {
        match self {
            Purpose::Replicate => 0,
            Purpose::Grants => Self::GRANTS,
            Purpose::Opens => Self::OPENS,
            Purpose::Read => Self::READ,
            Purpose::Redirect => Self::REDIRECT,
            Purpose::Client {
                structured_replies,
                extended_headers,
                block_sizes,
                base_allocation,
                forwarded,
            } => {
                let bit = |set: bool, bit: u8| if set { bit } else { 0 };
                Self::CLIENT
                    | bit(structured_replies, Self::STRUCTURED)
                    | bit(extended_headers, Self::EXTENDED)
                    | bit(!block_sizes, Self::ANY_BYTE)
                    | bit(base_allocation, Self::ALLOCATION)
                    | bit(forwarded.is_some(), Self::FORWARDED)
            }
        }
    }

    /// Whether the identity of a disk follows the names.
    fn has_identity(byte: u8) -> bool {
        byte & Self::CLIENT != 0 && byte & Self::FORWARDED != 0
    }

    /// `identity`: that of the disk, of a forwarded client.
    fn decode(byte: u8, identity: Option<u64>) -> Option<Purpose> {
        let all = Self::CLIENT
            | Self::STRUCTURED
            | Self::ALLOCATION
            | Self::FORWARDED
            | Self::EXTENDED
            | Self::ANY_BYTE;
        match byte {
            0 => Some(Purpose::Replicate),
            Self::GRANTS => Some(Purpose::Grants),
            Self::OPENS => Some(Purpose::Opens),
            Self::READ => Some(Purpose::Read),
            Self::REDIRECT => Some(Purpose::Redirect),
            byte if byte & Self::CLIENT != 0 && byte & !all == 0 => Some(Purpose::Client {
                structured_replies: byte & Self::STRUCTURED != 0,
                extended_headers: byte & Self::EXTENDED != 0,
                block_sizes: byte & Self::ANY_BYTE == 0,
                base_allocation: byte & Self::ALLOCATION != 0,
                forwarded: identity,
            }),
            _ => None,
        }
    }
}

/// Why a greeting was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum GreetingError {
    /// It does not begin as a greeting does: another protocol, or a port scan.
    #[error("not a greeting of a Weir node")]
    Foreign,
    /// TLS instead of a greeting.
    #[error(
        "it speaks TLS, and this node has no identity: join the cluster (`weir cluster join`) and set identity.directory"
    )]
    Encrypted,
    /// Another version of Weir.
    #[error(
        "greeting version {0}, this node speaks version {VERSION}: run the same version of Weir on all nodes"
    )]
    Version(u16),
    /// A length or a name is outside its bounds.
    #[error("malformed greeting: {0}")]
    Malformed(&'static str),
    /// The checksum is wrong (P11).
    #[error("the greeting's checksum is wrong")]
    Checksum,
    /// It did not come whole, or not in time.
    #[error("the connection ended during the greeting: {0}")]
    Ended(#[from] io::Error),
}

impl Greeting {
    /// The bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let names = [&self.disk, &self.owner, &self.replica.node];
        let identity = match self.purpose {
            Purpose::Client { forwarded, .. } => forwarded.map(u64::to_le_bytes),
            _ => None,
        };
        let names_length = names.iter().map(|name| name.len()).sum::<usize>();
        let length = HEADER + names_length + identity.map_or(0, |bytes| bytes.len()) + CHECKSUM;
        debug_assert!(length <= LONGEST, "names are checked where they are made");
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(length as u16).to_le_bytes());
        bytes.extend(names.iter().map(|name| name.len() as u8));
        bytes.push(self.purpose.encode());
        bytes.extend_from_slice(&self.replica.incarnation.to_le_bytes());
        for name in names {
            bytes.extend_from_slice(name.as_bytes());
        }
        bytes.extend(identity.into_iter().flatten());
        let checksum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads one greeting and nothing beyond it.
    ///
    /// # Errors
    /// The greeting is invalid; the connection is then useless.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Greeting, GreetingError> {
        let mut bytes = [0; LONGEST];
        stream.read_exact(&mut bytes[..HEADER]).await?;
        let length = check_header(&bytes)?;
        stream.read_exact(&mut bytes[HEADER..length]).await?;
        decode(&bytes[..length])
    }
}

/// The length of the whole greeting, from its header.
fn check_header(header: &[u8]) -> Result<usize, GreetingError> {
    if header[..2] == TLS_HANDSHAKE {
        return Err(GreetingError::Encrypted);
    }
    if &header[..8] != MAGIC {
        return Err(GreetingError::Foreign);
    }
    let number = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    if number(8) != VERSION {
        return Err(GreetingError::Version(number(8)));
    }
    let names: usize = header[12..15].iter().map(|&length| usize::from(length)).sum();
    let length = usize::from(number(10));
    let identity = if Purpose::has_identity(header[15]) { IDENTITY } else { 0 };
    if length > LONGEST || length != HEADER + names + identity + CHECKSUM {
        return Err(GreetingError::Malformed("the lengths do not add up"));
    }
    Ok(length)
}

fn decode(bytes: &[u8]) -> Result<Greeting, GreetingError> {
    let (content, checksum) = bytes.split_at(bytes.len() - CHECKSUM);
    if crc32c::crc32c(content).to_le_bytes() != checksum {
        return Err(GreetingError::Checksum);
    }
    let mut rest = &content[HEADER..];
    let identity = match rest.split_last_chunk() {
        Some((names, identity)) if Purpose::has_identity(content[15]) => {
            rest = names;
            Some(u64::from_le_bytes(*identity))
        }
        _ => None,
    };
    let mut name = |length: u8| {
        let (name, after) = rest.split_at(usize::from(length));
        rest = after;
        let name = std::str::from_utf8(name).map_err(|_| GreetingError::Malformed("a name is not UTF-8"))?;
        check_name(name).map_err(|_| GreetingError::Malformed("a name has characters that no name has"))?;
        Ok::<_, GreetingError>(name.to_owned())
    };
    let incarnation = u64::from_le_bytes(content[16..24].try_into().expect("eight bytes"));
    let purpose =
        Purpose::decode(content[15], identity).ok_or(GreetingError::Malformed("an unknown purpose"))?;
    let of_all = purpose == Purpose::Grants && content[12] == 0;
    let disk = if of_all { String::new() } else { name(content[12])? };
    let (owner, replica) = (name(content[13])?, name(content[14])?);
    Ok(Greeting { disk, owner, replica: NodeRef::new(replica, incarnation), purpose })
}

/// The result of a step that connects to another node.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send + 'a>>;

/// A connection that a task of the control plane uses.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Duplex for S {}

/// A connection of another node's, which turns out to be for a task or for a shard.
pub trait Incoming: Duplex + 'static {
    /// For a shard, non-blocking. Nothing of what was not read is lost.
    ///
    /// # Errors
    /// The system refuses.
    fn into_stream(self) -> io::Result<Stream>;
}

/// The way to other nodes. Each call connects and greets, however long that takes.
pub trait Network: Send + Sync {
    /// A connection for a shard, non-blocking.
    ///
    /// # Errors
    /// The node cannot be reached.
    fn connect<'a>(&'a self, address: SocketAddr, greeting: &'a Greeting) -> Pending<'a, Stream>;

    /// A connection for a task.
    ///
    /// # Errors
    /// The node cannot be reached.
    fn open<'a>(&'a self, address: SocketAddr, greeting: &'a Greeting) -> Pending<'a, Box<dyn Duplex>>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Greeting {
        let replica = NodeRef::new("n2", 7);
        Greeting { disk: "db".into(), owner: "n1".into(), replica, purpose: Purpose::Replicate }
    }

    fn read(bytes: &[u8]) -> Result<Greeting, GreetingError> {
        let mut bytes = bytes;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Greeting::read(&mut bytes))
    }

    #[test]
    fn the_layout_is_as_documented() {
        let golden: &[u8] = b"WEIRPEER\x01\x00\x22\x00\x02\x02\x02\x00\x07\x00\x00\x00\x00\x00\x00\x00dbn1n2";
        let bytes = example().encode();
        assert_eq!(&bytes[..bytes.len() - 4], golden);
        assert_eq!(bytes[bytes.len() - 4..], crc32c::crc32c(golden).to_le_bytes());
        assert_eq!(read(&bytes).unwrap(), example());
        for byte in [1, 3, 5, 7, 9, 17, 19, 23, 33, 35, 55, 63] {
            let purpose = Purpose::Client {
                structured_replies: byte & 2 != 0,
                extended_headers: byte & 16 != 0,
                block_sizes: byte & 32 == 0,
                base_allocation: byte & 4 != 0,
                forwarded: (byte & 8 != 0).then_some(0x0102_0304_0506_0708),
            };
            let greeting = Greeting { purpose, ..example() };
            let bytes = greeting.encode();
            assert_eq!(bytes[15], byte);
            assert_eq!(read(&bytes).unwrap(), greeting);
            if byte & 8 != 0 {
                assert_eq!(bytes[bytes.len() - 12..bytes.len() - 4], [8, 7, 6, 5, 4, 3, 2, 1]);
            }
        }
        let question = Greeting { purpose: Purpose::Opens, ..example() };
        assert_eq!((question.encode()[15], read(&question.encode()).unwrap()), (64, question));
        let redirect = Greeting { purpose: Purpose::Redirect, ..example() };
        assert_eq!((redirect.encode()[15], read(&redirect.encode()).unwrap()), (128, redirect));
        let reads = Greeting { purpose: Purpose::Read, ..example() };
        assert_eq!((reads.encode()[15], read(&reads.encode()).unwrap()), (12, reads));
        assert!(
            [2, 4, 6, 14, 65, 73, 10, 16, 65, 129, 192, 255].into_iter().all(|byte| Purpose::decode(
                byte,
                Some(1)
            )
            .is_none())
        );
    }

    #[test]
    fn nothing_beyond_the_greeting_is_read() {
        let mut bytes = example().encode();
        bytes.extend_from_slice(b"frames");
        let mut rest = bytes.as_slice();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Greeting::read(&mut rest)).unwrap();
        assert_eq!(rest, b"frames");
    }

    #[test]
    fn what_is_wrong_is_told() {
        assert!(matches!(read(b"GET /v1/status HTTP/1.1\r\n\r\n"), Err(GreetingError::Foreign)));
        assert!(matches!(
            read(&[22, 3, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            Err(GreetingError::Encrypted)
        ));
        assert!(matches!(read(&example().encode()[..28]), Err(GreetingError::Ended(_))));
        let mut newer = example().encode();
        newer[8] = 2;
        assert!(matches!(read(&newer), Err(GreetingError::Version(2))));
        let mut odd = Greeting { disk: "a b".into(), ..example() }.encode();
        assert!(matches!(read(&odd), Err(GreetingError::Malformed(_))));
        odd[10] = 200;
        assert!(matches!(read(&odd), Err(GreetingError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_refused(bit in 0usize..34 * 8) {
            let mut bytes = example().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(read(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = read(&bytes);
            let mut framed = b"WEIRPEER\x01\x00".to_vec();
            framed.extend_from_slice(&bytes);
            let _ = read(&framed);
        }
    }
}
