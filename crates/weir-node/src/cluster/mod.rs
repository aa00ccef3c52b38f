//! The cluster's identities: who may join, who has a certificate, who is revoked.
//!
//! `weir-identity` decides; this module reads and writes the registry's records, and carries requests.
//!
//! - [`records`]: the registry's records, read at one revision;
//! - [`setup`]: the first node; [`joining`]: every other one, on the host that joins;
//! - [`admission`]: the node that answers; [`signers`]: requests to it; [`changes`]: operators' requests;
//! - [`rotation`]: another authority takes the place of the present one;
//! - [`renewal`]: a running node renews its certificate;
//! - [`follow`]: what a running node does when the records change;
//! - [`views`]: the forms of requests and answers.

pub mod admission;
pub mod changes;
pub mod follow;
pub mod joining;
pub mod records;
pub mod renewal;
pub mod rotation;
pub mod setup;
pub mod signers;
pub mod views;

/// The wall clock, by which certificates and tokens are valid: seconds since 1970.
#[must_use]
pub fn unix_seconds() -> u64 {
    weir_task::unix_millis() / 1000
}
