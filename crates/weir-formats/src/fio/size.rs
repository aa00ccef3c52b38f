//! Sizes with the meaning of fio's default `kb_base=1024`: `4k` and `4kb` are 4096, and `4ki` would be 4000.

use weir_block::size::{SizeError, parse_size};

/// The reason why a text is not a size to fio, or an ambiguous one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FioSizeError {
    /// `ki` and similar units.
    #[error("by fio's default that is a multiple of 1000: write 4k for 4096")]
    Decimal,
    /// Not a size.
    #[error(transparent)]
    Size(#[from] SizeError),
}

/// Bytes of `text` in a job file or in fio's JSON.
///
/// # Errors
/// It is not a size, or a multiple of 1000, which is rarely intended.
pub fn parse_fio_size(text: &str) -> Result<u64, FioSizeError> {
    let lower = text.to_ascii_lowercase();
    if lower.ends_with('i') || lower.ends_with("ib") {
        return Err(FioSizeError::Decimal);
    }
    Ok(parse_size(lower.strip_suffix('b').unwrap_or(&lower))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_those_of_fio() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4k", 4096),
            ("4K", 4096),
            ("4kb", 4096),
            ("4KB", 4096),
            ("1gb", 1 << 30),
            ("512b", 512),
        ] {
            assert_eq!(parse_fio_size(text), Ok(bytes), "{text}");
        }
        for text in ["4ki", "4KiB"] {
            assert_eq!(parse_fio_size(text), Err(FioSizeError::Decimal), "{text}");
        }
        for text in ["", "b", "-1", "4x"] {
            assert!(matches!(parse_fio_size(text), Err(FioSizeError::Size(_))), "{text}");
        }
    }
}
