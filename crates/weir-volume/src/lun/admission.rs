//! A node's admission to a volume's LUN: the part of [`super::claim`] that lets the node write there, for the first time or again after
//! a fence.
//!
//! To be admitted lifts whatever fence there is on this node. So first of all no former process of this node can write from the host any
//! more, and nothing that was issued before the fence may come after it: the coordinator counts the fence for an answer to its recalls,
//! and gives the blocks to others (I4).

use crate::planted::{Bug, Planted};

/// A thing that is done once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Due,
    Begun,
    Done,
}

impl Step {
    /// Whether it is to begin now.
    pub(super) fn begins(&mut self) -> bool {
        let is_due = *self == Step::Due;
        if is_due {
            *self = Step::Begun;
        }
        is_due
    }

    /// Its answer is there, if it has begun.
    pub(super) fn ends(&mut self) {
        if *self == Step::Begun {
            *self = Step::Done;
        }
    }
}

/// The next actions of an admission; [`super::claim`] issues the effects of the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Vacate,
    DropLeases,
    Admit { number: u64 },
}

/// A process's admission.
#[derive(Debug)]
pub(super) struct Admission {
    /// Former processes of this node are gone. Dead ones do not come back: once is enough.
    vacated: Step,
    /// No lease is held from before the last fence.
    dropped: Step,
    /// The last admission that was begun, and how far it is.
    number: u64,
    state: Step,
    planted: Planted,
}

impl Admission {
    /// A process that holds no lease.
    pub(super) fn new(planted: Planted) -> Admission {
        Admission { vacated: Step::Due, dropped: Step::Done, number: 0, state: Step::Due, planted }
    }

    /// The LUN lets this node write, as far as it knows.
    pub(super) fn is_valid(&self) -> bool {
        self.state == Step::Done
    }

    /// It may take effect at any moment, or has.
    pub(super) fn is_begun(&self) -> bool {
        self.state == Step::Begun
    }

    /// Former processes of this node are gone.
    pub(super) fn is_vacated(&self) -> bool {
        self.vacated == Step::Done
    }

    pub(super) fn vacated(&mut self) {
        self.vacated.ends();
    }

    pub(super) fn leases_dropped(&mut self) {
        self.dropped.ends();
    }

    /// The answer to an admission.
    pub(super) fn answered(&mut self, number: u64, is_admitted: bool) {
        if number == self.number && self.state == Step::Begun {
            self.state = if is_admitted { Step::Done } else { Step::Due };
        }
    }

    /// I/O that was issued under an admission is refused. Returns whether the present one is over.
    pub(super) fn lost(&mut self, number: u64) -> bool {
        let is_over = number == self.number && self.state == Step::Done;
        if is_over {
            (self.state, self.dropped) = (Step::Due, Step::Due);
        }
        is_over
    }

    /// One step towards an admission, if this process is `free` to be admitted: nothing of it is mounted, or may be.
    pub(super) fn decide(&mut self, free: bool) -> impl Iterator<Item = Need> + use<> {
        let mut needs = [None; 3];
        if self.vacated.begins() {
            needs[0] = Some(Need::Vacate);
        }
        if self.dropped.begins() {
            needs[1] = Some(Need::DropLeases);
        }
        let is_vacated = self.is_vacated() || self.planted.has(Bug::AdmitBesideFormer);
        let is_dropped = self.dropped == Step::Done || self.planted.has(Bug::AdmitBeforeDrop);
        if free && is_vacated && is_dropped && self.state.begins() {
            self.number += 1;
            needs[2] = Some(Need::Admit { number: self.number });
        }
        needs.into_iter().flatten()
    }
}
