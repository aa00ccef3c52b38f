//! The check of Gibbons and Korach for registers whose writes all carry different values.
//!
//! A write and the reads of its value are a *cluster*. From the earliest answer in it on, the value has certainly been there
//! (`there`); until its latest operation was sent, it was certainly still to be read (`needed`).
//!
//! - `there < needed`: the value must have stayed from the one to the other (a *forward zone*);
//! - otherwise all of the cluster can happen in one moment, any one from `needed` to `there` (a *backward zone*).
//!
//! A register's history is linearizable exactly when no read ends before the write of its value begins, no two forward zones
//! overlap, and no backward zone lies inside a forward one. A write without an answer needs no rule of its own. If its value
//! is not read, its zone never ends; if it is read, the answer of the read shows that the write has taken effect.

use std::collections::HashMap;

use weir_block::Nanos;

use super::{Action, FOREIGN, INITIAL, Operation};

/// Violations that are kept for the report, one of each sector (the others there mostly follow from it); all are counted.
const MOST_TOLD: usize = 4;

/// The result of the check.
#[derive(Clone, Debug, Default)]
pub struct Judgement {
    /// Operations, those without an answer among them.
    pub operations: u64,
    /// Sectors.
    pub registers: u64,
    /// Writes without an answer.
    pub unknown: u64,
    /// Reads of a value that was certainly overwritten before they began.
    pub stale: u64,
    /// Violations.
    pub violations: u64,
    /// The first of some sectors.
    pub first: Vec<Violation>,
    /// One of the present sector is kept.
    told: bool,
}

/// Why a history is not linearizable. Its text tells the operations that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two writes of one value: the record is wrong, and nothing can be said.
    WrittenTwice([Operation; 2]),
    /// A read of a value that no client has written.
    NeverWritten(Operation),
    /// A read that ended before the write of its value began.
    ReadBeforeWritten {
        /// The read.
        read: Operation,
        /// The write.
        write: Operation,
    },
    /// Each of two values has to be there while the other one is.
    BothNeeded([Witness; 2]),
    /// A value has to be written and read while another one has to stay.
    Between {
        /// The value that has to stay.
        stays: Witness,
        /// The one that comes and goes.
        comes: Witness,
    },
}

/// The known times of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    /// The value.
    pub value: u64,
    /// Its earliest answer: since then it has certainly been there. `None` for the beginning of the history, or for never.
    pub there: Option<Operation>,
    /// The operation with this value that was sent last. `None` if no client has read the initial content.
    pub needed: Option<Operation>,
}

/// A write and the reads of its value.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    write: Option<Operation>,
    /// Earliest answer.
    there: Nanos,
    /// Latest sending.
    needed: Nanos,
    witness: Witness,
}

impl Cluster {
    /// The initial content, as if written before time.
    fn initial() -> Cluster {
        let witness = Witness { value: INITIAL, there: None, needed: None };
        Cluster { write: None, there: Nanos(0), needed: Nanos(0), witness }
    }

    fn of(write: &Operation) -> Cluster {
        let witness = Witness { value: write.value, there: None, needed: None };
        let mut cluster = Cluster { write: Some(*write), there: Nanos::NEVER, needed: Nanos(0), witness };
        cluster.add(write);
        cluster
    }

    fn add(&mut self, operation: &Operation) {
        if let Some(completed) = operation.completed
            && completed < self.there
        {
            (self.there, self.witness.there) = (completed, Some(*operation));
        }
        if operation.invoked > self.needed {
            (self.needed, self.witness.needed) = (operation.invoked, Some(*operation));
        }
    }

    fn is_forward(&self) -> bool {
        self.there < self.needed
    }

    fn written_from(&self) -> Nanos {
        self.write.map_or(Nanos(0), |write| write.invoked)
    }
}

pub(super) fn judge(operations: &[Operation]) -> Judgement {
    let mut sorted: Vec<&Operation> = operations.iter().collect();
    sorted.sort_unstable_by_key(|operation| operation.register);
    let mut judgement = Judgement::default();
    for register in sorted.chunk_by(|one, other| one.register == other.register) {
        judgement.register(register);
    }
    judgement
}

impl Judgement {
    /// Whether the history is linearizable.
    #[must_use]
    pub fn is_linearizable(&self) -> bool {
        self.violations == 0
    }

