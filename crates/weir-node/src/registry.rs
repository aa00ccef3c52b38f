//! The client of the registry that the configuration names: an etcd, or the embedded one at a socket.

use std::sync::Arc;

use weir_cluster::migration::{MigrationError, Named};
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
    let invalid = |(key, value, reason)| ConfigError::Value { key, value, reason };
    match config.registry.etcd(&config.lease).map_err(invalid)? {
        Some(etcd) => Ok(Arc::new(Etcd::new(etcd)?)),
        None => Ok(Arc::new(Client::new(&config.registry.socket, ClientConfig::default())?)),
    }
}

/// A registry whose content is, or will be, in another one has no nodes.
pub(crate) async fn check_usable(registry: &dyn Registry, config: &Config) -> Result<(), RegistryError> {
    let name = format!("the registry at {}", config.registry.place());
    match (Named { registry, name: &name }).check_usable().await {
        Err(MigrationError::Registry { source, .. }) => Err(source),
        checked => checked.map_err(|error| RegistryError::Setup { reason: error.to_string() }),
    }
}
