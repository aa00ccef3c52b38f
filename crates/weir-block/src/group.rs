//! Grouping: one operation answers all who asked for it before it began, as one flush does.

/// Who waits for which operation. One is under way at a time.
#[derive(Debug)]
pub struct Group<T> {
    /// Arrived since the last operation began.
    waiting: Vec<T>,
    /// Answered by the operation under way.
    joined: Vec<T>,
    running: bool,
}

impl<T> Default for Group<T> {
    fn default() -> Group<T> {
        Group { waiting: Vec::new(), joined: Vec::new(), running: false }
    }
}

impl<T> Group<T> {
    /// Somebody asks for the operation.
    pub fn arrive(&mut self, one: T) {
        self.waiting.push(one);
    }

    /// Whether the operation is asked for and none is under way.
    #[must_use]
    pub fn is_due(&self) -> bool {
        !self.running && !self.waiting.is_empty()
    }

    /// Whether the operation is under way.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// True when the operation is to begin now. Nobody joins one that is under way already: writes that completed after a flush began
    /// might not be covered by it (P8).
    pub fn start(&mut self) -> bool {
        let starts = self.is_due();
        if starts {
            std::mem::swap(&mut self.waiting, &mut self.joined);
            self.running = true;
        }
        starts
    }

    /// The operation has ended: those whom it answers.
    pub fn finish(&mut self) -> std::vec::Drain<'_, T> {
        self.running = false;
        self.joined.drain(..)
    }

    /// Those who wait for the next operation, which will not be.
    pub fn give_up(&mut self) -> std::vec::Drain<'_, T> {
        self.waiting.drain(..)
    }

    /// How many wait for the next operation.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many wait for the operation under way.
    #[must_use]
    pub fn joined(&self) -> usize {
        self.joined.len()
    }
}
