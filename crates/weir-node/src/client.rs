//! A blocking client of a node's API, for the command line, the lab and tests.

mod calls;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use weir_cluster::records::{NodeRecord, NodeRef, check_name};
use weir_identity::{
    CaCertificate, CredentialStore, Credentials, Endpoint, Fingerprint, Host, JoinAnswer, Name, Revocations,
    Store, Tls, Trust, TrustStore, provider,
};

use crate::api::{ApiError, ApiErrorKind, Elsewhere, Owned, RunLoad};

pub use crate::https::HTTPS;
use crate::https::{self, FORWARDED, NoAnswer};
use crate::identity::{NodeIdentity, WallClock};
use crate::shard::barrier::{HELD, REACHED};

/// Longest answer that is read, in bytes.
const LONGEST_ANSWER: usize = 64 << 20;

/// Time limit of a request that changes something. Loads take their own time on top.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Time limit of a read-only request: a node waits for its shards, the registry and other nodes for a second or two each.
pub(crate) const LOOK: Duration = Duration::from_secs(15);

/// Most nodes that one request is sent on to.
const MOST_FOLLOWED: u32 = 4;

/// A live node answers a ping within this time, however busy it is.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);

/// A node's API at a Unix socket. One connection for each request; not for use inside an async runtime.
#[derive(Clone, Debug)]
pub struct Client {
    at: At,
    patience: Duration,
    /// The files of `weir cluster client`, with which it asks the nodes that it is sent to.
    credentials: Option<PathBuf>,
}

/// The certificate of a new client.
#[derive(Clone, Debug)]
pub struct Signed {
    /// The node's answer.
    pub answer: JoinAnswer,
    /// The authorities that it may name: those in the files of whoever asked. `None` if it came over a node's local socket.
    pub pins: Option<Vec<Fingerprint>>,
}

/// Where a node's API is.
#[derive(Clone, Debug)]
pub(crate) struct At {
    /// The Unix socket, or the URL.
    place: PathBuf,
    /// The way to a URL.
    tls: Option<(Endpoint, Arc<ClientConfig>)>,
}

impl At {
    fn unix(socket: &Path) -> At {
        At { place: socket.to_owned(), tls: None }
    }

    /// The API at `url`, for a client with the files in `directory`; `expected`: the node that must answer.
    ///
    /// # Errors
    /// The URL or the files.
    fn remote(url: &str, directory: &Path, expected: Option<&Name>) -> Result<At, ApiError> {
        let (credentials, authorities) = Store::open_client(directory)?;
        At::secured(url, &credentials, authorities, expected)
    }

