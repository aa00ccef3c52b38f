//! The limit of a disk, as its record has it.

use std::fmt;

use serde::{Deserialize, Serialize};
use weir_block::size::Size;

/// The highest rate at which a disk's clients are served. At least one of the two rates is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Requests per second, above zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes of reads and writes per second, above zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// After a pause, what the rates allow in so many milliseconds passes at once.
    #[serde(default = "default_burst")]
    pub burst_ms: u64,
}

fn default_burst() -> u64 {
    Limit::BURST_MS
}

impl fmt::Display for Limit {
    /// `500 requests/s, 100MiB/s, burst of 100 ms`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(iops) = self.iops {
            write!(f, "{iops} requests/s, ")?;
        }
        if let Some(bytes) = self.bytes_per_second {
            write!(f, "{}/s, ", Size(bytes))?;
        }
        write!(f, "burst of {} ms", self.burst_ms)
    }
}

impl Limit {
    /// The burst unless another one is set.
    pub const BURST_MS: u64 = 100;

    /// The longest burst: an hour.
    pub const LONGEST_BURST_MS: u64 = 3_600_000;

    /// The reason why the limit contradicts itself, if it does.
    #[must_use]
    pub fn contradiction(self) -> Option<String> {
        let Limit { iops, bytes_per_second, burst_ms } = self;
        match (iops, bytes_per_second) {
            (None, None) => Some("it limits neither requests nor bytes".into()),
            (Some(0), _) | (_, Some(0)) => Some("a rate of zero would serve nothing".into()),
            _ if !(1..=Limit::LONGEST_BURST_MS).contains(&burst_ms) => {
                let most = Limit::LONGEST_BURST_MS;
                Some(format!("a burst lasts 1 to {most} ms, not {burst_ms}"))
            }
            _ => None,
        }
    }
}
