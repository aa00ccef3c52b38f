//! The third engine of the reactor: virtual time, simulated connections and simulated files.
//!
//! A [`World`] simulates several machines with their network and media. One seed decides everything in it, so a run can be
//! replayed. The code above the reactor is production code. Connections deliver bytes in pieces and late, accept partial sends,
//! break and fall silent. Files answer late, with errors, or not at all; a power cut loses or tears unsynced writes, and
//! operations that a process submitted before its end may land afterwards.
//!
//! Production nodes do not use this module: their reactors have other engines.

mod damage;
mod engine;
mod file;
mod storage;
mod stored;
mod wire;
mod work;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock::Nanos;
pub use crate::clock::{SetTime, VirtualClock};
use crate::random::Random;
pub use damage::Damage;
pub(crate) use engine::Engine;
use file::{File, Operation};
pub use file::{FileId, MediumFaults, MediumFile};
pub use storage::Storage;
use wire::Pipe;
pub use wire::{End, Wires};
pub(crate) use work::Work;
use work::Working;

/// The unit in which media keep data, in bytes.
const PAGE: usize = 4096;

/// The unit that a medium writes atomically, in bytes.
const SECTOR: usize = 512;

/// One incarnation of a process; nothing inherits its resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId(usize);

/// The manner of a process's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// It is killed: its kernel closes its connections, and submitted operations may still land.
    Killed,
    /// Its machine loses power: its peers get no notice, and its operations never land.
    PowerCut,
}

/// A scheduled event.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// Bytes in flight to this end of a connection arrive.
    Deliver(usize),
    /// A file operation takes effect.
    Land(usize),
    /// The completion of a file operation reaches the process.
    Complete(usize),
    /// A thread beside a shard does a piece of work.
    Work(usize),
}

struct Process {
    alive: bool,
    /// Its machine, for partitions.
    machine: usize,
    /// Time until which it is paused; its next action happens then.
    stands_until: Arc<AtomicU64>,
    ready: Vec<Ready>,
}

/// A completed operation or a fired watch that the process has not collected yet.
#[derive(Clone, Copy)]
struct Ready {
    /// The slot in its reactor.
    slot: usize,
    result: i32,
    /// The file, if it is an operation.
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
    /// End of each partition from one machine to another.
    blocked: Vec<(usize, usize, u64)>,
    files: Vec<File>,
    /// By number; the count so far.
    operations: BTreeMap<usize, Operation>,
    started: usize,
    /// By number, as operations.
    working: BTreeMap<usize, Working>,
    /// Messages sent and operations started by reactors.
    activity: u64,
}

/// Machines, wires and media under virtual time. Clones are handles on the same world.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
    /// As in `state`, for clocks.
    time: Arc<AtomicU64>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl World {
    /// The clock of a process; it runs `drift` thousandths too fast.
    #[must_use]
    pub fn clock(&self, process: ProcessId, drift: i64) -> Rc<VirtualClock> {
        let mut state = self.lock();
        let random = Random::new(state.random.next());
        let stands_until = Arc::clone(&state.processes[process.0].stands_until);
        Rc::new(VirtualClock::new(Arc::clone(&self.time), stands_until, drift, random))
    }

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
            working: BTreeMap::new(),
            activity: 0,
        };
        World { state: Arc::new(Mutex::new(state)), time: Arc::new(AtomicU64::new(start)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic inside ends the run; the remaining state is only dropped.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The world's time. A process reads its [`VirtualClock`].
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

    /// A process ends. Dropping its objects afterwards has no effect.
    pub fn end(&self, process: ProcessId, death: Death) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.processes[process.0].alive, false) {
            return;
        }
        state.processes[process.0].ready.clear();
        state.leave_files(process, death);
        state.leave_work(process);
        if death == Death::Killed {
            state.killed(process);
        }
    }

    /// The time of the next event; [`Nanos::NEVER`] when none is scheduled.
    #[must_use]
    pub fn next(&self) -> Nanos {
        self.lock().queue.peek().map_or(Nanos::NEVER, |Reverse((at, ..))| Nanos(*at))
    }

    /// Advances time to `to` and executes all events until then.
    pub fn advance(&self, to: Nanos) {
        let mut state = self.lock();
        while let Some(Reverse((at, _, index))) = state.queue.peek().copied()
            && at <= to.0
        {
            state.queue.pop();
            state.now = state.now.max(at);
            self.time.store(state.now, Ordering::Relaxed);
            state.free.push(index);
            match state.happenings[index] {
                Happening::Deliver(pipe) => state.deliver(pipe),
                Happening::Land(operation) => state.land(operation),
                Happening::Complete(operation) => state.complete(operation),
                Happening::Work(number) => state.work(number),
            }
        }
        state.now = state.now.max(to.0);
        self.time.store(state.now, Ordering::Relaxed);
    }

    /// Whether the process has events to collect.
    #[must_use]
    pub fn is_ready(&self, process: ProcessId) -> bool {
        !self.lock().processes[process.0].ready.is_empty()
    }

    /// Number of messages sent and file operations started by reactors so far.
    #[must_use]
    pub fn activity(&self) -> u64 {
        self.lock().activity
    }

    /// Whether nothing is in flight on any connection or medium.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.lock().queue.is_empty()
    }
}

impl State {
    fn at(&mut self, time: u64, happening: Happening) {
        let index = self.free.pop().unwrap_or(self.happenings.len());
        if index == self.happenings.len() {
            self.happenings.push(happening);
        } else {
            self.happenings[index] = happening;
        }
        self.number += 1;
        self.queue.push(Reverse((time.max(self.now), self.number, index)));
    }

    /// A process's position in time.
    fn time_of(&self, process: ProcessId) -> u64 {
        self.now.max(self.processes[process.0].stands_until.load(Ordering::Relaxed))
    }

    /// Delivers an event at the process's next wait.
    fn tell(&mut self, process: ProcessId, ready: Ready) {
        let process = &mut self.processes[process.0];
        if process.alive {
            process.ready.push(ready);
        }
    }
}
