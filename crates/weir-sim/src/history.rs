//! Checks that a block's history is linearizable as a register (P7).
//!
//! Every write has a unique value, so no search is necessary: the operations on one value form a cluster, and a history is
//! linearizable if and only if the clusters' zones do not contradict each other (Gibbons and Korach, "Testing shared memories",
//! SIAM J. Comput. 1997).

/// End time of an unfinished operation.
const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Operation {
    value: u64,
    is_write: bool,
    start: u64,
    end: u64,
}

/// Guests' operations on one block. Times are indices in the order of all events, so no two are equal.
#[derive(Clone, Debug, Default)]
pub struct History {
    operations: Vec<Operation>,
}

/// All operations on one value.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    value: u64,
    first_end: u64,
    last_start: u64,
    written: Option<u64>,
    first_read: u64,
}

impl History {
    /// A write of a unique value; 0 is the block's initial value.
    pub fn write(&mut self, value: u64, start: u64) {
        self.operations.push(Operation { value, is_write: true, start, end: NEVER });
    }

    /// Records an acknowledgement.
    pub fn acknowledged(&mut self, value: u64, end: u64) {
        let mut newest_first = self.operations.iter_mut().rev();
        if let Some(write) = newest_first.find(|operation| operation.is_write && operation.value == value) {
            write.end = write.end.min(end);
        }
    }

    /// A completed read.
    pub fn read(&mut self, value: u64, start: u64, end: u64) {
        self.operations.push(Operation { value, is_write: false, start, end });
    }

    /// Whether the write of this value was acknowledged.
    pub fn is_acknowledged(&self, value: u64) -> bool {
        let writes =
            self.operations.iter().filter(|operation| operation.is_write && operation.value == value);
        writes.map(|write| write.end).min().is_some_and(|end| end != NEVER)
    }

    /// A power cut lost an unacknowledged value: drops reads of it, because it was never promised.
    pub fn forget_reads(&mut self, value: u64) {
        self.operations.retain(|operation| operation.is_write || operation.value != value);
    }

    /// Number of reads.
    pub fn reads(&self) -> u64 {
        self.operations.iter().filter(|operation| !operation.is_write).count() as u64
    }

    /// The reason why no order of these operations is valid for a register, if none is.
    pub fn contradiction(&self) -> Option<String> {
        let clusters = self.clusters();
        for cluster in &clusters {
            match cluster.written {
                None => return Some(format!("version {} was read and never written", cluster.value)),
                Some(start) if cluster.first_read < start => {
                    return Some(format!("version {} was read before it was written", cluster.value));
                }
                Some(_) => {}
            }
        }
        // A value's zone is forward if one operation on it ended before another began: it was current in between.
        let (mut forward, backward): (Vec<Cluster>, Vec<Cluster>) =
            clusters.into_iter().partition(|cluster| cluster.first_end < cluster.last_start);
        forward.sort_unstable_by_key(|cluster| cluster.first_end);
        for pair in forward.windows(2) {
            if pair[1].first_end < pair[0].last_start {
                let (one, other) = (pair[0].value, pair[1].value);
                return Some(format!(
                    "versions {one} and {other} were each current before and after the other"
                ));
            }
        }
        for cluster in backward {
            // The only forward zone that could contain it is the last that begins before it.
            let index = forward.partition_point(|zone| zone.first_end < cluster.last_start);
            if let Some(zone) = index.checked_sub(1).map(|index| forward[index])
                && cluster.first_end < zone.last_start
            {
                return Some(format!(
                    "version {} occurred while version {} was current before and after",
                    cluster.value, zone.value
                ));
            }
        }
        None
    }

    fn clusters(&self) -> Vec<Cluster> {
        let mut operations = self.operations.clone();
        operations.push(Operation { value: 0, is_write: true, start: 0, end: 0 });
        operations.sort_unstable_by_key(|operation| operation.value);
        let groups = operations.chunk_by(|one, other| one.value == other.value);
        // An unacknowledged write that no read saw may never have happened.
        let groups = groups.filter(|group| group.len() > 1 || group[0].end != NEVER);
        groups.map(cluster).collect()
    }
}

fn cluster(group: &[Operation]) -> Cluster {
    let reads = group.iter().filter(|operation| !operation.is_write);
    Cluster {
        value: group[0].value,
        first_end: group.iter().map(|operation| operation.end).min().unwrap_or(NEVER),
        last_start: group.iter().map(|operation| operation.start).max().unwrap_or(0),
        written: group.iter().find(|operation| operation.is_write).map(|write| write.start),
        first_read: reads.map(|read| read.end).min().unwrap_or(NEVER),
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    /// The oracle: tries every order.
    fn some_order(done: u64, current: u64, operations: &[Operation]) -> bool {
        let left = |index: &usize| done & (1 << index) == 0;
        let must = (0..operations.len()).filter(left).filter(|index| operations[*index].end != NEVER);
        let Some(first_end) = must.map(|index| operations[index].end).min() else { return true };
        (0..operations.len()).filter(left).any(|index| {
            let next = operations[index];
            let fits = next.is_write || next.value == current;
            let value = if next.is_write { next.value } else { current };
            next.start <= first_end && fits && some_order(done | 1 << index, value, operations)
        })
    }

    /// A register that sometimes returns a wrong value.
    fn random(rng: &mut Rng) -> History {
        let mut history = History::default();
        let (mut times, count) = ((1..=16u64).collect::<Vec<_>>(), rng.u64(1..8));
        rng.shuffle(&mut times);
        let writes = rng.u64(1..=count);
        for number in 1..=count {
            let (one, other) = (times.pop().unwrap(), times.pop().unwrap());
            let (start, end) = (one.min(other), one.max(other));
            if number <= writes {
                history.write(number, start);
                if rng.u8(..5) > 0 {
                    history.acknowledged(number, end);
                }
            } else {
                history.read(rng.u64(..=writes), start, end);
            }
        }
        history
    }

    #[test]
    fn agrees_with_trying_every_order() {
        let mut rng = Rng::with_seed(1);
        let mut verdicts = [0u32; 2];
        for round in 0..20_000 {
            let history = random(&mut rng);
            let expected = some_order(0, 0, &history.operations);
            let found = history.contradiction();
            assert_eq!(found.is_none(), expected, "round {round}: {found:?} {history:?}");
            verdicts[usize::from(expected)] += 1;
        }
        assert!(verdicts.iter().all(|count| *count > 2_000), "both kinds occur: {verdicts:?}");
    }
}
