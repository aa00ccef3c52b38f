//! The operating system's counters during a run: processor time, waits for it, the network.
//!
//! From `/proc/PID/task/TID/schedstat` (time on a processor, time ready and waiting for one; scheduler statistics of the
//! Linux kernel), `/proc/PID/status` (context switches), `/proc/stat` (steal), `/proc/net/dev`, `/proc/net/snmp`
//! (retransmitted segments) and `/proc/diskstats` (time with I/O under way). Two samples make the counters.

mod trace;
mod tracefs;
mod watch;

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

pub use trace::{Print, TraceError, Traced, Tracer};
pub use watch::Watch;

/// Counters of one run. Shares are of the time between the samples, 0 to 1; of several threads the one with the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Seconds between the samples.
    pub seconds: f64,
    /// The share for which a thread of the node that was measured was on a processor.
    pub node_busy: Option<f64>,
    /// The share for which it was ready to run and was not.
    pub node_wait: Option<f64>,
    /// The same two of the other nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_busy: Option<f64>,
    /// See [`Counters::replica_busy`].
    pub replica_wait: Option<f64>,
    /// The same of the process that generates load on the exports.
    pub generator_wait: Option<f64>,
    /// The share of all processors' time that the hypervisor gave to others.
    pub steal: f64,
    /// Processors' worth of idle time: 1.5 is one and a half of them.
    #[serde(default)]
    pub idle_processors: f64,
    /// Processors' worth of time that processes of lowered priority (nice) used: a process of normal priority gets most of it
    /// when it wants it.
    #[serde(default)]
    pub niced_processors: f64,
    /// Processors' worth of time that other processes used than these and those that are watched.
    #[serde(default)]
    pub foreign_processors: f64,
    /// Involuntary context switches of the node, a second.
    pub switches_per_second: Option<f64>,
    /// Bytes that all network interfaces (of those watched) received, a second; loopback among them.
    pub network_bytes_per_second: f64,
    /// TCP segments sent again.
    pub retransmits: u64,
    /// The share for which the busiest block device (of those watched) had I/O under way.
    pub device_busy: f64,
    /// Mean bytes of the reads that the watched device did; absent without one, and without reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_read_bytes: Option<f64>,
    /// Requests of the load's kind that reached the layer below for each that this layer answered, by the meters or the
    /// device's statistics; absent without such counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_below: Option<f64>,
    /// Reads of the layer below, or of the watched device, for each write, in a run of writes alone; absent without such
    /// counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads_for_writes: Option<f64>,
    /// The block layer's tracepoints at the traced device; absent if none is traced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traced: Option<Traced>,
}

/// Whose counters are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// The node that has the disk, or the processes of the layer; empty if none is watched.
    pub node: Vec<u32>,
    /// Other nodes on this machine.
    pub replicas: Vec<u32>,
    /// The process that generates load on the exports.
    pub generator: Option<u32>,
    /// Of the block devices only this one (its name in `/proc/diskstats`).
    pub device: Option<String>,
    /// Of the network interfaces only this one.
    pub interface: Option<String>,
}

/// Nanoseconds on a processor and waiting for one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Thread {
    on: u64,
    waiting: u64,
}

/// The counters of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Process {
    threads: BTreeMap<u32, Thread>,
    switches: u64,
}

/// Ticks of all processors together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    /// On this machine; where this process may run is another matter.
    processors: usize,
    all: u64,
    niced: u64,
    idle: u64,
    stolen: u64,
}

/// One look at everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    node: Option<Process>,
    replicas: Vec<Process>,
    generator: Option<Process>,
    ticks: Ticks,
    received: u64,
    retransmits: u64,
    devices: BTreeMap<String, Device>,
    /// One device is watched.
    only_one: bool,
}

/// The counters of a block device since the machine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Device {
    reads: u64,
    sectors_read: u64,
    writes: u64,
    /// Milliseconds with I/O under way.
    busy_ms: u64,
}

