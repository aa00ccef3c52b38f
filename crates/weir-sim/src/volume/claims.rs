//! Simulates who coordinates a volume (`VOLUME.md` §2): the production core [`Claim`] on a few nodes, beside a registry whose answers are
//! lost and late, kernels that write to the LUN without being asked, also when their process is dead, and owners of disks that write
//! there directly.
//!
//! Checked after every step: no kernel writes below the epoch of another one that has mounted since, and none mounts beside one that may
//! write (I5); no direct write from before a fence lands after it (I4). In the end the faults stop, one node has to coordinate, and each
//! may write (I8).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use weir_volume::lun::claim::{Claim, Effect, Event, Phase, Process, Record};
use weir_volume::planted::{Bug, Planted};

use super::log::{Log, Run, run_world, violations};

/// Nodes of the cluster.
const NODES: usize = 3;
/// Steps with faults.
const STEPS: usize = 1_500;
/// Steps in which a coordinator must be found.
const BOUND: usize = 5_000;
/// Most writes of a kernel, or direct writes of a process, that are on their way to the LUN.
const IN_FLIGHT: usize = 3;

type Id = Process<usize>;

/// Work that a process has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Work {
    Vacate,
    DropLeases,
    Admit { number: u64 },
    Fence { process: Id, epoch: u64, is_cut: bool },
    Beat { epoch: u64, number: u64 },
    Listen { epoch: u64, number: u64 },
    Mount { epoch: u64, is_begun: bool },
    Unmount,
}

impl Work {
    /// A command for the LUN: the kernel carries it out, whatever becomes of the process.
    fn outlives_process(&self) -> bool {
        matches!(self, Work::Admit { .. } | Work::Fence { .. })
    }
}

/// A proposal on its way to the registry.
#[derive(Debug)]
struct Proposal {
    by: Id,
    number: u64,
    revision: u64,
    to: Record<usize>,
}

/// A filesystem that is mounted.
#[derive(Debug)]
struct Kernel {
    epoch: u64,
    /// Writes that are on their way to the LUN.
    in_flight: usize,
}

/// A write of an owner.
#[derive(Clone, Copy, Debug)]
struct Direct {
    by: Id,
    /// The admission under which it was issued.
    admission: u64,
    /// The number of fences of the node before.
    fences: u64,
    /// The number of proofs of a fence of the node before the LUN has accepted it; `None` while its host has not sent it.
    accepted: Option<u64>,
}

#[derive(Debug)]
struct Node {
    starts: u64,
    /// `None` while it is dead.
    claim: Option<Claim<usize>>,
    /// The registry's news on their way, in their order.
    news: VecDeque<Event<usize>>,
    /// Answers on their way, in any order.
    answers: Vec<Event<usize>>,
    /// Number of the last admission that the process knows of.
    admission: u64,
    /// The LUN refuses its writes.
    is_cut: bool,
    /// How often it was fenced, and how often that was proved.
    fences: u64,
    proofs: u64,
    /// The last record that the process has received: its revision and its coordinator.
    seen: (u64, Option<Id>),
    /// It writes its heartbeat.
    beats: bool,
}

/// Somebody of another cluster who may use the LUN, with the same rules for heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stranger {
    Away,
    /// Writes its heartbeat, and has not looked for others yet.
    Beats,
    Mounted,
}

/// The number of each thing that was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Mounts.
    pub mounts: u64,
    /// Processes that were fenced.
    pub fenced: u64,
    /// Nodes that were let write again after a fence.
    pub readmitted: u64,
    /// Writes to the LUN.
    pub writes: u64,
    /// Proposals that were refused.
    pub refused: u64,
}

struct World {
    rng: fastrand::Rng,
    planted: Planted,
    nodes: Vec<Node>,
    revision: u64,
    record: Record<usize>,
    /// Proposals on their way to the registry.
    proposals: Vec<Proposal>,
    work: Vec<(Id, Work)>,
    kernels: BTreeMap<Id, Kernel>,
    direct: Vec<Direct>,
    /// Of 100 steps, those with a wrong candidate: a random node starts or stops being one.
    mistakes: u8,
    /// Of 100 steps, those in which a process is killed; 0 or 2. Some mistakes show only in processes that live long.
    kills: u8,
    stranger: Stranger,
    /// The last epoch in which somebody has mounted.
    mounted: u64,
    counts: Counts,
    log: Log,
}

