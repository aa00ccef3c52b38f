//! Grouping: one operation, such as a flush, completes all requests that arrived before it started.

/// The requests that wait for an operation. At most one operation is in progress.
#[derive(Debug)]
pub struct Group<T> {
    /// Arrived since the last operation started.
    waiting: Vec<T>,
    /// Completed by the running operation.
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

    /// Whether requests wait and no operation is running.
    #[must_use]
    pub fn is_due(&self) -> bool {
        !self.running && !self.waiting.is_empty()
    }

    /// Whether an operation is running.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// True when the caller has to start an operation now. No request joins a running one: a flush might not cover writes that
    /// completed after it started (P8).
    pub fn start(&mut self) -> bool {
        let starts = self.is_due();
        if starts {
            std::mem::swap(&mut self.waiting, &mut self.joined);
            self.running = true;
        }
        starts
    }

    /// The requests that the running operation completes.
    pub fn running(&self) -> impl Iterator<Item = &T> {
        self.joined.iter()
    }

    /// The operation has ended. Returns the requests that it completes.
    pub fn finish(&mut self) -> std::vec::Drain<'_, T> {
        self.running = false;
        self.joined.drain(..)
    }

    /// Cancels the next operation. Returns the requests that waited for it.
    pub fn give_up(&mut self) -> std::vec::Drain<'_, T> {
        self.waiting.drain(..)
    }

    /// Number of requests that wait for the next or the running operation.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.waiting.len() + self.joined.len()
    }
}
