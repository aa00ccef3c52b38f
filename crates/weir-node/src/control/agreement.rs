//! Whether the target of a move can open the disk: asked of it before its owner gives the disk away.
//!
//! A node may have room for a disk, and not have its volume mounted. Without the question, a drain would give such a node the disk, and
//! its guest would wait for a storage that does not come. The answer on the connection, little-endian:
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 2 | length of the reason; 0: the node can open the disk |
//! | 2 | … | the reason why it cannot, UTF-8 |
//! | 2 + length | 4 | CRC-32C of everything before |

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weir_cluster::records::{DiskRecord, NodeRef};
use weir_volume::BackingOptions;

use weir_block::Nanos;

use super::Node;
use crate::peer::{Duplex, Greeting, Purpose};
use crate::shard::messages::{Command, Unopened};

/// Longest time for the registry to say where a file is, and the storage to open it. It takes milliseconds; a disk does not go where
/// it takes longer than this. A claim does it within [`weir_cluster::placement::CLAIMED_WITHIN`].
const OPENED: Duration = Duration::from_secs(3);
const _: () = assert!(OPENED.as_secs() < weir_cluster::placement::CLAIMED_WITHIN.as_secs());

/// Pause before a shard is asked again that had too much to look at.
const BUSY: Duration = Duration::from_millis(100);

/// Longest time for the answer.
const ANSWERED: Duration = Duration::from_secs(4);

/// Longest reason, in bytes (P10).
const LONGEST: usize = 1024;

/// Whether this node can open the disk's backing at present.
///
/// # Errors
/// It cannot, or the registry or the storage does not answer; or too much else is being looked at.
pub async fn check(node: &Node, record: &DiskRecord) -> Result<(), Unopened> {
    let begun = Nanos::now();
    let place = weir_task::timeout(OPENED, node.place_of(record)).await;
    let late = |what| Unopened::Fails(format!("{what} has not answered for {OPENED:?}"));
    let place = place.map_err(|_| late("the registry"))?.map_err(Unopened::Fails)?;
    let options = BackingOptions {
        size: Some(record.size),
        logical_block: Some(record.logical_block),
        volume: place.volume,
        ..BackingOptions::default()
    };
    let end = begun + OPENED;
    loop {
        let (disk, backing) = (record.name.clone(), place.backing.clone());
        let options = Box::new(options.clone());
        let ask = |answer| Command::CanOpen { disk, backing, options, answer };
        let asked = weir_task::timeout(end - Nanos::now(), node.shards.ask(&record.name, ask)).await;
        let opened = asked.map_err(|_| late("its storage"))?;
        match opened.map_err(|error| Unopened::Fails(error.message))? {
            // Others are looked at within milliseconds, unless their storage hangs.
            Err(Unopened::Busy(_)) if Nanos::now() + BUSY < end => weir_task::sleep(BUSY).await,
            outcome => return outcome,
        }
    }
}

/// Why a node is not given a disk.
#[derive(Debug, thiserror::Error)]
pub enum NotAgreed {
    /// It cannot open the disk.
    #[error("{0}")]
    Cannot(String),
    /// It does not answer, about this disk or any other.
    #[error("{0}")]
    Silent(String),
}

/// Asks `to` whether it can open a disk of this node.
///
/// # Errors
/// It cannot, or does not answer; in words.
pub async fn ask(node: &Node, to: &NodeRef, disk: &str) -> Result<(), NotAgreed> {
    let name = &to.node;
    let address = node.records.nodes.now().get(name).map(|record| record.peer_address);
    let address = address.ok_or_else(|| NotAgreed::Silent(format!("node {name} is down")))?;
    let greeting = Greeting {
        disk: disk.to_owned(),
        owner: node.config.name.clone(),
        replica: to.clone(),
        purpose: Purpose::Opens,
    };
    let unsaid = |error: io::Error| format!("node {name} does not say whether it can open it: {error}");
    let answer = async {
        let connected = node.network.open(address, &greeting).await;
        let mut stream = connected.map_err(|error| NotAgreed::Silent(unsaid(error)))?;
        read(&mut *stream).await.map_err(|error| NotAgreed::Cannot(unsaid(error)))
    };
    let late = |_| {
        Err(NotAgreed::Silent(format!("node {name} has not said for {ANSWERED:?} whether it can open it")))
    };
    let reason = weir_task::timeout(ANSWERED, answer).await.unwrap_or_else(late)?;
    if reason.is_empty() {
        return Ok(());
    }
    Err(NotAgreed::Cannot(format!("node {name} cannot open it: {reason}")))
}

