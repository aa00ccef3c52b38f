//! The differences between the wall clocks of the nodes ([`crate::clock_check`] reads and reports them). Certificates, tokens and quarantines end by the wall clock, and events are read by it.
//! Nothing that P1–P12 rest on does: rights count by monotonic clocks.
//!
//! Each node writes its clock once a minute under its lease, and takes everybody's time when it arrives, its own as well: a registry
//! that is slow for all makes all clocks look equally slow. A single record that is late makes its writer's clock look slow; so of the
//! last few comparisons the one with the fastest clock counts. A node whose clock differs from the median says so itself: it is the
//! one to be set.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::placement::Live;
use weir_cluster::records::ClockRecord;
use weir_cluster::view::Records;
use weir_identity::span;

/// Pause between two writes of a clock.
pub const WRITE: Duration = Duration::from_secs(60);

/// Comparisons of one clock that count.
const COMPARISONS: usize = 3;

/// Difference, in milliseconds, that is reported: above the delays of a registry on a slow disk, and below the five minutes that a
/// join allows.
const LIMIT: u64 = 30_000;

/// Clocks agree again below this difference: a clock that drifts along the limit is one event and not one a minute.
pub const AGREES: u64 = LIMIT / 2;

/// The differences between this node's clock and those of the nodes that write theirs.
#[derive(Debug, Default)]
pub struct Clocks(Mutex<BTreeMap<String, Compared>>);

#[derive(Debug)]
struct Compared {
    /// The last time that the node wrote.
    written: u64,
    /// When the last comparison was made.
    at: Nanos,
    /// The milliseconds by which its records were ahead of this node's clock when they arrived; the last one first. The record that is
    /// seen first is none: it may have been written long before.
    ahead: VecDeque<i64>,
}

impl Compared {
    fn note(&mut self, written: u64, ahead: i64, at: Nanos) {
        self.written = written;
        match self.ahead.front_mut() {
            // Several that come at once were late.
            Some(last) if at < self.at + WRITE / 2 => *last = (*last).max(ahead),
            _ => {
                self.ahead.truncate(COMPARISONS - 1);
                self.ahead.push_front(ahead);
            }
        }
        self.at = at;
    }
}

impl Clocks {
    /// The records have arrived at `now`, in milliseconds since 1970. Only those of live nodes count.
    pub fn read(&self, records: &Records<ClockRecord>, live: &Live, now: u64) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|name, _| records.contains_key(name) && live.contains_key(name));
        for (name, ClockRecord { unix_ms }) in records.iter().filter(|(name, _)| live.contains_key(*name)) {
            match all.get_mut(name) {
                Some(known) if known.written == *unix_ms => {}
                Some(known) => known.note(*unix_ms, millis_ahead(*unix_ms, now), Nanos::now()),
                None => {
                    let first = Compared { written: *unix_ms, at: Nanos(0), ahead: VecDeque::new() };
                    all.insert(name.clone(), first);
                }
            }
        }
    }

    /// The last time that a node wrote, as far as it was read.
    #[cfg(test)]
    pub fn written(&self, node: &str) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(node).map(|known| known.written)
    }

    /// The milliseconds by which each node's clock is ahead of the cluster's. The cluster's is the median; of two nodes, it is that of
    /// this node, `own`. Empty while a node's clock has not been compared, because the median could be that of the wrong ones.
    #[must_use]
    pub fn ahead(&self, own: &str) -> BTreeMap<String, i64> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fastest = all.iter().map(|(name, known)| Some((name.clone(), *known.ahead.iter().max()?)));
        let Some(mut ahead) = fastest.collect::<Option<BTreeMap<String, i64>>>() else {
            return BTreeMap::new();
        };
        let reference = match (ahead.len(), ahead.get(own)) {
            (0 | 1, _) | (_, None) => return BTreeMap::new(),
            (2, Some(own)) => *own,
            (_, Some(_)) => median(&ahead),
        };
        ahead.values_mut().for_each(|ahead| *ahead = ahead.saturating_sub(reference));
        ahead
    }

    /// The node whose clock this node is to complain of, the difference, and from whose it differs. `None`: not known yet.
    #[must_use]
    pub fn own_difference(&self, own: &str) -> Option<(String, i64, String)> {
        let ahead = self.ahead(own);
        match ahead.len() {
            2 => {
                let (name, ahead) = ahead.into_iter().find(|(name, _)| name != own)?;
                Some((name, ahead, own.to_owned()))
            }
            _ => Some((own.to_owned(), *ahead.get(own)?, "the other nodes".to_owned())),
        }
    }
}

