//! A shard by itself, with real files: what hangs in one disk is no other disk's trouble, and idle disks cost nothing.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use weir_accel::flash::FlashDevice;
use weir_accel::flash::device_bytes;
use weir_accel::{AccelConfig, Configuration};
use weir_block::{Engine, Nanos};
use weir_export::nbd::{AcceptedClient, Via};
use weir_load::workload::Access;
use weir_load::{Summary, Workload};
use weir_node::control::Shards;
use weir_node::shard::health::Look;
use weir_node::shard::messages::{
    Arrival, Command, DiskStatus, LoadLayer, LogMedium, NotClosed, Notice, OpenDisk, Opening, Unopened,
};
use weir_node::shard::opener::Threads;
use weir_node::shard::{Shard, ShardConfig};
use weir_node::stack::Plain;
use weir_volume::{BackingKind, BackingOptions, DirVolume, Mark};

const MIB: u64 = 1 << 20;

/// A file for a disk is as large.
const SIZE: u64 = 4 * MIB;

/// `fcntl` command for the signal of a lease (linux/fcntl.h).
const F_SETSIG: i32 = 10;

/// A shard that does not hang answers within this, also on a machine that does much else.
const AT_ONCE: Duration = Duration::from_secs(1);

/// A shard and its way in, and files for its disks.
struct Rig {
    shards: Shards,
    shard: Option<Shard>,
    directory: tempfile::TempDir,
    _notices: mpsc::Receiver<Notice>,
}

impl Rig {
    fn new() -> Rig {
        Rig::with_flash(|_| None)
    }

    fn with_flash(flash: impl FnOnce(&Path) -> Option<Arc<FlashDevice>>) -> Rig {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let config = ShardConfig {
            buffer_bytes: 64 << 20,
            busy_poll: Duration::from_micros(50),
            log_bytes: 64 * MIB,
            peer_deadline: Duration::from_secs(1),
            full_log_wait: Duration::from_secs(30),
            full_volume_wait: Duration::from_secs(30),
            coordinator_wait: Duration::from_secs(30),
            server_wait: Duration::from_secs(30),
            nbd_fence_grace: Duration::from_secs(1),
            destage_delay: AccelConfig::DESTAGE_DELAY,
            io_flusher: false,
            engine: Engine::Auto,
            storage: Arc::new(Threads),
            flash: flash(directory.path()),
            wrap: Arc::new(Plain),
            planted: weir_accel::planted::Planted::default(),
        };
        let (told, notices) = mpsc::channel(64);
        let shard = Shard::start(0, config, told).unwrap();
        let shards = Shards::new(vec![shard.queue.clone()]);
        Rig { shards, shard: Some(shard), directory, _notices: notices }
    }

    fn path(&self, disk: &str) -> PathBuf {
        self.directory.path().join(disk)
    }