/// Runs a seed to its end, or to the first violation; with a bug planted if one is given.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>, traced: bool) -> Run<Counts> {
    let mut world = World::new(seed, bug, traced);
    run_world(&mut world, World::run, |world| &mut world.log);
    world.log.end(world.counts)
}

/// Runs many seeds; the violations, in order of seeds.
#[must_use]
pub fn many(seeds: Range<u64>, threads: usize, bug: Option<Bug>) -> Vec<(u64, String)> {
    violations(run, seeds, threads, bug)
}

impl World {
    fn new(seed: u64, bug: Option<Bug>, traced: bool) -> World {
        let mut rng = fastrand::Rng::with_seed(seed);
        let node = || Node {
            starts: 0,
            claim: None,
            news: VecDeque::new(),
            answers: Vec::new(),
            admission: 0,
            is_cut: true,
            fences: 0,
            proofs: 0,
            seen: (0, None),
            beats: false,
        };
        World {
            stranger: if rng.u8(0..4) == 0 { Stranger::Mounted } else { Stranger::Away },
            mistakes: rng.u8(1..30),
            kills: 2 * rng.u8(0..2),
            rng,
            planted: Planted::new(bug),
            nodes: std::iter::repeat_with(node).take(NODES).collect(),
            revision: 0,
            record: Record::default(),
            proposals: Vec::new(),
            work: Vec::new(),
            kernels: BTreeMap::new(),
            direct: Vec::new(),
            mounted: 0,
            counts: Counts::default(),
            log: Log::new(traced),
        }
    }

    fn run(&mut self) {
        while self.log.step < STEPS && self.log.violation.is_none() {
            self.log.step += 1;
            match self.rng.u8(0..100) {
                0..6 => self.start_one(),
                roll if (6..6 + self.kills).contains(&roll) => self.kill_one(),
                8..14 => self.want(),
                roll if (14..14 + self.mistakes).contains(&roll) => {
                    // An operator, or a node that takes itself for the candidate.
                    let node = self.rng.usize(0..NODES);
                    let (wanted, revision) = (self.rng.bool(), self.nodes[node].seen.0);
                    self.decide(node, Event::Wanted { wanted, revision });
                }
                96 => self.hang_one(),
                97 => self.lose_key(),
                98..100 => self.stranger_goes_on(),
                _ => self.go_on(),
            }
        }
        self.stranger = Stranger::Away;
        while !self.is_settled() && self.log.violation.is_none() {
            self.log.step += 1;
            if self.log.step > STEPS + BOUND {
                let phases: Vec<_> =
                    self.nodes.iter().map(|node| node.claim.as_ref().map(Claim::phase)).collect();
                let record = self.record.clone();
                return self.log.fail(|| format!("I8: nobody coordinates: {phases:?}, {record:?}"));
            }
            match self.rng.u8(0..10) {
                0 => self.start_one(),
                1 => self.want(),
                _ => self.go_on(),
            }
        }
    }

    /// One node serves, nothing else is under way, and all may write.
    fn is_settled(&self) -> bool {
        let serving = self.nodes.iter().enumerate().filter(|(number, node)| {
            let is_serving = node.claim.as_ref().is_some_and(|claim| claim.phase() == Phase::Serving);
            is_serving && self.record.coordinator == Some(self.process(*number))
        });
        let is_admitted = |node: &Node| !node.is_cut && node.claim.as_ref().is_some_and(Claim::is_admitted);
        serving.count() == 1
            && self.proposals.is_empty()
            && self.kernels.len() == 1
            && self.nodes.iter().all(is_admitted)
    }

    fn process(&self, node: usize) -> Id {
        Process { node, incarnation: self.nodes[node].starts }
    }

    fn is_alive(&self, process: Id) -> bool {
        self.nodes[process.node].claim.is_some() && self.nodes[process.node].starts == process.incarnation
    }

