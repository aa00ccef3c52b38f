//! HTTP over TLS: the API for other hosts, and requests to it.
//!
//! Connections are bounded in all and for each address, and one that does not complete its handshake in time is dropped: the node
//! waits for no client (P10).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use weir_block::Nanos;
use weir_identity::{Endpoint, Host, LARGEST_MESSAGE, explain, other_end};

use crate::access::{Caller, group};
use crate::error::ApiError;
use crate::gate::Gate;
use crate::identity::NodeIdentity;
use crate::throttles::API_REFUSED;

/// The beginning of a URL of the API over TLS.
pub const HTTPS: &str = "https://";

/// The header with the number of times that nodes have forwarded a request.
pub(crate) const FORWARDED: &str = "weir-forwarded";

/// Connections at once; further ones wait in the kernel's queue.
const CONNECTIONS: usize = 256;
/// Connections of one address at once; further ones are closed.
const OF_ONE_ADDRESS: usize = 32;
/// Longest wait for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longest wait for the header of a request.
const HEADER: Duration = Duration::from_secs(10);
/// Longest wait for an answer of another node.
const PATIENCE: Duration = Duration::from_secs(15);

/// Serves until dropped.
pub async fn serve(
    listener: TcpListener,
    identity: Arc<NodeIdentity>,
    config: Arc<ServerConfig>,
    gate: Gate,
) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let shares = Arc::new(Shares::default());
    let mut connections = JoinSet::new();
    loop {
        let place = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, from)) => {
                let Some(share) = Share::of(&shares, from.ip()) else { continue };
                let (gate, identity, config) = (gate.clone(), Arc::clone(&identity), Arc::clone(&config));
                connections.spawn(async move {
                    let (_place, _share) = (place, share);
                    if let Err(reason) = connection(stream, from, &identity, config, gate.clone()).await {
                        refuse(&gate, from, reason).await;
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the API cannot accept a connection over TLS");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Why it did not come to a request: in words.
async fn connection(
    stream: TcpStream,
    from: SocketAddr,
    identity: &NodeIdentity,
    config: Arc<ServerConfig>,
    gate: Gate,
) -> Result<(), String> {
    let handshake = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await;
    let stream = handshake.map_err(|_| "its handshake did not complete in time".to_owned())?;
    let stream = stream.map_err(|error| explained(&error))?;
    let (socket, connection) = stream.get_ref();
    let other = other_end(connection).map_err(|error| error.to_string())?;
    // A revocation ends the connection.
    let _admitted = match &other {
        Some(other) => Some(identity.admit(other.clone(), socket)?),
        None => None,
    };
    gate.serve(stream, Caller::Remote { other, from }, HEADER).await;
    Ok(())
}

/// Records a connection that was refused, rarely: whoever knocks could fill the log.
async fn refuse(gate: &Gate, from: SocketAddr, reason: String) {
    let Some(left_out) = API_REFUSED.pass(Nanos::now()) else { return };
    tracing::warn!(%from, reason, left_out, "a connection to the API was refused");
    if let Some(audit) = gate.audit() {
        let mut line = audit.line("unproven".into(), from.to_string(), "connect".into());
        (line.outcome, line.reason) = ("refused", reason);
        audit.write(line).await;
    }
}

fn explained(error: &std::io::Error) -> String {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    tls.map_or_else(|| error.to_string(), explain)
}

/// Why a node gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// The node does not accept this end's certificate, or the lack of one.
    #[error("{0}")]
    Refused(String),
    /// This end does not accept the node's certificate.
    #[error("{0}")]
    Mistrusted(String),
    /// The node's certificate is not valid yet, by this host's clock.
    #[error("{0}")]
    NotYet(String),
    /// It cannot be reached, or the connection ended.
    #[error("{0}")]
    Unreachable(String),
}

impl NoAnswer {
    fn unreachable(error: &dyn std::fmt::Display) -> NoAnswer {
        NoAnswer::Unreachable(error.to_string())
    }

    fn of(error: &std::io::Error) -> NoAnswer {
        use rustls::AlertDescription as Alert;
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(
                refused @ rustls::Error::AlertReceived(
                    Alert::BadCertificate
                    | Alert::CertificateExpired
                    | Alert::CertificateRequired
                    | Alert::CertificateRevoked
                    | Alert::CertificateUnknown
                    | Alert::UnknownCA
                    | Alert::AccessDenied,
                ),
            ) => NoAnswer::Refused(explain(refused)),
            Some(
                early @ rustls::Error::InvalidCertificate(
                    CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
                ),
            ) => NoAnswer::NotYet(explain(early)),
            Some(
                mistrusted @ (rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented),
            ) => NoAnswer::Mistrusted(explain(mistrusted)),
            _ => NoAnswer::Unreachable(explained(error)),
        }
    }
}

/// Why a request failed. In TLS 1.3 a client learns that its certificate is refused only with the first answer.
pub fn reason(error: &hyper::Error) -> NoAnswer {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(one) = cause {
        if let Some(io) = one.downcast_ref::<std::io::Error>() {
            return NoAnswer::of(io);
        }
        cause = one.source();
    }
    NoAnswer::unreachable(error)
}

/// Open connections by address.
#[derive(Debug, Default)]
struct Shares(Mutex<BTreeMap<IpAddr, usize>>);

/// One connection of an address.
#[derive(Debug)]
struct Share(Arc<Shares>, IpAddr);

impl Share {
    fn of(shares: &Arc<Shares>, address: IpAddr) -> Option<Share> {
        let address = group(address);
        let mut all = shares.0.lock().unwrap_or_else(PoisonError::into_inner);
        let open = all.entry(address).or_default();
        if *open >= OF_ONE_ADDRESS {
            return None;
        }
        *open += 1;
        Some(Share(Arc::clone(shares), address))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut all = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.get_mut(&self.1) {
            Some(open) if *open > 1 => *open -= 1,
            _ => drop(all.remove(&self.1)),
        }
    }
}

/// The answer of a node.
#[derive(Debug)]
pub enum Answer {
    /// The request was carried out.
    Done(Bytes),
    /// The node's error.
    Refused(ApiError),
}

/// Posts a message to a node, and waits for its answer.
///
/// # Errors
/// [`NoAnswer`].
pub async fn post(
    endpoint: &Endpoint,
    tls: &Arc<ClientConfig>,
    path: &str,
    body: Vec<u8>,
    headers: &[(&'static str, String)],
) -> Result<Answer, NoAnswer> {
    let exchange = exchange(endpoint, tls, path, body, headers);
    tokio::time::timeout(PATIENCE, exchange).await.unwrap_or_else(|_| {
        Err(NoAnswer::Unreachable(format!("it has not answered for {} s", PATIENCE.as_secs())))
    })
}

async fn exchange(
    endpoint: &Endpoint,
    tls: &Arc<ClientConfig>,
    path: &str,
    body: Vec<u8>,
    headers: &[(&'static str, String)],
) -> Result<Answer, NoAnswer> {
    let words = |error: &dyn std::fmt::Display| NoAnswer::unreachable(error);
    let stream = connect(endpoint, tls).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| words(&error))?;
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header(header::HOST, "weir")
        .header(header::CONTENT_TYPE, "application/json");
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    let request = request.body(Full::new(Bytes::from(body))).map_err(|error| words(&error))?;
    let response = sender.send_request(request).await.map_err(|error| reason(&error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), LARGEST_MESSAGE).collect().await;
    let body = body.map_err(|error| words(&error))?.to_bytes();
    if status.is_success() {
        return Ok(Answer::Done(body));
    }
    let error = serde_json::from_slice(&body);
    error.map(Answer::Refused).map_err(|_| {
        NoAnswer::Unreachable(format!("it answers with status {status}, and is no node of Weir"))
    })
}

/// Connects to a node, and completes the handshake.
///
/// # Errors
/// [`NoAnswer`].
pub async fn connect(endpoint: &Endpoint, tls: &Arc<ClientConfig>) -> Result<TlsStream<TcpStream>, NoAnswer> {
    let words = |error: &dyn std::fmt::Display| NoAnswer::unreachable(error);
    let stream = match &endpoint.host {
        Host::Ip(address) => TcpStream::connect((*address, endpoint.port)).await,
        Host::Dns(name) => TcpStream::connect((&**name, endpoint.port)).await,
    };
    let stream = stream.map_err(|error| words(&error))?;
    // Who answers is in the certificate's URI; this name is not sent, and does not count.
    let name = ServerName::try_from("node.weir.invalid").map_err(|error| words(&error))?;
    let stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await;
    stream.map_err(|error| NoAnswer::of(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_behind_is_told_from_another_cluster() {
        let of = |why| {
            let error = rustls::Error::InvalidCertificate(why);
            NoAnswer::of(&std::io::Error::new(std::io::ErrorKind::InvalidData, error))
        };
        assert!(matches!(of(CertificateError::NotValidYet), NoAnswer::NotYet(_)));
        assert!(matches!(of(CertificateError::UnknownIssuer), NoAnswer::Mistrusted(_)));
    }
}
