//! `fuse.elsewhere = "read"`: programs read a disk's file on nodes that do not own the disk, and nothing else.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::NodeRef;
use weir_nbd::protocol::{
    EXTENDED_REQUEST_MAGIC, ExtendedReply, ExtendedRequest, command, command_flag, error,
};
use weir_node::config::FilesElsewhere;
use weir_node::peer::{Greeting, Purpose};
use zerocopy::{FromBytes, IntoBytes};

use super::nodes::{BLOCK, Writers, check, move_to, read, version_of, write};
use super::{alone, errno, open, options, path};
use crate::common::{Bench, DISK, SIZE, SOON};
use crate::support::{await_some, run};

/// A lab whose nodes have the disks as files, and let others read.
fn bench(nodes: usize, policy: &str) -> Bench {
    Bench::up(nodes, policy, |config| (config.fuse, config.fuse_elsewhere) = (true, FilesElsewhere::Read))
}

fn other_than(bench: &Bench, owner: &str) -> String {
    let mut names = bench.lab.nodes().iter().map(|node| node.name.clone());
    names.find(|name| name != owner).unwrap()
}

/// Opens a disk's file for reading alone, as soon as that is possible.
fn open_to_read(bench: &Bench, node: &str) -> File {
    let path = path(bench, node, DISK);
    let opened = || OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).ok();
    await_some(SOON, opened, || format!("{} cannot be read{}", path.display(), bench.logs()))
}

/// Reads all blocks again and again until told to stop: none is older than what was synced when its read began, and no read fails.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<(usize, Duration)>,
}

impl Reader {
    fn start(bench: &Bench, node: &str, writers: &Writers) -> Reader {
        let (file, synced) = (open_to_read(bench, node), Arc::clone(&writers.synced));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let (mut reads, mut longest) = (0, Duration::ZERO);
            let mut seen = vec![0; synced.len()];
            while !stopped.load(Ordering::Relaxed) {
                for (block, least) in synced.iter().enumerate() {
                    let least = least.load(Ordering::Relaxed).max(seen[block]);
                    let began = Nanos::now();
                    let version = version_of(&file, block).expect("a read fails");
                    longest = longest.max(Nanos::now() - began);
                    assert!(version >= least, "block {block} has version {version}, and {least} was there");
                    (seen[block], reads) = (version, reads + 1);
                }
            }
            (reads, longest)
        });
        Reader { stop, thread }
    }

    /// The number of reads, and the longest one.
    fn end(self) -> (usize, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the reader")
    }
}

/// P7, with the programs that people have.
#[test]
fn programs_read_what_is_acknowledged_on_the_owner_and_write_nothing() {
    let _turn = alone();
    let bench = bench(2, "write-back+1");
    bench.wait_effective();
    let owner = bench.owner();
    let other = other_than(&bench, &owner);
    let writers = Writers::start(&bench, &owner);
    let reader = Reader::start(&bench, &other, &writers);
    let there = path(&bench, &other, DISK);
    let enough = || (writers.count() > 200).then_some(());
    await_some(SOON, enough, || bench.logs());
    // Meanwhile nobody writes there, and reading with any size of request goes on.
    assert_eq!(errno(options(true).open(&there)), Some(libc::EROFS), "{}", bench.logs());
    assert_eq!(errno(OpenOptions::new().write(true).open(&there)), Some(libc::EROFS));
    let mut dd = Command::new("dd");
    let refused = dd.args(["if=/dev/zero", "bs=4k", "count=1", "conv=notrunc"]);
    let refused = refused.arg(format!("of={}", there.display())).stdin(Stdio::null()).output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Read-only"), "{refused:?}");
    // The owner makes durable what others have written.
    run("sync", [there.to_str().unwrap()]);
    let device = run("losetup", ["--find", "--show", there.to_str().unwrap()]);
    let read_only = run("blockdev", ["--getro", device.trim()]);
    run("losetup", ["--detach", device.trim()]);
    assert_eq!(read_only, "1\n", "losetup takes what it cannot write as read-only");
    for bytes in ["bs=1M", "bs=1000", "bs=64k"] {
        run("dd", [&format!("if={}", there.display()), "of=/dev/null", bytes, "count=100", "status=none"]);
    }
    let (reads, longest) = reader.end();
    assert!(reads > 100 && longest < Duration::from_secs(2), "{reads} reads, the longest took {longest:?}");
    let synced = writers.end();
    assert_eq!(bench.owner(), owner, "readers do not move a disk");
    check(&open_to_read(&bench, &other), &synced);
    let (here, there) = (path(&bench, &owner, DISK), there.to_str().unwrap().to_owned());
    let here = here.to_str().unwrap();
    run("cmp", [here, &there]);
    assert_eq!(std::fs::metadata(&there).unwrap().len(), SIZE);
    // Holes are found, and are holes on both nodes.
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0));
    let map = |path: &str| run("qemu-img", ["map", "-U", "-f", "raw", "--output=json", path]);
    let (holes, expected) = (map(&there), map(here));
    assert!(holes.contains("\"data\": false") && holes.contains("\"data\": true"), "{holes}");
    assert_eq!(holes, expected);
    let copy = bench.directory.path().join("copy");
    let copy = copy.to_str().unwrap();
    run("qemu-img", ["convert", "-U", "-f", "raw", "-O", "raw", &there, copy]);
    run("cmp", [here, copy]);
    // The last one to close it ends the connection.
    let none = || (bench.disk()?.detail?.clients == 0).then_some(());
    await_some(SOON, none, || "a reader is left".to_owned());
}