    fn start_one(&mut self) {
        let dead = (0..NODES).filter(|node| self.nodes[*node].claim.is_none()).collect::<Vec<_>>();
        let Some(number) = self.rng.choice(dead) else { return };
        let node = &mut self.nodes[number];
        node.starts += 1;
        node.news.clear();
        node.answers.clear();
        (node.admission, node.seen) = (0, (0, None));
        let process = self.process(number);
        self.nodes[number].claim = Some(Claim::new(process, self.planted));
        self.log.note(|| format!("n{number} starts"));
        // A watch may deliver the first record twice.
        if self.rng.bool() {
            self.tell(number);
        }
        self.step_node(number, Event::Wanted { wanted: false, revision: 0 });
        self.tell(number);
    }

    /// Its kernel goes on for a while.
    fn kill_one(&mut self) {
        let number = self.rng.usize(0..NODES);
        let process = self.process(number);
        if self.nodes[number].claim.take().is_some() {
            self.log.note(|| format!("n{number} dies"));
            self.work.retain(|(by, work)| *by != process || work.outlives_process());
            self.nodes[number].beats = false;
        }
    }

    /// The LUN does not answer a process for a while: one that mounts, if there is one.
    fn hang_one(&mut self) {
        let mounts = |(by, work): &(Id, Work)| matches!(work, Work::Mount { .. }).then_some(*by);
        let mounting = self.work.iter().find_map(mounts);
        let anybody = self.rng.usize(0..NODES);
        let process = mounting.unwrap_or_else(|| self.process(anybody));
        self.answer(process, Event::Stuck);
    }

    /// The LUN forgets a node: it refuses the node's writes, and nobody has fenced it.
    fn lose_key(&mut self) {
        let mounts = |(by, work): &(Id, Work)| matches!(work, Work::Mount { .. }).then_some(by.node);
        let mounting = self.work.iter().find_map(mounts);
        let number = mounting.unwrap_or_else(|| self.rng.usize(0..NODES));
        self.nodes[number].is_cut = true;
        self.log.note(|| format!("the LUN has forgotten n{number}"));
    }

    /// The first living node is the candidate while nobody coordinates, as far as it has seen. A node that has seen itself named goes on.
    fn want(&mut self) {
        let Some(number) = (0..NODES).find(|node| self.nodes[*node].claim.is_some()) else { return };
        let (revision, coordinator) = self.nodes[number].seen;
        match coordinator.filter(|coordinator| self.is_alive(*coordinator)) {
            None => self.decide(number, Event::Wanted { wanted: true, revision }),
            Some(named) if self.nodes[named.node].seen.1 == Some(named) => {
                let revision = self.nodes[named.node].seen.0;
                self.decide(named.node, Event::Wanted { wanted: true, revision });
            }
            Some(_) => {}
        }
    }

    /// A decision is on its way to a node, behind what the registry has told it; one at a time.
    fn decide(&mut self, number: usize, event: Event<usize>) {
        let node = &mut self.nodes[number];
        if node.claim.is_some() && !node.news.iter().any(|one| matches!(one, Event::Wanted { .. })) {
            node.news.push_back(event);
        }
    }

    /// The registry's present record goes to a node.
    fn tell(&mut self, number: usize) {
        if self.revision > 0 {
            let (revision, record) = (self.revision, self.record.clone());
            self.nodes[number].news.push_back(Event::Seen { revision, record });
        }
    }

    /// An answer is on its way to a process, if that still lives.
    fn answer(&mut self, process: Id, event: Event<usize>) {
        if self.is_alive(process) {
            self.nodes[process.node].answers.push(event);
        }
    }

