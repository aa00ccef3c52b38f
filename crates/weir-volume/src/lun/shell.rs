//! Carries out what a [`Claim`] wants of the LUN: heartbeat, fences, mount. What it wants of the registry and of this node's owners is
//! handed out.
//!
//! Whatever touches the LUN blocks for as long as the LUN does not answer, so each of these actions has a thread of its own, and the
//! claim goes on meanwhile. Its user owns the claim's thread: it calls [`Shell::step`] with what the registry says, and with each event
//! that comes from the channel.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

use super::claim::{Claim, Effect, Event, Phase, Process, Record};
use super::fence_command::{Action, FenceCommand};
use super::filesystem::Mounted;
use super::filesystem::mount::exclusive;
use super::heartbeat::listener::BEAT_EVERY;
use super::heartbeat::{Area, Beat, Heard, HeartbeatError, Listener, VolumeId};
use crate::backing::{Mark, Trace};
use crate::planted::Planted;

/// Pause before an action that failed is over, so that it is not begun again at once.
const PAUSE: Duration = Duration::from_millis(500);
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
    pub fence: FenceCommand,
    /// Former processes of this node that may have used the LUN, all ended: what the kernel still does for them is awaited.
    pub former: Vec<Mark>,
}

/// What comes from the threads.
#[derive(Debug)]
pub enum Answer {
    /// For [`Shell::step`].
    Event(Event<u64>),
    /// Something that an operator should know.
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
    /// As [`Effect::DropLeases`]: [`Event::LeasesDropped`] is the answer.
    DropLeases,
    /// Coordinate with this filesystem.
    Serve {
        /// For messages.
        epoch: u64,
        /// Closed, with all of its files, at [`Output::StopServing`]: the unmount waits for that.
        mounted: Arc<Mounted>,
    },
    /// Answer nobody any more.
    StopServing,
}

/// A claim with its threads.
#[derive(Debug)]
pub struct Shell {
    claim: Claim<u64>,
    /// The names of nodes, for the fence command.
    pub names: BTreeMap<u64, String>,
    shared: Arc<Shared>,
    /// The number of the last admission, and the processes of the last record.
    admission: u64,
    mounts: Vec<Process<u64>>,
}

/// What the threads use.
#[derive(Debug)]
struct Shared {
    host: Host,
    answers: Sender<Answer>,
    mounted: Mutex<Option<Arc<Mounted>>>,
    /// The number of the heartbeat that goes on; 0: none.
    beating: AtomicU64,
    /// The shell is gone.
    is_over: AtomicBool,
}

impl Shell {
    /// The shell of a process that has nothing to do with the LUN yet.
    #[must_use]
    pub fn new(host: Host, answers: Sender<Answer>) -> Shell {
        let claim = Claim::new(host.me, Planted::default());
        let (mounted, beating, is_over) = (Mutex::default(), AtomicU64::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared { host, answers, mounted, beating, is_over });
        Shell { claim, names: BTreeMap::new(), shared, admission: 0, mounts: Vec::new() }
    }

