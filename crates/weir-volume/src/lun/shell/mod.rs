//! Carries out what a [`Claim`] wants of the LUN: heartbeat, fences, mount. What it wants of the registry and of this node's owners is
//! handed out.
//!
//! Whatever touches the LUN blocks for as long as the LUN does not answer, so each of these actions has a thread of its own, and the
//! claim goes on meanwhile. Its user owns the claim's thread: it calls [`Shell::step`] with what comes from outside, [`Shell::take`] with
//! each answer that comes from the channel, and [`Shell::tick`] once a second.
//!
//! Before it lets this node claim, it looks at the heartbeat area: a registry that is older than the LUN has lost processes that may
//! still have the filesystem mounted, and a claim in it would only make it look newer.

mod calls;
mod failures;
mod heart;
mod look;
mod mount;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

use super::claim::{Claim, Effect, Event, Phase, Process, Record};
use super::fence_command::Target;
use super::fencing::Fencing;
use super::filesystem::mount::exclusive;
use super::filesystem::{FilesystemError, Mounted};
use super::heartbeat::VolumeId;
use super::identity::{are_different, identity_at, is_held, paths_of};
use super::reservations::ReservationError;
use crate::backing::{Mark, Trace};
use crate::planted::Planted;
use calls::Calls;
use failures::Failures;
use heart::Heart;

/// An unmount that lasts for longer keeps the volume from nobody: others take it over, with a fence.
const SLOW_UNMOUNT: Duration = Duration::from_secs(15);
/// Longest time for which an unmount waits for work on files that this process has begun.
const OWN_WORK: Duration = Duration::from_secs(60);
/// A process that stood still finds its own calls late for a moment.
const LATE_LOOKS: u32 = 3;
/// A record that is older than the LUN for this long is not merely late.
const OUTDATED: Duration = Duration::from_secs(5);
/// Pause between two looks whether the LUN still has this node's key, and at what is mounted: a node that only reads, or does
/// nothing, is refused nothing.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// What the operator hears of a refusal that a disk's request met first.
const GIVEN_BACK: &str =
    "this node gives the volume back: the LUN refused its I/O, or the filesystem has shut down";

/// This node's side of a volume's LUN.
#[derive(Clone, Debug)]
pub struct Host {
    /// This process.
    pub me: Process<u64>,
    /// This node's name.
    pub name: String,
    /// The volume.
    pub volume: VolumeId,
    /// The LUN's path on this host.
    pub lun: PathBuf,
    /// The LUN's identity.
    pub identity: String,
    /// First byte of the heartbeat area.
    pub area: u64,
    /// Keeps nodes from the LUN.
    pub fencing: Fencing,
    /// Former processes of this node that may have used the LUN, all ended: what the kernel still does for them is awaited.
    pub former: Vec<Mark>,
    /// A LUN that has not answered for longer does not answer this node: others are to coordinate the volume.
    pub answer_timeout: Duration,
    /// Where other paths of this host to the LUN may be, by which former processes may have used it; empty: all devices.
    pub devices: Vec<PathBuf>,
}

/// What comes from the threads, for [`Shell::take`].
#[derive(Debug)]
pub enum Answer {
    /// An action has ended.
    Event(Event<u64>),
    /// The look at the area that a wish of this number began. The epochs on the LUN permit a claim on this revision.
    Permitted {
        /// Of the wish.
        wish: u64,
        /// The record's, on which the wish was decided.
        revision: u64,
    },
    /// The LUN knows a later epoch than this record has.
    Outdated {
        /// The record's revision.
        revision: u64,
        /// What an operator should know if that record is the present one.
        text: String,
    },
    /// Something that an operator should know; empty: no more.
    Notice(String),
}

/// What the user of a shell has to do.
#[derive(Debug)]
pub enum Output {
    /// As [`Effect::Propose`].
    Propose {
        /// Of the answer.
        number: u64,
        /// The revision that is replaced.
        revision: u64,
        /// The new content.
        to: Record<u64>,
    },
    /// As [`Effect::DropLeases`]. The answer is [`Event::LeasesDropped`], when nothing that this process has issued to the LUN is on its way
    /// there, block I/O for other nodes included.
    DropLeases,
    /// Coordinate with this filesystem.
    Serve {
        /// For messages.
        epoch: u64,
        /// The unmount waits for the last copy. So whatever has a file of it open keeps one, and block I/O for other nodes keeps one
        /// until it has ended.
        mounted: Arc<Mounted>,
    },
    /// Answer nobody any more, and drop every copy of the mount once what uses it has ended.
    StopServing,
    /// A process was fenced, for this node's claim.
    Fenced(Process<u64>),
    /// Show this to the operator; empty: what was shown is over.
    Notice(String),
}

