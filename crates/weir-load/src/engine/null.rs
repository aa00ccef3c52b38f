//! Answers at once and moves nothing: measures the cost of the generator itself.

use weir_block::Nanos;

use super::{Done, Engine, rest};
use crate::error::LoadError;
use crate::io::Io;

/// The engine without a target.
#[derive(Debug, Default)]
pub struct NullEngine {
    queued: Vec<Done>,
    buffer: Vec<u8>,
}

impl NullEngine {
    /// A null engine. All slots share one buffer, since its content is not used.
    #[must_use]
    pub fn new() -> NullEngine {
        NullEngine::default()
    }
}

impl Engine for NullEngine {
    const CARRIES_DATA: bool = false;

    fn name(&self) -> &'static str {
        "null"
    }

    fn buffer(&mut self, _slot: u32, length: u32) -> &mut [u8] {
        if self.buffer.len() < length as usize {
            self.buffer.resize(length as usize, 0);
        }
        &mut self.buffer[..length as usize]
    }

    fn data(&self, _slot: u32, length: u32) -> &[u8] {
        &self.buffer[..length as usize]
    }

    #[inline]
    fn queue(&mut self, io: Io) {
        self.queued.push(Done { slot: io.slot, errno: 0 });
    }

    #[inline]
    fn reap(&mut self, until: Nanos, done: &mut Vec<Done>) -> Result<(), LoadError> {
        if self.queued.is_empty() {
            rest(until);
        }
        done.append(&mut self.queued);
        Ok(())
    }
}
