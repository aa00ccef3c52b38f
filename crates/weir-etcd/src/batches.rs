//! Joins the parts of a watch's answers to whole revisions.

use weir_cluster::registry::{Batch, Change};

/// Events of one stream, in the order of their arrival, as batches of whole revisions above a position.
///
/// etcd may split an answer anywhere, also within a revision, and marks all parts but the last. A revision is complete when an event
/// of a later one has come, or the last part.
pub(crate) struct Batches {
    position: u64,
    open: Option<Batch>,
}

/// An event came whose revision is below one that came before it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutOfOrder;

impl Batches {
    /// Ignores everything up to `position`.
    pub fn after(position: u64) -> Batches {
        Batches { position, open: None }
    }

    /// Takes the events of one part; `more` parts of the same answer follow. Returns the batches that are now complete.
    pub fn take(
        &mut self,
        events: impl IntoIterator<Item = (u64, Change)>,
        more: bool,
    ) -> Result<Vec<Batch>, OutOfOrder> {
        let mut complete = Vec::new();
        for (revision, change) in events {
            match &mut self.open {
                Some(open) if open.revision == revision => open.changes.push(change),
                Some(open) if open.revision > revision => return Err(OutOfOrder),
                _ if revision <= self.position => {}
                open => complete.extend(open.replace(Batch { revision, changes: vec![change] })),
            }
        }
        if !more {
            complete.extend(self.open.take());
        }
        if let Some(last) = complete.last() {
            self.position = last.revision;
        }
        Ok(complete)
    }

    /// The last revision of a complete batch.
    pub fn position(&self) -> u64 {
        self.position
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn event(revision: u64, key: usize) -> (u64, Change) {
        (revision, Change::Delete { key: key.to_string() })
    }

    /// Every way to split a list of events into two answers, or into parts of one.
    #[test]
    fn revisions_stay_whole_however_answers_are_split() {
        let revisions = [3, 3, 4, 7, 7, 7, 8, 9, 9];
        let events: Vec<_> =
            revisions.iter().enumerate().map(|(key, revision)| event(*revision, key)).collect();
        for position in [0, 3, 4, 6, 9] {
            for split in 0_u32..1 << (events.len() - 1) {
                let mut batches = Batches::after(position);
                let mut received = Vec::new();
                let mut part = Vec::new();
                for (at, one) in events.iter().enumerate() {
                    part.push(one.clone());
                    let last = at + 1 == events.len();
                    if last || split >> at & 1 == 1 {
                        received.extend(batches.take(part.drain(..), !last).unwrap());
                    }
                }
                let expected: Vec<_> =
                    events.iter().filter(|(revision, _)| *revision > position).cloned().collect();
                let flat = received
                    .iter()
                    .flat_map(|batch| batch.changes.iter().map(|change| (batch.revision, change.clone())));
                assert_eq!(flat.collect::<Vec<_>>(), expected);
                assert!(
                    received.is_sorted_by(|one, other| one.revision < other.revision),
                    "a batch for each revision"
                );
                assert_eq!(batches.position(), 9.max(position));
            }
        }
    }

    #[test]
    fn an_incomplete_revision_is_not_delivered() {
        let mut batches = Batches::after(2);
        let first = batches.take([event(3, 0), event(4, 1)], true).unwrap();
        assert_eq!((first.len(), batches.position()), (1, 3));
        // The stream ends here: the next one starts at 3 and brings all of 4.
        let again =
            Batches::after(batches.position()).take([event(3, 0), event(4, 1), event(4, 2)], false).unwrap();
        assert_eq!((again.len(), again[0].changes.len()), (1, 2));
    }

    #[test]
    fn lower_revisions_are_reported() {
        let mut batches = Batches::after(0);
        batches.take([event(5, 0)], true).unwrap();
        assert_eq!(batches.take([event(4, 1)], false), Err(OutOfOrder));
        let mut later = Batches::after(0);
        later.take([event(5, 0)], false).unwrap();
        assert_eq!(later.take([event(4, 1)], false), Ok(Vec::new()), "seen already");
    }
}
