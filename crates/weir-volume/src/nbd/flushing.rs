//! Flushes: one at a time for all who wait, when nothing is left to be written again; and what a broken connection takes from them.

use std::rc::Rc;
use std::time::Duration;

use weir_block::{Code, Completion, ErrorKind, Group, IoError, Nanos, Outcome, Reactor};

use super::body::Source;
use super::connecting::seconds;
use super::kept::Content;
use super::requests::{Pending, Whose, Work};
use super::{AGAIN, KEPT, MOST_KEPT, NbdBacking, tag_of};

/// What was acknowledged is flushed after this long without being asked to: until then it takes memory here.
const FLUSH_AFTER: Duration = Duration::from_secs(5);

/// Pause after the server has refused what is to be written again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The server refuses to take again what it had acknowledged.
#[derive(Clone, Copy, Debug)]
pub(super) struct RewriteRefused {
    since: Nanos,
    error: IoError,
    /// For longer than requests wait: those that overlap it fail.
    pub is_overdue: bool,
}

/// The flushes of a disk.
#[derive(Default)]
pub(super) struct Flushes {
    /// Those who wait; [`Whose::Flush`] is the backing itself.
    group: Group<Whose>,
    /// Flushes that were begun.
    begun: u64,
    /// The one on the connection covers what was acknowledged when so many had begun.
    covers: Option<u64>,
    /// Destage has written, when so many had begun, and no flush has covered it.
    destaged: Option<u64>,
    /// The connection has broken since: the server may have ended with what destage has written. Its next flush fails, and it writes again
    /// what the log has.
    lost: bool,
    /// The time since which something is kept.
    keeps_since: Option<Nanos>,
}

impl Flushes {
    /// Somebody wants one.
    pub fn arrive(&mut self, whose: Whose) {
        self.group.arrive(whose);
    }

    pub fn begun(&self) -> u64 {
        self.begun
    }

    pub fn destaged(&mut self) {
        self.destaged = Some(self.begun);
    }

    /// A change was acknowledged that is not durable; `first`: the only one.
    pub fn keeps(&mut self, now: Nanos, first: bool) {
        self.keeps_since = self.keeps_since.filter(|_| !first).or(Some(now));
    }

    pub fn pending(&self) -> usize {
        self.group.pending()
    }

    /// The connection has broken.
    pub fn disconnected(&mut self) {
        self.covers = None;
        self.lost |= self.destaged.take().is_some();
    }

    /// Those who wait for a flush that has not begun.
    pub fn uncovered(&mut self) -> Vec<Whose> {
        if self.covers.is_some() { self.group.give_up().collect() } else { self.give_up() }
    }

    /// All who wait, for the next one or the one under way.
    pub fn give_up(&mut self) -> Vec<Whose> {
        let mut all: Vec<Whose> = self.group.finish().collect();
        all.extend(self.group.give_up());
        all
    }
}

impl NbdBacking {
    /// When something is flushed without being asked for.
    pub(super) fn flush_at(&self) -> Nanos {
        match self.flushes.keeps_since.filter(|_| !self.kept.is_empty()) {
            Some(since) if self.flushes.group.pending() == 0 && self.kept.owed() == 0 => {
                if self.settles {
                    Nanos(0)
                } else {
                    since + FLUSH_AFTER
                }
            }
            _ => Nanos::NEVER,
        }
    }

    /// Whether a flush waits only for its turn.
    pub(super) fn may_flush(&self) -> bool {
        let waits =
            self.flushes.group.is_due() || self.flushes.group.is_running() && self.flushes.covers.is_none();
        waits && self.link.is_up() && !self.has_ended && self.kept.owed() == 0 && !self.renews
    }

