//! Nodes that claim one LUN from each other: real filesystems, mounts, heartbeats and fences, on loop devices that are paths to one image.
//! A fence sets a node's device read-only, by a fence command. The registry alone is a number and a record: its own tests are elsewhere.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use common::{LoopDevice, run, scratch};
use weir_block::Nanos;
use weir_volume::lun::claim::{Event, Phase, Process, Record};
use weir_volume::lun::fence_command::FenceCommand;
use weir_volume::lun::fencing::Fencing;
use weir_volume::lun::filesystem::Mounted;
use weir_volume::lun::heartbeat::area::behind;
use weir_volume::lun::heartbeat::{Area, Beat, VolumeId};
use weir_volume::lun::reservations::{Key, Reservations};
use weir_volume::lun::shell::{Answer, Host, Output, Shell};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 310 * MIB;
const VOLUME: VolumeId = VolumeId([0x5A; 16]);
const SOON: Duration = Duration::from_secs(30);

/// Compare-and-swap, and a watch for each node.
#[derive(Default)]
struct Registry {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    revision: u64,
    record: Record<u64>,
    watches: Vec<Sender<News>>,
}

enum News {
    Event(Event<u64>),
    Wanted(bool),
    End,
}

impl Registry {
    fn watch(&self, watch: Sender<News>) {
        let mut state = self.state.lock().unwrap();
        if state.revision > 0 {
            watch.send(state.seen()).unwrap();
        }
        state.watches.push(watch);
    }

    fn propose(&self, revision: u64, to: Record<u64>) -> bool {
        let mut state = self.state.lock().unwrap();
        if state.revision != revision {
            return false;
        }
        state.revision += 1;
        state.record = to;
        let (revision, record) = (state.revision, state.record.clone());
        state.watches.retain(|watch| {
            watch.send(News::Event(Event::Seen { revision, record: record.clone() })).is_ok()
        });
        true
    }

    fn record(&self) -> Record<u64> {
        self.state.lock().unwrap().record.clone()
    }
}

impl State {
    fn seen(&self) -> News {
        News::Event(Event::Seen { revision: self.revision, record: self.record.clone() })
    }
}

/// What a node shows.
#[derive(Default)]
struct Shown {
    phase: Option<Phase>,
    mounted: Option<Arc<Mounted>>,
    notices: Vec<String>,
    /// All that it had, in order.
    phases: Vec<Phase>,
}

struct Node {
    news: Sender<News>,
    shown: Arc<Mutex<Shown>>,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    fn start(registry: &Arc<Registry>, host: Host, names: &[(u64, &str)]) -> Node {
        let (answers, from_threads) = channel();
        let (news, from_outside) = channel();
        registry.watch(news.clone());
        let shown = Arc::<Mutex<Shown>>::default();
        let (registry, showing) = (Arc::clone(registry), Arc::clone(&shown));
        let mut shell = Shell::new(host, answers);
        shell.names = names.iter().map(|(node, name)| (*node, (*name).to_owned())).collect();
        let thread =
            std::thread::spawn(move || drive(&registry, shell, &from_threads, &from_outside, &showing));
        news.send(News::Wanted(false)).unwrap();
        Node { news, shown, thread: Some(thread) }
    }

    fn wanted(&self, wanted: bool) {
        self.news.send(News::Wanted(wanted)).unwrap();
    }

    fn await_phase(&self, phase: Phase) {
        self.await_some(&format!("{phase:?}"), |shown| (shown.phase == Some(phase)).then_some(()));
    }

