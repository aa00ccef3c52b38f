//! An NBD client: for the load, and for every test and tool that talks to an export.
//!
//! [`Connection`] is for load: the caller chooses slots below a fixed depth, one `sendmsg` sends everything started since the
//! last call, and one `recv` takes all bytes that have arrived. [`NbdClient`] builds on it and is for convenience: one call, one
//! answer.

mod batch;
mod body;
mod connection;
mod decoder;
mod dial;
mod error;
mod handshake;
mod simple;
mod slot;
mod system;

pub use body::Body;
pub use connection::{Connection, Options};
pub use decoder::Done;
pub use dial::{Dialed, Place, list_exports, places};
pub use error::{NbdError, errno_text};
pub use handshake::{Export, Negotiation, NegotiationError};
pub use simple::{Answer, Completed, NbdClient, Ticket};
pub use slot::{CommandFlags, NbdCommand};
