//! An HTML page of sections.
//!
//! It makes no network request: style and drawings are inline, there is no script, and its content security policy forbids
//! loading anything. The template escapes every text, except drawings, which escape their own.

use askama::Template;

use crate::panel::Panel;

/// A page.
#[derive(Debug, Default, Template)]
#[template(path = "page.html")]
pub struct Page {
    /// The window's title.
    pub title: String,
    /// The kind of report, above the heading.
    pub eyebrow: String,
    /// The heading.
    pub heading: String,
    /// Place and time, below the heading.
    pub byline: String,
    /// Text after "Made by Weir".
    pub footer: String,
    /// The sections, from the top.
    pub sections: Vec<Section>,
}

/// A section: a heading, a sentence on how to read it, and its content.
#[derive(Debug, Default)]
pub struct Section {
    /// Its style: `verdict cost`, `chart`, or empty.
    pub class: String,
    /// Text above the heading; may be empty.
    pub eyebrow: String,
    /// The heading.
    pub heading: String,
    /// Below the heading; may be empty.
    pub lead: String,
    /// The content.
    pub blocks: Vec<Block>,
}

/// A part of a section.
#[derive(Debug)]
pub enum Block {
    /// A heading within the section.
    Heading(String),
    /// A sentence in soft type.
    Note(String),
    /// Sentences, in the style `plain`, `limits` or none.
    List(&'static str, Vec<String>),
    /// Sentences with a heading, in the style `caution` or `guess`.
    Box(&'static str, String, Vec<String>),
    /// Single numbers.
    Figures(Vec<Figure>),
    /// Boxes with arrows from each to the next.
    Chain(Vec<Stop>),
    /// Colours and their meanings.
    Legend(Vec<Key>),
    /// Drawings, `two` or `three` in a row where there is room.
    Panels(&'static str, Vec<Panel>),
    /// A table.
    Table(Table),
    /// Terms and their values, line by line.
    Facts(Vec<(String, String)>),
    /// A command, to be copied.
    Command(String),
}

/// A single number.
#[derive(Debug)]
pub struct Figure {
    /// Its subject.
    pub of: String,
    /// The number.
    pub value: String,
    /// Its meaning, or its source.
    pub remark: String,
}

/// A box of a chain.
#[derive(Debug)]
pub struct Stop {
    /// Its name.
    pub name: String,
    /// Alternatives for its position.
    pub alternatives: Vec<String>,
}

/// An entry of a legend.
#[derive(Debug)]
pub struct Key {
    /// Classes of the colours, from left to right.
    pub colours: Vec<&'static str>,
    /// Their meaning.
    pub meaning: String,
}

impl Key {
    /// One colour.
    #[must_use]
    pub fn new(colour: &'static str, meaning: &str) -> Key {
        Key { colours: vec![colour], meaning: meaning.to_owned() }
    }
}

/// A table. On a narrow screen its rows become lists of labelled numbers, so that no column is cut off; a table that is too wide
/// for a wide screen scrolls within a box of its own.
#[derive(Debug, Default)]
pub struct Table {
    /// Its style: `matrix`, `matrix dense`, `suspicions`, or empty.
    pub class: &'static str,
    /// The heading of the first column.
    pub first: String,
    /// The other columns. If a group has a name, a line of names precedes that of the columns.
    pub groups: Vec<Group>,
    /// The rows.
    pub rows: Vec<Row>,
}

/// Columns with a common heading.
#[derive(Debug)]
pub struct Group {
    /// The heading; may be empty.
    pub name: String,
    /// Below it, in small type; may be empty.
    pub note: String,
    /// Headings of the columns.
    pub columns: Vec<String>,
}

impl Group {
    /// Columns without a common heading.
    #[must_use]
    pub fn of<const N: usize>(columns: [&str; N]) -> Group {
        let columns = columns.map(str::to_owned).to_vec();
        Group { name: String::new(), note: String::new(), columns }
    }
}

/// A row.
#[derive(Debug, Default)]
pub struct Row {
    /// `other`: set off from the rows around it. Or empty.
    pub class: &'static str,
    /// The text of the first column.
    pub name: String,
    /// Below the name, in small type; may be empty.
    pub note: String,
    /// The note's colour.
    pub note_class: &'static str,
    /// The cells, one for each other column.
    pub cells: Vec<Cell>,
}

/// A cell.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// Its text; several are paragraphs.
    pub lines: Vec<String>,
    /// Beside the text, in small type; may be empty.
    pub remark: String,
    /// The class of its weight or colour.
    pub class: String,
    /// The mark of a coloured tile, before the text.
    pub mark: Option<&'static str>,
    /// The tooltip; may be empty.
    pub tip: String,
    /// The first of its group, set off from the group before.
    pub begins: bool,
}

impl Cell {
    /// A cell with one text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Cell {
        Cell { lines: vec![text.into()], ..Cell::default() }
    }
}

impl Table {
    fn has_names(&self) -> bool {
        self.groups.iter().any(|group| !group.name.is_empty())
    }

