//! A node's way to coordinate a volume: claim, fence, mount, grace, serve, drain (`VOLUME.md` §2).
//!
//! Time alone never permits a mount: the kernel of a node that has the filesystem mounted writes to the LUN without being asked. So the
//! registry's record names, beside the coordinator, every process that may still have the filesystem mounted. A coordinator enters
//! itself there *before* it mounts, and leaves that list after it has unmounted, or when somebody has a proof that it cannot write any
//! more. Whoever finds others on the list fences them before it mounts.
//!
//! A fence is a *node's*, not a process's: the LUN knows a host by its key. Two rules follow. A process lets its node write
//! ([`super::admission`]) only when no process before it can write from that host, and never while it is on the list, or about to be: a
//! fence that it lifts may be another coordinator's proof. And processes of this node on the list are proved to be gone on this host, not
//! fenced, which would cut off this process.
//!
//! Owners of disks go on with direct I/O meanwhile. A new coordinator changes no layout until each has come to it (the *grace*, kept by
//! [`super::coordinator`] for each file).

use std::collections::BTreeSet;
use std::fmt::Debug;

use super::admission::{Admission, Need, Step};
use crate::planted::{Bug, Planted};

/// A process of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process<N> {
    /// Its host, by which the LUN knows it: not a name that another host may get.
    pub node: N,
    /// Unique for the host.
    pub incarnation: u64,
}

/// The registry's record of a volume's coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<N> {
    /// Grows with each claim.
    pub epoch: u64,
    /// The coordinator; it may not have mounted yet.
    pub coordinator: Option<Process<N>>,
    /// Processes that may have the filesystem mounted, the coordinator among them once it mounts.
    pub mounts: BTreeSet<Process<N>>,
}

