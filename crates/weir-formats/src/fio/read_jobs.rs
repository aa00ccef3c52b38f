//! Job files of fio: the most common options.
//!
//! An unknown option, or a value with another meaning here, is an error that names it and its line: measuring a load that
//! silently differs from the file would be useless. The reader accepts options for Weir's fixed behaviour (`direct=1`, `thread`,
//! `norandommap`, `group_reporting` …). Sizes follow fio's default `kb_base=1024`, where `4k` is 4096 and `4ki` is 4000; the
//! reader refuses the latter, because it is rarely intended.
//!
//! Random jobs draw every block independently, as fio does with `norandommap`; without it fio requests each block once before it
//! requests any again. `psync`, fio's default, and similar engines issue one request at a time here too.
//!
//! The options are those of fio 3's manual page, fio(1). Without `time_based` a job ends after `size` bytes as it does in fio;
//! without `size`, only `runtime` ends it.

use std::time::Duration;

use weir_block::size::Size;
use weir_load::arrivals::Arrivals;
use weir_load::io_engine::IoEngine;
use weir_load::job::Job;
use weir_load::pattern::{BlockMix, Pattern};
use weir_load::target::Target;
use weir_load::workload::{Access, MOST_THREADS, Workload, WorkloadError};

use super::size::parse_fio_size;
use super::write_jobs::share_of;

/// The defect of a job file.
#[derive(Debug, thiserror::Error)]
pub enum JobFileError {
    /// Neither a section nor an option.
    #[error("line {line}: `{text}` is neither [a section] nor an option")]
    Malformed {
        /// The line number, from 1.
        line: usize,
        /// The line's text.
        text: String,
    },
    /// An option before the first section.
    #[error("line {line}: `{text}` stands before the first [section]")]
    NoSection {
        /// The line number, from 1.
        line: usize,
        /// The line's text.
        text: String,
    },
    /// An invalid value.
    #[error("line {line}: {option}={value}: {reason}")]
    Value {
        /// The line number, from 1.
        line: usize,
        /// The option.
        option: String,
        /// The given value.
        value: String,
        /// The reason.
        reason: String,
    },
    /// Options that are not supported.
    #[error("not supported, so nothing was run: {}; take them out of a copy of the file", .0.join(", "))]
    Unsupported(Vec<String>),
    /// No job at all.
    #[error("there is no job in the file: it needs a [section] besides [global]")]
    NoJob,
    /// A job without a target.
    #[error("job {0} has no filename (or uri, with ioengine=nbd)")]
    NoTarget(String),
    /// A job that never ends.
    #[error("job {0} has neither runtime nor size")]
    Endless(String),
    /// Reads and writes with rates in another proportion than their mix.
    #[error(
        "job {name}: fio applies rate_iops to the reads and to the writes, one value to each of them: give rate_iops=READS,WRITES \
         in the proportion of rwmixread={read_percent}"
    )]
    Rates {
        /// The job.
        name: String,
        /// Reads in a hundred requests.
        read_percent: u8,
    },
    /// An invalid job.
    #[error("job {name}: {error}")]
    Job {
        /// The job.
        name: String,
        /// The reason.
        error: WorkloadError,
    },
    /// An invalid target.
    #[error("job {name}: {error}")]
    Target {
        /// The job.
        name: String,
        /// The reason.
        error: Box<weir_load::error::LoadError>,
    },
}

/// The options of a section read so far.
#[derive(Clone, Debug)]
struct Section {
    workload: Workload,
    random: bool,
    kind: Kind,
    read_percent: u8,
    filename: Option<String>,
    uri: Option<String>,
    null: bool,
    /// An engine that issues one request at a time, regardless of the depth: fio's default.
    synchronous: bool,
    sizes: Option<BlockMix>,
    jobs: u32,
    /// Rates of reads and of writes.
    rates: Option<(u64, u64)>,
    time_based: bool,
    runtime: Option<Duration>,
    io_size: Option<Size>,
    stonewall: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Mixed,
}

