//! The HTTP API on its Unix socket. The routes are listed in [`crate::api`].
//!
//! The node waits for no client: connections are bounded, and the server drops a request that does not complete in time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tower_service::Service;

use crate::api::{
    ApiError, ApiErrorKind, CreateDisk, CreateVolume, Delete, DeleteVolume, Disks, EventList, Export, Follow,
    Meters, Move, NOT_JOINED, RecordProfile, Resize, RunLoad, SetPolicy, Volumes,
};
use crate::metrics;
use crate::operations::Operations;

/// Longest request that is read, in bytes.
const LONGEST_REQUEST: usize = 1 << 20;

/// Connections at once; further ones wait in the kernel's queue (P10).
const CONNECTIONS: usize = 256;

/// Longest wait for the header of a request, on a new connection or after an answer.
const HEADER: Duration = Duration::from_secs(10);

/// Longest wait for the body of a request.
const BODY: Duration = Duration::from_secs(10);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = match self.kind {
            ApiErrorKind::NotFound => StatusCode::NOT_FOUND,
            ApiErrorKind::Exists | ApiErrorKind::Refused => StatusCode::CONFLICT,
            ApiErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ApiErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ApiErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(self)).into_response()
    }
}

/// A JSON body; an error in it is an [`ApiError`] too.
struct Body<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, ApiError> {
        let invalid = |message: String| ApiError::new(ApiErrorKind::Invalid, message);
        let body = tokio::time::timeout(BODY, Json::from_request(request, state)).await;
        let body = body.map_err(|_| {
            invalid(format!("the body of the request did not come within {} s", BODY.as_secs()))
        })?;
        body.map(|Json(body)| Body(body)).map_err(|rejection| invalid(rejection.body_text()))
    }
}

type Answer<T> = Result<Json<T>, ApiError>;

fn json<T: Serialize>(result: Result<T, ApiError>) -> Answer<T> {
    result.map(Json)
}

/// The routes.
pub fn router(operations: Operations) -> Router {
    type Ops = State<Operations>;
    let status = async |State(ops): Ops| Json(ops.status().await);
    let owned = async |State(ops): Ops| Json(ops.owned().await);
    let disks = async |State(ops): Ops| json(ops.disks().await.map(|disks| Disks { disks }));
    let create_disk = async |State(ops): Ops, Body(it): Body<CreateDisk>| json(ops.create_disk(it).await);
    let events = async |State(ops): Ops| json(ops.events().await.map(|events| EventList { events }));
    let metrics = async |State(ops): Ops| ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], ops.metrics());
    let forget = async |State(ops): Ops, Path(name): Path<String>| json(ops.forget_node(&name).await);
    let nothing = async || {
        ApiError::new(ApiErrorKind::NotFound, "there is nothing here").hint("the API begins at /v1/")
    };
    Router::new()
        .route("/v1/ping", get(StatusCode::NO_CONTENT))
        .route("/v1/status", get(status))
        .route("/v1/owned", get(owned))
        .route("/v1/disks", get(disks).post(create_disk))
        .route("/v1/events", get(events))
        .route("/v1/nodes/{name}/forget", post(forget))
        .route("/metrics", get(metrics))
        .merge(of_volume())
        .merge(of_disk())
        .fallback(nothing)
        .layer(DefaultBodyLimit::max(LONGEST_REQUEST))
        .with_state(operations)
}

/// The routes of volumes.
fn of_volume() -> Router<Operations> {
    type Ops = State<Operations>;
    let volumes = async |State(ops): Ops| json(ops.volumes().await.map(|volumes| Volumes { volumes }));
    let create = async |State(ops): Ops, Body(it): Body<CreateVolume>| json(ops.create_volume(it).await);
    let delete = async |State(ops): Ops, Path(name): Path<String>, Body(it): Body<DeleteVolume>| {
        json(ops.delete_volume(&name, it).await)
    };
    Router::new()
        .route("/v1/volumes", get(volumes).post(create))
        .route("/v1/volumes/{name}/delete", post(delete))
}

