//! Bugs that the simulator plants in the right to serve, to show that its checks find them. One for each rule.

/// A rule that is switched off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A new session counts for a disk before the record was read (rule 2).
    TrustNewSession,
    /// A set whose proposal is in doubt is not asked (rule 2).
    ForgetDoubtfulSet,
    /// A grant counts from when its answer came instead of from when it was asked for (rule 2).
    CountFromReceipt,
    /// Nothing is left for clocks that run at different speeds (rule 1).
    NoDriftMargin,
    /// The owner goes on serving while it hands the disk over (rule 6).
    ServeWhileHandingOver,
    /// A process that starts does not count as having given a grant (rule 5).
    NoStartWait,
    /// A member goes on granting an epoch that it has sealed (rule 5).
    FloorFalls,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 7] = [
        Bug::TrustNewSession,
        Bug::ForgetDoubtfulSet,
        Bug::CountFromReceipt,
        Bug::NoDriftMargin,
        Bug::ServeWhileHandingOver,
        Bug::NoStartWait,
        Bug::FloorFalls,
    ];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Bug::TrustNewSession => "trust-new-session",
            Bug::ForgetDoubtfulSet => "forget-doubtful-set",
            Bug::CountFromReceipt => "count-from-receipt",
            Bug::NoDriftMargin => "no-drift-margin",
            Bug::ServeWhileHandingOver => "serve-while-handing-over",
            Bug::NoStartWait => "no-start-wait",
            Bug::FloorFalls => "floor-falls",
        }
    }
}

/// The bug that is planted in a core, if there is one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planted(#[cfg(feature = "planted-bugs")] Option<Bug>);

impl Planted {
    /// This bug, or none.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub const fn new(bug: Option<Bug>) -> Planted {
        Planted(bug)
    }

    /// Whether it is this bug.
    #[must_use]
    pub fn has(self, bug: Bug) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self.0 == Some(bug);
        #[cfg(not(feature = "planted-bugs"))]
        {
            let _ = bug;
            false
        }
    }
}