impl Default for Section {
    /// fio's defaults: sequential 4 KiB reads, one at a time.
    fn default() -> Section {
        Section {
            workload: Workload { queue_depth: 1, runtime: None, ..Workload::default() },
            random: false,
            kind: Kind::Read,
            read_percent: 50,
            filename: None,
            uri: None,
            null: false,
            synchronous: true,
            sizes: None,
            jobs: 1,
            rates: None,
            time_based: false,
            runtime: None,
            io_size: None,
            stonewall: false,
        }
    }
}

/// Reads a job file.
///
/// # Errors
/// The first malformed line, or all unsupported options.
pub fn read_jobs(text: &str) -> Result<Vec<Job>, JobFileError> {
    let mut global = Section::default();
    let mut sections: Vec<(String, Section)> = Vec::new();
    let mut current: Option<String> = None;
    let mut unsupported = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        let text = text.split(" ;").next().unwrap_or_default().split(" #").next().unwrap_or_default().trim();
        if text.is_empty() || text.starts_with([';', '#']) {
            continue;
        }
        if let Some(rest) = text.strip_prefix('[') {
            let name = rest.strip_suffix(']').map(str::trim).filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| JobFileError::Malformed { line, text: text.into() })?;
            if name != "global" {
                sections.push((name.into(), global.clone()));
            }
            current = Some(name.into());
            continue;
        }
        let (option, value) = text.split_once('=').map_or((text, None), |(o, v)| (o.trim(), Some(v.trim())));
        if option.is_empty() || option.contains(char::is_whitespace) {
            return Err(JobFileError::Malformed { line, text: text.into() });
        }
        let section = match current.as_deref() {
            None => return Err(JobFileError::NoSection { line, text: text.into() }),
            Some("global") => &mut global,
            Some(_) => &mut sections.last_mut().ok_or(JobFileError::NoJob)?.1,
        };
        match section.set(option, value) {
            Ok(()) => {}
            Err(Refusal::Unsupported) => unsupported.push(format!("{text} (line {line})")),
            Err(Refusal::Value(reason)) => {
                let (option, value) = (option.into(), value.unwrap_or_default().into());
                return Err(JobFileError::Value { line, option, value, reason });
            }
        }
    }
    if !unsupported.is_empty() {
        return Err(JobFileError::Unsupported(unsupported));
    }
    let (mut jobs, mut group) = (Vec::new(), 0);
    for (name, section) in sections {
        if section.stonewall && !jobs.is_empty() {
            group += 1;
        }
        section.into_jobs(&name, group, &mut jobs)?;
    }
    if jobs.is_empty() { Err(JobFileError::NoJob) } else { Ok(jobs) }
}

/// The reason why the reader refuses an option.
enum Refusal {
    Unsupported,
    Value(String),
}

impl<E: std::error::Error> From<E> for Refusal {
    fn from(error: E) -> Refusal {
        Refusal::Value(error.to_string())
    }
}

