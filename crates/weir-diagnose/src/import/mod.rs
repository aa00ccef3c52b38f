//! Rows from elsewhere: hand-typed tables, fio's JSON, DiskSpd's XML.
//!
//! They become the same rows as our own and go through the same checks and statistics. A figure that a file lacks stays
//! absent; an impossible one is an error that names its place.

mod csv;
mod diskspd;
mod fio;

use std::collections::{BTreeMap, BTreeSet};

use crate::cell::{Cell, Direction, Pattern, Shape};
use crate::environment::Environment;
use crate::result::{Diagnosis, LayerEntry, Measurement, Position, Row, RunOutcome, SCHEMA, check_layers};

/// Largest file that is read, in bytes.
pub const LARGEST_FILE: u64 = 64 << 20;

/// Most rows of one import.
const MOST_ROWS: usize = 100_000;

/// Most loads of layers, each with its repeats: as many as an exhaustive measurement has. Comparing them takes a time that grows
/// with the square of their number.
const MOST_LOADS: usize = 10_000;

/// Most layers of one import.
const MOST_LAYERS: usize = 64;

/// Longest name of a layer, in characters.
const LONGEST_NAME: usize = 100;

/// Largest block of a load, in bytes.
const LARGEST_BLOCK: u64 = 1 << 30;

/// Deepest queue of a load.
const DEEPEST_QUEUE: u32 = 1 << 20;

/// The problem with a file, and its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}{place}: {problem}")]
pub struct ImportError {
    file: String,
    place: String,
    problem: String,
}

/// One row, before the layers are put together.
struct Parsed {
    /// For messages: `, line 3`, `, job "seq"`.
    place: String,
    cell: Cell,
    measurement: Measurement,
    /// Why the run failed, if it did: its numbers are those of a part of it.
    failed: Option<String>,
}

/// Files that have been read. Layers stand in the order in which they first come up, from the bottom.
#[derive(Clone, Debug, Default)]
pub struct Import {
    layers: Vec<LayerEntry>,
    rows: Vec<Row>,
    /// Repeats so far of each layer and cell.
    repeats: BTreeMap<(String, Cell), u32>,
    files: Vec<String>,
}

impl Import {
    /// Reads a hand-typed table; it names the layers itself.
    ///
    /// # Errors
    /// The line and column that cannot be read, and the permitted values.
    pub fn csv(self, file: &str, text: &str) -> Result<Import, ImportError> {
        let rows = csv::parse(text);
        let rows = rows.map_err(|(place, problem)| error(file, &place, &problem))?;
        let import = Import { files: with(&self.files, file), ..self };
        rows.into_iter().try_fold(import, |import, row| {
            import.row(file, &row.layer, row.instead_of.as_deref(), row.parsed)
        })
    }

    /// Reads one layer's measurement: fio's JSON or DiskSpd's XML, told apart by their first character. Files of
    /// one layer add up: the same cell once more is a repeat.
    ///
    /// # Errors
    /// The place that cannot be read, or a run that gives no figures of a layer (jobs at the same time, trims).
    pub fn layer(self, layer: &str, file: &str, text: &str) -> Result<Import, ImportError> {
        let parsed = match text.trim_start_matches('\u{feff}').trim_start() {
            xml if xml.starts_with('<') => diskspd::parse(xml),
            text => fio::parse(text),
        };
        let rows = parsed.map_err(|(place, problem)| error(file, &place, &problem))?;
        let import = Import { files: with(&self.files, file), ..self };
        rows.into_iter().try_fold(import, |import, parsed| import.row(file, layer, None, parsed))
    }

