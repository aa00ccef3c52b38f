//! A slot on a shard: the journal driven with the reactor.

use std::time::Duration;

use weir_block::buffer::BufferPool;
use weir_block::{
    Action, Buffer, Event, Meter, Nanos, OwnerId, Reactor, RequestKind, SharedFile, Token, WriteSource,
};

use super::device::SlotLease;
use super::error::FlashError;
use super::frame::State;
use super::journal::Journal;
use super::recovery::{Recovered, recover_planted};
use crate::log::{BLOCK, Log};
use crate::owner::Held;
use crate::planted::Bug;

/// A write that takes longer counts as failed. The time is long, because the failure is permanent; a replica whose flash
/// hangs leaves the set much earlier.
const PATIENCE: Duration = Duration::from_secs(10);

/// A write to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnderWay {
    /// The slot's entry in the device's table.
    Entry,
    Frame,
    /// Of a log that is not needed any more.
    OldFrame,
}

/// One disk's durable log, on the shard that has the disk or its replica.
pub struct FlashStore {
    owner: OwnerId,
    lease: SlotLease,
    file: SharedFile,
    journal: Journal,
    header: Option<Buffer>,
    pieces: Vec<(usize, usize)>,
    /// The I/O in flight in the kernel, even if nothing waits for it any more.
    under_way: Option<UnderWay>,
    since: Nanos,
    patience: Duration,
    /// A frame has become durable, and the stored state has not been read since.
    progressed: bool,
    error: Option<String>,
    /// The slot is given up; completions of I/O in flight are ignored.
    retired: bool,
    meter: Meter,
}

impl std::fmt::Debug for FlashStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FlashStore({} on {})", self.disk(), self.lease.path().display())
    }
}

