//! Tables and sentences for people, JSON for programs.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::cli::Output;
use crate::failure::Failure;

/// Prints `value` as JSON, or what `text` makes of it.
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

/// Prints a line to standard output. A reader that has gone (`| head`) is not an error worth a word.
pub fn say(text: &str) -> Result<(), Failure> {
    use std::io::Write;
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// A table without lines, the columns in `right` flush right.
pub fn table(header: &[&str], right: &[usize], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    for row in rows {
        table.add_row(row);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// Key and value, one under the other; empty values are left out.
pub fn list(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    let lines = pairs.iter().filter(|(_, value)| !value.is_empty());
    lines.map(|(key, value)| format!("{key:width$}  {value}")).collect::<Vec<_>>().join("\n")
}
