//! Layers that the load generator can reach by itself: files, block devices and NBD exports.

use std::time::Duration;

use weir_block::size::Size;
use weir_load::run::{Monitor, run};
use weir_load::summary::Summary;
use weir_load::tally::IoKind;
use weir_load::workload::{Access, Workload};

use crate::cell::{Cell, Direction, Pattern};
use crate::plan::{Target, TargetError};
use crate::result::{MOST_SLOTS, Measurement, Position};

/// Block size of the writer that fills a target before anything is read, in bytes.
const PREFILL_BLOCK: u64 = 1 << 20;

/// The common options of all runs of a measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Time that is measured in each run, above zero.
    pub runtime: Duration,
    /// Load before it that is not counted.
    pub warmup: Duration,
    /// Bytes of the target that are used, from its start; `None` means all of it.
    pub size: Option<u64>,
    /// Seed of the random offsets: every layer gets the same blocks.
    pub seed: u64,
    /// Permission to overwrite the target's data. Without it, cells that write to a target with data fail.
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
            (_, Direction::Mixed(read_percent)) => Access::RandRw { read_percent },
        };
        Workload {
            access,
            block_size: Size(u64::from(cell.shape.block_bytes)),
            queue_depth: (cell.queue_depth / cell.threads.max(1)).max(1),
            threads: cell.threads,
            fua: cell.shape.write_through,
            runtime: Some(self.runtime),
            warmup: self.warmup,
            size: cell.footprint.or(self.size).map(Size),
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
    /// A layer on the path. `monitor` ends a run early; see [`crate::measure`] for the treatment of such a run.
    #[must_use]
    pub fn new(
        name: &str,
        target: weir_load::target::Target,
        options: LoadOptions,
        monitor: &'a Monitor,
    ) -> LoadTarget<'a> {
        LoadTarget { name: name.to_owned(), position: Position::OnPath, target, options, monitor }
    }

    /// The same, in place of another layer.
    #[must_use]
    pub fn instead_of(mut self, layer: &str) -> LoadTarget<'a> {
        self.position = Position::AlternativeTo(layer.to_owned());
        self
    }

    /// The same, as something known that hypotheses are held against.
    #[must_use]
    pub fn as_reference(mut self) -> LoadTarget<'a> {
        self.position = Position::Reference;
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

    fn can_run(&self, cell: &Cell) -> Result<(), String> {
        match (cell.shape.pattern, cell.shape.direction) {
            (Pattern::Sequential, Direction::Mixed(_)) => {
                Err("the generator mixes only random I/Os".to_owned())
            }
            _ => Ok(()),
        }
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let summary = self.go(&self.options.workload(cell))?;
        Measurement::of(&summary, cell.shape.direction)
    }
}

impl Measurement {
    /// The generator's figures for the kinds of request of the direction.
    ///
    /// A mixed load has one rate, one mean and one distribution; only the latter gives percentiles of reads and writes
    /// together.
    ///
    /// # Errors
    /// No I/O of a kind was completed.
    pub fn of(summary: &Summary, direction: Direction) -> Result<Measurement, TargetError> {
        let measurement = match direction {
            Direction::Read => Measurement::of_kind(summary, IoKind::Read)?,
            Direction::Write => Measurement::of_kind(summary, IoKind::Write)?,
            Direction::Mixed(_) => {
                let (read, write) = (
                    Measurement::of_kind(summary, IoKind::Read)?,
                    Measurement::of_kind(summary, IoKind::Write)?,
                );
                read.beside(&write)
            }
        };
        let timeline = summary.timeline.as_ref().map(|timeline| Box::new(timeline.coarser(MOST_SLOTS)));
        Ok(Measurement { timeline, buckets_ns: measurement.buckets_ns.thinned(), ..measurement })
    }

