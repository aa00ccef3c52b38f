//! NBD exports beside each other: one copy, and two.

use weir_load::workload::Access;

use super::{ECHO, Subject, Suite, WEIR, echoed, served};
use crate::comparison::Comparison;
use crate::driver::{Driver, Load};
use crate::error::Outcome;
use crate::floor::Echo;
use crate::row::{Cell, Metric};
use crate::server::{self, Server, Transport};
use crate::weir::{Cluster, ClusterConfig};

/// Target for requests per second at depth over a Unix socket, as a fraction of a bare socket's.
const ECHO_TARGET: f64 = 0.4;
/// Target ratio of `write-back+1` to the quorum pair at depth, both under fio.
const QUORUM_TARGET: f64 = 3.0;

impl Suite<'_> {
    /// One copy, over one kind of socket.
    pub(super) fn one_copy(&mut self, transport: Transport) -> Outcome<()> {
        let mut loads = vec![(Access::RandRead, 32), (Access::RandWrite, 32), (Access::RandRead, 1)];
        if transport == Transport::Unix {
            loads.push((Access::RandWrite, 1));
        }
        let name = |load: &Load| format!("nbd {} {}", transport.name(), load.name());
        let loads = loads.into_iter().map(|(access, depth)| self.load(access, depth)).collect();
        let loads = self.wanted(name, loads);
        if loads.is_empty() {
            return Ok(());
        }
        let weir = ClusterConfig::in_memory(self.workspace, transport, "write-through");
        let mut servers: Vec<Box<dyn Server>> = vec![
            Box::new(Cluster::start(self.weir, self.workspace, &weir)?),
            Box::new(server::qemu(self.workspace, transport)?),
            Box::new(server::nbdkit_memory(self.workspace, transport)?),
        ];
        if transport == Transport::Unix {
            servers.push(Box::new(server::nbdkit_file(self.workspace, transport)?));
        }
        let echo = Echo::start(self.workspace, transport)?;
        for load in loads {
            let cell = self.under_both_drivers(&name(&load), load, &servers, vec![&echo])?;
            self.beside_peers(&cell, &load);
            let at_depth = transport == Transport::Unix && load.depth > 1;
            self.beside_echo(&cell, &load, at_depth.then_some(ECHO_TARGET));
            self.finish(cell, main_metric(&load));
        }
        Ok(())
    }

    /// Two synchronous copies: on this host and another.
    pub(super) fn two_copies(&mut self) -> Outcome<()> {
        let name = |load: &Load| format!("write-back+1 nbd {}", load.name());
        let loads = [32, 1].map(|depth| self.load(Access::RandWrite, depth)).to_vec();
        let loads = self.wanted(name, loads);
        if loads.is_empty() {
            return Ok(());
        }
        let weir = ClusterConfig::in_memory(self.workspace, Transport::Unix, "write-back+1");
        let servers: Vec<Box<dyn Server>> = vec![
            Box::new(Cluster::start(self.weir, self.workspace, &weir)?),
            Box::new(server::qemu_quorum(self.workspace)?),
        ];
        let near = Echo::start(self.workspace, Transport::Unix)?;
        let far = Echo::start(self.workspace, Transport::Tcp)?;
        for load in loads {
            let cell = self.under_both_drivers(&name(&load), load, &servers, vec![&near, &far])?;
            self.beside_peers(&cell, &load);
            if load.depth > 1 {
                self.beside_quorum_under_fio(&cell);
            }
            self.beside_echo(&cell, &load, None);
            self.finish(cell, main_metric(&load));
        }
        Ok(())
    }

    /// Every server under each driver, and the floor.
    fn under_both_drivers(
        &self,
        cell: &str,
        load: Load,
        servers: &[Box<dyn Server>],
        hops: Vec<&Echo>,
    ) -> Outcome<Cell> {
        let of = |server| Driver::ALL.map(|driver| served(server, driver, load));
        let mut subjects: Vec<Subject<'_>> = servers.iter().flat_map(|server| of(&**server)).collect();
        subjects.push(echoed(hops, load));
        self.rounds(cell, &subjects)
    }

    /// Compares Weir with each peer, each under its best driver.
    fn beside_peers(&mut self, cell: &Cell, load: &Load) {
        let main = main_metric(load);
        let second = if load.depth == 1 { Metric::Iops } else { Metric::PerServerCpu };
        let Some(ours) = cell.best(WEIR, main) else { return };
        let mut peers: Vec<&str> = cell.rows.iter().map(|row| &*row.subject).collect();
        peers.dedup();
        for peer in peers.into_iter().filter(|&peer| peer != WEIR && peer != ECHO) {
            let Some(theirs) = cell.best(peer, main) else { continue };
            for metric in [main, second] {
                self.compare(&cell.name, Comparison::of(&cell.name, metric, ours, theirs), None);
            }
        }
    }

    /// Compares Weir with the floor, which does no work for a request: only its speed is meaningful.
    fn beside_echo(&mut self, cell: &Cell, load: &Load, target: Option<f64>) {
        let metric = main_metric(load);
        let rows = cell.best(WEIR, metric).zip(cell.best(ECHO, metric));
        let compared = rows.and_then(|(ours, floor)| Comparison::of(&cell.name, metric, ours, floor));
        self.compare(&cell.name, compared, target);
    }

    fn beside_quorum_under_fio(&mut self, cell: &Cell) {
        let fio = Driver::Fio.name();
        let theirs = cell.rows.iter().find(|row| row.subject != WEIR && row.driver == fio);
        let rows = cell.under(WEIR, fio).zip(theirs);
        let name = format!("{} fio", cell.name);
        let compared = rows.and_then(|(ours, theirs)| Comparison::of(&name, Metric::Iops, ours, theirs));
        let compared = compared.map(|one| Comparison { cell: cell.name.clone(), ..one });
        self.compare(&name, compared, Some(QUORUM_TARGET));
    }
}

/// Latency for a single request in flight, throughput for several.
fn main_metric(load: &Load) -> Metric {
    if load.depth == 1 { Metric::P50 } else { Metric::Iops }
}