/// A claim with its threads.
#[derive(Debug)]
pub struct Shell {
    claim: Claim<u64>,
    /// The names of nodes, for the fence command.
    pub names: BTreeMap<u64, String>,
    shared: Arc<Shared>,
    /// Actions for which there was no thread.
    waiting: Vec<Action>,
    /// The number of the last admission.
    admission: u64,
    /// The last record.
    revision: u64,
    record: Record<u64>,
    /// This process has proposed a record without itself.
    has_left: bool,
    /// Numbers the wishes of whoever decides: an answer to an earlier one does not count. A wish that is repeated on the same revision is
    /// the same one: the LUN may take longer for an answer than the pause between two.
    wish: u64,
    /// The revision of the last wish, if that is to coordinate.
    wished: Option<u64>,
    /// The look at the area for it is still to begin.
    is_survey_due: bool,
    /// A revision whose epoch is older than the LUN's, and since when.
    outdated: Option<(u64, Nanos)>,
    /// When the key was looked for.
    checked: Nanos,
    /// When the LUN was looked at.
    looked: Nanos,
    /// Looks in a row that have found a call to the LUN that is late.
    late_looks: u32,
    /// Since when the filesystem is being unmounted, until that is known to be slow.
    unmounts_since: Option<Nanos>,
}

/// What the threads use.
#[derive(Debug)]
struct Shared {
    host: Host,
    answers: Sender<Answer>,
    mounted: Mutex<Option<Arc<Mounted>>>,
    heart: Mutex<Heart>,
    /// Calls of a claim that wait for the LUN.
    calls: Calls,
    /// The number of the heartbeat that goes on; 0: none.
    beating: AtomicU64,
    /// A thread looks at the heartbeat area: one at a time, as the LUN may not answer (P10).
    is_surveying: AtomicBool,
    /// A thread looks for the key.
    is_checking: AtomicBool,
    /// A thread looks at the LUN.
    is_looking: AtomicBool,
    /// Failures of each action.
    failures: Mutex<BTreeMap<String, Failures>>,
    /// The last record.
    record: Mutex<Record<u64>>,
    /// Since when an unmount waits for the kernel alone.
    released_since: Mutex<Option<Nanos>>,
    /// The shell is gone.
    is_over: AtomicBool,
}

/// An action of a thread. Whoever takes it out carries it out.
#[derive(Clone)]
struct Action(Arc<Mutex<Option<Work>>>);

type Work = Box<dyn FnOnce(&Shared) + Send>;

impl std::fmt::Debug for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Action")
    }
}

impl Shell {
    /// The shell of a process that has nothing to do with the LUN yet.
    #[must_use]
    pub fn new(host: Host, answers: Sender<Answer>) -> Shell {
        let claim = Claim::new(host.me, Planted::default());
        let shared = Arc::new(Shared {
            host,
            answers,
            mounted: Mutex::default(),
            heart: Mutex::default(),
            calls: Calls::default(),
            beating: AtomicU64::new(0),
            is_surveying: AtomicBool::new(false),
            is_checking: AtomicBool::new(false),
            is_looking: AtomicBool::new(false),
            failures: Mutex::default(),
            record: Mutex::default(),
            released_since: Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        Shell {
            claim,
            names: BTreeMap::new(),
            shared,
            waiting: Vec::new(),
            admission: 0,
            revision: 0,
            record: Record::default(),
            has_left: false,
            wish: 0,
            wished: None,
            is_survey_due: false,
            outdated: None,
            checked: Nanos::now(),
            looked: Nanos::now(),
            late_looks: 0,
            unmounts_since: None,
        }
    }

    /// A problem for the operator, in words; empty if there is none.
    #[must_use]
    pub fn trouble(&self) -> String {
        self.shared.trouble()
    }

    /// The state, for operators.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.claim.phase()
    }

    /// This node is to coordinate the volume, and nothing has ended that since: see [`Claim::is_wanted`].
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.claim.is_wanted()
    }

    /// Keeps nodes from the LUN.
    #[must_use]
    pub fn fencing(&self) -> &Fencing {
        &self.shared.host.fencing
    }

    /// Begins again what could not be begun, and looks from time to time whether this node is still registered, and at the LUN.
    pub fn tick(&mut self) {
        for action in std::mem::take(&mut self.waiting) {
            self.start(action);
        }
        self.survey();
        let is_due =
            self.is_admitted() && self.fencing().has_key() && Nanos::now() >= self.checked + CHECK_EVERY;
        if is_due && !self.shared.is_checking.swap(true, Ordering::Relaxed) {
            let admission = self.admission;
            self.checked = Nanos::now();
            self.begin(move |shared| shared.check_key(admission));
        }
        self.look_at_lun();
    }

