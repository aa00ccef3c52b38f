//! Measures files, devices and NBD exports as the layers of one way, and writes table, report and JSON.
//!
//! `cargo run --release -p weir-diagnose --example measure -- OUT SECONDS REPEATS SIZE_MIB NAME=TARGET…`
//!
//! Targets come from the bottom up; what they hold is overwritten. `NAME?LAYER=TARGET` is measured in place
//! of the layer `LAYER`. OUT gets the endings `.html` and `.json`.

use std::error::Error;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use weir_diagnose::load::{LoadOptions, LoadTarget};
use weir_diagnose::{Environment, Plan, Progress, Start, Target, Tier, find, measure, report, table};
use weir_load::run::Monitor;

const SEED: u64 = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, out, seconds, repeats, size_mib, layers @ ..] = arguments.as_slice() else {
        return Err("usage: measure OUT SECONDS REPEATS SIZE_MIB NAME=TARGET…".into());
    };
    let options = LoadOptions {
        runtime: Duration::from_secs_f64(seconds.parse()?),
        size: Some(size_mib.parse::<u64>()? << 20),
        destroy: true,
        ..LoadOptions::default()
    };
    let monitor = Monitor::new();
    let layers: Vec<LoadTarget<'_>> =
        layers.iter().map(|text| layer(text, &options, &monitor)).collect::<Result<_, _>>()?;
    layers.iter().try_for_each(LoadTarget::prefill)?;
    let mut targets: Vec<Box<dyn Target + '_>> =
        layers.into_iter().map(|layer| Box::new(layer) as Box<dyn Target + '_>).collect();
    let plan = Plan { repeats: repeats.parse()?, ..Plan::of(Tier::Quick.cells(), SEED) };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut environment = Environment::here(out, host.trim(), &arguments);
    environment.versions.insert("weir-diagnose".into(), env!("CARGO_PKG_VERSION").into());
    let diagnosis =
        measure(&plan, &mut targets, Start::Fresh(environment), &AtomicBool::new(false), &mut say)?;
    let findings = find(&diagnosis);
    println!("{}", table::render(&diagnosis, &findings));
    std::fs::write(format!("{out}.html"), report::html(&diagnosis, &findings)?)?;
    std::fs::write(format!("{out}.json"), report::json(&diagnosis, &findings)?)?;
    Ok(())
}

fn layer<'a>(
    text: &str,
    options: &LoadOptions,
    monitor: &'a Monitor,
) -> Result<LoadTarget<'a>, Box<dyn Error>> {
    let (name, target) = text.split_once('=').ok_or_else(|| format!("{text}: write NAME=TARGET"))?;
    let (name, instead_of) = name.split_once('?').map_or((name, None), |(name, other)| (name, Some(other)));
    let layer = LoadTarget::new(name, target.parse()?, options.clone(), monitor);
    Ok(match instead_of {
        Some(other) => layer.instead_of(other),
        None => layer,
    })
}

fn say(progress: Progress<'_>) {
    if let Progress::Starting { done, total, layer, run } = progress {
        eprintln!("{done}/{total}  repeat {}  {}  {layer}", run.repeat, run.cell);
    }
}
