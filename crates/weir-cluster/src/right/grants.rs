//! A member's side of the right to serve: its grants and seals. No clock, no I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_block::Nanos;

use super::planted::{Bug, Planted};

/// An owner may be this many epochs ahead of this node's copy of the record, which lags behind. The node refuses a larger number:
/// otherwise a forged one would make it refuse every owner permanently.
pub const EPOCH_LEAD: u64 = 16;

/// The reason why a member refuses a grant or a seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantRefusal {
    /// The epoch is over (P2).
    #[error("the epoch is over; the lowest valid epoch is {floor}")]
    Over {
        /// The lowest valid epoch.
        floor: u64,
    },
    /// This node does not know the disk's epoch: it has not read the record since its start, or the number is wrong.
    #[error("this node knows the disk's record only up to epoch {known}")]
    Unknown {
        /// The record's epoch, as read since the start; 0 if there is none.
        known: u64,
    },
    /// The requested grant is longer than the cluster allows.
    #[error("a grant lasts at most {longest:?}; use the same lease.ttl on all nodes")]
    TooLong {
        /// Longest grant.
        longest: Duration,
    },
}

/// One disk's grants.
#[derive(Clone, Copy, Debug, Default)]
struct Granted {
    /// The lowest valid epoch. Never falls.
    floor: u64,
    /// End of the last grant, by this node's clock.
    until: Nanos,
    /// End of the last grant in an epoch below the floor.
    below: Nanos,
}

impl Granted {
    fn rise_to(&mut self, epoch: u64) {
        if epoch > self.floor {
            (self.floor, self.below) = (epoch, self.below.max(self.until));
        }
    }
}

/// All grants of one process.
///
/// Kept in memory. A new process does not know its predecessor's grants, so its start counts as a longest grant to each disk; and
/// it refuses epochs below the one that it has read since.
#[derive(Clone, Debug)]
pub struct Grants {
    started: Nanos,
    longest: Duration,
    disks: BTreeMap<String, Granted>,
    planted: Planted,
}

impl Grants {
    /// For a process started at `started`, in a cluster whose grants last at most `longest`.
    #[must_use]
    pub fn new(started: Nanos, longest: Duration) -> Grants {
        Grants { started, longest, disks: BTreeMap::new(), planted: Planted::default() }
    }

    /// Plants a bug, to show that the checks find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// Grants `length` to the owner in `epoch`. `known` is the record's epoch, by a linearizable read sent since the start.
    ///
    /// # Errors
    /// The epoch is over, or unknown here.
    pub fn renew(
        &mut self,
        now: Nanos,
        disk: &str,
        epoch: u64,
        length: Duration,
        known: Option<u64>,
    ) -> Result<(), GrantRefusal> {
        if length > self.longest {
            return Err(GrantRefusal::TooLong { longest: self.longest });
        }
        let granted = self.admit(disk, epoch, known)?;
        granted.until = granted.until.max(now + length);
        Ok(())
    }

    /// Ends all epochs before the committed `epoch`: returns when their last grant ends, by this node's clock.
    ///
    /// # Errors
    /// The epoch is over, or unknown here.
    pub fn seal(
        &mut self,
        now: Nanos,
        disk: &str,
        epoch: u64,
        known: Option<u64>,
    ) -> Result<Nanos, GrantRefusal> {
        let start = if self.planted.has(Bug::NoStartWait) { Nanos(0) } else { self.started + self.longest };
        // Grants of this epoch belong to the sealing owner.
        let granted = self.admit(disk, epoch, known)?;
        Ok(granted.below.max(start).max(now))
    }

