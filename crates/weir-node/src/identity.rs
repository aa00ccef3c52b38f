//! This node's identity: the one place that opens its directory of keys, and makes TLS configurations of them.
//!
//! Whoever follows the registry's records of authorities and revocations calls [`NodeIdentity::set_trust`] for each change, and
//! whoever renews the certificate [`NodeIdentity::replace_credentials`]. Open connections are checked at each change of trust and
//! regularly ([`NodeIdentity::recheck`]); those whose certificate does not count any more are ended under whoever uses them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustls::pki_types::UnixTime;
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, ServerConfig};
use tokio::sync::Notify;
use weir_identity::{
    BadCredentials, BadTrust, CaCertificate, ClientCertificate, CredentialStore, Credentials, Facts,
    Fingerprint, Identity, Mistrust, Name, OtherEnd, Purpose, Revocations, Store, StoreError, Tls, Trust,
    TrustStore, provider,
};

/// Open connections before those that have ended are first forgotten.
const FEW: usize = 64;

/// Why a node's identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The directory or a file in it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The certificate is another node's.
    #[error(
        "the certificate in {directory} is that of {found}, and this is node {expected}; set name, or identity.directory, as it was \
         when this host joined",
        directory = directory.display()
    )]
    OtherName {
        /// The directory.
        directory: PathBuf,
        /// The certificate's subject.
        found: String,
        /// This node.
        expected: String,
    },
    /// The node's own certificate would be refused by every peer.
    #[error("this node's own certificate in {directory}: {source}", directory = directory.display())]
    Mistrusted {
        /// The directory.
        directory: PathBuf,
        /// The reason.
        source: Mistrust,
    },
    /// The authority that has signed the node's certificate does not count any more.
    #[error(
        "this node's own certificate in {directory}: {source}. If a rotation has removed that authority while this node was away: \
         `weir cluster revoke {name}` and `weir cluster invite --readmit --for {name}` on another node, then move {directory} away, \
         and join with that token",
        directory = directory.display()
    )]
    OtherAuthority {
        /// The directory.
        directory: PathBuf,
        /// The node.
        name: Name,
        /// The reason.
        source: Mistrust,
    },
    /// The authorities do not belong together.
    #[error("the authorities in {directory}: {source}", directory = directory.display())]
    Trust {
        /// The directory.
        directory: PathBuf,
        /// The reason.
        source: BadTrust,
    },
    /// The registry is not that of the cluster that this node has joined.
    #[error(
        "the registry at {registry} is another cluster's than the keys in {directory}: {source}; set the registry and the prefix of \
         this node's cluster (registry.etcd and registry.prefix, or registry.socket), or the right identity.directory",
        directory = directory.display()
    )]
    OtherRegistry {
        /// Where it is.
        registry: String,
        /// The directory.
        directory: PathBuf,
        /// The reason.
        source: BadTrust,
    },
    /// The registry's cluster has identities, and this node has none: the others could not tell it from a stranger.
    #[error(
        "the cluster of the registry at {registry} has identities, and this node has none: `weir cluster invite` on a node of it, then \
         `weir cluster join` on this host, with identity.directory in its configuration"
    )]
    Lacking {
        /// Where it is.
        registry: String,
    },
    /// The key cannot be used.
    #[error(transparent)]
    Credentials(#[from] BadCredentials),
    /// No TLS configuration.
    #[error("no TLS configuration can be made: {0}")]
    Tls(#[from] rustls::Error),
}

impl IdentityError {
    /// The error, if it comes from the registry at `registry`.
    #[must_use]
    pub(crate) fn of_registry(self, registry: &str, identity: &NodeIdentity) -> IdentityError {
        match self {
            IdentityError::Trust { source: source @ BadTrust::OtherCluster(_), .. } => {
                identity.other_registry(registry.to_owned(), source)
            }
            other => other,
        }
    }

    /// The node's certificate in `directory` does not count.
    pub(crate) fn mistrusted(directory: &Path, name: &Name, source: Mistrust) -> IdentityError {
        let directory = directory.to_path_buf();
        match source {
            Mistrust::UnknownAuthority { .. } => {
                IdentityError::OtherAuthority { directory, name: name.clone(), source }
            }
            source => IdentityError::Mistrusted { directory, source },
        }
    }
}

/// The wall clock: certificates are valid by it.
#[derive(Debug)]
pub struct WallClock;

impl TimeProvider for WallClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_millis(weir_task::unix_millis())))
    }
}

