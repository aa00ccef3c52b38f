//! The time limits of node states. The same on all nodes.

use std::time::Duration;

use super::planted::Planted;
use crate::records::MAX_ISOLATIONS;

/// Limits of isolation and quarantine.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Nobody takes the disks of an isolated node for so long, while their members hear it.
    pub resiliency_period: Duration,
    /// So many isolations within [`Rules::quarantine_window`] quarantine a node: 1 to [`MAX_ISOLATIONS`].
    pub quarantine_threshold: usize,
    /// The time for which an isolation counts.
    pub quarantine_window: Duration,
    /// The duration of a quarantine.
    pub quarantine_duration: Duration,
    /// A planted bug, only for the simulator.
    pub planted: Planted,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            resiliency_period: Duration::from_secs(240),
            quarantine_threshold: 3,
            quarantine_window: Duration::from_secs(3600),
            quarantine_duration: Duration::from_secs(7200),
            planted: Planted::default(),
        }
    }
}

impl Rules {
    /// # Errors
    /// In words: the threshold is out of bounds.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=MAX_ISOLATIONS).contains(&self.quarantine_threshold) {
            return Err(format!(
                "the quarantine's threshold is 1 to {MAX_ISOLATIONS} isolations, not {}",
                self.quarantine_threshold
            ));
        }
        Ok(())
    }
}

/// Most nodes of `nodes` that may be quarantined at once: 20 %, rounded down, and at least one.
#[must_use]
pub fn quarantine_limit(nodes: usize) -> usize {
    (nodes / 5).max(1)
}

/// `duration` in whole milliseconds.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
