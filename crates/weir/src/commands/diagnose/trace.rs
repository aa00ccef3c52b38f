//! `--trace`: the block layer's tracepoints beside the counters of each run.

use std::cell::RefCell;
use std::rc::Rc;

use weir_diagnose::counters::Tracer;
use weir_diagnose::{Cell, Counters, Measurement, Position, Target, TargetError};

/// A tracer at work, or none and a note why.
pub fn start(device: &str) -> Option<Tracer> {
    match Tracer::start(device) {
        Ok(tracer) => Some(tracer),
        Err(error) => {
            eprintln!("note: {error}; /proc/diskstats alone is used");
            None
        }
    }
}

/// The same layers, each run with what the tracer counts in it.
pub fn traced<'a>(layers: Vec<Box<dyn Target + 'a>>, tracer: Tracer) -> Vec<Box<dyn Target + 'a>> {
    let tracer = Rc::new(RefCell::new(tracer));
    let one = |target| -> Box<dyn Target + 'a> {
        Box::new(OfTarget { target, tracer: Rc::clone(&tracer), last: None })
    };
    layers.into_iter().map(one).collect()
}

struct OfTarget<'a> {
    target: Box<dyn Target + 'a>,
    tracer: Rc<RefCell<Tracer>>,
    last: Option<Counters>,
}

impl Target for OfTarget<'_> {
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
        let before = self.tracer.borrow_mut().print();
        let measured = self.target.run(cell);
        let after = before.and_then(|before| Some((before, self.tracer.borrow_mut().print()?)));
        let traced = after.map(|(before, after)| before.until(&after));
        self.last = self.target.counters().map(|counters| Counters { traced, ..counters });
        measured
    }

    fn counters(&mut self) -> Option<Counters> {
        self.last.take()
    }
}