impl Sample {
    /// Takes a sample. A value that the machine does not report is absent or 0.
    #[must_use]
    pub fn take(watched: &Watched) -> Sample {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Sample {
            node: Process::of_all(&watched.node),
            replicas: watched.replicas.iter().filter_map(|pid| Process::look(*pid)).collect(),
            generator: watched.generator.and_then(Process::look),
            ticks: Ticks::of(&read("/proc/stat")),
            received: received(&read("/proc/net/dev"), watched.interface.as_deref()),
            retransmits: retransmits(&read("/proc/net/snmp")),
            devices: devices(&read("/proc/diskstats"), watched.device.as_deref()),
            only_one: watched.device.is_some(),
        }
    }

    /// The difference from this sample to a `later` one, `seconds` (above zero) apart.
    #[must_use]
    pub fn until(&self, later: &Sample, seconds: f64) -> Counters {
        let wait = |before: &Process, after: &Process| before.most(after, seconds, |thread| thread.waiting);
        let busy = |before: &Process, after: &Process| before.most(after, seconds, |thread| thread.on);
        let node = self.node.as_ref().zip(later.node.as_ref());
        let generator = self.generator.as_ref().zip(later.generator.as_ref());
        let replicas = || self.replicas.iter().zip(&later.replicas);
        let ours = node.into_iter().chain(generator).chain(replicas());
        let ours: f64 = ours.map(|(before, after)| before.all(after, seconds)).sum();
        let ticks = later.ticks.since(self.ticks);
        let share = |part: u64| if ticks.all == 0 { 0.0 } else { part as f64 / ticks.all as f64 };
        let processors = ticks.processors as f64;
        let used = processors * (1.0 - share(ticks.niced + ticks.idle + ticks.stolen));
        let worked = |(name, after): (&String, &Device)| after.since(self.devices.get(name).unwrap_or(after));
        let devices = || later.devices.iter().map(worked);
        Counters {
            seconds,
            node_busy: node.map(|(before, after)| busy(before, after)),
            node_wait: node.map(|(before, after)| wait(before, after)),
            replica_busy: replicas().map(|(before, after)| busy(before, after)).reduce(f64::max),
            replica_wait: replicas().map(|(before, after)| wait(before, after)).reduce(f64::max),
            generator_wait: generator.map(|(before, after)| wait(before, after)),
            steal: share(ticks.stolen),
            idle_processors: processors * share(ticks.idle),
            niced_processors: processors * share(ticks.niced),
            foreign_processors: if ticks.all == 0 { 0.0 } else { (used - ours).max(0.0) },
            switches_per_second: node
                .map(|(before, after)| after.switches.saturating_sub(before.switches) as f64 / seconds),
            network_bytes_per_second: later.received.saturating_sub(self.received) as f64 / seconds,
            retransmits: later.retransmits.saturating_sub(self.retransmits),
            device_busy: devices().map(|device| device.busy_ms as f64 / 1e3 / seconds).fold(0.0, f64::max),
            device_read_bytes: devices().find(|_| later.only_one).and_then(|device| device.read_bytes()),
            requests_below: None,
            reads_for_writes: devices().find(|_| later.only_one).and_then(|device| device.reads_for_writes()),
            traced: None,
        }
    }
}

impl Device {
    fn since(&self, earlier: &Device) -> Device {
        Device {
            reads: self.reads.saturating_sub(earlier.reads),
            sectors_read: self.sectors_read.saturating_sub(earlier.sectors_read),
            writes: self.writes.saturating_sub(earlier.writes),
            busy_ms: self.busy_ms.saturating_sub(earlier.busy_ms),
        }
    }

    /// Mean size of a read: a sector is 512 bytes here, whatever the device's are.
    fn read_bytes(&self) -> Option<f64> {
        (self.reads > 0).then(|| self.sectors_read as f64 * 512.0 / self.reads as f64)
    }

    fn reads_for_writes(&self) -> Option<f64> {
        (self.writes > 0).then(|| self.reads as f64 / self.writes as f64)
    }
}

impl Process {
    /// The threads of several; those that have ended are left out. `None` where there is none.
    fn of_all(pids: &[u32]) -> Option<Process> {
        let looks = pids.iter().filter_map(|pid| Process::look(*pid));
        looks.reduce(|mut all, one| {
            all.threads.extend(one.threads);
            all.switches += one.switches;
            all
        })
    }

