//! One disk on its owner: export, accelerator and backing, driven together.

mod handover;
mod volume;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_accel::flash::FlashStore;
use weir_accel::replica::Replica;
use weir_accel::{Accel, AccelConfig, AccelNotice, Former, Inheritance, NoMemory};
use weir_block::{Completion, Event, Layer, LayerMeter, Metered, Nanos, OwnerId, Reactor};
use weir_export::{Client, Exports, Rate, Workspace};
use weir_load::{Summary, Workload};
use weir_profile::Profile;
use weir_volume::lun::route_status::{Reasons, RouteState};
use weir_volume::{Backing, BackingKind, BackingOptions};

use handover::Handover;

use super::barrier::{BarrierError, BarrierSlot};
use super::counters::DiskCounters;
use super::load::RunningLoad;
use super::messages::{Arrival, DiskStatus, LimitDelays, LoadLayer, NotClosed, OpenDisk, RouteView};
use super::profile::DiskProfile;
use super::stack::Top;
use super::{ShardConfig, answer};
use crate::throttles::CLIENT_NOT_TAKEN;
use crate::units::count_are;

/// Rounds of requests in one turn; then commands and events are looked at.
const ROUNDS_PER_TURN: usize = 16;

/// The shard logs a release that takes longer: the kernel has kept I/O of this node for so long.
const SLOW_RELEASE: Duration = Duration::from_secs(1);

/// Where a disk is in its life here.
enum Life {
    Serving,
    /// Destaging everything, then gone.
    Closing(Vec<oneshot::Sender<Result<(), NotClosed>>>),
    /// Another node owns it: ending all I/O, then gone (P4).
    Releasing(Vec<oneshot::Sender<()>>),
}

/// A disk that this node owns.
pub struct Disk {
    pub name: String,
    kind: BackingKind,
    exports: Exports,
    /// The node whose clients may use the disk beside this node's own.
    follower: Option<String>,
    top: Box<dyn Top>,
    backing_id: OwnerId,
    life: Life,
    /// When its release began, and what was under way then.
    release_began: Option<(Nanos, usize)>,
    done: Vec<Completion>,
    load: Option<RunningLoad>,
    /// The load makes no requests while clients are held.
    holds_load: bool,
    /// The clients are held because the disk is about to move.
    held_for_move: bool,
    /// Not all that was acknowledged is durable, or in a log, of a disk that is about to move.
    unsettled: bool,
    /// Who waits until the disk may be handed over.
    holding: Option<oneshot::Sender<()>>,
    /// Waits until the clients are held.
    holding_clients: Vec<oneshot::Sender<()>>,
    /// Something has happened to it since its last turn.
    touched: bool,
    /// When its next turn is due even if nothing happens, as of the last one.
    due: Nanos,
    /// Its work up to its last turn; see [`Disk::has_moved`].
    activity: u64,
    /// For other threads.
    counters: Arc<DiskCounters>,
    /// The way of its I/O, of a disk of a shared volume.
    route: Option<(RouteState, Reasons)>,
    handover: Handover,
    /// All its I/O is to go through its volume's coordinator.
    redirected: bool,
    /// Who waits until it holds nothing of a LUN, by number; and the last number.
    dropping: Vec<(u64, oneshot::Sender<()>)>,
    last_drop: u64,
    barrier: BarrierSlot,
    /// Its volume is full, as far as anybody has heard.
    is_full: bool,
}

impl Disk {
    /// How the backing of a disk is opened.
    pub fn backing_options(open: &OpenDisk, config: &ShardConfig) -> BackingOptions {
        BackingOptions {
            size: Some(open.size),
            logical_block: Some(open.logical_block),
            mark: Some(open.mark),
            volume: open.volume,
            coordinator_wait: config.coordinator_wait,
            full_volume_wait: config.full_volume_wait,
            server_wait: config.server_wait,
            fence_grace: config.nbd_fence_grace,
            ..BackingOptions::default()
        }
    }

