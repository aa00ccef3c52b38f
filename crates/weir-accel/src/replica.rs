//! The replica's side of the protocol: the owner to obey, and the records held. No I/O here.

use crate::flash::frame::State;
use crate::lineage::Lineage;
use crate::log::{Log, Record, checksum};
use crate::owner::Held;
use crate::planted::{Bug, Planted};
use crate::wire::{self, Batch, Hello, RecordHeader, WireError};

/// Epochs that an owner may be ahead of the record as the replica's node knows it.
const EPOCH_LEAD: u64 = 16;

const FULL: WireError =
    WireError::Protocol("more records than the log holds; use the same log_size on all nodes");

/// A replica's answer to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Taken. A confirmation is due.
    Taken,
    /// The sender's epoch is over; this one has been seen (P2).
    Refused(u64),
}

/// One disk's replica on one node.
///
/// A copy that is being filled is one run of records: it begins at the end of the owner's log, grows at both ends, and is
/// complete when its missing older records are filled or freed ([`crate::feed`]).
pub struct Replica {
    log: Log,
    /// The last record that the owner has freed. The records between it and the oldest record here are the gap of a copy that
    /// is being filled.
    freed: u64,
    /// The highest epoch seen; everything below is refused (P2).
    epoch: u64,
    /// An empty copy is not begun for an owner below this.
    begins_at: u64,
    /// The epoch of the disk's record, as this node last read it.
    known: u64,
    lineage: Lineage,
    /// Holds every record that was live when the owner said so, and all that followed.
    complete: bool,
    /// The last record when it was said to be. On flash it is complete once everything up to here is durable.
    whole_at: u64,
    /// Taken over by this node: accepts no owner any more.
    sealed: bool,
    planted: Planted,
}

impl Replica {
    /// A replica with an empty log. `known_epoch` is that of the disk's record when it is made.
    ///
    /// An empty copy has seen no epoch, but its node may have had another one, now lost or unreadable, that the registry
    /// counts. A stale owner that filled this one would leave something that looks like it and lacks what was acknowledged
    /// since (P1, P2).
    #[must_use]
    pub fn new(log: Log, known_epoch: u64) -> Replica {
        Replica {
            freed: log.freed(),
            log,
            epoch: 0,
            begins_at: known_epoch,
            known: known_epoch,
            lineage: Lineage::default(),
            complete: false,
            whole_at: 0,
            sealed: false,
            planted: Planted::default(),
        }
    }

    /// Plants a bug, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// A copy that was read from flash.
    #[must_use]
    pub fn recovered(log: Log, state: State) -> Replica {
        let State { epoch, lineage, complete, .. } = state;
        Replica { epoch, lineage, complete, ..Replica::new(log, 0) }
    }

    /// The complete log of an owner that has handed the disk over: its successor may go on from it.
    #[must_use]
    pub fn of_former_owner(log: Log, epoch: u64, lineage: Lineage) -> Replica {
        Replica { epoch, lineage, complete: true, ..Replica::new(log, 0) }
    }

    /// The records.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The records, for the store that keeps them.
    pub fn log_mut(&mut self) -> &mut Log {
        &mut self.log
    }

    /// The highest epoch seen.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether this copy may be taken over from, provided that the registry counts this node in the set.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Refuses every owner below `epoch` from now on (P2).
    pub fn seal(&mut self, epoch: u64) {
        self.epoch = self.epoch.max(epoch);
        self.sealed = true;
    }

    /// Hands the log over to the new owner on this node, with its lineage.
    #[must_use]
    pub fn into_log(self) -> (Log, Lineage) {
        (self.log, self.lineage)
    }

    /// The disk's record is in this epoch.
    pub fn record_is_in(&mut self, epoch: u64) {
        self.known = self.known.max(epoch);
    }

    /// An owner is at most a few of its own changes ahead of the record as this node knows it; it does not get further ahead
    /// with each message. A wrong epoch, once accepted, would make this copy refuse all other owners, on flash for ever. An
    /// owner that is further ahead connects again, and this node reads the record for that.
    fn believes(&self, epoch: u64) -> Result<(), WireError> {
        let known = self.known;
        if epoch > self.epoch.max(known.saturating_add(EPOCH_LEAD)) {
            return Err(WireError::UnknownEpoch { epoch, known });
        }
        Ok(())
    }

    fn refuses(&self, epoch: u64) -> bool {
        let is_over = epoch < self.epoch || (self.sealed && epoch == self.epoch);
        is_over && !self.planted.has(Bug::IgnoreEpoch)
    }

    /// A planted bug: whoever ignores epochs does not ask either whom the record names.
    pub(crate) fn listens_to_all(&self) -> bool {
        self.planted.has(Bug::IgnoreEpoch)
    }

