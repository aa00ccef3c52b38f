//! Disks that a command fills, and then cannot complete.

use weir_node::api::{Delete, Importing};
use weir_node::client::Client;

use crate::failure::Failure;

/// Removes a disk that could not be filled.
pub fn give_up(client: &Client, import: &Importing, failure: Failure) -> Failure {
    let name = &import.disk.name;
    // Only while it is this import's: somebody else may have made another disk of the name, and an end whose answer was lost has come.
    let wanted = Delete { force: true, import: Some(import.number), ..Delete::default() };
    match client.delete(name, &wanted) {
        Ok(_) => failure.hint(format!("disk {name} is removed again")),
        Err(left) => failure.hint(format!("disk {name} is left ({}): `weir disk show {name}`", left.message)),
    }
}
