//! One opening of the disk by one process: the core with its log, and what the shell around it keeps.

use std::collections::VecDeque;

use weir_accel::checkpoint::{self, Step};
use weir_accel::feed::{Feed, Limits, Run};
use weir_accel::lineage::Lineage;
use weir_accel::owner::{Held, Owner};
use weir_accel::planted::{Bug, Planted};
use weir_accel::wire::{Hello, RecordHeader};
use weir_accel::{Configuration, Former, Layout, Log, Record, RecordKind};
use weir_block::Nanos;

use crate::world::{BLOCK, LOG, Message, PEER_DEADLINE, name};

/// Most records in one batch: few, so that many batches are under way.
const BATCH: Limits = Limits { records: 3, bytes: usize::MAX };

/// Most records in one checkpoint.
const CHECKPOINT: u64 = 6;

/// The owner's end of a connection to a replica.
pub struct Channel {
    pub node: usize,
    pub connection: usize,
    pub since: Nanos,
    /// What the Hello told.
    told: (u64, u64),
    /// What comes next; it has not joined before there is one.
    pub feed: Option<Feed>,
}

#[derive(Default)]
pub enum Destage {
    #[default]
    Idle,
    Writing {
        to: u64,
        in_flight: usize,
        failed: bool,
    },
    Flushing {
        to: u64,
    },
    BackingOff {
        until: Nanos,
    },
}

/// An answer to the guest that is due.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    /// With the write's record, 0 if it went past the log.
    Write {
        id: u64,
        sequence: u64,
    },
    Read {
        id: u64,
        block: usize,
        version: u64,
        durable: bool,
    },
}

pub struct OwnerProcess {
    pub serial: u64,
    /// A log on flash takes so many at once.
    most_records: u64,
    pub owner: Owner,
    pub log: Log,
    pub lineage: Lineage,
    /// The last record that was inherited.
    inherited: u64,
    pub channels: Vec<Channel>,
    /// Last record and number of writes that are not acknowledged.
    pub waiting: VecDeque<(u64, u64)>,
    /// Reads that have seen records which are not acknowledged.
    pub held: Vec<(u64, Answer)>,
    pub finished: Vec<Answer>,
    /// Blocks of the writes past the log that are under way.
    pub bypassing: Vec<usize>,
    pub destage: Destage,
    /// The control plane is about to move the disk.
    pub moving: bool,
    /// No checkpoint is begun while the disk is about to change hands.
    pub destage_held: bool,
    /// A checkpoint that is tried again is never smaller than it was.
    again_to: u64,
    /// The epoch and the policy that the control plane has told.
    pub told_epoch: u64,
    pub told_policy: Option<usize>,
    pub told_former: bool,
    /// When the next turn is due.
    pub wake: Nanos,
}

impl OwnerProcess {
    pub fn new(
        serial: u64,
        configuration: Configuration,
        inherited: Option<(Log, Lineage)>,
        former: Former,
        planted: Planted,
        (layout, most_records): (Layout, u64),
    ) -> OwnerProcess {
        let epoch = configuration.epoch;
        let (log, lineage) = match inherited {
            Some((log, lineage)) => {
                let last = log.last();
                (log, lineage.continued(epoch, last))
            }
            None => (Log::with_layout(layout, LOG, 1).expect("memory"), Lineage::new(epoch)),
        };
        let inherited = log.last();
        let (told_epoch, told_policy) = (configuration.epoch, configuration.wanted_replicas);
        let mut owner = Owner::new(configuration, log.freed(), log.last(), former, PEER_DEADLINE);
        if layout == Layout::Flash {
            owner = owner.on_flash();
        }
        owner.plant(planted);
        OwnerProcess {
            most_records,
            serial,
            owner,
            log,
            lineage,
            inherited,
            channels: Vec::new(),
            waiting: VecDeque::new(),
            held: Vec::new(),
            finished: Vec::new(),
            bypassing: Vec::new(),
            destage: Destage::Idle,
            moving: false,
            destage_held: false,
            again_to: 0,
            told_epoch,
            told_policy,
            told_former: former == Former::Stopped,
            wake: Nanos::NEVER,
        }
    }

    /// A connection stands: the first message on it.
    pub fn connect(&mut self, node: usize, connection: usize, now: Nanos) -> Message {
        let epoch = self.owner.configuration().epoch;
        let told = (epoch, self.log.freed());
        let channel = Channel { node, connection, since: now, told, feed: None };
        self.channels.push(channel);
        let counted = self.owner.configuration().replicas.contains(&name(node));
        Message::Hello(Hello::new(epoch, self.lineage, self.log.freed(), counted))
    }

    /// The first confirmation says where to begin.
    pub fn join(&mut self, connection: usize, held: Held, planted: Planted) -> bool {
        match self.channels.iter_mut().find(|channel| channel.connection == connection) {
            Some(channel) if channel.feed.is_none() => {
                let mut feed = Feed::new(held, &self.log, channel.told);
                feed.plant(planted);
                channel.feed = Some(feed);
                true
            }
            _ => false,
        }
    }

