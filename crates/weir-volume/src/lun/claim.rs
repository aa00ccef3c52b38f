//! A node's way to coordinate a volume: claim, fence, mount, grace, serve, drain (`VOLUME.md` §2).
//!
//! Time alone never permits a mount: the kernel of a node that has the filesystem mounted writes to the LUN without being asked. So the
//! registry's record names, beside the coordinator, every process that may still have the filesystem mounted. A coordinator enters
//! itself there *before* it mounts, and leaves that list after it has unmounted, or when somebody has a proof that it cannot write any
//! more. Whoever finds others on the list fences them before it mounts.
//!
//! A node that was fenced is *admitted* again (its key is registered) only after its claim, and before it enters itself in the list: a
//! late admission after another node's fence finds the record changed, and no mount follows. An admission of an earlier epoch has to
//! end first, for the same reason.
//!
//! Owners of disks go on with direct I/O meanwhile. A new coordinator changes no layout until each has come to it (the *grace*, kept by
//! [`super::coordinator`] for each file).

use std::collections::BTreeSet;
use std::fmt::Debug;

use crate::planted::{Bug, Planted};

/// The registry's record of a volume's coordinator. `P` names a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<P> {
    /// Grows with each claim.
    pub epoch: u64,
    /// The coordinator; it may not have mounted yet.
    pub coordinator: Option<P>,
    /// Processes that may have the filesystem mounted, the coordinator among them once it mounts.
    pub mounts: BTreeSet<P>,
}

impl<P> Default for Record<P> {
    fn default() -> Record<P> {
        Record { epoch: 0, coordinator: None, mounts: BTreeSet::new() }
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<P> {
    /// The registry has this record since this revision. An older one than the last is ignored.
    Seen {
        /// Grows with each change.
        revision: u64,
        /// Its content.
        record: Record<P>,
    },
    /// The proposal of this number was certainly not committed, and never will be.
    Refused(u64),
    /// This node is to coordinate the volume: it is the candidate, and the coordinator is gone; or it is not any more. Another node's
    /// claim ends it, too.
    Wanted(bool),
    /// The answer to [`Effect::Admit`].
    Admitted {
        /// The epoch in which it was asked for.
        epoch: u64,
    },
    /// The answer to [`Effect::Fence`]: a process can certainly not write to the LUN any more, and nothing of it is on its way there.
    Fenced {
        /// The process.
        process: P,
        /// The epoch in which it was asked for. Later, the process may have been admitted again.
        epoch: u64,
    },
    /// The answer to [`Effect::Listen`]: nobody but the listed processes writes to the heartbeat area.
    Silent {
        /// The epoch in which it was asked for.
        epoch: u64,
    },
    /// The answer to [`Effect::Mount`].
    Mounted(bool),
    /// The answer to [`Effect::Unmount`]: the filesystem is not mounted here, and nothing of it is on its way to the LUN.
    Unmounted,
    /// The LUN refuses this node's writes: another node has fenced it. Or its right to coordinate has ended.
    Lost,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect<P> {
    /// Replace the record, by compare-and-swap. The commit is seen; otherwise [`Event::Refused`] follows once that is certain.
    Propose {
        /// Unique for the process: an answer that comes late must not be taken for that of a later proposal.
        number: u64,
        /// The revision that is replaced: 0 where there is no record yet.
        revision: u64,
        /// The new content.
        to: Record<P>,
    },
    /// Let this node write to the LUN, though it may have been fenced.
    Admit {
        /// This epoch.
        epoch: u64,
    },
    /// Have a process fenced.
    Fence {
        /// The process.
        process: P,
        /// This epoch.
        epoch: u64,
    },
    /// Read the heartbeat area.
    Listen {
        /// This epoch.
        epoch: u64,
    },
    /// Drop the LUN's buffers, and mount.
    Mount {
        /// The epoch for messages and the heartbeat.
        epoch: u64,
    },
    /// Coordinate: owners may come.
    Serve {
        /// As above.
        epoch: u64,
    },
    /// Answer nobody any more, and begin nothing.
    StopServing,
    /// Unmount. It may last for as long as the LUN does not answer.
    Unmount,
}

/// The state, for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Another node coordinates, or none.
    Absent,
    /// The registry is to name this node.
    Claiming,
    /// Others may have the filesystem mounted.
    Fencing,
    /// The filesystem is being mounted: its log is replayed.
    Mounting,
    /// Owners come, and are served.
    Serving,
    /// The filesystem is being unmounted.
    Draining,
}

/// The state of this node's mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mount {
    No,
    Coming,
    Yes,
    Going,
}

/// A thing that is done once in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Due,
    Begun,
    Done,
}

