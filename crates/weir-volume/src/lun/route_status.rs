//! The state of a disk of a shared volume at its owner, for operators: by which way its I/O goes, and why.

/// By which way I/O goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteState {
    /// This node does it on the LUN, wherever the disk has blocks.
    Direct,
    /// The coordinator does it on the LUN.
    BlockRedirected,
    /// The coordinator does it through its filesystem.
    FileRedirected,
    /// It waits.
    Paused,
}

impl RouteState {
    /// All states, in the order of their numbers.
    pub const ALL: [RouteState; 4] =
        [RouteState::Direct, RouteState::BlockRedirected, RouteState::FileRedirected, RouteState::Paused];

    /// Its name in commands, metrics and events.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            RouteState::Direct => "direct",
            RouteState::BlockRedirected => "block-redirected",
            RouteState::FileRedirected => "file-redirected",
            RouteState::Paused => "paused",
        }
    }
}

/// Why I/O does not go directly, or may not for all of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The operator wants it to go through the coordinator.
    UserRequest,
    /// A part of the disk has no blocks of its own yet: writes there are redirected until it has.
    UnallocatedExtent,
    /// A part of the disk shares its blocks with a snapshot or a clone: a write there is redirected, and gets blocks of its own.
    SharedExtent,
    /// This node does not reach the LUN.
    NoDiskConnectivity,
    /// The LUN refuses this node's writes: another node has fenced it.
    Fenced,
    /// Nobody coordinates the volume, or its coordinator cannot be reached.
    CoordinatorMoving,
    /// The same, while an operator moves its coordination to another node.
    CoordinatorHandover,
    /// The volume's coordinator owes answers, and has given none for a while: its LUN hangs, or its process.
    CoordinatorSilent,
    /// One of these two has lasted for longer than the operator allows: requests that need a coordinator fail.
    RecoveryFailed,
    /// The volume has no space left: writes that need some wait, or fail.
    VolumeFull,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Reason; 10] = [
        Reason::UserRequest,
        Reason::UnallocatedExtent,
        Reason::SharedExtent,
        Reason::NoDiskConnectivity,
        Reason::Fenced,
        Reason::CoordinatorMoving,
        Reason::CoordinatorHandover,
        Reason::CoordinatorSilent,
        Reason::RecoveryFailed,
        Reason::VolumeFull,
    ];

    /// Its name in commands, metrics and events.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Reason::UserRequest => "user-request",
            Reason::UnallocatedExtent => "unallocated-extent",
            Reason::SharedExtent => "shared-extent",
            Reason::NoDiskConnectivity => "no-disk-connectivity",
            Reason::Fenced => "fenced",
            Reason::CoordinatorMoving => "coordinator-moving",
            Reason::CoordinatorHandover => "coordinator-handover",
            Reason::CoordinatorSilent => "coordinator-silent",
            Reason::RecoveryFailed => "recovery-failed",
            Reason::VolumeFull => "volume-full",
        }
    }

    /// It is as it should be: nobody has to do anything.
    #[must_use]
    pub const fn is_benign(self) -> bool {
        matches!(
            self,
            Reason::UserRequest
                | Reason::UnallocatedExtent
                | Reason::SharedExtent
                | Reason::CoordinatorHandover
        )
    }
}

/// Why requests that need a coordinator fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// There has been none for too long.
    Missing,
    /// It is connected, and has answered nothing for too long.
    Silent,
}

/// A set of reasons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reasons(u16);

impl Reasons {
    /// With another one, if it holds.
    #[must_use]
    pub const fn with(self, reason: Reason, holds: bool) -> Reasons {
        if holds { Reasons(self.0 | 1 << reason as u8) } else { self }
    }

    /// Without one of them.
    #[must_use]
    pub const fn without(self, reason: Reason) -> Reasons {
        Reasons(self.0 & !(1 << reason as u8))
    }

    /// Whether one of them holds.
    #[must_use]
    pub const fn has(self, reason: Reason) -> bool {
        self.0 & 1 << reason as u8 != 0
    }

    /// Without those that come and go with single requests.
    #[must_use]
    pub const fn lasting(self) -> Reasons {
        let passing = 1 << Reason::UnallocatedExtent as u8 | 1 << Reason::SharedExtent as u8;
        Reasons(self.0 & !passing)
    }

    /// The set as a number.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The set that has this number.
    #[must_use]
    pub const fn of_bits(bits: u16) -> Reasons {
        Reasons(bits)
    }

    /// All of them.
    pub fn iter(self) -> impl Iterator<Item = Reason> {
        Reason::ALL.into_iter().filter(move |reason| self.has(*reason))
    }
}

/// Requests, by their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteCounts {
    /// Parts of requests that this node did on the LUN.
    pub direct: u64,
    /// Parts that the coordinator did on the LUN.
    pub block: u64,
    /// Requests that the coordinator did through its filesystem.
    pub file: u64,
    /// Parts of reads in holes.
    pub zeroes: u64,
    /// Parts of requests that crossed from one extent to another.
    pub splits: u64,
}

/// All of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteStatus {
    /// The way.
    pub state: RouteState,
    /// Why.
    pub reasons: Reasons,
    /// Since the disk was opened.
    pub counts: RouteCounts,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_in() {
        let set = Reasons::default().with(Reason::Fenced, true).with(Reason::UserRequest, false);
        assert_eq!(set.iter().collect::<Vec<_>>(), [Reason::Fenced]);
        let passing = set.with(Reason::UnallocatedExtent, true).with(Reason::SharedExtent, true);
        assert_eq!(passing.lasting(), set);
        let all = Reason::ALL.into_iter().fold(Reasons::default(), |set, reason| set.with(reason, true));
        assert_eq!(all.iter().count(), Reason::ALL.len());
        let benign: Vec<&str> = all.iter().filter(|one| one.is_benign()).map(Reason::name).collect();
        assert_eq!(benign, ["user-request", "unallocated-extent", "shared-extent", "coordinator-handover"]);
        assert!(!all.without(Reason::Fenced).has(Reason::Fenced) && all.has(Reason::Fenced));
    }
}
