//! The search for bytes that are not zero.

/// Bytes that are compared at once.
const RUN: usize = 4096;

/// The position of the first byte that is not zero. It compares runs of bytes with zeroes: byte by byte, a search of a whole LUN would
/// be limited by the processor.
#[must_use]
pub fn first_nonzero(bytes: &[u8]) -> Option<usize> {
    const ZEROES: [u8; RUN] = [0; RUN];
    let run = bytes.chunks(RUN).position(|run| run != &ZEROES[..run.len()])? * RUN;
    let within = bytes[run..].iter().position(|byte| *byte != 0)?;
    Some(run + within)
}

/// Whether all bytes are zero.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    first_nonzero(bytes).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_is_not_zero_is_found_in_any_run_and_at_any_end() {
        for length in [0, 1, RUN - 1, RUN, RUN + 1, 3 * RUN + 7] {
            let mut bytes = vec![0; length];
            assert!(is_zero(&bytes), "{length}");
            // From the last byte to the first.
            for at in (0..length).rev() {
                bytes[at] = 1;
                assert_eq!(first_nonzero(&bytes), Some(at), "{length}");
            }
        }
    }
}