    fn step_node(&mut self, number: usize, event: Event<usize>) {
        let process = self.process(number);
        let mut effects = Vec::new();
        let Some(claim) = &mut self.nodes[number].claim else { return };
        self.log.note(|| format!("n{number}: {event:?}"));
        let admitted = if let Event::Admitted { number } = event { Some(number) } else { None };
        let seen = if let Event::Seen { revision, record } = &event {
            (*revision, record.coordinator)
        } else {
            (0, None)
        };
        claim.step(event, &mut effects);
        let node = &mut self.nodes[number];
        node.admission = admitted.unwrap_or(node.admission);
        if seen.0 > node.seen.0 {
            node.seen = seen;
        }
        for effect in effects {
            self.log.note(|| format!("  {effect:?}"));
            let work = match effect {
                Effect::Propose { number, revision, to } => {
                    self.proposals.push(Proposal { by: process, number, revision, to });
                    if self.rng.u8(0..10) == 0 {
                        self.answer(process, Event::Unanswered(number));
                    }
                    continue;
                }
                Effect::Vacate => Work::Vacate,
                Effect::DropLeases => Work::DropLeases,
                Effect::Admit { number } => Work::Admit { number },
                Effect::Fence { process, epoch } => Work::Fence { process, epoch, is_cut: false },
                Effect::Beat { epoch, number } => Work::Beat { epoch, number },
                Effect::Listen { epoch, number } => Work::Listen { epoch, number },
                Effect::StopBeating => {
                    self.nodes[process.node].beats = false;
                    self.work.retain(|(by, work)| *by != process || !matches!(work, Work::Beat { .. }));
                    continue;
                }
                Effect::Mount { epoch } => Work::Mount { epoch, is_begun: false },
                Effect::Unmount => Work::Unmount,
                Effect::Serve { .. } | Effect::StopServing => continue,
            };
            self.work.push((process, work));
        }
    }

    /// One thing that is on its way arrives or ends.
    fn go_on(&mut self) {
        match self.rng.u8(0..9) {
            0 => self.registry_decides(),
            1 | 2 => {
                let number = self.rng.usize(0..NODES);
                if let Some(event) = self.nodes[number].news.pop_front() {
                    self.step_node(number, event);
                }
            }
            3 | 4 => {
                let number = self.rng.usize(0..NODES);
                let answers = &mut self.nodes[number].answers;
                if !answers.is_empty() {
                    let event = answers.swap_remove(self.rng.usize(0..answers.len()));
                    self.step_node(number, event);
                }
            }
            5 => self.kernels_write(),
            6 => self.owners_write(),
            _ => self.work_goes_on(),
        }
    }

    fn registry_decides(&mut self) {
        if self.proposals.is_empty() {
            return;
        }
        let index = self.rng.usize(0..self.proposals.len());
        let Proposal { by, number, revision, to } = self.proposals.swap_remove(index);
        if self.rng.u8(0..10) == 0 {
            self.log.note(|| format!("registry: proposal {number} of {by:?} is lost"));
            // Or it is refused for another reason than a newer record.
            let refused = self.rng.bool();
            self.answer(by, if refused { Event::Refused(number) } else { Event::Unanswered(number) });
        } else if revision == self.revision {
            (self.revision, self.record) = (revision + 1, to);
            self.log.note(|| format!("registry: {:?}", (revision + 1)));
            (0..NODES).for_each(|number| self.tell(number));
        } else {
            self.counts.refused += 1;
            // The answer may be lost: the newer record says as much.
            if self.rng.bool() {
                self.answer(by, Event::Refused(number));
            }
        }
    }

    fn stranger_goes_on(&mut self) {
        // A period lasts longer than a write that the LUN has accepted before a fence.
        let writes =
            |node: usize| self.kernels.iter().any(|(id, kernel)| id.node == node && kernel.in_flight > 0);
        let is_heard =
            (0..NODES).any(|node| self.nodes[node].beats && (!self.nodes[node].is_cut || writes(node)));
        self.stranger = match self.stranger {
            Stranger::Away => Stranger::Beats,
            Stranger::Beats if is_heard => Stranger::Away,
            Stranger::Beats => Stranger::Mounted,
            Stranger::Mounted => Stranger::Away,
        };
        self.log.note(|| format!("stranger: {:?}", self.stranger));
        // The kernel of a dead process writes no heartbeat: against strangers, that is no protection.
        let beside = |process: &&Id| self.is_alive(**process) && !self.nodes[process.node].is_cut;
        if self.stranger == Stranger::Mounted
            && let Some(process) = self.kernels.keys().find(beside).copied()
        {
            self.log.fail(|| format!("I5: a stranger mounts beside {process:?}"));
        }
    }

