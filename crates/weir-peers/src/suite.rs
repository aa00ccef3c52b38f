//! The suite: sections of cells; each cell has its subjects, measured in rounds.
//!
//! Within a cell the subjects take turns (A B C, C B A, …), so that other activity of the machine affects all of them alike.

mod exports;
mod files;
mod generator;
mod media;
mod neighbour;
mod profiles;
mod routes;
mod tls;
mod volume;

pub use neighbour::compute;

use std::path::Path;
use std::time::Duration;

use weir_block::size::Size;
use weir_load::workload::Access;

use crate::bound::Bound;
use crate::comparison::Comparison;
use crate::driver::{Driver, Figures, Load};
use crate::error::{Failure, Outcome};
use crate::floor::Echo;
use crate::interrupt;
use crate::layers::LayerTimes;
use crate::machine::ProcessorTime;
use crate::process::cpu_seconds;
use crate::profile::Profile;
use crate::row::{Cell, EXTRA_ROUNDS, Metric, Row, Sample};
use crate::server::{Server, Transport, Workspace};

/// Weir's own name among the subjects.
const WEIR: &str = "weir";
/// The floor: batches over bare sockets.
const ECHO: &str = "bare echo";
/// The driver of a subject that has its own.
const OWN: &str = "-";

/// The extent of the measurements.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Rounds of every cell.
    pub repeats: usize,
    /// Length of one measurement.
    pub runtime: Duration,
    /// Load before each measurement, which does not count.
    pub warmup: Duration,
    /// Measure only cells whose name begins with this.
    pub only: String,
    /// Measure one selected cell of each section.
    pub short: bool,
    /// Size of the disks on the machine's own storage, in bytes.
    pub media_size: u64,
    /// Size of the file that the generator reads, in bytes.
    pub file_size: u64,
}

/// All results.
#[derive(Default)]
pub struct Results {
    /// Cells, in the order of measurement.
    pub cells: Vec<Cell>,
    /// Comparisons of Weir with its peers.
    pub comparisons: Vec<Comparison>,
    /// Figures with a limit of their own.
    pub bounds: Vec<Bound>,
    /// Where requests' time goes.
    pub layers: Vec<LayerTimes>,
    /// Profiles of processor time.
    pub profiles: Vec<Profile>,
    /// Sections that did not complete, and rows without a figure.
    pub failures: Vec<String>,
}

/// One server under one driver, or a process that needs none.
struct Subject<'a> {
    name: String,
    driver: &'static str,
    pids: Vec<u32>,
    measure: Box<dyn Fn() -> Outcome<Measured> + 'a>,
}

/// The result of a measurement.
#[derive(Clone, Copy, Default)]
struct Measured {
    figures: Figures,
    /// Steps of a neighbour's computation per second.
    neighbour: Option<f64>,
    /// CPU seconds of the server for each second, where it is a thread of this process.
    server_cpu: Option<f64>,
}

impl From<Figures> for Measured {
    fn from(figures: Figures) -> Measured {
        Measured { figures, ..Measured::default() }
    }
}

/// A running suite.
pub struct Suite<'a> {
    settings: &'a Settings,
    workspace: &'a Workspace,
    /// The `weir` program.
    weir: &'a Path,
    results: Results,
}

