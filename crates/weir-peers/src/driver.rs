//! The load generators: Weir's, or fio's nbd engine. Both report the same few figures.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use weir_block::Nanos;
use weir_block::size::Size;
use weir_load::cpu;
use weir_load::run::{Monitor, run};
use weir_load::summary::Summary;
use weir_load::tally::{IoKind, Tally};
use weir_load::target::Target;
use weir_load::workload::{Access, Workload};
use weir_nbd::Uri;

use crate::error::{Failure, Outcome};

/// A load generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// `weir bench`'s generator, in this process.
    Weir,
    /// `fio` with its nbd engine.
    Fio,
}

/// One measurement's load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Reads or writes.
    pub access: Access,
    /// Requests in flight.
    pub depth: u32,
    /// Size of a request.
    pub block: Size,
    /// Duration of the measurement.
    pub runtime: Duration,
    /// Duration of the warm-up, which does not count.
    pub warmup: Duration,
    /// Size of the disk, in bytes.
    pub size: u64,
}

/// A driver's measurements.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Requests per second.
    pub iops: f64,
    /// Median latency, in nanoseconds.
    pub p50: f64,
    /// 99th percentile of the latency, in nanoseconds.
    pub p99: f64,
    /// Seconds measured.
    pub seconds: f64,
    /// Seconds under load, including the warm-up.
    pub under_load: f64,
    /// CPU seconds of the driver's threads in the measured time.
    pub cpu: f64,
}

impl Figures {
    /// Of this thread's writes since `start`, when it had used that much processor time.
    pub fn of_writes(tally: &Tally, start: Nanos, used: Duration) -> Figures {
        let seconds = (Nanos::now() - start).as_secs_f64();
        let latency = &tally.kind(IoKind::Write).latency;
        Figures {
            iops: tally.ios() as f64 / seconds,
            p50: latency.value_at_quantile(0.5) as f64,
            p99: latency.value_at_quantile(0.99) as f64,
            seconds,
            under_load: seconds,
            cpu: (cpu::of_this_thread() - used).as_secs_f64(),
        }
    }
}

impl Load {
    /// `randread 4k qd32`, as in the results.
    pub fn name(&self) -> String {
        format!("{} {}k qd{}", self.access, self.block.0 >> 10, self.depth)
    }

    /// The same, for Weir's generator.
    pub fn workload(&self) -> Workload {
        Workload {
            access: self.access,
            queue_depth: self.depth,
            block_size: self.block,
            runtime: Some(self.runtime),
            warmup: self.warmup,
            size: Some(Size(self.size)),
            ..Workload::default()
        }
    }
}

impl Driver {
    /// All drivers.
    pub const ALL: [Driver; 2] = [Driver::Weir, Driver::Fio];

    /// Its name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Driver::Weir => "weir",
            Driver::Fio => "fio",
        }
    }

    /// Drives an export.
    pub fn drive(self, uri: &Uri, load: &Load) -> Outcome<Figures> {
        match self {
            Driver::Weir => with_weir(&Target::Nbd(uri.clone()), load),
            Driver::Fio => with_fio(&["--ioengine=nbd", &format!("--uri={uri}")], load),
        }
    }

    /// Drives the null target.
    pub fn drive_null(self, load: &Load) -> Outcome<Figures> {
        match self {
            Driver::Weir => with_weir(&Target::Null { size: load.size }, load),
            Driver::Fio => with_fio(&["--ioengine=null"], load),
        }
    }
}

/// Drives any target with Weir's generator, in this process.
pub fn with_weir(target: &Target, load: &Load) -> Outcome<Figures> {
    let summary = run(target, &load.workload(), true, &Monitor::new())?;
    if let Some(error) = &summary.first_error {
        return Err(Failure(format!("{target}: {error}")));
    }
    Ok(figures(&summary, load.warmup))
}

/// One sequential pass of writes.
pub fn whole() -> Workload {
    Workload {
        access: Access::Write,
        block_size: Size(1 << 20),
        queue_depth: 4,
        runtime: None,
        ..Workload::default()
    }
}

/// Writes all of a target once.
pub fn fill(target: &Target) -> Outcome<()> {
    let summary = run(target, &whole(), true, &Monitor::new())?;
    match summary.first_error {
        Some(error) => Err(Failure(format!("{target} cannot be filled: {error}"))),
        None => Ok(()),
    }
}

/// The figures of a run of Weir's generator.
pub fn figures(summary: &Summary, warmup: Duration) -> Figures {
    let latency = summary.kinds.first().map(|kind| kind.latency_ns).unwrap_or_default();
    Figures {
        iops: summary.iops(),
        p50: latency.p50 as f64,
        p99: latency.p99 as f64,
        seconds: summary.runtime_seconds,
        under_load: summary.runtime_seconds + warmup.as_secs_f64(),
        cpu: summary.cpu_seconds.unwrap_or_default(),
    }
}

/// Drives a file with the program `weir bench` in a process of its own.
pub fn weir_process(program: &Path, file: &Path, load: &Load) -> Outcome<Figures> {
    let run = |runtime: Duration| {
        let mut command = Command::new(program);
        command.arg("bench").arg(file).args(["--output", "json", "--warmup", "0 s", "--no-prefill"]);
        command.args(["--bs", &load.block.to_string(), "--rw", &load.access.to_string()]);
        command.args(["--qd", &load.depth.to_string()]);
        command.args(["--size", &load.size.to_string(), "--runtime", &format!("{} ms", runtime.as_millis())]);
        let summary: Summary = serde_json::from_value(json_of(&mut command)?)
            .map_err(Failure::of("weir bench prints another result than this program reads"))?;
        match summary.first_error {
            Some(error) => Err(Failure(format!("{}: {error}", file.display()))),
            None => Ok(figures(&summary, Duration::ZERO)),
        }
    };
    without_the_start(load, run)
}

