//! The block layer's own tracepoints, by bpftrace(8): how long requests wait before they are dispatched and how long the device
//! takes, in which order they arrive, and from how many threads.
//!
//! One bpftrace runs for the whole measurement and only counts; it prints its maps when it is sent SIGUSR1, and the
//! difference of two prints is what happened between. It needs root and bpftrace 0.17 or later; where tracefs is not mounted,
//! bpftrace gets one of its own.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::tracefs::{self, Refused};

/// Time limit for bpftrace to compile and attach.
const START: Duration = Duration::from_secs(20);

/// Time limit of a print.
const PRINT: Duration = Duration::from_secs(3);

/// Keys of each map at most (P10): requests under way, and threads.
const MOST_KEYS: &str = "65536";

/// The events at a block device during a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traced {
    /// Requests that arrived at the block layer.
    pub arrivals: u64,
    /// Of those, the ones that came for a lower address than the one before them.
    pub inversions: u64,
    /// Threads that they came from.
    pub submitters: u64,
    /// Mean time from arrival to dispatch, in nanoseconds; absent without requests.
    pub queue_ns: Option<f64>,
    /// Mean time from dispatch to completion, in nanoseconds; absent without requests.
    pub device_ns: Option<f64>,
}

/// Why a device cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// No such device.
    #[error("there is no block device {0:?}; ls /sys/class/block lists them")]
    NoDevice(String),
    /// bpftrace is not there, or cannot be run.
    #[error("bpftrace cannot be run: {0}; install it (Debian: bpftrace) and be root")]
    NotRun(#[source] std::io::Error),
    /// The kernel's tracepoints are not to be found.
    #[error(
        "tracefs is not mounted and cannot be mounted here: {0}; as root: mount -t tracefs tracefs /sys/kernel/tracing"
    )]
    NoTracefs(#[source] std::io::Error),
    /// It ended, or did not begin to count.
    #[error("bpftrace does not trace block requests: {0}")]
    NotTracing(String),
}

/// Count and sum of nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    count: u64,
    total: u64,
}

/// bpftrace's counts since it began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Print {
    arrivals: u64,
    inversions: u64,
    queue: Times,
    device: Times,
    /// Requests by thread.
    threads: BTreeMap<String, u64>,
}

/// A bpftrace at work. Ends it when dropped.
#[derive(Debug)]
pub struct Tracer {
    child: Child,
    lines: Receiver<String>,
    device: String,
}

impl Tracer {
    /// Starts counting at a block device (its name in `/sys/class/block`, a whole disk).
    ///
    /// # Errors
    /// There is no such device, no bpftrace, no tracefs, or it may not trace.
    pub fn start(device: &str) -> Result<Tracer, TraceError> {
        let number = device_number(device).ok_or_else(|| TraceError::NoDevice(device.to_owned()))?;
        let mut command = Command::new("bpftrace");
        command.args(["-f", "json", "-e", &program(number)]).env("BPFTRACE_MAX_MAP_KEYS", MOST_KEYS);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = tracefs::spawn(command).map_err(|refused| match refused {
            Refused::NotRun(error) => TraceError::NotRun(error),
            Refused::NoTracefs(error) => TraceError::NoTracefs(error),
        })?;
        let (send, lines) = channel();
        child.stdout.take().into_iter().for_each(|pipe| forward(pipe, send.clone()));
        child.stderr.take().into_iter().for_each(|pipe| forward(pipe, send.clone()));
        drop(send);
        let mut tracer = Tracer { child, lines, device: device.to_owned() };
        tracer.wait_for_beat()?;
        Ok(tracer)
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The program beats when all its probes are attached.
    fn wait_for_beat(&mut self) -> Result<(), TraceError> {
        let mut said = Vec::new();
        loop {
            match self.lines.recv_timeout(START) {
                Ok(line) if line.contains("beat") && line.contains("printf") => return Ok(()),
                Ok(line) => said.push(line),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(TraceError::NotTracing(format!(
                        "it has not begun after {} s",
                        START.as_secs()
                    )));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let error = said.iter().rfind(|line| line.contains("ERROR") && !line.contains("RLIMIT"));
                    let error = error.or(said.last()).cloned();
                    return Err(TraceError::NotTracing(
                        error.unwrap_or_else(|| "it ended at once".to_owned()),
                    ));
                }
            }
        }
    }

