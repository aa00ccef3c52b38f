//! The next batch for a replica. No I/O here.
//!
//! A copy that is being filled gets two streams. *Live* batches carry new records at once, as for every member of the set.
//! *Backlog* batches carry the records that the log had when the replica joined, the newest first, so that the copy is one
//! contiguous run of records at all times: it grows at both ends, and lacks only older records. The owner frees the oldest
//! records meanwhile, and need not send freed ones.

use crate::log::Log;
use crate::owner::Held;
use crate::planted::{Bug, Planted};
use crate::wire::Batch;

/// The position of a replica in both streams.
#[derive(Clone, Debug)]
pub struct Feed {
    /// The live record to be sent next.
    next: u64,
    /// The backlog is the records after the last freed one, up to this one, which is sent next.
    backlog: u64,
    /// Epoch and freed record of the last message to the replica.
    told: (u64, u64),
    /// The owner has sent that the copy is complete.
    complete: bool,
    planted: Planted,
}

/// Limits of one batch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Records.
    pub records: usize,
    /// Bytes of data, unless it is one record.
    pub bytes: usize,
}

/// A batch to be sent: its head, and which records follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// As it goes over the wire.
    pub head: Batch,
    /// Number of the first record.
    pub first: u64,
    /// Number of the last record; that before `first` when there is none.
    pub last: u64,
    /// Bytes of data.
    pub bytes: usize,
}

impl Feed {
    /// The feed of a replica that has answered a Hello with `held`; the Hello contained `told`. A complete copy continues
    /// behind its last record; any other is begun anew at the present end of the log.
    #[must_use]
    pub fn new(held: Held, log: &Log, told: (u64, u64)) -> Feed {
        let (next, backlog) =
            if held.complete { (held.last.max(log.freed()) + 1, 0) } else { (log.last() + 1, log.last()) };
        Feed { next, backlog, told, complete: false, planted: Planted::default() }
    }

    /// The same with a bug, if one is planted.
    pub(crate) fn planted(self, planted: Planted) -> Feed {
        Feed { planted, ..self }
    }