    fn admit(&mut self, disk: &str, epoch: u64, known: Option<u64>) -> Result<&mut Granted, GrantRefusal> {
        let Some(known) = known else { return Err(GrantRefusal::Unknown { known: 0 }) };
        let falls = self.planted.has(Bug::FloorFalls);
        let granted = self.disks.entry(disk.to_owned()).or_default();
        granted.rise_to(known);
        if epoch < granted.floor && !falls {
            return Err(GrantRefusal::Over { floor: granted.floor });
        }
        if epoch > known.saturating_add(EPOCH_LEAD) {
            return Err(GrantRefusal::Unknown { known });
        }
        granted.rise_to(epoch);
        Ok(granted)
    }

    /// Drops disks that are not `kept` and whose grants have ended.
    pub fn forget(&mut self, now: Nanos, kept: impl Fn(&str) -> bool) {
        self.disks.retain(|disk, granted| kept(disk) || granted.until > now);
    }

    /// The lowest valid epoch of a disk.
    #[must_use]
    pub fn floor(&self, disk: &str) -> u64 {
        self.disks.get(disk).map_or(0, |granted| granted.floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(5);
    const START: Nanos = Nanos(1_000_000_000);

    fn at(seconds: u64) -> Nanos {
        START + Duration::from_secs(seconds)
    }

    #[test]
    fn a_seal_ends_when_the_last_grant_does() {
        let mut grants = Grants::new(START, LONG);
        assert_eq!(grants.renew(at(10), "d", 3, LONG, Some(3)), Ok(()));
        assert_eq!(grants.seal(at(11), "d", 4, Some(4)), Ok(at(15)));
        assert_eq!(grants.renew(at(12), "d", 3, LONG, Some(3)), Err(GrantRefusal::Over { floor: 4 }));
        assert_eq!(grants.renew(at(12), "d", 4, LONG, Some(4)), Ok(()), "the new owner");
        assert_eq!(grants.seal(at(13), "d", 4, Some(4)), Ok(at(15)), "asked again");
        assert_eq!(grants.seal(at(13), "d", 5, Some(5)), Ok(at(17)), "the next owner waits for it");
        assert_eq!(grants.seal(at(13), "d", 4, Some(5)), Err(GrantRefusal::Over { floor: 5 }));
    }

    #[test]
    fn a_start_counts_as_a_grant() {
        let mut grants = Grants::new(START, LONG);
        assert_eq!(grants.seal(at(1), "d", 4, Some(4)), Ok(at(5)));
        assert_eq!(grants.seal(at(9), "e", 4, Some(4)), Ok(at(9)));
    }

    #[test]
    fn no_grant_before_the_record_was_read() {
        let mut grants = Grants::new(START, LONG);
        assert_eq!(grants.renew(at(1), "d", 3, LONG, None), Err(GrantRefusal::Unknown { known: 0 }));
        assert_eq!(grants.renew(at(1), "d", 3, LONG, Some(4)), Err(GrantRefusal::Over { floor: 4 }));
    }

    #[test]
    fn an_implausible_epoch_does_not_raise_the_floor() {
        let mut grants = Grants::new(START, LONG);
        let refused = Err(GrantRefusal::Unknown { known: 3 });
        assert_eq!(grants.renew(at(1), "d", u64::MAX, LONG, Some(3)), refused);
        assert_eq!(grants.seal(at(1), "d", u64::MAX, Some(3)), Err(GrantRefusal::Unknown { known: 3 }));
        assert_eq!(grants.renew(at(1), "d", 3, LONG, Some(3)), Ok(()));
        let long = Err(GrantRefusal::TooLong { longest: LONG });
        assert_eq!(grants.renew(at(1), "d", 3, Duration::MAX, Some(3)), long);
    }

    #[test]
    fn a_disk_is_forgotten_once_its_grants_have_ended() {
        let mut grants = Grants::new(START, LONG);
        grants.renew(at(1), "d", 3, LONG, Some(3)).expect("granted");
        grants.forget(at(5), |_| false);
        assert_eq!(grants.floor("d"), 3);
        grants.forget(at(6), |_| false);
        assert_eq!(grants.floor("d"), 0);
    }
}
