//! Cost of busy-polling for a neighbour: a process that computes on the same two processors while a disk has one
//! request in flight, with polling on and off.

use std::cell::RefCell;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use weir_block::Nanos;
use weir_load::workload::Access;

use super::{Measured, OWN, Subject, Suite};
use crate::comparison::Comparison;
use crate::driver::{Driver, Load};
use crate::error::{Failure, Outcome};
use crate::process::Process;
use crate::row::Metric;
use crate::server::{Server, Transport};
use crate::weir::{Cluster, ClusterConfig};

/// Number of processors that all processes here share.
const PROCESSORS: usize = 2;
/// Target for the neighbour's speed with polling, as a fraction of its speed without.
const NEIGHBOUR_TARGET: f64 = 0.9;

const ALONE: &str = "alone";
const POLLING_OFF: &str = "weir, polling off";
const POLLING_ON: &str = "weir, polling on";

impl Suite<'_> {
    /// Measures a neighbour with one pinned thread per processor, and one whose threads the kernel moves.
    pub(super) fn neighbour(&mut self) -> Outcome<()> {
        let load = self.load(Access::RandWrite, 1);
        let name = |pinned: &bool| {
            format!("neighbour {} write-back+1 {}", if *pinned { "pinned" } else { "unpinned" }, load.name())
        };
        let wanted = self.wanted(name, vec![true, false]);
        if wanted.is_empty() {
            return Ok(());
        }
        // Processes and threads started from here inherit the affinity.
        let _confined = Confined::to(PROCESSORS)?;
        let config = ClusterConfig::in_memory(self.workspace, Transport::Unix, "write-back+1");
        let with = |name, busy_poll_us| ClusterConfig { name, busy_poll_us, ..config };
        let off = Cluster::start(self.weir, self.workspace, &with(POLLING_OFF, Some(0)))?;
        let on = Cluster::start(self.weir, self.workspace, &with(POLLING_ON, None))?;
        for pinned in wanted {
            let cell = name(&pinned);
            let neighbour = Neighbour::start(pinned)?;
            let alone = Subject {
                name: ALONE.into(),
                driver: OWN,
                pids: Vec::new(),
                measure: Box::new(|| neighbour.alone(&load)),
            };
            let subjects = [alone, beside(&neighbour, &off, load), beside(&neighbour, &on, load)];
            let cell = self.rounds(&cell, &subjects)?;
            let row = |name| cell.under(name, OWN);
            for (theirs, metric, target) in [
                (POLLING_OFF, Metric::Neighbour, Some(NEIGHBOUR_TARGET)),
                (ALONE, Metric::Neighbour, None),
                (POLLING_OFF, Metric::Iops, None),
                (POLLING_OFF, Metric::P50, None),
            ] {
                let rows = row(POLLING_ON).zip(row(theirs));
                let compared = rows.and_then(|(on, other)| Comparison::of(&cell.name, metric, on, other));
                self.compare(&cell.name, compared, target);
            }
            self.finish(cell, Metric::Neighbour);
        }
        Ok(())
    }
}

fn beside<'a>(neighbour: &'a Neighbour, cluster: &'a Cluster, load: Load) -> Subject<'a> {
    let measure = move || {
        let (figures, steps) = neighbour.during(|| Driver::Weir.drive(cluster.uri(), &load))?;
        Ok(Measured { neighbour: Some(steps), ..figures.into() })
    };
    Subject { name: cluster.name().into(), driver: OWN, pids: cluster.pids(), measure: Box::new(measure) }
}

/// Confines this thread, and the processes that it starts, to some of its processors, until dropped.
struct Confined {
    before: CpuSet,
}

impl Confined {
    fn to(most: usize) -> Outcome<Confined> {
        let before = sched_getaffinity(None)?;
        let mut some = CpuSet::new();
        processors(&before).into_iter().take(most).for_each(|number| some.set(number));
        sched_setaffinity(None, &some)?;
        Ok(Confined { before })
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        // Restores the previous affinity.
        let _ = sched_setaffinity(None, &self.before);
    }
}

fn processors(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::MAX_CPU).filter(|&number| set.is_set(number)).collect()
}

/// A process that computes until dropped: this program, started again.
struct Neighbour {
    _process: Process,
    pipes: RefCell<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Neighbour {
    fn start(pinned: bool) -> Outcome<Neighbour> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("compute").args(pinned.then_some("--pinned"));
        let (process, input, output) = Process::start_dialogue(&mut command)?;
        Ok(Neighbour { _process: process, pipes: RefCell::new((input, BufReader::new(output))) })
    }

    /// Its steps so far.
    fn steps(&self) -> Outcome<u64> {
        let (input, output) = &mut *self.pipes.borrow_mut();
        input.write_all(b"\n")?;
        let mut answer = String::new();
        output.read_line(&mut answer)?;
        answer.trim().parse().map_err(Failure::of("the neighbour's answer"))
    }

    /// Its steps per second during `work`.
    fn during<T>(&self, work: impl FnOnce() -> Outcome<T>) -> Outcome<(T, f64)> {
        let (steps, start) = (self.steps()?, Nanos::now());
        let done = work()?;
        let seconds = (Nanos::now() - start).as_secs_f64();
        Ok((done, (self.steps()? - steps) as f64 / seconds))
    }

    fn alone(&self, load: &Load) -> Outcome<Measured> {
        let ((), steps) = self.during(|| {
            std::thread::sleep(load.warmup + load.runtime);
            Ok(())
        })?;
        Ok(Measured { neighbour: Some(steps), ..Measured::default() })
    }
}

/// The neighbour's own process: one thread for each allowed processor computes. It answers each line of the input with the steps
/// so far, and ends at the input's end.
pub fn compute(pinned: bool) -> Outcome<()> {
    let allowed = processors(&sched_getaffinity(None)?);
    let counters: Vec<Arc<AtomicU64>> = allowed.iter().map(|_| Arc::default()).collect();
    for (counter, number) in counters.iter().zip(allowed) {
        let counter = Arc::clone(counter);
        std::thread::spawn(move || {
            let mut own = CpuSet::new();
            own.set(number);
            // If the processor has gone offline meanwhile, the kernel places the thread.
            let _ = pinned.then(|| sched_setaffinity(None, &own));
            count(&counter);
        });
    }
    for line in std::io::stdin().lock().lines() {
        line?;
        let steps: u64 = counters.iter().map(|counter| counter.load(Ordering::Relaxed)).sum();
        println!("{steps}");
    }
    Ok(())
}

/// Steps of dependent multiplications: their number depends on processor time alone.
fn count(counter: &AtomicU64) {
    const STEPS: u64 = 1 << 14;
    let mut state = 1_u64;
    loop {
        for _ in 0..STEPS {
            state = black_box(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
        counter.fetch_add(STEPS, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_confined_thread_gets_its_processors_back() {
        let before = processors(&sched_getaffinity(None).unwrap());
        let confined = Confined::to(1).unwrap();
        assert_eq!(processors(&sched_getaffinity(None).unwrap()), before[..1]);
        drop(confined);
        assert_eq!(processors(&sched_getaffinity(None).unwrap()), before);
    }

    #[test]
    fn steps_are_counted() {
        let counter = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&counter);
        std::thread::spawn(move || count(&counted));
        while counter.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(counter.load(Ordering::Relaxed) % (1 << 14), 0);
    }
}
