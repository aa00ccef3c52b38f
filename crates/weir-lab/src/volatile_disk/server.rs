//! The disk: its power, its requests, and faults of its cache.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use fuser::{Errno, ReplyData, ReplyEmpty, ReplyWrite};

use super::store::{Store, Survivors, Toll};
use crate::one_file::FileServer;

/// The duration of a flush. An instant flush would hardly ever be in flight when the power fails.
const FLUSH_TIME: Duration = Duration::from_micros(300);

/// The disk's supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Power {
    /// There.
    On,
    /// Gone this moment: the disk neither executes nor answers requests. They wait, because their processes must be gone
    /// before they could learn of it.
    Failing,
    /// Gone: requests fail.
    Off,
}

/// A request without an answer.
enum Waiting {
    Read(ReplyData),
    Write(ReplyWrite),
    Flush(ReplyEmpty),
}

/// Writes that take long while others pass.
struct Held {
    /// Those of nothing but this.
    byte: u8,
    writes: Vec<(u64, Vec<u8>, ReplyWrite)>,
}

struct State {
    power: Power,
    store: Store,
    waiting: Vec<Waiting>,
    held: Option<Held>,
    flushes: u64,
    lies: bool,
}

impl State {
    fn flush(&mut self) -> io::Result<()> {
        if !self.lies {
            self.store.flush()?;
        }
        self.flushes += 1;
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8], reply: ReplyWrite) {
        match self.store.write(offset, data) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error.into()),
        }
    }
}

/// The disk; clones are the same one.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<State>>);

impl Disk {
    pub fn new(store: Store) -> Disk {
        let (power, waiting) = (Power::On, Vec::new());
        let (held, flushes, lies) = (None, 0, false);
        Disk(Arc::new(Mutex::new(State { power, store, waiting, held, flushes, lies })))
    }

    /// From now on, writes of nothing but `byte` take until [`Disk::release`].
    pub fn hold(&self, byte: u8) {
        self.state().held = Some(Held { byte, writes: Vec::new() });
    }

    /// Bytes of the writes that are held.
    pub fn held_bytes(&self) -> usize {
        self.state().held.iter().flat_map(|held| &held.writes).map(|(_, data, _)| data.len()).sum()
    }

    /// Writes the held data; nothing is held any more.
    pub fn release(&self) {
        let mut state = self.state();
        for (offset, data, reply) in state.held.take().into_iter().flat_map(|held| held.writes) {
            state.write(offset, &data, reply);
        }
    }

    /// From now on nothing reaches the medium and no request is answered.
    pub fn fail_power(&self) {
        self.state().power = Power::Failing;
    }

    /// Waiting requests fail, as do all later ones.
    pub fn power_off(&self) {
        let mut state = self.state();
        state.power = Power::Off;
        for (_, _, reply) in state.held.take().into_iter().flat_map(|held| held.writes) {
            reply.error(Errno::EIO);
        }
        for waiting in state.waiting.drain(..) {
            match waiting {
                Waiting::Read(reply) => reply.error(Errno::EIO),
                Waiting::Write(reply) => reply.error(Errno::EIO),
                Waiting::Flush(reply) => reply.error(Errno::EIO),
            }
        }
    }

    /// The power comes back to a disk that has only the survivors.
    pub fn power_on(&self, survivors: Survivors) -> io::Result<Toll> {
        let mut state = self.state();
        let toll = state.store.lose(survivors)?;
        state.power = Power::On;
        Ok(toll)
    }

    /// Flushes do nothing any more and succeed.
    pub fn lie(&self) {
        self.state().lies = true;
    }

    /// Flushes that were answered.
    pub fn flushes(&self) -> u64 {
        self.state().flushes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileServer for Disk {
    fn size(&self) -> u64 {
        self.state().store.size()
    }

    fn read(&self, offset: u64, bytes: u32, reply: ReplyData) {
        let mut state = self.state();
        match state.power {
            Power::On => match state.store.read(offset, u64::from(bytes)) {
                Ok(data) => reply.data(&data),
                Err(error) => reply.error(error.into()),
            },
            Power::Failing => state.waiting.push(Waiting::Read(reply)),
            Power::Off => reply.error(Errno::EIO),
        }
    }

    fn write(&self, offset: u64, data: &[u8], reply: ReplyWrite) {
        let mut state = self.state();
        match state.power {
            Power::On => match &mut state.held {
                Some(held) if data.iter().all(|byte| *byte == held.byte) => {
                    held.writes.push((offset, data.to_vec(), reply));
                }
                _ => state.write(offset, data, reply),
            },
            Power::Failing => state.waiting.push(Waiting::Write(reply)),
            Power::Off => reply.error(Errno::EIO),
        }
    }

    fn flush(&self, reply: ReplyEmpty) {
        thread::sleep(FLUSH_TIME);
        let mut state = self.state();
        match state.power {
            Power::On => match state.flush() {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error.into()),
            },
            Power::Failing => state.waiting.push(Waiting::Flush(reply)),
            Power::Off => reply.error(Errno::EIO),
        }
    }
}
