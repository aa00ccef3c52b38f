//! Tables for a terminal: a header line, no lines between columns, and never wider than the terminal.
//!
//! Without enough room, a table omits first its spare columns, then the ends of its names; it never truncates numbers.

use comfy_table::{CellAlignment, ContentArrangement, Row, Table};

use crate::panel::clipped;

/// A header line, nothing between lines, two spaces between columns: fits a terminal and pastes into a mail.
const PRESET: &str = "     ──            ";

/// Maximum width of a table, in columns, also on a wider terminal or without one.
pub const WIDEST: usize = 100;

/// Minimum length of a truncated name, in characters.
const SHORTEST_NAME: usize = 12;

/// Space between columns.
const GAP: usize = 2;

/// A table: the first column has names and is flush left, the others have numbers and are flush right.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Columns that may be omitted, in order of omission.
    spare: Vec<usize>,
}

impl Columns {
    /// A table with these headings.
    #[must_use]
    pub fn new(header: Vec<String>) -> Columns {
        Columns { header, rows: Vec::new(), spare: Vec::new() }
    }

    /// Adds a row. Missing cells are empty.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// These columns, counted from 0, may be omitted without enough room, in this order.
    #[must_use]
    pub fn sparing(mut self, columns: &[usize]) -> Columns {
        self.spare.extend(columns);
        self
    }

    /// Whether it fits in so many columns without omitting anything.
    #[must_use]
    pub fn fits(&self, width: usize) -> bool {
        self.width() <= width
    }

    fn cell(row: &[String], column: usize) -> &str {
        row.get(column).map_or("", String::as_str)
    }

    fn width_of(&self, column: usize) -> usize {
        let cells = std::iter::once(&self.header).chain(&self.rows);
        cells.map(|row| Self::cell(row, column).chars().count()).max().unwrap_or(0)
    }

    fn width(&self) -> usize {
        let columns = (0..self.header.len()).map(|column| self.width_of(column));
        columns.sum::<usize>() + GAP * self.header.len().saturating_sub(1)
    }

    /// Without one column.
    fn without(&self, column: usize) -> Columns {
        let less = |row: &Vec<String>| {
            row.iter()
                .enumerate()
                .filter(|(index, _)| *index != column)
                .map(|(_, cell)| cell.clone())
                .collect()
        };
        Columns {
            header: less(&self.header),
            rows: self.rows.iter().map(less).collect(),
            spare: self
                .spare
                .iter()
                .filter(|other| **other != column)
                .map(|&other| if other > column { other - 1 } else { other })
                .collect(),
        }
    }

    /// The table as text for so many columns, without a newline at its end and without blanks at the ends of lines.
    #[must_use]
    pub fn render(&self, width: usize) -> String {
        if let (false, Some(&column)) = (self.fits(width), self.spare.first()) {
            return self.without(column).render(width);
        }
        let over = self.width().saturating_sub(width);
        let names = self.width_of(0).saturating_sub(over).max(SHORTEST_NAME);
        self.draw(names)
    }

    fn draw(&self, names: usize) -> String {
        let mut table = Table::new();
        table.load_preset(PRESET).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(&self.header);
        for row in &self.rows {
            let cell = |column| match column {
                0 => clipped(Self::cell(row, 0), names),
                _ => Self::cell(row, column).to_owned(),
            };
            table.add_row(Row::from((0..self.header.len()).map(cell).collect::<Vec<_>>()));
        }
        let last = self.header.len().saturating_sub(1);
        for (index, column) in table.column_iter_mut().enumerate() {
            let alignment = if index == 0 { CellAlignment::Left } else { CellAlignment::Right };
            column.set_cell_alignment(alignment);
            column.set_padding((0, if index == last { 0 } else { GAP as u16 - 1 }));
        }
        table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
    }
}

/// Wraps a paragraph at `width`, its first line behind `first` and the others behind as many blanks. Several blanks within a line
/// stay: a line of bars has them.
#[must_use]
pub fn wrap(first: &str, text: &str, width: usize) -> String {
    let indent = first.chars().count();
    let (mut lines, mut line, mut used) = (Vec::new(), first.to_owned(), indent);
    for word in text.split([' ', '\n']) {
        let length = word.chars().count();
        let begins = used == indent;
        if !begins && used + 1 + length > width {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            used = indent;
        }
        if used > indent {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        used += length;
    }
    lines.push(line);
    lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> Columns {
        let header = ["layer", "p50", "±", "p99"].map(str::to_owned).to_vec();
        let mut columns = Columns::new(header).sparing(&[2, 3]);
        columns.push(["a layer with a long name", "90.0 µs", "2 %", "270 µs"].map(str::to_owned).to_vec());
        columns.push(vec!["backing".to_owned(), "rejected".to_owned()]);
        columns
    }

    #[test]
    fn a_table_that_fits_is_shown_whole() {
        let text = columns().render(80);
        let expected = "\
layer                          p50    ±     p99
───────────────────────────────────────────────
a layer with a long name   90.0 µs  2 %  270 µs
backing                   rejected";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_does_not_fit_gives_up_spared_columns_before_names() {
        let narrow = columns().render(45);
        assert!(!narrow.contains('±') && narrow.contains("270 µs"), "{narrow}");
        let narrower = columns().render(36);
        assert!(!narrower.contains("p99") && narrower.contains("long name"), "{narrower}");
        let narrowest = columns().render(30);
        assert!(narrowest.contains("a layer with a long") && narrowest.contains('…'), "{narrowest}");
        for (width, text) in [(45, &narrow), (36, &narrower), (30, &narrowest)] {
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}:\n{text}");
        }
    }

    #[test]
    fn paragraphs_are_wrapped_behind_their_first_words() {
        assert_eq!(wrap("  ", "one two three", 9), "  one two\n  three");
        assert_eq!(wrap("to do: ", "one two", 11), "to do: one\n       two");
        assert_eq!(wrap("", "unbreakable", 4), "unbreakable");
        assert_eq!(wrap("k  ", "▁  █ of it", 10), "k  ▁  █ of\n   it");
    }
}
