//! The listeners of the NBD export.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ServerConfig;
use weir_export::nbd::{ListenAddress, ListenError, Listener, ListenerConfig};

use crate::config::Config;
use crate::nbd_address::NbdAddress;

/// Opens all listeners; `tls` is that of the node's identity. Also returns the first address in plain text and the first over TLS.
///
/// # Errors
/// An address is in use, or the node has no identity and an address is not to be plain text.
pub async fn listen(
    config: &Config,
    tls: Option<&Arc<ServerConfig>>,
) -> Result<(Vec<Listener>, [Option<SocketAddr>; 2]), ListenError> {
    let mut listeners = Vec::new();
    if let Some(path) = config.nbd_socket() {
        listeners.push(Listener::bind(&ListenAddress::Unix(path), ListenerConfig::default()).await?);
    }
    let mut first = [None; 2];
    for &NbdAddress { address, plaintext } in &config.nbd.tcp {
        let (slot, address) = match tls {
            // An operator who writes that an address is in plain text has read the warning there.
            _ if plaintext => (0, ListenAddress::Tcp { address, beyond_loopback: true }),
            Some(config) => (1, ListenAddress::Tls { address, config: Arc::clone(config) }),
            None => return Err(ListenError::BeyondLoopback(address)),
        };
        let listener = Listener::bind(&address, ListenerConfig::default()).await?;
        first[slot] = first[slot].or(listener.local_address());
        listeners.push(listener);
    }
    Ok((listeners, first))
}