    /// Whether [`Event::Stuck`] is due. It is to be called once a second.
    ///
    /// A mount is given up only where nothing but the LUN itself keeps nodes away. A LUN may hang for all nodes, and the first one that it
    /// answers fences this one: a command would end the host, with its guests.
    pub fn is_stuck(&mut self) -> bool {
        let limit = self.shared.host.answer_timeout;
        let oldest = self.shared.calls.oldest(self.shared.beating.load(Ordering::Relaxed));
        let is_late = oldest.is_some_and(|since| Nanos::now() >= since + limit);
        self.late_looks = if is_late { self.late_looks + 1 } else { 0 };
        let is_silent = self.late_looks >= LATE_LOOKS;
        match is_silent {
            true => self.shared.report("answer", format!("the LUN has not answered this node for {limit:?}")),
            false => self.shared.is_well("answer"),
        }
        let has_mount = matches!(self.phase(), Phase::Mounting | Phase::Serving | Phase::Draining);
        let may_give_up = !has_mount || self.fencing().has_key() && !self.fencing().has_command();
        self.is_unmount_slow() || is_silent && may_give_up
    }

    /// Whether an unmount has lasted for long by now, beside this process's own work on files, for which it waits.
    /// Reports it once.
    fn is_unmount_slow(&mut self) -> bool {
        let now = Nanos::now();
        let is_going = self.phase() == Phase::Draining;
        self.unmounts_since = self.unmounts_since.filter(|_| is_going);
        let kernel_since = *lock(&self.shared.released_since);
        let is_slow = |since: &mut Nanos| {
            now >= *since + OWN_WORK + SLOW_UNMOUNT
                || kernel_since.is_some_and(|since| now >= since + SLOW_UNMOUNT)
        };
        self.unmounts_since.take_if(is_slow).is_some()
    }

    /// Takes an event from outside into account, begins what follows from it, and returns what is left to the user.
    pub fn step(&mut self, event: Event<u64>) -> Vec<Output> {
        match event {
            Event::Seen { revision, record } => self.seen(revision, record),
            Event::Wanted { wanted: true, revision } => {
                if self.wished.replace(revision) != Some(revision) {
                    self.wish += 1;
                }
                self.is_survey_due = true;
                self.survey();
                Vec::new()
            }
            Event::Wanted { wanted: false, .. } => {
                self.wish += 1;
                (self.wished, self.is_survey_due) = (None, false);
                self.decide(event)
            }
            event => self.decide(event),
        }
    }

    /// The LUN has refused I/O of this node: another node has fenced it. Whatever was issued under an earlier admission counts, too: to be
    /// admitted once more does no harm.
    pub fn refused(&mut self) -> Vec<Output> {
        if self.phase() == Phase::Serving {
            self.shared.report("look", GIVEN_BACK.to_owned());
        }
        self.decide(Event::Lost { admission: self.admission })
    }

    /// This node's session has ended, and there is another one. Meanwhile a node that has taken over its disks may have had it fenced by a
    /// command, of which the LUN tells nothing: I/O of a node whose port is closed fails as that of one without a path. So it has itself
    /// admitted again. A coordinator is on the record's list, which tells it.
    /// `None`: not now, because this node is on its way to coordinate the volume, or on its way back.
    pub fn session_was_lost(&mut self) -> Option<Vec<Output>> {
        if !self.fencing().has_command() {
            return Some(Vec::new());
        }
        (self.phase() == Phase::Absent).then(|| self.decide(Event::Lost { admission: self.admission }))
    }