impl Step {
    /// Whether it is to begin now.
    fn begins(&mut self) -> bool {
        let is_due = *self == Step::Due;
        if is_due {
            *self = Step::Begun;
        }
        is_due
    }
}

/// One node's part in the coordination of one volume.
#[derive(Debug)]
pub struct Claim<P> {
    me: P,
    revision: u64,
    record: Record<P>,
    /// A proposal, by its number, that may be committed still. A newer record ends that.
    proposed: Option<u64>,
    proposals: u64,
    wanted: bool,
    mount: Mount,
    serves: bool,
    admission: Step,
    /// An admission is under way, perhaps one of an earlier epoch, which may undo a fence when it comes late.
    admits: bool,
    heartbeat: Step,
    /// In this epoch: processes for which [`Effect::Fence`] was given, and those that are fenced.
    asked: BTreeSet<P>,
    fenced: BTreeSet<P>,
    planted: Planted,
}

impl<P: Clone + Debug + Ord> Claim<P> {
    /// A process that has nothing mounted, and knows nothing of the record.
    #[must_use]
    pub fn new(me: P, planted: Planted) -> Claim<P> {
        Claim {
            me,
            revision: 0,
            record: Record::default(),
            proposed: None,
            proposals: 0,
            wanted: false,
            mount: Mount::No,
            serves: false,
            admission: Step::Due,
            admits: false,
            heartbeat: Step::Due,
            asked: BTreeSet::new(),
            fenced: BTreeSet::new(),
            planted,
        }
    }