    /// The live record that is sent next: the replica cannot hold it yet.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether there was a backlog to send at the time of the last message to the replica.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        self.backlog > self.told.1
    }

    /// Whether the replica has not been sent everything.
    #[must_use]
    pub fn has_unsent(&self, log: &Log, epoch: u64) -> bool {
        self.next <= log.last()
            || self.backlog > log.freed()
            || self.told != (epoch, log.freed())
            || !self.complete
    }

    /// The next live batch. `None` when the replica has been sent everything that is new, and knows everything else.
    pub fn live(&mut self, log: &Log, epoch: u64, limits: Limits) -> Option<Run> {
        // Records freed meanwhile are in the backing; no copy needs them.
        let first = self.next.max(log.freed() + 1);
        let waits = self.complete || self.backlog > log.freed();
        if first > log.last() && self.told == (epoch, log.freed()) && waits {
            return None;
        }
        let (mut count, mut bytes) = (0, 0);
        for (_, record) in log.range(first, log.last()).take(limits.records) {
            let length = record.data_length();
            if count > 0 && bytes + length > limits.bytes {
                break;
            }
            count += 1;
            bytes += length;
        }
        self.next = first + count;
        Some(self.run(log, epoch, (first, first + count - 1), bytes))
    }

    /// The next batch of the backlog, if there is any.
    pub fn backlog(&mut self, log: &Log, epoch: u64, limits: Limits) -> Option<Run> {
        let last = self.backlog;
        if self.planted.has(Bug::SkipFreedPart)
            && self.told.1 < log.freed()
            && last < log.freed() + 4 * limits.records as u64
        {
            self.backlog = self.backlog.min(log.freed());
            return None;
        }
        let lowest = (log.freed() + 1).max((last + 1).saturating_sub(limits.records as u64));
        let (mut first, mut bytes) = (last + 1, 0);
        while first > lowest
            && let Some(record) = log.get(first - 1)
        {
            let length = record.data_length();
            if first <= last && bytes + length > limits.bytes {
                break;
            }
            first -= 1;
            bytes += length;
        }
        if first > last {
            return None;
        }
        self.backlog = first - 1;
        Some(self.run(log, epoch, (first, last), bytes))
    }

    fn run(&mut self, log: &Log, epoch: u64, (first, last): (u64, u64), bytes: usize) -> Run {
        self.told = (epoch, log.freed());
        let closed = self.backlog <= log.freed() || self.planted.has(Bug::CompleteWithGap);
        self.complete |= closed && self.next > log.last();
        let head = Batch {
            epoch: epoch.into(),
            first: first.into(),
            freed: log.freed().into(),
            count: ((last + 1 - first) as u32).into(),
            complete: u32::from(self.complete).into(),
        };
        Run { head, first, last, bytes }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;
    use crate::lineage::Lineage;
    use crate::log::{Layout, RecordKind};
    use crate::replica::{Replica, Verdict};
    use crate::wire::{Confirm, Hello, RecordHeader};

    const EPOCH: u64 = 1;
    const LOG: u64 = 3 << 20;

    #[derive(Clone, Debug)]
    enum Step {
        Append(usize),
        Free(u64),
        Live(usize),
        Backlog(usize),
        Deliver(usize),
        Rejoin,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0usize..200).prop_map(|units| Step::Append(units * 512)),
            3 => (0u64..6).prop_map(Step::Free),
            4 => (1usize..4).prop_map(Step::Live),
            4 => (1usize..4).prop_map(Step::Backlog),
            6 => (1usize..4).prop_map(Step::Deliver),
            1 => Just(Step::Rejoin),
        ]
    }

    /// A batch on its way, and the content of the owner's log when it left, if it declares the copy complete.
    struct Sent {
        head: Batch,
        headers: Vec<RecordHeader>,
        data: Vec<u8>,
        whole: Option<BTreeMap<u64, Vec<u8>>>,
    }

    struct Pair {
        owner: Log,
        feed: Feed,
        wire: VecDeque<Sent>,
        replica: Replica,
        /// The expected content of the replica: every record that has arrived and is not freed.
        held: BTreeMap<u64, Vec<u8>>,
    }

    fn records(log: &Log) -> BTreeMap<u64, Vec<u8>> {
        log.range(0, log.last()).map(|(number, record)| (number, log.data(record).to_vec())).collect()
    }

    impl Pair {
        fn new(layout: Layout) -> Pair {
            let log = |first| Log::with_layout(layout, LOG, first).expect("memory");
            let (owner, mut replica) = (log(10), Replica::new(log(1), 0));
            let feed = Pair::greet(&owner, &mut replica);
            Pair { owner, feed, wire: VecDeque::new(), replica, held: BTreeMap::new() }
        }

        fn greet(owner: &Log, replica: &mut Replica) -> Feed {
            let hello = Hello::new(EPOCH, Lineage::new(EPOCH), owner.freed(), false);
            assert_eq!(replica.hello(&hello), Ok(Verdict::Taken));
            Feed::new(replica.held(), owner, (EPOCH, owner.freed()))
        }

        fn rejoin(&mut self) {
            self.wire.clear();
            self.feed = Pair::greet(&self.owner, &mut self.replica);
            self.held = records(self.replica.log());
            assert!(self.replica.is_complete() || self.held.is_empty(), "half a copy is begun anew");
        }

        fn append(&mut self, length: usize) {
            if self.owner.has_room(length as u64, 1) {
                let data = vec![self.owner.last() as u8; length];
                let kind = if length == 0 { RecordKind::Zero } else { RecordKind::Write };
                self.owner.append(kind, 0, length.max(512) as u32, &data).expect("has_room said so");
            }
        }

        fn send(&mut self, backlog: bool, records_: usize) -> bool {
            let limits = Limits { records: records_, bytes: 100_000 };
            let run = match backlog {
                true => self.feed.backlog(&self.owner, EPOCH, limits),
                false => self.feed.live(&self.owner, EPOCH, limits),
            };
            let Some(Run { head, first, last, .. }) = run else { return false };
            let (mut headers, mut data) = (Vec::new(), Vec::new());
            for (_, record) in self.owner.range(first, last) {
                headers.push(RecordHeader::of(record));
                data.extend_from_slice(self.owner.data(record));
            }
            let everything = head.complete.get() == 1 && !self.feed.has_unsent(&self.owner, EPOCH);
            let whole = everything.then(|| records(&self.owner));
            self.wire.push_back(Sent { head, headers, data, whole });
            true
        }

        fn deliver(&mut self) {
            let Some(Sent { head, headers, data, whole }) = self.wire.pop_front() else { return };
            assert_eq!(self.replica.batch(&head, &headers, &data), Ok(Verdict::Taken), "{head:?}");
            let mut rest = &data[..];
            for (number, header) in (head.first.get()..).zip(&headers) {
                let (own, others) = rest.split_at(header.parse().expect("valid").data_length());
                self.held.insert(number, own.to_vec());
                rest = others;
            }
            self.held.retain(|number, _| *number > head.freed.get());
            assert!(records(self.replica.log()) == self.held, "not what was sent");
            let held = self.replica.held();
            assert_eq!(Confirm::new(held).held(), Ok(held));
            assert_eq!(held.freed, head.freed.get());
            let missing = (held.freed + 1..=held.last).any(|number| !self.held.contains_key(&number));
            assert_eq!(missing, held.gap > held.freed);
            if let Some(whole) = whole {
                assert!(held.complete && whole == self.held, "{held:?} is not everything");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// In any order of the two streams, and with any records freed meanwhile: the copy holds the records that have
        /// arrived, is declared complete when it is, and has room for all records of the owner.
        #[test]
        fn a_copy_is_what_has_arrived_and_complete_when_it_is_all(
            backlog in 0usize..60,
            steps in prop::collection::vec(step(), 1..300),
            flash: bool,
        ) {
            let mut pair = Pair::new(if flash { Layout::Flash } else { Layout::Memory });
            (0..backlog).for_each(|units| pair.append(units * 512));
            pair.rejoin();
            for step in steps {
                match step {
                    Step::Append(length) => pair.append(length),
                    Step::Free(count) => {
                        let to = (pair.owner.freed() + count).min(pair.owner.last());
                        pair.owner.free_to(to);
                    }
                    Step::Live(records) => drop(pair.send(false, records)),
                    Step::Backlog(records) => drop(pair.send(true, records)),
                    Step::Deliver(count) => (0..count).for_each(|_| pair.deliver()),
                    Step::Rejoin => pair.rejoin(),
                }
            }
            while pair.send(true, 3) || pair.send(false, 3) {}
            (0..pair.wire.len()).for_each(|_| pair.deliver());
            prop_assert!(pair.replica.is_complete());
            prop_assert!(records(pair.replica.log()) == records(&pair.owner));
            prop_assert!(!pair.feed.has_unsent(&pair.owner, EPOCH));
        }
    }

    #[test]
    fn the_newest_of_the_backlog_comes_first_and_new_records_beside_it() {
        let mut owner = Log::new(2 << 20, 1).expect("memory");
        let append = |owner: &mut Log| owner.append(RecordKind::Write, 0, 512, &[1; 512]).expect("room");
        for _ in 0..10 {
            append(&mut owner);
        }
        let mut feed = Feed::new(Held::default(), &owner, (EPOCH, 0));
        append(&mut owner);
        let limits = Limits { records: 4, bytes: 1 << 20 };
        let mut run = |owner: &Log, backlog: bool| {
            let run = match backlog {
                true => feed.backlog(owner, EPOCH, limits),
                false => feed.live(owner, EPOCH, limits),
            };
            run.map(|run| (run.first, run.last, run.head.complete.get()))
        };
        assert_eq!(run(&owner, true), Some((7, 10, 0)));
        assert_eq!(run(&owner, false), Some((11, 11, 0)));
        assert_eq!(run(&owner, false), None);
        assert_eq!(run(&owner, true), Some((3, 6, 0)));
        owner.free_to(1);
        assert_eq!(run(&owner, true), Some((2, 2, 1)), "what is freed need not be sent");
        assert_eq!((run(&owner, true), run(&owner, false)), (None, None));
    }

    /// The rest of the backlog is freed: a batch must still declare the copy complete.
    #[test]
    fn a_backlog_that_is_freed_ends_with_a_word() {
        let mut owner = Log::new(2 << 20, 1).expect("memory");
        for _ in 0..5 {
            owner.append(RecordKind::Zero, 0, 512, &[]).expect("room");
        }
        let mut feed = Feed::new(Held::default(), &owner, (EPOCH, 0));
        owner.free_to(5);
        let limits = Limits { records: 4, bytes: 1 << 20 };
        assert_eq!(feed.backlog(&owner, EPOCH, limits), None);
        let run = feed.live(&owner, EPOCH, limits).expect("a word");
        assert_eq!((run.first, run.last, run.head.complete.get(), run.head.as_bytes().len()), (6, 5, 1, 32));
        assert_eq!(feed.live(&owner, EPOCH, limits), None);
    }
}
