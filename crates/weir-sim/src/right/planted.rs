//! Disabled rules, in the production cores or in the simulated logic around them.

use weir_cluster::right::planted::Bug as CoreBug;

/// A disabled rule of the right to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// In the production core.
    Core(CoreBug),
    /// In the simulated logic around it.
    Shell(Rule),
}

/// A rule of the logic around the cores, named by the violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// The right is checked before the request arrives.
    CheckBeforeReceipt,
    /// A read sent before the session began confirms it.
    ReadBeforeSession,
    /// A right upheld by grants confirms a new session.
    ConfirmByGrants,
    /// A change without an answer counts as refused.
    DoubtTakenForNo,
    /// An unchanged record ends the doubt about a change.
    DoubtEndedByOldRecord,
    /// One seal among three guards is sufficient.
    OneSealOfThree,
    /// The takeover does not compare the owner's session.
    SessionNotCompared,
    /// The takeover drops the sets of earlier owners from the record.
    FormerSetDropped,
    /// The new owner's log is its copy from before the seal.
    UnsealedCopy,
    /// The new owner does not wait for the end of the sealed members' grants.
    NoSetWait,
    /// The new owner seals members of its own set instead of the former owner's.
    SealNewSet,
    /// The record drops a former set before its right is proved over.
    SilenceBeforeProof,
    /// The new owner acknowledges writes during the wait.
    AcknowledgeDuringWait,
    /// A member grants before it has read the record since its start.
    GrantBeforeRead,
    /// A read of the record cancels a move without an answer.
    ResumeOnRead,
    /// The fence grace counts from when the session was found absent.
    GraceFromSessionEnd,
    /// No fence grace.
    NoGrace,
    /// The owner proposes write-back while a bypassing write is in flight.
    ProposeBesideBypass,
    /// The owner drops an unresponsive member before the registry has committed it.
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
