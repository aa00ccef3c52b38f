//! Tables and sentences for people, JSON for programs.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};
use serde::Serialize;
use weir_report::text::wrap;

use crate::failure::Failure;
use crate::options::Output;

/// Whether notes are JSON, as the command line asks for results and errors; see [`notes_as_json`].
static NOTES_ARE_JSON: AtomicBool = AtomicBool::new(false);

/// A remark of [`note`] for a program.
#[derive(Serialize)]
struct Note<'a> {
    note: &'a str,
}

/// From now on, every line on standard error is JSON: a reader need not separate notes from the error.
pub fn notes_as_json() {
    NOTES_ARE_JSON.store(true, Ordering::Relaxed);
}

/// Prints a remark beside the result to standard error: text, or `{"schema":"weir.note/1","note":…}`.
pub fn note(text: &str) {
    let json = NOTES_ARE_JSON.load(Ordering::Relaxed).then(|| to_line("weir.note/1", &Note { note: text }));
    match json {
        Some(Ok(line)) => to_stderr(&line),
        _ => to_stderr(text),
    }
}

/// A line on standard error. One that cannot be written there can be told nowhere, and must not end what it is about: `eprintln!` panics
/// where the reader is gone, or the file system full.
pub fn to_stderr(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints `value` as JSON, or as text by `text`.
pub fn print<T: Serialize>(
    output: Output,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    let out = match output {
        Output::Json => serde_json::to_string_pretty(value).map_err(Failure::failed)?,
        Output::Text => text(value),
    };
    say(&out)
}

/// An answer with the name and version of its JSON form.
#[derive(Serialize)]
struct Answer<'a, T> {
    schema: &'static str,
    #[serde(flatten)]
    value: &'a T,
}

/// Prints `value` as JSON of that schema, or as text by `text`.
pub fn print_as<T: Serialize>(
    output: Output,
    schema: &'static str,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    print(output, &Answer { schema, value }, |answer| text(answer.value))
}

/// `value` as one line of JSON of that schema.
pub fn to_line<T: Serialize>(schema: &'static str, value: &T) -> Result<String, Failure> {
    serde_json::to_string(&Answer { schema, value }).map_err(Failure::failed)
}

/// Prints a line to standard output. A closed pipe (`| head`) is not reported as an error.
pub fn say(text: &str) -> Result<(), Failure> {
    goes_on(text).map(drop)
}

/// Prints one of several lines. False when the reader has closed the pipe: the caller stops.
pub fn goes_on(text: &str) -> Result<bool, Failure> {
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Width of the output, in columns: that of the terminal, or `COLUMNS`; `None` for lines of any length.
pub fn width() -> Option<usize> {
    let terminal = std::io::stdout().is_terminal().then(|| ratatui::crossterm::terminal::size().ok());
    let asked = || std::env::var("COLUMNS").ok()?.parse().ok();
    terminal.flatten().map(|(columns, _)| usize::from(columns)).or_else(asked).filter(|&columns| columns > 0)
}

/// Space between columns.
const GAP: usize = 2;

/// A table without lines, the columns in `right` flush right. Where it is wider than [`width`], cells of several words are wrapped.
pub fn table(header: &[&str], right: &[usize], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    table_within(width(), header, right, rows)
}

fn table_within(
    width: Option<usize>,
    header: &[&str],
    right: &[usize],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let mut cells: Vec<Vec<String>> = vec![header.iter().map(|&cell| cell.to_owned()).collect()];
    cells.extend(rows);
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let widths = width.and_then(|width| shrunk(&cells, width));
    for (number, row) in cells.into_iter().enumerate() {
        match number {
            0 => table.set_header(row),
            _ => table.add_row(row),
        };
    }
    if widths.is_some() {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(u16::MAX);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, GAP as u16));
        if right.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if let Some(widths) = &widths {
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed((widths[index] + GAP) as u16)));
        }
    }
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// Widths of columns that fit, when the natural ones do not: those with the longest lines are wrapped first, between words.
fn shrunk(cells: &[Vec<String>], width: usize) -> Option<Vec<usize>> {
    let columns = cells.first().map_or(0, Vec::len);
    let longest = |column: usize, measure: fn(&str) -> usize| {
        cells.iter().filter_map(|row| row.get(column)).map(|cell| measure(cell)).max().unwrap_or(0)
    };
    let characters = |cell: &str| cell.chars().count();
    let word = |cell: &str| cell.split_whitespace().map(|word| word.chars().count()).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..columns).map(|column| longest(column, characters)).collect();
    let least: Vec<usize> = (0..columns).map(|column| longest(column, word)).collect();
    let fits = |widths: &[usize]| widths.iter().sum::<usize>() + GAP * columns.saturating_sub(1) <= width;
    if fits(&widths) {
        return None;
    }
    while !fits(&widths) {
        let room = |&column: &usize| widths[column] > least[column];
        let Some(widest) = (0..columns).filter(room).max_by_key(|&column| widths[column]) else { break };
        widths[widest] -= 1;
    }
    Some(widths)
}

/// Keys and values, one per line; empty values are omitted. Values are wrapped at [`width`].
pub fn list(pairs: &[(&str, String)]) -> String {
    list_within(width(), pairs)
}

fn list_within(width: Option<usize>, pairs: &[(&str, String)]) -> String {
    let shown = || pairs.iter().filter(|(_, value)| !value.is_empty());
    let keys = shown().map(|(key, _)| key.len()).max().unwrap_or(0);
    let line = |key: &str, value: &str| {
        let key = format!("{key:keys$}{:GAP$}", "");
        match width {
            Some(width) => wrap(&key, value, width),
            None => format!("{key}{value}"),
        }
    };
    shown().map(|(key, value)| line(key, value)).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
    }

    #[test]
    fn tables_are_wrapped_between_words_to_fit() {
        let row = || vec!["12".into(), "write-back+1out".into(), "one two three four five six seven".into()];
        let table = |width| table_within(width, &["N", "POLICY", "WHAT"], &[0], [row(), row()]);
        let natural = table(None);
        assert_eq!((widest(&natural), natural.lines().count()), (2 + 2 + 15 + 2 + 33, 3));
        assert_eq!(table(Some(54)), natural);
        for width in [53, 40, 30] {
            let narrow = table(Some(width));
            assert!(widest(&narrow) <= width, "{width}:\n{narrow}");
            for word in ["write-back+1out", "three", "seven"] {
                assert!(narrow.contains(word), "{word} at {width}:\n{narrow}");
            }
        }
        assert!(table(Some(10)).contains("write-back+1out"), "no word is broken");
    }

    #[test]
    fn values_are_wrapped_under_each_other() {
        let pairs = [
            ("disk", "db".to_owned()),
            ("reason", "a b c d e f".to_owned()),
            ("without a value", String::new()),
        ];
        assert_eq!(list_within(None, &pairs), "disk    db\nreason  a b c d e f");
        assert_eq!(list_within(Some(13), &pairs), "disk    db\nreason  a b c\n        d e f");
        let pairs = [("k", "a longer-than-that b".to_owned())];
        assert_eq!(list_within(Some(9), &pairs), "k  a\n   longer-than-that\n   b");
    }
}
