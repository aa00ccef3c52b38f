//! The checks that every request to the API passes: the limit for strangers, the check of its right, the audit log.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header::LOCATION;
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tower_service::Service;
use weir_block::Nanos;

use crate::access::{Caller, Limit, is_read};
use crate::audit::{Audit, Line};
use crate::error::{ApiError, ApiErrorKind};

/// Longest error that is read for the audit log, in bytes.
const LONGEST_ERROR: usize = 64 << 10;

/// The way to the router of present requests. Cheap to clone.
#[derive(Clone)]
pub struct Gate {
    stage: watch::Receiver<Router>,
    audit: Option<Arc<Audit>>,
    strangers: Arc<Limit>,
}

impl Gate {
    /// A gate. Every change is recorded in `audit`, if there is one.
    #[must_use]
    pub fn new(stage: watch::Receiver<Router>, audit: Option<Arc<Audit>>) -> Gate {
        Gate { stage, audit, strangers: Arc::default() }
    }

    /// The audit log.
    #[must_use]
    pub fn audit(&self) -> Option<&Arc<Audit>> {
        self.audit.as_ref()
    }

    /// Serves one connection until its end. `header`: longest wait for the header of a request.
    pub async fn serve(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        caller: Caller,
        header: Duration,
    ) {
        let answer = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
            let (gate, caller) = (self.clone(), caller.clone());
            async move { Ok::<_, Infallible>(gate.answer(caller, request.map(Body::new)).await) }
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(header);
        if let Err(error) = http.serve_connection(TokioIo::new(stream), answer).await {
            tracing::debug!(%error, "a connection to the API ended");
        }
    }

    async fn answer(&self, caller: Caller, mut request: Request) -> Response {
        // Not recorded: whoever is limited would fill the log.
        if caller.nobody().is_some_and(|address| !self.strangers.pass(address, Nanos::now())) {
            let message = "too many requests from this address";
            let hint = format!("try again in {} s", Limit::PAUSE.as_secs());
            return ApiError::new(ApiErrorKind::Unavailable, message).hint(hint).into_response();
        }
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let line = self
            .audit
            .as_ref()
            .map(|audit| audit.line(caller.to_string(), caller.from(), format!("{method} {path}")));
        let (answer, recorded) = match caller.may(&method, &path) {
            Ok(()) => {
                request.extensions_mut().insert(caller);
                let mut router = self.stage.borrow().clone();
                let answer = router.call(request).await.unwrap_or_else(|never: Infallible| match never {});
                (answer, !is_read(&method))
            }
            Err(error) => (error.into_response(), true),
        };
        match line.filter(|_| recorded) {
            Some(line) => self.record(line, &path, answer).await,
            None => answer,
        }
    }

    async fn record(&self, mut line: Line, path: &str, answer: Response) -> Response {
        line.status = answer.status().as_u16();
        let answer = if answer.status().is_success() {
            answer
        } else {
            let is_elsewhere = answer.status().is_redirection();
            line.outcome = if is_elsewhere { "redirected" } else { "refused" };
            let (mut parts, body) = answer.into_parts();
            let body = to_bytes(body, LONGEST_ERROR).await.unwrap_or_default();
            if let Ok(error) = serde_json::from_slice::<ApiError>(&body) {
                line.reason = error.message;
                // For clients that do not read the error.
                let location = error.elsewhere.and_then(|it| format!("{}{path}", it.api).parse().ok());
                parts.headers.extend(location.map(|location| (LOCATION, location)));
            }
            Response::from_parts(parts, body.into())
        };
        if let Some(audit) = &self.audit {
            audit.write(line).await;
        }
        answer
    }
}