    /// Whether this node may write to the LUN, as far as it knows.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.claim.is_admitted()
    }

    /// Takes an answer of a thread into account, as [`Shell::step`] does.
    pub fn take(&mut self, answer: Answer) -> Vec<Output> {
        match answer {
            Answer::Event(event) => {
                if let Event::Admitted { number } = event {
                    self.admission = number;
                }
                let fenced = match &event {
                    Event::Fenced { process, .. } => Some(Output::Fenced(*process)),
                    _ => None,
                };
                fenced.into_iter().chain(self.decide(event)).collect()
            }
            Answer::Outdated { revision, text } => self.outdated(revision, text),
            Answer::Permitted { wish, revision } if wish == self.wish => {
                self.decide(Event::Wanted { wanted: true, revision })
            }
            Answer::Permitted { .. } => Vec::new(),
            Answer::Notice(text) => vec![Output::Notice(text)],
        }
    }

    /// Looks at the area for the last wish, unless a look is under way: the next one begins when that has ended.
    fn survey(&mut self) {
        let Some(revision) = self.wished.filter(|_| self.is_survey_due) else { return };
        if self.claim.is_wanted() {
            // It was permitted, and whoever wished that repeats it.
            self.is_survey_due = false;
        } else if !self.shared.is_surveying.swap(true, Ordering::Relaxed) {
            self.is_survey_due = false;
            let (wish, epoch) = (self.wish, self.record.epoch);
            self.begin(move |shared| shared.survey(wish, revision, epoch));
        }
    }

    fn seen(&mut self, revision: u64, record: Record<u64>) -> Vec<Output> {
        if revision <= self.revision {
            return Vec::new();
        }
        let me = self.shared.host.me;
        let is_fenced = self.record.mounts.contains(&me) && !record.mounts.contains(&me) && !self.has_left;
        (self.revision, self.record) = (revision, record.clone());
        lock(&self.shared.record).clone_from(&record);
        self.shared.forget(&record);
        let mut outputs = self.decide(Event::Seen { revision, record });
        if is_fenced {
            // Somebody else has taken this process from the list: it has a proof, whatever the LUN answers here.
            outputs.extend(self.decide(Event::Lost { admission: self.admission }));
        }
        outputs
    }

    /// A process that stood still for a while knows an old record for a moment: only one that stays is told of.
    fn outdated(&mut self, revision: u64, text: String) -> Vec<Output> {
        if revision != self.revision {
            return Vec::new();
        }
        let since = match self.outdated {
            Some((of, since)) if of == revision => since,
            _ => Nanos::now(),
        };
        self.outdated = Some((revision, since));
        if Nanos::now() < since + OUTDATED {
            return Vec::new();
        }
        self.shared.told("survey", &text)
    }

    fn decide(&mut self, event: Event<u64>) -> Vec<Output> {
        let mut effects = Vec::new();
        self.claim.step(event, &mut effects);
        effects.into_iter().filter_map(|effect| self.carry_out(effect)).collect()
    }

    fn carry_out(&mut self, effect: Effect<u64>) -> Option<Output> {
        match effect {
            Effect::Propose { number, revision, to } => {
                self.has_left = !to.mounts.contains(&self.shared.host.me);
                return Some(Output::Propose { number, revision, to });
            }
            Effect::DropLeases => return Some(Output::DropLeases),
            Effect::Serve { epoch } => {
                let mounted = lock(&self.shared.mounted).clone();
                return mounted.map(|mounted| Output::Serve { epoch, mounted });
            }
            Effect::StopServing => return Some(Output::StopServing),
            Effect::Vacate => self.begin(Shared::vacate),
            Effect::Admit { number } => self.begin(move |shared| shared.admit(number)),
            Effect::Fence { process, epoch } => {
                let target = self.target(process);
                self.begin(move |shared| shared.fence(process, target, epoch));
            }
            Effect::Beat { epoch, number } => {
                self.shared.beating.store(number, Ordering::Relaxed);
                let admission = self.admission;
                self.begin(move |shared| shared.beat(epoch, number, admission));
            }
            Effect::Listen { epoch, number } => {
                let mounts: Vec<Process<u64>> = self.record.mounts.iter().copied().collect();
                self.begin(move |shared| shared.listen(epoch, number, &mounts));
            }
            Effect::StopBeating => self.shared.beating.store(0, Ordering::Relaxed),
            Effect::Mount { epoch } => self.begin(move |shared| shared.mount(epoch)),
            Effect::Unmount => {
                self.unmounts_since = Some(Nanos::now());
                self.begin(Shared::unmount);
            }
        }
        None
    }

    /// Whom the fence command is to fence. A name that another host has would be no proof.
    fn target(&self, process: Process<u64>) -> Result<Target, String> {
        let Process { node, incarnation } = process;
        let Some(name) = self.names.get(&node) else {
            return Err(format!("host {node} may have the filesystem mounted, and no node has this number"));
        };
        let has_name = |other: &&String| *other == name;
        if self.names.values().filter(has_name).count() > 1 || *name == self.shared.host.name {
            return Err(format!(
                "host {node} may have the filesystem mounted, and its name {name} is another host's, too"
            ));
        }
        Ok(Target { name: name.clone(), node, incarnation })
    }

    fn begin(&mut self, work: impl FnOnce(&Shared) + Send + 'static) {
        self.start(Action(Arc::new(Mutex::new(Some(Box::new(work))))));
    }

    fn start(&mut self, action: Action) {
        let (shared, mine) = (Arc::clone(&self.shared), action.clone());
        let started = thread::Builder::new().name("weir-lun".into()).spawn(move || {
            let work = lock(&mine.0).take();
            if let Some(work) = work {
                work(&shared);
            }
        });
        if let Err(error) = started {
            self.shared.notice(format!("cannot start a thread, and tries again: {error}"));
            self.waiting.push(action);
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.beating.store(0, Ordering::Relaxed);
    }
}

