//! The client of the registry that the configuration names: an etcd, or the embedded one at a socket.

use std::sync::Arc;

use weir_cluster::registry::{Registry, RegistryError};
use weir_cluster::{Client, ClientConfig};
use weir_etcd::{ConfigError, Etcd};

use crate::config::Config;

/// Why the configured registry cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistryUnusable {
    /// The settings for etcd, or the files that they name.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// It refuses.
    #[error("the registry: {0}")]
    Refused(#[from] RegistryError),
}

/// The client of the configured registry, which need not answer yet.
///
/// # Errors
/// The configuration of the registry cannot work.
pub fn registry(config: &Config) -> Result<Arc<dyn Registry>, RegistryUnusable> {
    match etcd(config)? {
        Some(etcd) => Ok(Arc::new(etcd)),
        None => Ok(Arc::new(Client::new(&config.registry.socket, ClientConfig::default())?)),
    }
}

/// The configured registry, if it has been set up. Another question to an etcd without one would set it up.
///
/// # Errors
/// As [`registry`]; etcd does not answer, or refuses.
pub(crate) async fn existing_registry(
    config: &Config,
) -> Result<Option<Arc<dyn Registry>>, RegistryUnusable> {
    match is_set_up(config).await? {
        true => registry(config).map(Some),
        false => Ok(None),
    }
}

/// Whether the configured registry has been set up.
///
/// # Errors
/// As [`existing_registry`].
pub(crate) async fn is_set_up(config: &Config) -> Result<bool, RegistryUnusable> {
    // The embedded one is there when it answers.
    let Some(etcd) = etcd(config)? else { return Ok(true) };
    Ok(etcd.is_set_up().await?)
}

fn etcd(config: &Config) -> Result<Option<Etcd>, ConfigError> {
    let invalid = |(key, value, reason)| ConfigError::Value { key, value, reason };
    config.registry.etcd(&config.lease).map_err(invalid)?.map(Etcd::new).transpose()
}
