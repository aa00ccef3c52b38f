//! Reads through the log: the newest version of each byte, wherever it is (P7).

use weir_block::{Buffer, Extent, ExtentState, Tag};

use crate::index::{Entry, Index};
use crate::log::Log;

/// The log's part of a range.
pub enum Hit {
    /// Nothing.
    Miss,
    /// Every byte; it was copied. The newest record that was read.
    Full(u64),
    /// Some bytes, the newest record among them.
    Partial(u64),
}

/// Parts of a read that came from the log, kept until the backing has delivered the rest. They are copied when the
/// read arrives: the records may be freed before the backing answers.
pub struct Overlay {
    bytes: Buffer,
    /// Ranges of the buffer that are valid.
    parts: Vec<(usize, usize)>,
}

impl Overlay {
    /// Puts the parts over what the backing delivered.
    pub fn apply(&self, target: &mut Buffer) {
        for &(start, end) in &self.parts {
            target.bytes_mut()[start..end].copy_from_slice(&self.bytes.bytes()[start..end]);
        }
    }
}

/// A read that is complete but has seen records which are not acknowledged yet. Data once seen must stay seen, also after a
/// takeover, so the read waits (P7).
pub struct HeldRead {
    pub sequence: u64,
    pub tag: Tag,
    pub buffer: Buffer,
}

/// The newest record that covers some of a range, 0 if none does.
pub fn newest(index: &Index, offset: u64, length: usize) -> u64 {
    index.overlaps(offset, offset + length as u64).map(|entry| entry.sequence).max().unwrap_or(0)
}

/// Looks a read up; copies into `buffer` when the log has all of it.
pub fn look_up(index: &Index, log: &Log, offset: u64, buffer: &mut Buffer) -> Hit {
    if index.is_empty() {
        return Hit::Miss;
    }
    let end = offset + buffer.len() as u64;
    let (mut covered, mut newest) = (0, 0);
    for entry in index.overlaps(offset, end) {
        covered += entry.end - entry.start;
        newest = newest.max(entry.sequence);
    }
    if covered == 0 {
        return Hit::Miss;
    }
    if covered < end - offset {
        return Hit::Partial(newest);
    }
    copy(index, log, offset, buffer, |_, _| {});
    Hit::Full(newest)
}

/// Copies what the log has of a range, to be laid over the backing's bytes later.
pub fn overlay(index: &Index, log: &Log, offset: u64, mut bytes: Buffer) -> Overlay {
    let mut parts = Vec::new();
    copy(index, log, offset, &mut bytes, |start, end| parts.push((start, end)));
    Overlay { bytes, parts }
}

fn copy(index: &Index, log: &Log, offset: u64, buffer: &mut Buffer, mut part: impl FnMut(usize, usize)) {
    for Entry { start, end, position, .. } in index.overlaps(offset, offset + buffer.len() as u64) {
        let (from, to) = ((start - offset) as usize, (end - offset) as usize);
        let target = &mut buffer.bytes_mut()[from..to];
        match position {
            Some(position) => {
                target.copy_from_slice(log.region().bytes(log.arena_offset(position), to - from))
            }
            None => target.fill(0),
        }
        part(from, to);
    }
}

/// The runs of a range whose newest version is data in the log, as they are when a request for extents goes to the backing.
/// The backing may look before a record reaches it and answer after the record has left the log.
pub fn data_runs(index: &Index, offset: u64, length: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for entry in index.overlaps(offset, offset + length).filter(|entry| entry.position.is_some()) {
        match runs.last_mut() {
            Some(last) if last.1 == entry.start => last.1 = entry.end,
            _ => runs.push((entry.start, entry.end)),
        }
    }
    runs
}

/// Overlays the log's content, and the data that it held when the request was made (`before`, see [`data_runs`]), on the
/// backing's extents. Data in one of the three is data: only a hole is a promise. A hole that is not acknowledged yet does
/// not count, since a takeover may lose it (P7).
pub fn overlay_extents(
    index: &Index,
    before: &[(u64, u64)],
    acknowledged: u64,
    below: &[Extent],
) -> Vec<Extent> {
    let mut now = Runs::default();
    for extent in below {
        let (mut at, end) = (extent.offset, extent.offset + extent.length);
        for entry in index.overlaps(at, end) {
            now.push(at, entry.start, extent.state);
            let hole = entry.position.is_none() && entry.sequence <= acknowledged;
            now.push(entry.start, entry.end, if hole { ExtentState::Hole } else { ExtentState::Allocated });
            at = entry.end;
        }
        now.push(at, end, extent.state);
    }
    let mut extents = Runs::default();
    let mut before = before.iter().peekable();
    for Extent { offset, length, state } in now.0 {
        let (mut at, end) = (offset, offset + length);
        while let Some(&&(from, to)) = before.peek().filter(|run| run.0 < end) {
            let (from, past) = (from.clamp(at, end), to.clamp(at, end));
            extents.push(at, from, state);
            extents.push(from, past, ExtentState::Allocated);
            at = past;
            if to > end {
                break;
            }
            before.next();
        }
        extents.push(at, end, state);
    }
    extents.0
}

