//! A load that records every write, survives broken connections, and verifies the content of the disk.
//!
//! Crash tests and demonstrations use it. Writes in flight when a connection breaks are unknown: the disk may
//! hold the old version or the new one, and the [`History`] allows both. An acknowledged write is always required.
//!
//! Before a server offers the export again after a break, no request of the old connection may still be in flight (P4).
//! If one is, this load reports stale data.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::{CommandFlags, Connection, Done, NbdCommand, NbdError, Options};

use crate::bits::BitSet;
use crate::error::LoadError;
use crate::summary::Verification;
use crate::tally::{IoKind, Tally};
use crate::verify::{Atomicity, History, Step};

/// Pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(10);

/// The protocol's `ESHUTDOWN`: the server is closing the disk, the request may be repeated elsewhere.
const ESHUTDOWN: u32 = weir_nbd::protocol::error::ESHUTDOWN;

/// Settings of a verifying load.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Requests in flight, 1 to 4096.
    pub depth: u32,
    /// Reads, in percent of the requests, 0 to 100.
    pub read_percent: u8,
    /// Writes with FUA, in percent of the writes, 0 to 100 (none when the export does not offer it).
    pub fua_percent: u8,
    /// Maximum requests per second; `None` for as many as the export takes.
    pub rate: Option<u64>,
    /// Seed of the choice of blocks.
    pub seed: u64,
    /// Longest wait for an export after a break.
    pub reconnect_for: Duration,
    /// Longest silence of a server before the connection counts as broken.
    pub timeout: Duration,
    /// The allowed result of an unanswered write.
    pub atomicity: Atomicity,
}

impl Default for Settings {
    /// Depth 32, a third reads, a tenth of the writes FUA, 60 s to reconnect, 30 s of silence, whole blocks.
    fn default() -> Settings {
        Settings {
            depth: 32,
            read_percent: 33,
            fua_percent: 10,
            rate: None,
            seed: 1,
            reconnect_for: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
            atomicity: Atomicity::Block,
        }
    }
}

/// Progress of a verifying load, readable from any thread.
#[derive(Debug, Default)]
pub struct Progress {
    stop: AtomicBool,
    acknowledged: AtomicU64,
    reads: AtomicU64,
    failed: AtomicU64,
    unknown: AtomicU64,
    reconnects: AtomicU64,
    mismatches: AtomicU64,
    longest_stall: AtomicU64,
}

impl Progress {
    /// Ends the load soon.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Writes that were acknowledged.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Reads that were answered and judged.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Requests that failed at the server.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Writes with an unknown outcome: in flight when a connection broke.
    #[must_use]
    pub fn unknown(&self) -> u64 {
        self.unknown.load(Ordering::Relaxed)
    }

    /// Connections made after the first.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    /// Reads that returned incorrect data.
    #[must_use]
    pub fn mismatches(&self) -> u64 {
        self.mismatches.load(Ordering::Relaxed)
    }

    /// Longest time without any answer while requests were waiting.
    #[must_use]
    pub fn longest_stall(&self) -> Duration {
        Duration::from_nanos(self.longest_stall.load(Ordering::Relaxed))
    }

    /// As [`Progress::longest_stall`], since the last call.
    pub fn take_longest_stall(&self) -> Duration {
        Duration::from_nanos(self.longest_stall.swap(0, Ordering::Relaxed))
    }
}

/// Locates the export: called before every attempt to connect, with the number of the attempt since the break (from 0). `None`:
/// no server has it at present; the load calls it again.
pub type Locate = Box<dyn FnMut(u64) -> Option<Uri> + Send>;

/// The load. One thread, one connection at a time.
pub struct VerifyingLoad {
    settings: Settings,
    locate: Locate,
    history: History,
    connection: Option<Connection>,
    random: fastrand::Rng,
    busy: BitSet,
    free: Vec<u32>,
    /// The request in flight of each slot.
    pending: Vec<Option<Pending>>,
    /// Blocks whose read was interrupted, to be read again first.
    again: VecDeque<u64>,
    done: Vec<Done>,
    was_connected: bool,
    /// The last sign of life: an answer, or a request that found nothing in flight before it.
    last_answer: Nanos,
    /// The connection has broken, and no answer has come since.
    interrupted: bool,
    found: Verification,
    tally: Tally,
    progress: Arc<Progress>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    block: u64,
    /// 0 for a read.
    version: u32,
    issued: Nanos,
}

