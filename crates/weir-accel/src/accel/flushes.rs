//! Flushes that clients ask for. One at a time goes to the backing, never beside that of a checkpoint, and it answers everybody
//! who asked before it began.
//!
//! The storage reports a lost write once, to one flush (`errseq_t` in Linux). With two flushes under way, one for a checkpoint and
//! one for a client, the one whose writes were lost may be the one that succeeds (P6, P8). With one under way, its failure is
//! passed on to everybody whose writes it may concern.

use weir_block::{IoError, Tag};

/// The flushes of one disk's clients, and the writes past the log that they cover.
pub(super) struct Flushes {
    /// Writes that went past the log and have ended: the backing may hold them in a volatile cache only.
    written: u64,
    /// A flush that began after so many of those has succeeded.
    flushed: u64,
    /// Those who wait for the next flush.
    asked: Vec<Tag>,
    /// Those whom the flush under way answers.
    served: Vec<Tag>,
    /// How many of the writes the flush under way covers.
    covers: Option<u64>,
    /// A checkpoint's flush has failed, and writes past the log that no flush has covered may be lost with it.
    lost: Option<IoError>,
}

impl Flushes {
    /// The former owner's writes have not been flushed by this owner.
    pub(super) fn new() -> Flushes {
        Flushes { written: 1, flushed: 0, asked: Vec::new(), served: Vec::new(), covers: None, lost: None }
    }

    /// A write has gone past the log to the backing, and has ended.
    pub(super) fn wrote(&mut self) {
        self.written += 1;
    }

    /// Whether every write that went past the log is durable.
    pub(super) fn is_flushed(&self) -> bool {
        self.flushed >= self.written
    }

    /// A client asks for a flush.
    pub(super) fn ask(&mut self, tag: Tag) {
        self.asked.push(tag);
    }

    /// Those who wait for the next flush, which will not be.
    pub(super) fn give_up(&mut self) -> impl Iterator<Item = Tag> {
        self.asked.drain(..)
    }

    /// How many wait for the next flush.
    pub(super) fn waiting(&self) -> usize {
        self.asked.len()
    }

    /// How many wait for the flush under way.
    pub(super) fn under_way(&self) -> usize {
        self.served.len()
    }

    /// Whether a flush is asked for and none is under way.
    pub(super) fn is_due(&self) -> bool {
        !self.asked.is_empty() && self.covers.is_none()
    }

    /// Begins the flush that is due: everybody who has asked is answered by it.
    pub(super) fn begin(&mut self) {
        std::mem::swap(&mut self.asked, &mut self.served);
        self.covers = Some(self.written);
    }

    /// The flush under way has come back. Says who waits for it, and what they are to be told.
    pub(super) fn ended(
        &mut self,
        result: Result<(), IoError>,
    ) -> (impl Iterator<Item = Tag>, Result<(), IoError>) {
        let covers = self.covers.take().unwrap_or(0);
        let result = self.lost.take().map_or(result, Err);
        if result.is_ok() {
            self.flushed = self.flushed.max(covers);
        }
        (self.served.drain(..), result)
    }

    /// The flush of a checkpoint has failed.
    pub(super) fn checkpoint_failed(&mut self, error: IoError) {
        if !self.is_flushed() {
            self.lost.get_or_insert(error);
        }
    }
}
