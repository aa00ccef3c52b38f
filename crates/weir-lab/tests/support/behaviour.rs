//! Effects on guests of Weir's recovery: a replica is lost, a copy is filled beside live writes, a log fills, a neighbour is
//! greedy.

use std::thread;
use std::time::Duration;

use serde::Serialize;
use weir_block::Nanos;
use weir_block::size::Size;
use weir_lab::LabConfig;
use weir_nbd::Uri;
use weir_node::api::DiskView;
use weir_node::config::{LeaseConfig, PeersConfig, ResourcesConfig};

use super::await_some;
use super::filesystem::SmallFilesystem;
use super::guest_load::{GuestLoad, REQUEST, Shape, Timeline, Window};
use crate::common::throttle::Throttle;
use crate::common::{Bench, DISK, SIZE, SOON};

const MIB: u64 = 1 << 20;

/// A guest with a queue, which only writes: what a lost replica hurts most.
const WRITER: Shape = Shape { depth: 16, read_percent: 0, rate: None };

/// All as `weir node` has it without a configuration.
pub fn defaults(config: &mut LabConfig) {
    let LeaseConfig { ttl, fence_grace } = LeaseConfig::default();
    (config.lease_ttl, config.fence_grace) = (ttl.0, fence_grace.0);
    config.peer_deadline = PeersConfig::default().deadline.0;
    let ResourcesConfig { shards, buffers, log, logs, busy_poll_us } = ResourcesConfig::default();
    (config.shards, config.buffers, config.log, config.logs) = (shards, buffers, log, logs);
    config.busy_poll_us = busy_poll_us;
}

/// The kind of loss of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loss {
    /// Its process ends: the kernel closes its connections, so the owner learns of it.
    Killed,
    /// Its network ends: the owner learns nothing.
    CutOff,
}

/// The effects of a lost replica.
#[derive(Debug, Serialize)]
pub struct Healed {
    pub policy: String,
    pub loss: Loss,
    /// In the log when the replica was lost.
    pub dirty_bytes: u64,
    pub longest_stall_ms: f64,
    /// From the loss until the requested policy was in effect again, on complete copies.
    pub restored_ms: f64,
    /// Answers of a second before the loss, in the two seconds that begin with it, and in two after the copy.
    pub iops_before: f64,
    pub iops_around: f64,
    pub iops_after: f64,
    /// Of what was answered before the loss, the part that was in the two seconds that begin with it: stall, copy and all.
    pub kept: f64,
}

/// The content of the log when a replica is lost.
#[derive(Clone, Copy, Debug)]
pub enum Backlog {
    /// The backlog of a guest that writes as fast as it can.
    Whatever,
    /// At least so many bytes, in front of a backing that takes hardly anything; the guest writes at a steady rate, so that the
    /// log does not become so full meanwhile that writes are admitted more slowly.
    Large(u64),
}

/// A replica is lost under load, with default settings; nodes are enough to replace it.
pub fn lose_replica(policy: &str, loss: Loss, backlog: Backlog, seed: u64) -> Healed {
    const BEFORE: Duration = Duration::from_secs(2);
    let nodes = if policy == "write-back+2" { 4 } else { 3 };
    let filesystem = SmallFilesystem::mount(2 * SIZE);
    let mut bench = Bench::up_on(&filesystem.path(), nodes, policy, |config| {
        defaults(config);
        config.network = true;
    });
    let victim = bench.wait_effective().replicas[0].clone();
    // Those who know nothing better would be asked for long.
    let owner = bench.lab.client(&bench.owner()).unwrap();
    let _throttle = match backlog {
        Backlog::Whatever => None,
        Backlog::Large(_) => Some(throttle(&bench, &filesystem, MIB)),
    };
    let shape = match backlog {
        Backlog::Whatever => WRITER,
        Backlog::Large(bytes) => {
            fill_to(&bench, bytes, seed + 1);
            Shape { rate: Some(500), ..WRITER }
        }
    };
    let load = GuestLoad::start(&uri(&bench, DISK), shape, seed);
    let began = Nanos::now();
    thread::sleep(BEFORE);
    let dirty_bytes = detail(&bench).0;
    let lost = Nanos::now();
    match loss {
        Loss::Killed => bench.lab.kill(&victim).unwrap(),
        Loss::CutOff => {
            let network = bench.lab.network().unwrap();
            network.cut(network.everything(&victim)).unwrap();
        }
    }
    let is_whole = |view: &DiskView| {
        !view.replicas.contains(&victim) && view.effective == policy && view.state == "serving"
    };
    await_some(SOON, || owner.disk(DISK).ok().filter(is_whole), || bench.logs());
    let restored = Nanos::now();
    thread::sleep(BEFORE);
    let timeline = load.finish();
    let (iops_before, iops_around) = (timeline.rate(began, lost), timeline.rate(lost, lost + BEFORE));
    Healed {
        policy: policy.into(),
        loss,
        dirty_bytes,
        longest_stall_ms: ms(timeline.longest_stall()),
        restored_ms: ms(restored - lost),
        iops_before,
        iops_around,
        iops_after: timeline.rate(restored, restored + BEFORE),
        kept: iops_around / iops_before,
    }
}