    /// What a replica is to be sent next: of the backlog, or of what is new.
    pub fn batch(&mut self, place: usize, backlog: bool) -> Option<(usize, Message)> {
        let epoch = self.owner.configuration().epoch;
        let (channel, log) = (&mut self.channels[place], &self.log);
        let feed = channel.feed.as_mut()?;
        let run = match backlog {
            true => feed.backlog(log, epoch, BATCH),
            false => feed.live(log, epoch, BATCH),
        };
        let Run { head, first, last, .. } = run?;
        let mut headers = Vec::new();
        let mut data = Vec::new();
        for (_, record) in log.range(first, last) {
            headers.push(RecordHeader::of(record));
            data.extend_from_slice(log.data(record));
        }
        Some((channel.connection, Message::Batch(head, headers, data)))
    }

    /// Whether the record was logged by this owner.
    pub fn is_own(&self, sequence: u64) -> bool {
        sequence > self.inherited
    }

    /// Whether a replica has not been sent everything.
    pub fn has_unsent(&self) -> bool {
        let epoch = self.owner.configuration().epoch;
        let unsent = |feed: &Feed| feed.has_unsent(&self.log, epoch);
        let behind = |channel: &Channel| channel.feed.as_ref().is_some_and(unsent);
        self.channels.iter().any(behind)
    }

    /// Whether it holds as many records as it may.
    pub fn is_full(&self) -> bool {
        self.log.last() - self.log.freed() >= self.most_records
    }

    /// Logs a write; the number of its record, or `None` when the log is full.
    pub fn append(&mut self, block: usize, version: u64) -> Option<u64> {
        let mut data = [0; BLOCK];
        data[..8].copy_from_slice(&version.to_le_bytes());
        let offset = (block * BLOCK) as u64;
        (!self.is_full() && self.log.has_room(BLOCK as u64, 1)).then(|| {
            self.log.append(RecordKind::Write, offset, BLOCK as u32, &data).expect("has_room said so")
        })
    }

    /// Begins a checkpoint if there is something to destage: what to write, and up to which record.
    pub fn begin_checkpoint(&mut self, planted: Planted) -> Vec<(usize, u64)> {
        let (from, limit) = (self.owner.in_backing(), self.owner.destage_limit());
        let beside = planted.has(Bug::DestageBesideBypass);
        if self.destage_held
            || !matches!(self.destage, Destage::Idle)
            || (!self.bypassing.is_empty() && !beside)
            || limit <= from
        {
            return Vec::new();
        }
        let to = limit.min((from + CHECKPOINT).max(self.again_to).max(self.owner.checkpoint_whole()));
        self.again_to = to;
        let (steps, _) = checkpoint::plan(&self.log, from + 1, to, planted);
        let writes: Vec<_> = steps.iter().flat_map(|step| versions(&self.log, step)).collect();
        self.destage = Destage::Writing { to, in_flight: writes.len(), failed: false };
        writes
    }

    /// Moves answers that the watermarks allow to `finished`.
    pub fn acknowledge(&mut self) {
        let acknowledged = self.owner.marks().acknowledged;
        while self.waiting.front().is_some_and(|write| write.0 <= acknowledged) {
            let (sequence, id) = self.waiting.pop_front().expect("just looked at");
            self.finished.push(Answer::Write { id, sequence });
        }
        let finished = &mut self.finished;
        self.held.retain(|(sequence, answer)| {
            if *sequence <= acknowledged {
                finished.push(*answer);
            }
            *sequence > acknowledged
        });
    }

    /// When something is due without an event.
    pub fn deadline(&self) -> Nanos {
        let silent = self.channels.iter().filter(|channel| channel.feed.is_none());
        let silent = silent.map(|channel| channel.since + PEER_DEADLINE).min().unwrap_or(Nanos::NEVER);
        self.owner.deadline().min(silent)
    }
}

/// What one request to the backing puts where.
fn versions(log: &Log, step: &Step) -> Vec<(usize, u64)> {
    let Step::Write { offset, pieces } = step else { return Vec::new() };
    let mut block = *offset as usize / BLOCK;
    let mut versions = Vec::new();
    for (position, length) in pieces {
        for start in (*position..position + length).step_by(BLOCK) {
            versions.push((block, version_in(log.region().bytes(start, BLOCK))));
            block += 1;
        }
    }
    versions
}

pub fn version_in(data: &[u8]) -> u64 {
    u64::from_le_bytes(data[..8].try_into().expect("a block has more than eight bytes"))
}

pub fn block_of(record: &Record) -> usize {
    record.offset as usize / BLOCK
}

pub fn version_of(log: &Log, record: &Record) -> u64 {
    version_in(log.data(record))
}

/// The newest record of a block: number and version.
pub fn newest(log: &Log, block: usize) -> Option<(u64, u64)> {
    let (sequence, record) = newest_first(log).find(|(_, record)| block_of(record) == block)?;
    Some((sequence, version_of(log, record)))
}

/// The records, the newest first: what is looked for is mostly near the end.
pub fn newest_first(log: &Log) -> impl Iterator<Item = (u64, &Record)> {
    (log.freed() + 1..=log.last()).rev().filter_map(|sequence| Some((sequence, log.get(sequence)?)))
}
