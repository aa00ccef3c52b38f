//! The content of a sector: the value of the write and the number of the sector, from its first byte to its last.

use super::{FOREIGN, INITIAL};

/// Bytes of a sector: the unit that storage writes as a whole or not at all.
pub const SECTOR: usize = 512;

/// Bytes of one copy of value and number.
const STAMP: usize = 16;

/// Fills `data`, whole sectors from `register` on, with a write's value.
pub fn fill(data: &mut [u8], register: u64, value: u64) {
    for (sector, register) in data.chunks_exact_mut(SECTOR).zip(register..) {
        for stamp in sector.chunks_exact_mut(STAMP) {
            let (left, right) = stamp.split_at_mut(STAMP / 2);
            left.copy_from_slice(&value.to_le_bytes());
            right.copy_from_slice(&register.to_le_bytes());
        }
    }
}

/// The value of one sector: a write's value, [`INITIAL`] for zeroes, [`FOREIGN`] for data that no write of this sector can
/// have left.
#[must_use]
pub fn value_of(sector: &[u8], register: u64) -> u64 {
    let (first, rest) = sector.split_at(STAMP);
    if rest.chunks_exact(STAMP).any(|stamp| stamp != first) {
        return FOREIGN;
    }
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("a stamp has two numbers"));
    match (number(&first[..STAMP / 2]), number(&first[STAMP / 2..])) {
        (INITIAL, 0) => INITIAL,
        (INITIAL, _) => FOREIGN,
        (value, there) if there == register => value,
        _ => FOREIGN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_back_from_its_own_sector_and_whole_alone() {
        let mut data = vec![0; 3 * SECTOR];
        assert_eq!(value_of(&data[..SECTOR], 7), INITIAL);
        fill(&mut data, 7, 99);
        for (sector, register) in data.chunks_exact(SECTOR).zip(7..) {
            assert_eq!(value_of(sector, register), 99);
            assert_eq!(value_of(sector, register + 1), FOREIGN, "misplaced");
        }
        let mut torn = data.clone();
        fill(&mut torn, 7, 100);
        torn[256..SECTOR].copy_from_slice(&data[256..SECTOR]);
        assert_eq!(value_of(&torn[..SECTOR], 7), FOREIGN, "torn");
    }
}
