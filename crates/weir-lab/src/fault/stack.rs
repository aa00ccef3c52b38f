//! A small lab for measurements: nodes that take orders, and one disk in memory.

use std::path::{Path, PathBuf};

use weir_block::size::Size;
use weir_node::api::{CreateDisk, CreateVolume, Export, Medium};
use weir_node::client::Client;

use super::board::At;
use super::orders::{self, Order};
use super::settings::Faults;
use crate::{Lab, LabConfig, LabError};

/// The disk's name.
pub const DISK: &str = "d1";

/// The disk's size, in bytes.
pub const SIZE: u64 = 64 << 20;

/// The write log of each node, in bytes: as small as may be, so that it is soon empty between two runs.
const LOG: u64 = 64 << 20;

/// A lab with the disk [`DISK`] open on its first node. Ends, and leaves nothing, when dropped.
#[derive(Debug)]
pub struct Stack {
    lab: Lab,
    directory: tempfile::TempDir,
}

impl Stack {
    /// So many nodes of `program` (`weir-lab-node`), and a disk with `policy`.
    ///
    /// # Errors
    /// The lab does not start, or the disk cannot be made.
    pub fn up(program: &Path, nodes: usize, policy: &str) -> Result<Stack, LabError> {
        Stack::start(program, nodes, policy, false)
    }

    /// The same in a network of its own, whose links can be shaped ([`Lab::network`]). Needs root. Exports by TCP are out of
    /// reach.
    ///
    /// # Errors
    /// As [`Stack::up`], and the network cannot be made.
    pub fn up_in_a_network(program: &Path, nodes: usize, policy: &str) -> Result<Stack, LabError> {
        Stack::start(program, nodes, policy, true)
    }

    fn start(program: &Path, nodes: usize, policy: &str, network: bool) -> Result<Stack, LabError> {
        // Files in memory: no disk of this machine has a part in what is measured.
        let directory = tempfile::tempdir_in("/dev/shm").map_err(LabError::system("making a directory"))?;
        let mut config = LabConfig::new(directory.path().join("lab"), program);
        (config.nodes, config.log, config.network) = (nodes, Size(LOG), network);
        let lab = Lab::up(&config)?;
        let path = directory.path().join("pool");
        std::fs::create_dir(&path).map_err(LabError::system("making the pool"))?;
        let client = lab.client("n1")?;
        let volume = "pool".to_owned();
        client.create_volume(&CreateVolume::dir(&*volume, path))?;
        let (name, policy) = (DISK.to_owned(), policy.to_owned());
        client.create_disk(&CreateDisk {
            name,
            volume,
            size: SIZE,
            logical_block: 512,
            policy,
            medium: Medium::Ram,
            limit: None,
        })?;
        client.export(DISK, &Export::default())?;
        Ok(Stack { lab, directory })
    }

    /// The lab.
    #[must_use]
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// A client of the disk's owner.
    ///
    /// # Errors
    /// There is no such node.
    pub fn client(&self) -> Result<Client, LabError> {
        self.lab.client("n1")
    }

    /// Has a node carry out an order.
    ///
    /// # Errors
    /// It does not.
    pub fn order(&self, node: &str, order: &Order) -> Result<(), LabError> {
        let home = self.lab.node(node)?.config.parent().map(Path::to_owned).unwrap_or_default();
        orders::send(&orders::socket(&home), order)
    }

    /// Sets the faults at a place of the disk.
    ///
    /// # Errors
    /// The owner does not take the order.
    pub fn set(&self, at: At, faults: Faults) -> Result<(), LabError> {
        self.order("n1", &Order::Disk { disk: DISK.to_owned(), at, faults })
    }

    /// A place for files that go with the lab.
    #[must_use]
    pub fn scratch(&self) -> PathBuf {
        self.directory.path().to_owned()
    }
}
