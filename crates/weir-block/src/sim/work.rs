//! Threads beside a shard, for work that blocks.

use std::time::Duration;

use super::{Happening, ProcessId, Ready, State};

/// A piece of work. It must not use the world.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// The shortest and the longest time of a piece of work.
const LEAST: Duration = Duration::from_micros(50);
const MOST: Duration = Duration::from_millis(3);

/// Work that has begun.
pub(super) struct Working {
    process: ProcessId,
    /// The slot in its reactor.
    slot: usize,
    work: Work,
}

impl State {
    pub(super) fn begin_work(&mut self, process: ProcessId, slot: usize, work: Work) {
        self.started += 1;
        self.activity += 1;
        self.working.insert(self.started, Working { process, slot, work });
        let at = self.time_of(process) + self.random.between(LEAST, MOST);
        self.at(at, Happening::Work(self.started));
    }

    /// It is done now, all of it.
    pub(super) fn work(&mut self, number: usize) {
        let Some(Working { process, slot, work }) = self.working.remove(&number) else { return };
        work();
        self.tell(process, Ready { slot, result: 0, file: None });
    }

    /// The process ends: what a thread of it has begun is done or not, and no more.
    pub(super) fn leave_work(&mut self, process: ProcessId) {
        let its = |working: &Working| working.process == process;
        let first = self.working.iter().find(|(_, working)| its(working)).map(|(number, _)| *number);
        if let Some(number) = first.filter(|_| self.random.once_in(2)) {
            self.work(number);
        }
        self.working.retain(|_, working| !its(working));
    }
}