    /// As [`At::remote`], for a server with a certificate of one of these authorities.
    fn secured(
        url: &str,
        credentials: &Credentials,
        authorities: Vec<CaCertificate>,
        expected: Option<&Name>,
    ) -> Result<At, ApiError> {
        let invalid = |message: String| ApiError::new(ApiErrorKind::Invalid, message);
        let failed = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Failed, error.to_string());
        let address = url.strip_prefix(HTTPS).unwrap_or(url).trim_end_matches('/');
        let endpoint = address.parse().map_err(|error| invalid(format!("{error}")))?;
        let cluster = credentials.facts().identity.cluster();
        let trust =
            Trust::new(cluster, authorities, Revocations::default()).map_err(|error| failed(&error))?;
        let tls =
            Tls { trust: TrustStore::new(trust, None), clock: Arc::new(WallClock), provider: provider() };
        let own = CredentialStore::new(credentials).map_err(|error| failed(&error))?;
        let config = tls.api_client(Some(&own), expected).map_err(|error| failed(&error))?;
        Ok(At { place: url.into(), tls: Some((endpoint, Arc::new(config))) })
    }

    /// The API that another node's answer names. Whoever answers there must prove to be that node.
    ///
    /// # Errors
    /// It is not an address of an API over TLS; the files in `directory`.
    fn named(elsewhere: &Elsewhere, directory: &Path) -> Result<At, ApiError> {
        let bad = || {
            let message =
                format!("{:?} of node {:?} is no API over TLS: not asked", elsewhere.api, elsewhere.node);
            ApiError::new(ApiErrorKind::Failed, message)
        };
        let expected: Name = elsewhere.node.parse().map_err(|_| bad())?;
        if !elsewhere.api.starts_with(HTTPS) {
            return Err(bad());
        }
        At::remote(&elsewhere.api, directory, Some(&expected))
    }

    /// The API of another node, for requests of this one, whose own socket is `own`: at its Unix socket if that is here, otherwise
    /// over TLS if it has announced where. On another host its socket is often called as this node's.
    ///
    /// # Errors
    /// No TLS configuration can be made.
    pub(crate) fn of_node(
        own: &Path,
        identity: Option<&NodeIdentity>,
        record: &NodeRecord,
    ) -> Result<At, ApiError> {
        let failed = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Failed, error.to_string());
        let announced = identity.and_then(|identity| Some((identity, identity.api_of(&record.name)?)));
        let Some((identity, api)) = announced.filter(|_| record.api == own || !record.api.exists()) else {
            return Ok(At::unix(&record.api));
        };
        let expected: Name = record.name.parse().map_err(|error| failed(&error))?;
        let tls = identity.api_client(&expected).map_err(|error| failed(&error))?;
        let endpoint = Endpoint { host: Host::Ip(api.ip()), port: api.port() };
        Ok(At { place: format!("{HTTPS}{api}").into(), tls: Some((endpoint, tls)) })
    }

    /// The address, if the node is another host's.
    pub(crate) fn url(&self) -> Option<String> {
        self.tls.is_some().then(|| self.place.display().to_string())
    }
}

impl Client {
    /// A client of the node whose API is at `socket`. Does not connect yet.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client { at: At::unix(&socket.into()), patience: PATIENCE, credentials: None }
    }

    /// A client of the node whose API is at `url`, `https://HOST:PORT`, with the files that `weir cluster client` has made in
    /// `directory`. Does not connect yet.
    ///
    /// # Errors
    /// The URL or the files.
    pub fn remote(url: &str, directory: &Path) -> Result<Client, ApiError> {
        let at = At::remote(url, directory, None)?;
        Ok(Client { at, patience: PATIENCE, credentials: Some(directory.to_owned()) })
    }

    /// Talks only to nodes with a certificate of the authority that has signed the client's own one: another one that its files name
    /// may be the one that a rotation removes, and whoever has that key could answer.
    ///
    /// # Errors
    /// The files.
    pub fn of_own_authority(self) -> Result<Client, ApiError> {
        let (Some(url), Some(directory)) = (self.at.url(), &self.credentials) else { return Ok(self) };
        let (credentials, authorities) = Store::open_client(directory)?;
        let own = authorities.into_iter().filter(|one| Some(one.fingerprint()) == credentials.authority());
        Ok(Client { at: At::secured(&url, &credentials, own.collect(), None)?, ..self })
    }

    /// Follows an answer that names the API of another host's node, with the files that `weir cluster client` has made in
    /// `directory`. Without them that answer is an error.
    #[must_use]
    pub fn with_credentials(self, directory: Option<PathBuf>) -> Client {
        Client { credentials: directory, ..self }
    }

    /// Waits no longer than this for an answer; by default a minute.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Client {
        Client { patience, ..self }
    }

    /// The socket, or the URL.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.at.place
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.call(Method::GET, path, Vec::new(), self.patience.min(LOOK))
    }

    fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ApiError> {
        self.call(Method::POST, path, encode(body)?, self.patience)
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        patience: Duration,
    ) -> Result<T, ApiError> {
        self.call_and_follow(method, path, body, patience).map(|(answer, _)| answer)
    }

    /// The answer, and where it came from.
    fn call_and_follow<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        patience: Duration,
    ) -> Result<(T, At), ApiError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
                ApiError::new(ApiErrorKind::Failed, format!("cannot start a runtime: {error}"))
            })?;
        let mut at = self.at.clone();
        let mut followed = 0;
        loop {
            let asked = Asked { method: method.clone(), path, body: body.clone(), to: None };
            let (status, answer) = runtime.block_on(patiently(&at, asked, patience))?;
            let error = match decode(&at, status, &answer) {
                Ok(answer) => return Ok((answer, at)),
                Err(error) => error,
            };
            // The disk may have moved meanwhile.
            at = match (&error.elsewhere, &self.credentials) {
                (Some(elsewhere), Some(directory)) if followed < MOST_FOLLOWED => {
                    At::named(elsewhere, directory)?
                }
                _ => return Err(error),
            };
            followed += 1;
        }
    }
}