    /// The label of a column's cells where a narrow screen shows them under each other.
    fn label(&self, column: &usize) -> String {
        let labels = self.groups.iter().flat_map(|group| {
            let name = &group.name;
            group.columns.iter().map(move |column| format!("{name} {column}").trim().to_owned())
        });
        labels.into_iter().nth(*column).unwrap_or_default()
    }
}

impl Cell {
    fn is_blank(&self) -> bool {
        self.lines.iter().all(String::is_empty)
    }
}

impl Page {
    /// The page as one HTML document.
    ///
    /// # Errors
    /// Never in practice: the template only fails when its output cannot be written, and it writes to memory.
    pub fn html(&self) -> Result<String, crate::RenderError> {
        self.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let cell = Cell { mark: Some("▲"), class: "slow2".into(), begins: true, ..Cell::text("1.3×") };
        let row = Row { name: "4K <read>".into(), cells: vec![cell, Cell::text("")], ..Row::default() };
        let group = Group { name: "export".into(), ..Group::of(["QD 1", "QD 32"]) };
        let table = Table { class: "matrix", first: "load".into(), groups: vec![group], rows: vec![row] };
        let section = Section {
            heading: "Every load".into(),
            blocks: vec![Block::Table(table), Block::Command("weir diagnose <i>".into())],
            ..Section::default()
        };
        Page { title: "A <title>".into(), sections: vec![section], ..Page::default() }
    }

    #[test]
    fn a_page_needs_no_network_and_runs_no_script() {
        let html = page().html().unwrap();
        for text in ["http:", "https:", "<script", "@import", "url(", "src=", "<i>", "<read>"] {
            assert!(!html.contains(text), "{text}");
        }
        assert!(html.contains("default-src 'none'"));
    }

    #[test]
    fn tables_scroll_in_a_box_of_their_own() {
        let html = page().html().unwrap();
        assert_eq!(html.matches("<table").count(), html.matches(r#"<div class="scroll""#).count());
        assert!(html.contains(r#"colspan="2""#) && html.contains("QD 32"), "{html}");
        assert!(html.contains(r#"<span class="tile slow2"><b>▲</b>1.3×</span>"#), "{html}");
    }

    /// At 420 pixels no table is wider than the screen: each cell carries its heading, rows wrap, and drawings scale.
    #[test]
    fn nothing_has_a_fixed_width_that_a_narrow_screen_cuts() {
        let html = page().html().unwrap();
        assert!(
            html.contains(r#"data-label="export QD 1""#) && html.contains(r#"data-label="export QD 32""#),
            "{html}"
        );
        let narrow =
            &html[html.find("@media (max-width: 720px)").unwrap()..html.find("@media print").unwrap()];
        for rule in
            ["content: attr(data-label)", "thead { display: none; }", "flex-wrap: wrap", "min-width: 0"]
        {
            assert!(narrow.contains(rule), "{rule} in {narrow}");
        }
        let css = include_str!("../templates/report.css");
        assert!(css.contains("svg { display: block; width: 100%; height: auto"), "drawings scale");
        let wide =
            css.split("width: ").skip(1).filter_map(|rest| rest.split("px").next()?.parse::<u32>().ok());
        let beyond: Vec<u32> =
            wide.filter(|pixels| *pixels > 384 && ![620, 720, 1120].contains(pixels)).collect();
        assert!(beyond.is_empty(), "wider than a narrow screen: {beyond:?}");
    }
}
