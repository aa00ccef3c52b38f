//! One turn of the accelerator: take what came back, decide, send, destage, answer.

use std::time::Duration;

use weir_block::{Code, Completion, Destage, IoError, Layer, Nanos, Outcome, Reactor, Tag};

use super::below::{Below, not_owner};
use super::full_log::Change;
use super::{Accel, AccelNotice};
use crate::destage::Progress;
use crate::flash::FlashStore;
use crate::flash::frame::State;
use crate::owner::{Effect, Event as OwnerEvent};
use crate::peers::Identity;
use crate::planted::Bug;
use crate::reads::{self, HeldRead, Overlay};

/// Another thread renews the right without waking this one. While there is none, check again after this time.
const RIGHT_POLL: Duration = Duration::from_millis(10);

impl<L: Destage> Accel<L> {
    pub(super) fn turn(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        let now = reactor.now();
        self.now = now;
        self.again = self.peers.receive(reactor, &self.log, &mut self.events);
        self.collect(reactor, now);
        if self.life.is_released() {
            return self.refuse(done);
        }
        self.peers.expire(now, &mut self.events);
        self.note_durable(now);
        self.pacer.refill(now, self.log.fill(), self.log.room(), self.destager.remaining(now));
        self.decide(reactor, now);
        self.append_parked();
        // Work older than our right must neither reach the backing nor be answered (P2, P4).
        let holds_right = self.config.holds_right(now);
        self.look_again = if holds_right { Nanos::NEVER } else { now + RIGHT_POLL };
        let freed = self.log.freed();
        if !self.owner.is_fenced() {
            let hurry = self.owner.hurries();
            self.peers.send(reactor, &self.log, self.identity.epoch, hurry, &mut self.events);
            self.write_to_flash(reactor);
            if holds_right || self.planted.has(Bug::DestageWithoutLease) {
                self.destage(reactor, now);
            }
        }
        self.begin_flush(reactor);
        // A backing in memory has answered already; any other begins the submitted requests now.
        self.collect(reactor, now);
        self.decide(reactor, now);
        self.watch_room(now);
        self.retry_reads(reactor);
        self.go_on(reactor);
        // A flush that ended in this turn may have been all that blocked the next one, and no event will trigger another turn.
        self.again |= self.may_flush();
        let answers = holds_right || self.planted.has(Bug::ReplyWithoutLease);
        if !answers || self.owner.is_fenced() || self.owner.waits_for_former() {
            return;
        }
        // The replicas learn of it with the next batch, or next turn.
        self.again |= self.log.freed() != freed || (self.may_destage() && self.destager.is_idle());
        self.answer();
        done.append(&mut self.finished);
    }

    /// Takes into account newly durable records on flash, and writes that have timed out.
    fn note_durable(&mut self, now: Nanos) {
        let Some(store) = &mut self.store else { return };
        store.expire(now);
        if store.take_progress() {
            self.events.push(match store.error() {
                Some(error) => OwnerEvent::StoreFailed(error.to_owned()),
                None => OwnerEvent::Stored(store.stored()),
            });
        }
    }

    /// Begins to write to flash what is new in the log.
    fn write_to_flash(&mut self, reactor: &mut Reactor) {
        let Accel { store, log, identity, .. } = self;
        if let Some(store) = store {
            let Identity { epoch, lineage } = *identity;
            store.advance(reactor, log, State { epoch, lineage, freed: log.freed(), complete: true });
        }
    }

    /// Answers of the backing.
    fn collect(&mut self, reactor: &mut Reactor, now: Nanos) {
        let mut completions = std::mem::take(&mut self.completions);
        self.lower.advance(reactor, &mut completions);
        for Completion { tag, result } in completions.drain(..) {
            match self.below.remove(tag.0 as usize) {
                Below::Pass { tag, range } => {
                    self.bypassing.remove(range);
                    self.flushes.wrote();
                    self.finished.push(Completion { tag, result });
                }
                Below::Read { tag, offset, overlay } => self.read_back(tag, offset, overlay, result),
                Below::Flush => self.flushed(now, result.map(drop)),
                Below::Extents { tag, before } => {
                    let acknowledged = self.owner.marks().acknowledged;
                    let result = result.map(|outcome| match outcome {
                        Outcome::Extents(below) => {
                            let extents = reads::overlay_extents(&self.index, &before, acknowledged, &below);
                            Outcome::Extents(extents)
                        }
                        other => other,
                    });
                    self.finished.push(Completion { tag, result });
                }
                Below::Direct { tag, changes } => {
                    if changes {
                        self.flushes.wrote();
                    }
                    self.direct.push(Completion { tag, result });
                }
                Below::Destage => {
                    if let Err(error) = &result
                        && error.code != Code::Lost
                        && self.destager.is_flushing()
                    {
                        self.flushes.checkpoint_failed(*error);
                    }
                    let progress = self.destager.completed(now, result.map(drop));
                    self.destaged(progress);
                }
            }
        }
        self.completions = completions;
    }