#[test]
fn reading_goes_on_while_the_disk_moves_away_and_here_and_away_again() {
    let _turn = alone();
    let bench = bench(3, "write-back+1");
    bench.wait_effective();
    let owner = bench.owner();
    let mut others = bench.lab.nodes().iter().map(|node| node.name.clone()).filter(|name| *name != owner);
    let (here, third) = (others.next().unwrap(), others.next().unwrap());
    let file = open(&bench, &owner, true);
    for value in 1..4 {
        write(&file, value);
    }
    let reader = open_to_read(&bench, &here);
    assert_eq!(read(&reader).unwrap(), 3);
    let mut value = 3;
    for next in [&third, &here, &owner, &here, &third] {
        bench.wait_effective();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, again) = (Arc::clone(&stop), reader.try_clone().unwrap());
        let reads = thread::spawn(move || {
            let mut count = 0;
            while !stopped.load(Ordering::Relaxed) {
                assert_eq!(read(&again).expect("a read fails while the disk moves"), value);
                count += 1;
            }
            count
        });
        move_to(&bench, next);
        // Its new owner, and nobody else, takes writes.
        let writer = open(&bench, next, true);
        stop.store(true, Ordering::Relaxed);
        assert!(reads.join().unwrap() > 0);
        value += 1;
        write(&writer, value);
        assert_eq!(read(&reader).unwrap(), value, "on {next}");
    }
    // Whoever had it open to write before it left reads on, and writes nothing.
    assert_eq!(read(&file).unwrap(), value);
    assert_eq!(errno(file.write_at(&[9; BLOCK], 0)), Some(libc::EIO));
    assert_eq!(read(&reader).unwrap(), value);
}

/// P1, P7, P9: reads wait for the new owner.
#[test]
fn reading_goes_on_with_the_successor_of_a_killed_owner() {
    let _turn = alone();
    let mut bench = bench(3, "write-back+1");
    bench.wait_effective();
    let owner = bench.owner();
    // Not the one that takes over, if there is a choice: the node without a copy.
    let replicas = bench.wait_effective().replicas;
    let mut others = bench.lab.nodes().iter().map(|node| node.name.clone());
    let here = others.find(|name| *name != owner && !replicas.contains(name)).unwrap();
    let writers = Writers::start(&bench, &owner);
    let reader = Reader::start(&bench, &here, &writers);
    let enough = || (writers.count() > 200).then_some(());
    await_some(SOON, enough, || bench.logs());
    bench.lab.kill(&owner).unwrap();
    let synced = writers.end();
    bench.wait(|view| view.owner.as_ref().is_some_and(|now| *now != owner));
    let again = open_to_read(&bench, &here);
    check(&again, &synced);
    let (reads, longest) = reader.end();
    eprintln!("{reads} reads, the longest took {longest:?}");
    assert!(reads > 1000, "{reads} reads");
    assert!(longest < Duration::from_secs(20), "a read took {longest:?}");
}

/// P9: requests do not wait without an end for an owner that does not come back.
#[test]
fn reads_fail_after_a_bounded_time_without_an_owner() {
    let _turn = alone();
    let mut bench = bench(2, "write-back+0");
    let owner = bench.owner();
    let here = other_than(&bench, &owner);
    let (file, reader) = (open(&bench, &owner, true), open_to_read(&bench, &here));
    write(&file, 7);
    assert_eq!(read(&reader).unwrap(), 7);
    bench.lab.kill(&owner).unwrap();
    let began = Nanos::now();
    assert_eq!(errno(read(&reader)), Some(libc::EIO));
    let took = Nanos::now() - began;
    assert!((Duration::from_secs(25)..Duration::from_secs(40)).contains(&took), "{took:?}{}", bench.logs());
    assert_eq!(errno(File::open(path(&bench, &here, DISK))), Some(libc::EBUSY), "{}", bench.logs());
    bench.lab.start(&owner).unwrap();
}

