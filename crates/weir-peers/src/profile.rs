//! Profile of a server's processor time: `perf` samples of its call chains, grouped by the steps of a request.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use weir_block::Nanos;

use crate::error::{Failure, Outcome};

/// Samples per second of processor time. Not a divisor of the kernel's tick.
const FREQUENCY: &str = "4999";
/// Timeout for `perf` to open its events.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// One server's processor time under one load.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// The load.
    pub cell: String,
    /// The server.
    pub subject: String,
    /// Requests per second.
    pub iops: f64,
    /// Processor time of the server for one request, in microseconds.
    #[serde(rename = "server_cpu_us_per_request")]
    pub server_us: f64,
    /// Processor time of the driver for one request, in microseconds.
    #[serde(rename = "driver_cpu_us_per_request")]
    pub driver_us: f64,
    /// The tool that measured the groups.
    pub source: String,
    /// Uses of the processor time, largest first.
    pub groups: Vec<Group>,
}

/// A step of a request, and its part of the server's processor time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// The step's name.
    pub name: String,
    /// 0 to 1.
    pub fraction: f64,
}

/// A recording in progress.
pub struct Recording {
    perf: Child,
    file: tempfile::NamedTempFile,
}

impl Recording {
    /// Records `pid` from now on.
    pub fn start(pid: u32, directory: &Path) -> Outcome<Recording> {
        let file = tempfile::NamedTempFile::new_in(directory)?;
        let mut command = Command::new("perf");
        command.args(["record", "--quiet", "-e", "cpu-clock", "-g", "-F", FREQUENCY, "-p", &pid.to_string()]);
        command.arg("-o").arg(file.path());
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let perf = command.spawn().map_err(Failure::of("perf (Debian's linux-perf) does not start"))?;
        let mut recording = Recording { perf, file };
        recording.wait_until_it_records()?;
        Ok(recording)
    }