impl Section {
    fn set(&mut self, option: &str, value: Option<&str>) -> Result<(), Refusal> {
        let text = value.unwrap_or_default();
        let workload = &mut self.workload;
        match option {
            "filename" => self.filename = Some(filename(text)?),
            "uri" => self.uri = Some(text.into()),
            "ioengine" => {
                self.null = text == "null";
                self.synchronous = match text {
                    "psync" | "sync" | "pvsync" | "pvsync2" => true,
                    "libaio" | "io_uring" | "posixaio" | "nbd" | "null" => false,
                    _ => return Err(Refusal::Unsupported),
                };
            }
            "rw" | "readwrite" => {
                (self.random, self.kind) = match text {
                    "read" => (false, Kind::Read),
                    "write" => (false, Kind::Write),
                    "rw" | "readwrite" => (false, Kind::Mixed),
                    "randread" => (true, Kind::Read),
                    "randwrite" => (true, Kind::Write),
                    "randrw" => (true, Kind::Mixed),
                    _ => return Err(Refusal::Unsupported),
                }
            }
            "rwmixread" => self.read_percent = percent(text)?,
            "rwmixwrite" => self.read_percent = 100 - percent(text)?,
            "bs" | "blocksize" => self.sizes = Some(BlockMix::of(size(text)?)),
            "bssplit" => self.sizes = Some(split(text)?),
            "blockalign" | "ba" => workload.alignment = Some(size(text)?),
            "iodepth" => workload.queue_depth = text.parse()?,
            "numjobs" => {
                self.jobs = text.parse()?;
                if !(1..=MOST_THREADS).contains(&self.jobs) {
                    return Err(wrong(&format!("use 1 to {MOST_THREADS}")));
                }
            }
            "runtime" | "timeout" => self.runtime = Some(time(text)?),
            "ramp_time" => workload.warmup = time(text)?,
            "time_based" => self.time_based = flag(value)?,
            "size" => workload.size = Some(size(text)?),
            "io_size" | "io_limit" => self.io_size = Some(size(text)?),
            "offset" => workload.offset = size(text)?,
            "rate_iops" => self.rates = rates(text)?,
            "rate_process" => {
                workload.arrivals = match text {
                    "linear" => Arrivals::Fixed,
                    "poisson" => Arrivals::Poisson,
                    _ => return Err(Refusal::Unsupported),
                }
            }
            "random_distribution" => {
                workload.pattern = match text.split_once(':') {
                    None if text == "random" => Pattern::Plain,
                    Some(("zipf", _)) => text.parse()?,
                    Some(("zoned", zones)) => hot(zones).ok_or(Refusal::Unsupported)?,
                    _ => return Err(Refusal::Unsupported),
                }
            }
            "randseed" => workload.seed = text.parse()?,
            "sync" => {
                workload.fua = match text {
                    "0" | "none" => false,
                    "1" | "sync" | "dsync" => true,
                    _ => return Err(Refusal::Unsupported),
                }
            }
            "fsync" | "fdatasync" => {
                workload.flush_every = Some(text.parse()?).filter(|&writes| writes > 0);
            }
            "buffer_compress_percentage" => workload.compress_percent = percent(text)?,
            "hipri" => workload.poll = flag(value)?,
            "stonewall" | "wait_for_previous" => self.stonewall = flag(value)?,
            "direct" | "randrepeat" => return always(value, true),
            "buffered" | "gtod_reduce" | "disable_lat" | "disable_clat" => return always(value, false),
            // Internals of fio, or Weir's fixed behaviour.
            "thread"
            | "group_reporting"
            | "norandommap"
            | "invalidate"
            | "refill_buffers"
            | "name"
            | "description"
            | "iodepth_batch_submit"
            | "registerfiles"
            | "fixedbufs" => {}
            _ => return Err(Refusal::Unsupported),
        }
        Ok(())
    }

    fn into_jobs(mut self, name: &str, group: u32, jobs: &mut Vec<Job>) -> Result<(), JobFileError> {
        let target = match (&self.uri, &self.filename) {
            _ if self.null => Target::Null { size: self.workload.size.map_or(1 << 30, |size| size.0) },
            (Some(target), _) | (None, Some(target)) => target
                .parse()
                .map_err(|error| JobFileError::Target { name: name.into(), error: Box::new(error) })?,
            (None, None) => return Err(JobFileError::NoTarget(name.into())),
        };
        if self.runtime.is_none() && self.io_size.or(self.workload.size).is_none() {
            return Err(JobFileError::Endless(name.into()));
        }
        let read_percent = self.read_percent;
        self.workload.access = match (self.random, self.kind) {
            (false, Kind::Read) => Access::Read,
            (false, Kind::Write) => Access::Write,
            (false, Kind::Mixed) => Access::Rw { read_percent },
            (true, Kind::Read) => Access::RandRead,
            (true, Kind::Write) => Access::RandWrite,
            (true, Kind::Mixed) => Access::RandRw { read_percent },
        };
        if let Some(sizes) = self.sizes {
            self.workload.block_size = sizes.largest();
            self.workload.mix = (sizes.shares().len() > 1).then_some(sizes);
        }
        // Random jobs all use the same range, so they become threads. Sequential ones each cover all of it, so they stay jobs.
        let (copies, threads) = if self.random { (1, self.jobs) } else { (self.jobs, 1) };
        let workload = &mut self.workload;
        if self.synchronous {
            workload.queue_depth = 1;
            if matches!(target, Target::Path(_)) {
                workload.engine = IoEngine::Psync;
            }
        }
        workload.threads = threads;
        if let Some(rates) = self.rates {
            let rate = total_rate(rates, self.kind, read_percent)
                .ok_or_else(|| JobFileError::Rates { name: name.into(), read_percent })?;
            workload.rate = Some(rate.saturating_mul(u64::from(threads)));
        }
        workload.runtime = self.runtime;
        if !self.time_based {
            let each = self.io_size.or(workload.size);
            workload.bytes = each.map(|size| Size(size.0.saturating_mul(u64::from(threads))));
        }
        workload.validate().map_err(|error| JobFileError::Job { name: name.into(), error })?;
        for copy in 0..copies {
            let name = if copies == 1 { name.into() } else { format!("{name}.{copy}") };
            jobs.push(Job { name, target: target.clone(), workload: self.workload.clone(), group });
        }
        Ok(())
    }
}