    /// Begins the flush that is due. What is to be written again comes first: a flush would else be answered for what is lost.
    pub(super) fn start_flush(&mut self, reactor: &mut Reactor) {
        let is_large = self.memory.lent() >= KEPT / 2 || self.kept.len() >= MOST_KEPT / 2;
        if self.has_ended {
            return;
        }
        let is_due = is_large || self.is_closing || reactor.now() >= self.flush_at();
        if is_due && !self.kept.is_empty() && self.flushes.pending() == 0 {
            self.flushes.arrive(Whose::Flush);
        }
        if !self.may_flush() {
            return;
        }
        self.flushes.group.start();
        self.flushes.covers = Some(self.flushes.begun);
        self.flushes.begun += 1;
        // [`settle`](crate::Backing::settle) sets it again while it is wanted.
        self.settles = false;
        let slot = self.insert_own(Whose::Flush, Work::Flush, (0, 0));
        self.begin(reactor, slot);
    }

    fn insert_own(&mut self, whose: Whose, work: Work, (start, end): (u64, u64)) -> u32 {
        let serial = self.serial;
        self.serial += 1;
        let (offset, length) = (start, end - start);
        let own = Pending { whose, work, offset, length, next: offset, sent: 0, is_sent: false, serial };
        self.pending.insert(own) as u32
    }

    /// A flush has succeeded.
    pub(super) fn flush_done(&mut self, now: Nanos) {
        let Some(covers) = self.flushes.covers.take() else { return };
        self.kept.flushed(covers);
        self.end_refusal(now);
        if self.kept.is_empty() {
            self.flushes.keeps_since = None;
        } else if let Some(since) = &mut self.flushes.keeps_since {
            // The oldest of the rest is younger than the flush; how much so does not matter.
            *since = *since + FLUSH_AFTER;
        }
        self.flushes.destaged = self.flushes.destaged.filter(|&age| age > covers);
        let lost = IoError::new(
            ErrorKind::Retry,
            Code::Lost,
            "flushing what an NBD server may have lost with its connection",
        );
        for whose in self.flushes.group.finish() {
            let result = match whose {
                Whose::Destage(_) if std::mem::take(&mut self.flushes.lost) => Err(lost),
                _ => Ok(Outcome::Done),
            };
            self.ready.extend(tag_of(whose).map(|tag| Completion { tag, result }));
        }
    }

    /// The server could not flush: what it had not made durable may be lost, and another flush would not say so again. What is kept is
    /// written again before the next one.
    pub(super) fn flush_failed(&mut self, reactor: &mut Reactor, error: IoError) {
        let covers = self.flushes.covers.take();
        self.owe_all();
        self.again_at = reactor.now() + AGAIN_AFTER;
        if !self.kept.is_empty() {
            self.note_refusal(reactor.now(), error, "to flush what it had acknowledged".to_owned());
        }
        let mut told = false;
        for whose in self.flushes.group.finish() {
            told |= matches!(whose, Whose::Destage(_));
            self.ready.extend(tag_of(whose).map(|tag| Completion { tag, result: Err(error) }));
        }
        // If destage did not wait for this one, or has written since it began, its next one fails: the log has what is lost (P6).
        let destaged = self.flushes.destaged.take();
        let is_later = destaged > covers;
        self.flushes.lost = is_later || !told && (self.flushes.lost || destaged.is_some());
    }

    /// All that is kept is to be written again.
    pub(super) fn owe_all(&mut self) {
        self.kept.owe_all();
        self.again_from = 0;
    }

