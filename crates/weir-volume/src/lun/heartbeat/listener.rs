//! What a look at the heartbeat area for a while shows: silence, or somebody.

use std::time::Duration;

use weir_block::Nanos;

use super::layout::{Beat, Slot};

/// Pause between two heartbeats of a coordinator. Each is two seeks of a disk with a mechanism: at half of this pause, they took two
/// percent of its time.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);
/// The time for which the area must not change: a heartbeat may be late by 1.5 s.
pub const SILENCE: Duration = Duration::from_millis(2500);

/// What was heard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing yet; look again.
    NothingYet,
    /// Nobody but listed processes has written for the whole period.
    Silence,
    /// A process that the registry does not list writes to the area.
    Stranger(Beat),
    /// Something writes to this slot of the area, and it is no heartbeat of this volume.
    Noise(usize),
    /// The LUN has been coordinated in this epoch by another process, or in a later one. This claim is over, or the registry does not know
    /// of that: it was restored from a backup, or is another cluster's.
    Later(Beat),
}

/// Compares looks at the area with each other.
///
/// One change is not enough for a stranger: a coordinator that has left the list may have had a heartbeat on its way, and a look may
/// find a block half written. It only makes the period begin again.
#[derive(Debug)]
pub struct Listener {
    /// The last change by somebody who is not listed.
    since: Nanos,
    /// The last look, and such changes of each slot.
    slots: Vec<(Slot, u32)>,
}

impl Listener {
    /// Begins with a first look, which ended at `now`.
    #[must_use]
    pub fn new(now: Nanos, slots: Vec<Slot>) -> Listener {
        Listener { since: now, slots: slots.into_iter().map(|slot| (slot, 0)).collect() }
    }

    /// Takes another look into account, which began at `began` and ended at `ended`: it may have found what was written in between. `me` is this process's own last heartbeat. `is_listed`: the registry has the
    /// process among those that may have the filesystem mounted, so that the claim fences it.
    pub fn look(
        &mut self,
        (began, ended): (Nanos, Nanos),
        slots: Vec<Slot>,
        me: &Beat,
        is_listed: impl Fn(&Beat) -> bool,
    ) -> Heard {
        for slot in &slots {
            if let Slot::Beat(beat) = slot
                && (beat.epoch > me.epoch || beat.epoch == me.epoch && !is_same(beat, me))
            {
                return Heard::Later(beat.clone());
            }
        }
        for (number, after) in slots.into_iter().enumerate() {
            let Some((before, changes)) = self.slots.get_mut(number) else { break };
            if *before == after {
                continue;
            }
            let is_known = match &after {
                // The last one of a process that has unmounted.
                Slot::Beat(beat) => !beat.goes_on || is_same(beat, me) || is_listed(beat),
                Slot::Other(_) | Slot::Empty => false,
            };
            if !is_known {
                self.since = ended;
                *changes += 1;
                if *changes > 1 {
                    return match after {
                        Slot::Beat(beat) => Heard::Stranger(beat),
                        Slot::Other(_) | Slot::Empty => Heard::Noise(number),
                    };
                }
            }
            *before = after;
        }
        if began - self.since >= SILENCE { Heard::Silence } else { Heard::NothingYet }
    }
}

