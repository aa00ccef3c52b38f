//! Simulates who coordinates a volume (`VOLUME.md` §2): the production core [`Claim`] on a few nodes, beside a registry whose answers are
//! lost and late, and kernels that write to the LUN without being asked, also when their node is dead.
//!
//! Checked after every step: no kernel writes below the epoch of another one that has mounted since (I5), and none mounts beside one
//! that may write. In the end the faults stop, and one node has to coordinate (I8).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use weir_volume::lun::claim::{Claim, Effect, Event, Phase, Record};
use weir_volume::planted::{Bug, Planted};

use super::log::{Log, Run, run_world, violations};

/// Nodes of the cluster.
const NODES: usize = 3;
/// Steps with faults.
const STEPS: usize = 500;
/// Steps in which a coordinator must be found.
const BOUND: usize = 3_000;
/// Most writes of a kernel that are on their way to the LUN.
const IN_FLIGHT: usize = 3;

/// A node's process: its number, and how often it has started.
type Process = (usize, u64);

/// Work that a process has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Work {
    Admit { epoch: u64 },
    Fence { process: Process, epoch: u64, is_cut: bool },
    Listen { epoch: u64 },
    Mount { epoch: u64, is_begun: bool },
    Unmount,
}

/// A proposal on its way to the registry.
#[derive(Debug)]
struct Proposal {
    by: Process,
    number: u64,
    revision: u64,
    to: Record<Process>,
}

/// A filesystem that is mounted.
#[derive(Debug)]
struct Kernel {
    epoch: u64,
    /// Writes that are on their way to the LUN.
    in_flight: usize,
}

#[derive(Debug)]
struct Node {
    starts: u64,
    /// `None` while it is dead.
    claim: Option<Claim<Process>>,
    /// The registry's news on their way.
    news: VecDeque<Event<Process>>,
}