fn now() -> u64 {
    weir_task::unix_millis() / 1000
}

/// An open connection of a peer or client that has proven who it is.
#[derive(Debug)]
pub struct Admitted {
    other: OtherEnd,
    /// The connection's socket, so that it can be ended under the thread that uses it.
    socket: OwnedFd,
}

impl Admitted {
    /// The certificate that opened it.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        self.other.facts()
    }
}

/// The identity of this node, whom it trusts, and the connections that it has admitted.
#[derive(Debug)]
pub struct NodeIdentity {
    store: Store,
    /// The steps of a rotation of the authority take turns.
    rotation: tokio::sync::Mutex<()>,
    name: Name,
    tls: Tls,
    own: Arc<CredentialStore>,
    /// The certificate in use, and the authority that has signed it.
    certificate: Mutex<(OtherEnd, Option<Fingerprint>)>,
    /// Last second of the former certificate's validity, which clients get to see during a rotation.
    former_until: Mutex<Option<u64>>,
    /// Other authorities are trusted than before.
    authorities_changed: Notify,
    peer_server: Arc<ServerConfig>,
    admitted: Mutex<Vec<Weak<Admitted>>>,
    /// Where the APIs of the nodes are, by name, as they have announced it.
    apis: Mutex<BTreeMap<String, SocketAddr>>,
    /// Why the registry is taken for one without this node's cluster.
    without_cluster: Mutex<Option<String>>,
    /// Why what this node trusts could not be stored.
    unwritten: Mutex<Option<String>>,
}