    /// Puts the layers together.
    ///
    /// # Errors
    /// There is no memory for the log; its store is to be retired.
    pub fn new(
        reactor: &mut Reactor,
        config: &ShardConfig,
        open: &OpenDisk,
        backing: Box<dyn Backing>,
        inheritance: Inheritance,
        store: Option<FlashStore>,
    ) -> Result<Disk, NoMemory> {
        let former = match open.arrival {
            Arrival::Clean => Former::Stopped,
            Arrival::TakeOver { former } | Arrival::FromWriteThrough { former } => former,
        };
        let accel_config = AccelConfig {
            peer_deadline: config.peer_deadline,
            full_log_wait: config.full_log_wait,
            full_volume_wait: config.full_volume_wait,
            destage_delay: config.destage_delay,
            serves_until: open.serves_until.clone(),
            ..AccelConfig::standalone(open.log_bytes)
        };
        let backing_id = backing.owner();
        let mut backing = config.wrap.bottom(&open.disk, backing);
        if let Some(shared) = backing.shared() {
            shared.own(open.configuration.epoch, &open.serves_until);
        }
        reactor.guard(backing_id, &open.serves_until);
        let accel = Accel::new(
            reactor,
            accel_config,
            open.configuration.clone(),
            inheritance,
            former,
            Metered::new("backing", backing),
            store,
        )?;
        #[cfg(feature = "planted-bugs")]
        let accel = {
            let mut accel = accel;
            accel.plant(config.planted);
            accel
        };
        let mut exports = Exports::new(reactor);
        exports.set_rate(open.rate, reactor.now());
        Ok(Disk {
            name: open.disk.clone(),
            kind: open.backing.clone(),
            exports,
            follower: None,
            top: config.wrap.top(&open.disk, Metered::observed("accel", accel, DiskProfile::new())),
            backing_id,
            life: Life::Serving,
            release_began: None,
            done: Vec::new(),
            load: None,
            holds_load: false,
            held_for_move: false,
            unsettled: false,
            holding: None,
            holding_clients: Vec::new(),
            touched: true,
            due: Nanos(0),
            activity: 0,
            counters: Arc::default(),
            route: None,
            handover: Handover::default(),
            redirected: false,
            dropping: Vec::new(),
            last_drop: 0,
            barrier: BarrierSlot::default(),
            is_full: false,
        })
    }

    /// Where its bytes are.
    pub fn kind(&self) -> &BackingKind {
        &self.kind
    }

    /// How many clients it serves. One that is being closed serves none.
    pub fn client_count(&self) -> usize {
        match self.life {
            Life::Serving => self.exports.clients(),
            Life::Closing(_) | Life::Releasing(_) => 0,
        }
    }

    /// The owner numbers of the clients.
    pub fn clients(&self) -> impl Iterator<Item = OwnerId> + use<> {
        self.exports.owners()
    }

    /// The owner numbers of the layers.
    pub fn layers(&self) -> impl Iterator<Item = OwnerId> + use<> {
        let accel = self.top.accel().inner();
        [accel.peers_id(), self.backing_id].into_iter().chain(accel.store_id())
    }

    /// It gets a turn, whether or not its time has come.
    pub fn touch(&mut self) {
        self.touched = true;
    }

    /// Whether it needs a turn now: by what [`Disk::deadline`] says, or the shard would wait for a time that has come, and do nothing.
    pub fn is_due(&self, now: Nanos, reactor: &Reactor, workspace: &Workspace) -> bool {
        self.deadline(reactor, workspace) <= now
    }

    /// Whether it waits for memory that other disks give back without a word: it needs a turn after one of theirs.
    pub fn waits_for_memory(&self) -> bool {
        self.exports.is_waiting() || self.top.accel().inner().waits_for_memory()
    }

    /// Whether anything has come of its turns since this was asked last.
    pub fn has_moved(&mut self) -> bool {
        let now = self.activity();
        std::mem::replace(&mut self.activity, now) != now
    }

    /// Grows with everything that is done.
    fn activity(&self) -> u64 {
        let accel = self.top.accel();
        let requests = accel.meter().activity() + accel.inner().lower().meter().activity();
        let marks = accel.inner().marks();
        requests + marks.appended + marks.replicated + marks.acknowledged + marks.destaged + marks.freed
    }

