//! Hand-made measurements for the tests of this crate.

use std::collections::BTreeMap;

use crate::cell::{Cell, Direction};
use crate::environment::Environment;
use crate::result::{Diagnosis, LayerEntry, Measurement, Position, Row, RunOutcome, SCHEMA};
use crate::tier::Tier;

/// Latency in nanoseconds of each repeat.
#[derive(Clone, Copy)]
pub struct Numbers(pub [f64; 5]);

impl Numbers {
    /// About the same five times: 1 % up and down.
    pub fn steady(latency_ns: f64) -> Numbers {
        Numbers::scattered(latency_ns, 0.01)
    }

    /// Five times, the outermost so far from the middle.
    pub fn scattered(latency_ns: f64, share: f64) -> Numbers {
        Numbers([0.0, -1.0, 1.0, -0.5, 0.5].map(|place| latency_ns * (1.0 + share * place)))
    }
}

/// A row without contradictions: ten seconds in which every I/O took about `latency_ns`.
pub fn measurement(cell: &Cell, latency_ns: f64) -> Measurement {
    let iops = f64::from(cell.queue_depth) * 1e9 / latency_ns;
    let ios = (iops * 10.0) as u64;
    Measurement {
        iops,
        mib_per_s: Some(iops * f64::from(cell.shape.block_bytes) / f64::from(1 << 20)),
        mib_per_s_step: 0.0,
        mean_ns: Some(latency_ns),
        p50_ns: Some(latency_ns),
        p99_ns: Some(latency_ns * 3.0),
        p99_9_ns: Some(latency_ns * 7.0),
        max_ns: Some(latency_ns * 9.0),
        ios: Some(ios),
        errors: 0,
        cpu_seconds: Some(ios as f64 * 1e-7),
        bytes: Some(ios * u64::from(cell.shape.block_bytes)),
        runtime_seconds: Some(10.0),
        ..Measurement::default()
    }
}

pub fn environment() -> Environment {
    Environment {
        disk: "db1".into(),
        node: "n1".into(),
        started_unix: 1_700_000_000,
        kernel: "6.12.1".into(),
        cpu: "Example CPU".into(),
        cores: 8,
        memory_bytes: 64 << 30,
        governor: Some("performance".into()),
        load_average: 0.25,
        command: "weir diagnose --disk db1 --seed 7".into(),
        imported_from: Vec::new(),
        versions: BTreeMap::from([("weir".into(), "0.1.0".into())]),
    }
}

/// The quick tier's cells at the given layers; `numbers(layer, cell)` gives the latencies of the repeats.
pub fn measured(layers: Vec<LayerEntry>, numbers: impl Fn(usize, &Cell) -> Numbers) -> Diagnosis {
    let cells = Tier::Quick.cells();
    let mut rows = Vec::new();
    for repeat in 1..=5_u32 {
        for cell in &cells {
            for (index, layer) in layers.iter().enumerate() {
                let latency = numbers(index, cell).0[repeat as usize - 1];
                let outcome = RunOutcome::Measured(measurement(cell, latency));
                rows.push(Row { layer: layer.name.clone(), cell: *cell, repeat, outcome, counters: None });
            }
        }
    }
    let environment = environment();
    let schema = SCHEMA.to_owned();
    Diagnosis {
        schema,
        environment,
        cells,
        follow_ups: Vec::new(),
        layers,
        repeats: 5,
        seed: 7,
        interrupted: false,
        rows,
    }
}

/// Layers on the path, each with the same latencies in every cell.
pub fn chain(layers: &[(&str, Numbers)]) -> Diagnosis {
    let entries = layers
        .iter()
        .map(|(name, _)| LayerEntry { name: (*name).to_owned(), position: Position::OnPath })
        .collect();
    measured(entries, |layer, _| layers[layer].1)
}

/// A disk with `write-back+1`: writes are faster than at the backing, the export costs most.
pub fn write_back() -> Diagnosis {
    let on_the_way = |name: &str| LayerEntry { name: name.into(), position: Position::OnPath };
    let beside = |name: &str| LayerEntry {
        name: name.into(),
        position: Position::AlternativeTo("accel write-back+1".into()),
    };
    let layers = vec![
        on_the_way("backing"),
        beside("accel write-through"),
        beside("accel write-back+0"),
        on_the_way("accel write-back+1"),
        beside("accel write-back+2"),
        on_the_way("nbd export"),
    ];
    let writes = [90e3, 94e3, 6e3, 38e3, 55e3, 92e3];
    let reads = [80e3, 82e3, 82e3, 82e3, 82e3, 130e3];
    measured(layers, move |layer, cell| {
        let base = if cell.shape.direction == Direction::Write { writes[layer] } else { reads[layer] };
        let depth = if cell.queue_depth == 1 { 1.0 } else { 6.0 };
        let size = if cell.shape.block_bytes > 100_000 { 4.0 } else { 1.0 };
        Numbers::scattered(base * depth * size, 0.02)
    })
}