    fn tell(&mut self, violation: Violation) {
        self.violations += 1;
        if !std::mem::replace(&mut self.told, true) && self.first.len() < MOST_TOLD {
            self.first.push(violation);
        }
    }

    /// Judges one sector.
    fn register(&mut self, operations: &[&Operation]) {
        self.told = false;
        self.registers += 1;
        self.operations += operations.len() as u64;
        let clusters = self.clusters(operations);
        self.check_zones(clusters.values());
        self.count_stale(operations, &clusters);
    }

    fn clusters(&mut self, operations: &[&Operation]) -> HashMap<u64, Cluster> {
        let mut clusters = HashMap::from([(INITIAL, Cluster::initial())]);
        for write in operations.iter().filter(|operation| operation.action == Action::Write) {
            self.unknown += u64::from(write.completed.is_none());
            let former = clusters.insert(write.value, Cluster::of(write)).and_then(|former| former.write);
            match former {
                Some(former) => self.tell(Violation::WrittenTwice([former, **write])),
                None if [INITIAL, FOREIGN].contains(&write.value) => {
                    self.tell(Violation::WrittenTwice([**write; 2]));
                }
                None => {}
            }
        }
        for read in operations.iter().filter(|operation| operation.action == Action::Read) {
            let Some(completed) = read.completed else { continue };
            match clusters.get_mut(&read.value) {
                None => self.tell(Violation::NeverWritten(**read)),
                Some(Cluster { write: Some(write), .. }) if completed < write.invoked => {
                    let write = *write;
                    self.tell(Violation::ReadBeforeWritten { read: **read, write });
                }
                Some(cluster) => cluster.add(read),
            }
        }
        clusters
    }

    fn check_zones<'a>(&mut self, clusters: impl Iterator<Item = &'a Cluster>) {
        let (mut forward, backward): (Vec<&Cluster>, Vec<&Cluster>) =
            clusters.partition(|cluster| cluster.is_forward());
        forward.sort_unstable_by_key(|cluster| (cluster.there, cluster.needed));
        // By position: the zone that reaches furthest among those up to there.
        let mut furthest: Vec<&Cluster> = Vec::with_capacity(forward.len());
        for cluster in &forward {
            let before = furthest.last().copied();
            if let Some(before) = before.filter(|before| cluster.there < before.needed) {
                self.tell(Violation::BothNeeded([before.witness, cluster.witness]));
            }
            let reaches = before.filter(|before| before.needed > cluster.needed);
            furthest.push(reaches.unwrap_or(cluster));
        }
        for cluster in backward {
            let before = forward.partition_point(|zone| zone.there < cluster.needed);
            let around = before.checked_sub(1).map(|last| furthest[last]);
            if let Some(around) = around.filter(|around| cluster.there < around.needed) {
                self.tell(Violation::Between { stays: around.witness, comes: cluster.witness });
            }
        }
    }

    /// Counts reads that began when a later value had certainly been there, whose write had begun when theirs was there already.
    fn count_stale(&mut self, operations: &[&Operation], clusters: &HashMap<u64, Cluster>) {
        let mut later: Vec<(Nanos, Nanos)> =
            clusters.values().map(|cluster| (cluster.written_from(), cluster.there)).collect();
        later.sort_unstable();
        // By position: the earliest moment at which one of the values from there on was there.
        let mut earliest = Nanos::NEVER;
        for (_, there) in later.iter_mut().rev() {
            earliest = earliest.min(*there);
            *there = earliest;
        }
        for read in operations {
            let answered = read.action == Action::Read && read.completed.is_some();
            let Some(cluster) = clusters.get(&read.value).filter(|_| answered) else { continue };
            let first = later.partition_point(|(from, _)| *from <= cluster.there);
            self.stale += u64::from(later.get(first).is_some_and(|(_, there)| *there < read.invoked));
        }
    }
}

impl Violation {
    /// The sector.
    #[must_use]
    pub fn register(&self) -> u64 {
        let of = |witness: &Witness| witness.there.or(witness.needed).map(|operation| operation.register);
        match self {
            Violation::WrittenTwice([one, _]) => one.register,
            Violation::NeverWritten(read) | Violation::ReadBeforeWritten { read, .. } => read.register,
            // The initial content may have no operation; the other value has one.
            Violation::BothNeeded([one, other]) | Violation::Between { stays: one, comes: other } => {
                of(one).or(of(other)).unwrap_or_default()
            }
        }
    }
}
