//! The listeners of the NBD export.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ServerConfig;
use weir_export::nbd::{ListenAddress, ListenError, Listener, ListenerConfig};

use crate::config::Config;
use crate::nbd_address::NbdAddress;

/// Opens all listeners; `tls` is that of the node's identity. Also returns where clients are sent: an address in plain text and one
/// over TLS, each the first that other hosts reach, if there is one.
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
    let mut announced = [None; 2];
    for &NbdAddress { address, plaintext } in &config.nbd.tcp {
        let (slot, address) = match tls {
            // An operator who writes that an address is in plain text has read the warning there.
            _ if plaintext => (0, ListenAddress::Tcp { address, beyond_loopback: true }),
            Some(config) => (1, ListenAddress::Tls { address, config: Arc::clone(config) }),
            None => return Err(ListenError::BeyondLoopback(address)),
        };
        let listener = Listener::bind(&address, ListenerConfig::default()).await?;
        announced[slot] = better(announced[slot], listener.local_address());
        listeners.push(listener);
    }
    Ok((listeners, announced))
}

/// The address to announce: the known one, unless only the other one is beyond this host.
fn better(known: Option<SocketAddr>, other: Option<SocketAddr>) -> Option<SocketAddr> {
    let is_near = |address: &SocketAddr| address.ip().is_loopback();
    match (known, other) {
        (Some(near), Some(far)) if is_near(&near) && !is_near(&far) => Some(far),
        (known, other) => known.or(other),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_other_hosts_reach_is_announced_before_one_of_this_host() {
        let [near, far, other] =
            ["127.0.0.1:1", "10.0.0.1:1", "10.0.0.2:1"].map(|one| Some(one.parse().unwrap()));
        for (all, announced) in [
            ([near, far, other], far),
            ([far, near, other], far),
            ([near, near, None], near),
            ([None; 3], None),
        ] {
            assert_eq!(all.into_iter().fold(None, better), announced, "{all:?}");
        }
    }
}