    /// A disk over a new file.
    fn disk(&self, name: &str) -> OpenDisk {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        OpenDisk {
            disk: name.into(),
            id: 1,
            backing: BackingKind::Path(path),
            volume: None,
            mark: Mark::of("n1#1"),
            size: SIZE,
            logical_block: 4096,
            log_bytes: 64 * MIB,
            medium: LogMedium::Ram,
            rate: None,
            configuration: Configuration {
                epoch: 1,
                replicas: Vec::new(),
                write_back: true,
                wanted_replicas: Some(0),
                strict: false,
                misplaced: Vec::new(),
                leaving: Vec::new(),
            },
            arrival: Arrival::Clean,
            serves_until: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }

    /// Begins to open a disk.
    async fn begin(&self, disk: OpenDisk) -> oneshot::Receiver<Opening> {
        let (done, opened) = oneshot::channel();
        self.shards.send("", Command::Open(Box::new(disk), done)).await;
        opened
    }

    async fn open(&self, name: &str) {
        self.begin(self.disk(name)).await.await.unwrap().unwrap();
    }

    async fn status(&self, disk: &str) -> Option<DiskStatus> {
        self.shards.status().await.into_iter().find(|status| status.disk == disk)
    }

    async fn close(&self, name: &str) -> Result<(), NotClosed> {
        let disk = name.to_owned();
        self.shards.ask("", |done| Command::Close { disk, unless_used: false, done }).await.unwrap()
    }

    /// Writes for a second onto a disk, one request at a time.
    async fn load(&self, name: &str, rate: u64) -> Summary {
        let workload = Box::new(Workload {
            access: Access::RandWrite,
            queue_depth: 1,
            rate: Some(rate),
            runtime: Some(Duration::from_secs(1)),
            ..Workload::default()
        });
        let (disk, layer) = (name.to_owned(), LoadLayer::Accel);
        let loaded =
            self.shards.ask("", |answer| Command::Load { disk, layer, workload, force: false, answer }).await;
        loaded.unwrap().unwrap()
    }

    fn health(&self) -> Look {
        self.shards.health().remove(0)
    }

    /// Closes all disks and ends the thread.
    async fn stop(mut self) {
        tokio::time::timeout(Duration::from_secs(10), self.shards.stop()).await.expect("the shard stops");
        self.shard.take().unwrap().join();
    }
}

/// Opening the file blocks until this is dropped (a lease; fcntl(2)), as with a server that does not answer.
struct Withheld {
    file: File,
}

impl Withheld {
    fn new(path: &Path) -> Withheld {
        let file = File::options().read(true).write(true).open(path).unwrap();
        // SAFETY: no pointers. The signal for a waiting opener is one that is ignored by default.
        let told = unsafe { libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) };
        // SAFETY: no pointers.
        let leased = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
        assert!(told == 0 && leased == 0, "{}", std::io::Error::last_os_error());
        Withheld { file }
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        // SAFETY: no pointers.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backing_that_cannot_be_opened_is_no_other_disks_trouble() {
    let rig = Rig::new();
    rig.open("well").await;
    let disk = rig.disk("ill");
    let withheld = Withheld::new(&rig.path(&disk.disk));
    let mut opened = rig.begin(disk.clone()).await;

    let before = Nanos::now();
    let (ill, well) = (rig.status("ill").await.unwrap(), rig.status("well").await.unwrap());
    assert_eq!((&*ill.state, &*well.state), ("opening", "serving"));
    assert!(well.is_current() && !ill.is_current(), "nothing is known of a log before its disk is open");
    rig.open("another").await;
    assert!(Nanos::now() - before < AT_ONCE * 3, "{:?}", Nanos::now() - before);
    let summary = rig.load("well", 500).await;
    let slowest = Duration::from_nanos(summary.kinds[0].latency_ns.max);
    println!("beside an opening that hangs, the slowest write took {slowest:?}");
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    assert!(opened.try_recv().is_err(), "it still hangs");
    assert!(rig.status("ill").await.unwrap().reason.contains("has not been opened"));