/// Longest time that a snapshot takes: until the backings have what the logs have, in the passes before a group is held and then, and the copy.
pub(crate) const SNAPSHOT: Duration = Duration::from_secs(2 * REACHED.as_secs() + HELD.as_secs() + 35);

/// Longest time that a disk takes to go back to a snapshot: until it is destaged and closed, and two copies.
pub(crate) const ROLLBACK: Duration = Duration::from_secs(90);

/// Longest time that a look at the extents of one file takes.
pub(crate) const LAYOUT: Duration = Duration::from_secs(20);

/// Longest time that a look at all files of a volume takes.
pub(crate) const USAGE: Duration = Duration::from_secs(45);

/// The header of a request between nodes that names the intended process ([`NodeRef`]). Any other process refuses the request.
pub(crate) const INTENDED_FOR: &str = "weir-intended-for";

/// The target of a request between nodes.
pub(crate) struct Other<'a> {
    /// Where its API is.
    pub at: &'a At,
    /// The intended process.
    pub process: &'a NodeRef,
    /// The number of times that the request has been forwarded, this one included.
    pub forwarded: u32,
}

impl Other<'_> {
    /// Sends a request about a disk, with a body if there is one, and waits for at most `patience`; for use inside an async
    /// runtime.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        disk: &str,
        what: &str,
        body: Option<&(impl Serialize + Sync)>,
        patience: Duration,
    ) -> Result<T, ApiError> {
        let path = match what {
            "" => of_disk(disk, "")?,
            what => of_disk(disk, &format!("/{what}"))?,
        };
        let (method, body) = match body {
            Some(body) => (Method::POST, encode(body)?),
            None => (Method::GET, Vec::new()),
        };
        let asked = Asked { method, path: &path, body, to: Some(self) };
        let (status, answer) = patiently(self.at, asked, patience).await?;
        decode(self.at, status, &answer)
    }

    /// Requests the state that only this node knows, of the disks that it owns; for use inside an async runtime.
    pub(crate) async fn owned(&self, patience: Duration) -> Result<Owned, ApiError> {
        self.get("/v1/owned", patience).await
    }

    /// Requests what a path has; for use inside an async runtime.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        patience: Duration,
    ) -> Result<T, ApiError> {
        let asked = Asked { method: Method::GET, path, body: Vec::new(), to: Some(self) };
        let (status, answer) = patiently(self.at, asked, patience).await?;
        decode(self.at, status, &answer)
    }
}

/// A request.
struct Asked<'a> {
    method: Method,
    path: &'a str,
    body: Vec<u8>,
    /// The intended process, if a node sends it.
    to: Option<&'a Other<'a>>,
}

/// The duration of a load. A load without a runtime is one pass over the disk: its duration is unknown.
pub(crate) fn length_of(load: &RunLoad) -> Duration {
    load.workload.runtime.map_or(Duration::from_secs(3600), |runtime| runtime + load.workload.warmup)
}

/// A name that is none could make another path of it.
fn check(name: &str) -> Result<(), ApiError> {
    check_name(name).map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))
}

fn of_disk(name: &str, what: &str) -> Result<String, ApiError> {
    check(name)?;
    Ok(format!("/v1/disks/{name}{what}"))
}

fn encode(body: &impl Serialize) -> Result<Vec<u8>, ApiError> {
    serde_json::to_vec(body).map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))
}