/// The number of each thing that was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Mounts.
    pub mounts: u64,
    /// Processes that were fenced.
    pub fenced: u64,
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
    record: Record<Process>,
    /// Proposals on their way to the registry.
    proposals: Vec<Proposal>,
    work: Vec<(Process, Work)>,
    kernels: BTreeMap<Process, Kernel>,
    /// Whose writes the LUN refuses.
    cut: BTreeSet<Process>,
    /// Of 100 steps, those with a wrong candidate: a random node starts or stops being one.
    mistakes: u8,
    /// Somebody who is not in the registry has the filesystem mounted.
    stranger: bool,
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
        let node = || Node { starts: 0, claim: None, news: VecDeque::new() };
        World {
            stranger: rng.u8(0..4) == 0,
            mistakes: rng.u8(1..30),
            rng,
            planted: Planted::new(bug),
            nodes: std::iter::repeat_with(node).take(NODES).collect(),
            revision: 0,
            record: Record::default(),
            proposals: Vec::new(),
            work: Vec::new(),
            kernels: BTreeMap::new(),
            cut: BTreeSet::new(),
            counts: Counts::default(),
            log: Log::new(traced),
        }
    }

    fn run(&mut self) {
        while self.log.step < STEPS && self.log.violation.is_none() {
            self.log.step += 1;
            match self.rng.u8(0..100) {
                0..6 => self.start_one(),
                6..8 => self.kill_one(),
                8..14 => self.want(),
                roll if (14..14 + self.mistakes).contains(&roll) => {
                    // An operator, or a node that takes itself for the candidate.
                    let node = self.rng.usize(0..NODES);
                    let wanted = self.rng.bool();
                    self.step_node(node, Event::Wanted(wanted));
                }
                99 => self.stranger = false,
                _ => self.go_on(),
            }
        }
        self.stranger = false;
        while !self.is_coordinated() && self.log.violation.is_none() {
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

    /// One node serves, and nothing else is under way.
    fn is_coordinated(&self) -> bool {
        let serving = self.nodes.iter().enumerate().filter(|(number, node)| {
            let is_serving = node.claim.as_ref().is_some_and(|claim| claim.phase() == Phase::Serving);
            is_serving && self.record.coordinator == Some((*number, node.starts))
        });
        serving.count() == 1 && self.proposals.is_empty() && self.kernels.len() == 1
    }

    fn process(&self, node: usize) -> Process {
        (node, self.nodes[node].starts)
    }

    fn is_alive(&self, (node, starts): Process) -> bool {
        self.nodes[node].claim.is_some() && self.nodes[node].starts == starts
    }

    fn start_one(&mut self) {
        let dead = (0..NODES).filter(|node| self.nodes[*node].claim.is_none()).collect::<Vec<_>>();
        let Some(number) = self.rng.choice(dead) else { return };
        let node = &mut self.nodes[number];
        node.starts += 1;
        node.news.clear();
        node.claim = Some(Claim::new((number, node.starts), self.planted));
        self.log.note(|| format!("n{number} starts"));
        self.tell(number);
    }

    /// Its kernel goes on for a while.
    fn kill_one(&mut self) {
        let number = self.rng.usize(0..NODES);
        let process = self.process(number);
        if self.nodes[number].claim.take().is_some() {
            self.log.note(|| format!("n{number} dies"));
            self.work.retain(|(by, _)| *by != process);
        }
    }

    /// The first living node is the candidate while nobody coordinates.
    fn want(&mut self) {
        if self.record.coordinator.is_some_and(|coordinator| self.is_alive(coordinator)) {
            return;
        }
        if let Some(number) = (0..NODES).find(|node| self.nodes[*node].claim.is_some()) {
            self.step_node(number, Event::Wanted(true));
        }
    }

    /// The registry's present record goes to a node.
    fn tell(&mut self, number: usize) {
        if self.revision > 0 {
            let (revision, record) = (self.revision, self.record.clone());
            self.nodes[number].news.push_back(Event::Seen { revision, record });
        }
    }

    fn step_node(&mut self, number: usize, event: Event<Process>) {
        let process = self.process(number);
        let mut effects = Vec::new();
        let Some(claim) = &mut self.nodes[number].claim else { return };
        self.log.note(|| format!("n{number}: {event:?}"));
        claim.step(event, &mut effects);
        for effect in effects {
            self.log.note(|| format!("  {effect:?}"));
            let work = match effect {
                Effect::Propose { number, revision, to } => {
                    self.proposals.push(Proposal { by: process, number, revision, to });
                    continue;
                }
                Effect::Admit { epoch } => Work::Admit { epoch },
                Effect::Fence { process, epoch } => Work::Fence { process, epoch, is_cut: false },
                Effect::Listen { epoch } => Work::Listen { epoch },
                Effect::Mount { epoch } => Work::Mount { epoch, is_begun: false },
                Effect::Unmount => Work::Unmount,
                Effect::Serve { .. } | Effect::StopServing => continue,
            };
            self.work.push((process, work));
        }
    }

    /// One thing that is on its way arrives or ends.
    fn go_on(&mut self) {
        match self.rng.u8(0..6) {
            0 => self.registry_decides(),
            1 | 2 => {
                let number = self.rng.usize(0..NODES);
                if let Some(event) = self.nodes[number].news.pop_front() {
                    self.step_node(number, event);
                }
            }
            3 => self.kernels_write(),
            _ => self.work_goes_on(),
        }
    }

    fn registry_decides(&mut self) {
        if self.proposals.is_empty() {
            return;
        }
        let index = self.rng.usize(0..self.proposals.len());
        let Proposal { by, number, revision, to } = self.proposals.swap_remove(index);
        if revision == self.revision {
            (self.revision, self.record) = (revision + 1, to);
            self.log.note(|| format!("registry: {:?}", (revision + 1)));
            (0..NODES).for_each(|number| self.tell(number));
        } else {
            self.counts.refused += 1;
            // The answer may be lost: the newer record says as much.
            if self.is_alive(by) && self.rng.bool() {
                self.nodes[by.0].news.push_back(Event::Refused(number));
            }
        }
    }

    fn kernels_write(&mut self) {
        let all: Vec<Process> = self.kernels.keys().copied().collect();
        let Some(process) = self.rng.choice(all) else { return };
        let (is_cut, is_alive) = (self.cut.contains(&process), self.is_alive(process));
        let Some(kernel) = self.kernels.get_mut(&process) else { return };
        if kernel.in_flight > 0 && self.rng.bool() {
            kernel.in_flight -= 1;
            let epoch = kernel.epoch;
            return self.lands(process, epoch);
        }
        if !is_cut && kernel.in_flight < IN_FLIGHT {
            kernel.in_flight += 1;
        }
        // The process that had it mounted is gone: it is unmounted when everything is written, or refused.
        if !is_alive && kernel.in_flight == 0 && self.rng.u8(0..4) == 0 {
            self.kernels.remove(&process);
        }
        if is_cut && is_alive && self.rng.u8(0..4) == 0 {
            self.step_node(process.0, Event::Lost);
        }
    }

    /// I5.
    fn lands(&mut self, process: Process, epoch: u64) {
        self.counts.writes += 1;
        let later = self.kernels.iter().find(|(other, kernel)| **other != process && kernel.epoch >= epoch);
        if let Some((other, kernel)) = later {
            let text =
                format!("I5: {process:?} writes in epoch {epoch} beside {other:?} in epoch {}", kernel.epoch);
            self.log.fail(|| text);
        } else if self.stranger {
            self.log.fail(|| format!("I5: {process:?} writes in epoch {epoch} beside a stranger"));
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
            // The longer it lasts, the more can go wrong.
            Work::Admit { .. } if self.rng.u8(0..5) > 0 => again(self, work),
            Work::Admit { epoch } => {
                self.cut.remove(&process);
                self.step_node(process.0, Event::Admitted { epoch });
            }
            Work::Fence { process: other, epoch, is_cut: false } => {
                self.cut.insert(other);
                again(self, Work::Fence { process: other, epoch, is_cut: true });
            }
            // Writes that the LUN accepted before the fence still land.
            Work::Fence { process: other, .. } if in_flight(self, other) > 0 => again(self, work),
            Work::Fence { process: other, epoch, .. } => {
                self.counts.fenced += 1;
                self.step_node(process.0, Event::Fenced { process: other, epoch });
            }
            Work::Listen { .. } if self.stranger => again(self, work),
            Work::Listen { epoch } => self.step_node(process.0, Event::Silent { epoch }),
            Work::Mount { epoch, is_begun: false } => {
                self.begin_mount(process, epoch);
                again(self, Work::Mount { epoch, is_begun: true });
            }
            Work::Mount { .. } if self.cut.contains(&process) => {
                if in_flight(self, process) > 0 {
                    return again(self, work);
                }
                self.kernels.remove(&process);
                self.step_node(process.0, Event::Mounted(false));
            }
            Work::Mount { .. } => self.step_node(process.0, Event::Mounted(true)),
            Work::Unmount if in_flight(self, process) > 0 => again(self, work),
            Work::Unmount => {
                self.kernels.remove(&process);
                self.step_node(process.0, Event::Unmounted);
            }
        }
    }

    fn begin_mount(&mut self, process: Process, epoch: u64) {
        if self.cut.contains(&process) {
            return;
        }
        self.counts.mounts += 1;
        let writes = |(other, kernel): (&Process, &Kernel)| {
            (!self.cut.contains(other) || kernel.in_flight > 0).then_some((*other, kernel.epoch))
        };
        if let Some((other, former)) = self.kernels.iter().find_map(writes) {
            self.log.fail(|| {
                format!("I5: {process:?} mounts in epoch {epoch} beside {other:?} in epoch {former}")
            });
        }
        self.kernels.insert(process, Kernel { epoch, in_flight: 1 });
    }
}
