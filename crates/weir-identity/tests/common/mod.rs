//! A cluster on paper: its authority, nodes, clients and a clock that tests set.
#![allow(dead_code, reason = "each test uses its part")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustls::pki_types::UnixTime;
use rustls::time_provider::TimeProvider;
use weir_identity::{
    Authority, ClusterId, CredentialStore, Credentials, Grant, Host, Identity, Issued, Key, Mistrust,
    NODE_LIFETIME, Name, Revocations, Tls, Trust, TrustStore, Witness, provider, unix,
};

/// The second at which all tests begin: 2026-11-23T12:00:00Z.
pub const NOW: u64 = 1_795_435_200;
pub const HOUR: u64 = 3600;
pub const DAY: u64 = 86_400;

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub fn host(text: &str) -> Host {
    text.parse().unwrap()
}

#[derive(Debug)]
pub struct Clock(AtomicU64);

impl Clock {
    pub fn at(seconds: u64) -> Arc<Clock> {
        Arc::new(Clock(AtomicU64::new(seconds)))
    }

    pub fn set(&self, seconds: u64) {
        self.0.store(seconds, Ordering::SeqCst);
    }
}

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix(self.0.load(Ordering::SeqCst)))
    }
}

/// The refusals that a node's audit log would have.
#[derive(Debug, Default)]
pub struct Log(Mutex<Vec<(Option<Identity>, Mistrust)>>);

impl Log {
    pub fn take(&self) -> Vec<(Option<Identity>, Mistrust)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Witness for Log {
    fn refused(&self, who: Option<&Identity>, why: &Mistrust) {
        self.0.lock().unwrap().push((who.cloned(), why.clone()));
    }
}

pub fn authority(cluster: u8) -> Authority {
    Authority::create(ClusterId([cluster; 16]), NOW - 365 * DAY).unwrap()
}

/// A node's key and certificate, issued at `at`.
pub fn node_at(authority: &Authority, node: &str, at: u64) -> (Credentials, Issued) {
    let key = Key::generate().unwrap();
    let issued = authority.issue_node(&name(node), &[], &key.public(), at, NODE_LIFETIME).unwrap();
    (Credentials::new(key, issued.chain.clone()).unwrap(), issued)
}

pub fn node(authority: &Authority, node: &str) -> Credentials {
    node_at(authority, node, NOW - DAY).0
}

pub fn client(authority: &Authority, client: &str, grant: &Grant) -> Credentials {
    let key = Key::generate().unwrap();
    let issued =
        authority.issue_client(&name(client), grant, &key.public(), NOW - DAY, NODE_LIFETIME).unwrap();
    Credentials::new(key, issued.chain).unwrap()
}

pub fn trust(authorities: &[&Authority], revoked: Revocations) -> Trust {
    let all: Vec<_> = authorities.iter().map(|one| one.certificate().clone()).collect();
    Trust::new(all[0].cluster(), all, revoked).unwrap()
}

/// One end of connections: what it proves, whom it trusts, its clock.
pub struct End {
    pub own: Arc<CredentialStore>,
    pub tls: Tls,
    pub clock: Arc<Clock>,
    pub log: Arc<Log>,
}

impl End {
    pub fn new(credentials: &Credentials, trust: Trust) -> End {
        let (clock, log) = (Clock::at(NOW), Arc::new(Log::default()));
        let witness: Arc<dyn Witness> = Arc::clone(&log) as _;
        let store = TrustStore::new(trust, Some(witness));
        let tls = Tls { trust: store, clock: Arc::clone(&clock) as _, provider: provider() };
        End { own: CredentialStore::new(credentials).unwrap(), tls, clock, log }
    }
}
