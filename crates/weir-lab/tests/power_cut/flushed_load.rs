//! A load that knows of every write whether it was issued, acknowledged, or acknowledged and flushed.

use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_load::verify::{Atomicity, History, Mismatch};
use weir_nbd::Uri;
use weir_nbd::client::{CommandFlags, Connection, Done, NbdClient, NbdCommand, NbdError, Options};

use crate::common::{BLOCK, new_history};

/// Writes in flight.
const DEPTH: u32 = 16;

/// The slot of flushes, beside those of writes.
const FLUSH: u32 = DEPTH;

/// One of so many writes carries FUA.
const FUA_OF: u32 = 16;

/// Pause between two flushes: long enough for something to be at stake.
const BETWEEN_FLUSHES: Duration = Duration::from_millis(20);

/// A write in flight.
#[derive(Clone, Copy, Debug)]
struct Pending {
    block: u64,
    version: u32,
    fua: bool,
}

/// The result of a check of all blocks.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Blocks with an acknowledged write that are older than that.
    pub acknowledged_lost: u64,
    /// Blocks that are older than a write that was acknowledged and flushed, or are otherwise wrong.
    pub durable_lost: u64,
    /// The first such block.
    pub first: Option<Mismatch>,
}

/// Writes to random blocks, some with FUA, and flushes meanwhile.
pub struct FlushedLoad {
    random: Rng,
    /// Acknowledged writes.
    acknowledged: History,
    /// Writes that were acknowledged before a flush that was answered, or with FUA.
    durable: History,
    atomicity: Atomicity,
    /// Acknowledged since the flush in flight was sent, or since the last.
    unflushed: Vec<(u64, u32)>,
    /// Acknowledged before the flush in flight.
    flushing: Vec<(u64, u32)>,
    pending: Vec<Option<Pending>>,
    pub writes: u64,
    pub flushes: u64,
}

impl FlushedLoad {
    /// A load on a new disk. `atomicity` says what an unanswered write may leave.
    pub fn new(seed: u64, atomicity: Atomicity) -> FlushedLoad {
        FlushedLoad {
            random: Rng::with_seed(seed),
            acknowledged: new_history(seed),
            durable: new_history(seed),
            atomicity,
            unflushed: Vec::new(),
            flushing: Vec::new(),
            pending: vec![None; DEPTH as usize],
            writes: 0,
            flushes: 0,
        }
    }

    /// Writes until the connection breaks.
    ///
    /// # Panics
    /// A request fails although the connection stands.
    pub fn run(&mut self, uri: &Uri) {
        let options = Options { depth: DEPTH + 1, ..Options::default() };
        let mut connection = Connection::open(uri, &options).unwrap();
        let mut next_flush = Nanos::now() + BETWEEN_FLUSHES;
        let mut flush_under_way = false;
        let mut done = Vec::new();
        while self.turn(&mut connection, &mut done).is_ok() {
            for Done { slot, errno } in done.drain(..) {
                assert_eq!(errno, 0, "a request failed");
                if slot == FLUSH {
                    flush_under_way = false;
                    self.flushed();
                } else {
                    self.answered(slot);
                }
            }
            if !flush_under_way && Nanos::now() >= next_flush {
                flush_under_way = true;
                next_flush = Nanos::now() + BETWEEN_FLUSHES;
                self.flushing = std::mem::take(&mut self.unflushed);
                connection.start(FLUSH, NbdCommand::Flush);
            }
        }
        // A request without an answer may have taken effect or not.
        self.pending.fill(None);
        self.unflushed.clear();
        self.flushing.clear();
    }

    /// Starts writes in all free slots and waits for answers.
    fn turn(&mut self, connection: &mut Connection, done: &mut Vec<Done>) -> Result<(), NbdError> {
        for slot in 0..DEPTH {
            if self.pending[slot as usize].is_some() {
                continue;
            }
            let block = self.random.u64(..self.durable.layout().blocks());
            if self.pending.iter().flatten().any(|pending| pending.block == block) {
                continue;
            }
            let data = connection.buffer(slot, BLOCK);
            let version = self.acknowledged.issue(block, data);
            assert_eq!(self.durable.issue(block, data), version, "both count the same writes");
            let fua = self.random.u32(..FUA_OF) == 0;
            let (offset, flags) = (block * u64::from(BLOCK), CommandFlags { fua, ..CommandFlags::NONE });
            connection.start(slot, NbdCommand::Write { offset, length: BLOCK, flags });
            self.pending[slot as usize] = Some(Pending { block, version, fua });
        }
        connection.pump(Nanos::now() + BETWEEN_FLUSHES, done)
    }

    fn answered(&mut self, slot: u32) {
        let Pending { block, version, fua } = self.pending[slot as usize].take().unwrap();
        self.acknowledged.acknowledge(block, version);
        if fua {
            self.durable.acknowledge(block, version);
        } else {
            self.unflushed.push((block, version));
        }
        self.writes += 1;
    }

    fn flushed(&mut self) {
        for (block, version) in self.flushing.drain(..) {
            self.durable.acknowledge(block, version);
        }
        self.flushes += 1;
    }

    /// Reads all blocks and judges them. The data found must be there from then on.
    pub fn check(&mut self, uri: &Uri) -> Verdict {
        let mut client = NbdClient::connect(uri).unwrap();
        let mut verdict = Verdict::default();
        let mut data = vec![0; BLOCK as usize];
        for block in 0..self.durable.layout().blocks() {
            client.read(block * u64::from(BLOCK), &mut data).unwrap();
            let acknowledged = self.acknowledged.check(block, &data, self.atomicity);
            verdict.acknowledged_lost += u64::from(acknowledged.is_err());
            if let Err(mismatch) = self.durable.check(block, &data, self.atomicity) {
                verdict.durable_lost += 1;
                verdict.first.get_or_insert(mismatch);
            }
        }
        // Permitted losses are not reported a second time.
        self.acknowledged = self.durable.clone();
        verdict
    }
}