    /// `None` when it has ended.
    fn look(pid: u32) -> Option<Process> {
        let mut process = Process::default();
        for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
            let Some(id) = task.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // A thread that ends in between says nothing.
            let Ok(text) = fs::read_to_string(task.path().join("schedstat")) else { continue };
            process.threads.extend(schedstat(&text).map(|thread| (id, thread)));
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            process.switches += involuntary(&status);
        }
        Some(process)
    }

    /// Takes over what a later look says of each thread; of those that have ended meanwhile, the last that was seen stays.
    fn update(&mut self, later: Process) {
        self.threads.extend(later.threads);
        self.switches = self.switches.max(later.switches);
    }

    /// The time that all threads were on a processor, as a share of the time.
    fn all(&self, later: &Process, seconds: f64) -> f64 {
        let before = |id: &u32| self.threads.get(id).map_or(0, |thread| thread.on);
        let all: u64 = later.threads.iter().map(|(id, after)| after.on.saturating_sub(before(id))).sum();
        all as f64 / 1e9 / seconds
    }

    /// The most that a thread had of something, as a share of the time. Threads that came in between count from zero.
    fn most(&self, later: &Process, seconds: f64, of: impl Fn(&Thread) -> u64) -> f64 {
        let share = |(id, after): (&u32, &Thread)| {
            let before = self.threads.get(id).map_or(0, &of);
            of(after).saturating_sub(before) as f64 / 1e9 / seconds
        };
        later.threads.iter().map(share).fold(0.0, f64::max)
    }
}

fn schedstat(text: &str) -> Option<Thread> {
    let mut numbers = text.split_whitespace().map_while(|word| word.parse().ok());
    Some(Thread { on: numbers.next()?, waiting: numbers.next()? })
}

fn involuntary(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

impl Ticks {
    /// The first line: eight numbers that do not overlap (proc(5)), of which the second is niced, the fourth and
    /// fifth are idle, the eighth stolen.
    fn of(stat: &str) -> Ticks {
        let first = stat.lines().next().unwrap_or_default();
        let numbers: Vec<u64> =
            first.split_whitespace().skip(1).map_while(|word| word.parse().ok()).take(8).collect();
        let number = |place: usize| numbers.get(place).copied().unwrap_or(0);
        let one = |line: &&str| {
            line.strip_prefix("cpu")
                .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        };
        let processors = stat.lines().filter(one).count();
        let all = numbers.iter().sum();
        Ticks { processors, all, niced: number(1), idle: number(3) + number(4), stolen: number(7) }
    }

    fn since(self, earlier: Ticks) -> Ticks {
        Ticks {
            processors: self.processors,
            all: self.all.saturating_sub(earlier.all),
            niced: self.niced.saturating_sub(earlier.niced),
            idle: self.idle.saturating_sub(earlier.idle),
            stolen: self.stolen.saturating_sub(earlier.stolen),
        }
    }
}

fn received(dev: &str, only: Option<&str>) -> u64 {
    let of_line = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let wanted = only.is_none_or(|only| only == name.trim());
        rest.split_whitespace().next()?.parse::<u64>().ok().filter(|_| wanted)
    };
    dev.lines().filter_map(of_line).sum()
}

/// The value under `RetransSegs`: names and values come in two lines that begin with `Tcp:`.
fn retransmits(snmp: &str) -> u64 {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let mut both = names.split_whitespace().zip(values.split_whitespace());
    both.find(|(name, _)| *name == "RetransSegs").and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
}