    fn await_some<T>(&self, what: &str, mut look: impl FnMut(&Shown) -> Option<T>) -> T {
        let deadline = Nanos::now() + SOON;
        loop {
            let shown = self.shown.lock().unwrap();
            if let Some(found) = look(&shown) {
                return found;
            }
            let (phase, notices) = (shown.phase, shown.notices.clone());
            drop(shown);
            assert!(Nanos::now() < deadline, "no {what}: {phase:?}, {notices:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The coordinator's filesystem.
    fn with_filesystem<T>(&self, what: impl FnOnce(&Mounted) -> T) -> T {
        let mounted = self.await_some("mount", |shown| shown.mounted.clone());
        what(&mounted)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.news.send(News::End);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn drive(
    registry: &Registry,
    mut shell: Shell,
    threads: &Receiver<Answer>,
    outside: &Receiver<News>,
    shown: &Mutex<Shown>,
) {
    let mut revision = 0;
    loop {
        let mut events = VecDeque::new();
        shell.tick();
        let answer = threads.recv_timeout(Duration::from_millis(5));
        let mut outputs = answer.map_or_else(|_| Vec::new(), |answer| shell.take(answer));
        for news in outside.try_iter() {
            match news {
                News::Event(event) => {
                    if let Event::Seen { revision: new, .. } = event {
                        revision = new;
                    }
                    events.push_back(event);
                }
                News::Wanted(wanted) => events.push_back(Event::Wanted { wanted, revision }),
                News::End => {
                    shown.lock().unwrap().mounted = None;
                    return;
                }
            }
        }
        loop {
            for output in outputs {
                match output {
                    Output::Propose { number, revision, to } => {
                        if !registry.propose(revision, to) {
                            std::thread::sleep(Duration::from_millis(20));
                            events.push_back(Event::Refused(number));
                        }
                    }
                    Output::DropLeases => events.push_back(Event::LeasesDropped),
                    Output::Serve { mounted, .. } => shown.lock().unwrap().mounted = Some(mounted),
                    Output::StopServing => shown.lock().unwrap().mounted = None,
                    Output::Fenced(_) => {}
                    Output::Notice(text) => shown.lock().unwrap().notices.push(text),
                }
            }
            let Some(event) = events.pop_front() else { break };
            outputs = shell.step(event);
        }
        let (mut shown, phase) = (shown.lock().unwrap(), shell.phase());
        shown.phase = Some(phase);
        if shown.phases.last() != Some(&phase) {
            shown.phases.push(phase);
        }
    }
}

/// A LUN with two paths, for nodes 1 and 2.
struct Lun {
    paths: [LoopDevice; 2],
    area: u64,
    directory: tempfile::TempDir,
}

const NAMES: [(u64, &str); 2] = [(1, "n1"), (2, "n2")];

impl Lun {
    fn new(command: &str) -> Option<Lun> {
        let first = LoopDevice::new(SIZE)?;
        let command = command.replace("DEVICE", first.device.to_str().unwrap());
        let mut words = command.split(' ');
        run(Command::new(words.next().unwrap()).args(words));
        let second = first.second_path();
        let area = {
            let mounted = Mounted::new(&first.device).unwrap();
            behind(mounted.superblock(), SIZE).unwrap()
        };
        drop(Area::create(&first.device, area, VOLUME).unwrap());
        let directory = scratch();
        let lun = Lun { paths: [first, second], area, directory };
        lun.write_fence_command();
        Some(lun)
    }

    /// It waits for what is on its way, as the contract has it.
    fn write_fence_command(&self) {
        let directory = self.directory.path();
        for (number, path) in self.paths.iter().enumerate() {
            std::fs::write(directory.join(format!("n{}", number + 1)), path.device.to_str().unwrap())
                .unwrap();
        }
        let log = self.fence_log();
        let script = format!(
            "#!/bin/sh\n\
             exec 9>>{running}; flock -s 9\n\
             device=$(cat {directory}/$2) || exit 2\n\
             echo $1 $2 >> {log}\n\
             case $1 in\n\
             fence) blockdev --setro $device\n\
                    until grep -q '^ *0 *0$' /sys/block/${{device#/dev/}}/inflight; do sleep 0.01; done;;\n\
             admit) blockdev --setrw $device;;\n\
             esac\n",
            running = self.running().display(),
            directory = directory.display(),
            log = log.display(),
        );
        std::fs::write(self.fence_command(), script).unwrap();
        std::fs::set_permissions(self.fence_command(), PermissionsExt::from_mode(0o755)).unwrap();
    }

    fn fence_command(&self) -> PathBuf {
        self.directory.path().join("fence-command")
    }

    fn fence_log(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    /// Locked by each fence command while it runs.
    fn running(&self) -> PathBuf {
        self.directory.path().join("running")
    }

    fn fences(&self) -> usize {
        let log = std::fs::read_to_string(self.fence_log()).unwrap_or_default();
        log.lines().filter(|line| line.starts_with("fence")).count()
    }

    fn path(&self, node: u64) -> &Path {
        &self.paths[node as usize - 1].device
    }

    fn start(&self, registry: &Arc<Registry>, node: u64, incarnation: u64) -> Node {
        let me = Process { node, incarnation };
        let command = FenceCommand {
            program: Some(self.fence_command()),
            limit: Duration::from_secs(10),
            volume: "v".into(),
            lun: self.path(node).to_path_buf(),
            lock: self.directory.path().join(format!("lock-{node}")),
        };
        // A loop device has none.
        let reservations = Reservations {
            is_on: true,
            lun: self.path(node).to_path_buf(),
            key: Key::new(VOLUME, me),
            wait: Duration::from_secs(1),
        };
        let host = Host {
            me,
            name: format!("n{node}"),
            volume: VOLUME,
            lun: self.path(node).to_path_buf(),
            identity: String::new(),
            area: self.area,
            fencing: Fencing::new(VOLUME, me, reservations, command),
            former: Vec::new(),
            devices: vec![self.path(node).to_path_buf()],
            answer_timeout: SOON,
        };
        Node::start(registry, host, &NAMES)
    }

    fn is_read_only(&self, node: u64) -> bool {
        let output = Command::new("blockdev").arg("--getro").arg(self.path(node)).output().unwrap();
        output.stdout.starts_with(b"1")
    }
}

impl Drop for Lun {
    fn drop(&mut self) {
        // A fence that a node has left behind would take the device of whoever gets it next.
        for node in [1, 2] {
            let _ = std::fs::remove_file(self.directory.path().join(format!("n{node}")));
        }
        run(Command::new("flock").arg(self.running()).arg("true"));
        for node in [1, 2] {
            run(Command::new("blockdev").arg("--setrw").arg(self.path(node)));
        }
    }
}

const FORMATS: [&str; 2] = ["mkfs.ext4 -q -b 4096 DEVICE 300M", "mkfs.xfs -q -f -d size=300m DEVICE"];

/// A page of this byte, in a new file, durable.
fn write_file(mounted: &Mounted, name: &str) {
    #[repr(C, align(4096))]
    struct Page([u8; 4096]);
    let file = mounted.create(name).unwrap();
    file.write_all_at(&Page([7; 4096]).0, 0).unwrap();
    file.sync_all().unwrap();
}

fn length(mounted: &Mounted, name: &str) -> u64 {
    mounted.open(name).unwrap().metadata().unwrap().len()
}

#[test]
fn a_coordinator_that_is_replaced_is_fenced_and_comes_back() {
    for command in FORMATS {
        let Some(lun) = Lun::new(command) else { return };
        let registry = Arc::<Registry>::default();
        let (first, second) = (lun.start(&registry, 1, 1), lun.start(&registry, 2, 1));
        first.wanted(true);
        first.await_phase(Phase::Serving);
        first.with_filesystem(|mounted| write_file(mounted, "disk"));
        assert_eq!(lun.fences(), 0, "{command}: nobody was there before");
        // Whoever decides takes the first one for gone. It is not: something holds its mount. (Not to the end: one kernel mounts an XFS
        // only once.)
        let held = first.await_some("mount", |shown| shown.mounted.clone());
        second.wanted(true);
        second.await_some("fence", |_| (lun.fences() == 1).then_some(()));
        if command.contains("xfs") {
            // As in a lab, where a coordinator is stopped: the reason, and what to do.
            let says = |text: &String| text.contains("still mounted in this kernel, through /dev/loop");
            second.await_some("reason", |shown| shown.notices.iter().any(says).then_some(()));
            drop(held);
            // A node that cannot mount leaves the volume to others, and is chosen again, until the mount is gone.
            let deadline = Nanos::now() + SOON;
            while second.shown.lock().unwrap().phase != Some(Phase::Serving) {
                assert!(Nanos::now() < deadline, "{command}: {:?}", second.shown.lock().unwrap().notices);
                if second.shown.lock().unwrap().phase == Some(Phase::Absent) {
                    second.wanted(true);
                }
                std::thread::sleep(Duration::from_secs(1));
            }
            assert!(registry.record().epoch > 2, "it has claimed the volume again");
        } else {
            drop(held);
            second.await_phase(Phase::Serving);
            assert_eq!(registry.record().epoch, 2, "{command}");
        }
        assert_eq!(lun.fences(), 1, "{command}");
        assert_eq!(second.with_filesystem(|mounted| length(mounted, "disk")), 4096);
        second.with_filesystem(|mounted| write_file(mounted, "another"));
        // It has unmounted, left the list, and was admitted again.
        first.await_phase(Phase::Absent);
        first.await_some("mount's end", |shown| shown.mounted.is_none().then_some(()));
        let deadline = Nanos::now() + SOON;
        while lun.is_read_only(1) {
            assert!(Nanos::now() < deadline, "{command}: {:?}", first.shown.lock().unwrap().notices);
            std::thread::sleep(Duration::from_millis(10));
        }
        let record = registry.record();
        let alone = Record {
            epoch: record.epoch,
            coordinator: Some(Process { node: 2, incarnation: 1 }),
            mounts: [Process { node: 2, incarnation: 1 }].into(),
        };
        assert_eq!(record, alone, "{command}");
        // A move by command: the second one unmounts first, and nobody is fenced.
        second.wanted(false);
        second.await_phase(Phase::Absent);
        first.shown.lock().unwrap().phases.clear();
        first.wanted(true);
        first.await_phase(Phase::Serving);
        assert_eq!(lun.fences(), 1, "{command}");
        let phases = first.shown.lock().unwrap().phases.clone();
        assert!(
            phases.contains(&Phase::Listening) && !phases.contains(&Phase::Fencing),
            "{command}: {phases:?}"
        );
        assert_eq!(first.with_filesystem(|mounted| length(mounted, "another")), 4096);
        // One that learns of a claim unmounts. If it is on the list no more when the other one looks, it is not fenced.
        second.wanted(true);
        second.await_phase(Phase::Serving);
        first.await_phase(Phase::Absent);
    }
}

#[test]
fn a_crashed_coordinator_is_fenced_and_its_log_replayed() {
    /// `XFS_IOC_GOINGDOWN` and `EXT4_IOC_SHUTDOWN`: `_IOR('X', 125, __u32)`.
    const GOINGDOWN: libc::Ioctl = 0x8004_587D_u32 as libc::Ioctl;
    /// Nothing more is written, not even the log.
    static NOLOGFLUSH: u32 = 2;
    for command in FORMATS {
        let Some(lun) = Lun::new(command) else { return };
        let registry = Arc::<Registry>::default();
        let second = lun.start(&registry, 2, 1);
        {
            let first = lun.start(&registry, 1, 1);
            first.wanted(true);
            first.await_phase(Phase::Serving);
            first.with_filesystem(|mounted| {
                write_file(mounted, "disk");
                let file: File = mounted.open("disk").unwrap();
                // SAFETY: the kernel reads a number that outlives the call.
                let answer = unsafe { libc::ioctl(file.as_raw_fd(), GOINGDOWN, &raw const NOLOGFLUSH) };
                assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
            });
        }
        second.wanted(true);
        second.await_phase(Phase::Serving);
        assert_eq!(lun.fences(), 1, "{command}");
        assert_eq!(second.with_filesystem(|mounted| length(mounted, "disk")), 4096);
        assert!(lun.is_read_only(1));
        // The host is back, with another process.
        let first = lun.start(&registry, 1, 2);
        let deadline = Nanos::now() + SOON;
        while lun.is_read_only(1) {
            assert!(Nanos::now() < deadline, "{:?}", first.shown.lock().unwrap().notices);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(second.shown.lock().unwrap().phase, Some(Phase::Serving));
    }
}

#[test]
fn a_stranger_keeps_a_coordinator_from_mounting() {
    let Some(lun) = Lun::new(FORMATS[1]) else { return };
    let registry = Arc::<Registry>::default();
    let first = lun.start(&registry, 1, 1);
    let beat = |epoch, count| Beat {
        node: 77,
        incarnation: 5,
        epoch,
        count,
        goes_on: true,
        name: "elsewhere".into(),
    };
    let mut area = Area::open(lun.path(2), lun.area, VOLUME).unwrap();
    first.wanted(true);
    let says =
        |shown: &Shown, words: &str| shown.notices.iter().any(|text| text.contains(words)).then_some(());
    let mut count = 0;
    first.await_some("stranger", |shown| {
        count += 1;
        area.beat(&beat(0, count)).unwrap();
        says(shown, "in use by node elsewhere (process 5)")
    });
    assert!(first.shown.lock().unwrap().mounted.is_none());
    // It has ended; and the registry is that of a backup. However often the node is told to coordinate: a claim would make the registry
    // look newer than it is.
    area.beat(&beat(9, count)).unwrap();
    first.await_phase(Phase::Absent);
    let claimed = registry.record().epoch;
    for _ in 0..20 {
        first.wanted(true);
        std::thread::sleep(Duration::from_millis(20));
    }
    // Not at once: a process that stood still knows an old record for a moment.
    assert!(says(&first.shown.lock().unwrap(), "of which the registry").is_none());
    first.await_some("later epoch", |shown| {
        first.wanted(true);
        says(shown, "was coordinated in epoch 9, of which the registry")
    });
    assert!(first.shown.lock().unwrap().mounted.is_none());
    assert_eq!(registry.record().epoch, claimed);
}

#[test]
fn without_a_fence_nobody_mounts_beside_another() {
    let Some(lun) = Lun::new(FORMATS[1]) else { return };
    let registry = Arc::<Registry>::default();
    let (first, second) = (lun.start(&registry, 1, 1), lun.start(&registry, 2, 1));
    first.wanted(true);
    first.await_phase(Phase::Serving);
    let held = first.await_some("mount", |shown| shown.mounted.clone());
    let script = std::fs::read_to_string(lun.fence_command()).unwrap();
    let broken = script.replace("fence) blockdev", "fence) echo 'no answer' >&2; exit 1; blockdev");
    // Replaced, not written over: it may be running.
    let new = lun.directory.path().join("new");
    std::fs::write(&new, broken).unwrap();
    std::fs::set_permissions(&new, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::rename(new, lun.fence_command()).unwrap();
    second.wanted(true);
    let words = "fence n1` failed (exit code 1): no answer";
    second.await_some("failure", |shown| shown.notices.iter().any(|text| text.contains(words)).then_some(()));
    assert!(second.shown.lock().unwrap().mounted.is_none());
    // However often it is told to: most of its attempts are in one epoch.
    second.await_some("attempts", |_| {
        second.wanted(true);
        (lun.fences() >= 5).then_some(())
    });
    assert!(registry.record().epoch <= 4, "{:?}", registry.record());
    assert!(second.shown.lock().unwrap().mounted.is_none());
    // And the attempt after the fence works again is not another claim.
    let epoch = registry.record().epoch;
    std::fs::write(lun.directory.path().join("new"), script).unwrap();
    std::fs::set_permissions(lun.directory.path().join("new"), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::rename(lun.directory.path().join("new"), lun.fence_command()).unwrap();
    drop(held);
    second.await_phase(Phase::Serving);
    assert_eq!(registry.record().epoch, epoch);
    let last = second.shown.lock().unwrap().notices.last().cloned();
    assert_eq!(last.as_deref(), Some(""), "what was wrong is over");
}