    /// A clients' flush has completed. Writes of a checkpoint may be lost with one that failed (P6).
    fn flushed(&mut self, now: Nanos, result: Result<(), IoError>) {
        if let Err(error) = result {
            let progress = self.destager.flush_failed(now, error);
            self.destaged(progress);
        }
        let (tags, result) = self.flushes.ended(result);
        self.finished.extend(tags.map(|tag| Completion { tag, result: result.map(|()| Outcome::Done) }));
    }

    fn read_back(
        &mut self,
        tag: Tag,
        offset: u64,
        overlay: Option<(Overlay, u64)>,
        result: Result<Outcome, IoError>,
    ) {
        let Ok(Outcome::Read(mut buffer)) = result else {
            return self.finished.push(Completion { tag, result });
        };
        let mut sequence = 0;
        if let Some((overlay, newest)) = overlay {
            overlay.apply(&mut buffer);
            sequence = newest;
        }
        if self.destager.reaches() > self.owner.marks().acknowledged {
            // The backing may have delivered a record that came after the read and is not acknowledged (P7).
            sequence = sequence.max(reads::newest(&self.index, offset, buffer.len()));
        }
        self.held.push(HeldRead { sequence, tag, buffer });
    }

    fn destaged(&mut self, progress: Progress) {
        match progress {
            Progress::None => {}
            Progress::Done { to, bytes, time, recovered } => {
                self.pacer.destaged(bytes, time);
                self.events.push(OwnerEvent::Destaged(to));
                if recovered {
                    let text = "the backing accepts writes again; destage continues".into();
                    self.notices.push(AccelNotice::Tell("backing-recovered", text));
                }
            }
            Progress::Failed { error, first } => {
                self.pacer.stuck();
                if first {
                    let text = format!(
                        "destage stopped: {error}; acknowledged writes stay in the log, retrying every second"
                    );
                    self.notices.push(AccelNotice::Tell("backing-error", text));
                }
            }
        }
    }

    /// Passes all events to the protocol core and carries out its effects.
    fn decide(&mut self, reactor: &mut Reactor, now: Nanos) {
        if self.log.last() > self.owner.marks().appended {
            self.events.push(OwnerEvent::Appended(self.log.last()));
        }
        if now >= self.owner.deadline() {
            self.events.push(OwnerEvent::Tick);
        }
        while !self.events.is_empty() {
            let mut events = std::mem::take(&mut self.events);
            for event in events.drain(..) {
                self.owner.step(now, event, &mut self.effects);
            }
            self.identity.epoch = self.owner.configuration().epoch;
            let mut effects = std::mem::take(&mut self.effects);
            for effect in effects.drain(..) {
                self.carry_out(reactor, effect);
            }
            self.effects = effects;
            if self.events.is_empty() {
                self.events = events;
            }
        }
    }

    fn carry_out(&mut self, reactor: &mut Reactor, effect: Effect) {
        match effect {
            Effect::WantPeer { node, connected, exclude } => {
                self.notices.push(AccelNotice::WantPeer { node, connected, exclude });
            }
            Effect::Propose { epoch, replicas, write_back, wanted_replicas } => {
                self.notices.push(AccelNotice::WantConfiguration {
                    epoch,
                    replicas,
                    write_back,
                    wanted_replicas,
                });
            }
            Effect::DropPeer(node) => self.peers.drop_peer(reactor, &node),
            Effect::FreeTo(to) => self.free_to(to),
            Effect::Fenced(epoch) => self.notices.push(AccelNotice::Fenced(epoch)),
            Effect::Tell(kind, text) => self.notices.push(AccelNotice::Tell(kind, text)),
        }
    }

    fn free_to(&mut self, to: u64) {
        self.peers.freeing(to);
        for (sequence, record) in self.log.range(0, to) {
            self.index.remove(record.offset, record.end(), sequence);
            self.dirty.remove(record.weight());
        }
        self.dirty.clean_to(to, self.log.last());
        self.log.free_to(to);
    }

    /// Writes wait for room in the log, and not without a limit (P9).
    fn watch_room(&mut self, now: Nanos) {
        self.full_log.set_wait(self.room_wait());
        let (kind, text) = match self.full_log.turn(now, self.log.freed()) {
            None => return,
            Some(Change::Refuses) => ("log-jammed", self.full_log_reason()),
            Some(Change::Takes) => {
                ("log-has-room", "the write log empties again; writes are taken".to_owned())
            }
        };
        self.notices.push(AccelNotice::Tell(kind, text));
        self.again = true;
    }

