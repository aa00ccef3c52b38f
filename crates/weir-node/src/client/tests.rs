//! What another host's node has to do is asked there, with the operator's own certificate.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::{TcpListener, UnixListener};
use weir_identity::{Authority, Credentials, Grant, Key, Role};

use super::*;
use crate::audit::Audit;
use crate::gate::Gate;
use crate::http::{self, Stage};
use crate::identity::tests::{authority, joined};

const POLICY: &str = "/v1/disks/d/policy";

fn api(policy: axum::routing::MethodRouter) -> Router {
    Router::new().route("/v1/ping", get(StatusCode::NO_CONTENT)).route(POLICY, policy)
}

/// The owner of the disk.
fn owner() -> Router {
    api(post(async || Json(json!({"done": true}))))
}

/// A node that sends whoever asks it to `node`, and counts how often.
fn other(node: &str, api_of: String, asked: &Arc<AtomicU32>) -> Router {
    let error = ApiError::new(ApiErrorKind::Refused, "disk d is elsewhere").elsewhere(node, api_of);
    let asked = Arc::clone(asked);
    api(post(async move || {
        asked.fetch_add(1, Ordering::Relaxed);
        error
    }))
}

struct Hosts {
    directory: tempfile::TempDir,
    authority: Authority,
    stages: Vec<Stage>,
}

impl Hosts {
    fn new() -> Hosts {
        Hosts { directory: tempfile::tempdir().unwrap(), authority: authority(1), stages: Vec::new() }
    }

    fn gate(&mut self, name: &str, router: Router) -> Gate {
        let stage = Stage::new(router);
        let audit = Audit::open(&self.directory.path().join(name), name).unwrap();
        let gate = Gate::new(stage.subscribe(), Some(audit));
        self.stages.push(stage);
        gate
    }

    /// Serves the API of node `name` over TLS, with a certificate of `authority`.
    async fn node(&mut self, name: &str, authority: &Authority, router: Router) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.node_at(listener, name, authority, router)
    }

    fn node_at(
        &mut self,
        listener: TcpListener,
        name: &str,
        authority: &Authority,
        router: Router,
    ) -> String {
        let address: SocketAddr = listener.local_addr().unwrap();
        let directory = self.directory.path().join(name);
        joined(&directory, authority, name, crate::unix_seconds());
        let identity = NodeIdentity::load(&directory, name).unwrap();
        let tls = Arc::new(identity.tls().api_server(identity.credentials()).unwrap());
        tokio::spawn(https::serve(listener, identity, tls, self.gate(name, router)));
        format!("{HTTPS}{address}")
    }

    /// Serves the API of a node at its Unix socket.
    fn local(&mut self, router: Router) -> Client {
        let directory = self.directory.path().join("local");
        std::fs::create_dir_all(&directory).unwrap();
        let socket = directory.join("api.sock");
        tokio::spawn(http::serve(UnixListener::bind(&socket).unwrap(), self.gate("local", router)));
        Client::new(socket)
    }

    fn credentials(&self, role: Role) -> PathBuf {
        let directory = self.directory.path().join(role.to_string());
        let (key, name) = (Key::generate().unwrap(), "op".parse().unwrap());
        let issued = self.authority.issue_client(
            &name,
            &Grant::Role(role),
            &key.public(),
            crate::unix_seconds(),
            3600,
        );
        let credentials = Credentials::new(key, issued.unwrap().chain).unwrap();
        let store = Store::open(&directory).unwrap();
        store.create_client(&credentials, &[self.authority.certificate().clone()]).unwrap();
        directory
    }

    fn audit(&self, name: &str) -> Value {
        let text = std::fs::read_to_string(self.directory.path().join(name).join("audit.jsonl")).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }
}

