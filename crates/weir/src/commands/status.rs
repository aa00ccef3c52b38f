//! `weir status`

use weir_node::api::{MediumSpace, NodeStatus, NodeView, ShardView};
use weir_node::units::about;

use super::disk;
use crate::cli::Global;
use crate::cluster::{any_node, owner_of};
use crate::failure::Failure;
use crate::output::{print, table};

/// What the cluster is doing.
pub fn status(global: &Global) -> Result<(), Failure> {
    let mut status = any_node(global)?.status()?;
    // What only a disk's owner knows is asked there.
    for disk in &mut status.disks {
        let elsewhere = disk.owner.as_ref().is_some_and(|owner| *owner != status.node);
        if elsewhere
            && let Ok(detailed) = owner_of(global, &disk.name).and_then(|node| Ok(node.disk(&disk.name)?))
        {
            *disk = detailed;
        }
    }
    print(global.output, &status, text)
}

fn text(status: &NodeStatus) -> String {
    let nodes = table(
        &["NODE", "STATE", "FAULT DOMAIN", "PEERS AT", "LOGS", "ROOM FOR LOGS"],
        &[4],
        status.nodes.iter().map(|node| {
            let logs = if node.media.is_empty() { String::new() } else { node.load.to_string() };
            let NodeView { name, state, fault_domain, peer_address, .. } = node.clone();
            vec![name, state, fault_domain, peer_address, logs, room(node)]
        }),
    );
    let disks = if status.disks.is_empty() {
        "no disks yet; `weir disk create`".to_owned()
    } else {
        disk::rows(&status.disks)
    };
    let reasons = status.disks.iter().filter(|disk| !disk.reason.is_empty());
    let reasons: String = reasons.map(|disk| format!("\n{}: {}", disk.name, disk.reason)).collect();
    let shards: String = status.shards.iter().map(|shard| format!("\n{}", of_shard(shard))).collect();
    format!("asked {}, registry {}{shards}\n\n{nodes}\n\n{disks}{reasons}", status.node, status.registry)
}

/// `shard 0: ok; longest turn 3.1 ms, 0 turns over 10 ms, spun 0 times`
fn of_shard(shard: &ShardView) -> String {
    let ShardView { shard, state, reason, long_turns, longest_turn_ms, spins, .. } = shard;
    let reason = if reason.is_empty() { String::new() } else { format!(" {reason}") };
    format!(
        "shard {shard}: {state}{reason}; longest turn {longest_turn_ms:.1} ms, {long_turns} turns over 10 ms, {spins} busy turns without work"
    )
}

/// `3.9 GiB of 4 GiB ram`, for each medium.
fn room(node: &NodeView) -> String {
    let media = node.media.iter().map(|space| {
        let MediumSpace { medium, bytes, free, .. } = space;
        format!("{} of {} {medium}", about(*free), about(*bytes))
    });
    media.collect::<Vec<_>>().join(", ")
}
