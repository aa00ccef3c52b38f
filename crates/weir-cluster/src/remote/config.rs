//! Time limits of a client of the registry.

use std::time::Duration;

/// Time limits of a [`Client`](super::Client).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// After this long without an answer a call fails with [`RegistryError::Unavailable`](crate::RegistryError::Unavailable) (P9).
    pub request_timeout: Duration,
    /// Pause before the first attempt to connect again; doubles with each failure.
    pub backoff_min: Duration,
    /// Longest pause. Well below the time to live of a lease, so that leases survive a restart of the server.
    pub backoff_max: Duration,
}

impl Default for ClientConfig {
    fn default() -> ClientConfig {
        ClientConfig {
            request_timeout: Duration::from_secs(5),
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(250),
        }
    }
}
