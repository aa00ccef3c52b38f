//! Carries out what a [`Claim`] wants of the LUN: heartbeat, fences, mount. What it wants of the registry and of this node's owners is
//! handed out.
//!
//! Whatever touches the LUN blocks for as long as the LUN does not answer, so each of these actions has a thread of its own, and the
//! claim goes on meanwhile. Its user owns the claim's thread: it calls [`Shell::step`] with what comes from outside, [`Shell::take`] with
//! each answer that comes from the channel, and [`Shell::tick`] once a second.
//!
//! Before it lets this node claim, it looks at the heartbeat area: a registry that is older than the LUN has lost processes that may
//! still have the filesystem mounted, and a claim in it would only make it look newer.

use std::collections::BTreeMap;
use std::path::PathBuf;
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
use super::heartbeat::area::in_file;
use super::heartbeat::listener::BEAT_EVERY;
use super::heartbeat::{Area, Beat, Heard, HeartbeatError, Listener, Slot, VolumeId};
use super::reservations::ReservationError;
use crate::backing::{Mark, Trace};
use crate::planted::Planted;

/// Pause before an action that failed is over, so that it is not begun again at once. It doubles each time, up to the longest: a node
/// without a path to the LUN never stops trying.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// Most attempts of an action in one epoch, before another node gets its turn. The first time it is one, and it doubles: an epoch for each
/// attempt would say nothing to anybody.
const MOST_ATTEMPTS: u32 = 16;
/// A record that is older than the LUN for this long is not merely late.
const OUTDATED: Duration = Duration::from_secs(5);
/// Pause between two looks whether the LUN still has this node's key: a node that only reads, or does nothing, is refused nothing.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// Pause between two looks at something that has to end.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

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
    /// First byte of the heartbeat area.
    pub area: u64,
    /// Keeps nodes from the LUN.
    pub fencing: Fencing,
    /// Former processes of this node that may have used the LUN, all ended: what the kernel still does for them is awaited.
    pub former: Vec<Mark>,
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
    /// Numbers the wishes of whoever decides: an answer to an earlier one does not count.
    wish: u64,
    /// A revision whose epoch is older than the LUN's, and since when.
    outdated: Option<(u64, Nanos)>,
    /// When the key was looked for.
    checked: Nanos,
}

/// What the threads use.
#[derive(Debug)]
struct Shared {
    host: Host,
    answers: Sender<Answer>,
    mounted: Mutex<Option<Arc<Mounted>>>,
    heart: Mutex<Heart>,
    /// The number of the heartbeat that goes on; 0: none.
    beating: AtomicU64,
    /// A thread looks for the key.
    is_checking: AtomicBool,
    /// Failures of each action.
    failures: Mutex<BTreeMap<String, Failures>>,
    /// The last record.
    record: Mutex<Record<u64>>,
    /// The shell is gone.
    is_over: AtomicBool,
}

/// What this process's slot says, kept while it is written: one heartbeat after the other.
#[derive(Debug, Default)]
struct Heart {
    /// The last epoch in which the LUN was coordinated, as far as this process knows. An attempt to coordinate it changes nothing of it,
    /// or the attempts of a stranger would make this cluster's own registry look old.
    epoch: u64,
    count: u64,
}

