//! Binary traces of virtual SCSI disks, as the CloudPhysics traces are published: little-endian records of 32 bytes
//! (version 1) or 40 bytes (version 2), each with the version in the upper byte of a 16-bit field. Times are in microseconds,
//! offsets in sectors, lengths in bytes. Commands are those of SCSI (SBC-4).

use weir_block::RequestKind;

use super::requests::{ImportError, Trace, Traced};

const SECTOR: u64 = 512;

/// Offsets of a record's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    number: u8,
    record: usize,
    command: usize,
    version: usize,
    length: usize,
    sector: usize,
    time: usize,
}

const LAYOUTS: [Layout; 2] = [
    Layout { number: 1, record: 32, command: 12, version: 14, length: 4, sector: 16, time: 24 },
    Layout { number: 2, record: 40, command: 0, version: 2, length: 8, sector: 16, time: 24 },
];

impl Layout {
    fn is_of(self, record: &[u8]) -> bool {
        record.get(self.version + 1) == Some(&self.number)
    }
}

/// The layout that the first two records (or the only one) have.
pub(super) fn version(trace: &[u8]) -> Option<Layout> {
    let fits = |layout: &Layout| {
        let mut records = trace.chunks_exact(layout.record).take(2).peekable();
        records.peek().is_some() && records.all(|record| layout.is_of(record))
    };
    LAYOUTS.into_iter().find(fits)
}

pub(super) fn read(bytes: &[u8]) -> Result<Trace, ImportError> {
    let Some(layout) = version(bytes) else { return Err(ImportError::Unknown) };
    let mut trace = Trace::new(true);
    let records = bytes.chunks_exact(layout.record);
    let left = records.remainder().len();
    let mut number = 0;
    let wrong = |number: u64, reason: String| ImportError::Record {
        record: number,
        at: (number - 1) * layout.record as u64,
        reason,
    };
    for record in records {
        number += 1;
        if !layout.is_of(record) {
            return Err(wrong(number, format!("it is not of version {}", layout.number)));
        }
        let field = |at: usize, width: usize| {
            record[at..at + width].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte))
        };
        let kind = match field(layout.command, 2) {
            0x08 | 0x28 | 0xa8 | 0x88 => RequestKind::Read,
            0x0a | 0x2a | 0xaa | 0x8a => RequestKind::Write,
            0x35 | 0x91 => RequestKind::Flush,
            0x42 => RequestKind::Discard,
            0x41 | 0x93 => RequestKind::WriteZeroes,
            _ => continue,
        };
        let offset = field(layout.sector, 8).saturating_mul(SECTOR);
        let at = field(layout.time, 8).saturating_mul(1_000);
        let request = Traced::new(at, kind, offset, field(layout.length, 4));
        trace.push("vscsi", request.map_err(|reason| wrong(number, reason.into()))?);
    }
    match left {
        0 => Ok(trace),
        _ => Err(wrong(number + 1, format!("it has only {left} of {} bytes", layout.record))),
    }
}
