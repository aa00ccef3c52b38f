//! Clients of a relay that leave, or do not read.

use std::path::Path;

use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinSet;
use weir_cluster::membership::{NodeSession, SessionConfig};
use weir_cluster::records::{NodeRecord, Record, keys};

use super::*;
use crate::control::disk::tests::{SOON, disk_of_a, node, record_of};

/// Node `a`, which follows a disk of `b`, and both ends of what a client's relay needs.
struct Following {
    node: Arc<Node>,
    operations: Operations,
    relays: Arc<Relays>,
    _owner: NodeSession,
}

/// Answers each read with zeros, and all else with success.
async fn own(mut stream: TcpStream) -> io::Result<()> {
    Greeting::read(&mut stream).await.unwrap();
    let mut request = [0; 28];
    loop {
        stream.read_exact(&mut request).await?;
        let length = u32::from_be_bytes(request[24..28].try_into().unwrap());
        let data = if request[7] == 0 { length as usize } else { 0 };
        let head = [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &request[8..16]].concat();
        stream.write_all(&head).await?;
        stream.write_all(&vec![0; data]).await?;
    }
}

async fn follow(directory: &Path) -> Following {
    let (node, mut told) = node(directory).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let record = NodeRecord { peer_address: listener.local_addr().unwrap(), ..record_of("b") };
    let owner = NodeSession::start(node.registry.clone(), record, SessionConfig::default()).await.unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(own(stream));
        }
    });
    disk_of_a(&node, |record| {
        (record.owner, record.follower) = (Some(NodeRef::new("b", 1)), Some(NodeRef::new("a", 1)));
    })
    .await;
    node.records.nodes.changes().wait_for(|known| known.contains_key("b")).await.unwrap();
    let operations = Operations::new(Arc::clone(&node), Arc::default(), Arc::default());
    Following { node, operations, relays: Arc::default(), _owner: owner }
}

impl Following {
    fn client(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let session = Session {
            export: "d".into(),
            structured_replies: false,
            extended_headers: false,
            block_sizes: true,
            base_allocation: None,
            flags: 0,
        };
        let stream = OwnedFd::from(theirs.into_std().unwrap()).into();
        let client = AcceptedClient { stream, leftover: Vec::new(), session, via: None };
        start(Arc::clone(&self.node), self.operations.clone(), &self.relays, client);
        ours
    }

    /// Waits until no relay is left.
    async fn all_end(&self) {
        let ended = async {
            while self.relays.clients.available_permits() < MOST_RELAYS {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(SOON, ended).await.expect("a relay goes on without its client");
    }
}

async fn request(client: &mut UnixStream, command: u16, length: u32) {
    let mut bytes = [&0x2560_9513_u32.to_be_bytes()[..], &[0; 2], &command.to_be_bytes()].concat();
    bytes.extend_from_slice(&[[7; 8], [0; 8]].concat());
    bytes.extend_from_slice(&length.to_be_bytes());
    client.write_all(&bytes).await.unwrap();
}

async fn read(mut client: UnixStream, length: u32) {
    request(&mut client, command::READ, length).await;
    let mut reply = vec![0; 16 + length as usize];
    tokio::time::timeout(SOON, client.read_exact(&mut reply)).await.expect("no reply").unwrap();
}

/// The disk cannot be moved yet when its client goes; it must not be moved later, away from a guest that uses it.
#[tokio::test]
async fn a_disk_does_not_move_for_a_client_that_has_gone() {
    let directory = tempfile::tempdir().unwrap();
    let following = follow(directory.path()).await;
    // Requests that nobody takes hide the end of the connection from whoever would read up to it.
    for behind in [0, 64 << 10] {
        let mut client = following.client();
        request(&mut client, command::WRITE, 4 << 20).await;
        client.write_all(&vec![0; behind]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(following.relays.clients.available_permits(), MOST_RELAYS - 1, "it waits for the disk");
        drop(client);
        following.all_end().await;
    }
}

#[tokio::test]
async fn clients_that_read_nothing_keep_no_others_from_reading() {
    let directory = tempfile::tempdir().unwrap();
    let following = follow(directory.path()).await;
    let mut deaf = Vec::new();
    for _ in 0..LARGE_REPLIES {
        let mut client = following.client();
        request(&mut client, command::READ, 16 << 20).await;
        deaf.push(client);
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut small = JoinSet::new();
    for length in [512, 4096, 64 << 10, 128 << 10] {
        small.spawn(tokio::time::timeout(TAKES_REPLY / 2, read(following.client(), length)));
    }
    assert!(small.join_all().await.iter().all(Result::is_ok), "small reads wait for none of them");
    read(following.client(), 16 << 20).await;
    drop(deaf);
    following.all_end().await;
}

/// A certificate opens one disk, and a later one of the same name is another.
#[tokio::test]
async fn an_idle_client_is_disconnected_when_another_disk_has_its_disks_name() {
    let directory = tempfile::tempdir().unwrap();
    let following = follow(directory.path()).await;
    let mut client = following.client();
    request(&mut client, command::READ, 512).await;
    client.read_exact(&mut [0; 16 + 512]).await.unwrap();
    let entry = following.node.registry.get(&keys::disk("d")).await.unwrap().unwrap();
    let other = DiskRecord { id: 8, ..following.node.records.disk("d").unwrap() };
    following.node.registry.transact(other.replace(&entry)).await.unwrap();
    following.all_end().await;
    assert_eq!(client.read(&mut [0; 1]).await.unwrap(), 0, "nothing of the other disk");
}

/// P10: one guest's connections leave places to those of others.
#[tokio::test]
async fn a_disk_has_a_number_of_relays_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let following = follow(directory.path()).await;
    let clients: Vec<_> = (0..MOST_OF_DISK).map(|_| following.client()).collect();
    let mut refused = following.client();
    assert_eq!(refused.read(&mut [0; 1]).await.unwrap(), 0, "it is turned away");
    assert_eq!(following.relays.clients.available_permits(), MOST_RELAYS - MOST_OF_DISK);
    drop(clients);
    following.all_end().await;
    read(following.client(), 512).await;
}
