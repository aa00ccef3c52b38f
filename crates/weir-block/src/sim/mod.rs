//! The third engine of the reactor: virtual time, simulated connections and simulated files.
//!
//! A [`World`] is what several machines and the wires and media between them are: everything that happens in it is decided by
//! one seed, so a run can be replayed. The code above the reactor is the one that runs in production; it cannot tell the
//! difference. Connections bring bytes in pieces and late, take only a part of what is sent, break and fall silent. Files
//! answer late, with errors, or not at all; what was not synced is lost or torn with the power, and what a process had handed
//! over before its end may land afterwards.
//!
//! Nothing here is used by a node that serves somebody: its reactors have other engines.

mod clock;
mod engine;
mod file;
mod harm;
mod random;
mod wire;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::Nanos;
pub(crate) use clock::set_time;
pub use clock::{SetTime, VirtualClock};
pub(crate) use engine::Engine;
use file::{File, Operation};
pub use file::{FileId, Medium, MediumFile};
pub use harm::Harm;
use random::Random;
use wire::Pipe;
pub use wire::{End, Wires};

/// One life of a process: what it had when it ended is nobody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId(usize);

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// It is killed: its kernel closes its connections, and what it had handed to the kernel may still land.
    Killed,
    /// Its machine loses power: the other ends hear nothing, and nothing of it lands any more.
    PowerCut,
}

/// What is due at some time.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// What is under way to this end of a connection arrives.
    Deliver(usize),
    /// A file operation takes effect.
    Land(usize),
    /// Its process hears of it.
    Complete(usize),
}

struct Process {
    alive: bool,
    /// Of which machine, for partitions.
    machine: usize,
    /// Until when it stands still in what it is doing: what it does next it does then.
    stands_until: Arc<AtomicU64>,
    ready: Vec<Ready>,
}

/// An operation that is done, or a watch that has fired, of which the process has not been told.
#[derive(Clone, Copy)]
struct Ready {
    /// Of its reactor.
    slot: usize,
    result: i32,
    /// On which file, if it is an operation.
    file: Option<usize>,
}

struct State {
    random: Random,
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    happenings: Vec<Happening>,
    free: Vec<usize>,
    number: u64,
    processes: Vec<Process>,
    pipes: Vec<Pipe>,
    wires: Wires,
    /// Until when nothing comes from one machine to another.
    blocked: Vec<(usize, usize, u64)>,
    files: Vec<File>,
    /// By number; how many there have been.
    operations: BTreeMap<usize, Operation>,
    started: usize,
    /// Pieces that reactors have sent, and operations begun.
    activity: u64,
}

/// Machines, wires and media under virtual time. Clones are handles on the same world.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
    /// The same as in `state`, for clocks.
    time: Arc<AtomicU64>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl World {
    /// An empty world in which everything follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> World {
        let start = 1_000_000;
        let state = State {
            random: Random::new(seed),
            now: start,
            queue: BinaryHeap::new(),
            happenings: Vec::new(),
            free: Vec::new(),
            number: 0,
            processes: Vec::new(),
            pipes: Vec::new(),
            wires: Wires::default(),
            blocked: Vec::new(),
            files: Vec::new(),
            operations: BTreeMap::new(),
            started: 0,
            activity: 0,
        };
        World { state: Arc::new(Mutex::new(state)), time: Arc::new(AtomicU64::new(start)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic inside ends the run; what it has left behind is only dropped.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of the world. What a process takes for the time is its [`VirtualClock`].
    #[must_use]
    pub fn now(&self) -> Nanos {
        Nanos(self.time.load(Ordering::Relaxed))
    }

    /// A new process on a machine.
    #[must_use]
    pub fn process(&self, machine: usize) -> ProcessId {
        let mut state = self.lock();
        state.processes.push(Process {
            alive: true,
            machine,
            stands_until: Arc::new(AtomicU64::new(0)),
            ready: Vec::new(),
        });
        ProcessId(state.processes.len() - 1)
    }

    /// A process ends. Everything of it that is dropped afterwards has no effect any more.
    pub fn end(&self, process: ProcessId, death: Death) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.processes[process.0].alive, false) {
            return;
        }
        state.processes[process.0].ready.clear();
        state.leave_files(process, death);
        if death == Death::Killed {
            state.killed(process);
        }
    }

    /// When something happens next; [`Nanos::NEVER`] when nothing is under way.
    #[must_use]
    pub fn next(&self) -> Nanos {
        self.lock().queue.peek().map_or(Nanos::NEVER, |Reverse((at, ..))| Nanos(*at))
    }

    /// Lets time pass until `to`, with all that happens until then.
    pub fn advance(&self, to: Nanos) {
        let mut state = self.lock();
        while let Some(Reverse((at, _, place))) = state.queue.peek().copied()
            && at <= to.0
        {
            state.queue.pop();
            state.now = state.now.max(at);
            self.time.store(state.now, Ordering::Relaxed);
            state.free.push(place);
            match state.happenings[place] {
                Happening::Deliver(pipe) => state.deliver(pipe),
                Happening::Land(operation) => state.land(operation),
                Happening::Complete(operation) => state.complete(operation),
            }
        }
        state.now = state.now.max(to.0);
        self.time.store(state.now, Ordering::Relaxed);
    }

    /// Whether something has happened that the process has not been told of.
    #[must_use]
    pub fn is_ready(&self, process: ProcessId) -> bool {
        !self.lock().processes[process.0].ready.is_empty()
    }

    /// How many messages reactors have sent and how many file operations they have begun so far.
    #[must_use]
    pub fn activity(&self) -> u64 {
        self.lock().activity
    }

    /// Whether nothing is under way on any wire or medium.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.lock().queue.is_empty()
    }
}

impl State {
    fn at(&mut self, time: u64, happening: Happening) {
        let place = self.free.pop().unwrap_or(self.happenings.len());
        if place == self.happenings.len() {
            self.happenings.push(happening);
        } else {
            self.happenings[place] = happening;
        }
        self.number += 1;
        self.queue.push(Reverse((time.max(self.now), self.number, place)));
    }

    /// Where in time a process is.
    fn time_of(&self, process: ProcessId) -> u64 {
        self.now.max(self.processes[process.0].stands_until.load(Ordering::Relaxed))
    }

    /// The process hears of something when it waits the next time.
    fn tell(&mut self, process: ProcessId, ready: Ready) {
        let process = &mut self.processes[process.0];
        if process.alive {
            process.ready.push(ready);
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
