//! Changes in doubt: they were sent on a connection that broke before they were answered. The server may still have them under way, and do
//! them at any time for a while, after whatever comes over the next connection: NBD orders nothing between two connections. So what overlaps
//! them waits until that time is over (P4).

use weir_block::Nanos;

/// A change in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Doubt {
    first: u64,
    end: u64,
    /// From then on the server has certainly done it, or never will.
    until: Nanos,
    /// The request that is done again then; `None` if nobody waits for it any more.
    slot: Option<u32>,
    /// By the request's age.
    serial: u64,
    /// Also a read waits: the range may hold what is older than what has been read there before.
    bars_reads: bool,
}

/// The changes in doubt of one disk; at most as many as it had requests in flight.
#[derive(Debug, Default)]
pub(super) struct Doubts(Vec<Doubt>);

impl Doubts {
    /// The connection has broken on which a change of the range had been sent; `slot` has its request, if it is to be done again; `serial`
    /// is that one's age.
    pub fn add(
        &mut self,
        (first, end): (u64, u64),
        until: Nanos,
        (slot, serial): (Option<u32>, u64),
        bars_reads: bool,
    ) {
        if slot.is_some() {
            // It was in doubt before, and its repetition is now.
            self.0.retain(|doubt| doubt.slot != slot);
        }
        self.0.push(Doubt { first, end, until, slot, serial, bars_reads });
    }

    /// Whether a request has to wait; slot and age are its own.
    pub fn bar(&self, (slot, serial): (u32, u64), range: (u64, u64), is_read: bool, now: Nanos) -> bool {
        self.0.iter().any(|doubt| match doubt.slot {
            Some(own) if own == slot => now < doubt.until,
            // Of two changes in doubt the older one goes first: the newer one is done again after it, wherever it lands before.
            Some(_) if !is_read && serial < doubt.serial => false,
            _ => doubt.overlaps(range) && (!is_read || doubt.bars_reads),
        })
    }

    /// Whether something in the range may still be done over the broken connection.
    pub fn may_land(&self, range: (u64, u64), now: Nanos) -> bool {
        self.0.iter().any(|doubt| doubt.overlaps(range) && now < doubt.until)
    }

    /// The request has been done again.
    pub fn settled(&mut self, slot: u32) {
        self.0.retain(|doubt| doubt.slot != Some(slot));
    }

    /// Nobody waits for the request any more. What it has sent may land all the same.
    pub fn orphan(&mut self, slot: u32) {
        self.0.iter_mut().filter(|doubt| doubt.slot == Some(slot)).for_each(|doubt| doubt.slot = None);
    }

    /// Forgets those that are over and for which nobody waits.
    pub fn expire(&mut self, now: Nanos) {
        self.0.retain(|doubt| doubt.slot.is_some() || now < doubt.until);
    }

    /// The next time after `now` at which one is over; [`Nanos::NEVER`] if none will be.
    pub fn next_end(&self, now: Nanos) -> Nanos {
        let ends = self.0.iter().map(|doubt| doubt.until).filter(|&until| until > now);
        ends.min().unwrap_or(Nanos::NEVER)
    }

    /// Those that may still land.
    pub fn open(&self, now: Nanos) -> usize {
        self.0.iter().filter(|doubt| now < doubt.until).count()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Doubt {
    fn overlaps(&self, (first, end): (u64, u64)) -> bool {
        self.first < end && first < self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_waits_and_everything_else_goes_on() {
        let mut doubts = Doubts::default();
        doubts.add((4096, 8192), Nanos(100), (Some(1), 1), true);
        doubts.add((16384, 20480), Nanos(100), (Some(2), 2), false);
        let bar = |doubts: &Doubts, slot: u32, range, is_read| {
            doubts.bar((slot, slot.into()), range, is_read, Nanos(50))
        };
        assert!(!bar(&doubts, 9, (0, 4096), false) && !bar(&doubts, 9, (8192, 16384), false));
        assert!(bar(&doubts, 9, (0, 4097), false) && bar(&doubts, 9, (8191, 9000), true));
        assert!(bar(&doubts, 9, (16384, 16896), false));
        assert!(!bar(&doubts, 9, (16384, 16896), true), "the log has newer bytes for a read");
        // It is done again when its time is over, and others follow it.
        assert!(bar(&doubts, 1, (4096, 8192), false) && !doubts.bar((1, 1), (4096, 8192), false, Nanos(100)));
        assert!(doubts.bar((9, 9), (4096, 8192), false, Nanos(200)));
        doubts.settled(1);
        assert!(!doubts.bar((9, 9), (4096, 8192), false, Nanos(200)));
    }

    #[test]
    fn one_that_nobody_waits_for_bars_until_its_time_is_over() {
        let mut doubts = Doubts::default();
        doubts.add((0, 4096), Nanos(100), (Some(1), 1), true);
        doubts.add((8192, 12288), Nanos(70), (None, 2), true);
        doubts.orphan(1);
        assert_eq!((doubts.next_end(Nanos(50)), doubts.open(Nanos(50))), (Nanos(70), 2));
        doubts.expire(Nanos(99));
        assert!(
            doubts.bar((9, 9), (0, 512), false, Nanos(99))
                && !doubts.bar((9, 9), (8192, 8704), true, Nanos(99))
        );
        doubts.expire(Nanos(100));
        assert!(doubts.is_empty());
        // The second connection breaks, too.
        doubts.add((0, 4096), Nanos(100), (Some(3), 3), true);
        doubts.add((0, 4096), Nanos(300), (Some(3), 3), true);
        assert!(doubts.bar((3, 3), (0, 4096), false, Nanos(200)));
        assert_eq!(doubts.open(Nanos(200)), 1);
    }

    #[test]
    fn of_two_that_overlap_the_older_one_goes_first() {
        let mut doubts = Doubts::default();
        doubts.add((0, 8192), Nanos(100), (Some(1), 11), true);
        doubts.add((4096, 12288), Nanos(100), (Some(2), 12), true);
        let bar =
            |doubts: &Doubts, slot, serial, at| doubts.bar((slot, serial), (0, 12288), false, Nanos(at));
        assert!(bar(&doubts, 1, 11, 99) && bar(&doubts, 2, 12, 99));
        assert!(!bar(&doubts, 1, 11, 100) && bar(&doubts, 2, 12, 100));
        doubts.settled(1);
        assert!(!bar(&doubts, 2, 12, 100) && bar(&doubts, 3, 13, 100));
        doubts.add((0, 8192), Nanos(100), (None, 14), true);
        assert!(bar(&doubts, 2, 12, 99), "nobody does it again");
    }
}
