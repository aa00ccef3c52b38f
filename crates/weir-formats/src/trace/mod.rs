//! Profiles of recorded traces: the output of `blkparse`, fio's I/O logs, and the binary traces of virtual disks by VMware's
//! vscsi tracing.

mod blkparse;
mod fio_log;
mod requests;
mod vscsi;

use std::time::Duration;

use weir_block::{Nanos, Observe};
use weir_profile::buckets::Spread;
use weir_profile::{Arrival, Profile, Profiler, Settings};

pub use self::requests::ImportError;
use self::requests::Traced;

/// Number of intervals of the working set over time in a trace, if they are not too short.
const INTERVALS: u64 = 120;

/// The profile of a trace in any of the formats, under the name `source`; of one `device` when it has several.
///
/// # Errors
/// The first invalid line or record, or no request.
pub fn import(trace: &[u8], source: &str, device: Option<&str>) -> Result<Profile, ImportError> {
    let read = match std::str::from_utf8(trace) {
        Ok(text) if text.starts_with("fio version") => fio_log::read(text)?,
        Ok(text) if blkparse::is_blkparse(text) => blkparse::read(text)?,
        _ if vscsi::version(trace).is_some() => vscsi::read(trace)?,
        _ => return Err(ImportError::Unknown),
    };
    let (mut requests, timed) = read.choose(device)?;
    // Tools print events by processor, which can be out of order.
    requests.sort_by_key(|request| request.at);
    Ok(profile(&requests, timed, source))
}

fn profile(requests: &[Traced], timed: bool, source: &str) -> Profile {
    let start = requests.first().map_or(0, |request| request.at);
    let end = requests.last().map_or(0, |request| request.at - start);
    let interval = Duration::from_nanos(end / INTERVALS).max(Duration::from_secs(1));
    // No guest waits for a request of a trace, so the sampling rate is unlimited.
    let settings = Settings { interval, sampled_per_second: u32::MAX, ..Settings::default() };
    let mut profiler = Profiler::new(settings, Nanos(0), Duration::ZERO);
    for request in requests {
        profiler.observe(Nanos(request.at - start), request.kind, request.offset, request.length);
    }
    let mut profile = profiler.profile(Nanos(end), source);
    // Only the span of the requests is known, not the time of day.
    profile.hours.clear();
    if !timed {
        profile.seconds = 0.0;
        profile.arrival = Arrival::default();
        profile.working_set.over_time.clear();
        profile.write_back.after_ms = Spread::default();
    }
    profile
}

#[cfg(test)]
mod tests;
