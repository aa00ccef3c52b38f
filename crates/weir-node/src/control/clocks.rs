//! Compares the wall clocks of the nodes. Certificates, tokens and quarantines end by the wall clock, and events are read by it.
//! Nothing that P1–P12 rest on does: rights count by monotonic clocks.
//!
//! Each node writes its clock once a minute under its lease, and takes the others' times when they arrive. A record that is late
//! makes its writer's clock look slow; so of the last few comparisons the one with the fastest clock counts. A node whose clock
//! differs from the others' says so itself: it is the one to be set.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weir_cluster::records::{ClockRecord, Record, keys};
use weir_cluster::registry::Transaction;
use weir_cluster::view::{Records, View};
use weir_identity::span;

use super::Node;

/// Pause between two writes.
const WRITE: Duration = Duration::from_secs(60);

/// Pause before a registry that could not be listed is listed again.
const LIST_AGAIN: Duration = Duration::from_secs(5);

/// Comparisons of one clock that count.
const COMPARISONS: usize = 3;

/// Difference, in milliseconds, that is reported. Far above the delays of a registry on a slow disk, and below the five minutes
/// that a join allows.
const LIMIT: u64 = 30_000;

/// The differences between this node's clock and the others'.
#[derive(Debug, Default)]
pub struct Clocks(Mutex<BTreeMap<String, Compared>>);

#[derive(Debug)]
struct Compared {
    /// The last time that the node wrote.
    written: u64,
    /// The milliseconds by which its clock was ahead of this node's, the last ones.
    ahead: VecDeque<i64>,
}

impl Clocks {
    /// The nodes' records have arrived at `now`, in milliseconds since 1970. A record that is seen first may have been written long
    /// before.
    fn read(&self, own: &str, records: &Records<ClockRecord>, now: u64) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|name, _| records.contains_key(name));
        for (name, record) in records.iter().filter(|(name, _)| *name != own) {
            let ahead = millis_ahead(record.unix_ms, now);
            match all.get_mut(name) {
                Some(known) if known.written == record.unix_ms => {}
                Some(known) => {
                    known.written = record.unix_ms;
                    known.ahead.truncate(COMPARISONS - 1);
                    known.ahead.push_front(ahead);
                }
                None => {
                    let ahead = Some(ahead).filter(|ahead| *ahead > 0).into_iter().collect();
                    all.insert(name.clone(), Compared { written: record.unix_ms, ahead });
                }
            }
        }
    }

    /// The milliseconds by which each node's clock is ahead of the cluster's, as far as known. The cluster's is the median of all;
    /// of two nodes, it is this node's.
    #[must_use]
    pub fn ahead(&self, own: &str) -> BTreeMap<String, i64> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let others = all.iter().filter_map(|(name, known)| Some((name.clone(), *known.ahead.iter().max()?)));
        let mut ahead: BTreeMap<String, i64> = others.collect();
        ahead.insert(own.to_owned(), 0);
        if ahead.len() > 2 {
            let mut sorted: Vec<i64> = ahead.values().copied().collect();
            sorted.sort_unstable();
            let median = sorted[sorted.len() / 2];
            ahead.values_mut().for_each(|ahead| *ahead -= median);
        }
        ahead
    }

    /// This node's clock differs from the others', in words.
    fn own_fault(&self, own: &str) -> Option<String> {
        let ahead = self.ahead(own);
        match ahead.len() {
            2 => ahead
                .iter()
                .filter(|(name, _)| *name != own)
                .find_map(|(name, ahead)| fault(name, *ahead, own)),
            _ => fault(own, ahead[own], "the other nodes"),
        }
    }
}

/// What differs, if it is more than the limit: the clock of `node` is `ahead` milliseconds ahead of that of `others`.
#[must_use]
pub fn fault(node: &str, ahead: i64, others: &str) -> Option<String> {
    let (by, way) = (ahead.unsigned_abs(), if ahead > 0 { "ahead of" } else { "behind" });
    (by > LIMIT).then(|| {
        format!(
            "the clock of node {node} is about {} {way} that of {others}; set the clocks (chronyc tracking, timedatectl)",
            span(by / 1_000)
        )
    })
}

fn millis_ahead(theirs: u64, ours: u64) -> i64 {
    i64::try_from(theirs).unwrap_or(i64::MAX).saturating_sub(i64::try_from(ours).unwrap_or(i64::MAX))
}

