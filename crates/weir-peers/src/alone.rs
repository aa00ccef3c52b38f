//! A device as the backing of a disk, driven from within a thread's loop as a node drives its disks: the same generator, reactor and
//! limits, and nothing of a volume.

use std::path::Path;
use std::time::Duration;

use weir_block::{Layer, Nanos, Reactor, ReactorConfig, Tag};
use weir_load::LayerLoad;
use weir_node::config::ResourcesConfig;
use weir_volume::{BackingOptions, FileBacking};

use crate::driver::{Figures, Load, figures};
use crate::error::{Failure, Outcome};

/// Drives the device at `path`.
pub fn drive(path: &Path, load: &Load) -> Outcome<Figures> {
    let resources = ResourcesConfig::default();
    let config = ReactorConfig {
        buffer_limit: resources.buffers.0 as usize,
        poll: Duration::from_micros(resources.busy_poll_us.into()),
        ..ReactorConfig::default()
    };
    let mut reactor = Reactor::new(config).map_err(Failure::of("starting a reactor"))?;
    let mut backing = FileBacking::open(&mut reactor, path, &BackingOptions::default())
        .map_err(Failure::of("opening the backing"))?;
    let tag = |slot: u32| Tag(slot.into());
    let mut running = LayerLoad::start("backing", &load.workload(), &backing.info(), Nanos::now(), tag)
        .map_err(Failure::of("starting a load"))?;
    let (mut done, mut events) = (Vec::new(), Vec::new());
    loop {
        running.pump(&mut reactor, &mut backing, &mut done);
        backing.advance(&mut reactor, &mut done);
        if let Some(summary) = running.finished() {
            return match &summary.first_error {
                Some(error) => Err(Failure(format!("{}: {error}", path.display()))),
                None => Ok(figures(&summary, load.warmup)),
            };
        }
        let deadline = if done.is_empty() { backing.deadline().min(running.deadline()) } else { Nanos(0) };
        reactor.wait(deadline, &mut events).map_err(Failure::of("waiting for the backing"))?;
        events.drain(..).for_each(|event| backing.on_event(&mut reactor, event));
    }
}
