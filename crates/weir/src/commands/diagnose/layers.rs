//! A disk as a subject: its layers from the bottom: the backing (of a disk whose I/O is redirected: the LUN, and the way through the
//! coordinator), the accelerator under each policy, the exports.

use std::time::Duration;

use weir_block::{Nanos, RequestKind};
use weir_diagnose::counters::Watched;
use weir_diagnose::load::{LoadOptions, LoadTarget};
use weir_diagnose::{Cell, Counters, Direction, Measurement, Position, Target, TargetError};
use weir_load::run::Monitor;
use weir_node::api::{DiskView, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;

use super::observed::{count, observed};
use super::settings::Settings;
use super::subject::Subject;
use crate::commands::in_use::{Harm, refuse_beside_clients};
use crate::failure::Failure;

/// The policy with the most replicas is `write-back+2`.
const MOST_REPLICAS: usize = 2;

/// Time limit of the wait for dirty data of earlier runs, and for a policy.
const SETTLE: Duration = Duration::from_secs(60);

/// The LUN of a disk whose I/O is redirected, as the disk's own node reaches it.
const DIRECT: &str = "direct";

/// The share of a run's requests that must have taken the route that it measures: a coordinator that goes meanwhile makes others of them.
const MOST_PARTS: f64 = 0.95;

/// A disk that is open on a node.
pub struct Disk<'a> {
    client: &'a Client,
    view: DiskView,
    /// Other policies to measure besides the present one.
    policies: Vec<String>,
    watched: Watched,
}

impl<'a> Disk<'a> {
    /// Opens the disk, and determines which of the requested policies it can have.
    pub fn open(client: &'a Client, disk: &str, settings: &Settings) -> Result<Disk<'a>, Failure> {
        let view = open_disk(client, disk)?;
        let policies = wanted_policies(client, &view, settings.policies.as_deref())?;
        let watched = Watched {
            node: vec![client.status()?.pid],
            replicas: settings.replicas.clone(),
            generator: Some(std::process::id()),
            ..Watched::default()
        };
        Ok(Disk { client, view, policies, watched })
    }

    /// Refuses if clients load it.
    pub fn is_alone(&self) -> Result<(), Failure> {
        refuse_beside_clients(&self.view, Harm::Measures)
    }

    /// Restores the original policy.
    pub fn restore(&self) -> Result<(), Failure> {
        self.client.set_policy(&self.view.name, &self.view.requested)?;
        Ok(())
    }
}

impl Subject for Disk<'_> {
    fn name(&self) -> &str {
        &self.view.name
    }

    fn node(&self) -> String {
        self.view.owner.clone().unwrap_or_default()
    }

    fn size(&self) -> u64 {
        self.view.size
    }

    fn caution(&self, _destroy: bool) -> Option<String> {
        let limit = self.view.limit.map(|limit| {
            format!(
                "the disk has a limit ({limit}): loads through its exports are held back by it, those on the layers below are not; \
                 `weir disk limit {} --none` ends it",
                self.view.name
            )
        });
        let redirected = redirected(&self.view).map(|_| {
            format!("the volume's I/O is redirected; the loads of the layer {DIRECT:?} go to the LUN all the same, and --without {DIRECT} omits them")
        });
        let all: Vec<String> = limit.into_iter().chain(redirected).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    fn layers<'b>(
        &'b self,
        options: &LoadOptions,
        monitor: &'b Monitor,
    ) -> Result<Vec<Box<dyn Target + 'b>>, Failure> {
        let exports = exports(&self.view, options, monitor)?;
        let layers = layers(self.client, &self.view, options, &self.policies, exports);
        Ok(counted(layers, &self.watched, self.client, &self.view.name))
    }

    fn fill(&self, options: &LoadOptions, monitor: &Monitor) -> Result<(), Failure> {
        let exports = exports(&self.view, options, monitor)?;
        let first =
            exports.first().ok_or_else(|| Failure::refused("the disk has no export to fill it through"))?;
        first.prefill().map_err(Failure::failed)
    }
}

/// A disk that is open on the asked node, and exported.
pub fn open_disk(client: &Client, disk: &str) -> Result<DiskView, Failure> {
    let view = client.disk(disk)?;
    let Some(owner) = view.owner.clone().filter(|_| view.detail.is_some()) else {
        return Err(Failure::refused(format!(
            "disk {disk} is not open on the node asked; run `weir disk export {disk}`"
        )));
    };
    if view.uris.is_empty() {
        return Err(Failure::refused(format!("node {owner} exports nothing; set nbd.unix or nbd.tcp")));
    }
    Ok(view)
}

