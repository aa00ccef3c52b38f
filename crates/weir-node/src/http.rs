//! The HTTP API on its Unix socket. The routes are listed in [`crate::api`].
//!
//! The node waits for no client: connections are bounded, and the server drops a request that does not complete in time.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use weir_identity::{LARGEST_MESSAGE, OtherEnd};

use crate::access::Caller;
use crate::api::{
    AdoptExport, ApiError, ApiErrorKind, Barrier, BeginImport, CloneDisk, CompactDisk, ConfirmFenced,
    CreateDisk, CreateSnapshot, CreateVolume, Delete, DeleteSnapshot, DeleteVolume, Disks, DrainNode,
    EventList, Export, FillDisk, Follow, LookAtLayout, Meters, Move, MoveVolume, NOT_JOINED, OfImport,
    RecordProfile, Resize, RollBack, RunLoad, SetIdentity, SetLimit, SetPolicy, SetRedirected, Volumes,
};
use crate::client::INTENDED_FOR;
use crate::cluster::views::{Invite, NewClient, Revoke, Rotate, Withdraw};
use crate::gate::Gate;
use crate::https::FORWARDED;
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
            _ if self.elsewhere.is_some() => StatusCode::TEMPORARY_REDIRECT,
            ApiErrorKind::NotFound => StatusCode::NOT_FOUND,
            ApiErrorKind::Exists | ApiErrorKind::Refused => StatusCode::CONFLICT,
            ApiErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ApiErrorKind::Forbidden => StatusCode::FORBIDDEN,
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

/// The name in a path; what is wrong with it is an [`ApiError`] too.
struct Name(String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Name, ApiError> {
        let name = Path::from_request_parts(parts, state).await;
        name.map(|Path(name)| Name(name))
            .map_err(|rejection| ApiError::new(ApiErrorKind::Invalid, rejection.body_text()))
    }
}

/// The operations, for an operator's request or for one that another node forwards.
struct Ops(Operations);

impl FromRequestParts<Operations> for Ops {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, operations: &Operations) -> Result<Ops, ApiError> {
        let header = |name: &str| parts.headers.get(name).map(|value| value.to_str().unwrap_or_default());
        // Not a number: refuse to forward it again.
        let forwarded = header(FORWARDED).map_or(0, |count| count.parse().unwrap_or(u32::MAX));
        let by_node = parts.extensions.get::<Caller>().and_then(|caller| {
            let name = caller.node()?.facts().identity.name()?;
            Some(Arc::from(name.as_str()))
        });
        operations.asked(header(INTENDED_FOR), forwarded, by_node).map(Ops)
    }
}

type Answer<T> = Result<Json<T>, ApiError>;

fn json<T: Serialize>(result: Result<T, ApiError>) -> Answer<T> {
    result.map(Json)
}

/// The routes.
pub fn router(operations: Operations) -> Router {
    let status = async |Ops(ops): Ops| Json(ops.status().await);
    let owned = async |Ops(ops): Ops| Json(ops.owned().await);
    let disks = async |Ops(ops): Ops| json(ops.disks().await.map(|disks| Disks { disks }));
    let create_disk = async |Ops(ops): Ops, Body(it): Body<CreateDisk>| json(ops.create_disk(it).await);
    let adopt = async |Ops(ops): Ops, Body(it): Body<AdoptExport>| json(ops.adopt_export(it).await);
    let events = async |Ops(ops): Ops| json(ops.events().await.map(|events| EventList { events }));
    let metrics = async |Ops(ops): Ops| ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], ops.metrics());
    let nothing = async || {
        ApiError::new(ApiErrorKind::NotFound, "there is nothing here").hint("the API begins at /v1/")
    };
    let another_method = async |method: Method, uri: Uri| {
        let message = format!("{} does not take {method}", uri.path());
        (StatusCode::METHOD_NOT_ALLOWED, Json(ApiError::new(ApiErrorKind::Invalid, message)))
    };
    Router::new()
        .route("/v1/ping", get(StatusCode::NO_CONTENT))
        .route("/v1/status", get(status))
        .route("/v1/owned", get(owned))
        .route("/v1/disks", get(disks).post(create_disk))
        .route("/v1/adopt", post(adopt))
        .route("/v1/events", get(events))
        .route("/metrics", get(metrics))
        .merge(of_node())
        .merge(of_volume())
        .merge(of_disk())
        .merge(of_cluster())
        .fallback(nothing)
        .method_not_allowed_fallback(another_method)
        .layer(DefaultBodyLimit::max(LONGEST_REQUEST))
        .with_state(operations)
}