/// Outside the runtime: the client blocks, and has one of its own.
async fn ask(client: &Client) -> Result<Value, ApiError> {
    let client = client.clone();
    tokio::task::spawn_blocking(move || client.post(POLICY, &json!({"policy": "write-through"})))
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operator_asks_the_owner_itself() {
    let mut hosts = Hosts::new();
    let ca = authority_of(&hosts);
    let asked = Arc::new(AtomicU32::new(0));
    let at_n2 = hosts.node("n2", &ca, owner()).await;
    let at_n1 = hosts.node("n1", &ca, other("n2", at_n2.clone(), &asked)).await;
    let operator = hosts.credentials(Role::Operator);
    let answer = ask(&Client::remote(&at_n1, &operator).unwrap()).await.unwrap();
    assert_eq!(answer["done"], true);
    let (first, second) = (hosts.audit("n1"), hosts.audit("n2"));
    assert_eq!((&first["outcome"], &first["status"]), (&"redirected".into(), &307.into()), "{first}");
    assert_eq!((&second["who"], &second["outcome"]), (&"client op (operator)".into(), &"done".into()));

    // Also from a Unix socket; without credentials the answer is an error that says where.
    let local = hosts.local(other("n2", at_n2.clone(), &asked));
    let error = ask(&local).await.unwrap_err();
    assert_eq!((error.kind, error.elsewhere.unwrap().api), (ApiErrorKind::Refused, at_n2.clone()));
    assert_eq!(ask(&local.clone().with_credentials(Some(operator))).await.unwrap()["done"], true);
    // The owner decides by the client's role, not by who sent it there.
    let viewer = hosts.credentials(Role::Viewer);
    let error = ask(&local.with_credentials(Some(viewer))).await.unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Forbidden, "{error}");
    assert!(error.message.contains("needs the role operator"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_goes_to_nobody_who_does_not_prove_to_be_that_node() {
    let mut hosts = Hosts::new();
    let (ca, stranger) = (authority_of(&hosts), authority(1));
    let asked = Arc::new(AtomicU32::new(0));
    let at_n2 = hosts.node("n2", &ca, owner()).await;
    let at_n3 = hosts.node("n3", &stranger, owner()).await;
    let operator = hosts.credentials(Role::Operator);
    let plain = at_n2.replace("https", "http");
    for (node, api_of, word) in [
        ("n3", at_n2.as_str(), "node n2 answers where node n3 was expected"),
        ("n3", at_n3.as_str(), "not signed by a certificate authority of this cluster"),
        ("n2", plain.as_str(), "is no API over TLS"),
        ("n2", "/run/weir/api.sock", "is no API over TLS"),
        ("../n2", at_n2.as_str(), "is no API over TLS"),
    ] {
        let name = format!("to-{}", hosts.stages.len());
        let from = hosts.node(&name, &ca, other(node, api_of.into(), &asked)).await;
        let error = ask(&Client::remote(&from, &operator).unwrap()).await.unwrap_err();
        assert!(error.message.contains(word), "{node} at {api_of}: {error}");
    }
    for name in ["n2", "n3"] {
        let log = std::fs::read_to_string(hosts.directory.path().join(name).join("audit.jsonl")).unwrap();
        assert!(!log.contains(POLICY), "{name} was asked: {log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_sent_on_a_few_times_at_most() {
    let mut hosts = Hosts::new();
    let ca = authority_of(&hosts);
    let asked = Arc::new(AtomicU32::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let itself = format!("{HTTPS}{}", listener.local_addr().unwrap());
    hosts.node_at(listener, "n1", &ca, other("n1", itself.clone(), &asked));
    let operator = hosts.credentials(Role::Operator);
    let error = ask(&Client::remote(&itself, &operator).unwrap()).await.unwrap_err();
    assert_eq!(error.message, "disk d is elsewhere");
    assert_eq!(asked.load(Ordering::Relaxed), 1 + MOST_FOLLOWED);
}

/// The same authority once more: it cannot be copied.
fn authority_of(hosts: &Hosts) -> Authority {
    let store = Store::open(&hosts.directory.path().join("ca")).unwrap();
    store.create_authority(&hosts.authority).unwrap();
    store.authority().unwrap()
}