    /// Its counts so far; `None` if it does not answer any more.
    pub fn print(&mut self) -> Option<Print> {
        while self.lines.try_recv().is_ok() {}
        kill_process(Pid::from_child(&self.child), Signal::USR1).ok()?;
        let mut print = Print::default();
        loop {
            let line = self.lines.recv_timeout(PRINT).ok()?;
            if print.take(&line) {
                return Some(print);
            }
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // The kernel detaches its probes with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Line by line, until the pipe ends, and that with the child, or the receiver is gone.
fn forward(pipe: impl Read + Send + 'static, lines: Sender<String>) {
    thread::spawn(move || {
        BufReader::new(pipe).lines().map_while(Result::ok).try_for_each(|line| lines.send(line))
    });
}

/// The kernel's number of a device: twelve bits of major number above twenty of minor.
fn device_number(device: &str) -> Option<u32> {
    if device.is_empty() || device.contains('/') {
        return None;
    }
    let text = std::fs::read_to_string(Path::new("/sys/class/block").join(device).join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse::<u32>().ok()? << 20) | minor.parse::<u32>().ok()?)
}

/// Maps are printed in the order of their names; `@zz` says that all were. A merged request is dispatched with another.
fn program(device: u32) -> String {
    format!(
        "BEGIN {{ @zz = 1; @last = (uint64)0; }}
tracepoint:block:block_bio_queue /args->dev == {device}/ {{
  @arrivals = count(); @threads[tid] = count();
  if (args->sector < @last) {{ @inversions = count(); }}
  @last = args->sector; @q[args->sector] = nsecs;
}}
tracepoint:block:block_bio_backmerge, tracepoint:block:block_bio_frontmerge /args->dev == {device}/ {{
  delete(@q[args->sector]);
}}
tracepoint:block:block_rq_issue /args->dev == {device}/ {{
  $queued = @q[args->sector];
  if ($queued > 0) {{ @queue = stats(nsecs - $queued); delete(@q[args->sector]); }}
  @d[args->sector] = nsecs;
}}
tracepoint:block:block_rq_complete /args->dev == {device}/ {{
  $issued = @d[args->sector];
  if ($issued > 0) {{ @device = stats(nsecs - $issued); delete(@d[args->sector]); }}
}}
interval:ms:200 {{ printf(\"beat\\n\"); }}
"
    )
}

impl Print {
    /// Takes a line of a print; whether it was the last.
    fn take(&mut self, line: &str) -> bool {
        let Ok(value) = serde_json::from_str::<Value>(line) else { return false };
        let Some(data) = value["data"].as_object() else { return false };
        let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or(0);
        for (name, value) in data {
            let times = || Times { count: number(value, "count"), total: number(value, "total") };
            match name.as_str() {
                "@arrivals" => self.arrivals = value.as_u64().unwrap_or(0),
                "@inversions" => self.inversions = value.as_u64().unwrap_or(0),
                "@queue" => self.queue = times(),
                "@device" => self.device = times(),
                "@threads" => {
                    let threads = value.as_object().into_iter().flatten();
                    self.threads =
                        threads.map(|(id, count)| (id.clone(), count.as_u64().unwrap_or(0))).collect();
                }
                "@zz" => return true,
                _ => {}
            }
        }
        false
    }

    /// The difference from this print to a later one.
    #[must_use]
    pub fn until(&self, later: &Print) -> Traced {
        let mean = |before: Times, after: Times| {
            let count = after.count.saturating_sub(before.count);
            (count > 0).then(|| after.total.saturating_sub(before.total) as f64 / count as f64)
        };
        let new = |(id, count): &(&String, &u64)| **count > self.threads.get(*id).copied().unwrap_or(0);
        Traced {
            arrivals: later.arrivals.saturating_sub(self.arrivals),
            inversions: later.inversions.saturating_sub(self.inversions),
            submitters: later.threads.iter().filter(new).count() as u64,
            queue_ns: mean(self.queue, later.queue),
            device_ns: mean(self.device, later.device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = r#"{"type": "printf", "data": "beat\n"}
{"type": "map", "data": {"@arrivals": 500}}
{"type": "stats", "data": {"@device": {"count": 500, "average": 261347, "total": 130673832}}}
{"type": "map", "data": {"@inversions": 3}}
{"type": "map", "data": {"@last": 63872}}
{"type": "stats", "data": {"@queue": {"count": 500, "average": 4435, "total": 2217576}}}
{"type": "map", "data": {"@threads": {"18085": 499, "7": 1}}}
{"type": "map", "data": {"@zz": 1}}"#;

    fn print(text: &str) -> Print {
        let mut print = Print::default();
        let ends: Vec<bool> = text.lines().map(|line| print.take(line)).collect();
        assert_eq!(ends.iter().position(|end| *end), Some(ends.len() - 1), "the last line ends it");
        print
    }

    #[test]
    fn prints_are_read_and_subtracted() {
        let (nothing, first) = (Print::default(), print(PRINTED));
        let traced = nothing.until(&first);
        assert_eq!((traced.arrivals, traced.inversions, traced.submitters), (500, 3, 2));
        assert_eq!(traced.device_ns, Some(261_347.664));
        let second =
            print(&PRINTED.replace("500", "700").replace("130673832", "150673832").replace("499", "600"));
        let between = first.until(&second);
        assert_eq!((between.arrivals, between.inversions, between.submitters), (200, 0, 1));
        assert_eq!(between.device_ns, Some(100_000.0));
        assert_eq!(second.until(&second), Traced::default());
    }

    #[test]
    fn what_is_no_device_is_said_before_anything_is_run() {
        for name in ["", "none0", "../net/lo"] {
            let error = Tracer::start(name).unwrap_err();
            assert!(matches!(error, TraceError::NoDevice(_)), "{error}");
        }
        assert!(program((7 << 20) | 1).contains("args->dev == 7340033"));
    }
}