/// The one file of a job. fio separates several by colons; a colon within a name has a backslash before it.
fn filename(text: &str) -> Result<String, Refusal> {
    let parts: Vec<&str> = text.split("\\:").collect();
    match parts.iter().any(|part| part.contains(':')) {
        true => {
            Err(wrong("one file for each job: give each its own section, or write \\: for a colon in a name"))
        }
        false => Ok(parts.join(":")),
    }
}

/// `rate_iops`: rates of reads and of writes; a single value applies to each of them. A third would be that of trims.
fn rates(text: &str) -> Result<Option<(u64, u64)>, Refusal> {
    let mut rates = text.split(',').map(str::parse::<u64>);
    let reads = rates.next().transpose()?.unwrap_or_default();
    let writes = rates.next().transpose()?.unwrap_or(reads);
    if rates.next().is_some() {
        return Err(wrong("use one rate, or one of reads and one of writes"));
    }
    Ok(Some((reads, writes)))
}

/// The total rate of both directions, as in a Weir load; `None` when fio would run a mix at its rates, but Weir at its
/// percentage.
fn total_rate((reads, writes): (u64, u64), kind: Kind, read_percent: u8) -> Option<u64> {
    match kind {
        Kind::Read => Some(reads),
        Kind::Write => Some(writes),
        Kind::Mixed => {
            let total = reads.checked_add(writes)?;
            (reads == share_of(total, read_percent)).then_some(total)
        }
    }
}

/// Two zones that cover the whole range: a hot one and the rest.
fn hot(zones: &str) -> Option<Pattern> {
    let zone = |text: &str| {
        text.split_once('/').map(|(requests, range)| (requests.parse().ok(), range.parse().ok()))
    };
    let (first, second) = zones.split_once(':')?;
    let (Some((Some(requests), Some(range))), Some((Some(others), Some(rest)))) = (zone(first), zone(second))
    else {
        return None;
    };
    let is_whole = |part: u8, rest: u8| (1..=99).contains(&part) && part.checked_add(rest) == Some(100);
    (is_whole(requests, others) && is_whole(range, rest)).then_some(Pattern::Hot { requests, range })
}

fn wrong(reason: &str) -> Refusal {
    Refusal::Value(reason.into())
}

fn percent(text: &str) -> Result<u8, Refusal> {
    text.parse()
        .ok()
        .filter(|percent| *percent <= 100)
        .ok_or_else(|| wrong("use a whole number from 0 to 100"))
}

fn flag(value: Option<&str>) -> Result<bool, Refusal> {
    match value {
        None | Some("1") => Ok(true),
        Some("0") => Ok(false),
        Some(_) => Err(wrong("use 0 or 1")),
    }
}

/// An option that is always `is` here.
fn always(value: Option<&str>, is: bool) -> Result<(), Refusal> {
    if flag(value)? == is { Ok(()) } else { Err(Refusal::Unsupported) }
}

fn size(text: &str) -> Result<Size, Refusal> {
    Ok(Size(parse_fio_size(text)?))
}

fn time(text: &str) -> Result<Duration, Refusal> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number = text[..end].parse::<u32>()?;
    match &text[end..] {
        "us" => Ok(Duration::from_micros(number.into())),
        "ms" => Ok(Duration::from_millis(number.into())),
        "" | "s" => Ok(Duration::from_secs(number.into())),
        "m" => Ok(Duration::from_secs(u64::from(number) * 60)),
        "h" => Ok(Duration::from_secs(u64::from(number) * 3600)),
        "d" => Ok(Duration::from_secs(u64::from(number) * 86400)),
        _ => Err(wrong("use seconds, or a number and us, ms, s, m, h or d")),
    }
}

