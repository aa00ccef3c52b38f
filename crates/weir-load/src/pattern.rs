//! Positions of requests within the range, and their lengths: fio's `random_distribution` and `bssplit`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use weir_block::size::{Size, parse_size};

/// Largest exponent of a Zipf distribution, in thousandths.
const STEEPEST: u32 = 5_000;

/// The order of offsets, within the given [`crate::Access`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Pattern {
    /// Random: every block equally likely. Sequential: one after the other, each thread in its own part.
    #[default]
    Plain,
    /// Random: the block of rank `k` is requested with a probability proportional to `1 / k^theta` (Zipf). The mapping of ranks
    /// to blocks is the same for every thread and every seed; adjacent ranks are not adjacent blocks.
    Zipf {
        /// The exponent in thousandths, 1 to 5000.
        theta_milli: u32,
    },
    /// Random: a percentage of the requests goes to the first part of the range, the others to the rest.
    Hot {
        /// Requests to the hot part, in percent, 1 to 99.
        requests: u8,
        /// The hot part, in percent of the range, 1 to 99.
        range: u8,
    },
    /// Sequential: all threads take the next block of one common sequence.
    Shared,
    /// Sequential: at a fixed distance between starts of requests. At the end of the range the next sweep begins one block after
    /// the start of the last, so that every block is requested once before any is requested again.
    Stride {
        /// Bytes, a multiple of the block size.
        bytes: Size,
    },
}

/// The reason why a text is not a pattern or a mix of block sizes, with the correction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// An unknown word.
    #[error(
        "unknown pattern `{0}`: use plain, zipf, zipf:<theta>, hot:<requests>/<range>, shared or stride:<size>"
    )]
    Unknown(String),
    /// An invalid exponent.
    #[error("`{0}` is not an exponent for zipf: use a number from 0.001 to 5, as in zipf:1.2")]
    Theta(String),
    /// Invalid percentages.
    #[error(
        "`{0}` does not say what is hot: use <percent of requests>/<percent of the range>, 1 to 99 each, as in hot:90/10"
    )]
    Hot(String),
    /// A distance that is not a size.
    #[error("stride:{0}")]
    Stride(weir_block::size::SizeError),
    /// A block size that is not a size.
    #[error(transparent)]
    Size(#[from] weir_block::size::SizeError),
    /// A share that is not a percentage, or a mix whose shares do not add up.
    #[error(
        "`{0}` is not a mix of block sizes: use <size>:<percent>,… with whole percentages that add up to 100, as in 4k:60,64k:40"
    )]
    Mix(String),
}

impl Pattern {
    /// Whether it applies to random offsets (`Some(true)`), sequential ones (`Some(false)`) or both (`None`).
    #[must_use]
    pub fn needs_random(self) -> Option<bool> {
        match self {
            Pattern::Plain => None,
            Pattern::Zipf { .. } | Pattern::Hot { .. } => Some(true),
            Pattern::Shared | Pattern::Stride { .. } => Some(false),
        }
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    /// `plain`, `zipf` (exponent 1.2, as fio's examples have it), `zipf:0.9`, `hot:90/10`, `shared` or `stride:64k`.
    fn from_str(text: &str) -> Result<Pattern, PatternError> {
        let (word, value) = match text.split_once(':') {
            Some((word, value)) => (word, Some(value)),
            None => (text, None),
        };
        match (word.to_ascii_lowercase().as_str(), value) {
            ("plain", None) => Ok(Pattern::Plain),
            ("zipf", None) => Ok(Pattern::Zipf { theta_milli: 1_200 }),
            ("zipf", Some(theta)) => Ok(Pattern::Zipf { theta_milli: theta_milli(theta)? }),
            ("hot", Some(value)) => {
                let part = |text: &str| text.parse().ok().filter(|percent| (1..=99).contains(percent));
                match value.split_once('/').map(|(requests, range)| (part(requests), part(range))) {
                    Some((Some(requests), Some(range))) => Ok(Pattern::Hot { requests, range }),
                    _ => Err(PatternError::Hot(value.into())),
                }
            }
            ("shared", None) => Ok(Pattern::Shared),
            ("stride", Some(value)) => {
                Ok(Pattern::Stride { bytes: Size(parse_size(value).map_err(PatternError::Stride)?) })
            }
            _ => Err(PatternError::Unknown(text.into())),
        }
    }
}

fn theta_milli(text: &str) -> Result<u32, PatternError> {
    let theta = text.parse::<f64>().ok().map(|theta| (theta * 1000.0).round());
    match theta {
        Some(theta) if theta >= 1.0 && theta <= f64::from(STEEPEST) => Ok(theta as u32),
        _ => Err(PatternError::Theta(text.into())),
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::Plain => f.write_str("plain"),
            Pattern::Zipf { theta_milli } => write!(f, "zipf:{}", f64::from(*theta_milli) / 1000.0),
            Pattern::Hot { requests, range } => write!(f, "hot:{requests}/{range}"),
            Pattern::Shared => f.write_str("shared"),
            Pattern::Stride { bytes } => write!(f, "stride:{bytes}"),
        }
    }
}