    fn row(
        mut self,
        file: &str,
        layer: &str,
        instead_of: Option<&str>,
        parsed: Parsed,
    ) -> Result<Import, ImportError> {
        let wrong = |problem: String| error(file, &parsed.place, &problem);
        if layer.is_empty() || layer.chars().count() > LONGEST_NAME || layer.chars().any(char::is_control) {
            return Err(wrong(format!("a layer's name has 1 to {LONGEST_NAME} printable characters")));
        }
        check_cell(&parsed.cell).map_err(wrong)?;
        if !parsed.measurement.is_finite() {
            return Err(wrong("a number is not finite".to_owned()));
        }
        let position = match instead_of {
            Some(other) => Position::AlternativeTo(other.to_owned()),
            None => Position::OnPath,
        };
        match self.layers.iter().find(|entry| entry.name == layer) {
            Some(entry) if entry.position != position => {
                return Err(wrong(format!("layer {layer:?} has another position in an earlier row")));
            }
            Some(_) => {}
            None => self.layers.push(LayerEntry { name: layer.to_owned(), position }),
        }
        if self.layers.len() > MOST_LAYERS || self.rows.len() >= MOST_ROWS {
            return Err(wrong(format!("more than {MOST_LAYERS} layers or {MOST_ROWS} rows")));
        }
        let cell = parsed.cell;
        let outcome = parsed.failed.map_or(RunOutcome::Measured(parsed.measurement), RunOutcome::Failed);
        let repeat = self.repeats.entry((layer.to_owned(), cell)).or_insert(0);
        *repeat += 1;
        self.rows.push(Row { layer: layer.to_owned(), cell, repeat: *repeat, outcome, counters: None });
        if self.repeats.len() > MOST_LOADS {
            return Err(wrong(format!("more than {MOST_LOADS} different loads of layers")));
        }
        Ok(self)
    }

    /// The measurement that the files make up. Repeats are numbered as they come.
    ///
    /// # Errors
    /// There are no rows, or an alternative names a layer that is not on the path.
    pub fn into_diagnosis<S: AsRef<str>>(
        self,
        title: &str,
        command: impl IntoIterator<Item = S>,
    ) -> Result<Diagnosis, ImportError> {
        let files = self.files.join(", ");
        if self.rows.is_empty() {
            return Err(error(&files, "", "there are no rows"));
        }
        check_layers(&self.layers).map_err(|problem| error(&files, "", &problem))?;
        let mut seen = BTreeSet::new();
        let cells: Vec<Cell> =
            self.rows.iter().map(|row| row.cell).filter(|cell| seen.insert(*cell)).collect();
        let environment = Environment { imported_from: self.files, ..Environment::here(title, "", command) };
        Ok(Diagnosis {
            schema: SCHEMA.to_owned(),
            environment,
            cells,
            follow_ups: Vec::new(),
            layers: self.layers,
            repeats: self.repeats.values().copied().max().unwrap_or(1),
            seed: 0,
            interrupted: false,
            rows: self.rows,
        })
    }
}

fn with(files: &[String], file: &str) -> Vec<String> {
    files.iter().cloned().chain([file.to_owned()]).collect()
}

fn error(file: &str, place: &str, problem: &str) -> ImportError {
    ImportError { file: file.to_owned(), place: place.to_owned(), problem: problem.to_owned() }
}

/// Sizes and depths that no load has are refused, not measured against.
fn check_cell(cell: &Cell) -> Result<(), String> {
    let block = u64::from(cell.shape.block_bytes);
    if block == 0 || block > LARGEST_BLOCK || !block.is_multiple_of(512) {
        return Err(format!(
            "a block of {block} bytes: it must be a multiple of 512, at most {LARGEST_BLOCK}"
        ));
    }
    if cell.threads == 0 || cell.queue_depth < cell.threads || cell.queue_depth > DEEPEST_QUEUE {
        return Err(format!(
            "queue depth {} with {} threads: 1 to {DEEPEST_QUEUE} in all, at least one per thread",
            cell.queue_depth, cell.threads
        ));
    }
    Ok(())
}

/// A cell from what a file says of it.
fn cell(
    block_bytes: u64,
    access: (Pattern, Direction),
    write_through: bool,
    depth: u32,
    threads: u32,
) -> Result<Cell, String> {
    let block_bytes =
        u32::try_from(block_bytes).map_err(|_| format!("a block of {block_bytes} bytes is too large"))?;
    let shape = Shape { write_through, ..Shape::new(block_bytes, access.0, access.1) };
    Ok(Cell { shape, queue_depth: depth, threads, footprint: None })
}

/// Reads and writes with this share of reads.
fn mix(read_percent: u64) -> Result<Direction, String> {
    match u8::try_from(read_percent) {
        Ok(0) => Ok(Direction::Write),
        Ok(100) => Ok(Direction::Read),
        Ok(percent @ 1..=99) => Ok(Direction::Mixed(percent)),
        _ => Err(format!("{read_percent} is no percentage of reads")),
    }
}

#[cfg(test)]
mod tests;
