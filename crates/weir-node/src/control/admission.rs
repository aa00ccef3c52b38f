//! The limit of write logs on this node (P10): its capacity for the other nodes to see, and admission of logs.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::Medium;

use super::capacity::{Reservation, Role, fits, load, media, needed, offered};
use super::node::Node;

/// Pause between two looks at what has changed; nothing is written more often than this.
const PAUSE: Duration = Duration::from_secs(3);

/// Keeps the node's record up to date. Runs until the node stops.
pub async fn advertise(node: Arc<Node>) {
    let mut looks = weir_task::interval(PAUSE);
    loop {
        looks.tick().await;
        let logs = node.shards.status().await;
        if let Err(error) = node
            .session
            .publish(media(&node.config.resources, node.flash.as_deref(), &logs), load(&logs))
            .await
        {
            tracing::debug!(%error, "publishing this node's capacity is retried later");
        }
    }
}

/// Whether the log of `disk` fits here. The caller passes it to the shard before it drops the reservation: then the next
/// request sees the log. A log that is here already needs no room.
///
/// # Errors
/// In words: this node does not have the disk's medium, or no room on it.
pub async fn admit(node: &Node, disk: &str, role: Role) -> Result<Reservation, String> {
    let (reservation, before) = node.capacity.reserve(disk);
    let logs = node.shards.status().await;
    // A node that does not see the disk's record yet finds out when it does; a log is in memory unless the record names
    // another medium.
    let medium = node.records.disk(disk).map_or_else(Medium::default, |record| record.medium);
    let is_here = |disk: &str| logs.iter().any(|log| log.disk == disk && log.log_bytes > 0);
    if !is_here(disk) {
        let reserved = before.iter().filter(|other| *other != disk && !is_here(other)).count();
        let offered = offered(&node.config.resources, node.flash.as_deref(), &logs, reserved);
        fits(&node.config.name, needed(medium, role, node.flash.as_deref()), &offered)?;
    }
    Ok(reservation)
}