    /// The accelerator, for what the control plane says.
    pub fn accel(&mut self) -> &mut Accel<Box<dyn Backing>> {
        self.top.accel_mut().inner_mut()
    }

    /// The accelerator, to look at.
    pub fn look(&self) -> &Accel<Box<dyn Backing>> {
        self.top.accel().inner()
    }

    /// Puts a load onto a layer, if nobody is harmed by it.
    pub fn start_load(
        &mut self,
        reactor: &mut Reactor,
        layer: LoadLayer,
        workload: &Workload,
        force: bool,
        result: oneshot::Sender<Result<Summary, String>>,
    ) {
        if let Err(reason) = self.allows_load(layer, workload, force) {
            return answer(result, Err(reason));
        }
        self.load = RunningLoad::start(layer, workload, force, self.top.accel_mut(), result);
        self.publish_load();
        self.follow_wish(reactor);
    }

    fn allows_load(&self, layer: LoadLayer, workload: &Workload, force: bool) -> Result<(), String> {
        if !matches!(self.life, Life::Serving) {
            return Err("the disk is being closed".into());
        }
        if self.load.is_some() {
            return Err("a load runs on this disk already; wait for its end".into());
        }
        if layer == LoadLayer::Direct && !self.has_path() {
            return Err("this node has no path to a LUN that the disk is on".into());
        }
        if layer.is_below_log() && self.barrier.is_raised() {
            return Err("a snapshot of the disk is being made; wait for its end".into());
        }
        if layer.is_below_log() && !self.top.accel().inner().is_clean() {
            return Err(
                "the write log is not empty, so the backing alone is not the disk; wait until it is clean"
                    .into(),
            );
        }
        if let Some(reason) = self.top.accel().inner().backing_is_taken().filter(|_| workload.access.writes())
        {
            return Err(format!("the disk cannot be written at present: {reason}"));
        }
        match self.exports.clients() {
            0 => Ok(()),
            clients if layer == LoadLayer::Direct && self.redirected => Err(format!(
                "{} connected, whose I/O an operator has redirected: it would be direct for the time of the load; disconnect them",
                count_are(clients as u64, "client")
            )),
            clients if layer.is_below_log() && workload.access.writes() => Err(format!(
                "{} connected: writing below the accelerator would go behind their back; disconnect them",
                count_are(clients as u64, "client")
            )),
            clients if !force => Err(format!(
                "{} connected to it; disconnect them, or --force runs the load beside theirs",
                count_are(clients as u64, "client")
            )),
            _ => Ok(()),
        }
    }

    fn publish_load(&self) {
        let excludes = self.load.as_ref().is_some_and(|load| load.excludes_clients);
        self.counters.publish_exclusion(excludes);
    }

    /// Takes a client that has chosen this disk. A load that overwrites the disk keeps clients out; they may try again.
    pub fn attach(&mut self, client: Client, workspace: &mut Workspace) {
        if self.load.as_ref().is_some_and(|load| load.excludes_clients) {
            // Rate-limited: a client program may retry in a loop.
            if let Some(left_out) = CLIENT_NOT_TAKEN.pass(Nanos::now()) {
                tracing::warn!(disk = self.name, left_out, "client not taken: a load overwrites the disk");
            }
            return;
        }
        if let Some(via) = client.follows_on().filter(|via| self.follower.as_deref() != Some(*via)) {
            // Whoever has just begun to follow tries again.
            tracing::info!(disk = self.name, via, "client not taken: its node does not follow");
            return;
        }
        if let Err(error) = self.exports.attach(client, workspace)
            && let Some(left_out) = CLIENT_NOT_TAKEN.pass(Nanos::now())
        {
            tracing::warn!(disk = self.name, %error, left_out, "client not taken");
        }
    }

    /// Clients on `node` may use the disk from now on, and those of no other node but this one.
    pub fn set_follower(&mut self, node: Option<String>, reactor: &mut Reactor, workspace: &mut Workspace) {
        self.exports.keep_via(node.as_deref(), reactor, workspace);
        self.follower = node;
        self.touched = true;
    }

