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
    /// A request that failed for lack of a coordinator leaves its range, although the former coordinator may still do it (P4).
    ForgetGivenUp,
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
    /// The coordinator lets an owner begin on a new connection while I/O of a former one is under way (P4).
    WelcomeBesideFormer,
    /// The coordinator grants blocks before the filesystem has committed them (I1, I7).
    GrantBeforeCommit,
    /// The coordinator grants blocks that are allocated and not written (I1).
    GrantUnwritten,
    /// A read that began beside a change grants what it knew before the change ended (I1, I3).
    GrantOutdated,
    /// Blocks are freed while a former owner's I/O there may be under way: it has not answered, and nothing proves that it is over (I4).
    FreeWithoutQuarantine,
    /// A coordinator mounts while a former one may still write (I5).
    MountBeforeFence,
    /// A coordinator mounts before the registry has it on the list of those who may have mounted (I5).
    MountUnlisted,
    /// A claim drops the list of those who may have mounted (I5).
    ForgetMounts,
    /// A proof that a process is fenced counts in a later epoch, when the process was admitted again (I5).
    KeepProofs,
    /// A node lets itself write to the LUN again while it is on the list: it may have been fenced (I5).
    AdmitListed,
    /// A process lets its node write to the LUN while a former process of the node may write there (I4, I5).
    AdmitBesideFormer,
    /// A fenced node lets itself write to the LUN before what its owners issued under their leases has ended (I4).
    AdmitBeforeDrop,
    /// A node claims while its admission is under way, which undoes a later fence (I5).
    ClaimUnadmitted,
    /// A coordinator that is not admitted any more when its mount ends serves all the same (I8).
    ServeUnadmitted,
    /// A node mounts while a proposal that was not answered may take it from the list (I5).
    MountInDoubt,
    /// The late refusal of an earlier proposal is taken for that of the present one, which may be committed still (I5).
    LateRefusal,
    /// A coordinator leaves the list before it has unmounted (I5).
    ReleaseBeforeUnmount,
    /// A coordinator whose mount or unmount does not end leaves the list (I5).
    LeaveStuck,
    /// A coordinator mounts beside a stranger whose heartbeat it could see (I5).
    IgnoreHeartbeat,
    /// A coordinator looks for the heartbeats of strangers before its own one is written (I5).
    ListenFirst,
    /// A proposal that was certainly refused counts as one that may put the node on the list, so that it is never admitted again (I8).
    EnterForEver,
    /// Nothing ends the doubt about a proposal that was not answered: as above (I8).
    DoubtForEver,
    /// The owner takes a flush of the LUN that has failed for done (P8).
    SwallowFlushError,
    /// The coordinator answers a write that the filesystem has made and not committed (P8).
    AnswerBeforeCommit,
    /// What is known of a file's layout stays known while a write moves the blocks (I1, I3).
    KeepKnownLayout,
    /// As above, while a clone shares the blocks (I1, I3).
    KeepClonedLayout,
    /// Requests of a connection that is gone keep their numbers, with which they come again (I8).
    KeepWaiting,
    /// A write that has waited for space is done again over a later one, which was seen meanwhile (P7).
    OvertakeFull,
}

impl Bug {
    /// Those of one file: of its leases, routes and coordinator.
    pub const FILES: [Bug; 20] = [
        Bug::AcknowledgeRecallBeforeDrain,
        Bug::NeighbourMoved,
        Bug::KeepLease,
        Bug::TakeEveryGrant,
        Bug::TwoRoutes,
        Bug::OverlapChanges,
        Bug::LostReissue,
        Bug::ForgetDoubt,
        Bug::ForgetGivenUp,
        Bug::CloneWithoutRecall,
        Bug::GrantBesideRecall,
        Bug::GraceSkipped,
        Bug::ForgetRecall,
        Bug::GrantShared,
        Bug::ChangeBesideChange,
        Bug::WelcomeBesideFormer,
        Bug::GrantBeforeCommit,
        Bug::GrantUnwritten,
        Bug::GrantOutdated,
        Bug::FreeWithoutQuarantine,
    ];

    /// Those of the volume's coordinator: of its claim, fences and mount.
    pub const CLAIMS: [Bug; 17] = [
        Bug::MountBeforeFence,
        Bug::MountUnlisted,
        Bug::ForgetMounts,
        Bug::KeepProofs,
        Bug::AdmitListed,
        Bug::AdmitBesideFormer,
        Bug::AdmitBeforeDrop,
        Bug::ClaimUnadmitted,
        Bug::ServeUnadmitted,
        Bug::MountInDoubt,
        Bug::LateRefusal,
        Bug::ReleaseBeforeUnmount,
        Bug::LeaveStuck,
        Bug::IgnoreHeartbeat,
        Bug::ListenFirst,
        Bug::EnterForEver,
        Bug::DoubtForEver,
    ];

    /// Those of the shells around the cores of one file: of their I/O, buffers and connections.
    pub const SHELLS: [Bug; 6] = [
        Bug::SwallowFlushError,
        Bug::AnswerBeforeCommit,
        Bug::KeepKnownLayout,
        Bug::KeepClonedLayout,
        Bug::KeepWaiting,
        Bug::OvertakeFull,
    ];

    /// All of them.
    pub fn all() -> impl Iterator<Item = Bug> {
        Bug::FILES.into_iter().chain(Bug::CLAIMS).chain(Bug::SHELLS)
    }

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
            Bug::ForgetGivenUp => "forget-given-up",
            Bug::CloneWithoutRecall => "clone-without-recall",
            Bug::GrantBesideRecall => "grant-beside-recall",
            Bug::GraceSkipped => "grace-skipped",
            Bug::ForgetRecall => "forget-recall",
            Bug::GrantShared => "grant-shared",
            Bug::ChangeBesideChange => "change-beside-change",
            Bug::WelcomeBesideFormer => "welcome-beside-former",
            Bug::GrantBeforeCommit => "grant-before-commit",
            Bug::GrantUnwritten => "grant-unwritten",
            Bug::FreeWithoutQuarantine => "free-without-quarantine",
            Bug::MountBeforeFence => "mount-before-fence",
            Bug::MountUnlisted => "mount-unlisted",
            Bug::ForgetMounts => "forget-mounts",
            Bug::KeepProofs => "keep-proofs",
            Bug::AdmitListed => "admit-listed",
            Bug::AdmitBesideFormer => "admit-beside-former",
            Bug::AdmitBeforeDrop => "admit-before-drop",
            Bug::ClaimUnadmitted => "claim-unadmitted",
            Bug::ServeUnadmitted => "serve-unadmitted",
            Bug::MountInDoubt => "mount-in-doubt",
            Bug::LateRefusal => "late-refusal",
            Bug::ReleaseBeforeUnmount => "release-before-unmount",
            Bug::LeaveStuck => "leave-stuck",
            Bug::IgnoreHeartbeat => "ignore-heartbeat",
            Bug::ListenFirst => "listen-first",
            Bug::EnterForEver => "enter-for-ever",
            Bug::DoubtForEver => "doubt-for-ever",
            Bug::SwallowFlushError => "swallow-flush-error",
            Bug::AnswerBeforeCommit => "answer-before-commit",
            Bug::KeepKnownLayout => "keep-known-layout",
            Bug::KeepClonedLayout => "keep-cloned-layout",
            Bug::GrantOutdated => "grant-outdated",
            Bug::KeepWaiting => "keep-waiting",
            Bug::OvertakeFull => "overtake-full",
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
        let names: BTreeSet<&str> = Bug::all().map(Bug::name).collect();
        assert_eq!(names.len(), Bug::all().count());
    }
}
