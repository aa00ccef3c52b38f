//! What a former coordinator of a volume has left unfinished.

use std::sync::Arc;

use weir_volume::snapshot;

use crate::control::Node;
use crate::control::node::blocking;
use crate::control::provisioning::Files;
use crate::error::{COMPACTION_INTERRUPTED, compaction_interrupted};

/// This node coordinates a volume from now on: what a former coordinator has begun to copy, and did not get done, is removed and told.
pub async fn drop_interrupted(node: Arc<Node>, volume: String) {
    let Ok(record) = node.volume(&volume).await else { return };
    let files = Files::of(&node, record.clone());
    let found = blocking(move || snapshot::interrupted_copies(&*files.open()?)).await;
    for disk in found.unwrap_or_default() {
        // Whoever has the disk in hand here has begun since, and has removed what was left.
        let Some(_step) = node.intents.begin(&disk) else { continue };
        let (files, of) = (Files::of(&node, record.clone()), disk.clone());
        let removed = blocking(move || snapshot::remove_unfinished(&*files.open()?, &of)).await;
        if let Err(error) = removed {
            tracing::warn!(disk, %error, "the copy of a compaction that was interrupted is left");
        }
        let told = compaction_interrupted(&disk);
        node.journal.tell(COMPACTION_INTERRUPTED, &disk, told.message);
    }
}