type Section<'a> = (&'static str, fn(&mut Suite<'a>) -> Outcome<()>);

impl<'a> Suite<'a> {
    const SECTIONS: [Section<'a>; 11] = [
        ("generator", Suite::generator),
        ("nbd unix", |suite| suite.one_copy(Transport::Unix)),
        ("nbd tcp", |suite| suite.one_copy(Transport::Tcp)),
        ("write-back+1", Suite::two_copies),
        ("tls", Suite::tls),
        ("media", Suite::media),
        ("files", Suite::files),
        ("volume", Suite::volume),
        ("routes", Suite::routes_on_a_disk),
        ("neighbour", Suite::neighbour),
        ("profile", Suite::profiles),
    ];

    /// Runs the selected sections. After a failed section it records the failure and continues with the next.
    pub fn run(settings: &'a Settings, workspace: &'a Workspace, weir: &'a Path) -> Results {
        let mut suite = Suite { settings, workspace, weir, results: Results::default() };
        for (name, section) in Suite::SECTIONS {
            if let Err(interrupted) = interrupt::check() {
                suite.results.failures.push(interrupted.to_string());
                break;
            }
            if let Err(failure) = section(&mut suite) {
                eprintln!("section {name} fails: {failure}");
                suite.results.failures.push(format!("{name}: {failure}"));
            }
        }
        if suite.results.cells.is_empty() && suite.results.failures.is_empty() {
            let names = Suite::SECTIONS.map(|(name, _)| name).join(", ");
            let none = format!("no cell's name begins with {:?}; the sections are {names}", settings.only);
            suite.results.failures.push(none);
        }
        suite.results
    }

    fn load(&self, access: Access, depth: u32) -> Load {
        let Settings { runtime, warmup, .. } = *self.settings;
        Load { access, depth, block: Size(4096), runtime, warmup, size: self.workspace.size }
    }

    /// A section's selected cells: all whose names begin with the requested text, and only one of them in the short form.
    fn wanted<T>(&self, name: impl Fn(&T) -> String, mut cells: Vec<T>) -> Vec<T> {
        cells.retain(|cell| name(cell).starts_with(&self.settings.only));
        cells.truncate(if self.settings.short { 1 } else { cells.len() });
        cells
    }

    /// Adds a finished cell and marks the best driver of each subject.
    fn finish(&mut self, mut cell: Cell, metric: Metric) {
        cell.mark_best(metric);
        for row in cell.rows.iter().filter(|row| row.is_empty()) {
            let Row { subject, driver, .. } = row;
            self.results.failures.push(format!("{}, {subject} under {driver}: no figure", cell.name));
        }
        self.results.cells.push(cell);
    }

    /// Records a comparison. A target without a comparison is a failure, except for measurements that are too short for the
    /// clocks.
    fn compare(&mut self, name: &str, compared: Option<Comparison>, target: Option<f64>) {
        match (compared, target) {
            (Some(one), Some(target)) => self.results.comparisons.push(one.aiming_at(target)),
            (Some(one), None) => self.results.comparisons.push(one),
            (None, Some(_)) if !self.settings.short => {
                self.results.failures.push(format!("{name}: its target cannot be checked"));
            }
            (None, _) => {}
        }
    }

    /// Records a figure with its limit; one that is missing is a failure, as in [`Suite::compare`].
    fn bound(&mut self, name: &str, bound: Option<Bound>) {
        match bound {
            Some(bound) => self.results.bounds.push(bound),
            None if !self.settings.short => {
                self.results.failures.push(format!("{name}: its limit cannot be checked"));
            }
            None => {}
        }
    }

    /// Measures every subject once in each round, alternately forwards and backwards; then again the subjects whose rounds
    /// differ.
    fn rounds(&self, cell: &str, subjects: &[Subject<'_>]) -> Outcome<Cell> {
        let empty = |subject: &Subject<'_>| Row {
            subject: subject.name.clone(),
            driver: subject.driver,
            samples: Vec::new(),
            extra_rounds: 0,
            best: false,
        };
        let mut rows: Vec<Row> = subjects.iter().map(empty).collect();
        for round in 0..self.settings.repeats {
            eprintln!("{cell}: round {} of {}", round + 1, self.settings.repeats);
            let mut order: Vec<usize> = (0..subjects.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                rows[index].samples.push(subjects[index].sample(cell)?);
            }
        }
        for extra in 1..=EXTRA_ROUNDS {
            let unsteady: Vec<usize> = (0..rows.len()).filter(|&index| rows[index].is_unsteady()).collect();
            if unsteady.is_empty() {
                break;
            }
            let names: Vec<&str> = unsteady.iter().map(|&index| &*rows[index].subject).collect();
            eprintln!("{cell}: round {extra} more of {}, whose rounds differ", names.join(", "));
            for index in unsteady {
                rows[index].samples.push(subjects[index].sample(cell)?);
                rows[index].extra_rounds = extra;
            }
        }
        Ok(Cell { name: cell.into(), rows })
    }
}

impl Subject<'_> {
    fn sample(&self, cell: &str) -> Outcome<Sample> {
        interrupt::check()?;
        self.measured().map_err(Failure::of(format!("{cell}, {} under {}", self.name, self.driver)))
    }

    fn measured(&self) -> Outcome<Sample> {
        let (machine, before) = (ProcessorTime::now()?, cpu_seconds(&self.pids)?);
        let Measured { figures, neighbour, server_cpu } = (self.measure)()?;
        let used = cpu_seconds(&self.pids)? - before;
        // The server also works during the warm-up: its figure is CPU time per second under load.
        let of_processes = if self.pids.is_empty() { 0.0 } else { used / figures.under_load };
        let server_cpu = server_cpu.unwrap_or(of_processes);
        let steal = ProcessorTime::now()?.steal_since(machine);
        Ok(Sample { figures, server_cpu, neighbour, steal })
    }
}