/// The owner has to agree: a node reads no disk because it says so itself.
#[test]
fn an_owner_that_is_not_configured_for_it_answers_no_readers() {
    let _turn = alone();
    let mut bench = bench(2, "write-through");
    let owner = bench.owner();
    let here = other_than(&bench, &owner);
    drop(open_to_read(&bench, &here));
    bench.lab.kill(&owner).unwrap();
    let config = bench.lab.node(&owner).unwrap().config.clone();
    let text = std::fs::read_to_string(&config).unwrap();
    let changed = text.replace("elsewhere = \"read\"", "elsewhere = \"refuse\"");
    assert_ne!(text, changed);
    std::fs::write(&config, changed).unwrap();
    bench.lab.start(&owner).unwrap();
    bench.wait(|view| view.owner.is_some());
    if bench.owner() != owner {
        bench.wait_effective();
        move_to(&bench, &owner);
    }
    drop(open(&bench, &owner, false));
    let began = Nanos::now();
    assert_eq!(errno(File::open(path(&bench, &here, DISK))), Some(libc::EBUSY), "{}", bench.logs());
    assert!(Nanos::now() - began < Duration::from_secs(5));
    let log = |node: &str| std::fs::read_to_string(&bench.lab.node(node).unwrap().log).unwrap();
    assert!(log(&here).contains("is needed there, too, and few enough readers"), "{}", log(&here));
    // The reader may have the answer before the owner's log has it.
    let reason = || log(&owner).contains("this node answers no readers").then_some(());
    await_some(SOON, reason, || log(&owner));
}

fn request(kind: u16, flags: u16, cookie: u64, length: u64) -> Vec<u8> {
    let request = ExtendedRequest {
        magic: EXTENDED_REQUEST_MAGIC.into(),
        flags: flags.into(),
        command: kind.into(),
        cookie: cookie.into(),
        offset: 0.into(),
        length: length.into(),
    };
    request.as_bytes().to_vec()
}

/// What the reading node sends is not what keeps readers from writing.
#[test]
fn the_owner_takes_no_changes_from_a_reading_node_and_not_many_connections() {
    let _turn = alone();
    let bench = bench(2, "write-back+0");
    let owner = bench.owner();
    let here = other_than(&bench, &owner);
    let file = open(&bench, &owner, true);
    write(&file, 5);
    let status = bench.lab.client(&owner).unwrap().status().unwrap();
    let connect = || {
        let replica = NodeRef::new(status.node.clone(), status.incarnation);
        let greeting = Greeting { disk: DISK.into(), owner: here.clone(), replica, purpose: Purpose::Read };
        let view = status.nodes.iter().find(|view| view.name == status.node).unwrap();
        let mut stream = TcpStream::connect(&view.peer_address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.write_all(&greeting.encode()).unwrap();
        stream
    };
    let mut hostile = connect();
    let write = request(command::WRITE, command_flag::PAYLOAD_LEN, 1, BLOCK as u64);
    hostile.write_all(&[write, vec![0xee; BLOCK]].concat()).unwrap();
    for (cookie, command) in [(2, command::TRIM), (3, command::WRITE_ZEROES)] {
        hostile.write_all(&request(command, 0, cookie, 4096)).unwrap();
    }
    hostile.write_all(&request(command::READ, 0, 5, BLOCK as u64)).unwrap();
    let mut data = None;
    for _ in 0..4 {
        let mut head = [0; size_of::<ExtendedReply>()];
        hostile.read_exact(&mut head).unwrap();
        let head = ExtendedReply::read_from_bytes(&head).unwrap();
        let mut body = vec![0; head.length.get() as usize];
        hostile.read_exact(&mut body).unwrap();
        match head.cookie.get() {
            5 => data = Some(body.split_off(8)),
            _ => assert_eq!(body[..4], error::EPERM.to_be_bytes(), "{head:?}"),
        }
    }
    assert_eq!(data.unwrap(), vec![5; BLOCK]);
    assert_eq!(read(&file).unwrap(), 5);
    // One node's readers of one disk have a few connections, and this node's own clients are served beside them.
    let served = |stream: &mut TcpStream| {
        stream.write_all(&request(command::READ, 0, 1, 1)).unwrap();
        match stream.read(&mut [0; 32]) {
            Ok(0) => false,
            Ok(_) => true,
            Err(error) => {
                assert!(!matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "no answer");
                false
            }
        }
    };
    let mut all: Vec<_> = (0..20).map(|_| connect()).collect();
    let count = all.iter_mut().map(served).filter(|is_served| *is_served).count();
    assert!((1..=4).contains(&count), "{count} are served");
    assert_eq!(read(&file).unwrap(), 5);
    drop((hostile, all));
    // Given back when they end.
    let again = || served(&mut connect()).then_some(());
    await_some(SOON, again, || bench.logs());
}
