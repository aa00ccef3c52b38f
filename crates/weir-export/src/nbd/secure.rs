//! The handshake of a client where TLS is required: nothing before TLS, then only what the client's certificate names.
//!
//! The TLS handshake costs a signature, so it runs here, beside the shards; then the shard encrypts for itself
//! ([`weir_net::tls`]), as between nodes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::{Connection, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use weir_identity::{Grant, Identity, explain, other_end};
use weir_nbd::protocol::TlsMode;
use weir_nbd::server::{Directory, ExportInfo, HandshakeError, Listed, NotServed, TlsHandshake};

use super::client::{AcceptedClient, Attach, Refused};
use super::negotiation::{Agreed, End, Noted, negotiate};
use crate::handshakes::Heard;

/// Time for a refused client to read why. Without it, the kernel answers what the client sends meanwhile by a reset, and the
/// client shows that instead.
const LAST_WORDS: Duration = Duration::from_secs(1);

const PLAIN_TEXT: &str =
    "it asked for an export without TLS, which is required here; use nbds:// and a client certificate";
const NO_CERTIFICATE: &str =
    "it showed no client certificate; `weir cluster client NAME --export EXPORT` makes one";

/// The whole handshake: plain NBD up to `STARTTLS`, TLS, and NBD within TLS.
pub(super) async fn shake_hands(
    (stream, from): (TcpStream, SocketAddr),
    config: Arc<ServerConfig>,
    directory: &dyn Directory,
    attach: &dyn Attach,
    heard: Heard,
) -> Result<AcceptedClient, End> {
    let mut out = Vec::new();
    let mut handshake = TlsHandshake::new(TlsMode::Required, &mut out);
    let mut stream = Noted { stream, heard };
    match negotiate(&mut stream, &mut handshake, &Nothing, &mut out).await {
        Ok(Agreed::Tls) => {}
        Ok(Agreed::Session(_)) => return Err(HandshakeError::TlsRequired.into()),
        Err(end) => {
            match &end {
                End::Refused(error @ HandshakeError::BytesBeforeTls) => {
                    attach.refused(from, Refused::PlainText, &error.to_string());
                }
                _ if handshake.has_insisted_on_plain_text() => {
                    attach.refused(from, Refused::PlainText, PLAIN_TEXT);
                }
                _ => {}
            }
            return Err(end);
        }
    }
    let refused = |reason: String| {
        attach.refused(from, Refused::NotAdmitted, &reason);
        End::Untrusted(reason)
    };
    let mut stream = encrypt(stream, config, refused).await?;
    handshake.secured()?;
    let (socket, connection) = stream.get_ref();
    let other = other_end(connection).map_err(|error| refused(error.to_string()))?;
    let other = other.ok_or_else(|| refused(NO_CERTIFICATE.into()))?;
    let permitted =
        Permitted { all: directory, attach, from, who: other.identity.clone(), told: Mutex::default() };
    let kept = attach.admit(other, socket.stream.as_fd()).map_err(refused)?;
    let agreed = negotiate(&mut stream, &mut handshake, &permitted, &mut out).await;
    let Agreed::Session(session) = agreed? else {
        return Err(io::Error::other("TLS begins within TLS").into());
    };
    let (socket, connection) = stream.into_inner();
    let fd = OwnedFd::from(socket.stream.into_std()?);
    let stream = weir_net::tls::protect(fd, Connection::Server(connection), Some(kept))?;
    Ok(AcceptedClient { stream, leftover: handshake.into_leftover(), session, via: None })
}

/// The TLS handshake. `refused` gets the reason if one end does not accept the other.
async fn encrypt(
    stream: Noted<TcpStream>,
    config: Arc<ServerConfig>,
    refused: impl FnOnce(String) -> End,
) -> Result<TlsStream<Noted<TcpStream>>, End> {
    let (error, mut stream) = match TlsAcceptor::from(config).accept(stream).into_fallible().await {
        Ok(stream) => return Ok(stream),
        Err(failed) => failed,
    };
    let end = match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::NoCertificatesPresented) => refused(NO_CERTIFICATE.into()),
        Some(error) => refused(explain(error)),
        None => End::Broken(error),
    };
    let _ = tokio::time::timeout(LAST_WORDS, last_words(&mut stream.stream)).await;
    Err(end)
}

/// Half-closes the connection and discards what comes until the client disconnects.
async fn last_words(stream: &mut TcpStream) -> io::Result<()> {
    stream.shutdown().await?;
    let mut discarded = [0; 512];
    while stream.read(&mut discarded).await? > 0 {}
    Ok(())
}

/// The exports for a client without proof of identity.
struct Nothing;

impl Directory for Nothing {
    fn list(&self) -> Vec<Listed> {
        Vec::new()
    }

    fn lookup(&self, _: &str) -> Result<ExportInfo, NotServed> {
        Err(NotServed::Forbidden(PLAIN_TEXT.into()))
    }
}

/// The exports that a certificate names. Of all others the client does not learn whether they exist.
struct Permitted<'a> {
    all: &'a dyn Directory,
    attach: &'a dyn Attach,
    from: SocketAddr,
    who: Identity,
    /// The last refusal: clients ask for an export more than once.
    told: Mutex<String>,
}

impl Permitted<'_> {
    fn may_open(&self, name: &str) -> bool {
        self.attach.may_open(&self.who, name)
    }

    fn forbidden(&self, name: &str) -> NotServed {
        let who = &self.who;
        let makes = "`weir cluster client NAME --export EXPORT` makes one that does";
        let reason = match who {
            Identity::Client(client) => match &client.grant {
                Grant::Exports(_) => {
                    format!(
                        "{who} may not open {name:?}: its certificate names other exports, or an earlier disk of that name"
                    )
                }
                Grant::Role(role) => {
                    format!("{who} has a certificate for the API ({role}), which opens no export; {makes}")
                }
            },
            _ => format!("the certificate of {who} opens no export; {makes}"),
        };
        // At once: a client that tries names need not end its handshake.
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if *told != reason {
            self.attach.refused(self.from, Refused::NotAllowed, &reason);
            told.clone_from(&reason);
        }
        NotServed::Forbidden(reason)
    }
}

impl Directory for Permitted<'_> {
    fn list(&self) -> Vec<Listed> {
        let mut all = self.all.list();
        all.retain(|one| self.may_open(&one.name));
        all
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        if name.is_empty() {
            return match &self.list()[..] {
                [only] => self.all.lookup(&only.name),
                [] => Err(self.forbidden(name)),
                several => {
                    let reason =
                        format!("{} disks are exported here to {}; name one", several.len(), self.who);
                    Err(NotServed::Unknown(reason))
                }
            };
        }
        if !self.may_open(name) {
            return Err(self.forbidden(name));
        }
        let export = self.all.lookup(name)?;
        // An export may have another canonical name.
        if self.may_open(&export.name) { Ok(export) } else { Err(self.forbidden(name)) }
    }
}
