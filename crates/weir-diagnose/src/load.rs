//! Layers that the load generator can reach by itself: files, block devices and NBD exports.

use std::time::Duration;

use weir_load::run::{Monitor, run};
use weir_load::size::Size;
use weir_load::summary::Summary;
use weir_load::tally::IoKind;
use weir_load::workload::{Access, Workload};

use crate::cell::{Cell, Direction, Pattern};
use crate::plan::{Target, TargetError};
use crate::result::{Measurement, Position};

/// Block size of the writer that fills a target before anything is read, in bytes.
const PREFILL_BLOCK: u64 = 1 << 20;

/// What all runs of a measurement have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Time that is measured in each run, above zero.
    pub runtime: Duration,
    /// Load before it that is not counted.
    pub warmup: Duration,
    /// Bytes of the target that are used, from its start; `None` means all of it.
    pub size: Option<u64>,
    /// Seed of the random offsets: every layer is asked for the same blocks.
    pub seed: u64,
    /// What the target holds may be overwritten. Without it, cells that write to a target that holds data fail.
    pub destroy: bool,
}

impl Default for LoadOptions {
    /// Five seconds after half a second of warm-up, over the whole target, nothing overwritten.
    fn default() -> LoadOptions {
        LoadOptions {
            runtime: Duration::from_secs(5),
            warmup: Duration::from_millis(500),
            size: None,
            seed: 1,
            destroy: false,
        }
    }
}

impl LoadOptions {
    /// A cell in the generator's words.
    #[must_use]
    pub fn workload(&self, cell: &Cell) -> Workload {
        let access = match (cell.shape.pattern, cell.shape.direction) {
            (Pattern::Sequential, Direction::Read) => Access::Read,
            (Pattern::Sequential, Direction::Write) => Access::Write,
            (Pattern::Random, Direction::Read) => Access::RandRead,
            (Pattern::Random, Direction::Write) => Access::RandWrite,
        };
        Workload {
            access,
            block_size: Size(u64::from(cell.shape.block_bytes)),
            queue_depth: cell.queue_depth,
            runtime: Some(self.runtime),
            warmup: self.warmup,
            size: self.size.map(Size),
            seed: self.seed,
            ..Workload::default()
        }
    }
}

/// A file, a block device or an NBD export as a layer.
pub struct LoadTarget<'a> {
    name: String,
    position: Position,
    target: weir_load::target::Target,
    options: LoadOptions,
    monitor: &'a Monitor,
}

impl<'a> LoadTarget<'a> {
    /// A layer on the way. `monitor` ends a run early; see [`crate::measure`] for what is made of it.
    #[must_use]
    pub fn new(
        name: &str,
        target: weir_load::target::Target,
        options: LoadOptions,
        monitor: &'a Monitor,
    ) -> LoadTarget<'a> {
        LoadTarget { name: name.to_owned(), position: Position::OnTheWay, target, options, monitor }
    }

    /// The same, in place of another layer.
    #[must_use]
    pub fn instead_of(mut self, layer: &str) -> LoadTarget<'a> {
        self.position = Position::AlternativeTo(layer.to_owned());
        self
    }

    /// Writes the whole range once, so that no read finds a hole. To be called once for each medium, on
    /// one of the layers that lead to it. Overwrites data only where the options allow it.
    ///
    /// # Errors
    /// The target cannot be written; the text says why.
    pub fn prefill(&self) -> Result<(), TargetError> {
        let workload = Workload {
            access: Access::Write,
            block_size: Size(PREFILL_BLOCK),
            runtime: None,
            size: self.options.size.map(Size),
            ..Workload::default()
        };
        let summary = self.go(&workload)?;
        match summary.first_error {
            Some(error) => Err(TargetError::Failed(format!("filling {}: {error}", self.target))),
            None => Ok(()),
        }
    }

    fn go(&self, workload: &Workload) -> Result<Summary, TargetError> {
        run(&self.target, workload, self.options.destroy, self.monitor)
            .map_err(|error| TargetError::Failed(error.to_string()))
    }
}

impl Target for LoadTarget<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn position(&self) -> Position {
        self.position.clone()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let summary = self.go(&self.options.workload(cell))?;
        Measurement::of(&summary, cell.shape.direction)
    }
}

