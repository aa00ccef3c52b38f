//! Destage: one checkpoint after the other from the log to the backing (P4, P5, P6).

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use weir_block::{Code, Destage, IoError, Layer, Metered, Nanos, Reactor, Request, RequestKind, Tag};

use crate::checkpoint::{self, Step};
use crate::depth::DepthControl;
use crate::log::Log;
use crate::planted::{Bug, Planted};

/// Log bytes of one checkpoint, softly. Also at most a quarter of the log, so that room comes in small portions.
const MOST_BYTES: u64 = 64 << 20;

/// Enough dirty bytes to begin a checkpoint without waiting for more.
const ENOUGH_BYTES: u64 = 8 << 20;

/// More checkpoints in a row that the backing loses before it has flushed them are an error.
const MOST_LOST: u32 = 3;

/// After the backing refused a write, wait so long before trying again.
const BACK_OFF: Duration = Duration::from_secs(1);

/// Steps handed to the backing in one turn of the shard's loop; others want their turn too.
const STEPS_PER_TURN: usize = 128;

enum State {
    Idle,
    Writing(Writing),
    Flushing { since: Nanos },
    BackingOff { until: Nanos },
}

/// The writes of a checkpoint.
struct Writing {
    steps: VecDeque<Step>,
    planned: usize,
    in_flight: usize,
    failed: Option<IoError>,
    /// Some steps were in flight between two turns: this backing is asynchronous, so depth has an effect on it.
    waited: bool,
}

/// The outcome of a step towards the backing.
pub enum Progress {
    /// Go on.
    None,
    /// A checkpoint is complete: the backing holds, flushed, everything up to this record.
    Done { to: u64, bytes: u64, time: Duration, recovered: bool },
    /// The backing refuses. First time since the last success when `first`.
    Failed { error: IoError, first: bool },
}

/// One disk's destage.
pub struct Destager {
    state: State,
    /// A step has come back since the last were handed down.
    progressed: bool,
    delay: Duration,
    /// Most records of a checkpoint, unless they belong together.
    records: u64,
    depth: DepthControl,
    target: u64,
    bytes: u64,
    began: Nanos,
    /// The time of the first record to destage since the log was clean.
    dirty_since: Option<Nanos>,
    /// Checkpoints in a row that the backing has lost before it has flushed them.
    lost: u32,
    /// The last error, until a checkpoint succeeds.
    error: Option<IoError>,
    /// Bytes of the log that checkpoints have dealt with, and of those, bytes that need not be written because they were
    /// overwritten within their checkpoint.
    destaged: u64,
    coalesced: u64,
    /// Of the running checkpoint.
    saved: u64,
    completed_at: Option<Nanos>,
    planted: Planted,
}

impl Destager {
    pub fn new(delay: Duration, records: u64) -> Destager {
        Destager {
            state: State::Idle,
            progressed: false,
            delay,
            records,
            depth: DepthControl::new(),
            target: 0,
            bytes: 0,
            began: Nanos(0),
            dirty_since: None,
            lost: 0,
            error: None,
            destaged: 0,
            coalesced: 0,
            saved: 0,
            completed_at: None,
            planted: Planted::default(),
        }
    }

    /// Plants a bug, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// Why nothing reaches the backing, if so.
    pub fn error(&self) -> Option<IoError> {
        self.error
    }

    /// Begins a checkpoint if one is due. Records after `from` up to `limit` may be written; those up to `whole` belong
    /// together however many they are.
    pub fn begin(&mut self, now: Nanos, log: &Log, from: u64, limit: u64, whole: u64, urgent: bool) {
        match self.state {
            State::Idle => {}
            State::BackingOff { until } if now >= until => self.state = State::Idle,
            _ => return,
        }
        if limit <= from {
            self.dirty_since = None;
            return;
        }
        let since = *self.dirty_since.get_or_insert(now);
        let enough = limit - from >= self.records || log.used() >= ENOUGH_BYTES.min(log.capacity() / 4);
        if !urgent && !enough && now < since + self.delay {
            return;
        }
        let mut bytes = 0;
        let mut to = from;
        let whole = whole.min(limit);
        for (sequence, record) in log.range(from + 1, limit.min(from + self.records).max(whole)) {
            bytes += record.data_length() as u64;
            if bytes > MOST_BYTES.min(log.capacity() / 4) && to > from && sequence > whole {
                break;
            }
            to = sequence;
        }
        let (steps, saved) = checkpoint::plan(log, from + 1, to, self.planted);
        (self.target, self.bytes, self.began, self.dirty_since) = (to, bytes, now, None);
        self.saved = saved;
        let planned = steps.len();
        self.state = State::Writing(Writing { planned, steps, in_flight: 0, failed: None, waited: false });
    }

    /// Submits steps to the backing, as many as the depth allows; `tag` makes a tag for each. Returns whether it stopped only
    /// to give others their turn. Its flush waits until no other flush is in flight.
    pub fn submit<L: Destage>(
        &mut self,
        reactor: &mut Reactor,
        log: &Log,
        lower: &mut Metered<L>,
        may_flush: bool,
        mut tag: impl FnMut() -> Tag,
    ) -> bool {
        self.progressed = false;
        let State::Writing(Writing { steps, in_flight, failed, waited, .. }) = &mut self.state else {
            return false;
        };
        *waited |= *in_flight > 0;
        let mut turn = 0;
        while failed.is_none() && *in_flight < self.depth.depth() && lower.can_gather() {
            match steps.pop_front() {
                Some(Step::Write { offset, pieces }) => {
                    lower.write_gather(reactor, tag(), offset, Rc::clone(log.region()), pieces);
                }
                Some(Step::Zero { offset, length, discard }) => {
                    let request = if discard {
                        Request::Discard { tag: tag(), offset, length, fua: false }
                    } else {
                        Request::WriteZeroes {
                            tag: tag(),
                            offset,
                            length,
                            fua: false,
                            may_unmap: false,
                            fast_only: false,
                        }
                    };
                    lower.submit_destaged(reactor, request);
                }
                None => break,
            }
            *in_flight += 1;
            turn += 1;
            if turn == STEPS_PER_TURN {
                return true;
            }
        }
        let is_written = *in_flight == 0 && steps.is_empty() && failed.is_none();
        if is_written && may_flush && lower.has_room(RequestKind::Flush, 0) {
            self.state = State::Flushing { since: reactor.now() };
            lower.submit_destaged(reactor, Request::Flush { tag: tag() });
        }
        false
    }

