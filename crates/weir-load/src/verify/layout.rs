//! The blocks of a verified range. A block keeps its offset and size for the whole history.

use weir_block::size::Size;

use crate::generator::spread;
use crate::workload::Span;

/// All blocks inside one region have the same size, in a mixed layout.
const REGION: u64 = 1 << 20;

/// The blocks of a range, numbered from 0 in the order of their offsets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(super) span: Span,
    /// Seed of the choice of sizes.
    pub(super) seed: u64,
    /// Block sizes in bytes; one of them means uniform.
    pub(super) sizes: Vec<u32>,
    /// Number of the first block of each region, and at the end the number of blocks. Empty when uniform.
    first_blocks: Vec<u64>,
}

/// The reason why there is no such layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A block size that does not fit.
    #[error(
        "a block size of {0} is not possible here: use multiples of 512, and powers of two up to 1MiB when mixing"
    )]
    BlockSize(Size),
    /// No block size at all.
    #[error("no block size given")]
    NoSize,
    /// The range holds no block, or no region when mixing.
    #[error("a range of {0} is too small to verify: one block is needed, and 1MiB when mixing block sizes")]
    TooSmall(Size),
    /// Not on a sector.
    #[error("offset {0} is not a multiple of 512")]
    Offset(Size),
}

impl Layout {
    /// Blocks of one size, as many as fit `span` whole.
    ///
    /// # Errors
    /// The size is not a multiple of 512 bytes, or not even one block fits.
    pub fn uniform(span: Span, block_size: u32) -> Result<Layout, LayoutError> {
        if block_size == 0 || !block_size.is_multiple_of(512) {
            return Err(LayoutError::BlockSize(Size(u64::from(block_size))));
        }
        check_offset(span)?;
        let length = span.length / u64::from(block_size) * u64::from(block_size);
        if length == 0 {
            return Err(LayoutError::TooSmall(Size(span.length)));
        }
        let span = Span { length, ..span };
        Ok(Layout { span, seed: 0, sizes: vec![block_size], first_blocks: Vec::new() })
    }

    /// Blocks of mixed `sizes` (powers of two, 512 bytes to 1 MiB), chosen by `seed` for each MiB of `span`.
    ///
    /// # Errors
    /// A size is none of these, or the span has less than a MiB.
    pub fn mixed(span: Span, sizes: &[u32], seed: u64) -> Result<Layout, LayoutError> {
        let fits = |size: u32| size.is_power_of_two() && size >= 512 && u64::from(size) <= REGION;
        if let Some(&size) = sizes.iter().find(|&&size| !fits(size)) {
            return Err(LayoutError::BlockSize(Size(u64::from(size))));
        }
        check_offset(span)?;
        let regions = span.length / REGION;
        match sizes {
            [] => return Err(LayoutError::NoSize),
            &[size] => return Layout::uniform(span, size),
            _ if regions == 0 => return Err(LayoutError::TooSmall(Size(span.length))),
            _ => {}
        }
        let mut layout = Layout {
            span: Span { length: regions * REGION, ..span },
            seed,
            sizes: sizes.to_vec(),
            first_blocks: vec![0],
        };
        let mut blocks = 0;
        for region in 0..regions {
            blocks += REGION / u64::from(layout.size_in(region));
            layout.first_blocks.push(blocks);
        }
        Ok(layout)
    }

    /// The range that the blocks cover.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.first_blocks.last().copied().unwrap_or_else(|| self.span.length / u64::from(self.sizes[0]))
    }

    /// Size of the largest block, in bytes.
    #[must_use]
    pub fn largest_block(&self) -> u32 {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// The position of block number `block`.
    ///
    /// # Panics
    /// When there is no such block.
    #[must_use]
    pub fn block(&self, block: u64) -> Span {
        assert!(block < self.blocks(), "block {block} of {}", self.blocks());
        if self.first_blocks.is_empty() {
            let size = u64::from(self.sizes[0]);
            return Span { offset: self.span.offset + block * size, length: size };
        }
        let region = self.first_blocks.partition_point(|&first| first <= block) - 1;
        let size = u64::from(self.size_in(region as u64));
        let start = self.span.offset + region as u64 * REGION;
        Span { offset: start + (block - self.first_blocks[region]) * size, length: size }
    }

    /// The number of the block that holds byte `offset` of the disk.
    #[must_use]
    pub fn block_at(&self, offset: u64) -> Option<u64> {
        let inside = offset.checked_sub(self.span.offset).filter(|&inside| inside < self.span.length)?;
        if self.first_blocks.is_empty() {
            return Some(inside / u64::from(self.sizes[0]));
        }
        let region = inside / REGION;
        Some(self.first_blocks[region as usize] + inside % REGION / u64::from(self.size_in(region)))
    }

    fn size_in(&self, region: u64) -> u32 {
        self.sizes[(spread(self.seed ^ spread(region)) % self.sizes.len() as u64) as usize]
    }
}

fn check_offset(span: Span) -> Result<(), LayoutError> {
    if span.offset.is_multiple_of(512) { Ok(()) } else { Err(LayoutError::Offset(Size(span.offset))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn errors_name_the_size() {
        let span = Span { offset: 0, length: 1 << 20 };
        assert!(Layout::uniform(span, 1000).unwrap_err().to_string().contains("1000"));
        assert!(Layout::mixed(span, &[4096, 12288], 1).unwrap_err().to_string().contains("12KiB"));
        assert_eq!(Layout::mixed(span, &[], 1), Err(LayoutError::NoSize));
        assert!(Layout::mixed(Span { length: 4096, ..span }, &[512, 4096], 1).is_err());
        assert!(Layout::uniform(Span { offset: 100, ..span }, 512).is_err());
    }

    proptest! {
        #[test]
        fn blocks_tile_the_range(mebibytes in 1u64..20, seed: u64, offset in 0u64..100) {
            let span = Span { offset: offset * 512, length: mebibytes << 20 };
            let layout = Layout::mixed(span, &[512, 4096, 65536], seed).unwrap();
            let mut end = span.offset;
            for number in 0..layout.blocks() {
                let block = layout.block(number);
                prop_assert_eq!(block.offset, end);
                end += block.length;
                prop_assert_eq!(layout.block_at(block.offset), Some(number));
                prop_assert_eq!(layout.block_at(end - 1), Some(number));
            }
            prop_assert_eq!(end, span.offset + span.length);
            prop_assert_eq!(layout.block_at(end), None);
        }
    }
}
