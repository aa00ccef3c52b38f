//! What a reactor has in place of a ring.

use std::io;
use std::rc::Rc;

use super::{Death, ProcessId, VirtualClock, World};
use crate::clock::Nanos;
use crate::reactor::{FileOperation, Interest};

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

    /// The reactor goes, and with it the memory of what is under way: that is the end of the process.
    pub fn leave(&self) {
        self.world.end(self.process, Death::Killed);
    }

    /// Takes what has happened. Where one process is all there is, time passes while it waits; whoever drives several lets it
    /// pass himself ([`World::advance`]) and asks with a deadline in the past.
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
                Nanos::NEVER => return Err(io::Error::other("nothing will ever happen in this world")),
                next => self.world.advance(next),
            }
        }
    }
}
