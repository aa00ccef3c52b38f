//! `weir node drain`, `resume`, `clear`, `remove`, `show`

use std::time::Duration;

use weir_block::Nanos;
use weir_node::api::{ApiErrorKind, DrainNode, NodeView, NodeWork, VolumeView};
use weir_node::client::Client;
use weir_node::units::count;

use crate::cli::NodeCommand;
use crate::cluster::any_node;
use crate::failure::{Failure, FailureKind};
use crate::options::Global;
use crate::output::{list, note, print};

/// Pause between two looks at the progress.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Shortest time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Without any progress for so long, waiting ends: something holds the rest back.
const STUCK: Duration = Duration::from_secs(120);

/// Longest wait for other nodes to serve the volumes that a drained node has coordinated.
const SERVED: Duration = Duration::from_secs(60);

/// Runs a subcommand.
pub fn run(global: &Global, command: NodeCommand) -> Result<(), Failure> {
    let client = any_node(global)?;
    let work = match command {
        NodeCommand::Show { name } => client.node(&name)?,
        NodeCommand::Drain { name, fewer_copies, dry_run: true, .. } => {
            let work = client.drain_node(&name, &DrainNode { fewer_copies, dry_run: true })?;
            return print(global.output, &work, |work| format!("{}\n{}", text(work), would(work)));
        }
        NodeCommand::Drain { name, fewer_copies, no_wait, .. } => {
            let coordinated = client.node(&name)?.volumes;
            let begun = client.drain_node(&name, &DrainNode { fewer_copies, dry_run: false })?;
            if !begun.node.is_there() {
                note(&format!(
                    "node {name} is {}: other nodes take its disks over; it stays drained when it is back, until `weir node resume {name}`",
                    begun.node.state
                ));
            }
            match no_wait {
                true => begun,
                false => {
                    let drained = wait(&client, begun, is_drained, |work| {
                        format!("{}: {} left", work.node.name, counting(work))
                    })?;
                    let volumes = coordinated.into_iter().map(|one| one.volume).collect();
                    await_served(&client, &name, volumes)?;
                    drained
                }
            }
        }
        NodeCommand::Resume { name, no_wait } => {
            let begun = client.resume_node(&name)?;
            // Disks return to a node that is there.
            match no_wait || !begun.node.is_there() {
                true => begun,
                false => wait(
                    &client,
                    begun,
                    |work| work.away.is_empty(),
                    |work| {
                        format!(
                            "{}: {} still to return",
                            work.node.name,
                            count(work.away.len() as u64, "disk")
                        )
                    },
                )?,
            }
        }
        NodeCommand::Clear { name } => client.clear_node(&name)?,
        NodeCommand::Remove { name } => {
            let removed = client.remove_node(&name)?;
            return print(global.output, &removed, |removed| {
                format!("node {} does not belong to the cluster any more", removed.node.name)
            });
        }
    };
    print(global.output, &work, text)
}

/// Nothing counts on the node. One that is down is not drained by itself: others take its disks over.
fn is_drained(work: &NodeWork) -> bool {
    let counts = !work.disks.is_empty() || !work.copies.is_empty();
    (work.node.state == NodeView::MAINTENANCE || !counts) && work.volumes.is_empty()
}

/// Shows the progress until `is_done`.
fn wait(
    client: &Client,
    begun: NodeWork,
    is_done: impl Fn(&NodeWork) -> bool,
    line: impl Fn(&NodeWork) -> String,
) -> Result<NodeWork, Failure> {
    let (mut work, mut said) = (begun, None::<(Nanos, String)>);
    let mut progress = (Nanos::now(), line(&work));
    while !is_done(&work) {
        let (now, text) = (Nanos::now(), line(&work));
        if text != progress.1 {
            progress = (now, text.clone());
        }
        if said.as_ref().is_none_or(|(at, known)| *known != text && now - *at >= LINE_EVERY) {
            note(&text);
            said = Some((now, text));
        }
        if now - progress.0 >= STUCK {
            let reason = work.stays.first().map(|it| format!("disk {}: {}", it.disk, it.reason));
            let reason = reason.unwrap_or_else(|| "`weir events` may say why".into());
            let message = format!("no progress for {} s ({}); {reason}", STUCK.as_secs(), progress.1);
            return Err(Failure::new(FailureKind::Refused, message)
                .hint("it goes on by itself when it can; `weir node show` shows what is left"));
        }
        std::thread::sleep(LOOK_AGAIN);
        work = match client.node(&work.node.name) {
            // The asked node itself may have been busy; the next look tells.
            Err(error) if error.kind == ApiErrorKind::Unavailable => work,
            other => other?,
        };
    }
    Ok(work)
}