    fn of_kind(summary: &Summary, kind: IoKind) -> Result<Measurement, TargetError> {
        let part = summary.kind(kind).filter(|part| part.ios > 0).ok_or_else(|| {
            let reason = summary.first_error.as_deref().unwrap_or("none was answered in the measured time");
            TargetError::Failed(format!("no {} was completed: {reason}", kind.name()))
        })?;
        Ok(Measurement {
            iops: part.iops,
            mib_per_s: Some(part.mib_per_second),
            mib_per_s_step: 0.0,
            mean_ns: Some(part.latency_ns.mean),
            p50_ns: Some(part.latency_ns.p50 as f64),
            p99_ns: Some(part.latency_ns.p99 as f64),
            p99_9_ns: Some(part.latency_ns.p99_9 as f64),
            max_ns: Some(part.latency_ns.max as f64),
            ios: Some(part.ios),
            errors: part.errors,
            cpu_seconds: summary.cpu_seconds,
            bytes: Some(part.bytes),
            runtime_seconds: Some(summary.runtime_seconds),
            buckets_ns: part.buckets_ns.clone(),
            timeline: None,
        })
    }

    /// Two parts of one load that ran side by side, in the same time: rates add up, means are weighted by rate.
    #[must_use]
    pub fn beside(&self, other: &Measurement) -> Measurement {
        let both = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
        let counts = |a: Option<u64>, b: Option<u64>| a?.checked_add(b?);
        let iops = self.iops + other.iops;
        let mean = || Some((self.iops * self.mean_ns? + other.iops * other.mean_ns?) / iops);
        let longer = |a: Option<f64>, b: Option<f64>| Some(a?.max(b?));
        Measurement {
            iops,
            mib_per_s: both(self.mib_per_s, other.mib_per_s),
            mib_per_s_step: self.mib_per_s_step + other.mib_per_s_step,
            mean_ns: mean(),
            ios: counts(self.ios, other.ios),
            errors: self.errors.saturating_add(other.errors),
            // The generator's threads did both.
            cpu_seconds: self.cpu_seconds.filter(|_| self.cpu_seconds == other.cpu_seconds),
            bytes: counts(self.bytes, other.bytes),
            max_ns: longer(self.max_ns, other.max_ns),
            runtime_seconds: longer(self.runtime_seconds, other.runtime_seconds),
            buckets_ns: self.buckets_ns.joined(&other.buckets_ns),
            ..Measurement::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Shape;
    use crate::check::Kind;
    use crate::comparison::Why;
    use crate::plan::{Plan, Start, measure};
    use crate::result::RunOutcome;
    use crate::tier::Tier;
    use crate::{finding, sample};
    use std::sync::atomic::AtomicBool;
    use weir_load::summary::Buckets;
    use weir_load::timeline::Slot;

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
        let plan = Plan { repeats: 2, extra_runs: 0, follow_ups: 0, ..Plan::of(Tier::Quick.cells(), 5) };
        let never = AtomicBool::new(false);
        let diagnosis =
            measure(&plan, &mut targets, Start::Fresh(sample::environment()), &never, &mut |_| {}).unwrap();
        assert_eq!(diagnosis.rows.len(), 32);
        for row in &diagnosis.rows {
            let measured = match &row.outcome {
                RunOutcome::Measured(measured) => measured,
                // A disk that others keep busy may answer nothing in so short a time.
                RunOutcome::Failed(why) if why.contains("none was answered") => continue,
                other => panic!("{other:?}"),
            };
            let ios = measured.ios.unwrap();
            assert!(ios > 0 && measured.errors == 0, "{row:?}");
            assert_eq!(measured.bytes, Some(ios * u64::from(row.cell.shape.block_bytes)));
            assert_eq!(measured.buckets_ns.count(), ios);
            assert!(measured.buckets_ns.0.len() <= Buckets::THIN);
            let timeline = measured.timeline.as_ref().unwrap();
            assert!(
                timeline.slots.len() <= MOST_SLOTS && timeline.measured_from_ns == 5_000_000,
                "{timeline:?}"
            );
            assert!(timeline.slots.iter().map(Slot::ios).sum::<u64>() >= ios, "the warm-up is shown");
        }
        let findings = finding::find(&diagnosis);
        let of_generator = [Kind::GeneratorIdle, Kind::TooFew].map(Why::Objection);
        let impossible: Vec<_> =
            findings.compared.unused.iter().filter(|unused| !of_generator.contains(&unused.why)).collect();
        assert!(impossible.is_empty(), "{impossible:?}");
        assert!(crate::report::html(&diagnosis, &findings).unwrap().contains("file in RAM"));
        let text = diagnosis.to_json().unwrap();
        assert!(text.len() < 32 * 5000, "{} bytes", text.len());
        assert_eq!(crate::Diagnosis::from_json(&text).unwrap(), diagnosis);
    }

    #[test]
    fn a_target_that_holds_data_is_not_overwritten_unasked() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("precious"), vec![7; 1 << 20]).unwrap();
        let monitor = Monitor::new();
        let careful = LoadOptions { destroy: false, size: None, ..options() };
        let mut layer = LoadTarget::new("precious", file(directory.path(), "precious"), careful, &monitor);
        let refused = layer.run(&Tier::Quick.cells()[0]).unwrap_err().to_string();
        assert!(refused.contains("holds data"), "{refused}");
        assert!(layer.prefill().is_err());
        assert!(layer.run(&Tier::Quick.cells()[2]).is_ok(), "reading does no harm");
        assert_eq!(std::fs::read(directory.path().join("precious")).unwrap(), vec![7; 1 << 20]);
    }

    #[test]
    fn cells_are_asked_for_in_the_words_of_the_generator() {
        let texts: Vec<String> =
            Tier::Quick.cells().iter().map(|cell| options().workload(cell).to_string()).collect();
        assert_eq!(texts[0], "write 8KiB depth 1");
        assert_eq!(texts[3], "randread 4KiB depth 32");
        assert_eq!(texts[7], "read 256KiB depth 32");
    }

    #[test]
    fn mixed_and_durable_cells_run_too() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let monitor = Monitor::new();
        let mut layer = LoadTarget::new("file in RAM", file(directory.path(), "a"), options(), &monitor);
        layer.prefill().unwrap();
        let shape = Shape::new(4096, Pattern::Random, Direction::Mixed(70));
        let mixed = layer.run(&shape.at(4)).unwrap();
        assert!(mixed.p50_ns.is_none() && mixed.mean_ns.is_some());
        assert_eq!(mixed.buckets_ns.count(), mixed.ios.unwrap(), "reads and writes in one distribution");
        let expected = mixed.iops * 4096.0 / f64::from(1 << 20);
        assert!((mixed.mib_per_s.unwrap() / expected - 1.0).abs() < 0.01, "{mixed:?}");
        let durable = Shape::new(4096, Pattern::Random, Direction::Write).through();
        assert!(options().workload(&durable.at(1)).fua);
        assert!(layer.run(&durable.at(1)).unwrap().ios.unwrap() > 0);
        let shared = Cell { threads: 2, ..Shape::new(8192, Pattern::Sequential, Direction::Write).at(8) };
        assert_eq!((options().workload(&shared).queue_depth, options().workload(&shared).threads), (4, 2));
    }

    #[test]
    fn parts_that_ran_side_by_side_add_up() {
        let cell = Tier::Quick.cells()[2];
        let (a, b) = (sample::measurement(&cell, 100e3), sample::measurement(&cell, 300e3));
        let both = a.beside(&b);
        assert!((both.iops - (a.iops + b.iops)).abs() < 1e-9);
        // Two closed loops of depth 1 have two in flight.
        assert!((both.in_flight().unwrap() - 2.0).abs() < 1e-9);
        assert_eq!(both.p99_ns, None);
    }
}