/// Nothing that panics holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether nothing of former processes is under way by another path to the LUN. A path that cannot be opened has nothing to show.
fn is_unused(path: &Path, former: &[Mark]) -> Result<(), String> {
    let in_use = |why: &str| Err(format!("{}, another path to it, {why}", path.display()));
    if former.iter().any(|mark| matches!(mark.probe(path), Ok(Trace::InFlight))) {
        return in_use("has requests of a former process under way");
    }
    // A path of a multipath device is that one's.
    if is_held(path) || !exclusive(path).is_err_and(|error| error.is_busy()) {
        return Ok(());
    }
    in_use("is mounted, perhaps by a former process that waits for it")
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn answer(&self, event: Event<u64>) {
        // It fails when the user is gone.
        let _ = self.answers.send(Answer::Event(event));
    }

    fn notice(&self, text: String) {
        let _ = self.answers.send(Answer::Notice(text));
    }

    /// Former processes have ended: what the kernel still does for them shows by their marks, a mount of theirs by an exclusive open, and a
    /// command that may lift a fence by its lock.
    fn vacate(&self) {
        while !self.is_over() {
            match self.is_vacated() {
                Ok(()) => return self.succeed("vacate", Event::Vacated),
                Err(why) => {
                    self.fail("vacate", format!("{} is not used yet: {why}", self.host.lun.display()));
                }
            }
        }
    }

    fn is_vacated(&self) -> Result<(), String> {
        let Host { former, lun, fencing, identity, devices, .. } = &self.host;
        fencing.await_no_admission()?;
        let is_other = |path: &&PathBuf| path.canonicalize().ok() != lun.canonicalize().ok();
        paths_of(identity, devices).iter().filter(is_other).try_for_each(|path| is_unused(path, former))?;
        for mark in former {
            match mark.probe(lun).map_err(|error| error.to_string())? {
                Trace::Gone => {}
                Trace::InFlight => return Err("a former process of this node has requests under way".into()),
                Trace::Unknown => {
                    return Err("this host does not show whether a former process uses it".into());
                }
            }
        }
        exclusive(lun).map(drop).map_err(|error| error.to_string())
    }

    /// The path may lead to a copy of the LUN by now, which has the same filesystem and the same heartbeats: what it shows proves nothing.
    fn check_not_copy(&self) -> Result<(), String> {
        let Host { lun, identity, .. } = &self.host;
        let copy = identity_at(lun).filter(|found| are_different(identity, found));
        let refused = |identity| FilesystemError::Copy { path: lun.clone(), identity }.to_string();
        copy.map_or(Ok(()), |found| Err(refused(found)))
    }

    fn admit(&self, number: u64) {
        match self.check_not_copy().and_then(|()| self.host.fencing.admit(&self.host.name)) {
            Ok(()) => {
                self.is_well("check");
                self.succeed("admit", Event::Admitted { number });
            }
            Err(text) => {
                self.fail("admit", text);
                self.answer(Event::NotAdmitted { number });
            }
        }
    }

    fn check_key(&self, admission: u64) {
        match self.host.fencing.check() {
            Ok(()) => self.is_well("check"),
            Err(error @ ReservationError::NotRegistered { .. }) => {
                self.report("check", error.to_string());
                self.answer(Event::Lost { admission });
            }
            Err(error) => self.fail("check", error.to_string()),
        }
        self.is_checking.store(false, Ordering::Relaxed);
    }

    fn fence(&self, process: Process<u64>, target: Result<Target, String>, epoch: u64) {
        let action = format!("fence {}", process.node);
        // Otherwise another node has claimed the volume, or an operator's word has taken the process from the list.
        let is_asked = || {
            let record = lock(&self.record);
            let is_mine = record.epoch == epoch && record.coordinator == Some(self.host.me);
            is_mine && record.mounts.contains(&process) && !self.is_over()
        };
        for attempt in 1.. {
            match self.host.fencing.fence(process, target.clone(), epoch, || !is_asked()) {
                Ok(()) => return self.succeed(&action, Event::Fenced { process, epoch }),
                Err(text) => self.fail(&action, text),
            }
            if !is_asked() {
                return;
            }
            if !self.stays(&action, epoch, attempt) {
                return self.answer(Event::Failed { epoch });
            }
        }
    }
}