/// After the name come reads, reads merged, sectors read, then time, writes; the tenth number is the time with I/O under way (iostats of the
/// kernel's block layer).
fn devices(diskstats: &str, only: Option<&str>) -> BTreeMap<String, Device> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace().skip(2);
        let name = words.next().filter(|name| only.is_none_or(|only| only == *name))?;
        let numbers: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        let number = |place: usize| numbers.get(place).copied();
        let device =
            Device { reads: number(0)?, sectors_read: number(2)?, writes: number(4)?, busy_ms: number(9)? };
        Some((name.to_owned(), device))
    };
    diskstats.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_proc_are_understood() {
        assert_eq!(schedstat("123 45 6\n"), Some(Thread { on: 123, waiting: 45 }));
        assert_eq!(schedstat(""), None);
        let ticks = Ticks::of("cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 1\ncpu1 1 1\nintr 5");
        assert_eq!(ticks, Ticks { processors: 2, all: 36, niced: 2, idle: 9, stolen: 8 });
        assert_eq!(involuntary("Name:\tx\nnonvoluntary_ctxt_switches:\t17\n"), 17);
        let dev = "Inter-|   Receive\n face |bytes\n    lo: 1000 1 0\n  eth0: 234 2 0\n";
        assert_eq!((received(dev, None), received(dev, Some("eth0"))), (1234, 234));
        let snmp = "Ip: A B\nIp: 1 2\nTcp: InSegs RetransSegs X\nTcp: 10 7 1\n";
        assert_eq!(retransmits(snmp), 7);
        let disks = " 259 0 nvme0n1 1 2 3 4 5 6 7 8 9 1010 11 0\n";
        let device = Device { reads: 1, sectors_read: 3, writes: 5, busy_ms: 1010 };
        assert_eq!(devices(disks, None), BTreeMap::from([("nvme0n1".to_owned(), device)]));
        assert_eq!(devices(disks, Some("sda")), BTreeMap::new());
        let later = Device { reads: 5, sectors_read: 67, writes: 13, busy_ms: 1010 };
        let worked = later.since(&device);
        assert_eq!((worked.read_bytes(), worked.reads_for_writes()), (Some(8192.0), Some(0.5)));
        let idle = device.since(&device);
        assert_eq!((idle.read_bytes(), idle.reads_for_writes()), (None, None));
    }

    /// This process computes for a while: it is seen on a processor.
    #[test]
    fn a_busy_process_is_seen() {
        let me = Watched { node: vec![std::process::id()], ..Watched::default() };
        let before = Sample::take(&me);
        let seconds = {
            let began = fs::read_to_string("/proc/uptime").unwrap();
            let mut sum = 0u64;
            loop {
                (0..1_000_000u64).for_each(|n| sum = sum.wrapping_mul(31).wrapping_add(n));
                let now = fs::read_to_string("/proc/uptime").unwrap();
                let time = |text: &str| text.split_whitespace().next().unwrap().parse::<f64>().unwrap();
                if time(&now) - time(&began) > 0.2 {
                    assert_ne!(std::hint::black_box(sum), 1);
                    break time(&now) - time(&began);
                }
            }
        };
        let counters = before.until(&Sample::take(&me), seconds);
        let (busy, waited) = (counters.node_busy.unwrap(), counters.node_wait.unwrap());
        assert!(busy + waited > 0.7 && busy < 1.3, "{counters:?}");
        assert_eq!(counters.replica_wait, None);
    }

    #[test]
    fn shares_are_of_the_time_and_of_the_thread_with_the_most() {
        let process = |waits: &[u64]| Process {
            threads: (0..).zip(waits.iter().map(|waiting| Thread { on: 0, waiting: *waiting })).collect(),
            switches: 0,
        };
        let before = Sample { replicas: vec![process(&[0, 5])], ..Sample::default() };
        let after = Sample { replicas: vec![process(&[500_000_000, 5, 100])], ..Sample::default() };
        assert_eq!(before.until(&after, 1.0).replica_wait, Some(0.5));
        assert_eq!(before.until(&after, 1.0).node_wait, None);
    }

    #[test]
    fn what_others_use_is_what_is_neither_idle_nor_ours() {
        let process = |on| Some(Process { threads: [(1, Thread { on, waiting: 0 })].into(), switches: 0 });
        let ticks = |all, niced, idle| Ticks { processors: 4, all, niced, idle, stolen: 0 };
        let before = Sample { node: process(0), ticks: ticks(1000, 100, 500), ..Sample::default() };
        let after = Sample { node: process(700_000_000), ticks: ticks(1400, 150, 600), ..Sample::default() };
        let counters = before.until(&after, 1.0);
        assert!((counters.idle_processors - 1.0).abs() < 1e-9, "{counters:?}");
        assert!((counters.niced_processors - 0.5).abs() < 1e-9, "{counters:?}");
        assert!((counters.foreign_processors - 1.8).abs() < 1e-9, "{counters:?}");
    }
}
