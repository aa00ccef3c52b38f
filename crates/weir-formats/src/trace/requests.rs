//! The requests of a trace in any format, and their defects.

use std::collections::BTreeMap;

use weir_block::RequestKind;

/// Longest read or write, in bytes: 1 GiB. Guests and loads issue requests of up to some tens of MiB; the profiler looks at each
/// block of a request, so a damaged length would keep it busy for years.
const LONGEST: u64 = 1 << 30;

/// Latest time, in nanoseconds: 100 years. Traces count from their start or from 1970.
const LATEST: u64 = 100 * 365 * 24 * 3600 * 1_000_000_000;

/// Maximum number of devices in an error.
const NAMED: usize = 20;

/// Maximum length of an invalid line in an error.
const SHOWN: usize = 120;

/// The reason why a trace is invalid: position, and expectation.
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
        /// The defect.
        reason: String,
    },
    /// A record that is not of the format.
    #[error("record {record} (byte {at}): {reason}")]
    Record {
        /// Counted from 1.
        record: u64,
        /// Bytes from the start.
        at: u64,
        /// The defect.
        reason: String,
    },
    /// Requests to several devices or files without a choice of one.
    #[error("the trace has requests to several devices: {}; choose one with --device", named(.0))]
    Several(Vec<String>),
    /// No requests of the choice.
    #[error("the trace has no requests{}", .0.as_ref().map(|device| format!(" to {device}")).unwrap_or_default())]
    Empty(Option<String>),
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Traced {
    /// Nanoseconds from any start.
    pub at: u64,
    pub kind: RequestKind,
    pub offset: u64,
    pub length: u64,
}

impl Traced {
    /// Checks a request from a file. Numbers that saturated in the conversion of their units are refused here.
    ///
    /// # Errors
    /// No disk can have had this request, or the profiler would not finish with it.
    pub fn new(at: u64, kind: RequestKind, offset: u64, length: u64) -> Result<Traced, &'static str> {
        if at > LATEST {
            return Err("the time is beyond 100 years");
        }
        if offset.checked_add(length).is_none() {
            return Err("the request ends beyond 16 EiB");
        }
        if matches!(kind, RequestKind::Read | RequestKind::Write) && length > LONGEST {
            return Err("the request is longer than 1 GiB");
        }
        Ok(Traced { at, kind, offset, length })
    }
}

/// The requests of a trace, by device.
#[derive(Debug)]
pub(super) struct Trace {
    devices: BTreeMap<String, Vec<Traced>>,
    /// Whether the times are meaningful.
    pub timed: bool,
}

impl Trace {
    pub fn new(timed: bool) -> Trace {
        Trace { devices: BTreeMap::new(), timed }
    }

    /// Adds a request. Skips a request of no bytes, unless it is a flush.
    pub fn push(&mut self, device: &str, request: Traced) {
        if request.length == 0 && request.kind != RequestKind::Flush {
            return;
        }
        match self.devices.get_mut(device) {
            Some(requests) => requests.push(request),
            None => {
                self.devices.insert(device.to_owned(), vec![request]);
            }
        }
    }

    pub fn choose(mut self, device: Option<&str>) -> Result<(Vec<Traced>, bool), ImportError> {
        let chosen = match device {
            Some(wanted) => self.devices.remove(wanted),
            None if self.devices.len() > 1 => {
                return Err(ImportError::Several(self.devices.into_keys().collect()));
            }
            None => self.devices.pop_first().map(|(_, requests)| requests),
        };
        let chosen = chosen.ok_or_else(|| ImportError::Empty(device.map(str::to_owned)))?;
        Ok((chosen, self.timed))
    }
}

/// The first of them, and the number of the others.
fn named(devices: &[String]) -> String {
    let first = devices[..devices.len().min(NAMED)].join(", ");
    match devices.len().saturating_sub(NAMED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

pub(super) fn wrong_line(line: usize, text: &str, reason: impl Into<String>) -> ImportError {
    ImportError::Line { line, text: text.chars().take(SHOWN).collect(), reason: reason.into() }
}
