//! Bugs that people make in a shared volume, planted on purpose (`VOLUME.md` §3): a checker that never fails proves nothing.
//!
//! A core asks [`Planted::has`] where the bug would be made. Without the feature `planted-bugs` nothing can be planted and the
//! question is a constant, so it costs nothing.

/// One bug. I1 to I8 are the invariants of `VOLUME.md` §3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The owner answers a recall while its own I/O is in flight there (I3, I4).
    AcknowledgeRecallBeforeDrain,
    /// A redirected change gives up only the range that it touches, not the piece that the filesystem may move (I3).
    NeighbourMoved,
    /// A redirected change does not give up the owner's lease (I3).
    KeepLease,
    /// The owner takes a grant for a range that another redirected change of its own has given up meanwhile (I3).
    TakeEveryGrant,
    /// Overlapping requests go on two routes at once (I6).
    TwoRoutes,
    /// Two overlapping writes are under way on the LUN, and the first one is done again after the second (P7).
    OverlapChanges,
    /// Requests that were redirected to a coordinator that is gone are not issued again (I8).
    LostReissue,
    /// A request that was redirected to a coordinator that is gone is done by another route, before that coordinator has certainly
    /// ended (P4).
    ForgetDoubt,
    /// A clone makes blocks shared while the owner may write to them (I1, I3).
    CloneWithoutRecall,
    /// The coordinator grants blocks in a range that it has recalled, before the change there (I3).
    GrantBesideRecall,
    /// A new coordinator changes the layout before the owner has reclaimed (I3).
    GraceSkipped,
    /// After its connection to the owner broke, the coordinator takes a recall for answered (I3).
    ForgetRecall,
    /// The coordinator grants blocks that the file shares with another one for writing (I1).
    GrantShared,
    /// Two redirected changes of one neighbourhood are carried out at once (I3).
    ChangeBesideChange,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 14] = [
        Bug::AcknowledgeRecallBeforeDrain,
        Bug::NeighbourMoved,
        Bug::KeepLease,
        Bug::TakeEveryGrant,
        Bug::TwoRoutes,
        Bug::OverlapChanges,
        Bug::LostReissue,
        Bug::ForgetDoubt,
        Bug::CloneWithoutRecall,
        Bug::GrantBesideRecall,
        Bug::GraceSkipped,
        Bug::ForgetRecall,
        Bug::GrantShared,
        Bug::ChangeBesideChange,
    ];

    /// Its name in commands and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Bug::AcknowledgeRecallBeforeDrain => "acknowledge-recall-before-drain",
            Bug::NeighbourMoved => "neighbour-moved",
            Bug::KeepLease => "keep-lease",
            Bug::TakeEveryGrant => "take-every-grant",
            Bug::TwoRoutes => "two-routes",
            Bug::OverlapChanges => "overlap-changes",
            Bug::LostReissue => "lost-reissue",
            Bug::ForgetDoubt => "forget-doubt",
            Bug::CloneWithoutRecall => "clone-without-recall",
            Bug::GrantBesideRecall => "grant-beside-recall",
            Bug::GraceSkipped => "grace-skipped",
            Bug::ForgetRecall => "forget-recall",
            Bug::GrantShared => "grant-shared",
            Bug::ChangeBesideChange => "change-beside-change",
        }
    }
}

/// The planted bug, if any.
pub type Planted = weir_block::planted::Planted<Bug>;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_distinct() {
        let names: BTreeSet<&str> = Bug::ALL.into_iter().map(Bug::name).collect();
        assert_eq!(names.len(), Bug::ALL.len());
    }
}