    // It can be given up, and tried again: the second attempt joins the first.
    let before = Nanos::now();
    rig.close("ill").await.unwrap();
    assert!(opened.await.unwrap().unwrap_err().contains("closed again"));
    assert!(Nanos::now() - before < AT_ONCE);
    assert!(rig.status("ill").await.is_none());
    let opened = rig.begin(disk).await;
    assert_eq!(rig.status("ill").await.unwrap().state, "opening");
    drop(withheld);
    tokio::time::timeout(Duration::from_secs(10), opened).await.unwrap().unwrap().unwrap();
    assert_eq!(rig.status("ill").await.unwrap().state, "serving");
    assert!(rig.health().hangs.is_none() && rig.health().longest < AT_ONCE, "{:?}", rig.health());
    rig.stop().await;
}

/// Whoever asks whether a disk can be opened gives up after a while, and asks again.
#[tokio::test(flavor = "multi_thread")]
async fn backings_that_hang_leave_room_to_look_at_others() {
    let rig = Rig::new();
    DirVolume::open(rig.directory.path()).unwrap().identify(7).unwrap();
    let ill = ["ill0", "ill1", "ill2"].map(|name| rig.disk(name));
    let withheld = ill.each_ref().map(|disk| Withheld::new(&rig.path(&disk.disk)));
    #[expect(
        clippy::async_yields_async,
        reason = "the question is sent now, and its answer awaited later or never"
    )]
    let look = async |disk: &OpenDisk, volume| {
        let (answer, answered) = oneshot::channel();
        let options = Box::new(BackingOptions { volume, ..BackingOptions::default() });
        let (disk, backing) = (disk.disk.clone(), disk.backing.clone());
        rig.shards.send("d", Command::CanOpen { disk, backing, options, answer }).await;
        answered
    };
    for _ in 0..9 {
        drop(look(&ill[0], Some(7)).await);
    }
    let well = rig.disk("well");
    assert_eq!(
        look(&well, None).await.await.unwrap(),
        Ok(()),
        "one disk that is asked about again and again"
    );
    let second = look(&ill[1], Some(7)).await;
    tokio::time::sleep(AT_ONCE + Duration::from_millis(100)).await;
    let refused = look(&ill[2], Some(7)).await.await.unwrap();
    assert!(
        matches!(&refused, Err(Unopened::Fails(reason)) if reason.contains("volume does not answer")),
        "{refused:?}"
    );
    assert_eq!(look(&well, None).await.await.unwrap(), Ok(()));
    let joined = look(&ill[0], Some(7)).await;
    drop(withheld);
    for answered in [joined, second] {
        let outcome = tokio::time::timeout(Duration::from_secs(10), answered).await.unwrap().unwrap();
        assert_eq!(outcome, Ok(()));
    }
    assert_eq!(look(&ill[2], Some(7)).await.await.unwrap(), Ok(()), "the volume answers again");
    rig.stop().await;
}

/// Its log is given up, or stays as a copy, and the next one begins in the same slot: the device has no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_opened_again_at_once_needs_no_second_place_on_the_flash() {
    let log = AccelConfig::SMALLEST_LOG;
    let make = |directory: &Path| {
        Some(FlashDevice::open(&directory.join("flash"), device_bytes(1, log), log, 7).unwrap())
    };
    let rig = Rig::with_flash(make);
    let disk = OpenDisk { medium: LogMedium::Flash { disk_id: 1 }, log_bytes: log, ..rig.disk("d") };
    for round in 0..20 {
        rig.begin(disk.clone()).await.await.unwrap().unwrap_or_else(|error| panic!("{round}: {error}"));
        if round % 2 == 0 {
            rig.close("d").await.unwrap();
        } else {
            let (name, keep) = (disk.disk.clone(), true);
            rig.shards.ask("", |done| Command::ReleaseDisk { disk: name, keep, done }).await.unwrap();
            assert_eq!(rig.status("d").await.unwrap().role, "replica");
        }
        // A failed opening does not cost the slot either.
        let large = OpenDisk { log_bytes: 1 << 60, ..disk.clone() };
        let refused = rig.begin(large).await.await.unwrap().unwrap_err();
        assert!(refused.contains("no memory"), "{round}: {refused}");
    }
    rig.stop().await;
}

