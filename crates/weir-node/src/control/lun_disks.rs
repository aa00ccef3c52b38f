//! The disks of volumes on LUNs: served to their owners by the coordinator, and connected to it by their owners.

use std::sync::Arc;

use weir_cluster::records::{DiskRecord, Source};
use weir_volume::DirVolume;
use weir_volume::lun::serving::OpenedDisk;

use super::node::Node;
use crate::peer::{Greeting, Purpose};
use crate::shard::messages::{Command, OpenedServed};

/// A disk that is open here needs a way to the coordinator of its volume. Its shard asks again while there is none.
pub async fn connect(node: Arc<Node>, disk: String) {
    if let Err(reason) = try_connect(&node, &disk).await {
        tracing::debug!(disk, reason, "no coordinator yet");
    }
}

async fn try_connect(node: &Arc<Node>, disk: &str) -> Result<(), String> {
    let record = node.records.disk(disk).ok_or("it has no record")?;
    let state = node.coordinators.get(&record.volume);
    if state.mounted.is_some() {
        serve(node, &record).await?;
        node.shards.send(disk, Command::CoordinatorHere { disk: disk.to_owned() }).await;
        return Ok(());
    }
    let me = node.session.node_ref();
    let coordinator = state.coordinator.ok_or("nobody coordinates its volume")?;
    if coordinator == me {
        return Err("this node is about to coordinate its volume".into());
    }
    let nodes = node.records.nodes.now();
    let there = nodes.get(&coordinator.node).filter(|there| there.node_ref() == coordinator);
    let address = there.ok_or_else(|| format!("{coordinator} is gone"))?.peer_address;
    let greeting = Greeting {
        disk: disk.to_owned(),
        owner: me.node,
        replica: coordinator.clone(),
        purpose: Purpose::Redirect,
    };
    let deadline = node.config.peers.deadline.0;
    let connecting = weir_task::timeout(deadline, node.network.connect(address, &greeting)).await;
    let stream = connecting
        .map_err(|_| format!("no connection to {coordinator} within {deadline:?}"))?
        .map_err(|error| error.to_string())?;
    node.shards.send(disk, Command::CoordinatorConnected { disk: disk.to_owned(), stream }).await;
    Ok(())
}

/// Serves a disk to its owner, if this node coordinates the disk's volume.
///
/// # Errors
/// In words: it does not, or the disk's file cannot be opened.
pub async fn serve(node: &Node, record: &DiskRecord) -> Result<(), String> {
    let Source::File { name } = &record.source else {
        return Err(format!("disk {} is a device", record.name));
    };
    let file = DirVolume::file_of(name).map_err(|error| error.to_string())?;
    // The volume is not given back between this look and the command.
    let mut served = node.coordinators.served.lock().await;
    let Some((epoch, mounted)) = node.coordinators.get(&record.volume).mounted else {
        return Err(format!("this node does not coordinate volume {}", record.volume));
    };
    if served.contains_key(&record.name) {
        return Ok(());
    }
    let opened = tokio::task::spawn_blocking(move || OpenedDisk::open(&mounted, &file)).await;
    let opened = opened.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let disk = record.name.clone();
    let owner = record.owner.is_some().then_some(0);
    let begin = |done| Command::Serve { disk, opened: OpenedServed(opened), epoch, owner, done };
    node.shards.ask_patiently(&record.name, begin).await.map_err(|error| error.message)??;
    served.insert(record.name.clone(), record.volume.clone());
    Ok(())
}

/// Stops serving the disks of a volume, or one of them, and waits until nothing of them is under way.
pub async fn stop_serving(node: &Node, volume: &str, disk: Option<&str>) {
    let mut served = node.coordinators.served.lock().await;
    let is_it = |name: &str, of: &str| of == volume && disk.is_none_or(|disk| disk == name);
    let all: Vec<String> =
        served.iter().filter(|(name, of)| is_it(name, of)).map(|(name, _)| name.clone()).collect();
    for disk in all {
        let stop = |done| Command::StopServing { disk: disk.clone(), done };
        if let Err(error) = node.shards.ask_patiently(&disk, stop).await {
            tracing::warn!(disk, %error, "a disk is still being served");
        }
        served.remove(&disk);
    }
}