impl<N> Default for Record<N> {
    fn default() -> Record<N> {
        Record { epoch: 0, coordinator: None, mounts: BTreeSet::new() }
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<N> {
    /// The registry has this record since this revision. An older one than the last is ignored.
    Seen {
        /// Grows with each change.
        revision: u64,
        /// Its content.
        record: Record<N>,
    },
    /// The proposal of this number was certainly not committed, and never will be.
    Refused(u64),
    /// The proposal of this number has had no answer for a while. It may have been committed, and may still be.
    Unanswered(u64),
    /// This node is to coordinate the volume: it is the candidate, and the coordinator is gone; or it is not any more. Whoever decides that
    /// repeats it for as long as it holds: another node's claim ends it, and whatever keeps this node from mounting.
    Wanted {
        /// Whether it is.
        wanted: bool,
        /// The record's revision on which that was decided. On an older one than this process has seen, nothing is claimed.
        revision: u64,
    },
    /// The answer to [`Effect::Vacate`]: no process of this node before this one can write to the LUN any more, and nothing of them is on
    /// its way there, calls that would lift a fence among it.
    Vacated,
    /// The answer to [`Effect::Admit`].
    Admitted {
        /// Its number.
        number: u64,
    },
    /// The other answer to [`Effect::Admit`], given after a pause: the LUN refuses it, or cannot be reached. It will not take effect any
    /// more.
    NotAdmitted {
        /// Its number.
        number: u64,
    },
    /// The answer to [`Effect::DropLeases`]: none is held, and nothing that this process has issued to the LUN is on its way there, for
    /// whomever: block I/O for other nodes is part of it.
    LeasesDropped,
    /// The answer to [`Effect::Fence`]: the process's *node* can certainly not write to the LUN, and nothing that any process of it has
    /// issued before is on its way there. It may still read: whoever counts a fence for the answer to a recall has to know that.
    Fenced {
        /// The process.
        process: Process<N>,
        /// The epoch in which it was asked for. Later, the node may have been admitted again.
        epoch: u64,
    },
    /// The answer to [`Effect::Beat`]: this node's heartbeat is on the LUN.
    Beating {
        /// Its number.
        number: u64,
    },
    /// The answer to [`Effect::Listen`]: for a whole period, nobody but the listed processes has written to the heartbeat area.
    Silent {
        /// Its number.
        number: u64,
    },
    /// The other answer to [`Effect::Beat`], [`Effect::Listen`] and [`Effect::Fence`], given after a pause: it cannot be done. A fence may
    /// have been made, or be made later.
    Failed {
        /// The epoch in which it was asked for.
        epoch: u64,
    },
    /// The answer to [`Effect::Mount`]. If it failed, nothing of it is on its way to the LUN.
    Mounted(bool),
    /// The answer to [`Effect::Unmount`]: the filesystem is not mounted here, and neither anything of it nor block I/O that this process did
    /// for other nodes is on its way to the LUN.
    Unmounted,
    /// The LUN does not answer this process, or an unmount does not end, and nobody knows for how long. The shell repeats the first for as
    /// long as it holds, and reports the second once.
    Stuck,
    /// The LUN refuses this node's I/O: another node has fenced it.
    Lost {
        /// The admission under which the I/O was issued. A later one counts.
        admission: u64,
    },
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect<N> {
    /// Replace the record, by compare-and-swap. The commit is seen; otherwise [`Event::Refused`] follows once that is certain, or
    /// [`Event::Unanswered`] after a while. Both come after a pause: another proposal follows at once.
    Propose {
        /// Unique for the process: an answer that comes late must not be taken for that of a later proposal.
        number: u64,
        /// The revision that is replaced: 0 where there is no record yet.
        revision: u64,
        /// The new content.
        to: Record<N>,
    },
    /// Wait until no former process of this node can write: it has ended with all of its calls, and the LUN can be opened exclusively.
    Vacate,
    /// Let this node write to the LUN, whether it was fenced or not.
    Admit {
        /// Grows with each admission.
        number: u64,
    },
    /// Give up what this node's owners hold: they were fenced, and their leases may have been given to others.
    DropLeases,
    /// Have a process fenced.
    Fence {
        /// The process.
        process: Process<N>,
        /// This epoch.
        epoch: u64,
    },
    /// Write this node's heartbeat from now on. [`Event::Lost`] where the LUN refuses it.
    Beat {
        /// This epoch.
        epoch: u64,
        /// Grows each time.
        number: u64,
    },
    /// Read the heartbeat area for a period, and again until it is silent.
    Listen {
        /// This epoch.
        epoch: u64,
        /// That of the heartbeat.
        number: u64,
    },
    /// Write no heartbeat any more.
    StopBeating,
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
    /// Others may have the filesystem mounted, and are being cut off from the LUN.
    Fencing,
    /// Nobody is to be fenced. It looks for a while whether somebody whom the registry does not know uses the LUN, by heartbeats there.
    Listening,
    /// The filesystem is being mounted: its log is replayed.
    Mounting,
    /// Owners come, and are served.
    Serving,
    /// The filesystem is being unmounted.
    Draining,
}

impl Phase {
    /// Its name in commands.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Absent => "absent",
            Phase::Claiming => "claiming",
            Phase::Fencing => "fencing",
            Phase::Listening => "listening",
            Phase::Mounting => "mounting",
            Phase::Serving => "serving",
            Phase::Draining => "draining",
        }
    }
}

/// The state of this node's mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mount {
    No,
    Coming,
    Yes,
    Going,
}

/// This process's proposals for the present revision. At most one of them is committed, which makes another revision.
#[derive(Clone, Copy, Debug, Default)]
struct Proposals {
    /// Number of the last one.
    last: u64,
    /// It has not been answered.
    is_open: bool,
    /// One was not answered for a while, and may be committed still.
    in_doubt: bool,
    /// One of them may be on its way that has this process on the list.
    enters: bool,
}

