//! Virtual time, late and lost messages, and the event loop.

mod change;
mod checks;
mod faults;
mod node;
mod owner;
mod state;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef, Policy, Source};

use super::clock::Clock;
use super::planted::{Bug, Rule};
use super::registry::{Answer, Question, Registry};
use super::{Counts, LONGEST_IO};
use checks::Checks;
use faults::FaultRates;
use node::Node;
use state::{Message, Request, Version};

/// A write in flight to the storage.
#[derive(Clone, Copy, Debug)]
pub struct Landing {
    pub node: usize,
    pub incarnation: u64,
    pub version: Version,
    /// The request that waits for it; `None` for destage.
    pub request: Option<Request>,
}

/// An event.
#[derive(Clone, Debug)]
pub enum Event {
    /// A call reaches the registry.
    Registry { from: usize, process: NodeRef, id: u64, question: Question },
    /// Its answer reaches the caller.
    Answer { to: usize, incarnation: u64, id: u64, answer: Answer },
    /// A message reaches a node, or only the named process of it.
    Peer { from: usize, sender: u64, to: usize, receiver: Option<u64>, message: Message },
    /// A process executes its due actions.
    Turn { node: usize, incarnation: u64, regular: bool },
    /// A client sends a request to some owner.
    Ask,
    /// A client receives the answer.
    Reply { node: usize, incarnation: u64, request: Request, version: Version },
    /// A write reaches the storage.
    Land(Landing),
    /// Its completion reaches the writer.
    Landed(Landing),
    /// A fault, or an operator's request.
    Fault,
    /// This process dies.
    Crash { node: usize, incarnation: u64 },
    /// The end of a process becomes known.
    Stopped { incarnation: u64 },
    /// A node starts.
    Start { node: usize },
}

#[derive(Debug)]
struct Queued {
    at: Nanos,
    number: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Queued) -> bool {
        self.number == other.number
    }
}

impl Eq for Queued {}

impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Queued) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Queued {
    fn cmp(&self, other: &Queued) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// The cluster and its environment.
pub struct Simulation {
    pub now: Nanos,
    pub rng: Rng,
    pub bug: Option<Bug>,
    pub nodes: Vec<Node>,
    pub registry: Registry,
    /// The storage's content.
    pub backing: Version,
    pub rates: FaultRates,
    pub checks: Checks,
    pub counts: Counts,
    pub incarnations: u64,
    pub trace: Option<Vec<String>>,
    pub ids: u64,
    queue: BinaryHeap<Reverse<Queued>>,
    numbers: u64,
}

/// A call that takes longer is late.
const LATE: Duration = Duration::from_millis(100);
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

impl Simulation {
    pub fn new(seed: u64, bug: Option<Bug>, traced: bool) -> Simulation {
        let mut rng = Rng::with_seed(seed);
        let start = Nanos(1_000_000_000);
        let source = Source::File { name: "d.img".into() };
        let policies =
            [Policy::WriteThrough, Policy::WriteBack(0), Policy::WriteBack(1), Policy::WriteBack(2)];
        let record = DiskRecord::new("d", "v", source, 1 << 20, 512, policies[rng.usize(..policies.len())]);
        let clock = Clock::new(&mut rng, start);
        let rates = FaultRates::new(&mut rng);
        let count = rng.usize(3..=5);
        let mut simulation = Simulation {
            now: start,
            rng,
            bug,
            nodes: Vec::new(),
            registry: Registry::new(record, clock),
            backing: Version::default(),
            rates,
            checks: Checks::default(),
            counts: Counts::default(),
            incarnations: 0,
            trace: traced.then(Vec::new),
            ids: 0,
            queue: BinaryHeap::new(),
            numbers: 0,
        };
        for (node, name) in NAMES.iter().take(count).enumerate() {
            let process = simulation.process(name);
            let clock = Clock::new(&mut simulation.rng, start);
            let booted = Node::new(process, clock, start, bug);
            simulation.nodes.push(booted);
            simulation.start_turns(node);
        }
        simulation.at(start, Event::Ask);
        simulation.at(start + Duration::from_millis(1_500), Event::Fault);
        simulation
    }

    pub fn process(&mut self, name: &str) -> NodeRef {
        self.incarnations += 1;
        NodeRef::new(name, self.incarnations)
    }

    pub fn has(&self, rule: Rule) -> bool {
        self.bug == Some(Bug::Shell(rule))
    }

    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:.6} {}", self.now.0 as f64 / 1e9 - 1.0, line()));
        }
    }

    pub fn at(&mut self, at: Nanos, event: Event) {
        self.numbers += 1;
        self.queue.push(Reverse(Queued { at: at.max(self.now), number: self.numbers, event }));
    }

    pub fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    pub fn between(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_micros(self.rng.u64(least * 1_000..=most * 1_000))
    }

    /// Runs until `end`, or to the first violation.
    pub fn run(&mut self, end: Nanos) {
        while self.checks.violation.is_none()
            && let Some(Reverse(Queued { at, event, .. })) = self.queue.pop()
            && at < end
        {
            self.now = at;
            self.counts.steps += 1;
            self.happen(event);
            self.check_rights();
        }
    }

    /// Whether the event's process lives; a stopped process gets the event later.
    fn is_for(&mut self, node: usize, incarnation: Option<u64>, event: &Event) -> bool {
        let there = &self.nodes[node];
        if !there.alive || incarnation.is_some_and(|expected| expected != there.incarnation) {
            return false;
        }
        let paused = there.paused_until;
        if paused > self.now {
            self.at(paused, event.clone());
        }
        paused <= self.now
    }

    fn happen(&mut self, event: Event) {
        match &event {
            Event::Registry { .. } | Event::Ask | Event::Land(_) | Event::Fault | Event::Start { .. } => {}
            Event::Crash { .. } | Event::Stopped { .. } => {}
            Event::Answer { to, incarnation, .. } => {
                if !self.is_for(*to, Some(*incarnation), &event) {
                    return;
                }
            }
            Event::Peer { to, receiver, .. } => {
                if !self.is_for(*to, *receiver, &event) {
                    return;
                }
            }
            Event::Turn { node, incarnation, .. } | Event::Reply { node, incarnation, .. } => {
                if !self.is_for(*node, Some(*incarnation), &event) {
                    return;
                }
            }
            Event::Landed(landing) => {
                if !self.is_for(landing.node, Some(landing.incarnation), &event) {
                    return;
                }
            }
        }
        match event {
            Event::Registry { from, process, id, question } => {
                self.reach_registry(from, process, id, question)
            }
            Event::Answer { to, id, answer, .. } => self.hear_registry(to, id, answer),
            Event::Peer { from, sender, to, message, .. } => self.hear_peer(from, sender, to, message),
            Event::Turn { node, regular, .. } => {
                self.turn(node);
                if regular {
                    self.start_turns(node);
                }
            }
            Event::Ask => {
                self.ask_some();
                let pause = self.between(5, 70);
                self.after(pause, Event::Ask);
            }
            Event::Reply { node, request, version, .. } => {
                self.note(|| format!("{} answered {request:?} with {version:?}", NAMES[node]));
                self.checks.answered(NAMES[node], request, version);
                self.counts.answers += 1;
                self.check_record();
            }
            Event::Land(landing) => {
                self.note(|| format!("{:?} of {} lands", landing.version, NAMES[landing.node]));
                self.checks.landed(self.backing, landing.version);
                self.backing = landing.version;
                let pause = self.between(0, 2);
                self.after(pause, Event::Landed(landing));
            }
            Event::Landed(landing) => self.landed(landing),
            Event::Fault => self.fault(),
            Event::Crash { node, incarnation } => self.crash(node, incarnation),
            Event::Stopped { incarnation } => {
                std::rc::Rc::make_mut(&mut self.registry.stopped).insert(incarnation);
            }
            Event::Start { node } => self.start(node),
        }
    }

    pub fn start_turns(&mut self, node: usize) {
        let incarnation = self.nodes[node].incarnation;
        let pause = self.between(60, 120);
        self.after(pause, Event::Turn { node, incarnation, regular: true });
    }

    /// Schedules a turn of this process when its clock shows `local`.
    pub fn wake(&mut self, node: usize, local: Nanos) {
        let Node { clock, incarnation, .. } = self.nodes[node];
        let at = clock.when(local);
        self.at(at, Event::Turn { node, incarnation, regular: false });
    }

    /// Sends a message, unless the path is cut.
    pub fn send(&mut self, from: usize, to: usize, receiver: Option<u64>, message: Message) {
        let lost = self.rates.blocked[from][to] > self.now || self.rng.f64() < self.rates.loss;
        let mut delay = self.between(0, 3);
        if self.rng.f64() < self.rates.slow {
            delay = self.between(1, 700);
        }
        if !lost {
            let sender = self.nodes[from].incarnation;
            self.after(delay, Event::Peer { from, sender, to, receiver, message });
        }
    }

    /// Sends a call to the registry. Returns its number.
    pub fn ask_registry(&mut self, from: usize, question: Question) -> u64 {
        self.ids += 1;
        let (id, process) = (self.ids, self.nodes[from].me.clone());
        let mut delay = self.between(0, 4);
        let late = match question {
            Question::Change(_) => self.rates.late_changes,
            _ => self.rates.slow,
        };
        if self.rng.f64() < late {
            delay = self.between(1, 1_500);
        }
        if !self.is_registry_cut(from) {
            if delay > LATE && self.rng.f64() < self.rates.lasting_doubts {
                let cut = self.between(1_000, 3_500);
                self.rates.registry_cut[from] = self.now + cut;
            }
            self.after(delay, Event::Registry { from, process, id, question });
        }
        id
    }

    fn is_registry_cut(&mut self, node: usize) -> bool {
        let cut = self.rates.registry_down.max(self.rates.registry_cut[node]) > self.now;
        cut || self.rng.f64() < self.rates.loss
    }

    fn reach_registry(&mut self, from: usize, process: NodeRef, id: u64, question: Question) {
        if self.rates.registry_down > self.now {
            return;
        }
        let before = self.registry.record.epoch;
        let is_change = matches!(question, Question::Change(_));
        let answer = self.registry.answer(self.now, &process, question);
        if is_change {
            self.note(|| format!("change of {process}: {answer:?}"));
            if matches!(answer, Answer::Committed(_)) {
                let record = std::rc::Rc::clone(&self.registry.record);
                self.note(|| {
                    format!(
                        "  epoch {before} → {} {:?} {:?} guards {:?} former {:?}",
                        record.epoch, record.owner, record.replicas, record.guards, record.former
                    )
                });
                self.counts.changes += 1;
                self.committed(from, process.incarnation);
            }
            self.check_record();
        }
        let mut delay = self.between(0, 4);
        if self.rng.f64() < self.rates.slow {
            delay = self.between(1, 2_500);
        }
        if !self.is_registry_cut(from) {
            self.after(delay, Event::Answer { to: from, incarnation: process.incarnation, id, answer });
        }
    }

    /// Submits a write to the storage; it may take as long as the fence grace assumes.
    pub fn write_backing(&mut self, node: usize, version: Version, request: Option<Request>) {
        let incarnation = self.nodes[node].incarnation;
        let most = LONGEST_IO.as_micros() as u64;
        let delay = match self.rng.f64() < self.rates.slow_storage {
            true => Duration::from_micros(self.rng.u64(most / 2..most)),
            false => self.between(0, 6),
        };
        self.nodes[node].io += 1;
        self.after(delay, Event::Land(Landing { node, incarnation, version, request }));
    }
}
