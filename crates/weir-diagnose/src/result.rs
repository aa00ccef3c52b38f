//! The rows of a measurement, and everything needed to judge or repeat them, as one JSON document.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use weir_load::summary::Buckets;
use weir_load::timeline::Timeline;

use crate::cell::Cell;
use crate::counters::Counters;
use crate::environment::Environment;
use crate::json;

/// The schema's name and version. Grows when a reader of the old one would misread the new one. `JSON.md` describes it.
pub const SCHEMA: &str = "weir.diagnosis/1";

/// Slots of a row's timeline: enough for a picture, and few enough for the ten thousand rows of an exhaustive measurement.
pub const MOST_SLOTS: usize = 32;

/// The figures of one run of one cell at one layer. Imported rows may have fewer figures than our own; a missing figure is
/// absent, and no check and no finding needs it.
///
/// Latency runs from the issue of a request to its completion, as the load generator saw it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Completed I/Os per second.
    pub iops: f64,
    /// Completed MiB (2^20 bytes) per second.
    #[serde(rename = "mib_per_second")]
    pub mib_per_s: Option<f64>,
    /// The throughput was written down in multiples of this, in MiB per second; 0 where it was measured.
    #[serde(default, rename = "mib_per_second_step")]
    pub mib_per_s_step: f64,
    /// Mean latency, in nanoseconds.
    pub mean_ns: Option<f64>,
    /// Median latency, in nanoseconds.
    pub p50_ns: Option<f64>,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: Option<f64>,
    /// 99.9th percentile, in nanoseconds.
    pub p99_9_ns: Option<f64>,
    /// The longest, in nanoseconds.
    pub max_ns: Option<f64>,
    /// I/Os completed without error in the measured time.
    pub ios: Option<u64>,
    /// I/Os that failed in the measured time.
    pub errors: u64,
    /// CPU time that the generator's own threads used in the measured time, in seconds; absent when they
    /// did other work too.
    pub cpu_seconds: Option<f64>,
    /// Bytes moved in the measured time.
    pub bytes: Option<u64>,
    /// The measured time, in seconds, without warm-up.
    pub runtime_seconds: Option<f64>,
    /// The latencies in at most [`Buckets::THIN`] buckets; empty in rows from elsewhere.
    #[serde(default, skip_serializing_if = "Buckets::is_empty")]
    pub buckets_ns: Buckets,
    /// The run over time, warm-up included, in at most [`MOST_SLOTS`] slots; absent in rows from elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Box<Timeline>>,
}

/// The role of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Position {
    /// An I/O of the disk, as it is configured now, goes through this layer. These layers form a chain,
    /// from the bottom, in the order in which they are given.
    OnPath,
    /// The same place as another layer on the path, under a policy that the disk does not have now. Compared with that layer,
    /// never part of the chain.
    AlternativeTo(String),
    /// Not a layer: something known, run only when a hypothesis asks for it. The generator with nothing to wait for.
    Reference,
}

/// A layer of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerEntry {
    /// Unique in the measurement.
    pub name: String,
    /// On the path, or an alternative to a layer that is.
    pub position: Position,
}

/// The outcome of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// It ran.
    Measured(Measurement),
    /// The layer cannot run this cell, and why.
    Skipped(String),
    /// It was tried and failed, and why.
    Failed(String),
}

/// One run of one cell at one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The layer's name.
    pub layer: String,
    /// The load.
    pub cell: Cell,
    /// From 1.
    pub repeat: u32,
    /// Its outcome.
    pub outcome: RunOutcome,
    /// The operating system's counters meanwhile; absent if they were not sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<Counters>,
}

/// A whole measurement, complete or not. Rows are in the order in which they ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// [`SCHEMA`].
    pub schema: String,
    /// The machine, the disk, the command.
    pub environment: Environment,
    /// The cells that were planned.
    pub cells: Vec<Cell>,
    /// Further cells, measured for a hypothesis.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub follow_ups: Vec<Cell>,
    /// The layers, from the bottom.
    pub layers: Vec<LayerEntry>,
    /// Planned repeats of each cell at each layer. Rows of further repeats are there where they were needed.
    pub repeats: u32,
    /// The seed of the order of the runs.
    pub seed: u64,
    /// Stopped before all was run. Then `rows` is what there is.
    pub interrupted: bool,
    /// One per layer, cell and repeat.
    pub rows: Vec<Row>,
}

/// The same without its schema, for a document that begins with other fields.
#[derive(Serialize)]
pub(crate) struct WithoutSchema<'a> {
    environment: &'a Environment,
    cells: &'a [Cell],
    #[serde(skip_serializing_if = "<[Cell]>::is_empty")]
    follow_ups: &'a [Cell],
    layers: &'a [LayerEntry],
    repeats: u32,
    seed: u64,
    interrupted: bool,
    rows: &'a [Row],
}

/// A document that is not a measurement this version can read.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Not JSON, or not of this shape.
    #[error("the document is not a layered measurement: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Written by another version.
    #[error(
        "its schema is {found:?}; this version of weir reads {SCHEMA:?}: measure again, or use the version that wrote it"
    )]
    Schema {
        /// The document's schema.
        found: String,
    },
    /// Rows, layers and cells contradict each other.
    #[error("the document contradicts itself: {0}")]
    Inconsistent(String),
}

