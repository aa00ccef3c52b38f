//! An NBD client: for the load, and for every test and tool that talks to an export.
//!
//! [`Connection`] is made for load: the caller chooses slots below a fixed depth, everything started since the
//! last call leaves in one `sendmsg`, and one `recv` takes all that has arrived. [`Client`] stands on it and is
//! made for people: one call, one answer.
//!
//! The protocol's reference is `doc/proto.md` of the NetworkBlockDevice project; comments cite its sections.
//! The URI is that of `doc/uri.md` there.

mod batch;
mod client;
mod connection;
mod decoder;
mod error;
mod handshake;
mod slot;
mod uri;

pub use client::{Answer, Client, Completed, Ticket};
pub use connection::{Connection, Options};
pub use decoder::Done;
pub use error::{NbdError, errno_text};
pub use handshake::Export;
pub use slot::{Command, CommandFlags};
pub use uri::{Address, Uri, UriError};

use weir_export::nbd::protocol;
