//! What is measured: cells, each with its contestants, round after round.
//!
//! Within a cell the contestants take turns (A B C, C B A, …), so that whatever else the machine does falls on all of
//! them alike, and a ratio is formed from neighbours in time.

mod generator;
mod media;

use std::time::Duration;

use weir_load::workload::Access;

use crate::driver::{Driver, Figures, Load};
use crate::error::{Failure, Outcome};
use crate::floor::Echo;
use crate::process::cpu_seconds;
use crate::result::{Entry, Metric, Sample, Series, compare};
use crate::server::{self, Place, Server, Transport};
use crate::weir::Cluster;

/// Weir's own name among the contestants.
const WEIR: &str = "weir";
/// The floor: one or several hops over bare sockets.
const HOPS: &str = "bare hops";

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Rounds of every cell.
    pub repeats: usize,
    /// Length of one measurement.
    pub runtime: Duration,
    /// Only cells whose name contains this.
    pub only: String,
}

/// Everything that was measured.
#[derive(Default)]
pub struct Results {
    /// By cell: all series.
    pub cells: Vec<(String, Vec<Series>)>,
    /// Weir beside its peers.
    pub entries: Vec<Entry>,
}

/// One contestant of a cell.
struct Contestant<'a> {
    name: String,
    pids: Vec<u32>,
    measure: Box<dyn Fn() -> Outcome<Figures> + 'a>,
}

/// The suite at work.
pub struct Suite<'a> {
    settings: &'a Settings,
    place: &'a Place,
    results: Results,
}

impl<'a> Suite<'a> {
    /// Runs everything. `weir` is the program.
    pub fn run(settings: &'a Settings, place: &'a Place, weir: &std::path::Path) -> Outcome<Results> {
        let mut suite = Suite { settings, place, results: Results::default() };
        suite.generator(weir)?;
        suite.exports(Transport::Unix, weir)?;
        suite.exports(Transport::Tcp, weir)?;
        suite.two_copies(weir)?;
        suite.media(weir)?;
        Ok(suite.results)
    }

    fn wants(&self, cell: &str) -> bool {
        cell.contains(&self.settings.only)
    }

    fn load(&self, access: Access, depth: u32) -> Load {
        Load { access, depth, runtime: self.settings.runtime, size: self.place.size }
    }

    /// One copy, over one kind of socket.
    fn exports(&mut self, transport: Transport, weir: &std::path::Path) -> Outcome<()> {
        let mut loads = vec![(Access::RandRead, 32), (Access::RandWrite, 32), (Access::RandRead, 1)];
        let mut drivers = vec![Driver::Weir];
        if transport == Transport::Unix {
            loads.push((Access::RandWrite, 1));
            drivers.push(Driver::Fio);
        }
        let cell = |load: &Load| format!("nbd {} {}", transport.name(), load.name());
        let mut loads: Vec<Load> =
            loads.into_iter().map(|(access, depth)| self.load(access, depth)).collect();
        loads.retain(|load| self.wants(&cell(load)));
        if loads.is_empty() {
            return Ok(());
        }
        let mut servers: Vec<Box<dyn Server>> = vec![
            Box::new(Cluster::start(weir, self.place, transport, "write-through")?),
            Box::new(server::qemu(self.place, transport)?),
            Box::new(server::nbdkit_memory(self.place, transport)?),
        ];
        if transport == Transport::Unix {
            servers.push(Box::new(server::nbdkit_file(self.place, transport)?));
        }
        let echo = Echo::start(self.place, transport)?;
        for load in &loads {
            self.beside(&cell(load), load, &drivers, &servers, &[&echo])?;
        }
        Ok(())
    }

    /// Two copies, synchronously: this host and another.
    fn two_copies(&mut self, weir: &std::path::Path) -> Outcome<()> {
        let cell = |load: &Load| format!("write-back+1 nbd {}", load.name());
        let mut loads = vec![self.load(Access::RandWrite, 32), self.load(Access::RandWrite, 1)];
        loads.retain(|load| self.wants(&cell(load)));
        if loads.is_empty() {
            return Ok(());
        }
        let servers: Vec<Box<dyn Server>> = vec![
            Box::new(Cluster::start(weir, self.place, Transport::Unix, "write-back+1")?),
            Box::new(server::qemu_quorum(self.place)?),
        ];
        let (near, far) =
            (Echo::start(self.place, Transport::Unix)?, Echo::start(self.place, Transport::Tcp)?);
        for load in &loads {
            self.beside(&cell(load), load, &[Driver::Weir, Driver::Fio], &servers, &[&near, &far])?;
        }
        Ok(())
    }

