//! The handshake of a server that offers TLS ("TLS support"), without I/O.

use super::directory::Directory;
use super::handshake::{Handshake, HandshakeError, Step, Tls};
use crate::protocol::TlsMode;

/// The result of [`TlsHandshake::step`].
#[derive(Debug, PartialEq, Eq)]
pub enum TlsStep {
    /// As without TLS.
    Negotiation(Step),
    /// Send the output in plain text, then run the TLS handshake, then call [`TlsHandshake::secured`]. If the TLS handshake fails,
    /// close the connection.
    StartTls,
}

/// One client's handshake at a server that may speak TLS. Use it as a [`Handshake`]; after [`TlsStep::StartTls`] pass only
/// decrypted bytes to [`TlsHandshake::receive`], and encrypt the output.
///
/// The [`Directory`] may change with the step: what a client sees can depend on its certificate.
#[derive(Debug)]
pub struct TlsHandshake(Handshake);

impl TlsHandshake {
    /// Begins a handshake: appends the greeting to `out`.
    pub fn new(mode: TlsMode, out: &mut Vec<u8>) -> TlsHandshake {
        let tls = match mode {
            TlsMode::Off => Tls::Off,
            TlsMode::Optional => Tls::Optional,
            TlsMode::Required => Tls::Required,
        };
        TlsHandshake(Handshake::with_tls(tls, out))
    }

    /// Takes bytes from the client, see [`Handshake::receive`].
    pub fn receive(&mut self, bytes: &[u8]) {
        self.0.receive(bytes);
    }

    /// Processes one message, see [`Handshake::step`].
    pub fn step(&mut self, directory: &dyn Directory, out: &mut Vec<u8>) -> TlsStep {
        let before = self.0.tls();
        let step = self.0.step(directory, out);
        if self.0.tls() == Tls::Starting && before != Tls::Starting {
            return TlsStep::StartTls;
        }
        TlsStep::Negotiation(step)
    }

    /// The TLS handshake is complete. Everything that the client negotiated before it is forgotten.
    ///
    /// # Errors
    /// [`HandshakeError::BytesBeforeTls`] if bytes were received since [`TlsStep::StartTls`], which came in plain text. Close the
    /// connection.
    pub fn secured(&mut self) -> Result<(), HandshakeError> {
        self.0.secured()
    }

    /// TLS is in use.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.0.tls() == Tls::On
    }

    /// TLS is required, and the client has asked for something else without it: it was refused, or has begun TLS since.
    #[must_use]
    pub fn has_insisted_on_plain_text(&self) -> bool {
        self.0.insisted()
    }

    /// The bytes that the client sent ahead of the transmission phase.
    #[must_use]
    pub fn into_leftover(self) -> Vec<u8> {
        self.0.into_leftover()
    }
}