/// Writes until so much is dirty.
fn fill_to(bench: &Bench, dirty: u64, seed: u64) {
    let load = GuestLoad::start(&uri(bench, DISK), WRITER, seed);
    while detail(bench).0 < dirty {
        thread::sleep(Duration::from_millis(20));
    }
    load.finish();
}

/// The effects of a copy that was filled beside live writes.
#[derive(Debug, Serialize)]
pub struct Filled {
    /// To be copied at the beginning; what the guest wrote meanwhile comes on top.
    pub dirty_bytes: u64,
    pub took_ms: f64,
    pub longest_stall_ms: f64,
    pub iops_before: f64,
    /// In the first [`AT_FIRST`] of the copy, before the log is half full, and in all of it.
    pub iops_at_first: f64,
    pub iops_during: f64,
    /// As long, and from as much dirty data, with two replicas from the beginning.
    pub iops_at_first_of_two: f64,
    pub iops_of_two: f64,
    /// Answers during the copy, as a share of those before it, and of those that two replicas sustain.
    pub kept_of_before: f64,
    pub kept_at_first: f64,
    pub kept_of_two: f64,
    pub p99_before_us: f64,
    pub p99_during_us: f64,
    /// Share of the log in use at the end, with the copy and with two replicas from the beginning. Beyond a half, writes are
    /// admitted more slowly, whoever copies what.
    pub log_used: f64,
    pub log_used_of_two: f64,
}

/// The duration of a load before it is measured.
const WARM_UP: Duration = Duration::from_millis(300);

/// In so long, a fast guest does not fill half of a large log.
const AT_FIRST: Duration = Duration::from_secs(2);

/// A disk with a large log in front of a backing that takes hardly anything.
struct LargeLog {
    bench: Bench,
    _throttle: Throttle,
    _filesystem: SmallFilesystem,
}

impl LargeLog {
    /// With `dirty` bytes in the log.
    fn up(policy: &str, dirty: u64, seed: u64) -> LargeLog {
        let filesystem = SmallFilesystem::mount(2 * SIZE);
        let bench = Bench::up_on(&filesystem.path(), 3, policy, |config| {
            defaults(config);
            config.log = Size(4 << 30);
        });
        let throttle = throttle(&bench, &filesystem, MIB);
        fill_to(&bench, dirty, seed);
        LargeLog { bench, _throttle: throttle, _filesystem: filesystem }
    }

    /// Answers per second to a load that writes for `lasts`, at first and all the time, and the share of the log in use at the end.
    fn sustains(&self, shape: Shape, lasts: Duration, seed: u64) -> (f64, f64, f64) {
        let load = GuestLoad::start(&uri(&self.bench, DISK), shape, seed);
        thread::sleep(WARM_UP);
        let began = Nanos::now();
        thread::sleep(lasts);
        let (ended, log_used) = (Nanos::now(), detail(&self.bench).1);
        let timeline = load.finish();
        (timeline.rate(began, ended.min(began + AT_FIRST)), timeline.rate(began, ended), log_used)
    }
}

