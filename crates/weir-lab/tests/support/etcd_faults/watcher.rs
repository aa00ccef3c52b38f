//! Sees, disk by disk, when an owner served it and when its guest's writes were answered.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use weir_block::Nanos;
use weir_lab::LabNode;
use weir_load::verifying::Progress;

use super::figures::longest_gap;

/// Between two looks at the answered writes.
const LOOK: Duration = Duration::from_millis(5);

/// Between two questions to a node about a disk. Others use the processors, too.
const ASK: Duration = Duration::from_millis(100);

/// Times in order.
type Times = Arc<Mutex<Vec<Nanos>>>;

/// When a disk gave signs of life.
#[derive(Clone, Default)]
struct Signs {
    /// Writes were answered.
    answered: Times,
    /// A node said that it serves the disk.
    served: Times,
}

/// Watches until it is finished.
pub(super) struct Watcher {
    disks: Vec<(&'static str, Signs)>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// The longest gaps of all disks.
#[derive(Clone, Debug, Default)]
pub(super) struct Watched {
    /// The longest time without an owner after the quorum was back: no node said that it served the disk, and no write was answered.
    pub unowned: Duration,
    /// The longest time without an answered write after that.
    pub unanswered: Duration,
    /// The disk whose guest waited so long.
    pub unanswered_disk: &'static str,
    /// The longest time without an answered write since the fault.
    pub stall: Duration,
}

fn note(times: &Times, now: Nanos) {
    times.lock().unwrap_or_else(PoisonError::into_inner).push(now);
}

fn copy(times: &Times) -> Vec<Nanos> {
    times.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Watcher {
    pub fn start(nodes: &[LabNode], disks: &[&'static str], progress: &[Arc<Progress>]) -> Watcher {
        let ends = Arc::<AtomicBool>::default();
        let watched: Vec<_> = disks.iter().map(|disk| (*disk, Signs::default())).collect();
        let mut threads = Vec::new();
        for ((disk, signs), progress) in watched.iter().zip(progress) {
            let disk = *disk;
            let (ending, answered, progress) =
                (Arc::clone(&ends), Arc::clone(&signs.answered), Arc::clone(progress));
            threads.push(thread::spawn(move || count_answers(&progress, &answered, &ending)));
            for node in nodes {
                let (ending, served, node) = (Arc::clone(&ends), Arc::clone(&signs.served), node.clone());
                threads.push(thread::spawn(move || ask(&node, disk, &served, &ending)));
            }
        }
        Watcher { disks: watched, ends, threads }
    }

    /// Whether every disk's guest has had an answer since, and its owner has said that it serves it.
    pub fn is_served_after(&self, time: Nanos) -> bool {
        let since = |times: &Times| copy(times).last().is_some_and(|last| *last > time);
        self.disks.iter().all(|(_, signs)| since(&signs.answered) && since(&signs.served))
    }

    /// The gaps since the fault, and since the quorum was `back`.
    pub fn finish(self, fault: Nanos, back: Nanos) -> Watched {
        let end = Nanos::now();
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // A panic in it is a failure of the test.
            thread.join().unwrap();
        }
        let mut watched = Watched::default();
        for (disk, signs) in &self.disks {
            let answered = copy(&signs.answered);
            let mut alive = [copy(&signs.served), answered.clone()].concat();
            alive.sort_unstable();
            watched.unowned = watched.unowned.max(longest_gap(&alive, back, end));
            let unanswered = longest_gap(&answered, back, end);
            if unanswered > watched.unanswered {
                (watched.unanswered, watched.unanswered_disk) = (unanswered, disk);
            }
            watched.stall = watched.stall.max(longest_gap(&answered, fault, end));
        }
        watched
    }
}

fn count_answers(progress: &Progress, answered: &Times, ends: &AtomicBool) {
    let mut before = 0;
    while !ends.load(Ordering::Relaxed) {
        let now = progress.acknowledged();
        if now > before {
            note(answered, Nanos::now());
            before = now;
        }
        thread::sleep(LOOK);
    }
}

fn ask(node: &LabNode, disk: &str, served: &Times, ends: &AtomicBool) {
    let client = node.client().patience(Duration::from_millis(300));
    while !ends.load(Ordering::Relaxed) {
        // What it says now was true at some time after the question.
        let asked = Nanos::now();
        let view = client.disk(disk).ok();
        let serves = view.is_some_and(|view| {
            view.detail.is_some()
                && view.owner.as_ref() == Some(&node.name)
                && matches!(view.state.as_str(), "serving" | "degraded")
        });
        if serves {
            note(served, asked);
        }
        thread::sleep(ASK);
    }
}