    /// An owner introduces itself.
    ///
    /// # Errors
    /// It says something impossible; the connection has to be closed.
    pub fn hello(&mut self, hello: &Hello) -> Result<Verdict, WireError> {
        let epoch = hello.epoch.get();
        if self.refuses(epoch) {
            return Ok(Verdict::Refused(self.epoch));
        }
        self.believes(epoch)?;
        // Not a refusal, which would end the owner: it may be the right one whose own change of the record is news to it still.
        if epoch < self.begins_at && self.epoch == 0 && !self.planted.has(Bug::IgnoreEpoch) {
            return Err(WireError::Outdated { epoch, known: self.begins_at });
        }
        let (lineage, freed) = (hello.lineage(), wire::sequence(hello.freed)?);
        let shared = lineage.shares_with(self.lineage);
        if shared.is_none() && hello.counted.get() == 1 && self.complete {
            // An owner that has restarted repeatedly since the last contact has an unknown lineage. As long as the registry
            // counts this copy it must not be discarded (P1); the owner drains its log and changes the set, then this node
            // forgets the copy.
            return Err(WireError::OtherPast);
        }
        self.epoch = self.epoch.max(epoch);
        self.sealed = false;
        if let Some(last) = shared.filter(|_| !self.planted.has(Bug::KeepUninherited)) {
            // Records that the new owner did not inherit were never acknowledged.
            self.log.truncate_to(last);
        }
        let keeps = shared.is_some() || (self.planted.has(Bug::KeepForeignLog) && self.lineage.epoch != 0);
        // An incomplete copy is not worth a second hole: the guest has gone on writing.
        if !keeps || !self.complete || self.log.last() < freed {
            self.log.reset(freed + 1);
            (self.freed, self.complete) = (freed, false);
        }
        // The backing may hold newer data than the records that the owner has freed (P4).
        self.free_to(freed);
        self.whole_at = self.whole_at.min(self.log.last());
        self.lineage = lineage;
        Ok(Verdict::Taken)
    }

    /// A run of records from the owner: new ones, or a part of the backlog.
    ///
    /// # Errors
    /// The peer breaks the protocol, or a record is corrupt (P11); the connection has to be closed.
    pub fn batch(
        &mut self,
        head: &Batch,
        headers: &[RecordHeader],
        mut data: &[u8],
    ) -> Result<Verdict, WireError> {
        if self.refuses(head.epoch.get()) {
            return Ok(Verdict::Refused(self.epoch));
        }
        self.believes(head.epoch.get())?;
        let (first, freed) = (wire::sequence(head.first)?, wire::sequence(head.freed)?);
        let last = (first + headers.len() as u64).checked_sub(1).filter(|_| first > 0);
        let last = last.ok_or(WireError::Protocol("impossible sequence number"))?;
        self.epoch = self.epoch.max(head.epoch.get());
        // Freeing comes first: it makes the room that the owner counts on.
        self.free_to(freed.min(first - 1));
        if !self.complete && self.log.is_empty() {
            // The copy begins here.
            self.log.reset(first);
        }
        if first == self.log.last() + 1 {
            for (sequence, header) in (first..).zip(headers) {
                let (record, own) = self.next_record(sequence, header, &mut data)?;
                self.log.push(record, own).ok_or(FULL)?;
            }
        } else if self.has_gap() && last == self.log.freed() {
            let mut run = Vec::with_capacity(headers.len());
            for (sequence, header) in (first..).zip(headers) {
                run.push(self.next_record(sequence, header, &mut data)?);
            }
            for (record, own) in run.into_iter().rev() {
                self.log.push_front(record, own).ok_or(FULL)?;
            }
        } else {
            return Err(WireError::Protocol("records with a gap"));
        }
        if !data.is_empty() {
            return Err(WireError::Protocol("more data than the record headers declare"));
        }
        if head.complete.get() == 1 && !self.complete {
            let believes = self.planted.has(Bug::CompleteWithGap) || self.planted.has(Bug::SkipFreedPart);
            if self.has_gap() && !believes {
                return Err(WireError::Protocol("a copy with a gap is called complete"));
            }
            (self.complete, self.whole_at) = (true, self.log.last());
        }
        Ok(Verdict::Taken)
    }

