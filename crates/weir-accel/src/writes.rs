//! Writes that wait for their acknowledgement.

use std::collections::VecDeque;

use weir_block::{Completion, IoError, Outcome, Tag};

/// Logged writes by their last record, in order.
#[derive(Debug, Default)]
pub struct Writes {
    waiting: VecDeque<(u64, Tag)>,
}

impl Writes {
    /// A write whose last record is `sequence`.
    pub fn push(&mut self, sequence: u64, tag: Tag) {
        self.waiting.push_back((sequence, tag));
    }

    /// The number of waiting writes.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Everything up to `acknowledged` is done.
    pub fn release(&mut self, acknowledged: u64, done: &mut Vec<Completion>) {
        while let Some(&(sequence, tag)) = self.waiting.front()
            && sequence <= acknowledged
        {
            self.waiting.pop_front();
            done.push(Completion { tag, result: Ok(Outcome::Done) });
        }
    }

    /// Nothing that waits will ever be acknowledged.
    pub fn fail(&mut self, error: IoError, done: &mut Vec<Completion>) {
        done.extend(self.waiting.drain(..).map(|(_, tag)| Completion { tag, result: Err(error) }));
    }
}
