//! Grouping flushes: one sync answers all that arrived before it was started.

/// Which flushes wait for which sync. Holds the requests' slots.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// Arrived since the last sync was started.
    waiting: Vec<u32>,
    /// Answered by the sync that runs.
    joined: Vec<u32>,
    running: bool,
}

impl Flushes {
    pub fn arrive(&mut self, slot: u32) {
        self.waiting.push(slot);
    }

    /// True when a sync is to be started now. A flush never joins a sync that runs already: writes that completed
    /// after that one was started might not be covered by it (P8).
    pub fn start(&mut self) -> bool {
        if self.running || self.waiting.is_empty() {
            return false;
        }
        std::mem::swap(&mut self.waiting, &mut self.joined);
        self.running = true;
        true
    }

    /// The sync has ended; the flushes that it answers.
    pub fn finish(&mut self) -> std::vec::Drain<'_, u32> {
        self.running = false;
        self.joined.drain(..)
    }
}
