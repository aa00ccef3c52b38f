//! A disk of a shared volume on a LUN in memory: by each route, beside the LUN itself, and beside what people use instead.

use std::path::Path;

use weir_load::target::Target;
use weir_load::workload::Access;

use super::{OWN, Subject, Suite, served};
use crate::alone;
use crate::comparison::Comparison;
use crate::driver::{Driver, Load, fill, with_weir};
use crate::error::Outcome;
use crate::layers::LayerTimes;
use crate::lun::{RamLun, SharedVolume, Way};
use crate::row::{Cell, Metric};
use crate::server::{self, Server, Transport};

/// The LUN without a volume, under the same generator in the same loop. The difference is what the volume takes: it has the targets.
const RAW: &str = "LUN as a backing";
/// The LUN under a generator that does nothing else, with buffers that the kernel keeps mapped: the most that it gives. The difference
/// to the row before is what a node's loop takes, with or without a volume.
const BARE: &str = "LUN, bare io_uring";
/// Beyond the disk, for the tables of a qcow2 image, in bytes.
const TABLES: u64 = 64 << 20;

/// Target for requests per second at depth, as a fraction of the LUN's own.
fn target(way: Way) -> f64 {
    match way {
        Way::DirectHere | Way::Direct => 0.97,
        Way::FileHere => 0.90,
        Way::FileThere | Way::BlockThere => 0.70,
    }
}

