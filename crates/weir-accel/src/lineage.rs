//! The descent of a log: the logs that it continues.
//!
//! Within one lineage, records with the same number are the same. A new owner begins a lineage of its own, named by the epoch
//! at which it opened the log, because the former owner may have numbered records that the new one did not inherit.

/// A lineage that a log continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ancestor {
    /// The lineage; 0: none.
    pub lineage: u64,
    /// The last record that was taken over from it. Later ones were never acknowledged, or they would be in every copy of the
    /// set (P1).
    pub last: u64,
}

/// The lineage of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lineage {
    /// The epoch at which the log's owner opened it; 0: not opened yet.
    pub epoch: u64,
    /// The logs that it continues, the youngest first. Two, because a member of the set may not know the last owner, if that
    /// owner received the disk by a move and failed before it could greet all members. Not more, because a disk moves only
    /// after its owner has greeted all members. (The simulator found the failure with one ancestor: the only complete copy
    /// was taken for a foreign one and discarded.)
    pub ancestors: [Ancestor; 2],
}

impl Lineage {
    /// The lineage of an owner that opens an empty log in `epoch`.
    #[must_use]
    pub fn new(epoch: u64) -> Lineage {
        Lineage { epoch, ..Lineage::default() }
    }

    /// The lineage of an owner that in `epoch` goes on from a log of this lineage, whose last record is `last`.
    ///
    /// The log may be a copy that lacks some records that its former owner had itself inherited: of those, too, only the
    /// present ones continue. (The simulator found the alternative's failure: a third node keeps a record that the new owner
    /// lacks, and takes the next one of that number for it.)
    #[must_use]
    pub fn continued(self, epoch: u64, last: u64) -> Lineage {
        let Ancestor { lineage, last: inherited } = self.ancestors[0];
        let before = Ancestor { lineage, last: inherited.min(last) };
        Lineage { epoch, ancestors: [Ancestor { lineage: self.epoch, last }, before] }
    }

    /// The last record that logs of two lineages certainly have in common, if they have the same past; that of a lineage
    /// with itself has no end.
    #[must_use]
    pub fn shares_with(self, other: Lineage) -> Option<u64> {
        let common = |mine: &Ancestor| {
            let same = |theirs: &Ancestor| theirs.lineage == mine.lineage && mine.lineage != 0;
            other.chain().into_iter().find(same).map(|theirs| theirs.last.min(mine.last))
        };
        self.chain().iter().find_map(common)
    }

    fn chain(self) -> [Ancestor; 3] {
        let [inherited, before] = self.ancestors;
        [Ancestor { lineage: self.epoch, last: u64::MAX }, inherited, before]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_generations_are_known() {
        let first = Lineage::new(3);
        let second = first.continued(5, 100);
        let third = second.continued(8, 120);
        assert_eq!(third.shares_with(third), Some(u64::MAX));
        assert_eq!((third.shares_with(second), third.shares_with(first)), (Some(120), Some(100)));
        assert_eq!(third.continued(9, 130).shares_with(first), None);
        assert_eq!(first.shares_with(second), Some(100));
        let sibling = second.continued(9, 110);
        assert_eq!((third.shares_with(sibling), sibling.shares_with(third)), (Some(110), Some(110)));
        assert_eq!(first.shares_with(Lineage::default()), None);
        let shorter = second.continued(8, 90);
        assert_eq!(
            shorter.shares_with(first),
            Some(90),
            "it lacks some of what its former owner had inherited"
        );
        assert_eq!(Lineage::new(4).continued(5, 0).shares_with(Lineage::default()), None);
    }
}