/// A disk is deleted while its file is being opened, and made again: what was opened is the earlier one's.
#[tokio::test(flavor = "multi_thread")]
async fn an_opening_is_not_joined_by_a_later_disk_of_the_same_name() {
    let rig = Rig::new();
    let disk = rig.disk("again");
    let withheld = Withheld::new(&rig.path(&disk.disk));
    let earlier = withheld.file.try_clone().unwrap();
    let given_up = rig.begin(disk.clone()).await;
    assert_eq!(rig.status("again").await.unwrap().state, "opening");
    rig.close("again").await.unwrap();
    assert!(given_up.await.unwrap().is_err());
    std::fs::remove_file(rig.path(&disk.disk)).unwrap();
    let opened = rig.begin(OpenDisk { id: 2, ..rig.disk("again") }).await;
    // The later one's file is not withheld, but it must not matter which is there first.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(withheld);
    tokio::time::timeout(Duration::from_secs(10), opened).await.unwrap().unwrap().unwrap();
    rig.load("again", 500).await;
    rig.close("again").await.unwrap();
    let blocks = |file: &File| file.metadata().unwrap().blocks();
    let later = File::open(rig.path("again")).unwrap();
    assert_eq!(blocks(&earlier), 0, "nothing is written to the file of the disk that was deleted");
    assert!(blocks(&later) > 0, "the load is in the file of the disk that is there");
    rig.stop().await;
}

/// P4: where the volume is not mounted, or another one is, a file of the same name is another disk's. An opening without this check
/// is not joined either.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_opened_only_in_its_volume() {
    let rig = Rig::new();
    let disk = rig.disk("d");
    let refused = rig.begin(OpenDisk { volume: Some(7), ..disk.clone() }).await.await.unwrap().unwrap_err();
    assert!(refused.contains("is not volume 0000000000000007"), "{refused}");
    DirVolume::open(rig.directory.path()).unwrap().identify(7).unwrap();
    let refused = rig.begin(OpenDisk { volume: Some(8), ..disk.clone() }).await.await.unwrap().unwrap_err();
    assert!(refused.contains("is not volume 0000000000000008"), "{refused}");
    let withheld = Withheld::new(&rig.path(&disk.disk));
    let unchecked = rig.begin(disk.clone()).await;
    assert_eq!(rig.status("d").await.unwrap().state, "opening");
    rig.close("d").await.unwrap();
    assert!(unchecked.await.unwrap().is_err());
    let opened = rig.begin(OpenDisk { volume: Some(8), ..disk.clone() }).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(withheld);
    let refused = tokio::time::timeout(Duration::from_secs(10), opened).await.unwrap().unwrap().unwrap_err();
    assert!(refused.contains("is not volume 0000000000000008"), "{refused}");
    let opened = rig.begin(OpenDisk { volume: Some(7), ..disk }).await.await.unwrap().unwrap();
    let file = opened.expect("it is in a volume");
    assert_eq!(file.inode, std::fs::metadata(rig.path("d")).unwrap().ino());
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_a_backing_that_cannot_be_opened() {
    let rig = Rig::new();
    let disk = rig.disk("ill");
    let _withheld = Withheld::new(&rig.path(&disk.disk));
    let opened = rig.begin(disk).await;
    assert_eq!(rig.status("ill").await.unwrap().state, "opening");
    rig.stop().await;
    assert!(opened.await.unwrap().unwrap_err().contains("stopping"));
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_disks_have_no_part_in_the_turns_of_a_busy_one() {
    const IDLE: usize = 20;
    let rig = Rig::new();
    rig.open("busy").await;
    for number in 0..IDLE {
        rig.open(&format!("idle-{number}")).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = rig.health();
    let summary = rig.load("busy", 2000).await;
    let after = rig.health();
    let (turns, disk_turns) = (after.turns - before.turns, after.disk_turns - before.disk_turns);
    let each = disk_turns as f64 / turns as f64;
    println!(
        "{} writes beside {IDLE} idle disks: {turns} turns, {disk_turns} of disks, {each:.2} for each; longest {:?}",
        summary.kinds[0].ios, after.longest
    );
    assert!(summary.kinds[0].ios > 500, "{summary:?}");
    assert!(each < 1.5, "{disk_turns} turns of disks in {turns} turns of the shard");
    assert_eq!(after.spins, before.spins);

    // Nothing to do: no turns.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = rig.health();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let turns = rig.health().turns - before.turns;
    assert!(turns < 20, "{turns} turns in a second of nothing");
    rig.stop().await;
}

/// A client without block sizes. Its socket, and the connection for the shard.
fn plain_client() -> (std::os::unix::net::UnixStream, weir_export::Client) {
    client_via(None)
}

/// As [`plain_client`], of another node. One that reads may do nothing else.
fn client_via(via: Option<Via>) -> (std::os::unix::net::UnixStream, weir_export::Client) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let reads = matches!(via, Some(Via::Reader(_)));
    let flags = if reads { weir_nbd::protocol::transmission_flag::READ_ONLY } else { 0 };
    let session = weir_nbd::server::Session { export: "disk".into(), flags, ..Default::default() };
    let leftover = Vec::new();
    (theirs, AcceptedClient { stream: ours.into(), leftover, session, via }.into())
}

/// The header of a request for 12 bytes across two blocks.
fn request(command: u8, cookie: u64) -> Vec<u8> {
    let mut bytes = weir_nbd::protocol::REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend([0, 0, 0, command]);
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(4090u64.to_be_bytes());
    bytes.extend(12u32.to_be_bytes());
    bytes
}

/// A write across two blocks, from the middle of the first to the middle of the second; returns its error number.
fn write_across_blocks(socket: &mut std::os::unix::net::UnixStream, cookie: u64) -> std::io::Result<u32> {
    socket.write_all(&[request(1, cookie), vec![7; 12]].concat())?;
    let mut reply = [0; 16];
    socket.read_exact(&mut reply)?;
    Ok(u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]]))
}

