//! From a layer's extents to the descriptors of a `BLOCK_STATUS` reply.

use weir_block::{Extent, ExtentState};
use zerocopy::IntoBytes;

use crate::protocol::{StatusDescriptor, extent_flag};

/// Room for the descriptors of one reply, in bytes. A client asks again for what did not fit ("the server MAY
/// return fewer descriptors in the reply than would be required").
pub const STATUS_BYTES: usize = 4096;

/// Longest extent that a descriptor can express and that is a multiple of every block size, in bytes.
const LONGEST: u64 = 0xffff_0000;

/// Writes descriptors for the range at `offset` into `out`; returns the bytes used.
///
/// Neighbours in the same state become one. Nothing beyond the range is told, even if the layer knows it: `length` is
/// what the client can use at once. 0 when the extents do not begin at `offset`.
pub fn describe_extents(offset: u64, length: u32, one: bool, extents: &[Extent], out: &mut [u8]) -> usize {
    let end = offset + u64::from(length);
    let mut descriptors = Descriptors { out, used: 0, last: None };
    let mut at = offset;
    for extent in extents {
        let stop = (extent.offset + extent.length).min(end);
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
    let most = if one { size_of::<StatusDescriptor>() } else { usize::MAX };
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
    /// Length and flags of the run that may still grow.
    last: Option<(u64, u32)>,
}

impl Descriptors<'_> {
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
            let length = run.min(LONGEST);
            let descriptor = StatusDescriptor { length: (length as u32).into(), flags: flags.into() };
            let Some(room) = self.out.get_mut(self.used..self.used + size_of::<StatusDescriptor>()) else {
                return false;
            };
            room.copy_from_slice(descriptor.as_bytes());
            self.used += size_of::<StatusDescriptor>();
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
        let used = describe_extents(offset, length, one, &extents, &mut out);
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
}
