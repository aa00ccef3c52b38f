//! The exports that the handshake can offer, and the session that it agrees on.

use weir_block::LayerInfo;

use crate::protocol::{LARGEST_PAYLOAD, option_reply, transmission_flag as flag};

/// The exports of a server. The control plane calls it; it answers from memory, without blocking.
pub trait Directory: Send + Sync {
    /// All exports that a client may see.
    fn list(&self) -> Vec<Listed>;

    /// The export of this name. The empty name asks for the default export, if there is one.
    ///
    /// # Errors
    /// The export is unknown or not served here at present.
    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed>;
}

/// The reason why a server does not serve an export, as a sentence for the client's user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// No export has this name.
    Unknown(String),
    /// The export exists, but this server does not serve it at present.
    Unavailable(String),
    /// This client may not open it. Says nothing about whether it exists.
    Forbidden(String),
}

impl NotServed {
    /// The number of the error reply to an option ("Option reply types").
    #[must_use]
    pub fn reply(&self) -> u32 {
        match self {
            NotServed::Unknown(_) => option_reply::ERR_UNKNOWN,
            NotServed::Unavailable(_) | NotServed::Forbidden(_) => option_reply::ERR_POLICY,
        }
    }

    /// The message.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            NotServed::Unknown(reason) | NotServed::Unavailable(reason) | NotServed::Forbidden(reason) => {
                reason
            }
        }
    }
}

/// One line of the list of exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The name that clients request.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
}

/// An export, as described in the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The canonical name, at most 4096 bytes.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// Size, block sizes and capabilities of the layer behind it.
    pub layer: LayerInfo,
}

impl ExportInfo {
    /// The transmission flags ("Transmission flags").
    ///
    /// `CAN_MULTI_CONN` is true by construction: all connections of a disk are on one shard and one layer.
    #[must_use]
    pub fn flags(&self, structured_replies: bool) -> u16 {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FUA | flag::SEND_CACHE | flag::CAN_MULTI_CONN;
        if self.layer.writable {
            flags |= flag::SEND_FLUSH | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO;
        } else {
            flags |= flag::READ_ONLY;
        }
        if structured_replies {
            flags |= flag::SEND_DF;
        }
        flags
    }

    /// Smallest and preferred block and largest payload in bytes ("Size constraints"). The last is the same for every disk: the
    /// server splits requests that exceed the limits of a layer or of its memory.
    #[must_use]
    pub fn block_sizes(&self) -> [u32; 3] {
        let minimum = self.layer.logical_block;
        let preferred = self.layer.preferred_block.max(minimum).max(512).next_power_of_two();
        [minimum, preferred, LARGEST_PAYLOAD]
    }
}

/// The agreement of client and server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Session {
    /// Canonical name of the chosen export.
    pub export: String,
    /// The server answers reads and errors with chunks: structured replies, or extended headers.
    pub structured_replies: bool,
    /// Requests and replies have extended headers.
    pub extended_headers: bool,
    /// The server has sent the block sizes, and the client must respect them. Otherwise any offset and length is valid.
    pub block_sizes: bool,
    /// Number of the context `base:allocation`, if the client has selected it.
    pub base_allocation: Option<u32>,
    /// The transmission flags that the client received. With `READ_ONLY` it may only read.
    pub flags: u16,
}