/// Drives a file with `fio --ioengine=io_uring`, registered file and buffers, and the additional `options`.
pub fn fio_process(options: &[&str], file: &Path, load: &Load) -> Outcome<Figures> {
    let run = |runtime: Duration| {
        let mut command = fio_command(&Load { runtime, warmup: Duration::ZERO, ..*load });
        command.args(["--ioengine=io_uring", "--registerfiles=1", "--fixedbufs=1", "--direct=1"]);
        command.args(options).arg(format!("--filename={}", file.display()));
        of_fio(&mut command, load)
    };
    without_the_start(load, run)
}

/// Figures of a process. Its CPU seconds exclude start and end: the CPU seconds of a run of one millisecond are subtracted.
fn without_the_start(load: &Load, run: impl Fn(Duration) -> Outcome<Figures>) -> Outcome<Figures> {
    let timed = |runtime| {
        let before = cpu::of_ended_children();
        let figures = run(runtime)?;
        Ok::<_, Failure>((figures, cpu::of_ended_children() - before))
    };
    let (_, start) = timed(Duration::from_millis(1))?;
    let (figures, whole) = timed(load.runtime)?;
    Ok(Figures { cpu: whole.saturating_sub(start).as_secs_f64(), ..figures })
}

fn with_fio(engine: &[&str], load: &Load) -> Outcome<Figures> {
    let mut command = fio_command(load);
    of_fio(command.args(engine), load)
}

fn fio_command(load: &Load) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=x", "--thread", "--time_based", "--output-format=json"]);
    command.arg(format!("--bs={}", load.block.0));
    // Weir's generator does not track the blocks already drawn either.
    command.arg("--norandommap=1");
    // fio's default percentiles exclude the time of submitting; ours count from the submission.
    command.args(["--clat_percentiles=0", "--lat_percentiles=1"]);
    command.arg(format!("--rw={}", load.access)).arg(format!("--iodepth={}", load.depth));
    command.arg(format!("--size={}", load.size));
    command.arg(format!("--runtime={}ms", load.runtime.as_millis()));
    if !load.warmup.is_zero() {
        command.arg(format!("--ramp_time={}ms", load.warmup.as_millis()));
    }
    command
}

fn of_fio(command: &mut Command, load: &Load) -> Outcome<Figures> {
    parse_fio(&json_of(command)?, load).ok_or_else(|| Failure("fio's output lacks a figure".into()))
}

/// The JSON that a program prints.
fn json_of(command: &mut Command) -> Outcome<Value> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(Failure::of(format!("{name} (`make setup` installs what is not Weir's)")))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(Failure(format!("{name} failed: {text}{}", String::from_utf8_lossy(&output.stderr))));
    }
    // Messages of fio may stand before the JSON text.
    let json = text.find('{').map_or("", |start| &text[start..]);
    serde_json::from_str(json).map_err(Failure::of(format!("the output of {name} is not JSON")))
}

fn parse_fio(value: &Value, load: &Load) -> Option<Figures> {
    let job = value.get("jobs")?.get(0)?;
    let kind = job.get(if load.access.writes() { "write" } else { "read" })?;
    let seconds = kind.get("runtime")?.as_f64()? / 1e3;
    let latency = kind.get("lat_ns")?.get("percentile")?;
    // Percentages of the job's run time. With a ramp they cover the measured time.
    let cpu_percent = job.get("usr_cpu")?.as_f64()? + job.get("sys_cpu")?.as_f64()?;
    Some(Figures {
        iops: kind.get("iops")?.as_f64()?,
        p50: latency.get("50.000000")?.as_f64()?,
        p99: latency.get("99.000000")?.as_f64()?,
        seconds,
        under_load: seconds + load.warmup.as_secs_f64(),
        cpu: cpu_percent / 100.0 * seconds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(access: Access) -> Load {
        Load {
            access,
            depth: 4,
            block: Size(4096),
            runtime: Duration::from_millis(300),
            warmup: Duration::from_millis(100),
            size: 1 << 30,
        }
    }

    #[test]
    fn fio_and_the_generator_report_the_same_figures() {
        for driver in Driver::ALL {
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
    fn a_process_is_measured_without_its_start() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; 4 << 20]).unwrap();
        let load = Load { size: 4 << 20, ..load(Access::RandRead) };
        let figures = fio_process(&[], file.path(), &load).unwrap();
        assert!((0.2..0.8).contains(&figures.seconds), "{figures:?}");
        assert!(figures.iops > 100.0 && figures.cpu > 0.001 && figures.cpu < 0.6, "{figures:?}");
        let missing =
            weir_process(Path::new("/nonexistent/weir"), file.path(), &load).unwrap_err().to_string();
        assert!(missing.contains("/nonexistent/weir"), "{missing}");
    }

    #[test]
    fn fio_without_a_figure_is_refused() {
        assert!(parse_fio(&serde_json::json!({"jobs": [{"read": {}}]}), &load(Access::RandRead)).is_none());
    }
}
