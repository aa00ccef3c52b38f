//! The simulated engine of a reactor.

use std::io;
use std::rc::Rc;

use super::{Death, ProcessId, VirtualClock, World};
use crate::clock::Nanos;
use crate::operation::{FileOperation, Interest};

pub(crate) struct Engine {
    world: World,
    process: ProcessId,
    clock: Rc<VirtualClock>,
}

impl Engine {
    pub fn new(world: &World, process: ProcessId, clock: Rc<VirtualClock>) -> Engine {
        Engine { world: world.clone(), process, clock }
    }

    pub fn watch(&mut self, slot: usize, end: i32, interest: Interest) {
        self.world.lock().watch(end as usize, interest, slot);
    }

    pub fn unwatch(&mut self, slot: usize, end: i32, interest: Interest) {
        self.world.lock().unwatch(self.process, end as usize, interest, slot);
    }

    pub fn start(&mut self, slot: usize, operation: &FileOperation) {
        self.world.lock().start(self.process, slot, operation);
    }

    pub fn work(&mut self, slot: usize, work: super::Work) {
        self.world.lock().begin_work(self.process, slot, work);
    }

    /// The reactor is dropped and with it the memory of operations in flight: the process ends.
    pub fn leave(&self) {
        self.world.end(self.process, Death::Killed);
    }

    /// Collects completions and fired watches. With a single process, time passes while it waits; a driver of several processes
    /// advances time itself ([`World::advance`]) and calls with a deadline in the past.
    pub fn wait(&mut self, deadline: Nanos, woken: bool, finished: &mut Vec<(usize, i32)>) -> io::Result<()> {
        self.world.advance(Nanos(self.world.now().0.max(self.clock.busy_until().0)));
        let until = self.clock.when(deadline);
        loop {
            let mut state = self.world.lock();
            let ready = state.processes[self.process.0].ready.drain(..);
            finished.extend(ready.map(|ready| (ready.slot, ready.result)));
            drop(state);
            if !finished.is_empty() || woken || until <= self.world.now() {
                return Ok(());
            }
            match self.world.next().min(until) {
                Nanos::NEVER => return Err(io::Error::other("no event is scheduled in this world")),
                next => self.world.advance(next),
            }
        }
    }
}