/// Of an even number, the middle of the two: if one half is wrong, both halves differ from it.
fn median(ahead: &BTreeMap<String, i64>) -> i64 {
    let mut sorted: Vec<i64> = ahead.values().copied().collect();
    sorted.sort_unstable();
    let (lower, upper) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    lower.midpoint(upper)
}

/// In words, if it is more than the limit: the clock of `node` is `ahead` milliseconds ahead of that of `others`.
#[must_use]
pub fn fault(node: &str, ahead: i64, others: &str) -> Option<String> {
    let (by, way) = (ahead.unsigned_abs(), if ahead > 0 { "ahead of" } else { "behind" });
    (by > LIMIT).then(|| {
        let by = span(by / 1_000);
        format!(
            "the clock of node {node} is about {by} {way} that of {others}; set the clocks (chronyc tracking, timedatectl)"
        )
    })
}

fn millis_ahead(theirs: u64, ours: u64) -> i64 {
    i64::try_from(theirs).unwrap_or(i64::MAX).saturating_sub(i64::try_from(ours).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000;

    fn known(all: &[(&str, &[i64])]) -> Clocks {
        let compared =
            |ahead: &[i64]| Compared { written: 1, at: Nanos(0), ahead: ahead.iter().copied().collect() };
        Clocks(Mutex::new(all.iter().map(|(name, ahead)| ((*name).to_owned(), compared(ahead))).collect()))
    }

    fn said(all: &[(&str, &[i64])]) -> Option<String> {
        let (name, ahead, others) = known(all).own_difference("a")?;
        fault(&name, ahead, &others)
    }

    #[test]
    fn the_node_whose_clock_differs_is_named_and_no_other() {
        let slow = said(&[("a", &[-20]), ("b", &[HOUR]), ("c", &[HOUR - 300])]).unwrap();
        assert!(slow.contains("node a is about 59 min 59 s behind that of the other nodes"), "{slow}");
        let other = [("a", &[-40][..]), ("b", &[-20]), ("c", &[HOUR, HOUR - 5_000])];
        assert_eq!(said(&other), None);
        assert_eq!(known(&other).ahead("a")["c"], HOUR + 20);
        let two = said(&[("a", &[0]), ("b", &[-HOUR])]).unwrap();
        assert!(two.contains("node b is about 1 h behind that of a"), "{two}");
        let half = said(&[("a", &[0]), ("b", &[0]), ("c", &[HOUR]), ("d", &[HOUR])]).unwrap();
        assert!(half.contains("node a is about 30 min behind"), "{half}");
    }

    #[test]
    fn nobody_is_blamed_on_half_the_facts() {
        assert_eq!(said(&[("a", &[0])]), None);
        assert!(known(&[("a", &[0])]).own_difference("a").is_none(), "it does not agree with anybody either");
        assert_eq!(said(&[("a", &[0]), ("b", &[HOUR]), ("c", &[HOUR]), ("d", &[]), ("e", &[])]), None);
        let late = [("a", &[-50_000][..]), ("b", &[-49_000]), ("c", &[-51_000])];
        assert_eq!(said(&late), None, "the registry is slow for all");
        assert_eq!(said(&[("a", &[0]), ("b", &[-90_000, -10, 5]), ("c", &[0])]), None, "a late record");
        assert!(said(&[("a", &[0]), ("b", &[i64::MAX]), ("c", &[i64::MIN])]).is_none());
    }

    /// A node that was cut off gets several records at once, which says nothing of their writer's clock.
    #[test]
    fn records_that_come_at_once_are_one_comparison() {
        let mut compared = Compared { written: 0, at: Nanos(0), ahead: VecDeque::new() };
        let minute = |number: u64| Nanos(number * 60_000_000_000 + 1);
        for number in 1..=3 {
            compared.note(number, 10, minute(number));
        }
        for late in [-180_000, -120_000, -60_000] {
            compared.note(9, late, minute(9));
        }
        assert_eq!(compared.ahead, [-60_000, 10, 10]);
        compared.note(10, -5, minute(10));
        assert_eq!(compared.ahead, [-5, -60_000, 10]);
    }
}