/// `4k/60:64k/40`.
fn split(text: &str) -> Result<BlockMix, Refusal> {
    if text.contains(',') {
        return Err(wrong("different mixes for reads and writes are not supported"));
    }
    let share = |share: &str| match share.split_once('/') {
        Some((bytes, percent)) if !percent.is_empty() => Ok(format!("{}:{percent}", size(bytes)?.0)),
        _ => Err(wrong("give each size its percentage, as in 4k/60:64k/40")),
    };
    let shares = text.split(':').map(share).collect::<Result<Vec<_>, _>>()?;
    Ok(shares.join(",").parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_usual_file_is_understood() {
        let text = "; a comment\n[global]\nioengine=libaio\ndirect=1\nbs=4k\niodepth=16\nruntime=30\ntime_based\n\
                    filename=/dev/sdz\ngroup_reporting\n\n[mixed]\nrw=randrw\nrwmixread=70\nnumjobs=4\nrate_iops=700,300\n\
                    rate_process=poisson\nrandom_distribution=zipf:1.1\nramp_time=500ms\n\n[seq]\nstonewall\nrw=write\n\
                    bssplit=64k/30:1m/70\nsize=1g\nnumjobs=2\ntime_based=0\n";
        let jobs = read_jobs(text).unwrap();
        let names: Vec<(&str, u32)> = jobs.iter().map(|job| (job.name.as_str(), job.group)).collect();
        assert_eq!(names, [("mixed", 0), ("seq.0", 1), ("seq.1", 1)]);
        let expected = Workload {
            access: Access::RandRw { read_percent: 70 },
            pattern: Pattern::Zipf { theta_milli: 1100 },
            queue_depth: 16,
            threads: 4,
            rate: Some(4000),
            arrivals: Arrivals::Poisson,
            runtime: Some(Duration::from_secs(30)),
            warmup: Duration::from_millis(500),
            ..Workload::default()
        };
        assert_eq!(jobs[0].workload, expected);
        let sequential = &jobs[1].workload;
        assert_eq!((sequential.access, sequential.block_size), (Access::Write, Size(1 << 20)));
        assert_eq!(sequential.mix.as_ref().unwrap().to_string(), "64KiB:30,1MiB:70");
        assert_eq!((sequential.bytes, sequential.size), (Some(Size(1 << 30)), Some(Size(1 << 30))));
        assert_eq!(jobs[0].target, Target::Path("/dev/sdz".into()));
    }

    #[test]
    fn synchronous_engines_have_depth_one() {
        for (engine, depth) in
            [("", 1), ("ioengine=psync\n", 1), ("ioengine=libaio\n", 8), ("ioengine=null\n", 8)]
        {
            let jobs = read_jobs(&format!("[a]\n{engine}filename=x\nsize=1m\niodepth=8\n")).unwrap();
            assert_eq!(jobs[0].workload.queue_depth, depth, "{engine}");
            assert_eq!(jobs[0].workload.engine == IoEngine::Psync, depth == 1, "{engine}");
        }
    }

    #[test]
    fn what_is_not_supported_is_named_with_its_line() {
        let text = "[a]\nfilename=x\nsize=1m\nrw=randtrim\nzonemode=zbd\ndirect=0\nioengine=rados\n";
        let said = read_jobs(text).unwrap_err().to_string();
        for word in
            ["rw=randtrim (line 4)", "zonemode=zbd (line 5)", "direct=0 (line 6)", "ioengine=rados (line 7)"]
        {
            assert!(said.contains(word), "{word} is not in {said}");
        }
    }

    #[test]
    fn malformed_files_are_refused_where_they_are() {
        for (text, hint) in [
            ("", "no job"),
            ("[global]\nbs=4k\n", "no job"),
            ("bs=4k\n", "before the first [section]"),
            ("[a\n", "line 1"),
            ("[a]\nthis is text\n", "line 2"),
            ("[a]\nrw=read\n", "no filename"),
            ("[a]\nfilename=x\n", "neither runtime nor size"),
            ("[a]\nfilename=x\nsize=1m\nbs=4ki\n", "multiple of 1000"),
            ("[a]\nfilename=x\nsize=1m\nbs=1000\n", "multiple of 512"),
            ("[a]\nfilename=x\nsize=1m\nrw=randread\nnumjobs=100000\n", "1 to 256"),
            ("[a]\nfilename=x\nsize=1m\nnumjobs=4000000000\n", "line 4: numjobs=4000000000: use 1 to 256"),
            ("[a]\nfilename=x\nsize=1m\nnumjobs=0\n", "line 4: numjobs=0: use 1 to 256"),
            ("[a]\nfilename=/dev/a:/dev/b\nsize=1m\n", "line 2: filename=/dev/a:/dev/b: one file"),
            ("[a]\nfilename=x\nsize=1m\nrate_iops=1,2,3\n", "line 4"),
            ("[a]\nfilename=x\nsize=1m\nrate_iops=1,\n", "line 4"),
            ("[a]\nfilename=x\nsize=1m\nrw=randrw\nrwmixread=70\nrate_iops=1000\n", "rate_iops=READS,WRITES"),
            ("[a]\nfilename=x\nsize=1m\nrw=rw\nrate_iops=10,11\n", "rwmixread=50"),
            ("[a]\nbs=x\n", "line 2: bs=x"),
            ("[a]\nruntime=5y\n", "us, ms, s"),
            ("[a]\nbssplit=4k/60:64k/50\n", "add up to 100"),
            ("[a]\nrwmixread=101\n", "0 to 100"),
            ("[a]\niodepth=-1\n", "line 2"),
            ("[a]\nioengine=nbd\nuri=nbd+unix:///x\nsize=1m\n", "socket="),
        ] {
            let said = read_jobs(text).unwrap_err().to_string();
            assert!(said.contains(hint), "{text:?}: {said}");
        }
    }

    /// fio 3.33 with `rw=randrw rate_iops=20` issues 20 reads and 20 writes a second, with `28,12` so many of each.
    #[test]
    fn rates_are_those_of_each_direction() {
        for (options, rate) in [
            ("rw=randrw\nrate_iops=20", 40),
            ("rw=randrw\nrwmixread=70\nrate_iops=28,12", 40),
            ("rate_iops=701,300\nrw=rw\nrwmixread=70", 1001),
            ("rw=randread\nrate_iops=20", 20),
            ("rw=write\nrate_iops=20,30", 30),
        ] {
            let jobs = read_jobs(&format!("[a]\nfilename=x\nsize=1m\n{options}\n")).unwrap();
            assert_eq!(jobs[0].workload.rate, Some(rate), "{options}");
        }
    }

    #[test]
    fn a_colon_of_a_name_has_a_backslash() {
        let jobs = read_jobs("[a]\nfilename=/dev/disk/by-path/pci-0000\\:00\\:1f.2\nsize=1m\n").unwrap();
        assert_eq!(jobs[0].target, Target::Path("/dev/disk/by-path/pci-0000:00:1f.2".into()));
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in "(\\[?[a-z]{0,6}\\]?=?[0-9a-z/:,%]{0,8}\n){0,12}") {
            let _ = read_jobs(&text);
        }

        #[test]
        fn no_value_is_a_panic(which in 0usize..16, value in "\\PC{0,12}") {
            let option = [
                "filename", "rw", "rwmixread", "bs", "bssplit", "ba", "iodepth", "numjobs", "runtime", "size", "offset",
                "rate_iops", "random_distribution", "randseed", "uri", "io_size",
            ][which];
            let _ = read_jobs(&format!("[a]\nfilename=x\nruntime=1\nrw=randrw\n{option}={value}\n"));
        }

        #[test]
        fn no_number_of_jobs_takes_for_ever(jobs: u32, access in "(read|randread)") {
            if let Ok(read) = read_jobs(&format!("[a]\nfilename=x\nsize=1m\nrw={access}\nnumjobs={jobs}\n")) {
                let threads: u32 = read.iter().map(|job| job.workload.threads).sum();
                prop_assert_eq!(threads, jobs);
            }
        }
    }
}
