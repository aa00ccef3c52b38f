//! Write-back on each medium, compared with the backing alone and with each one's floor.
//!
//! Backing and flash are files on the machine's own storage, so on one device here; a host would have two.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use weir_block::{BufferPool, Nanos};
use weir_load::tally::{IoKind, Tally};
use weir_load::workload::Access;
use weir_node::api::Medium;

use super::{ECHO, OWN, Subject, Suite, echoed, served};
use crate::comparison::Comparison;
use crate::driver::{Driver, Figures, Load};
use crate::error::{Failure, Outcome};
use crate::floor::Echo;
use crate::row::{Cell, Metric};
use crate::server::Transport;
use crate::weir::{Cluster, ClusterConfig};

/// Bytes of one 4 KiB write on flash: its data and a header.
const FRAME: usize = 8192;
/// Size of the range that the floor overwrites cyclically, in bytes.
const RING: u64 = 64 << 20;

/// The backing alone, the baseline of the comparisons.
const BACKING: &str = "backing alone";
/// The floor of a log on flash.
const SYNCED_WRITE: &str = "bare synced write 8k qd1";

impl Suite<'_> {
    /// `write-back+0` and `+1` on RAM and flash, under Weir's own generator: no peer has an equivalent.
    pub(super) fn media(&mut self) -> Outcome<()> {
        let name = |load: &Load| format!("media {}", load.name());
        let size = self.settings.media_size;
        let loads = [1, 32].map(|depth| Load { size, ..self.load(Access::RandWrite, depth) }).to_vec();
        let loads = self.wanted(name, loads);
        if loads.is_empty() {
            return Ok(());
        }
        let shapes = [
            (BACKING, "write-through", Medium::Ram),
            ("write-back+0 on ram", "write-back+0", Medium::Ram),
            ("write-back+1 on ram", "write-back+1", Medium::Ram),
            ("write-back+0 on flash", "write-back+0", Medium::Flash),
            ("write-back+1 on flash", "write-back+1", Medium::Flash),
        ];
        let start = |(name, policy, medium)| {
            let in_memory = ClusterConfig::in_memory(self.workspace, Transport::Unix, policy);
            let config = ClusterConfig { name, medium, storage: &self.workspace.storage, size, ..in_memory };
            Cluster::start(self.weir, self.workspace, &config)
        };
        let clusters = shapes.into_iter().map(start).collect::<Outcome<Vec<Cluster>>>()?;
        let hop = Echo::start(self.workspace, Transport::Unix)?;
        let floor = self.workspace.storage.join("floor");
        std::fs::write(&floor, vec![1; RING as usize])?;
        for load in loads {
            let mut subjects: Vec<Subject<'_>> =
                clusters.iter().map(|one| served(one, Driver::Weir, load)).collect();
            subjects.push(echoed(vec![&hop], load));
            subjects.push(Subject {
                name: SYNCED_WRITE.into(),
                driver: OWN,
                pids: Vec::new(),
                measure: Box::new(|| Ok(synced_writes(&floor, load.runtime)?.into())),
            });
            let cell = self.rounds(&name(&load), &subjects)?;
            self.beside_the_backing(&cell, load.depth);
            self.finish(cell, if load.depth == 1 { Metric::P50 } else { Metric::Iops });
        }
        Ok(())
    }

    fn beside_the_backing(&mut self, cell: &Cell, depth: u32) {
        let driver = Driver::Weir.name();
        for ours in cell.rows.iter().filter(|row| row.subject.starts_with("write-back")) {
            let floor = if ours.subject.ends_with("flash") { SYNCED_WRITE } else { ECHO };
            let mut beside = vec![(BACKING, driver, Metric::P50), (BACKING, driver, Metric::Iops)];
            if depth == 1 {
                beside.push((floor, OWN, Metric::P50));
            }
            for (subject, driver, metric) in beside {
                let name = format!("{} {}", cell.name, ours.subject);
                let theirs = cell.under(subject, driver);
                let compared = theirs.and_then(|theirs| Comparison::of(&name, metric, ours, theirs));
                let compared = compared.map(|one| Comparison { cell: cell.name.clone(), ..one });
                self.compare(&name, compared, None);
            }
        }
    }
}

/// The floor of a log on flash: sequential frames, each on stable storage before the next.
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