/// Consecutive extents; neighbours of one state are one.
#[derive(Default)]
struct Runs(Vec<Extent>);

impl Runs {
    fn push(&mut self, offset: u64, end: u64, state: ExtentState) {
        if offset >= end {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.state == state => last.length += end - offset,
            _ => self.0.push(Extent { offset, length: end - offset, state }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_show_what_the_log_holds() {
        let mut index = Index::new();
        index.insert(4096, 8192, 1, Some(0));
        index.insert(12288, 16384, 2, None);
        let below = [
            Extent { offset: 0, length: 12288, state: ExtentState::Hole },
            Extent { offset: 12288, length: 8192, state: ExtentState::Allocated },
        ];
        let states = |before: &[(u64, u64)], acknowledged: u64| -> Vec<_> {
            overlay_extents(&index, before, acknowledged, &below)
                .iter()
                .map(|extent| (extent.offset, extent.length, extent.state))
                .collect()
        };
        let now = [
            (0, 4096, ExtentState::Hole),
            (4096, 4096, ExtentState::Allocated),
            (8192, 8192, ExtentState::Hole),
            (16384, 4096, ExtentState::Allocated),
        ];
        assert_eq!(states(&[], 2), now);
        assert_eq!(data_runs(&index, 0, 20480), [(4096, 8192)]);
        assert_eq!(states(&[(4096, 8192)], 2), now);
        let unacknowledged = [
            (0, 4096, ExtentState::Hole),
            (4096, 4096, ExtentState::Allocated),
            (8192, 4096, ExtentState::Hole),
            (12288, 8192, ExtentState::Allocated),
        ];
        assert_eq!(states(&[], 1), unacknowledged);
        let across = [
            (0, 1024, ExtentState::Hole),
            (1024, 1024, ExtentState::Allocated),
            (2048, 2048, ExtentState::Hole),
            (4096, 4096, ExtentState::Allocated),
            (8192, 1808, ExtentState::Hole),
            (10000, 10480, ExtentState::Allocated),
        ];
        assert_eq!(states(&[(1024, 2048), (10000, 18000)], 2), across);
    }

    /// Byte by byte, against the slow way to say it.
    #[test]
    fn data_anywhere_is_data() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..2_000 {
            let mut index = Index::new();
            for sequence in 1..=random.u64(0..6) {
                let start = random.u64(0..30);
                index.insert(start, start + random.u64(1..9), sequence, random.bool().then_some(start));
            }
            let (offset, end, acknowledged) = (random.u64(0..8), random.u64(20..40), random.u64(0..6));
            let (mut before, mut at) = (Vec::new(), offset);
            while at < end && before.len() < 3 {
                let from = at + random.u64(0..5);
                at = from + random.u64(1..7);
                before.push((from.min(end), at.min(end)));
            }
            before.retain(|run| run.0 < run.1);
            let (mut below, mut at) = (Vec::new(), offset);
            while at < end {
                let length = random.u64(1..12).min(end - at);
                let state = if random.bool() { ExtentState::Allocated } else { ExtentState::Hole };
                below.push(Extent { offset: at, length, state });
                at += length;
            }
            let extents = overlay_extents(&index, &before, acknowledged, &below);
            let state_of = |extents: &[Extent], byte: u64| {
                let one = extents.iter().find(|e| e.offset <= byte && byte < e.offset + e.length);
                one.unwrap().state
            };
            for byte in offset..end {
                let entry = index.overlaps(byte, byte + 1).next();
                let log = entry.map(|entry| entry.position.is_some() || entry.sequence > acknowledged);
                let was = before.iter().any(|run| run.0 <= byte && byte < run.1);
                let data = was || log.unwrap_or_else(|| state_of(&below, byte) == ExtentState::Allocated);
                assert_eq!(state_of(&extents, byte) == ExtentState::Allocated, data, "byte {byte}");
            }
            assert!(extents.windows(2).all(|two| two[0].offset + two[0].length == two[1].offset));
        }
    }
}