    /// The state, for operators.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.claim.phase()
    }

    /// Takes an event into account, begins what follows from it, and returns what is left to the user.
    pub fn step(&mut self, event: Event<u64>) -> Vec<Output> {
        match &event {
            Event::Admitted { number } => self.admission = *number,
            Event::Seen { record, .. } => self.mounts = record.mounts.iter().copied().collect(),
            _ => {}
        }
        let mut effects = Vec::new();
        self.claim.step(event, &mut effects);
        effects.into_iter().filter_map(|effect| self.begin(effect)).collect()
    }

    fn begin(&mut self, effect: Effect<u64>) -> Option<Output> {
        let shared = &self.shared;
        match effect {
            Effect::Propose { number, revision, to } => {
                return Some(Output::Propose { number, revision, to });
            }
            Effect::DropLeases => return Some(Output::DropLeases),
            Effect::Serve { epoch } => {
                let mounted = shared.mounted().clone();
                return mounted.map(|mounted| Output::Serve { epoch, mounted });
            }
            Effect::StopServing => return Some(Output::StopServing),
            Effect::Vacate => shared.in_a_thread(Shared::vacate),
            Effect::Admit { number } => shared.in_a_thread(move |shared| shared.admit(number)),
            Effect::Fence { process, epoch } => {
                let name = self.names.get(&process.node).cloned();
                shared.in_a_thread(move |shared| shared.fence(process, name, epoch));
            }
            Effect::Beat { epoch, number } => {
                shared.beating.store(number, Ordering::Relaxed);
                let admission = self.admission;
                shared.in_a_thread(move |shared| shared.beat(epoch, number, admission));
            }
            Effect::Listen { epoch, number } => {
                let mounts = self.mounts.clone();
                shared.in_a_thread(move |shared| shared.listen(epoch, number, &mounts));
            }
            Effect::StopBeating => shared.beating.store(0, Ordering::Relaxed),
            Effect::Mount { .. } => shared.in_a_thread(Shared::mount),
            Effect::Unmount => shared.in_a_thread(Shared::unmount),
        }
        None
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.beating.store(0, Ordering::Relaxed);
    }
}

impl Shared {
    fn in_a_thread(self: &Arc<Shared>, action: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(self);
        let started = thread::Builder::new().name("weir-lun".into()).spawn(move || action(&shared));
        if let Err(error) = started {
            // Nothing answers, so the claim waits here; and it says so.
            self.notice(format!("cannot start a thread: {error}"));
        }
    }

    fn mounted(&self) -> std::sync::MutexGuard<'_, Option<Arc<Mounted>>> {
        // Only replaced as a whole.
        self.mounted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// The user is gone, if it cannot be sent.
    fn answer(&self, event: Event<u64>) {
        let _ = self.answers.send(Answer::Event(event));
    }

    fn notice(&self, text: String) {
        let _ = self.answers.send(Answer::Notice(text));
    }

    /// An action has failed.
    fn fail(&self, text: String, event: Event<u64>) {
        self.notice(text);
        thread::sleep(PAUSE);
        self.answer(event);
    }

    /// Former processes have ended: what the kernel still does for them shows by their marks, and a mount of theirs by an exclusive open.
    fn vacate(&self) {
        let mut said = None;
        while !self.is_over() {
            match self.is_vacated() {
                Ok(()) => return self.answer(Event::Vacated),
                Err(why) if said.as_ref() == Some(&why) => {}
                Err(why) => {
                    self.notice(format!("{} is not used yet: {why}", self.host.lun.display()));
                    said = Some(why);
                }
            }
            thread::sleep(PAUSE);
        }
    }

    fn is_vacated(&self) -> Result<(), String> {
        for mark in &self.host.former {
            match mark.probe(&self.host.lun).map_err(|error| error.to_string())? {
                Trace::Gone => {}
                Trace::InFlight => return Err("a former process of this node has requests under way".into()),
                Trace::Unknown => {
                    return Err("this host does not show whether a former process uses it".into());
                }
            }
        }
        exclusive(&self.host.lun).map(drop).map_err(|error| error.to_string())
    }

    fn admit(&self, number: u64) {
        let Host { fence, name, me, .. } = &self.host;
        match fence.run(Action::Admit, name, me.incarnation, 0) {
            Ok(()) => self.answer(Event::Admitted { number }),
            Err(error) => self.fail(error.to_string(), Event::NotAdmitted { number }),
        }
    }

    fn fence(&self, process: Process<u64>, name: Option<String>, epoch: u64) {
        let result = match name {
            Some(name) => {
                let run = self.host.fence.run(Action::Fence, &name, process.incarnation, epoch);
                run.map_err(|error| error.to_string())
            }
            None => Err(format!("node {} may have the filesystem mounted, and has no name", process.node)),
        };
        match result {
            Ok(()) => self.answer(Event::Fenced { process, epoch }),
            Err(text) => self.fail(text, Event::Failed { epoch }),
        }
    }