/// Writes this node's clock and reads the others', for as long as the node lives.
pub async fn keep(node: Arc<Node>) {
    let clocks: View<ClockRecord> = loop {
        match View::start(Arc::clone(&node.registry), keys::CLOCKS).await {
            Ok(view) => break view,
            Err(error) => tracing::debug!(%error, "the nodes' clocks are listed again"),
        }
        weir_task::sleep(LIST_AGAIN).await;
    };
    let (mut changes, mut writes) = (clocks.changes(), weir_task::interval(WRITE));
    let own = &node.config.name;
    let mut told = false;
    loop {
        node.clocks.read(own, &changes.borrow_and_update(), weir_task::unix_millis());
        let fault = node.clocks.own_fault(own);
        if let Some(fault) = fault.as_ref().filter(|_| !told) {
            node.journal.tell("clock-differs", own, fault.clone());
        } else if fault.is_none() && told {
            node.journal.tell(
                "clock-agrees",
                own,
                format!("the clock of node {own} agrees with the others again"),
            );
        }
        told = fault.is_some();
        tokio::select! {
            biased;
            changed = changes.changed() => if changed.is_err() { return },
            _ = writes.tick() => write(&node).await,
        }
    }
}

async fn write(node: &Node) {
    let record = ClockRecord { unix_ms: weir_task::unix_millis() };
    let put =
        Transaction::new().put_leased(keys::clock(&node.config.name), record.encode(), node.session.lease());
    if let Err(error) = node.registry.transact(put.when(node.session.guard())).await {
        tracing::debug!(%error, "this node's clock is written later");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::disk::tests::{SOON, node};

    const HOUR: i64 = 3_600_000;

    fn known(all: &[(&str, &[i64])]) -> Clocks {
        let compared = |ahead: &[i64]| Compared { written: 1, ahead: ahead.iter().copied().collect() };
        let all = all.iter().map(|(name, ahead)| ((*name).to_owned(), compared(ahead)));
        Clocks(Mutex::new(all.collect()))
    }

    #[test]
    fn the_node_whose_clock_differs_is_named_and_no_other() {
        let fast = known(&[("b", &[HOUR]), ("c", &[HOUR - 300])]);
        let said = fast.own_fault("a").unwrap();
        assert!(said.contains("node a is about 59 min 59 s behind that of the other nodes"), "{said}");
        let other = known(&[("b", &[20]), ("c", &[HOUR, HOUR - 5_000])]);
        assert_eq!(other.own_fault("a"), None);
        assert_eq!(other.ahead("a")["c"], HOUR - 20);
        assert_eq!(known(&[("b", &[-29_000]), ("c", &[])]).own_fault("a"), None, "a late record");
        let two = known(&[("b", &[-HOUR])]).own_fault("a").unwrap();
        assert!(two.contains("node b is about 1 h behind that of a"), "{two}");
        assert_eq!(known(&[]).own_fault("a"), None);
    }

    /// Also where a record is found that was written before this node looked, and where one comes late.
    #[tokio::test]
    async fn a_clock_is_compared_when_its_record_arrives() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let says = async |ago: i64| {
            let unix_ms = weir_task::unix_millis().saturating_add_signed(-ago);
            let put = Transaction::new().put(keys::clock("b"), ClockRecord { unix_ms }.encode());
            node.registry.transact(put).await.unwrap();
            unix_ms
        };
        let reads = async |unix_ms: u64| {
            let all = || node.clocks.0.lock().unwrap().get("b").map(|known| known.written);
            let read = async {
                while all() != Some(unix_ms) {
                    weir_task::sleep(Duration::from_millis(5)).await;
                }
            };
            weir_task::timeout(SOON, read).await.unwrap();
            node.clocks.ahead("a").get("b").copied()
        };
        let long_ago = says(HOUR).await;
        let keeping = weir_task::spawn(keep(Arc::clone(&node)));
        assert_eq!(reads(long_ago).await, None, "it may have been written then");
        let behind = reads(says(HOUR).await).await.unwrap();
        assert!((behind + HOUR).abs() < 5_000, "{behind}");
        let right = reads(says(0).await).await.unwrap();
        assert!(right.abs() < 5_000, "one that was late counts no more: {right}");
        let ahead = reads(says(-HOUR).await).await.unwrap();
        assert!((ahead - HOUR).abs() < 5_000, "{ahead}");
        keeping.abort();
    }
}