    pub fn on_client_event(&mut self, event: &Event) {
        self.touched = true;
        self.exports.on_event(event);
    }

    pub fn on_layer_event(&mut self, reactor: &mut Reactor, event: Event) {
        self.touched = true;
        self.top.on_event(reactor, event);
    }

    /// What it publishes for other threads.
    pub fn counters(&self) -> Arc<DiskCounters> {
        Arc::clone(&self.counters)
    }

    /// Sets or removes the highest rate at which clients are served.
    pub fn set_rate(&mut self, rate: Option<Rate>, now: Nanos) {
        self.exports.set_rate(rate, now);
    }

    /// One turn: take what clients (and a load) ask for, advance the layers, answer.
    pub fn turn(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        self.touched = false;
        for _ in 0..ROUNDS_PER_TURN {
            self.round(reactor, workspace);
            if !self.exports.has_more() {
                break;
            }
        }
        let size = self.top.info().size;
        self.top.accel_mut().observer_mut().turn(&self.name, size);
        if self.holding.is_some() && self.top.accel().inner().may_hand_over() && self.backing().settle() {
            self.holding.take().into_iter().for_each(|done| answer(done, ()));
        }
        // Unflushed writes that only this process could repeat count as in flight.
        self.unsettled = self.held_for_move && !self.backing().settle();
        if self.exports.is_held() {
            self.holding_clients.drain(..).for_each(|done| answer(done, ()));
        }
        self.answer_drops();
        if self.barrier.turn(self.top.accel_mut().inner_mut(), reactor.recent()) && !self.held_for_move {
            self.exports.resume();
        }
        self.counters.publish_delays(self.exports.delays());
        self.due = self.deadline_now(reactor, workspace);
    }

    /// Raises a barrier of destage. With `holds`, no client hears of anything from then on until [`Disk::release_barrier`].
    pub fn raise_barrier(&mut self, number: u64, holds: bool, now: Nanos) -> Result<(), BarrierError> {
        if !matches!(self.life, Life::Serving) {
            return Err(BarrierError::Closing);
        }
        if holds && self.held_for_move {
            return Err(BarrierError::Moving);
        }
        if self.load.as_ref().is_some_and(|load| load.layer.is_below_log()) {
            return Err(BarrierError::Load);
        }
        self.barrier.raise(self.top.accel_mut().inner_mut(), number, holds, now)?;
        if holds {
            self.exports.hold();
        }
        Ok(())
    }

    /// `waiting` is answered when the disk is at its barrier.
    pub fn await_barrier(&mut self, number: u64, waiting: oneshot::Sender<Result<(), BarrierError>>) {
        self.barrier.wait(number, waiting);
    }

    /// Clients go on. Whether they were held until now, and not for too long: after that they may have been let go.
    pub fn release_barrier(&mut self, number: u64, now: Nanos) -> bool {
        let held = self.barrier.release(number, now);
        if held.is_some() && !self.held_for_move {
            self.exports.resume();
        }
        held == Some(true)
    }

    /// Lowers a barrier. Whether the disk has been there until now.
    pub fn lower_barrier(&mut self, number: u64, now: Nanos) -> bool {
        self.release_barrier(number, now);
        self.barrier.lower(self.top.accel_mut().inner_mut(), number)
    }

    /// Nothing more is destaged; answered when nothing of it is under way and the disk may be handed over.
    pub fn hold_destage(&mut self, done: oneshot::Sender<()>) {
        self.accel().hold_destage();
        self.holding = Some(done);
    }

    /// Answers all requests of clients and takes no new ones, also of a load; `done` when that is so for clients, or after a bounded
    /// time.
    pub fn hold_clients(&mut self, done: oneshot::Sender<()>) {
        self.exports.hold();
        (self.holds_load, self.held_for_move) = (true, true);
        self.holding_clients.push(done);
    }

    /// Clients are served again, and a load goes on.
    pub fn resume_clients(&mut self) {
        self.exports.resume();
        self.barrier.not_held();
        (self.holds_load, self.held_for_move) = (false, false);
    }