    /// Whether there is something that may go to the backing now.
    fn may_destage(&self) -> bool {
        // A write that went past the log must not land on top of a newer one that went through it (P4).
        (self.bypassing.is_empty() || self.planted.has(Bug::DestageBesideBypass))
            && self.life.may_destage()
            && self.destage_limit() > self.owner.in_backing()
    }

    fn destage(&mut self, reactor: &mut Reactor, now: Nanos) {
        let beside = self.planted.has(Bug::DestageBesideBypass);
        if !(self.bypassing.is_empty() || beside) || !self.life.may_destage() {
            return;
        }
        let urgent = self.life.is_closing() || self.owner.drains() || self.barrier.is_some();
        let (from, limit) = (self.owner.in_backing(), self.destage_limit());
        let whole = self.owner.checkpoint_whole();
        self.destager.begin(now, &self.log, from, limit, whole, urgent);
        // To plan a checkpoint takes time; what is submitted arrives after it.
        reactor.now();
        let Accel { destager, log, lower, below, .. } = self;
        let may_flush = !self.flushes.group().is_running();
        self.again |=
            destager.submit(reactor, log, lower, may_flush, || Tag(below.insert(Below::Destage) as u64));
    }

    /// Reads that waited for memory to lay the log's bytes over the backing's.
    fn retry_reads(&mut self, reactor: &mut Reactor) {
        let deferred = self.deferred.len();
        for _ in 0..deferred {
            let Some((tag, offset, buffer)) = self.deferred.pop_front() else { return };
            self.read(reactor, tag, offset, buffer);
        }
        // The backing has been advanced in this turn already: it begins what it was given now in the next one.
        self.again |= self.deferred.len() < deferred;
    }

    /// The write that waited for another one of its range: past the log, or wherever writes go by now.
    fn go_on(&mut self, reactor: &mut Reactor) {
        let Some(request) = self.behind.take() else { return };
        let (kind, range) = (request.kind(), request.range());
        if self.bypasses() && self.overlaps(range) || !self.has_room(kind, range.1) {
            self.behind = Some(request);
            return;
        }
        self.submit(reactor, request);
        self.again = true;
    }

    /// Answers everything that the watermarks allow.
    fn answer(&mut self) {
        let acknowledged = self.owner.marks().acknowledged;
        self.writes.release(acknowledged, &mut self.finished);
        let mut index = 0;
        while index < self.held.len() {
            if self.held[index].sequence <= acknowledged || self.planted.has(Bug::AnswerUnacknowledgedReads) {
                let HeldRead { tag, buffer, .. } = self.held.swap_remove(index);
                self.finished.push(Completion { tag, result: Ok(Outcome::Read(buffer)) });
            } else {
                index += 1;
            }
        }
    }

    /// The disk is another node's: any result of a request here does not count for that owner (P2).
    fn refuse(&mut self, done: &mut Vec<Completion>) {
        let error = not_owner();
        self.writes.fail(error, &mut self.finished);
        self.parked.fail(error, &mut self.finished);
        let held = self.held.drain(..).map(|held| held.tag);
        let behind = self.behind.take().map(|request| request.tag());
        let waiting = self.deferred.drain(..).map(|(tag, ..)| tag).chain(self.flushes.group().give_up());
        let tags = held.chain(waiting).chain(behind);
        self.finished.extend(tags.map(|tag| Completion { tag, result: Err(error) }));
        done.extend(
            self.finished.drain(..).map(|Completion { tag, .. }| Completion { tag, result: Err(error) }),
        );
    }

    /// The time at which the next turn is due even without events.
    pub(super) fn next_turn(&self) -> Nanos {
        if self.again {
            return Nanos(0);
        }
        if self.life.is_released() || self.owner.is_fenced() {
            return self.lower.deadline();
        }
        let peers = self.owner.deadline().min(self.peers.deadline());
        // Without the right, or while writes go past the log, the deadline of destage does not count.
        let asks = self.look_again == Nanos::NEVER && self.bypassing.is_empty() && self.life.may_destage();
        let destage = if asks { self.destager.deadline() } else { self.look_again };
        let flash = self.store.as_ref().map_or(Nanos::NEVER, FlashStore::deadline);
        peers
            .min(destage)
            .min(flash)
            .min(self.full_log.deadline())
            .min(self.pacer.deadline())
            .min(self.lower.deadline())
    }
}
