//! Readers on other nodes: whether this node answers what they read of a disk that is open here.

use std::sync::Arc;

use super::node::Node;
use crate::config::FilesElsewhere;
use crate::places::{Place, Places};
use crate::units::count_are;

/// Connections of one node to read one disk (P10). It has one, and a former one may not have ended yet.
const MOST_OF_NODE: usize = 4;

/// Places for connections that read.
#[must_use]
pub fn places() -> Arc<Places> {
    Places::new(MOST_OF_NODE)
}

/// Whether node `reader` may read `disk` here, and a place for its connection.
///
/// # Errors
/// In words: this node answers no readers, does not know that node, or does not serve the disk; or the node has its places.
pub fn admit(node: &Node, disk: &str, reader: &str) -> Result<Place, String> {
    if node.config.fuse.elsewhere != FilesElsewhere::Read {
        return Err(format!(
            "{reader} reads disk {disk}, and this node answers no readers: set fuse.elsewhere = \"read\""
        ));
    }
    if !node.records.nodes.now().contains_key(reader) {
        return Err(format!("no node {reader} is up, as far as this node knows"));
    }
    // The content of an import is its importer's until it is whole.
    let is_whole = node.records.disk(disk).is_some_and(|record| record.importing == 0);
    if !is_whole || node.here.get(disk).is_none() {
        return Err(format!("{reader} reads disk {disk}, which is not served here"));
    }
    let place = node.readers.take(&holder(disk, reader));
    place.ok_or_else(|| format!("{reader} has {MOST_OF_NODE} connections already that read disk {disk}"))
}

/// No name has a space.
fn holder(disk: &str, reader: &str) -> String {
    format!("{disk} {reader}")
}

/// The nodes on which programs read the file of a disk that is open here.
#[must_use]
pub fn of(node: &Node, disk: &str) -> Vec<String> {
    let of_disk = holder(disk, "");
    let holders = node.readers.holders();
    holders.iter().filter_map(|holder| holder.strip_prefix(&of_disk)).map(str::to_owned).collect()
}

/// How many clients are connected to a disk that is open here, in words, and on which nodes programs read its file: those count, too.
#[must_use]
pub fn connected(node: &Node, disk: &str, clients: usize) -> String {
    let are = count_are(clients as u64, "client");
    match of(node, disk).as_slice() {
        [] => format!("{are} connected to it"),
        nodes => {
            format!("{are} connected to it, among them programs on {} that read its file", nodes.join(", "))
        }
    }
}