/// A disk with a large log and `dirty` bytes in it gets one more replica, and is held against one that has both from the beginning.
pub fn fill_copy(shape: Shape, dirty: u64, seed: u64) -> Filled {
    let log = LargeLog::up("write-back+1", dirty, seed);
    let bench = &log.bench;
    let load = GuestLoad::start(&uri(bench, DISK), shape, seed + 1);
    thread::sleep(WARM_UP);
    let before = Nanos::now();
    thread::sleep(Duration::from_millis(500));
    let dirty_bytes = detail(bench).0;
    let began = Nanos::now();
    bench.lab.any_client().unwrap().set_policy(DISK, "write-back+2").unwrap();
    bench.wait(|view| view.effective == "write-back+2");
    let ended = Nanos::now();
    let log_used = detail(bench).1;
    let timeline = load.finish();
    drop(log);
    let two = LargeLog::up("write-back+2", dirty_bytes, seed);
    let (iops_at_first_of_two, iops_of_two, log_used_of_two) = two.sustains(shape, ended - began, seed + 1);
    let (iops_before, iops_during) = (timeline.rate(before, began), timeline.rate(began, ended));
    let iops_at_first = timeline.rate(began, ended.min(began + AT_FIRST));
    Filled {
        dirty_bytes,
        took_ms: ms(ended - began),
        longest_stall_ms: ms(timeline.longest_stall()),
        iops_before,
        iops_at_first,
        iops_during,
        iops_at_first_of_two,
        iops_of_two,
        kept_of_before: iops_during / iops_before,
        kept_at_first: iops_at_first / iops_at_first_of_two,
        kept_of_two: iops_during / iops_of_two,
        p99_before_us: us(timeline.percentile(before, began, 99.0)),
        p99_during_us: us(timeline.percentile(began, ended, 99.0)),
        log_used,
        log_used_of_two,
    }
}

/// A guest's latency beside the fill of its log, every [`STEP`].
#[derive(Debug, Serialize)]
pub struct Filling {
    /// Bytes that the backing takes in a second.
    pub backing: u64,
    pub longest_stall_ms: f64,
    pub steps: Vec<Step>,
}

/// Width of the windows of [`fill_log`].
pub const STEP: Duration = Duration::from_millis(100);

/// One window of [`Filling`].
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Step {
    pub start_ms: f64,
    pub iops: f64,
    pub median_ms: f64,
    pub p99_ms: f64,
    pub longest_ms: f64,
    /// Share of the log in use at the end of the window, 0 to 1.
    pub log_used: f64,
}

/// A guest writes faster than the backing takes, from an empty log on, for `lasts`.
pub fn fill_log(lasts: Duration, seed: u64) -> Filling {
    let (filesystem, bench) = on_small_filesystem();
    allocate(&bench, DISK, seed);
    let throttle = throttle(&bench, &filesystem, SLOW);
    let load = GuestLoad::start(&uri(&bench, DISK), Shape { depth: 8, ..WRITER }, seed + 1);
    let began = Nanos::now();
    let mut used = Vec::new();
    while Nanos::now() < began + lasts {
        thread::sleep(began + STEP * (used.len() as u32 + 1) - Nanos::now());
        used.push(detail(&bench).1);
    }
    let timeline = load.finish();
    drop(throttle);
    let windows = timeline.windows(began, began + STEP * used.len() as u32, STEP);
    let step = |(window, log_used): (Window, f64)| Step {
        start_ms: ms(window.start),
        iops: window.answers as f64 / STEP.as_secs_f64(),
        median_ms: ms(window.median),
        p99_ms: ms(window.p99),
        longest_ms: ms(window.longest),
        log_used,
    };
    Filling {
        backing: SLOW,
        longest_stall_ms: ms(timeline.longest_stall()),
        steps: windows.into_iter().zip(used).map(step).collect(),
    }
}

/// The latencies of a polite guest without and with a greedy one beside it.
#[derive(Debug, Serialize)]
pub struct Neighbours {
    pub alone: Felt,
    pub beside: Felt,
    /// The greedy one's share of its log in use, at the end.
    pub greedy_log_used: f64,
    pub greedy_bytes_per_second: f64,
    pub polite_dirty_bytes: u64,
}

/// Latencies of one guest.
#[derive(Debug, Serialize)]
pub struct Felt {
    pub iops: f64,
    pub median_us: f64,
    pub p99_us: f64,
    pub longest_stall_ms: f64,
}

