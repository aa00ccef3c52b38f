//! Write-back on each medium beside the backing alone, and beside the floor of each.
//!
//! Backing and flash are files on the machine's own storage, so on one device here; on a host they would be two.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use weir_block::{BufferPool, Nanos};
use weir_load::tally::{IoKind, Tally};
use weir_load::workload::Access;
use weir_node::api::Medium;

use super::{Contestant, Suite, find};
use crate::driver::{Driver, Figures, Load};
use crate::error::{Failure, Outcome};
use crate::floor::Echo;
use crate::result::{Metric, compare};
use crate::server::{Server, Transport};
use crate::weir::{Cluster, Shape};

/// Bytes of the disks.
const SIZE: u64 = 128 << 20;
/// What one 4 KiB write takes on flash: its data and a header.
const FRAME: usize = 8192;
/// Bytes that the floor writes over, again and again.
const RING: u64 = 64 << 20;

/// The backing alone, as everything else is compared with it.
const BACKING: &str = "backing alone";

impl Suite<'_> {
    /// `write-back+0` and `+1` on RAM and flash.
    pub(super) fn media(&mut self, weir: &Path) -> Outcome<()> {
        let cell = |load: &Load| format!("media {}", load.name());
        let mut loads =
            [1, 32].map(|depth| Load { size: SIZE, ..self.load(Access::RandWrite, depth) }).to_vec();
        loads.retain(|load| self.wants(&cell(load)));
        if loads.is_empty() {
            return Ok(());
        }
        let shape = |(name, policy, medium)| Shape {
            name,
            transport: Transport::Unix,
            policy,
            medium,
            storage: &self.place.storage,
            size: SIZE,
        };
        let shapes = [
            (BACKING, "write-through", Medium::Ram),
            ("write-back+0 on ram", "write-back+0", Medium::Ram),
            ("write-back+1 on ram", "write-back+1", Medium::Ram),
            ("write-back+0 on flash", "write-back+0", Medium::Flash),
            ("write-back+1 on flash", "write-back+1", Medium::Flash),
        ];
        let start = |named| Cluster::of(weir, self.place, &shape(named));
        let clusters = shapes.into_iter().map(start).collect::<Outcome<Vec<Cluster>>>()?;
        let hop = Echo::start(self.place, Transport::Unix)?;
        let floor = self.place.storage.join("floor");
        std::fs::write(&floor, vec![1; RING as usize])?;
        for load in loads {
            let mut contestants: Vec<Contestant<'_>> =
                clusters.iter().map(|one| of_cluster(one, load)).collect();
            contestants.push(Contestant {
                name: "bare hop".into(),
                pids: vec![hop.pid()],
                measure: Box::new(|| hop.drive(load.depth as usize, load.runtime)),
            });
            contestants.push(Contestant {
                name: "bare synced write 8k qd1".into(),
                pids: Vec::new(),
                measure: Box::new(|| synced_writes(&floor, load.runtime)),
            });
            self.beside_the_backing(&cell(&load), &contestants)?;
        }
        Ok(())
    }

    fn beside_the_backing(&mut self, cell: &str, contestants: &[Contestant<'_>]) -> Outcome<()> {
        let series = self.rounds(cell, contestants)?;
        if let Some(backing) = find(&series, BACKING) {
            for ours in series.iter().filter(|one| one.contestant.starts_with("write-back")) {
                let name = format!("{cell} {}", ours.contestant);
                let metrics = [Metric::P50, Metric::Iops];
                let compared = metrics.iter().filter_map(|&metric| compare(&name, metric, ours, backing));
                self.results.entries.extend(compared);
                let floor =
                    if ours.contestant.ends_with("flash") { "bare synced write 8k qd1" } else { "bare hop" };
                if let Some(floor) = find(&series, floor).filter(|_| cell.ends_with("qd1")) {
                    self.results.entries.extend(compare(&name, Metric::P50, ours, floor));
                }
            }
        }
        self.results.cells.push((cell.into(), series));
        Ok(())
    }
}

fn of_cluster(cluster: &Cluster, load: Load) -> Contestant<'_> {
    Contestant {
        name: cluster.name().into(),
        pids: cluster.pids(),
        measure: Box::new(move || Driver::Weir.drive(cluster.uri(), &load)),
    }
}

/// The floor of a log on flash: one frame after the other, each on stable storage before the next.
fn synced_writes(path: &Path, runtime: Duration) -> Outcome<Figures> {
    let flags = libc::O_DIRECT | libc::O_DSYNC;
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path)?;
    let buffer = BufferPool::new(FRAME).take(FRAME).ok_or_else(|| Failure("no memory".into()))?;
    let cpu = weir_load::cpu::of_this_thread();
    let (mut tally, start) = (Tally::default(), Nanos::now());
    let (end, mut at) = (start + runtime, 0);
    let mut before = start;
    while before < end {
        // SAFETY: the buffer is FRAME bytes long and outlives the call.
        let written = unsafe {
            libc::pwrite(file.as_raw_fd(), buffer.as_ptr().cast(), FRAME, i64::try_from(at).unwrap_or(0))
        };
        if written != FRAME as isize {
            return Err(Failure(format!("writing {}: {}", path.display(), std::io::Error::last_os_error())));
        }
        let now = Nanos::now();
        tally.count(IoKind::Write, FRAME as u64, (now - before).as_nanos() as u64, true);
        (before, at) = (now, (at + FRAME as u64) % RING);
    }
    Ok(Figures::of_writes(&tally, start, cpu))
}
