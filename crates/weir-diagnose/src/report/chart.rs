//! A chart of a report: one question, how to read the answer, and its panels.

use weir_report::page::{Block, Key, Section};
use weir_report::panel::Panel;

/// The shades of a heat map over time, and the lines below it.
pub const HEAT: &[(&str, &str)] = &[
    ("heat0", "a few"),
    ("heat1", "0.2 %"),
    ("heat2", "2 %"),
    ("heat3", "10 %"),
    ("heat4", "30 %"),
    ("heat5", "60 % of the I/Os of a moment and more"),
    ("rate", "I/Os per second of this run"),
    ("repeat", "of its repeats"),
];

/// A chart: one question, one panel for each load.
pub struct Chart {
    /// The question.
    pub title: &'static str,
    /// The explanation of the answer.
    pub how_to_read: String,
    /// Colours and their meaning.
    pub legend: &'static [(&'static str, &'static str)],
    /// Panels in groups; the reader compares those of one group.
    pub groups: Vec<Panels>,
}

/// Panels that are compared with each other.
pub struct Panels {
    /// Above them; may be empty.
    pub title: String,
    /// `two` or `three` in a row.
    pub class: &'static str,
    /// From left to right.
    pub panels: Vec<Panel>,
}

impl Chart {
    /// One group without a title, two in a row.
    pub fn only(panels: Vec<Panel>) -> Vec<Panels> {
        vec![Panels { title: String::new(), class: "two", panels }]
    }

    /// Whether there is anything to see.
    pub fn is_drawn(&self) -> bool {
        self.groups.iter().any(|group| !group.panels.is_empty())
    }

    /// The chart as a section of the page.
    pub fn section(self) -> Section {
        let mut blocks = Vec::new();
        if !self.legend.is_empty() {
            blocks
                .push(Block::Legend(self.legend.iter().map(|(class, word)| Key::new(class, word)).collect()));
        }
        for group in self.groups {
            blocks.extend((!group.title.is_empty()).then_some(Block::Heading(group.title)));
            blocks.push(Block::Panels(group.class, group.panels));
        }
        Section {
            class: "chart".to_owned(),
            heading: self.title.to_owned(),
            lead: self.how_to_read,
            blocks,
            ..Section::default()
        }
    }
}
