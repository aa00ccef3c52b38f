//! Disks whose backings are being opened.

use std::time::Duration;

use tokio::sync::oneshot;
use weir_block::Nanos;
use weir_volume::{BackingKind, BackingOptions, OpenedBacking};

use super::Turning;
use crate::shard::answer;
use crate::shard::disk::Disk;
use crate::shard::dispatch::Target;
use crate::shard::messages::{self, DiskStatus, OpenDisk, Unopened};
use crate::shard::opener::{Opened, Opener};

/// After this time the opener's client gets the error that the backing does not answer. The opening goes on, and the next
/// attempt joins it.
const PATIENCE: Duration = Duration::from_secs(10);

/// An opening is worth a word in the disk's state after this long.
const NOTICEABLE: Duration = Duration::from_secs(1);

/// A disk whose backing is being opened.
pub(super) struct Opening {
    number: u64,
    open: Box<OpenDisk>,
    since: Nanos,
    /// The client that waits for it; `None` if the disk was released meanwhile, or `PATIENCE` is over.
    waiting: Option<oneshot::Sender<messages::Opening>>,
}

impl Opening {
    fn is_wanted(&self) -> bool {
        self.waiting.as_ref().is_some_and(|waiting| !waiting.is_closed())
    }

    /// The backing that was opened for `self` fits `other`. If the disk was deleted and created again meanwhile, the path
    /// leads to another file (P4); and an opening that has checked another volume, or none, has not checked this one.
    fn fits(&self, other: &OpenDisk) -> bool {
        let file =
            |open: &OpenDisk| (open.id, open.backing.clone(), open.volume, open.size, open.logical_block);
        file(&self.open) == file(other)
    }

    fn answer(&mut self, result: messages::Opening) {
        if let Some(waiting) = self.waiting.take() {
            answer(waiting, result);
        }
    }
}

/// Most backings at once that are only opened to see whether that is possible, those that hang included (P10). Fewer than the
/// opener has room for: disks that are to be served come first.
const MOST_TRIALS: usize = 8;

/// Most of them that one volume has while its storage does not answer: others are to be looked at as well. More than one, because
/// a single file may be at fault.
const MOST_HANGING: usize = 2;

/// A storage that has not opened a file after this long does not answer.
const HANGS: Duration = Duration::from_secs(1);

/// A disk's backing that is only opened to see whether that is possible.
pub(super) struct Trial {
    number: u64,
    disk: String,
    backing: BackingKind,
    /// What is checked when it is opened: its volume, size and block size.
    checks: Checks,
    since: Nanos,
    /// Who wants to know.
    waiting: Vec<oneshot::Sender<Result<(), Unopened>>>,
}

type Checks = (Option<u64>, Option<u64>, Option<u32>);

impl Turning {
    /// Opens a backing, and closes it again. Joins an earlier trial that goes on, whether or not anybody waits for it.
    pub(super) fn try_open(
        &mut self,
        disk: String,
        backing: BackingKind,
        options: BackingOptions,
        done: oneshot::Sender<Result<(), Unopened>>,
    ) {
        let checks = (options.volume, options.size, options.logical_block);
        let same =
            |trial: &&mut Trial| (&trial.disk, &trial.backing, trial.checks) == (&disk, &backing, checks);
        if let Some(earlier) = self.trials.iter_mut().find(same) {
            earlier.waiting.retain(|waiting| !waiting.is_closed());
            earlier.waiting.push(done);
            return;
        }
        let since = self.reactor.now();
        if let Err(refused) = self.has_room_for_trial(options.volume, since) {
            return answer(done, Err(refused));
        }
        self.last_opening += 1;
        let number = self.last_opening;
        match self.opener.start(number, &backing, options) {
            Ok(()) => {
                let waiting = vec![done];
                self.trials.push(Trial { number, disk, backing, checks, since, waiting });
            }
            Err(reason) => answer(done, Err(Unopened::Fails(reason))),
        }
    }

    fn has_room_for_trial(&self, volume: Option<u64>, now: Nanos) -> Result<(), Unopened> {
        let hang =
            |trial: &&Trial| volume.is_some() && trial.checks.0 == volume && trial.since + HANGS <= now;
        let hanging = self.trials.iter().filter(hang).count();
        if hanging >= MOST_HANGING {
            let reason = format!("its volume does not answer: {hanging} other files of it are being opened");
            return Err(Unopened::Fails(reason));
        }
        if self.trials.len() >= MOST_TRIALS {
            let reason = format!("{MOST_TRIALS} other backings are being looked at and have not answered");
            return Err(Unopened::Busy(reason));
        }
        Ok(())
    }

    fn end_trial(&mut self, opened: Opened) {
        if let Some(index) = self.trials.iter().position(|trial| trial.number == opened.number) {
            let outcome = opened.result.as_ref().map(drop).map_err(|error| Unopened::Fails(error.clone()));
            for waiting in self.trials.swap_remove(index).waiting {
                answer(waiting, outcome.clone());
            }
        }
        Opener::discard(opened);
    }

