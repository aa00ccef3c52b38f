//! Profiles of traces that others recorded: what `blkparse` prints, fio's I/O logs, and the binary traces of virtual disks
//! that VMware's vscsi tracing writes.

mod blktrace;
mod iolog;
mod vscsi;

use std::time::Duration;

use weir_block::{Nanos, Observe, RequestKind};

use super::{Profile, Profiler, Settings};

/// Intervals of the working set over time in a trace, if they are not too short.
const INTERVALS: u64 = 120;

/// Lines that were not understood are named up to this length.
const SHOWN: usize = 120;

/// Why a trace is not understood: where, and what was expected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// None of the formats.
    #[error(
        "the format is not known: text that blkparse prints, a fio I/O log (`fio version 2 iolog`, `fio version 3 iolog`), \
         or a binary vscsi trace of version 1 or 2 is expected"
    )]
    Unknown,
    /// A line that is not of the format.
    #[error("line {line}: `{text}`: {reason}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// The line, shortened.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// A record that is not of the format.
    #[error("record {record} (byte {at}): {reason}")]
    Record {
        /// Counted from 1.
        record: u64,
        /// Bytes from the start.
        at: u64,
        /// What is wrong.
        reason: String,
    },
    /// Requests to several devices or files, and none was chosen.
    #[error("the trace has requests to several devices: {}; choose one with --device", .0.join(", "))]
    Several(Vec<String>),
    /// Nothing of what was chosen.
    #[error("the trace has no requests{}", .0.as_ref().map(|device| format!(" to {device}")).unwrap_or_default())]
    Empty(Option<String>),
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Traced {
    /// Nanoseconds from any start.
    at: u64,
    kind: RequestKind,
    offset: u64,
    length: u64,
}

/// The requests of a trace, by device.
#[derive(Debug, Default)]
struct Trace {
    devices: Vec<(String, Vec<Traced>)>,
    /// Whether the times mean something.
    timed: bool,
}

impl Trace {
    fn of(&mut self, device: &str) -> &mut Vec<Traced> {
        let place = self.devices.iter().position(|known| known.0 == device);
        let place = place.unwrap_or_else(|| {
            self.devices.push((device.to_owned(), Vec::new()));
            self.devices.len() - 1
        });
        &mut self.devices[place].1
    }

    fn choose(self, device: Option<&str>) -> Result<(Vec<Traced>, bool), ImportError> {
        let timed = self.timed;
        let mut devices: Vec<_> = self.devices.into_iter().filter(|known| !known.1.is_empty()).collect();
        match device {
            Some(wanted) => devices.retain(|known| known.0 == wanted),
            None if devices.len() > 1 => {
                return Err(ImportError::Several(devices.into_iter().map(|known| known.0).collect()));
            }
            None => {}
        }
        let chosen = devices.pop().ok_or_else(|| ImportError::Empty(device.map(str::to_owned)))?;
        Ok((chosen.1, timed))
    }
}

/// The profile of a trace in any of the formats, under the name `source`; of one `device` when it has several.
///
/// # Errors
/// The first thing that is not understood, or no request.
pub fn import(trace: &[u8], source: &str, device: Option<&str>) -> Result<Profile, ImportError> {
    let read = match std::str::from_utf8(trace) {
        Ok(text) if text.starts_with("fio version") => iolog::read(text)?,
        Ok(text) if blktrace::is_blkparse(text) => blktrace::read(text)?,
        _ if vscsi::version(trace).is_some() => vscsi::read(trace)?,
        _ => return Err(ImportError::Unknown),
    };
    let (mut requests, timed) = read.choose(device)?;
    // Tools print what each processor saw, which can be out of order.
    requests.sort_by_key(|request| request.at);
    Ok(profile(&requests, timed, source))
}

fn profile(requests: &[Traced], timed: bool, source: &str) -> Profile {
    let start = requests.first().map_or(0, |request| request.at);
    let end = requests.last().map_or(0, |request| request.at - start);
    let interval = Duration::from_nanos(end / INTERVALS).max(Duration::from_secs(1));
    // Nobody waits for a request of a trace: all that the sample can hold is looked at.
    let settings = Settings { interval, sampled_per_second: u32::MAX, ..Settings::default() };
    let mut profiler = Profiler::new(settings, Nanos(0), Duration::ZERO);
    for request in requests {
        profiler.observe(Nanos(request.at - start), request.kind, request.offset, request.length);
    }
    let mut profile = profiler.profile(Nanos(end), source);
    // Only the span of the requests is known, not when during the day it was.
    profile.hours.clear();
    if !timed {
        profile.seconds = 0.0;
        profile.arrival = super::Arrival::default();
        profile.working_set.over_time.clear();
        profile.write_back.after_ms = super::buckets::Spread::default();
    }
    profile
}

fn wrong_line(line: usize, text: &str, reason: impl Into<String>) -> ImportError {
    ImportError::Line { line, text: text.chars().take(SHOWN).collect(), reason: reason.into() }
}

#[cfg(test)]
mod tests;
