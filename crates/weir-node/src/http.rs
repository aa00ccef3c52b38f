//! The HTTP API on its Unix socket. The routes are listed in [`crate::api`].

use axum::Json;
use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixListener;

use crate::api::{
    ApiError, ApiErrorKind, CreateDisk, CreateVolume, Delete, Export, Follow, Move, RecordProfile, Resize,
    RunLoad, SetPolicy,
};
use crate::metrics;
use crate::operations::Operations;

/// Longest request that is read, in bytes.
const LONGEST_REQUEST: usize = 1 << 20;

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

/// A JSON body; what is wrong with it is an [`ApiError`] too.
struct Body<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, ApiError> {
        let body = Json::from_request(request, state).await;
        body.map(|Json(body)| Body(body))
            .map_err(|rejection| ApiError::new(ApiErrorKind::Invalid, rejection.body_text()))
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
    let volumes = async |State(ops): Ops| json(ops.volumes().await);
    let create_volume =
        async |State(ops): Ops, Body(it): Body<CreateVolume>| json(ops.create_volume(it).await);
    let disks = async |State(ops): Ops| json(ops.disks().await);
    let create_disk = async |State(ops): Ops, Body(it): Body<CreateDisk>| json(ops.create_disk(it).await);
    let events = async |State(ops): Ops| json(ops.events().await);
    let metrics = async |State(ops): Ops| ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], ops.metrics());
    let nothing = async || {
        ApiError::new(ApiErrorKind::NotFound, "there is nothing here").hint("the API begins at /v1/")
    };
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/volumes", get(volumes).post(create_volume))
        .route("/v1/disks", get(disks).post(create_disk))
        .route("/v1/events", get(events))
        .route("/metrics", get(metrics))
        .merge(of_disk())
        .fallback(nothing)
        .layer(DefaultBodyLimit::max(LONGEST_REQUEST))
        .with_state(operations)
}

/// The routes of one disk.
fn of_disk() -> Router<Operations> {
    type Ops = State<Operations>;
    type Name = Path<String>;
    let show = async |State(ops): Ops, Path(name): Name| json(ops.disk(&name).await);
    let meters = async |State(ops): Ops, Path(name): Name| json(ops.meters(&name).await);
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

/// Serves until dropped.
pub async fn serve(listener: UnixListener, operations: Operations) {
    if let Err(error) = axum::serve(listener, router(operations)).await {
        tracing::error!(%error, "the API has ended");
    }
}