/// Two disks on one node, one shard and one slow backing. One guest asks for little; the other one writes as fast as it can,
/// measured for `lasts` from when its log is full enough for it to be slowed.
pub fn neighbours(lasts: Duration, seed: u64) -> Neighbours {
    const GREEDY: &str = "d2";
    let (filesystem, bench) = on_small_filesystem();
    bench.create(GREEDY, "write-back+1");
    for disk in [DISK, GREEDY] {
        allocate(&bench, disk, seed);
    }
    let throttle = throttle(&bench, &filesystem, SLOW);
    let polite = Shape { depth: 4, read_percent: 30, rate: Some(200) };
    let felt = |from: Nanos, load: GuestLoad| {
        let (to, timeline) = (Nanos::now(), load.finish());
        let stall = Timeline { answers: timeline.between(from, to).to_vec() }.longest_stall();
        Felt {
            iops: timeline.rate(from, to),
            median_us: us(timeline.percentile(from, to, 50.0)),
            p99_us: us(timeline.percentile(from, to, 99.0)),
            longest_stall_ms: ms(stall),
        }
    };
    let load = GuestLoad::start(&uri(&bench, DISK), polite, seed + 1);
    let began = Nanos::now();
    thread::sleep(lasts);
    let alone = felt(began, load);

    let greedy = GuestLoad::start(&uri(&bench, GREEDY), Shape { depth: 32, ..WRITER }, seed + 2);
    let client = bench.lab.client("n1").unwrap();
    let log_used = || {
        let detail = client.disk(GREEDY).unwrap().detail.unwrap();
        detail.log_used_bytes as f64 / detail.log_bytes as f64
    };
    await_some(SOON, || (log_used() > 0.6).then_some(()), || bench.logs());
    let load = GuestLoad::start(&uri(&bench, DISK), polite, seed + 3);
    let began = Nanos::now();
    thread::sleep(lasts);
    let polite_dirty_bytes = detail(&bench).0;
    let beside = felt(began, load);
    let ended = Nanos::now();
    let greedy_log_used = log_used();
    let rate = greedy.finish().rate(began, ended);
    drop(throttle);
    Neighbours {
        alone,
        beside,
        greedy_log_used,
        greedy_bytes_per_second: rate * f64::from(REQUEST),
        polite_dirty_bytes,
    }
}

/// Bytes that the slow backing takes in a second.
const SLOW: u64 = 6 * MIB;

/// Two nodes with default settings whose volume is a filesystem of its own.
fn on_small_filesystem() -> (SmallFilesystem, Bench) {
    let filesystem = SmallFilesystem::mount(4 * SIZE);
    let bench = Bench::up_on(&filesystem.path(), 2, "write-back+1", defaults);
    (filesystem, bench)
}

/// Writes most of the disk, and waits until it is in the backing: otherwise the filesystem's journal would take its part of the
/// slow device.
fn allocate(bench: &Bench, disk: &str, seed: u64) {
    let load = GuestLoad::start(&uri(bench, disk), WRITER, seed);
    thread::sleep(Duration::from_secs(1));
    load.finish();
    let client = bench.lab.client("n1").unwrap();
    let clean = || (client.disk(disk).ok()?.detail?.dirty_bytes == 0).then_some(());
    await_some(SOON, clean, || bench.logs());
}

fn throttle(bench: &Bench, filesystem: &SmallFilesystem, rate: u64) -> Throttle {
    let processes = bench.lab.nodes().iter().map(|node| node.process.unwrap().pid);
    filesystem
        .throttle(rate, processes)
        .expect("the kernel has cgroup v1's blkio.throttle, which this measures with")
}

fn uri(bench: &Bench, disk: &str) -> Uri {
    Uri::unix(&bench.lab.node(&bench.owner()).unwrap().nbd_unix, disk)
}

/// Dirty bytes, and the share of the log in use.
fn detail(bench: &Bench) -> (u64, f64) {
    let detail = bench.wait(|_| true).detail.unwrap();
    (detail.dirty_bytes, detail.log_used_bytes as f64 / detail.log_bytes as f64)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