/// Failures in a row.
#[derive(Debug, Default)]
struct Failures {
    count: u32,
    /// What was told of the last one.
    text: String,
    /// The last epoch in which it has failed, and the number of epochs.
    epoch: u64,
    epochs: u32,
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
            beating: AtomicU64::new(0),
            is_checking: AtomicBool::new(false),
            failures: Mutex::default(),
            record: Mutex::default(),
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
            outdated: None,
            checked: Nanos::now(),
        }
    }

    /// The state, for operators.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.claim.phase()
    }

    /// Keeps nodes from the LUN.
    #[must_use]
    pub fn fencing(&self) -> &Fencing {
        &self.shared.host.fencing
    }

    /// Begins again what could not be begun, and looks from time to time whether this node is still registered.
    pub fn tick(&mut self) {
        for action in std::mem::take(&mut self.waiting) {
            self.start(action);
        }
        let is_due =
            self.is_admitted() && self.fencing().has_key() && Nanos::now() >= self.checked + CHECK_EVERY;
        if is_due && !self.shared.is_checking.swap(true, Ordering::Relaxed) {
            let admission = self.admission;
            self.checked = Nanos::now();
            self.begin(move |shared| shared.check_key(admission));
        }
    }

    /// Takes an event from outside into account, begins what follows from it, and returns what is left to the user.
    pub fn step(&mut self, event: Event<u64>) -> Vec<Output> {
        match event {
            Event::Seen { revision, record } => self.seen(revision, record),
            Event::Wanted { wanted: true, revision } => {
                self.wish += 1;
                let (wish, epoch) = (self.wish, self.record.epoch);
                self.begin(move |shared| shared.survey(wish, revision, epoch));
                Vec::new()
            }
            Event::Wanted { wanted: false, .. } => {
                self.wish += 1;
                self.decide(event)
            }
            event => self.decide(event),
        }
    }

    /// The LUN has refused I/O of this node: another node has fenced it. Whatever was issued under an earlier admission counts, too: to be
    /// admitted once more does no harm.
    pub fn refused(&mut self) -> Vec<Output> {
        self.decide(Event::Lost { admission: self.admission })
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
            Effect::Unmount => self.begin(Shared::unmount),
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

    /// An action has failed: says so once, and pauses.
    fn fail(&self, action: &str, text: String) {
        let pause = {
            let mut all = lock(&self.failures);
            let failures = all.entry(action.to_owned()).or_default();
            if failures.text != text {
                failures.text.clone_from(&text);
                self.notice(text);
            }
            failures.count += 1;
            PAUSE.saturating_mul(1 << (failures.count - 1).min(16)).min(LONGEST_PAUSE)
        };
        thread::sleep(pause);
    }

    /// An action has succeeded.
    fn succeed(&self, action: &str, event: Event<u64>) {
        self.is_well(action);
        self.answer(event);
    }

    /// An action is no trouble any more.
    fn is_well(&self, action: &str) {
        let mut all = lock(&self.failures);
        if all.remove(action).is_some() {
            self.notice(all.values().next().map(|other| other.text.clone()).unwrap_or_default());
        }
    }

    /// Notes a text that is to be shown, if it is another one than before.
    fn told(&self, action: &str, text: &str) -> Vec<Output> {
        let mut all = lock(&self.failures);
        let failures = all.entry(action.to_owned()).or_default();
        let is_news = failures.text != text;
        text.clone_into(&mut failures.text);
        is_news.then(|| Output::Notice(text.to_owned())).into_iter().collect()
    }

    /// What has failed on the way to a mount is over where another node has come further, or a former process is off the list.
    fn forget(&self, record: &Record<u64>) {
        let me = self.host.me;
        let is_others = record.coordinator.is_some_and(|one| one != me && record.mounts == [one].into());
        let is_over = |action: &str| match action.strip_prefix("fence ") {
            Some(node) => !record.mounts.iter().any(|one| one.node.to_string() == node),
            None => is_others && matches!(action, "beat" | "listen" | "mount" | "survey"),
        };
        let over: Vec<String> =
            lock(&self.failures).keys().filter(|action| is_over(action)).cloned().collect();
        over.iter().for_each(|action| self.is_well(action));
    }

    /// Whether an action that has failed in an epoch, for the `attempt`th time, is tried again in it: the more often, the more epochs it has
    /// failed in.
    fn stays(&self, action: &str, epoch: u64, attempt: u32) -> bool {
        let mut all = lock(&self.failures);
        let failures = all.entry(action.to_owned()).or_default();
        if failures.epoch != epoch {
            failures.epoch = epoch;
            failures.epochs += 1;
        }
        attempt < (1 << (failures.epochs - 1).min(MOST_ATTEMPTS.ilog2()))
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
        let Host { former, lun, fencing, .. } = &self.host;
        fencing.await_no_admission()?;
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

    fn admit(&self, number: u64) {
        match self.host.fencing.admit(&self.host.name) {
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
                let text = error.to_string();
                if !self.told("check", &text).is_empty() {
                    self.notice(text);
                }
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

    fn open_area(&self) -> Result<Area, HeartbeatError> {
        Area::open(&self.host.lun, self.host.area, self.host.volume)
    }

    /// Looks whether the registry's epoch is that of the LUN.
    fn survey(&self, wish: u64, revision: u64, epoch: u64) {
        let found = self.open_area().and_then(|mut area| area.slots());
        let last = found.map(|slots| {
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
            Err(error) => self.fail("survey", error.to_string()),
        }
    }

    fn goes_on(&self, number: u64) -> bool {
        self.beating.load(Ordering::Relaxed) == number
    }

    /// Writes a heartbeat if `number` goes on. `None`: it does not.
    fn beat_once(&self, area: &mut Area, number: u64) -> Option<Result<(), HeartbeatError>> {
        let mut heart = lock(&self.heart);
        self.goes_on(number).then(|| area.beat(&self.next_beat(&mut heart, true)))
    }

    fn next_beat(&self, heart: &mut Heart, goes_on: bool) -> Beat {
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

    fn beat(&self, epoch: u64, number: u64, admission: u64) {
        let first = self.open_area().map(|mut area| (self.beat_once(&mut area, number), area));
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
            match self.beat_once(&mut area, number) {
                Some(Ok(())) => {}
                Some(Err(error)) if error.is_refusal() => return self.answer(Event::Lost { admission }),
                // Requests of the filesystem and of owners fail, too, and say so.
                Some(Err(error)) => self.fail("beat", error.to_string()),
                None => break,
            }
        }
        self.end_beating(&mut area, admission);
    }

    /// The last heartbeat, for whoever looks, unless another one has begun. Whoever has claimed the volume meanwhile may have fenced this
    /// node, which shows here.
    fn end_beating(&self, area: &mut Area, admission: u64) {
        let mut heart = lock(&self.heart);
        if self.goes_on(0) && !self.is_over() && lock(&self.mounted).is_none() {
            let last = self.next_beat(&mut heart, false);
            if area.beat(&last).is_err_and(|error| error.is_refusal()) {
                self.answer(Event::Lost { admission });
            }
        }
    }

    fn listen(&self, epoch: u64, number: u64, mounts: &[Process<u64>]) {
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

    fn hear(&self, epoch: u64, number: u64, mounts: &[Process<u64>]) -> Result<Heard, HeartbeatError> {
        let Process { node, incarnation } = self.host.me;
        let me = Beat { node, incarnation, epoch, count: 0, goes_on: true, name: String::new() };
        let mut area = self.open_area()?;
        let first = area.slots()?;
        let mut listener = Listener::new(Nanos::now(), first);
        while self.goes_on(number) {
            let began = Nanos::now();
            let slots = area.slots()?;
            let is_listed =
                |beat: &Beat| mounts.contains(&Process { node: beat.node, incarnation: beat.incarnation });
            match listener.look((began, Nanos::now()), slots, &me, is_listed) {
                Heard::NothingYet => thread::sleep(BEAT_EVERY / 4),
                heard => return Ok(heard),
            }
        }
        Ok(Heard::NothingYet)
    }

    fn describe(&self, heard: &Heard) -> String {
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

    fn mount(&self, epoch: u64) {
        match self.try_mount(epoch) {
            Ok(mounted) => {
                *lock(&self.mounted) = Some(Arc::new(mounted));
                self.succeed("mount", Event::Mounted(true));
            }
            Err(text) => {
                self.fail("mount", text);
                self.answer(Event::Mounted(false));
            }
        }
    }

    /// Nothing is mounted, and nothing of an attempt is on its way, if it fails.
    fn try_mount(&self, epoch: u64) -> Result<Mounted, String> {
        // From here on the LUN has been coordinated in this epoch.
        {
            let mut heart = lock(&self.heart);
            heart.epoch = epoch;
            let beat = self.next_beat(&mut heart, true);
            let mut area = self.open_area().map_err(|error| error.to_string())?;
            area.beat(&beat).map_err(|error| error.to_string())?;
        }
        let undone = |text: String| {
            self.notice(text.clone());
            self.await_released();
            text
        };
        match Mounted::new(&self.host.lun) {
            Ok(mounted) => match self.check_area(&mounted) {
                Ok(()) => Ok(mounted),
                Err(text) => {
                    drop(mounted);
                    Err(undone(text))
                }
            },
            // Somebody else on this host has it.
            Err(error) if error.is_busy() => Err(error.to_string()),
            Err(error @ FilesystemError::Mount { .. }) => Err(undone(error.to_string())),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Whether the heartbeat area is behind the filesystem, or in its file for that.
    fn check_area(&self, mounted: &Mounted) -> Result<(), String> {
        let Host { area, lun, .. } = &self.host;
        if *area >= mounted.superblock().size {
            return Ok(());
        }
        match in_file(mounted) {
            Ok(place) if place == *area => Ok(()),
            Ok(place) => Err(format!(
                "the heartbeat area of {} is at byte {area} for this volume, and its file is at byte {place}: something has replaced the file",
                lun.display()
            )),
            Err(error) => Err(error.to_string()),
        }
    }

    fn unmount(&self) {
        let mounted = lock(&self.mounted).take();
        while mounted.as_ref().is_some_and(|mounted| Arc::strong_count(mounted) > 1) {
            thread::sleep(LOOK_AGAIN);
        }
        drop(mounted);
        if self.await_released() {
            self.answer(Event::Unmounted);
        }
    }

    /// Waits until nothing on this host has the LUN mounted, as an exclusive open proves. A kernel that cannot write to it takes as long as
    /// the LUN's own time-outs. `false`: the shell is gone before.
    fn await_released(&self) -> bool {
        while let Err(error) = exclusive(&self.host.lun) {
            if self.is_over() {
                return false;
            }
            if !error.is_busy() {
                self.fail("release", error.to_string());
            }
            thread::sleep(LOOK_AGAIN);
        }
        true
    }
}
