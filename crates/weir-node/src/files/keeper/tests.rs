//! The kernel's side is a socket here, and no shard takes a client.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use weir_export::fuse::Access;

use super::*;
use crate::control::disk::tests::{disk_of_a, node};
use crate::operations::Operations;
use crate::shard::ShardQueue;
use crate::shard::counters::DiskCounters;
use crate::shard::health::{Health, Pulse};

const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const INIT: u32 = 26;
/// The notice that has the kernel send again what is not answered.
const RESEND: i32 = 7;

const SOON: Duration = Duration::from_secs(30);

/// The kernel.
struct Kernel(AsyncFd<OwnedFd>);

impl Kernel {
    /// Sends a request, whose number is that of its kind.
    fn ask(&self, opcode: u32, body: &[u32]) {
        let body: Vec<u8> = body.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut request = Vec::new();
        request.extend((40 + body.len() as u32).to_ne_bytes());
        request.extend(opcode.to_ne_bytes());
        request.extend(u64::from(opcode).to_ne_bytes());
        request.extend(1u64.to_ne_bytes());
        request.extend([0; 16]);
        request.extend(body);
        rustix::io::write(self.0.get_ref(), &request).unwrap();
    }

    /// Reads of the first 4096 bytes.
    fn read(&self) {
        self.ask(READ, &[0, 0, 0, 0, 4096, 0, 0, 0, 0, 0]);
    }

    /// The next answer: the number of its request, and its error. Requests are sent again if that is wanted.
    async fn answer(&self) -> (u32, i32) {
        loop {
            let mut ready = tokio::time::timeout(SOON, self.0.readable()).await.expect("an answer").unwrap();
            let mut answer = [0; 4096];
            match rustix::io::read(self.0.get_ref(), &mut answer) {
                Ok(0) | Err(Errno::AGAIN) => ready.clear_ready(),
                Ok(_) => {
                    let error = i32::from_ne_bytes(answer[4..8].try_into().unwrap());
                    let unique = u64::from_ne_bytes(answer[8..16].try_into().unwrap());
                    match unique {
                        0 if error == RESEND => self.read(),
                        unique => return (u32::try_from(unique).unwrap(), error),
                    }
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// The file of a disk that is open here, on a shard that takes none of its clients.
async fn kept(directory: &std::path::Path) -> (Arc<Node>, Kernel, Arc<DiskCounters>, oneshot::Sender<()>) {
    let (mut node, _told) = node(directory).await;
    let (commands, mut queue) = tokio::sync::mpsc::channel(16);
    let health = Arc::new(Health::default());
    let counters = Arc::new(DiskCounters::default());
    Pulse::new(Arc::clone(&health)).name(0, Some(("d", Arc::clone(&counters))));
    let shard = ShardQueue::new(commands, || {}).with_health(health);
    Arc::get_mut(&mut node).unwrap().shards = crate::control::Shards::new(vec![shard]);
    tokio::spawn(async move { while queue.recv().await.is_some() {} });
    let record = disk_of_a(&node, |_| {}).await;
    node.here.insert(&record, None);
    let (kernel, device) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
    // SAFETY: an `OwnedFd` has the same descriptor from here to its drop, which closes it and comes after the registration's end.
    let [kernel, device] =
        [kernel, device].map(|fd| unsafe { AsyncFd::register_with_interest(fd, super::INTEREST).unwrap() });
    let kernel = Kernel(kernel);
    let operations = Operations::new(Arc::clone(&node), Arc::default(), Arc::default());
    let exports = Arc::new(Exports::new(Arc::clone(&node), operations).unwrap());
    let readers = Arc::new(Semaphore::new(1));
    let mut keeper = Keeper::new(Arc::clone(&node), exports, readers, record.id, device);
    keeper.longest_wait = Duration::from_millis(500);
    let access = Access { mode: 0o600, uid: 0, gid: 0 };
    let file = File::new("d", access, Arc::new(AtomicU64::new(record.size)), 0);
    let (end, ended) = oneshot::channel();
    tokio::spawn(keeper.run(file, ended));
    kernel.ask(INIT, &[7, 41, 0, 1 << 30, 1 << 7]);
    assert_eq!(kernel.answer().await, (INIT, 0));
    (node, kernel, counters, end)
}

/// The program waited for the end of the load, which may be hours away.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_not_opened_while_a_load_overwrites_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (_node, kernel, counters, _end) = kept(directory.path()).await;
    counters.publish_exclusion(true);
    kernel.ask(OPEN, &[libc::O_RDWR as u32, 0]);
    assert_eq!(kernel.answer().await, (OPEN, -libc::EBUSY));
    counters.publish_exclusion(false);
    kernel.ask(OPEN, &[libc::O_RDWR as u32, 0]);
    assert_eq!(kernel.answer().await, (OPEN, 0));
}

/// The file went to the shard and back without an end, and neither the wait's end nor a closing was heard of.
#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_takes_no_client_ends_no_wait() {
    let directory = tempfile::tempdir().unwrap();
    let (_node, kernel, _counters, _end) = kept(directory.path()).await;
    kernel.ask(OPEN, &[libc::O_RDONLY as u32, 0]);
    assert_eq!(kernel.answer().await, (OPEN, 0));
    kernel.read();
    assert_eq!(kernel.answer().await, (READ, -libc::EIO));
    kernel.ask(RELEASE, &[0; 6]);
    assert_eq!(kernel.answer().await, (RELEASE, 0));
}

/// Its file would have been served by the other one.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_disks_file_is_not_that_of_another_disk_of_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let (node, kernel, _counters, _end) = kept(directory.path()).await;
    let mut record = node.records.disk("d").unwrap();
    record.id += 1;
    node.here.insert(&record, None);
    kernel.ask(OPEN, &[libc::O_RDONLY as u32, 0]);
    assert_eq!(kernel.answer().await, (OPEN, -libc::EBUSY));
}
