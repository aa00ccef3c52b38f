//! A former owner that nobody hears any more is kept from the LUN of its disk, so that its successor need not wait for
//! `lease.fence_grace` (P4), and so that no pause of the former owner is too long.
//!
//! A fence proves that nothing which the *node* has issued to the LUN is on its way there. A process of it that lives on is let back only
//! after it has given up what it held ([`weir_volume::lun::claim`]), and the coordinator gives it nothing for a disk that has another
//! owner. So what it had begun for the disk never lands later, whether it is fenced for ever or not.
//!
//! The right of the former owner has ended *before* its fence begins: until then it may begin new I/O.

use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::NodeRef;
use weir_volume::lun::fence_command::Target;
use weir_volume::lun::fencing::{Fencing, Tier};

use super::node::Node;
use super::owner_fences::process;

/// Pause before a fence. The rights of one owner's disks end within milliseconds of each other, and a fence counts only for those that have
/// ended before it: without the pause, the second disk would need a second one. A disk waits for this once, and much longer for its takeover.
const GATHERS: Duration = Duration::from_millis(200);

/// How this node keeps others from the LUN of `volume`, if it can without an operator.
#[must_use]
pub fn fencing(node: &Node, volume: &str) -> Option<Fencing> {
    let fencing = node.coordinators.get(volume).fencing;
    fencing.filter(|fencing| fencing.tier() != Tier::Operator)
}

/// Whether the node of a former owner is there, with the same process or a later one: it is not fenced. A later process is let at the LUN
/// only when nothing of those before it is on its way there.
#[must_use]
pub fn is_there(node: &Node, former: &NodeRef) -> bool {
    former.node == node.config.name || node.records.nodes.now().contains_key(&former.node)
}

/// Keeps a former owner, whose right has ended at `over`, from the LUN. `epoch`: that of the disk's owner, for the fence command. `is_over`:
/// nobody waits for it any more.
///
/// # Errors
/// In words. It may be fenced, or be fenced later.
pub async fn fence(
    node: &Node,
    volume: &str,
    (former, over): (&NodeRef, Nanos),
    epoch: u64,
    is_over: impl Fn() -> bool + Send + 'static,
) -> Result<(), String> {
    let fencing = fencing(node, volume).ok_or("this node can fence nobody there")?;
    let begun = node.owner_fences.of(volume, former);
    let mut begun = begun.lock().await;
    if begun.is_some_and(|begun| begun >= over) {
        return Ok(());
    }
    weir_task::sleep(GATHERS).await;
    if is_there(node, former) {
        return Err(format!("node {} is there again", former.node));
    }
    let began = Nanos::now();
    let (process, name) = (process(former), former.node.clone());
    let target = Target { name, node: process.node, incarnation: process.incarnation };
    let fenced = tokio::task::spawn_blocking(move || fencing.fence(process, Ok(target), epoch, is_over));
    fenced.await.map_err(|error| error.to_string())??;
    *begun = Some(began);
    let text = format!(
        "{} has fenced {former}, the former owner of disks of this volume: it can neither read nor write the LUN",
        node.session.node_ref()
    );
    node.journal.tell("node-fenced", volume, text);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use weir_volume::lun::fence_command::FenceCommand;
    use weir_volume::lun::heartbeat::VolumeId;
    use weir_volume::lun::reservations::{Key, Reservations};

    use super::*;
    use crate::control::disk::tests::{SOON, node};

    /// Fences by a command that writes a line for each.
    fn by_command(directory: &Path, node: &Node) -> Fencing {
        let (program, lun) = (directory.join("fence"), directory.join("lun"));
        let script = format!("#!/bin/sh\necho \"$2\" >>{}\n", directory.join("fences").display());
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let (id, own) = (VolumeId([1; 16]), process(&node.session.node_ref()));
        let lock = directory.join("lock");
        let command =
            FenceCommand { program: Some(program), limit: SOON, volume: "v".into(), lun: lun.clone(), lock };
        let reservations = Reservations { is_on: false, lun, key: Key::new(id, own), wait: Duration::ZERO };
        Fencing::new(id, own, reservations, command)
    }

    #[tokio::test]
    async fn one_fence_is_enough_for_disks_whose_rights_end_at_about_the_same_time() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let fencing = by_command(directory.path(), &node);
        node.coordinators.update("v", |state| state.fencing = Some(fencing));
        let former = NodeRef::new("b", 1);
        let fence = || fence(&node, "v", (&former, Nanos::now()), 7, || false);
        let later = async {
            weir_task::sleep(GATHERS / 10).await;
            fence().await
        };
        let (first, second) = tokio::join!(fence(), later);
        assert_eq!((first, second), (Ok(()), Ok(())));
        let fences = || std::fs::read_to_string(directory.path().join("fences")).unwrap();
        assert_eq!(fences(), "b\n", "one for both disks");
        fence().await.unwrap();
        assert_eq!(fences(), "b\nb\n", "it has had a right since, and another one has to end that");
    }
}
