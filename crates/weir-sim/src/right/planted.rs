//! Rules that are switched off, in the production cores or in the logic around them that is played here.

use weir_cluster::right::planted::Bug as CoreBug;

/// A rule of the right to serve that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// In the production core.
    Core(CoreBug),
    /// In what surrounds it.
    Shell(Rule),
}

/// A rule that the logic around the cores keeps. Named by what is done without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// The right is checked before the request arrives (rule 1).
    CheckBeforeReceipt,
    /// A record that was asked for before the session began confirms it (rule 2).
    ReadBeforeSession,
    /// A right that grants keep alive confirms a new session (rule 2).
    ConfirmByGrants,
    /// A change of which nothing was heard counts as refused (rule 2).
    DoubtTakenForNo,
    /// A record as it was before the change ends the doubt about it (rule 2).
    DoubtEndedByOldRecord,
    /// One seal among three guards is enough (rule 3).
    OneSealOfThree,
    /// The takeover does not compare the session of the owner (rule 4).
    SessionNotCompared,
    /// The takeover drops the sets of earlier owners from the record (rule 4).
    FormerSetDropped,
    /// The log is as the candidate's copy was before it was sealed (rule 4).
    UnsealedCopy,
    /// Nobody waits until the grants of the sealed members have ended (rule 4).
    NoSetWait,
    /// Members of the new owner's set are sealed instead of the former owner's (rule 4).
    SealNewSet,
    /// A former set is dropped from the record before its right is proved over (rule 4).
    SilenceBeforeProof,
    /// Writes are acknowledged during the wait (rule 4).
    AcknowledgeDuringWait,
    /// A member grants before it has read the record since its start (rule 5).
    GrantBeforeRead,
    /// A move of which nothing was heard is undone by a read of the record (rule 6).
    ResumeOnRead,
    /// The fence grace counts from when the session was seen to be gone (rule 7).
    GraceFromSessionEnd,
    /// No fence grace (rule 7).
    NoGrace,
    /// Write-back is proposed while a write past the log is under way (rule 7).
    ProposeBesideBypass,
    /// A member that does not answer is left out before the registry has agreed (rule 8).
    ShrinkWithoutRegistry,
}

impl Bug {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Bug> {
        CoreBug::ALL.into_iter().map(Bug::Core).chain(Rule::ALL.into_iter().map(Bug::Shell))
    }

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Bug::Core(bug) => bug.name(),
            Bug::Shell(rule) => rule.name(),
        }
    }
}

impl Rule {
    /// All of them.
    pub const ALL: [Rule; 19] = [
        Rule::CheckBeforeReceipt,
        Rule::ReadBeforeSession,
        Rule::ConfirmByGrants,
        Rule::DoubtTakenForNo,
        Rule::DoubtEndedByOldRecord,
        Rule::OneSealOfThree,
        Rule::SessionNotCompared,
        Rule::FormerSetDropped,
        Rule::UnsealedCopy,
        Rule::NoSetWait,
        Rule::SealNewSet,
        Rule::SilenceBeforeProof,
        Rule::AcknowledgeDuringWait,
        Rule::GrantBeforeRead,
        Rule::ResumeOnRead,
        Rule::GraceFromSessionEnd,
        Rule::NoGrace,
        Rule::ProposeBesideBypass,
        Rule::ShrinkWithoutRegistry,
    ];

    const fn name(self) -> &'static str {
        match self {
            Rule::CheckBeforeReceipt => "check-before-receipt",
            Rule::ReadBeforeSession => "read-before-session",
            Rule::ConfirmByGrants => "confirm-by-grants",
            Rule::DoubtTakenForNo => "doubt-taken-for-no",
            Rule::DoubtEndedByOldRecord => "doubt-ended-by-old-record",
            Rule::OneSealOfThree => "one-seal-of-three",
            Rule::SessionNotCompared => "session-not-compared",
            Rule::FormerSetDropped => "former-set-dropped",
            Rule::UnsealedCopy => "unsealed-copy",
            Rule::NoSetWait => "no-set-wait",
            Rule::SealNewSet => "seal-new-set",
            Rule::SilenceBeforeProof => "silence-before-proof",
            Rule::AcknowledgeDuringWait => "acknowledge-during-wait",
            Rule::GrantBeforeRead => "grant-before-read",
            Rule::ResumeOnRead => "resume-on-read",
            Rule::GraceFromSessionEnd => "grace-from-session-end",
            Rule::NoGrace => "no-grace",
            Rule::ProposeBesideBypass => "propose-beside-bypass",
            Rule::ShrinkWithoutRegistry => "shrink-without-registry",
        }
    }
}
