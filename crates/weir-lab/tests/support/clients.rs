//! Clients that write and read a few sectors of a disk at the same time and record each operation with its times.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::history::{Action, History, Operation, SECTOR, fill, value_of};
use weir_nbd::Uri;
use weir_nbd::client::{Answer, CommandFlags, Completed, NbdClient, NbdCommand, NbdError, Options, Ticket};

use crate::common::{Bench, DISK, SIZE};

/// The sectors lie in so many places, evenly spread over the first half of the disk; the second half is left to other loads.
const PLACES: u64 = 16;

/// Sectors from the beginning of one place to that of the next.
const APART: u64 = SIZE / 2 / PLACES / SECTOR as u64;

/// Sectors in each place; they touch, so that longer requests overlap each other in part.
const IN_PLACE: u64 = 16;

/// Pause before a client tries to connect again.
const AGAIN: Duration = Duration::from_millis(20);

/// The time that a client waits for the last answers.
const LAST_ANSWERS: Duration = Duration::from_secs(10);

/// `ESHUTDOWN`: the server closes the disk.
const ESHUTDOWN: u32 = 108;

/// The nodes that a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// Stays on its node and its connection, however long an answer takes. Once that is broken, it tries the same node.
    Stays,
    /// Makes a few requests, and goes on with a new connection to some node, whether that has the disk or not.
    Roams,
    /// Stays on its connection until it breaks or is silent for too long, and then tries one node after the other.
    Follows,
}

impl Habit {
    /// Longest silence before a client gives its connection up.
    fn patience(self) -> Duration {
        match self {
            Habit::Stays => Duration::from_secs(3600),
            Habit::Roams => Duration::from_secs(1),
            Habit::Follows => Duration::from_secs(2),
        }
    }
}

/// The state that all clients of a run share.
#[derive(Debug, Default)]
pub struct Shared {
    stop: AtomicBool,
    requests: AtomicU64,
    connections: AtomicU64,
    failed: AtomicU64,
}

/// Clients at work.
pub struct Clients {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Vec<Operation>>>,
}

/// The clients' operations.
pub struct Recorded {
    pub history: History,
    /// Requests that were answered.
    pub requests: u64,
    pub connections: u64,
    /// Requests that were answered with an error other than `ESHUTDOWN`.
    pub failed: u64,
}

impl Clients {
    /// Starts a client of each habit; each makes a request at most once in `interval`.
    pub fn start(bench: &Bench, habits: &[Habit], interval: Duration, seed: u64) -> Clients {
        Clients::start_from(bench, 0, habits, interval, seed)
    }

    /// As [`Clients::start`]; their numbers are those after `before`, as their values must differ from those of earlier clients.
    pub fn start_from(
        bench: &Bench,
        before: u16,
        habits: &[Habit],
        interval: Duration,
        seed: u64,
    ) -> Clients {
        let shared = Arc::new(Shared::default());
        let begin = |(number, habit): (usize, &Habit)| {
            let mut client = Recorder::new(bench, before + number as u16 + 1, *habit, seed, &shared);
            client.interval = interval;
            thread::spawn(move || client.run())
        };
        Clients { threads: habits.iter().enumerate().map(begin).collect(), shared }
    }

    /// Requests that were answered so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// Ends all clients.
    pub fn stop(mut self) -> Recorded {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut history = History::default();
        for thread in self.threads.drain(..) {
            history.append(&mut thread.join().unwrap());
        }
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let Shared { requests, connections, failed, .. } = &*self.shared;
        Recorded {
            history,
            requests: count(requests),
            connections: count(connections),
            failed: count(failed),
        }
    }
}

impl Drop for Clients {
    /// A test that fails must not leave them behind.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

/// Sectors of one request.
#[derive(Clone, Copy, Debug)]
struct Request {
    first: u64,
    sectors: u64,
    /// `None` for a read.
    written: Option<u64>,
    invoked: Nanos,
}

/// One client.
pub struct Recorder {
    client: u16,
    habit: Habit,
    random: Rng,
    interval: Duration,
    /// The nodes' exports, by number from 0.
    sockets: Vec<PathBuf>,
    node: usize,
    connections: u32,
    written: u64,
    pending: HashMap<Ticket, Request>,
    operations: Vec<Operation>,
    shared: Arc<Shared>,
}

impl Recorder {
    fn new(bench: &Bench, client: u16, habit: Habit, seed: u64, shared: &Arc<Shared>) -> Recorder {
        let nodes = bench.lab.nodes();
        let owner = bench.owner();
        let owner = nodes.iter().position(|node| node.name == owner).unwrap_or(0);
        Recorder {
            client,
            habit,
            random: Rng::with_seed(seed ^ u64::from(client) << 32),
            interval: Duration::ZERO,
            sockets: nodes.iter().map(|node| node.nbd_unix.clone()).collect(),
            node: owner,
            connections: 0,
            written: 0,
            pending: HashMap::new(),
            operations: Vec::new(),
            shared: Arc::clone(shared),
        }
    }

    /// A client that reads what is there now, once, after all others have ended.
    pub fn last(bench: &Bench, client: u16) -> Recorder {
        Recorder::new(bench, client, Habit::Follows, 0, &Arc::default())
    }

    fn run(mut self) -> Vec<Operation> {
        let mut connection = None;
        while !self.is_stopped() {
            let Some(client) = connection.take().or_else(|| self.connect()) else {
                thread::sleep(AGAIN);
                continue;
            };
            let requests = match self.habit {
                Habit::Roams => self.random.u64(1..100),
                Habit::Stays | Habit::Follows => u64::MAX,
            };
            self.converse(client, requests);
            self.give_up();
        }
        self.operations
    }

