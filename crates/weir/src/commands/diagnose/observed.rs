//! Layers with observed runs, for the counters of each row.

use weir_block::Nanos;
use weir_diagnose::counters::{Watch, Watched};
use weir_diagnose::{Cell, Counters, Measurement, Position, Target, TargetError};

/// A run's measurement, and the counters of the same time.
pub type Seen = (Result<Measurement, TargetError>, Option<Counters>);

/// The same layer, with each run executed by `observe`.
pub fn observed<'a>(
    target: Box<dyn Target + 'a>,
    observe: impl FnMut(&mut (dyn Target + 'a), &Cell) -> Seen + 'a,
) -> Box<dyn Target + 'a> {
    Box::new(Observed { target, observe, last: None })
}

/// Runs a cell with the operating system's counters of the observed objects.
pub fn count(
    target: &mut dyn Target,
    cell: &Cell,
    watched: &Watched,
) -> (Result<Measurement, TargetError>, Counters) {
    let (watch, began) = (Watch::begin(watched), Nanos::now());
    let measured = target.run(cell);
    let counters = watch.end((Nanos::now() - began).as_secs_f64());
    (measured, counters)
}

struct Observed<'a, O> {
    target: Box<dyn Target + 'a>,
    observe: O,
    last: Option<Counters>,
}

impl<'a, O: FnMut(&mut (dyn Target + 'a), &Cell) -> Seen> Target for Observed<'a, O> {
    fn name(&self) -> &str {
        self.target.name()
    }

    fn position(&self) -> Position {
        self.target.position()
    }

    fn can_run(&self, cell: &Cell) -> Result<(), String> {
        self.target.can_run(cell)
    }

    fn settle(&mut self) -> Result<(), TargetError> {
        self.target.settle()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let (measured, counters) = (self.observe)(&mut *self.target, cell);
        self.last = counters.filter(|_| measured.is_ok());
        measured
    }

    fn counters(&mut self) -> Option<Counters> {
        self.last.take()
    }
}
