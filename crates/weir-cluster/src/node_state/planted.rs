//! Bugs that the simulator plants in the rules of node states, to show that its checks find them. Each disables one rule.

/// A disabled rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A quarantine begins although as many nodes as allowed are quarantined.
    ExceedQuarantineLimit,
    /// An isolation is not added to the node's history.
    ForgetIsolation,
    /// Isolations count for ever instead of an hour.
    CountOldIsolations,
    /// A disk of an isolated node that its members hear is taken over.
    TakeFromIsolated,
    /// The choice of nodes for disks ignores the nodes' states.
    PlaceOnBarred,
    /// A node that is back in the registry is not drained any more.
    ForgetDrain,
    /// A node that is back in the registry is not quarantined any more.
    ForgetQuarantine,
    /// A drained or quarantined node gives up its copy of the log of a disk whose owner is gone.
    DrainLastCopy,
    /// A drain leaves a disk with fewer copies than its policy requests, although it was not told to.
    DrainBelowPolicy,
    /// A node with the only copy of a disk's log is removed.
    RemoveOnlyCopy,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 10] = [
        Bug::ExceedQuarantineLimit,
        Bug::ForgetIsolation,
        Bug::CountOldIsolations,
        Bug::TakeFromIsolated,
        Bug::PlaceOnBarred,
        Bug::ForgetDrain,
        Bug::ForgetQuarantine,
        Bug::DrainLastCopy,
        Bug::DrainBelowPolicy,
        Bug::RemoveOnlyCopy,
    ];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Bug::ExceedQuarantineLimit => "exceed-quarantine-limit",
            Bug::ForgetIsolation => "forget-isolation",
            Bug::CountOldIsolations => "count-old-isolations",
            Bug::TakeFromIsolated => "take-from-isolated",
            Bug::PlaceOnBarred => "place-on-barred",
            Bug::ForgetDrain => "forget-drain",
            Bug::ForgetQuarantine => "forget-quarantine",
            Bug::DrainLastCopy => "drain-last-copy",
            Bug::DrainBelowPolicy => "drain-below-policy",
            Bug::RemoveOnlyCopy => "remove-only-copy",
        }
    }
}

/// The planted bug, if any.
pub type Planted = weir_block::planted::Planted<Bug>;
