//! The snapshots that are made for clones of disks as they are now, and deleted when the clone is made: their names, which tell who makes the clone.

use weir_block::hash::{FNV_BASIS, fnv1a};
use weir_cluster::records::{NodeRef, VolumeRecord};
use weir_volume::snapshot::{self, Snapshot};

use super::Node;
use super::provisioning::{Files, LEFTOVER_REMOVED};

/// Before the numbers of the maker and of the clone, in sixteen digits each.
const PREFIX: &str = "clone-";

/// The name of one that `maker` makes. `number`: no other one has it.
pub fn name(maker: &NodeRef, number: u64) -> String {
    format!("{PREFIX}{:016x}-{number:016x}", number_of(maker))
}

/// Whether a snapshot has the name of one.
fn is_one(name: &str) -> bool {
    maker(name).is_some()
}

/// Whether a snapshot has the name of one that `process` makes.
pub fn is_of(name: &str, process: &NodeRef) -> bool {
    maker(name) == Some(number_of(process))
}

/// Removes, and tells, those of a disk, or of all disks of a volume, that are left. `is_left` is asked by name, after a look at the files.
pub async fn remove_left(
    node: &Node,
    volume: &VolumeRecord,
    disk: Option<String>,
    is_left: impl Fn(&str) -> bool,
) {
    let files = || Files::of(node, volume.clone());
    let (look, of) = (files(), disk.clone());
    let found = match look.with(move |files| snapshot::list(&**files, of.as_deref())).await {
        Ok(found) => found,
        Err(error) => {
            return tracing::warn!(volume = volume.name, %error, "snapshots of clones may be left");
        }
    };
    for Snapshot { disk, name, .. } in found.into_iter().filter(|one| is_one(&one.name) && is_left(&one.name))
    {
        let (files, of, its) = (files(), disk.clone(), name.clone());
        match files.with(move |files| snapshot::remove(&**files, &of, &its)).await {
            Ok(()) => {
                let text = format!("{disk}@{name} was left by a process that ended while it made a clone");
                node.journal.tell(LEFTOVER_REMOVED, &disk, text);
            }
            Err(error) => tracing::warn!(disk, snapshot = name, %error, "the snapshot of a clone is left"),
        }
    }
}

fn maker(name: &str) -> Option<u64> {
    let (maker, number) = name.strip_prefix(PREFIX)?.split_once('-')?;
    parse(number).and_then(|_| parse(maker))
}

fn parse(digits: &str) -> Option<u64> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_ours = digits.len() == 16 && digits.bytes().all(is_digit);
    is_ours.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

fn number_of(process: &NodeRef) -> u64 {
    fnv1a(FNV_BASIS, process.to_string().bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_maker_and_looks_like_no_other() {
        let (maker, next) = (NodeRef::new("n1", 7), NodeRef::new("n1", 8));
        let name = name(&maker, 0xAB);
        assert_eq!(weir_volume::snapshot::check("d", &name).map_err(|error| error.to_string()), Ok(()));
        assert!(is_one(&name) && is_of(&name, &maker) && !is_of(&name, &next), "{name}");
        for other in ["clone-1", "clone-0123456789abcdef", &name[1..], &name[..name.len() - 1], "monday"] {
            assert!(!is_one(other), "{other}");
        }
        assert!(!is_one(&name.to_uppercase().replace("CLONE", "clone")), "an operator's");
    }
}
