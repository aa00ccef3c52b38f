//! Calls that wait for the LUN, which may never answer.

use std::sync::Mutex;

use slab::Slab;
use weir_block::Nanos;

use super::lock;

/// The calls that have not returned.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// When each has begun.
    begun: Mutex<Slab<Nanos>>,
}

/// One of them, until it is dropped.
struct Call<'a> {
    calls: &'a Calls,
    key: usize,
}

impl Calls {
    /// Makes a call.
    pub(super) fn during<T>(&self, call: impl FnOnce() -> T) -> T {
        let key = lock(&self.begun).insert(Nanos::now());
        let _call = Call { calls: self, key };
        call()
    }

    /// When the oldest of them has begun.
    pub(super) fn oldest(&self) -> Option<Nanos> {
        lock(&self.begun).iter().map(|(_, begun)| *begun).min()
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        lock(&self.calls.begun).remove(self.key);
    }
}