    /// Begins to write again what may be lost, a few at a time; not what overlaps a change that may still land.
    pub(super) fn write_again(&mut self, reactor: &mut Reactor) {
        let now = reactor.now();
        if self.kept.is_empty() {
            // Somebody has written something newer, durably.
            self.end_refusal(now);
        }
        if self.kept.owed() == 0 || !self.link.is_up() || now < self.again_at || self.renews {
            return;
        }
        let mut turned = false;
        while self.again < AGAIN {
            let Some((start, extent)) = self.kept.next_owed(self.again_from) else {
                // Those that had to wait, or have failed, are before this. None of them is under way then.
                if std::mem::replace(&mut turned, true) || self.again > 0 {
                    return;
                }
                self.again_from = 0;
                continue;
            };
            let (end, content) = (extent.end, extent.content.clone());
            self.again_from = end;
            // A change under way is newer, and its success replaces what is kept.
            if self.doubts.may_land((start, end), now) || self.is_changing((start, end)) {
                continue;
            }
            let work = match content {
                Content::Data(buffer, from) => {
                    Work::Write { source: Source::Buffer(Rc::clone(&buffer), from), fua: false }
                }
                Content::Zeroes { may_unmap } => Work::Zero { fua: false, may_unmap, fast_only: false },
            };
            let slot = self.insert_own(Whose::Again(start), work, (start, end));
            self.again += 1;
            self.begin(reactor, slot);
        }
    }

    pub(super) fn written_again(&mut self, start: u64) {
        self.again -= 1;
        self.kept.paid(start, self.flushes.begun);
        self.may_go_on |= !self.waiting.is_empty();
    }

    /// What the server has refused is durable, or something newer in its place.
    fn end_refusal(&mut self, now: Nanos) {
        if let Some(refused) = self.rewrite_refused.take() {
            let time = seconds(now - refused.since);
            let text = format!("{}: what it had refused for {time} is durable now", self.name);
            self.news.push_back(("server-back", text));
        }
    }

    /// The server refuses what it had acknowledged before, or its flush: reported once, until that is durable.
    fn note_refusal(&mut self, now: Nanos, error: IoError, what: String) {
        if self.has_ended {
            return;
        }
        if self.rewrite_refused.is_none() {
            let text = format!(
                "{}: it refuses ({error}) {what}. It is tried again each second; requests for the same bytes wait, for at most {} \
                 (nbd.server_wait), and flushes fail",
                self.name,
                seconds(self.server_wait)
            );
            self.news.push_back(("server-refuses", text));
        }
        let refused = RewriteRefused { since: now, error, is_overdue: false };
        let refused = self.rewrite_refused.get_or_insert(refused);
        refused.is_overdue |= now >= refused.since + self.server_wait;
    }

    /// Whether it has refused that for longer than requests wait for a server (P9).
    pub(super) fn is_refusal_overdue(&self) -> bool {
        self.rewrite_refused.is_some_and(|refused| refused.is_overdue)
    }

    /// The server refuses to take a range again. Whoever waits for a flush is told, and it is tried again. What overlaps the range waits
    /// meanwhile, for as long as requests wait for a server that is away (P9).
    pub(super) fn not_written_again(
        &mut self,
        reactor: &mut Reactor,
        error: IoError,
        (start, end): (u64, u64),
    ) {
        let now = reactor.now();
        self.again -= 1;
        self.again_at = now + AGAIN_AFTER;
        for whose in self.flushes.give_up() {
            self.ready.extend(tag_of(whose).map(|tag| Completion { tag, result: Err(error) }));
        }
        self.note_refusal(
            now,
            error,
            format!("what it had acknowledged at byte {start} and lost before a flush"),
        );
        if self.is_refusal_overdue() {
            let overlaps = |slot: &u32| {
                let (first, last) = self.pending[*slot as usize].range();
                first < end && start < last
            };
            let slots = self.waiting.iter().copied().filter(overlaps).collect();
            self.fail_slots(error, slots);
        }
    }

    /// What the server refuses to take again, in words.
    pub(super) fn rewrite_trouble(&self) -> Option<String> {
        let RewriteRefused { error, is_overdue, .. } = self.rewrite_refused?;
        let effect = if is_overdue { "fail" } else { "wait" };
        Some(format!(
            "{} refuses ({error}) what it had acknowledged and not flushed: requests for the same bytes {effect}, and flushes fail, until that \
             is durable",
            self.name
        ))
    }
}