    fn round(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        self.exports.pump(reactor, &mut self.top, workspace);
        if let Some(load) = self.load.as_mut().filter(|_| !self.holds_load) {
            load.pump(reactor, self.top.accel_mut());
        }
        self.top.advance(reactor, &mut self.done);
        if let Some(load) = &mut self.load {
            load.take(self.top.accel_mut(), &mut self.done);
            if load.is_over() {
                self.load = None;
                self.publish_load();
                self.follow_wish(reactor);
            }
        }
        self.exports.complete(&mut self.done);
        self.exports.flush(reactor, workspace);
    }

    fn backing(&mut self) -> &mut Box<dyn Backing> {
        self.accel().lower_mut().inner_mut()
    }

    /// What the accelerator wants.
    pub fn take_notices(&mut self, out: &mut Vec<AccelNotice>) {
        self.accel().take_notices(out);
    }

    /// When the next turn is due even if nothing happens to it.
    pub fn deadline(&self, reactor: &Reactor, workspace: &Workspace) -> Nanos {
        if self.touched {
            Nanos(0)
        } else if self.exports.is_waiting() {
            // Other disks' turns may have given back what it waits for.
            self.due.min(self.deadline_now(reactor, workspace))
        } else {
            self.due
        }
    }

    fn deadline_now(&self, reactor: &Reactor, workspace: &Workspace) -> Nanos {
        let load = self.load.as_ref().filter(|_| !self.holds_load);
        let load = load.map_or(Nanos::NEVER, RunningLoad::deadline);
        let recording = self.top.accel().observer().deadline();
        let layers = self.top.deadline().min(self.exports.deadline(&self.top, reactor, workspace));
        layers.min(load).min(recording).min(self.barrier.deadline())
    }

    /// Begins to close: clients are answered and disconnected, everything is destaged. On a full volume, or while its server is away, clients
    /// are disconnected without answers: a request that waits goes on wherever the disk is open next, and an error here would be its guest's.
    pub fn close(
        &mut self,
        reactor: &mut Reactor,
        workspace: &mut Workspace,
        done: oneshot::Sender<Result<(), NotClosed>>,
    ) {
        match &mut self.life {
            Life::Closing(waiting) => waiting.push(done),
            Life::Releasing(_) => {
                answer(done, Err(NotClosed::Failed("the disk belongs to another node now".into())));
            }
            Life::Serving => {
                if self.barrier.end(self.top.accel_mut().inner_mut()) && !self.held_for_move {
                    self.exports.resume();
                }
                match self.lacks_space(reactor.now()) || self.look().lower().inner().is_away() {
                    true => self.exports.abort(reactor, workspace),
                    false => self.exports.close(),
                }
                self.accel().close();
                // Nothing but destage is to hold up the end.
                self.backing().stop_waiting();
                self.stop_load();
                self.life = Life::Closing(vec![done]);
            }
        }
    }

    /// Another node owns the disk: disconnects the clients (they will find the new owner; held clients get their kept replies) and
    /// ends all I/O. Returns the log, from which the new owner may continue.
    pub fn release(
        &mut self,
        reactor: &mut Reactor,
        workspace: &mut Workspace,
        done: oneshot::Sender<()>,
    ) -> Option<(Replica, Option<FlashStore>)> {
        if let Life::Releasing(waiting) = &mut self.life {
            waiting.push(done);
            return None;
        }
        self.barrier.end(self.top.accel_mut().inner_mut());
        self.exports.dismiss(reactor, workspace);
        self.abandon(reactor);
        self.holding = None;
        let held = self.accel().release(reactor);
        self.stop_load();
        self.release_began = Some((Nanos::now(), self.top.in_flight()));
        let before = std::mem::replace(&mut self.life, Life::Releasing(vec![done]));
        if let Life::Closing(waiting) = before {
            for done in waiting {
                answer(done, Err(NotClosed::Failed("another node has taken the disk over".into())));
            }
        }
        held
    }

    /// Whether it is another node's now.
    pub fn is_releasing(&self) -> bool {
        matches!(self.life, Life::Releasing(_))
    }

    /// It ends when its requests are answered, also one that is held.
    fn stop_load(&mut self) {
        self.holds_load = false;
        if let Some(load) = &mut self.load {
            load.stop();
        }
    }