    /// The state, for operators.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.mount {
            Mount::Coming => Phase::Mounting,
            Mount::Yes if self.serves => Phase::Serving,
            Mount::Yes | Mount::Going => Phase::Draining,
            Mount::No if !self.wanted => Phase::Absent,
            Mount::No if !self.is_mine() => Phase::Claiming,
            Mount::No => Phase::Fencing,
        }
    }

    /// Takes an event into account and appends what follows from it to `effects`.
    pub fn step(&mut self, event: Event<P>, effects: &mut Vec<Effect<P>>) {
        match event {
            Event::Seen { revision, record } => self.seen(revision, record),
            Event::Refused(number) => {
                let is_of_now = self.proposed == Some(number) || self.planted.has(Bug::LateRefusal);
                self.proposed = self.proposed.filter(|_| !is_of_now);
            }
            Event::Wanted(wanted) => self.wanted = wanted,
            Event::Fenced { process, epoch } if epoch == self.record.epoch => {
                self.fenced.insert(process);
            }
            Event::Silent { epoch } if epoch == self.record.epoch => self.heartbeat = Step::Done,
            Event::Admitted { epoch } => {
                self.admits = false;
                if epoch == self.record.epoch {
                    self.admission = Step::Done;
                }
            }
            // Of an earlier epoch.
            Event::Fenced { .. } | Event::Silent { .. } => {}
            Event::Mounted(true) => self.mount = Mount::Yes,
            Event::Mounted(false) => {
                (self.mount, self.wanted) = (Mount::No, false);
            }
            Event::Unmounted => self.mount = Mount::No,
            Event::Lost => self.wanted = false,
        }
        self.decide(effects);
    }

    fn seen(&mut self, revision: u64, record: Record<P>) {
        if revision <= self.revision {
            return;
        }
        let other = record.coordinator.as_ref().filter(|coordinator| **coordinator != self.me);
        if record.epoch > self.record.epoch && other.is_some() && !self.planted.has(Bug::Duel) {
            // It has claimed first. Two that claim it from each other would never mount (I8); who is wanted is to be decided again.
            self.wanted = false;
        }
        if record.epoch > self.record.epoch && !self.planted.has(Bug::KeepProofs) {
            // A process that was fenced may have been admitted since, and have mounted.
            self.asked.clear();
            self.fenced.clear();
            (self.admission, self.heartbeat) = (Step::Due, Step::Due);
        }
        // Whatever was proposed is this change, or was refused for it.
        (self.revision, self.record, self.proposed) = (revision, record, None);
    }

    fn is_mine(&self) -> bool {
        self.record.coordinator.as_ref() == Some(&self.me)
    }

    /// One step towards what is wanted.
    fn decide(&mut self, effects: &mut Vec<Effect<P>>) {
        let goes_on = self.wanted && self.is_mine();
        if self.serves && !goes_on {
            self.serves = false;
            effects.push(Effect::StopServing);
        }
        match self.mount {
            Mount::No if goes_on => self.towards_mount(effects),
            Mount::No => self.without_mount(effects),
            Mount::Yes if goes_on && !self.serves => {
                self.serves = true;
                effects.push(Effect::Serve { epoch: self.record.epoch });
            }
            Mount::Yes if !goes_on => {
                self.mount = Mount::Going;
                effects.push(Effect::Unmount);
                if self.planted.has(Bug::ReleaseBeforeUnmount) {
                    self.leave(effects);
                }
            }
            Mount::Yes | Mount::Coming | Mount::Going => {}
        }
    }

    /// The registry names this node: it fences whoever may have the filesystem mounted, enters itself, and mounts.
    fn towards_mount(&mut self, effects: &mut Vec<Effect<P>>) {
        let epoch = self.record.epoch;
        let late = self.planted.has(Bug::AdmitLate);
        if !late && (!self.admits || self.planted.has(Bug::SecondAdmission)) && self.admission.begins() {
            self.admits = true;
            effects.push(Effect::Admit { epoch });
        }
        if self.heartbeat.begins() {
            effects.push(Effect::Listen { epoch });
        }
        let others: Vec<P> = self.record.mounts.iter().filter(|other| **other != self.me).cloned().collect();
        for process in others.iter().filter(|other| !self.fenced.contains(*other)) {
            if self.asked.insert(process.clone()) {
                effects.push(Effect::Fence { process: process.clone(), epoch });
            }
        }
        let is_fenced = others.iter().all(|other| self.fenced.contains(other));
        let is_ready = (self.admission == Step::Done || late)
            && (is_fenced || self.planted.has(Bug::MountBeforeFence))
            && (self.heartbeat == Step::Done || self.planted.has(Bug::IgnoreHeartbeat));
        let alone = Record { mounts: [self.me.clone()].into(), ..self.record.clone() };
        let is_listed = self.record == alone || self.planted.has(Bug::MountUnlisted);
        match is_ready && self.proposed.is_none() {
            true if is_listed => {
                self.mount = Mount::Coming;
                if late {
                    effects.push(Effect::Admit { epoch });
                }
                effects.push(Effect::Mount { epoch });
            }
            // The next coordinator finds this node on the list, and fences it.
            true => self.propose(alone, effects),
            false => {}
        }
    }

    /// Claims the volume, or leaves the record.
    fn without_mount(&mut self, effects: &mut Vec<Effect<P>>) {
        if !self.wanted {
            return self.leave(effects);
        }
        let mut mounts = self.record.mounts.clone();
        if !self.planted.has(Bug::ClaimListed) {
            // Nothing is mounted here. This node enters itself anew, after its admission: the CAS fails if it was fenced meanwhile.
            mounts.remove(&self.me);
        }
        if self.planted.has(Bug::ForgetMounts) {
            mounts.clear();
        }
        let claimed = Record { epoch: self.record.epoch + 1, coordinator: Some(self.me.clone()), mounts };
        self.propose(claimed, effects);
    }

    /// Nothing is mounted here, and nothing will be in this epoch.
    fn leave(&mut self, effects: &mut Vec<Effect<P>>) {
        let mut left = self.record.clone();
        left.mounts.remove(&self.me);
        if self.is_mine() {
            left.coordinator = None;
        }
        if left != self.record {
            self.propose(left, effects);
        }
    }

    fn propose(&mut self, to: Record<P>, effects: &mut Vec<Effect<P>>) {
        if self.proposed.is_none() {
            self.proposals += 1;
            let number = self.proposals;
            self.proposed = Some(number);
            effects.push(Effect::Propose { number, revision: self.revision, to });
        }
    }
}