    /// One load: every server under every driver, and the floor. The first server is Weir.
    fn beside(
        &mut self,
        cell: &str,
        load: &Load,
        drivers: &[Driver],
        servers: &[Box<dyn Server>],
        hops: &[&Echo],
    ) -> Outcome<()> {
        let mut contestants = Vec::new();
        for &driver in drivers {
            for server in servers {
                contestants.push(Contestant {
                    name: under(driver, server.name()),
                    pids: server.pids(),
                    measure: Box::new(move || driver.drive(server.uri(), load)),
                });
            }
        }
        contestants.push(Contestant {
            name: HOPS.into(),
            pids: hops.iter().map(|echo| echo.pid()).collect(),
            measure: Box::new(move || over_all(hops, load)),
        });
        let series = self.rounds(cell, &contestants)?;
        let peers: Vec<&str> =
            servers.iter().map(|server| server.name()).filter(|&name| name != WEIR).collect();
        for &driver in drivers {
            self.compare_servers(cell, load.depth, driver, &peers, &series);
        }
        self.results.cells.push((cell.into(), series));
        Ok(())
    }

    /// Weir beside each other server under the same driver, and beside the floor under its own driver. The floor
    /// does no work for a request, so only its speed says something.
    fn compare_servers(&mut self, cell: &str, depth: u32, driver: Driver, peers: &[&str], series: &[Series]) {
        let metrics =
            if depth == 1 { [Metric::P50, Metric::Iops] } else { [Metric::Iops, Metric::PerServerCpu] };
        let name = format!("{cell}{}", if driver == Driver::Fio { " fio" } else { "" });
        let Some(ours) = find(series, &under(driver, WEIR)) else { return };
        for &peer in peers {
            if let Some(theirs) = find(series, &under(driver, peer)) {
                let theirs = Series { contestant: peer.into(), ..theirs.clone() };
                let compared = metrics.iter().filter_map(|&metric| compare(&name, metric, ours, &theirs));
                self.results.entries.extend(compared);
            }
        }
        if let (Driver::Weir, Some(floor)) = (driver, find(series, HOPS)) {
            self.results.entries.extend(compare(&name, metrics[0], ours, floor));
        }
    }

    /// Every contestant once in each round, forwards and backwards by turns.
    fn rounds(&self, cell: &str, contestants: &[Contestant<'_>]) -> Outcome<Vec<Series>> {
        let empty =
            |contestant: &Contestant<'_>| Series { contestant: contestant.name.clone(), samples: Vec::new() };
        let mut series: Vec<Series> = contestants.iter().map(empty).collect();
        for round in 0..self.settings.repeats {
            eprintln!("{cell}: round {} of {}", round + 1, self.settings.repeats);
            let mut order: Vec<usize> = (0..contestants.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let sample = contestants[index].sample();
                let sample = sample.map_err(Failure::of(format!("{cell}, {}", contestants[index].name)))?;
                series[index].samples.push(sample);
            }
        }
        Ok(series)
    }
}

impl Contestant<'_> {
    fn sample(&self) -> Outcome<Sample> {
        let (before, start) = (cpu_seconds(&self.pids)?, weir_block::Nanos::now());
        let figures = (self.measure)()?;
        let seconds = (weir_block::Nanos::now() - start).as_secs_f64();
        // The server also works while the load warms up: what counts is its use per second under load.
        let under_load = seconds.min(figures.seconds + crate::driver::WARMUP.as_secs_f64());
        Ok(Sample { figures, server_cpu: (cpu_seconds(&self.pids)? - before) / under_load })
    }
}

/// The floor of a request that takes all these hops one after the other: latencies add up, and at depth the slowest
/// hop decides.
fn over_all(hops: &[&Echo], load: &Load) -> Outcome<Figures> {
    let mut sum = Figures::default();
    for echo in hops {
        let hop = echo.drive(load.depth as usize, load.runtime / hops.len() as u32)?;
        sum.p50 += hop.p50;
        sum.p99 += hop.p99;
        sum.seconds += hop.seconds;
        sum.cpu += hop.cpu;
        sum.iops = match (sum.iops, load.depth) {
            (0.0, _) => hop.iops,
            (so_far, 1) => 1.0 / (1.0 / so_far + 1.0 / hop.iops),
            (so_far, _) => so_far.min(hop.iops),
        };
    }
    Ok(sum)
}

/// A contestant's name: what fio drives is marked.
fn under(driver: Driver, server: &str) -> String {
    match driver {
        Driver::Weir => server.into(),
        Driver::Fio => format!("{server} (fio)"),
    }
}

fn find<'s>(series: &'s [Series], contestant: &str) -> Option<&'s Series> {
    series.iter().find(|series| series.contestant == contestant)
}
