//! The machine under measurement: its properties, and the processor time that its hypervisor stole.

use std::fs;

use serde::Serialize;

use crate::error::{Failure, Outcome};

/// Time of all processors since the machine started (proc(5), `stat`), in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessorTime {
    total: u64,
    stolen: u64,
}

impl ProcessorTime {
    /// Reads it.
    pub fn now() -> Outcome<ProcessorTime> {
        let text = fs::read_to_string("/proc/stat")?;
        ProcessorTime::parse(&text).ok_or_else(|| Failure("/proc/stat is not understood".into()))
    }

    /// user nice system idle iowait irq softirq steal; user and nice contain the later fields.
    fn parse(stat: &str) -> Option<ProcessorTime> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().take(8);
        let ticks: Vec<u64> = fields.map(|field| field.parse().ok()).collect::<Option<_>>()?;
        Some(ProcessorTime { total: ticks.iter().sum(), stolen: *ticks.get(7)? })
    }

    /// The stolen fraction of the time since `before`, 0 to 1.
    pub fn steal_since(self, before: ProcessorTime) -> f64 {
        let total = self.total.saturating_sub(before.total).max(1);
        self.stolen.saturating_sub(before.stolen) as f64 / total as f64
    }
}

/// The machine of the results.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name; empty if the kernel does not report it.
    pub processor: String,
    /// Processors that this process may use.
    pub processors: usize,
    /// The kernel's release.
    pub kernel: String,
    /// `release`, or `debug`: figures of a debug build say nothing about speed.
    pub build: &'static str,
    /// Idle processors do not halt.
    pub awake: bool,
    /// The load average of the last minute before the first measurement: other activity.
    pub load_average: f64,
}

impl Machine {
    /// The machine that runs this process; `awake`: its idle processors are held awake.
    pub fn here(awake: bool) -> Machine {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let name = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let name = name.and_then(|line| line.split_once(": ")).map_or("", |(_, name)| name);
        Machine {
            processor: name.into(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            awake,
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            load_average: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|one| one.parse().ok())
                .unwrap_or(0.0),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Machine { processor, processors, kernel, awake, build, load_average } = self;
        let idle = if *awake { "held awake" } else { "which halt when idle" };
        write!(
            f,
            "{processors} processors ({processor}), {idle}; Linux {kernel}, {build} build, load average {load_average}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steal_is_a_part_of_all_time() {
        let before = ProcessorTime::parse("cpu  10 0 10 70 5 0 0 5 3 3\ncpu0 1 2").unwrap();
        assert_eq!(before, ProcessorTime { total: 100, stolen: 5 });
        let after = ProcessorTime::parse("cpu  40 0 30 90 5 0 0 35 3 3\n").unwrap();
        assert!((after.steal_since(before) - 0.3).abs() < 1e-9);
        assert!(before.steal_since(before) == 0.0);
        assert_eq!(ProcessorTime::parse("cpu 1 2 3"), None, "a kernel that does not count steal");
        assert!(ProcessorTime::now().is_ok());
    }

    #[test]
    fn the_machine_is_described() {
        let machine = Machine::here(false);
        assert!(machine.processors > 0 && !machine.kernel.is_empty(), "{machine}");
    }
}