    fn kernels_write(&mut self) {
        let all: Vec<Id> = self.kernels.keys().copied().collect();
        let Some(process) = self.rng.choice(all) else { return };
        let (is_cut, is_alive) = (self.nodes[process.node].is_cut, self.is_alive(process));
        let Some(kernel) = self.kernels.get_mut(&process) else { return };
        if kernel.in_flight > 0 && self.rng.bool() {
            kernel.in_flight -= 1;
            let epoch = kernel.epoch;
            return self.lands(process, epoch);
        }
        // The process that had it mounted is gone: it is unmounted when everything is written, or refused.
        if !is_alive && kernel.in_flight == 0 && self.rng.u8(0..4) == 0 {
            self.log.note(|| format!("the kernel of {process:?} has unmounted"));
            self.kernels.remove(&process);
            return;
        }
        if !is_cut && kernel.in_flight < IN_FLIGHT {
            kernel.in_flight += 1;
        }
        if is_cut && is_alive && self.rng.u8(0..4) == 0 {
            self.is_refused(process, self.nodes[process.node].admission);
        }
    }

    /// I5.
    fn lands(&mut self, process: Id, epoch: u64) {
        self.counts.writes += 1;
        let highest = self.mounted;
        if epoch < highest {
            self.log
                .fail(|| format!("I5: {process:?} writes in epoch {epoch} after a mount in epoch {highest}"));
        } else if self.stranger == Stranger::Mounted && self.is_alive(process) {
            self.log.fail(|| format!("I5: {process:?} writes in epoch {epoch} beside a stranger"));
        }
    }

    fn is_refused(&mut self, process: Id, admission: u64) {
        self.answer(process, Event::Lost { admission });
    }

    /// A process that may write issues a direct write, or one that was issued reaches the LUN.
    fn owners_write(&mut self) {
        if !self.direct.is_empty() && self.rng.bool() {
            return self.direct_goes_on();
        }
        let number = self.rng.usize(0..NODES);
        let (by, node) = (self.process(number), &self.nodes[number]);
        let is_admitted = node.claim.as_ref().is_some_and(Claim::is_admitted);
        if is_admitted && self.direct.iter().filter(|direct| direct.by == by).count() < IN_FLIGHT {
            let (admission, fences) = (node.admission, node.fences);
            self.direct.push(Direct { by, admission, fences, accepted: None });
        }
    }

    /// I4.
    fn direct_goes_on(&mut self) {
        let index = self.rng.usize(0..self.direct.len());
        let node = &self.nodes[self.direct[index].by.node];
        let Direct { by, admission, fences, accepted } = self.direct[index];
        match accepted {
            // The LUN completes an accepted write, also after a fence.
            Some(proofs) => {
                if proofs != node.proofs {
                    self.log
                        .fail(|| format!("I4: a direct write of {by:?} lands after the proof of a fence"));
                }
                self.direct.swap_remove(index);
            }
            None if node.is_cut => {
                self.direct.swap_remove(index);
                self.is_refused(by, admission);
            }
            None if node.fences != fences => {
                self.log.fail(|| format!("I4: a direct write of {by:?} from before a fence lands after it"));
            }
            None => self.direct[index].accepted = Some(node.proofs),
        }
    }