impl VerifyingLoad {
    /// A load on the blocks of `history` (a new one, or one that an earlier load has left).
    #[must_use]
    pub fn new(history: History, settings: Settings, locate: Locate) -> VerifyingLoad {
        let blocks = history.layout().blocks();
        VerifyingLoad {
            locate,
            connection: None,
            random: fastrand::Rng::with_seed(settings.seed),
            busy: BitSet::new(blocks),
            free: (0..settings.depth).rev().collect(),
            pending: vec![None; settings.depth as usize],
            again: VecDeque::new(),
            done: Vec::new(),
            was_connected: false,
            last_answer: Nanos::now(),
            interrupted: false,
            found: Verification::default(),
            tally: Tally::default(),
            progress: Arc::default(),
            history,
            settings,
        }
    }

    /// Counters that other threads may read, and the way to stop the load.
    #[must_use]
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// The history of all writes.
    #[must_use]
    pub fn history(&self) -> &History {
        &self.history
    }

    /// The history of all writes, for another load.
    #[must_use]
    pub fn into_history(self) -> History {
        self.history
    }

    /// Counts and latencies so far. A request that was cut off by a break is not in them.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Results of all verified reads so far, those of the mix and those of [`VerifyingLoad::check_all`].
    #[must_use]
    pub fn found(&self) -> &Verification {
        &self.found
    }

    /// Reads and writes for `duration`, or until [`Progress::stop`]; then waits for the requests in flight.
    ///
    /// # Errors
    /// The export cannot be reached for longer than the settings allow.
    pub fn run(&mut self, duration: Duration) -> Result<(), LoadError> {
        let start = Nanos::now();
        let interval = self.settings.rate.map(|rate| Duration::from_nanos(1_000_000_000 / rate.max(1)));
        let mut next_start = start;
        self.last_answer = start;
        loop {
            let now = Nanos::now();
            let ending = now >= start + duration || self.progress.stop.load(Ordering::Relaxed);
            if ending && self.free.len() == self.pending.len() {
                return Ok(());
            }
            if !self.connected(true)? {
                return Ok(());
            }
            while !ending && now >= next_start && self.issue(now) {
                if let Some(interval) = interval {
                    next_start = next_start + interval;
                }
            }
            // A request that is due and has no free slot waits for an answer, not for its time: a load that polled would take the
            // processor from the server.
            let paced = interval.is_some() && !ending && next_start > now;
            self.pump(if paced { next_start.min(start + duration) } else { Nanos::NEVER })?;
        }
    }

    /// Reads every block once and judges it. Nothing else may write to the disk meanwhile. Returns the results of this pass
    /// alone.
    ///
    /// # Errors
    /// The export cannot be reached, or fails a read.
    pub fn check_all(&mut self) -> Result<Verification, LoadError> {
        let before = std::mem::take(&mut self.found);
        let failed_before = self.progress.failed();
        let blocks = self.history.layout().blocks();
        let mut next = 0;
        self.last_answer = Nanos::now();
        loop {
            self.connected(false)?;
            let now = Nanos::now();
            while !self.free.is_empty() {
                let block = match self.again.pop_front() {
                    Some(block) => block,
                    None if next < blocks => next,
                    None => break,
                };
                next += u64::from(block == next);
                self.busy.set(block);
                self.start(block, IoKind::Read, now);
            }
            if self.free.len() == self.pending.len() {
                break;
            }
            self.pump(Nanos::NEVER)?;
        }
        let pass = std::mem::replace(&mut self.found, before);
        self.found.add(pass.clone());
        match self.progress.failed() - failed_before {
            0 => Ok(pass),
            failed => Err(LoadError::NotJudged { failed }),
        }
    }

    /// Starts one request; false when there is no free slot or block.
    fn issue(&mut self, now: Nanos) -> bool {
        if self.free.is_empty() {
            return false;
        }
        let (block, kind) = match self.again.pop_front() {
            Some(block) if self.busy.set(block) => (block, IoKind::Read),
            _ => {
                let Some(block) = self.busy.set_random(&mut self.random) else { return false };
                let read = self.random.u8(0..100) < self.settings.read_percent;
                (block, if read { IoKind::Read } else { IoKind::Write })
            }
        };
        self.start(block, kind, now);
        true
    }

    fn start(&mut self, block: u64, kind: IoKind, now: Nanos) {
        if self.free.len() == self.pending.len() && !self.interrupted {
            self.last_answer = now;
        }
        let (Some(slot), Some(connection)) = (self.free.pop(), self.connection.as_mut()) else { return };
        let span = self.history.layout().block(block);
        let (offset, length) = (span.offset, span.length as u32);
        let fua = connection.export().can_fua() && self.random.u8(0..100) < self.settings.fua_percent;
        let (version, command) = if kind == IoKind::Write {
            let version = self.history.issue(block, connection.buffer(slot, length));
            (version, NbdCommand::Write { offset, length, flags: CommandFlags { fua, ..CommandFlags::NONE } })
        } else {
            (0, NbdCommand::Read { offset, length })
        };
        connection.start(slot, command);
        if kind == IoKind::Write {
            self.history.note(block, Step::Sent, version);
        }
        self.pending[slot as usize] = Some(Pending { block, version, issued: now });
    }

