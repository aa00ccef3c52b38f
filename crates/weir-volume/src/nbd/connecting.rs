//! The life of a disk's connection: what its loss means for the requests on it, the next one, and the end.

use std::time::Duration;

use weir_block::{Completion, IoError, Nanos, Reactor};

use super::body::Data;
use super::requests::{Limits, Whose, Work};
use super::{NbdBacking, away, tag_of};
use crate::lun::route_status::Overdue;

/// A server that is silent again and again, because it is slow, is reported no more often.
const SILENT_AGAIN: Duration = Duration::from_secs(600);

impl NbdBacking {
    /// The connection is gone, or given up. What was under way on it is in doubt from now on, if it changes something.
    pub(super) fn lose(&mut self, reactor: &mut Reactor, why: &str) {
        let Some(mut connection) = self.link.lose(reactor) else { return };
        let now = reactor.now();
        self.silent_since = None;
        let until = now + self.fence_grace;
        let sent = self.pending.iter().filter(|(_, request)| request.is_sent);
        let sent: Vec<u32> = sent.map(|(slot, _)| slot as u32).collect();
        let mut in_doubt = 0;
        for slot in sent {
            let request = &mut self.pending[slot as usize];
            // Its earlier commands are answered, and others may have seen what they did.
            let has_begun = connection.has_begun(slot) || request.next > request.offset;
            let data = connection.take(slot);
            request.restart();
            if let (Work::Read(buffer), Data::Into(taken, _)) = (&mut request.work, data) {
                *buffer = Some(taken);
            }
            let (range, serial, whose) = (request.range(), request.serial, request.whose);
            let is_own = matches!(whose, Whose::Again(_) | Whose::Flush);
            if request.changes_data() && has_begun {
                // The log has newer bytes for a read where destage writes.
                let bars_reads = !matches!(whose, Whose::Destage(_));
                self.doubts.add(range, until, ((!is_own).then_some(slot), serial), bars_reads);
                in_doubt += 1;
            }
            if is_own {
                self.pending.remove(slot as usize);
            } else {
                self.waiting.push_back(slot);
            }
        }
        self.waiting.make_contiguous().sort_by_key(|&slot| self.pending[slot as usize].serial);
        self.again = 0;
        self.again_at = Nanos(0);
        self.flushes.disconnected();
        self.owe_all();
        connection.reset();
        self.patience.disconnected(now);
        self.renews = false;
        self.why = why.to_owned();
        if let Some(error) = self.refusal().filter(|_| self.has_ended) {
            return self.fail_waiting(error, |_| true);
        }
        self.tell_away(now, in_doubt);
    }

    /// False: it was told before.
    fn tell_away(&mut self, now: Nanos, in_doubt: usize) -> bool {
        if self.away_since.is_some() {
            return false;
        }
        self.away_since = Some(now);
        let doubt = match in_doubt {
            0 => String::new(),
            count => format!(
                "; {} under way, which may land until {} from now: what overlaps that waits (nbd.fence_grace)",
                changes(count),
                seconds(self.fence_grace)
            ),
        };
        let effect = self.effect("for it", "it is back");
        self.news.push_back(("server-away", format!("{}: {}. {effect}{doubt}", self.name, self.why)));
        true
    }

    /// The server is there, and its export is not what the disk needs: waiting alone does not help. Told once until it is connected again:
    /// the reason has the server's own words and numbers, which may be others each time.
    fn tell_unfit(&mut self) {
        if !std::mem::replace(&mut self.is_unfit, true) {
            let effect = self.effect("until that is corrected", "that is corrected");
            self.news.push_back(("server-unfit", format!("{}. {effect}", self.why)));
        }
    }

    /// Whether requests wait or fail, as a sentence for an event.
    fn effect(&self, wait: &str, until: &str) -> String {
        match self.fails {
            true => format!("Requests fail until {until}"),
            false => {
                let limit = seconds(self.server_wait);
                format!("Requests wait {wait}, for at most {limit} (nbd.server_wait)")
            }
        }
    }

    /// The server owes answers, and has given none for a while; or it has given one since.
    fn tell_silent(&mut self, now: Nanos) {
        match (self.patience.is_silent() && self.link.is_up(), self.silent_since) {
            (true, None) if now >= self.silent_again_at => {
                self.silent_since = Some(self.patience.silent_since().unwrap_or(now));
                self.silent_again_at = now + SILENT_AGAIN;
                let text = format!(
                    "{}: it answers nothing. Requests wait for it, for at most {} (nbd.server_wait)",
                    self.name,
                    seconds(self.server_wait)
                );
                self.news.push_back(("server-silent", text));
            }
            (false, Some(since)) => {
                self.silent_since = None;
                let text = format!("{}: it answers again after {}", self.name, seconds(now - since));
                self.news.push_back(("server-back", text));
            }
            _ => {}
        }
    }