/// The exports: the first on the path, the others as its alternatives.
fn exports<'a>(
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

/// The other policies to measure: those of `wanted`, or all that the disk can have.
fn wanted_policies(
    client: &Client,
    view: &DiskView,
    wanted: Option<&[String]>,
) -> Result<Vec<String>, Failure> {
    let possible = other_policies(client, view)?;
    let Some(wanted) = wanted else { return Ok(possible) };
    match wanted.iter().find(|policy| !possible.contains(policy)) {
        Some(policy) => Err(Failure::usage(format!(
            "--policies {policy}: not another policy that the disk can have now; it can have {}",
            possible.join(", ")
        ))),
        None => Ok(wanted.to_vec()),
    }
}

/// The policies, other than the present one, that the disk can have with the nodes that are up.
fn other_policies(client: &Client, view: &DiskView) -> Result<Vec<String>, Failure> {
    let peers = client.status()?.nodes.iter().filter(|node| node.state == "up").count().saturating_sub(1);
    let write_back = (0..=peers.min(MOST_REPLICAS)).map(|replicas| format!("write-back+{replicas}"));
    let all = std::iter::once("write-through".to_owned()).chain(write_back);
    Ok(all.filter(|policy| *policy != view.effective).collect())
}

/// The layers, from the bottom. Each waits, before it runs, for an earlier one's dirty data to be destaged, and for its policy.
fn layers<'a>(
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
    let mut on_the_way = match redirected(view) {
        None => vec![inside(LoadLayer::Backing, "backing".to_owned(), Position::OnPath)],
        Some(route) => [(LoadLayer::Direct, DIRECT), (LoadLayer::Backing, route)]
            .map(|(layer, name)| -> Box<dyn Target + 'a> {
                let target = inside(layer, name.to_owned(), Position::OnPath);
                Box::new(ByRoute { client, disk: view.name.clone(), is_direct: name == DIRECT, target })
            })
            .into(),
    };
    on_the_way.push(inside(LoadLayer::Accel, accel.clone(), Position::OnPath));
    let alternatives = other_policies.iter().map(|policy| {
        let position = Position::AlternativeTo(accel.clone());
        prepared(policy, inside(LoadLayer::Accel, format!("accel {policy}"), position))
    });
    let exports = exports.into_iter().map(|export| -> Box<dyn Target + 'a> { Box::new(export) });
    let on_the_way = on_the_way.into_iter();
    let mut layers: Vec<_> = on_the_way.map(|layer| prepared(&view.effective, layer)).collect();
    layers.extend(alternatives);
    layers.extend(exports.map(|export| prepared(&view.effective, export)));
    layers
}

/// The route of a disk whose I/O goes through its volume's coordinator although its node reaches the LUN: then the LUN itself is the layer
/// below.
fn redirected(view: &DiskView) -> Option<&str> {
    let route = view.detail.as_ref()?.route.as_ref()?;
    let lacks = |flag: &str| route.reasons.iter().all(|reason| reason.flag != flag);
    let has_path = lacks("no-disk-connectivity") && lacks("fenced");
    (route.state == "file-redirected" && has_path).then_some(&route.state)
}

/// The same layers, with the operating system's counters of each run, and those of the disk's meters.
fn counted<'a>(
    layers: Vec<Box<dyn Target + 'a>>,
    watched: &Watched,
    client: &'a Client,
    disk: &'a str,
) -> Vec<Box<dyn Target + 'a>> {
    let one = |target: Box<dyn Target + 'a>| {
        let meters = between(target.name()).map(|between| Meters { client, disk, between });
        let watched = watched.clone();
        observed(target, move |target, cell| {
            let earlier = meters.as_ref().and_then(Meters::arrivals);
            let (measured, counters) = count(target, cell, &watched);
            let later = meters.as_ref().and_then(Meters::arrivals);
            let passed = earlier.zip(later).map(|(earlier, later)| Passed::between(earlier, later));
            let takes_writes_in = target.name().starts_with("accel ");
            let (requests_below, reads_for_writes) =
                passed.map_or((None, None), |passed| passed.counters(cell.shape.direction, takes_writes_in));
            (measured, Some(Counters { requests_below, reads_for_writes, ..counters }))
        })
    };
    layers.into_iter().map(one).collect()
}

/// The meters of a layer and of the one below; their ratio is the number of requests that the layer makes of each one.
fn between(layer: &str) -> Option<[&'static str; 2]> {
    if layer.starts_with("nbd ") {
        Some(["export", "accel"])
    } else if layer.starts_with("accel ") {
        Some(["accel", "backing"])
    } else {
        None
    }
}

