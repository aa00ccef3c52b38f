//! One connection for each endpoint, and the choice among them.
//!
//! etcd-client's own balancing goes on choosing a dead endpoint. Here all calls and watches use one endpoint until it fails; then
//! they move to the next.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use etcd_client::{Channel, Client, ConnectOptions};
use tokio::sync::{Mutex, watch};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use weir_cluster::RegistryError;

use crate::config::{ConfigError, EtcdConfig, Secrets};
use crate::failure::{Failure, of_connecting};

/// Largest answer to a call: 128 entries with the largest value.
const MAX_ANSWER: usize = 136 << 20;
/// Largest part of a watch's answer; etcd splits them at 2 MiB.
const MAX_WATCH_ANSWER: usize = 64 << 20;
/// Interval of pings on a connection. By default etcd ends connections that ping more often than every 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(6);
/// After this long without an answer to a ping a connection has ended.
const PING_TIMEOUT: Duration = Duration::from_secs(3);
/// Received bytes that may wait to be read, per stream and per connection. A watch that nobody reads must not hold up others.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

/// The endpoints.
pub(crate) struct Links {
    config: EtcdConfig,
    links: Vec<Mutex<State>>,
    /// The endpoint in use.
    current: watch::Sender<usize>,
    /// The log has named etcd's version as unsuitable.
    warned: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    client: Option<Client>,
    /// Number of the connection.
    made: u64,
}

/// A connection to one endpoint.
#[derive(Clone)]
pub(crate) struct Link {
    pub client: Client,
    pub endpoint: usize,
    pub made: u64,
}

impl Links {
    pub fn new(config: &EtcdConfig) -> Links {
        let links = config.endpoints.iter().map(|_| Mutex::default()).collect();
        Links { config: config.clone(), links, current: watch::Sender::new(0), warned: Arc::default() }
    }

    pub fn count(&self) -> usize {
        self.links.len()
    }

    pub fn name(&self, endpoint: usize) -> &str {
        &self.config.endpoints[endpoint]
    }

    /// The endpoint in use.
    pub fn current(&self) -> watch::Receiver<usize> {
        self.current.subscribe()
    }

    /// Moves all calls and watches from `endpoint` to the next one, unless they have moved already.
    pub fn leave(&self, endpoint: usize, reason: &str) {
        let next = (endpoint + 1) % self.links.len();
        let moved = self.current.send_if_modified(|current| {
            let here = *current == endpoint && next != endpoint;
            if here {
                *current = next;
            }
            here
        });
        if moved {
            tracing::debug!(
                from = self.name(endpoint),
                to = self.name(next),
                reason,
                "etcd: changing the endpoint"
            );
        }
    }

    /// Moves all calls and watches to `endpoint`, if they use one of those that were `tried`.
    pub fn prefer(&self, endpoint: usize, tried: &[usize]) {
        let moved = self.current.send_if_modified(|current| {
            let here = *current != endpoint && tried.contains(current);
            if here {
                *current = endpoint;
            }
            here
        });
        if moved {
            tracing::debug!(
                to = self.name(endpoint),
                "etcd: changing the endpoint, the former one is silent"
            );
        }
    }

    /// The connection to `endpoint`; makes it, and signs in, if there is none.
    pub async fn link(&self, endpoint: usize) -> Result<Link, Failure> {
        let mut state = self.links[endpoint].lock().await;
        if state.client.is_none() {
            let secrets = self.config.read().map_err(|error| setup(error.to_string()))?;
            let client = connect(self.name(endpoint), &self.config, &secrets).await?;
            tokio::spawn(check_version(client.clone(), Arc::clone(&self.warned)));
            state.client = Some(client);
            state.made += 1;
        }
        match &state.client {
            Some(client) => Ok(Link { client: client.clone(), endpoint, made: state.made }),
            None => Err(setup("no connection was made".to_owned())),
        }
    }

    /// A connection that is made when it is first used.
    #[cfg(test)]
    pub async fn connect_later(&self, endpoint: usize) {
        let channel = Endpoint::from_shared(self.name(endpoint).to_owned()).expect("a URL").connect_lazy();
        let client = Client::from_channel(Channel::Tonic(channel), None).await.expect("no user to sign in");
        let mut state = self.links[endpoint].lock().await;
        (state.client, state.made) = (Some(client), 1);
    }

