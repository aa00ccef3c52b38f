//! A disk of a shared volume by each route, on a *simulated* disk of 15 000 revolutions a minute: order is what such a disk rewards.
//!
//! A published measurement of another shared volume (one such disk, 8 KiB, depth 8) had sequential writes fall from 17,311 requests a second
//! to some 800 when they were redirected.

use weir_block::size::Size;
use weir_lab::mechanical_disk::MechanicalDisk;
use weir_load::target::Target;
use weir_load::workload::Access;

use super::Suite;
use crate::driver::{Load, fill};
use crate::error::{Failure, Outcome};
use crate::lun::SharedVolume;
use crate::row::Metric;
use crate::server::{self, Transport};

/// Targets for requests per second, as fractions of the LUN's own.
const SEQUENTIAL_WRITE: f64 = 0.95;
const OTHERS: f64 = 0.98;
/// Nodes with a path to the LUN.
const PATHS: usize = 2;

impl Suite<'_> {
    /// Four patterns, by each route.
    pub(super) fn routes_on_a_disk(&mut self) -> Outcome<()> {
        let size = self.settings.media_size;
        let load = |access| Load {
            depth: 8,
            block: Size(8192),
            // Random requests take milliseconds.
            runtime: 2 * self.settings.runtime,
            size,
            ..self.load(access, 8)
        };
        let patterns = [Access::Write, Access::Read, Access::RandWrite, Access::RandRead];
        let loads = self.wanted(
            |load: &Load| format!("routes {}", load.name()),
            patterns.into_iter().map(load).collect(),
        );
        if loads.is_empty() {
            return Ok(());
        }
        let bytes = usize::try_from(SharedVolume::lun_size(size)).map_err(Failure::of("the LUN's size"))?;
        let directory = tempfile::Builder::new().prefix("disk-").tempdir_in(&self.workspace.directory)?;
        // Two of the same: one has the volume.
        let alone = MechanicalDisk::create(&directory.path().join("alone"), bytes, 1)?;
        let shared = MechanicalDisk::create(&directory.path().join("shared"), bytes, PATHS)?;
        let raw = alone.paths().remove(0);
        fill(&Target::Path(raw.clone()))?;
        let volume = SharedVolume::start(self.weir, self.workspace, shared.paths(), size)?;
        let relayed = server::qemu_on_lun(self.workspace, &raw, Transport::Tcp)?;
        alone.turn(true);
        shared.turn(true);
        for load in loads {
            let cell = self.routes(&format!("routes {}", load.name()), &volume, &raw, &relayed, load)?;
            let target = if load.access == Access::Write { SEQUENTIAL_WRITE } else { OTHERS };
            self.beside_raw(&cell, Metric::Iops, |_| Some(target));
            self.finish(cell, Metric::Iops);
        }
        shared.turn(false);
        Ok(())
    }
}
