//! Limits of log lines that others can cause; the node's metrics count the suppressed ones.

use std::time::Duration;

use weir_block::Throttle;
use weir_export::nbd::Refused;

use crate::refusal::Why;

/// Shortest time between two lines of the log for one kind of refused peers.
const LINE: Duration = Duration::from_secs(1);

/// Shortest time between two such events.
const EVENT: Duration = Duration::from_secs(10);

/// Peers that are turned away, in the log, by the reason: one kind of noise must not hide another.
static PEER_SILENT: Throttle = Throttle::new("peer-silent", LINE);
static PEER_UNPROVEN: Throttle = Throttle::new("peer-unproven", LINE);
static PEER_MISGREETED: Throttle = Throttle::new("peer-misgreeted", LINE);
static PEER_NOT_ALLOWED: Throttle = Throttle::new("peer-not-allowed", LINE);
static PEER_NO_ROOM: Throttle = Throttle::new("peer-no-room", LINE);

/// The same as events.
static PEER_SILENT_EVENT: Throttle = Throttle::new("peer-silent-event", EVENT);
static PEER_UNPROVEN_EVENT: Throttle = Throttle::new("peer-unproven-event", EVENT);
static PEER_MISGREETED_EVENT: Throttle = Throttle::new("peer-misgreeted-event", EVENT);
static PEER_NOT_ALLOWED_EVENT: Throttle = Throttle::new("peer-not-allowed-event", EVENT);
static PEER_NO_ROOM_EVENT: Throttle = Throttle::new("peer-no-room-event", EVENT);

/// The limits of lines and of events that say that a peer was turned away.
pub(crate) fn turned_away(why: Why) -> (&'static Throttle, &'static Throttle) {
    match why {
        Why::Silent => (&PEER_SILENT, &PEER_SILENT_EVENT),
        Why::Unproven => (&PEER_UNPROVEN, &PEER_UNPROVEN_EVENT),
        Why::Misgreeted => (&PEER_MISGREETED, &PEER_MISGREETED_EVENT),
        Why::NotAllowed => (&PEER_NOT_ALLOWED, &PEER_NOT_ALLOWED_EVENT),
        Why::NoRoom => (&PEER_NO_ROOM, &PEER_NO_ROOM_EVENT),
    }
}

/// A client of a disk that follows its guest is turned away.
pub(crate) static FOLLOWER_REFUSED: Throttle = Throttle::new("follower-turned-away", Duration::from_secs(1));

/// A client of a disk that another node owns is turned away.
pub(crate) static FORWARDING_REFUSED: Throttle =
    Throttle::new("forwarding-turned-away", Duration::from_secs(1));

/// A client of a disk that another node owns cannot be brought there.
pub(crate) static FORWARDING_FAILED: Throttle = Throttle::new("forwarding-failed", Duration::from_secs(1));

/// NBD clients that are refused where TLS is required, in the log, by the reason.
static NBD_PLAIN_TEXT: Throttle = Throttle::new("nbd-plain-text", LINE);
static NBD_NOT_ADMITTED: Throttle = Throttle::new("nbd-not-admitted", LINE);
static NBD_NOT_ALLOWED: Throttle = Throttle::new("nbd-not-allowed", LINE);

/// The same as events.
static NBD_PLAIN_TEXT_EVENT: Throttle = Throttle::new("nbd-plain-text-event", EVENT);
static NBD_NOT_ADMITTED_EVENT: Throttle = Throttle::new("nbd-not-admitted-event", EVENT);
static NBD_NOT_ALLOWED_EVENT: Throttle = Throttle::new("nbd-not-allowed-event", EVENT);

/// The limits of lines and of events that say that an NBD client is refused.
pub(crate) fn nbd_refused(why: Refused) -> (&'static Throttle, &'static Throttle) {
    match why {
        Refused::PlainText => (&NBD_PLAIN_TEXT, &NBD_PLAIN_TEXT_EVENT),
        Refused::NotAdmitted => (&NBD_NOT_ADMITTED, &NBD_NOT_ADMITTED_EVENT),
        Refused::NotAllowed => (&NBD_NOT_ALLOWED, &NBD_NOT_ALLOWED_EVENT),
    }
}

/// A connection to the API over TLS is refused.
pub(crate) static API_REFUSED: Throttle = Throttle::new("api-connection-refused", Duration::from_secs(1));

/// An attempt to join the cluster again fails.
pub(crate) static JOIN_FAILED: Throttle = Throttle::new("not-joined-again", Duration::from_secs(10));

/// A look at a backing that is being opened fails; it is repeated five times a second.
pub(crate) static LOOK_FAILED: Throttle = Throttle::new("look-failed", Duration::from_secs(10));

/// A disk's file is not opened, because the disk is not here.
pub(crate) static FILE_REFUSED: Throttle = Throttle::new("fuse-open-refused", Duration::from_secs(1));

/// A shard does not take a client.
pub(crate) static CLIENT_NOT_TAKEN: Throttle = Throttle::new("client-not-taken", LINE);

/// All limits of this process.
pub(crate) fn all() -> [&'static Throttle; 25] {
    [
        &CLIENT_NOT_TAKEN,
        &FILE_REFUSED,
        &API_REFUSED,
        &NBD_PLAIN_TEXT,
        &NBD_PLAIN_TEXT_EVENT,
        &NBD_NOT_ADMITTED,
        &NBD_NOT_ADMITTED_EVENT,
        &NBD_NOT_ALLOWED,
        &NBD_NOT_ALLOWED_EVENT,
        &PEER_SILENT,
        &PEER_SILENT_EVENT,
        &PEER_UNPROVEN,
        &PEER_UNPROVEN_EVENT,
        &PEER_MISGREETED,
        &PEER_MISGREETED_EVENT,
        &PEER_NOT_ALLOWED,
        &PEER_NOT_ALLOWED_EVENT,
        &PEER_NO_ROOM,
        &PEER_NO_ROOM_EVENT,
        &LOOK_FAILED,
        &FOLLOWER_REFUSED,
        &FORWARDING_REFUSED,
        &FORWARDING_FAILED,
        &JOIN_FAILED,
        &weir_export::nbd::BAD_REQUESTS,
    ]
}