/// A small filesystem in memory, without any space left; unmounted on drop.
struct FullFilesystem(PathBuf);

impl FullFilesystem {
    /// `None` where nothing can be mounted.
    fn mount(path: PathBuf) -> Option<FullFilesystem> {
        std::fs::create_dir(&path).unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m", "weir-test"]).arg(&path);
        if !mount.status().is_ok_and(|status| status.success()) {
            eprintln!("skipped: may not mount here");
            return None;
        }
        let full = FullFilesystem(path);
        let mut filler = File::create(full.0.join("filler")).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
        Some(full)
    }
}

impl Drop for FullFilesystem {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_closes_does_not_wait_for_space() {
    let rig = Rig::new();
    let Some(full) = FullFilesystem::mount(rig.path("full")) else { return };
    let mut disk = rig.disk("disk");
    let path = full.0.join("disk");
    File::create(&path).unwrap().set_len(SIZE).unwrap();
    disk.backing = BackingKind::Path(path);
    // Write-through: what clients write does not go by the log.
    (disk.configuration.write_back, disk.configuration.wanted_replicas) = (false, None);
    rig.begin(disk).await.await.unwrap().unwrap();
    let (mut socket, client) = plain_client();
    rig.shards.send("", Command::Attach { disk: "disk".into(), client: Box::new(client) }).await;
    let write = tokio::task::spawn_blocking(move || write_across_blocks(&mut socket, 1));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!write.is_finished(), "it waits");
    let unless_used = |done| Command::Close { disk: "disk".into(), unless_used: true, done };
    assert_eq!(rig.shards.ask("", unless_used).await.unwrap(), Err(NotClosed::Used(1)));
    assert!(!write.is_finished(), "it is as before");
    tokio::time::timeout(Duration::from_secs(5), rig.close("disk")).await.expect("it closes").unwrap();
    let answer = write.await.unwrap();
    assert!(
        answer.is_err(),
        "{answer:?}: an error would be the guest's; without an answer it asks the next node"
    );
    rig.stop().await;
}