/// A server under a driver.
fn served<'a>(server: &'a dyn Server, driver: Driver, load: Load) -> Subject<'a> {
    Subject {
        name: server.name().into(),
        driver: driver.name(),
        pids: server.pids(),
        measure: Box::new(move || {
            let figures = driver.drive(server.uri(), &load)?;
            server.settle()?;
            Ok(figures.into())
        }),
    }
}

/// The floor of a request that takes all these hops in sequence: latencies add up, and at depth the slowest hop is the
/// bottleneck.
fn echoed<'a>(hops: Vec<&'a Echo>, load: Load) -> Subject<'a> {
    Subject {
        name: ECHO.into(),
        driver: OWN,
        pids: hops.iter().map(|echo| echo.pid()).collect(),
        measure: Box::new(move || Ok(over_all(&hops, &load)?.into())),
    }
}

fn over_all(hops: &[&Echo], load: &Load) -> Outcome<Figures> {
    let mut sum = Figures::default();
    for echo in hops {
        let hop = echo.drive(load.depth as usize, load.runtime / hops.len() as u32)?;
        sum.p50 += hop.p50;
        sum.p99 += hop.p99;
        sum.seconds += hop.seconds;
        sum.under_load += hop.under_load;
        sum.cpu += hop.cpu;
        sum.iops = match (sum.iops, load.depth) {
            (0.0, _) => hop.iops,
            (so_far, 1) => 1.0 / (1.0 / so_far + 1.0 / hop.iops),
            (so_far, _) => so_far.min(hop.iops),
        };
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell as Counter;

    use super::*;

    fn settings(only: &str, short: bool) -> Settings {
        Settings {
            repeats: 2,
            runtime: Duration::from_millis(1),
            warmup: Duration::ZERO,
            only: only.into(),
            short,
            media_size: 0,
            file_size: 0,
        }
    }

    fn workspace() -> Workspace {
        Workspace {
            directory: "/nonexistent".into(),
            storage: "/nonexistent".into(),
            file: "/nonexistent".into(),
            size: 1 << 20,
        }
    }

    fn subject<'a>(values: &'a [f64], taken: &'a Counter<usize>) -> Subject<'a> {
        let measure = move || {
            let figures = Figures {
                iops: values[taken.replace(taken.get() + 1)],
                under_load: 1.0,
                ..Figures::default()
            };
            Ok(figures.into())
        };
        Subject { name: "s".into(), driver: OWN, pids: Vec::new(), measure: Box::new(measure) }
    }

    #[test]
    fn a_row_whose_rounds_differ_is_measured_again_and_not_for_ever() {
        let (settings, workspace) = (settings("", false), workspace());
        let suite = Suite {
            settings: &settings,
            workspace: &workspace,
            weir: Path::new("weir"),
            results: Results::default(),
        };
        let (steady, settles, never) = (Counter::new(0), Counter::new(0), Counter::new(0));
        let subjects = [
            subject(&[100.0, 120.0], &steady),
            subject(&[100.0, 38.0, 101.0], &settles),
            subject(&[1.0, 10.0, 100.0, 1000.0, 10_000.0], &never),
        ];
        let cell = suite.rounds("c", &subjects).unwrap();
        let rounds = |row: &Row| (row.samples.len(), row.extra_rounds);
        assert_eq!(cell.rows.iter().map(rounds).collect::<Vec<_>>(), [(2, 0), (3, 1), (5, 3)]);
    }

    #[test]
    fn a_section_that_fails_and_a_name_that_nothing_has_are_told() {
        let workspace = workspace();
        let failures =
            |only| Suite::run(&settings(only, true), &workspace, Path::new("/nonexistent/weir")).failures;
        let failed = failures("write-back+1");
        assert!(failed.len() == 1 && failed[0].starts_with("write-back+1: "), "{failed:?}");
        let nothing = failures("write-back+9");
        assert!(nothing[0].contains("neighbour"), "{nothing:?}");
    }
}