    fn open_area(&self) -> Result<Area, HeartbeatError> {
        Area::open(&self.host.lun, self.host.area, self.host.volume)
    }

    fn goes_on(&self, number: u64) -> bool {
        self.beating.load(Ordering::Relaxed) == number
    }

    fn beat(&self, epoch: u64, number: u64, admission: u64) {
        let Host { me, name, .. } = &self.host;
        let beat = |count, goes_on| Beat {
            node: me.node,
            incarnation: me.incarnation,
            epoch,
            count,
            goes_on,
            name: name.clone(),
        };
        let first = self.open_area().and_then(|mut area| area.beat(&beat(1, true)).map(|()| area));
        let mut area = match first {
            Ok(area) => area,
            Err(error) if error.is_refusal() => return self.answer(Event::Lost { admission }),
            Err(error) => return self.fail(error.to_string(), Event::Failed { epoch }),
        };
        self.answer(Event::Beating { number });
        let mut is_well = true;
        for count in 2.. {
            thread::sleep(BEAT_EVERY);
            let goes_on = self.goes_on(number);
            match area.beat(&beat(count, goes_on)) {
                // Also the last one: whoever has claimed the volume meanwhile may have fenced this node.
                Err(error) if error.is_refusal() => return self.answer(Event::Lost { admission }),
                _ if !goes_on => return,
                Ok(()) => is_well = true,
                // Requests of the filesystem and of owners fail, too, and say so.
                Err(error) if is_well => {
                    is_well = false;
                    self.notice(error.to_string());
                }
                Err(_) => {}
            }
        }
    }

    fn listen(&self, epoch: u64, number: u64, mounts: &[Process<u64>]) {
        match self.hear(epoch, number, mounts) {
            Ok(Heard::Silence) => self.answer(Event::Silent { number }),
            // Stopped.
            Ok(Heard::NothingYet) => {}
            Ok(heard) => self.fail(self.describe(&heard), Event::Failed { epoch }),
            Err(error) => self.fail(error.to_string(), Event::Failed { epoch }),
        }
    }

    fn hear(&self, epoch: u64, number: u64, mounts: &[Process<u64>]) -> Result<Heard, HeartbeatError> {
        let Process { node, incarnation } = self.host.me;
        let me = Beat { node, incarnation, epoch, count: 0, goes_on: true, name: String::new() };
        let mut area = self.open_area()?;
        let first = area.slots()?;
        let mut listener = Listener::new(Nanos::now(), first);
        while self.goes_on(number) {
            let now = Nanos::now();
            let slots = area.slots()?;
            let is_listed =
                |beat: &Beat| mounts.contains(&Process { node: beat.node, incarnation: beat.incarnation });
            match listener.look(now, slots, &me, is_listed) {
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
                "{lun} was coordinated by node {} in epoch {}, of which the registry does not know: was it restored from a backup?",
                beat.name, beat.epoch
            ),
            Heard::NothingYet | Heard::Silence => String::new(),
        }
    }

    fn mount(&self) {
        match Mounted::new(&self.host.lun) {
            Ok(mounted) => {
                *self.mounted() = Some(Arc::new(mounted));
                self.answer(Event::Mounted(true));
            }
            Err(error) => {
                self.notice(error.to_string());
                self.await_released();
                thread::sleep(PAUSE);
                self.answer(Event::Mounted(false));
            }
        }
    }

    fn unmount(&self) {
        let mounted = self.mounted().take();
        while mounted.as_ref().is_some_and(|mounted| Arc::strong_count(mounted) > 1) {
            thread::sleep(LOOK_AGAIN);
        }
        drop(mounted);
        self.await_released();
        self.answer(Event::Unmounted);
    }

    /// Nothing on this host has the LUN mounted. A kernel that cannot write to it takes as long as the LUN's own time-outs.
    fn await_released(&self) {
        while exclusive(&self.host.lun).is_err_and(|error| error.is_busy()) && !self.is_over() {
            thread::sleep(LOOK_AGAIN);
        }
    }
}
