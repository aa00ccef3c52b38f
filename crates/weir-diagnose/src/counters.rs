//! What the operating system counted during a run: processor time, waiting for it, the network.
//!
//! From `/proc/PID/task/TID/schedstat` (time on a processor, time ready and waiting for one; scheduler statistics of the
//! Linux kernel), `/proc/PID/status` (context switches), `/proc/stat` (steal), `/proc/net/dev`, `/proc/net/snmp`
//! (retransmitted segments) and `/proc/diskstats` (time with I/O under way). Two samples make the counters.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

/// Counters of one run. Shares are of the time between the samples, 0 to 1; of several threads the one with the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Seconds between the samples.
    pub seconds: f64,
    /// The share for which a thread of the node that was measured was on a processor.
    pub node_busy: Option<f64>,
    /// The share for which it was ready to run and was not.
    pub node_wait: Option<f64>,
    /// The same of the other nodes.
    pub replica_wait: Option<f64>,
    /// The same of the process that generates load on the exports.
    pub generator_wait: Option<f64>,
    /// The share of all processors' time that the hypervisor gave to others.
    pub steal: f64,
    /// Involuntary context switches of the node, a second.
    pub switches_per_second: Option<f64>,
    /// Bytes that all network interfaces received, a second; loopback among them.
    pub network_bytes_per_second: f64,
    /// TCP segments sent again.
    pub retransmits: u64,
    /// The share for which the busiest block device had I/O under way.
    pub device_busy: f64,
}

/// Whose counters are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processes {
    /// The node that has the disk.
    pub node: Option<u32>,
    /// Other nodes on this machine.
    pub replicas: Vec<u32>,
    /// Who generates load on the exports.
    pub generator: Option<u32>,
}

/// Nanoseconds on a processor and waiting for one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Thread {
    on: u64,
    waiting: u64,
}

/// One look at a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Process {
    threads: BTreeMap<u32, Thread>,
    switches: u64,
}

/// One look at everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    node: Option<Process>,
    replicas: Vec<Process>,
    generator: Option<Process>,
    /// Ticks: all of them, and those that were stolen.
    ticks: (u64, u64),
    received: u64,
    retransmits: u64,
    /// Milliseconds with I/O under way, by device.
    devices: BTreeMap<String, u64>,
}

impl Sample {
    /// Looks. What the machine does not tell is absent or 0.
    #[must_use]
    pub fn take(processes: &Processes) -> Sample {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Sample {
            node: processes.node.and_then(Process::look),
            replicas: processes.replicas.iter().filter_map(|pid| Process::look(*pid)).collect(),
            generator: processes.generator.and_then(Process::look),
            ticks: ticks(&read("/proc/stat")),
            received: received(&read("/proc/net/dev")),
            retransmits: retransmits(&read("/proc/net/snmp")),
            devices: devices(&read("/proc/diskstats")),
        }
    }

    /// What happened from this look to a `later` one, `seconds` (above zero) apart.
    #[must_use]
    pub fn until(&self, later: &Sample, seconds: f64) -> Counters {
        let wait = |before: &Process, after: &Process| before.most(after, seconds, |thread| thread.waiting);
        let both = |before: &Option<Process>, after: &Option<Process>| {
            Some((before.as_ref()?.clone(), after.as_ref()?.clone()))
        };
        let node = both(&self.node, &later.node);
        let (all, stolen) = (
            later.ticks.0 - self.ticks.0.min(later.ticks.0),
            later.ticks.1 - self.ticks.1.min(later.ticks.1),
        );
        let device = |(name, after): (&String, &u64)| {
            after.saturating_sub(self.devices.get(name).copied().unwrap_or(*after)) as f64 / 1e3 / seconds
        };
        Counters {
            seconds,
            node_busy: node.as_ref().map(|(before, after)| before.most(after, seconds, |thread| thread.on)),
            node_wait: node.as_ref().map(|(before, after)| wait(before, after)),
            replica_wait: self
                .replicas
                .iter()
                .zip(&later.replicas)
                .map(|(before, after)| wait(before, after))
                .reduce(f64::max),
            generator_wait: both(&self.generator, &later.generator)
                .map(|(before, after)| wait(&before, &after)),
            steal: if all == 0 { 0.0 } else { stolen as f64 / all as f64 },
            switches_per_second: node
                .map(|(before, after)| after.switches.saturating_sub(before.switches) as f64 / seconds),
            network_bytes_per_second: later.received.saturating_sub(self.received) as f64 / seconds,
            retransmits: later.retransmits.saturating_sub(self.retransmits),
            device_busy: later.devices.iter().map(device).fold(0.0, f64::max),
        }
    }
}

impl Process {
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

/// All ticks, and the stolen ones (the eighth number, proc(5)).
fn ticks(stat: &str) -> (u64, u64) {
    let first = stat.lines().next().unwrap_or_default();
    let numbers: Vec<u64> =
        first.split_whitespace().skip(1).map_while(|word| word.parse().ok()).take(8).collect();
    (numbers.iter().sum(), numbers.get(7).copied().unwrap_or(0))
}

fn received(dev: &str) -> u64 {
    let of_line = |line: &str| line.split_once(':')?.1.split_whitespace().next()?.parse::<u64>().ok();
    dev.lines().filter_map(of_line).sum()
}

/// The value under `RetransSegs`: names and values come in two lines that begin with `Tcp:`.
fn retransmits(snmp: &str) -> u64 {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let mut both = names.split_whitespace().zip(values.split_whitespace());
    both.find(|(name, _)| *name == "RetransSegs").and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
}

/// Milliseconds with I/O under way: the tenth number after the name (iostats of the kernel's block layer).
fn devices(diskstats: &str) -> BTreeMap<String, u64> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace().skip(2);
        Some((words.next()?.to_owned(), words.nth(9)?.parse().ok()?))
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
        assert_eq!(ticks("cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 1"), (36, 8));
        assert_eq!(involuntary("Name:\tx\nnonvoluntary_ctxt_switches:\t17\n"), 17);
        let dev = "Inter-|   Receive\n face |bytes\n    lo: 1000 1 0\n  eth0: 234 2 0\n";
        assert_eq!(received(dev), 1234);
        let snmp = "Ip: A B\nIp: 1 2\nTcp: InSegs RetransSegs X\nTcp: 10 7 1\n";
        assert_eq!(retransmits(snmp), 7);
        let disks = " 259 0 nvme0n1 1 2 3 4 5 6 7 8 9 1010 11 0\n";
        assert_eq!(devices(disks), BTreeMap::from([("nvme0n1".to_owned(), 1010)]));
    }

    /// This process computes for a while: it is seen on a processor.
    #[test]
    fn a_busy_process_is_seen() {
        let me = Processes { node: Some(std::process::id()), ..Processes::default() };
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
}
