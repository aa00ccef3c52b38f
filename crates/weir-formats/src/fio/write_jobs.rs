//! Loads as a job file of fio.

use std::fmt::Write as _;

use weir_load::arrivals::Arrivals;
use weir_load::job::Job;
use weir_load::pattern::Pattern;
use weir_load::target::Target;
use weir_load::workload::Workload;

/// A job file with `comments` at its head. All jobs run at once, on the target of the first.
#[must_use]
pub fn write_jobs(jobs: &[Job], comments: &[String]) -> String {
    let mut text = String::new();
    for comment in comments {
        let _ = writeln!(text, "; {}", comment.replace(['\n', '\r'], " "));
    }
    text.push_str("[global]\ndirect=1\nnorandommap\nrandrepeat=1\n");
    if let Some(job) = jobs.first() {
        text.push_str(&match &job.target {
            Target::Null { .. } => "ioengine=null\n".to_owned(),
            Target::Path(path) => format!("ioengine=libaio\nfilename={}\n", path.display()),
            Target::Nbd(uri) => format!("ioengine=nbd\nuri={uri}\n"),
        });
    }
    for job in jobs {
        section(&mut text, job);
    }
    text
}

fn section(text: &mut String, job: &Job) {
    let Workload { access, pattern, block_size, .. } = job.workload;
    let workload = &job.workload;
    let mut line = |option: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "{option}={value}");
    };
    let step = match pattern {
        Pattern::Stride { bytes } => format!(":{}", bytes.0 - block_size.0),
        _ => String::new(),
    };
    line(&format!("\n[{}]\nrw", job.name), &format!("{access}{step}"));
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
        line("rate_iops", &rate);
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
