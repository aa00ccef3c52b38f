//! The state of an accelerator, for people.

use std::time::Duration;

use weir_block::{Destage, Nanos, RequestKind};

use super::Accel;
use crate::config::Configuration;
use crate::owner::Watermarks;

/// The accelerator's state, for people.
#[derive(Clone, Debug)]
pub struct AccelStatus {
    /// The committed configuration.
    pub configuration: Configuration,
    /// The watermarks.
    pub marks: Watermarks,
    /// The last record that this owner, or the one whose log it has inherited, can have acknowledged.
    pub promised: u64,
    /// Why something waits; empty when nothing is unusual.
    pub reason: String,
    /// Bytes acknowledged and not destaged.
    pub dirty_bytes: u64,
    /// Bytes of the arena in use.
    pub log_used: u64,
    /// Bytes of the arena.
    pub log_bytes: u64,
    /// Destage rates and ages.
    pub destage: DestageStatus,
}

/// Destage of a log into its backing.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DestageStatus {
    /// Bytes of the log that are freed per second, lately; overwrites that needed no writing included.
    #[serde(rename = "rate_bytes_per_second")]
    pub rate: u64,
    /// Age of the oldest record that the backing does not hold, in milliseconds; absent when all is clean. After a
    /// takeover it counts from then.
    pub oldest_dirty_ms: Option<u64>,
    /// Estimated time until all present dirty data is in the backing, at that rate, in milliseconds; absent while unknown.
    pub time_to_clean_ms: Option<u64>,
    /// Time since the last checkpoint was complete, in milliseconds; absent before the first.
    pub checkpoint_age_ms: Option<u64>,
    /// Bytes of the log that checkpoints have dealt with since the disk was opened here.
    pub destaged_bytes: u64,
    /// Of those, bytes that need not be written because they were overwritten within their checkpoint.
    pub coalesced_bytes: u64,
    /// Bytes written to this node's flash for this disk since it was opened here: records, and their frames.
    pub flash_bytes: u64,
    /// Writes that a checkpoint keeps in flight.
    pub depth: usize,
}

impl DestageStatus {
    /// Bytes of the log for each byte that was written to the backing, 1 or more: the saving by coalescing. Absent before
    /// anything was written, and while all was overwritten.
    #[must_use]
    pub fn coalescing_ratio(&self) -> Option<f64> {
        let written = self.destaged_bytes.checked_sub(self.coalesced_bytes).filter(|written| *written > 0)?;
        Some(self.destaged_bytes as f64 / written as f64)
    }

    /// Bytes written to this node's flash for each byte of the log, of which `dirty` are not destaged. Absent without
    /// either.
    #[must_use]
    pub fn flash_write_amplification(&self, dirty: u64) -> Option<f64> {
        let logged = self.destaged_bytes + dirty;
        (self.flash_bytes > 0 && logged > 0).then(|| self.flash_bytes as f64 / logged as f64)
    }
}

impl<L: Destage> Accel<L> {
    /// The state, for people.
    #[must_use]
    pub fn status(&self) -> AccelStatus {
        let reason = match self.destager.error() {
            _ if self.full_log.refuses() => self.full_log_reason(),
            Some(error) => format!("the backing refuses destage: {error}"),
            None if !self.life.is_released() && !self.config.holds_right(self.clock.now()) => {
                "neither the registry nor the members of its set have confirmed this owner lately: waiting for that".into()
            }
            None => self.owner.reason().into(),
        };
        AccelStatus {
            configuration: self.owner.configuration().clone(),
            marks: self.owner.marks(),
            promised: self.owner.promised(),
            reason,
            dirty_bytes: self.dirty.bytes(),
            log_used: self.log.used(),
            log_bytes: self.log.capacity(),
            destage: self.destage_status(self.clock.now()),
        }
    }

    fn destage_status(&self, now: Nanos) -> DestageStatus {
        let ms = |time: Duration| time.as_millis() as u64;
        let (rate, dirty) = (self.pacer.destage_rate(), self.dirty.bytes());
        let to_clean = if dirty == 0 { Some(0) } else { (dirty * 1000).checked_div(rate) };
        DestageStatus {
            rate,
            oldest_dirty_ms: self.dirty.oldest(now).map(ms),
            time_to_clean_ms: to_clean,
            checkpoint_age_ms: self.destager.completed_at().map(|at| ms(now - at)),
            destaged_bytes: self.destager.destaged(),
            coalesced_bytes: self.destager.coalesced(),
            flash_bytes: self.store.as_ref().map_or(0, |store| store.meter().kind(RequestKind::Write).bytes),
            depth: self.destager.depth(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_absent_before_there_is_anything_to_compare() {
        let none = DestageStatus::default();
        assert_eq!((none.coalescing_ratio(), none.flash_write_amplification(0)), (None, None));
        let all_overwritten = DestageStatus { destaged_bytes: 9, coalesced_bytes: 9, ..none };
        assert_eq!(all_overwritten.coalescing_ratio(), None);
    }

    #[test]
    fn a_byte_of_the_log_costs_the_backing_less_and_the_flash_more() {
        let some = DestageStatus {
            destaged_bytes: 300,
            coalesced_bytes: 100,
            flash_bytes: 600,
            ..Default::default()
        };
        assert_eq!(some.coalescing_ratio(), Some(1.5));
        assert_eq!(some.flash_write_amplification(100), Some(1.5));
    }
}
