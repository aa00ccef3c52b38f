//! Who makes the load: Weir's generator or fio's nbd engine. Both report the same few figures.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use weir_load::nbd::Uri;
use weir_load::run::{Monitor, run};
use weir_load::size::Size;
use weir_load::target::Target;
use weir_load::workload::{Access, Workload};

use crate::error::{Failure, Outcome};

/// Load before each measurement that is not counted.
pub const WARMUP: Duration = Duration::from_millis(300);

/// Who makes the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// `weir bench`'s generator, in this process.
    Weir,
    /// `fio` with its nbd engine.
    Fio,
}

/// One measurement's load: 4 KiB blocks at random.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Reads or writes.
    pub access: Access,
    /// Requests in flight.
    pub depth: u32,
    /// How long.
    pub runtime: Duration,
    /// Bytes of the disk.
    pub size: u64,
}

/// What a driver measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Requests per second.
    pub iops: f64,
    /// Median latency, in nanoseconds.
    pub p50: f64,
    /// 99th percentile of the latency, in nanoseconds.
    pub p99: f64,
    /// Seconds that were counted.
    pub seconds: f64,
    /// CPU seconds of the driver in that time.
    pub cpu: f64,
}

impl Load {
    /// `randread 4k qd32`, as in the results.
    pub fn name(&self) -> String {
        format!("{} 4k qd{}", self.access, self.depth)
    }

    fn workload(&self) -> Workload {
        Workload {
            access: self.access,
            queue_depth: self.depth,
            runtime: Some(self.runtime),
            warmup: WARMUP,
            size: Some(Size(self.size)),
            ..Workload::default()
        }
    }
}

impl Driver {
    /// Makes the load on an export.
    pub fn drive(self, uri: &Uri, load: &Load) -> Outcome<Figures> {
        match self {
            Driver::Weir => with_weir(&Target::Nbd(uri.clone()), load),
            Driver::Fio => with_fio(&["--ioengine=nbd", &format!("--uri={uri}")], load),
        }
    }

    /// Makes the load on nothing.
    pub fn drive_null(self, load: &Load) -> Outcome<Figures> {
        match self {
            Driver::Weir => with_weir(&Target::Null { size: load.size }, load),
            Driver::Fio => with_fio(&["--ioengine=null"], load),
        }
    }
}

fn with_weir(target: &Target, load: &Load) -> Outcome<Figures> {
    let summary = run(target, &load.workload(), true, &Monitor::new())?;
    if let Some(error) = &summary.first_error {
        return Err(Failure(format!("{target}: {error}")));
    }
    let latency = summary.kinds.first().map(|kind| kind.latency_ns).unwrap_or_default();
    Ok(Figures {
        iops: summary.iops(),
        p50: latency.p50 as f64,
        p99: latency.p99 as f64,
        seconds: summary.runtime_seconds,
        cpu: summary.cpu_seconds.unwrap_or_default(),
    })
}

fn with_fio(engine: &[&str], load: &Load) -> Outcome<Figures> {
    let mut command = Command::new("fio");
    command.args(["--name=x", "--thread", "--time_based", "--bs=4k", "--output-format=json"]).args(engine);
    // Its usual percentiles leave out the time that it spends submitting; ours count from the submission.
    command.args(["--clat_percentiles=0", "--lat_percentiles=1"]);
    command.arg(format!("--rw={}", load.access)).arg(format!("--iodepth={}", load.depth));
    command.arg(format!("--size={}", load.size));
    command.arg(format!("--runtime={}ms", load.runtime.as_millis()));
    command.arg(format!("--ramp_time={}ms", WARMUP.as_millis()));
    let output =
        command.stdin(Stdio::null()).output().map_err(Failure::of("fio (`make setup` installs it)"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(Failure(format!("fio failed: {}{}", text, String::from_utf8_lossy(&output.stderr))));
    }
    // Messages may stand before the JSON text.
    let json = text.find('{').map_or("", |start| &text[start..]);
    let value: Value = serde_json::from_str(json).map_err(Failure::of("fio's output is not JSON"))?;
    parse_fio(&value, load).ok_or_else(|| Failure("fio's output lacks a figure".into()))
}

fn parse_fio(value: &Value, load: &Load) -> Option<Figures> {
    let job = value.get("jobs")?.get(0)?;
    let kind = job.get(if load.access.writes() { "write" } else { "read" })?;
    let seconds = kind.get("runtime")?.as_f64()? / 1e3;
    let latency = kind.get("lat_ns")?.get("percentile")?;
    // Percentages of the job's run time. With a ramp they cover what is counted.
    let cpu_percent = job.get("usr_cpu")?.as_f64()? + job.get("sys_cpu")?.as_f64()?;
    Some(Figures {
        iops: kind.get("iops")?.as_f64()?,
        p50: latency.get("50.000000")?.as_f64()?,
        p99: latency.get("99.000000")?.as_f64()?,
        seconds,
        cpu: cpu_percent / 100.0 * seconds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(access: Access) -> Load {
        Load { access, depth: 4, runtime: Duration::from_millis(300), size: 1 << 30 }
    }

    #[test]
    fn fio_and_the_generator_report_the_same_figures() {
        for driver in [Driver::Weir, Driver::Fio] {
            for access in [Access::RandRead, Access::RandWrite] {
                let figures = driver.drive_null(&load(access)).unwrap();
                assert!((0.2..0.8).contains(&figures.seconds), "{driver:?} {figures:?}");
                assert!(
                    figures.iops > 10_000.0 && figures.p50 > 0.0 && figures.cpu > 0.0,
                    "{driver:?} {figures:?}"
                );
            }
        }
    }

    #[test]
    fn fio_without_a_figure_is_refused() {
        assert!(parse_fio(&serde_json::json!({"jobs": [{"read": {}}]}), &load(Access::RandRead)).is_none());
    }
}