/// P4: its client may have had the same requests answered by another way, and others after them.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_forwarder_has_sent_is_not_served() {
    let rig = Rig::new();
    rig.open("disk").await;
    let attach = async |client| {
        rig.shards.send("", Command::Attach { disk: "disk".into(), client: Box::new(client) }).await;
    };
    // Nobody takes the answers of either; a client of this node's own is served to its last request.
    for (via, found) in [(Some(Via::Forwarder(Arc::new(()))), [0; 12]), (None, [7; 12])] {
        let (mut socket, client) = client_via(via);
        socket.write_all(&[request(1, 1), vec![7; 12]].concat()).unwrap();
        drop(socket);
        attach(client).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (mut socket, client) = plain_client();
        attach(client).await;
        let read = tokio::task::spawn_blocking(move || {
            let mut answer = [0; 16 + 12];
            socket.write_all(&request(0, 2)).unwrap();
            socket.read_exact(&mut answer).unwrap();
            answer
        });
        assert_eq!(read.await.unwrap()[16..], found);
    }
    rig.stop().await;
}

/// P2: who followed a disk may have kept its connection, or have connected just before it stopped to follow.
#[tokio::test(flavor = "multi_thread")]
async fn a_former_follower_reaches_the_disk_neither_on_an_old_connection_nor_on_a_new_one() {
    let rig = Rig::new();
    rig.open("disk").await;
    let attach_via = async |via: Option<Via>| {
        let (socket, client) = client_via(via);
        rig.shards.send("", Command::Attach { disk: "disk".into(), client: Box::new(client) }).await;
        socket
    };
    let attach = async |node: Option<&str>| attach_via(node.map(|node| Via::Follower(node.to_owned()))).await;
    let follower_is = async |node: Option<&str>| {
        let (disk, node) = ("disk".to_owned(), node.map(str::to_owned));
        rig.shards.send("", Command::FollowerIs { disk, node }).await;
    };
    let writes = async |mut socket: std::os::unix::net::UnixStream| {
        let write = move || write_across_blocks(&mut socket, 1).is_ok().then_some(socket);
        tokio::task::spawn_blocking(write).await.unwrap()
    };
    let own = attach(None).await;
    let mut reader = attach_via(Some(Via::Reader(Arc::new(())))).await;
    assert!(writes(attach(Some("b")).await).await.is_none(), "nobody follows");
    follower_is(Some("b")).await;
    let former = writes(attach(Some("b")).await).await.expect("the follower");
    assert!(writes(attach(Some("c")).await).await.is_none(), "another node");
    follower_is(Some("b")).await;
    let former = writes(former).await.expect("it still follows");
    follower_is(Some("c")).await;
    assert!(writes(former).await.is_none(), "an old connection");
    assert!(writes(attach(Some("b")).await).await.is_none(), "a new connection");
    let next = writes(attach(Some("c")).await).await.expect("the follower now");
    follower_is(None).await;
    assert!(writes(next).await.is_none());
    assert!(writes(own).await.is_some(), "this node's clients have nothing to do with it");
    let refused = tokio::task::spawn_blocking(move || write_across_blocks(&mut reader, 1)).await.unwrap();
    let refused = refused.expect("a node that only reads has nothing to do with it");
    assert_eq!(refused, weir_nbd::protocol::error::EPERM);
    rig.stop().await;
}

/// The reads at the ends of such a write and the load's are on the same accelerator: each takes its own answers alone.
#[tokio::test(flavor = "multi_thread")]
async fn an_unaligned_write_beside_a_load_is_answered() {
    let rig = Rig::new();
    rig.open("disk").await;
    let (mut socket, client) = plain_client();
    rig.shards.send("", Command::Attach { disk: "disk".into(), client: Box::new(client) }).await;
    let workload = Box::new(Workload {
        access: Access::RandRead,
        queue_depth: 4,
        rate: Some(2000),
        runtime: Some(Duration::from_secs(2)),
        ..Workload::default()
    });
    let (disk, layer) = ("disk".to_owned(), LoadLayer::Accel);
    let load = rig.shards.ask("", |answer| Command::Load { disk, layer, workload, force: true, answer });
    let writes = tokio::task::spawn_blocking(move || {
        let end = Nanos::now() + Duration::from_millis(1500);
        let mut answered = 0;
        while Nanos::now() < end {
            assert_eq!(write_across_blocks(&mut socket, answered).expect("the write is answered"), 0);
            answered += 1;
        }
        answered
    });
    let (loaded, answered) = tokio::join!(load, writes);
    assert!(loaded.unwrap().unwrap().kinds[0].ios > 500);
    assert!(answered.unwrap() > 10);
    rig.stop().await;
}

