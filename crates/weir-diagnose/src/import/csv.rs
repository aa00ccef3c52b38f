//! Hand-typed tables: one row for each layer, cell and repeat; columns are found by their name.

use std::collections::HashMap;

use weir_block::size::parse_size;

use super::{Parsed, cell, mix};
use crate::cell::{Direction, Pattern};
use crate::result::Measurement;

/// A row with the layer that it names.
pub struct CsvRow {
    pub layer: String,
    pub instead_of: Option<String>,
    pub parsed: Parsed,
}

const NEEDED: [&str; 5] = ["layer", "block", "access", "queue_depth", "iops"];

const KNOWN: &str = "layer, block, access, queue_depth, iops; and if known: instead_of, threads, write_through, \
                     mib_per_s, mb_per_s, mean_us, p50_us, p99_us, p99_9_us, max_us, ios, errors, runtime_s";

type Problem = (String, String);

/// Reads a table. Lines that begin with `#` are comments.
pub fn parse(text: &str) -> Result<Vec<CsvRow>, Problem> {
    let mut reader = csv::ReaderBuilder::new()
        .comment(Some(b'#'))
        .trim(csv::Trim::All)
        .from_reader(text.trim_start_matches('\u{feff}').as_bytes());
    let at = |error: &csv::Error| {
        error.position().map_or_else(String::new, |place| format!(", line {}", place.line()))
    };
    let header = reader.headers().map_err(|error| (at(&error), error.to_string()))?.clone();
    let columns = columns(&header)?;
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| (at(&error), error.to_string()))?;
        let line = record.position().map_or(0, csv::Position::line);
        let place = format!(", line {line}");
        let fields = Fields { record: &record, columns: &columns };
        rows.push(fields.row(&place).map_err(|problem| (place, problem))?);
    }
    Ok(rows)
}

fn columns(header: &csv::StringRecord) -> Result<HashMap<String, usize>, Problem> {
    let mut columns = HashMap::new();
    for (index, name) in header.iter().enumerate() {
        let name = name.to_ascii_lowercase();
        let known = KNOWN.split([',', ';', ':', ' ']).any(|word| word == name)
            && !["and", "if", "known"].contains(&name.as_str());
        if !known || columns.insert(name.clone(), index).is_some() {
            let problem = format!("column {name:?} is not known, or there twice; columns are {KNOWN}");
            return Err((", header".to_owned(), problem));
        }
    }
    match NEEDED.iter().find(|needed| !columns.contains_key(**needed)) {
        Some(missing) => {
            Err((", header".to_owned(), format!("column {missing:?} is missing; columns are {KNOWN}")))
        }
        None => Ok(columns),
    }
}

struct Fields<'a> {
    record: &'a csv::StringRecord,
    columns: &'a HashMap<String, usize>,
}

impl Fields<'_> {
    fn row(&self, place: &str) -> Result<CsvRow, String> {
        let needed = |column| self.text(column).ok_or_else(|| format!("{column} is empty"));
        let block = parse_size(needed("block")?).map_err(|error| format!("block: {error}"))?;
        let access = access(needed("access")?)?;
        let depth = self.whole("queue_depth")?.ok_or("queue_depth is empty")?;
        let threads = self.whole("threads")?.unwrap_or(1);
        let narrow = |number: u64| u32::try_from(number).map_err(|_| format!("{number} is too large"));
        let through = match self.text("write_through") {
            None | Some("no") => false,
            Some("yes") => true,
            Some(other) => return Err(format!("write_through is {other:?}: yes or no")),
        };
        let cell = cell(block, access, through, narrow(depth)?, narrow(threads)?)?;
        let measurement = self.measurement()?;
        Ok(CsvRow {
            layer: needed("layer")?.to_owned(),
            instead_of: self.text("instead_of").map(str::to_owned),
            parsed: Parsed { place: place.to_owned(), cell, measurement, failed: None },
        })
    }

    fn measurement(&self) -> Result<Measurement, String> {
        let (mib, mb) = (self.decimal("mib_per_s")?, self.decimal("mb_per_s")?);
        if mib.is_some() && mb.is_some() {
            return Err("mib_per_s and mb_per_s are both given: give one of them".to_owned());
        }
        let to_mib = if mb.is_some() { 1e6 / f64::from(1 << 20) } else { 1.0 };
        let throughput = mib.or(mb);
        let micros = |column| Ok::<_, String>(self.decimal(column)?.map(|(micros, _)| micros * 1e3));
        Ok(Measurement {
            iops: self.decimal("iops")?.ok_or("iops is empty")?.0,
            mib_per_s: throughput.map(|(rate, _)| rate * to_mib),
            mib_per_s_step: throughput.map_or(0.0, |(_, step)| step * to_mib),
            mean_ns: micros("mean_us")?,
            p50_ns: micros("p50_us")?,
            p99_ns: micros("p99_us")?,
            p99_9_ns: micros("p99_9_us")?,
            max_ns: micros("max_us")?,
            ios: self.whole("ios")?,
            errors: self.whole("errors")?.unwrap_or(0),
            cpu_seconds: None,
            bytes: None,
            runtime_seconds: self.decimal("runtime_s")?.map(|(seconds, _)| seconds),
            ..Measurement::default()
        })
    }

    /// `None` where the column is missing or empty.
    fn text(&self, column: &str) -> Option<&str> {
        self.columns.get(column).and_then(|index| self.record.get(*index)).filter(|text| !text.is_empty())
    }

    fn whole(&self, column: &str) -> Result<Option<u64>, String> {
        let parse =
            |text: &str| text.parse().map_err(|_| format!("{column} is {text:?}: a whole number is needed"));
        self.text(column).map(parse).transpose()
    }

    /// A number, and the size of its last digit: `138` may be anything from 137 to 139.
    fn decimal(&self, column: &str) -> Result<Option<(f64, f64)>, String> {
        let Some(text) = self.text(column) else { return Ok(None) };
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
        let number =
            number.ok_or_else(|| format!("{column} is {text:?}: a number is needed, such as 138 or 4.2"))?;
        let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len().min(9));
        Ok(Some((number, 0.1_f64.powi(i32::try_from(decimals).unwrap_or(0)))))
    }
}

/// fio's words, or those of people: `seqwrite`, `sequential write`.
fn access(text: &str) -> Result<(Pattern, Direction), String> {
    let lower = text.to_ascii_lowercase().replace([' ', '-', '_'], "");
    let (word, percent) =
        lower.split_once(':').map_or((lower.as_str(), None), |(word, percent)| (word, Some(percent)));
    let pattern = if word.starts_with("rand") { Pattern::Random } else { Pattern::Sequential };
    let kind = ["sequential", "random", "seq", "rand"]
        .iter()
        .find_map(|prefix| word.strip_prefix(prefix))
        .unwrap_or(word);
    let unknown =
        || format!("access {text:?}: use read, write, randread, randwrite, or randrw:70 for 70 % reads");
    let direction = match (kind, percent) {
        ("read", None) => Direction::Read,
        ("write", None) => Direction::Write,
        ("rw", Some(percent)) => mix(percent.trim_end_matches('%').parse().map_err(|_| unknown())?)?,
        ("rw", None) => Direction::Mixed(50),
        _ => return Err(unknown()),
    };
    Ok((pattern, direction))
}
