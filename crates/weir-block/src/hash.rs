//! A hash that is the same in every build, on every machine.

/// The start of [`fnv1a`] for plain bytes.
pub const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a, 64 bits (Fowler, Noll, Vo; draft-eastlake-fnv, section 2), from `basis`. Not for input of an attacker: collisions are easy to
/// find.
pub fn fnv1a(basis: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(basis, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records and locks of other builds hold them.
    #[test]
    fn hashes_are_those_of_the_draft() {
        assert_eq!(fnv1a(FNV_BASIS, *b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(FNV_BASIS, *b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(FNV_BASIS, *b"foobar"), 0x8594_4171_f739_67e8);
    }
}