    fn is_stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    /// A connection to the next node of this client; `None` if it gets none.
    fn connect(&mut self) -> Option<NbdClient> {
        match self.habit {
            Habit::Stays => {}
            Habit::Roams => self.node = self.random.usize(..self.sockets.len()),
            Habit::Follows if self.connections > 0 => self.node = (self.node + 1) % self.sockets.len(),
            Habit::Follows => {}
        }
        let options = Options {
            depth: 4,
            structured_replies: false,
            connect_timeout: Duration::from_millis(500),
            timeout: self.habit.patience(),
            ..Options::default()
        };
        self.connections += 1;
        let client = NbdClient::connect_with(&Uri::unix(&self.sockets[self.node], DISK), &options).ok()?;
        self.shared.connections.fetch_add(1, Ordering::Relaxed);
        Some(client)
    }

    /// Makes so many requests, and returns early when the connection is of no use any more.
    fn converse(&mut self, mut client: NbdClient, requests: u64) {
        let depth = self.random.usize(1..4);
        let (mut made, mut next) = (0, Nanos::now());
        let mut ends = None;
        loop {
            let now = Nanos::now();
            if self.is_stopped() || made == requests {
                let end = *ends.get_or_insert(now + LAST_ANSWERS);
                if self.pending.is_empty() || now > end {
                    return;
                }
            } else if self.pending.len() < depth && now >= next {
                let request = self.choose();
                if self.send(&mut client, request).is_err() {
                    return;
                }
                (made, next) = (made + 1, now + self.interval);
            }
            // A request that has to wait for its time must not wait for answers that do not come.
            let wait = if self.pending.is_empty() { Duration::ZERO } else { Duration::from_millis(1) };
            match client.poll(wait) {
                Ok(Some(completed)) => {
                    if self.answered(completed).is_err() {
                        return;
                    }
                }
                Ok(None) if self.pending.is_empty() => thread::sleep(next - Nanos::now()),
                Ok(None) => {}
                Err(_) => return,
            }
        }
    }

    fn choose(&mut self) -> Request {
        let random = &mut self.random;
        let sectors = match random.u8(0..10) {
            0..=4 => 1,
            5..=7 => 8,
            _ => random.u64(2..=IN_PLACE),
        };
        let within = random.u64(0..=IN_PLACE - sectors);
        let first = random.u64(0..PLACES) * APART + within;
        let written = random.bool().then(|| {
            self.written += 1;
            u64::from(self.client) << 40 | self.written
        });
        Request { first, sectors, written, invoked: Nanos(0) }
    }

    fn send(&mut self, client: &mut NbdClient, mut request: Request) -> Result<(), NbdError> {
        let (offset, length) = (request.first * SECTOR as u64, (request.sectors * SECTOR as u64) as u32);
        let mut data = Vec::new();
        let command = match request.written {
            Some(value) => {
                data.resize(length as usize, 0);
                fill(&mut data, request.first, value);
                let flags = CommandFlags { fua: self.random.u8(0..20) == 0, ..CommandFlags::NONE };
                NbdCommand::Write { offset, length, flags }
            }
            None => NbdCommand::Read { offset, length },
        };
        request.invoked = Nanos::now();
        match client.submit(command, &data) {
            Ok(ticket) => {
                self.pending.insert(ticket, request);
                Ok(())
            }
            // It may have left.
            Err(error) => {
                self.record(request, None, &[]);
                Err(error)
            }
        }
    }

    /// Records an answer; an error if the server closes the disk.
    fn answered(&mut self, completed: Completed) -> Result<(), NbdError> {
        let now = Nanos::now();
        let Some(request) = self.pending.remove(&completed.ticket) else { return Ok(()) };
        match completed.result {
            Ok(answer) => {
                let data = if let Answer::Data(data) = answer { data } else { Vec::new() };
                self.record(request, Some(now), &data);
                self.shared.requests.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                self.record(request, None, &[]);
                if matches!(error, NbdError::Request { errno: ESHUTDOWN, .. }) {
                    return Err(error);
                }
                eprintln!("client {} on n{}: {error}", self.client, self.node + 1);
                self.shared.failed.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// The outcome of requests in flight is unknown.
    fn give_up(&mut self) {
        for (_, request) in std::mem::take(&mut self.pending) {
            self.record(request, None, &[]);
        }
    }

    /// One operation for each sector. `data` is what a read has brought.
    fn record(&mut self, request: Request, completed: Option<Nanos>, data: &[u8]) {
        if request.written.is_none() && completed.is_none() {
            return;
        }
        for index in 0..request.sectors {
            let register = request.first + index;
            let (action, value) = match request.written {
                Some(value) => (Action::Write, value),
                None => {
                    let from = index as usize * SECTOR;
                    (Action::Read, value_of(&data[from..from + SECTOR], register))
                }
            };
            self.operations.push(Operation {
                client: self.client,
                node: self.node as u16 + 1,
                connection: self.connections,
                register,
                action,
                value,
                invoked: request.invoked,
                completed,
            });
        }
    }

    /// Reads every sector once with `read`, which is given an offset and a buffer.
    pub fn read_all(mut self, mut read: impl FnMut(u64, &mut [u8])) -> Vec<Operation> {
        for place in 0..PLACES {
            let first = place * APART;
            let request = Request { first, sectors: IN_PLACE, written: None, invoked: Nanos::now() };
            let mut data = vec![0; IN_PLACE as usize * SECTOR];
            read(first * SECTOR as u64, &mut data);
            self.record(request, Some(Nanos::now()), &data);
        }
        self.operations
    }
}