    /// Waits for answers. Drops a connection that fails.
    fn pump(&mut self, until: Nanos) -> Result<(), LoadError> {
        let Some(connection) = self.connection.as_mut() else { return Ok(()) };
        let outcome = connection.pump(until, &mut self.done);
        let now = Nanos::now();
        let mut leaving = false;
        if !self.done.is_empty() {
            self.note_stall(now);
            self.last_answer = now;
            self.interrupted = false;
        }
        for done in std::mem::take(&mut self.done) {
            leaving |= done.errno == ESHUTDOWN;
            self.answered(done, now);
        }
        match outcome {
            Ok(()) if !leaving => Ok(()),
            Err(error) if !error.is_connection() => Err(error.into()),
            _ => {
                self.give_up();
                Ok(())
            }
        }
    }

    fn answered(&mut self, done: Done, now: Nanos) {
        let Some(Pending { block, version, issued }) = self.pending[done.slot as usize].take() else {
            return;
        };
        self.free.push(done.slot);
        self.busy.clear(block);
        let length = self.history.layout().block(block).length;
        let kind = if version == 0 { IoKind::Read } else { IoKind::Write };
        self.tally.count(kind, length, now.0.saturating_sub(issued.0), done.errno == 0);
        match (done.errno, kind, &self.connection) {
            (0, IoKind::Read, Some(connection)) => {
                let data = connection.data(done.slot, length as u32);
                let judged = self.history.check(block, data, self.settings.atomicity);
                self.progress.reads.fetch_add(1, Ordering::Relaxed);
                self.progress.mismatches.fetch_add(u64::from(judged.is_err()), Ordering::Relaxed);
                if judged.is_ok() {
                    self.history.note(block, Step::Seen, self.history.versions_of(block).0);
                }
                self.found.count_with(judged, || self.history.describe(block));
            }
            (0, _, _) => {
                self.history.acknowledge(block, version);
                self.history.note(block, Step::Acknowledged, version);
                self.progress.acknowledged.fetch_add(1, Ordering::Relaxed);
            }
            (ESHUTDOWN, IoKind::Read, _) => self.again.push_back(block),
            (ESHUTDOWN, IoKind::Write, _) => {
                self.history.note(block, Step::Abandoned, version);
                self.progress.unknown.fetch_add(1, Ordering::Relaxed);
            }
            _ => {
                self.progress.failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Drops the connection. Writes in flight stay issued and unanswered; the load repeats reads.
    fn give_up(&mut self) {
        self.connection = None;
        self.interrupted = true;
        for slot in 0..self.settings.depth {
            let Some(Pending { block, version, .. }) = self.pending[slot as usize].take() else { continue };
            self.free.push(slot);
            self.busy.clear(block);
            if version == 0 {
                self.again.push_back(block);
            } else {
                self.history.note(block, Step::Abandoned, version);
                self.progress.unknown.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Ensures a connection; false when the load was stopped while there was none.
    fn connected(&mut self, stoppable: bool) -> Result<bool, LoadError> {
        let start = Nanos::now();
        let mut attempts = 0;
        let mut last = String::from("nobody knows where the export is");
        while self.connection.is_none() {
            match self.attempt(attempts) {
                Ok(Some(connection)) => {
                    self.connection = Some(connection);
                    self.progress.reconnects.fetch_add(u64::from(self.was_connected), Ordering::Relaxed);
                    self.was_connected = true;
                    return Ok(true);
                }
                Ok(None) => {}
                Err(error) => last = error.to_string(),
            }
            attempts += 1;
            let waited = Nanos::now() - start;
            if stoppable && self.progress.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if waited >= self.settings.reconnect_for {
                self.note_stall(Nanos::now());
                return Err(LoadError::Unreachable { waited, attempts, last });
            }
            std::thread::sleep(RETRY);
        }
        Ok(true)
    }

    fn attempt(&mut self, number: u64) -> Result<Option<Connection>, LoadError> {
        let Some(uri) = (self.locate)(number) else { return Ok(None) };
        let Settings { depth, timeout, .. } = self.settings;
        let options = Options { depth, timeout, structured_replies: false, ..Options::default() };
        let connection = Connection::open(&uri, &options)?;
        let span = self.history.layout().span();
        if connection.export().size < span.offset + span.length {
            return Err(NbdError::Protocol("the export is smaller than the range to be verified").into());
        }
        Ok(Some(connection))
    }

    fn note_stall(&self, now: Nanos) {
        self.progress.longest_stall.fetch_max((now - self.last_answer).as_nanos() as u64, Ordering::Relaxed);
    }
}