impl FlashStore {
    /// An empty store in a slot that holds nothing yet, or nothing that is needed. Events go to `owner`. No frame is written
    /// before the slot is certainly this disk's.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(owner: OwnerId, lease: SlotLease) -> Result<FlashStore, FlashError> {
        let journal = Journal::new(lease.instance(), lease.ring());
        FlashStore::over(owner, lease, journal)
    }

    /// Reads the log in a slot. With `None`, there is none: the store is to be retired.
    ///
    /// # Errors
    /// The device cannot be read, or what is there is damaged ([`super::recovery`]); it is left as it is.
    pub fn recover(
        owner: OwnerId,
        lease: SlotLease,
        log_bytes: u64,
    ) -> Result<(FlashStore, Option<(Log, State)>), FlashError> {
        match recover_planted(&lease, lease.instance(), lease.ring(), log_bytes, lease.planted())? {
            Some(Recovered { log, state, journal }) => {
                Ok((FlashStore::over(owner, lease, journal)?, Some((log, state))))
            }
            None => Ok((FlashStore::new(owner, lease)?, None)),
        }
    }

    fn over(owner: OwnerId, lease: SlotLease, journal: Journal) -> Result<FlashStore, FlashError> {
        #[cfg(feature = "planted-bugs")]
        let journal = journal.planted(lease.planted());
        let file = lease.file()?;
        Ok(FlashStore {
            owner,
            lease,
            file,
            journal,
            // Of its own: the shard's buffers may all wait for this very log.
            header: BufferPool::new(BLOCK as usize).take(BLOCK as usize),
            pieces: Vec::new(),
            under_way: None,
            since: Nanos(0),
            patience: PATIENCE,
            progressed: false,
            error: None,
            retired: false,
            meter: Meter::new(),
        })
    }

    /// The number under which the reactor's events for this store come.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// The instance in the frames of its slot: another one for each log.
    #[must_use]
    pub fn instance(&self) -> u64 {
        self.lease.instance()
    }

    /// The disk whose log it is.
    #[must_use]
    pub fn disk(&self) -> &str {
        self.lease.disk()
    }

    /// A new log of the disk replaces this one, which is not needed any more or given up already. Needs no other slot, and
    /// does not wait here: I/O in flight completes first, then the new log is entered, then its frames are written.
    pub fn begin_anew(&mut self, disk_id: u64) {
        self.lease.begin_anew(disk_id);
        let journal = Journal::new(self.lease.instance(), self.lease.ring());
        #[cfg(feature = "planted-bugs")]
        let journal = journal.planted(self.lease.planted());
        self.journal = journal;
        // The new log's user does not know yet that the device has failed.
        (self.retired, self.progressed) = (false, self.error.is_some());
        if self.under_way == Some(UnderWay::Frame) {
            self.under_way = Some(UnderWay::OldFrame);
        }
    }

    /// The state that is certainly durable.
    #[must_use]
    pub fn stored(&self) -> Held {
        self.journal.stored()
    }

    /// Why nothing is written any more.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// With another time after which a write counts as failed, instead of 10 s.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> FlashStore {
        FlashStore { patience, ..self }
    }

    /// The time at which [`FlashStore::expire`] is due.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let waits = self.under_way.is_some() && self.error.is_none();
        if waits { self.since + self.patience } else { Nanos::NEVER }
    }

    /// Gives up a write that has been in flight for too long.
    pub fn expire(&mut self, now: Nanos) {
        if now >= self.deadline() {
            self.fail(format!("a write has not completed for {:?}", self.patience));
        }
    }

    /// Frames written: a request is a frame.
    #[must_use]
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Whether everything in `log`, and this state, is durable.
    #[must_use]
    pub fn has_caught_up(&self, log: &Log, state: &State) -> bool {
        self.error.is_none() && self.journal.has_caught_up(log, state)
    }

    /// See [`Journal::rewound`].
    pub fn rewound(&mut self, log: &Log) {
        self.journal.rewound(log);
    }

    /// Whether more has become durable since the last call.
    pub fn take_progress(&mut self) -> bool {
        std::mem::take(&mut self.progressed)
    }

    /// Begins to write new records, if nothing is in flight.
    pub fn advance(&mut self, reactor: &mut Reactor, log: &mut Log, state: State) {
        if self.journal.is_writing() {
            return;
        }
        if self.error.is_none() || !self.lease.planted().has(Bug::KeepPinned) {
            log.pin(None);
        }
        if self.error.is_some() || self.write_entry(reactor) {
            return;
        }
        let Some(mut header) = self.header.take() else { return };
        match self.journal.next(log, state, header.bytes_mut(), &mut self.pieces) {
            Some(write) => {
                log.pin(write.pins);
                self.begin(reactor.now(), UnderWay::Frame);
                self.meter.arrive(RequestKind::Write, self.since);
                let token = Token { owner: self.owner, slot: write.length as u32 };
                let source = WriteSource::Framed(header, log.region().clone(), self.pieces.clone());
                reactor.write_durable(&self.file, self.lease.start() + write.offset, source, token);
            }
            None => self.header = Some(header),
        }
    }

    /// Begins to write the slot's entry in the device's table, if it is to change. Returns whether anything is in flight.
    fn write_entry(&mut self, reactor: &mut Reactor) -> bool {
        if self.under_way.is_none()
            && self.header.is_some()
            && let Some((offset, entry)) = self.lease.entry()
            && let Some(mut header) = self.header.take()
        {
            header.bytes_mut().copy_from_slice(&entry);
            self.begin(reactor.now(), UnderWay::Entry);
            let token = Token { owner: self.owner, slot: 0 };
            reactor.write_durable(&self.file, offset, WriteSource::Buffer(header), token);
        }
        self.under_way.is_some()
    }

    fn begin(&mut self, now: Nanos, what: UnderWay) {
        (self.since, self.under_way) = (now, Some(what));
        self.lease.set_writing(true);
    }

    /// The end of a write.
    pub fn on_event(&mut self, event: Event, now: Nanos) {
        let Action::File { result, buffer } = event.action else { return };
        let what = self.under_way.take();
        self.header = buffer;
        self.lease.set_writing(false);
        if matches!(what, Some(UnderWay::Frame | UnderWay::OldFrame)) {
            let bytes = u64::from(event.token.slot);
            self.meter.complete(RequestKind::Write, bytes, self.since, now, result.is_ok());
        }
        match result.map_err(std::io::Error::from_raw_os_error) {
            Ok(_) if what == Some(UnderWay::Entry) => self.lease.entered(),
            Ok(_) if what == Some(UnderWay::Frame) && self.error.is_none() => {
                self.progressed = true;
                self.journal.written();
            }
            // Given up before it came back, with its log or with the device.
            Ok(_) => {}
            Err(error) => {
                if what == Some(UnderWay::Entry) {
                    self.lease.not_entered();
                }
                if self.lease.planted().has(Bug::KeepInFlight) {
                    self.under_way = what;
                }
                self.fail(error.to_string());
            }
        }
    }

    /// Writes nothing here any more, and waits for nothing in flight. The arena is not pinned for it: should the kernel still
    /// read there, the records that it writes do not match their checksums, and their frame is the newest one, which a
    /// recovery drops.
    pub fn fail(&mut self, reason: String) {
        if self.error.is_none() {
            tracing::error!(reason, device = %self.lease.path().display(), "the flash device fails");
            self.lease.report_failure();
            self.journal.abandon();
            self.error = Some(reason);
            self.progressed = true;
        }
    }

    /// The log is not needed any more: releases the slot. Returns itself until nothing is in flight and the release is
    /// durable.
    pub fn retire(mut self, reactor: &mut Reactor) -> Option<FlashStore> {
        if !std::mem::replace(&mut self.retired, true) {
            self.lease.give_up();
        }
        self.write_entry(reactor).then_some(self)
    }
}