    /// Drops a connection that has failed; the next call makes another one.
    pub async fn drop_link(&self, endpoint: usize, link: Option<&Link>) {
        let mut state = self.links[endpoint].lock().await;
        if link.is_none_or(|link| link.made == state.made) {
            state.client = None;
        }
    }
}

/// Warns once of an etcd whose deposed leaders end living leases (etcd issue 15247): a node could then lose its session before the time
/// that etcd has confirmed.
async fn check_version(mut client: Client, warned: Arc<AtomicBool>) {
    // Without an answer, the call itself will show the reason.
    let Ok(status) = client.status().await else { return };
    if ends_living_leases(status.version()) && !warned.swap(true, Ordering::Relaxed) {
        let version = status.version();
        tracing::warn!(
            version,
            "deposed leaders of this etcd end living leases; use 3.4.31, 3.5.13 or a later version"
        );
    }
}

fn setup(reason: String) -> Failure {
    RegistryError::Setup { reason }.into()
}

/// Checks URLs and certificates without connecting.
pub(crate) fn check(config: &EtcdConfig, secrets: &Secrets) -> Result<(), ConfigError> {
    for url in &config.endpoints {
        endpoint(url, config, secrets)?;
    }
    Ok(())
}

fn endpoint(url: &str, config: &EtcdConfig, secrets: &Secrets) -> Result<Endpoint, ConfigError> {
    let bad = |error: tonic::transport::Error| {
        let source =
            std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
        // No peer has shown a certificate yet.
        let source = source.replace("invalid peer certificate", "registry.certificate is not usable");
        ConfigError::Tls(format!(
            "{url}: {error}{source}; check registry.etcd and the files registry.ca, registry.certificate and registry.key"
        ))
    };
    let mut endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(bad)?
        .connect_timeout(config.request_timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    if let Some(ca) = &secrets.ca {
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
        if let Some((certificate, key)) = &secrets.identity {
            tls = tls.identity(Identity::from_pem(certificate, key));
        }
        endpoint = endpoint.tls_config(tls).map_err(bad)?;
    }
    Ok(endpoint)
}

/// Whether a version of etcd lacks the fix of its issue 15247.
fn ends_living_leases(version: &str) -> bool {
    let mut parts = version.split(['.', '-']).map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten(), parts.next().flatten()) {
        (Some(3), Some(minor), Some(patch)) => {
            minor < 4 || minor == 4 && patch < 31 || minor == 5 && patch < 13
        }
        _ => false,
    }
}

async fn connect(url: &str, config: &EtcdConfig, secrets: &Secrets) -> Result<Client, Failure> {
    let endpoint = endpoint(url, config, secrets).map_err(|error| setup(error.to_string()))?;
    let channel = endpoint.connect().await.map_err(|error| of_connecting(&error))?;
    // Without a leader etcd then refuses calls at once and ends watches, which would otherwise be silent.
    let mut options = ConnectOptions::new().with_require_leader(true);
    if let Some((name, password)) = &secrets.user {
        options = options.with_user(name, password).with_auto_token_refresh(true);
    }
    Ok(Client::from_channel(Channel::Tonic(channel), Some(options)).await?)
}

impl Link {
    pub fn kv(&self) -> etcd_client::KvClient {
        self.client.kv_client().max_decoding_message_size(MAX_ANSWER)
    }

    pub fn lease(&self) -> etcd_client::LeaseClient {
        self.client.lease_client()
    }

    pub fn watch(&self) -> etcd_client::WatchClient {
        self.client.watch_client().max_decoding_message_size(MAX_WATCH_ANSWER)
    }
}

#[cfg(test)]
mod tests {
    use super::ends_living_leases;

    #[test]
    fn versions_without_the_fix_are_known() {
        for old in ["3.3.27", "3.4.23", "3.4.30", "3.5.0", "3.5.12", "3.5.0-rc.1"] {
            assert!(ends_living_leases(old), "{old}");
        }
        for good in ["3.4.31", "3.5.13", "3.5.24", "3.6.0", "4.0.0", "", "unknown"] {
            assert!(!ends_living_leases(good), "{good}");
        }
    }
}
