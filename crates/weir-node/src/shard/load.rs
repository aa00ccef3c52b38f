//! A load put straight onto a layer of an open disk, for `weir bench` and `weir diagnose`.

use tokio::sync::oneshot;
use weir_accel::Accel;
use weir_block::{
    Completion, Event, Layer, LayerInfo, LayerMeter, Nanos, Reactor, Request, RequestKind, Tag,
};
use weir_load::{LayerLoad, Summary, Workload};
use weir_volume::Backing;

use super::answer;
use super::messages::LoadLayer;
use super::stack::DiskAccel;

/// A tag with this bit belongs to a load, the others to NBD clients.
const LOAD_TAG: u64 = 1 << 63;

/// A load in progress and the client that waits for its result.
pub struct RunningLoad {
    load: LayerLoad,
    /// Where its requests go.
    pub layer: LoadLayer,
    /// No client may come while it runs: it overwrites the disk, and it was allowed only because there was none.
    pub excludes_clients: bool,
    done: Vec<Completion>,
    result: Option<oneshot::Sender<Result<Summary, String>>>,
}

impl RunningLoad {
    /// Begins a load. The caller has checked that it does no harm, or `force` allows it above the write log.
    pub fn start(
        layer: LoadLayer,
        workload: &Workload,
        force: bool,
        accel: &mut DiskAccel,
        result: oneshot::Sender<Result<Summary, String>>,
    ) -> Option<RunningLoad> {
        let (name, info) = match layer {
            LoadLayer::Accel => ("accel", accel.info()),
            LoadLayer::Backing | LoadLayer::Direct => ("backing", accel.inner().lower().info()),
        };
        match LayerLoad::start(name, workload, &info, Nanos::now(), |slot| Tag(LOAD_TAG | u64::from(slot))) {
            Ok(load) => {
                let excludes_clients = workload.access.writes() && (layer.is_below_log() || !force);
                Some(RunningLoad { load, layer, excludes_clients, done: Vec::new(), result: Some(result) })
            }
            Err(error) => {
                answer(result, Err(error.to_string()));
                None
            }
        }
    }

    /// Submits what comes next, before the layers are advanced.
    pub fn pump(&mut self, reactor: &mut Reactor, accel: &mut DiskAccel) {
        // The client has disconnected: an interrupted `weir bench` must not leave an hour of load behind.
        if self.result.as_ref().is_some_and(oneshot::Sender::is_closed) {
            self.load.stop();
        }
        match self.layer {
            LoadLayer::Accel => self.load.pump(reactor, accel, &mut self.done),
            LoadLayer::Backing | LoadLayer::Direct => {
                self.load.pump(reactor, &mut PastAccel(accel.inner_mut()), &mut self.done);
            }
        }
    }

    /// Takes what is the load's own out of what the layers have finished.
    pub fn take(&mut self, accel: &mut DiskAccel, done: &mut Vec<Completion>) {
        match self.layer {
            LoadLayer::Accel => {
                self.done.extend(done.extract_if(.., |completion| completion.tag.0 & LOAD_TAG != 0));
            }
            LoadLayer::Backing | LoadLayer::Direct => accel.inner_mut().take_direct(&mut self.done),
        }
    }

    /// Generates nothing any more.
    pub fn stop(&mut self) {
        self.load.stop();
    }

    /// Answers who waits, once the load has ended; then true.
    pub fn is_over(&mut self) -> bool {
        let Some(summary) = self.load.finished() else { return false };
        if let Some(result) = self.result.take() {
            answer(result, Ok(summary));
        }
        true
    }

    pub fn deadline(&self) -> Nanos {
        if self.done.is_empty() { self.load.deadline() } else { Nanos(0) }
    }
}

/// The backing below an accelerator whose log is empty.
struct PastAccel<'a>(&'a mut Accel<Box<dyn Backing>>);

impl Layer for PastAccel<'_> {
    fn info(&self) -> LayerInfo {
        self.0.lower().info()
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        self.0.lower().has_room(kind, bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.0.submit_direct(reactor, request);
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        self.0.on_event(reactor, event);
    }

    fn advance(&mut self, _reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.0.take_direct(done);
    }

    fn in_flight(&self) -> usize {
        self.0.lower().in_flight()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        self.0.lower().meters(out);
    }
}
