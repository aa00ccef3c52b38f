//! Reads through the log: the newest version of each byte, wherever it is (P7).

use weir_block::{Buffer, Extent, ExtentState, Tag};

use crate::index::{Entry, Index};
use crate::log::Log;

/// What the log has of a range.
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

/// A read that is complete but has seen records which are not acknowledged yet. What was once seen must stay
/// seen, also after a takeover, so it waits (P7).
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
    for Entry { start, end, place, .. } in index.overlaps(offset, offset + buffer.len() as u64) {
        let (from, to) = ((start - offset) as usize, (end - offset) as usize);
        let target = &mut buffer.bytes_mut()[from..to];
        match place {
            Some(place) => target.copy_from_slice(log.region().bytes(log.position(place), to - from)),
            None => target.fill(0),
        }
        part(from, to);
    }
}

/// Lays what the log holds over the backing's extents.
pub fn overlay_extents(index: &Index, below: &[Extent]) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::with_capacity(below.len());
    let mut push = |offset: u64, end: u64, state: ExtentState| {
        if offset >= end {
            return;
        }
        match extents.last_mut() {
            Some(last) if last.state == state => last.length += end - offset,
            _ => extents.push(Extent { offset, length: end - offset, state }),
        }
    };
    for extent in below {
        let (mut at, end) = (extent.offset, extent.offset + extent.length);
        for entry in index.overlaps(at, end) {
            push(at, entry.start, extent.state);
            let state = if entry.place.is_some() { ExtentState::Allocated } else { ExtentState::Hole };
            push(entry.start, entry.end, state);
            at = entry.end;
        }
        push(at, end, extent.state);
    }
    extents
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
        let states: Vec<_> = overlay_extents(&index, &below)
            .iter()
            .map(|extent| (extent.offset, extent.length, extent.state))
            .collect();
        assert_eq!(
            states,
            [
                (0, 4096, ExtentState::Hole),
                (4096, 4096, ExtentState::Allocated),
                (8192, 8192, ExtentState::Hole),
                (16384, 4096, ExtentState::Allocated),
            ]
        );
    }
}
