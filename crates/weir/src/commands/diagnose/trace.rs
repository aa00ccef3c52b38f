//! `--trace`: the block layer's tracepoints beside the counters of each run.

use std::cell::RefCell;
use std::rc::Rc;

use weir_diagnose::counters::Tracer;
use weir_diagnose::{Counters, Target};

use super::observed::observed;
use crate::output::note;

/// A running tracer; without one, prints the reason.
pub fn start(device: &str) -> Option<Tracer> {
    match Tracer::start(device) {
        Ok(tracer) => Some(tracer),
        Err(error) => {
            note(&format!("note: {error}; /proc/diskstats alone is used"));
            None
        }
    }
}

/// The same layers, each run with the tracer's counts.
pub fn traced<'a>(layers: Vec<Box<dyn Target + 'a>>, tracer: Tracer) -> Vec<Box<dyn Target + 'a>> {
    let tracer = Rc::new(RefCell::new(tracer));
    let one = |target| {
        let tracer = Rc::clone(&tracer);
        observed(target, move |target, cell| {
            let before = tracer.borrow_mut().print();
            let measured = target.run(cell);
            let after = before.and_then(|before| Some((before, tracer.borrow_mut().print()?)));
            let traced = after.map(|(before, after)| before.until(&after));
            (measured, target.counters().map(|counters| Counters { traced, ..counters }))
        })
    };
    layers.into_iter().map(one).collect()
}