/// The routes of nodes.
fn of_node() -> Router<Operations> {
    let show = async |Ops(ops): Ops, Name(name): Name| json(ops.node(&name));
    let drain = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<DrainNode>| {
        json(ops.drain_node(&name, it).await)
    };
    let resume = async |Ops(ops): Ops, Name(name): Name| json(ops.resume_node(&name).await);
    let clear = async |Ops(ops): Ops, Name(name): Name| json(ops.clear_node(&name).await);
    let remove = async |Ops(ops): Ops, Name(name): Name| json(ops.remove_node(&name).await);
    Router::new()
        .route("/v1/nodes/{name}", get(show))
        .route("/v1/nodes/{name}/drain", post(drain))
        .route("/v1/nodes/{name}/resume", post(resume))
        .route("/v1/nodes/{name}/clear", post(clear))
        .route("/v1/nodes/{name}/remove", post(remove))
}

/// The routes of volumes.
fn of_volume() -> Router<Operations> {
    let volumes = async |Ops(ops): Ops| json(ops.volumes().await.map(|volumes| Volumes { volumes }));
    let create = async |Ops(ops): Ops, Body(it): Body<CreateVolume>| json(ops.create_volume(it).await);
    let plan = async |Ops(ops): Ops, Body(it): Body<CreateVolume>| json(ops.plan_volume(it).await);
    let delete = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<DeleteVolume>| {
        json(ops.delete_volume(&name, it).await)
    };
    let fenced = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<ConfirmFenced>| {
        json(ops.confirm_fenced(&name, it).await)
    };
    let move_to = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<MoveVolume>| {
        json(ops.move_volume(&name, it).await)
    };
    let redirected = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<SetRedirected>| {
        json(ops.set_redirected(&name, &it).await)
    };
    let identity = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<SetIdentity>| {
        json(ops.set_identity(&name, it).await)
    };
    let usage = async |Ops(ops): Ops, Name(name): Name| json(ops.volume_usage(&name).await);
    let exports = async |Ops(ops): Ops, Name(name): Name| json(ops.server_exports(&name).await);
    Router::new()
        .route("/v1/volumes", get(volumes).post(create))
        .route("/v1/volumes/{name}/usage", get(usage))
        .route("/v1/volumes/{name}/exports", get(exports))
        .route("/v1/volumes/plan", post(plan))
        .route("/v1/volumes/{name}/delete", post(delete))
        .route("/v1/volumes/{name}/confirm-fenced", post(fenced))
        .route("/v1/volumes/{name}/move", post(move_to))
        .route("/v1/volumes/{name}/redirected", post(redirected))
        .route("/v1/volumes/{name}/identity", post(identity))
}

