//! Bugs that people make in systems of this kind, planted on purpose: a checker that never fails proves nothing.
//!
//! A core asks [`Planted::has`] where the bug would be made. Without the feature `planted-bugs` nothing can be
//! planted and the question is a constant, so it costs nothing.

/// One bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The owner does not wait for the slowest member of the set (P1).
    AcknowledgeOneCopyShort,
    /// The owner acts under a set that it has proposed and that is not committed (P3).
    BelieveBeforeCommit,
    /// The owner takes a lost answer of the registry for a no (P3).
    ForgetDoubt,
    /// The owner takes a confirmation of another epoch for one of this, though the copy may be discarded (P3).
    IgnoreCopyEpoch,
    /// The owner counts a copy that is still being filled (P1).
    CountIncompleteCopy,
    /// After a takeover, writes are acknowledged before the set is restored (P1).
    AcknowledgeUnrestored,
    /// After a takeover, inherited records count as acknowledged, though the other copies may lack some (P7).
    AnswerInheritedAtOnce,
    /// Write-back is left with records in the log that the backing does not hold (P1).
    LeaveUndrained,
    /// Writes go past the log, and a copy with older records of the same blocks may take over afterwards (P4).
    ForgetBypassed,
    /// The new owner destages while the former owner's writes may still be under way (P4).
    ForgetFormer,
    /// A new owner destages the inherited records in several checkpoints (P4).
    DestageInheritedInParts,
    /// A checkpoint writes its records out of order: the oldest version of a block comes last (P4, P5).
    ReorderDestage,
    /// A checkpoint counts as done when it is written; the owner does not flush the backing (P6).
    FreeBeforeFlush,
    /// A checkpoint begins while a write past the log is under way (P4).
    DestageBesideBypass,
    /// The owner does not check the lease before it writes past the log (P2).
    BypassWithoutLease,
    /// A read that has seen a record which is not acknowledged is answered at once (P7).
    AnswerUnacknowledgedReads,
    /// The new owner takes the log and leaves the replica open to the former owner (P2).
    SkipSeal,
    /// A replica obeys any sender (P2).
    IgnoreEpoch,
    /// A rejoining replica keeps records that the new owner did not inherit (P7).
    KeepUninherited,
    /// A replica goes on with a copy of another log (P1).
    KeepForeignLog,
    /// A replica keeps records after the order to free them, and confirms that it has freed them (P4).
    KeepFreed,
    /// A replica does not look at the records' checksums (P11).
    SkipChecksum,
    /// A disk is handed over while its former owner's destage is in flight, and the new owner does not wait for that (P4).
    HandOverBesideDestage,
    /// The owner acknowledges records that are in its memory and not yet on its flash (P1).
    CountUnstored,
    /// A replica on flash confirms records that are in its memory and not yet durable (P1).
    ConfirmUnstored,
    /// A log on flash is cut off, and its journal does not notice (P1).
    ForgetRewind,
    /// A durable log of which a part is damaged is taken for a complete one (P11).
    TakeDamaged,
    /// A node that has started again keeps a copy that the registry does not count any more (P1).
    KeepUncounted,
    /// A copy is called complete, and taken for it, while its backlog is still on the way (P1).
    CompleteWithGap,
    /// Of a part of the backlog that is freed in part, the rest is not sent either (P1).
    SkipFreedPart,
    /// A copy on flash becomes durable in the order in which it is filled, and not in that of its records (P11).
    RestBesideGap,
    /// A new session of a node's counts for its disks before their records were read (P2).
    TrustReturnedLease,
    /// A disk is opened on a record that was read before the session began which is to count for it (P2).
    OpenWhileFenced,
    /// A node releases another node's disk only when other work is finished (P9).
    LetGoWaits,
    /// The node answers a finished request without proof that it may still serve the disk (P2).
    ReplyWithoutLease,
    /// The log goes to the backing although nothing says that this node may still serve the disk (P4).
    DestageWithoutLease,
    /// A partially sent frame counts as sent, and the next one is sent instead of the rest (P1).
    CountPartialFrame,
    /// A failed write to flash counts as in flight for ever: its slot is never released (P10).
    KeepInFlight,
    /// A frame's data stays pinned in the arena after the flash has failed and the frame has no waiter any more (P10).
    KeepPinned,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 39] = [
        Bug::AcknowledgeOneCopyShort,
        Bug::BelieveBeforeCommit,
        Bug::ForgetDoubt,
        Bug::IgnoreCopyEpoch,
        Bug::CountIncompleteCopy,
        Bug::AcknowledgeUnrestored,
        Bug::AnswerInheritedAtOnce,
        Bug::LeaveUndrained,
        Bug::ForgetBypassed,
        Bug::ForgetFormer,
        Bug::DestageInheritedInParts,
        Bug::ReorderDestage,
        Bug::FreeBeforeFlush,
        Bug::DestageBesideBypass,
        Bug::BypassWithoutLease,
        Bug::AnswerUnacknowledgedReads,
        Bug::SkipSeal,
        Bug::IgnoreEpoch,
        Bug::KeepUninherited,
        Bug::KeepForeignLog,
        Bug::KeepFreed,
        Bug::SkipChecksum,
        Bug::HandOverBesideDestage,
        Bug::CountUnstored,
        Bug::ConfirmUnstored,
        Bug::ForgetRewind,
        Bug::TakeDamaged,
        Bug::KeepUncounted,
        Bug::CompleteWithGap,
        Bug::SkipFreedPart,
        Bug::RestBesideGap,
        Bug::TrustReturnedLease,
        Bug::OpenWhileFenced,
        Bug::LetGoWaits,
        Bug::ReplyWithoutLease,
        Bug::DestageWithoutLease,
        Bug::CountPartialFrame,
        Bug::KeepInFlight,
        Bug::KeepPinned,
    ];

    /// Its name in commands and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Bug::AcknowledgeOneCopyShort => "acknowledge-one-copy-short",
            Bug::BelieveBeforeCommit => "believe-before-commit",
            Bug::ForgetDoubt => "forget-doubt",
            Bug::IgnoreCopyEpoch => "ignore-copy-epoch",
            Bug::CountIncompleteCopy => "count-incomplete-copy",
            Bug::AcknowledgeUnrestored => "acknowledge-unrestored",
            Bug::AnswerInheritedAtOnce => "answer-inherited-at-once",
            Bug::LeaveUndrained => "leave-undrained",
            Bug::ForgetBypassed => "forget-bypassed",
            Bug::ForgetFormer => "forget-former",
            Bug::DestageInheritedInParts => "destage-inherited-in-parts",
            Bug::ReorderDestage => "reorder-destage",
            Bug::FreeBeforeFlush => "free-before-flush",
            Bug::DestageBesideBypass => "destage-beside-bypass",
            Bug::BypassWithoutLease => "bypass-without-lease",
            Bug::AnswerUnacknowledgedReads => "answer-unacknowledged-reads",
            Bug::SkipSeal => "skip-seal",
            Bug::IgnoreEpoch => "ignore-epoch",
            Bug::KeepUninherited => "keep-uninherited",
            Bug::KeepForeignLog => "keep-foreign-log",
            Bug::KeepFreed => "keep-freed",
            Bug::SkipChecksum => "skip-checksum",
            Bug::HandOverBesideDestage => "hand-over-beside-destage",
            Bug::CountUnstored => "count-unstored",
            Bug::ConfirmUnstored => "confirm-unstored",
            Bug::ForgetRewind => "forget-rewind",
            Bug::TakeDamaged => "take-damaged",
            Bug::KeepUncounted => "keep-uncounted",
            Bug::CompleteWithGap => "complete-with-gap",
            Bug::SkipFreedPart => "skip-freed-part",
            Bug::RestBesideGap => "rest-beside-gap",
            Bug::TrustReturnedLease => "trust-returned-lease",
            Bug::OpenWhileFenced => "open-while-fenced",
            Bug::LetGoWaits => "let-go-waits",
            Bug::ReplyWithoutLease => "reply-without-lease",
            Bug::DestageWithoutLease => "destage-without-lease",
            Bug::CountPartialFrame => "count-partial-frame",
            Bug::KeepInFlight => "keep-in-flight",
            Bug::KeepPinned => "keep-pinned",
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

    #[cfg(not(feature = "planted-bugs"))]
    #[test]
    fn without_the_feature_there_is_nothing_to_carry() {
        assert_eq!(size_of::<Planted>(), 0);
        assert!(!Bug::ALL.into_iter().any(|bug| Planted::default().has(bug)));
    }
}
