//! Grouping: one operation, such as a flush, completes all requests that arrived before it started.

/// The requests that wait for an operation. At most one operation is under way.
#[derive(Debug)]
pub struct Group<T> {
    /// Arrived since the last operation started.
    waiting: Vec<T>,
    /// Completed by the operation under way.
    joined: Vec<T>,
    running: bool,
}

impl<T> Default for Group<T> {
    fn default() -> Group<T> {
        Group { waiting: Vec::new(), joined: Vec::new(), running: false }
    }
}

impl<T> Group<T> {
    /// A request arrives.
    pub fn arrive(&mut self, request: T) {
        self.waiting.push(request);
    }

    /// Whether requests wait and no operation is under way.
    #[must_use]
    pub fn is_due(&self) -> bool {
        !self.running && !self.waiting.is_empty()
    }

    /// Whether an operation is under way.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// True when the caller has to start an operation now. No request joins one that is under way: writes that completed after a flush
    /// started might not be covered by it (P8).
    pub fn start(&mut self) -> bool {
        let starts = self.is_due();
        if starts {
            std::mem::swap(&mut self.waiting, &mut self.joined);
            self.running = true;
        }
        starts
    }

    /// The operation has ended. Returns the requests that it completes.
    pub fn finish(&mut self) -> std::vec::Drain<'_, T> {
        self.running = false;
        self.joined.drain(..)
    }

    /// There will be no next operation. Returns the requests that waited for it.
    pub fn give_up(&mut self) -> std::vec::Drain<'_, T> {
        self.waiting.drain(..)
    }

    /// How many requests wait, for the next operation or the one under way.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.waiting.len() + self.joined.len()
    }
}
