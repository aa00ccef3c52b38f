//! The generator beside fio: the same work on nothing, on a file and over NBD, and what it costs its processor.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use weir_load::workload::Access;

use super::{Contestant, Suite, WEIR};
use crate::driver::{Driver, Load, fio_process, weir_process};
use crate::error::{Failure, Outcome};
use crate::result::{Entry, Metric, compare};
use crate::server::{self, Server, Transport};
use crate::weir::Cluster;

/// Bytes of the file: more than a device's own cache has.
const FILE: u64 = 1 << 30;

/// What Weir aims at, as ratios of requests for each CPU second.
const NULL_TARGET: f64 = 4.0;
const FILE_TARGET: f64 = 1.15;
const NBD_TARGET: f64 = 3.0;

/// fio on the file, each with what it has besides `io_uring`, `registerfiles=1`, `fixedbufs=1`, `direct=1` and
/// `norandommap=1`. By default it submits each request by itself; batches cost it less.
const FIO_ON_A_FILE: [(&str, &[&str]); 2] = [
    ("fio io_uring", &[]),
    (
        "fio io_uring, batches of 16",
        &["--iodepth_batch_submit=16", "--iodepth_batch_complete_min=1", "--iodepth_batch_complete_max=32"],
    ),
];

impl Suite<'_> {
    /// All cells of the generator.
    pub(super) fn generator(&mut self, weir: &Path) -> Outcome<()> {
        self.on_nothing()?;
        self.on_a_file(weir)?;
        self.over_nbd(weir)
    }

    fn on_nothing(&mut self) -> Outcome<()> {
        let cell = "generator null";
        if !self.wants(cell) {
            return Ok(());
        }
        let load = self.load(Access::RandRead, 32);
        let contestant = |name: &str, driver: Driver| Contestant {
            name: name.into(),
            pids: Vec::new(),
            measure: Box::new(move || driver.drive_null(&load)),
        };
        let series =
            self.rounds(cell, &[contestant(WEIR, Driver::Weir), contestant("fio null", Driver::Fio)])?;
        let entry = compare(cell, Metric::PerDriverCpu, &series[0], &series[1]);
        self.results.entries.extend(entry.map(|entry| entry.aiming_at(NULL_TARGET)));
        self.results.cells.push((cell.into(), series));
        Ok(())
    }

    /// Both as processes of their own, so that no thread of them is forgotten.
    fn on_a_file(&mut self, weir: &Path) -> Outcome<()> {
        let load = Load { size: FILE, ..self.load(Access::RandRead, 32) };
        let cell = format!("generator file {}", load.name());
        if !self.wants(&cell) {
            return Ok(());
        }
        let file = &written_file(&self.place.storage)?;
        let mut contestants = vec![Contestant {
            name: WEIR.into(),
            pids: Vec::new(),
            measure: Box::new(move || weir_process(weir, file, &load)),
        }];
        for (name, options) in FIO_ON_A_FILE {
            contestants.push(Contestant {
                name: name.into(),
                pids: Vec::new(),
                measure: Box::new(move || fio_process(options, file, &load)),
            });
        }
        let series = self.rounds(&cell, &contestants)?;
        for fio in &series[1..] {
            let cost = compare(&cell, Metric::PerDriverCpu, &series[0], fio);
            let is_usual = fio.contestant == FIO_ON_A_FILE[0].0;
            let aimed = |entry: Entry| if is_usual { entry.aiming_at(FILE_TARGET) } else { entry };
            self.results.entries.extend(cost.map(aimed));
            self.results.entries.extend(compare(&cell, Metric::Iops, &series[0], fio));
        }
        self.results.cells.push((cell, series));
        std::fs::remove_file(file).map_err(Failure::of(format!("cannot remove {}", file.display())))
    }

    /// The same servers under both clients.
    fn over_nbd(&mut self, weir: &Path) -> Outcome<()> {
        let load = self.load(Access::RandRead, 32);
        type Start<'a> = Box<dyn Fn() -> Outcome<Box<dyn Server>> + 'a>;
        let place = self.place;
        let starts: [(&str, Start<'_>); 3] = [
            ("nbdkit memory", Box::new(|| Ok(Box::new(server::nbdkit_memory(place, Transport::Unix)?)))),
            ("qemu-storage-daemon", Box::new(|| Ok(Box::new(server::qemu(place, Transport::Unix)?)))),
            (WEIR, Box::new(|| Ok(Box::new(Cluster::start(weir, place, Transport::Unix, "write-through")?)))),
        ];
        for (name, start) in starts {
            let cell = format!("generator nbd unix {} on {name}", load.name());
            if !self.wants(&cell) {
                continue;
            }
            let server = start()?;
            let uri = server.uri();
            let contestant = |name: &str, driver: Driver| Contestant {
                name: name.into(),
                pids: server.pids(),
                measure: Box::new(move || driver.drive(uri, &load)),
            };
            let series =
                self.rounds(&cell, &[contestant(WEIR, Driver::Weir), contestant("fio nbd", Driver::Fio)])?;
            for metric in [Metric::PerDriverCpu, Metric::Iops] {
                let entry = compare(&cell, metric, &series[0], &series[1]);
                self.results.entries.extend(entry.map(|entry| entry.aiming_at(NBD_TARGET)));
            }
            self.results.cells.push((cell, series));
        }
        Ok(())
    }
}

/// A file on the machine's own storage that has no holes and lies on the device.
fn written_file(storage: &Path) -> Outcome<PathBuf> {
    let path = storage.join("generator");
    let failed = format!("cannot fill {}", path.display());
    let fill = || -> std::io::Result<()> {
        let mut file = File::create(&path)?;
        let (mut piece, mut random) = (vec![0; 4 << 20], fastrand::Rng::with_seed(FILE));
        for _ in 0..FILE / piece.len() as u64 {
            random.fill(&mut piece);
            file.write_all(&piece)?;
        }
        file.sync_all()
    };
    fill().map_err(Failure::of(failed))?;
    Ok(path)
}
