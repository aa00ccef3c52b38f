//! A disk as a file, beside its NBD export and beside an ordinary file on the same storage.

use std::path::{Path, PathBuf};

use weir_load::target::Target;
use weir_load::workload::Access;

use super::{Subject, Suite, served};
use crate::comparison::Comparison;
use crate::driver::{Driver, Load, fill, with_weir};
use crate::error::Outcome;
use crate::row::Metric;
use crate::server::{Server, Transport};
use crate::weir::{Cluster, ClusterConfig};

/// The file of the disk.
const FILE: &str = "disk's file (FUSE)";
/// A file in the directory of the disk's volume.
const PLAIN: &str = "ordinary file";

impl Suite<'_> {
    /// Without a log and in memory: what is left is the way to the disk.
    pub(super) fn files(&mut self) -> Outcome<()> {
        let name = |load: &Load| format!("files {}", load.name());
        let loads =
            [(Access::RandRead, 32), (Access::RandWrite, 32), (Access::RandRead, 1), (Access::RandWrite, 1)];
        let loads = loads.into_iter().map(|(access, depth)| self.load(access, depth)).collect();
        let loads = self.wanted(name, loads);
        if loads.is_empty() {
            return Ok(());
        }
        let in_memory = ClusterConfig::in_memory(self.workspace, Transport::Unix, "write-through");
        let config = ClusterConfig { name: "NBD export", files: true, ..in_memory };
        let cluster = Cluster::start(self.weir, self.workspace, &config)?;
        let (file, plain) = (cluster.file()?, self.workspace.directory.join("ordinary"));
        std::fs::File::create(&plain)?.set_len(self.workspace.size)?;
        fill(&Target::Path(plain.clone()))?;
        for load in loads {
            let subjects = [
                of_path(FILE, &file, cluster.pids(), load),
                served(&cluster, Driver::Weir, load),
                of_path(PLAIN, &plain, Vec::new(), load),
            ];
            let cell = self.rounds(&name(&load), &subjects)?;
            let metric = if load.depth == 1 { Metric::P50 } else { Metric::Iops };
            let ours = cell.under(FILE, Driver::Weir.name());
            for theirs in [cluster.name(), PLAIN] {
                let theirs = cell.under(theirs, Driver::Weir.name());
                let both = ours.zip(theirs);
                let compared =
                    both.and_then(|(ours, theirs)| Comparison::of(&cell.name, metric, ours, theirs));
                self.compare(&cell.name, compared, None);
            }
            self.finish(cell, metric);
        }
        Ok(std::fs::remove_file(plain)?)
    }
}

fn of_path<'a>(name: &str, path: &Path, pids: Vec<u32>, load: Load) -> Subject<'a> {
    let path: PathBuf = path.to_owned();
    Subject {
        name: name.into(),
        driver: Driver::Weir.name(),
        pids,
        measure: Box::new(move || Ok(with_weir(&Target::Path(path.clone()), &load)?.into())),
    }
}
