//! Bugs that the simulator plants in the right to serve, to show that its checks find them. Each disables one rule.

/// A disabled rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A new session counts for a disk before the record was read.
    TrustNewSession,
    /// The owner does not ask a set whose proposal is in doubt.
    ForgetDoubtfulSet,
    /// A grant counts from its answer instead of from its request.
    CountFromReceipt,
    /// No margin for clock drift.
    NoDriftMargin,
    /// The owner continues to serve while it hands the disk over.
    ServeWhileHandingOver,
    /// The start of a process does not count as a grant.
    NoStartWait,
    /// A member continues to grant an epoch that it has sealed.
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

/// The planted bug, if any.
pub type Planted = weir_block::planted::Planted<Bug>;