fn decode<T: DeserializeOwned>(at: &At, status: StatusCode, answer: &[u8]) -> Result<T, ApiError> {
    let not_understood = |error: serde_json::Error| {
        let message = format!("the answer of {} is not understood: {error}", at.place.display());
        ApiError::new(ApiErrorKind::Failed, message).hint("node and command must be of the same version")
    };
    if status.is_success() {
        return serde_json::from_slice(answer).map_err(not_understood);
    }
    Err(serde_json::from_slice::<ApiError>(answer).unwrap_or_else(not_understood))
}

/// Waits for the answer for as long as the node gives signs of life. One that is paused accepts connections and answers none.
async fn patiently(at: &At, asked: Asked<'_>, patience: Duration) -> Result<(StatusCode, Bytes), ApiError> {
    if patience > SIGN_OF_LIFE {
        let ping = Asked { method: Method::GET, path: "/v1/ping", body: Vec::new(), to: None };
        within(at, SIGN_OF_LIFE, exchange(at, ping)).await?;
    }
    within(at, patience, exchange(at, asked)).await
}

async fn within<T>(
    at: &At,
    patience: Duration,
    answer: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    tokio::time::timeout(patience, answer).await.unwrap_or_else(|_| {
        let seconds = patience.as_secs_f64();
        let message = format!("the node at {} has not answered for {seconds} s", at.place.display());
        Err(ApiError::new(ApiErrorKind::Unavailable, message)
            .hint("is its process paused or overloaded? Its log says what it is waiting for; ask another node meanwhile"))
    })
}

async fn exchange(at: &At, asked: Asked<'_>) -> Result<(StatusCode, Bytes), ApiError> {
    let lost = |error: &dyn std::fmt::Display| {
        ApiError::new(
            ApiErrorKind::Unavailable,
            format!("no answer from the node at {}: {error}", at.place.display()),
        )
        .hint("is it running? See `weir lab status` or `systemctl status weir`, and its log")
    };
    let unanswered = |no_answer: NoAnswer| match no_answer {
        NoAnswer::Unreachable(reason) => lost(&reason),
        NoAnswer::Mistrusted(reason) | NoAnswer::NotYet(reason) => {
            let message = format!("no connection to the node at {}: {reason}", at.place.display());
            ApiError::new(ApiErrorKind::Refused, message)
                .hint("is it a node of the cluster that made the credentials? Compare the clocks, too")
        }
        NoAnswer::Refused(reason) => {
            let message = format!("no connection to the node at {}: {reason}", at.place.display());
            ApiError::new(ApiErrorKind::Forbidden, message)
                .hint("an administrator makes a client's certificate: `weir cluster client NAME --role ROLE --directory DIR`")
        }
    };
    let (mut sender, _connection) = match &at.tls {
        None => connect(UnixStream::connect(&at.place).await.map_err(|error| lost(&error))?).await,
        Some((endpoint, tls)) => connect(https::connect(endpoint, tls).await.map_err(unanswered)?).await,
    }
    .map_err(|error| lost(&error))?;
    let mut request = Request::builder()
        .method(asked.method)
        .uri(asked.path)
        .header(header::HOST, "weir")
        .header(header::CONTENT_TYPE, "application/json");
    if let Some(other) = asked.to {
        request = request.header(INTENDED_FOR, other.process.to_string()).header(FORWARDED, other.forwarded);
    }
    let request = request
        .body(Full::new(Bytes::from(asked.body)))
        .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
    let response = sender.send_request(request).await.map_err(|error| unanswered(https::reason(&error)))?;
    let status = response.status();
    let answer =
        Limited::new(response.into_body(), LONGEST_ANSWER).collect().await.map_err(|error| lost(&error))?;
    Ok((status, answer.to_bytes()))
}

type Sender = hyper::client::conn::http1::SendRequest<Full<Bytes>>;

/// A connection for one request; it ends with the result.
async fn connect(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<(Sender, JoinSet<hyper::Result<()>>), hyper::Error> {
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    Ok((sender, connections))
}

#[cfg(test)]
mod tests;
