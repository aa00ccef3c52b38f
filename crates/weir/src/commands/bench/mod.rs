//! `weir bench`

mod compare;
mod output;
mod watch;

pub use watch::with_progress;

use weir_load::Arrivals;
use weir_load::size::Size;
use weir_load::target::Target;
use weir_load::workload::Workload;
use weir_node::api::RunLoad;

use crate::cli::{BenchArgs, BenchCommand, BenchFormat, Global, Output};
use crate::cluster::owner_of;
use crate::failure::Failure;

/// Carries out `weir bench`.
pub fn run(global: &Global, arguments: &BenchArgs) -> Result<(), Failure> {
    if let Some(BenchCommand::Compare(files)) = &arguments.command {
        return compare::run(global, files);
    }
    let workload = workload(arguments);
    workload.validate().map_err(Failure::usage)?;
    let format = arguments.format.unwrap_or(match global.output {
        Output::Text => BenchFormat::Text,
        Output::Json => BenchFormat::Json,
    });
    let (summaries, failure) = match (&arguments.disk, &arguments.target, arguments.layer) {
        (Some(disk), _, Some(layer)) => {
            if workload.access.writes() && !arguments.destroy {
                return Err(Failure::refused(format!(
                    "a writing load overwrites disk {disk}; --destroy allows it"
                )));
            }
            let total = arguments.runtime.0 + arguments.warmup.0;
            let client = owner_of(global, disk)?;
            let summary = with_progress(total, &format!("{disk} {layer:?}"), || {
                client.load(disk, &RunLoad { layer: layer.into(), workload }).map_err(Failure::from)
            })?;
            (vec![summary], None)
        }
        (_, Some(target), _) => {
            let target: Target = target.parse().map_err(Failure::usage)?;
            watch::run(vec![watch::Job { name: None, target, workload, destroy: arguments.destroy }], format)?
        }
        _ => return Err(Failure::usage("name a target, or --disk and --layer")),
    };
    output::print(format, &summaries)?;
    match failure {
        Some(failure) => Err(failure),
        None if summaries.iter().all(|summary| summary.is_clean()) => Ok(()),
        None => Err(Failure::failed("there were errors, or data was wrong; see above")),
    }
}

fn workload(arguments: &BenchArgs) -> Workload {
    Workload {
        access: arguments.access,
        pattern: arguments.pattern,
        block_size: arguments.block_sizes.largest(),
        mix: (arguments.block_sizes.shares().len() > 1).then(|| arguments.block_sizes.clone()),
        alignment: arguments.align.map(|size| Size(size.0)),
        queue_depth: arguments.depth,
        threads: arguments.threads,
        runtime: Some(arguments.runtime.0),
        bytes: arguments.bytes.map(|size| Size(size.0)),
        warmup: arguments.warmup.0,
        offset: Size(arguments.offset.0),
        size: arguments.size.map(|size| Size(size.0)),
        rate: arguments.rate,
        arrivals: if arguments.poisson { Arrivals::Poisson } else { Arrivals::Fixed },
        seed: arguments.seed,
        verify: arguments.verify,
        fua: arguments.fua,
    }
}