/// Block sizes, each with its percentage of the requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct BlockMix(Vec<(Size, u8)>);

impl BlockMix {
    /// One size for all requests.
    #[must_use]
    pub fn of(size: Size) -> BlockMix {
        BlockMix(vec![(size, 100)])
    }

    /// Each size with its percentage, in the order given; the percentages add up to 100.
    #[must_use]
    pub fn shares(&self) -> &[(Size, u8)] {
        &self.0
    }

    /// The smallest size.
    #[must_use]
    pub fn smallest(&self) -> Size {
        self.0.iter().map(|share| share.0).min().unwrap_or_default()
    }

    /// The largest size.
    #[must_use]
    pub fn largest(&self) -> Size {
        self.0.iter().map(|share| share.0).max().unwrap_or_default()
    }
}

impl FromStr for BlockMix {
    type Err = PatternError;

    /// `4k` (all requests), or `4k:60,64k:40`.
    fn from_str(text: &str) -> Result<BlockMix, PatternError> {
        if !text.contains([':', ',']) {
            return Ok(BlockMix::of(Size(parse_size(text)?)));
        }
        let wrong = || PatternError::Mix(text.into());
        let mut shares = Vec::new();
        for share in text.split(',') {
            let (size, percent) = share.split_once(':').ok_or_else(wrong)?;
            let percent = percent.trim_end_matches('%').parse::<u8>().map_err(|_| wrong())?;
            shares.push((Size(parse_size(size)?), percent));
        }
        match shares.iter().map(|share| u32::from(share.1)).sum::<u32>() {
            100 if shares.iter().all(|share| share.1 > 0) => Ok(BlockMix(shares)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for BlockMix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [(size, _)] = self.0.as_slice() {
            return write!(f, "{size}");
        }
        for (index, (size, percent)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{size}:{percent}")?;
        }
        Ok(())
    }
}

macro_rules! as_text {
    ($type:ty) => {
        impl From<$type> for String {
            fn from(value: $type) -> String {
                value.to_string()
            }
        }

        impl TryFrom<String> for $type {
            type Error = PatternError;
            fn try_from(text: String) -> Result<$type, PatternError> {
                text.parse()
            }
        }
    };
}

as_text!(Pattern);
as_text!(BlockMix);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_read_and_printed() {
        for text in ["plain", "zipf:0.99", "zipf:1.2", "hot:90/10", "shared", "stride:64KiB"] {
            assert_eq!(text.parse::<Pattern>().unwrap().to_string(), text);
        }
        assert_eq!("zipf".parse(), Ok(Pattern::Zipf { theta_milli: 1_200 }));
        for (text, hint) in [
            ("pareto", "hot:<requests>/<range>"),
            ("zipf:0", "0.001 to 5"),
            ("zipf:nan", "0.001 to 5"),
            ("hot:90", "hot:90/10"),
            ("hot:100/1", "1 to 99"),
            ("stride:1.3", "whole number"),
            ("stride", "stride:<size>"),
        ] {
            let error = text.parse::<Pattern>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }

    #[test]
    fn mixes_are_read_and_printed() {
        for text in ["4KiB", "4KiB:60,64KiB:40", "512:1,1MiB:99"] {
            assert_eq!(text.parse::<BlockMix>().unwrap().to_string(), text);
        }
        let mix: BlockMix = "64k:40%,4k:60%".parse().unwrap();
        assert_eq!((mix.smallest(), mix.largest()), (Size(4096), Size(65536)));
        for text in ["4k:60,64k:41", "4k:60,64k", "4k:0,8k:100", "4k:-1,8k:101", ",", "4k:300", "4k:"] {
            let error = text.parse::<BlockMix>().unwrap_err().to_string();
            assert!(error.contains("4k:60,64k:40"), "{text}: {error}");
        }
        assert_eq!("4KB".parse::<BlockMix>().unwrap().largest(), Size(4000));
        assert!("4x".parse::<BlockMix>().unwrap_err().to_string().contains("KiB"));
    }
}