/// The routes of one disk.
fn of_disk() -> Router<Operations> {
    type Ops = State<Operations>;
    type Name = Path<String>;
    let show = async |State(ops): Ops, Path(name): Name| json(ops.disk(&name).await);
    let meters = async |State(ops): Ops, Path(name): Name| {
        json(ops.meters(&name).await.map(|meters| Meters { meters }))
    };
    let policy = async |State(ops): Ops, Path(name): Name, Body(it): Body<SetPolicy>| {
        json(ops.set_policy(&name, it).await)
    };
    let export =
        async |State(ops): Ops, Path(name): Name, Body(it): Body<Export>| json(ops.export(&name, it).await);
    let move_to =
        async |State(ops): Ops, Path(name): Name, Body(it): Body<Move>| json(ops.move_disk(&name, it).await);
    let follow =
        async |State(ops): Ops, Path(name): Name, Body(it): Body<Follow>| json(ops.follow(&name, it).await);
    let resize =
        async |State(ops): Ops, Path(name): Name, Body(it): Body<Resize>| json(ops.resize(&name, it).await);
    let delete =
        async |State(ops): Ops, Path(name): Name, Body(it): Body<Delete>| json(ops.delete(&name, it).await);
    let load =
        async |State(ops): Ops, Path(name): Name, Body(it): Body<RunLoad>| json(ops.load(&name, it).await);
    let profile = async |State(ops): Ops, Path(name): Name| json(ops.profile(&name).await);
    let record = async |State(ops): Ops, Path(name): Name, Body(it): Body<RecordProfile>| {
        json(ops.record_profile(&name, it).await)
    };
    Router::new()
        .route("/v1/disks/{name}", get(show))
        .route("/v1/disks/{name}/profile", get(profile).post(record))
        .route("/v1/disks/{name}/meters", get(meters))
        .route("/v1/disks/{name}/policy", post(policy))
        .route("/v1/disks/{name}/export", post(export))
        .route("/v1/disks/{name}/move", post(move_to))
        .route("/v1/disks/{name}/follow", post(follow))
        .route("/v1/disks/{name}/resize", post(resize))
        .route("/v1/disks/{name}/delete", post(delete))
        .route("/v1/disks/{name}/load", post(load))
}

/// The router of present requests.
pub type Stage = watch::Sender<Router>;

/// Answers every request with the reason why this node has not joined the cluster.
pub fn not_joined(reason: &str) -> Router {
    let error = ApiError::new(
        ApiErrorKind::Unavailable,
        format!("this node has not joined the cluster yet: {reason}"),
    )
    .code(NOT_JOINED)
    .hint("it keeps trying; see its log");
    Router::new().fallback(async move || error.clone())
}

/// Serves until dropped, by whichever router is there when a request comes.
pub async fn serve(listener: UnixListener, stage: watch::Receiver<Router>) {
    serve_with(listener, stage, HEADER).await;
}

async fn serve_with(listener: UnixListener, stage: watch::Receiver<Router>, header: Duration) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let place = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let stage = stage.clone();
                connections.spawn(async move {
                    let _place = place;
                    connection(stream, stage, header).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the API cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(stream: UnixStream, stage: watch::Receiver<Router>, header: Duration) {
    let answer = service_fn(move |request| {
        let mut router = stage.borrow().clone();
        async move { Ok::<_, Infallible>(router.call(request).await.unwrap_or_else(|never| match never {})) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(header);
    if let Err(error) = http.serve_connection(TokioIo::new(stream), answer).await {
        tracing::debug!(%error, "a connection to the API ended");
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn said(mut stream: UnixStream, request: &str) -> String {
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut answer));
        read.await.expect("the connection is ended").unwrap();
        answer
    }

    /// A half-open request costs its own connection, and no other client waits for it.
    #[tokio::test]
    async fn half_a_request_is_given_up_and_a_node_outside_the_cluster_says_why() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api");
        let listener = UnixListener::bind(&path).unwrap();
        let stage = Stage::new(not_joined("the registry does not answer at /run/r"));
        tokio::spawn(serve_with(listener, stage.subscribe(), Duration::from_millis(300)));
        let connect = || UnixStream::connect(&path);
        let half = tokio::spawn(said(connect().await.unwrap(), "GET /v1/status HTTP/1.1\r\nHost"));
        let whole = "GET /v1/disks HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n";
        let answer = said(connect().await.unwrap(), whole).await;
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("\"code\":\"not-joined\"") && answer.contains("/run/r"), "{answer}");
        half.await.unwrap();
        drop(stage.send_replace(Router::new().route("/v1/disks", get("joined"))));
        assert!(said(connect().await.unwrap(), whole).await.ends_with("joined"));
    }
}
