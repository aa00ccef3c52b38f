//! The stamp in each sector of a verified block.
//!
//! | bytes | content (little endian) |
//! |---|---|
//! | 0..4 | magic `WeiR` |
//! | 4..8 | CRC-32C of bytes 8..512 |
//! | 8..16 | run: whose data it is |
//! | 16..24 | where the sector belongs, in bytes from the start of the disk |
//! | 24..28 | version of the block |
//! | 28..32 | CRC-32C of the bodies of all sectors of the block |
//! | 32..512 | body: random |

use weir_block::zeroes::is_zero;

/// Bytes of a sector: the unit that even a torn write does not divide.
pub(super) const SECTOR: usize = 512;

const MAGIC: [u8; 4] = *b"WeiR";
const BODY: usize = 32;

/// The parsed stamp of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sector {
    /// All zeroes: never written, or zeroed.
    Blank,
    /// A stamp with a valid checksum.
    Stamped {
        /// The run of the data.
        run: u64,
        /// Its position, in bytes from the start of the disk.
        offset: u64,
        /// Version of the block.
        version: u32,
        /// Checksum over the bodies of the block's sectors.
        block_sum: u32,
    },
    /// Has the magic number, but a wrong checksum.
    Corrupt,
    /// Any other content.
    Unknown,
}

/// Fills `block`, which belongs at byte `offset` of the disk, with version `version` of run `run`.
/// The length is a multiple of 512 bytes; a rest is left alone.
pub fn stamp(run: u64, offset: u64, version: u32, block: &mut [u8]) {
    let mut random = fastrand::Rng::with_seed(run ^ offset.rotate_left(24) ^ u64::from(version));
    let mut block_sum = 0;
    for sector in block.as_chunks_mut::<SECTOR>().0 {
        for word in sector[BODY..].as_chunks_mut::<8>().0 {
            *word = random.u64(..).to_le_bytes();
        }
        block_sum = crc32c::crc32c_append(block_sum, &sector[BODY..]);
    }
    for (index, sector) in block.as_chunks_mut::<SECTOR>().0.iter_mut().enumerate() {
        sector[0..4].copy_from_slice(&MAGIC);
        sector[8..16].copy_from_slice(&run.to_le_bytes());
        sector[16..24].copy_from_slice(&(offset + (index * SECTOR) as u64).to_le_bytes());
        sector[24..28].copy_from_slice(&version.to_le_bytes());
        sector[28..32].copy_from_slice(&block_sum.to_le_bytes());
        let sum = crc32c::crc32c(&sector[8..]);
        sector[4..8].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Reads the stamp of one sector.
#[must_use]
pub fn read_sector(sector: &[u8; SECTOR]) -> Sector {
    if sector[0..4] != MAGIC {
        return if is_zero(sector) { Sector::Blank } else { Sector::Unknown };
    }
    if crc32c::crc32c(&sector[8..]) != word(sector, 4) {
        return Sector::Corrupt;
    }
    Sector::Stamped {
        run: long(sector, 8),
        offset: long(sector, 16),
        version: word(sector, 24),
        block_sum: word(sector, 28),
    }
}

/// The checksum over the bodies of all sectors of a block, as [`stamp`] computes it.
pub(super) fn sum_of_bodies(block: &[u8]) -> u32 {
    block.as_chunks::<SECTOR>().0.iter().fold(0, |sum, sector| crc32c::crc32c_append(sum, &sector[BODY..]))
}

fn word(sector: &[u8; SECTOR], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| sector[at + i]))
}

fn long(sector: &[u8; SECTOR], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| sector[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sector_says_where_it_belongs() {
        let mut block = vec![0; 2048];
        stamp(7, 8192, 3, &mut block);
        let sum = sum_of_bodies(&block);
        for (index, sector) in block.as_chunks::<SECTOR>().0.iter().enumerate() {
            let offset = 8192 + index as u64 * 512;
            assert_eq!(read_sector(sector), Sector::Stamped { run: 7, offset, version: 3, block_sum: sum });
        }
    }

    #[test]
    fn a_flipped_bit_anywhere_is_seen() {
        let mut block = [0; SECTOR];
        stamp(7, 0, 1, &mut block);
        for bit in 0..SECTOR * 8 {
            let mut damaged = block;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(read_sector(&damaged), Sector::Corrupt | Sector::Unknown), "bit {bit}");
        }
        assert_eq!(read_sector(&[0; SECTOR]), Sector::Blank);
    }
}