    /// Has a disk's backing opened; the rest follows when that is done. The replica stays meanwhile: it may be the only copy
    /// of the log.
    pub(super) fn open(&mut self, open: Box<OpenDisk>, done: oneshot::Sender<messages::Opening>) {
        if self.stopping.is_some() {
            return answer(done, Err("the node is stopping".into()));
        }
        if self.find(&open.disk).is_some() {
            return answer(done, Err("the disk is open already".into()));
        }
        if self.is_opening(&open.disk) {
            return answer(done, Err("the disk is being opened already".into()));
        }
        let since = self.reactor.now();
        // An earlier attempt's opening goes on although its client has gone.
        let earlier = self.openings.iter_mut().find(|one| one.open.disk == open.disk && one.fits(&open));
        if let Some(earlier) = earlier {
            (earlier.open, earlier.since, earlier.waiting) = (open, since, Some(done));
            return;
        }
        self.last_opening += 1;
        let number = self.last_opening;
        match self.opener.start(number, &open.backing, Disk::backing_options(&open, &self.config)) {
            Ok(()) => self.openings.push(Opening { number, open, since, waiting: Some(done) }),
            Err(reason) => answer(done, Err(reason)),
        }
    }

    /// Goes on with the disks whose backings have been opened. Whether there were any.
    pub(super) fn take_opened(&mut self) -> bool {
        let mut any = false;
        while let Some(opened) = self.opener.take() {
            any = true;
            let Some(index) = self.openings.iter().position(|one| one.number == opened.number) else {
                self.end_trial(opened);
                continue;
            };
            let mut opening = self.openings.swap_remove(index);
            if !opening.is_wanted() {
                Opener::discard(opened);
                continue;
            }
            let Opened { result, .. } = opened;
            let result = result.and_then(|backing| self.put_together(&opening.open, backing));
            opening.answer(result);
        }
        any
    }

    fn put_together(&mut self, open: &OpenDisk, backing: Box<dyn OpenedBacking>) -> messages::Opening {
        let file = backing.file();
        let backing = backing.attach(&mut self.reactor).map_err(|error| error.to_string())?;
        let (inheritance, store) = self.inherit(open)?;
        let put_together = Disk::new(&mut self.reactor, &self.config, open, backing, inheritance, store);
        let disk = match put_together {
            Ok(disk) => disk,
            Err(error) => {
                let reason = format!("{error} ({} bytes)", open.log_bytes);
                self.retire(error.store.map(|store| *store));
                return Err(reason);
            }
        };
        let (clients, layers) = (disk.clients(), disk.layers());
        let counters = disk.counters();
        let slot = self.disks.insert(disk);
        self.pulse.name(slot, Some((&open.disk, counters)));
        clients.for_each(|owner| self.dispatch.set(owner, Target::Clients(slot)));
        layers.for_each(|owner| self.dispatch.set(owner, Target::Layers(slot)));
        Ok(file)
    }

    /// Whether a client waits for the disk's opening.
    pub(super) fn is_opening(&self, disk: &str) -> bool {
        self.openings.iter().any(|one| one.open.disk == disk && one.is_wanted())
    }

    /// The disk is to be closed, or belongs to another node: a client that waits for its opening gets `reason`, and the
    /// opened backing is closed.
    pub(super) fn stop_opening(&mut self, disk: Option<&str>, reason: &str) {
        for one in &mut self.openings {
            if disk.is_none_or(|disk| one.open.disk == disk) {
                one.answer(Err(reason.to_owned()));
            }
        }
    }

    /// Answers clients that have waited for too long.
    pub(super) fn expire_openings(&mut self) {
        if self.openings.is_empty() {
            return;
        }
        let now = self.reactor.now();
        for one in self.openings.iter_mut().filter(|one| now >= one.since + PATIENCE) {
            let backing = one.open.backing.to_string();
            one.answer(Err(format!(
                "its backing {backing} has not been opened for {PATIENCE:?}: the storage does not answer"
            )));
        }
    }

    /// The time of the next call of [`Turning::expire_openings`].
    pub(super) fn openings_deadline(&self) -> Nanos {
        let waited = self.openings.iter().filter(|one| one.waiting.is_some());
        waited.map(|one| one.since + PATIENCE).min().unwrap_or(Nanos::NEVER)
    }

    /// The state of disks that are being opened, for people.
    pub(super) fn openings_status(&self) -> impl Iterator<Item = DiskStatus> {
        let now = self.reactor.now();
        self.openings.iter().filter(|one| one.is_wanted()).map(move |one| {
            let OpenDisk { disk, backing, configuration, log_bytes, .. } = &*one.open;
            let lasts = now - one.since;
            let reason = if lasts < NOTICEABLE {
                String::new()
            } else {
                format!("its backing {backing} has not been opened for {} s", lasts.as_secs())
            };
            DiskStatus {
                disk: disk.clone(),
                role: "owner".into(),
                state: DiskStatus::OPENING.into(),
                reason,
                epoch: configuration.epoch,
                effective: configuration.effective(),
                // The log that it goes on from is still counted as a replica's.
                log_bytes: if self.has_replica(disk) { 0 } else { *log_bytes },
                dirty_bytes: self.dirty_bytes_of_replica(disk),
                ..DiskStatus::default()
            }
        })
    }
}
