//! `weir diagnose --stack`: layers described in a file. A layer is anything that can be opened.

mod describe;
mod marker;

use std::path::Path;

use weir_diagnose::counters::Watched;
use weir_diagnose::load::{LoadOptions, LoadTarget};
use weir_diagnose::{Cell, Counters, Direction, Measurement, Position, Target, TargetError};
use weir_load::run::Monitor;
use weir_load::target::Target as Reached;
use weir_load::workload::Workload;
use weir_node::client::Client;
use weir_node::units::about;

use super::layers::{Inside, prepare};
use super::observed::{count, observed};
use super::subject::Subject;
use crate::cluster::owner_of;
use crate::commands::in_use::{Harm, refuse_beside_clients, refuse_export_beside_clients};
use crate::failure::Failure;
use crate::options::Global;
use describe::{Described, Reach, describe};
use marker::{MARKER, Marker};

/// Largest description, in bytes.
const LARGEST: u64 = 1 << 20;

/// Layers that lead to the same storage, from the bottom up.
pub struct Stack {
    name: String,
    layers: Vec<Open>,
    size: u64,
}

/// A layer of the stack, and the access to it.
struct Open {
    described: Described,
    /// The generator's target: the layer itself, or an export of the disk whose layer it is.
    opened: Reached,
    size: u64,
    /// For a disk's layer: its node, the policy under which it becomes idle, its process.
    node: Option<(Client, String, u32)>,
}

impl Stack {
    /// Reads the description and examines each layer; all must have the same size.
    pub fn open(global: &Global, file: &Path) -> Result<Stack, Failure> {
        let wrong = |problem: String| Failure::usage(format!("{}: {problem}", file.display()));
        let text = match std::fs::metadata(file) {
            Ok(found) if found.len() > LARGEST => {
                return Err(wrong(format!("larger than {}", about(LARGEST))));
            }
            _ => std::fs::read_to_string(file).map_err(|error| Failure::unreadable(file, &error))?,
        };
        let layers = describe(file, &text).map_err(Failure::usage)?;
        let at_line = |layer: &Described, failure: Failure| Failure {
            message: format!("{}, line {}: {}: {}", file.display(), layer.line, layer.name, failure.message),
            ..failure
        };
        // Before the first layer is opened: our own connections would count.
        for layer in &layers {
            is_alone(global, layer).map_err(|failure| at_line(layer, failure))?;
        }
        let name =
            file.file_stem().map_or_else(|| "stack".into(), |stem| stem.to_string_lossy().into_owned());
        let opened = layers
            .into_iter()
            .map(|layer| Open::look(global, layer.clone()).map_err(|failure| at_line(&layer, failure)));
        let layers: Vec<Open> = opened.collect::<Result<_, _>>()?;
        let size = layers[0].size;
        match layers.iter().find(|layer| layer.size != size) {
            Some(other) => Err(at_line(&other.described, other.refused(format!(
                "it has {} bytes and {} has {size}: not the same storage, so their difference would say nothing",
                other.size, layers[0].described.name
            )))),
            None => Ok(Stack { name, layers, size }),
        }
    }
}

/// Refuses if clients load the layer's disk.
fn is_alone(global: &Global, layer: &Described) -> Result<(), Failure> {
    match &layer.reach {
        Reach::Target(target) => refuse_export_beside_clients(global, target, Harm::Measures),
        Reach::Disk { disk, .. } => {
            refuse_beside_clients(&owner_of(global, disk)?.disk(disk)?, Harm::Measures)
        }
    }
}

impl Open {
    fn look(global: &Global, described: Described) -> Result<Open, Failure> {
        let (opened, node) = match &described.reach {
            Reach::Target(target) => (target.clone(), None),
            Reach::Disk { disk, .. } => {
                let client = owner_of(global, disk)?;
                let view = super::layers::open_disk(&client, disk)?;
                let opened = view.uris[0].parse().map_err(Failure::failed)?;
                let process = client.status()?.pid;
                (opened, Some((client, view.effective, process)))
            }
        };
        let size = opened.prepare(&Workload::default(), false)?;
        Ok(Open { described, opened, size, node })
    }

    fn refused(&self, message: String) -> Failure {
        Failure::refused(message)
    }