impl NodeIdentity {
    /// Loads the identity of node `name` from its directory. What was revoked when the node last ran is revoked.
    ///
    /// A certificate that has ended, or is not valid yet by this host's clock, is no error: the node serves its guests, and
    /// its peers refuse it. [`NodeIdentity::own_certificate`] says so.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn load(directory: &Path, name: &str) -> Result<Arc<NodeIdentity>, IdentityError> {
        let store = Store::open(directory)?;
        let credentials = store.node()?;
        let facts = credentials.facts().clone();
        let directory = || directory.to_path_buf();
        let mistrusted = |source| IdentityError::Mistrusted { directory: directory(), source };
        let own_name = match &facts.identity {
            Identity::Node(node) if node.name.as_str() == name => node.name.clone(),
            other => {
                let found = other.to_string();
                return Err(IdentityError::OtherName {
                    directory: directory(),
                    found,
                    expected: name.into(),
                });
            }
        };
        let trust = Trust::new(facts.identity.cluster(), store.trust()?, store.revocations()?)
            .map_err(|source| IdentityError::Trust { directory: directory(), source })?;
        let tls =
            Tls { trust: TrustStore::new(trust, None), clock: Arc::new(WallClock), provider: provider() };
        let own = CredentialStore::new(&credentials)?;
        let peer_server = Arc::new(tls.peer_server(&own)?);
        let identity = NodeIdentity {
            store,
            rotation: tokio::sync::Mutex::default(),
            name: own_name,
            tls,
            own,
            certificate: Mutex::new((
                certificate_of(&credentials).map_err(mistrusted)?,
                credentials.authority(),
            )),
            former_until: Mutex::default(),
            authorities_changed: Notify::new(),
            peer_server,
            admitted: Mutex::default(),
            apis: Mutex::default(),
            without_cluster: Mutex::default(),
            unwritten: Mutex::default(),
        };
        match identity.check_own(&credentials) {
            Ok(()) | Err(Mistrust::Expired { .. } | Mistrust::NotYet { .. }) => {}
            Err(source) => return Err(IdentityError::mistrusted(&directory(), &identity.name, source)),
        }
        identity.load_former();
        Ok(Arc::new(identity))
    }

    /// Shows clients the former certificate of a rotation that is under way. Without it some of them are refused until they have
    /// new files, which is no reason not to start.
    fn load_former(&self) {
        let shown = self.store.former_node().map_err(|error| error.to_string()).and_then(|former| {
            let Some(former) = former.filter(|_| self.tls.trust.get().authorities().len() > 1) else {
                return Ok(());
            };
            self.show_to_clients(Some(&former)).map_err(|error| error.to_string())
        });
        if let Err(reason) = shown {
            tracing::warn!(reason, "clients with files from before the rotation cannot connect");
        }
    }

    fn show_to_clients(&self, former: Option<&Credentials>) -> Result<(), BadCredentials> {
        self.own.set_for_clients(former)?;
        *lock(&self.former_until) = former.map(|former| former.facts().not_after);
        Ok(())
    }

    fn check_own(&self, credentials: &Credentials) -> Result<(), Mistrust> {
        let certificate = credentials.chain().first().ok_or(Mistrust::Nobody)?;
        let trust = self.tls.trust.get();
        for purpose in [Purpose::Server, Purpose::Client] {
            trust.check(certificate, purpose, now())?;
        }
        Ok(())
    }

    /// Notes that the registry lacks this node's cluster, and why that is assumed; or that it has it.
    pub(crate) fn set_without_cluster(&self, reason: Option<String>) {
        *lock(&self.without_cluster) = reason;
    }

    /// Why the registry is taken for one without this node's cluster: a wrong one, or one that has lost its content. Nothing new is
    /// to be made there.
    pub(crate) fn without_cluster(&self) -> Option<String> {
        lock(&self.without_cluster).clone()
    }

    /// Why what this node trusts could not be stored, for operators.
    pub(crate) fn unwritten(&self) -> Option<String> {
        lock(&self.unwritten).clone()
    }

    /// The registry is another cluster's.
    pub(crate) fn other_registry(&self, registry: String, source: BadTrust) -> IdentityError {
        IdentityError::OtherRegistry { registry, directory: self.store.directory().to_path_buf(), source }
    }

    /// The registry has no cluster, and this node is a member of one: for the operator.
    pub(crate) fn no_cluster(&self) -> String {
        let (name, directory) = (&self.name, self.store.directory().display());
        let cluster = lock(&self.certificate).0.facts().identity.cluster();
        format!(
            "node {name} is a member of cluster {cluster} ({directory}), and the registry has no cluster with identities; check registry.prefix, \
             registry.etcd or registry.socket in the configuration, or restore the registry from a backup"
        )
    }

    /// The directory of keys.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The directory of keys, and the lock of whoever takes a step of a rotation with it.
    #[must_use]
    pub fn rotation(&self) -> (&Store, &tokio::sync::Mutex<()>) {
        (&self.store, &self.rotation)
    }

    /// The name in the certificate: this node's.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// The common parts of all TLS configurations of this node: for the API and the exports.
    #[must_use]
    pub fn tls(&self) -> &Tls {
        &self.tls
    }

    /// The key and certificate that handshakes use.
    #[must_use]
    pub fn credentials(&self) -> &Arc<CredentialStore> {
        &self.own
    }

    /// The content of this node's certificate, whether it counts or not.
    #[must_use]
    pub fn certificate(&self) -> Facts {
        lock(&self.certificate).0.facts().clone()
    }

    /// Another authority signs than the one that has signed this node's certificate: it renews that now, whatever its age.
    #[must_use]
    pub fn must_renew(&self) -> bool {
        let trust = self.tls.trust.get();
        let signer = trust.authorities().first().map(CaCertificate::fingerprint);
        lock(&self.certificate).1.is_some_and(|own| signer != Some(own))
    }

    /// Waits until other authorities are trusted than before. For one task.
    pub async fn authorities_changed(&self) {
        self.authorities_changed.notified().await;
    }

    /// Shows clients the present certificate once the former one has ended.
    pub fn forget_ended_former(&self) {
        if lock(&self.former_until).is_some_and(|until| until < now()) {
            self.forget_former();
        }
    }

    fn forget_former(&self) {
        if lock(&self.former_until).is_none() {
            return;
        }
        // To show no other needs no key, so it cannot fail.
        let _ = self.show_to_clients(None);
        if let Err(error) = self.store.forget_former_node() {
            tracing::warn!(%error, "the former certificate stays on this host, where nobody uses it");
        }
    }

    /// The content of this node's certificate.
    ///
    /// # Errors
    /// It does not count at this time, with its revocation: peers refuse this node.
    pub fn own_certificate(&self) -> Result<Facts, Mistrust> {
        let certificate = lock(&self.certificate).0.clone();
        self.tls.trust.get().recheck(&certificate, now())?;
        Ok(certificate.facts().clone())
    }

    /// Why peers refuse this node, for operators: its own certificate does not count at this time.
    pub(crate) fn refused_by_peers(&self) -> Option<String> {
        let why = self.own_certificate().err()?;
        let advice = match why {
            Mistrust::NotYet { .. } => {
                "; if this host's clock is right, that of the host that signed it was ahead: the certificate counts from that time on"
            }
            _ => "",
        };
        Some(format!("the other nodes refuse node {}: {why}{advice}", self.name))
    }

    /// The address of a node's API over TLS, as last known.
    #[must_use]
    pub fn api_of(&self, node: &str) -> Option<SocketAddr> {
        lock(&self.apis).get(node).copied()
    }

    /// Notes the addresses of all APIs over TLS.
    pub fn set_apis(&self, apis: BTreeMap<String, SocketAddr>) {
        *lock(&self.apis) = apis;
    }

    /// The names of revoked nodes, as last known.
    #[must_use]
    pub fn revoked_nodes(&self) -> BTreeSet<String> {
        self.tls.trust.get().revoked().nodes.keys().map(ToString::to_string).collect()
    }

    /// Checks whether the stored certificate opens connections: one that was replaced, which a restored backup has, does not.
    ///
    /// # Errors
    /// It does not count.
    pub fn check_stored(&self) -> Result<(), Mistrust> {
        self.own_certificate()?;
        match self.store.node() {
            Ok(stored) => self.check_own(&stored),
            // Found at the start already.
            Err(_) => Ok(()),
        }
    }

    /// For connections from other nodes.
    #[must_use]
    pub fn peer_server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.peer_server)
    }

    /// For clients of the NBD export, who need a certificate.
    ///
    /// # Errors
    /// [`IdentityError::Tls`].
    pub fn nbd_server(&self) -> Result<Arc<ServerConfig>, IdentityError> {
        Ok(Arc::new(self.tls.nbd_server(&self.own, ClientCertificate::Required)?))
    }

    /// For requests to the API of the node `expected`, with this node's certificate.
    ///
    /// # Errors
    /// [`IdentityError::Tls`].
    pub fn api_client(&self, expected: &Name) -> Result<Arc<ClientConfig>, IdentityError> {
        Ok(Arc::new(self.tls.node_api_client(&self.own, expected)?))
    }

    /// For a connection to the node `expected`.
    ///
    /// # Errors
    /// The name is none that a certificate could have; in words.
    pub fn peer_client(&self, expected: &str) -> Result<Arc<ClientConfig>, String> {
        let expected: Name = expected.parse().map_err(|error| format!("{error}"))?;
        let config = self.tls.peer_client(&self.own, &expected);
        config.map(Arc::new).map_err(|error| IdentityError::Tls(error).to_string())
    }

    /// Uses other credentials for handshakes from now on, and after a restart. Clients still get to see the former certificate if
    /// another authority has signed it: their files may name only that one.
    ///
    /// # Errors
    /// The former credentials stay.
    pub fn replace_credentials(&self, credentials: &Credentials) -> Result<(), IdentityError> {
        let certificate = certificate_of(credentials).map_err(|source| IdentityError::Mistrusted {
            directory: PathBuf::from("its renewal"),
            source,
        })?;
        let authority = credentials.authority();
        if lock(&self.certificate).1 != authority {
            let former = self.store.node()?;
            // An attempt that failed after it had stored its certificate has kept the former one.
            if former.authority() != authority {
                self.store.keep_former_node(&former)?;
                self.show_to_clients(Some(&former))?;
            }
        }
        // Durable before it is used: what is in force must survive a restart.
        self.store.replace_node(credentials)?;
        self.own.set(credentials)?;
        *lock(&self.certificate) = (certificate, authority);
        Ok(())
    }

    /// The registry has other authorities or revocations: uses both for handshakes from now on, and ends the open connections
    /// that they do not cover; `ended` gets why, for each. Then stores both: what this node announces must survive a restart. A
    /// certificate whose revocation this node has heard of stays revoked, whatever the registry says since.
    ///
    /// # Errors
    /// The authorities are not of one cluster, and the former trust stays; or a file cannot be written, and the new trust holds
    /// until the next start.
    pub fn set_trust(
        &self,
        authorities: Vec<CaCertificate>,
        revoked: Revocations,
        mut ended: impl FnMut(Mistrust),
    ) -> Result<(), IdentityError> {
        let former = self.tls.trust.get();
        let revoked = revoked.with_certificates_of(former.revoked(), now());
        let other_trust = |source| IdentityError::Trust { directory: PathBuf::from("the registry"), source };
        let trust =
            Trust::new(former.cluster(), authorities.clone(), revoked.clone()).map_err(other_trust)?;
        // A directory that cannot be written must not delay a revocation.
        self.tls.trust.set(trust);
        self.recheck().into_iter().for_each(&mut ended);
        if former.authorities() != authorities {
            self.authorities_changed.notify_one();
        }
        if authorities.len() == 1 {
            self.forget_former();
        }
        // Compared with what is stored: an earlier attempt may have failed.
        let stored = self.store_trust(&authorities, &revoked);
        *lock(&self.unwritten) = stored.as_ref().err().map(|error| {
            format!(
                "node {} cannot store whom it trusts, and would start with what it trusted before if the registry is away then: {error}",
                self.name
            )
        });
        Ok(stored?)
    }

    fn store_trust(&self, authorities: &[CaCertificate], revoked: &Revocations) -> Result<(), StoreError> {
        if !self.store.trust().is_ok_and(|stored| stored == authorities) {
            self.store.replace_trust(authorities)?;
        }
        if !self.store.revocations().is_ok_and(|stored| stored == *revoked) {
            self.store.replace_revocations(revoked)?;
        }
        Ok(())
    }

    /// A connection with this certificate is open, on `socket`. It counts as open as long as the result lives.
    ///
    /// # Errors
    /// The certificate has stopped counting since the handshake, or there is no descriptor left; in words.
    pub fn admit(&self, other: OtherEnd, socket: &impl AsFd) -> Result<Arc<Admitted>, String> {
        let socket = socket.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
        let admitted = Arc::new(Admitted { other, socket });
        let mut all = lock(&self.admitted);
        if all.len() == all.capacity().max(FEW) {
            all.retain(|one| one.strong_count() > 0);
        }
        all.push(Arc::downgrade(&admitted));
        drop(all);
        // After it is in the list: a change of trust in between finds it there, or is found here.
        self.tls.trust.get().recheck(&admitted.other, now()).map_err(|error| error.to_string())?;
        Ok(admitted)
    }

    /// Ends open connections whose certificates do not count any more, and returns why.
    pub fn recheck(&self) -> Vec<Mistrust> {
        let (trust, now) = (self.tls.trust.get(), now());
        let mut ended = Vec::new();
        let mut all = lock(&self.admitted);
        all.retain(|one| {
            let Some(admitted) = one.upgrade() else { return false };
            let Err(why) = trust.recheck(&admitted.other, now) else { return true };
            // Its shard or task finds the connection ended. One that has ended already needs no end.
            let _ = rustix::net::shutdown(&admitted.socket, rustix::net::Shutdown::Both);
            ended.push(why);
            false
        });
        ended
    }
}

