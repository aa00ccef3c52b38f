//! From a layer's extents to the descriptors of a `BLOCK_STATUS` reply.

use weir_block::{Extent, ExtentState};
use zerocopy::IntoBytes;

use crate::protocol::{ExtendedStatusDescriptor, StatusDescriptor, extent_flag};

/// Room for the descriptors of one reply, in bytes. A client repeats the query for the rest ("the server MAY
/// return fewer descriptors in the reply than would be required").
pub const STATUS_BYTES: usize = 4096;

/// Longest range that one `BLOCK_STATUS` queries, in bytes, and the longest extent that a compact descriptor expresses: a
/// multiple of every block size. A client repeats the query for the rest.
pub const LONGEST_STATUS: u64 = 0xffff_0000;

/// The parameters of a `BLOCK_STATUS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Bytes from the start of the export.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// One extent only.
    pub one: bool,
    /// With extended headers: descriptors of 16 bytes instead of 8.
    pub extended: bool,
}

/// Writes descriptors for the requested range into `out`; returns the bytes used.
///
/// Merges adjacent extents in the same state. The reply describes nothing beyond the range, even if the layer does: the client
/// can then use the length directly. 0 when the extents do not begin at the offset.
pub fn describe_extents(asked: Asked, extents: &[Extent], out: &mut [u8]) -> usize {
    let Asked { offset, length, one, extended } = asked;
    let end = offset.saturating_add(length);
    let mut descriptors = Descriptors { out, used: 0, last: None, extended };
    let mut at = offset;
    for extent in extents {
        let stop = extent.offset.saturating_add(extent.length).min(end);
        if extent.offset > at {
            break;
        }
        if stop <= at {
            continue;
        }
        if !descriptors.add(stop - at, flags(extent.state)) {
            break;
        }
        at = stop;
    }
    descriptors.finish();
    let most = if one { descriptors.size() } else { usize::MAX };
    descriptors.used.min(most)
}

fn flags(state: ExtentState) -> u32 {
    match state {
        ExtentState::Allocated => 0,
        ExtentState::Hole => extent_flag::HOLE | extent_flag::ZERO,
        ExtentState::Zero => extent_flag::ZERO,
    }
}

struct Descriptors<'a> {
    out: &'a mut [u8],
    used: usize,
    /// Length and flags of the run in progress.
    last: Option<(u64, u32)>,
    extended: bool,
}

impl Descriptors<'_> {
    fn size(&self) -> usize {
        if self.extended { size_of::<ExtendedStatusDescriptor>() } else { size_of::<StatusDescriptor>() }
    }

    /// False when there is no room for more.
    fn add(&mut self, length: u64, flags: u32) -> bool {
        match &mut self.last {
            Some((run, same)) if *same == flags => {
                *run += length;
                true
            }
            _ => {
                let room = self.finish();
                self.last = Some((length, flags));
                room
            }
        }
    }

    /// Writes the run out; false when it did not fit whole, or nothing fits behind it.
    fn finish(&mut self) -> bool {
        let Some((mut run, flags)) = self.last.take() else { return true };
        while run > 0 {
            let length = if self.extended { run } else { run.min(LONGEST_STATUS) };
            let extended = ExtendedStatusDescriptor { length: length.into(), flags: u64::from(flags).into() };
            let compact = StatusDescriptor { length: (length as u32).into(), flags: flags.into() };
            let bytes = if self.extended { extended.as_bytes() } else { compact.as_bytes() };
            let Some(room) = self.out.get_mut(self.used..self.used + bytes.len()) else {
                return false;
            };
            room.copy_from_slice(bytes);
            self.used += bytes.len();
            run -= length;
        }
        self.used < self.out.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn described(
        offset: u64,
        length: u32,
        one: bool,
        extents: &[(u64, u64, ExtentState)],
    ) -> Vec<(u32, u32)> {
        let extents: Vec<Extent> =
            extents.iter().map(|&(offset, length, state)| Extent { offset, length, state }).collect();
        let mut out = [0; STATUS_BYTES];
        let asked = Asked { offset, length: length.into(), one, extended: false };
        let used = describe_extents(asked, &extents, &mut out);
        let (descriptors, rest) = out[..used].as_chunks::<8>();
        assert!(rest.is_empty());
        descriptors
            .iter()
            .map(|bytes| {
                let descriptor = StatusDescriptor::read_from_bytes(bytes).unwrap();
                (descriptor.length.get(), descriptor.flags.get())
            })
            .collect()
    }

    #[test]
    fn neighbours_in_one_state_are_joined_and_the_range_is_kept() {
        let extents = [
            (0, 8192, ExtentState::Hole),
            (8192, 4096, ExtentState::Hole),
            (12288, 4096, ExtentState::Allocated),
            (16384, 1 << 20, ExtentState::Zero),
        ];
        assert_eq!(described(4096, 16384, false, &extents), [(8192, 3), (4096, 0), (4096, 2)]);
        assert_eq!(described(4096, 16384, true, &extents), [(8192, 3)]);
        assert_eq!(described(4096, 4096, true, &extents), [(4096, 3)]);
    }

    #[test]
    fn a_gap_or_nothing_ends_the_reply() {
        assert_eq!(described(4096, 4096, false, &[]), []);
        assert_eq!(described(4096, 4096, false, &[(8192, 4096, ExtentState::Hole)]), []);
        let gap = [(0, 4096, ExtentState::Hole), (8192, 4096, ExtentState::Hole)];
        assert_eq!(described(0, 16384, false, &gap), [(4096, 3)]);
    }

    #[test]
    fn no_more_than_fits() {
        let states = [ExtentState::Hole, ExtentState::Allocated];
        let extents: Vec<_> = (0..2000).map(|i| (i * 4096, 4096, states[i as usize % 2])).collect();
        assert_eq!(described(0, 2000 * 4096, false, &extents).len(), STATUS_BYTES / 8);
    }
    /// Byte by byte as in the document.
    #[test]
    fn golden_extended_descriptors() {
        let extents = [
            Extent { offset: 0, length: 5 << 32, state: ExtentState::Hole },
            Extent { offset: 5 << 32, length: 4096, state: ExtentState::Zero },
        ];
        let mut out = [0; STATUS_BYTES];
        let asked = Asked { offset: 4096, length: u64::MAX, one: false, extended: true };
        let used = describe_extents(asked, &extents, &mut out);
        let expected = [
            [0, 0, 0, 4, 0xff, 0xff, 0xf0, 0, 0, 0, 0, 0, 0, 0, 0, 3],
            [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 2],
        ];
        assert_eq!(out[..used], *expected.as_flattened());
        assert_eq!(describe_extents(Asked { one: true, ..asked }, &extents, &mut out), 16);
        let states = [ExtentState::Hole, ExtentState::Allocated];
        let many: Vec<_> = (0..2000)
            .map(|i| Extent { offset: i * 4096, length: 4096, state: states[i as usize % 2] })
            .collect();
        let asked = Asked { offset: 0, ..asked };
        assert_eq!(describe_extents(asked, &many, &mut out), STATUS_BYTES, "no more than fits");
    }
}
