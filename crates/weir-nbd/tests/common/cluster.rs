//! A cluster's authority, a node's credentials and clients, for tests of NBD over TLS. Also used by weir-export's tests.

#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::Arc;

use rustls::pki_types::UnixTime;
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, ServerConfig};
use weir_identity::{
    Authority, ClientCertificate, ClusterId, CredentialStore, Credentials, Grant, Holder, Key, NODE_LIFETIME,
    Revocations, SHORTEST_LIFETIME, Store, Tls, Trust, TrustStore, provider,
};

#[derive(Debug)]
struct WallClock;

impl TimeProvider for WallClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::now())
    }
}

fn now() -> u64 {
    UnixTime::now().as_secs()
}

/// An authority, a node's credentials at 127.0.0.1, and TLS that trusts it.
pub struct Cluster {
    pub authority: Authority,
    pub node: Credentials,
    pub tls: Tls,
}

impl Cluster {
    pub fn new() -> Cluster {
        let authority = Authority::create(ClusterId([1; 16]), now() - 2 * NODE_LIFETIME).unwrap();
        let key = Key::generate().unwrap();
        let hosts = ["127.0.0.1".parse().unwrap()];
        let issued =
            authority.issue_node(&"a".parse().unwrap(), &hosts, &key.public(), now(), NODE_LIFETIME).unwrap();
        let trust = trust(&authority, Revocations::default());
        let tls =
            Tls { trust: TrustStore::new(trust, None), clock: Arc::new(WallClock), provider: provider() };
        Cluster { authority, node: Credentials::new(key, issued.chain).unwrap(), tls }
    }

    /// A client named `guest` that may open `export`.
    pub fn client(&self, export: &str) -> Credentials {
        self.issue("guest", &Grant::Exports([export.parse().unwrap()].into()), now())
    }

    /// A client's credentials, made at `at`.
    pub fn issue(&self, name: &str, grant: &Grant, at: u64) -> Credentials {
        let key = Key::generate().unwrap();
        let name = name.parse().unwrap();
        let issued = self.authority.issue_client(&name, grant, &key.public(), at, SHORTEST_LIFETIME).unwrap();
        Credentials::new(key, issued.chain).unwrap()
    }

    /// A client's credentials that ended some days ago.
    pub fn expired(&self, export: &str) -> Credentials {
        let grant = Grant::Exports([export.parse().unwrap()].into());
        self.issue("late", &grant, now() - NODE_LIFETIME)
    }

    /// From now on, no handshake accepts this client.
    pub fn revoke(&self, name: &str) {
        let name = name.parse().unwrap();
        let revoked = Revocations::default().with_name(Holder::Client, &name, [], "stolen", now());
        self.tls.trust.set(trust(&self.authority, revoked));
    }

    /// A directory with a client's files that trusts `trusted`.
    pub fn client_files(&self, trusted: &Cluster) -> tempfile::TempDir {
        files(&self.client("disk"), trusted)
    }

    pub fn server_config(&self, certificate: ClientCertificate) -> ServerConfig {
        self.tls.nbd_server(&CredentialStore::new(&self.node).unwrap(), certificate).unwrap()
    }

    pub fn client_config(&self, own: Option<&Credentials>) -> ClientConfig {
        let own = own.map(|own| CredentialStore::new(own).unwrap());
        self.tls.nbd_client(own.as_ref(), None).unwrap()
    }
}

fn trust(authority: &Authority, revoked: Revocations) -> Trust {
    Trust::new(authority.certificate().cluster(), vec![authority.certificate().clone()], revoked).unwrap()
}

/// A directory with the files of a client, as `weir cluster client` makes it.
pub fn files(credentials: &Credentials, trusted: &Cluster) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let all = [trusted.authority.certificate().clone()];
    Store::open(directory.path()).unwrap().create_client(credentials, &all).unwrap();
    directory
}