    /// Makes the next connection, if there is none.
    pub(super) fn connect(&mut self, reactor: &mut Reactor) {
        if self.link.is_up() || self.has_ended {
            return;
        }
        match self.link.connect(reactor, self.info.size, self.info.logical_block) {
            Ok(false) => {}
            Ok(true) => self.connected(reactor),
            Err(trouble) => {
                self.why = trouble.to_string();
                if !self.tell_away(reactor.now(), 0) && trouble.is_about_export() {
                    self.tell_unfit();
                }
            }
        }
    }

    fn connected(&mut self, reactor: &mut Reactor) {
        let Some(export) = self.link.export() else { return };
        self.limits = Limits::of(export, self.info.logical_block);
        // The disk may have grown while the thread shook hands.
        self.renews = export.size < self.info.size;
        (self.info.fast_zeroes, self.info.discards) = (self.limits.zeroes, self.limits.zeroes);
        self.patience.greeted();
        self.is_unfit = false;
        self.may_go_on = true;
        if self.fails {
            // Its answer ends that.
            self.flushes.arrive(Whose::Flush);
        }
        if let Some(since) = self.away_since.take() {
            let again = match self.kept.owed() {
                0 => String::new(),
                1 => "; 1 range that it had not flushed is written again".to_owned(),
                count => format!("; {count} ranges that it had not flushed are written again"),
            };
            let text =
                format!("{}: connected again after {}{again}", self.name, seconds(reactor.now() - since));
            self.news.push_back(("server-back", text));
        }
    }

    /// Ends the connection for another one, when nothing is under way on it.
    pub(super) fn renew(&mut self, reactor: &mut Reactor) {
        if !self.renews || self.pending.iter().any(|(_, request)| request.is_sent) {
            return;
        }
        self.renews = false;
        if let Some(connection) = self.link.lose(reactor) {
            connection.disconnect();
            self.flushes.disconnected();
            self.owe_all();
            self.patience.disconnected(reactor.now());
            self.why = "its size has changed".to_owned();
        }
    }

    /// Requests do not wait for a server without a limit (P9).
    pub(super) fn check_patience(&mut self, reactor: &mut Reactor) {
        if self.silent_since.is_some() {
            self.tell_silent(reactor.now());
        }
        if self.patience.has_nothing() || self.has_ended && !self.link.is_up() {
            return;
        }
        let waits = self.pending.len() + self.flushes.pending() > 0;
        let overdue = self.patience.check(reactor.now(), self.link.is_up(), waits);
        if overdue.is_none() && !self.has_ended {
            self.tell_silent(reactor.now());
        }
        let Some(overdue) = overdue else { return };
        // Before a silent one is given up: whoever hears of that does not wait.
        let is_told = self.has_ended || std::mem::replace(&mut self.fails, true);
        let what = match overdue {
            Overdue::Missing => format!("could not be reached ({})", self.why),
            Overdue::Silent => {
                self.lose(reactor, "it has answered nothing");
                self.patience.gave_up();
                "has answered nothing".to_owned()
            }
        };
        if self.has_ended {
            return;
        }
        if !is_told {
            let text = format!(
                "{}: it {what} for {} (nbd.server_wait): requests fail until it is back",
                self.name,
                seconds(self.server_wait)
            );
            self.news.push_back(("server-overdue", text));
        }
        self.fail_waiting(away(), |_| true);
    }

    /// Requests fail that are not under way. What they have sent over a former connection may land all the same.
    pub(super) fn fail_waiting(&mut self, error: IoError, which: impl Fn(Whose) -> bool) {
        let slots = self.waiting.iter().copied().filter(|&slot| which(self.pending[slot as usize].whose));
        self.fail_slots(error, slots.collect());
        self.may_go_on |= !self.waiting.is_empty();
        if self.link.is_up() {
            return;
        }
        let (fail, keep): (Vec<Whose>, Vec<Whose>) =
            self.flushes.give_up().into_iter().partition(|&whose| which(whose));
        keep.into_iter().for_each(|whose| self.flushes.arrive(whose));
        let tags = fail.into_iter().filter_map(tag_of);
        self.ready.extend(tags.map(|tag| Completion { tag, result: Err(error) }));
    }

