//! `weir status`

use weir_node::api::{MediumView, NbdView, NodeStatus, NodeView, RegistryView, ShardView};
use weir_node::units::{about, count};
use weir_report::text::wrap;

use super::disk;
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{print, table, width};

/// Prints the state of the cluster.
pub fn status(global: &Global) -> Result<(), Failure> {
    print(global.output, &any_node(global)?.status()?, text)
}

fn text(status: &NodeStatus) -> String {
    let nodes = table(
        &["NODE", "STATE", "FAULT DOMAIN", "PEERS AT", "LOGS", "ROOM FOR LOGS"],
        &[4],
        status.nodes.iter().map(|node| {
            let logs = if node.media.is_empty() { String::new() } else { node.load.to_string() };
            let NodeView { name, state, down_since, fault_domain, peer_address, .. } = node.clone();
            let state = down_since.map_or(state.clone(), |since| format!("{state} since {since}"));
            vec![name, state, fault_domain, peer_address, logs, room(node)]
        }),
    );
    let disks = if status.disks.is_empty() {
        "no disks yet; `weir disk create`".to_owned()
    } else {
        disk::rows(&status.disks)
    };
    let reasons = status.disks.iter().filter(|disk| !disk.reason.is_empty());
    let reasons: String =
        reasons.map(|disk| format!("\n{}", paragraph(&format!("{}: ", disk.name), &disk.reason))).collect();
    let shards: String = status.shards.iter().map(|shard| format!("\n{}", of_shard(shard))).collect();
    let RegistryView { state, age_seconds, .. } = &status.registry;
    let registry = match state.as_str() {
        RegistryView::AWAY => format!("registry away for {age_seconds:.0} s: the rest is as old"),
        _ => format!("registry {state}"),
    };
    format!(
        "{}\nasked {}, {registry}, peers: {}{}{shards}\n\n{nodes}\n\n{disks}{reasons}",
        paragraph("health: ", &status.health.to_string()),
        status.node,
        status.peers,
        nbd(status)
    )
}

/// `first` and a text, wrapped on a terminal.
fn paragraph(first: &str, text: &str) -> String {
    match width() {
        Some(width) => wrap(first, text, width),
        None => format!("{first}{text}"),
    }
}

/// `NBD: TLS at 10.0.0.1:10809`, a line for each address.
fn nbd(status: &NodeStatus) -> String {
    let protection = |at: &NbdView| if at.plaintext { "plaintext" } else { "TLS" };
    status.nbd.iter().map(|at| format!("\nNBD: {} at {}", protection(at), at.address)).collect()
}

/// `shard 0: ok; longest turn 3.1 ms, 0 turns over 10 ms, spun 0 times`
fn of_shard(shard: &ShardView) -> String {
    let ShardView { shard, state, reason, long_turns, longest_turn_ms, spins, .. } = shard;
    let reason = if reason.is_empty() { String::new() } else { format!(" {reason}") };
    format!(
        "shard {shard}: {state}{reason}; longest turn {longest_turn_ms:.1} ms, {} over 10 ms, spun {}",
        count(*long_turns, "turn"),
        count(*spins, "time")
    )
}

/// `3.9 GiB of 4 GiB ram`, for each medium.
fn room(node: &NodeView) -> String {
    let media = node.media.iter().map(|space| {
        let MediumView { medium, total_bytes, free_bytes, .. } = space;
        format!("{} of {} {medium}", about(*free_bytes), about(*total_bytes))
    });
    media.collect::<Vec<_>>().join(", ")
}
