//! The layers of a disk, from the bottom: the backing, the accelerator under each policy, the exports.

use std::time::Duration;

use weir_block::Nanos;
use weir_diagnose::counters::{Processes, Sample};
use weir_diagnose::load::{LoadOptions, LoadTarget};
use weir_diagnose::{Cell, Counters, Measurement, Position, Target, TargetError};
use weir_load::run::Monitor;
use weir_node::api::{DiskView, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;

use crate::failure::Failure;

/// The policy with the most replicas is `write-back+2`.
const MOST_REPLICAS: usize = 2;

/// Longest wait for what earlier runs left dirty, and for a policy.
const SETTLE: Duration = Duration::from_secs(60);

/// The exports, the first on the way, others in its place.
pub fn exports<'a>(
    view: &DiskView,
    options: &LoadOptions,
    monitor: &'a Monitor,
) -> Result<Vec<LoadTarget<'a>>, Failure> {
    let mut exports: Vec<LoadTarget<'a>> = Vec::new();
    for uri in &view.uris {
        let name = if uri.starts_with("nbd+unix:") { "nbd unix" } else { "nbd tcp" };
        let target = LoadTarget::new(name, uri.parse().map_err(Failure::failed)?, options.clone(), monitor);
        exports.push(match exports.first() {
            Some(first) => target.instead_of(Target::name(first)),
            None => target,
        });
    }
    Ok(exports)
}

/// The policies that the disk can have with the nodes that are up, other than the one that it has.
pub fn other_policies(client: &Client, view: &DiskView) -> Result<Vec<String>, Failure> {
    let peers = client.status()?.nodes.iter().filter(|node| node.state == "up").count().saturating_sub(1);
    let write_back = (0..=peers.min(MOST_REPLICAS)).map(|replicas| format!("write-back+{replicas}"));
    let all = std::iter::once("write-through".to_owned()).chain(write_back);
    Ok(all.filter(|policy| *policy != view.effective).collect())
}

/// The layers, from the bottom. Each waits, before it runs, for what an earlier one left dirty, and for its policy.
pub fn layers<'a>(
    client: &'a Client,
    view: &DiskView,
    options: &LoadOptions,
    other_policies: &[String],
    exports: Vec<LoadTarget<'a>>,
) -> Vec<Box<dyn Target + 'a>> {
    let inside = |layer, name, position| -> Box<dyn Target + 'a> {
        Box::new(Inside { client, disk: view.name.clone(), layer, name, position, options: options.clone() })
    };
    let prepared = |policy: &str, target| -> Box<dyn Target + 'a> {
        Box::new(Prepared { client, disk: view.name.clone(), policy: policy.to_owned(), target })
    };
    let accel = format!("accel {}", view.effective);
    let on_the_way = [
        inside(LoadLayer::Backing, "backing".to_owned(), Position::OnTheWay),
        inside(LoadLayer::Accel, accel.clone(), Position::OnTheWay),
    ];
    let alternatives = other_policies.iter().map(|policy| {
        let position = Position::AlternativeTo(accel.clone());
        prepared(policy, inside(LoadLayer::Accel, format!("accel {policy}"), position))
    });
    let exports = exports.into_iter().map(|export| -> Box<dyn Target + 'a> { Box::new(export) });
    let mut layers: Vec<_> = on_the_way.map(|layer| prepared(&view.effective, layer)).into();
    layers.extend(alternatives);
    layers.extend(exports.map(|export| prepared(&view.effective, export)));
    layers
}

/// The same layers, with the operating system's counters of each run.
pub fn counted<'a>(layers: Vec<Box<dyn Target + 'a>>, processes: &Processes) -> Vec<Box<dyn Target + 'a>> {
    let one = |target| -> Box<dyn Target + 'a> {
        Box::new(Counted { target, processes: processes.clone(), last: None })
    };
    layers.into_iter().map(one).collect()
}

/// A layer whose runs are watched.
struct Counted<'a> {
    target: Box<dyn Target + 'a>,
    processes: Processes,
    last: Option<Counters>,
}

impl Target for Counted<'_> {
    fn name(&self) -> &str {
        self.target.name()
    }

    fn position(&self) -> Position {
        self.target.position()
    }

    fn can_run(&self, cell: &Cell) -> Result<(), String> {
        self.target.can_run(cell)
    }

    fn settle(&mut self) -> Result<(), TargetError> {
        self.target.settle()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let (before, began) = (Sample::take(&self.processes), Nanos::now());
        let measured = self.target.run(cell);
        let seconds = (Nanos::now() - began).as_secs_f64();
        self.last = measured.is_ok().then(|| before.until(&Sample::take(&self.processes), seconds));
        measured
    }

    fn counters(&mut self) -> Option<Counters> {
        self.last.take()
    }
}

/// A layer inside the owner's process.
struct Inside<'a> {
    client: &'a Client,
    disk: String,
    layer: LoadLayer,
    name: String,
    position: Position,
    options: LoadOptions,
}

impl Target for Inside<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn position(&self) -> Position {
        self.position.clone()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let load = RunLoad { layer: self.layer, workload: self.options.workload(cell) };
        let summary = self.client.load(&self.disk, &load);
        Measurement::of(
            &summary.map_err(|error| TargetError::Failed(error.to_string()))?,
            cell.shape.direction,
        )
    }
}

/// A layer that runs only when the disk has come to rest under the policy that is to be measured.
struct Prepared<'a> {
    client: &'a Client,
    disk: String,
    policy: String,
    target: Box<dyn Target + 'a>,
}

impl Target for Prepared<'_> {
    fn name(&self) -> &str {
        self.target.name()
    }

    fn position(&self) -> Position {
        self.target.position()
    }

    fn settle(&mut self) -> Result<(), TargetError> {
        prepare(self.client, &self.disk, &self.policy)
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        self.target.run(cell)
    }
}

/// Has the policy in effect, and waits until the log is empty and nobody is connected: no run pays for what an
/// earlier one left.
fn prepare(client: &Client, disk: &str, policy: &str) -> Result<(), TargetError> {
    let failed = |error: weir_node::api::ApiError| TargetError::Failed(error.to_string());
    let deadline = Nanos::now() + SETTLE;
    loop {
        let view = client.disk(disk).map_err(failed)?;
        if view.requested != policy {
            client.set_policy(disk, policy).map_err(failed)?;
            continue;
        }
        match view.detail {
            Some(detail) if view.effective == policy && detail.dirty_bytes == 0 && detail.clients == 0 => {
                return Ok(());
            }
            Some(_) if Nanos::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Some(detail) => {
                return Err(TargetError::Failed(format!(
                    "after {} s the policy is {} and not {policy}, {} bytes are dirty and {} clients connected",
                    SETTLE.as_secs(),
                    view.effective,
                    detail.dirty_bytes,
                    detail.clients
                )));
            }
            None => return Err(TargetError::Failed(format!("disk {disk} is no longer open there"))),
        }
    }
}
