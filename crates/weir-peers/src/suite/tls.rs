//! The cost of TLS between nodes: on channels alone, beside rustls alone, and on `write-back+1`.

use weir_block::size::Size;
use weir_load::workload::Access;

use super::{Measured, OWN, Subject, Suite, served};
use crate::bound::Bound;
use crate::channels::{Kind, Pair};
use crate::comparison::Comparison;
use crate::driver::{Driver, Load};
use crate::error::Outcome;
use crate::row::{Cell, Metric};
use crate::server::Transport;
use crate::weir::{Cluster, ClusterConfig};

/// Weir's channels, and the bare loop.
const PLAIN: &str = "channel, plaintext";
const TLS: &str = "channel, TLS";
const BARE: &str = "bare rustls";
/// Target for frames per processor second, as a fraction of the bare loop's.
const BARE_TARGET: f64 = 0.8;
/// Limits of the processor time that TLS adds to a frame of 4 KiB on each side: in batches, and alone.
const BATCHED_LIMIT_US: f64 = 1.2;
const ALONE_LIMIT_US: f64 = 10.0;
/// The clusters.
const WITHOUT: &str = "weir, plaintext";
const WITH: &str = "weir, TLS";

impl Suite<'_> {
    /// Channels, then whole nodes.
    pub(super) fn tls(&mut self) -> Outcome<()> {
        self.tls_channels()?;
        self.tls_nodes()
    }

    fn tls_channels(&mut self) -> Outcome<()> {
        let name = |depth: &usize| format!("tls channel 4k qd{depth}");
        let depths = self.wanted(name, vec![32, 1]);
        if depths.is_empty() {
            return Ok(());
        }
        let pair = Pair::new()?;
        for depth in depths {
            let runtime = self.settings.runtime;
            let subject = |(name, kind): (&str, Kind)| Subject {
                name: name.into(),
                driver: OWN,
                pids: Vec::new(),
                measure: Box::new({
                    let pair = &pair;
                    move || {
                        let measured = pair.drive(kind, depth, runtime)?;
                        let server_cpu = Some(measured.receiver_cpu);
                        Ok(Measured { server_cpu, ..measured.figures.into() })
                    }
                }),
            };
            let subjects = [(PLAIN, Kind::Plain), (TLS, Kind::Tls), (BARE, Kind::Bare)].map(subject);
            let cell = self.rounds(&name(&depth), &subjects)?;
            let target = (depth > 1).then_some(BARE_TARGET);
            for (theirs, target) in [(BARE, target), (PLAIN, None)] {
                for metric in [Metric::PerDriverCpu, Metric::PerServerCpu] {
                    self.within(&cell, metric, (TLS, theirs), target);
                }
            }
            let limit_us = if depth > 1 { BATCHED_LIMIT_US } else { ALONE_LIMIT_US };
            for (metric, side) in [(Metric::PerDriverCpu, "sent"), (Metric::PerServerCpu, "received")] {
                let name = format!("processor time that TLS adds to a frame {side}");
                let added = Bound::added(&cell, &name, metric, (TLS, PLAIN), limit_us);
                self.bound(&format!("{}, {name}", cell.name), added);
            }
            self.finish(cell, Metric::Iops);
        }
        Ok(())
    }

    fn tls_nodes(&mut self) -> Outcome<()> {
        let name = |load: &Load| format!("tls write-back+1 {}", load.name());
        let load =
            |(depth, block): (u32, u64)| Load { block: Size(block), ..self.load(Access::RandWrite, depth) };
        let loads = [(32, 4 << 10), (1, 4 << 10), (32, 256 << 10), (1, 256 << 10)].map(load).to_vec();
        let loads = self.wanted(name, loads);
        if loads.is_empty() {
            return Ok(());
        }
        let start = |(name, identities)| {
            let in_memory = ClusterConfig::in_memory(self.workspace, Transport::Unix, "write-back+1");
            let config = ClusterConfig { name, identities, ..in_memory };
            Cluster::start(self.weir, self.workspace, &config)
        };
        let clusters =
            [(WITHOUT, false), (WITH, true)].into_iter().map(start).collect::<Outcome<Vec<Cluster>>>()?;
        for load in loads {
            let subjects: Vec<Subject<'_>> =
                clusters.iter().map(|one| served(one, Driver::Weir, load)).collect();
            let cell = self.rounds(&name(&load), &subjects)?;
            for metric in [Metric::Iops, Metric::P50, Metric::PerServerCpu] {
                self.within(&cell, metric, (WITH, WITHOUT), None);
            }
            self.finish(cell, if load.depth == 1 { Metric::P50 } else { Metric::Iops });
        }
        Ok(())
    }

    /// Compares two subjects of a cell that have one driver.
    fn within(&mut self, cell: &Cell, metric: Metric, (ours, theirs): (&str, &str), target: Option<f64>) {
        let row = |name: &str| cell.rows.iter().find(|row| row.subject == name);
        let rows = row(ours).zip(row(theirs));
        let compared = rows.and_then(|(ours, theirs)| Comparison::of(&cell.name, metric, ours, theirs));
        self.compare(&cell.name, compared, target);
    }
}
