//! This process's heartbeat on the LUN, and those of others.

use std::sync::atomic::Ordering;
use std::thread;

use weir_block::Nanos;

use super::{Answer, Event, Host, Process, Shared, lock};
use crate::lun::heartbeat::listener::BEAT_EVERY;
use crate::lun::heartbeat::{Area, Beat, Heard, HeartbeatError, Listener, Slot};

/// What this process's slot says, kept while it is written: one heartbeat after the other.
#[derive(Debug, Default)]
pub(super) struct Heart {
    /// The last epoch in which the LUN was coordinated, as far as this process knows. An attempt to coordinate it changes nothing of it,
    /// or the attempts of a stranger would make this cluster's own registry look old.
    pub(super) epoch: u64,
    pub(super) count: u64,
}

impl Shared {
    pub(super) fn open_area(&self) -> Result<Area, HeartbeatError> {
        Area::open(&self.host.lun, self.host.area, self.host.volume)
    }

    /// Looks whether the registry's epoch is that of the LUN.
    pub(super) fn survey(&self, wish: u64, revision: u64, epoch: u64) {
        let read = || self.open_area().and_then(|mut area| area.slots()).map_err(|error| error.to_string());
        let last = self.check_not_copy().and_then(|()| read()).map(|slots| {
            let beats = slots.into_iter().filter_map(|slot| match slot {
                Slot::Beat(beat) => Some(beat),
                Slot::Empty | Slot::Other(_) => None,
            });
            beats.max_by_key(|beat| beat.epoch)
        });
        match last {
            Ok(Some(beat)) if beat.epoch > epoch => {
                let text = self.describe(&Heard::Later(beat));
                let _ = self.answers.send(Answer::Outdated { revision, text });
            }
            Ok(last) => {
                let mut heart = lock(&self.heart);
                heart.epoch = heart.epoch.max(last.map_or(0, |beat| beat.epoch));
                drop(heart);
                self.is_well("survey");
                let _ = self.answers.send(Answer::Permitted { wish, revision });
            }
            // Whoever wishes it repeats that: another survey follows.
            Err(why) => self.report("survey", why),
        }
        self.is_surveying.store(false, Ordering::Relaxed);
    }

    pub(super) fn goes_on(&self, number: u64) -> bool {
        self.beating.load(Ordering::Relaxed) == number
    }

    /// Writes a heartbeat if `number` goes on. `None`: it does not.
    pub(super) fn beat_once(&self, area: &mut Area, number: u64) -> Option<Result<(), HeartbeatError>> {
        let mut heart = lock(&self.heart);
        self.goes_on(number).then(|| area.beat(&self.next_beat(&mut heart, true)))
    }

    pub(super) fn next_beat(&self, heart: &mut Heart, goes_on: bool) -> Beat {
        let Host { me, name, .. } = &self.host;
        heart.count += 1;
        Beat {
            node: me.node,
            incarnation: me.incarnation,
            epoch: heart.epoch,
            count: heart.count,
            goes_on,
            name: name.clone(),
        }
    }

    pub(super) fn beat(&self, epoch: u64, number: u64, admission: u64) {
        let first = self
            .calls
            .during(number, || self.open_area().map(|mut area| (self.beat_once(&mut area, number), area)));
        let mut area = match first {
            Ok((Some(Ok(())), area)) => area,
            Ok((None, _)) => return,
            Err(error) | Ok((Some(Err(error)), _)) => {
                // Whatever the error: a fence may make the LUN disappear, and another admission brings it back. The leases from before it
                // do not count either way.
                self.fail("beat", error.to_string());
                self.answer(Event::Failed { epoch });
                return self.answer(Event::Lost { admission });
            }
        };
        self.succeed("beat", Event::Beating { number });
        loop {
            thread::sleep(BEAT_EVERY);
            match self.calls.during(number, || self.beat_once(&mut area, number)) {
                Some(Ok(())) => self.is_well("beat"),
                Some(Err(error)) if error.is_refusal() => return self.answer(Event::Lost { admission }),
                // Requests of the filesystem and of owners fail, too, and say so.
                Some(Err(error)) => self.fail("beat", error.to_string()),
                None => break,
            }
        }
        self.is_well("beat");
        self.end_beating(&mut area, admission);
    }

    /// The last heartbeat, for whoever looks, unless another one has begun. Whoever has claimed the volume meanwhile may have fenced this
    /// node, which shows here.
    pub(super) fn end_beating(&self, area: &mut Area, admission: u64) {
        let mut heart = lock(&self.heart);
        if self.goes_on(0) && !self.is_over() && lock(&self.mounted).is_none() {
            let last = self.next_beat(&mut heart, false);
            if area.beat(&last).is_err_and(|error| error.is_refusal()) {
                self.answer(Event::Lost { admission });
            }
        }
    }

    pub(super) fn listen(&self, epoch: u64, number: u64, mounts: &[Process<u64>]) {
        let failure = match self.hear(epoch, number, mounts) {
            Ok(Heard::Silence) => return self.succeed("listen", Event::Silent { number }),
            Ok(heard) => self.describe(&heard),
            Err(error) => error.to_string(),
        };
        // What it has heard may be the one that has ended this claim.
        if self.goes_on(number) {
            self.fail("listen", failure);
            self.answer(Event::Failed { epoch });
        }
    }

    pub(super) fn hear(
        &self,
        epoch: u64,
        number: u64,
        mounts: &[Process<u64>],
    ) -> Result<Heard, HeartbeatError> {
        let Process { node, incarnation } = self.host.me;
        let me = Beat { node, incarnation, epoch, count: 0, goes_on: true, name: String::new() };
        let (mut area, first) = self.calls.during(number, || {
            let mut area = self.open_area()?;
            area.slots().map(|first| (area, first))
        })?;
        let mut listener = Listener::new(Nanos::now(), first);
        while self.goes_on(number) {
            let began = Nanos::now();
            let slots = self.calls.during(number, || area.slots())?;
            let is_listed =
                |beat: &Beat| mounts.contains(&Process { node: beat.node, incarnation: beat.incarnation });
            match listener.look((began, Nanos::now()), slots, &me, is_listed) {
                Heard::NothingYet => thread::sleep(BEAT_EVERY / 4),
                heard => return Ok(heard),
            }
        }
        Ok(Heard::NothingYet)
    }

    pub(super) fn describe(&self, heard: &Heard) -> String {
        let lun = self.host.lun.display();
        match heard {
            Heard::Stranger(beat) => format!(
                "{lun} is in use by node {} (process {}), which this cluster's registry does not list: is the LUN presented to another cluster?",
                beat.name, beat.incarnation
            ),
            Heard::Noise(slot) => {
                format!(
                    "something writes to the heartbeat area of {lun} (slot {slot}) that is no node of this volume"
                )
            }
            Heard::Later(beat) => format!(
                "{lun} was coordinated in epoch {}, of which the registry does not know (node {} has written that): was the registry restored \
                 from a backup?",
                beat.epoch, beat.name
            ),
            Heard::NothingYet | Heard::Silence => String::new(),
        }
    }
}