/// Answers the owner of a disk: one question at a time, so that an owner that asks again and again costs no more.
///
/// # Errors
/// The connection's end.
pub async fn serve(node: &Node, record: &DiskRecord, stream: &mut (impl Duplex + ?Sized)) -> io::Result<()> {
    let reason = match node.intents.begin_check(&record.name) {
        Some(_under_way) => match check(node, record).await {
            Ok(()) => String::new(),
            Err(Unopened::Fails(reason) | Unopened::Busy(reason)) => reason,
        },
        None => "an earlier question about it is being answered".to_owned(),
    };
    stream.write_all(&encode(&reason)).await?;
    stream.flush().await
}

fn encode(reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(LONGEST);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let text = &reason.as_bytes()[..end];
    let mut bytes = (text.len() as u16).to_le_bytes().to_vec();
    bytes.extend_from_slice(text);
    let checksum = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

async fn read(stream: &mut (impl Duplex + ?Sized)) -> io::Result<String> {
    let malformed = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    let length = stream.read_u16_le().await?;
    if usize::from(length) > LONGEST {
        return Err(malformed("the answer is too long"));
    }
    let mut text = vec![0; length.into()];
    stream.read_exact(&mut text).await?;
    let checksum = stream.read_u32_le().await?;
    if crc32c::crc32c_append(crc32c::crc32c(&length.to_le_bytes()), &text) != checksum {
        return Err(malformed("the answer's checksum is wrong"));
    }
    String::from_utf8(text).map_err(|_| malformed("the answer is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weir_cluster::membership::{NodeSession, SessionConfig};
    use weir_cluster::records::{NodeRecord, Record, VolumeRecord, keys};
    use weir_volume::DirVolume;

    use super::*;
    use crate::control::disk::tests::{disk_of_a, node, record_of};

    #[tokio::test]
    async fn answers_are_read_as_they_were_written() {
        let long = "ä".repeat(LONGEST);
        for reason in ["", "its volume is not mounted", &long] {
            let (mut here, mut there) = tokio::io::duplex(2 * LONGEST);
            here.write_all(&encode(reason)).await.unwrap();
            let said = read(&mut there).await.unwrap();
            assert_eq!(said, reason[..reason.len().min(LONGEST)]);
        }
        for bit in 0..8 * encode("no").len() {
            let mut bytes = encode("no");
            bytes[bit / 8] ^= 1 << (bit % 8);
            let (mut here, mut there) = tokio::io::duplex(2 * LONGEST);
            here.write_all(&bytes).await.unwrap();
            drop(here);
            assert!(read(&mut there).await.is_err(), "bit {bit}");
        }
    }

    /// The owner is `b`, and asks `a` on its port for other nodes.
    #[tokio::test]
    async fn a_node_says_whether_it_can_open_a_disk() {
        let directory = tempfile::tempdir().unwrap();
        let (asked, mut told) = node(directory.path()).await;
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        let path = directory.path().join("volume");
        std::fs::create_dir(&path).unwrap();
        let volume = VolumeRecord::dir("v", path.clone(), 7);
        asked.registry.transact(volume.create(keys::volume("v"))).await.unwrap();
        let record = disk_of_a(&asked, |record| record.owner = Some(NodeRef::new("b", 1))).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let port = tokio::spawn(crate::accept::peers(listener, Arc::clone(&asked)));
        let greeting = Greeting {
            disk: "d".into(),
            owner: "b".into(),
            replica: NodeRef::new("a", 1),
            purpose: Purpose::Opens,
        };
        let answer = async || {
            let mut stream = asked.network.open(address, &greeting).await.unwrap();
            read(&mut *stream).await
        };
        let mounted = DirVolume::open(&path).unwrap();
        assert!(answer().await.unwrap().contains("is not volume"));
        mounted.identify(7).unwrap();
        assert!(answer().await.unwrap().contains("does not exist"));
        mounted.create_disk("d", record.size).unwrap();
        assert_eq!(answer().await.unwrap(), "");
        let stranger = Greeting { owner: "c".into(), ..greeting.clone() };
        let mut stream = asked.network.open(address, &stranger).await.unwrap();
        read(&mut *stream).await.expect_err("only the owner is told");
        port.abort();
    }

    /// A target that is paused, or of another version, is not given the disk.
    #[tokio::test]
    async fn a_node_that_says_nothing_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let (owner, _told) = node(directory.path()).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silent = NodeRecord { peer_address: listener.local_addr().unwrap(), ..record_of("c") };
        let _session =
            NodeSession::start(owner.registry.clone(), silent, SessionConfig::default()).await.unwrap();
        owner.records.nodes.changes().wait_for(|known| known.contains_key("c")).await.unwrap();
        let refused = ask(&owner, &NodeRef::new("c", 1), "d").await.unwrap_err();
        assert!(
            matches!(&refused, NotAgreed::Silent(reason) if reason.contains("c has not said")),
            "{refused}"
        );
    }
}
