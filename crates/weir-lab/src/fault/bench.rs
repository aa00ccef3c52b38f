//! A layer under test: over a file in memory, with a meter and faults below it.

use std::time::Duration;

use weir_block::{
    Completion, Layer, LayerMeter, Metered, Nanos, Reactor, ReactorConfig, Request, RequestKind,
};
use weir_volume::{BackingOptions, FileBacking};

use super::layer::{Held, Place};
use super::{Line, Switch};

/// The layers below the fault layer.
pub type Below = Metered<Held<FileBacking, Line>>;

pub struct Bench<L> {
    pub reactor: Reactor,
    pub layer: L,
    /// Of the layer.
    pub switch: Switch,
    /// Of the faults below it.
    pub below: Switch,
    _directory: tempfile::TempDir,
}

impl<L: Layer> Bench<L> {
    /// Over `size` bytes of zeroes.
    pub fn new(size: u64, layer: impl FnOnce(Below, Switch) -> L) -> Bench<L> {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let backing = FileBacking::open(&mut reactor, &path, &BackingOptions::default()).unwrap();
        let (switch, below) = (Switch::default(), Switch::default());
        let held = Held::new(backing, Line::new(below.clone(), 5), Place::Backing);
        let layer = layer(Metered::new("below", held), switch.clone());
        Bench { reactor, layer, switch, below, _directory: directory }
    }

    pub fn submit(&mut self, request: Request<'_>) {
        self.layer.submit(&mut self.reactor, request);
    }

    /// Waits until so many requests are answered.
    pub fn answers(&mut self, count: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        let deadline = Nanos::now() + Duration::from_secs(10);
        while done.len() < count {
            assert!(Nanos::now() < deadline, "{} answers of {count} within ten seconds", done.len());
            let mut events = Vec::new();
            let soon = Nanos::now() + Duration::from_millis(1);
            self.reactor.wait(soon.min(self.layer.deadline()), &mut events).unwrap();
            events.into_iter().for_each(|event| self.layer.on_event(&mut self.reactor, event));
            self.layer.advance(&mut self.reactor, &mut done);
        }
        done
    }

    /// The one answer to the one request.
    pub fn go(&mut self, request: Request<'_>) -> Completion {
        self.submit(request);
        let mut done = self.answers(1);
        assert_eq!((done.len(), self.layer.in_flight()), (1, 0));
        done.remove(0)
    }

    /// Requests that have come to the layer below.
    pub fn arrivals(&self, kind: RequestKind) -> u64 {
        let mut meters: Vec<LayerMeter> = Vec::new();
        self.layer.meters(&mut meters);
        meters[0].meter.kind(kind).arrivals
    }
}