impl Suite<'_> {
    /// The generator within the disk's owner, below the accelerator; and guests' requests over NBD.
    pub(super) fn volume(&mut self) -> Outcome<()> {
        let layer = self.wanted(|load: &Load| format!("volume backing {}", load.name()), self.volume_loads());
        let nbd = self.wanted(|load: &Load| format!("volume nbd {}", load.name()), self.volume_loads());
        if layer.is_empty() && nbd.is_empty() {
            return Ok(());
        }
        let size = self.workspace.size;
        // After the volume.
        let lun = RamLun::empty(self.workspace, SharedVolume::lun_size(size), 2)?;
        let volume = SharedVolume::start(self.weir, self.workspace, lun.paths(), size)?;
        let raw = RamLun::filled(self.workspace, size)?;
        let relayed = server::qemu_on_lun(self.workspace, raw.path(), Transport::Tcp)?;
        for load in layer {
            let name = format!("volume backing {}", load.name());
            let cell = self.routes(&name, &volume, raw.path(), &relayed, load)?;
            self.beside_raw(&cell, metric(&load), |way| (load.depth > 1).then(|| target(way)));
            self.finish(cell, metric(&load));
        }
        drop(relayed);
        if nbd.is_empty() {
            return Ok(());
        }
        let image = RamLun::empty(self.workspace, size + TABLES, 1)?;
        let peers = [
            server::qemu_on_lun(self.workspace, raw.path(), Transport::Unix)?,
            server::qemu_qcow2_on_lun(self.workspace, image.path())?,
        ];
        fill(&Target::Nbd(peers[1].uri().clone()))?;
        for load in nbd {
            let cell =
                self.exports_of_volume(&format!("volume nbd {}", load.name()), &volume, &peers, load)?;
            self.beside_qemu(&cell, &load);
            self.layers_of_volume(&cell.name, &volume, load)?;
            self.finish(cell, metric(&load));
        }
        Ok(())
    }

    fn volume_loads(&self) -> Vec<Load> {
        let loads =
            [(Access::RandRead, 32), (Access::RandWrite, 32), (Access::RandRead, 1), (Access::RandWrite, 1)];
        loads.into_iter().map(|(access, depth)| self.load(access, depth)).collect()
    }

    /// The generator on the LUN alone, in the owner of a disk by each route, and as a client of another program that redirects: `relayed`.
    pub(super) fn routes(
        &self,
        cell: &str,
        volume: &SharedVolume,
        raw: &Path,
        relayed: &server::Peer,
        load: Load,
    ) -> Outcome<Cell> {
        let subject =
            |name: &str, measure| Subject { name: name.into(), driver: OWN, pids: Vec::new(), measure };
        let mut subjects = vec![
            subject(RAW, Box::new(move || Ok(alone::drive(raw, &load)?.into()))),
            subject(BARE, Box::new(move || Ok(with_weir(&Target::Path(raw.into()), &load)?.into()))),
        ];
        subjects.extend(Way::ALL.map(|way| Subject {
            name: way.name().into(),
            driver: OWN,
            pids: volume.pids(),
            measure: Box::new(move || Ok(volume.drive(way, &load)?.into())),
        }));
        subjects.push(served(relayed, Driver::Weir, load));
        self.rounds(cell, &subjects)
    }

    fn exports_of_volume(
        &self,
        cell: &str,
        volume: &SharedVolume,
        peers: &[server::Peer],
        load: Load,
    ) -> Outcome<Cell> {
        let mut subjects = Vec::new();
        for way in Way::ALL {
            let uri = volume.uri(way)?;
            subjects.push(Subject {
                name: way.name().into(),
                driver: Driver::Weir.name(),
                pids: volume.pids(),
                measure: Box::new(move || {
                    volume.take(way)?;
                    Ok(Driver::Weir.drive(&uri, &load)?.into())
                }),
            });
        }
        subjects.extend(peers.iter().map(|peer| served(peer, Driver::Weir, load)));
        self.rounds(cell, &subjects)
    }

    /// A single request in flight waits for nothing but itself: where its time goes is where latency comes from.
    fn layers_of_volume(&mut self, cell: &str, volume: &SharedVolume, load: Load) -> Outcome<()> {
        if load.depth > 1 && !self.settings.short {
            return Ok(());
        }
        for way in Way::ALL {
            let layers = volume.layers(self.weir, way, &load)?;
            self.results.layers.push(LayerTimes { cell: cell.into(), subject: way.name().into(), layers });
        }
        Ok(())
    }

    pub(super) fn beside_raw(&mut self, cell: &Cell, metric: Metric, target: impl Fn(Way) -> Option<f64>) {
        for (peer, has_target) in [(RAW, true), (BARE, false)] {
            let Some(raw) = cell.under(peer, OWN) else { continue };
            for way in Way::ALL {
                let ours = cell.under(way.name(), OWN);
                let compared = ours.and_then(|ours| Comparison::of(&cell.name, metric, ours, raw));
                self.compare(&cell.name, compared, target(way).filter(|_| has_target));
            }
        }
        let Some(relayed) = cell.under(server::QEMU_ON_LUN_TCP, Driver::Weir.name()) else { return };
        for way in [Way::FileThere, Way::BlockThere] {
            let ours = cell.under(way.name(), OWN);
            let compared = ours.and_then(|ours| Comparison::of(&cell.name, metric, ours, relayed));
            self.compare(&cell.name, compared, None);
        }
        if let Some(raw) = cell.under(RAW, OWN) {
            let compared = Comparison::of(&cell.name, metric, relayed, raw);
            self.compare(&cell.name, compared, None);
        }
    }

    fn beside_qemu(&mut self, cell: &Cell, load: &Load) {
        let driver = Driver::Weir.name();
        let Some(ours) = cell.under(Way::Direct.name(), driver) else { return };
        for peer in [server::QEMU_ON_LUN, server::QEMU_QCOW2] {
            let second = if load.depth == 1 { Metric::Iops } else { Metric::PerServerCpu };
            for metric in [metric(load), second] {
                let theirs = cell.under(peer, driver);
                let compared = theirs.and_then(|theirs| Comparison::of(&cell.name, metric, ours, theirs));
                self.compare(&cell.name, compared, None);
            }
        }
    }
}

/// Latency for a single request in flight, throughput for several.
fn metric(load: &Load) -> Metric {
    if load.depth == 1 { Metric::P50 } else { Metric::Iops }
}
