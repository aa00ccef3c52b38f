//! The server's end of the protocol, without sockets and without disks.
//!
//! [`Handshake`] consumes and produces bytes until both ends agree on a [`Session`]. In the transmission phase [`RequestHead`]
//! parses request headers, [`check_request`] checks requests before they go to the layer behind the export, [`error_number`] and
//! [`describe_extents`] encode the layer's results.

mod check;
mod directory;
mod handshake;
mod option;
mod request;
mod status;
mod tls;

pub use check::{CheckedRequest, Refusal, Terms, check_request, error_number};
pub use directory::{Directory, ExportInfo, Listed, NotServed, Session};
pub use handshake::{BASE_ALLOCATION_ID, Handshake, HandshakeError, MOST_OPTION_BYTES, Step};
pub use request::{RequestHead, WrongMagic};
pub use status::{Asked, LONGEST_STATUS, STATUS_BYTES, describe_extents};
pub use tls::{TlsHandshake, TlsStep};