impl Measurement {
    /// The part of one direction of what the generator measured.
    ///
    /// # Errors
    /// No I/O of that direction was completed.
    pub fn of(summary: &Summary, direction: Direction) -> Result<Measurement, TargetError> {
        let kind = match direction {
            Direction::Read => IoKind::Read,
            Direction::Write => IoKind::Write,
        };
        let part = summary.kind(kind).filter(|part| part.ios > 0).ok_or_else(|| {
            let reason = summary.first_error.as_deref().unwrap_or("none was answered in the measured time");
            TargetError::Failed(format!("no I/O was completed: {reason}"))
        })?;
        Ok(Measurement {
            iops: part.iops,
            mib_per_s: part.mib_per_second,
            mean_ns: part.latency_ns.mean,
            p50_ns: part.latency_ns.p50 as f64,
            p99_ns: part.latency_ns.p99 as f64,
            p99_9_ns: part.latency_ns.p99_9 as f64,
            ios: part.ios,
            errors: part.errors,
            cpu_seconds: summary.cpu_seconds,
            bytes: part.bytes,
            runtime_seconds: summary.runtime_seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Plan, measure};
    use crate::result::RunOutcome;
    use crate::{finding, sample};
    use std::sync::atomic::AtomicBool;

    fn options() -> LoadOptions {
        LoadOptions {
            runtime: Duration::from_millis(60),
            warmup: Duration::from_millis(5),
            size: Some(8 << 20),
            destroy: true,
            ..LoadOptions::default()
        }
    }

    fn file(directory: &std::path::Path, name: &str) -> weir_load::target::Target {
        weir_load::target::Target::Path(directory.join(name))
    }

    /// Two real files, one in RAM: every cell runs, and no row is physically impossible.
    #[test]
    fn real_files_are_measured_cell_by_cell() {
        let (ram, disk) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir().unwrap());
        let monitor = Monitor::new();
        let layers = [
            LoadTarget::new("file in RAM", file(ram.path(), "a"), options(), &monitor),
            LoadTarget::new("file on disk", file(disk.path(), "b"), options(), &monitor),
        ];
        layers.iter().try_for_each(LoadTarget::prefill).unwrap();
        let mut targets: Vec<Box<dyn Target + '_>> =
            layers.into_iter().map(|layer| Box::new(layer) as Box<dyn Target + '_>).collect();
        let plan = Plan { repeats: 2, ..Plan::standard(5) };
        let never = AtomicBool::new(false);
        let diagnosis = measure(&plan, &mut targets, sample::environment(), &never, &mut |_| {}).unwrap();
        assert_eq!(diagnosis.rows.len(), 32);
        for row in &diagnosis.rows {
            let RunOutcome::Measured(measured) = &row.outcome else { panic!("{row:?}") };
            assert!(measured.ios > 0 && measured.errors == 0, "{row:?}");
            assert_eq!(measured.bytes, measured.ios * u64::from(row.cell.shape.block_bytes));
        }
        let findings = finding::find(&diagnosis);
        let impossible: Vec<_> = findings
            .unused
            .iter()
            .filter(|unused| !unused.reason.contains("generator did not keep"))
            .collect();
        assert!(impossible.iter().all(|unused| unused.reason.starts_with("only ")), "{impossible:?}");
        assert!(crate::report::html(&diagnosis, &findings).unwrap().contains("file in RAM"));
    }

    #[test]
    fn a_target_that_holds_data_is_not_overwritten_unasked() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("precious"), vec![7; 1 << 20]).unwrap();
        let monitor = Monitor::new();
        let careful = LoadOptions { destroy: false, size: None, ..options() };
        let mut layer = LoadTarget::new("precious", file(directory.path(), "precious"), careful, &monitor);
        let refused = layer.run(&Cell::standard()[0]).unwrap_err().to_string();
        assert!(refused.contains("holds data"), "{refused}");
        assert!(layer.prefill().is_err());
        assert!(layer.run(&Cell::standard()[2]).is_ok(), "reading does no harm");
        assert_eq!(std::fs::read(directory.path().join("precious")).unwrap(), vec![7; 1 << 20]);
    }

    #[test]
    fn cells_are_asked_for_in_the_words_of_the_generator() {
        let texts: Vec<String> =
            Cell::standard().iter().map(|cell| options().workload(cell).to_string()).collect();
        assert_eq!(texts[0], "write 8KiB depth 1");
        assert_eq!(texts[3], "randread 4KiB depth 32");
        assert_eq!(texts[7], "read 256KiB depth 32");
    }
}