impl Diagnosis {
    pub(crate) fn without_schema(&self) -> WithoutSchema<'_> {
        WithoutSchema {
            environment: &self.environment,
            cells: &self.cells,
            follow_ups: &self.follow_ups,
            layers: &self.layers,
            repeats: self.repeats,
            seed: self.seed,
            interrupted: self.interrupted,
            rows: &self.rows,
        }
    }

    /// Runs that were planned, or that were done where further repeats made them more.
    #[must_use]
    pub fn planned_runs(&self) -> usize {
        self.runs_of_plan().max(self.rows.len())
    }

    /// Every planned repeat of every cell at every layer.
    fn runs_of_plan(&self) -> usize {
        self.layers_compared().count() * self.cells.len() * self.repeats as usize
    }

    /// Of an interrupted measurement: how many of the planned runs have a row, and how many there are. `None` where all have:
    /// what is missing then are further repeats, or runs that hypotheses asked for.
    #[must_use]
    pub fn done_of_plan(&self) -> Option<(usize, usize)> {
        let layers: Vec<&str> =
            self.layers_compared().map(|layer| self.layers[layer].name.as_str()).collect();
        let of_plan = |row: &&Row| {
            row.repeat <= self.repeats
                && layers.contains(&row.layer.as_str())
                && self.cells.contains(&row.cell)
        };
        let (done, planned) = (self.rows.iter().filter(of_plan).count(), self.runs_of_plan());
        (done < planned).then_some((done, planned))
    }

    /// The planned cells, and those that were added later.
    pub fn all_cells(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().chain(&self.follow_ups)
    }

    /// The places in `layers` of all but the references.
    pub fn layers_compared(&self) -> impl Iterator<Item = usize> {
        let layers = self.layers.iter().enumerate();
        layers.filter(|(_, layer)| layer.position != Position::Reference).map(|(place, _)| place)
    }

    /// The layers on the I/O's way, from the bottom, with their place in `layers`.
    pub fn chain(&self) -> impl Iterator<Item = (usize, &LayerEntry)> {
        self.layers.iter().enumerate().filter(|(_, layer)| layer.position == Position::OnPath)
    }

    /// The place in `layers` of the layer of that name.
    #[must_use]
    pub fn layer_index(&self, name: &str) -> Option<usize> {
        self.layers.iter().position(|layer| layer.name == name)
    }

    /// The document, indented, with a newline at its end.
    ///
    /// # Errors
    /// A number in a row is not finite; [`crate::measure`] never leaves such a row.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        json::indented(self)
    }

    /// Reads a document that [`Diagnosis::to_json`] wrote.
    ///
    /// # Errors
    /// Not JSON, another schema, or rows that name layers or cells which the document does not list.
    pub fn from_json(text: &str) -> Result<Diagnosis, DocumentError> {
        #[derive(Deserialize)]
        struct Head {
            schema: String,
        }
        // The schema first: the error for a document of another version must name that, not a missing field.
        let head: Head = serde_json::from_str(text)?;
        if head.schema != SCHEMA {
            return Err(DocumentError::Schema { found: head.schema });
        }
        let diagnosis: Diagnosis = serde_json::from_str(text)?;
        diagnosis.check().map_err(DocumentError::Inconsistent)?;
        Ok(diagnosis)
    }

    fn check(&self) -> Result<(), String> {
        check_layers(&self.layers)?;
        for row in &self.rows {
            if self.layer_index(&row.layer).is_none() {
                return Err(format!("a row names the layer {:?}, which is not listed", row.layer));
            }
            if !self.all_cells().any(|cell| *cell == row.cell) {
                return Err(format!("a row names the cell \"{}\", which is not listed", row.cell));
            }
        }
        Ok(())
    }
}

/// Names are unique and not empty, and alternatives refer to layers on the path.
pub(crate) fn check_layers(layers: &[LayerEntry]) -> Result<(), String> {
    let mut seen = HashSet::new();
    for layer in layers {
        if layer.name.trim().is_empty() {
            return Err("a layer has no name".to_owned());
        }
        if !seen.insert(layer.name.as_str()) {
            return Err(format!("two layers are named {:?}", layer.name));
        }
        if let Position::AlternativeTo(other) = &layer.position {
            let found = layers.iter().find(|candidate| &candidate.name == other);
            if found.is_none_or(|candidate| candidate.position != Position::OnPath) {
                return Err(format!(
                    "{:?} is given as an alternative to {other:?}, which is not a layer of the I/O path",
                    layer.name
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn a_measurement_survives_json() {
        let mut diagnosis = sample::write_back();
        diagnosis.rows[0].outcome = RunOutcome::Skipped("no \"such\" thing".into());
        diagnosis.rows[1].outcome = RunOutcome::Failed("connection <refused>".into());
        let text = diagnosis.to_json().unwrap();
        assert_eq!(Diagnosis::from_json(&text).unwrap(), diagnosis);
    }

    #[test]
    fn another_schema_is_named_before_anything_else() {
        let error = Diagnosis::from_json(r#"{"schema":"weir-diagnose/2","rows":7}"#).unwrap_err();
        assert!(error.to_string().contains("weir-diagnose/2"), "{error}");
        assert!(matches!(Diagnosis::from_json("{}"), Err(DocumentError::Malformed(_))));
    }

    #[test]
    fn a_document_that_contradicts_itself_is_refused() {
        let break_it = |change: fn(&mut Diagnosis)| {
            let mut diagnosis = sample::write_back();
            change(&mut diagnosis);
            Diagnosis::from_json(&diagnosis.to_json().unwrap()).unwrap_err().to_string()
        };
        assert!(break_it(|d| d.rows[0].layer = "moon".into()).contains("moon"));
        assert!(break_it(|d| d.rows[0].cell.queue_depth = 7).contains("QD 7"));
        assert!(break_it(|d| d.layers[1].name = d.layers[0].name.clone()).contains("two layers"));
        assert!(
            break_it(|d| d.layers[0].position = Position::AlternativeTo("moon".into()))
                .contains("not a layer of")
        );
    }
}