/// The node's own certificate.
fn certificate_of(credentials: &Credentials) -> Result<OtherEnd, Mistrust> {
    credentials.chain().first().ok_or(Mistrust::Nobody).and_then(OtherEnd::read)
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    // Only whole values are ever stored, so a panic elsewhere leaves a valid one.
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use weir_identity::{Authority, ClusterId, Holder, Key, NODE_LIFETIME};

    use super::*;

    /// A directory with the identity of `name`, made at `at`.
    pub(crate) fn joined(directory: &Path, authority: &Authority, name: &str, at: u64) {
        let (store, key) = (Store::open(directory).unwrap(), Key::generate().unwrap());
        let issued =
            authority.issue_node(&name.parse().unwrap(), &[], &key.public(), at, NODE_LIFETIME).unwrap();
        store.create_node(&Credentials::new(key, issued.chain).unwrap()).unwrap();
        store.replace_trust(&[authority.certificate().clone()]).unwrap();
    }

    pub(crate) fn authority(cluster: u8) -> Authority {
        Authority::create(ClusterId([cluster; 16]), now() - 2 * NODE_LIFETIME).unwrap()
    }

    #[test]
    fn an_identity_that_is_not_this_nodes_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let refused = |path: &Path, words: &str| {
            let error = NodeIdentity::load(path, "n1").unwrap_err().to_string();
            assert!(error.contains(words), "{error:?} says nothing of {words:?}");
        };
        refused(&path.join("none"), "has not joined a cluster");
        let (ours, theirs) = (authority(1), authority(2));
        joined(&path.join("other"), &ours, "n2", now());
        refused(&path.join("other"), "node n2, and this is node n1");
        joined(&path.join("foreign"), &ours, "n1", now());
        Store::open(&path.join("foreign")).unwrap().replace_trust(&[theirs.certificate().clone()]).unwrap();
        refused(&path.join("foreign"), "of another cluster");
        joined(&path.join("unsigned"), &ours, "n1", now());
        let next = Authority::create(ClusterId([1; 16]), now()).unwrap();
        Store::open(&path.join("unsigned")).unwrap().replace_trust(&[next.certificate().clone()]).unwrap();
        refused(&path.join("unsigned"), "not signed by a certificate authority");
    }

    #[test]
    fn a_certificate_that_has_ended_does_not_stop_the_node() {
        let directory = tempfile::tempdir().unwrap();
        joined(directory.path(), &authority(1), "n1", now() - NODE_LIFETIME - 10_000);
        let identity = NodeIdentity::load(directory.path(), "n1").unwrap();
        assert!(matches!(identity.own_certificate(), Err(Mistrust::Expired { .. })));
        let refused = identity.refused_by_peers().unwrap();
        assert!(refused.starts_with("the other nodes refuse node n1: the certificate of n"), "{refused}");
    }

    #[test]
    fn a_node_says_that_peers_refuse_it_while_its_certificate_is_not_valid_yet() {
        let directory = tempfile::tempdir().unwrap();
        joined(directory.path(), &authority(1), "n1", now() + 7_200);
        let identity = NodeIdentity::load(directory.path(), "n1").unwrap();
        let refused = identity.refused_by_peers().unwrap();
        assert!(
            refused.contains("is not valid before") && refused.contains("counts from that time on"),
            "{refused}"
        );
        let directory = tempfile::tempdir().unwrap();
        joined(directory.path(), &authority(1), "n1", now());
        let identity = NodeIdentity::load(directory.path(), "n1").unwrap();
        assert_eq!(identity.refused_by_peers(), None);
    }

    #[test]
    fn connections_of_a_revoked_node_end_and_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let authority = authority(1);
        joined(directory.path(), &authority, "n1", now());
        let identity = NodeIdentity::load(directory.path(), "n1").unwrap();
        let certificate = |name: &str| {
            let key = Key::generate().unwrap();
            let name = name.parse().unwrap();
            let issued = authority.issue_node(&name, &[], &key.public(), now(), NODE_LIFETIME).unwrap();
            OtherEnd::read(&issued.chain[0]).unwrap()
        };
        let open = |other: &OtherEnd| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            (identity.admit(other.clone(), &ours), ours, theirs)
        };
        let (bad, good) = (certificate("n2"), certificate("n3"));
        let (_first, _a, mut revoked) = open(&bad);
        let (_second, _b, mut other) = open(&good);
        let (gone, _c, mut forgotten) = open(&bad);
        drop(gone);
        let authorities = vec![authority.certificate().clone()];
        let name = "n2".parse().unwrap();
        let list = Revocations::default().with_name(Holder::Node, &name, [bad.facts()], "stolen", now());
        let mut ended = Vec::new();
        identity.set_trust(authorities.clone(), list.clone(), |why| ended.push(why)).unwrap();
        assert!(matches!(&ended[..], [Mistrust::Revoked { reason, .. }] if reason == "stolen"), "{ended:?}");
        let mut byte = [0];
        assert_eq!(revoked.read(&mut byte).unwrap(), 0, "ended");
        for open in [&mut other, &mut forgotten] {
            assert_eq!(open.read(&mut byte).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        }
        assert!(open(&bad).0.unwrap_err().contains("revoked"), "admitted during the change");
        assert!(identity.recheck().is_empty());
        let nobody = |why: Mistrust| panic!("{why}");
        assert!(identity.set_trust(Vec::new(), Revocations::default(), nobody).is_err());
        assert_eq!(identity.store().revocations().unwrap(), list, "revoked after a restart, too");
        // The registry was restored from a backup of before.
        identity.set_trust(authorities, Revocations::default(), nobody).unwrap();
        assert!(open(&bad).0.unwrap_err().contains("revoked"), "its certificate never counts again");
        assert_eq!(identity.store().revocations().unwrap().serials, list.serials);
        let again = certificate("n2");
        assert!(open(&again).0.is_ok(), "a host that was readmitted under the name");
    }
}