fn is_same(one: &Beat, other: &Beat) -> bool {
    (one.node, one.incarnation) == (other.node, other.incarnation)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: u64 = 1;
    const LISTED: u64 = 2;
    const STRANGER: u64 = 3;

    fn beat(node: u64, epoch: u64, count: u64) -> Beat {
        Beat { node, incarnation: 1, epoch, count, goes_on: true, name: format!("n{node}") }
    }

    /// Looks at an area with these slots, one after the other, at these times after the first.
    fn look(looks: &[(&[Slot], Duration)]) -> Heard {
        let mut listener = Listener::new(Nanos(0), looks[0].0.to_vec());
        let mut heard = Heard::NothingYet;
        for (slots, time) in looks {
            assert_eq!(heard, Heard::NothingYet);
            let now = Nanos(0) + *time;
            heard = listener.look((now, now), slots.to_vec(), &beat(ME, 4, 1), |beat| beat.node == LISTED);
        }
        heard
    }

    fn slot(node: u64, epoch: u64, count: u64) -> Slot {
        Slot::Beat(beat(node, epoch, count))
    }

    const ZERO: Duration = Duration::ZERO;
    const BEFORE: Duration = Duration::from_millis(2499);

    #[test]
    fn silence_takes_its_time() {
        let slots: &[Slot] = &[Slot::Empty, Slot::Other(7), slot(STRANGER, 3, 7)];
        assert_eq!(look(&[(slots, BEFORE)]), Heard::NothingYet);
        assert_eq!(look(&[(slots, BEFORE), (slots, SILENCE)]), Heard::Silence);
    }

    #[test]
    fn only_this_process_and_listed_ones_may_write() {
        let before: &[Slot] = &[slot(ME, 4, 1), slot(LISTED, 3, 7)];
        let heard =
            |some: [Slot; 2], more: [Slot; 2]| look(&[(before, ZERO), (&some, BEFORE), (&more, SILENCE)]);
        let ours = |count| [slot(ME, 4, count), slot(LISTED, 3, count)];
        assert_eq!(heard(ours(8), ours(9)), Heard::Silence);
        // A slot is chosen by chance: a listed process may have this one's.
        let one_slot = |count| [slot(LISTED, 3, count), slot(LISTED, 3, count)];
        assert_eq!(heard(one_slot(8), one_slot(9)), Heard::Silence);
        let stranger = |count| [slot(STRANGER, 2, count), slot(LISTED, 3, 7)];
        assert_eq!(heard(stranger(1), stranger(2)), Heard::Stranger(beat(STRANGER, 2, 2)));
        let noise = |what| [slot(ME, 4, 1), Slot::Other(what)];
        assert_eq!(heard(noise(1), noise(2)), Heard::Noise(1));
        let alternately = look(&[(before, ZERO), (&noise(1), ZERO), (before, ZERO), (&noise(1), ZERO)]);
        assert_eq!(alternately, Heard::Noise(1));
    }

    #[test]
    fn one_late_heartbeat_makes_the_period_begin_again() {
        let before: &[Slot] = &[slot(STRANGER, 2, 1)];
        let late: &[Slot] = &[slot(STRANGER, 2, 2)];
        let second = Duration::from_secs(1);
        let looks = [(before, ZERO), (late, second), (late, SILENCE), (late, second + SILENCE)];
        assert_eq!(look(&looks[..3]), Heard::NothingYet);
        assert_eq!(look(&looks), Heard::Silence);
        // Not the last one of all: its process has unmounted.
        let last: &[Slot] = &[Slot::Beat(Beat { goes_on: false, ..beat(STRANGER, 2, 2) })];
        assert_eq!(look(&[(before, ZERO), (last, second), (last, SILENCE)]), Heard::Silence);
        // A block that is read half written.
        let torn: &[Slot] = &[Slot::Other(5)];
        let whole: &[Slot] = &[slot(LISTED, 3, 2)];
        let looks = [(before, ZERO), (torn, ZERO), (whole, second), (whole, SILENCE)];
        assert_eq!(look(&looks), Heard::Silence);
    }

    /// The LUN did not answer for a while.
    #[test]
    fn the_period_begins_when_a_look_has_ended() {
        let mut listener = Listener::new(Nanos(0), vec![slot(STRANGER, 2, 1)]);
        let mut look = |began: Duration, ended: Duration| {
            let times = (Nanos(0) + began, Nanos(0) + ended);
            listener.look(times, vec![slot(STRANGER, 2, 2)], &beat(ME, 4, 1), |_| false)
        };
        let second = Duration::from_secs(1);
        assert_eq!(look(ZERO, second * 5), Heard::NothingYet);
        assert_eq!(look(second * 5, second * 5), Heard::NothingYet);
        assert_eq!(look(second * 5 + SILENCE, second * 8), Heard::Silence);
    }

    #[test]
    fn a_registry_that_is_older_than_the_lun_is_found() {
        for late in [beat(LISTED, 5, 1), beat(LISTED, 4, 1), Beat { incarnation: 2, ..beat(ME, 4, 1) }] {
            let slots = [Slot::Empty, Slot::Beat(late.clone())];
            assert_eq!(look(&[(&slots, ZERO)]), Heard::Later(late));
        }
    }
}