    /// A step (or the flush) came back.
    pub fn completed(&mut self, now: Nanos, result: Result<(), IoError>) -> Progress {
        self.progressed = true;
        match (&mut self.state, result) {
            (State::Writing(writing), result) => {
                writing.in_flight -= 1;
                if let Err(error) = result {
                    writing.failed.get_or_insert(error);
                }
                match (writing.in_flight, writing.failed) {
                    (0, Some(error)) => self.fail(now, error),
                    (0, None) if writing.steps.is_empty() && self.planted.has(Bug::FreeBeforeFlush) => {
                        self.done(now)
                    }
                    (0, None) if writing.steps.is_empty() && writing.waited => {
                        let written = self.bytes.saturating_sub(self.saved);
                        self.depth.observe(writing.planned, written, now - self.began);
                        Progress::None
                    }
                    _ => Progress::None,
                }
            }
            // No trouble of the storage, unless it comes again and again.
            (State::Flushing { .. }, Err(error)) if error.code == Code::Lost && self.lost < MOST_LOST => {
                self.lost += 1;
                self.state = State::Idle;
                Progress::None
            }
            (_, Err(error)) => self.fail(now, error),
            (_, Ok(())) => self.done(now),
        }
    }

    /// A client's flush has failed. The storage may report that once only: writes of this checkpoint may be lost, though its
    /// own flush will succeed (P6).
    pub fn flush_failed(&mut self, now: Nanos, error: IoError) -> Progress {
        match &mut self.state {
            State::Writing(writing) if writing.in_flight > 0 => {
                writing.failed.get_or_insert(error);
            }
            State::Writing(_) => return self.fail(now, error),
            // Of these only `Flushing` has written data that is not known to be durable, and two flushes are never in flight.
            State::Flushing { .. } | State::Idle | State::BackingOff { .. } => {}
        }
        Progress::None
    }

    fn done(&mut self, now: Nanos) -> Progress {
        (self.state, self.lost) = (State::Idle, 0);
        let recovered = self.error.take().is_some();
        self.destaged += self.bytes;
        self.coalesced += self.saved;
        self.completed_at = Some(now);
        Progress::Done { to: self.target, bytes: self.bytes, time: now - self.began, recovered }
    }

    /// Writing the same records again later is harmless: nothing newer of them is in the backing (P4).
    fn fail(&mut self, now: Nanos, error: IoError) -> Progress {
        self.state = State::BackingOff { until: now + BACK_OFF };
        let first = self.error.replace(error).is_none();
        Progress::Failed { error, first }
    }

    /// Estimated time until the running checkpoint is complete, from its progress so far. Until then it frees no room in the
    /// log.
    pub fn remaining(&self, now: Nanos) -> Option<Duration> {
        match &self.state {
            State::Writing(Writing { steps, planned, in_flight, .. }) => {
                let left = steps.len() + in_flight;
                let elapsed = now - self.began;
                // Before the first step has come back, each counts as long as this one has taken already.
                Some(elapsed.mul_f64(left as f64 / planned.saturating_sub(left).max(1) as f64))
            }
            // The duration of a flush is unknown: the estimate is as long again.
            State::Flushing { since } => Some(now - *since),
            State::Idle | State::BackingOff { .. } => None,
        }
    }

    /// The time at which the last checkpoint was complete.
    pub fn completed_at(&self) -> Option<Nanos> {
        self.completed_at
    }

    /// Bytes of the log that checkpoints have dealt with.
    pub fn destaged(&self) -> u64 {
        self.destaged
    }

    /// Bytes of those that were overwritten within their checkpoint and never written.
    pub fn coalesced(&self) -> u64 {
        self.coalesced
    }

    /// Writes that a checkpoint keeps in flight.
    pub fn depth(&self) -> usize {
        self.depth.depth()
    }

    /// Nothing after this record has ever been handed to the backing.
    pub fn reaches(&self) -> u64 {
        self.target
    }

    /// Whether its flush is in flight.
    pub fn is_flushing(&self) -> bool {
        matches!(self.state, State::Flushing { .. })
    }

    /// Whether [`Destager::begin`] has to be called to find out what to do next, given that there is something to do.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle) && self.dirty_since.is_none()
    }

    /// The time at which a step is due without an event.
    pub fn deadline(&self) -> Nanos {
        match self.state {
            State::Idle => self.dirty_since.map_or(Nanos::NEVER, |since| since + self.delay),
            State::BackingOff { until } => until,
            // A backing in memory answers without an event: the next step must not wait for one.
            State::Writing(_) if self.progressed => Nanos(0),
            State::Writing(_) | State::Flushing { .. } => Nanos::NEVER,
        }
    }

    /// Begins and submits nothing more; steps in flight come back through [`Destager::completed`].
    pub fn stop(&mut self) {
        if let State::Writing(writing) = &mut self.state {
            writing.steps.clear();
        }
    }
}