/// Waits until other nodes than `drained` serve the volumes that it has coordinated: until then, what needs their coordinators waits.
fn await_served(client: &Client, drained: &str, mut volumes: Vec<String>) -> Result<(), Failure> {
    let (began, mut said) = (Nanos::now(), None::<Nanos>);
    // An earlier drain may have given them up, and nobody has taken them since.
    let left = client.volumes().unwrap_or_default().into_iter().filter(|volume| is_unserved(volume, drained));
    volumes.extend(left.map(|volume| volume.name));
    volumes.sort();
    volumes.dedup();
    loop {
        let known = match client.volumes() {
            // The asked node itself may have been busy; the next look tells.
            Err(error) if error.kind == ApiErrorKind::Unavailable => Vec::new(),
            other => other?,
        };
        let unserved = |name: &String| match known.iter().find(|one| one.name == *name) {
            Some(volume) => is_unserved(volume, drained),
            // Deleted meanwhile, unless nothing is known.
            None => known.is_empty(),
        };
        volumes.retain(unserved);
        let Some(first) = volumes.first() else { return Ok(()) };
        let lun = known.iter().find(|one| one.name == *first).and_then(|one| one.lun.as_ref());
        let trouble = lun.map(|lun| lun.trouble.as_str()).filter(|trouble| !trouble.is_empty());
        let reason = trouble.unwrap_or("no node says that it serves it");
        let now = Nanos::now();
        if now - began >= SERVED {
            let all = volumes.join(", ");
            let message = format!(
                "node {drained} is drained, but after {} s no other node coordinates volume {all}: {reason}",
                SERVED.as_secs()
            );
            return Err(Failure::new(FailureKind::Refused, message).hint(format!(
                "`weir volume show {first}` shows who tries; do not stop {drained} before one does"
            )));
        }
        if said.is_none_or(|at| now - at >= LINE_EVERY) {
            note(&format!("{drained}: volume {first} waits for its new coordinator: {reason}"));
            said = Some(now);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Whether nobody else than this node serves a volume on a LUN.
fn is_unserved(volume: &VolumeView, drained: &str) -> bool {
    let Some(lun) = &volume.lun else { return false };
    !lun.trouble.is_empty() || lun.coordinator.as_deref().is_none_or(|node| node == drained)
}

/// What a drain would do.
fn would(work: &NodeWork) -> String {
    let NodeWork { node, disks, copies, stays, volumes, .. } = work;
    if let Some(one) = volumes.iter().find(|one| !one.stays.is_empty()) {
        return format!(
            "a drain would be refused: {} coordinates volume {}, and {}",
            node.name, one.volume, one.stays
        );
    }
    match disks.len() + copies.len() + volumes.len() {
        0 => format!("no disk counts on {}: a drain would only keep disks away from it", node.name),
        _ if stays.is_empty() => format!("a drain would move {} away", counting(work)),
        _ => format!("a drain would be refused: {} would stay", count(stays.len() as u64, "disk")),
    }
}

/// `1 disk and 2 copies`, and the coordination of volumes if there is any.
fn counting(work: &NodeWork) -> String {
    let NodeWork { disks, copies, volumes, .. } = work;
    let (disks, copies) = (count(disks.len() as u64, "disk"), count(copies.len() as u64, "copy"));
    match volumes.len() {
        0 => format!("{disks} and {copies}"),
        volumes => format!("{disks}, {copies} and the coordination of {}", count(volumes as u64, "volume")),
    }
}

fn text(work: &NodeWork) -> String {
    let NodeWork { node, disks, copies, away, stays, volumes } = work;
    let volumes: Vec<String> = volumes.iter().map(|one| one.volume.clone()).collect();
    let stays: Vec<String> = stays.iter().map(|it| format!("{} ({})", it.disk, it.reason)).collect();
    list(&[
        ("node", node.name.clone()),
        ("state", node.state.clone()),
        ("down since", node.down_since.clone().unwrap_or_default()),
        ("disks", or_none(disks)),
        ("copies of", or_none(copies)),
        ("coordinates", volumes.join(", ")),
        ("to return", away.join(", ")),
        ("would stay", stays.join("; ")),
    ])
}

fn or_none(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use weir_node::api::LunView;

    use super::*;

    #[test]
    fn a_volume_is_served_once_another_node_says_so() {
        let lun = |coordinator: Option<&str>, trouble: &str| {
            let lun = LunView {
                coordinator: coordinator.map(str::to_owned),
                trouble: trouble.to_owned(),
                ..LunView::default()
            };
            is_unserved(&VolumeView { lun: Some(lun), ..VolumeView::default() }, "n2")
        };
        assert!(lun(None, "nobody coordinates it"));
        assert!(lun(Some("n2"), ""), "it has not given it up yet");
        assert!(lun(Some("n1"), "its coordinator n1 does not answer"));
        assert!(!lun(Some("n1"), ""));
        assert!(!is_unserved(&VolumeView::default(), "n2"), "a directory has no coordinator");
    }
}
