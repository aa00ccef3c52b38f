//! The generator against fio: the same load on the null target, on a file and over NBD, and its processor time.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use weir_load::workload::Access;

use super::{OWN, Subject, Suite, WEIR, served};
use crate::comparison::Comparison;
use crate::driver::{Driver, Figures, Load, fio_process, weir_process};
use crate::error::{Failure, Outcome};
use crate::row::{Metric, Row};
use crate::server::{self, Server, Transport};
use crate::weir::{Cluster, ClusterConfig};

/// Weir's targets, as ratios of requests for each CPU second.
const NULL_TARGET: f64 = 4.0;
const FILE_TARGET: f64 = 1.15;
const NBD_TARGET: f64 = 3.0;

/// fio's configurations on the file, each with its options besides `io_uring`, `registerfiles=1`, `fixedbufs=1`, `direct=1` and
/// `norandommap=1`. By default fio submits each request by itself; batches cost it less.
const FIO_ON_A_FILE: [(&str, &[&str]); 2] = [
    ("fio io_uring", &[]),
    (
        "fio io_uring, batched",
        &["--iodepth_batch_submit=16", "--iodepth_batch_complete_min=1", "--iodepth_batch_complete_max=32"],
    ),
];

/// The targets of the generator's section. Weir's generator and fio drive each.
#[derive(Clone, Copy)]
enum Work {
    Null,
    File,
    Nbd(&'static str),
}

impl Suite<'_> {
    /// All cells of the generator; also in the short form, because each opens another kind of target.
    pub(super) fn generator(&mut self) -> Outcome<()> {
        let load = self.load(Access::RandRead, 32);
        let works = [
            Work::Null,
            Work::File,
            Work::Nbd("nbdkit memory"),
            Work::Nbd("qemu-storage-daemon"),
            Work::Nbd(WEIR),
        ];
        for work in works {
            let cell = match work {
                Work::Null => "generator null".to_owned(),
                Work::File => format!("generator file {}", load.name()),
                Work::Nbd(server) => format!("generator nbd unix {} on {server}", load.name()),
            };
            if !cell.starts_with(&self.settings.only) {
                continue;
            }
            match work {
                Work::Null => self.on_nothing(&cell, load)?,
                Work::File => self.on_a_file(&cell, load)?,
                Work::Nbd(server) => self.over_nbd(&cell, load, server)?,
            }
        }
        Ok(())
    }

    fn on_nothing(&mut self, cell: &str, load: Load) -> Outcome<()> {
        let subject = |driver: Driver| Subject {
            name: "null".into(),
            driver: driver.name(),
            pids: Vec::new(),
            measure: Box::new(move || Ok(driver.drive_null(&load)?.into())),
        };
        let cell = self.rounds(cell, &Driver::ALL.map(subject))?;
        self.beside_fio(
            &cell.name,
            &cell.rows[0],
            &cell.rows[1],
            &[(Metric::PerDriverCpu, Some(NULL_TARGET))],
        );
        self.finish(cell, Metric::PerDriverCpu);
        Ok(())
    }

    /// Both generators in processes of their own, so that the CPU time of all their threads counts.
    fn on_a_file(&mut self, cell: &str, load: Load) -> Outcome<()> {
        let load = Load { size: self.settings.file_size, ..load };
        let file = &written_file(&self.workspace.storage, load.size)?;
        let weir = self.weir;
        let ours = of_process(WEIR, move || weir_process(weir, file, &load));
        let fio =
            FIO_ON_A_FILE.map(|(name, options)| of_process(name, move || fio_process(options, file, &load)));
        let subjects: Vec<Subject<'_>> = std::iter::once(ours).chain(fio).collect();
        let cell = self.rounds(cell, &subjects)?;
        for fio in &cell.rows[1..] {
            let target = (fio.subject == FIO_ON_A_FILE[0].0).then_some(FILE_TARGET);
            let metrics = [(Metric::PerDriverCpu, target), (Metric::Iops, None)];
            self.beside_fio(&cell.name, &cell.rows[0], fio, &metrics);
        }
        self.finish(cell, Metric::PerDriverCpu);
        std::fs::remove_file(file).map_err(Failure::of(format!("cannot remove {}", file.display())))
    }

    /// Both clients on the same server.
    fn over_nbd(&mut self, cell: &str, load: Load, name: &str) -> Outcome<()> {
        let weir = ClusterConfig::in_memory(self.workspace, Transport::Unix, "write-through");
        let server: Box<dyn Server> = match name {
            WEIR => Box::new(Cluster::start(self.weir, self.workspace, &weir)?),
            "nbdkit memory" => Box::new(server::nbdkit_memory(self.workspace, Transport::Unix)?),
            _ => Box::new(server::qemu(self.workspace, Transport::Unix)?),
        };
        let cell = self.rounds(cell, &Driver::ALL.map(|driver| served(&*server, driver, load)))?;
        let metrics = [(Metric::PerDriverCpu, Some(NBD_TARGET)), (Metric::Iops, Some(NBD_TARGET))];
        self.beside_fio(&cell.name, &cell.rows[0], &cell.rows[1], &metrics);
        self.finish(cell, Metric::Iops);
        Ok(())
    }

    /// Compares Weir's generator with fio, which is the peer here and not only a driver.
    fn beside_fio(&mut self, cell: &str, ours: &Row, fio: &Row, metrics: &[(Metric, Option<f64>)]) {
        let peer = if fio.driver == OWN { fio.subject.clone() } else { "fio".into() };
        for &(metric, target) in metrics {
            let compared = Comparison::of(cell, metric, ours, fio);
            let compared = compared.map(|one| Comparison { peer: peer.clone(), ..one });
            self.compare(cell, compared, target);
        }
    }
}

fn of_process<'a>(name: &str, measure: impl Fn() -> Outcome<Figures> + 'a) -> Subject<'a> {
    let measure = Box::new(move || Ok(measure()?.into()));
    Subject { name: name.into(), driver: OWN, pids: Vec::new(), measure }
}

/// A file without holes on the machine's own storage, synced to the device.
fn written_file(storage: &Path, size: u64) -> Outcome<PathBuf> {
    let path = storage.join("generator");
    let failed = format!("cannot fill {}", path.display());
    let fill = || -> std::io::Result<()> {
        let mut file = File::create(&path)?;
        let (mut piece, mut random) = (vec![0; 4 << 20], fastrand::Rng::with_seed(size));
        for _ in 0..size / piece.len() as u64 {
            random.fill(&mut piece);
            file.write_all(&piece)?;
        }
        file.sync_all()
    };
    fill().map_err(Failure::of(failed))?;
    Ok(path)
}