/// A client that comes while a load overwrites the disk would lose what it writes.
#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_writes_keeps_new_clients_out_unless_forced() {
    let rig = Rig::new();
    rig.open("disk").await;
    for (force, is_served) in [(false, false), (true, true)] {
        let workload = Box::new(Workload {
            access: Access::RandWrite,
            queue_depth: 1,
            rate: Some(100),
            runtime: Some(Duration::from_secs(1)),
            ..Workload::default()
        });
        let (disk, layer) = ("disk".to_owned(), LoadLayer::Accel);
        let load = rig.shards.ask("", |answer| Command::Load { disk, layer, workload, force, answer });
        let client = async {
            let (mut socket, client) = plain_client();
            tokio::time::sleep(Duration::from_millis(200)).await;
            rig.shards.send("", Command::Attach { disk: "disk".into(), client: Box::new(client) }).await;
            tokio::task::spawn_blocking(move || write_across_blocks(&mut socket, 1).is_ok()).await.unwrap()
        };
        let (loaded, served) = tokio::join!(load, client);
        assert!(loaded.unwrap().unwrap().kinds[0].ios > 10);
        assert_eq!(served, is_served, "force: {force}");
    }
    let (mut socket, client) = plain_client();
    rig.shards.send("", Command::Attach { disk: "disk".into(), client: Box::new(client) }).await;
    let answered = tokio::task::spawn_blocking(move || write_across_blocks(&mut socket, 1)).await.unwrap();
    assert_eq!(answered.unwrap(), 0, "the load is over");
    rig.stop().await;
}

/// A disk is closed for a move only when nothing is left at its backing, and a load would always have something there.
#[tokio::test(flavor = "multi_thread")]
async fn a_load_is_held_with_the_clients_and_goes_on_with_them() {
    let rig = Rig::new();
    rig.open("disk").await;
    let workload = Box::new(Workload {
        access: Access::RandWrite,
        queue_depth: 16,
        runtime: Some(Duration::from_secs(3600)),
        ..Workload::default()
    });
    let (answer, mut loaded) = oneshot::channel();
    let (disk, layer) = ("disk".to_owned(), LoadLayer::Accel);
    rig.shards.send("", Command::Load { disk, layer, workload, force: false, answer }).await;
    let appended = async || rig.status("disk").await.unwrap().appended;
    let rises = async |from: u64| {
        let risen = async {
            while appended().await <= from {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), risen).await.is_ok()
    };
    assert!(rises(0).await, "the load runs");

    let disk = "disk".to_owned();
    rig.shards.ask("", |done| Command::HoldClients { disk, done }).await.unwrap();
    let quiet = async {
        while rig.status("disk").await.unwrap().in_flight > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), quiet).await.expect("the load makes no requests");
    let held = appended().await;
    let turns = rig.health().turns;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((appended().await, rig.status("disk").await.unwrap().in_flight), (held, 0));
    assert!(rig.health().turns - turns < 10_000, "the shard does not spin meanwhile");
    assert!(loaded.try_recv().is_err());

    rig.shards.send("", Command::ResumeClients { disk: "disk".into() }).await;
    assert!(rises(held).await, "the load goes on");
    let disk = "disk".to_owned();
    rig.shards.ask("", |done| Command::HoldClients { disk, done }).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(10), rig.close("disk")).await;
    closed.expect("a held load keeps no disk open").unwrap();
    assert!(loaded.await.unwrap().unwrap().kinds[0].ios > 0);
    rig.stop().await;
}
