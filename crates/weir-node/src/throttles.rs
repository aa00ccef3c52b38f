//! Limits of log lines that others can cause; the node's metrics count the suppressed ones.

use std::time::Duration;

use weir_block::Throttle;

/// A peer is turned away.
pub(crate) static PEER_REFUSED: Throttle = Throttle::new("peer-turned-away", Duration::from_secs(1));

/// An event says that a peer is turned away.
pub(crate) static PEER_REFUSED_EVENT: Throttle =
    Throttle::new("peer-turned-away-event", Duration::from_secs(10));

/// A client of a disk that follows its guest is turned away.
pub(crate) static FOLLOWER_REFUSED: Throttle = Throttle::new("follower-turned-away", Duration::from_secs(1));

/// An NBD client is refused where TLS is required.
pub(crate) static NBD_REFUSED: Throttle = Throttle::new("nbd-client-refused", Duration::from_secs(1));

/// An event says that an NBD client is refused.
pub(crate) static NBD_REFUSED_EVENT: Throttle =
    Throttle::new("nbd-client-refused-event", Duration::from_secs(10));

/// A connection to the API over TLS is refused.
pub(crate) static API_REFUSED: Throttle = Throttle::new("api-connection-refused", Duration::from_secs(1));

/// An attempt to join the cluster again fails.
pub(crate) static JOIN_FAILED: Throttle = Throttle::new("not-joined-again", Duration::from_secs(10));

/// A look at a backing that is being opened fails; it is repeated five times a second.
pub(crate) static LOOK_FAILED: Throttle = Throttle::new("look-failed", Duration::from_secs(10));

/// All limits of this process.
pub(crate) fn all() -> [&'static Throttle; 9] {
    [
        &API_REFUSED,
        &NBD_REFUSED,
        &NBD_REFUSED_EVENT,
        &PEER_REFUSED,
        &PEER_REFUSED_EVENT,
        &LOOK_FAILED,
        &FOLLOWER_REFUSED,
        &JOIN_FAILED,
        &weir_export::nbd::BAD_REQUESTS,
    ]
}