    fn target<'a>(&'a self, options: &LoadOptions, monitor: &'a Monitor) -> Box<dyn Target + 'a> {
        let name = self.described.name.clone();
        match (&self.described.reach, &self.node) {
            (Reach::Disk { disk, at }, Some((client, policy, _))) => Box::new(Rested {
                client,
                disk,
                policy,
                inside: Inside {
                    client,
                    disk: disk.clone(),
                    layer: *at,
                    name,
                    position: Position::OnPath,
                    options: options.clone(),
                },
            }),
            _ => Box::new(LoadTarget::new(&name, self.opened.clone(), options.clone(), monitor)),
        }
    }

    fn watched(&self) -> Watched {
        let process = self.node.iter().map(|(_, _, process)| *process);
        Watched {
            node: self.described.pids.iter().copied().chain(process).collect(),
            replicas: Vec::new(),
            generator: Some(std::process::id()),
            device: self.described.device.clone(),
            interface: self.described.interface.clone(),
        }
    }
}

impl Subject for Stack {
    fn name(&self) -> &str {
        &self.name
    }

    fn node(&self) -> String {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        host.trim().to_owned()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn layers<'a>(
        &'a self,
        options: &LoadOptions,
        monitor: &'a Monitor,
    ) -> Result<Vec<Box<dyn Target + 'a>>, Failure> {
        let counted = |layer: &'a Open| {
            let watched = layer.watched();
            observed(layer.target(options, monitor), move |target, cell| {
                let (measured, counters) = count(target, cell, &watched);
                let block = f64::from(cell.shape.block_bytes);
                let only = |direction: Direction| cell.shape.direction == direction;
                // A filesystem adds writes of its own and merges others: their number has no meaning.
                let read_bytes =
                    counters.device_read_bytes.filter(|bytes| only(Direction::Read) && *bytes > 0.0);
                let requests_below = read_bytes.map(|bytes| block / bytes);
                let reads_for_writes = counters.reads_for_writes.filter(|_| only(Direction::Write));
                (measured, Some(Counters { requests_below, reads_for_writes, ..counters }))
            })
        };
        Ok(self.layers.iter().map(counted).collect())
    }

    /// Fills the range at the lowest layer, and checks the written data at each other.
    fn fill(&self, options: &LoadOptions, monitor: &Monitor) -> Result<(), Failure> {
        let lowest = &self.layers[0];
        LoadTarget::new(&lowest.described.name, lowest.opened.clone(), options.clone(), monitor)
            .prefill()
            .map_err(Failure::failed)?;
        let began = weir_diagnose::Environment::here("", "", [""; 0]).started_unix;
        let (marker, below) = (Marker::new(began), &lowest.described.name);
        // A different position each time: a cache above may have the marker of an earlier measurement.
        let blocks = options.size.unwrap_or(self.size).min(self.size) / MARKER as u64;
        let offset = began % blocks.max(1) * MARKER as u64;
        marker
            .write(&lowest.opened, offset)
            .map_err(|error| Failure::failed(format!("writing the marker at {below}: {error}")))?;
        for layer in &self.layers {
            let name = &layer.described.name;
            let found = marker.is_at(&layer.opened, offset);
            if !found
                .map_err(|error| Failure::failed(format!("looking for the marker at {name}: {error}")))?
            {
                return Err(layer.refused(format!(
                    "the layers do not lead to the same storage: what was written at {below}, offset {offset}, is not read at \
                     {name} (or it is read from a cache that does not see it)"
                )));
            }
        }
        Ok(())
    }

    fn caution(&self, destroy: bool) -> Option<String> {
        (!destroy).then(|| {
            "that the layers lead to the same storage is taken on trust: their sizes are equal, but only with --destroy a \
             marker is written"
                .to_owned()
        })
    }
}

/// A disk's layer that runs when the disk is idle.
struct Rested<'a> {
    client: &'a Client,
    disk: &'a str,
    policy: &'a str,
    inside: Inside<'a>,
}

impl Target for Rested<'_> {
    fn name(&self) -> &str {
        self.inside.name()
    }

    fn settle(&mut self) -> Result<(), TargetError> {
        prepare(self.client, self.disk, self.policy)
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        self.inside.run(cell)
    }
}
