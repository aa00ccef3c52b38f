//! TLS configurations: one for each way into a node. TLS 1.3 only, and no resumption: a resumed session would skip the check of
//! the certificate, and a revoked node could go on.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::ClientCertVerifier;
use rustls::time_provider::TimeProvider;
use rustls::version::TLS13;
use rustls::{ClientConfig, CommonState, Error, ServerConfig};

use crate::credentials::CredentialStore;
use crate::name::{Fingerprint, Name};
use crate::protocol::{API_PROTOCOL, NODE_API_PROTOCOL, PEER_PROTOCOL};
use crate::trust::{Mistrust, OtherEnd, TrustStore};
use crate::verify::{Accept, Members, Pinned};

/// Whether a server asks its clients for a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificate {
    /// A client without one is refused in the handshake.
    Required,
    /// A client without one is nobody; the server decides what nobody may do. A bad certificate is refused.
    Optional,
}

/// The algorithms: the faster cipher of this processor first.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites = if has_aes() {
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256]
    } else {
        vec![TLS13_CHACHA20_POLY1305_SHA256, TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384]
    };
    Arc::new(provider)
}

/// The processor has instructions for AES in Galois/counter mode.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// The common parts of all TLS configurations of a node or client. Trust and credentials can change under them.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Whom to accept.
    pub trust: Arc<TrustStore>,
    /// Whose certificates count is a matter of time: the wall clock, which the caller owns.
    pub clock: Arc<dyn TimeProvider>,
    /// The algorithms, see [`provider`].
    pub provider: Arc<CryptoProvider>,
}

impl Tls {
    /// For connections from nodes: a node's certificate is required.
    ///
    /// # Errors
    /// [`Error::General`] if the provider has no algorithm of TLS 1.3.
    pub fn peer_server(&self, own: &Arc<CredentialStore>) -> Result<ServerConfig, Error> {
        let mut config = self.server(own, Accept::AnyNode, ClientCertificate::Required)?;
        config.alpn_protocols = vec![PEER_PROTOCOL.to_vec()];
        Ok(config)
    }

    /// For connections to the node `expected`.
    ///
    /// # Errors
    /// As [`Tls::peer_server`].
    pub fn peer_client(&self, own: &Arc<CredentialStore>, expected: &Name) -> Result<ClientConfig, Error> {
        let mut config = self.client(Some(own), Accept::Node(expected.clone()))?;
        config.alpn_protocols = vec![PEER_PROTOCOL.to_vec()];
        Ok(config)
    }

    /// For the API. A client without a certificate is nobody: it may join with a token, or show another credential.
    ///
    /// # Errors
    /// As [`Tls::peer_server`].
    pub fn api_server(&self, own: &Arc<CredentialStore>) -> Result<ServerConfig, Error> {
        let mut config = self.server(own, Accept::Anyone, ClientCertificate::Optional)?;
        config.alpn_protocols = vec![API_PROTOCOL.to_vec()];
        Ok(config)
    }

    /// For requests to the API of a node; of any, unless `expected` names one.
    ///
    /// # Errors
    /// As [`Tls::peer_server`].
    pub fn api_client(
        &self,
        own: Option<&Arc<CredentialStore>>,
        expected: Option<&Name>,
    ) -> Result<ClientConfig, Error> {
        let mut config = self.client(own, accept(expected))?;
        config.alpn_protocols = vec![API_PROTOCOL.to_vec()];
        Ok(config)
    }

    /// For requests of a node to the API of the node `expected`.
    ///
    /// # Errors
    /// As [`Tls::peer_server`].
    pub fn node_api_client(
        &self,
        own: &Arc<CredentialStore>,
        expected: &Name,
    ) -> Result<ClientConfig, Error> {
        let mut config = self.api_client(Some(own), Some(expected))?;
        config.alpn_protocols.insert(0, NODE_API_PROTOCOL.to_vec());
        Ok(config)
    }

