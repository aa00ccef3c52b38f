//! Losses with the end of a lab's processes: reports that nodes wrote when they stopped, and logs of nodes that were killed
//! before.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use weir_cluster::records::{DiskRecord, Medium, Mode, Record, keys};
use weir_cluster::{Embedded, Registry};
use weir_node::left_behind;
use weir_node::units::about;

use super::awaited::CleanCopy;

/// The loss of each disk.
#[derive(Default)]
pub(super) struct Lost {
    disks: BTreeMap<String, Vec<Copy>>,
}

/// The loss on one node.
struct Copy {
    what: What,
    node: String,
}

/// As a node, or the registry, tells it.
enum What {
    /// So many bytes that are not in the backing.
    Bytes(u64),
    /// Something else, in words.
    Words(String),
    /// The content of its memory, of unknown size: the node was killed before.
    Killed,
}

impl Lost {
    /// Takes up what a node has left word of in its directory when it stopped.
    pub(super) fn left_behind(&mut self, home: &Path, node: &str) {
        let text = fs::read_to_string(left_behind(home)).unwrap_or_default();
        for line in text.lines() {
            let (disk, what) =
                line.strip_prefix("disk ").and_then(|line| line.split_once(": ")).unwrap_or(("?", line));
            let bytes = what.strip_suffix(" bytes").and_then(|number| number.parse().ok());
            let what = bytes.map_or_else(|| What::Words(what.to_owned()), What::Bytes);
            self.disks.entry(disk.to_owned()).or_default().push(Copy { what, node: node.to_owned() });
        }
    }

    /// Takes up disks that still have an owner in the registry of a lab that has ended, and that were answered from memory: a node that
    /// stops gives its disks up, so theirs were killed. Nothing is lost of a disk if a member of its set has a copy in `clean`.
    ///
    /// # Errors
    /// The registry's file cannot be read.
    pub(super) fn recorded(&mut self, lab: &Path, clean: &[CleanCopy]) -> Result<(), String> {
        for disk in in_memory(&lab.join("registry.db"))? {
            self.killed(&disk, clean);
        }
        Ok(())
    }

    fn killed(&mut self, disk: &DiskRecord, clean: &[CleanCopy]) {
        let holders: Vec<_> = disk.owner.iter().chain(&disk.replicas).collect();
        let is_held = |copy: &CleanCopy| {
            copy.disk == disk.name && holders.iter().any(|holder| holder.node == copy.node)
        };
        if clean.iter().any(is_held) || self.disks.contains_key(&disk.name) {
            return;
        }
        let copies = holders.into_iter().map(|node| Copy { what: What::Killed, node: node.node.clone() });
        self.disks.insert(disk.name.clone(), copies.collect());
    }

    /// One sentence for each disk and kind of loss; equal logs of several nodes are one loss.
    pub(super) fn sentences(&self) -> Vec<String> {
        self.disks.iter().flat_map(|(disk, copies)| sentences(disk, copies)).collect()
    }
}

fn sentences(disk: &str, copies: &[Copy]) -> Vec<String> {
    let mut by_words: Vec<(String, Vec<&str>)> = Vec::new();
    // Replicas learn late of destaged records, so copies of one log differ: the largest is an upper bound of the disk's loss.
    let bytes = copies.iter().filter_map(|copy| match copy.what {
        What::Bytes(bytes) => Some(bytes),
        What::Words(_) | What::Killed => None,
    });
    let bytes = bytes.max();
    for copy in copies {
        let words = match &copy.what {
            What::Bytes(_) => format!("{} not destaged on NODES", about(bytes.unwrap_or_default())),
            What::Words(words) => format!("{words} on NODES"),
            What::Killed => {
                "what its log held in the memory of NODES, killed before the lab ended".to_owned()
            }
        };
        match by_words.iter_mut().find(|(known, _)| *known == words) {
            Some((_, nodes)) => nodes.push(&copy.node),
            None => by_words.push((words, vec![&copy.node])),
        }
    }
    let sentence = |(words, nodes): (String, Vec<&str>)| {
        format!("disk {disk}: {}", words.replace("NODES", &nodes.join(" and ")))
    };
    by_words.into_iter().map(sentence).collect()
}

/// The disks that have an owner and were answered from logs in RAM, according to the registry's file.
fn in_memory(file: &Path) -> Result<Vec<DiskRecord>, String> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let disks = runtime.block_on(async {
        let registry = Embedded::open(file)?;
        let listing = registry.list(keys::DISKS).await;
        registry.close().await;
        listing
    });
    let entries = disks.map_err(|error| error.to_string())?.entries;
    let disks = entries.iter().filter_map(|entry| DiskRecord::of(entry).ok());
    Ok(disks
        .filter(|disk| disk.owner.is_some() && disk.medium == Medium::Ram && disk.mode == Mode::WriteBack)
        .collect())
}

#[cfg(test)]
mod tests {
    use weir_cluster::records::{NodeRef, Source};

    use super::*;

    #[test]
    fn equal_copies_are_one_loss() {
        let directory = tempfile::tempdir().unwrap();
        let mut lost = Lost::default();
        for (node, text) in
            [("n1", "disk d: 1048576 bytes\ndisk e: nothing, but odd\n"), ("n2", "disk d: 2097152 bytes\n")]
        {
            let home = directory.path().join(node);
            fs::create_dir(&home).unwrap();
            fs::write(left_behind(&home), text).unwrap();
            lost.left_behind(&home, node);
        }
        lost.left_behind(&directory.path().join("n3"), "n3");
        assert_eq!(
            lost.sentences(),
            ["disk d: 2 MiB not destaged on n1 and n2", "disk e: nothing, but odd on n1"]
        );
    }

    /// A node that was replaced may still have a clean copy of an earlier set: it says nothing about the log since then.
    #[test]
    fn only_a_clean_copy_of_a_member_proves_that_nothing_is_lost() {
        let node = |name: &str| NodeRef { node: name.into(), incarnation: 1, flash: None };
        let policy = "write-back+1".parse().unwrap();
        let disk = DiskRecord {
            owner: Some(node("n1")),
            replicas: vec![node("n3")],
            ..DiskRecord::new("d", "v", Source::File { name: "d.raw".into() }, 1 << 20, 512, policy)
        };
        let sentences = |node: &str| {
            let mut lost = Lost::default();
            lost.killed(&disk, &[CleanCopy { disk: "d".into(), node: node.into() }]);
            lost.sentences()
        };
        assert!(sentences("n3").is_empty());
        assert_eq!(
            sentences("n2"),
            ["disk d: what its log held in the memory of n1 and n3, killed before the lab ended"]
        );
    }
}