    /// Waits for the file's header, which `perf` writes once the events are open.
    fn wait_until_it_records(&mut self) -> Outcome<()> {
        let deadline = Nanos::now() + START_TIMEOUT;
        while std::fs::metadata(self.file.path())?.len() == 0 {
            if let Some(status) = self.perf.try_wait()? {
                return Err(Failure(format!("perf cannot record here: {status}")));
            }
            if Nanos::now() >= deadline {
                return Err(Failure("perf does not begin to record".into()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the recording. Returns the groups, largest first, and the number of samples.
    pub fn groups(mut self) -> Outcome<(Vec<Group>, usize)> {
        let number = i32::try_from(self.perf.id()).ok().and_then(Pid::from_raw);
        kill_process(number.ok_or_else(|| Failure("perf has no number".into()))?, Signal::INT)?;
        // `perf` writes its data and then ends itself by the same signal: the exit status has no information.
        self.perf.wait()?;
        let mut script = Command::new("perf");
        script.args(["script", "--no-inline", "-F", "ip,sym", "-i"]).arg(self.file.path());
        let output = script.stdin(Stdio::null()).output()?;
        let groups = grouped(&String::from_utf8_lossy(&output.stdout));
        match groups.1 {
            0 => Err(Failure("perf took no samples".into())),
            _ => Ok(groups),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Only fails when it has ended already.
        let _ = self.perf.kill();
        let _ = self.perf.wait();
    }
}

/// Samples are paragraphs; each of their lines is an address and a symbol, the innermost call first.
fn grouped(script: &str) -> (Vec<Group>, usize) {
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut chain: Vec<(bool, &str)> = Vec::new();
    let mut samples = 0;
    for line in script.lines().chain([""]) {
        match line.trim().split_once(' ') {
            Some((address, symbol)) => chain.push((is_kernel(address), symbol.trim())),
            None if chain.is_empty() => {}
            None => {
                *counts.entry(group(&chain)).or_default() += 1;
                samples += 1;
                chain.clear();
            }
        }
    }
    let group = |(name, count)| Group { name, fraction: count as f64 / samples as f64 };
    let mut groups: Vec<Group> = counts.into_iter().map(group).collect();
    groups.sort_by(|one, other| {
        other.fraction.total_cmp(&one.fraction).then_with(|| one.name.cmp(&other.name))
    });
    (groups, samples)
}

/// The upper half of the addresses is the kernel's.
fn is_kernel(address: &str) -> bool {
    u64::from_str_radix(address, 16).is_ok_and(|address| address >> 63 == 1)
}

/// Groups of kernel functions by parts of their names, in order of precedence: a copy within a receive belongs to the receive.
const KERNEL: [(&str, &[&str]); 6] = [
    ("kernel: receive from the socket", &["_recvmsg", "sys_recv", "sock_read_iter"]),
    ("kernel: send to the socket", &["_sendmsg", "sys_send", "sock_write_iter"]),
    ("kernel: busy-polling", &["sched_yield"]),
    (
        "kernel: file I/O",
        &["io_read", "io_write", "vfs_", "_file_read", "_file_write", "shmem_", "ext4_", "blk_"],
    ),
    ("kernel: io_uring and wake-ups", &["io_uring", "io_", "schedule", "poll", "wake", "eventfd"]),
    ("kernel: interrupts", &["irq", "sysvec", "tick"]),
];

/// Groups of the process's functions by parts of their names.
const USER: [(&str, &[&str]); 11] = [
    ("NBD protocol (weir-export, weir-nbd)", &["weir_export", "weir_nbd"]),
    ("write log and replication (weir-accel)", &["weir_accel"]),
    ("frames to and from peers (weir-net)", &["weir_net"]),
    ("backing (weir-volume)", &["weir_volume"]),
    ("reactor (weir-block)", &["weir_block7reactor", "weir_block::reactor", "io_uring"]),
    ("layers, meters, buffers (weir-block)", &["weir_block"]),
    ("profile of the disk (weir-profile)", &["weir_profile", "weir_load"]),
    ("shard's turn (weir-node)", &["weir_node"]),
    ("memory copies", &["memcpy", "memmove", "memset", "memcmp"]),
    ("memory allocation", &["malloc", "free", "realloc", "alloc"]),
    ("clock and system call stubs", &["clock_gettime", "vdso", "yield", "recv", "send", "syscall", "__GI_"]),
];

fn group(chain: &[(bool, &str)]) -> String {
    let kernel: Vec<&str> = chain.iter().filter(|(kernel, _)| *kernel).map(|(_, symbol)| *symbol).collect();
    let is_any = |symbol: &str, parts: &[&str]| parts.iter().any(|part| symbol.contains(part));
    let found = match chain.first() {
        Some((true, _)) => KERNEL.iter().find(|(_, parts)| kernel.iter().any(|symbol| is_any(symbol, parts))),
        Some((false, symbol)) => USER.iter().find(|(_, parts)| is_any(symbol, parts)),
        None => None,
    };
    match (found, chain.first()) {
        (Some((name, _)), _) => (*name).to_owned(),
        (None, Some((true, _))) => "kernel: other".to_owned(),
        (None, _) => "other functions of the process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_grouped_by_what_a_request_needs_them_for() {
        let script = "\
\tffffffff81a0 copy_user_generic
\tffffffff81a00000 rep_movs_alternative
\tffffffff81b00000 unix_stream_recvmsg
\tffffffff81c00000 do_syscall_64
\t    7f0000000010 recv

\tffffffff81a00000 rep_movs_alternative
\tffffffff81b00010 shmem_file_read_iter
\tffffffff81b00020 io_read
\tffffffff81b00030 io_uring_enter

\t    55d000000010 _ZN11weir_export3nbd4turn17h0123456789abcdefE
\t    55d000000020 [unknown]

\t    55d000000010 weir_export::nbd::turn

\t    55d000000030 main
";
        let (groups, samples) = grouped(&script.replace("ffffffff81a0 ", "ffffffff81a00000 "));
        assert_eq!(samples, 5);
        let expected = [
            ("NBD protocol (weir-export, weir-nbd)", 0.4),
            ("kernel: file I/O", 0.2),
            ("kernel: receive from the socket", 0.2),
            ("other functions of the process", 0.2),
        ];
        assert_eq!(groups, expected.map(|(name, fraction)| Group { name: name.to_owned(), fraction }));
        assert_eq!(grouped(""), (Vec::new(), 0));
    }
}