/// One node's part in the coordination of one volume.
#[derive(Debug)]
pub struct Claim<N> {
    me: Process<N>,
    revision: u64,
    record: Record<N>,
    proposals: Proposals,
    wanted: bool,
    mount: Mount,
    /// The mount or the unmount does not end: another node may take the volume over, and fences this one.
    is_stuck: bool,
    serves: bool,
    admission: Admission,
    /// The own heartbeat, by its number, and those of others since it is there.
    beats: u64,
    beat: Step,
    silence: Step,
    /// In this epoch: processes for which [`Effect::Fence`] was given, and those that are fenced.
    asked: BTreeSet<Process<N>>,
    fenced: BTreeSet<Process<N>>,
    planted: Planted,
}

impl<N: Copy + Debug + Ord> Claim<N> {
    /// A process that has nothing mounted, and knows nothing of the record.
    #[must_use]
    pub fn new(me: Process<N>, planted: Planted) -> Claim<N> {
        Claim {
            me,
            revision: 0,
            record: Record::default(),
            proposals: Proposals::default(),
            wanted: false,
            mount: Mount::No,
            is_stuck: false,
            serves: false,
            admission: Admission::new(planted),
            beats: 0,
            beat: Step::Due,
            silence: Step::Due,
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
            Mount::No if self.unfenced().next().is_some() => Phase::Fencing,
            Mount::No => Phase::Listening,
        }
    }