    /// The record of the next header, checked (P11), and its data, which is taken off the front of `data`.
    fn next_record<'a>(
        &self,
        sequence: u64,
        header: &RecordHeader,
        data: &mut &'a [u8],
    ) -> Result<(Record, &'a [u8]), WireError> {
        let record = header.parse()?;
        let Some((own, rest)) = data.split_at_checked(record.data_length()) else {
            return Err(WireError::Protocol("less data than the record headers declare"));
        };
        *data = rest;
        let sum = checksum(sequence, record.offset, record.length, record.kind, own);
        if sum != record.checksum && !self.planted.has(Bug::SkipChecksum) {
            return Err(WireError::Checksum(sequence));
        }
        Ok((record, own))
    }

    /// Whether records are missing that are older than those here and not freed.
    fn has_gap(&self) -> bool {
        self.log.freed() > self.freed
    }

    fn free_to(&mut self, sequence: u64) {
        self.freed = self.freed.max(sequence);
        if !self.planted.has(Bug::KeepFreed) {
            self.log.free_to(sequence);
        }
    }

    /// The copy in memory.
    #[must_use]
    pub fn held(&self) -> Held {
        let Replica { epoch, freed, complete, .. } = *self;
        let (last, gap) = (self.log.last(), if complete { freed } else { self.log.freed() });
        match self.planted.has(Bug::KeepFreed) {
            true => Held { epoch, last, freed: last, gap: last, complete },
            false => Held { epoch, last, freed, gap, complete },
        }
    }

    /// The state that a copy on flash stores beside the records, if everything up to `stored` is durable.
    #[must_use]
    pub fn state(&self, stored: u64) -> State {
        let Replica { epoch, lineage, .. } = *self;
        let freed = self.freed.min(self.log.freed());
        State { epoch, lineage, freed, complete: self.complete && stored >= self.whole_at }
    }

    /// Whether a copy on flash may be confirmed before it is durable: never.
    #[must_use]
    pub fn confirms_unstored(&self) -> bool {
        self.planted.has(Bug::ConfirmUnstored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lineage::Ancestor;
    use crate::log::RecordKind;

    fn hello(epoch: u64, lineage: u64, inherited: (u64, u64), freed: u64) -> Hello {
        let ancestor = Ancestor { lineage: inherited.0, last: inherited.1 };
        let lineage = Lineage { epoch: lineage, ancestors: [ancestor, Ancestor::default()] };
        Hello::new(epoch, lineage, freed, false)
    }

    fn batch(epoch: u64, first: u64, freed: u64, fills: &[u8]) -> (Batch, Vec<RecordHeader>, Vec<u8>) {
        let mut source = Log::new(2 << 20, first).expect("memory");
        let mut data = Vec::new();
        let mut headers = Vec::new();
        for fill in fills {
            let number = source.append(RecordKind::Write, 0, 512, &[*fill; 512]).expect("fits");
            headers.push(RecordHeader::of(source.get(number).expect("held")));
            data.extend_from_slice(&[*fill; 512]);
        }
        let head = Batch {
            epoch: epoch.into(),
            first: first.into(),
            freed: freed.into(),
            count: (fills.len() as u32).into(),
            complete: 1.into(),
        };
        (head, headers, data)
    }

    fn filled() -> Replica {
        let mut replica = Replica::new(Log::new(2 << 20, 1).expect("memory"), 5);
        assert_eq!(replica.hello(&hello(5, 5, (0, 0), 0)), Ok(Verdict::Taken));
        let (head, headers, data) = batch(5, 1, 0, &[1, 2, 3]);
        assert_eq!(replica.batch(&head, &headers, &data), Ok(Verdict::Taken));
        replica
    }

    #[test]
    fn takes_records_in_order_and_frees_late() {
        let mut replica = filled();
        assert_eq!((replica.log().last(), replica.is_complete()), (3, true));
        let (head, headers, data) = batch(5, 4, 2, &[4]);
        assert_eq!(replica.batch(&head, &headers, &data), Ok(Verdict::Taken));
        assert_eq!((replica.log().freed(), replica.log().last()), (2, 4));
        assert!(replica.batch(&head, &headers, &data).is_err(), "the same records twice");
        let (head, headers, data) = batch(5, 6, 2, &[6]);
        assert!(replica.batch(&head, &headers, &data).is_err(), "a gap");
    }

    #[test]
    fn lower_epochs_are_refused_and_a_sealed_replica_refuses_its_own() {
        let mut replica = filled();
        let (head, headers, data) = batch(4, 4, 0, &[4]);
        assert_eq!(replica.batch(&head, &headers, &data), Ok(Verdict::Refused(5)));
        replica.seal(5);
        let (head, headers, data) = batch(5, 4, 0, &[4]);
        assert_eq!(replica.batch(&head, &headers, &data), Ok(Verdict::Refused(5)));
        assert_eq!(replica.hello(&hello(5, 5, (0, 0), 0)), Ok(Verdict::Refused(5)));
        assert_eq!(replica.hello(&hello(6, 6, (5, 3), 0)), Ok(Verdict::Taken));
    }

    #[test]
    fn an_epoch_out_of_the_blue_is_not_obeyed() {
        let mut replica = filled();
        let far = Err(WireError::UnknownEpoch { epoch: u64::MAX, known: 5 });
        assert_eq!(replica.hello(&hello(u64::MAX, 5, (0, 0), 0)), far);
        let (head, headers, data) = batch(5 + EPOCH_LEAD + 1, 4, 0, &[4]);
        assert!(replica.batch(&head, &headers, &data).is_err());
        assert_eq!((replica.epoch(), replica.log().last()), (5, 3));
        replica.record_is_in(90);
        assert_eq!(replica.hello(&hello(92, 92, (5, 3), 0)), Ok(Verdict::Taken));
    }

    /// Only the record justifies a higher epoch; an owner's earlier messages do not.
    #[test]
    fn an_epoch_that_creeps_up_is_not_obeyed_beyond_what_the_record_allows() {
        let mut replica = filled();
        let mut creep = |most: u64| {
            let mut epoch = replica.epoch();
            for _ in 0..100 {
                let next = epoch + EPOCH_LEAD;
                let (head, headers, data) = batch(next, 4, 0, &[]);
                for taken in
                    [replica.batch(&head, &headers, &data), replica.hello(&hello(next, 5, (0, 0), 0))]
                {
                    let expected = if next <= most {
                        Ok(Verdict::Taken)
                    } else {
                        Err(WireError::UnknownEpoch { epoch: next, known: most - EPOCH_LEAD })
                    };
                    assert_eq!(taken, expected);
                }
                epoch = next;
            }
            assert_eq!(replica.epoch(), most);
            replica.record_is_in(most);
        };
        creep(5 + EPOCH_LEAD);
        creep(5 + 2 * EPOCH_LEAD);
    }

    #[test]
    fn an_empty_copy_is_not_begun_for_an_owner_that_is_over() {
        let mut replica = Replica::new(Log::new(2 << 20, 1).expect("memory"), 7);
        let outdated = Err(WireError::Outdated { epoch: 6, known: 7 });
        assert_eq!(replica.hello(&hello(6, 6, (0, 0), 0)), outdated);
        assert_eq!((replica.epoch(), replica.is_complete()), (0, false));
        assert_eq!(replica.hello(&hello(7, 7, (0, 0), 0)), Ok(Verdict::Taken));
    }

    #[test]
    fn a_new_owner_cuts_off_what_it_did_not_inherit_and_keeps_the_rest() {
        let mut replica = filled();
        assert_eq!(replica.hello(&hello(6, 6, (5, 2), 0)), Ok(Verdict::Taken));
        assert_eq!((replica.log().last(), replica.is_complete()), (2, true));
        assert_eq!(
            replica.hello(&hello(7, 7, (0, 0), 9)),
            Ok(Verdict::Taken),
            "an unknown past: everything anew"
        );
        assert_eq!((replica.log().last(), replica.is_complete()), (9, false));
    }

    #[test]
    fn a_complete_copy_found_on_flash_is_not_thrown_away_for_a_stranger() {
        let mut replica = filled();
        let state = replica.state(3);
        assert!(!replica.state(2).complete, "not all that it was filled with is durable");
        let (log, _) = std::mem::replace(&mut replica, filled()).into_log();
        let mut found = Replica::recovered(log, state);
        let counted = Hello { counted: 1.into(), ..hello(9, 9, (8, 20), 2) };
        assert_eq!(found.hello(&counted), Err(WireError::OtherPast));
        assert_eq!((found.epoch(), found.log().last(), found.is_complete()), (5, 3, true));
        assert_eq!(found.hello(&hello(9, 9, (5, 3), 0)), Ok(Verdict::Taken), "one that it knows");
    }

    #[test]
    fn corrupt_records_are_not_taken() {
        let mut replica = filled();
        let (head, headers, mut data) = batch(5, 4, 0, &[4]);
        data[100] ^= 1;
        assert_eq!(replica.batch(&head, &headers, &data), Err(WireError::Checksum(4)));
        assert_eq!(replica.log().last(), 3);
    }

    /// A member of the set that the last owner but one had greeted and the last one had not.
    #[test]
    fn an_owner_that_greeted_not_everybody_does_not_cost_a_copy() {
        let mut replica = filled();
        let own = Lineage::new(5);
        let next = own.continued(6, 2).continued(7, 9);
        assert_eq!(replica.hello(&Hello::new(7, next, 1, false)), Ok(Verdict::Taken));
        assert_eq!((replica.log().last(), replica.is_complete()), (2, true));
        let mut replica = filled();
        assert_eq!(replica.hello(&Hello::new(8, next.continued(8, 9), 1, false)), Ok(Verdict::Taken));
        assert!(!replica.is_complete(), "more than two generations: everything anew");
    }
}
