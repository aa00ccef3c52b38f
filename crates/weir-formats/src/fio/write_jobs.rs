//! Loads as a job file of fio.

use std::fmt::Write as _;

use weir_load::arrivals::Arrivals;
use weir_load::job::Job;
use weir_load::pattern::Pattern;
use weir_load::target::Target;
use weir_load::workload::{Access, Workload};

/// A target whose name a job file cannot express.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no job file of fio can name {0:?}: fio ends a value at a new line, `;` or `#`, cuts off spaces around it and replaces `${{`; \
     use another name for the target, such as a symbolic link"
)]
pub struct UnwritableTarget(pub String);

/// A job file with `comments` at its head. All jobs run at once, on the target of the first.
///
/// # Errors
/// fio would read a name other than the target's.
pub fn write_jobs(jobs: &[Job], comments: &[String]) -> Result<String, UnwritableTarget> {
    let mut text = String::new();
    for comment in comments {
        let _ = writeln!(text, "; {}", comment.replace(['\n', '\r'], " "));
    }
    text.push_str("[global]\ndirect=1\nnorandommap\nrandrepeat=1\n");
    if let Some(job) = jobs.first() {
        text.push_str(&match &job.target {
            Target::Null { .. } => "ioengine=null\n".to_owned(),
            // fio treats the parts between colons as separate files, and would write to each of them.
            Target::Path(path) => {
                let path = path.to_str().ok_or_else(|| UnwritableTarget(path.display().to_string()))?;
                format!("ioengine=libaio\nfilename={}\n", value(path)?.replace(':', "\\:"))
            }
            Target::Nbd(uri) => format!("ioengine=nbd\nuri={}\n", value(&uri.to_string())?),
        });
    }
    for job in jobs {
        section(&mut text, job);
    }
    Ok(text)
}

fn value(text: &str) -> Result<&str, UnwritableTarget> {
    let ends = |character: char| character.is_control() || matches!(character, ';' | '#');
    match text.trim() != text || text.contains("${") || text.contains(ends) {
        true => Err(UnwritableTarget(text.into())),
        false => Ok(text),
    }
}

/// The reads of `total` requests.
pub(super) fn share_of(total: u64, read_percent: u8) -> u64 {
    let reads = (u128::from(total) * u128::from(read_percent) + 50) / 100;
    reads as u64
}

fn section(text: &mut String, job: &Job) {
    let Workload { access, pattern, block_size, .. } = job.workload;
    let workload = &job.workload;
    let mut line = |option: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "{option}={value}");
    };
    // In fio the number after a colon is a step, or the interval between drawn offsets, not the percentage of reads.
    let step = match pattern {
        Pattern::Stride { bytes } => format!(":{}", bytes.0 - block_size.0),
        _ => String::new(),
    };
    let word = access.to_string();
    let word = word.split(':').next().unwrap_or_default();
    line(&format!("\n[{}]\nrw", job.name), &format!("{word}{step}"));
    let mixed = matches!(access, Access::Rw { .. } | Access::RandRw { .. });
    if mixed {
        line("rwmixread", &access.read_percent());
    }
    match &workload.mix {
        None => line("bs", &block_size.0),
        Some(mix) => {
            let shares = mix.shares().iter().map(|(size, percent)| format!("{}/{percent}", size.0));
            line("bssplit", &shares.collect::<Vec<_>>().join(":"));
        }
    }
    if let Some(unit) = workload.alignment {
        line("blockalign", &unit.0);
    }
    match pattern {
        Pattern::Zipf { .. } => line("random_distribution", &pattern),
        Pattern::Hot { requests, range } => {
            let zones = format!("zoned:{requests}/{range}:{}/{}", 100 - requests, 100 - range);
            line("random_distribution", &zones);
        }
        _ => {}
    }
    if workload.offset.0 > 0 {
        line("offset", &workload.offset.0);
    }
    if let Some(size) = workload.size {
        line("size", &size.0);
    }
    line("iodepth", &workload.queue_depth);
    if let Some(rate) = workload.rate {
        // A single value would apply to reads and to writes each.
        let reads = share_of(rate, access.read_percent());
        let rates = if mixed { format!("{reads},{}", rate - reads) } else { rate.to_string() };
        line("rate_iops", &rates);
        line("rate_process", &if workload.arrivals == Arrivals::Poisson { "poisson" } else { "linear" });
    }
    if let Some(runtime) = workload.runtime {
        line("runtime", &format!("{}ms", runtime.as_millis()));
        line("time_based", &1);
    }
    if let Some(bytes) = workload.bytes {
        line("io_size", &bytes.0);
    }
    if let Some(writes) = workload.flush_every {
        line("fdatasync", &writes);
    }
    line("randseed", &workload.seed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fio::read_jobs;
    use std::time::Duration;

    fn job(target: &str, workload: Workload) -> Job {
        Job { name: "a".into(), target: target.parse().unwrap(), workload, group: 0 }
    }

    #[test]
    fn a_mix_is_read_as_it_was_written() {
        for rate in [None, Some(1), Some(1001), Some(40_000)] {
            for access in ["randrw:70", "rw:31", "randrw:50", "randread", "write"] {
                let workload = Workload {
                    access: access.parse().unwrap(),
                    rate,
                    runtime: Some(Duration::from_secs(3)),
                    ..Workload::default()
                };
                let text = write_jobs(&[job("/dev/x", workload.clone())], &[]).unwrap();
                let again = read_jobs(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
                assert_eq!(again[0].workload, workload, "{text}");
            }
        }
    }

    #[test]
    fn a_target_is_one_file_or_refused() {
        let path = "/dev/disk/by-path/pci-0000:00:1f.2-ata-1";
        let text = write_jobs(&[job(path, Workload::default())], &[]).unwrap();
        assert!(text.contains("\nfilename=/dev/disk/by-path/pci-0000\\:00\\:1f.2-ata-1\n"), "{text}");
        assert_eq!(read_jobs(&text).unwrap()[0].target, Target::Path(path.into()));
        for path in ["/a\nfilename=/b", "/a;b", "/a#b", "/a ", "/${HOME}"] {
            let error = write_jobs(&[job(path, Workload::default())], &[]).unwrap_err();
            assert_eq!(error, UnwritableTarget(path.into()));
        }
    }
}