    /// Whether the disk takes clients.
    pub fn is_serving(&self) -> bool {
        matches!(self.life, Life::Serving)
    }

    /// Whether the disk has come to its end here: nothing is under way and nobody is connected.
    pub fn is_over(&self) -> bool {
        let owes = self.look().lower().inner().owes();
        let quiet = self.exports.clients() == 0 && self.load.is_none() && self.top.in_flight() == 0 && !owes;
        match self.life {
            Life::Serving => false,
            Life::Closing(_) => quiet && self.top.accel().inner().is_drained(),
            Life::Releasing(_) => quiet && self.top.accel().inner().is_quiet(),
        }
    }

    /// Tells those who wait for the end. The flash store, if there is one, is to be retired.
    pub fn finish(mut self) -> Option<FlashStore> {
        let accel = self.top.accel_mut();
        accel.observer_mut().end();
        let store = accel.inner_mut().take_store();
        match self.life {
            Life::Serving => {}
            Life::Closing(waiting) => waiting.into_iter().for_each(|done| answer(done, Ok(()))),
            Life::Releasing(waiting) => {
                if let Some((began, in_flight)) = self.release_began
                    && let took = Nanos::now() - began
                    && took >= SLOW_RELEASE
                {
                    let disk = &self.name;
                    tracing::warn!(disk, ?took, in_flight, "I/O of a former owner ended late");
                }
                waiting.into_iter().for_each(|done| answer(done, ()));
            }
        }
        store
    }

    /// The disk has grown to `size` bytes, as its record says; its file has been lengthened before.
    pub fn resize(&mut self, size: u64) -> Result<(), String> {
        self.backing().resize(size).map_err(|error| error.to_string())
    }

    /// The meters from the export down.
    pub fn meters(&self) -> Vec<LayerMeter> {
        let mut meters = Vec::new();
        self.exports.meters(&mut meters);
        self.top.meters(&mut meters);
        meters
    }

    /// What the disk was asked for since it was opened here.
    pub fn profile(&self) -> Box<Profile> {
        self.top.accel().observer().profile(&self.name, self.top.info().size)
    }

    /// Watches anew what the disk is asked for.
    pub fn record_profile(&mut self, length: Duration, asked: oneshot::Sender<Result<Box<Profile>, String>>) {
        self.top.accel_mut().observer_mut().record(length, asked);
    }

    pub fn status(&self, now: Nanos) -> DiskStatus {
        let mut status = self.top.accel().inner().status();
        let is_full = self.lacks_space(now);
        if is_full && status.reason.is_empty() {
            status.reason = self.full_reason();
        }
        if let Some(reason) = self.silent_reason(now).filter(|_| status.reason.is_empty()) {
            status.reason = reason;
        }
        if let Some(reason) = self.look().lower().inner().trouble(now) {
            status.reason = reason;
        }
        let state = match self.life {
            Life::Serving if status.reason.is_empty() => "serving",
            Life::Serving => DiskStatus::DEGRADED,
            Life::Closing(_) => "closing",
            Life::Releasing(_) => DiskStatus::RELEASING,
        };
        DiskStatus {
            disk: self.name.clone(),
            role: "owner".into(),
            state: state.into(),
            reason: status.reason,
            epoch: status.configuration.epoch,
            effective: status.configuration.effective(),
            appended: status.marks.appended,
            replicated: status.marks.replicated,
            acknowledged: status.marks.acknowledged,
            promised: status.promised,
            destaged: status.marks.destaged,
            freed: status.marks.freed,
            dirty_bytes: status.dirty_bytes,
            log_used_bytes: status.log_used,
            log_bytes: status.log_bytes,
            destage: status.destage,
            clients: self.exports.clients(),
            limit_delays: LimitDelays::from(self.exports.delays()),
            in_flight: self.top.in_flight() + usize::from(self.unsettled),
            faults: Vec::new(),
            readers: Vec::new(),
            forwarders: Vec::new(),
            is_full,
            route: self.route_status(now).map(RouteView::from),
        }
    }
}
