//! Calls of a claim that wait for the LUN, which may never answer.

use std::sync::Mutex;

use slab::Slab;
use weir_block::Nanos;

use super::lock;

/// The calls that have not returned.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// The number of the heartbeat that each belongs to, and when it has begun.
    begun: Mutex<Slab<(u64, Nanos)>>,
}

/// One of them, until it is dropped.
struct Call<'a> {
    calls: &'a Calls,
    key: usize,
}

impl Calls {
    /// Makes a call, while the heartbeat of this number goes on.
    pub(super) fn during<T>(&self, number: u64, call: impl FnOnce() -> T) -> T {
        let key = lock(&self.begun).insert((number, Nanos::now()));
        let _call = Call { calls: self, key };
        call()
    }

    /// When the oldest of this heartbeat has begun. One that an earlier claim has left behind may never return, and others do.
    pub(super) fn oldest(&self, number: u64) -> Option<Nanos> {
        let begun = lock(&self.begun);
        begun.iter().filter(|(_, (of, _))| *of == number).map(|(_, (_, since))| *since).min()
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        lock(&self.calls.begun).remove(self.key);
    }
}