    /// For NBD. No application protocol: other NBD clients name none.
    ///
    /// # Errors
    /// As [`Tls::peer_server`].
    pub fn nbd_server(
        &self,
        own: &Arc<CredentialStore>,
        certificate: ClientCertificate,
    ) -> Result<ServerConfig, Error> {
        self.server(own, Accept::Anyone, certificate)
    }

    /// For Weir's NBD client to a node's export; of any node, unless `expected` names one.
    ///
    /// # Errors
    /// As [`Tls::peer_server`].
    pub fn nbd_client(
        &self,
        own: Option<&Arc<CredentialStore>>,
        expected: Option<&Name>,
    ) -> Result<ClientConfig, Error> {
        self.client(own, accept(expected))
    }

    fn server(
        &self,
        own: &Arc<CredentialStore>,
        accept: Accept,
        certificate: ClientCertificate,
    ) -> Result<ServerConfig, Error> {
        let optional = certificate == ClientCertificate::Optional;
        let verifier: Arc<dyn ClientCertVerifier> =
            Members::new(Arc::clone(&self.trust), accept, optional, Arc::clone(&self.provider));
        let mut config =
            ServerConfig::builder_with_details(Arc::clone(&self.provider), Arc::clone(&self.clock))
                .with_protocol_versions(&[&TLS13])?
                .with_client_cert_verifier(verifier)
                .with_cert_resolver(Arc::clone(own) as _);
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    fn client(&self, own: Option<&Arc<CredentialStore>>, accept: Accept) -> Result<ClientConfig, Error> {
        let verifier = Members::new(Arc::clone(&self.trust), accept, false, Arc::clone(&self.provider));
        let builder = ClientConfig::builder_with_details(Arc::clone(&self.provider), Arc::clone(&self.clock))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let config = match own {
            Some(own) => builder.with_client_cert_resolver(Arc::clone(own) as _),
            None => builder.with_no_client_auth(),
        };
        Ok(without_memory(config))
    }
}

fn accept(expected: Option<&Name>) -> Accept {
    expected.map_or(Accept::AnyNode, |name| Accept::Node(name.clone()))
}

/// No resumption, and no name in clear text at the start of the connection.
fn without_memory(mut config: ClientConfig) -> ClientConfig {
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config
}

/// For the request of a host that joins: the node that answers must show a chain to an authority with one of the fingerprints
/// `pins`. The handshake fails before anything of the request is sent.
///
/// # Errors
/// As [`Tls::peer_server`].
pub fn joining_client(
    pins: &[Fingerprint],
    clock: Arc<dyn TimeProvider>,
    provider: Arc<CryptoProvider>,
) -> Result<ClientConfig, Error> {
    let verifier = Pinned::new(pins.to_vec(), Arc::clone(&provider));
    let mut config = ClientConfig::builder_with_details(provider, clock)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![API_PROTOCOL.to_vec()];
    Ok(without_memory(config))
}

/// The peer's identity on a connection with a configuration of this module, after the handshake. `None` without a certificate,
/// where that is optional.
///
/// # Errors
/// [`Mistrust::Foreign`] if the configuration was another one.
pub fn other_end(connection: &CommonState) -> Result<Option<OtherEnd>, Mistrust> {
    connection.peer_certificates().and_then(<[_]>::first).map(OtherEnd::read).transpose()
}

/// The node at the other end of a peer connection. Call it before the first byte of the peers' protocol: it also checks that both
/// ends mean that protocol.
///
/// # Errors
/// [`Mistrust::Nobody`], [`Mistrust::OtherProtocol`], [`Mistrust::Foreign`].
pub fn peer(connection: &CommonState) -> Result<OtherEnd, Mistrust> {
    if connection.alpn_protocol() != Some(PEER_PROTOCOL) {
        let expected = String::from_utf8_lossy(PEER_PROTOCOL).into_owned();
        return Err(Mistrust::OtherProtocol { expected });
    }
    other_end(connection)?.ok_or(Mistrust::Nobody)
}
