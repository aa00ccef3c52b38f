//! Clients' flushes. One at a time goes to the backing, never beside that of a checkpoint, and it answers all clients that
//! asked before it began.
//!
//! The storage reports a lost write once, to one flush (`errseq_t` in Linux). With two flushes in flight, one for a
//! checkpoint and one for a client, the one whose writes were lost may be the one that succeeds (P6, P8). With one in flight,
//! its failure reaches all whose writes it may concern.

use weir_block::{Group, IoError, Tag};

/// The flushes of one disk's clients, and the writes past the log that they cover.
pub(super) struct Flushes {
    /// Writes that went past the log and have ended: the backing may hold them in a volatile cache only.
    written: u64,
    /// A flush that began after so many of those has succeeded.
    flushed: u64,
    /// The clients that wait for a flush.
    group: Group<Tag>,
    /// The number of those writes that the flush in flight covers.
    covers: u64,
    /// A checkpoint's flush has failed, and writes past the log that no flush has covered may be lost with it.
    lost: Option<IoError>,
}

impl Flushes {
    /// The former owner's writes have not been flushed by this owner.
    pub(super) fn new() -> Flushes {
        Flushes { written: 1, flushed: 0, group: Group::default(), covers: 0, lost: None }
    }

    /// A write has gone past the log to the backing, and has ended.
    pub(super) fn wrote(&mut self) {
        self.written += 1;
    }

    /// Whether every write that went past the log is durable.
    pub(super) fn is_flushed(&self) -> bool {
        self.flushed >= self.written
    }

    /// The clients that wait.
    pub(super) fn group(&mut self) -> &mut Group<Tag> {
        &mut self.group
    }

    /// Whether clients wait for a flush that has not begun, and none is in flight.
    pub(super) fn is_due(&self) -> bool {
        self.group.is_due()
    }

    /// The number of clients that wait, for the next flush or the one in flight.
    pub(super) fn pending(&self) -> usize {
        self.group.pending()
    }

    /// Begins the flush that is due.
    pub(super) fn begin(&mut self) {
        if self.group.start() {
            self.covers = self.written;
        }
    }

    /// The flush in flight has completed. Returns the clients that wait for it, and their result.
    pub(super) fn ended(
        &mut self,
        result: Result<(), IoError>,
    ) -> (impl Iterator<Item = Tag>, Result<(), IoError>) {
        let result = self.lost.take().map_or(result, Err);
        if result.is_ok() {
            self.flushed = self.flushed.max(self.covers);
        }
        (self.group.finish(), result)
    }

    /// The flush of a checkpoint has failed.
    pub(super) fn checkpoint_failed(&mut self, error: IoError) {
        if !self.is_flushed() {
            self.lost.get_or_insert(error);
        }
    }
}