    fn work_goes_on(&mut self) {
        if self.work.is_empty() {
            return;
        }
        let index = self.rng.usize(0..self.work.len());
        let (process, work) = self.work.swap_remove(index);
        let again = |world: &mut World, work| world.work.push((process, work));
        let in_flight =
            |world: &World, process| world.kernels.get(&process).map_or(0, |kernel| kernel.in_flight);
        match work {
            Work::Vacate if self.has_former(process) => again(self, work),
            Work::Vacate => self.answer(process, Event::Vacated),
            Work::DropLeases if self.direct.iter().any(|direct| direct.by == process) => again(self, work),
            Work::DropLeases => self.answer(process, Event::LeasesDropped),
            // The longer it lasts, the more can go wrong.
            Work::Admit { .. } if self.rng.u8(0..5) > 0 => again(self, work),
            Work::Admit { number } => self.admit(process, number),
            // The LUN takes no such command from a node that it does not know.
            Work::Fence { is_cut: false, .. } | Work::Beat { .. } if self.nodes[process.node].is_cut => {
                self.is_refused(process, self.nodes[process.node].admission);
            }
            Work::Fence { epoch, is_cut: false, .. }
            | Work::Beat { epoch, .. }
            | Work::Listen { epoch, .. }
                if self.rng.u8(0..12) == 0 =>
            {
                self.answer(process, Event::Failed { epoch });
            }
            Work::Fence { process: other, epoch, is_cut: false } => {
                let node = &mut self.nodes[other.node];
                (node.is_cut, node.fences) = (true, node.fences + 1);
                self.log.note(|| format!("n{} is cut off", other.node));
                again(self, Work::Fence { process: other, epoch, is_cut: true });
            }
            // Writes that the LUN accepted before the fence still land.
            Work::Fence { process: other, .. } if self.has_accepted(other.node) => again(self, work),
            Work::Fence { process: other, epoch, .. } => {
                self.counts.fenced += 1;
                self.nodes[other.node].proofs += 1;
                self.answer(process, Event::Fenced { process: other, epoch });
            }
            Work::Beat { number, .. } => {
                self.nodes[process.node].beats = true;
                self.answer(process, Event::Beating { number });
            }
            Work::Listen { .. } if self.stranger != Stranger::Away => again(self, work),
            Work::Listen { number, .. } => self.answer(process, Event::Silent { number }),
            Work::Mount { epoch, is_begun: false } => {
                self.begin_mount(process, epoch);
                again(self, Work::Mount { epoch, is_begun: true });
            }
            Work::Mount { .. } if self.nodes[process.node].is_cut => {
                if in_flight(self, process) > 0 {
                    return again(self, work);
                }
                self.kernels.remove(&process);
                self.answer(process, Event::Mounted(false));
            }
            Work::Mount { .. } => self.answer(process, Event::Mounted(true)),
            Work::Unmount if in_flight(self, process) > 0 => {
                again(self, work);
                self.answer(process, Event::Stuck);
            }
            Work::Unmount => {
                self.kernels.remove(&process);
                self.answer(process, Event::Unmounted);
            }
        }
    }

    /// Something of a former process of the same node is under way on its host.
    fn has_former(&self, process: Id) -> bool {
        let is_former = |other: &Id| other.node == process.node && other.incarnation < process.incarnation;
        self.kernels.keys().any(is_former)
            || self.direct.iter().any(|direct| is_former(&direct.by))
            || self.work.iter().any(|(by, _)| is_former(by))
    }

    /// Something that the LUN has accepted from a node is not done yet.
    fn has_accepted(&self, node: usize) -> bool {
        self.kernels.iter().any(|(id, kernel)| id.node == node && kernel.in_flight > 0)
            || self.direct.iter().any(|direct| direct.by.node == node && direct.accepted.is_some())
    }

    fn admit(&mut self, process: Id, number: u64) {
        if self.rng.u8(0..6) == 0 {
            return self.answer(process, Event::NotAdmitted { number });
        }
        let node = &mut self.nodes[process.node];
        self.counts.readmitted += u64::from(node.is_cut && node.fences > 0);
        node.is_cut = false;
        self.log.note(|| format!("n{} is admitted", process.node));
        self.answer(process, Event::Admitted { number });
    }

    fn begin_mount(&mut self, process: Id, epoch: u64) {
        if self.nodes[process.node].is_cut {
            return;
        }
        self.counts.mounts += 1;
        let writes = |(other, kernel): (&Id, &Kernel)| {
            (!self.nodes[other.node].is_cut || kernel.in_flight > 0).then_some((*other, kernel.epoch))
        };
        if let Some((other, former)) = self.kernels.iter().find_map(writes) {
            self.log.fail(|| {
                format!("I5: {process:?} mounts in epoch {epoch} beside {other:?} in epoch {former}")
            });
        }
        if self.stranger == Stranger::Mounted {
            self.log.fail(|| format!("I5: {process:?} mounts in epoch {epoch} beside a stranger"));
        }
        self.mounted = self.mounted.max(epoch);
        self.kernels.insert(process, Kernel { epoch, in_flight: 1 });
    }
}
