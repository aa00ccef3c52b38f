//! The requests of a trace, whatever its format, and what is wrong with one.

use weir_block::RequestKind;

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
pub(super) struct Traced {
    /// Nanoseconds from any start.
    pub at: u64,
    pub kind: RequestKind,
    pub offset: u64,
    pub length: u64,
}

/// The requests of a trace, by device.
#[derive(Debug, Default)]
pub(super) struct Trace {
    pub devices: Vec<(String, Vec<Traced>)>,
    /// Whether the times mean something.
    pub timed: bool,
}

impl Trace {
    pub fn of(&mut self, device: &str) -> &mut Vec<Traced> {
        let index = self.devices.iter().position(|known| known.0 == device);
        let index = index.unwrap_or_else(|| {
            self.devices.push((device.to_owned(), Vec::new()));
            self.devices.len() - 1
        });
        &mut self.devices[index].1
    }

    pub fn choose(self, device: Option<&str>) -> Result<(Vec<Traced>, bool), ImportError> {
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

pub(super) fn wrong_line(line: usize, text: &str, reason: impl Into<String>) -> ImportError {
    ImportError::Line { line, text: text.chars().take(SHOWN).collect(), reason: reason.into() }
}