/// The routes of one disk.
fn of_disk() -> Router<Operations> {
    let show = async |Ops(ops): Ops, Name(name): Name| json(ops.disk(&name).await);
    let create_named =
        async |Ops(ops): Ops, Name(_): Name, Body(it): Body<CreateDisk>| json(ops.create_disk(it).await);
    let meters =
        async |Ops(ops): Ops, Name(name): Name| json(ops.meters(&name).await.map(|meters| Meters { meters }));
    let served = async |Ops(ops): Ops, Name(name): Name| {
        json(ops.served_meters(&name).await.map(|meters| Meters { meters }))
    };
    let policy = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<SetPolicy>| {
        json(ops.set_policy(&name, it).await)
    };
    let limit = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<SetLimit>| {
        json(ops.set_limit(&name, it).await)
    };
    let export =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<Export>| json(ops.export(&name, it).await);
    let import =
        async |Ops(ops): Ops, Name(_): Name, Body(it): Body<BeginImport>| json(ops.begin_import(it).await);
    let open_import = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<OfImport>| {
        json(ops.open_import(&name, it).await)
    };
    let end_import = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<OfImport>| {
        json(ops.end_import(&name, it).await)
    };
    let fill =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<FillDisk>| json(ops.fill(&name, it).await);
    let move_to =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<Move>| json(ops.move_disk(&name, it).await);
    let follow =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<Follow>| json(ops.follow(&name, it).await);
    let resize =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<Resize>| json(ops.resize(&name, it).await);
    let lengthen =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<Resize>| json(ops.lengthen(&name, it).await);
    let delete =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<Delete>| json(ops.delete(&name, it).await);
    let load =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<RunLoad>| json(ops.load(&name, it).await);
    let profile = async |Ops(ops): Ops, Name(name): Name| json(ops.profile(&name).await);
    let record = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<RecordProfile>| {
        json(ops.record_profile(&name, it).await)
    };
    let snapshots = async |Ops(ops): Ops, Name(name): Name| json(ops.snapshots(&name).await);
    let snapshot = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<CreateSnapshot>| {
        json(ops.create_snapshot(&name, it).await)
    };
    let delete_snapshot = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<DeleteSnapshot>| {
        json(ops.delete_snapshot(&name, it).await)
    };
    let rollback = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<RollBack>| {
        json(ops.roll_back(&name, it).await)
    };
    let clone = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<CloneDisk>| {
        json(ops.clone_disk(&name, it).await)
    };
    let layout = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<LookAtLayout>| {
        json(ops.layout(&name, it).await)
    };
    let compaction = async |Ops(ops): Ops, Name(name): Name| json(ops.compaction(&name).await);
    let compact = async |Ops(ops): Ops, Name(name): Name, Body(it): Body<CompactDisk>| {
        json(ops.compact(&name, it).await)
    };
    let plan = async |Ops(ops): Ops, Name(name): Name| json(ops.plan_compaction(&name).await);
    let barrier =
        async |Ops(ops): Ops, Name(name): Name, Body(it): Body<Barrier>| json(ops.barrier(&name, it).await);
    Router::new()
        .route("/v1/disks/{name}/snapshots", get(snapshots).post(snapshot))
        .route("/v1/disks/{name}/delete-snapshot", post(delete_snapshot))
        .route("/v1/disks/{name}/rollback", post(rollback))
        .route("/v1/disks/{name}/clone", post(clone))
        .route("/v1/disks/{name}/barrier", post(barrier))
        .route("/v1/disks/{name}/layout", post(layout))
        .route("/v1/disks/{name}/compact", get(compaction).post(compact))
        .route("/v1/disks/{name}/compaction-plan", get(plan))
        .route("/v1/disks/{name}", get(show))
        .route("/v1/disks/{name}/create", post(create_named))
        .route("/v1/disks/{name}/profile", get(profile).post(record))
        .route("/v1/disks/{name}/meters", get(meters))
        .route("/v1/disks/{name}/served-meters", get(served))
        .route("/v1/disks/{name}/policy", post(policy))
        .route("/v1/disks/{name}/limit", post(limit))
        .route("/v1/disks/{name}/export", post(export))
        .route("/v1/disks/{name}/import", post(import))
        .route("/v1/disks/{name}/open-import", post(open_import))
        .route("/v1/disks/{name}/end-import", post(end_import))
        .route("/v1/disks/{name}/fill", post(fill))
        .route("/v1/disks/{name}/move", post(move_to))
        .route("/v1/disks/{name}/follow", post(follow))
        .route("/v1/disks/{name}/resize", post(resize))
        .route("/v1/disks/{name}/lengthen", post(lengthen))
        .route("/v1/disks/{name}/delete", post(delete))
        .route("/v1/disks/{name}/load", post(load))
}