    pub(super) fn fail_slots(&mut self, error: IoError, slots: Vec<u32>) {
        for &slot in &slots {
            let whose = self.pending.remove(slot as usize).whose;
            self.doubts.orphan(slot);
            self.ready.extend(tag_of(whose).map(|tag| Completion { tag, result: Err(error) }));
        }
        self.waiting.retain(|&slot| self.pending.contains(slot as usize));
    }

    /// The disk is another node's, or closed here: nothing more is begun, and what is kept is nobody's any more.
    pub(super) fn end_all(&mut self, reactor: &mut Reactor) {
        if !std::mem::replace(&mut self.has_ended, true) && !self.kept.is_empty() {
            let text = format!(
                "{}: {} of acknowledged writes that it has not flushed are left to it: if it ends before it does, they are lost",
                self.name,
                ranges(self.kept.len())
            );
            self.news.push_back(("server-unflushed", text));
        }
        self.silent_since = None;
        self.kept.clear();
        self.rewrite_refused = None;
        if let Some(error) = self.refusal() {
            self.fail_waiting(error, |_| true);
        }
        // What has been begun and cannot be sent any more has no answer to wait for.
        if self.link.wants_to_send() {
            self.lose(reactor, "the disk is not this node's any more");
        }
        if let Some(error) = self.refusal() {
            let uncovered = self.flushes.uncovered().into_iter().filter_map(tag_of);
            self.ready.extend(uncovered.map(|tag| Completion { tag, result: Err(error) }));
        }
        self.say_farewell(reactor);
    }

    /// Ends the connection of a disk that has ended, when everything on it is answered.
    pub(super) fn say_farewell(&mut self, reactor: &mut Reactor) {
        if self.has_ended
            && self.pending.is_empty()
            && let Some(connection) = self.link.close(reactor)
        {
            connection.disconnect();
        }
    }

    /// Whether something may still reach the server, or has to, though every request is answered.
    pub(super) fn still_owes(&self) -> bool {
        let gives_up = self.fails || self.is_refusal_overdue();
        let keeps = self.is_closing && !self.has_ended && !gives_up && !self.kept.is_empty();
        keeps || !self.doubts.is_empty() || self.pending.iter().any(|(_, request)| request.is_sent)
    }

    /// What keeps the disk from serving as it should, in words.
    pub(super) fn trouble_at(&self, now: Nanos) -> Option<String> {
        let effect = if self.fails { "fail" } else { "wait" };
        if !self.link.is_up() && self.is_unfit {
            return Some(format!("{}. Requests {effect} until that is corrected", self.why));
        }
        if !self.link.is_up() && self.away_since.is_some() {
            return Some(format!("{} is away: {}. Requests {effect} until it is back", self.name, self.why));
        }
        if self.patience.is_silent() {
            return Some(format!("{} answers nothing. Requests {effect}", self.name));
        }
        if let Some(trouble) = self.rewrite_trouble() {
            return Some(trouble);
        }
        match self.doubts.open(now) {
            0 => None,
            count => Some(format!(
                "{} under way when the connection to {} broke, and may still land: what overlaps that waits, for at \
                 most {} (nbd.fence_grace)",
                changes(count),
                self.name,
                seconds(self.fence_grace)
            )),
        }
    }

    /// The next time at which something is to be done without an event.
    pub(super) fn next_turn(&self) -> Nanos {
        let mut next = self.doubts.next_end(self.looked_at);
        if self.has_ended {
            return if self.link.is_up() { next.min(self.patience.deadline()) } else { next };
        }
        next = next.min(self.patience.deadline());
        if !self.link.is_up() {
            return next.min(self.link.deadline());
        }
        if self.link.has_unsent() {
            next = next.min(self.right_at);
        }
        if self.kept.owed() > 0 && self.again_at > self.looked_at {
            next = next.min(self.again_at);
        }
        next.min(self.flush_at())
    }
}

fn ranges(count: usize) -> String {
    if count == 1 { "1 range".to_owned() } else { format!("{count} ranges") }
}

fn changes(count: usize) -> String {
    if count == 1 { "1 change was".to_owned() } else { format!("{count} changes were") }
}

/// A time for people.
pub(super) fn seconds(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        seconds => format!("{seconds} s"),
    }
}
