//! Disks that a command fills, and then cannot complete.

use weir_node::api::{ApiErrorKind, Delete};
use weir_node::client::Client;

use crate::failure::Failure;

/// Removes a disk that could not be filled, by the number of its import.
pub fn give_up(client: &Client, (name, import): (&str, u64), failure: Failure) -> Failure {
    // Only while it is this import's: somebody else may have made another disk of the name, and an end whose answer was lost has come.
    let wanted = Delete { force: true, import: Some(import), ..Delete::default() };
    match client.delete(name, &wanted) {
        Ok(_) => failure.hint(format!("disk {name} is removed again")),
        // It was not made.
        Err(none) if none.kind == ApiErrorKind::NotFound => failure,
        Err(left) => failure.hint(format!("disk {name} is left ({}): `weir disk show {name}`", left.message)),
    }
}