/// Two meters of a disk.
struct Meters<'a> {
    client: &'a Client,
    disk: &'a str,
    between: [&'static str; 2],
}

impl Meters<'_> {
    /// The requests to each so far.
    fn arrivals(&self) -> Option<[Arrivals; 2]> {
        let meters = self.client.meters(self.disk).ok()?;
        let of = |layer| {
            let meter = meters.iter().find(|meter| meter.layer == layer)?;
            let of = |wanted| {
                let kind = meter.kinds.iter().find(|kind| kind.kind == wanted);
                kind.map_or(0, |kind| kind.arrivals)
            };
            Some(Arrivals { reads: of(RequestKind::Read), writes: of(RequestKind::Write) })
        };
        let [here, below] = self.between;
        Some([of(here)?, of(below)?])
    }
}

/// Requests to a layer.
#[derive(Clone, Copy)]
struct Arrivals {
    reads: u64,
    writes: u64,
}

/// Requests to a layer during a run, and to the one below.
struct Passed {
    here: Arrivals,
    below: Arrivals,
}

impl Passed {
    fn between(earlier: [Arrivals; 2], later: [Arrivals; 2]) -> Passed {
        let [here, below] = [0, 1].map(|place| Arrivals {
            reads: later[place].reads.saturating_sub(earlier[place].reads),
            writes: later[place].writes.saturating_sub(earlier[place].writes),
        });
        Passed { here, below }
    }

    /// [`Counters::requests_below`] and [`Counters::reads_for_writes`]. A log decides when its writes reach the layer below,
    /// merged or not.
    fn counters(&self, direction: Direction, takes_writes_in: bool) -> (Option<f64>, Option<f64>) {
        let each = |below: u64, here: u64| (here > 0).then(|| below as f64 / here as f64);
        match direction {
            Direction::Read => (each(self.below.reads, self.here.reads), None),
            Direction::Write => {
                let writes = each(self.below.writes, self.here.writes).filter(|_| !takes_writes_in);
                (writes, each(self.below.reads, self.here.writes))
            }
            Direction::Mixed(_) => (None, None),
        }
    }
}

/// A layer inside the owner's process.
pub struct Inside<'a> {
    /// The owner's client.
    pub client: &'a Client,
    /// The disk.
    pub disk: String,
    /// The layer.
    pub layer: LoadLayer,
    /// Its name in the measurement.
    pub name: String,
    /// Its position.
    pub position: Position,
    /// The common options of all runs.
    pub options: LoadOptions,
}

impl Target for Inside<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn position(&self) -> Position {
        self.position.clone()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let load = RunLoad { layer: self.layer, workload: self.options.workload(cell), force: false };
        let summary = self.client.load(&self.disk, &load);
        Measurement::of(
            &summary.map_err(|error| TargetError::Failed(error.to_string()))?,
            cell.shape.direction,
        )
    }
}

/// A route to a LUN: a run counts only if its requests have taken it.
struct ByRoute<'a> {
    client: &'a Client,
    disk: String,
    is_direct: bool,
    target: Box<dyn Target + 'a>,
}

impl ByRoute<'_> {
    /// Parts of requests so far: by this route, and by all.
    fn parts(&self) -> Result<(u64, u64), TargetError> {
        let view = self.client.disk(&self.disk).map_err(|error| TargetError::Failed(error.to_string()))?;
        let route = view.detail.and_then(|detail| detail.route);
        let route = route.ok_or_else(|| TargetError::Failed("the disk is no longer open there".into()))?;
        let redirected = route.block + route.file;
        Ok((if self.is_direct { route.direct } else { redirected }, route.direct + redirected))
    }
}

impl Target for ByRoute<'_> {
    fn name(&self) -> &str {
        self.target.name()
    }

    fn position(&self) -> Position {
        self.target.position()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let before = self.parts()?;
        let measured = self.target.run(cell)?;
        let after = self.parts()?;
        let (own, all) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        if (own as f64) < MOST_PARTS * all as f64 {
            return Err(TargetError::Failed(format!("{own} of {all} parts of requests took this route")));
        }
        Ok(measured)
    }
}

/// A layer that runs only when the disk is idle under the measured policy.
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

/// Waits until the policy is in effect, the log is empty and no client is connected: no run includes the cost of an earlier one's
/// dirty data.
pub fn prepare(client: &Client, disk: &str, policy: &str) -> Result<(), TargetError> {
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