    /// Whether this node may write to the LUN, as far as it knows: its owners may come to the coordinator.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.admission.is_valid()
    }

    /// This node is to coordinate the volume, as far as it has heard, and nothing has ended that since.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Takes an event into account and appends what follows from it to `effects`.
    pub fn step(&mut self, event: Event<N>, effects: &mut Vec<Effect<N>>) {
        let epoch_now = self.record.epoch;
        match event {
            Event::Seen { revision, record } => self.seen(revision, record, effects),
            Event::Refused(number) if self.is_of_now(number) => {
                self.proposals.is_open = false;
                if !self.proposals.in_doubt && !self.planted.has(Bug::EnterForEver) {
                    self.proposals.enters = false;
                }
            }
            Event::Unanswered(number) if self.is_of_now(number) => {
                self.proposals.is_open = false;
                self.proposals.in_doubt = true;
            }
            // Another node may have claimed since.
            Event::Wanted { wanted: true, revision } if revision < self.revision => {}
            Event::Wanted { wanted, .. } => self.wanted = wanted,
            Event::Vacated => self.admission.vacated(),
            Event::LeasesDropped => self.admission.leases_dropped(),
            Event::Admitted { number } => self.admission.answered(number, true),
            Event::NotAdmitted { number } => {
                self.admission.answered(number, false);
                // Another candidate may reach the LUN.
                self.wanted = false;
            }
            Event::Lost { admission } => {
                if self.admission.lost(admission) {
                    self.wanted = false;
                }
            }
            Event::Beating { number } if number == self.beats => self.beat.ends(),
            Event::Silent { number } if number == self.beats => self.silence.ends(),
            Event::Fenced { process, epoch } if epoch == epoch_now => {
                self.fenced.insert(process);
            }
            Event::Mounted(true) => (self.mount, self.is_stuck) = (Mount::Yes, false),
            Event::Mounted(false) => (self.mount, self.is_stuck, self.wanted) = (Mount::No, false, false),
            Event::Unmounted => (self.mount, self.is_stuck) = (Mount::No, false),
            // Another candidate may be able to.
            Event::Stuck => (self.is_stuck, self.wanted) = (self.mount != Mount::No, false),
            Event::Failed { epoch } if epoch == epoch_now && self.mount == Mount::No => self.wanted = false,
            // Of an earlier proposal, heartbeat or epoch.
            Event::Refused(_) | Event::Unanswered(_) | Event::Beating { .. } => {}
            Event::Silent { .. } | Event::Fenced { .. } | Event::Failed { .. } => {}
        }
        self.decide(effects);
    }

    fn is_of_now(&self, number: u64) -> bool {
        self.proposals.is_open && number == self.proposals.last || self.planted.has(Bug::LateRefusal)
    }

    fn seen(&mut self, revision: u64, record: Record<N>, effects: &mut Vec<Effect<N>>) {
        if revision <= self.revision {
            return;
        }
        let is_news = record.epoch > self.record.epoch;
        let other = record.coordinator.filter(|coordinator| *coordinator != self.me);
        // The first record that a process sees is none that has been claimed before its eyes.
        if is_news {
            if other.is_some() && self.revision > 0 {
                // It has claimed first. Two that claim it from each other would fence each other; who is wanted is to be decided again.
                self.wanted = false;
            }
            if !self.planted.has(Bug::KeepProofs) {
                // A node that was fenced may have been admitted since, and have mounted.
                self.asked.clear();
                self.fenced.clear();
            }
            if self.mount == Mount::No {
                self.stop_beating(effects);
            }
        }
        // Whatever was proposed is this change, or was refused for it.
        self.proposals = Proposals { last: self.proposals.last, ..Proposals::default() };
        (self.revision, self.record) = (revision, record);
    }

    fn is_mine(&self) -> bool {
        self.record.coordinator == Some(self.me)
    }

    fn is_listed(&self) -> bool {
        self.record.mounts.contains(&self.me)
    }

    /// One step towards what is wanted.
    fn decide(&mut self, effects: &mut Vec<Effect<N>>) {
        // Later refusals end nothing where the admission has ended during the mount.
        let keeps = self.mount == Mount::No || self.may_write() || self.planted.has(Bug::ServeUnadmitted);
        let goes_on = self.wanted && self.is_mine() && keeps;
        if self.serves && !goes_on {
            self.serves = false;
            effects.push(Effect::StopServing);
        }
        if self.mount == Mount::No && !goes_on {
            self.stop_beating(effects);
        }
        // A fence that this lifts may be another coordinator's proof that this process, which is on the list, cannot write.
        let is_listed = self.is_listed() || self.proposals.enters;
        let is_free = self.mount == Mount::No && !is_listed;
        let needs = self.admission.decide(is_free || self.planted.has(Bug::AdmitListed));
        effects.extend(needs.map(|need| match need {
            Need::Vacate => Effect::Vacate,
            Need::DropLeases => Effect::DropLeases,
            Need::Admit { number } => Effect::Admit { number },
        }));
        let is_entered = self.is_listed() || self.planted.has(Bug::MountUnlisted);
        match self.mount {
            Mount::No if goes_on && is_entered && self.may_write() => self.towards_mount(effects),
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
            Mount::Coming | Mount::Going if self.is_stuck && self.is_mine() => self.resign(effects),
            Mount::Yes | Mount::Coming | Mount::Going => {}
        }
    }

    fn stop_beating(&mut self, effects: &mut Vec<Effect<N>>) {
        if self.beat != Step::Due {
            effects.push(Effect::StopBeating);
        }
        self.beats += 1;
        (self.beat, self.silence) = (Step::Due, Step::Due);
    }

    /// The registry names this node, and lists it: the next coordinator finds it there, and fences it. It fences whoever else may have
    /// the filesystem mounted, takes them from the list, and mounts.
    fn towards_mount(&mut self, effects: &mut Vec<Effect<N>>) {
        let is_silent = self.is_silent(effects);
        // A node that cannot write itself fences nobody.
        if self.beat != Step::Done || !self.fence_others(effects) || !is_silent || self.proposals.is_open {
            return;
        }
        let alone = Record { mounts: [self.me].into(), ..self.record.clone() };
        let is_listed = self.record == alone || self.planted.has(Bug::MountUnlisted);
        // A proposal that was not answered may take this node from the list again: another entry ends that.
        if is_listed && (!self.proposals.in_doubt || self.planted.has(Bug::MountInDoubt)) {
            self.mount = Mount::Coming;
            effects.push(Effect::Mount { epoch: self.record.epoch });
        } else {
            // Those that are fenced: the next coordinator must not fence them again.
            self.propose(alone, effects);
        }
    }

    /// Whether no stranger uses the LUN. The own heartbeat comes before the look at those of others: of two that begin at once, one sees
    /// the other.
    fn is_silent(&mut self, effects: &mut Vec<Effect<N>>) -> bool {
        let (epoch, number) = (self.record.epoch, self.beats);
        if self.beat.begins() {
            effects.push(Effect::Beat { epoch, number });
        }
        if (self.beat == Step::Done || self.planted.has(Bug::ListenFirst)) && self.silence.begins() {
            effects.push(Effect::Listen { epoch, number });
        }
        self.silence == Step::Done || self.planted.has(Bug::IgnoreHeartbeat)
    }

    /// Processes of other nodes on the list that may still write.
    fn unfenced(&self) -> impl Iterator<Item = Process<N>> {
        let others = self.record.mounts.iter().filter(|other| other.node != self.me.node);
        others.filter(|other| !self.fenced.contains(*other)).copied()
    }

    /// Whether no other process of the list can write. Those of this node are gone: it could not have been admitted otherwise.
    fn fence_others(&mut self, effects: &mut Vec<Effect<N>>) -> bool {
        let epoch = self.record.epoch;
        let others: Vec<Process<N>> = self.unfenced().collect();
        for process in &others {
            if self.asked.insert(*process) {
                effects.push(Effect::Fence { process: *process, epoch });
            }
        }
        others.is_empty() || self.planted.has(Bug::MountBeforeFence)
    }

    /// Claims the volume, with this process on the list, or leaves the record: what is listed is not admitted to the LUN.
    fn without_mount(&mut self, effects: &mut Vec<Effect<N>>) {
        if !self.wanted || !self.may_write() {
            return self.leave(effects);
        }
        let mut mounts = self.record.mounts.clone();
        if self.planted.has(Bug::ForgetMounts) {
            mounts.clear();
        }
        if !self.planted.has(Bug::MountUnlisted) {
            mounts.insert(self.me);
        }
        let claimed = Record { epoch: self.record.epoch + 1, coordinator: Some(self.me), mounts };
        self.propose(claimed, effects);
    }

    fn may_write(&self) -> bool {
        self.admission.is_valid() || self.planted.has(Bug::ClaimUnadmitted) && self.admission.is_begun()
    }

    /// Nothing is mounted here, and nothing will be in this epoch. Former processes of this node leave with this one, once they are gone.
    fn leave(&mut self, effects: &mut Vec<Effect<N>>) {
        let mut left = self.record.clone();
        let is_vacated = self.admission.is_vacated();
        left.mounts.retain(|one| *one != self.me && !(is_vacated && one.node == self.me.node));
        if self.is_mine() {
            left.coordinator = None;
        }
        // A proposal that was not answered may list this process, which could never be admitted: another one ends that.
        if left != self.record || self.proposals.in_doubt && !self.planted.has(Bug::DoubtForEver) {
            self.propose(left, effects);
        }
    }

    /// Without a coordinator, others have their turn. This process stays on the list, as one that may still have the filesystem mounted.
    fn resign(&mut self, effects: &mut Vec<Effect<N>>) {
        let mut resigned = Record { coordinator: None, ..self.record.clone() };
        if self.planted.has(Bug::LeaveStuck) {
            resigned.mounts.remove(&self.me);
        }
        self.propose(resigned, effects);
    }

    fn propose(&mut self, to: Record<N>, effects: &mut Vec<Effect<N>>) {
        if !self.proposals.is_open {
            self.proposals.last += 1;
            self.proposals.is_open = true;
            self.proposals.enters |= to.mounts.contains(&self.me);
            effects.push(Effect::Propose { number: self.proposals.last, revision: self.revision, to });
        }
    }
}