/// A small body as it is; an error in it is an [`ApiError`] too.
struct Message(Bytes);

impl<S: Send + Sync> FromRequest<S> for Message {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Message, ApiError> {
        let invalid = |message: String| ApiError::new(ApiErrorKind::Invalid, message);
        let body = tokio::time::timeout(BODY, Bytes::from_request(request, state)).await;
        let body = body.map_err(|_| {
            invalid(format!("the body of the request did not come within {} s", BODY.as_secs()))
        })?;
        body.map(Message).map_err(|rejection| invalid(rejection.body_text()))
    }
}

/// The node that has proven itself on the connection.
struct Proven(OtherEnd);

impl<S: Send + Sync> FromRequestParts<S> for Proven {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Proven, ApiError> {
        let node = parts.extensions.get::<Caller>().and_then(Caller::node).cloned();
        node.map(Proven).ok_or_else(|| {
            ApiError::new(
                ApiErrorKind::Forbidden,
                "only a node renews its certificate, over its own connection",
            )
        })
    }
}

/// The routes of the cluster's identities. The messages of hosts that join come from strangers.
fn of_cluster() -> Router<Operations> {
    let list = async |Ops(ops): Ops| json(ops.cluster().await);
    let invite = async |Ops(ops): Ops, Body(it): Body<Invite>| json(ops.invite(it).await);
    let revoke = async |Ops(ops): Ops, Body(it): Body<Revoke>| json(ops.revoke(it).await);
    let rotate = async |Ops(ops): Ops, Body(it): Body<Rotate>| json(ops.rotate(it).await);
    let withdraw = async |Ops(ops): Ops, Body(it): Body<Withdraw>| json(ops.withdraw(it).await);
    let client = async |Ops(ops): Ops, Body(it): Body<NewClient>| json(ops.new_client(it).await);
    let join = async |Ops(ops): Ops, Message(it): Message| json(ops.join(&it).await);
    let renew =
        async |Ops(ops): Ops, Proven(node): Proven, Message(it): Message| json(ops.renew(&node, &it).await);
    Router::new()
        .route("/v1/cluster", get(list))
        .route("/v1/cluster/invite", post(invite))
        .route("/v1/cluster/revoke", post(revoke))
        .route("/v1/cluster/rotate", post(rotate))
        .route("/v1/cluster/withdraw", post(withdraw))
        .route("/v1/cluster/clients", post(client))
        .route("/v1/cluster/join", post(join))
        .route("/v1/cluster/renew", post(renew))
        .layer(DefaultBodyLimit::max(LARGEST_MESSAGE))
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
pub async fn serve(listener: UnixListener, gate: Gate) {
    serve_with(listener, gate, HEADER).await;
}

async fn serve_with(listener: UnixListener, gate: Gate, header: Duration) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let place = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let gate = gate.clone();
                let peer = stream.peer_cred().ok();
                let (user, process) = (peer.map(|peer| peer.uid()), peer.and_then(|peer| peer.pid()));
                connections.spawn(async move {
                    let _place = place;
                    gate.serve(stream, Caller::Local { user, process }, header).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the API cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path as FilePath;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;
    use weir_cluster::membership::{NodeSession, SessionConfig};
    use weir_cluster::records::NodeRecord;

    use super::*;
    use crate::api::MeterView;
    use crate::control::disk::tests;

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
        tokio::spawn(serve_with(listener, Gate::new(stage.subscribe(), None), Duration::from_millis(300)));
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

    /// The operations of node `a`, and node `b`, which owns disk `d` and whose API is at `socket`.
    async fn two_nodes(directory: &FilePath, socket: &FilePath) -> (Operations, NodeSession) {
        let (node, mut told) = tests::node(directory).await;
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        let record = NodeRecord { api: socket.to_owned(), ..tests::record_of("b") };
        let b =
            NodeSession::start(Arc::clone(&node.registry), record, SessionConfig::default()).await.unwrap();
        let mut nodes = node.records.nodes.changes();
        nodes.wait_for(|live| live.contains_key("b")).await.unwrap();
        tests::disk_of_a(&node, |record| record.owner = Some(b.node_ref())).await;
        (Operations::new(node, Arc::default(), Arc::default()), b)
    }

    async fn request(socket: &FilePath, request: &str) -> String {
        let request = format!("{request} HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n");
        said(UnixStream::connect(socket).await.unwrap(), &request).await
    }

    /// Serves until the stage is dropped.
    fn serve_at(socket: &FilePath, router: Router) -> Stage {
        let stage = Stage::new(router);
        tokio::spawn(serve(UnixListener::bind(socket).unwrap(), Gate::new(stage.subscribe(), None)));
        stage
    }

    #[tokio::test]
    async fn every_error_has_one_form() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("api");
        let (operations, _b) = two_nodes(directory.path(), &socket).await;
        let _stage = serve_at(&socket, router(operations));
        for (asked, status, reason) in [
            ("DELETE /v1/disks/d", "405", "/v1/disks/d does not take DELETE"),
            ("GET /v1/disks/%FF", "400", "UTF-8"),
            ("GET /v1/nothing", "404", "the API begins at"),
        ] {
            let answer = request(&socket, asked).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{asked}: {answer}");
            assert!(answer.contains("weir.api-error/1") && answer.contains(reason), "{asked}: {answer}");
        }
    }

    /// The socket that the registry has for one node leads to another one: its requests must not be forwarded in a circle.
    #[tokio::test]
    async fn a_request_that_reaches_another_process_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("api");
        let (operations, _b) = two_nodes(directory.path(), &socket).await;
        let _stage = serve_at(&socket, router(operations.clone()));
        for asked in ["GET /v1/disks/d/meters", "GET /v1/disks/d/profile"] {
            let answer =
                tokio::time::timeout(Duration::from_secs(20), request(&socket, asked)).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
            assert!(answer.contains("the request is for b#1, but this is a#1"), "{answer}");
        }
        let view = operations.disk("d").await.unwrap();
        assert_eq!(view.state, "silent", "a's answer says nothing about b's disks");
        assert!(
            operations.asked(Some("a#1"), 1, None).is_ok() && operations.asked(Some("a#2"), 1, None).is_err()
        );
    }

    #[tokio::test]
    async fn measurements_are_forwarded_to_the_owner_a_few_times_at_most() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        let (operations, _b) = two_nodes(directory.path(), &b).await;
        let _a = serve_at(&a, router(operations.clone()));
        let meters = async |headers: axum::http::HeaderMap| {
            assert_eq!(headers[INTENDED_FOR], "b#1");
            let layer = headers[FORWARDED].to_str().unwrap().to_owned();
            let meter = MeterView { layer, in_flight: 0, occupancy: 0.0, kinds: Vec::new() };
            Json(Meters { meters: vec![meter] })
        };
        let ping = get(StatusCode::NO_CONTENT);
        let owner = Router::new().route("/v1/ping", ping).route("/v1/disks/d/meters", get(meters));
        let _owner = serve_at(&b, owner);
        let answer = request(&a, "GET /v1/disks/d/meters").await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#""layer":"1""#), "{answer}");
        let third = operations.asked(Some("a#1"), 3, None).unwrap();
        assert_eq!(third.meters("d").await.unwrap()[0].layer, "4");
        // A node of another host moves no disk that it does not follow, to itself or elsewhere.
        let stranger = operations.asked(Some("a#1"), 0, Some("x".into())).unwrap();
        for to in ["x", "a", "b"] {
            let error =
                stranger.move_disk("d", Move { to: to.into(), as_follower: false }).await.unwrap_err();
            assert_eq!(error.kind, ApiErrorKind::Forbidden, "{error}");
        }
        for times in [4, u32::MAX] {
            let error = operations.asked(Some("a#1"), times, None).unwrap().meters("d").await.unwrap_err();
            assert!(
                error.kind == ApiErrorKind::Unavailable && error.message.contains("forwarded"),
                "{error}"
            );
        }
    }
}
